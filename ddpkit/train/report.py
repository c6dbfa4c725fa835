"""Report a training's speed: tokens a second, share of the machine's FLOP/s, waits; loss curve."""

import time
from pathlib import Path

import torch
import torch.distributed as dist

from ..tools.units import duration
from .config import TrainConfig
from .trainer import Trainer

MEASURED_S = 0.1  # seconds of matrix products, to measure the machine


class Progress:
    """The speed of a training: tokens a second and MFU, from the seconds that a step took.

    MFU, model FLOP utilisation: tokens/s · (6Ψ + 12 · layers · width · length), Ψ the weights that
    a token passes, over the FLOP/s that the ranks reach in matrix products, all at the same time.
    Making a `Progress` measures that (`measure_products`): every rank must. Chowdhery et al. 2022
    (PaLM), appendix B.
    """

    def __init__(self, trainer: Trainer):
        c = trainer.config
        self.tokens = c.batch * c.length
        self.flops_a_token = flops_a_token(c)
        self.peak = measure_products(c, trainer.device)

    def rates(self, seconds: float) -> dict[str, float]:
        """Return {"tokens_per_s", "mfu"} of a step that took `seconds`, all ranks together."""
        a_second = self.tokens / seconds
        return {"tokens_per_s": a_second, "mfu": a_second * self.flops_a_token / self.peak}


def flops_a_token(c: TrainConfig) -> float:
    """Return a token's FLOPs in forward and backward: 6 a weight, and attention's two products."""
    weights = c.layers * 12 * c.width**2 + 256 * c.width
    if c.experts:
        weights += c.layers * (c.top_k - 1) * 8 * c.width**2
    return 6 * weights + 12 * c.layers * c.width * c.length


def measure_products(c: TrainConfig, device: torch.device) -> float:
    """Return the FLOP/s that all ranks together reach, in matrix products as in the model's MLPs.

    They are in the dtype that the run's products have, and not cut by tensor ranks. Every rank must
    call. It takes `MEASURED_S` seconds.
    """
    dtype = torch.float64 if c.exact else getattr(torch, c.dtype)
    rows = max(1, c.batch * c.length // (c.replicas * c.micro_batches))
    x = torch.randn(rows, c.width, dtype=dtype, device=device)
    weight = torch.randn(c.width, 4 * c.width, dtype=dtype, device=device)
    dist.barrier()
    begun = time.perf_counter()
    products = 0
    while time.perf_counter() - begun < MEASURED_S:
        for _ in range(8):
            x @ weight
        products += 8
        if device.type == "cuda":
            torch.cuda.synchronize()
    seconds = time.perf_counter() - begun
    mine = products * 2 * rows * c.width * 4 * c.width / seconds
    everyones = torch.tensor(mine, dtype=torch.float64, device=device)
    dist.all_reduce(everyones)
    return everyones.item()


def progress_line(c: TrainConfig, step: dict) -> str:
    """Return a step's line for printing: step, loss, tokens a second, MFU, time, share of waits.

    step: an entry of the log that `train` returns; only under `launch` it has the waits.
    """
    loss = f"{step['loss']:.0f}" if c.exact else f"{step['loss']:.3f}"
    line = (
        f"step {step['step'] + 1:>{len(str(c.steps))}} of {c.steps}  loss {loss}  "
        f"{step['tokens_per_s']:,.0f} tokens/s  MFU {step['mfu']:.0%}  "
        f"{duration(step['seconds'])} a step"
    )
    if "exposed" in step:  # calls are recorded under `launch`
        line += f", {step['exposed'] / step['seconds']:.0%} of it waiting"
    return line


def draw_curve(steps: list[dict], path: str | Path) -> None:
    """Save a picture of the loss by step; without matplotlib do nothing: the log has the numbers.

    steps: entries of the log, as `read_log` returns them. path: of the picture.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.plot([step["step"] + 1 for step in steps], [step["loss"] for step in steps])
    axes.set(xlabel="step", ylabel="loss, nats a byte")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
