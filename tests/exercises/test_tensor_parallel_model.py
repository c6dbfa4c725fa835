"""The exercises of notebook 11: a block, the loss, gradients of norms, one length."""

from ddpkit import exercises as check

from .every import *  # noqa: F403


def test_a_gradient_that_is_a_little_too_long_is():
    for trial in check.clip_grad_norm.trials():
        assert all(1 < seen["length, a little too long"] < 3 for seen in trial.expected)
