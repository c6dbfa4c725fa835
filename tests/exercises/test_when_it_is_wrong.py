"""The exercises of notebook 14; those of the museum are in test_museum."""

from ddpkit import exercises as check

from .every import *  # noqa: F403


def test_a_rank_without_tokens_is_no_nan():
    told = check.token_loss(lambda losses: losses.mean()).text
    assert "mean of means" in told
