"""The exercises of notebook 10: schedules."""

from ddpkit import exercises as check
from ddpkit.pipeline import one_f_one_b, zero_bubble

from .every import *  # noqa: F403
from .test_beat import whatever_is_ready


def test_an_action_too_many_is_to_be_taken_out():
    def one_more(stages, micro_batches):
        first, *others = one_f_one_b(stages, micro_batches)
        return [[*first, f"0F{micro_batches}"], *others]

    said = check.one_f_one_b(one_more).text
    assert "take 0F4 out: the last of 4 micro-batches is number 3" in said


def test_of_weight_parts_where_a_rank_waits_what_is_said_is_so():
    def one_too_late(stages, micro_batches):
        *before, weight, grad, last = zero_bubble(stages, micro_batches)[0]
        return [[*before, grad, weight, last], *zero_bubble(stages, micro_batches)[1:]]

    assert "a W of its own lies ready" in check.zero_bubble(one_too_late).text
    greedy = check.zero_bubble(lambda p, m: whatever_is_ready(p, m, p))
    assert "no W of its own is ready" in greedy.text
