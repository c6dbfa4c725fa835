"""Inspect this machine: cores, memory, GPUs. It is no error if something can't be found out."""

import contextlib
import os
import re
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

from ..tools.units import binary_size

# Versions of torch, as in pyproject.toml: ddpkit was tried with these and all between.
OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 15)
EVERY_S = 0.25  # between two samples of the free memory
SHORT = 0.1  # a fraction of all memory: if less is free, memory is short


def torch_requirement() -> str:
    """Return the versions of torch tested with ddpkit as a pip requirement: 'torch>=2.11,<2.16'."""
    major, oldest = OLDEST_TORCH
    newest = NEWEST_TORCH[1]
    return f"torch>={major}.{oldest},<{major}.{newest + 1}"


def untried_torch(version: str) -> str:
    """Return a warning, what follows "torch 2.9 is", or "" if ddpkit was tried with this version.

    version: as in `torch.__version__`, such as "2.12.0+cpu". Only its first two numbers count.
    """
    number = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if number < OLDEST_TORCH:
        return "older than any that ddpkit was tried with: calls that it needs may be missing"
    if number > NEWEST_TORCH:
        what = "newer than any that ddpkit was tried with"
        return f"{what}: a launch may fail, stored outputs may differ"
    return ""


def count_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """Return how many cores this process may use, by its affinity and its container's quota.

    A quota may be a fraction, such as 1.5 cores.
    cgroup: the folder of the container's control group (version 2).
    """
    affinity = getattr(os, "sched_getaffinity", None)  # Linux has it
    cores = len(affinity(0)) if affinity else os.cpu_count()
    with contextlib.suppress(OSError, ValueError):  # no container; "max": no limit
        quota, period = (cgroup / "cpu.max").read_text().split()
        cores = min(cores, int(quota) / int(period))
    return cores


def memory_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> tuple:
    """Return (total, free) bytes of memory, each the machine's or its container's if that is less.

    Free is what processes may still get: memory that holds cached files counts as free.
    Return (0, 0) if the machine's is unknown; a container whose limit is unknown doesn't count.
    proc: the folder of the proc file system.
    cgroup: the folder of the container's control group (version 2).
    """
    total = free = 0
    with contextlib.suppress(OSError, KeyError):
        kilobytes = dict(re.findall(r"(\w+): +(\d+) kB", (proc / "meminfo").read_text()))
        total, free = (int(kilobytes[name]) * 1024 for name in ("MemTotal", "MemAvailable"))
    with contextlib.suppress(OSError, ValueError):
        limit, used = (int((cgroup / f"memory.{what}").read_text()) for what in ("max", "current"))
        free = min(free, limit - used + _cached_bytes(cgroup))
        total = min(total, limit)
    return total, free


def _cached_bytes(cgroup: Path) -> int:
    """Return the bytes of cached files in a container's memory, or 0 if that is unknown.

    They count as free, since the kernel can take them back.
    cgroup: the folder of the container's control group (version 2).
    """
    with contextlib.suppress(OSError):
        found = re.findall(r"^(?:in)?active_file (\d+)", (cgroup / "memory.stat").read_text(), re.M)
        return sum(map(int, found))
    return 0


class FreeMemory:
    """A log of the last seconds' free memory (RAM), to tell whether a process died for lack of it.

    The owner calls `look` again and again, however often: it samples at most once in 0.25 s
    (`EVERY_S`). The last 8 samples are kept; `shortage` returns in words what they show.
    """

    def __init__(self):
        self._looked = 0.0
        self._lowest = deque(maxlen=8)  # (free, total), one each `EVERY_S`
        self._killed = oom_kills()
        self.look()

    def look(self) -> None:
        """Sample how much memory is free (`memory_bytes`), at most once in 0.25 s (`EVERY_S`)."""
        now = time.monotonic()
        if now - self._looked > EVERY_S:
            self._looked = now
            total, free = memory_bytes()
            self._lowest.append((free, total))

    def shortage(self) -> str:
        """Return a sentence which says that a killed process died for lack of memory, or "".

        Call it to explain a SIGKILL. The sentence, in which the killed process is "it", says that
        memory ran out if the kernel has killed a process of this container for memory since this
        object was made. Otherwise, if less than 10 % of all memory was free in one of the samples,
        it says that memory is the most likely cause. In all other cases the result is "".
        """
        free, total = min(self._lowest, default=(0, 0))
        if oom_kills() > self._killed:
            return f"The kernel killed it because memory ran out{self.in_words()}."
        if total and free < SHORT * total:
            return f"Something outside killed it, most likely for memory{self.in_words()}."
        return ""

    def in_words(self) -> str:
        """Return ": 120 MiB of 7.8 GiB were free shortly before", or "" if that is unknown.

        The figure is the lowest of the last samples; the colon continues a sentence.
        """
        free, total = min(self._lowest, default=(0, 0))
        before = f": {binary_size(free)} of {binary_size(total)} were free shortly before"
        return before if total else ""


def oom_kills(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many processes the kernel has killed for memory in this container, 0 if unknown.

    cgroup: the folder of the container's control group (version 2).
    """
    with contextlib.suppress(OSError, AttributeError):
        return int(re.search(r"oom_kill (\d+)", (cgroup / "memory.events").read_text())[1])
    return 0


LOOK = """
import torch
for index in range(torch.cuda.device_count()):
    torch.ones(1, device=f"cuda:{index}").item()
    found = torch.cuda.get_device_properties(index)
    size = f"{found.total_memory / 2**30:.0f} GiB"
    print(f"{found.name} ({size}, capability {found.major}.{found.minor})")
"""


def look_at_gpus() -> list[str] | str:
    """Return a line for each GPU, with its name and size, or a text that says what is wrong.

    The lines are like 'NVIDIA H100 (80 GiB, capability 9.0)'; the list is empty if torch finds no
    GPU. To see whether a GPU works, a tensor is put on each. A child process does this, so that
    CUDA doesn't start in this process. If the child fails, as when one of several GPUs doesn't
    work, the text is the last line of its error output or, if there is none, its exit code. After
    two minutes the text is "no answer within two minutes".
    """
    code = [sys.executable, "-c", LOOK]
    try:
        child = subprocess.run(code, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return "no answer within two minutes"
    if child.returncode:
        return (child.stderr.strip() or f"exit code {child.returncode}").splitlines()[-1]
    return child.stdout.splitlines()
