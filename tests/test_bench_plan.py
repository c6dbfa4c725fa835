"""`python -m ddpkit.bench plan`: what it runs, counts and says. No test times."""

import json
import time
from functools import partial

import pytest
import torch
from plan_cases import SHAPE, said

from ddpkit import launch
from ddpkit.bench import plan as bench
from ddpkit.tools.plan import Plan, programs, stages
from ddpkit.tools.plan.program import Call, Send

PLANS = [
    Plan(2, 2, micro_batches=2, checkpoint=True, bucket_cap_mb=0.004),
    Plan(2, 2, sharding="fsdp", micro_batches=2),
    Plan(2, 1, 2, "zero1", 4, checkpoint=True),
    Plan(1, 2, 2, micro_batches=4),
]


def step(plan):
    """A step of sleeping layers: when it was, and for how long this rank slept for products."""
    slept = []
    bench.time = type("Clock", (), {"sleep": slept.append})
    make_part = partial(bench.SleepingPart, SHAPE.width, 1.0, plan.checkpoint)
    infinite = float("inf")
    training = bench.Training(SHAPE, plan, make_part, bench.SleepingUpdate, updates_per_s=infinite)
    inputs = torch.zeros(SHAPE.batch // plan.data, SHAPE.length, dtype=torch.int64)
    training.step(inputs, inputs)
    slept.clear()
    begun = time.perf_counter()
    training.step(inputs, inputs)
    return begun, time.perf_counter(), sum(slept)


def steps():
    return [step(plan) for plan in PLANS]


def in_all(words):
    """{op: (how often, bytes)}: buckets differ, since gradients of half a block come at once."""
    found = {}
    for op, nbytes in words:
        often, total = found.get(op, (0, 0))
        found[op] = often + 1, total + nbytes
    return found


@pytest.fixture(scope="module")
def run():
    return launch(steps, world_size=4, backend="gloo")


@pytest.mark.parametrize("number", range(len(PLANS)))
def test_sleeping_layers_say_what_is_planned_and_sleep_as_long(run, number):
    plan = PLANS[number]
    for stage, program in zip(stages(SHAPE, plan), programs(SHAPE, plan), strict=True):
        rank = stage.number * plan.data * plan.tensor
        begun, ended, slept = run[rank][number]
        planned = [(word.op, word.nbytes) for word in program if isinstance(word, Call)]
        planned += [("send", word.nbytes) for word in program if isinstance(word, Send)]
        assert in_all(said(run.wire[rank], begun, ended)) == in_all(planned)
        again = sum(work.flops for work in stage.works if work.unit and plan.checkpoint)
        expected = plan.micro_batches * (3 * stage.flops + again)  # at one FLOP a second
        assert slept == pytest.approx(expected, rel=1e-3)


def test_enough_plans_are_measured():
    chosen = bench.chosen()
    assert len(chosen) >= 40
    assert {plan.sharding for plan in chosen} == {"ddp", "zero1", "fsdp"}
    assert any(plan.pipeline > 1 and plan.tensor > 1 and plan.data > 1 for plan in chosen)


def test_summary():
    pairs = [(1.0, 1.1), (2.0, 2.0), (3.0, 2.5), (4.0, 5.0)]
    assert bench.rank_correlation(pairs) == pytest.approx(1.0)
    assert bench.rank_correlation([(1.0, 2.0), (2.0, 1.0)]) == pytest.approx(-1.0)
    text = bench.summary(pairs)
    assert text.startswith("4 plans: rank correlation 1.000 (goal ≥ 0.9)\n")
    assert "median error 14.5%, largest 20%" in text


def test_a_real_measurement_is_not_shorter_than_its_sleeps():
    cluster = bench.machine(2)
    fast = Plan(2, micro_batches=1)
    small = bench.Shape(layers=1, width=16, heads=2, vocabulary=16, length=8, batch=2)
    assert bench.measure(small, cluster, fast, rounds=1) >= 0.9 * bench.step_s(small, cluster, fast)


def test_main_prints_and_keeps(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "chosen", lambda: [Plan(4), Plan(1, 4)])
    monkeypatch.setattr(bench, "measure", lambda shape, cluster, plan: 2.0 * plan.data)
    bench.main("plan")
    out = capsys.readouterr().out
    assert "4×1×1 DDP, m=1" in out
    assert "2 plans: rank correlation" in out
    kept = json.loads((tmp_path / "bench-results/plan.json").read_text())
    assert [line["seconds"][1] for line in kept["plans"]] == [8.0, 2.0]
