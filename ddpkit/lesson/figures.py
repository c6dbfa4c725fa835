"""Figures of what ranks do: what a collective changes, bytes, hops, time, and where ranks live.

Each shows one thing and says it in words too; the words hold no time that was measured.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..tools.units import DECIMAL, count, name_ranks, numbers, size
from . import page
from .page import Canvas, Picture, chart, colour, ink, legend, patch

# What a collective does


def before_after(
    pairs: Iterable, title: str | None = None, owners: Sequence | None = None
) -> Picture:
    """What each rank holds before and after a collective, a row for each rank.

    pairs: by rank, (before, after), for instance a run whose function returned that; each a list
    or tensor of any length, or None for nothing yet. owners: by rank, for each number after, whose
    data it is (None: of several); found by comparing, unless given. Notebook 01.
    """
    before, after = [], []
    for first, then in pairs:
        before.append(flat(first))
        after.append(flat(then))
    owners = owners or find_owners(before, after)
    own = [[rank] * len(row or ()) for rank, row in enumerate(before)]
    cell, gap, top = page.cell_width(*before, *after), 120, 56 if title else 10
    left, right = _Grid("before", before, own, cell), _Grid("after", after, owners, cell)
    height = max(left.height, right.height)
    mixed = 34 if any(None in row for row in owners) else 0
    canvas = Canvas(left.width + gap + right.width + 30, top + height + 6 + mixed)
    middle = top + 18 + height / 2
    canvas.arrow((left.width + 35, middle), (left.width + gap - 10, middle), line=10)
    if title:
        canvas.text(canvas.width / 2, 28, title, page.LARGE, bold=True)
    left.draw(canvas, 10, top)
    right.draw(canvas, 10 + left.width + gap, top)
    if mixed:
        mixed_key(canvas)
    said = f"before, {_say_rows(before)}; after, {_say_rows(after)}."
    return canvas.picture(f"{title}: {said}" if title else said)


def mixed_key(canvas: Canvas):
    """What grey means, at the foot of the canvas."""
    canvas.key(16, canvas.height - 32, page.MIXED, "a sum, or data of several ranks")


class _Grid:
    """What all ranks hold at one moment: a heading and a row of numbers for each rank."""

    LABEL, LINE = 100, 36

    def __init__(self, heading: str, rows: list[list | None], owners: Sequence, cell: float):
        self.heading, self.rows, self.owners, self.cell = heading, rows, owners, cell
        longest = max(len(row or " ") for row in rows)
        self.per_line = min(longest, int((page.WIDEST / 2 - 75 - self.LABEL) // cell))
        self.width = self.LABEL + self.per_line * cell
        self.height = 44 + sum(map(self._tall, rows))

    def _tall(self, row: list | None) -> float:
        return self.LINE * math.ceil(len(row or " ") / self.per_line) + 12

    def draw(self, canvas: Canvas, x: float, y: float):
        canvas.text(x + (self.LABEL + self.width) / 2, y + 18, self.heading, page.NORMAL)
        y += 40
        for rank, row in enumerate(self.rows):
            canvas.badge(x, y, rank)
            values, owners = (row, self.owners[rank]) if row else ([None], [None])
            left = x + self.LABEL
            canvas.cells(left, y, values, owners, self.cell, self.LINE, self.per_line)
            y += self._tall(row)


def flat(values) -> list | None:
    """All numbers of a tensor, a list, or a list of such, one after the other."""
    if values is None:
        return None
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, list | tuple):
        return [values]
    found = []
    for part in values:
        found += [None] if part is None else flat(part)
    return found


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
    """By rank and number after: the rank that keeps its own or alone had it before; else None."""
    found = []
    for rank, row in enumerate(after):
        mine = before[rank] or ()
        owners = []
        for at, value in enumerate(row or ()):
            had = [other for other, theirs in enumerate(before) if value in (theirs or ())]
            kept = at < len(mine) and mine[at] == value
            owners.append(rank if kept else had[0] if len(had) == 1 else None)
        found.append(owners)
    return found


# Bytes on the wire


def sent_bytes(run) -> list[int]:
    """Bytes that each rank sent, message by message; torch's own collectives keep theirs inside."""
    return _bytes(run, "send")


def received_bytes(run) -> list[int]:
    """Bytes that each rank received, message by message."""
    return _bytes(run, "recv")


def _bytes(run, op: str) -> list[int]:
    found = [0] * len(run.wire)
    for rank, records in enumerate(run.wire):
        found[rank] = sum(record.bytes for record in records if record.op == op)
    return found


def _named(run_or_runs) -> dict[str, object]:
    """{name: run}, also of one run alone."""
    return run_or_runs if isinstance(run_or_runs, dict) else {"": run_or_runs}


def traffic(run_or_runs) -> Picture:
    """Bytes sent and received by each rank, for one run or for {name: run} on one scale."""
    runs = _named(run_or_runs)
    found = {name: (sent_bytes(run), received_bytes(run)) for name, run in runs.items()}
    most = max(max(sent + received) for sent, received in found.values()) or 1
    unit, factor = next(unit for unit in DECIMAL.items() if most >= unit[1])
    columns = max(1, min(len(runs), 12 // max(len(run.wire) for run in runs.values())))
    rows = math.ceil(len(runs) / columns)
    figure, panels = chart("", min(page.TALLEST, 400 * rows), rows, columns, sharey=True)
    said = []
    for axes, (name, (sent, received)) in zip(panels, found.items(), strict=False):
        notes = _total_and_busiest(sent, received)
        said.append(f"{name}: {', '.join(notes)}" if name else ", ".join(notes))
        axes.set_title("\n".join([name, *notes] if name else notes), fontsize=page.SMALL)
        for nbytes, side, shade in ((sent, -0.2, colour), (received, 0.2, _received)):
            values = [each / factor for each in nbytes]
            fills = [shade(rank) for rank in range(len(values))]
            places = [rank + side for rank in range(len(values))]
            bars = axes.bar(places, values, 0.4, color=fills, ec="black")
            axes.bar_label(bars, fmt="{:.3g}", fontsize=page.SMALL, padding=2)
        axes.set_xticks(range(len(sent)))
        axes.set_xlabel("rank")
    for axes in panels[len(found) :]:
        axes.set_visible(False)
    panels[0].set_ylim(0, 1.12 * most / factor)
    panels[0].set_ylabel("bytes" if unit == "B" else unit)
    legend(figure, [patch("sent", colour(0)), patch("received, paler", _received(0))])
    return Picture(figure, f"Bytes by rank. {'. '.join(said)}.")


def _received(rank: int) -> str:
    return page.lighter(colour(rank))


def _total_and_busiest(sent: list[int], received: list[int]) -> tuple[str, str]:
    both = [out + into for out, into in zip(sent, received, strict=True)]
    if not any(both):
        return "no messages", "so no busiest rank"
    busiest = [rank for rank, nbytes in enumerate(both) if nbytes == max(both)]
    who = name_ranks(busiest, len(both) if len(both) > 1 else None)
    return f"total sent {size(sum(sent))}", f"busiest: {who}, {size(max(both))} in and out"


# Messages, hop by hop


def hop_numbers(run) -> dict[tuple, int]:
    """The hop, from 1 on, of each message that was sent and received, by (channel, seq).

    A message is one hop later than the last one that its sender or its receiver had to finish
    before it. So many hops follow one another however fast the wire is; messages that go at the
    same time are in the same hop.
    """
    ends: dict[tuple, set] = {}
    for records in run.wire:
        for record in records:
            if record.op in ("send", "recv"):
                ends.setdefault((record.channel, record.seq), set()).add(record.op)
    depth = {key: 1 for key, ops in ends.items() if len(ops) == 2}

    def known(record) -> bool:
        return (record.channel, record.seq) in depth

    lanes = [list(filter(known, records)) for records in run.wire]
    while any(_push_later(records, depth) for records in lanes):
        pass
    return depth


def _push_later(records: list, depth: dict[tuple, int]) -> bool:
    """Put each message of a rank after those it had finished when it began; whether any moved."""
    moved, so_far = False, 0
    steps = [(record.issued, 1, record) for record in records]
    steps += [(record.done, 0, record) for record in records if record.done is not None]
    for _, begins, record in sorted(steps, key=lambda step: step[:2]):
        key = (record.channel, record.seq)
        if not begins:
            so_far = max(so_far, depth[key])
        elif depth[key] <= so_far < len(depth):  # the bound: records may contradict each other
            depth[key], moved = so_far + 1, True
    return moved


def hops_of(run) -> list[list[tuple[int, int, int]]]:
    """The messages of `run` by hop, each as (src, dst, bytes)."""
    numbers_of = hop_numbers(run)
    found: list[list] = [[] for _ in range(max(numbers_of.values(), default=0))]
    for rank, records in enumerate(run.wire):
        for record in records:
            hop = numbers_of.get((record.channel, record.seq))
            if hop and record.op == "send":
                found[hop - 1].append((rank, record.peer, record.bytes))
    return [sorted(hop) for hop in found]


def hops(run) -> Picture:
    """The messages of a run as arrows between ranks, a row for each hop."""
    rows, world_size = hops_of(run), len(run.wire)
    step, left, top = min(220, (page.WIDEST - 120) / world_size), 110, 62
    tall = min(96, (page.TALLEST - top - 10) / max(1, len(rows)))
    canvas = Canvas(left + step * world_size + 10, top + tall * max(1, len(rows)) + 10)
    middle = [left + step * (rank + 0.5) for rank in range(world_size)]
    for at in range(0, len(rows), 2):
        canvas.box(0, top + tall * at, canvas.width, tall, page.PALE, "none")
    for rank, x in enumerate(middle):
        canvas.line([(x, 50), (x, canvas.height - 8)], colour(rank), 2)
        canvas.badge(x - 42, 12, rank)
    said = []
    for number, row in enumerate(rows, 1):
        y = top + tall * (number - 1)
        canvas.text(14, y + tall / 2, f"hop {number}", page.NORMAL, "left", bold=True)
        for src, dst, _ in row:
            ends = (middle[src], y + 0.15 * tall), (middle[dst], y + 0.85 * tall)
            canvas.arrow(*ends, colour(src), 4.5)
        said.append(f"hop {number}: {', '.join(f'{src} to {dst}' for src, dst, _ in row)}")
    total = f"{count(sum(map(len, rows)), 'message')} in {count(len(rows), 'hop')}. "
    return canvas.picture(f"{total}{'; '.join(said)}".rstrip() + ".")


# Time


def timeline(run_or_runs, after: str | None = None) -> Picture:
    """When each rank computed, waited, and had calls on the wire, for one run or {name: run}.

    A rank has two lanes: above, what its program does; below, what its wire does. Overlap is a
    wire that is busy under a program that computes. after: begin where each rank has made its last
    call of that name, say "broadcast".
    """
    parts = {name: Part.of(run, after) for name, run in _named(run_or_runs).items()}
    parts = {name: part for name, part in parts.items() if any(part.wire)}
    ranks = [len(part.wire) for part in parts.values()]
    longest = max([part.end - part.start for part in parts.values()], default=0) or 1e-3
    tall = min(64, (page.TALLEST - 110 - 36 * len(ranks)) / max(1, sum(ranks)))  # pixels of a rank
    height = max(260, 110 + 36 * len(ranks) + tall * sum(ranks))
    options = {"sharex": True, "height_ratios": ranks or None}
    figure, panels = chart("", height, max(1, len(ranks)), **options)
    said = []
    for axes, (name, part) in zip(panels, parts.items(), strict=False):
        axes.set_title(part.heading(name), fontsize=page.NORMAL, weight="bold", loc="left")
        axes.set(xlim=(0, 1e3 * longest), ylim=(len(part.wire) - 0.45, -0.55))
        axes.set_yticks(range(len(part.wire)))
        axes.tick_params(axis="y", length=0)
        for rank, label in enumerate(
            axes.set_yticklabels(f"rank {r}" for r in range(len(part.wire)))
        ):
            label.set(color=ink(colour(rank)), weight="bold")
            label.set_bbox({"fc": colour(rank), "ec": "black", "boxstyle": "round,pad=0.15"})
            _draw_program(axes, part, rank)
            _draw_wire(axes, part, rank, longest, named=tall > 48)
        said.append(f"{name}: {part.calls()}" if name else part.calls())
    panels[-1].set_xlabel("time (ms)")
    wire = patch("its calls on the wire, in its colour", colour(0))
    waits = patch("it waits", page.EMPTY, page.GREY)
    legend(figure, [patch("a rank computes", page.FAINT), waits, wire])
    return Picture(figure, f"Timeline. {'. '.join(said)}.")


@dataclass
class Part:
    """Some of the records of a run, and when each rank began with them."""

    wire: list[list]
    begun: list[float | None]
    link: object

    @classmethod
    def of(cls, run, after: str | None = None) -> "Part":
        """What the ranks of `run` said after their last call of `after`."""
        wire, begun = [], []
        for records in run.wire:
            last = max((at for at, record in enumerate(records) if record.op == after), default=-1)
            wire.append(records[last + 1 :])
            if last >= 0:
                begun.append(records[last].done)
            else:
                begun.append(records[0].issued if records else None)
        return cls(wire, begun, getattr(run, "link", None))

    @property
    def start(self) -> float:
        return min(begun for begun in self.begun if begun is not None)

    @property
    def end(self) -> float:
        return max(_last(records) for records in self.wire if records)

    def heading(self, name: str) -> str:
        link = f"emulated link: {self.link}" if self.link else ""
        return ", ".join(filter(None, (name, link)))

    def calls(self) -> str:
        """'rank 0: 3 sends, 1 recv; rank 1: ...': by rank, in the order of their first use."""
        said: dict[str, list[int]] = {}
        for rank, records in enumerate(self.wire):
            made: dict[str, int] = {}
            for record in records:
                made[record.op] = made.get(record.op, 0) + 1
            calls = [count(many, op) for op, many in made.items()]
            said.setdefault(", ".join(calls) or "no calls", []).append(rank)
        world_size = len(self.wire) if len(self.wire) > 1 else None
        return "; ".join(
            f"{name_ranks(ranks, world_size)}: {calls}" for calls, ranks in said.items()
        )


def _last(records: Sequence) -> float:
    """When the last that is known of these calls happened."""
    return max(max(r.issued, r.done or 0.0, r.waited or 0.0) for r in records)


def merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans of time without overlaps, in order."""
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def in_flight(records: Sequence) -> list[tuple[float, float, object]]:
    """(begin, end, record) for each call of one rank, in the order in which they were done.

    Calls of one channel travel one after the other: each begins when it was issued, or later, when
    the one before it was done; unless it overtook that one. A call that was never done ends with
    the last that is known of the rank.
    """
    last, free, spans = _last(records), {}, []
    for record in records:
        begin, end = record.issued, record.done or last
        before = free.get(record.channel, 0.0)
        spans.append((before if begin < before < end else begin, end, record))
        free[record.channel] = max(before, end)
    return sorted(spans, key=lambda span: span[1])


def _draw_program(axes, part: Part, rank: int):
    """The upper lane of a rank: grey where it computes, white where it waits."""
    records = part.wire[rank]
    if not records:
        return
    last = _last(records)
    waits = [
        (record.waited, record.done or last) for record in records if record.waited is not None
    ]
    waits = merged((begin, end) for begin, end in waits if begin < end)
    whole = [(part.begun[rank], last)]
    for spans, fill, edge in ((whole, page.FAINT, "none"), (waits, page.EMPTY, page.GREY)):
        bars = [(1e3 * (begin - part.start), 1e3 * (end - begin)) for begin, end in spans]
        axes.broken_barh(bars, (rank - 0.42, 0.4), fc=fill, ec=edge, lw=0.8)


def _draw_wire(axes, part: Part, rank: int, longest: float, named: bool):
    """The lower lane: a box for each call; of those that overlap, the later shows where it outlasts
    the earlier. named: with their names, where there is room.
    """
    fill, per_second = colour(rank), 850 / longest  # about so many pixels
    bars, edges, shown_from = [], [], 0.0
    for begin, end, record in in_flight(part.wire[rank]) if part.wire[rank] else ():
        bars.append((1e3 * (begin - part.start), 1e3 * (end - begin)))
        edges.append("white" if (end - begin) * per_second > 6 else "none")
        seen, shown_from = max(begin, shown_from), end
        if named and (end - seen) * per_second > 9 * len(record.op):
            middle = 1e3 * ((seen + end) / 2 - part.start)
            style = {"color": ink(fill), "ha": "center", "va": "center", "fontsize": page.SMALL}
            axes.text(
                middle, rank + 0.2, record.op, bbox={"fc": fill, "ec": "none", "pad": 1}, **style
            )
    axes.broken_barh(bars[::-1], (rank, 0.4), fc=fill, ec=edges[::-1], lw=0.8)


# Where ranks live


def worlds(world_size: int, gpus: int = 0) -> Picture:
    """Which of up to 8 ranks sits where on a machine with so many GPUs: a process each."""
    devices = [f"GPU {at}" for at in range(gpus)] or ["CPU"]
    width, ground = 970, 266  # the same for every world
    step, device_step = min(230, (width - 50) / world_size), (width - 50) / len(devices)
    canvas = Canvas(width, ground + 120)
    canvas.box(10, 10, width - 20, canvas.height - 20, page.PALE, "black", 2, round=14)
    title = f"this machine: a world of {count(world_size, 'rank')}"
    canvas.text(30, 36, title, page.LARGE, "left", bold=True)
    for at, name in enumerate(devices):
        x, middle = 31 + device_step * at, 25 + device_step * (at + 0.5)
        ranks = range(at, world_size, len(devices))
        canvas.box(x, ground, device_step - 12, 84, page.EMPTY, "black", 2.5)
        canvas.text(middle, ground + 26, name, page.NORMAL, bold=True)
        canvas.text(middle, ground + 58, name_ranks(ranks) if ranks else "free")
    for rank in range(world_size):
        middle = width / 2 + step * (rank - world_size / 2 + 0.5)
        canvas.box(middle - step / 2 + 5, 64, step - 10, 120, page.EMPTY, colour(rank), 3, round=8)
        canvas.badge(middle - 42, 74, rank)
        canvas.text(middle, 130, "process")
        canvas.text(middle, 158, "memory", ink=page.GREY)
        left = 25 + device_step * (rank % len(devices))
        target = min(max(middle, left + 24), left + device_step - 24)
        canvas.arrow((middle, 186), (target, ground - 2), colour(rank), 3)
    return canvas.picture(_said_world(world_size, gpus))


def _said_world(world_size: int, gpus: int) -> str:
    whole = f"{world_size} ranks are {world_size} processes, each with its own memory"
    if world_size == 1:
        whole = "1 rank is 1 process with its own memory"
    if not gpus:
        return f"{whole}; {'all compute' if world_size > 1 else 'it computes'} on the CPU."
    used = min(gpus, world_size)
    homes = [f"{name_ranks(range(gpu, world_size, gpus))} on GPU {gpu}" for gpu in range(used)]
    if gpus > used:
        homes[-1] += f"; {count(gpus - used, 'GPU')} free"
    return f"{whole}; {', '.join(homes)}."
