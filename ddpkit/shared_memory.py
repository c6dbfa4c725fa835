"""All-reduce between ranks of one machine, through memory that all of them can see.

No message is sent. Every rank has its numbers in its own slot of one shared block of memory, sums
one chunk over all slots, and writes the sum into each slot. GPUs joined by NVLink do the same:
they read and write each other's memory (PyTorch's `torch.distributed._symmetric_memory`).

W is the number of ranks, n the bytes of a slot. For an all-reduce every rank reads n bytes and
writes n, whatever W: the speed is that of copying memory. Notebook 02.
"""

import os
import socket
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .tools.checks import check_in_group, check_same, misuse

PIECE_BYTES = 2**18  # summed and written back before it leaves the cache
CALLS = ("all_reduce", "reduce_scatter", "all_gather")
PAGE = 4096  # bytes; the ranks' marks have whole pages before the slots
SPINS = 100  # looks at the other ranks before a waiting rank naps between looks
NAP_S = 50e-6
_let_others_run = getattr(os, "sched_yield", partial(time.sleep, 0))


class SharedBuffer:
    """One buffer a rank, all in memory that the ranks share; sums and copies without a message.

    numel, dtype: of one buffer, the same on every rank. group: ranks of one machine (None: all).
    ValueError: `numel` isn't a whole number from 0, or numel and dtype differ between ranks; this
    rank isn't in `group`; the ranks are on different machines.
    RuntimeError, from a collective method: another rank called a different one, or dropped its
    buffer. For a rank that was killed, the others wait without end.

    `local` is this rank's buffer, a 1-D tensor to fill and to read, zero at first. Chunk r of a
    buffer is `local.tensor_split(W)[r]`, as in `ddpkit.ring`. Sums have the same bits on every
    rank. The memory is freed when the last rank lets go of it or ends, however it ends.
    """

    def __init__(
        self, numel: int, dtype: torch.dtype = torch.float32, group: ProcessGroup | None = None
    ):
        check_in_group("SharedBuffer", group)
        if isinstance(numel, bool) or not isinstance(numel, int) or numel < 0:
            remedy = "Give it x.numel(), for example."
            raise misuse("SharedBuffer", f"numel={numel!r}", "a whole number from 0", remedy)
        mine = f"numel={numel}", str(dtype), f"machine {socket.gethostname()}"
        check_same("SharedBuffer", mine, group)
        self._rank = dist.get_rank(group)
        world_size = dist.get_world_size(group)
        self._ranks = dist.get_process_group_ranks(group)
        # One block: first a mark for each rank, a page for 512 of them, then a slot for each.
        marks = 8 * world_size
        pages = -(-marks // PAGE) * PAGE
        memory = _map_together(pages + world_size * numel * dtype.itemsize, group)
        self._marks = memory[:marks].view(torch.int64)  # see _meet
        slots = memory[pages:].view(dtype).view(world_size, numel)
        self.local = slots[self._rank]
        mine = slots.tensor_split(world_size, dim=1)[self._rank]
        self._chunks = mine.unbind()  # this rank's chunk, in every slot
        self._marks[self._rank] = len(CALLS)  # one meeting: that of `_map_together`
        weakref.finalize(self, _leave, self._marks, self._rank)

    def all_reduce(self) -> Tensor:
        """Sum the buffers of all ranks, in place, on every rank; return `local`.

        Reads n bytes and writes n.
        """
        self._meet("all_reduce")  # all slots are filled
        for total, *others in self._pieces():
            for other in others:
                total += other
            for other in others:
                other.copy_(total)
        self._meet("all_reduce")  # all chunks are written, in this rank's slot as well
        return self.local

    def reduce_scatter(self) -> Tensor:
        """Leave chunk `rank` of the sum over all ranks in `local`; return it, a view.

        The other chunks of `local` stay as they were. Reads n bytes and writes n/W.
        """
        self._meet("reduce_scatter")  # all slots are filled
        for pieces in self._pieces():
            total = pieces.pop(self._rank)
            for other in pieces:
                total += other
        self._meet("reduce_scatter")  # no rank reads this slot any more
        return self._chunks[self._rank]

    def all_gather(self) -> Tensor:
        """Copy chunk r of rank r's buffer into every rank's buffer; return `local`.

        Reads n/W bytes, and writes them W−1 times.
        """
        self._meet("all_gather")
        # Each rank writes into the others' slots, and reads its own only.
        own = self._chunks[self._rank]
        for rank, chunk in enumerate(self._chunks):
            if rank != self._rank:
                chunk.copy_(own)
        self._meet("all_gather")
        return self.local

    def _pieces(self) -> Iterator[list[Tensor]]:
        """Cut this rank's chunk into pieces, each given as W views: one in every slot."""
        length = PIECE_BYTES // self.local.element_size()
        by_slot = [chunk.split(length) for chunk in self._chunks]
        return map(list, zip(*by_slot, strict=True))

    def _meet(self, call: str) -> None:
        """Wait until all ranks have called this as often as this one: a barrier, inside `call`.

        Each rank has a mark, a number in the shared memory: `len(CALLS)` times the barriers that it
        has come to, plus the index of `call` in CALLS; negative once it has dropped its buffer.
        RuntimeError: see `_check_others`.
        """
        meeting = int(self._marks[self._rank]) // len(CALLS) + 1
        # Yielding gives up the interpreter's lock, which also orders memory: a rank that sees the
        # mark sees everything that was written before it.
        _let_others_run()
        self._marks[self._rank] = meeting * len(CALLS) + CALLS.index(call)
        looks = 0
        while self._fewest_meetings() < meeting:
            self._check_others(call, meeting)
            looks += 1
            if looks < SPINS:
                _let_others_run()
            else:
                time.sleep(NAP_S)
        self._check_others(call, meeting)

    def _fewest_meetings(self) -> int:
        """Return the number of barriers to which the slowest rank has come."""
        return min(abs(mark) for mark in self._marks.tolist()) // len(CALLS)

    def _check_others(self, call: str, meeting: int) -> None:
        """Raise RuntimeError if a rank is at barrier `meeting` in another call, or has left."""
        me = f"rank {self._ranks[self._rank]}"
        for rank, mark in zip(self._ranks, self._marks.tolist(), strict=True):
            meetings, number = divmod(abs(mark), len(CALLS))
            if meetings == meeting and CALLS[number] != call:
                theirs = f"{me} called SharedBuffer.{call}, rank {rank} called {CALLS[number]}"
                raise RuntimeError(
                    f"{theirs}: all ranks must make the same calls in the same order"
                )
            if meetings < meeting and mark < 0:
                why = "which has let go of its buffer. Did it return early, or skip the call?"
                raise RuntimeError(f"{me} waits in SharedBuffer.{call} for rank {rank}, {why}")


def _leave(marks: Tensor, rank: int) -> None:
    """Tell the other ranks, by a negative mark, that this rank has dropped its buffer."""
    marks[rank] = -marks[rank]


def _map_together(nbytes: int, group: ProcessGroup | None) -> Tensor:
    """Map the same `nbytes` of memory, zero at first, as uint8, on every rank; all must call."""
    path = [None]
    file = nullcontext()
    if dist.get_rank(group) == 0:
        if hasattr(os, "memfd_create"):  # Linux needs no disk for it
            file = open(os.memfd_create("ddpkit"))
            path = [f"/proc/{os.getpid()}/fd/{file.fileno()}"]
        else:
            file = tempfile.TemporaryDirectory(prefix="ddpkit-", ignore_cleanup_errors=True)
            path = [os.path.join(file.name, "shared")]
    with file:
        dist.broadcast_object_list(path, group=group, group_src=0)
        memory = torch.from_file(path[0], shared=True, size=nbytes, dtype=torch.uint8)
        dist.barrier(group)  # all have mapped it: the file may go, the memory stays until unmapped
    return memory
