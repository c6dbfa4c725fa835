"""Starting and ending ranks: a fork server where there is one, spawn elsewhere.

The server has imported torch and this package and nothing of the user's; forking it takes
milliseconds where a new interpreter takes seconds. It never touches CUDA, so neither do the forks,
and what the notebook did to CUDA is not inherited. Every launch gets new processes: nothing leaks
from one to the next, and a crash costs nothing.
"""

import contextlib
import functools
import io
import linecache
import multiprocessing.spawn
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from multiprocessing import forkserver, popen_forkserver, reduction, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import set_spawning_popen
from pathlib import Path

import torch.multiprocessing as mp

from . import worker
from .backends import Choice
from .board import Board

PRELOAD = ["ddpkit.runtime.worker"]
_starting = threading.Lock()


class Rank:
    """A rank's process, seen from the parent: a pipe for words, a lifeline, a sentinel."""

    def __init__(self, assignment: worker.Assignment, target):
        self.rank = assignment.rank
        self.assignment = assignment
        self.pipe, theirs = mp.Pipe()
        lifeline, self._lifeline = mp.Pipe(duplex=False)
        kind = mp.get_context("spawn").Process if start_method() == "spawn" else _ForkedRank
        name = f"rank {assignment.rank}"
        self.process = kind(target=target, args=(assignment, theirs, lifeline), name=name)
        try:
            with _starting, _without_main():
                self.process.start()
        finally:
            theirs.close()
            lifeline.close()

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self.process.exitcode

    def end(self):
        """End the rank and its children, at once, also children that outlived it."""
        self._lifeline.close()
        if os.name == "posix":
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        else:
            self.process.kill()

    def wait_gone(self, timeout: float = 2.0):
        """Wait until the process is gone; a stubborn one is killed by its number."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join(timeout)
        self.pipe.close()
        with contextlib.suppress(ValueError):
            self.process.close()

    def ask_stack(self) -> list[tuple[str, int, str]]:
        """(file, line, function) of the rank's main thread, innermost first; GIL held or not."""
        path = self.assignment.path("stack")
        if not hasattr(signal, "SIGUSR1") or not path.exists():
            return []
        before = path.stat().st_size
        with contextlib.suppress(ProcessLookupError, TypeError):
            os.kill(self.process.pid, signal.SIGUSR1)
        for _ in range(20):
            time.sleep(0.005)
            text = path.read_text(errors="replace")[before:]
            if text.endswith("\n") and "most recent call first" in text:
                break
        main_thread = re.split(r"(?:Current thread|Thread) 0x\w+.*\n", text)[-1]
        frames = re.findall(r'File "(.*?)", line (\d+) in (.*)', main_thread)
        return [(file, int(line), function) for file, line, function in frames]


@contextlib.contextmanager
def world(choice: Choice, world_size: int, link, keep_values: bool, target, call: bytes = b""):
    """Start ranks that run `target`; whatever happens inside, none is left afterwards.

    Yields (ranks, board).
    """
    _sweep()
    folder = Path(tempfile.mkdtemp(prefix=f"ddpkit-{os.getpid()}-"))
    ranks: list[Rank] = []
    board = Board(folder / "board", world_size, create=True)
    environ, cells = {**os.environ, **choice.environ}, _cell_texts()
    try:
        (folder / "call").write_bytes(call)
        for rank in range(world_size):
            assignment = worker.Assignment(
                rank=rank,
                world_size=world_size,
                folder=str(folder),
                backend=choice.backend,
                gpus=choice.gpus,
                link=link,
                keep_values=keep_values,
                environ=environ,
                cells=cells,
            )
            with interrupts_deferred():
                ranks.append(Rank(assignment, target))
        yield ranks, board
    finally:
        with interrupts_deferred():
            for rank in ranks:
                rank.end()
            for rank in ranks:
                rank.wait_gone()
            board.close()
            shutil.rmtree(folder, ignore_errors=True)


def _cell_texts() -> dict[str, tuple]:
    """The text of notebook cells, as linecache keeps it: entries without a time are no file's."""
    entries = linecache.cache.copy()  # other threads add to it
    return {name: entry for name, entry in entries.items() if len(entry) == 4 and entry[1] is None}


@contextlib.contextmanager
def interrupts_deferred():
    """A Ctrl-C meanwhile comes afterwards, so that no rank is lost while it starts or ends."""
    if threading.current_thread() is not threading.main_thread():  # the others get none
        yield
        return
    came = []
    before = signal.signal(signal.SIGINT, lambda *signal_and_frame: came.append(signal_and_frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)
        if came and callable(before):
            before(*came[0])


@functools.cache
def _sweep():
    """Remove the folders of notebooks that were killed before they could tidy up; Linux."""
    if not Path("/proc/self").exists():
        return
    for folder in Path(tempfile.gettempdir()).glob("ddpkit-*-*"):
        owner = folder.name.split("-")[1]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(folder, ignore_errors=True)


# What ranks say, and whether they work.


def wait_for_word(ranks: list[Rank], seconds: float) -> list[Rank]:
    """The ranks that have sent something or ended, as soon as there are any, within `seconds`."""
    by_object = {rank.pipe: rank for rank in ranks}
    by_object |= {rank.process.sentinel: rank for rank in ranks}
    return list(dict.fromkeys(by_object[o] for o in wait(list(by_object), seconds)))


def receive(pipe: Connection):
    """The next word from a rank, or None if there is none or it died while speaking."""
    try:
        return pipe.recv() if pipe.poll() else None
    except (EOFError, OSError):
        return None


def cpu_ticks(pid: int) -> int | None:
    """User and system time of a process so far, where /proc tells."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[11]) + int(fields[12])


# The fork server.


def start_method() -> str:
    """forkserver where it serves, else spawn; DDPKIT_START_METHOD overrides (for tests)."""
    served = "forkserver" if sys.platform == "linux" else "spawn"
    return os.environ.get("DDPKIT_START_METHOD") or served


def warm_up():
    """Start the fork server without waiting for it, so that the first launch need not."""
    if start_method() == "forkserver":
        with _starting, _without_main():
            _running_server()


@functools.cache
def _servers() -> list[forkserver.ForkServer]:
    """The fork server in use, alone.

    Our own: multiprocessing's may already serve the user, without torch preloaded.
    """
    return [_new_server(PRELOAD)]


def _new_server(modules: list[str]) -> forkserver.ForkServer:
    server = forkserver.ForkServer()
    server.set_forkserver_preload(modules)
    return server


def preload(modules: Iterable[str]):
    """Have later ranks begin with `modules`, which earlier ones imported each for itself.

    A new fork server imports them meanwhile; the next launch waits for it if it comes soon. The old
    one ends when its last rank has.
    """
    if start_method() != "forkserver":
        return
    with _starting:
        old = _servers()[0]
        new = set(modules).difference(old._preload_modules)
        if not new:
            return
        _servers()[0] = _new_server([*old._preload_modules, *sorted(new)])
    os.close(old._forkserver_alive_fd)
    reap = threading.Thread(target=os.waitpid, args=(old._forkserver_pid, 0), daemon=True)
    reap.start()
    warm_up()


def _running_server() -> forkserver.ForkServer:
    """The server; if it has to be started, with SIGINT blocked: no Ctrl-C while it imports."""
    resource_tracker.ensure_running()  # would unblock SIGINT if the server started it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        _servers()[0].ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return _servers()[0]


class _Popen(popen_forkserver.Popen):
    """multiprocessing's way to start a process through a fork server, with a server of our own."""

    def _launch(self, process_obj):
        data = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(multiprocessing.spawn.get_preparation_data(process_obj._name), data)
            reduction.dump(process_obj, data)
        finally:
            set_spawning_popen(None)
        self.sentinel, writes = _running_server().connect_to_new_process(self._fds)
        fds = os.dup(writes), self.sentinel
        self.finalizer = multiprocessing.util.Finalize(self, multiprocessing.util.close_fds, fds)
        with open(writes, "wb") as pipe:
            pipe.write(data.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)


_served = "forkserver" in mp.get_all_start_methods()


class _ForkedRank(mp.get_context("forkserver").Process if _served else mp.Process):
    # A rank starts its own children as this process does: on Linux, a DataLoader forks its workers.
    _start_method = None

    @staticmethod
    def _Popen(process_obj):
        return _Popen(process_obj)


@contextlib.contextmanager
def _without_main():
    """Keep multiprocessing from running the user's script again in the ranks: they don't need it.

    Only for this thread; a pool that the user starts elsewhere at the moment gets its script.
    """
    original, thread = multiprocessing.spawn.get_preparation_data, threading.get_ident()

    def without_main(name):
        data = original(name)
        if threading.get_ident() == thread:
            data.pop("init_main_from_name", None)
            data.pop("init_main_from_path", None)
        return data

    multiprocessing.spawn.get_preparation_data = without_main
    try:
        yield
    finally:
        multiprocessing.spawn.get_preparation_data = original
