"""Why nothing moves: read the board, find who waits for whom, say it in words and a table."""

import linecache
import os
import site
import sysconfig
from dataclasses import dataclass

from .board import DISAGREES, IDLE, RETURNED, SLOTS, STARTING, Board, Record

LAST_CALLS = 5


@dataclass
class Situation:
    """Where one rank is."""

    rank: int
    state: str  # starting, computing, waiting, returned, idle
    call: Record | None = None  # the call it sits in, or the last it made
    missing: tuple[int, ...] = ()  # the ranks that have not come to that call
    place: tuple[str, int, str] | None = None  # file, line, function, where known
    lost: Record | None = None  # the other side of its message, whose handle was let go


def situations(board: Board) -> list[Situation]:
    """Where every rank is now, and for which ranks it waits."""
    ranks = range(board.world_size)
    records = [board.records(rank) for rank in ranks]
    reached = [{record.channel: record.seq for record in its} for its in records]
    found = []
    for rank in ranks:
        waiting, state = board.waiting(rank), board.state(rank)
        call = board.record(rank, waiting) if waiting is not None else None
        if state == DISAGREES:
            found.append(Situation(rank, "waiting", records[rank][-1], (), _place(records[rank][-1])))
        elif state in (RETURNED, IDLE, STARTING):
            found.append(Situation(rank, {RETURNED: "returned", IDLE: "idle", STARTING: "starting"}[state]))
        elif call is None or call.done is not None:
            found.append(Situation(rank, "computing"))
        else:
            lost = _lost(call, records)
            missing = (call.peer,) if lost else _missing(call, rank, reached)
            found.append(Situation(rank, "waiting", call, missing, _place(call), lost))
    return found


def _lost(call: Record, records: list[list[Record]]) -> Record | None:
    """The other side of a message, if its handle was let go before anybody waited for it: it may never complete."""
    theirs = records[call.peer] if call.op in ("send", "recv") and call.peer is not None else ()
    return next((r for r in theirs if (r.channel, r.seq) == (call.channel, call.seq) and r.dropped), None)


def _place(record: Record) -> tuple[str, int, str]:
    return record.file, record.line, record.function


def _missing(call: Record, rank: int, reached: list[dict[str, int]]) -> tuple[int, ...]:
    """The members of `call` that have not come to it."""
    return tuple(other for other in call.ranks if other != rank and reached[other].get(call.channel, -1) < call.seq)


def deadlocked(now: list[Situation], board: Board) -> list[int]:
    """The ranks that can never go on, whatever happens: they wait, directly or not, only for ranks that won't come.

    A rank that computes may still come; so may one of several threads. A call whose ranks have all come is under way.
    """
    free = {s.rank for s in now if s.state in ("computing", "starting") or board.threads(s.rank) > 1}
    grew = True
    while grew:
        grew = False
        for s in now:
            if s.state == "waiting" and s.rank not in free and _may_go_on(s, free):
                free.add(s.rank)
                grew = True
    return [s.rank for s in now if s.state == "waiting" and s.rank not in free]


def _may_go_on(s: Situation, free: set[int]) -> bool:
    if s.call.channel.endswith("?"):
        return not s.missing or any(rank in free for rank in s.missing)
    return all(rank in free for rank in s.missing)


def abandoned(now: list[Situation], board: Board) -> list[Situation]:
    """Ranks that wait nowhere we can see, but began a collective that another member returned without joining.

    DistributedDataParallel waits in C++, where no mark is left on the board.
    """
    records = [board.records(rank) for rank in range(board.world_size)]
    reached = [{record.channel: record.seq for record in its} for its in records]
    found = []
    for s in now:
        for call in records[s.rank] if s.state == "computing" else ():
            missing = _missing(call, s.rank, reached)
            if (
                call.done is None
                and call.op not in ("send", "recv")
                and any(now[m].state in ("returned", "idle") for m in missing)
            ):
                found.append(Situation(s.rank, "waiting", call, missing, _place(call)))
                break
    return found


def mismatch(board: Board) -> dict[int, Record] | None:
    """The first place where ranks said different things: {rank: what it said}, or None."""
    said: dict[tuple[str, int], dict[int, Record]] = {}
    for rank in range(board.world_size):
        for record in board.records(rank):
            if record.agreement:
                said.setdefault((record.channel, record.seq), {})[rank] = record
    for _, by_rank in sorted(said.items(), key=lambda item: min(r.issued for r in item[1].values())):
        if len({record.agreement for record in by_rank.values()}) > 1:
            return by_rank
    return None


def in_step(board: Board) -> bool:
    """Whether every rank is idle and all have made the same calls, so that they can go on together."""
    ranks = range(board.world_size)
    records = [board.records(rank) for rank in ranks]
    reached = [{record.channel: record.seq for record in its} for its in records]
    idle = all(board.state(rank) == IDLE for rank in ranks)
    return idle and not any(_missing(record, rank, reached) for rank in ranks for record in records[rank])


# In words.


def explain_mismatch(by_rank: dict[int, Record]) -> tuple[str, str]:
    """(what happened, what to do) for ranks that said different things."""
    groups: dict[str, list[int]] = {}
    for rank, record in sorted(by_rank.items()):
        groups.setdefault(record.call, []).append(rank)
    sides = [f"{name_ranks(ranks)} called {call}" for call, ranks in groups.items()]
    records = list(by_rank.values())
    if len({record.op for record in records if record.op not in ("send", "recv")}) > 1:
        advice = "Every rank must make the same collective calls in the same order. Is one of them under an `if`?"
    elif len({record.dtype for record in records}) > 1:
        advice = "Both sides must use the same dtype; the bytes would be read as other numbers."
    elif records[0].op in ("send", "recv"):
        advice = "Both sides must name the same number of elements."
    elif len({record.bytes for record in records}) > 1:
        advice = "Every rank must bring the same number of elements. Did the last batch shrink on one rank?"
    else:
        advice = "Every rank must name the same root and the same operation."
    return f"mismatch: {', but '.join(sides)}.", advice


def explain_deadlock(now: list[Situation], stuck: list[int]) -> tuple[str, str]:
    """(what happened, what to do) for ranks that wait for ranks that won't come."""
    by_rank = {s.rank: s for s in now}
    gone = sorted({m for rank in stuck for m in by_rank[rank].missing if by_rank[m].state in ("returned", "idle")})
    if gone:
        calls = sorted({by_rank[rank].call.op for rank in stuck if set(by_rank[rank].missing) & set(gone)})
        stopped = "returned" if by_rank[gone[0]].state == "returned" else "ended the cell"
        happened = (
            f"{name_ranks(stuck)} {'waits' if len(stuck) == 1 else 'wait'} in {' and '.join(calls)} for "
            f"{name_ranks(gone)}, which {'has' if len(gone) == 1 else 'have'} {stopped}."
        )
        return f"deadlock: {happened}", _advice([by_rank[rank] for rank in stuck], gone=True)
    chain = ", ".join(
        f"rank {rank} for {name_ranks(by_rank[rank].missing)} in {by_rank[rank].call.op}" for rank in stuck
    )
    return f"deadlock: each waits for another: {chain}.", _advice([by_rank[rank] for rank in stuck], gone=False)


def _advice(stuck: list[Situation], gone: bool) -> str:
    """gone: whether some of the ranks waited for have returned; otherwise all wait for each other."""
    lost = next((s for s in stuck if s.lost), None)
    if lost:
        begun, handle = ("isend", "send") if lost.lost.op == "send" else ("irecv", "receive")
        return (
            f"Rank {lost.call.peer} began its {handle} with {begun} and never waited for it "
            f"({describe_place(_place(lost.lost))}). Keep what {begun} returns, and call wait() on it."
        )
    ops = {s.call.op for s in stuck}
    if "new_group" in ops:
        return "Every rank must call dist.new_group, also those that are not in the group."
    if gone and ops & {"send", "recv"}:
        return "Every send needs a recv on the other rank, and every recv a send. Count them on both sides."
    if gone:
        return "Every rank of the group must make the call. Is it under an `if`, or did one loop end early?"
    if ops <= {"send", "recv"}:
        return "Let one side receive first, or start both with isend and irecv and wait afterwards."
    return "All ranks must use their groups in the same order."


def report(headline: str, advice: str, now: list[Situation], board: Board) -> str:
    """The whole report: what happened, where every rank is, their last calls side by side, what to do."""
    rows = [("rank", "state", "call", "where", "waits for")]
    for s in now:
        rows.append(
            (
                str(s.rank),
                s.state,
                s.call.call if s.call else "-",
                describe_place(s.place) if s.place else "-",
                name_ranks(s.missing) if s.missing else "-",
            )
        )
    return "\n".join([headline, "", _table(rows), "", *_last_calls(board), "", advice])


def _last_calls(board: Board) -> list[str]:
    """The last calls of all ranks in columns, one for all ranks that did alike, with a mark where they first differ."""
    columns = _numbered_calls(board)
    last = max((number for column in columns for number in column), default=0)
    if last == 0:
        return ["No rank has made a call."]
    oldest = max((min(column) for column in columns if column), default=1)
    exchanges = any(call.startswith(("send", "recv")) for column in columns for call in column.values())
    differs = last + 1
    if not exchanges:  # ranks that exchange messages rightly make different calls
        differs = next((n for n in range(oldest, last + 1) if len({column.get(n) for column in columns}) > 1), differs)
    first = max(oldest, min(differs + 2, last + 1) - LAST_CALLS)
    shown = range(first, min(first + LAST_CALLS, last + 1))
    alike: dict[tuple, list[int]] = {}
    for rank, column in enumerate(columns):
        alike.setdefault(tuple(column.get(number, "-") for number in shown), []).append(rank)
    rows = [("call", *map(name_ranks, alike.values()), "")]
    for row, number in enumerate(shown):
        rows.append((f"{number}", *(calls[row] for calls in alike), "<- they differ here" if number == differs else ""))
    return ["Their calls, one row each:" if first == 1 else "Their last calls, one row each:", _table(rows)]


def _numbered_calls(board: Board) -> list[dict[int, str]]:
    """For each rank {number, from 1: call}. Where the board no longer holds all calls, only those of the largest group,

    whose numbers are the same on all ranks.
    """
    records = [[r for r in board.records(rank) if r.op != "new_group"] for rank in range(board.world_size)]
    if all(board.calls(rank) <= SLOTS for rank in range(board.world_size)):
        return [{number: r.call for number, r in enumerate(its, start=1)} for its in records]
    collectives = [r for its in records for r in its if r.op not in ("send", "recv")]
    if not collectives:
        dropped = [board.calls(rank) - len(its) for rank, its in enumerate(records)]
        return [{n: r.call for n, r in enumerate(its, 1 + d)} for d, its in zip(dropped, records, strict=True)]
    channel = max(collectives, key=lambda r: len(r.ranks)).channel
    return [{r.seq + 1: r.call for r in its if r.channel == channel} for its in records]


def _table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def name_ranks(ranks) -> str:
    """rank 2; ranks 0 and 2; ranks 0, 1 and 2."""
    ranks = sorted(ranks)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def describe_place(place: tuple[str, int, str]) -> str:
    """A line of a cell as "step, line 3: dist.all_reduce(x)", of a file as "train.py:12 in step: ..."

    Cells carry no number: the same cell has another one in every session.
    """
    file, line, function = place
    text = linecache.getline(file, line).strip()
    where = f"{short_path(file)}:{line} in {function}" if os.path.exists(file) else f"{function}, line {line}"
    if function == "<module>":
        where = f"{short_path(file)}:{line}" if os.path.exists(file) else f"line {line} of the cell"
    return f"{where}: {text}" if text else where


def short_path(file: str) -> str:
    """The part of a path that means something to others: from the package on, or the file's name alone."""
    for folder in (sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"), *site.getsitepackages()):
        if file.startswith(folder + os.sep):
            return file[len(folder) + 1 :].replace(os.sep, "/")
    return os.path.basename(file)
