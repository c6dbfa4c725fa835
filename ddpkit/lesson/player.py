"""The player: watch the messages between the ranks of a run, even of one that failed.

`player(run)` returns an animation with a slider. `run` is what `launch(..., keep_values=True)`
returned or, if it failed, the LaunchError that it raised. The animation is made in three stages.
The function `replay.replay` turns the records of the ranks' calls into a list of events, such as a
send or a collective. `film.film` makes a frame of each event: every rank's buffers just after it. A
buffer is the storage of a tensor that a rank passes to its calls, or the result of a collective.
`draw`, in this module, makes a picture of each frame, all in one layout (a `Stage`). A step of the
slider shows one of these pictures. With `player(run, by_hop=True)` a frame shows a hop instead: all
messages that can travel at the same time. `circle.draw` then draws a small ring, as a circle.

`world_explorer` is another widget, which draws a process for each rank; its slider sets how many.
"""

import linecache
import math
import textwrap

from ..runtime.errors import LaunchError
from ..tools.units import count
from . import circle, figures, page
from .film import Frame, film, hop_by_hop
from .page import Canvas, Picture, cell_width, colour
from .replay import Event, replay
from .widgets import StepThrough

MOST_FRAMES = 120
MOST_MESSAGES = 2000  # sends and receives of which hops are made
WIDTH = 1040


def player(run, by_hop: bool = False, plays: bool = False) -> StepThrough:
    """Return a widget that replays the messages and collective calls of `run` step by step.

    It begins at the first step that goes wrong, if there is one. It shows at most MOST_FRAMES (120)
    steps: those that go wrong and the first of the others.

    run: the Run that `launch(..., keep_values=True)` returned, or the LaunchError (a HangError or
        RankError) that it raised.
    by_hop: show all messages of a hop, which can travel at the same time, in one step. A ring of 3
        to 8 ranks, each with at most as many numbers as there are ranks, is then drawn as a circle.
        It has no effect if the run made any collective call, failed, or left a message unreceived.
    plays: whether the animation plays once by itself when it is shown.
    ValueError: `run` is no Run or LaunchError. Or its calls moved numbers, but none were kept: the
        launch had no keep_values, or each call moved more than 64.
    """
    _check_kept(run)
    events = replay(run)
    # A failed run may have kept only one end of a message, the board's last calls of each rank.
    by_hop = by_hop and not isinstance(run, LaunchError)
    by_hop = by_hop and all(event.is_message for event in events)
    most = MOST_MESSAGES if by_hop else MOST_FRAMES
    wrong = [event for event in events if event.status][:most]
    right = [event for event in events if not event.status][: most - len(wrong)]
    frames, skipped = film(right + wrong, run.wire), len(events) - len(right) - len(wrong)
    if not frames:
        text = "The ranks sent nothing."
        return StepThrough(lambda _: (text, figures.in_words(text)), "step", range(1, 2))
    if by_hop:
        frames = hop_by_hop(frames, run)[: -1 if skipped else None]  # the end isn't shown
        skipped += len(frames[MOST_FRAMES:])
        del frames[MOST_FRAMES:]
    lines = [_numbered(frame.event, step) for step, frame in enumerate(frames, 1)]
    if skipped:
        more = count(skipped, "more step")
        lines.append(f"… and {more}: a replay shows {MOST_FRAMES} at most")
    world_size = len(run.wire)
    in_a_circle = circle.is_round(frames, world_size)
    stage = None if in_a_circle else Stage(frames, world_size)

    def look(step: int) -> tuple[str, Picture]:
        frame = frames[step - 1]
        if in_a_circle:
            title = f"hop {step} of {len(frames) - 1}" if frame.sent else frame.event.text
            return _whence(frame.event), circle.draw(frame, world_size, title)
        return _whence(frame.event), draw(frame, stage, step)

    telling = min(2, len(frames)) if frames[-1].event.kind == "end" else len(frames)
    steps = range(1, len(frames) + 1)
    start = len(right) + 1 if wrong else 1
    shown = {"start": start, "telling": telling, "plays": plays}
    return StepThrough(look, "step", steps, text="\n".join(lines), **shown)


def _check_kept(run):
    """Raise ValueError unless `run` is a Run or LaunchError with numbers in at least one record.

    A run whose calls moved no bytes, such as one with barriers only, needs none.
    """
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


def _numbered(event: Event, step: int) -> str:
    """Return the event's text with its step's number before it: "3. rank 0 sends [1] to rank 1".

    The number is left out if the event is a hop (several messages at once) or the run's end.
    """
    return event.text if event.kind in ("hop", "end") else f"{step}. {event.text}"


def _whence(event: Event) -> str:
    """Return the line of the user's code that an event comes from, or "".

    For example "line 3 of train: dist.send(x, 1)": line 3 of the file or cell, in function `train`.
    For a receive it is the receiver's line; for a collective call or a hop, that of the first rank
    in `event.records`. Return "" if no source is known, as for a call that ddpkit itself makes.
    """
    record = event.records.get(event.peer if event.kind == "receive" else event.rank)
    record = record or next(iter(event.records.values()), None)
    if record is None:
        return ""
    code = linecache.getline(record.file, record.line).strip()
    where = f"line {record.line} of {record.function}"
    return f"{where}: {code}" if code else ""  # "" for a call from within ddpkit


def world_explorer() -> StepThrough:
    """Return a widget with a slider from 1 to 8 ranks, which draws a process for each rank.

    Used in notebook 00.
    """

    def look(world_size: int) -> tuple[str, Picture]:
        picture = figures.worlds(world_size)
        return picture.text, picture

    return StepThrough(look, "world size", range(1, 9), start=4)


# Pictures

LEFT, ARROWS = 106, 800  # pixels: the left ends of a rank's numbers, and of arrows
PAD, GAP, FOOT = 10, 46, 36  # pixels around numbers, at most between two rows, and at the bottom


class Stage:
    """The layout of an animation's pictures, the same for all its frames, so that nothing jumps.

    A picture has a row for each rank, with the contents of its buffers. It is at most 700
    (`page.TALLEST`) pixels high, unless that leaves less than a line of numbers for each row. A
    buffer that needs more lines than its row has left is shortened; with none left, it is left out.
    All lengths are in pixels, and methods count x and y from the picture's upper left corner.

    frames: all frames of the animation. world_size: the number of ranks. Computed from these:
    cell, per_line: the width of a number's box, and how many boxes fit in a line.
    changes: for each frame, a `figures.Change`, which draws all ranks' numbers before and after a
        collective call. It is None if the frame shows no such call, or if no numbers from before
        the call were kept.
    spots: for each rank, {buffer: (x, y, how many of its numbers are shown)}, without buffers that
        are left out. Here x counts from 106 (LEFT) pixels right of the picture's left edge, and y
        from 10 (PAD) below the top of the rank's row. A buffer is named as in `Frame.memory`: by
        the number of a storage, or by a collective's operation, such as "all_gather".
    tall: the height of a row. said: the height of the text below a row that says what is wrong with
        its rank; 0 if nothing goes wrong. pitch: from the top of a row to the top of the next.
    title, height: the height of the title, and that of a whole picture.
    """

    def __init__(self, frames: list[Frame], world_size: int):
        self.world_size = world_size
        self.cell = cell_width(*_all_numbers(frames))
        self.per_line = int((ARROWS - LEFT - PAD) // self.cell)
        self.title = 24 + 28 * max(len(_title(frame, 100)) for frame in frames)
        self.said = 26 if any(frame.status for frame in frames) else 0
        self.changes = [_change(frame.event) for frame in frames]
        room = (page.TALLEST - self.title - FOOT) / world_size - self.said
        room = max(room, page.ROW + 2 * PAD)
        self.spots = [self._place(_lengths(frames, r), room - 2 * PAD) for r in range(world_size)]
        tall = [page.ROW]
        for spots in self.spots:
            tall += [y + page.ROW * self.lines(length) for _, y, length in spots.values()]
        for change in filter(None, self.changes):
            tall += [page.ROW * change.lines(rank) for rank in change.by_rank]
        self.tall = min(room, max(tall) + 2 * PAD)
        self.pitch = self.tall + self.said + min(GAP, room - self.tall)
        self.height = self.title + world_size * self.pitch + FOOT

    def lines(self, length: int) -> int:
        """Return how many lines it takes to draw `length` numbers, with `per_line` in each."""
        return math.ceil(length / self.per_line)

    def _place(self, lengths: dict[object, int], room: float) -> dict[object, tuple]:
        """Place a rank's buffers in its row, side by side if they fit, otherwise in further lines.

        Return {buffer: (x, y, how many of its numbers are shown)}, as in `spots`. A buffer that
        needs more lines than are left is shortened; one for which none is left is missing.

        lengths: {buffer: how many numbers it holds}. room: the height inside the row's padding.
        """
        spots, x, y, below = {}, 0.0, 0, 0
        for which, length in lengths.items():
            wide = self.cell * min(length, self.per_line)
            if x + wide > ARROWS - LEFT - PAD:
                x, y = 0.0, below
            lines = min(self.lines(length), int((room - y) // page.ROW))
            if lines > 0:
                spots[which] = x, y, min(length, lines * self.per_line)
                below = max(below, y + lines * page.ROW + PAD)
            x += wide + PAD
        return spots

    def top(self, rank: int) -> float:
        """Return how far the upper edge of a rank's row is below the picture's, in pixels."""
        return self.title + rank * self.pitch

    def middle(self, rank: int) -> float:
        """Return the y of the middle of a rank's row, in pixels below the picture's upper edge."""
        return self.top(rank) + self.tall / 2

    def way(self, src: int, dst: int) -> float:
        """Return the x, in pixels, of the vertical arrow from rank `src` to rank `dst`.

        Ranks are rows. Arrows that cross the same gap between two rows differ in x.
        """
        far = max(1, abs(dst - src))
        place = far * (far - 1) + 2 * (min(src, dst) % far) + (dst < src)
        places = self.world_size * max(1, self.world_size - 1)
        return ARROWS + (place + 0.5) * (WIDTH - 10 - ARROWS) / places


def _lengths(frames: list[Frame], rank: int) -> dict[object, int]:
    """Return {buffer of `rank`: the most numbers that any frame shows in it}, first seen first."""
    lengths: dict[object, int] = {}
    for frame in frames:
        for which, cells in frame.memory[rank].items():
            lengths[which] = max(lengths.get(which, 0), len(cells))
    return lengths


def _change(event: Event) -> figures.Change | None:
    """Return an object that can draw each rank's numbers before and after the collective `event`.

    None: `event` is something else, or no numbers from before it were kept (a barrier has none).
    """
    kept = any(before for before, _, _ in event.change.values())
    return figures.Change(event.change) if kept else None


def _all_numbers(frames: list[Frame]):
    """Yield each list of numbers that the frames show, or None for a list that wasn't kept."""
    for frame in frames:
        for buffers in frame.memory:
            for cells in buffers.values():
                yield [value for value, _ in cells]
        for record in frame.event.records.values():
            yield record.values
            yield record.result


def _title(frame: Frame, step: int) -> list[str]:
    """Return the lines of a frame's title, such as ["3. rank 0 sends [1] to rank 1"].

    There are at most three; the rest is cut off. step: the slider's step with the frame, from 1.
    """
    return textwrap.wrap(_numbered(frame.event, step), 84, max_lines=3, placeholder=" …")


def draw(frame: Frame, stage: Stage, step: int) -> Picture:
    """Draw a frame of the animation: the ranks with their numbers, and the messages between them.

    stage: the layout of all frames. step: the slider's step with this frame, from 1, for the title.
    """
    canvas, event = Canvas(WIDTH, stage.height), frame.event
    for line, text in enumerate(_title(frame, step)):
        title = page.WRONG if event.status else "black"
        canvas.text(16, 24 + 28 * line, text, page.NORMAL, "left", title)
    change = stage.changes[step - 1]
    for rank in range(stage.world_size):
        _draw_rank(canvas, stage, frame, change, rank)
    missing = [wrong for wrong in frame.wrong if wrong.rank is not None and wrong.peer is not None]
    for src, dst in set(frame.flying) - {(wrong.rank, wrong.peer) for wrong in missing}:
        _draw_way(canvas, stage, src, dst, colour(src), dashed=True)
    for wrong in missing:
        _draw_missing(canvas, stage, wrong)
    messages = [message for message in frame.sent or [frame] if message.event.is_message]
    for message in messages:
        src, dst = message.event.rank, message.event.peer
        _draw_way(canvas, stage, src, dst, colour(src))
    for message in messages:
        _draw_message(canvas, stage, message, event.kind == "hop")
    owners = {owner for row in frame.memory for cells in row.values() for _, owner in cells}
    for _, _, theirs in change.by_rank.values() if change else ():
        owners.update(theirs)
    if None in owners:
        canvas.mixed_key()
    return canvas.picture(event.text)


def _draw_rank(canvas: Canvas, stage: Stage, frame: Frame, change, rank: int):
    """Draw the row of a rank: its label, its numbers, and below them what is wrong with it.

    What is wrong is `frame.status[rank]`, such as "waits here for ever"; most ranks have no entry.

    change: None or, for a collective call whose numbers were kept, the `figures.Change` that can
        draw each rank's numbers before and after it. If `rank` took part in the call, its numbers
        before and after are drawn instead of its buffers.
    """
    y, said = stage.top(rank), frame.status.get(rank, "")
    fill, edge, line = (page.EMPTY, page.WRONG, 4) if said else (page.PALE, page.FAINT, 1)
    canvas.box(4, y, WIDTH - 8, stage.tall, fill, edge, line, round=8)
    canvas.text(LEFT, y + stage.tall + 15, said, align="left", ink=page.WRONG, bold=True)
    y += PAD
    canvas.badge(12, y, rank)
    if change and rank in change.by_rank:
        change.draw(canvas, LEFT, y, rank)
        return
    buffer, marked = frame.marked.get(rank, (None, ()))
    for which, (dx, dy, length) in stage.spots[rank].items():
        cells = frame.memory[rank].get(which, []) + [(None, None)] * length
        values, owners = zip(*cells[:length], strict=True)
        framed = marked if which == buffer else ()
        place = LEFT + dx, y + dy
        canvas.cells(*place, values, owners, stage.cell, stage.per_line, framed)


def _draw_way(canvas: Canvas, stage: Stage, src: int, dst: int, ink: str, dashed=False):
    """Draw the arrow of a message from the row of rank `src` to that of rank `dst`.

    A message from a rank to itself gets no arrow. ink: the colour. dashed: thinner, in dashes.
    """
    x, half = stage.way(src, dst), math.copysign(page.ROW / 2 + 2, dst - src)
    if src != dst:
        ends = (x, stage.middle(src) + half), (x, stage.middle(dst) - half)
        canvas.arrow(*ends, ink, 2.2 if dashed else 4.5, dashed)


def _draw_missing(canvas: Canvas, stage: Stage, event: Event):
    """Draw the dashed arrow of a message that went wrong, with a sign halfway.

    The sign is "✗" for an event of kind "lost" (never received, or never waited for). It is "?" for
    "stuck" (sender or receiver waits in vain) and "differ" (the two disagree about size or dtype).

    event: the message's event, with the sender as `rank` and the receiver as `peer`.
    """
    src, dst = event.rank, event.peer
    _draw_way(canvas, stage, src, dst, page.WRONG, dashed=True)
    x, y = stage.way(src, dst), (stage.middle(src) + stage.middle(dst)) / 2
    canvas.box(x - 17, y - 17, 34, 34, page.EMPTY, page.WRONG, 3, round=17)
    sign = "✗" if event.kind == "lost" else "?"
    canvas.text(x, y, sign, page.NORMAL, ink=page.WRONG, bold=True)


def _draw_message(canvas: Canvas, stage: Stage, frame: Frame, by_hop: bool):
    """Draw a message's numbers in a box, and give it the motion that it makes in the browser.

    The box of a send stands still at the sender. That of a receive is drawn at the receiver, and
    moves there from the sender's row. In a step that shows a whole hop, all messages are sends, but
    their boxes move from the senders to the receivers' rows. Numbers that don't fit into 420 pixels
    are left out. If the numbers weren't kept, their count and dtype are drawn.

    frame: the frame of this send or receive alone: for a hop, one of those in the hop's `sent`.
    by_hop: whether the step shows a whole hop, i.e. all messages that can travel at the same time.
    """
    event, fill = frame.event, colour(frame.event.rank)
    at = event.peer if event.kind == "receive" else event.rank
    way = 72 / page.DPI * (stage.middle(event.peer) - stage.middle(event.rank))  # SVG's points
    hop = page.moving((0, 0), (0, way)) if by_hop else None
    canvas.gid = page.moving((0, -way), (0, 0)) if event.kind == "receive" else hop
    x, y = stage.way(event.rank, event.peer), stage.middle(at) - page.ROW / 2
    record = event.records.get(event.rank) or event.records[event.peer]
    values = record.values or record.result or [record.detail.partition(",")[0]]
    values = values[: int(420 // stage.cell)]
    owners = frame.owners if len(frame.owners) >= len(values) else [event.rank] * len(values)
    cell = max(stage.cell, cell_width(values))
    left = x + cell / 2 - cell * len(values)
    canvas.box(
        left - 5, y - 5, cell * len(values) + 10, page.ROW + 10, page.EMPTY, fill, 4, round=4
    )
    canvas.cells(left, y, values, owners, cell)
    canvas.gid = None
