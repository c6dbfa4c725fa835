"""NCCL without a GPU: a fake, on which the wire's own code for NCCL runs, with tensors on the CPU.

    launch(on_nccl(function), world_size=2)  # the world of `function` is one of NCCL's, as it seems

Streams are threads that do one operation after the other, Gloo carries the data. It was written
beside ProcessGroupNCCL.cpp (torch 2.10) and NCCL 2.28; where they disagree, they are right.

As they do:
- A collective that isn't asynchronous returns None and runs on the current stream, others on the
  group's (`ProcessGroupNCCL::collective`); it is complete when an event is over, and its future is
  complete at once for Python, on a stream that is put behind it.
- `wait` puts the current stream behind the call; a barrier's, or with a timeout, it stops the host
  (`WorkNCCL::wait`).
- The first collective of a communicator, and the first message to or from a peer, stop the *host*
  until the others do the same (NCCL connects lazily: `ncclTransportP2pSetup`).
- A group that was connected eagerly has one line for all that isn't batched, messages too
  (`ProcessGroupNCCL::pointToPoint`): what can't run holds up what is behind it. Tags are ignored.
- A batch is one operation, and its calls return None (`startCoalescing`, `endCoalescing`).
- To make a communicator, or to split one without a color, is a call of all its members
  (`eagerConnectSingleDevice`, `performNocolorSplit`).
- Backward, and the hooks in it, run in a thread of autograd's, while the caller waits.
- While a thread captures a graph, an event's query spoils it, unless the asking thread has said
  otherwise (`cudaThreadExchangeStreamCaptureMode`); what is captured runs at `replay`.

Stricter: a send never ends before it is received, as if NCCL had no buffers.
Not at all: memory, several devices, what a kernel computes (it computes at once, so the host stops
where a program on a GPU would use what has arrived: `reads`), errors, splits with a color.
"""

import contextlib
import ctypes
import multiprocessing
import os
import queue
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

from ddpkit.runtime import streams, wire

DEVICE = torch.device("cuda", 0)  # of the groups; no tensor is there
IN_TURN = "send", "recv"
RECORDED = wire.WireGroup.broadcast.__qualname__
COLLECTIVES = {
    name
    for name, method in vars(wire.WireGroup).items()
    if getattr(method, "__qualname__", "") == RECORDED
}


def on_nccl(function, reads=True):
    """Return `function` for a world over the fake.

    reads: the program uses at once what it has waited for, as by `x.item()`, and so stops.
    """
    folder = str(Path(__file__).parent)

    def rank(*args, **kwargs):
        sys.path.append(folder)  # classes that inherit from torch's in C++ don't travel by value
        import fake_nccl

        fake_nccl.join(reads)
        return function(*args, **kwargs)

    return rank


def join(reads: bool) -> None:
    """Leave this rank's world for one over the fake, as `worker.join_world` makes it."""
    recorder, rank, world_size = wire.recorder(), dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    recorder.joined = False
    install(reads)
    wire.register_wire(recorder, "nccl", DEVICE, one_machine=True)
    folder = Path(multiprocessing.current_process()._config["tempdir"])
    store = dist.FileStore(str(folder / "fake"), world_size)
    dist.init_process_group("ddpkit", store=store, rank=rank, world_size=world_size)


def install(reads: bool) -> None:
    """Put the fake where the wire, and torch, look for a GPU and for NCCL."""
    gpu = Gpu()
    for name in Gpu.OF_TORCH:
        setattr(torch.cuda, name, getattr(gpu, name))
    torch.cuda.Event, torch.cuda.Stream = Event, Stream
    torch.cuda.nccl.version = lambda: (2, 28, 9)
    torch.accelerator.is_available = lambda: True
    torch.accelerator.current_accelerator = lambda check_available=False: DEVICE
    cudart = SimpleNamespace(cudaThreadExchangeStreamCaptureMode=gpu.exchange_capture_mode)
    streams.ctypes = SimpleNamespace(CDLL=lambda _: cudart, c_int=ctypes.c_int, byref=ctypes.byref)
    dist.ProcessGroupNCCL = ProcessGroupNCCL
    make = wire.WireGroup.__init__
    wire.WireGroup.__init__ = lambda self, inner, *rest: make(self, Inner(inner), *rest)
    wire.WireGroup._device_types = property(lambda self: [torch.device("cpu")])  # for objects
    wire.WireGroup._streams = lambda self, tensors: self.recorder.streams if tensors else None
    if reads:
        wire.Streams = StreamsOfAReader
    run_backward_in_a_thread()


def run_backward_in_a_thread() -> None:
    original, device_thread = torch.autograd._engine_run_backward, ThreadPoolExecutor(1)

    def _engine_run_backward(*args, **kwargs):
        if threading.current_thread() in device_thread._threads:  # backward within a backward
            return original(*args, **kwargs)
        return device_thread.submit(original, *args, **kwargs).result()

    its_code = _engine_run_backward.__code__.replace(co_filename=torch.autograd.graph.__file__)
    _engine_run_backward.__code__ = its_code  # as torch's own: a report names who called it
    torch.autograd._engine_run_backward = _engine_run_backward


# What torch.cuda has


class Stream:
    """Does one operation after the other, in a thread."""

    def __init__(self, device=None, priority=0):
        self._operations = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, operation):
        self._operations.put(operation)

    def wait_event(self, event):
        self.put(event.over.wait)

    def synchronize(self):
        event = Event()
        event.record(self)
        event.over.wait()

    def _run(self):
        with contextlib.suppress(RuntimeError):  # a peer has died: what waits for it never ends
            while True:
                self._operations.get()()


class Event:
    """Over once its stream has come to it."""

    def __init__(self, enable_timing=False):
        self.over, self.captured = threading.Event(), False

    def record(self, stream=None):
        self.over, self.captured = threading.Event(), torch.cuda.is_current_stream_capturing()
        (stream or torch.cuda.current_stream()).put(self._happen)

    def _happen(self):
        self.at = time.perf_counter()
        self.over.set()

    def query(self):
        torch.cuda.check_query(self)
        return self.over.is_set()

    def elapsed_time(self, other):
        return 1e3 * (other.at - self.at)


class Gpu:
    """Its current streams, and the graph that is captured."""

    OF_TORCH = "current_stream", "stream", "synchronize", "set_device", "graph", "check_query"
    OF_TORCH += ("is_current_stream_capturing",)

    def __init__(self):
        self.program = Stream()
        self._this_thread = threading.local()
        self._graph: Graph | None = None  # that is captured now

    def current_stream(self, device=None):
        return getattr(self._this_thread, "stream", self.program)

    @contextlib.contextmanager
    def stream(self, stream):
        before, self._this_thread.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._this_thread.stream = before

    def synchronize(self, device=None):
        self.program.synchronize()

    def set_device(self, device):
        pass

    @contextlib.contextmanager
    def graph(self):
        """Capture what this thread does, in the default mode, the global one."""
        self._graph = Graph(threading.get_ident())
        try:
            with self.stream(self._graph):
                yield self._graph
        finally:
            graph, self._graph = self._graph, None
        if graph.spoilt:
            raise RuntimeError("operation failed due to a previous error during capture")

    def is_current_stream_capturing(self):
        return isinstance(self.current_stream(), Graph)

    def exchange_capture_mode(self, mode):
        self._this_thread.lets_others_capture = True

    def check_query(self, event):
        graph = self._graph
        if event.captured or (
            graph is not None
            and graph.thread != threading.get_ident()
            and not getattr(self._this_thread, "lets_others_capture", False)
        ):
            if graph is not None:
                graph.spoilt = True
            raise RuntimeError("operation not permitted when stream is capturing")


class Graph:
    """A stream that notes its operations, to do them at `replay`."""

    def __init__(self, thread: int):
        self.thread, self.spoilt, self._operations = thread, False, []

    def put(self, operation):
        self._operations.append(operation)

    def wait_event(self, event):
        self.put(event.over.wait)

    def replay(self):
        for operation in self._operations:
            torch.cuda.current_stream().put(operation)


class StreamsOfAReader(streams.Streams):
    """The program uses at once what it has waited for: it stops, and nothing marks it."""

    def call(self, record, call, sent, arriving, asynchronous=True):
        work = super().call(record, call, sent, arriving, asynchronous)
        if not asynchronous:
            self._read()
        return work

    def wait(self, work):
        super().wait(work)
        self._read()

    def _read(self):
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().synchronize()


# What torch.distributed has


class NCCLWork(Work):
    """The handle of an operation; `end` is over when it is."""

    def __init__(self, end: Event, future: torch.futures.Future, result: list, is_barrier=False):
        super().__init__()
        self._end, self._future, self._result = end, future, result
        self._is_barrier = is_barrier

    def wait(self, timeout=None):
        stream = torch.cuda.current_stream()
        if timeout and not self._end.over.wait(timeout.total_seconds()):
            raise dist.DistBackendError("Watchdog caught collective operation timeout: WorkNCCL")
        stream.wait_event(self._end)
        if self._is_barrier:
            stream.synchronize()
        return True

    synchronize = block_current_stream = wait

    def get_future(self):
        return self._future

    def is_completed(self):
        return self._end.query()

    def result(self):
        return self._result


class NCCLFuture(torch.futures.Future):
    """Over for C++ when the operation is; in Python, it puts a stream behind that."""

    def __init__(self, end: Event):
        super().__init__()
        self._end = end

    def wait(self):
        stream = torch.cuda.current_stream()
        if stream is not torch.cuda.current_stream.__self__.program:
            return stream.wait_event(self._end)
        return super().wait()  # the program's own: it reads what arrived


class Inner:
    """torch's ProcessGroup as the wire finds it on GPUs: all tensors go to NCCL."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group  # torch's own, with both backends

    def __getattr__(self, name):
        if name in COLLECTIVES:
            return partial(self.nccl.collective, name)
        return getattr(self.nccl if name in IN_TURN else self.group, name)

    @property
    def nccl(self):
        return self.group._get_backend(torch.device("cuda"))

    def _get_backend(self, device):
        return self.nccl

    def name(self):
        return "nccl"

    def barrier(self, opts):
        return self.nccl.barrier(opts)

    def recv_anysource(self, tensors, tag):
        raise NotImplementedError("ProcessGroupNCCL does not support recvAnysource")

    def _start_coalescing(self, device):
        self.nccl.batch = []

    def _end_coalescing(self, device):
        batch, self.nccl.batch = self.nccl.batch, None
        return self.nccl.messages(batch)


class ProcessGroupNCCL(dist.ProcessGroupGloo):
    """One communicator, its line and its stream. It is Gloo's for C++, which carries the data."""

    made: list["ProcessGroupNCCL"] = []  # noqa: RUF012
    supports_splitting = True

    class Options:
        def __init__(self):
            self._timeout = timedelta(minutes=10)
            self.global_ranks_in_group = []

    def __init__(self, store, rank: int, size: int, options: Options):
        gloo = dist.ProcessGroupGloo._Options()
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        gloo._timeout = wire.NEVER
        super().__init__(dist.PrefixStore("fake", store), rank, size, gloo)
        self.given, self.communicators, self.barrier_device = options, 0, None
        self._store, self._rank, self._size = store, rank, size
        self._carrier = dist.ProcessGroup(store, rank, size)
        self._carrier._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._carrier._register_backend(
            torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self
        )
        self.stream, self.batch = Stream(), None
        self._connected: set[tuple] = set()
        self._line = threading.Event()  # over when the last operation is
        self._line.set()
        self.made.append(self)

    # Calls of all members that stop the host

    def eager_connect_single_device(self, device):
        self.communicators += 1
        self._meet(f"communicator {self.communicators}")

    def perform_nocolor_split(self, device):
        self._meet("split")

    def _meet(self, where: str):
        if self._store.add(where, 1) == self._size:
            self._store.set(f"all: {where}", "")
        self._store.wait([f"all: {where}"], wire.NEVER)

    def _connect(self):
        if "all" not in self._connected:
            self._meet("connect")
            self._connected.add("all")

    def _connect_peers(self, messages: list[tuple]):
        """Connect to the peers of these messages, each way apart."""
        missing = []
        for op, peer, _ in messages:
            me, other = ("send", "recv") if op == "send" else ("recv", "send")
            ends = (self._rank, peer) if op == "send" else (peer, self._rank)
            if (*ends, op) not in self._connected:
                self._connected.add((*ends, op))
                self._store.set(f"{me} {ends}", "")
                missing.append(f"{other} {ends}")
        if missing:
            self._store.wait(missing, wire.NEVER)

    # Operations

    def collective(self, method: str, *args):
        self._connect()
        asynchronous = args[-1].asyncOp
        call = partial(getattr(self._carrier, method), *args)
        work = self._launch(lambda: call().wait(), wire._as_list(args[0]), asynchronous)
        return work if asynchronous else None

    def barrier(self, opts):
        self._connect()
        self.barrier_device = opts.device
        call = partial(self._carrier.allreduce, [torch.zeros(1)])
        work = self._launch(lambda: call().wait(), [], opts.asyncOp, is_barrier=True)
        return work if opts.asyncOp else work.wait() and None

    def send(self, tensors, dst, tag):
        return self._message("send", dst, tensors)

    def recv(self, tensors, src, tag):
        return self._message("recv", src, tensors)

    def _message(self, *message):
        if self.batch is not None:
            self.batch.append(message)
            return None
        if os.environ.get("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING") != "false":
            warnings.warn("An unbatched P2P op (send/recv) was called", stacklevel=2)
        return self.messages([message])

    def messages(self, batch: list[tuple]):
        """Send and receive, all at once; a send goes when its receiver has come."""
        arriving = [tensor for op, _, tensors in batch if op == "recv" for tensor in tensors]
        own = [(op, *tensors) for op, peer, tensors in batch if peer == self.rank()]
        batch = [message for message in batch if message[1] != self.rank()]
        self._connect_peers(batch)

        def run():
            come, data = torch.zeros(1), 0
            sent, filled = ([x for op, x in own if op == which] for which in ("send", "recv"))
            for source, target in zip(sent, filled, strict=True):
                target.copy_(source)
            works = []
            for op, peer, tensors in batch:
                if op == "recv":
                    works.append(self._carrier.recv(tensors, peer, data))
                    works.append(self._carrier.send([come], peer, data + 1))
            for op, peer, tensors in batch:
                if op == "send":
                    self._carrier.recv([torch.zeros(1)], peer, data + 1).wait()
                    works.append(self._carrier.send(tensors, peer, data))
            for work in works:
                work.wait()

        return self._launch(run, arriving, True)

    def _launch(self, run, arriving: list, asynchronous: bool, is_barrier=False) -> NCCLWork:
        """Put an operation on its stream, behind the one before it in this communicator."""
        stream = self.stream if asynchronous else torch.cuda.current_stream()
        end = Event()
        future = NCCLFuture(end)
        if torch.cuda.is_current_stream_capturing():
            for operation in (run, end._happen):  # in no line: it may be replayed at any time
                torch.cuda.current_stream().put(operation)
            return NCCLWork(end, future, arriving, is_barrier)
        if asynchronous:
            begin = Event()
            begin.record()
            stream.wait_event(begin)
        before, self._line = self._line, threading.Event()

        def operation(over=self._line):
            before.wait()
            run()
            over.set()
            if not future.done():
                future.set_result(arriving)

        stream.put(operation)
        end.record(stream)
        return NCCLWork(end, future, arriving, is_barrier)
