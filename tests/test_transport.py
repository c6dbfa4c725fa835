"""The transports beside each other: the same sums, the same copies, however they are sent."""

from unittest.mock import patch

import torch
import torch.distributed as dist
import twin
from on_ranks import on_ranks

from ddpkit import transport
from ddpkit.fast import ring
from ddpkit.fast.transports import SharedMemoryTransport


def zeros(way, numel, dtype, group):
    """A flat tensor that `way` can send."""
    if hasattr(way, "zeros"):
        return way.zeros(numel, dtype, group)
    return torch.zeros(numel, dtype=dtype)


def compare(check, dtype, group=None):
    """Two flat tensors at a time, both begun before the first is waited for; sums are exact."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    numels = [world_size * 5, world_size * 300]
    parts = [[twin.whole(r, numel, dtype) for r in range(world_size)] for numel in numels]
    sums = [twin.total(each) for each in parts]
    for way in (transport, ring.RingTransport(), SharedMemoryTransport()):
        flats = [zeros(way, numel, dtype, group) for numel in numels]
        for flat, each in zip(flats, parts, strict=True):
            flat.copy_(each[rank])
        handles = [way.start_reduce_scatter(flat, group) for flat in flats]
        for handle in handles:
            handle.wait()
        for flat, expected in zip(flats, sums, strict=True):
            own = transport.shard(flat, group)
            check.same(own, transport.shard(expected, group), way, dtype, "reduce-scatter")
            check.same(own.data_ptr(), flat.chunk(world_size)[rank].data_ptr(), way, "a view")
        handles = [way.start_all_gather(flat, group) for flat in flats]
        for handle in handles:
            handle.wait()
            handle.wait()  # does nothing
        check.same(flats, sums, way, dtype, "all-gather")


@on_ranks(1, 2, 3, 4, backend="gloo")
def test_all_transports_agree(check):
    """Also where the ring's tensors travel in many segments, with room for one."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        compare(check, dtype)
    with patch.multiple(ring, SEGMENT_BYTES=128, AHEAD=1):
        compare(check, torch.float32)


@on_ranks(4, backend="gloo")
def test_groups_of_ranks(check):
    pairs = [[3, 0], [1, 2]]
    groups = [dist.new_group(pair) for pair in pairs]
    compare(check, torch.float32, groups[0 if dist.get_rank() in pairs[0] else 1])
