"""The player: watch what the ranks of a run said to each other, message by message, also where it went wrong.

`player(run)` replays a real run made with `launch(..., keep_values=True)`, or the LaunchError of one that failed.
`explorer(...)` is the slider beneath it, over any function that draws.

From records to pictures: `replay` puts the records of all ranks in one logical order, as events; `film` follows the
events and notes, for each, what every rank holds; `_draw` draws one such frame.
"""

import copy
import html
import linecache
import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field

from ..runtime.board import Record
from ..runtime.errors import HangError, LaunchError
from . import figures
from .figures import EMPTY, GREY, NORMAL, SMALL, WRONG, Canvas, Picture, colour, ink, name_ranks, numbers

MOST_FRAMES = 120
IN_PLACE = ("all_reduce", "broadcast", "reduce")


# Events: the records of all ranks, in an order in which causes come before effects, the same for every run.


@dataclass
class Event:
    """One step of the replay. kind: send, receive, hop, meet (a collective), stuck, lost, differ or failed."""

    kind: str
    text: str
    records: dict[int, Record]  # by rank; of a message both ends, where both are known
    rank: int | None = None  # the rank that acts, or is stuck
    peer: int | None = None
    wrong: bool = False
    status: dict[int, str] = field(default_factory=dict)  # what is written under each rank from now on


def replay(run) -> list[Event]:
    """What happened in `run` (a Run or a LaunchError), one event after the other.

    A receive comes after its send and a collective after all its ranks have come to it; among events that nothing
    puts in order, those of lower ranks come first. Wall time plays no part, so that every run replays alike.
    """
    wire = run.wire
    sends = {_key(r): (rank, r) for rank, records in enumerate(wire) for r in records if r.op == "send"}
    receives = {_key(r): (rank, r) for rank, records in enumerate(wire) for r in records if r.op == "recv"}
    calls: dict[tuple, dict[int, Record]] = {}
    for rank, records in enumerate(wire):
        for record in records:
            if record.op not in ("send", "recv"):
                calls.setdefault(_key(record), {})[rank] = record
    events = [event for _, event in sorted(_in_order(wire, sends, calls), key=lambda timed: timed[0])]
    return events + _failures(run, sends, receives, calls)


def _key(record: Record) -> tuple:
    return record.channel, record.seq


def _program(records: list[Record]) -> list[tuple[str, Record]]:
    """What one rank did, step by step: it sends, receives (when it has the message), enters and leaves a collective."""
    steps = []
    for index, record in enumerate(records):
        ended = record.done if record.op == "recv" or record.waited is None else record.waited
        if record.op == "recv":
            steps.append((ended, index, "receive", record))
        else:
            steps.append((record.issued, index, "send" if record.op == "send" else "enter", record))
        if record.op not in ("send", "recv"):
            steps.append((ended, index, "leave", record))
    steps = [step for step in steps if step[0] is not None]
    return [(what, record) for _, _, what, record in sorted(steps, key=lambda step: step[:2])]


def _in_order(wire, sends, calls) -> list[tuple[tuple, Event]]:
    """Events with their logical times (Lamport 1978): one more than that of everything an event had to wait for."""
    programs = [_program(records) for records in wire]
    clock, at, entered, happened = [0] * len(wire), [0] * len(wire), {}, []
    times: dict[tuple, int] = {}  # of sends and of collectives
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while at[rank] < len(program):
                what, record = program[at[rank]]
                key = _key(record)
                if what == "receive" and key in sends and ("send", key) not in times:
                    break
                if what == "leave" and ("meet", key) not in times and _complete(calls[key]):
                    break
                moved = True
                at[rank] += 1
                if what == "leave":
                    clock[rank] = max(clock[rank], times.get(("meet", key), 0))
                    continue
                clock[rank] = now = 1 + max(clock[rank], times.get(("send", key), 0) if what == "receive" else 0)
                if what == "send":
                    times["send", key] = now
                    happened.append(((now, 1, rank), _sent(rank, record)))
                elif what == "receive":
                    happened.append(((now, 0, rank), _received(rank, record, sends.get(key))))
                else:
                    entered.setdefault(key, {})[rank] = now
                    if _complete(calls[key]) and len(entered[key]) == len(calls[key]):
                        times["meet", key] = now = max(entered[key].values())
                        happened.append(((now, 2, rank), _met(calls[key])))
    return happened


def _complete(records: dict[int, Record]) -> bool:
    """Whether all ranks of the group made the call, and the same call."""
    first = next(iter(records.values()))
    return len({record.agreement for record in records.values()}) == 1 and len(records) == len(first.ranks)


def _message(record: Record, values: list | None) -> str:
    return numbers(values) if values is not None else record.detail.partition(",")[0]


def _sent(rank: int, record: Record) -> Event:
    text = f"rank {rank} sends {_message(record, record.values)} to rank {record.peer}"
    return Event("send", text, {rank: record}, rank, record.peer)


def _received(rank: int, record: Record, sent: tuple[int, Record] | None) -> Event:
    text = f"rank {rank} receives {_message(record, record.result)} from rank {record.peer}"
    both = {rank: record} | ({sent[0]: sent[1]} if sent and sent[0] != rank else {})
    return Event("receive", text, both, record.peer, rank)


def _met(records: dict[int, Record]) -> Event:
    ranks = sorted(records)
    first = records[ranks[0]]
    if first.op == "new_group":
        return Event("meet", f"{name_ranks(ranks)} form a group", records)
    if first.op == "barrier":
        return Event("meet", f"{name_ranks(ranks)} met at a barrier", records)
    before, after = zip(*(_before_after(rank, records[rank]) for rank in ranks), strict=True)
    world_size = len(ranks) if first.group == "world" and len(ranks) > 1 else None
    text = f"{first.call}: {_said(ranks, before, world_size)} → {_said(ranks, after, world_size)}"
    return Event("meet", text, records)


def _before_after(rank: int, record: Record) -> tuple[list | None, list | None]:
    """What counts of what `rank` brought to a collective and took away; the rest is whatever lay in its buffers."""
    idle_before = record.op in ("broadcast", "scatter") and rank != record.peer
    idle_after = record.op in ("reduce", "gather") and rank != record.peer
    return None if idle_before else record.values, None if idle_after else record.result


def _said(ranks, rows, world_size) -> str:
    """'[1, 2] on every rank', or 'rank 0 [1], rank 1 [2]'."""
    if len(ranks) > 1 and all(row == rows[0] and row for row in rows):
        return f"{numbers(rows[0])} on {name_ranks(ranks, world_size)}"
    said = [f"rank {rank} {numbers(row)}" for rank, row in zip(ranks, rows, strict=True) if row]
    return ", ".join(said) or "…"


def _failures(run, sends, receives, calls) -> list[Event]:
    """What never happened, and who waits for it."""
    ever = "for ever" if isinstance(run, HangError) else "in vain"
    failed = isinstance(run, LaunchError)
    found = []
    if getattr(run, "rank", None) is not None:
        text = f"rank {run.rank} fails, as the error says"
        found.append(Event("failed", text, {}, run.rank, wrong=True, status={run.rank: "failed"}))
    for records in calls.values():
        if not _complete(records):
            found.append(_not_met(records, ever, failed))
    for rank, records in enumerate(run.wire):
        for record in records:
            other = (receives if record.op == "send" else sends).get(_key(record), (None, None))[1]
            if record.op == "recv" and record.done is None:
                found += _not_received(rank, record, other, ever, failed)
            if record.op == "send" and other is None and (record.done is None or not failed):
                blocked = failed and record is records[-1]
                found.append(_not_taken(rank, record, ever, blocked))
    return found


def _not_met(records: dict[int, Record], ever: str, failed: bool) -> Event:
    ranks = sorted(records)
    first = records[ranks[0]]
    if len({record.agreement for record in records.values()}) > 1:
        alike: dict[str, list[int]] = {}
        for rank in ranks:
            alike.setdefault(records[rank].call, []).append(rank)
        said = ", ".join(f"{name_ranks(who)} call{'s' * (len(who) == 1)} {call}" for call, who in alike.items())
        status = {rank: f"calls {r.op}\n{r.detail}" for rank, r in records.items()}
        return Event("differ", f"the ranks disagree: {said}", records, wrong=True, status=status)
    absent = [rank for rank in first.ranks if rank not in records]
    plural = "" if len(ranks) > 1 else "s"
    who = f"{name_ranks(absent)}, which never call{'s' * (len(absent) == 1)} it"
    status = dict.fromkeys(absent, "never calls it") | dict.fromkeys(ranks, f"waits here {ever}")
    text = f"{name_ranks(ranks)} wait{plural} {ever if failed else 'in vain'} in {first.call} for {who}"
    return Event("stuck", text, records, wrong=True, status=status)


def _not_received(rank: int, record: Record, sent: Record | None, ever: str, failed: bool) -> list[Event]:
    peer = record.peer
    if sent is not None and sent.agreement != record.agreement:
        sizes = sent.detail.partition(",")[0], record.detail.partition(",")[0]
        text = f"the ranks disagree: rank {peer} sends {sizes[0]} to rank {rank}, which expects {sizes[1]}"
        status = {peer: f"sends {sizes[0]}", rank: f"expects {sizes[1]}"}
        return [Event("differ", text, {rank: record}, peer, rank, wrong=True, status=status)]
    source = "any rank" if peer is None else f"rank {peer}"
    if not failed:
        text = f"rank {rank} asked for a message from {source} and never waited for it"
        return [Event("lost", text, {rank: record}, peer, rank, wrong=True, status={rank: "never waits for it"})]
    if sent is not None and sent.dropped:
        text = f"rank {rank} waits here {ever}: rank {peer} never waited for its send, and the message was dropped"
        return [Event("lost", text, {rank: record}, peer, rank, wrong=True, status={rank: f"waits here {ever}"})]
    if sent is not None:
        return []  # under way when the run ended
    text = f"rank {rank} waits here {ever}: no message comes from {source}"
    return [Event("stuck", text, {rank: record}, peer, rank, wrong=True, status={rank: f"waits here {ever}"})]


def _not_taken(rank: int, record: Record, ever: str, blocked: bool) -> Event:
    message = _message(record, record.values)
    if not blocked:
        text = f"rank {record.peer} never receives {message} from rank {rank}"
        return Event(
            "lost", text, {rank: record}, rank, record.peer, wrong=True, status={record.peer: "never receives"}
        )
    text = f"rank {rank} waits here {ever}: rank {record.peer} never receives its {message}"
    return Event("stuck", text, {rank: record}, rank, record.peer, wrong=True, status={rank: f"waits here {ever}"})


# Film: what every rank holds after each event.


@dataclass
class Cells:
    """A buffer: its numbers, and for each the rank whose data it is, None for several, "blank" for nobody's yet."""

    values: list
    owners: list


@dataclass
class Frame:
    """What one picture shows."""

    event: Event
    memory: list[dict[object, Cells]]  # by rank, by buffer
    flying: list[tuple[int, int]]  # messages under way besides this event's: (from, to)
    status: dict[int, str]
    wrong: list[Event]  # what has gone wrong so far
    marked: dict[int, tuple[object, int, int]]  # by rank: buffer, first and last+1 of the cells this event is about
    owners: list = field(default_factory=list)  # of the message
    sent: list["Frame"] = field(default_factory=list)  # of a hop: the frames of its messages


def film(events: list[Event], wire: list[list[Record]]) -> list[Frame]:
    """A frame for each event."""
    memory = [_at_first(rank, records) for rank, records in enumerate(wire)]
    heard = [False] * len(wire)  # has this rank ever received anything?
    under_way: dict[tuple, tuple[int, int]] = {}
    owners: dict[tuple, list] = {}  # of each message
    status, wrong, frames = {}, [], []
    for event in events:
        marked, whose = {}, []
        if event.kind == "send":
            record, rank = event.records[event.rank], event.rank
            _see(memory[rank], rank, record, heard[rank], _open_receives(wire[rank], record.issued))
            whose = owners[_key(record)] = _owners_of(memory[rank], record, rank, heard[rank])
            marked = _mark(rank, record)
        elif event.kind == "receive":
            rank = event.peer
            record = event.records[rank]
            whose = owners.get(_key(record)) or []
            _take(memory[rank], rank, record, heard[rank], whose, _open_receives(wire[rank], record.done))
            heard[rank] = True
            under_way.pop(_key(record), None)
            marked = _mark(rank, record)
        elif event.kind == "meet":
            _share(memory, event.records)
            heard = [was or rank in event.records for rank, was in enumerate(heard)]
        else:
            wrong.append(event)
            status |= {rank: text for rank, text in event.status.items() if status.get(rank) != "failed"}
            for rank, record in event.records.items():
                _see(memory[rank], rank, record, heard[rank], [])
        others = [way for key, way in under_way.items() if event.kind != "send" or key != _key(record)]
        frames.append(Frame(event, copy.deepcopy(memory), others, dict(status), list(wrong), marked, whose))
        if event.kind == "send":
            under_way[_key(record)] = (event.rank, event.peer)
    return frames


def hop_by_hop(frames: list[Frame], run) -> list[Frame]:
    """A film of messages with one frame for all messages of a hop, and one for what the ranks have in the end.

    A hop is seen at its last send: by then all ranks have added or stored what the hop before brought them.
    """
    number_of = figures.hop_numbers(run)
    sends: dict[int, list[Frame]] = {}
    for frame in frames:
        if frame.event.kind == "send":
            sends.setdefault(number_of[_key(frame.event.records[frame.event.rank])], []).append(frame)
    end = Frame(Event("end", "the end: what each rank has now", {}), _in_the_end(frames[-1], run), [], {}, [], {})
    return [_hop(number, sends[number]) for number in sorted(sends)] + [end]


def _in_the_end(last: Frame, run) -> list[dict[object, Cells]]:
    """What the ranks hold after the last message; where one returned as many numbers as its first buffer has, those."""
    memory = copy.deepcopy(last.memory)
    for buffers, returned in zip(memory, [] if isinstance(run, LaunchError) else run, strict=False):
        cells, values = next(iter(buffers.values()), None), figures.flat(returned)
        if cells and values and len(values) == len(cells.values):
            kept = [now == then for now, then in zip(values, cells.values, strict=True)]
            cells.owners = [owner if same else None for owner, same in zip(cells.owners, kept, strict=True)]
            cells.values = list(values)
    return memory


def _hop(number: int, sends: list[Frame]) -> Frame:
    records = {frame.event.rank: frame.event.records[frame.event.rank] for frame in sends}
    said = ", ".join(frame.event.text.removeprefix("rank ") for frame in sends)
    marked = {rank: mark for frame in sends for rank, mark in frame.marked.items()}
    event = Event("hop", f"hop {number}: rank {said}", records)
    return Frame(event, sends[-1].memory, [], {}, [], marked, sent=sends)


def _at_first(rank: int, records: list[Record]) -> dict:
    """What a rank held before anything reached it, as far as its first messages tell."""
    memory: dict = {}
    for record in records:
        if record.op != "send":
            break
        if record.memory is not None and record.memory[0] not in memory:
            _see(memory, rank, record, False, [])
    return memory


def _elements(record: Record) -> int:
    return math.prod(record.shape)


def _mark(rank: int, record: Record) -> dict:
    if record.memory is None:
        return {}
    which, offset, _ = record.memory
    return {rank: (which, offset, offset + _elements(record))}


def _open_receives(records: list[Record], moment: float) -> list[tuple[int, int, int]]:
    """Where messages may be arriving at `moment` (a time of this rank's clock): (buffer, first, last+1)."""
    pending = [r for r in records if r.op == "recv" and r.issued < moment and (r.done is None or r.done > moment)]
    return [(r.memory[0], r.memory[1], r.memory[1] + _elements(r)) for r in pending if r.memory is not None]


def _see(memory: dict, rank: int, record: Record, heard: bool, arriving: list) -> None:
    """Bring what is known of a buffer up to date with a record, except where another message is just arriving."""
    if record.memory is None:
        return
    which, offset, contents = record.memory
    known = memory.get(which)
    new = known is None or len(known.values) != len(contents)
    own = range(offset, offset + _elements(record)) if record.op != "recv" else ()
    owners = [_guess(value, memory, rank, heard, new and at not in own) for at, value in enumerate(contents)]
    if new:
        known = memory[which] = Cells(list(contents), owners)
    for at, value in enumerate(contents):
        if any(which == buffer and first <= at < last for buffer, first, last in arriving):
            known.values[at] = None if new else known.values[at]
        elif value != known.values[at] or (at in own and known.owners[at] == "blank"):
            known.values[at], known.owners[at] = value, owners[at]


def _guess(value, memory: dict, rank: int, heard: bool, may_be_blank: bool):
    """Whose data a value is that this rank computed or copied."""
    if value == 0 and may_be_blank:
        return "blank"
    if not heard:
        return rank
    known = [cells.owners[cells.values.index(value)] for cells in memory.values() if value in cells.values]
    return next((owner for owner in known if owner != "blank"), None)


def _owners_of(memory: dict, record: Record, rank: int, heard: bool) -> list:
    if record.memory is None:
        return [None if heard else rank] * len(record.values or ())
    which, offset, _ = record.memory
    return memory[which].owners[offset : offset + _elements(record)]


def _take(memory: dict, rank: int, record: Record, heard: bool, owners: list, arriving: list) -> None:
    """Put a message that arrived into its place."""
    if record.memory is None:
        return
    _see(
        memory,
        rank,
        record,
        heard,
        [*arriving, (record.memory[0], record.memory[1], record.memory[1] + _elements(record))],
    )
    which, offset, contents = record.memory
    cells = memory[which]
    for at in range(_elements(record)):
        cells.values[offset + at] = record.result[at] if record.result else contents[offset + at]
        cells.owners[offset + at] = owners[at] if at < len(owners) else None


def _meeting(records: dict[int, Record]) -> dict[int, tuple[list | None, list | None, list]]:
    """By rank, what it brought to a collective, what it took away, and whose data that is."""
    rows = {rank: _before_after(rank, records[rank]) for rank in sorted(records)}
    lengths = {rank: len(before or ()) for rank, (before, _) in rows.items()}
    found = {}
    for rank, (before, after) in rows.items():
        op, owners = records[rank].op, []
        if op in ("all_gather", "gather"):
            owners = [source for source in rows for _ in range(lengths[source])]
        elif op == "all_to_all":
            owners = [source for source in rows for _ in range(lengths[source] // len(rows))]
        elif op in ("broadcast", "scatter"):
            owners = [records[rank].peer] * len(after or ())
        if len(owners) != len(after or ()):  # a sum, or parts of uneven sizes
            owners = [None] * len(after or ())
        found[rank] = before, after, owners
    return found


def _share(memory: list[dict], records: dict[int, Record]) -> None:
    """What each rank holds after a collective."""
    for rank, (_, after, owners) in _meeting(records).items():
        record = records[rank]
        if not after:
            continue
        if record.op in IN_PLACE and record.memory is not None:
            which, offset, contents = record.memory
            cells = memory[rank].setdefault(which, Cells(list(contents), [rank] * len(contents)))
            if len(cells.values) == len(contents):
                cells.values[offset : offset + len(after)] = after
                cells.owners[offset : offset + len(after)] = owners
        else:
            memory[rank][record.op] = Cells(list(after), owners)


# Pictures.


class Stage:
    """Where everything stands, the same for all frames of a film."""

    GAP, PAD, HEAD, LINE = 30, 12, 48, 36

    def __init__(self, frames: list[Frame], world_size: int):
        self.world_size = world_size
        self.two_rows = world_size > 4 or _is_ring(frames, world_size)
        self.columns = math.ceil(world_size / 2) if self.two_rows else world_size
        self.width = 1000
        self.cell = figures.cell_width(*_all_numbers(frames))
        self.column = self.width / self.columns
        self.buffers = [self._buffers_of(frames, rank) for rank in range(world_size)]
        self.per_line = max(1, int((self.column - self.GAP - 2 * self.PAD) // self.cell))
        longest = max([1] + [length for lengths in self.buffers for length in lengths.values()])
        self.per_line = math.ceil(longest / self.lines(longest))  # lines of the same length
        inside = max([self._tall(lengths) for lengths in self.buffers] + [self._tall_meetings(frames)])
        self.box_width, self.box_height = self.column - self.GAP, self.HEAD + inside + self.PAD
        self.chip_line = int(560 // self.cell)
        self.lane = self._lane(frames)
        status = [text for frame in frames for text in frame.status.values()]
        self.below = 14 + 22 * (1 + any("\n" in text for text in status)) if status else 0
        self.title = 14 + 28 * max(len(_title(frame, "100.")) for frame in frames)
        rows = 1 + self.two_rows
        self.height = self.title + self.lane * (rows + self.two_rows) + rows * (self.box_height + self.below) + 46

    def _lane(self, frames) -> float:
        """Room for the arrows of messages."""
        ways = [f.event for f in _messages(frames) if f.event.rank is not None and f.event.peer is not None]
        if not ways:
            return 16
        longest = max([1] + [len(r.values or r.result or ()) for event in ways for r in event.records.values()])
        return 66 + self.LINE * min(3, math.ceil(longest / self.chip_line))

    def _buffers_of(self, frames, rank) -> dict[object, int]:
        """{buffer: length}, those most used in this film."""
        lengths: dict[object, int] = {}
        touched: dict[object, int] = {}
        for frame in frames:
            for which, cells in frame.memory[rank].items():
                lengths[which] = max(lengths.get(which, 0), len(cells.values))
            if rank in frame.marked:
                which = frame.marked[rank][0]
                touched[which] = touched.get(which, 0) + 1
        kept = sorted(lengths, key=lambda which: -touched.get(which, 0))[: max(6, self.world_size)]
        return {which: length for which, length in lengths.items() if which in kept}

    def _tall(self, lengths: dict) -> float:
        return sum(self.lines(length) * self.LINE + 10 for length in lengths.values())

    def _tall_meetings(self, frames) -> float:
        meetings = [f.event for f in frames if f.event.kind == "meet"]
        rows = [_before_after(rank, record) for event in meetings for rank, record in event.records.items()]
        return max([(self.lines(len(b or " ")) + self.lines(len(a or " "))) * self.LINE + 44 for b, a in rows] + [0])

    def lines(self, length: int) -> int:
        return math.ceil(length / self.per_line)

    def place(self, rank: int) -> tuple[float, float]:
        """The upper left corner of a rank's box; in two rows the ranks go round, so that a ring has no long way."""
        top = self.title + self.lane
        if not self.two_rows or rank < self.columns:
            return self.column * rank + self.GAP / 2, top
        column = self.world_size - 1 - rank
        return self.column * column + self.GAP / 2, top + self.box_height + self.below + self.lane

    def row(self, rank: int) -> int:
        return int(self.two_rows and rank >= self.columns)


def _messages(frames: list[Frame]) -> list[Frame]:
    return [message for frame in frames for message in frame.sent or [frame]]


def _is_ring(frames: list[Frame], world_size: int) -> bool:
    """Whether messages, sent or missed, go all to the next rank or all to the one before, from nearly all ranks."""
    ways = [(f.event.rank, f.event.peer) for f in _messages(frames) if f.event.kind in ("send", "stuck", "lost")]
    steps = {(dst - src) % world_size for src, dst in ways if src is not None and dst is not None}
    round_about = len({src for src, _ in ways if src is not None}) >= world_size - 1
    return world_size > 2 and round_about and steps in ({1}, {world_size - 1})


def _all_numbers(frames: list[Frame]):
    for frame in frames:
        for buffers in frame.memory:
            for cells in buffers.values():
                yield cells.values
        for record in frame.event.records.values():
            yield record.values
            yield record.result


def _title(frame: Frame, step: str) -> list[str]:
    return textwrap.wrap(_numbered(frame.event, step), 84, max_lines=3, placeholder=" …")


def _numbered(event: Event, step: str) -> str:
    return event.text if event.kind in ("hop", "end") else f"{step} {event.text}"


def _draw(frame: Frame, stage: Stage, step: str) -> bytes:
    canvas = Canvas(stage.width, stage.height)
    event = frame.event
    for line, text in enumerate(_title(frame, step)):
        canvas.text(16, 24 + 28 * line, text, NORMAL, "left", WRONG if event.wrong else "black")
    for rank in range(stage.world_size):
        _draw_rank(canvas, stage, frame, rank)
    missing = [(each.rank, each.peer) for each in frame.wrong]
    for way in frame.flying:
        if way not in missing:
            _draw_way(canvas, stage, *way, thin=True)
    for each in frame.wrong:
        if each.rank is not None and each.peer is not None:
            _draw_missing(canvas, stage, each)
    for each in _messages([frame]):
        if each.event.kind in ("send", "receive"):
            near = 0.5 if frame.sent else 0.3 if event.kind == "send" else 0.7
            _draw_message(canvas, stage, each, *_draw_way(canvas, stage, each.event.rank, each.event.peer, near))
    owners = [owner for buffers in frame.memory for cells in buffers.values() for owner in cells.owners]
    if None in owners:
        figures.mixed_legend(canvas)
    return canvas.png()


def _draw_rank(canvas: Canvas, stage: Stage, frame: Frame, rank: int):
    x, y = stage.place(rank)
    said = frame.status.get(rank)
    canvas.box(x, y, stage.box_width, stage.box_height, EMPTY, WRONG if said else GREY, 4 if said else 1.5, round=10)
    canvas.badge(x + stage.PAD, y + 8, rank)
    if said:
        for line, text in enumerate(said.split("\n")):
            top = y + stage.box_height + 18 + 22 * line
            canvas.text(x + stage.box_width / 2, top, text, ink=WRONG, bold=True)
    x, y = x + stage.PAD, y + stage.HEAD + 4
    if (
        frame.event.kind == "meet"
        and rank in frame.event.records
        and any(r.values for r in frame.event.records.values())
    ):
        _draw_meeting(canvas, stage, frame, rank, x, y)
        return
    for which, length in stage.buffers[rank].items():
        cells = frame.memory[rank].get(which, Cells([], []))
        missing = [None] * (length - len(cells.values))
        buffer, first, last = frame.marked.get(rank, (None, 0, 0))
        marked = range(first, last) if buffer == which else ()
        canvas.cells(
            x, y, cells.values + missing, cells.owners + missing, stage.cell, stage.LINE, stage.per_line, marked
        )
        y += stage.lines(length) * stage.LINE + 10


def _draw_meeting(canvas: Canvas, stage: Stage, frame: Frame, rank: int, x: float, y: float):
    """A collective of torch's own: what the rank brought, and below it what it took away."""
    before, after, owners = _meeting(frame.event.records)[rank]
    y = _draw_row(canvas, stage, x, y, before, [rank] * len(before or ()))
    canvas.arrow((x + 22, y + 2), (x + 22, y + 32), line=4)
    _draw_row(canvas, stage, x, y + 34, after, owners)


def _draw_row(canvas: Canvas, stage: Stage, x: float, y: float, values: list | None, owners: list) -> float:
    """Numbers, or an empty box for none; returns where the next row can go."""
    if not values:
        values, owners = [None], [None]
    canvas.cells(x, y, values, owners, stage.cell, stage.LINE, stage.per_line)
    return y + stage.lines(len(values)) * stage.LINE


def _draw_way(canvas: Canvas, stage: Stage, src: int, dst: int, near=0.5, thin=False, wrong=False):
    """The arrow of a message; returns where on it the message is, `near` 0 at its source and 1 at its end."""
    (x0, y0), (x1, y1) = stage.place(src), stage.place(dst)
    x0 += stage.box_width * (0.62 if src != dst else 0.7)
    x1 += stage.box_width * (0.38 if src != dst else 0.3)
    style = {"ink": WRONG if wrong else colour(src), "line": 2.2 if thin or wrong else 4.5, "dashed": thin or wrong}
    if stage.row(src) != stage.row(dst):
        if abs(x0 - x1) < stage.box_width:  # one above the other
            x0 = x1 = min(x0, x1) if src > dst else max(x0, x1)
        down = stage.row(src) < stage.row(dst)
        upper, lower = (y0, y1) if down else (y1, y0)
        ends = upper + stage.box_height + stage.below + 2, lower - 2
        start, end = (x0, ends[not down]), (x1, ends[down])
        canvas.arrow(start, end, **style)
        return start[0] + near * (end[0] - start[0]), (start[1] + end[1]) / 2
    above = stage.row(src) == 0
    edge = y0 - 2 if above else y0 + stage.box_height + stage.below + 2
    depth = (26 + 5 * (src % 4)) if thin else 22 + (stage.lane - 44) / 2
    depth -= 24 * (wrong and src > dst)  # two ranks that wait for each other
    level = edge - depth if above else edge + depth
    canvas.line([(x0, edge), (x0, level), (x1, level)], **style)
    canvas.arrow((x1, level), (x1, edge), **style)
    return x0 + near * (x1 - x0), level


def _draw_missing(canvas: Canvas, stage: Stage, event: Event):
    """A message that somebody waits for and that never is."""
    x, y = _draw_way(canvas, stage, event.rank, event.peer, near=0.35, wrong=True)
    canvas.box(x - 17, y - 17, 34, 34, EMPTY, WRONG, 3, round=17)
    canvas.text(x, y, "✗" if event.kind == "lost" else "?", NORMAL, ink=WRONG, bold=True)


def _draw_message(canvas: Canvas, stage: Stage, frame: Frame, x: float, y: float):
    """The numbers of a message, on its way."""
    event = frame.event
    record = event.records.get(event.rank) or event.records[event.peer]
    values = record.values if record.values is not None else record.result
    if not values:
        text = record.detail.partition(",")[0]
        width = 11 * len(text) + 20
        x = min(max(x - width / 2, 4), stage.width - width - 4)
        canvas.box(x, y - 20, width, 40, colour(event.rank))
        canvas.text(x + width / 2, y, text, SMALL, ink=ink(colour(event.rank)))
        return
    values = values[: 3 * stage.chip_line]
    per_line = min(len(values), stage.chip_line)
    width, height = per_line * stage.cell, math.ceil(len(values) / per_line) * stage.LINE
    left, top = min(max(x - width / 2, 10), stage.width - width - 10), y - height / 2
    owners = frame.owners if len(frame.owners) >= len(values) else [event.rank] * len(values)
    canvas.box(left - 5, top - 5, width + 10, height + 10, EMPTY, colour(event.rank), 4, round=4)
    canvas.cells(left, top, values, owners[: len(values)], stage.cell, stage.LINE, per_line)


# Widgets.


class Explorer:
    """A slider over pictures. `slider`, `image` and `caption` are its widgets; without ipywidgets it is one picture.

    draw: value -> Picture. caption: value -> text. shown: the value whose picture stands where nothing is live.
    """

    def __init__(
        self,
        draw: Callable[[int], Picture],
        caption: Callable[[int], str],
        label: str,
        minimum: int,
        maximum: int,
        value: int,
        text: str | None = None,
        shown: int | None = None,
        play: bool = False,
    ):
        self._draw, self._describe, self._label, self._play = draw, caption, label, play
        self._minimum, self._maximum, self._value = minimum, maximum, value
        self._shown = value if shown is None else shown
        self._pictures: dict[int, Picture] = {}
        self._widgets = None
        self.text = caption(value) if text is None else text

    def picture(self, value: int) -> Picture:
        if value not in self._pictures:
            self._pictures[value] = self._draw(value)
        return self._pictures[value]

    @property
    def slider(self):
        return self._live()[0]

    @property
    def image(self):
        return self._live()[1]

    @property
    def caption(self):
        return self._live()[2]

    def __repr__(self):
        return self.text

    def _repr_mimebundle_(self, include=None, exclude=None):
        bundle = {"text/plain": self.text, "image/png": self.picture(self._shown).png}
        try:
            live = self._live()[3]._repr_mimebundle_()
        except ImportError:
            return bundle
        return live | bundle

    def _live(self):
        """(slider, image, caption, all of it in a box)."""
        if self._widgets is None:
            import ipywidgets

            options = {"min": self._minimum, "max": self._maximum, "value": self._value}
            slider = ipywidgets.IntSlider(
                **options,
                description=self._label,
                tooltip=f"{self._label}: move with the arrow keys",
                continuous_update=False,
                style={"description_width": "initial"},
                layout={"width": "500px", "max_width": "100%"},
            )
            # No tooltip on the image: its view in the browser fails on one, and shows an error instead.
            image = ipywidgets.Image(format="png", layout={"max_width": "100%", "object_fit": "contain"})
            caption = ipywidgets.HTML()
            controls = [slider]
            if self._play:
                play = ipywidgets.Play(**options, interval=1500, tooltip="play, pause, repeat")
                ipywidgets.jslink((play, "value"), (slider, "value"))
                controls.insert(0, play)
            box = ipywidgets.VBox([ipywidgets.HBox(controls), caption, image])
            self._widgets = slider, image, caption, box
            slider.observe(self._show, "value")
            self._show()
        return self._widgets

    def _show(self, change=None):
        slider, image, caption, _ = self._widgets
        try:
            image.value = self.picture(slider.value).png
            text = html.escape(self._describe(slider.value))
        except Exception as error:  # a callback has nobody to raise to
            text = f'<b style="color: {WRONG}">{html.escape(f"{type(error).__name__}: {error}")}</b>'
        style = "font-size: 18px; line-height: 1.4; min-height: 1.4em"
        caption.value = f'<div role="status" aria-live="polite" style="{style}">{text}</div>'


def explorer(
    draw: Callable[[int], Picture], caption: Callable[[int], str], label: str, minimum: int, maximum: int, value: int
) -> Explorer:
    """A slider named `label` over `draw(value)` and `caption(value)`."""
    return Explorer(draw, caption, label, minimum, maximum, value)


def player(run, by_hop: bool = False) -> Explorer:
    """Replay what the ranks of `run` said, step by step.

    run: a Run made with `launch(..., keep_values=True)`, or the HangError or RankError that such a launch raised.
    by_hop: a step is all messages of a hop, instead of one of them; for runs of nothing but messages, all received.
    ValueError: nothing was kept.
    """
    _check_kept(run)
    events, skipped = _cut(replay(run))
    frames = film(events, run.wire)
    if by_hop and frames and all(event.kind in ("send", "receive") for event in events):
        frames = hop_by_hop(frames, run)
        events = [frame.event for frame in frames]
    text = _trace(events, skipped)
    if not frames:
        nothing = Canvas(600, 80)
        nothing.text(300, 40, text, NORMAL)
        picture = nothing.picture(text)
        return Explorer(lambda _: picture, lambda _: text, "step", 1, 1, 1, text)
    stage = Stage(frames, len(run.wire))

    def draw(step: int) -> Picture:
        frame = frames[step - 1]
        return Picture(_draw(frame, stage, f"{step}."), frame.event.text)

    def caption(step: int) -> str:
        event = frames[step - 1].event
        return f"Step {step} of {len(frames)}: {event.text}{_whence(event)}"

    telling = min(2, len(frames)) if frames[-1].event.kind == "end" else len(frames)
    return Explorer(draw, caption, "step", 1, len(frames), 1, text, shown=telling, play=True)


def _check_kept(run):
    if not hasattr(run, "wire"):
        raise ValueError(f"player expected a Run or a LaunchError, got {type(run).__name__}: pass what launch returned")
    records = [record for rank in run.wire for record in rank if record.bytes]
    if records and not any(r.values is not None or r.result is not None or r.memory is not None for r in records):
        raise ValueError(
            "player expected a run that kept its messages, got one without: "
            "launch(..., keep_values=True) keeps messages of up to 64 elements"
        )


def _cut(events: list[Event]) -> tuple[list[Event], int]:
    """(the first events, and whatever went wrong; how many are left out)."""
    wrong = [event for event in events if event.wrong][:MOST_FRAMES]
    right = [event for event in events if not event.wrong][: MOST_FRAMES - len(wrong)]
    return right + wrong, len(events) - len(right) - len(wrong)


def _trace(events: list[Event], skipped: int) -> str:
    lines = [_numbered(event, f"{step}.") for step, event in enumerate(events, 1)]
    if skipped:
        lines.append(f"… and {figures.count(skipped, 'more step')}: a replay shows {MOST_FRAMES} at most")
    return "\n".join(lines) or "The ranks sent nothing."


def _whence(event: Event) -> str:
    """The reader's own line that an event comes from."""
    record = event.records.get(event.peer if event.kind == "receive" else event.rank)
    record = record or next(iter(event.records.values()), None)
    if record is None:
        return ""
    code = linecache.getline(record.file, record.line).strip()
    return f" (line {record.line} of {record.function}" + (f": {code})" if code else ")")


def world_explorer(*, gpus: int = 0, value: int = 4) -> Explorer:
    """A slider over the world size: which rank sits where on a machine with so many GPUs. Notebook 00."""
    return explorer(
        lambda n: figures.worlds(n, gpus), lambda n: figures.worlds(n, gpus).text, "world size", 1, 8, value
    )
