"""Explain how ranks failed: which one failed first, on which line, and what the others did.

A rank falls if it raises an exception, exits in the middle of its work, or is killed. How it fell,
a `Fall`, is either a `Failure` (the exception's class, message and frames) or, without an
exception, an exit code. A `Look` is the state of all ranks at one moment, as they wrote it on the
board, a file that they share.
"""

import os
import re
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ..tools.units import name_ranks
from .look import Look
from .place import describe_place, is_installed, is_library

RUNTIME_FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep
MOST_FRAMES = 30  # of an error, that a report shows
LAST_LINES = 5  # of a rank's output
MODULE_CALLS = "_wrapped_call_impl", "_call_impl"  # by which torch calls a module's forward
LOST_PEER = re.compile(
    "Connection closed by (remote )?peer|Connection reset by peer|Broken pipe|"
    "connection was (closed|aborted)|remote process exited or there was a network error"
)
NETWORK = "RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError"
FAULT = re.compile("CUDA error|Assertion")
SIGNALS = {
    "SIGBUS": "It touched a mapped file beyond its end: is the disk, or /dev/shm, full?",
    "SIGKILL": "Something outside killed it; most often the machine had no memory left.",
    "SIGSEGV": "It touched memory that isn't its own: a fault in compiled code.",
    "SIGABRT": "Compiled code gave up; its last output says why.",
    "SIGTERM": "Another process ended it: a scheduler at a time limit, or somebody's kill.",
}
RENDEZVOUS = [  # (pattern of an error, what happened, what to check)
    (
        r"Timed out after (\d+) seconds waiting for clients. (\d+)/(\d+) clients joined",
        "after {} s, {} of {} ranks had come to init_process_group.",
        "Is every rank started, with the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT?",
    ),
    (
        r"client socket has timed out after (\w+) while trying to connect to \((.*?)\)",
        "in {}, nothing answered at {}.",
        "Is rank 0 started, is MASTER_ADDR its address, and does no firewall block the port?",
    ),
    (
        r"(?<!error of type )Rendezvous(Timeout|Connection)Error",  # not: the other ended first
        "torchrun didn't find its other machines ({}).",
        "Does it run on all --nnodes machines, with one --rdzv-id and one --rdzv-endpoint?",
    ),
]
JOINED = "Both are done for you: leave out init_process_group and destroy_process_group."
MEANS = {  # {part of an error of Python's or torch's: what it means in a rank}
    "name 'rank' is not defined": "A rank asks for its number: rank = dist.get_rank().",
    "name 'world_size' is not defined": "A rank asks: world_size = dist.get_world_size().",
    "default process group twice": JOINED,
    "process group has not been initialized": JOINED,
    "unhandled system error": "NCCL lacks something of the system's, in a container most often "
    "shared memory: start it with --shm-size=2g. NCCL_DEBUG=INFO says more.",
    "ncclSocketInit: connecting to address": "Two ranks began with the same call, as a send to "
    "one another: NCCL connects a send with a recv. Start messages in both directions together, "
    "with dist.batch_isend_irecv.",
    "No CUDA GPUs are available": "These ranks are on the CPU, and `run.backend` of one that "
    "works says why: take .cuda() out, or fewer ranks.",
    "'tuple' object does not support item assignment": "tensor_split gives a tuple of views: "
    "`chunks[i] += y` adds, and then tries to put the result into the tuple. Write "
    "`chunks[i].add_(y)`, or name it first: `chunk = chunks[i]; chunk += y`.",
    "'NoneType'": "Something is None here. torch.distributed's collectives work in place and "
    "return None: call dist.all_reduce(x), then use x. And a parameter has no .grad before its "
    "first backward, or if it isn't trained.",
    "arg0: torch._C._distributed_c10d.ReduceOp": "After the tensor comes the operation, such as a "
    "sum, and then the group: write group=group.",
    "autograd kernel was not registered": "dist.all_reduce is unknown to autograd, so backward "
    "may do anything. Give it x.detach() of a constant, such as a maximum that is subtracted. "
    "SumOverRanks.apply(x, group) is the same sum, and backward knows it.",
    "does not require grad and does not have a grad_fn": "No graph leads to this tensor. Was it "
    "detached, or computed under no_grad, or in a backward, where torch.enable_grad() is needed?",
    "must be Tensor, not tensor": "A tile in a kernel is no PyTorch tensor: only Triton's "
    "functions take it, such as tl.exp, tl.maximum and tl.sum.",
}


@dataclass
class Failure:
    """The failure of a rank that raised an exception, as data that can be sent to the launcher.

    Not every exception can be pickled. kind: the name of the exception's class. message: its text,
    with notes and cause. frames: (file, line, function) of its traceback, outermost first.
    at: the `time.perf_counter()` when it was caught.
    """

    kind: str  # the exception's class
    message: str
    frames: list[tuple[str, int, str]]  # (file, line, function), outermost first
    at: float  # time.perf_counter() when it was caught


Fall = Failure | int  # an exit code is negative if a signal ended the rank: -9


def _text_of(thing, how: Callable = str) -> str:
    """Return how(thing) or, if that raises, a text which says so and names what class it raised.

    thing: an exception or what sys.exit was given; a class of the user's may have a wrong __str__.
    how: str or repr.
    """
    try:
        return how(thing)
    except Exception as another:
        return f"(its text can't be had: {type(another).__name__} in __{how.__name__}__)"


def failure(error: BaseException) -> Failure:
    """Return an exception as a `Failure`: its class, its message, the frames of its traceback.

    The message has the exception's notes and its `__cause__` at its end. For SystemExit it begins
    "sys.exit(3) was called". For a SyntaxError in a file, notes and cause are left out, and the
    only frame is the line that can't be parsed. Frames of ddpkit.runtime are left out, and those of
    modules that set `__tracebackhide__`, as ddpkit's exercises do. Call this as soon as the error
    is caught: `at` is the time of this call, by which `first_to_fall` finds out which rank failed
    first. All ranks of a machine share its clock, `time.perf_counter()`.
    """
    message = _text_of(error)
    if isinstance(error, SystemExit):
        message = f"sys.exit({'' if error.code is None else _text_of(error.code, repr)}) was called"
    message += "".join(f"\n{note}" for note in getattr(error, "__notes__", []))
    if error.__cause__ is not None:
        message += f" (because of {type(error.__cause__).__name__}: {_text_of(error.__cause__)})"
    frames = []
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        hidden = frame.f_globals.get("__tracebackhide__")
        if not hidden and not code.co_filename.startswith(RUNTIME_FOLDER):
            frames.append((code.co_filename, line, code.co_name))
    if isinstance(error, SyntaxError) and error.filename:
        message = error.msg
        frames = [(error.filename, error.lineno or 0, "<module>")]
    return Failure(type(error).__name__, message, frames, time.perf_counter())


def first_to_fall(fallen: dict[int, Fall]) -> tuple[int, list[int]]:
    """Return (the rank to blame, the other ranks that failed in the same way).

    The rank that failed first is found by time. But an exit, whose time isn't known, counts as
    earlier than all exceptions, and a rank that only lost its connection as later than all others,
    since it failed because another had. In a tie, the first in `fallen` counts. Other ranks may
    have raised the same exception on the same lines, with messages that differ in rank numbers and
    addresses at most. Of all these, the one that comes first in `fallen` is to blame.
    fallen: {rank: how it fell, a `Failure` or an exit code}, not empty.
    """

    def blame(rank: int) -> tuple[bool, float]:
        how = fallen[rank]
        return lost_peer(how), getattr(how, "at", 0.0)

    first = min(fallen, key=blame)
    culprit, *alike = (r for r in fallen if r == first or _same(fallen[r], fallen[first]))
    return culprit, alike


def lost_peer(how: Fall | None) -> bool:
    """Return whether a rank failed only because its connection to another rank broke.

    how: its `Failure`, its exit code, or None if it didn't fail. For the last two: False.
    """
    if not isinstance(how, Failure):
        return False
    return how.kind in NETWORK and LOST_PEER.search(how.message) is not None


def _same(one: Fall, other: Fall) -> bool:
    """Return whether two ranks raised the same class of exception, with equal frames and messages.

    Messages may differ in rank numbers ("rank 3") and memory addresses. Exit codes never count as
    the same, since they don't show where a rank ended.
    """
    if not (isinstance(one, Failure) and isinstance(other, Failure)):
        return False
    alike = (one.kind, one.frames) == (other.kind, other.frames)
    return alike and _anonymous(one.message) == _anonymous(other.message)


def _anonymous(message: str) -> str:
    """Return an error's message without rank numbers ("rank 3") and addresses, to compare it."""
    return re.sub(r"\b(rank |dst=|src=)\d+|\b(0x)[\da-f]+", r"\1\2", message)


# The text of a report.


class Witness(Protocol):
    """A source of facts about ranks for `explain_fall`, such as the `Watch` that supervises them.

    noted_exit(rank): (exit code, (file, line, function)) of the rank's call of `os._exit`; None if
    it made none. printed(rank): its output so far. place(rank): (file, line, function) of the
    user's code where the rank is now, or None if that isn't known. shortage(): a sentence which
    says that the machine ran short of memory, a likely reason for a kill, or "".
    """

    def noted_exit(self, rank: int) -> tuple[int, tuple] | None: ...
    def printed(self, rank: int) -> str: ...
    def place(self, rank: int) -> tuple | None: ...
    def shortage(self) -> str: ...


def explain_fall(fallen: dict[int, Fall], look: Look, witness: Witness) -> tuple[int, str]:
    """Return (the rank to blame, the report of the failure as the text of a RankError).

    The rank that failed first is to blame. The report says how and, if known, where it failed, what
    the failure most likely means (looked up in `MEANS`, by parts of error messages), where the
    other ranks were, and the last 5 lines (`LAST_LINES`) that the rank to blame printed. Ranks of a
    notebook that had ended their cell are left out.
    fallen: {rank: a `Failure` or an exit code} of all that failed, whether on their own account or
        because another rank had.
    look: the state of all ranks when the launch ended them.
    witness: answers questions that the board doesn't, such as what a rank printed.
    """
    culprit, alike = first_to_fall(fallen)
    how = fallen[culprit]
    lines = [how_it_fell(culprit, how, witness.shortage())]
    noted = witness.noted_exit(culprit)
    if noted is not None:
        lines.append(f"  {describe_place(noted[1])}")
    if how == -signal.SIGABRT:  # each thread of a kernel says so, and hundreds of lines follow
        faults = [line for line in witness.printed(culprit).splitlines() if FAULT.search(line)]
        lines += [f"  {line.strip()}" for line in faults[:1]]
    if isinstance(how, Failure):
        lines += lines_of(how.frames)
    if alike:
        lines.append(f"{name_ranks(alike).capitalize()} failed in the same way.")
    if isinstance(how, Failure):
        lines += [means for says, means in MEANS.items() if says in how.message]
    others = (s.rank for s in look.now if s.rank not in (culprit, *alike) and s.state != "idle")
    said = [what_became_of(rank, look, fallen.get(rank), witness.place) for rank in others]
    if said:
        lines += ["The others were ended:", *said]
    last = witness.printed(culprit).strip().splitlines()[-LAST_LINES:]
    if last:
        lines += [f"Rank {culprit}'s last output:", *(f"  {line}" for line in last)]
    return culprit, "\n".join(lines)


def how_it_fell(rank: int, how: Fall, shortage: str = "") -> str:
    """Return in words how a rank fell, such as 'rank 2 raised ValueError: ...'.

    how: a `Failure`, or an exit code, which is negative if a signal killed the rank. For some
        signals a second line explains what most likely happened. The message of a broken connection
        is replaced by 'lost its connection to another rank'.
    shortage: a sentence which says that memory was short, or "". It explains a SIGKILL.
    """
    if isinstance(how, Failure):
        message = "lost its connection to another rank" if lost_peer(how) else how.message
        return f"rank {rank} raised {how.kind}: {message}".removesuffix(": ")
    if how >= 0:
        return f"rank {rank} exited with code {how}, in the middle of its work."
    name = signal.Signals(-how).name if -how in iter(signal.Signals) else f"signal {-how}"
    hint = SIGNALS.get(name, "")
    if name == "SIGKILL":
        hint = shortage or hint
    return f"rank {rank} was killed by {name}." + (f"\n  {hint}" if hint else "")


def explain_rendezvous(message: str) -> str | None:
    """Return an explanation of an error that says that the ranks didn't find each other.

    The text has two lines: what happened, and what to check. It covers errors of init_process_group
    and of the rendezvous of torchrun's agents.
    message: the error's text. Return None if it is about something else.
    """
    for pattern, happened, check in RENDEZVOUS:
        if found := re.search(pattern, message):
            return f"rendezvous: {happened.format(*found.groups())}\n  {check}"
    return None


def lines_of(frames: list[tuple[str, int, str]]) -> list[str]:
    """Return the lines that show an error's frames, a line for each, to be put below its message.

    frames: (file, line, function), outermost first; the lines are in the same order.
    Shown are the frames in the user's own code. If the innermost frame outside of torch, ddpkit and
    Python's library is an installed package's, it is shown as well. If no code is the
    user's, all frames outside of these three are shown; if there are none, all but those in which
    torch only passes a call on to a module's forward. Beyond 30 lines (`MOST_FRAMES`), the middle
    is left out and counted.
    """
    outside_torch = [frame for frame in frames if not is_library(frame[0])]
    own = [frame for frame in outside_torch if not is_installed(frame[0])]
    if own and outside_torch[-1] is not own[-1]:  # the framework's line that raised it
        own.append(outside_torch[-1])
    no_module_calls = [frame for frame in frames if frame[2] not in MODULE_CALLS]
    shown = own or outside_torch or no_module_calls or frames
    lines = [f"  {describe_place(frame)}" for frame in shown]
    if len(lines) > MOST_FRAMES:
        half = MOST_FRAMES // 2
        lines[half:-half] = [f"  ... {len(lines) - 2 * half} more lines ..."]
    return lines


def what_became_of(
    rank: int,
    look: Look,
    how: Fall | None = None,
    place: Callable[[int], tuple | None] | None = None,
) -> str:
    """Return a report's lines on a rank that isn't to blame, such as "  Rank 3 had returned."

    If the rank failed as well, other than by losing its connection, they say how. Otherwise they
    say where it was when the launch ended it: it had returned or not joined the world yet, or it
    was in a call that wasn't complete (the latest of these is named), or it was computing on some
    line.
    look: the state of all ranks at that time.
    how: the rank's own `Failure` or exit code; None if it didn't fail.
    place: a function that takes a rank which still runs, and returns the line on which it computes
        as (file, line, function), or None if it doesn't answer: then no line is named. If the rank
        has fallen, or `place` is None, the line in `look` is named, if there is one.
    """
    if how is not None and not lost_peer(how):
        frames = getattr(how, "frames", None)
        where = f"\n  {lines_of(frames)[-1]}" if frames else ""
        return f"  R{how_it_fell(rank, how)[1:]}{where}"
    s = look.now[rank]
    if s.state in ("returned", "starting"):
        had = "had returned" if s.state == "returned" else "hadn't joined the world"
        return f"  Rank {rank} {had}."
    for record in reversed(look.records[rank]):
        if record.done is None:
            return f"  Rank {rank} was in {record.call}, {describe_place(record.place)}"
    at = place(rank) if place and how is None else s.place
    where = f", {describe_place(at)}" if at else "."
    return f"  Rank {rank} was computing{where}"
