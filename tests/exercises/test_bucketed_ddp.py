"""The exercises of notebook 04."""

import pytest

from ddpkit import ddp
from ddpkit import exercises as check
from ddpkit.tools import cost

from .every import *  # noqa: F403


def test_the_solution_is_the_librarys():
    assert check.FlatDDP.reference is ddp.FlatDDP
    assert check.OverlapDDP.reference is ddp.OverlapDDP
    assert check.plan_buckets.reference is ddp.plan_buckets
    assert check.Bucket.reference is ddp.Bucket
    assert check.BucketedDDP.reference is ddp.BucketedDDP
    assert check.one_wire.reference is cost.one_wire
    assert check.no_sync.reference is ddp.DataParallel.no_sync


@pytest.mark.parametrize("name", ["OverlapDDP", "BucketedDDP"])
def test_a_class_is_not_written_yet_while_all_its_methods_are_empty(name):
    def stub(*args): ...

    methods = ["ready", "synchronize"]
    exercise = getattr(check, name)
    verdict = exercise(type(name, (exercise.reference,), dict.fromkeys(methods, stub)))
    assert str(verdict) == f"{name}: not written yet: {', '.join(methods)}"


def test_a_replay_of_buckets_in_the_order_of_arrival_shows_what_was_added_up():
    by_arrival = next(m for m in check.BucketedDDP.mistakes if m.name == "by_arrival")
    assert not check.BucketedDDP(by_arrival).passed
    assert "rank 0 [26, 26, 26], rank 1 [60, 60, 60] →" in check.BucketedDDP.replay().text
