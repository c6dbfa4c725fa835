"""The exercises of notebook 07."""

from ddpkit import exercises as check
from ddpkit import zero

from .every import *  # noqa: F403


def test_the_solution_is_the_librarys():
    assert check.shard_plan.reference is zero.shard_plan
    assert check.zero_step.reference is zero.zero_step
