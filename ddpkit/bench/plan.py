"""Predicted and measured steps of many plans, on an emulated cluster.

`Training` is the real thing: ddpkit's wrappers, optimizers, pipeline and groups, with gradients,
weights and activations of the plan's sizes as real messages, on an emulated link. Computing is
emulated: each half of a block sleeps for as long as its products take at the machine's FLOP/s, so
that more ranks than cores don't disturb each other.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh

from .. import transport as torchs
from ..checkpointing import checkpoint
from ..cost import CostModel
from ..fast.buckets import BucketedDDP
from ..fast.fsdp import FSDP
from ..fast.zero import ZeroOptimizer
from ..pipeline import Pipeline, PipelineStage, one_f_one_b
from ..runtime.launch import launch
from ..runtime.link import Link
from ..tensor_parallel import CopyToRanks, SumOverRanks
from ..tools.plan import Machine, Plan, Shape, plans, stages, step_s
from ..tools.plan.shape import EMBEDDING, HEAD, SHARDINGS, Stage, Work
from ..tools.units import duration
from .interleave import until_the_last
from .results import save, table

AXES = "pipeline", "data", "tensor"  # from the outermost: ranks of a tensor group are neighbours
SHAPE = Shape(layers=4, width=96, heads=4, vocabulary=256, length=64, batch=16)
LINK = Link(2e-3, 5e6)
FLOPS_PER_S, UPDATES_PER_S = 0.6e9, 2e6
ROUNDS = 2
WARM_UP = 1  # step in which ranks agree, and DDP learns the order of gradients
MICRO_BATCHES = {4: (1, 4), 8: (4,)}  # {ranks: those of the plans that are measured}
LEGEND = """\
A step of each plan: data × tensor × pipeline; m: micro-batches, * with
checkpoints. Messages are real, and as large as the plan's; the link and
computing are emulated. Off: by how much the prediction is too long."""


def machine(ranks: int, slower: float = 1.0) -> Machine:
    """Describe the emulated cluster. slower: a factor on each of its times, for a busy machine."""
    wire = CostModel(LINK.latency_s * slower, LINK.bytes_per_s / slower)
    flops_per_s, updates_per_s = FLOPS_PER_S / slower, UPDATES_PER_S / slower
    return Machine(ranks, 16e9, flops_per_s, wire, updates_per_s=updates_per_s)


# A training


class Training:
    """This rank of a training by a plan.

    make_part: called with this rank's stage and {axis: its group}, returns the stage's module. That
        has the blocks under their units' names, such as blocks.0, `losses(output, targets)`, and
        `tied`, the weight that first and last stage share, or None.
    optimizer_cls, options: as of `ZeroOptimizer`.
    """

    def __init__(
        self,
        shape: Shape,
        plan: Plan,
        make_part: Callable,
        optimizer_cls: type[torch.optim.Optimizer],
        **options,
    ):
        mesh = init_device_mesh("cpu", [plan.size(axis) for axis in AXES], mesh_dim_names=AXES)
        groups = {axis: mesh[axis].get_group() for axis in AXES}
        stage = stages(shape, plan)[dist.get_rank(groups["pipeline"])]
        self.plan = plan
        self.data = groups["data"]
        self.part = self.model = make_part(stage, groups)
        trained = [p for p in self.part.parameters() if p.requires_grad]
        cap = plan.bucket_cap_mb
        self.optimizer = None
        if plan.sharded == "zero1":
            self.optimizer = ZeroOptimizer(
                trained, optimizer_cls, cap, self.data, torchs, **options
            )
            self.quiet = self.optimizer.no_sync
            self.synchronize = self.optimizer.synchronize
        else:
            if plan.sharded == "fsdp":
                units = [unit for unit in stage.units if unit]
                self.model = FSDP(self.part, group=self.data, wrap=units, transport=torchs)
            elif plan.data > 1:
                self.model = BucketedDDP(self.part, cap, self.data)
            self.quiet = getattr(self.model, "no_sync", contextlib.nullcontext)
            self.synchronize = getattr(self.model, "synchronize", lambda: None)
            self.optimizer = optimizer_cls(trained, **options)
        self.pipeline = None
        if plan.pipeline > 1:
            self.pipeline = self.make_pipeline(shape, stage, groups["pipeline"])

    def make_pipeline(self, shape: Shape, stage: Stage, group: ProcessGroup) -> Pipeline:
        plan = self.plan
        rows = shape.batch // (plan.data * plan.micro_batches)
        receives = torch.empty(rows, shape.length, shape.width)
        mine = PipelineStage(self.model, stage.number, receives)
        schedule = one_f_one_b(plan.pipeline, plan.micro_batches)
        return Pipeline([mine], schedule, self.loss, self.part.tied, group)

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        """Take a step. inputs, targets: of this rank of the data axis; returns the mean loss."""
        if self.pipeline is None:
            loss = self.accumulate(inputs, targets)
        else:
            with self.quiet():
                loss = self.pipeline.step(inputs, targets)
        dist.all_reduce(loss, group=self.data)
        if self.pipeline is not None:
            self.pipeline.synchronize()
        self.synchronize()
        dist.all_reduce(torch.zeros((), dtype=torch.float64))  # the norm, for clipping
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item() / self.plan.data

    def accumulate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        m = self.plan.micro_batches
        total = torch.zeros((), dtype=torch.float64)
        for k, (x, y) in enumerate(zip(inputs.chunk(m), targets.chunk(m), strict=True)):
            with self.quiet() if k < m - 1 else contextlib.nullcontext():
                loss = self.loss(self.model(x), y) / m
                loss.backward()
            total += loss.detach()
        return total

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return self.part.losses(output, targets).mean()


# Emulated computing


class Sleep(torch.autograd.Function):
    """Multiply by `shrink` in `seconds`; backward takes twice that, and gives `weights` zeros."""

    @staticmethod
    def forward(ctx, x: Tensor, seconds: float, shrink: float, *weights: Tensor):
        ctx.seconds, ctx.shrink, ctx.weights = seconds, shrink, weights
        time.sleep(seconds)
        return x * shrink

    @staticmethod
    def backward(ctx, gradient: Tensor):
        time.sleep(2 * ctx.seconds)  # for the inputs' gradient, and for the weights'
        return gradient * ctx.shrink, None, None, *map(torch.zeros_like, ctx.weights)


class SleepingLayer(nn.Module):
    """Some works (parts of a stage's forward) in turn, with the all-reduces of its tensor ranks."""

    def __init__(
        self, stage: Stage, works: Sequence[Work], flops_per_s: float, group: ProcessGroup
    ):
        super().__init__()
        self.works = works
        self.flops_per_s = flops_per_s
        self.group = group
        self.ranks = dist.get_world_size(group)
        names = {name for work in works for name in work.weights}
        # In the order of the real modules: buckets depend on it.
        for weight in stage.weights:
            if weight.name in names or (not weight.trained and works[0].kind == EMBEDDING):
                values = torch.zeros(weight.shape)
                self.register_parameter(word(weight.name), nn.Parameter(values, weight.trained))

    def forward(self, x: Tensor) -> Tensor:
        for work in self.works:
            weights = [getattr(self, word(name)) for name in work.weights]
            shared = self.ranks > 1
            if shared and work.kind != EMBEDDING:
                x = CopyToRanks.apply(x, self.group)
            # All ranks of the group add the same x: each brings its part of it.
            x = Sleep.apply(x, work.flops / self.flops_per_s, 1 / self.ranks, *weights)
            if shared and work.kind != HEAD:
                x = SumOverRanks.apply(x, self.group)
        return x


def word(name: str) -> str:
    return name.replace(".", "_")


class SleepingPart(nn.Module):
    """A stage whose products take time, and compute nothing."""

    def __init__(self, width: int, flops_per_s: float, recompute: bool, stage: Stage, groups: dict):
        super().__init__()
        self.width = width
        self.recompute = recompute
        self.group = groups["tensor"]
        self.stage = stage
        layer = partial(SleepingLayer, stage, flops_per_s=flops_per_s, group=self.group)
        first, last = stage.works[:1], stage.works[-1:]
        self.start = layer(first) if stage.first else nn.Identity()
        self.blocks = nn.ModuleDict()
        for unit in stage.units:
            if unit:
                halves = [work for work in stage.works if work.unit == unit]
                self.blocks[unit.removeprefix("blocks.")] = layer(halves)
        self.end = layer(last) if stage.last else nn.Identity()
        self.tied = None  # the weight that first and last stage share
        if stage.tied:
            self.tied = getattr(self.start if stage.first else self.end, word(stage.tied))

    def forward(self, x: Tensor) -> Tensor:
        if self.stage.first:
            x = torch.zeros(*x.shape, self.width)
        x = self.start(x)
        for block in self.blocks.values():
            x = checkpoint(block, x) if self.recompute else block(x)
        return self.end(x)

    def losses(self, output: Tensor, targets: Tensor) -> Tensor:
        losses = output.mean(-1)
        if dist.get_world_size(self.group) > 1:  # as vocabulary_cross_entropy
            largest = losses.detach().clone()
            dist.all_reduce(largest, dist.ReduceOp.MAX, self.group)
            losses, _ = SumOverRanks.apply(torch.stack([losses, losses]), self.group)
        return losses


class SleepingUpdate(torch.optim.Optimizer):
    """An optimizer that takes time, and changes nothing."""

    def __init__(self, params, updates_per_s: float):
        super().__init__(params, {"updates_per_s": updates_per_s})

    def step(self, closure=None) -> None:
        for group in self.param_groups:
            numel = sum(parameter.numel() for parameter in group["params"])
            time.sleep(numel / group["updates_per_s"])


# Predicted and measured


def take_steps(shape: Shape, plan: Plan, cluster: Machine, rounds: int) -> list[tuple]:
    """Return (begin, end) in seconds of each step on this rank, without the first, a warm-up."""
    torch.set_num_threads(1)
    make_part = partial(SleepingPart, shape.width, cluster.flops_per_s, plan.checkpoint)
    updates_per_s = cluster.updates_per_s
    training = Training(shape, plan, make_part, SleepingUpdate, updates_per_s=updates_per_s)
    rows = shape.batch // plan.data
    inputs = torch.zeros(rows, shape.length, dtype=torch.int64)
    found = []
    for _ in range(WARM_UP + rounds):
        dist.barrier()
        begun = time.perf_counter()
        training.step(inputs, inputs)
        found.append((begun, time.perf_counter()))
    return found[WARM_UP:]


def measure(shape: Shape, cluster: Machine, plan: Plan, rounds: int = ROUNDS) -> float:
    """Return the median seconds of a step, on as many processes as the plan has ranks."""
    link = Link(cluster.wire.latency_s, cluster.wire.bytes_per_s)
    arguments = shape, plan, cluster, rounds
    run = launch(take_steps, *arguments, world_size=plan.ranks, backend="gloo", link=link)
    return statistics.median(until_the_last(list(run)))


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Compute Spearman's correlation: of the places in the two orders."""
    orders = []
    for values in zip(*pairs, strict=True):
        places = torch.tensor(values).argsort().argsort()
        orders.append(places.double())
    return torch.corrcoef(torch.stack(orders))[0, 1].item()


def errors(pairs: Sequence[tuple[float, float]]) -> list[float]:
    return [abs(predicted - measured) / measured for predicted, measured in pairs]


def chosen() -> list[Plan]:
    """List the plans to measure: of all meshes of 4 ranks, and 2 × 2 × 2, with `MICRO_BATCHES`."""
    found = [plan for plan in plans(SHAPE, 4) if plan.micro_batches in MICRO_BATCHES[4]]
    for plan in plans(SHAPE, 8, data=2, tensor=2):
        if plan.micro_batches in MICRO_BATCHES[8]:
            found.append(plan)
    return found


def main(name: str):
    """Predict and measure all plans, print both; keep them in bench-results/NAME.json."""
    lines = [("plan", "predicted", "measured", "off")]
    pairs = []
    for plan in chosen():
        cluster = machine(plan.ranks)
        pair = step_s(SHAPE, cluster, plan), measure(SHAPE, cluster, plan)
        pairs.append(pair)
        lines.append((short(plan), *map(duration, pair), f"{pair[0] / pair[1] - 1:+.0%}"))
    print(f"{table(lines)}\n\n{LEGEND}\n\n{summary(pairs)}")
    kept = [{"plan": line[0], "seconds": pair} for line, pair in zip(lines[1:], pairs, strict=True)]
    save(name, {"plans": kept, "summary": summary(pairs)})


def short(plan: Plan) -> str:
    """Write data × tensor × pipeline, sharding, micro-batches, * for checkpoints."""
    mesh = f"{plan.data}×{plan.tensor}×{plan.pipeline} {SHARDINGS[plan.sharding]}"
    return f"{mesh}, m={plan.micro_batches}{'*' if plan.checkpoint else ''}"


def summary(pairs: Sequence[tuple[float, float]]) -> str:
    """Judge the predictions: their order, and how far off they are."""
    off = sorted(errors(pairs))
    median = f"median error {statistics.median(off):.1%}, largest {off[-1]:.0%}"
    order = f"rank correlation {rank_correlation(pairs):.3f}"
    return f"{len(pairs)} plans: {order} (goal ≥ 0.9)\n{median} (goal ≤ 10 %)"
