"""Charts of what was measured: times and bandwidths by size, and the line of a model beside them.

Their words name what is drawn and no number that was measured: those differ from run to run, and stand in the tables.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence

from .. import cost
from .figures import FAINT, LARGE, NORMAL, RANK_COLOURS, SMALL, WIDEST, Canvas, Picture, count, size

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
        took = step.median_s * 1e3
        axes.barh(place, min(took, compute_ms), 0.7, color=BLUE, ec="black")
        axes.barh(place, max(0.0, took - compute_ms), 0.7, compute_ms, color=ORANGE, ec="black")
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
