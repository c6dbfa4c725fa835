"""The wire: it sees all that PyTorch says, writes it down right, and changes nothing."""

import os
import time
from datetime import timedelta

import pytest
import pytorch_cases
import torch
import torch.distributed as dist
from on_ranks import into_torchs_own_world, on_ranks
from pytorch_cases import CALLS, all_gather_single, reduce_scatter_single, results

from ddpkit import HangError, Link, launch
from ddpkit.runtime.board import DISAGREES
from ddpkit.runtime.wire import _splits, of_this_attempt, recorder

# Nothing changes.


def differing(folder) -> list[str]:
    """The calls of which the wire's results differ from plain Gloo's in the same process."""
    on_wire = results(CALLS)
    into_torchs_own_world(folder)
    plain = results(CALLS)
    return [name for name in CALLS if on_wire[name] != plain[name]]


@pytest.mark.parametrize(("world_size", "link"), [(2, None), (3, None), (2, Link(1e-5, 1e9))])
def test_every_call_is_bit_identical_to_plain_gloo(tmp_path, world_size, link):
    """In a world of 4: test_pytorch_inside, which trains, too."""
    run = launch(differing, tmp_path, world_size=world_size, link=link)
    assert list(run) == [[]] * world_size


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has batch threads")
def test_under_a_link_gloos_readers_wait_their_turn():
    def policies() -> set[int]:
        """How Linux schedules the threads that come with a new group."""
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))  # in tests all are batch
        before = set(os.listdir("/proc/self/task"))
        dist.new_group()
        new = set(os.listdir("/proc/self/task")) - before
        return {os.sched_getscheduler(int(thread)) for thread in new}

    assert list(launch(policies, world_size=2)) == [{os.SCHED_OTHER}] * 2
    for found in launch(policies, world_size=2, link=Link(1e-5, 1e9)):
        assert os.SCHED_BATCH in found


# What is written down.


def test_bytes_peers_and_arguments_of_every_call():
    def calls():
        rank, world_size = dist.get_rank(), dist.get_world_size()
        x, parts = torch.ones(6), [torch.ones(6) for _ in range(world_size)]
        dist.all_reduce(x, dist.ReduceOp.MAX)
        dist.broadcast(x, src=2)
        dist.reduce(x, dst=1)
        dist.all_gather(parts, x)
        all_gather_single(torch.ones(18), x)
        dist.gather(x, parts if rank == 1 else None, dst=1)
        dist.scatter(x, parts if rank == 1 else None, src=1)
        dist.reduce_scatter(x, parts)
        reduce_scatter_single(x, torch.ones(18))
        dist.all_to_all_single(x, torch.ones(6))
        dist.barrier()
        dist.send(x, 1) if rank == 0 else dist.recv(x, 0) if rank == 1 else None

    run = launch(calls, world_size=3)
    said = [[(r.op, r.detail, r.bytes, r.peer) for r in wire] for wire in run.wire]
    common = [
        ("all_reduce", "6 float32, max", 24, None),
        ("broadcast", "6 float32, src=2", 24, 2),
        ("reduce", "6 float32, sum, dst=1", 24, 1),
        ("all_gather", "6 float32", 24, None),
        ("all_gather", "6 float32", 24, None),
        ("gather", "6 float32, dst=1", 24, 1),
        ("scatter", "6 float32, src=1", 24, 1),
        ("reduce_scatter", "18 float32, sum", 72, None),
        ("reduce_scatter", "18 float32, sum", 72, None),
        ("all_to_all", "6 float32", 24, None),
        ("barrier", "", 0, None),
    ]
    at_source = list(common)
    at_source[6] = ("scatter", "6 float32, src=1", 72, 1)  # it hands in all parts
    assert said[0] == [*common, ("send", "6 float32, dst=1", 24, 1)]
    assert said[1] == [*at_source, ("recv", "6 float32, src=0", 24, 0)]
    assert said[2] == common
    for wire in run.wire:
        assert all(r.issued <= r.started <= r.done for r in wire)
        assert [r.issued for r in wire] == sorted(r.issued for r in wire)
        assert {(r.group, r.ranks) for r in wire[:11]} == {("world", (0, 1, 2))}
        assert {(r.values, r.result, r.memory) for r in wire} == {(None, None, None)}  # unasked


def test_records_name_the_readers_own_line():
    def outer():
        inner()
        dist.all_gather_object([None, None], 1)

    def inner():
        dist.all_reduce(torch.ones(1))

    run = launch(outer, world_size=2)
    record, *objects = run.wire[1]
    assert [(r.op, r.dtype) for r in objects] == [("all_gather", "int64"), ("all_gather", "uint8")]
    assert record.place == (__file__, inner.__code__.co_firstlineno + 1, "inner")
    assert {(r.line, r.function) for r in objects} == {(outer.__code__.co_firstlineno + 2, "outer")}


def test_ddps_reducer_and_zero_redundancy_optimizer_are_seen():
    train, numbers = pytorch_cases.zero_redundancy_optimizer, 8 * 16 + 16 + 16 * 8 + 8
    run = launch(train, world_size=2)
    weights, *rest = [r for r in run.wire[0] if r.dtype == "float32"]
    assert (weights.op, weights.bytes) == ("broadcast", numbers * 4)  # as DDP begins
    reduced = [(r.bytes, r.detail) for r in rest if r.op == "all_reduce"]
    assert reduced == [(numbers * 4, f"{numbers} float32, sum")]
    updates = [r for r in rest if r.op == "broadcast"]
    assert sum(r.bytes for r in updates) == numbers * 4
    assert {r.peer for r in updates} == {0, 1}
    assert {(r.file, r.function) for r in run.wire[0]} == {(pytorch_cases.__file__, train.__name__)}
    assert all(r.done is not None for r in run.wire[0])


def test_sub_groups_have_their_own_channel():
    def two_groups():
        rank = dist.get_rank()
        groups = [dist.new_group([0, 2]), dist.new_group([1, 2])]
        for group, members in zip(groups, ([0, 2], [1, 2]), strict=True):
            if rank in members:
                dist.broadcast(torch.ones(1), src=members[0], group=group)

    run = launch(two_groups, world_size=3)
    groups = [[r for r in wire if r.op != "new_group"] for wire in run.wire]
    said = [[(r.op, r.group, r.ranks, r.peer) for r in wire] for wire in groups]
    first = "broadcast", "group [0, 2]", (0, 2), 0
    second = "broadcast", "group [1, 2]", (1, 2), 1
    assert said == [[first], [second], [first, second]]
    assert len({r.channel for r in run.wire[2] if r.op != "new_group"}) == 2


def test_a_receive_from_any_source_learns_who_sent():
    def anyone():
        x = torch.zeros(1)
        if dist.get_rank():
            dist.send(x + dist.get_rank(), 0)
            return None
        return [(dist.recv(x), x.item()) for _ in range(2)]

    run = launch(anyone, world_size=3)
    assert sorted(run[0]) == [(1, 1.0), (2, 2.0)]
    assert [r.peer for r in run.wire[0]] == [source for source, _ in run[0]]
    assert {r.channel for r in run.wire[0]} == {run.wire[1][0].channel, run.wire[2][0].channel}
    # A third rank has no part in a message: its end is no reason to wait in vain for it.
    assert [r.ranks for r in run.wire[0]] == [(source, 0) for source, _ in run[0]]


@pytest.mark.parametrize("begin", ["irecv(x)", "irecv(x, 1)", "all_reduce(x, async_op=True)"])
@pytest.mark.parametrize("link", [None, Link(1e-4, 1e9)])
def test_a_call_is_waited_for_no_longer_than_asked(begin, link):
    def in_vain():
        if dist.get_rank() == 0:
            work = eval(f"dist.{begin}", {"dist": dist, "x": torch.zeros(1)})
            with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
                work.wait(timedelta(seconds=0.2))

    launch(in_vain, world_size=2, link=link, timeout=60)


def test_after_a_restart_nothing_of_the_first_attempt_is_read(monkeypatch):
    store = dist.HashStore()
    of_this_attempt(store).set("address", "of a rank that is gone")
    assert store.check(["address"])  # the first attempt has no prefix
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not of_this_attempt(store).check(["address"])
    of_this_attempt(store).set("address", "of its successor")
    assert of_this_attempt(store).get("address") == b"of its successor"
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")  # rank 0 made a new one
    assert of_this_attempt(store) is store


def test_parts_of_an_all_to_all_as_tensors_as_rows_and_even():
    rows = torch.zeros(6, 2)
    lists = [torch.zeros(5), torch.zeros(1)], [torch.zeros(2, 2), torch.zeros(3)]
    assert _splits((*lists, None), 2) == ((4, 3), (5, 1))
    assert _splits((rows, rows, [], [], None), 2) == ((6, 6), (6, 6))
    assert _splits((rows, rows, [6, 0], [1, 5], None), 2) == ((2, 10), (12, 0))


def test_to_wait_for_a_message_twice_is_to_wait_once():
    """Gloo would wait for a second one. What else a handle does: pytorch_cases."""

    def twice():
        x = torch.full((1,), float(dist.get_rank()))
        message = dist.isend(x, 1) if dist.get_rank() == 0 else dist.irecv(x, 0)
        return message.wait(), message.wait(), x.item()

    for link in (None, Link(1e-4, 1e9)):
        run = launch(twice, world_size=2, link=link, timeout=60)
        assert list(run) == [(True, True, 0.0)] * 2


# keep_values.


def test_kept_values():
    def add():
        buffer = torch.arange(4.0) + 10 * dist.get_rank()
        dist.all_reduce(buffer[1:3])
        if dist.get_rank() == 0:
            dist.send(buffer[3:], 1)
        else:
            dist.recv(buffer[:1], 0)
        dist.all_reduce(torch.ones(65))

    run = launch(add, world_size=2, keep_values=True)
    (summed, sent, large), (_, received, _) = run.wire
    assert (summed.values, summed.result) == ([1.0, 2.0], [12.0, 14.0])
    assert summed.memory[1:] == (1, [0.0, 12.0, 14.0, 3.0])
    assert (sent.values, sent.result, sent.memory[1:]) == ([3.0], None, (3, [0.0, 12.0, 14.0, 3.0]))
    assert (received.values, received.result) == (None, [3.0])
    assert received.memory[1:] == (0, [3.0, 12.0, 14.0, 13.0])
    assert (large.values, large.result, large.memory) == (None, None, None)
    assert sent.memory[0] == summed.memory[0]  # the same buffer


# What a checker in a rank can see.


@on_ranks(2, keep_values=True)
def test_a_rank_sees_its_own_records(check):
    buffer, elsewhere = torch.ones(8), torch.ones(8)
    works = [dist.all_reduce(x, async_op=True) for x in (buffer[:4], buffer[4:], torch.ones(65))]
    check.same([(r.waits, r.by_future) for r in recorder().records], [(0, False)] * 3)
    works[0].wait()
    works[0].wait()
    works[1].get_future().wait()
    first, second, third = recorder().records[:3]
    check.same([r.waits for r in (first, second, third)], [2, 0, 0])
    check.same([r.by_future for r in (first, second, third)], [False, True, False])
    check.unless(first.waited is not None and second.waited is None, "waited", first, second)
    check.same(recorder().home(buffer[6:]), (first.memory[0], 6), "home")
    check.same(first.memory[0], second.memory[0], "the same buffer")
    check.same([third.memory, recorder().home(elsewhere)], [None, None], "not on the wire")
    works[2].wait()
    if dist.get_rank() == 1:
        dist.recv(torch.empty(1), 0)
    work = dist.all_reduce(torch.ones(1), async_op=True)
    if dist.get_rank() == 0:  # alone in it, so it can't be done
        future = work.get_future()
        check.same(recorder().board.records(0)[-1].by_future, True, "on the board")
        dist.send(torch.ones(1), 1)
        future.wait()
    work.wait()


# Trap 23: what the user does to torch.distributed.


def test_trap_23_what_the_user_does_to_the_group(tmp_path):
    def again():
        try:
            dist.init_process_group("gloo")
        except ValueError as error:
            refused = str(error)
        dist.all_reduce(torch.ones(1))
        into_torchs_own_world(tmp_path)
        x = torch.ones(1)
        dist.all_reduce(x)
        dist.destroy_process_group()
        return "twice" in refused, x.item()

    assert list(launch(again, world_size=2)) == [(True, 2.0)] * 2


def test_a_disagreement_is_told_even_when_the_board_has_moved_on():
    def flood():
        if dist.get_rank() == 0:
            first = dist.isend(torch.ones(8), 1)
            while recorder().board.state(1) != DISAGREES:
                time.sleep(0.001)
            works = [dist.isend(torch.ones(8), 1) for _ in range(600)]  # the board remembers 256
            works[-1].wait()
            first.wait()
        else:
            while not recorder().board.calls(0):
                time.sleep(0.001)
            dist.recv(torch.ones(7), 0)

    with pytest.raises(HangError) as caught:
        launch(flood, world_size=2, timeout=20)
    one, other = "rank 0 called send(8 float32, dst=1)", "rank 1 called recv(7 float32, src=0)"
    assert str(caught.value).startswith(f"mismatch: {one}, but {other}.")


@on_ranks(2)
def test_a_peer_that_cannot_be_is_named_before_gloo_sees_it(check):
    me, x = dist.get_rank(), torch.ones(1)
    nobody = f"rank {me} called send with dst=2, but there is no rank 2: the last is 1"
    check.refused(dist.isend, x, 2, says=nobody)
    check.refused(dist.irecv, x, 5, says="called recv with src=5, but there is no rank 5")
    check.refused(dist.isend, x, me, says=f"called send with dst={me}, which is itself")
    check.refused(dist.irecv, x, me, says=f"called recv with src={me}, which is itself")


def test_a_handle_collected_in_the_middle_of_a_call_blocks_nothing():
    """The garbage collector may run anywhere, also while the recorder holds its lock."""

    def collected():
        if dist.get_rank() == 0:
            work = dist.isend(torch.ones(1), 1)
            with dist.group.WORLD.recorder._lock:
                del work
        return True

    assert list(launch(collected, world_size=2, timeout=20)) == [True, True]
