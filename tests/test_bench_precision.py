"""`python -m ddpkit.bench precision`: what it claims, compares and prints. No test times."""

import contextlib
import json
import math

import pytest
import torch

from ddpkit.bench import precision, results
from ddpkit.bench.precision import PRODUCT, STEP, Formats, Timed
from ddpkit.bench.results import AGAIN

X86 = "model name\t: Some CPU\nflags\t\t: fpu sse2 avx512_bf16 amx_bf16\n"
ARM = "Features\t: fp asimd asimdhp bf16 sve\n"


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        ("", {}),
        ("flags\t: fpu avx512f f16c\n", {}),  # f16c only converts
        ("model name\t: avx512_fp16\n", {}),
        (X86, {"bf16": "amx_bf16, avx512_bf16"}),
        (ARM, {"bf16": "bf16", "fp16": "asimdhp"}),
    ],
)
def test_a_cpu_claims_what_its_flags_say(cpuinfo, expected):
    assert precision.cpu_units(cpuinfo) == {"fp32": "every CPU"} | expected


def test_a_gpu_claims_what_its_capability_says():
    assert list(precision.gpu_units((6, 1))) == ["fp32"]
    assert list(precision.gpu_units((7, 5))) == ["fp32", "fp16"]
    for capability in ((8, 0), (9, 0)):
        assert list(precision.gpu_units(capability)) == ["fp32", "tf32", "bf16", "fp16"]


@pytest.mark.parametrize("cpuinfo", ["", X86])
def test_what_has_no_units_is_named_and_not_timed(cpuinfo, monkeypatch, tmp_path, capsys):
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr(precision, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(precision, "ON_CPU", (8, 16, 2))
    monkeypatch.setattr(precision, "ROUNDS", 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    precision.main()
    missing = "tf32, fp16" if cpuinfo else "tf32, bf16, fp16"
    assert f"Not timed, for want of units: {missing}." in capsys.readouterr().out
    kept = json.loads((tmp_path / "precision.json").read_text())["results"]
    losses = {each["variant"]: each["loss"] for each in kept if each["operation"] == STEP}
    steps = ["fp32", "bf16", "bf16, autocast"] if cpuinfo else ["fp32"]
    assert list(losses) == [*steps, "fp32" + AGAIN]
    assert losses["fp32" + AGAIN] == losses["fp32"]  # each has its own model, and as many steps
    assert kept[0]["variant"] == "fp32"


@pytest.mark.parametrize(("name", "autocast"), [("bf16", False), ("bf16", True), ("fp16", False)])
def test_every_step_trains(name, autocast):
    """Whatever the machine has: slow is not wrong."""
    losses = []
    for which, cast in (("fp32", False), (name, autocast)):
        step = precision.Training(which, (4, 8, 2), torch.device("cpu"), cast).step
        losses.append([step().item() for _ in range(8)])
    fp32, other = losses
    assert fp32[-1] < 0.99 * fp32[0]
    assert other == pytest.approx(fp32, rel=2**-6)  # activations of bf16 have 8 bits


def test_the_precision_of_products_is_put_back():
    before = torch.get_float32_matmul_precision()
    with contextlib.suppress(KeyError), precision.products_in("tf32"):
        assert torch.get_float32_matmul_precision() == "high"
        raise KeyError
    assert torch.get_float32_matmul_precision() == before


def test_the_table():
    times = {"fp32": 0.4, "bf16": 0.1, "fp32" + AGAIN: 0.4}
    found = []
    for kind in (PRODUCT, STEP):
        for name, seconds in times.items():
            found.append(Timed(kind, name, 1, 100, (seconds,) * 12, flop=1e9, loss=1.0))
    lines = [" ".join(line.split()) for line in repr(Formats(found)).splitlines()]
    assert lines[:4] == [
        "matrix product",
        "Time (ms) TFLOP/s Loss Speed [95 %]",
        "fp32 400 0.0025 1.00 [1.00–1.00] A/A",
        "bf16 100 0.01 4.00 [4.00–4.00] faster",
    ]
    assert lines[8] == "bf16 100 0.01 1.0000 4.00 [4.00–4.00] faster"


@pytest.mark.parametrize("loss", [1.1, math.nan])
def test_a_format_that_learns_something_else_is_refused(loss):
    precision.check_losses({"fp32": 1.0, "bf16": 1.01})
    with pytest.raises(RuntimeError, match="bf16 has a loss of"):
        precision.check_losses({"fp32": 1.0, "bf16": loss})
