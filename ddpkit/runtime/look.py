"""Read the board at one moment: where each rank is, whom it waits for, who can never go on."""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from .board import DISAGREES, IDLE, MESSAGES, RETURNED, STARTING, Board, Record, unfitting

ENDED = {RETURNED: "returned", IDLE: "idle", STARTING: "starting"}
INSIDE = "waiting", "polling"  # states of a rank that is inside a call
ON_STREAM = "its stream waiting"  # of a GPU, while the program may go on
FREE = "starting", "computing", "polling", ON_STREAM  # states of a rank that may still come
POLLS_S = 1.0  # a rank that last polled a call longer ago than this has moved on


@dataclass
class Situation:
    """The state of one rank at the moment of a `Look`: where it is, for which ranks it waits."""

    rank: int
    state: str  # starting, computing, polling, waiting, its stream waiting, returned, idle
    call: Record | None = None  # the call it sits in, or the last it made
    missing: tuple[int, ...] = ()  # the ranks that have not come to that call
    place: tuple | None = None  # file, line, function and perhaps via, where known
    lost: Record | None = None  # the other side of its message, whose handle was deleted
    more: list["Situation"] = field(default_factory=list)  # what its other threads wait for
    has_free_thread: bool = False  # a thread that has made calls, and waits in none
    destroyed: dict[str, tuple] = field(default_factory=dict)  # {name of a group: where}


class Look:
    """The board at one moment: each rank's last calls, and `now`, the situation of every rank.

    events: `board.events()` at the time when progress stopped; None: now. standstill: nothing has
    moved for a long time, so the most cautious reading is dropped. Then a rank whose GPU waits
    counts as waiting, and the calls of a group on a GPU as carried out one by one: a rank hasn't
    come to a call while another one is queued before it. That is no proof, since NCCL's buffers may
    let a short message overtake.
    """

    def __init__(self, board: Board, events: list[int] | None = None, standstill: bool = False):
        self.board = board
        self._events = board.events() if events is None else events
        self._standstill = standstill
        self.ranks = range(board.world_size)
        self.records = [board.records(rank) for rank in self.ranks]
        self._reached = [dict(map(_channel_and_seq, records)) for records in self.records]
        self.now = [self._situation(rank) for rank in self.ranks]
        self._put_hopeless_waits_first()

    def is_still(self) -> bool:
        """Tell whether no rank has written to the board since this look began."""
        return self.board.events() == self._events

    # Where each rank is.

    def _situation(self, rank: int) -> Situation:
        state = self.board.state(rank)
        if state == DISAGREES:
            last = self.records[rank][-1]
            return Situation(rank, "waiting", last, (), last.place)
        if state in ENDED:
            return Situation(rank, ENDED[state])
        waits = list(self._waits(rank))
        if waits:
            first, *first.more = waits
            first.has_free_thread = self.board.threads(rank) > len(waits)
            return first
        on_stream = self._wait_on_stream(rank)
        if on_stream is not None:
            return on_stream
        call = self._polled(rank)
        if call is not None:
            return Situation(rank, "polling", call, self.missing(call, rank), call.place)
        return Situation(rank, "computing", place=self.board.place(rank))

    def _waits(self, rank: int) -> Iterator[Situation]:
        """Yield a `Situation` for each thread of `rank` that waits in a call."""
        for index in self.board.waiting(rank):
            call = self.board.record(rank, index)
            if call is None or call.done is not None:
                continue
            call = self._in_front(call, rank)
            lost = self._lost(call)
            awaited = (call.peer,) if lost else self._awaited(call, rank)
            yield Situation(rank, "waiting", call, awaited, call.place, lost)

    def _wait_on_stream(self, rank: int) -> Situation | None:
        """Return the situation of a rank whose GPU waits for a call while its program goes on.

        None: its GPU waits for nothing.
        """
        held = [record for record in self.records[rank] if record.on_stream and record.waited]
        if not held:
            return None
        last_in_line = {group_of(record): record for record in held}.values()
        in_front = (self._in_front(record, rank) for record in last_in_line)
        call = next((record for record in in_front if self._awaited(record, rank)), held[0])
        state = "waiting" if self._standstill else ON_STREAM
        return Situation(rank, state, call, self._awaited(call, rank), call.place)

    def _polled(self, rank: int) -> Record | None:
        """Return the open call that `rank` polls, again and again, by `is_completed()`, or None."""
        polled = self.board.polled(rank)
        if polled is None or not 0 <= time.perf_counter() - polled[1] < POLLS_S:
            return None
        call = self.board.record(rank, polled[0])
        return call if call is not None and call.done is None else None

    def _put_hopeless_waits_first(self) -> None:
        """Choose which thread's wait stands for a rank in `now`: one that can never end, if any.

        The others stay in its `more`.
        """
        for s in self.now:
            s.destroyed = self.board.destroyed(s.rank)
        for s in list(self.now):
            waits = [s, *s.more]
            hopeless = next((wait for wait in waits if self.gone(wait)), s)
            if hopeless is not s:
                hopeless.more = [wait for wait in waits if wait is not hopeless]
                hopeless.destroyed = s.destroyed
                hopeless.has_free_thread = s.has_free_thread
                self.now[s.rank] = hopeless

    # Ranks that are missing from a call.

    def missing(self, call: Record, rank: int) -> tuple[int, ...]:
        """Return the other members of the group that haven't come to `call` yet; `rank` made it."""
        others = (other for other in call.ranks if other != rank)
        return tuple(r for r in others if self._reached[r].get(call.channel, -1) < call.seq)

    def _awaited(self, call: Record, rank: int) -> tuple[int, ...]:
        """Return the members that `call` of `rank` waits for.

        At a standstill these are also the members in whose queue it stands behind another call.
        """
        missing = self.missing(call, rank)
        if not self._standstill:
            return missing
        others = (other for other in call.ranks if other != rank)
        return tuple(r for r in others if r in missing or self._is_behind(call, r))

    def _in_front(self, call: Record, rank: int) -> Record:
        """Return the call that holds up `call` of `rank`: itself, or one before it on the GPU."""
        line = [record for record in self._line(call, rank) if record.issued <= call.issued]
        if self._standstill and line:
            line = _front(line)
            call = line[0]
        return next((record for record in line if self._awaited(record, rank)), call)

    def _line(self, call: Record, rank: int) -> list[Record]:
        """Return the open GPU calls of `rank` in the group of `call`, as queued."""
        open_calls = (record for record in self.records[rank] if record.on_stream)
        return [record for record in open_calls if group_of(record) == group_of(call)]

    def _is_behind(self, call: Record, rank: int) -> bool:
        """Tell whether `call` is queued on the GPU of `rank` behind one that isn't complete."""
        line = self._line(call, rank)
        behind = line[len(_front(line)) :]
        return _channel_and_seq(call) in map(_channel_and_seq, behind)

    def _lost(self, call: Record) -> Record | None:
        """Return the other side's record of a message if its handle was deleted before a wait.

        Such a message may never be delivered. None: the handle is there, or `call` is no message.
        """
        if call.op not in MESSAGES or call.peer is None:
            return None
        for record in self.records[call.peer]:
            if (record.channel, record.seq) == (call.channel, call.seq) and record.dropped:
                return record
        return None

    # Ranks that can never go on.

    def gone(self, s: Situation) -> list[int]:
        """Return the ranks that `s` waits for though they will never make the call.

        They have returned, ended the cell or destroyed the group. A receive from any rank can be
        answered by any: there the result is [] until this holds for all.
        """
        if s.call is None:
            return []
        never = [rank for rank in s.missing if self._is_gone(rank, s.call)]
        if s.call.channel.endswith("?") and len(never) < len(s.missing):
            return []
        return never

    def _is_gone(self, rank: int, call: Record) -> bool:
        s = self.now[rank]
        return s.state in ("returned", "idle") or group_of(call) in s.destroyed

    def deadlocked(self, states: tuple[str, ...] = ("waiting",)) -> list[int]:
        """Return the ranks that can never go on, since they wait for gone ranks or for each other.

        states: a rank in one of these counts as waiting. A rank that computes may still come, also
        while its GPU waits; so may a thread that isn't in a call. A call to which all ranks have
        come will end. A rank doesn't come to a group that it has destroyed.
        """
        on_stream = [s for s in self.now if s.state == ON_STREAM]
        waiting = [s for s in self.now if s.state in states]
        free = {s.rank for s in self.now if s.state in set(FREE).difference(states)}
        free |= {s.rank for s in waiting if s.has_free_thread}
        for _ in waiting:  # each round frees at least one rank, or none will be freed any more
            for s in waiting:
                if any(self._may_go_on(wait, free) for wait in (s, *s.more)):
                    free.add(s.rank)
        stuck = [s.rank for s in waiting if s.rank not in free or self.gone(s)]
        return sorted(stuck + [s.rank for s in on_stream if not self._may_go_on(s, free)])

    def _may_go_on(self, s: Situation, free: set[int]) -> bool:
        if self.gone(s):
            return False
        if s.call.channel.endswith("?"):  # from any rank: one that comes is enough
            return not s.missing or not free.isdisjoint(s.missing)
        return free.issuperset(s.missing)

    def polled_in_vain(self) -> list[int]:
        """Return the ranks that can never go on if those that poll are taken for waiting ones.

        It isn't certain: a loop of polling may have an end of its own. []: no rank polls.
        """
        if all(s.state != "polling" for s in self.now):
            return []
        return self.deadlocked(INSIDE)

    # Waits that leave no mark.

    def unseen(self) -> Iterator[Situation]:
        """Yield the collectives in which ranks may be waiting though they seem to compute.

        When a call's future was taken, as DistributedDataParallel does, C++ may wait for it, which
        leaves no mark on the board. So each is an open call whose future was taken, and to which
        members of its group haven't come.
        """
        for s in self.now:
            for call in self.records[s.rank] if s.state == "computing" else ():
                if call.op in MESSAGES or call.done is not None or not call.by_future:
                    continue
                if missing := self.missing(call, s.rank):
                    destroyed = {"destroyed": s.destroyed}
                    yield Situation(s.rank, "waiting", call, missing, call.place, **destroyed)

    def abandoned(self) -> list[Situation]:
        """Return, of each rank, the first `unseen` wait for a member that will never come."""
        found = {s.rank: s for s in reversed([*self.unseen()]) if self.gone(s)}
        return [found[rank] for rank in sorted(found)]

    def show_abandoned(self, sleeps: Callable[[int], bool]) -> None:
        """Change `now`: a rank that sleeps with an abandoned call open counts as waiting in it.

        sleeps(rank): whether its process uses no CPU.
        """
        for hidden in self.abandoned():
            if hidden.call.on_stream or sleeps(hidden.rank):
                self.now[hidden.rank] = hidden

    # Whether the ranks agree.

    def mismatch(self) -> dict[int, Record] | None:
        """Return the first call in which ranks differ, as {rank: its record}, or None."""
        said: dict[tuple[str, int], dict[int, Record]] = {}
        for rank in self.ranks:
            for record in self.records[rank]:
                if record.fingerprint:
                    said.setdefault(_channel_and_seq(record), {})[rank] = record
        different = []
        for by_rank in said.values():
            alike = len({record.fingerprint for record in by_rank.values()}) == 1
            if not alike or unfitting(by_rank):
                different.append(by_rank)
        return min(different, key=_first_issue, default=None)

    def in_step(self) -> bool:
        """Tell whether all ranks are idle and have made the same calls, so that they can go on."""
        if any(s.state != "idle" for s in self.now):
            return False
        return not any(self.missing(r, rank) for rank in self.ranks for r in self.records[rank])


def group_of(call: Record) -> str:
    """Return the name of a call's group: the first word of its channel."""
    return call.channel.partition(" ")[0]


def _front(line: list[Record]) -> list[Record]:
    """Return the calls at the head of a GPU's queue: the first, with the rest of its batch."""
    rest = itertools.takewhile(lambda record: record.batched, line[1:])
    return [*line[:1], *rest]


def _channel_and_seq(record: Record) -> tuple[str, int]:
    return record.channel, record.seq


def _first_issue(by_rank: dict[int, Record]) -> float:
    return min(record.issued for record in by_rank.values())
