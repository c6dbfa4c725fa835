"""The exercises of notebook 06."""

import itertools

import torch

from ddpkit import checkpointing
from ddpkit import exercises as check
from ddpkit.exercises.memory import SIZES
from ddpkit.tools import memory

from .every import *  # noqa: F403


def test_the_solutions_are_the_librarys():
    assert check.Checkpoint.reference is checkpointing.Checkpoint
    assert check.block_bytes.reference is memory.block_bytes


def test_no_two_formulas_of_a_block_are_the_same_number():
    """With what the norms keep, or without: else the check would misread a right part."""
    for batch, length, width, heads in SIZES:
        token, pair = batch * length * width, batch * length**2 * heads
        numbers = set()
        terms = list(itertools.product(range(81), range(10), (0, 4, 8, 16)))
        for tokens, pairs, statistics in terms:
            numbers.add(tokens * token + pairs * pair + statistics * batch * length)
        assert len(numbers) == len(terms)


def test_a_right_part_beside_a_wrong_one_is_not_misread():
    def forgets_a_norm(batch, length, width, heads):
        formula = 32 * batch * length * width + 5 * batch * length**2 * heads
        return formula + 8 * batch * length  # the norms' statistics: that much is right

    told = check.block_bytes(forgets_a_norm).text
    assert "Yours is" not in told
    assert "How many of each does the block keep" in told


def test_a_backward_that_is_not_written_is_named():
    class Checkpoint(checkpointing.Checkpoint):
        @staticmethod
        def backward(ctx, gradient):
            """Not yet."""
            ...  # noqa: PIE790

    assert "backward is still empty" in check.Checkpoint(Checkpoint).text


def test_a_tensor_is_not_a_number_of_bytes():
    told = check.block_bytes(lambda *sizes: torch.tensor(memory.block_bytes(*sizes))).text
    assert "Return a number of bytes." in told
