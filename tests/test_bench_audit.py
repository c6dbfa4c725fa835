"""`python -m ddpkit.bench audit`: what it says; an audit that changes the training gets no time."""

import pytest

from ddpkit import RankError
from ddpkit.audit.tape import Tape
from ddpkit.bench import audit
from ddpkit.bench.results import Results, judge, results_of


def test_goals():
    seconds = {audit.WITHOUT: 0.2, audit.UNDER: 0.3, audit.AFTER: 0.2, "without again": 0.2}
    seconds = {name: (s, 2 * s) for name, s in seconds.items()}
    found = Results(results_of("GPT", seconds, 2))
    assert [goal["met"] for goal in judge(audit.GOALS, found)] == ["yes", "yes"]


def test_all_ways_are_measured():
    found = audit.measure([(8, 2)], rounds=1)
    assert [result.variant for result in found] == [
        audit.WITHOUT,
        audit.UNDER,
        audit.AFTER,
        "without again",
    ]


class Meddling(Tape):
    """It drops the gradients that it has recorded."""

    def on_step(self, optimizer, *called):
        super().on_step(optimizer, *called)
        optimizer.zero_grad()


def test_an_audit_that_changes_what_is_trained_has_no_time():
    with pytest.raises(RankError, match="under the tape is off by"):
        audit.measure([(8, 2)], 1, Meddling)
