"""Training steps with sharded optimizer states, ours and torch's, beside replicated ones.

Time, bytes sent, bytes of state, with AdamW, fused. What is compared is what a step takes longer
than computing alone: synchronisation and update. Batches are small, so that it is a good part.
"""

import operator
import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from ..fast.buckets import BucketedDDP
from ..fast.transports import SharedMemoryTransport
from ..fast.zero import ZeroOptimizer
from ..runtime.board import Record
from ..runtime.launch import launch
from . import interleave, training
from .results import AGAIN, SPEED, Goal, Result, Results, judge, report
from .training import COMPUTE, Replica, Seen, Task, gpt, itself, race_replicas

ROUNDS = 24
TORCH, AS_IT_COMES = "torch DDP + its ZeRO", "default options"
TORCH_DDP, OUR_DDP = "torch DDP + AdamW", "BucketedDDP + AdamW"
ZERO, SHARED = "ZeroOptimizer", "shared memory"
GOALS = [
    Goal(ZERO, TORCH, 1.3),
    Goal(ZERO, AS_IT_COMES, 1.5),
    Goal(ZERO, OUR_DDP, 1.0, at_most=True),
    Goal(SHARED, TORCH, 1.3),
]
linears = partial(training.linears, rows=16)
MODELS = {"12 × Linear(1024)": linears, "GPT": gpt}


def torchs_zero() -> type[torch.optim.Optimizer]:
    """ZeroRedundancyOptimizer. Importing it takes long, and warns of a deprecation in torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer


def make_replicas(task: Task, group: ProcessGroup) -> dict[str, Replica]:
    """{variant: replica}, the baseline first."""
    adamw, options = torch.optim.AdamW, {"lr": 1e-4, "fused": True}
    by_torch = partial(DistributedDataParallel, process_group=group, gradient_as_bucket_view=True)
    torch_zero = partial(torchs_zero(), optimizer_class=adamw, process_group=group, **options)
    torchs_best = partial(torch_zero, parameters_as_bucket_view=True)
    zero = partial(ZeroOptimizer, optimizer_cls=adamw, group=group, **options)
    replicated = partial(adamw, **options)
    variants = {
        TORCH: (by_torch, torchs_best),
        AS_IT_COMES: (by_torch, torch_zero),
        TORCH_DDP: (by_torch, replicated),
        OUR_DDP: (partial(BucketedDDP, group=group), replicated),
        ZERO: (itself, zero),
        SHARED: (itself, partial(zero, transport=SharedMemoryTransport())),
        COMPUTE: (itself, None),
        TORCH + AGAIN: (by_torch, torchs_best),
    }
    return {name: Replica(task, *how) for name, how in variants.items()}


def make_all(make: Callable[[], Task], group: ProcessGroup) -> dict[str, Replica]:
    return make_replicas(make(), group)


def count_steps(make: Callable[[], Task]) -> list[str]:
    """The variants; the run's wire has a step of each, between barriers."""
    torch.set_num_threads(1)
    replicas = make_replicas(make(), dist.group.WORLD)
    for replica in list(replicas.values()) * training.WARM_UP:
        replica.step()
    for replica in replicas.values():
        dist.barrier()
        replica.step()
    dist.barrier()
    return list(replicas)


# All ranks together


@dataclass(frozen=True)
class Sync(Result):
    """Synchronisation and update; operation: of which model, nbytes: of its parameters.

    seconds: of the step less those of computing alone, round by round. step_s: of the step.
    sent_bytes: by a rank in a step. state_bytes: the optimizer's, on the rank that has most.
    """

    step_s: float = 0.0
    sent_bytes: float = 0.0
    state_bytes: int = 0


class Syncs(Results):
    columns = "Step (ms)", "Sync (ms)", "Sent", "State"
    legend = "Step: the median; Sync: that less compute alone, for synchronisation and update.\n"
    legend += "Sent: MB by a rank in a step. State: MB of the rank that has most.\n" + SPEED

    def cells(self, sync: Sync) -> tuple[str, ...]:
        megabytes = f"{sync.sent_bytes / 1e6:.4g}", f"{sync.state_bytes / 1e6:.4g}"
        return f"{sync.step_s * 1e3:.1f}", f"{sync.median_s * 1e3:.1f}", *megabytes


def measure(
    models: dict[str, Callable[[], Task]] = MODELS, rounds: int = ROUNDS, world_size: int = 2
) -> Syncs:
    """Time the steps of every variant on each model, on Gloo.

    rounds: how often each variant has its turn. ValueError: fewer than 2 ranks, no round.
    """
    found = Syncs()
    for model, make in models.items():
        seconds, ranks = race_replicas(partial(make_all, make), rounds, world_size)
        found += together(model, seconds, ranks, count(make, world_size))
    return found


def count(make: Callable[[], Task], world_size: int) -> dict[str, float]:
    """{variant: bytes that a rank sends in a step, the mean over the ranks}."""
    run = launch(count_steps, make, world_size=world_size, backend="gloo")
    sent = dict.fromkeys(run[0], 0.0)
    for rank, records in enumerate(run.wire):
        barriers = [place for place, record in enumerate(records) if record.op == "barrier"]
        for name, (begin, end) in zip(sent, pairwise(barriers[-len(sent) - 1 :]), strict=True):
            mine = sum(sent_by_all(each, rank, world_size) for each in records[begin + 1 : end])
            sent[name] += mine / world_size
    return sent


def sent_by_all(record: Record, rank: int, world_size: int) -> float:
    """This rank's part of what all send: a ring's bytes of an all-reduce, W-1 of a broadcast."""
    shares = {"send": 1.0, "recv": 0.0, "all_reduce": 2 * (world_size - 1) / world_size}
    shares["broadcast"] = world_size - 1.0 if record.peer == rank else 0.0
    return shares[record.op] * record.bytes


def together(model: str, seconds: dict, ranks: list[Seen], sent: dict[str, float]) -> Syncs:
    """One case, from the seconds of each step and what its ranks saw."""
    found = Syncs()
    for name, steps in seconds.items():
        if name != COMPUTE:
            sync_s = tuple(map(operator.sub, steps, seconds[COMPUTE]))
            state = max(seen.state_bytes[name] for seen in ranks)
            about = {"step_s": statistics.median(steps), "sent_bytes": sent[name]}
            case = model, name, len(ranks), sum(ranks[0].sizes), sync_s
            found.append(Sync(*case, **about, state_bytes=state))
    return found


def main():
    found = measure()
    report("zero", interleave.where(), found, judge(GOALS, found))
