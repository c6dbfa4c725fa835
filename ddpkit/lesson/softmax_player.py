"""The player of notebook 08: an animation of online softmax, which reads one number after another.

It shows, after each number, the maximum so far, m, and the sum of eˣ⁻ᵐ so far, ℓ.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..softmax import merge, summarize
from ..tools.units import count
from . import page
from .page import Picture
from .widgets import StepThrough

MOST_NUMBERS = 8
READ, NEW = page.BLUE, page.ORANGE


@dataclass(frozen=True)
class Moment:
    """The state of online softmax after some numbers of a row, and its state one number earlier.

    row: all numbers of the row. read: how many of them have been read, from the first on.
    m: the maximum of the numbers x that have been read. ell: the sum of eˣ⁻ᵐ over them.
    m_before, ell_before: m and ell as they were before the last of these numbers was read.
    Before the first number (read = 0), m and m_before are -inf, ell and ell_before 0.
    """

    row: tuple[float, ...]
    read: int
    m_before: float
    ell_before: float
    m: float
    ell: float

    @property
    def correction(self) -> float:
        """Return e^(m_before - m), by which `ell_before` is multiplied; 0 if `m_before` is -inf."""
        return _share(self.m_before, self.m)

    def weights(self, before: bool = False) -> list[float]:
        """Return what each number x read so far adds to the sum: eˣ⁻ᵐ, where m is their maximum.

        before: leave out the last number, and use the maximum from before it was read.
        """
        m, read = (self.m_before, self.read - 1) if before else (self.m, self.read)
        return [_share(x, m) for x in self.row[: max(read, 0)]]

    @property
    def sum(self) -> str:
        """Return how the last number changed the sum, as text such as "2 × 0.5 + 1 = 2".

        The terms are: ell_before × e^(m_before - m) + eˣ⁻ᵐ of the last number x = ell. The text is
        "0" as long as no number but -inf was read.
        """
        if self.m == -math.inf:
            return "0"
        before, factor = _rounded(self.ell_before), _rounded(self.correction)
        added = _rounded(_share(self.row[self.read - 1], self.m))
        return f"{before} × {factor} + {added} = {_rounded(self.ell)}"

    @property
    def text(self) -> str:
        """Return in words how the last number changed the maximum m and the sum ℓ.

        An example is "x = 2: m grows from 1 to 2; ℓ = 1 × 0.368 + 1 = 1.37"; another, before the
        first number, "nothing read: m = −∞, ℓ = 0".
        """
        if not self.read:
            return "nothing read: m = −∞, ℓ = 0"
        x = self.row[self.read - 1]
        if x == -math.inf:
            return f"x = −∞: masked, m stays {_exactly(self.m)} and ℓ {_rounded(self.ell)}"
        grows = f"grows from {_exactly(self.m_before)} to" if self.m > self.m_before else "stays"
        return f"x = {_exactly(x)}: m {grows} {_exactly(self.m)}; ℓ = {self.sum}"


def moments(row: Sequence[float]) -> list[Moment]:
    """Return the state of online softmax before the first number of `row` and after each number.

    A row of n numbers gives n + 1 states, each a `Moment`, with the maximum m and the sum ℓ of the
    numbers read so far. The first has (m, ℓ) = (-inf, 0). To read a number x, `softmax.merge`
    combines the pair so far with that of x alone: (x, 1), or (-inf, 0) if x is -inf.
    """
    numbers = torch.tensor(row, dtype=torch.float64)
    pairs = [summarize(numbers[:0])]
    for x in numbers.split(1):
        pairs.append(merge(pairs[-1], summarize(x)))
    known = [(m.item(), ell.item()) for m, ell in pairs]
    befores = [known[0], *known]
    return [Moment(tuple(row), read, *befores[read], *now) for read, now in enumerate(known)]


def _share(x: float, m: float) -> float:
    """Return eˣ⁻ᵐ, which a number x adds to the sum; 0 for x = -inf, even while m is -inf."""
    return 0.0 if x == -math.inf else math.exp(x - m)


def _rounded(value: float, digits: int = 3) -> str:
    """Return a number as text with up to `digits` significant digits, and − instead of a hyphen."""
    return "−∞" if value == -math.inf else f"{value:.{digits}g}".replace("-", "−")


def _exactly(x: float) -> str:
    """Return a number x, or the maximum m, as text with up to six significant digits."""
    return _rounded(x, digits=6)


def softmax_player(row: Sequence[float]) -> StepThrough:
    """Return a widget with a slider that reads `row` one number at a time, as online softmax does.

    A bar is what a number x adds to the sum, eˣ⁻ᵐ, where m is the maximum so far. A dashed bar is
    what x added one step earlier, before the newest number was read.

    row: 1 to MOST_NUMBERS (8) numbers; -inf stands for a masked number.
    ValueError: the row is empty or has more numbers, or one of them is +inf or NaN.
    """
    row = [float(x) for x in row]
    if not 1 <= len(row) <= MOST_NUMBERS or any(math.isnan(x) or x == math.inf for x in row):
        expected = f"softmax_player expected 1 to {MOST_NUMBERS} numbers, none +inf or NaN"
        raise ValueError(f"{expected}, got {row}: cut the row")
    film = moments(row)
    grown = [moment.read for moment in film[2:] if 0 < moment.correction < 1]
    text = "\n".join(f"{moment.read}. {moment.text}" for moment in film)

    def look(read: int) -> tuple[str, Picture]:
        caption = f"{read} of {count(len(row), 'number')} read. {film[read].text}"
        return caption, draw(film[read])

    telling = grown[-1] if grown else len(row)
    return StepThrough(look, "numbers read", range(len(film)), text=text, telling=telling)


def draw(moment: Moment) -> Picture:
    """Draw what each number read so far adds to the sum, and the sum before and after the newest.

    The upper chart has a bar of height eˣ⁻ᵐ for each number x read, and a dashed outline of the
    height that it had before the newest number (which has none) was read. The lower chart has two
    rows: the sum before, made of the outlines laid end to end, and the sum now, made of the bars.
    moment: the state after some numbers; there are no bars before the first.
    """
    grew = f"{_exactly(moment.m_before)} → " if moment.m > moment.m_before > -math.inf else ""
    title = f"m = {grew}{_exactly(moment.m)}     ℓ = {_rounded(moment.ell)}"
    figure, (bars, sums) = page.chart(title, 480, 2, height_ratios=(2, 1))
    before, now = moment.weights(before=True), moment.weights()
    fills = [READ] * (len(now) - 1) + [NEW]
    places = range(len(moment.row))
    bars.bar(places[: len(before)], before, 0.5, fc="none", ec=page.GREY, lw=1.5, ls=page.DASHES)
    drawn = bars.bar(places[: len(now)], now, 0.5, color=fills, ec="black")
    bars.bar_label(drawn, map(_rounded, now), padding=3, fontsize=page.SMALL)
    bars.set(xlim=(-0.5, len(places) - 0.5), ylim=(0, 1.2), yticks=(0, 1))
    bars.set_ylabel("eˣ⁻ᵐ", rotation=0, ha="right")
    bars.set_xticks(places, map(_exactly, moment.row), fontsize=page.NORMAL)
    for at, label in enumerate(bars.get_xticklabels()):
        edge = NEW if at == moment.read - 1 else "black" if at < moment.read else page.FAINT
        label.set_bbox({"fc": page.EMPTY, "ec": edge, "lw": 3 if edge == NEW else 1})
        label.set_color("black" if at < moment.read else page.GREY)
    bars.tick_params(axis="x", length=0, pad=10)
    for place, weights in ((0, before), (1, now)):
        ends = list(itertools.accumulate(weights, initial=0))
        for left, weight, fill in zip(ends, weights, fills, strict=False):
            sums.barh(place, weight, 0.6, left, color=fill, ec="black")
        page.write_after(sums, ends[-1], place, _rounded(ends[-1]), weight="bold")
    sums.set(xlim=(0, len(places)), ylim=(1.5, -0.5))
    sums.set_yticks((0, 1), ("ℓ before", "ℓ now"), fontsize=page.NORMAL)
    sums.set_xlabel(f"ℓ = {moment.sum}")
    handles = [page.patch("read", READ), page.patch("read now", NEW)]
    page.legend(figure, [*handles, page.stroke("before m grew", page.GREY, lw=1.5, ls=page.DASHES)])
    return Picture(figure, f"{moment.read}. {moment.text}.")
