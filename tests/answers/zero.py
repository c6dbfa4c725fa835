"""Answers to the exercises of notebook 07 that are right in another way than the reference."""

import torch
import torch.distributed as dist

from ddpkit import exercises as check
from ddpkit.fsdp import ShardedLinear
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


def shard_plan_as_tensors(numels, world_size):
    plan = shard_plan(numels, world_size)
    return [tuple(tuple(map(torch.tensor, part)) for part in shard) for shard in plan]


def zero_step_with_torchs_optimizer(parameters, gradients, state, lr=1 / 16, beta=1 / 2):
    shard = torch.nn.Parameter(_shard(parameters))
    shard.grad = ring_reduce_scatter(gradients) / _size()
    optimizer = torch.optim.SGD([shard], lr=lr, momentum=beta)
    optimizer.state[shard]["momentum_buffer"] = state.get("momentum")
    optimizer.step()
    state["momentum"] = optimizer.state[shard]["momentum_buffer"]
    ring_all_gather(parameters)


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


def model_states_stage_by_stage(parameters, stage, world_size):
    kept = [2 * parameters, 2 * parameters, 12 * parameters]
    shard = (parameters + world_size - 1) // world_size
    for number, place in enumerate((2, 1, 0)[:stage]):
        kept[place] = shard * (12 if number == 0 else 2)
    return kept


def clip_one_reduction_a_tensor(shards, max_norm):
    squares = torch.stack([shard.square().sum() for shard in shards])
    dist.all_reduce(squares)
    norm = squares.sum().sqrt().item()
    for shard in shards:
        shard *= min(1, max_norm / (norm + 1e-9))
    return norm


class GatherUseFreeByAutograd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shard, layer):
        weight, bias = layer.gather()
        ctx.save_for_backward(x, shard)
        ctx.layer = layer
        return x @ weight.T + bias

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        whole = [part.detach().requires_grad_() for part in ShardedLinear.gather(ctx.layer)]
        with torch.enable_grad():
            out = torch.nn.functional.linear(x, *whole)
        to_x, *to_whole = torch.autograd.grad(out, (x, *whole), gradient)
        return to_x, ctx.layer.reduce_scatter(to_whole) / _size(), None


RIGHT = [
    ("model_states", model_states_stage_by_stage),
    ("clip_grad_norm_", clip_one_reduction_a_tensor),
    ("GatherUseFree", GatherUseFreeByAutograd),
    ("shard_plan", shard_plan_as_tensors),
    ("zero_step", zero_step_with_torchs_optimizer),
    ("zero_step", zero_step_keeps_a_list_in_a_group),
    ("zero_step", zero_step_remembers_where_its_shard_is),
]


# Wrong, though the values are right


def shard_plan_empties_its_list(numels, world_size):
    plan = check.shard_plan.reference(list(numels), world_size)
    numels.clear()
    return plan


def clips_into_new_tensors(shards, max_norm):
    norm = check.clip_grad_norm_.reference([shard.clone() for shard in shards], max_norm)
    shards[:] = [shard * (max_norm / (norm + 1e-6)).clamp(max=1) for shard in shards]
    return norm


def clips_by_gathering(shards, max_norm):
    squared = 0
    for shard in shards:
        every = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
        sizes = [torch.zeros(1) for _ in every]
        dist.all_gather(sizes, torch.ones(1))
        dist.all_gather(every, shard)
        squared = squared + torch.cat(every).square().sum()
    norm = squared.sqrt()
    for shard in shards:
        shard *= (max_norm / (norm + 1e-6)).clamp(max=1)
    return norm


def keeps_its_state_in_float64(parameters, gradients, state, lr=1 / 16, beta=1 / 2):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    gradient = ring_reduce_scatter(gradients) / world_size
    shard = parameters.chunk(world_size)[rank]
    state.setdefault("momentum", torch.zeros(len(shard), dtype=torch.float64))
    state["momentum"].mul_(beta).add_(gradient)
    shard.sub_(lr * state["momentum"])
    ring_all_gather(parameters)


class WritesIntoTheGradient(check.GatherUseFree.reference):
    """The gradient is the caller's."""

    @staticmethod
    def backward(ctx, gradient):
        (x,), layer = ctx.saved_tensors, ctx.layer
        to_x = gradient @ layer.gather()[0]
        gradient /= _size()
        return to_x, layer.reduce_scatter([gradient.T @ x, gradient.sum(0)]), None


WRONG = [
    ("GatherUseFree", WritesIntoTheGradient, "the gradient that backward was given"),
    ("shard_plan", shard_plan_empties_its_list, "`numels` isn't what it was"),
    ("clip_grad_norm_", clips_into_new_tensors, "there are new tensors in `shards`"),
    ("clip_grad_norm_", clips_by_gathering, "bytes sent, where one or two numbers do"),
    ("zero_step", keeps_its_state_in_float64, "bytes in state after step 1"),
]

RIGHT += [
    ("shard_plan", lambda *plan: (torch.tensor(shard).numpy() for shard in shard_plan(*plan))),
    ("model_states", lambda *of: torch.tensor(model_states_stage_by_stage(*of))),
]


def keeps_a_view_of_the_gradients(parameters, gradients, state, lr=1 / 16, beta=1 / 2):
    momentum = ring_reduce_scatter(gradients).div_(_size())
    state["momentum"] = momentum.add_(state.get("momentum", 0), alpha=beta)
    _shard(parameters).sub_(lr * momentum)
    ring_all_gather(parameters)


WRONG += [
    ("shard_plan", lambda *plan: [[*s, (0, 0, 0)] for s in shard_plan(*plan)], "are left out"),
    ("zero_step", keeps_a_view_of_the_gradients, "A view counts as the whole tensor"),
]
