"""Data-parallel training steps, ours and torch's: on this machine's own wire, and on an emulated one.

Each variant trains its own replica of the same model on the same data, and they take turns; in the end all must have
the same parameters. What is exposed is what a step takes longer than the same step without communication. The emulated
link is so slow that the naive variant would spend 35 % of its step on communication, as in the seed's table (notebook
04): its latency is given, its bandwidth follows from the time of computing, which is measured first.

With as many ranks as cores, Gloo needs the cores that compute, and there is little to gain from overlap on the
machine's own wire; waiting for an emulated link needs no core.
"""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from inspect import signature
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.utils import parameters_to_vector
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .. import bench, cost
from ..ddp import BucketedDDP, DataParallel, FlatDDP, NaiveDDP, OverlapDDP, plan_buckets
from ..lesson import charts
from ..models import GPT, mean_loss
from ..runtime.launch import launch
from ..runtime.link import Link
from ..text import Batches, encode, text
from . import interleave
from .results import AGAIN, Goal, Ratio, Result, Results, judge

ROUNDS = 12
WARM_UP = 3  # steps that don't count: after the first, both kinds of buckets are planned anew
SHARE = 0.35  # of the naive step, for communication
LATENCY_S = 50e-6  # of the emulated link: Ethernet's
SMALL_MB, LARGE_MB = 1, 16  # MiB, as torch counts
TORCH, COMPUTE, BY_MODEL, SHARED = "torch", "compute alone", "buckets by the model", "shared memory"
HEADING = ("Variant", "Step (ms)", "× torch's time [95 %]", "A/A", "", "Exposed (ms)", "Model (ms)")
HEADING += ("Messages", "Sent (MB)", "Moved / G", "Loss")


def buckets_of(cap_mb: float) -> str:
    return f"buckets of {cap_mb:g} MiB"


SMALL, LARGE = buckets_of(SMALL_MB), buckets_of(LARGE_MB)

# What is trained


class Task(NamedTuple):
    """build: makes the module, alike each time. loss: of that module, wrapped or not, on this rank's data."""

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module], Tensor]


def gpt(layers: int = 6, width: int = 256) -> Task:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches = Batches(encode(text()[:20_000]), 8 * world_size, 64, rank=rank, world_size=world_size)
    inputs, targets = next(iter(batches))

    def build() -> nn.Module:
        torch.manual_seed(0)
        return GPT(layers=layers, width=width, heads=8)

    return Task(build, lambda model: mean_loss(model(inputs), targets))


def linears(layers: int = 12, width: int = 1024) -> Task:
    inputs, targets = torch.randn(2, 128, width, generator=torch.Generator().manual_seed(dist.get_rank()))

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    return Task(build, lambda model: (model(inputs) - targets).square().mean())


MODELS = {"GPT": gpt, "12 × Linear(1024)": linears}


class Replica:
    """A model, what makes it data parallel, and its optimizer, a cheap one: the step itself is not the subject."""

    def __init__(self, task: Task, wrap: Callable[..., nn.Module], group: ProcessGroup):
        self.module = task.build()
        self.trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self.wrapped, self._loss = wrap(self.module, group=group), task.loss
        self._optimizer = torch.optim.SGD(self.trained, lr=0.01, fused=True)
        self.loss = self.backward_began = 0.0

    def step(self) -> None:
        self._optimizer.zero_grad()
        loss = self._loss(self.wrapped)
        self.backward_began = time.perf_counter()
        loss.backward()
        if isinstance(self.wrapped, DataParallel):
            self.wrapped.synchronize()
        self._optimizer.step()
        self.loss = loss.item()


def make_replicas(task: Task, group: ProcessGroup, best_mb: float | None, shared: bool) -> dict[str, Replica]:
    """{variant: replica}, the baseline first. best_mb: the bucket that the model picks; shared: also through memory."""

    def by_torch(module: nn.Module, group: ProcessGroup) -> nn.Module:
        options = {"bucket_cap_mb": LARGE_MB, "gradient_as_bucket_view": True}
        wrapper = nn.parallel.DistributedDataParallel
        renamed = "forward_sync_buffers" in signature(wrapper).parameters  # 2.13 gave the option a new name
        options["forward_sync_buffers" if renamed else "broadcast_buffers"] = False  # ours send none in a step either
        return wrapper(module, process_group=group, **options)

    wraps = {
        TORCH: by_torch,
        COMPUTE: lambda module, group: module,
        "naive": NaiveDDP,
        "flat": FlatDDP,
        "overlap": OverlapDDP,
        SMALL: partial(BucketedDDP, bucket_cap_mb=SMALL_MB),
        LARGE: partial(BucketedDDP, bucket_cap_mb=LARGE_MB),
    }
    if best_mb is not None:
        wraps[BY_MODEL] = partial(BucketedDDP, bucket_cap_mb=best_mb)
    if shared:
        wraps[SHARED] = partial(BucketedDDP, bucket_cap_mb=LARGE_MB, shared_memory=True)
    wraps[TORCH + AGAIN] = by_torch
    return {name: Replica(task, wrap, group) for name, wrap in wraps.items()}


# On a rank


@dataclass
class Seen:
    """What one rank saw. turns: (begun, done) of each round; ready_s, sizes, dtypes: of each parameter, by number."""

    turns: dict[str, list[tuple[float, float]]]
    losses: dict[str, float]
    ready_s: list[float]
    sizes: list[int]
    dtypes: list[torch.dtype]


def time_on_rank(make: Callable[[], Task], rounds: int, best_mb: float | None, emulated: bool) -> Seen:
    torch.set_num_threads(1)
    plain = dist.new_group(backend="gloo")  # torch's own: the world that `launch` made takes time to record each call
    replicas = make_replicas(make(), dist.group.WORLD if emulated else plain, best_mb, shared=not emulated)
    interleave.pin_to_a_core()
    for replica in list(replicas.values()) * WARM_UP:
        replica.step()
    turns = interleave.take_turns(list(replicas), rounds, lambda name: interleave.timed(replicas[name].step, plain)[0])
    check_alike(replicas, plain)
    losses = {name: replica.loss for name, replica in replicas.items()}
    trained = replicas[COMPUTE].trained
    ready_s = when_ready(replicas[COMPUTE], rounds)
    return Seen(turns, losses, ready_s, [p.nbytes for p in trained], [p.dtype for p in trained])


def check_alike(replicas: dict[str, Replica], group: ProcessGroup) -> None:
    """RuntimeError: a variant, other than that without communication, has not the parameters of rank 0's first."""
    right = parameters_to_vector(next(iter(replicas.values())).module.parameters()).detach()
    dist.broadcast(right, group=group, group_src=0)
    for name, replica in replicas.items():
        found = parameters_to_vector(replica.module.parameters()).detach()
        if name != COMPUTE and not (found - right).norm() <= 1e-5 * right.norm():
            raise RuntimeError(f"{name} learned something else on rank {dist.get_rank()}: its time would mean nothing")


def when_ready(replica: Replica, steps: int) -> list[float]:
    """Seconds from the beginning of backward until each parameter has its gradient: the median over some steps."""
    found: dict[nn.Parameter, list[float]] = {parameter: [] for parameter in replica.trained}

    def ready(parameter: nn.Parameter) -> None:
        found[parameter].append(time.perf_counter() - replica.backward_began)

    hooks = [parameter.register_post_accumulate_grad_hook(ready) for parameter in replica.trained]
    for _ in range(steps):
        replica.step()
    for hook in hooks:
        hook.remove()
    return [statistics.median(seconds) for seconds in found.values()]


class Traffic(TorchDispatchMode):
    """Counts the bytes that torch's operators read and write; what makes only a view, or sends, counts nothing."""

    nbytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if function.namespace != "c10d" and not function.is_view:
            read = args[1:] if function.overloadpacket is torch.ops.aten.copy_ else args  # it only writes the first
            self.nbytes += sum(each.nbytes for each in tree_leaves([read, made]) if isinstance(each, Tensor))
        return made


def count_on_rank(make: Callable[[], Task], best_mb: float | None) -> dict[str, int]:
    """{variant: bytes that a step reads and writes in memory}; the run's wire has that step behind a barrier each."""
    torch.set_num_threads(1)
    replicas = make_replicas(make(), dist.group.WORLD, best_mb, shared=True)
    for replica in list(replicas.values()) * WARM_UP:
        replica.step()
    touched = {}
    for name, replica in replicas.items():
        dist.barrier()
        with Traffic() as traffic:
            replica.step()
        touched[name] = traffic.nbytes
    dist.barrier()
    return touched


# All ranks together


class Counts(NamedTuple):
    """Of one step of one rank. sent: bytes all-reduced; moved: bytes read and written in memory beyond computing."""

    messages: int = 0
    sent: int = 0
    moved: int = 0


def count(make: Callable[[], Task], best_mb: float | None, world_size: int) -> dict[str, Counts]:
    """{variant: what it sends and moves}, from a run of its own that is recorded and not timed."""
    run = launch(count_on_rank, make, best_mb, world_size=world_size, backend="gloo")
    touched, records = run[0], run.wire[0]
    ends = [number for number, record in enumerate(records) if record.op == "barrier"][-len(touched) - 1 :]
    found = {}
    for (name, nbytes), (begin, end) in zip(touched.items(), pairwise(ends), strict=True):
        said = records[begin + 1 : end]
        found[name] = Counts(len(said), sum(record.bytes for record in said), nbytes - touched[COMPUTE])
    return found


@dataclass(frozen=True)
class Step(Result):
    """A training step; operation: of which model, nbytes: of its gradients.

    predicted_s: the model's time of a step, where the link is known. loss: of the last step, the mean over the ranks.
    """

    counts: Counts = field(default_factory=Counts)
    predicted_s: float | None = None
    loss: float = 0.0


class Steps(Results):
    """Training steps in the order of their measurement; printed, they are a table for each model and wire."""

    def cases(self) -> list["Steps"]:
        """Those that took turns, together."""
        keys = dict.fromkeys((step.operation, step.emulated) for step in self)
        return [Steps(step for step in self if (step.operation, step.emulated) == key) for key in keys]

    def exposed_s(self, step: Step) -> float:
        """How much longer than computing alone, round by round: the median."""
        alone = self.rivals(step)[COMPUTE].seconds
        return statistics.median(took - least for took, least in zip(step.seconds, alone, strict=True))

    def __repr__(self):
        return "\n\n".join([*map(_case, self.cases()), LEGEND]) if self else "nothing measured"


LEGEND = """\
Step: the median; a step lasts until its last rank is done. A/A: torch's time against that of a second replica.
Exposed: step less compute alone. Model: the step that the model predicts. Sent: handed to all-reduce.
Moved: bytes that torch's operators read and write beyond computing, in units of G, the gradients' bytes; through shared
memory those of the all-reduce itself are among them."""


def _case(steps: Steps) -> str:
    first = steps[0]
    wire = f"emulated: {first.emulated}" if first.emulated else "Gloo, this machine's own wire"
    head = f"{first.operation}, {first.world_size} processes, G = {first.nbytes / 1e6:.3g} MB, {wire}"
    lines = [_line(steps, step) for step in steps if not step.variant.endswith(AGAIN)]
    return "\n".join([head, bench.table([HEADING, *lines])])


def _line(steps: Steps, step: Step) -> tuple[str, ...]:
    control = steps.control(step).inverse
    baseline = step.variant == TORCH
    return (
        step.variant,
        f"{step.median_s * 1e3:.1f}",
        "1" if baseline else str(steps.speed(step).inverse),
        f"{control.low:.2f}–{control.high:.2f}",
        "" if baseline else steps.verdict(step),
        f"{steps.exposed_s(step) * 1e3:.1f}",
        f"{step.predicted_s * 1e3:.1f}" if step.predicted_s else "",
        str(step.counts.messages),
        f"{step.counts.sent / 1e6:.3g}",
        f"{step.counts.moved / step.nbytes:.2f}",
        f"{step.loss:.6f}",
    )


def measure(models: dict[str, Callable[[], Task]] = MODELS, rounds: int = ROUNDS, world_size: int = 2) -> Steps:
    """Time the steps of every variant on each model, on Gloo and then on the emulated link.

    rounds: how often each variant has its turn. ValueError: fewer than 2 ranks, no round.
    """
    if world_size < 2 or rounds < 1:
        raise ValueError(f"expected 2 ranks or more and 1 round or more, got {world_size} and {rounds}")
    found = Steps()
    for name, make in models.items():
        ranks = list(launch(time_on_rank, make, rounds, None, False, world_size=world_size, backend="gloo"))
        compute_s = statistics.median(interleave.until_the_last([seen.turns[COMPUTE] for seen in ranks]))
        link = find_link(compute_s, ranks[0].sizes, world_size)
        best_mb = best_cap_bytes(ranks, link) / 2**20
        counts = count(make, best_mb, world_size)
        found += together(name, ranks, counts)
        ranks = list(
            launch(time_on_rank, make, rounds, best_mb, True, world_size=world_size, backend="gloo", link=link)
        )
        found += together(name, ranks, counts, link, best_mb)
    return found


def find_link(compute_s: float, sizes: Sequence[int], world_size: int) -> Link:
    """The link on which an all-reduce for each gradient takes 35 % of computing and communication together.

    sizes: bytes of each gradient. ValueError: latencies alone take longer.
    """
    communication_s = compute_s * SHARE / (1 - SHARE)
    latencies_s = len(sizes) * cost.volume("ring_all_reduce", 0, world_size).hops * LATENCY_S
    if latencies_s >= communication_s:
        took = f"{len(sizes)} messages have latencies of {latencies_s:.3g} s together"
        raise ValueError(
            f"expected them to leave some of {communication_s:.3g} s to the bytes, but {took}: compute more"
        )
    return Link(
        LATENCY_S,
        float(cost.volume("ring_all_reduce", sum(sizes), world_size).in_turn) / (communication_s - latencies_s),
    )


def _in_order(ranks: Sequence[Seen]) -> tuple[list[float], list[int], list[torch.dtype]]:
    """(when it is ready on the last rank, bytes, dtype) of each gradient, in the order in which they become ready."""
    ready_s = [max(each) for each in zip(*(seen.ready_s for seen in ranks), strict=True)]
    order = sorted(range(len(ready_s)), key=lambda number: ranks[0].ready_s[number])
    return tuple([of[number] for number in order] for of in (ready_s, ranks[0].sizes, ranks[0].dtypes))


def best_cap_bytes(ranks: Sequence[Seen], link: Link) -> float:
    """The bucket cap that the model picks for these gradients and this link."""
    ready_s, sizes, dtypes = _in_order(ranks)
    gradients = list(zip(sizes, dtypes, strict=True))
    plans = {cap: plan_buckets(gradients, cap) for cap in cost.caps(sizes)}
    return cost.best_cap(plans, ready_s, sizes, cost.Model(link.latency_s, link.bytes_per_s), len(ranks))


def predicted_exposed(ranks: Sequence[Seen], link: Link, best_mb: float) -> dict[str, float]:
    """{variant: seconds of communication that the model expects not to hide}."""
    ready_s, sizes, dtypes = _in_order(ranks)
    model, after = cost.Model(link.latency_s, link.bytes_per_s), [max(ready_s)] * len(ready_s)
    one_by_one, all_at_once = [[number] for number in range(len(sizes))], [list(range(len(sizes)))]

    def exposed(plan: cost.Plan, ready_s: Sequence[float]) -> float:
        return cost.timeline(plan, ready_s, sizes, model, len(ranks)).exposed_s

    def bucketed(cap_mb: float) -> float:
        return exposed(plan_buckets(list(zip(sizes, dtypes, strict=True)), cap_mb * 2**20), ready_s)

    return {
        TORCH: bucketed(LARGE_MB),
        COMPUTE: 0.0,
        "naive": exposed(one_by_one, after),
        "flat": exposed(all_at_once, after),
        "overlap": exposed(one_by_one, ready_s),
        SMALL: bucketed(SMALL_MB),
        LARGE: bucketed(LARGE_MB),
        BY_MODEL: bucketed(best_mb),
        TORCH + AGAIN: bucketed(LARGE_MB),
    }


def together(
    model: str, ranks: Sequence[Seen], counts: dict[str, Counts], link: Link | None = None, best_mb: float = 0.0
) -> list[Step]:
    """The steps of one case, from what its ranks saw."""
    world_size, nbytes = len(ranks), sum(ranks[0].sizes)
    seconds = {name: interleave.until_the_last([seen.turns[name] for seen in ranks]) for name in ranks[0].turns}
    steps = [
        Step(
            model,
            name,
            world_size,
            nbytes,
            took,
            counts=counts[name],
            loss=sum(s.losses[name] for s in ranks) / world_size,
        )
        for name, took in seconds.items()
    ]
    if link is None:
        return steps
    compute_s = statistics.median(seconds[COMPUTE])
    exposed = predicted_exposed(ranks, link, best_mb)
    wire = f"{link.latency_s * 1e6:g} µs, {link.bytes_per_s / 1e9:.3g} GB/s; the model's buckets: {best_mb:.3g} MiB"
    return [replace(step, emulated=wire, predicted_s=compute_s + exposed[step.variant]) for step in steps]


# Goals


class AsFast(Goal):
    """Met if the median is at most `times`, and the interval ends at most 3 % above."""

    @property
    def text(self) -> str:
        return f"{super().text}, interval up to {1.03 * self.times:g}"

    def verdict(self, ratio: Ratio) -> str:
        if ratio.median <= self.times and ratio.high <= 1.03 * self.times:
            return "yes"
        return "NO" if ratio.low > self.times else "too close to tell"


def goals(case: Steps) -> list[Goal]:
    """What the steps of one case should reach; against computing alone only where the model says that all fits."""
    first = case[0]

    def at_most(kind: type[Goal], variant: str, times: float, against: str) -> Goal:
        return kind(variant, against, first.world_size, first.nbytes, times, at_most=True)

    if not first.emulated:
        return [at_most(AsFast, LARGE, 1.0, TORCH), at_most(Goal, SHARED, 1.0, TORCH)]
    predicted = {step.variant: step.predicted_s for step in case}
    order = ["naive", "flat", LARGE, "overlap"]
    wanted = [at_most(Goal, faster, 1.0, slower) for slower, faster in pairwise(order)]
    wanted += [at_most(Goal, SMALL, 1.05, "overlap"), at_most(Goal, "overlap", 1.05, SMALL)]
    if predicted["overlap"] <= 1.05 * predicted[COMPUTE]:
        wanted.append(at_most(Goal, "overlap", 1.05, COMPUTE))
    return wanted


# For `python -m ddpkit.bench`


def main():
    report(measure())


def report(steps: Steps) -> None:
    """Print tables and goals; keep them, the pictures and every single time in bench-results."""
    print(f"ddp, on {os.cpu_count()} cores, one thread a rank\n{steps}\n")
    judged = [(case, *each) for case in steps.cases() for each in judge(goals(case), case)]
    lines = [
        (f"{case[0].operation}{', emulated' * bool(case[0].emulated)}: {goal.variant}", goal.text, str(ratio), verdict)
        for case, goal, ratio, verdict in judged
    ]
    print(bench.table([("Goals", "", "measured", "met?"), *lines]))
    kept = [
        asdict(step) | {"counts": step.counts._asdict(), "median_s": step.median_s, "exposed_s": steps.exposed_s(step)}
        for step in steps
    ]
    met = [asdict(goal) | {"measured": ratio, "met": verdict} for _, goal, ratio, verdict in judged]
    bench.save("ddp", {"results": kept, "goals": met})
    try:
        pictures = [charts.steps(case, COMPUTE) for case in steps.cases()]
    except ImportError as missing:
        print(f"no pictures: {missing.name} isn't installed here")
        return
    for number, picture in enumerate(pictures):
        (bench.RESULTS / f"ddp_{number}.png").write_bytes(picture.png)
