"""`python -m ddpkit.bench tensor`: what it says; a wrong way gets no time. No test times."""

import pytest
from torch import nn

from ddpkit import RankError
from ddpkit.bench import tensor
from ddpkit.bench.results import Results, judge, results_of


def test_goals():
    seconds = {tensor.TORCH: 0.2, tensor.OURS: 0.1, tensor.WHOLE: 0.3, "torch again": 0.2}
    seconds = {name: (s, 2 * s) for name, s in seconds.items()}
    found = Results(results_of("MLP", seconds, 2, 4000))
    assert [goal["met"] for goal in judge(tensor.GOALS, found)] == ["yes"]


def test_all_ways_are_measured_and_a_wrong_one_is_not():
    found = tensor.measure([(8, 4)], rounds=1)
    assert [each.variant for each in found] == [*tensor.WAYS]
    assert {each.nbytes for each in found} == {4 * 4 * 8}

    def forgetful(mlp, group):
        module = tensor.by_us(mlp, group)
        module[2].bias = nn.Parameter(2 * module[2].bias.detach())
        return module

    ways = {tensor.OURS: forgetful, tensor.WHOLE: tensor.WAYS[tensor.WHOLE]}
    with pytest.raises(RankError, match="tensor_parallel is off by"):
        tensor.measure([(8, 4)], 1, ways)
