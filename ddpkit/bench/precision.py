"""Matrix products and training steps in every format for which this machine has units.

A format without units is converted, or computed number by number, and takes many times as long: its
time says nothing about the format, so it is named and not timed. A step can gain at most as much as
its matrix products do. On a GPU if there is one, otherwise on one core.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ..mixed_precision import MixedPrecisionOptimizer
from .interleave import Contest, check_close, race
from .results import AGAIN, SPEED, Result, Results, report

ROUNDS = 12
ON_CPU, ON_GPU = (512, 1024, 4), (8192, 4096, 4)  # rows, width, layers of the model
FORMATS = {"fp32": torch.float32, "tf32": torch.float32}
FORMATS |= {"bf16": torch.bfloat16, "fp16": torch.float16}
PRODUCT, STEP, AUTOCAST = "matrix product", "training step", ", autocast"
CPU_UNITS = {  # of x86 and Arm, as `torch.cpu` calls them
    "bf16": {"avx512_bf16", "amx_bf16", "bf16"},
    "fp16": {"avx512_fp16", "amx_fp16", "fp16_arith"},
}
GPU_UNITS = {"tf32": (8, 0), "bf16": (8, 0), "fp16": (7, 0)}  # compute capability, from which on
LEGEND = f"""\
Time: the median. A step gains at most what its matrix products gain.
{SPEED}"""


def units() -> list[str]:
    """List the formats for which this machine is known to have units, fp32 first."""
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        able = [name for name, least in GPU_UNITS.items() if capability >= least]
    else:
        there = {name for name, has in torch.cpu.get_capabilities().items() if has}
        able = [name for name, units in CPU_UNITS.items() if units & there]
    return ["fp32", *able]


# The work that is timed


def trainer(
    name: str, size: tuple[int, int, int], device: torch.device, autocast: bool = False
) -> Callable[[], Tensor]:
    """Return a function that takes a step of AdamW, fused, and returns the loss before the step.

    name: a key of `FORMATS`; one of 16 bits is used by `MixedPrecisionOptimizer` or, if `autocast`,
    by torch.autocast. size: rows, width and layers of the model; a layer is a Linear and a GELU.
    """
    torch.manual_seed(0)
    rows, width, layers = size
    dtype = FORMATS[name]
    blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)]
    model = nn.Sequential(*blocks).to(device)
    x, target = torch.randn(2, rows, width).to(device)
    adamw, options = torch.optim.AdamW, {"lr": 1e-3, "fused": True}
    if dtype == torch.float32 or autocast:
        optimizer = adamw(model.parameters(), **options)
    else:
        optimizer = MixedPrecisionOptimizer(model.parameters(), adamw, dtype, **options)
        x = x.to(dtype)

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype, enabled=autocast):
            loss = (model(x).float() - target).square().mean()
        scaled = optimizer.scale(loss) if hasattr(optimizer, "scale") else loss
        scaled.backward()
        optimizer.step()
        return loss.detach()

    return step


def make_contest(names: list[str], size: tuple, plain: ProcessGroup) -> Contest:
    """Make the contest of all (PRODUCT or STEP, variant), fp32 first; `found`: {variant: loss}."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows, width, _ = size
    products, steps = {}, {}
    for variant in [*names, "fp32" + AGAIN]:
        name = variant.removesuffix(AGAIN)
        a, b = (torch.randn(n, width, device=device).to(FORMATS[name]) for n in (rows, width))
        products[PRODUCT, variant] = partial(torch.matmul, a, b)
        steps[STEP, variant] = trainer(name, size, device)
        if name == "bf16":  # fp16 would need a scaler
            steps[STEP, name + AUTOCAST] = trainer(name, size, device, autocast=True)

    def before(which: tuple[str, str]) -> None:
        """Let a GPU multiply fp32 matrices in tf32 if that is the format, otherwise in fp32."""
        torch.set_float32_matmul_precision("high" if "tf32" in which else "highest")

    def found() -> dict[str, float]:
        losses = {variant: step() for (_, variant), step in steps.items()}
        for variant, loss in losses.items():
            check_close(f"the loss in {variant}", loss, losses["fp32"], 0.02)
        return {variant: loss.item() for variant, loss in losses.items()}

    return Contest(products | steps, before, found)


# Results


def measure(size: tuple[int, int, int] | None = None, rounds: int = ROUNDS) -> Results:
    """Time products and steps in the formats that this machine has units for.

    size: rows, width, layers of the model (None: what keeps a core, or a GPU, busy). ValueError: no
    round. RuntimeError: a format's last loss isn't fp32's within 2 %.
    """
    names = units()
    size = size or (ON_GPU if torch.cuda.is_available() else ON_CPU)
    seconds, (losses,) = race(partial(make_contest, names, size), rounds, backend="auto")
    missing = ", ".join(name for name in FORMATS if name not in names)
    told = f"\nNot timed, for want of units: {missing}." if missing else ""
    return Results(together(size, seconds, losses), LEGEND + told)


def together(size: tuple[int, int, int], seconds: dict, losses: dict) -> list[Result]:
    """Make results. seconds: {(kind, variant): by round}; losses: {variant: after all steps}."""
    rows, width, layers = size
    found = []
    for (kind, variant), of_rounds in seconds.items():
        products = 1 if kind == PRODUCT else 3 * layers - 1  # the input needs no gradient
        result = Result(kind, variant, 1, 0, of_rounds)
        flops = products * 2 * rows * width**2 / result.median_s
        result.columns["TFLOP/s"] = f"{flops / 1e12:.3g}"
        result.columns["Loss"] = f"{losses[variant]:.4f}" if kind == STEP else ""
        found.append(result)
    return found


def main(name: str):
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "one core"
    report(name, measure(), where=f"{where}; units for {', '.join(units())}")
