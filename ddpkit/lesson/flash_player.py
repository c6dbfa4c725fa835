"""The player of notebook 09: tiles of an attention matrix, one after the other, and what is known of each row by then.

Only the tile in work has numbers: the ones before it are forgotten, the ones after it don't exist yet.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from ..softmax import merge, summarize
from .figures import EMPTY, FAINT, GREY, LARGE, MIXED, NORMAL, RANK_COLOURS, WIDEST, Canvas, Picture, number
from .player import Explorer

SKY, ORANGE = RANK_COLOURS[4], RANK_COLOURS[1]
LARGEST = 8  # queries or keys: more have no room
CELL, TALL = 64, 44  # pixels of a score
LEFT, TOP = 100, 118
COLUMNS = {"m": 670, "correction": 775, "total": 885, "lse": 980}  # where the middle of each is


@dataclass(frozen=True)
class Tile:
    """A tile of scores, and what its rows know once it was worked on.

    rows, columns: of the matrix. m, correction, total, by row: the running maximum, what the sum so far was multiplied
    by, the running sum. last: no more tiles in these rows.
    """

    rows: range
    columns: range
    m: list[float]
    correction: list[float]
    total: list[float]
    last: bool


def tiles(scores: Tensor, tile: int, causal: bool) -> Iterator[Tile]:
    """All that are worked on, in order; with `causal`, those wholly in the future are not among them."""
    queries, keys = scores.shape
    for start in range(0, queries, tile):
        rows = range(start, min(start + tile, queries))
        end = min(rows.stop, keys) if causal else keys
        pair = summarize(scores[rows.start : rows.stop, :0])
        for first in range(0, end, tile):
            columns = range(first, min(first + tile, end))
            before, pair = pair, merge(pair, summarize(scores[rows.start : rows.stop, first : columns.stop]))
            correction = (before[0] - pair[0]).exp()
            yield Tile(rows, columns, pair[0].tolist(), correction.tolist(), pair[1].tolist(), last=columns.stop == end)


def flash_player(scores: Tensor, tile: int = 2, causal: bool = False) -> Explorer:
    """Work through a small attention matrix tile by tile: each row's running maximum and sum, and what is forgotten.

    scores: (queries, keys), up to 8 × 8 finite numbers. tile: its queries and keys. ValueError: anything else.
    """
    if scores.ndim != 2 or not 0 < min(scores.shape) <= max(scores.shape) <= LARGEST or not scores.isfinite().all():
        got = f"some of shape {tuple(scores.shape)}"
        raise ValueError(f"flash_player expected finite scores of 1 to {LARGEST} queries and keys, got {got}: take few")
    if tile < 1:
        raise ValueError(f"flash_player expected a tile of at least 1 query and key, got {tile}. Try 2.")
    scores = scores.float()
    if causal:
        later = scores.new_ones(scores.shape).triu(1).bool()
        scores = scores.masked_fill(later, -math.inf)
    steps = list(tiles(scores, tile, causal))

    def draw(step: int) -> Picture:
        return Picture(_draw(scores, steps, step), describe(steps[step - 1]))

    def caption(step: int) -> str:
        return f"Tile {step} of {len(steps)}: {describe(steps[step - 1])}"

    text = "\n".join(f"{step}. {describe(each)}" for step, each in enumerate(steps, 1))
    shown = -(-2 * len(steps) // 3)  # by then some rows are done, and some not begun
    return Explorer(draw, caption, "tile", 1, len(steps), 1, text, shown=shown, play=True)


def describe(tile: Tile) -> str:
    """What happens in it, in words."""
    rows = [
        f"row {row}: m {_said(m)}, sum so far × {_said(correction)}, total {_said(total)}"
        + f", lse {_said(m + math.log(total))}" * tile.last
        for row, m, correction, total in zip(tile.rows, tile.m, tile.correction, tile.total, strict=True)
    ]
    return f"{_named('query', 'queries', tile.rows)}, {_named('key', 'keys', tile.columns)}: {'; '.join(rows)}"


def _named(one: str, several: str, span: range) -> str:
    return f"{one} {span.start}" if len(span) == 1 else f"{several} {span.start} to {span.stop - 1}"


def _said(value: float) -> str:
    """As `figures.number`, infinity as its sign and minus as it is typeset."""
    return "−∞" if value == -math.inf else number(value).replace("-", "−")


# Drawing


def _draw(scores: Tensor, steps: list[Tile], step: int) -> bytes:
    done, now = steps[:step], steps[step - 1]
    queries, keys = scores.shape
    canvas = Canvas(WIDEST, TOP + TALL * queries + 70)
    canvas.text(WIDEST / 2, 26, f"Tile {step} of {len(steps)}", LARGE, bold=True)
    canvas.text(LEFT + keys * CELL / 2, TOP - 50, "scores", NORMAL, bold=True)
    for key in range(keys):
        canvas.text(LEFT + (key + 0.5) * CELL, TOP - 18, f"key {key}")
    gone, ever = _cells(done[:-1]), _cells(steps)
    for row in range(queries):
        y = TOP + row * TALL
        canvas.text(LEFT - 12, y + TALL / 2, f"query {row}", align="right")
        for column in range(keys):
            x, here = LEFT + column * CELL, row in now.rows and column in now.columns
            if here:
                canvas.box(x, y, CELL, TALL, ORANGE, line=1)
                canvas.text(x + CELL / 2, y + TALL / 2, _said(scores[row, column].item()))
            elif (row, column) not in ever:
                canvas.box(x, y, CELL, TALL, MIXED, GREY, 1, hatch="//")
            else:
                canvas.box(x, y, CELL, TALL, SKY if (row, column) in gone else EMPTY, FAINT, 1)
    width, height = len(now.columns) * CELL, len(now.rows) * TALL
    canvas.box(LEFT + now.columns.start * CELL, TOP + now.rows.start * TALL, width, height, "none", "black", 4)
    _draw_rows(canvas, done, queries)
    _draw_legend(canvas, TOP + TALL * queries + 24, skipped=len(ever) < queries * keys)
    return canvas.png()


def _cells(tiles: list[Tile]) -> set[tuple[int, int]]:
    return {(row, column) for tile in tiles for row in tile.rows for column in tile.columns}


def _draw_rows(canvas: Canvas, done: list[Tile], queries: int):
    """What each row knows; in bold, what this tile has changed."""
    for what, x in COLUMNS.items():
        canvas.text(x, TOP - 18, what, NORMAL, bold=True)
    known = {row: (each, at) for each in done for at, row in enumerate(each.rows)}
    for row in range(queries):
        shown = {"m": "−∞", "correction": "", "total": "0", "lse": ""}
        if row in known:
            tile, at = known[row]
            m, total = tile.m[at], tile.total[at]
            shown = {"m": _said(m), "correction": f"× {_said(tile.correction[at])}", "total": _said(total)}
            shown["lse"] = _said(m + math.log(total)) if tile.last else ""
        for what, x in COLUMNS.items():
            canvas.text(x, TOP + (row + 0.5) * TALL, shown[what], bold=row in done[-1].rows)


def _draw_legend(canvas: Canvas, y: float, skipped: bool):
    looks = [("the tile in work", ORANGE, None), ("used and forgotten", SKY, None), ("not computed yet", EMPTY, None)]
    looks += [("in the future, skipped", MIXED, "//")] * skipped
    x = 30
    for text, fill, hatch in looks:
        canvas.box(x, y, 30, 22, fill, GREY, 1, hatch=hatch)
        canvas.text(x + 40, y + 11, text, align="left")
        x += 40 + 11 * len(text) + 26
