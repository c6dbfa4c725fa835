"""The exercises of notebook 13: experts."""

from ddpkit import exercises as check

from .every import *  # noqa: F403


def test_each_expert_counts():
    def the_last_alone(experts, rest, replicas):
        check.expert_gradients.reference(experts[1:], rest, replicas)

    assert "[11.0, 277.75], not" in check.expert_gradients(the_last_alone).text
