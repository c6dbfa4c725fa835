"""Reduce-scatter: Gloo's, which is a whole all-reduce inside, ours round a ring, through shared memory, and NCCL's."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..fast.ring import ring_reduce_scatter
from ..runtime.link import Link
from ..shared_memory import SharedBuffer
from . import interleave
from .interleave import Variant
from .results import Goal, Results

SIZES = (10**6, 10**7, 10**8)
GOALS = tuple(
    Goal("ring", gloo, ranks, nbytes, 2.0)
    for gloo in ("gloo", "gloo, list")
    for ranks in (2, 4)
    for nbytes in (10**7, 10**8)
)

# Torch's own, on one tensor; 2.13 gave it a new name.
torch_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def main(full: bool = False):
    results = measure(world_sizes=(2, 4, 6) if full else (2, 4))
    interleave.report("reduce_scatter", results, GOALS)


def measure(
    sizes: Sequence[int] = SIZES,
    world_sizes: Sequence[int] = (2, 4),
    rounds: int | None = None,
    link: Link | None = None,
) -> Results:
    """Time every reduce-scatter there is; see `interleave.measure`. On a link, only those that send messages.

    sizes: bytes of the whole tensor. rounds: how often (None: 12 times, small sizes more often). The results, printed,
    are a table.
    """
    return interleave.measure("reduce_scatter", make_variants, sizes, world_sizes, rounds, link)


def make_variants(numel: int, group: ProcessGroup, emulated: bool) -> dict[str, Variant]:
    """{name: variant}, for tensors of `numel` float32; `group` is the wire."""
    world_size = dist.get_world_size(group)
    x, other, chunk = torch.ones(numel), torch.zeros(numel), torch.zeros(numel // world_size)
    chunks = list(x.chunk(world_size))

    def gloo() -> Tensor:
        torch_reduce_scatter(chunk, x, group=group)
        return chunk

    def gloo_list() -> Tensor:
        dist.reduce_scatter(chunk, chunks, group=group)
        return chunk

    variants = {
        "gloo": Variant(x, gloo, world_size, "loopback"),
        "gloo, list": Variant(x, gloo_list, world_size, "loopback"),
        "ring": Variant(x, lambda: ring_reduce_scatter(x, group), world_size, "loopback"),
    }
    if not emulated:
        buffer = SharedBuffer(numel, group=group)
        variants["shared memory"] = Variant(buffer.local, buffer.reduce_scatter, world_size, "memcpy")
        copied = (numel + len(chunk)) // 2  # read and written: as many as when numel are read and a chunk is written
        variants["memcpy"] = interleave.memcpy(x[:copied], other[:copied])
        variants["loopback"] = interleave.loopback(x[len(chunk) :], other[len(chunk) :], 1, group)  # (W-1)/W of x
        variants |= nccl(numel)
    return variants


def nccl(numel: int) -> dict[str, Variant]:
    """NCCL's, where every rank has a GPU."""
    group = interleave.nccl_group()
    if group is None:
        return {}
    x = torch.ones(numel, device="cuda")
    chunk = torch.empty(numel // dist.get_world_size(), device="cuda")

    def call() -> Tensor:
        torch_reduce_scatter(chunk, x, group=group)
        torch.cuda.synchronize()
        return chunk

    return {"nccl": Variant(x, call, dist.get_world_size())}
