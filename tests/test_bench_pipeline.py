"""`python -m ddpkit.bench pipeline`: what it runs, counts and says. No test times."""

import json

import torch
import torch.distributed as dist
from on_ranks import on_ranks

from ddpkit.bench import pipeline, results
from ddpkit.bench.pipeline import PLAN, RUN, TORCH, TORCH_GPIPE
from ddpkit.bench.results import AGAIN, Results
from ddpkit.dry_run import idle


@on_ranks(2)
def test_all_variants_take_the_same_gradients(check):
    turns = pipeline.contest(2, 1, dist.group.WORLD)
    ours = ["1F1B", "GPipe", "zero bubble"]
    check.same(list(turns.calls), [TORCH, TORCH_GPIPE, *ours, TORCH + AGAIN])
    for step in turns.calls.values():
        step()
    turns.found()
    replica = turns.calls["GPipe"].__self__
    replica.weights[0].grad += 1
    says = f"GPipe has other gradients on rank {dist.get_rank()}"
    check.refused(turns.found, error=RuntimeError, says=says)
    turns.calls["GPipe"]()  # which begins without gradients
    turns.found()


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
    assert list(cases) == [f"Idle, {name}, 2 ranks, 2 micro-batches" for name in pipeline.SLEEPING]
    for name, case in zip(pipeline.SLEEPING, cases.values(), strict=True):
        planned = 1e-4 * idle(pipeline.SLEEPING[name](2, 2))[0]
        assert case[PLAN].seconds == (planned,)
        assert case[RUN].median_s > 0.9 * planned


def test_goals(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    steps = {TORCH: (2.0, 2.1), TORCH_GPIPE: (2.0, 2.0), "1F1B": (1.9, 2.0), "GPipe": (2.2, 2.2)}
    found = results.results_of("GPT", "Step ms", steps)
    found += results.results_of("Idle, 1F1B", "Idle ms", {PLAN: (9.0, 9.0), RUN: (9.4, 9.3)})
    found += results.results_of("Idle, GPipe", "Idle ms", {PLAN: (9.0, 9.0), RUN: (9.9, 9.8)})
    monkeypatch.setattr(pipeline, "measure", lambda: Results(found))
    pipeline.main("pipeline")
    kept = json.loads((tmp_path / "pipeline.json").read_text())
    assert [goal["met"] for goal in kept["goals"]] == ["yes", "NO", "yes", "NO"]
    assert kept["results"][0]["columns"] == {"Step ms": "2050.00"}
