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


def shard_plan_with_inclusive_stops(numels, world_size):
    shards = _cut(numels, _bounds(numels, world_size))
    return [[(parameter, start, stop - 1) for parameter, start, stop in shard] for shard in shards]


def shard_plan_in_lengths(numels, world_size):
    shards = _cut(numels, _bounds(numels, world_size))
    return [[(parameter, start, stop - start) for parameter, start, stop in shard] for shard in shards]


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


def zero_step_gathers_nothing_but_updates_all(parameters, gradients, state, lr=1 / 16, beta=1 / 2):
    shard = torch.zeros_like(_shard(parameters))
    _update(shard, ring_reduce_scatter(gradients) / _size(), state, 1, beta)
    parameters.view(_size(), -1).sub_(lr * state["momentum"])


def zero_step_moves_all_as_the_first(parameters, gradients, state, lr=1 / 16, beta=1 / 2):
    _update(torch.zeros_like(_shard(parameters)), ring_reduce_scatter(gradients) / _size(), state, lr, beta)
    _shard(parameters).sub_(lr * state["momentum"][0])
    ring_all_gather(parameters)


def zero_step_with_the_next_ranks_mean(parameters, gradients, state, lr=1 / 16, beta=1 / 2):
    shards = list(gradients.chunk(_size()))
    gradient = torch.empty_like(shards[0])
    dist.reduce_scatter(gradient, shards[1:] + shards[:1])  # rank r ends with the sum of chunk r+1
    _update(_shard(parameters), gradient / _size(), state, lr, beta)
    ring_all_gather(parameters)


def zero_step_with_its_own_lr(parameters, gradients, state, lr=1 / 16, beta=1 / 2):
    _update(_shard(parameters), ring_reduce_scatter(gradients) / _size(), state, 1 / 16, beta)
    ring_all_gather(parameters)


def zero_step_with_its_own_beta(parameters, gradients, state, lr=1 / 16, beta=1 / 2):
    _update(_shard(parameters), ring_reduce_scatter(gradients) / _size(), state, lr, 1 / 2)
    ring_all_gather(parameters)


def zero_step_with_its_own_lr_and_beta(parameters, gradients, state, lr=1 / 16, beta=1 / 2):
    _update(_shard(parameters), ring_reduce_scatter(gradients) / _size(), state, 1 / 16, 1 / 2)
    ring_all_gather(parameters)


def zero_step_with_lr_in_the_momentum(parameters, gradients, state, lr=1 / 16, beta=1 / 2):
    _update(_shard(parameters), lr * ring_reduce_scatter(gradients) / _size(), state, 1, beta)
    ring_all_gather(parameters)


def zero_step_without_lr(parameters, gradients, state, lr=1 / 16, beta=1 / 2):
    _update(_shard(parameters), ring_reduce_scatter(gradients) / _size(), state, 1, beta)
    ring_all_gather(parameters)


def zero_step_by_nesterov(parameters, gradients, state, lr=1 / 16, beta=1 / 2):
    gradient = ring_reduce_scatter(gradients) / _size()
    _update(torch.zeros_like(gradient), gradient, state, lr, beta)
    _shard(parameters).sub_(lr * (gradient + beta * state["momentum"]))
    ring_all_gather(parameters)


def zero_step_begins_with_a_gradient(parameters, gradients, state, lr=1 / 16, beta=1 / 2):
    gradient = ring_reduce_scatter(gradients) / _size()
    state.setdefault("momentum", gradient.clone())
    _update(_shard(parameters), gradient, state, lr, beta)
    ring_all_gather(parameters)


def zero_step_averages_its_momentum(parameters, gradients, state, lr=1 / 16, beta=1 / 2):
    _update(_shard(parameters), (1 - beta) * ring_reduce_scatter(gradients) / _size(), state, lr, beta)
    ring_all_gather(parameters)


def zero_step_keeps_a_view_of_the_gradients(parameters, gradients, state, lr=1 / 16, beta=1 / 2):
    gradient = ring_reduce_scatter(gradients).div_(_size())
    if not state:
        state["momentum"] = gradient
    else:
        state["momentum"].mul_(beta).add_(gradient)
    _shard(parameters).sub_(lr * state["momentum"])
    ring_all_gather(parameters)


def zero_step_keeps_a_part_of_a_whole(parameters, gradients, state, lr=1 / 16, beta=1 / 2):
    if not state:
        state["momentum"] = _shard(torch.zeros_like(parameters))
    _update(_shard(parameters), ring_reduce_scatter(gradients) / _size(), state, lr, beta)
    ring_all_gather(parameters)


def zero_step_forgets_after_a_step(parameters, gradients, state, lr=1 / 16, beta=1 / 2):
    state.clear()
    _update(_shard(parameters), ring_reduce_scatter(gradients) / _size(), state, lr, beta)
    ring_all_gather(parameters)


def zero_step_counts_its_steps(parameters, gradients, state, lr=1 / 16, beta=1 / 2):
    _update(_shard(parameters), ring_reduce_scatter(gradients) / _size(), state, lr, beta)
    state["steps"] = torch.ones(1)
    ring_all_gather(parameters)


WRONG = [  # exercise, answer, what the verdict must say
    (
        "shard_plan",
        shard_plan_loses_the_remainder,
        "1 of 9 elements have no owner, and would never be updated. 9 // 2 loses",
    ),
    ("shard_plan", shard_plan_leaves_the_rest_to_the_last, "Shards have equal length, 5; the last ones are filled up"),
    ("shard_plan", shard_plan_splits_nearly_evenly, "The ranks own [4, 3, 3] elements. Shards have equal length, 4"),
    ("shard_plan", shard_plan_by_parameter, "Cut the flat buffer, not the list of parameters"),
    ("shard_plan", shard_plan_shards_nothing, "that shards nothing"),
    ("shard_plan", shard_plan_in_flat_numbers, "Count start and stop from the parameter's own beginning"),
    ("shard_plan", shard_plan_keeps_empty_parts, "with nothing in it: leave it out"),
    ("shard_plan", shard_plan_counts_the_padding, "the padding belongs to no parameter"),
    ("shard_plan", shard_plan_from_the_end, "Rank 0 owns the beginning of the flat buffer"),
    ("shard_plan", shard_plan_overlaps, "Element 0 of parameter 1 has more than one owner"),
    (
        "shard_plan",
        shard_plan_with_inclusive_stops,
        "2 of 8 elements have no owner, and would never be updated. Is stop",
    ),
    ("shard_plan", shard_plan_in_lengths, "(0, 4, 1) stops before it starts"),
    ("shard_plan", shard_plan_of_this_rank_only, "Return a list for each rank"),
    ("zero_step", zero_step_sums, "The gradient is the sum over the ranks"),
    ("zero_step", zero_step_divides_twice, "divided by the number of ranks twice"),
    ("zero_step", zero_step_of_its_own_gradient, "Rank 0 updated its shard with its own gradient"),
    ("zero_step", zero_step_gathers_first, "or called before the shard was updated"),
    ("zero_step", zero_step_gathers_never, "Was ring_all_gather(parameters) left out"),
    ("zero_step", zero_step_updates_all_with_partial_sums, "though it has only its own shard's mean"),
    ("zero_step", zero_step_shards_nothing, "every rank keeps the momentum of all elements"),
    ("zero_step", zero_step_keeps_state_for_all, "every rank keeps the momentum of all elements"),
    ("zero_step", zero_step_forgets_its_momentum, "`state` holds no tensor"),
    ("zero_step", zero_step_reduces_everything, "An all_reduce gives every rank the whole sum; it needs a shard"),
    ("zero_step", zero_step_in_a_new_tensor, "Write into them in place"),
    ("zero_step", zero_step_uphill, "against the gradient"),
    ("zero_step", zero_step_in_a_global, "keep the momentum there, not in a global"),
    ("zero_step", zero_step_sends_gradients_twice, "What is sent twice?"),
    ("zero_step", zero_step_gathers_nothing_but_updates_all, "though it has only its own shard's mean"),
    ("zero_step", zero_step_moves_all_as_the_first, "each element with its own"),
    ("zero_step", zero_step_with_the_next_ranks_mean, "the mean that belongs to another"),
    ("zero_step", zero_step_with_its_own_lr, "take those of each call"),
    ("zero_step", zero_step_with_its_own_beta, "take those of each call"),
    ("zero_step", zero_step_with_its_own_lr_and_beta, "take those of each call"),
    ("zero_step", zero_step_with_lr_in_the_momentum, "Keep lr out of the momentum"),
    ("zero_step", zero_step_without_lr, "The update has the wrong size"),
    ("zero_step", zero_step_by_nesterov, "The update has the wrong size"),
    ("zero_step", zero_step_begins_with_a_gradient, "zero at first"),
    ("zero_step", zero_step_averages_its_momentum, "without a factor 1 - beta"),
    ("zero_step", zero_step_keeps_a_view_of_the_gradients, "returns a view of `gradients`"),
    ("zero_step", zero_step_keeps_a_part_of_a_whole, "a view keeps its whole storage alive"),
    ("zero_step", zero_step_forgets_after_a_step, "Is the momentum kept in `state`"),
    ("zero_step", zero_step_counts_its_steps, "`state` has 7 elements: the shard has 6"),
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


def zero_step_keeps_a_list_in_a_group(parameters, gradients, state, lr=1 / 16, beta=1 / 2):
    momentum = state.setdefault("group", {"momenta": [torch.zeros_like(_shard(parameters))]})["momenta"][0]
    _update(_shard(parameters), ring_reduce_scatter(gradients) / _size(), {"momentum": momentum}, lr, beta)
    ring_all_gather(parameters)


def zero_step_remembers_where_its_shard_is(parameters, gradients, state, lr=1 / 16, beta=1 / 2):
    if not state:
        state["shard"] = _shard(parameters)
        state["momentum"] = torch.zeros_like(state["shard"])
    _update(state["shard"], ring_reduce_scatter(gradients) / _size(), state, lr, beta)
    ring_all_gather(parameters)


RIGHT = [
    ("shard_plan", shard_plan_element_by_element),
    ("shard_plan", shard_plan_as_tensors),
    ("zero_step", zero_step_divides_first),
    ("zero_step", zero_step_with_torchs_optimizer),
    ("zero_step", zero_step_with_torchs_collectives),
    ("zero_step", zero_step_keeps_a_list_in_a_group),
    ("zero_step", zero_step_remembers_where_its_shard_is),
]
