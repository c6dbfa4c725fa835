"""The softmax player: a row read one number at a time, its maximum and its sum corrected on the way. Notebook 08."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..softmax import merge, summarize
from .figures import EMPTY, FAINT, GREY, LARGE, NORMAL, PALE, RANK_COLOURS, WIDEST, Canvas, Picture, count
from .player import Explorer

MOST_NUMBERS = 8
READ, NEW = RANK_COLOURS[0], RANK_COLOURS[1]
BAR = 120  # pixels that a weight of 1 is high
STRIP = 40  # pixels that the sum is high


@dataclass(frozen=True)
class Moment:
    """What is known when the first `read` numbers of `row` were read: their maximum m and sum d; and just before."""

    row: tuple[float, ...]
    read: int
    m_before: float
    d_before: float
    m: float
    d: float

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
            return "nothing read: m = −∞, d = 0"
        x = self.row[self.read - 1]
        said = f"x = {_exactly(x)}: "
        if self.m == -math.inf:
            return f"{said}masked, m stays −∞ and d 0"
        if x == -math.inf:
            return f"{said}masked, m stays {_exactly(self.m)} and d {_said(self.d)}"
        grows = f"m grows from {_exactly(self.m_before)} to {_exactly(self.m)}"
        said += grows if self.m > self.m_before else f"m stays {_exactly(self.m)}"
        factor, adds = _said(self.correction), _said(_share(x, self.m))
        return f"{said}; d = {_said(self.d_before)} × {factor} + {adds} = {_said(self.d)}"


def moments(row: Sequence[float]) -> list[Moment]:
    """One for each number of the row, and one before the first: each number's own pair is merged with that so far."""
    numbers = torch.tensor(row, dtype=torch.float64)
    pair = summarize(numbers[:0])
    m, d = (part.item() for part in pair)
    found = [Moment(tuple(row), 0, m, d, m, d)]
    for at in range(len(row)):
        m_before, d_before = m, d
        pair = merge(pair, summarize(numbers[at : at + 1]))
        m, d = (part.item() for part in pair)
        found.append(Moment(tuple(row), at + 1, m_before, d_before, m, d))
    return found


def _share(x: float, m: float) -> float:
    return 0.0 if x == -math.inf else math.exp(x - m)


def _said(value: float, digits: int = 3) -> str:
    return "−∞" if value == -math.inf else f"{value:.{digits}g}".replace("-", "−")


def _exactly(x: float) -> str:
    """A number of the row, or its maximum."""
    return _said(x, digits=6)


def softmax_player(row: Sequence[float]) -> Explorer:
    """Read `row` one number at a time, as online softmax does.

    row: 1 to 8 numbers; -inf is masked. ValueError: more of them, none, +inf or NaN.

    A bar is what a number adds to the sum, eˣ⁻ᵐ; dashed, what it was before the maximum grew. Notebook 08.
    """
    row = [float(x) for x in row]
    if not 1 <= len(row) <= MOST_NUMBERS or any(math.isnan(x) or x == math.inf for x in row):
        raise ValueError(
            f"softmax_player expected 1 to {MOST_NUMBERS} numbers, none +inf or NaN, got {row}: cut the row"
        )
    film = moments(row)
    grown = [moment for moment in film[2:] if 0 < moment.correction < 1]
    telling = max(grown, key=lambda moment: moment.read, default=film[-1])

    def caption(step: int) -> str:
        return f"{step} of {count(len(row), 'number')} read. {film[step].text}"

    text = "\n".join(f"{moment.read}. {moment.text}" for moment in film)
    return Explorer(
        lambda step: draw(film[step]), caption, "numbers read", 0, len(row), 0, text, shown=telling.read, play=True
    )


def draw(moment: Moment) -> Picture:
    """The row and the weights of what was read of it; below, the sum before and after the last number."""
    left, ground = 150, 284
    wide = min(120.0, (WIDEST - left - 90) / len(moment.row))
    canvas = Canvas(WIDEST, 470)
    grew = f"{_exactly(moment.m_before)} → " if moment.m > moment.m_before > -math.inf else ""
    known = f"m = {grew}{_exactly(moment.m)}     d = {_said(moment.d)}"
    canvas.text(left, 28, known, LARGE, "left", bold=True)
    canvas.text(left - 14, 74, "x", NORMAL, "right")
    canvas.text(left - 14, ground - BAR, "1", NORMAL, "right")
    canvas.text(left - 14, ground - BAR / 2, "eˣ⁻ᵐ", NORMAL, "right")
    canvas.line([(left, ground - BAR), (left + wide * len(moment.row), ground - BAR)], FAINT, 1.2, dashed=True)
    if grew:
        canvas.text(left, 122, "dashed: before m grew", NORMAL, "left", ink=GREY)
    before, now = moment.weights(before=True), moment.weights()
    for at in range(len(moment.row)):
        _draw_number(canvas, moment, at, left + wide * at, wide)
        middle = left + wide * (at + 0.5)
        if at < len(before) and before[at] != now[at]:
            canvas.box(middle - 26, ground - BAR * before[at], 52, BAR * before[at], EMPTY, GREY, 1.5, dashed=True)
        if at < len(now):
            tall = BAR * now[at]
            canvas.box(middle - 26, ground - tall, 52, tall, NEW if at == moment.read - 1 else READ, line=1)
            canvas.text(middle, ground + 16, _said(now[at]))
    canvas.line([(left, ground), (left + wide * len(moment.row), ground)])
    _draw_sum(canvas, "d before", before, [READ] * len(before), left, 330, wide)
    new = [READ] * (len(now) - 1) + [NEW] * bool(now)
    _draw_sum(canvas, "d now", now, new, left, 400, wide)
    if moment.read and moment.m > -math.inf:
        steps = f"× {_said(moment.correction)}   + {_said(now[-1])}"
        canvas.text(left, 385, f"↓ {steps}", NORMAL, "left")
    return canvas.picture(f"{moment.read}. {moment.text}.")


def _draw_number(canvas: Canvas, moment: Moment, at: int, x: float, wide: float):
    read, last = at < moment.read, at == moment.read - 1
    canvas.box(x, 54, wide, 40, EMPTY if read else PALE, "black" if read else FAINT, 1.2)
    canvas.text(x + wide / 2, 74, _exactly(moment.row[at]), NORMAL, ink="black" if read else GREY, bold=last)
    if last:
        canvas.box(x + 2, 56, wide - 4, 36, "none", NEW, 5)


def _draw_sum(canvas: Canvas, name: str, weights: list[float], fills: list[str], left: float, y: float, wide: float):
    """The weights side by side, as long as their sum."""
    canvas.text(left - 14, y + STRIP / 2, name, NORMAL, "right")
    x = left
    for weight, fill in zip(weights, fills, strict=True):
        canvas.box(x, y, weight * wide, STRIP, fill, line=1)
        x += weight * wide
    canvas.text(x + 12, y + STRIP / 2, _said(math.fsum(weights)), NORMAL, "left", bold=True)
