"""Draw pictures for notebooks 08 and 09: softmax computed in parts, and the cost of attention.

The cost is shown as bytes, as seconds, and as operations for each byte moved (a roofline), beside
a GPU's memories. Each public function returns a `Picture`, a matplotlib figure with its alt text.
"""

from collections.abc import Mapping, Sequence
from itertools import cycle

import torch

from ..softmax import merge, summarize
from ..tools.units import number, size
from . import page
from .page import Canvas, Picture, chart, legend

Curves = Mapping[str, Mapping[int, float]]  # {name: {length in tokens: bytes or seconds}}


def bytes_by_length(peaks: Curves, title: str) -> Picture:
    """Draw peak memory against sequence length, a curve for each way to compute attention.

    Both axes are logarithmic: a slope of 1 means linear growth, 2 quadratic growth.

    peaks: {name of the curve: {sequence length in tokens: most bytes alive at the same time}}.
    title: the heading of the chart and of its alt text.

    The bytes don't depend on the machine, so the alt text states them. Used in notebook 09.
    """
    figure = _by_length(peaks, title, "B")
    said = [f"{title}."]
    for name, curve in peaks.items():
        parts = [f"{length:,} tokens {size(nbytes)}" for length, nbytes in curve.items()]
        said.append(f"{name}: {', '.join(parts)}")
    return Picture(figure, "\n".join(said))


def time_by_length(seconds: Curves, ceiling: Mapping[int, float], title: str) -> Picture:
    """Draw measured time against sequence length, both axes logarithmic.

    seconds: {name of the curve: {sequence length in tokens: seconds}}.
    ceiling: {sequence length in tokens: the fewest seconds possible, those of the matrix products
        alone at the machine's full speed}. The ceiling of speed is a floor of time, drawn dashed.
    title: the heading of the chart and of its alt text.

    The seconds differ between machines, so the alt text names the curves and the lengths of
    `ceiling`, but states no time. Used in notebook 09.
    """
    figure = _by_length(seconds, title, "s", ceiling)
    lengths = ", ".join(f"{length:,}" for length in ceiling)
    said = f"{title}: {'; '.join(seconds)}. By tokens: {lengths}."
    return Picture(figure, f"{said} Dashed: the matrix products alone, at full speed.")


def _by_length(curves: Curves, title: str, unit: str, ceiling: Mapping[int, float] | None = None):
    """Draw curves over sequence length, both axes logarithmic; return matplotlib's figure.

    curves: {name: {length in tokens: value}}.
    unit: "B" if the values are bytes, "s" if they are seconds.
    ceiling: only with "s": {length in tokens: seconds of the matrix products alone}, a lower limit
        of the time, drawn as a dashed line; None for no line.
    """
    figure, (axes,) = chart(title)
    looks = zip(cycle(page.RANK_COLOURS), cycle(page.MARKERS))
    for (name, curve), (fill, marker) in zip(curves.items(), looks, strict=False):
        style = {"color": fill, "lw": 3, "marker": marker, "ms": 11}
        axes.plot(list(curve), list(curve.values()), label=name, **style)
    if ceiling:
        style = {"color": "black", "lw": 2.5, "ls": page.DASHES}
        axes.plot(list(ceiling), list(ceiling.values()), label="matrix products alone", **style)
    page.by_tokens(axes, sorted(set().union(*curves.values())))
    page.log_y(axes, "bytes" if unit == "B" else "time", unit)
    legend(figure, axes.lines)
    return figure


def merge_tree(row: Sequence[float]) -> Picture:
    """Draw how the softmax statistics of a row's numbers are merged, two at a time, into one.

    A box stands for some numbers x of the row. It shows their (m, ℓ): m is the largest of them, and
    ℓ the sum of e^(x − m). The top line has a box for each number, the bottom line one box for the
    whole row. From each line to the next, boxes are merged in pairs; a last box without a partner
    is repeated. The alt text lists the (m, ℓ) of every line. Used in notebook 08.

    row: 2 to 8 numbers, -inf for one that is masked. A box of nothing but these shows (−∞, 0).
    """
    values = torch.tensor(row, dtype=torch.float32).view(-1, 1)
    level = [(float(at), pair) for at, pair in enumerate(zip(*summarize(values), strict=True))]
    slot, gap, wide, tall = 120, 100, 104, 56
    rounds = (len(row) - 1).bit_length()
    canvas = Canvas(slot * len(row) + 40, gap * rounds + tall + 90)
    said = []
    for round_ in range(rounds + 1):
        y = 50 + gap * round_
        names = [f"({number(m.item())}, {number(ell.item())})" for _, (m, ell) in level]
        names = [name.replace("-inf", "−∞") for name in names]
        said.append(f"{'after ' + str(round_) if round_ else 'at first'}: {' '.join(names)}")
        for (at, _), name in zip(level, names, strict=True):
            fill = page.ORANGE if len(level) == 1 else page.SKY if round_ else page.EMPTY
            x = 20 + slot * (at + 0.5)
            canvas.box(x - wide / 2, y, wide, tall - 10, fill, round=8)
            canvas.text(x, y + tall / 2 - 5, name)
        above, level = level, []
        for left, right in zip(above[::2], [*above[1::2], None], strict=False):
            both = (left[0] + right[0]) / 2 if right else left[0]
            level.append((both, merge(left[1], right[1]) if right else left[1]))
            for part in (left, right) if right and round_ < rounds else ():
                x, end = 20 + slot * (part[0] + 0.5), 20 + slot * (both + 0.5)
                canvas.arrow((x, y + tall - 10), (end + (x - end) / 5, y + gap), page.GREY, 2)
    canvas.text(
        canvas.width / 2, 26, "(m, ℓ) of each number, then of parts, then of the row", bold=True
    )
    return canvas.picture("\n".join(said))


def memory_levels(levels: Mapping[str, tuple[float, float, str]]) -> Picture:
    """Draw a hierarchy of memories, such as a GPU's SRAM and HBM, as stacked boxes.

    The first memory is on top. Boxes become wider by equal steps, whatever the capacities. The alt
    text states capacities and bandwidths. Used in notebook 09.

    levels: {name: (capacity in bytes, bandwidth in bytes per second, text that says what is kept
        there)}, from the fastest memory to the slowest.
    """
    canvas, said = Canvas(page.WIDEST, 110 * len(levels) + 20), []
    for at, (name, (nbytes, speed, holds)) in enumerate(levels.items()):
        shown = f"{size(nbytes)}, {size(speed)}/s"
        said.append(f"{name}: {shown}; {holds}")
        share = (at + 1) / len(levels)
        wide, y = 180 + 340 * share, 20 + 110 * at
        fill = (page.ORANGE, page.SKY, page.EMPTY)[min(at, 2)]
        canvas.box(290 - wide / 2, y, wide, 86, fill, round=8)
        canvas.text(290, y + 28, name, page.NORMAL, bold=True)
        canvas.text(290, y + 60, shown)
        canvas.text(590, y + 43, holds, align="left")
    return canvas.picture("\n".join(said))


def roofline(roofs: Mapping[str, tuple[float, float]], programs: Sequence[tuple]) -> Picture:
    """Draw how fast machines can compute at each arithmetic intensity, and where programs lie.

    Arithmetic intensity is the number of operations for each byte that is read from or written to
    memory. The line of a machine (its roofline) rises with the memory's bandwidth until it reaches
    the peak of the processor. A program is a point on the line of its machine. Both axes are
    logarithmic; that of intensity goes from 0.5 to 2000, and a program outside isn't drawn.

    roofs: {machine: (peak in operations per second, memory bandwidth in bytes per second)}.
    programs: (name, machine, operations per byte) of each; the machine is a key of `roofs`.

    The alt text states intensities but no speeds, since measured speeds vary. Used in notebook 09.
    """
    figure, (axes,) = chart("What is possible, by operations for each byte of memory")
    looks = zip(cycle(page.RANK_COLOURS), cycle(page.MARKERS))
    looks = dict(zip(roofs, looks, strict=False))
    reach = [0.5, 2000.0]
    for name, (operations, nbytes) in roofs.items():
        bend = operations / nbytes
        xs = [reach[0], bend, reach[1]]
        ys = [min(operations, x * nbytes) for x in xs]
        axes.plot(xs, ys, color=looks[name][0], lw=3, label=name)
    for name, machine, intensity in programs:
        operations, nbytes = roofs[machine]
        fill, marker = looks[machine]
        speed = min(operations, intensity * nbytes)
        axes.plot([intensity], [speed], marker, color=fill, ms=13, mec="black")
        style = {"textcoords": "offset points", "fontsize": page.SMALL, "bbox": page.WHITE}
        axes.annotate(name, (intensity, speed), (10, -24), **style)
    axes.set(xscale="log", yscale="log", xlim=reach, xlabel="operations for each byte")
    axes.set_ylabel("operations a second")
    page.with_units(axes.yaxis, "")
    axes.grid(color=page.FAINT, lw=0.6)
    legend(figure, axes.lines[: len(roofs)])
    told = [f"{name} ({machine}): {x:.0f} operations for a byte" for name, machine, x in programs]
    return Picture(figure, f"Rooflines of {', '.join(roofs)}.\n" + "\n".join(told))
