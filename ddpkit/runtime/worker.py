"""Run a rank: set up its process, join the world, work, send the result, and wait to be ended.

`processes.py` starts a rank's process, which runs `main` or `serve_cells` with three arguments:
assignment: the rank's orders, such as its number and the number of ranks: see `Assignment`.
pipe: the rank's end of the pipe for messages to and from the parent.
lifeline: a pipe that closes when the parent ends, upon which the rank ends as well.
A rank that ended by itself would fail others, which may still use its connections.
"""

import ast
import contextlib
import ctypes
import errno
import faulthandler
import linecache
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import types
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import cloudpickle
import torch
import torch.distributed as dist

from . import exits
from .backends import Choice
from .board import IDLE, RETURNED, RUNNING, STARTING, Board
from .call import on_cpu
from .errors import NoGpu
from .falls import failure
from .link import Link
from .look import Look
from .recorder import Recorder
from .report import explain_timeout, waited_s
from .wire import register_wire

# Modules that backward(gradient), a first optimizer and FSDP import, each in half a second or two.
SLOW_IMPORTS = (
    "torch.fx.experimental.symbolic_shapes",
    "torch._dynamo",
    "torch.distributed.tensor",
)
MAKE_ROOM = "Make room there, or name another folder in TMPDIR and restart"


@dataclass
class Assignment:
    """The orders of a new rank, which its process unpickles first.

    It is plain data, so that unpickling it imports nothing of the user's before the rank is set up.
    folder: the launch's temporary folder, where the function to call is in a file.
    choice: the backend, and `gpus`, the number of GPUs among which the ranks are spread, perhaps 0.
    link: the slow network to emulate between ranks, or None.
    keep_values: whether the records of calls keep the numbers in tensors of at most 64 elements.
    environ: {name: value} of all environment variables of the rank.
    cells: {file: entry of `linecache.cache`} of notebook cells, whose lines tracebacks show.
    check_buffers: whether to check that no tensor is changed while it is being sent.
    """

    rank: int
    world_size: int
    folder: str  # the launch's temporary folder
    choice: Choice  # the backend, and the number of GPUs
    link: Link | None  # to be emulated
    keep_values: bool  # whether records keep the numbers in small tensors
    environ: dict[str, str]  # all environment variables of the rank
    cells: dict[str, tuple]  # {file: entry of linecache.cache} of notebook cells, for tracebacks
    check_buffers: bool = False  # whether to check that no tensor is changed while it is being sent

    def path(self, name: str) -> Path:
        """Return the path of this rank's file in the launch's folder: "output.2" for "output"."""
        return Path(self.folder) / f"{name}.{self.rank}"

    @property
    def device(self) -> torch.device:
        """Return this rank's device: GPU `rank % choice.gpus`, or the CPU if `choice.gpus` is 0."""
        gpus = self.choice.gpus
        return torch.device("cuda", self.rank % gpus) if gpus else torch.device("cpu")


def main(assignment: Assignment, pipe: Connection, lifeline: Connection):
    """Run a rank of `launch`: join the world, call the function, reply, and block until killed.

    The function and its arguments are in the file "call" of the launch's folder. Then (the value
    that it returned, the rank's records) is pickled into the rank's file, such as "result.2", and
    the reply is ("done", names of those `SLOW_IMPORTS` that are loaded by now): the parent preloads
    these modules for the next launch. If any of this raises, also joining or pickling, there is no
    result, and the reply is ("failed", a `Failure` that describes the exception).
    """
    recorder = become_rank(assignment, pipe, lifeline)
    pid = os.getpid()
    try:
        take_gpu(assignment)  # before tensors arrive that were on one
        with open(Path(assignment.folder) / "call", "rb") as file:
            function, args, kwargs = pickle.load(file)
        join_world(assignment, recorder)
        value = function(*args, **kwargs)
        exits.end_child(pid)
        recorder.settle()
        save(assignment.path("result"), (value, recorder.records))
        recorder.board.set_state(assignment.rank, RETURNED)
        reply = ("done", [name for name in SLOW_IMPORTS if name in sys.modules])
    except BaseException as error:
        exits.end_child(pid, error)
        reply = ("failed", failure(error))
    flush()
    pipe.send(reply)
    wait_to_be_ended()


def serve_cells(assignment: Assignment, pipe: Connection, lifeline: Connection):
    """Run a rank of the magic `%%ranks`: join the world, then run cell after cell in one namespace.

    It never returns; the parent kills the process. The first reply, once the world is joined, is
    ("done", None). Then the parent sends (source, file, whether to return records) for each cell;
    file is a name for the source, for tracebacks. The reply is ("done", (the cell's value as
    `run_cell` returns it, records of its calls or [])). If joining or a cell raises, the reply is
    ("failed", a `Failure` that describes the exception), and the rank is ready for the next cell;
    but if it hasn't joined, the parent ends it.
    """
    recorder = become_rank(assignment, pipe, lifeline)
    board = recorder.board
    rank = assignment.rank
    pid = os.getpid()
    main_module = types.ModuleType("__main__")  # where pickle looks up names that cells define
    sys.modules["__main__"] = main_module
    names = vars(main_module)
    names.update(rank=rank, world_size=assignment.world_size, device=assignment.device)
    names.update(dist=dist, torch=torch)
    cell = None
    while True:
        try:
            if cell is None:
                take_gpu(assignment)
                join_world(assignment, recorder)
                reply = ("done", None)
            else:
                source, file, traced = cell
                before = recorder.calls
                value = run_cell(source, file, names)
                exits.end_child(pid)
                if traced:  # only then: a call may wait for a later cell's call on another rank
                    recorder.settle()
                reply = ("done", (value, recorder.since(before) if traced else []))
        except BaseException as error:
            exits.end_child(pid, error)
            reply = ("failed", failure(error))
        flush()
        board.set_state(rank, IDLE)
        pipe.send(reply)
        cell = pipe.recv()
        board.set_state(rank, RUNNING)


def run_cell(source: str, file: str, names: dict) -> str | None:
    """Run a cell's code in the namespace `names`; return the repr of its last expression's value.

    None: the cell doesn't end with an expression, or the value is None.
    file: a name for the source, which is put into `linecache`, so that a traceback shows its lines.
    """
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    tree = ast.parse(source, file)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, file, "exec"), names)
    if last is None:
        return None
    value = eval(compile(ast.Expression(last.value), file, "eval"), names)
    return None if value is None else repr(value)


def become_rank(assignment: Assignment, pipe: Connection, lifeline: Connection) -> Recorder:
    """Turn this new process into a rank; return the `Recorder` that will keep the rank's records.

    From now on the process ends when its parent does, Ctrl-C is ignored, and output goes into the
    rank's file "output". The environment is that of the assignment. SIGUSR1 writes the stacks of
    all threads into the rank's file "stack", for the parent to read. torch gets a new random seed,
    which differs by rank and by launch. The world isn't joined yet.
    pipe: if ranks later make different calls, this rank reports that to the parent through it.
    """
    if os.name == "posix":
        os.setpgid(0, 0)  # so that its children can be ended with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides; drops one that is pending
    if os.name == "posix":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    end_with_parent(lifeline)
    capture_output(assignment.path("output"))
    # What multiprocessing makes in its temporary folder goes with ours.
    multiprocessing.current_process()._config["tempdir"] = assignment.folder
    before = dict(os.environ)
    for name in before.keys() - assignment.environ.keys():
        del os.environ[name]
    os.environ.update(assignment.environ.items() - before.items())
    linecache.cache.update(assignment.cells)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.default_generator.seed()  # forks would all draw alike, unlike the ranks of a cluster
    stacks = open(assignment.path("stack"), "w")  # stays open for SIGUSR1 from the parent
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)

    exits.note_exits(Path(assignment.folder), assignment.rank)

    def disagree(by_rank):
        """Report to the parent that ranks made different calls; block until it kills this rank.

        by_rank: {rank: the `Record` of its call}, for the calls that should have been the same.
        """
        pipe.send(("disagrees", by_rank))
        wait_to_be_ended()

    def timed_out(record, error):
        """Add to `error`, the exception of a call that timed out, which ranks wait for which.

        record: the `Record` of the call.
        """
        seconds = waited_s(record, error)
        headline, _ = explain_timeout(Look(board), seconds)
        error.add_note(headline)

    board = Board(Path(assignment.folder) / "board", assignment.world_size)
    what = assignment.link, assignment.keep_values, disagree, timed_out
    recorder = Recorder(assignment.rank, board, *what)
    recorder.check_buffers = assignment.check_buffers
    return recorder


def end_with_parent(lifeline: Connection):
    """Arrange that this rank and its children end when the parent does; return at once.

    `lifeline` closes however the parent ends. On Linux it is set (F_SETSIG) so that the kernel then
    sends SIGKILL to this rank's process group, even while C code holds the GIL. On other systems a
    thread that reads `lifeline` kills the group; on Windows that thread ends this rank alone.
    """
    if sys.platform == "linux":
        from fcntl import F_GETFL, F_SETFL, F_SETOWN, F_SETSIG, fcntl

        fcntl(lifeline.fileno(), F_SETOWN, -os.getpgrp())
        fcntl(lifeline.fileno(), F_SETSIG, signal.SIGKILL)
        fcntl(lifeline.fileno(), F_SETFL, fcntl(lifeline.fileno(), F_GETFL) | os.O_ASYNC)

    def watch():
        with contextlib.suppress(EOFError, OSError):
            lifeline.recv_bytes()
        if os.name == "posix":
            os.killpg(0, signal.SIGKILL)
        exits.exit_at_once(1)

    threading.Thread(target=watch, daemon=True, name="ddpkit lifeline").start()


def wait_to_be_ended():
    """Block for ever: the parent kills this rank, once all have replied, or some fail or hang."""
    threading.Event().wait()


def capture_output(path: Path):
    """Redirect the output of this process to the file `path`.

    It redirects descriptors 1 and 2, so that the output of C++ code and of child processes is
    included, and reopens sys.stdout and sys.stderr. Output is appended. Unlike a pipe, a file can't
    fill up and block the rank.
    """
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    text = {"encoding": "utf-8", "errors": "backslashreplace", "buffering": 1, "closefd": False}
    sys.stdout, sys.stderr = open(1, "w", **text), open(2, "w", **text)


def flush():
    """Write out what Python and C still hold of the output in their buffers; errors are ignored."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).fflush(None)


def take_gpu(assignment: Assignment):
    """Make this rank's GPU the current device of CUDA; do nothing for a rank on the CPU.

    NoGpu is raised if CUDA can't use it; all ranks then start anew on the CPU, unless on "nccl".
    """
    if assignment.choice.gpus:
        try:
            torch.cuda.set_device(assignment.device)
        except Exception as error:
            why = str(error).partition("\n")[0]
            said = f"rank {assignment.rank} can't use {assignment.device}: {why}"
            raise NoGpu(said, assignment.rank) from None


def join_world(assignment: Assignment, recorder: Recorder):
    """Initialise torch.distributed on the wire, the process group that records every call.

    It returns when all ranks are connected. The store is a file, so that no port is guessed and no
    host name resolved. Gloo and NCCL listen on the loopback interface only, so nothing is reachable
    from outside this machine, unless the user has set NCCL_SOCKET_IFNAME.
    """
    rank, world_size = assignment.rank, assignment.world_size
    register_wire(recorder, assignment.choice.backend, assignment.device, one_machine=True)
    store = dist.FileStore(str(Path(assignment.folder) / "store"), world_size)
    dist.init_process_group("ddpkit", store=store, rank=rank, world_size=world_size)
    recorder.board.set_state(rank, RUNNING)
    # Wait for all: to a rank that is still joining, one that fails looks like a broken network.
    while any(recorder.board.state(other) == STARTING for other in range(world_size)):
        time.sleep(0.0002)


class _Pickler(cloudpickle.Pickler):
    """A pickler for a rank's result, which `save` writes: it copies tensors on a GPU to the CPU.

    So the parent, which unpickles it, needn't use CUDA. Functions and classes that a notebook's
    cell defines, lambdas as well, are pickled with their code.
    """

    def reducer_override(self, obj):
        if isinstance(obj, torch.Tensor) and obj.is_cuda:
            return on_cpu(obj).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(obj)


def save(path: Path, value: object):
    """Pickle `value`, the pair (returned value, records), into a file.

    It isn't sent through a pipe, which would fill up and block the rank.
    OSError: the disk for temporary files is full; make room, or set TMPDIR.
    ValueError: the returned value can't be pickled; return plain data or tensors.
    """
    try:
        with open(path, "wb") as file:
            _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception as error:
        if getattr(error, "errno", None) == errno.ENOSPC:
            full = "the disk for temporary files is too full for the return value"
            raise OSError(errno.ENOSPC, f"{full}. {MAKE_ROOM}") from None
        expected = "Expected plain data, tensors or anything else that pickles"
        raise ValueError(
            f"the return value can't be sent back to the notebook ({type(error).__name__}: "
            f"{error}). {expected}, got {type(value[0]).__name__}: return its contents"
        ) from None
