"""Checker of notebook 09's Triton kernel: softmax_kernel, one program for each row."""

import math
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .checker import Exercise, Trial, mistakes
from .softmax import Cases, Wrong, told

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these

tl = None  # triton.language, from where the kernel runs: not every machine has Triton


def softmax_kernel(x_ptr, y_ptr, stride, columns, BLOCK: "tl.constexpr"):
    """Softmax of one row of x into the same row of y. Rows begin `stride` numbers apart."""
    row = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < columns
    x = tl.load(x_ptr + row * stride + offsets, mask=inside, other=-float("inf"))
    p = tl.exp(x - tl.max(x, 0))
    tl.store(y_ptr + row * stride + offsets, p / tl.sum(p, 0), mask=inside)


BETWEEN = 3.0  # what stands in memory after each row, in x
UNTOUCHED = -1.0  # and what must still stand there in y
CASES = [  # rows, stride, block
    ("a row that fills its block", [[1.0, 2.0, 4.0, 2.0]], 4, 4),
    ("two rows", [[1.0, 2.0, 4.0, 2.0], [3.0, 1.0, 0.0, 2.0]], 4, 4),
    ("3 columns in a block of 4", [[1.0, 2.0, 4.0]], 4, 4),
    ("rows of 3, 5 apart, in blocks of 8", [[1.0, 2.0, 4.0], [3.0, 1.0, 0.0]], 5, 8),
    ("scores around 1000", [[1000.0, 1002.0, 1001.0]], 4, 4),
    ("scores of -1e38", [[-1e38, -1e38, -1e38]], 4, 4),
]


@dataclass
class Written:
    """What a kernel wrote, rounded: the rows, and how many numbers after them."""

    rows: list[list[float]]
    after: int = 0

    def __repr__(self):
        return f"{self.rows}" + (f", and {self.after} numbers after a row" if self.after else "")


def _rounded(numbers) -> list[float]:
    return [round(float(number), 3) for number in numbers]


def _softmax(row: list[float]) -> list[float]:
    weights = [math.exp(number - max(row)) for number in row]
    return _rounded(weight / sum(weights) for weight in weights)


def _run_kernel(answer: Callable) -> Wrong | None:
    os.environ["TRITON_INTERPRET"] = "1"
    from ddpkit import flash_triton  # readies the interpreter

    if answer.__globals__.get("tl") is None:
        answer.__globals__["tl"] = flash_triton.tl
    kernel = flash_triton.triton.jit(answer)
    if flash_triton.INTERPRETED:  # which doesn't read BLOCK: "tl.constexpr"
        annotations = kernel.rewrite().__annotations__
        for name, annotation in annotations.items():
            if isinstance(annotation, str) and annotation.strip("'\"").endswith("constexpr"):
                annotations[name] = flash_triton.tl.constexpr
    for case, rows, stride, block in CASES:
        right, got = Written(list(map(_softmax, rows))), _written(kernel, rows, stride, block)
        if got != right:
            return Wrong(case, right, got)
    return None


def _written(kernel, rows: list[list[float]], stride: int, block: int) -> Written:
    columns = len(rows[0])
    x = torch.full((stride * len(rows) + block,), BETWEEN)  # who reads too far reads these
    y = torch.full_like(x, UNTOUCHED)
    x.as_strided((len(rows), columns), (stride, 1)).copy_(torch.tensor(rows))
    try:
        with warnings.catch_warnings(action="ignore"):  # NumPy's: what overflows, shows
            kernel[len(rows),](x, y, stride, columns, BLOCK=block)
    except Exception as error:
        if "arguments must be of type tl.constexpr" not in str(error):
            raise
        raise ValueError(f"tl.arange(0, BLOCK): {KNOWN}") from None
    written = y.as_strided((len(rows), columns), (stride, 1))
    after = int((y != UNTOUCHED).sum() - (written != UNTOUCHED).sum())
    return Written([_rounded(row) for row in written], after)


KNOWN = "only BLOCK is known when the kernel is made"
NO_MAXIMUM = "exp(1000) is inf. Subtract the row's maximum first; that changes no quotient."
NOT_MINUS_INF = (
    "All scores are far below 0, and so is their maximum. Has something else become it? What the "
    "mask leaves out must be -inf there: tl.load(..., other=-float('inf'))."
)
BEYOND = (
    "What the block has beyond its columns was counted, too. Mask the load; what is left out must "
    "weigh exp(-inf) = 0, so other=-float('inf')."
)
APART = "Rows are `stride` numbers apart, which may be more than they are long."


def _explain(trial: Trial, rank: int, _: None, wrong: Wrong) -> str | None:
    got, right = wrong.got, wrong.expected
    if got.rows == right.rows:
        return "The rows are right, but more was written than they have. tl.store needs the mask."
    pairs = enumerate(zip(got.rows, right.rows, strict=True))
    first, found = next((row, mine) for row, (mine, ours) in pairs if mine != ours)
    if all(number == UNTOUCHED for number in found):
        return f"Nothing was written to row {first}: it begins at y_ptr + row * stride."
    if "1000" in wrong.case:
        return NO_MAXIMUM
    if "-1e38" in wrong.case:
        return NOT_MINUS_INF
    if first > 0:
        return f"Row 0 is right, row {first} isn't. {APART}"
    if 0 < sum(found) < 0.99:
        return f"The row adds up to {sum(found):.3f}. {BEYOND}"
    return f"The row adds up to {sum(found):.3f}, and not to 1: divide by tl.sum of what you write."


softmax_kernel = Exercise(
    reference=softmax_kernel,
    note="ddpkit.flash_triton has the kernels of FlashAttention: these calls, and tl.dot.",
    trials=lambda: [Cases(1, _run_kernel, (), [None], what="rows of 3 and 4 numbers")],
    hints={
        "start": "This program's row: tl.program_id(0). Its numbers: x_ptr + row * stride + "
        "tl.arange(0, BLOCK), all at once.",
        "values": "BLOCK is a power of two and may be more than `columns`: mask=offsets < columns "
        "in tl.load and in tl.store.",
        "error": "With x loaded: p = tl.exp(x - tl.max(x, 0)), and p / tl.sum(p, 0) is what to "
        "store.",
    },
    praise="rows shorter than their block, rows that lie apart, scores of 1000 and of -1e38. On a "
    "GPU, all rows at once.",
    explain=_explain,
    beside=told,
    mistakes=mistakes(f"""
no_maximum: x - tl.max(x, 0) → x
    {NO_MAXIMUM}
no_mask: , mask=inside, other=-float("inf") →
    tl.sum(p, 0), mask=inside → tl.sum(p, 0)
    {BEYOND}
stores_the_whole_block: tl.sum(p, 0), mask=inside → tl.sum(p, 0)
    more was written than they have. tl.store needs the mask.
fills_with_zeros: -float("inf") → 0.0
    {BEYOND}
zeros_in_the_maximum: -float("inf") → 0.0
    tl.exp(x - tl.max(x, 0)) → tl.where(inside, tl.exp(x - tl.max(x, 0)), 0.0)
    {NOT_MINUS_INF}
fills_with_minus_1e9: -float("inf") → -1e9
    {NOT_MINUS_INF}
reads_without_stride: x_ptr + row * stride → x_ptr + row * columns
    {APART}
first_row_only: row = tl.program_id(0) → row = 0
    Nothing was written to row 1: it begins at y_ptr + row * stride.
not_divided: p / tl.sum(p, 0) → p
    divide by tl.sum of what you write.
columns_for_its_block: tl.arange(0, BLOCK) → tl.arange(0, columns)
    {KNOWN}
"""),
)
