"""Explain a run that has ended: `python -m ddpkit.explain FOLDER`, or a log of torchrun's.

A folder of a flight recorder's dumps shows who waits for whom. The dumps are ours
(`run.flight_recorder`), or torch's own: NCCL's from a cluster, or Gloo's. A log of torchrun's, or
the folder of `torchrun --log-dir`, shows which rank fell first.
"""

import argparse
import os
import re
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from ..runtime.board import MESSAGES, RUNNING, SLOTS, Board, Record
from ..runtime.look import Look, Situation, group_of
from ..runtime.report import explain_deadlock, explain_mismatch, report
from ..tools.units import name_group, name_ranks, name_some, wrap
from .dumps import members_of, read_dumps, records_of
from .logs import explain_log, find_logs, read_log

MOST_RANKS = 100_000  # a larger number is no rank: another file's name may end in a number
NOT_NAMED = "The dumps don't name the members of this group: one that made no call isn't seen."


def explain(dumps: dict[int, dict]) -> str:
    """Return the report of a hang as text: what happened, where each rank is, and the last calls.

    dumps: {rank: dump}, where a dump is a dict with "entries", a list of calls, and "pg_config",
        the groups; ranks may be missing.
    ValueError: a dump can't be read, or isn't of the same run.
    """
    everybody = _everybody(dumps)
    calls = {rank: _calls(rank, dump, everybody) for rank, dump in dumps.items()}
    _guess_members(calls)
    first = {rank: dump["entries"][0] for rank, dump in dumps.items() if dump["entries"]}
    cut = {rank for rank, entry in first.items() if entry.get("record_id") != 0}
    _count_messages(list(calls.values()), from_the_start=not cut)
    number = attrgetter("channel", "seq")
    blocked = {rank for rank, records in calls.items() if None in map(attrgetter("done"), records)}
    reached = [dict(sorted(map(number, calls.get(rank, ())))) for rank in everybody]
    with tempfile.TemporaryDirectory() as folder:
        board = Board(Path(folder) / "board", len(everybody), create=True)
        try:
            for rank, records in calls.items():
                shown = _fill(board, rank, records)
                board.set_waiting(rank, _waits_in(shown, reached, blocked))
            return _report(Look(board, reached=reached), calls, cut)
        finally:
            board.close()


def _everybody(dumps: dict[int, dict]) -> list[int]:
    """Return all ranks of the world, from 0 to the largest that has a dump or is in a dump's group.

    ValueError: a group lacks "ranks", or a dump's rank is too large or in none of its groups.
    """
    everybody = set()
    for rank, dump in dumps.items():
        members = set()
        for group in dump["pg_config"].values():
            if not isinstance(group, dict) or "ranks" not in group:
                expected = f"expected the ranks of each group in the dump of rank {rank}"
                raise ValueError(f"{expected}, got {group!r}.")
            members.update(members_of(group))
        everybody |= {rank, *members}
        if max({rank, *members}) >= MOST_RANKS or (members and rank not in members):
            whose = name_ranks(sorted(members)[:9]) if members else "ranks"
            got = f"got one whose name ends in {rank}: is it of another run, or no dump?"
            raise ValueError(f"expected dumps of {whose}, {got}")
    return list(range(max(everybody) + 1))


def _calls(rank: int, dump: dict, everybody: list[int]) -> list[Record]:
    """Return the records of a rank's dump, in order. ValueError: an entry can't be read."""
    try:
        return list(records_of(dump, everybody))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        what = f"got {type(error).__name__}: {error}"
        raise ValueError(f"expected a dump's entries in that of rank {rank}, {what}") from None


def _guess_members(calls: dict[int, list[Record]]) -> None:
    """Take the ranks with calls in a group for its members, in place, where no dump names them."""
    callers: dict[str, set[int]] = {}
    unknown = []
    for rank, records in calls.items():
        for record in records:
            if not record.ranks:
                callers.setdefault(group_of(record), set()).add(rank)
                unknown.append(record)
    for record in unknown:
        ranks = tuple(sorted(callers[group_of(record)]))
        record.said = replace(record.said, ranks=ranks)


def _count_messages(calls: list[list[Record]], from_the_start: bool) -> None:
    """Renumber the messages between each two ranks, in place: both ends get the same `seq`.

    This is needed because a dump counts messages differently on the two sides.

    calls: for each dump, the records of its rank.
    from_the_start: whether the dumps hold every call. Otherwise earlier messages are unknown: the
        last complete message on one side is taken for the last complete one on the other.
    """
    done = []
    most = Counter()
    for records in calls:
        done.append(Counter(r.channel for r in records if r.op in MESSAGES and r.done))
        most |= done[-1]
    for records, theirs in zip(calls, done, strict=True):
        number = Counter() if from_the_start else most - theirs
        for record in records:
            if record.op in MESSAGES:
                record.seq = number[record.channel]
                number[record.channel] += 1


def _fill(board: Board, rank: int, records: list[Record]) -> list[Record]:
    """Write a rank's calls to the board, the file in which live ranks would record them.

    Return those that were written: calls 128 or more (half of `SLOTS`) after the first open one are
    left out, since the board keeps only the last 256 (SLOTS).
    """
    board.set_state(rank, RUNNING)
    first = next((n for n, record in enumerate(records) if record.done is None), None)
    # Calls after the open one are only queued, and would push it out of the board's slots.
    shown = records if first is None else records[: first + SLOTS // 2]
    for index, record in enumerate(shown):
        board.put(rank, index, record)
    return shown


def _waits_in(records: list[Record], reached: list[dict], blocked: set[int]) -> int | None:
    """Return the index of the open call in which a rank most likely waits; None: none is open.

    On a GPU it is the first one, since the others are queued. On the CPU a program may go on to a
    collective while a message is under way: then it isn't the message. Of the other calls it is the
    first that a rank lacks which has no open call itself; without one, the first that a rank lacks.

    records: the rank's calls. reached: for each rank, {channel: index of its last call there}.
    blocked: the ranks that have an open call.
    """
    waits = [n for n, record in enumerate(records) if record.done is None]
    if not waits or records[waits[0]].on_stream:
        return waits[0] if waits else None
    last = max((n for n in waits if records[n].op not in MESSAGES), default=-1)

    def order(n: int) -> tuple:
        call = records[n]
        missing = {rank for rank in call.ranks if reached[rank].get(call.channel, -1) < call.seq}
        return call.op in MESSAGES and n < last, missing <= blocked, not missing, n

    return min(waits, key=order)


def _report(look: Look, calls: dict[int, list[Record]], cut: set[int]) -> str:
    """Return the report as text. look: the state of all ranks, as the dumps show it.

    calls: {rank: the records of its dump}. cut: the ranks whose dumps lack their first calls.
    """
    silent = set(look.ranks).difference(calls)
    here = [rank for rank in look.ranks if rank in calls]
    inside = [look.now[rank] for rank in here if look.now[rank].state == "waiting"]
    waiting = [s for s in inside if s.missing]
    different = look.mismatch()
    stuck = look.deadlocked()
    if different:
        said, advice = explain_mismatch(different)
    elif stuck:
        said, advice = explain_deadlock(look, stuck)
    elif waiting:
        blocked = {s.rank for s in waiting}  # they only follow
        first, stuck = _first([s for s in waiting if not blocked.issuperset(s.missing)])
        absent = [rank for rank in first.missing if rank not in blocked]
        seen = {r for r in calls if first.call.channel in map(attrgetter("channel"), calls[r])}
        said, advice = _did_not_come(look, first.call, stuck, absent, silent | (cut - seen))
    elif inside:
        said, advice = _all_came(look, *_first(inside), calls)
    elif silent:
        said = f"{_who(here, 'waits', 'wait')} for nobody."
        advice = "Who waits for them, only the dumps of the others can tell."
    else:
        said = "no rank waits for another: all calls in the dumps have their ranks."
        advice = "Nothing to do, or the cause isn't in a call."
    if silent:
        whose = name_some(sorted(silent), len(look.ranks))
        advice += f"\nThere is no dump of {whose}: did it end before the others?"
    return report(said, advice, look, bool(different or waiting), here)


def _first(waiting: list[Situation]) -> tuple[Situation, list[int]]:
    """Return the situation with the oldest open call, and the ranks that wait in that call.

    waiting: a `Situation`, the state of a rank and its `call`, for each rank that waits.
    """
    first = min(waiting, key=lambda s: s.call.issued)
    call = first.call.channel, first.call.seq
    return first, [s.rank for s in waiting if (s.call.channel, s.call.seq) == call]


def _did_not_come(
    look: Look, call: Record, stuck: list[int], absent: list[int], unsure: set[int]
) -> tuple[str, str]:
    """Return (what happened, what to do) if ranks wait for others that may still come.

    call: the call in which they wait.
    stuck: the ranks in that call.
    absent: the ranks that lack it, and wait for no other rank.
    unsure: the ranks of which one can't tell whether they came: they have no dump, or theirs begins
        late and has nothing of that channel.
    """
    said = f"{_who(stuck, 'waits', 'wait')} in {call.op}"
    said += f" for {name_some(absent, len(look.ranks))}, which didn't come to it."
    if unsure.issuperset(absent):
        said = f"{said[:-1]}, as far as one can tell."
    advice = "Every rank of the group must make the call. Is it under an `if`, or did it fail?"
    return said, f"{advice} {NOT_NAMED}" if _has_guessed_members(call) else advice


def _has_guessed_members(call: Record) -> bool:
    """Return whether a call's members are those that made a call there, as no dump names them."""
    return call.group not in ("world", name_group(call.ranks))


def _all_came(
    look: Look, first: Situation, inside: list[int], calls: dict[int, list[Record]]
) -> tuple[str, str]:
    """Return (what happened, what to do) if every rank came to a call that hasn't ended on some.

    first: the oldest wait.
    inside: the ranks that are still in that call.
    calls: {rank: the records of its dump}.
    """
    call = first.call
    carries = "look at what carries it: a link, a GPU, NCCL's own log."
    later = "It may have been under way when the dumps were written. If it stays so, "
    if re.search("reduce|broadcast|scatter|^gather", call.op):
        later = f"A dump holds neither root nor operation: do all ranks name the same? {later}"
    through = []
    for rank in set(call.ranks).difference(inside):
        for record in calls.get(rank, ()):
            if (record.channel, record.seq) == (call.channel, call.seq) and record.done:
                through.append(rank)
    if not through and (len(call.ranks) == 1 or _has_guessed_members(call)):
        said = f"{_who(inside, 'waits', 'wait')} in {call.op}; the dump doesn't say for whom."
        return said, f"{NOT_NAMED} Put the dumps of all ranks into the folder."
    if not through:
        said = f"no rank waits for another: all came to {call.op}, and for none it is over."
        return said, later + carries
    said = f"{_who(inside, 'is', 'are')} still in {call.op}, which is over for"
    advice = f"Every rank made the call. {later}{carries}"
    return f"{said} {name_some(sorted(through), len(look.ranks))}.", advice


def _who(ranks: list[int], verb: str, of_many: str) -> str:
    """Return ranks with a verb, `of_many` after several: 'rank 1 waits', 'ranks 0 and 1 wait'."""
    return f"{name_ranks(ranks)} {verb if len(ranks) == 1 else of_many}"


def _explain_path(path: Path) -> str:
    """Return the report of a folder of dumps or, if it can't be read as such, of the logs there."""
    logs = find_logs(path)
    try:
        dumps = read_dumps(path)
    except ValueError:
        if not logs:
            raise
        return explain_log(read_log(logs))
    return explain(dumps)


def main(arguments: list[str] | None = None) -> int:
    """Print the explanation of the dumps or logs at a path; return the exit code.

    The code is 0, or 1 if the path can't be read: then the error is printed, to stderr.

    arguments: the path, as a list; None: the process's own arguments.
    """
    parser = argparse.ArgumentParser(prog="python -m ddpkit.explain", description=__doc__)
    parser.add_argument("path", type=Path, help="a folder of dumps, a log file, a folder of logs")
    path = parser.parse_args(arguments).path
    try:
        print(wrap(_explain_path(path)), flush=True)
    except BrokenPipeError:  # `| head` has read enough; Python must not flush again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0
