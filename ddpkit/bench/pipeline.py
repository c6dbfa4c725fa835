"""Steps of a pipeline beside torch's; and idle time beside that of the schedule's dry run.

Stages sleep for the second and compute nothing: more stages than cores don't disturb each other.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ..models import GPT, mean_loss
from ..pipeline import (
    Pipeline,
    PipelineStage,
    cut_layers,
    gpipe,
    gpt_layers,
    idle,
    interleaved,
    one_f_one_b,
    rank_of_stage,
    zero_bubble,
)
from ..pipeline.schedules import Schedule
from ..runtime.launch import launch
from .interleave import Contest, check_close, race
from .results import AGAIN, SPEED, Goal, Result, Results, report, results_of

ROUNDS = 24
TICK_S = 0.2  # calls and messages cost about 0.7 ms an action, 27 of them to 3 idle ticks
TORCH, TORCH_GPIPE = "torch's Schedule1F1B", "torch's ScheduleGPipe"
SCHEDULES = {"1F1B": one_f_one_b, "GPipe": gpipe, "zero bubble": zero_bubble}
SCHEDULES["interleaved"] = interleaved
OURS = "1F1B", "GPipe", "zero bubble"  # beside torch's; all sleep
PLAN, RUN = "the plan", "the run"
GOALS = [
    Goal("1F1B", TORCH, 1.0),
    Goal("GPipe", TORCH_GPIPE, 1.0),
    Goal(RUN, PLAN, 0.95),
]
LEGEND = f"""\
Time: the median, forward and backward, no update.
Idle: of a rank in a step, the mean over the ranks, with stages that
sleep {1e3 * TICK_S:g} ms for a forward, as long for each part of backward.
{SPEED}"""


# Steps beside torch's


def by_torch(name: str, layers: nn.Module, comes: Tensor, m: int, group: ProcessGroup) -> Callable:
    from torch.distributed import pipelining

    rank, ranks = dist.get_rank(), dist.get_world_size()
    stage = pipelining.PipelineStage(layers, rank, ranks, comes.device, group=group)
    schedule = getattr(pipelining, name)(stage, m, loss_fn=mean_loss)

    def run(inputs: Tensor, targets: Tensor) -> None:
        first, last = [inputs] if rank == 0 else [], targets if rank == ranks - 1 else None
        schedule.step(*first, target=last, losses=[])

    return run


def by_us(name: str, layers: nn.Module, comes: Tensor, m: int, group: ProcessGroup) -> Callable:
    stage = PipelineStage(layers, dist.get_rank(), comes)
    schedule = SCHEDULES[name](dist.get_world_size(), m)
    return Pipeline([stage], schedule, mean_loss, group=group).step


def contest(micro_batches: int, rows: int, plain: ProcessGroup) -> Contest:
    """Make a contest of pipelines, torch's and ours; all share this rank's layers of one GPT.

    rows: sequences in a micro-batch. plain: the group to send in, which records nothing.
    """
    torch.manual_seed(0)
    model = GPT(layers=6, width=256, heads=8)
    tokens = torch.randint(256, (micro_batches * rows, 65))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    layers = cut_layers(gpt_layers(model), dist.get_world_size())[dist.get_rank()]
    common = layers, torch.empty(rows, 64, 256), micro_batches, plain
    runs = {TORCH: by_torch("Schedule1F1B", *common)}
    runs[TORCH_GPIPE] = by_torch("ScheduleGPipe", *common)
    runs |= {name: by_us(name, *common) for name in OURS}
    runs[TORCH + AGAIN] = runs[TORCH]

    def step(name: str) -> None:
        layers.zero_grad()
        runs[name](inputs, targets)

    def check_gradients() -> None:
        trained = [p for p in layers.parameters() if p.requires_grad]
        found = {}
        for name in runs:
            step(name)
            found[name] = torch.cat([p.grad.flatten() for p in trained])
            check_close(f"{name}'s gradient", found[name], found[TORCH], 1e-5)

    return Contest({name: partial(step, name) for name in runs}, found=check_gradients)


def measure_steps(micro_batches: int = 8, rows: int = 2) -> list[Result]:
    """Time torch's pipelines and ours, two stages on two ranks."""
    seconds, _ = race(partial(contest, micro_batches, rows), ROUNDS, 2)
    title = f"GPT in 2 stages, {micro_batches} micro-batches of {rows} × 64 tokens"
    return results_of(title, seconds)


# Idle time beside the plan


class SleepingForward(torch.autograd.Function):
    """Identity that sleeps, in forward and in backward."""

    @staticmethod
    def forward(ctx, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor):
        time.sleep(ctx.backward_s)
        return gradient, None, None


class Sleeping(nn.Module):
    """A stage that sleeps a tick in forward, one for its input's gradient, one for its weight's.

    Stage 0 has no input's gradient to compute: it sleeps two for its weight's.
    """

    def __init__(self, stage: int, tick_s: float):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.tick_s, self.weight_s = tick_s, tick_s if stage > 0 else 2 * tick_s

    def forward(self, x: Tensor) -> Tensor:
        weight = SleepingForward.apply(self.weight, 0.0, self.weight_s)
        return SleepingForward.apply(x, self.tick_s, self.tick_s) + weight


def sleep(schedule: Schedule, micro_batches: int, rounds: int, tick_s: float) -> list[tuple]:
    """Return this rank's (begin, end, busy seconds) of `rounds` sleeping steps, after a warm-up."""
    ranks, x = rank_of_stage(schedule), torch.zeros(micro_batches, 1)
    mine = [stage for stage in ranks if ranks[stage] == dist.get_rank()]
    stages = [PipelineStage(Sleeping(stage, tick_s), stage, x[:1]) for stage in mine]
    pipeline, found = Pipeline(stages, schedule, nn.functional.mse_loss), []
    for _ in range(rounds + 1):
        dist.barrier()
        pipeline.step(x, x)
        busy = sum(end - begin for _, begin, end in pipeline.spans)
        found.append((pipeline.spans[0][1], pipeline.spans[-1][2], busy))
    return found[1:]


def measure_idle(
    ranks: int = 4, micro_batches: int = 8, rounds: int = 3, tick_s: float = TICK_S
) -> list[Result]:
    """Measure the idle time of each schedule, beside its plan's."""
    found = []
    for name, make in SCHEDULES.items():
        schedule = make(ranks, micro_batches)
        run = launch(sleep, schedule, micro_batches, rounds, tick_s, world_size=ranks)
        planned = tick_s * statistics.mean(idle(schedule))
        measured = tuple(idle_seconds(ranks_of_round) for ranks_of_round in zip(*run, strict=True))
        title = f"Idle, {name}, {ranks} ranks, {micro_batches} micro-batches"
        found += results_of(title, {PLAN: (planned,) * rounds, RUN: measured})
    return found


def idle_seconds(ranks: list[tuple[float, float, float]]) -> float:
    """Average one round's idle seconds over the ranks, from the first begin to the last end."""
    begins, ends, busy = zip(*ranks, strict=True)
    return max(ends) - min(begins) - statistics.mean(busy)


def main(name: str):
    report(name, Results(measure_steps() + measure_idle(), LEGEND), GOALS)
