"""The exercise of notebook 01 that must hang."""

from ddpkit.exercises.break_it import waits
from ddpkit.lesson import check
from ddpkit.runtime.errors import HangError

from .every import *  # noqa: F403


def test_a_circle_that_a_rank_only_looks_into_is_not_its_own():
    """Rank 2 waits for 0, which waits in a circle with 1."""

    class Call:
        def __init__(self, peer):
            self.peer = peer

    wire = [[Call(1)], [Call(0)], [Call(0)]]
    seen = waits(HangError("deadlock: each waits for another: …", wire=wire))
    assert [of_rank["circle"] for of_rank in seen] == ["after 2", "after 2", "never"]


def test_what_hung_can_be_replayed():
    check.wait_in_a_circle(check.wait_in_a_circle.mistakes[3])
    assert "never" in repr(check.wait_in_a_circle.replay())
