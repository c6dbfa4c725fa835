"""Checker of notebook 09's Triton kernel: softmax_kernel, one program for each row."""

import os
import traceback
import warnings
from collections.abc import Callable
from types import TracebackType

import torch

from .checker import Exercise, mistakes
from .softmax import Numbers, trial_of

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


BETWEEN = 3.0  # fills the memory after each row, in x
ATOL = 1e-4  # a score of 1002 in base 2 is rounded by 6e-5
UNTOUCHED = -1.0  # fills it in y, and must stay
CASES = [  # name, rows, stride, block
    ("a row that fills its block", [[1, 2, 4, 2]], 4, 4),
    ("two rows", [[1, 2, 4, 2], [3, 1, 0, 2]], 4, 4),
    ("3 columns in a block of 4", [[1, 2, 4]], 4, 4),
    ("rows of 3, 5 apart, in blocks of 8", [[1, 2, 4], [3, 1, 0]], 5, 8),
    ("scores around 1000", [[1000, 1002, 1001]], 4, 4),
    ("a score of -1e38 alone", [[-1e38]], 4, 4),
]


def _look(answer: Callable, case: str, rows: list, stride: int, block: int) -> dict:
    """Run the kernel; return its rows, and counts of numbers written beyond them, changed in x."""
    os.environ["TRITON_INTERPRET"] = "1"
    from ddpkit import flash_triton  # readies the interpreter

    if answer.__globals__.get("tl") is None:
        answer.__globals__["tl"] = flash_triton.tl
    kernel = flash_triton.triton.jit(answer)
    if flash_triton.INTERPRETED and "BLOCK" in answer.__annotations__:
        kernel.rewrite().__annotations__["BLOCK"] = flash_triton.tl.constexpr  # not if in quotes
    x = torch.full((stride * len(rows) + block,), BETWEEN)  # reading too far reads these
    y = torch.full_like(x, UNTOUCHED)
    shape, strides = (len(rows), len(rows[0])), (stride, 1)
    x.as_strided(shape, strides).copy_(torch.tensor(rows))
    with warnings.catch_warnings(action="ignore"):  # NumPy's: an overflow shows in the values
        try:
            kernel[len(rows),](x, y, stride, len(rows[0]), BLOCK=block)
        except Exception as error:
            told = in_the_answer(error, answer)
            raise told from told.__cause__
    changed = int((x.as_strided(shape, strides) != torch.tensor(rows)).sum())
    written = y.as_strided(shape, strides)
    beyond = int((y != UNTOUCHED).sum() - (written != UNTOUCHED).sum())
    return {
        case: Numbers(written.clone(), ATOL),
        f"{case}: numbers written beyond it": beyond,
        f"{case}: numbers of x that changed": changed,
    }


def in_the_answer(error: Exception, answer: Callable) -> Exception:
    """Return the cause of an interpreter's error, at the answer's own line; else the error."""
    cause, trace = error.__cause__, None
    for frame, line in reversed([*traceback.walk_tb(cause and cause.__traceback__)]):
        if frame.f_code.co_filename == answer.__code__.co_filename:
            trace = TracebackType(trace, frame, frame.f_lasti, line)
    return cause.with_traceback(trace) if trace else error


def _trials():
    expected = {}
    for case, rows, *_ in CASES:
        expected[case] = Numbers(torch.tensor(rows).double().softmax(1))
        expected[f"{case}: numbers written beyond it"] = 0
        expected[f"{case}: numbers of x that changed"] = 0
    yield trial_of(_look, CASES, expected, "rows of 3 and 4 numbers")


MISTAKES = mistakes("""
no_maximum: x - tl.max(x, 0) → x
    exp(1000) is inf. Subtract the row's maximum first; that changes no quotient.
stores_the_whole_block: tl.sum(p, 0), mask=inside → tl.sum(p, 0)
    The rows are right, but more was written than they have. tl.store needs the mask.
fills_with_zeros: -float("inf") → 0.0
    What the mask leaves out weighs exp(0 - m). It must weigh exp(-inf) = 0: other=-float('inf').
reads_without_stride: x_ptr + row * stride → x_ptr + row * columns
    Rows are `stride` numbers apart, which may be more than they are long.
first_row_only: row = tl.program_id(0) → row = 0
    Nothing was written to row 1: it begins at y_ptr + row * stride.
not_divided: p / tl.sum(p, 0) → p
    The row doesn't add up to 1: divide by tl.sum of what you write.
""")
softmax_kernel = Exercise(
    reference=softmax_kernel,
    writes=None,
    note="ddpkit.flash_triton has the kernels of FlashAttention: these calls, and tl.dot.",
    trials=_trials,
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
    mistakes=MISTAKES,
)
