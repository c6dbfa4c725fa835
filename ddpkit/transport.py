"""The two halves of an all-reduce, started now and waited for later: how sharded training sends.

    handle = start_reduce_scatter(gradients, group)     # W shards of equal length
    ...                                                 # compute; leave `gradients` alone
    handle.wait()                                       # shard `rank` holds its part of the sum

    handle = start_all_gather(parameters, group)        # shard `rank` holds this rank's values
    ...                                                 # compute; leave `parameters` alone
    handle.wait()                                       # shard r holds rank r's, for all r

These two are PyTorch's own asynchronous collectives, `reduce_scatter_tensor` and
`all_gather_into_tensor`, on any backend: NCCL, Gloo. Any object with the same two functions can be
passed as `transport=`: `ddpkit.fast.ring.RingTransport()` sends messages round a ring,
`ddpkit.fast.transports.SharedMemoryTransport()` sends none, and serves `fast.zero` alone.
"""

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# Torch's own; 2.13 gave them new names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def start_reduce_scatter(flat: Tensor, group: ProcessGroup | None = None) -> dist.Work:
    """Start to sum `flat` over all ranks, until this rank holds shard `rank` of the sum.

    flat: 1-D, contiguous, the same length on every rank, a multiple of W. In place: after `wait()`
    the sum is in `shard(flat, group)`; the contents of the other shards are undefined.

    Cost per rank: (W-1)/W of `flat` sent; on Gloo, by an all-reduce, twice that. Notebook 07.
    """
    mine = shard(flat, group)  # the result goes into this part of `flat` itself
    return _reduce_scatter(mine, flat, group=group, async_op=True)


def start_all_gather(flat: Tensor, group: ProcessGroup | None = None) -> dist.Work:
    """Start to copy shard r of rank r's `flat` into the `flat` of every rank, in place.

    flat: 1-D, contiguous, the same length on every rank, a multiple of W; complete after `wait()`.

    Cost per rank: (W-1)/W of `flat` sent. Notebook 07.
    """
    mine = shard(flat, group)
    return _all_gather(flat, mine, group=group, async_op=True)


def shard(flat: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return this rank's shard of `flat`, the rank-th of W equal parts, as a view."""
    # W divides the length, so chunk() gives W parts of equal length.
    shards = flat.chunk(dist.get_world_size(group))
    return shards[dist.get_rank(group)]
