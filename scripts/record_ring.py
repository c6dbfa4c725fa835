"""Record a ring all-reduce of four real processes, and draw it for README: docs/ring.svg.

The order of the messages and what each cell holds are the run's, by `lesson.film`; only time is
ours, two seconds a hop. Light and dark, as the reader's system is. Run it from the repository:
python scripts/record_ring.py
"""

from pathlib import Path

import torch
import torch.distributed as dist

from ddpkit import launch
from ddpkit.lesson import circle, page
from ddpkit.lesson.film import Frame, film, hop_by_hop
from ddpkit.lesson.replay import replay
from ddpkit.ring import ring_all_reduce

TARGET = Path(__file__).resolve().parents[1] / "docs/ring.svg"
WORLD_SIZE = 4
REST_S, HOP_S, TRAVEL_S, END_S = 1.0, 2.0, 1.2, 4.0  # before the first hop, a hop, of it on the way
WIDE = circle.CELL - 8  # pixels of a cell's stripes
STYLE = """
.ground { fill: #fff } .words { fill: #1c1e21 } .pale { fill: #5b616b }
.node { fill: #f4f6f8; stroke: #c6ccd3; stroke-width: 1.5 }
.cell { fill: #fff; stroke: #8a9099; stroke-width: 1.2 }
.ring { fill: none; stroke: #aeb5bd; stroke-width: 3 }
@media (prefers-color-scheme: dark) {
.ground { fill: #0d1117 } .words { fill: #e6edf3 } .pale { fill: #9aa4af }
.node { fill: #161b22; stroke: #3d444d } .cell { fill: #0d1117; stroke: #6e7681 }
.ring { stroke: #4d5560 } }
"""


def ranks_of(owner: circle.Owner) -> frozenset[int]:
    return owner if isinstance(owner, frozenset) else frozenset({owner})


def shown_from(moment_s: float, whole_s: float, until_s: float | None = None) -> str:
    """Animate what is there from a moment on, again and again."""
    times, values = f"0;{moment_s / whole_s:.4f}", "0;1"
    if until_s is not None:
        times, values = f"{times};{until_s / whole_s:.4f}", f"{values};0"
    return (
        f'<animate attributeName="opacity" dur="{whole_s}s" repeatCount="indefinite" '
        f'calcMode="discrete" keyTimes="{times}" values="{values}"/>'
    )


def stripe(x: float, y: float, rank: int, inside: str = "", hidden: bool = False) -> str:
    """Draw a rank's slot of the cell whose stripes begin at x, y."""
    wide = WIDE / WORLD_SIZE
    looks = 'opacity="0" ' if hidden else ""
    return (
        f'<rect x="{x + wide * rank:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{WIDE}" '
        f'{looks}fill="{page.colour(rank)}">{inside}</rect>'
    )


def cell(x: float, y: float) -> str:
    return (
        f'<rect class="cell" x="{x}" y="{y}" width="{circle.CELL}" height="{circle.CELL}" rx="4"/>'
    )


def node(frames: list[Frame], rank: int, whole_s: float) -> str:
    """Draw a rank, with stripes that appear when their numbers have arrived."""
    x, y = circle.place(rank, WORLD_SIZE)
    wide = WORLD_SIZE * (circle.CELL + circle.GAP) + 14
    top = y - circle.NODE_HEIGHT / 2
    parts = [
        f'<rect class="node" x="{x - wide / 2:.1f}" y="{top:.1f}" width="{wide}" '
        f'height="{circle.NODE_HEIGHT}" rx="12"/>',
        f'<circle cx="{x - 29:.1f}" cy="{top + 20:.1f}" r="7" fill="{page.colour(rank)}"/>',
        f'<text class="words" x="{x - 16:.1f}" y="{top + 26:.1f}" font-weight="700">'
        f"rank {rank}</text>",
    ]
    for index in range(WORLD_SIZE):
        left, above = circle.cell_place(rank, index, WORLD_SIZE, WORLD_SIZE)
        parts.append(cell(left, above))
        known: frozenset[int] = frozenset()
        for number, frame in enumerate(frames):
            owners = ranks_of(circle.cells_of(frame, rank)[index])
            for owner in sorted(owners - known):
                arrived_s = REST_S + (number - 1) * HOP_S + TRAVEL_S
                inside = shown_from(arrived_s, whole_s) if number else ""
                parts.append(stripe(left + 4, above + 4, owner, inside, hidden=bool(number)))
            known |= owners
    return "".join(parts)


def message(frame: Frame, number: int, whole_s: float) -> str:
    """Draw what a rank sends in hop `number`, travelling along the circle."""
    rank, (_, marked) = frame.event.rank, frame.marked[frame.event.rank]
    begin_s = REST_S + number * HOP_S
    # Over the cell that it leaves, along the circle, and over the cell in which it arrives.
    ends = [
        circle.cell_place(each, marked.start, WORLD_SIZE, WORLD_SIZE)
        for each in (rank, frame.event.peer)
    ]
    between = [circle.place(rank + part / 8, WORLD_SIZE) for part in range(2, 7)]
    half = circle.CELL / 2
    points = [ends[0], *((x - half, y - half) for x, y in between), ends[1]]
    way = "M" + " L".join(f"{x:.1f},{y:.1f}" for x, y in points)
    times = f"0;{begin_s / whole_s:.4f};{(begin_s + TRAVEL_S) / whole_s:.4f};1"
    moves = (
        f'<animateMotion dur="{whole_s}s" repeatCount="indefinite" calcMode="linear" path="{way}" '
        f'keyTimes="{times}" keyPoints="0;0;1;1"/>'
    )
    stripes = "".join(stripe(4, 4, each) for each in sorted(ranks_of(frame.owners[0])))
    visible = shown_from(begin_s, whole_s, begin_s + TRAVEL_S)
    return f'<g opacity="0">{visible}{moves}{cell(0, 0)}{stripes}</g>'


def draw(frames: list[Frame]) -> str:
    """Write the SVG. frames: of a ring, hop by hop, and the end."""
    *hops, _ = frames
    whole_s = REST_S + len(hops) * HOP_S + END_S
    said = (
        "Four ranks in a ring add up four numbers each: every cell has a slot for each rank, "
        "filled when its number is in the sum"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 40 {circle.WIDTH} 590" role="img" '
        f'aria-label="{said}" font-family="system-ui, sans-serif" font-size="18">',
        f"<style>{STYLE}</style>",
        f'<rect class="ground" y="40" width="{circle.WIDTH}" height="590" rx="14"/>',
        f'<ellipse class="ring" cx="{circle.MIDDLE_X}" cy="{circle.MIDDLE_Y}" '
        f'rx="{circle.RADIUS_X}" ry="{circle.RADIUS_Y}"/>',
        *(node(frames, rank, whole_s) for rank in range(WORLD_SIZE)),
    ]
    for number, hop in enumerate(hops):
        parts += [message(each, number, whole_s) for each in hop.sent]
    middle = f'x="{circle.MIDDLE_X}" text-anchor="middle"'
    titles = [f"hop {number} of {len(hops)}" for number in range(1, len(hops) + 1)]
    for number, title in enumerate([*titles, "every rank has every sum"]):
        begin_s = REST_S + number * HOP_S
        until_s = begin_s + HOP_S if number < len(hops) else None
        shown = shown_from(begin_s, whole_s, until_s)
        parts.append(
            f'<text class="words" {middle} y="330" font-size="24" opacity="0">{title}{shown}</text>'
        )
    for y, note in ((360, "recorded from a real run"), (382, "of four processes, slowed down")):
        parts.append(f'<text class="pale" {middle} y="{y}" font-size="16">{note}</text>')
    parts.append("</svg>\n")
    return "\n".join(parts)


def record() -> str:
    """Run the ring, and return its picture."""

    def all_reduce() -> list[float]:
        x = torch.full((WORLD_SIZE,), 10.0 ** dist.get_rank())
        return ring_all_reduce(x).tolist()

    run = launch(all_reduce, world_size=WORLD_SIZE, keep_values=True)
    return draw(hop_by_hop(film(replay(run), run.wire), run))


if __name__ == "__main__":
    TARGET.write_text(record(), encoding="utf-8")
    print(TARGET)
