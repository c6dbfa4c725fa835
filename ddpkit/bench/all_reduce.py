"""All-reduce: Gloo's, ours round a ring, by doubling and through shared memory, and NCCL's."""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..fast import ring as fast
from ..ring import doubling_all_reduce, ring_all_reduce
from ..shared_memory import SharedBuffer
from . import interleave
from .interleave import Variant
from .results import Goal, Results

SIZES = 4096, 10**6, 10**7, 25 * 2**20, 10**8
DOUBLING_UP_TO = 10**6  # beyond, it sends too much to be of interest
GOALS = [
    Goal("fast ring", "gloo", 1.0, at=((2, 10**6), (2, 10**7), (2, 10**8))),
    Goal("fast ring", "gloo", 0.95, at=((4, 10**6), (4, 10**7), (4, 10**8))),
    Goal("ring", "gloo", 0.7, at=((2, 10**7), (2, 10**8), (4, 10**7), (4, 10**8))),
    Goal("shared memory", "memcpy", 0.85, at_most=True, at=((2, 25 * 2**20), (2, 10**8))),
    Goal(
        "shared memory", "gloo", 2.5, at=((2, 25 * 2**20), (2, 10**8), (4, 25 * 2**20), (4, 10**8))
    ),
    Goal("shared memory", "gloo", 1.0, at=((2, 4096), (4, 4096))),
]


def main():
    interleave.report_collective("all_reduce", measure(), GOALS)


def measure(
    sizes: Sequence[int] = SIZES, world_sizes: Sequence[int] = (2, 4), rounds: int | None = None
) -> Results:
    """Time every all-reduce there is. sizes: bytes; rounds: None: 12, small sizes more often."""
    return interleave.measure("all_reduce", make_variants, sizes, world_sizes, rounds)


def make_variants(numel: int, group: ProcessGroup) -> dict[str, Variant]:
    """{name: variant}, for tensors of `numel` float32."""
    world_size = dist.get_world_size(group)
    x, other = torch.ones(numel), torch.zeros(numel)
    calls = {"gloo": by_torch, "ring": ring_all_reduce, "fast ring": fast.ring_all_reduce}
    if x.nbytes <= DOUBLING_UP_TO:
        calls["doubling"] = doubling_all_reduce
    found = {}
    for name, call in calls.items():
        found[name] = Variant(x, partial(call, x, group), world_size, "loopback")
    buffer = SharedBuffer(numel, group=group)
    found["shared memory"] = Variant(buffer.local, buffer.all_reduce, world_size, "memcpy")
    found["memcpy"] = interleave.memcpy(x, other)
    share = numel // world_size * (world_size - 1)  # the ring sends so many twice
    found["loopback"] = interleave.loopback(x[:share], other[:share], 2, group)
    nccl = interleave.nccl_group()
    if nccl:
        on_gpu = x.cuda()
        found["nccl"] = Variant(on_gpu, partial(by_torch, on_gpu, nccl), world_size)
    return found


def by_torch(x: Tensor, group: ProcessGroup) -> Tensor:
    dist.all_reduce(x, group=group)
    return x
