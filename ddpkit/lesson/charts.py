"""Charts of what was measured: times and bandwidths by size, and the line of a model beside them.

Their words name what is drawn and no number that was measured: those differ from run to run, and stand in the tables.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from ..tools import cost, memory
from . import figures
from .figures import (
    EMPTY,
    FAINT,
    LARGE,
    NORMAL,
    PALE,
    RANK_COLOURS,
    SMALL,
    WIDEST,
    WRONG,
    Canvas,
    Picture,
    count,
    draw_scale,
    size,
)

BLUE, ORANGE, GREEN, PINK, SKY, RED = RANK_COLOURS[:6]
COLOURS = {"gloo": BLUE, "ring": ORANGE, "shared memory": GREEN, "nccl": PINK, "doubling": SKY, "gloo, list": RED}
COLOURS |= {"ring_all_reduce": ORANGE, "doubling_all_reduce": SKY}
HATCHES = ("", "//", "xx", "..")  # by number of processes, fewest first
MARKERS = "osD^v"
HEIGHT = 600
LEFT, RIGHT, BOTTOM = 124, 24, 80  # pixels beside and below the axes
LINE = 38  # pixels from one line of a legend to the next
WHITE = {"fc": "white", "ec": "none", "pad": 3}
TIMES = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))


# Grouped bars


def average_time(results) -> Picture:
    """The average time of each backend with each number of processes, by size, on a logarithmic scale.

    results: `ddpkit.bench.results.Results`. A black mark on a bar: the same bytes just moved, its ceiling. Notebook 02.
    """

    def milliseconds(result, seconds: float) -> float:
        return seconds * 1e3

    return _grouped_bars(results, milliseconds, "Average time (ms)", logarithmic=True)


def bandwidth(results) -> Picture:
    """The bus bandwidth of each backend with each number of processes, by size.

    results and black marks: as for `average_time`. Notebook 02.
    """

    def gigabytes_per_second(result, seconds: float) -> float:
        return result.busbw * result.median_s / seconds / 1e9

    return _grouped_bars(results, gigabytes_per_second, "Bus bandwidth (GB/s)", logarithmic=False)


def _grouped_bars(results, value: Callable, what: str, logarithmic: bool) -> Picture:
    """value(result, seconds): how high the bar of `result` is, had it taken `seconds`."""
    shown = results.competing
    sizes = dict(sorted({result.nbytes: result.size for result in shown}.items()))
    worlds = sorted({result.world_size for result in shown})
    backends = _by_backend(shown)
    looks = _colours(list(backends)), dict(zip(worlds, itertools.cycle(HATCHES)))
    ceilings = sorted({result.ceiling for result in shown if results.fraction(result)})
    canvas = Canvas(WIDEST, HEIGHT)
    title = _title(what.partition(" (")[0], shown)
    axes = _axes(canvas, _head(canvas, title, *_bar_legend(*looks, ceilings)))
    _draw_bars(axes, results, backends, list(sizes), value, *looks)
    axes.set_xticks(range(len(sizes)), sizes.values())
    axes.tick_params(axis="x", length=0)
    if logarithmic:
        axes.set_yscale("log")
        axes.set_ylim(*_decades(axes.get_ylim()))
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    axes.set_ylabel(what, fontsize=NORMAL)
    axes.grid(axis="y", color=FAINT, lw=0.6)
    return canvas.picture(
        f"{title}. By size: {', '.join(sizes.values())}; by backend: {'; '.join(backends)}; "
        f"by number of processes: {', '.join(map(str, worlds))}."
        + f" Black marks: the same bytes just moved, by {' or '.join(ceilings)}."
        * bool(ceilings)
    )


def _title(what: str, results: Sequence) -> str:
    links = {result.emulated for result in results}
    emulated = f", emulated: {links.pop()}" if len(links) == 1 and links != {""} else ""
    return f"{what} of {' and '.join(dict.fromkeys(result.operation for result in results))}{emulated}"


def _by_backend(results: Sequence) -> dict[str, list]:
    """{backend: its results}; where not all ran on one link, the name says which was emulated."""
    several = len({result.emulated for result in results}) > 1
    found: dict[str, list] = {}
    for result in results:
        link = f" (emulated: {result.emulated})" * bool(several and result.emulated)
        found.setdefault(result.variant + link, []).append(result)
    return found


def _colours(names: Sequence[str]) -> dict[str, str]:
    """A colour for each name; those that are always there have their own."""
    free = itertools.cycle([each for each in RANK_COLOURS if each not in {COLOURS.get(name) for name in names}])
    return {name: COLOURS.get(name) or next(free) for name in names}


def _draw_bars(axes, results, backends: dict[str, list], sizes: list[int], value: Callable, colours, hatches):
    groups = [
        [(name, each) for name in backends for each in backends[name] if each.nbytes == nbytes] for nbytes in sizes
    ]
    width = 0.86 / max(map(len, groups))
    for place, group in enumerate(groups):
        group.sort(key=lambda bar: (list(backends).index(bar[0]), bar[1].world_size))
        for number, (backend, result) in enumerate(group):
            x = place + width * (number + 0.5 - len(group) / 2)
            style = {"color": colours[backend], "hatch": hatches[result.world_size], "ec": "black", "lw": 1}
            axes.bar(x, value(result, result.median_s), width, **style)
            if results.fraction(result):
                ceiling = value(result, results.fraction(result) * result.median_s)
                for ink, line in (("white", 6), ("black", 3.5)):
                    style = {"color": ink, "lw": line, "solid_capstyle": "butt"}
                    axes.plot((x - 0.46 * width, x + 0.46 * width), (ceiling, ceiling), **style)


def _bar_legend(colours: dict[str, str], hatches: dict[int, str], ceilings: list[str]) -> tuple[list, list]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    backends = [Patch(fc=fill, ec="black", label=name) for name, fill in colours.items()]
    worlds = [Patch(fc="white", ec="black", hatch=hatch, label=f"{n} processes") for n, hatch in hatches.items()]
    mark = Line2D([], [], color="black", lw=3.5, label=f"the same bytes just moved, by {' or '.join(ceilings)}")
    return backends, worlds + [mark] * bool(ceilings)


# Training steps


def steps(case: Sequence, compute: str) -> Picture:
    """The time of a training step of each variant: what computing takes, and what communication adds to it.

    case: steps that took turns, as `ddpkit.bench.ddp` measures them. compute: the variant that sends nothing. A black
    mark: the step that the model predicts. Notebook 04.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    shown = [step for step in case if not step.variant.endswith(" again")]
    compute_ms = next(step.median_s * 1e3 for step in shown if step.variant == compute)
    title = f"A training step of {shown[0].operation}" + ", emulated link" * bool(shown[0].emulated)
    predicted = any(step.predicted_s for step in shown)
    legend = [Patch(fc=BLUE, ec="black", label=compute), Patch(fc=ORANGE, ec="black", label="exposed communication")]
    legend += [Line2D([], [], color="black", lw=3.5, label="predicted")] * predicted
    canvas = Canvas(WIDEST, HEIGHT)
    axes = _axes(canvas, _head(canvas, title, legend), left=290)
    for place, step in enumerate(shown):
        _split_bar(axes, place, step.median_s * 1e3, compute_ms)
        if step.predicted_s:
            axes.plot([step.predicted_s * 1e3] * 2, (place - 0.45, place + 0.45), color="black", lw=3.5)
    axes.set_yticks(range(len(shown)), [step.variant for step in shown])
    axes.invert_yaxis()
    axes.set_xlabel("time of a step (ms)", fontsize=NORMAL)
    axes.grid(axis="x", color=FAINT, lw=0.6)
    return canvas.picture(
        f"{title}. From top to bottom: {'; '.join(step.variant for step in shown)}. "
        f"Blue: computing; orange: what communication adds." + " Black marks: predicted." * predicted
    )


def _split_bar(axes, place: int, took: float, compute: float):
    """A bar of length `took`: blue as far as computing alone goes, orange from there on."""
    axes.barh(place, min(took, compute), 0.7, color=BLUE, ec="black")
    axes.barh(place, max(0.0, took - compute), 0.7, compute, color=ORANGE, ec="black")


def variants(seconds: Mapping[str, Sequence[float]], compute: str, link=None) -> Picture:
    """The time of a training step of each variant beside that of computing alone, which is a line through all of them.

    seconds: {name: of each round}; drawn are the median and the middle half of the rounds. compute: the one that sends
    nothing. link: the emulated link, if they ran on one. ValueError: no such variant, or one without a round. Notebook
    04.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    _check_variants(seconds, compute)
    medians = {name: 1e3 * statistics.median(rounds) for name, rounds in seconds.items()}
    title = "Time of a training step" + f", emulated link: {link}" * bool(link)
    legend = [Patch(fc=BLUE, ec="black", label="as long as computing")]
    legend += [Patch(fc=ORANGE, ec="black", label="communication adds")]
    legend += [Line2D([], [], color="black", lw=2.5, label="half of the rounds")]
    canvas = Canvas(WIDEST, 46 + LINE + 14 + 54 * len(seconds) + BOTTOM)
    axes = _axes(canvas, _head(canvas, title, legend), left=50 + 10.5 * max(map(len, seconds)))
    longest = max(1e3 * _middle_half(rounds)[1] for rounds in seconds.values())
    for place, (name, rounds) in enumerate(seconds.items()):
        low, high = (1e3 * end for end in _middle_half(rounds))
        _split_bar(axes, place, medians[name], medians[compute])
        axes.errorbar((low + high) / 2, place, xerr=(high - low) / 2, color="black", lw=2.5, capsize=6, capthick=2.5)
        after = max(high, medians[name]) + 0.015 * longest
        axes.text(after, place, f"{medians[name]:.4g} ms", fontsize=SMALL, va="center", bbox=WHITE)
    axes.axvline(medians[compute], color="black", lw=1.5, ls=(0, (3, 2)))
    axes.set_xlim(0, 1.16 * longest)  # room for the numbers
    axes.set_yticks(range(len(seconds)), seconds)
    axes.invert_yaxis()
    axes.set_xlabel("time of a step (ms)", fontsize=NORMAL)
    axes.grid(axis="x", color=FAINT, lw=0.6)
    return canvas.picture(
        f"{title}. From top to bottom: {'; '.join(seconds)}. "
        f"Blue: as long as computing alone takes, a dashed line through all; orange: what communication adds."
    )


def _check_variants(seconds: Mapping[str, Sequence[float]], compute: str):
    if compute not in seconds:
        got = f"only {', '.join(seconds) or 'none'}"
        raise ValueError(f"variants expected times of {compute!r}, got {got}: time it in the same rounds")
    empty = [name for name, rounds in seconds.items() if not rounds]
    if empty:
        raise ValueError(f"variants expected a time at least, got none for {', '.join(empty)}: measure a round of it")


def _middle_half(rounds: Sequence[float]) -> tuple[float, float]:
    """The first and the third quartile."""
    if len(rounds) == 1:
        return rounds[0], rounds[0]
    first, _, third = statistics.quantiles(rounds, n=4, method="inclusive")
    return first, third


# One step, bucket by bucket


def bucket_timeline(
    plan: cost.Plan,
    ready_s: Sequence[float],
    sizes: Sequence[int],
    model: cost.Model,
    world_size: int,
    longest_s: float = 0.0,
) -> Picture:
    """When gradients become ready in backward and when their buckets travel, as `cost.timeline` predicts it.

    Arguments and errors as there. Gradients and their bucket have the same colour. longest_s: how long the scale is at
    least, so that several pictures can have the same. Notebook 04.
    """
    line = cost.timeline(plan, ready_s, sizes, model, world_size)
    left, width, top = 140, WIDEST - 140 - 40, 116
    canvas = Canvas(WIDEST, 400)
    scale = width / (max(line.done[-1], longest_s) or 1e-3)
    canvas.text(WIDEST / 2, 26, f"A training step with {count(len(plan), 'bucket')}, predicted", LARGE, bold=True)
    canvas.text(WIDEST / 2, 56, f"{count(world_size, 'rank')}; model: {model}")
    _bucket_legend(canvas, left)
    canvas.text(left - 12, top + 32, "backward", NORMAL, "right")
    canvas.text(left - 12, top + 122, "all-reduces", NORMAL, "right")
    end = left + line.backward_s * scale
    canvas.box(left, top, line.backward_s * scale, 64, PALE)
    canvas.line([(end, top - 8), (end, top + 168)], dashed=True)
    for number, bucket in enumerate(plan):
        fill = _bucket_colour(number)
        for gradient in bucket:
            x = left + ready_s[gradient] * scale
            canvas.line([(x, top + 3), (x, top + 61)], fill, 2.5)
        nbytes = sum(sizes[gradient] for gradient in bucket)
        span = left + line.started[number] * scale, left + line.done[number] * scale
        _draw_bucket(canvas, number, nbytes, span, top + 90, end)
    _draw_exposed(canvas, line.exposed_s, end, left + line.done[-1] * scale, top + 168)
    draw_scale(canvas, left, top + 226, width, width / scale)
    return canvas.picture(said_timeline(plan))


def binary_size(nbytes: float) -> str:
    """512 B, 64 KiB, 4 MiB: the units of bucket caps."""
    unit, factor = next((each for each in (("MiB", 2**20), ("KiB", 2**10)) if nbytes >= each[1]), ("B", 1))
    return f"{nbytes / factor:.3g} {unit}"


def said_timeline(plan: cost.Plan) -> str:
    """What `bucket_timeline` shows, without its times."""
    gradients = sum(map(len, plan))
    return (
        f"A training step with {count(len(plan), 'bucket')}, predicted. Above, backward, with a mark where each of "
        f"{count(gradients, 'gradient')} becomes ready; below, an all-reduce for each bucket, one after the other. "
        f"Hatched: exposed, after the end of backward."
    )


def _bucket_colour(number: int) -> str:
    return (ORANGE, BLUE)[number % 2]


def _bucket_legend(canvas: Canvas, left: float):
    y = 78
    for at in (0, 1):
        canvas.line([(left + 10 + 12 * at, y), (left + 10 + 12 * at, y + 20)], _bucket_colour(at), 2.5)
        canvas.box(left + 250 + 22 * at, y, 22, 20, _bucket_colour(at))
    canvas.text(left + 36, y + 10, "a gradient is ready", align="left")
    canvas.text(left + 308, y + 10, "the all-reduce of its bucket", align="left")
    canvas.box(left + 610, y, 30, 20, EMPTY, hatch="///")
    canvas.text(left + 652, y + 10, "exposed", align="left")


def _draw_bucket(canvas: Canvas, number: int, nbytes: float, span: tuple[float, float], y: float, backward_end: float):
    """A box from span[0] to span[1], hatched from the end of backward on; with the bucket's size where it fits."""
    (start, end), fill = span, _bucket_colour(number)
    edge = 1.5 if end - start > 8 else 0.4
    canvas.box(start, y, end - start, 64, fill, line=edge)
    if end > backward_end:
        start = max(start, backward_end)
        canvas.box(start, y, end - start, 64, fill, line=edge, hatch="///")
    label = binary_size(nbytes)
    if span[1] - span[0] > 11 * len(label) + 10:
        middle, half = sum(span) / 2, 5.5 * len(label) + 4
        canvas.box(middle - half, y + 20, 2 * half, 26, fill, "none")
        canvas.text(middle, y + 33, label, ink=figures.ink(fill))


def _draw_exposed(canvas: Canvas, exposed_s: float, start: float, end: float, y: float):
    """How long training waits: a bar, and below it the time."""
    said = f"exposed: {_seconds(exposed_s)}" if exposed_s else "nothing exposed"
    if exposed_s:
        canvas.box(start, y, max(end - start, 2), 10, WRONG, "none")
    half = 6.5 * len(said)
    canvas.text(min((start + end) / 2, WIDEST - half - 10), y + 28, said, NORMAL, ink=WRONG, bold=True)


# Who keeps what


def shards(numels: dict[str, int], world_size: int) -> Picture:
    """A flat buffer: above, the parameters that lie in it end to end; below, which rank owns which part.

    numels: {name: its elements}, of all parameters. Notebook 07.
    """
    length = -(-sum(numels.values()) // world_size)
    whole = world_size * length
    padding, starts = whole - sum(numels.values()), dict(zip(numels, itertools.accumulate(numels.values(), initial=0), strict=False))
    left, width, top = 150, WIDEST - 150 - 20, 66
    canvas = Canvas(WIDEST, 240)
    scale = width / max(whole, 1)
    canvas.text(WIDEST / 2, 26, f"{count(whole, 'number')} in a row, {count(world_size, 'shard')}", LARGE, bold=True)
    canvas.text(left - 12, top + 26, "parameters", NORMAL, "right")
    canvas.text(left - 12, top + 86, "owned by", NORMAL, "right")
    canvas.box(left, top, width, 52, EMPTY, hatch="///")
    for name, start in starts.items():
        canvas.box(left + start * scale, top, numels[name] * scale, 52, figures.MIXED)
        if numels[name] * scale > 10.5 * len(name):
            canvas.text(left + (start + numels[name] / 2) * scale, top + 26, name)
    for rank in range(world_size):
        canvas.badge(left + rank * length * scale, top + 60, rank, length * scale, 52)
    canvas.box(left, top + 134, 30, 20, EMPTY, hatch="///")
    canvas.text(left + 42, top + 144, f"padding: {count(padding, 'number')}", align="left")
    said = [f"{name} from {start} to {start + numels[name]}" for name, start in starts.items()]
    return canvas.picture(
        f"A flat buffer of {count(whole, 'number')}: {', '.join(said)}; padding: {padding}. "
        f"Below, {count(world_size, 'shard')} of {length}, one for each rank."
    )


STATE_COLOURS = {"parameters": BLUE, "gradients": ORANGE, "optimizer": GREEN}


def zero_stages(
    parameters: int, world_size: int, stage: int, precision: str = "mixed", capacity_bytes: int = 80 * 10**9
) -> Picture:
    """The model states that a rank keeps in each of ZeRO's stages, to scale; one stage stands out.

    Arguments as for `memory.model_states`, with AdamW. capacity_bytes: of a GPU, a dashed line. Notebook 07.
    """
    states = [memory.model_states(parameters, each, world_size, precision=precision) for each in range(4)]
    left, width, top, row = 120, WIDEST - 120 - 130, 116, 58
    canvas = Canvas(WIDEST, top + 4 * row + 44)
    scale = width / max(states[0].total, capacity_bytes)
    canvas.text(WIDEST / 2, 26, f"Model states on each of {count(world_size, 'rank')}", LARGE, bold=True)
    for at, (name, fill) in enumerate(STATE_COLOURS.items()):
        canvas.box(left + 200 * at, 56, 30, 20, fill)
        canvas.text(left + 42 + 200 * at, 66, name, align="left")
    canvas.box(10, top + row * stage - 4, WIDEST - 20, row - 4, PALE, "black", 2.5)
    for number, kept in enumerate(states):
        x, y = left, top + row * number
        canvas.text(left - 12, y + 21, f"stage {number}", NORMAL, "right", bold=number == stage)
        for fill, nbytes in zip(STATE_COLOURS.values(), kept, strict=True):
            canvas.box(x, y + 4, nbytes * scale, 34, fill, line=0.8)
            x += nbytes * scale
        canvas.text(x + 12, y + 21, size(kept.total), NORMAL, "left", bold=number == stage)
    x, bottom = left + capacity_bytes * scale, top + 4 * row
    canvas.line([(x, top - 8), (x, bottom)], WRONG, 2.5, dashed=True)
    canvas.text(x, bottom + 20, f"a GPU of {size(capacity_bytes)}", NORMAL, ink=WRONG)
    totals = [f"stage {number} {size(kept.total)}" for number, kept in enumerate(states)]
    return canvas.picture(f"Model states on each of {count(world_size, 'rank')}: {', '.join(totals)}.")


# Numbers read and written


def trips(counts: Mapping[str, tuple[float, float]]) -> Picture:
    """What each way of computing the same thing moves between memory and the processor.

    counts: {name: (numbers read, numbers written)}, in multiples of N. Notebook 08.
    """
    left, top, row = 210, 76, 58
    canvas = Canvas(WIDEST, top + row * len(counts) + 10)
    scale = (WIDEST - left - 110) / max([1.0, *map(sum, counts.values())])
    for x, hatch, label in ((left, None, "read"), (left + 130, "///", "written")):
        canvas.box(x, 24, 30, 20, EMPTY if hatch else BLUE, hatch=hatch)
        canvas.text(x + 42, 34, label, align="left")
    for number, (name, (read, written)) in enumerate(counts.items()):
        y = top + row * number
        canvas.text(left - 14, y + 20, name, NORMAL, "right")
        canvas.box(left, y, read * scale, 40, BLUE)
        canvas.box(left + read * scale, y, written * scale, 40, EMPTY, hatch="///")
        canvas.text(left + (read + written) * scale + 12, y + 20, _times_n(read + written), NORMAL, "left", bold=True)
    said = [f"{name} reads {_times_n(read)}, writes {_times_n(written)}" for name, (read, written) in counts.items()]
    return canvas.picture(f"Numbers moved: {'; '.join(said)}.")


def _times_n(factor: float) -> str:
    return "N" if factor == 1 else f"{factor:g}N"


# A model and what was measured


def fitted(
    fit: cost.Fit, measured: Iterable[cost.Measurement], held_out: Iterable[cost.Measurement], title: str = ""
) -> Picture:
    """Times by size, both on logarithmic scales: what was measured, and the lines of the model.

    measured: what the model was fitted to; drawn full. held_out: what it has not seen; drawn hollow.
    title: says "emulated" where the times are those of an emulated link. Notebook 02.
    """
    measured, held_out = list(measured), list(held_out)
    title = title or "Measured and predicted time"
    curves = list(dict.fromkeys((each.algorithm, each.world_size) for each in measured + held_out))
    names = [f"{algorithm}, {world_size} ranks" for algorithm, world_size in curves]
    looks = list(zip(names, itertools.cycle(RANK_COLOURS), itertools.cycle(MARKERS)))
    canvas = Canvas(WIDEST, HEIGHT)
    axes = _axes(canvas, _head(canvas, title, _handles(looks), _kinds_of_points()))
    for curve, (_, ink, marker) in zip(curves, looks, strict=True):
        seen, unseen = ([each for each in points if each[:2] == curve] for points in (measured, held_out))
        _line(axes, fit.model, curve, _between(each.nbytes for each in seen + unseen), ink)
        _points(axes, seen, ink, ink, marker)
        _points(axes, unseen, ink, "white", marker)
    _log_axes(axes)
    axes.set_ylim(axes.get_ylim()[0] / 3)  # room for the note
    errors = [f"{100 * fit.error(points):.0f} %" for points in (measured, held_out)]
    note = (
        f"model: {fit.model}\nmedian error: {errors[0]} on the points it was fitted to,\n{errors[1]} on those held out"
    )
    axes.text(0.985, 0.04, note, transform=axes.transAxes, ha="right", fontsize=SMALL, linespacing=1.5, bbox=WHITE)
    return canvas.picture(
        f"{title}. Time by size for {'; '.join(names)}: {count(len(measured), 'point')} that the model was fitted to, "
        f"{len(held_out)} held out, and the model's lines."
    )


def _kinds_of_points() -> list:
    from matplotlib.lines import Line2D

    style = {"color": "black", "mec": "black", "mew": 2.5, "ms": 11, "lw": 2.5}
    return [
        Line2D([], [], marker="o", mfc="black", ls="none", label="fitted to", **style),
        Line2D([], [], marker="o", mfc="white", ls="none", label="held out", **style),
        Line2D([], [], label="model", **style),
    ]


def crossing(
    model: cost.Model,
    algorithms: Sequence[str],
    world_size: int,
    measured: Iterable[cost.Measurement] = (),
    title: str = "",
) -> Picture:
    """The time that the model gives each algorithm, by size, and from which size on another one is the fastest.

    measured: drawn as points, those of these algorithms and this `world_size`. title: as in `fitted`. Notebook 02.
    """
    title = title or f"Predicted time with {world_size} ranks"
    points = [each for each in measured if each.algorithm in algorithms and each.world_size == world_size]
    changes = takeovers(model, algorithms, world_size)
    turns = [nbytes for nbytes, _, _ in changes]
    sizes = _between(
        [1e3, 1e7, *(each.nbytes for each in points), *(nbytes * factor for nbytes in turns for factor in (1 / 30, 30))]
    )
    looks = list(zip(algorithms, _colours(algorithms).values(), itertools.cycle(MARKERS)))
    canvas = Canvas(WIDEST, HEIGHT)
    below = _head(canvas, title, _handles(looks))
    canvas.text(WIDEST / 2, below - 8, f"model: {model}" + "; points: measured" * bool(points))
    axes = _axes(canvas, below + LINE)
    for algorithm, ink, marker in looks:
        _line(axes, model, (algorithm, world_size), sizes, ink)
        _points(axes, [each for each in points if each.algorithm == algorithm], ink, ink, marker)
    for number, (nbytes, _, after) in enumerate(changes):
        axes.axvline(nbytes, color="black", lw=1.5, ls=(0, (3, 2)))
        seconds = model.seconds(after, nbytes, world_size)
        axes.plot([nbytes], [seconds], marker="o", ms=14, mfc="none", mec="black", mew=2.5, zorder=4)
        style = {"transform": axes.get_xaxis_transform(), "fontsize": SMALL, "linespacing": 1.4, "bbox": WHITE}
        axes.text(nbytes * 1.15, 0.04 + 0.16 * number, f"from {size(nbytes)} on:\n{after}", **style)
    _log_axes(axes)
    fastest = [before for _, before, _ in changes[:1]] + [after for _, _, after in changes]
    fastest = fastest or [_fastest(model, algorithms, world_size, sizes[0])]
    return canvas.picture(
        f"{title}. By size, for {', '.join(algorithms)}; "
        f"the fastest, from small sizes to large: {', then '.join(fastest)}."
    )


def takeovers(model: cost.Model, algorithms: Sequence[str], world_size: int) -> list[tuple[float, str, str]]:
    """(bytes, fastest up to there, fastest from there on), from small to large."""
    crossings = {cost.crossover(*pair, world_size, model) for pair in itertools.permutations(algorithms, 2)}
    found = []
    for nbytes in sorted(crossings - {None, 0.0}):
        before, after = (_fastest(model, algorithms, world_size, nbytes * factor) for factor in (0.999, 1.001))
        if before != after:
            found.append((nbytes, before, after))
    return found


def _fastest(model: cost.Model, algorithms: Sequence[str], world_size: int, nbytes: float) -> str:
    return min(algorithms, key=lambda algorithm: model.seconds(algorithm, nbytes, world_size))


# Drawing


def _head(canvas: Canvas, title: str, *legends: list) -> float:
    """Write the title and below it the legends, each on as many lines as it needs; return the pixel where they end."""
    canvas.text(canvas.width / 2, 26, title, LARGE, bold=True)
    y = 46
    for handles in legends:
        while handles:
            fits = next(n for n in range(len(handles), 0, -1) if n == 1 or _width(handles[:n]) < canvas.width)
            _legend(canvas, handles[:fits], y)
            handles, y = handles[fits:], y + LINE
    return y + 14


def _width(handles: list) -> float:
    """About how many pixels a line of a legend needs."""
    return sum(70 + 11 * len(handle.get_label()) for handle in handles)


def _legend(canvas: Canvas, handles: list, y: float):
    style = {"ncols": len(handles), "frameon": False, "borderaxespad": 0, "columnspacing": 1.6, "handlelength": 1.8}
    at = (0.5, 1 - y / canvas.height)
    canvas.figure.legend(handles=handles, loc="upper center", bbox_to_anchor=at, fontsize=SMALL, **style)


def _axes(canvas: Canvas, top: float, left: float = LEFT):
    """Axes on the canvas, from `top` pixels down and `left` pixels in, with sizes from left to right."""
    width, height = canvas.width, canvas.height
    axes = canvas.figure.add_axes(
        (left / width, BOTTOM / height, (width - left - RIGHT) / width, (height - top - BOTTOM) / height)
    )
    axes.tick_params(labelsize=SMALL)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.set_xlabel("size of the tensor", fontsize=NORMAL)
    return axes


def _handles(looks: Iterable[tuple[str, str, str]]) -> list:
    """Line and marker of each (name, colour, marker)."""
    from matplotlib.lines import Line2D

    return [Line2D([], [], color=ink, lw=2.5, marker=marker, ms=11, label=name) for name, ink, marker in looks]


def _line(axes, model: cost.Model, curve: tuple[str, int], sizes: Sequence[float], ink: str):
    algorithm, world_size = curve
    axes.plot(sizes, [model.seconds(algorithm, nbytes, world_size) for nbytes in sizes], color=ink, lw=2.5)


def _points(axes, points: Sequence[cost.Measurement], ink: str, fill: str, marker: str):
    x, y = [each.nbytes for each in points], [each.seconds for each in points]
    axes.plot(x, y, ls="none", marker=marker, ms=11, mfc=fill, mec=ink, mew=2.5, zorder=3)


def _between(sizes: Iterable[float]) -> list[float]:
    """A hundred sizes from the smallest to the largest, evenly spread on a logarithmic scale."""
    sizes = list(sizes)
    least, most = min(sizes), max(sizes)
    return [least * (most / least) ** (step / 99) for step in range(100)]


def _decades(ends: tuple[float, float]) -> tuple[float, float]:
    """The powers of ten around `ends`."""
    return 10.0 ** math.floor(math.log10(ends[0])), 10.0 ** math.ceil(math.log10(ends[1]))


def _log_axes(axes):
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda x, _: size(x))
    axes.yaxis.set_major_formatter(lambda y, _: _seconds(y))
    axes.minorticks_off()
    if axes.get_ylim()[1] < 100 * axes.get_ylim()[0]:  # else a short axis would have one number or none
        axes.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
    axes.set_ylabel("time", fontsize=NORMAL)
    axes.grid(color=FAINT, lw=0.6)


def _seconds(value: float) -> str:
    """10 µs, 1 ms."""
    unit, factor = next((each for each in TIMES if value >= 0.999 * each[1]), TIMES[-1])
    return f"{value / factor:.3g} {unit}"
