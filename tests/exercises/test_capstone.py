"""The exercises of notebook 15."""

from ddpkit import exercises as check
from ddpkit.exercises.capstone import as_found

from .every import *  # noqa: F403


def test_the_two_traps_are_told_one_after_the_other():
    assert "gradients 8 times in a step" in check.slow_step(as_found).text
    mistakes = {mistake.name: mistake for mistake in check.slow_step.mistakes}
    assert "a loss 5 times in a step" in check.slow_step(mistakes["logs_each"]).text
