"""Data-parallel training steps, ours and torch's: on the machine's own wire and on an emulated one.

With as many ranks as cores, Gloo needs the cores that compute, and there is little to gain from
overlap on the machine's own wire: 6 MB in 24 messages made a step of 400 ms 45 ms longer, though no
message came late.

An emulated link takes its time and little of the cores', so there overlap shows what it can gain.
"""

import operator
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from .. import ddp
from ..fast.buckets import BucketedDDP
from ..lesson import charts
from ..runtime.link import Link
from .interleave import where
from .results import AGAIN, SPEED, Goal, Result, Results, report
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
Step: the median. Exposed: what it takes longer than computing alone.
{SPEED}"""

CAP_MB = 16  # MiB, as torch counts: large, since each message costs much here
MODELS = [  # name, model, on which link
    ("GPT", gpt, None),
    ("12 × Linear(1024)", linears, None),
    ("12 × Linear(1024)", partial(linears, rows=256), Link(50e-6, 0.25e9)),
]


def make_replicas(make: Callable[[], Task], group: ProcessGroup) -> dict[str, Replica]:
    """{variant: replica}, the baseline first."""
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
    renamed = "forward_sync_buffers" in signature(DistributedDataParallel).parameters  # in 2.13
    options["forward_sync_buffers" if renamed else "broadcast_buffers"] = False  # as ours
    return DistributedDataParallel(module, process_group=group, **options)


def measure(
    models: Sequence[tuple[str, Callable[[], Task], Link | None]] = MODELS, rounds: int = ROUNDS
) -> Results:
    """Time the steps of every variant on each model, on Gloo or on an emulated link, by 2 ranks.

    rounds: how often each variant has its turn. ValueError: no round.
    """
    found = Results(legend=LEGEND)
    for model, make, link in models:
        seconds, nbytes, _ = race_replicas(partial(make_replicas, make), rounds, 2, link)
        found += together(model, seconds, nbytes, str(link or ""))
    return found


def together(model: str, seconds: dict, nbytes: int, wire: str = "") -> list[Result]:
    """The results of one case. seconds: {variant: of each step}; nbytes: of the gradients."""
    found = []
    for name, steps in seconds.items():
        exposed_s = statistics.median(map(operator.sub, steps, seconds[COMPUTE]))
        step = f"{statistics.median(steps) * 1e3:.1f}"
        columns = {"Step (ms)": step, "Exposed (ms)": f"{exposed_s * 1e3:.1f}"}
        found.append(Result(model, name, 2, nbytes, steps, "", wire, columns))
    return found


def main(name: str):
    found = measure()

    def draw() -> dict:
        pictures = {}
        for number, rivals in enumerate(found.cases().values()):
            seconds = {name: each.seconds for name, each in rivals.items()}
            del seconds[TORCH + AGAIN]
            pictures[number] = charts.variants(seconds, COMPUTE, rivals[TORCH].emulated)
        return pictures

    report(name, where(), found, GOALS, draw)
