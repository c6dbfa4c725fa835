"""What a mistaken argument hears: which rank, got, expected, remedy."""

import pytest
import torch.distributed as dist

from ddpkit import launch
from ddpkit.tools import checks


def _refused(check, *args, **kwargs):
    try:
        check(*args, **kwargs)
    except ValueError as error:
        return str(error)


def _on_ranks():
    pair = dist.new_group([0, 2])
    outside = _refused(checks.check_in_group, "barrier", pair)
    checks.check_in_group("barrier", None)
    same = _refused(checks.check_same, "SharedBuffer", ["float32", "numel=4"], None)
    among_two = None
    if dist.get_rank() != 1:
        mine = ["float32", *(["numel=4"] * dist.get_rank())]
        among_two = _refused(checks.check_same, "SharedBuffer", mine, pair)
    return outside, same, among_two


def test_group_and_ranks_are_named():
    run = launch(_on_ranks, world_size=3, backend="gloo")
    differ = (
        "expected the same SharedBuffer on every rank, got numel=4 on rank 2, nothing in its place "
        "on rank 0. Build it alike on all."
    )
    outside = (
        "rank 1 called barrier with a group that it isn't in, expected one of its own. "
        "Call barrier on the group's ranks only."
    )
    assert list(run) == [(None, None, differ), (outside, None, None), (None, None, differ)]


def test_numbers():
    checks.check_counts(world_size=1, batch=3)
    checks.check_positive("Give MiB.", cap=0.5)
    for wrong in (0, True, 1.0, "2"):
        with pytest.raises(ValueError, match="expected batch to be 1 or more, got"):
            checks.check_counts(world_size=1, batch=wrong)
    for wrong in (0, True, float("nan"), "2"):
        with pytest.raises(ValueError, match=r"expected cap > 0, got .*\. Give MiB\."):
            checks.check_positive("Give MiB.", cap=wrong)


def test_without_ranks_none_is_named():
    said = str(checks.mistake("fit", "1 size", "2", "Measure."))
    assert said == "called fit with 1 size, expected 2. Measure."
