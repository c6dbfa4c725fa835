"""ddpkit.tools.plan beside real trainings: shapes, bytes, messages; its order and its sentences."""

import subprocess
import sys
from dataclasses import replace
from functools import cache

import pytest
import torch
from plan_cases import SHAPE, alone, said, train_all

from ddpkit import launch
from ddpkit.cost import CostModel
from ddpkit.tools import plan as planning
from ddpkit.tools.plan import (
    Machine,
    Plan,
    Search,
    Shape,
    explain,
    fit,
    plans,
    programs,
    rooms,
    spent,
    stages,
    step_s,
    table,
    why,
)
from ddpkit.tools.plan import __main__ as command
from ddpkit.tools.plan.fit import make_block
from ddpkit.tools.plan.program import Call, Send
from ddpkit.tools.plan.room import activation_bytes

CAP = 0.004  # MiB: several buckets

# Beside real trainings: {ranks: plans}, all of a number of ranks in one launch.
TRIED = {
    2: [
        Plan(2, bucket_cap_mb=CAP),
        Plan(2, micro_batches=2, checkpoint=True, bucket_cap_mb=CAP),
        Plan(2, sharding="zero1", bucket_cap_mb=CAP),
        Plan(2, sharding="zero1", micro_batches=4, bucket_cap_mb=CAP),
        Plan(2, sharding="fsdp"),
        Plan(2, sharding="fsdp", micro_batches=2, checkpoint=True),
        Plan(tensor=2),
        Plan(tensor=2, checkpoint=True, micro_batches=2),
        Plan(pipeline=2, micro_batches=4),
    ],
    4: [
        Plan(4, sharding="zero1", bucket_cap_mb=CAP),
        Plan(4, sharding="fsdp"),
        Plan(2, 2, sharding="ddp", micro_batches=2, bucket_cap_mb=CAP),
        Plan(2, 2, sharding="zero1", bucket_cap_mb=CAP),
        Plan(2, 2, sharding="fsdp", micro_batches=2),
        Plan(2, 1, 2, "ddp", 2, bucket_cap_mb=CAP),
        Plan(2, 1, 2, "zero1", 4, checkpoint=True, bucket_cap_mb=CAP),
        Plan(1, 2, 2, "ddp", 4, checkpoint=True),
        Plan(1, 4),
        Plan(pipeline=4, micro_batches=8),
    ],
}
EVERY = [*TRIED[2], *(pytest.param(plan, marks=pytest.mark.wide) for plan in TRIED[4])]


@cache
def trained(ranks):
    return launch(train_all, SHAPE, TRIED[ranks], world_size=ranks, backend="gloo")


def of_each_stage(plan):
    """[(stage, what its first rank found, that rank's records)]."""
    run = trained(plan.ranks)
    found = []
    for stage in stages(SHAPE, plan):
        rank = stage.number * plan.data * plan.tensor
        number = TRIED[plan.ranks].index(plan)
        found.append((stage, run[rank][number], run.wire[rank]))
    return found


@pytest.mark.parametrize("plan", EVERY, ids=str)
def test_what_is_counted_is_a_right_training(plan):
    _, found, _ = of_each_stage(plan)[0]
    torch.testing.assert_close(found["losses"], alone(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("plan", EVERY, ids=str)
def test_stages_have_the_real_parameters_in_their_order(plan):
    for stage, found, _ in of_each_stage(plan):
        rows = plan.data if plan.sharding == "fsdp" else 1  # of a shard, on the first rank
        shapes = [(w.name, (-(-w.shape[0] // rows), *w.shape[1:])) for w in stage.weights]
        assert shapes == list(found["shapes"].items())


@pytest.mark.parametrize("plan", EVERY, ids=str)
def test_states_are_what_the_real_objects_hold(plan):
    for stage, found, _ in of_each_stage(plan):
        room = rooms(SHAPE, plan)[stage.number]
        predicted = room._asdict()
        assert {kind: predicted[kind] for kind in found["states"]} == found["states"]


@pytest.mark.parametrize("plan", EVERY, ids=str)
def test_activations_are_what_autograd_keeps(plan):
    for stage, found, _ in of_each_stage(plan):
        if found["saved"] is not None:
            # The cross-entropy of torch keeps the number of its targets.
            assert 0 <= found["saved"] - activation_bytes(SHAPE, plan, stage) <= 4


@pytest.mark.parametrize("plan", EVERY, ids=str)
def test_the_peak_is_near_what_is_counted(plan):
    for stage, found, _ in of_each_stage(plan):
        predicted = rooms(SHAPE, plan)[stage.number].total
        assert 0.7 * predicted <= found["most"] <= 1.15 * predicted


@pytest.mark.parametrize("plan", EVERY, ids=str)
def test_programs_are_what_ranks_say(plan):
    """Calls and messages of a step with their bytes, in order."""
    for stage, found, records in of_each_stage(plan):
        predicted = []
        for word in programs(SHAPE, plan)[stage.number]:
            if isinstance(word, Call):
                predicted.append((word.op, word.nbytes))
            elif isinstance(word, Send):
                predicted.append(("send", word.nbytes))
        assert predicted == said(records, *found["last"])


# Times, by hand

FAST = CostModel(0.0, float("inf"))
SLOW = CostModel(1e-3, 1e6)
SMALL = Shape(layers=8, width=64, heads=8, vocabulary=64, length=32, batch=32)


def forward_s(shape, rows, flops_per_s=1e9):
    """One rank's forward of so many sequences, from the model's weights."""
    n = rows * shape.length
    per_token = 24 * shape.layers * shape.width**2 + 2 * shape.vocabulary * shape.width
    return (per_token * n + 4 * n * shape.layers * shape.length * shape.width) / flops_per_s


def machine(ranks, wire=FAST, memory_bytes=1e12, **options):
    return Machine(ranks, memory_bytes, 1e9, wire, **options)


def test_computing_alone():
    whole = 3 * forward_s(SMALL, 32)
    assert step_s(SMALL, machine(1), Plan()) == pytest.approx(whole)
    assert step_s(SMALL, machine(4), Plan(4)) == pytest.approx(whole / 4)
    assert step_s(SMALL, machine(4), Plan(1, 4)) == pytest.approx(whole / 4)
    update = machine(2, updates_per_s=1e6)
    replicas = step_s(SMALL, update, Plan(2)) - whole / 2
    assert replicas == pytest.approx(SMALL.parameters / 1e6)
    assert step_s(SMALL, update, Plan(2, sharding="zero1")) == pytest.approx(
        whole / 2 + replicas / 2
    )


def test_a_bucket_for_all_hides_nothing():
    """One all-reduce after backward, then those of loss and norm."""
    nbytes = 4 * SMALL.parameters
    sends = [nbytes, 8, 8]
    wire_s = sum(SLOW.seconds("ring_all_reduce", sent, 2) for sent in sends)
    expected = 3 * forward_s(SMALL, 16) + wire_s
    assert step_s(SMALL, machine(2, SLOW), Plan(2)) == pytest.approx(expected)
    # In small buckets nearly all of it hides behind backward.
    wire = CostModel(1e-6, 1e7)
    exposed = step_s(SMALL, machine(2, wire), Plan(2, bucket_cap_mb=0.05)) - 3 * forward_s(
        SMALL, 16
    )
    assert exposed < 0.2 * wire.seconds("ring_all_reduce", nbytes, 2)


def test_a_pipeline_is_idle_as_long_as_its_schedule():
    """With stages that cost alike: one block each, a head of next to nothing."""
    shape = replace(SMALL, vocabulary=1, layers=4)
    for m in (4, 8, 32):
        parts = spent(shape, machine(4), Plan(pipeline=4, micro_batches=m))
        share = sum(part.waits["pipeline"] for part in parts) / 4 / parts[0].seconds
        assert share == pytest.approx(3 / (m + 3), abs=0.005)


def test_a_step_lasts_until_the_last_stage_is_done():
    """The first stage of two has fewer parameters to update, and waits for the last."""
    shape = replace(SMALL, layers=3)
    parts = spent(shape, machine(2, updates_per_s=1e6), Plan(pipeline=2, micro_batches=2))
    updates = [part.busy["update"] for part in parts]
    assert updates[0] != updates[1]
    assert parts[0].seconds == pytest.approx(parts[1].seconds)


def test_wires_of_axes():
    """Tensor ranks are neighbours, then data: what crosses a node takes the wire between nodes."""
    near, far = CostModel(0, 1e9), CostModel(0, 1e6)
    nodes = machine(8, near, between=far, ranks_per_node=4)
    plan = Plan(data=2, tensor=2, pipeline=2)
    wires = {axis: nodes.wire_of(plan, axis) for axis in ("tensor", "data", "pipeline", "ranks")}
    assert wires == {"tensor": near, "data": near, "pipeline": far, "ranks": far}
    assert nodes.wire_of(Plan(data=4, tensor=2), "data") == far


# The order of plans

LARGE = Shape(32, 4096, 32, 32_000, 2048, 64, "mixed")
NVLINK = CostModel(3e-6, 370e9)
ETHERNET = CostModel(50e-6, 0.117e9)
H100S = Machine(8, 80e9, 400e12, NVLINK)


@cache
def best(shape, on):
    return Search(shape, on).best()[0].plan


@pytest.mark.wide
def test_clear_cut_cases():
    # A wire that keeps up with computing: data alone. A slow one: a pipeline, which sends least.
    assert best(SMALL, machine(4, CostModel(1e-6, 1e9))).data == 4
    assert best(LARGE, replace(H100S, wire=ETHERNET)).pipeline == 8
    # What fits on a rank needs no other axis; what doesn't is cut.
    assert best(LARGE, H100S).data == 8
    tight = best(LARGE, replace(H100S, memory_bytes=16e9))
    assert tight.tensor * tight.pipeline == 8
    # Memory that is short costs checkpoints, never less time.
    assert not best(LARGE, H100S).checkpoint
    assert tight.checkpoint
    # Two nodes with little between them: no tensor axis across.
    nodes = replace(H100S, between=ETHERNET, ranks_per_node=4, memory_bytes=30e9)
    assert best(LARGE, nodes).tensor <= 4


def test_the_search_finds_what_trying_all_finds():
    search = Search(SMALL, machine(4, SLOW, memory_bytes=8e6))
    all_found = sorted(step_s(SMALL, search.machine, plan) for plan in search.fitting)
    assert 0 < len(search.fitting) < len(search.plans)
    assert [found.seconds for found in search.best(5)] == all_found[:5]


def test_plans_are_all_and_none_that_is_refused():
    found = list(plans(SMALL, 4))
    assert len(set(found)) == len(found)
    assert {(p.data, p.tensor, p.pipeline) for p in found} == set(planning.search.meshes(4))
    assert not any(p.sharding == "fsdp" and p.pipeline > 1 for p in found)
    for plan in found:
        stages(SMALL, plan)
    assert {p.tensor for p in plans(SMALL, 4, data=1, pipeline=1)} == {4}


# What is said


def sentences(shape, on):
    return explain(Search(shape, on))


def test_every_choice_has_its_reason():
    text = sentences(LARGE, H100S)
    assert text.startswith("Best: data=8 (FSDP), tensor=1, pipeline=1, 2 micro-batches: ")
    assert "tensor=1 because with tensor=2 a step takes " in text
    assert " waiting for activations between tensor ranks" in text
    assert "pipeline=1 because with pipeline=2 a step takes " in text
    assert " of idle ranks, " in text
    assert "FSDP because with ZeRO-1 a step takes " in text
    assert "2 micro-batches because with 1 micro-batch a rank needs " in text
    assert "No checkpoints because with checkpoints a step takes " in text
    assert " of computing activations again" in text
    assert " of it hidden behind computing." in text


@pytest.mark.wide
def test_the_reason_changes_with_the_number_that_decides():
    roomy = replace(H100S, memory_bytes=640e9)
    assert "2 micro-batches because" in sentences(LARGE, H100S)
    assert "1 micro-batch, though with 4 micro-batches a step takes as long." in sentences(
        LARGE, roomy
    )
    tight = sentences(LARGE, replace(H100S, memory_bytes=16e9))
    assert "Checkpoints because without checkpoints a rank needs " in tight
    assert "The pipeline's ranks are idle " in tight
    slow = sentences(LARGE, replace(H100S, wire=ETHERNET))
    assert "pipeline=8 because with pipeline=" in slow
    # A pause for each message: nothing is gained, so what needs less memory is taken.
    slow_to_begin = sentences(SMALL, machine(2, CostModel(1e-2, 1e9)))
    assert "ZeRO-1 because with DDP a step takes as long and needs 1.61 MB more" in slow_to_begin


@pytest.mark.wide
def test_the_error_is_said():
    assert f"Times were off by {why.EMULATED_ERROR:.0%} on an emulated" in sentences(LARGE, H100S)
    fitted = sentences(LARGE, replace(H100S, error=0.12))
    assert "Times may be off by 12% on this machine" in fitted


def test_what_does_not_fit_is_said_in_bytes():
    small = replace(H100S, memory_bytes=11e9)
    search = Search(LARGE, small)
    leanest = search.leanest()
    missing = int(search.rooms[leanest].total - 11e9)
    text = explain(search)
    assert text.startswith(f"No mesh of 8 ranks fits in 11 GB a rank: the leanest, {leanest}, ")
    assert f"more than there is ({missing:,} bytes)" in text
    assert "Most is model states: more ranks share the states out." in text
    enough = replace(small, memory_bytes=11e9 + missing)
    assert explain(Search(LARGE, enough)).startswith("Best: ")
    assert explain(Search(LARGE, replace(enough, memory_bytes=11e9 + missing - 1))) != ""
    assert not Search(LARGE, replace(enough, memory_bytes=11e9 + missing - 1)).fitting
    long = replace(LARGE, length=2**20, batch=1)
    assert "Most is activations: " in explain(Search(long, small))


def test_what_cannot_be_cut_is_said():
    text = sentences(LARGE, replace(H100S, ranks=37))
    assert text.startswith("No mesh of 37 ranks suits this model: ")
    for part in (
        "32 layers can't make pipeline=37 stages",
        "32 heads can't be shared by tensor=37",
        "a batch of 64 can't be dealt out to data=37",
    ):
        assert part in text
    few = Shape(8, 64, 1, 64, 32, 2)
    assert "2 sequences a rank can't make 8 micro-batches" in sentences(few, machine(8))
    fixed = explain(Search(SMALL, machine(4), tensor=3, sharding="fsdp"))
    assert fixed == (
        "No plan of 4 ranks that suits this model has tensor=3, sharding=fsdp: choose other values."
    )
    assert "32 heads can't be shared by tensor=37" in explain(
        Search(LARGE, replace(H100S, ranks=37), tensor=37)
    )


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Shape(2, 10, 3, 10, 10, 1), "heads that divide the width"),
        (lambda: Shape(0, 8, 2, 10, 10, 1), "layers"),
        (lambda: Shape(2, 8, 2, 10, 10, 1, "fp8"), "'fp32' or 'mixed', got precision 'fp8'"),
        (lambda: Machine(4, -1, 1e9, FAST), "16e9 for 16 GB"),
        (lambda: stages(SMALL, Plan(tensor=3)), "8 heads can't be shared by tensor=3"),
        (lambda: stages(SMALL, Plan(2, 1, 2, "fsdp", 2)), "FSDP would gather"),
        (lambda: stages(SMALL, Plan(micro_batches=5)), "32 sequences a rank can't make 5 micro"),
        (lambda: Search(SMALL, machine(1)).best(0), "expected most to be 1 or more, got 0"),
    ],
)
def test_refusals(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_the_table_has_a_line_for_each():
    found = Search(LARGE, H100S).best(3)
    lines = table(found).splitlines()
    assert len(lines) == 1 + 3 + 3
    assert lines[1].split()[:3] == ["8×1×1", "FSDP", "2"]
    assert max(map(len, lines)) <= 72


# The command, and this machine


def test_the_command(capsys):
    command.main(["--ranks", "8", "--memory", "16GB", "--wire", "NVLink 4"])
    out = capsys.readouterr().out
    assert "mesh sharding" in out
    assert "Best: data=1" in out
    command.main(["--ranks", "8", "--memory", "11GB"])
    assert capsys.readouterr().out.startswith("No mesh of 8 ranks fits in 11 GB a rank")
    for wrong, says in (
        ("--memory much", "expected bytes such as 16GB or 16e9, got 'much'"),
        ("--heads 3", "heads that divide the width"),
        ("--top 0", "expected --top to be 1 or more, got 0"),
    ):
        with pytest.raises(SystemExit) as stopped:
            command.main(wrong.split())
        assert says in str(stopped.value) + capsys.readouterr().err


@pytest.mark.wide
def test_the_command_by_its_name():
    asked = [sys.executable, "-m", "ddpkit.tools.plan", "--help"]
    done = subprocess.run(asked, capture_output=True, text=True, check=True)
    assert "--memory" in done.stdout


def test_a_fit_of_this_machine():
    here = fit(replace(SHAPE, batch=2), ranks=2)
    assert here.ranks == 2
    assert 0 < here.memory_bytes < 1e15
    assert 1e5 < here.flops_per_s < 1e15
    assert here.wire.bytes_per_s > 0
    assert here.updates_per_s > 0
    assert here.error >= 0
    assert "on this machine" in sentences(SMALL, here)


def test_a_fit_where_free_memory_is_unknown_measures_nothing(monkeypatch):
    module = sys.modules[fit.__module__]
    monkeypatch.setattr(module, "memory_bytes", lambda: (0, 0))
    monkeypatch.setattr(module, "launch", None)
    with pytest.raises(ValueError, match="expected free_memory > 0, got 0"):
        fit(SHAPE)


def test_what_is_timed_stays_small(monkeypatch):
    """A block of a larger model is measured narrower, and with fewer tokens."""
    module = sys.modules[fit.__module__]
    monkeypatch.setattr(module, "WIDEST", 128)
    monkeypatch.setattr(module, "LARGEST_FLOPS", 1e7)
    train, flops = make_block(LARGE)
    assert 0.5e7 < flops <= 3e7
    train()
