"""Time calls on a GPU by events on its streams, without making a step wait for the GPU.

NCCL puts a call on a stream and returns at once. `wait()` only makes the current stream wait for
the call, and returns at once as well. So the host sees only when a call was issued. Each call gets
CUDA events, whose times a thread reads once they are complete, and converts to the host's clock,
`time.perf_counter()`.

The report of a hang reads the board, the file that all ranks share. A call that the GPU never
completes stays open there. A mark on the board says in which call a thread of a rank waits; `wait`
without a timeout sets no mark, because only the stream waits, and the program goes on.

These fields of a `Record`, the description of a call, have a meaning of their own on a GPU:
    stream   a name: that of its group, such as "world", since NCCL has a stream for each group; or
             "current", the stream on which NCCL runs a call that isn't asynchronous
    started  when its inputs were ready and the call before it on its stream was done; None until
             the call is complete
    waited   when the current stream (in a wait with a timeout, the program) began to wait for the
             call; from then on it stands still until the call is done; None before any wait
    reached  True once the call has been open for 0.3 s and the GPU has finished the earlier work on
             the current stream; otherwise, as in all quicker calls, False

A call that is captured in a CUDA graph is recorded once, on the stream "graph", as done when it was
captured, because captured events can't be queried. Replays of a graph aren't recorded.
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
from .uncompiled import uncompiled

LOOK_S = 0.05  # seconds between two reads of the events
LATE_S = 0.3  # seconds after which an open call is late
# Ops whose future in NCCL doesn't hold all their tensors, so that it doesn't wait for them.
WITHOUT_FUTURE = "send", "recv", "gather", "scatter"


class Cuda:
    """The CUDA functions that time calls on one GPU; tests put an emulation of it in its place."""

    def __init__(self, device: torch.device):
        self.device = device
        self._behind: dict[str, torch.cuda.Stream] = {}

    def mark(self) -> torch.cuda.Event:
        """Return a new timing event, recorded on the current stream after all work queued on it."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def mark_end(self, work: Work, record: Record) -> torch.cuda.Event:
        """Return a new event that is complete once `work` is, recorded on an extra stream.

        Only the extra stream waits for `work`, so the program isn't delayed. Each value of
        `record.stream` has its own extra stream, of high priority since torch hands out those of
        usual priority again and again, perhaps to the program. The extra stream waits for the
        future of `work`, because `work.wait()` would drop references to tensors, whose memory the
        program might then reuse while NCCL reads it. The future of a send, recv, gather or scatter
        (`WITHOUT_FUTURE`) may not cover all tensors. For these `work.block_current_stream()` is
        used. It drops the references as well, so the caller must keep the tensors.
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
        """Return (event, time): a complete event, and the host's `time.perf_counter()` at it.

        It blocks until the GPU is idle. The pair ties the GPU's clock to the host's: the times of
        later events are counted from this one.
        """
        torch.cuda.synchronize(self.device)
        begun = time.perf_counter()
        event = self.mark()
        torch.cuda.synchronize(self.device)
        return event, (begun + time.perf_counter()) / 2

    def capturing(self) -> bool:
        """Return whether the current stream is being captured into a CUDA graph.

        Events recorded in a capture can't be queried, so a call that is captured gets none.
        """
        return torch.cuda.is_current_stream_capturing()

    def use(self):
        """Prepare this thread for querying events, also while another thread captures a CUDA graph.

        The rank's GPU becomes the thread's current one. By default, a query in one thread while
        another captures is an error, and spoils the graph. So this thread sets its capture mode to
        "thread local", by a function of CUDA's runtime library: then a query is forbidden only
        while this thread itself captures. If the library can't be found, the default stays.
        """
        # Without this the thread would create a context on GPU 0.
        torch.cuda.set_device(self.device)
        thread_local = ctypes.c_int(1)
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).cudaThreadExchangeStreamCaptureMode(ctypes.byref(thread_local))


@uncompiled
class StreamWork(Work):
    """The handle of a call on a GPU, whose `wait` makes the current stream wait for the call.

    Without a timeout, `wait` returns at once, unless the run was launched with keep_values: then it
    blocks until the elements of a small result are in the record. With a timeout, it blocks the
    program until the call is complete, as NCCL's own handle does.
    inner: NCCL's own handle. For a message of `dist.batch_isend_irecv` it is None until `batch` has
        issued the whole batch; the program gets the `StreamWork` only then.
    record: the call's record.
    before: the CUDA event on the current stream just before the call; None in a CUDA graph.
    arriving: the tensors that the call fills, whose elements keep_values records.
    streams: the rank's `Streams`, which times the call and its wait.
    """

    def __init__(self, inner: Work | None, record: Record, before, arriving, streams: "Streams"):
        super().__init__()
        self.inner = inner
        self.record = record
        self.before = before
        self.arriving = arriving
        self.together = [record]  # all records of a batch: a wait for one message waits for all
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
    """The calls of a rank on its GPU that aren't complete yet, and the thread that times them.

    The thread copies the times of complete CUDA events into the records of the calls, and onto the
    board that all ranks share. CUDA gives these times as float32 milliseconds since an event made
    at the beginning, so they become coarser: 0.06 ms after a quarter of an hour.
    recorder: the rank's `Recorder`, which keeps its records. gpu: a `Cuda`, which makes the events.
    """

    def __init__(self, recorder, gpu):
        self.recorder = recorder
        self._gpu = gpu
        # (records, {field of the records: its event}, tensors to keep until these are complete)
        self._pending: deque[tuple[list[Record], dict, tuple]] = deque()
        self._busy_until: dict[str, float] = {}  # by stream
        self._reading = threading.Lock()
        self._origin, self._begun = gpu.both_clocks()
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="ddpkit streams")

    def watch(self):
        """Start the thread that reads the calls' CUDA events, every 0.05 s (`LOOK_S`)."""
        self._watcher.start()

    def stop(self, timeout_s: float):
        """End the reading thread, and wait `timeout_s` seconds at most until it has ended.

        If it hasn't by then, this returns all the same; but if Python shuts down while the thread
        is in a call of CUDA, the process may abort. Calls whose events it hasn't read stay open.
        """
        self._over.set()
        self._watcher.join(timeout_s)

    def _watch(self):
        """Read the events until `stop` is called; the body of the reading thread."""
        self._gpu.use()
        while not self._over.wait(LOOK_S):
            with contextlib.suppress(
                RuntimeError
            ):  # the GPU failed: the program gets the error as well
                self.read()

    def call(
        self,
        record: Record,
        call: Callable[[], Work | None],
        sent: Sequence[Tensor],
        arriving: Sequence[Tensor],
        asynchronous: bool = True,
    ) -> StreamWork | None:
        """Record an NCCL call, make it by `call()` between two events, and return a `StreamWork`.

        The StreamWork is the program's handle, in place of NCCL's.
        record: that of the call, send or receive; this method adds it to the recorder's list.
        call: makes the call, and returns NCCL's handle. For a message of a batch (of
            `dist.batch_isend_irecv`) it returns None, since the batch isn't issued yet; later the
            method `batch` puts NCCL's handle into the StreamWork, and makes the second event.
        sent, arriving: the tensors that NCCL reads, and those that it fills; at least one in all.
        asynchronous: False for a call that NCCL puts on the current stream. It needs no wait: NCCL
            returns no handle, and this method returns None.
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
        """Return call()'s result; while it runs, a mark on the board names the call.

        The first call with a peer blocks until NCCL has connected to it, perhaps for ever. From the
        mark, the report of a hang learns that this thread waits in the call.
        record: the call's record, whose number is written into the mark.
        """
        self.recorder.stands_at(record)
        try:
            return call()
        finally:
            self.recorder.waited()

    def batch(
        self, works: Sequence[StreamWork], complete: Callable[[], Work], tensors: Sequence[Tensor]
    ):
        """Let NCCL issue a batch of sends and receives by `complete()`, and put an event behind it.

        So all messages get one start, that of the first, and one end.
        works: the handles of the messages, whose `inner` is None until now. All get NCCL's one
            handle for the batch. In the records of all but the first, `batched` becomes True: it
            says that a message is in one batch with the message before it.
        complete: ends NCCL's coalescing, which issues the messages, and returns that one handle.
        tensors: those of all messages; they are kept alive until the batch is complete.
        """
        for work in works[1:]:
            work.record.batched = True
            self.recorder.write_again(work.record)
        self.end(works, self.make(works[-1].record, complete), tensors)

    def _captured(self, record: Record):
        """Mark a call captured in a CUDA graph as done, in its record and on the board.

        Its events couldn't be queried, so its start and its end are set to the time of its issue.
        """
        record.stream = "graph"
        record.started = record.issued
        self.recorder.done(record, at=record.issued)

    def end(self, works: Sequence[StreamWork], inner: Work, tensors: Sequence):
        """Put a CUDA event behind a call that was just made, or behind a whole batch.

        The reading thread notes the end by that event. In a CUDA graph the end is noted here.
        works: the handle of the call, or the handles of a batch.
        inner: NCCL's own handle of the call or batch; it is stored in each of `works`.
        tensors: those of the calls, which NCCL's handle keeps alive. But for a send, recv, gather
            or scatter (`WITHOUT_FUTURE`), whose future may not cover all tensors, `Cuda.mark_end`
            has a stream wait for the handle itself. The handle then drops the tensors while NCCL
            may still use them, so they are kept here.
        """
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
        """Make the current CUDA stream wait for an NCCL call, mostly without blocking the program.

        The first wait for a call gets an event, which shows when the stream began to wait. Only in
        a run launched with keep_values does this block the program: until a result of at most 64
        elements is complete, and copied into the record.
        """
        work.record.waits += 1
        if work.record.waits == 1 and not self._gpu.capturing():
            self._pending.append((work.together, {"waited": self._gpu.mark()}, ()))
        work.inner.wait()
        self.recorder.arrived(work.record, work.arriving)

    def read(self) -> list[Record]:
        """Note the times of complete CUDA events; return the records of calls with incomplete ones.

        It never blocks on the GPU. The records are in the order in which the events were made: each
        is there once if its call's own events are incomplete, and once for a wait whose event is.
        For a call that is still open 0.3 s (`LATE_S`) after its issue, `reached` is set as well: it
        tells the report of a hang whether the GPU has come to the call.
        """
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
            finally:  # an event that can't be queried now is queried again
                self._pending.extendleft(reversed(left))
            return [record for records, *_ in left for record in records]

    def _look_whether_reached(self, records: list[Record], events: dict):
        """Set `reached` to True in the records of a late call if the GPU has come to the call.

        This looks once, without waiting, and is called again and again. A call is late if it has
        been open for more than 0.3 s (`LATE_S`); in others `reached` stays False.
        records: the record of the call, or those of a batch of sends and receives.
        events: {time field of the records: the CUDA event that gives that time}; the event of
            "started" shows whether the GPU has reached the call.
        """
        is_late = time.perf_counter() - records[0].issued > LATE_S
        if is_late and not records[0].reached and "started" in events and events["started"].query():
            for record in records:
                record.reached = True
                self.recorder.write_again(record)

    def _note(self, records: list[Record], events: dict):
        """Copy the times of events into the records of a call, and onto the board.

        A call began at its event "started" or, if that was later, when the call before it on its
        stream was done. The GPU's clock drifts against the host's: a time that would lie before the
        issue of the call (in a batch, of the first) is replaced by the time of that issue.
        records: the record of the call, or those of a batch of messages, which all get these times.
        events: complete CUDA events: {"started": ..., "done": ...}, or separately {"waited": ...}.
        """
        times = {}
        for name, event in events.items():  # the clocks drift: no time may be before the call
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
        """Block until all calls are complete and their times are noted.

        Meanwhile the calling thread is marked on the board as waiting in the first incomplete call.
        If that never completes, this never returns, and by the mark a report finds where it hangs.
        """
        while left := self.read():
            self.recorder.stands_at(left[0])
            while (now := self.read()) and now[0] is left[0]:
                time.sleep(0.001)
            self.recorder.waited()
