"""Draw notebook 12's charts, on FSDP, and make its widget that compares sending and computing."""

from collections.abc import Mapping

from ..cost import sending_over_computing
from ..tools.units import count, size
from . import page
from .page import Canvas, Picture, chart, colour, legend, patch, stroke
from .widgets import Calculator, Slider

# Rows


def rows_on_ranks(lengths: Mapping[str, int], world_size: int) -> Picture:
    """Draw the rows of some parameters in the colours of the ranks that keep them, and the padding.

    Each parameter is split separately: each rank keeps the next ⌈rows / world_size⌉ rows, and where
    rows run out, dashed boxes are padding. The alt text says how many rows of each parameter each
    rank has. Used in notebook 12.

    lengths: {name of the parameter: number of its rows, which is the length of its first axis}.
    world_size: the number of ranks.
    """
    longest = max(-(-length // world_size) * world_size for length in lengths.values())
    wide, tall = min(44, 760 / longest), 40
    canvas = Canvas(page.WIDEST, 74 * len(lengths) + 76)
    said = []
    for number, (name, length) in enumerate(lengths.items()):
        y = 24 + 74 * number
        canvas.text(16, y + 27, name, page.NORMAL, "left", bold=True)
        full = -(-length // world_size)
        counts = []
        for row in range(full * world_size):
            x = 170 + wide * row + 14 * (row // full)
            if row < length:
                canvas.box(x, y, wide - 2, tall, colour(row // full))
            else:
                canvas.box(x, y, wide - 2, tall, "none", page.GREY, dashed=True)
        for rank in range(world_size):
            counts.append(max(0, min(length, (rank + 1) * full) - rank * full))
        said.append(f"{name}, {count(length, 'row')}: {' + '.join(map(str, counts))}")
    for rank in range(world_size):
        canvas.badge(170 + 96 * rank, 74 * len(lengths) + 22, rank)
    return canvas.picture("Rows on each rank; dashed: padding.\n" + "\n".join(said))


# Units and the peak


def unit_peaks(peaks: Mapping[int, int], kept: int, unit_bytes: Mapping[int, int]) -> Picture:
    """Draw the peak memory of an FSDP step for several sizes of its units, with an upper bound.

    A unit is a group of layers whose weights are gathered and dropped together. Bars are the
    measured peaks. Black marks are the bound, kept + 3 · unit_bytes: what a rank always keeps, the
    whole weights of two units, since one is gathered before the last is dropped, and the gradients
    of one. It leaves out activations: measure with a small batch. The alt text states the peaks.
    Used in notebook 12.

    peaks: {layers in a unit: the most bytes of a rank's tensors at one time in a step}.
    kept: the bytes that a rank always keeps, which are its shards and their gradients.
    unit_bytes: {layers in a unit: bytes of the largest unit's weights}, with the keys of `peaks`.
    """
    title = "The most bytes at a time, by the size of a unit"
    figure, (axes,) = chart(title, 460)
    places = range(len(peaks))
    axes.bar(places, [kept] * len(peaks), color=colour(0), edgecolor="black", width=0.6)
    rest = [peak - kept for peak in peaks.values()]
    axes.bar(places, rest, bottom=kept, color=colour(1), edgecolor="black", width=0.6)
    bounds = [kept + 3 * unit_bytes[layers] for layers in peaks]
    axes.plot(places, bounds, color="black", lw=0, marker="_", ms=60, mew=3)
    for place, peak in zip(places, peaks.values(), strict=True):
        page.write_on(axes, place, kept + (peak - kept) / 2, size(peak), colour(1))
    axes.set_xticks(places, [count(layers, "layer") for layers in peaks])
    axes.set(ylabel="bytes", ylim=(0, 1.12 * max(*bounds, *peaks.values())))
    page.with_units(axes.yaxis, "B")
    marks = [patch("shards, their gradients", colour(0)), patch("whole for a moment", colour(1))]
    legend(figure, [*marks, stroke("at most: three units more", lw=3)])
    said = [f"{count(n, 'layer')} a unit: {size(peak)}" for n, peak in peaks.items()]
    return Picture(figure, f"{title}: {', '.join(said)}.")


# When is it worth it?

WIRES = {"NVLink 4": 370e9, "400 Gbit": 50e9, "100 Gbit": 11.7e9}
MARKERS = {
    "data parallel": "s",
    "ZeRO-1": "D",
    "FSDP": "o",
    "tensor": "^",
    "pipeline": "v",
    "ring": "P",
    "experts": "X",
}


def worth_calculator() -> Calculator:
    """Return a widget with sliders that compares the times of sending and of computing.

    Sliders set the sizes of a transformer, the number of ranks and the speed at which they compute.
    The picture shows the seconds of sending divided by those of computing, for each kind of
    parallelism, such as "FSDP" or "tensor", over NVLink, 400 Gbit and 100 Gbit. Below 1, sending
    takes less time. But only computing that goes on meanwhile can hide it, and the forward of
    tensor parallelism, for example, has none. Used in notebook 12.
    """
    return Calculator(
        worth,
        tokens=Slider(
            "tokens of a rank", [2**power for power in range(9, 18)], 8192, "{:,}".format
        ),
        width=Slider("width", [1024, 2048, 4096, 8192, 16384], 4096),
        world_size=Slider("ranks", [2, 4, 8, 16, 32, 64], 8),
        layers=Slider("layers of a stage", [1, 2, 4, 8, 16], 4),
        heads_per_kv=Slider("heads to a kv head", [1, 2, 4, 8, 16], 4),
        expert_width=Slider("width of an expert", [1024, 2048, 4096, 8192, 16384], 2048),
        tflops=Slider("TFLOP/s of a rank", [50, 100, 200, 400, 800], 400),
    )


def worth(
    tokens: int,
    width: int,
    world_size: int,
    layers: int,
    heads_per_kv: int,
    expert_width: int,
    tflops: int,
) -> tuple[str, Picture]:
    """Return (caption, chart) of a transformer's seconds of sending for each second of computing.

    The chart has a row for each network (a key of `WIRES`: NVLink 4, 400 Gbit, 100 Gbit), and in it
    a mark for each kind of parallelism, such as "FSDP" or "pipeline", at the ratio that
    `cost.sending_over_computing` predicts. Left of the dashed line, which is at 1, sending takes
    less time. The alt text states the ratios. `worth_calculator` calls this with the values of its
    sliders.

    tokens: the tokens of a rank's batch; for ring attention, those of one sequence on the rank.
    width: the model's width, which is how many numbers it has for each token.
    world_size: the number of ranks. layers: the number of layers in a pipeline stage.
    heads_per_kv: the number of query heads that share one head of keys and values.
    expert_width: the number of hidden features of an expert.
    tflops: a rank's speed, in 10^12 operations per second.
    """
    figure, (axes,) = chart("Sending, for a second of computing", 440)
    axes.axvline(1, color="black", lw=2.5, ls=page.DASHES)
    lines = []
    for place, (wire, bytes_per_s) in enumerate(WIRES.items()):
        sizes = tokens, width, world_size, layers, heads_per_kv, expert_width
        ratios = sending_over_computing(tflops * 1e12, bytes_per_s, *sizes)
        _draw_ratios(axes, place, ratios)
        told = [f"{name} {ratio:.2g}" for name, ratio in ratios.items() if name != "ZeRO-1"]
        lines.append(f"{wire}: {', '.join(told)}")
    axes.set_xscale("log")
    axes.set(ylim=(len(WIRES) - 0.5, -0.5), xlabel="seconds on the wire for a second of computing")
    axes.set_yticks(range(len(WIRES)), WIRES, fontsize=page.NORMAL)
    axes.grid(axis="x", color=page.FAINT, lw=0.6)
    fills = _fills()
    marks = [stroke(n, fills[n], marker=m, ms=13, lw=0) for n, m in MARKERS.items()]
    legend(figure, [*marks, stroke("as long as it computes", lw=2.5, ls=page.DASHES)])
    caption = (
        f"{count(world_size, 'rank')}, {tokens:,} tokens each, width {width}: left of the dashed "
        "line sending is shorter than computing."
    )
    return caption, Picture(figure, "\n".join([caption, *lines, "ZeRO-1: as data parallel"]))


def _fills() -> dict[str, str]:
    """Return {kind of parallelism: colour of its marks}, such as {"FSDP": "#009E73", ...}.

    The chart of sending and computing and its legend use these colours. The kinds are "data
    parallel", "ZeRO-1", "FSDP", "tensor", "pipeline", "ring" and "experts".
    """
    return {name: colour(number) for number, name in enumerate(MARKERS)}


def _draw_ratios(axes, place: int, ratios: Mapping[str, float]) -> None:
    """Draw a mark for each kind of parallelism, such as "FSDP", into row `place` of a chart.

    The row is that of one connection between ranks, such as NVLink 4. Each kind has a y of its own
    in the row, so that ZeRO-1 isn't hidden by data parallel, which has the same ratio.

    place: the row's number, from 0 at the top, which is also the y of its middle.
    ratios: {kind of parallelism: seconds of sending for a second of computing}.
    """
    fills = _fills()
    for number, (name, ratio) in enumerate(ratios.items()):
        y = place - 0.3 + 0.1 * number
        axes.plot([ratio], [y], MARKERS[name], color=fills[name], ms=13, mec="black")
