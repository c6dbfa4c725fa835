"""The launcher's budgets: how long a reader waits for ranks, for bad news, and for a stop."""

import contextlib
import ctypes
import io
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ..runtime.errors import HangError, LaunchError, RankError
from ..runtime.launch import launch
from ..runtime.live import RanksMagic
from . import Row, report


def main():
    import_torch = median_of(3, time_import_torch)
    first = [
        launch_s / statistics.median(import_torch) for launch_s in median_of(3, time_first_launch)
    ]
    launch(add)
    warm = median_of(20, time_launch)
    killed = median_of(5, time_until_a_killed_rank_is_reported)
    deadlock = median_of(5, time_until_a_deadlock_is_reported)
    interrupt = [time_until_interrupted(work) for work in (compute, sleep, hold_the_lock_in_c)]
    cells = time_cells(50)
    gone = median_of(3, time_until_all_are_gone)
    report(
        "launch",
        [
            Row(
                "first launch of a process, in times of `import torch`",
                2.5,
                statistics.median(first),
                "x",
                first,
            ),
            Row(
                "4 fresh ranks, one all_reduce: median of 20",
                0.15,
                statistics.median(warm),
                "s",
                warm,
            ),
            Row(
                "4 fresh ranks, one all_reduce: 90 % of 20",
                0.15,
                statistics.quantiles(warm, n=10)[-1],
                "s",
                warm,
            ),
            Row(
                "%%ranks 4 with an empty cell: median of 50",
                5.0,
                statistics.median(cells),
                "ms",
                cells,
            ),
            Row("SIGKILL in an all_reduce, until RankError", 0.5, max(killed), "s", killed),
            Row("certain deadlock, until HangError", 3.0, max(deadlock), "s", deadlock),
            Row("interrupt, until KeyboardInterrupt", 1.0, max(interrupt), "s", interrupt),
            Row("SIGKILL of the notebook, until nothing is left", 2.0, max(gone), "s", gone),
        ],
    )


def median_of(times: int, measure) -> list[float]:
    return [measure() for _ in range(times)]


# Starting.


def add() -> float:
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()


def python(source: str) -> str:
    """What a new Python prints."""
    return subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True
    ).stdout


def time_import_torch() -> float:
    return float(
        python("import time; t = time.perf_counter(); import torch; print(time.perf_counter() - t)")
    )


def time_first_launch() -> float:
    return float(python("from ddpkit.bench.launch import time_launch; print(time_launch())"))


def time_launch() -> float:
    begun = time.perf_counter()
    assert list(launch(add, world_size=4)) == [4.0] * 4
    return time.perf_counter() - begun


def time_cells(times: int) -> list[float]:
    """Milliseconds for each of so many empty cells, on ranks that are there already."""
    magic, found = RanksMagic(), []
    magic("4", "pass")
    for _ in range(times):
        begun = time.perf_counter()
        magic("", "pass")
        found.append((time.perf_counter() - begun) * 1e3)
    magic.close()
    return found


# Bad news. Ranks print when it happens; `time.perf_counter()` is the same clock in all processes of a machine.


def time_until_told(fn, kind: type[LaunchError]) -> float:
    """Seconds from the last time that a rank printed until launch raised."""
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            launch(fn)
        except kind as error:
            return time.perf_counter() - max(float(text) for text in error.output if text)
    raise AssertionError("nothing was raised")


def time_until_a_killed_rank_is_reported() -> float:
    return time_until_told(die_in_an_all_reduce, RankError)


def die_in_an_all_reduce():
    if dist.get_rank() == 1:
        threading.Timer(0.2, die).start()
    while True:
        dist.all_reduce(torch.ones(100_000))


def die():
    print(time.perf_counter(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def time_until_a_deadlock_is_reported() -> float:
    return time_until_told(skip_an_all_reduce, HangError)


def skip_an_all_reduce():
    add()
    print(time.perf_counter(), flush=True)
    if dist.get_rank() != 1:
        add()


# Stopping.


def compute():
    while True:
        pass


def sleep():
    time.sleep(1e6)


def hold_the_lock_in_c():
    ctypes.PyDLL(None).sleep(1000)


def time_until_interrupted(work) -> float:
    pressed = []

    def press():
        pressed.append(time.perf_counter())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Timer(0.5, press).start()
    try:
        launch(work)
    except KeyboardInterrupt:
        return time.perf_counter() - pressed[0]
    raise AssertionError("no interrupt came")


NOTEBOOK = """
import os, time
from ddpkit import launch
from ddpkit.bench.launch import hold_the_lock_in_c

def work():
    child = os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "1000")
    print(os.getpid(), child, os.getppid(), flush=True)
    hold_the_lock_in_c()

launch(work, live=True)
"""


def time_until_all_are_gone() -> float:
    """A notebook with 4 ranks that hold the interpreter's lock, each with a child, is killed."""
    notebook = subprocess.Popen([sys.executable, "-c", NOTEBOOK], stdout=subprocess.PIPE, text=True)
    pids = {
        int(word) for _ in range(4) for word in notebook.stdout.readline().split("|")[1].split()
    }
    time.sleep(0.2)
    begun = time.perf_counter()
    notebook.kill()
    notebook.communicate()
    while any(map(lives, pids)):
        time.sleep(0.005)
    return time.perf_counter() - begun


def lives(pid: int) -> bool:
    """Whether there is such a process, and not just its last trace that nobody has collected."""
    try:
        if Path("/proc/self").exists():
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        os.kill(pid, 0)
    except (FileNotFoundError, ProcessLookupError):
        return False
    return True
