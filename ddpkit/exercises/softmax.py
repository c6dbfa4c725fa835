"""Checkers of notebook 08: online_softmax, in two passes over a row, and merge.

Rows are logarithms of small whole numbers, so that the results are simple fractions: softmax of
0, ln 2, ln 5 is 1/8, 2/8, 5/8.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from ddpkit import softmax

from .checker import Exercise, Mistake, Trial, mistakes, short

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these

INF = math.inf
LN2, LN3, LN4, LN5 = map(math.log, (2, 3, 4, 5))


class Cases(Trial):
    """A trial of several cases in one run, named by what it tries; right is None."""

    def __str__(self):
        return super().__str__() if self.world_size > 1 else self.what


@dataclass
class Wrong:
    """The first case in which an answer was wrong, what it should have given, and what it gave.

    why: what the case says of anything that is no number there.
    """

    case: str
    expected: object
    got: object
    why: str = ""

    def symptom(self) -> str:
        return f"{self.case}: {getattr(self.got, 'symptom', self.got.__repr__)()}"


def told(_: None, wrong: Wrong) -> str:
    verb = "raised" if isinstance(wrong.got, Numbers) and wrong.got.failed else "returned"
    return f"{wrong.case}: it {verb} {short(wrong.got)}, expected {short(wrong.expected)}."


@dataclass
class Numbers:
    """What an answer returned, or how it failed. Equal if all differ by rounding; NaN never is."""

    values: list[float]
    failed: str = ""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Numbers) or self.failed or len(self.values) != len(other.values):
            return False
        pairs = zip(self.values, other.values, strict=True)
        return all(math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-6) for a, b in pairs)

    def __repr__(self):
        return self.failed or str([float(f"{value:.5g}") for value in self.values])

    @property
    def are_none(self) -> bool:
        """Whether it failed, or has NaN in it, or zeros only."""
        return bool(self.failed) or any(map(math.isnan, self.values)) or not any(self.values)


def numbers(answer: Callable, *args: object) -> object:
    """What `answer` returns, as Numbers; as it is, if it isn't a sequence of numbers."""
    try:
        returned = answer(*args)
    except (OverflowError, ZeroDivisionError) as error:
        return Numbers([], f"{type(error).__name__}: {error}")
    try:
        return Numbers([float(value) for value in returned])
    except (TypeError, ValueError):
        return returned


def exact_pair(values: list[float]) -> tuple[float, float]:
    """The specification: m and ℓ, with all numbers at hand, and an exact sum."""
    m = max(values, default=-INF)
    return m, math.fsum(math.exp(x - m) for x in values if x > -INF)


def exact_softmax(values: list[float]) -> list[float]:
    m, ell = exact_pair(values)
    return [math.exp(x - m) / ell if x > -INF else 0.0 for x in values]


# online_softmax(row)

FIRST = (
    "For the first number, m_before is -inf: exp(m_before - m) is 0, exp(m - m_before) is infinite."
)
OVERFLOWS = (
    "exp(1000) overflows. Subtract m, the largest number, and no exponent is above 0: exp(x - m)."
)
BELOW_0 = (
    "exp(-1000) is 0, and so is ℓ. m is the maximum of the row: it starts at -inf. From 0 it would "
    "stay 0 where all numbers are below."
)
TOO_HIGH = "All are below the m that you start with: start at -inf, which no number is below."
A_MASKED = "exp(-inf - m) is 0: a masked number among others changes neither m nor ℓ."
BEGINS_MASKED = "Before the first number that isn't masked, m and x are -inf: add nothing then."
ALL_MASKED = "A row of only -inf is all masked: ℓ stays 0. Give zeros, not 0/0."

ROWS = [  # a row, and what an answer hears that gives no numbers for it
    ("ln 5, ln 2, ln 1", [LN5, LN2, 0.0], FIRST),
    ("ln 1, ln 2, ln 5", [0.0, LN2, LN5], FIRST),
    ("0, 1000", [0.0, 1000.0], OVERFLOWS),
    ("-1000, -1000 + ln 3", [-1000.0, -1000 + LN3], BELOW_0),
    ("-1e308, -5e307", [-1e308, -5e307], TOO_HIGH),
    ("0, -inf, ln 3", [0.0, -INF, LN3], A_MASKED),
    ("-inf, 0, ln 3", [-INF, 0.0, LN3], BEGINS_MASKED),
    ("-inf, -inf", [-INF, -INF], ALL_MASKED),
]
LONG = [math.log(17 * at % 61) if at % 7 else -INF for at in range(1, 61)]


READS_NOTHING = {"__get__", "__len__", "size", "dim", "numel", "is_floating_point"}
READS_NOTHING |= {"new_zeros", "new_full", "new_empty", "zeros_like", "full_like", "empty_like"}


class Row(Tensor):
    """A row that counts how often each number is read: x[i], a slice of it, or all at once.

    Twice in a row is once. fades: what is read again is halved, in its power: less by ln 2.
    """

    @staticmethod
    def __new__(cls, values: list[float], fades: bool = False):
        row = torch.tensor(values, dtype=torch.float64).as_subclass(cls)
        row.fades, row.times, row.last = fades, [0] * len(values), None
        return row

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.__getitem__:
                places = torch.arange(len(args[0]))[args[1]]
                return args[0].read(places)
            reads = func.__name__ not in READS_NOTHING
            everything = (args, kwargs or {})
            args, kwargs = tree_map(
                lambda x: x.whole(reads) if isinstance(x, Row) else x, everything
            )
            return func(*args, **kwargs)

    def __iter__(self):
        return (self[place] for place in range(len(self)))

    def whole(self, reads: bool) -> Tensor:
        return self.read(torch.arange(len(self))) if reads else self.as_subclass(Tensor)

    def read(self, places: Tensor) -> Tensor:
        if places.dim() or places != self.last:
            for place in places.flatten().tolist():
                self.times[place] += 1
        self.last = None if places.dim() else places
        faded = [LN2 * max(0, self.times[place] - 1) for place in places.flatten().tolist()]
        values = self.as_subclass(Tensor)[places]
        return values - torch.tensor(faded).double().view(places.shape) if self.fades else values


@dataclass
class Passes:
    """How often a row was read; kept: whether results were made of anything else than the last."""

    times: int
    kept: bool = False

    def __repr__(self):
        return f"in {self.times} passes{', and kept what was read' if self.kept else ''}"


def _run_rows(answer: Callable) -> Wrong | None:
    for row, values, why in ROWS:
        expected, got = Numbers(exact_softmax(values)), numbers(answer, Row(values))
        if got != expected:
            return Wrong(f"row {row}", expected, got, why)
    return None


def _run_long(answer: Callable) -> Wrong | None:
    row, fading, expected = Row(LONG), Row(LONG, fades=True), exact_softmax(LONG)
    got, faded = numbers(answer, row), numbers(answer, fading)
    if got != Numbers(expected):
        return Wrong("numbers", Numbers(expected), got)
    passes = Passes(max(row.times))
    passes.kept = passes.times == 2 and faded != Numbers([share / 2 for share in expected])
    return None if passes == Passes(2) else Wrong("the numbers are right", Passes(2), passes)


def _online_trials():
    yield Cases(1, _run_rows, (), [None], what="short rows")
    yield Cases(1, _run_long, (), [None], what="a row of 60 numbers, every seventh -inf")


def _explain_online(trial: Trial, rank: int, _: None, wrong: Wrong) -> str:
    got = wrong.got
    if isinstance(got, Passes):
        return KEPT if got.kept else THREE_PASSES if got.times > 2 else READ_ONCE
    if not isinstance(got, Numbers):
        return "Return a list or a tensor with one number for each of the row's."
    expected = len(wrong.expected.values)
    if not got.failed and len(got.values) != expected:
        return f"{len(got.values)} numbers for a row of {expected}: return one for each."
    if wrong.why and (got.are_none or wrong.why == ALL_MASKED):
        return wrong.why
    return (
        f"They add up to {math.fsum(got.values):.6g}. First pass: m_before, m = m, max(m, x), then "
        "ell = ell * exp(m_before - m) + exp(x - m); second pass: exp(x - m) / ell."
    )


THREE_PASSES = (
    "It takes two. Keep m and ℓ in the same loop: when m grows, ℓ is corrected, and needs no pass "
    "of its own."
)
READ_ONCE = (
    "Was the row kept somewhere? It may be longer than the memory for a copy: read it again for "
    "the second pass."
)
KEPT = (
    "A copy of the row was kept, or of its powers. A row may be longer than the memory for that. "
    "First pass: m and ℓ, no more; second pass: exp(x - m) / ell."
)


def keeps_the_powers(x: Tensor) -> Tensor:
    m = max(x)
    powers = [torch.exp(x_i - m) if x_i > -INF else 0.0 * m.clamp(0, 0) for x_i in x]
    return torch.stack(powers) / (sum(powers) or 1)


def of_a_copy(x: Tensor) -> Tensor:
    return softmax.safe_softmax(x.clone())


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
    praise="the row was read twice, where safe softmax reads it three times, for the same numbers.",
    explain=_explain_online,
    beside=told,
    mistakes=[
        *mistakes(f"""
without_a_correction: ell * power(m_before, m) + → ell +
    The sum ℓ wasn't corrected when the maximum grew: what it has so far is for the maximum before.
    ell = ell * exp(m_before - m) + exp(x - m).
wrong_sign: ell * power(m_before, m) → (ell * torch.exp(m - m_before)).nan_to_num(0)
    The correction has the wrong sign: a larger maximum makes the sum smaller, exp(m_before - m).
wrong_sign_from_the_start: power(m_before, m) → torch.exp(m - m_before)
    {FIRST}
corrects_the_new_number_too: ell = ell * → ell = (ell + power(x_i, m)) *
    power(m_before, m) + power(x_i, m) → (power(m_before, m) if i else 1)
    The correction belongs to the sum before: the new number's exp(x - m) is for the new maximum
    already.
with_the_maximum_before: + power(x_i, m) → + torch.exp(x_i - (m_before if i else m))
    The new number's exponent is x - m, with the maximum that has seen it, not the one before.
divides_by_the_sum_so_far: + power(x_i, m) → + power(x_i, m)
    ⏎a[..., i] = normalize(power(x_i, m), ell)
    for i in range(x.shape[-1]):⏎a[..., i] = → for i in []:⏎    a[..., i] =
    Each number was divided by the sum so far. It takes the last m and the last ℓ, in a second pass.
not_divided: normalize(power(x[..., i], m), ell) → power(x[..., i], m)
    exp(x - m) is right, and has to be divided by ℓ.
first_twice: (m, ell), a = start(x), → m, ell, a = x[..., 0], torch.ones_like(x[..., 0]),
    The first number is in the sum twice.
from_0: (m, ell), a = start(x), → (_, ell), m, a = start(x), x.new_zeros(()),
    {BELOW_0}
from_minus_1e300: (m, ell), a = start(x), → (_, ell), m, a = start(x), x.new_full((), -1e300),
    {TOO_HIGH}
no_maximum: torch.maximum(m, x_i) → torch.zeros_like(m)
    {OVERFLOWS}
ends_at_a_masked_number: x_i = x[..., i] → x_i = x[..., i]⏎if x_i == -math.inf: break
    The sum ends at the first -inf. A masked number adds nothing, but those behind it do.
masked_number_is_nan: power(x[..., i], m) → power(x[..., i] + 0 * x[..., i], m)
    {A_MASKED}
begins_masked_is_nan: m.masked_fill(m == -math.inf, 0) → m
    {BEGINS_MASKED}
masked_row_is_nan: ell.masked_fill(ell == 0, 1) → ell
    {ALL_MASKED}
masked_row_is_even: return a → return torch.where(ell == 0, 1 / x.shape[-1], a)
    {ALL_MASKED}
one_number_for_the_row: return a → return ell
    Return a list or a tensor
its_statistics: return a → return m, ell
    2 numbers for a row of 3
"""),
        Mistake.written(softmax.safe_softmax, THREE_PASSES),
        Mistake.written(of_a_copy, READ_ONCE),
        Mistake.written(keeps_the_powers, KEPT),
    ],
)


# merge(a, b)

MERGE_OVERFLOWS = (
    "exp(1000) overflows, and exp(-1000) is 0: use only differences of maxima, exp(m_a - m), which "
    "are never above 0."
)
BOTH_MASKED = (
    "Both parts are all masked: m is -inf, and -inf - -inf is NaN. Together they are (-inf, 0)."
)
FORMULA = "m = max(m_a, m_b), and ell = ell_a * exp(m_a - m) + ell_b * exp(m_b - m)."
PARTS = [  # two parts, and what an answer hears that gives no numbers for them
    ("parts (ln 4, 1) and (0, 2)", [[LN4], [0.0, 0.0]], FORMULA),
    ("parts (0, 2) and (ln 4, 1)", [[0.0, 0.0], [LN4]], FORMULA),
    ("parts (0, 2) and (0, 3)", [[0.0] * 2, [0.0] * 3], FORMULA),
    ("parts (1000, 2) and (1000 + ln 2, 1)", [[1000.0] * 2, [1000 + LN2]], MERGE_OVERFLOWS),
    ("parts (-inf, 0) and (0, 2)", [[-INF], [0.0, 0.0]], BEGINS_MASKED),
    ("parts (-inf, 0) and (-inf, 0)", [[-INF], [-INF]], BOTH_MASKED),
]
BY_RANK = [[LN2, 0.0], [LN5, LN3, 0.0], [-INF, -INF], [LN4]]


def _merged(answer: Callable, case: str, parts: list, pairs: list[Tensor], why: str):
    expected = Numbers(list(exact_pair([x for part in parts for x in part])))
    got = numbers(functools.reduce, answer, [tuple(pair.unbind()) for pair in pairs])
    return None if got == expected else Wrong(case, expected, got, why)


def _run_parts(answer: Callable) -> Wrong | None:
    for case, parts, why in PARTS:
        pairs = [torch.tensor(exact_pair(part), dtype=torch.float64) for part in parts]
        wrong = _merged(answer, case, parts, pairs, why)
        if wrong:
            return wrong
    return None


def _run_ranks(answer: Callable) -> Wrong | None:
    mine = torch.tensor(exact_pair(BY_RANK[dist.get_rank()]), dtype=torch.float64)
    pairs = [torch.empty_like(mine) for _ in BY_RANK]
    dist.all_gather(pairs, mine)
    return _merged(answer, "all parts", BY_RANK, pairs, FORMULA)


def _merge_trials():
    yield Cases(1, _run_parts, (), [None], what="two parts")
    yield Cases(4, _run_ranks, (), [None] * 4, what="a part of a row on each, their pairs gathered")


def _explain_merge(trial: Trial, rank: int, _: None, wrong: Wrong) -> str:
    got = wrong.got
    if not isinstance(got, Numbers) or (not got.failed and len(got.values) != 2):
        return PAIR
    if got.values[::-1] == wrong.expected.values:
        return OTHER_WAY_ROUND
    masked = wrong.why == BOTH_MASKED
    return wrong.why if masked or got.failed or any(map(math.isnan, got.values)) else FORMULA


PAIR = "Return a pair, (m, ℓ): what comes out must go in again, for the next part."
OTHER_WAY_ROUND = "The other way round: the maximum comes first, (m, ℓ)."

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
    explain=_explain_merge,
    beside=told,
    mistakes=mistakes(f"""
adds_the_sums: ell_a * correct_a + ell_b * correct_b → ell_a + ell_b
    The part with the smaller maximum brought its sum as it is: that is for its own maximum. Correct
    both: ell_a * exp(m_a - m) + ell_b * exp(m_b - m).
corrects_the_first_only: ell_a * correct_a + ell_b * correct_b → ell_a * correct_a + ell_b
    The part with the smaller maximum brought its sum as it is: that is for its own maximum. Correct
    both: ell_a * exp(m_a - m) + ell_b * exp(m_b - m).
corrects_the_second_only: ell_a * correct_a + ell_b * correct_b → ell_a + ell_b * correct_b
    The part with the smaller maximum brought its sum as it is: that is for its own maximum. Correct
    both: ell_a * exp(m_a - m) + ell_b * exp(m_b - m).
smaller_maximum: torch.maximum(m_a, m_b) → torch.minimum(m_a, m_b)
    m is the smaller maximum, and should be the larger: max(m_a, m_b). Then no exponent is above 0.
first_maximum: torch.maximum(m_a, m_b) → m_a
    m is the smaller maximum, and should be the larger: max(m_a, m_b). Then no exponent is above 0.
swapped: power(m_a, m), power(m_b, m) → power(m_b, m), power(m_a, m)
    The corrections are swapped: ell_a goes with exp(m_a - m), ell_b with exp(m_b - m).
wrong_sign: power(m_a, m), power(m_b, m) → torch.exp(m - m_a), torch.exp(m - m_b)
    The corrections have the wrong sign: for a larger maximum a sum is smaller, exp(m_a - m).
larger_part_alone: ell_a * correct_a + ell_b * correct_b → torch.where(m_a < m_b, ell_b, ell_a)
    That is the part with the larger maximum alone: the other's numbers are missing from the sum.
averages: ell_a * correct_a + ell_b * correct_b → (ell_a * correct_a + ell_b * correct_b) / 2
    The sums were averaged. ℓ counts both parts: add them.
multiplies: ell_a * correct_a + ell_b * correct_b → ell_a * ell_b
    {FORMULA}
overflows: power(m_a, m), power(m_b, m) → torch.exp(m_a) / m.exp(), m_b.exp() / m.exp()
    {MERGE_OVERFLOWS}
two_masked_parts_are_nan: m.masked_fill(m == -math.inf, 0) → m
    {BOTH_MASKED}
two_masked_parts_are_0: torch.maximum(m_a, m_b) → torch.maximum(m_a, m_b).clamp(-1e30)
    {BOTH_MASKED}
two_masked_parts_have_a_sum: if not o_a: → ell = ell.masked_fill(m == -math.inf, 1)⏎if not o_a:
    {BOTH_MASKED}
other_way_round: if not o_a:⏎return m, ell → if not o_a:⏎    return ell, m
    {OTHER_WAY_ROUND}
the_sum_alone: if not o_a:⏎return m, ell → if not o_a:⏎    return ell
    {PAIR}
"""),
)
