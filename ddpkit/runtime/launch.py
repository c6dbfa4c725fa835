"""Call a function on fresh processes, the ranks, and collect what they return: `launch`.

It returns a `Run`: what each rank returned and printed, and the records of its collective calls,
sends and receives. Under torchrun it starts no process, but calls the function in the present one,
which is a rank. There the `Run` has the results and records of all ranks, but no output.
"""

import atexit
import contextlib
import difflib
import inspect
import itertools
import os
import sys
import time
from collections.abc import Callable

import cloudpickle
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ..tools.checks import check_positive
from . import processes, worker
from .backends import Choice, start_on
from .board import RETURNED, RUNNING, Record
from .call import pickle_call
from .errors import RankError, shown
from .link import Link
from .place import call_site, describe_place
from .recorder import Recorder, recorder
from .run import Run
from .watch import Watch
from .wire import of_this_attempt

MOST_RANKS, DEFAULT_RANKS = 64, 4
ASKED = {"rank": "dist.get_rank()", "world_size": "dist.get_world_size()"}
THEIRS = {"nprocs": "world_size", "nproc_per_node": "world_size"}  # words of PyTorch's launchers
_launches = itertools.count()  # the index of each launch under torchrun, the same on all ranks


def launch(
    fn: Callable,
    *args,
    world_size: int | None = None,
    backend: str = "auto",
    link: Link | None = None,
    timeout: float | None = None,
    hang_after: float = 15.0,
    live: bool = False,
    keep_values: bool = False,
    check_buffers: bool = False,
    **kwargs,
) -> Run:
    """Call `fn(*args, **kwargs)` on `world_size` fresh processes joined by torch.distributed.

    fn: a callable, not `async`; it gets its rank from `dist.get_rank()`, as under torchrun. If it
        is defined in a cell or script, each rank gets a copy of the globals that `fn` uses: a rank
        that changes a global changes it neither here nor in another rank.
    world_size: 1 to 64, by default 4. Under torchrun leave it out, or give the number it started.
    backend: "gloo", "nccl" or "auto": NCCL if there is a GPU for each rank or, from NCCL 2.30 on,
        any GPU, which ranks then share; otherwise Gloo on CPU. Ranks on Gloo see no GPU.
    link: a network to emulate between the ranks, slower than the real one (Gloo only).
    timeout: seconds from the ranks' start until they are ended, with a HangError; None: no limit.
    hang_after: seconds without any progress, with every rank inside a call, that count as a hang.
        Ranks that compute are not hung, however long. Proven deadlocks are reported much sooner.
    live: show output as the ranks print it, instead of in rank order at the end.
    keep_values: keep in the records the numbers in tensors of at most 64 elements, so that
        animations of the run can show them.
    check_buffers: a rank that changes a CPU tensor while it is being sent fails, with RankError;
        sends and asynchronous collectives then take two checksums of what they send.

    A rank computes with one thread or, if OMP_NUM_THREADS is set, with that number, but at most its
    share of the cores. `torch.set_num_threads` in `fn` gives it more.

    Returns a `Run`. Under torchrun no process is started: `fn` is called in the running world, and
    every rank gets a `Run` with all results, and with the seconds that `fn` took on this rank.
    There `backend`, `timeout`, `hang_after` and `live` do nothing, and what `fn` raises is raised.
    RankError: a rank raised, exited, was killed or returned a value that can't be unpickled here.
    HangError: ranks can't go on, their calls disagree, or the timeout is over.
    Before the ranks start: ValueError: an argument can't work, or can't be pickled. TypeError: `fn`
    can't take the arguments that are meant for it. OSError: the disk is full. See notebook 00.
    """
    under_torchrun = dist.is_torchelastic_launched()
    if world_size is None:
        world_size = _torchruns_size() if under_torchrun else DEFAULT_RANKS
    with _told_briefly():
        _check_arguments(fn, world_size, backend, link)
        if under_torchrun and world_size != _torchruns_size():
            got = f"launch got world_size={world_size} where torchrun started {_torchruns_size()}"
            raise ValueError(f"{got} ranks: leave it out, or have torchrun start as many")
        check_positive("Give seconds.", hang_after=hang_after)
        if timeout is not None:
            check_positive("Give seconds, or None.", timeout=timeout)
        _check_call(fn, args, kwargs)
    if under_torchrun:
        return _join_running_world(fn, args, kwargs, link, keep_values, check_buffers)
    if dist.is_available() and dist.is_initialized():
        expected = "expected a notebook, a script or torchrun"
        raise ValueError(f"launch was called inside a rank: {expected}. Call fn directly")
    call = pickle_call(fn, args, kwargs)
    begun = time.perf_counter()

    def start(choice: Choice) -> Run:
        how = choice, world_size, link, keep_values
        started = processes.world(*how, worker.main, call, check_buffers)
        with started as (ranks, board):
            watch = Watch(ranks, board, timeout, hang_after, live, fresh=True)
            slow_imports = watch.until_all_reply()
            output = watch.show_output("run.output")
            results, wire = zip(*(_load_result(rank, watch) for rank in ranks), strict=True)
        processes.preload(set().union(*slow_imports.values()))
        seconds = time.perf_counter() - begun
        return Run(list(results), output, list(wire), seconds, choice.line, link)

    return start_on(start, backend, world_size, link)


@contextlib.contextmanager
def _told_briefly():
    """Context manager: let Jupyter show a TypeError or ValueError of the block without a traceback.

    Jupyter then shows the error's message, and the line of the user's code that called `launch`.
    The error is still raised; errors of other classes are shown as usual.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        place = describe_place(call_site())
        lines = shown(f"{type(error).__name__}: {error}\n  {place}")
        error._render_traceback_ = lambda: lines
        raise


def _check_arguments(fn, world_size, backend, link):
    """Raise ValueError if `launch` can't work with one of these arguments, and say what to pass."""
    if not callable(fn):
        remedy = "pass launch(f), not launch(f())"
        raise ValueError(f"launch expected a function to call on every rank, got {fn!r}: {remedy}")
    if inspect.iscoroutinefunction(fn):
        remedy = "call asyncio.run(...) of it inside a plain function"
        raise ValueError(f"launch expected a plain function, got one of `async def`: {remedy}")
    whole = isinstance(world_size, int) and not isinstance(world_size, bool)
    most = max(MOST_RANKS, _torchruns_size()) if dist.is_torchelastic_launched() else MOST_RANKS
    if not whole or not 1 <= world_size <= most:
        expected = f"a whole number as world_size, from 1 to {MOST_RANKS} on one machine"
        raise ValueError(f"launch expected {expected}, got {world_size!r}")
    if backend not in ("auto", "gloo", "nccl"):
        raise ValueError(f"launch expected backend 'auto', 'gloo' or 'nccl', got {backend!r}")
    if link is not None and not isinstance(link, Link):
        example = "for example link=Link.preset('10 Gbit Ethernet')"
        raise ValueError(f"launch expected a Link, got {link!r}: {example}")
    if link is not None and backend == "nccl":
        expected = "expected 'gloo' or 'auto', only Gloo's wire is emulated"
        raise ValueError(f"launch got a link and backend='nccl': {expected}")


def _check_call(fn, args, kwargs):
    """Raise TypeError if `fn` can't take these arguments, as far as its signature is known.

    A keyword that isn't an argument of `launch` goes to `fn`. If it looks like a slip for one of
    `launch`, such as nprocs for world_size, the message suggests that argument.
    """
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # of builtins
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(fn, "__name__", type(fn).__name__)
        said = [f"launch can't call {name} with these arguments: {error}"]
        options = list(inspect.signature(launch).parameters)[2:-1]
        meant = []
        missing = str(error).partition("missing a required argument: ")[2].strip("'")
        if missing in ASKED:
            said.append(f"launch doesn't pass it: in {name}, ask {ASKED[missing]}")
        elif missing in options:
            said.append(f"launch keeps {missing}= for itself: give {name} its own by place")
        elif len(args) == 1 and isinstance(args[0], int):
            meant.append(f"world_size={args[0]}")
        for wrote in kwargs:
            close = difflib.get_close_matches(wrote, options, 1)
            for option in [THEIRS[wrote]] if wrote in THEIRS else close:
                meant.append(f"{option} where you wrote {wrote}")
        if meant:
            said.append(f"Did you mean {' and '.join(meant)}?")
        raise TypeError(". ".join(said)) from None


def _load_result(rank: processes.Rank, watch: Watch) -> tuple[object, list[Record]]:
    """Return (what a rank returned, its records), from the file that the rank wrote.

    rank: the rank's process, as the launch started it. watch: the `Watch` that waited for the
        ranks' replies.
    RankError: the file can't be unpickled in this process. `watch.fail` raises it, with the output
        and the records of all ranks.
    """
    try:
        with open(rank.assignment.path("result"), "rb") as file:
            return cloudpickle.load(file)
    except Exception as error:
        got = f"a value that can't be rebuilt here ({type(error).__name__}: {error})"
        message = f"rank {rank.rank} returned {got}: return plain data or tensors"
        watch.fail(RankError, message, rank=rank.rank)


# Under torchrun.


def _torchruns_size() -> int:
    """Return the number of ranks that torchrun started, on all machines together.

    It is the size of the world or, before that exists, the environment variable WORLD_SIZE, which
    torchrun sets. KeyError: there is neither.
    """
    return dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])


def _join_running_world(fn, args, kwargs, link, keep_values, check_buffers) -> Run:
    """Call `fn` in this rank, which torchrun started; return all ranks' results as a `Run`.

    Every rank has to call this, since the results are exchanged at the end. torch.distributed is
    initialised first, with recording, if it isn't yet, and stays so for later launches. If the
    script initialised it itself, no call is recorded, unless it was started by `python -m
    ddpkit.debug`, which records calls from the beginning. The `Run` has "" as each rank's output,
    since torchrun shows it, and this rank's seconds in `fn`.
    The arguments are those of `launch`. Where no call is recorded, `link` (a network to emulate)
    and `keep_values` have no effect; on NCCL, `link` has none.
    ValueError: check_buffers is True in a world that began without that check.
    """
    if not dist.is_initialized():
        _initialise_under_torchrun(link, check_buffers)
    mine = recorder()  # None: the script initialised torch.distributed itself
    if check_buffers and not getattr(mine, "check_buffers", False):
        remedy = (
            "give it to the first launch, or --check-buffers to the command that starts the script"
        )
        raise ValueError(f"launch got check_buffers=True in a world that began without: {remedy}")
    if mine:
        before = mine.calls
        mine.link = link or mine.own_link
        mine.keep_values = keep_values
    begun = time.perf_counter()
    value = fn(*args, **kwargs)
    seconds = time.perf_counter() - begun
    _wait_till_all_return(mine)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (value, mine.since(before) if mine else []))
    values, wire = map(list, zip(*everyone, strict=True))
    line = f"{dist.get_backend()}: in the world that torchrun started"
    emulated = mine.link if mine and not mine.streams else None
    return Run(values, [""] * len(everyone), wire, seconds, line, emulated)


def _wait_till_all_return(mine: Recorder | None):
    """Wait until every rank has returned from `fn`, before the exchange of results begins.

    A rank still inside `fn` would otherwise look as if its next call mismatched with that exchange.
    The ranks wait for one another twice, by way of torch's key-value store, which isn't recorded.
    Before the first wait, each marks itself as returned on the board, a shared file, so that a rank
    inside `fn` that waits for a returned rank is reported as hung. Before the second, each marks
    itself as running again, so that no rank is marked as returned in the exchange.
    mine: this rank's `Recorder`, which writes to the board. None if the script initialised
        torch.distributed itself: then the ranks wait, but mark nothing.
    """
    store = c10d._get_default_store()
    number = next(_launches)
    for state in (RETURNED, RUNNING):
        if mine:
            mine.board.set_state(dist.get_rank(), state)
        _meet(store, f"ddpkit/launch/{number}/{state}", dist.get_world_size())


def _meet(store: dist.Store, key: str, world_size: int):
    """Wait until all ranks have called this with the same key: a barrier by way of the store.

    store: torch.distributed's key-value store, which every rank reaches. No collective call is
        made, so nothing is recorded. key: a new one each time; with a used one, nothing waits.
    """
    store.add(key, 1)
    while store.add(key, 0) < world_size:
        time.sleep(0.005)


def _initialise_under_torchrun(link, check_buffers):
    """Initialise torch.distributed in this rank; a `Session` then records calls, reports hangs.

    A process has one session: that of `python -m ddpkit.debug`, if that command started the script;
    otherwise one is made here, which closes when the process ends. It also reports, from now on, an
    exception that ends the script. The backend is NCCL if every rank has a GPU and no link is
    emulated, otherwise Gloo. The caller has checked that torch.distributed isn't initialised.
    link: the emulated `Link` between the ranks, or None.
    check_buffers: whether it is an error to change a tensor while it is being sent.
    """
    from ..inspect.session import Session  # only here: it stands above the runtime

    session = getattr(dist.init_process_group, "session", None)  # `ddpkit.debug` has made one
    if session is None:
        session = Session(None)
        session.install()
        atexit.register(session.leave)
    mine = session.recorder
    mine.check_buffers |= check_buffers
    mine.link = link or mine.own_link
    store, rank, world_size = next(dist.rendezvous("env://"))
    store = of_this_attempt(store)
    all_have_gpus = _each_has_a_gpu(store, world_size)
    backend = "nccl" if all_have_gpus and mine.link is None else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    sys.excepthook = lambda _, error, __: session.failed(error)  # in place of torch's


def _each_has_a_gpu(store: dist.Store, world_size: int) -> bool:
    """Return, on all ranks alike, whether every machine has NCCL and a GPU for each of its ranks.

    Every rank must call this, which waits until all have.
    store: torch.distributed's key-value store, through which the ranks exchange their answers.
    """
    here = int(os.environ["LOCAL_WORLD_SIZE"])
    enough = dist.is_nccl_available() and torch.cuda.device_count() >= here
    store.add("ddpkit/has a GPU", int(enough))
    _meet(store, "ddpkit/counted", world_size)
    return store.add("ddpkit/has a GPU", 0) == world_size
