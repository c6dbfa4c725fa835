"""Start and end the processes of ranks: forked from a server on Linux, spawned elsewhere.

The fork server is a process that has imported torch and this package, but nothing of the user's.
Forking it takes milliseconds, where starting a new interpreter takes seconds. The server never
touches CUDA, because once a process has used CUDA, its forks can't use it. Every launch gets new
processes, so that nothing leaks into the next launch, and a crash ends only its own launch.
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
# the time of a ring all-reduce of 100 MB, which allocates a receive buffer in every step.
LARGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
THREADS = "OMP_NUM_THREADS", "MKL_NUM_THREADS"
YOUNG_S = 60  # `sweep` spares a younger folder, which its launch may not have locked yet
GONE_S, GONE_ON_GPU_S = 4.0, 30.0  # seconds to wait for a killed rank; freeing a GPU takes long
_starting = threading.Lock()


class Rank:
    """A rank's process, seen from the parent; creating a `Rank` starts the process.

    The process runs target(assignment, theirs, lifeline). `theirs` is its end of a two-way pipe for
    messages, and `self.pipe` is the parent's end. `lifeline` is a pipe that closes when the parent
    ends, however that happens; the rank then ends itself, so that no process is left behind.
    assignment: the rank's orders, such as its number and the folder of the launch.
    target: a function that the new process can import: `worker.main`, which calls the user's
        function, or `worker.serve_cells`, which runs notebook cells until the rank is ended.
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
        """Return the process's exit code, -N if signal N ended it, or None while it runs."""
        return self.process.exitcode

    @property
    def is_stopped(self) -> bool:
        """Return whether a debugger or a signal such as SIGSTOP has suspended the process.

        It reads /proc, and returns False on systems without it.
        """
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(") ")[2][0]
            return state in "Tt"
        return False

    def end(self):
        """Kill the rank and its process group, even children that outlived the rank; don't wait.

        Children that left the group (the system's) live on. On Windows only the rank is killed.
        """
        self._lifeline.close()
        if os.name == "posix":
            with contextlib.suppress(ProcessLookupError, PermissionError):  # no group yet, or ended
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()

    def wait_gone(self):
        """Wait until the process, which the caller has killed, has ended; then close its pipe.

        The wait lasts at most 4 s (`GONE_S`), or 30 s (`GONE_ON_GPU_S`) for a rank on a GPU. The
        process object is closed as well, unless the process is still there; that is no error.
        """
        self.process.join(GONE_ON_GPU_S if self.assignment.choice.gpus else GONE_S)
        self.pipe.close()
        with contextlib.suppress(ValueError):
            self.process.close()

    def ask_stack(self) -> list[tuple[str, int, str]]:
        """Return the main thread's stack: a list of (file, line, function), innermost frame first.

        The rank answers even while C++ code holds the interpreter's lock. Without an answer, after
        0.5 s or so, return []. It answers for its newest 100 threads only: with more, the stack is
        another thread's, as the main thread's is missing.
        """
        *_, main_thread = self.ask_stacks() or [[]]
        return main_thread

    def ask_stacks(self) -> list[list[tuple[str, int, str]]]:
        """Return the stacks of all Python threads of the rank, the main thread's last.

        Each stack is a list of (file, line, function), at most 100, innermost frame first. SIGUSR1
        makes the rank's faulthandler write them to a file. With more than 100 threads, it writes
        only the newest 100, and the main thread is missing. Return [] if no answer comes in about
        0.5 s, if the rank has no handler yet, or on systems without SIGUSR1.
        """
        path = self.assignment.path("stack")
        if not hasattr(signal, "SIGUSR1") or not path.exists():
            return []
        before = path.stat().st_size
        with contextlib.suppress(ProcessLookupError, TypeError):
            os.kill(self.process.pid, signal.SIGUSR1)
        text = ""
        for _ in range(100):
            time.sleep(0.005)
            earlier, text = text, path.read_text(errors="replace")[before:]
            if text.endswith("\n") and "most recent call first" in text and text == earlier:
                break  # else the rank may still be writing
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
    """Context manager: start `world_size` processes that run `target`, and kill them at the end.

    Yields (ranks, board): the list of `Rank`s, and the `Board`, the shared file in which every rank
    writes its calls. At the end of the block the ranks are killed, and the launch's temporary
    folder is deleted. So inside it, wait for the ranks' replies, and read their results from the
    files `rank.assignment.path("result")`.
    choice: the backend, the GPUs and the environment variables of the ranks.
    link: the `Link` whose latency and bandwidth are emulated, or None.
    keep_values: whether the records of calls keep the numbers in tensors of at most 64 elements, so
        that animations of the run can show them.
    target: `worker.main`, which calls the user's function once, or `worker.serve_cells`, which runs
        a notebook's cells. It gets the rank's orders (its number, ...) and two pipes, see `Rank`.
    call: with `worker.main`, the pickled (function, args, kwargs) to call; otherwise b"".
    check_buffers: whether the ranks check that no tensor is changed while it is being sent.
    OSError: the disk for temporary files is full; make room, or set TMPDIR.
    """
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
    """Return the number of threads that each rank computes with, at least 1.

    It is OMP_NUM_THREADS (4 for "4,2"), but at most the rank's share of the cores, their number
    divided by `world_size` and rounded down; without OMP_NUM_THREADS it is 1. The limit is there
    because threads spin while they wait for one another: with OMP_NUM_THREADS=2 from a shell, four
    ranks on two cores would have eight threads, and take ten times as long.
    """
    share = max(1, int(count_cores() // world_size))
    asked = os.environ.get(THREADS[0], "").partition(",")[0]  # "4,2": for nested loops, 2
    return min(int(asked), share) if asked.isdigit() and int(asked) else 1


def _check_room(folder: Path, nbytes: int):
    """Raise OSError if the disk of `folder` has fewer than `nbytes` bytes free.

    On a full disk, writing to the board, the memory-mapped file that ranks share, would kill this
    process by SIGBUS.
    """
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        needs = f"the ranks' files take {size(nbytes)}, and {size(free)} are free"
        raise OSError(errno.ENOSPC, f"the disk for temporary files is full: {needs}. {MAKE_ROOM}")


@functools.cache
def sweep(pattern: str = "ddpkit-[0-9]*-*"):
    """Delete the temporary folders that killed launches have left behind, once per process.

    A live process holds a lock on its folder, even if it runs in another container that shares the
    temporary folder. A folder is deleted only if it has no lock, belongs to this user, and is older
    than 60 s (`YOUNG_S`). Errors are ignored. The function is cached, so a second call with the
    same pattern does nothing. On Windows nothing is deleted.
    pattern: a glob pattern of the folders' names in the system's temporary folder.
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
    """Context manager: try to lock a folder, without blocking; yield whether that succeeded.

    It yields False if another lock is in the way, even one of this process. On Windows, and on file
    systems without locks (flock), it always does. The lock ends with the block or the process; if a
    child was forked inside, only once that has ended as well. OSError: the folder can't be opened.
    shared: True: any number of processes can have the lock at once if all take it as shared, as do
        the ranks of a run under torchrun with their common folder. False: only one can have it.
    """
    if os.name != "posix":
        yield False
        return
    import fcntl

    descriptor, works = os.open(folder, os.O_RDONLY), True
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError:  # it is locked already, or the file system has no locks
        works = False
    try:
        yield works
    finally:
        os.close(descriptor)


def _cell_texts() -> dict[str, tuple]:
    """Return the source of the notebook's cells, as {file: its entry in `linecache.cache`}.

    A rank needs it to show a line of a cell in a traceback. An entry is (size, None, lines, file).
    Cells are the entries with None for the time of modification: a file on disk has a time.
    """
    entries = linecache.cache.copy()  # other threads add to it
    return {name: entry for name, entry in entries.items() if len(entry) == 4 and entry[1] is None}


@contextlib.contextmanager
def interrupts_deferred():
    """Context manager: hold back a Ctrl-C that comes inside until the end of the block.

    Without this, a rank whose start or end is interrupted midway might live on. The end of the
    block calls the handler of SIGINT set before; Python's default raises KeyboardInterrupt. If it
    is no function (SIG_IGN, SIG_DFL), the Ctrl-C is dropped. Outside the main thread, do nothing.
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
    """Yield (rank, message) for each rank that has sent a message or ended.

    A message is the pair (word, data) that the rank has put into its pipe, such as ("done", value).
    For a process that has ended, and of which no message is left to read, it is ("exit", its exit
    code), in this call and in all later ones. Of each rank a call yields one message at most, the
    oldest. It waits up to `seconds` for the first; if none comes, it yields nothing.
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
    """Return the CPU time that a process has used so far, in the kernel's clock ticks, or None.

    A tick is 10 ms as a rule. User and system time of all its threads are added up, without its
    child processes. None: there is no /proc, or the process is gone.
    of_main_thread: count the main thread's time alone.
    """
    path = Path(f"/proc/{pid}/task/{pid}/stat" if of_main_thread else f"/proc/{pid}/stat")
    try:
        fields = path.read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[11]) + int(fields[12])


# The fork server.


def start_method() -> str:
    """Return how ranks are started: "forkserver" on Linux, "spawn" elsewhere.

    The environment variable DDPKIT_START_METHOD overrides this, for tests.
    """
    served = "forkserver" if sys.platform == "linux" else "spawn"
    return os.environ.get("DDPKIT_START_METHOD") or served


def warm_up():
    """Start the fork server ahead of the first launch, without waiting for its imports.

    Where ranks are spawned there is no server, and this does nothing.
    """
    if start_method() == "forkserver":
        with _starting, _our_way():
            pass


def is_starting() -> bool:
    """Return whether, at this moment, this process waits for a rank or the fork server to start.

    The first rank takes seconds, since it waits until the server has imported torch. A progress
    display asks this, to say what the wait is for.
    """
    return _starting.locked()


@functools.cache
def _server() -> forkserver.ForkServer:
    """Return ddpkit's own fork server, the same object in every call; it may not be running yet.

    The server that multiprocessing shares isn't used: if the user's program has started it, it runs
    without torch in it.
    """
    server = forkserver.ForkServer()
    server.set_forkserver_preload([*PRELOAD, LAST])
    return server


def preload(modules: Iterable[str]):
    """Let the fork server import `modules` from now on, so that no rank has to import them itself.

    modules: names of modules, none of them the user's, that don't use CUDA when imported. They add
        to those of earlier calls. One that raises ImportError is skipped.
    If one of them wasn't named before and the server runs already, a new server takes its place,
    and imports them in the background; a launch meanwhile waits until it has. The old server ends
    with the last rank that it has forked. Where ranks are spawned, this does nothing.
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
    """Context manager: let multiprocessing start ranks without running the user's script in them.

    By default multiprocessing runs the user's main script once more in each new process. Processes
    that this thread starts inside the block don't. On Linux (see `start_method`) they are forked by
    our fork server, not multiprocessing's; the server is started first unless it is running. A
    process that another thread starts meanwhile runs the script, even if our server forks it.
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
    """Start our fork server, unless it is running; during the start, this thread blocks SIGINT.

    The server inherits the block, so a Ctrl-C doesn't end it while it imports. Its forks inherit
    it as well; in each rank `worker.become_rank` lifts it.
    """
    resource_tracker.ensure_running()  # first: started by the server, it would unblock SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        _server().ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
