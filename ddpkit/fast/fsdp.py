"""`ddpkit.fsdp.FSDP` for speed: the same names, the same order of gathers and reductions.

Results are the same up to rounding. It adds
- a forward that also fetches the next unit's weights while this one computes, and a reduction of
gradients that goes on while backward computes the next unit: one more unit's gradients in memory;
- on CPUs, where no transport is given, the messages of `ddpkit.fast.ring`: Gloo's own
reduce-scatter is an all-reduce, and sends twice the bytes.
"""

from torch import nn

from .. import fsdp
from .. import transport as torchs
from .ring import RingTransport


class FSDP(fsdp.FSDP):
    """`fsdp.FSDP` that also fetches ahead in forward, and reduces while backward goes on.

    transport, by keyword only: None is a `RingTransport` on CPUs, PyTorch's collectives elsewhere.
    Forward fetches ahead in the order of the last step, so from the second step on.
    Memory at a time, beside the root's: two units' whole weights, and two units' gradients.
    """

    overlap = True

    def __init__(self, module: nn.Module, *args, transport=None, **kwargs):
        super().__init__(module, *args, transport=transport or torchs, **kwargs)
        if transport is None and self.units[-1].device.type == "cpu":
            ring = RingTransport()
            for unit in self.units:
                unit.transport = ring
