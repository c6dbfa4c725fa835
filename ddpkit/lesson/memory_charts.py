"""Charts of bytes: what is alive when in a step, what grows with the length of a sequence, what fits; a calculator.

Nothing here depends on the machine, so their words hold the numbers that they show.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from ..tools.memory import (
    KINDS,
    PRECISIONS,
    Term,
    Timeline,
    block_activations,
    checkpointed_activations,
    model_states,
)
from .calculator import Calculator, Slider, Toggle, calculator
from .charts import BLUE, GREEN, LEFT, LINE, ORANGE, PINK, SKY, WHITE, _axes, _head, _width
from .figures import MIXED, NORMAL, SMALL, WIDEST, Canvas, Picture, size

COLOURS = dict(zip(KINDS, (BLUE, ORANGE, GREEN, PINK, SKY, MIXED), strict=True))
PEAK = {"marker": "o", "ms": 13, "mfc": "none", "mec": "black", "mew": 2.5, "ls": ""}
HATCHES = {"gradients": "//", "optimizer": "xx", "buckets": ".."}
PANEL = 246  # pixels from one timeline to the next


def _patches(names: Iterable[str]) -> list:
    from matplotlib.patches import Patch

    return [Patch(fc=COLOURS[name], ec="black", hatch=HATCHES.get(name), label=name) for name in names]


# A step


def _peak() -> list:
    from matplotlib.lines import Line2D

    return [Line2D([], [], label="peak", **PEAK)]


def timelines(watched: Mapping[str, Timeline], title: str = "Bytes alive during a step") -> Picture:
    """What was alive after each operation, by kind, one above the other on the same scales.

    watched: {name: as `ddpkit.memory.watch` gives it}. A circle: the peak. Dashed: marks. Notebook 06.
    """
    kinds = [kind for kind in KINDS if any(any(each.by_kind[kind]) for each in watched.values())]
    legend = _patches(kinds) + _peak()
    canvas = Canvas(WIDEST, 46 + (1 + (_width(legend) >= WIDEST)) * LINE + 14 + PANEL * len(watched) + 54)
    top = _head(canvas, title, legend)
    most = max(max(each.totals) for each in watched.values())
    longest = max(len(each.ops) for each in watched.values())
    for number, (name, each) in enumerate(watched.items()):
        axes = _panel(canvas, top + 66 + PANEL * number)
        axes.set(xlim=(0, longest), ylim=(0, 1.12 * most))
        axes.tick_params(labelbottom=number == len(watched) - 1)
        _draw_timeline(axes, each, kinds)
        canvas.text(LEFT, top + 14 + PANEL * number, name, NORMAL, "left", bold=True)
    canvas.text(WIDEST / 2, canvas.height - 24, "operations of the step, one after the other", NORMAL)
    return canvas.picture("\n".join([f"{title}.", *(_said_peak(name, each) for name, each in watched.items())]))


def _panel(canvas: Canvas, top: float):
    width, height = canvas.width - LEFT - 24, PANEL - 82
    axes = canvas.figure.add_axes(
        (LEFT / canvas.width, 1 - (top + height) / canvas.height, width / canvas.width, height / canvas.height)
    )
    axes.tick_params(labelsize=SMALL)
    axes.spines[["top", "right"]].set_visible(False)
    axes.yaxis.set_major_formatter(lambda y, _: size(y) if y else "0")
    axes.yaxis.get_major_locator().set_params(nbins=4)
    return axes


def _draw_timeline(axes, timeline: Timeline, kinds: Sequence[str]):
    entries, lower = range(len(timeline.ops)), [0] * len(timeline.ops)
    for kind in kinds:
        upper = [below + nbytes for below, nbytes in zip(lower, timeline.by_kind[kind], strict=True)]
        # What comes and goes is so thin that its edges would be all there is of it.
        lw = 0 if kind == "other" else 0.6
        style = {"fc": COLOURS[kind], "ec": "black", "lw": lw, "hatch": HATCHES.get(kind), "step": "post"}
        axes.fill_between(entries, lower, upper, **style)
        lower = upper
    axes.plot([timeline.peak], [max(lower)], clip_on=False, **PEAK)
    longest = axes.get_xlim()[1]
    for entry, _ in timeline.marks:
        axes.axvline(entry, color="black", lw=1.5, ls=(0, (3, 2)))
    letter = longest / 80
    for entry, text in _joined(timeline.marks, letter):
        place = (longest, "right") if entry + letter * len(text) > longest else (entry, "left")
        axes.text(place[0], 1.03, text, transform=axes.get_xaxis_transform(), fontsize=SMALL, ha=place[1])


def _joined(marks: Iterable[tuple[int, str]], letter: float) -> list[tuple[int, str]]:
    """What has no room behind the one before is written beside it. letter: how many entries one is wide."""
    found: list[tuple[int, str]] = []
    for entry, text in marks:
        if found and entry - found[-1][0] < letter * (len(found[-1][1]) + len(text)):
            entry, text = found[-1][0], f"{found.pop()[1]}, {text}"
        found.append((entry, text))
    return found


def _said_peak(name: str, timeline: Timeline) -> str:
    """Where it is, and what is alive there."""
    where = [f" in {text}" for entry, text in timeline.marks if entry <= timeline.peak][-1:]
    parts = [f"{kind} {size(nbytes)}" for kind, nbytes in timeline.at(timeline.peak).items() if nbytes]
    return f"{name}: at most {size(max(timeline.totals))}{''.join(where)}: {', '.join(parts)}."


# What grows with the length

PARTS = {  # of a block, by words of its terms' names, the first that fits
    "weights": "attention weights",
    "their dropout": "attention weights",
    "log-sum-exp": "attention weights",
    "mask of dropout": "masks of dropout",
    "norm": "norms",
    "deviation": "norms",
    "MLP": "MLP",
    "GELU": "MLP",
    "": "queries, keys, values, inputs of their layers",
}
PART_COLOURS = dict(zip(dict.fromkeys(PARTS.values()), (ORANGE, PINK, MIXED, SKY, BLUE), strict=True))


def parts(terms: Iterable[Term]) -> dict[str, int]:
    """{part of the block: bytes}."""
    found = dict.fromkeys(reversed(PART_COLOURS), 0)
    for term in terms:
        found[next(part for words, part in PARTS.items() if words in term.name)] += term.nbytes
    return found


def growth(
    terms_of: Callable[[int], list[Term]], lengths: Sequence[int], title: str = "Share of what a block keeps, by length"
) -> Picture:
    """The share of each part of a block in what it keeps, by the length of the sequences.

    terms_of(length): as `ddpkit.memory.block_activations` gives them. Notebook 06.
    """
    from matplotlib.patches import Patch

    by_length = [parts(terms_of(length)) for length in lengths]
    names = [name for name in by_length[0] if any(each[name] for each in by_length)]
    legend = [Patch(fc=PART_COLOURS[name], ec="black", label=name) for name in names]
    canvas = Canvas(WIDEST, 520)
    axes = _axes(canvas, _head(canvas, title, legend))
    shares = [[100 * each[name] / sum(each.values()) for each in by_length] for name in names]
    colours = [PART_COLOURS[name] for name in names]
    left, bottom, width, height = axes.get_position().bounds
    axes.set_position((left, bottom, width - 0.03, height))  # room for half of the last number
    axes.stackplot(lengths, shares, colors=colours, edgecolor="black", lw=0.8)
    axes.set_xscale("log", base=2)
    axes.set(xlim=(lengths[0], lengths[-1]), ylim=(0, 100))
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.minorticks_off()
    axes.set_xlabel("length of the sequence (tokens)", fontsize=NORMAL)
    axes.set_ylabel("share of the bytes (%)", fontsize=NORMAL)
    ends = (lengths[0], by_length[0]), (lengths[-1], by_length[-1])
    return canvas.picture("\n".join([f"{title}.", *(_said_shares(*end) for end in ends)]))


def _said_shares(length: int, by_part: Mapping[str, int]) -> str:
    total = sum(by_part.values())
    shares = [f"{name} {nbytes / total:.0%}" for name, nbytes in by_part.items() if nbytes]
    return f"{length:,} tokens, {size(total)}: {'; '.join(shares)}."


# What fits

NUMBER_WIDTH = 0.12  # of the longest bar


def bars(rows: Mapping[str, Mapping[str, int]], capacity_bytes: int | None = None, title: str = "") -> Picture:
    """Bytes by kind, a bar for each row, the total behind it; dashed: what a GPU has.

    rows: {name: {kind of `ddpkit.memory.KINDS`: bytes}}. Notebook 06.
    """
    kinds = [kind for kind in KINDS if any(row.get(kind) for row in rows.values())]
    canvas = Canvas(WIDEST, 46 + LINE + 14 + 64 * len(rows) + 80)
    axes = _axes(canvas, _head(canvas, title, _patches(kinds)), left=40 + 10.5 * max(map(len, rows)))
    most = max([sum(row.values()) for row in rows.values()] + [capacity_bytes or 0])
    for place, row in enumerate(rows.values()):
        left = 0
        for kind in kinds:
            style = {"color": COLOURS[kind], "hatch": HATCHES.get(kind), "ec": "black"}
            axes.barh(place, row.get(kind, 0), 0.66, left, **style)
            left += row.get(kind, 0)
        axes.text(_number_at(left, most, capacity_bytes), place, size(left), fontsize=SMALL, va="center", bbox=WHITE)
    if capacity_bytes:
        axes.axvline(capacity_bytes, color="black", lw=2.5, ls=(0, (3, 2)))
    axes.set_xlim(0, 1.16 * most)
    at = axes.get_position()
    axes.set_position((at.x0, at.y0, at.width - 0.03, at.height))  # room for half of the last number
    axes.xaxis.set_major_formatter(lambda x, _: size(x) if x else "0")
    axes.xaxis.get_major_locator().set_params(nbins=6)
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlabel(f"bytes; dashed: {size(capacity_bytes)}" if capacity_bytes else "bytes", fontsize=NORMAL)
    return canvas.picture("\n".join([f"{title}.", *(_said_row(name, row) for name, row in rows.items())]))


def _number_at(end: float, most: float, capacity_bytes: int | None) -> float:
    """Where the number behind a bar begins: not on the dashed line."""
    number = end + 0.012 * most
    if capacity_bytes and end <= capacity_bytes < number + NUMBER_WIDTH * most:
        return capacity_bytes + 0.02 * most
    return number


def _said_row(name: str, row: Mapping[str, int]) -> str:
    return f"{name}: {size(sum(row.values()))} ({', '.join(f'{kind} {size(n)}' for kind, n in row.items() if n)})."


# The calculator

VOCABULARY = 50_257  # GPT-2's
CAPACITY_BYTES = 80 * 10**9
WAYS = ("everything kept", "selective", "every block")


def memory_calculator() -> Calculator:
    """A GPT of any shape: the bytes of its training, without checkpointing and with two kinds of it. Notebook 06."""
    powers = [2**power for power in range(18)]
    return calculator(
        training,
        width=Slider("width", [768, 1024, 1600, 2048, 3584, 4096, 5120, 8192, 16384], 3584),
        head_width=Slider("width of a head", [64, 128, 256], 128),
        layers=Slider("layers", [6, 12, 24, 28, 32, 48, 64, 80, 126], 28),
        batch=Slider("batch", powers[:8], 1),
        length=Slider("length", powers[8:], 4096),
        precision=Slider("precision", list(PRECISIONS), "mixed"),
        attention=Slider("attention", ["materialised", "flash"], "materialised"),
        dropout=Toggle("dropout", True),
    )


def training(width: int, head_width: int, layers: int, **batch) -> tuple[str, Picture]:
    """Caption and picture of `memory_calculator`. ValueError: a head is wider than the model, or doesn't divide it."""
    if width % head_width:
        raise ValueError(f"expected heads that divide the width {width}, got {head_width}: choose other heads")
    rows = training_bytes(width, width // head_width, layers, **batch)
    totals = {way: sum(row.values()) for way, row in rows.items()}
    fits = [way for way, total in totals.items() if total <= CAPACITY_BYTES]
    billions = gpt_parameters(width, layers) / 1e9
    caption = (
        f"{billions:.3g} billion parameters. Everything kept: {size(totals[WAYS[0]])}; selective checkpoints: "
        f"{size(totals[WAYS[1]])}; every block a checkpoint: {size(totals[WAYS[2]])}. "
        f"On a GPU of {size(CAPACITY_BYTES)} fit{'s' * (len(fits) < 2)}: {', '.join(fits) or 'none of them'}."
    )
    return caption, bars(rows, CAPACITY_BYTES, "The peak of a training step")


def gpt_parameters(width: int, layers: int) -> int:
    """What `ddpkit.models.GPT` trains, with GPT-2's vocabulary."""
    return layers * (12 * width**2 + 10 * width) + VOCABULARY * width + 2 * width


def training_bytes(
    width: int, heads: int, layers: int, batch: int, length: int, precision: str, attention: str, dropout: bool
) -> dict[str, dict[str, int]]:
    """{way of `WAYS`: {kind: bytes}} of `ddpkit.models.GPT` with AdamW at the peak of a step.

    That is where backward begins, or, with checkpoints, where a block has been computed again. All gradients are taken
    to be there, as they are from the second micro-batch on. Left out is what comes and goes.
    """
    itemsize = PRECISIONS[precision].parameter
    states = model_states(gpt_parameters(width, layers), precision=precision)._asdict()
    block = block_activations(
        batch, length, width, heads, itemsize, dropout=dropout, attention=attention, attention_dropout=dropout
    )
    kept = {term.name: term.nbytes for term in block}
    there = kept["input of the norm before attention"]
    products = kept["queries, keys and values"] + kept["input of GELU"]
    sizes = batch, length, width, itemsize
    selective, whole = (_total(checkpointed_activations(*sizes, selective=each)) for each in (True, False))
    tokens = batch * length
    # The last norm keeps its input and two numbers a token, the head its input, and the loss the log of each chance.
    head = tokens * (2 * width * itemsize + 8 + 4 * VOCABULARY)
    mask = dropout * tokens * width  # of the embeddings
    activations = {
        WAYS[0]: layers * _total(block) + head,
        WAYS[1]: layers * selective + max(head, _total(block) - there - products),
        WAYS[2]: layers * whole + max(head, _total(block) - there),
    }
    return {way: states | {"activations": nbytes + mask} for way, nbytes in activations.items()}


def _total(terms: Iterable[Term]) -> int:
    return sum(term.nbytes for term in terms)
