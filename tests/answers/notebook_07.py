"""Answers to the exercises of notebook 07: wrong ones, with what the verdict must say, and other right ones."""

from itertools import pairwise

import torch
import torch.distributed as dist

from ddpkit.ring import ring_all_gather, ring_reduce_scatter


def _rank():
    return dist.get_rank()


def _size():
    return dist.get_world_size()


# shard_plan


def _cut(numels, bounds, empty=False, local=True):
    """The parts of parameters between each bound and the next, in a flat buffer."""
    shards = []
    for begin, end in pairwise(bounds):
        parts, first = [], 0
        for parameter, numel in enumerate(numels):
            start, stop = max(begin, first), min(end, first + numel)
            if start < stop or empty:
                parts.append((parameter, start - first * local, max(start, stop) - first * local))
            first += numel
        shards.append(parts)
    return shards


def _bounds(numels, world_size, length=None):
    length = length or -(-sum(numels) // world_size)
    return [rank * length for rank in range(world_size + 1)]


def shard_plan_loses_the_remainder(numels, world_size):
    return _cut(numels, _bounds(numels, world_size, max(1, sum(numels) // world_size)))


def shard_plan_leaves_the_rest_to_the_last(numels, world_size):
    return _cut(numels, [*_bounds(numels, world_size, max(1, sum(numels) // world_size))[:-1], sum(numels)])


def shard_plan_splits_nearly_evenly(numels, world_size):
    sizes = [len(part) for part in torch.arange(sum(numels)).tensor_split(world_size)]
    return _cut(numels, [sum(sizes[:rank]) for rank in range(world_size + 1)])


def shard_plan_by_parameter(numels, world_size):
    shards = [[] for _ in range(world_size)]
    for parameter, numel in enumerate(numels):
        shards[parameter % world_size].append((parameter, 0, numel))
    return shards


def shard_plan_shards_nothing(numels, world_size):
    return [[(parameter, 0, numel) for parameter, numel in enumerate(numels)] for _ in range(world_size)]


def shard_plan_in_flat_numbers(numels, world_size):
    return _cut(numels, _bounds(numels, world_size), local=False)


def shard_plan_keeps_empty_parts(numels, world_size):
    return _cut(numels, _bounds(numels, world_size), empty=True)


def shard_plan_counts_the_padding(numels, world_size):
    padding = -sum(numels) % world_size
    return _cut([*numels[:-1], numels[-1] + padding], _bounds(numels, world_size))


def shard_plan_from_the_end(numels, world_size):
    return _cut(numels, _bounds(numels, world_size))[::-1]


def shard_plan_overlaps(numels, world_size):
    bounds = _bounds(numels, world_size)
    return [_cut(numels, [begin, end + 1])[0] for begin, end in pairwise(bounds)]


def shard_plan_of_this_rank_only(numels, world_size):
    return _cut(numels, _bounds(numels, world_size))[_rank()]


# zero_step


def _shard(x):
    return x.chunk(_size())[_rank()]


def _update(where, gradient, state, lr, beta):
    if not state:
        state["momentum"] = torch.zeros_like(where)
    state["momentum"].mul_(beta).add_(gradient)
    where.sub_(lr * state["momentum"])


def zero_step_sums(parameters, gradients, state, lr=1 / 16, beta=1 / 2):
    _update(_shard(parameters), ring_reduce_scatter(gradients), state, lr, beta)
    ring_all_gather(parameters)


def zero_step_divides_twice(parameters, gradients, state, lr=1 / 16, beta=1 / 2):
    gradients /= _size()
    _update(_shard(parameters), ring_reduce_scatter(gradients) / _size(), state, lr, beta)
    ring_all_gather(parameters)


def zero_step_of_its_own_gradient(parameters, gradients, state, lr=1 / 16, beta=1 / 2):
    _update(_shard(parameters), _shard(gradients), state, lr, beta)
    ring_all_gather(parameters)


def zero_step_gathers_first(parameters, gradients, state, lr=1 / 16, beta=1 / 2):
    gradient = ring_reduce_scatter(gradients) / _size()
    ring_all_gather(parameters)
    _update(_shard(parameters), gradient, state, lr, beta)


def zero_step_gathers_never(parameters, gradients, state, lr=1 / 16, beta=1 / 2):
    _update(_shard(parameters), ring_reduce_scatter(gradients) / _size(), state, lr, beta)


def zero_step_updates_all_with_partial_sums(parameters, gradients, state, lr=1 / 16, beta=1 / 2):
    ring_reduce_scatter(gradients)
    _update(parameters, gradients / _size(), state, lr, beta)


def zero_step_shards_nothing(parameters, gradients, state, lr=1 / 16, beta=1 / 2):
    dist.all_reduce(gradients)
    _update(parameters, gradients / _size(), state, lr, beta)


def zero_step_keeps_state_for_all(parameters, gradients, state, lr=1 / 16, beta=1 / 2):
    gradient = ring_reduce_scatter(gradients) / _size()
    if not state:
        state["momentum"] = torch.zeros_like(parameters)
    momentum = _shard(state["momentum"])
    momentum.mul_(beta).add_(gradient)
    _shard(parameters).sub_(lr * momentum)
    ring_all_gather(parameters)


def zero_step_forgets_its_momentum(parameters, gradients, state, lr=1 / 16, beta=1 / 2):
    _update(_shard(parameters), ring_reduce_scatter(gradients) / _size(), {}, lr, beta)
    ring_all_gather(parameters)


def zero_step_reduces_everything(parameters, gradients, state, lr=1 / 16, beta=1 / 2):
    dist.all_reduce(gradients)
    _update(_shard(parameters), _shard(gradients) / _size(), state, lr, beta)
    ring_all_gather(parameters)


def zero_step_in_a_new_tensor(parameters, gradients, state, lr=1 / 16, beta=1 / 2):
    shard = _shard(parameters).clone()
    _update(shard, ring_reduce_scatter(gradients) / _size(), state, lr, beta)
    ring_all_gather(parameters)


def zero_step_uphill(parameters, gradients, state, lr=1 / 16, beta=1 / 2):
    _update(_shard(parameters), ring_reduce_scatter(gradients) / _size(), state, -lr, beta)
    ring_all_gather(parameters)


_MOMENTA = {}


def zero_step_in_a_global(parameters, gradients, state, lr=1 / 16, beta=1 / 2):
    _update(_shard(parameters), ring_reduce_scatter(gradients) / _size(), _MOMENTA, lr, beta)
    ring_all_gather(parameters)


def zero_step_sends_gradients_twice(parameters, gradients, state, lr=1 / 16, beta=1 / 2):
    ring_reduce_scatter(gradients.clone())
    _update(_shard(parameters), ring_reduce_scatter(gradients) / _size(), state, lr, beta)
    ring_all_gather(parameters)


WRONG = [  # exercise, answer, what the verdict must say
    ("shard_plan", shard_plan_loses_the_remainder, "1 of 9 elements have no owner"),
    ("shard_plan", shard_plan_leaves_the_rest_to_the_last, "Shards have equal length, 5; the last ones are filled up"),
    ("shard_plan", shard_plan_splits_nearly_evenly, "The ranks own [4, 3, 3] elements. Shards have equal length, 4"),
    ("shard_plan", shard_plan_by_parameter, "Cut the flat buffer, not the list of parameters"),
    ("shard_plan", shard_plan_shards_nothing, "that shards nothing"),
    ("shard_plan", shard_plan_in_flat_numbers, "Count start and stop from the parameter's own beginning"),
    ("shard_plan", shard_plan_keeps_empty_parts, "with nothing in it: leave it out"),
    ("shard_plan", shard_plan_counts_the_padding, "the padding belongs to no parameter"),
    ("shard_plan", shard_plan_from_the_end, "Rank 0 owns the beginning of the flat buffer"),
    ("shard_plan", shard_plan_overlaps, "Element 0 of parameter 1 has more than one owner"),
    ("shard_plan", shard_plan_of_this_rank_only, "Return a list for each rank"),
    ("zero_step", zero_step_sums, "The gradient is the sum over the ranks"),
    ("zero_step", zero_step_divides_twice, "divided by the number of ranks twice"),
    ("zero_step", zero_step_of_its_own_gradient, "Rank 0 updated its shard with its own gradient"),
    ("zero_step", zero_step_gathers_first, "or called before the shard was updated"),
    ("zero_step", zero_step_gathers_never, "Was ring_all_gather(parameters) left out"),
    ("zero_step", zero_step_updates_all_with_partial_sums, "with partial sums. Update the shard alone"),
    ("zero_step", zero_step_shards_nothing, "every rank keeps the momentum of all elements"),
    ("zero_step", zero_step_keeps_state_for_all, "every rank keeps the momentum of all elements"),
    ("zero_step", zero_step_forgets_its_momentum, "`state` holds no tensor"),
    ("zero_step", zero_step_reduces_everything, "An all_reduce gives every rank the whole sum; it needs a shard"),
    ("zero_step", zero_step_in_a_new_tensor, "Write into them in place"),
    ("zero_step", zero_step_uphill, "against the gradient"),
    ("zero_step", zero_step_in_a_global, "keep the momentum there, not in a global"),
    ("zero_step", zero_step_sends_gradients_twice, "What is sent twice?"),
]


# Right, though not written as the reference is.


def shard_plan_element_by_element(numels, world_size):
    length = -(-sum(numels) // world_size)
    elements = [(parameter, at) for parameter, numel in enumerate(numels) for at in range(numel)]
    shards = []
    for rank in range(world_size):
        mine = elements[rank * length : (rank + 1) * length]
        spans = {parameter: [at for owner, at in mine if owner == parameter] for parameter, _ in mine}
        shards.append([(parameter, span[0], span[-1] + 1) for parameter, span in spans.items()])
    return shards


def shard_plan_as_tensors(numels, world_size):
    return _cut(numels, torch.tensor(_bounds(numels, world_size)))


def zero_step_divides_first(parameters, gradients, state, lr=1 / 16, beta=1 / 2):
    gradients /= _size()
    _update(_shard(parameters), ring_reduce_scatter(gradients), state, lr, beta)
    ring_all_gather(parameters)


def zero_step_with_torchs_optimizer(parameters, gradients, state, lr=1 / 16, beta=1 / 2):
    shard = torch.nn.Parameter(_shard(parameters))
    shard.grad = ring_reduce_scatter(gradients) / _size()
    optimizer = torch.optim.SGD([shard], lr=lr, momentum=beta)
    optimizer.state[shard]["momentum_buffer"] = state.get("momentum")
    optimizer.step()
    state["momentum"] = optimizer.state[shard]["momentum_buffer"]
    ring_all_gather(parameters)


def zero_step_with_torchs_collectives(parameters, gradients, state, lr=1 / 16, beta=1 / 2):
    gradient = torch.empty_like(_shard(gradients))
    dist.reduce_scatter(gradient, list(gradients.chunk(_size())))
    _update(_shard(parameters), gradient / _size(), state, lr, beta)
    dist.all_gather(list(parameters.chunk(_size())), _shard(parameters).clone())


RIGHT = [
    ("shard_plan", shard_plan_element_by_element),
    ("shard_plan", shard_plan_as_tensors),
    ("zero_step", zero_step_divides_first),
    ("zero_step", zero_step_with_torchs_optimizer),
    ("zero_step", zero_step_with_torchs_collectives),
]
