"""Checkers of notebook 08: online_softmax, in two passes over a row, and merge.

Most rows are logarithms of small whole numbers, so that the results are simple fractions: softmax
of 0, ln 2, ln 5 is 1/8, 2/8, 5/8.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from ddpkit import softmax

from .checker import Exercise, Trial, mistakes

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these

INF = math.inf
LN2, LN3, LN4, LN5 = map(math.log, (2, 3, 4, 5))


# Shared by the checkers of notebooks 08 and 09


@dataclass(eq=False)
class Numbers:
    """Numbers of any shape; equal if they differ by rounding only. NaN equals nothing."""

    values: Tensor
    atol: float = 1e-6

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Numbers) or self.values.shape != other.values.shape:
            return False
        ours, theirs = self.values.double(), other.values.double()
        return torch.allclose(ours, theirs, rtol=1e-5, atol=max(self.atol, other.atol))

    def __repr__(self):
        numbers = [f"{value:.4g}" for value in self.values.flatten().tolist()]
        if len(numbers) > 8:
            numbers[4:] = [f"… {len(numbers)} numbers, their sum {self.values.sum():.4g}"]
        return f"[{', '.join(numbers)}]"


def numbers(answer: Callable, *args: object) -> object:
    """Return the result of `answer`, or the error of Python's arithmetic that it raised."""
    try:
        returned = answer(*args)
    except (OverflowError, ZeroDivisionError) as error:
        return error
    try:
        return Numbers(torch.tensor([float(value) for value in returned]))
    except (TypeError, ValueError):
        return repr(returned)


def trial_of(look: Callable, cases: list[tuple], expected: dict, what: str) -> Trial:
    """Make a trial of all cases. look: called with the answer and a case; returns its findings.

    expected: of all cases. Cases after the first wrong one aren't tried: up to there an answer
    with a known mistake returns the same as that mistake, later perhaps not.
    """
    rungs = tuple(str(case[0]) for case in cases) if len(cases) > 1 else ()
    return Trial(1, _try, (look, cases, expected), [expected], what=what, rungs=rungs)


def _try(answer: Callable, look: Callable, cases: list[tuple], expected: dict) -> dict:
    seen = {}
    for case in cases:
        seen |= look(answer, *case)
        if any(seen[what] != expected[what] for what in seen):
            break
    return seen


# online_softmax(row)

ROWS = [  # name, row
    ("row ln 5, ln 2, ln 1", [LN5, LN2, 0.0]),
    ("row ln 1, ln 2, ln 5", [0.0, LN2, LN5]),
    ("row 0, 1000", [0.0, 1000.0]),
    ("row -1000, -1000 + ln 3", [-1000.0, -1000 + LN3]),
    ("row -1e308, -5e307", [-1e308, -5e307]),
    ("row 0, -inf, ln 3", [0.0, -INF, LN3]),
    ("row -inf, 0, ln 3", [-INF, 0.0, LN3]),
    ("row -inf, -inf", [-INF, -INF]),
]
LONG = [math.log(17 * at % 61) if at % 7 else -INF for at in range(1, 61)]
READS_NOTHING = {"__get__", "__len__", "size", "dim", "numel", "is_floating_point", "new_tensor"}
READS_NOTHING |= {"new_zeros", "new_full", "new_empty", "zeros_like", "full_like", "empty_like"}
CUTS = {"split", "chunk", "tensor_split", "unbind", "narrow", "select"}


def exact_pair(values: list[float]) -> Tensor:
    """The specification: m and ℓ, from all numbers at once."""
    x = torch.tensor(values, dtype=torch.float64)
    return torch.stack([x.max(), (x - x.max()).exp().nan_to_num(0).sum()])


def exact_softmax(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).softmax(0).nan_to_num(0)


class Row(Tensor):
    """A row that counts the reads of each number; each read after the first gives ln 2 less.

    x[i] reads a number, a slice some, any other function all. The same part (not all) twice in a
    row counts once. What split and its like return are rows that are read when they are used.
    log: for each read of rows that share it, (row, how many numbers).
    """

    @staticmethod
    def __new__(cls, values: list, log: list | None = None):
        row = torch.tensor(values, dtype=torch.float64).as_subclass(cls)
        row.times, row.last = torch.zeros(len(values), dtype=torch.int64), None
        row.log = [] if log is None else log
        row.whole, row.at = None, torch.arange(len(values))
        return row

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.__getitem__:
                return args[0].read(args[1])
            if func.__name__ in CUTS and args:
                return tree_map(args[0].part, func(args[0].at, *args[1:], **(kwargs or {})))
            given = args, kwargs or {}
            if func.__name__ not in READS_NOTHING:
                given = tree_map(lambda x: x.read(...) if isinstance(x, Row) else x, given)
            return func(*given[0], **given[1])

    def __iter__(self):
        return (self[place] for place in range(len(self)))

    def part(self, at: Tensor) -> "Row":
        """Return the row of some of its numbers, whose reads count as the whole row's."""
        whole = self if self.whole is None else self.whole
        part = whole.as_subclass(Tensor)[at].as_subclass(Row)
        part.whole, part.at = whole, at
        return part

    def read(self, index: object) -> Tensor:
        if self.whole is not None:
            return self.whole.read(self.at[index])
        numbers = self.as_subclass(Tensor)
        places = torch.arange(len(self)).view(-1, *[1] * (self.dim() - 1))
        places = places.expand(self.shape)[index].unique()
        again = self.last is not None and torch.equal(places, self.last)
        if len(places) and not again:
            self.times[places] += 1
            self.log.append((self, len(places)))
        self.last = places if len(places) < len(self) else None
        if self.dim() > 1:
            return numbers[index]
        return numbers[index] - LN2 * (self.times[index] - 1)


def _look_at_row(answer: Callable, name: str, values: list[float]) -> dict:
    return {name: numbers(answer, torch.tensor(values, dtype=torch.float64))}


def _look_at_passes(answer: Callable) -> dict:
    row = Row(LONG)
    # A second pass may begin where the first one ended, and that number seems to be read once.
    faded = numbers(lambda x: list(answer(x))[1:-1], row)
    return {
        "the numbers": numbers(answer, torch.tensor(LONG, dtype=torch.float64)),
        "the numbers are right; passes over the row": row.times.max().item(),
        "the result between its ends, if each number is less by ln 2 in the second pass,": faded,
    }


def _online_trials():
    expected = {name: Numbers(exact_softmax(row)) for name, row in ROWS}
    yield trial_of(_look_at_row, ROWS, expected, "short rows")
    exact = exact_softmax(LONG)
    values = Numbers(exact), 2, Numbers(exact[1:-1] / 2)  # half of each power is left
    expected = dict(zip(_look_at_passes(softmax.online_softmax), values, strict=True))
    yield trial_of(_look_at_passes, [()], expected, "a row of 60 numbers, every seventh -inf")


ONLINE = mistakes("""
without_a_correction: ell * power(m_before, m) + → ell +
    The sum ℓ wasn't corrected when the maximum grew: what it has so far is for the maximum before.
    ell = ell * exp(m_before - m) + exp(x - m).
wrong_sign: ell * power(m_before, m) → (ell * torch.exp(m - m_before)).nan_to_num(0)
    The correction has the wrong sign: a larger maximum makes the sum smaller, exp(m_before - m).
from_0: m, ell = start(x) → (_, ell), m = start(x), x.new_zeros(())
    exp(-1000) is 0, and so is ℓ. m starts at -inf: from 0 it stays 0 where all numbers are below.
no_maximum: torch.maximum(m, x_i) → torch.zeros_like(m)
    exp(1000) overflows. Subtract m, the largest number, and no exponent is above 0: exp(x - m).
begins_masked_is_nan: m.masked_fill(m == -math.inf, 0) → m
    Before the first number that isn't masked, m and x are -inf: add nothing then.
masked_row_is_nan: ell.masked_fill(ell == 0, 1) → ell
    A row of only -inf is all masked: ℓ stays 0. Give zeros, not 0/0.
its_statistics: return a → return m, ell
    That is m and ℓ. Return a number for each of the row's: exp(x - m) / ell.
of_a_copy: m, ell = start(x) → x = x.clone()⏎m, ell = start(x)
    Was the row kept somewhere? It may be longer than memory: read it again for the second pass.
""")
online_softmax = Exercise(
    reference=softmax.online_softmax,
    helpers=(softmax.start, softmax.power, softmax.normalize),
    note="Ours, for many rows at a time: x[..., i] is number i of every row.",
    trials=_online_trials,
    hints={
        "start": "ℓ is the sum of exp(x - m) so far, for the maximum so far. What changes in each "
        "term if m grows to m_new?",
        "values": "exp(x - m_new) = exp(x - m) · exp(m - m_new): one factor for the whole sum. m "
        "starts at -inf, ℓ at 0.",
        "error": "A number that is -inf adds nothing: skip it while m is -inf, or exp(-inf - -inf) "
        "is NaN. If ℓ is 0 at the end, all were masked.",
    },
    says={
        "row 0, 1000": "row 0, 1000: {got}, not {expected}. exp(1000) overflows: subtract m, the "
        "largest number, and no exponent is above 0."
    },
    praise="the row was read twice, where safe softmax reads it three times, for the same numbers.",
    mistakes=ONLINE,
)


# merge(a, b)

PARTS = [  # name, parts of a row
    ("parts (ln 4, 1) and (0, 2)", [[LN4], [0.0, 0.0]]),
    ("parts (0, 2) and (ln 4, 1)", [[0.0, 0.0], [LN4]]),
    ("parts (0, 2) and (0, 3)", [[0.0] * 2, [0.0] * 3]),
    ("parts (1000, 2) and (1000 + ln 2, 1)", [[1000.0] * 2, [1000 + LN2]]),
    ("parts (-inf, 0) and (0, 2)", [[-INF], [0.0, 0.0]]),
    ("parts (-inf, 0) and (-inf, 0)", [[-INF], [-INF]]),
]
BY_RANK = [[LN2, 0.0], [LN5, LN3, 0.0], [-INF, -INF], [LN4]]


def _look_at_parts(answer: Callable, name: str, parts: list[list[float]]) -> dict:
    return {name: numbers(answer, *(tuple(exact_pair(part).unbind()) for part in parts))}


def _merge_all(answer: Callable) -> dict:
    mine = exact_pair(BY_RANK[dist.get_rank()])
    pairs = [torch.empty_like(mine) for _ in BY_RANK]
    dist.all_gather(pairs, mine)
    return {"all parts": numbers(reduce, answer, [tuple(pair.unbind()) for pair in pairs])}


def _merge_trials():
    expected = {name: Numbers(exact_pair(a + b)) for name, (a, b) in PARTS}
    yield trial_of(_look_at_parts, PARTS, expected, "two parts")
    whole = {"all parts": Numbers(exact_pair([x for part in BY_RANK for x in part]))}
    what = "a part of a row on each, their pairs gathered"
    yield Trial(4, _merge_all, (), [whole] * 4, what=what)


MERGE = mistakes("""
adds_the_sums: ell_a * correct_a + ell_b * correct_b → ell_a + ell_b
    A sum is for its part's own maximum. Correct both: ell_a * exp(m_a - m) + ell_b * exp(m_b - m).
swapped: power(m_a, m)⏎correct_b = power(m_b, m) → power(m_b, m)⏎correct_b = power(m_a, m)
    The corrections are swapped: ell_a goes with exp(m_a - m), ell_b with exp(m_b - m).
wrong_sign: power(m_a, m)⏎correct_b = power(m_b, m) → torch.exp(m - m_a)
    ⏎correct_b = torch.exp(m - m_b)
    The corrections have the wrong sign: for a larger maximum a sum is smaller, exp(m_a - m).
larger_part_alone: ell_a * correct_a + ell_b * correct_b → torch.where(m_a < m_b, ell_b, ell_a)
    That is the part with the larger maximum alone: the other's numbers are missing from the sum.
overflows: power(m_a, m)⏎correct_b = power(m_b, m) → m_a.exp() / m.exp()
    ⏎correct_b = m_b.exp() / m.exp()
    exp(1000) overflows, exp(-1000) is 0: use only differences, exp(m_a - m), never above 0.
two_masked_parts_are_nan: m.masked_fill(m == -math.inf, 0) → m
    Both parts are all masked: m is -inf, and -inf - -inf is NaN. Together they are (-inf, 0).
other_way_round: if not o_a:⏎return m, ell → if not o_a:⏎    return ell, m
    The other way round: the maximum comes first, (m, ℓ).
""")
merge = Exercise(
    reference=softmax.merge,
    helpers=(softmax.power,),
    note="Ours, for tensors of pairs, and for triples (m, ℓ, o), too.",
    trials=_merge_trials,
    hints={
        "start": "Which maximum does the row have that consists of both parts?",
        "values": "ell_a is the sum of exp(x - m_a). Which factor makes it the sum of exp(x - m)? "
        "The same for ell_b.",
        "error": "A part that is all masked, (-inf, 0), must change nothing, and two of them are "
        "(-inf, 0): look at m before you subtract it.",
    },
    praise="ranks that share a row need to gather two numbers each, no more.",
    mistakes=MERGE,
)
