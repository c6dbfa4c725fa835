"""`launch`: call a function on fresh ranks and bring back what they returned, printed and said."""

import contextlib
import os
import time
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import cloudpickle
import torch
import torch.distributed as dist

from . import processes, worker
from .backends import choose_backend
from .board import Record
from .errors import RankError
from .link import Link
from .watch import Watch
from .wire import Recorder, recorder, register_wire

MOST_RANKS = 64
LARGE_BYTES = 10_000_000


@dataclass
class Run:
    """What a launch brought back. `run[2]` is what rank 2 returned."""

    results: list
    output: list[str] = field(repr=False)  # what each rank printed, C++ and child processes included
    wire: list[list[Record]] = field(repr=False)  # what each rank said, in order
    seconds: float = field(repr=False)
    backend: str = field(repr=False)  # which backend, and why
    link: Link | None = field(default=None, repr=False)

    def __getitem__(self, rank):
        return self.results[rank]

    def __len__(self):
        return len(self.results)

    def __iter__(self):
        return iter(self.results)

    def __repr__(self):
        return "\n".join(f"rank {rank}: {_indent(repr(value), rank)}" for rank, value in enumerate(self.results))


def _indent(text: str, rank: int) -> str:
    return text.replace("\n", "\n" + " " * len(f"rank {rank}: "))


def launch(
    fn: Callable,
    *args,
    world_size: int = 4,
    backend: str = "auto",
    link: Link | None = None,
    timeout: float | None = None,
    hang_after: float = 15.0,
    live: bool = False,
    keep_values: bool = False,
    **kwargs,
) -> Run:
    """Call `fn(*args, **kwargs)` on `world_size` fresh processes that can talk through torch.distributed.

    fn: any callable, from a cell too; it finds its rank with `dist.get_rank()`, as under torchrun. What it uses of the
        notebook travels with it as a copy: a global changed in a rank is not changed here, nor in another rank.
    backend: "auto" (NCCL where every rank can have a GPU, else Gloo on the CPU), "gloo" or "nccl".
    link: an emulated wire between the ranks, slower than the real one (Gloo only).
    timeout: seconds after which the ranks are ended and a HangError says where they were.
    hang_after: seconds without any progress, with every rank inside a call, that count as a hang. Ranks that compute
        are not hung, however long. Deadlocks that are certain are reported much sooner.
    live: show what the ranks print as they print it, instead of in rank order when all are done.
    keep_values: keep the contents of messages of up to 64 elements in the records, for replays.

    Returns a `Run`. Under torchrun no process is started: `fn` is called in the world that runs already, and every rank
    gets the same `Run`.
    Raises RankError (a rank raised, exited or was killed), HangError (they wait for what never comes, or disagree),
    ValueError for arguments that can't work, before any process is started.
    Notebook 00.
    """
    _check_arguments(fn, world_size, backend, link, timeout, hang_after)
    if dist.is_torchelastic_launched():
        return _join_running_world(fn, args, kwargs, link, keep_values)
    if dist.is_available() and dist.is_initialized():
        raise ValueError("launch was called inside a rank: expected a notebook, a script or torchrun. Call fn directly")
    call = _pickle_call(fn, args, kwargs)
    choice = choose_backend(backend, world_size, link)
    begun = time.perf_counter()
    with processes.world(choice, world_size, link, keep_values, worker.main, call) as (ranks, board):
        watch = Watch(ranks, board, timeout, hang_after, live)
        slow_imports = watch.until_all_reply()
        output = watch.show_output()
        results, wire = [], []
        for rank in ranks:
            value, records = _load_result(rank, watch)
            results.append(value)
            wire.append(records)
    processes.preload(set().union(*slow_imports.values()))
    return Run(results, output, wire, time.perf_counter() - begun, choice.line, link)


def _check_arguments(fn, world_size, backend, link, timeout, hang_after):
    if not callable(fn):
        raise ValueError(
            f"launch expected a function to call on every rank, got {fn!r}: pass launch(f), not launch(f())"
        )
    if isinstance(world_size, bool) or not isinstance(world_size, int) or not 1 <= world_size <= MOST_RANKS:
        raise ValueError(f"launch expected world_size from 1 to {MOST_RANKS} on one machine, got {world_size!r}")
    if backend not in ("auto", "gloo", "nccl"):
        raise ValueError(f"launch expected backend 'auto', 'gloo' or 'nccl', got {backend!r}")
    if link is not None and not isinstance(link, Link):
        raise ValueError(f"launch expected a Link, got {link!r}: for example link=Link.preset('10 Gbit Ethernet')")
    if link is not None and backend == "nccl":
        raise ValueError(
            "launch got a link and backend='nccl': expected 'gloo' or 'auto', only Gloo's wire is emulated"
        )
    for name, value in (("timeout", timeout), ("hang_after", hang_after)):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (value is None and name == "timeout") and not (number and value > 0):
            raise ValueError(f"launch expected {name} in seconds, more than 0, got {value!r}")


# The call as bytes.


def _pickle_call(fn, args, kwargs) -> bytes:
    """The call, and the text of the cells it comes from, so that tracebacks in the ranks can quote them."""
    for name, value in [*enumerate(args), *kwargs.items()]:
        if isinstance(value, types.GeneratorType):
            shown = f"argument {name}" if isinstance(name, int) else f"argument {name}="
            raise ValueError(
                f"launch expected data that can be copied to other processes, got a generator as {shown}: "
                "pass list(...) of it, or make the generator inside the function"
            )
    try:
        call = cloudpickle.dumps((fn, args, kwargs))
    except Exception as error:
        raise ValueError(
            "launch expected a function and arguments that can be copied to other processes, got "
            f"{_culprit(fn, args, kwargs)} ({type(error).__name__}: {error}). Make it inside the function instead"
        ) from error
    if len(call) > LARGE_BYTES:
        _warn_large(fn, len(call))
    return call


def _captured(fn) -> dict[str, object]:
    """The globals and closure variables that travel with `fn`."""
    code = getattr(fn, "__code__", None)
    if code is None:
        return {}
    names, pending = set(), [code]
    while pending:
        code = pending.pop()
        names.update(code.co_names)
        pending.extend(const for const in code.co_consts if isinstance(const, types.CodeType))
    found = {name: fn.__globals__[name] for name in names if name in fn.__globals__}
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):
            found[name] = cell.cell_contents
    return found


def _culprit(fn, args, kwargs) -> str:
    """The name of what can't be pickled."""
    parts = [(f"argument {index}", value) for index, value in enumerate(args)]
    parts += [(f"argument {name}=", value) for name, value in kwargs.items()]
    parts += [(f"the variable {name!r} that the function uses", value) for name, value in _captured(fn).items()]
    for name, value in parts:
        try:
            cloudpickle.dumps(value)
        except Exception:
            return name
    return repr(fn)


def _warn_large(fn, nbytes: int):
    sizes = {name: len(cloudpickle.dumps(value)) for name, value in _captured(fn).items()}
    large = [f"{name} ({size / 1e6:.0f} MB)" for name, size in sizes.items() if size > LARGE_BYTES]
    what = f"the variable {', '.join(large)} that the function uses" if large else "the function's arguments"
    warnings.warn(
        f"every rank gets its own copy of {nbytes / 1e6:.0f} MB: {what}. Make or load it inside the function instead",
        stacklevel=4,
    )


def _load_result(rank: processes.Rank, watch: Watch):
    try:
        with open(rank.assignment.path("result"), "rb") as file:
            return cloudpickle.load(file)
    except Exception as error:
        message = (
            f"rank {rank.rank} returned a value that can't be rebuilt here ({type(error).__name__}: {error}): "
            "return plain data or tensors"
        )
        watch._fail(RankError, message, rank=rank.rank)


# Under torchrun.


def _join_running_world(fn, args, kwargs, link, keep_values) -> Run:
    """Call `fn` here, in a rank that torchrun started; every rank gets every rank's result."""
    if not dist.is_initialized():
        _initialise_under_torchrun(link)
    mine = recorder()  # None: the script initialised torch.distributed itself
    before = len(mine.records) if mine else 0
    if mine:
        mine.link, mine.keep_values = link, keep_values
    begun = time.perf_counter()
    value = fn(*args, **kwargs)
    seconds = time.perf_counter() - begun
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (value, mine.records[before:] if mine else []))
    values, wire = ([one[part] for one in everyone] for part in (0, 1))
    line = f"{dist.get_backend()}: in the world that torchrun started"
    return Run(values, [""] * len(everyone), wire, seconds, line, link)


def _initialise_under_torchrun(link):
    local = int(os.environ["LOCAL_RANK"])
    nccl = link is None and dist.is_nccl_available() and torch.cuda.device_count() > local
    device = torch.device("cuda", local) if nccl else torch.device("cpu")
    if nccl:
        torch.cuda.set_device(device)
    register_wire(Recorder(int(os.environ["RANK"])), "nccl" if nccl else "gloo", device, one_machine=False)
    dist.init_process_group("ddpkit")
