"""The exercises of notebook 06."""

import torch

from ddpkit import checkpointing
from ddpkit import exercises as check
from ddpkit.tools import memory

from .every import *  # noqa: F403


def test_a_backward_that_is_not_written_is_named():
    class Checkpoint(checkpointing.Checkpoint):
        @staticmethod
        def backward(ctx, gradient):
            """Not yet."""
            ...  # noqa: PIE790

    assert "backward is still empty" in check.Checkpoint(Checkpoint).text


def test_a_tensor_is_not_a_number_of_bytes():
    told = check.block_bytes(lambda *sizes: torch.tensor(memory.block_bytes(*sizes))).text
    assert "Return a number of bytes" in told
