"""`python -m ddpkit.bench pipeline`: what it runs, counts and says. No test times."""

import torch
import torch.distributed as dist
from on_ranks import on_ranks

from ddpkit.bench import pipeline
from ddpkit.bench.pipeline import PLAN, RUN, TORCH, TORCH_GPIPE
from ddpkit.bench.results import AGAIN, Results, judge, results_of
from ddpkit.pipeline.dry_run import idle


@on_ranks(2)
def test_all_ways_take_the_same_gradients(check):
    ways = pipeline.contest(2, 1, dist.group.WORLD)
    ours = ["1F1B", "GPipe", "zero bubble"]
    check.same(list(ways.calls), [TORCH, TORCH_GPIPE, *ours, TORCH + AGAIN])
    ways.found()
    right = pipeline.by_us

    def twice(name, *others):
        run = right(name, *others)
        return (lambda *batch: (run(*batch), run(*batch))) if name == "GPipe" else run

    pipeline.by_us = twice
    wrong = pipeline.contest(2, 1, dist.group.WORLD)
    check.refused(wrong.found, error=RuntimeError, says="GPipe's gradient is off by 1.0e+00")


def test_idle_time_by_hand():
    """Two ranks from 10 to 15 s, one busy for 2 of them, one for 4."""
    assert pipeline.idle_seconds([(10, 14, 2), (11, 15, 4)]) == 2


def test_sleeping_stages_do_what_is_planned(monkeypatch):
    """Each part sleeps a tick, stage 0's weights two: as long as the plan says for a rank."""
    slept = []
    monkeypatch.setattr(pipeline.time, "sleep", slept.append)
    for number in (0, 1):
        stage = pipeline.PipelineStage(pipeline.Sleeping(number, 1.0), number, torch.zeros(1, 1))
        parts = []
        for part, *gradient in (
            (stage.forward, torch.zeros(1, 1)),
            (stage.backward_input, torch.zeros(1, 1)),
            (stage.backward_weight,),
        ):
            part(0, *gradient)
            parts.append(sum(slept))
            slept.clear()
        assert parts == ([1, 0, 2] if number == 0 else [1, 1, 1])


def test_measured_idle_time_is_a_table():
    found = pipeline.measure_idle(ranks=2, micro_batches=2, rounds=1, tick_s=1e-4)
    cases = Results(found).cases()
    assert list(cases) == [f"Idle, {name}, 2 ranks, 2 micro-batches" for name in pipeline.SCHEDULES]
    for make, case in zip(pipeline.SCHEDULES.values(), cases.values(), strict=True):
        planned = 1e-4 * idle(make(2, 2))[0]
        assert case[PLAN].seconds == (planned,)
        assert case[RUN].median_s > 0.9 * planned


def test_goals():
    steps = {TORCH: (2.0, 2.1), TORCH_GPIPE: (2.0, 2.0), "1F1B": (1.9, 2.0), "GPipe": (2.2, 2.2)}
    found = results_of("GPT", steps)
    found += results_of("Idle, 1F1B", {PLAN: (9.0, 9.0), RUN: (9.4, 9.3)})
    found += results_of("Idle, GPipe", {PLAN: (9.0, 9.0), RUN: (9.9, 9.8)})
    met = [goal["met"] for goal in judge(pipeline.GOALS, Results(found))]
    assert met == ["yes", "NO", "yes", "NO"]
