"""`python -m ddpkit.bench`: what it runs, what it makes of times, what it prints. (Times are no test's business.)"""

import importlib
import io
import json
import os
import pkgutil
import re
import sys
from functools import partial

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddpkit import Link, RankError, bench, launch
from ddpkit.bench import all_reduce, ddp, interleave, reduce_scatter
from ddpkit.bench.__main__ import BENCHMARKS, main
from ddpkit.bench.interleave import Variant
from ddpkit.bench.results import Goal, Ratio, Result, Results, judge, paired_ratio, size_name, wins
from ddpkit.ddp import plan_buckets

# The command line


def test_an_unknown_benchmark_is_named_before_anything_runs(capsys):
    with pytest.raises(SystemExit):
        main(["launch", "lunch"])
    assert (
        "no benchmark is called 'lunch'; there are launch, all_reduce, reduce_scatter, ddp" in capsys.readouterr().err
    )


def test_an_unknown_option_is_named(capsys):
    with pytest.raises(SystemExit):
        main(["all_reduce", "--fast"])
    assert "--fast" in capsys.readouterr().err


def test_every_benchmark_there_is_can_be_asked_for():
    names = {each.name for each in pkgutil.iter_modules(bench.__path__) if each.name != "__main__"}
    assert {each for each in names if hasattr(importlib.import_module(f"ddpkit.bench.{each}"), "main")} == {*BENCHMARKS}


EVERY = ["launch", "all_reduce", "reduce_scatter", "ddp", "zero", "precision", "attention"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], [(name, False) for name in EVERY]),
        (["reduce_scatter", "launch", "--full"], [("reduce_scatter", True), ("launch", False)]),
        (["attention", "--full"], [("attention", True)]),
    ],
)
def test_what_runs(arguments, expected, monkeypatch):
    ran = []
    monkeypatch.setattr("ddpkit.bench.launch.main", lambda: ran.append(("launch", False)))
    monkeypatch.setattr(all_reduce, "main", lambda full: ran.append(("all_reduce", full)))
    monkeypatch.setattr(reduce_scatter, "main", lambda full: ran.append(("reduce_scatter", full)))
    monkeypatch.setattr("ddpkit.bench.attention.main", lambda full: ran.append(("attention", full)))
    for name in ("ddp", "precision", "zero"):
        monkeypatch.setattr(f"ddpkit.bench.{name}.main", lambda name=name: ran.append((name, False)))
    main(arguments)
    assert ran == expected


# Tables and files


def test_the_table_and_the_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "RESULTS", tmp_path / "results")
    bench.report(
        "some", [bench.Row("a wait", 0.5, 0.25, "s", [0.25]), bench.Row("too long a wait", 1, 2.0, "s", [2.0])]
    )
    assert capsys.readouterr().out.splitlines()[1:] == [
        "                 budget  measured  within?",
        "a wait            0.5 s    0.25 s      yes",
        "too long a wait     1 s       2 s       NO",
    ]
    results = json.loads((tmp_path / "results/some.json").read_text())
    assert [row["within"] for row in results["rows"]] == [True, False]
    assert results["machine"]["cores"]


def result(variant, seconds, world_size=2, nbytes=10**6, ceiling="", emulated=""):
    return Result("all_reduce", variant, world_size, nbytes, tuple(seconds), ceiling, emulated)


MEASURED = Results(
    [
        result("gloo", [4e-3, 4e-3], ceiling="loopback"),
        result("ring", [2e-3, 2e-3], ceiling="loopback"),
        result("shared memory", [1e-3, 1e-3], ceiling="memcpy"),
        result("memcpy", [0.9e-3, 0.9e-3]),
        result("loopback", [1.6e-3, 1.6e-3]),
        result("gloo again", [4e-3, 4e-3], ceiling="loopback"),
    ]
)

TABLE = """\
Backend        Processes  Size  Avg time (ms)  algbw  busbw GB/s        Reached       Speed [95 %]        A/A
gloo                   2  1 MB          4.000   0.25        0.25  40 % loopback                  1  1.00–1.00
ring                   2  1 MB          2.000    0.5         0.5  80 % loopback  2.00 [2.00, 2.00]  1.00–1.00  faster
shared memory          2  1 MB          1.000      1           1    90 % memcpy  4.00 [4.00, 4.00]  1.00–1.00  faster
memcpy                 2  1 MB          0.900   1.11        1.11
loopback               2  1 MB          1.600  0.625       0.625
Avg time: the median of 2 rounds; a round lasts until its last rank is done.
Speed: how many times as fast as gloo, round by round.
A/A: gloo against itself; a gain smaller than this is wide may be chance."""


def test_results_are_a_table():
    assert repr(MEASURED) == TABLE
    assert repr(Results()) == "nothing measured"


def test_the_table_says_what_was_emulated():
    alone = Results([result("ring", [1e-3], emulated="10 Gbit Ethernet")])
    lines = repr(Results(MEASURED + alone)).splitlines()
    assert lines[:6] == TABLE.splitlines()[:6]
    assert lines[6] == "emulated: 10 Gbit Ethernet"
    assert lines[8].startswith("ring             2  1 MB          1.000")
    assert lines[9].startswith("Avg time: the median of 1 to 2 rounds")
    assert "Speed:" not in repr(alone)
    assert "A/A:" not in repr(alone)


def test_report_prints_and_keeps(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "RESULTS", tmp_path / "results")
    goals = [
        Goal("ring", "gloo", 2, 10**6, 1.0),
        Goal("shared memory", "gloo", 2, 10**6, 6.0),
        Goal("shared memory", "memcpy", 2, 10**6, 1.2, at_most=True),
        Goal("shared memory", "gloo", 4, 10**6, 5.0),
    ]
    interleave.report("all_reduce", MEASURED, goals)
    printed = capsys.readouterr().out
    assert TABLE in printed
    assert printed.splitlines()[-4:] == [
        "Goals                                                                  measured  met?",
        "ring, 2 processes, 1 MB              ≥ 1 × the speed of gloo  2.00 [2.00, 2.00]   yes",
        "shared memory, 2 processes, 1 MB     ≥ 6 × the speed of gloo  4.00 [4.00, 4.00]    NO",
        "shared memory, 2 processes, 1 MB  ≤ 1.2 × the time of memcpy  1.11 [1.11, 1.11]   yes",
    ]
    kept = json.loads((tmp_path / "results/all_reduce.json").read_text())
    assert [each["seconds"] for each in kept["results"]] == [list(each.seconds) for each in MEASURED]
    assert [each["busbw"] for each in kept["results"]] == [each.busbw for each in MEASURED]
    assert [goal["met"] for goal in kept["goals"]] == ["yes", "NO", "yes"]
    for what in ("time", "bandwidth"):
        assert (tmp_path / f"results/all_reduce_{what}.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_only_the_pictures_are_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # any import of it raises ImportError
    interleave.report("some", MEASURED, [])
    assert "no pictures: matplotlib.figure isn't installed here" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["some.json"]


# Times, ratios, goals


@pytest.mark.parametrize(
    ("seconds", "world_size", "busbw"), [(0.6571070, 2, 1.63), (1.3778717, 4, 1.17), (1.0, 1, 0.0)]
)
def test_bandwidths(seconds, world_size, busbw):
    measured = result("gloo", [9.0, seconds, 0.0001], world_size, 2**30)
    assert measured.median_s == seconds
    assert measured.algbw == 2**30 / seconds
    assert round(measured.busbw / 1e9, 2) == busbw


@pytest.mark.parametrize(
    ("nbytes", "name"),
    [(4096, "4 KiB"), (10**6, "1 MB"), (25 * 2**20, "25 MiB"), (10**8, "100 MB"), (10**9, "1 GB"), (12, "12 B")],
)
def test_sizes_have_round_names(nbytes, name):
    assert size_name(nbytes) == name
    assert result("gloo", [1.0], nbytes=nbytes).size == name


def test_a_ratio_is_taken_round_by_round():
    drifting = [1.0, 10.0, 100.0, 1000.0]
    assert paired_ratio(result("gloo", drifting), result("ring", [each / 2 for each in drifting])) == (2.0, 2.0, 2.0)


def test_the_interval_of_three_rounds():
    """Two of three draws fall on the smallest (or the largest) in 7 of 27 cases: more often than 2.5 %."""
    assert paired_ratio(result("gloo", [1.0, 3.0, 2.0]), result("ring", [1.0] * 3)) == (2.0, 1.0, 3.0)


def test_the_interval_of_many_rounds():
    """The median of 101 numbers lies between the 41st and the 61st in 95 of 100 cases (binomial, p = 1/2)."""
    median, low, high = paired_ratio(result("gloo", range(1, 102)), result("ring", [1] * 101))
    assert median == 51
    assert 40 <= low <= 42
    assert 60 <= high <= 62


def test_the_interval_is_the_same_each_time_and_leaves_torch_alone():
    rounds = result("gloo", [float(each * 7919 % 101) for each in range(1, 31)]), result("ring", [1.0] * 30)
    before = torch.get_rng_state()
    assert paired_ratio(*rounds) == paired_ratio(*rounds)
    assert torch.equal(torch.get_rng_state(), before)


def test_rounds_must_pair():
    with pytest.raises(ValueError, match="got 3 of gloo, 2 of ring: compare what was timed in the same rounds"):
        paired_ratio(result("gloo", [1.0] * 3), result("ring", [1.0] * 2))


@pytest.mark.parametrize(
    ("speed", "control", "won"),
    [
        (Ratio(1.3, 1.2, 1.4), Ratio(1.0, 0.9, 1.1), True),
        (Ratio(1.3, 0.99, 1.6), Ratio(1.0, 0.99, 1.01), False),  # 1 is in the interval
        (Ratio(1.3, 1.2, 1.4), Ratio(1.0, 0.8, 1.15), False),  # chance alone makes as large a difference
        (Ratio(1.3, 1.2, 1.4), None, True),
        (Ratio(0.7, 0.6, 0.8), Ratio(1.0, 0.99, 1.01), False),
    ],
)
def test_when_a_gain_counts(speed, control, won):
    assert wins(speed, control) is won


@pytest.mark.parametrize(
    ("seconds", "again", "verdict"),
    [
        ([0.5, 0.5, 0.5], [1.0, 1.0, 1.0], "faster"),
        ([2.0, 2.0, 2.0], [1.0, 1.0, 1.0], "slower"),
        ([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], "unclear"),
        ([0.5, 0.5, 0.5], [0.4, 1.0, 2.0], "unclear"),
    ],
)
def test_verdicts(seconds, again, verdict):
    results = Results([result("gloo", [1.0] * 3), result("ring", seconds), result("gloo again", again)])
    assert results.verdict(results[1]) == verdict
    assert results.control(results[1]) == results.speed(results[2])


def test_only_the_same_rounds_are_compared():
    others = [
        result("gloo", [8.0], world_size=4),
        result("gloo", [16.0], nbytes=10**7),
        result("gloo", [32.0], emulated="PCIe 4.0 x16"),
    ]
    mine = [result("gloo", [2.0]), result("ring", [1.0])]
    results = Results(others + mine)
    assert list(results.rivals(mine[1]).values()) == mine
    assert results.speed(mine[1]).median == 2
    assert results.control(mine[1]) is None
    assert results.fraction(mine[1]) is None


def test_fractions_and_competitors():
    assert [MEASURED.fraction(each) for each in MEASURED] == pytest.approx([0.4, 0.8, 0.9, None, None, 0.4])
    assert [each.variant for each in MEASURED.competing] == ["gloo", "ring", "shared memory"]
    assert MEASURED.speed(MEASURED[2], "ring") == (2.0, 2.0, 2.0)


@pytest.mark.parametrize(
    ("ratio", "at_least", "at_most"),
    [
        (Ratio(2.5, 2.0, 3.0), "yes", "too close to tell"),
        (Ratio(2.5, 1.9, 3.0), "too close to tell", "too close to tell"),
        (Ratio(1.5, 1.0, 2.0), "too close to tell", "yes"),
        (Ratio(1.5, 1.0, 1.9), "NO", "yes"),
        (Ratio(2.5, 2.1, 3.0), "yes", "NO"),
    ],
)
def test_goals(ratio, at_least, at_most):
    assert Goal("ring", "gloo", 2, 10**6, 2.0).verdict(ratio) == at_least
    assert Goal("ring", "gloo", 2, 10**6, 2.0, at_most=True).verdict(ratio) == at_most


def test_goals_that_were_not_measured_are_left_out():
    goals = [Goal("ring", "gloo", *case, 1.0) for case in ((4, 10**6), (2, 10**7))]
    goals += [Goal("nccl", "gloo", 2, 10**6, 1.0), Goal("ring", "nccl", 2, 10**6, 1.0)]
    assert judge(goals, MEASURED) == []
    slower = Goal("gloo", "ring", 2, 10**6, 1.5, at_most=True)
    assert judge([*goals, slower], MEASURED) == [(slower, Ratio(2.0, 2.0, 2.0), "NO")]


@pytest.mark.parametrize("module", [all_reduce, reduce_scatter])
def test_every_goal_is_about_something_that_the_benchmark_measures(module):
    names = {"gloo", "gloo, list", "ring", "shared memory", "memcpy"}
    for goal in module.GOALS:
        assert {goal.variant, goal.against} <= names
        assert goal.nbytes in module.SIZES
        assert goal.world_size in (2, 4)


# Taking turns


def test_turns_are_abba():
    assert [interleave.in_turn(["a", "b", "c"], number) for number in range(3)] == [
        ["a", "b", "c"],
        ["c", "b", "a"],
        ["a", "b", "c"],
    ]


def test_a_round_lasts_until_its_last_rank_is_done():
    first, second = [(0.0, 3.0), (10.0, 11.0), (20.0, 21.0)], [(1.0, 2.0), (10.5, 14.0), (21.0, 22.0)]
    assert interleave.until_the_last([first, second]) == (3.0, 4.0, 2.0)


@pytest.mark.parametrize(("nbytes", "rounds"), [(4096, 100), (10**6, 100), (10**7, 20), (10**8, 12), (10**9, 12)])
def test_small_sizes_get_more_rounds(nbytes, rounds):
    assert interleave.usual_rounds(nbytes) == rounds


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((4096,), (2, 1), 2), "expected 2 ranks or more, got 1"),
        (((4096, 8), (3,), 2), "expected 4 bytes or more for each of 3 ranks, got 8 for all"),
        (((4096,), (2,), 0), "expected 1 round or more, got 0"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(arguments, message, monkeypatch):
    monkeypatch.setattr(interleave, "launch", None)
    with pytest.raises(ValueError, match=message):
        all_reduce.measure(*arguments)


def test_times_on_a_slowed_link_are_divided(monkeypatch):
    calls = []

    def fake_launch(*args, **kwargs):
        calls.append((args, kwargs))
        return [{"gloo": ("", [(0.0, 30.0), (50.0, 60.0)])}, {"gloo": ("", [(1.0, 40.0), (50.0, 70.0)])}]

    monkeypatch.setattr(interleave, "launch", fake_launch)
    link = Link.preset("NVLink 4")
    for each in (link, link.slowed(10), None):
        calls.append(all_reduce.measure((10**6,), (2,), 2, link=each))
    assert [(found[0].seconds, found[0].emulated) for found in calls[1::2]] == [
        ((40.0, 20.0), "NVLink 4"),
        ((4.0, 2.0), "NVLink 4, 10 × slower, times divided by 10"),
        ((40.0, 20.0), ""),
    ]
    assert [kwargs["link"] for _, kwargs in calls[::2]] == [link, link.slowed(10), None]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_shows_in_a_terminal_only(monkeypatch, capsys):
    monkeypatch.setattr(interleave, "launch", lambda *args, **kwargs: [{}])
    all_reduce.measure((4096, 8192), (2, 4), 1)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys, "stderr", Terminal())
    all_reduce.measure((4096, 8192), (2, 4), 1)
    bars = sys.stderr.getvalue().split("\r")[1:]
    assert bars[:4] == [f"[{'#' * 10 * done:40}] {done} of 4" for done in range(4)]
    assert bars[4] == "\033[K"


# On real ranks


def ranks_left() -> list[psutil.Process]:
    return [each for each in psutil.Process().children(recursive=True) if each.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize(
    ("module", "variants"),
    [
        (all_reduce, ["gloo", "ring", "doubling", "shared memory", "memcpy", "loopback", "gloo again"]),
        (reduce_scatter, ["gloo", "gloo, list", "ring", "shared memory", "memcpy", "loopback", "gloo again"]),
    ],
)
def test_measure(module, variants):
    launch(dist.barrier, world_size=2)  # the fork server stays
    before = len(ranks_left())
    results = module.measure(sizes=(4096, 10_000), world_sizes=(2, 3), rounds=2)
    assert len(ranks_left()) == before
    expected = [(ranks, nbytes, name) for ranks in (2, 3) for nbytes in (4096, 10_000) for name in variants]
    assert [(r.world_size, r.nbytes, r.variant) for r in results] == expected
    assert all(len(r.seconds) == 2 and min(r.seconds) > 0 for r in results)
    assert {r.operation for r in results} == {module.__name__.rpartition(".")[2]}
    assert {r.emulated for r in results} == {""}
    assert all(results.fraction(r) for r in results.competing)


def offers_doubling(nbytes: int) -> bool:
    return "doubling" in all_reduce.make_variants(nbytes // 4, dist.group.WORLD, True)


def test_doubling_is_for_small_sizes():
    assert launch(lambda: [offers_doubling(nbytes) for nbytes in (10**6, 10**6 + 4)], world_size=1)[0] == [True, False]


def test_on_an_emulated_link_only_what_sends_messages_is_timed():
    link = Link(2e-3, 1e6, name="a slow wire")
    results = all_reduce.measure((4096,), (2,), 1, link=link)
    assert [each.variant for each in results] == ["gloo", "ring", "doubling", "gloo again"]
    assert {each.emulated for each in results} == {"a slow wire"}
    assert min(each.median_s for each in results) >= 2e-3  # a link never delivers early
    assert "emulated: a slow wire" in repr(results)


@pytest.mark.parametrize("emulated", [False, True])
def test_without_a_link_nothing_is_recorded(emulated):
    run = launch(interleave.time_on_rank, all_reduce.make_variants, 4096, 3, emulated, world_size=2)
    calls = [record for record in run.wire[0] if record.op == "all_reduce"]
    assert len(calls) == (emulated and 2 * (interleave.WARM_UP + 3))  # the baseline has two turns


def make_wrong(numel, group, emulated):
    x = torch.ones(numel)
    return {"right": Variant(x, lambda: x, 1), "lazy": Variant(x, lambda: x, 2)}


def test_a_wrong_result_gets_no_time():
    with pytest.raises(RankError, match="lazy gave wrong numbers on rank"):
        interleave.measure("all_reduce", make_wrong, (4096,), (2,), 1)


def cores_after_pinning() -> list[int]:
    interleave.pin_to_a_core()
    return sorted(os.sched_getaffinity(0))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system pins no process")
def test_ranks_get_a_core_each_where_there_are_enough():
    cores = sorted(os.sched_getaffinity(0))
    few, many = min(2, len(cores)), min(8, len(cores) + 1)
    assert list(launch(cores_after_pinning, world_size=few)) == [[core] for core in cores[:few]]
    if many > len(cores):
        assert list(launch(cores_after_pinning, world_size=many)) == [cores] * many


# Training steps: what is said about them

OWN_WIRE = {  # seconds of the first round; the second takes twice as long
    "torch": 0.2,
    "compute alone": 0.1,
    "naive": 0.3,
    "flat": 0.24,
    "overlap": 0.12,
    ddp.SMALL: 0.12,
    ddp.LARGE: 0.2,
    "torch again": 0.2,
}
ON_A_LINK = {  # the same, and what the model predicts for the median
    "torch": (0.12, 0.155),
    "compute alone": (0.1, 0.15),
    "naive": (0.3, 0.46),
    "flat": (0.24, 0.35),
    "overlap": (0.12, 0.156),
    ddp.BY_MODEL: (0.11, 0.163),
    ddp.as_in_seed(1): (0.12, 0.155),
    ddp.as_in_seed(10): (0.125, 0.157),
    ddp.as_in_seed(100): (0.14, 0.18),
    ddp.as_in_seed(1000): (0.2, 0.3),
    ddp.buckets_of(0.5): (0.115, 0.16),
    "torch again": (0.12, 0.155),
}


def case(emulated="", **changed):
    return ddp.Steps(
        ddp.Step(
            "GPT",
            name,
            2,
            4000,
            (took, 2 * took),
            "",
            emulated,
            ddp.Counts(3, 4000, 8000),
            predicted,
        )
        for name, (took, predicted) in (given(emulated) | changed).items()
    )


def given(emulated):
    return ON_A_LINK if emulated else {name: (took, None) for name, took in OWN_WIRE.items()}


STEPS_HEAD = (
    "GPT, 2 processes, G = 0.004 MB, Gloo, this machine's own wire\nVariant            Step (ms)  × torch's time"
)
STEPS_CELLS = [
    ["torch", "300.0", "1", "1.00–1.00", "150.0", "3", "0.004", "2.00", "0.000000"],
    ["compute alone", "150.0", "0.50 [0.50, 0.50]", "1.00–1.00", "faster", "0.0", "3", "0.004", "2.00", "0.000000"],
    ["naive", "450.0", "1.50 [1.50, 1.50]", "1.00–1.00", "slower", "300.0", "3", "0.004", "2.00", "0.000000"],
]


def test_steps_are_a_table():
    assert repr(case()).startswith(STEPS_HEAD)
    assert [re.split(" {2,}", line) for line in repr(case()).splitlines()[2:5]] == STEPS_CELLS
    assert "torch again" not in repr(case())
    assert repr(ddp.Steps()) == "nothing measured"


def test_each_wire_has_a_table_of_its_own():
    both = ddp.Steps(case() + case("50 µs"))
    assert both.cases() == [case(), case("50 µs")]
    plain, emulated, _ = repr(both).split("\n\n")
    assert "own wire" in plain.splitlines()[0]
    assert emulated.splitlines()[0].endswith("G = 0.004 MB, emulated: 50 µs")
    cells = {line[0]: line for line in (re.split(" {2,}", line) for line in emulated.splitlines())}
    assert cells["naive"][5:8] == ["300.0", "310.0", "3"]  # exposed, and what the model predicts of it
    assert "310.0" not in plain


def test_exposed_is_taken_round_by_round():
    steps = case()
    steps[2:3] = [ddp.Step("GPT", "naive", 2, 4000, (0.3, 0.21))]  # 0.2 s longer, and 0.01 s
    assert steps.exposed(steps[2]) == pytest.approx([0.2, 0.01])
    assert steps.exposed_s(steps[2]) == pytest.approx((0.2 + 0.01) / 2)
    assert steps.exposed_s(steps[1]) == 0


BESIDE_THE_SEED = """\
As parts of the naive step        2 × T4 (ms)        GPT (ms)
naive                                  1406.7  1.00     450.0  1.00
flat                                   1365.2  0.97     360.0  0.80
overlap                                1075.7  0.76     180.0  0.40
buckets like the seed's 1 MiB          1093.4  0.78     180.0  0.40
buckets like the seed's 10 MiB         1120.1  0.80     187.5  0.42
buckets like the seed's 100 MiB        1213.4  0.86     210.0  0.47
buckets like the seed's 1000 MiB       1360.4  0.97     300.0  0.67"""


def test_the_seeds_table():
    assert ddp.beside_the_seed(case("50 µs")) == BESIDE_THE_SEED


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [
        (Ratio(0.99, 0.9, 1.03), "yes"),
        (Ratio(0.99, 0.9, 1.04), "too close to tell"),
        (Ratio(1.01, 0.99, 1.02), "too close to tell"),
        (Ratio(1.02, 1.01, 1.03), "NO"),
    ],
)
def test_as_fast_is_a_median_and_an_interval(ratio, verdict):
    assert ddp.AsFast("ours", "torch", 2, 4000, 1.0, at_most=True).verdict(ratio) == verdict


def test_medians_are_compared_not_rounds():
    """A round in which nothing was exposed, or less, has no ratio; the medians, 2 and 4, have one."""
    these, those = torch.tensor([1.0, 2.0, 3.0] * 40), torch.tensor([0.0, 4.0, 8.0] * 40)
    median, low, high = ddp.ratio_of_medians(these, those)
    assert median == 0.5
    assert low <= 0.5 <= high
    assert ddp.ratio_of_medians(2 * those, those) == (
        2,
        2,
        2,
    )  # both from the same rounds


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [
        (Ratio(1.0, 0.86, 1.14), "yes"),
        (Ratio(1.0, 0.84, 1.14), "too close to tell"),
        (Ratio(1.1, 1.0, 1.16), "too close to tell"),
        (Ratio(1.2, 1.16, 1.3), "NO"),
        (Ratio(0.8, 0.7, 0.84), "NO"),
    ],
)
def test_a_prediction_can_be_too_long_or_too_short(ratio, verdict):
    assert ddp.Predicted("ours", ddp.STEP, 2, 4000, 0.15).verdict(ratio) == verdict


def judged(steps):
    return {(goal.variant, goal.against): (goal, verdict) for goal, _, verdict in judge(ddp.goals(steps), steps)}


def verdicts(steps):
    return {what: verdict for what, (_, verdict) in judged(steps).items()}


def test_goals_on_the_machines_own_wire():
    shared = {ddp.SHARED: (0.21, None)}
    assert verdicts(case(**shared)) == {(ddp.LARGE, "torch"): "yes", (ddp.SHARED, "torch"): "NO"}


SMALL, LARGE, SEARCHED = ddp.as_in_seed(1), ddp.as_in_seed(1000), ddp.buckets_of(0.5)


def test_goals_on_a_link():
    """Two rounds of which one takes twice as long: the interval of what isn't paired reaches from 2/3 to 4/3."""
    expected = {
        ("flat", "naive"): "yes",
        (LARGE, "flat"): "yes",
        ("overlap", LARGE): "yes",
        (SMALL, "overlap"): "yes",
        ("overlap", SMALL): "yes",
        ("overlap", "compute alone"): "NO",  # predicted 4 % above, measured 20 %
        (ddp.BY_MODEL, SEARCHED): "yes",  # 0.01 s exposed, against 0.015 s
        (ddp.BY_MODEL, ddp.STEP): "too close to tell",
        (ddp.BY_MODEL, ddp.EXPOSED): "too close to tell",
    }
    assert verdicts(case("50 µs")) == expected
    del expected["overlap", "compute alone"]
    assert verdicts(case("50 µs", overlap=(0.12, 0.16))) == expected  # the model says that it doesn't fit
    assert verdicts(case("50 µs", overlap=(0.21, 0.16)))["overlap", LARGE] == "NO"


def test_the_models_buckets_are_compared_with_the_best_that_were_found():
    found = judged(case("50 µs", **{SEARCHED: (0.2, 0.3), SMALL: (0.108, 0.155)}))
    goal, verdict = found[ddp.BY_MODEL, SMALL]
    assert (goal.text, verdict) == (f"≤ 1.1 × the exposed time of {SMALL}", "NO")  # 0.01 s against 0.008 s


@pytest.mark.parametrize(
    ("predicted_s", "step", "exposed"), [(0.165, 1.0, 1.0), (0.18, 0.165 / 0.18, 0.5), (0.155, 0.165 / 0.155, 3.0)]
)
def test_what_is_said_of_a_prediction(predicted_s, step, exposed):
    """A step of 0.165 s, 0.15 s of it computing."""
    steps = case("50 µs", **{ddp.BY_MODEL: (0.11, predicted_s)})
    goals = {goal.against: goal for goal in ddp.goals(steps) if isinstance(goal, ddp.Predicted)}
    assert goals[ddp.STEP].measured(steps).median == pytest.approx(step)
    assert goals[ddp.EXPOSED].measured(steps).median == pytest.approx(exposed)
    assert goals[ddp.EXPOSED].text == "exposed time within 15 % of the prediction"


def test_report_of_steps_prints_and_keeps(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    ddp.report(ddp.Steps(case() + case("50 µs")))
    printed = capsys.readouterr().out
    assert STEPS_HEAD in printed
    assert re.search("GPT: buckets of 16 MiB +≤ 1 × the time of torch, interval up to 1.03 ", printed)
    assert "GPT, emulated: overlap" in printed
    kept = json.loads((tmp_path / "ddp.json").read_text())
    assert BESIDE_THE_SEED in printed
    assert [each["variant"] for each in kept["results"]] == [*OWN_WIRE, *ON_A_LINK]
    assert kept["results"][2]["counts"] == {"messages": 3, "sent": 4000, "moved": 8000}
    assert kept["results"][2]["exposed_s"] == pytest.approx(0.3)
    assert len(kept["goals"]) == 1 + 9  # nothing was measured through shared memory
    for number in (0, 1):
        assert (tmp_path / f"ddp_{number}.png").read_bytes().startswith(b"\x89PNG")


def test_steps_without_matplotlib(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    for module in ("matplotlib.figure", "matplotlib.lines"):
        monkeypatch.setitem(sys.modules, module, None)
    ddp.report(case())
    assert "isn't installed here" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["ddp.json"]


# Training steps: the link and the model's predictions


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_link_has_the_seeds_shares(world_size):
    sizes, compute_s = [1000, 4_000_000, 20], 0.2
    link = ddp.find_link(compute_s, sizes, world_size)
    communication_s = sum(link.seconds("all_reduce", nbytes, world_size) for nbytes in sizes)
    naive_s = compute_s + communication_s
    assert communication_s == pytest.approx(0.35 * naive_s)
    at_once_s = link.seconds("all_reduce", sum(sizes), world_size)
    assert communication_s - at_once_s == pytest.approx(0.03 * naive_s)


def test_one_gradient_is_one_message_already():
    with pytest.raises(ValueError, match="expected 2 gradients or more, got 1"):
        ddp.find_link(1.0, [4], 2)


def seen(ready_s, sizes):
    return ddp.Seen({}, {}, ready_s, sizes, [torch.float32] * len(sizes))


def test_gradients_come_in_the_first_ranks_order_when_the_last_rank_has_them():
    ranks = [seen([3.0, 1.0, 2.0], [30, 10, 20]), seen([5.0, 7.0, 0.5], [30, 10, 20])]
    assert ddp._in_order(ranks)[:2] == ([7.0, 2.0, 5.0], [10, 20, 30])


RANKS = [seen([4.0, 3.0, 2.0, 1.0], [2**20] * 4)] * 2  # a gradient of 1 MiB each second


def test_what_the_model_predicts():
    """An all-reduce of one gradient takes 2 · 0.25 + 2 s on this link, of all four 8.5."""
    choice = ddp.Choice(16, {ddp.BY_MODEL: 2.0, ddp.SMALL: 1, ddp.LARGE: 16})
    assert ddp.predicted_exposed(RANKS, Link(0.25, 2**19), choice) == {
        "torch": 8.5,
        "compute alone": 0.0,
        "naive": 4 * 2.5,
        "flat": 8.5,
        "overlap": 1 + 4 * 2.5 - 4,
        ddp.BY_MODEL: 2 + 2 * 4.5 - 4,
        ddp.SMALL: 1 + 4 * 2.5 - 4,
        ddp.LARGE: 8.5,
        "torch again": 8.5,
    }


@pytest.mark.parametrize(
    ("link", "messages"),
    [
        (Link(0.0, 2**30), 2),  # never behind, it shows only the last gradient; one message for the other three
        (Link(100.0, 2**30), 1),
        (Link(0.01, 2**19), 4),
    ],
)
def test_what_is_timed_on_a_link(link, messages):
    choice = ddp.choose(RANKS, link)
    plans = {name: plan_buckets([(2**20, torch.float32)] * 4, mb * 2**20) for name, mb in choice.buckets.items()}
    best, *others = map(len, plans.values())
    assert best == messages
    assert others == [4, 4, 4, 2, *(4, 2, 1)]  # the seed's: 0.0025, 0.025, 0.25 and 2.5 MiB; and all that differ
    assert choice.torch_mb == choice.buckets[ddp.BY_MODEL]
    assert not choice.shared


@pytest.mark.parametrize("arguments", [{"world_size": 1}, {"rounds": 0}])
def test_steps_that_cannot_be_measured_are_refused_at_once(arguments, monkeypatch):
    monkeypatch.setattr(ddp, "launch", None)
    with pytest.raises(ValueError, match="expected 2 ranks or more and 1 round or more, got"):
        ddp.measure(**arguments)


@pytest.mark.parametrize(
    ("work", "nbytes"),
    [
        (lambda x, y: x.copy_(y), 80),
        (lambda x, y: x.mul_(2), 80),
        (lambda x, y: torch.cat([x, y]), 160),
        (lambda x, y: x.view(2, 5).t(), 0),
    ],
    ids=["copy_", "mul_", "cat", "a view"],
)
def test_traffic_is_what_is_read_and_written(work, nbytes):
    x, y = torch.ones(10), torch.ones(10)
    with ddp.Traffic() as traffic:
        work(x, y)
    assert traffic.nbytes == nbytes


# Training steps: on real ranks


def test_what_a_step_sends_and_moves():
    """Two layers of 512 × 512: a weight is just a MiB, so a small bucket is full with it and a bias."""
    whole = 2 * 4 * (512 * 512 + 512)
    counts = ddp.count(partial(ddp.linears, 2, 512), ddp.OWN_WIRE, 2)
    assert counts.pop(ddp.SHARED)[:2] == (0, 0)
    assert counts == {
        "torch": (1, whole, 2 * whole),
        "compute alone": (0, 0, 0),
        "naive": (4, whole, 2 * whole),
        "flat": (1, whole, 6 * whole),
        "overlap": (4, whole, 2 * whole),
        ddp.SMALL: (2, whole, 2 * whole),
        ddp.LARGE: (1, whole, 2 * whole),
        "torch again": (1, whole, 2 * whole),
    }


def test_a_gpu_is_waited_for_and_changes_no_gradient(monkeypatch):
    """0.5 s of forward, shared by weights as 1 to 4; in backward in reverse, and twice as long."""
    slept = []
    monkeypatch.setattr(ddp.time, "sleep", slept.append)
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 8)), torch.randn(3, 2)
    module(x).sum().backward()
    expected = [parameter.grad.clone() for parameter in module.parameters()]
    module.zero_grad()
    waiting = ddp.as_on_a_gpu(lambda: ddp.Task(lambda: module, lambda model: model(x).sum()), 0.5)
    waiting.loss(waiting.build()).backward()
    assert slept == pytest.approx([0.1, 0.4, 0.8, 0.2])
    assert all(torch.equal(p.grad, was) for p, was in zip(module.parameters(), expected, strict=True))


def test_steps_are_measured_on_both_wires():
    small = partial(ddp.gpt, 1, 32)
    waiting = partial(ddp.as_on_a_gpu, small, 1e-3)
    plain, emulated = ddp.measure({"small": small}, {"small": waiting}, rounds=1).cases()
    assert [step.variant for step in plain] == [*list(OWN_WIRE)[:-1], ddp.SHARED, "torch again"]
    names = [step.variant for step in emulated]
    assert names[:10] == list(ON_A_LINK)[:10]
    assert len(names) == 10 + ddp.SEARCHED + 1
    assert all(step.predicted_s is None for step in plain)
    assert all(step.predicted_s >= emulated[1].median_s for step in emulated)
    for each in (plain, emulated):
        assert len({step.loss for step in each if step.variant != ddp.COMPUTE}) == 1
        assert {step.counts.sent for step in each} == {0, each[0].nbytes}


def train_without_telling():
    task = ddp.linears(1, 8)
    alone = ddp.Replica(task, lambda module, group: module, dist.group.WORLD)
    together = ddp.Replica(task, ddp.NaiveDDP, dist.group.WORLD)
    for replica in (alone, together):
        replica.step()
    ddp.check_alike({"naive": together, ddp.COMPUTE: alone}, dist.group.WORLD)
    ddp.check_alike({"naive": together, "forgetful": alone}, dist.group.WORLD)


def test_a_variant_that_learns_something_else_gets_no_time():
    with pytest.raises(RankError, match="forgetful learned something else on rank"):
        launch(train_without_telling, world_size=2)
