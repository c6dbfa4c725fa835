"""Draw flash attention for notebook 09: a matrix of scores tile by tile, and its rows' state.

A tile is a block of the matrix, some queries by some keys, that is computed in one go. Only the
current tile shows its numbers, because those of earlier tiles have been forgotten and those of
later tiles haven't been computed yet. The state of a row is the maximum m of its scores and the sum
ℓ of e^(score − m), both over its tiles so far, the current one included. A tile first multiplies
the sum so far by a correction, e^(m before − m after), because the maximum may have grown. A row's
last tile also gives "lse", the log-sum-exp m + ln ℓ of all its scores.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from ..softmax import merge, summarize
from ..tools.units import number
from . import page
from .page import Canvas, Picture
from .widgets import StepThrough

LARGEST = 8  # queries, and keys: the picture has no room for more
CELL, TALL = 64, 44  # pixels of a score
LEFT, TOP = 100, 80
COLUMNS = {"m": 670, "correction": 775, "ℓ": 885, "lse": 980}  # pixels: the middle of each
IN_WORK, GONE, SKIPPED = page.ORANGE, page.SKY, page.FAINT


@dataclass(frozen=True)
class Tile:
    """A block of the matrix of scores, and online softmax's state after it, for each of its rows.

    rows, columns: the indices of the queries and of the keys that the block covers.
    m: for each of its rows, the largest score so far, those of this tile included.
    correction: for each row, the factor by which this tile multiplied the sum of the tiles before:
        below 1 if the maximum grew, otherwise 1. In the first tile of these rows it is 0.
    ell: for each row, the sum of e^(score − m) so far.
    last: whether this is the last tile of these rows.
    """

    rows: range
    columns: range
    m: list[float]
    correction: list[float]
    ell: list[float]
    last: bool

    @property
    def cells(self) -> set[tuple[int, int]]:
        """Return the indices (query, key) of each score in the tile."""
        return set(itertools.product(self.rows, self.columns))

    def row(self, at: int) -> dict[str, str]:
        """Return the state of a row as {heading of a column in the picture: text}.

        The headings are "m", "correction", "ℓ" and "lse". The last is the log-sum-exp m + ln ℓ,
        whose text is "" before the row's last tile.

        at: the row's index within the tile, from 0.
        """
        m, ell = self.m[at], self.ell[at]
        known = {"m": _typeset(m), "correction": f"× {_typeset(self.correction[at])}"}
        lse = _typeset(m + math.log(ell)) if self.last else ""
        return known | {"ℓ": _typeset(ell), "lse": lse}


def tiles(scores: Tensor, tile: int, causal: bool) -> Iterator[Tile]:
    """Compute online softmax on a matrix of scores; yield `Tile`s, row by row from left to right.

    scores: a matrix of shape (queries, keys). Masked scores must be -inf already.
    tile: the number of queries and of keys in a tile; tiles at the edges may have fewer.
    causal: cut from each tile the keys whose index is greater than that of the tile's last query,
        and skip tiles of which nothing is left.
    """
    queries, keys = scores.shape
    for start in range(0, queries, tile):
        rows = range(start, min(start + tile, queries))
        end = min(rows.stop, keys) if causal else keys
        band = scores[rows.start : rows.stop]
        pair = summarize(band[:, :0])
        for first in range(0, end, tile):
            columns = range(first, min(first + tile, end))
            before, pair = pair, merge(pair, summarize(band[:, first : columns.stop]))
            correction, last = (before[0] - pair[0]).exp(), columns.stop == end
            known = (part.tolist() for part in (pair[0], correction, pair[1]))
            yield Tile(rows, columns, *known, last)


def flash_player(scores: Tensor, causal: bool = False) -> StepThrough:
    """Return a widget that steps through a matrix of attention scores as flash attention does.

    A step shows one tile, of at most 2 queries and 2 keys, and for each row the maximum, correction
    and sum after it and, once the row is finished, the log-sum-exp.

    scores: a matrix of shape (queries, keys), from 1 × 1 to 8 × 8 (`LARGEST`), all finite.
    causal: mask each score whose key has a greater index than its query.
    ValueError: `scores` has another shape, is larger, or contains infinities or NaN.
    """
    fits = scores.ndim == 2 and min(scores.shape) > 0 and max(scores.shape) <= LARGEST
    if not fits or not scores.isfinite().all():
        expected = f"flash_player expected finite scores of 1 to {LARGEST} queries and keys"
        raise ValueError(f"{expected}, got shape {tuple(scores.shape)}: take few")
    scores = scores.double()
    if causal:
        later = scores.new_ones(scores.shape).triu(1).bool()
        scores = scores.masked_fill(later, -math.inf)
    steps = list(tiles(scores, 2, causal))

    def look(step: int) -> tuple[str, Picture]:
        said = describe(steps[step - 1])
        return f"Tile {step} of {len(steps)}: {said}", draw(scores, steps, step, said)

    text = "\n".join(f"{step}. {describe(tile)}" for step, tile in enumerate(steps, 1))
    telling = math.ceil(2 * len(steps) / 3)  # some rows are done, some not begun
    return StepThrough(look, "tile", range(1, len(steps) + 1), text=text, telling=telling)


def describe(tile: Tile) -> str:
    """Return in words which queries and keys a tile covers, and where its rows stand after it.

    For example: "query 2, key 2: row 2: m 2, ℓ so far × 0.368, ℓ 1.5, lse 2.41". Row 2 is that of
    query 2; rows are separated by ";". 0.368 is the correction, by which the tile multiplied the
    earlier ℓ. The log-sum-exp, lse, is left out unless this is the row's last tile.
    """
    said = []
    for at, row in enumerate(tile.rows):
        known = tile.row(at)
        said.append(f"row {row}: m {known['m']}, ℓ so far {known['correction']}, ℓ {known['ℓ']}")
        if tile.last:
            said[-1] += f", lse {known['lse']}"
    where = f"{_named('query', 'queries', tile.rows)}, {_named('key', 'keys', tile.columns)}"
    return f"{where}: {'; '.join(said)}"


def _named(one: str, several: str, span: range) -> str:
    """Return a range of indices in words, such as "key 3", or "keys 2 to 3" for range(2, 4).

    one, several: the noun in the singular and in the plural.
    """
    return f"{one} {span.start}" if len(span) == 1 else f"{several} {span.start} to {span.stop - 1}"


def _typeset(value: float) -> str:
    """Return a number as short text with true minus signs, such as "−0.368", "1.2e4" or "−∞".

    Integers below 10^8 get all digits. Other numbers get three, or two if three make it too long.
    """
    return "−∞" if value == -math.inf else number(value).replace("-", "−")


def draw(scores: Tensor, steps: list[Tile], step: int, text: str) -> Picture:
    """Draw the matrix of scores with its current tile, and beside each row its state so far.

    The state is as the row's newest tile, the current or an earlier one, has left it: m, that
    tile's correction, ℓ and, once the row is finished, the log-sum-exp "lse". A row that no tile
    has reached yet has m = −∞ and ℓ = 0.

    scores: the matrix, of shape (queries, keys). steps: all its tiles, in order.
    step: the number of the current tile, counted from 1.
    text: the picture's alt text.
    """
    done, now = steps[:step], steps[step - 1]
    queries, keys = scores.shape
    canvas = Canvas(1040, TOP + TALL * queries + 70)
    canvas.text(LEFT + keys * CELL / 2, TOP - 50, "scores", page.NORMAL, bold=True)
    fills = {}
    for tile in steps:
        fills |= dict.fromkeys(tile.cells, GONE if tile in done else page.EMPTY)
    fills |= dict.fromkeys(now.cells, IN_WORK)
    for key in range(keys):
        canvas.text(LEFT + (key + 0.5) * CELL, TOP - 18, f"key {key}")
    for row, column in itertools.product(range(queries), range(keys)):
        x, y = LEFT + column * CELL, TOP + row * TALL
        canvas.box(x, y, CELL, TALL, fills.get((row, column), SKIPPED), page.GREY, 1)
        if (row, column) in now.cells:
            score = _typeset(scores[row, column].item())
            canvas.text(x + CELL / 2, y + TALL / 2, score)
    corner = LEFT + now.columns.start * CELL, TOP + now.rows.start * TALL
    canvas.box(*corner, len(now.columns) * CELL, len(now.rows) * TALL, "none", "black", 4)
    known = {row: {"m": "−∞", "ℓ": "0"} for row in range(queries)}
    for tile in done:
        known |= {row: tile.row(at) for at, row in enumerate(tile.rows)}
    for what, x in COLUMNS.items():
        canvas.text(x, TOP - 18, what, page.NORMAL, bold=True)
    for row, shown in known.items():
        y = TOP + (row + 0.5) * TALL
        canvas.text(LEFT - 12, y, f"query {row}", align="right")
        for what, said in shown.items():  # bold: the rows that this tile has changed
            canvas.text(COLUMNS[what], y, said, bold=row in now.rows)
    looks = {"being computed": IN_WORK, "used and forgotten": GONE, "not computed yet": "white"}
    if len(fills) < queries * keys:
        looks["in the future, skipped"] = SKIPPED
    for at, (said, fill) in enumerate(looks.items()):
        canvas.key(30 + 250 * at, canvas.height - 46, fill, said)
    return canvas.picture(text)
