"""The board: memory that all ranks of a launch share, where each writes what it is about to say.

Whoever wants to know what a rank is doing reads its page: the parent, while the rank is blocked in
C++ or dead; another rank, to see whether both are about to say the same.
"""

import mmap
import pickle
import struct
import zlib
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter
from pathlib import Path

# What a rank is doing, as it last said.
STARTING, RUNNING, RETURNED, IDLE, DISAGREES = range(5)

# The head of a page: five counters, each a word of eight bytes.
_CALLS, _EVENTS, _WAITING, _STATE, _THREADS = range(5)
_WORD, _HEAD_BYTES = 8, 64

# A slot: channel, fingerprint, seq and when it was issued; what may change until the call is over;
# then the rest of the record, pickled.
_FOUND_BY, _CHANGES = struct.Struct("=IIqd"), struct.Struct("=dddI??")
_TEXT = _FOUND_BY.size + _CHANGES.size  # where the rest begins
_SEQ_WORD = 1
_SLOT_BYTES = 2048
MESSAGES = "send", "recv"  # the other calls are collectives
SLOTS = 256  # so many last calls of each rank does the board remember
_PAGE_BYTES = _HEAD_BYTES + SLOTS * _SLOT_BYTES
_PAGE_WORDS = _PAGE_BYTES // _WORD


@dataclass(slots=True)
class Record:
    """One call of one rank. Times are this machine's `time.perf_counter()`, or None.

    PyTorch's Flight Recorder keeps the like for NCCL.
    """

    # The same whenever the same line makes the same call.
    op: str  # torch.distributed's name: all_reduce, send, ...
    group: str  # "world", or the ranks of a sub-group
    ranks: tuple[int, ...]  # the group's members, as global ranks
    channel: str  # calls meet on a channel: a group, or one direction between two ranks
    fingerprint: str  # what every rank must say alike here: "all_reduce 8 float32 sum"
    detail: str  # the arguments, for people: "8 float32, sum"
    bytes: int  # what this rank hands in (recv, and who receives a broadcast or scatter: gets)
    peer: int | None  # global rank: dst of send, reduce, gather; src of recv, broadcast, scatter
    shape: tuple[int, ...]
    dtype: str
    file: str
    line: int
    function: str
    # This time.
    seq: int  # how many calls this rank made on this channel before
    issued: float
    started: float | None = None  # when an emulated link took it; without one, when it was issued
    done: float | None = None
    waited: float | None = None  # when the rank first stopped to wait for it
    waits: int = 0  # how often wait() was called on its handle
    by_future: bool = False  # get_future() was called: a wait for that, in C++, leaves no mark
    dropped: bool = False  # its handle was let go before anybody waited for it
    values: list | None = None  # keep_values: the message as handed in, up to 64 elements
    result: list | None = None  # keep_values: what arrived
    memory: tuple[int, int, list] | None = None  # keep_values: (buffer, offset, all it holds)
    number: int = field(default=-1, compare=False)  # how many calls its rank made before
    stream: str = ""  # that carries it, on a GPU: `streams.py` says what the times mean there

    @property
    def call(self) -> str:
        """The call as a person writes it: all_reduce(8 float32, sum)."""
        return f"{self.op}({self.detail})"

    @property
    def place(self) -> tuple[str, int, str]:
        """(file, line, function) of the reader's own code that made the call."""
        return self.file, self.line, self.function

    @property
    def on_stream(self) -> bool:
        """Whether it is on a GPU, and not yet known to be over: `started` comes with `done`."""
        return self.done is None and self.started is None

    @property
    def begun(self) -> float:
        """When the wire began: on a GPU's stream later than it was issued."""
        return (self.stream and self.started) or self.issued

    @property
    def whole_bytes(self) -> int:
        """What the call moves on all ranks together, as `Link.seconds` counts it."""
        return self.bytes * len(self.ranks) if self.op in ("all_gather", "gather") else self.bytes


class Board:
    """A memory-mapped file with one page for each rank; a rank writes only its own.

    A file rather than /dev/shm: containers have little of that, and not every system has it.
    """

    def __init__(self, path: Path, world_size: int, create: bool = False):
        self.world_size = world_size
        with open(path, "w+b" if create else "r+b") as file:
            if create:
                file.truncate(_PAGE_BYTES * world_size)
            self._map = mmap.mmap(file.fileno(), _PAGE_BYTES * world_size)
        self._words = memoryview(self._map).cast("q")

    def close(self):
        self._words.release()
        self._map.close()

    # Writing.

    def put(self, rank: int, index: int, record: Record):
        """Write call number `index` of `rank`.

        Others see it, complete, once the count of calls moves past it: that comes last.
        """
        words, counters, at = self._words, rank * _PAGE_WORDS, self._slot(rank, index)
        is_new = index == words[counters + _CALLS]
        if is_new:  # who just reads the call that was here before must not take half of each
            words[at // _WORD + _SEQ_WORD] = -1
        self._write(at + _FOUND_BY.size, _changes(record) + _rest(record))
        channel, fingerprint = hash32(record.channel), hash32(record.fingerprint)
        self._write(at, _FOUND_BY.pack(channel, fingerprint, record.seq, record.issued))
        words[counters + _EVENTS] += 1
        if is_new:
            words[counters + _CALLS] += 1

    def update(self, rank: int, index: int, record: Record):
        """Write again what changes until a call is over: its times, and what became of it."""
        self._write(self._slot(rank, index) + _FOUND_BY.size, _changes(record))
        self._words[rank * _PAGE_WORDS + _EVENTS] += 1

    def set_waiting(self, rank: int, index: int | None):
        """`rank` now sits in the wait of its call `index`, or no longer in any."""
        self._words[rank * _PAGE_WORDS + _WAITING] = 0 if index is None else index + 1

    def set_state(self, rank: int, state: int):
        self._words[rank * _PAGE_WORDS + _STATE] = state
        self._words[rank * _PAGE_WORDS + _EVENTS] += 1

    def set_threads(self, rank: int, threads: int):
        """How many threads of `rank` have made calls: of several, a wait blocks only one."""
        self._words[rank * _PAGE_WORDS + _THREADS] = threads

    # Reading, from any process, at any time.

    def calls(self, rank: int) -> int:
        return self._get(rank, _CALLS)

    def events(self) -> list[int]:
        """How much each rank has written so far: while that stays the same, nothing moves."""
        return [self._get(rank, _EVENTS) for rank in range(self.world_size)]

    def waiting(self, rank: int) -> int | None:
        """Number of the call that `rank` sits in, or None."""
        return self._get(rank, _WAITING) - 1 if self._get(rank, _WAITING) else None

    def state(self, rank: int) -> int:
        return self._get(rank, _STATE)

    def threads(self, rank: int) -> int:
        return self._get(rank, _THREADS)

    def record(self, rank: int, index: int) -> Record | None:
        """Call number `index` of `rank`; None if it was overwritten or is just being written."""
        if not max(0, self.calls(rank) - SLOTS) <= index < self.calls(rank):
            return None
        at = self._slot(rank, index)
        found_by = _FOUND_BY.unpack_from(self._map, at)
        *times, waits, by_future, dropped = _CHANGES.unpack_from(self._map, at + _FOUND_BY.size)
        try:
            *same, values, result, memory = pickle.loads(self._map[at + _TEXT : at + _SLOT_BYTES])
        except Exception:  # half-written, it unpickles to anything; the next look sees it whole
            return None
        *_, seq, issued = found_by
        if seq < 0 or found_by != _FOUND_BY.unpack_from(self._map, at):  # written meanwhile
            return None
        times = [time or None for time in times]
        became = waits, by_future, dropped
        return Record(*same, seq, issued, *times, *became, values, result, memory)

    def records(self, rank: int) -> list[Record]:
        """The last calls of `rank`, oldest first."""
        calls = self.calls(rank)
        found = (self.record(rank, index) for index in range(max(0, calls - SLOTS), calls))
        return [record for record in found if record is not None]

    def find(self, rank: int, channel: int, seq: int) -> tuple[int, int] | None:
        """(number of the call, hash of its fingerprint) of call `seq` of `rank` on a channel.

        channel: its hash.
        """
        calls = self.calls(rank)
        oldest = max(0, calls - SLOTS + 1)  # the one before may just be making room for the next
        for index in range(calls - 1, oldest - 1, -1):
            at = self._slot(rank, index)
            its_channel, said, its_seq, _ = _FOUND_BY.unpack_from(self._map, at)
            if its_channel == channel and its_seq <= seq:
                return (index, said) if its_seq == seq else None
        return None

    def page(self, rank: int) -> bytes:
        """All that `rank` has written, for a board on another machine."""
        return self._map[rank * _PAGE_BYTES : (rank + 1) * _PAGE_BYTES]

    def set_page(self, rank: int, page: bytes):
        """Take the page of a rank of another machine."""
        self._write(rank * _PAGE_BYTES, page)

    def _slot(self, rank: int, index: int) -> int:
        return rank * _PAGE_BYTES + _HEAD_BYTES + index % SLOTS * _SLOT_BYTES

    def _get(self, rank: int, field: int) -> int:
        return self._words[rank * _PAGE_WORDS + field]

    def _write(self, at: int, data: bytes):
        """Copy, in one go: pack_into would write zeros first, and a reader might see them."""
        self._map[at : at + len(data)] = data


@lru_cache(4096)
def hash32(text: str) -> int:
    """The same number for the same text in every process; Python's own hash differs."""
    return zlib.crc32(text.encode())


_FIELDS = Record.__slots__
_KEPT = "values", "result", "memory"
_SAME, _NOTHING = _FIELDS[: _FIELDS.index("seq")], (None,) * len(_KEPT)
_same, _kept = attrgetter(*_SAME), attrgetter(*_KEPT)
# What a record that is too long for its slot loses, in this order.
_SPARE = [
    (*_SAME, *_KEPT).index(name)
    for name in ("memory", "result", "values", "fingerprint", "detail", "file")
]


def _changes(record: Record) -> bytes:
    started, done, waited = record.started or 0.0, record.done or 0.0, record.waited or 0.0
    return _CHANGES.pack(started, done, waited, record.waits, record.by_future, record.dropped)


def _rest(record: Record) -> bytes:
    """What a slot's numbers leave out of `record`, pickled."""
    kept = _kept(record)
    return _pickled_once(_same(record)) if kept == _NOTHING else _pickled(_same(record) + kept)


@lru_cache(1024)
def _pickled_once(same: tuple) -> bytes:
    return _pickled((*same, None, None, None))


def _pickled(fields: tuple) -> bytes:
    """The fields, pickled; if that is too long, without what a report of a hang least needs."""
    blob, fields = pickle.dumps(fields, protocol=5), list(fields)
    for spare in _SPARE:
        if len(blob) <= _SLOT_BYTES - _TEXT:
            return blob
        value = fields[spare]
        fields[spare] = value[:80] if isinstance(value, str) else None
        blob = pickle.dumps(fields, protocol=5)
    return blob
