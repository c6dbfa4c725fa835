"""The ring drawn round: which runs are, and that its stripes are what the ranks really hold."""

import pytest
import torch
import torch.distributed as dist
from test_figures import check_picture
from test_player import frames_of

from ddpkit import ring
from ddpkit.lesson import circle, page
from ddpkit.lesson.film import hop_by_hop


def chunks_round(length=0):
    x = 10.0 ** dist.get_rank() * torch.arange(1, 1 + (length or dist.get_world_size()))
    return ring.ring_all_reduce(x).tolist()


def whole_round():
    return ring.whole_ring_all_reduce(torch.tensor([10.0 ** dist.get_rank()])).tolist()


def parts_round():
    x, rank = torch.zeros(100), dist.get_rank()  # longer than what records keep
    send = dist.isend(x[:3], (rank + 1) % 3)
    dist.recv(x[3:6], (rank - 1) % 3)
    send.wait()


def backwards():
    x, rank, world_size = torch.ones(1), dist.get_rank(), dist.get_world_size()
    send = dist.isend(x, (rank - 1) % world_size)
    dist.recv(x.clone(), (rank + 1) % world_size)
    send.wait()


def hops(fn, world_size):
    return hop_by_hop(*frames_of(fn, world_size))


@pytest.mark.parametrize("world_size", [3, 4])
def test_stripes_are_the_ranks_that_a_number_is_the_sum_of(world_size):
    """Each digit of a number counts a rank, so the numbers themselves say whose they are."""
    frames = hops(chunks_round, world_size)
    assert circle.is_round(frames, world_size)
    assert len(frames) == 2 * (world_size - 1) + 1
    for frame in frames:
        for rank in range(world_size):
            owners = circle.cells_of(frame, rank)
            values = [value for value, _ in next(iter(frame.memory[rank].values()))]
            for place, (value, owner) in enumerate(zip(values, owners, strict=True), 1):
                digits = f"{value / place:.0f}"[::-1]
                ranks = {rank for rank, digit in enumerate(digits) if digit == "1"}
                assert ranks == (owner if isinstance(owner, frozenset) else {owner})
        check_picture(circle.draw(frame, world_size, "a ring"), *page.RANK_COLOURS[:world_size])
    assert circle.cells_of(frames[-1], 1) == [frozenset(range(world_size))] * world_size


def test_other_runs_stay_rows():
    """A ring whose sums stand outside the buffer that is sent; two ranks; backwards; too long."""
    for fn, world_size in ((whole_round, 3), (chunks_round, 2), (backwards, 3), (parts_round, 3)):
        assert not circle.is_round(hops(fn, world_size), world_size)
