"""Every way of training in parallel, on every rank, against one process with all data."""

import contextlib
import time
from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
import training_cases as cases
from on_ranks import on_ranks
from torch import nn

from ddpkit import HangError, Link, RankError, launch
from ddpkit.ddp import BucketedDDP, FlatDDP, NaiveDDP, OverlapDDP
from ddpkit.fast import buckets as fast

# Optimizer, micro-batches
COMBINATIONS = (cases.SGD, 1), (cases.ADAMW, 2), (cases.SGD, 2), (cases.ADAMW, 1)


@on_ranks(1, 2, 3, 4)
def test_trained_like_one_process(check, world_size):
    """Each way with a combination in each world. In float64: dtypes are tested with each way."""
    for kind in ("GPT", "Routes") if world_size in (2, 3) else ("GPT",):
        expected = [
            cases.alone(kind, make, micro_batches=count, steps=range(2 + count // 2))
            for make, count in COMBINATIONS
        ]
        for number, way in enumerate(cases.WAYS):
            if (way, kind) == ("overlap", "Routes"):
                continue  # it sends gradients as they come, and here ranks have different orders
            combination = (number + world_size) % len(COMBINATIONS)
            make, micro_batches = COMBINATIONS[combination]
            options = {"micro_batches": micro_batches, "set_to_none": number % 2 == world_size // 3}
            options["steps"] = range(2 + micro_batches // 2)
            got = cases.together(way, kind, make, **options)
            what = way, kind, make.func.__name__, options
            check.close(got, expected[combination], cases.HALF_THE_DIGITS, *what)
            check.same_on_all(got, *what)


@on_ranks(5)
def test_groups_of_ranks(check):
    """Each trains a model of its own; neither waits for the other."""
    evens, odds = dist.new_group([0, 2, 4]), dist.new_group([3, 1])
    if dist.get_rank() % 2:
        group, others, members, steps = odds, evens, [1, 3], range(3)
    else:
        group, others, members, steps = evens, odds, [0, 2, 4], range(1)
    expected = cases.alone("GPT", ranks=members, seed=members[0], steps=steps)
    for way in cases.WAYS:
        got = cases.together(way, "GPT", group=group, steps=steps)
        check.close(got, expected, cases.HALF_THE_DIGITS, way)
        check.refused(
            cases.prepare, way, cases.small_gpt(), group=others, says="a group that it isn't in"
        )


# The wire


def step_and_bytes(way, quiet, loud):
    """By operation: bytes, messages; then the buckets, and the bytes of all gradients."""
    module, model, optimizer, sender = cases.prepare(way, cases.small_gpt(dtype=torch.float32))

    def step():
        for number in range(quiet + loud):
            with sender.no_sync() if number < quiet else contextlib.nullcontext():
                cases.backward("GPT", model, None, [dist.get_rank()], number)
        if loud:
            sender.synchronize()
            optimizer.step()
        optimizer.zero_grad()

    records = cases.sent_by(step)
    ops = {record.op for record in records} - {"recv"}
    sent = {op: sum(record.bytes for record in records if record.op == op) for op in ops}
    counts = Counter(record.op for record in records)
    if way in cases.ZEROS:
        return sent, counts, optimizer.buckets, sum(b.flat.nbytes for b in optimizer.buckets)
    buckets = getattr(model, "plan", getattr(model, "buckets", []))
    return sent, counts, buckets, sum(p.nbytes for p in cases.trained_of(module).values())


@on_ranks(2, 3, backend="gloo")
def test_messages_and_bytes(check, world_size):
    """In the first step, in one of three micro-batches, and of two inside no_sync.

    Torch's collectives are recorded as a whole, and not hop by hop. The fast wrappers learn the
    order of gradients in their first step, and then plan anew.
    """
    trained = len(cases.trained_of(cases.small_gpt()))
    for way in cases.WAYS:
        for quiet, loud in ((0, 1), (2, 0)) if world_size == 2 else ((2, 1),):
            sent, counts, buckets, nbytes = step_and_bytes(way, quiet, loud)
            learns = way in ("fast", "shared")
            learned = sum(
                sent.pop(op, 0) for op in ("broadcast", "all_gather", "barrier") if learns
            )
            check.same(learned > 0, learns and bool(loud), way, "learned")
            share = nbytes // world_size
            if not loud or "shared" in way:
                expected = {}
            elif way in cases.WRAPPERS:
                messages = {"naive": trained, "overlap": trained, "flat": 1}
                check.same(counts["all_reduce"], messages.get(way, len(buckets)), way, "messages")
                expected = {"all_reduce": nbytes}
            elif way in ("zero", "fast zero, one bucket"):
                expected = {"reduce_scatter": nbytes, "all_gather": share}
            else:
                expected = {"send": 2 * (world_size - 1) * share}
            check.same(sent, expected, way, quiet, loud)
            few = way in ("naive", "flat", "overlap") or way.endswith("one bucket")
            check.unless(few or 1 < len(buckets) < trained, way, len(buckets), "buckets")


# Overlap, by the order of events

BUCKETED = BucketedDDP, fast.BucketedDDP
SIX = 6 * [1024]  # bytes of the gradients of each layer below
SENT_EARLY = {
    NaiveDDP: [0, 0, 0, 0, 0, 0, 6],
    FlatDDP: [0, 0, 0, 0, 0, 0, 1],
    OverlapDDP: [0, 1, 2, 3, 4, 5, 6],
    BucketedDDP: [0, 0, 0, 0, 0, 0, 1],
}
for cap_layers, early in {
    2: [0, 0, 1, 1, 2, 2, 3],
    4: [0, 0, 0, 0, 1, 1, 2],
    0.1: [0, 1, 2, 3, 4, 5, 6],
}.items():
    for wrapper in BUCKETED:
        SENT_EARLY[partial(wrapper, bucket_cap_mb=cap_layers * SIX[0] / 2**20)] = early
    for name in ("zero", "zero, ring", "fast zero"):
        cls, _, how = cases.ZEROS[name]
        cap_mb = cap_layers * SIX[0] / 2**20
        SENT_EARLY[partial(cls, bucket_cap_mb=cap_mb, transport=how(), lr=0.1)] = early


def sent_before_each(make) -> tuple[list[int], list]:
    """How many messages left before the first gradient was ready, the second, ..., and in all."""
    torch.manual_seed(0)
    module, times = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in SIX]), []
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: times.append(time.perf_counter()))
    zero = "lr" in getattr(make, "keywords", {})
    model = make(module.parameters(), torch.optim.SGD) if zero else make(module)
    for _ in range(2):
        times.clear()
        before = len(cases.said())
        (module if zero else model)(torch.ones(1, 16)).sum().backward()
        model.synchronize()
        records = [
            r for r in cases.said()[before:] if r.op in ("all_reduce", "send", "reduce_scatter")
        ]
        model.zero_grad()
    moments = [*times, float("inf")]
    return [sum(r.issued < moment for r in records) for moment in moments], records


@on_ranks(2, backend="gloo")
def test_messages_leave_while_backward_goes_on(check):
    for make, early in SENT_EARLY.items():
        check.same(sent_before_each(make)[0], early, make)


@on_ranks(2, link=Link(latency_s=0.02, bytes_per_s=1e9))
def test_nothing_waits_before_synchronize(check):
    """On a slow link all messages are out before the first has arrived."""
    for make in (OverlapDDP, *(partial(cls, bucket_cap_mb=1e-9) for cls in BUCKETED)):
        sent, records = sent_before_each(make)
        check.same(sent, SENT_EARLY[OverlapDDP], make)
        first = min(record.waited for record in records)
        check.unless(first > max(record.issued for record in records), make, "waited early")


# Mistakes, and where there is nothing to do


@on_ranks(2)
def test_gradients_that_are_missing_or_come_twice_are_named(check, rank):
    x = cases.routes_batch(rank=rank)[0]
    for way in cases.WAYS[1:]:  # the naive one counts what is missing as zeros
        module, model, _, sender = cases.prepare(way, cases.Routes())
        model(x, "ac").backward()
        says = "(6,), (6, 6)" if way in cases.ZEROS else "b.weight, b.bias"
        says = f"rank {rank} has no gradient for", says, "Freeze"
        check.refused(sender.synchronize, says=says)
        check.unless(module.b.weight.grad is None, way, "made a gradient")
        for quietly in (False, True) if way in (*cases.IN_BACKWARD, *cases.ZEROS) else ():
            _, model, _, sender = cases.prepare(way, cases.Routes())
            model(x).backward()
            loss = model(x)
            with sender.no_sync() if quietly else contextlib.nullcontext():
                says = "backward ran twice", "no_sync"
                check.refused(loss.backward, says=says, error=RuntimeError)


@on_ranks(2)
def test_no_sync_ends_however_it_ends(check, rank):
    x = cases.routes_batch(rank=rank)[0]
    for way in cases.WAYS:
        module, model, optimizer, sender = cases.prepare(way, cases.Routes(seed=rank))
        with contextlib.suppress(KeyError), sender.no_sync(), sender.no_sync():
            raise KeyError
        with sender.no_sync():
            with contextlib.suppress(KeyError), sender.no_sync():
                raise KeyError
            own = cases.gradients_of(module, module(x))
            model(x).backward()
            if way in cases.WRAPPERS:
                sender.synchronize()  # does nothing
            for name, parameter in cases.trained_of(module).items():
                check.close(parameter.grad, own[name], 1e-12, way, "inside")
        optimizer.zero_grad()
        model(x).backward()
        sender.synchronize()
        if way in cases.WRAPPERS:
            sender.synchronize()  # once more makes no difference
        optimizer.step()
        for parameter in module.parameters():
            check.same_on_all(parameter, way)


@on_ranks(2)
def test_nothing_to_train_and_no_bucket_size(check):
    for way in cases.WAYS:
        _, model, optimizer, sender = cases.prepare(way, cases.Routes().requires_grad_(False))
        sender.synchronize()
        optimizer.step()
        check.same(model(torch.ones(1, 6).double(), "a").requires_grad, False, way)
    for cap in (0, -1, float("nan")):
        says = "expected bucket_cap_mb > 0", str(cap), "in MiB"
        for wrap in BUCKETED:
            check.refused(wrap, cases.Routes(), cap, says=says)
        for cls in {cls for cls, _, _ in cases.ZEROS.values()}:
            check.refused(cls, cases.Routes().parameters(), torch.optim.SGD, cap, says=says)


def skip_synchronize(way):
    """In the second step, one rank."""
    _, model, optimizer, sender = cases.prepare(way, cases.Routes())
    for step in range(3):
        model(cases.routes_batch(step)[0]).backward()
        if (dist.get_rank(), step) != (1, 1):
            sender.synchronize()
            optimizer.step()
        if way in cases.WRAPPERS:
            optimizer.zero_grad()


def test_a_rank_that_skips_synchronize_is_reported():
    """The others miss it, or its next backward meets gradients that are being sent."""
    with pytest.raises(HangError, match="synchronize"):
        launch(skip_synchronize, "naive", world_size=2)
    for way in ("overlap", "buckets", "fast", "zero", "fast zero"):
        with pytest.raises(RankError, match="rank 1 raised RuntimeError: backward ran twice"):
            launch(skip_synchronize, way, world_size=2)
