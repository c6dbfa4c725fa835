"""Watch ranks from the process that launched them, until each has replied, one fails or some hang.

A watch collects the ranks' replies, which they send once they have run their function or cell, and
their output. When ranks fail or hang it finds out how, and raises an error whose message is the
report. It reads the ranks' progress from the board, a shared file in which each rank writes a
`Record` of each call (collective call, send or receive) before it makes it. A `Look` is the state
of all ranks as the board shows it at one moment.
"""

import math
import sys
import time
from typing import ClassVar

from ..tools.units import count, name_ranks
from . import exits, processes, streams, worker
from .board import MESSAGES, STARTING, Board
from .errors import HangError, LaunchError, NoGpu, RankError, shown
from .falls import Failure, Fall, explain_fall, lost_peer
from .look import INSIDE, ON_STREAM, Look
from .machine import FreeMemory
from .output import Output, label, shorten
from .place import is_installed, is_library, is_pythons
from .report import ends_by_itself, explain_deadlock, explain_mismatch, let_go, report

TICK_S = 0.05  # seconds between two reads of the board while no rank replies
CERTAIN_S = 0.5  # seconds without progress; then a deadlock that the board proves is reported
STANDSTILL_S = 10.0  # seconds without a call; then the status says which ranks wait for which
START_S = 60.0  # for connecting the ranks; NCCL waits without end for one that doesn't answer
SETTLE_S = 0.4  # seconds after a failure, in which the other ranks can report how it hit them
LOST_PEER_S = 2.0  # the same, as long as all failed ranks only lost their connection to another


class Watch:
    """A watch on ranks: it waits for a reply from each, and raises an error if they fail or hang.

    A rank of `launch` replies when it has run the function. A rank of `%%ranks` runs a notebook's
    cells: it replies when it is ready for the first, and after each. Each cell has its own watch.
    ranks: the list of the ranks' processes, each a `processes.Rank`, in the order of the ranks.
    board: the shared file in which every rank writes its calls.
    timeout: seconds after which the wait for replies ends with HangError; None: never.
    hang_after: seconds without any progress that count as a hang if each rank that hasn't replied
        is inside a call.
    live: print the ranks' output as it comes, instead of in rank order at the end.
    fresh: the ranks were started for this watch, so all of their output belongs to it; otherwise
        only what they print from now on.
    pending: the list of those of `ranks` that haven't replied yet.
    replies: {number of a rank: its reply, as `until_all_reply` returns it}.
    """

    watching: ClassVar[list["Watch"]] = []  # all watches that wait for replies now

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
        """Wait for a reply from each of the `awaited` ranks, and return {rank: what it replied}.

        In `%%ranks` the reply to a cell is (value, records): the repr of its last expression, or
        None, and the records of the cell's calls, [] without `--trace`. The reply before the first
        cell is None. In `launch` a reply isn't the function's value, which the rank writes to a
        file, but the names of slow modules that it has imported, to preload for the next launch.
        awaited: the ranks to wait for, whose replies are returned; None: all. The end of another
            rank isn't noticed. After RankError and HangError the ranks aren't ended yet.
        RankError: a rank raised, exited or was killed; NoGpu, a RankError, if it can't use its GPU.
        HangError: ranks can't go on, their calls differ, or the timeout has passed.
        KeyboardInterrupt: on Ctrl-C the ranks are killed; the message says where each was.
        """
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
        """Return a line for a progress display: how many calls the ranks have made so far.

        Calls are collective calls, sends and receives, of all ranks together. If none was made or
        completed for 10 s (`STANDSTILL_S`), it says instead which ranks wait for which.
        """
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
        """Receive replies into `replies`, and look for failures and hangs, until all have replied.

        A rank reports its reply, an exception, or that its call differs from another rank's; the
        end of its process is noticed as well. HangError: ranks hang, make calls that differ, or
        haven't replied after `timeout` seconds. RankError: one has failed, or ended without reply.
        """
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
                look = Look(self.board)
                self.fail(HangError, self._report(headline, advice, look))

    def check_all_live(self):
        """Raise RankError if a rank has ended; called before ranks get another cell to run.

        HangError: raised instead if the board shows that ranks made different calls, as the cause.
        """
        for rank in self.ranks:
            if rank.exit_code is not None:
                self._raise_failure(rank, rank.exit_code)

    def _hear(self, rank: processes.Rank, word: str, said):
        """Handle one message about a rank: a word, and `said`, the data that belongs to it.

        "exit": its process has ended without a reply; `said` is the exit code, which may be 0.
        "failed": it raised an exception, which the `Failure` `said` describes.
        "disagrees": ranks made different calls where all must make the same; `said` is {rank: the
            `Record` of its call}. Raises HangError.
        "done": `said` is the rank's reply; it goes into `replies`, and the rank out of `pending`.
        For "exit" and "failed" this raises HangError if the board shows that ranks' calls differ,
        since that is then the cause; otherwise RankError (NoGpu if CUDA can't use the rank's GPU).
        """
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
        """Raise HangError if ranks can never go on, or are inside calls for too long.

        `_listen` calls this about every 0.5 s while no rank makes progress. A deadlock that the
        board proves raises at once. But if a rank in it waits with a timeout of at most 60 s, which
        may end the deadlock, it raises only after `hang_after` seconds, plus those by which an
        emulated link, a slow network, may delay the open calls. After these seconds this raises
        without a proof as well: if every rank that hasn't ended its work is inside a call, or if
        ranks poll, by `is_completed()` in a loop, a call that seems never to complete.
        quiet_s: the seconds since a rank last made or ended a call.
        events: `board.events()`, for each rank a count of its writes, unchanged in these seconds.
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
        """Raise HangError if all ranks have tried for 30 s to connect, and none has succeeded.

        Before it tries, a rank loads the function and its arguments, which may take any time. Its
        stack shows whether it loads or tries; a rank that a signal or debugger has suspended counts
        as one that tries. This is called again and again. For 30 s it does nothing, as asking for a
        stack interrupts a rank; the error comes after 60 s (`START_S`) at the earliest.
        seconds: the seconds since the start.
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
        """Return whether a rank seems to wait in C++ code, such as DDP's, for a collective call.

        A wait in Python is marked on the board; of one in C++ only the incomplete call shows. On
        the CPU, a rank with an incomplete collective seems to wait if it uses no CPU time. On a
        GPU, where a wait uses CPU time, it seems to wait if the GPU has come to such a call, having
        finished all that was queued before.
        """
        records = self.board.records(rank)
        opened = [r for r in records if r.done is None and r.op not in MESSAGES]
        if any(r.on_stream for r in opened):
            return any(r.reached for r in opened)
        return bool(opened) and self._sleeps(rank)

    def _sleeps(self, rank: int) -> bool:
        """Block for 0.1 s; return whether a rank's process used no CPU; False without /proc."""
        before = processes.cpu_ticks(self.ranks[rank].process.pid)
        time.sleep(0.1)
        after = processes.cpu_ticks(self.ranks[rank].process.pid)
        return before is not None and after == before

    def _other_threads_idle(self, rank: int) -> bool:
        """Return whether all threads of a rank but the main one are idle, to judge by their stacks.

        A thread is idle if its stack has only files of Python's library, as in a thread pool
        without work, or if it is one of ddpkit's own: that in `worker.py` which waits for the
        parent to end, or that in `streams.py` which reads a GPU's events.
        The rank is asked for its stacks by a signal; False if it doesn't answer.
        """
        stacks = self.ranks[rank].ask_stacks()
        if not stacks:  # unknown: the threads may be busy
            return False
        reading = streams.__file__, "_watch"
        for stack in stacks[:-1]:
            is_ours = any(worker.__file__ == f or reading == (f, name) for f, _, name in stack)
            if not is_ours and not all(is_pythons(file) for file, _, _ in stack):
                return False
        return True

    def _emulated_s(self) -> float:
        """Return an upper bound, in seconds, on how long the emulated link may delay open calls.

        An emulated link delays calls as a slow network would. The bound is the sum of the times
        that all open calls of all ranks take on the link, as if one came after another; 0 without a
        link. It is added to `hang_after`, the seconds that count as a hang.
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
        """Raise HangError with a report, after printing the ranks' output.

        headline, advice: the report's first line, which says what happened, and its last, what to
            do.
        look: the state of all ranks; None: as the board shows it now.
        """
        look = look or Look(self.board)
        self.fail(HangError, self._report(headline, advice, look, stuck=True))

    def _report(self, headline: str, advice: str, look: Look, stuck: bool = False) -> str:
        """Return the text of a report: what happened, where ranks are, their last calls, advice.

        If a rank is in no call, and the board doesn't say at which line it is, a signal makes it
        write its stack, even while it is blocked in C++. If that takes over half a second, as for a
        dead rank, the report has no line of code for that rank.
        headline, advice: the first line, which says what happened, and the last, what to do.
        look: the state of all ranks.
        stuck: True if the ranks can't go on: the table of calls marks with ≠ a call that only some
            ranks have made. False: it doesn't, since the other ranks may only be late.
        """
        for s in look.now:
            if s.state in ("computing", "starting"):
                if self.ranks[s.rank].is_stopped:
                    s.state = "stopped by a signal, or by a debugger"
                    continue
                s.place = s.place or self.place(s.rank)
        return report(headline, advice, look, stuck)

    def place(self, rank: int) -> tuple[str, int, str] | None:
        """Return (file, line, function): where a rank's main thread is now in the user's code.

        This sends the rank a signal, and waits half a second at most. The innermost frame of the
        user's code counts; if there is none, that of an installed package other than torch and
        ddpkit. None: there is none either, or the rank doesn't answer.
        """
        stack = self.ranks[rank].ask_stack()
        starter = "<string>", "<module>"  # the line by which Python starts the process of a rank
        stack = [frame for frame in stack if frame[::2] != starter]
        outside_torch = [frame for frame in stack if not is_library(frame[0])]
        own = (frame for frame in outside_torch if not is_installed(frame[0]))
        return next(own, next(iter(outside_torch), None))

    def _interrupted(self) -> KeyboardInterrupt:
        """Kill the ranks after a Ctrl-C; return a KeyboardInterrupt that says where they were.

        The output that isn't shown yet is printed.
        """
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

        As long as all failed ranks only lost their connection to another, the cause is unknown, and
        the wait lasts up to 2 s (`LOST_PEER_S`). Once a rank has failed in another way, the cause
        is known, and the wait lasts 0.4 s (`SETTLE_S`) in all. It ends earlier once two successive
        looks at the board are equal, and each rank has failed or replied or, if the cause is known,
        is waiting in a call.
        fallen: {rank: its `Failure`, which describes an exception, or its exit code}. Ranks that
            report meanwhile are added in place, with None if they haven't failed, but replied or
            found that their call differs from another rank's. Neither makes the cause known.
        cause_known: True if the caller knows the cause already.
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
        """Raise RankError for the rank that failed first, or HangError if ranks' calls differ.

        Calls differ if the board shows, say, an all_reduce of one rank where another made a
        barrier. The report is then about these calls, as they caused the failure.
        rank: the rank whose failure was noticed first, which need not be the one that failed first.
        how: how `rank` failed: a `Failure` if it raised an exception, otherwise its exit code.
        NoGpu: raised instead if `rank` failed because CUDA can't use its GPU. `backends.start_on`
            catches it and, unless NCCL was asked for, starts the ranks again on the CPU.
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
        """Return (code, (file, line, function)) of a rank's call of `os._exit`, as it noted it.

        None: it made no such call, or its note can't be read.
        """
        return exits.noted_exit(self.ranks[rank].assignment.path("exit").parent, rank)

    def printed(self, rank: int) -> str:
        """Return a rank's output so far; of more than 2 MB (`KEPT_BYTES`), its start and end."""
        return self.output[rank].read()

    def shortage(self) -> str:
        """Return a sentence that blames a lack of memory for the SIGKILL of a rank, or "".

        Called once such a death is noticed. There is a sentence if the kernel has killed a process
        of this container for memory since the watch was made, or if less than 10 % of memory was
        free in one of the watch's last 8 samples (about 2 s).
        """
        return self._memory.shortage()

    def fail(self, kind: type[LaunchError], message: str, **details):
        """Raise a LaunchError of class `kind`, after printing the output that isn't shown yet.

        Its attributes have each rank's output and the records of its last 256 calls.
        message: the error's text. details: further arguments of `kind`, such as rank= of RankError.
        """
        wire = [self.board.records(rank.rank) for rank in self.ranks]
        output = self.show_output("the error's .output")
        raise kind(message, output=output, wire=wire, **details) from None

    # Output.

    def show_output(self, kept: str = "") -> list[str]:
        """Print the ranks' output, in rank order; return a list with the whole text of each rank.

        The whole is what it printed since the watch began or, for a `fresh` watch, since it was
        started; a text lacks its middle only beyond 2 MB (`output.KEPT_BYTES`). With `live`, only
        what wasn't printed before is printed. Without it, each call prints the whole; of more than
        200 lines or 100,000 characters of a rank, a note in place of the middle.
        kept: where the user finds the returned list, such as "run.output". The note then refers to
            it: "... 50 more lines, all of them in run.output[2] ...". "" if the list isn't kept.
        """
        if self.live:
            self._show_new_lines(last=True)
        else:
            for rank, text in enumerate(self.output):
                where = f", all of them in {kept}[{rank}]" if kept else ""
                _write(label(rank, shorten(text.read(), where)))
        return [text.read() for text in self.output]

    def _show_new_lines(self, last: bool = False):
        """Print the lines that ranks have completed since this was last called.

        Once 2,000 lines or 100,000 bytes of a rank have been printed in all, a note follows, and
        then nothing more of that rank.
        last: print unfinished lines as well.
        """
        new = (text.new_lines(last) for text in self.output)
        _write("".join(label(rank, text) for rank, text in enumerate(new)))


def _write(text: str):
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()


def _connects(rank: processes.Rank) -> bool:
    """Return whether a rank has loaded its function, and now waits for the others to connect.

    This asks for its stack by a signal, which interrupts it for a moment; False without an answer.
    """
    frames = ((file, function) for file, _, function in rank.ask_stack())
    return (worker.__file__, worker.join_world.__name__) in frames
