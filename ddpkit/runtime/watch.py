"""Watching ranks: what they answer, what they print, how they fail or hang, and how that is told."""

import re
import signal
import sys
import time
from pathlib import Path

from . import hang, processes, worker
from .board import Board, Record
from .errors import HangError, LaunchError, RankError
from .wire import is_library

TICK_S = 0.05  # how often the board is read while nobody speaks
CERTAIN_S = 0.5  # a deadlock that the board proves is reported after it has stood still this long
SETTLE_S = 0.4  # after a failure the other ranks get this long to say how it hit them
LOST_PEER_S = 2.0  # and this long when those that fell all say that somebody else did
MOST_FRAMES = 30
MOST_LINES = 200  # of a rank's output that are shown
GLOO_CHATTER = re.compile(
    r"^(\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. |\[E\d+ .*Gloo connectFullMesh failed with ).*\n?",
    re.MULTILINE,
)


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
            raise self._interrupted() from None
        return self.replies

    def _listen(self):
        begun = quiet_since = looked = time.perf_counter()
        events = None
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
                if now - max(quiet_since, looked) > CERTAIN_S:  # not oftener: the ranks need the cores
                    self._look_for_hang(now - quiet_since)
                    looked = now
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
        self._fail(HangError, self._report(headline, advice, now or self.situations()))

    def _report(self, headline: str, advice: str, now: list[hang.Situation]) -> str:
        for situation in now:
            if situation.state in ("computing", "starting") and situation.place is None:
                situation.place = self._place_of(situation.rank)
        return hang.report(headline, advice, now, self.board)

    def _interrupted(self) -> KeyboardInterrupt:
        """The interrupt, with the reason for somebody's impatience: where the ranks were, and what they had printed."""
        report = self._report("stopped. The ranks were here:", "They were ended.", self.situations())
        self.show_output()
        error = KeyboardInterrupt(report)
        error._render_traceback_ = lambda: f"KeyboardInterrupt: {report}".splitlines()  # what Jupyter shows
        return error

    def _place_of(self, rank: int) -> tuple[str, int, str] | None:
        """The innermost line of the user's own code that a computing rank is at."""
        return next((f for f in self.ranks[rank].ask_stack() if not is_library(f[0])), None)

    # Failures.

    def _settle(self, fallen: dict[int, worker.Failure | int | None]):
        """Give the other ranks a moment to fail too, so that the report doesn't depend on who was faster.

        fallen: {rank: how, None if it returned} so far; added to. As long as all of them only lost a peer, that peer is
        waited for longer.
        """
        begun, events = time.perf_counter(), None
        while True:
            cause_known = any(how is not None and not _is_collateral(how) for how in fallen.values())
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
        self.pending = [rank for rank in self.pending if rank.rank not in fallen]
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
            _write("".join(label(rank, _shortened(text.read(), rank)) for rank, text in enumerate(self.output)))
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


def _shortened(text: str, rank: int) -> str:
    """`text` without its middle, if it is very long."""
    lines, half = text.splitlines(keepends=True), MOST_LINES // 2
    if len(lines) > MOST_LINES:
        lines[half:-half] = [f"... {len(lines) - MOST_LINES} more lines, all of them in run.output[{rank}] ...\n"]
    return "".join(lines)


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
    """The way to the error through the user's own code, a line each; of an endless recursion only its two ends."""
    own = [frame for frame in frames if not is_library(frame[0])]
    lines = [f"  {hang.describe_place(frame)}" for frame in own or frames]
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
    """Whether two ranks failed alike, each perhaps naming itself."""
    if isinstance(one, worker.Failure) and isinstance(other, worker.Failure):
        messages = [re.sub(r"\b(rank |dst=|src=)\d+", r"\1", failure.message) for failure in (one, other)]
        return messages[0] == messages[1] and (one.kind, one.frames) == (other.kind, other.frames)
    return False


def _cpu_ticks(pid: int) -> int | None:
    """User and system time of a process so far, where /proc tells."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[11]) + int(fields[12])
