"""A function killed before each of its changes on the disk, in processes of its own.

    changes = kill_before_each_change(save, (), make_folder, place)

What it left when it was killed before changes[n - 1] is in place/"n"; in place/"0" it lived.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import cloudpickle

EXIT_CODE = 77
CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link"}
CHILD = "import sys; sys.path[:] = {}; import pickle; pickle.load(open('call', 'rb'))({})"


def kill_before_each_change(
    function: Callable, arguments: tuple, prepare: Callable[[Path], object], place: Path
) -> list[list]:
    """Call function(folder, *arguments) in a process that lives, then in one for each change.

    prepare: called with each folder before. Returns the changes that it makes, as [event], those
    of os.fsync as [event, inode, bytes]. RuntimeError: it raised, or ended in another way.
    """
    write_call(function, arguments, place)
    prepare(place / "0")
    changes = json.loads(end(start(0, place), 0).splitlines()[-1])
    processes = []
    for number in range(1, len(changes) + 1):
        prepare(place / str(number))
        processes.append(start(number, place))
    for process in processes:
        end(process, EXIT_CODE)
    return changes


def write_call(function: Callable, arguments: tuple, place: Path) -> None:
    """Write the call to a file, by value, for processes that import neither ddpkit nor torch."""
    modules = {sys.modules.get(known.__module__) for known in (function, die_at)}
    modules -= {None, sys.modules["__main__"]}
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        pickled = cloudpickle.dumps((function, arguments))
        call = cloudpickle.dumps(partial(die_at, pickled))
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)
    (place / "call").write_bytes(call)


def start(number: int, place: Path) -> subprocess.Popen:
    # -S: it starts in half the time. But then it wouldn't find an editable ddpkit by itself.
    paths = [*sys.path, str(Path(__file__).parents[2])]
    command = [sys.executable, "-I", "-S", "-c", CHILD.format(paths, number)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=place)


def end(process: subprocess.Popen, exit_code: int) -> str:
    """Wait for the process; return what it printed."""
    printed, told = process.communicate()
    if process.returncode != exit_code:
        raise RuntimeError(f"in a process of its own it ended with {process.returncode}: {told}")
    return printed


def die_at(pickled: bytes, number: int) -> None:
    """Make the call in this process, and end it as a kill does: before the n-th change; 0: never.

    Python's audit events come before what they announce; os.fsync has none, and gets one here.
    """
    from os import _exit  # here: a rank has an _exit of its own, which would travel with the call

    changes: list[list] = []

    def change(*what):
        changes.append(list(what))
        if len(changes) == number:
            _exit(EXIT_CODE)

    def listen(event, arguments):
        reads = event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if event in CHANGES and not reads:
            change(event)

    def fsync(file):
        found = os.fstat(file if isinstance(file, int) else file.fileno())
        change("os.fsync", found.st_ino, found.st_size)

    sys.modules[os.fsync.__module__].fsync = fsync
    os.fsync = fsync
    function, arguments = cloudpickle.loads(pickled)
    sys.addaudithook(listen)
    function(Path(str(number)), *arguments)
    print(json.dumps(changes))
