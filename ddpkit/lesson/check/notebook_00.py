"""Checkers of notebook 00: say_hello, neighbours."""

import io
import sys
import time

import torch.distributed as dist

from ddpkit.runtime.launch import Run

from .exercise import Exercise, Trial

# Say hello in rank order.


def say_hello():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for turn in range(world_size):
        if turn == rank:
            print(f"hello from rank {rank} of {world_size}")
        dist.barrier()


class _Listener(io.StringIO):
    """Stands in for a rank's standard output and notes when each piece was printed."""

    def __init__(self):
        super().__init__()
        self.times = []

    def write(self, text):
        self.times.append(time.perf_counter())
        return super().write(text)


def _listen(answer):
    """Call the answer with the low ranks late, so that an order that comes by luck doesn't come."""
    listener, real = _Listener(), sys.stdout
    dist.barrier()
    time.sleep(0.05 * (dist.get_world_size() - 1 - dist.get_rank()))
    sys.stdout = listener
    try:
        answer()
    finally:
        sys.stdout = real
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, listener.times[:1])
    first = [times[0] if times else 0.0 for times in everyone]
    before_me = dist.get_rank() == 0 or first[dist.get_rank() - 1] < first[dist.get_rank()]
    return [listener.getvalue(), "after the rank before it" if before_me else "before the rank before it"]


def _hello_trials():
    for world_size in (2, 3, 4):
        expected = [[f"hello from rank {r} of {world_size}\n", "after the rank before it"] for r in range(world_size)]
        yield Trial(world_size, _listen, (), expected)


def _hello_cause(trial: Trial, rank: int, expected, got):
    text, _ = got
    if text == "":
        return "This rank printed nothing. Every rank must take its turn."
    if text != expected[0]:
        if text.strip() == expected[0].strip():
            return "The text must be one line, ended by print itself."
        if text.count("hello") > 1:
            return "A rank must speak only when it is its turn, once."
        return "The line must read exactly so; rank and world size come from dist.get_rank() and dist.get_world_size()."
    return (
        "The ranks were slowed down on purpose, low ranks most, and the order broke: nothing makes a rank wait for the "
        "one before it. A message or a barrier does."
    )


def _hello_wire(trial: Trial, run: Run):
    if any(len(diary) <= 3 for diary in run.wire):  # the checker itself makes three calls on each rank
        return (
            "the order is right, but one rank heard nothing from the others: it waited by the clock.\n"
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
    _hello_wire,
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
    if not all(0 <= neighbour < trial.world_size for neighbour in got):
        outside = next(neighbour for neighbour in got if not 0 <= neighbour < trial.world_size)
        return f"There is no rank {outside}: the ring must close. The remainder, %, brings it round."
    if trial.world_size == 1:
        return "A rank alone in its world is its own neighbour on both sides."
    return "Count with the size of this world, dist.get_world_size(), not with a fixed number."


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
)
