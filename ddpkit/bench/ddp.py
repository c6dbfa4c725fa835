"""Data-parallel training steps, ours and torch's: on this machine's own wire, and on an emulated one.

Each variant trains its own replica of the same model on the same data, and they take turns; in the end all must have
the same parameters. What is exposed is what a step takes longer than the same step without communication.

With as many ranks as cores, Gloo needs the cores that compute, and there is little to gain from overlap on the
machine's own wire: sending 6 MB in 24 messages made a step of 400 ms 45 ms longer, though no message came late.

So under the emulated link computing is emulated too: after each Linear a rank waits, as it would for a GPU, and its
core is free to send. All gradients are computed, and all bytes sent, for real; what is emulated is how long that takes.
The link is made for the model, whose step without communication is timed first: like the two GPUs of `SEED`, the naive
variant would spend 35 % of its step on communication, and 3 % of the step could be saved by saying all at once.
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

from .. import bench
from ..ddp import DataParallel, FlatDDP, NaiveDDP, OverlapDDP, plan_buckets
from ..fast.buckets import BucketedDDP
from ..lesson import charts
from ..models import GPT, mean_loss
from ..runtime.launch import launch
from ..runtime.link import Link
from ..tools import cost
from ..tools.text import Batches, encode, text
from . import interleave
from .results import AGAIN, RESAMPLES, Goal, Ratio, Result, Results, judge

ROUNDS, ON_A_LINK_AT_MOST = 12, 8  # waiting is more regular than computing
WARM_UP = 3  # steps that don't count: after the first, both kinds of buckets are planned anew
SEED = {"naive": 1406.7, "flat": 1365.2, "overlap": 1075.7}  # ms of a step on two T4 GPUs
SEED_BUCKETS = {1: 1093.4, 10: 1120.1, 100: 1213.4, 1000: 1360.4}  # the same; caps in MiB
SEED_MB = 4 * 423_183_360 / 2**20  # of gradients there, in MiB
SHARE = 0.35  # of the naive step, for communication; 498.1 of 1406.7 ms there
SAVED = 0.03  # of the naive step, if all gradients are one message; 1406.7 - 1365.2 ms there
SEARCHED = 4  # more bucket caps, to see whether the model picked the best
SMALL_MB, LARGE_MB = 1, 16  # MiB, as torch counts; on the machine's own wire
STEP, EXPOSED = "step", "exposed time"  # what is predicted
TORCH, COMPUTE, BY_MODEL, SHARED = "torch", "compute alone", "buckets by the model", "shared memory"
HEADING = ("Variant", "Step (ms)", "× torch's time [95 %]", "A/A", "", "Exposed (ms)", "Predicted")
HEADING += ("Messages", "Sent (MB)", "Moved / G", "Loss")


def buckets_of(cap_mb: float) -> str:
    return f"buckets of {cap_mb:.3g} MiB"


def as_in_seed(cap_mb: int) -> str:
    return f"buckets like the seed's {cap_mb} MiB"


SMALL, LARGE = buckets_of(SMALL_MB), buckets_of(LARGE_MB)
SEED_SMALL, SEED_LARGE = as_in_seed(min(SEED_BUCKETS)), as_in_seed(max(SEED_BUCKETS))
SEED |= {as_in_seed(cap_mb): step_ms for cap_mb, step_ms in SEED_BUCKETS.items()}

# What is trained


class Task(NamedTuple):
    """build: makes the module, alike each time. loss: of that module, wrapped or not, on this rank's data."""

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module], Tensor]


def gpt(layers: int = 6, width: int = 256, sequences: int = 8) -> Task:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tokens = encode(text()[: 65 * sequences * world_size])
    batches = Batches(tokens, sequences * world_size, 64, rank=rank, world_size=world_size)
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


class Wait(torch.autograd.Function):
    """Give `x` back after some seconds, and its gradient after twice as many: a Linear's backward is two products."""

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
    """The task of `make`, but each Linear also waits; `seconds` is what all wait in a forward, each by its weights."""
    task = make()

    def build() -> nn.Module:
        module = task.build()
        layers = [each for each in module.modules() if isinstance(each, nn.Linear)]
        weights = sum(layer.weight.numel() for layer in layers)
        for layer in layers:
            layer.register_forward_hook(partial(_wait, seconds * layer.weight.numel() / weights))
        return module

    return Task(build, task.loss)


def _wait(seconds: float, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return Wait.apply(output, seconds)


ON_A_LINK = {
    "GPT, 6 layers of 192": partial(as_on_a_gpu, partial(gpt, 6, 192, 4), 0.2),
    "24 × Linear(256)": partial(as_on_a_gpu, partial(linears, 24, 256), 0.2),
}


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


class Choice(NamedTuple):
    """What else is timed. torch_mb: torch's bucket cap; buckets: {variant: ours}, in MiB; shared: also through memory.

    On the link, torch has the cap that the model picks.
    """

    torch_mb: float
    buckets: dict[str, float]
    shared: bool = False


OWN_WIRE = Choice(LARGE_MB, {SMALL: SMALL_MB, LARGE: LARGE_MB}, shared=True)


def make_replicas(task: Task, group: ProcessGroup, choice: Choice) -> dict[str, Replica]:
    """{variant: replica}, the baseline first."""

    def by_torch(module: nn.Module, group: ProcessGroup) -> nn.Module:
        options = {"bucket_cap_mb": choice.torch_mb, "gradient_as_bucket_view": True}
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
    }
    wraps |= {name: partial(BucketedDDP, bucket_cap_mb=cap_mb) for name, cap_mb in choice.buckets.items()}
    if choice.shared:
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


def time_on_rank(make: Callable[[], Task], rounds: int, choice: Choice | None, emulated: bool) -> Seen:
    """choice: None, if only computing alone is to be timed."""
    torch.set_num_threads(1)
    plain = dist.new_group(backend="gloo")  # torch's own: the world that `launch` made takes time to record each call
    if choice is None:
        replicas = {COMPUTE: Replica(make(), lambda module, group: module, plain)}
    else:
        replicas = make_replicas(make(), dist.group.WORLD if emulated else plain, choice)
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


def count_on_rank(make: Callable[[], Task], choice: Choice) -> dict[str, int]:
    """{variant: bytes that a step reads and writes in memory}; the run's wire has that step behind a barrier each."""
    torch.set_num_threads(1)
    replicas = make_replicas(make(), dist.group.WORLD, choice)
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


def count(make: Callable[[], Task], choice: Choice, world_size: int) -> dict[str, Counts]:
    """{variant: what it sends and moves}, from a run of its own that is recorded and not timed."""
    run = launch(count_on_rank, make, choice, world_size=world_size, backend="gloo")
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

    def exposed(self, step: Step) -> list[float]:
        """How many seconds longer than computing alone, in each round."""
        alone = self.rivals(step)[COMPUTE].seconds
        return [took - least for took, least in zip(step.seconds, alone, strict=True)]

    def exposed_s(self, step: Step) -> float:
        """The median of `exposed`."""
        return statistics.median(self.exposed(step))

    def predicted_exposed_s(self, step: Step) -> float | None:
        """What the model predicts for it; None where the link isn't known."""
        return None if step.predicted_s is None else step.predicted_s - self.rivals(step)[COMPUTE].median_s

    def __repr__(self):
        return "\n\n".join([*map(_case, self.cases()), LEGEND]) if self else "nothing measured"


LEGEND = """\
Step: the median; a step lasts until its last rank is done. A/A: torch's time against that of a second replica.
Exposed: step less compute alone; Predicted: what the model expects of that. Sent: handed to all-reduce.
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
        "" if step.predicted_s is None else f"{steps.predicted_exposed_s(step) * 1e3:.1f}",
        str(step.counts.messages),
        f"{step.counts.sent / 1e6:.3g}",
        f"{step.counts.moved / step.nbytes:.2f}",
        f"{step.loss:.6f}",
    )


def measure(
    models: dict[str, Callable[[], Task]] = MODELS,
    on_a_link: dict[str, Callable[[], Task]] = ON_A_LINK,
    rounds: int = ROUNDS,
    world_size: int = 2,
) -> Steps:
    """Time the steps of every variant: of `models` on Gloo, and of `on_a_link` on an emulated link.

    rounds: how often each variant has its turn; on a link at most 8 times. ValueError: fewer than 2 ranks, no round.
    """
    if world_size < 2 or rounds < 1:
        raise ValueError(f"expected 2 ranks or more and 1 round or more, got {world_size} and {rounds}")

    def timed(make: Callable[[], Task], rounds: int, choice: Choice | None, link: Link | None = None) -> list[Seen]:
        run = launch(time_on_rank, make, rounds, choice, bool(link), world_size=world_size, backend="gloo", link=link)
        return list(run)

    found = Steps()
    for name, make in models.items():
        found += together(name, timed(make, rounds, OWN_WIRE), count(make, OWN_WIRE, world_size))
    rounds = min(rounds, ON_A_LINK_AT_MOST)
    for name, make in on_a_link.items():
        alone = timed(make, rounds, None)
        link = find_link(statistics.median(seconds_of(alone)[COMPUTE]), alone[0].sizes, world_size)
        choice = choose(alone, link)
        counts = count(make, choice, world_size)
        found += together(name, timed(make, rounds, choice, link), counts, link, choice)
    return found


def find_link(compute_s: float, sizes: Sequence[int], world_size: int) -> Link:
    """The link of `SHARE` and `SAVED`: on it the naive step has the seed's share of communication, and of latencies.

    compute_s: of a step. sizes: bytes of each gradient. ValueError: a single one, of which nothing is saved.
    """
    if len(sizes) < 2:
        raise ValueError(f"expected 2 gradients or more, got {len(sizes)}: a model with more parameters")
    naive_s, whole = compute_s / (1 - SHARE), cost.volume("ring_all_reduce", sum(sizes), world_size)
    latency_s = SAVED * naive_s / (len(sizes) - 1) / whole.hops
    return Link(latency_s, float(whole.in_turn) / (SHARE * naive_s - len(sizes) * whole.hops * latency_s))


def seconds_of(ranks: Sequence[Seen]) -> dict[str, tuple[float, ...]]:
    """{variant: the seconds of each round, until the last rank is done}."""
    return {name: interleave.until_the_last([seen.turns[name] for seen in ranks]) for name in ranks[0].turns}


def choose(ranks: Sequence[Seen], link: Link) -> Choice:
    """The bucket caps to be timed on the link: the model's, the seed's, the same parts of the gradients, and others."""
    ready_s, sizes, dtypes = _in_order(ranks)
    plans = {cap: plan_buckets(list(zip(sizes, dtypes, strict=True)), cap) for cap in cost.caps(sizes)}
    best = cost.best_cap(plans, ready_s, sizes, cost.Model(link.latency_s, link.bytes_per_s), len(ranks))
    buckets = {BY_MODEL: best / 2**20}
    buckets |= {as_in_seed(cap_mb): cap_mb / SEED_MB * sum(sizes) / 2**20 for cap_mb in SEED_BUCKETS}
    different = list({len(plan): cap for cap, plan in plans.items()}.values())
    for number in range(SEARCHED):
        cap_mb = different[number * len(different) // SEARCHED] / 2**20
        buckets[buckets_of(cap_mb)] = cap_mb
    return Choice(buckets[BY_MODEL], buckets)


def _in_order(ranks: Sequence[Seen]) -> tuple[list[float], list[int], list[torch.dtype]]:
    """(when it is ready on the last rank, bytes, dtype) of each gradient, in the order in which they become ready."""
    ready_s = [max(each) for each in zip(*(seen.ready_s for seen in ranks), strict=True)]
    order = sorted(range(len(ready_s)), key=lambda number: ranks[0].ready_s[number])
    return tuple([of[number] for number in order] for of in (ready_s, ranks[0].sizes, ranks[0].dtypes))


def predicted_exposed(ranks: Sequence[Seen], link: Link, choice: Choice) -> dict[str, float]:
    """{variant: seconds of communication that the model expects not to hide}."""
    ready_s, sizes, dtypes = _in_order(ranks)
    model, after = cost.Model(link.latency_s, link.bytes_per_s), [max(ready_s)] * len(ready_s)
    one_by_one, all_at_once = [[number] for number in range(len(sizes))], [list(range(len(sizes)))]

    def exposed(plan: cost.Plan, ready_s: Sequence[float]) -> float:
        return cost.timeline(plan, ready_s, sizes, model, len(ranks)).exposed_s

    def bucketed(cap_mb: float) -> float:
        return exposed(plan_buckets(list(zip(sizes, dtypes, strict=True)), cap_mb * 2**20), ready_s)

    return {
        TORCH: bucketed(choice.torch_mb),
        COMPUTE: 0.0,
        "naive": exposed(one_by_one, after),
        "flat": exposed(all_at_once, after),
        "overlap": exposed(one_by_one, ready_s),
        **{name: bucketed(cap_mb) for name, cap_mb in choice.buckets.items()},
        TORCH + AGAIN: bucketed(choice.torch_mb),
    }


def together(
    model: str,
    ranks: Sequence[Seen],
    counts: dict[str, Counts],
    link: Link | None = None,
    choice: Choice = OWN_WIRE,
) -> list[Step]:
    """The steps of one case, from what its ranks saw."""
    world_size, nbytes, seconds = len(ranks), sum(ranks[0].sizes), seconds_of(ranks)
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
    exposed = predicted_exposed(ranks, link, choice)
    wire = f"GPUs, and a link of {link.latency_s * 1e6:.0f} µs and {link.bytes_per_s / 1e6:.3g} MB/s"
    wire += f"; the model's buckets: {choice.buckets[BY_MODEL]:.3g} MiB"
    return [replace(step, emulated=wire, predicted_s=compute_s + exposed[step.variant]) for step in steps]


# The seed's table


def beside_the_seed(case: Steps) -> str:
    """A table: the steps on an emulated link beside those of the seed, both as parts of the naive step."""
    found = {step.variant: step.median_s * 1e3 for step in case}
    lines = [("As parts of the naive step", "2 × T4 (ms)", "", f"{case[0].operation} (ms)", "")]
    for variant, there_ms in SEED.items():
        here_ms = found[variant]
        there, here = there_ms / SEED["naive"], here_ms / found["naive"]
        lines.append((variant, f"{there_ms:.1f}", f"{there:.2f}", f"{here_ms:.1f}", f"{here:.2f}"))
    return bench.table(lines)


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


class LessExposed(Goal):
    """At most `times` the exposed communication of `against`."""

    def measured(self, results: Steps) -> Ratio | None:
        exposed = {step.variant: torch.tensor(results.exposed(step)) for step in results}
        return ratio_of_medians(exposed[self.variant], exposed[self.against])

    @property
    def text(self) -> str:
        return f"≤ {self.times:g} × the exposed time of {self.against}"


class Predicted(Goal):
    """The step, or what of it is exposed (`against`), is as predicted, give or take `times` of the prediction."""

    def measured(self, results: Steps) -> Ratio | None:
        step = next(step for step in results if step.variant == self.variant)
        if self.against == STEP:
            return ratio_of_medians(torch.tensor(step.seconds), torch.full((len(step.seconds),), step.predicted_s))
        exposed = torch.tensor(results.exposed(step))
        return ratio_of_medians(exposed, torch.full_like(exposed, results.predicted_exposed_s(step)))

    def verdict(self, ratio: Ratio) -> str:
        least, most = 1 - self.times, 1 + self.times
        if least <= ratio.low and ratio.high <= most:
            return "yes"
        return "NO" if ratio.high < least or ratio.low > most else "too close to tell"

    @property
    def text(self) -> str:
        return f"{self.against} within {100 * self.times:g} % of the prediction"


def ratio_of_medians(these: Tensor, those: Tensor) -> Ratio:
    """The median of `these` over that of `those`, whose rounds pair; the interval as in `results.paired_ratio`.

    Not the median of ratios: what is exposed in a single round can be nothing, or less.
    """
    generator = torch.Generator().manual_seed(0)
    draws = torch.randint(len(these), (RESAMPLES, len(these)), generator=generator)
    ratios = these[draws].quantile(0.5, dim=1) / those[draws].quantile(0.5, dim=1)
    low, high = ratios.quantile(torch.tensor([0.025, 0.975])).tolist()
    return Ratio((these.quantile(0.5) / those.quantile(0.5)).item(), low, high)


def goals(case: Steps) -> list[Goal]:
    """What the steps of one case should reach; against computing alone only where the model says that all fits."""
    first = case[0]

    def at_most(kind: type[Goal], variant: str, times: float, against: str) -> Goal:
        return kind(variant, against, first.world_size, first.nbytes, times, at_most=True)

    if not first.emulated:
        return [at_most(AsFast, LARGE, 1.0, TORCH), at_most(Goal, SHARED, 1.0, TORCH)]
    order = ["naive", "flat", SEED_LARGE, "overlap"]
    wanted = [at_most(Goal, faster, 1.0, slower) for slower, faster in pairwise(order)]
    wanted += [at_most(Goal, SEED_SMALL, 1.05, "overlap"), at_most(Goal, "overlap", 1.05, SEED_SMALL)]
    step = {step.variant: step for step in case}
    if step["overlap"].predicted_s <= 1.05 * step[COMPUTE].predicted_s:
        wanted.append(at_most(Goal, "overlap", 1.05, COMPUTE))
    searched = [step for step in case if step.variant.startswith("buckets") and step.variant != BY_MODEL]
    wanted.append(at_most(LessExposed, BY_MODEL, 1.1, min(searched, key=case.exposed_s).variant))
    return wanted + [at_most(Predicted, BY_MODEL, 0.15, what) for what in (STEP, EXPOSED)]


# For `python -m ddpkit.bench`


def main():
    report(measure())


def report(steps: Steps) -> None:
    """Print tables and goals; keep them, the pictures and every single time in bench-results."""
    print(f"ddp, on {os.cpu_count()} cores, one thread a rank\n{steps}\n")
    for case in steps.cases():
        if case[0].emulated:
            print(f"{beside_the_seed(case)}\n")
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
