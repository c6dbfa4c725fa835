"""The board: a file, mapped into memory by all ranks of a launch, where each writes what it does.

A rank writes into its own page, a part of the file. It writes a call (a collective, a message, the
making of a group) before it makes it, and notes there when it is complete. So the launcher can read
what a rank did even if the rank is dead or blocked in C++, and other ranks can see whether they are
about to make the same call. These words are used here:

channel: a series of calls; the n-th calls that ranks make on a channel belong together. Its name is
    "0#1" for the collectives of the group that torch names "0", in the script's first world (#1: a
    script may end a world and begin another); "0#1 2>3:7" for messages in this group with tag 7
    from rank 2 to rank 3 of the world; "new 1#1" for the making of the group "1#1".
fingerprint: a text, such as "all_reduce 8 float32 sum", that must be the same in all calls that
    belong together. For a new group and a receive from any rank it is "", and isn't compared.
index: the number of a call among all calls of its rank, from 0.
via: the line of an installed framework that the user's line called, as "file:line:function", or "".

A page begins with single words (a word is 8 bytes): counts, the rank's state, and marks, the calls
in which its threads wait. Then come two notes, which are pickles (the user's line that the rank has
reached; the groups that it has destroyed), and slots for its last 256 (SLOTS) calls.
"""

import mmap
import pickle
import zlib
from array import array
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from operator import attrgetter
from pathlib import Path

from ..tools.units import equally_spaced

# The states of a rank. IDLE: a live rank between two cells. DISAGREES: it has found that another
# rank makes a different call.
STARTING, RUNNING, RETURNED, IDLE, DISAGREES = range(5)

# A word is written at once, so that a concurrent reader sees the old or the new number.
_CALLS, _EVENTS, _STATE, _THREADS, _POLLED, _POLLED_AT, _WAITING = range(7)
CALLERS = 8  # threads of a rank that have a waiting mark each
_NOTE = 128  # words of a note: a pickle
_WORD, _SLOT = 8, 256  # bytes of a word, words of a slot
_PLACE = _WAITING + CALLERS  # the note that says which line the main thread is on
_DESTROYED = _PLACE + _NOTE  # the note that says which groups it has destroyed, and where
_HEAD = _DESTROYED + _NOTE  # words of the head and the notes
# A slot holds a call: its index on its channel, hashes of channel and fingerprint, its times, flags
# that say what became of its handle; then a pickle of its `Said` and of the values that it moved.
_SEQ, _CHANNEL, _FINGERPRINT, _ISSUED, _STARTED, _DONE, _WAITED, _LIMIT, _BECAME, _TEXT = range(10)
MESSAGES = "send", "recv"  # operations between two ranks; the others are collectives
SLOTS = 256  # the board keeps this many calls per rank, the last ones
_PAGE = _HEAD + SLOTS * _SLOT


@dataclass(frozen=True)
class Said:
    """The description of a call: the part of its record that is the same each time a line makes it.

    A line's equal calls share one `Said`; calls of new_group don't. The rest is in each `Record`.

    op, detail: the operation, such as "all_reduce", and its arguments, such as "8 float32, sum".
    group: "world", or as "group [0, 2]". ranks: its members or, of a message, (sender, receiver),
        as ranks of the world.
    channel, fingerprint: see the module. A receive from any rank has all members as `ranks`, "" as
        its fingerprint, and a channel such as "0#1 7?" for tag 7. When wait() has got a message,
        its record gets another `Said`, with its sender (`peer`, `ranks`) and its channel.
    bytes, shape, dtype: of the tensor that this rank passes in. A recv, or a receiver of broadcast
        or scatter, has those of the tensor that it gets. If there are several tensors, these are
        the bytes of all and the shape of the first; if there is none, 0, () and "".
    peer: the root, or a message's other end, as a rank of the world; None if there is none.
    file, line, function, via: the line that makes the call. amid: the exception that this line
        handles, in an `except` or `finally`, as "ValueError: no data (train.py:12)"; otherwise "".
    splits: of an all_to_all, (numbers of elements sent to each member, numbers expected from each).
    """

    op: str  # torch.distributed's name: all_reduce, send, ...
    group: str  # "world", or the ranks of a sub-group
    ranks: tuple[int, ...]  # the group's members, or (sender, receiver), as global ranks
    channel: str  # its name
    fingerprint: str  # must be the same on every rank: "all_reduce 8 float32 sum"
    detail: str  # the arguments, for people: "8 float32, sum"
    bytes: int
    peer: int | None  # global rank: dst of send, reduce, gather; src of recv, broadcast, scatter
    shape: tuple[int, ...]
    dtype: str
    file: str
    line: int
    function: str
    via: str = ""
    amid: str = ""
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    @cached_property
    def hashes(self) -> tuple[int, int]:
        """Return (hash of the channel, hash of the fingerprint), by `hash32`, alike on all ranks.

        By the first, another rank finds this call on the board; by the second it compares the call
        with its own. The second is 0 for a call that isn't compared, whose fingerprint is "".
        """
        return hash32(self.channel), hash32(self.fingerprint)

    @cached_property
    def text(self) -> bytes:
        """Return the list of all fields and three Nones, pickled by `_pickled` to fit into a slot.

        The Nones are `values`, `result` and `memory` of a `Record` in a launch without keep_values.
        """
        return _pickled(self)


@dataclass(slots=True, repr=False)
class Record:
    """One call of one rank: what it is (`said`), its times, and what became of it.

    Times are this machine's `time.perf_counter()`, in seconds; None: that hasn't happened yet. The
    fields of `said` (its operation, group, channel, bytes, line) are read as `record.op` as well.

    seq: how many calls this rank made before on the same channel. issued: when the rank made it.
        started: when an emulated link or a GPU began to carry it; without either, as `issued`.
        done: when it was complete or, on the CPU, seen to be. waited: when the rank or, on a GPU,
        the rank's current stream began to wait for it.
    limit_s: the timeout of its group or wait, in seconds. waits: the number of wait() calls on it,
        with the one inside a collective that blocks on the CPU. by_future: get_future() was called.
        dropped: it is a message on the CPU whose handle was deleted before a wait().
    batched: on a GPU, it is in one batch with the message before. stream: the name of the GPU
        stream that carries it, or "". reached: whether the GPU has finished the work queued before
        this call; found out only if the call is still open 0.3 s after `issued`, otherwise False.
    number: the call's index among all calls of its rank; -1 in a record read from the board.
    values, result: with `launch(..., keep_values=True)`, flat lists of all numbers that the rank
        handed in, and of those that arrived; None without it, or if there are none or more than 64.
    memory: with keep_values, of its first tensor: (number of the storage, from 0 on each rank; the
        tensor's offset in it, in elements; the storage's elements). The elements are from before
        the call. If the program's wait() on the CPU is first to see the call's end, they are copied
        again then, since the program can't be changing them. None for a storage of more than 64.
    """

    said: Said
    seq: int  # the number of earlier calls of this rank on this channel
    issued: float
    started: float | None = None
    done: float | None = None
    waited: float | None = None  # when the rank began to wait for it; on the CPU, the last time
    limit_s: float | None = None  # the timeout of its group or wait, after which a wait fails
    waits: int = 0  # the number of wait() calls on its handle; not on the board
    by_future: bool = False  # get_future() was called: a wait for that, in C++, leaves no mark
    dropped: bool = False  # its handle was deleted before a wait()
    batched: bool = False  # on a GPU, in one batch with the message before
    reached: bool = False  # on a GPU, 0.3 s after `issued` or later: its stream has come to it
    # With `launch(..., keep_values=True)`, and not of more than 64 elements:
    values: list | None = None  # the numbers that the rank handed in
    result: list | None = None  # the numbers that arrived
    memory: tuple[int, int, list] | None = None
    number: int = field(default=-1, compare=False)  # the number of earlier calls of its rank
    stream: str = ""  # on a GPU, the stream that carries it; `streams.py` defines the times there

    def __getattr__(self, name: str):
        return getattr(object.__getattribute__(self, "said"), name)

    def __repr__(self):
        return f"<{self.call}, {self.bytes} bytes>"

    @property
    def call(self) -> str:
        """Return the call in words, such as "all_reduce(8 float32, sum)" for 8 elements."""
        return f"{self.op}({self.detail})"

    @property
    def place(self) -> tuple[str, int, str]:
        """Return (file, line, function) of the line that made the call: the user's, if known."""
        return self.file, self.line, self.function

    @property
    def on_stream(self) -> bool:
        """Return whether the call is on a GPU's stream and, as far as is known, hasn't ended there.

        Such a call has neither `started` nor `done`, since both are noted only after its end. This
        is False for a call on the CPU, and for a barrier on NCCL, which isn't timed on the GPU:
        both have `started` from the beginning. A record that `ddpkit.explain` makes from the dump
        of NCCL's flight recorder never has `started`, so for it this is True until it has `done`.
        """
        return self.done is None and self.started is None

    @property
    def begun(self) -> float:
        """Return the time, in seconds, from which on the call was under way, as far as is known.

        It is `issued` or, on a GPU, `started`, once it is known when the stream came to the call. A
        record read from the board doesn't have its `stream`, so there it is `issued` in any case.
        """
        return (self.stream and self.started) or self.issued

    @property
    def whole_bytes(self) -> int:
        """Return the number of bytes from which an emulated link computes how long the call takes.

        For an all_gather or gather, where `bytes` is one rank's part, it is the size of all parts
        together. For other operations it is `bytes`, which on a receiver of a scatter is one part.
        """
        return self.bytes * len(self.ranks) if self.op in ("all_gather", "gather") else self.bytes


def unfitting(by_rank: dict[int, Record]) -> dict[tuple[int, int], tuple[int, int]]:
    """Return the sizes in an all_to_all that don't match: {(sender, receiver): (sent, expected)}.

    Sent is the number of elements that the sender sends, expected what the receiver expects of it.
    by_rank: {rank: its record} of one collective call, by ranks of the world, as in the result.
        Ranks that haven't made it yet may be missing. Records without `splits`, of other calls than
        an all_to_all, are skipped. So are pairs for which a record has too few sizes: there PyTorch
        itself raises an error.
    """
    found = {}
    sized = {rank: record for rank, record in by_rank.items() if record.splits is not None}
    for sender, sent in sized.items():
        for receiver, received in sized.items():
            to, by = sent.ranks.index(receiver), sent.ranks.index(sender)
            too_few = to >= len(sent.splits[0]) or by >= len(received.splits[1])
            if not too_few and sent.splits[0][to] != received.splits[1][by]:
                found[sender, receiver] = sent.splits[0][to], received.splits[1][by]
    return found


class Board:
    """A memory-mapped file with one page (a part) for each rank, into which that rank writes.

    path: the file; not in /dev/shm, where containers give little room, and which some systems lack.
    world_size: the number of ranks, and of pages, the same for all that open it.
    create: make the file, instead of opening one that another process has made.
    """

    def __init__(self, path: Path, world_size: int, create: bool = False):
        self.world_size = world_size
        with open(path, "w+b" if create else "r+b") as file:
            if create:
                file.truncate(_PAGE * _WORD * world_size)
            self._map = mmap.mmap(file.fileno(), _PAGE * _WORD * world_size)
        self._read: dict[int, tuple[tuple, list[Record]]] = {}  # {rank: (as written, its records)}
        self._words = memoryview(self._map).cast("q")
        self._times = memoryview(self._map).cast("d")

    def close(self):
        """Unmap the file in this process; the file stays, and other processes keep it mapped.

        After that, `place` returns None and `destroyed` {}, and all other methods raise ValueError.
        """
        self._words.release()
        self._times.release()
        self._map.close()

    # Writing.

    def put(self, rank: int, index: int, record: Record):
        """Write a new call into its slot on the rank's page, or an earlier one once more.

        A new call has the index `calls(rank)`, which then grows by 1; it overwrites the call 256
        (SLOTS) before it. The caller makes sure that an earlier one is among the rank's last 256:
        otherwise this would overwrite the later call that has its slot now.
        A process that reads the slot meanwhile gets None if the call is new. If it is written
        again, the reader gets None, or old fields beside new. In either case the page's count of
        writes (`events`) grows at the end: `records` then drops its cache of the page.
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
        """Write a call's times and flags again: in most calls, all that changes after `put`.

        It costs less than `put`, which writes all fields. The slot must still be this call's: the
        caller makes sure that the call is one of the rank's last 256.
        """
        self._put_times(self._slot(rank, index), record)
        self._words[rank * _PAGE + _EVENTS] += 1

    def _put_times(self, at: int, record: Record):
        """Write a record's times, and its flags (True or False), into a slot of the board.

        The time `issued` never changes, so `put` alone writes it. A time that is None becomes 0.
        at: where the slot begins, in words of 8 bytes from the beginning of the file.
        """
        times = self._times
        times[at + _STARTED] = record.started or 0.0
        times[at + _DONE] = record.done or 0.0
        times[at + _WAITED] = record.waited or 0.0
        times[at + _LIMIT] = record.limit_s or 0.0
        flags = record.by_future, record.dropped, record.batched, record.reached
        self._words[at + _BECAME] = sum(flag << bit for bit, flag in enumerate(flags))

    def set_waiting(
        self, rank: int, index: int | None, caller: int = 0, since: float | None = None
    ):
        """Mark the call in which a thread of `rank` waits, for the report of a hang.

        index: that of the call; None removes the mark.
        caller: which of the rank's 8 (CALLERS) marks it is, from 0. The recorder gives each live
            thread that makes calls one of its own; threads that find none free share the last.
        since: the `time.perf_counter()` at which the wait began, for the field `waited` of the
            call's record; None: the field stays as it is. If `index` is None, `since` must be None.
        """
        if since is not None and index >= self.calls(rank) - SLOTS:
            self._times[self._slot(rank, index) + _WAITED] = since
        self._words[rank * _PAGE + _WAITING + caller] = 0 if index is None else index + 1

    def set_polled(self, rank: int, index: int, now: float):
        """Note that `rank` asked whether its call `index` was complete, and that it wasn't.

        Only the latest note is kept. The report of a hang takes a rank that asked less than 1 s ago
        for one that asks in a loop, and so may be waiting for the call.
        now: the time of asking, by `time.perf_counter()`.
        """
        self._words[rank * _PAGE + _POLLED] = index + 1
        self._times[rank * _PAGE + _POLLED_AT] = now

    def set_state(self, rank: int, state: int):
        """Write the state of `rank`: STARTING, RUNNING, RETURNED, IDLE or DISAGREES.

        STARTING: it hasn't joined the others yet. RUNNING: it runs the user's code, or has failed
        in it. RETURNED: the user's function or script has ended. IDLE: it waits for a notebook's
        next cell. DISAGREES: it has found that another rank makes a different call.
        """
        self._words[rank * _PAGE + _STATE] = state
        self._words[rank * _PAGE + _EVENTS] += 1

    def set_threads(self, rank: int, threads: int):
        """Write how many live threads of `rank` have made calls; if fewer wait, it isn't stuck."""
        self._words[rank * _PAGE + _THREADS] = threads

    def set_place(self, rank: int, place: tuple | None):
        """Note on the board which line of the user's code the main thread of `rank` has reached.

        place: (file, line, function, via); None if no line is known. If it is too long for its room
            on the board, the earlier note stays.
        """
        self._set_note(rank, _PLACE, place)

    def set_destroyed(self, rank: int, places: dict[str, tuple]) -> dict[str, tuple]:
        """Note all groups that `rank` has destroyed, and on which lines; return those that fitted.

        places: {name of the group, such as "0#1": (file, line, function, via)}, in the order in
            which they were destroyed. If the note has no room for all, the first are left out.
        """
        while not self._set_note(rank, _DESTROYED, places):
            places = dict(list(places.items())[1:])
        self._words[rank * _PAGE + _EVENTS] += 1
        return places

    def _set_note(self, rank: int, at: int, note: object) -> bool:
        """Pickle `note` into the page of `rank`, from its word `at` on; return whether it fits.

        If it needs more than the 128 words (_NOTE) of a note, nothing is written.
        """
        blob = pickle.dumps(note, protocol=5)
        start = (rank * _PAGE + at) * _WORD
        if fits := len(blob) <= _NOTE * _WORD:
            self._map[start : start + len(blob)] = blob
        return fits

    # Reading, from any process, at any time.

    def calls(self, rank: int) -> int:
        """Return how many calls `rank` has written in all; the last 256 (SLOTS) can be read."""
        return self._get(rank, _CALLS)

    def events(self) -> list[int]:
        """Return for each rank a count of what it has written, which grows as the rank gets on.

        It grows by one when a call is made, when a call's record changes, such as at its end, when
        `set_state` is called and when a group is destroyed. It doesn't when the program begins to
        wait, asks whether a call is complete or reaches another line. If it is the same at two
        moments, the rank has made no call in between, and noted none as complete.
        """
        return [self._get(rank, _EVENTS) for rank in range(self.world_size)]

    def waiting(self, rank: int) -> list[int]:
        """Return the indices of the calls in which threads of `rank` are marked as waiting.

        Indices count all calls of `rank`, and can be passed to `record`. The record's `done` says
        whether the wait is over: the mark of a complete call stays until the thread waits again.
        """
        marks = (self._get(rank, _WAITING + caller) for caller in range(CALLERS))
        return [mark - 1 for mark in marks if mark]

    def polled(self, rank: int) -> tuple[int, float] | None:
        """Return (index of the call, time) of the last poll that found a call incomplete, or None.

        In a poll, `rank` asks whether a call is complete, as by `handle.is_completed()`. The index
        counts all its calls, from 0. The time is its machine's `time.perf_counter()` at the poll.
        """
        index = self._get(rank, _POLLED) - 1
        return (index, self._times[rank * _PAGE + _POLLED_AT]) if index >= 0 else None

    def place(self, rank: int) -> tuple | None:
        """Return (file, line, function, via), the user's line that `rank` noted last, or None.

        It is where the main thread was at the last `set_place`, which only ranks that torchrun
        started call, regularly. None: none is noted, or the note can't be read.
        """
        return self._note(rank, _PLACE)

    def destroyed(self, rank: int) -> dict[str, tuple]:
        """Return the groups that `rank` has destroyed, and by which lines of the user's code.

        It is {name, such as "0#1": (file, line, function, via)}; {} if none can be read.
        """
        return self._note(rank, _DESTROYED) or {}

    def _note(self, rank: int, at: int) -> object:
        """Return the object pickled in the note at word `at` of the page of `rank`, or None.

        None: the note isn't written yet, or is just being written. Very rarely a half-written note
        can be unpickled: then the object is a mixture of the old note and the new.
        """
        start = (rank * _PAGE + at) * _WORD
        try:
            return pickle.loads(self._map[start : start + _NOTE * _WORD])
        except Exception:  # not written yet, or half-written: the next read gets it
            return None

    def state(self, rank: int) -> int:
        """Return the state that `rank` set last, such as RUNNING; STARTING until it has set one."""
        return self._get(rank, _STATE)

    def threads(self, rank: int) -> int:
        """Return the number that `rank` last wrote by `set_threads`; 0 until it has written one."""
        return self._get(rank, _THREADS)

    def record(self, rank: int, index: int) -> Record | None:
        """Return the record of one call of `rank`, or None if it can't be read.

        None: the rank hasn't written it yet, is just writing it, or has made 256 (SLOTS) calls
        since. The fields `waits`, `number` and `stream` aren't on the board, and have defaults.
        """
        if not max(0, self.calls(rank) - SLOTS) <= index < self.calls(rank):
            return None
        words = self._words
        at = self._slot(rank, index)
        seq, issued, *times = words[at], *self._times[at + _ISSUED : at + _BECAME]
        try:
            text = self._map[(at + _TEXT) * _WORD : (at + _SLOT) * _WORD]
            *said, values, result, memory = pickle.loads(text)
            if not isinstance(said[_RANKS], tuple):
                said[_RANKS] = _unpacked(said[_RANKS])
            said = Said(*said)
        except Exception:  # half-written, so it unpickles to anything; the next read gets it whole
            return None
        if seq < 0 or (seq, issued) != (words[at], self._times[at + _ISSUED]):  # just overwritten
            return None
        times = [time or None for time in times]
        became = [bool(words[at + _BECAME] >> bit & 1) for bit in range(4)]
        return Record(said, seq, issued, *times, 0, *became, values, result, memory)

    def records(self, rank: int) -> list[Record]:
        """Return the records of the last calls of `rank`, at most 256 (SLOTS), oldest first.

        A call that is being written is left out. The records are cached until the page's `events`
        or `waiting` change, since reading 256 calls takes milliseconds, and the launcher asks
        several times a second.
        """
        written = self._get(rank, _EVENTS), self.waiting(rank)
        if rank not in self._read or self._read[rank][0] != written:
            calls = self.calls(rank)
            found = (self.record(rank, index) for index in range(max(0, calls - SLOTS), calls))
            self._read[rank] = written, [record for record in found if record is not None]
        return list(self._read[rank][1])

    def find(self, rank: int, channel: int, seq: int) -> tuple[int, int] | None:
        """Find a rank's call by channel and number; return (index, hash of fingerprint), or None.

        The index is the call's number among all calls of `rank`, from 0; the hash is by `hash32`.
        None: the call isn't made yet, or is 255 calls or more ago, and the next may overwrite it.
        channel: `hash32` of the channel's name, such as "0#1" (see the module). seq: how many calls
            `rank` made on that channel before this one.
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
        """Return a copy of the whole page of `rank`, for `set_page` of another machine's board."""
        return self._map[rank * _PAGE * _WORD : (rank + 1) * _PAGE * _WORD]

    def set_page(self, rank: int, page: bytes):
        """Write the page of another machine's rank into this board, in place of the old one.

        page: the bytes that the method `page` returned on that machine. The counts are written
            last: `records` reads a page again when they change, and needs the calls by then.
        """
        start = rank * _PAGE * _WORD
        head = _HEAD * _WORD
        self._map[start + head : start + len(page)] = page[head:]
        self._map[start : start + head] = page[:head]  # last, since it holds the count of events

    def _slot(self, rank: int, index: int) -> int:
        """Return where the slot of a rank's call `index` begins, in words from the file's start."""
        return rank * _PAGE + _HEAD + index % SLOTS * _SLOT

    def _get(self, rank: int, field: int) -> int:
        """Return one of the single words, each an int, with which a rank's page begins.

        field: its position there, such as _CALLS (0), in words.
        """
        return self._words[rank * _PAGE + field]


@lru_cache(4096)
def hash32(text: str) -> int:
    """Return a hash, from 0 to 2**32 - 1, that is the same in every process, unlike hash()."""
    return zlib.crc32(text.encode())


_NOTHING = None, None, None
_SAID = tuple(Said.__dataclass_fields__)
_all_said = attrgetter(*_SAID)
# Fields that are cut or dropped, in this order, from a record that is too long for its slot.
_SPARED = "memory", "result", "values", "amid", "via", "splits", "fingerprint", "detail"
_SPARED += "file", "group"
_SPARE = [(*_SAID, "values", "result", "memory").index(name) for name in _SPARED]
_RANKS = _SAID.index("ranks")


def _pickled(said: Said, kept: tuple = _NOTHING) -> bytes:
    """Pickle the fields of a call, shortened if they are too long for a slot of the board.

    If the fields fit into 1,976 bytes, nothing is changed. Otherwise `ranks` becomes a range or, if
    the ranks aren't equally spaced, 2 bytes for each; `Board.record` undoes this. If that isn't
    enough, other fields are shortened in the order of _SPARED, until all fit: texts are cut after
    80 characters, and the rest become None. If even that isn't enough, as for 900 ranks that aren't
    equally spaced, the pickle is cut at 1,976 bytes, and `Board.record` returns None.
    said: the call's description. kept: the (values, result, memory) of its `Record`, which follow
        in the pickle; by default three Nones, as in a launch without keep_values.
    """
    room = (_SLOT - _TEXT) * _WORD
    fields = [*_all_said(said), *kept]
    blob = pickle.dumps(fields, protocol=5)
    if len(blob) > room:
        fields[_RANKS] = _packed(said.ranks)
        blob = pickle.dumps(fields, protocol=5)
    for spare in _SPARE:
        if len(blob) <= room:
            break
        value = fields[spare]
        fields[spare] = value[:80] if isinstance(value, str) else None
        blob = pickle.dumps(fields, protocol=5)
    return blob[:room]


def _packed(ranks: tuple[int, ...]) -> range | bytes:
    """Return a group's ranks, to save room in a slot, as a range if equally spaced, or as bytes."""
    return equally_spaced(ranks) or array("H", ranks).tobytes()


@lru_cache(4096)  # a cluster's many calls share a few groups
def _unpacked(ranks: range | bytes) -> tuple[int, ...]:
    """Return the tuple of ranks of which `_packed` made a range, or bytes, 2 for each rank."""
    return tuple(array("H", ranks) if isinstance(ranks, bytes) else ranks)
