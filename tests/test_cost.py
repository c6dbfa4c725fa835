"""ddpkit.cost: volumes beside what real runs send, fits beside models that are known."""

import inspect
import math

import pytest
import torch
import torch.distributed as dist
import twin

from ddpkit import collectives, cost, ddp, doubling, launch, ring
from ddpkit.tools.hops import hops_of, sent_bytes

# Counting. Each algorithm runs between two of torch's barriers, which mark its place.

ELEMENTS = 60  # float32, divides by 1, 2, 3, 4, 5, 6
WHOLE = 4 * ELEMENTS


MODULES = collectives, ring, doubling


def algorithms(world_size):
    """Those for so many ranks."""
    return cost.ALGORITHMS[:-1] if world_size == 3 else cost.ALGORITHMS


def every_algorithm():
    """Call every algorithm, roots being the last rank; their names, in order."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    root = world_size - 1
    whole, part = torch.ones(ELEMENTS), torch.ones(ELEMENTS // world_size)
    parts, others = (list(torch.ones(ELEMENTS).chunk(world_size)) for _ in range(2))
    at_root = parts if rank == root else None
    arguments = {
        "broadcast": (whole, root),
        "tree_broadcast": (whole, root),
        "reduce": (whole, root),
        "tree_reduce": (whole, root),
        "scatter": (part, at_root, root),
        "gather": (part, at_root, root),
        "all_gather": (parts, part),
        "reduce_scatter": (part, parts),
        "all_to_all": (parts, others),
        "barrier": (),
    }
    for name in algorithms(world_size):
        function = next(vars(module)[name] for module in MODULES if name in vars(module))
        function(*arguments.get(name, (whole,)))
        dist.barrier()


def measured(run):
    """The `Volume` that a run shows."""
    ranks, hops, in_turn = range(len(run.wire)), hops_of(run), 0
    for hop in hops:
        out = [sum(nbytes for src, _, nbytes in hop if src == rank) for rank in ranks]
        into = [sum(nbytes for _, dst, nbytes in hop if dst == rank) for rank in ranks]
        in_turn += max(out + into)
    return cost.Volume(len(hops), in_turn)


TOTAL = {  # that 4 ranks send together, in units of the whole; FACTS.md has most
    **dict.fromkeys(("broadcast", "tree_broadcast", "reduce", "tree_reduce"), 3),
    **dict.fromkeys(("scatter", "gather"), 3 / 4),
    **dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all"), 3),
    **dict.fromkeys(("ring_reduce_scatter", "ring_all_gather"), 3),
    # The ring moves no less, it shares it.
    **dict.fromkeys(("all_reduce", "ring_all_reduce", "halving_doubling_all_reduce"), 6),
    "whole_ring_all_reduce": 12,
    "doubling_all_reduce": 8,
    "barrier": 8 / WHOLE,
}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_volumes_are_those_of_real_runs(world_size):
    run = launch(every_algorithm, world_size=world_size, backend="gloo")
    parts = dict(zip(algorithms(world_size), twin.between_barriers(run), strict=True))
    seen = {name: measured(part) for name, part in parts.items()}
    for name in algorithms(world_size):
        assert seen[name] == pytest.approx(cost.volume(name, WHOLE, world_size), rel=1e-12), name
    for name, part in parts.items():
        ops = {record.op for records in part.wire for record in records}
        assert ops <= {"send", "recv"}, name
    if world_size == 4:
        sent = {name: sum(sent_bytes(part)) / WHOLE for name, part in parts.items()}
        assert sent == TOTAL


def test_every_algorithm_of_the_project_has_a_volume():
    public = set()
    for module in MODULES:
        functions = inspect.getmembers(module, inspect.isfunction)
        public |= {name for name, function in functions if function.__module__ == module.__name__}
    ends = ("broadcast", "reduce", "scatter", "gather", "all_to_all", "barrier")
    assert {name for name in public if name.endswith(ends)} == set(cost.ALGORITHMS)


def test_what_has_no_volume():
    for arguments, complaint in [
        (("ring", 10, 2), "no 'ring' at all, only broadcast, .*halving_doubling_all_reduce"),
        (("halving_doubling_all_reduce", 10, 3), "for 3 ranks, only .* doubling_all_reduce$"),
        (("ring_all_reduce", -1, 2), "nbytes >= 0, got -1: give the bytes"),
        (("ring_all_reduce", math.nan, 2), "nbytes >= 0, got nan"),
        (("ring_all_reduce", 10, 0), "world_size to be 1 or more, got 0"),
    ]:
        with pytest.raises(ValueError, match=complaint):
            cost.volume(*arguments)


# Predicting

TEN_GIGABIT = cost.CostModel(latency_s=31e-6, bytes_per_s=1.25e9)


def test_a_models_seconds():
    """T(n) = αP + βn: naive all-reduce on 4 ranks: 6 messages of n bytes, one after the other."""
    assert cost.CostModel(1e-3, 1e6).seconds("all_reduce", 1000, 4) == pytest.approx(6e-3 + 6e-3)
    assert cost.CostModel(1e-3, 1e6).seconds("gather", 1000, 4) == pytest.approx(3e-3 + 0.75e-3)
    assert cost.CostModel(1e-3, math.inf).seconds("ring_all_reduce", 10**9, 4) == 6e-3
    assert cost.CostModel(1e-3, 1.0).seconds("ring_all_reduce", 10**9, 1) == 0
    assert str(TEN_GIGABIT) == "31 µs a hop, 1.25 GB/s"


@pytest.mark.parametrize(
    ("first", "second", "nbytes"),
    [
        ("doubling_all_reduce", "ring_all_reduce", 8 * 31e-6 * 1.25e9),  # 2α + 2nβ, 6α + 1.5nβ
        ("doubling_all_reduce", "halving_doubling_all_reduce", 4 * 31e-6 * 1.25e9),  # 4α + 1.5nβ
        ("ring_all_reduce", "doubling_all_reduce", None),  # faster for few bytes only
        ("all_reduce", "ring_all_reduce", 0.0),  # as many hops, fewer bytes
        ("tree_broadcast", "broadcast", None),
        ("ring_all_gather", "all_gather", 0.0),  # fewer hops, as many bytes
        ("all_gather", "ring_all_gather", None),
        ("broadcast", "reduce", None),  # the same
        ("all_gather", "barrier", 31e-6 * 1.25e9 / 0.75 + 2 / 0.75),  # whose bytes don't grow
    ],
)
def test_where_the_second_overtakes(first, second, nbytes):
    assert cost.crossover(first, second, 4, TEN_GIGABIT) == (nbytes and pytest.approx(nbytes))


# Learning from measurements

SIZES = (4096, 10**5, 10**6, 10**7, 10**8)


def timed(model, algorithm="ring_all_reduce", world_size=4, sizes=SIZES):
    """What a machine that is exactly like `model` would measure."""
    found = []
    for nbytes in sizes:
        seconds = model.seconds(algorithm, nbytes, world_size)
        found.append(cost.Measurement(algorithm, world_size, nbytes, seconds))
    return found


def distance(model, other):
    """The larger relative difference of a parameter."""
    latency = abs(model.latency_s / other.latency_s - 1)
    return max(latency, abs(model.bytes_per_s / other.bytes_per_s - 1))


def test_a_fit_finds_the_model_again():
    for algorithm in set(cost.ALGORITHMS) - {"barrier"}:
        found = cost.fit(timed(TEN_GIGABIT, algorithm))
        assert distance(found, TEN_GIGABIT) < 1e-9, algorithm
        assert found.error(timed(TEN_GIGABIT, "all_reduce", 2, [12345, 6789])) < 1e-9


def test_one_size_in_two_worlds_is_enough():
    one, other = (timed(TEN_GIGABIT, "ring_all_reduce", ranks, [10**5]) for ranks in (2, 4))
    assert distance(cost.fit(one + other), TEN_GIGABIT) < 1e-9


def test_no_parameter_is_negative():
    """Times that grow faster than bytes would make the latency negative, falling ones the bytes."""
    growing = [
        cost.Measurement("ring_all_reduce", 4, nbytes, seconds)
        for nbytes, seconds in ((1e6, 1e-3), (1e7, 0.02), (1e8, 0.3))
    ]
    found = cost.fit(growing)
    per_byte = [each.seconds / (1.5 * each.nbytes) for each in growing]
    best = sum(1 / p for p in per_byte) / sum(1 / p**2 for p in per_byte)  # of the bytes alone
    assert found.latency_s == 0.0
    assert found.bytes_per_s == pytest.approx(1 / best)
    found = cost.fit(each._replace(seconds=4e-3 - each.seconds / 100) for each in growing)
    assert found.bytes_per_s == math.inf
    assert 1e-3 / 6 < found.latency_s < 4e-3 / 6


def test_the_error_is_the_median_of_what_it_has_not_seen():
    by = (1, 2, 0.5, 1.25, 10)  # the model is wrong by 0, 0.5, 1, 0.2, 0.9
    exact = timed(TEN_GIGABIT)
    held_out = [each._replace(seconds=each.seconds * b) for each, b in zip(exact, by, strict=True)]
    assert TEN_GIGABIT.error(held_out) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="got none: measure a new size"):
        TEN_GIGABIT.error([])


def test_measurements_that_tell_too_little():
    for measurements, complaint in [
        ([], "latency and bytes apart, got 0 of 0 sizes: measure at least 2 sizes"),
        (timed(TEN_GIGABIT, sizes=[10**6]) * 3, "got 3 of 1 size: measure at least 2 sizes"),
        (timed(TEN_GIGABIT, world_size=1), "seconds > 0, got 0.0. Measure it again: "),
        ([cost.Measurement("cast", 2, 10, 1.0)], "no 'cast' at all"),
    ]:
        with pytest.raises(ValueError, match=complaint):
            cost.fit(measurements)


# Bandwidth


def test_bus_bandwidth_is_nccl_testss():
    for operation, trips in (("all_reduce", 2), ("reduce_scatter", 1), ("all_gather", 1)):
        for world_size in (2, 3, 8):
            expected = 1e9 * trips * (world_size - 1) / world_size
            busbw = cost.bus_bandwidth(operation, 10**6, 1e-3, world_size)
            assert busbw == pytest.approx(expected)
    with pytest.raises(ValueError, match=r"expected seconds > 0"):
        cost.bus_bandwidth("all_reduce", 10, 0, 2)
    with pytest.raises(ValueError, match="no 'ring_gather' at all"):
        cost.bus_bandwidth("gather", 10, 1.0, 2)


# Buckets of gradients. On this wire 2 ranks take 2 s for a message, and 1 s for each byte.

SLOW = cost.CostModel(latency_s=1.0, bytes_per_s=1.0)
READY = (1.0, 5.0, 6.0, 20.0)
BYTES = (3, 3, 4, 2)


def test_a_bucket_starts_when_its_gradients_are_ready_and_the_wire_is_free():
    found = cost.timeline([[0, 1], [2], [3]], READY, BYTES, SLOW, 2)
    # The second was ready at 6 and waits for the first; the wire waits for the last.
    assert found.started == (5.0, 13.0, 20.0)
    assert found.done == (13.0, 19.0, 24.0)
    assert (found.backward_s, found.exposed_s) == (20.0, 4.0)
    assert cost.timeline([[0]], [0.5], [1], SLOW, 2).started == (0.5,)


def test_every_gradient_needs_a_bucket_a_time_and_a_size():
    for plan, ready, sizes, complaint in [
        ([], [], [], "a plan of 0 gradients, 0 times and 0 sizes"),
        ([[0], [0]], [1.0, 2.0], [4, 4], "a plan of 2 gradients, 2 times and 2 sizes"),
        ([[0], [1]], [1.0, 2.0], [4], "a plan of 2 gradients, 2 times and 1 sizes"),
    ]:
        with pytest.raises(ValueError, match=f"each gradient once, .* got {complaint}"):
            cost.timeline(plan, ready, sizes, SLOW, 2)


@pytest.mark.parametrize("backward_s", [0.02, 0.1, 0.2, 0.3, 0.41, 0.44, 0.5, 0.6])
@pytest.mark.parametrize("world_size", [2, 4])
def test_best_cap_is_the_best_of_a_sweep(backward_s, world_size):
    """For 1,700 gradients of 1 MB: no cap leaves 2 % less exposed, in units of a step."""
    model, gradients = cost.CostModel(100e-6, 4e9), 1700
    sizes = [10**6] * gradients
    ready_s = [backward_s * (number + 1) / gradients for number in range(gradients)]

    def step_s(cap: float) -> float:
        plan = ddp.plan_buckets([(nbytes, torch.float32) for nbytes in sizes], cap)
        return cost.timeline(plan, ready_s, sizes, model, world_size).done[-1]

    best = cost.best_cap(sum(sizes), backward_s, model, world_size)
    assert step_s(best) <= 1.02 * min(step_s(1.3**power * 1e6) for power in range(22))


def test_best_cap_by_hand():
    """α is 2 · 1 ms; 1 s on the wire. T = 0.5 s: S·√(0.002/0.5); T = 2 s: 0.002 · S/(2 − 1)."""
    model = cost.CostModel(1e-3, 1e9)
    assert cost.best_cap(1e9, 0.5, model, 2) == pytest.approx(1e9 * 0.004**0.5)
    assert cost.best_cap(1e9, 2.0, model, 2) == pytest.approx(2e6)
    assert cost.best_cap(1e9, 1.0, model, 1) == 0.0  # nothing is sent
    with pytest.raises(ValueError, match="expected seconds > 0, got 0"):
        cost.best_cap(1e9, 0.0, model, 2)


def test_when_it_is_worth_it():
    """The course's figures: C = 400 TFLOP/s, NVLink 4 and 400 Gbit."""

    def ratio(kind, bytes_per_s, **sizes):
        sizes = {"tokens": 1, "width": 8192, "world_size": 10**9} | sizes
        return cost.sending_over_computing(400e12, bytes_per_s, **sizes)[kind]

    for kind in ("data parallel", "ZeRO-1", "FSDP"):
        assert ratio(kind, 370e9) == pytest.approx(1081, abs=0.5)  # tokens that hide it
        assert ratio(kind, 50e9, tokens=8000) == pytest.approx(1)
    assert 1 / ratio("tensor", 370e9, world_size=2) == pytest.approx(34, abs=0.2)  # other ranks
    assert 1 / ratio("tensor", 50e9, world_size=2) == pytest.approx(4.6, abs=0.1)
    assert ratio("pipeline", 50e9, width=4096, layers=4) == pytest.approx(0.04, abs=0.001)
    assert ratio("ring", 370e9) == pytest.approx(2 * 1081, abs=1)  # causal
    assert ratio("ring", 50e9, heads_per_kv=8, tokens=2000) == pytest.approx(1)
    assert ratio("experts", 370e9) == pytest.approx(0.35, abs=0.005)
    assert ratio("experts", 50e9, expert_width=2048) == pytest.approx(2.6, abs=0.005)


def test_a_ring_and_experts_from_their_bytes():
    """By counting: a hop of causal attention, and rows that one of 4 ranks sends to experts."""
    n, heads, kv_heads, D, C, b = 1000, 8, 2, 64, 1e12, 1e9
    sent_s = 2 * n * kv_heads * D * 2 / b
    scores = n * n / 2
    computed_s = heads * scores * (2 * D + 2 * D) / C  # q·k, p·v
    sizes = {"width": heads * D, "world_size": 4, "heads_per_kv": heads // kv_heads}
    found = cost.sending_over_computing(C, b, n, **sizes, expert_width=100)
    assert found["ring"] == pytest.approx(sent_s / computed_s)
    rows, width = 2 * n, heads * D
    sent_s = 2 * rows * 3 / 4 * width * 2 / b  # there, and back; a quarter stays
    computed_s = rows * 3 * 2 * width * 100 / C
    assert found["experts"] == pytest.approx(sent_s / computed_s)
    alone = cost.sending_over_computing(C, b, n, width, 1)
    assert {kind for kind, ratio in alone.items() if ratio > 0} == {"pipeline"}


def test_a_step_of_fsdp():
    assert cost.fsdp_step_s(1, 0, 3) == 9
    assert cost.fsdp_step_s(0, 1, 3) == 9  # two gathers and a reduction of each unit, in turn
    assert cost.fsdp_step_s(2, 1, 4) == 4 * 6 + 3  # what is left is at the ends
    assert cost.fsdp_step_s(2, 1, 1) == 6 + 3
