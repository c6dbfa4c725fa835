"""A function killed before each of its changes on the disk, in processes of its own.

    changes = kill_before_each_change(save, (), make_folder, place)

What the function left when it was killed before changes[n - 1] is in the folder place/"n"; in
place/"0" it wasn't killed. So a test can read each folder as a program that starts again would.

Changes are the audit events in CHANGES, opens for writing alone, and os.fsync: neither what is
written to an open file nor os.symlink or os.chmod.
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
    """Call function(folder, *arguments) once, then again for each change, and end it just before.

    Each call has a process and a folder of its own; all but the first run at the same time. Return
    the function's changes on the disk, in order: each is [name of Python's audit event], such as
    ["os.rename"], or ["os.fsync", inode, bytes of the file].

    function, arguments: pickled, by value what is of the function's module; the rest is imported.
    prepare: called in this process with each folder, place/"0", place/"1", ..., to make it.
    place: an existing folder, the calls' working directory; their `folder` is Path("3"), say.
    RuntimeError: the function raised, or came to fewer changes than the first time.
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
    """Write the function call to the file place/"call", which another process loads and makes.

    The function is pickled by value, with the code of its module, since that process imports
    neither ddpkit nor torch.
    """
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
    """Start a process that makes the call in the file place/"call"; return the process.

    number: the change before which it ends, counted from 1; 0 for none. For 3, the call's folder is
        place/"3".
    """
    # -S: it starts in half the time. But then it wouldn't find an editable install of ddpkit.
    paths = [*sys.path, str(Path(__file__).parents[2])]
    command = [sys.executable, "-I", "-S", "-c", CHILD.format(paths, number)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=place)


def end(process: subprocess.Popen, exit_code: int) -> str:
    """Wait for the process to end; return what it printed to stdout.

    RuntimeError: its exit code isn't `exit_code`; the message has its stderr.
    """
    printed, told = process.communicate()
    if process.returncode != exit_code:
        raise RuntimeError(f"in a process of its own it ended with {process.returncode}: {told}")
    return printed


def die_at(pickled: bytes, number: int) -> None:
    """Make the function call in this process, and end it just before the n-th change.

    It ends by os._exit, so Python's buffers are lost, as by a kill. Python's audit events come
    before what they announce. os.fsync has none: it is replaced by one that counts and doesn't
    sync. If the process isn't ended, it prints the list of changes as JSON.

    pickled: (function, arguments).
    number: n, counted from 1; 0 for never. It is the name of the folder as well.
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
