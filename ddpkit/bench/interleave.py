"""Variants of the same work take turns, so that they make the difference and not the moment.

All run in the same processes, in one order and then in reverse (ABBA): a machine that grows slower
meanwhile treats them alike. A turn begins behind a barrier and lasts until the slowest rank is
done. The first variant is the baseline. It has two turns in each round (A/A), and how these differ
is how far chance alone goes.
"""

import os
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..lesson import charts
from ..runtime.launch import launch
from ..runtime.link import Link
from ..tools.checks import check_counts
from .results import AGAIN, Goal, Result, Results, judge, report

WARM_UP = 2  # rounds that don't count: connections are made, memory is touched, a GPU wakes up
FEWEST_ROUNDS, MOST_ROUNDS = 12, 100


@dataclass
class Contest:
    """What one rank has to time.

    calls: {variant: does the work once}. before: called with a variant before its turn, outside the
    time. found: after the last round; what it returns is kept, what it raises ends the benchmark.
    """

    calls: dict[Hashable, Callable[[], object]]
    before: Callable[[Hashable], object] = lambda variant: None
    found: Callable[[], object] = lambda: None


def race(
    make: Callable[[ProcessGroup], Contest],
    rounds: int,
    warm_up: int = WARM_UP,
    world_size: int = 1,
    link: Link | None = None,
) -> tuple[dict[Hashable, tuple[float, ...]], list]:
    """({variant: seconds of each round}, what each rank's `found` returned), on fresh ranks.

    make: called on every rank with a plain group of torch's, which records nothing.
    """
    check_counts(rounds=rounds)
    options = {"world_size": world_size, "backend": "gloo", "link": link}
    run = launch(_take_turns, make, rounds, warm_up, **options)
    seconds = {}
    for variant in run[0][0]:
        seconds[variant] = until_the_last([turns[variant] for turns, _ in run])
    return seconds, [found for _, found in run]


def _take_turns(make: Callable, rounds: int, warm_up: int) -> tuple[dict, object]:
    torch.set_num_threads(1)
    plain = dist.new_group(backend="gloo")
    contest = make(plain)
    pin_to_a_core()
    turns = {variant: [] for variant in contest.calls}
    for number in range(warm_up + rounds):
        for variant in turns if number % 2 == 0 else reversed(turns):
            contest.before(variant)
            turns[variant].append(timed(contest.calls[variant], plain))
    return {variant: times[warm_up:] for variant, times in turns.items()}, contest.found()


def timed(call: Callable, group: ProcessGroup) -> tuple[float, float]:
    """(when it began, when it was done), behind a barrier of `group`."""
    synchronize()
    dist.barrier(group)
    begun = time.perf_counter()
    call()
    synchronize()
    return begun, time.perf_counter()


def synchronize() -> None:
    """Wait for the GPU, if one is in use: calls return before it is done."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def until_the_last(ranks: Sequence[Sequence[tuple[float, float]]]) -> tuple[float, ...]:
    """Round by round, the seconds from when the first rank began until the last was done.

    ranks: for each, when it began and was done; `time.perf_counter` is one clock for a machine.
    The longest of the ranks' own times would be too short for what needs no partner: of four ranks
    that copy memory on two cores, two begin when the others are done.
    """
    seconds = []
    for each in zip(*ranks, strict=True):
        seconds.append(max(done for _, done in each) - min(begun for begun, _ in each))
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


# Collectives


class Variant(NamedTuple):
    """One way to do the work, on one rank.

    tensor: what it works on; filled with 1 before each call, outside the time.
    call: does it once; returns the tensor that must then hold `value` everywhere.
    ceiling: the variant that moves as many bytes in the plainest way.
    """

    tensor: Tensor
    call: Callable[[], Tensor]
    value: float
    ceiling: str = ""


def measure(
    operation: str,
    make: Callable[[int, ProcessGroup], dict[str, Variant]],
    sizes: Sequence[int],
    world_sizes: Sequence[int] = (2, 4),
    rounds: int | None = None,
) -> Results:
    """Time every variant with every size in every world.

    operation: in the words of `cost.bus_bandwidth`. sizes: bytes. rounds: None: `usual_rounds`.
    make: called on every rank with the number of float32 elements (a multiple of W) and the group;
        returns {name: variant}, the baseline first.
    ValueError: less than one element for a rank, no round. RuntimeError: a wrong sum.
    """
    found = Results()
    for world_size in world_sizes:
        for nbytes in sizes:
            numel = nbytes // 4 // world_size * world_size
            check_counts(numel=numel)
            many = usual_rounds(nbytes) if rounds is None else rounds
            contest = partial(_collectives, partial(make, numel))
            seconds, ranks = race(contest, many, world_size=world_size)
            for name, ceiling in ranks[0].items():
                found.append(Result(operation, name, world_size, nbytes, seconds[name], ceiling))
    return found


def _collectives(
    make: Callable[[ProcessGroup], dict[str, Variant]], plain: ProcessGroup
) -> Contest:
    variants = make(plain)
    baseline = next(iter(variants))
    variants[baseline + AGAIN] = variants[baseline]

    def before(name: str) -> None:
        variants[name].tensor.fill_(1)

    def found() -> dict[str, str]:
        for name, variant in variants.items():
            before(name)
            if not (variant.call() == variant.value).all():
                wrong = f"{name} gave wrong numbers on rank {dist.get_rank()}"
                raise RuntimeError(f"{wrong}: its time would mean nothing")
        return {name: variant.ceiling for name, variant in variants.items()}

    return Contest({name: each.call for name, each in variants.items()}, before, found)


def usual_rounds(nbytes: int) -> int:
    """More where the tensor is small and a round short."""
    return min(MOST_ROUNDS, max(FEWEST_ROUNDS, 200_000_000 // nbytes))


def memcpy(x: Tensor, place: Tensor) -> Variant:
    """Copy `x` to another place in this rank's own memory, on all ranks at once."""
    return Variant(x, lambda: place.copy_(x), 1)


def loopback(x: Tensor, landing: Tensor, messages: int, group: ProcessGroup) -> Variant:
    """Send `x` to the right so often, and receive as many from the left, on all ranks at once."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    right, left = (rank + 1) % world_size, (rank - 1) % world_size

    def call() -> Tensor:
        works = []
        for _ in range(messages):
            works.append(dist.irecv(landing, group=group, group_src=left))
        for _ in range(messages):
            works.append(dist.isend(x, group=group, group_dst=right))
        for work in works:
            work.wait()
        return landing

    return Variant(x, call, 1)


def nccl_group() -> ProcessGroup | None:
    """A plain NCCL group, this rank on the GPU of its number; None without a GPU for each rank."""
    if not dist.is_nccl_available() or torch.cuda.device_count() < dist.get_world_size():
        return None
    torch.cuda.set_device(dist.get_rank())
    return dist.new_group(backend="nccl")


def report_collective(name: str, found: Results, goals: Sequence[Goal]) -> None:
    def draw() -> dict:
        return {"time": charts.average_time(found), "bandwidth": charts.bandwidth(found)}

    report(name, where(), found, judge(goals, found), draw)


def where() -> str:
    return f"{os.cpu_count()} cores, one thread a rank"
