"""ddpkit.shared_memory beside one process that has the data of all; it leaves nothing behind."""

import gc
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import twin
from on_ranks import on_ranks
from outside import wait_until

from ddpkit import RankError, launch, shared_memory
from ddpkit.shared_memory import SharedBuffer

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def filled(buffer, part):
    buffer.local.copy_(part)
    return buffer


def every_call(check, parts, group=None, buffer=None):
    """Every call on `parts`, what the ranks of the group bring, compared by bits."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    what = parts[0].dtype, len(parts[0])
    if buffer is None:
        buffer = SharedBuffer(len(parts[0]), parts[0].dtype, group)
        check.same(buffer.local, torch.zeros_like(parts[0]), "a new buffer", *what)

    result = filled(buffer, parts[rank]).all_reduce()
    check.unless(result is buffer.local, "all_reduce returned something else", *what)
    check.same(result, twin.total(parts), "all_reduce", *what)

    mine = filled(buffer, parts[rank]).reduce_scatter()
    own_first = [parts[rank], *parts[:rank], *parts[rank + 1 :]]
    expected = parts[rank].clone().tensor_split(world_size)
    expected[rank].copy_(twin.total(own_first).tensor_split(world_size)[rank])
    check.same(buffer.local, torch.cat(expected), "reduce_scatter, other chunks too", *what)
    view = buffer.local.tensor_split(world_size)[rank]
    same_place = (mine.data_ptr(), mine.shape) == (view.data_ptr(), view.shape)
    check.unless(same_place, "reduce_scatter's result is no view", *what)

    result = filled(buffer, parts[rank]).all_gather()
    check.unless(result is buffer.local, "all_gather returned something else", *what)
    theirs = [part.tensor_split(world_size)[r] for r, part in enumerate(parts)]
    check.same(result, torch.cat(theirs), "all_gather", *what)


# Values


@on_ranks(1, 2, 3, 4)
def test_dtypes_and_lengths(check, world_size):
    cases = [(29, dtype) for dtype in twin.DTYPES[world_size % 3 :: 3]]
    lengths = 0, 1, world_size - 1, world_size, 4 * world_size + 1
    cases += [(length, torch.float32) for length in lengths]
    for length, dtype in cases:
        every_call(check, [twin.whole(r, length, dtype) for r in range(world_size)])


@on_ranks(3, timeout=40)
def test_marks_on_several_pages(check):
    with patch.object(shared_memory, "PAGE", 8):
        every_call(check, [twin.whole(r, 41) for r in range(3)])


@on_ranks(3)
def test_sums_that_round(check, rank, world_size):
    """In one piece and in several; NaNs of other bits on every rank."""
    for dtype in twin.FLOATS:
        parts = [twin.fractions(r, 1003, dtype) for r in range(world_size)]
        for piece_bytes in (shared_memory.PIECE_BYTES, 64, 8):
            with patch.object(shared_memory, "PIECE_BYTES", piece_bytes):
                every_call(check, parts)
        x = filled(SharedBuffer(1003, dtype), parts[rank]).all_reduce().clone()
        check.near(x, parts, "all_reduce", dtype)
        check.same_on_all(x, "all_reduce", dtype)
    nan = torch.full((23,), 0x7FC00001 + rank, dtype=torch.int32).view(torch.float32)
    x = filled(SharedBuffer(23), nan).all_reduce().clone()
    check.unless(bool(x.isnan().all()), "lost a NaN", x)
    check.same_on_all(x, "all_reduce of NaNs")


@on_ranks(2, 5)
def test_many_calls(check, rank, world_size):
    """With new data, in a random order of calls, with random pauses, each checked to the bit."""
    order, pauses = random.Random(0), random.Random(rank + 1)  # the order is the same on all
    buffers = [SharedBuffer(41), SharedBuffer(7)]
    for number in range(100):
        buffer, call = order.choice(buffers), order.choice(shared_memory.CALLS)
        parts = [twin.whole(r, len(buffer.local), salt=number) for r in range(world_size)]
        buffer.local.copy_(parts[rank])
        if pauses.random() < 0.1:
            time.sleep(pauses.random() * 2e-3)
        result = getattr(buffer, call)()
        if pauses.random() < 0.1:
            time.sleep(pauses.random() * 2e-3)
        if call == "all_gather":
            chunks = [part.tensor_split(world_size)[r] for r, part in enumerate(parts)]
            expected = torch.cat(chunks)
        else:
            expected = twin.total(parts)
            if call == "reduce_scatter":
                expected = expected.tensor_split(world_size)[rank]
        check.same(result, expected, call, number)


@on_ranks(3)
def test_several_buffers(check, rank, world_size):
    """Two at once, one in place of one that is gone; `local` without the buffer it belongs to."""
    first, second = filled(SharedBuffer(41), twin.whole(rank, 41)), SharedBuffer(41)
    kept = first.all_reduce()
    check.same(second.local, torch.zeros(41), "two at once")
    del first
    gc.collect()
    check.same(SharedBuffer(41).local, torch.zeros(41), "a buffer in place of another")
    check.same(kept, twin.total([twin.whole(r, 41) for r in range(world_size)]), "what was kept")


@on_ranks(5)
def test_groups(check, rank):
    """They interleave, each calls as often as it likes; a rank outside is refused."""
    evens, odds = dist.new_group([0, 2, 4]), dist.new_group([3, 1])
    three = dist.new_group([1, 2, 4])
    group, members = (odds, [1, 3]) if rank % 2 else (evens, [0, 2, 4])
    buffer = SharedBuffer(25, group=group)
    for salt in range(2 + 5 * (rank % 2)):
        every_call(check, [twin.whole(r, 25, salt=salt) for r in members], group, buffer)
    if rank in (1, 2, 4):
        every_call(check, [twin.whole(r, 25) for r in (1, 2, 4)], three)
    else:
        says = f"rank {rank} called SharedBuffer with a group that it isn't in"
        check.refused(SharedBuffer, 25, group=three, says=says)


def test_no_call_sends_a_message():
    def calls():
        buffer = SharedBuffer(1000)
        dist.all_reduce(torch.ones(1))  # marks in the records where the calls begin
        for _ in range(3):
            buffer.all_reduce(), buffer.reduce_scatter(), buffer.all_gather()

    for records in launch(calls, world_size=3).wire:
        assert [record.op for record in records].index("all_reduce") == len(records) - 1


# What is left behind


def mapped() -> Counter[str]:
    """The files, in memory or not, that this process has in its address space."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return Counter(line.split(maxsplit=5)[5] for line in lines if "/" in line)


def opened() -> Counter[str]:
    """The files that this process has open."""
    numbers = os.listdir("/proc/self/fd")
    return Counter(os.path.realpath(f"/proc/self/fd/{number}") for number in numbers)


@on_linux
@pytest.mark.parametrize("in_memory", [True, False])
def test_memory_without_a_file(tmp_path, in_memory):
    def look_around():
        """What a buffer adds to mapped files, open files and the folder: meanwhile, and after."""
        tempfile.tempdir = str(tmp_path)
        if not in_memory:
            del os.memfd_create
        SharedBuffer(41).all_reduce()  # torch loads and opens things of its own when first used
        gc.collect()
        mapped_before, opened_before = mapped(), opened()
        buffer = SharedBuffer(41)
        buffer.all_reduce()
        during = mapped() - mapped_before, opened() - opened_before, os.listdir(tmp_path)
        del buffer
        after = mapped() - mapped_before, opened() - opened_before, os.listdir(tmp_path)
        return during, after

    for ([file, *others], *rest), after in launch(look_around, world_size=3):
        assert file.startswith("/memfd:ddpkit" if in_memory else f"{tmp_path}/ddpkit-")
        assert file.endswith("(deleted)")
        assert (others, rest) == ([], [{}, []])
        assert after == ({}, {}, [])


# What goes wrong


def test_a_rank_that_returns_early_is_named():
    def leave_early():
        buffer = SharedBuffer(41)
        if dist.get_rank() != 1:
            buffer.all_gather()

    says = (
        r"^rank ([02]) raised RuntimeError: rank \1 waits in SharedBuffer.all_gather for rank 1, "
        r"which has let go of its buffer\. Did it return early, or skip the call\?"
    )
    with pytest.raises(RankError, match=says):
        launch(leave_early, world_size=3, timeout=40)


@on_ranks(2, timeout=40)
def test_a_rank_that_has_come_may_go(check):
    """Rank 0 comes first to the last meeting; when it looks closer, rank 1 has come and gone."""
    last = 3
    pieces, check_others = SharedBuffer._pieces, SharedBuffer._check_others

    def finish_late(buffer):
        if dist.get_rank() == 1:
            wait_until(lambda: buffer._marks[0] // len(shared_memory.CALLS) == last)
        return pieces(buffer)

    def look_late(buffer, call, meeting):
        if dist.get_rank() == 0 and meeting == last:
            wait_until(lambda: buffer._marks[1] < 0)
        check_others(buffer, call, meeting)

    with patch.multiple(SharedBuffer, _pieces=finish_late, _check_others=look_late):
        result = filled(SharedBuffer(2), dist.get_rank() + 1.0).all_reduce().tolist()
    check.same(result, [3.0, 3.0], "all_reduce")


@on_ranks(4, timeout=40)
def test_ranks_that_make_different_calls_are_told(check):
    rank, group = dist.get_rank(), dist.new_group([1, 3, 2])
    if rank == 0:
        return
    buffer = SharedBuffer(41, group=group)
    buffer.all_reduce()
    mine, theirs = "reduce_scatter", "rank 2 called all_gather: all ranks must"
    if rank == 2:
        mine, theirs = "all_gather", "called reduce_scatter: all ranks must"
    says = (f"rank {rank} called SharedBuffer.{mine}, rank ", theirs)
    check.refused(getattr(buffer, mine), says=says, error=RuntimeError)


@on_ranks(3)
def test_every_rank_hears_that_they_disagree(check, rank):
    says = ("same SharedBuffer", "numel=42 on rank 1, numel=41 in its place on rank 0")
    check.refused(SharedBuffer, 41 + rank % 2, says=says)
    dtype = torch.float64 if rank == 2 else torch.float32
    says = "torch.float64 on rank 2, torch.float32 in its place on rank 0"
    check.refused(SharedBuffer, 41, dtype, says=says)
    with patch("socket.gethostname", lambda: f"node{rank // 2}"):
        says = "machine node1 on rank 2, machine node0 in its place on rank 0"
        check.refused(SharedBuffer, 41, says=says)
    for numel in (-1, 2.0, True, None):
        says = f"rank {rank} called SharedBuffer with numel={numel!r}, expected a whole number"
        check.refused(SharedBuffer, numel, says=says)
    every_call(check, [twin.whole(r, 41) for r in range(3)])  # nothing of it stays
