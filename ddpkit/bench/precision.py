"""Matrix products and training steps in every format for which this machine has units; the others are named, not timed.

A format without units is converted, or computed number by number, and takes many times as long as fp32: a time of it
says nothing about the format. What a step could gain at most is what its matrix products gain; that ceiling is timed in
the same rounds, with a product of the same size as the model's. On a GPU if there is one, else on one core.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from .. import bench
from ..mixed_precision import LossScaler, MixedPrecisionOptimizer
from ..runtime.launch import launch
from . import interleave
from .results import AGAIN, Result, Results

ROUNDS, WARM_UP = 12, 3
ON_CPU, ON_GPU = (512, 1024, 4), (8192, 4096, 4)  # rows, width, layers of the model
FORMATS = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PRODUCT, STEP = "matrix product", "training step"
AUTOCAST = ", autocast"
CPUINFO = Path("/proc/cpuinfo")
CPU_UNITS = {"bf16": {"avx512_bf16", "amx_bf16", "bf16"}, "fp16": {"avx512_fp16", "amx_fp16", "asimdhp"}}  # x86 and Arm
GPU_UNITS = {"tf32": (8, 0), "bf16": (8, 0), "fp16": (7, 0)}  # compute capabilities, from which on

# What this machine has


def units() -> dict[str, str]:
    """{format: what computes with it here}; fp32 first, and none for which there is nothing."""
    if torch.cuda.is_available():
        return gpu_units(torch.cuda.get_device_capability())
    return cpu_units(CPUINFO.read_text() if CPUINFO.exists() else "")


def gpu_units(capability: tuple[int, int]) -> dict[str, str]:
    what = f"compute capability {capability[0]}.{capability[1]}"
    return {"fp32": what} | {name: what for name, least in GPU_UNITS.items() if capability >= least}


def cpu_units(cpuinfo: str) -> dict[str, str]:
    """cpuinfo: as Linux tells it; "" where nothing is known, and nothing claimed."""
    lines = [line.partition(":") for line in cpuinfo.splitlines()]
    flags = {flag for key, _, value in lines if key.strip() in ("flags", "Features") for flag in value.split()}
    found = {name: ", ".join(sorted(flags & wanted)) for name, wanted in CPU_UNITS.items()}
    return {"fp32": "every CPU"} | {name: what for name, what in found.items() if what}


# What is timed


@contextlib.contextmanager
def products_in(name: str) -> Iterator[None]:
    """Inside, a GPU multiplies fp32 matrices in tf32 if that is the format, and in fp32 if not."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def make_product(name: str, rows: int, width: int, device: torch.device) -> Callable[[], Tensor]:
    """Rows times a square matrix, as in a layer of the model."""
    a, b = (torch.randn(n, width, device=device).to(FORMATS[name]) for n in (rows, width))

    def product() -> Tensor:
        with products_in(name):
            return a @ b

    return product


class Training:
    """AdamW, fused, on Linear layers and GELUs: with mixed precision in a 16-bit format, or under autocast."""

    def __init__(self, name: str, rows: int, width: int, layers: int, device: torch.device, autocast: bool = False):
        torch.manual_seed(0)
        modules = [module for _ in range(layers) for module in (nn.Linear(width, width), nn.GELU())]
        self._model = nn.Sequential(*modules).to(device)
        self._x, self._target = torch.randn(2, rows, width).to(device)
        self._name, self._context = name, contextlib.nullcontext
        parameters, options = self._model.parameters(), {"lr": 1e-3, "fused": True}
        if FORMATS[name] == torch.float32 or autocast:
            self._optimizer = torch.optim.AdamW(parameters, **options)
            self._scale, self._update = lambda loss: loss, self._optimizer.step
        else:
            self._optimizer = MixedPrecisionOptimizer(parameters, torch.optim.AdamW, FORMATS[name], **options)
            self._scale, self._update = self._optimizer.scale, self._optimizer.step
            self._x = self._x.to(FORMATS[name])
        if autocast:
            self._context = partial(torch.autocast, device.type, FORMATS[name])
        if autocast and name == "fp16":
            self._scale, self._update = self._scaled(LossScaler())

    def _scaled(self, scaler: LossScaler) -> tuple[Callable, Callable]:
        def update() -> None:
            scaler.step(self._optimizer)
            scaler.update()

        return scaler.scale, update

    def step(self) -> Tensor:
        """Returns the loss before it."""
        self._optimizer.zero_grad()
        with products_in(self._name):
            with self._context():
                loss = (self._model(self._x).float() - self._target).square().mean()
            self._scale(loss).backward()
        self._update()
        return loss.detach()


def variants(kind: str, names: list[str], size: tuple[int, int, int], device: torch.device) -> dict[str, Callable]:
    """{variant: does it once, returns a tensor}, fp32 first; each trains a model of its own."""
    rows, width, layers = size
    again = {name: name for name in names} | {"fp32" + AGAIN: "fp32"}
    if kind == PRODUCT:
        return {variant: make_product(name, rows, width, device) for variant, name in again.items()}
    found = {variant: Training(name, rows, width, layers, device).step for variant, name in again.items()}
    for name in names:
        if FORMATS[name] != torch.float32:
            found[name + AUTOCAST] = Training(name, rows, width, layers, device, autocast=True).step
    return found


# On a rank, the only one: a process of its own, with one thread


def time_on_rank(names: list[str], size: tuple[int, int, int], rounds: int) -> dict[str, tuple[dict, dict]]:
    """{kind: ({variant: (begun, done) of each round}, {variant: the mean of what it returned last})}."""
    torch.set_num_threads(1)
    interleave.pin_to_a_core()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    calls = {
        (kind, name): call for kind in (PRODUCT, STEP) for name, call in variants(kind, names, size, device).items()
    }
    last = {}

    def turn(which: tuple[str, str]) -> tuple[float, float]:
        begun = time.perf_counter()
        last[which] = calls[which]()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return begun, time.perf_counter()

    for which in list(calls) * WARM_UP:
        turn(which)
    turns = interleave.take_turns(list(calls), rounds, turn)
    found = {kind: ({}, {}) for kind in (PRODUCT, STEP)}
    for kind, name in calls:
        found[kind][0][name], found[kind][1][name] = turns[kind, name], last[kind, name].float().mean().item()
    return found


# What was found


@dataclass(frozen=True)
class Timed(Result):
    """operation: product or step; nbytes: of the model's weights in fp32. flop: of a call. loss: after all steps."""

    flop: float = 0.0
    loss: float = 0.0


class Formats(Results):
    """In the order of their measurement; printed, they are two tables. missing: the formats without units."""

    missing: tuple[str, ...] = ()

    def gain(self, timed: Timed) -> str:
        """How many times as fast as fp32's are the matrix products of a step's format."""
        name = timed.variant.removesuffix(AUTOCAST)
        product = next(each for each in self if (each.operation, each.variant) == (PRODUCT, name))
        return f"{self.speed(product).median:.2f}"

    def __repr__(self):
        if not self:
            return "nothing measured"
        blocks = [bench.table(self._lines(kind)) for kind in (PRODUCT, STEP)]
        without = [f"Not timed, for want of units: {', '.join(self.missing)}."] * bool(self.missing)
        return "\n\n".join(blocks) + "\n" + "\n".join([LEGEND, *without])

    def _lines(self, kind: str) -> list[tuple[str, ...]]:
        head = (kind.capitalize(), "Time (ms)", "TFLOP/s", "Speed [95 %]", "A/A", "")
        lines = [head if kind == PRODUCT else (*head, "Ceiling", "Loss")]
        for timed in self:
            if timed.operation != kind or timed.variant.endswith(AGAIN):
                continue
            baseline, control = timed.variant == "fp32", self.control(timed)
            line = (
                timed.variant,
                f"{timed.median_s * 1e3:.3g}",
                f"{timed.flop / timed.median_s / 1e12:.3g}",
                "1" if baseline else str(self.speed(timed)),
                f"{control.low:.2f}–{control.high:.2f}",
                "" if baseline else self.verdict(timed),
            )
            lines.append(line if kind == PRODUCT else (*line, self.gain(timed), f"{timed.loss:.4f}"))
        return lines


LEGEND = """\
Time: the median. Speed: how many times as fast as fp32, round by round; A/A: fp32 against itself. Ceiling of a step:
the speed of its matrix products alone."""


def measure(size: tuple[int, int, int] | None = None, rounds: int = ROUNDS) -> Formats:
    """Time products and steps in the formats that this machine has units for.

    size: rows, width and layers of the model (None: what keeps a core, or a GPU, busy). ValueError: no round.
    RuntimeError: a format learned something else than fp32, so that its time would mean nothing.
    """
    if rounds < 1:
        raise ValueError(f"expected 1 round or more, got {rounds}")
    names = list(units())
    rows, width, layers = size = size or (ON_GPU if torch.cuda.is_available() else ON_CPU)
    found = launch(time_on_rank, names, size, rounds, world_size=1, backend="gloo")[0]
    product_flop, weight_bytes = 2.0 * rows * width * width, 4 * layers * width * width
    flop = {PRODUCT: product_flop, STEP: (3 * layers - 1) * product_flop}  # the first layer's input needs no gradient
    check_losses(found[STEP][1])
    formats = Formats()
    for kind, (turns, last) in found.items():
        for name, seen in turns.items():
            seconds = interleave.until_the_last([seen])
            formats.append(Timed(kind, name, 1, weight_bytes, seconds, flop=flop[kind], loss=last[name]))
    formats.missing = tuple(name for name in FORMATS if name not in names)
    return formats


def check_losses(losses: dict[str, float]) -> None:
    for name, loss in losses.items():
        if not abs(loss - losses["fp32"]) <= 0.02 * losses["fp32"]:
            raise RuntimeError(f"{name} has a loss of {loss}, fp32 {losses['fp32']}: its time would mean nothing")


# For `python -m ddpkit.bench`


def main():
    report(measure())


def report(formats: Formats) -> None:
    """Print the tables; keep them, and every single time, in bench-results."""
    has = units()
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "one core"
    print(f"precision, on {where}; units for {', '.join(f'{name} ({what})' for name, what in has.items())}\n{formats}")
    results = [asdict(each) | {"median_s": each.median_s} for each in formats]
    bench.save("precision", {"units": has, "missing": formats.missing, "results": results})
