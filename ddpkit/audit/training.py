"""`same_training`: run a training on one rank and on several, and compare their tapes."""

import contextlib
from collections.abc import Callable, Iterator

import torch

from ..runtime.launch import launch
from .compare import compare
from .report import Report
from .tape import Tape

ADAPTIVE = "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop"


def same_training(
    serial: Callable[[], object],
    parallel: Callable[[], object],
    world_size: int = 3,
    steps: int = 3,
    sgd: bool = True,
    rename: dict[str, str] | None = None,
    to_the_bit: bool = False,
) -> Report:
    """Train on one rank and on `world_size`; say where they part, on which ranks, by which factor.

    serial, parallel: functions without arguments that train something, with any optimizer of
    torch.optim; they must begin alike (seed them), and use the same samples in each step. steps: to
    compare. sgd: compare a second time with SGD in the place of optimizers such as AdamW, which
    hide a factor in what they update. rename, to_the_bit: see `compare`.

    Take numbers that differ: 3 ranks for 2 micro-batches, so that a factor has one cause.
    RankError, HangError: as of `launch`. ValueError: the two name no parameter alike.
    """
    report = Report(0, 0, 0.0)
    for with_sgd in (False, True) if sgd else (False,):
        (alone,) = launch(record, serial, steps, with_sgd, world_size=1)
        together = launch(record, parallel, steps, with_sgd, world_size=world_size)
        report = compare(alone, list(together), rename, to_the_bit)
        report.optimizer = "SGD in the optimizer's place" if with_sgd else ""
        if not report.fine:
            break
    return report


def record(train: Callable[[], object], steps: int, with_sgd: bool) -> Tape:
    """Return the tape of a training on this rank."""
    with plain_sgd() if with_sgd else contextlib.nullcontext(), Tape(steps) as tape:
        train()
    return tape


@contextlib.contextmanager
def plain_sgd() -> Iterator[None]:
    """Replace `torch.optim.AdamW` and its like by plain SGD of the same learning rate."""
    before = {name: getattr(torch.optim, name) for name in ADAPTIVE}
    for name in ADAPTIVE:
        setattr(torch.optim, name, _Plain)
    try:
        yield
    finally:
        for name, optimizer in before.items():
            setattr(torch.optim, name, optimizer)


class _Plain(torch.optim.SGD):
    """SGD that takes, and drops, the options of an adaptive optimizer."""

    def __init__(self, params, lr=1e-3, *_, **__):
        super().__init__(params, lr=lr)
