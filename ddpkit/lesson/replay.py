"""Put the events of a run in order: causes before effects, the same order for every run.

Wall time plays no part. If a run failed, the events that never happened come last.
"""

import contextlib
from collections import Counter
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter

from ..runtime.board import MESSAGES, Record
from ..runtime.errors import HangError, LaunchError
from ..tools.units import name_ranks, numbers

RECEIVE, SEND, ENTER, LEAVE = range(4)  # the order of events within a round


@dataclass
class Event:
    """One step of the replay: a message leaves or arrives, ranks meet in a collective, or it fails.

    kind: send, receive, hop, meet, stuck, lost, differ, failed or end. records: by rank; of a
    message both ends, where both are known. A message goes from `rank` to `peer`; in other kinds
    `rank` is the one that fails. status: {rank: what is wrong with it}.
    """

    kind: str
    text: str
    records: dict[int, Record]
    rank: int | None = None
    peer: int | None = None
    status: dict[int, str] = field(default_factory=dict)
    change: dict[int, tuple] = field(default_factory=dict)  # of a collective: see `change`

    @property
    def is_message(self) -> bool:
        return self.kind in ("send", "receive")


def key(record: Record) -> tuple:
    """Return a key that a message's two ends, or a collective's ranks, have in common."""
    return record.channel, record.seq


def replay(run) -> list[Event]:
    """List the events of `run` (a Run or a LaunchError) in order.

    A receive comes after its send and a collective after all its ranks have reached it; among
    unordered events, those of lower ranks come first.
    """
    ends: dict[str, dict[tuple, tuple[int, Record]]] = {"send": {}, "recv": {}}
    calls: dict[tuple, dict[int, Record]] = {}
    for rank, records in enumerate(run.wire):
        for record in records:
            if record.op in MESSAGES:
                ends[record.op][key(record)] = rank, record
            else:
                calls.setdefault(key(record), {})[rank] = record
    return _in_order(run.wire, ends, calls) + _failures(run, ends, calls)


def _program(records: list[Record]) -> list[tuple[int, Record]]:
    """List what one rank did, in order, as (SEND, RECEIVE, ENTER or LEAVE; record).

    A receive counts from the moment at which the message is there.
    """
    steps = []
    for index, record in enumerate(records):
        ended = record.done if record.op == "recv" or record.waited is None else record.waited
        does = [(ENTER, record.issued), (LEAVE, ended)]
        if record.op in MESSAGES:
            does = [(SEND, record.issued) if record.op == "send" else (RECEIVE, ended)]
        steps += [(moment, index, what, record) for what, moment in does if moment is not None]
    return [step[2:] for step in sorted(steps, key=lambda step: step[:3])]


def _in_order(wire, ends: dict, calls: dict) -> list[Event]:
    """Order the events in rounds: in each, every rank that need not wait takes its next step.

    A round is the logical time of Lamport 1978: an event comes after everything that it had to
    wait for, however long that took.
    """
    rounds: TopologicalSorter = TopologicalSorter()
    whole = {at: records for at, records in calls.items() if _complete(records)}
    for rank, records in enumerate(wire):
        before = []
        for what, record in _program(records):
            at = key(record)
            if what == LEAVE:
                before += [(ENTER, member, at) for member in whole.get(at, ())]
                continue
            if what == RECEIVE and at in ends["send"]:
                before.append((SEND, ends["send"][at][0], at))
            rounds.add((what, rank, at), *before)
            before = [(what, rank, at)]
    came: Counter = Counter()  # {collective: the number of ranks that have entered it}
    happened = []
    with contextlib.suppress(CycleError):  # events on a cycle or after it are left out
        rounds.prepare()
    while rounds.is_active():
        steps = rounds.get_ready()
        for what, rank, at in sorted(steps):
            if what == RECEIVE:
                happened.append(_received(*ends["recv"][at], ends["send"].get(at)))
            elif what == SEND:
                record = ends["send"][at][1]
                text = f"rank {rank} sends {_message(record, record.values)} to rank {record.peer}"
                happened.append(Event("send", text, {rank: record}, rank, record.peer))
            else:
                came[at] += 1
                if came[at] == len(whole.get(at, ())):
                    happened.append(_met(whole[at]))
        rounds.done(*steps)
    return happened


def _complete(records: dict[int, Record]) -> bool:
    """Tell whether a collective took place: all ranks of the group made the same call.

    records: by rank.
    """
    first = next(iter(records.values()))
    return len(records) == len(first.ranks) and _alike(records)


def _alike(records: dict[int, Record]) -> bool:
    return len({record.fingerprint for record in records.values()}) == 1


def _shape(record: Record) -> str:
    """Return a record's number of elements and dtype, as "2 float32"."""
    return record.detail.partition(",")[0]


def _message(record: Record, values: list | None) -> str:
    return _shape(record) if values is None else numbers(values)


def _received(rank: int, record: Record, sent: tuple[int, Record] | None) -> Event:
    text = f"rank {rank} receives {_message(record, record.result)} from rank {record.peer}"
    records = {rank: record}
    if sent and sent[0] != rank:
        records[sent[0]] = sent[1]
    return Event("receive", text, records, record.peer, rank)


def _met(records: dict[int, Record]) -> Event:
    ranks = sorted(records)
    first, who = records[ranks[0]], name_ranks(ranks)
    if first.op == "new_group":
        return Event("meet", f"{who} form a group", records)
    if first.op == "barrier":
        return Event("meet", f"{who} met at a barrier", records)
    world_size = len(ranks) if first.group == "world" and len(ranks) > 1 else None
    found = change(records)
    before = {rank: found[rank][0] for rank in ranks}
    after = {rank: found[rank][1] for rank in ranks}
    text = f"{first.call}: {_said(before, world_size)} → {_said(after, world_size)}"
    return Event("meet", text, records, change=found)


def change(records: dict[int, Record]) -> dict[int, tuple[list | None, list | None, list]]:
    """Return what a collective did to each rank, to be drawn.

    records: by rank. Returns {rank: (numbers that it brought, numbers that it got, owners of
    these)}; None for numbers of a rank that brings or gets none, since the contents of its buffer
    mean nothing then.
    """
    before, found = {}, {}
    for rank, record in records.items():
        idle = record.op in ("broadcast", "scatter") and rank != record.peer
        before[rank] = None if idle else record.values
    for rank, record in records.items():
        idle = record.op in ("reduce", "gather") and rank != record.peer
        after, owners = None if idle else record.result, []
        parts = len(records) if record.op == "all_to_all" else 1
        for source in sorted(records):
            if record.op in ("all_gather", "gather", "all_to_all"):
                owners += [source] * (len(before[source] or ()) // parts)
        if record.op in ("broadcast", "scatter"):
            owners = [record.peer] * len(after or ())
        if record.op in ("all_reduce", "reduce", "reduce_scatter"):
            owners = [frozenset(records)] * len(after or ())
        if len(owners) != len(after or ()):  # parts of uneven sizes
            owners = [None] * len(after or ())
        found[rank] = before[rank], after, owners
    return found


def _said(rows: dict[int, list | None], world_size: int | None) -> str:
    """Say what ranks have: '[1, 2] on every rank', or 'rank 0 [1], rank 1 [2]'."""
    first = next(iter(rows.values()))
    if len(rows) > 1 and first and all(row == first for row in rows.values()):
        return f"{numbers(first)} on {name_ranks(rows, world_size)}"
    said = [f"rank {rank} {numbers(row)}" for rank, row in rows.items() if row]
    return ", ".join(said) or "…"


# Events that never happened, and the ranks that wait for them


def _failures(run, ends: dict, calls: dict) -> list[Event]:
    failed = isinstance(run, LaunchError)
    ever = "for ever" if isinstance(run, HangError) else "in vain"
    found = []
    if getattr(run, "rank", None) is not None:
        text = f"rank {run.rank} fails, as the error says"
        found.append(Event("failed", text, {}, run.rank, status={run.rank: "failed"}))
    for records in calls.values():
        if not _alike(records):
            found.append(_different_calls(records))
        elif not _complete(records):
            found.append(_incomplete_call(records, ever))
    for rank, records in enumerate(run.wire):
        for record in records:
            if record.op == "recv" and record.done is None:
                _, sent = ends["send"].get(key(record), (None, None))
                found.append(_not_received(rank, record, sent, ever, failed))
            elif record.op == "send" and key(record) not in ends["recv"]:
                stuck = failed and record is records[-1]
                if stuck or not failed or record.done is None:
                    found.append(_not_taken(rank, record, ever, stuck))
    return [event for event in found if event]


def _different_calls(records: dict[int, Record]) -> Event:
    alike: dict[str, list[int]] = {}
    for rank in sorted(records):
        alike.setdefault(records[rank].call, []).append(rank)
    said = [
        f"{name_ranks(who)} {'calls' if len(who) == 1 else 'call'} {call}"
        for call, who in alike.items()
    ]
    status = {rank: f"calls {record.call}" for rank, record in records.items()}
    return Event("differ", f"the ranks disagree: {', '.join(said)}", records, status=status)


def _incomplete_call(records: dict[int, Record], ever: str) -> Event:
    first, ranks = next(iter(records.values())), sorted(records)
    absent = [rank for rank in first.ranks if rank not in records]
    wait = "waits" if len(ranks) == 1 else "wait"
    never = "never calls it" if len(absent) == 1 else "never call it"
    status = dict.fromkeys(absent, "never calls it") | dict.fromkeys(ranks, f"waits here {ever}")
    text = f"{name_ranks(ranks)} {wait} {ever} in {first.call} for {name_ranks(absent)}"
    return Event("stuck", f"{text}, which {never}", records, status=status)


def _not_received(rank: int, record: Record, sent: Record | None, ever: str, failed: bool):
    """Make the event of a receive that never ended, with the reason; None if it was under way.

    sent: the record of its send, if there was one. ever: "for ever" or "in vain". failed: the run
    raised an error.
    """
    peer, waits = record.peer, f"waits here {ever}"
    source = "any rank" if peer is None else f"rank {peer}"
    kind, status, text = "lost", {rank: waits}, f"rank {rank} {waits}: "
    if sent is not None and sent.fingerprint != record.fingerprint:
        ours, theirs = _shape(record), _shape(sent)
        kind, status = "differ", {peer: f"sends {theirs}", rank: f"expects {ours}"}
        sends = f"rank {peer} sends {theirs} to rank {rank}"
        text = f"the ranks disagree: {sends}, which expects {ours}"
    elif not failed:
        text = f"rank {rank} asked for a message from {source} and never waited for it"
        status = {rank: "never waits for it"}
    elif sent is None:
        kind, text = "stuck", f"{text}no message comes from {source}"
    elif sent.dropped:
        text += f"rank {peer} never waited for its send, and the message was dropped"
    else:
        return None
    return Event(kind, text, {rank: record}, peer, rank, status)


def _not_taken(rank: int, record: Record, ever: str, stuck: bool) -> Event:
    message, peer = _message(record, record.values), record.peer
    if stuck:
        text = f"rank {rank} waits here {ever}: rank {peer} never receives its {message}"
        return Event("stuck", text, {rank: record}, rank, peer, {rank: f"waits here {ever}"})
    text = f"rank {peer} never receives {message} from rank {rank}"
    return Event("lost", text, {rank: record}, rank, peer, {peer: "never receives"})
