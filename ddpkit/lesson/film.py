"""Build the animation of a recorded run: every buffer after each event, its numbers with owners.

The animation, called a film, is a list of frames, which `player` and `circle` draw. A frame shows
one event: a message sent or received, a collective call, or what went wrong. A rank's buffers are
the storages of the tensors in its calls, and the results of its collectives. A number is an element
of a buffer, and its owner the rank that it came from, or the set of ranks if it is a sum. Owners
follow from the records of calls. Until a rank receives anything, it owns all its numbers. A number
that is received keeps its owner. If a number changes after that, and its new value is the old one
plus numbers that the rank received, the owners of all these own it; otherwise none is known.
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

    cells: (value, owner) of each number; either is None if unknown, an owner a frozenset for a sum.
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
        tensor, and its key the storage's number in the rank's records (0, 1, ...). An all_reduce, a
        broadcast or a reduce changes such a buffer. The result of any other collective is a buffer
        of its own, whose key is the operation's name ("all_gather"); the next such one replaces it.
    flying: (sender, receiver) of each message sent earlier and not yet received; [] for a hop.
    status: {rank: what is wrong with it, in words}, as known at that point.
    wrong: the events up to this one in which something went wrong: calls that don't match, a rank
        that is stuck or failed, or a message that was lost.
    marked: {rank: (buffer, a `range` of indices)}, the elements to highlight: those that a message
        moves, at its sender if it is sent, at its receiver if it is received; of a hop, those of
        each sender's last message. {} for other events, and if the records have no copy of the
        buffer (no keep_values, or more than 64 elements).
    owners: the owner of each element of the event's message; [] if its values weren't kept, and for
        events that aren't a single message.
    sent: if the frame shows all messages of a hop, the frames of these messages; otherwise empty.
    holdings: each rank's `Holdings`, in the last frame that `film` returns; otherwise empty. They
        also list received numbers that a rank may yet add. So `hop_by_hop` can find the owners of
        sums that ranks compute after the last event.
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

    rank: the rank. records: the records of all its calls, in order. The constructor already reads
        the buffers of sends before the first other call, so that even earlier frames show them.
        Then the caller passes the records, one by one, to `look` (a send, or a call that went
        wrong), `take` (a receive) or `share` (a collective).
    buffers: {buffer: [(value, owner) of each element]}. An owner is a rank, or a frozenset of ranks
        for a sum; unknown values and owners are None. A buffer's key is its storage's number in the
        rank's records. The result of a collective other than all_reduce, broadcast and reduce has
        the operation's name ("all_gather") as its key, wherever the call put it: see `share`.
    heard: whether the rank got a message or a collective's result; until then it owns all numbers.
    arrived: (buffer, [(value, owner) of each number]) of each message that came into `buffer` since
        the rank last changed a number itself. The rank may yet add these numbers to others.
    """

    def __init__(self, rank: int, records: list[Record]):
        self.rank, self.buffers, self.heard = rank, {}, False
        self.arrived: list[tuple[object, Cells]] = []  # since a number was last seen to change
        self._coming = [r for r in records if r.op == "recv" and r.memory is not None]
        for record in itertools.takewhile(lambda record: record.op == "send", records):
            self.look(record, record.issued)  # its contents before anything arrives

    def look(self, record: Record, moment: float) -> None:
        """Update a buffer to the contents that a record shows, except where a message may arrive.

        `change` finds the owners of numbers that changed.
        record: the record of a send, of a call that went wrong or, from `take`, of a receive. Its
            `memory` is (buffer, offset of the call's tensor, all numbers in the buffer) or None:
            then nothing happens.
        moment: when these numbers were read, by this rank's `time.perf_counter()`; math.inf if that
            isn't known. Elements that a receive may have been writing by then are left as they are.

        If a buffer is first seen in a receive, the values of all its elements become None, unknown,
        since torch.empty may have made it. `take` then fills in the numbers of the message.
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

        The rank may have added numbers from messages: from those in `arrived` that came into other
        buffers. If n numbers changed, the new value of the k-th of them is compared with two kinds
        of sums: (1) its old value plus the k-th number of every message with n numbers; (2) its old
        value plus any one number of a message. The first sum that is equal, and of whose terms all
        owners are known, gives the owners. Without such a sum the owner is this rank while `heard`
        is False, and unknown (None) later. Any change empties `arrived`.

        which: a key of `buffers`.
        contents: all numbers that the buffer holds now, as many as before.
        hidden: indices that a message is still being written into; not updated, and not counted.
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
        """Put a received message into the buffer where it arrived, with its numbers' owners.

        record: the record of the receive. Its `memory` is a copy of the whole buffer, from which
            elements outside the message are updated. If it is None (not kept, or too large), only
            `heard` is set.
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

        record: the record of the send, which the caller has just passed to `look`. If its `memory`
            (a copy of the buffer) is None, every owner is this rank while `heard` is False, and
            None (unknown) later; [] if its `values`, the numbers sent, are None as well.
        """
        if record.memory is None:
            return [None if self.heard else self.rank] * len(record.values or ())
        return [owner for _, owner in self.buffers[record.memory[0]][slice_of(record)]]

    def share(self, record: Record, after: list | None, owners: list) -> None:
        """Put the result of a collective call into one of this rank's buffers.

        An all_reduce, broadcast or reduce (`IN_PLACE`) of one tensor changes the tensor's part of a
        buffer: its record's `memory` says which part of which storage. Any other result replaces
        the buffer whose key is the operation's name. So does one whose record has no `memory`, for
        example because the storage has more than 64 elements.

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

    They index `record.memory[2]`, a copy of the storage. The tensor, which must be contiguous, is
    the first that the call reads or, if it reads none, fills.
    record: the call's record. Its `memory` must not be None: the launch had keep_values=True, and
        the storage had at most 64 elements.
    """
    return range(record.memory[1], record.memory[1] + math.prod(record.shape))


def slice_of(record: Record) -> slice:
    """Return the slice of a call's numbers in the storage of its tensor: slice(4, 6) for x[4:6].

    It selects them from `record.memory[2]`, a list of all numbers in the storage; `memory` must not
    be None. The tensor, contiguous, is the first that the call reads or, if it reads none, fills.
    """
    return slice(place(record).start, place(record).stop)


def film(events: list[Event], wire: list[list[Record]]) -> list[Frame]:
    """Return a frame for each event of a run: every rank's numbers just after it, and their owners.

    The last frame also gets `holdings`, the `Holdings` of each rank. `hop_by_hop` needs them to add
    a frame for the end, since ranks may go on computing after their last message.

    events: what `replay.replay` made of a run, all of it or some, in its order.
    wire: for each rank, the records of its calls, in order. If the launch didn't have
        keep_values=True, the frames show no numbers: `memory` is {} for each rank.
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

    The messages of a hop can all travel at the same time. A message is in the hop after the latest
    message that its sender or receiver had finished before beginning this one; without any, it is
    in hop 1. A hop's frame replaces those of its sends and receives, and shows its messages on
    their way. The buffers in it are at a moment when these are sent and all earlier hops have
    arrived; some of this hop may have arrived as well. The last frame shows the end.

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
    """Return each rank's buffers at the end, as {number of the storage: [(value, owner), ...]}.

    No record shows what a rank computes after its last message, such as the last sum of a
    reduce-scatter. But its function may have returned it. So if the function returned as many
    numbers as the rank's first buffer holds, they are taken for this buffer's contents at the end.
    `Holdings.change` puts them into `last.holdings`, and finds the owners of those that differ.

    last: the last frame that `film` returned.
    run: the `Run` that it shows.
    """
    for holdings, result in zip(last.holdings, run, strict=True):
        first, values = next(iter(holdings.buffers), None), flat(result)
        numbers = values and all(isinstance(value, int | float) for value in values)
        if numbers and len(values) == len(holdings.buffers.get(first, ())):
            holdings.change(first, values)
    return [holdings.buffers for holdings in last.holdings]
