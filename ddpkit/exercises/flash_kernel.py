"""Checker of notebook 09's second Triton kernel: flash_kernel, a program for a tile of queries."""

import contextlib
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType

import torch

from .checker import Exercise, mistakes
from .softmax import Numbers, trial_of
from .softmax_kernel import in_the_answer

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these

tl = None  # triton.language, from where the kernel runs: not every machine has Triton


def flash_kernel(q_ptr, k_ptr, v_ptr, o_ptr, N, scale, D: "tl.constexpr", TILE: "tl.constexpr"):
    """Write TILE rows of softmax(q kᵀ · scale) v to o, a tile of keys at a time. All are (N, D)."""
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    columns = tl.arange(0, D)
    places = rows[:, None] * D + columns[None, :]
    q = tl.load(q_ptr + places, mask=rows[:, None] < N, other=0.0)
    m = tl.full((TILE,), float("-inf"), tl.float32)
    ell = tl.zeros((TILE,), tl.float32)
    acc = tl.zeros((TILE, D), tl.float32)
    for first in range(0, N, TILE):
        keys = first + tl.arange(0, TILE)
        there = keys[:, None] * D + columns[None, :]
        k = tl.load(k_ptr + there, mask=keys[:, None] < N, other=0.0)
        v = tl.load(v_ptr + there, mask=keys[:, None] < N, other=0.0)
        s = tl.dot(q, tl.trans(k)) * scale
        s = tl.where(keys[None, :] < N, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        correction, p = tl.exp(m - m_new), tl.exp(s - m_new[:, None])
        ell = ell * correction + tl.sum(p, 1)
        acc = acc * correction[:, None] + tl.dot(p, v)
        m = m_new
    tl.store(o_ptr + places, acc / ell[:, None], mask=rows[:, None] < N)


D, TILE = 16, 32  # not alike, or a forgotten [:, None] may go unnoticed
UNTOUCHED = -1.0  # follows the last row of o, and must stay; q, k, v are followed by NaN
CASES = [  # name, tokens, how far below 0 all scores are (0: they are random)
    ("32 tokens, one tile", 32, 0.0),
    ("64 tokens, two tiles", 64, 0.0),
    ("48 tokens in tiles of 32", 48, 0.0),
    ("scores near -1e10", 48, 1e10),
]
LOADED = "numbers loaded"


def _tensors(N: int, below: float) -> torch.Tensor:
    """Make q, k and v, (3, N, D); their scores are random or, with `below`, all equal to -below."""
    tensors = torch.randn(3, N, D, generator=torch.Generator().manual_seed(0))
    if below:
        # One product a score, the others are 0: nothing is rounded that an order of adding decides.
        tensors[:2] = 0.0
        tensors[0, :, 0], tensors[1, :, 0] = 1.0, -below * math.sqrt(D)
    return tensors


def _look(answer: Callable, case: str, N: int, below: float) -> dict:
    """Run the kernel; return o, the count of numbers written after o, "few" or too many loads."""
    os.environ["TRITON_INTERPRET"] = "1"
    from ddpkit import flash_triton  # readies the interpreter

    if answer.__globals__.get("tl") is None:
        answer.__globals__["tl"] = flash_triton.tl
    kernel = flash_triton.triton.jit(answer)
    if flash_triton.INTERPRETED:
        for name in {"D", "TILE"} & set(answer.__annotations__):
            kernel.rewrite().__annotations__[name] = flash_triton.tl.constexpr  # not if in quotes
    inputs = torch.full((3, N + TILE, D), math.nan)  # reading too far reads NaN
    inputs[:, :N] = _tensors(N, below)
    o, tiles = torch.full((N + TILE, D), UNTOUCHED), math.ceil(N / TILE)
    with (
        _count_loads(flash_triton.triton) as loads,
        warnings.catch_warnings(action="ignore"),
    ):  # NumPy's
        try:
            kernel[tiles,](*inputs, o, N, D**-0.5, D=D, TILE=TILE)
        except Exception as error:
            told = in_the_answer(error, answer)
            raise told from told.__cause__
    loaded, needed = sum(loads), (1 + 2 * tiles) * N * D
    return {
        case: Numbers(o[:N].clone(), 1e-4),
        f"{case}: numbers written beyond it": int((o[N:] != UNTOUCHED).sum()),
        f"{case}: {LOADED}": "few" if loaded <= needed else f"{loaded}, where {needed} do",
    }


@contextlib.contextmanager
def _count_loads(triton: ModuleType) -> Iterator[list[int]]:
    """Record the count of numbers that each tl.load of the interpreter brings."""
    load = triton.runtime.interpreter.InterpreterBuilder.create_masked_load.__code__
    loads, before = [], sys.getprofile()

    def look_on(frame, event, _):
        if event == "call" and frame.f_code is load:
            loads.append(int(frame.f_locals["mask"].data.sum()))

    sys.setprofile(look_on)
    try:
        yield loads
    finally:
        sys.setprofile(before)


def _trials():
    expected = {}
    for case, N, below in CASES:
        q, k, v = _tensors(N, below).double()
        expected[case] = Numbers((q @ k.T / math.sqrt(D)).softmax(1) @ v)
        expected[f"{case}: numbers written beyond it"] = 0
        expected[f"{case}: {LOADED}"] = "few"
    yield trial_of(_look, CASES, expected, f"D = {D}")


MISTAKES = mistakes("""
acc_as_it_was: acc * correction[:, None] + → acc +
    The maximum grows, ell is corrected, but acc isn't: multiply it by exp(m - m_new), too.
ell_as_it_was: ell * correction + → ell +
    The maximum grows, acc is corrected, but ell isn't: multiply it by exp(m - m_new), too.
maximum_as_a_row: s - m_new[:, None] → s - m_new
    m_new is one number for each row of s: s - m_new subtracts it from columns. m_new[:, None] is a
    column, and so are correction[:, None] and ell[:, None] where they meet acc.
not_transposed: tl.trans(k) → k
    tl.dot(a, b) wants b's rows as many as a's columns: q and k are both (TILE, D), tl.trans(k) is
    (D, TILE).
multiplied_as_in_torch: tl.dot(q, tl.trans(k)) → (q @ tl.trans(k))
    In a kernel, matrices are multiplied by tl.dot(a, b).
from_0: tl.full((TILE,), float("-inf"), tl.float32) → tl.zeros((TILE,), tl.float32)
    All scores are far below 0, so every exp is 0: m begins at -inf.
what_sticks_out_counts: s = tl.where(keys[None, :] < N, s, float("-inf")) →
    The last tile of keys sticks out. Loaded with 0, a key has score 0, and exp(0 - m) counts: give
    the scores of keys from N on, which are columns of s, -inf, with tl.where.
stores_the_whole_tile: acc / ell[:, None], mask=rows[:, None] < N → acc / ell[:, None]
    The rows are right, but more was written than there are. tl.store needs the mask.
""")
flash_kernel = Exercise(
    reference=flash_kernel,
    writes=None,
    note="ddpkit.flash_triton is this for many heads, with causal tiles skipped, and tuned.",
    trials=_trials,
    hints={
        "start": "A tile of rows is loaded from ptr + rows[:, None] * D + columns[None, :], with "
        "rows = program_id * TILE + arange(0, TILE) and columns = arange(0, D).",
        "values": "In the loop: s = tl.dot(q, tl.trans(k)) * scale, -inf for keys from N on; then "
        "the lines of your flash_forward, with tl.maximum, tl.max(s, 1), tl.exp, tl.sum(p, 1).",
        "error": "m and ell have shape (TILE,): m_new[:, None] where they meet a tile. Write "
        'tl.full((TILE,), float("-inf"), tl.float32) and tl.zeros((TILE, D), tl.float32).',
    },
    praise="every tile of k and v was loaded once by each program, and no score was written.",
    mistakes=MISTAKES,
)
