"""`python -m ddpkit.bench precision`: what it claims, compares and prints. No test times."""

import json

import pytest
import race_here
import torch

from ddpkit.bench import precision, results
from ddpkit.bench.precision import PRODUCT, STEP
from ddpkit.bench.results import AGAIN

X86 = {"architecture": "x86_64", "sse2": True, "avx512_bf16": True, "avx512_fp16": False}
ARM = {"neon": True, "fp16_arith": True, "bf16": True, "sve": False}


def test_a_cpu_claims_what_torch_says_of_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for there, able in (
        ({"avx512_f": True, "f16c": True}, []),  # f16c only converts
        (X86, ["bf16"]),
        (ARM, ["bf16", "fp16"]),
    ):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda it=there: it)
        assert precision.units() == ["fp32", *able]


def test_torch_knows_this_cpu():
    assert "architecture" in torch.cpu.get_capabilities()


def test_a_gpu_claims_what_its_capability_says(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, able in {
        (6, 1): [],
        (7, 5): ["fp16"],
        (8, 0): ["tf32", "bf16", "fp16"],
        (9, 0): ["tf32", "bf16", "fp16"],
    }.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda it=capability: it)
        assert precision.units() == ["fp32", *able]


def test_what_has_no_units_is_named_and_not_timed(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: X86)
    monkeypatch.setattr(precision, "ON_CPU", (8, 16, 2))
    monkeypatch.setattr(precision, "race", race_here.race)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    precision.main("precision")
    assert "Not timed, for want of units: tf32, fp16." in capsys.readouterr().out
    kept = json.loads((tmp_path / "precision.json").read_text())["results"]
    kept_steps = [each for each in kept if each["operation"] == STEP]
    losses = {each["variant"]: each["columns"]["Loss"] for each in kept_steps}
    assert list(losses) == ["fp32", "bf16", "bf16, autocast", "fp32" + AGAIN]
    assert losses["fp32" + AGAIN] == losses["fp32"]  # each has its own model, and as many steps
    assert kept[0]["variant"] == "fp32"


@pytest.mark.parametrize(("name", "autocast"), [("bf16", False), ("bf16", True), ("fp16", False)])
def test_every_step_trains(name, autocast):
    """Whatever the machine has: slow is not wrong."""
    losses = []
    for which, cast in (("fp32", False), (name, autocast)):
        step = precision.trainer(which, (4, 8, 2), torch.device("cpu"), cast)
        losses.append([step().item() for _ in range(8)])
    fp32, other = losses
    assert fp32[-1] < 0.99 * fp32[0]
    assert other == pytest.approx(fp32, rel=2**-6)  # activations of bf16 have 8 bits


def test_columns():
    times = {"fp32": 0.4, "bf16": 0.1, "fp32" + AGAIN: 0.4}
    seconds = {(kind, name): (s,) * 12 for kind in (PRODUCT, STEP) for name, s in times.items()}
    found = precision.together((500, 1000, 2), seconds, dict.fromkeys(times, 1.0))
    assert found[0].columns == {"TFLOP/s": "0.0025", "Loss": ""}
    assert found[4].columns == {"TFLOP/s": "0.05", "Loss": "1.0000"}


def test_a_format_that_learns_something_else_is_refused():
    contest = precision.make_contest(["fp32", "bf16"], (8, 16, 2), None)
    for _ in range(20):  # far ahead of the others
        contest.calls[STEP, "bf16"]()
    with pytest.raises(RuntimeError, match="the loss in bf16 is off by"):
        contest.found()
