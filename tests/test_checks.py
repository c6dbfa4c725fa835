"""What a mistaken argument hears: which rank, got, expected, remedy."""

import pytest
import torch.distributed as dist
from on_ranks import on_ranks

from ddpkit.tools import checks


@on_ranks(3, backend="gloo")
def test_group_and_ranks_are_named(check, rank):
    pair = dist.new_group([0, 2])
    checks.check_in_group("barrier", None)
    checks.check_same("SharedBuffer", ["float32", "numel=4"], None)
    if rank == 1:
        says = "rank 1 called barrier with a group that it isn't in, expected one of its own. "
        says += "Call barrier on the group's ranks only."
        check.refused(checks.check_in_group, "barrier", pair, says=says)
    else:
        checks.check_in_group("barrier", pair)
        mine = ["float32", *(["numel=4"] * rank)]
        says = "expected the same SharedBuffer on every rank, got numel=4 on rank 2, nothing in "
        says += "its place on rank 0. Build it alike on all."
        check.refused(checks.check_same, "SharedBuffer", mine, pair, says=says)


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
    said = str(checks.misuse("fit", "1 size", "2", "Measure."))
    assert said == "called fit with 1 size, expected 2. Measure."
