"""ddpkit.cost: its volumes against what real runs put on the wire, its fits against models that are known."""

import inspect
import itertools
import math
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ddpkit import collectives, launch, ring
from ddpkit.ddp import plan_buckets
from ddpkit.lesson import figures
from ddpkit.tools.cost import (
    ALGORITHMS,
    Fit,
    Measurement,
    Model,
    Volume,
    accumulation_for,
    algorithm_bandwidth,
    best_cap,
    bus_bandwidth,
    caps,
    crossover,
    fit,
    global_batch,
    timeline,
    volume,
)

# Counting. Every algorithm runs between two of torch's barriers, which mark its beginning and end in the records.

ELEMENTS = 60  # float32, divides by 1, 2, 3, 4, 5, 6
WHOLE = 4 * ELEMENTS
SAME_ON_ONE_TENSOR = {"all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"}
SAME_IN_TWO_CALLS = {"begin_reduce_scatter", "begin_all_gather"}  # as ring_reduce_scatter, ring_all_gather


class Additions(TorchDispatchMode):
    """Counts the bytes that `torch.add` and `+=` make."""

    nbytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if function.overloadpacket in (torch.ops.aten.add, torch.ops.aten.add_):
            self.nbytes += made.nbytes
        return made


def every_algorithm():
    """{algorithm: the bytes that this rank added up}; roots are the last rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    root = world_size - 1
    ring.SEGMENT_BYTES, ring.AHEAD = WHOLE, 1  # two ranks go round too, and no chunk is cut
    whole, part = torch.ones(ELEMENTS), torch.ones(ELEMENTS // world_size)
    parts = list(torch.ones(ELEMENTS).chunk(world_size))
    at_root = parts if rank == root else None
    calls = {
        "broadcast": lambda: collectives.broadcast(whole, root),
        "tree_broadcast": lambda: collectives.tree_broadcast(whole, root),
        "reduce": lambda: collectives.reduce(whole, root),
        "tree_reduce": lambda: collectives.tree_reduce(whole, root),
        "scatter": lambda: collectives.scatter(part, at_root, root),
        "gather": lambda: collectives.gather(part, at_root, root),
        "all_reduce": lambda: collectives.all_reduce(whole),
        "all_gather": lambda: collectives.all_gather(parts, part),
        "reduce_scatter": lambda: collectives.reduce_scatter(part, parts),
        "all_to_all": lambda: collectives.all_to_all(list(torch.ones(ELEMENTS).chunk(world_size)), parts),
        "barrier": lambda: collectives.barrier(),
        "ring_reduce_scatter": lambda: ring.ring_reduce_scatter(whole),
        "ring_all_gather": lambda: ring.ring_all_gather(whole),
        "ring_all_reduce": lambda: ring.ring_all_reduce(whole),
        "whole_ring_all_reduce": lambda: ring.whole_ring_all_reduce(whole),
        "doubling_all_reduce": lambda: ring.doubling_all_reduce(whole),
    }
    added = {}
    for name, call in calls.items():
        with Additions() as additions:
            call()
        added[name] = additions.nbytes
        dist.barrier()
    return added


def wires(run):
    """{algorithm: what `figures` needs of a run: the records of rank 0, of rank 1, ..., up to torch's barrier}."""
    found = {name: [] for name in run[0]}
    for records in run.wire:
        ends = [number for number, record in enumerate(records) if record.op == "barrier"]
        for name, begin, end in zip(found, [-1, *ends], ends, strict=False):
            found[name].append(records[begin + 1 : end])
    return {name: SimpleNamespace(wire=lanes) for name, lanes in found.items()}


def measured(wire, added):
    """The `Volume` that a run shows; `added` is what each rank added up."""
    sent, received, hops = figures.sent_bytes(wire), figures.received_bytes(wire), figures.hops_of(wire)
    ranks = range(len(sent))
    busiest = max(ranks, key=lambda rank: (sent[rank] + received[rank], rank))  # of two alike, the root
    in_turn = sum(
        max(max(sum(nbytes for *ends, nbytes in hop if ends[end] == rank) for end in (0, 1)) for rank in ranks)
        for hop in hops
    )
    return Volume(len(hops), sent[busiest], received[busiest], in_turn, sum(sent), max(added))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 6])
def test_volumes_are_those_of_real_runs(world_size):
    run = launch(every_algorithm, world_size=world_size)
    seen = {name: measured(wire, [added[name] for added in run]) for name, wire in wires(run).items()}
    assert seen == {name: volume(name, WHOLE, world_size) for name in ALGORITHMS}


def say_little():
    with Additions() as additions:
        ring.ring_all_reduce(torch.ones(ELEMENTS))
    return additions.nbytes


def test_two_ranks_that_have_little_to_say_swap_it():
    run = launch(say_little, world_size=2)
    swap = volume("doubling_all_reduce", WHOLE, 2)
    assert measured(run, list(run)) == swap
    assert (swap.hops, volume("ring_all_reduce", WHOLE, 2).hops) == (1, 2)
    assert swap.sent == volume("ring_all_reduce", WHOLE, 2).sent


def test_every_algorithm_of_the_project_has_a_volume():
    public = {
        name
        for module in (collectives, ring)
        for name, function in vars(module).items()
        if inspect.isfunction(function) and function.__module__ == module.__name__ and not name.startswith("_")
    }
    assert set(ALGORITHMS) == public - SAME_ON_ONE_TENSOR - SAME_IN_TWO_CALLS


def test_figures_to_reproduce():
    """FACTS.md: the totals of the seed, and the ring's share."""
    totals = {name: volume(name, 1000, 4).total for name in ALGORITHMS}
    assert totals["broadcast"] == totals["reduce"] == totals["all_gather"] == totals["reduce_scatter"] == 3000
    assert totals["scatter"] == totals["gather"] == 750
    assert totals["ring_all_reduce"] == totals["all_reduce"] == 6000  # the ring moves no less, it spreads it
    assert (volume("ring_all_reduce", 1000, 4).sent, volume("all_reduce", 1000, 4).in_turn) == (1500, 6000)
    for world_size in (2, 3, 8, 1000):
        whole = volume("ring_all_reduce", 1000, world_size)
        halves = volume("ring_reduce_scatter", 1000, world_size), volume("ring_all_gather", 1000, world_size)
        assert whole.sent == Fraction(2 * (world_size - 1), world_size) * 1000 < 2000
        assert [half.sent for half in halves] == [whole.sent / 2] * 2
        assert volume("whole_ring_all_reduce", 1000, world_size).sent == Fraction(world_size, 2) * whole.sent


def test_bytes_are_exact():
    sent = volume("ring_all_reduce", 10**18, 4).sent
    assert sent == 15 * 10**17
    assert type(sent) is int
    assert volume("ring_all_reduce", 1e8, 4) == volume("ring_all_reduce", 10**8, 4)
    assert volume("ring_all_reduce", 10, 3).sent == Fraction(40, 3)
    assert volume("barrier", 10**9, 4) == volume("barrier", 0, 4)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("ring", 10, 2), "no algorithm is called 'ring'; there are broadcast, .*doubling_all_reduce"),
        (("ring_all_reduce", -1, 2), "nbytes to be 0 or more, got -1: give the bytes"),
        (("ring_all_reduce", math.nan, 2), "nbytes to be 0 or more, got nan"),
        (("ring_all_reduce", math.inf, 2), "nbytes to be 0 or more, got inf"),
        (("ring_all_reduce", 10, 0), "world_size to be 1 or more, got 0: give the number of ranks"),
        (("ring_all_reduce", 10, 2.0), "world_size to be 1 or more, got 2.0"),
        (("ring_all_reduce", 10, True), "world_size to be 1 or more, got True"),
    ],
)
def test_what_has_no_volume(arguments, complaint):
    with pytest.raises(ValueError, match=complaint):
        volume(*arguments)


# Predicting

TEN_GIGABIT = Model(latency_s=31e-6, bytes_per_s=1.25e9)
WITH_SUMS = Model(latency_s=31e-6, bytes_per_s=1.25e9, sum_bytes_per_s=5e9)


def test_a_models_seconds():
    """T(n) = αP + βn: a naive all-reduce on 4 ranks is 6 messages of n bytes, one after the other, and 3 sums."""
    assert Model(1e-3, 1e6).seconds("all_reduce", 1000, 4) == pytest.approx(6 * 1e-3 + 6 * 1e-3)
    assert Model(1e-3, 1e6, 1e6).seconds("all_reduce", 1000, 4) == pytest.approx(6 * 1e-3 + 6 * 1e-3 + 3 * 1e-3)
    assert Model(1e-3, 1e6).seconds("gather", 1000, 4) == pytest.approx(3 * 1e-3 + 0.75e-3)  # the root sends nothing
    assert Model(1e-3, math.inf).seconds("ring_all_reduce", 10**9, 4) == 6e-3
    assert Model(1e-3, 1.0).seconds("ring_all_reduce", 10**9, 1) == 0


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (TEN_GIGABIT, "31 µs a hop, 1.25 GB/s"),
        (WITH_SUMS, "31 µs a hop, 1.25 GB/s, sums 5 GB/s"),
        (Model(1.5e-3, 999.96e6), "1.5 ms a hop, 1 GB/s"),
        (Model(999.96e-6, 123.4e6), "1 ms a hop, 123 MB/s"),
        (Model(0, math.inf), "0 ns a hop, inf GB/s"),
        (Model(2, 500), "2 s a hop, 500 bytes/s"),
    ],
)
def test_a_model_reads_well(model, said):
    assert str(model) == said


@pytest.mark.parametrize(
    ("parameters", "complaint"),
    [
        ((-1e-6, 1e9), "latency_s >= 0, got -1e-06: give seconds"),
        ((math.inf, 1e9), "latency_s >= 0, got inf"),
        ((math.nan, 1e9), "latency_s >= 0, got nan"),
        ((1e-6, 0), "bytes_per_s > 0, got 0: give bytes per second"),
        ((1e-6, math.nan), "bytes_per_s > 0, got nan"),
        ((1e-6, 1e9, -1.0), "sum_bytes_per_s > 0, got -1.0"),
    ],
)
def test_models_that_cannot_be(parameters, complaint):
    with pytest.raises(ValueError, match=f"Model expected {complaint}"):
        Model(*parameters)


def test_where_the_ring_overtakes_doubling():
    """On 4 ranks: 2α + 2nβ against 6α + 1.5nβ, equal at n = 8α/β."""
    assert crossover("doubling_all_reduce", "ring_all_reduce", 4, TEN_GIGABIT) == pytest.approx(8 * 31e-6 * 1.25e9)


@pytest.mark.parametrize("world_size", [3, 4, 8])
@pytest.mark.parametrize("model", [TEN_GIGABIT, WITH_SUMS])
def test_second_is_slower_below_the_crossover_and_faster_above(world_size, model):
    pair = "doubling_all_reduce", "ring_all_reduce"
    nbytes = crossover(*pair, world_size, model)
    before = [model.seconds(algorithm, 0.99 * nbytes, world_size) for algorithm in pair]
    after = [model.seconds(algorithm, 1.01 * nbytes, world_size) for algorithm in pair]
    assert before[0] < before[1]
    assert after[0] > after[1]


def test_crossovers_that_are_everywhere_or_nowhere():
    assert crossover("ring_all_reduce", "doubling_all_reduce", 4, TEN_GIGABIT) is None  # faster for few bytes only
    assert crossover("all_reduce", "ring_all_reduce", 4, TEN_GIGABIT) == 0.0  # as many hops, fewer bytes
    assert crossover("broadcast", "tree_broadcast", 4, TEN_GIGABIT) == 0.0  # fewer hops, fewer bytes
    assert crossover("tree_broadcast", "broadcast", 4, TEN_GIGABIT) is None
    assert crossover("ring_all_gather", "all_gather", 4, TEN_GIGABIT) == 0.0  # fewer hops, as many bytes
    assert crossover("all_gather", "ring_all_gather", 4, TEN_GIGABIT) is None
    assert crossover("ring_all_reduce", "ring_all_reduce", 4, TEN_GIGABIT) is None
    assert crossover("broadcast", "reduce", 4, WITH_SUMS) is None  # the same messages, and sums
    assert crossover("all_gather", "barrier", 4, TEN_GIGABIT) > 0  # bytes that don't grow with n are no slope


# Learning from measurements

SIZES = (4096, 10**5, 10**6, 10**7, 10**8)


def timed(model, algorithms=("ring_all_reduce",), world_sizes=(4,), sizes=SIZES):
    """What a machine that is exactly like `model` would measure."""
    return [
        Measurement(algorithm, world_size, nbytes, model.seconds(algorithm, nbytes, world_size))
        for algorithm in algorithms
        for world_size in world_sizes
        for nbytes in sizes
    ]


def distance(model, other):
    """The largest relative difference of a parameter."""
    fields = ("latency_s", "bytes_per_s", "sum_bytes_per_s")
    both = [(getattr(model, field), getattr(other, field)) for field in fields]
    return max(abs(a / b - 1) for a, b in both if math.isfinite(a) or math.isfinite(b))


@pytest.mark.parametrize("algorithm", sorted(set(ALGORITHMS) - {"barrier"}))
def test_a_fit_finds_the_model_again(algorithm):
    found = fit(timed(TEN_GIGABIT, [algorithm]))
    assert distance(found.model, TEN_GIGABIT) < 1e-9
    assert found.residuals == pytest.approx([0] * len(SIZES), abs=1e-9)
    assert found.error(timed(TEN_GIGABIT, ["all_reduce"], [2], [12345, 6789])) < 1e-9


def test_a_fit_finds_the_sums_again():
    measurements = timed(WITH_SUMS, ("ring_all_reduce", "ring_all_gather"), (2, 4))
    assert distance(fit(measurements, sums=True).model, WITH_SUMS) < 1e-9
    assert fit(measurements).model.sum_bytes_per_s == math.inf
    assert max(map(abs, fit(measurements).residuals)) > 0.01


def test_one_size_in_two_worlds_is_enough():
    assert distance(fit(timed(TEN_GIGABIT, world_sizes=(2, 4), sizes=(10**5,))).model, TEN_GIGABIT) < 1e-9


def test_small_sizes_count_as_much_as_large_ones():
    """100 MB take 1.3 times as long as they should; 4 KB aren't given away to please them."""
    measurements = timed(TEN_GIGABIT)
    measurements[-1] = measurements[-1]._replace(seconds=1.3 * measurements[-1].seconds)
    assert abs(fit(measurements).residuals[0]) < 0.05

    rows = torch.tensor([[6, 1.5 * each.nbytes] for each in measurements], dtype=torch.float64)
    seconds = torch.tensor([[each.seconds] for each in measurements], dtype=torch.float64)
    plain = torch.linalg.lstsq(rows, seconds).solution
    assert abs((rows @ plain / seconds - 1)[0]) > 1  # plain least squares do just that


def test_a_measurement_that_took_too_long_counts_little():
    measurements = timed(TEN_GIGABIT)
    measurements[2] = measurements[2]._replace(seconds=100 * measurements[2].seconds)
    found = fit(measurements)
    assert distance(found.model, TEN_GIGABIT) < 0.01
    assert found.residuals[2] == pytest.approx(-0.99, abs=0.001)


def test_residuals_are_those_of_the_best_model():
    """Noise of known signs: at the optimum, no small change of a parameter makes the squares smaller."""
    noise = (1.1, 0.9, 1.05, 0.9, 1.1)
    measurements = [
        each._replace(seconds=each.seconds * by) for each, by in zip(timed(TEN_GIGABIT), noise, strict=True)
    ]
    found = fit(measurements)
    predicted = [found.model.seconds(each.algorithm, each.nbytes, each.world_size) for each in measurements]
    assert found.residuals == pytest.approx(
        [p / each.seconds - 1 for p, each in zip(predicted, measurements, strict=True)]
    )

    def squares(latency, speed):
        model = Model(found.model.latency_s * latency, found.model.bytes_per_s * speed)
        return sum((model.seconds("ring_all_reduce", m.nbytes, 4) / m.seconds - 1) ** 2 for m in measurements)

    assert all(squares(*change) > squares(1, 1) for change in [(1.01, 1), (0.99, 1), (1, 1.01), (1, 0.99)])


def test_no_parameter_is_negative():
    """Times that grow faster than bytes would make the latency negative, those that fall the time per byte."""
    growing = [Measurement("ring_all_reduce", 4, n, seconds) for n, seconds in ((1e6, 1e-3), (1e7, 20e-3), (1e8, 0.3))]
    found = fit(growing).model
    assert found.latency_s == 0.0
    per_byte = [each.seconds / (1.5 * each.nbytes) for each in growing]
    best = sum(1 / p for p in per_byte) / sum(1 / p**2 for p in per_byte)  # least squares of the bytes alone
    assert found.bytes_per_s == pytest.approx(1 / best)
    falling = [Measurement("ring_all_reduce", 4, n, seconds) for n, seconds in ((1e6, 3e-3), (1e7, 2e-3), (1e8, 1e-3))]
    found = fit(falling).model
    assert found.bytes_per_s == math.inf
    assert 1e-3 / 6 < found.latency_s < 3e-3 / 6
    both = timed(TEN_GIGABIT, ["ring_all_gather"]) + [
        each._replace(seconds=each.seconds * 0.9) for each in timed(TEN_GIGABIT, ["ring_reduce_scatter"])
    ]
    assert fit(both, sums=True).model.sum_bytes_per_s == math.inf  # with sums it was faster


def test_the_error_is_the_median_of_what_it_has_not_seen():
    found = Fit(TEN_GIGABIT, ())
    held_out = [
        each._replace(seconds=each.seconds * by)
        for each, by in zip(timed(TEN_GIGABIT), (1, 2, 0.5, 1.25, 10), strict=True)
    ]  # the model is wrong by 0, 0.5, 1, 0.2, 0.9
    assert found.error(held_out) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="got none: measure a size"):
        found.error([])


@pytest.mark.parametrize(
    ("measurements", "sums", "complaint"),
    [
        ([], False, r"the latency and the bytes apart, got 0, of 0 sizes \(no algorithm\): measure at least 2 sizes"),
        (timed(TEN_GIGABIT, sizes=[10**6]) * 3, False, r"got 3, of 1 size \(ring_all_reduce\): measure at least 2"),
        (timed(WITH_SUMS), True, r"and the sums apart, got 5, of 5 sizes \(ring_all_reduce\): measure also an algo"),
        (timed(WITH_SUMS, ["broadcast", "scatter"]), True, r"got 10, of 5 sizes \(broadcast, scatter\)"),
        (timed(TEN_GIGABIT, world_sizes=[1]), False, "seconds > 0, got 0.0 in measurement 0, .* measure it again"),
        ([Measurement("broadcast", 2, 10, math.nan)], False, "seconds > 0, got nan in measurement 0"),
        ([Measurement("broadcast", 0, 10, 1.0)], False, "world_size to be 1 or more, got 0"),
        ([Measurement("cast", 2, 10, 1.0)], False, "no algorithm is called 'cast'"),
    ],
)
def test_measurements_that_tell_too_little(measurements, sums, complaint):
    with pytest.raises(ValueError, match=complaint):
        fit(measurements, sums=sums)


# Bandwidth


@pytest.mark.parametrize(
    ("milliseconds", "world_size", "effective", "bus"),
    [(657.1070, 2, 3.04, 1.63), (1377.8717, 4, 1.45, 1.17), (268.5016, 2, 7.45, 4.0)],
    ids=["gloo 2", "gloo 4", "nccl 2"],
)
def test_the_seeds_table_read_as_nccl_tests_would(milliseconds, world_size, effective, bus):
    """1 GiB (FACTS.md): what the seed calls effective bandwidth is 2 GiB over the time, for any number of ranks."""
    seconds = milliseconds / 1000
    assert 2 * algorithm_bandwidth(2**30, seconds) / 2**30 == pytest.approx(effective, abs=0.01)
    assert bus_bandwidth("all_reduce", 2**30, seconds, world_size) / 1e9 == pytest.approx(bus, abs=0.005)


def test_bus_bandwidth_is_what_the_wire_carries():
    """On a wire without latency, the best algorithm shows the wire's own speed, whatever the world."""
    wire = Model(0, 1e9)
    for operation, best in [
        ("all_reduce", "ring_all_reduce"),
        ("reduce_scatter", "ring_reduce_scatter"),
        ("all_gather", "ring_all_gather"),
    ]:
        for world_size in (2, 3, 8):
            seconds = wire.seconds(best, 10**6, world_size)
            assert bus_bandwidth(operation, 10**6, seconds, world_size) == pytest.approx(1e9)
    assert bus_bandwidth("broadcast", 10**6, 1e-3, 4) == bus_bandwidth("reduce", 10**6, 1e-3, 4) == 1e9


def test_bandwidths_that_make_no_sense():
    with pytest.raises(ValueError, match="seconds > 0, got 0: give the time"):
        algorithm_bandwidth(10, 0)
    with pytest.raises(
        ValueError, match="for 'gather', only for all_reduce, reduce_scatter, all_gather, broadcast, reduce"
    ):
        bus_bandwidth("gather", 10, 1.0, 2)
    with pytest.raises(ValueError, match="world_size to be 1 or more, got 0"):
        bus_bandwidth("all_reduce", 10, 1.0, 0)


# Buckets of gradients. On this wire 2 ranks take 2 s for a message, and 1 s for each byte.

SLOW = Model(latency_s=1.0, bytes_per_s=1.0)
READY = (1.0, 5.0, 6.0, 20.0)
BYTES = (3, 3, 4, 2)


def test_a_bucket_starts_when_its_gradients_are_ready_and_the_wire_is_free():
    found = timeline([[0, 1], [2], [3]], READY, BYTES, SLOW, 2)
    assert found.started == (
        5.0,
        13.0,
        20.0,
    )  # the second was ready at 6 and waits for the first, the wire for the last
    assert found.done == (13.0, 19.0, 24.0)
    assert (found.backward_s, found.exposed_s) == (20.0, 4.0)


def test_the_time_between_is_a_rings():
    found = timeline([[0, 1, 2, 3]], READY, BYTES, TEN_GIGABIT, 4)
    assert found.exposed_s == pytest.approx(6 * 31e-6 + 1.5 * 12 / 1.25e9)


def test_alone_nothing_is_exposed():
    assert timeline([[0], [1], [2], [3]], READY, BYTES, SLOW, 1).exposed_s == 0


def test_what_is_sent_after_backward_is_all_exposed():
    """Naive: each message by itself; flat: one. They differ by the latencies."""
    after = [20.0] * 4
    naive = timeline([[0], [1], [2], [3]], after, BYTES, SLOW, 2).exposed_s
    flat = timeline([[0, 1, 2, 3]], after, BYTES, SLOW, 2).exposed_s
    assert (naive, flat) == (4 * 2 + 12, 2 + 12)


@pytest.mark.parametrize(
    ("plan", "ready", "sizes", "complaint"),
    [
        ([], [], [], "a plan of 0 gradients, 0 times and 0 sizes: plan these gradients"),
        ([[0], [0]], [1.0, 2.0], [4, 4], "a plan of 2 gradients, 2 times and 2 sizes"),
        ([[0]], [1.0, 2.0], [4, 4], "a plan of 1 gradients, 2 times"),
        ([[0], [1]], [1.0, 2.0], [4], "a plan of 2 gradients, 2 times and 1 sizes"),
    ],
)
def test_every_gradient_needs_a_bucket_a_time_and_a_size(plan, ready, sizes, complaint):
    with pytest.raises(ValueError, match=f"each gradient once, with a time and a size, got {complaint}"):
        timeline(plan, ready, sizes, SLOW, 2)


def every_plan(count):
    """All ways to cut `count` gradients, in order, into buckets."""
    for cuts in range(2 ** (count - 1)):
        plan = [[0]]
        for number in range(1, count):
            if cuts >> (number - 1) & 1:
                plan.append([])
            plan[-1].append(number)
        yield plan


def test_the_best_cap_has_the_least_exposed():
    """Twelve equal gradients, 1 s apart, a message 2 s and each of them 0.5 s: small buckets queue, large ones wait."""
    model, ready, sizes = Model(1.0, 2.0), [float(number) for number in range(12)], [1] * 12
    plans = {cap: plan_buckets([(1, torch.float32)] * 12, cap) for cap in range(1, 13)}
    exposed = {cap: timeline(plan, ready, sizes, model, 2).exposed_s for cap, plan in plans.items()}
    assert exposed[1] == 12 * 2.5 - 11
    assert exposed[12] == 2 + 6
    assert best_cap(plans, ready, sizes, model, 2) == 4
    assert exposed[4] == min(exposed.values()) == 4
    least = min(timeline(plan, ready, sizes, model, 2).exposed_s for plan in every_plan(12))
    assert least == 4  # and no way to cut, equal buckets or not, does better


def test_without_latency_small_buckets_are_best_and_with_nothing_but_latency_large_ones():
    sizes, ready = [4, 8, 4, 16], [1e-9, 2e-9, 3e-9, 4e-9]
    plans = {cap: plan_buckets([(nbytes, torch.float32) for nbytes in sizes], cap) for cap in caps(sizes)}
    assert plans[best_cap(plans, ready, sizes, Model(0.0, 1e9), 2)] == [[0], [1], [2], [3]]
    assert plans[best_cap(plans, ready, sizes, Model(1.0, math.inf), 2)] == [[0, 1, 2, 3]]


def test_of_equally_good_caps_the_largest_is_chosen():
    """Backward is so long that only the last gradient's message shows, whatever shares a bucket before it."""
    sizes, ready = [1, 1, 1, 1], [0.0, 0.0, 0.0, 1000.0]
    plans = {1.0: [[0], [1], [2], [3]], 2.0: [[0, 1], [2], [3]], 3.0: [[0, 1, 2], [3]], 4.0: [[0, 1, 2, 3]]}
    assert best_cap(plans, ready, sizes, SLOW, 2) == 3.0
    with pytest.raises(ValueError, match="plans to choose from, got none"):
        best_cap({}, ready, sizes, SLOW, 2)


def test_caps_go_from_the_smallest_gradient_to_all():
    found = caps([100, 4, 1000])
    assert (found[0], found[-1]) == (4, 1104)
    steps = [after / before for before, after in itertools.pairwise(found)]
    assert steps[:-1] == pytest.approx([1.2] * (len(found) - 2))
    assert 1 < steps[-1] <= 1.2
    assert caps([8]) == [8]


def test_the_seeds_profile_is_bandwidth_bound():
    """T = αP + βn (FACTS.md): 1700 messages or 20, the same bytes."""
    seconds = {1700: 4.667, 980: 4.336, 150: 4.278, 20: 4.297}
    each_ms = {1700: 2.745, 980: 4.425, 150: 28.522, 20: 214.857}
    for calls, milliseconds in each_ms.items():
        assert calls * milliseconds / 1000 == pytest.approx(seconds[calls], abs=0.001)
    whole = 10**9  # whatever it was: the time for all bytes comes out, not their number
    found = fit([Measurement("ring_all_reduce", 2, whole / calls, total / calls) for calls, total in seconds.items()])
    a_message, all_bytes = 2 * found.model.latency_s, whole / found.model.bytes_per_s
    assert a_message == pytest.approx(204e-6, rel=0.01)
    assert all_bytes == pytest.approx(4.247, rel=0.001)
    assert max(map(abs, found.residuals)) < 0.03
    assert 1700 * a_message < 0.09 * all_bytes  # the most messages cost less than a tenth of the bytes


def test_the_model_makes_the_seeds_steps():
    """FACTS.md: the naive step, its communication and the profile's time of a message give that of the flat step.

    About 200 equal gradients, ready at even intervals in backward, which is two thirds of the computing; 2 ranks.
    """
    compute, communication, a_message, count = 1406.7 - 498.1, 498.1, 0.204, 200
    backward = compute * 2 / 3
    model = Model(a_message / 2, count / (communication - count * a_message))
    ready = [backward * (number + 1) / count for number in range(count)]

    def step(bucket, ready):
        plan = [list(range(first, min(first + bucket, count))) for first in range(0, count, bucket)]
        return compute + timeline(plan, ready, [1] * count, model, 2).exposed_s

    naive, flat, overlap, large = (
        step(1, [backward] * count),
        step(count, [backward] * count),
        step(1, ready),
        step(100, ready),
    )
    assert naive == pytest.approx(1406.7)
    assert flat == pytest.approx(1365.2, rel=0.01)
    assert naive > flat > large > overlap > compute


# Batches


def test_the_batch_equation_both_ways():
    assert global_batch(8, 4, 2) == 64
    assert accumulation_for(64, 8, 2) == 4
    for accumulation in (1, 3, 7):
        assert accumulation_for(global_batch(5, accumulation, 3), 5, 3) == accumulation


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: global_batch(0, 1, 1), "micro_batch to be 1 or more, got 0: give a whole number"),
        (lambda: global_batch(1, 1.5, 1), "accumulation to be 1 or more, got 1.5"),
        (lambda: global_batch(1, 1, True), "data_parallel to be 1 or more, got True"),
        (lambda: accumulation_for(0, 1, 1), "batch to be 1 or more, got 0"),
        (lambda: accumulation_for(50, 8, 2), r"8 × 2 = 16 sequences at a time, got 50: change it by -2 or \+14, or"),
        (lambda: accumulation_for(8, 8, 2), r"= 16 sequences at a time, got 8: change it by -8 or \+8"),
    ],
)
def test_batches_that_cannot_be(call, complaint):
    with pytest.raises(ValueError, match=complaint):
        call()
