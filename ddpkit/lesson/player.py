"""The player: watch what the ranks of a run said to each other, also where it went wrong.

`player(run)` replays a real run made with `launch(..., keep_values=True)`, or the LaunchError of
one that failed: `replay` turns its records into events, `film` follows what every rank holds, and
here that is drawn. `world_explorer` is a slider over the size of a world.
"""

import linecache
import math
import textwrap

from ..tools.units import count
from . import figures, page
from .film import Cells, Frame, film, hop_by_hop, meeting
from .page import Canvas, Picture, cell_width, colour, ink
from .replay import Event, before_after, replay
from .widgets import StepThrough

MOST_FRAMES = 120
WIDTH = 1040
PAD, LINE, GAP = 12, 36, 24  # pixels in a rank's box, of its numbers, between two boxes


def player(run, by_hop: bool = False) -> StepThrough:
    """Replay what the ranks of `run` said, step by step.

    run: a Run made with `launch(..., keep_values=True)`, or the HangError or RankError that such a
    launch raised. by_hop: a step is all messages of a hop, instead of one of them; for runs of
    nothing but messages, all received. ValueError: nothing was kept.
    """
    _check_kept(run)
    events, skipped = _cut(replay(run))
    frames = film(events, run.wire)
    if by_hop and frames and all(event.is_message for event in events):
        frames = hop_by_hop(frames, run)
    lines = [_numbered(frame.event, step) for step, frame in enumerate(frames, 1)]
    if skipped:
        more = count(skipped, "more step")
        lines.append(f"… and {more}: a replay shows {MOST_FRAMES} at most")
    text = "\n".join(lines) or "The ranks sent nothing."
    stage = Stage(frames, len(run.wire)) if frames else None

    def look(step: int) -> tuple[str, Picture]:
        if not frames:
            nothing = Canvas(600, 80)
            nothing.text(300, 40, text, page.NORMAL)
            return text, nothing.picture(text)
        frame = frames[step - 1]
        caption = f"Step {step} of {len(frames)}: {frame.event.text}{_whence(frame.event)}"
        return caption, draw(frame, stage, step)

    steps = range(1, max(1, len(frames)) + 1)
    by_hops = frames and frames[-1].event.kind == "end"
    telling = min(2, len(frames)) if by_hops else steps[-1]
    return StepThrough(look, "step", steps, text=text, telling=telling)


def _check_kept(run):
    if not hasattr(run, "wire"):
        got = f"player expected a Run or a LaunchError, got {type(run).__name__}"
        raise ValueError(f"{got}: pass what launch returned")
    records = [record for rank in run.wire for record in rank if record.bytes]
    kept = (any((r.values, r.result, r.memory)) for r in records)
    if records and not any(kept):
        raise ValueError(
            "player expected a run that kept its messages, got one without: "
            "launch(..., keep_values=True) keeps messages of up to 64 elements"
        )


def _cut(events: list[Event]) -> tuple[list[Event], int]:
    """(the first events, and whatever went wrong; how many are left out)."""
    wrong = [event for event in events if event.wrong][:MOST_FRAMES]
    right = [event for event in events if not event.wrong][: MOST_FRAMES - len(wrong)]
    return right + wrong, len(events) - len(right) - len(wrong)


def _numbered(event: Event, step: int) -> str:
    return event.text if event.kind in ("hop", "end") else f"{step}. {event.text}"


def _whence(event: Event) -> str:
    """The reader's own line that an event comes from."""
    record = event.records.get(event.peer if event.kind == "receive" else event.rank)
    record = record or next(iter(event.records.values()), None)
    if record is None:
        return ""
    code = linecache.getline(record.file, record.line).strip()
    where = f"line {record.line} of {record.function}"
    return f" ({where}: {code})" if code else f" ({where})"


def world_explorer(*, gpus: int = 0, value: int = 4) -> StepThrough:
    """A slider over the world size: which rank sits where on a machine with so many GPUs.

    Notebook 00.
    """

    def look(world_size: int) -> tuple[str, Picture]:
        picture = figures.worlds(world_size, gpus)
        return picture.text, picture

    return StepThrough(look, "world size", range(1, 9), start=value, play=False)


# Pictures


class Stage:
    """Where everything stands, the same for all frames of a film."""

    def __init__(self, frames: list[Frame], world_size: int):
        self.world_size = world_size
        self.two_rows = world_size > 4 or _is_ring(frames, world_size)
        self.columns = math.ceil(world_size / 2) if self.two_rows else world_size
        self.column = WIDTH / self.columns
        self.cell = cell_width(*_all_numbers(frames))
        self.buffers = [self._buffers_of(frames, rank) for rank in range(world_size)]
        longest = max(1, *(max(lengths.values(), default=1) for lengths in self.buffers))
        room = max(1, int((self.column - GAP - 2 * PAD) // self.cell))
        self.per_line = math.ceil(longest / math.ceil(longest / room))
        self.box_width = self.column - GAP
        self.spots = [self._flow(lengths) for lengths in self.buffers]
        tall = [y + LINE * self.lines(n) for spots in self.spots for _, y, n in spots.values()]
        tall += [self._tall_meeting(frame.event) for frame in frames]
        self.box_height = max(LINE, *tall) + 8 + PAD
        self.chip_line = int(560 // self.cell)  # numbers of a message in a line
        self.lane = self._lane(frames)
        status = [said.count("\n") for frame in frames for said in frame.status.values()]
        self.below = 14 + 22 * (1 + max(status)) if status else 0
        self.title = 14 + 28 * max(len(_title(frame, 100)) for frame in frames)
        rows = 2 if self.two_rows else 1
        lanes = 3 if self.two_rows else 1
        self.height = self.title + lanes * self.lane + rows * (self.box_height + self.below) + 46

    def _lane(self, frames: list[Frame]) -> float:
        """Room for the arrows of messages."""
        longest = 0
        for frame in frames:
            for event in (each.event for each in frame.messages):
                if event.rank is not None and event.peer is not None:
                    lengths = [len(r.values or r.result or " ") for r in event.records.values()]
                    longest = max(longest, 1, *lengths)
        return 58 + LINE * min(3, math.ceil(longest / self.chip_line)) if longest else 16

    def _buffers_of(self, frames: list[Frame], rank: int) -> dict[object, int]:
        """{buffer: length}, those most used in this film."""
        lengths: dict[object, int] = {}
        touched: dict[object, int] = {}
        for frame in frames:
            for which, cells in frame.memory[rank].items():
                lengths[which] = max(lengths.get(which, 0), len(cells.values))
            which, _ = frame.marked.get(rank, (None, None))
            touched[which] = touched.get(which, 0) + 1
        kept = sorted(lengths, key=lambda which: -touched.get(which, 0))[: max(6, self.world_size)]
        return {which: length for which, length in lengths.items() if which in kept}

    def lines(self, length: int) -> int:
        return math.ceil(length / self.per_line)

    def _flow(self, lengths: dict[object, int]) -> dict[object, tuple[float, float, int]]:
        """{buffer: x, y, length}: side by side where they fit, the first beside the label."""
        spots, x, y, below = {}, 84 + PAD, 0, LINE
        for which, length in lengths.items():
            width = min(length, self.per_line) * self.cell
            if x + width > self.box_width - 2 * PAD and (x, y) != (0, 0):
                x, y = 0, below + 10
            spots[which] = x, y, length
            x, below = x + width + PAD, max(below, y + self.lines(length) * LINE)
        return spots

    def _tall_meeting(self, event: Event) -> float:
        if event.kind != "meet":
            return 0
        tall = 0
        for rank, record in event.records.items():
            before, after = before_after(rank, record)
            tall = max(tall, self.lines(len(before or " ")) + self.lines(len(after or " ")))
        return 44 + 34 + LINE * tall

    def row(self, rank: int) -> int:
        return 1 if self.two_rows and rank >= self.columns else 0

    def place(self, rank: int) -> tuple[float, float]:
        """The upper left corner of a rank's box.

        In two rows the ranks go round, so that a ring has no long way.
        """
        y = self.title + self.lane
        if not self.row(rank):
            return self.column * rank + GAP / 2, y
        column = self.world_size - 1 - rank
        return self.column * column + GAP / 2, y + self.box_height + self.below + self.lane


def _is_ring(frames: list[Frame], world_size: int) -> bool:
    """Whether nearly all ranks send, or should have, to the next one, or all to the one before."""
    ways = set()
    for frame in frames:
        for event in (each.event for each in frame.messages):
            if event.kind in ("send", "stuck", "lost") and None not in (event.rank, event.peer):
                ways.add((event.rank, event.peer))
    steps = {(dst - src) % world_size for src, dst in ways}
    senders = len({src for src, _ in ways})
    return world_size > 2 and senders >= world_size - 1 and steps in ({1}, {world_size - 1})


def _all_numbers(frames: list[Frame]):
    for frame in frames:
        for buffers in frame.memory:
            yield from (cells.values for cells in buffers.values())
        for record in frame.event.records.values():
            yield record.values
            yield record.result


def _title(frame: Frame, step: int) -> list[str]:
    return textwrap.wrap(_numbered(frame.event, step), 84, max_lines=3, placeholder=" …")


def draw(frame: Frame, stage: Stage, step: int) -> Picture:
    """One frame: ranks with what they hold, and the messages between them."""
    canvas, event = Canvas(WIDTH, stage.height), frame.event
    for line, text in enumerate(_title(frame, step)):
        title = page.WRONG if event.wrong else "black"
        canvas.text(16, 24 + 28 * line, text, page.NORMAL, "left", title)
    for rank in range(stage.world_size):
        _draw_rank(canvas, stage, frame, rank)
    missing = [each for each in frame.wrong if each.rank is not None and each.peer is not None]
    for way in frame.flying:
        if way not in [(each.rank, each.peer) for each in missing]:
            _draw_way(canvas, stage, *way, thin=True)
    for each in missing:
        _draw_missing(canvas, stage, each)
    for each in frame.messages:
        if each.event.is_message:
            near = 0.5 if frame.sent else 0.3 if event.kind == "send" else 0.7
            spot = _draw_way(canvas, stage, each.event.rank, each.event.peer, near)
            _draw_message(canvas, stage, each, *spot)
    owners = [cells.owners for buffers in frame.memory for cells in buffers.values()]
    if event.kind == "meet":
        owners = [theirs for _, _, theirs in meeting(event.records).values()]
    if any(None in theirs for theirs in owners):
        figures.mixed_key(canvas)
    return canvas.picture(event.text)


def _draw_rank(canvas: Canvas, stage: Stage, frame: Frame, rank: int):
    x, y = stage.place(rank)
    said, event = frame.status.get(rank), frame.event
    edge, line = (page.WRONG, 4) if said else (page.GREY, 1.5)
    canvas.box(x, y, stage.box_width, stage.box_height, page.EMPTY, edge, line, round=10)
    canvas.badge(x + PAD, y + 8, rank)
    for number, text in enumerate(said.split("\n") if said else ()):
        below = y + stage.box_height + 18 + 22 * number
        canvas.text(x + stage.box_width / 2, below, text, ink=page.WRONG, bold=True)
    x, y = x + PAD, y + 8
    met = event.kind == "meet" and rank in event.records
    if met and any(record.values for record in event.records.values()):
        before, after, owners = meeting(event.records)[rank]
        y = _draw_row(canvas, stage, x, y + 44, before, [rank] * len(before or ()))
        canvas.arrow((x + 22, y + 2), (x + 22, y + 32), line=4)
        _draw_row(canvas, stage, x, y + 34, after, owners)
        return
    buffer, marked = frame.marked.get(rank, (None, ()))
    for which, (dx, dy, length) in stage.spots[rank].items():
        cells = frame.memory[rank].get(which, Cells([], []))
        rest = [None] * (length - len(cells.values))
        values, owners = cells.values + rest, cells.owners + rest
        frame_them = marked if which == buffer else ()
        _draw_row(canvas, stage, x + dx, y + dy, values, owners, frame_them)


def _draw_row(canvas: Canvas, stage: Stage, x, y, values, owners, marked=()) -> float:
    """Numbers, or an empty box for none; returns where the next row can go."""
    if not values:
        values, owners = [None], [None]
    canvas.cells(x, y, values, owners, stage.cell, LINE, stage.per_line, marked)
    return y + stage.lines(len(values)) * LINE


def _draw_way(canvas: Canvas, stage: Stage, src: int, dst: int, near=0.5, thin=False, wrong=False):
    """The arrow of a message; returns the spot `near` of the way (0 to 1) along it."""
    (x0, y0), (x1, y1) = stage.place(src), stage.place(dst)
    x0 += stage.box_width * (0.62 if src != dst else 0.7)
    x1 += stage.box_width * (0.38 if src != dst else 0.3)
    style = {"ink": page.WRONG if wrong else colour(src), "dashed": thin or wrong}
    style["line"] = 2.2 if thin or wrong else 4.5
    tall = stage.box_height + stage.below + 2
    if stage.row(src) != stage.row(dst):
        if abs(x0 - x1) < stage.box_width:  # one above the other
            x0 = x1 = min(x0, x1) if src > dst else max(x0, x1)
        start, end = (y0 + tall, y1 - 2) if y0 < y1 else (y0 - 2, y1 + tall)
        canvas.arrow((x0, start), (x1, end), **style)
        return x0 + near * (x1 - x0), (start + end) / 2
    depth = 26 + 5 * (src % 4) if thin else 22 + (stage.lane - 44) / 2
    if wrong and src > dst:
        depth -= 24  # two ranks that wait for each other
    edge, level = (
        (y0 - 2, y0 - 2 - depth) if stage.row(src) == 0 else (y0 + tall, y0 + tall + depth)
    )
    canvas.line([(x0, edge), (x0, level), (x1, level)], **style)
    canvas.arrow((x1, level), (x1, edge), **style)
    return x0 + near * (x1 - x0), level


def _draw_missing(canvas: Canvas, stage: Stage, event: Event):
    """A message that somebody waits for and that never is."""
    x, y = _draw_way(canvas, stage, event.rank, event.peer, near=0.35, wrong=True)
    canvas.box(x - 17, y - 17, 34, 34, page.EMPTY, page.WRONG, 3, round=17)
    sign = "✗" if event.kind == "lost" else "?"
    canvas.text(x, y, sign, page.NORMAL, ink=page.WRONG, bold=True)


def _draw_message(canvas: Canvas, stage: Stage, frame: Frame, x: float, y: float):
    """The numbers of a message, or how many there are, on its way."""
    event, fill = frame.event, colour(frame.event.rank)
    record = event.records.get(event.rank) or event.records[event.peer]
    values = record.values if record.values is not None else record.result
    if not values:
        text = record.detail.partition(",")[0]
        half = 5.5 * len(text) + 10
        x = min(max(x, half + 4), WIDTH - half - 4)
        canvas.box(x - half, y - 20, 2 * half, 40, fill)
        canvas.text(x, y, text, ink=ink(fill))
        return
    values = values[: 3 * stage.chip_line]
    per_line = min(len(values), stage.chip_line)
    width, height = per_line * stage.cell, math.ceil(len(values) / per_line) * LINE
    left, top = min(max(x - width / 2, 10), WIDTH - width - 10), y - height / 2
    owners = frame.owners if len(frame.owners) >= len(values) else [event.rank] * len(values)
    canvas.box(left - 5, top - 5, width + 10, height + 10, page.EMPTY, fill, 4, round=4)
    canvas.cells(left, top, values, owners[: len(values)], stage.cell, LINE, per_line)
