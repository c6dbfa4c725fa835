"""Watch ranks: collect their replies, find out how they fail or hang, and raise a report."""

import math
import sys
import time
from typing import ClassVar

from ..tools.units import count, name_ranks
from . import exits, processes, worker
from .board import MESSAGES, STARTING, Board
from .errors import HangError, LaunchError, NoGpu, RankError, shown
from .falls import Failure, Fall, explain_fall, lost_peer
from .look import INSIDE, ON_STREAM, Look
from .machine import FreeMemory
from .output import Output, label, shorten
from .place import is_installed, is_library, is_pythons
from .report import ends_by_itself, explain_deadlock, explain_mismatch, let_go, report

TICK_S = 0.05  # between two reads of the board while no rank replies
CERTAIN_S = 0.5  # without progress, after which a deadlock that the board proves is reported
STANDSTILL_S = 10.0  # without a call, after which the status tells which ranks wait for which
START_S = 60.0  # for connecting the ranks; NCCL waits without end for one that doesn't answer
SETTLE_S = 0.4  # after a failure, in which the other ranks can report how it hit them
LOST_PEER_S = 2.0  # the same, as long as all that fell say that another rank did


class Watch:
    """A watch on ranks until each has replied; RankError or HangError if one fails or all hang.

    timeout, hang_after, live: as in `launch`. fresh: the ranks were started for this watch, so all
    of their output belongs to it.
    """

    watching: ClassVar[list["Watch"]] = []  # the watches that wait for replies now

    def __init__(self, ranks, board: Board, timeout=None, hang_after=15.0, live=False, fresh=False):
        self.ranks = ranks
        self.board = board
        self.live = live
        self.timeout = timeout
        self.hang_after = hang_after
        self.replies: dict[int, object] = {}
        self.pending: list[processes.Rank] = []
        self.quiet_since = time.perf_counter()  # the moment when a rank last made or ended a call
        self.connecting_since = math.inf  # seconds from the start until all ranks were connecting
        self._memory = FreeMemory()
        self.output = [Output(rank.assignment.path("output"), fresh) for rank in ranks]

    def until_all_reply(self, awaited: list[int] | None = None) -> dict[int, object]:
        """Wait for a reply from each of the `awaited` ranks (None: all); return {rank: reply}."""
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
        """Say in a line how the ranks get on: their calls so far, or which waits for which."""
        quiet_s = time.perf_counter() - self.quiet_since
        if quiet_s < STANDSTILL_S:
            calls = sum(map(self.board.calls, range(len(self.ranks))))
            return f"{count(len(self.ranks), 'rank')}, {count(calls, 'call')} so far"
        said = [f"no call for {quiet_s:.0f} s"]
        for s in Look(self.board).now:
            if s.missing:
                said.append(f"rank {s.rank} waits for {name_ranks(s.missing)} in {s.call.op}")
        return ", ".join(said)

    def _listen(self):
        begun = time.perf_counter()
        self.quiet_since = looked = begun
        events = None
        while self.pending:
            for rank, (word, said) in processes.listen(self.pending, TICK_S):
                self._hear(rank, word, said)
            if self.live:
                self._show_new_lines()
            for text in self.output:
                text.trim()
            self._memory.look()
            now = time.perf_counter()
            before, events = events, self.board.events()
            if events != before:
                self.quiet_since = now
            if not self.pending:
                return
            if now - max(self.quiet_since, looked) > CERTAIN_S:  # seldom: the ranks need the cores
                self._look_for_hang(now - self.quiet_since, events)
                self._look_at_start(now - begun)
                looked = now
            if self.timeout is not None and now - begun > self.timeout:
                headline = f"no result after {self.timeout:g} s."
                advice = "Above is where every rank was: a loop without end, or a short timeout?"
                self.fail(HangError, self._report(headline, advice, Look(self.board)))

    def check_all_live(self):
        """Raise RankError if a rank has died since the last reply, before it gets more work."""
        for rank in self.ranks:
            if rank.exit_code is not None:
                self._raise_failure(rank, rank.exit_code)

    def _hear(self, rank: processes.Rank, word: str, said):
        if word in ("exit", "failed"):
            self._raise_failure(rank, said)
        elif word == "disagrees":
            self._settle({rank.rank: None}, cause_known=True)
            look = Look(self.board)
            self._raise_hang(*explain_mismatch(look.mismatch() or said), look)
        else:
            self.replies[rank.rank] = said
            self.pending.remove(rank)

    # Hangs.

    def _look_for_hang(self, quiet_s: float, events: list[int]):
        """Raise HangError if ranks can never go on; called now and then while nothing moves.

        quiet_s: for how long. events: the board's, the same all that time.
        """
        overdue = quiet_s > self.hang_after + self._emulated_s()
        look = Look(self.board, events, standstill=overdue)
        look.show_abandoned(self._sleeps)
        for s in look.now:
            if s.has_free_thread and not look.gone(s):
                s.has_free_thread = not (overdue or self._other_threads_idle(s.rank))
        stuck = look.deadlocked()
        if not stuck and overdue:
            stuck = look.polled_in_vain()
        if not look.is_still():  # the ranks went on while the board was read
            return
        if stuck and (overdue or not ends_by_itself(look, stuck)):
            self._raise_hang(*explain_deadlock(look, stuck), look)
        if not overdue:
            return
        alive = [s for s in look.now if s.state not in ("returned", "idle", ON_STREAM)]
        if alive and all(s.state in INSIDE or self._waits_unseen(s.rank) for s in alive):
            more = "A larger hang_after gives it more time."
            self._raise_hang(
                f"no progress for {self.hang_after:g} s, and every rank is inside a call.",
                let_go(look) or f"All ranks came to the call, yet it doesn't finish. {more}",
            )

    def _look_at_start(self, seconds: float):
        """Raise HangError if the ranks can't connect: `START_S` after the start, none has begun.

        For the last half of that time all must have been connecting, since loading the call may
        take any time. seconds: since the start.
        """
        starting = all(self.board.state(rank.rank) == STARTING for rank in self.ranks)
        if not starting or seconds < START_S / 2:  # asking for its stack interrupts a rank
            return
        stopped = [rank.rank for rank in self.ranks if rank.is_stopped]
        if not all(rank.rank in stopped or _connects(rank) for rank in self.ranks):
            self.connecting_since = math.inf
            return
        self.connecting_since = min(self.connecting_since, seconds)
        if seconds - self.connecting_since < START_S / 2:
            return
        whom = f"what holds {name_ranks(stopped)}" if stopped else "which of them, and why"
        advice = f"Somebody doesn't answer: {whom}?"
        if self.ranks[0].assignment.choice.gpus:
            advice += " Set NCCL_DEBUG=INFO in os.environ, and NCCL says what it waits for."
        self._raise_hang(f"no start: after {seconds:.0f} s the ranks are still connecting.", advice)

    def _waits_unseen(self, rank: int) -> bool:
        """Tell whether a rank seems to wait in C++, which leaves no mark on the board.

        It does if it has an open collective and uses no CPU. A rank that waits for its GPU does use
        CPU: there, if the GPU has come to the call; before that, it still computes.
        """
        records = self.board.records(rank)
        opened = [r for r in records if r.done is None and r.op not in MESSAGES]
        if any(r.on_stream for r in opened):
            return any(r.reached for r in opened)
        return bool(opened) and self._sleeps(rank)

    def _sleeps(self, rank: int) -> bool:
        """Tell whether the rank's process uses no CPU for 0.1 s."""
        before = processes.cpu_ticks(self.ranks[rank].process.pid)
        time.sleep(0.1)
        after = processes.cpu_ticks(self.ranks[rank].process.pid)
        return before is not None and after == before

    def _other_threads_idle(self, rank: int) -> bool:
        """Tell whether every thread of a rank but the main one waits for work, as in a pool."""
        stacks = self.ranks[rank].ask_stacks()
        if not stacks:  # unknown: the threads may be busy
            return False
        for stack in stacks[:-1]:
            files = [file for file, _, _ in stack]
            if worker.__file__ not in files and not all(map(is_pythons, files)):
                return False
        return True

    def _emulated_s(self) -> float:
        """Add up the seconds for which the emulated link may still delay the open calls.

        For that long, standing still is no hang.
        """
        link = self.ranks[0].assignment.link
        if link is None:
            return 0.0
        seconds = 0.0
        for rank in self.ranks:
            for record in self.board.records(rank.rank):
                if record.done is None:
                    seconds += link.seconds(record.op, record.whole_bytes, len(record.ranks))
        return seconds

    def _raise_hang(self, headline: str, advice: str, look: Look | None = None):
        look = look or Look(self.board)
        self.fail(HangError, self._report(headline, advice, look, stuck=True))

    def _report(self, headline: str, advice: str, look: Look, stuck: bool = False) -> str:
        """Write the report, after asking the ranks that compute for the lines where they are.

        stuck: as for `report.report`.
        """
        for s in look.now:
            if s.state in ("computing", "starting"):
                s.place = s.place or self.place(s.rank)
        return report(headline, advice, look, stuck)

    def place(self, rank: int) -> tuple[str, int, str] | None:
        """Ask a rank for its main thread's line in the user's own code: (file, line, function)."""
        stack = self.ranks[rank].ask_stack()
        outside_torch = [frame for frame in stack if not is_library(frame[0])]
        own = (frame for frame in outside_torch if not is_installed(frame[0]))
        return next(own, next(iter(outside_torch), None))

    def _interrupted(self) -> KeyboardInterrupt:
        """End the ranks after a Ctrl-C; return the KeyboardInterrupt that says where they were."""
        headline = "stopped. The ranks were here:"
        text = self._report(headline, "They were ended.", Look(self.board))
        for rank in self.ranks:  # before their output is read: one may print without end
            rank.end()
        self.show_output()
        error = KeyboardInterrupt(text)
        error._render_traceback_ = lambda: shown(f"KeyboardInterrupt: {text}")  # in Jupyter
        return error

    # Failures.

    def _settle(self, fallen: dict[int, Fall | None], cause_known: bool = False):
        """Wait for other failures after the first one, so that the report doesn't depend on timing.

        fallen: {rank: how it failed, None if it returned}; those that follow are put into it. While
        all of them only lost a connection it waits longer, for the rank at the other end to report.
        """
        begun = time.perf_counter()
        events = None
        while True:
            if any(how is not None and not lost_peer(how) for how in fallen.values()):
                cause_known = True
            if time.perf_counter() - begun > (SETTLE_S if cause_known else LOST_PEER_S):
                return
            rest = [rank for rank in self.pending if rank.rank not in fallen]
            for rank, (word, said) in processes.listen(rest, 0.02) if rest else ():
                fallen[rank.rank] = said if word in ("exit", "failed") else None
            before, events = events, self.board.events()
            now = Look(self.board).now
            still = all(rank.rank in fallen or now[rank.rank].state == "waiting" for rank in rest)
            if events == before and still and (cause_known or not rest):
                return

    def _raise_failure(self, rank: processes.Rank, how: Fall):
        """Raise RankError for the rank that failed first, or HangError if a mismatch is the cause.

        rank, how: the failure that was noticed first, which need not be the first.
        """
        is_failure = isinstance(how, Failure)
        if is_failure and how.kind == NoGpu.__name__ and not how.frames:  # ours, not the user's
            raise NoGpu(how.message, rank.rank)
        fallen = {rank.rank: how}
        self._settle(fallen)
        self.pending = [rank for rank in self.pending if rank.rank not in fallen]
        look = Look(self.board)
        different = look.mismatch()
        if different:
            self._raise_hang(*explain_mismatch(different), look)
        fallen = {r: how for r, how in sorted(fallen.items()) if how is not None}
        culprit, text = explain_fall(fallen, look, self)
        self.fail(RankError, text, rank=culprit)

    # The witness of `explain_fall`.

    def noted_exit(self, rank: int) -> tuple[int, tuple] | None:
        return exits.noted_exit(self.ranks[rank].assignment.path("exit").parent, rank)

    def printed(self, rank: int) -> str:
        return self.output[rank].read()

    def shortage(self) -> str:
        return self._memory.shortage()

    def fail(self, kind: type[LaunchError], message: str, **details):
        """Raise a LaunchError of this kind, with the ranks' output and records in it."""
        wire = [self.board.records(rank.rank) for rank in self.ranks]
        output = self.show_output("the error's .output")
        raise kind(message, output=output, wire=wire, **details) from None

    # Output.

    def show_output(self, kept: str = "") -> list[str]:
        """Print the output not shown yet, in rank order; return all output since the watch began.

        kept: the name, e.g. "run.output", under which the user finds all of the output.
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
    """Tell whether a rank has loaded its call and is now connecting with the others."""
    frames = ((file, function) for file, _, function in rank.ask_stack())
    return (worker.__file__, worker.join_world.__name__) in frames
