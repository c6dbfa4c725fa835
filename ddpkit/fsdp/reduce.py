"""Reduce the gradients of a unit: from whole ones on every rank to each rank's part of their mean.

A unit is the parameters that travel in one message. Their pending gradients, not yet sent, are
copied into one flat tensor of the reduce dtype: the parts for rank 0, those for rank 1, and so on.
It is reduce-scattered and divided, and this rank's part, cast to the shards' dtype, is added to
`shard.grad`. Notebook 12.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from .. import transport as torchs
from .shards import as_rows
from .units import Unit


class Reduction:
    """The gradients of a unit on their way to the shards.

    Making one begins to send them, except on one rank; `finish` waits for them and adds them.
    """

    def __init__(self, unit: Unit):
        self.unit = unit
        self.trained = unit.trained
        world_size = dist.get_world_size(unit.group)
        before, self.after = divisors(unit.reduce_dtype, world_size)
        # In PyTorch's order: rounded to the reduce dtype in the message, and divided only then.
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
        """Return a message of the unit's pending gradients: 1-D, in W equal parts, one a rank.

        A part has zeros as padding and for parameters without a gradient. Afterwards no gradient
        is pending.
        """
        unit = self.unit
        numel = unit.world_size * sum(self.numels)
        flat = torch.zeros(numel, dtype=unit.reduce_dtype, device=unit.device)
        for entry, parts in zip(self.trained, unit.by_rank(flat, self.numels), strict=True):
            if entry.pending is None:
                continue
            # A part of the rows goes to each rank; the last ranks may get fewer, or none.
            for part, rows in zip(parts, as_rows(entry.pending).split(entry.rows), strict=False):
                part[: rows.numel()].copy_(rows.flatten())
            entry.pending = None
        return flat

    def finish(self) -> None:
        """Wait for the sum, and add this rank's part of the mean to each `shard.grad`.

        A parameter to which no rank brought a gradient gets zeros. The message's memory is freed.
        """
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

    Together they make it a mean. fp16 has numbers from 6e-8 to 65504 only, so there the sum is
    divided by about √W before and by the rest after, to stay away from both ends, as PyTorch does
    (for 8 ranks: 4 and 2). In every other dtype all is divided after.
    """
    if dtype != torch.float16:
        return 1, world_size
    before = 1
    while world_size % before == 0 and world_size / before > before:
        before *= 2
    return before, world_size / before
