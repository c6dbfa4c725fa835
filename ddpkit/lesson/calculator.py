"""Make the calculators of notebooks 04 and 07: a step's time, and a rank's memory under ZeRO.

The time depends on the size of DDP's buckets, the memory on the stage, that is on what ZeRO shards.

A calculator is a notebook widget with a slider for each argument of a function. It shows the
caption and the picture that the function returns for the sliders' values.
"""

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
    """Return a widget with sliders for bucket cap and latency that predicts a step's timeline.

    During backward, gradients become ready one by one, and are collected in buckets of one dtype
    each. A bucket is full once its bytes reach the cap or no more gradients of its dtype follow. A
    full bucket is all-reduced, by a ring, after the bucket before it. The picture shows when
    gradients become ready and when buckets are sent. The caption states the milliseconds of exposed
    communication, which backward doesn't hide.

    gradients: (bytes, dtype) of each, in the order in which they become ready.
    ready_s: for each gradient, the time at which it is ready, in seconds after backward began.
    model: the latency and the bandwidth of the wire between ranks.
    world_size: the number of ranks.
    ValueError: no gradients, `ready_s` has another length, or `world_size` is below 1.

    The slider of caps has a power of two for each different way to fill the buckets. That of
    latencies has the model's own, and those of 1, 3 and 10 ms that are larger. Pictures of the same
    latency share a time scale. A saved notebook keeps a text in place of the widget, without times,
    since `ready_s` differs from run to run. Used in notebook 04.
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
    """Return {bucket cap in bytes: plan}, with one cap, a power of two, for each different plan.

    A bucket is a group of gradients of one dtype that one all-reduce sends. It takes gradients
    until its bytes reach the cap. A plan is a list of buckets in the order of sending, each a list
    of indices into `gradients`. Caps of 1, 2, 4, ... bytes are tried, up to the first that exceeds
    the size of all gradients together: with this cap there is one bucket for each dtype. Of caps
    with the same plan, the largest is kept.

    gradients: (bytes, dtype) of each, in the order in which they become ready.
    """
    last: dict[str, tuple[int, list[list[int]]]] = {}
    for power in range(sum(nbytes for nbytes, _ in gradients).bit_length() + 1):
        plan = ddp.plan_buckets(gradients, 2**power)
        last[str(plan)] = 2**power, plan
    return dict(last.values())


MODELS = {"0.5B": 500_000_000, "3B": 3_000_000_000, "7.5B": 7_500_000_000, "70B": 70_000_000_000}
MODELS["XXL, 219.8B"] = 126 * 2 * 16384 * 53248  # 126 times two linear layers


def zero_calculator() -> Calculator:
    """Return a widget that shows a rank's memory under ZeRO, by model, number of ranks and stage.

    In stage 0 each of N ranks keeps everything. Stage 1 leaves it 1/N of the optimizer's state;
    stage 2 also cuts the gradients to 1/N, and stage 3 the parameters. The widget shows what
    `zero_stage` returns. Used in notebook 07.
    """
    return Calculator(
        zero_stage,
        model=Slider("model", list(MODELS), "7.5B"),
        world_size=Slider("ranks", [2**power for power in range(11)], 64),
        stage=Slider("stage", [0, 1, 2, 3], 1),
    )


def zero_stage(model: str, world_size: int, stage: int) -> tuple[str, Picture]:
    """Return (caption, bar chart) of the bytes that each rank keeps in ZeRO's stages 0 to 3.

    The bytes are those of parameters, gradients and AdamW's state in mixed precision, without
    activations. The chart has a bar for each stage, with that of `stage` highlighted. The caption
    says for `stage` what a rank keeps, whether that fits on a GPU with 80 GB, and how many bytes
    the rank sends in a step by ring collectives, with 2 bytes for each gradient and parameter.

    model: a key of `MODELS`, such as "7.5B". world_size: the number of ranks.
    stage: the stage that the caption is about, from 0 to 3.
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
