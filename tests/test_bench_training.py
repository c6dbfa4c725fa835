"""`python -m ddpkit.bench ddp` and `zero`: what they count and say. No test times."""

import json
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddpkit import RankError, launch
from ddpkit.bench import ddp, results, training, zero
from ddpkit.bench.results import AGAIN, Result, judge
from ddpkit.bench.training import COMPUTE

# The table and the goals

OWN_WIRE = {  # seconds of the first round; the second takes twice as long
    ddp.TORCH: 0.2,
    COMPUTE: 0.1,
    "naive": 0.3,
    "flat": 0.24,
    "overlap": 0.12,
    ddp.PLAIN: 0.21,
    ddp.OURS: 0.2,
    ddp.SHARED: 0.21,
    ddp.RECORDED: 0.205,
    ddp.TORCH + AGAIN: 0.2,
}
ON_A_LINK = OWN_WIRE | {"like 1 MiB": 0.12, "like 10 MiB": 0.125, "like 100 MiB": 0.14}
ON_A_LINK |= {"like 1000 MiB": 0.2}


def case(emulated="", **changed):
    took = (ON_A_LINK if emulated else OWN_WIRE) | changed
    return ddp.Steps(
        Result("GPT", name, 2, 4000, (s, 2 * s), "", emulated) for name, s in took.items()
    )


def test_steps_are_a_table():
    lines = [" ".join(line.split()) for line in repr(case()).splitlines()]
    assert lines[:5] == [
        "GPT, 2 processes, 4 kB",
        "Step (ms) Exposed (ms) Speed [95 %]",
        "torch 300.0 150.0 1.00 [1.00–1.00] A/A",
        "compute alone 150.0 0.0 2.00 [2.00–2.00] faster",
        "naive 450.0 300.0 0.67 [0.67–0.67] slower",
    ]


BESIDE_THE_SEED = """\
As parts of the naive step  2 × T4 (ms)        here (ms)
naive                            1406.7  1.00      450.0  1.00
flat                             1365.2  0.97      360.0  0.80
overlap                          1075.7  0.76      180.0  0.40
like 1 MiB                       1093.4  0.78      180.0  0.40
like 10 MiB                      1120.1  0.80      187.5  0.42
like 100 MiB                     1213.4  0.86      210.0  0.47
like 1000 MiB                    1360.4  0.97      300.0  0.67"""


def test_report_of_steps_prints_and_keeps(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    ddp.report_steps(ddp.Steps(case() + case("50 µs", overlap=0.3)))
    printed = capsys.readouterr().out
    assert BESIDE_THE_SEED.splitlines()[0] in printed
    assert ddp.beside_the_seed(case("50 µs")) == BESIDE_THE_SEED
    kept = json.loads((tmp_path / "ddp.json").read_text())
    assert [goal["met"] for goal in kept["goals"]] == [
        *("yes", "NO", "yes"),  # through shared memory it took longer than torch
        *("yes", "yes", "NO", "yes", "NO", "NO"),  # overlap took too long
    ]
    for number in (0, 1):
        assert (tmp_path / f"ddp_{number}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_link_has_the_seeds_shares(world_size):
    sizes, compute_s = [1000, 4_000_000, 20], 0.2
    link = ddp.find_link(compute_s, sizes, world_size)
    communication_s = sum(link.seconds("all_reduce", nbytes, world_size) for nbytes in sizes)
    naive_s = compute_s + communication_s
    assert communication_s == pytest.approx(0.35 * naive_s)
    at_once_s = link.seconds("all_reduce", sum(sizes), world_size)
    assert communication_s - at_once_s == pytest.approx(0.03 * naive_s)
    with pytest.raises(ValueError, match="expected 2 gradients or more, got 1"):
        ddp.find_link(1.0, [4], 2)


def test_a_gpu_is_waited_for_and_changes_no_gradient(monkeypatch):
    """0.5 s of forward, shared by weights as 1 to 4; in backward in reverse, and twice as long."""
    slept = []
    monkeypatch.setattr(ddp.time, "sleep", slept.append)
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 8)), torch.randn(3, 2)
    module(x).sum().backward()
    expected = [parameter.grad.clone() for parameter in module.parameters()]
    module.zero_grad()
    task = training.Task(lambda: module, lambda model: model(x).sum())
    waiting = ddp.as_on_a_gpu(lambda: task, 0.5)
    waiting.loss(waiting.build()).backward()
    assert slept == pytest.approx([0.1, 0.4, 0.8, 0.2])
    for parameter, was in zip(module.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, was)


# Sharded states

SECONDS = {  # of a step less computing alone
    zero.TORCH: 0.4,
    zero.AS_IT_COMES: 0.5,
    zero.TORCH_DDP: 0.3,
    zero.OUR_DDP: 0.3,
    zero.ZERO: 0.2,
    zero.SHARED: 0.1,
    zero.TORCH + AGAIN: 0.4,
}


def syncs(**changed):
    return zero.Syncs(
        zero.Sync("GPT", name, 2, 4000, (s, 2 * s), "", "", 1.5 * s + 1, 8e6, 16_000_000)
        for name, s in (SECONDS | changed).items()
    )


def test_the_table_of_syncs_and_its_goals():
    lines = [" ".join(line.split()) for line in repr(syncs()).splitlines()]
    assert lines[2] == f"{zero.TORCH} 1600.0 600.0 8 16 1.00 [1.00–1.00] A/A"
    assert lines[6] == "ZeroOptimizer 1300.0 300.0 8 16 2.00 [2.00–2.00] faster"
    assert [goal["met"] for goal in judge(zero.GOALS, syncs())] == ["yes"] * 4
    slow = judge(zero.GOALS, syncs(**{zero.ZERO: 0.31}))  # 1.29 and 1.6 times as fast
    assert [goal["met"] for goal in slow] == ["NO", "yes", "NO", "yes"]


def test_computing_alone_is_taken_off_round_by_round():
    seconds = {COMPUTE: (1.0, 2.0), zero.ZERO: (3.0, 3.0)}
    ranks = [training.Seen(dict.fromkeys(seconds, number), [1000, 3000]) for number in (5, 6)]
    (found,) = zero.together("GPT", seconds, ranks, dict.fromkeys(seconds, 3.0))
    assert (found.seconds, found.step_s, found.nbytes) == ((2.0, 1.0), 3.0, 4000)
    assert (found.sent_bytes, found.state_bytes) == (3.0, 6)


# On real ranks


def test_steps_are_measured_on_both_wires():
    small = partial(training.gpt, 1, 32)
    waiting = partial(ddp.as_on_a_gpu, small, 1e-3)
    plain, emulated = ddp.measure_steps({"small": small}, {"small": waiting}, rounds=1).cases()
    assert [step.variant for step in plain] == [*OWN_WIRE]
    seeds = [*list(OWN_WIRE)[:5], *list(ddp.SEED)[3:], ddp.TORCH + AGAIN]
    assert [step.variant for step in emulated] == seeds
    assert emulated[0].emulated
    assert {step.nbytes for step in (*plain, *emulated)} == {plain[0].nbytes}


def test_what_a_step_sends_and_keeps():
    """64 bytes divide all lengths: no padding. torch's ZeRO adds broadcasts of half each."""
    small, whole = partial(zero.linears, 2, 512, rows=2), 4 * 2 * 512 * 513
    found = zero.measure({"small": small}, rounds=1)
    assert {each.variant: each.sent_bytes / whole for each in found} == {
        zero.TORCH: 1.5,
        zero.AS_IT_COMES: 1.5,
        zero.TORCH_DDP: 1,
        zero.OUR_DDP: 1,
        zero.ZERO: 1,
        zero.SHARED: 0,
        zero.TORCH + AGAIN: 1.5,
    }
    state = {each.variant: each.state_bytes / whole for each in found}
    assert (state[zero.TORCH_DDP], state[zero.OUR_DDP]) == (2, 2)
    assert (state[zero.ZERO], state[zero.SHARED]) == (1, 1)
    assert {each.nbytes for each in found} == {whole}


def test_one_rank_has_nobody_to_talk_to():
    for measure in (ddp.measure_steps, zero.measure):
        with pytest.raises(ValueError, match="expected 2 ranks or more, got 1"):
            measure(world_size=1)


def train_without_telling():
    task = training.linears(1, 8)
    sgd = partial(torch.optim.SGD, lr=0.01)
    alone = training.Replica(task, training.itself, sgd)
    together = training.Replica(task, ddp.ddp.NaiveDDP, sgd)
    for replica in (alone, together):
        replica.step()
    training.check_alike({"naive": together, COMPUTE: alone}, dist.group.WORLD)
    training.check_alike({"naive": together, "forgetful": alone}, dist.group.WORLD)


def test_a_variant_that_learns_something_else_gets_no_time():
    with pytest.raises(RankError, match="forgetful learned something else on rank"):
        launch(train_without_telling, world_size=2)
