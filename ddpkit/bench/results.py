"""What a benchmark found, and what may be said about it: ratios with their uncertainty, ceilings, goals."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..tools import cost
from . import table

AGAIN = " again"  # after the baseline's name: the same code, timed a second time in every round
RESAMPLES = 2000
HEADING = ("Backend", "Processes", "Size", "Avg time (ms)", "algbw", "busbw GB/s", "Reached")
HEADING += ("Speed [95 %]", "A/A", "")
BINARY, DECIMAL = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)), (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1))


class Ratio(NamedTuple):
    """How many times as fast one variant is as another: the median over the rounds, and its 95 % interval."""

    median: float
    low: float
    high: float

    @property
    def inverse(self) -> "Ratio":
        return Ratio(1 / self.median, 1 / self.high, 1 / self.low)

    def __str__(self):
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True)
class Result:
    """The times of one variant in one world with one size.

    operation: what it does, in the words of `cost.bus_bandwidth`. seconds: one for each round, of all ranks together.
    ceiling: the variant that moves as many bytes in the plainest way, and so shows what this one could reach.
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
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def algbw(self) -> float:
        """Bytes of the whole tensor per second."""
        return cost.algorithm_bandwidth(self.nbytes, self.median_s)

    @property
    def busbw(self) -> float:
        """Bytes per second that a rank sends if it sends no more than it must: nccl-tests' bus bandwidth."""
        return cost.bus_bandwidth(self.operation, self.nbytes, self.median_s, self.world_size)

    @property
    def size(self) -> str:
        return size_name(self.nbytes)


def size_name(nbytes: int) -> str:
    """25 MiB, 100 MB: bytes in the unit that makes them round."""
    binary = [(unit, factor) for unit, factor in BINARY if nbytes % factor == 0]
    decimal = [(unit, factor) for unit, factor in DECIMAL if nbytes >= factor]
    unit, factor = (binary + decimal)[0]
    return f"{nbytes / factor:.3g} {unit}"


class Results(list[Result]):
    """Results in the order of their measurement; printed, they are a table. `Results(a + b)` puts two together."""

    def rivals(self, result: Result) -> dict[str, Result]:
        """All variants that were timed in the same rounds as `result`, by name; the first is the baseline."""

        def rounds(each: Result) -> tuple:
            return each.operation, each.emulated, each.world_size, each.nbytes

        return {each.variant: each for each in self if rounds(each) == rounds(result)}

    def speed(self, result: Result, against: str | None = None) -> Ratio:
        """How many times as fast `result` is as the variant `against` (None: the baseline)."""
        rivals = self.rivals(result)
        return paired_ratio(rivals[against] if against else next(iter(rivals.values())), result)

    def control(self, result: Result) -> Ratio | None:
        """The baseline's second time against its first: what looks like a difference and is none. None: timed once."""
        rivals = self.rivals(result)
        again = rivals.get(next(iter(rivals)) + AGAIN)
        return self.speed(again) if again else None

    def verdict(self, result: Result) -> str:
        """'faster' or 'slower' than the baseline, or 'unclear': no difference that this measurement could tell."""
        speed, control = self.speed(result), self.control(result)
        if wins(speed, control):
            return "faster"
        return "slower" if wins(speed.inverse, control) else "unclear"

    def fraction(self, result: Result) -> float | None:
        """The part of its ceiling's speed that `result` reaches; None if no ceiling was timed beside it."""
        ceiling = self.rivals(result).get(result.ceiling)
        return ceiling.median_s / result.median_s if ceiling else None

    @property
    def competing(self) -> "Results":
        """Without the ceilings and the baseline's second time."""
        return Results(each for each in self if not self._is_ceiling(each) and not each.variant.endswith(AGAIN))

    def _is_ceiling(self, result: Result) -> bool:
        return any(result.variant == each.ceiling for each in self)

    def __repr__(self):
        if not self:
            return "nothing measured"
        blocks = []
        for link in dict.fromkeys(result.emulated for result in self):
            blocks += [f"emulated: {link}"] if link else []
            lines = [self._line(each) for each in self if each.emulated == link and not each.variant.endswith(AGAIN)]
            blocks.append(table([HEADING, *lines]))
        return "\n".join([*blocks, self._legend()])

    def _line(self, result: Result) -> tuple[str, ...]:
        fraction = self.fraction(result)
        return (
            result.variant,
            str(result.world_size),
            result.size,
            f"{result.median_s * 1e3:.3f}",
            f"{result.algbw / 1e9:.3g}",
            f"{result.busbw / 1e9:.3g}",
            f"{100 * fraction:.0f} % {result.ceiling}" if fraction else "",
            *self._comparison(result),
        )

    def _comparison(self, result: Result) -> tuple[str, str, str]:
        """Speed, A/A and verdict; nothing for a ceiling, which is no rival."""
        if self._is_ceiling(result):
            return "", "", ""
        control = self.control(result)
        again = f"{control.low:.2f}–{control.high:.2f}" if control else ""
        if next(iter(self.rivals(result))) == result.variant:
            return "1", again, ""
        return str(self.speed(result)), again, self.verdict(result)

    def _legend(self) -> str:
        counts = sorted({len(result.seconds) for result in self})
        rounds = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
        baselines = " or ".join(dict.fromkeys(next(iter(self.rivals(result))) for result in self))
        lines = [f"Avg time: the median of {rounds} rounds; a round lasts until its last rank is done."]
        if len(self.competing) > 1:
            lines.append(f"Speed: how many times as fast as {baselines}, round by round.")
        if any(map(self.control, self)):
            lines.append(f"A/A: {baselines} against itself; a gain smaller than this is wide may be chance.")
        return "\n".join(lines)


def paired_ratio(baseline: Result, result: Result) -> Ratio:
    """How many times as fast `result` is as `baseline`, round by round.

    ValueError: more rounds of one than of the other, so that they don't pair.

    The interval: as many rounds are drawn anew, with replacement, 2000 times; 95 % of their medians lie in it. The
    draws start from a fixed seed, so the same times give the same interval. Efron 1979.
    """
    if len(baseline.seconds) != len(result.seconds):
        got = f"{len(baseline.seconds)} of {baseline.variant}, {len(result.seconds)} of {result.variant}"
        raise ValueError(f"expected as many rounds of both, got {got}: compare what was timed in the same rounds")
    ratios = torch.tensor(baseline.seconds, dtype=torch.float64) / torch.tensor(result.seconds, dtype=torch.float64)
    draws = torch.randint(len(ratios), (RESAMPLES, len(ratios)), generator=torch.Generator().manual_seed(0))
    medians = ratios[draws].quantile(0.5, dim=1)
    return Ratio(ratios.quantile(0.5).item(), medians.quantile(0.025).item(), medians.quantile(0.975).item())


def wins(speed: Ratio, control: Ratio | None) -> bool:
    """Whether all of the interval is above 1, and the gain is more than the control's interval is wide."""
    return speed.low > 1 and (control is None or speed.median - 1 > control.high - control.low)


@dataclass(frozen=True)
class Goal:
    """`variant` is at least `times` as fast as `against`; with `at_most`, it takes at most `times` as long."""

    variant: str
    against: str
    world_size: int
    nbytes: int
    times: float
    at_most: bool = False

    def measured(self, results: Results) -> Ratio | None:
        """The ratio that the goal is about; None if it was not measured."""
        wanted = (self.variant, self.world_size, self.nbytes)
        for result in results:
            if (result.variant, result.world_size, result.nbytes) == wanted and self.against in results.rivals(result):
                speed = results.speed(result, self.against)
                return speed.inverse if self.at_most else speed
        return None

    def verdict(self, ratio: Ratio) -> str:
        """'yes' or 'NO'; 'too close to tell' where the goal lies inside the interval."""
        if self.at_most:
            met, missed = ratio.high <= self.times, ratio.low > self.times
        else:
            met, missed = ratio.low >= self.times, ratio.high < self.times
        return "yes" if met else "NO" if missed else "too close to tell"

    @property
    def what(self) -> str:
        return f"{self.variant}, {self.world_size} processes, {size_name(self.nbytes)}"

    @property
    def text(self) -> str:
        sign, of = ("≤", "time") if self.at_most else ("≥", "speed")
        return f"{sign} {self.times:g} × the {of} of {self.against}"


def judge(goals: Sequence[Goal], results: Results) -> list[tuple[Goal, Ratio, str]]:
    """(goal, what was measured, whether it is met) for every goal that was measured."""
    measured = [(goal, goal.measured(results)) for goal in goals]
    return [(goal, ratio, goal.verdict(ratio)) for goal, ratio in measured if ratio]
