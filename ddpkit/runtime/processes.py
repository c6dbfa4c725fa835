"""Start and end ranks: by a fork server where the system has one, by spawn elsewhere.

The server has imported torch and this package but nothing of the user's. Forking it takes
milliseconds, a new interpreter seconds. It never touches CUDA, so that forks don't inherit a state
of CUDA. Every launch gets new processes: nothing leaks to the next one, and a crash costs nothing.
"""

import contextlib
import errno
import functools
import linecache
import multiprocessing.spawn
import os
import re
import shutil
import signal
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from pathlib import Path

import torch.multiprocessing as mp

from ..tools.units import size
from . import worker
from .backends import BY_DEFAULT, Choice
from .board import Board
from .machine import count_cores
from .worker import MAKE_ROOM

PRELOAD = ["ddpkit.runtime.worker"]
LAST = "ddpkit.runtime.cheap_forks"
# With this, Linux gives torch's large tensors pages of 2 MiB. Clearing small pages took a third of
# the time of a ring all-reduce of 100 MB, which allocates a receive buffer in every hop.
LARGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
THREADS = "OMP_NUM_THREADS", "MKL_NUM_THREADS"
YOUNG_S = 60  # a folder that is younger may not be locked yet
GONE_S, GONE_ON_GPU_S = 4.0, 30.0  # to wait for a killed rank, which may free GPU memory
_starting = threading.Lock()


class Rank:
    """A rank's process, seen from the parent: a pipe for its messages, a lifeline, its exit.

    The lifeline is a pipe that closes when the parent ends, however it ends; then the rank ends.
    """

    def __init__(self, assignment: worker.Assignment, target):
        self.rank = assignment.rank
        self.assignment = assignment
        self.pipe, theirs = mp.Pipe()
        lifeline, self._lifeline = mp.Pipe(duplex=False)
        kind = mp.get_context(start_method()).Process
        self.process = kind(target=target, args=(assignment, theirs, lifeline))
        # Let the rank start children in the platform's default way: on Linux, a DataLoader forks.
        self.process._start_method = None
        try:
            with _starting, _our_way():
                self.process.start()
        finally:
            theirs.close()
            lifeline.close()

    @property
    def exit_code(self) -> int | None:
        """Return the exit code, None while the rank runs; negative: the signal that ended it."""
        return self.process.exitcode

    @property
    def is_stopped(self) -> bool:
        """Tell whether a debugger or a signal holds the rank, as far as /proc shows."""
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(") ")[2][0]
            return state in "Tt"
        return False

    def end(self):
        """Kill the rank and its children, also children that outlived it."""
        self._lifeline.close()
        if os.name == "posix":
            with contextlib.suppress(ProcessLookupError, PermissionError):  # no group yet, or ended
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()

    def wait_gone(self):
        self.process.join(GONE_ON_GPU_S if self.assignment.choice.gpus else GONE_S)
        self.pipe.close()
        with contextlib.suppress(ValueError):
            self.process.close()

    def ask_stack(self) -> list[tuple[str, int, str]]:
        """Return (file, line, function) of the rank's main thread, innermost first.

        Answered even if C++ code holds the interpreter's lock.
        """
        *_, main_thread = self.ask_stacks() or [[]]
        return main_thread

    def ask_stacks(self) -> list[list[tuple[str, int, str]]]:
        """Return the stacks of all Python threads of the rank, the main thread's last.

        []: they can't be had.
        """
        path = self.assignment.path("stack")
        if not hasattr(signal, "SIGUSR1") or not path.exists():
            return []
        before = path.stat().st_size
        with contextlib.suppress(ProcessLookupError, TypeError):
            os.kill(self.process.pid, signal.SIGUSR1)
        for _ in range(100):
            time.sleep(0.005)
            text = path.read_text(errors="replace")[before:]
            if text.endswith("\n") and "most recent call first" in text:
                break
        stacks = []
        for thread in re.split(r"(?:Current thread|Thread) 0x\w+.*\n", text)[1:]:
            frames = re.findall(r'File "(.*?)", line (\d+) in (.*)', thread)
            stacks.append([(file, int(line), function) for file, line, function in frames])
        return stacks


@contextlib.contextmanager
def world(
    choice: Choice,
    world_size: int,
    link,
    keep_values: bool,
    target,
    call: bytes = b"",
    check_buffers: bool = False,
):
    """Context manager: start ranks that run `target`; give (ranks, board); end the ranks."""
    sweep()
    folder = Path(tempfile.mkdtemp(prefix=f"ddpkit-{os.getpid()}-"))
    lock = contextlib.ExitStack()
    lock.enter_context(locked(folder))
    ranks: list[Rank] = []
    board = Board(folder / "board", world_size, create=True)
    given = str(folder), choice, link, keep_values
    texts = _cell_texts()
    threads = dict.fromkeys(THREADS, str(threads_of_a_rank(world_size)))
    by_default = BY_DEFAULT if choice.gpus else {}
    try:
        _check_room(folder, (folder / "board").stat().st_size + len(call))
        (folder / "call").write_bytes(call)
        for rank in range(world_size):
            own = {name: value.format(rank=rank) for name, value in choice.environ.items()}
            environ = {**LARGE_PAGES, **by_default, **os.environ, **threads, **own}
            assignment = worker.Assignment(rank, world_size, *given, environ, texts, check_buffers)
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
            lock.close()


def threads_of_a_rank(world_size: int) -> int:
    """Return how many threads a rank computes with: OMP_NUM_THREADS, at most its share of cores.

    Threads spin while they wait for one another. With OMP_NUM_THREADS=2 from a shell, four ranks on
    two cores would have eight threads, and take ten times as long.
    """
    share = max(1, int(count_cores() // world_size))
    asked = os.environ.get(THREADS[0], "").partition(",")[0]  # "4,2": for nested loops, 2
    return min(int(asked), share) if asked.isdigit() and int(asked) else 1


def _check_room(folder: Path, nbytes: int):
    """Raise OSError if the disk is full: writing to the board would kill this process by SIGBUS."""
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        needs = f"the ranks' files take {size(nbytes)}, and {size(free)} are free"
        raise OSError(errno.ENOSPC, f"the disk for temporary files is full: {needs}. {MAKE_ROOM}")


@functools.cache
def sweep(pattern: str = "ddpkit-[0-9]*-*"):
    """Remove the folders of launches whose process was killed, once per process.

    A live process holds a lock on its folder, also one in another container that shares the
    temporary folder. Only this user's old folders without a lock are removed.
    """
    for folder in Path(tempfile.gettempdir()).glob(pattern) if os.name == "posix" else ():
        with contextlib.suppress(OSError):  # another process was faster
            found = folder.lstat()
            old = time.time() - found.st_mtime > YOUNG_S
            if old and stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
                with locked(folder) as nobody_has_it:
                    if nobody_has_it:
                        shutil.rmtree(folder)


@contextlib.contextmanager
def locked(folder: Path, shared: bool = False) -> Iterator[bool]:
    """Context manager: hold a lock on a folder, and give whether it was free.

    The lock ends with this process at the latest. shared: several processes may hold it at once, as
    the ranks of a session do.
    """
    if os.name != "posix":
        yield False
        return
    import fcntl

    descriptor, works = os.open(folder, os.O_RDONLY), True
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError:  # another process has it, or the file system has no locks
        works = False
    try:
        yield works
    finally:
        os.close(descriptor)


def _cell_texts() -> dict[str, tuple]:
    """Return the source of the notebook's cells, which a rank needs to name a line of one."""
    entries = linecache.cache.copy()  # other threads add to it
    return {name: entry for name, entry in entries.items() if len(entry) == 4 and entry[1] is None}


@contextlib.contextmanager
def interrupts_deferred():
    """Context manager: a Ctrl-C inside takes effect at its end.

    So no rank is lost while it starts or ends.
    """
    if threading.current_thread() is not threading.main_thread():  # signals go to the main thread
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


# Replies of ranks, and their CPU time.


def listen(ranks: list[Rank], seconds: float) -> Iterator[tuple[Rank, tuple]]:
    """Yield (rank, message) of the ranks that have sent one; ("exit", code) for one that ended.

    Waits up to `seconds` for the first.
    """
    by_object = {rank.pipe: rank for rank in ranks}
    by_object |= {rank.process.sentinel: rank for rank in ranks}
    for rank in dict.fromkeys(by_object[o] for o in wait(list(by_object), seconds)):
        word = None
        with contextlib.suppress(EOFError, OSError):  # it may die while it sends
            word = rank.pipe.recv() if rank.pipe.poll() else None
        if word is not None:
            yield rank, word
        elif rank.exit_code is not None:
            yield rank, ("exit", rank.exit_code)


def cpu_ticks(pid: int, of_main_thread: bool = False) -> int | None:
    """Return the CPU time of a process so far, or of its main thread; None without /proc."""
    path = Path(f"/proc/{pid}/task/{pid}/stat" if of_main_thread else f"/proc/{pid}/stat")
    try:
        fields = path.read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[11]) + int(fields[12])


# The fork server.


def start_method() -> str:
    """Choose forkserver on Linux, spawn elsewhere; DDPKIT_START_METHOD overrides it for tests."""
    served = "forkserver" if sys.platform == "linux" else "spawn"
    return os.environ.get("DDPKIT_START_METHOD") or served


def warm_up():
    """Start the fork server without waiting for it, ahead of the first launch."""
    if start_method() == "forkserver":
        with _starting, _our_way():
            pass


def is_starting() -> bool:
    """Tell whether a rank is being started: the first has to wait for the server's imports."""
    return _starting.locked()


@functools.cache
def _server() -> forkserver.ForkServer:
    """Return ddpkit's own fork server: that of multiprocessing may run without torch in it."""
    server = forkserver.ForkServer()
    server.set_forkserver_preload([*PRELOAD, LAST])
    return server


def preload(modules: Iterable[str]):
    """Let the fork server import `modules` from now on, so that ranks needn't do it each.

    A new fork server imports them in the background; a launch that comes soon waits for it. The old
    server ends with its last rank.
    """
    server = _server()
    with _starting:
        new = sorted(set(modules).difference(server._preload_modules))
        if not new or start_method() != "forkserver":
            return
        server.set_forkserver_preload([*server._preload_modules[:-1], *new, LAST])
        if server._forkserver_pid is None:
            return
        os.close(server._forkserver_alive_fd)
        old = server._forkserver_pid, 0
        threading.Thread(target=os.waitpid, args=old, daemon=True).start()
        server._forkserver_pid = server._forkserver_alive_fd = None
    warm_up()


@contextlib.contextmanager
def _our_way():
    """Context manager: multiprocessing starts a rank from our server, and not the user's script.

    By itself it would run that script again in the rank. Both hold for this thread alone: a pool
    that the user starts in another one at the same time is as always.
    """
    prepare, connect = multiprocessing.spawn.get_preparation_data, forkserver.connect_to_new_process
    thread = threading.get_ident()

    def without_main(name):
        data = prepare(name)
        if threading.get_ident() == thread:
            data.pop("init_main_from_name", None)
            data.pop("init_main_from_path", None)
        return data

    multiprocessing.spawn.get_preparation_data = without_main
    try:
        if start_method() == "forkserver":
            _start_server()
            forkserver.connect_to_new_process = _server().connect_to_new_process
        yield
    finally:
        forkserver.connect_to_new_process = connect
        multiprocessing.spawn.get_preparation_data = prepare


def _start_server():
    """Start the server if necessary, with SIGINT blocked: no Ctrl-C while it imports."""
    resource_tracker.ensure_running()  # first: started by the server, it would unblock SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        _server().ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
