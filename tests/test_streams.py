"""Calls on a GPU: their times from events, hangs on a stream, and steps that don't wait for it."""

import contextlib
import itertools
import json
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from fake_nccl import on_nccl
from test_board import call
from torch.testing._internal.distributed.fake_pg import FakeStore

from ddpkit import HangError, ddp, launch, zero
from ddpkit.fast import buckets
from ddpkit.fast import zero as fast_zero
from ddpkit.lesson import figures
from ddpkit.runtime import run
from ddpkit.runtime.board import RETURNED, RUNNING, Board
from ddpkit.runtime.look import ON_STREAM, Look
from ddpkit.runtime.recorder import Recorder, recorder
from ddpkit.runtime.report import explain_deadlock, report
from ddpkit.runtime.streams import Cuda, Streams

ONE = torch.ones(1)


class Event:
    """Over when `at` is set: seconds on a clock that shows 7 when the host's shows 100."""

    at = None

    def query(self):
        return self.at is not None

    def elapsed_time(self, other):
        return 1e3 * (other.at - self.at)


class Gpu:
    """Makes events, which `happen` in the order of their making, or never (None)."""

    captures = False

    def capturing(self):
        return self.captures

    def __init__(self):
        self.events = []

    def both_clocks(self):
        origin = Event()
        origin.at = 7
        return origin, 100.0

    def mark(self, *_):
        self.events.append(Event())
        return self.events[-1]

    mark_end = mark

    def happen(self, *times):
        for event, at in zip(self.events, times, strict=True):
            event.at = None if at is None else at - 93


class Inner:
    """NCCL's handle; counts the waits that reach it."""

    waits = 0

    def wait(self):
        self.waits += 1


@pytest.fixture
def board(tmp_path):
    board = Board(tmp_path / "board", 2, create=True)
    for rank in (0, 1):
        board.set_state(rank, RUNNING)
    yield board
    board.close()


@pytest.fixture
def streams(board):
    return Streams(Recorder(0, board), Gpu())


def start(streams, inner=None, asynchronous=True, **said):
    record = call(**said)
    given = (inner or Inner()) if asynchronous else None
    return record, streams.call(record, lambda: given, [ONE], [ONE], asynchronous)


def test_the_thread_that_reads_events_ends_before_its_rank_does(streams):
    streams._gpu.use = lambda: None
    streams.watch()
    assert "ddpkit streams" in [thread.name for thread in threading.enumerate()]
    streams.stop(timeout_s=60)
    assert "ddpkit streams" not in [thread.name for thread in threading.enumerate()]


# Times.


def test_times_are_the_hosts_and_a_call_starts_when_its_stream_is_free(streams):
    first, work = start(streams)
    second, _ = start(streams)
    work.wait()
    streams._gpu.happen(101, 103, 101.5, 104, 102)
    assert streams.read() == []
    told = [(r.started, r.done, r.waited) for r in (first, second)]
    assert told == [(101, 103, 102), (103, 104, None)]
    assert [r.stream for r in (first, second)] == ["world", "world"]
    assert [r.done for r in streams.recorder.board.records(0)] == [103, 104]


def test_what_never_ends_stays_open_and_stops_no_other_stream(streams):
    stuck, _ = start(streams)
    other, _ = start(streams, group="group [0, 1]")
    assert streams.read() == streams.read() == [stuck, other]
    streams._gpu.happen(101, None, 101.5, 102)
    assert streams.read() == streams.read() == [stuck]
    assert (stuck.started, stuck.done, stuck.on_stream) == (None, None, True)
    assert (other.started, other.done, other.on_stream) == (101.5, 102, False)
    streams._gpu.happen(101, 105, 101.5, 102)
    assert streams.read() == []
    assert (stuck.started, stuck.done) == (101, 105)


def test_a_call_that_is_not_asynchronous_is_exposed_from_begin_to_end(streams):
    record, handle = start(streams, asynchronous=False)
    streams._gpu.happen(101, None)
    streams.read()
    assert (record.waited, record.done) == (101, None)  # so that a hang is seen
    streams._gpu.happen(101, 103)
    streams.read()
    assert handle is None
    assert (record.stream, record.started, record.waited, record.done) == ("current", 101, 101, 103)


def test_the_calls_of_a_batch_end_together(streams):
    works = [streams.call(call(op=op), lambda: None, [ONE], ()) for op in ("send", "recv")]
    assert [work.inner for work in works] == [None, None]
    whole = Inner()
    streams.batch(works, lambda: whole, [ONE])
    assert streams._pending[0][-1] == [ONE]  # the program may drop what it sends
    streams._gpu.happen(101, 101.5, 103)
    assert streams.read() == []
    assert [(w.record.started, w.record.done) for w in works] == [(101, 103), (101, 103)]
    works[0].wait()
    works[1].wait()
    assert whole.waits == 2


def test_every_wait_puts_a_stream_behind_the_call_and_stops_nobody(streams):
    inner = Inner()
    record, work = start(streams, inner)
    for wait in (work.wait, work.block_current_stream):  # perhaps on another stream
        assert wait()
        assert streams.recorder.board.waiting(0) == []
    assert (inner.waits, record.waits) == (2, 2)
    streams._gpu.happen(101, 103, 102)  # no event for the second
    streams.read()
    assert record.waited == 102


def test_who_waits_for_one_part_of_a_batch_waits_for_all(streams):
    works = [streams.call(call(op=op), lambda: None, [ONE], ()) for op in ("send", "recv")]
    streams.batch(works, Inner, [ONE])
    works[1].wait()
    streams._gpu.happen(101, 101.5, 103, 102)
    streams.read()
    records = streams.recorder.board.records(0)
    assert [(r.waited, r.batched) for r in records] == [(102, False), (102, True)]


def test_the_first_call_stops_the_host_and_is_marked(streams):
    seen = []

    def connects():
        seen.append(streams.recorder.board.waiting(0))
        return Inner()

    streams.call(call(), connects, [ONE], [ONE])
    assert seen == [[0]]
    assert streams.recorder.board.waiting(0) == []


def test_nothing_is_over_before_it_was_called(streams):
    """Two clocks drift apart."""
    asynchronous, work = start(streams, issued=101.0)
    work.wait()
    at_once, _ = start(streams, asynchronous=False, issued=101.5)
    streams._gpu.happen(100, 100.5, 100.2, 100.7, 100.8)
    streams.read()
    told = [(r.started, r.done, r.waited) for r in (asynchronous, at_once)]
    assert told == [(101, 101, 101), (101.5, 101.5, 101.5)]


def test_an_event_that_may_not_be_asked_is_asked_again(streams):
    """While another thread captures a graph: the one that reads lives on, and nothing is lost."""
    records = [start(streams)[0] for _ in range(2)]
    streams._gpu.use = lambda: None
    streams._gpu.happen(101, 103, 103, 105)
    event, asked = streams._gpu.events[0], []

    def query():
        asked.append(1)
        if len(asked) < 3:
            raise RuntimeError("operation not permitted when stream is capturing")
        return True

    event.query = query
    with pytest.raises(RuntimeError, match="capturing"):
        streams.read()
    streams.watch()
    until = time.perf_counter() + 20
    while records[1].done is None and time.perf_counter() < until:
        time.sleep(0.001)
    assert [r.done for r in records] == [103, 105]


def test_what_is_captured_gets_no_events(streams):
    streams._gpu.captures = True
    at_once, _ = start(streams, asynchronous=False, issued=1.0)
    single, work = start(streams, issued=2.0)
    work.wait()
    batch = [call(op=op, issued=3.0) for op in ("send", "recv")]
    works = [streams.call(record, lambda: None, [ONE], ()) for record in batch]
    streams.batch(works, Inner, [ONE])
    assert streams._gpu.events == []
    assert streams.read() == []
    for record in (at_once, single, *batch):
        assert (record.stream, record.started, record.done) == ("graph", *[record.issued] * 2)
        assert not record.on_stream


@pytest.mark.parametrize("op", ["gather", "all_reduce"])
def test_tensors_that_nobody_else_keeps_are_kept_until_the_end(streams, op):
    start(streams, op=op)
    kept = [tensors for *_, tensors in streams._pending]
    assert kept == [([ONE], [ONE]) if op == "gather" else ()]
    streams._gpu.happen(101, 103)
    streams.read()
    assert not streams._pending


def test_settle_marks_the_rank_as_waiting_until_all_is_done(streams):
    record, _ = start(streams)
    streams._gpu.happen(101, None)
    board, settling = streams.recorder.board, threading.Thread(target=streams.settle, daemon=True)
    settling.start()
    until = time.perf_counter() + 20
    while board.waiting(0) != [0] and time.perf_counter() < until:
        time.sleep(0.001)
    assert board.waiting(0) == [0]
    streams._gpu.happen(101, 103)
    settling.join(20)
    assert not settling.is_alive()
    assert board.waiting(0) == []
    assert (record.waited, record.done) == (None, 103)  # the training didn't wait for it


def test_timeline_and_trace_have_a_lane_for_each_stream(streams, tmp_path):
    records = [start(streams)[0], start(streams, asynchronous=False)[0], start(streams)[0]]
    streams._gpu.happen(101, 103, 102, 105, 102, 104)
    streams.read()
    picture = figures.timeline(SimpleNamespace(wire=[records]))
    assert repr(picture).endswith("Lanes of streams: world, current.")
    boxes = [each.get_paths() for each in picture.figure.axes[0].collections[-2:]]
    world, current = [[path.get_extents() for path in paths] for paths in boxes]
    assert [len(world), len(current)] == [2, 1]
    assert max(box.y1 for box in world) <= min(box.y0 for box in current)
    path = tmp_path / "trace.json"
    run.Run([None], [""], [records], 0.0, "").trace(path)
    events = json.loads(path.read_text())["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(lanes.values()) == ["program", "stream world", "stream current"]
    spans = [(lanes[e["tid"]], e["ts"], e["dur"]) for e in events if e["name"] == "all_reduce"]
    first = spans[0][1]
    assert [(lane, ts - first, dur) for lane, ts, dur in spans] == [
        ("stream world", 0, 2e6),
        ("stream world", 2e6, 1e6),
        ("stream current", 1e6, 3e6),
    ]


@pytest.mark.parametrize("op", ["all_reduce", "gather", "send"])
def test_an_end_is_marked_behind_the_call_and_lets_go_of_nothing(op, monkeypatch):
    """A work's wait() would; the future of some knows no tensors."""
    said, cuda = [], torch.cuda
    monkeypatch.setattr(cuda, "Stream", lambda device, priority: f"stream {len(said)}")
    monkeypatch.setattr(cuda, "stream", lambda name: contextlib.nullcontext(said.append(name)))
    monkeypatch.setattr(cuda, "current_stream", lambda device: said[0])
    mark = SimpleNamespace(record=said.append)
    monkeypatch.setattr(cuda, "Event", lambda enable_timing: mark)
    future = SimpleNamespace(wait=lambda: said.append("future"))
    work = SimpleNamespace(
        get_future=lambda: future, block_current_stream=lambda: said.append("work")
    )
    gpu = Cuda(torch.device("cuda", 0))
    for _ in range(2):
        assert gpu.mark_end(work, call(op=op, stream="world")) is mark
    behind = "future" if op == "all_reduce" else "work"
    assert said == ["stream 0", behind, "stream 0"] * 2


# Hangs.


def on_stream(board, rank, **said):
    """`rank`'s stream waits for a call, its program goes on."""
    board.put(rank, board.calls(rank), call(waited=1.0, **said))


def test_a_stream_waits_for_ever_only_if_no_program_may_still_come(board):
    on_stream(board, 0)
    look = Look(board)
    assert [(s.state, s.missing) for s in look.now] == [(ON_STREAM, (1,)), ("computing", ())]
    assert look.deadlocked() == []
    on_stream(board, 1, channel="another")  # each for the other, but both programs may come
    assert Look(board).deadlocked() == []
    board.set_waiting(1, 0)  # rank 0 still may
    look = Look(board)
    assert look.deadlocked() == []
    look.now[0].state = "waiting"
    assert look.deadlocked() == [0, 1]
    board.set_state(1, RETURNED)
    look = Look(board)
    assert look.deadlocked() == [0]
    headline, advice = explain_deadlock(look, [0])
    assert headline == "deadlock: rank 0 waits in all_reduce for rank 1, which has returned."
    text = report(headline, advice, look)
    assert "rank 0: its stream waiting for rank 1 in all_reduce(8 float32, sum)" in text
    board.put(0, 0, call(waited=1.0, started=1.0, done=2.0))
    assert [s.state for s in Look(board).now] == ["computing", "returned"]


def test_streams_that_wait_for_each_other_have_hang_after():
    """Their programs, of which nothing is heard, might still come."""

    def waits():
        groups = dist.group.WORLD, dist.new_group([0, 1])
        for group in groups:
            dist.all_reduce(torch.ones(1), group=group)  # from now on they are connected
        dist.all_reduce(torch.ones(1), group=groups[dist.get_rank()], async_op=True).wait()
        time.sleep(60)

    with pytest.raises(HangError) as caught:
        launch(on_nccl(waits, reads=False), world_size=2, timeout=60, hang_after=1.0)
    said = "deadlock: each waits for another: rank 0 for rank 1 in all_reduce, rank 1 for rank 0"
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_call_that_never_ends_is_reported_as_on_the_cpu(goes_on):
    def waits():
        work = dist.all_reduce(torch.ones(1), async_op=True)
        work.wait()
        if dist.get_rank() == 0:
            work = dist.all_reduce(torch.ones(1), async_op=True)
            work.wait()
            time.sleep(60 * goes_on)

    with pytest.raises(HangError) as caught:
        launch(on_nccl(waits, reads=False), world_size=2, timeout=60)
    text = str(caught.value)
    assert text.startswith("deadlock: rank 0 waits in all_reduce for rank 1, which has returned.")
    state = "its stream waiting" if goes_on else "waiting"
    assert f"rank 0: {state} for rank 1 in all_reduce(1 float32, sum)\n" in text


def test_a_run_ends_with_the_times_of_all_calls():
    def waits():
        works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(3)]
        works[0].wait()

    for records in launch(on_nccl(waits), world_size=2, timeout=60).wire:
        assert all(r.issued <= r.started <= r.done for r in records)
        assert all(a.done <= b.started for a, b in itertools.pairwise(records))
        assert [r.waited is None for r in records] == [False, True, True]


# No step waits for the GPU.


def trained_by(make, optimizer, device):
    """A step of training, as a function."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)).to(device)
    x = torch.ones(4, 8, device=device)
    if make in ZEROS:
        optimizer = make(model.parameters(), optimizer, bucket_cap_mb=1e-4, lr=0.1)
    else:
        model = make(model)
        optimizer = optimizer(model.parameters(), lr=0.1)

    def step():
        model(x).square().mean().backward()
        if make not in ZEROS:
            model.synchronize()
        elif make is fast_zero.ZeroOptimizer:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


ZEROS = zero.ZeroOptimizer, fast_zero.ZeroOptimizer
WRAPPERS = ddp.NaiveDDP, ddp.FlatDDP, ddp.OverlapDDP, ddp.BucketedDDP, buckets.BucketedDDP, *ZEROS
OPTIMIZERS = torch.optim.SGD, torch.optim.AdamW


def name(each):
    return f"{each.__module__}.{each.__name__}".removeprefix("ddpkit.").removeprefix("torch.")


@pytest.fixture
def alone_in_a_fake_world(monkeypatch):
    monkeypatch.setattr("ddpkit.data_parallel.check_same_on_all_ranks", lambda *_: None)
    monkeypatch.setattr("ddpkit.zero.optimizer.check_same_on_all_ranks", lambda *_: None)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=name)
@pytest.mark.parametrize("make", WRAPPERS, ids=name)
def test_a_step_asks_for_no_number(make, optimizer, alone_in_a_fake_world):
    """Tensors on "meta" have none: .item(), bool(x), x.cpu() and the like raise."""
    step = trained_by(make, optimizer, "meta")
    step()
    step()


@pytest.mark.gpu
def test_a_step_on_a_gpu_never_stops_the_program():
    """As far as PyTorch's own alarm sees it, which leaves out torch.distributed's C++."""

    def train():
        failed = {}
        for make, optimizer in itertools.product(WRAPPERS, OPTIMIZERS):
            step = trained_by(make, optimizer, "cuda")
            step()
            step()  # by now the order of gradients is known
            torch.cuda.set_sync_debug_mode("error")
            try:
                step()
            except RuntimeError as error:
                failed[name(make), name(optimizer)] = str(error)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return failed

    world_size = torch.cuda.device_count()
    assert list(launch(train, world_size=world_size, timeout=60)) == [{}] * world_size


@pytest.mark.gpu
def test_a_stream_that_waits_for_ever_is_reported():
    def skips():
        x = torch.ones(1, device="cuda")
        dist.all_reduce(x)  # from now on they are connected
        if dist.get_rank() == 0:
            dist.all_reduce(x)
            x.item()

    with pytest.raises(HangError) as caught:
        launch(skips, world_size=2, backend="nccl", timeout=60)
    said = "deadlock: rank 0 waits in all_reduce for rank 1, which has returned."
    assert str(caught.value).startswith(said)
    assert "rank 0: its stream waiting for rank 1" in str(caught.value)


@pytest.mark.gpu
def test_records_of_a_gpu_are_in_order_and_overlap_with_computing():
    def use():
        x, weight = torch.ones(2**24, device="cuda"), torch.ones(4096, 4096, device="cuda")
        dist.all_reduce(x)  # what is done once
        dist.barrier()
        begun = len(recorder().records)
        work = dist.all_reduce(x, async_op=True)
        for _ in range(10):
            weight @ weight
        issued = time.perf_counter()
        work.wait()
        dist.all_reduce(x)
        recorder().settle()
        return begun, issued

    run = launch(use, world_size=torch.cuda.device_count(), timeout=60)
    for (begun, issued), records in zip(run, run.wire, strict=True):
        overlapped, current = records[begun:]
        assert (overlapped.stream, current.stream) == ("world", "current")
        for record in (overlapped, current):
            assert record.issued <= record.started + 1e-3  # two clocks
            assert record.started <= record.done
        assert overlapped.started < overlapped.waited
        assert issued < overlapped.waited + 1e-3  # products were still computed
        assert max(overlapped.waited, overlapped.done) <= current.started + 1e-3
        assert current.waited == current.started
