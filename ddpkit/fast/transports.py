"""`ddpkit.transport` through memory that all ranks of one machine see: no message is sent.

Its gain is in docs/measurements.md, with the steps of ZeroOptimizer.
"""

from types import SimpleNamespace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..shared_memory import SharedBuffer

DONE = SimpleNamespace(wait=lambda: None)  # the handle of a call that is done when it returns


class SharedMemoryTransport:
    """Reduce-scatter and all-gather, without messages, of flat tensors made by its own `zeros`.

    ValueError: a tensor from elsewhere, which the other ranks can't see.
    """

    def __init__(self):
        self._buffers: dict[int, SharedBuffer] = {}  # by where they lie

    def zeros(self, numel: int, dtype: torch.dtype, group: ProcessGroup | None = None) -> Tensor:
        """Make a flat tensor that all ranks see; every rank of the group must call."""
        buffer = SharedBuffer(numel, dtype, group)
        self._buffers[buffer.local.data_ptr()] = buffer
        return buffer.local

    def start_reduce_scatter(self, flat: Tensor, group: ProcessGroup | None = None):
        """Reduce-scatter `flat` at once; wait() of the handle returned does nothing.

        Reads n bytes, writes n/W.
        """
        self._of(flat).reduce_scatter()
        return DONE

    def start_all_gather(self, flat: Tensor, group: ProcessGroup | None = None):
        """All-gather `flat` at once; wait() of the handle returned does nothing.

        Reads n/W bytes, writes n.
        """
        self._of(flat).all_gather()
        return DONE

    def _of(self, flat: Tensor) -> SharedBuffer:
        """Return the buffer of which `flat` is this rank's part. ValueError: there is none."""
        if flat.data_ptr() not in self._buffers:
            raise ValueError(
                "expected a tensor that SharedMemoryTransport.zeros made, got one of this rank's "
                "own memory. Use it with ddpkit.fast.zero.ZeroOptimizer, which asks for zeros."
            )
        return self._buffers[flat.data_ptr()]
