"""`python -m ddpkit.bench precision`: what it claims, compares and prints. (Times are no test's business.)"""

import contextlib
import json
import math

import pytest
import torch

from ddpkit import bench
from ddpkit.bench import precision
from ddpkit.bench.__main__ import BENCHMARKS
from ddpkit.bench.precision import PRODUCT, STEP, Formats, Timed
from ddpkit.bench.results import AGAIN

X86 = "model name\t: Some CPU\nflags\t\t: fpu sse2 avx512_bf16 amx_bf16\n"
ARM = "Features\t: fp asimd asimdhp bf16 sve\n"


def test_it_can_be_asked_for():
    assert "precision" in BENCHMARKS


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


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((6, 1), ["fp32"]),
        ((7, 5), ["fp32", "fp16"]),
        ((8, 0), ["fp32", "tf32", "bf16", "fp16"]),
        ((9, 0), ["fp32", "tf32", "bf16", "fp16"]),
    ],
)
def test_a_gpu_claims_what_its_capability_says(capability, expected):
    assert list(precision.gpu_units(capability)) == expected


@pytest.mark.parametrize("cpuinfo", ["", X86])
def test_what_has_no_units_is_named_and_not_timed(cpuinfo, monkeypatch, tmp_path, capsys):
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr(precision, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    formats = precision.measure((8, 16, 2), rounds=2)
    precision.report(formats)
    steps = ["fp32"] + ["bf16", "bf16, autocast"] * bool(cpuinfo)
    assert sorted(each.variant for each in formats if each.operation == STEP) == sorted([*steps, "fp32" + AGAIN])
    assert formats[0].variant == "fp32"
    losses = {each.variant: each.loss for each in formats if each.operation == STEP}
    assert losses["fp32" + AGAIN] == losses["fp32"]  # each has its own model, and as many steps
    assert formats.missing == (("tf32", "fp16") if cpuinfo else ("tf32", "bf16", "fp16"))
    out = capsys.readouterr().out
    assert f"Not timed, for want of units: {', '.join(formats.missing)}." in out
    saved = json.loads((tmp_path / "precision.json").read_text())
    assert len(saved["results"]) == len(formats)
    assert {len(each["seconds"]) for each in saved["results"]} == {2}


@pytest.mark.parametrize(("name", "autocast"), [("bf16", False), ("bf16", True), ("fp16", False), ("fp16", True)])
def test_every_step_trains(name, autocast):
    """Whatever the machine has: slow is not wrong."""
    losses = {}
    for which, cast in (("fp32", False), (name, autocast)):
        training = precision.Training(which, 4, 8, 2, torch.device("cpu"), cast)
        losses[which, cast] = [training.step().item() for _ in range(8)]
    fp32, other = losses["fp32", False], losses[name, autocast]
    assert fp32[-1] < 0.99 * fp32[0]
    assert other == pytest.approx(fp32, rel=2**-6)  # activations of bf16 have 8 bits


def test_formats_are_what_is_multiplied():
    for name in ("fp32", "bf16", "fp16"):
        product = precision.make_product(name, 4, 8, torch.device("cpu"))()
        assert (product.dtype, product.shape) == (precision.FORMATS[name], (4, 8))


def test_the_precision_of_products_is_put_back():
    before = torch.get_float32_matmul_precision()
    with contextlib.suppress(KeyError), precision.products_in("tf32"):
        assert torch.get_float32_matmul_precision() == "high"
        raise KeyError
    assert torch.get_float32_matmul_precision() == before


def timed(kind, name, seconds, loss=1.0):
    return Timed(kind, name, 1, 100, (seconds,) * 12, flop=1e9, loss=loss)


def test_the_table_has_the_ceiling_beside_each_step():
    products = [timed(PRODUCT, name, s) for name, s in (("fp32", 0.4), ("bf16", 0.1), ("fp32" + AGAIN, 0.4))]
    steps = [timed(STEP, "fp32", 1.0), timed(STEP, "bf16", 0.5), timed(STEP, "bf16, autocast", 0.8)]
    lines = repr(Formats([*products, *steps, timed(STEP, "fp32" + AGAIN, 1.0)])).splitlines()
    assert [" ".join(line.split()) for line in lines[:3]] == [
        "Matrix product Time (ms) TFLOP/s Speed [95 %] A/A",
        "fp32 400 0.0025 1 1.00–1.00",
        "bf16 100 0.01 4.00 [4.00, 4.00] 1.00–1.00 faster",
    ]
    assert [" ".join(line.split()) for line in lines[6:8]] == [
        "bf16 500 0.002 2.00 [2.00, 2.00] 1.00–1.00 faster 4.00 1.0000",
        "bf16, autocast 800 0.00125 1.25 [1.25, 1.25] 1.00–1.00 faster 4.00 1.0000",
    ]


@pytest.mark.parametrize("loss", [1.1, math.nan])
def test_a_format_that_learns_something_else_is_refused(loss):
    precision.check_losses({"fp32": 1.0, "bf16": 1.01})
    with pytest.raises(RuntimeError, match="bf16 has a loss of"):
        precision.check_losses({"fp32": 1.0, "bf16": loss})


def test_no_round_is_refused():
    with pytest.raises(ValueError, match="expected 1 round or more, got 0"):
        precision.measure(rounds=0)
