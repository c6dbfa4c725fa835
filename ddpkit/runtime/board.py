"""The board: memory that all ranks of a launch share. A rank writes each call before making it.

The parent can read the page of a rank that is blocked in C++ or dead. Other ranks read it to see
whether they are about to make the same call.
"""

import mmap
import pickle
import zlib
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from operator import attrgetter
from pathlib import Path

# The states of a rank.
STARTING, RUNNING, RETURNED, IDLE, DISAGREES = range(5)

# A page is a head of counters, two notes, and slots for the last calls. All numbers are words of
# eight bytes, each written at once, so that a concurrent reader sees the old or the new number.
_CALLS, _EVENTS, _STATE, _THREADS, _POLLED, _POLLED_AT, _WAITING = range(7)
CALLERS = 8  # threads of a rank that have a waiting mark each
_NOTE = 128  # words of a note: a pickle
_WORD, _SLOT = 8, 256  # bytes of a word, words of a slot
_PLACE = _WAITING + CALLERS  # the note that says where the rank's main thread is
_DESTROYED = _PLACE + _NOTE  # the note that says which groups it has destroyed, and where
_HEAD = _DESTROYED + _NOTE  # words of the head and the notes
# A slot: the call's number on its channel, hashes of channel and fingerprint, times, what became of
# the handle; then a pickle of the call's words and of the values that it moved.
_SEQ, _CHANNEL, _FINGERPRINT, _ISSUED, _STARTED, _DONE, _WAITED, _LIMIT, _BECAME, _TEXT = range(10)
MESSAGES = "send", "recv"  # the other calls are collectives
SLOTS = 256  # the board keeps this many calls per rank, the last ones
_PAGE = _HEAD + SLOTS * _SLOT


@dataclass(frozen=True)
class Said:
    """The part of a record that is the same each time a line makes the same call.

    It is made once and cached: the operation, its group, its arguments, its line. Times, numbers
    and values are the record's.
    """

    op: str  # torch.distributed's name: all_reduce, send, ...
    group: str  # "world", or the ranks of a sub-group
    ranks: tuple[int, ...]  # the group's members, as global ranks
    channel: str  # calls meet on a channel: a group, or one direction between two ranks
    fingerprint: str  # must be the same on every rank: "all_reduce 8 float32 sum"
    detail: str  # the arguments, for people: "8 float32, sum"
    bytes: int  # handed in by this rank; received, for recv and the receivers of broadcast, scatter
    peer: int | None  # global rank: dst of send, reduce, gather; src of recv, broadcast, scatter
    shape: tuple[int, ...]
    dtype: str
    file: str
    line: int
    function: str
    via: str = ""  # the installed framework's line that the user's line called
    # Of an all_to_all: elements for each member, and elements expected from each.
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    @cached_property
    def hashes(self) -> tuple[int, int]:
        """Return the hashes of channel and fingerprint, by which other ranks find a call."""
        return hash32(self.channel), hash32(self.fingerprint)

    @cached_property
    def text(self) -> bytes:
        """Return these fields pickled, as a slot of the board holds them."""
        return _pickled(self)


@dataclass(slots=True, repr=False)
class Record:
    """One call of one rank. Times are this machine's `time.perf_counter()`; None: not yet.

    The attributes of `said` are attributes of the record as well: `record.op`. PyTorch's Flight
    Recorder keeps similar records for NCCL.
    """

    said: Said
    seq: int  # the number of earlier calls of this rank on this channel
    issued: float
    started: float | None = None  # on an emulated link, when it took the call; otherwise = issued
    done: float | None = None
    waited: float | None = None  # when the rank first began to wait for it
    limit_s: float | None = None  # the script's own timeout, after which a wait for it ends
    waits: int = 0  # the number of wait() calls on its handle; not on the board
    by_future: bool = False  # get_future() was called: a wait for that, in C++, leaves no mark
    dropped: bool = False  # its handle was deleted before a wait()
    batched: bool = False  # a message in one batch with the message before
    reached: bool = False  # on a GPU, that the stream has come to this call; noted late
    values: list | None = None  # keep_values: the message as handed in, up to 64 elements
    result: list | None = None  # keep_values: what arrived
    memory: tuple[int, int, list] | None = None  # keep_values: (buffer, offset, all it holds)
    number: int = field(default=-1, compare=False)  # the number of earlier calls of its rank
    stream: str = ""  # on a GPU, the stream that carries it; `streams.py` defines the times there

    def __getattr__(self, name: str):
        return getattr(object.__getattribute__(self, "said"), name)

    def __repr__(self):
        return f"<{self.call}, {self.bytes} bytes>"

    @property
    def call(self) -> str:
        """Write the call as a person would: all_reduce(8 float32, sum)."""
        return f"{self.op}({self.detail})"

    @property
    def place(self) -> tuple[str, int, str]:
        """Return (file, line, function) of the reader's own code that made the call."""
        return self.file, self.line, self.function

    @property
    def on_stream(self) -> bool:
        """Tell whether the call is on a GPU and not known to be over."""
        return self.done is None and self.started is None

    @property
    def begun(self) -> float:
        """Return when the transfer began: on a GPU's stream, later than the call was issued."""
        return (self.stream and self.started) or self.issued

    @property
    def whole_bytes(self) -> int:
        """Return the bytes of all ranks' parts together, the `nbytes` that `Link.seconds` takes."""
        return self.bytes * len(self.ranks) if self.op in ("all_gather", "gather") else self.bytes


def unfitting(by_rank: dict[int, Record]) -> list[tuple[int, int]]:
    """Find the pairs of ranks that disagree about an all_to_all: [(sender, receiver)].

    They disagree if the sender sends another number of elements than the receiver expects. by_rank:
    {rank: its record} of one call, perhaps not of all ranks yet.
    """
    pairs = []
    for sender, sent in by_rank.items():
        for receiver, received in by_rank.items():
            if sent.splits is None or received.splits is None:
                continue
            to, by = sent.ranks.index(receiver), sent.ranks.index(sender)
            if sent.splits[0][to] != received.splits[1][by]:
                pairs.append((sender, receiver))
    return pairs


class Board:
    """A memory-mapped file with one page for each rank; a rank writes only its own page.

    It isn't in /dev/shm: containers give little room there, and some systems have none.
    """

    def __init__(self, path: Path, world_size: int, create: bool = False):
        self.world_size = world_size
        with open(path, "w+b" if create else "r+b") as file:
            if create:
                file.truncate(_PAGE * _WORD * world_size)
            self._map = mmap.mmap(file.fileno(), _PAGE * _WORD * world_size)
        self._read: dict[int, tuple[int, list[Record]]] = {}  # {rank: (its events, its records)}
        self._words = memoryview(self._map).cast("q")
        self._times = memoryview(self._map).cast("d")

    def close(self):
        self._words.release()
        self._times.release()
        self._map.close()

    # Writing.

    def put(self, rank: int, index: int, record: Record):
        """Write call number `index` of `rank` into its slot, new or once more, with all its fields.

        Another process may read at any moment: it sees the call only once the count of calls has
        passed it. The count of events moves last, since it makes `records` read again.
        """
        words = self._words
        at = self._slot(rank, index)
        said = record.said
        kept = record.values, record.result, record.memory
        text = said.text if kept == _NOTHING else _pickled(said, kept)
        is_new = index == self.calls(rank)
        if is_new:  # a reader of the slot's previous call must not take half of each
            words[at] = -1
        words[at + _CHANNEL], words[at + _FINGERPRINT] = said.hashes
        self._times[at + _ISSUED] = record.issued
        start = (at + _TEXT) * _WORD
        self._map[start : start + len(text)] = text
        self._put_times(at, record)
        words[at] = record.seq
        words[rank * _PAGE + _CALLS] += is_new
        words[rank * _PAGE + _EVENTS] += 1

    def update(self, rank: int, index: int, record: Record):
        """Write the times and flags of a call again: all that changes until the call is over."""
        self._put_times(self._slot(rank, index), record)
        self._words[rank * _PAGE + _EVENTS] += 1

    def _put_times(self, at: int, record: Record):
        times = self._times
        times[at + _STARTED] = record.started or 0.0
        times[at + _DONE] = record.done or 0.0
        times[at + _WAITED] = record.waited or 0.0
        times[at + _LIMIT] = record.limit_s or 0.0
        flags = record.by_future, record.dropped, record.batched, record.reached
        self._words[at + _BECAME] = sum(flag << bit for bit, flag in enumerate(flags))

    def set_waiting(self, rank: int, index: int | None, caller: int = 0):
        """Mark the call in which a thread of `rank` waits, for the report of a hang.

        index: the number of the call; None removes the mark. caller: the thread's place, from 0.
        """
        self._words[rank * _PAGE + _WAITING + caller] = 0 if index is None else index + 1

    def set_polled(self, rank: int, index: int, now: float):
        """Note the time `now` at which `rank` polled call `index` and found it incomplete."""
        self._words[rank * _PAGE + _POLLED] = index + 1
        self._times[rank * _PAGE + _POLLED_AT] = now

    def set_state(self, rank: int, state: int):
        self._words[rank * _PAGE + _STATE] = state
        self._words[rank * _PAGE + _EVENTS] += 1

    def set_threads(self, rank: int, threads: int):
        """Note how many threads of `rank` make calls: while one waits, another may go on."""
        self._words[rank * _PAGE + _THREADS] = threads

    def set_place(self, rank: int, place: tuple | None):
        """Note the line at which the main thread of `rank` is: (file, line, function, via).

        via: as in `place.place_in`.
        """
        self._set_note(rank, _PLACE, place)

    def set_destroyed(self, rank: int, places: dict[str, tuple]):
        """Note which groups `rank` has destroyed: {name: (file, line, function, via)}.

        If the note has no room for all, the oldest are left out.
        """
        while not self._set_note(rank, _DESTROYED, places):
            places = dict(list(places.items())[1:])
        self._words[rank * _PAGE + _EVENTS] += 1

    def _set_note(self, rank: int, at: int, note: object) -> bool:
        """Pickle `note` into the page of `rank`, from word `at` on, if it fits; return whether."""
        blob = pickle.dumps(note, protocol=5)
        start = (rank * _PAGE + at) * _WORD
        if fits := len(blob) <= _NOTE * _WORD:
            self._map[start : start + len(blob)] = blob
        return fits

    # Reading, from any process, at any time.

    def calls(self, rank: int) -> int:
        return self._get(rank, _CALLS)

    def events(self) -> list[int]:
        """Return each rank's count of writes: while all counts stay the same, no rank has moved."""
        return [self._get(rank, _EVENTS) for rank in range(self.world_size)]

    def waiting(self, rank: int) -> list[int]:
        """Return the numbers of the calls in which threads of `rank` wait, or have just waited."""
        marks = (self._get(rank, _WAITING + caller) for caller in range(CALLERS))
        return [mark - 1 for mark in marks if mark]

    def polled(self, rank: int) -> tuple[int, float] | None:
        """Return (number of the call, time) of the last poll that found a call incomplete, or None.

        The time is the `time.perf_counter()` of the rank's machine.
        """
        index = self._get(rank, _POLLED) - 1
        return (index, self._times[rank * _PAGE + _POLLED_AT]) if index >= 0 else None

    def place(self, rank: int) -> tuple | None:
        """Return the line at which the main thread of `rank` was last noted, or None.

        As (file, line, function, via).
        """
        return self._note(rank, _PLACE)

    def destroyed(self, rank: int) -> dict[str, tuple]:
        """Return the groups that `rank` has destroyed, as {group name: where it did so}."""
        return self._note(rank, _DESTROYED) or {}

    def _note(self, rank: int, at: int) -> object:
        start = (rank * _PAGE + at) * _WORD
        try:
            return pickle.loads(self._map[start : start + _NOTE * _WORD])
        except Exception:  # not written yet, or half-written: the next read gets it
            return None

    def state(self, rank: int) -> int:
        return self._get(rank, _STATE)

    def threads(self, rank: int) -> int:
        return self._get(rank, _THREADS)

    def record(self, rank: int, index: int) -> Record | None:
        """Return call number `index` of `rank`; None if it was overwritten or is being written."""
        if not max(0, self.calls(rank) - SLOTS) <= index < self.calls(rank):
            return None
        words = self._words
        at = self._slot(rank, index)
        seq, issued, *times = words[at], *self._times[at + _ISSUED : at + _BECAME]
        try:
            text = self._map[(at + _TEXT) * _WORD : (at + _SLOT) * _WORD]
            *said, values, result, memory = pickle.loads(text)
            said = Said(*said)
        except Exception:  # half-written, so it unpickles to anything; the next read gets it whole
            return None
        if seq < 0 or (seq, issued) != (words[at], self._times[at + _ISSUED]):  # just overwritten
            return None
        times = [time or None for time in times]
        became = [bool(words[at + _BECAME] >> bit & 1) for bit in range(4)]
        return Record(said, seq, issued, *times, 0, *became, values, result, memory)

    def records(self, rank: int) -> list[Record]:
        """Return the last calls of `rank`, oldest first.

        They are cached until the rank writes again: ranks that compute are watched four times a
        second, and reading 256 calls takes milliseconds.
        """
        events = self._get(rank, _EVENTS)
        if rank not in self._read or self._read[rank][0] != events:
            calls = self.calls(rank)
            found = (self.record(rank, index) for index in range(max(0, calls - SLOTS), calls))
            self._read[rank] = events, [record for record in found if record is not None]
        return list(self._read[rank][1])

    def find(self, rank: int, channel: int, seq: int) -> tuple[int, int] | None:
        """Find call `seq` of `rank` on a channel: (its number, the hash of its fingerprint).

        channel: the hash of its name. None: not made yet, or overwritten.
        """
        words = self._words
        slots = rank * _PAGE + _HEAD
        calls = words[rank * _PAGE + _CALLS]
        oldest = max(0, calls - SLOTS + 1)  # the slot before may just be receiving the next call
        for index in range(calls - 1, oldest - 1, -1):
            at = slots + index % SLOTS * _SLOT
            if words[at + _CHANNEL] == channel and words[at] <= seq:
                return (index, words[at + _FINGERPRINT]) if words[at] == seq else None
        return None

    def page(self, rank: int) -> bytes:
        """Copy all that `rank` has written, for a board on another machine."""
        return self._map[rank * _PAGE * _WORD : (rank + 1) * _PAGE * _WORD]

    def set_page(self, rank: int, page: bytes):
        """Store the page of a rank of another machine."""
        start = rank * _PAGE * _WORD
        head = _HEAD * _WORD
        self._map[start + head : start + len(page)] = page[head:]
        self._map[start : start + head] = page[:head]  # last, since it holds the count of events

    def _slot(self, rank: int, index: int) -> int:
        return rank * _PAGE + _HEAD + index % SLOTS * _SLOT

    def _get(self, rank: int, field: int) -> int:
        return self._words[rank * _PAGE + field]


@lru_cache(4096)
def hash32(text: str) -> int:
    """Hash a text alike in every process, unlike Python's own hash."""
    return zlib.crc32(text.encode())


_NOTHING = None, None, None
_SAID = tuple(Said.__dataclass_fields__)
_all_said = attrgetter(*_SAID)
# Fields that are dropped, in this order, from a record that is too long for its slot.
_SPARE = [
    (*_SAID, "values", "result", "memory").index(name)
    for name in ("memory", "result", "values", "via", "splits", "fingerprint", "detail", "file")
]


def _pickled(said: Said, kept: tuple = _NOTHING) -> bytes:
    """Pickle the fields of a call so that they fit into a slot of the board.

    kept: values, result and memory of the record. If all is too long, those are shortened or left
    out that a report of a hang needs least.
    """
    fields = [*_all_said(said), *kept]
    blob = pickle.dumps(fields, protocol=5)
    for spare in _SPARE:
        if len(blob) <= (_SLOT - _TEXT) * _WORD:
            return blob
        value = fields[spare]
        fields[spare] = value[:80] if isinstance(value, str) else None
        blob = pickle.dumps(fields, protocol=5)
    return blob
