"""The launcher's budgets: how long a reader waits for ranks, and for the error if one fails."""

import contextlib
import io
import os
import signal
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist

from ..runtime.errors import LaunchError
from ..runtime.launch import launch
from ..runtime.live import RanksMagic
from .results import save, table

BURN = [sys.executable, "-c", "while True: pass"]


def main(name: str):
    launch(add)
    warm = [time_launch() for _ in range(20)]
    with contextlib.ExitStack() as stack:
        for _ in range(os.cpu_count()):
            stack.callback(stack.enter_context(subprocess.Popen(BURN)).kill)
        busy = [time_launch() for _ in range(20)]
    report(
        [  # what, budget, measured, unit
            ("4 fresh ranks, one all_reduce: median", 0.15, statistics.median(warm), "s"),
            ("the same, every core busy: median", 0.25, statistics.median(busy), "s"),
            ("%%ranks 4 with an empty cell: median", 2.0, time_cell(), "ms"),
            ("SIGKILL in an all_reduce, until RankError", 0.5, time_until_told(die), "s"),
            ("certain deadlock, until HangError", 3.0, time_until_told(stay_away), "s"),
        ]
    )


def report(rows: list[tuple[str, float, float, str]]) -> None:
    lines = [("", "budget", "measured", "within?")]
    for what, budget, measured, unit in rows:
        within = "yes" if measured <= budget else "NO"
        lines.append((what, f"{budget:g} {unit}", f"{measured:.3g} {unit}", within))
    print(f"launch, on {os.cpu_count()} cores\n{table(lines)}")
    save("launch", {"rows": rows})


def add() -> float:
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()


def time_launch() -> float:
    begun = time.perf_counter()
    assert list(launch(add, world_size=4)) == [4.0] * 4
    return time.perf_counter() - begun


def time_cell(times: int = 50) -> float:
    """Measure the milliseconds of an empty cell, on ranks that are running already."""
    magic, found = RanksMagic(), []
    magic("4", "pass")
    for _ in range(times):
        begun = time.perf_counter()
        magic("", "pass")
        found.append((time.perf_counter() - begun) * 1e3)
    magic.close()
    return statistics.median(found)


# Failures. Ranks print the time at which one happens; a machine has one `time.perf_counter()`.


def time_until_told(fn, tries: int = 5) -> float:
    """Return the seconds from the last time that `fn` printed until launch raised: the longest."""
    found = []
    for _ in range(tries):
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                launch(fn)
        except LaunchError as error:
            found.append(time.perf_counter() - max(float(text) for text in error.output if text))
    assert len(found) == tries
    return max(found)


def die():
    if dist.get_rank() == 1:
        print(time.perf_counter(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    add()


def stay_away():
    add()
    print(time.perf_counter(), flush=True)
    if dist.get_rank() != 1:
        add()
