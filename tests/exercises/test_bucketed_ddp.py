"""The exercises of notebook 04."""

from ddpkit import exercises as check

from .every import *  # noqa: F403


def test_a_replay_of_buckets_in_the_order_of_arrival_shows_what_was_added_up():
    by_arrival = next(m for m in check.BucketedDDP.mistakes if m.name == "by_arrival")
    assert not check.BucketedDDP(by_arrival).passed
    assert "rank 0 [26, 26, 26], rank 1 [60, 60, 60] →" in check.BucketedDDP.replay().text
