"""What communication costs: the messages and bytes of every algorithm, and the time that a simple model makes of them.

Every message costs a latency α, whatever is in it, every byte the time β on the wire, every byte added up the time γ:

    seconds = α · hops + β · bytes in turn + γ · bytes summed

`volume` counts the three for an algorithm, a size and a world; `Model` multiplies; `fit` finds α, β and γ from
measurements; `crossover` says from which size on one algorithm beats another; `timeline` says how much of it training
doesn't see, because it hides behind backward. Here are numbers only: nothing is sent.

The model leaves out what real machines have: ranks that share a core, caches that are full, sums that go on while the
next message is under way. Where a prediction is wrong, look for these first.

W is the number of ranks, n the bytes of the whole, as in the tables of `ddpkit.collectives` and `ddpkit.ring`.
Hockney 1994 (α and β); Thakur, Rabenseifner and Gropp 2005, section 3 (γ, and most of the algorithms). Notebooks 02
and 04.
"""

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

# Counting


@dataclass(frozen=True)
class Volume:
    """The messages and bytes of one call. Bytes are exact: ints, or Fractions where W doesn't divide n.

    hops: messages that follow one another, because a rank can't begin the next before the one before is done.
    sent, received: bytes of the busiest rank, the one with most bytes in and out; of the root, where there is one.
    in_turn: bytes that follow one another: over all hops, the sum of the most that a rank sends or receives in each.
        That is more than `sent` and `received` where a rank can send only after it has received.
    total: bytes that all ranks send together.
    summed: bytes that arrive at the busiest rank and are added up there.
    """

    hops: int
    sent: int | Fraction
    received: int | Fraction
    in_turn: int | Fraction
    total: int | Fraction
    summed: int | Fraction


def _table(world_size: int) -> dict[str, tuple]:
    """{algorithm: its volume, with bytes in units of n}; those of the barrier are in bytes."""
    others, tree = world_size - 1, (world_size - 1).bit_length()  # tree: log₂ W, rounded up
    share = Fraction(others, world_size)
    swaps = world_size.bit_length() - 1  # log₂ W, rounded down
    extra = world_size - 2**swaps  # ranks that doubling can't pair
    fold = min(extra, 1)  # one hop to take in what they bring, one to tell them the total
    return {
        # hops, sent, received, in turn, total, summed
        "broadcast": (others, others, 0, others, others, 0),
        "tree_broadcast": (tree, tree, 0, tree, others, 0),
        "reduce": (others, 0, others, others, others, others),
        "tree_reduce": (tree, 0, tree, tree, others, tree),
        "scatter": (others, share, 0, share, share, 0),
        "gather": (others, 0, share, share, share, 0),
        "all_reduce": (2 * others, others, others, 2 * others, 2 * others, others),
        "all_gather": (min(others, 1), share, share, share, others, 0),
        "reduce_scatter": (min(others, 1), share, share, share, others, share),
        "all_to_all": (min(others, 1), share, share, share, others, 0),
        "barrier": (tree, tree, tree, tree, world_size * tree, 0),
        "ring_reduce_scatter": (others, share, share, share, others, share),
        "ring_all_gather": (others, share, share, share, others, 0),
        "ring_all_reduce": (2 * others, 2 * share, 2 * share, 2 * share, 2 * others, share),
        "whole_ring_all_reduce": (others, others, others, others, world_size * others, others),
        "doubling_all_reduce": (
            swaps + 2 * fold,
            swaps + fold,
            swaps + fold,
            swaps + 2 * fold,
            2**swaps * swaps + 2 * extra,
            swaps + fold,
        ),
    }


ALGORITHMS = tuple(_table(1))  # every one of ddpkit.collectives and ddpkit.ring, spelled as the function


def volume(algorithm: str, nbytes: float, world_size: int) -> Volume:
    """The messages and bytes of one call of `algorithm`, when `nbytes` is the whole.

    algorithm: one of `ALGORITHMS`. nbytes: of the tensor of an all_reduce or broadcast, of all parts of a gather or
    scatter together; a barrier has none.
    ValueError: no such algorithm, fewer than 0 bytes, fewer than 1 rank.

    Where W doesn't divide n, chunks differ by an element, and so does what is sent. ring_all_reduce is counted as the
    ring for two ranks too; when they have little to say they swap it, which is doubling_all_reduce.
    """
    _check_world_size(world_size)
    if algorithm not in ALGORITHMS:
        raise ValueError(f"no algorithm is called {algorithm!r}; there are {', '.join(ALGORITHMS)}")
    if not 0 <= nbytes < math.inf:
        raise ValueError(f"expected nbytes to be 0 or more, got {nbytes}: give the bytes of the whole tensor")
    hops, *parts = _table(world_size)[algorithm]
    unit = 1 if algorithm == "barrier" else nbytes
    return Volume(hops, *(_int_if_whole(part * Fraction(unit)) for part in parts))


def _check_world_size(world_size: int) -> None:
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"expected world_size to be 1 or more, got {world_size!r}: give the number of ranks")


def _int_if_whole(value: Fraction) -> int | Fraction:
    return int(value) if value.denominator == 1 else value


# Predicting


@dataclass(frozen=True)
class Model:
    """A wire and an adder: seconds = latency_s · hops + bytes in turn / bytes_per_s + bytes summed / sum_bytes_per_s.

    latency_s: α, seconds for each message that has to wait for another.
    bytes_per_s: 1/β, bytes a rank sends each second; it receives as many at the same time (full duplex).
    sum_bytes_per_s: 1/γ, bytes a rank adds up each second; infinite where sums take no time of their own.
    ValueError: a negative or infinite latency, a speed that isn't positive.
    """

    latency_s: float
    bytes_per_s: float
    sum_bytes_per_s: float = math.inf

    def __post_init__(self):
        if not 0 <= self.latency_s < math.inf:
            raise ValueError(f"Model expected latency_s >= 0, got {self.latency_s}: give seconds, for example 50e-6")
        for field in ("bytes_per_s", "sum_bytes_per_s"):
            if not getattr(self, field) > 0:
                raise ValueError(
                    f"Model expected {field} > 0, got {getattr(self, field)}: give bytes per second, 1e9 for 1 GB/s"
                )

    def seconds(self, algorithm: str, nbytes: float, world_size: int) -> float:
        """The time of one call; arguments and errors as those of `volume`."""
        cost = volume(algorithm, nbytes, world_size)
        return cost.hops * self.latency_s + cost.in_turn / self.bytes_per_s + cost.summed / self.sum_bytes_per_s

    def __str__(self):
        said = f"{_with_unit(self.latency_s, SECONDS)} a hop, {_with_unit(self.bytes_per_s, SPEEDS)}"
        if self.sum_bytes_per_s == math.inf:
            return said
        return f"{said}, sums {_with_unit(self.sum_bytes_per_s, SPEEDS)}"


SECONDS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}
SPEEDS = {"GB/s": 1e9, "MB/s": 1e6, "KB/s": 1e3, "bytes/s": 1.0}


def _with_unit(value: float, units: dict[str, float]) -> str:
    """'31 µs': three digits, in the first unit that makes it 1 or more, or else in the last."""
    value = float(f"{value:.3g}")
    name, unit = next(((name, unit) for name, unit in units.items() if value >= unit), list(units.items())[-1])
    return f"{value / unit:.12g} {name}"


def crossover(first: str, second: str, world_size: int, model: Model) -> float | None:
    """The bytes from which on `second` is faster than `first`: 0.0 if it always is, None if it isn't for many bytes.

    first, second: of `ALGORITHMS`. ValueError as in `volume`.

    Both times are straight lines over the number of bytes; this is where they cross.
    """
    start_1, per_byte_1 = _line(first, world_size, model)
    start_2, per_byte_2 = _line(second, world_size, model)
    if per_byte_2 < per_byte_1:
        return max(0.0, (start_2 - start_1) / (per_byte_1 - per_byte_2))
    return 0.0 if per_byte_2 == per_byte_1 and start_2 < start_1 else None


def _line(algorithm: str, world_size: int, model: Model) -> tuple[float, float]:
    """(seconds for no bytes, seconds for each byte more)."""
    without_latency = replace(model, latency_s=0.0)
    empty, one = (without_latency.seconds(algorithm, nbytes, world_size) for nbytes in (0, 1))
    return model.seconds(algorithm, 0, world_size), one - empty


# Learning from measurements


class Measurement(NamedTuple):
    """That one call of `algorithm` took `seconds`; the first three as in `volume`."""

    algorithm: str
    world_size: int
    nbytes: float
    seconds: float


@dataclass(frozen=True)
class Fit:
    """A model, and how far it is from the measurements that it was made from.

    residuals: (predicted - measured) / measured, in the order of the measurements; 0.1: predicted 10 % too long.
    """

    model: Model
    residuals: tuple[float, ...]

    def error(self, held_out: Iterable[Measurement]) -> float:
        """The median distance between prediction and measurement, as a share of what was measured.

        held_out: measurements that `fit` has not seen; only those tell whether the model predicts or remembers.
        ValueError: none given; others as in `fit`.
        """
        held_out = _checked(held_out)
        if not held_out:
            raise ValueError("expected measurements to hold the model against, got none: measure a size it hasn't seen")
        return statistics.median(abs(_relative_error(self.model, each)) for each in held_out)


def fit(measurements: Iterable[Measurement], sums: bool = False) -> Fit:
    """The model that comes closest to the measurements, by least squares of relative errors.

    sums: also find the speed of adding; without it, adding counts as part of the wire.
    ValueError: too few sizes or algorithms to tell the unknowns apart; seconds that aren't positive; as in `volume`.

    Relative, so that 4 KB count as much as 100 MB, and a measurement that took much too long by chance counts little.
    No α, β or γ is negative: where the best one would be, it is 0 and the others are the best beside it.
    """
    measurements = _checked(measurements)
    unknowns = 3 if sums else 2
    volumes = [volume(each.algorithm, each.nbytes, each.world_size) for each in measurements]
    counts = [[float(count) for count in (cost.hops, cost.in_turn, cost.summed)[:unknowns]] for cost in volumes]
    seconds = torch.tensor([each.seconds for each in measurements], dtype=torch.float64)
    rows = torch.tensor(counts, dtype=torch.float64).view(-1, unknowns) / seconds[:, None]
    lengths = rows.norm(dim=0).clamp(min=torch.finfo(rows.dtype).tiny)  # hops are few, bytes are many: bring them near
    if torch.linalg.matrix_rank(rows / lengths, rtol=1e-9) < unknowns:
        apart = "the latency, the bytes and the sums" if sums else "the latency and the bytes"
        more = "also an algorithm that adds another share of what it sends" if sums else "at least 2 sizes"
        raise ValueError(
            f"fit expected measurements that tell {apart} apart, got {_said(measurements)}: measure {more}"
        )
    alpha, beta, *gamma = (_least_squares(rows / lengths) / lengths).tolist()
    model = Model(alpha, *(1 / cost if cost else math.inf for cost in (beta, *gamma)))
    return Fit(model, tuple(_relative_error(model, each) for each in measurements))


def _least_squares(rows: Tensor) -> Tensor:
    """The x with no negative entry for which rows @ x is nearest to 1 everywhere.

    Its entries that aren't 0 are the plain least squares of their columns alone: so try every choice of columns.
    """
    width = rows.shape[1]
    found = []
    for many in range(1, width + 1):
        for columns in map(list, itertools.combinations(range(width), many)):
            x = rows.new_zeros(width)
            x[columns] = torch.linalg.lstsq(rows[:, columns], rows.new_ones(len(rows), 1)).solution[:, 0]
            if (x >= 0).all():
                found.append(x)
    return min(found, key=lambda x: (rows @ x - 1).norm().item())


def _checked(measurements: Iterable[Measurement]) -> list[Measurement]:
    measurements = list(measurements)
    for number, each in enumerate(measurements):
        if not 0 < each.seconds < math.inf:
            raise ValueError(
                f"expected seconds > 0, got {each.seconds} in measurement {number}, {each}: measure it again"
            )
    return measurements


def _said(measurements: Sequence[Measurement]) -> str:
    sizes = len({each.nbytes for each in measurements})
    algorithms = dict.fromkeys(each.algorithm for each in measurements)
    return f"{len(measurements)}, of {sizes} size{'s' * (sizes != 1)} ({', '.join(algorithms) or 'no algorithm'})"


def _relative_error(model: Model, measured: Measurement) -> float:
    predicted = model.seconds(measured.algorithm, measured.nbytes, measured.world_size)
    return (predicted - measured.seconds) / measured.seconds


# Bandwidth


def algorithm_bandwidth(nbytes: float, seconds: float) -> float:
    """Bytes per second as the caller sees it: the whole over the time. nccl-tests calls it algbw.

    ValueError: seconds that aren't positive.
    """
    if not 0 < seconds < math.inf:
        raise ValueError(f"expected seconds > 0, got {seconds}: give the time of one call")
    return nbytes / seconds


def bus_bandwidth(operation: str, nbytes: float, seconds: float, world_size: int) -> float:
    """Bytes per second that the best algorithm for `operation` must have moved in and out of each rank: busbw.

    operation: all_reduce, reduce_scatter, all_gather, broadcast or reduce. nbytes: the whole, as in `volume`.
    ValueError: no such operation, seconds that aren't positive, fewer than 1 rank.

    Comparable with the speed of the wire, and between worlds of different size. nccl-tests, doc/PERFORMANCE.md.
    """
    _check_world_size(world_size)
    share = (world_size - 1) / world_size
    factors = {"all_reduce": 2 * share, "reduce_scatter": share, "all_gather": share, "broadcast": 1.0, "reduce": 1.0}
    if operation not in factors:
        raise ValueError(f"no bus bandwidth is defined for {operation!r}, only for {', '.join(factors)}")
    return factors[operation] * algorithm_bandwidth(nbytes, seconds)


# Buckets of gradients

Plan = Sequence[Sequence[int]]  # for each bucket, the numbers of its gradients; as `ddp.plan_buckets` makes it


@dataclass(frozen=True)
class Timeline:
    """When the buckets of a plan travel, in seconds after backward began.

    started, done: of each bucket's all-reduce. backward_s: when the last gradient was ready, and backward over.
    """

    started: tuple[float, ...]
    done: tuple[float, ...]
    backward_s: float

    @property
    def exposed_s(self) -> float:
        """The seconds that training waits for communication: from the end of backward to that of the last bucket."""
        return self.done[-1] - self.backward_s


def timeline(plan: Plan, ready_s: Sequence[float], sizes: Sequence[int], model: Model, world_size: int) -> Timeline:
    """The all-reduces of one step: each starts when all its gradients are ready and the bucket before it is done.

    plan: its buckets, in the order in which they are sent; every gradient in exactly one. ready_s: when each gradient
    is ready, in seconds after backward began, as measured. sizes: bytes of each.
    ValueError: no gradients, not one time and one size for each; as in `volume`.

    For a wrapper that sends only after backward, all gradients are ready at its end. Each all-reduce is a ring's. Left
    out: that sending takes a core's or a GPU's time, so that backward takes longer than alone. Notebook 04.
    """
    numbers = sorted(number for bucket in plan for number in bucket)
    if not numbers or numbers != list(range(len(ready_s))) or len(sizes) != len(ready_s):
        got = f"a plan of {len(numbers)} gradients, {len(ready_s)} times and {len(sizes)} sizes"
        raise ValueError(
            f"timeline expected each gradient once, with a time and a size, got {got}: plan these gradients"
        )
    started, done, free = [], [], 0.0
    for bucket in plan:
        started.append(max(free, *(ready_s[number] for number in bucket)))
        free = started[-1] + model.seconds("ring_all_reduce", sum(sizes[number] for number in bucket), world_size)
        done.append(free)
    return Timeline(tuple(started), tuple(done), max(ready_s))


def caps(sizes: Sequence[int]) -> list[float]:
    """Bucket caps worth a try, in bytes: from the smallest gradient to all of them, each a fifth larger than the last.

    Not every plan there is: between n gradients those are up to n²/2, and neighbours differ by a single gradient, which
    is less than a model is wrong by.
    """
    least, most = max(1, min(sizes)), sum(sizes)
    steps = max(0, math.ceil(math.log(most / least, 1.2)))
    return [*(least * 1.2**step for step in range(steps)), most]


def best_cap(
    plans: Mapping[float, Plan], ready_s: Sequence[float], sizes: Sequence[int], model: Model, world_size: int
) -> float:
    """The bucket cap whose plan leaves the least communication exposed; of several, the largest: fewest messages.

    plans: {cap: plan}, for example {cap: plan_buckets(gradients, cap) for cap in caps(sizes)}. The rest, and
    ValueError, as in `timeline`; also for no plan at all.
    """
    if not plans:
        raise ValueError("best_cap expected plans to choose from, got none: plan for each of caps(sizes)")
    return min(plans, key=lambda cap: (timeline(plans[cap], ready_s, sizes, model, world_size).exposed_s, -cap))


# Batches


def global_batch(micro_batch: int, accumulation: int, data_parallel: int) -> int:
    """Sequences that one optimizer step learns from: micro-batch × accumulation × data-parallel size.

    micro_batch: sequences in one forward of one rank. accumulation: backwards before a step. data_parallel: ranks.
    ValueError: one of them is less than 1. Notebook 03.
    """
    _check_counts(micro_batch=micro_batch, accumulation=accumulation, data_parallel=data_parallel)
    return micro_batch * accumulation * data_parallel


def accumulation_for(batch: int, micro_batch: int, data_parallel: int) -> int:
    """How many micro-batches each rank must accumulate, so that a step learns from `batch` sequences.

    The others as in `global_batch`. ValueError: one is less than 1, or the batch doesn't divide.
    """
    _check_counts(batch=batch, micro_batch=micro_batch, data_parallel=data_parallel)
    accumulation, left = divmod(batch, micro_batch * data_parallel)
    if left:
        at_once = f"{micro_batch} × {data_parallel} = {micro_batch * data_parallel} sequences at a time"
        raise ValueError(
            f"expected a batch of a multiple of {at_once}, got {batch}: change it by {-left} or "
            f"{micro_batch * data_parallel - left:+}, or change the micro-batch"
        )
    return accumulation


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"expected {name} to be 1 or more, got {value!r}: give a whole number")
