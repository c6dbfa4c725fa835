"""The wire: a process group that hands every call to the real Gloo or NCCL group and writes down what was said.

Everything a rank says passes here, also what PyTorch says in C++ (DistributedDataParallel) or in pickles (object
collectives). From this one place come the counts that tests and exercises look at, the timelines and replays, the
report that explains a hang, and the emulated link. Tensors are handed through untouched: results are bit-identical.
"""

import contextlib
import os
import queue
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

from .board import DISAGREES, SLOTS, Board, Record, hash32
from .link import Link, steps_and_bytes

NEVER = timedelta(days=365)  # Gloo's own timeout must not come before the report that explains the hang
KEPT_ELEMENTS = 64  # keep_values keeps messages and buffers up to this size
MOST_RECORDS = 200_000  # records a rank keeps; older ones are dropped

# Frames of these belong to the library; a record names the line of the reader's own code.
_LIBRARY_FOLDERS = tuple(
    os.path.normpath(folder) + os.sep
    for folder in (
        os.path.dirname(torch.__file__),
        os.path.dirname(os.path.dirname(__file__)),
        sysconfig.get_path("stdlib"),
    )
)


class Recorder:
    """What one rank said: on the board for the others, in `records` for itself.

    board, rank: None under torchrun, where no memory is shared; then only the records is kept.
    disagree: called with {rank: record} when another rank said something else at the same place.
    """

    def __init__(
        self,
        rank: int,
        board: Board | None = None,
        link: Link | None = None,
        keep_values: bool = False,
        disagree: Callable[[dict[int, Record]], None] | None = None,
    ):
        self.rank, self.board, self.link, self.keep_values = rank, board, link, keep_values
        self.records: list[Record] = []
        self.joined = False  # whether the world's own group exists
        self.link_out, self.link_in = 0.0, 0.0  # when this rank's emulated link is free again, each way
        self._disagree = disagree
        self._calls = 0
        self._seq: dict[str, int] = {}
        self._indices: dict[int, int] = {}  # id of a record not yet done -> its number on the board
        self._threads: set[int] = set()
        self._buffers: dict[int, int] = {}
        self._lock = threading.RLock()  # a collected handle may come in between, see WireWork.__del__

    def issue(self, record: Record, sent: Sequence[torch.Tensor] = (), buffer: torch.Tensor | None = None):
        """Write down a call that is about to be made, and look whether the other ranks say the same."""
        if self.keep_values:
            record.values, record.memory = _values(sent), self._memory(buffer)
        with self._lock:
            record.seq = self._seq[record.channel] = self._seq.get(record.channel, -1) + 1
            index, self._calls = self._calls, self._calls + 1
            self.records.append(record)
            if len(self.records) > MOST_RECORDS:
                del self.records[: MOST_RECORDS // 2]
            if self.board is None:
                return
            self._indices[id(record)] = index
            self.board.put(self.rank, index, record)
            if threading.get_ident() not in self._threads:
                self._threads.add(threading.get_ident())
                self.board.set_threads(self.rank, len(self._threads))
        differing = self._said_differently(record)
        if differing is not None:
            self.board.set_state(self.rank, DISAGREES)
            self._disagree({self.rank: record, **differing})

    def _said_differently(self, record: Record) -> dict[int, Record] | None:
        """{rank: what it said} for one that said something else.

        Written first, looked second: of two ranks that disagree, the later one always sees it.
        """
        channel, agreement = hash32(record.channel), hash32(record.agreement)
        if not record.agreement:
            return None
        for rank in record.ranks:
            said = self.board.find(rank, channel, record.seq) if rank != self.rank else None
            if said is not None and said[1] != agreement:
                theirs = self.board.record(rank, said[0])
                return {} if theirs is None else {rank: theirs}
        return None

    def came_from(self, record: Record, channel: str):
        """A receive from any rank turned out to belong to `channel`."""
        with self._lock:
            record.channel, record.seq = channel, self._seq.get(channel, -1) + 1
            self._seq[channel] = record.seq

    def waiting(self, record: Record):
        """This rank stops to wait for `record`."""
        record.waited = time.perf_counter()
        if self.board is not None and id(record) in self._indices:
            self.board.set_waiting(self.rank, self._indices[id(record)])

    def waited(self):
        if self.board is not None:
            self.board.set_waiting(self.rank, None)

    def done(self, record: Record, arrived: Sequence[torch.Tensor] = (), buffer: torch.Tensor | None = None):
        """`record` is complete; the first to notice writes it down."""
        if record.done is not None:
            return
        if self.keep_values and arrived:
            record.result = _values(arrived)
            record.memory = self._memory(buffer) or record.memory
        record.done = time.perf_counter()
        with self._lock:
            index = self._indices.pop(id(record), None)
            if index is not None and index >= self._calls - SLOTS:
                self.board.put(self.rank, index, record)

    def dropped(self, record: Record):
        """The handle of a message was let go before anybody waited for it: Gloo may never deliver it."""
        record.dropped = True
        self._write_again(record)

    def gave_future(self, record: Record):
        """Somebody took the future of the call: from now on a wait for it may leave no mark."""
        record.by_future = True
        self._write_again(record)

    def _write_again(self, record: Record):
        """Put what is new about an open call on the board."""
        with self._lock:
            index = self._indices.get(id(record))
            if index is not None and index >= self._calls - SLOTS:
                self.board.put(self.rank, index, record)

    def home(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Where `tensor` lies in what went over the wire: (buffer, offset) as in `Record.memory`.

        None if it is in no buffer of the records. Known with keep_values, of small buffers.
        """
        which = self._buffers.get(tensor.untyped_storage().data_ptr())
        return None if which is None else (which, tensor.storage_offset())

    def latest_issue(self, record: Record) -> float:
        """When the last of the ranks that take part in `record` came to it, as far as the board knows."""
        times = [record.issued]
        for rank in record.ranks if self.board is not None else ():
            said = self.board.find(rank, hash32(record.channel), record.seq)
            theirs = said and self.board.record(rank, said[0])
            if theirs:
                times.append(theirs.started if record.op == "recv" and theirs.started else theirs.issued)
        return max(times)

    def _memory(self, tensor: torch.Tensor | None) -> tuple[int, int, list] | None:
        """The whole buffer that `tensor` is a part of, if it is small: (which, offset of the tensor, contents)."""
        if tensor is None or tensor.numel() == 0:
            return None
        storage = tensor.untyped_storage()
        numel = storage.nbytes() // tensor.element_size()
        if numel > KEPT_ELEMENTS:
            return None
        whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, (numel,))
        which = self._buffers.setdefault(storage.data_ptr(), len(self._buffers))
        return which, tensor.storage_offset(), whole.tolist()


def recorder() -> Recorder | None:
    """The recorder of this rank: its `records` so far and the `board`. None where `launch` didn't make the world."""
    return getattr(dist.group.WORLD, "recorder", None)


def _values(tensors: Sequence[torch.Tensor]) -> list | None:
    if not tensors or sum(tensor.numel() for tensor in tensors) > KEPT_ELEMENTS:
        return None
    return [value for tensor in tensors for value in tensor.detach().flatten().tolist()]


def is_library(file: str) -> bool:
    """Whether `file` is torch's, ddpkit's or Python's own."""
    return file.startswith((*_LIBRARY_FOLDERS, "<frozen"))


def call_site() -> tuple[str, int, str]:
    """(file, line, function) of the innermost frame that is the user's own."""
    frame = first = sys._getframe(1)
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    frame = frame or first
    return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name


class WireWork(Work):
    """The handle of a call under way. `wait` marks the rank as waiting, so that a hang can be explained."""

    def __init__(
        self, inner: Work, record: Record, recorder: Recorder, arriving=(), delivery: "Delivery | None" = None
    ):
        super().__init__()
        self.inner, self.record, self._recorder = inner, record, recorder
        self._arriving, self._delivery = list(arriving), delivery
        self._waited = False

    def wait(self, timeout=None) -> bool:
        self.record.waits += 1
        if self._waited:  # Gloo would wait for a second message
            return True
        self._recorder.waiting(self.record)
        try:
            if self._delivery is None:
                self.inner.wait()
                self._arrived()
                _hold_back(self._recorder, self.record)
            else:
                self._delivery.wait()
        finally:
            self._recorder.waited()
        self._waited = True
        self._recorder.done(self.record, self._arriving, self._arriving[0] if self._arriving else None)
        return True

    def _arrived(self):
        """For subclasses: what only the finished call knows."""

    def __del__(self):
        if self.record.waited is None and self.record.op in ("send", "recv") and not sys.is_finalizing():
            self._recorder.dropped(self.record)

    def is_completed(self) -> bool:
        return self.inner.is_completed() if self._delivery is None else self._delivery.future.done()

    def is_success(self) -> bool:
        return self.inner.is_success()

    def exception(self):
        return self.inner.exception()

    def result(self):
        return self.inner.result()

    def synchronize(self):
        self.wait()

    def source_rank(self) -> int:
        return self.inner._source_rank()

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:
        future = self.inner.get_future() if self._delivery is None else self._delivery.future
        self._recorder.gave_future(self.record)
        return future


class _AnySourceWork(WireWork):
    """A receive from whoever sends first: only afterwards is known on which channel it came."""

    def __init__(self, *args, group: "WireGroup", tag: int):
        super().__init__(*args)
        self._group, self._tag = group, tag

    def _arrived(self):
        source = self.source_rank()
        self.record.peer = self._group.ranks[source]
        self._recorder.came_from(self.record, self._group.way(source, self._group.rank(), self._tag))


class Delivery:
    """A collective on an emulated link: complete when the link would have delivered it."""

    def __init__(self, inner: Work, record: Record, recorder: Recorder, arriving: Sequence[torch.Tensor]):
        self.future = torch.futures.Future()
        self._arrived = threading.Event()
        self._error: BaseException | None = None
        self._inner, self._record, self._recorder, self._arriving = inner, record, recorder, list(arriving)

    def deliver(self):
        """Run by the link's thread, one delivery after the other: transfers of a rank queue behind each other."""
        try:
            self._inner.wait()
            _hold_back(self._recorder, self._record)
            self._recorder.done(self._record, self._arriving)
            self.future.set_result(self._arriving)
        except BaseException as error:
            self._error = error
            self.future.set_exception(error)
        self._arrived.set()

    def wait(self):
        self._arrived.wait()
        if self._error is not None:
            raise self._error


def _hold_back(recorder: Recorder, record: Record):
    """Sleep until the emulated link would have delivered `record`; without a link, not at all."""
    if recorder.link is None or record.done is not None:
        return
    world_size = len(record.ranks)
    steps, nbytes = steps_and_bytes(record.op, record.bytes * _whole(record.op, world_size), world_size)
    seconds = steps * recorder.link.latency_s + nbytes / recorder.link.bytes_per_s
    if record.op == "send":
        until = record.started + seconds
    else:
        outward = recorder.link_out if record.op != "recv" else 0.0
        record.started = max(recorder.latest_issue(record), recorder.link_in, outward)
        until = recorder.link_in = record.started + seconds
        if record.op != "recv":
            recorder.link_out = until
    time.sleep(max(0.0, until - time.perf_counter()))


def _whole(op: str, world_size: int) -> int:
    """How often a rank's own part fits into the whole that `op` moves."""
    return world_size if op in ("all_gather", "gather") else 1


class WireGroup(dist.ProcessGroup):
    """A process group that records, counts and delays, around the real one.

    Its methods are those that torch.distributed calls on a group; each builds a `Record` and passes the call on.
    """

    def __init__(self, inner: dist.ProcessGroup, name: str, ranks: tuple[int, ...], recorder: Recorder, device):
        super().__init__(inner.rank(), inner.size())
        self.inner, self.ranks, self.recorder, self.device = inner, ranks, recorder, device
        self._name = name
        self._label = "world" if not recorder.joined else f"group {list(ranks)}"
        self._link_queue: queue.SimpleQueue | None = None

    @contextlib.contextmanager
    def joining(self):
        """Connecting a group blocks until all its members do the same, so it can hang like any other call."""
        if not self.recorder.joined:  # the world itself: the launcher's business, not a call of the reader's
            yield
            self.recorder.joined = True
            return
        record = self._record("new_group", [], None, f"new {self._name}", "", str(list(self.ranks)))
        self.recorder.issue(record)
        self.recorder.waiting(record)
        yield
        self.recorder.waited()
        self.recorder.done(record)

    # Collectives.

    def broadcast(self, tensors, opts):
        return self._collective("broadcast", "broadcast", (tensors, opts), tensors, tensors, opts)

    def allreduce(self, tensors, opts=None):
        opts = opts or dist.AllreduceOptions()
        return self._collective("all_reduce", "allreduce", (tensors, opts), tensors, tensors, opts)

    def allreduce_coalesced(self, tensors, opts):
        return self._collective("all_reduce", "allreduce_coalesced", (tensors, opts), tensors, tensors, opts)

    def reduce(self, tensors, opts):
        return self._collective("reduce", "reduce", (tensors, opts), tensors, tensors, opts)

    def allgather(self, outputs, inputs, opts=None):
        opts = opts or dist.AllgatherOptions()
        return self._collective("all_gather", "allgather", (outputs, inputs, opts), inputs, _flat(outputs), opts)

    def allgather_coalesced(self, outputs, inputs, opts):
        return self._collective(
            "all_gather", "allgather_coalesced", (outputs, inputs, opts), inputs, _flat(outputs), opts
        )

    def allgather_into_tensor_coalesced(self, outputs, inputs, opts):
        name = "allgather_into_tensor_coalesced"
        return self._collective("all_gather", name, (outputs, inputs, opts), inputs, outputs, opts)

    def all_gather_single(self, output, input, opts):
        return self._collective("all_gather", "all_gather_single", (output, input, opts), [input], [output], opts)

    def _allgather_base(self, output, input, opts):
        return self._collective("all_gather", "_allgather_base", (output, input, opts), [input], [output], opts)

    def gather(self, outputs, inputs, opts):
        return self._collective("gather", "gather", (outputs, inputs, opts), inputs, _flat(outputs), opts)

    def scatter(self, outputs, inputs, opts):
        sent = _flat(inputs)
        part = outputs[0]
        return self._collective("scatter", "scatter", (outputs, inputs, opts), sent, outputs, opts, agreed=part)

    def reduce_scatter(self, outputs, inputs, opts):
        return self._collective(
            "reduce_scatter", "reduce_scatter", (outputs, inputs, opts), _flat(inputs), outputs, opts
        )

    def reduce_scatter_single(self, output, input, opts):
        args = (output, input, opts)
        return self._collective("reduce_scatter", "reduce_scatter_single", args, [input], [output], opts)

    def _reduce_scatter_base(self, output, input, opts):
        return self._collective(
            "reduce_scatter", "_reduce_scatter_base", (output, input, opts), [input], [output], opts
        )

    def reduce_scatter_tensor_coalesced(self, outputs, inputs, opts):
        name = "reduce_scatter_tensor_coalesced"
        return self._collective("reduce_scatter", name, (outputs, inputs, opts), inputs, outputs, opts)

    def alltoall(self, outputs, inputs, opts):
        return self._collective("all_to_all", "alltoall", (outputs, inputs, opts), inputs, outputs, opts)

    def all_to_all_single(self, output, input, output_splits, input_splits, opts):
        args = (output, input, output_splits, input_splits, opts)
        return self._collective("all_to_all", "all_to_all_single", args, [input], [output], opts)

    def alltoall_base(self, output, input, output_splits, input_splits, opts):
        args = (output, input, output_splits, input_splits, opts)
        return self._collective("all_to_all", "alltoall_base", args, [input], [output], opts)

    def barrier(self, opts=None):
        opts = opts or dist.BarrierOptions()
        return self._collective("barrier", "barrier", (opts,), [], [], opts)

    def monitored_barrier(self, timeout=None, wait_all_ranks=False):
        record = self._record("barrier", [], None, None, "barrier", "monitored")
        self.recorder.issue(record)
        self.recorder.waiting(record)
        try:
            self.inner.monitored_barrier(timeout, wait_all_ranks)
        finally:
            self.recorder.waited()
        self.recorder.done(record)

    def _collective(self, op, method, args, sent, arriving, opts, agreed=None):
        root = getattr(opts, "rootRank", None) if op in ("broadcast", "reduce", "gather", "scatter") else None
        reduction = _reduction(opts) if op in ("all_reduce", "reduce", "reduce_scatter") else None
        agreement, detail = _agreement(op, [agreed] if agreed is not None else sent, reduction, root, self.ranks)
        record = self._record(op, sent or arriving[:1], root, None, agreement, detail)
        self.recorder.issue(record, sent, (sent or arriving or [None])[0])
        inner = getattr(self.inner, method)(*args)
        if self.recorder.link is not None:
            delivery = Delivery(inner, record, self.recorder, arriving)
            self._queue().put(delivery)
            return WireWork(inner, record, self.recorder, arriving, delivery)
        if getattr(opts, "asyncOp", True):
            inner.get_future().add_done_callback(lambda _: self.recorder.done(record, arriving))
        return WireWork(inner, record, self.recorder, arriving)

    def _queue(self) -> queue.SimpleQueue:
        if self._link_queue is None:
            self._link_queue = queue.SimpleQueue()
            threading.Thread(target=_deliver_all, args=(self._link_queue,), daemon=True, name="ddpkit link").start()
        return self._link_queue

    # Point to point.

    def send(self, tensors, dst, tag):
        record = self._point_to_point("send", tensors, self.rank(), dst, tag)
        if self.recorder.link is not None:  # before it is on the board, where the receiver looks when it left
            record.started = max(record.issued, self.recorder.link_out)
            self.recorder.link_out = record.started + record.bytes / self.recorder.link.bytes_per_s
        self.recorder.issue(record, tensors, tensors[0])
        return WireWork(self.inner.send(tensors, dst, tag), record, self.recorder)

    def recv(self, tensors, src, tag):
        record = self._point_to_point("recv", tensors, src, self.rank(), tag)
        self.recorder.issue(record, (), tensors[0])
        return WireWork(self.inner.recv(tensors, src, tag), record, self.recorder, tensors)

    def recv_anysource(self, tensors, tag):
        record = self._record("recv", tensors, None, f"{self._name} ?", "", f"{_size(tensors)}, src=any")
        self.recorder.issue(record, (), tensors[0])
        return _AnySourceWork(
            self.inner.recv_anysource(tensors, tag), record, self.recorder, tensors, group=self, tag=tag
        )

    def _point_to_point(self, op, tensors, src, dst, tag) -> Record:
        name, number = ("dst", dst) if op == "send" else ("src", src)
        self._check_peer(op, name, number)
        peer = self.ranks[number]
        detail = f"{_size(tensors)}, {'dst' if op == 'send' else 'src'}={peer}"
        record = self._record(op, tensors, None, self.way(src, dst, tag), _size(tensors), detail)
        record.peer, record.ranks = peer, (self.ranks[src], self.ranks[dst])
        return record

    def _check_peer(self, op: str, name: str, number: int):
        """torch lets both mistakes pass; Gloo answers one with an assertion in C++, the other with silence."""
        me = f"rank {self.ranks[self.rank()]} called {op} with {name}={number}"
        if not 0 <= number < len(self.ranks):
            last = len(self.ranks) - 1
            raise ValueError(f"{me}, but there is no rank {number}: the last is {last}. Did a loop go one too far?")
        if number == self.rank():
            raise ValueError(f"{me}, which is itself: leave this rank out, it has its own data already")

    def way(self, src: int, dst: int, tag: int) -> str:
        """The channel of messages from `src` to `dst` (ranks in the group) with that tag."""
        return f"{self._name} {self.ranks[src]}>{self.ranks[dst]}:{tag}"

    def _record(self, op, tensors, root, channel, agreement, detail) -> Record:
        now = time.perf_counter()
        if self._label != "world" and op != "new_group":
            detail = ", ".join(filter(None, (detail, self._label)))
        return Record(
            op=op,
            group=self._label,
            ranks=self.ranks,
            channel=channel or self._name,
            seq=0,
            agreement=agreement,
            detail=detail,
            bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
            peer=None if root is None else self.ranks[root],
            shape=tuple(tensors[0].shape) if tensors else (),
            dtype=_dtype(tensors),
            **dict(zip(("file", "line", "function"), call_site(), strict=True)),
            issued=now,
            started=now,
        )

    # What torch.distributed asks of a group besides.

    @property
    def inner_name(self) -> str:
        return self.inner.name()

    def getBackendName(self):
        return "ddpkit"

    def name(self):
        return "ddpkit"

    def shutdown(self):
        self.inner.shutdown()

    def abort(self):
        self.inner.abort()

    @property
    def _device_types(self):
        return [torch.device(self.device.type)]

    @property
    def bound_device_id(self):
        return self.device if self.inner_name == "nccl" else None

    def _get_backend(self, device):
        return self.inner._get_backend(device)

    def _get_sequence_number_for_group(self):
        return self.inner._get_sequence_number_for_group()


def _calm_gloo():
    """Forbid Gloo's reading thread, when a message wakes it, to take the core from another thread of this rank.

    The other one often holds the connection's lock. The reader then asks for it again and again (`epoll_wait`), until
    the scheduler intervenes: most of a millisecond of a core that computes, for each message, which the link that is
    emulated wouldn't take. SCHED_BATCH is Linux's word for a thread that can wait its turn; other systems have none.
    """
    for thread in os.listdir("/proc/self/task") if hasattr(os, "SCHED_BATCH") else ():
        with contextlib.suppress(OSError):  # a thread that is gone; a container that forbids it
            if Path(f"/proc/self/task/{thread}/comm").read_text() == "gloo_tcp_loop\n":
                os.sched_setscheduler(int(thread), os.SCHED_BATCH, os.sched_param(0))


def _deliver_all(deliveries: queue.SimpleQueue):
    while True:
        deliveries.get().deliver()


def _flat(lists):
    return [tensor for tensors in lists for tensor in tensors]


def _dtype(tensors) -> str:
    return str(tensors[0].dtype).removeprefix("torch.") if tensors else ""


def _size(tensors) -> str:
    return f"{sum(tensor.numel() for tensor in tensors)} {_dtype(tensors)}".strip()


def _reduction(opts) -> str:
    op = opts.reduceOp
    return str(getattr(op, "op", op)).rpartition(".")[2].lower()


def _agreement(op, tensors, reduction, root, ranks) -> tuple[str, str]:
    """(what all ranks must say alike, the same for people).

    Sizes may differ between ranks in a gather, all_gather and all_to_all, so only the type counts there.
    """
    detail = [_size(tensors)] if tensors else []
    if reduction:
        detail.append(reduction)
    if root is not None:
        detail.append(f"{'dst' if op in ('reduce', 'gather') else 'src'}={ranks[root]}")
    alike = detail.copy()
    if op in ("all_gather", "gather", "all_to_all"):
        alike[:1] = [_dtype(tensors)]
    return " ".join([op, *alike]), ", ".join(detail)


def register_wire(recorder: Recorder, backend: str, device: torch.device, one_machine: bool):
    """Teach torch.distributed a backend "ddpkit": Gloo or NCCL with `recorder` around it, for the world and all groups.

    one_machine: Gloo listens on the loopback interface alone.
    """

    def create(options, _) -> WireGroup:
        ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))  # empty: all
        inner = dist.ProcessGroup(options.store, options.group_rank, options.group_size)
        group = WireGroup(inner, options.group_id, ranks, recorder, device)
        with group.joining():
            on_gpu = on_cpu = _real_group(options, backend, device, options.store, one_machine)
            if backend == "nccl":  # as torch does by default: NCCL for tensors on a GPU, Gloo for those on the CPU
                on_cpu = _real_group(options, "gloo", device, dist.PrefixStore("cpu", options.store), one_machine)
        inner._set_default_backend(on_gpu[1])
        for device_type, (real, kind) in {"cuda": on_gpu, "cpu": on_cpu}.items():
            inner._register_backend(torch.device(device_type), kind, real)
        if recorder.link is not None:
            _calm_gloo()
        return group

    dist.Backend.register_backend("ddpkit", create, extended_api=True, devices=["cpu", "cuda"])
    if not hasattr(dist.get_backend, "unwired"):
        _see_through_the_wire()


def _real_group(options, backend: str, device: torch.device, store: dist.Store, one_machine: bool):
    if backend == "nccl":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl.global_ranks_in_group = options.global_ranks_in_group
        real = dist.ProcessGroupNCCL(store, options.group_rank, options.group_size, nccl)
        real.eager_connect_single_device(device)
        return real, dist.ProcessGroup.BackendType.NCCL
    gloo = dist.ProcessGroupGloo._Options()
    create_device, create_default = dist.ProcessGroupGloo.create_device, dist.ProcessGroupGloo.create_default_device
    gloo._devices = [create_device(hostname="127.0.0.1") if one_machine else create_default()]
    gloo._timeout = NEVER
    real = dist.ProcessGroupGloo(store, options.group_rank, options.group_size, gloo)
    return real, dist.ProcessGroup.BackendType.GLOO


def _see_through_the_wire():
    """In this rank: `get_backend` names the backend inside, and NCCL's point-to-point calls stay batched.

    (torch batches them only for its own class of group; one by one they would deadlock on NCCL.)
    """
    from torch.distributed import distributed_c10d as c10d

    get_backend, batch_isend_irecv = c10d.get_backend, c10d.batch_isend_irecv

    def named_backend(group=None):
        group = group or c10d._get_default_group()
        return dist.Backend(group.inner_name) if isinstance(group, WireGroup) else get_backend(group)

    def batched(p2p_op_list):
        group = p2p_op_list[0].group or c10d._get_default_group() if p2p_op_list else None
        device = p2p_op_list[0].tensor.device if p2p_op_list else None
        if not isinstance(group, WireGroup) or group.inner_name != "nccl" or device.type == "cpu":
            return batch_isend_irecv(p2p_op_list)
        group.inner._start_coalescing(device)
        works = batch_isend_irecv(p2p_op_list)
        whole = group.inner._end_coalescing(device)
        for work in works:
            work.inner = whole
        return works

    named_backend.unwired = get_backend
    for module in (dist, c10d):
        module.get_backend, module.batch_isend_irecv = named_backend, batched
