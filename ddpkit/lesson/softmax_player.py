"""The player of notebook 08: a row read number by number, its maximum and sum kept up to date."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..softmax import merge, summarize
from ..tools.units import count
from . import page
from .page import Canvas, Picture
from .widgets import StepThrough

MOST_NUMBERS = 8
READ, NEW = page.BLUE, page.ORANGE
LEFT, GROUND = 150, 284  # where the bars begin and stand
WIDE, BAR = 50, 120  # pixels of a bar, and how high a weight of 1 is
STRIP = 40  # pixels that the sum is high


@dataclass(frozen=True)
class Moment:
    """What is known when the first `read` numbers of `row` were read, and just before.

    m: their maximum. ell: their sum of eˣ⁻ᵐ.
    """

    row: tuple[float, ...]
    read: int
    m_before: float
    ell_before: float
    m: float
    ell: float

    @property
    def correction(self) -> float:
        """What the sum before is multiplied by: e to the maximum before less that now."""
        return _share(self.m_before, self.m)

    def weights(self, before: bool = False) -> list[float]:
        """Of each number read, before the last one or with it: what it adds to the sum."""
        m, read = (self.m_before, self.read - 1) if before else (self.m, self.read)
        return [_share(x, m) for x in self.row[: max(read, 0)]]

    @property
    def text(self) -> str:
        if not self.read:
            return "nothing read: m = −∞, ℓ = 0"
        x = self.row[self.read - 1]
        said = f"x = {_exactly(x)}: "
        if self.m == -math.inf:
            return f"{said}masked, m stays −∞ and ℓ 0"
        if x == -math.inf:
            return f"{said}masked, m stays {_exactly(self.m)} and ℓ {_rounded(self.ell)}"
        if self.m > self.m_before:
            said += f"m grows from {_exactly(self.m_before)} to {_exactly(self.m)}"
        else:
            said += f"m stays {_exactly(self.m)}"
        before, factor = _rounded(self.ell_before), _rounded(self.correction)
        adds, ell = _rounded(_share(x, self.m)), _rounded(self.ell)
        return f"{said}; ℓ = {before} × {factor} + {adds} = {ell}"


def moments(row: Sequence[float]) -> list[Moment]:
    """One before the first number, then one for each: its own pair is merged with that so far."""
    numbers = torch.tensor(row, dtype=torch.float64)
    pair = summarize(numbers[:0])
    m, ell = (part.item() for part in pair)
    found = [Moment(tuple(row), 0, m, ell, m, ell)]
    for read in range(1, len(row) + 1):
        before = m, ell
        pair = merge(pair, summarize(numbers[read - 1 : read]))
        m, ell = (part.item() for part in pair)
        found.append(Moment(tuple(row), read, *before, m, ell))
    return found


def _share(x: float, m: float) -> float:
    return 0.0 if x == -math.inf else math.exp(x - m)


def _rounded(value: float, digits: int = 3) -> str:
    return "−∞" if value == -math.inf else f"{value:.{digits}g}".replace("-", "−")


def _exactly(x: float) -> str:
    """A number of the row, or its maximum."""
    return _rounded(x, digits=6)


def softmax_player(row: Sequence[float]) -> StepThrough:
    """Read `row` one number at a time, as online softmax does.

    row: 1 to 8 numbers; -inf is masked. ValueError: more of them, none, +inf or NaN.

    A bar is what a number adds to the sum, eˣ⁻ᵐ; dashed, what it was before the maximum grew.
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
    """The row and the weights of what was read; below, the sum before and after the last number."""
    wide = min(120.0, (page.WIDEST - LEFT - 90) / len(moment.row))
    right, top = LEFT + wide * len(moment.row), GROUND - BAR
    canvas = Canvas(page.WIDEST, 470)
    grew = f"{_exactly(moment.m_before)} → " if moment.m > moment.m_before > -math.inf else ""
    known = f"m = {grew}{_exactly(moment.m)}     ℓ = {_rounded(moment.ell)}"
    canvas.text(LEFT, 28, known, page.LARGE, "left", bold=True)
    for y, said in ((74, "x"), (top, "1"), (GROUND - BAR / 2, "eˣ⁻ᵐ")):
        canvas.text(LEFT - 14, y, said, page.NORMAL, "right")
    canvas.line([(LEFT, top), (right, top)], page.FAINT, 1.2, dashed=True)
    if grew:
        canvas.text(LEFT, 122, "dashed: before m grew", page.NORMAL, "left", page.GREY)
    before, now = moment.weights(before=True), moment.weights()
    fills = [READ] * (len(now) - 1) + [NEW]
    for at in range(len(moment.row)):
        _draw_number(canvas, moment, at, LEFT + wide * at, wide)
        x, middle = LEFT + wide * (at + 0.5) - WIDE / 2, LEFT + wide * (at + 0.5)
        if at < len(before) and before[at] != now[at]:
            tall = BAR * before[at]
            canvas.box(x, GROUND - tall, WIDE, tall, page.EMPTY, page.GREY, dashed=True)
        if at < len(now):
            tall = BAR * now[at]
            canvas.box(x, GROUND - tall, WIDE, tall, fills[at], line=1)
            canvas.text(middle, GROUND + 16, _rounded(now[at]))
    canvas.line([(LEFT, GROUND), (right, GROUND)])
    _draw_sum(canvas, "ℓ before", before, fills, 330, wide)
    _draw_sum(canvas, "ℓ now", now, fills, 400, wide)
    if moment.read and moment.m > -math.inf:
        steps = f"↓ × {_rounded(moment.correction)}   + {_rounded(now[-1])}"
        canvas.text(LEFT, 385, steps, page.NORMAL, "left")
    return canvas.picture(f"{moment.read}. {moment.text}.")


def _draw_number(canvas: Canvas, moment: Moment, at: int, x: float, wide: float):
    fill, ink = (page.EMPTY, "black") if at < moment.read else (page.PALE, page.GREY)
    last = at == moment.read - 1
    canvas.box(x, 54, wide, 40, fill, ink, 1.2)
    canvas.text(x + wide / 2, 74, _exactly(moment.row[at]), page.NORMAL, ink=ink, bold=last)
    if last:
        canvas.box(x + 2, 56, wide - 4, 36, "none", NEW, 5)


def _draw_sum(canvas: Canvas, name: str, weights: list[float], fills: list[str], y: float, wide):
    """The weights side by side, as long as their sum; the first of `fills` are theirs."""
    canvas.text(LEFT - 14, y + STRIP / 2, name, page.NORMAL, "right")
    x = LEFT
    for weight, fill in zip(weights, fills, strict=False):
        canvas.box(x, y, weight * wide, STRIP, fill, line=1)
        x += weight * wide
    total = _rounded(math.fsum(weights))
    canvas.text(x + 12, y + STRIP / 2, total, page.NORMAL, "left", bold=True)
