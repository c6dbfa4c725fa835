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

from ..ddp import BucketedDDP, FlatDDP, NaiveDDP, OverlapDDP
from ..lesson import charts
from ..runtime.launch import launch
from ..runtime.link import Link
from ..tools import cost
from . import interleave, training
from .results import AGAIN, SPEED, Goal, Result, Results, judge, report, table
from .training import COMPUTE, Replica, Seen, Task, gpt, itself, linears, seconds_of

ROUNDS, ON_A_LINK_AT_MOST = 12, 8  # waiting is more regular than computing
SEED = {"naive": 1406.7, "flat": 1365.2, "overlap": 1075.7}  # ms of a step on two T4 GPUs
SEED_BUCKETS = {1: 1093.4, 10: 1120.1, 100: 1213.4, 1000: 1360.4}  # the same; caps in MiB
SEED_MB = 4 * 423_183_360 / 2**20  # of gradients there, in MiB
SHARE = 0.35  # of the naive step, for communication; 498.1 of 1406.7 ms there
SAVED = 0.03  # of the naive step, if all gradients are one message; 1406.7 - 1365.2 ms there
TORCH, SMALL, LARGE, SHARED = "torch", "buckets of 1 MiB", "buckets of 16 MiB", "shared memory"


def as_in_seed(cap_mb: int) -> str:
    return f"buckets like {cap_mb} MiB"


SEED |= {as_in_seed(cap_mb): step_ms for cap_mb, step_ms in SEED_BUCKETS.items()}
SEED_SMALL, SEED_LARGE = as_in_seed(min(SEED_BUCKETS)), as_in_seed(max(SEED_BUCKETS))
GOALS = [
    Goal(LARGE, TORCH, 1.0, at_most=True, upto=1.03),
    Goal(SHARED, TORCH, 1.0, at_most=True),
]
ON_LINK_GOALS = [
    Goal("flat", "naive", 1.0, at_most=True),
    Goal(SEED_LARGE, "flat", 1.0, at_most=True),
    Goal("overlap", SEED_LARGE, 1.0, at_most=True),
    Goal(SEED_SMALL, "overlap", 1.05, at_most=True),
    Goal("overlap", SEED_SMALL, 1.05, at_most=True),
    Goal("overlap", COMPUTE, 1.05, at_most=True),
]
MODELS = {"GPT": gpt, "12 × Linear(1024)": linears}

# What is trained


class Wait(torch.autograd.Function):
    """Give `x` back after some seconds, and its gradient, two products, after twice as many."""

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
            layer.register_forward_hook(partial(wait, seconds * layer.weight.numel() / weights))
        return module

    return Task(build, task.loss)


def wait(seconds: float, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return Wait.apply(output, seconds)


ON_A_LINK = {
    "GPT, 6 layers of 192": partial(as_on_a_gpu, partial(gpt, 6, 192, 4), 0.2),
    "24 × Linear(256)": partial(as_on_a_gpu, partial(linears, 24, 256), 0.2),
}


OWN_WIRE = {SMALL: 1, LARGE: 16}  # MiB, as torch counts


def make_replicas(task: Task, group: ProcessGroup, buckets: dict) -> dict[str, Replica]:
    """{variant: replica}, the baseline first. buckets: {variant: cap in MiB}; torch has the last.

    No buckets: only computing alone. On the machine's own wire also through shared memory.
    """
    sgd = partial(torch.optim.SGD, lr=0.01, fused=True)  # cheap: the update is not the subject
    if not buckets:
        return {COMPUTE: Replica(task, itself, sgd)}
    *_, cap_mb = buckets.values()
    options = {"bucket_cap_mb": cap_mb, "gradient_as_bucket_view": True}
    renamed = "forward_sync_buffers" in signature(DistributedDataParallel).parameters  # in 2.13
    options["forward_sync_buffers" if renamed else "broadcast_buffers"] = False  # as ours
    by_torch = partial(DistributedDataParallel, process_group=group, **options)
    wraps: dict[str, Callable] = {TORCH: by_torch, COMPUTE: itself}
    for name, ours in (("naive", NaiveDDP), ("flat", FlatDDP), ("overlap", OverlapDDP)):
        wraps[name] = partial(ours, group=group)
    for name, cap_mb in buckets.items():
        wraps[name] = partial(BucketedDDP, group=group, bucket_cap_mb=cap_mb)
    if LARGE in buckets:
        wraps[SHARED] = partial(wraps[LARGE], shared_memory=True)
    wraps[TORCH + AGAIN] = by_torch
    return {name: Replica(task, wrap, sgd) for name, wrap in wraps.items()}


# On a rank


def time_steps(make: Callable[[], Task], rounds: int, buckets: dict, emulated: bool) -> Seen:
    plain = interleave.one_thread_and_a_plain_group()
    wire = dist.group.WORLD if emulated else plain
    return training.take_turns(make_replicas(make(), wire, buckets), rounds, plain)


# All ranks together


class Steps(Results):
    """Training steps; operation: of which model, nbytes: of its gradients."""

    columns = "Step (ms)", "Exposed (ms)"
    legend = "Step: the median. Exposed: what it takes longer than computing alone.\n" + SPEED

    def exposed_s(self, step: Result) -> float:
        """The median over the rounds."""
        alone = self.rivals(step)[COMPUTE].seconds
        return statistics.median(map(operator.sub, step.seconds, alone))

    def cells(self, step: Result) -> tuple[str, ...]:
        return f"{step.median_s * 1e3:.1f}", f"{self.exposed_s(step) * 1e3:.1f}"


def measure(
    models: dict[str, Callable[[], Task]] = MODELS,
    on_a_link: dict[str, Callable[[], Task]] = ON_A_LINK,
    rounds: int = ROUNDS,
    world_size: int = 2,
) -> Steps:
    """Time the steps of every variant: of `models` on Gloo, of `on_a_link` on an emulated link.

    rounds: how often each has its turn; on a link at most 8. ValueError: 1 rank, no round.
    """
    interleave.check_rounds(rounds, world_size)
    found = Steps()

    def seen(make: Callable, rounds: int, buckets: dict, link: Link | None = None) -> list[Seen]:
        arguments = make, rounds, buckets, bool(link)
        return list(
            launch(time_steps, *arguments, world_size=world_size, backend="gloo", link=link)
        )

    for model, make in models.items():
        found += together(model, seen(make, rounds, OWN_WIRE))
    rounds = min(rounds, ON_A_LINK_AT_MOST)
    for model, make in on_a_link.items():
        alone = seen(make, rounds, {})
        compute_s = statistics.median(seconds_of(alone)[COMPUTE])
        sizes = alone[0].sizes
        link = find_link(compute_s, sizes, world_size)
        part = sum(sizes) / 2**20 / SEED_MB  # caps hold the same part of the gradients
        buckets = {as_in_seed(cap_mb): cap_mb * part for cap_mb in SEED_BUCKETS}
        found += together(model, seen(make, rounds, buckets, link), link)
    return found


def together(model: str, ranks: Sequence[Seen], link: Link | None = None) -> list[Result]:
    """The steps of one case, from what its ranks saw."""
    found, wire = [], ""
    if link:
        wire = f"a link of {link.latency_s * 1e6:.0f} µs and {link.bytes_per_s / 1e6:.3g} MB/s"
    for name, seconds in seconds_of(ranks).items():
        case = len(ranks), sum(ranks[0].sizes), seconds
        found.append(Result(model, name, *case, emulated=wire))
    return found


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
        there, here_ms = there_ms / SEED["naive"], found[variant]
        here = here_ms / found["naive"]
        lines.append((variant, f"{there_ms:.1f}", f"{there:.2f}", f"{here_ms:.1f}", f"{here:.2f}"))
    return table(lines)


def main():
    report_steps(measure())


def report_steps(found: Steps) -> None:
    judged, pictures = [], {}
    for number, case in enumerate(found.cases()):
        wire = case[0].emulated
        if wire:
            print(f"{case.title()}\n{beside_the_seed(case)}\n")
        judged += judge(ON_LINK_GOALS if wire else GOALS, case)
        pictures[str(number)] = {step.variant: step.seconds for step in case.competing}, wire

    def draw() -> dict:
        return {what: charts.variants(*of, COMPUTE, link) for what, (*of, link) in pictures.items()}

    report("ddp", interleave.where(), found, judged, draw)
