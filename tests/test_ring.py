"""ddpkit.ring, on every rank, against one process that has the data of all; and what goes over the wire meanwhile.

What runs on the ranks returns what it found wrong, as a list of sentences; the tests assert that there are none.
"""

import inspect
import itertools
import os
import signal
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import twin
from outside import run_script

from ddpkit import HangError, RankError, launch, ring
from ddpkit.lesson.figures import hops_of, received_bytes, sent_bytes

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # functions travel as those of a notebook do

ALL_REDUCES = [ring.ring_all_reduce, ring.whole_ring_all_reduce, ring.doubling_all_reduce]
SAME_BITS = [ring.ring_all_reduce, ring.doubling_all_reduce]
RINGS = [ring.ring_reduce_scatter, ring.ring_all_gather, ring.ring_all_reduce]
EVERY_FUNCTION = [*RINGS, ring.whole_ring_all_reduce, ring.doubling_all_reduce]
BEGINNINGS = [ring.begin_reduce_scatter, ring.begin_all_gather]


def rank_and_world(group=None):
    return dist.get_rank(group), dist.get_world_size(group)


def chunk(x, rank, world_size):
    return x.view(-1).tensor_split(world_size)[rank]


def tuned(segment_bytes, ahead=ring.AHEAD):
    return patch.multiple(ring, SEGMENT_BYTES=segment_bytes, AHEAD=ahead)


# Values


def check(parts, group=None) -> twin.Complaints:
    """Every function on `parts`, what the ranks of the group bring: whole numbers, so that sums are exact."""
    wrong, (rank, world_size) = twin.Complaints(), rank_and_world(group)
    expected, what = twin.total(parts), (parts[0].dtype, tuple(parts[0].shape), f"of {world_size} ranks")
    for function in ALL_REDUCES:
        x = parts[rank].clone()
        wrong.unless(function(x, group) is x, function.__name__, *what, "returned something else")
        wrong.same(x, expected, function.__name__, *what)

    x = parts[rank].clone()
    mine = ring.ring_reduce_scatter(x, group)
    wrong.same(mine, chunk(expected, rank, world_size), "ring_reduce_scatter", *what)
    wrong.unless(is_the_view(mine, chunk(x, rank, world_size)), "ring_reduce_scatter", *what, "returned no view of x")
    wrong.unless(ring.ring_all_gather(x, group) is x, "ring_all_gather", *what, "returned something else")
    wrong.same(x, expected, "ring_all_gather after ring_reduce_scatter", *what)

    x = parts[rank].clone()
    ring.ring_all_gather(x, group)
    theirs = torch.cat([chunk(part, r, world_size) for r, part in enumerate(parts)])
    wrong.same(x, theirs.view(x.shape), "ring_all_gather", *what)

    x = parts[rank].clone()
    for begin in BEGINNINGS:
        finish = begin(x, group)
        wrong.unless(finish() is None, begin.__name__, *what, "returned something else")
    wrong.same(x, expected, "begin_all_gather after begin_reduce_scatter", *what)
    return wrong


def is_the_view(x, expected) -> bool:
    return (x.data_ptr(), x.shape, x.stride()) == (expected.data_ptr(), expected.shape, expected.stride())


def begin_and_leave(begin):
    """Rank 1 doesn't begin before rank 0 has: if that waited for the others, both would wait for ever."""
    rank, begun, x = dist.get_rank(), torch.zeros(1), torch.full((9,), 1.0 + dist.get_rank())
    if rank == 0:
        finish = begin(x)
    dist.broadcast(begun, 0)
    if rank > 0:
        finish = begin(x)
    finish()
    return x.tolist()


def test_who_begins_waits_for_nobody():
    """The sums of ranks 0, 1, 2 in their own chunks: 1 + 2 + 3."""
    scattered = launch(begin_and_leave, ring.begin_reduce_scatter, world_size=3)
    assert [x[3 * rank : 3 * rank + 3] for rank, x in enumerate(scattered)] == [[6.0] * 3] * 3
    assert list(launch(begin_and_leave, ring.begin_all_gather, world_size=3)) == [[1.0] * 3 + [2.0] * 3 + [3.0] * 3] * 3


def parts_of(world_size, shape, dtype=torch.float32):
    return [twin.whole(r, shape, dtype) for r in range(world_size)]


def check_dtypes_and_shapes():
    world_size = dist.get_world_size()
    lengths = sorted({0, 1, 2, 3, world_size - 1, world_size, world_size + 1, 4 * world_size, 29})
    shapes = [(), (0, 3), (3, 4, 5), (world_size, 2)]
    cases = [(29, dtype) for dtype in twin.DTYPES] + [(shape, torch.float32) for shape in [*lengths, *shapes]]
    return [wrong for shape, dtype in cases for wrong in check(parts_of(world_size, shape, dtype))]


def check_segments():
    """Few receives ahead and many, segments of one element and of several, chunks that end in a shorter segment."""
    wrong, world_size = twin.Complaints(), dist.get_world_size()
    for segment_bytes, ahead in [(4, 1), (16, 1), (16, 2), (16, 3), (16, 1000), (20, 4)]:
        with tuned(segment_bytes, ahead):
            for length in (1, 12 * world_size, 12 * world_size + 1, 41):
                wrong += check(parts_of(world_size, length))
            wrong += check(parts_of(world_size, (2, 3 * world_size), torch.float16))
    return wrong


def check_fractions():
    """Sums that must round: near the exact sum, and the same bits on all ranks, in halves, and in any segments."""
    wrong, (rank, world_size) = twin.Complaints(), rank_and_world()
    for dtype in twin.FLOATS:
        parts = [twin.fractions(r, 1003, dtype) for r in range(world_size)]
        for function in ALL_REDUCES:
            wrong.near(function(parts[rank].clone()), parts, function.__name__, dtype)
        for function in SAME_BITS:
            wrong.same_on_all(function(parts[rank].clone()), function.__name__, dtype)
        expected = ring.ring_all_reduce(parts[rank].clone())
        halves = parts[rank].clone()
        ring.ring_reduce_scatter(halves)
        wrong.same(ring.ring_all_gather(halves), expected, "reduce_scatter and all_gather", dtype)
        with tuned(64, 3):
            wrong.same(ring.ring_all_reduce(parts[rank].clone()), expected, "in segments", dtype)
    return wrong


def check_nan():
    """Every rank brings a NaN with other bits, and infinities that meet: what comes out is the same on all ranks."""
    wrong, rank = twin.Complaints(), dist.get_rank()
    nan = torch.full((23,), 0x7FC00001 + rank, dtype=torch.int32).view(torch.float32)
    infinite = torch.tensor([float("inf"), float("-inf"), 1.0] * 8).roll(rank)
    for function in SAME_BITS:
        for segment_bytes in (ring.SEGMENT_BYTES, 16):
            with tuned(segment_bytes):
                x = function(nan.clone())
                wrong.unless(bool(x.isnan().all()), function.__name__, "lost a NaN", x)
                wrong.same_on_all(x, function.__name__, "of NaNs")
                wrong.same_on_all(function(infinite.clone()), function.__name__, "of infinities")
    return wrong


def check_views():
    """A part of a larger buffer: its neighbours stay as they were."""
    wrong, (rank, world_size) = twin.Complaints(), rank_and_world()
    parts = parts_of(world_size, 17)
    for function, segment_bytes in itertools.product(ALL_REDUCES, (ring.SEGMENT_BYTES, 16)):
        buffer = torch.full((30,), -1.0)
        buffer[5:22] = parts[rank]
        with tuned(segment_bytes):
            function(buffer[5:22])
        expected = torch.full((30,), -1.0)
        expected[5:22] = twin.total(parts)
        wrong.same(buffer, expected, function.__name__, "inside a buffer")
    for gaps in (torch.ones(4, 6).T, torch.ones(12)[::2], torch.ones(1).expand(6)):
        for function in RINGS:
            says = (f"rank {rank} called {function.__name__} with a tensor with gaps", "x.contiguous()")
            wrong.refused(function, gaps, says=says)
    return wrong


def check_parameters():
    """Autograd sees nothing."""
    wrong, (rank, world_size) = twin.Complaints(), rank_and_world()
    parts = parts_of(world_size, 10)
    for function in EVERY_FUNCTION:
        weight = parts[rank].clone().requires_grad_()
        result = function(weight)
        kept = weight.is_leaf and weight.requires_grad and torch.is_grad_enabled()
        wrong.unless(kept and result.grad_fn is None, function.__name__, "left a trace in autograd", weight, result)
        if function in ALL_REDUCES:
            wrong.same(weight, twin.total(parts), function.__name__, "of a parameter")
    return wrong


CHECKS = [check_dtypes_and_shapes, check_segments, check_fractions, check_nan, check_views, check_parameters]


def all_checks():
    return [wrong for check in CHECKS for wrong in check()]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equal_to_one_process(world_size):
    run = launch(all_checks, world_size=world_size)
    assert [wrong[:3] for wrong in run] == [[]] * world_size


@pytest.mark.parametrize("world_size", [6, 8])
def test_more_ranks_than_cores(world_size):
    run = launch(lambda: check_views() + check(parts_of(world_size, 4 * world_size + 3)), world_size=world_size)
    assert [wrong[:3] for wrong in run] == [[]] * world_size


def cancelling(function):
    return function(torch.tensor([1e8, 1.0, -1e8])[dist.get_rank()].clone()).item()


def test_only_the_whole_ring_may_differ_between_ranks():
    """float32 can't hold 1e8 + 1: the order of the sum decides, and here every rank has its own."""
    assert list(launch(cancelling, ring.whole_ring_all_reduce, world_size=3)) == [1.0, 0.0, 0.0]
    for function in SAME_BITS:
        assert len(set(launch(cancelling, function, world_size=3))) == 1


# Groups and other traffic


def check_groups():
    """Groups that interleave, each as often as it likes and while the other works; a rank outside takes no part."""
    wrong, rank = twin.Complaints(), dist.get_rank()
    evens, odds, three = dist.new_group([0, 2, 4]), dist.new_group([3, 1]), dist.new_group([1, 2, 4])
    for _ in range(1 + 2 * (rank % 2)):
        group, members = (odds, [1, 3]) if rank % 2 else (evens, [0, 2, 4])
        for length in (1, 25):
            wrong += check([twin.whole(r, length) for r in members], group)
    if rank in (1, 2, 4):
        with tuned(16, 2):
            wrong += check([twin.whole(r, 25) for r in (1, 2, 4)], three)
    else:
        wrong += check_outside(three)
    dist.barrier()
    return wrong


def check_outside(group):
    wrong, rank = twin.Complaints(), dist.get_rank()
    for function in [*EVERY_FUNCTION, *BEGINNINGS]:
        x = twin.whole(rank, 25)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            wrong.unless(function(x, group) is None, function.__name__, "returned something outside its group")
        wrong.same(x, twin.whole(rank, 25), function.__name__, "outside its group")
        said = [str(warning.message) for warning in heard]
        expected = [f"rank {rank} called {function.__name__} with a group that it isn't in: nothing done. "]
        wrong.unless([text.split("Call it")[0] for text in said] == expected, "said", said)
    return wrong


def test_groups():
    run = launch(check_groups, world_size=5)
    assert [wrong[:3] for wrong in run] == [[]] * 5
    for rank, members in enumerate([{2, 4}, {3, 2, 4}, {0, 4, 1}, {1}, {0, 2, 1}]):
        assert {record.peer for record in run.wire[rank] if record.op in ("send", "recv")} == members


def check_traffic():
    """Between messages and collectives that are still on their way; one call after another without a pause."""
    wrong, (rank, world_size) = twin.Complaints(), rank_and_world()
    behind, before = (rank + 1) % world_size, (rank - 1) % world_size
    arriving = torch.zeros(7), torch.zeros(7)
    works = [dist.irecv(arriving[0], before), dist.isend(twin.whole(rank, 7, salt=1), behind)]
    summed = twin.whole(rank, 7)
    works.append(dist.all_reduce(summed, async_op=True))
    for salt in range(4):
        for segment_bytes in (16, ring.SEGMENT_BYTES):
            with tuned(segment_bytes, 2):
                x = ring.ring_all_reduce(twin.whole(rank, 50, salt=salt))
                wrong.same(x, twin.total([twin.whole(r, 50, salt=salt) for r in range(world_size)]), "call", salt)
        dist.broadcast(x, 0)
        ring.doubling_all_reduce(x)
    works += [dist.irecv(arriving[1], before), dist.isend(twin.whole(rank, 7, salt=2), behind)]
    x = ring.ring_all_reduce(twin.whole(rank, 50))
    wrong.same(x, twin.total([twin.whole(r, 50) for r in range(world_size)]), "the last call")
    for work in works:
        work.wait()
    for salt in (1, 2):
        wrong.same(arriving[salt - 1], twin.whole(before, 7, salt=salt), "a message of mine")
    wrong.same(summed, twin.total([twin.whole(r, 7) for r in range(world_size)]), "torch's all_reduce")
    return wrong


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_other_traffic_is_not_disturbed(world_size):
    assert list(launch(check_traffic, world_size=world_size)) == [[]] * world_size


# The wire. ELEMENTS float32 divide by every W here, and their chunks into segments of 16 bytes.

ELEMENTS = 96
WHOLE = 4 * ELEMENTS


def each_phase(functions, elements, segment_bytes=ring.SEGMENT_BYTES, ahead=ring.AHEAD):
    """One call after the other, each followed by torch's own barrier, which marks its end in the records."""
    with tuned(segment_bytes, ahead):
        for function in functions:
            function(torch.ones(elements))
            dist.barrier()


def phases(world_size, functions, *tuning) -> list:
    """For each function, the records of all ranks."""
    run = launch(each_phase, functions, *tuning, world_size=world_size)
    found = [SimpleNamespace(wire=[]) for _ in functions]
    for records in run.wire:
        ends = [-1, *(number for number, record in enumerate(records) if record.op == "barrier")]
        for phase, (begin, end) in zip(found, itertools.pairwise(ends), strict=True):
            phase.wire.append(records[begin + 1 : end])
    return found


def receives(records) -> list:
    return [record for record in records if record.op == "recv"]


def assert_goes_round(phase):
    """Each rank sends to the next and receives from the one before; every message is waited for."""
    world_size = len(phase.wire)
    for rank, records in enumerate(phase.wire):
        ways = {(record.op, record.peer) for record in records}
        assert ways == {("send", (rank + 1) % world_size), ("recv", (rank - 1) % world_size)}
        assert all(record.waited and record.done and not record.dropped for record in records)


@pytest.mark.parametrize("world_size", [2, 3, 4, 6])
def test_bytes_and_hops(world_size):
    others = world_size - 1
    half = others * WHOLE // world_size
    functions = [*EVERY_FUNCTION[:4]]
    expected = [(half, others), (half, others), (2 * half, 2 * others), (others * WHOLE, others)]
    if world_size == 2:
        expected[2] = (WHOLE, 1)  # one swap
    for phase, (nbytes, hops) in zip(phases(world_size, functions, ELEMENTS), expected, strict=True):
        assert_goes_round(phase)
        assert sent_bytes(phase) == received_bytes(phase) == [nbytes] * world_size
        assert [len(records) for records in phase.wire] == [2 * hops] * world_size
        assert [len(hop) for hop in hops_of(phase)] == [world_size] * hops  # all ranks send in every hop


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_segments_are_more_messages_of_the_same_bytes(world_size):
    others = world_size - 1
    half = others * WHOLE // world_size
    expected = [(half, others), (half, others), (2 * half, 2 * others)]
    segments = WHOLE // world_size // 16
    for phase, (nbytes, hops) in zip(phases(world_size, RINGS, ELEMENTS, 16), expected, strict=True):
        assert_goes_round(phase)
        assert sent_bytes(phase) == received_bytes(phase) == [nbytes] * world_size
        assert [len(receives(records)) for records in phase.wire] == [hops * segments] * world_size
        assert {record.bytes for records in phase.wire for record in records} == {16}


@pytest.mark.parametrize("segment_bytes", [16, 2**20])
@pytest.mark.parametrize("world_size", [3, 4])
def test_a_length_that_does_not_divide_costs_at_most_an_element_a_hop(world_size, segment_bytes):
    for phase, halves in zip(phases(world_size, RINGS, 41, segment_bytes), (1, 1, 2), strict=True):
        hops = halves * (world_size - 1)
        for nbytes in sent_bytes(phase) + received_bytes(phase):
            assert abs(nbytes - hops / world_size * 41 * 4) <= hops * 4
        assert sum(sent_bytes(phase)) == sum(received_bytes(phase)) == hops * 41 * 4


@pytest.mark.parametrize("elements", [1, 41, 96])
def test_two_ranks_swap_what_is_less_than_a_segment(elements):
    for segment_bytes, messages in ((4 * elements + 1, [[(0, 1, 4 * elements), (1, 0, 4 * elements)]]), (4, None)):
        [phase] = phases(2, [ring.ring_all_reduce], elements, segment_bytes)
        assert messages is None or hops_of(phase) == messages
        assert sum(sent_bytes(phase)) == 2 * 4 * elements
        assert_goes_round(phase)


@pytest.mark.parametrize(
    ("world_size", "hops", "sent"),
    [
        (1, 0, [0]),
        (2, 1, [1, 1]),
        (3, 3, [2, 1, 1]),
        (4, 2, [2] * 4),
        (5, 4, [3, 2, 2, 2, 1]),
        (6, 4, [3, 3, 2, 2, 1, 1]),
        (8, 3, [3] * 8),
    ],
)
def test_doubling(world_size, hops, sent):
    [phase] = phases(world_size, [ring.doubling_all_reduce], ELEMENTS)
    assert sent_bytes(phase) == [WHOLE * many for many in sent]
    assert sum(received_bytes(phase)) == WHOLE * sum(sent)
    assert len(hops_of(phase)) == hops
    assert {record.bytes for records in phase.wire for record in records} <= {WHOLE}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_receives_are_posted_ahead(world_size, ahead):
    """As soon as one has arrived, and before the rank stops for the next: never more than `ahead` at a time."""
    for phase in phases(world_size, RINGS, ELEMENTS, 16, ahead):
        for records in phase.wire:
            arriving = receives(records)
            assert len(arriving) > 5
            assert all(record.issued <= arriving[0].waited for record in arriving[:ahead])
            for before, after, late in zip(arriving, arriving[1:], arriving[ahead:], strict=False):
                assert before.done <= late.issued <= after.waited


class OneHandle:
    """All that NCCL returns for a batch."""

    def __init__(self, works):
        self.works = works

    def wait(self):
        for work in self.works:
            work.wait()


def batches_of(function):
    """The batches of one call, each as (what, peer) of its messages, where things are as with NCCL: a chunk travels
    whole, no receive is posted before its hop, and a batch has one handle."""
    rank, world_size = rank_and_world()
    seen, real = [], dist.batch_isend_irecv

    def recorded(batch):
        seen.append([(op.op.__name__, op.peer) for op in batch])
        return [OneHandle(real(batch))]

    wrong = twin.Complaints()
    single = dict.fromkeys(("send", "recv"), lambda *_, **__: wrong.append("a message outside of a batch"))
    with tuned(WHOLE // world_size, 1), patch.multiple(dist, batch_isend_irecv=recorded, **single):
        x = function(twin.whole(rank, ELEMENTS))
    if function in ALL_REDUCES:
        wrong.same(x, twin.total(parts_of(world_size, ELEMENTS)), function.__name__)
    return wrong, seen


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_hop_by_hop_every_batch_is_a_send_and_a_receive(world_size):
    """What NCCL needs: unpaired, or alone, its sends would wait for ever."""
    others = world_size - 1
    for function, hops in zip(EVERY_FUNCTION[:4], (others, others, 2 * others, others), strict=True):
        for rank, (wrong, seen) in enumerate(launch(batches_of, function, world_size=world_size)):
            assert wrong == []
            assert seen == [[("isend", (rank + 1) % world_size), ("irecv", (rank - 1) % world_size)]] * hops


@pytest.mark.parametrize("world_size", [3, 4, 6])
def test_doubling_says_everything_in_batches(world_size):
    """NCCL's first batch in a group waits until every rank of the group comes with one."""
    for wrong, seen in launch(batches_of, ring.doubling_all_reduce, world_size=world_size):
        assert wrong == []
        assert seen != []


# What goes wrong


def die_in_the_ring(how):
    """Rank 1 goes when it has sent two batches of many."""
    real, sent = dist.batch_isend_irecv, itertools.count()

    def fatal(batch):
        if dist.get_rank() == 1 and next(sent) == 2:
            how()
        return real(batch)

    with tuned(16, 2), patch.object(dist, "batch_isend_irecv", fatal):
        ring.ring_all_reduce(torch.ones(ELEMENTS))


def be_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def fail():
    raise KeyError("mine")


@pytest.mark.parametrize(("how", "says"), [(be_killed, "was killed by SIGKILL"), (fail, "raised KeyError: 'mine'")])
def test_a_rank_that_dies_in_the_ring_is_named(how, says):
    with pytest.raises(RankError, match=f"^rank 1 {says}") as caught:
        launch(die_in_the_ring, how, world_size=3, timeout=40)
    assert caught.value.rank == 1


def skip():
    if dist.get_rank() != 1:
        ring.ring_all_reduce(torch.ones(12))


def test_a_rank_that_skips_the_call_is_named():
    with pytest.raises(HangError, match=r"deadlock: .* wait in recv for rank 1, which has returned"):
        launch(skip, world_size=3, timeout=40)


# Elsewhere

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3")

SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
import torch.distributed as dist
import twin
from ddpkit import ring

dist.init_process_group()
rank, parts = dist.get_rank(), [twin.whole(r, 1000) for r in range(3)]
wrong = twin.Complaints()
for segment_bytes in (ring.SEGMENT_BYTES, 64):
    ring.SEGMENT_BYTES = segment_bytes
    for function in (ring.ring_all_reduce, ring.whole_ring_all_reduce, ring.doubling_all_reduce):
        wrong.same(function(parts[rank].clone()), twin.total(parts), function.__name__)
    mine = ring.ring_reduce_scatter(parts[rank].clone())
    wrong.same(mine, twin.total(parts).tensor_split(3)[rank], "ring_reduce_scatter")
with open(f"rank.{rank}", "w") as file:
    print(wrong, file=file)
dist.destroy_process_group()
"""


def test_under_torchrun_alone(tmp_path):
    """In a world that ddpkit didn't make, of a backend that nobody named."""
    run_script(tmp_path, SCRIPT, str(Path(__file__).parent), command=TORCHRUN, OMP_NUM_THREADS="1")
    assert [(tmp_path / f"rank.{rank}").read_text() for rank in range(3)] == ["[]\n"] * 3


@pytest.mark.parametrize("function", EVERY_FUNCTION)
def test_documented(function):
    text = inspect.getdoc(function)
    assert "Notebook 02." in text
    assert "Cost per rank" in text
