"""Watching ranks: what they answer, how they fail or hang, and how that is told."""

import math
import re
import signal
import sys
import time
from typing import ClassVar

from ..tools.units import count
from . import exits, hang, processes, worker
from .board import MESSAGES, STARTING, Board
from .errors import HangError, LaunchError, NoGpu, RankError, shown
from .output import Output, label, shorten
from .recorder import is_installed, is_library, is_pythons

TICK_S = 0.05  # how often the board is read while nobody speaks
CERTAIN_S = 0.5  # a deadlock that the board proves is reported after it has stood still this long
STANDSTILL_S = 10.0  # without a call, after which a reader wonders
START_S = 60.0  # for connecting the ranks; NCCL waits without end for one that doesn't answer
SETTLE_S = 0.4  # after a failure the other ranks get this long to say how it hit them
LOST_PEER_S = 2.0  # and this long when those that fell all say that somebody else did
MOST_FRAMES = 30
MODULE_CALLS = "_wrapped_call_impl", "_call_impl"  # between a torch module and each of its own
LOST_PEER = re.compile(
    "Connection closed by peer|Connection reset by peer|Broken pipe|connection was (closed|aborted)"
)
FAULT = re.compile("CUDA error|Assertion")
JOINED = "Both are done for you: leave out init_process_group and destroy_process_group."
MEANS = {  # what Python or torch says, and what it means in a rank
    "name 'rank' is not defined": "A rank asks for its number: rank = dist.get_rank().",
    "name 'world_size' is not defined": "A rank asks: world_size = dist.get_world_size().",
    "default process group twice": JOINED,
    "process group has not been initialized": JOINED,
    "unhandled system error": "NCCL lacks something of the system's, in a container most often "
    "shared memory: start it with --shm-size=2g. NCCL_DEBUG=INFO says more.",
    "'tuple' object does not support item assignment": "tensor_split gives a tuple of views: "
    "`chunks[i] += y` adds, and then tries to put the result into the tuple. Write "
    "`chunks[i].add_(y)`, or name it first: `chunk = chunks[i]; chunk += y`.",
    "'NoneType'": "Something is None here. torch.distributed's collectives work in place and "
    "return None: call dist.all_reduce(x), then use x. And a parameter has no .grad before its "
    "first backward, or if it isn't trained.",
    "arg0: torch._C._distributed_c10d.ReduceOp": "After the tensor comes the operation, such as a "
    "sum, and then the group: write group=group.",
    "autograd kernel was not registered": "dist.all_reduce is unknown to autograd, so backward "
    "may do anything. SumOverRanks.apply(x, group) is the same sum, and backward knows it.",
    "does not require grad and does not have a grad_fn": "No graph leads to this tensor. Was it "
    "detached, or computed under no_grad, or in a backward, where torch.enable_grad() is needed?",
    "must be Tensor, not tensor": "A tile in a kernel is no PyTorch tensor: only Triton's "
    "functions take it, such as tl.exp, tl.maximum and tl.sum.",
}


class Watch:
    """Watches ranks until each has replied; what goes wrong becomes a RankError or HangError.

    fresh: they were started for this, so all that they print belongs to it.
    """

    watching: ClassVar[list["Watch"]] = []  # those that wait for replies now

    def __init__(self, ranks, board: Board, timeout=None, hang_after=15.0, live=False, fresh=False):
        self.ranks, self.board, self.live = ranks, board, live
        self.timeout, self.hang_after = timeout, hang_after
        self.replies: dict[int, object] = {}
        self.pending: list[processes.Rank] = []
        self.quiet_since = time.perf_counter()  # since when no rank made or ended a call
        self.connecting_since = math.inf  # seconds after the start
        self.output = [Output(rank.assignment.path("output"), fresh) for rank in ranks]

    def until_all_reply(self, awaited: list[int] | None = None) -> dict[int, object]:
        """Wait for one word of each of the `awaited` ranks (None: all); {rank: what it sent}."""
        self.replies = {}
        self.pending = [rank for rank in self.ranks if awaited is None or rank.rank in awaited]
        self.watching.append(self)
        try:
            self._listen()
        except KeyboardInterrupt:
            raise self._interrupted() from None
        finally:
            self.watching.remove(self)
        return self.replies

    def status(self) -> str:
        """Say in a line what the ranks do: how many calls they made, or who waits for whom."""
        quiet_s = time.perf_counter() - self.quiet_since
        if quiet_s < STANDSTILL_S:
            calls = sum(map(self.board.calls, range(len(self.ranks))))
            return f"{count(len(self.ranks), 'rank')}, {count(calls, 'call')} so far"
        said = [f"no call for {quiet_s:.0f} s"]
        for s in hang.situations(self.board):
            if s.missing:
                waits = f"rank {s.rank} waits for {hang.name_ranks(s.missing)} in {s.call.op}"
                said.append(waits)
        return ", ".join(said)

    def _listen(self):
        begun = looked = self.quiet_since = time.perf_counter()
        events = None
        while self.pending:
            for rank, (word, said) in processes.listen(self.pending, TICK_S):
                self._hear(rank, word, said)
            if self.live:
                self._show_new_lines()
            for text in self.output:
                text.trim()
            now = time.perf_counter()
            before, events = events, self.board.events()
            self.quiet_since = self.quiet_since if events == before else now
            if not self.pending:
                return
            if now - max(self.quiet_since, looked) > CERTAIN_S:  # ranks need the cores
                self._look_for_hang(now - self.quiet_since, events)
                self._look_at_start(now - begun)
                looked = now
            if self.timeout is not None and now - begun > self.timeout:
                headline = f"no result after {self.timeout:g} s."
                advice = "Above is where every rank was: a loop without end, or a short timeout?"
                self.fail(HangError, self._report(headline, advice))

    def check_all_live(self):
        """RankError if a rank has died while nobody listened."""
        for rank in self.ranks:
            if rank.exit_code is not None:
                self._raise_failure(rank, rank.exit_code)

    def _hear(self, rank: processes.Rank, word: str, said):
        if word in ("exit", "failed"):
            self._raise_failure(rank, said)
        elif word == "disagrees":
            self._settle({rank.rank: None}, cause_known=True)
            self._raise_hang(*hang.explain_mismatch(hang.mismatch(self.board) or said))
        else:
            self.replies[rank.rank] = said
            self.pending.remove(rank)

    # Hangs.

    def _look_for_hang(self, quiet_s: float, events: list[int]):
        """events: the board's, when it had been quiet for so long."""
        overdue = quiet_s > self.hang_after + self._emulated_s()
        now = (hang.at_standstill if overdue else hang.situations)(self.board)
        for hidden in hang.abandoned(now, self.board):
            if hidden.call.on_stream or self._sleeps(hidden.rank):
                now[hidden.rank] = hidden
        for s in now:
            if s.has_free_thread and not hang.gone(s, now):
                s.has_free_thread = not (overdue or self._other_threads_idle(s.rank))
        stuck = hang.deadlocked(now)
        if not stuck and overdue:
            stuck = hang.polled_in_vain(now)
        if self.board.events() != events:  # the ranks went on while it was read
            return
        if stuck and (overdue or not hang.ends_by_itself(now, stuck)):
            self._raise_hang(*hang.explain_deadlock(now, stuck, self.board), now)
        if not overdue:
            return
        alive = [s for s in now if s.state not in ("returned", "idle", hang.ON_STREAM)]
        inside = "waiting", "polling"
        if alive and all(s.state in inside or self._waits_unseen(s.rank) for s in alive):
            more = "A larger hang_after gives it more time."
            self._raise_hang(
                f"no progress for {self.hang_after:g} s, and every rank is inside a call.",
                hang.let_go(self.board)
                or f"All ranks came to the call, yet it doesn't finish. {more}",
            )

    def _look_at_start(self, seconds: float):
        """HangError if the start takes too long, and all ranks were connecting for half of it.

        One that still loads the call may take as long as it likes. seconds: since the start.
        """
        starting = all(self.board.state(rank.rank) == STARTING for rank in self.ranks)
        if not starting or seconds < START_S / 2:  # to be asked interrupts what a rank does
            return
        stopped = [rank.rank for rank in self.ranks if rank.is_stopped]
        if not all(rank.rank in stopped or _connects(rank) for rank in self.ranks):
            self.connecting_since = math.inf
            return
        self.connecting_since = min(self.connecting_since, seconds)
        if seconds - self.connecting_since < START_S / 2:
            return
        whom = f"what holds {hang.name_ranks(stopped)}" if stopped else "which of them, and why"
        advice = f"Somebody doesn't answer: {whom}?"
        if self.ranks[0].assignment.choice.gpus:
            advice += " Set NCCL_DEBUG=INFO in os.environ, and NCCL says what it waits for."
        self._raise_hang(f"no start: after {seconds:.0f} s the ranks are still connecting.", advice)

    def _waits_unseen(self, rank: int) -> bool:
        """Tell whether it has an open collective and burns no CPU: it may wait for it in C++.

        A rank that waits for a GPU burns CPU; its GPU must have come to the call, not compute
        before it.
        """
        records = self.board.records(rank)
        opened = [r for r in records if r.done is None and r.op not in MESSAGES]
        if any(r.on_stream for r in opened):
            return any(r.reached for r in opened)
        return bool(opened) and self._sleeps(rank)

    def _sleeps(self, rank: int) -> bool:
        """Tell whether the rank's process burns no CPU."""
        before = processes.cpu_ticks(self.ranks[rank].process.pid)
        time.sleep(0.1)
        after = processes.cpu_ticks(self.ranks[rank].process.pid)
        return before is not None and after == before

    def _other_threads_idle(self, rank: int) -> bool:
        """Tell whether all threads but the main one wait for work, as those of a pool do."""
        stacks = self.ranks[rank].ask_stacks()
        if not stacks:  # nobody knows: they may be busy
            return False
        for stack in stacks[:-1]:
            files = [file for file, _, _ in stack]
            if worker.__file__ not in files and not all(map(is_pythons, files)):
                return False
        return True

    def _emulated_s(self) -> float:
        """Count the seconds for which the emulated link may hold back what is not done yet."""
        link, seconds = self.ranks[0].assignment.link, 0.0
        for rank in self.ranks if link else ():
            for r in self.board.records(rank.rank):
                if r.done is None:
                    seconds += link.seconds(r.op, r.whole_bytes, len(r.ranks))
        return seconds

    def _raise_hang(self, headline: str, advice: str, now: list[hang.Situation] | None = None):
        now = now or hang.situations(self.board)
        self.fail(HangError, self._report(headline, advice, now))

    def _report(self, headline: str, advice: str, stuck: list[hang.Situation] | None = None) -> str:
        """stuck: where the ranks are, if they will never go on."""
        now = stuck or hang.situations(self.board)
        for s in now:
            if s.state in ("computing", "starting"):
                s.place = s.place or self._place(s.rank)
        return hang.report(headline, advice, now, self.board, stuck is not None)

    def _place(self, rank: int) -> tuple[str, int, str] | None:
        """Return the line of the reader's own code that a rank's main thread is at."""
        stack = self.ranks[rank].ask_stack()
        outside_torch = [frame for frame in stack if not is_library(frame[0])]
        own = (frame for frame in outside_torch if not is_installed(frame[0]))
        return next(own, next(iter(outside_torch), None))

    def _interrupted(self) -> KeyboardInterrupt:
        """The interrupt, with the reason for somebody's impatience: where the ranks were."""
        report = self._report("stopped. The ranks were here:", "They were ended.")
        for rank in self.ranks:  # now: one that prints without end would keep us reading
            rank.end()
        self.show_output()
        error = KeyboardInterrupt(report)
        error._render_traceback_ = lambda: shown(f"KeyboardInterrupt: {report}")  # in Jupyter
        return error

    # Failures.

    def _settle(self, fallen: dict[int, worker.Failure | int | None], cause_known: bool = False):
        """Let the others fail too, so that the report doesn't depend on who was faster.

        fallen: {rank: how, None if it returned} so far; added to. As long as all of them only lost
        a peer, that peer is waited for longer.
        """
        begun, events = time.perf_counter(), None
        while True:
            if any(how is not None and not _lost_peer(how) for how in fallen.values()):
                cause_known = True
            if time.perf_counter() - begun > (SETTLE_S if cause_known else LOST_PEER_S):
                return
            rest = [rank for rank in self.pending if rank.rank not in fallen]
            for rank, (word, said) in processes.listen(rest, 0.02) if rest else ():
                fallen[rank.rank] = said if word in ("exit", "failed") else None
            before, events = events, self.board.events()
            now = hang.situations(self.board)
            still = all(rank.rank in fallen or now[rank.rank].state == "waiting" for rank in rest)
            if events == before and still and (cause_known or not rest):
                return

    def _raise_failure(self, rank: processes.Rank, how: worker.Failure | int):
        """RankError for the rank that failed by itself; a mismatch, if that is the cause."""
        if getattr(how, "kind", "") == NoGpu.__name__ and not how.frames:  # ours, not the reader's
            raise NoGpu(how.message, rank.rank)
        fallen = {rank.rank: how}
        self._settle(fallen)
        self.pending = [rank for rank in self.pending if rank.rank not in fallen]
        if hang.mismatch(self.board):
            self._raise_hang(*hang.explain_mismatch(hang.mismatch(self.board)))
        fallen = {r: how for r, how in sorted(fallen.items()) if how is not None}
        first = min(fallen, key=lambda r: (_lost_peer(fallen[r]), getattr(fallen[r], "at", 0.0)))
        culprit, *alike = (r for r in fallen if r == first or _same(fallen[r], fallen[first]))
        lines = [_how(culprit, fallen[culprit]), *self._exit_line(culprit)]
        lines += self._fault(culprit, fallen[culprit])
        if isinstance(fallen[culprit], worker.Failure):
            lines += _frames(fallen[culprit].frames)
        if alike:
            lines.append(f"{hang.name_ranks(alike).capitalize()} failed in the same way.")
        message = getattr(fallen[culprit], "message", "")
        lines += [means for says, means in MEANS.items() if says in message]
        others = [s for s in hang.situations(self.board) if s.rank not in (culprit, *alike)]
        said = [self._collateral(s, fallen.get(s.rank)) for s in others if s.state != "idle"]
        if said:
            lines += ["The others were ended:", *said]
        printed = self.output[culprit].read().strip().splitlines()[-5:]
        if printed:
            lines += [f"Rank {culprit}'s last output:", *(f"  {line}" for line in printed)]
        self.fail(RankError, "\n".join(lines), rank=culprit)

    def _exit_line(self, rank: int) -> list[str]:
        """Show the line that called os._exit, if that is how a rank left."""
        noted = exits.noted_exit(self.ranks[rank].assignment.path("exit").parent, rank)
        return [f"  {hang.describe_place(noted[1])}"] if noted else []

    def _fault(self, rank: int, how: worker.Failure | int) -> list[str]:
        """Show what a kernel complained of, where compiled code ended the rank for it.

        Each of its threads says so, and hundreds of lines follow.
        """
        lines = self.output[rank].read().splitlines() if how == -signal.SIGABRT else []
        return [f"  {line.strip()}" for line in lines if FAULT.search(line)][:1]

    def _collateral(self, s: hang.Situation, how: worker.Failure | int | None) -> str:
        """Say what became of a rank besides the culprit."""
        if how is not None and not _lost_peer(how):
            where = f"\n  {_frames(how.frames)[-1]}" if getattr(how, "frames", None) else ""
            return f"  R{_how(s.rank, how)[1:]}{where}"
        if s.state == "returned":
            return f"  Rank {s.rank} had returned."
        for record in reversed(self.board.records(s.rank)):
            if record.done is None:
                return f"  Rank {s.rank} was in {record.call}, {hang.describe_place(record.place)}"
        place = self._place(s.rank) if how is None else None
        where = f", {hang.describe_place(place)}" if place else "."
        return f"  Rank {s.rank} was computing{where}"

    def fail(self, kind: type[LaunchError], message: str, **details):
        """Raise a LaunchError with what the ranks have printed and said."""
        wire = [self.board.records(rank.rank) for rank in self.ranks]
        output = self.show_output("the error's .output")
        raise kind(message, output=output, wire=wire, **details) from None

    # Output.

    def show_output(self, kept: str = "") -> list[str]:
        """Print what was not shown yet, in rank order; returns all since the watch began.

        kept: where a reader finds it.
        """
        if self.live:
            self._show_new_lines(last=True)
        else:
            for rank, text in enumerate(self.output):
                where = f", all of them in {kept}[{rank}]" if kept else ""
                _write(label(rank, shorten(text.read(), where)))
        return [text.read() for text in self.output]

    def _show_new_lines(self, last: bool = False):
        new = (text.new_lines(last) for text in self.output)
        _write("".join(label(rank, text) for rank, text in enumerate(new)))


def _write(text: str):
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()


def _connects(rank: processes.Rank) -> bool:
    """Tell whether it is on its way into the world, and done with loading the call."""
    frames = ((file, function) for file, _, function in rank.ask_stack())
    return (worker.__file__, worker.join.__name__) in frames


# Failures in words.


def _how(rank: int, how: worker.Failure | int) -> str:
    """Say how a rank fell: rank 2 raised ValueError: ...; rank 2 was killed by SIGKILL."""
    if isinstance(how, worker.Failure):
        message = "lost its connection to another rank" if _lost_peer(how) else how.message
        return f"rank {rank} raised {how.kind}: {message}".removesuffix(": ")
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
    """The way to the error through the user's own code; of an endless recursion, its two ends."""
    own = [frame for frame in frames if not is_library(frame[0])]
    theirs = [frame for frame in frames if frame[2] not in MODULE_CALLS]
    lines = [f"  {hang.describe_place(frame)}" for frame in own or theirs or frames]
    if len(lines) > MOST_FRAMES:
        half = MOST_FRAMES // 2
        lines[half:-half] = [f"  ... {len(lines) - 2 * half} more lines ..."]
    return lines


def _lost_peer(how: worker.Failure | int) -> bool:
    """Tell whether a rank only fell because another one did: its connection broke."""
    if not isinstance(how, worker.Failure):
        return False
    network = how.kind in ("RuntimeError", "DistBackendError")
    return network and LOST_PEER.search(how.message) is not None


def _same(one, other) -> bool:
    """Tell whether two ranks failed alike, each perhaps naming itself."""
    if not (isinstance(one, worker.Failure) and isinstance(other, worker.Failure)):
        return False
    alike = (one.kind, one.frames) == (other.kind, other.frames)
    return alike and _anonymous(one.message) == _anonymous(other.message)


def _anonymous(message: str) -> str:
    return re.sub(r"\b(rank |dst=|src=)\d+|\b(0x)[\da-f]+", r"\1\2", message)
