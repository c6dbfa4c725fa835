"""Notebook 10's pictures of a pipeline: a schedule as planned or as it ran, tick by tick, and the
bubble by stages, micro-batches and schedule.
"""

import itertools
from collections.abc import Mapping, Sequence

from ..pipeline import dry_run, schedules
from ..tools.units import count, wrap
from . import page
from .page import Picture
from .widgets import Calculator, Slider, StepThrough

Spans = Mapping[str, tuple[float, float]]  # {action: (begin, end)}
Timed = Sequence[tuple[str, float, float]]  # (action, begin, end) in seconds

KINDS = {  # the look of a box: how much of the rank's colour, and a hatch
    "F": ("forward", 0.25, None),
    "B": ("backward", 1.0, None),
    "I": ("backward: input part", 0.6, None),
    "W": ("weight part", 0.1, "///"),
}


def draw(schedule: schedules.Schedule, until: float | None = None, **ticks: float) -> Picture:
    """Draw a dry run of `schedule`: a row for each rank, a box for each action's micro-batch.

    until: leave out what begins at this tick or later. ticks: as for `dry_run.simulate`.
    Micro-batches on a rank's second or third stage have a stroke or two: 3′, 3″. Notebook 10.
    """
    rows = _planned(schedule, ticks)
    whole = max(end for row in rows for _, end in row.values())
    said = f"{whole:g} ticks; {_idle(rows):.0%} of the ranks' time is idle."
    return _draw(rows, "ticks", said, until)


def draw_run(spans: Sequence[Timed]) -> Picture:
    """Draw what ranks did and when, measured. spans: by rank, of `Pipeline`.

    The picture's text states no times. Notebook 10.
    """
    rows = _measured(spans)
    said = "\n".join(f"rank {rank}: {' '.join(row)}" for rank, row in enumerate(rows))
    return _draw(rows, "time (ms)", wrap(f"As it ran:\n{said}"))


def bubble(schedule: schedules.Schedule, **ticks: float) -> float:
    """Compute the idle share of all ranks' time by a dry run: 0.25 is a quarter of it.

    ticks: as for `dry_run.simulate`.
    """
    return _idle(_planned(schedule, ticks))


def bubble_of_run(spans: Sequence[Timed]) -> float:
    """Compute the idle share of all ranks' time in a measured run. spans: as for `draw_run`."""
    return _idle(_measured(spans))


def _planned(schedule: schedules.Schedule, ticks: Mapping[str, float]) -> list[Spans]:
    when, rows = dry_run.simulate(schedule, **ticks), []
    for actions in schedule:
        rows.append({action: when[action] for action in map(str, actions)})
    return rows


def _measured(spans: Sequence[Timed]) -> list[Spans]:
    """Convert measured spans to milliseconds, counted from the first begin on any rank."""
    start, rows = min(row[0][1] for row in spans), []
    for row in spans:
        rows.append({action: (1e3 * (a - start), 1e3 * (b - start)) for action, a, b in row})
    return rows


def _idle(rows: Sequence[Spans]) -> float:
    whole = max(end for row in rows for _, end in row.values())
    busy = sum(end - begin for row in rows for begin, end in row.values())
    return 1 - busy / (whole * len(rows))


def _draw(rows: Sequence[Spans], unit: str, said: str, until: float | None = None) -> Picture:
    whole = max(end for row in rows for _, end in row.values())
    figure, (axes,) = page.chart("", min(page.TALLEST, 170 + 50 * len(rows)))
    longest = max(len(_number(action, row)) for row in rows for action in row)
    fits = whole * 11 * longest / 760  # ticks that a number needs: 760 pixels are `whole`
    for rank, row in enumerate(rows):
        for action, (begin, end) in row.items():
            if until is not None and begin >= until:
                continue
            kind = schedules.parse(action)[1]
            _, strength, hatch = KINDS[kind]
            style = {"fc": (page.colour(rank), strength), "hatch": hatch, "ec": "black", "lw": 0.8}
            axes.broken_barh([(begin, end - begin)], (rank - 0.4, 0.8), **style)
            if end - begin > fits:
                fill = page.colour(rank) if kind == "B" else "white"
                under = {"fc": "white", "ec": "none", "pad": 1} if hatch else None
                number = _number(action, row)
                page.write_on(axes, (begin + end) / 2, rank, number, fill, bbox=under)
    if until is not None:
        axes.axvline(until, color="black", lw=2, ls=page.DASHES)
    axes.set(xlim=(0, whole), ylim=(len(rows) - 0.5, -0.5), xlabel=unit)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_yticks(range(len(rows)), [f"rank {rank}" for rank in range(len(rows))])
    axes.tick_params(axis="y", length=0)
    kinds = {schedules.parse(action)[1] for row in rows for action in row}
    looks = []
    for kind, (name, strength, hatch) in KINDS.items():
        if kind in kinds:
            looks.append(page.patch(name, (page.BLUE, strength)))
            looks[-1].set_hatch(hatch)
    page.legend(figure, [*looks, page.patch("idle", page.EMPTY)])
    return Picture(figure, said)


def _number(action: str, row: Spans) -> str:
    """Write an action's micro-batch, with a stroke for each earlier stage of its rank: 3′."""
    stage, _, micro_batch = schedules.parse(action)
    stages = sorted({schedules.parse(other)[0] for other in row})
    return f"{micro_batch}{'′' * stages.index(stage)}"


def schedule_player(schedule: schedules.Schedule, **ticks: float) -> StepThrough:
    """Step through a dry run tick by tick: what each rank does, and what it holds. Notebook 10."""
    when = dry_run.simulate(schedule, **ticks)
    whole = int(max(end for _, end in when.values()))

    def now(tick: int) -> list[tuple[str, int]]:
        return [(_at(actions, when, tick), _held(actions, when, tick)) for actions in schedule]

    lines = ["0. nothing yet"]
    for tick in range(1, whole + 1):
        does, holds = zip(*now(tick), strict=True)
        lines.append(f"{tick}. {' '.join(does)}, held: {' '.join(map(str, holds))}")

    def look(tick: int) -> tuple[str, Picture]:
        if not tick:
            return "Before the first tick.", draw(schedule, 0, **ticks)
        told = []
        for rank, (does, holds) in enumerate(now(tick)):
            told.append(f"rank {rank}: {does.replace('-', 'idle')}, holds {holds}")
        return f"Tick {tick}. {'; '.join(told)}.", draw(schedule, tick, **ticks)

    return StepThrough(look, "tick", range(whole + 1), text="\n".join(lines), telling=whole)


def _at(actions: Sequence[str], when: Spans, tick: int) -> str:
    """Name the action that a rank does in the tick that ends at `tick`; "-": it is idle."""
    found = [action for action in actions if when[action][0] < tick <= when[action][1]]
    return found[0] if found else "-"


def _held(actions: Sequence[str], when: Spans, tick: int) -> int:
    """Count the micro-batches whose activations a rank holds in that tick."""
    begun = [schedules.parse(action)[1] for action in actions if when[action][0] < tick]
    over = [schedules.parse(action)[1] for action in actions if when[action][1] < tick]
    return begun.count("F") - over.count("B") - over.count("W")


def _holds(action: str) -> int:
    """Return by how much an action changes the number of micro-batches that a rank holds."""
    return {"F": 1, "B": -1, "I": 0, "W": -1}[schedules.parse(action)[1]]


def held_by_rank(schedule: schedules.Schedule, stages_a_rank: int = 1) -> list[float]:
    """Compute, by rank, the most micro-batches that it holds at a time, in all its layers.

    A micro-batch that is held in one of a rank's stages counts as that part of one.
    """
    return [max(itertools.accumulate(map(_holds, row))) / stages_a_rank for row in schedule]


SCHEDULES = {
    "GPipe": schedules.gpipe,
    "1F1B": schedules.one_f_one_b,
    "interleaved": schedules.interleaved,
    "zero bubble": schedules.zero_bubble,
}


def pipeline_calculator() -> Calculator:
    """Make sliders over stages, micro-batches and schedule that show the bubble. Notebook 10."""
    return Calculator(
        plan,
        stages=Slider("ranks", [1, 2, 3, 4, 6, 8], 4),
        micro_batches=Slider("micro-batches", [1, 2, 4, 8, 16, 32], 8),
        schedule=Slider("schedule", list(SCHEDULES), "1F1B"),
    )


def plan(stages: int, micro_batches: int, schedule: str) -> tuple[str, Picture]:
    """Return caption and picture of `pipeline_calculator` for one setting of its sliders."""
    made = SCHEDULES[schedule](stages, micro_batches)
    thin = {"F": 0.5, "B": 1.0} if schedule == "interleaved" else {}  # two stages a rank
    picture = draw(made, **thin)
    most = held_by_rank(made, stages_a_rank=2 if thin else 1)
    caption = (
        f"{schedule}, {count(stages, 'rank')}, m = {micro_batches}: "
        f"{picture.text} Held at most, by rank: {', '.join(f'{number:g}' for number in most)}."
    )
    return caption, picture
