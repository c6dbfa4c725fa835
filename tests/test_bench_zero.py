"""`python -m ddpkit.bench zero`: what it counts, and what it makes of times (which are no test's business)."""

import json
import re
from functools import partial

import pytest
import torch.distributed as dist

from ddpkit import RankError, bench, launch
from ddpkit.bench import zero
from ddpkit.bench.results import judge

SECONDS = {  # of a step less computing alone
    zero.TORCH: 0.4,
    zero.AS_IT_COMES: 0.5,
    zero.TORCH_DDP: 0.3,
    zero.OUR_DDP: 0.3,
    zero.ZERO: 0.2,
    zero.SHARED: 0.1,
    zero.TORCH + zero.AGAIN: 0.4,
}
small = partial(zero.linears, 2, 512, 2)  # 64 bytes divide all lengths: no padding
WHOLE = 4 * 2 * 512 * 513


def case(model="GPT", **changed):
    times = SECONDS | changed
    return zero.Syncs(
        zero.Sync(model, name, 2, 4000, (s, 2 * s), "", "", 1.5 * s + 1, 8e6, 16_000_000) for name, s in times.items()
    )


def test_a_step_sends_and_keeps_what_it_should():
    """Of a ring and of two broadcasts of half the parameters each; all in bytes of a rank."""
    ranks = list(launch(zero.time_on_rank, small, 1, world_size=2))
    assert zero.count(small, 2) == {
        zero.TORCH: 1.5 * WHOLE,
        zero.AS_IT_COMES: 1.5 * WHOLE,
        zero.TORCH_DDP: WHOLE,
        zero.OUR_DDP: WHOLE,
        zero.ZERO: WHOLE,
        zero.SHARED: 0,
        "compute alone": 0,
        zero.TORCH + zero.AGAIN: 1.5 * WHOLE,
    }
    for seen in ranks:
        assert seen.parameter_bytes == WHOLE
        assert seen.state_bytes[zero.TORCH_DDP] == seen.state_bytes[zero.OUR_DDP] == 2 * WHOLE
        assert seen.state_bytes[zero.ZERO] == seen.state_bytes[zero.SHARED] == 2 * WHOLE / 2
        assert seen.state_bytes["compute alone"] == 0


def test_measure():
    case = zero.measure({"small": small}, rounds=2)
    assert [each.variant for each in case] == list(SECONDS)
    assert {each.nbytes for each in case} == {WHOLE}
    assert all(len(each.seconds) == 2 and max(each.seconds) < each.step_s * 2 for each in case)


@pytest.mark.parametrize("arguments", [{"world_size": 1}, {"rounds": 0}])
def test_what_cannot_be_measured_is_refused_at_once(arguments, monkeypatch):
    monkeypatch.setattr(zero, "launch", None)
    with pytest.raises(ValueError, match="expected 2 ranks or more and 1 round or more, got"):
        zero.measure(**arguments)


def test_computing_alone_is_taken_off_round_by_round():
    turns = {"compute alone": [(0.0, 1.0), (5.0, 7.0)], zero.ZERO: [(1.0, 4.0), (2.0, 5.0)]}
    ranks = [zero.Seen(turns, dict.fromkeys(turns, number), 4000) for number in (5, 6)]
    (found,) = zero.together("GPT", ranks, dict.fromkeys(turns, 3.0))
    assert (found.seconds, found.step_s, found.sent_bytes, found.state_bytes) == ((2.0, 1.0), 3.0, 3.0, 6)


def test_table():
    lines = repr(case()).splitlines()
    assert lines[0] == "GPT, 2 processes, 0.004 MB of parameters, Gloo"
    assert lines[2].split() == [*zero.TORCH.split(), "1600.0", "600.0", "1", "1.00–1.00", "8", "16"]
    assert re.split(" {2,}", lines[6])[1:] == ["1300.0", "300.0", "2.00 [2.00, 2.00]", "1.00–1.00", "faster", "8", "16"]
    assert zero.AGAIN not in repr(case()).replace("against", "")
    assert repr(zero.Syncs()) == "nothing measured"


def test_goals():
    def judged(**changed):
        found = case(**changed)
        return {(goal.variant, goal.against): met for goal, _, met in judge(zero.goals(found), found)}

    assert set(judged().values()) == {"yes"}
    assert judged(**{zero.ZERO: 0.31})[zero.ZERO, zero.TORCH] == "NO"
    assert judged(**{zero.ZERO: 0.31})[zero.ZERO, zero.OUR_DDP] == "NO"
    assert judged(**{zero.ZERO: 0.31})[zero.ZERO, zero.AS_IT_COMES] == "yes"


def test_report_prints_and_keeps(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    zero.report(zero.Syncs(case() + case("12 × Linear(1024)")))
    printed = capsys.readouterr().out
    assert "GPT: ZeroOptimizer " in printed
    assert "12 × Linear(1024): ZeroOptimizer, shared memory" in printed
    kept = json.loads((tmp_path / "zero.json").read_text())
    assert [each["variant"] for each in kept["results"]] == [*SECONDS, *SECONDS]
    assert len(kept["goals"]) == 2 * len(zero.goals(case()))


def forget_to_send():
    task = small()
    replicas = {
        zero.TORCH: zero.make_replicas(task, dist.group.WORLD)[zero.ZERO],
        "forgetful": zero.Replica(task, lambda module: module, partial(zero.torch.optim.AdamW, lr=1e-4)),
    }
    for replica in replicas.values():
        replica.step()
    zero.check_alike(replicas, dist.group.WORLD)


def test_a_variant_that_learns_something_else_gets_no_time():
    with pytest.raises(RankError, match="forgetful learned something else on rank"):
        launch(forget_to_send, world_size=2)
