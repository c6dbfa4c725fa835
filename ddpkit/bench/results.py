"""Results of a benchmark, and the claims they support: paired ratios with an interval, goals."""

import json
import os
import platform
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from .. import cost
from ..tools import units

FOLDER = Path("bench-results")
AGAIN = " again"  # after the baseline's name: the same code, timed a second time in every round
RESAMPLES = 2000
PAGE = 72  # characters that a line has room for
SPEED = """\
Speed: how many times as fast as the first, round by round, with its
95 % interval. A/A: the first against itself; inside may be chance."""


class Ratio(NamedTuple):
    """The median of something over the rounds, and its 95 % interval."""

    median: float
    low: float
    high: float

    def __str__(self):
        median, low, high = (f"{value:{'.2f' if value < 10 else '.3g'}}" for value in self)
        return f"{median} [{low}–{high}]"


@dataclass
class Result:
    """The times of one variant in one case.

    operation: its work; a collective as `cost.bus_bandwidth` names it, for example "all_reduce".
    nbytes: of the tensor or of all parameters; with 0, the case's title is `operation` alone.
    seconds: one for each round, until the last rank was done.
    ceiling: the variant that moves as many bytes in the plainest way, the best this one could do.
    columns: {heading: text of a further column, beside time and speed}.
    """

    operation: str
    variant: str
    world_size: int
    nbytes: int
    seconds: tuple[float, ...]
    ceiling: str = ""
    columns: dict[str, str] = field(default_factory=dict)

    @property
    def case(self) -> str:
        """The title of the table, the same for all variants that took turns with this one."""
        size = f", {self.world_size} processes, {self.size}" if self.nbytes else ""
        return f"{self.operation}{size}"

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def busbw(self) -> float:
        """Bytes per second of a ring: see `cost.bus_bandwidth`. ValueError: not a collective."""
        return cost.bus_bandwidth(self.operation, self.nbytes, self.median_s, self.world_size)

    @property
    def size(self) -> str:
        return units.round_size(self.nbytes)


def results_of(
    operation: str, seconds: dict[str, tuple[float, ...]], world_size: int = 1, nbytes: int = 0
) -> list[Result]:
    """Make the results of a case, without columns. seconds: {variant: of each round}, of `race`."""
    return [Result(operation, name, world_size, nbytes, s) for name, s in seconds.items()]


class Results(list[Result]):
    """Results in the order of their measurement; printed, they are a table for each case.

    In each case the first is the baseline. legend: the text below the tables. time: the heading of
    the medians.
    """

    def __init__(self, results: Iterable[Result] = (), legend: str = SPEED, time: str = "Time"):
        super().__init__(results)
        self.legend, self.time = legend, time

    def cases(self) -> dict[str, dict[str, Result]]:
        """Group the results that took turns: {title: {variant: result}}."""
        found = {}
        for result in self:
            found.setdefault(result.case, {})[result.variant] = result
        return found

    def speed(self, result: Result, against: str | None = None) -> Ratio:
        """Compare `result` with the variant `against` (None: the baseline): times as fast."""
        rivals = self.cases()[result.case]
        return paired_ratio(rivals[against or next(iter(rivals))], result)

    def control(self, result: Result) -> Ratio:
        """Compare the baseline's second turns with its first ones (A/A), in `result`'s case."""
        rivals = self.cases()[result.case]
        baseline = next(iter(rivals))
        return self.speed(rivals.get(baseline + AGAIN, rivals[baseline]))

    def verdict(self, result: Result) -> str:
        """Say 'faster' or 'slower' than the baseline; 'unclear' where it may be chance.

        It may where 1 is in the speed's interval, or A/A's is at least as wide as the gain.
        """
        speed, control = self.speed(result), self.control(result)
        chance = control.high - control.low
        if speed.low > 1 and speed.median - 1 > chance:
            return "faster"
        if speed.high < 1 and 1 / speed.median - 1 > chance:
            return "slower"
        return "unclear"

    def fraction(self, result: Result) -> float | None:
        """The part of its ceiling's speed that `result` reaches; None if no ceiling was timed."""
        ceiling = self.cases()[result.case].get(result.ceiling)
        return ceiling.median_s / result.median_s if ceiling else None

    @property
    def competing(self) -> "Results":
        """Select the results that are neither ceilings nor the baseline's second time."""
        ceilings = {result.ceiling for result in self}
        rivals = [result for result in self if result.variant not in ceilings]
        return Results(result for result in rivals if not result.variant.endswith(AGAIN))

    def __repr__(self):
        blocks = []
        for title, rivals in self.cases().items():
            baseline = next(iter(rivals.values()))
            lines = [("", self.time, *baseline.columns, "Speed [95 %]", "")]
            for result in rivals.values():
                speed, verdict = self.speed(result), self.verdict(result)
                if result is baseline:
                    speed, verdict = self.control(result), "A/A"
                cells = units.duration(result.median_s), *result.columns.values()
                if not result.variant.endswith(AGAIN):
                    lines.append((result.variant, *cells, str(speed), verdict))
            blocks.append(f"{title}\n{table(lines)}")
        return "\n\n".join([*blocks, self.legend]) if self else "nothing measured"


def table(lines: Sequence[Sequence[str]]) -> str:
    """Return text with the cells in columns, the first aligned left, all others right.

    Columns are two spaces apart, or one where a line would be longer than `PAGE`.
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    gap = "  " if sum(widths) + 2 * len(widths) - 2 <= PAGE else " "
    text = []
    for what, *cells in lines:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        text.append(gap.join([what.ljust(widths[0]), *padded]).rstrip())
    return "\n".join(text)


def paired_ratio(baseline: Result, result: Result) -> Ratio:
    """Compare `result` with `baseline` round by round: times as fast, the median and its interval.

    The interval is the bootstrap's: rounds are drawn with replacement, always the same draws.
    Efron 1979.
    """
    those = torch.tensor(baseline.seconds, dtype=torch.float64)
    these = torch.tensor(result.seconds, dtype=torch.float64)
    ratios = those / these
    rounds = len(these)
    draws = torch.randint(rounds, (RESAMPLES, rounds), generator=torch.Generator().manual_seed(0))
    medians = ratios[draws].quantile(0.5, dim=1)
    low, high = medians.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Ratio(ratios.quantile(0.5).item(), low, high)


# Goals


class Goal(NamedTuple):
    """`variant` is at least `times` as fast as `against`, in the cases that `at` finds.

    at: a regular expression, searched in the case's title; "" is all of them.
    """

    variant: str
    against: str
    times: float
    at: str = ""

    def verdict(self, speed: Ratio) -> str:
        """Say 'yes' or 'NO'; 'close' where the goal lies inside the interval."""
        return "yes" if speed.low >= self.times else "NO" if speed.high < self.times else "close"

    def __str__(self):
        return f"{self.variant} ≥ {self.times:.3g} × {self.against}"


def judge(goals: Sequence[Goal], results: Results) -> list[dict[str, str]]:
    """Judge each goal in each case that has it; the keys are "case", "goal", "measured", "met"."""
    found = []
    for title, rivals in results.cases().items():
        for goal in goals:
            if re.search(goal.at, title) and {goal.variant, goal.against} <= rivals.keys():
                speed = results.speed(rivals[goal.variant], goal.against)
                about = {"case": title, "goal": str(goal), "measured": str(speed)}
                found.append(about | {"met": goal.verdict(speed)})
    return found


# For `python -m ddpkit.bench`


def report(
    name: str,
    results: Results,
    goals: Sequence[Goal] = (),
    draw: Callable = dict,
    where: str = f"{os.cpu_count()} cores, one thread a rank",
) -> None:
    """Print tables and goals; keep the goals, the pictures and every single time in `FOLDER`.

    draw: returns {what: picture, with its bytes in `.png`}; an ImportError of it is only printed.
    """
    print(f"{name}, on {where}\n\n{results}\n")
    judged = judge(goals, results)
    title = None
    for verdict in judged:
        if verdict["case"] != title:
            title = verdict["case"]
            print(f"Goals: {title}")
        print(f"{verdict['met']:5}  {verdict['measured']:16}  {verdict['goal']}")
    kept = [asdict(result) | {"median_s": result.median_s} for result in results]
    save(name, {"results": kept, "goals": judged})
    try:
        for what, picture in draw().items():
            (FOLDER / f"{name}_{what}.png").write_bytes(picture.png)
    except ImportError as missing:
        print(f"no pictures: {missing.name} isn't installed here")


def save(name: str, found: dict) -> None:
    """Keep what was found, and on what machine, in FOLDER/NAME.json."""
    FOLDER.mkdir(exist_ok=True)
    machine = {"cores": os.cpu_count(), "system": platform.platform(), "torch": torch.__version__}
    text = json.dumps({"machine": machine, **found}, indent=1)
    (FOLDER / f"{name}.json").write_text(text + "\n")
