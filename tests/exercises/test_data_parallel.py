"""The exercises of notebook 03."""

import torch
import torch.distributed as dist

from ddpkit import data_parallel, launch
from ddpkit import exercises as check

from .every import *  # noqa: F403


def test_the_solution_is_the_librarys():
    assert check.average_gradients.reference is data_parallel.average_gradients


def test_a_replay_of_the_hook_as_found_shows_that_parameters_are_sent():
    as_found = next(m for m in check.HookedDDP.mistakes if m.name == "as_found")
    found = check.HookedDDP(as_found).text
    assert "still empty" not in found  # synchronize is, and the reference's is, too
    steps = check.HookedDDP.replay().text.splitlines()
    assert sorted(step.partition(": ")[2] for step in steps) == [
        "[7] on every rank → [14] on every rank",
        "[7] on every rank → [14] on every rank",
    ]


def test_what_no_mistake_does_is_read_from_the_values():
    def by_guess(module, reduction, rows):
        module.first.bias.grad += 7
        dist.all_reduce(module.first.bias.grad)

    assert "of one process with all rows" in check.sum_or_mean(by_guess).text

    def only_weights(module):
        for parameter in module.parameters():
            if parameter.grad is not None and parameter.dim() > 1:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size() ** 2

    assert "was divided by 4, on 2 ranks" in check.average_gradients(only_weights).text


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
