"""Benchmark of attention, forward and backward: plain, tiled, and PyTorch's own.

All get the same queries, keys and values, and take turns; results and gradients must agree. The
speed of a product of large square matrices, timed in the same rounds, is the ceiling. On a GPU with
bfloat16 all compute in that, and each of PyTorch's kernels takes part; otherwise all compute in
float32 on one core.
"""

import importlib.util
import math
import statistics
import textwrap
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..fast.attention import flash_attention
from ..flash_attention import attention
from .interleave import Contest, check_close, race, synchronize
from .results import AGAIN, PAGE, SPEED, Goal, Result, Results, report

ROUNDS = 12
TURN_S = 0.02  # a turn has enough calls to fill this: a single one, on a GPU, is too short to time
FORMATS = {"cpu": torch.float32, "cuda": torch.bfloat16}
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}  # parts of the norm: a few roundings
SQUARE = {"cpu": 1024, "cuda": 8192}  # rows and columns of the matrix whose product is the ceiling
NUMEL = {"cpu": 2**19, "cuda": 2**25}  # numbers in q: the longer the sequences, the fewer of them
SIZES = {  # head sizes D, lengths N
    "cpu": ([64], [256, 512, 1024, 2048, 4096]),
    "cuda": ([64, 128], [1024, 4096, 16384]),
}
PLAIN, OURS, TRITON = "plain attention", "flash_attention", "flash_attention_triton"
CUDNN, FLASH, EFFICIENT, PRODUCT = "SDPA, cuDNN", "SDPA, flash", "SDPA, efficient", "matrix product"
BACKENDS = {CUDNN: SDPBackend.CUDNN_ATTENTION, FLASH: SDPBackend.FLASH_ATTENTION}
BACKENDS |= {EFFICIENT: SDPBackend.EFFICIENT_ATTENTION}
PARTS = {"forward": 1.0, "backward": 2.5}  # of forward's work: 5 products of N × N × D instead of 2
GOALS = {
    "cpu": [
        Goal(OURS, FLASH, 0.8, r"forward, D 64,.* N \d{4}"),
        Goal(OURS, FLASH, 0.75, r"backward, D 64,.* N \d{4}"),
        Goal(OURS, PLAIN, 2.5, "forward, D 64,.* N 4096"),
        Goal(OURS, PLAIN, 1.0, r"backward, D 64,.* N \d{4}"),
    ],
    "cuda": [
        Goal(TRITON, CUDNN, 0.9, "forward, D 64,.* N (4096|16384)"),
        Goal(TRITON, CUDNN, 0.75, "forward, D 128,.* N (4096|16384)"),
        Goal(TRITON, CUDNN, 0.45, "backward, .* N (4096|16384)"),
    ],
}
LEGEND = f"""\
Time: the median. TFLOP/s: of the same work for all, backward 2.5 ×
forward's. Ceiling: how much that is of a matrix product's.
{SPEED}"""


class Case(NamedTuple):
    """length: N, of queries and of keys. heads: of all sequences together. head_size: D."""

    head_size: int
    causal: bool
    length: int
    heads: int

    def inputs(self, kind: str) -> list[Tensor]:
        """Draw q, k, v and the gradient of the result, each (1, heads, N, D), on device `kind`."""
        torch.manual_seed(0)
        shape = 4, 1, self.heads, self.length, self.head_size
        q, k, v, upstream = torch.randn(shape, device=kind, dtype=FORMATS[kind])
        return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), upstream]

    def title(self, part: str) -> str:
        mask = ", causal" if self.causal else ""
        return f"{part}, D {self.head_size}{mask}, N {self.length}"


def cases(kind: str) -> list[Case]:
    head_sizes, lengths = SIZES[kind]
    shapes = product(head_sizes, (False, True), lengths)
    return [Case(d, causal, n, NUMEL[kind] // (n * d)) for d, causal, n in shapes]


def device() -> str:
    """Choose a GPU that computes with bfloat16, otherwise the CPU."""
    able = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
    return "cuda" if able else "cpu"


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool, backend: SDPBackend) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def attentions(kind: str) -> dict[str, Callable]:
    """Return {variant: attend(q, k, v, causal)}; on "cuda" ours is Triton's, if installed."""
    names = BACKENDS if kind == "cuda" else [FLASH]
    found = {name: partial(sdpa, backend=BACKENDS[name]) for name in names}
    found |= {PLAIN: attention}
    if kind == "cuda" and importlib.util.find_spec("triton"):
        from ..fast.triton_attention import flash_attention_triton  # changes Triton without a GPU

        return found | {TRITON: flash_attention_triton}
    return found | {OURS: flash_attention}


# On a rank, the only one


class Often:
    """A function that repeats `call` to fill TURN_S seconds, a turn; `times`: how often it does."""

    def __init__(self, call: Callable):
        self.call, self.times = call, 1
        begun = time.perf_counter()
        self()
        synchronize()
        self.times = max(1, math.ceil(TURN_S / (time.perf_counter() - begun)))

    def __call__(self) -> None:
        for _ in range(self.times):
            self.call()


def make_contest(case: Case, plain: ProcessGroup) -> Contest:
    """Make the contest, by (part, variant); `found` returns {(part, variant): calls in a turn}."""
    kind = device()
    inputs = case.inputs(kind)
    square = torch.randn(SQUARE[kind], SQUARE[kind]).to(inputs[0])
    calls = {("", PRODUCT): partial(torch.matmul, square, square)}
    able = choose(attentions(kind), inputs, case.causal)
    for part, (name, ways) in product(PARTS, able.items()):
        calls[part, name] = ways[part]
    often = {which: Often(call) for which, call in calls.items()}
    return Contest(often, found=lambda: {which: call.times for which, call in often.items()})


def choose(
    attends: dict[str, Callable], inputs: list[Tensor], causal: bool
) -> dict[str, dict[str, Callable]]:
    """Return {variant: {"forward": call, "backward": call}} of the attentions that can run.

    The first of them comes a second time, as a control (A/A). RuntimeError: a result or gradient
    differs from the first's, so its time would mean nothing; or one that isn't PyTorch's fails.
    """
    *qkv, upstream = inputs
    able, right = {}, None
    for name, attend in attends.items():
        forward = partial(attend, *qkv, causal=causal)
        try:
            o = forward()
            backward = partial(torch.autograd.grad, o, qkv, upstream, retain_graph=True)
            found = o, *backward()
        except RuntimeError as error:
            if name not in BACKENDS and not isinstance(error, torch.OutOfMemoryError):
                raise
            print(textwrap.fill(f"{name} can't run: {str(error).splitlines()[0]}", PAGE))
            continue
        able[name], right = {"forward": forward, "backward": backward}, right or found
        for what, x, y in zip(("o", "dq", "dk", "dv"), found, right, strict=True):
            check_close(f"{name}: {what}", x, y, TOLERANCE[y.dtype])
    first = next(iter(able))
    return able | {first + AGAIN: able[first]}


# Results


def measure(kind: str) -> Results:
    """Time every attention in every case, or until interrupted. kind: "cpu" or "cuda"."""
    found = Results(legend=LEGEND)
    for case in cases(kind):
        try:
            turns, (times,) = race(partial(make_contest, case), ROUNDS, backend="auto")
        except KeyboardInterrupt:
            print(f"stopped in {case}")
            break
        found += together(case, turns, times, 2 * SQUARE[kind] ** 3)
    return found


def together(case: Case, turns: dict, times: dict, product_flop: int) -> list[Result]:
    """Make the results of a case: seconds of one call, TFLOP/s, and percent of the ceiling.

    turns: {(part, variant): seconds of its turn in each round}. times: {(part, variant): calls in a
    turn}. product_flop: the operations of one matrix product.
    """
    seconds = {}
    for which, of_rounds in turns.items():
        seconds[which] = tuple(turn_s / times[which] for turn_s in of_rounds)
    ceiling = product_flop / statistics.median(seconds.pop(("", PRODUCT)))
    scores = case.heads * case.length**2 / (2 if case.causal else 1)
    found = []
    for (part, name), of_rounds in seconds.items():
        result = Result(case.title(part), name, 1, 0, of_rounds)
        flops = PARTS[part] * 4 * scores * case.head_size / result.median_s
        result.columns["TFLOP/s"] = f"{flops / 1e12:.3g}"
        result.columns["Ceiling"] = f"{100 * flops / ceiling:.0f} %"
        found.append(result)
    return found


def main(name: str):
    kind = device()
    where = torch.cuda.get_device_name() if kind == "cuda" else "one core"
    report(name, measure(kind), GOALS[kind], where=f"{where}, {FORMATS[kind]}")
