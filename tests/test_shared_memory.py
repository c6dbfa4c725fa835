"""ddpkit.shared_memory, on every rank, against one process that has the data of all; and that it leaves nothing behind.

What runs on the ranks returns what it found wrong, as a list of sentences; the tests assert that there are none.
"""

import contextlib
import gc
import inspect
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import cloudpickle
import psutil
import pytest
import torch
import torch.distributed as dist
import twin
from outside import run_script, wait_until

from ddpkit import RankError, launch, shared_memory
from ddpkit.shared_memory import SharedBuffer

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # functions travel as those of a notebook do

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def rank_and_world(group=None):
    return dist.get_rank(group), dist.get_world_size(group)


def filled(buffer, part):
    buffer.local.copy_(part)
    return buffer


def chunks(x, world_size):
    return x.tensor_split(world_size)


# Values


def check(parts, group=None, buffer=None) -> twin.Complaints:
    """Every call on `parts`, what the ranks of the group bring. Sums are compared by bits: their order is known."""
    wrong, (rank, world_size) = twin.Complaints(), rank_and_world(group)
    what = parts[0].dtype, len(parts[0]), f"on {world_size} ranks"
    if buffer is None:
        buffer = SharedBuffer(len(parts[0]), parts[0].dtype, group)
        wrong.same(buffer.local, torch.zeros_like(parts[0]), "a new buffer", *what)

    result = filled(buffer, parts[rank]).all_reduce()
    wrong.unless(result is buffer.local, "all_reduce returned something else", *what)
    wrong.same(result, twin.total(parts), "all_reduce", *what)

    mine = filled(buffer, parts[rank]).reduce_scatter()
    own_first = [parts[rank], *parts[:rank], *parts[rank + 1 :]]
    expected = chunks(parts[rank].clone(), world_size)
    expected[rank].copy_(chunks(twin.total(own_first), world_size)[rank])
    wrong.same(buffer.local, torch.cat(expected), "reduce_scatter, other chunks included", *what)
    view = chunks(buffer.local, world_size)[rank]
    wrong.unless((mine.data_ptr(), mine.shape) == (view.data_ptr(), view.shape), "reduce_scatter's result", *what)

    result = filled(buffer, parts[rank]).all_gather()
    wrong.unless(result is buffer.local, "all_gather returned something else", *what)
    theirs = [chunks(part, world_size)[r] for r, part in enumerate(parts)]
    wrong.same(result, torch.cat(theirs), "all_gather", *what)
    return wrong


def check_dtypes_and_lengths():
    wrong, world_size = [], dist.get_world_size()
    for dtype in twin.DTYPES:
        wrong += check([twin.whole(r, 29, dtype) for r in range(world_size)])
    for length in sorted({0, 1, 2, 3, world_size - 1, world_size, world_size + 1, 4 * world_size}):
        wrong += check([twin.whole(r, length) for r in range(world_size)])
    return wrong


def check_fractions():
    """Sums that must round, in one piece and in several; NaNs of other bits on every rank."""
    wrong, (rank, world_size) = twin.Complaints(), rank_and_world()
    for dtype in twin.FLOATS:
        parts = [twin.fractions(r, 1003, dtype) for r in range(world_size)]
        for piece_bytes in (shared_memory.PIECE_BYTES, 64, 8):
            with patch.object(shared_memory, "PIECE_BYTES", piece_bytes):
                wrong += check(parts)
        x = filled(SharedBuffer(1003, dtype), parts[rank]).all_reduce().clone()
        wrong.near(x, parts, "all_reduce", dtype)
        wrong.same_on_all(x, "all_reduce", dtype)
    nan = torch.full((23,), 0x7FC00001 + rank, dtype=torch.int32).view(torch.float32)
    x = filled(SharedBuffer(23), nan).all_reduce().clone()
    wrong.unless(bool(x.isnan().all()), "lost a NaN", x)
    wrong.same_on_all(x, "all_reduce of NaNs")
    return wrong


def check_many_calls():
    """200 rounds with new data, in a random order of the calls and with random pauses, each checked to the bit."""
    wrong, (rank, world_size) = twin.Complaints(), rank_and_world()
    order, pauses = random.Random(0), random.Random(rank + 1)  # the order is the same on all ranks
    buffers = [SharedBuffer(41), SharedBuffer(7)]
    for number in range(200):
        buffer = order.choice(buffers)
        length, call = len(buffer.local), order.choice(shared_memory.CALLS)
        parts = [twin.whole(r, length, salt=number) for r in range(world_size)]
        if pauses.random() < 0.1:
            time.sleep(pauses.random() * 2e-3)
        buffer.local.copy_(parts[rank])
        result = getattr(buffer, call)()
        if pauses.random() < 0.1:
            time.sleep(pauses.random() * 2e-3)
        total = twin.total(parts)
        gathered = torch.cat([chunks(part, world_size)[r] for r, part in enumerate(parts)])
        expected = {
            "all_reduce": total,
            "reduce_scatter": chunks(total, world_size)[rank],
            "all_gather": gathered,
        }[call]
        wrong.same(result, expected, call, number)
    return wrong


def check_halves():
    """One call on the other's result, without a copy between: reduce-scatter and all-gather make an all-reduce."""
    wrong, (rank, world_size) = twin.Complaints(), rank_and_world()
    parts = [twin.whole(r, 41) for r in range(world_size)]
    buffer = filled(SharedBuffer(41), parts[rank])
    buffer.reduce_scatter()
    wrong.same(buffer.all_gather(), twin.total(parts), "reduce_scatter and all_gather")
    wrong.same(buffer.all_reduce(), twin.total(parts) * world_size, "and all_reduce of that")
    return wrong


def check_again():
    """A buffer in place of one that is gone; two at once that don't mix; `local` without the buffer it belongs to."""
    wrong, (rank, world_size) = twin.Complaints(), rank_and_world()
    buffer = SharedBuffer(41)
    filled(buffer, twin.whole(rank, 41)).all_reduce()
    del buffer
    gc.collect()
    first, second = SharedBuffer(41), SharedBuffer(41)
    for buffer in (first, second):
        wrong.same(buffer.local, torch.zeros(41), "a buffer in place of another")
    filled(first, twin.whole(rank, 41, salt=1))
    filled(second, twin.whole(rank, 41, salt=2))
    second.all_reduce()
    first.all_reduce()
    for salt, buffer in ((1, first), (2, second)):
        parts = [twin.whole(r, 41, salt=salt) for r in range(world_size)]
        wrong.same(buffer.local, twin.total(parts), "two at once, buffer", salt)
    kept = second.local
    del first, second, buffer
    gc.collect()
    wrong.same(kept, twin.total([twin.whole(r, 41, salt=2) for r in range(world_size)]), "what was kept")
    return wrong


CHECKS = [check_dtypes_and_lengths, check_fractions, check_many_calls, check_halves, check_again]


def all_checks():
    return [wrong for check in CHECKS for wrong in check()]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equal_to_one_process(world_size):
    run = launch(all_checks, world_size=world_size)
    assert [wrong[:3] for wrong in run] == [[]] * world_size


def test_more_ranks_than_cores():
    run = launch(lambda: check_many_calls() + check_halves(), world_size=6)
    assert [wrong[:3] for wrong in run] == [[]] * 6


def check_groups():
    """Groups that interleave, each as often as it likes and while the other works; a rank outside is refused."""
    wrong, rank = twin.Complaints(), dist.get_rank()
    evens, odds, three = dist.new_group([0, 2, 4]), dist.new_group([3, 1]), dist.new_group([1, 2, 4])
    group, members = (odds, [1, 3]) if rank % 2 else (evens, [0, 2, 4])
    buffer = SharedBuffer(25, group=group)
    for salt in range(2 + 5 * (rank % 2)):
        wrong += check([twin.whole(r, 25, salt=salt) for r in members], group, buffer)
    if rank in (1, 2, 4):
        wrong += check([twin.whole(r, 25) for r in (1, 2, 4)], three)
    else:
        says = (f"rank {rank} made a SharedBuffer with a group that it isn't in", "on the group's ranks only")
        wrong.refused(SharedBuffer, 25, group=three, says=says)
    return wrong


def test_groups():
    run = launch(check_groups, world_size=5)
    assert [wrong[:3] for wrong in run] == [[]] * 5


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
    return Counter(
        line.split(maxsplit=5)[5] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line
    )


def opened() -> Counter[str]:
    """The files that this process has open."""
    return Counter(os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd"))


def look_around(folder, without_memory_files):
    """What a buffer adds to this rank's mapped files, open files and temporary folder: while it is used, and after."""
    tempfile.tempdir = str(folder)
    if without_memory_files:
        del os.memfd_create
    SharedBuffer(41).all_reduce()  # torch loads and opens things of its own when first used
    gc.collect()
    mapped_before, opened_before = mapped(), opened()
    buffer = SharedBuffer(41)
    wrong = check_halves() + check([twin.whole(r, 41) for r in range(dist.get_world_size())], None, buffer)
    during = mapped() - mapped_before, opened() - opened_before, os.listdir(folder)
    del buffer
    after = mapped() - mapped_before, opened() - opened_before, os.listdir(folder)
    return wrong, during, after


@on_linux
def test_memory_without_a_file(tmp_path):
    for wrong, during, after in launch(look_around, tmp_path, False, world_size=3):
        assert wrong == []
        assert during == ({"/memfd:ddpkit (deleted)": 1}, {}, [])
        assert after == ({}, {}, [])


@on_linux
def test_where_there_are_no_memory_files_a_passing_one_will_do(tmp_path):
    for wrong, during, after in launch(look_around, tmp_path, True, world_size=3):
        assert wrong == []
        [file], *others = during
        assert file.startswith(f"{tmp_path}/ddpkit-")
        assert file.endswith("(deleted)")
        assert others == [{}, []]
        assert after == ({}, {}, [])


def who_maps() -> list[int]:
    """This process and its descendants, as far as they have a buffer's memory in their address space."""
    me = psutil.Process()
    found = []
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(OSError, psutil.Error):
            if "memfd:ddpkit" in Path(f"/proc/{process.pid}/maps").read_text():
                found.append(process.pid)
    return found


# What goes wrong


def die_inside(how, seen):
    """Rank 1 goes when all have met, and the others wait for it to finish its chunk."""
    buffer = SharedBuffer(41)
    if dist.get_rank() == 1:
        seen.write_text(str("memfd:ddpkit" in Path("/proc/self/maps").read_text()))
        buffer._pieces = how
    buffer.all_reduce()


def be_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def fail():
    raise KeyError("mine")


@on_linux
@pytest.mark.parametrize(("how", "says"), [(be_killed, "was killed by SIGKILL"), (fail, "raised KeyError: 'mine'")])
def test_a_rank_that_dies_inside_is_named_and_the_memory_is_free(tmp_path, how, says):
    with pytest.raises(RankError, match=f"^rank 1 {says}") as caught:
        launch(die_inside, how, tmp_path / "seen", world_size=3, timeout=40)
    assert caught.value.rank == 1
    assert (tmp_path / "seen").read_text() == "True"
    wait_until(lambda: not who_maps())


def leave_early(calls):
    buffer = SharedBuffer(41)
    for _ in range(calls):
        buffer.all_reduce()
    if dist.get_rank() != 1:
        buffer.all_gather()


@pytest.mark.parametrize("calls", [0, 1])
def test_a_rank_that_returns_early_is_named(calls):
    says = (
        r"^rank ([02]) raised RuntimeError: rank \1 waits in SharedBuffer.all_gather for rank 1, "
        r"which has let go of its buffer\. Did it return early, or skip the call\?"
    )
    with pytest.raises(RankError, match=says):
        launch(leave_early, calls, world_size=3, timeout=40)


def let_go_between_two_looks():
    """Rank 0 comes first to the last meeting of the call and looks; when it looks closer, rank 1 has come and gone."""
    last = 3
    pieces, check_they_can_come = SharedBuffer._pieces, SharedBuffer._check_they_can_come

    def finish_late(buffer):
        if dist.get_rank() == 1:
            wait_until(lambda: buffer._marks[0] // len(shared_memory.CALLS) == last)
        return pieces(buffer)

    def look_late(buffer, call, meeting):
        if dist.get_rank() == 0 and meeting == last:
            wait_until(lambda: buffer._marks[1] < 0)
        check_they_can_come(buffer, call, meeting)

    with patch.multiple(SharedBuffer, _pieces=finish_late, _check_they_can_come=look_late):
        return filled(SharedBuffer(2), dist.get_rank() + 1.0).all_reduce().tolist()


def test_a_rank_that_has_come_may_go():
    assert list(launch(let_go_between_two_looks, world_size=2, timeout=40)) == [[3.0, 3.0], [3.0, 3.0]]


def do_otherwise():
    rank = dist.get_rank()
    group = dist.new_group([1, 3, 2])
    if rank == 0:
        return None
    buffer = SharedBuffer(41, group=group)
    buffer.all_reduce()
    try:
        buffer.all_gather() if rank == 2 else buffer.reduce_scatter()
    except RuntimeError as error:
        return str(error)


def test_ranks_that_make_different_calls_are_told():
    last = ": all ranks must make the same calls in the same order"
    assert list(launch(do_otherwise, world_size=4, timeout=40)) == [
        None,
        f"rank 1 called SharedBuffer.reduce_scatter, rank 2 called all_gather{last}",
        f"rank 2 called SharedBuffer.all_gather, rank 1 called reduce_scatter{last}",
        f"rank 3 called SharedBuffer.reduce_scatter, rank 2 called all_gather{last}",
    ]


def check_disagreements():
    wrong, rank = twin.Complaints(), dist.get_rank()
    wrong.refused(SharedBuffer, 41 + rank % 2, says=("same numel", "rank 0 41, rank 1 42, rank 2 41", "Give all"))
    dtype = torch.float64 if rank == 2 else torch.float32
    says = ("same dtype", "rank 0 torch.float32, rank 1 torch.float32, rank 2 torch.float64")
    wrong.refused(SharedBuffer, 41, dtype, says=says)
    with patch("socket.gethostname", lambda: f"node{rank // 2}"):
        wrong.refused(SharedBuffer, 41, says=("same machine", "rank 0 node0, rank 1 node0, rank 2 node1"))
    group = dist.new_group([0, 2])
    if rank != 1:
        wrong.refused(SharedBuffer, rank, group=group, says=("rank 0 0, rank 2 2",))
    return wrong + check([twin.whole(r, 41) for r in range(3)])  # nothing of it stays


def test_every_rank_hears_that_they_disagree():
    assert list(launch(check_disagreements, world_size=3)) == [[], [], []]


def check_mistakes():
    wrong, me = twin.Complaints(), f"rank {dist.get_rank()} made a SharedBuffer with"
    for numel in (-1, 2.0, True, None, "41"):
        wrong.refused(SharedBuffer, numel, says=(f"{me} numel={numel!r}, expected a whole number", "x.numel()"))
    for dtype in ("float32", float, None):
        wrong.refused(SharedBuffer, 41, dtype, says=(f"{me} dtype={dtype!r}, expected a torch.dtype", "x.dtype"))
    return wrong


def test_mistakes_are_named():
    run = launch(check_mistakes, world_size=2)
    assert list(run) == [[], []]
    assert run.wire == [[], []]  # before anything was said


# Elsewhere

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3")

SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
import torch.distributed as dist
import twin
from ddpkit.shared_memory import SharedBuffer

dist.init_process_group("gloo")
rank, wrong = dist.get_rank(), twin.Complaints()
buffer = SharedBuffer(1000)
for salt in range(3):
    parts = [twin.whole(r, 1000, salt=salt) for r in range(3)]
    buffer.local.copy_(parts[rank])
    wrong.same(buffer.all_reduce(), twin.total(parts), "all_reduce", salt)
    buffer.local.copy_(parts[rank])
    buffer.reduce_scatter()
    wrong.same(buffer.all_gather(), twin.total(parts), "reduce_scatter and all_gather", salt)
with open(f"rank.{rank}", "w") as file:
    print(wrong, file=file)
dist.destroy_process_group()
"""


def test_under_torchrun_alone(tmp_path):
    """In a world that ddpkit didn't make."""
    run_script(tmp_path, SCRIPT, str(Path(__file__).parent), command=TORCHRUN, OMP_NUM_THREADS="1")
    assert [(tmp_path / f"rank.{rank}").read_text() for rank in range(3)] == ["[]\n"] * 3


@pytest.mark.parametrize("name", ["", *(f".{call}" for call in shared_memory.CALLS)])
def test_documented(name):
    text = inspect.getdoc(getattr(SharedBuffer, name[1:]) if name else SharedBuffer)
    assert ("Reads n" if name else "Notebook 02.") in text
