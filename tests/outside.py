"""What a test sees of other processes: scripts it runs, and what they leave behind."""

import contextlib
import itertools
import linecache
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

import psutil
import pytest

FREEZE_S = 90  # no test waits longer for a process that should long be done
cell_numbers = itertools.count()


def cell(source: str, names: dict | None = None) -> dict:
    """Run `source` as a notebook cell: in `__main__`, from a file that doesn't exist."""
    names = {"__name__": "__main__"} if names is None else names
    source = textwrap.dedent(source)
    file = f"/tmp/ipykernel_1/{next(cell_numbers)}.py"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), names)
    return names


class Script:
    """A Python script in a process of its own, whose descendants are found whatever it becomes."""

    def __init__(
        self, folder: Path, source: str, *arguments: str, command: tuple = (), **environ: str
    ):
        path = folder / "script.py"
        path.write_text(source)
        self._mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [*(command or (sys.executable, "-W", "error")), str(path), *arguments],
            cwd=folder,
            env={**os.environ, **environ, "DDPKIT_TEST": self._mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.family():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.kill()
        self.process.communicate()

    def result(self) -> tuple[int, str, str]:
        """(exit code, stdout, stderr) once it has ended."""
        out, err = self.process.communicate(timeout=FREEZE_S)
        return self.process.returncode, out, err

    def line(self) -> str:
        """The next line it prints."""
        return self.process.stdout.readline().strip()

    def signal(self, number: int):
        self.process.send_signal(number)

    def interrupt_group(self):
        """What a terminal's Ctrl-C and Jupyter's stop button do."""
        os.killpg(self.process.pid, signal.SIGINT)

    def family(self) -> list[psutil.Process]:
        """The script and all that descends from it, orphans too: their environment has its mark."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                marked = process.environ().get("DDPKIT_TEST") == self._mark
                if marked and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def sleeping(self) -> list[int]:
        """Those of its family that are the command `sleep`."""
        found = []
        for process in self.family():
            with contextlib.suppress(psutil.Error):  # it may end meanwhile
                if process.name() == "sleep":
                    found.append(process.pid)
        return found

    def left(self) -> list[psutil.Process]:
        """Who is still there after a long time; [] as soon as nobody is."""
        until = time.monotonic() + FREEZE_S
        while (left := self.family()) and time.monotonic() < until:
            time.sleep(0.05)
        return left


def run_script(folder: Path, source: str, *arguments: str, **options) -> str:
    """Run a script to its end, with warnings as errors; its output."""
    with Script(folder, source, *arguments, **options) as script:
        code, out, err = script.result()
        assert code == 0, err
        assert script.left() == []
        return out


def wait_until(condition, every_s=0.02):
    """Wait for `condition()` to be true, and return it."""
    until = time.monotonic() + FREEZE_S
    while not (value := condition()):
        assert time.monotonic() < until, "it never came"
        time.sleep(every_s)
    return value


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextlib.contextmanager
def two_machines():
    """Two network namespaces with a wire between them: [(name, interface), ...]."""
    names = [f"ddpkit{os.getpid()}{end}" for end in "ab"]
    ends = [f"dd{os.getpid()}{end}" for end in "ab"]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            there = ["peer", "name", ends[1], "netns", names[1]]
            ip("link", "add", ends[0], "netns", names[0], "type", "veth", *there)
            for place, (name, end) in enumerate(zip(names, ends, strict=True)):
                ip("-n", name, "address", "add", f"10.77.0.{place + 1}/24", "dev", end)
                ip("-n", name, "link", "set", end, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces can't be made here: {error}")
        yield list(zip(names, ends, strict=True))
    finally:
        for name in names:
            with contextlib.suppress(OSError):
                subprocess.run(["ip", "netns", "delete", name], capture_output=True)


PREAMBLE = """
import ctypes, os, signal, subprocess, sys, time
import torch
import torch.distributed as dist
from ddpkit import launch

def total():
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()
"""
