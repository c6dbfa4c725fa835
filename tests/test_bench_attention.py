"""`python -m ddpkit.bench attention`: what it compares and says. Times are no test's business."""

import json
import sys
from types import SimpleNamespace

import pytest
import race_here
import torch

from ddpkit.bench import attention as bench
from ddpkit.bench import results
from ddpkit.bench.attention import CUDNN, EFFICIENT, FLASH, OURS, PLAIN, PRODUCT, TRITON, Case
from ddpkit.bench.results import AGAIN, Results, judge

SMALL = Case(head_size=16, causal=True, length=32, heads=2)
TIMES = {FLASH: (1.0, 2.0), PLAIN: (3.0, 4.0), OURS: (1.1, 2.5)}  # forward and backward, in seconds


def made_up(case, **changed):
    """With these times in two rounds, of two calls each, and a matrix product of 2 TFLOP/s."""
    times = TIMES | changed
    first = next(iter(times))
    turns = {("", PRODUCT): (4.0, 4.0)}
    for place, part in enumerate(bench.PARTS):
        for name in (*times, first + AGAIN):
            turns[part, name] = (2 * times[name.removesuffix(AGAIN)][place],) * 2
    return Results(bench.together(case, turns, dict.fromkeys(turns, 2), 4 * 10**12))


def test_on_a_gpu_all_of_pytorchs_kernels_and_triton_where_it_is(monkeypatch):
    by_triton = object()
    fake = SimpleNamespace(flash_attention_triton=by_triton)
    where = "ddpkit.fast.triton_attention"  # the real one changes this process
    monkeypatch.setitem(sys.modules, where, fake)
    assert list(bench.attentions("cpu")) == [FLASH, PLAIN, OURS]
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    assert list(bench.attentions("cuda")) == [CUDNN, FLASH, EFFICIENT, PLAIN, OURS]
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: name == "triton")
    assert list(bench.attentions("cuda")) == [CUDNN, FLASH, EFFICIENT, PLAIN, TRITON]
    assert bench.attentions("cuda")[TRITON] is by_triton


def test_a_gpu_without_bfloat16_is_left_alone(monkeypatch):
    for available, capability, expected in [
        (False, (9, 0), "cpu"),
        (True, (7, 5), "cpu"),
        (True, (8, 0), "cuda"),
    ]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda it=available: it)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda it=capability: it)
        assert bench.device() == expected


def test_a_turn_is_filled_with_calls(monkeypatch):
    clock = iter([0.0, bench.TURN_S / 2.5])
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(clock))
    called = []
    often = bench.Often(lambda: called.append(1))
    often()
    assert (often.times, len(called)) == (3, 1 + 3)


def refuse(q, k, v, causal):
    raise RuntimeError("No available kernel. Aborting execution.\nmore")


def run_out_of_memory(q, k, v, causal):
    raise torch.OutOfMemoryError("Tried to allocate 32.00 GiB")


def test_what_cannot_run_is_named_but_ours_must(capsys):
    attends = bench.attentions("cpu") | {EFFICIENT: refuse, TRITON: run_out_of_memory}
    able = bench.choose(attends, SMALL.inputs("cpu"), causal=True)
    assert list(able) == [FLASH, PLAIN, OURS, FLASH + AGAIN]
    assert capsys.readouterr().out.splitlines() == [
        f"{EFFICIENT} can't run: No available kernel. Aborting execution.",
        f"{TRITON} can't run: Tried to allocate 32.00 GiB",
    ]
    with pytest.raises(RuntimeError, match="No available kernel"):
        bench.choose(attends | {OURS: refuse}, SMALL.inputs("cpu"), causal=True)


class Scaled(torch.autograd.Function):
    """As it was, with gradients that are a little too large."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        return dx * 1.001


@pytest.mark.parametrize("wrong", ["o", "dq", "dk", "dv", "nan"])
def test_a_wrong_answer_gets_no_time(wrong):
    def attend(q, k, v, causal):
        given = {"dq": q, "dk": k, "dv": v}
        q, k, v = (Scaled.apply(x) if name == wrong else x for name, x in given.items())
        o = bench.attention(q, k, v, causal != (wrong == "o"))
        return o * torch.nan if wrong == "nan" else o

    what = "o" if wrong == "nan" else wrong
    with pytest.raises(RuntimeError, match=f"{OURS}: {what} is off by"):
        bench.choose(bench.attentions("cpu") | {OURS: attend}, SMALL.inputs("cpu"), True)


# What is made of times


def test_what_is_said_of_times():
    """4 · 2 · 4096² · 64 operations in 4.294967296 ms are 2 TFLOP/s; backward is more work."""
    took = 4.294967296e-3, 2.5 * 4.294967296e-3
    mask_leaves_half = (False, "", "2", "100 %"), (True, ", causal", "1", "50 %")
    for causal, mask, speed, reached in mask_leaves_half:
        found = made_up(Case(64, causal, 4096, 2), **{OURS: took})
        ours = [each for each in found if each.variant == OURS]
        assert [each.operation for each in ours] == [
            f"{p}, D 64{mask}, N 4096" for p in bench.PARTS
        ]
        assert [each.seconds for each in ours] == [(s, s) for s in took]
        assert [each.columns for each in ours] == [{"TFLOP/s": speed, "Ceiling": reached}] * 2


def test_goals():
    """Against PyTorch's from N = 1024 on, against plain forward from 4096; Triton's on a GPU."""
    slow = {OURS: (1.3, 4.1)}  # 0.77 and 0.49 × PyTorch's, 2.3 and 0.98 × plain
    for length, said in ((512, []), (1024, ["NO"] * 3), (4096, ["NO"] * 4)):
        for case in (Case(64, False, length, 2), Case(64, True, length, 2)):
            goals = bench.GOALS["cpu"]
            assert [goal["met"] for goal in judge(goals, made_up(case, **slow))] == said
            good = ["yes"] * len(said)
            assert [goal["met"] for goal in judge(goals, made_up(case))] == good
    took = {CUDNN: (1.0, 1.0), TRITON: (1.2, 2.1)}  # 0.83 and 0.48 × cuDNN's
    for head_size, said in ((64, ["NO", "yes"]), (128, ["yes", "yes"])):
        found = made_up(Case(head_size, False, 16384, 2), **took)
        assert [goal["met"] for goal in judge(bench.GOALS["cuda"], found)] == said


def test_measure_and_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr(bench, "race", race_here.race)
    monkeypatch.setattr(bench, "TURN_S", 0)
    monkeypatch.setattr(bench, "cases", lambda kind: [SMALL])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    bench.main("attention")
    assert "backward, D 16, causal, N 32" in capsys.readouterr().out
    kept = json.loads((tmp_path / "attention.json").read_text())["results"]
    assert {each["variant"] for each in kept} == {FLASH, PLAIN, OURS, FLASH + AGAIN}
    assert {len(each["seconds"]) for each in kept} == {bench.ROUNDS}
