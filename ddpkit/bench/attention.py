"""Attention, plain, tiled and PyTorch's own, forward and backward: time, memory, and how near it comes to the ceiling.

All have the same queries, keys and values, take turns, and must agree on the result and its gradients. The ceiling is a
product of large square matrices of the same format, timed in the same rounds. In float32 on one core; on a GPU of
compute capability 8.0 or higher in bfloat16, with each of PyTorch's kernels, named by what really ran.
"""

import importlib.util
import math
import operator
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import profile

from .. import bench
from ..flash_attention import attention, flash_attention
from ..runtime.launch import launch
from ..tools.memory import allocator_peak, watch
from . import interleave
from .results import AGAIN, Goal, Result, Results, judge

ROUNDS, WARM_UP = 12, 2
TURN_S = 0.02  # a turn has as many calls as fill this: one alone, on a GPU, is too short for a clock
FORMATS = {"cpu": torch.float32, "cuda": torch.bfloat16}
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}  # of the norm: some roundings
SQUARE = {"cpu": 1024, "cuda": 8192}  # rows and columns of the matrix whose product is the ceiling
PLAIN, OURS, TRITON, PRODUCT = "plain attention", "flash_attention", "flash_attention_triton", "matrix product"
CUDNN, FLASH, EFFICIENT = "SDPA, cuDNN", "SDPA, flash", "SDPA, efficient"
BACKENDS = {CUDNN: SDPBackend.CUDNN_ATTENTION, FLASH: SDPBackend.FLASH_ATTENTION}
BACKENDS |= {EFFICIENT: SDPBackend.EFFICIENT_ATTENTION}
NAMED = {"cudnn": CUDNN, "flash": FLASH, "fmha": EFFICIENT}  # in this order: cuDNN's kernels have "flash" in them, too
FORWARD, BACKWARD, BOTH = "forward", "backward", "forward and backward"
PARTS = {FORWARD: 1.0, BACKWARD: 2.5, BOTH: 3.5}  # of forward's work: backward has 5 products of N × N × D, forward 2
GOALS = {  # (part, variant, against, from which N on, {D: speed})
    "cpu": [
        (FORWARD, OURS, FLASH, 1024, {64: 0.8}),
        (FORWARD, OURS, PLAIN, 4096, {64: 2.5}),
        (BACKWARD, OURS, FLASH, 1024, {64: 0.7}),
        (BACKWARD, OURS, PLAIN, 1024, {64: 1.0}),
    ],
    "cuda": [
        (FORWARD, TRITON, CUDNN, 4096, {64: 0.9, 128: 0.75}),
        (BACKWARD, TRITON, CUDNN, 4096, {64: 0.45, 128: 0.45}),
    ],
}
MEMORY_AT, MEMORY_GOAL = (4096, 64), 0.1  # N and D; how much of plain attention's extra memory

# What is timed


@dataclass(frozen=True)
class Case:
    """length: N, of queries and of keys. heads: of all sequences together. head_size: D."""

    length: int
    heads: int
    head_size: int
    causal: bool


def cases(kind: str, full: bool = False) -> list[Case]:
    """The longer the sequences the fewer: q is always of one size. kind: "cpu" or "cuda"."""
    longest, numel, head_sizes = (14, 2**25, (64, 128)) if kind == "cuda" else (13 if full else 12, 2**19, (64,))
    lengths = [2**power for power in range(10 if kind == "cuda" else 8, longest + 1)]
    return [Case(n, numel // (n * d), d, causal) for d in head_sizes for causal in (False, True) for n in lengths]


def device() -> str:
    """A GPU that computes with bfloat16, or else the CPU."""
    return "cuda" if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0) else "cpu"


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool, backend: SDPBackend) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def attentions(kind: str) -> dict[str, Callable]:
    """{variant: attention}, PyTorch's own first."""
    backends = BACKENDS if kind == "cuda" else {FLASH: BACKENDS[FLASH]}
    found = {name: partial(sdpa, backend=backend) for name, backend in backends.items()}
    found |= {PLAIN: attention, OURS: flash_attention}
    if kind == "cuda" and importlib.util.find_spec("triton"):
        from ..flash_triton import flash_attention_triton

        found[TRITON] = flash_attention_triton
    return found


class Contender:
    """One attention on given inputs: q, k, v and the gradient of the result, each (1, heads, N, D).

    found: (o, dq, dk, dv). calls: in a turn. extra_bytes: the most from the start of forward to the end of backward,
    beyond the inputs; on a CPU without what one of PyTorch's operations takes and gives back inside. kernel: the
    longest of forward; on a CPU the operation, if there is one for all of attention. RuntimeError: it can't run.
    """

    def __init__(self, attend: Callable, inputs: list[nn.Parameter], causal: bool):
        *self._qkv, self._upstream = inputs
        self._attend = partial(attend, *self._qkv, causal=causal)
        self.found, self.calls = self._once(), 1
        self.calls = math.ceil(TURN_S / sum(self.turn()))
        if self._upstream.is_cuda:
            before = torch.cuda.memory_allocated()
            self.extra_bytes = allocator_peak(self._once).allocated - before
            with profile() as seen:
                timed(self._attend)
            self.kernel = longest_kernel(seen.events())
        else:
            with watch(nn.ParameterList(inputs)) as timeline:
                self._once()
            self.extra_bytes = max(timeline.totals) - timeline.totals[0]
            self.kernel = next((op for op in timeline.ops if "attention" in op), "")

    def _once(self) -> tuple[Tensor, ...]:
        o = self._attend()
        return o.detach(), *torch.autograd.grad(o, self._qkv, self._upstream)

    def turn(self) -> tuple[float, float]:
        """Seconds of a forward, and of a backward."""
        forward, o = timed(self._attend, self.calls)
        grad = partial(torch.autograd.grad, o, self._qkv, self._upstream, retain_graph=True)
        return forward, timed(grad, self.calls)[0]


def timed(call: Callable, calls: int = 1) -> tuple[float, object]:
    """(seconds of a call, what the last one returned)."""
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    synchronize()
    begun = time.perf_counter()
    for _ in range(calls):
        found = call()
    synchronize()
    return (time.perf_counter() - begun) / calls, found


def longest_kernel(events: Iterable) -> str:
    """events: the profiler's, of which those on the CPU don't count."""
    kernels = [event for event in events if event.device_type == DeviceType.CUDA]
    return max(kernels, key=lambda event: event.time_range.elapsed_us()).name


def ran(kernel: str) -> str:
    """The variant of SDPA that has this kernel."""
    return next((variant for part, variant in NAMED.items() if part in kernel.lower()), f"SDPA, {kernel}")


# On a rank, the only one: a process of its own, with one thread


def time_on_rank(case: Case, rounds: int) -> list["Timed"]:
    torch.set_num_threads(1)
    interleave.pin_to_a_core()
    torch.manual_seed(0)
    kind = device()
    random = partial(torch.randn, device=kind, dtype=FORMATS[kind])
    inputs = [nn.Parameter(x) for x in random(4, 1, case.heads, case.length, case.head_size)]
    able, square = choose(attentions(kind), inputs, case.causal), random(SQUARE[kind], SQUARE[kind])

    def turn(name: str) -> tuple[float, ...]:
        return able[name].turn() if name in able else timed(lambda: square @ square)[:1]

    for name in [*able, PRODUCT] * WARM_UP:
        turn(name)
    return together(case, able, interleave.take_turns([*able, PRODUCT], rounds, turn), 2 * SQUARE[kind] ** 3)


def choose(attends: dict[str, Callable], inputs: list[nn.Parameter], causal: bool) -> dict[str, Contender]:
    """{variant: contender}: those that can run, SDPA's named by what ran, and the first a second time.

    RuntimeError: one found something else than the first, so that its time would mean nothing.
    """
    able = {}
    for name, attend in attends.items():
        try:
            contender = Contender(attend, inputs, causal)
        except RuntimeError as error:
            if name not in BACKENDS and not isinstance(error, torch.OutOfMemoryError):
                raise
            print(f"{name} can't run: {str(error).splitlines()[0]}")
        else:
            able[ran(contender.kernel) if name in BACKENDS else name] = contender
    first = next(iter(able))
    for name, contender in able.items():
        for what, x, y in zip(("o", "dq", "dk", "dv"), contender.found, able[first].found, strict=True):
            off = ((x - y).norm() / y.norm()).item()
            if not off <= TOLERANCE[y.dtype]:
                raise RuntimeError(f"{name}: {what} is off by {off:.1e} of {first}'s: its time would mean nothing")
    return able | {first + AGAIN: able[first]}


# What was found


@dataclass(frozen=True)
class Timed(Result):
    """operation: part, head size and mask. nbytes: of the scores in float32, which only plain attention writes down.

    flop: the work that is due, whatever is really computed. ceiling_flops: per second, of the matrix product.
    extra_bytes, kernel: as a `Contender` has them.
    """

    part: str = ""
    case: Case | None = None
    flop: float = 0.0
    ceiling_flops: float = 0.0
    extra_bytes: int = 0
    kernel: str = ""


def together(case: Case, able: dict[str, Contender], turns: dict[str, list[tuple]], product_flop: int) -> list[Timed]:
    """turns: {variant: (forward, backward) of each round}, in seconds; the matrix product has one number."""
    ceiling_flops = product_flop / statistics.median(seconds for (seconds,) in turns[PRODUCT])
    scores, found = case.heads * case.length**2, []
    for name, contender in able.items():
        forward, backward = zip(*turns[name], strict=True)
        seconds = {FORWARD: forward, BACKWARD: backward, BOTH: tuple(map(operator.add, forward, backward))}
        for part, times in PARTS.items():
            operation = f"{part}, D {case.head_size}" + ", causal" * case.causal
            flop = times * 4 * scores * case.head_size / (2 if case.causal else 1)
            about = case, flop, ceiling_flops, contender.extra_bytes, contender.kernel
            found.append(Timed(operation, name, 1, 4 * scores, seconds[part], "", "", part, *about))
    return found


class Attentions(Results):
    """In the order of their measurement; printed, they are a table for each operation."""

    def by(self, key: Callable[[Timed], object]) -> list["Attentions"]:
        return [Attentions(each for each in self if key(each) == value) for value in dict.fromkeys(map(key, self))]

    def __repr__(self):
        tables = [bench.table(each._lines()) for each in self.by(lambda each: each.operation)]
        kernels = dict.fromkeys(f"{each.variant} ran {each.kernel}" for each in self.competing if each.kernel)
        return "\n\n".join([*tables, "\n".join([LEGEND, *kernels])])

    def _lines(self) -> list[tuple[str, ...]]:
        lines = [(self[0].operation, "N", "Time (ms)", "TFLOP/s", "Ceiling", "Extra MB", "Speed [95 %]", "A/A", "")]
        for each in self.competing:
            flops = each.flop / each.median_s
            line = each.variant, str(each.case.length), f"{each.median_s * 1e3:.4g}", f"{flops / 1e12:.3g}"
            line += f"{100 * flops / each.ceiling_flops:.0f} %", f"{each.extra_bytes / 1e6:.3g}"
            lines.append((*line, *self._comparison(each)))
        return lines


LEGEND = """\
Time: the median. TFLOP/s: of the same work for all, backward 2.5 × forward's. Ceiling: how much that is of a matrix
product's. Extra: at most, in forward and backward, beyond q, k, v. Speed: how many times as fast as the first, round by
round; A/A: the first against itself."""


def measure(what: list[Case], rounds: int = ROUNDS) -> Attentions:
    """Time every attention in every case. ValueError: no round."""
    if rounds < 1:
        raise ValueError(f"expected 1 round or more, got {rounds}")
    found = Attentions()
    for case in what:
        found += launch(time_on_rank, case, rounds, world_size=1, backend="gloo")[0]
    return found


def judged(found: Attentions, kind: str) -> list[tuple[str, str, str, str]]:
    """(what, goal, measured, whether it is met) of every goal that was measured. kind: "cpu" or "cuda"."""
    lines = []
    for rivals in found.by(lambda each: (each.operation, each.nbytes)):
        first, extra = rivals[0], {each.variant: each.extra_bytes for each in rivals}
        n, d = first.case.length, first.case.head_size
        for part, variant, against, least, speeds in GOALS[kind]:
            if part == first.part and n >= least and d in speeds:
                goals = judge([Goal(variant, against, 1, first.nbytes, speeds[d])], rivals)
                lines += [(f"{variant}, {first.operation}, N {n}", g.text, str(ratio), met) for g, ratio, met in goals]
        for variant in (OURS, TRITON):
            if (first.part, n, d) == (BOTH, *MEMORY_AT) and {variant, PLAIN} <= extra.keys():
                ratio, goal = extra[variant] / extra[PLAIN], f"≤ {MEMORY_GOAL:g} × the extra memory of {PLAIN}"
                met = "yes" if ratio <= MEMORY_GOAL else "NO"
                lines.append((f"{variant}, {first.operation}, N {n}", goal, f"{ratio:.3f}", met))
    return lines


# For `python -m ddpkit.bench`


def main(full: bool = False):
    report(measure(cases(device(), full)), device())


def report(found: Attentions, kind: str) -> None:
    """Print tables and goals; keep them, and every single time, in bench-results."""
    where = torch.cuda.get_device_name() if kind == "cuda" else "one core"
    print(f"attention, on {where}, {FORMATS[kind]}\n{found}\n")
    goals = judged(found, kind)
    print(bench.table([("Goals", "", "measured", "met?"), *goals]))
    bench.save("attention", {"results": [asdict(each) | {"median_s": each.median_s} for each in found], "goals": goals})
