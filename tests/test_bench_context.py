"""`python -m ddpkit.bench context`: what it says; a wrong way gets no time. No test times."""

import pytest

from ddpkit import RankError
from ddpkit.bench import context


def test_all_ways_are_measured_and_counted():
    found = context.measure(4, [2], rows=8, rounds=1)
    attention = [each for each in found if each.operation.startswith("attention")]
    assert [each.variant for each in attention] == [*context.WAYS]
    said = {each.variant: each.columns for each in attention}
    assert said["ring"]["Scores"] == "10 to 26"  # n(n+1)/2, and n² more
    assert said["zigzag"]["Scores"] == "18 to 18"
    head = 4 * 4 * context.WIDTH  # bytes of a tensor of one head
    assert said["all-gather"]["Sent"] == f"{4 * 4 * head / 1000:.1f} kB".replace(".0", "")
    experts = [each.variant for each in found if "experts" in each.operation]
    assert experts == ["plain torch", "experts", "plain torch again"]


def test_a_wrong_way_gets_no_time():
    def doubled(q, k, v, causal, group):
        return 2 * context.WAYS["zigzag"][0](q, k, v, causal, group)

    ways = {"ring": context.WAYS["ring"], "zigzag": (doubled, context.WAYS["zigzag"][1])}
    with pytest.raises(RankError, match="zigzag is off by"):
        context.measure(4, [2], 8, 1, ways)
