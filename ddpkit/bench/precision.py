"""Matrix products and training steps in every format for which this machine has units.

A format without units is converted, or computed number by number, and takes many times as long: a
time of it says nothing about the format, so it is named and not timed. What a step could gain at
most is what its matrix products gain. On a GPU if there is one, else on one core.
"""

import contextlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ..mixed_precision import MixedPrecisionOptimizer
from .interleave import Contest, race
from .results import AGAIN, SPEED, Result, Results, report

ROUNDS, WARM_UP = 12, 3
ON_CPU, ON_GPU = (512, 1024, 4), (8192, 4096, 4)  # rows, width, layers of the model
FORMATS = {"fp32": torch.float32, "tf32": torch.float32}
FORMATS |= {"bf16": torch.bfloat16, "fp16": torch.float16}
PRODUCT, STEP, AUTOCAST = "matrix product", "training step", ", autocast"
CPUINFO = Path("/proc/cpuinfo")
CPU_UNITS = {  # flags of x86 and Arm
    "bf16": {"avx512_bf16", "amx_bf16", "bf16"},
    "fp16": {"avx512_fp16", "amx_fp16", "asimdhp"},
}
GPU_UNITS = {"tf32": (8, 0), "bf16": (8, 0), "fp16": (7, 0)}  # compute capability, from which on

# What this machine has


def units() -> dict[str, str]:
    """{format: what computes with it here}; fp32 first, and none for which there is nothing."""
    if torch.cuda.is_available():
        return gpu_units(torch.cuda.get_device_capability())
    return cpu_units(CPUINFO.read_text() if CPUINFO.exists() else "")


def gpu_units(capability: tuple[int, int]) -> dict[str, str]:
    what = f"compute capability {capability[0]}.{capability[1]}"
    able = [name for name, least in GPU_UNITS.items() if capability >= least]
    return dict.fromkeys(["fp32", *able], what)


def cpu_units(cpuinfo: str) -> dict[str, str]:
    """cpuinfo: as Linux tells it; "" where nothing is known, and nothing claimed."""
    flags = set()
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            flags |= set(value.split())
    found = {"fp32": "every CPU"}
    for name, wanted in CPU_UNITS.items():
        if flags & wanted:
            found[name] = ", ".join(sorted(flags & wanted))
    return found


# What is timed


@contextlib.contextmanager
def products_in(name: str):
    """Inside, a GPU multiplies fp32 matrices in tf32 if that is the format, and in fp32 if not."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def product(a: Tensor, b: Tensor, name: str) -> Tensor:
    with products_in(name):
        return a @ b


class Training:
    """AdamW, fused, on Linears and GELUs: mixed precision in a 16-bit format, or autocast."""

    def __init__(self, name: str, size: tuple, device: torch.device, autocast: bool = False):
        torch.manual_seed(0)
        rows, width, layers = size
        self.name, dtype = name, FORMATS[name]
        self.model = nn.Sequential(*(block(width) for _ in range(layers))).to(device)
        self.x, self.target = torch.randn(2, rows, width).to(device)
        self.context = contextlib.nullcontext
        parameters, options = self.model.parameters(), {"lr": 1e-3, "fused": True}
        if dtype == torch.float32 or autocast:
            self.optimizer = torch.optim.AdamW(parameters, **options)
        else:
            self.optimizer = MixedPrecisionOptimizer(
                parameters, torch.optim.AdamW, dtype, **options
            )
            self.x = self.x.to(dtype)
        if autocast:
            self.context = partial(torch.autocast, device.type, dtype)

    def step(self) -> Tensor:
        """Returns the loss before it."""
        self.optimizer.zero_grad()
        scale = getattr(self.optimizer, "scale", lambda loss: loss)
        with products_in(self.name):
            with self.context():
                loss = (self.model(self.x).float() - self.target).square().mean()
            scale(loss).backward()
        self.optimizer.step()
        return loss.detach()


def block(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.GELU())


def make_contest(names: list[str], size: tuple, plain: ProcessGroup) -> Contest:
    """Of (kind, variant), fp32 first; `found` tells the mean of what each returned last."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows, width, _ = size
    calls, last = {}, {}
    for variant in [*names, "fp32" + AGAIN]:
        name = variant.removesuffix(AGAIN)
        a, b = (torch.randn(n, width, device=device).to(FORMATS[name]) for n in (rows, width))
        calls[PRODUCT, variant] = partial(product, a, b, name)
        calls[STEP, variant] = Training(name, size, device).step
        if name == "bf16":  # fp16 would need a scaler
            calls[STEP, name + AUTOCAST] = Training(name, size, device, autocast=True).step

    def keep(which: tuple[str, str]) -> None:
        last[which] = calls[which]()

    def means() -> dict[tuple[str, str], float]:
        return {which: result.float().mean().item() for which, result in last.items()}

    return Contest({which: partial(keep, which) for which in calls}, found=means)


# What was found


@dataclass(frozen=True)
class Timed(Result):
    """operation: product or step; nbytes: of the weights in fp32. loss: after all steps."""

    flop: float = 0.0
    loss: float = 0.0


class Formats(Results):
    """missing: the formats without units."""

    columns = "Time (ms)", "TFLOP/s", "Loss"
    missing: tuple[str, ...] = ()

    @property
    def legend(self) -> str:
        told = "Time: the median. A step gains at most what its matrix products gain.\n" + SPEED
        missing = f"\nNot timed, for want of units: {', '.join(self.missing)}."
        return told + missing if self.missing else told

    def title(self) -> str:
        return self[0].operation

    def cells(self, timed: Timed) -> tuple[str, ...]:
        time_ms, flops = timed.median_s * 1e3, timed.flop / timed.median_s
        loss = f"{timed.loss:.4f}" if timed.operation == STEP else ""
        return f"{time_ms:.3g}", f"{flops / 1e12:.3g}", loss


def measure(size: tuple[int, int, int] | None = None, rounds: int = ROUNDS) -> Formats:
    """Time products and steps in the formats that this machine has units for.

    size: rows, width, layers of the model (None: what keeps a core, or a GPU, busy). ValueError: no
    round. RuntimeError: a format learned something else than fp32: its time would mean nothing.
    """
    names = list(units())
    rows, width, layers = size = size or (ON_GPU if torch.cuda.is_available() else ON_CPU)
    seconds, (last,) = race(partial(make_contest, names, size), rounds, WARM_UP)
    check_losses({name: loss for (kind, name), loss in last.items() if kind == STEP})
    flop, found = 2.0 * rows * width * width, Formats()
    for (kind, name), of_rounds in sorted(seconds.items(), key=lambda each: each[0][0]):
        products = 1 if kind == PRODUCT else 3 * layers - 1  # the input needs no gradient
        case = 1, 4 * layers * width * width, of_rounds
        found.append(Timed(kind, name, *case, flop=products * flop, loss=last[kind, name]))
    found.missing = tuple(name for name in FORMATS if name not in names)
    return found


def check_losses(losses: dict[str, float]) -> None:
    for name, loss in losses.items():
        if not abs(loss - losses["fp32"]) <= 0.02 * losses["fp32"]:
            wrong = f"{name} has a loss of {loss}, fp32 {losses['fp32']}"
            raise RuntimeError(f"{wrong}: its time would mean nothing")


def main():
    has = ", ".join(f"{name} ({what})" for name, what in units().items())
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "one core"
    report("precision", f"{where}; units for {has}", measure(rounds=ROUNDS))
