"""Data-parallel training steps, ours and torch's: on the machine's own wire and on an emulated one.

With as many ranks as cores, Gloo competes with computing for the cores, and overlap gains little on
the machine's own wire: 6 MB in 24 messages made a step of 400 ms 45 ms longer, though no message
came late.

An emulated link takes time but little of the cores', so there overlap shows what it can gain.
"""

import operator
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from .. import ddp
from ..fast.buckets import BucketedDDP
from ..lesson import charts
from ..runtime.link import Link
from ..tools.units import duration
from .results import AGAIN, SPEED, Goal, Result, Results, report, results_of
from .training import COMPUTE, Replica, Task, gpt, itself, linears, race_replicas

ROUNDS = 12
TORCH, OURS, PLAIN = "torch", "fast buckets", "buckets"
SHARED = "shared memory"
GOALS = [
    Goal(OURS, TORCH, 1.0),
    Goal(OURS, TORCH, 1 / 1.03),
    Goal(SHARED, TORCH, 1.0),
    Goal("flat", "naive", 1.0, "emulated"),
    Goal("overlap", "flat", 1.0, "emulated"),
    Goal(OURS, "overlap", 1 / 1.05, "emulated"),
    Goal("overlap", COMPUTE, 1 / 1.05, "emulated"),
]
LEGEND = f"""\
Time: the median. Exposed: what it takes longer than computing alone.
{SPEED}"""

CAP_MB = 16  # MiB, as torch counts: large, since each message costs much here
MODELS = [  # name, model, on which link
    ("GPT", gpt, None),
    ("12 × Linear(1024)", linears, None),
    ("12 × Linear(1024)", partial(linears, rows=256), Link(50e-6, 0.25e9)),
]


def make_replicas(make: Callable[[], Task], group: ProcessGroup) -> dict[str, Replica]:
    """Return {variant: a fresh model, wrapped by it, and its SGD}, the baseline, torch's, first."""
    fast = partial(BucketedDDP, bucket_cap_mb=CAP_MB)
    wraps = {
        TORCH: partial(by_torch, group=group),
        COMPUTE: itself,
        "naive": partial(ddp.NaiveDDP, group=group),
        "flat": partial(ddp.FlatDDP, group=group),
        "overlap": partial(ddp.OverlapDDP, group=group),
        PLAIN: partial(ddp.BucketedDDP, group=group, bucket_cap_mb=CAP_MB),
        OURS: partial(fast, group=group),
    }
    if group is not dist.group.WORLD:  # the machine's own wire, without records
        wraps[SHARED] = partial(fast, group=group, shared_memory=True)
    wraps[TORCH + AGAIN] = wraps[TORCH]
    sgd = partial(torch.optim.SGD, lr=0.01, fused=True)  # cheap: the update is not the subject
    return {name: Replica(make, wrap, sgd) for name, wrap in wraps.items()}


def by_torch(module: nn.Module, group: ProcessGroup) -> nn.Module:
    options = {"bucket_cap_mb": CAP_MB, "gradient_as_bucket_view": True}
    return DistributedDataParallel(module, process_group=group, **options)


def measure(
    models: Sequence[tuple[str, Callable[[], Task], Link | None]] = MODELS, rounds: int = ROUNDS
) -> Results:
    """Time the steps of every variant on each model, on Gloo or on an emulated link, by 2 ranks.

    rounds: turns of each variant. ValueError: no round.
    """
    found = Results(legend=LEGEND)
    for model, make, link in models:
        seconds, nbytes = race_replicas(partial(make_replicas, make), rounds, link)
        title = f"{model}, emulated: {link}" if link else model
        found += together(title, seconds, nbytes)
    return found


def together(title: str, seconds: dict[str, tuple[float, ...]], nbytes: int) -> list[Result]:
    """Make the results of one case. seconds: {variant: of each step}; nbytes: of the gradients."""
    found = results_of(title, seconds, 2, nbytes)
    for result in found:
        exposed_s = map(operator.sub, result.seconds, seconds[COMPUTE])
        result.columns["Exposed"] = duration(statistics.median(exposed_s))
    return found


def main(name: str):
    found = measure()

    def draw() -> dict:
        pictures = {}
        for number, (title, rivals) in enumerate(found.cases().items()):
            seconds = {name: result.seconds for name, result in rivals.items()}
            del seconds[TORCH + AGAIN]
            link = title.partition("emulated: ")[2]
            pictures[number] = charts.variants(seconds, COMPUTE, link)
        return pictures

    report(name, found, GOALS, draw)
