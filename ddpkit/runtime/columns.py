"""Tabulate the ranks' last calls side by side, with a mark where they first differ.

A call is a collective call, a send, a receive, or the making of a group (new_group). A look holds
each rank's last calls, as read from the board, the file that all ranks share. The board keeps each
rank's last 256 and has forgotten earlier ones. A channel is a group, or the messages with one tag
from one member to another. The tables become part of the report of a hang.

The argument `texts` of several functions is {rank: {number: text}}, with a text for each call that
the board still has. Numbers count from 1. In a table of one channel they count a rank's calls on
that channel, in other tables all its calls but finished new_groups, which have no text either: a
rank makes only its own groups, so with these the numbers of equal calls would differ between ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

from ..tools.units import COLUMNS, name_group, name_some
from .board import MESSAGES, Record
from .look import Look

LAST_CALLS = 5  # rows of a table
OTHER_CALLS = 2  # listed of each rank, from other channels than that of the table

Columns = dict[int, dict[int, str]]  # {rank: {number of a call, from 1: its text}}


def last_calls(
    look: Look, ranks: Sequence[int], guilty: Record | None, stuck: bool
) -> Iterator[str]:
    """Yield the lines of a report's table of last calls, with a mark (≠) where ranks first differ.

    The table holds the calls on the channel of `guilty`. Collectives differ in operation, size and
    the like, a message's send and receive in size or dtype. Below the table stand each rank's last
    two calls on other channels, which may rightly differ. If `guilty` is None, a receive from any
    sender that has got no message, or a call in which fewer than two of `ranks` take part, the
    calls on all channels are shown instead: in a table, with ≠ only if `stuck`, or as a list if a
    rank has more than 5 and the ranks' calls can't be compared.
    ranks: the ranks to show. guilty: the record of the call to blame for the hang, or None.
    stuck: True if a rank that lacks a call will never make it, so that the lack counts as a
        difference; False if the rank may only be late.
    """
    members = [rank for rank in ranks if guilty and rank in guilty.ranks]
    if len(members) < 2 or guilty.channel.endswith("?"):  # "?": a receive from any rank
        yield from _calls_of_all_groups(look, ranks, stuck)
        return
    texts: Columns = {}
    fingerprints: Columns = {}
    for rank in members:
        here = [record for record in look.records[rank] if record.channel == guilty.channel]
        texts[rank] = {record.seq + 1: _without_group(record) for record in here}
        fingerprints[rank] = {r.seq + 1: r.fingerprint or guilty.fingerprint for r in here}
    lost = [r for r in members if not texts[r] and look.board.calls(r) > len(look.records[r])]
    if lost:  # the board may have forgotten their calls here: earlier ones can't be compared
        for column in (*texts.values(), *fingerprints.values()):
            for number in [number for number in column if number <= guilty.seq]:
                del column[number]
    others: dict[str, list[int]] = {}
    for rank in ranks:
        records = (record for record in look.records[rank] if record.channel != guilty.channel)
        rest = [record.call for record in records if record.op != "new_group"]
        if rest:
            others.setdefault(", ".join(rest[-OTHER_CALLS:]), []).append(rank)
    title = _title(guilty) if others else "calls"
    differs = _first_difference(fingerprints, stuck)
    yield from _table(title, texts, differs, len(look.ranks))
    if others:
        yield "Other calls, the last two of each:"
    for calls, who in others.items():
        yield f"{name_some(who, len(look.ranks))}: {calls}"


def _title(call: Record) -> str:
    """Return what a table of one channel lists, for its title, such as 'calls in group [0, 2]'.

    In the world it is 'calls in the world', for messages 'messages from rank 0 to rank 1', without
    the tag. call: any call in the table.
    """
    if call.op in MESSAGES:
        return f"messages from rank {call.ranks[0]} to rank {call.ranks[1]}"
    return f"calls in {'the world' if call.group == 'world' else call.group}"


def _without_group(record: Record) -> str:
    """Return the text of a call without the group, since the whole table is of one group.

    For example 'all_reduce(8 float32, sum)', where `record.call` ends in ', group [0, 1])'. The
    group is left out if it equals `record.ranks`, its members. For a message `record.ranks` is only
    (sender, receiver): the group stays, unless it has just these two members, in this order.
    """
    group = name_group(record.ranks)
    detail = record.detail.removesuffix(group).removesuffix(", ")
    return f"{record.op}({detail})"


def _calls_of_all_groups(look: Look, ranks: Sequence[int], stuck: bool) -> Iterator[str]:
    """Yield the lines that show the last calls of `ranks` on all channels.

    If the n-th calls of all `ranks` should be equal (`_comparable`), this is a table of the last 5
    (`LAST_CALLS`) or, if `stuck` and they differ, of 5 around the first difference, with a mark.
    Otherwise calls may rightly differ, and the table has no mark; if a rank has more than 5 calls,
    a list of each rank's last 5 comes instead.
    ranks: those to show; the look holds the calls of all.
    stuck: True if a rank that lacks a call will never make it: that is a difference. False if the
        rank may only be late. Then nothing is marked: calls that differ on one channel are in a
        table of that (`last_calls`), and to use channels in another order needn't be wrong.
    """
    texts = {rank: numbered_calls(look, rank) for rank in ranks}
    if _comparable(look, ranks):
        alike = {rank: numbered_calls(look, rank, _must_agree) for rank in ranks}
        differs = _first_difference(alike, stuck) if stuck else None
        yield from _table("calls", texts, differs, len(look.ranks))
    elif max(len(column) for column in texts.values()) <= LAST_CALLS:
        yield from _table("calls", texts, None, len(look.ranks))
    else:  # a number says nothing about another rank's call of the same number
        yield "Their last calls:"
        yield from _own_calls(texts, len(look.ranks))


def _comparable(look: Look, ranks: Sequence[int]) -> bool:
    """Return whether the n-th calls of `ranks` can be compared, since they ought to be the same.

    There are two conditions, which leave new_groups aside. All calls that the board has of these
    ranks are collectives of groups to which all of them belong. And if the board has forgotten any
    of their calls, all these ranks still have calls on the same channels: how many calls a rank has
    made on a channel is known only from one that is left on it. Otherwise its numbers are too low.
    """
    channels = set()
    forgotten = 0
    for rank in ranks:
        records = [record for record in look.records[rank] if record.op != "new_group"]
        for record in records:
            if record.op in MESSAGES or not set(ranks).issubset(record.ranks):
                return False
        channels.add(frozenset(record.channel for record in records))
        forgotten += look.board.calls(rank) - len(look.records[rank])
    return forgotten == 0 or len(channels) == 1


def _own_calls(texts: Columns, world_size: int) -> Iterator[str]:
    """Yield a line for each set of ranks with equal calls: 'rank 2: 7 barrier(), 8 barrier()'.

    Compared and shown are the last 5 (`LAST_CALLS`) of each rank, every call after its number, or
    'no call' for a rank without calls in `texts`.
    world_size: the number of all ranks, so that a line can begin 'all but rank 3'.
    """
    ranks_by_calls: dict[str, list[int]] = {}
    for rank, column in texts.items():
        calls = [f"{number} {call}" for number, call in column.items()]
        ranks_by_calls.setdefault(", ".join(calls[-LAST_CALLS:]) or "no call", []).append(rank)
    for calls, ranks in ranks_by_calls.items():
        yield f"{name_some(ranks, world_size)}: {calls}"


def _oldest(texts: Columns) -> int:
    """Return the lowest number from which on `texts` lacks no call that a rank has made."""
    return max(min(column, default=1) for column in texts.values())


def _newest(texts: Columns) -> int:
    """Return the highest number of a call in `texts`, over all ranks; 0 if there are no calls."""
    return max((number for column in texts.values() for number in column), default=0)


def _first_difference(texts: Columns, stuck: bool) -> int | None:
    """Return the number of the first call whose text differs between ranks, or None if none does.

    texts: see the module; here they hold only what must be the same on all ranks. Only numbers from
        which on the board has forgotten no rank's call are compared (`_oldest`).
    stuck: whether a rank that lacks a call differs from those that made it. False: it doesn't,
        since it may only be late.
    """
    for number in range(_oldest(texts), _newest(texts) + 1):
        different = {column.get(number) for column in texts.values()}
        if not stuck:
            different.discard(None)  # that rank may only be late
        if len(different) > 1:
            return number
    return None


def _table(what: str, texts: Columns, differs: int | None, world_size: int) -> Iterator[str]:
    """Yield the lines of a table: a row for each call, a column for ranks that made the same calls.

    There are up to 5 rows (`LAST_CALLS`): without a mark, the last calls; with one, its call, the 3
    before it and the next or, near an end, the nearest 5. A call that the board has forgotten of
    one rank has no row, even if it is there of others. '-' means that a rank hasn't made the call.
    If the table is wider than 72 characters, each of its columns is written as a line instead.
    what: what it lists, for the title, such as 'calls in the world'.
    differs: the number of the call to mark with ≠, or None.
    world_size: the number of all ranks, so that those of a column can be called 'all but rank 3'.
    """
    last = _newest(texts)
    if last == 0:
        yield "No rank has made a call."
        return
    first = max(_oldest(texts), min((differs or last) + 2, last + 1) - LAST_CALLS)
    numbers = range(first, min(first + LAST_CALLS, last + 1))
    which = f"Their {what}" if first == 1 else f"Their last {what}"
    mark = " (≠: here they differ)" if differs in numbers else ""
    yield f"{which}{mark}:"
    ranks_by_calls: dict[tuple, list[int]] = {}
    for rank, column in texts.items():
        calls = tuple(column.get(number, "-") for number in numbers)
        ranks_by_calls.setdefault(calls, []).append(rank)
    labels = [f"{number} ≠" if number == differs else f"{number}" for number in numbers]
    columns = [("call", *labels)]
    for calls, ranks in ranks_by_calls.items():
        columns.append((name_some(ranks, world_size), *calls))
    widths = [max(map(len, column)) + 2 for column in columns]
    if sum(widths) <= COLUMNS:
        for row in zip(*columns, strict=True):
            yield "".join(map(str.ljust, row, widths)).rstrip()
    else:  # a line for each column instead
        for ranks, *calls in columns[1:]:
            numbered = (" ".join(pair) for pair in zip(labels, calls, strict=True))
            yield f"{ranks}: {', '.join(numbered)}"


def _must_agree(record: Record) -> str:
    """Return what ranks must agree in, to compare it, such as "world all_reduce 8 float32 sum".

    The record is of a collective or an unfinished new_group, of which the whole call is compared.
    """
    return f"{record.group} {record.fingerprint or record.call}"


def numbered_calls(
    look: Look, rank: int, say: Callable[[Record], str] = attrgetter("call")
) -> dict[int, str]:
    """Return the texts of the calls of `rank` that are still on the board: {number, from 1: text}.

    A rank's calls are numbered in the order in which it made them; finished new_groups are left out
    (see the module). Calls that the board has forgotten count as well: after 40 of them, the first
    text has number 41. How many are forgotten is known for each channel from the number of the
    oldest call that is left there. Calls of a channel of which none is left aren't counted: then
    the numbers are too low, and may not match those of other ranks.
    say: returns a call's text.
    """
    records = [r for r in look.records[rank] if r.op != "new_group" or r.done is None]
    before = {record.channel: record.seq for record in reversed(records)}
    forgotten = look.board.calls(rank) - len(look.records[rank])  # with new_groups
    return dict(enumerate(map(say, records), start=min(forgotten, sum(before.values())) + 1))
