"""Attention, plain, tiled and PyTorch's own, forward and backward, and how near the ceiling.

All have the same queries, keys and values, take turns, and must agree on the result and its
gradients. The ceiling is a product of large square matrices of the same format, in the same rounds.
In float32 on one core; on a GPU that computes with bfloat16, in that, beside each of PyTorch's
kernels.
"""

import importlib
import importlib.util
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..fast.attention import flash_attention
from ..flash_attention import attention
from .interleave import Contest, race, synchronize
from .results import AGAIN, SPEED, Goal, Result, Results, judge, report

ROUNDS = 12
TRITON_MODULE = "ddpkit.fast.triton_attention"  # loading it changes how Triton runs without a GPU
TURN_S = 0.02  # a turn has as many calls as fill this: one, on a GPU, is too short for a clock
FORMATS = {"cpu": torch.float32, "cuda": torch.bfloat16}
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}  # of the norm: some roundings
SQUARE = {"cpu": 1024, "cuda": 8192}  # rows and columns of the matrix whose product is the ceiling
PLAIN, OURS, TRITON = "plain attention", "flash_attention", "flash_attention_triton"
CUDNN, FLASH, EFFICIENT, PRODUCT = "SDPA, cuDNN", "SDPA, flash", "SDPA, efficient", "matrix product"
BACKENDS = {CUDNN: SDPBackend.CUDNN_ATTENTION, FLASH: SDPBackend.FLASH_ATTENTION}
BACKENDS |= {EFFICIENT: SDPBackend.EFFICIENT_ATTENTION}
PARTS = {"forward": 1.0, "backward": 2.5}  # of forward's work: 5 products of N × N × D instead of 2
GOALS = [  # part, D, from which N on
    ("forward", 64, 1024, Goal(OURS, FLASH, 0.8)),
    ("backward", 64, 1024, Goal(OURS, FLASH, 0.75)),
    ("forward", 64, 4096, Goal(OURS, PLAIN, 2.5)),
    ("backward", 64, 1024, Goal(OURS, PLAIN, 1.0)),
    ("forward", 64, 4096, Goal(TRITON, CUDNN, 0.9)),
    ("forward", 128, 4096, Goal(TRITON, CUDNN, 0.75)),
    ("backward", 64, 4096, Goal(TRITON, CUDNN, 0.45)),
    ("backward", 128, 4096, Goal(TRITON, CUDNN, 0.45)),
]


@dataclass(frozen=True)
class Case:
    """length: N, of queries and of keys. heads: of all sequences together. head_size: D."""

    length: int
    heads: int
    head_size: int
    causal: bool

    def inputs(self, kind: str) -> list[Tensor]:
        """q, k, v and the gradient of the result."""
        torch.manual_seed(0)
        shape = 4, 1, self.heads, self.length, self.head_size
        q, k, v, upstream = torch.randn(shape, device=kind, dtype=FORMATS[kind])
        return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), upstream]


def cases(kind: str) -> list[Case]:
    """The longer the sequences the fewer: q is always of one size. kind: "cpu" or "cuda"."""
    numel, head_sizes, lengths = 2**19, [64], [256, 512, 1024, 2048, 4096]
    if kind == "cuda":
        numel, head_sizes, lengths = 2**25, [64, 128], [1024, 2048, 4096, 8192, 16384]
    found = []
    for head_size in head_sizes:
        for causal in (False, True):
            found += [Case(n, numel // (n * head_size), head_size, causal) for n in lengths]
    return found


def device() -> str:
    """A GPU that computes with bfloat16, or else the CPU."""
    able = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
    return "cuda" if able else "cpu"


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool, backend: SDPBackend) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def attentions(kind: str) -> dict[str, Callable]:
    """{variant: attention}, PyTorch's own first."""
    names = BACKENDS if kind == "cuda" else [FLASH]
    found = {name: partial(sdpa, backend=BACKENDS[name]) for name in names}
    found |= {PLAIN: attention, OURS: flash_attention}
    if kind == "cuda" and importlib.util.find_spec("triton"):
        found[TRITON] = importlib.import_module(TRITON_MODULE).flash_attention_triton
    return found


# On a rank, the only one


class Often:
    """Calls `call` as often as fills a turn."""

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
    """Of (part, variant); `found` tells how many calls a turn has."""
    kind = device()
    *qkv, upstream = inputs = case.inputs(kind)
    calls = {}
    for name, (attend, o) in choose(attentions(kind), inputs, case.causal).items():
        calls["forward", name] = Often(partial(attend, *qkv, causal=case.causal))
        backward = partial(torch.autograd.grad, o, qkv, upstream, retain_graph=True)
        calls["backward", name] = Often(backward)
    square = torch.randn(SQUARE[kind], SQUARE[kind]).to(qkv[0])
    calls["", PRODUCT] = Often(lambda: square @ square)
    return Contest(calls, found=lambda: {which: call.times for which, call in calls.items()})


def choose(
    attends: dict[str, Callable], inputs: list[Tensor], causal: bool
) -> dict[str, tuple[Callable, Tensor]]:
    """{variant: (attention, its result)}: those that can run, and the first a second time.

    RuntimeError: one found something else than the first, so that its time would mean nothing.
    """
    *qkv, upstream = inputs
    able, right = {}, None
    for name, attend in attends.items():
        try:
            o = attend(*qkv, causal=causal)
            found = o, *torch.autograd.grad(o, qkv, upstream, retain_graph=True)
        except RuntimeError as error:
            if name not in BACKENDS and not isinstance(error, torch.OutOfMemoryError):
                raise
            print(f"{name} can't run: {str(error).splitlines()[0]}")
            continue
        able[name], right = (attend, o), right or found
        for what, x, y in zip(("o", "dq", "dk", "dv"), found, right, strict=True):
            off = ((x - y).norm() / y.norm()).item()
            if not off <= TOLERANCE[y.dtype]:
                wrong = f"{name}: {what} is off by {off:.1e} of {next(iter(able))}'s"
                raise RuntimeError(f"{wrong}: its time would mean nothing")
    first = next(iter(able))
    return able | {first + AGAIN: able[first]}


# What was found


@dataclass(frozen=True)
class Timed(Result):
    """flop: what is due. ceiling_flops: of the product, per second."""

    flop: float = 0.0
    ceiling_flops: float = 0.0


class Attentions(Results):
    columns = "Time (ms)", "TFLOP/s", "Ceiling"
    legend = "Time: the median. TFLOP/s: of the same work for all, backward 2.5 × forward's.\n"
    legend += "Ceiling: how much that is of a matrix product's.\n" + SPEED

    def title(self) -> str:
        return self[0].operation

    def cells(self, timed: Timed) -> tuple[str, ...]:
        flops = timed.flop / timed.median_s
        part = f"{100 * flops / timed.ceiling_flops:.0f} %"
        return f"{timed.median_s * 1e3:.4g}", f"{flops / 1e12:.3g}", part


def measure(what: list[Case], rounds: int = ROUNDS) -> Attentions:
    """Time every attention in every case. ValueError: no round."""
    found = Attentions()
    for case in what:
        turns, (times,) = race(partial(make_contest, case), rounds)
        found += together(case, turns, times, 2 * SQUARE[device()] ** 3)
    return found


def together(case: Case, turns: dict, times: dict, product_flop: int) -> list[Timed]:
    """turns, times: {(part, variant): seconds of each round, or the calls in it}."""
    product_s = statistics.median(turns["", PRODUCT]) / times["", PRODUCT]
    scores = case.heads * case.length**2 / (2 if case.causal else 1)
    found = []
    for (part, name), of_rounds in sorted(turns.items(), key=lambda each: each[0][0], reverse=True):
        if name != PRODUCT:
            flop = PARTS[part] * 4 * scores * case.head_size
            seconds = tuple(each / times[part, name] for each in of_rounds)
            about = {"flop": flop, "ceiling_flops": product_flop / product_s}
            found.append(Timed(case_name(part, case), name, 1, 4, seconds, **about))
    return found


def case_name(part: str, case: Case) -> str:
    mask = ", causal" if case.causal else ""
    return f"{part}, D {case.head_size}{mask}, N {case.length}"


def judged(found: Attentions, what: list[Case]) -> list[dict[str, str]]:
    lines = []
    for case in what:
        for part, head_size, least, goal in GOALS:
            if head_size == case.head_size and case.length >= least:
                about = case_name(part, case)
                lines += judge([goal], Attentions(e for e in found if e.operation == about))
    return lines


def main():
    kind = device()
    what = cases(kind)
    found = measure(what, ROUNDS)
    where = torch.cuda.get_device_name() if kind == "cuda" else "one core"
    report("attention", f"{where}, {FORMATS[kind]}", found, judged(found, what))
