"""Charts of notebook 05: training curves, a loss scale over time, gradients in fp16's range.

A chart is a `Picture`, a matplotlib figure with its alt text. The alt text names what is drawn and
states no measured number, since it is stored in the notebook and compared by tests.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..floats import FP16
from . import page
from .page import Picture, chart, legend
from .widgets import Calculator, Slider

STYLES = ("-", (0, (5, 2)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
EVERY = 10  # steps averaged into a point


# Training curves


def loss_curves(curves: Mapping[str, Sequence[float]], title: str) -> Picture:
    """Draw the losses of several trainings by step. Used in notebook 05.

    Each point is the mean of EVERY (10) consecutive steps, drawn at the last of them. Steps left
    over at the end aren't drawn. A NaN among the steps of a point leaves a gap in the line.

    curves: {name of the training: the losses of all steps, in bits per byte}. title: the heading.
    """
    figure, (axes,) = chart(title)
    for at, (name, losses) in enumerate(curves.items()):
        # Later curves are thinner, so that one that lies upon another leaves it visible.
        style = {"color": page.colour(at), "ls": STYLES[at % 4], "lw": max(8 - 2 * at, 3)}
        ends = range(EVERY, len(losses) + 1, EVERY)
        means = [sum(losses[end - EVERY : end]) / EVERY for end in ends]
        axes.plot(ends, means, label=name, **style)
    axes.set(xlabel="step", ylabel="bits per byte")
    axes.grid(color=page.FAINT, lw=0.6)
    legend(figure, axes.lines)
    said = f"{title}: {'; '.join(curves)}. By step, each point the mean of {EVERY}."
    return Picture(figure, said)


def scale_steps(powers: Sequence[int], static: int = 16) -> Picture:
    """Draw a dynamic loss scale step by step, beside a static one. Used in notebook 05.

    powers: the dynamic scale at each step, as an exponent of two: 16 is a scale of 65,536.
    static: the exponent of the static scale.
    """
    title = "The loss scale, step by step"
    figure, (axes,) = chart(title)
    steps = range(1, len(powers) + 1)
    axes.step(steps, powers, where="mid", color=page.BLUE, lw=3, label="dynamic")
    axes.plot(steps, [static] * len(steps), color=page.ORANGE, lw=3, ls="--", label="static")
    axes.set(ylim=(0, max(*powers, static) + 2), xlabel="step", ylabel="loss scale")
    axes.yaxis.set_major_formatter(lambda power, _: f"2^{power:g}")
    axes.grid(color=page.FAINT, lw=0.6)
    legend(figure, axes.lines)
    return Picture(figure, f"{title}: dynamic, and static at 2^{static}.")


# Gradients among the numbers of fp16

LOWEST, HIGHEST = -48, 24  # powers of two that are drawn
ZONES = {  # {zone of fp16: (lowest power, highest power, colour of the bars)}
    "rounds to 0": (LOWEST, -25, page.WRONG),
    "subnormal": (-25, -14, page.ORANGE),
    "normal": (-14, 16, page.GREEN),
    "infinite": (16, HIGHEST, page.WRONG),
}


def fp16_histogram(gradients: Tensor, scale: float) -> Picture:
    """Draw a histogram of gradients times `scale`, by power of two. Used in notebook 05.

    The bar at 2^p counts the numbers of size 2^p up to 2^(p+1); the first, at 2^-48, also all
    smaller ones, and the last, at 2^23, all larger ones. Bars too low to see are drawn higher.
    Colours show what fp16 makes of a bar's numbers: 0, a subnormal or normal number, or infinity.
    Above the bars are the counts of each kind, made after rounding. They may differ: 65,520, for
    example, is in the last bar of normal numbers, but fp16 rounds it to infinity.

    gradients: a tensor of any shape on the CPU, all finite. Zeros aren't counted. scale: above 0.
    ValueError: all gradients are 0.
    """
    zones = fp16_counts(gradients, scale)
    powers = torch.frexp(_nonzero(gradients) * scale).exponent.long() - 1
    powers = powers.clamp(LOWEST, HIGHEST - 1) - LOWEST
    counts = torch.bincount(powers, minlength=HIGHEST - LOWEST)
    most = counts.max().item()
    seen = (
        counts.clamp(min=most / 75).where(counts > 0, 0).tolist()
    )  # so that even a single one is visible
    title = f"Gradients × 2^{math.log2(scale):g}, by power of two"
    figure, (axes,) = chart(title, 520)
    for name, (start, end, fill) in ZONES.items():
        there = seen[start - LOWEST : end - LOWEST]
        axes.axvspan(start, end, fc=fill, alpha=0.12)
        axes.bar(range(start, end), there, 1, align="edge", color=fill, ec="black", lw=0.6)
        said, style = f"{name}\n{zones[name]:,}", {"ha": "center", "va": "top"}
        axes.text((start + end) / 2, 1.33 * most, said, fontsize=page.SMALL, **style)
    axes.set(xlim=(LOWEST, HIGHEST), ylim=(0, 1.35 * most), ylabel="gradients")
    axes.set_xticks(range(LOWEST, HIGHEST + 1, 8))
    axes.xaxis.set_major_formatter(lambda power, _: f"2^{power:g}")
    axes.set_xlabel("size of a gradient, without its sign")
    said = f"{title}: how many there are, in the zones of fp16: {', '.join(ZONES)}."
    return Picture(figure, said)


def _nonzero(values: Tensor) -> Tensor:
    """Return the values that aren't 0, as a flat tensor of doubles.

    ValueError: all values are 0.
    """
    values = values.detach().flatten()
    values = values[values != 0].double()
    if not len(values):
        got = "expected gradients, got only zeros"
        raise ValueError(f"{got}: were they computed in a format that lost them?")
    return values


def fp16_counts(gradients: Tensor, scale: float) -> dict[str, int]:
    """Count what fp16 makes of gradients times `scale`.

    Return {"rounds to 0": how many, "subnormal": ..., "normal": ..., "infinite": ...}, with the
    keys of ZONES. Gradients that are 0 to begin with aren't counted.

    gradients: a tensor of any shape on the CPU, all finite. ValueError: all gradients are 0.
    """
    rounded = (_nonzero(gradients) * scale).half().abs()
    edges = torch.tensor([2.0**-24, FP16.smallest_normal, math.inf], dtype=torch.float16)
    zones = torch.bucketize(rounded, edges, right=True)
    return dict(zip(ZONES, torch.bincount(zones, minlength=4).tolist(), strict=True))


def scale_calculator(gradients: Tensor) -> Calculator:
    """Return a widget that draws a histogram of gradients, multiplied by a loss scale.

    A slider sets the scale, from 2^0 to 2^40. The caption states how many of the products are 0,
    subnormal, normal or infinite in fp16. A stored notebook keeps a text without these counts,
    which may differ in another run. Used in notebook 05.

    gradients: a tensor of any shape on the CPU, all finite. ValueError: all gradients are 0.
    """

    def scaled(power: int) -> tuple[str, Picture]:
        counts = fp16_counts(gradients, 2.0**power)
        said = ", ".join(f"{name}: {many:,}" for name, many in counts.items())
        picture = fp16_histogram(gradients, 2.0**power)
        return f"loss × 2^{power} = {2**power:,}. {said}", picture

    powers = Slider("loss scale", list(range(41)), 0, lambda power: f"2^{power}")
    return Calculator(scaled, scaled(0)[1].text, power=powers)
