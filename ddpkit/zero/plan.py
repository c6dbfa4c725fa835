"""ZeRO stage 1 in two functions: which rank owns which part of the parameters, a step by hand."""

import torch
import torch.distributed as dist

from ..ring import ring_all_gather, ring_reduce_scatter


def shard_plan(numels: list[int], world_size: int) -> list[list[tuple[int, int, int]]]:
    """Plan which rank owns what, with parameters end to end and cut into W shards of equal length.

    numels: of parameters 0, 1, ... Returns a list for each rank, of (parameter, start, stop): its
    elements from index start up to stop belong to the rank's shard. The last lists may be empty.
    """
    length = -(-sum(numels) // world_size)  # rounded up: after the last parameter comes padding
    shards = [[] for _ in range(world_size)]
    first = 0  # where the parameter begins in the flat buffer
    for parameter, numel in enumerate(numels):
        for rank, shard in enumerate(shards):
            start = max(rank * length, first) - first
            stop = min((rank + 1) * length, first + numel) - first
            if start < stop:
                shard.append((parameter, start, stop))
        first += numel
    return shards


def zero_step(parameters, gradients, state, lr=1 / 16, beta=1 / 2):
    """Update `parameters`, in place, with the mean of all ranks' `gradients`: SGD with momentum.

    Both are flat, of a length that W divides; `gradients` are left holding partial sums. beta: the
    factor of the old momentum, which `state`, {} at first, keeps for the shard. Every rank calls.
    """
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    gradient = ring_reduce_scatter(gradients) / world_size  # the mean, of this rank's shard
    shard = parameters.chunk(world_size)[rank]
    if not state:
        state["momentum"] = torch.zeros_like(shard)
    state["momentum"].mul_(beta).add_(gradient)
    shard.sub_(lr * state["momentum"])
    ring_all_gather(parameters)
