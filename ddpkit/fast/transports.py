"""The calls of `ddpkit.transport` through memory that all ranks of one machine share: no message.

docs/measurements.md has ZeroOptimizer's speed with it.
"""

from types import SimpleNamespace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..shared_memory import SharedBuffer

DONE = SimpleNamespace(wait=lambda: None)  # the handle of a call that is done when it returns


class SharedMemoryTransport:
    """Reduce-scatter and all-gather, without messages, of flat tensors made by its own `zeros`.

    All such tensors stay in memory as long as this object. Both calls are done when they return, by
    a handle whose wait() does nothing. They ignore their `group`: that given to `zeros` counts.
    ValueError: a tensor from elsewhere, which the other ranks can't see, or a part of one.
    """

    def __init__(self):
        self._buffers: dict[int, SharedBuffer] = {}  # by the address of this rank's tensor

    def zeros(self, numel: int, dtype: torch.dtype, group: ProcessGroup | None = None) -> Tensor:
        """Return this rank's 1-D tensor of zeros, which all ranks see; all of `group` must call."""
        buffer = SharedBuffer(numel, dtype, group)
        self._buffers[buffer.local.data_ptr()] = buffer
        return buffer.local

    def start_reduce_scatter(self, flat: Tensor, group: ProcessGroup | None = None):
        """Sum `flat` over all ranks until its shard `rank` holds that part of the sum, in place.

        The other shards stay as they were. Reads n bytes, writes n/W.
        """
        self._of(flat).reduce_scatter()
        return DONE

    def start_all_gather(self, flat: Tensor, group: ProcessGroup | None = None):
        """Copy shard r of rank r's `flat` into the `flat` of every rank, in place.

        Reads n/W bytes, writes n.
        """
        self._of(flat).all_gather()
        return DONE

    def _of(self, flat: Tensor) -> SharedBuffer:
        """Return the shared buffer that `flat` is the whole of. ValueError: there is none."""
        buffer = self._buffers.get(flat.data_ptr())
        if buffer is None or flat.shape != buffer.local.shape:
            got = "one of this rank's own memory" if buffer is None else "a part of one"
            raise ValueError(
                f"expected a whole tensor that SharedMemoryTransport.zeros made, got {got}. Use it "
                "with ddpkit.fast.zero.ZeroOptimizer, which asks for zeros and sends all of them."
            )
        return buffer
