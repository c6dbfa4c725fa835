"""Draw charts of measured and predicted times, of buckets and shards, and of bytes of memory.

Each public function that draws returns a `Picture`: a matplotlib figure, and a text that says what
it shows, which serves as its alt text. The alt text states no measured time or speed: those differ
between runs, and notebooks print them in tables.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from .. import cost, memory
from ..tools.units import binary_size, count, duration, size
from . import page
from .page import Picture, chart, colour, legend, patch, stroke

COLOURS = {  # {name of a backend: colour}, the same in all charts
    "gloo": page.BLUE,
    "ring": page.ORANGE,
    "ring_all_reduce": page.ORANGE,
    "shared memory": page.GREEN,
    "doubling": page.SKY,
    "doubling_all_reduce": page.SKY,
    "gloo, list": page.RED,
}


# Grouped bars


def median_time(results) -> Picture:
    """Draw the median time of a collective call as grouped bars, on a logarithmic scale.

    There is a group of bars for each tensor size, and in it a bar for each pair of a backend (a way
    to do the call, such as "gloo" or "ring") and a number of processes. A black mark on a bar is
    the time that merely moving as many bytes took, by memcpy for example, if that was measured.
    Used in notebook 02.

    results: what `ddpkit.bench.collectives.measure` returned for one collective call.
    """
    return _grouped_bars(results, lambda _, seconds: 1e3 * seconds, "Median time", "ms", "log")


def bandwidth(results) -> Picture:
    """Draw the bus bandwidth of a collective call, in GB/s, as grouped bars.

    Bus bandwidth is the bytes that each rank would send on an ideal ring, divided by the time that
    the call took, so it can be compared with the speed of the wire. There is a group of bars for
    each tensor size, and in it a bar for each pair of a backend (a way to do the call, such as
    "gloo" or "ring") and a number of processes. A black mark on a bar is its ceiling: the bandwidth
    if the call took only as long as moving as many bytes in the plainest way, by memcpy for
    example, which was timed in the same rounds. Bars whose ceiling wasn't measured have no mark.
    Used in notebook 02.

    results: what `ddpkit.bench.collectives.measure` returned for one collective call.
    """

    def gigabytes_per_second(result, seconds: float) -> float:
        return result.busbw * result.median_s / seconds / 1e9

    return _grouped_bars(results, gigabytes_per_second, "Bus bandwidth", "GB/s", "linear")


def _grouped_bars(results, value: Callable, what: str, unit: str, scale: str) -> Picture:
    """Draw a bar for each result, in a group for each tensor size; return the picture.

    results: a `ddpkit.bench.results.Results`, a list. Two kinds of result have no bar. A ceiling,
        such as "memcpy", merely moves the bytes: it is a black mark on the bar of each result that
        names it as its `ceiling`. The baseline's second timing ("gloo again"), which shows how much
        times differ by chance, isn't drawn at all.
    value: function of (result, seconds). It returns the height of the result's bar for the result's
        median time, and the height of the mark on this bar for its ceiling's median time.
    what, unit: the name and the unit of the quantity that is drawn, for the axis.
    scale: "log" or "linear", the scale of that axis.
    """
    names = list(dict.fromkeys(result.variant for result in results.competing))
    shown = sorted(results.competing, key=lambda r: (names.index(r.variant), r.world_size))
    sizes = dict(sorted((result.nbytes, result.size) for result in shown))
    worlds = sorted({result.world_size for result in shown})
    operations = " and ".join(dict.fromkeys(result.operation for result in results.competing))
    title = f"{what} of {operations}"
    colours = colours_of(names)
    figure, (axes,) = chart(title)
    width, ticks = 0.86 / max(Counter(result.nbytes for result in shown).values()), {}
    for place, nbytes in enumerate(sizes):
        group = [result for result in shown if result.nbytes == nbytes]
        for number, result in enumerate(group):
            x = place + width * (number + 0.5 - len(group) / 2)
            ticks[x] = result.world_size
            fill = colours[result.variant]
            axes.bar(x, value(result, result.median_s), width, color=fill, ec="black")
            fraction = results.fraction(result)
            if fraction:
                ceiling = value(result, fraction * result.median_s)
                ends = x - 0.46 * width, x + 0.46 * width
                axes.hlines(ceiling, *ends, color="white", lw=6, zorder=3)
                axes.hlines(ceiling, *ends, color="black", lw=3.5, zorder=3)
    axes.set_xticks(list(ticks), list(ticks.values()), minor=True, fontsize=page.SMALL)
    axes.set_xticks(range(len(sizes)), sizes.values())
    axes.tick_params(axis="x", which="both", length=0)
    axes.tick_params(axis="x", which="major", pad=26)
    axes.set(xlabel="number of processes; size of the tensor", ylabel=f"{what} ({unit})")
    axes.set_yscale(scale)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(axis="y", color=page.FAINT, lw=0.6)
    handles = [patch(*pair) for pair in colours.items()]
    said = (
        f"{title}. By size: {', '.join(sizes.values())}; by backend: {'; '.join(colours)}; "
        f"by number of processes: {', '.join(map(str, worlds))}."
    )
    movers = sorted({result.ceiling for result in shown if results.fraction(result)})
    if movers:
        marks = f"the same bytes just moved, by {' or '.join(movers)}"
        handles.append(stroke(marks, lw=3.5))
        said = f"{said} Black marks: {marks}."
    legend(figure, handles)
    return Picture(figure, said)


def colours_of(names: Sequence[str]) -> dict[str, str]:
    """Return {name: colour} for all names, in their order.

    A name that is a key of `COLOURS` gets its colour there, so that it looks the same in all
    charts. The other names get, in turn, those colours of `page.RANK_COLOURS` that none of `names`
    has got in this way; if there are too few, these colours repeat from the first.
    """
    taken = {COLOURS.get(name) for name in names}
    free = itertools.cycle([fill for fill in page.RANK_COLOURS if fill not in taken])
    return {name: COLOURS.get(name) or next(free) for name in names}


# Training steps


def variants(seconds: Mapping[str, Sequence[float]], compute: str, link=None) -> Picture:
    """Draw how long a training step takes in several variants, a horizontal bar for each.

    A bar is blue up to the time of computing alone, and orange where communication adds to it. Its
    length is the median over the rounds of the measurement; if there were several, a black span
    marks the middle half of them.

    seconds: {name of the variant: [seconds of a step in each round]}.
    compute: the name of the variant that only computes, and doesn't send; a dashed line marks its
        median.
    link: the `Link` (a slower network) that the launch emulated, or its text, to be named in the
        title; None if there was none.

    The alt text names the variants and states no measured time. Used in notebook 04.
    """
    import numpy

    quarters = 0.25, 0.5, 0.75
    quartiles = {name: 1e3 * numpy.quantile(times, quarters) for name, times in seconds.items()}
    alone = quartiles[compute][1]
    title = "Time of a training step"
    if link:
        title += f", emulated link: {link}"
    figure, (axes,) = chart(title, 180 + 54 * len(seconds))
    parts = {"as long as computing": page.BLUE, "communication adds": page.ORANGE}
    rows = {}
    for name, (_, median, _) in quartiles.items():
        lengths = min(median, alone), max(median - alone, 0)
        rows[name] = dict(zip(parts, lengths, strict=True))
    _stacked_bars(axes, rows, parts)
    several = max(map(len, seconds.values())) > 1
    for name, (low, median, high) in quartiles.items():
        if several:
            error = [[median - low], [high - median]]
            axes.errorbar(median, name, xerr=error, color="black", lw=2.5, capsize=7, capthick=2.5)
        page.write_after(axes, high, name, f"{median:.4g} ms")
    axes.set_xlim(0, 1.16 * max(high for _, _, high in quartiles.values()))
    axes.axvline(alone, color="black", lw=1.5, ls=page.DASHES)
    axes.set_xlabel("time of a step (ms)")
    axes.grid(axis="x", color=page.FAINT, lw=0.6)
    handles = [patch(*pair) for pair in parts.items()]
    if several:
        handles.append(stroke("half of the rounds", lw=2.5, marker="|", ms=14, mew=2.5))
    legend(figure, handles)
    return Picture(
        figure,
        f"{title}. From top to bottom: {'; '.join(seconds)}. Blue: as long as computing alone "
        "takes, a dashed line through all; orange: what communication adds.",
    )


def scaling(
    compute_s: float, wires: Mapping[str, Callable[[int], float]], most: int = 32
) -> Picture:
    """Draw the predicted time of a training step on 1 to `most` workers, a curve for each network.

    compute_s: the seconds that one worker computes for the whole batch; n workers take 1/n of it.
    wires: {name of a network: function}. The function takes the number of workers, and returns the
        seconds of communication in a step, which add to those of computing.
    most: the largest number of workers.

    A dot marks the lowest point of each curve, and the alt text says where it is. A dashed line
    shows computing alone. Used in notebook 03.
    """
    title = "Time of a step, by the number of workers"
    figure, (axes,) = chart(title)
    workers, said = range(1, most + 1), []
    alone = [compute_s / n for n in workers]
    axes.plot(workers, alone, color="black", lw=2, ls=page.DASHES, label="computing alone")
    for (name, wire), fill in zip(wires.items(), itertools.cycle(page.RANK_COLOURS)):
        seconds = [compute_s / n + wire(n) for n in workers]
        best = min(workers, key=lambda n: seconds[n - 1])
        axes.plot(workers, seconds, color=fill, lw=3, label=name)
        axes.plot(best, seconds[best - 1], color=fill, marker="o", ms=14)
        end = f"{seconds[-1]:.2f} s with {most}"
        said.append(f"{name}: least with {best}, {seconds[best - 1]:.2f} s; {end}")
    axes.set(xlabel="workers", ylabel="time (s)", xlim=(0, most + 1), ylim=(0, None))
    legend(figure)
    return Picture(figure, f"{title}. {'. '.join(said)}.")


def _stacked_bars(axes, rows: Mapping[str, Mapping[str, float]], colours: Mapping[str, object]):
    """Draw a horizontal bar for each row, the first on top; return their lengths in that order.

    A bar is stacked from segments. The axis has room on the right for a number after each bar; such
    numbers and the legend are left to the caller.

    axes: matplotlib's chart. rows: {label of the bar: {segment: length}}; missing segments are 0.
    colours: {segment: matplotlib colour}, in the order from left to right. Segments that aren't in
        it are neither drawn nor counted in the lengths.
    """
    names, ends = list(rows), [0.0] * len(rows)
    for part, fill in colours.items():
        widths = [row.get(part, 0) for row in rows.values()]
        axes.barh(names, widths, 0.68, ends, color=fill, ec="black")
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlim(0, 1.16 * max(ends))  # room for a number after each
    return ends


# One step, bucket by bucket


def bucket_timeline(
    plan: cost.Plan,
    ready_s: Sequence[float],
    sizes: Sequence[int],
    model: cost.CostModel,
    world_size: int,
    longest_s: float,
) -> Picture:
    """Draw when the gradients of a training step become ready and when their buckets are sent.

    A bucket is a group of gradients that one ring all-reduce sends. `cost.timeline` predicts the
    times: an all-reduce begins once the gradients of its bucket are ready and the one before has
    ended. The upper row is backward, with a line where each gradient becomes ready; the lower row
    has a bar for each bucket's all-reduce. Buckets and their gradients are orange and blue in turn.
    A red bar below is the exposed time, from the end of backward to the end of the last all-reduce.

    plan: the buckets in the order in which they are sent, each a list of gradient indices.
    ready_s: for each gradient, the seconds after backward began at which it is ready.
    sizes: for each gradient, its bytes.
    model: the latency and the bandwidth of the wire between ranks.
    world_size: the number of ranks.
    longest_s: the time axis is at least this long, in seconds, so pictures can share a scale.
    ValueError: there are no gradients, a gradient isn't in exactly one bucket or has no time or no
        size, or `world_size` is below 1.

    The alt text counts the buckets and the gradients, and states no times. Used in notebook 04.
    """
    line = cost.timeline(plan, ready_s, sizes, model, world_size)
    backward, end = 1e3 * line.backward_s, 1e3 * line.done[-1]
    longest = max(end, 1e3 * longest_s)
    title = f"{count(len(plan), 'bucket')}, {count(world_size, 'rank')}, predicted"
    figure, (axes,) = chart(title, 400)
    axes.broken_barh([(0, backward)], (-0.4, 0.8), fc=page.PALE, ec="black")
    for number, bucket in enumerate(plan):
        fill = (page.ORANGE, page.BLUE)[number % 2]
        axes.vlines([1e3 * ready_s[gradient] for gradient in bucket], -0.36, 0.36, fill, lw=2.5)
        start, length = 1e3 * line.started[number], 1e3 * (line.done[number] - line.started[number])
        edge = "black" if length > longest / 100 else "none"
        axes.broken_barh([(start, length)], (0.6, 0.8), fc=fill, ec=edge)
        label = binary_size(sum(sizes[gradient] for gradient in bucket))
        if length > longest * len(label) / 71:  # the letters that fit
            page.write_on(axes, start + length / 2, 1, label, fill)
    axes.axvline(backward, color="black", lw=1.5, ls=page.DASHES)
    axes.broken_barh([(backward, end - backward)], (1.55, 0.15), fc=page.WRONG)
    said = f"exposed: {duration(line.exposed_s)}" if line.exposed_s else "nothing exposed"
    at, align = (backward, "left") if backward < longest / 2 else (end, "right")
    style = {"color": page.WRONG, "weight": "bold", "bbox": page.WHITE}
    axes.text(at, 1.82, said, ha=align, va="top", fontsize=page.NORMAL, **style)
    axes.set(xlim=(0, longest), ylim=(2.4, -0.6))
    axes.set_yticks((0, 1), ("backward", "all-reduces"), fontsize=page.NORMAL)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"time (ms), with {model}")
    ready = [stroke("a gradient is ready", page.ORANGE, lw=2.5)]
    travels = [patch("the all-reduce of its bucket", page.ORANGE), patch("the next one", page.BLUE)]
    legend(figure, ready + travels + [stroke("exposed", page.WRONG, lw=8)])
    return Picture(figure, describe_buckets(plan))


def describe_buckets(plan: cost.Plan) -> str:
    """Return the alt text, without times, of the picture that `bucket_timeline` draws.

    plan: a list of buckets, each the list of the indices of the gradients that are sent together.
    """
    gradients = sum(map(len, plan))
    return (
        f"A training step with {count(len(plan), 'bucket')}, predicted. Above, backward, with a "
        f"mark where each of {count(gradients, 'gradient')} becomes ready; below, an all-reduce "
        "for each bucket, one after the other. Red: exposed, after the end of backward."
    )


def bucket_moments(
    parts: Mapping[str, int], moments: Mapping[str, tuple[Sequence[float], Sequence]]
) -> Picture:
    """Draw what a gradient bucket holds at several moments of training, a row for each moment.

    A bucket is a flat tensor with the gradients of several parameters. On the left are its
    elements, on the right the `.grad` of each parameter, in the parameter's colour where it is a
    view of the flat tensor.

    parts: {name of the parameter: number of elements in its gradient}, in the order of the bucket.
    moments: {name of the moment: (elements of the flat tensor, [.grad of each parameter])}, where a
        .grad is None, the text "view" for a view of the flat tensor, or a list of numbers for a
        tensor of its own.

    The alt text states all elements. Used in notebook 04.
    """
    numels, length = list(parts.values()), sum(parts.values())
    fills = [colour(number) for number, numel in enumerate(numels) for _ in range(numel)]
    figure, (axes,) = chart("", 100 + 62 * len(moments))
    said = []
    for row, (moment, (flat, grads)) in enumerate(moments.items()):
        starts = itertools.accumulate(numels, initial=length + 1)
        for place, value in enumerate(flat):
            _box(axes, place, row, 1, f"{value:g}", fills[place])
        for number, (start, numel, grad) in enumerate(zip(starts, numels, grads, strict=False)):
            if grad is None or grad == "view":
                fill = page.PALE if grad is None else colour(number)
                _box(axes, start, row, numel, "None" if grad is None else "view", fill)
                continue
            for place, value in enumerate(grad):
                _box(axes, start + place, row, 1, f"{value:g}", page.EMPTY)
        shown = [f"{name}.grad {_say(grad)}" for name, grad in zip(parts, grads, strict=True)]
        said.append(f"{moment}: flat {_say(flat)}, {', '.join(shown)}")
    axes.set(xlim=(-0.1, 2 * length + 1.1), ylim=(len(moments) - 0.4, -0.6))
    axes.set_yticks(range(len(moments)), moments, fontsize=page.NORMAL)
    middles = [length + 1 + sum(numels[:n]) + numel / 2 for n, numel in enumerate(numels)]
    heads = ["flat", *(f"{name}.grad" for name in parts)]
    axes.set_xticks([length / 2, *middles], heads, fontsize=page.NORMAL)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    legend(figure, [patch("a tensor that backward made", page.EMPTY)])
    return Picture(figure, f"A bucket. {'. '.join(said)}.")


def _say(grad: Sequence[float] | str | None) -> str:
    """Return a .grad, or a bucket's flat tensor, as text: "1 2.5" for its elements, "None", "view".

    grad: the list of elements; None, if the parameter has no .grad; or the word "view", for a .grad
        that is a view of the flat tensor.
    """
    return f"{grad}" if grad in (None, "view") else " ".join(f"{value:g}" for value in grad)


def _box(axes, x: float, y: float, width: float, text: str, fill: str) -> None:
    """Draw a box from `x` to `x + width`, 0.7 high around `y`, with `text` in its middle.

    axes: matplotlib's chart; numbers are in its units. fill: the colour of the box.
    """
    axes.barh(y, width, 0.7, x, color=fill, ec="black")
    page.write_on(axes, x + width / 2, y, text, fill)


# The parts that ranks keep


def shards(numels: Mapping[str, int], world_size: int) -> Picture:
    """Draw a flat buffer as two bars: the parameters in it, and below them the shard of each rank.

    A shard is the part of the buffer that one rank keeps. All are equally long, so the buffer is
    padded at its end to a multiple of `world_size`.

    numels: {name of the parameter: number of elements}, in the order of the buffer. A parameter
        whose part of the bar is too short for its name is drawn without it.
    world_size: the number of ranks, and so of shards.

    The alt text states where each parameter begins and ends. Used in notebook 07.
    """
    used = sum(numels.values())
    length = math.ceil(used / world_size)
    whole = world_size * length
    title = f"{count(whole, 'number')} in a row, {count(world_size, 'shard')}"
    starts = itertools.accumulate(numels.values(), initial=0)
    spans = list(zip(numels, starts, numels.values(), strict=False))
    named = [(*span, page.MIXED) for span in spans] + [("", used, whole - used, "white")]
    owned = [(f"rank {r}", r * length, length, colour(r)) for r in range(world_size)]
    figure, (axes,) = chart(title, 280)
    for lane, parts in enumerate((named, owned)):
        for name, start, numel, fill in parts:
            axes.barh(lane, numel, 0.8, start, color=fill, ec="black", lw=1.5)
            if numel / whole * 800 > 10.5 * len(name):
                page.write_on(axes, start + numel / 2, lane, name, fill)
    axes.set(xlim=(0, whole), ylim=(1.5, -0.5))
    axes.set_yticks((0, 1), ("parameters", "owned by"), fontsize=page.NORMAL)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("place in the buffer")
    legend(figure, [patch(f"padding: {count(whole - used, 'number')}", "white")])
    said = [f"{name} from {start} to {start + numel}" for name, start, numel in spans]
    return Picture(
        figure,
        f"A flat buffer of {count(whole, 'number')}: {', '.join(said)}; padding: {whole - used}. "
        f"Below, {count(world_size, 'shard')} of {length}, one for each rank.",
    )


GPU_BYTES = 80 * 10**9
KIND_COLOURS = dict(zip(memory.KINDS, [*page.RANK_COLOURS[:5], page.MIXED], strict=True))


def byte_bars(
    rows: Mapping[str, Mapping[str, int]], title: str, chosen: str | None = None
) -> Picture:
    """Draw bytes of memory as stacked bars: a bar for each row, a segment for each kind of memory.

    A bar's total is written at its right end. A dashed line marks a GPU's memory of 80 GB.

    rows: {label of the bar: {kind of memory: bytes}}; a kind is one of `ddpkit.memory.KINDS`, such
        as "parameters" or "activations".
    title: the heading of the chart and of its alt text.
    chosen: the label of a bar to highlight, or None.

    The bytes don't depend on the machine, so the alt text states them. Used in notebooks 06 and 07.
    """
    used = set().union(*rows.values())
    colours = {kind: KIND_COLOURS[kind] for kind in memory.KINDS if kind in used}
    figure, (axes,) = chart(title, 170 + 64 * len(rows))
    ends = _stacked_bars(axes, rows, colours)
    for name, end in zip(rows, ends, strict=True):
        page.write_after(axes, end, name, size(end))
    dashed = {"color": page.WRONG, "lw": 2.5, "ls": page.DASHES}
    axes.axvline(GPU_BYTES, **dashed)
    axes.set_xlim(right=max(axes.get_xlim()[1], 1.02 * GPU_BYTES))
    if chosen:
        place = list(rows).index(chosen)
        axes.axhspan(place - 0.45, place + 0.45, fc=page.PALE, ec="black", lw=2, zorder=0)
    page.with_units(axes.xaxis, "B")
    kinds = [patch(*pair) for pair in colours.items()]
    legend(figure, [*kinds, stroke(f"a GPU of {size(GPU_BYTES)}", **dashed)])
    said = [f"{title}."]
    for name, row in rows.items():
        kinds = ", ".join(f"{kind} {size(nbytes)}" for kind, nbytes in row.items() if nbytes)
        said.append(f"{name}: {size(sum(row.values()))} ({kinds}).")
    return Picture(figure, "\n".join(said))


def zero_grid(world_size: int) -> Picture:
    """Draw which part of the model states each rank keeps in ZeRO's stages 0 to 3.

    The grid has a row for each stage and a column for each rank. A cell has three bands, for
    parameters, gradients and optimizer state. A band's height is proportional to the bytes that it
    takes per parameter of the model (2, 2, 12). The rank's part of it, all or 1/`world_size`, is
    coloured, so coloured areas are proportional to bytes. Training is in mixed precision with
    AdamW, as in figure 1 of the ZeRO paper. Used in notebook 07.
    """
    kinds = memory.PRECISIONS["mixed"]._asdict()
    figure, (axes,) = chart("Who keeps what", 600)
    stages, ranks = range(4), range(world_size)
    for stage, rank in itertools.product(stages, ranks):
        top, left = 20 * stage, 1.1 * rank
        for (kind, nbytes), sharded_from in zip(kinds.items(), (3, 2, 1), strict=True):
            box = {"align": "edge", "height": nbytes}
            axes.barh(top, 1, left=left, fc="white", ec=page.FAINT, **box)
            start, width = (rank / world_size, 1 / world_size) if stage >= sharded_from else (0, 1)
            axes.barh(top, width, left=left + start, fc=KIND_COLOURS[kind], ec="black", **box)
            top += nbytes
    axes.set(xlim=(-0.02, 1.1 * world_size - 0.08), ylim=(77, -1))
    axes.set_yticks([20 * stage + 8 for stage in stages], [f"stage {stage}" for stage in stages])
    axes.set_xticks([1.1 * rank + 0.5 for rank in ranks], [f"rank {rank}" for rank in ranks])
    axes.tick_params(length=0, labelsize=page.NORMAL)
    axes.spines[:].set_visible(False)
    legend(figure, [patch(f"{kind}: {n} bytes", KIND_COLOURS[kind]) for kind, n in kinds.items()])
    said = [f"Each of {count(world_size, 'rank')} keeps, in stage 0, all of everything."]
    for stage, kind in enumerate(reversed(kinds), start=1):
        said.append(f"From stage {stage} on it keeps 1/{world_size} of: {kind}.")
    return Picture(figure, " ".join(said))


# Numbers read and written


def trips(counts: Mapping[str, tuple[float, float]]) -> Picture:
    """Draw, as bars, how many numbers each of several ways to compute a softmax reads and writes.

    A bar stacks the two, and their sum is written at its end. Used in notebook 08.

    counts: {name of the way: (numbers read from memory, numbers written to it)}, in multiples of N,
        the length of a row.
    """
    figure, (axes,) = chart("Numbers moved", 150 + 58 * len(counts))
    colours = {"read": page.BLUE, "written": (page.BLUE, page.PALER)}
    rows = {name: dict(zip(colours, moved, strict=True)) for name, moved in counts.items()}
    for name, total in zip(counts, _stacked_bars(axes, rows, colours), strict=True):
        page.write_after(axes, total, name, _times_n(total), weight="bold")
    axes.set_xlabel("multiples of N")
    legend(figure, [patch(*pair) for pair in colours.items()])
    said = [
        f"{name} reads {_times_n(read)}, writes {_times_n(written)}"
        for name, (read, written) in counts.items()
    ]
    return Picture(figure, f"Numbers moved: {'; '.join(said)}.")


def _times_n(factor: float) -> str:
    """Return a multiple of N as text: "N", "2N", "1.5N"."""
    return "N" if factor == 1 else f"{factor:g}N"


# A model and its measurements


def fitted(
    fit: cost.CostModel,
    measured: Sequence[cost.Measurement],
    held_out: Sequence[cost.Measurement],
    title: str,
) -> Picture:
    """Draw one algorithm's times against tensor size: measurements, and the fitted model's line.

    Both axes are logarithmic. A note states the model's parameters, and its median relative error
    on each of the two sets of points.

    fit: the model, which predicts seconds from bytes.
    measured: the measurements that the model was fitted to, drawn as full points. These and
        `held_out` must all be of one algorithm, with one number of ranks, which isn't checked.
    held_out: measurements, at least one, that the model wasn't fitted to, drawn as hollow points:
        if they lie on the line, the model also holds for sizes that it hasn't seen.
    title: the heading, also of the alt text. If the network link was emulated, it should say that.

    The alt text counts the points, and states no time unless the title does. Used in notebook 02.
    """
    algorithm, world_size, *_ = measured[0]
    name = f"{algorithm}, {world_size} ranks"
    style = {"color": colour(0), "marker": page.MARKERS[0]}
    sizes = between([measurement.nbytes for measurement in (*measured, *held_out)])
    figure, (axes,) = chart(title)
    _curve(axes, fit, algorithm, world_size, sizes, measured, label=name, **style)
    _points(axes, held_out, mfc="white", **style)
    _log_axes(axes)
    errors = [f"{100 * fit.error(part):.0f} %" for part in (measured, held_out)]
    note = (
        f"model: {fit}\nmedian error: {errors[0]} on the points it was fitted to,\n"
        f"{errors[1]} on those held out"
    )
    axes.set_ylim(bottom=axes.get_ylim()[0] / 3)  # room for the note
    style = {"ha": "right", "fontsize": page.SMALL, "linespacing": 1.5, "bbox": page.WHITE}
    axes.text(0.985, 0.04, note, transform=axes.transAxes, **style)
    dots = {"marker": "o", "ms": 11, "mew": 2.5, "ls": "none"}
    axes.plot([], [], label="fitted to", color="black", **dots)
    axes.plot([], [], label="held out", color="black", mfc="white", **dots)
    axes.plot([], [], label="model", color="black", lw=2.5)
    legend(figure)
    return Picture(
        figure,
        f"{title}. Time by size for {name}: {count(len(measured), 'point')} that the "
        f"model was fitted to, {len(held_out)} held out, and the model's lines.",
    )


def crossing(
    model: cost.CostModel,
    algorithms: Sequence[str],
    world_size: int,
    measured: Sequence[cost.Measurement],
    title: str,
) -> Picture:
    """Draw several algorithms' predicted times by tensor size, and mark where the fastest changes.

    A circle and a dashed line mark each size from which on another algorithm is the fastest. Both
    axes are logarithmic. Sizes go from 1 kB to 10 MB, or farther, to hold every measurement and,
    around every mark at a size s, the range from s/30 to 30·s.

    model: the cost model, which predicts seconds from bytes and which the lines follow.
    algorithms: names from `cost.ALGORITHMS`, such as "ring_all_reduce".
    world_size: the number of ranks.
    measured: measurements with `world_size` ranks, drawn as points; those of algorithms that aren't
        in `algorithms` are left out.
    title: the heading, also of the alt text. If the network link was emulated, it should say that.

    The alt text names the fastest algorithms, from small sizes to large, and states no number but
    the title's. Used in notebook 02.
    """
    changes = takeovers(model, algorithms, world_size)
    around = [nbytes * factor for nbytes, _, _ in changes for factor in (1 / 30, 30)]
    sizes = between([1e3, 1e7, *around, *(measurement.nbytes for measurement in measured)])
    figure, (axes,) = chart(title)
    looks = zip(colours_of(algorithms).items(), itertools.cycle(page.MARKERS), strict=False)
    for (algorithm, fill), marker in looks:
        style = {"color": fill, "marker": marker, "label": algorithm}
        its = [measurement for measurement in measured if measurement.algorithm == algorithm]
        _curve(axes, model, algorithm, world_size, sizes, its, **style)
    for number, (nbytes, _, after) in enumerate(changes):
        axes.axvline(nbytes, color="black", lw=1.5, ls=page.DASHES)
        seconds = model.seconds(after, nbytes, world_size)
        axes.plot(nbytes, seconds, marker="o", ms=14, mfc="none", mec="black", mew=2.5, zorder=4)
        said, place = f" from {size(nbytes)} on:\n {after}", (nbytes, 0.04 + 0.16 * number)
        style = {"transform": axes.get_xaxis_transform(), "bbox": page.WHITE}
        axes.text(*place, said, fontsize=page.SMALL, **style)
    _log_axes(axes)
    axes.set_xlabel(f"size of the tensor; lines: {model}; points: measured")
    legend(figure)
    fastest = [_fastest(model, algorithms, world_size, sizes[0])] + [new for *_, new in changes]
    return Picture(
        figure,
        f"{title}. By size, for {', '.join(algorithms)}; "
        f"the fastest, from small sizes to large: {', then '.join(fastest)}.",
    )


def takeovers(
    model: cost.CostModel, algorithms: Sequence[str], world_size: int
) -> list[tuple[float, str, str]]:
    """List the tensor sizes at which, by the cost model, a different algorithm becomes the fastest.

    Return [(bytes, fastest algorithm for smaller tensors, fastest from this size on)], the smallest
    size first; an empty list if the same algorithm is always the fastest.

    algorithms: names from `cost.ALGORITHMS`, such as "ring_all_reduce".
    world_size: the number of ranks.
    """
    pairs = itertools.permutations(algorithms, 2)
    crossings = {cost.crossover(*pair, world_size, model) for pair in pairs}
    found = []
    for nbytes in sorted(crossings - {None, 0.0}):
        ends = 0.999 * nbytes, 1.001 * nbytes
        before, after = (_fastest(model, algorithms, world_size, end) for end in ends)
        if before != after:
            found.append((nbytes, before, after))
    return found


def _fastest(
    model: cost.CostModel, algorithms: Sequence[str], world_size: int, nbytes: float
) -> str:
    """Return the algorithm that the model predicts to be the fastest for a tensor of `nbytes`.

    algorithms: at least one name from `cost.ALGORITHMS`. They should do the same operation, as
        "ring_all_reduce" and "doubling_all_reduce" do, which isn't checked.
    world_size: the number of ranks.
    """
    return min(algorithms, key=lambda algorithm: model.seconds(algorithm, nbytes, world_size))


def _curve(axes, model, algorithm: str, world_size: int, sizes, measured, label: str, **style):
    """Draw one algorithm into a chart: the model's prediction as a line, measurements as points.

    axes: matplotlib's chart. model: the `CostModel` that predicts seconds from bytes.
    algorithm: a name from `cost.ALGORITHMS`, such as "ring_all_reduce".
    sizes: the tensor sizes, in bytes, for which the line is computed.
    measured: a list of this algorithm's `cost.Measurement`s, drawn at (nbytes, seconds); [] for no
        points. label: the text for the legend.
    style: matplotlib's "color" and "marker".
    """
    seconds = [model.seconds(algorithm, nbytes, world_size) for nbytes in sizes]
    axes.plot(sizes, seconds, color=style["color"], lw=2.5)
    _points(axes, measured, **style)
    axes.plot([], [], label=label, lw=2.5, ms=11, **style)


def _points(axes, measured: Sequence[cost.Measurement], **style):
    """Draw measurements as points, seconds against bytes; `style`: keywords of `axes.plot`."""
    x = [measurement.nbytes for measurement in measured]
    y = [measurement.seconds for measurement in measured]
    axes.plot(x, y, ls="none", ms=11, mew=2.5, zorder=3, **style)


def between(sizes: Sequence[float]) -> list[float]:
    """Return 100 sizes from the least to the largest given, evenly spaced on a log scale."""
    least, most = min(sizes), max(sizes)
    return [least * (most / least) ** (step / 99) for step in range(100)]


def _log_axes(axes):
    """Make both axes logarithmic and name them: bytes of the tensor on x, seconds on y."""
    axes.set_xscale("log")
    page.with_units(axes.xaxis, "B")
    axes.set_xlabel("size of the tensor")
    page.log_y(axes, "time", "s")


# Tries at a number


def tries(
    made: Sequence[tuple[float, float]],
    labels: tuple[str, str],
    par: float | None = None,
    bound: float | None = None,
) -> Picture:
    """Draw a reader's tries at an exercise that is scored by two numbers, both better when smaller.

    made: the two scores (x, y) of each try, in order, at least one; a line connects them. The point
        of a try is hollow if another try is better in one score, and no worse in the other.
    labels: the names of x and y, with their units.
    par: the x that the library's own solution reaches, drawn as a dashed line; None for no line.
    bound: the smallest x that is possible; the area to its left is grey. None for no area.
    """
    figure, (axes,) = chart("Your tries", 330)
    xs, ys = zip(*made, strict=True)
    axes.plot(xs, ys, color=page.FAINT, lw=1.5, zorder=2)
    for number, (x, y) in enumerate(made, 1):
        beaten = any(a <= x and b <= y and (a, b) != (x, y) for a, b in made)
        style = {"color": page.BLUE, "mfc": "white" if beaten else page.BLUE}
        axes.plot([x], [y], "o", ms=11, mew=2.5, zorder=3, **style)
        axes.annotate(f"{number}", (x, y), (9, 7), textcoords="offset points", fontsize=page.SMALL)
    axes.margins(0.15)
    if par is not None:
        axes.axvline(par, color=page.ORANGE, ls="--", lw=2.5, label=f"par {par:g}")
    if bound is not None:
        left = min(axes.get_xlim()[0], bound * 0.98)
        axes.axvspan(left, bound, color=page.PALE, label=f"nobody below {bound:g}", zorder=0)
        axes.set_xlim(left=left)
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    if par is not None or bound is not None:
        legend(figure)
    said = ", ".join(f"{x:g} {labels[0]} with {y:g} {labels[1]}" for x, y in made)
    return Picture(figure, f"Your tries, in their order: {said}.")
