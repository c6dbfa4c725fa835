"""Lanes below a report: a bead a call, open where a rank waits."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from test_figures import check_picture

from ddpkit import HangError, launch
from ddpkit.lesson import page
from ddpkit.lesson.lanes import MOST, lanes
from ddpkit.lesson.progress import show_lanes


def forgetful(calls):
    for number in range(calls):
        if number < calls - 1 or dist.get_rank() != 1:
            dist.all_reduce(torch.ones(2))


@pytest.mark.parametrize("calls", [2, MOST + 6])
def test_who_waits_is_open(calls):
    with pytest.raises(HangError) as caught:
        launch(forgetful, calls, world_size=3)
    shown = []
    show_lanes(SimpleNamespace(error_in_exec=caught.value), shown.append)
    (picture,) = shown
    assert repr(picture) == (
        f"Calls by rank. rank 0: {calls} calls, waits in all_reduce; "
        f"rank 1: {calls - 1} call{'s' * (calls > 2)}, makes no further call; "
        f"rank 2: {calls} calls, waits in all_reduce."
    )
    check_picture(picture, page.WRONG, *page.RANK_COLOURS[:3])


def test_where_no_rank_spoke_nothing_is_drawn():
    with pytest.raises(ValueError, match="nothing to draw"):
        lanes(SimpleNamespace(wire=[[], []]))
    shown = []
    for error in (None, ZeroDivisionError(), SimpleNamespace(wire=[[], []])):
        show_lanes(SimpleNamespace(error_in_exec=error), shown.append)
    assert shown == []
