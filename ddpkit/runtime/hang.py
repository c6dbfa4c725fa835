"""Explain why nothing moves: read the board, find who waits for whom, put it into words."""

import itertools
import linecache
import os
import re
import site
import sysconfig
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ..tools.units import COLUMNS, name_ranks
from .board import DISAGREES, IDLE, MESSAGES, RETURNED, STARTING, Board, Record, unfitting

LAST_CALLS = 5
OTHER_CALLS = 2  # besides those of the group that disagrees
MANY_RANKS = 3  # more are named by those that are left out, if these are few
MANY_CALLS = 1000
ENDED = {RETURNED: "returned", IDLE: "idle", STARTING: "starting"}
PATIENCE_S = 60.0  # a timeout of the script's own that is shorter is waited for
POLLS_S = 1.0  # a rank that asked whether a call is complete so long ago does something else now
COUNT_THEM = (
    "Every send needs a recv on the other rank, and every recv a send. Count them on both sides."
)
ON_STREAM = "its stream waiting"  # of a GPU, while the program may go on


@dataclass
class Situation:
    """The place and the wait of one rank."""

    rank: int
    state: str  # starting, computing, polling, waiting, its stream waiting, returned, idle
    call: Record | None = None  # the call it sits in, or the last it made
    missing: tuple[int, ...] = ()  # the ranks that have not come to that call
    place: tuple | None = None  # file, line, function and perhaps via, where known
    lost: Record | None = None  # the other side of its message, whose handle was let go
    more: list["Situation"] = field(default_factory=list)  # what its other threads wait for
    has_free_thread: bool = False  # one that has made calls, and waits in none
    destroyed: dict[str, tuple] = field(default_factory=dict)  # {a group's name: where}


class _Calls:
    """The last calls of all ranks, read from the board once.

    in_line: a group's calls on a GPU go one after the other, so that a rank hasn't come to a call
    as long as it has another in front. NCCL's buffers may take a short message out of the line:
    then this is no proof.
    """

    def __init__(self, board: Board, in_line: bool = False):
        self._in_line = in_line
        self.ranks = range(board.world_size)
        self.records = [board.records(rank) for rank in self.ranks]
        self._reached = [dict(map(_channel_and_seq, records)) for records in self.records]

    def missing(self, call: Record, rank: int) -> tuple[int, ...]:
        """The members of `call`, which `rank` made, that have not come to it."""
        others = (other for other in call.ranks if other != rank)
        return tuple(r for r in others if self._reached[r].get(call.channel, -1) < call.seq)

    def awaited(self, call: Record, rank: int) -> tuple[int, ...]:
        """The members that `call`, which `rank` made, waits for."""
        missing = self.missing(call, rank)
        if not self._in_line:
            return missing
        others = (other for other in call.ranks if other != rank)
        return tuple(r for r in others if r in missing or self._is_behind(call, r))

    def in_front(self, call: Record, rank: int) -> Record:
        """Return what holds up `call` of `rank`: itself, or one before it in its line."""
        line = [record for record in self._line(call, rank) if record.issued <= call.issued]
        if self._in_line and line:
            line = _front(line)
            call = line[0]
        return next((record for record in line if self.awaited(record, rank)), call)

    def _line(self, call: Record, rank: int) -> list[Record]:
        """Return the open calls of `rank` in the group of `call`, if they are on a GPU."""
        open_calls = (record for record in self.records[rank] if record.on_stream)
        return [record for record in open_calls if group_of(record) == group_of(call)]

    def _is_behind(self, call: Record, rank: int) -> bool:
        """Tell whether `rank` has made `call`, but behind one that isn't over."""
        line = self._line(call, rank)
        behind = line[len(_front(line)) :]
        return _channel_and_seq(call) in map(_channel_and_seq, behind)

    def lost(self, call: Record) -> Record | None:
        """The other side of a message, if nobody waited for its handle: it may never complete."""
        if call.op not in MESSAGES or call.peer is None:
            return None
        for record in self.records[call.peer]:
            if (record.channel, record.seq) == (call.channel, call.seq) and record.dropped:
                return record
        return None


def _front(line: list[Record]) -> list[Record]:
    """Return the calls that can run now: the first, and if that is part of a batch all of it."""
    rest = itertools.takewhile(lambda record: record.batched, line[1:])
    return [*line[:1], *rest]


def _channel_and_seq(record: Record) -> tuple[str, int]:
    return record.channel, record.seq


def situations(board: Board, in_line: bool = False) -> list[Situation]:
    """Tell where every rank is now, and for which ranks it waits. in_line: as for `_Calls`."""
    calls = _Calls(board, in_line)
    now = [_situation(board, calls, rank) for rank in calls.ranks]
    for s in now:
        s.destroyed = board.destroyed(s.rank)
    for s in now:  # of several threads' waits, one that never ends says most
        hopeless = next((each for each in (s, *s.more) if gone(each, now)), s)
        if hopeless is not s:
            others = [each for each in (s, *s.more) if each is not hopeless]
            hopeless.more, hopeless.destroyed = others, s.destroyed
            hopeless.has_free_thread = s.has_free_thread
            now[s.rank] = hopeless
    return now


def at_standstill(board: Board) -> list[Situation]:
    """Return where every rank is once nothing has moved for long: programs wait for the GPU."""
    now = situations(board, in_line=True)
    for s in now:
        if s.state == ON_STREAM:
            s.state = "waiting"
    return now


def _situation(board: Board, calls: _Calls, rank: int) -> Situation:
    state = board.state(rank)
    if state == DISAGREES:
        last = calls.records[rank][-1]
        return Situation(rank, "waiting", last, (), last.place)
    if state in ENDED:
        return Situation(rank, ENDED[state])
    sits_in = [board.record(rank, index) for index in board.waiting(rank)]
    waits = [_wait(calls, rank, call) for call in sits_in if call is not None and call.done is None]
    if waits:
        first, *first.more = waits
        first.has_free_thread = board.threads(rank) > len(waits)
        return first
    held = [r for r in calls.records[rank] if r.on_stream and r.waited]
    if held:
        last_in_line = {group_of(r): r for r in held}.values()
        in_front = (calls.in_front(r, rank) for r in last_in_line)
        call = next((r for r in in_front if calls.awaited(r, rank)), held[0])
        return Situation(rank, ON_STREAM, call, calls.awaited(call, rank), call.place)
    if (call := _polled(board, rank)) is not None:
        return Situation(rank, "polling", call, calls.missing(call, rank), call.place)
    return Situation(rank, "computing", place=board.place(rank))


def _wait(calls: _Calls, rank: int, call: Record) -> Situation:
    call = calls.in_front(call, rank)
    lost = calls.lost(call)
    awaited = (call.peer,) if lost else calls.awaited(call, rank)
    return Situation(rank, "waiting", call, awaited, call.place, lost)


def _polled(board: Board, rank: int) -> Record | None:
    """Return the call that `rank` asks about again and again: it waits by `is_completed()`."""
    polled = board.polled(rank)
    if polled is None or not 0 <= time.perf_counter() - polled[1] < POLLS_S:
        return None
    call = board.record(rank, polled[0])
    return call if call is not None and call.done is None else None


def gone(s: Situation, now: list[Situation]) -> list[int]:
    """Return the ranks that `s` waits for and that will never come.

    They have returned, or destroyed the group; of a receive from any rank: all of them have.
    """
    if s.call is None:
        return []
    never = [rank for rank in s.missing if _is_gone(now[rank], s.call)]
    if s.call.channel.endswith("?") and len(never) < len(s.missing):
        return []
    return never


def _is_gone(s: Situation, call: Record) -> bool:
    return s.state in ("returned", "idle") or group_of(call) in s.destroyed


def group_of(call: Record) -> str:
    """Return the name of a call's group: its channel's first word."""
    return call.channel.partition(" ")[0]


def deadlocked(now: list[Situation]) -> list[int]:
    """Return the ranks that can never go on: they wait, in the end, only for ranks that won't come.

    A rank that computes may still come, also while its stream waits; so may a second thread. A call
    whose ranks have all come goes on. Nobody comes to a group that it has destroyed.
    """
    on_stream = [s for s in now if s.state == ON_STREAM]
    waiting = [s for s in now if s.state == "waiting"]
    free = {s.rank for s in now if s.state in ("computing", "starting", "polling", ON_STREAM)}
    free |= {s.rank for s in waiting if s.has_free_thread}
    for _ in waiting:  # each round frees those that wait for free ones; there are at most so many
        for s in waiting:
            if any(_may_go_on(each, free, now) for each in (s, *s.more)):
                free.add(s.rank)
    stuck = [s.rank for s in waiting if s.rank not in free or gone(s, now)]
    return sorted(stuck + [s.rank for s in on_stream if not _may_go_on(s, free, now)])


def _may_go_on(s: Situation, free: set[int], now: list[Situation]) -> bool:
    if gone(s, now):
        return False
    if s.call.channel.endswith("?"):  # from any rank: one that comes is enough
        return not s.missing or not free.isdisjoint(s.missing)
    return free.issuperset(s.missing)


def polled_in_vain(now: list[Situation]) -> list[int]:
    """Return the ranks that ask in vain, again and again, whether a call is complete.

    They may go on all the same: such a loop may have an end of its own.
    """
    if all(s.state != "polling" for s in now):
        return []
    waiting = [replace(s, state="waiting") if s.state == "polling" else s for s in now]
    return deadlocked(waiting)


def unseen(now: list[Situation], board: Board) -> Iterator[Situation]:
    """Yield the open collectives that other members have not joined, of ranks that mark no wait.

    A rank may wait for one unseen, if its future was taken: DistributedDataParallel takes it, and
    waits in C++, where no mark is left.
    """
    calls = _Calls(board)
    for s in now:
        for call in calls.records[s.rank] if s.state == "computing" else ():
            if call.op in MESSAGES or call.done is not None or not call.by_future:
                continue
            if missing := calls.missing(call, s.rank):
                yield Situation(s.rank, "waiting", call, missing, call.place)


def abandoned(now: list[Situation], board: Board) -> list[Situation]:
    """Return, of each rank, the first of these calls that another member will never join."""
    found = {s.rank: s for s in reversed([*unseen(now, board)]) if gone(s, now)}
    return [found[rank] for rank in sorted(found)]


def mismatch(board: Board) -> dict[int, Record] | None:
    """The first place where ranks said different things: {rank: what it said}, or None."""
    said: dict[tuple[str, int], dict[int, Record]] = {}
    for rank in range(board.world_size):
        for record in board.records(rank):
            if record.fingerprint:
                said.setdefault((record.channel, record.seq), {})[rank] = record
    different = []
    for by_rank in said.values():
        alike = len({record.fingerprint for record in by_rank.values()}) == 1
        if not alike or unfitting(by_rank):
            different.append(by_rank)
    return min(different, key=lambda each: min(r.issued for r in each.values()), default=None)


def in_step(board: Board) -> bool:
    """Tell whether all ranks are idle and have made the same calls, so that they can go on."""
    calls = _Calls(board)
    if any(board.state(rank) != IDLE for rank in calls.ranks):
        return False
    return not any(calls.missing(r, rank) for rank in calls.ranks for r in calls.records[rank])


# In words.


def explain_mismatch(by_rank: dict[int, Record]) -> tuple[str, str]:
    """Return (what happened, what to do) for ranks that said different things."""
    if pairs := unfitting(by_rank):
        return _explain_splits(by_rank, pairs)
    groups: dict[str, list[int]] = {}
    for rank, record in sorted(by_rank.items()):
        groups.setdefault(record.call, []).append(rank)
    members = next(iter(by_rank.values())).ranks
    world_size = len(members) if members == tuple(range(len(members))) else 0
    sides = [f"{name_some(ranks, world_size)} called {call}" for call, ranks in groups.items()]
    said = f"mismatch: {', '.join(sides[:-1])}, but {sides[-1]}."
    return said, _how_to_agree(list(by_rank.values()))


def _explain_splits(by_rank: dict[int, Record], pairs: list[tuple[int, int]]) -> tuple[str, str]:
    """Say how long the parts of an all_to_all are, and how long they should be.

    One rank that is at fault is in all of the pairs: it comes first.
    """
    in_pairs = Counter(rank for pair in pairs for rank in pair)
    odd, times = in_pairs.most_common(1)[0]
    said = []
    for sender, receiver in sorted(pairs, key=lambda pair: (odd not in pair, pair)):
        ranks = by_rank[sender].ranks
        sent = by_rank[sender].splits[0][ranks.index(receiver)]
        expected = by_rank[receiver].splits[1][ranks.index(sender)]
        elements = "" if said else " elements"
        whose = f"rank {sender} sends {sent}{elements} to rank {receiver}"
        said.append(f"{whose}, which expects {expected}")
    advice = "What a rank sends to another must be as long as that one expects it."
    if times == len(pairs) > 1:
        advice += f" Rank {odd} is in all of these pairs: look at its splits first."
    headline = f"mismatch: the splits of all_to_all disagree: {'; '.join(said)}."
    return headline, f"{advice} Have you exchanged the counts first?"


def _how_to_agree(records: list[Record]) -> str:
    if len({record.op for record in records if record.op not in MESSAGES}) > 1:
        alike = "Every rank must make the same collective calls in the same order."
        return f"{alike} Is one of them under an `if`?"
    if len({record.dtype for record in records}) > 1:
        return "Both sides must use the same dtype; the bytes would be read as other numbers."
    sizes = {record.bytes for record in records}
    if records[0].op in MESSAGES:
        same = "Both sides must name the same number of elements."
        return f"{same} Did one side skip a message?" if _far_apart(sizes) else same
    if len(sizes) > 1:
        if len({record.place for record in records}) > 1 or _far_apart(sizes):
            skipped = (
                "These look like two different calls: one rank skipped a call, or made one more."
            )
            return f"{skipped} Is one of them under an `if`, or did one loop end early?"
        alike = "Every rank must bring the same number of elements."
        return f"{alike} Did the last batch shrink on one rank?"
    return "Every rank must name the same root and the same operation."


def _far_apart(sizes: set[int]) -> bool:
    """Tell whether sizes differ by more than a batch that shrank would make them differ."""
    return max(sizes) > 2 * min(sizes)


def explain_deadlock(now: list[Situation], stuck: list[int], board: Board) -> tuple[str, str]:
    """Return (what happened, what to do) for ranks that wait for ranks that won't come."""
    waiting = [now[rank] for rank in stuck]
    never = sorted({rank for s in waiting for rank in gone(s, now)})
    advice = None
    if not never:
        waiting = _circle(waiting)
        advice = _name_who_skipped(waiting, now, board)
        chain = (f"rank {s.rank} for {_others(s, now)} in {s.call.op}" for s in waiting)
        said = f"deadlock: each waits for another: {', '.join(chain)}."
    else:
        waiting = [s for s in waiting if gone(s, now)]
        direct = [s.rank for s in waiting]
        calls = sorted({s.call.op for s in waiting})
        wait, have = "waits" if len(direct) == 1 else "wait", "has" if len(never) == 1 else "have"
        whom = _others(waiting[0], now, never) if len(direct) == 1 else name_some(never, len(now))
        said = f"deadlock: {name_some(direct, len(now))} {wait} in {' and '.join(calls)}"
        said += f" for {whom}, which {have} {_how_gone(waiting, now)}."
    return said, advice or _way_out(waiting, bool(never))


def ends_by_itself(now: list[Situation], stuck: list[int]) -> bool:
    """Tell whether the script's own timeout, which it may catch, soon ends one of these waits."""
    for s in (now[rank] for rank in stuck):
        for each in (s, *s.more):
            if each.call.limit_s is not None and each.call.limit_s <= PATIENCE_S:
                return True
    return False


def explain_timeout(now: list[Situation], seconds: float, board: Board) -> tuple[str, str]:
    """Return (what happened, what to do) where a wait ended by its timeout after `seconds`."""
    if stuck := deadlocked(now) or polled_in_vain(now):
        return explain_deadlock(now, stuck, board)
    return explain_standstill(now, seconds)


def explain_standstill(now: list[Situation], seconds: float) -> tuple[str, str]:
    """Return (what happened, what to do) where ranks wait for ranks that may still come."""
    said = f"no progress for {seconds:.2g} s"
    waiting = [s for s in now if s.state in ("waiting", "polling") and s.missing]
    awaited = {rank for s in waiting for rank in s.missing}
    absent = sorted(rank for rank in awaited if now[rank].state not in ("waiting", "polling"))
    if not absent:
        return f"{said}, and every rank is inside a call.", "Which of these calls is one too many?"
    for_them = [s for s in waiting if not set(absent).isdisjoint(s.missing)]
    who = name_ranks([s.rank for s in for_them])
    wait, are = "waits" if len(for_them) == 1 else "wait", "isn't" if len(absent) == 1 else "aren't"
    calls = " and ".join(sorted({s.call.op for s in for_them}))
    said += f": {who} {wait} in {calls} for {name_ranks(absent)}, which {are} in a call."
    return said, f"Why does {name_ranks(absent[:1])} take so long at that line?"


def waited_s(record: Record | None, error: BaseException) -> float:
    """Return how many seconds a wait took that ended by its timeout."""
    of_gloo = re.search(r"Timed out waiting (\d+)ms", str(error))  # it counts from the call on
    if of_gloo or record is None:
        return int(of_gloo[1]) / 1e3 if of_gloo else 0.0
    return time.perf_counter() - (record.waited or record.issued)


def _how_gone(waiting: list[Situation], now: list[Situation]) -> str:
    """Say what the first rank that won't come has done instead."""
    s = next(s for s in waiting if gone(s, now))
    other = now[gone(s, now)[0]]
    where = other.destroyed.get(group_of(s.call))
    if where is not None:
        return f"destroyed its group without that call ({describe_place(where)})"
    return "returned" if other.state == "returned" else "ended the cell"


def _circle(waiting: list[Situation]) -> list[Situation]:
    """Select the ranks that wait for each other; the rest only wait for these."""
    awaited, found = {s.rank: set(s.missing) for s in waiting}, -1
    while found != (found := sum(map(len, awaited.values()))):  # each round looks further
        for ranks in awaited.values():
            ranks.update(*map(awaited.get, ranks))
    circle = []
    for s in waiting:
        if all(s.rank in awaited[rank] for rank in awaited[s.rank]):
            circle.append(s)
    return circle


def _skipped(waiting: list[Situation], now: list[Situation], board: Board):
    """Find a skipped call on a circle: (the call, the rank that skipped it, its last one), or None.

    The evidence is the rank's own history: the last time that its calls went so, this came next.
    """
    for s in waiting:
        for rank in s.missing:
            other = now[rank].call
            before = [r for r in board.records(rank) if other and r.issued < other.issued]
            expected = _what_came_next(before)
            if expected and expected.channel == s.call.channel != other.channel:
                return s.call, rank, expected
    return None


def _what_came_next(records: list[Record]) -> Record | None:
    """Return the call that followed the longest earlier run of the same lines as the last calls."""
    said = [(record.channel, record.place) for record in records]
    longest, following = 0, None
    for end in range(1, len(said)):
        alike = 0
        while alike < end and said[end - 1 - alike] == said[-1 - alike]:
            alike += 1
        if alike and alike >= longest:
            longest, following = alike, records[end]
    return following


def _name_who_skipped(waiting: list[Situation], now: list[Situation], board: Board) -> str | None:
    found = _skipped(waiting, now, board)
    if found is None:
        return None
    _, rank, before = found
    said = f"Rank {rank} seems to have skipped the {before.op} that it made before"
    why = "Is it under an `if`, or did one loop end early?"
    why += f" {COUNT_THEM}" if before.op in MESSAGES else ""
    return f"{said} ({describe_place(before.place)}). {why}"


def _others(s: Situation, now: list[Situation], ranks: Sequence[int] | None = None) -> str:
    """Name the ranks that `s` waits for: "all others" where there are many."""
    ranks = s.missing if ranks is None else ranks
    if len(ranks) > MANY_RANKS and len(set(ranks) - {s.rank}) == len(now) - 1:
        return "all others"
    return name_some(ranks, len(now))


def name_some(ranks: Iterable[int], world_size: int) -> str:
    """Name ranks: 'ranks 0, 1 and 3', or 'all but rank 7' where that is shorter."""
    ranks = list(ranks)
    rest = sorted(set(range(world_size)).difference(ranks))
    in_a_row = ranks == list(range(ranks[0], ranks[-1] + 1))
    if len(ranks) > MANY_RANKS and len(rest) in (1, 2) and not in_a_row:
        return f"all but {name_ranks(rest)}"
    return name_ranks(ranks)


def _way_out(stuck: list[Situation], gone: bool) -> str:
    """Say what to do.

    stuck: those on the circle, or, if `gone`, those that wait for ranks that have ended.
    """
    lost = next((s for s in stuck if s.lost), None)
    if lost:
        return _let_go(lost.call.peer, lost.lost)
    ops = {s.call.op for s in stuck}
    if "new_group" in ops:
        return "Every rank must call dist.new_group, also those that are not in the group."
    if not ops.isdisjoint(MESSAGES) and (gone or not ops.issubset(MESSAGES)):
        return COUNT_THEM
    if gone:
        every = "Every rank of the group must make the call."
        return f"{every} Is it under an `if`, or did one loop end early?"
    sends = {(s.rank, s.call.peer) for s in stuck if s.call.op == "send"}
    if any((s.call.peer, s.rank) in sends for s in stuck if s.call.op == "recv"):
        return "Their tags, or groups, differ: a receive takes only what was sent with its own."
    if ops.issubset(MESSAGES):
        if any(s.call.on_stream for s in stuck):
            in_line = "On NCCL, a group's messages go one after the other"
            return f"{in_line}: start them together, with dist.batch_isend_irecv."
        return "Let one side receive first, or start both with isend and irecv and wait afterwards."
    return (
        "All ranks must use their groups in the same order, and leave no call out. "
        "Is one of them under an `if`?"
    )


def let_go(board: Board) -> str | None:
    """The first message whose handle was let go, if it isn't done: it may block all that follow."""
    for rank in range(board.world_size):
        for record in board.records(rank):
            if record.dropped and record.done is None:
                return _let_go(rank, record)
    return None


def _let_go(rank: int, message: Record) -> str:
    call, handle = ("isend", "send") if message.op == "send" else ("irecv", "receive")
    said = f"Rank {rank} began its {handle} with {call} and never waited for it"
    where = describe_place(message.place)
    return f"{said} ({where}). Keep what {call} returns, and call wait() on it."


def report(
    headline: str, advice: str, now: list[Situation], board: Board, stuck: bool = True
) -> str:
    """Put together what happened, where all ranks are, their last calls, and what to do.

    stuck: a rank that lacks a call will never make it; else it may only be late.
    """
    where: dict[str, list[int]] = {}
    for s in now:
        where.setdefault(_where(s, now), []).append(s.rank)
    places = [f"{name_some(ranks, board.world_size)}: {place}" for place, ranks in where.items()]
    calls = _calls(board, [s.rank for s in now], _guilty(now, board), stuck)
    return "\n".join([headline, "", *places, "", *calls, *_loops(board), "", advice])


def _where(s: Situation, now: list[Situation]) -> str:
    """waiting for rank 1 in barrier()⏎  step, line 3: dist.barrier()"""
    state = "waiting, by is_completed()," if s.state == "polling" else s.state
    missing = f" for {_others(s, now)}" if s.missing else ""
    call = f" in {s.call.call}" if s.call else ""
    lines = [f"{state}{missing}{call}"]
    lines += [f"  {describe_place(s.place)}"] if s.place else []
    via = s.call.via if s.call else (*(s.place or ()), "", "", "", "")[3]
    if via:
        file, line, function = via.rsplit(":", 2)
        lines.append(f"  by way of {describe_place((file, int(line), function))}")
    for other in s.more:
        lines.append(f"  another thread: {_where(other, now)}")
    return "\n".join(lines)


def _guilty(now: list[Situation], board: Board) -> Record | None:
    """Find the call at which ranks differ, or the first that waits for a rank which doesn't wait.

    On a circle no call is more to blame than the others, unless one was skipped: None.
    """
    different = mismatch(board)
    if different:
        return next(iter(different.values()))
    waiting = [s for s in now if s.missing]
    wait = {s.rank for s in waiting}
    ends = [s.call for s in waiting if not wait.issuperset(s.missing)]
    if waiting and not ends:
        skipped = _skipped(_circle(waiting), now, board)
        return skipped and skipped[0]
    return min(ends, key=lambda call: call.issued, default=None)


Columns = dict[int, dict[int, str]]  # {rank: {number of a call, from 1: what it says}}


def _calls(board: Board, ranks: list[int], guilty: Record | None, stuck: bool) -> list[str]:
    """Put the last calls side by side, marked where they first differ.

    Of the group of the guilty call, counted in that group, then what all called besides: ranks with
    groups of their own rightly make other calls.
    """
    members = [rank for rank in ranks if guilty and rank in guilty.ranks]
    if len(members) < 2 or guilty.channel.endswith("?"):  # from any rank: nothing to put beside it
        return _calls_of_all_groups(board, ranks, stuck)
    said, made, others = {}, {}, {}
    for rank in ranks:
        records = board.records(rank)
        if rank in members:
            here = [record for record in records if record.channel == guilty.channel]
            made[rank] = {record.seq + 1: _without_group(record) for record in here}
            said[rank] = {
                record.seq + 1: record.fingerprint or guilty.fingerprint for record in here
            }
        rest = [r.call for r in records if r.channel != guilty.channel and r.op != "new_group"]
        if rest:
            others.setdefault(", ".join(rest[-OTHER_CALLS:]), []).append(rank)
    what = _group_calls(guilty) if others else "calls"
    lines = _table(what, made, _first_difference(said, stuck), board.world_size)
    if others:
        lines.append("Other calls, the last two of each:")
    for calls, who in others.items():
        lines.append(f"{name_some(who, board.world_size)}: {calls}")
    return lines


def _group_calls(call: Record) -> str:
    """Say which calls a table holds, where there are others."""
    if call.op in MESSAGES:
        return f"messages from rank {call.ranks[0]} to rank {call.ranks[1]}"
    return f"calls in {'the world' if call.group == 'world' else call.group}"


def _without_group(record: Record) -> str:
    """Write a call under a heading that names its group."""
    group = f"group {list(record.ranks)}"
    detail = record.detail.removesuffix(group).removesuffix(", ")
    return f"{record.op}({detail})"


def _calls_of_all_groups(board: Board, ranks: list[int], stuck: bool) -> list[str]:
    """Put all calls side by side; marked only if all ranks had to make the same ones.

    Messages, and groups of some ranks, rightly differ.
    """
    made = {rank: _numbered_calls(board, rank) for rank in ranks}
    differs, everybody = None, set(ranks)
    shared = (
        record.op not in MESSAGES and everybody.issubset(record.ranks)
        for rank in ranks
        for record in board.records(rank)
        if record.op != "new_group"
    )
    if all(shared):
        differs = _first_difference(made, stuck)
    elif max(len(column) for column in made.values()) > LAST_CALLS:  # the same number says nothing
        return ["Their last calls:", *_own_calls(made, board.world_size)]
    return _table("calls", made, differs, board.world_size)


def _own_calls(made: Columns, world_size: int) -> Iterator[str]:
    """List the last calls of each rank, by its own count."""
    alike: dict[str, list[int]] = {}
    for rank, column in made.items():
        calls = [f"{number} {call}" for number, call in column.items()]
        alike.setdefault(", ".join(calls[-LAST_CALLS:]) or "no call", []).append(rank)
    for calls, ranks in alike.items():
        yield f"{name_some(ranks, world_size)}: {calls}"


def _oldest(made: Columns) -> int:
    """Return the first number that no rank has forgotten."""
    return max(min(column, default=1) for column in made.values())


def _first_difference(said: Columns, stuck: bool) -> int | None:
    last = max((number for column in said.values() for number in column), default=0)
    for number in range(_oldest(said), last + 1):
        different = {column.get(number) for column in said.values()}
        if len(different if stuck else different - {None}) > 1:
            return number
    return None


def _table(what: str, made: Columns, differs: int | None, world_size: int) -> list[str]:
    """Lay the last calls out in columns, one for all ranks alike; `differs` is marked, in sight."""
    last = max((number for column in made.values() for number in column), default=0)
    if last == 0:
        return ["No rank has made a call."]
    first = max(_oldest(made), min((differs or last) + 2, last + 1) - LAST_CALLS)
    shown = range(first, min(first + LAST_CALLS, last + 1))
    alike: dict[tuple, list[int]] = {}
    for rank, column in made.items():
        alike.setdefault(tuple(column.get(number, "-") for number in shown), []).append(rank)
    which = f"Their {what}" if first == 1 else f"Their last {what}"
    mark = " (≠: here they differ)" if differs in shown else ""
    numbers = [f"{number} ≠" if number == differs else f"{number}" for number in shown]
    columns = [("call", *numbers)]
    for calls, ranks in alike.items():
        columns.append((name_some(ranks, world_size), *calls))
    widths = [max(map(len, column)) + 2 for column in columns]
    lines = []
    if sum(widths) <= COLUMNS:
        for row in zip(*columns, strict=True):
            lines.append("".join(map(str.ljust, row, widths)).rstrip())
    else:
        for ranks, *calls in columns[1:]:
            said = (" ".join(each) for each in zip(numbers, calls, strict=True))
            lines.append(f"{ranks}: {', '.join(said)}")
    return [f"{which}{mark}:", *lines]


def _loops(board: Board) -> list[str]:
    """Ranks that seem never to end: many calls, and the last ones all alike."""
    found = []
    for rank in range(board.world_size):
        calls = {record.call for record in board.records(rank)}
        if len(calls) == 1 and board.calls(rank) >= MANY_CALLS:
            many = f"Rank {rank} has made {board.calls(rank):,} calls, the last of them all alike"
            found.append(f"{many}: a loop that doesn't end?")
    return found


def _numbered_calls(board: Board, rank: int) -> dict[int, str]:
    """{number, from 1: call}; the board remembers only the last ones."""
    records = board.records(rank)
    forgotten = board.calls(rank) - len(records)
    calls = (r.call for r in records if r.op != "new_group" or r.done is None)
    return dict(enumerate(calls, start=forgotten + 1))


def describe_place(place: tuple) -> str:
    """'step, line 3: dist.all_reduce(x)' in a cell, 'train.py:12 in step: ...' in a file.

    Cells carry no number: the same cell has another one in every session.
    """
    file, line, function, *_ = place
    whole = function == "<module>"
    where = f"{short_path(file)}:{line}" + ("" if whole else f" in {function}")
    if file.startswith("<") or "ipykernel_" in file:
        where = f"line {line} of the cell" if whole else f"{function}, line {line}"
    text = linecache.getline(file, line).strip()
    return f"{where}: {text}" if text else where


def short_path(file: str) -> str:
    """The part of a path that means something to others: from the package on, or the name alone."""
    folders = (sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"))
    for folder in (*folders, *site.getsitepackages()):
        if file.startswith(folder + os.sep):
            return file[len(folder) + 1 :].replace(os.sep, "/")
    return os.path.basename(file)
