"""A training step of a GPT by 2 ranks: without the audit, under its tape, and after it.

The audit compares trainings by a record of each, its `Tape`. This copies all parameters before and
after the update, and all gradients, and hashes the samples. A step right after it was closed must
take as long as without it. All are timed in the same processes, so what a closed tape left in
PyTorch for good would slow every step alike: that it leaves nothing is for tests/test_audit.py.
"""

from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from itertools import chain

import torch
from torch import nn
from torch.distributed import ProcessGroup

from ..audit.tape import Tape
from ..data_parallel import average_gradients
from ..models import GPT, mean_loss
from .interleave import Contest, check_close, race
from .results import AGAIN, SPEED, Goal, Result, Results, report, results_of

ROUNDS = 40
WITHOUT, UNDER, AFTER = "without", "under the tape", "after the tape"
GOALS = [Goal(UNDER, WITHOUT, 0.5), Goal(AFTER, WITHOUT, 0.9)]
SIZES = (64, 4), (128, 8)  # width, sequences
LEGEND = f"""\
Time: the median of a step with AdamW. Goals: at most twice the step
under the tape; afterwards the same, within what chance does.
{SPEED}"""


def contest(width: int, sequences: int, tape: type[Tape], group: ProcessGroup) -> Contest:
    """Make a rank's `Contest`: a training step in each way, each on its own copy of a GPT.

    Its `found` raises RuntimeError if a copy's parameters differ: the audit changed the training.
    """
    torch.manual_seed(0)
    gpt = GPT(width=width)
    tokens = torch.randint(0, 256, (sequences, 65))
    models = {name: deepcopy(gpt) for name in (WITHOUT, UNDER, AFTER, WITHOUT + AGAIN)}
    optimizers = {name: torch.optim.AdamW(model.parameters()) for name, model in models.items()}

    def step(name: str) -> None:
        model = models[name]
        optimizers[name].zero_grad()
        mean_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        average_gradients(model, group)
        optimizers[name].step()

    def recorded(name: str) -> None:
        with tape(1):
            step(name)

    def before(name: str) -> None:
        if name == AFTER:
            with tape(1):
                pass

    def found() -> None:
        for name, model in models.items():
            check_close(name, parameters_of(model), parameters_of(models[WITHOUT]), 1e-6)

    calls = {name: partial(recorded if name == UNDER else step, name) for name in models}
    return Contest(calls, before, found)


def parameters_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def measure(
    sizes: Sequence[tuple[int, int]] = SIZES, rounds: int = ROUNDS, tape: type[Tape] = Tape
) -> Results:
    """Time a step of each size in all three ways, by 2 ranks. ValueError: no round."""
    return Results(chain(*(raced(size, rounds, tape) for size in sizes)), legend=LEGEND)


def raced(size: tuple[int, int], rounds: int, tape: type[Tape]) -> list[Result]:
    width, sequences = size
    seconds, _ = race(partial(contest, width, sequences, tape), rounds, 2)
    return results_of(f"GPT, width {width}, {sequences} sequences", seconds, 2)


def main(name: str):
    report(name, measure(), GOALS)
