"""The wire: a process group that records every call and passes it to the real Gloo or NCCL group.

Every call in the group passes through, also object collectives, and calls that PyTorch makes in
C++, as DistributedDataParallel does. This one layer is the source of timelines, animations, the
report of a hang, and the counts of calls and bytes by which exercises are checked. It also emulates
a link: it delays calls as a slower network would. Results are bit-identical to those without it.

Words used in this file:
board: the shared file in which every rank writes its calls, for the report of a hang to read.
channel: a group, or the messages with one tag from one member to another. The n-th calls that ranks
    make on a channel belong together.
record: a `Record`, one call of this rank: its operation, arguments, line of the script, and times;
    with keep_values, an argument of `launch`, also the elements of small tensors.
recorder: the rank's `Recorder`, which keeps the list of records and writes them on the board.
"""

import contextlib
import functools
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from operator import attrgetter

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work
from torch.distributed import distributed_c10d as c10d

from ..tools.spans import now_doing
from ..tools.units import name_group
from . import wording
from .board import MESSAGES, Record, Said
from .place import call_site, handled
from .recorder import Recorder, recorder
from .streams import Cuda, Streams, StreamWork
from .uncompiled import uncompiled

__all__ = [
    "Recorder",
    "WireGroup",
    "WireWork",
    "plain_group",
    "recorder",
    "register_wire",
]

NEVER = timedelta(days=365)  # the timeout under `launch`, unless the reader gives one


@uncompiled
class WireWork(Work):
    """The handle of a call on the wire; its `wait` marks the rank on the board as waiting.

    inner: the handle that the real group returned for the call.
    record: the `Record` of the call, in which its times and waits are noted.
    recorder: the rank's `Recorder`, which notes the call's end and writes the mark.
    arriving: the tensors that the call fills; with keep_values, the record keeps their elements.
    until_done: a function, called by `wait` as `until_done(inner.wait)` in place of `inner.wait()`.
        It calls `inner.wait()`; then it blocks until an emulated link would have delivered. For a
        receive from any rank, it also notes the sender, which is known only then.
    delivered: for a collective on an emulated link, the future that get_future() returns in place
        of that of `inner`. It gets the same value, but only when the link would have delivered.
    """

    def __init__(
        self,
        inner: Work,
        record: Record,
        recorder: Recorder,
        arriving: Sequence[torch.Tensor] = (),
        until_done: Callable[[Callable], object] | None = None,
        delivered: torch.futures.Future | None = None,
    ):
        super().__init__()
        self.inner = inner
        self.record = record
        self._recorder = recorder
        self._arriving = arriving
        self._delivered = delivered
        self._until_done = until_done

    def wait(self, timeout: timedelta | None = None) -> bool:
        record = self.record
        record.waits += 1
        record.limit_s = timeout.total_seconds() if timeout else record.limit_s
        if record.waits == 1 or record.done is None:  # Gloo would wait for a second message
            until_done = partial(self.inner.wait, timeout) if timeout else self.inner.wait
            if self._until_done:
                until_done = partial(self._until_done, until_done)
            self._recorder.wait(record, until_done, self._arriving)
        return True

    synchronize = wait

    def __del__(self):
        unseen = self.record.waited is None and self.record.op in MESSAGES
        if unseen and not sys.is_finalizing():
            self._recorder.dropped(self.record)

    def get_future(self) -> torch.futures.Future:
        future = self._delivered or self.inner.get_future()
        self._recorder.gave_future(self.record)
        return future

    def is_completed(self) -> bool:
        is_completed = (self._delivered.done if self._delivered else self.inner.is_completed)()
        if not is_completed:
            self._recorder.polled(self.record)
        return is_completed

    def result(self):
        return self.inner.result()

    def _source_rank(self) -> int:
        return self.inner._source_rank()


def _hold_back(recorder: Recorder, record: Record):
    """Sleep until the emulated link would have delivered a call whose real transfer is complete.

    Do nothing without a link, or if `record.done` is set, as by a wait in another thread. A rank's
    transfers queue: the recorder's `link_out` and `link_in` are the times at which its link is free
    again for sending and for receiving. The call is delivered at `record.started` plus the seconds
    that the link needs for its bytes.
    - a send: `WireGroup.send` has set `record.started` and `link_out`; this only sleeps.
    - a receive: set `record.started` to the latest of `link_in`, this rank's call and, if the board
      shows it, the time at which the sender's link began to send. Set `link_in` to the delivery.
    - a collective: set `record.started` to the latest of `link_in`, `link_out` and, as far as the
      board shows, the last member's call. Set both to the delivery.
    """
    link = recorder.link
    if link is None or record.done is not None:
        return
    seconds = link.seconds(record.op, record.whole_bytes, len(record.ranks))
    if record.op == "send":
        until = record.started + seconds
    else:
        outward = recorder.link_out if record.op != "recv" else 0.0
        record.started = max(recorder.latest_issue(record), recorder.link_in, outward)
        until = recorder.link_in = record.started + seconds
        if record.op != "recv":
            recorder.link_out = until
    time.sleep(max(0.0, until - time.perf_counter()))


def _recorded(op: str, method: str, sent: int = 0):
    """Return a method for `WireGroup` that records a collective and passes it to the real group.

    op: torch.distributed's name for the call, such as "all_reduce".
    method: the name of the real group's method.
    sent: the index of the method's argument that holds the input tensors. Argument 0 holds the
        output. If `sent` is 0, the call works in place: the output tensors are the input as well.
    """

    def call(self, *args):
        if len(args) == sent + 1:  # some calls from C++ come without options
            args += (OPTIONS[op](),)
        arriving = _as_list(args[0])
        return self._collective(
            op, method, args, _as_list(args[sent]) if sent else arriving, arriving
        )

    return call


def _as_list(tensors) -> Sequence[torch.Tensor]:
    """Return a flat list of tensors, given one tensor, a list of them, or a list of lists."""
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    if tensors and isinstance(tensors[0], torch.Tensor):
        return tensors
    return [tensor for one_list in tensors for tensor in one_list]


def _splits(args: tuple, world_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (elements sent to each member, elements expected from each) of an all_to_all.

    args: the arguments of the real group's method. `alltoall` gets (outputs, inputs, options): two
        lists, with a tensor for each member. `alltoall_base` gets two tensors, (output, input,
        output counts, input counts, options). The counts are lists of rows, one for each member; if
        they are empty or left out, the rows are divided evenly.
    world_size: the number of members.
    """
    received, sent, *sizes, _ = args
    if not isinstance(sent, torch.Tensor):
        return tuple(map(torch.Tensor.numel, sent)), tuple(map(torch.Tensor.numel, received))
    counts = []
    for tensor, rows in zip((sent, received), reversed(sizes or ([], [])), strict=True):
        row = tensor.numel() // max(1, len(tensor))
        even = [len(tensor) // world_size] * world_size
        counts.append(tuple(count * row for count in rows or even))
    return tuple(counts)


SHAPE = attrgetter("shape")
OPTIONS = {"all_reduce": dist.AllreduceOptions, "all_gather": c10d.AllgatherOptions}


@uncompiled
class WireGroup(dist.ProcessGroup):
    """A process group around the real one: it records every call, and can delay it.

    It delays calls if the recorder has an emulated link, from `launch(..., link=...)`. The methods
    are those that torch.distributed calls on a process group, with torch's arguments and results.
    inner: the real group.
    name: the group's name on the board, the shared file in which every rank writes its calls.
    ranks: the members, as ranks of the world.
    recorder: this rank's recorder.
    device: the device that this rank computes on.
    timeout: after which the real group gives up a call.
    """

    def __init__(
        self,
        inner: dist.ProcessGroup,
        name: str,
        ranks: tuple,
        recorder: Recorder,
        device: torch.device,
        timeout: timedelta,
    ):
        super().__init__(inner.rank(), inner.size())
        self.inner = inner
        self.ranks = ranks
        self.recorder = recorder
        self.device = device
        self.timeout = timeout
        self._limit_s = timeout.total_seconds()
        label = "world" if not recorder.joined else name_group(ranks)
        self._member = wording.Member(name, label, ranks, inner.rank())
        self._c10d_name = ""
        self._description = "undefined"
        self._deliveries = ThreadPoolExecutor(1)  # of the emulated link: one after the other

    @contextlib.contextmanager
    def connecting(self):
        """Context manager: record one call, "new_group", while the block connects a real group.

        Connecting blocks until all members take part, as a collective does, so the report of a hang
        must know of it. The real group is the Gloo or NCCL group inside a new `WireGroup`, `self`;
        but in a split, `self` is the old group, all of whose members take part. The record has the
        members of `self` and, if "1#1" is its name, the channel "new 1#1". While the world itself
        connects, nothing is recorded: on the board, ranks' states show which have joined it.
        """
        if not self.recorder.joined:  # the world itself, which the launcher watches
            yield
            self.recorder.joined = True
            return
        record = self._record(wording.new_group)
        self.recorder.issue(record)
        record.waited = time.perf_counter()
        self.recorder.stands_at(record)
        try:
            yield
        finally:
            self.recorder.waited()
        self.recorder.done(record)

    # Collectives: the method that torch.distributed calls, our name, the input's argument.

    broadcast = _recorded("broadcast", "broadcast")
    allreduce = _recorded("all_reduce", "allreduce")
    allreduce_coalesced = _recorded("all_reduce", "allreduce_coalesced")
    reduce = _recorded("reduce", "reduce")
    allgather = _recorded("all_gather", "allgather", 1)
    allgather_coalesced = _recorded("all_gather", "allgather_coalesced", 1)
    allgather_into_tensor_coalesced = _recorded("all_gather", "allgather_into_tensor_coalesced", 1)
    all_gather_single = _recorded("all_gather", "all_gather_single", 1)
    all_gather_single_coalesced = _recorded("all_gather", "all_gather_single_coalesced", 1)
    _allgather_base = _recorded("all_gather", "_allgather_base", 1)
    gather = _recorded("gather", "gather", 1)
    gather_single = _recorded("gather", "gather_single", 1)
    scatter = _recorded("scatter", "scatter", 1)
    reduce_scatter = _recorded("reduce_scatter", "reduce_scatter", 1)
    reduce_scatter_single = _recorded("reduce_scatter", "reduce_scatter_single", 1)
    reduce_scatter_single_coalesced = _recorded(
        "reduce_scatter", "reduce_scatter_single_coalesced", 1
    )
    _reduce_scatter_base = _recorded("reduce_scatter", "_reduce_scatter_base", 1)
    reduce_scatter_tensor_coalesced = _recorded(
        "reduce_scatter", "reduce_scatter_tensor_coalesced", 1
    )
    alltoall = _recorded("all_to_all", "alltoall", 1)
    all_to_all_single = _recorded("all_to_all", "all_to_all_single", 1)
    alltoall_base = _recorded("all_to_all", "alltoall_base", 1)

    def barrier(self, opts=None):
        """Record a barrier and make it on the real group; return its handle, or None if it blocked.

        On Gloo the barrier blocks, unless the options make it asynchronous or a link is emulated.
        On NCCL it returns a handle: the program blocks in `wait`, which marks the rank as waiting.
        """
        opts = opts or dist.BarrierOptions()
        if self.recorder.streams:
            opts.asyncOp = True  # so that NCCL blocks the program in wait(), where a mark is set
            if not opts.device_ids:
                opts.device = self.device
        return self._collective("barrier", "barrier", (opts,), [], [])

    def monitored_barrier(self, timeout: timedelta, wait_all_ranks=False):
        """Record a monitored barrier and block in it; on a timeout, Gloo raises RuntimeError.

        Rank 0's error names the first of the ranks that didn't arrive; with `wait_all_ranks`, all.
        timeout: how long to wait. If it is 30 minutes, which torch passes where the user gives no
            timeout, the group's own timeout is used instead.
        """
        record = self._record(wording.collective, "barrier", (), (), None, None, None)
        if timeout == c10d.default_pg_timeout:
            timeout = self.timeout
        record.limit_s = timeout.total_seconds()
        self.recorder.issue(record)
        self.recorder.wait(record, partial(self.inner.monitored_barrier, timeout, wait_all_ranks))

    def _collective(
        self, op: str, method: str, args: tuple, sent: list, arriving: list
    ) -> WireWork | StreamWork | None:
        """Record a collective call, make it on the real group, and return its handle or None.

        The handle is a StreamWork if the tensors are on a GPU, otherwise a WireWork. If the options
        say that the call isn't asynchronous, return None: on the CPU once it is complete, on a GPU
        at once, since NCCL puts the call on the current stream, before all later work. But with an
        emulated link, return a handle even then, for which torch.distributed waits.
        op: torch.distributed's name for the call, such as "all_reduce".
        method, args: the real group's method, and its arguments, of which the last is the options.
        sent, arriving: flat lists of the tensors that the call reads, and those that it fills.
        """
        opts = args[-1]
        recorder = self.recorder
        root = opts.rootRank if op in wording.ROOTED else None
        reduction = hash(opts.reduceOp) if op in wording.REDUCING else None
        handed = sent or arriving[:1]
        shapes = tuple(map(SHAPE, handed))
        alike = (arriving[0].shape,) if op == "scatter" else shapes
        dtype = handed[0].dtype if handed else None
        splits = _splits(args, len(self.ranks)) if op == "all_to_all" else None
        on_nccl = self.inner_name != "gloo"  # which takes an all_gather of unequal parts
        uneven = op == "all_to_all" or (on_nccl and op in wording.UNEQUAL)
        what = op, alike, shapes, dtype, reduction, root, splits, uneven
        record = self._record(wording.collective, *what)
        asynchronous, call = getattr(opts, "asyncOp", True), getattr(self.inner, method)
        if streams := recorder.streams and self._streams(handed):
            return streams.call(record, partial(call, *args), sent, arriving, asynchronous)
        recorder.issue(record, sent, handed[0] if handed else None)
        on_gpu = recorder.streams and op == "barrier"
        inner = recorder.streams.make(record, partial(call, *args)) if on_gpu else call(*args)
        if recorder.link is not None:
            delivered = torch.futures.Future()
            self._deliveries.submit(_deliver, recorder, inner, record, arriving, delivered)

            def until_done(wait):
                wait()  # it may have a timeout, of the real transfer
                delivered.wait()

            return WireWork(inner, record, recorder, arriving, until_done, delivered)
        if not asynchronous:
            record.waits = 1
            return recorder.wait(record, inner.wait, arriving)
        if not on_gpu:  # whose future is done now
            with contextlib.suppress(RuntimeError):  # Gloo's reduce_scatter gives no future
                inner.get_future().add_done_callback(partial(_finished, recorder, record, arriving))
        return WireWork(inner, record, recorder, arriving)

    def _streams(self, tensors: Sequence[torch.Tensor]) -> Streams | None:
        """Return this rank's `Streams`, which times calls on its GPU by CUDA events, or None.

        None: the tensors are on the CPU, or there are none.
        """
        return self.recorder.streams if tensors and tensors[0].is_cuda else None

    # Point to point.

    def send(self, tensors, dst, tag):
        """Record a send and make it; return its handle, whose `wait` is longer on an emulated link.

        tensors: a list of one tensor. dst: the receiver's number in the group. tag: the message's.
        """
        record, recorder = self._message("send", tensors[0], dst, tag), self.recorder
        link = recorder.link
        if link is not None:  # before the receiver can read on the board when the message left
            record.started = max(record.issued, recorder.link_out)
            recorder.link_out = record.started + record.bytes / link.bytes_per_s
        if streams := recorder.streams and self._streams(tensors):
            return streams.call(record, partial(self.inner.send, tensors, dst, tag), tensors, ())
        recorder.issue(record, tensors, tensors[0])
        return self._handle(self.inner.send(tensors, dst, tag), record)

    def recv(self, tensors, src, tag):
        """Record a receive and start it; return its handle.

        On an emulated link, the handle's `wait` ends only when the link would have delivered.
        tensors: [the one to fill]. src: the sender's number in the group. tag: the message's.
        """
        record, recorder = self._message("recv", tensors[0], src, tag), self.recorder
        if streams := recorder.streams and self._streams(tensors):
            return streams.call(record, partial(self.inner.recv, tensors, src, tag), (), tensors)
        recorder.issue(record, (), tensors[0])
        return self._handle(self.inner.recv(tensors, src, tag), record, tensors)

    def recv_anysource(self, tensors, tag):
        """Record a receive from any rank and start it; return its handle.

        The sender is known only when the message has arrived. Then the handle's `wait` writes it
        into the record, and also the channel, by which the receive is matched with its send.
        tensors, tag: as in `recv`.
        """
        record, recorder = self._message("recv", tensors[0], None, tag), self.recorder
        recorder.issue(record, (), tensors[0])
        inner = self.inner.recv_anysource(tensors, tag)

        def until_done(wait):
            wait()
            source = inner._source_rank()
            channel = self._member.channel(source, self._member.rank, tag)
            recorder.came_from(record, self.ranks[source], channel)
            _hold_back(recorder, record)

        return WireWork(inner, record, recorder, tensors, until_done)

    def _message(self, op: str, tensor: torch.Tensor, peer: int | None, tag: int) -> Record:
        """Return a new record of a send or receive that is about to be made.

        The recorder doesn't have it yet. op: "send" or "recv". tensor: the one to send or fill.
        peer: the other rank's number in the group; None for a receive from any rank.
        """
        return self._record(
            wording.message, op, peer, tag, tensor.shape, tensor.dtype, now_doing(), frames=4
        )

    def _handle(self, inner: Work, record: Record, arriving: Sequence[torch.Tensor] = ()):
        """Return a message's handle, whose `wait` waits for `inner` and notes the end in `record`.

        With an emulated link, `wait` also sleeps until the link would have delivered the message.
        inner: the handle that the real group returned for the message.
        arriving: the tensors that a receive fills; with keep_values, their elements are recorded.
        """
        recorder = self.recorder
        held_back = partial(_through_link, recorder, record) if recorder.link else None
        return WireWork(inner, record, recorder, arriving, held_back)

    def _record(self, words: Callable[..., Said], *what, frames: int = 3) -> Record:
        """Return a new record of a call that is about to be made; the recorder doesn't have it yet.

        words: `wording.collective`, `wording.message` or `wording.new_group`, which describes the
            call as a `Said`, the part of a record that is the same each time the line is run.
        what: the arguments of that function after `member` and `place`, which are added here.
        frames: how many of ddpkit's own frames the search for the script's line passes over, to
            save time: 3 are those of `call_site`, `_record` and the method that calls `_record`; 4
            also the caller of that method.
        """
        place = *call_site(frames), handled()
        said, now = words(self._member, place, *what), time.perf_counter()
        return Record(said, 0, now, now, limit_s=self._limit_s)

    # Other methods that torch.distributed calls on a group.

    @property
    def inner_name(self) -> str:
        return self.inner.name()

    def name(self) -> str:  # a script that prints it, or compares, must get the real one's
        return self.inner_name

    def getBackendName(self) -> str:
        return "ddpkit"

    # DeviceMesh and everything built on it looks a group up by its name.

    def setGroupName(self, name: str):
        self._c10d_name = name
        self.inner._set_group_name(name)

    def getGroupName(self) -> str:
        return self._c10d_name

    def setGroupDesc(self, description: str):
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description

    def split_group(self, ranks, timeout=None, opts=None, group_name="", *args, **kwargs):
        """Split the real group; return a `WireGroup` around this rank's part, or None without one.

        All members of this group must call it.
        ranks: the members of this rank's part, as numbers in this group. If this rank is in no
            part, they are those of the first.
        timeout: of the parts. If it is None or 30 minutes, which dist.split_group passes where the
            user gives none, this group's timeout is used. The other arguments are torch's.
        """
        if timeout is None or timeout == c10d.default_pg_timeout:
            timeout = self.timeout
        with self.connecting():  # all members of this group must take part
            inner = self.inner.split_group(ranks, timeout, opts, group_name, *args, **kwargs)
        if inner is None:
            return None
        name = f"{group_name}#{self.recorder.worlds}"
        members = tuple(self.ranks[r] for r in ranks)
        part = type(self)(inner, name, members, self.recorder, self.device, timeout)
        part.setGroupName(group_name)
        return part

    def shutdown(self):
        """Shut down this rank's part of the group; `dist.destroy_process_group` calls this.

        On Gloo it returns at once. The recorder keeps the connections open until all members have
        called this, or the process ends: closed early, they would raise an error in a member that
        still waits, which hides the cause. On NCCL the real group is shut down.
        """
        self.recorder.destroyed(self._member.name)
        if self.inner_name == "gloo" and self.recorder.board is not None:
            self.recorder.keep(self, self._member.name, self.ranks)
        else:
            self.inner.shutdown()

    @property
    def _device_types(self):
        return [torch.device(self.device.type)]

    def _get_backend(self, device):
        return self.inner._get_backend(device)


def _finished(recorder: Recorder, record: Record, arriving: list, future: torch.futures.Future):
    """Note in a call's record that the call is complete; its future calls this.

    If the future failed, as by a timeout, the record stays as it is.
    future: that of the handle which the real group returned for the call.
    arriving: the tensors that the call fills; with keep_values, the record keeps their elements.
    """
    try:
        future.value()
    except Exception:
        return
    recorder.done(record, arriving)


def _through_link(recorder: Recorder, record: Record, wait: Callable):
    """Call wait() for the real transfer, then sleep until the emulated link would have delivered.

    The emulated transfer takes as long as the link needs for the call's bytes. It begins once this
    rank's earlier transfers are over and, unless the call is a send, the other ranks have made the
    call. If its end is past, or there is no link, this doesn't sleep. It drops wait()'s result.
    """
    wait()
    _hold_back(recorder, record)


def _deliver(recorder: Recorder, inner: Work, record: Record, arriving: list, delivered):
    """Wait until a link would have delivered a collective; then complete the future `delivered`.

    It runs in the group's own thread, one call after the other. The record notes the end of the
    call, unless there is an error, which is passed to the future.
    recorder, record: the rank's recorder, and the call's record. inner: the handle that the real
    group returned for the call. arriving: the tensors that the call fills, the future's value.
    """
    try:
        _through_link(recorder, record, inner.wait)
        recorder.done(record, arriving)
        delivered.set_result(arriving)
    except BaseException as error:
        delivered.set_exception(error)


def of_this_attempt(store: dist.Store) -> dist.Store:
    """Return a view of `store` without the keys from before a restart by torchrun.

    torchrun keeps its store after a restart, with the addresses of dead processes: plain Gloo tries
    to connect to them, and fails or waits (pytorch/pytorch#167288). So all keys in the view get a
    prefix with torchrun's count of restarts. `store` itself is returned on the first attempt, and
    if TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is set, as rank 0 then makes a new store each time.
    Several machines need that setting, which isn't checked: each counts its own restarts, and where
    the counts differ, ranks wait in vain for each other's keys.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "False":
        return store
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return store if attempt == "0" else dist.PrefixStore(f"attempt {attempt}", store)


def register_wire(recorder: Recorder, backend: str, device: torch.device, one_machine: bool):
    """Register with torch a backend "ddpkit", whose groups are `WireGroup`s around Gloo or NCCL.

    Call it before `init_process_group("ddpkit")`. Four functions of torch.distributed that don't
    work well with a `WireGroup` are replaced: get_backend, batch_isend_irecv, new_group and
    split_group.
    recorder: this rank's recorder, which gets all calls.
    backend: the real one, "gloo" or "nccl"; with "nccl", tensors on the CPU still go by Gloo.
    device: the device that this rank computes on.
    one_machine: True if ddpkit started the ranks, all on this machine; False under torchrun. With
        True, Gloo listens on the loopback interface only, and a timeout of 30 minutes, which torch
        passes if the script gives none, becomes a year, since ddpkit reports hangs itself.
    """

    def create(options, given) -> WireGroup:
        """Make a real group, Gloo or NCCL by `backend`, and return the `WireGroup` around it.

        Torch calls this for each group.
        options: torch's `_DistributedBackendOptions`: the group's store, members and timeout.
        given: the script's pg_options, or None; NCCL takes all of it but the timeout, Gloo nothing.
        """
        ranks = tuple(options.global_ranks_in_group)  # empty: all
        ranks = ranks or tuple(range(options.group_size))
        options.store = of_this_attempt(options.store)
        inner = dist.ProcessGroup(options.store, options.group_rank, options.group_size)
        if not recorder.joined:
            recorder.worlds += 1
        name = f"{options.group_id}#{recorder.worlds}"  # torch numbers each world's groups anew
        # Under `launch`, torch's default of 30 minutes is no timeout.
        by_default = one_machine and options.timeout == c10d.default_pg_timeout
        timeout = NEVER if by_default else options.timeout
        group_class = WireGroup
        if recorder.check_buffers:
            from .buffers import CheckedGroup as group_class
        group = group_class(inner, name, ranks, recorder, device, timeout)
        calm = recorder.link is not None
        with group.connecting():
            if backend == "nccl":  # and Gloo for tensors on the CPU, as torch does by default
                on_gpu = _nccl(options, device, timeout, given)
                store = dist.PrefixStore("cpu", options.store)
                on_cpu = _gloo(options, store, timeout, one_machine, calm)
                if recorder.streams is None:
                    recorder.streams = Streams(recorder, Cuda(device))
                    recorder.streams.watch()
            else:
                on_gpu = on_cpu = _gloo(options, options.store, timeout, one_machine, calm)
        inner._set_default_backend(on_gpu[1])
        for device_type, (real, kind) in {"cuda": on_gpu, "cpu": on_cpu}.items():
            inner._register_backend(torch.device(device_type), kind, real)
        return group

    dist.Backend.register_backend("ddpkit", create, extended_api=True, devices=["cpu", "cuda"])
    # torch 2.15 would attach its flight recorder to our groups; Gloo and NCCL inside have theirs.
    getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", set()).add("ddpkit")
    if c10d.get_backend is not _named_backend:
        for module in (dist, c10d):
            module.get_backend, module.batch_isend_irecv = _named_backend, _batched
            module.new_group, module.split_group = _wired_group, _wired_split
    if backend == "nccl":  # `WireGroup.barrier` names the device
        warnings.filterwarnings("ignore", r"barrier\(\): using the device under current context")
        # Of the thread of backward, whose first product on a stage of a pipeline this is.
        warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current CUDA")


def _nccl(options, device: torch.device, timeout: timedelta, given):
    """Make an NCCL group, and connect it at once; return (the ProcessGroupNCCL, its backend type).

    It blocks until all members call it. The world's `bound_device_id` must stay None: with it torch
    would make ranks outside a new group wait for its members to split the world's communicator with
    them, but here the members connect a new one.
    options: torch's `_DistributedBackendOptions`: the group's store, its members, this rank's
        number among them.
    device: this rank's GPU. timeout: after which NCCL gives up a call.
    given: a script's own pg_options, which may ask for a stream of high priority, or None.
    """
    # Six lines on each rank about messages being serialised, which the pipeline plans for.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    nccl = given or dist.ProcessGroupNCCL.Options()
    nccl._timeout = timeout
    nccl.global_ranks_in_group = options.global_ranks_in_group
    real = dist.ProcessGroupNCCL(options.store, options.group_rank, options.group_size, nccl)
    real.eager_connect_single_device(device)
    return real, dist.ProcessGroup.BackendType.NCCL


def _gloo(options, store: dist.Store, timeout: timedelta, one_machine: bool, calm: bool):
    """Make a Gloo group, and connect it; return (the ProcessGroupGloo, its backend type).

    options: torch's `_DistributedBackendOptions`: the group's size, this rank's number in it.
    store: where the members exchange their addresses.
    timeout: after which Gloo gives up connecting, or a call.
    one_machine: listen on the loopback interface only; otherwise on those that GLOO_SOCKET_IFNAME
        names, separated by commas; without it, on Gloo's default.
    calm: True on an emulated link: keep Gloo's reading threads from preempting the rank, which the
        network that it stands for wouldn't do.
    """
    gloo = dist.ProcessGroupGloo._Options()
    before = _threads()
    if one_machine:
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    else:
        gloo._devices = list(map(_listen_on, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")))
    if calm:
        _let_others_go_first(_threads() - before)
    gloo._timeout = timeout
    real = dist.ProcessGroupGloo(store, options.group_rank, options.group_size, gloo)
    return real, dist.ProcessGroup.BackendType.GLOO


def _listen_on(interface: str):
    """Return the device (of torch's Gloo) for listening on a network interface.

    interface: its name, such as "eth0". "": the interface with the address to which the host's name
        resolves; if there is none, torch takes the loopback interface.
    RuntimeError: no interface has that name.
    """
    gloo = dist.ProcessGroupGloo
    return gloo.create_device(interface=interface) if interface else gloo.create_default_device()


def _threads() -> set[str]:
    """Return the ids of all this process's threads, C++ ones included, as /proc/self/task has them.

    Two calls show which are new. Except on Linux, the set is empty.
    """
    return set(os.listdir("/proc/self/task")) if hasattr(os, "SCHED_BATCH") else set()


def _let_others_go_first(readers: set[str]):
    """Keep Gloo's reading threads from preempting this rank when a message wakes them.

    They get the scheduling policy SCHED_BATCH, which marks a thread that needn't run at once. The
    rank often holds the connection's lock when a message comes. A reading thread that preempts the
    rank then fails to get the lock, and polls until the scheduler stops it. So each message would
    take most of a millisecond from the rank's core, which the emulated network wouldn't.
    readers: the ids of the threads, from `_threads`. A thread that has ended is skipped.
    """
    for thread in readers:
        with contextlib.suppress(OSError):  # it has ended, or a container forbids it
            os.sched_setscheduler(int(thread), os.SCHED_BATCH, os.sched_param(0))


# torch's own four functions, and their replacements in a rank.

_get_backend, _batch_isend_irecv = c10d.get_backend, c10d.batch_isend_irecv
_new_group, _split_group = c10d.new_group, c10d.split_group


def _named_backend(group=None):
    """Return the name of a group's real backend, "gloo" or "nccl"; replaces dist.get_backend.

    For a `WireGroup` torch's would return "ddpkit". For other groups, this calls torch's.
    group: None for the world.
    """
    group = group or c10d._get_default_group()
    return dist.Backend(group.inner_name) if isinstance(group, WireGroup) else _get_backend(group)


@functools.wraps(_new_group)
def _wired_group(ranks=None, timeout=None, backend=None, *args, **kwargs):
    """Make a group on the wire, unless a backend other than the world's is asked for.

    It replaces dist.new_group, whose arguments and result it has. For example, scripts that write
    checkpoints in a thread ask for "gloo". In a world on Gloo that makes no difference; in one on
    NCCL they get torch's plain Gloo group, which isn't recorded. A `device_id` is dropped: with it
    torch would connect the group to NCCL a second time, after `_nccl` has.
    """
    world = c10d._get_default_group()
    wired = isinstance(world, WireGroup)
    if wired and str(backend).lower() == world.inner_name:
        backend = None
    if wired:
        kwargs.pop("device_id", None)
    return _new_group(ranks, timeout, backend, *args, **kwargs)


@functools.wraps(_split_group)
def _wired_split(parent_pg=None, split_ranks=None, *args, **kwargs):
    """Split a group as torch does, but refuse a `WireGroup` on NCCL; replaces dist.split_group.

    On NCCL torch needs a world with a bound device, and a world on the wire has none: see `_nccl`.
    On Gloo each part of a `WireGroup` is one as well; torch before 2.15 raises RuntimeError.
    ValueError: the parent is on NCCL and the wire; make each part with dist.new_group.
    """
    parent = parent_pg or c10d._get_default_group()
    if isinstance(parent, WireGroup) and parent.inner_name == "nccl":
        got = f"dist.split_group got a group of NCCL's on ddpkit's wire, for {split_ranks}"
        raise ValueError(f"{got}: make each part with dist.new_group, on all ranks")
    return _split_group(parent_pg, split_ranks, *args, **kwargs)


def plain_group() -> dist.ProcessGroup:
    """Return a new Gloo group of all ranks, which records no calls, to compare costs with.

    Every rank must call this function.
    """
    return _new_group(backend="gloo")


def _batched(p2p_op_list):
    """Start a batch of messages; return a handle for each. It replaces dist.batch_isend_irecv.

    The messages must go to NCCL as one batch: one by one they could deadlock. torch's own function
    batches only in torch's own class of group, so this one batches in a `WireGroup` on NCCL. There
    a wait for one message waits for the whole batch. A message from a rank to itself isn't recorded
    and has no handle. A batch on the CPU, or in another kind of group, is passed to torch.
    ValueError: a rank's message to itself in a `WireGroup`, on the CPU or with none to other ranks.
    p2p_op_list: a list of `dist.P2POp`, all in one group.
    """
    first = p2p_op_list[0] if p2p_op_list else None
    group = (first.group or c10d._get_default_group()) if first else None
    streams = group._streams([first.tensor]) if isinstance(group, WireGroup) else None
    others = [message for message in p2p_op_list if streams and message.group_peer != group.rank()]
    if not others:
        return _batch_isend_irecv(p2p_op_list)
    group.inner._start_coalescing(first.tensor.device)
    for message in p2p_op_list:
        if message.group_peer == group.rank():
            copy = group.inner.send if message.op is dist.isend else group.inner.recv
            copy([message.tensor], message.group_peer, message.tag)
    works = _batch_isend_irecv(others)
    complete = partial(group.inner._end_coalescing, first.tensor.device)
    streams.batch(works, complete, [message.tensor for message in p2p_op_list])
    return works
