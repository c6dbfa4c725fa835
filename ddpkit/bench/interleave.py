"""Times variants of the same work against each other, so that the variant makes the difference and not the moment.

All variants run in the same processes and take turns, in one order and then in reverse (ABBA): a machine that grows
slower meanwhile treats them alike. A call begins behind a barrier and lasts until the slowest rank is done. The first
variant is the baseline. It has two turns in each round, and how these differ is how far chance alone goes.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .. import bench
from ..lesson import charts
from ..runtime.launch import launch
from ..runtime.link import Link
from .results import AGAIN, Goal, Result, Results, judge

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
    make: Callable[[int, ProcessGroup, bool], dict[str, Variant]],
    sizes: Sequence[int],
    world_sizes: Sequence[int],
    rounds: int | None = None,
    link: Link | None = None,
) -> Results:
    """Time every variant with every size in every world, on fresh ranks for each.

    operation: in the words of `cost.bus_bandwidth`. sizes: bytes. rounds: how many (None: `usual_rounds`).
    make: called on every rank with the number of float32 elements (a multiple of W), the group to talk in, and whether
        that group's wire is emulated; returns {name: variant}, alike on all ranks, the baseline first.
    link: emulate this link under the messages; if it is `slowed`, times are divided by its `slowdown`.
    ValueError: fewer than 2 ranks, less than one element for each, no round.
    """
    _check(sizes, world_sizes, rounds)
    results = Results()
    cases = [(world_size, nbytes) for world_size in world_sizes for nbytes in sizes]
    for number, (world_size, nbytes) in enumerate(cases):
        _show_progress(number, len(cases))
        many = rounds or usual_rounds(nbytes)
        run = launch(time_on_rank, make, nbytes, many, bool(link), world_size=world_size, backend="gloo", link=link)
        for name, (ceiling, _) in run[0].items():
            seconds = until_the_last([variants[name][1] for variants in run])
            if link:
                seconds = tuple(each / link.slowdown for each in seconds)
            results.append(Result(operation, name, world_size, nbytes, seconds, ceiling, name_of(link)))
    _show_progress(len(cases), len(cases))
    return results


def name_of(link: Link | None) -> str:
    if link is None or link.slowdown == 1:
        return str(link or "")
    return f"{link}, times divided by {link.slowdown:g}"


def usual_rounds(nbytes: int) -> int:
    """More where the tensor is small and a round short."""
    return min(MOST_ROUNDS, max(FEWEST_ROUNDS, 200_000_000 // nbytes))


def until_the_last(ranks: Sequence[Sequence[tuple[float, float]]]) -> tuple[float, ...]:
    """Round by round, the seconds from when the first rank began until the last was done.

    ranks: for each, when it began and when it was done; `time.perf_counter` is one clock for all of a machine. The
    longest of the ranks' own times would be too short for what needs no partner: of four ranks that copy memory on
    two cores, two begin when the others are done.
    """
    rounds = zip(*ranks, strict=True)
    return tuple(max(done for _, done in each) - min(begun for begun, _ in each) for each in rounds)


def in_turn(names: Sequence[str], number: int) -> list[str]:
    """The order of the variants in round `number`."""
    return list(names) if number % 2 == 0 else list(reversed(names))


def _check(sizes: Sequence[int], world_sizes: Sequence[int], rounds: int | None) -> None:
    for world_size in world_sizes:
        if world_size < 2:
            raise ValueError(f"expected 2 ranks or more, got {world_size}: one alone has nobody to talk to")
        for nbytes in sizes:
            if nbytes < 4 * world_size:
                raise ValueError(f"expected 4 bytes or more for each of {world_size} ranks, got {nbytes} for all")
    if rounds is not None and rounds < 1:
        raise ValueError(f"expected 1 round or more, got {rounds}: leave rounds out for as many as the size needs")


def _show_progress(done: int, of: int) -> None:
    """A bar in a terminal; gone when all is done."""
    if sys.stderr.isatty():
        bar = f"\r[{'#' * (40 * done // of):40}] {done} of {of}" if done < of else "\r\033[K"
        print(bar, end="", file=sys.stderr, flush=True)


# On a rank


def time_on_rank(make: Callable, nbytes: int, rounds: int, emulated: bool) -> dict[str, tuple[str, list]]:
    """{variant: (its ceiling, (begun, done) for each round)}, as this rank saw it."""
    torch.set_num_threads(1)
    world_size = dist.get_world_size()
    plain = dist.new_group(backend="gloo")  # torch's own: the world that `launch` made takes time to record each call
    variants = make(nbytes // 4 // world_size * world_size, dist.group.WORLD if emulated else plain, emulated)
    baseline = next(iter(variants))
    variants[baseline + AGAIN] = variants[baseline]
    pin_to_a_core()
    for name in list(variants) * WARM_UP:
        _, found = _time(variants[name], plain)
        if not (found == variants[name].value).all():
            raise RuntimeError(f"{name} gave wrong numbers on rank {dist.get_rank()}: its time would mean nothing")
    times = take_turns(list(variants), rounds, lambda name: _time(variants[name], plain)[0])
    return {name: (variant.ceiling, times[name]) for name, variant in variants.items()}


def _time(variant: Variant, group: ProcessGroup) -> tuple[tuple[float, float], Tensor]:
    """((when it began, when it was done), what the call returned)."""
    variant.tensor.fill_(1)
    if variant.tensor.is_cuda:
        torch.cuda.synchronize()
    return timed(variant.call, group)


def timed(call: Callable, group: ProcessGroup) -> tuple[tuple[float, float], object]:
    """((when it began, when it was done), what it returned), behind a barrier of `group`."""
    dist.barrier(group)
    begun = time.perf_counter()
    found = call()
    return (begun, time.perf_counter()), found


def take_turns(names: Sequence[str], rounds: int, turn: Callable[[str], tuple]) -> dict[str, list[tuple]]:
    """{name: what turn(name) returned in each round}, in the order of `in_turn`."""
    found = {name: [] for name in names}
    for number in range(rounds):
        for name in in_turn(names, number):
            found[name].append(turn(name))
    return found


def pin_to_a_core() -> None:
    """Give each rank a core of its own, all its threads included.

    Only where there are enough: ranks that must share cores were slower when pinned, whatever the variant.
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
    """Send `x` to the next rank some times, and receive as many such messages, on all ranks at once."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)

    def call() -> Tensor:
        works = [dist.irecv(landing, group=group, group_src=(rank - 1) % world_size) for _ in range(messages)]
        works += [dist.isend(x, group=group, group_dst=(rank + 1) % world_size) for _ in range(messages)]
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


def report(name: str, results: Results, goals: Sequence[Goal]) -> None:
    """Print the table and the goals; keep them, the pictures and every single time in bench-results."""
    print(f"{name}, on {os.cpu_count()} cores, one thread a rank\n{results}\n")
    judged = judge(goals, results)
    lines = [(goal.what, goal.text, str(ratio), verdict) for goal, ratio, verdict in judged]
    print(bench.table([("Goals", "", "measured", "met?"), *lines]))
    bench.save(
        name,
        {
            "results": [
                asdict(each) | {"median_s": each.median_s, "algbw": each.algbw, "busbw": each.busbw} for each in results
            ],
            "goals": [asdict(goal) | {"measured": ratio, "met": verdict} for goal, ratio, verdict in judged],
        },
    )
    _draw(name, results, bench.RESULTS)


def _draw(name: str, results: Results, folder: Path) -> None:
    try:
        pictures = {"time": charts.average_time(results), "bandwidth": charts.bandwidth(results)}
    except ImportError as missing:
        print(f"no pictures: {missing.name} isn't installed here")
        return
    for what, picture in pictures.items():
        (folder / f"{name}_{what}.png").write_bytes(picture.png)
