"""The launcher's budgets: how long a reader waits for ranks and for bad news."""

import contextlib
import io
import os
import signal
import statistics
import subprocess
import sys
import threading
import time

import torch
import torch.distributed as dist

from ..runtime.errors import HangError, LaunchError, RankError
from ..runtime.launch import launch
from ..runtime.live import RanksMagic
from .interleave import where
from .results import save, table


def main():
    imports = [time_in_new_python("import torch") for _ in range(3)]
    first = [time_in_new_python(FIRST) / statistics.median(imports) for _ in range(3)]
    launch(add)
    warm = [time_launch() for _ in range(20)]
    with every_core_busy():
        busy = [time_launch() for _ in range(20)]
    killed = [time_until_told(die_in_an_all_reduce, RankError) for _ in range(5)]
    deadlock = [time_until_told(skip_an_all_reduce, HangError) for _ in range(5)]
    middle, ninth = statistics.median, lambda seconds: statistics.quantiles(seconds, n=10)[-1]
    cells, recording = time_cells(50), launch(time_recording, world_size=2)[0]
    rows = [  # what, budget, unit, what of the samples, samples
        ("first launch, in times of `import torch`", 2.5, "x", middle, first),
        ("4 fresh ranks, one all_reduce: median", 0.15, "s", middle, warm),
        ("4 fresh ranks, one all_reduce: 90 %", 0.15, "s", ninth, warm),
        ("the same, every core busy: median", 0.25, "s", middle, busy),
        ("%%ranks 4 with an empty cell: median", 2.0, "ms", middle, cells),
        ("recording a call: median", 30.0, "µs", middle, recording),
        ("SIGKILL in an all_reduce, until RankError", 0.5, "s", max, killed),
        ("certain deadlock, until HangError", 3.0, "s", max, deadlock),
    ]
    report(rows)


def report(rows: list[tuple]) -> None:
    kept, lines = [], [("", "budget", "measured", "within?")]
    for what, budget, unit, of, samples in rows:
        measured = of(samples)
        within = "yes" if measured <= budget else "NO"
        lines.append((what, f"{budget:g} {unit}", f"{measured:.3g} {unit}", within))
        kept.append({"what": what, "budget": budget, "unit": unit, "samples": samples})
    print(f"launch, on {where()}\n{table(lines)}")
    save("launch", {"rows": kept})


# Starting


def add() -> float:
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()


FIRST = "from ddpkit.bench.launch import time_launch; time_launch()"


def time_in_new_python(code: str) -> float:
    clock = f"import time; t = time.perf_counter(); {code}; print(time.perf_counter() - t)"
    done = subprocess.run([sys.executable, "-c", clock], capture_output=True, text=True, check=True)
    return float(done.stdout)


def time_launch() -> float:
    begun = time.perf_counter()
    assert list(launch(add, world_size=4)) == [4.0] * 4
    return time.perf_counter() - begun


@contextlib.contextmanager
def every_core_busy():
    code = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(code) for _ in range(os.cpu_count())]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


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


def time_recording(calls: int = 300) -> list[float]:
    """Microseconds by which an all-reduce of one number is longer on the group that records."""
    plain, x, found = dist.new_group(backend="gloo"), torch.ones(1), []
    for _ in range(calls):
        times = []
        for group in (plain, dist.group.WORLD, plain):
            begun = time.perf_counter()
            dist.all_reduce(x, group=group)
            times.append(time.perf_counter() - begun)
        found.append((times[1] - (times[0] + times[2]) / 2) * 1e6)
    return found


# Bad news. Ranks print when it happens; a machine has one `time.perf_counter()`.


def time_until_told(fn, kind: type[LaunchError]) -> float:
    """Seconds from the last time that a rank printed until launch raised."""
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            launch(fn)
        except kind as error:
            return time.perf_counter() - max(float(text) for text in error.output if text)
    raise AssertionError("nothing was raised")


def die_in_an_all_reduce():
    if dist.get_rank() == 1:
        threading.Timer(0.2, die).start()
    while True:
        dist.all_reduce(torch.ones(100_000))


def die():
    print(time.perf_counter(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def skip_an_all_reduce():
    add()
    print(time.perf_counter(), flush=True)
    if dist.get_rank() != 1:
        add()
