"""Let variants of the same work take turns, so that a change of the machine affects all alike.

All run in the same processes, in one order and then in reverse (ABBA). A turn begins after a
barrier and lasts until the slowest rank is done.
The first variant is the baseline. It has two turns in each round (A/A): the difference between them
is the effect of chance alone.
"""

import os
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..runtime.launch import launch
from ..runtime.link import Link
from ..runtime.wire import plain_group
from ..tools.checks import check_counts

# Rounds that don't count: connections are made, memory is touched, buckets are planned anew, an
# optimizer's state is made, a GPU wakes up.
WARM_UP = 3


@dataclass
class Contest:
    """The work that one rank times.

    calls: {variant's name: does its work once}. before: called with that name before its turn,
    untimed. found: called after the last round; `race` returns its result, and raises its error.
    """

    calls: dict[Hashable, Callable[[], object]]
    before: Callable[[Hashable], object] = lambda variant: None
    found: Callable[[], object] = lambda: None


def race(
    make: Callable[[ProcessGroup], Contest],
    rounds: int,
    world_size: int = 1,
    link: Link | None = None,
    backend: str = "gloo",
) -> tuple[dict[Hashable, tuple[float, ...]], list]:
    """Time a contest on fresh ranks: ({variant: seconds of each round}, each rank's `found`).

    make: called on every rank with a Gloo group of torch's own, which isn't recorded. backend and
        link are those of the default group, as of `launch`; ranks on Gloo see no GPU.
    """
    check_counts(rounds=rounds)
    options = {"world_size": world_size, "backend": backend, "link": link}
    run = launch(_take_turns, make, WARM_UP + rounds, **options)
    seconds = {}
    for variant in run[0][0]:
        seconds[variant] = until_the_last([turns[variant][WARM_UP:] for turns, _ in run])
    return seconds, [found for _, found in run]


def _take_turns(make: Callable, rounds: int) -> tuple[dict, object]:
    torch.set_num_threads(1)
    plain = plain_group()
    contest = make(plain)
    pin_to_a_core()
    turns = {variant: [] for variant in contest.calls}
    for number in range(rounds):
        for variant in turns if number % 2 == 0 else reversed(turns):
            contest.before(variant)
            synchronize()
            dist.barrier(plain)
            begun = time.perf_counter()
            contest.calls[variant]()
            synchronize()
            turns[variant].append((begun, time.perf_counter()))
    return turns, contest.found()


def synchronize() -> None:
    """Wait for the GPU, if one is in use: calls return before their kernels are done."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def until_the_last(ranks: Sequence[Sequence[tuple[float, float]]]) -> tuple[float, ...]:
    """Return for each round the seconds from the first rank's begin to the last rank's end.

    ranks: each rank's (begin, end) by round, by `time.perf_counter`, one clock for all processes.
    The longest of the ranks' own times would be too short where no rank waits for another: of four
    ranks that copy memory on two cores, two may begin when the others are done.
    """
    seconds = []
    for turns in zip(*ranks, strict=True):
        seconds.append(max(done for _, done in turns) - min(begun for begun, _ in turns))
    return tuple(seconds)


def pin_to_a_core() -> None:
    """Give each rank a core of its own, all its threads included.

    Only where there are enough: ranks that must share cores were slower when pinned.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    if dist.get_world_size() <= len(cores):
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), {cores[dist.get_rank()]})


def check_close(what: str, got: Tensor, expected: Tensor, tolerance: float) -> None:
    """Raise RuntimeError unless both are equal to within `tolerance`, a part of the norm."""
    off = ((got - expected).norm() / expected.norm()).item()
    if not off <= tolerance:  # NaN isn't
        raise RuntimeError(f"{what} is off by {off:.1e}: its time would mean nothing")
