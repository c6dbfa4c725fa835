"""Draw the calls of a failed launch: a row (lane) for each rank, with a circle for each call.

The calls of a rank stand from left to right in their order, not to scale in time. An open circle is
a call that never finished. When a reader runs a cell whose launch fails, the picture appears below
the report of the failure; the outputs that are stored with the course lack it.
"""

from ..runtime.errors import LaunchError
from ..tools.units import count
from . import page
from .page import Canvas, Picture, colour

MOST = 14  # calls of a rank that are drawn: the last ones
PITCH, LANE, LEFT, NAMES = 46, 44, 110, 260  # pixels


def lanes(error: LaunchError) -> Picture:
    """Draw the last calls of a failed launch, a row for each rank, in the order of the calls.

    A filled circle is a call that was completed, an open circle a call that wasn't. A column has
    the n-th call of every rank, counted from the oldest that is recorded. Only the last `MOST` (14)
    columns are drawn; the row of a rank that made none of these calls has no circle. The alt text
    gives each rank's number of recorded calls, and its last open one.

    error: what `launch` raised; its `wire` has the records of each rank's last 256 calls.
    ValueError: no rank made a call, so there is nothing to draw.
    """
    made = max(map(len, error.wire), default=0)
    if not made:
        raise ValueError("expected an error with the calls of its ranks, got none: nothing to draw")
    first = max(0, made - MOST)  # earlier calls are left out on every rank
    canvas = Canvas(LEFT + PITCH * (made - first) + NAMES, 24 + LANE * len(error.wire))
    said = []
    for rank, records in enumerate(error.wire):
        y = 12 + LANE * (rank + 0.5)
        canvas.badge(12, y - page.ROW / 2, rank)
        ends = LEFT + PITCH * max(0, len(records) - first)
        canvas.line([(LEFT - 4, y), (ends - 10, y)], colour(rank), 3)
        for place, record in enumerate(records[first:]):
            x = LEFT + PITCH * place + 12
            fill = page.EMPTY if record.done is None else colour(rank)
            canvas.box(
                x, y - 11, 22, 22, fill, page.WRONG if record.done is None else "black", 3, round=11
            )
        open_calls = [record.op for record in records if record.done is None]
        note = f"waits in {open_calls[-1]}" if open_calls else "makes no further call"
        ink = page.WRONG if open_calls else "black"
        canvas.text(ends + 8, y, note, align="left", ink=ink, bold=bool(open_calls))
        said.append(f"rank {rank}: {count(len(records), 'call')}, {note}")
    return canvas.picture(f"Calls by rank. {'; '.join(said)}.")
