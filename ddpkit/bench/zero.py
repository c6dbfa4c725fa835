"""Training steps with sharded optimizer states, ours and torch's, beside replicated ones.

Time, bytes sent, bytes of state, with AdamW, fused. The comparison is of a step's time beyond
computing alone: synchronisation and update. Batches are small, so that it is a good part.
"""

import operator
import statistics
import warnings
from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from ..fast.buckets import BucketedDDP
from ..fast.transports import SharedMemoryTransport
from ..fast.zero import ZeroOptimizer
from ..memory import count_states
from ..runtime.launch import launch
from ..tools.units import duration
from . import training
from .results import AGAIN, SPEED, Goal, Result, Results, report, results_of
from .training import (
    COMPUTE,
    Replica,
    Task,
    add_bytes,
    count_bytes,
    gpt,
    itself,
    race_replicas,
)

ROUNDS = 24
TORCH, AS_IT_COMES = "torch's ZeRO", "by default"
TORCH_DDP, OUR_DDP = "torch's DDP", "BucketedDDP"
ZERO, SHARED = "ZeroOptimizer", "shared memory"
VARIANTS = TORCH, AS_IT_COMES, TORCH_DDP, OUR_DDP, ZERO, SHARED
GOALS = [
    Goal(ZERO, TORCH, 1.3),
    Goal(ZERO, AS_IT_COMES, 1.5),
    Goal(ZERO, OUR_DDP, 1.0),
    Goal(SHARED, TORCH, 1.3),
]
LEGEND = f"""\
Sync: a step less compute, for gradients and update; Step: all of it.
Sent: MB by a rank in a step. State: MB of the rank that has most.
By default: without parameters_as_bucket_view. Both DDPs: with AdamW.
{SPEED}"""
linears = partial(training.linears, rows=16)
MODELS = {"12 × Linear(1024)": linears, "GPT": gpt}


def torchs_zero() -> type[torch.optim.Optimizer]:
    """Import ZeroRedundancyOptimizer, which takes long, and warns of a deprecation in torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer


def make_replicas(
    make: Callable[[], Task], group: ProcessGroup, names: Iterable[str] = VARIANTS
) -> dict[str, Replica]:
    """Return {variant: model and optimizer} of `names`, computing alone and the baseline again."""
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
    wanted = {*names, COMPUTE, TORCH + AGAIN}
    return {name: Replica(make, *how) for name, how in variants.items() if name in wanted}


# Bytes


def count(make: Callable[[], Task], names: Iterable[str]) -> dict[str, tuple[float, int]]:
    """{variant: (bytes that this rank sends in a step, bytes of its optimizer's state)}."""
    return count_bytes(make_replicas(make, dist.group.WORLD, names), state_bytes)


def state_bytes(replica: Replica) -> int:
    if hasattr(replica.optimizer, "state_bytes"):  # ZeroOptimizer
        return replica.optimizer.state_bytes()
    inner = getattr(replica.optimizer, "optim", replica.optimizer)  # torch's ZeRO has one inside
    return count_states(replica.module, inner).optimizer


def measure(
    models: dict[str, Callable[[], Task]] = MODELS,
    rounds: int = ROUNDS,
    variants: Iterable[str] = VARIANTS,
) -> Results:
    """Time the steps of the variants on each model, on Gloo, beyond computing alone (`Sync`).

    rounds: turns of each. variants: some of `VARIANTS`, the first among them.
    ValueError: no round.
    """
    found = Results(legend=LEGEND, time="Sync")
    for model, make in models.items():
        raced = race_replicas(partial(make_replicas, make, names=variants), rounds)
        counted = launch(count, make, variants, world_size=2, backend="gloo")
        found += together(model, *raced, list(counted))
    return found


def together(model: str, seconds: dict, nbytes: int, counted: list[dict]) -> list[Result]:
    """Make a case's results. seconds: {variant: of each step}; counted: each rank's `count`."""
    sync_s = {}
    for name, steps in seconds.items():
        if name != COMPUTE:
            sync_s[name] = tuple(map(operator.sub, steps, seconds[COMPUTE]))
    found = results_of(model, sync_s, 2, nbytes)
    for result in found:
        result.columns["Step"] = duration(statistics.median(seconds[result.variant]))
        add_bytes(result, counted, "State")
    return found


def main(name: str):
    report(name, measure(), GOALS)
