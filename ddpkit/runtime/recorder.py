"""Record every collective call and message of one rank, in a list and on the board.

The board is a memory-mapped file that all ranks of a launch share. Other ranks and the launching
process read there which call a rank is in, even while that rank is blocked in C++.

channel: a group, or the messages with one tag from one member to another. Calls of different ranks
    that have the same number on a channel belong together.
mark: a place on the board that says in which call a thread of the rank waits, for the report of a
    hang. A rank has 8, with indices 0 to 7; 0 is the main thread's. When 1 to 7 are taken, further
    threads share the last. A thread's mark is free again when the thread has ended.
record: a `Record`, one call of this rank: its operation, arguments and line, and its times.
wire: the process group around the real one, `WireGroup`, through which all calls pass.
keep_values: an argument of `launch`. With it, records also keep numbers for animations to show:
    those in a call's tensors, if these have at most 64 (KEPT_ELEMENTS) elements together, and those
    in the whole storage of the first tensor, if that storage has at most 64.
"""

import contextlib
import re
import sys
import threading
import time
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count

import torch
import torch.distributed as dist

from .board import CALLERS, DISAGREES, SLOTS, Board, Record, hash32, unfitting
from .link import Link
from .place import call_site, innermost, is_pythons
from .streams import Streams

KEPT_ELEMENTS = 64  # keep_values keeps messages and buffers up to this size
MOST_RECORDS = 200_000  # records that a rank keeps; older ones are dropped
SETTLE_S = 0.2  # the longest wait for Gloo's threads to note completed calls
# Errors of Gloo and NCCL for a call, a wait or a monitored barrier that exceeds its timeout.
TIMED_OUT = re.compile(
    r"Timed out waiting \d+ms|Operation timed out!|failed to pass monitoredBarrier"
    r"|Watchdog caught collective operation timeout"
    r"|monitoredBarrier.* timeout|Application timeout caused pair closure"
)


class Recorder:
    """The recorder of one rank's calls of torch.distributed: collectives, sends and receives.

    The wire informs it when each call is made and when it is complete. In a rank, `recorder()`
    returns the rank's recorder. `records` is the list of calls so far, oldest first; beyond 200,000
    (`MOST_RECORDS`) the older half is dropped. `calls` is the number of all calls so far.
    rank: this rank's number in the world.
    board: the board on which each call is also written; None: only the list is kept.
    link: the `Link` (a latency and a bandwidth) by which the wire delays calls, or None.
    keep_values: whether records keep the elements of small tensors.
    disagree: called if another rank has made a different call with the same number on the same
        channel, with {rank: record}: this rank's and, if it can be read on the board, the other's.
        Needed if there is a board.
    timed_out: called with (record, error) if a wait for a call ends by its timeout, before the
        error is raised.
    """

    def __init__(
        self,
        rank: int,
        board: Board | None = None,
        link: Link | None = None,
        keep_values: bool = False,
        disagree: Callable[[dict[int, Record]], None] | None = None,
        timed_out: Callable[[Record, BaseException], None] | None = None,
    ):
        self.rank = rank
        self.board = board
        self.link = self.own_link = link  # own: where a launch under torchrun has none
        self.keep_values = keep_values
        self.records: list[Record] = []
        self.joined = False  # whether the world's own group exists
        self.check_buffers = False  # whether groups made from now on check what they send
        self.streams: Streams | None = None  # on NCCL: measures when calls ran
        self.link_out, self.link_in = 0.0, 0.0  # when the emulated link is free again, each way
        self._disagree = disagree
        self._timed_out = timed_out
        self.calls = 0  # made so far
        self._seq: dict[str, Iterator[int]] = defaultdict(count)
        self._callers: dict[int, int] = {}  # {a live thread that has made calls: its mark's index}
        self._this_thread = threading.local()
        self.worlds = 0  # the number of worlds so far: a script may end one and begin another
        self._destroyed: dict[str, tuple] = {}
        self._kept: list[tuple[object, str, tuple[int, ...]]] = []
        self._buffers: dict[int, int] = {}
        # Autograd's threads make DDP's calls, Gloo's threads complete them. Reentrant, since the
        # garbage collector may delete a handle, which records that, while its thread has the lock.
        self._lock = threading.RLock()

    def issue(
        self,
        record: Record,
        sent: Sequence[torch.Tensor] = (),
        buffer: torch.Tensor | None = None,
    ):
        """Record a call just before it is made, and compare it with the other ranks' calls.

        A call is a collective call, a send or a receive. The record gets its numbers: `seq`, that
        of the call on its channel, and `number`, that among all calls of this rank. It is written
        into the list and onto the board. If another rank has made a different call with the same
        number on the channel, `disagree` is called, which blocks until this rank is ended.
        record: a new one, with `said` (the operation, arguments and line) and `issued` (the time).
        sent: the tensors that the call sends; used only with keep_values, like `buffer`.
        buffer: the first tensor that the call reads or, if it reads none, fills; its whole storage,
            if that is small, is kept, so that an animation can show the memory around it.
        """
        if self.keep_values:
            record.values = _values(sent)
            record.memory = self._memory(buffer)
        with self._lock:
            record.seq = next(self._seq[record.said.channel])
            record.number = self.calls
            self.calls += 1
            self.records.append(record)
            if len(self.records) > MOST_RECORDS:
                del self.records[: MOST_RECORDS // 2]
            if self.board is None:
                return
            self.board.put(self.rank, record.number, record)
        self._caller()
        differing = self._said_differently(record)
        if differing is not None:
            self.board.set_state(self.rank, DISAGREES)
            self._disagree({self.rank: record, **differing})

    def since(self, calls: int) -> list[Record]:
        """Return the records of this rank's calls after its first `calls`, but for dropped ones.

        calls: a number of calls, dropped ones included, such as the attribute `calls` had earlier.
        """
        return [record for record in self.records if record.number >= calls]

    def _said_differently(self, record: Record) -> dict[int, Record] | None:
        """Return {rank: its record} of a rank whose call with the same number differs, or None.

        The number is `record.seq`, the count of earlier calls on the channel. Calls differ if their
        fingerprints do (texts such as "all_reduce 8 float32 sum"), or if in an all_to_all one rank
        sends another more or fewer elements than that expects. None also if `record` has no
        fingerprint. {}: the hash of the other's fingerprint differs, but its record can't be read,
        perhaps because it is too long for the board.
        Each rank writes its own call before it reads the others'. So if two disagree, the later one
        notices, unless the other has made 255 more calls by then: its record may be overwritten.
        """
        said = record.said
        seq = record.seq
        if not said.fingerprint:
            return None
        channel, fingerprint = said.hashes
        for rank in said.ranks:
            found = self.board.find(rank, channel, seq) if rank != self.rank else None
            if found is None or (found[1] == fingerprint and said.splits is None):
                continue
            theirs = self.board.record(rank, found[0])
            if found[1] != fingerprint:
                return {} if theirs is None else {rank: theirs}
            if theirs is not None and unfitting({self.rank: record, rank: theirs}):
                return {rank: theirs}
        return None

    def came_from(self, record: Record, peer: int, channel: str):
        """Put the sender into the record of a receive that took any sender, now that it is known.

        peer: the sender's rank in the world.
        channel: the message's channel, as "0#1 2>3:7" for tag 7 from rank 2 to rank 3 in the group
            that torch names "0", in the first world (#1). `record.seq` becomes its next number.
        """
        with self._lock:
            both = peer, self.rank
            record.said = replace(record.said, ranks=both, peer=peer, channel=channel)
            record.seq = next(self._seq[channel])
        self.write_again(record, whole=True)

    def wait(self, record: Record, until_done: Callable, arrived: Sequence[torch.Tensor] = ()):
        """Wait for a call by `until_done()`, then note that it is done.

        Meanwhile the board shows that this thread is waiting in the call.
        until_done: blocks until the call is complete. An error that it raises passes through, and
            the call isn't done then. If the error is a timeout, `timed_out` is called first.
        arrived: the tensors that hold the call's result afterwards, for keep_values.
        """
        record.waited = time.perf_counter()
        self.stands_at(record)
        try:
            until_done()
        except BaseException as error:
            if self._timed_out and TIMED_OUT.search(str(error)):
                self._timed_out(record, error)
            self.waited()
            raise
        self.done(record, arrived, arrived[0] if arrived else None)

    def stands_at(self, record: Record):
        """Mark on the board that this thread waits in the call of `record`.

        The mark is valid until the call is done, or until `waited()` removes it. If the call is
        done already, no mark is made.
        """
        if self.board is not None and record.done is None:
            self.board.set_waiting(self.rank, record.number, self._caller(), record.waited)

    def waited(self):
        """Remove from the board the mark that `stands_at` made for this thread, if it made one.

        The call needn't be complete: the wait may have failed by its timeout.
        """
        if self.board is not None:
            self.board.set_waiting(self.rank, None, self._caller())

    def polled(self, record: Record):
        """Note on the board that the program asked whether the call is complete, and it isn't.

        A program that asks again and again may be waiting for the call, so the report of a hang
        looks at the time of the last such question.
        """
        if self.board is not None and record.done is None:
            self.board.set_polled(self.rank, record.number, time.perf_counter())

    def destroyed(self, group: str):
        """Write on the board that this rank destroyed a group, and on which line of the script.

        This rank makes no more calls in the group, so another that waits there for it waits in
        vain. Without a board, do nothing.
        group: its name on the board, such as "0#1": torch's "0", in the script's first world.
        """
        if self.board is not None:
            self._destroyed[group] = call_site(2)
            self._destroyed = self.board.set_destroyed(self.rank, self._destroyed)

    def keep(self, group: object, name: str, ranks: tuple[int, ...]):
        """Hold a group that this rank has destroyed, until all members have destroyed it.

        So its connections stay open: closing them would make a call fail in which another member
        still waits. `release`, which is called here and later, then lets go of it.
        group: the process group; a reference to it is held.
        name: the group's name on the board, such as "0#1".
        ranks: the members, as ranks of the world.
        """
        with self._lock:
            self._kept.append((group, name, ranks))
        self.release()

    def release(self):
        """Let go of each group held by `keep` that all members, as the board shows, have destroyed.

        A group closes its connections once no reference holds the group. If it did so earlier, a
        call in which another member still waits would fail.
        """
        let_go = []  # destructors wait for threads that may want the lock, so they run after it
        with self._lock:
            for kept in list(self._kept):
                _, name, ranks = kept
                if all(name in self.board.destroyed(rank) for rank in ranks):
                    self._kept.remove(kept)
                    let_go.append(kept)

    def _caller(self) -> int:
        """Return the index of this thread's mark on the board, from 0 to 7.

        If the thread has none yet, it gets one, for as long as it lives. A C++ thread, such as
        autograd's on a GPU, counts as alive only while it runs Python code, and may get another
        mark the next time.
        """
        try:
            return self._this_thread.caller.place
        except AttributeError:
            self._this_thread.caller = caller = _Caller(self)
            return caller.place

    def came(self) -> int:
        """Assign one of the rank's 8 marks to this thread, which has none; return the mark's index.

        `_Caller` calls it once for each thread, when the thread first makes or waits for a call.
        """
        with self._lock:
            is_main = threading.get_ident() == threading.main_thread().ident
            free = set(range(not is_main, CALLERS)).difference(self._callers.values())
            place = min(free, default=CALLERS - 1)
            self._callers[threading.get_ident()] = place
            self.count_callers()
            return place

    def left(self, thread: int):
        """Free the mark of a thread that has ended, so that another thread can get it.

        thread: the ended thread's `threading.get_ident()`.
        """
        with self._lock:
            self._callers.pop(thread, None)
            self.count_callers()

    def count_callers(self, look: bool = False):
        """Write onto the board how many threads of this rank have made calls and are still alive.

        While fewer threads than this wait in a call, the rank isn't taken for stuck, since one may
        still go on. Called when a thread begins to make calls and when it ends. Under torchrun a
        watching thread of the rank also calls it again and again, with `look`. Elsewhere the
        launching process reads the stacks itself before it reports a hang.
        look: read the threads' stacks, and don't count those that idle in a pool, since they would
            hide a hang; but never leave out the main thread.
        """
        callers = len(self._callers)
        if look and callers > 1:
            frames = sys._current_frames()
            main = threading.main_thread().ident
            callers -= sum(
                _idles(frames.get(thread)) for thread in list(self._callers) if thread != main
            )
        if self.board is not None:
            self.board.set_threads(self.rank, callers)

    def done(
        self,
        record: Record,
        arrived: Sequence[torch.Tensor] = (),
        buffer: torch.Tensor | None = None,
        at: float | None = None,
    ):
        """Record that a collective call, send or receive is complete; a second time do nothing.

        arrived: the tensors that hold its result, for keep_values.
        buffer: the first of these, whose whole storage the record then keeps for animations; None:
            it keeps the copy that `issue` made, as `Recorder.arrived` explains.
        at: the `time.perf_counter()` at which it was complete; None: now.
        """
        if record.done is not None:
            return
        self.arrived(record, arrived, buffer)
        record.done = at or time.perf_counter()
        self.write_again(record, whole=self.keep_values)

    def arrived(
        self,
        record: Record,
        arrived: Sequence[torch.Tensor],
        buffer: torch.Tensor | None = None,
    ):
        """Keep in the record the elements that a call brought; without keep_values, do nothing.

        On the CPU `done` calls this. On a GPU the program's wait() or, without a handle, the call
        itself does. It blocks until the current stream, which waits for the call, has the elements.
        arrived: the tensors that hold the call's result, for `record.result`. [] for a send: then
            nothing is kept.
        buffer: `arrived[0]`, whose whole storage is copied into `record.memory`, so that an
            animation can show the memory around it: all of x after a receive into x[2:4]. None on a
            GPU, and if another thread sees the call's end before the program's wait(), since the
            program may be changing the storage: then `record.memory` stays as it is.
        """
        if self.keep_values and arrived:
            record.result = _values(arrived)
            record.memory = self._memory(buffer) or record.memory

    def settle(self):
        """Wait until the ends of calls are recorded; on Gloo, for 0.2 s (`SETTLE_S`) at most.

        Called before the records leave this process. If the program took a call's future, and only
        C++ code waits for that future, as in DDP, one of Gloo's threads records the call's end,
        perhaps after the program has gone on. An end that isn't recorded in time stays missing. On
        NCCL this first waits, without a limit, until the GPU has completed all calls.
        """
        if self.streams:
            self.streams.settle()
        until = time.perf_counter() + SETTLE_S
        while any(r.done is None and r.by_future for r in self.records[-SLOTS:]):
            if time.perf_counter() > until:
                return
            time.sleep(0.001)

    def dropped(self, record: Record):
        """Mark a message as dropped: the program deleted its handle without waiting for it.

        The handle is what isend or irecv returned. Such a message may never be delivered, and may
        hold up later ones; the report of a hang says so.
        """
        record.dropped = True
        self.write_again(record)

    def gave_future(self, record: Record):
        """Record, also on the board, that the program took the call's future by `get_future()`.

        C++ code may then wait for that future, which leaves no mark on the board. The report of a
        hang allows for such a wait.
        """
        record.by_future = True
        self.write_again(record)

    def write_again(self, record: Record, whole: bool = False):
        """Write the record of a call onto the board again, unless a later call has taken its slot.

        The board keeps the last 256 (`SLOTS`) calls of each rank. Without a board, do nothing.
        whole: write all fields; otherwise, at less cost, only the times and boolean fields.
        """
        with self._lock:
            if self.board is not None and record.number >= self.calls - SLOTS:
                write = self.board.put if whole else self.board.update
                write(self.rank, record.number, record)

    def latest_issue(self, record: Record) -> float:
        """Return the `time.perf_counter()` at which the last rank of a call made it.

        An emulated link can't begin to carry the call earlier. The ranks are `record.ranks`: the
        group's members or a message's two ends. For a receive, the sender's time is that at which
        its link began to carry the message, perhaps later than its call. A rank whose call can't be
        found on the board is left out; this rank's own time always counts.
        """
        times = [record.issued]
        for rank in record.ranks if self.board is not None else ():
            said = self.board.find(rank, hash32(record.channel), record.seq)
            theirs = said and self.board.record(rank, said[0])
            if theirs:
                sent = record.op == "recv" and theirs.started
                times.append(sent or theirs.issued)
        return max(times)

    def home(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Return (buffer, offset): where a tensor lies in storages copied into records, or None.

        An exercise's check uses it to see whether a gradient lies in a buffer that was sent.
        buffer: the number of the tensor's storage, as in `Record.memory`: from 0, in the order in
            which records first copied storages. It is looked up by the storage's address.
        offset: of the tensor's first element in the storage, in elements.
        None: no record has a copy of a storage at its address; without keep_values none has.
        """
        which = self._buffers.get(tensor.untyped_storage().data_ptr())
        return None if which is None else (which, tensor.storage_offset())

    def _memory(self, tensor: torch.Tensor | None) -> tuple[int, int, list] | None:
        """Return (buffer, offset, elements) of a tensor, for `Record.memory`, or None.

        buffer: the number of the tensor's storage: 0 for the first that a record kept, and so on.
            Only its address identifies a storage: one at a freed one's address has its number.
        offset: of the tensor's first element in it. elements: the list of all the storage's.
        None: no tensor, an empty one, or a storage of more than 64 (`KEPT_ELEMENTS`) elements.
            The caller checks keep_values.
        """
        if tensor is None or tensor.numel() == 0:
            return None
        storage = tensor.untyped_storage()
        numel = storage.nbytes() // tensor.element_size()
        if numel > KEPT_ELEMENTS:
            return None
        whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        whole.set_(storage, 0, (numel,))
        which = self._buffers.setdefault(storage.data_ptr(), len(self._buffers))
        return which, tensor.storage_offset(), whole.tolist()


class _Caller:
    """A thread's reservation of one of its rank's 8 marks; `place` is the mark's index, 0 to 7.

    recorder: the rank's.
    The object is in thread-local storage: when the thread ends, it is deleted and the mark is free
    again. A thread that finds no free mark shares mark 7. That mark then says where one of its
    threads began to wait last, and is free again when all of them have ended.
    """

    def __init__(self, recorder: Recorder):
        self._recorder = recorder
        self._thread = threading.get_ident()
        self.place = recorder.came()

    def __del__(self):
        if not sys.is_finalizing():
            with contextlib.suppress(ValueError):  # the board is closed
                self._recorder.left(self._thread)


def _idles(frame: types.FrameType | None) -> bool:
    """Return whether a thread seems idle: every function on its stack is in the standard library.

    That is so for a pool's worker without a task. An idle thread isn't counted among those that may
    still go on while another thread of the rank waits in a call.
    frame: the thread's innermost frame; None, if the thread is gone, counts as idle.
    """
    return innermost(frame, is_pythons) is None


def recorder() -> Recorder | None:
    """Return the recorder of this rank, or None if its calls aren't recorded.

    Calls are recorded in a world that `launch`, a %%ranks cell or `torchrun ... -m ddpkit.debug
    SCRIPT` has set up. The process group of such a world is a `WireGroup`, which has the recorder.
    """
    return getattr(dist.group.WORLD, "recorder", None)


def _values(tensors: Sequence[torch.Tensor]) -> list | None:
    """Return the elements of all tensors in one flat list.

    None: there are no tensors, or they have more than 64 (`KEPT_ELEMENTS`) elements together.
    """
    if not tensors or sum(tensor.numel() for tensor in tensors) > KEPT_ELEMENTS:
        return None
    return [value for tensor in tensors for value in tensor.detach().flatten().tolist()]
