"""Build the animation of a recorded run: every rank's numbers after each event, and their owners.

The animation is called a film, and is a list of frames, which `player` and `circle` draw. An event
is a message sent or received, a collective call, or what went wrong. The owner of a number is the
rank that it came from. Owners follow from the records of the ranks' calls: until anything arrives a
rank's numbers are its own, and a message brings its owners along to the elements where it arrives.
If a number changes in place after that, the rank may have added numbers that had arrived: if these
and its old value add up to the new one, all their owners own it; otherwise its owner is unknown.
"""

import copy
import itertools
import math
from collections.abc import Container
from dataclasses import dataclass, field

from ..runtime.board import Record
from ..tools.hops import hop_numbers
from .figures import flat
from .replay import Event, key

IN_PLACE = ("all_reduce", "broadcast", "reduce")

# The rank that a number comes from, or the ranks if it is a sum; None if unknown.
Owner = int | frozenset[int] | None
# A buffer's elements: for each its value, None if not known yet, and its owner.
Cells = list[tuple[float | None, Owner]]


def all_of_sum(total: float, cells: Cells) -> frozenset[int] | None:
    """Return the ranks whose numbers are added up in `total`, if it is the sum of `cells`.

    Return None if it isn't, or if a value or an owner is unknown. A relative difference of 1e-6 is
    allowed, because of rounding.

    cells: (value, owner) of each number; the owner is the rank that it came from, a frozenset of
        ranks if it is a sum over them, or None if unknown.
    """
    values, ranks = [value for value, _ in cells], set()
    if None in values or not math.isclose(sum(values), total, rel_tol=1e-6):
        return None
    for _, owner in cells:
        if owner is None:
            return None
        ranks |= owner if isinstance(owner, frozenset) else {owner}
    return frozenset(ranks)


@dataclass
class Frame:
    """One picture of an animation: an event of the run, and every rank's elements just after it.

    The owner of an element is the rank that contributed it: an int, a frozenset of ranks if it
    combines several, or None if unknown. A hop is a set of messages that can travel together.

    event: the `replay.Event`: a message, a collective call, a hop, the end, or what went wrong.
    memory: for each rank, {buffer: [(value, owner) of each element]}. A buffer is the storage of a
        tensor, and its key is the storage's number in the rank's records (0, 1, ...). A result of a
        collective that is in none of these has the operation's name, such as "all_gather", as its
        key; the next such result of an all_gather replaces it.
    flying: (sender, receiver) of each message in flight other than one that the event sends.
    status: {rank: what is wrong with it, in words}, as known at that point.
    wrong: the events up to this one in which something went wrong: those of kind "differ", "stuck",
        "lost" or "failed".
    marked: {rank: (buffer, range of indices)} of the elements that the event's message moves, at
        its sender if it is sent, at its receiver if it is received; of a hop, at each sender, for
        its last message. {} for other events, and if no buffer was kept.
    owners: the owner of each element of the event's message; [] if its values weren't kept, and for
        events that aren't a single message.
    sent: if the frame shows all messages of a hop, the frames of these messages; otherwise empty.
    holdings: for each rank, its `Holdings` (buffers, and the owners of the numbers in them) at the
        end; only in the last frame that `film` returns.
    """

    event: Event
    memory: list[dict[object, Cells]]  # by rank and buffer
    flying: list[tuple[int, int]] = field(default_factory=list)  # other messages: (from, to)
    status: dict[int, str] = field(default_factory=dict)
    wrong: list[Event] = field(default_factory=list)  # so far
    marked: dict[int, tuple] = field(default_factory=dict)  # by rank: buffer, range of its elements
    owners: list = field(default_factory=list)  # of the message
    sent: list["Frame"] = field(default_factory=list)  # of a hop: the frames of its messages
    holdings: list["Holdings"] = field(default_factory=list)  # after the last frame


class Holdings:
    """The buffers of one rank, each number with its owner, kept up to date from record to record.

    The owner of a number is the rank that it came from; a frozenset if it combines several.

    rank: the rank. records: the records of all its calls, in order. If these begin with sends, the
        buffers of these sends are filled in at once: pictures of other ranks' earlier events show
        them. Then the caller passes each record to `look` (a send, or what went wrong), `take` (a
        receive) or `share` (a collective).
    buffers: {buffer: [(value, owner) of each element]}; an unknown value is None, and so is an
        unknown owner. The key of a buffer is the number of its storage in the rank's records or,
        for a collective's result outside these storages, the operation's name ("all_gather").
    heard: whether it has got a message or a collective's result; before, its numbers are its own.
    arrived: a list of (buffer, [(value, owner) of each number]), an entry for each message that
        came since a number of the rank last changed; it may add them to its own numbers later.
    """

    def __init__(self, rank: int, records: list[Record]):
        self.rank, self.buffers, self.heard = rank, {}, False
        self.arrived: list[tuple[object, Cells]] = []  # since a number was last seen to change
        self._coming = [r for r in records if r.op == "recv" and r.memory is not None]
        for record in itertools.takewhile(lambda record: record.op == "send", records):
            self.look(record, record.issued)  # its contents before anything arrives

    def look(self, record: Record, moment: float) -> None:
        """Update a buffer to the contents that a record shows, except where a message may arrive.

        record: the record of one of this rank's calls. Its `memory` is (buffer, offset of the
            call's tensor, all numbers in the buffer); if `memory` is None, nothing happens.
        moment: the `time.perf_counter()` of this rank at which the contents were read. Elements
            that a receive may have been writing by then are left as they are.

        If a buffer is first seen in a receive, all its values become unknown (None), since it may
        have been made by torch.empty. `take`, which calls this, then fills in the message's.
        """
        if record.memory is None:
            return
        which, _, contents = record.memory
        known, writer = self.buffers.get(which), None if self.heard else self.rank
        if known is None or len(known) != len(contents):
            owner = self.rank if record.op == "recv" else writer
            known = self.buffers[which] = [(None, owner)] * len(contents)
            if record.op == "recv":
                return
        arriving = [r for r in self._coming if r.memory[0] == which and r.issued < moment]
        hidden = set().union(*map(place, arriving))
        for at, (value, (before, owner)) in enumerate(zip(contents, known, strict=True)):
            if at not in hidden and before is None:
                known[at] = value, owner
        self.change(which, contents, hidden)

    def change(self, which: object, contents: list, hidden: Container[int] = ()) -> None:
        """Put `contents` into buffer `which`, and find the owners of each number that changed.

        The rank may have added numbers that it received: those of messages in `arrived` that came
        into other buffers. So the new value of the k-th number that changed is compared with sums.
        The first is its old value plus the k-th numbers of all messages that have as many numbers
        as changed here. Each of the others is its old value plus one received number: any number of
        any of the messages, at whatever position, in the order of arrival. The owners are those of
        all numbers in the first sum that is equal, if all are known. If there is no such sum, the
        owner is this rank if it has received nothing yet, otherwise unknown (None). Any change
        empties `arrived`.

        which: a key of `buffers`.
        contents: all numbers that the buffer holds now, as many as before.
        hidden: indices that a message is still being written into; these are not updated.
        """
        known = self.buffers[which]
        pairs = enumerate(zip(contents, known, strict=True))
        changed = [at for at, (now, (then, _)) in pairs if at not in hidden and _changed(now, then)]
        came = [cells for buffer, cells in self.arrived if buffer != which]
        for number, at in enumerate(changed):
            aligned = [cells[number] for cells in came if len(cells) == len(changed)]
            tries = [aligned, *([cell] for cells in came for cell in cells)]
            found = (all_of_sum(contents[at], [known[at], *cells]) for cells in tries if cells)
            owner = next(filter(None, found), None if self.heard else self.rank)
            known[at] = contents[at], owner
        if changed:
            self.arrived = []

    def take(self, record: Record, owners: list) -> None:
        """Put a message that arrived into its buffer, with the owners that it brings.

        record: the record of the receive call. If its `memory` is None, since values weren't kept
            or there were too many, only `heard` is set.
        owners: the owner of each number of the message; if the list is shorter than the message,
            the remaining owners are unknown.
        """
        self.heard = True
        if record.memory is None:
            return
        self.look(record, record.done)
        self._coming.remove(record)
        which, _, contents = record.memory
        values = record.result or contents[slice_of(record)]
        cells = list(itertools.zip_longest(values, owners[: len(values)]))
        self.buffers[which][slice_of(record)] = cells
        self.arrived.append((which, cells))

    def owners_of(self, record: Record) -> list:
        """Return the owner of each number in a message that this rank sends, in order.

        record: the record of the send call. If its `memory` is None (the buffer wasn't kept), the
            owner of every number is this rank until it has received anything, and None (unknown)
            from then on; [] is returned if its `values` weren't kept either.
        """
        if record.memory is None:
            return [None if self.heard else self.rank] * len(record.values or ())
        return [owner for _, owner in self.buffers[record.memory[0]][slice_of(record)]]

    def share(self, record: Record, after: list | None, owners: list) -> None:
        """Put the result of a collective call into this rank's buffer.

        An all_reduce, broadcast or reduce (`IN_PLACE`) of one tensor changes the tensor's part of a
        buffer: its record's `memory` says which part of which storage. Any other result, or one
        without `memory`, as of a storage of more than 64 elements, becomes a buffer whose key is
        the operation's name.

        record: the record of this rank's call.
        after: the numbers that the call gave the rank. If it is None or empty, nothing happens.
        owners: the owner of each of these numbers.
        """
        if not after:
            return
        self.heard = True
        in_place = record.op in IN_PLACE and record.memory is not None
        if not in_place or len(after) != len(place(record)):  # of several tensors at once
            self.buffers[record.op] = list(zip(after, owners, strict=True))
            return
        which, _, contents = record.memory
        known = self.buffers.get(which)
        if known is None or len(known) != len(contents):
            known = self.buffers[which] = [(value, self.rank) for value in contents]
        known[slice_of(record)] = zip(after, owners, strict=True)


def _changed(now, then) -> bool:
    """Return whether a number changed; one NaN counts as equal to another."""
    return now != then and not (now != now and then != then)  # one NaN is like another


def place(record: Record) -> range:
    """Return the indices of a call's numbers in the storage of its tensor: range(4, 6) for x[4:6].

    record: the call's record. Its `memory` must not be None: the launch had keep_values=True, and
        the storage at most 64 elements.
    """
    return range(record.memory[1], record.memory[1] + math.prod(record.shape))


def slice_of(record: Record) -> slice:
    """Return the slice of a call's numbers in its tensor's storage: slice(4, 6) for x[4:6].

    record: the call's record. Its `memory`, which has the list of all numbers in the storage that
        the slice selects from, must not be None.
    """
    return slice(place(record).start, place(record).stop)


def film(events: list[Event], wire: list[list[Record]]) -> list[Frame]:
    """Return a frame for each event of a run: a picture of every rank's numbers just after it.

    The last frame also gets `holdings`: for each rank an object that has its buffers at the end,
    from which `hop_by_hop` makes the picture of the end.

    events: what `replay.replay` made of a run, all of it or some, in its order.
    wire: for each rank, the records of its calls, in order. The numbers are known only if the
        launch had keep_values=True.
    """
    ranks = [Holdings(rank, records) for rank, records in enumerate(wire)]
    on_the_way: dict[tuple, tuple[int, int]] = {}
    owners: dict[tuple, list] = {}  # of each message
    status, wrong, frames = {}, [], []
    for event in events:
        flying, marked, whose, record = list(on_the_way.values()), {}, [], None
        if event.kind == "send":
            at, record = event.rank, event.records[event.rank]
            ranks[at].look(record, record.issued)
            whose = owners[key(record)] = ranks[at].owners_of(record)
            on_the_way[key(record)] = event.rank, event.peer
        elif event.kind == "receive":
            at, record = event.peer, event.records[event.peer]
            whose = owners.get(key(record), [])
            ranks[at].take(record, whose)
            on_the_way.pop(key(record), None)
            flying = list(on_the_way.values())
        elif event.kind == "meet":
            for rank, (_, after, theirs) in event.change.items():
                ranks[rank].share(event.records[rank], after, theirs)
        else:
            wrong.append(event)
            status |= {r: said for r, said in event.status.items() if status.get(r) != "failed"}
            for rank, last in event.records.items():
                if last.op != "send":  # whose buffer was looked at when it was sent
                    ranks[rank].look(last, math.inf)
        if record and record.memory is not None:
            marked = {at: (record.memory[0], place(record))}
        memory = [copy.deepcopy(rank.buffers) for rank in ranks]
        frames.append(Frame(event, memory, flying, dict(status), list(wrong), marked, whose))
    for frame in frames[-1:]:
        frame.holdings = ranks
    return frames


def hop_by_hop(frames: list[Frame], run) -> list[Frame]:
    """Merge the frames of single messages into one for each hop, and add one for the end.

    A hop is a set of messages that can travel at the same time. Its frame shows its messages on
    their way, and those of earlier hops as arrived; the last frame shows what ranks hold in the
    end.

    frames: what `film` returned, at least one, for events that are sends and receives only, where
        every message was received.
    run: the `Run`; the last frame also shows numbers that the ranks' functions returned.
    """
    number_of, sends, memory = hop_numbers(run), {}, {}
    for frame in frames:
        event = frame.event
        if event.kind == "send":
            number = number_of[key(event.records[event.rank])]
            sends.setdefault(number, []).append(frame)
            memory[number] = frame.memory
        elif event.kind == "receive":
            number = number_of[key(event.records[event.peer])]
            later = range(number + 1, max(number_of.values()) + 1)
            memory |= dict.fromkeys(later, frame.memory)
    hops = []
    for number in sorted(sends):
        records, marked, sent = {}, {}, sends[number]
        for frame in sent:
            records[frame.event.rank] = frame.event.records[frame.event.rank]
            marked |= frame.marked
        said = ", ".join(frame.event.text.removeprefix("rank ") for frame in sent)
        event = Event("hop", f"hop {number}: rank {said}", records)
        hops.append(Frame(event, memory[number], marked=marked, sent=sent))
    end = Event("end", "the end: what each rank has now", {})
    return [*hops, Frame(end, _in_the_end(frames[-1], run))]


def _in_the_end(last: Frame, run) -> list[dict[object, Cells]]:
    """Return each rank's buffers at the end, as {buffer: [(value, owner) of each element]}.

    A rank may still compute after its last message, which no record shows: the last sum of a
    reduce-scatter, for example. So if its function returned as many numbers as there are in the
    buffer that it used first, they replace these, in place in `last.holdings`. If a number differs,
    its owners are found anew (`Holdings.change`). Buffers have the keys of `Frame.memory`: the
    number of a storage, or a collective's name.

    last: the last frame that `film` returned.
    run: the `Run` that it shows.
    """
    for holdings, result in zip(last.holdings, run, strict=True):
        first, values = next(iter(holdings.buffers), None), flat(result)
        numbers = values and all(isinstance(value, int | float) for value in values)
        if numbers and len(values) == len(holdings.buffers.get(first, ())):
            holdings.change(first, values)
    return [holdings.buffers for holdings in last.holdings]
