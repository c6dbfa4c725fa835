"""Reduce the gradients of a unit: from whole ones on every rank to each rank's part of their mean.

Pending gradients, in the reduce dtype, are copied into one flat tensor, rank after rank, are
reduce-scattered, divided, cast to the shards' dtype, and only then added. Notebook 12.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from .. import transport as torchs
from .shards import as_rows
from .units import Unit


class Reduction:
    """The gradients of a unit on their way to the shards.

    Making one sends them; `finish` waits, and adds this rank's part of the mean to `shard.grad`.
    """

    def __init__(self, unit: Unit):
        self.unit = unit
        self.trained = unit.trained
        world_size = dist.get_world_size(unit.group)
        before, self.after = divisors(unit.reduce_dtype, world_size)
        # Gradients go into one message, whole, and only then are divided.
        self.flat = self.pack()
        if before != 1:
            self.flat /= before
        # Nothing is sent on one rank: its own gradients are the sum.
        self.work = None
        if world_size > 1:
            self.work = unit.transport.start_reduce_scatter(self.flat, unit.group)

    @property
    def numels(self) -> list[int]:
        return [entry.numel for entry in self.trained]

    def pack(self) -> Tensor:
        """Return a message of the unit's pending gradients, in the order of the reduce-scatter.

        Zeros are padding, and stand for parameters without a gradient. Nothing is pending
        afterwards.
        """
        unit = self.unit
        numel = unit.world_size * sum(self.numels)
        flat = torch.zeros(numel, dtype=unit.reduce_dtype, device=unit.device)
        for entry, parts in zip(self.trained, unit.by_rank(flat, self.numels), strict=True):
            if entry.pending is None:
                continue
            # Whose rows: the last ranks may have fewer, or none.
            for part, rows in zip(parts, as_rows(entry.pending).split(entry.rows), strict=False):
                part[: rows.numel()].copy_(rows.flatten())
            entry.pending = None
        return flat

    def finish(self) -> None:
        """Wait for the sum, and add this rank's part of the mean to each `shard.grad`."""
        if self.work is not None:
            self.work.wait()
        # The mean in the reduce dtype, then cast, then added: PyTorch's order of roundings.
        own = torchs.shard(self.flat, self.unit.group) / self.after
        own = own.to(self.unit.shard_dtype)
        self.flat.untyped_storage().resize_(0)  # now: a backend may let go of it later
        for part, entry in zip(own.split(self.numels), self.trained, strict=True):
            entry.add(part)


def divisors(dtype: torch.dtype, world_size: int) -> tuple[float, float]:
    """Return (before, after): the numbers to divide by before and after a sum over W ranks.

    Together they make it a mean. fp16 has numbers from 6e-8 to 65504: dividing by about √W before
    the sum and by the rest afterwards stays away from both ends, as PyTorch does. In every other
    dtype it is all done afterwards.
    """
    if dtype != torch.float16:
        return 1, world_size
    before = 1
    while world_size % before == 0 and world_size / before > before:
        before *= 2
    return before, world_size / before
