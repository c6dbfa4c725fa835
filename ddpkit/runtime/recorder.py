"""Record the calls of one rank: on the board for the other ranks, and in a list for itself."""

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
    """The recorder of one rank's calls: the wire tells it of each call, and of its end.

    records: all calls so far. board: the board of all ranks; None: no memory is shared. disagree:
    called with {rank: record} if another rank has made a different call at the same place.
    timed_out: called with (record, error) if a wait ends by its timeout, before the error is
    raised. In a rank, `recorder()` returns it.
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
        self.link = link
        self.keep_values = keep_values
        self.records: list[Record] = []
        self.joined = False  # whether the world's own group exists
        self.check_buffers = False  # of groups made from now on: `buffers.py`
        self.streams: Streams | None = None  # on NCCL: measures when calls ran
        self.link_out, self.link_in = 0.0, 0.0  # when the emulated link is free again, each way
        self._disagree = disagree
        self._timed_out = timed_out
        self._calls = 0
        self._seq: dict[str, Iterator[int]] = defaultdict(count)
        self._callers: dict[int, int] = {}  # {a thread that has made calls, and lives: its place}
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
        """Record a call just before it is made; report it if another rank's call differs.

        sent: the tensors that it sends. buffer: the tensor whose storage is kept for replays. Both
        are read only with keep_values.
        """
        if self.keep_values:
            record.values = _values(sent)
            record.memory = self._memory(buffer)
        with self._lock:
            record.seq = next(self._seq[record.said.channel])
            record.number = self._calls
            self._calls += 1
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

    def _said_differently(self, record: Record) -> dict[int, Record] | None:
        """Look for a rank whose call at this place is another one: {rank: its record}, or None.

        {}: there is one, but its record is already overwritten. A rank writes before it reads, so
        of two ranks that disagree the later one always notices.
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
        """Complete the record of a receive from any rank: its message came from `peer`.

        channel: that of the messages from `peer` to this rank.
        """
        with self._lock:
            record.said = replace(record.said, peer=peer, channel=channel)
            record.seq = next(self._seq[channel])
        self.write_again(record, whole=True)

    def wait(self, record: Record, until_done: Callable, arrived: Sequence[torch.Tensor] = ()):
        """Wait for a call by `until_done()`, with this thread marked as waiting on the board.

        arrived: the tensors that hold its result then.
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
        """Mark this thread as waiting in the call of `record`, from now until it is done."""
        if self.board is not None and record.done is None:
            self.board.set_waiting(self.rank, record.number, self._caller())

    def waited(self):
        """Take away the mark of `stands_at`: this thread goes on, though the call isn't done."""
        if self.board is not None:
            self.board.set_waiting(self.rank, None, self._caller())

    def polled(self, record: Record):
        """Note that the script asked whether `record` is complete, and it isn't.

        A script that asks again and again may be waiting for it.
        """
        if self.board is not None and record.done is None:
            self.board.set_polled(self.rank, record.number, time.perf_counter())

    def destroyed(self, group: str):
        """Note on the board that this rank destroyed `group`, and on which line.

        It will make no more calls in it.
        """
        if self.board is not None:
            self._destroyed[group] = call_site(2)
            self.board.set_destroyed(self.rank, self._destroyed)

    def keep(self, group: object, name: str, ranks: tuple[int, ...]):
        """Keep a group that this rank has destroyed, until all its members have destroyed it.

        Until then its connections stay open, so that no rank that still waits loses one. ranks: the
        members.
        """
        with self._lock:
            self._kept.append((group, name, ranks))
        self.release()

    def release(self):
        """Let go of those groups of `keep` that all their members have destroyed by now."""
        let_go = []  # destructors wait for threads that may want the lock, so they run after it
        with self._lock:
            for kept in list(self._kept):
                _, name, ranks = kept
                if all(name in self.board.destroyed(rank) for rank in ranks):
                    self._kept.remove(kept)
                    let_go.append(kept)

    def _caller(self) -> int:
        """Return this thread's place on the board, its own as long as the thread lives.

        A C++ thread, such as autograd's on a GPU, counts as alive only while it runs Python code.
        """
        try:
            return self._this_thread.caller.place
        except AttributeError:
            self._this_thread.caller = caller = _Caller(self)
            return caller.place

    def came(self) -> int:
        """Give this thread, which makes its first call, a place on the board; return it.

        Place 0 is the main thread's.
        """
        with self._lock:
            is_main = threading.get_ident() == threading.main_thread().ident
            free = set(range(not is_main, CALLERS)).difference(self._callers.values())
            place = min(free, default=CALLERS - 1)
            self._callers[threading.get_ident()] = place
            self.count_callers()
            return place

    def left(self, thread: int):
        """Free the place of a thread that has ended."""
        with self._lock:
            self._callers.pop(thread, None)
            self.count_callers()

    def count_callers(self, look: bool = False):
        """Note on the board how many threads of this rank may still make calls.

        look: look at their stacks, and leave out those that wait for work in a pool.
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
        """Note that a call is complete. A second note about the same call changes nothing.

        arrived: the tensors that hold its result. buffer: the one whose storage is kept for
        replays, if no other call can be writing into it. at: when it was complete; None: now.
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
        """Keep the numbers that a call brought, if keep_values; on a GPU, wait for them."""
        if self.keep_values and arrived:
            record.result = _values(arrived)
            record.memory = self._memory(buffer) or record.memory

    def settle(self):
        """Wait, at most `SETTLE_S`, until completed calls are also noted as such.

        C++ code may go on before Gloo's thread has noted them. On a GPU, wait for all calls and
        their times, however long.
        """
        if self.streams:
            self.streams.settle()
        until = time.perf_counter() + SETTLE_S
        while any(r.done is None and r.by_future for r in self.records[-SLOTS:]):
            if time.perf_counter() > until:
                return
            time.sleep(0.001)

    def dropped(self, record: Record):
        """Note that the handle of a message was deleted before a wait: it may never arrive."""
        record.dropped = True
        self.write_again(record)

    def gave_future(self, record: Record):
        """Note that the call's future was taken: a wait for that may leave no mark on the board."""
        record.by_future = True
        self.write_again(record)

    def write_again(self, record: Record, whole: bool = False):
        """Bring a call on the board up to date, unless another call has taken its slot.

        whole: all its fields; otherwise only times and flags, which costs less.
        """
        with self._lock:
            if self.board is not None and record.number >= self._calls - SLOTS:
                write = self.board.put if whole else self.board.update
                write(self.rank, record.number, record)

    def latest_issue(self, record: Record) -> float:
        """Return when the last of the ranks came to this call, as far as the board shows.

        For a receive this is when its message left the sender.
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
        """Return (number of a buffer, offset in it) of a tensor, as in `Record.memory`.

        None: no record has its buffer. With keep_values only.
        """
        which = self._buffers.get(tensor.untyped_storage().data_ptr())
        return None if which is None else (which, tensor.storage_offset())

    def _memory(self, tensor: torch.Tensor | None) -> tuple[int, int, list] | None:
        """Return what `Record.memory` holds for a tensor: (buffer, offset, all of its numbers).

        None: the buffer is larger than `KEPT_ELEMENTS`.
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
    """A thread's place on the board; given back when the thread's locals are deleted at its end."""

    def __init__(self, recorder: Recorder):
        self._recorder = recorder
        self._thread = threading.get_ident()
        self.place = recorder.came()

    def __del__(self):
        if not sys.is_finalizing():
            with contextlib.suppress(ValueError):  # the board is closed
                self._recorder.left(self._thread)


def _idles(frame: types.FrameType | None) -> bool:
    """Tell whether a thread idles in a pool: its stack holds nothing but Python's own code."""
    return innermost(frame, is_pythons) is None


def recorder() -> Recorder | None:
    """Return the recorder of this rank; None where `launch` didn't create the world."""
    return getattr(dist.group.WORLD, "recorder", None)


def _values(tensors: Sequence[torch.Tensor]) -> list | None:
    if not tensors or sum(tensor.numel() for tensor in tensors) > KEPT_ELEMENTS:
        return None
    return [value for tensor in tensors for value in tensor.detach().flatten().tolist()]
