"""The calculators of notebooks 04 and 07: bucket caps on a wire, and ZeRO's stages."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch

from .. import cost, ddp, memory
from ..tools.units import binary_size, count, duration, size
from . import charts
from .page import Picture
from .widgets import Calculator, Slider

LATENCIES_S = (1e-3, 3e-3, 10e-3)


def bucket_calculator(
    gradients: Sequence[tuple[int, torch.dtype]],
    ready_s: Sequence[float],
    model: cost.CostModel,
    world_size: int,
) -> Calculator:
    """Make sliders over bucket cap and latency that redraw the predicted timeline of a step.

    gradients: (bytes, dtype) of each, in the order in which they become ready. ready_s: when, in
    seconds after backward began. model, world_size: as in `cost.timeline`. The latency slider
    offers the model's own and the larger ones of `LATENCIES_S`. All caps of a latency share one
    scale. The stored text states no times, because they were measured. Notebook 04.
    """
    sizes = [nbytes for nbytes, _ in gradients]
    plans = bucket_plans(gradients)
    larger = [latency_s for latency_s in LATENCIES_S if latency_s > model.latency_s]
    latencies_s = [model.latency_s, *larger]

    @cache
    def longest_s(wire: cost.CostModel) -> float:
        lines = [cost.timeline(plan, ready_s, sizes, wire, world_size) for plan in plans.values()]
        return max(line.done[-1] for line in lines)

    def step(cap_bytes: int, latency_s: float) -> tuple[str, Picture]:
        plan, wire = plans[cap_bytes], replace(model, latency_s=latency_s)
        until_s = longest_s(wire)
        exposed_ms = 1e3 * cost.timeline(plan, ready_s, sizes, wire, world_size).exposed_s
        caption = (
            f"bucket cap {binary_size(cap_bytes)}, latency {duration(latency_s)}: "
            f"{count(len(plan), 'message')}, {exposed_ms:.1f} ms exposed"
        )
        return caption, charts.bucket_timeline(plan, ready_s, sizes, wire, world_size, until_s)

    middle = list(plans)[len(plans) // 2]
    return Calculator(
        step,
        charts.describe_buckets(plans[middle]),
        cap_bytes=Slider("bucket cap", list(plans), middle, binary_size),
        latency_s=Slider("latency α", latencies_s, model.latency_s, duration),
    )


def bucket_plans(gradients: Sequence[tuple[int, torch.dtype]]) -> dict[int, list[list[int]]]:
    """Return {cap in bytes: plan} for caps that double, from a bucket a gradient to one for all.

    Of several caps with the same plan, the largest is kept. gradients: as for `ddp.plan_buckets`.
    """
    last: dict[str, tuple[int, list[list[int]]]] = {}
    for power in range(sum(nbytes for nbytes, _ in gradients).bit_length() + 1):
        plan = ddp.plan_buckets(gradients, 2**power)
        last[str(plan)] = 2**power, plan
    return dict(last.values())


MODELS = {"0.5B": 500_000_000, "3B": 3_000_000_000, "7.5B": 7_500_000_000, "70B": 70_000_000_000}
MODELS["XXL, 219.8B"] = 126 * 2 * 16384 * 53248  # 126 times two linear layers


def zero_calculator() -> Calculator:
    """Make sliders over ZeRO's stages that show the bytes a rank keeps and sends. Notebook 07."""
    return Calculator(
        zero_stage,
        model=Slider("model", list(MODELS), "7.5B"),
        world_size=Slider("ranks", [2**power for power in range(11)], 64),
        stage=Slider("stage", [0, 1, 2, 3], 1),
    )


def zero_stage(model: str, world_size: int, stage: int) -> tuple[str, Picture]:
    """Return caption and picture of `zero_calculator` for one setting of its sliders.

    For mixed precision with AdamW.
    """
    parameters = MODELS[model]
    rows = {}
    for number in range(4):
        rows[f"stage {number}"] = memory.model_states(parameters, number, world_size)._asdict()
    total = sum(rows[f"stage {stage}"].values())
    passes = 3 if stage == 3 else 2  # of the parameters, in half precision
    sent_bytes = passes * 2 * parameters * (world_size - 1) / world_size
    fits = "fits" if total < charts.GPU_BYTES else "doesn't fit"
    kept = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in rows[f"stage {stage}"].items())
    caption = (
        f"{model} on {count(world_size, 'rank')}, stage {stage}: {kept}: {size(total)} on "
        f"each, which {fits} on a GPU of {size(charts.GPU_BYTES)}, activations not counted. "
        f"Each sends {size(sent_bytes)} in a step."
    )
    title = f"Model states on each of {count(world_size, 'rank')}"
    return caption, charts.byte_bars(rows, title, f"stage {stage}")
