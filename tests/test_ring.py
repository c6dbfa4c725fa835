"""ddpkit.ring, ddpkit.fast.ring and ddpkit.doubling, on every rank, against one process that has
the data of all; and what goes over the wire meanwhile."""

import itertools
from collections import Counter
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import twin
from on_ranks import on_ranks

from ddpkit import launch, ring
from ddpkit.doubling import doubling_all_reduce, halving_doubling_all_reduce
from ddpkit.fast import ring as fast
from ddpkit.tools.hops import hops_of, received_bytes, sent_bytes

RINGS = [ring.ring_reduce_scatter, ring.ring_all_gather, ring.ring_all_reduce]
FAST = [fast.ring_reduce_scatter, fast.ring_all_gather, fast.ring_all_reduce]
OTHERS = [ring.whole_ring_all_reduce, doubling_all_reduce]
ALL_REDUCES = [ring.ring_all_reduce, fast.ring_all_reduce, *OTHERS]
SAME_BITS = [ring.ring_all_reduce, fast.ring_all_reduce, doubling_all_reduce]
POWERS_OF_TWO = [halving_doubling_all_reduce]


def for_so_many(world_size, functions):
    """With those that a power of two needs, if it is one."""
    return functions if world_size & (world_size - 1) else [*functions, *POWERS_OF_TWO]


def rank_and_world(group=None):
    return dist.get_rank(group), dist.get_world_size(group)


def name(function):
    return f"{function.__module__}.{function.__name__}"


def parts_of(world_size, shape, dtype=torch.float32):
    return [twin.whole(rank, shape, dtype) for rank in range(world_size)]


def tuned(segment_bytes=fast.SEGMENT_BYTES, ahead=fast.AHEAD):
    return patch.multiple(fast, SEGMENT_BYTES=segment_bytes, AHEAD=ahead)


# Values


def check_all(check, parts, group=None, functions=None):
    """Functions on `parts`, what the ranks bring: whole numbers, so that sums are exact."""
    rank, world_size = rank_and_world(group)
    functions = functions or for_so_many(world_size, [*RINGS, *FAST, *OTHERS])
    total, what = twin.total(parts), (parts[0].dtype, tuple(parts[0].shape), f"of {world_size}")
    chunks = total.view(-1).tensor_split(world_size)
    gathered = [part.view(-1).tensor_split(world_size)[r] for r, part in enumerate(parts)]
    for function in functions:
        x = parts[rank].clone()
        got = function(x, group)
        if "scatter" in function.__name__:
            mine = x.view(-1).tensor_split(world_size)[rank]
            where = got.data_ptr(), got.shape, got.stride()
            expected = mine.data_ptr(), mine.shape, mine.stride()
            check.same(where, expected, name(function), "is no view", *what)
            check.same(got, chunks[rank], name(function), *what)
            continue
        check.unless(got is x, name(function), *what, "returned something else")
        expected = torch.cat(gathered).view(x.shape) if "gather" in function.__name__ else total
        check.same(x, expected, name(function), *what)


@on_ranks(1, 2, 3, 4)
def test_dtypes_shapes_and_segments(check, world_size):
    """Every dtype in one of three worlds; segments of any length, any number of them ahead."""
    for dtype in twin.DTYPES[world_size % 3 :: 3]:
        check_all(check, parts_of(world_size, 29, dtype))
    for shape in (0, 1, world_size - 1, world_size + 1, (), (0, 3), (3, 4, 5)):
        check_all(check, parts_of(world_size, shape))
    for segment_bytes, ahead in [(8, 1), (16, 2), (16, 1000), (20, 4)]:
        with tuned(segment_bytes, ahead):
            check_all(check, parts_of(world_size, 12 * world_size + 1), functions=FAST)
            parts = parts_of(world_size, (2, 3 * world_size), torch.float16)
            check_all(check, parts, functions=FAST)


@on_ranks(3, 4)
def test_sums_that_round(check, rank, world_size):
    """Near the exact sum; the same bits on all ranks, in plain and fast, and in any segments."""
    for dtype in twin.FLOATS:
        parts = [twin.fractions(r, 1003, dtype) for r in range(world_size)]
        for function in for_so_many(world_size, ALL_REDUCES):
            x = function(parts[rank].clone())
            check.near(x, parts, name(function), dtype)
            if function is not ring.whole_ring_all_reduce:
                check.same_on_all(x, name(function), dtype)
        with tuned(64, 3):
            x, expected = (f(parts[rank].clone()) for f in (FAST[2], RINGS[2]))
            check.same(x, expected, "in segments", dtype)
    nan = torch.full((23,), 0x7FC00001 + rank, dtype=torch.int32).view(torch.float32)
    infinite = torch.tensor([float("inf"), float("-inf"), 1.0] * 8).roll(rank)
    for function in for_so_many(world_size, SAME_BITS):
        with tuned(16):
            x = function(nan.clone())
            check.unless(bool(x.isnan().all()), name(function), "lost a NaN", x)
            check.same_on_all(x, name(function), "of NaNs")
            check.same_on_all(function(infinite.clone()), name(function), "of infinities")
    if world_size == 3:
        # float32 can't hold 1e8 + 1: the order of the sum decides, and here every rank has its own.
        x = ring.whole_ring_all_reduce(torch.tensor([1e8, 1.0, -1e8])[rank].clone())
        check.same(x.item(), [1.0, 0.0, 0.0][rank], "the whole ring")


@on_ranks(3)
def test_views_parameters_and_gaps(check, rank, world_size):
    parts = parts_of(world_size, 17)
    for function, segment_bytes in itertools.product(ALL_REDUCES, (fast.SEGMENT_BYTES, 16)):
        buffer = torch.full((30,), -1.0)
        buffer[5:22] = parts[rank]
        with tuned(segment_bytes):
            function(buffer[5:22])
        expected = torch.full((30,), -1.0)
        expected[5:22] = twin.total(parts)
        check.same(buffer, expected, name(function), "inside a larger buffer")
    three = "halving_doubling_all_reduce with 3 ranks, expected a power of 2"
    check.refused(*POWERS_OF_TWO, torch.ones(3), says=(f"rank {rank}", three))
    for function in [*RINGS, *FAST, *OTHERS]:
        weight = parts[rank].clone().requires_grad_()
        result = function(weight)
        kept = weight.is_leaf and weight.requires_grad and torch.is_grad_enabled()
        check.unless(kept and result.grad_fn is None, name(function), "left a trace in autograd")
        for gaps in (torch.ones(4, 6).T, torch.ones(12)[::2], torch.ones(1).expand(6)):
            check.refused(function, gaps, says=(f"rank {rank}", "with gaps", "x.contiguous()"))


@on_ranks(5)
def test_groups_that_interleave(check, rank):
    """Each works as often as it likes, also while the other does; who is outside is told."""
    evens, odds, three = (dist.new_group(members) for members in ([0, 2, 4], [3, 1], [1, 2, 4]))
    for _ in range(1 + 2 * (rank % 2)):
        group, members = (odds, [1, 3]) if rank % 2 else (evens, [0, 2, 4])
        for length in (1, 25):
            check_all(check, [twin.whole(r, length) for r in members], group)
    if rank in (1, 2, 4):
        with tuned(16, 2):
            check_all(check, [twin.whole(r, 25) for r in (1, 2, 4)], three)
    else:
        for function in [*RINGS, *FAST, *OTHERS]:
            check.refused(function, twin.whole(rank, 25), three, says=f"rank {rank} called")


# The ring as a transport; more in test_transport


@on_ranks(3)
def test_who_begins_waits_for_nobody(check):
    """Rank 1 begins after rank 0 has: if beginning waited, both would wait for ever."""
    rank, begun = dist.get_rank(), torch.zeros(1)
    for start in ("start_reduce_scatter", "start_all_gather"):
        x = torch.full((9,), 1.0 + rank)
        begin = getattr(fast.RingTransport(), start)
        if rank == 0:
            handle = begin(x)
        dist.broadcast(begun, 0)
        if rank > 0:
            handle = begin(x)
        handle.wait()
        expected = [6.0] * 3 if start == "start_reduce_scatter" else [1.0 + rank] * 3
        check.same(x[3 * rank : 3 * rank + 3].tolist(), expected, start)


# The wire. ELEMENTS float32 divide by every W here, and their chunks into segments of 16 bytes.

ELEMENTS = 96
WHOLE = 4 * ELEMENTS


def one_after_the_other(calls):
    """Each followed by torch's own barrier, which marks its end."""
    for function, elements, tuning in calls:
        with tuned(**tuning):
            function(torch.ones(elements))
        dist.barrier()


def phases(world_size, *calls) -> list:
    """For each call, the records of all ranks."""
    return twin.between_barriers(launch(one_after_the_other, calls, world_size=world_size))


def assert_goes_round(phase, nbytes, messages):
    """Each rank sends so much to the right, receives it from the left, and waits for each."""
    world_size = len(phase.wire)
    assert sent_bytes(phase) == received_bytes(phase) == [nbytes] * world_size
    for rank, records in enumerate(phase.wire):
        ways = Counter((record.op, record.peer) for record in records)
        right, left = (rank + 1) % world_size, (rank - 1) % world_size
        assert ways == {("send", right): messages, ("recv", left): messages}
        assert all(record.waited and record.done and not record.dropped for record in records)


@pytest.mark.parametrize(("world_size", "ahead"), [(2, 1), (3, 2), (4, 5)])
def test_segments_are_more_messages_of_the_same_bytes(world_size, ahead):
    """A receive is posted when one has arrived, before the rank stops: never more than `ahead`."""
    hops, tuning = world_size - 1, {"segment_bytes": 16, "ahead": ahead}
    segments = WHOLE // world_size // 16
    found = phases(world_size, *((function, ELEMENTS, tuning) for function in FAST))
    for phase, halves in zip(found, (1, 1, 2), strict=True):
        messages = halves * hops * segments
        assert_goes_round(phase, messages * 16, messages)
        for records in phase.wire:
            arriving = [record for record in records if record.op == "recv"]
            assert all(record.issued <= arriving[0].waited for record in arriving[:ahead])
            for before, after, late in zip(arriving, arriving[1:], arriving[ahead:], strict=False):
                assert before.done <= late.issued <= after.waited


def test_a_length_that_does_not_divide_costs_at_most_an_element_a_hop():
    calls = [(function, 41, {}) for function in [*RINGS, *FAST]]
    calls += [(function, 41, {"segment_bytes": 16}) for function in FAST]
    for phase, halves in zip(phases(3, *calls), 3 * (1, 1, 2), strict=True):
        hops = halves * 2
        for nbytes in sent_bytes(phase) + received_bytes(phase):
            assert abs(nbytes - hops / 3 * 41 * 4) <= hops * 4
        assert sum(sent_bytes(phase)) == sum(received_bytes(phase)) == hops * 41 * 4


def test_two_ranks_swap_what_is_less_than_the_segments_ahead():
    calls = [(FAST[2], 41, {"segment_bytes": nbytes, "ahead": 4}) for nbytes in (42, 41)]
    swap, rings = phases(2, *calls)  # 164 bytes, less than 4 × 42
    assert hops_of(swap) == [[(0, 1, 164), (1, 0, 164)]]
    assert len(hops_of(rings)) > 1


class OneHandle:
    """All that NCCL returns for a batch."""

    def __init__(self, works):
        self.works = works

    def wait(self):
        for work in self.works:
            work.wait()


@on_ranks(3)
def test_as_nccl_needs_it_every_message_is_in_a_batch_with_one_handle(check):
    """A ring's batches are a send and a receive: unpaired, its sends would wait for ever."""
    rank, world_size = rank_and_world()
    real, other = dist.batch_isend_irecv, world_size - 1
    pair = [("isend", (rank + 1) % world_size), ("irecv", (rank - 1) % world_size)]
    functions = dict.fromkeys([*RINGS[:2], *FAST[:2], OTHERS[0]], other) | {RINGS[2]: 2 * other}
    for function, hops in {**functions, doubling_all_reduce: None}.items():
        seen = []

        def one_handle(batch, seen=seen):
            seen.append([(op.op.__name__, op.peer) for op in batch])
            return [OneHandle(real(batch))]

        def alone(*_, function=function, **__):
            check.unless(False, name(function), "sent a message outside of a batch")

        nccl = {"batch_isend_irecv": one_handle, "send": alone, "recv": alone}
        with tuned(WHOLE // world_size, 1), patch.multiple(dist, **nccl):
            x = function(twin.whole(rank, ELEMENTS))
        if function in ALL_REDUCES:
            check.same(x, twin.total(parts_of(world_size, ELEMENTS)), name(function))
        check.unless(hops is None or seen == [pair] * hops, name(function), "batches", seen)
