"""Answers to the exercises of notebook 07 that are right in another way than the reference."""

import torch
import torch.distributed as dist

from ddpkit.ring import ring_all_gather, ring_reduce_scatter
from ddpkit.zero import shard_plan


def _rank():
    return dist.get_rank()


def _size():
    return dist.get_world_size()


def _shard(x):
    return x.chunk(_size())[_rank()]


def _update(where, gradient, state, lr, beta):
    if not state:
        state["momentum"] = torch.zeros_like(where)
    state["momentum"].mul_(beta).add_(gradient)
    where.sub_(lr * state["momentum"])


def shard_plan_element_by_element(numels, world_size):
    length = -(-sum(numels) // world_size)
    elements = [(parameter, at) for parameter, numel in enumerate(numels) for at in range(numel)]
    shards = []
    for rank in range(world_size):
        mine = elements[rank * length : (rank + 1) * length]
        spans = {}
        for parameter, at in mine:
            first, _ = spans.get(parameter, (at, at))
            spans[parameter] = first, at + 1
        shards.append([(parameter, *span) for parameter, span in spans.items()])
    return shards


def shard_plan_as_tensors(numels, world_size):
    plan = shard_plan(numels, world_size)
    return [tuple(tuple(map(torch.tensor, part)) for part in shard) for shard in plan]


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
    if not state:
        state["group"] = {"momenta": [torch.zeros_like(_shard(parameters))]}
    kept = {"momentum": state["group"]["momenta"][0]}
    _update(_shard(parameters), ring_reduce_scatter(gradients) / _size(), kept, lr, beta)
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
