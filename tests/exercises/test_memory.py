"""The exercises of notebook 06."""

import torch

from ddpkit import checkpointing, memory
from ddpkit import exercises as check

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


def test_what_is_wrong_of_a_blocks_bytes_is_said_by_term():
    def told(tokens, pairs):
        return check.block_bytes(lambda b, s, d, h: tokens * b * s * d + pairs * b * s * s * h).text

    assert "The sbd are right" in told(34, 7)
    assert "The bs²H are right" in told(29, 5)
    assert "17sbd + 2.5bs²H. Numbers count 2 bytes" in told(17, 2.5)


def test_the_first_segment_is_not_the_one_to_spare():
    def answer(functions, segments, x):
        first, *others = checkpointing.cut(len(functions), segments)
        x = functions[first](x)
        for segment in others:
            x = checkpointing.checkpoint(functions[segment], x)
        return x

    assert "the last layer is computed again: True" in check.checkpoint_sequential(answer).text
