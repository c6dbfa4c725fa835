"""`ddpkit.fsdp.FSDP` for speed: the same names and results, the same order of collective calls.

It adds
- weights that are also fetched one unit ahead in forward, and a reduction that lasts while the next
unit computes, for one more unit's gradients in memory;
- on CPUs a ring of segments as the transport, where none is given: Gloo's own reduce-scatter is an
all-reduce, and sends twice the bytes.
"""

from torch import nn

from .. import fsdp
from .. import transport as torchs
from .ring import RingTransport


class FSDP(fsdp.FSDP):
    """`fsdp.FSDP` that also fetches ahead in forward. transport: None is a ring on CPUs.

    Memory: three units' whole weights or gradients at a time, and one unit's gradients more.
    """

    overlap = True

    def __init__(self, module: nn.Module, *args, transport=None, **kwargs):
        super().__init__(module, *args, transport=transport or torchs, **kwargs)
        if transport is None and self.units[-1].device.type == "cpu":
            ring = RingTransport()
            for unit in self.units:
                unit.transport = ring
