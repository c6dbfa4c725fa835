"""Turn a run's records into a list of events: causes come before effects, failures come last.

A record is one rank's call, with its times and, if kept, the elements of its tensors, which are
called its numbers. An event is one step of the whole run. A message gives two: the send, from the
sender's record, and the receive, from the receiver's. A collective call gives one, from the records
of all its ranks. A rank that fails (it raises an error, exits or is killed) gives one, and so does
a call that didn't succeed, such as a receive whose message never came.

Times of different ranks are never compared: they only order what one rank does. So two runs in
which each rank does the same in the same order are replayed in the same order.
"""

import contextlib
from collections import Counter
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter

from ..runtime.board import MESSAGES, SLOTS, Record, unfitting
from ..runtime.errors import HangError, LaunchError
from ..tools.units import count, name_ranks, numbers

RECEIVE, SEND, ENTER, LEAVE = range(4)  # the order of events within a round


@dataclass
class Event:
    """One step of a replayed run, such as a message that leaves, or a collective call of all ranks.

    kind: "send" or "receive" of one message; "meet", a collective call of all its ranks; "differ",
        ranks made calls that don't match; "stuck", a rank waits in vain for a message, a receiver,
        or other ranks in a collective; "lost", a message that is never received, or a receive that
        is never waited for; "failed", a rank raised an error, exited or was killed. Only
        `film.hop_by_hop` makes "hop", all messages that can travel at the same time, since none of
        them waits for another, and "end", the state after the last hop.
    text: what happens, in words.
    records: {rank: its record of the call}. A "receive" has the records of both ends, if both are
        known. A message that went wrong has one: that of the receive or, if there is none, of the
        send. A collective that went wrong has those of the ranks that called it. A "hop", in which
        a rank may send several messages, has each sender's last send; "failed" and "end" have {}.
    rank, peer: the sender and the receiver, for an event of one message: "send", "receive", "lost",
        and a "differ" or "stuck" that isn't about a collective. The sender is None if any rank may
        send. "failed" has the `rank` that failed. Otherwise both are None.
    status: {rank: what is wrong with it, in words}; empty if nothing is.
    change: for a "meet" that moves numbers, {rank: (before, after, owners)}; otherwise {}. `before`
        and `after` are the lists of numbers that the rank passed in and got. Each is None if there
        are no such numbers, or if they weren't kept. `owners` lists the owner of each number in
        `after`: the rank that it came from, a frozenset of ranks for a reduction, None if unknown.
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
    """Return a tuple that identifies the message or collective call that a record belongs to.

    Both ends of a message give the same, (channel, index), and so do all members of a collective,
    (channel, index, ranks). The index is the number of earlier calls on the channel. For the group
    that torch names "1", in the first world that a script makes, channels are "1#1" (collectives),
    "new 1#1" (the `new_group` that makes it) and "1#1 2>3:7" (messages from rank 2 to rank 3 of the
    world with tag 7). The ranks, the group's members, tell groups of one name apart.
    """
    if record.op in MESSAGES:
        return record.channel, record.seq
    return record.channel, record.seq, record.ranks


def replay(run) -> list[Event]:
    """Return the events of `run` in order: what happened, then what went wrong.

    A receive comes after its send, and a collective after all its ranks have reached it. Otherwise
    events are in the order of rounds. In a round each rank takes one step, its next, unless that
    must wait for another rank. A step is a message sent, a message received (not the call of its
    `irecv`), or a call of a collective. The events of a round are its receives, whose sends are in
    earlier rounds, then its sends, both by rank, then the collectives whose last rank calls now.

    run: a Run or a LaunchError, whose `wire` has, for each rank, the list of its calls' records.
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
    """Return the steps of one rank in order, as a list of (step, record of the call).

    A step is SEND, RECEIVE, ENTER or LEAVE. A message is sent when the call is made, and received
    when it has arrived. ENTER is the call of a collective. LEAVE, after which the rank's next step
    comes later than every member's ENTER, is where it calls wait() or, if it never does, where the
    collective is complete.

    records: those of the rank's calls. A receive that never ended gives no step. A collective that
        never ended gives ENTER, and LEAVE only if the rank called wait().
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
    """Return the events of all sends, receives that ended, and collectives that took place.

    The order is that of rounds. In a round each rank takes its next step if what it waits for has
    come in an earlier one: a message's send, or all members' calls of a collective. So a round is
    the logical time of Lamport 1978. Events that wait for each other in a cycle, and those after
    them, are left out: there can be some if a rank went on after a wait() that timed out.

    wire: for each rank, the records of its calls.
    ends: {"send" or "recv": {message: (rank, its record)}}.
    calls: {collective call: {rank: its record}}. Messages and calls are identified by tuples, such
        as (channel, index), which `key` makes from a record, and which all their ranks share.
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
    """Return whether a collective took place: all ranks of its group made the same call.

    A call needn't have ended on every rank, but a `new_group` must: it can fail while it connects
    the ranks. In an all_to_all, each rank must expect as many elements as are sent to it.
    records: {rank: its record of the call, which also has the ranks of the group}.
    """
    first = next(iter(records.values()))
    if first.op == "new_group" and any(record.done is None for record in records.values()):
        return False
    return len(records) == len(first.ranks) and _alike(records) and not _wrong_sizes(records)


def _alike(records: dict[int, Record]) -> bool:
    """Return whether calls, {rank: record}, agree in operation, dtype, reduction, root and size.

    The size doesn't count where ranks may bring different ones, as in an all_to_all.
    """
    return len({record.fingerprint for record in records.values()}) == 1


def _shape(record: Record) -> str:
    """Return the number of elements and the dtype of a message as text, such as "2 float32".

    record: that of a send or a receive, which has a single tensor.
    """
    return record.detail.partition(",")[0]


def _message(record: Record, values: list | None) -> str:
    """Return a message's numbers as text: "[1, 10]", or "2 float32" if `values` is None."""
    return _shape(record) if values is None else numbers(values)


def _received(rank: int, record: Record, sent: tuple[int, Record] | None) -> Event:
    """Return the event of a message that `rank` received.

    record: the record of the receive.
    sent: (sender, record of the send), which is put into the event's `records`; None if there is no
        record of the send, as in a failed run, of which only the last 256 calls of a rank are kept.
    """
    text = f"rank {rank} receives {_message(record, record.result)} from rank {record.peer}"
    records = {rank: record}
    if sent and sent[0] != rank:
        records[sent[0]] = sent[1]
    return Event("receive", text, records, record.peer, rank)


def _met(records: dict[int, Record]) -> Event:
    """Return the event of a completed collective call. records: {rank: its record of the call}."""
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
    """Return what a collective call did to each rank's numbers, to be drawn.

    It is {rank: (before, after, owners)}: the numbers that the rank passed in, those that it got,
    and the owner of each number that it got, as flat lists. An owner is the rank that a number came
    from, a frozenset of ranks for a reduction over them, or None if unknown. `before` and `after`
    are None if they weren't kept. On ranks other than the root, `before` is also None for a
    broadcast or scatter, `after` for a reduce or gather. If `after` is None, `owners` is [].

    records: {rank: its record of the call}, of all ranks of the group.
    """
    before, found = {}, {}
    for rank, record in records.items():
        idle = record.op in ("broadcast", "scatter") and rank != record.peer
        before[rank] = None if idle else record.values
    for rank, record in records.items():
        idle = record.op in ("reduce", "gather") and rank != record.peer
        after, owners = None if idle else record.result, []
        for place, source in enumerate(sorted(records)):
            if record.op == "all_to_all":
                owners += [source] * record.splits[1][place]
            elif record.op in ("all_gather", "gather"):
                owners += [source] * len(before[source] or ())
        if record.op in ("broadcast", "scatter"):
            owners = [record.peer] * len(after or ())
        if record.op in ("all_reduce", "reduce", "reduce_scatter"):
            owners = [frozenset(records)] * len(after or ())
        if len(owners) != len(after or ()):
            owners = [None] * len(after or ())
        found[rank] = before[rank], after, owners
    return found


def _said(rows: dict[int, list | None], world_size: int | None) -> str:
    """Return in words which numbers ranks have: "[1] on every rank", or "rank 0 [1], rank 1 [2]".

    The second form leaves out ranks without numbers; if none has any, the text is "…".
    rows: {rank: its numbers or None}. world_size: the number of ranks in `rows`, if these are all
        of the world; otherwise None, and the first form names them: "[1] on ranks 0 and 2".
    """
    first = next(iter(rows.values()))
    if len(rows) > 1 and first and all(row == first for row in rows.values()):
        return f"{numbers(first)} on {name_ranks(rows, world_size)}"
    said = [f"rank {rank} {numbers(row)}" for rank, row in rows.items() if row]
    return ", ".join(said) or "…"


# What went wrong


def _failures(run, ends: dict, calls: dict) -> list[Event]:
    """Return the events of what went wrong in a run: an error, and calls that didn't succeed.

    "differ" means that calls don't match, "stuck" that a rank waits in vain, "lost" that a message
    is never received, or a receive never waited for. "Left out" applies only to a failed launch,
    when `run` is a LaunchError: it stopped ranks amid calls that would have succeeded, and only the
    last 256 calls of each rank are known.

    - A rank's error: "failed".
    - A collective whose calls, or sizes in an all_to_all, don't match: "differ".
    - A collective that a member didn't call, or a new_group that didn't end on every rank: "stuck".
      Left out if it ended on some rank, and a member without the call has 256 known calls: it may
      have made this one before them.
    - A receive that never ended: "differ" if its message has another size or dtype. Otherwise, in a
      Run, "lost": the rank never waited for it. In a failed launch it is left out if the rank
      didn't wait for it yet, or if the message was on its way or may have been
      (`_may_have_been_sent`). The rest is "stuck" if no send is known, and "lost" if one is: the
      sender deleted the send's handle before waiting, which dropped the message.
    - A send without a receive call: left out if it is complete, since the receive may only have
      been due later. Otherwise "stuck" if the launch failed and the sender waits in it, unless the
      sender is the rank that failed; otherwise "lost".

    run: a Run or a LaunchError, whose `wire` has the records of each rank's calls.
    ends: {"send" or "recv": {message: (rank, its record)}}.
    calls: {collective call: {rank: its record}}. Messages and calls are identified by tuples, such
        as (channel, index), which `key` makes from a record, and which all their ranks share.
    """
    failed = isinstance(run, LaunchError)
    ever = "for ever" if isinstance(run, HangError) else "in vain"
    # Of a failed launch, only the last calls are known of these ranks.
    cut = {rank for rank, records in enumerate(run.wire) if failed and len(records) >= SLOTS}
    found = []
    if getattr(run, "rank", None) is not None:
        text = f"rank {run.rank} fails, as the error says"
        found.append(Event("failed", text, {}, run.rank, status={run.rank: "failed"}))
    for records in calls.values():
        if not _alike(records):
            found.append(_different_calls(records))
        elif wrong := _wrong_sizes(records):
            found.append(wrong)
        elif not _complete(records):
            absent = set(next(iter(records.values())).ranks).difference(records)
            if cut.isdisjoint(absent) or all(record.done is None for record in records.values()):
                found.append(_incomplete_call(records, ever))
    for rank, records in enumerate(run.wire):
        for record in records:
            if record.op == "recv" and record.done is None:
                _, sent = ends["send"].get(key(record), (None, None))
                if sent is None and _may_have_been_sent(run, ends, rank, record, cut):
                    continue
                is_last = isinstance(run, HangError) and record is records[-1]
                early = failed and not _waits_in(record, is_last)
                found.append(_not_received(rank, record, sent, ever, failed, early))
            elif record.op == "send" and key(record) not in ends["recv"]:
                raised = getattr(run, "rank", None) == rank
                if not failed or record.done is None:
                    stuck = failed and _waits_in(record, False) and not raised
                    found.append(_not_taken(rank, record, ever, stuck))
    return [event for event in found if event]


def _waits_in(record: Record, is_last: bool) -> bool:
    """Return whether a rank waits in this call, as far as is known, or went on after starting it.

    record: of a send or receive that never ended. The rank waits if it has called wait(); it is
        taken to wait where that isn't known: on a GPU, after get_future(), and if the call
        `is_last`, the last in a hung run: it may ask again and again whether that has ended.
    """
    return record.waited is not None or record.by_future or record.on_stream or is_last


def _may_have_been_sent(run, ends: dict, rank: int, record: Record, cut: set[int]) -> bool:
    """Return whether an open receive's message may have been sent, although no send is known.

    The send may be older than the sender's known calls. That needs a sender in `cut`, none of whose
    known sends on the channel (those to `rank` in this group with this tag) is of an earlier
    message: the send would be known as well. After a HangError, one of a later message must be
    known: otherwise `rank` is taken to wait for a message that never comes. For a Run return False:
    there an open receive was never waited for, which is an event whether it was sent or not.

    A receive from any rank doesn't show its sender until it ends. So for it return True if another
    member of the group is in `cut`, or if a known send to `rank` has no known receive call, since
    that may be this one. After a HangError return False, for the reason above.

    run: a Run or a LaunchError, whose `wire` has the records of each rank's calls.
    ends: only the keys of ends["recv"] are used: messages with a known receive call (see `key`).
    rank, record: the receiver, and its record of the call. cut: the ranks of which only the last
    256 calls are known.
    """
    hung = isinstance(run, HangError)
    if record.peer is not None:
        later = [r.seq > record.seq for r in run.wire[record.peer] if r.channel == record.channel]
        return record.peer in cut and (any(later) if hung else all(later))
    if hung or not isinstance(run, LaunchError):
        return False
    if not cut.isdisjoint(other for other in record.ranks if other != rank):
        return True
    sends = (r for records in run.wire for r in records if r.op == "send" and r.peer == rank)
    return any(key(send) not in ends["recv"] for send in sends)


def _different_calls(records: dict[int, Record]) -> Event:
    """Return the event in which ranks of one group made different calls, not all the same one.

    records: {rank: the record of its call}, of those members whose call is known.
    """
    alike: dict[str, list[int]] = {}
    for rank in sorted(records):
        alike.setdefault(records[rank].call, []).append(rank)
    said = [
        f"{name_ranks(who)} {'calls' if len(who) == 1 else 'call'} {call}"
        for call, who in alike.items()
    ]
    status = {rank: f"calls {record.call}" for rank, record in records.items()}
    return Event("differ", f"the ranks disagree: {', '.join(said)}", records, status=status)


def _wrong_sizes(records: dict[int, Record]) -> Event | None:
    """Return the event of an all_to_all that fails for its sizes; None for any other call.

    The sizes are the numbers of elements to send to each rank, and those to receive from each. They
    are wrong if a receiver expects another number than is sent to it, or if a rank gives more or
    fewer sizes than the group has ranks. records: {rank: its record of the call}.
    """
    refused, said, status = {}, [], {}
    for rank, record in sorted(records.items()):
        lengths = {len(sizes) for sizes in record.splits or ()}
        if lengths - {len(record.ranks)}:
            to, by = map(len, record.splits)
            sizes = f"{count(to, 'size')} to send, {count(by, 'size')} to receive"
            refused.setdefault(f"{sizes}, in a group of {len(record.ranks)}", []).append(rank)
            status[rank] = "is refused"
    for sizes, ranks in refused.items():
        said.append(f"PyTorch refuses the all_to_all of {name_ranks(ranks)}: {sizes}")
    for (sender, receiver), (sent, expected) in unfitting(records).items():
        what = f"rank {sender} sends {sent} to rank {receiver}, which expects {expected}"
        said.append(f"the ranks disagree: {what}" if not said else what)
        status |= {sender: "sizes don't fit", receiver: "sizes don't fit"}
    return Event("differ", "; ".join(said), records, status=status) if said else None


def _incomplete_call(records: dict[int, Record], ever: str) -> Event:
    """Return the event of a collective call that some members of its group never made.

    It may also be a `new_group` call that all members made and that didn't end on every rank.
    records: {rank: its record}, of the ranks that made the call. ever: how the text goes on after
        "rank 0 waits": "for ever" if the ranks hung, "in vain" otherwise.
    """
    first, ranks = next(iter(records.values())), sorted(records)
    absent = [rank for rank in first.ranks if rank not in records]
    wait = "waits" if len(ranks) == 1 else "wait"
    never = "never calls it" if len(absent) == 1 else "never call it"
    status = dict.fromkeys(absent, "never calls it") | dict.fromkeys(ranks, f"waits here {ever}")
    text = f"{name_ranks(ranks)} {wait} {ever} in {first.call}"
    text += f" for {name_ranks(absent)}, which {never}" if absent else ""
    return Event("stuck", text, records, status=status)


def _not_received(
    rank: int, record: Record, sent: Record | None, ever: str, failed: bool, early: bool
):
    """Return the event of a receive whose record has no end; its text gives the reason.

    It is a "differ" if the message that was sent has another size or dtype. Otherwise return None
    if the launch failed before the rank waited for it (`early`), or while it was on its way.
    rank, record: the receiver, and its record. sent: the record of the matching send, or None.
    ever: how the rank waits, for the text: "for ever" if the ranks hung, "in vain" otherwise.
    failed: whether the launch raised an error, such as a HangError; if not, the rank never called
        wait() on its irecv. early: whether the error came before the rank waited for the message.
    """
    peer, waits = record.peer, f"waits here {ever}"
    source = "any rank" if peer is None else f"rank {peer}"
    kind, status, text = "lost", {rank: waits}, f"rank {rank} {waits}: "
    if sent is not None and record.fingerprint not in ("", sent.fingerprint):
        ours, theirs = _shape(record), _shape(sent)
        kind, status = "differ", {peer: f"sends {theirs}", rank: f"expects {ours}"}
        sends = f"rank {peer} sends {theirs} to rank {rank}"
        text = f"the ranks disagree: {sends}, which expects {ours}"
    elif early:
        return None
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
    """Return the event of a message that was sent and never received.

    rank, record: the sender, and its record of the call.
    stuck: whether the sender is still waiting in this call; otherwise only the message is lost.
    ever: how a stuck sender waits, for the text: "for ever" if the ranks hung, or "in vain".
    """
    message, peer = _message(record, record.values), record.peer
    if stuck:
        text = f"rank {rank} waits here {ever}: rank {peer} never receives its {message}"
        return Event("stuck", text, {rank: record}, rank, peer, {rank: f"waits here {ever}"})
    text = f"rank {peer} never receives {message} from rank {rank}"
    return Event("lost", text, {rank: record}, rank, peer, {peer: "never receives"})
