"""Reduce-scatter: Gloo's, ours round a ring and through shared memory, and NCCL's."""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..fast import ring as fast
from ..ring import ring_reduce_scatter
from ..shared_memory import SharedBuffer
from . import interleave
from .interleave import Variant
from .results import Goal

SIZES = 10**6, 10**7, 10**8
AT = (2, 10**7), (2, 10**8), (4, 10**7), (4, 10**8)
GOALS = [Goal("fast ring", gloo, 1.8, at=AT) for gloo in ("gloo", "gloo, list")]

# Torch's own, on one tensor; 2.13 gave it a new name.
on_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def main():
    found = interleave.measure("reduce_scatter", make_variants, SIZES)
    interleave.report_collective("reduce_scatter", found, GOALS)


def make_variants(numel: int, group: ProcessGroup) -> dict[str, Variant]:
    """{name: variant}, for tensors of `numel` float32."""
    world_size = dist.get_world_size(group)
    x, chunk = torch.ones(numel), torch.zeros(numel // world_size)
    chunks = list(x.chunk(world_size))
    calls = {
        "gloo": partial(by_torch, on_tensor, chunk, x, group),
        "gloo, list": partial(by_torch, dist.reduce_scatter, chunk, chunks, group),
        "ring": partial(ring_reduce_scatter, x, group),
        "fast ring": partial(fast.ring_reduce_scatter, x, group),
    }
    found = {name: Variant(x, call, world_size, "loopback") for name, call in calls.items()}
    buffer = SharedBuffer(numel, group=group)
    found["shared memory"] = Variant(buffer.local, buffer.reduce_scatter, world_size, "memcpy")
    # As many bytes are read and written as when all of x is read and one chunk is written.
    copied = (numel + len(chunk)) // 2
    found["memcpy"] = interleave.memcpy(x[:copied], torch.zeros(copied))
    sent = x[len(chunk) :]  # (W-1)/W of x
    found["loopback"] = interleave.loopback(sent, torch.zeros_like(sent), 1, group)
    nccl = interleave.nccl_group()
    if nccl:
        on_gpu = x.cuda()
        call = partial(by_torch, on_tensor, chunk.cuda(), on_gpu, nccl)
        found["nccl"] = Variant(on_gpu, call, world_size)
    return found


def by_torch(collective, chunk: Tensor, whole, group: ProcessGroup) -> Tensor:
    collective(chunk, whole, group=group)
    return chunk
