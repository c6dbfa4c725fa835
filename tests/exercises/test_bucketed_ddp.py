"""The exercises of notebook 04."""

import pytest

from ddpkit import ddp
from ddpkit import exercises as check
from ddpkit.exercises import bucketed_ddp

from .every import *  # noqa: F403


def test_the_solution_is_the_librarys():
    assert check.OverlapDDP.reference is ddp.OverlapDDP
    assert check.plan_buckets.reference is ddp.plan_buckets
    assert check.BucketedDDP.reference is ddp.BucketedDDP
    assert check.no_sync.reference is ddp.DataParallel.no_sync


def test_how_many_buckets_can_have_left_when_backward_comes_to_each_layer():
    """From the last layer to the first, and at the end; tokens.weight is complete only then."""
    layers = ("tokens.weight", "a", "b", "head.weight")
    for plan, counts in (
        ([["b"], ["a"], ["tokens.weight"]], [0, 0, 1, 2, 3]),
        ([["a"], ["b"], ["tokens.weight"]], [0, 0, 0, 2, 3]),
        ([["b", "a"], ["tokens.weight"]], [0, 0, 0, 1, 2]),
    ):
        assert bucketed_ddp.sendable(plan, layers) == counts


def test_praise_of_overlap_counts_what_left_early():
    assert "4 of 5 all_reduces were on their way" in check.OverlapDDP(ddp.OverlapDDP).text
    assert "2 of 3 all_reduces were on their way" in check.BucketedDDP(ddp.BucketedDDP).text


@pytest.mark.parametrize("name", ["OverlapDDP", "BucketedDDP"])
def test_a_class_is_not_written_yet_while_all_its_methods_are_empty(name):
    def stub(*args): ...

    methods = ["add_bucket"] * (name == "BucketedDDP") + ["ready", "synchronize"]
    exercise = getattr(check, name)
    verdict = exercise(type(name, (exercise.reference,), dict.fromkeys(methods, stub)))
    assert str(verdict) == f"{name}: not written yet: {', '.join(methods)}"


def test_a_replay_of_buckets_in_the_order_of_arrival_shows_what_was_added_up():
    by_arrival = check.BucketedDDP.mistakes[0].applied_to(ddp.BucketedDDP)
    assert not check.BucketedDDP(by_arrival).passed
    assert "rank 0 [26, 26, 26], rank 1 [60, 60, 60] →" in check.BucketedDDP.replay().text
