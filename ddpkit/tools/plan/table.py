"""Write predicted plans as a table of text."""

from collections.abc import Sequence

from ..units import duration, size
from .program import AGAIN, COMPUTING
from .search import Prediction
from .shape import SHARDINGS

HEAD = "mesh", "sharding", "m", "step", "memory", "computing", "tensor", "pipeline", "data"
LEGEND = """\
mesh: data × tensor × pipeline; m: micro-batches, * with checkpoints.
Of the step: computing, and waiting for each axis; memory: of the
fullest rank."""


def table(found: Sequence[Prediction]) -> str:
    """Return a table of plans as text, a line each and a legend, with what the step's time goes to.

    found: the predictions, in the order of the lines. The optimizer's update, and waiting for all
    ranks, have no column, so that shares of the step may add up to less than all of it.
    """
    rows = [HEAD, *map(row, found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for cells in rows:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        lines.append(" ".join(padded).rstrip())
    return "\n".join([*lines, LEGEND])


def row(found: Prediction) -> tuple[str, ...]:
    """Return the cells of a plan's line, in the order of HEAD."""
    plan = found.plan
    mesh = f"{plan.data}×{plan.tensor}×{plan.pipeline}"
    sharding = SHARDINGS[plan.sharding] if plan.data > 1 else "-"
    micro_batches = f"{plan.micro_batches}{'*' if plan.checkpoint else ''}"
    computing = found.mean(COMPUTING) + found.mean(AGAIN)
    parts = [computing, found.mean("tensor"), found.mean("pipeline"), found.mean("data")]
    shares = [f"{part / found.seconds:.0%}" for part in parts]
    return (mesh, sharding, micro_batches, duration(found.seconds), size(found.room.total), *shares)
