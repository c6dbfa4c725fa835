"""`python -m ddpkit.bench ddp` and `zero`: what they count and say. No test times."""

import json
from functools import partial

import pytest
import torch
import torch.distributed as dist

from ddpkit import Link, RankError, launch
from ddpkit.bench import ddp, results, training, zero
from ddpkit.bench.results import AGAIN, Results, judge
from ddpkit.bench.training import COMPUTE

# Data-parallel steps

OWN_WIRE = {  # seconds of the first round; the second takes twice as long
    ddp.TORCH: 0.2,
    COMPUTE: 0.1,
    "naive": 0.3,
    "flat": 0.24,
    "overlap": 0.12,
    ddp.PLAIN: 0.21,
    ddp.OURS: 0.2,
    ddp.SHARED: 0.21,
    ddp.TORCH + AGAIN: 0.2,
}
ON_A_LINK = {name: s for name, s in OWN_WIRE.items() if name != ddp.SHARED}


def steps(took, title="GPT"):
    return ddp.together(title, {name: (s, 2 * s) for name, s in took.items()}, 4000)


def test_goals_and_pictures_of_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    found = Results(steps(OWN_WIRE) + steps(ON_A_LINK, "GPT, emulated: 50 µs"))
    exposed = [each.columns["Exposed"] for each in found[:3]]
    assert exposed == ["150 ms", "0 ns", "300 ms"]
    monkeypatch.setattr(ddp, "measure", lambda: found)
    ddp.main("ddp")
    kept = json.loads((tmp_path / "ddp.json").read_text())
    assert [goal["met"] for goal in kept["goals"]] == [
        *("yes", "yes", "NO"),  # through shared memory it took longer than torch
        *("yes", "yes", "yes", "yes", "NO", "NO"),  # OURS was slower than overlap, that than none
    ]
    for number in (0, 1):
        assert (tmp_path / f"ddp_{number}.png").read_bytes().startswith(b"\x89PNG")


# Sharded states

SYNC = {  # seconds of synchronisation and update
    zero.TORCH: 0.4,
    zero.AS_IT_COMES: 0.5,
    zero.TORCH_DDP: 0.3,
    zero.OUR_DDP: 0.3,
    zero.ZERO: 0.2,
    zero.SHARED: 0.1,
    zero.TORCH + AGAIN: 0.4,
}


def syncs(**changed):
    seconds = {COMPUTE: (1.0, 3.0)}
    for name, s in (SYNC | changed).items():
        seconds[name] = (1 + s, 3 + 2 * s)  # computing alone is taken off round by round
    counted = [dict.fromkeys(seconds, (2e6, 12e6)), dict.fromkeys(seconds, (14e6, 16e6))]
    return Results(zero.together("GPT", seconds, 4000, counted))


def test_the_table_of_syncs_and_its_goals():
    found = syncs()
    assert found[0].seconds == pytest.approx((0.4, 0.8))
    assert found[0].columns == {"Step": "2.6 s", "Sent": "8", "State": "16"}
    assert [goal["met"] for goal in judge(zero.GOALS, found)] == ["yes"] * 4
    slow = judge(zero.GOALS, syncs(**{zero.ZERO: 0.31}))  # 1.29 and 1.6 times as fast
    assert [goal["met"] for goal in slow] == ["NO", "yes", "NO", "yes"]


# On real ranks


def test_steps_are_measured_on_both_wires():
    small, link = partial(training.gpt, 1, 32), Link(1e-4, 1e8)
    found = ddp.measure([("small", small, None), ("small", small, link)], rounds=1)
    plain, emulated = found.cases().values()
    assert [*plain] == [*OWN_WIRE]
    assert [*emulated] == [*ON_A_LINK]
    titles = {each.operation for each in found}
    assert titles == {"small", f"small, emulated: {link}"}
    assert len({step.nbytes for step in found}) == 1


def test_what_a_step_sends_and_keeps():
    """64 bytes divide all lengths: no padding. torch's ZeRO adds broadcasts of half each."""
    small, whole = partial(zero.linears, 2, 512, rows=2), 4 * 2 * 512 * 513
    found = zero.measure({"small": small}, rounds=1)
    sent = {each.variant: float(each.columns["Sent"]) * 1e6 / whole for each in found}
    assert sent == pytest.approx(
        {
            zero.TORCH: 1.5,
            zero.AS_IT_COMES: 1.5,
            zero.TORCH_DDP: 1,
            zero.OUR_DDP: 1,
            zero.ZERO: 1,
            zero.SHARED: 0,
            zero.TORCH + AGAIN: 1.5,
        },
        rel=1e-3,
    )
    state = {each.variant: float(each.columns["State"]) * 1e6 / whole for each in found}
    assert (state[zero.TORCH_DDP], state[zero.OUR_DDP]) == pytest.approx((2, 2), rel=1e-3)
    assert (state[zero.ZERO], state[zero.SHARED]) == pytest.approx((1, 1), rel=1e-3)
    assert {each.nbytes for each in found} == {whole}


def train_without_telling():
    make = partial(training.linears, 1, 8)
    sgd = partial(torch.optim.SGD, lr=0.01)
    alone = training.Replica(make, training.itself, sgd)
    together = training.Replica(make, ddp.ddp.NaiveDDP, sgd)
    for replica in (alone, together):
        replica.step()
    training.check_alike({"naive": together, COMPUTE: alone}, dist.group.WORLD)
    training.check_alike({"naive": together, "forgetful": alone}, dist.group.WORLD)


def test_a_variant_that_learns_something_else_gets_no_time():
    with pytest.raises(RankError, match="forgetful is off by"):
        launch(train_without_telling, world_size=2)
