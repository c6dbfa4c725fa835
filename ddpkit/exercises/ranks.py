"""Checkers of notebook 00: say_hello, neighbours."""

import io
import sys
import time

import torch.distributed as dist

from ddpkit.runtime.launch import Run

from .old_checker import Exercise, Trial

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these

# Say hello in rank order.


def say_hello():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for turn in range(world_size):
        if turn == rank:
            print(f"hello from rank {rank} of {world_size}")
        dist.barrier()


class _Listener(io.StringIO):
    """Stands in for a rank's standard output and notes when it first printed something."""

    printed_at = None

    def write(self, text):
        self.printed_at = self.printed_at or time.perf_counter()
        return super().write(text)


def _listen(answer):
    """Call the answer with the low ranks late, so that an order that comes by luck doesn't come.

    Returns the text only, so that a trial can say what it expects; the time is left where `_order` finds it.
    """
    time.sleep(0.05 * (dist.get_world_size() - 1 - dist.get_rank()))
    listener, real = _Listener(), sys.stdout
    sys.stdout = listener
    try:
        answer()
    finally:
        sys.stdout = real
    return Said(listener.getvalue(), listener.printed_at)


class Said(str):
    """What a rank printed, and when."""

    def __new__(cls, text, at):
        said = super().__new__(cls, text)
        said.at = at
        return said

    def __reduce__(self):
        return Said, (str(self), self.at)


def _hello_trials():
    for world_size in (2, 3, 4):
        yield Trial(world_size, _listen, (), [f"hello from rank {r} of {world_size}\n" for r in range(world_size)])


def _hello_cause(trial: Trial, rank: int, expected, got):
    if got == "":
        return "This rank printed nothing. Every rank must take its turn."
    if got.strip() == expected.strip():
        return "The text must be one line, ended by print itself."
    if got.count("hello") > 1:
        return "A rank must speak only when it is its turn, once."
    return "The line must read exactly so; rank and world size come from dist.get_rank() and dist.get_world_size()."


def _hello_order(trial: Trial, run: Run):
    """Each rank must have heard something after the rank before it printed, and before it printed itself."""
    for rank in range(1, trial.world_size):
        earlier, mine = run[rank - 1].at, run[rank].at
        if mine < earlier:
            return (
                f"rank {rank} printed before rank {rank - 1} did.\n"
                "Low ranks were slowed down on purpose, and nothing makes a rank wait for the one before it. "
                "A message or a barrier does."
            )
        if not any(earlier < record.done < mine for record in run.wire[rank] if record.done and record.op != "send"):
            return (
                f"the order came out right, but rank {rank} heard nothing between rank {rank - 1}'s line and its own: "
                "it waited by the clock.\n"
                "On a busy machine any sleep is too short. A message or a barrier is certain."
            )
    return None


say_hello = Exercise(
    say_hello,
    _hello_trials,
    [
        "Let every rank go through all turns: for turn in range(world_size). Whose turn is it?",
        "dist.barrier() lets no rank on before all have come to it. Where must it stand so that turns don't mix?",
        "In each turn: the rank whose turn it is prints; then all ranks, not only that one, meet at a barrier.",
    ],
    "in rank order, also when low ranks are slow.",
    _hello_cause,
    _hello_order,
    note="# Ours. Yours may look different: the check looks at what it does.",
)


# Find your neighbours.


def neighbours():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return (rank - 1) % world_size, (rank + 1) % world_size


def _neighbours_trials():
    for world_size in (2, 3, 4, 1):
        yield Trial(world_size, _call, (), [((r - 1) % world_size, (r + 1) % world_size) for r in range(world_size)])


def _call(answer):
    return answer()


def _neighbours_cause(trial: Trial, rank: int, expected, got):
    if not (isinstance(got, tuple | list) and len(got) == 2):
        return "Return two ranks: left, right."
    got = tuple(got)
    if got == expected:
        return "Return a tuple: return left, right."
    if got == expected[::-1]:
        return "These are the right ranks the wrong way round: left is the rank below, right the rank above."
    outside = next((neighbour for neighbour in got if not 0 <= neighbour < trial.world_size), None)
    if outside in (-1, trial.world_size):
        return f"There is no rank {outside}: the ring must close. The remainder, %, brings it round."
    if trial.world_size == 1:
        return "A rank alone in its world is its own neighbour on both sides."
    there = f"There is no rank {outside}. " if outside is not None else ""
    return f"{there}Count with the size of this world, dist.get_world_size(), not with a fixed number."


neighbours = Exercise(
    neighbours,
    _neighbours_trials,
    [
        "The right neighbour of rank r is r + 1, the left one r - 1, except at the ends.",
        "In Python, (r + 1) % world_size is 0 for the last rank. And -1 % 4 is 3.",
    ],
    "the ring closes in every world from 1 to 4.",
    _neighbours_cause,
    lambda trial, run: None,
    note="# Ours. Yours may look different: the check looks at what it does.",
)
