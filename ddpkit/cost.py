"""The cost of communication: the messages and bytes of every algorithm, and the time they take.

Every message costs a latency α, whatever its size, and every byte the time β:

    seconds = α · hops + β · bytes in turn

A hop is a message that can begin only when the one before it has arrived; bytes in turn are those
that these messages carry one after another. `volume` counts the two for an algorithm, a size and a
world; `CostModel` multiplies; `fit` finds α and β from measurements; `crossover` finds the size
from which one algorithm beats another; `timeline` predicts how much communication hides behind
backward, and `best_cap` how large buckets should be for that. Nothing is sent here.

The model leaves out ranks that share a core, full caches, and the time of adding. Where a
prediction is wrong, look for these first.

W is the number of ranks, n the bytes of the whole tensor, as in the tables of `ddpkit.collectives`,
`ddpkit.ring` and `ddpkit.doubling`. Hockney 1994; Thakur, Rabenseifner and Gropp 2005, section 3.
Notebooks 02 and 04.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .tools.checks import check_counts, check_positive
from .tools.units import count, duration, rate

# Counting


class Volume(NamedTuple):
    """A count of what one collective call does in sequence: messages, and bytes.

    hops: the number of messages of which each can begin only when the one before it is done.
    in_turn: the bytes of all hops together, a hop counting as the most bytes that any one rank
        sends or receives in it.
    """

    hops: int
    in_turn: float


def _table(world_size: int) -> dict[str, tuple[int, float]]:
    """Return {algorithm: (hops, bytes in turn as a multiple of n)} in a world of that size.

    n is the bytes of the whole tensor. A barrier has no tensor: its second number is bytes itself.
    "halving_doubling_all_reduce" is in the table only if `world_size` is a power of two.
    """
    others, tree = world_size - 1, (world_size - 1).bit_length()  # tree: log₂ W, rounded up
    share = others / world_size
    swaps = world_size.bit_length() - 1  # log₂ W, rounded down
    unpaired = world_size > 2**swaps
    doubling = swaps + 2 * unpaired  # one hop in from the ranks without a partner, one hop back
    table = {
        "broadcast": (others, others),
        "tree_broadcast": (tree, tree),
        "reduce": (others, others),
        "tree_reduce": (tree, tree),
        "scatter": (others, share),
        "gather": (others, share),
        "all_reduce": (2 * others, 2 * others),
        "all_gather": (min(others, 1), share),
        "reduce_scatter": (min(others, 1), share),
        "all_to_all": (min(others, 1), share),
        "barrier": (tree, tree),
        "ring_reduce_scatter": (others, share),
        "ring_all_gather": (others, share),
        "ring_all_reduce": (2 * others, 2 * share),
        "whole_ring_all_reduce": (others, others),
        "doubling_all_reduce": (doubling, doubling),
    }
    return table if unpaired else table | {"halving_doubling_all_reduce": (2 * swaps, 2 * share)}


ALGORITHMS = tuple(_table(1))  # spelled as the functions; the last one for powers of two only


def volume(algorithm: str, nbytes: float, world_size: int) -> Volume:
    """Count the messages and bytes that one call of `algorithm` sends in turn, as a `Volume`.

    algorithm: the name of a function, one of `ALGORITHMS`.
    nbytes: the bytes of the whole: of the tensor, for an all_reduce, reduce or broadcast; of the
        parts of all ranks together, for a gather, scatter, all_gather, reduce_scatter or
        all_to_all. The barrier ignores it.
    world_size: the number of ranks in the call.

    ValueError: there is no such algorithm in a world of that size, bytes that aren't a finite
        number >= 0, or fewer than 1 rank.
    """
    check_counts(world_size=world_size)
    table = _table(world_size)
    if algorithm not in table:
        where = f"for {world_size} ranks" if algorithm in ALGORITHMS else "at all"
        raise ValueError(f"no {algorithm!r} {where}, only {', '.join(table)}")
    if not 0 <= nbytes < math.inf:
        raise ValueError(f"expected nbytes >= 0, got {nbytes}: give the bytes of the whole tensor")
    hops, in_turn = table[algorithm]
    return Volume(hops, in_turn * (1 if algorithm == "barrier" else nbytes))


# Predicting


class Measurement(NamedTuple):
    """A measured collective call: one call of `algorithm` took `seconds`.

    algorithm, world_size, nbytes: the arguments of `volume`; nbytes is the whole tensor's.
    """

    algorithm: str
    world_size: int
    nbytes: float
    seconds: float


@dataclass(frozen=True)
class CostModel:
    """A model of the connection between ranks: what a message costs, and what a byte costs.

    Written by `str`, it reads "31 µs a hop, 1.17 GB/s".

    latency_s: α, seconds for each message that has to wait for another.
    bytes_per_s: 1/β, bytes a rank sends each second; it receives as many at the same time.
    """

    latency_s: float
    bytes_per_s: float

    def seconds(self, algorithm: str, nbytes: float, world_size: int) -> float:
        """Return the predicted seconds of one call of `algorithm`, a name of `ALGORITHMS`.

        nbytes: the bytes of the whole tensor, as `volume` takes them.
        ValueError: the algorithm, size or world is one that `volume` rejects.
        """
        cost = volume(algorithm, nbytes, world_size)
        return cost.hops * self.latency_s + cost.in_turn / self.bytes_per_s

    def error(self, measurements: Iterable[Measurement]) -> float:
        """Return the median of |predicted - measured| / measured over the measurements.

        measurements: others than those that `fit` has used; only others show whether the model
            predicts or remembers.
        ValueError: no measurements; seconds that aren't positive; or an algorithm, size or world
            that `volume` rejects.
        """
        errors = []
        for algorithm, world_size, nbytes, seconds in _checked(measurements):
            predicted = self.seconds(algorithm, nbytes, world_size)
            errors.append(abs(predicted - seconds) / seconds)
        if not errors:
            raise ValueError("expected measurements, got none: measure a new size")
        return statistics.median(errors)

    def __str__(self):
        return f"{duration(self.latency_s)} a hop, {rate(self.bytes_per_s)}"


def crossover(first: str, second: str, world_size: int, model: CostModel) -> float | None:
    """Return the number of bytes from which on `second` is faster than `first`.

    Both predicted times are straight lines over the number of bytes; this is where they cross.
    Return 0.0 if `second` is faster from the first byte on, and None if it isn't faster for large
    tensors, even if it is for small ones.

    first, second: algorithms, of `ALGORITHMS`.
    ValueError: an algorithm or world that `volume` rejects.
    """
    start_1, per_byte_1 = _line(first, world_size, model)
    start_2, per_byte_2 = _line(second, world_size, model)
    if per_byte_2 < per_byte_1:
        return max(0.0, (start_2 - start_1) / (per_byte_1 - per_byte_2))
    return 0.0 if per_byte_2 == per_byte_1 and start_2 < start_1 else None


def _line(algorithm: str, world_size: int, model: CostModel) -> tuple[float, float]:
    """Return (seconds for no bytes, seconds for each further byte) of a call."""
    empty, one = volume(algorithm, 0, world_size), volume(algorithm, 1, world_size)
    per_byte = (one.in_turn - empty.in_turn) / model.bytes_per_s
    return model.seconds(algorithm, 0, world_size), per_byte


# Learning from measurements


def alpha_beta(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Find the (α, β) for which α · hops + β · bytes comes closest to the seconds of all points.

    Return (seconds a hop, seconds a byte). Either can be negative; `fit` rules that out. Closest
    means that the squares of the relative errors have the least sum: relative, so that 4 kB count
    as much as 100 MB, and a measurement that was much too long by chance counts little.

    points: (hops, bytes in turn, seconds) of each measured call. Calls of one size can't tell α and
        β apart: the result is arbitrary, or torch raises LinAlgError. `fit` checks this.
    """
    hops, nbytes, seconds = torch.tensor(points, dtype=torch.float64).T
    rows = torch.stack([hops, nbytes]) / seconds  # (α, β) @ rows should be 1 everywhere
    alpha, beta = torch.linalg.solve(rows @ rows.T, rows.sum(dim=1))
    return alpha.item(), beta.item()


def fit(measurements: Iterable[Measurement]) -> CostModel:
    """Return the `CostModel` that fits the measurements with the least squares of relative errors.

    Neither α nor β is negative: where the best value of one would be, it is 0, and the other is
    fitted alone. If β is 0, the model's bytes_per_s is infinite.

    ValueError: too few sizes to tell α and β apart (measure at least two); seconds that aren't
        positive; or an algorithm, size or world that `volume` rejects.
    """
    points = []
    for algorithm, world_size, nbytes, seconds in (measurements := _checked(measurements)):
        points.append((*volume(algorithm, nbytes, world_size), seconds))
    hops, in_turn, seconds = torch.tensor(points, dtype=torch.float64).view(-1, 3).T
    per_hop, per_byte = hops / seconds, in_turn / seconds
    alone = per_hop.norm() * per_byte.norm()
    if (alone - per_hop @ per_byte).item() <= 1e-12 * alone:  # nearly parallel
        sizes = count(len({measurement.nbytes for measurement in measurements}), "size")
        expected = "measurements that tell latency and bytes apart"
        got = f"{len(measurements)} of {sizes}"
        raise ValueError(f"fit expected {expected}, got {got}: measure at least 2 sizes")
    alpha, beta = alpha_beta(points)
    if alpha < 0:
        alpha, beta = 0.0, (per_byte.sum() / (per_byte @ per_byte)).item()
    if beta < 0:
        alpha, beta = (per_hop.sum() / (per_hop @ per_hop)).item(), 0.0
    return CostModel(alpha, 1 / beta if beta else math.inf)


def _checked(measurements: Iterable[Measurement]) -> list[Measurement]:
    measurements = list(measurements)
    for measurement in measurements:
        check_positive(f"Measure it again: {measurement}.", seconds=measurement.seconds)
    return measurements


# Bandwidth


def bus_bandwidth(operation: str, nbytes: float, seconds: float, world_size: int) -> float:
    """Compute the bus bandwidth of a measured call: bytes per second that an ideal ring would move.

    Return the bytes that each rank would send, and receive, in a ring algorithm, divided by
    `seconds`. Unlike nbytes / seconds, this figure compares with the speed of the network, and
    between worlds of different size. nccl-tests calls it busbw (see doc/PERFORMANCE.md there).

    operation: "all_reduce", "reduce_scatter" or "all_gather".
    nbytes: the bytes of the whole tensor, of all ranks' parts together.
    ValueError: no such operation, seconds that aren't positive, or fewer than 1 rank.
    """
    check_positive("Give the time of one call.", seconds=seconds)
    return volume(f"ring_{operation}", nbytes, world_size).in_turn / seconds


# Buckets of gradients

Plan = Sequence[Sequence[int]]  # for each bucket its gradients' indices: ddp.plan_buckets


class Timeline(NamedTuple):
    """A prediction of when each bucket's all-reduce runs, in seconds after backward began.

    started, done: for each bucket, in the order of sending, when its all-reduce begins and ends.
    backward_s: the time at which the last gradient is computed.
    """

    started: tuple[float, ...]
    done: tuple[float, ...]
    backward_s: float

    @property
    def exposed_s(self) -> float:
        """Return the seconds between the end of backward and the end of the last all-reduce.

        In these, training only waits for communication; the rest is hidden behind backward.
        """
        return self.done[-1] - self.backward_s


def one_wire(ready_s: Sequence[float], travel_s: Sequence[float]) -> list[tuple[float, float]]:
    """Compute (start, end) of each bucket's message, on a connection that carries one at a time.

    A message starts when it is ready and the one before it has ended. Notebook 04.

    ready_s: seconds at which each bucket is full, in the order in which the buckets are sent.
    travel_s: seconds that each bucket's message takes. ValueError: it isn't as long as `ready_s`.
    """
    spans, free = [], 0.0
    for ready, seconds in zip(ready_s, travel_s, strict=True):
        start = max(ready, free)
        free = start + seconds
        spans.append((start, free))
    return spans


def timeline(
    plan: Plan, ready_s: Sequence[float], sizes: Sequence[int], model: CostModel, world_size: int
) -> Timeline:
    """Predict when the all-reduces of one training step run, and return their `Timeline`.

    Each all-reduce is a ring's, and starts when all gradients of its bucket are computed and the
    all-reduce before it has ended. The prediction leaves out that sending takes a core's or a GPU's
    time. Notebook 04.

    plan: for each bucket, in the order of sending, the indices of its gradients; every gradient is
        in exactly one bucket.
    ready_s: for each gradient, the seconds after backward began at which it is computed. If all are
        sent after backward, give the end of backward for each.
    sizes: the bytes of each gradient.
    ValueError: a gradient is missing or there twice, or there is none; the times or sizes are too
        many or too few; or `world_size` is less than 1.
    """
    numbers = sorted(number for bucket in plan for number in bucket)
    if not numbers or numbers != list(range(len(ready_s))) or len(sizes) != len(ready_s):
        got = f"a plan of {len(numbers)} gradients, {len(ready_s)} times and {len(sizes)} sizes"
        raise ValueError(f"expected each gradient once, with a time and a size, got {got}")
    full_s, travel_s = [], []
    for bucket in plan:
        full_s.append(max(ready_s[number] for number in bucket))
        nbytes = sum(sizes[number] for number in bucket)
        travel_s.append(model.seconds("ring_all_reduce", nbytes, world_size))
    started, done = zip(*one_wire(full_s, travel_s), strict=True)
    return Timeline(started, done, max(ready_s))


def best_cap(nbytes: float, backward_s: float, model: CostModel, world_size: int) -> float:
    """Compute the bucket cap, in bytes, that leaves the least communication exposed after backward.

    It is a first guess before caps are measured. It assumes many small gradients that become ready
    evenly over backward. More than `nbytes` means one bucket. 0.0, which `BucketedDDP` rejects,
    means that messages cost no latency, or that there is one rank. Notebook 04.

    nbytes: the bytes of all gradients together.
    backward_s: the seconds that backward takes.
    ValueError: no bytes, no time, or fewer than 1 rank.
    """
    check_positive("Give the bytes of all gradients.", nbytes=nbytes)
    check_positive("Give the time of backward.", seconds=backward_s)
    message_s = model.seconds("ring_all_reduce", 0, world_size)
    wire_s = model.seconds("ring_all_reduce", nbytes, world_size) - message_s
    # The wire begins when the first bucket is full, and is never idle from then on.
    cap = nbytes * math.sqrt(message_s / backward_s)
    if backward_s > wire_s:
        # It has time to spare, and the last bucket is exposed: the smallest with which it keeps up.
        cap = min(cap, nbytes * message_s / (backward_s - wire_s))
    return cap


# Worth it? Sending beside computing, in 16-bit numbers


def sending_over_computing(
    flops_per_s: float,
    bytes_per_s: float,
    tokens: int,
    width: int,
    world_size: int,
    layers: int = 4,
    heads_per_kv: int = 1,
    expert_width: int = 2048,
) -> dict[str, float]:
    """Return {kind of parallelism: seconds of sending for each second of computing}.

    The model is a transformer. The keys are "data parallel", "ZeRO-1", "FSDP", "tensor",
    "pipeline", "ring" and "experts". Under 1, sending can hide behind the computing that goes on
    meanwhile; but there is nothing to hide behind for tensor parallelism's forward, a pipeline's
    boundary and experts' rows. A layer has 12·width² weights, each of which computes 2 FLOPs a
    token in forward and 4 in backward. Numbers have 16 bits. Latency is left out. Notebooks 12, 13.

    flops_per_s: FLOPs that a rank computes in a second.
    bytes_per_s: bytes that a rank sends in a second, while it receives as many.
    tokens: the tokens of a rank's batch; for the ring, of the part of one sequence that a rank has.
    width: the elements of a token's vector between layers.
    world_size: the number of ranks along the one axis of parallelism.
    layers: the layers of one pipeline stage.
    heads_per_kv: the number of query heads that share one head of keys and values.
    expert_width: the elements of an expert's hidden layer.
    """
    ratio = flops_per_s / bytes_per_s
    others = (world_size - 1) / world_size
    return {
        # Backward: 4 FLOPs a weight and token; an all-reduce of its gradient, 4 bytes.
        "data parallel": others * ratio / tokens,
        # Forward: 2 FLOPs, 2 bytes gathered. In backward 2 bytes beside 4 FLOPs: half of this.
        "ZeRO-1": others * ratio / tokens,
        # Forward: 2 FLOPs, 2 bytes gathered. Backward: 4 FLOPs, 2 gathered and 2 reduced.
        "FSDP": others * ratio / tokens,
        # A layer: 72·width²/W FLOPs a token, four all-reduces of width numbers.
        "tensor": (world_size - 1) * ratio / (4.5 * width),
        # A stage's forward: 24·width² FLOPs a layer and token; width numbers to the next stage.
        "pipeline": ratio / (12 * width * layers),
        # A hop: k and v, 4 bytes a token and number of a kv head; meanwhile two products, by half
        # where the mask is causal: 2·tokens FLOPs a token and number of a head. Backward is 12
        # bytes (dk and dv in 32 bits) for five products: 1.2 times this.
        "ring": (world_size > 1) * 2 * ratio / (tokens * heads_per_kv),
        # Forward: a row there and back, 4·width bytes; an expert with a gate, three products.
        "experts": others * ratio * 4 / (6 * expert_width),
    }


def fsdp_step_s(forward_s: float, gather_s: float, units: int) -> float:
    """Predict the seconds of an FSDP step that fetches one unit ahead in forward and backward.

    The optimizer is left out. Besides the slower of computing and sending, a step has to wait for
    the first gather of either pass, and for the last reduction. Notebook 12.

    forward_s: seconds to compute one unit's forward; its backward takes twice that.
    gather_s: seconds to gather one unit's weights; reducing its gradients takes as long.
    units: the number of units, which are all alike.
    """
    backward_s = 2 * forward_s
    # While a unit computes, the wire carries the next one's gather, and the last one's reduction.
    forward = gather_s + (units - 1) * max(forward_s, gather_s) + forward_s
    if units == 1:
        return forward + gather_s + backward_s + gather_s
    ends = 2 * max(backward_s, gather_s)
    middle = (units - 2) * max(backward_s, 2 * gather_s)
    return forward + gather_s + ends + middle + gather_s
