"""`same_training`: run a training on one rank and on several; compare gradients and parameters."""

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
    """Train on one rank and on `world_size`; report what differs, on which ranks, by which factor.

    serial, parallel: functions without arguments that train something. They must begin alike (seed
    them), and use the same samples in each step, the parallel one on all ranks together. steps: the
    number of updates to compare, until one differs. sgd: if none does, train both again with SGD in
    the place of AdamW and its like, whose updates hardly change when a gradient is 3 times too
    large (see `plain_sgd`). rename: {a name in the parallel model: in the serial one}. to_the_bit:
    allow no rounding errors.

    Take 3 ranks for 2 micro-batches, not 2 for 2: then a factor has one cause.
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
    """Run `train`; return a `Tape`, with gradients and parameters of its first `steps` updates."""
    with plain_sgd() if with_sgd else contextlib.nullcontext(), Tape(steps) as tape:
        train()
    return tape


@contextlib.contextmanager
def plain_sgd() -> Iterator[None]:
    """Let `torch.optim.AdamW` and the others in ADAPTIVE be plain SGD inside a `with` block.

    A class that was imported by name before (`from torch.optim import AdamW`) stays what it is.
    """
    before = {name: getattr(torch.optim, name) for name in ADAPTIVE}
    for name in ADAPTIVE:
        setattr(torch.optim, name, _Plain)
    try:
        yield
    finally:
        for name, optimizer in before.items():
            setattr(torch.optim, name, optimizer)


class _Plain(torch.optim.SGD):
    """SGD that ignores an adaptive optimizer's options, but for `lr` and those in its groups."""

    def __init__(self, params, lr=1e-3, *_, **__):
        super().__init__(params, lr=lr)
