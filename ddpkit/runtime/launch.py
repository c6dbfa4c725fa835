"""`launch`: call a function on fresh ranks, watch them, bring back what they returned, printed and said."""

import contextlib
import linecache
import os
import re
import shutil
import signal
import sys
import time
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import cloudpickle
import torch
import torch.distributed as dist

from . import hang, processes, worker
from .board import Board, Record
from .errors import HangError, LaunchError, RankError
from .link import Link
from .wire import Recorder, is_library, register_wire

MOST_RANKS = 64
TICK_S = 0.05  # how often the board is read while nobody speaks
CERTAIN_S = 0.5  # a deadlock that the board proves is reported after it has stood still this long
SETTLE_S = 0.3  # after a failure the other ranks get this long to say how it hit them
LOST_PEER_S = 2.0  # and this long when those that fell all say that somebody else did
MOST_FRAMES = 30
LARGE_BYTES = 10_000_000
GLOO_CHATTER = re.compile(
    r"^(\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. |\[E\d+ .*Gloo connectFullMesh failed with ).*\n?",
    re.MULTILINE,
)


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
    with world(choice, world_size, link, keep_values, worker.main, call) as (ranks, board):
        watch = Watch(ranks, board, timeout, hang_after, live)
        watch.until_all_reply()
        output = watch.show_output()
        results, wire = [], []
        for rank in ranks:
            value, diary = _load_result(rank, watch)
            results.append(value)
            wire.append(diary)
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


# Which backend.


@dataclass
class Choice:
    """A backend and the reason for it. gpus: how many the ranks share out; 0 means CPU."""

    backend: str
    gpus: int
    line: str
    environ: dict[str, str] = field(default_factory=dict)


def choose_backend(backend: str, world_size: int, link: Link | None = None) -> Choice:
    """NCCL where every rank can have a GPU, one GPU shared where NCCL can do that, else Gloo on the CPU."""
    if backend == "gloo":
        return Choice("gloo", 0, "gloo on CPU: as asked")
    if link is not None:
        return Choice("gloo", 0, f"gloo on CPU: the emulated link ({link}) works on its wire")
    gpus = torch.cuda.device_count() if dist.is_nccl_available() else 0
    version = nccl_version() if gpus else ()
    dotted = ".".join(map(str, version))
    if gpus >= world_size:
        return Choice("nccl", gpus, f"nccl {dotted}: a GPU for each of {world_size} ranks")
    if gpus and version >= (2, 30):
        several = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
        return Choice("nccl", gpus, f"nccl {dotted}: {world_size} ranks share {gpus} GPU{'s' * (gpus > 1)}", several)
    short = f"{gpus} GPU{'s' * (gpus != 1)} for {world_size} ranks, and NCCL {dotted} can't share one (2.30 can)"
    reason = short if gpus else "no GPU that PyTorch can use"
    if backend == "nccl":
        raise ValueError(
            f"backend='nccl' expected a GPU for each rank, got {reason}: use backend='auto' or fewer ranks"
        )
    return Choice("gloo", 0, f"gloo on CPU: {reason}")


def nccl_version() -> tuple[int, ...]:
    """The version of the NCCL that is loaded, not of the one torch was built with."""
    import ctypes

    try:
        number = ctypes.c_int()
        torch.cuda.init  # noqa: B018 - loading torch's CUDA library loads NCCL
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
        return number.value // 10000, number.value // 100 % 100, number.value % 100
    except (OSError, AttributeError):
        return tuple(torch.cuda.nccl.version())


# A world of ranks.


@contextlib.contextmanager
def world(choice: Choice, world_size: int, link, keep_values: bool, target, call: bytes = b""):
    """Start `world_size` ranks that run `target`; whatever happens inside, none is left afterwards.

    Yields (ranks, board).
    """
    folder = processes.new_folder()
    ranks: list[processes.Rank] = []
    board = Board(folder / "board", world_size, create=True)
    try:
        (folder / "call").write_bytes(call)
        environ = {**os.environ, **choice.environ}
        for rank in range(world_size):
            assignment = worker.Assignment(
                rank, world_size, str(folder), choice.backend, choice.gpus, link, keep_values, environ, _cell_texts()
            )
            with processes.interrupts_deferred():
                ranks.append(processes.Rank(assignment, target))
        yield ranks, board
    finally:
        with processes.interrupts_deferred():
            end(ranks)
            board.close()
            shutil.rmtree(folder, ignore_errors=True)


def end(ranks: list[processes.Rank]):
    """End all of them, then wait for each."""
    for rank in ranks:
        rank.end()
    for rank in ranks:
        rank.wait_gone()


def _cell_texts() -> dict[str, tuple]:
    """The text of notebook cells, as linecache keeps it: entries without a time stand for no file."""
    entries = linecache.cache.copy()  # other threads add to it
    return {name: entry for name, entry in entries.items() if len(entry) == 4 and entry[1] is None}


class Watch:
    """Watches ranks until each has replied, and turns what goes wrong into a RankError or HangError."""

    def __init__(self, ranks, board: Board, timeout: float | None, hang_after: float, live: bool = False):
        self.ranks, self.board, self.timeout, self.hang_after, self.live = ranks, board, timeout, hang_after, live
        self.replies: dict[int, object] = {}
        self.pending: list[processes.Rank] = []
        self.output = [Output(rank.assignment.path("output")) for rank in ranks]

    def until_all_reply(self, awaited: list[int] | None = None) -> dict[int, object]:
        """Wait for one word from each of the `awaited` ranks (all, unless given); {rank: what it sent}."""
        self.replies = {}
        self.pending = [rank for rank in self.ranks if awaited is None or rank.rank in awaited]
        try:
            self._listen()
        except KeyboardInterrupt:
            self.show_output()  # it may tell why somebody lost patience
            raise
        return self.replies

    def _listen(self):
        begun = time.perf_counter()
        quiet_since, events = begun, None
        while self.pending:
            for rank in processes.wait_for_word(self.pending, TICK_S):
                self._hear(rank)
                if rank.rank in self.replies:
                    self.pending.remove(rank)
            if self.live:
                self._show_new_lines()
            if self.pending:
                now = time.perf_counter()
                before, events = events, [self.board.events(rank.rank) for rank in self.ranks]
                quiet_since = quiet_since if events == before else now
                if now - quiet_since > CERTAIN_S:
                    self._look_for_hang(now - quiet_since)
                if self.timeout is not None and now - begun > self.timeout:
                    self._raise_hang(f"no result after {self.timeout:g} s.", "The table shows where every rank was.")

    def check_all_live(self):
        """RankError if a rank has died while nobody listened."""
        for rank in self.ranks:
            if rank.exit_code is not None:
                self._raise_failure(rank)

    def _hear(self, rank: processes.Rank):
        word = processes.receive(rank.pipe)
        if word is None and rank.exit_code is not None:
            self._raise_failure(rank)
        elif word is not None and word[0] == "failed":
            self._raise_failure(rank, word[1])
        elif word is not None and word[0] == "disagrees":
            self._settle({rank.rank: None})
            self._raise_mismatch(word[1])
        elif word is not None:
            self.replies[rank.rank] = word[1]

    # Hangs.

    def _look_for_hang(self, quiet_s: float):
        if hang.mismatch(self.board):
            self._raise_mismatch()
        now = self.situations()
        for hidden in hang.abandoned(now, self.board):
            if self._sleeps(hidden.rank):
                now[hidden.rank] = hidden
        stuck = hang.deadlocked(now, self.board)
        if stuck:
            self._raise_hang(*hang.explain_deadlock(now, stuck), now)
        if quiet_s > self.hang_after + self._emulated_s():
            blocked = [s for s in now if s.state == "waiting" or (self._has_open_call(s.rank) and self._sleeps(s.rank))]
            if blocked and len(blocked) == sum(s.state in ("waiting", "computing", "starting") for s in now):
                self._raise_hang(
                    f"no progress for {self.hang_after:g} s, and every rank is inside a call.",
                    "All ranks came to the call, yet it doesn't finish. A larger hang_after gives it more time.",
                )

    def situations(self) -> list[hang.Situation]:
        return hang.situations(self.board)

    def _has_open_call(self, rank: int) -> bool:
        return any(r.done is None and r.op not in ("send", "recv") for r in self.board.records(rank))

    def _sleeps(self, rank: int) -> bool:
        """Whether the rank's process burns no CPU."""
        before = _cpu_ticks(self.ranks[rank].process.pid)
        time.sleep(0.1)
        return before is not None and _cpu_ticks(self.ranks[rank].process.pid) == before

    def _emulated_s(self) -> float:
        """How long the emulated link may rightly hold back what is under way."""
        link = self.ranks[0].assignment.link
        calls = [r for rank in self.ranks for r in self.board.records(rank.rank) if r.done is None] if link else []
        return sum(link.seconds(r.op, r.bytes * len(r.ranks), len(r.ranks)) for r in calls)

    def _raise_mismatch(self, told: dict[int, Record] | None = None):
        """told: what a rank saw, in case the board has moved on since."""
        self._raise_hang(*hang.explain_mismatch(hang.mismatch(self.board) or told))

    def _raise_hang(self, headline: str, advice: str, now: list[hang.Situation] | None = None):
        now = now or self.situations()
        for situation in now:
            if situation.state in ("computing", "starting") and situation.place is None:
                situation.place = self._place_of(situation.rank)
        self._fail(HangError, hang.report(headline, advice, now, self.board))

    def _place_of(self, rank: int) -> tuple[str, int, str] | None:
        """The innermost line of the user's own code that a computing rank is at."""
        return next((f for f in self.ranks[rank].ask_stack() if not is_library(f[0])), None)

    # Failures.

    def _settle(self, fallen: dict[int, worker.Failure | int | None]):
        """Give the other ranks a moment to fail too, so that the report doesn't depend on who was faster.

        fallen: {rank: how} so far; added to. As long as all of them only lost a peer, that peer is waited for longer.
        """
        begun, events = time.perf_counter(), None
        while True:
            cause_known = not all(_is_collateral(how) for how in fallen.values())
            if time.perf_counter() - begun > (SETTLE_S if cause_known else LOST_PEER_S):
                return
            rest = [rank for rank in self.pending if rank.rank not in fallen]
            for rank in processes.wait_for_word(rest, 0.02) if rest else []:
                word = processes.receive(rank.pipe)
                if word is None and rank.exit_code is not None:
                    fallen[rank.rank] = rank.exit_code
                elif word is not None:
                    fallen[rank.rank] = word[1] if word[0] == "failed" else None
            before, events = events, [self.board.events(rank.rank) for rank in self.ranks]
            now = self.situations()
            still = all(rank.rank in fallen or now[rank.rank].state == "waiting" for rank in rest)
            if events == before and still and (cause_known or not rest):
                return

    def _raise_failure(self, rank: processes.Rank, failure: worker.Failure | None = None):
        """RankError for the rank that failed on its own account; a mismatch, if that is the cause."""
        fallen = {rank.rank: failure if failure is not None else rank.exit_code}
        self._settle(fallen)
        if hang.mismatch(self.board):
            self._raise_mismatch()
        fallen = {r: how for r, how in fallen.items() if how is not None}
        culprit = min(fallen, key=lambda r: (_is_collateral(fallen[r]), getattr(fallen[r], "at", 0.0)))
        culprit = min(r for r in fallen if r == culprit or _same(fallen[r], fallen[culprit]))
        alike = [r for r in sorted(fallen) if r != culprit and _same(fallen[r], fallen[culprit])]
        lines = [_how(culprit, fallen[culprit])]
        if isinstance(fallen[culprit], worker.Failure):
            lines += _frames(fallen[culprit].frames)
        if alike:
            lines.append(f"{hang.name_ranks(alike).capitalize()} failed in the same way.")
        others = [s for s in self.situations() if s.rank != culprit and s.rank not in alike]
        lines += self._collateral(others, fallen)
        said = self.output[culprit].read().strip().splitlines()[-5:]
        if said:
            lines += [f"Rank {culprit}'s last output:", *(f"  {line}" for line in said)]
        self._fail(RankError, "\n".join(lines), rank=culprit)

    def _collateral(self, others: list[hang.Situation], fallen: dict) -> list[str]:
        lines = []
        for s in others:
            if s.state == "idle":  # it ended its cell and lives on
                continue
            how = fallen.get(s.rank)
            if how is not None and not _is_collateral(how):
                lines.append(_how(s.rank, how))
                continue
            records = self.board.records(s.rank)
            open_call = next((r for r in reversed(records) if r.done is None), None)
            if s.state == "returned":
                lines.append(f"Rank {s.rank} had returned.")
            elif open_call is not None:
                place = hang.describe_place((open_call.file, open_call.line, open_call.function))
                lines.append(f"Rank {s.rank} was in {open_call.call}, {place}")
            else:
                lines.append(f"Rank {s.rank} was computing.")
        return ["The others were ended:", *(f"  {line}" for line in lines)] if lines else []

    def _fail(self, kind: type[LaunchError], message: str, **details):
        wire = [self.board.records(rank.rank) for rank in self.ranks]
        output = self.show_output()
        raise kind(message, output=output, wire=wire, **details) from None

    # Output.

    def show_output(self) -> list[str]:
        """Print what was not shown yet, in rank order; returns all that each rank printed since the watch began."""
        if self.live:
            self._show_new_lines(last=True)
        else:
            _write("".join(label(rank, text.read()) for rank, text in enumerate(self.output)))
        return [text.read() for text in self.output]

    def _show_new_lines(self, last: bool = False):
        _write("".join(label(rank, text.new_lines(last)) for rank, text in enumerate(self.output)))


class Output:
    """What a rank has printed so far, read from its file."""

    def __init__(self, path: Path):
        self.path = path
        self._start = path.stat().st_size if path.exists() else 0
        self._shown = self._start

    def read(self) -> str:
        """Everything since this object was made."""
        return self._text(self._start)

    def new_lines(self, last: bool = False) -> str:
        """The whole lines that came since the last call; the unfinished one too if it is the `last` call."""
        data = self._bytes(self._shown)
        whole = data if last else data[: data.rfind(b"\n") + 1]
        self._shown += len(whole)
        return _clean(whole)

    def _text(self, start: int) -> str:
        return _clean(self._bytes(start))

    def _bytes(self, start: int) -> bytes:
        if not self.path.exists():
            return b""
        with open(self.path, "rb") as file:
            file.seek(start)
            return file.read()


def _clean(data: bytes) -> str:
    """Text without Gloo's chatter; of a progress bar that rewrote its line, what it showed last."""
    text = GLOO_CHATTER.sub("", data.decode("utf-8", errors="replace").replace("\r\n", "\n"))
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))


def label(rank: int, text: str) -> str:
    """`text` with "rank 2 | " before every line."""
    return "".join(f"rank {rank} | {line}\n" for line in text.removesuffix("\n").split("\n")) if text else ""


def _write(text: str):
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()


# Failures in words.


def _how(rank: int, how: worker.Failure | int) -> str:
    """How a rank fell: rank 2 raised ValueError: ...; rank 2 was killed by SIGKILL."""
    if isinstance(how, worker.Failure):
        return f"rank {rank} raised {how.kind}: {how.message}"
    if how >= 0:
        return f"rank {rank} exited with code {how}, in the middle of its work."
    name = signal.Signals(-how).name if -how in iter(signal.Signals) else f"signal {-how}"
    hint = {
        "SIGKILL": "\n  Something outside killed it; most often the machine had no memory left.",
        "SIGSEGV": "\n  It touched memory that isn't its own: a fault in compiled code.",
        "SIGABRT": "\n  Compiled code gave up; its last output says why.",
    }
    return f"rank {rank} was killed by {name}.{hint.get(name, '')}"


def _frames(frames: list[tuple[str, int, str]]) -> list[str]:
    """The way to the error, a line each; of an endless recursion only its two ends."""
    lines = [f"  {hang.describe_place(frame)}" for frame in frames]
    if len(lines) > MOST_FRAMES:
        half = MOST_FRAMES // 2
        lines[half:-half] = [f"  ... {len(lines) - 2 * half} more lines ..."]
    return lines


LOST_PEER = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|connection was (closed|aborted)"
)


def _is_collateral(how: worker.Failure | int) -> bool:
    """Whether a rank only fell because another one did: its connection broke."""
    return (
        isinstance(how, worker.Failure)
        and how.kind in ("RuntimeError", "DistBackendError")
        and bool(LOST_PEER.search(how.message))
    )


def _same(one, other) -> bool:
    if isinstance(one, worker.Failure) and isinstance(other, worker.Failure):
        return (one.kind, one.message, one.frames) == (other.kind, other.message, other.frames)
    return False


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


def _cpu_ticks(pid: int) -> int | None:
    """User and system time of a process so far, where /proc tells."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[11]) + int(fields[12])


# Under torchrun.


def _join_running_world(fn, args, kwargs, link, keep_values) -> Run:
    """Call `fn` here, in a rank that torchrun started; every rank gets every rank's result."""
    if not dist.is_initialized():
        _initialise_under_torchrun(link)
    recorder = getattr(dist.group.WORLD, "recorder", None)  # None: the script initialised torch.distributed itself
    before = len(recorder.diary) if recorder else 0
    if recorder:
        recorder.link, recorder.keep_values = link, keep_values
    begun = time.perf_counter()
    value = fn(*args, **kwargs)
    seconds = time.perf_counter() - begun
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (value, recorder.diary[before:] if recorder else []))
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
