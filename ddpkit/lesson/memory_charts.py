"""Draw charts of memory: live bytes in a step, growth with sequence length, what fits on a GPU.

Functions that draw return a `Picture`, a matplotlib figure with an alt text that says what it
shows; `training` returns (caption, `Picture`). Alt texts are stored in notebooks. They may state
numbers, since bytes follow from the sizes of tensors, which are the same on every machine.

A term (`ddpkit.memory.Term`) stands for one tensor that a transformer block keeps for backward. It
has a name, such as "input of GELU", the tensor's bytes, and a formula for them. The terms of a
whole block are what `ddpkit.memory.block_activations` returns.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from ..memory import (
    KINDS,
    PRECISIONS,
    Term,
    Timeline,
    block_activations,
    checkpointed_activations,
    coefficients,
    model_states,
)
from ..tools.units import size
from . import page
from .charts import GPU_BYTES, KIND_COLOURS, byte_bars
from .page import Canvas, Picture, chart, legend, patch, stroke
from .widgets import Calculator, Slider

PEAK = {"marker": "o", "ms": 13, "mfc": "none", "mec": "black", "mew": 2.5, "ls": ""}

# A step


def timelines(watched: Mapping[str, Timeline]) -> Picture:
    """Draw the live bytes after each operation of a training step, stacked by kind of memory.

    There is a chart for each run, one below the other, with shared scales. A circle marks the peak,
    and dashed lines the beginnings of forward, backward and other phases. The alt text states each
    peak and what is live there. Used in notebook 06.

    watched: {name of the run: its timeline, as from `with ddpkit.memory.watch(...) as timeline`}.
    """
    title = "Bytes alive during a step"
    used = [kind for timeline in watched.values() for kind in KINDS if any(timeline.by_kind[kind])]
    kinds = [kind for kind in KINDS if kind in used]
    height = min(page.TALLEST, 150 + 200 * len(watched))
    figure, panels = chart(title, height, len(watched), sharex=True, sharey=True)
    said = [f"{title}."]
    longest = max(len(timeline.ops) for timeline in watched.values())
    for axes, (name, timeline) in zip(panels, watched.items(), strict=True):
        entries = range(len(timeline.ops))
        amounts = [timeline.by_kind[kind] for kind in kinds]
        colours = [KIND_COLOURS[kind] for kind in kinds]
        areas = axes.stackplot(entries, amounts, colors=colours, ec="black", lw=0.6, step="post")
        for kind, area in zip(kinds, areas, strict=True):
            if kind == "other":  # so short-lived that only its edges would show
                area.set_linewidth(0)
        axes.plot([timeline.peak], [max(timeline.totals)], clip_on=False, **PEAK)
        _draw_marks(axes, timeline.marks, longest)
        axes.set_ylabel(name)
        said.append(_said_peak(name, timeline))
    panels[0].set_xlim(0, longest)
    panels[0].set_ylim(bottom=0)
    page.with_units(panels[0].yaxis, "B")
    panels[-1].set_xlabel("operations of the step, one after the other")
    handles = [patch(kind, KIND_COLOURS[kind]) for kind in kinds]
    legend(figure, [*handles, stroke("peak", **PEAK)])
    return Picture(figure, "\n".join(said))


def _draw_marks(axes, marks: Iterable[tuple[int, str]], longest: int):
    """Draw a dashed vertical line at each mark, with the mark's text above it.

    A text that would overlap the one before is moved right.
    marks: (index of an operation, text), in order. longest: the length of the x axis, in
        operations, from which the width of a text is estimated.
    """
    letter, free = longest / 80, 0.0
    for entry, text in marks:
        axes.axvline(entry, color="black", lw=1.5, ls=page.DASHES)
        place = max(entry, free)
        free = place + letter * (len(text) + 1)
        style = {"transform": axes.get_xaxis_transform(), "fontsize": page.SMALL}
        axes.text(place, 1.03, text, **style)


def _said_peak(name: str, timeline: Timeline) -> str:
    """Return in words how high a timeline's peak is, in which phase, and what is live there.

    For example "flat: at most 65 MB in backward: parameters 7 MB, activations 58 MB." If the peak
    comes before the first phase begins, no phase is named.

    name: the name of the run, here "flat".
    timeline: the live bytes after each operation of a training step, by kind of memory, and the
        operations with which its phases begin, such as "forward" and "backward".
    """
    before = [text for entry, text in timeline.marks if entry <= timeline.peak]
    where = f" in {before[-1]}" if before else ""
    there = timeline.at(timeline.peak)
    parts = ", ".join(f"{kind} {size(nbytes)}" for kind, nbytes in there.items() if nbytes)
    return f"{name}: at most {size(max(timeline.totals))}{where}: {parts}."


# A block, with a stamp for everything that it keeps for backward

# The operations of a block's two halves. After each stand two digits: 1 if its input is kept for
# backward, and 1 if it keeps something else.
HALVES = (
    "norm 11, qkv 10, softmax 10, dropout 11, × values 10, out 10, dropout 01",
    "norm 11, first 10, GELU 10, second 10, dropout 01",
)


def stamped_block(terms: Sequence[Term] = ()) -> Picture:
    """Draw a transformer block as two rows of operations, and stamp the tensors that it keeps.

    A stamp is a box for a tensor that is kept for backward. On it is a formula of the tensor's
    bytes, such as "2sbd": b sequences of s tokens, each of d numbers of 2 bytes. The alt text lists
    the tensors and formulas, then their sum, or without `terms` the operations. Notebook 06.

    terms: the kept tensors, as `ddpkit.memory.block_activations` returns them with dropout and
        attention="materialised"; (): no stamps. The drawing has 15 places, filled in order, so the
        tensors of other settings, such as flash attention, would be at wrong places.
    """
    step, wide, high = 117, 92, 40
    canvas, stamps, names = Canvas(7 * step + 141, 420), iter(terms), []
    if terms:
        canvas.key(20, 14, page.ORANGE, "kept for backward")

    def stamp(x, y):
        term = next(stamps, None)
        if term:
            canvas.box(x - 34, y - 13, 68, 26, page.ORANGE, round=6)
            canvas.text(x, y, term.formula)

    for row, operations in enumerate(HALVES):
        y = 120 + 190 * row
        for at, operation in enumerate(operations.split(", ")):
            x, (name, kept) = 64 + step * at, operation.rsplit(" ", 1)
            names.append(name)
            canvas.arrow((x - step + wide if at else 20, y), (x, y), line=2)
            canvas.box(x, y - high / 2, wide, high, page.SKY, round=6)
            canvas.text(x + wide / 2, y, name)
            if kept[0] == "1":
                stamp(x - 18, y - 42)
            if kept[1] == "1":
                stamp(x + wide / 2, y + 42)
        end = x + wide + 40
        canvas.arrow((x + wide, y), (end, y), line=2)
        canvas.line([(30, y), (30, y + 68), (end + 16, y + 68)], page.GREY)
        canvas.arrow((end + 16, y + 68), (end + 16, y + 16), page.GREY, line=2)
        canvas.box(end, y - 16, 32, 32, round=16)
        canvas.text(end + 16, y, "+", bold=True)
    if not terms:
        return canvas.picture(f"A block: {', '.join(names)}.")
    said = [f"{term.formula:>6}  {term.name}" for term in terms]
    total = " + ".join(f"{times}{unit}" for unit, times in coefficients(terms).items())
    return canvas.picture("\n".join(["What a block keeps, in the order of forward:", *said, total]))


def heaps(rows: Mapping[str, str]) -> Picture:
    """Draw memory as rows of boxes, to show the gaps that freed tensors leave between others.

    rows: {name of a row: its units of memory}, for example {"activations gone": "..aa"}. Each
        character is a unit, drawn as a box. "." is a free one, and white. Any other is written on
        its box, and names the tensor that has the unit: "aabb" are two tensors of two units each.
        Capital letters are blue, all others orange, to distinguish two kinds of tensors.

    The alt text repeats the rows.
    """
    fills = {True: page.SKY, False: page.ORANGE}
    canvas = Canvas(266 + 28 * max(map(len, rows.values())), 20 + 60 * len(rows))
    for at, (name, row) in enumerate(rows.items()):
        canvas.text(12, 38 + 60 * at, name, align="left")
        for place, letter in enumerate(row):
            fill = page.EMPTY if letter == "." else fills[letter.isupper()]
            canvas.box(256 + 28 * place, 20 + 60 * at, 28, 36, fill)
            canvas.text(270 + 28 * place, 38 + 60 * at, letter.strip("."))
    return canvas.picture("\n".join(f"{row}  {name}" for name, row in rows.items()))


# Growth with the length


def growth(terms_of: Callable[[int], list[Term]], lengths: Sequence[int]) -> Picture:
    """Draw the attention weights' share of the bytes that a block keeps for backward, by length.

    Attention weights are the output of softmax, length × length numbers for each head, with the
    mask and the result of their dropout. Shares are in percent. The alt text states the shares at
    the first and the last length. Used in notebook 06.

    terms_of: function from a length in tokens to the list of terms (kept tensors with their bytes)
        that `ddpkit.memory.block_activations` returns for it.
    lengths: sequence lengths in tokens, in ascending order.
    """
    title = "Share of what a block keeps, by length"
    totals = [total(terms_of(length)) for length in lengths]
    weights = [total(attention_weights(terms_of(length))) for length in lengths]
    shares = [part / whole for part, whole in zip(weights, totals, strict=True)]
    colours = {"everything else": page.SKY, "attention weights": page.ORANGE}
    figure, (axes,) = chart(title, 520)
    areas = [[100 - 100 * share for share in shares], [100 * share for share in shares]]
    axes.stackplot(lengths, areas, colors=colours.values(), ec="black", lw=0.8)
    axes.axhline(50, color="black", lw=1.5, ls=page.DASHES)
    page.by_tokens(axes, lengths)
    axes.set(xlim=(lengths[0], lengths[-1]), ylim=(0, 100), ylabel="share of the bytes (%)")
    legend(figure, [patch(*pair) for pair in colours.items()])
    said = [f"{title}."]
    for at in (0, -1):
        whole = f"{lengths[at]:,} tokens, {size(totals[at])}"
        said.append(f"{whole}: attention weights {shares[at]:.0%}.")
    return Picture(figure, "\n".join(said))


def attention_weights(terms: Iterable[Term]) -> list[Term]:
    """Return the terms of the attention weights, the output of softmax, found by their names.

    Dropout adds its mask and its result. Flash attention has the log-sum-exp's term instead.
    terms: what `ddpkit.memory.block_activations` returns.
    """
    names = re.compile("weights|their dropout|log-sum-exp")
    return [term for term in terms if names.search(term.name)]


# Room on a GPU

VOCABULARY = 50_257  # GPT-2's
WAYS = ("everything kept", "selective", "every block")


def memory_calculator() -> Calculator:
    """Return a widget that draws the memory of a GPT at the peak of a training step.

    Sliders set the sizes of the GPT and the batch. The widget shows what `training` returns: the
    bytes without and with activation checkpoints, beside a GPU's memory. Used in notebook 06.
    """
    widths = [768, 1024, 1600, 2048, 3584, 4096, 5120, 8192, 16384]
    powers = [2**power for power in range(18)]
    return Calculator(
        training,
        width=Slider("width", widths, 3584),
        head_width=Slider("width of a head", [64, 128, 256], 128),
        layers=Slider("layers", [6, 12, 24, 28, 32, 48, 64, 80, 126], 28),
        batch=Slider("batch", powers[:8], 1),
        length=Slider("length", powers[8:], 4096),
        precision=Slider("precision", list(PRECISIONS), "mixed"),
        attention=Slider("attention", ["materialised", "flash"], "materialised"),
        dropout=Slider("dropout", [False, True], True),
    )


def training(width: int, head_width: int, layers: int, **batch) -> tuple[str, Picture]:
    """Return (caption, bar chart) of a GPT's memory at the peak of a training step.

    The memory is that of parameters, gradients, AdamW's state and activations; the vocabulary has
    50,257 tokens. There is a bar for each way to keep activations: all, selective checkpoints, or
    one for every block. The caption says which fit on a GPU with 80 GB. For `memory_calculator`.

    width, head_width: how many numbers a token has, in all and in each attention head.
    layers: the number of transformer blocks.
    batch: five keyword arguments, all required: `batch`, the number of sequences; `length`, the
        tokens in each; `precision`, "fp32", "bf16", "mixed" (parameters and gradients of 16 bits,
        with an fp32 copy of the parameters) or "mixed, fp32 gradients"; `attention`, "materialised"
        or "flash"; `dropout`, a bool, not a rate.
    ValueError: `head_width` doesn't divide `width`, a batch or length is below 1, or there is no
        such attention. KeyError: there is no such precision.
    """
    if width % head_width:
        got = f"expected heads that divide the width {width}, got {head_width}"
        raise ValueError(f"{got}: choose other heads")
    rows = training_bytes(width, width // head_width, layers, **batch)
    totals = {way: sum(row.values()) for way, row in rows.items()}
    fits = [way for way, total in totals.items() if total <= GPU_BYTES]
    billions = gpt_parameters(width, layers) / 1e9
    kept, selective, every = (size(totals[way]) for way in WAYS)
    caption = (
        f"{billions:.3g} billion parameters. Everything kept: {kept}; selective checkpoints: "
        f"{selective}; every block a checkpoint: {every}. "
        f"On a GPU of {size(GPU_BYTES)} {'fit' if len(fits) > 1 else 'fits'}: "
        f"{', '.join(fits) or 'none of them'}."
    )
    return caption, byte_bars(rows, "The peak of a training step")


def gpt_parameters(width: int, layers: int) -> int:
    """Count the trainable parameters of a `ddpkit.models.GPT` with a vocabulary of 50,257 tokens.

    width: how many numbers a token has. layers: the number of transformer blocks.
    """
    return layers * (12 * width**2 + 10 * width) + VOCABULARY * width + 2 * width


def training_bytes(
    width: int,
    heads: int,
    layers: int,
    batch: int,
    length: int,
    precision: str,
    attention: str,
    dropout: bool,
) -> dict[str, dict[str, int]]:
    """Return {way: {kind of memory: bytes}} of a GPT with AdamW at the peak of a training step.

    The way "everything kept" keeps all activations for backward. The others use activation
    checkpointing: "every block" keeps only each block's input, "selective" also the results of its
    linear layers, and backward computes the rest again. The kinds are "parameters", "gradients",
    "optimizer" and "activations".

    The peak is where backward begins or, if higher, where a block has been computed again. The
    gradients of all parameters count, as if earlier micro-batches of the step had left them there
    (gradient accumulation). Short-lived tensors are left out.

    width: how many numbers a token has. heads, layers: how many attention heads and blocks.
    batch, length: the sequences in a batch, and the tokens in a sequence.
    precision: "fp32" or "bf16", for parameters, gradients and optimizer alike; "mixed", with
        parameters and gradients of 16 bits, and an optimizer in fp32 that also has an fp32 copy of
        the parameters; or "mixed, fp32 gradients". Activations have the format of the parameters,
        but the loss keeps 4 bytes for each token and each of the vocabulary's 50,257 tokens.
    attention: "materialised" or "flash". dropout: whether there is dropout, whose masks are kept.
    """
    itemsize, tokens = PRECISIONS[precision].parameters, batch * length
    states = model_states(gpt_parameters(width, layers), precision=precision)._asdict()
    sizes = batch, length, width
    terms = block_activations(*sizes, heads, itemsize, dropout, attention)
    kept = {term.name: term.nbytes for term in terms}
    block = total(terms)
    there = kept["input of the norm before attention"]
    products = kept["queries, keys and values"] + kept["input of GELU"]
    selective = total(checkpointed_activations(*sizes, itemsize, selective=True))
    whole = total(checkpointed_activations(*sizes, itemsize))
    # For each token the last norm keeps its input and two numbers, the head its input, the loss the
    # logarithm of every probability.
    head = tokens * (2 * width * itemsize + 8 + 4 * VOCABULARY)
    mask = bool(dropout) * tokens * width  # of dropout after the embeddings, a byte for each number
    activations = (
        layers * block + head,
        layers * selective + max(head, block - there - products),
        layers * whole + max(head, block - there),
    )
    rows = [states | {"activations": nbytes + mask} for nbytes in activations]
    return dict(zip(WAYS, rows, strict=True))


def total(terms: Iterable[Term]) -> int:
    """Return the bytes of all the terms' tensors together; 0 if there are no terms."""
    return sum(term.nbytes for term in terms)
