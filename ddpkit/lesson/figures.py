"""All figures of the notebooks: each shows one thing, as a PNG on white, and says the same in words.

A rank has one colour and one label everywhere. No text is smaller than 14 pt.
"""

import colorsys
import io
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..tools import floats

DPI = 96  # a figure's pixel is a pixel of the page, so 14 pt in the figure are 14 pt on the screen
WIDEST = 1040  # pixels that a page of JupyterLab has room for
SMALL, NORMAL, LARGE = 14, 16, 18  # points
DIGIT = 12.2  # pixels that a digit of SMALL text takes

# Okabe and Ito's colours, which people with any kind of colour vision can tell apart.
RANK_COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000"]
MIXED = "#DDDDDD"  # a sum, or data of several ranks
EMPTY = "#FFFFFF"
UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
WRONG = "#C8102E"
GREY = "#666666"
PALE = "#F4F4F4"
FAINT = "#AAAAAA"


def colour(rank: int | None) -> str:
    """The colour of `rank`; neutral for None. From rank 8 on they come again, and labels tell the ranks apart."""
    return MIXED if rank is None else RANK_COLOURS[rank % len(RANK_COLOURS)]


def ink(fill: str) -> str:
    """Black or white, whichever is easier to read on `fill`."""
    red, green, blue = (int(fill[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return "white" if colorsys.rgb_to_yiq(red, green, blue)[0] < 0.4 else "black"


# Words and numbers.


def number(value) -> str:
    """A value as it stands in a cell: whole numbers whole, others with up to three digits."""
    if value is None:
        return ""
    if isinstance(value, bool | complex | str):
        return str(value)
    if math.isfinite(value) and value == int(value) and abs(value) < 1e8:
        return str(int(value))
    shown = f"{value:.3g}" if len(f"{value:.3g}") <= 6 else f"{value:.2g}"
    if len(shown) <= 6:
        return shown
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def numbers(values: Sequence | None, most: int = 16) -> str:
    """[1, 10, 100]; a long list is cut."""
    if values is None:
        return "nothing"
    shown = [number(value) for value in values[:most]]
    return f"[{', '.join(shown + ['…'] * (len(values) > most))}]"


def name_ranks(ranks: Iterable[int], world_size: int | None = None) -> str:
    """'rank 2', 'ranks 0, 1 and 3', 'every rank'."""
    ranks = list(ranks)
    if len(ranks) == world_size:
        return "every rank"
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 3 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def count(many: int, word: str) -> str:
    return f"{many} {word}{'s' * (many != 1)}"


def size(nbytes: float) -> str:
    """Bytes for people: 96 B, 1.5 MB."""
    for unit, factor in UNITS:
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes:.0f} B"


def flat(values) -> list | None:
    """All numbers of a tensor, a list, or a list of such, one after the other."""
    if values is None:
        return None
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, list | tuple):
        return [values]
    return [value for part in values for value in (flat(part) if part is not None else [None])]


# Drawing.


class Picture:
    """A drawn figure: `text` says what it shows, `png` is the image."""

    def __init__(self, png: bytes, text: str):
        self.png, self.text = png, text

    def __repr__(self):
        return self.text

    def _repr_mimebundle_(self, include=None, exclude=None):
        return {"text/plain": self.text, "image/png": self.png}


class Canvas:
    """A white page measured in pixels from its upper left corner."""

    def __init__(self, width: float, height: float):
        from matplotlib.figure import Figure

        self.width, self.height = width, height
        self.figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI, facecolor="white")
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, width), ylim=(height, 0))
        self.axes.set_axis_off()
        self._layers = itertools.count(1)  # what is drawn later lies above

    def box(self, x, y, width, height, fill=EMPTY, edge="black", line=1.5, dashed=False, hatch=None, round=0):
        from matplotlib.patches import FancyBboxPatch

        style = f"round,pad=0,rounding_size={round}" if round else "square,pad=0"
        dash = (0, (3, 2)) if dashed else "solid"
        patch = FancyBboxPatch((x, y), width, height, style, fc=fill, ec=edge, lw=line, ls=dash, hatch=hatch)
        self._add(patch)

    def _add(self, patch):
        patch.set_zorder(next(self._layers))
        self.axes.add_patch(patch)

    def text(self, x, y, text, points=SMALL, align="center", ink="black", bold=False):
        weight = "bold" if bold else "normal"
        style = {"fontsize": points, "ha": align, "va": "center_baseline", "color": ink, "weight": weight}
        self.axes.text(x, y, text, zorder=next(self._layers), **style)

    def line(self, points, ink="black", line=1.5, dashed=False):
        style = {"color": ink, "lw": line, "ls": (0, (3, 2)) if dashed else "solid", "solid_joinstyle": "round"}
        self.axes.plot(*zip(*points, strict=True), zorder=next(self._layers), **style)

    def arrow(self, start, end, ink="black", line=3.0, bend=0.0, dashed=False):
        """bend: how far the middle lies beside the straight line, as a part of its length; to the left if positive."""
        from matplotlib.patches import FancyArrowPatch

        style = f"simple,head_length={4 * line},head_width={4 * line},tail_width={line}"
        if dashed:
            style = f"->,head_length={2 * line},head_width={1.4 * line}"
        path = f"arc3,rad={2 * bend}"
        dash = (0, (3, 2)) if dashed else "solid"
        width = line if dashed else 0
        style = {"arrowstyle": style, "connectionstyle": path, "lw": width, "ls": dash}
        self._add(FancyArrowPatch(start, end, color=ink, shrinkA=0, shrinkB=0, **style))

    def badge(self, x, y, rank, width=84, height=36, text=None):
        """The label of a rank, in its colour."""
        fill = colour(rank)
        self.box(x, y, width, height, fill, round=6)
        self.text(x + width / 2, y + height / 2, text or f"rank {rank}", ink=ink(fill), bold=True)

    def cells(self, x, y, values, owners, width, height=36, per_line=None, marked=()):
        """Numbers in boxes, side by side, in the colours of their owners; None is an empty box."""
        per_line = per_line or len(values)
        for index, (value, owner) in enumerate(zip(values, owners, strict=True)):
            left, top = x + index % per_line * width, y + index // per_line * height
            known = value is not None
            fill = colour(owner) if known and owner != "blank" else EMPTY
            edge = ("black" if ink(fill) == "black" else GREY) if known else FAINT
            self.box(left, top, width, height, fill, edge, 1.2, dashed=not known)
            self.text(left + width / 2, top + height / 2, number(value), ink=ink(fill))
        for line, group in itertools.groupby(marked, lambda index: index // per_line):
            group = list(group)
            left, top = x + group[0] % per_line * width, y + line * height
            self.box(left, top, len(group) * width, height, "none", "black", 4)

    def picture(self, text: str) -> Picture:
        return Picture(self.png(), text)

    def png(self) -> bytes:
        """The page as PNG, its colours from a palette: a quarter of the size."""
        from PIL import Image

        raw, small = io.BytesIO(), io.BytesIO()
        self.figure.savefig(raw, dpi=DPI, facecolor="white")
        Image.open(raw).convert("RGB").quantize(128, Image.Quantize.MEDIANCUT, dither=0).save(
            small, "png", optimize=True
        )
        return small.getvalue()


def cell_width(*rows: Sequence | None) -> float:
    """Wide enough for the longest number in any of the rows."""
    longest = max((len(number(value)) for row in rows for value in row or ()), default=1)
    return max(44, longest * DIGIT + 14)


# What a collective does.


def before_after(pairs: Iterable, title: str | None = None, owners: Sequence | None = None) -> Picture:
    """What each rank holds before and after a collective, a row for each rank.

    pairs: by rank, (before, after), for instance a run whose function returned that; each a list or tensor of any
        length, or None for nothing yet.
    owners: by rank, for each number after, whose data it is (None: of several); found by comparing, unless given.
    """
    before, after = zip(*([flat(row) for row in pair] for pair in pairs), strict=True)
    owners = owners or find_owners(before, after)
    width, gap, label = cell_width(*before, *after), 120, 100
    columns = [max([len(row or ()) for row in rows] + [1]) for rows in (before, after)]
    stacked = 2 * label + sum(columns) * width + gap > WIDEST
    if stacked:
        columns = [min(n, int((WIDEST - label) // width)) for n in columns]
    grids = [label + n * width for n in columns]
    lines = [
        [math.ceil(max(len(row or ()), 1) / n) for row in rows]
        for rows, n in zip((before, after), columns, strict=True)
    ]
    tall = [44 + sum(36 * n + 12 for n in each) for each in lines]
    top = 56 if title else 10
    legend = 34 if any(owner is None for row in owners for owner in row) else 0
    if stacked:
        canvas = Canvas(max(*grids, 300) + 30, top + sum(tall) + 64 + legend)
        spots = [(10, top), (10, top + tall[0] + 64)]
        middle = 10 + label + max(columns) * width / 2
        canvas.arrow((middle, top + tall[0]), (middle, top + tall[0] + 60), line=7)
    else:
        canvas = Canvas(sum(grids) + gap + 30, top + max(tall) + 6 + legend)
        spots = [(10, top), (10 + grids[0] + gap, top)]
        middle = top + 40 + (max(tall) - 44) / 2
        canvas.arrow((grids[0] + 35, middle), (grids[0] + gap - 10, middle), line=10)
    if title:
        canvas.text(canvas.width / 2, 28, title, LARGE, bold=True)
    own = [[rank] * len(row or ()) for rank, row in enumerate(before)]
    headings = ("before", "after")
    for heading, (x, y), rows, whose, n in zip(headings, spots, (before, after), (own, owners), columns, strict=True):
        canvas.text(x + label + n * width / 2, y + 18, heading, NORMAL)
        _draw_rows(canvas, x, y + 40, rows, whose, width, n)
    if legend:
        mixed_legend(canvas)
    name = f"{title}: " if title else ""
    return canvas.picture(f"{name}before, {_say_rows(before)}; after, {_say_rows(after)}.")


def mixed_legend(canvas: Canvas):
    """What grey means, at the foot of the canvas."""
    canvas.box(16, canvas.height - 32, 30, 20, MIXED)
    canvas.text(54, canvas.height - 22, "a sum, or data of several ranks", align="left")


def _draw_rows(canvas: Canvas, x, y, rows, owners, width, per_line):
    for rank, row in enumerate(rows):
        canvas.badge(x, y, rank)
        if row:
            canvas.cells(x + 100, y, row, owners[rank], width, per_line=per_line)
        else:
            canvas.cells(x + 100, y, [None], [None], width)
        y += 36 * math.ceil(max(len(row or ()), 1) / per_line) + 12


def _say_rows(rows: list[list | None]) -> str:
    """'rank 0 has [1, 2], ranks 1 and 2 have nothing'."""
    alike: dict[str, list[int]] = {}
    for rank, row in enumerate(rows):
        alike.setdefault(numbers(row or None), []).append(rank)
    said = []
    for text, ranks in alike.items():
        who = name_ranks(ranks, len(rows) if len(rows) > 1 else None)
        said.append(f"{who} {'have' if who.startswith('ranks') else 'has'} {text}")
    return ", ".join(said)


def find_owners(before: list[list | None], after: list[list | None]) -> list[list[int | None]]:
    return [[_owner(value, rank, at, before) for at, value in enumerate(row or ())] for rank, row in enumerate(after)]


def _owner(value, rank: int, at: int, before: list[list | None]) -> int | None:
    """The rank that alone had `value`; of several, the one that keeps its own; else None."""
    if rank < len(before) and before[rank] and at < len(before[rank]) and before[rank][at] == value:
        return rank
    had = [rank for rank, row in enumerate(before) if value in (row or ())]
    return had[0] if len(had) == 1 else None


# Bytes on the wire.


def _named(run_or_runs) -> dict[str, object]:
    """{name: run}, also of one run alone."""
    return run_or_runs if isinstance(run_or_runs, dict) else {"": run_or_runs}


def sent_bytes(run) -> list[int]:
    """Bytes that each rank sent, message by message (`send` records; torch's own collectives keep theirs inside)."""
    return [sum(record.bytes for record in records if record.op == "send") for records in run.wire]


def received_bytes(run) -> list[int]:
    """Bytes that each rank received, message by message."""
    return [sum(record.bytes for record in records if record.op == "recv") for records in run.wire]


def traffic(run_or_runs) -> Picture:
    """Bytes sent and received by each rank, for one run or for {name: run} side by side on one scale."""
    panels = []
    for name, run in _named(run_or_runs).items():
        sent, received = sent_bytes(run), received_bytes(run)
        panels.append((name, sent, received, _total_and_busiest(sent, received)))
    most = max([1] + [n for _, sent, received, _ in panels for n in sent + received])
    unit, factor = next((each for each in UNITS if most >= each[1]), ("bytes", 1))
    spots, widths, x, y = [], [], 0, 0
    for _, sent, _, _ in panels:
        width = max(116 * len(sent) + 40, 420)
        if x + width > WIDEST:
            x, y = 0, y + 400
        spots.append((x, y))
        widths.append(width)
        x += width
    canvas = Canvas(max(x + width for (x, _), width in zip(spots, widths, strict=True)), y + 446)
    for (x, y), width, panel in zip(spots, widths, panels, strict=True):
        _draw_traffic(canvas, x, y, width, most, factor, *panel)
    middle, y = canvas.width / 2, canvas.height - 40
    canvas.box(middle - 190, y, 30, 20, GREY)
    canvas.text(middle - 152, y + 10, "sent", align="left")
    canvas.box(middle - 80, y, 30, 20, EMPTY, hatch="///")
    canvas.text(middle - 42, y + 10, f"received, in {unit}", align="left")
    texts = [f"{name}: " * bool(name) + ", ".join(notes) for name, _, _, notes in panels]
    return canvas.picture("Bytes by rank. " + ". ".join(texts) + ".")


def _total_and_busiest(sent: list[int], received: list[int]) -> tuple[str, str]:
    both = [out + into for out, into in zip(sent, received, strict=True)]
    if not any(both):
        return "no messages", "so no busiest rank"
    busiest = [rank for rank, n in enumerate(both) if n == max(both)]
    who = f"{name_ranks(busiest, len(both) if len(both) > 1 else None)}, {size(max(both))} in and out"
    return f"total sent {size(sum(sent))}", f"busiest: {who}"


def _draw_traffic(canvas: Canvas, x, y, width, most, factor, name, sent, received, notes):
    centre, ground, high, bar = x + width / 2, y + 346, 200, 48
    canvas.text(centre, y + 24, name, LARGE, bold=True)
    for line, note in enumerate(notes):
        canvas.text(centre, y + 54 + 26 * line, note)
    step = 116
    x = centre - step * len(sent) / 2
    for rank, (out, into) in enumerate(zip(sent, received, strict=True)):
        middle = x + step * (rank + 0.5)
        for nbytes, left, fill, hatch in ((out, middle - bar, colour(rank), None), (into, middle, EMPTY, "///")):
            tall = high * nbytes / most
            canvas.box(left, ground - tall, bar, tall, fill, hatch=hatch)
            canvas.text(left + bar / 2, ground - tall - 14, f"{nbytes / factor:.3g}")
        canvas.badge(middle - 42, ground + 6, rank)
    canvas.line([(x, ground), (x + step * len(sent), ground)])


# Messages, hop by hop.


def hop_numbers(run) -> dict[tuple, int]:
    """The hop, from 1 on, of each message of `run` that was sent and received, by (channel, seq).

    A message is one hop later than the last one that its sender or its receiver had to finish before it. So many hops
    follow one another however fast the wire is; messages that go at the same time are in the same hop.
    """
    ends: dict[tuple, set] = {}
    for records in run.wire:
        for record in records:
            if record.op in ("send", "recv"):
                ends.setdefault((record.channel, record.seq), set()).add(record.op)
    both = {key for key, ops in ends.items() if len(ops) == 2}
    lanes = [[r for r in records if (r.channel, r.seq) in both] for records in run.wire]
    depth = dict.fromkeys(both, 1)
    while any(_push_later(records, depth) for records in lanes):
        pass
    return depth


def hops_of(run) -> list[list[tuple[int, int, int]]]:
    """The messages of `run` by hop, each as (src, dst, bytes)."""
    numbers = hop_numbers(run)
    hops: list[list] = [[] for _ in range(max(numbers.values(), default=0))]
    for rank, records in enumerate(run.wire):
        for record in records:
            number = numbers.get((record.channel, record.seq)) if record.op == "send" else None
            if number:
                hops[number - 1].append((rank, record.peer, record.bytes))
    return [sorted(hop) for hop in hops]


def _push_later(records: list, depth: dict[tuple, int]) -> bool:
    """Put each message of one rank after those that this rank had finished when it began it; whether any moved."""
    moved, so_far = False, 0
    steps = [(r.issued, 1, r) for r in records] + [(r.done, 0, r) for r in records if r.done is not None]
    for _, begins, record in sorted(steps, key=lambda step: step[:2]):
        key = (record.channel, record.seq)
        if not begins:
            so_far = max(so_far, depth[key])
        elif depth[key] <= so_far < len(depth):  # the bound ends this also where records contradict each other
            depth[key], moved = so_far + 1, True
    return moved


def hops(run) -> Picture:
    """The messages of a run as arrows between ranks, a row for each hop."""
    rows, world_size = hops_of(run), len(run.wire)
    step, tall, left = min(220, (WIDEST - 120) / world_size), 96, 110
    canvas = Canvas(left + step * world_size + 10, 62 + tall * max(1, len(rows)) + 10)
    middle = [left + step * (rank + 0.5) for rank in range(world_size)]
    for at in range(0, len(rows), 2):
        canvas.box(0, 62 + tall * at, canvas.width, tall, PALE, "none")
    for rank, x in enumerate(middle):
        canvas.line([(x, 50), (x, canvas.height - 8)], colour(rank), 2)
        canvas.badge(x - 42, 12, rank)
    for number, row in enumerate(rows, 1):
        top = 62 + tall * (number - 1)
        canvas.text(14, top + tall / 2, f"hop {number}", NORMAL, "left", bold=True)
        for src, dst, _ in row:
            canvas.arrow((middle[src], top + 14), (middle[dst], top + tall - 14), colour(src), 4.5)
    messages = sum(map(len, rows))
    said = [f"hop {at}: {', '.join(f'{src} to {dst}' for src, dst, _ in row)}" for at, row in enumerate(rows, 1)]
    return canvas.picture(
        f"{count(messages, 'message')} in {count(len(rows), 'hop')}. {'; '.join(said)}".rstrip() + "."
    )


# Time.


def timeline(run_or_runs, after: str | None = None) -> Picture:
    """When each rank computed, waited, and had calls under way on the wire, for one run or {name: run} on one scale.

    A rank has two lines: above, what its program does; below, what its wire does. Overlap is a wire that is busy under
    a program that computes. after: begin where each rank has made its last call of that name, say "broadcast".
    """
    parts = {name: _part(run, after) for name, run in _named(run_or_runs).items()}
    runs = {name: part for name, part in parts.items() if any(part.wire)}
    longest = max([_span(run)[1] - _span(run)[0] for run in runs.values()], default=0) or 1e-3
    left, width = 110, 900
    tops, y = [], 56
    for name, run in runs.items():
        tops.append(y + 40 * bool(_heading(name, run)))
        y = tops[-1] + 76 * len(run.wire) + 16
    canvas = Canvas(left + width + 30, y + 46)
    for at, (fill, hatch, label) in enumerate(
        ((FAINT, None, "computes"), (EMPTY, "///", "waits"), (colour(0), None, "calls under way, in the rank's colour"))
    ):
        canvas.box(left + 180 * at, 16, 30, 20, fill, hatch=hatch)
        canvas.text(left + 180 * at + 40, 26, label, align="left")
    canvas.box(left + 375, 16, 15, 20, colour(1))
    for (name, run), top in zip(runs.items(), tops, strict=True):
        canvas.text(14, top - 22, _heading(name, run), NORMAL, "left", bold=True)
        for rank, records in enumerate(run.wire):
            line = top + 76 * rank
            canvas.badge(12, line + 12, rank)
            canvas.box(left, line, width, 60, PALE, "none")
            _draw_lane(canvas, records, run.begun[rank], rank, line, left, _span(run)[0], width / longest)
    draw_scale(canvas, left, y, width, longest)
    said = [f"{name}: " * bool(name) + _said_calls(run) for name, run in runs.items()]
    return canvas.picture("Timeline. " + ". ".join(said) + ".")


@dataclass
class _Part:
    """Some of the records of a run, and when each rank began with them."""

    wire: list[list]
    begun: list[float | None]
    link: object


def _part(run, after: str | None) -> _Part:
    """What the ranks of `run` said after their last call of `after`."""
    wire, begun = [], []
    for records in run.wire:
        start = max((at for at, record in enumerate(records) if record.op == after), default=-1)
        wire.append(records[start + 1 :])
        begun.append(records[start].done if start >= 0 else records[0].issued if records else None)
    return _Part(wire, begun, getattr(run, "link", None))


def _heading(name: str, run) -> str:
    link = getattr(run, "link", None)
    return ", ".join([name] * bool(name) + [f"emulated link: {link}"] * bool(link))


def _span(run) -> tuple[float, float]:
    """When the first rank began and the last call ended."""
    records = [record for records in run.wire for record in records]
    return min(begun for begun in run.begun if begun is not None), _last(records)


def _said_calls(run) -> str:
    """'rank 0: 3 sends, 1 recv; rank 1: ...': calls by rank, in the order of their first use."""
    said: dict[str, list[int]] = {}
    for rank, records in enumerate(run.wire):
        ops = list(dict.fromkeys(record.op for record in records))
        calls = [count(sum(r.op == op for r in records), op) for op in ops]
        said.setdefault(", ".join(calls) or "no calls", []).append(rank)
    world_size = len(run.wire) if len(run.wire) > 1 else None
    return "; ".join(f"{name_ranks(ranks, world_size)}: {calls}" for calls, ranks in said.items())


def merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans of time without overlaps, in order."""
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def under_way(records: Sequence) -> list[tuple[float, float, object]]:
    """(begin, end, record) for each call of one rank, in the order in which they were done.

    Calls of one channel travel one after the other: each begins when it was issued, or later, when the one before it
    was done; unless it overtook that one. A call that was never done ends with the last that is known of the rank.
    """
    last, free, spans = _last(records), {}, []
    for record in records:
        begin, end, before = record.issued, record.done or last, free.get(record.channel, 0.0)
        spans.append((before if begin < before < end else begin, end, record))
        free[record.channel] = max(before, end)
    return sorted(spans, key=lambda span: span[1])


def _last(records: Sequence) -> float:
    """When the last that is known of these calls happened."""
    return max(max(r.issued, r.done or 0.0, r.waited or 0.0) for r in records)


def _draw_lane(canvas: Canvas, records: list, begun: float, rank: int, top, left: float, zero: float, scale: float):
    if not records:
        return
    last = _last(records)

    def bar(span, fill, **style):
        canvas.box(left + (span[0] - zero) * scale, top, (span[1] - span[0]) * scale, 29, fill, line=0.5, **style)

    bar((begun, last), FAINT, edge="none")
    waits = [(r.waited, r.done or last) for r in records if r.waited is not None]
    for span in merged((begin, end) for begin, end in waits if begin < end):
        bar(span, EMPTY, hatch="///")
    _draw_calls(canvas, records, rank, top + 31, left, zero, scale)


def _draw_calls(canvas: Canvas, records: list, rank: int, y: float, left: float, zero: float, scale: float):
    """A box for each call; of those under way together, the later one shows where it outlasts the earlier."""
    fill, hatch = colour(rank), "..." if rank >= len(RANK_COLOURS) else None
    spans = under_way(records)
    hidden = [0.0] + [end for _, end, _ in spans[:-1]]  # until when the earlier ones lie above
    for (begin, end, record), until in reversed(list(zip(spans, hidden, strict=True))):
        wide, seen = (end - begin) * scale, max(begin, until)
        canvas.box(left + (begin - zero) * scale, y, wide, 29, fill, EMPTY if wide > 6 else "none", 1, hatch=hatch)
        half = 4.9 * len(record.op) + 2
        if (end - seen) * scale > 2 * half:
            middle = left + ((seen + end) / 2 - zero) * scale
            canvas.box(middle - half, y + 3, 2 * half, 23, fill, "none")
            canvas.text(middle, y + 14, record.op, ink=ink(fill))


def draw_scale(canvas: Canvas, left, y, width, seconds):
    """A ruler in milliseconds."""
    step = 10 ** math.floor(math.log10(seconds / 3))
    step = next(step * factor for factor in (1, 2, 5, 10) if seconds / (step * factor) <= 6)
    canvas.line([(left, y), (left + width, y)])
    for at in range(int(seconds / step + 1e-9) + 1):
        x = left + width * at * step / seconds
        canvas.line([(x, y), (x, y + 7)])
        canvas.text(x, y + 24, f"{at * step * 1e3:.6g}" + " ms" * (at == 0))


# Floats, bit by bit.

FIELD_COLOURS = {"sign": RANK_COLOURS[3], "exponent": RANK_COLOURS[1], "fraction": RANK_COLOURS[4]}


def float_bits(numbers: Sequence[floats.Number], chosen: floats.Number | None = None) -> Picture:
    """The bits of numbers in their formats, a row for each, with the same places under one another.

    chosen: the one of them whose row stands out.
    """
    cell, left, row = 25, 120, 74
    point = left + cell * (1 + max(number.format.exponent_bits for number in numbers))
    right = point + cell * max(number.format.fraction_bits for number in numbers)
    canvas = Canvas(max(right, left + 640) + 20, 56 + row * len(numbers))
    for at, (name, fill) in enumerate(FIELD_COLOURS.items()):
        canvas.box(left + 150 * at, 14, 30, 20, fill)
        canvas.text(left + 40 + 150 * at, 24, name, align="left")
    for at, number in enumerate(numbers):
        y = 52 + row * at
        if number is chosen:
            canvas.box(4, y - 6, canvas.width - 8, row - 4, PALE, "black", 2.5)
        canvas.text(14, y + 16, number.format.name, NORMAL, "left", bold=True)
        start = point - cell * (1 + number.format.exponent_bits)
        for place, bit in enumerate(number.bits.replace(" ", "")):
            fill = FIELD_COLOURS[floats.field_of(place, number.format)]
            canvas.box(start + cell * place, y, cell, 32, fill)
            canvas.text(start + cell * (place + 0.5), y + 16, bit)
        spacing = "" if number.spacing is None else f", spacing {number.spacing}"
        canvas.text(left, y + 48, f"{number.value}{spacing}", align="left")
    return canvas.picture(
        ". ".join(f"{number.format.name}: {number.bits} is {number.value}" for number in numbers) + "."
    )


# Where ranks live.


def worlds(world_size: int, gpus: int = 0) -> Picture:
    """Which rank sits where on a machine with so many GPUs: a process each, and the device it computes on."""
    devices = [f"GPU {at}" for at in range(gpus)] or ["CPU"]
    home = [rank % len(devices) for rank in range(world_size)]
    per_row = min(max(world_size, 1), 8)
    rows = math.ceil(world_size / per_row)
    width = 970  # the same for every world, so that a slider over it doesn't make it jump
    step = min(230, (width - 50) / per_row)
    canvas = Canvas(width, 60 + 136 * rows + 190)
    canvas.box(10, 10, width - 20, canvas.height - 20, PALE, "black", 2, round=14)
    canvas.text(30, 36, f"this machine: a world of {count(world_size, 'rank')}", LARGE, "left", bold=True)
    device_step = (width - 50) / len(devices)
    ground = 60 + 136 * rows + 70
    for at, name in enumerate(devices):
        x = 25 + device_step * at + 6
        canvas.box(x, ground, device_step - 12, 84, "#FFFFFF", "black", 2.5)
        canvas.text(x + device_step / 2 - 6, ground + 26, name, NORMAL, bold=True)
        ranks = [rank for rank in range(world_size) if home[rank] == at]
        canvas.text(x + device_step / 2 - 6, ground + 58, name_ranks(ranks) if ranks else "free")
    for rank in range(world_size):
        row, column = divmod(rank, per_row)
        x = width / 2 + step * (column - min(per_row, world_size - row * per_row) / 2) + 5
        y = 64 + 136 * row
        canvas.box(x, y, step - 10, 120, "#FFFFFF", colour(rank), 3, round=8)
        canvas.badge(x + (step - 10) / 2 - 42, y + 10, rank)
        canvas.text(x + (step - 10) / 2, y + 66, "process")
        canvas.text(x + (step - 10) / 2, y + 94, "memory", ink=GREY)
        if row == rows - 1:
            target = 25 + device_step * (home[rank] + 0.5)
            target = min(
                max(x + step / 2 - 5, 25 + device_step * home[rank] + 24), 25 + device_step * (home[rank] + 1) - 24
            )
            canvas.arrow((x + step / 2 - 5, y + 122), (target, ground - 2), colour(rank), 3)
    return canvas.picture(_said_world(world_size, gpus))


def _said_world(world_size: int, gpus: int) -> str:
    whole = f"{world_size} ranks are {world_size} processes, each with its own memory"
    whole = "1 rank is 1 process with its own memory" if world_size == 1 else whole
    if not gpus:
        return f"{whole}; {'all compute' if world_size > 1 else 'it computes'} on the CPU."
    homes = [[rank for rank in range(world_size) if rank % gpus == gpu] for gpu in range(gpus)]
    said = [f"{name_ranks(ranks)} on GPU {gpu}" for gpu, ranks in enumerate(homes) if ranks]
    free = sum(not ranks for ranks in homes)
    return f"{whole}; {', '.join(said)}" + (f"; {count(free, 'GPU')} free." if free else ".")
