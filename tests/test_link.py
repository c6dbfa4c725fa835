"""The emulated link: messages take at least what the model says, and queue behind each other."""

import itertools
import pickle
import time

import pytest
import torch
import torch.distributed as dist

from ddpkit import HangError, Link, launch

SLOW = Link(latency_s=0.01, bytes_per_s=1e6)


# The link itself.


@pytest.mark.parametrize(
    ("latency_s", "bytes_per_s", "complaint"),
    [
        (-1e-6, 1e9, "latency_s >= 0, got -1e-06"),
        (float("nan"), 1e9, "latency_s >= 0, got nan"),
        ("1 ms", 1e9, "latency_s >= 0, got '1 ms'"),
        (0.0, 0, "bytes_per_s > 0, got 0"),
    ],
)
def test_bad_links_are_refused(latency_s, bytes_per_s, complaint):
    with pytest.raises(ValueError, match=f"expected {complaint}. Give "):
        Link(latency_s, bytes_per_s)


def test_presets_have_names():
    for name in ("1 Gbit Ethernet", "10 Gbit Ethernet", "NVLink 4"):
        link = Link.preset(name)
        assert str(link) == name
        assert link.seconds("send", 0, 2) == link.latency_s
    with pytest.raises(ValueError, match="called 'token ring'; there are '1 Gbit Ethernet'"):
        Link.preset("token ring")


def test_a_link_is_a_value_that_says_what_it_is():
    link, fast = Link(50e-6, 22816143.0), Link(0, float("inf"))
    assert link == Link(50e-6, 22816143.0) == pickle.loads(pickle.dumps(link))
    assert str(link) == "50 µs, 22.8 MB/s"
    assert str(fast) == "0 ns, inf GB/s"
    assert fast.seconds("all_reduce", 10**9, 4) == 0


@pytest.mark.parametrize(
    ("op", "steps", "sent"),
    [
        ("send", 1, 1200),
        ("all_reduce", 6, 1800),
        ("reduce_scatter", 3, 900),
        ("all_gather", 3, 900),
        ("all_to_all", 3, 900),
        ("broadcast", 2, 2400),
        ("reduce", 2, 2400),
        ("gather", 3, 900),
        ("scatter", 3, 900),
        ("barrier", 2, 2 * 1200),
    ],
)
def test_the_model_for_4_ranks_and_1200_bytes(op, steps, sent):
    assert SLOW.seconds(op, 1200, 4) == pytest.approx(steps * 0.01 + sent / 1e6)
    assert SLOW.seconds(op, 0, 4) == pytest.approx(steps * 0.01)
    assert op == "send" or SLOW.seconds(op, 1200, 1) == 0


def test_a_slowed_link():
    fast = Link.preset("NVLink 4")
    slow = fast.slowed(1000)
    assert (slow.latency_s, slow.bytes_per_s) == pytest.approx((3e-3, 370e6))
    assert str(slow) == slow.name == "NVLink 4, 1000 × slower"
    assert slow.seconds("all_reduce", 10**6, 4) / slow.slowdown == pytest.approx(
        fast.seconds("all_reduce", 10**6, 4)
    )
    assert str(Link(3e-6, 370e9).slowed(2.5)) == "3 µs, 370 GB/s, 2.5 × slower"
    assert fast.slowed(10).slowed(10).slowdown == 100
    assert (fast.slowdown, fast.name) == (1, "NVLink 4")

    for times in (0.5, float("nan"), float("inf"), "1000", True):
        with pytest.raises(ValueError, match=f">= 1, got {times!r}: 1000 makes"):
            SLOW.slowed(times)


# Runs over a link. Times are asserted from below only: a busy machine is slower, never faster.


def took(record):
    return record.done - record.issued


def calls():
    """One of each kind."""
    x = torch.ones(5000)
    dist.all_reduce(x)
    dist.all_gather([torch.empty(5000) for _ in range(2)], x)
    dist.send(x, 1) if dist.get_rank() == 0 else dist.recv(x, 0)


def test_calls_take_at_least_the_models_time():
    run = launch(calls, world_size=2, link=SLOW)
    for reduced, gathered, _ in run.wire:
        assert took(reduced) >= SLOW.seconds("all_reduce", 20_000, 2)  # 40 ms
        assert took(gathered) >= SLOW.seconds("all_gather", 40_000, 2)  # all parts count: 30 ms
    (*_, sent), (*_, received) = run.wire
    assert received.done - sent.issued >= SLOW.seconds("send", 20_000, 2)  # 30 ms
    assert run.link == SLOW
    assert run.backend == "gloo on CPU: the emulated link (10 ms, 1 MB/s) works on its wire"


def test_transfers_of_one_rank_queue_behind_each_other():
    def at_once():
        works = [dist.all_reduce(torch.ones(5000), async_op=True) for _ in range(3)]
        for work in works:
            work.wait()
        if dist.get_rank() == 0:
            for work in [dist.isend(torch.ones(5000), dst) for dst in (1, 2)]:
                work.wait()
            for work in [dist.irecv(torch.empty(5000), src) for src in (1, 2)]:
                work.wait()
        else:
            dist.recv(torch.empty(5000), 0)
            dist.send(torch.ones(5000), 0)

    run = launch(at_once, world_size=3, link=SLOW)
    one = SLOW.seconds("all_reduce", 20_000, 3)
    for wire in run.wire:
        assert wire[2].done - wire[0].issued >= 3 * one
        for earlier, later in itertools.pairwise(wire[:3]):
            assert later.started >= earlier.started + one
    first, second, one_in, other_in = run.wire[0][3:]
    assert other_in.started >= one_in.started + SLOW.seconds("recv", 20_000, 3)
    assert second.started >= first.started + 20_000 / 1e6
    assert run.wire[2][3].done >= first.issued + 2 * 20_000 / 1e6 + SLOW.latency_s


def test_a_call_goes_on_while_its_rank_computes():
    """The time of a call runs from its issue, not from its wait."""

    def overlap():
        work = dist.all_reduce(torch.ones(5000), async_op=True)
        while not work.is_completed():
            time.sleep(0.001)
        done = time.perf_counter()
        work.wait()
        return done

    run = launch(overlap, world_size=2, link=SLOW)
    for done, wire in zip(run, run.wire, strict=True):
        assert wire[0].done <= done <= wire[0].waited


def test_a_slow_link_is_no_hang():
    """A transfer that takes longer than hang_after is on its way, not stuck."""

    def slowly():
        dist.all_reduce(torch.ones(2500))

    run = launch(slowly, world_size=2, link=Link(0.0, 10_000), hang_after=0.2)  # 1 s
    assert took(run.wire[0][0]) >= 1


def test_a_mistake_on_a_link_is_still_found():
    def skips():
        return dist.get_rank() or dist.all_reduce(torch.ones(1))

    said = "rank 0 waits in all_reduce for rank 1, which has returned"
    with pytest.raises(HangError, match=said):
        launch(skips, world_size=2, link=Link(1e-4, 1e9))
