"""Draw, for notebook 11, matrix products split among ranks, and what tensor parallelism sends."""

from collections.abc import Sequence

from ..cost import volume
from ..runtime.link import Link
from ..tools.units import count, duration, size
from . import page
from .page import Canvas, Picture, chart, colour, legend, stroke
from .widgets import Calculator, Slider

# {name: how X, U and Y are split}. 0: by rows. 1: by columns. None: not at all. Only for Y, "sum":
# each rank has a summand of every number; "blocks": each rank has some of the numbers.
SPLITS = {
    "tokens": (0, None, 0),
    "outputs": (None, 1, 1),
    "inputs": (1, 0, "sum"),
    "tokens and outputs": (0, 1, "blocks"),
}
SAYS = {0: "rows", 1: "columns", None: "whole", "sum": "summands", "blocks": "blocks"}
BADGES = 6  # in a line, where the key fits behind the fifth


def split_products(tokens: int, inputs: int, outputs: int, world_size: int) -> Picture:
    """Draw a matrix product X·U = Y to scale, split among ranks in four ways. Used in notebook 11.

    The ways are by tokens, outputs, inputs, or tokens and outputs, each in `world_size` parts. For
    each way it shows which part of X and U a rank holds, and what of Y it can compute on its own:
    rows (tokens), columns (outputs), a summand of all of Y (inputs), or its block on the diagonal
    of Y (tokens and outputs).

    tokens, inputs, outputs: X has shape (tokens, inputs), and U has shape (inputs, outputs).
    world_size: the number of ranks, from 1 to 8. It need not divide the sizes: parts are drawn
        equal.
    """
    unit = 300 / (2 * inputs + outputs + outputs)
    high, wide = unit * max(tokens, inputs) + 96, page.WIDEST / 2
    canvas, said = Canvas(page.WIDEST, 2 * high + 66 + 46 * (world_size // BADGES)), []
    for number, (name, splits) in enumerate(SPLITS.items()):
        x, top = 24 + wide * (number % 2), 16 + high * (number // 2)
        canvas.text(x, top + 14, f"split by {name}", page.NORMAL, "left", bold=True)
        shapes = (tokens, inputs), (inputs, outputs), (tokens, outputs)
        for letter, shape, split in zip("XUY", shapes, splits, strict=True):
            tall, width = unit * shape[0], unit * shape[1]
            _matrix(canvas, x, top + 40, tall, width, split, world_size)
            below = _offsets(world_size)[1] * (world_size - 1) if split == "sum" else 0
            canvas.text(x + width / 2, top + 56 + tall + below, letter)
            x += width + 46
            if letter != "Y":
                sign = "·" if letter == "X" else "="
                canvas.text(x - 22, top + 40 + unit * inputs / 2, sign, page.LARGE, bold=True)
        parts = (f"{letter} {SAYS[split]}" for letter, split in zip("XUY", splits, strict=True))
        said.append(f"split by {name}: {', '.join(parts)}")
    for rank in range(world_size):
        line, place = divmod(rank, BADGES)
        canvas.badge(24 + 96 * place, 2 * high + 18 + 46 * line, rank)
    line, place = divmod(world_size, BADGES)
    x, y = 40 + 96 * place, 2 * high + 26 + 46 * line
    canvas.key(x, y, page.MIXED, "every rank has it whole")
    return canvas.picture("What a rank has, and what it gets by itself.\n" + "\n".join(said))


def _offsets(world_size: int) -> tuple[float, float]:
    """Return (right, down), the steps in pixels from one rank's summand of Y to the next one's.

    Each rank's summand of the product Y is a box in a stack. Each step is 12, or less if the last
    box would otherwise be more than 60 pixels to the right of the first, or 24 below the first.
    """
    others = max(1, world_size - 1)
    return min(12, 60 / others), min(12, 24 / others)


def _matrix(canvas: Canvas, x, y, tall, wide, split, world_size: int):
    """Draw a matrix as a box of the given size, each part in the colour of the rank that has it.

    x, y, tall, wide: the matrix's upper left corner and its size, in pixels.
    split: None if every rank has all of it: a grey box. 0 if its rows are divided among the ranks,
        1 if its columns are. "sum" if each rank has a summand of every number: a stack of boxes of
        the full size, each a little further right and down than the one before. "blocks" if each
        rank has one block on the diagonal, in a dashed frame of the full size.
    """
    if split is None:
        canvas.box(x, y, wide, tall, page.MIXED)
        return
    part_wide = wide / world_size if split in (1, "blocks") else wide
    part_tall = tall / world_size if split in (0, "blocks") else tall
    summands = _offsets(world_size)  # they overlap
    right = {"sum": summands[0], 0: 0}.get(split, part_wide)
    down = {"sum": summands[1], 1: 0}.get(split, part_tall)
    for rank in range(world_size):
        canvas.box(x + rank * right, y + rank * down, part_wide, part_tall, colour(rank))
    if split == "blocks":
        canvas.box(x, y, wide, tall, "none", page.GREY, dashed=True)


# Tensor or data parallel?

WEIGHTS = 12  # the weights of a layer, in units of width²: 4 of attention, 8 of its MLP
CALLS = 4  # all-reduces of a layer in forward and backward, each of tokens × width numbers
FLOPS_PER_S = 400e12  # of 16-bit products, in a good program on an H100
WIRES = {  # an H100's links inside its node and to other nodes, and an office's network
    "NVLink 4": Link.preset("NVLink 4"),
    "400 Gbit InfiniBand": Link(latency_s=3e-6, bytes_per_s=46.8e9),
    "10 Gbit Ethernet": Link.preset("10 Gbit Ethernet"),
}


def reduced_bytes(width: int, tokens: int) -> dict[str, int]:
    """Return the size of what a transformer layer all-reduces in a step, for two ways to split it.

    It is {"tensor parallel": bytes, "data parallel": bytes}, the size of the all-reduced tensors,
    with 2 bytes for each number. Tensor parallelism all-reduces tokens · width activations four
    times, twice in forward and twice in backward. Data parallelism all-reduces the gradients of 12
    width² weights (4 width² of attention, 8 width² of the MLP) once.

    width: the layer's width. tokens: the number of tokens in the whole batch.
    """
    activations, gradients = CALLS * tokens * width, WEIGHTS * width**2
    return {"tensor parallel": 2 * activations, "data parallel": 2 * gradients}


LOOKS = {"tensor parallel": (page.ORANGE, "o"), "data parallel": (page.BLUE, "s")}


def bytes_by_tokens(width: int, world_size: int, tokens: Sequence[int]) -> Picture:
    """Draw the bytes that a rank sends for a layer in a step, by the tokens of the whole batch.

    There is a curve for tensor and one for data parallelism. In a step tensor parallelism
    all-reduces tokens · width numbers of a transformer layer four times; data parallelism
    all-reduces the gradients of its 12 width² weights once. A number has 2 bytes. Each of W ranks
    sends 2(W − 1)/W times the bytes all-reduced, as in a ring. Used in notebook 11.

    width: the layer's width. world_size: the number of ranks.
    tokens: sizes of the whole batch, in tokens, along the x axis.
    """
    title = f"Sent by each of {count(world_size, 'rank')} for a layer of width {width}, in a step"
    figure, (axes,) = chart(title, 480)
    for name, (fill, marker) in LOOKS.items():
        wholes = [reduced_bytes(width, number)[name] for number in tokens]
        sent = [volume("ring_all_reduce", whole, world_size).in_turn for whole in wholes]
        axes.plot(tokens, sent, color=fill, lw=3, marker=marker, ms=10, label=name)
    even = WEIGHTS * width / CALLS
    axes.axvline(even, color="black", lw=2.5, ls=page.DASHES, label="as many tokens as 3 · width")
    page.by_tokens(axes, tokens)
    axes.set_xlabel("tokens of the whole batch")
    page.log_y(axes, "bytes sent", "B")
    legend(figure)
    return Picture(figure, f"{title}: both ways send the same at {even:,.0f} tokens.")


def tensor_calculator() -> Calculator:
    """Return a widget that compares what tensor and data parallelism send for a layer in a step.

    Sliders set the ranks, a transformer layer's width and the tokens of the whole batch. As
    `layer_times` predicts, the widget shows the bytes that a rank sends, the seconds that this
    takes on each of three networks, and the seconds for which the rank computes on an H100.
    """
    powers = [2**power for power in range(10, 23)]
    return Calculator(
        layer_times,
        world_size=Slider("ranks", [2, 4, 8, 16, 32, 64], 8),
        width=Slider("width", [1024, 2048, 4096, 8192, 16384], 8192),
        tokens=Slider("tokens", powers, 2**15, "{:,}".format),
    )


def layer_times(world_size: int, width: int, tokens: int) -> tuple[str, Picture]:
    """Return (caption, picture) of a layer's seconds on the wire, tensor or data parallel.

    In a step tensor parallelism all-reduces tokens · width numbers of a transformer layer four
    times; data parallelism all-reduces the gradients of its 12 width² weights once. A number has 2
    bytes. Times over NVLink, InfiniBand and Ethernet are predicted for ring all-reduces: the
    latency of 2(W − 1) hops each (W: `world_size`), plus the bytes that a rank sends divided by the
    bandwidth. A dashed line marks how long a rank computes at 400 TFLOP/s.

    world_size: the number of ranks. width: the layer's width. tokens: those of the whole batch.
    """
    wholes = reduced_bytes(width, tokens)
    computing = 6 * WEIGHTS * width**2 * tokens / world_size / FLOPS_PER_S
    figure, (axes,) = chart("A layer, forward and backward", 400)
    axes.axvline(computing, color="black", lw=2.5, ls=page.DASHES)
    lines = []
    for place, (wire, link) in enumerate(WIRES.items()):
        said = []
        for name, (fill, marker) in LOOKS.items():
            calls = CALLS if name == "tensor parallel" else 1
            seconds = calls * link.seconds("all_reduce", wholes[name] / calls, world_size)
            axes.plot([seconds], [place], marker, color=fill, ms=16, mec="black")
            said.append(f"{name} {duration(seconds)}")
        lines.append(f"{wire}: {', '.join(said)}")
    axes.set_xscale("log")
    axes.set(ylim=(len(WIRES) - 0.5, -0.5), xlabel="time on the wire")
    axes.set_yticks(range(len(WIRES)), list(WIRES), fontsize=page.NORMAL)
    page.with_units(axes.xaxis, "s")
    axes.grid(axis="x", color=page.FAINT, lw=0.6)
    marks = [stroke(name, fill, marker=mark, ms=13, lw=0) for name, (fill, mark) in LOOKS.items()]
    dashed = stroke("a rank computes, at 400 TFLOP/s", lw=2.5, ls=page.DASHES)
    legend(figure, [*marks, dashed])
    sent = {
        name: size(volume("ring_all_reduce", whole, world_size).in_turn)
        for name, whole in wholes.items()
    }
    caption = (
        f"{count(world_size, 'rank')}, width {width}, {tokens:,} tokens: each sends "
        f"{sent['tensor parallel']} tensor parallel, {sent['data parallel']} data parallel, and "
        f"computes for {duration(computing)}."
    )
    return caption, Picture(figure, "\n".join([caption, *lines]))
