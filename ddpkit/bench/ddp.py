"""Data-parallel training steps, ours and torch's: on the machine's own wire and on an emulated one.

With as many ranks as cores, Gloo needs the cores that compute, and there is little to gain from
overlap on the machine's own wire: 6 MB in 24 messages made a step of 400 ms 45 ms longer, though no
message came late.

So under the emulated link computing is emulated too: after each Linear a rank waits, as it would
for a GPU, and its core is free to send. All gradients are computed, and all bytes sent, for real;
what is emulated is how long that takes. The link is made for the model: as on the two T4 GPUs of
`SEED`, naive spends 35 % of its step on communication, and one message for all saves 3 %.
"""

import operator
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from .. import ddp
from ..fast.buckets import BucketedDDP
from ..lesson import charts
from ..runtime.link import Link
from ..tools import cost, units
from .interleave import where
from .results import AGAIN, SPEED, Goal, Result, Results, judge, report, table
from .training import COMPUTE, Replica, Task, gpt, itself, linears, race_replicas

ROUNDS, ON_A_LINK_AT_MOST = 12, 8  # waiting is more regular than computing
SEED = {  # ms of a step on two T4 GPUs; caps in MiB
    "naive": 1406.7,
    "flat": 1365.2,
    "overlap": 1075.7,
    "like 1 MiB": 1093.4,
    "like 10 MiB": 1120.1,
    "like 100 MiB": 1213.4,
    "like 1000 MiB": 1360.4,
}
SEED_BYTES = 4 * 423_183_360  # of gradients there
SHARE = 0.35  # of the naive step, for communication; 498.1 of 1406.7 ms there
SAVED = 0.03  # of the naive step, if all gradients are one message; 1406.7 - 1365.2 ms there
TORCH, OURS, PLAIN = "torch", "fast buckets", "buckets"
SHARED, RECORDED = "shared memory", "fast, recorded"
CAP_MB = 16  # MiB, as torch counts; on the machine's own wire, where each message costs much
GOALS = [
    Goal(OURS, TORCH, 1.0, at_most=True, upto=1.03),
    Goal(SHARED, TORCH, 1.0, at_most=True),
    Goal(RECORDED, OURS, 1.03, at_most=True),
]
ON_LINK_GOALS = [
    Goal("flat", "naive", 1.0, at_most=True),
    Goal("like 1000 MiB", "flat", 1.0, at_most=True),
    Goal("overlap", "like 1000 MiB", 1.0, at_most=True),
    Goal("like 1 MiB", "overlap", 1.05, at_most=True),
    Goal("overlap", "like 1 MiB", 1.05, at_most=True),
    Goal("overlap", COMPUTE, 1.05, at_most=True),
]


# What is trained


class Wait(torch.autograd.Function):
    """Give `x` back after some seconds; its gradient, two products, after twice as many."""

    @staticmethod
    def forward(ctx, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradient, None


def as_on_a_gpu(make: Callable[[], Task], seconds: float) -> Task:
    """The task of `make`, but each Linear waits, all together `seconds` in a forward."""
    task = make()

    def build() -> nn.Module:
        module = task.build()
        layers = [each for each in module.modules() if isinstance(each, nn.Linear)]
        weights = sum(layer.weight.numel() for layer in layers)
        for layer in layers:
            share = seconds * layer.weight.numel() / weights
            layer.register_forward_hook(lambda layer, x, y, share=share: Wait.apply(y, share))
        return module

    return Task(build, task.loss)


MODELS = {"GPT": gpt, "12 × Linear(1024)": linears}
ON_A_LINK = {
    "GPT, 6 layers of 192": partial(as_on_a_gpu, partial(gpt, 6, 192, 4), 0.2),
    "24 × Linear(256)": partial(as_on_a_gpu, partial(linears, 24, 256), 0.2),
}


def only_compute(make: Callable[[], Task], group: ProcessGroup) -> dict[str, Replica]:
    return {COMPUTE: Replica(make(), itself, None)}


def make_replicas(
    make: Callable[[], Task], emulated: bool, group: ProcessGroup
) -> dict[str, Replica]:
    """{variant: replica}, the baseline first. emulated: with the seed's bucket caps."""
    task, wraps = make(), {TORCH: partial(by_torch, group=group), COMPUTE: itself}
    for name, ours in (("naive", ddp.NaiveDDP), ("flat", ddp.FlatDDP), ("overlap", ddp.OverlapDDP)):
        wraps[name] = partial(ours, group=group)
    if emulated:
        for name in SEED:
            if name.startswith("like"):
                wraps[name] = partial(like_in_seed, int(name.split()[1]), group=group)
    else:
        fast = partial(BucketedDDP, bucket_cap_mb=CAP_MB)
        wraps[PLAIN] = partial(ddp.BucketedDDP, group=group, bucket_cap_mb=CAP_MB)
        wraps[OURS] = partial(fast, group=group)
        wraps[SHARED] = partial(fast, group=group, shared_memory=True)
        wraps[RECORDED] = partial(fast, group=dist.group.WORLD)
    wraps[TORCH + AGAIN] = wraps[TORCH]
    sgd = partial(torch.optim.SGD, lr=0.01, fused=True)  # cheap: the update is not the subject
    return {name: Replica(task, wrap, sgd) for name, wrap in wraps.items()}


def by_torch(module: nn.Module, group: ProcessGroup) -> nn.Module:
    options = {"bucket_cap_mb": CAP_MB, "gradient_as_bucket_view": True}
    renamed = "forward_sync_buffers" in signature(DistributedDataParallel).parameters  # in 2.13
    options["forward_sync_buffers" if renamed else "broadcast_buffers"] = False  # as ours
    return DistributedDataParallel(module, process_group=group, **options)


def like_in_seed(cap_mb: int, module: nn.Module, group: ProcessGroup) -> nn.Module:
    """Buckets that hold the same part of the gradients as those of `cap_mb` there."""
    nbytes = sum(each.nbytes for each in module.parameters())
    return BucketedDDP(module, group=group, bucket_cap_mb=cap_mb * nbytes / SEED_BYTES)


# What was found


class Steps(Results):
    """Training steps; operation: of which model, nbytes: of its gradients."""

    columns = "Step (ms)", "Exposed (ms)"
    legend = "Step: the median. Exposed: what it takes longer than computing alone.\n" + SPEED

    def cells(self, step: Result) -> tuple[str, ...]:
        alone = self.rivals(step)[COMPUTE].seconds
        exposed_s = statistics.median(map(operator.sub, step.seconds, alone))
        return f"{step.median_s * 1e3:.1f}", f"{exposed_s * 1e3:.1f}"


def measure_steps(
    models: dict[str, Callable[[], Task]] = MODELS,
    on_a_link: dict[str, Callable[[], Task]] = ON_A_LINK,
    rounds: int = ROUNDS,
    world_size: int = 2,
) -> Steps:
    """Time the steps of every variant: of `models` on Gloo, of `on_a_link` on an emulated link.

    rounds: how often each has its turn; on a link at most 8. ValueError: 1 rank, no round.
    """
    found = Steps()
    for model, make in models.items():
        replicas = partial(make_replicas, make, False)
        seconds, ranks = race_replicas(replicas, rounds, world_size)
        found += together(model, seconds, ranks)
    rounds = min(rounds, ON_A_LINK_AT_MOST)
    for model, make in on_a_link.items():
        alone, ranks = race_replicas(partial(only_compute, make), rounds, world_size)
        link = find_link(statistics.median(alone[COMPUTE]), ranks[0].sizes, world_size)
        replicas = partial(make_replicas, make, True)
        seconds, ranks = race_replicas(replicas, rounds, world_size, link)
        wire = f"{units.duration(link.latency_s)}, {units.rate(link.bytes_per_s)}"
        found += together(model, seconds, ranks, wire)
    return found


def together(model: str, seconds: dict, ranks: list, wire: str = "") -> list[Result]:
    nbytes = sum(ranks[0].sizes)
    of_all = seconds.items()
    return [Result(model, name, len(ranks), nbytes, each, emulated=wire) for name, each in of_all]


def find_link(compute_s: float, sizes: Sequence[int], world_size: int) -> Link:
    """The link on which the naive step has the seed's share of communication and of latencies.

    compute_s: of a step. sizes: bytes of each gradient. ValueError: just one, nothing is saved.
    """
    if len(sizes) < 2:
        raise ValueError(f"expected 2 gradients or more, got {len(sizes)}: take a larger model")
    naive_s = compute_s / (1 - SHARE)
    whole = cost.volume("ring_all_reduce", sum(sizes), world_size)
    latency_s = SAVED * naive_s / (len(sizes) - 1) / whole.hops
    for_bytes_s = SHARE * naive_s - len(sizes) * whole.hops * latency_s
    return Link(latency_s, float(whole.in_turn) / for_bytes_s)


# For `python -m ddpkit.bench`


def beside_the_seed(case: Steps) -> str:
    """A table: the steps on an emulated link beside the seed's, both as parts of the naive step."""
    found = {step.variant: step.median_s * 1e3 for step in case}
    lines = [("As parts of the naive step", "2 × T4 (ms)", "", "here (ms)", "")]
    for variant, there_ms in SEED.items():
        there, here = there_ms / SEED["naive"], found[variant] / found["naive"]
        there, here = (f"{there_ms:.1f}", f"{there:.2f}"), (f"{found[variant]:.1f}", f"{here:.2f}")
        lines.append((variant, *there, *here))
    return table(lines)


def main():
    report_steps(measure_steps())


def report_steps(found: Steps) -> None:
    judged, cases = [], found.cases()
    for case in cases:
        wire = case[0].emulated
        judged += judge(ON_LINK_GOALS if wire else GOALS, case)
        if wire:
            print(f"{case.title()}\n{beside_the_seed(case)}\n")

    def draw() -> dict:
        pictures = {}
        for number, case in enumerate(cases):
            seconds = {step.variant: step.seconds for step in case.competing}
            pictures[number] = charts.variants(seconds, COMPUTE, case[0].emulated)
        return pictures

    report("ddp", where(), found, judged, draw)
