"""Variants of the same work take turns, so that they make the difference and not the moment.

All run in the same processes, in one order and then in reverse (ABBA): a machine that grows slower
meanwhile treats them alike. A call begins behind a barrier and lasts until the slowest rank is
done. The first variant is the baseline. It has two turns in each round (A/A), and how these differ
is how far chance alone goes.
"""

import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..lesson import charts
from ..runtime.launch import launch
from ..tools.checks import check_counts
from .results import AGAIN, Goal, Result, Results, judge, report

WARM_UP = 2  # rounds that don't count: connections are made, memory is touched, a GPU wakes up
FEWEST_ROUNDS, MOST_ROUNDS = 12, 100


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
    world_sizes: Sequence[int],
    rounds: int | None = None,
) -> Results:
    """Time every variant with every size in every world, on fresh ranks for each.

    operation: in the words of `cost.bus_bandwidth`. sizes: bytes. rounds: None: `usual_rounds`.
    make: called on every rank with the number of float32 elements (a multiple of W) and the group;
        returns {name: variant}, the baseline first.
    ValueError: fewer than 2 ranks, less than one element for each, no round.
    """
    check_rounds(1 if rounds is None else rounds, *world_sizes)
    for world_size in world_sizes:
        if min(sizes) < 4 * world_size:
            expected = f"expected 4 bytes or more for each of {world_size} ranks"
            raise ValueError(f"{expected}, got {min(sizes)} for all")
    found = Results()
    for world_size in world_sizes:
        for nbytes in sizes:
            arguments = make, nbytes, rounds or usual_rounds(nbytes)
            run = launch(time_on_rank, *arguments, world_size=world_size, backend="gloo")
            for name, (ceiling, _) in run[0].items():
                seconds = until_the_last([variants[name][1] for variants in run])
                found.append(Result(operation, name, world_size, nbytes, seconds, ceiling))
    return found


def check_rounds(rounds: int, *world_sizes: int) -> None:
    check_counts(rounds=rounds)
    if min(world_sizes) < 2:
        raise ValueError(f"expected 2 ranks or more, got {min(world_sizes)}: one has no partner")


def usual_rounds(nbytes: int) -> int:
    """More where the tensor is small and a round short."""
    return min(MOST_ROUNDS, max(FEWEST_ROUNDS, 200_000_000 // nbytes))


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


# On a rank


def time_on_rank(make: Callable, nbytes: int, rounds: int) -> dict[str, tuple[str, list]]:
    """{variant: (its ceiling, (begun, done) of each round)}, as this rank saw it."""
    group = one_thread_and_a_plain_group()
    variants = make(nbytes // 4 // dist.get_world_size() * dist.get_world_size(), group)
    baseline = next(iter(variants))
    variants[baseline + AGAIN] = variants[baseline]
    pin_to_a_core()

    def turn(name: str) -> tuple[float, float]:
        variants[name].tensor.fill_(1)
        times, found = timed(variants[name].call, group)
        if not (found == variants[name].value).all():
            wrong = f"{name} gave wrong numbers on rank {dist.get_rank()}"
            raise RuntimeError(f"{wrong}: its time would mean nothing")
        return times

    take_turns(list(variants), WARM_UP, turn)
    times = take_turns(list(variants), rounds, turn)
    return {name: (variant.ceiling, times[name]) for name, variant in variants.items()}


def one_thread_and_a_plain_group() -> ProcessGroup:
    """torch's own group: the world that `launch` made takes time to record each call."""
    torch.set_num_threads(1)
    return dist.new_group(backend="gloo")


def timed(call: Callable, group: ProcessGroup | None = None) -> tuple[tuple[float, float], object]:
    """((when it began, when it was done), what it returned), behind a barrier of `group`."""
    synchronize()
    if group:
        dist.barrier(group)
    begun = time.perf_counter()
    found = call()
    synchronize()
    return (begun, time.perf_counter()), found


def synchronize() -> None:
    """Wait for the GPU, if one is in use: calls return before it is done."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def take_turns(names: Sequence[str], rounds: int, turn: Callable) -> dict[str, list]:
    """{name: what turn(name) returned in each round}; every second round in reverse."""
    found = {name: [] for name in names}
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            found[name].append(turn(name))
    return found


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


# Ceilings, and a GPU's group


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


# For `python -m ddpkit.bench`


def report_collective(name: str, found: Results, goals: Sequence[Goal]) -> None:
    def draw() -> dict:
        return {"time": charts.average_time(found), "bandwidth": charts.bandwidth(found)}

    report(name, where(), found, judge(goals, found), draw)


def where() -> str:
    return f"{os.cpu_count()} cores, one thread a rank"
