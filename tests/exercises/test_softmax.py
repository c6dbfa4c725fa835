"""The exercises of notebook 08."""

import math
from functools import reduce

import torch

from ddpkit import exercises as check
from ddpkit import softmax

from .every import *  # noqa: F403


def test_an_overflow_in_plain_python_is_told_as_what_came_out():
    def without_a_maximum(row):
        ell = sum(math.exp(x) for x in row)
        return [math.exp(x) / ell for x in row]

    said = check.online_softmax(without_a_maximum).text
    assert "row 0, 1000: OverflowError('math range error'), not [0, 1]." in said
    assert "exp(1000) overflows" in said
    assert "the ranks sent nothing" in check.online_softmax.replay().text


def test_torchs_own_softmax_reads_the_row_once():
    def by_torch(row):
        return row.softmax(-1).nan_to_num(0)

    assert "Was the row kept somewhere?" in check.online_softmax(by_torch).text


def test_a_second_pass_may_begin_at_the_end():
    def backwards(row):
        of_all = reduce(torch.logaddexp, row)
        return [float((row[-i] - of_all).exp().nan_to_num(0)) for i in range(1, len(row) + 1)][::-1]

    assert check.online_softmax(backwards).passed


def test_the_case_whose_dtype_is_wrong_is_marked():
    def masked_in_float32(a, b):
        m, ell = softmax.merge(a, b)
        return (m, ell) if ell else (m, ell.float())

    said = check.merge(masked_in_float32).text
    assert "returned torch.float32" in said
    assert "✗ parts (-inf, 0) and (-inf, 0)" in said
