"""Charts of notebook 05: training curves, a loss scale over time, and where gradients lie among the numbers of fp16.

Their words name what is drawn and no number that was measured.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..tools.floats import FP16
from .calculator import Calculator, Slider, calculator
from .charts import HEIGHT, LEFT, _axes, _head
from .figures import FAINT, LARGE, NORMAL, RANK_COLOURS, WIDEST, WRONG, Canvas, Picture

ORANGE, GREEN = RANK_COLOURS[1:3]
STYLES = ("-", (0, (5, 2)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
EVERY = 10  # steps whose mean is a point


# Training curves


def loss_curves(curves: Mapping[str, Sequence[float]], title: str = "Loss while training") -> Picture:
    """The losses of several trainings, by step, each point the mean of ten steps; a curve ends at its first NaN.

    curves: in bits per byte. ValueError: no curve, or one of less than ten steps. Notebook 05.
    """
    short = [name for name, losses in curves.items() if len(losses) < EVERY]
    if short or not curves:
        raise ValueError(f"expected losses of {EVERY} steps or more, got fewer of {', '.join(short) or 'nothing'}")
    from matplotlib.lines import Line2D

    canvas = Canvas(WIDEST, HEIGHT)
    # Later curves are thinner, so that one that lies upon another leaves it visible.
    looks = dict(zip(curves, zip(RANK_COLOURS * 9, STYLES * 9, (8, 5, 4, *[3] * 30), strict=False), strict=False))
    legend = [Line2D([], [], color=ink, ls=line, lw=lw, label=name) for name, (ink, line, lw) in looks.items()]
    axes = _axes(canvas, _head(canvas, title, legend), left=LEFT)
    for name, losses in curves.items():
        (ink, line, lw), points = looks[name], means(losses)
        axes.plot([EVERY * (at + 1) for at in range(len(points))], points, color=ink, ls=line, lw=lw)
    axes.set_xlabel("step", fontsize=NORMAL)
    axes.set_ylabel("bits per byte", fontsize=NORMAL)
    axes.grid(color=FAINT, lw=0.6)
    return canvas.picture(f"{title}: {'; '.join(curves)}. By step, each point the mean of {EVERY}.")


def means(losses: Sequence[float]) -> list[float]:
    """Of each ten steps; the last may be of up to nineteen."""
    count = len(losses) // EVERY
    parts = [losses[EVERY * at : EVERY * (at + 1) if at < count - 1 else None] for at in range(count)]
    return [sum(part) / len(part) for part in parts]


# A loss scale over time


def scale_steps(powers: Sequence[int], static: int = 16) -> Picture:
    """The power of two that a dynamic scale had in each step, beside a static one. Notebook 05."""
    from matplotlib.lines import Line2D

    canvas = Canvas(WIDEST, HEIGHT)
    title = "The loss scale, step by step"
    looks = {"dynamic": (RANK_COLOURS[0], "-"), "static": (ORANGE, STYLES[1])}
    legend = [Line2D([], [], color=ink, ls=line, lw=3, label=name) for name, (ink, line) in looks.items()]
    axes = _axes(canvas, _head(canvas, title, legend), left=LEFT)
    for name, values in (("dynamic", powers), ("static", [static] * len(powers))):
        ink, line = looks[name]
        axes.step(range(1, len(powers) + 1), values, where="mid", color=ink, ls=line, lw=3)
    axes.set_ylim(0, max(*powers, static) + 2)
    axes.yaxis.set_major_formatter(lambda power, _: f"2^{power:g}")
    axes.set_xlabel("step", fontsize=NORMAL)
    axes.set_ylabel("loss scale", fontsize=NORMAL)
    axes.grid(color=FAINT, lw=0.6)
    return canvas.picture(f"{title}: dynamic, and static at 2^{static}.")


# Gradients among the numbers of fp16

LOWEST, HIGHEST = -48, 24  # powers of two that are drawn
ZONES = {  # of fp16: from and to which power, fill, ink of the bars
    "rounds to 0": (LOWEST, -25, "#FBE3D6", WRONG),
    "subnormal": (-25, -14, "#FFF6D5", ORANGE),
    "normal": (-14, 16, "#E3F1EA", GREEN),
    "infinite": (16, HIGHEST, "#FBE3D6", WRONG),
}


def fp16_histogram(gradients: Tensor, scale: float = 1.0) -> Picture:
    """How many gradients, times `scale`, lie at each power of two, and what fp16 makes of them there.

    gradients: any shape, finite; those that are 0 aren't counted. ValueError: all of them are 0. Notebook 05.
    """
    powers, zones = _powers(gradients * scale), fp16_counts(gradients, scale)
    left, width, top, height = 40, WIDEST - 80, 156, 300
    cell = width / (HIGHEST - LOWEST)
    canvas = Canvas(WIDEST, top + height + 84)
    title = f"Gradients × 2^{torch.tensor(float(scale)).log2().item():g}, by power of two"
    canvas.text(WIDEST / 2, 26, title, LARGE, bold=True)
    for name, (start, end, fill, _) in ZONES.items():
        x = left + (start - LOWEST) * cell
        canvas.box(x, top - 90, (end - start) * cell, height + 90, fill, "none")
        canvas.line([(x, top - 90), (x, top + height)], FAINT)
        canvas.text(x + (end - start) * cell / 2, top - 70, name)
        canvas.text(x + (end - start) * cell / 2, top - 42, f"{zones[name]:,}", bold=True)
    counts = torch.bincount(powers.clamp(LOWEST, HIGHEST - 1) - LOWEST, minlength=HIGHEST - LOWEST).tolist()
    for place, many in enumerate(counts):
        if many:
            tall = max(height * many / max(counts), 4)
            ink = next(ink for start, end, _, ink in ZONES.values() if start <= place + LOWEST < end)
            edge = "black" if tall > 4 else "none"  # would hide it
            canvas.box(left + place * cell, top + height - tall, cell, tall, ink, edge, line=0.6)
    canvas.line([(left, top + height), (left + width, top + height)])
    for power in range(LOWEST, HIGHEST + 1, 8):
        x = left + (power - LOWEST) * cell
        canvas.line([(x, top + height), (x, top + height + 8)])
        canvas.text(x, top + height + 26, f"2^{power}")
    under = f"size of a gradient, its sign left aside; the highest bar: {max(counts):,}"
    canvas.text(WIDEST / 2, top + height + 60, under, NORMAL)
    return canvas.picture(f"{title}: how many there are, in the zones of fp16: {', '.join(ZONES)}.")


def _powers(values: Tensor) -> Tensor:
    values = values.detach().flatten().double()
    values = values[values != 0]
    if not len(values):
        raise ValueError("expected gradients, got only zeros: were they computed in a format that lost them?")
    return torch.frexp(values).exponent.long() - 1


def fp16_counts(gradients: Tensor, scale: float = 1.0) -> dict[str, int]:
    """How many of `gradients`, zeros left out, that fp16 makes 0, subnormal, normal and infinite."""
    values = gradients.detach().flatten()
    values = values[values != 0].double()
    if not len(values):
        raise ValueError("expected gradients, got only zeros: were they computed in a format that lost them?")
    rounded = (values * scale).half().abs()
    found = {
        "rounds to 0": rounded == 0,
        "subnormal": (rounded > 0) & (rounded < FP16.smallest_normal),
        "normal": (rounded >= FP16.smallest_normal) & rounded.isfinite(),
        "infinite": ~rounded.isfinite(),
    }
    return {name: int(where.sum()) for name, where in found.items()}


def scale_calculator(gradients: Tensor) -> Calculator:
    """A slider over the loss scale: where the gradients then lie in fp16. Its text holds no count, as they are
    measured. Notebook 05.
    """

    def scaled(power: int) -> tuple[str, Picture]:
        said = ", ".join(f"{name}: {many:,}" for name, many in fp16_counts(gradients, 2.0**power).items())
        return f"loss × 2^{power} = {2**power:,}. {said}", fp16_histogram(gradients, 2.0**power)

    text = repr(fp16_histogram(gradients))
    return calculator(scaled, text, power=Slider("loss scale", list(range(41)), 0, lambda power: f"2^{power}"))
