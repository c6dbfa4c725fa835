"""Notebook 10's pictures of a pipeline: a schedule as planned or as it ran, and its bubble.

A schedule has a list for each rank, the actions in the order in which it does them, such as
[["0F0", "0B0"], ["1F0", "1B0"]]. "1F0" is pipeline stage 1's forward of micro-batch 0. The letter
is F for a forward, B for a backward, and I or W for a part of a backward: I computes the gradient
of the stage's input, W those of its weights. The bubble is the idle share of the ranks' time. Every
rank's time counts from the start of the first action on any rank to the end of the last action on
any. A stage holds the activations of a micro-batch from the start of its forward to the end of its
B or, if split, its W.

A planned schedule is simulated. The keyword arguments `ticks` say how long its actions take, by
default F=1, B=2, I=1, W=1; messages take no time. Each stage, from 0 on, needs an F of every
micro-batch, and a B or both I and W. A ValueError refuses other schedules, and those in which an
action is malformed or occurs twice, a stage is on two ranks, or ranks wait in a cycle.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

from ..pipeline import dry_run, schedules
from ..tools.units import count, wrap
from . import page
from .page import Picture
from .widgets import Calculator, Slider, StepThrough

Spans = Mapping[str, tuple[float, float]]  # {action: (begin, end)}
Timed = Sequence[tuple[str, float, float]]  # (action, begin, end) in seconds

KINDS = {  # {kind of action: (name, opacity of the rank's colour, hatch)}
    "F": ("forward", 0.25, None),
    "B": ("backward", 1.0, None),
    "I": ("backward: input part", 0.6, None),
    "W": ("weight part", 0.1, "///"),
}


def draw(schedule: schedules.Schedule, until: float | None = None, **ticks: float) -> Picture:
    """Draw a simulated run of a pipeline schedule: a row for each rank, a box for each action.

    A box has the number of its micro-batch, if that fits. Primes after it, as in 3′ or 3′′, mark
    the second or third pipeline stage of the rank. Used in notebook 10.

    until: draw only actions that begin before this tick, and a line at it; None: draw all.
    ticks: how long a forward F, a backward B, its input part I and its weight part W take.
    ValueError: the schedule is refused.
    """
    rows = _planned(schedule, ticks)
    whole = max(end for row in rows for _, end in row.values())
    said = f"{whole:g} ticks; {_idle(rows):.0%} of the ranks' time is idle."
    return _draw(rows, "ticks", said, until)


def draw_run(spans: Sequence[Timed]) -> Picture:
    """Draw what the ranks of a pipeline really did, and when, as measured. Used in notebook 10.

    The alt text lists the actions and states no times, since they differ from run to run.

    spans: for each rank, its `Pipeline.spans` after a step, which is [(action, begin, end)] in
        seconds, with actions such as "1F0", stage 1's forward of micro-batch 0.
    """
    rows = _measured(spans)
    said = "\n".join(f"rank {rank}: {' '.join(row)}" for rank, row in enumerate(rows))
    return _draw(rows, "time (ms)", wrap(f"As it ran:\n{said}"))


def bubble(schedule: schedules.Schedule, **ticks: float) -> float:
    """Return the idle share of all ranks' time in a simulated run: 0.25 is a quarter of it.

    ticks: how long a forward F, a backward B, its input part I and its weight part W take.
    ValueError: the schedule is refused.
    """
    return _idle(_planned(schedule, ticks))


def bubble_of_run(spans: Sequence[Timed]) -> float:
    """Return the idle share of all ranks' time in a measured run: 0.25 is a quarter of it.

    Each rank's time goes from the first begin to the last end on any rank; waiting for messages is
    idle. spans: for each rank, its `Pipeline.spans`, [(action, begin, end)] in seconds, in order.
    """
    return _idle(_measured(spans))


def _planned(schedule: schedules.Schedule, ticks: Mapping[str, float]) -> list[Spans]:
    """Return, for each rank, {action: (begin, end)} in ticks, by a simulated run of `schedule`.

    ticks: the ticks of an action of each kind, such as {"F": 1, "B": 2}.
    """
    when, rows = dry_run.simulate(schedule, **ticks), []
    for actions in schedule:
        rows.append({action: when[action] for action in map(str, actions)})
    return rows


def _measured(spans: Sequence[Timed]) -> list[Spans]:
    """Return, for each rank, {action: (begin, end)} in ms since the first action on any rank began.

    spans: for each rank, [(action, begin, end)] in order, at least one, in seconds of one clock.
    """
    start, rows = min(row[0][1] for row in spans), []
    for row in spans:
        rows.append({action: (1e3 * (a - start), 1e3 * (b - start)) for action, a, b in row})
    return rows


def _idle(rows: Sequence[Spans]) -> float:
    """Return the idle share of all ranks' time, from time 0 to the last end on any rank.

    rows: for each rank, {action: (begin, end)}; time 0 is the start of the first action on any.
    """
    whole = max(end for row in rows for _, end in row.values())
    busy = sum(end - begin for row in rows for begin, end in row.values())
    return 1 - busy / (whole * len(rows))


def _draw(rows: Sequence[Spans], unit: str, said: str, until: float | None = None) -> Picture:
    """Draw a row of boxes for each rank, a box for each of its actions.

    rows: for each rank, {action: (begin, end)}. unit: the x axis's label, such as "time (ms)".
    said: the alt text.
    until: show the schedule at this time: leave out actions that begin then or later, draw the
        others whole, and draw a line there. None: draw all, without a line.
    """
    whole = max(end for row in rows for _, end in row.values())
    figure, (axes,) = page.chart("", min(page.TALLEST, 170 + 50 * len(rows)))
    longest = max(len(_number(action, row)) for row in rows for action in row)
    fits = whole * 11 * longest / 760  # what a number's text spans: 760 pixels are `whole`
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
    """Return the text of an action's box: its micro-batch, perhaps with prime marks, such as 3′.

    The marks tell the rank's stages apart: none for its lowest stage, one for its next, and so on.

    row: the actions of that rank, as {action: (begin, end)}; only the actions are used.
    """
    stage, _, micro_batch = schedules.parse(action)
    stages = sorted({schedules.parse(other)[0] for other in row})
    return f"{micro_batch}{'′' * stages.index(stage)}"


def schedule_player(schedule: schedules.Schedule, **ticks: float) -> StepThrough:
    """Return a widget with a slider that steps through a simulated pipeline run, tick by tick.

    It shows what each rank does, and the number of micro-batches whose activations it holds; one
    that is held in two of the rank's stages counts twice. Used in notebook 10.

    ticks: how long a forward F, a backward B, its input part I and its weight part W take. Give
        whole numbers: the widget misses an action that begins and ends inside one tick.
    ValueError: the schedule is refused.
    """
    when = dry_run.simulate(schedule, **ticks)
    whole = math.ceil(max(end for _, end in when.values()))

    def now(tick: int) -> list[tuple[str, int]]:
        """Return, for each rank, (action, micro-batches held) in tick number `tick`, from 1.

        The action is a text such as "1F0", or "-" if the rank is idle. A micro-batch that is held
        in two of the rank's stages counts twice.
        """
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
    """Return the action that a rank does just before the time `tick`, or "-" if it is idle then.

    actions: the rank's actions, in order. when: {action: (begin, end)} in ticks.
    """
    found = [action for action in actions if when[action][0] < tick <= when[action][1]]
    return found[0] if found else "-"


def _held(actions: Sequence[str], when: Spans, tick: int) -> int:
    """Count the micro-batches whose activations a rank holds in the tick that ends at `tick`.

    A micro-batch is held in a stage from the start of its forward, such as "1F0", to the end of its
    backward "1B0", or, if that is split in two, of the part for the weights, "1W0". One that is
    held in several of the rank's stages counts in each.

    actions: the rank's actions, in order. when: {action: (begin, end)} in ticks.
    """
    begun = sum(_holds(action) > 0 for action in actions if when[action][0] < tick)
    over = sum(_holds(action) < 0 for action in actions if when[action][1] < tick)
    return begun - over


def _holds(action: str) -> int:
    """Return how an action changes the number of micro-batches held: F 1; B or W -1; I 0."""
    return {"F": 1, "B": -1, "I": 0, "W": -1}[schedules.parse(action)[1]]


def held_by_rank(schedule: schedules.Schedule, stages_a_rank: int = 1) -> list[float]:
    """Return, for each rank, the most micro-batches whose activations it holds at the same time.

    Activations are held from a forward to the end of its backward B or, if split, its part W. A
    micro-batch that is held in one of a rank's n pipeline stages counts as 1/n, since such a stage
    has 1/n of the rank's layers.

    schedule: for each rank, its actions in order. stages_a_rank: n, the same on every rank.
    """
    return [max(itertools.accumulate(map(_holds, row))) / stages_a_rank for row in schedule]


SCHEDULES = {
    "GPipe": schedules.gpipe,
    "1F1B": schedules.one_f_one_b,
    "interleaved": schedules.interleaved,
    "zero bubble": schedules.zero_bubble,
}


def pipeline_calculator() -> Calculator:
    """Return a widget that draws a schedule; sliders set its kind ("1F1B"), ranks, micro-batches.

    Its caption states the bubble, which is the idle share of the ranks' time, and for each rank the
    most micro-batches whose activations it holds at a time. On a rank with two stages, one held in
    a stage counts as half, since a stage has half of the layers. Used in notebook 10.
    """
    return Calculator(
        plan,
        stages=Slider("ranks", [1, 2, 3, 4, 6, 8], 4),
        micro_batches=Slider("micro-batches", [1, 2, 4, 8, 16, 32], 8),
        schedule=Slider("schedule", list(SCHEDULES), "1F1B"),
    )


def plan(stages: int, micro_batches: int, schedule: str) -> tuple[str, Picture]:
    """Return (caption, picture) of a simulated schedule, for one setting of `pipeline_calculator`.

    The caption states the bubble, and the most micro-batches that each rank holds at a time.
    stages: the number of ranks. Each has one pipeline stage or, if `schedule` is "interleaved",
        two, whose actions take half as long.
    micro_batches: the number of micro-batches in a step.
    schedule: "GPipe", "1F1B", "interleaved" or "zero bubble", a key of SCHEDULES.
    """
    made = SCHEDULES[schedule](stages, micro_batches)
    thin = {"F": 0.5, "B": 1.0} if schedule == "interleaved" else {}  # two stages a rank
    picture = draw(made, **thin)
    most = held_by_rank(made, stages_a_rank=2 if thin else 1)
    caption = (
        f"{schedule}, {count(stages, 'rank')}, m = {micro_batches}: "
        f"{picture.text} Held at most, by rank: {', '.join(f'{number:g}' for number in most)}."
    )
    return caption, picture
