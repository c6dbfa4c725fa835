"""Checker of notebook 01's puzzle: the answer is a program that hangs, as the puzzle asks."""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist

from ddpkit.runtime.errors import HangError
from ddpkit.runtime.run import Run

from .checker import Exercise, Mistake, Problem, Trial, mistakes, of_trial

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these


class Hung(Run):
    """A run that hung. A rank's results are what `waits` returns for it, once for each trial."""


class BreakIt(Exercise):
    """An exercise whose right answer hangs: what its ranks waited for is compared, as results are.

    Of several trials in one launch only the first is seen, as it never ends.
    """

    def _run(self, answer: Callable, trials: list[Trial], seconds: float) -> tuple[object, list]:
        outcome, noticed = super()._run(answer, trials, seconds)
        if isinstance(outcome, HangError):
            results = [[seen] * len(trials) for seen in waits(outcome)]
            outcome = Hung(results, outcome.output, outcome.wire, math.nan, "")
        return outcome, noticed

    def _problem(self, trials: list[Trial], outcome, noticed: list) -> Problem | None:
        if isinstance(outcome, Hung):  # no message of its is done, and none need be
            return self._wrong_values(trials[0], of_trial(outcome, 0))
        return super()._problem(trials, outcome, noticed)

    def _score(self, answer: Callable, trial: Trial, run: Run) -> str:
        """Leave the score out: a message that no rank took has no bytes to compare."""
        return ""


def waits(error: HangError) -> list[dict]:
    """Return each rank's "end", "calls" and "circle", which closes "after 2" ranks or "never"."""
    headline = str(error).partition("\n")[0]
    peers = [records[-1].peer if records else None for records in error.wire]
    found = []
    for rank, records in enumerate(error.wire):
        met, at = [], rank
        while at is not None and at not in met:
            met.append(at)
            at = peers[at]
        found.append(
            {
                "end": EACH if EACH in headline else headline,
                "circle": f"after {len(met)}" if at == rank else "never",
                "calls": len(records),
            }
        )
    return found


EACH = "each waits for another"


def wait_in_a_circle():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.recv(torch.empty(1), src=(rank + 1) % world_size)


def _run_circle(answer):
    answer()
    return {"end": "nobody hangs: it has ended on all ranks"}


def _trials():
    for world_size in (2, 4, 3, 5):
        right = {"end": EACH, "circle": f"after {world_size}", "calls": 1}
        yield Trial(world_size, _run_circle, (), [right] * world_size)


def one_gives_way():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    going, coming = torch.zeros(1), torch.empty(1)
    if rank == 0:
        dist.recv(coming, src=world_size - 1)
    dist.send(going, dst=(rank + 1) % world_size)
    if rank > 0:
        dist.recv(coming, src=rank - 1)


wait_in_a_circle = BreakIt(
    reference=wait_in_a_circle,
    plays=True,
    trials=_trials,
    hints={
        "start": "One dist.recv is enough. From whom, so that nobody can be the first to send?",
        "values": "Rank r waits for r + 1, and the last rank for rank 0: % world_size closes the "
        "circle.",
        "error": "A rank can't wait for itself, nor for one that isn't there: the neighbour is "
        "(rank + 1) % world_size.",
    },
    praise="one call a rank, and all wait for ever: one circle of 2, 3, 4 and 5 ranks. The report "
    "found it without waiting for a timeout.",
    note="dist.send to the next rank does it as well, on Gloo; on NCCL it may return.",
    says={
        "end": "expected that each waits for another; but {got}.",
        "circle": "from rank {rank}, one goes to the rank that it waits for, and on from there: "
        "back at rank {rank} {got}, expected {expected} ranks.",
        "calls": "it hangs as asked, but rank {rank} made {got} calls; {expected} is enough.",
    },
    mistakes=[
        Mistake.written(
            one_gives_way,
            "One rank receives first, and that is the way out: nobody may be first, neither to "
            "send nor to receive.",
        ),
        *mistakes("""
in_pairs: (rank + 1) % world_size → rank ^ 1 if rank ^ 1 < world_size else 0
    Those are circles of two, or a rank that waits for a circle and is in none: one circle goes
    through all.
to_the_first: (rank + 1) % world_size → 0 if rank else 1
    All wait for rank 0, which is in a circle with rank 1 alone: each rank waits for another one.
one_goes_home: dist.recv( → if rank > 0: dist.recv(
    A rank has returned, so the others wait for one that is gone, and there is no circle: that rank
    must wait, too.
in_a_barrier: dist.recv(torch.empty(1), src=(rank + 1) % world_size) → if rank > 0: dist.barrier()
    A rank that never comes to a collective hangs the others, but itself goes home: all must wait.
after_a_barrier: dist.recv( → dist.barrier()⏎dist.recv(
    A barrier before it is a call that ends, and helps nobody to hang.
"""),
    ],
)
