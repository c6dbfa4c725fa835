"""Charts of notebook 05: training curves, a loss scale over time, gradients among fp16's numbers.

Their words name what is drawn and no number that was measured.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..tools.floats import FP16
from . import page
from .page import Picture, chart, legend, stroke
from .widgets import Calculator, Slider

STYLES = ("-", (0, (5, 2)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
EVERY = 10  # steps whose mean is a point


# Training curves


def loss_curves(
    curves: Mapping[str, Sequence[float]], title: str = "Loss while training"
) -> Picture:
    """The losses of several trainings, each point the mean of ten steps, up to the first NaN.

    curves: in bits per byte. ValueError: no curve, or one of less than ten steps. Notebook 05.
    """
    short = [name for name, losses in curves.items() if len(losses) < EVERY]
    if short or not curves:
        got = f"fewer of {', '.join(short) or 'nothing'}"
        raise ValueError(f"expected losses of {EVERY} steps or more, got {got}")
    figure, (axes,) = chart(title)
    handles = []
    for at, (name, losses) in enumerate(curves.items()):
        # Later curves are thinner, so that one that lies upon another leaves it visible.
        style = {"color": page.colour(at), "ls": STYLES[at % 4], "lw": max(8 - 2 * at, 3)}
        points = means(losses)
        axes.plot([EVERY * (place + 1) for place in range(len(points))], points, **style)
        handles.append(stroke(name, **style))
    axes.set(xlabel="step", ylabel="bits per byte")
    axes.grid(color=page.FAINT, lw=0.6)
    legend(figure, handles)
    said = f"{title}: {'; '.join(curves)}. By step, each point the mean of {EVERY}."
    return Picture(figure, said)


def means(losses: Sequence[float]) -> list[float]:
    """Of each ten steps; the last may be of up to nineteen."""
    starts = range(0, len(losses) - EVERY + 1, EVERY)
    ends = [*starts[1:], len(losses)]
    return [sum(losses[a:b]) / (b - a) for a, b in zip(starts, ends, strict=True)]


def scale_steps(powers: Sequence[int], static: int = 16) -> Picture:
    """The power of two that a dynamic scale had in each step, beside a static one. Notebook 05."""
    title = "The loss scale, step by step"
    figure, (axes,) = chart(title)
    looks = {
        "dynamic": (powers, {"color": page.BLUE, "lw": 3}),
        "static": ([static] * len(powers), {"color": page.ORANGE, "lw": 3, "ls": STYLES[1]}),
    }
    for values, style in looks.values():
        axes.step(range(1, len(powers) + 1), values, where="mid", **style)
    axes.set(ylim=(0, max(*powers, static) + 2), xlabel="step", ylabel="loss scale")
    axes.yaxis.set_major_formatter(lambda power, _: f"2^{power:g}")
    axes.grid(color=page.FAINT, lw=0.6)
    legend(figure, [stroke(name, **style) for name, (_, style) in looks.items()])
    return Picture(figure, f"{title}: dynamic, and static at 2^{static}.")


# Gradients among the numbers of fp16

LOWEST, HIGHEST = -48, 24  # powers of two that are drawn
ZONES = {  # of fp16: from and to which power, colour of the bars
    "rounds to 0": (LOWEST, -25, page.WRONG),
    "subnormal": (-25, -14, page.ORANGE),
    "normal": (-14, 16, page.GREEN),
    "infinite": (16, HIGHEST, page.WRONG),
}


def fp16_histogram(gradients: Tensor, scale: float = 1.0) -> Picture:
    """How many gradients, times `scale`, lie at each power of two, and what fp16 makes of them.

    gradients: any shape, finite; those that are 0 aren't counted. ValueError: all of them are 0.
    Notebook 05.
    """
    zones = fp16_counts(gradients, scale)
    powers = torch.frexp(_nonzero(gradients) * scale).exponent.long() - 1
    powers = powers.clamp(LOWEST, HIGHEST - 1) - LOWEST
    counts = torch.bincount(powers, minlength=HIGHEST - LOWEST).tolist()
    title = f"Gradients × 2^{torch.tensor(float(scale)).log2().item():g}, by power of two"
    figure, (axes,) = chart(title, 520)
    for name, (start, end, fill) in ZONES.items():
        there = counts[start - LOWEST : end - LOWEST]
        seen = [max(many, max(counts) / 75) if many else 0 for many in there]
        axes.axvspan(start, end, fc=fill, alpha=0.12)
        axes.bar(range(start, end), seen, 1, align="edge", color=fill, ec="black", lw=0.6)
        said, style = f"{name}\n{zones[name]:,}", {"ha": "center", "va": "top"}
        axes.text((start + end) / 2, 1.33 * max(counts), said, fontsize=page.SMALL, **style)
    axes.set(xlim=(LOWEST, HIGHEST), ylim=(0, 1.35 * max(counts)), ylabel="gradients")
    axes.set_xticks(range(LOWEST, HIGHEST + 1, 8))
    axes.xaxis.set_major_formatter(lambda power, _: f"2^{power:g}")
    axes.set_xlabel("size of a gradient, without its sign")
    said = f"{title}: how many there are, in the zones of fp16: {', '.join(ZONES)}."
    return Picture(figure, said)


def _nonzero(values: Tensor) -> Tensor:
    values = values.detach().flatten()
    values = values[values != 0].double()
    if not len(values):
        got = "expected gradients, got only zeros"
        raise ValueError(f"{got}: were they computed in a format that lost them?")
    return values


def fp16_counts(gradients: Tensor, scale: float = 1.0) -> dict[str, int]:
    """How many of `gradients`, zeros left out, fp16 makes 0, subnormal, normal and infinite."""
    rounded = (_nonzero(gradients) * scale).half().abs()
    small = rounded < FP16.smallest_normal
    found = {
        "rounds to 0": rounded == 0,
        "subnormal": (rounded > 0) & small,
        "normal": ~small & rounded.isfinite(),
        "infinite": ~rounded.isfinite(),
    }
    return {name: int(where.sum()) for name, where in found.items()}


def scale_calculator(gradients: Tensor) -> Calculator:
    """A slider over the loss scale: where the gradients then lie in fp16. Notebook 05.

    Its text holds no count, as they are measured.
    """

    def scaled(power: int) -> tuple[str, Picture]:
        counts = fp16_counts(gradients, 2.0**power)
        said = ", ".join(f"{name}: {many:,}" for name, many in counts.items())
        picture = fp16_histogram(gradients, 2.0**power)
        return f"loss × 2^{power} = {2**power:,}. {said}", picture

    powers = Slider("loss scale", list(range(41)), 0, lambda power: f"2^{power}")
    return Calculator(scaled, scaled(0)[1].text, power=powers)
