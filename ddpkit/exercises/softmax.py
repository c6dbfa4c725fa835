"""Checkers of notebook 08: online_softmax, in two passes over a row, and merge, of two parts' maximum and sum.

Rows are logarithms of small whole numbers, so that the results are simple fractions: softmax of 0, ln 2, ln 5 is
1/8, 2/8, 5/8. For each usual mistake the result it leads to is computed, and compared with the answer's.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from ddpkit.runtime.launch import Run

from .old_checker import Exercise, Trial, _short

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these

INF = math.inf
LN2, LN3, LN4, LN5 = map(math.log, (2, 3, 4, 5))


class Case(Trial):
    """A trial that is named by what it tries; of ranks it speaks only where there are several."""

    def __str__(self):
        return super().__str__() if self.world_size > 1 else self.what


def _beside(expected: object, got: object) -> str:
    verb = "raised" if isinstance(got, Numbers) and got.failed else "returned"
    return f"it {verb} {_short(got)}, expected {_short(expected)}."


@dataclass
class Numbers:
    """What an answer returned, or how it failed. Others are equal if they differ by rounding only; NaN equals nothing.

    passes: how often it went over the row.
    kept: whether the results were made of something else than the last pass and the first one's sums.
    """

    values: list[float]
    failed: str = ""
    passes: int = field(default=0, compare=False)
    kept: bool = field(default=False, compare=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Numbers) and not self.failed and self._matches(other, math.isclose)

    def __repr__(self):
        return self.failed or str([float(f"{value:.6g}") for value in self.values])

    def looks_like(self, mistake: list[float]) -> bool:
        """Whether a mistake leads to these numbers; to NaN, too."""
        return not self.failed and self._matches(Numbers(mistake), _close_or_both_nan)

    def _matches(self, other: "Numbers", close: Callable[..., bool]) -> bool:
        pairs = zip(self.values, other.values, strict=False)
        return len(self.values) == len(other.values) and all(close(a, b, rel_tol=1e-5, abs_tol=1e-6) for a, b in pairs)

    @property
    def has_nan(self) -> bool:
        return any(map(math.isnan, self.values))


def _close_or_both_nan(a: float, b: float, **tolerances: float) -> bool:
    return math.isclose(a, b, **tolerances) or (math.isnan(a) and math.isnan(b))


def _numbers(call: Callable[[], Sequence], passes: Callable[[], int] = lambda: 0) -> object:
    """What `call` returns, as Numbers, also if it overflows; as it is, if it isn't a sequence of numbers."""
    try:
        returned = call()
    except (OverflowError, ZeroDivisionError) as error:
        return Numbers([], f"{type(error).__name__}: {error}")
    try:
        return Numbers([float(value) for value in returned], passes=passes())
    except (TypeError, ValueError):
        return returned


def _exp(exponent: float) -> float:
    """As torch's, infinite where it is too large."""
    return torch.tensor(exponent, dtype=torch.float64).exp().item()


def _share(x: float, m: float) -> float:
    return 0.0 if x == -INF else _exp(x - m)


def _quotient(total: float, d: float) -> float:
    """As torch's: NaN for 0/0."""
    return (torch.tensor(total, dtype=torch.float64) / d).item()


# online_softmax(row)


def online_softmax(row):
    m, d = -math.inf, 0.0
    for x in row:
        if x > m:
            d *= math.exp(m - x)  # the sum so far, for the new maximum
            m = x
        if x > -math.inf:  # else nothing to add, and -inf - -inf is NaN
            d += math.exp(x - m)
    return [math.exp(x - m) / d if d else 0.0 for x in row]


class Row(Sequence):
    """A row of numbers that remembers in which order they were read.

    fades: all that is read for the second time is halved, in its power: less by ln 2.
    """

    def __init__(self, values: list[float], fades: bool = False):
        self._values = [torch.tensor(value, dtype=torch.float64) for value in values]
        self._fades = fades
        self._places: list[int] = []

    def __len__(self):
        return len(self._values)

    def __getitem__(self, place):
        read = range(len(self))[place]  # IndexError past the end, which is what ends a loop
        return [self._read(each) for each in read] if isinstance(place, slice) else self._read(read)

    def _read(self, place: int) -> Tensor:
        again = place in self._places and place != self._places[-1]
        if self._fades and again:
            self._values[place] = self._values[place] - LN2
        self._places.append(place)
        return self._values[place]

    def passes(self) -> int:
        """How often somebody came back to the number that was read most; twice in a row is once."""
        return max(Counter(place for place, _ in groupby(self._places)).values(), default=0)


def _run_online(answer, values):
    row, fading = Row(values), Row(values, fades=True)
    got = _numbers(lambda: answer(row), row.passes)
    if isinstance(got, Numbers) and got.passes == 2 and len(values) > LONG:
        got.kept = _numbers(lambda: answer(fading)) != Numbers([share / 2 for share in _softmax(values)])
    return got


def _softmax(values: list[float]) -> list[float]:
    """The specification: all numbers at hand, sums exact."""
    m = max(values)
    shares = [_share(x, m) for x in values]
    return [share / math.fsum(shares) if m > -INF else 0.0 for share in shares]


LONG = 10  # numbers, from where on passes are judged: all that can be wrong with the numbers has been said by then
ROWS = {
    "the row ln 5, ln 2, ln 1": [LN5, LN2, 0.0],
    "the row ln 1, ln 2, ln 5": [0.0, LN2, LN5],
    "the row 0, 1000": [0.0, 1000.0],
    "the row -1000, -1000 + ln 3": [-1000.0, -1000 + LN3],
    "the row -2e9, -2e9 + ln 3": [-2e9, -2e9 + LN3],
    "the row 0, -inf, ln 3": [0.0, -INF, LN3],
    "the row -inf, 0, ln 3": [-INF, 0.0, LN3],
    "the row -inf, -inf": [-INF, -INF],
    "a row of 60 numbers, every seventh -inf": [math.log(17 * at % 61) if at % 7 else -INF for at in range(1, 61)],
}


def _online_trials():
    for what, values in ROWS.items():
        yield Case(1, _run_online, (values,), [Numbers(_softmax(values))], what=what)


def _with_sum(values: list[float], d: float, m: float) -> list[float]:
    return [_quotient(_share(x, m), d) for x in values]


def _online(values: list[float], step: Callable[[float, float, float, float], float]) -> list[float]:
    """Two passes, of which the first makes d from d, x, and the maxima before and after x."""
    m, d = values[0], 1.0
    for x in values[1:]:
        m_before, m = m, max(m, x)
        d = step(d, x, m_before, m)
    return _with_sum(values, d, m)


def _running(values: list[float]) -> list[float]:
    """Each number over the sum so far, for the maximum so far."""
    starts = [values[: at + 1] for at in range(len(values))]
    return [_softmax(start)[-1] for start in starts]


ONLINE_MISTAKES: list[tuple[Callable[[list[float]], list[float]], str]] = [
    (
        lambda row: _online(row, lambda d, x, m_before, m: d + _share(x, m)),
        "The sum d wasn't corrected when the maximum grew: what it has so far is for the maximum before. d = d * "
        "exp(m_before - m) + exp(x - m).",
    ),
    (
        lambda row: _online(row, lambda d, x, m_before, m: d * _exp(m - m_before) + _share(x, m)),
        "The correction has the wrong sign: a larger maximum makes the sum smaller, exp(m_before - m).",
    ),
    (
        lambda row: _online(row, lambda d, x, m_before, m: (d + _share(x, m)) * _share(m_before, m)),
        "The correction belongs to the sum before: the new number's exp(x - m) is for the new maximum already.",
    ),
    (
        lambda row: _online(row, lambda d, x, m_before, m: d * _share(m_before, m) + _exp(x - m_before)),
        "The new number's exponent is x - m, with the maximum that has seen it, not the one before.",
    ),
    (
        _running,
        "Each number was divided by the sum so far. It takes the last m and the last d, in a second pass.",
    ),
    (
        lambda row: _with_sum(row, *_pair(row[: [*row, -INF].index(-INF)])[::-1]),
        "The sum ends at the first -inf. A masked number adds nothing, but those behind it do.",
    ),
    (
        lambda row: [_share(x, max(row)) for x in row],
        "exp(x - m) is right, and has to be divided by d.",
    ),
    (
        lambda row: _with_sum(row, math.fsum(_share(x, max(row)) for x in [row[0], *row]), max(row)),
        "The first number is in the sum twice.",
    ),
]


def _online_cause(trial: Trial, rank: int, expected: Numbers, got: object) -> str:
    values = trial.args[0]
    if not isinstance(got, Numbers):
        return "Return a list with one number for each of the row's."
    if not got.failed and len(got.values) != len(values):
        return f"{len(got.values)} numbers for a row of {len(values)}: return a list with one for each."
    masked, nothing = -INF in values, max(values) == -INF
    if nothing:
        instead = ", not 0/0" if got.failed or got.has_nan else ""
        return f"A row of only -inf is all masked: d stays 0. Give zeros{instead}."
    if got.failed or got.has_nan or not any(got.values):
        if masked and values[0] == -INF:
            return "Before the first number that isn't masked, m is -inf, and -inf - -inf is NaN: add nothing then."
        if masked:
            return "exp(-inf - m) is 0: a masked number among others changes neither m nor d."
        if max(values) >= 1000:
            return "exp(1000) overflows. Subtract m, the largest number, and no exponent is above 0: exp(x - m)."
        if values[0] <= -1e9:
            return "All of them are below the m you start with: start at -inf, which no number is below."
        if values[0] <= -1000:
            return (
                "exp(-1000) is 0, and so is d. m is the maximum of the row: it starts at -inf. From 0 it would stay 0 "
                "where all numbers are below."
            )
    for mistake, sentence in ONLINE_MISTAKES:
        if got.looks_like(mistake(values)):
            return sentence
    if got.has_nan:
        return "For the first number, m_before is -inf: exp(m_before - m) is 0, exp(m - m_before) is infinite."
    return (
        f"They add up to {math.fsum(got.values):.6g}. First pass: m_before, m = m, max(m, x), then d = d * "
        "exp(m_before - m) + exp(x - m); second pass: exp(x - m) / d."
    )


def _online_passes(trial: Trial, run: Run) -> str | None:
    passes = run[0].passes
    if len(trial.args[0]) <= LONG:
        return None
    if passes > 2:
        return (
            f"the numbers are right, but the row was read in {passes} passes.\nKeep m and d in the same loop: when m "
            "grows, d is corrected."
        )
    if passes < 2:
        return (
            "the numbers are right, but the row was read only once: was it kept somewhere?\nA row may be longer than "
            "the memory for a copy: read it again for the second pass."
        )
    if run[0].kept:
        return (
            "the numbers are right, and the row was read twice, but a copy of it was kept, or of its powers.\nA row "
            "may be longer than the memory for that. First pass: m and d, no more; second pass: exp(x - m) / d."
        )
    return None


online_softmax = Exercise(
    online_softmax,
    _online_trials,
    [
        "d holds the sum of exp(x - m) so far, for the maximum so far. What changes in each term if m grows to m_new?",
        "exp(x - m_new) = exp(x - m) · exp(m - m_new): one factor for the whole sum. m starts at -inf, d at 0.",
        "A number that is -inf adds nothing: skip it while m is -inf, or exp(-inf - -inf) is NaN. If d is 0 at the "
        "end, all were masked.",
    ],
    "the row was read twice, where safe softmax reads it three times, for the same numbers.",
    _online_cause,
    _online_passes,
    beside=_beside,
    note="# Ours, for one row. ddpkit.softmax.online_softmax does the same with tensors of any shape.",
)


# merge(a, b)


def merge(a, b):
    (m_a, d_a), (m_b, d_b) = a, b
    m = max(m_a, m_b)
    if m == -math.inf:
        return m, 0.0  # two parts that are all masked
    return m, d_a * math.exp(m_a - m) + d_b * math.exp(m_b - m)


def _pair(values: list[float]) -> tuple[float, float]:
    """The specification: (m, d) of all the numbers."""
    m = max(values, default=-INF)
    return m, math.fsum(_share(x, m) for x in values)


def _run_merge(answer, parts):
    """Merge the pairs of all parts: on one rank all are there, on several each brings its own, and all are gathered."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pairs = [torch.tensor(_pair(part), dtype=torch.float64) for part in parts]
    if world_size > 1:
        mine, pairs = pairs[rank], [torch.empty_like(pair) for pair in pairs]
        dist.all_gather(pairs, mine)
    return _numbers(lambda: functools.reduce(answer, [tuple(pair.unbind()) for pair in pairs]))


PARTS = {
    "parts (ln 4, 1) and (0, 2)": [[LN4], [0.0, 0.0]],
    "parts (0, 2) and (ln 4, 1)": [[0.0, 0.0], [LN4]],
    "parts (0, 2) and (0, 3)": [[0.0] * 2, [0.0] * 3],
    "parts (1000, 2) and (1000 + ln 2, 1)": [[1000.0] * 2, [1000 + LN2]],
    "parts (-inf, 0) and (0, 2)": [[-INF], [0.0, 0.0]],
    "parts (-inf, 0) and (-inf, 0)": [[-INF], [-INF]],
}
SHARED_OUT = [[LN2, 0.0], [LN5, LN3, 0.0], [-INF, -INF], [LN4]]  # by rank


def _merge_trials():
    for what, parts in PARTS.items():
        yield Case(1, _run_merge, (parts,), [_merged(parts)], what=what)
    world_size = len(SHARED_OUT)
    what = "a part of a row on each, their pairs gathered, then merged one after the other"
    yield Case(world_size, _run_merge, (SHARED_OUT,), [_merged(SHARED_OUT)] * world_size, what=what)


def _merged(parts: list[list[float]]) -> Numbers:
    return Numbers(list(_pair([x for part in parts for x in part])))


def _merge_mistake(choose: Callable, correct_a: Callable, correct_b: Callable) -> Callable:
    """A wrong merge. choose: m from both maxima. correct_a, correct_b: from m_a, m_b, m, the factors of d_a and d_b."""

    def merge(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
        (m_a, d_a), (m_b, d_b) = a, b
        m = choose(m_a, m_b)
        return m, d_a * correct_a(m_a, m_b, m) + d_b * correct_b(m_a, m_b, m)

    return merge


MERGE_MISTAKES: list[tuple[Callable, str]] = [
    (
        _merge_mistake(max, lambda m_a, m_b, m: 1.0, lambda m_a, m_b, m: 1.0),
        "The part with the smaller maximum brought its sum as it is: that is for its own maximum. Correct both: d_a * "
        "exp(m_a - m) + d_b * exp(m_b - m).",
    ),
    (
        _merge_mistake(min, lambda m_a, m_b, m: _exp(m_a - m), lambda m_a, m_b, m: _exp(m_b - m)),
        "m is the smaller maximum, and should be the larger: max(m_a, m_b). Then no exponent is above 0.",
    ),
    (
        _merge_mistake(max, lambda m_a, m_b, m: _exp(m_b - m), lambda m_a, m_b, m: _exp(m_a - m)),
        "The corrections are swapped: d_a goes with exp(m_a - m), d_b with exp(m_b - m).",
    ),
    (
        _merge_mistake(max, lambda m_a, m_b, m: _exp(m - m_a), lambda m_a, m_b, m: _exp(m - m_b)),
        "The corrections have the wrong sign: for a larger maximum a sum is smaller, exp(m_a - m).",
    ),
    (
        _merge_mistake(max, lambda m_a, m_b, m: float(m_a == m), lambda m_a, m_b, m: float(m_a != m)),
        "That is the part with the larger maximum alone: the other's numbers are missing from the sum.",
    ),
    (
        _merge_mistake(max, lambda m_a, m_b, m: _exp(m_a - m) / 2, lambda m_a, m_b, m: _exp(m_b - m) / 2),
        "The sums were averaged. d counts both parts: add them.",
    ),
]


def _merge_cause(trial: Trial, rank: int, expected: Numbers, got: object) -> str:
    pairs = [_pair(part) for part in trial.args[0]]
    maxima = [m for m, _ in pairs]
    if not isinstance(got, Numbers) or (not got.failed and len(got.values) != 2):
        return "Return a pair, (m, d): what comes out must go in again, for the next part."
    if got.failed or got.has_nan:
        if max(maxima) == -INF:
            return "Both parts are all masked: m is -inf, and -inf - -inf is NaN. Together they are (-inf, 0)."
        if abs(maxima[0]) >= 1000:
            return (
                "exp(1000) overflows, and exp(-1000) is 0: use only differences of maxima, exp(m_a - m), which are "
                "never above 0."
            )
    if got.values[::-1] == expected.values:
        return "The other way round: the maximum comes first, (m, d)."
    if max(maxima) == -INF:
        return "Both parts are all masked: together they are (-inf, 0)."
    for mistake, sentence in MERGE_MISTAKES:
        if got.looks_like(list(functools.reduce(mistake, pairs))):
            return sentence
    return "m = max(m_a, m_b), and d = d_a * exp(m_a - m) + d_b * exp(m_b - m)."


merge = Exercise(
    merge,
    _merge_trials,
    [
        "Which maximum does the row have that consists of both parts?",
        "d_a is the sum of exp(x - m_a). Which factor makes it the sum of exp(x - m)? The same for d_b.",
        "A part that is all masked, (-inf, 0), must change nothing, and two of them are (-inf, 0): look at m before "
        "you subtract it.",
    ],
    "ranks that share a row need to gather two numbers each, no more.",
    _merge_cause,
    lambda trial, run: None,
    beside=_beside,
    note="# Ours, for one row. ddpkit.softmax.merge takes tensors, and (m, d, o) too.",
)
