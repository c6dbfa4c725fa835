"""Draw ranks at work: a collective's effect, bytes sent, messages hop by hop, timelines, processes.

Each public function that draws returns a `Picture`: a matplotlib figure, and a text that says what
it shows, which serves as its alt text and states no measured time. The functions that draw a run
take the `Run` that `launch` returned, whose `wire` has the records of each rank's calls.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ..tools.hops import hops_of, received_bytes, sent_bytes
from ..tools.units import DECIMAL, count, name_ranks, numbers, size
from . import page
from .page import Canvas, Picture, chart, colour, ink, legend, patch

# The effect of a collective


def before_after(pairs: Iterable, title: str) -> Picture:
    """Draw what each rank holds before and after a collective call, a row for each rank.

    A number before the call has its rank's colour. A number after the call has the colour of this
    rank if it had the number at the same index before, otherwise of the only rank that had it. All
    others, such as most sums, are grey; so let ranks begin with different numbers. Notebook 01.

    pairs: for each rank, (before, after), for example what `launch` returned if the function
        returned that pair. Each is a tensor or list of any shape, or None for nothing.
    title: the heading of the picture. The alt text begins with it, and then lists each rank's first
        16 numbers before and after.
    """
    before, after = zip(*((flat(first), flat(then)) for first, then in pairs), strict=True)
    owners = find_owners(before, after)
    change = Change(dict(enumerate(zip(before, after, owners, strict=True))))
    top, ranks = 86, range(len(before))
    mixed = 34 if any(None in row for row in owners) else 0
    tall = [page.ROW * change.lines(rank) + 12 for rank in ranks]
    canvas = Canvas(max(400, 130 + change.width), top + sum(tall) + mixed)
    canvas.text(canvas.width / 2, 28, title, page.LARGE, bold=True)
    for x, heading in zip(change.middles, ("before", "after"), strict=True):
        canvas.text(110 + x, top - 22, heading, page.NORMAL)
    for rank in ranks:
        y = top + sum(tall[:rank])
        canvas.badge(10, y, rank)
        change.draw(canvas, 110, y, rank)
    if mixed:
        canvas.mixed_key()
    said = f"{title}: before, {_say_rows(before)}; after, {_say_rows(after)}."
    return canvas.picture(said)


class Change:
    """A drawing of what a collective call did: each rank's numbers before, an arrow, those after.

    by_rank: the argument, {rank: (before, after, owners)}. before, after: the rank's numbers in a
        list, or None if there are none. owners: for each number of `after`, the rank that
        contributed it, a frozenset of ranks for a sum, or None if that is unknown. The owner gives
        the number's box its colour; a number before has its rank's colour.

    Attributes computed from `by_rank`, the same for all ranks, so that rows are aligned:
    cell: the width of a number's box, in pixels. per_line: [before, after], the number of boxes
        after which a list goes on in the next line.
    width: the width of the drawing, in pixels. middles: (before, after), the x of the centres of
        the drawing's two halves, in pixels from its left edge.
    """

    ARROW = 84

    def __init__(self, by_rank: Mapping[int, tuple]):
        self.by_rank = by_rank
        before, after, _ = zip(*by_rank.values(), strict=True)
        self.cell = page.cell_width(*before, *after)
        most = int((page.WIDEST - 130 - self.ARROW) / 2 // self.cell)
        self.per_line = [min(most, longest_row(before)), min(most, longest_row(after))]
        left, right = (self.cell * per_line for per_line in self.per_line)
        self.width = left + self.ARROW + right
        self.middles = left / 2, left + self.ARROW + right / 2

    def lines(self, rank: int) -> int:
        """Return how many lines of boxes `rank` needs, before or after: the larger number, >= 1."""
        sides = zip(self.by_rank[rank], self.per_line, strict=False)
        return max(math.ceil(len(row or " ") / per_line) for row, per_line in sides)

    def draw(self, canvas: Canvas, x: float, y: float, rank: int) -> None:
        """Draw one rank's numbers before the call, an arrow, and its numbers after the call.

        x, y: the upper left corner of this rank's drawing, in pixels; a line is `page.ROW` high.
        rank: a key of `by_rank`. A side without numbers is drawn as an empty, dashed box.
        """
        before, after, owners = self.by_rank[rank]
        own = [rank] * len(before or ())
        canvas.cells(x, y, before, own, self.cell, self.per_line[0])
        x, middle = x + self.cell * self.per_line[0], y + page.ROW / 2
        canvas.arrow((x + 16, middle), (x + self.ARROW - 16, middle), line=5)
        canvas.cells(x + self.ARROW, y, after, owners, self.cell, self.per_line[1])


def longest_row(rows: Iterable[list | None]) -> int:
    """Return how many boxes the longest of the ranks' lists of numbers takes, at least 1.

    rows: one list for each rank, at least one; None, or an empty list, is drawn as one empty box.
    """
    return max(len(row or " ") for row in rows)


def flat(values) -> list | None:
    """Return all numbers of a tensor, of a list, or of nested lists, in one list; None for None.

    A number on its own becomes a list of one. A None inside a list stays, as one element.
    """
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


def _say_rows(rows: Sequence[list | None]) -> str:
    """Return in words what each rank has: 'rank 0 has [1, 2], ranks 1 and 2 have nothing'.

    rows: for each rank, its numbers, or None. Equal rows are named together; after 16 numbers of a
        row, the rest is "…".
    """
    said = []
    for who, text in alike(numbers(row or None) for row in rows):
        said.append(f"{who} {'have' if who.startswith('ranks') else 'has'} {text}")
    return ", ".join(said)


def alike(texts: Iterable[str]) -> list[tuple[str, str]]:
    """Group the ranks that have the same text; return [(the ranks in words, their text)].

    The words are like "rank 1" or "ranks 0 and 2"; a group of all ranks, if there are two or more,
    is "every rank". Groups are in the order of their lowest ranks.

    texts: the text of each rank, in the order of ranks.
    """
    by_text: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        by_text.setdefault(text, []).append(rank)
    ranks = sum(map(len, by_text.values()))
    whole = ranks if ranks > 1 else None
    return [(name_ranks(who, whole), text) for text, who in by_text.items()]


def find_owners(
    before: Sequence[list | None], after: Sequence[list | None]
) -> list[list[int | None]]:
    """Find, by comparing values, the rank that each number after a collective call came from.

    Return for each rank a list of owners, one for each number that it has after the call: the rank
    itself if it had the number at the same index before; otherwise the only rank that had it, at
    any index; None if none or several had it. A rank with nothing after the call gets [].

    before, after: for each rank, its numbers, or None for nothing.
    """
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


def traffic(run_or_runs) -> Picture:
    """Draw the bytes that each rank sent and received, a panel for each run.

    Panels and alt text state the bytes sent in all, and the busiest rank by sent plus received.
    Only messages (sends and receives) count: what torch's own collectives move between ranks isn't
    recorded. Without messages the bars are empty.

    run_or_runs: the `Run` that `launch` returned, or {name: Run}; all panels share a scale.
    """
    runs = run_or_runs if isinstance(run_or_runs, dict) else {"": run_or_runs}
    found = {name: (sent_bytes(run), received_bytes(run)) for name, run in runs.items()}
    most = max(max(sent + received) for sent, received in found.values()) or 1
    unit, factor = next(unit for unit in DECIMAL.items() if most >= unit[1])
    columns = max(1, min(len(runs), 12 // max(len(run.wire) for run in runs.values())))
    rows = math.ceil(len(runs) / columns)
    figure, panels = chart("", min(page.TALLEST, 400 * rows), rows, columns, sharey=True)
    said = []
    for axes, (name, (sent, received)) in zip(panels, found.items(), strict=False):
        ranks = range(len(sent))
        notes = _total_and_busiest(sent, received)
        said.append(f"{name}: {', '.join(notes)}" if name else ", ".join(notes))
        title = "\n".join([name, *notes] if name else notes).replace(", ", ",\n")
        axes.set_title(title, fontsize=page.SMALL)
        dark = [colour(rank) for rank in ranks]
        pale = [(fill, page.PALER) for fill in dark]
        for nbytes, side, fills in ((sent, -0.2, dark), (received, 0.2, pale)):
            places, values = [rank + side for rank in ranks], [amount / factor for amount in nbytes]
            axes.bar(places, values, 0.4, color=fills, ec="black")
        for rank, pair in enumerate(zip(sent, received, strict=True)):
            numbers = " ".join(f"{nbytes / factor:.3g}" for nbytes in dict.fromkeys(pair))
            options = {"xytext": (0, 3), "textcoords": "offset points", "ha": "center"}
            axes.annotate(numbers, (rank, max(pair) / factor), fontsize=page.SMALL, **options)
        axes.set_xticks(ranks)
        axes.set_xlabel("rank")
    for axes in panels[len(found) :]:
        axes.set_visible(False)
    panels[0].set(ylim=(0, 1.12 * most / factor), ylabel="bytes" if unit == "B" else unit)
    paler = patch("received, paler", (colour(0), page.PALER))
    legend(figure, [patch("sent", colour(0)), paler])
    return Picture(figure, f"Bytes by rank. {'. '.join(said)}.")


def _total_and_busiest(sent: list[int], received: list[int]) -> tuple[str, str]:
    """Return two texts about a run: the bytes sent in all, and the busiest ranks with their bytes.

    For example ("total sent 48 B", "busiest: rank 1, 32 B in and out"), where 32 B are those that
    rank 1 sent plus those it received. Ranks that share the highest number are all named. If no
    rank sent or received a byte, the texts are ("no messages", "so no busiest rank").

    sent, received: for each rank, the bytes that it sent, and the bytes that it received.
    """
    both = [out + into for out, into in zip(sent, received, strict=True)]
    if not any(both):
        return "no messages", "so no busiest rank"
    busiest = [rank for rank, nbytes in enumerate(both) if nbytes == max(both)]
    who = name_ranks(busiest, len(both) if len(both) > 1 else None)
    return f"total sent {size(sum(sent))}", f"busiest: {who}, {size(max(both))} in and out"


# Messages, hop by hop


def hops(run) -> Picture:
    """Draw the messages of a run as arrows between ranks, a row for each hop.

    Messages that can travel at the same time share a hop. A message is in the hop after the latest
    message that its sender or receiver had finished before beginning this one, as when a rank
    forwards what it received; without any, it is in hop 1. Only messages with a recorded send and
    receive are drawn, so none inside torch's own collectives. The alt text lists the messages.

    run: what `launch` returned. If it has no messages, the ranks are drawn without arrows.
    """
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


def timeline(run_or_runs, after: str | None = None, backward: bool = False) -> Picture:
    """Draw when each rank computed, when it waited, and when its calls were on the wire.

    A rank's upper lane is grey where its program computes, white where it waits for a call (on a
    GPU, where the stream that computes waits). Below is its communication (on a GPU, a lane for
    each stream). Where a lower lane is busy while the upper one is grey, the two overlap. A run
    without calls, or with none after `after`, is left out; if all are, the picture says so.

    run_or_runs: the `Run` that `launch` returned, or {name: Run}, drawn as stacked panels with a
        shared time axis.
    after: the name of an operation. Each rank is drawn from the end of its last call of it: with
        "broadcast", for example, without a warm-up that ended with a broadcast. If it is None, or
        the rank made no such call, the rank is drawn from its first call on.
    backward: whether the launched function returned, on each rank, the time by
        `time.perf_counter()` at which its last backward began; the upper lane is then darker from
        that time on.

    The alt text counts calls and states no time.
    """
    runs = run_or_runs if isinstance(run_or_runs, dict) else {"": run_or_runs}
    parts = {name: Part(run, after) for name, run in runs.items()}
    shown = {name: part for name, part in parts.items() if any(part.wire)}
    said = [f"{name}: {part.calls}" if name else part.calls for name, part in parts.items()]
    if not shown:
        since = f" after its last {after}" if after else ""
        return in_words(f"No rank made a call{since}: there is nothing to draw.")
    ranks = [len(part.wire) for part in shown.values()]
    longest = max(part.end - part.start for part in shown.values()) or 1e-3
    tall = min(64, (page.TALLEST - 110 - 36 * len(ranks)) / sum(ranks))  # pixels of a rank
    height = max(260, 110 + 36 * len(ranks) + tall * sum(ranks))
    figure, panels = chart("", height, len(ranks), sharex=True, height_ratios=ranks)
    initials: set[tuple[str, str]] = set()
    for axes, (name, part) in zip(panels, shown.items(), strict=True):
        heading = ", ".join(filter(None, (name, part.link)))
        axes.set_title(heading, fontsize=page.NORMAL, weight="bold", loc="left")
        axes.set(xlim=(0, 1e3 * longest), ylim=(len(part.wire) - 0.45, -0.55))
        axes.set_yticks(range(len(part.wire)), [f"rank {r}" for r in range(len(part.wire))])
        axes.tick_params(axis="y", length=0)
        for rank, label in enumerate(axes.get_yticklabels()):
            label.set(color=ink(colour(rank)), weight="bold")
            label.set_bbox({"fc": colour(rank), "ec": "black", "boxstyle": "round,pad=0.15"})
            if part.wire[rank]:
                _draw_program(axes, part, rank, part.run[rank] if backward else None)
                initials |= _draw_wire(axes, part, rank, longest, named=tall > 48)
        streams = max(map(part.streams, range(len(part.wire))), key=len)
        if any(streams):
            said.append(f"Lanes of streams: {', '.join(streams)}")
    panels[-1].set_xlabel("time (ms)")
    names = ", ".join(f"{short}: {op}" for short, op in sorted(initials))
    wire = patch(f"its calls on the wire{f' ({names})' * bool(names)}, in its colour", colour(0))
    waits = patch("it waits", page.EMPTY, page.GREY)
    computes = [patch("a rank computes", page.FAINT)]
    if backward:
        computes = [patch("forward", page.MIXED), patch("backward", page.FAINT)]
        said.append("Above, light: forward, darker: backward and after, white: waits")
    legend(figure, [*computes, waits, wire])
    return Picture(figure, f"Timeline. {'. '.join(said)}.")


def in_words(text: str) -> Picture:
    """Return a picture that shows only a line of text, for when there is nothing to draw."""
    canvas = Canvas(720, 60)
    canvas.text(canvas.width / 2, 30, text)
    return canvas.picture(text)


class Part:
    """The part of a run that `timeline` draws: all that follows each rank's last call of `after`.

    All times are in seconds, by the clock of `time.perf_counter()`.

    run: what `launch` returned. after: the name of an operation, such as "broadcast"; None for the
        whole run.
    wire: for each rank, the records of its calls in this part.
    begun: for each rank, the time at which its part begins: the end of its last call of `after`
        (its beginning, if it has no end), or the rank's next call if that was earlier. If the rank
        never called `after`, it is the rank's first call; inf if there is none.
    start: the earliest time in `begun`; inf if no rank made a call in the whole run.
    end: the latest time in this part's records. Without any, as when `after` was each rank's last
        call, it is 0.0, before `start`, and there is nothing to draw.
    link: the network that the launch emulated, in words; "" if there was none.
    calls: a text that says how often each rank called each operation in this part, such as
        "rank 0: 1 send, 1 barrier; rank 1: 1 recv, 1 barrier" or "every rank: no calls".
    """

    def __init__(self, run, after: str | None):
        self.run, self.wire, self.begun = run, [], []
        for records in run.wire:
            last = max((at for at, record in enumerate(records) if record.op == after), default=-1)
            self.wire.append(records[last + 1 :])
            ended = records[last].done or records[last].issued if last >= 0 else math.inf
            self.begun.append(min(ended, *(r.issued for r in self.wire[-1]), math.inf))
        self.start = min(self.begun, default=math.inf)
        self.end = max((last_known(records) for records in self.wire if records), default=0.0)
        link = getattr(run, "link", None)
        self.link = f"emulated link: {link}" if link else ""
        said = alike(_say_calls(records) for records in self.wire)
        self.calls = "; ".join(f"{who}: {text}" for who, text in said)

    def streams(self, rank: int) -> list[str]:
        """Return the names of the streams of a rank's calls in this part, in order of first use.

        `timeline` draws a lane for each. All calls on a CPU are in one, named ""; [] without calls.
        """
        return list(dict.fromkeys(record.stream for record in self.wire[rank]))

    def spans(self, times: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
        """Convert each (begin, end) in seconds to (begin, length) in milliseconds, to be drawn.

        times: by the clock of `time.perf_counter()`. The beginnings that are returned count from
            the start of this part of the run.
        """
        return [(1e3 * (begin - self.start), 1e3 * (end - begin)) for begin, end in times]


def _say_calls(records: Sequence) -> str:
    """Return how often each operation is called in these records: "2 sends, 1 recv", "no calls"."""
    made = Counter(record.op for record in records)
    return ", ".join(count(many, op) for op, many in made.items()) or "no calls"


def last_known(records: Sequence) -> float:
    """Return the last time at which a call was made, was completed or began to be waited for.

    In a timeline a call that never ended is drawn until this time.
    records: those of one rank, with times in seconds. ValueError: there are none.
    """
    return max(max(r.issued, r.done or 0.0, r.waited or 0.0) for r in records)


def _draw_program(axes, part: Part, rank: int, turned: float | None):
    """Draw the upper lane of a rank: grey where it computes, white where it waits.

    A wait is white from its beginning until the call is complete. If the call never is, the wait is
    white to the end of the lane, which is the last time in the rank's records.

    part: the records of each rank's calls, and their times, in the part of a run that is drawn.
    turned: the time at which backward began, by `time.perf_counter()`; before it the grey is
        lighter. None for one shade.
    """
    records = part.wire[rank]
    last = last_known(records)
    waits = [(r.waited, r.done or last) for r in records if r.waited is not None]
    waits = [(begin, end) for begin, end in waits if begin < end]
    whole = [(part.begun[rank], last)]
    for times, fill, edge in (
        (whole, page.FAINT, "none"),
        ([(part.begun[rank], turned)] if turned else [], page.MIXED, "none"),
        (waits, page.EMPTY, "none"),
        (whole, "none", page.GREY),
    ):
        axes.broken_barh(part.spans(times), (rank - 0.42, 0.4), fc=fill, ec=edge, lw=0.8)


def _draw_wire(axes, part: Part, rank: int, longest: float, named: bool) -> set[tuple]:
    """Draw the lower lane of a rank, below that of computing: a box for each of its calls.

    A box begins when its call was made (on a GPU, when the stream came to it), and ends when the
    call was complete or, if it never was, at the last time in the rank's records. On a GPU the lane
    has a strip for each stream of calls, the first used on top. Where boxes overlap, the one that
    ends first lies in front. Return the set of (initials, operation), such as ("ag", "all_gather"),
    of boxes that have only initials.

    part: the records of each rank's calls, and their times, in the part of a run that is drawn.
    longest: the seconds that the time axis spans.
    named: whether to write on each box what fits: the operation's name, its initials, or nothing.
        The boxes of a rank with several streams stay without text in any case.
    """
    records, fill = part.wire[rank], page.dark(colour(rank))
    per_second = 780 / longest  # pixels, about
    last, streams = last_known(records), part.streams(rank)
    initials = set()
    tall = 0.4 / len(streams)
    for lane, stream in enumerate(streams):
        found = ((r.done or last, r.begun, r.op) for r in records if r.stream == stream)
        calls, y = sorted(found, key=lambda call: call[0]), rank + tall * lane
        shown_from, edges = 0.0, []
        for end, begin, op in calls:
            edges.append("white" if (end - begin) * per_second > 6 else "none")
            seen, shown_from = max(begin, shown_from), end
            short = "".join(word[0] for word in op.split("_"))  # ag for all_gather
            room = (end - seen) * per_second / 9  # letters
            said = op if room > len(op) else short
            if named and len(streams) == 1 and room > len(said):
                middle = 1e3 * ((seen + end) / 2 - part.start)
                page.write_on(axes, middle, y + tall / 2, said, fill)
                initials |= {(short, op)} if said == short else set()
        bars = part.spans((begin, end) for end, begin, _ in reversed(calls))
        axes.broken_barh(bars, (y, tall), fc=fill, ec=edges[::-1], lw=0.8)
    return initials


# Ranks as processes


def worlds(world_size: int) -> Picture:
    """Draw a world of 1 to 8 ranks on one machine: processes with their own memory, above a CPU."""
    width, ground = 970, 266  # the same for every world
    step = min(230, (width - 50) / world_size)
    canvas = Canvas(width, ground + 120)
    canvas.box(10, 10, width - 20, canvas.height - 20, page.PALE, "black", 2, round=14)
    title = f"this machine: a world of {count(world_size, 'rank')}"
    canvas.text(30, 36, title, page.LARGE, "left", bold=True)
    canvas.box(31, ground, width - 62, 84, page.EMPTY, "black", 2.5)
    canvas.text(width / 2, ground + 26, "CPU", page.NORMAL, bold=True)
    canvas.text(width / 2, ground + 58, name_ranks(range(world_size)))
    for rank in range(world_size):
        middle = width / 2 + step * (rank - world_size / 2 + 0.5)
        canvas.box(middle - step / 2 + 5, 64, step - 10, 120, page.EMPTY, colour(rank), 3, round=8)
        canvas.badge(middle - 42, 74, rank)
        canvas.text(middle, 130, "process")
        canvas.text(middle, 158, "memory", ink=page.GREY)
        canvas.arrow((middle, 186), (middle, ground - 2), colour(rank))
    if world_size == 1:
        return canvas.picture("1 rank is 1 process with its own memory; it computes on the CPU.")
    processes = f"{world_size} ranks are {world_size} processes, each with its own memory"
    return canvas.picture(f"{processes}; all compute on the CPU.")
