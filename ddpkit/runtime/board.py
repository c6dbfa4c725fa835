"""The board: memory that all ranks of a launch share, where each writes what it is about to say.

Whoever wants to know what a rank is doing reads its page: the parent, while the rank is blocked in
C++ or dead; another rank, to see whether both are about to say the same.
"""

import mmap
import pickle
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

# What a rank is doing, as it last said.
STARTING, RUNNING, RETURNED, IDLE, DISAGREES = range(5)

# The head of a page: five counters of eight bytes.
_CALLS, _EVENTS, _WAITING, _STATE, _THREADS = range(0, 40, 8)
_HEAD_BYTES = 64
_INT = struct.Struct("<q")

# A slot: channel, seq, fingerprint, length of what follows; then the pickled record.
_SLOT = struct.Struct("<IqII")
_SLOT_BYTES = 2048
SLOTS = 256  # so many last calls of each rank does the board remember


@dataclass(slots=True)
class Record:
    """One call of one rank. Times are this machine's `time.perf_counter()`, or None.

    PyTorch's Flight Recorder keeps the like for NCCL.
    """

    op: str  # torch.distributed's name: all_reduce, send, ...
    group: str  # "world", or the ranks of a sub-group
    ranks: tuple[int, ...]  # the group's members, as global ranks
    channel: str  # calls meet on a channel: a group, or one direction between two ranks
    seq: int  # how many calls this rank made on this channel before
    fingerprint: str  # what every rank must say alike here: "all_reduce 8 float32 sum"
    detail: str  # the arguments, for people: "8 float32, sum"
    bytes: int  # what this rank hands in (recv, and who receives a broadcast or scatter: gets)
    peer: int | None  # global rank: dst of send, reduce, gather; src of recv, broadcast, scatter
    shape: tuple[int, ...]
    dtype: str
    file: str
    line: int
    function: str
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

    @property
    def call(self) -> str:
        """The call as a person writes it: all_reduce(8 float32, sum)."""
        return f"{self.op}({self.detail})"

    @property
    def place(self) -> tuple[str, int, str]:
        """(file, line, function) of the reader's own code that made the call."""
        return self.file, self.line, self.function

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
        self._page_bytes = _HEAD_BYTES + SLOTS * _SLOT_BYTES
        with open(path, "w+b" if create else "r+b") as file:
            if create:
                file.truncate(self._page_bytes * world_size)
            self._map = mmap.mmap(file.fileno(), self._page_bytes * world_size)

    def close(self):
        self._map.close()

    # Writing.

    def put(self, rank: int, index: int, record: Record):
        """Write call number `index` of `rank`.

        Others see it, complete, once the count of calls moves past it: that comes last.
        """
        at, blob = self._slot(rank, index), _blob(record)
        fingerprint = hash32(record.fingerprint)
        self._write(at + _SLOT.size, blob)
        self._write(at, _SLOT.pack(hash32(record.channel), record.seq, fingerprint, len(blob)))
        if index == self._get(rank, _CALLS):
            self._set(rank, _CALLS, index + 1)
        self._set(rank, _EVENTS, self._get(rank, _EVENTS) + 1)

    def set_waiting(self, rank: int, index: int | None):
        """`rank` now sits in the wait of its call `index`, or no longer in any."""
        self._set(rank, _WAITING, 0 if index is None else index + 1)

    def set_state(self, rank: int, state: int):
        self._set(rank, _STATE, state)
        self._set(rank, _EVENTS, self._get(rank, _EVENTS) + 1)

    def set_threads(self, rank: int, threads: int):
        """How many threads of `rank` have made calls: of several, a wait blocks only one."""
        self._set(rank, _THREADS, threads)

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
        length = _SLOT.unpack_from(self._map, at)[3]
        try:
            return Record(*pickle.loads(self._map[at + _SLOT.size : at + _SLOT.size + length]))
        except Exception:  # half-written, it unpickles to anything; the next look sees it whole
            return None

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
            its_channel, its_seq, said, _ = _SLOT.unpack_from(self._map, self._slot(rank, index))
            if its_channel == channel and its_seq <= seq:
                return (index, said) if its_seq == seq else None
        return None

    def page(self, rank: int) -> bytes:
        """All that `rank` has written, for a board on another machine."""
        return self._map[rank * self._page_bytes : (rank + 1) * self._page_bytes]

    def set_page(self, rank: int, page: bytes):
        """Take the page of a rank of another machine."""
        self._write(rank * self._page_bytes, page)

    def _slot(self, rank: int, index: int) -> int:
        return rank * self._page_bytes + _HEAD_BYTES + index % SLOTS * _SLOT_BYTES

    def _get(self, rank: int, field: int) -> int:
        return _INT.unpack_from(self._map, rank * self._page_bytes + field)[0]

    def _set(self, rank: int, field: int, value: int):
        self._write(rank * self._page_bytes + field, _INT.pack(value))

    def _write(self, at: int, data: bytes):
        """Copy, in one go: pack_into would write zeros first, and a reader might see them."""
        self._map[at : at + len(data)] = data


def hash32(text: str) -> int:
    """The same number for the same text in every process; Python's own hash differs."""
    return zlib.crc32(text.encode())


_FIELDS = Record.__slots__
_SPARE = [
    _FIELDS.index(name) for name in ("memory", "result", "values", "fingerprint", "detail", "file")
]


def _blob(record: Record) -> bytes:
    """The record, pickled; if it is too long, without what a report of a hang least needs."""
    fields = [getattr(record, name) for name in _FIELDS]
    blob = pickle.dumps(tuple(fields), protocol=5)
    for spare in _SPARE:
        if len(blob) <= _SLOT_BYTES - _SLOT.size:
            return blob
        value = fields[spare]
        fields[spare] = value[:80] if isinstance(value, str) else None
        blob = pickle.dumps(tuple(fields), protocol=5)
    return blob
