"""Draw the ranks of a ring on a circle, each element of a rank's first buffer as a striped cell.

A rank's first buffer is the storage of the first tensor that it sends or receives. The owner of an
element is the rank that its value came from, or the set of ranks if the value is a sum over them. A
cell has a slot for each rank, and shows a stripe, in the rank's colour, for the owner or for each
rank of that set. So a finished sum has all stripes. A `Frame` is the state that one picture of an
animation shows: every rank's buffers, as the value and the owner of each element.
"""

import math

from . import page
from .film import Frame, Owner
from .page import Canvas, Picture, colour

WIDTH, HEIGHT = 960, 620
MIDDLE_X, MIDDLE_Y, RADIUS_X, RADIUS_Y = WIDTH / 2, 336, 290, 204
CELL, GAP, NODE_HEIGHT = 40, 6, 96


def is_round(frames: list[Frame], world_size: int) -> bool:
    """Return whether a run can be drawn as a ring, its ranks on a circle.

    It can if there are 3 to 8 ranks and at least one hop (messages that travel at the same time),
    and if in each hop every rank sends one message to rank + 1 or, from the last rank, to 0. Each
    message must lie in its sender's first buffer, whose elements `launch(..., keep_values=True)`
    must have recorded. In the last frame no first buffer may hold more elements than ranks exist.

    frames: what `film.hop_by_hop` returns: a frame for each hop, then one for the end. Any other
        list of at least one frame gives False.
    """
    *hops, end = frames
    if end.event.kind != "end" or not 3 <= world_size <= 8 or not hops:
        return False
    for frame in hops:
        if sorted(message.event.rank for message in frame.sent) != list(range(world_size)):
            return False
        for message in frame.sent:
            event, (buffer, _) = message.event, message.marked.get(message.event.rank, (None, ()))
            first = next(iter(message.memory[event.rank]), None)
            if event.peer != (event.rank + 1) % world_size or buffer is None or buffer != first:
                return False
    return all(len(next(iter(held.values()))) <= world_size for held in end.memory)


def place(rank: float, world_size: int) -> tuple[float, float]:
    """Return (x, y) of a rank's centre, in pixels from the upper left corner of the picture.

    Ranks are placed clockwise, rank 0 at the top, on the circle, in fact an ellipse wider than
    high. A fractional rank lies between its neighbours: 0.5 is halfway between ranks 0 and 1.
    """
    angle = 2 * math.pi * rank / world_size - math.pi / 2
    return MIDDLE_X + RADIUS_X * math.cos(angle), MIDDLE_Y + RADIUS_Y * math.sin(angle)


def cells_of(frame: Frame, rank: int) -> list[Owner]:
    """Return the owner of each element in a rank's first buffer, at the moment `frame` shows.

    The owner is the rank that an element's value came from, a frozenset of ranks for a sum, or None
    if that isn't known. The run needs `launch(..., keep_values=True)`, which records elements.

    StopIteration: the frame shows no buffer of the rank, because it has sent or received nothing
        yet, or its elements weren't recorded. It can't happen where `is_round` is True.
    """
    return [owner for _, owner in next(iter(frame.memory[rank].values()))]


def cell_place(rank: int, index: int, cells: int, world_size: int) -> tuple[float, float]:
    """Return (x, y) of a cell's upper left corner, in pixels right of and below the picture's.

    The ranks stand on a circle. Each has a row of cells, one for each element of its first buffer.

    index: the cell's position in its rank's row, from 0. cells: the number of cells in that row.
    """
    x, y = place(rank, world_size)
    return x - (cells * (CELL + GAP) - GAP) / 2 + index * (CELL + GAP), y - 4


def draw(frame: Frame, world_size: int, title: str) -> Picture:
    """Draw the ranks on their circle, each with its cells, and the messages that they are sending.

    frame: one of those that `film.hop_by_hop` returns for each hop (messages that travel at the
        same time) and for the end. The run must be a ring, as `is_round` checks. The picture's alt
        text is `frame.event.text`, such as "the end: what each rank has now".
    title: the text above the circle.
    """
    canvas = Canvas(WIDTH, HEIGHT)
    canvas.text(MIDDLE_X, 26, title, page.NORMAL)
    for rank in range(world_size):
        # The line from rank to rank along the circle, in short straight pieces.
        steps = [rank + part / 24 for part in range(25)]
        canvas.line([place(step, world_size) for step in steps], page.GREY, 3)
        there = place(rank + 0.66, world_size), place(rank + 0.71, world_size)
        canvas.arrow(*there, page.GREY, 4)
    for rank in range(world_size):
        _draw_rank(canvas, frame, rank, world_size)
    for message in frame.sent:
        _draw_message(canvas, message, world_size)
    return canvas.picture(frame.event.text)


def _draw_rank(canvas: Canvas, frame: Frame, rank: int, world_size: int):
    """Draw a rank's name and its cells; cells that it sends in `frame` have thick edges."""
    owners = cells_of(frame, rank)
    _, marked = frame.marked.get(rank, (None, ()))
    wide = max(len(owners) * (CELL + GAP) + 14, 100)
    x, y = place(rank, world_size)
    top = y - NODE_HEIGHT / 2
    canvas.box(x - wide / 2, top, wide, NODE_HEIGHT, page.PALE, page.FAINT, 1.5, round=10)
    canvas.box(x - 36, top + 13, 14, 14, colour(rank), "none", round=7)
    canvas.text(x - 14, top + 20, f"rank {rank}", align="left", bold=True)
    for index, owner in enumerate(owners):
        corner = cell_place(rank, index, len(owners), world_size)
        _draw_cell(canvas, *corner, owner, world_size, index in marked)


def _draw_cell(canvas: Canvas, x, y, owner: Owner, world_size: int, marked: bool):
    """Draw an element's cell, its upper left corner at (x, y), with a stripe for each owning rank.

    owner: that rank, a frozenset of ranks, or None for no stripe. marked: draw a thick frame.
    """
    edge, line = ("black", 3) if marked else (page.FAINT, 1.5)
    canvas.box(x, y, CELL, CELL, page.EMPTY, edge, line, round=3)
    filled = owner if isinstance(owner, frozenset) else {owner}
    canvas.stripes(x + 4, y + 4, CELL - 8, CELL - 8, range(world_size), filled)


def _draw_message(canvas: Canvas, message: Frame, world_size: int):
    """Draw the cells of a message in a row that begins halfway between sender and receiver.

    The first cell is centred there, on the circle; the others follow to the right. In the browser
    the row instead travels from the sender's cells to those of the same indices at the receiver.

    message: the frame of this message alone, one of those that the frame of a hop has as `sent`.
    """
    event, (_, marked) = message.event, message.marked[message.event.rank]
    cells = len(cells_of(message, event.rank))
    x, y = place(event.rank + 0.5, world_size)
    x, y = x - CELL / 2, y - CELL / 2
    ends = []
    for rank in (event.rank, event.peer):
        there = cell_place(rank, marked.start, cells, world_size)
        ends.append([72 / page.DPI * (to - at) for to, at in zip(there, (x, y), strict=True)])
    canvas.gid = page.moving(*ends)
    for number, owner in enumerate(message.owners):
        _draw_cell(canvas, x + number * (CELL + GAP), y, owner, world_size, True)
    canvas.gid = None
