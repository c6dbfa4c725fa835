"""What a benchmark found, and what may be said of it: paired ratios with an interval, goals."""

import json
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from ..tools import cost, units

FOLDER = Path("bench-results")
AGAIN = " again"  # after the baseline's name: the same code, timed a second time in every round
RESAMPLES = 2000
SPEED = """\
Speed: how many times as fast as the first, round by round, with its 95 %
interval. A/A: the first against itself; what is inside may be chance."""


class Ratio(NamedTuple):
    """The median of something over the rounds, and its 95 % interval."""

    median: float
    low: float
    high: float

    @property
    def inverse(self) -> "Ratio":
        return Ratio(1 / self.median, 1 / self.high, 1 / self.low)

    def __str__(self):
        return f"{self.median:.2f} [{self.low:.2f}–{self.high:.2f}]"


@dataclass(frozen=True)
class Result:
    """The times of one variant in one world with one size.

    operation: what it does, in the words of `cost.bus_bandwidth` where it is a collective.
    seconds: one for each round, of all ranks together.
    ceiling: the variant that moves as many bytes in the plainest way: what this one could reach.
    emulated: the link that stood in for the machine's own wire, if one did.
    """

    operation: str
    variant: str
    world_size: int
    nbytes: int
    seconds: tuple[float, ...]
    ceiling: str = ""
    emulated: str = ""

    @property
    def case(self) -> tuple:
        """Alike for all that took turns with this one."""
        return self.operation, self.emulated, self.world_size, self.nbytes

    @property
    def again(self) -> bool:
        return self.variant.endswith(AGAIN)

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def algbw(self) -> float:
        """Bytes of the whole tensor per second."""
        return cost.algorithm_bandwidth(self.nbytes, self.median_s)

    @property
    def busbw(self) -> float:
        """Bytes per second that a rank must send at least: the bus bandwidth of nccl-tests."""
        return cost.bus_bandwidth(self.operation, self.nbytes, self.median_s, self.world_size)

    @property
    def size(self) -> str:
        return units.round_size(self.nbytes)


class Results(list[Result]):
    """Results in the order of their measurement; printed, they are a table for each case.

    A benchmark that measures more has a subclass, whose `columns` and `cells` come before the
    comparison with the first variant.
    """

    columns: tuple[str, ...] = "Time (ms)", "algbw", "busbw", "Reached"
    legend = f"""\
Time: the median, until the last rank is done. Bandwidths: GB/s. Reached: of
the speed of loopback, or, through shared memory, of memcpy.
{SPEED}"""

    def title(self) -> str:
        """Of a single case."""
        first = self[0]
        wire = f", emulated: {first.emulated}" if first.emulated else ""
        return f"{first.operation}, {first.world_size} processes, {first.size}{wire}"

    def cells(self, result: Result) -> tuple[str, ...]:
        fraction = self.fraction(result)
        return (
            f"{result.median_s * 1e3:.3f}",
            f"{result.algbw / 1e9:.3g}",
            f"{result.busbw / 1e9:.3g}",
            f"{100 * fraction:.0f} %" if fraction else "",
        )

    def cases(self) -> list["Results"]:
        """Those that took turns, together."""
        found = {}
        for result in self:
            found.setdefault(result.case, type(self)()).append(result)
        return list(found.values())

    def rivals(self, result: Result) -> dict[str, Result]:
        """All that took turns with `result`, by variant; the first is the baseline."""
        return {each.variant: each for each in self if each.case == result.case}

    def speed(self, result: Result, against: str | None = None) -> Ratio:
        """How many times as fast `result` is as the variant `against` (None: the baseline)."""
        rivals = self.rivals(result)
        return paired_ratio(rivals[against] if against else next(iter(rivals.values())), result)

    def control(self, result: Result) -> Ratio | None:
        """A/A: the baseline's second time against its first. None: it was timed once."""
        rivals = self.rivals(result)
        again = rivals.get(next(iter(rivals)) + AGAIN)
        return self.speed(again) if again else None

    def verdict(self, result: Result) -> str:
        """'faster' or 'slower' than the baseline, or 'unclear'."""
        speed, control = self.speed(result), self.control(result)
        if wins(speed, control):
            return "faster"
        return "slower" if wins(speed.inverse, control) else "unclear"

    def fraction(self, result: Result) -> float | None:
        """The part of its ceiling's speed that `result` reaches; None if none was timed."""
        ceiling = self.rivals(result).get(result.ceiling)
        return ceiling.median_s / result.median_s if ceiling else None

    @property
    def competing(self) -> "Results":
        """Without the ceilings and the baseline's second time."""
        apart = {each.ceiling for each in self} | {each.variant for each in self if each.again}
        return type(self)(each for each in self if each.variant not in apart)

    def comparison(self, result: Result) -> tuple[str, str]:
        """Speed and verdict; of the baseline A/A; nothing for a ceiling, which is no rival."""
        if result not in self.competing:
            return "", ""
        if next(iter(self.rivals(result))) != result.variant:
            return str(self.speed(result)), self.verdict(result)
        control = self.control(result)
        return (str(control), "A/A") if control else ("1", "")

    def __repr__(self):
        blocks = []
        for case in self.cases():
            lines = [("", *case.columns, "Speed [95 %]", "")]
            shown = [each for each in case if not each.again]
            lines += [(each.variant, *case.cells(each), *case.comparison(each)) for each in shown]
            blocks.append(f"{case.title()}\n{table(lines)}")
        return "\n\n".join([*blocks, self.legend]) if self else "nothing measured"


def table(lines: Sequence[Sequence[str]]) -> str:
    """Cells in columns, the first against the left, all others against the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = []
    for what, *cells in lines:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        text.append("  ".join([what.ljust(widths[0]), *padded]).rstrip())
    return "\n".join(text)


# Ratios


def paired_ratio(baseline: Result, result: Result) -> Ratio:
    """How many times as fast `result` is as `baseline`, round by round.

    The interval is the bootstrap's: rounds are drawn anew, with replacement, always the same draws.
    Efron 1979. ValueError: more rounds of one than of the other.
    """
    if len(baseline.seconds) != len(result.seconds):
        got = f"{len(baseline.seconds)} and {len(result.seconds)}"
        raise ValueError(f"expected as many rounds of both, got {got}: compare what took turns")
    those, these = (torch.tensor(each.seconds, dtype=torch.float64) for each in (baseline, result))
    ratios, rounds = those / these, len(these)
    draws = torch.randint(rounds, (RESAMPLES, rounds), generator=torch.Generator().manual_seed(0))
    medians = ratios[draws].quantile(0.5, dim=1)
    low, high = medians.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Ratio(ratios.quantile(0.5).item(), low, high)


def wins(speed: Ratio, control: Ratio | None) -> bool:
    """Whether the interval is above 1, and the gain more than the control's interval is wide."""
    return speed.low > 1 and (control is None or speed.median - 1 > control.high - control.low)


# Goals


@dataclass(frozen=True)
class Goal:
    """`variant` is at least `times` as fast as `against`; `at_most`: takes at most as long.

    at: the (world size, bytes) that it is about; none: all. upto: where the interval may end,
    if the goal is met by the median.
    """

    variant: str
    against: str
    times: float
    at_most: bool = False
    at: tuple[tuple[int, int], ...] = ()
    upto: float | None = None

    def measured(self, case: Results) -> Ratio | None:
        """The ratio that the goal is about; None if it was not measured."""
        here, rivals = (case[0].world_size, case[0].nbytes), case.rivals(case[0])
        if not {self.variant, self.against} <= rivals.keys() or (self.at and here not in self.at):
            return None
        speed = case.speed(rivals[self.variant], self.against)
        return speed.inverse if self.at_most else speed

    def verdict(self, ratio: Ratio) -> str:
        """'yes' or 'NO'; 'close' where the goal lies inside the interval."""
        if self.upto and ratio.median <= self.times and ratio.high <= self.upto:
            return "yes"
        if self.at_most:
            met, missed = ratio.high <= self.times, ratio.low > self.times
        else:
            met, missed = ratio.low >= self.times, ratio.high < self.times
        return "yes" if met else "NO" if missed else "close"

    @property
    def text(self) -> str:
        sign, of = ("≤", "time") if self.at_most else ("≥", "speed")
        upto = f", interval up to {self.upto:g}" if self.upto else ""
        return f"{self.variant} {sign} {self.times:g} × {of} of {self.against}{upto}"


def judge(goals: Iterable[Goal], results: Results) -> list[dict[str, str]]:
    """Every goal, in every case in which it was measured: case, goal, measured, and met."""
    goals, found = list(goals), []
    for case in results.cases():
        for goal in goals:
            ratio = goal.measured(case)
            if ratio:
                about = {"case": case.title(), "goal": goal.text, "measured": str(ratio)}
                found.append(about | {"met": goal.verdict(ratio)})
    return found


# For `python -m ddpkit.bench`


def report(
    name: str, where: str, results: Results, judged: Sequence[dict] = (), draw: Callable = dict
) -> None:
    """Print tables and goals; keep them, the pictures and every single time in `FOLDER`.

    draw: returns {what: picture}; without matplotlib it may raise ImportError.
    """
    print(f"{name}, on {where}\n\n{results}\n")
    for number, each in enumerate(judged):
        if not number or each["case"] != judged[number - 1]["case"]:
            print(f"Goals: {each['case']}")
        print(f"{each['met']:5}  {each['measured']:16}  {each['goal']}")
    kept = [asdict(each) | {"median_s": each.median_s} for each in results]
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
