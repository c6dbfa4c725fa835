"""`python -m ddpkit.bench`: what it runs, what it makes of times, what it prints. No test times."""

import importlib
import itertools
import json
import os
import pkgutil
import sys

import pytest
import torch
import torch.distributed as dist

from ddpkit import RankError, bench, launch
from ddpkit.bench import attention, collectives, interleave, precision, results, zero
from ddpkit.bench.__main__ import BENCHMARKS, MODULES, main
from ddpkit.bench.collectives import Variant
from ddpkit.bench.interleave import Contest
from ddpkit.bench.launch import report as report_launch
from ddpkit.bench.results import Goal, Ratio, Result, Results, judge, paired_ratio
from ddpkit.bench.training import COMPUTE

# The command line


def test_what_is_unknown_is_named_before_anything_runs(capsys):
    with pytest.raises(SystemExit):
        main(["launch", "lunch"])
    assert "invalid choice: 'lunch' (choose from" in capsys.readouterr().err


def test_every_benchmark_there_is_can_be_asked_for(monkeypatch):
    names = [each.name for each in pkgutil.iter_modules(bench.__path__) if each.name != "__main__"]
    modules = {name: importlib.import_module(f"ddpkit.bench.{name}") for name in names}
    run = {MODULES.get(name, name) for name in BENCHMARKS}
    assert {name for name in names if hasattr(modules[name], "main")} == run
    ran = []
    for name in run:
        monkeypatch.setattr(modules[name], "main", ran.append)
    main([])
    assert ran == [*BENCHMARKS]
    main(["zero", "launch"])
    assert ran[-2:] == ["zero", "launch"]


# Tables and files


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FOLDER", tmp_path / "results")
    return tmp_path / "results"


def test_the_launchers_budgets(folder, capsys):
    report_launch([("a wait", 0.5, 0.25, "s"), ("too long", 1, 2.0, "s")])
    assert capsys.readouterr().out.splitlines()[1:] == [
        "          budget  measured  within?",
        "a wait     0.5 s    0.25 s      yes",
        "too long     1 s       2 s       NO",
    ]
    kept = json.loads((folder / "launch.json").read_text())
    assert [row[2] for row in kept["rows"]] == [0.25, 2.0]
    assert kept["machine"]["cores"] == os.cpu_count()


def result(variant, seconds, world_size=2, nbytes=10**6):
    return Result("all_reduce", variant, world_size, nbytes, tuple(seconds))


SECONDS = {"gloo": 4e-3, "ring": 2e-3, "shared memory": 1e-3, "memcpy": 0.9e-3}
SECONDS |= {"loopback": 1.6e-3, "gloo again": 4e-3}
CEILINGS = dict.fromkeys(SECONDS, "loopback")
CEILINGS |= {"shared memory": "memcpy", "memcpy": "", "loopback": ""}


def measured():
    seconds = {name: (each, each) for name, each in SECONDS.items()}
    found = collectives.together("all_reduce", 2, 10**6, seconds, CEILINGS)
    return Results(found, collectives.LEGEND)


TABLE = """\
all_reduce, 2 processes, 1 MB
                 Time  algbw  busbw  Reached      Speed [95 %]
gloo             4 ms   0.25   0.25     40 %  1.00 [1.00–1.00]     A/A
ring             2 ms    0.5    0.5     80 %  2.00 [2.00–2.00]  faster
shared memory    1 ms      1      1     90 %  4.00 [4.00–4.00]  faster
memcpy         900 µs   1.11   1.11           4.44 [4.44–4.44]  faster
loopback       1.6 ms  0.625  0.625           2.50 [2.50–2.50]  faster
"""


def test_results_are_a_table_for_each_case():
    assert repr(measured()) == f"{TABLE}\n{collectives.LEGEND}"
    two = Results([*measured(), result("gloo", [5.0], nbytes=0)], "legend", "Step")
    lines = "      Step      Speed [95 %]", "gloo   5 s  1.00 [1.00–1.00]  A/A", "", "legend"
    assert repr(two).replace("Step  algbw", "Time  algbw").startswith(TABLE)
    assert repr(two).endswith("\n".join(["", "", "all_reduce", *lines]))
    assert repr(Results()) == "nothing measured"
    assert [each.variant for each in measured().competing] == ["gloo", "ring", "shared memory"]


def test_no_line_is_wider_than_the_page():
    """Of the widest tables, also where times and ratios are large; of all legends and goals."""
    wide, ratio = (1.2345678, 0.0123), Ratio(12.3456, 9.8765, 123.456)
    assert str(ratio) == "12.3 [9.88–123]"
    variants = dict.fromkeys(CEILINGS, wide)
    found = collectives.together("all_reduce", 4, 25 * 2**20, variants, CEILINGS)
    case = attention.Case(128, True, 16384, 64)
    which = list(itertools.product(attention.PARTS, (attention.FLASH, attention.TRITON)))
    turns = dict.fromkeys([*which, ("", attention.PRODUCT)], wide)
    found += attention.together(case, turns, dict.fromkeys(turns, 1), 2 * 8192**3)
    names = zero.TORCH, zero.ZERO, COMPUTE
    counted = [dict.fromkeys(names, (123_456_789, 123_456_789))] * 2
    found += zero.together("GPT", dict.fromkeys(names, wide), 50 * 2**20, counted)
    lines = repr(found).splitlines()
    for name in {MODULES.get(name, name) for name in BENCHMARKS if name != "launch"}:
        benchmark = importlib.import_module(f"ddpkit.bench.{name}")
        lines += benchmark.LEGEND.splitlines()
        lines += [f"close  {ratio!s:16}  {goal}" for goal in getattr(benchmark, "GOALS", ())]
    assert [line for line in lines if len(line) > results.PAGE] == []


GOALS = [
    Goal("ring", "gloo", 1.0, "all_reduce"),
    Goal("shared memory", "gloo", 6.0, "(2|4) processes, 1 MB"),
    Goal("shared memory", "memcpy", 1 / 1.2),
    Goal("shared memory", "gloo", 5.0, "4 processes"),  # this and what follows wasn't measured
    Goal("nccl", "gloo", 1.0),
    Goal("ring", "nccl", 1.0),
]


def test_a_benchmark_prints_and_keeps(folder, monkeypatch, capsys):
    monkeypatch.setattr(collectives, "measure", lambda name: measured())
    monkeypatch.setattr(collectives, "GOALS", GOALS)
    collectives.main("all_reduce")
    printed = capsys.readouterr().out
    assert TABLE in printed
    assert printed.splitlines()[-4:] == [
        "Goals: all_reduce, 2 processes, 1 MB",
        "yes    2.00 [2.00–2.00]  ring ≥ 1 × gloo",
        "NO     4.00 [4.00–4.00]  shared memory ≥ 6 × gloo",
        "yes    0.90 [0.90–0.90]  shared memory ≥ 0.833 × memcpy",
    ]
    kept = json.loads((folder / "all_reduce.json").read_text())
    assert [each["seconds"] for each in kept["results"]] == [list(r.seconds) for r in measured()]
    assert [goal["met"] for goal in kept["goals"]] == ["yes", "NO", "yes"]
    for what in ("time", "bandwidth"):
        assert (folder / f"all_reduce_{what}.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_only_the_pictures_are_missing(folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # importing it raises ImportError
    monkeypatch.setattr(collectives, "measure", lambda name: measured())
    collectives.main("some")
    assert "no pictures: matplotlib.figure isn't installed here" in capsys.readouterr().out
    assert [path.name for path in folder.iterdir()] == ["some.json"]


# Times, ratios, goals


def test_intervals():
    """Of three rounds 7 of 27 draws have the median at an end. The median of 101 numbers lies
    between the 41st and the 61st in 95 of 100 cases (binomial, p = 1/2)."""
    drifting = [1.0, 10.0, 100.0, 1000.0]  # round by round, always twice as fast
    half = result("ring", [each / 2 for each in drifting])
    assert paired_ratio(result("gloo", drifting), half) == (2.0, 2.0, 2.0)
    few = result("gloo", [1.0, 3.0, 2.0]), result("ring", [1.0] * 3)
    assert paired_ratio(*few) == (2.0, 1.0, 3.0)
    before = torch.get_rng_state()
    many = result("gloo", range(1, 102)), result("ring", [1] * 101)
    median, low, high = paired_ratio(*many)
    assert (median, round((low - 41) / 2), round((high - 61) / 2)) == (51, 0, 0)
    assert paired_ratio(*many) == (median, low, high)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("seconds", "again", "verdict"),
    [
        ([0.5] * 3, [1.0] * 3, "faster"),
        ([2.0] * 3, [1.0] * 3, "slower"),
        ([1.0] * 3, [1.0] * 3, "unclear"),
        ([0.5] * 3, [0.4, 1.0, 2.0], "unclear"),  # chance alone makes as much
        ([0.5, 0.5, 1.1], [1.0] * 3, "unclear"),  # 1 is in the interval
        ([0.5] * 3, None, "faster"),
    ],
)
def test_verdicts(seconds, again, verdict):
    found = Results([result("gloo", [1.0] * 3), result("ring", seconds)])
    if again:
        found.append(result("gloo again", again))
    assert found.verdict(found[1]) == verdict
    assert found.control(found[1]) == (found.speed(found[2]) if again else (1, 1, 1))


def test_only_the_same_rounds_are_compared():
    others = [result("gloo", [8.0], world_size=4), result("gloo", [16.0], nbytes=10**7)]
    mine = [result("gloo", [2.0]), result("ring", [1.0])]
    found = Results(others[:1] + mine + others[1:])
    assert found.speed(mine[1]).median == 2
    assert found.fraction(mine[1]) is None
    assert measured().speed(measured()[2], "ring") == (2.0, 2.0, 2.0)


def test_goals():
    for ratio, met in [
        (Ratio(2.5, 2.0, 3.0), "yes"),
        (Ratio(1.9, 1.8, 2.05), "close"),
        (Ratio(1.5, 1.0, 1.9), "NO"),
    ]:
        assert Goal("ring", "gloo", 2.0).verdict(ratio) == met


def test_every_goal_is_about_something_that_is_measured():
    goals = []
    for operation, sizes in collectives.SIZES.items():
        make, found = collectives.MAKE[operation], []
        (names,) = launch(lambda make=make: [*make(4, dist.group.WORLD)], world_size=1)
        for world_size in (2, 4):
            for nbytes in sizes:
                found += [Result(operation, name, world_size, nbytes, (1.0,)) for name in names]
        goals += [each["goal"] for each in judge(collectives.GOALS, Results(found))]
    assert {*goals} == {*map(str, collectives.GOALS)}


# Taking turns


def keep_the_order(plain):
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    return Contest(calls, found=lambda: order)


def test_turns_are_abba():
    seconds, (order, _) = interleave.race(keep_the_order, rounds=3, world_size=2)
    assert "".join(order) == "abccba" * 3
    assert {name: len(each) for name, each in seconds.items()} == {"a": 3, "b": 3, "c": 3}


def test_what_computes_on_a_gpu_gets_ranks_that_see_it(monkeypatch):
    asked = []

    def launch(*_, backend, **options):
        asked.append(backend)
        raise KeyboardInterrupt

    monkeypatch.setattr(interleave, "launch", launch)
    attention.measure("cpu")
    with pytest.raises(KeyboardInterrupt):
        precision.measure()
    assert asked == ["auto", "auto"]


def test_a_round_lasts_until_its_last_rank_is_done():
    first = [(0.0, 3.0), (10.0, 11.0), (20.0, 21.0)]
    second = [(1.0, 2.0), (10.5, 14.0), (21.0, 22.0)]
    assert interleave.until_the_last([first, second]) == (3.0, 4.0, 2.0)


def test_what_cannot_be_measured_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(interleave, "launch", None)
    for arguments in (((4,), (2,), 2), ((4096,), (2,), 0)):
        with pytest.raises(ValueError, match="to be 1 or more, got 0"):
            collectives.measure("all_reduce", *arguments)
    with pytest.raises(ValueError, match="rounds to be 1 or more, got 0"):
        precision.measure(rounds=0)


# On real ranks


def test_measure():
    rings = ["ring", "fast ring"]
    rest = ["shared memory", "pass in place", "memcpy", "loopback", "gloo again"]
    found = collectives.measure("all_reduce", (4096, 4 * 10**6), (3,), 1)
    names = ["gloo", *rings, "doubling", *rest, "gloo", *rings, *rest]  # doubling: for small ones
    assert [each.variant for each in found] == names
    assert [each.nbytes for each in found] == [4096] * 9 + [4 * 10**6] * 8
    rest.remove("pass in place")
    found += collectives.measure("reduce_scatter", (10_000,), (2,), 2)
    assert [each.variant for each in found[17:]] == ["gloo", "gloo, list", *rings, *rest]
    assert all(found.fraction(each) for each in found.competing)


def make_wrong(numel, group):
    x = torch.ones(numel)
    return {"right": Variant(x, lambda: x, 1), "lazy": Variant(x, lambda: x, 2)}


def test_a_wrong_answer_gets_no_time(monkeypatch):
    monkeypatch.setitem(collectives.MAKE, "all_reduce", make_wrong)
    with pytest.raises(RankError, match=r"lazy is off by 5.0e-01: its time would mean nothing"):
        collectives.measure("all_reduce", (4096,), (2,), 1)


def cores_after_pinning():
    interleave.pin_to_a_core()
    return sorted(os.sched_getaffinity(0))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_ranks_are_pinned_while_there_are_cores_for_all():
    cores = sorted(os.sched_getaffinity(0))
    few = min(2, len(cores))
    assert list(launch(cores_after_pinning, world_size=few)) == [[core] for core in cores[:few]]
    many = len(cores) + 1
    if many <= 5:
        assert list(launch(cores_after_pinning, world_size=many)) == [cores] * many
