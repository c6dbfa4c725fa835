"""The exercises of notebook 03."""

import pytest
import torch
import torch.distributed as dist

from ddpkit import exercises as check
from ddpkit import launch
from ddpkit.exercises.checker import Trial
from ddpkit.exercises.data_parallel import read_mean

from .every import *  # noqa: F403


def test_a_replay_of_the_hook_as_found_shows_that_parameters_are_sent():
    as_found = next(m for m in check.HookedDDP.mistakes if m.name == "as_found")
    found = check.HookedDDP(as_found).text
    assert "still empty" not in found  # synchronize is, and the reference's is, too
    steps = check.HookedDDP.replay().text.splitlines()
    assert sorted(step.partition(": ")[2] for step in steps) == [
        "[7] on every rank → [14] on every rank",
        "[7] on every rank → [14] on every rank",
    ]


@pytest.mark.parametrize(
    ("got", "reading"),
    [
        (22.0, "the sum over the ranks"),
        (5.5, "divided by 4, on 2 ranks"),
        (20.0, "rank 1's own"),
        (7.0, "divided by 2 once?"),
    ],
)
def test_a_wrong_mean_is_read(got, reading):
    trial = Trial(2, print, (), [])
    assert reading in read_mean(trial, 0, {"w.grad": 11.0}, {"w.grad": got})


SPLIT = [3, 1, 2]  # rows of each rank


def _gradients(answer=None):
    """Of a line with all rows, for a sum and for a mean; or with this rank's, put right."""
    rows = torch.arange(12, dtype=torch.float64).view(6, 2)
    targets = torch.arange(6, dtype=torch.float64) ** 2
    if answer:
        rows, targets = rows.split(SPLIT)[dist.get_rank()], targets.split(SPLIT)[dist.get_rank()]
    gradients = []
    for reduction in ("sum", "mean"):
        line = torch.nn.Linear(2, 1, dtype=torch.float64)
        torch.nn.init.ones_(line.weight)
        torch.nn.init.zeros_(line.bias)
        torch.nn.functional.mse_loss(line(rows).squeeze(1), targets, reduction=reduction).backward()
        if answer:
            answer(line, reduction, len(rows))
        gradients += [line.weight.grad, line.bias.grad]
    return gradients


def test_sum_or_mean_gives_the_gradients_of_one_process():
    for got in launch(_gradients, check.sum_or_mean.reference, world_size=3):
        torch.testing.assert_close(got, _gradients())
