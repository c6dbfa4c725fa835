"""Time calls on a GPU by CUDA events on its streams; no training step waits for the GPU.

NCCL queues a call on a stream and returns; `wait()` makes the current stream wait for it and
returns, too. So the host's clock only tells when a call was issued. Each call gets events, which a
thread reads once they have fired. A call that the GPU never finishes stays open on the board, for
a hang's report. `wait` doesn't mark the rank as waiting: its stream waits, but the program goes on.

In a record, on the clock of the host:
    stream   the stream of its group, or "current" for a synchronous call: NCCL runs it there
    started  when its inputs were ready and the call before it on its stream was done; None before
    waited   when the current stream began to wait for it: the time from then on is exposed

A call captured in a CUDA graph is recorded once, on the stream "graph", as done at its capture:
events must not be queried during a capture. Replays of the graph are not recorded.
"""

import contextlib
import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from .board import Record

LOOK_S = 0.05  # how often the events are read
LATE_S = 0.3  # a call that isn't over by then is late
# Their tensors are not all in NCCL's future, which then waits for nothing.
WITHOUT_FUTURE = "send", "recv", "gather", "scatter"


class Cuda:
    """The GPU operations that `Streams` needs; tests replace this class by one of their own."""

    def __init__(self, device: torch.device):
        self.device = device
        self._behind: dict[str, torch.cuda.Stream] = {}

    def mark(self) -> torch.cuda.Event:
        """Record a CUDA event on the current stream, after all work queued there, and return it."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def mark_end(self, work: Work, record: Record) -> torch.cuda.Event:
        """Record a CUDA event that fires when `work` completes, and return it.

        It is on a dedicated stream, so that no other work waits behind it: programs get streams
        from the pool of another priority. It waits for the work's future where it can, because
        `work.wait` releases tensors that NCCL may still read.
        """
        if record.stream not in self._behind:
            self._behind[record.stream] = torch.cuda.Stream(self.device, priority=-1)
        with torch.cuda.stream(self._behind[record.stream]):
            if record.op in WITHOUT_FUTURE:
                work.block_current_stream()
            else:
                work.get_future().wait()
            return self.mark()

    def both_clocks(self) -> tuple[torch.cuda.Event, float]:
        """Return a fired event and the host's time at which it fired: the only wait for the GPU."""
        torch.cuda.synchronize(self.device)
        begun = time.perf_counter()
        event = self.mark()
        torch.cuda.synchronize(self.device)
        return event, (begun + time.perf_counter()) / 2

    def capturing(self) -> bool:
        """Tell whether the current stream is being captured: then events must not be queried."""
        return torch.cuda.is_current_stream_capturing()

    def use(self):
        """Prepare this thread to query events: on this GPU, even while another thread captures.

        Setting the device avoids a context on GPU 0. By default CUDA forbids queries during another
        thread's capture, and they spoil its graph; the thread-local capture mode allows them. If
        the CUDA library isn't found, the default stays.
        """
        torch.cuda.set_device(self.device)
        thread_local = ctypes.c_int(1)
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).cudaThreadExchangeStreamCaptureMode(ctypes.byref(thread_local))


class StreamWork(Work):
    """The handle of a call on a GPU: `wait` makes the current stream wait for it, and returns.

    Given a timeout, `wait` blocks the program, as NCCL's does.
    inner: NCCL's handle; None until the call's batch is complete. before: the event recorded before
    the call; None if the call is captured in a graph.
    """

    def __init__(self, inner: Work | None, record: Record, before, arriving, streams: "Streams"):
        super().__init__()
        self.inner = inner
        self.record = record
        self.before = before
        self.arriving = arriving
        self.together = [record]  # the whole batch: waiting for one part waits for all
        self._streams = streams

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout:  # from C++ it is 0 where there is none
            self.record.limit_s = timeout.total_seconds()
            self._streams.recorder.wait(self.record, partial(self.inner.wait, timeout))
        self._streams.wait(self)
        return True

    synchronize = block_current_stream = wait

    def get_future(self) -> torch.futures.Future:
        self._streams.recorder.gave_future(self.record)
        return self.inner.get_future()

    def is_completed(self) -> bool:
        is_completed = self.inner.is_completed()
        if not is_completed:
            self._streams.recorder.polled(self.record)
        return is_completed

    def result(self):
        return self.inner.result()


class Streams:
    """The CUDA events of a rank's calls. gpu: the `Cuda` that makes them.

    Event times are float32 milliseconds since the start: after 15 minutes, accurate to 0.06 ms.
    """

    def __init__(self, recorder, gpu):
        self.recorder = recorder
        self._gpu = gpu
        # (records, {field of theirs: event}, tensors that are needed until it is over)
        self._pending: deque[tuple[list[Record], dict, tuple]] = deque()
        self._busy_until: dict[str, float] = {}  # by stream
        self._reading = threading.Lock()
        self._origin, self._begun = gpu.both_clocks()
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="ddpkit streams")

    def watch(self):
        """Start the thread that reads the events."""
        self._watcher.start()

    def stop(self, timeout_s: float):
        """Stop the reading thread, waiting up to `timeout_s`: it runs C++, see `Session.leave`."""
        self._over.set()
        self._watcher.join(timeout_s)

    def _watch(self):
        self._gpu.use()
        while not self._over.wait(LOOK_S):
            with contextlib.suppress(RuntimeError):  # the GPU failed: the program gets an error
                self.read()

    def call(
        self,
        record: Record,
        call: Callable[[], Work | None],
        sent: Sequence[Tensor],
        arriving: Sequence[Tensor],
        asynchronous: bool = True,
    ) -> StreamWork | None:
        """Record a call, make it with events before and after it, and return its handle.

        Returns None for a synchronous call, as NCCL does; it runs on the current stream.
        """
        record.stream = record.group if asynchronous else "current"
        record.started = None
        self.recorder.issue(record, sent, (*sent, *arriving)[0])
        before = None if self._gpu.capturing() else self._gpu.mark()
        inner = self.make(record, call)
        if asynchronous:
            work = StreamWork(inner, record, before, arriving, self)
            if inner is not None:
                self.end([work], inner, (sent, arriving))
            return work
        if before is None:
            self._captured(record)
            return None
        self._pending.append(([record], {"waited": before}, ()))
        self._pending.append(([record], {"started": before, "done": self._gpu.mark()}, ()))
        self.recorder.arrived(record, arriving)
        return None

    def make(self, record: Record, call: Callable[[], Work | None]) -> Work | None:
        """Make a call and return its work. NCCL blocks here until it has connected to its peers."""
        self.recorder.stands_at(record)
        try:
            return call()
        finally:
            self.recorder.waited()

    def batch(self, works: Sequence[StreamWork], complete: Callable[[], Work]):
        """Complete a batch: only now are its messages started, all together."""
        for work in works[1:]:
            work.record.batched = True
            self.recorder.write_again(work.record)
        self.end(works, self.make(works[-1].record, complete))

    def _captured(self, record: Record):
        record.stream = "graph"
        record.started = record.issued
        self.recorder.done(record, at=record.issued)

    def end(self, works: Sequence[StreamWork], inner: Work, tensors: tuple = ()):
        """Record an event at the end of `inner`, the work of one call or of a batch, `works`."""
        records = [work.record for work in works]
        for work in works:
            work.inner = inner
            work.together = records
        first = works[0]
        if first.before is None:
            for record in records:
                self._captured(record)
            return
        events = {"started": first.before, "done": self._gpu.mark_end(inner, first.record)}
        kept = tensors if first.record.op in WITHOUT_FUTURE else ()
        self._pending.append((records, events, kept))

    def wait(self, work: StreamWork):
        """Make the current stream wait for `work`."""
        work.record.waits += 1
        if work.record.waits == 1 and not self._gpu.capturing():
            self._pending.append((work.together, {"waited": self._gpu.mark()}, ()))
        work.inner.wait()
        self.recorder.arrived(work.record, work.arriving)

    def read(self) -> list[Record]:
        """Record which calls are complete, without waiting; return the records of all others."""
        with self._reading:
            left = []
            try:
                for _ in range(len(self._pending)):
                    left.append(self._pending.popleft())
                    records, events, _ = left[-1]
                    if all(event.query() for event in events.values()):
                        self._note(records, events)
                        left.pop()
                    else:
                        self._look_whether_reached(records, events)
            finally:  # an event that can't be asked now is asked again
                self._pending.extendleft(reversed(left))
            return [record for records, *_ in left for record in records]

    def _look_whether_reached(self, records: list[Record], events: dict):
        """Record that the GPU has reached a late call: all work queued before it is done."""
        is_late = time.perf_counter() - records[0].issued > LATE_S
        if is_late and not records[0].reached and "started" in events and events["started"].query():
            for record in records:
                record.reached = True
                self.recorder.write_again(record)

    def _note(self, records: list[Record], events: dict):
        times = {}
        for name, event in events.items():  # two clocks drift apart: nothing is before its call
            at = self._begun + self._origin.elapsed_time(event) / 1e3
            times[name] = max(at, records[0].issued)
        if "waited" in times:
            for record in records:
                record.waited = record.waited or times["waited"]
                self.recorder.write_again(record)
            return
        stream = records[0].stream
        started = max(times["started"], self._busy_until.get(stream, 0.0))
        self._busy_until[stream] = times["done"]
        for record in records:
            record.started = started
            self.recorder.done(record, at=max(times["done"], record.issued))

    def settle(self):
        """Block until all calls are done; mark the rank as waiting, since one may never be."""
        while left := self.read():
            self.recorder.stands_at(left[0])
            while (now := self.read()) and now[0] is left[0]:
                time.sleep(0.001)
            self.recorder.waited()
