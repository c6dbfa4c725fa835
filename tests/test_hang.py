"""Hangs, deadlocks and mismatches: found, told in words, the same each time; slow is not hung."""

import _thread
import ast
import collections
import random
import re
import site
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import hang_cases
import pytest
import torch
import torch.distributed as dist
from test_board import call
from torch.nn.parallel import DistributedDataParallel

from ddpkit import HangError, RankError, launch
from ddpkit.lesson.replay import replay
from ddpkit.runtime import columns, watch
from ddpkit.runtime import report as words
from ddpkit.runtime.board import DISAGREES, IDLE, RETURNED, RUNNING, SLOTS, Board, unfitting
from ddpkit.runtime.look import POLLS_S, Look
from ddpkit.runtime.place import describe_place, short_path

NAME = Path(__file__).name


def report(fn, world_size=2, times=2, **options) -> str:
    """The report of a launch that must hang: the same of several at once, whoever was faster."""

    def once(_):
        with pytest.raises(HangError) as caught:
            launch(fn, world_size=world_size, **{"timeout": 60, **options})
        return str(caught.value)

    with ThreadPoolExecutor(times) as pool:
        reports = list(pool.map(once, range(times)))
    assert reports == reports[:1] * times
    private = r"/tmp|/work|/home|127\.0\.0\.1|localhost|0x[0-9a-f]|\bpid\b|\d\.\d"
    assert re.search(private, reports[0]) is None
    return reports[0]


def line(fn, offset):
    return f"{NAME}:{fn.__code__.co_firstlineno + offset} in {fn.__name__}"


def places(text) -> dict[str, str]:
    """Where the ranks were: {"ranks 0 and 2": "waiting for rank 1 in ...⏎place"}."""
    found = re.split(r"\n(?=\w)", text.split("\n\n")[1])
    return dict(place.replace("\n  ", "⏎").split(": ", 1) for place in found)


# Trap 17: certain deadlocks.

EVERY = (
    "Every rank of the group must make the call. Is it under an `if`, or did one loop end early?"
)
BOTH = "Every send needs a recv on the other rank, and every recv a send. Count them on both sides."
FIRST = "Let one side receive first, or start both with isend and irecv and wait afterwards."
ORDER = "All ranks must use their groups in the same order, and leave no call out."
TAGS = "Their tags, or groups, differ: a receive takes only what was sent with its own."
NONE = "Each waits for a message, and none that fits is on its way: let one send first."


def test_trap_17_a_skipped_collective():
    def skips():
        x = torch.ones(8)
        for _ in range(10 - (dist.get_rank() == 1)):
            dist.all_reduce(x)

    text = report(skips, world_size=3)
    said = "deadlock: ranks 0 and 2 wait in all_reduce for rank 1, which has returned.\n"
    assert text.startswith(said)
    place = f"{line(skips, 3)}: dist.all_reduce(x)"
    waits = f"waiting for rank 1 in all_reduce(8 float32, sum)⏎{place}"
    assert places(text)["rank 1"] == "returned"
    assert waits in (places(text).get("ranks 0 and 2"), places(text).get("rank 0"))
    assert re.search(r"\n10 ≠  all_reduce\(8 float32, sum\)  -\n", text)
    assert "\n5 " not in text  # only the last five
    assert text.endswith(EVERY)


def anyone():
    if dist.get_rank() == 0:
        dist.recv(torch.ones(8))


def from_anyone():
    dist.recv(torch.ones(8))


def other_tags():
    handle = dist.isend(torch.ones(8), 1, tag=2) if dist.get_rank() == 0 else None
    dist.recv(torch.ones(8), tag=1)
    return handle


def recv_or_reduce():
    if dist.get_rank() == 0:
        dist.recv(torch.ones(2), 1)
    dist.all_reduce(torch.ones(2))


def alone():
    if dist.get_rank() == 0:
        dist.new_group([0, 1])
    dist.barrier()


CASES = hang_cases.CASES | hang_cases.UNSEEN
CASES |= {"anyone": (anyone, 3), "recv_or_reduce": (recv_or_reduce, 2), "alone": (alone, 2)}
CASES |= {"from_anyone": (from_anyone, 3), "other_tags": (other_tags, 2)}


@pytest.mark.parametrize(
    ("name", "says", "advice"),
    [
        ("only_rank_0", "rank 0 waits in barrier for ranks 1 and 2, which have returned.", EVERY),
        ("both_send", "rank 0 for rank 1 in send, rank 1 for rank 0 in send.", FIRST),
        ("a_circle_of_receives", "rank 0 for rank 1 in recv, rank 1 for rank 2 in recv, ", NONE),
        ("from_anyone", "rank 0 for ranks 1 and 2 in recv, rank 1 for ranks 0 and 2 in ", NONE),
        ("other_tags", "rank 0 for rank 1 in recv, rank 1 for rank 0 in recv.", NONE),
        ("nobody_sends", "rank 0 waits in recv for rank 1, which has returned.", BOTH),
        ("anyone", "rank 0 waits in recv for ranks 1 and 2, which have returned.", BOTH),
        ("groups_in_opposite_order", "rank 0 for rank 1 in all_reduce, rank 1 for rank 0", ORDER),
        ("recv_or_reduce", "rank 0 for rank 1 in recv, rank 1 for rank 0 in all_reduce.", BOTH),
        ("alone", "rank 0 for rank 1 in new_group, rank 1 for rank 0 in barrier.", "Every rank"),
        ("tags_differ", "rank 0 for rank 1 in send, rank 1 for rank 0 in recv.", TAGS),
    ],
)
def test_trap_17_deadlocks(name, says, advice):
    text = report(*CASES[name][:2])
    assert re.match(f"deadlock: (each waits for another: )?{says}", text)
    assert text.splitlines()[-1].startswith(advice)
    assert name != "tags_differ" or "send(100000 float32, dst=1, tag=3)" in text


@pytest.mark.parametrize("stages", [2, pytest.param(3, marks=pytest.mark.wide)])
def test_groups_that_only_their_members_make_are_named(stages):
    """Who finds whom is a matter of luck; the reason isn't."""

    def pairs():
        dist.new_group(list(range(dist.get_rank() % stages, 2 * stages, stages)))
        time.sleep(60)  # for those that found each other

    with pytest.raises(HangError) as caught:
        launch(pairs, world_size=2 * stages, hang_after=1, timeout=4)
    advice = str(caught.value).splitlines()[-1]
    assert advice.startswith("Each rank counts its groups, and under one number ranks 0 and ")
    assert f"ranks 1 and {stages + 1} make [1, {stages + 1}]" in advice
    assert advice.endswith(
        "Every rank must make every group, in one order, also those it isn't in."
    )
    replay(caught.value)


def test_groups_made_under_one_number_are_replayed_one_by_one():
    """They have a channel in common, and are no call of all these ranks."""
    groups = [(0, 2), (1, 3), (0, 2), (1, 3)]
    said = {"op": "new_group", "channel": "new 1#1", "fingerprint": "", "group": "group"}
    wire = []
    for ranks in groups:
        ended = {"waited": 1.0, "done": 2.0 if 0 in ranks else None}
        wire.append([call(ranks=ranks, detail=str(list(ranks)), **said, **ended)])
    texts = [event.text for event in replay(SimpleNamespace(wire=wire))]
    assert texts == [
        "ranks 0 and 2 form a group",
        "ranks 1 and 3 wait in vain in new_group([1, 3])",
    ]


def test_what_a_failed_run_forgot_is_not_said_to_be_missing():
    early = [call(done=1.0, detail="8"), call(op="send", peer=1, channel="0 0>1:0", done=1.0)]
    late = [call(seq, ranks=(1,), channel="own", done=1.0) for seq in range(SLOTS)]
    failed = RankError("no", rank=1, output=["", ""], wire=[early, late])
    assert [event.kind for event in replay(failed) if event.kind != "meet"] == ["send", "failed"]
    failed.wire[1].pop()
    assert [event.kind for event in replay(failed)][-2:] == ["failed", "stuck"]
    early[1].done, early[1].waited = None, 1.0
    assert [event.kind for event in replay(failed)][-2:] == ["stuck", "stuck"]
    early[1].started, early[1].waited = 1.0, None
    assert [event.kind for event in replay(failed)][-2:] == ["stuck", "lost"]


def test_what_a_rank_received_no_more_is_not_said_to_be_never_sent():
    receive = call(op="recv", peer=1, channel="0 1>0:0")
    late = [call(seq, ranks=(1,), channel="own", done=1.0) for seq in range(SLOTS)]
    failed = RankError("no", rank=1, output=["", ""], wire=[[receive], late])
    assert [event.kind for event in replay(failed) if event.kind != "meet"] == ["failed"]
    hung = HangError("no", output=["", ""], wire=failed.wire)
    assert [event.kind for event in replay(hung)][-1] == "stuck"
    hung.wire[1][0] = call(1, op="send", peer=0, channel="0 1>0:0", done=1.0)  # after the first
    assert [event.kind for event in replay(hung) if event.kind != "meet"] == ["send"]
    failed.wire[1][0] = call(op="send", peer=0, channel="0 1>0:0", done=1.0)
    receive.seq = 1  # the first is known, the second would be later
    assert [event.kind for event in replay(failed)][-1] == "stuck"
    receive.seq, failed.wire[1][0] = 0, late[1]
    failed.wire[1].pop()
    assert [event.kind for event in replay(failed)][-1] == "stuck"
    from_any = call(op="recv", peer=None, channel="0 ?")
    sent = call(op="send", peer=0, channel="0 1>0:0", done=1.0)
    failed = RankError("no", rank=1, output=["", ""], wire=[[from_any], [sent]])
    assert [event.kind for event in replay(failed)] == ["send", "failed"]
    failed.wire[1].pop()
    assert [event.kind for event in replay(failed)] == ["failed", "stuck"]


def test_trap_17_ddp_with_one_rank_doing_fewer_steps():
    """It waits in C++, where no mark is left."""

    def train():
        model = DistributedDataParallel(torch.nn.Linear(4, 4))
        for _ in range(4 - dist.get_rank()):
            model(torch.ones(2, 4)).sum().backward()

    text = report(train, times=1)
    assert text.startswith("deadlock: rank 0 waits in all_reduce for rank 1, which has returned.")
    assert line(train, 3) in text


def test_a_handle_that_nobody_waited_for_is_named():
    def forgets():
        x = torch.ones(2)
        dist.barrier()
        if dist.get_rank() == 0:
            dist.isend(x, 1)
        else:
            time.sleep(0.2)
            dist.recv(x, 0)

    text = report(forgets)
    assert text.startswith("deadlock: rank 1 waits in recv for rank 0, which has returned.\n")
    assert text.endswith(
        "Rank 0 began its send with isend and never waited for it "
        f"({line(forgets, 4)}: dist.isend(x, 1)). Keep what isend returns, and call wait() on it."
    )


def test_a_dropped_receive_that_blocks_all_that_follow_is_named():
    """Gloo lets the receive go, its message stays, and the barrier never ends."""

    def forgets():
        if dist.get_rank() == 0:
            dist.irecv(torch.zeros(4), 1)
        else:
            while not any(r.dropped for r in dist.group.WORLD.recorder.board.records(0)):
                time.sleep(0.001)
            dist.send(torch.ones(4), 0)
        dist.barrier()

    text = report(forgets, times=1, hang_after=1)
    assert text.startswith("no progress for 1 s, and every rank is inside a call.")
    assert "\nRank 0 began its receive with irecv and never waited for it (" in text
    assert text.endswith("Keep what irecv returns, and call wait() on it.")


# Trap 16 and 17: mismatches.


ADDS = "called all_reduce(4 float32, sum)"
MISMATCHES = {
    "another_shape": (
        f"ranks 0 and 1 {ADDS}, but rank 2 called all_reduce(5 float32, sum).",
        "Every rank must bring the same number of elements. Did the last batch shrink on one rank?",
    ),
    "broadcast_against_all_reduce": (
        f"rank 0 called broadcast(4 float32, src=0), but ranks 1 and 2 {ADDS}.",
        "Every rank must make the same collective calls in the same order. Is one of them under an",
    ),
    "another_dtype": (
        f"ranks 0 and 1 {ADDS}, but rank 2 called all_reduce(4 float64, sum).",
        "Both sides must use the same dtype; the bytes would be read as other numbers.",
    ),
    "another_root": (
        "ranks 0 and 2 called broadcast(4 float32, src=0), but rank 1 called broadcast(4 float32, ",
        "Every rank must name the same root and the same operation.",
    ),
    "another_operation": (
        f"ranks 0 and 2 {ADDS}, but rank 1 called all_reduce(4 float32, max).",
        "Every rank must name the same root and the same operation.",
    ),
    "another_length_of_a_message": (
        "rank 0 called send(8 float32, dst=1), but rank 1 called recv(7 float32, src=0).",
        "Both sides must name the same number of elements.",
    ),
}


# A broadcast's root, and who hears it first, may have returned when the others come, or not yet.
SOME_MAY_BE_THROUGH = "broadcast_against_all_reduce", "another_root"


@pytest.mark.parametrize("name", MISMATCHES)
def test_trap_16_and_17_mismatches(monkeypatch, name):
    monkeypatch.setattr(watch, "SETTLE_S", 30.0)  # the third rank may be slow on a busy machine
    says, advice = MISMATCHES[name]
    text = report(*CASES[name][:2], times=1 if name in SOME_MAY_BE_THROUGH else 2)
    assert text.startswith(f"mismatch: {says}")
    assert text.splitlines()[-1].startswith(advice)


def test_parts_of_a_gather_are_as_long_on_all_ranks_since_gloo_takes_no_others():
    def uneven():
        parts = [torch.ones(4), torch.ones(5), torch.ones(4)]
        dist.gather(parts[dist.get_rank()], parts if dist.get_rank() == 0 else None)

    text = report(uneven, 3, 1)
    assert re.match(r"mismatch: ranks 0 and 2 called gather\(4 .* rank 1 called gather\(5 ", text)
    assert "of the cell" not in text  # of the line by which Python started rank 0, which has failed


def test_a_scatter_with_two_roots_is_one_call():
    def scatters():
        root = int(dist.get_rank() == 1)
        parts = [torch.ones(4)] * 3 if dist.get_rank() == root else None
        dist.scatter(torch.ones(4), parts, root)

    assert "\n\nEvery rank must name the same root" in report(scatters, 3, 1)


def test_a_rank_that_waits_for_a_cycle_may_wait_for_one_that_computes_as_well():
    def waits():
        rank, x = dist.get_rank(), torch.ones(1)
        if rank < 2:
            dist.recv(x, 1 - rank)
        elif rank == 2:
            dist.barrier()
        time.sleep(60)

    said = "deadlock: each waits for another: rank 0 for rank 1 in recv, rank 1 for rank 0 in recv."
    text = report(waits, 4, 1)
    assert text.startswith(said)
    assert "rank 2: waiting for ranks 0, 1 and 3 in barrier()" in text


def test_calls_that_the_board_has_forgotten_arent_called_missing():
    def leaves_one_out():
        rank, x = dist.get_rank(), torch.ones(1)
        alone = [dist.new_group([member]) for member in range(2)][rank]
        for _ in range(3 - rank):
            dist.all_reduce(x)
        for _ in range(300 * rank):
            dist.all_reduce(x, group=alone)

    lines = report(leaves_one_out, 2, 1).splitlines()
    assert [line for line in lines if "≠" in line or line[:1].isdigit()] == [
        "Their last calls in the world (≠: here they differ):",
        "3 ≠   all_reduce(1 float32, sum)  -",
    ]


# Slow is not hung (trap 19).


def test_trap_19_slow_is_not_hung():
    """For longer than hang_after: computing, sleeping, with a call to be waited for, receiving."""

    def slow():
        rank, x = dist.get_rank(), torch.ones(1)
        dist.all_reduce(x)
        if rank == 0:
            time.sleep(0.6)
        until = time.perf_counter() + 0.6 * (rank == 1)
        while time.perf_counter() < until:
            pass
        dist.all_reduce(x)
        work = dist.all_reduce(x, async_op=True)
        time.sleep(0.6)
        work.wait()
        if rank == 2:
            time.sleep(0.6)
            dist.send(x, 1)
        elif rank == 1:
            dist.recv(x, 2)
            dist.send(x, 0)
        else:
            dist.recv(x, 1)
        return x.item()

    assert list(launch(slow, world_size=3, hang_after=0.2)) == [27.0] * 3


def test_threads_that_nobody_can_see_may_be_busy():
    main, reads = [(__file__, 1, "step")], [(watch.streams.__file__, 1, "_watch")]
    for stacks, idle in ([], False), ([reads, main], True), ([main, main], False):
        rank = SimpleNamespace(ask_stacks=lambda stacks=stacks: stacks)
        assert watch.Watch._other_threads_idle(SimpleNamespace(ranks=[rank]), 0) == idle


def test_a_thread_of_a_waiting_rank_may_still_bring_the_message():
    def two_threads():
        from threading import Thread

        x, rank = torch.ones(1), dist.get_rank()
        if rank == 0:

            def send_later():
                dist.send(x, 1, tag=7)
                time.sleep(1.2)
                dist.send(x, 1)

            thread = Thread(target=send_later)
            thread.start()
            dist.recv(x.clone(), 1, tag=1)
            thread.join()
        else:
            dist.recv(x, 0, tag=7)
            dist.recv(x, 0)
            dist.send(x, 0, tag=1)

    launch(two_threads, world_size=2)


# No progress, the timeout, and the stop button.


@pytest.mark.skipif(sys.platform != "linux", reason="only /proc tells that a rank burns no CPU")
def test_a_matched_call_that_never_ends_falls_under_hang_after():
    def stopped():
        import os
        import signal

        if dist.get_rank() == 1:
            work = dist.all_reduce(torch.ones(8), async_op=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            time.sleep(0.3)
            work = dist.all_reduce(torch.ones(8), async_op=True)
        work.wait()

    text = report(stopped, times=1, hang_after=1)
    assert text.startswith("no progress for 1 s, and every rank is inside a call.\n")
    assert "rank 1: stopped by a signal, or by a debugger\n" in text
    assert text.endswith("it doesn't finish. A larger hang_after gives it more time.")


@pytest.mark.wide
@pytest.mark.skipif(sys.platform != "linux", reason="needs the C library's sleep")
def test_trap_18_the_timeout_shows_where_every_rank_is():
    """Also of a rank that holds the interpreter's lock in C."""

    def busy():
        import ctypes

        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 0:
            ctypes.PyDLL(None).sleep(1000)
        elif dist.get_rank() == 1:
            while True:
                pass
        dist.barrier()

    launch(print, world_size=1)  # so that the fork server is there
    text = report(busy, world_size=3, times=1, timeout=5)
    assert text.startswith("no result after 5 s.\n")
    held = f"{line(busy, 5)}: ctypes.PyDLL(None).sleep(1000)"
    assert places(text)["rank 0"] == f"computing⏎{held}"
    assert places(text)["rank 1"].startswith(f"computing⏎{NAME}:")
    barrier = f"{line(busy, 9)}: dist.barrier()"
    assert places(text)["rank 2"] == f"waiting for ranks 0 and 1 in barrier()⏎{barrier}"


def test_a_report_is_narrow_and_its_first_and_last_sentence_stand_out():
    def everybody_sends_before_anybody_receives():
        dist.barrier()
        rank, world_size = dist.get_rank(), dist.get_world_size()
        dist.send(torch.ones(100_000), dst=(rank + 1) % world_size)

    with pytest.raises(HangError) as caught:
        launch(everybody_sends_before_anybody_receives, world_size=4)
    lines = caught.value._render_traceback_()
    narrow = [re.sub(r"\x1b\[\d+m", "", line) for line in lines]
    assert max(map(len, narrow)) <= 72, narrow
    assert " ".join("\n".join(narrow).split()) == " ".join(f"HangError: {caught.value}".split())
    text = "\n".join(lines)
    assert re.match(r"\x1b\[1mHangError: deadlock: each waits .*?\x1b\[22m\n", text, re.DOTALL)
    assert text.endswith("isend and irecv and wait\nafterwards.\x1b[22m")
    calls = "rank 3: 1 barrier(), 2 send(100000 float32, dst=0)"
    assert calls in str(caught.value)


def test_a_loop_that_does_not_end_is_told_and_no_difference_is_claimed(monkeypatch):
    monkeypatch.setattr(words, "MANY_CALLS", 20)  # a busy machine makes few within two seconds

    def loop():
        while True:
            dist.barrier()

    text = report(loop, world_size=2, times=1, timeout=2)
    assert "≠" not in text
    assert re.search(r"\nRank 0 has made [\d,]+ calls, the last of them all alike: a loop", text)


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # between open() and with
def test_stop_says_where_the_ranks_were(tmp_path):
    def hangs():
        if dist.get_rank() == 0:
            while not dist.group.WORLD.recorder.board.waiting(1):
                time.sleep(0.001)
            (tmp_path / "hangs").touch()
            while True:
                pass
        dist.all_reduce(torch.ones(1), async_op=True)
        dist.barrier()

    def stop():
        while not (tmp_path / "hangs").exists():
            time.sleep(0.05)
        _thread.interrupt_main()

    threading.Thread(target=stop).start()
    with pytest.raises(KeyboardInterrupt) as caught:
        launch(hangs, world_size=2)
    table = places(str(caught.value))
    assert table["rank 0"].startswith(f"computing⏎{NAME}:")
    assert table["rank 1"].startswith("waiting")
    assert "KeyboardInterrupt: stopped" in caught.value._render_traceback_()[0]


def test_ranks_that_go_on_while_the_board_is_read_are_not_stuck(monkeypatch):
    """Reading takes long, and each waits for what the other hadn't called when it began."""

    class Slow(Look):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            time.sleep(1)

    def take_turns():
        for late in (1, 2):
            time.sleep(1.2 * (dist.get_rank() == late))
            dist.barrier()

    monkeypatch.setattr(watch, "Look", Slow)
    launch(take_turns, world_size=3, timeout=60)


# Reading the board, without any process.


@pytest.fixture
def board(tmp_path):
    board = Board(tmp_path / "board", 3, create=True)
    for rank in range(3):
        board.set_state(rank, RUNNING)
    yield board
    board.close()


def say(board, rank, *args, wait=True, ranks=(0, 1, 2), **said):
    index = board.calls(rank)
    board.put(rank, index, call(*args, ranks=ranks, **said))
    if wait:
        board.set_waiting(rank, index)


def stuck(board):
    return Look(board).deadlocked()


def test_who_computes_may_still_come_who_returned_never_does(board):
    say(board, 0)
    say(board, 1)
    now = Look(board).now
    assert [s.state for s in now] == ["waiting", "waiting", "computing"]
    assert now[0].missing == (2,)
    assert stuck(board) == []
    board.set_state(2, RETURNED)
    assert stuck(board) == [0, 1]
    board.set_threads(0, 2)  # a second thread can't bring who has returned
    assert stuck(board) == [0, 1]


def test_a_second_thread_may_free_a_circle_while_it_waits_in_no_call(board):
    say(board, 0, 0, "recv", channel="1>0", ranks=(1, 0))
    say(board, 1, 0, "recv", channel="0>1", ranks=(0, 1))
    assert stuck(board) == [0, 1]
    board.set_threads(0, 2)
    assert stuck(board) == []
    index = board.calls(0)
    say(board, 0, 0, "recv", channel="2>0", ranks=(2, 0), wait=False)
    board.set_waiting(0, index, caller=1)  # the second one waits, too, for a rank that computes
    assert stuck(board) == []
    board.set_state(2, RETURNED)
    assert stuck(board) == [0, 1]
    look = Look(board)
    assert look.now[0].missing == (2,)  # the wait that says most
    told = words.report(*words.explain_deadlock(look, [0, 1]), look)
    assert told.count("another thread: waiting for rank 1 in recv") == 1


def test_nobody_comes_to_a_group_that_it_has_destroyed(board):
    say(board, 0)
    say(board, 1)
    assert stuck(board) == []
    board.set_destroyed(2, {"0": ("train.py", 7, "main", "")})
    assert stuck(board) == [0, 1]
    said, _ = words.explain_deadlock(Look(board), [0, 1])
    assert said.endswith(
        "ranks 0 and 1 wait in all_reduce for rank 2, which has destroyed its group without that "
        "call (train.py:7 in main)."
    )


def test_who_asks_again_and_again_whether_a_call_is_complete_waits_but_not_for_certain(board):
    for rank in (0, 1):
        say(board, rank, wait=False)
        board.set_polled(rank, 0, time.perf_counter())
    board.set_state(2, RETURNED)
    look = Look(board)
    assert [s.state for s in look.now] == ["polling", "polling", "returned"]
    assert (look.deadlocked(), look.polled_in_vain()) == ([], [0, 1])
    board.set_polled(0, 0, time.perf_counter() - 2 * POLLS_S)  # it does something else now
    assert Look(board).now[0].state == "computing"


def test_a_call_to_which_all_came_goes_on(board):
    for rank in range(3):
        say(board, rank)
    assert stuck(board) == []


def test_waiting_for_someone_who_waits_for_someone_free_is_no_deadlock(board):
    say(board, 0, 0, "recv", channel="1>0", ranks=(1, 0))
    say(board, 1, 0, "recv", channel="2>1", ranks=(2, 1))
    assert stuck(board) == []
    board.set_state(2, RETURNED)
    assert stuck(board) == [0, 1]


def test_one_free_rank_is_enough_for_a_receive_from_any(board):
    say(board, 0, 0, "recv", channel="0 ?")
    board.set_state(1, RETURNED)
    assert stuck(board) == []
    board.set_state(2, RETURNED)
    assert stuck(board) == [0]


def test_who_has_destroyed_the_group_doesnt_free_a_receive_from_any(board):
    say(board, 0, 0, "recv", channel="0 ?")
    say(board, 2, 0, "recv", channel="0>2", ranks=(0, 2))
    assert stuck(board) == []
    board.set_destroyed(1, {"0": ("train.py", 7, "main", "")})
    assert stuck(board) == [0, 2]
    told, _ = words.explain_deadlock(Look(board), [0, 2])
    assert "rank 0 for ranks 1 and 2 in recv, rank 2 for rank 0 in recv" in told


@pytest.mark.parametrize("sent", ["0 0>1:7", "0 0>1:8", "1 0>1:7", "taken"])
def test_a_message_that_is_on_its_way_is_what_a_receive_from_any_waits_for(board, sent):
    message = {"channel": "0 0>1:7" if sent == "taken" else sent, "ranks": (0, 1)}
    for number in range(2):
        say(board, 0, number, "send", peer=1, done=2.0, wait=False, **message)
        if sent == "taken":  # the second one by a call before the other's
            say(board, 1, 1 - number, "recv", done=2.0, wait=False, **message)
    for rank in range(2):
        say(board, rank, 0, "recv", channel="0 7?", ranks=(0, 1))
    assert stuck(board) == ([] if sent == "0 0>1:7" else [0, 1])


@pytest.mark.parametrize(
    ("said", "found"),
    [({"by_future": True}, [(0, (1, 2))]), ({"by_future": True, "done": 2.0}, []), ({}, [])],
    ids=["open", "done", "by its handle"],
)
def test_a_call_whose_future_was_taken_may_be_waited_for_where_no_mark_is_left(board, said, found):
    """As DistributedDataParallel does, in C++. Who waits for a handle leaves a mark."""
    say(board, 0, wait=False, **said)
    board.set_state(1, RETURNED)
    hidden = Look(board).abandoned()
    assert [(s.rank, s.missing) for s in hidden] == found


def on_a_gpu(board, rank, to, op, peer, **said):
    """A message that is open in the line of its group; its program waits for it."""
    ends = (rank, peer) if op == "send" else (peer, rank)
    channel = f"0 {ends[0]}>{ends[1]}"
    said = {"peer": peer, "waited": 1.0, "fingerprint": "", **said}
    say(board, rank, 0, op, channel=channel, ranks=ends, wait=to, **said)


def test_on_a_gpu_the_front_of_a_line_holds_up_what_is_behind(board):
    """Two ranks send, and receive behind that; or both at once, as a batch."""
    for batched in (False, True):
        for rank in (0, 1):
            on_a_gpu(board, rank, True, "send", 1 - rank, issued=1.0)
            on_a_gpu(board, rank, True, "recv", 1 - rank, issued=2.0, batched=batched)
        look = Look(board)
        assert [s.missing for s in look.now[:2]] == [(), ()]
        assert look.deadlocked() == []  # short messages go into NCCL's buffers
        look = Look(board, standstill=True)
        awaited = [()] * 2 if batched else [(1,), (0,)]
        assert [s.missing for s in look.now[:2]] == awaited
        assert look.deadlocked() == ([] if batched else [0, 1])
        for rank in (0, 1):
            for number in (0, 1):
                board.put(rank, 2 * batched + number, call(done=3.0))


def test_what_is_behind_a_call_that_all_have_in_front_is_no_deadlock(board):
    """The GPU may compute for long before that one begins."""
    for rank in (0, 1):
        for seq in (0, 1):
            said = {"ranks": (0, 1), "waited": 1.0, "issued": float(seq)}
            say(board, rank, seq, "all_reduce", channel="0", **said)
    look = Look(board, standstill=True)
    assert [(s.call.seq, s.missing) for s in look.now[:2]] == [(0, ())] * 2
    assert look.deadlocked() == []


def test_the_first_mismatch_is_the_one_named(board):
    for seq, (one, other) in enumerate([("a", "a"), ("b", "c"), ("d", "e")]):
        say(board, 0, seq, fingerprint=one)
        say(board, 1, seq, fingerprint=other)
    assert {rank: r.fingerprint for rank, r in Look(board).mismatch().items()} == {0: "b", 1: "c"}


def test_parts_of_an_all_to_all_are_compared_pair_by_pair(board):
    counts = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]  # counts[r][q]: from rank r to rank q

    def splits(rank, wrong=0):
        sent = [count + wrong * (peer == 2) for peer, count in enumerate(counts[rank])]
        return tuple(sent), tuple(counts[peer][rank] for peer in range(3))

    def say_all(seq, wrong):
        for rank in range(3):
            said = splits(rank, wrong * (rank == 1))
            say(board, rank, seq, op="all_to_all", splits=said, wait=False)

    say_all(0, wrong=0)
    assert Look(board).mismatch() is None
    say_all(1, wrong=1)
    different = Look(board).mismatch()
    assert {record.seq for record in different.values()} == {1}
    assert unfitting(different) == {(1, 2): (7, 6)}
    happened, advice = words.explain_mismatch(different)
    assert happened == (
        "mismatch: the splits of all_to_all disagree: rank 1 sends 7 elements to rank 2, which "
        "expects 6."
    )
    assert advice == (
        "What a rank sends to another must be as long as that one expects it. Have you exchanged "
        "the counts first?"
    )


def test_no_rank_is_blamed_for_splits_if_two_are_in_all_pairs():
    by_rank = {0: ((1, 2), (1, 3)), 1: ((2, 1), (1, 1))}
    both = {rank: call(op="all_to_all", splits=sizes) for rank, sizes in by_rank.items()}
    headline, advice = words.explain_mismatch(both)
    assert (headline.count("sends"), "pairs" in advice) == (2, False)


def test_a_rank_whose_splits_are_wrong_is_named():
    def exchanges():
        rank, world_size = dist.get_rank(), 3
        sent = [rank + 1] * world_size
        expected = [peer + 1 for peer in range(world_size)]
        if rank == 1:
            sent = [1, 2, 3]
        x = torch.ones(sum(sent), 4)
        dist.all_to_all_single(torch.empty(sum(expected), 4), x, expected, sent)

    text = report(exchanges, 3, times=1)
    assert text.startswith("mismatch: the splits of all_to_all disagree: rank 1 sends")
    assert line(exchanges, 7) in text


def test_a_large_world_is_named_by_those_it_lacks(tmp_path):
    board = Board(tmp_path / "large", 32, create=True)
    everybody = tuple(range(32))
    for rank in everybody:
        board.set_state(rank, RETURNED if rank == 7 else RUNNING)
        if rank != 7:
            say(board, rank, ranks=everybody)
    look = Look(board)
    headline, advice = words.explain_deadlock(look, look.deadlocked())
    assert headline.startswith("deadlock: all but rank 7 wait in all_reduce for rank 7, which has ")
    assert "\nall but rank 7: waiting for rank 7 in " in words.report(headline, advice, look)
    board.close()


def test_one_rank_waits_for_all_others(tmp_path):
    board = Board(tmp_path / "large", 9, create=True)
    for rank in range(9):
        board.set_state(rank, RUNNING if rank == 7 else RETURNED)
    say(board, 7, ranks=tuple(range(9)))
    headline, _ = words.explain_deadlock(Look(board), [7])
    assert headline == "deadlock: rank 7 waits in all_reduce for all others, which have returned."
    board.close()


def test_who_computes_is_not_said_to_be_inside_a_call(board):
    say(board, 0, ranks=(0, 1))
    say(board, 1, ranks=(0, 1))
    headline, _ = words.explain_standstill(Look(board), 1.0)
    assert headline == "no progress for 1 s, and ranks 0 and 1 are inside a call."
    board.set_waiting(0, None)
    board.set_waiting(1, None)
    headline, _ = words.explain_standstill(Look(board), 1.0)
    assert headline == "no progress for 1 s, and no rank is inside a call."


def test_a_message_without_its_handle_is_named_where_nothing_moves(board):
    say(board, 0, ranks=(0, 1))
    say(board, 1, ranks=(0, 1))
    assert words.explain_standstill(Look(board), 1.0)[1] == "Which of these calls is one too many?"
    lost = call(op="recv", channel="0 0>1:0", ranks=(0, 1), peer=0, dropped=True)
    board.put(1, board.calls(1), lost)
    _, advice = words.explain_standstill(Look(board), 1.0)
    assert advice.startswith("Rank 1 began its receive with irecv and never waited for it (train.")


def test_a_call_for_which_cpp_code_may_wait_is_told(board):
    board.put(0, 0, call(by_future=True))
    text = words.report("stuck", "look", Look(board))
    assert "rank 0: computing, or waiting in C++ in all_reduce(8 float32, sum)\n" in text
    board.update(0, 0, call(by_future=True, done=1.0))
    assert "ranks 0, 1 and 2: computing\n" in words.report("stuck", "look", Look(board))


def test_another_dtype_of_another_shape_is_another_call():
    """As of DDP's forward on one rank alone, which sends the buffers of a BatchNorm."""
    mine = call(op="broadcast", shape=(16,), bytes=64)
    for theirs, says in (
        (call(op="broadcast", dtype="int32", shape=(16,), bytes=64), "must use the same dtype"),
        (call(op="broadcast", dtype="int64", shape=(8,), bytes=64), "like two different calls"),
    ):
        assert says in words.explain_mismatch({0: mine, 1: theirs})[1]
    uneven = [call(op="all_to_all", dtype=d, shape=(n,)) for d, n in (("int8", 2), ("int64", 3))]
    assert "must use the same dtype" in words.explain_mismatch(dict(enumerate(uneven)))[1]


def test_lists_of_objects_must_be_equally_long():
    def two_and_three():
        dist.broadcast_object_list([None] * (2 + dist.get_rank()), src=0)

    text = report(two_and_three, times=1)
    assert text.endswith("\nEvery rank must pass a list of the same length.")


def test_a_call_made_amid_an_error_names_it():
    def leaves_together():
        try:
            if dist.get_rank() == 1:
                raise ValueError("bad batch\nno. 7")
            dist.all_reduce(torch.ones(2))
        finally:
            dist.barrier()

    text = report(leaves_together)
    assert f"  while it handles ValueError: bad batch ({line(leaves_together, 3)[:-19]})\n" in text
    assert (
        "\nRank 1 makes its call while it handles an exception: look at that first. Every rank must"
        in text
    )


def test_an_error_that_cannot_be_printed_does_no_harm():
    class Mute(Exception):
        def __str__(self):
            raise IndexError

    def reduces():
        try:
            raise Mute(torch.ones(1))
        except Mute:
            dist.all_reduce(torch.ones(2))
            if dist.get_rank() == 0:
                dist.all_reduce(torch.ones(2))

    text = report(reduces, times=1)
    assert "while it handles Mute (" in text
    assert "while it handles an exception" in text


def test_what_all_ranks_handle_is_not_the_reason(board):
    for rank in range(3):
        board.put(rank, 0, call(ranks=(0, 1, 2), amid="KeyError"))
        board.set_waiting(rank, 0)
    assert words.report("stuck", "do", Look(board)).endswith("\n\ndo")


def test_a_call_that_a_pool_makes_names_the_line_of_the_main_thread():
    def hands_over():
        with ThreadPoolExecutor(1) as pool:
            if dist.get_rank() == 0:
                pool.submit(dist.all_reduce, torch.ones(2)).result()

    text = report(hands_over)
    assert "\n  " + line(hands_over, 3) in text
    assert "\n  by way of concurrent/futures/thread.py:" in text


def test_idle_ranks_are_in_step_when_all_made_the_same_calls(board):
    for rank in range(3):
        board.set_state(rank, IDLE)
    assert Look(board).in_step()
    say(board, 0)
    assert not Look(board).in_step()
    say(board, 1)
    say(board, 2)
    assert Look(board).in_step()
    for seq in range(SLOTS):  # ranks 0 and 1 forget that all have come
        say(board, 0, seq, op="send", ranks=(0, 1), channel="0 0>1:0")
        say(board, 1, seq, op="recv", ranks=(0, 1), channel="0 0>1:0")
    assert Look(board).in_step()
    board.set_state(1, RUNNING)
    assert not Look(board).in_step()
    board.set_state(1, IDLE)
    say(board, 2, op="recv", channel="0 7?")  # from any rank; none has sent
    assert not Look(board).in_step()


def test_calls_keep_their_numbers_when_the_board_forgets_the_first(board):
    for number in range(SLOTS + 7):
        say(board, 0, number, detail=str(number))
    assert columns.numbered_calls(Look(board), 0)[SLOTS + 7] == f"all_reduce({SLOTS + 6})"


def test_calls_keep_their_numbers_where_a_rank_alone_has_forgotten_a_group(board):
    for rank in range(2):
        say(board, rank, op="new_group", channel="new 0#1", done=1.0)
        for number in range(SLOTS - rank):
            say(board, rank, number, detail=str(number))
    lines = list(columns.last_calls(Look(board), [0, 1], None, stuck=False))
    assert lines[0] == "Their last calls:"
    assert lines[-1].split() == ["256", "all_reduce(255)", "-"]
    say(board, 0, channel="0#1")  # whether rank 1 has forgotten calls there isn't known
    lines = list(columns.last_calls(Look(board), [0, 1], None, stuck=False))
    assert "≠" not in "".join(lines)


def test_places_name_no_machine_path_and_no_cell_number():
    cell = "/tmp/ipykernel_17/4.py"
    assert describe_place((cell, 3, "step")) == "step, line 3"
    assert describe_place((cell, 3, "<module>")) == "line 3 of the cell"
    text = describe_place((__file__, 1, "step"))
    assert text.startswith(f"{NAME}:1 in step: ")
    assert short_path(torch.__file__) == "torch/__init__.py"
    assert short_path(f"{site.getusersitepackages()}/foo/bar.py") == "foo/bar.py"
    assert short_path(ast.__file__) == "ast.py"


def test_too_few_splits_are_pytorchs_error():
    def of_another_size():
        x = torch.ones(4)
        dist.all_to_all_single(x.clone(), x, [4], [4])

    with pytest.raises(RankError, match="splits"):
        launch(of_another_size, world_size=3)


# Whatever a board holds, there is a report.


def fill(board, rng: random.Random, on_gpu: bool) -> None:
    """Write calls, waits and states onto a board of 3 ranks, as ill-matched as they come."""
    groups = {"0": (0, 1, 2), "1": (0, 1), "2": (0, 2)}
    for rank in range(3):
        made = collections.Counter()
        for index in range(rng.randint(1, 6)):
            group = rng.choice([name for name, ranks in groups.items() if rank in ranks])
            ranks = groups[group]
            op = rng.choice(["all_reduce", "barrier", "new_group", "send", "recv", "recv any"])
            done = rng.random() < 0.6
            said = {"op": op, "channel": group, "ranks": ranks, "fingerprint": rng.choice("ffg")}
            if op in ("send", "recv"):
                peer = rng.choice([other for other in ranks if other != rank])
                ends = (rank, peer) if op == "send" else (peer, rank)
                said |= {"channel": f"{group} {ends[0]}>{ends[1]}:{rng.choice([0, 7])}"}
                said |= {"ranks": ends, "peer": peer, "dropped": rng.random() < 0.2}
            elif op == "recv any":
                said |= {"op": "recv", "channel": f"{group} ?"}
            seq = made[said["channel"]]
            made[said["channel"]] += 1
            at = 1000.0 + index + rng.random()
            said |= {"issued": at, "by_future": rng.random() < 0.2, "waited": rng.choice([0, at])}
            said |= {"started": None if on_gpu and not done else at, "done": at if done else None}
            said |= {"batched": on_gpu and rng.random() < 0.2, "limit_s": rng.choice([None, 30.0])}
            board.put(rank, index, call(seq, **said))
        for caller in range(rng.randint(0, 3)):
            board.set_waiting(rank, rng.randint(0, index), caller)
        board.set_threads(rank, rng.randint(1, 3))
        board.set_state(rank, rng.choice([RUNNING, RUNNING, RUNNING, RETURNED, IDLE, DISAGREES]))
        if rng.random() < 0.2:
            board.set_polled(rank, rng.randint(0, index), time.perf_counter())
        if rng.random() < 0.2:
            board.set_destroyed(rank, {rng.choice("012"): ("train.py", 7, "main", "")})


def test_a_rank_that_has_just_disagreed_has_its_call(tmp_path):
    """It writes the call, then its state, here while another process reads the board."""
    board = Board(tmp_path / "board", 2, create=True)
    read = board.records

    def records_meanwhile(rank):
        found = read(rank)
        board.put(rank, 0, call())
        board.set_state(rank, DISAGREES)
        return found

    board.records = records_meanwhile
    assert [s.state for s in Look(board).now] == ["starting"] * 2
    assert [s.call for s in Look(board).now] == [call()] * 2
    board.close()


@pytest.mark.parametrize("on_gpu", [False, True])
def test_whatever_a_board_holds_there_is_a_report(tmp_path, on_gpu):
    rng = random.Random(0)
    found = collections.Counter()
    for number in range(100):
        board = Board(tmp_path / f"{number}", 3, create=True)
        fill(board, rng, on_gpu)
        look = Look(board, standstill=number % 2 == 1)
        look.show_abandoned(lambda rank: True)
        stuck, different = look.deadlocked(), look.mismatch()
        told = [words.explain_standstill(look, 31.0), words.explain_timeout(look, 31.0)]
        told += [words.explain_deadlock(look, stuck)] if stuck else []
        told += [words.explain_mismatch(different)] if different else []
        for headline, advice in told:
            text = words.report(headline, advice, look, bool(stuck))
            advice = words.crossed(look) or advice
            assert (text[: len(headline)], text[-len(advice) :]) == (headline, advice)
            assert all(re.search(rf"\b{rank}\b|ranks 0 to 2", text) for rank in range(3))
        threads = any(s.more for s in look.now)
        found.update(stuck=bool(stuck), different=bool(different), threads=threads)
        board.close()
    assert min(found.values()) > 10, found
