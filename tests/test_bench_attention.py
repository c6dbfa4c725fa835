"""`python -m ddpkit.bench attention`: what it counts, and what it makes of times (which are no test's business)."""

import itertools
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.autograd import DeviceType

from ddpkit import bench
from ddpkit.bench import attention as bench_attention
from ddpkit.bench.__main__ import BENCHMARKS
from ddpkit.bench.attention import BOTH, CUDNN, EFFICIENT, FLASH, OURS, PLAIN, PRODUCT, TRITON, Attentions, Case
from ddpkit.bench.results import AGAIN

SMALL = Case(length=32, heads=2, head_size=16, causal=True)
TIMES = {FLASH: (1.0, 2.0), PLAIN: (3.0, 4.0), OURS: (1.1, 2.5)}  # forward and backward, in seconds
EXTRA = {FLASH: 10_000_000, PLAIN: 200_000_000, OURS: 20_000_000, TRITON: 20_000_000}


def inputs(heads=2, length=32, head_size=16):
    return [nn.Parameter(x) for x in torch.randn(4, 1, heads, length, head_size)]


def made_up(length=4096, causal=False, extra=EXTRA, head_size=64, **changed):
    """A case with these times in two rounds, and a matrix product of 2 TFLOP/s."""
    times = TIMES | changed
    first = next(iter(times))
    able = {name: SimpleNamespace(extra_bytes=extra.get(name, 0), kernel="") for name in times}
    able[first + AGAIN] = able[first]
    turns = {name: [times[name.removesuffix(AGAIN)]] * 2 for name in able} | {PRODUCT: [(2.0,), (2.0,)]}
    return Attentions(bench_attention.together(Case(length, 2, head_size, causal), able, turns, 4 * 10**12))


def test_it_can_be_asked_for():
    assert "attention" in BENCHMARKS


# What is timed


@pytest.mark.parametrize(
    ("kind", "full", "lengths", "head_sizes"),
    [
        ("cpu", False, [256, 512, 1024, 2048, 4096], [64]),
        ("cpu", True, [256, 512, 1024, 2048, 4096, 8192], [64]),
        ("cuda", False, [1024, 2048, 4096, 8192, 16384], [64, 128]),
    ],
)
def test_cases(kind, full, lengths, head_sizes):
    cases = bench_attention.cases(kind, full)
    expected = {(n, d, causal) for n in lengths for d in head_sizes for causal in (False, True)}
    assert len(cases) == len(expected)
    assert {(case.length, case.head_size, case.causal) for case in cases} == expected
    assert len({case.heads * case.length * case.head_size for case in cases}) == 1


@pytest.mark.parametrize(
    ("available", "capability", "expected"),
    [(False, (9, 0), "cpu"), (True, (7, 5), "cpu"), (True, (8, 0), "cuda"), (True, (9, 0), "cuda")],
)
def test_a_gpu_without_bfloat16_is_left_alone(available, capability, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert bench_attention.device() == expected


def test_on_a_gpu_all_of_pytorchs_kernels_and_triton_where_it_is(monkeypatch):
    by_triton = object()
    fake = SimpleNamespace(flash_attention_triton=by_triton)
    monkeypatch.setitem(sys.modules, "ddpkit.flash_triton", fake)  # the real one would change this process
    assert list(bench_attention.attentions("cpu")) == [FLASH, PLAIN, OURS]
    monkeypatch.setattr(bench_attention.importlib.util, "find_spec", lambda name: None)
    assert list(bench_attention.attentions("cuda")) == [CUDNN, FLASH, EFFICIENT, PLAIN, OURS]
    monkeypatch.setattr(bench_attention.importlib.util, "find_spec", lambda name: name == "triton")
    assert bench_attention.attentions("cuda")[TRITON] is by_triton


def test_time_is_shared_among_the_calls(monkeypatch):
    monkeypatch.setattr(bench_attention.time, "perf_counter", itertools.count(0, 6).__next__)
    calls = itertools.count(1)
    assert bench_attention.timed(calls.__next__, 4) == (1.5, 4)


def test_a_turn_is_filled_with_calls(monkeypatch):
    monkeypatch.setattr(bench_attention, "timed", lambda call, calls=1: (bench_attention.TURN_S / 5, call()))
    contender = bench_attention.Contender(bench_attention.attention, inputs(), causal=False)
    assert contender.calls == 3  # forward and backward are 2/5


def test_extra_memory_counts_what_is_new():
    """Of o = q · k · v: o, and dv, then the gradient of q · k, whose own value is still there; at the end dq and dk."""
    parts = inputs(length=100)
    contender = bench_attention.Contender(lambda q, k, v, causal: (q * k) * v, parts, causal=False)
    assert contender.extra_bytes == 5 * parts[0].nbytes


def test_plain_attention_has_matrices_and_ours_has_none():
    extra = {}
    for length in (512, 1024):
        for name, attend in bench_attention.attentions("cpu").items():
            contender = bench_attention.Contender(attend, inputs(length=length), causal=False)
            extra[name, length] = contender.extra_bytes
    assert extra[PLAIN, 1024] >= 3 * 2 * 1024**2 * 4  # p, dp and ds
    assert extra[PLAIN, 1024] > 3.5 * extra[PLAIN, 512]
    for name in (FLASH, OURS):
        assert extra[name, 1024] <= 2 * extra[name, 512]


# What really ran


def event(name, device, microseconds):
    span = SimpleNamespace(elapsed_us=lambda: microseconds)
    return SimpleNamespace(name=name, device_type=device, time_range=span)


def test_the_longest_kernel_of_the_gpu():
    events = [
        event("aten::scaled_dot_product_attention", DeviceType.CPU, 900),
        event("Memset (Device)", DeviceType.CUDA, 1),
        event("flash_fwd_kernel", DeviceType.CUDA, 80),
        event("reduce_kernel", DeviceType.CUDA, 3),
    ]
    assert bench_attention.longest_kernel(events) == "flash_fwd_kernel"


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128", CUDNN),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>(Flash_fwd_params)", FLASH),
        ("aten._scaled_dot_product_flash_attention_for_cpu.default", FLASH),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::Params)", EFFICIENT),
        ("void softmax_warp_forward<float>", "SDPA, void softmax_warp_forward<float>"),
    ],
)
def test_a_variant_is_named_by_its_kernel(kernel, expected):
    assert bench_attention.ran(kernel) == expected


def test_what_pytorch_ran_and_not_what_was_asked_for():
    able = bench_attention.choose({CUDNN: bench_attention.attentions("cpu")[FLASH]}, inputs(), causal=True)
    assert list(able) == [FLASH, FLASH + AGAIN]


def refuse(q, k, v, causal):
    raise RuntimeError("No available kernel. Aborting execution.\nmore")


def run_out_of_memory(q, k, v, causal):
    raise torch.OutOfMemoryError("Tried to allocate 32.00 GiB")


def test_what_cannot_run_is_named(capsys):
    attends = bench_attention.attentions("cpu") | {EFFICIENT: refuse, TRITON: run_out_of_memory}
    able = bench_attention.choose(attends, inputs(), causal=True)
    assert list(able) == [FLASH, PLAIN, OURS, FLASH + AGAIN]
    assert capsys.readouterr().out.splitlines() == [
        f"{EFFICIENT} can't run: No available kernel. Aborting execution.",
        f"{TRITON} can't run: Tried to allocate 32.00 GiB",
    ]


def test_ours_must_run():
    with pytest.raises(RuntimeError, match="No available kernel"):
        bench_attention.choose(bench_attention.attentions("cpu") | {OURS: refuse}, inputs(), causal=True)


class Scaled(torch.autograd.Function):
    """As it was, with gradients that are a little too large."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        return dx * 1.001


def wrongly(number, x):
    return [Scaled.apply(part) if number == place else part for place, part in enumerate(x)]


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (lambda q, k, v, causal: bench_attention.attention(q, k, v, not causal), "o"),
        (lambda q, k, v, causal: bench_attention.attention(q, k, v, causal) * torch.nan, "o"),
        (lambda q, k, v, causal: bench_attention.attention(*wrongly(0, (q, k, v)), causal), "dq"),
        (lambda q, k, v, causal: bench_attention.attention(*wrongly(1, (q, k, v)), causal), "dk"),
        (lambda q, k, v, causal: bench_attention.attention(*wrongly(2, (q, k, v)), causal), "dv"),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_a_wrong_answer_gets_no_time(wrong, what, causal):
    with pytest.raises(RuntimeError, match=f"{OURS}: {what} is off by .* of {FLASH}'s"):
        bench_attention.choose(bench_attention.attentions("cpu") | {OURS: wrong}, inputs(), causal)


# What is made of times


def test_a_round_is_a_forward_and_a_backward():
    able = {FLASH: SimpleNamespace(extra_bytes=7, kernel="some kernel")}
    turns = {FLASH: [(1.0, 2.0), (2.0, 4.0)], PRODUCT: [(1.0,), (3.0,)]}
    found = bench_attention.together(Case(8, 3, 16, False), able, turns, 100)
    assert [(each.operation, each.seconds) for each in found] == [
        ("forward, D 16", (1.0, 2.0)),
        ("backward, D 16", (2.0, 4.0)),
        (f"{BOTH}, D 16", (3.0, 6.0)),
    ]
    work = 2 * 2 * 3 * 8 * 8 * 16  # a multiplication and an addition, in two products
    assert [each.flop for each in found] == [work, 2.5 * work, 3.5 * work]
    assert {(each.ceiling_flops, each.extra_bytes, each.kernel) for each in found} == {(50, 7, "some kernel")}
    causal = bench_attention.together(Case(8, 3, 16, True), able, turns, 100)
    assert [each.flop for each in causal] == [work / 2, 2.5 * work / 2, 3.5 * work / 2]
    assert causal[0].operation == "forward, D 16, causal"


def test_table():
    lines = repr(Attentions(made_up(1024) + made_up(4096))).splitlines()
    cells = [" ".join(line.split()) for line in lines]
    assert cells[:3] == [
        "forward, D 64 N Time (ms) TFLOP/s Ceiling Extra MB Speed [95 %] A/A",
        "SDPA, flash 1024 1000 0.000537 0 % 10 1 1.00–1.00",
        "plain attention 1024 3000 0.000179 0 % 200 0.33 [0.33, 0.33] 1.00–1.00 slower",
    ]
    assert cells[5] == "plain attention 4096 3000 0.00286 0 % 200 0.33 [0.33, 0.33] 1.00–1.00 slower"
    assert cells[8].startswith("backward, D 64 N")
    assert AGAIN not in "\n".join(lines[:-3])


def test_the_ceiling_is_the_matrix_product():
    """4 · 2 · 4096² · 64 operations in 4.294967296 ms are 2 TFLOP/s."""
    found = made_up(4096, **{OURS: (4.294967296e-3, 1.0)})
    line = next(line for line in repr(found).splitlines() if line.startswith(OURS))
    assert line.split()[1:5] == ["4096", "4.295", "2", "100"]


def verdicts(kind, *measured):
    lines = bench_attention.judged(Attentions(itertools.chain(*measured)), kind)
    return {(what, goal.removeprefix("≥ ")): met for what, goal, _, met in lines}


def test_goals_on_a_cpu():
    found = verdicts("cpu", made_up(512), made_up(1024), made_up(4096, causal=True))
    assert set(found.values()) == {"yes"}
    goals = [f"0.8 × the speed of {FLASH}", f"0.7 × the speed of {FLASH}", f"1 × the speed of {PLAIN}"]
    assert [goal for what, goal in found if "N 1024" in what] == goals
    assert not any("N 512" in what for what, _ in found)
    assert verdicts("cpu", made_up(head_size=128)) == {}
    causal = f"{OURS}, forward, D 64, causal, N 4096"
    assert (causal, f"2.5 × the speed of {PLAIN}") in found
    slow = verdicts("cpu", made_up(4096, **{OURS: (1.3, 3.0)}))
    assert [met for (what, _), met in slow.items() if "forward, D" in what] == ["NO", "NO"]  # 0.77 and 2.3
    assert [met for (what, _), met in slow.items() if "backward, D" in what and " and " not in what] == ["NO", "yes"]
    slower = verdicts("cpu", made_up(4096, **{OURS: (1.0, 4.1)}))
    assert slower[f"{OURS}, backward, D 64, N 4096", f"1 × the speed of {PLAIN}"] == "NO"


@pytest.mark.parametrize(("extra", "met"), [(20_000_000, "yes"), (20_000_001, "NO")])
def test_the_goal_for_memory(extra, met):
    for length in (2048, 4096):
        found = made_up(length, extra=EXTRA | {OURS: extra})
        lines = [line for line in bench_attention.judged(found, "cpu") if "memory" in line[1]]
        what = (f"{OURS}, {BOTH}, D 64, N 4096", f"≤ 0.1 × the extra memory of {PLAIN}", "0.100", met)
        assert lines == [what] * (length == 4096)


@pytest.mark.parametrize(("head_size", "least"), [(64, 0.9), (128, 0.75)])
def test_goals_on_a_gpu(head_size, least):
    def judged(speed, backward=0.45):
        times = {CUDNN: (1.0, 1.0), TRITON: (1 / speed, 1 / backward)}
        able = {name: SimpleNamespace(extra_bytes=0, kernel="") for name in times}
        turns = {name: [times[name]] * 2 for name in times} | {PRODUCT: [(1.0,)]}
        case = Case(4096, 2, head_size, False)
        return list(verdicts("cuda", bench_attention.together(case, able, turns, 1)).values())

    assert judged(least + 0.001, 0.451) == ["yes", "yes"]
    assert judged(least - 0.001, 0.449) == ["NO", "NO"]
    assert verdicts("cuda", made_up()) == {
        (f"{OURS}, {BOTH}, D 64, N 4096", f"≤ 0.1 × the extra memory of {PLAIN}"): "yes"
    }


# All of it, at a tiny size


def test_measure_and_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    bench_attention.report(bench_attention.measure([SMALL], rounds=2), "cpu")
    out = capsys.readouterr().out
    assert f"{FLASH} ran aten._scaled_dot_product_flash_attention_for_cpu.default" in out
    assert "forward and backward, D 16, causal " in out
    kept = json.loads((tmp_path / "attention.json").read_text())
    assert {each["variant"] for each in kept["results"]} == {FLASH, PLAIN, OURS, FLASH + AGAIN}
    assert {each["case"]["length"] for each in kept["results"]} == {32}
    assert {len(each["seconds"]) for each in kept["results"]} == {2}
    assert all(min(each["seconds"]) > 0 and each["extra_bytes"] > 0 for each in kept["results"])


@pytest.mark.parametrize("full", [False, True])
def test_all_cases_are_measured_and_reported(full, monkeypatch):
    reported = []
    monkeypatch.setattr(bench_attention, "device", lambda: "cpu")
    monkeypatch.setattr(bench_attention, "measure", lambda what: what)
    monkeypatch.setattr(bench_attention, "report", lambda found, kind: reported.append((found, kind)))
    bench_attention.main(full)
    assert reported == [(bench_attention.cases("cpu", full), "cpu")]


def test_no_round_is_refused():
    with pytest.raises(ValueError, match="expected 1 round or more, got 0"):
        bench_attention.measure([SMALL], rounds=0)
