"""All-reduce: Gloo's, ours round a ring, ours by doubling, through shared memory, and NCCL's where there are GPUs."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..fast.ring import ring_all_reduce
from ..ring import doubling_all_reduce
from ..runtime.link import Link
from ..shared_memory import SharedBuffer
from . import interleave
from .interleave import Variant
from .results import Goal, Results

SIZES = (4096, 10**6, 10**7, 25 * 2**20, 10**8)
FULL_SIZES = (*SIZES, 10**9)  # 3 GB of memory a rank
DOUBLING_UP_TO = 10**6  # beyond, it sends too much to be of interest

GOALS = (
    *(Goal("ring", "gloo", ranks, nbytes, 1.0) for ranks in (2, 4) for nbytes in (10**6, 10**7, 10**8)),
    *(Goal("shared memory", "gloo", 2, nbytes, 6.0) for nbytes in (25 * 2**20, 10**8)),
    *(Goal("shared memory", "gloo", 4, nbytes, 5.0) for nbytes in (25 * 2**20, 10**8)),
    *(Goal("shared memory", "memcpy", 2, nbytes, 1.2, at_most=True) for nbytes in (25 * 2**20, 10**8)),
    *(Goal("shared memory", "gloo", ranks, 4096, 1.0) for ranks in (2, 4)),
)


def main(full: bool = False):
    results = measure(FULL_SIZES if full else SIZES, (2, 4, 6) if full else (2, 4))
    interleave.report("all_reduce", results, GOALS)


def measure(
    sizes: Sequence[int] = SIZES,
    world_sizes: Sequence[int] = (2, 4),
    rounds: int | None = None,
    link: Link | None = None,
) -> Results:
    """Time every all-reduce there is; see `interleave.measure`. On a link, only those that send messages.

    sizes: bytes. rounds: how often (None: 12 times, small sizes more often). The results, printed, are a table.
    """
    return interleave.measure("all_reduce", make_variants, sizes, world_sizes, rounds, link)


def make_variants(numel: int, group: ProcessGroup, emulated: bool) -> dict[str, Variant]:
    """{name: variant}, for tensors of `numel` float32; `group` is the wire."""
    world_size = dist.get_world_size(group)
    x, other = torch.ones(numel), torch.zeros(numel)
    share = numel // world_size * (world_size - 1)  # the ring sends so many twice

    def gloo() -> Tensor:
        dist.all_reduce(x, group=group)
        return x

    variants = {
        "gloo": Variant(x, gloo, world_size, "loopback"),
        "ring": Variant(x, lambda: ring_all_reduce(x, group), world_size, "loopback"),
    }
    if x.nbytes <= DOUBLING_UP_TO:
        variants["doubling"] = Variant(x, lambda: doubling_all_reduce(x, group), world_size, "loopback")
    if not emulated:
        buffer = SharedBuffer(numel, group=group)
        variants["shared memory"] = Variant(buffer.local, buffer.all_reduce, world_size, "memcpy")
        variants["memcpy"] = interleave.memcpy(x, other)
        variants["loopback"] = interleave.loopback(x[:share], other[:share], 2, group)
        variants |= nccl(numel)
    return variants


def nccl(numel: int) -> dict[str, Variant]:
    """NCCL's, where every rank has a GPU."""
    group = interleave.nccl_group()
    if group is None:
        return {}
    x = torch.ones(numel, device="cuda")

    def call() -> Tensor:
        dist.all_reduce(x, group=group)
        torch.cuda.synchronize()
        return x

    return {"nccl": Variant(x, call, dist.get_world_size())}
