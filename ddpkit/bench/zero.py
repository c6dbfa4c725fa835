"""Training steps with a sharded optimizer, ours and torch's, beside replicated ones: time, bytes sent, bytes of state.

Each variant trains its own replica of the same model on the same data with AdamW, fused, and they take turns; in the
end all must have the same parameters. What is compared is what a step takes longer than computing alone, in the same
round: synchronisation and update. Batches are small, so that it is a good part of the step.
"""

import os
import statistics
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .. import bench
from ..ddp import DataParallel
from ..fast.buckets import BucketedDDP
from ..runtime.board import Record
from ..runtime.launch import launch
from ..zero import ZeroOptimizer
from . import interleave
from .ddp import COMPUTE, Task, check_alike, gpt
from .results import AGAIN, Goal, Result, Results, judge

ROUNDS = 24
WARM_UP = 3  # steps that don't count: buckets are planned anew, state is made
TORCH, AS_IT_COMES = "torch DDP + its ZeRO", "the same, default options"
TORCH_DDP, OUR_DDP = "torch DDP + AdamW", "BucketedDDP + AdamW"
ZERO, SHARED = "ZeroOptimizer", "ZeroOptimizer, shared memory"
HEADING = ("Variant", "Step (ms)", "Sync, update (ms)", "Speed [95 %]", "A/A", "", "Sent (MB)", "State (MB)")

# What is trained


def linears(layers: int = 12, width: int = 1024, rows: int = 16) -> Task:
    inputs, targets = torch.randn(2, rows, width, generator=torch.Generator().manual_seed(dist.get_rank()))

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    return Task(build, lambda model: (model(inputs) - targets).square().mean())


MODELS = {"12 × Linear(1024)": linears, "GPT": gpt}


class Replica:
    """A model, wrapped or not, and its optimizer; None where a step only computes."""

    def __init__(self, task: Task, wrap: Callable[[nn.Module], nn.Module], optimize: Callable | None):
        self.module = task.build()
        self._wrapped, self._loss = wrap(self.module), task.loss
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self.optimizer = optimize(trained) if optimize else None

    def step(self) -> None:
        self.module.zero_grad()
        self._loss(self._wrapped).backward()
        if isinstance(self._wrapped, DataParallel):
            self._wrapped.synchronize()
        if self.optimizer:
            self.optimizer.step()

    def state_bytes(self) -> int:
        """Of all tensors in the optimizer's state but counters."""
        if isinstance(self.optimizer, ZeroOptimizer):
            return self.optimizer.state_bytes()
        inner = getattr(self.optimizer, "optim", self.optimizer)  # torch's ZeRO has its optimizer inside
        values = [value for state in inner.state.values() for value in state.values()] if inner else []
        return sum(value.nbytes for value in values if isinstance(value, Tensor) and value.dim())


def torchs_zero() -> type[torch.optim.Optimizer]:
    """ZeroRedundancyOptimizer. Importing it takes long, and warns of a deprecation inside torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer


def make_replicas(task: Task, group: ProcessGroup) -> dict[str, Replica]:
    """{variant: replica}, the baseline first."""
    adamw = partial(torch.optim.AdamW, lr=1e-4, fused=True)
    options = {"lr": 1e-4, "fused": True}

    def by_torch(module: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=True)

    def torch_zero(as_views: bool) -> Callable:
        how = {"process_group": group, "parameters_as_bucket_view": as_views, **options}
        return partial(torchs_zero(), optimizer_class=torch.optim.AdamW, **how)

    def alone(module: nn.Module) -> nn.Module:
        return module

    ours = partial(BucketedDDP, group=group)
    zero = partial(ZeroOptimizer, optimizer_cls=torch.optim.AdamW, group=group, **options)
    variants = {
        TORCH: (by_torch, torch_zero(as_views=True)),
        AS_IT_COMES: (by_torch, torch_zero(as_views=False)),
        TORCH_DDP: (by_torch, adamw),
        OUR_DDP: (ours, adamw),
        ZERO: (alone, zero),
        SHARED: (alone, partial(zero, shared_memory=True)),
        COMPUTE: (alone, None),
        TORCH + AGAIN: (by_torch, torch_zero(as_views=True)),
    }
    return {name: Replica(task, *how) for name, how in variants.items()}


# On a rank


@dataclass
class Seen:
    """What one rank saw. turns: (begun, done) of each round; state_bytes: of each variant."""

    turns: dict[str, list[tuple[float, float]]]
    state_bytes: dict[str, int]
    parameter_bytes: int


def time_on_rank(make: Callable[[], Task], rounds: int) -> Seen:
    torch.set_num_threads(1)
    plain = dist.new_group(backend="gloo")  # torch's own: the world that `launch` made takes time to record each call
    interleave.pin_to_a_core()
    replicas = make_replicas(make(), plain)
    for replica in list(replicas.values()) * WARM_UP:
        replica.step()
    turns = interleave.take_turns(list(replicas), rounds, lambda name: interleave.timed(replicas[name].step, plain)[0])
    check_alike(replicas, plain)
    state_bytes = {name: replica.state_bytes() for name, replica in replicas.items()}
    trained = (parameter for parameter in replicas[COMPUTE].module.parameters() if parameter.requires_grad)
    return Seen(turns, state_bytes, sum(parameter.nbytes for parameter in trained))


def count_on_rank(make: Callable[[], Task]) -> list[str]:
    """The variants; the run's wire has a step of each, between barriers."""
    torch.set_num_threads(1)
    replicas = make_replicas(make(), dist.group.WORLD)
    for replica in list(replicas.values()) * WARM_UP:
        replica.step()
    for replica in replicas.values():
        dist.barrier()
        replica.step()
    dist.barrier()
    return list(replicas)


# All ranks together


def count(make: Callable[[], Task], world_size: int) -> dict[str, float]:
    """{variant: bytes that a rank sends in a step, the mean over the ranks}, from a run of its own."""
    run = launch(count_on_rank, make, world_size=world_size, backend="gloo")
    sent = dict.fromkeys(run[0], 0.0)
    for rank, records in enumerate(run.wire):
        ends = [number for number, record in enumerate(records) if record.op == "barrier"][-len(sent) - 1 :]
        for name, (begin, end) in zip(sent, pairwise(ends), strict=True):
            sent[name] += sum(sent_by_all(record, rank, world_size) for record in records[begin + 1 : end]) / world_size
    return sent


def sent_by_all(record: Record, rank: int, world_size: int) -> float:
    """This rank's part of what all send for a call: a ring's bytes of an all-reduce, W-1 copies of a broadcast."""
    shares = {"send": 1.0, "recv": 0.0, "all_reduce": 2 * (world_size - 1) / world_size}
    shares["broadcast"] = world_size - 1.0 if record.peer == rank else 0.0
    return shares[record.op] * record.bytes


@dataclass(frozen=True)
class Sync(Result):
    """Synchronisation and update; operation: of which model, nbytes: of its parameters.

    seconds: of the step less those of computing alone, round by round. step_s: of the step, the median. sent_bytes: by
    a rank in a step. state_bytes: the optimizer's on the rank that has most.
    """

    step_s: float = 0.0
    sent_bytes: float = 0.0
    state_bytes: int = 0


class Syncs(Results):
    """In the order of their measurement; printed, they are a table for each model."""

    def cases(self) -> list["Syncs"]:
        return [Syncs(s for s in self if s.operation == model) for model in dict.fromkeys(s.operation for s in self)]

    def __repr__(self):
        return "\n\n".join([*map(_case, self.cases()), LEGEND]) if self else "nothing measured"


LEGEND = """\
Step: the median; a step lasts until its last rank is done. Sync, update: step less compute alone, round by round.
Speed: of that, how many times as fast as the first; A/A: the first against itself. Sent: by a rank in a step. State: of
the rank that has most."""


def _case(syncs: Syncs) -> str:
    first = syncs[0]
    head = f"{first.operation}, {first.world_size} processes, {first.nbytes / 1e6:.4g} MB of parameters, Gloo"
    return "\n".join([head, bench.table([HEADING, *(_line(syncs, s) for s in syncs if not s.variant.endswith(AGAIN))])])


def _line(syncs: Syncs, sync: Sync) -> tuple[str, ...]:
    control, baseline = syncs.control(sync), sync is syncs[0]
    return (
        sync.variant,
        f"{sync.step_s * 1e3:.1f}",
        f"{sync.median_s * 1e3:.1f}",
        "1" if baseline else str(syncs.speed(sync)),
        f"{control.low:.2f}–{control.high:.2f}",
        "" if baseline else syncs.verdict(sync),
        f"{sync.sent_bytes / 1e6:.4g}",
        f"{sync.state_bytes / 1e6:.4g}",
    )


def measure(models: dict[str, Callable[[], Task]] = MODELS, rounds: int = ROUNDS, world_size: int = 2) -> Syncs:
    """Time the steps of every variant on each model, on Gloo.

    rounds: how often each variant has its turn. ValueError: fewer than 2 ranks, no round.
    """
    if world_size < 2 or rounds < 1:
        raise ValueError(f"expected 2 ranks or more and 1 round or more, got {world_size} and {rounds}")
    found = Syncs()
    for model, make in models.items():
        ranks = list(launch(time_on_rank, make, rounds, world_size=world_size, backend="gloo"))
        found += together(model, ranks, count(make, world_size))
    return found


def together(model: str, ranks: list[Seen], sent: dict[str, float]) -> Syncs:
    """One case, from what its ranks saw."""
    steps = {name: interleave.until_the_last([seen.turns[name] for seen in ranks]) for name in ranks[0].turns}
    found = Syncs()
    for name, seconds in steps.items():
        if name != COMPUTE:
            less = tuple(took - alone for took, alone in zip(seconds, steps[COMPUTE], strict=True))
            state_bytes = max(seen.state_bytes[name] for seen in ranks)
            counts = statistics.median(seconds), sent[name], state_bytes
            found.append(Sync(model, name, len(ranks), ranks[0].parameter_bytes, less, "", "", *counts))
    return found


def goals(case: Syncs) -> list[Goal]:
    size = case[0].world_size, case[0].nbytes
    return [
        Goal(ZERO, TORCH, *size, 1.5),
        Goal(ZERO, AS_IT_COMES, *size, 1.5),
        Goal(ZERO, OUR_DDP, *size, 1.0, at_most=True),
        Goal(SHARED, TORCH, *size, 1.5),
    ]


# For `python -m ddpkit.bench`


def main():
    report(measure())


def report(syncs: Syncs) -> None:
    """Print tables and goals; keep them, and every single time, in bench-results."""
    print(f"zero, on {os.cpu_count()} cores, one thread a rank\n{syncs}\n")
    judged = [(case, *each) for case in syncs.cases() for each in judge(goals(case), case)]
    lines = [(f"{case[0].operation}: {g.variant}", g.text, str(ratio), met) for case, g, ratio, met in judged]
    print(bench.table([("Goals: synchronisation and update", "", "measured", "met?"), *lines]))
    met = [asdict(goal) | {"measured": ratio, "met": verdict} for _, goal, ratio, verdict in judged]
    bench.save("zero", {"results": [asdict(each) | {"median_s": each.median_s} for each in syncs], "goals": met})
