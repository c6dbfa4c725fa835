"""Checker of notebook 09's Triton kernel: softmax_kernel, one program for each row, in Triton's interpreter."""

from __future__ import annotations  # tl.constexpr, before there is tl

import math
import os
from typing import NamedTuple

import numpy
import torch

from .old_checker import Exercise, Trial, _short
from .flash_attention import Case

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these

tl = None  # triton.language, from where the kernel runs: not every machine that reads this file has Triton


def softmax_kernel(x_ptr, y_ptr, stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < columns
    x = tl.load(x_ptr + row * stride + offsets, mask=inside, other=-float("inf"))
    p = tl.exp(x - tl.max(x, 0))
    tl.store(y_ptr + row * stride + offsets, p / tl.sum(p, 0), mask=inside)


BETWEEN = 3.0  # what stands in memory after each row, in x
UNTOUCHED = -1.0  # and what must still stand there in y


class Softmax(NamedTuple):
    """What an answer wrote, rounded: the rows, and the numbers in memory after each."""

    rows: list[list[float]]
    after: list[list[float]]

    def __repr__(self):
        after = [written for written in self.after if any(number != UNTOUCHED for number in written)]
        return f"{self.rows}" + f", and {after} written after a row" * bool(after)


def _run_kernel(answer, rows, stride, block):
    os.environ["TRITON_INTERPRET"] = "1"
    from ddpkit import flash_triton  # readies the interpreter

    if answer.__globals__.get("tl") is None:
        answer.__globals__["tl"] = flash_triton.tl
    columns = len(rows[0])
    x = torch.full((len(rows) + 1, stride), BETWEEN)
    x = torch.nn.functional.pad(x.flatten(), (0, block), value=BETWEEN)  # who reads too far reads these
    y = torch.full_like(x, UNTOUCHED)
    in_rows = x.as_strided((len(rows), columns), (stride, 1))
    in_rows.copy_(torch.tensor(rows))
    with numpy.errstate(all="ignore"):  # the interpreter computes with it; what overflows, shows
        kernel = flash_triton.triton.jit(answer)
        if flash_triton.INTERPRETED:
            _read_quoted(kernel.rewrite().__annotations__, flash_triton.tl.constexpr)
        try:
            kernel[len(rows),](x, y, stride, columns, BLOCK=block)
        except Exception as error:
            if "arguments must be of type tl.constexpr" not in str(error):
                raise
            raise ValueError("tl.arange(0, BLOCK): only BLOCK is known when the kernel is made") from None
    written = [y[stride * row : stride * (row + 1) + (row + 1 == len(rows)) * block] for row in range(len(rows))]
    return Softmax([_rounded(part[:columns]) for part in written], [_rounded(part[columns:]) for part in written])


def _read_quoted(annotations: dict, constexpr) -> None:
    """Make BLOCK: "tl.constexpr" as good as without quotes, which the interpreter doesn't."""
    for name, annotation in annotations.items():
        if isinstance(annotation, str) and annotation.strip("'\"").endswith("constexpr"):
            annotations[name] = constexpr


def _rounded(numbers):
    return [round(float(number), 3) for number in numbers]


def _softmax(row):
    weights = [math.exp(number - max(row)) for number in row]
    return _rounded(weight / sum(weights) for weight in weights)


def _trials():
    for rows, stride, block, what in (
        ([[1.0, 2.0, 4.0, 2.0]], 4, 4, "a row that fills its block"),
        ([[1.0, 2.0, 4.0, 2.0], [3.0, 1.0, 0.0, 2.0]], 4, 4, "two rows"),
        ([[1.0, 2.0, 4.0]], 4, 4, "3 columns in a block of 4"),
        ([[1.0, 2.0, 4.0], [3.0, 1.0, 0.0]], 5, 8, "two rows of 3 columns, 5 apart, in blocks of 8"),
        ([[1000.0, 1002.0, 1001.0]], 4, 4, "scores around 1000"),
        ([[-1000.0, -1002.0, -1001.0]], 4, 4, "scores around -1000"),
    ):
        after = [[UNTOUCHED] * (stride - len(row) + (row is rows[-1]) * block) for row in rows]
        yield Case(1, _run_kernel, (rows, stride, block), [Softmax([*map(_softmax, rows)], after)], what=what)


def _cause(trial: Trial, rank: int, expected: Softmax, got: Softmax):
    rows, _, block = trial.args
    if got.rows == expected.rows:
        return "The rows are right, but more was written than they have. tl.store needs the mask, too."
    first = next(row for row, (right, found) in enumerate(zip(expected.rows, got.rows, strict=True)) if right != found)
    found = got.rows[first]
    if all(number == UNTOUCHED for number in found):
        return f"Nothing was written to row {first}: it begins at y_ptr + row * stride."
    if rows[0][0] > 100 and not all(map(math.isfinite, found)):
        return "exp(1000) is inf. Subtract the row's maximum first; that changes no quotient."
    if rows[0][0] < -100:
        return (
            "All scores are far below 0, and so is their maximum. Has something else become it? What the mask leaves "
            "out must be -inf there: tl.load(..., other=-float('inf'))."
        )
    if first > 0:
        return (
            f"Row 0 is right, row {first} isn't: they are `stride` numbers apart, which may be more than they are long."
        )
    total = sum(found)
    if len(found) < block and 0 < total < 0.99:
        return (
            f"The row adds up to {total:.3f}: what the block has beyond its {len(found)} columns was counted, too. "
            "Mask the load; what is left out must weigh exp(-inf) = 0, so other=-float('inf')."
        )
    if abs(total - 1) > 0.01:
        return f"The row adds up to {total:.3f}, and not to 1: divide by tl.sum of what you write."
    return None


def _beside(expected: Softmax, got: Softmax) -> str:
    return f"your kernel wrote {_short(got)}, expected {_short(expected)}."


softmax_kernel = Exercise(
    softmax_kernel,
    _trials,
    [
        "This program's row: tl.program_id(0). Its numbers: x_ptr + row * stride + tl.arange(0, BLOCK), all at once.",
        "BLOCK is a power of two and may be more than `columns`: mask=offsets < columns in tl.load and in tl.store.",
        "With x loaded: p = tl.exp(x - tl.max(x, 0)), and p / tl.sum(p, 0) is what to store.",
    ],
    "rows shorter than their block, rows that lie apart, scores of 1000 and of -1000. On a GPU, all rows at once.",
    _cause,
    lambda trial, run: None,
    beside=_beside,
    note="# Ours. ddpkit.flash_triton has the kernels of FlashAttention, built from these calls and tl.dot.",
)
