"""Checkers of notebook 04: FlatDDP, OverlapDDP, plan_buckets, Bucket, BucketedDDP, one_wire, and
no_sync.

Order, never time, proves that gradients are sent while backward goes on: whenever backward comes to
a layer, the check notes the number of all_reduces that its rank has begun. Gradients are those of
`data_parallel`'s Stack, whose means show which ranks are in them.
"""

import operator
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from ddpkit import cost, ddp
from ddpkit.runtime.board import Record
from ddpkit.runtime.wire import recorder

from .checker import Exercise, Mistake, Trial, mistakes, rank_1_comes_last
from .data_parallel import (
    LAYERS,
    WEIGHT,
    Stack,
    all_reduces,
    ideal,
    left_in,
    read_mean,
    tally,
)

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these


# A step or two, and the observations of the last one

ZEROED, KEPT = "zero_grad()", "no zero_grad()"
BEGUN = "all_reduces begun when backward came to each layer, and when it was over,"
# By the cap of a bucket: how many have begun when backward comes to head, norm, second, first's
# bias, first's weight and tokens, and when it is over; and the bytes of each
ONE_EACH = [0, 0, 1, 2, 3, 4, 5], [16, 12, 12, 12, 16]
AFTER_BACKWARD = [0, 0, 0, 0, 0, 0, 0], [60]
WIRE = {None: ONE_EACH, 12: ONE_EACH, 16: ([0, 0, 1, 1, 2, 2, 3], [16, 24, 28]), 0: AFTER_BACKWARD}
# The same on two ranks whose layers come in another order. Buckets of 12 bytes are alike: to add up
# what doesn't belong together is no error
BEFORE, AFTER = ("tokens.weight", "first.bias"), ("norm.weight", "head.weight")
CROSSED = [
    ((*BEFORE, "first.weight", "second.weight", *AFTER), [0, 0, 1, 2, 2, 4, 5]),
    ((*BEFORE, "second.weight", "first.weight", *AFTER), [0, 0, 1, 1, 2, 4, 5]),
]


def _train(answer, cap_bytes, between, by_rank):
    """Train a Stack on this rank; return its observations, of which the first wrong one is named.

    cap_bytes: of a bucket; None: a message for each gradient; 0: one for all. between: "": 1 step;
    ZEROED or KEPT: 2. by_rank: for each rank, the layers of the last step, and BEGUN's counts.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    stack = Stack(norm=torch.float32 if cap_bytes == 0 else torch.float64)
    model = answer(stack, cap_bytes / 2**20) if cap_bytes else answer(stack)
    layers, in_time = by_rank[rank]
    for times in (1, 3) if between else (1,):  # so that old gradients differ from new ones
        earlier, begun = all_reduces(), []
        waits = sum(record.waits for record in earlier)
        kept = [p.grad for p in stack.parameters()]  # noqa: F841 (nothing new takes their place)
        if between == ZEROED:
            stack.zero_grad()

        def at_layer(_):
            begun.append(len(all_reduces()) - len(earlier))  # noqa: B023

        rank_1_comes_last()
        through = LAYERS if between and times == 1 else layers
        model(times * world_size * 10**rank, through, at_layer).backward()
        at_layer(None)
        sent = all_reduces()[len(earlier) :]
        waited = sum(record.waited is not None for record in sent)
        # Until rank 0 waits, rank 1 sends nothing: only rank 0 can have changed its gradients
        alone = (rank, world_size, waited) == (0, 2, 0)
        changed = _gradients(stack, sent)[1] if alone else []
        model.synchronize()
    seen = {BEGUN: begun, "changed": changed}
    if changed or any(map(operator.gt, begun, in_time)):
        return seen  # the rest is a matter of luck
    seen |= left_in(stack)
    seen["waits before backward was over"] = waited
    seen["waits in step 2 for handles of step 1"] = sum(r.waits for r in earlier) - waits
    if through == layers == LAYERS or not between:
        seen["bytes of each all_reduce"] = [r.bytes for r in all_reduces()[len(earlier) :]]
    if cap_bytes == 0 and not all_reduces():
        seen["bytes of each all_reduce"] = _of_a_ring(2 if between else 1)
    if cap_bytes:
        seen["gradients that aren't views of a bucket"] = _gradients(stack, sent)[0]
        new = _memory(sent).keys() - _memory(earlier) if between else ()
        seen["buckets made anew in step 2"] = len(new)
    return seen


def _of_a_ring(steps: int) -> list[int]:
    """Return [60], all gradients' bytes, if a ring may have sent them; otherwise each send's."""
    sends = [record.bytes for record in recorder().records if record.op == "send"]
    world_size, (nbytes,) = dist.get_world_size(), AFTER_BACKWARD[1]
    hops = 2 * (world_size - 1)
    most = steps * hops * (nbytes // world_size + 4)
    sent = sum(sends[-steps * hops :]) if hops else 0
    ring = len(sends) >= steps * hops and sent <= most and not any(all_reduces())
    return [nbytes] if ring else sends


def _memory(sent: list[Record]) -> dict[int, list]:
    """Return {number of a sent tensor's storage: its elements}; until wait(), as they were sent."""
    return {record.memory[0]: record.memory[2] for record in sent if record.memory}


def _gradients(stack: Stack, sent: list[Record]) -> tuple[list[str], list[str]]:
    """List the gradients ("norm.weight.grad") in no buffer sent, and those changed since in one."""
    apart, changed, memory = [], [], _memory(sent)
    for name, parameter in stack.named_parameters():
        if parameter.grad is not None:
            numbers = parameter.grad.flatten().tolist()
            buffer, start = recorder().home(parameter.grad) or (None, 0)
            if buffer not in memory:
                apart.append(f"{name}.grad")
            elif memory[buffer][start : start + len(numbers)] != numbers:
                changed.append(f"{name}.grad")
    return apart, changed


def _left_out() -> Trial:
    """Make a trial of OverlapDDP whose second step omits first.bias: .grad stays step 1's mean."""
    layers, begun = [layer for layer in LAYERS if layer != "first.bias"], [0, 0, 1, 2, 3, 4]
    trial = _trial(2, None, KEPT)
    for right in trial.expected:
        right |= {BEGUN: begun, "first.bias.grad": ideal(tally(2))["first.bias.grad"]}
        del right["bytes of each all_reduce"]  # its mean may be averaged once more
    args = None, KEPT, [(layers, begun)] * 2
    return replace(trial, args=args, what=f"{trial.what}, and a layer left out in the second")


def _trial(world_size: int, cap_bytes: int | None, between: str = "", crossed=False) -> Trial:
    what = f"2 steps, {between} between them" if between else "1 step"
    begun, nbytes = WIRE[cap_bytes]
    by_rank = [(LAYERS, begun)] * world_size
    if crossed:
        by_rank, what = CROSSED, "gradients come in another order on rank 1 than on rank 0"
    seen = ideal(tally(world_size) * {"": 1, ZEROED: 3, KEPT: 1 + 3}[between])
    seen |= {"waits before backward was over": 0, "waits in step 2 for handles of step 1": 0}
    seen["bytes of each all_reduce"] = nbytes
    if cap_bytes:
        seen |= {"gradients that aren't views of a bucket": [], "buckets made anew in step 2": 0}
    expected = [{BEGUN: begun, "changed": [], **seen} for _, begun in by_rank]
    return Trial(world_size, _train, (cap_bytes, between, by_rank), expected, what=what)


def _trials(cap_bytes: int | None) -> Iterator[Trial]:
    for between in ("", ZEROED) if cap_bytes == 0 else ("", ZEROED, KEPT):
        yield _trial(2, cap_bytes, between)
    if cap_bytes:
        yield _trial(2, 12, crossed=True)
    if cap_bytes is None:
        yield _left_out()
    yield _trial(4, cap_bytes)
    yield _trial(1, cap_bytes)


CHANGED = (
    "An all_reduce works in this memory until wait() has returned, and what comes out is a matter "
    "of luck: change it before you send it, or after wait()."
)
IN_BOTH = {
    "praise": "right on 1, 2 and 4 ranks. All all_reduces but the last were on their way before "
    "backward came to the last layer, and none was waited for until it was over.",
    "explain": read_mean,
    "says": {"changed": "on rank {rank}, {got} changed after it was sent.\n" + CHANGED},
    "note": "It also names a second backward without synchronize, and serves no_sync and groups.",
    "given": ("__init__", "forward"),
}
WITH_HOOKS = mistakes("""
after_backward: parameter.register_post_accumulate_grad_hook(self.ready) → pass
    Nothing was sent before backward was over. The hook runs while it is going on: begin there.
waits_in_the_hook: async_op=True) → async_op=True)⏎work.wait()
    The hook waits, so nothing overlaps: keep the handle, and wait() for it in synchronize().
uses_the_result: async_op=True → async_op=False
    all_reduce works in place and returns None, or with async_op=True a handle.
""")


# FlatDDP(module)

FlatDDP = Exercise(
    reference=ddp.FlatDDP,
    trials=partial(_trials, 0),
    hints={
        "start": "torch.cat([g.flatten() for g in gradients]) is one tensor; flat.split(sizes) "
        "gives its parts as views.",
        "values": "After the all_reduce: divide, and gradient.copy_(part.view_as(gradient)).",
        "wire": "One all_reduce, outside all loops.",
    },
    praise="right on 1, 2 and 4 ranks, in one message.",
    explain=read_mean,
    says=IN_BOTH["says"],
    note="A message for each dtype, as one tensor has one; it serves no_sync and groups.",
    given=("__init__", "forward"),
    mistakes=mistakes("""
one_each: for gradient in gradients if gradient.dtype == dtype] →
    ⏎for gradient in gradients[:1]]
    The mean is right, in a message for each gradient. torch.cat makes one tensor of all.
names_another: gradient.copy_(part.view_as(gradient)) → gradient = part.view_as(gradient)
    The mean isn't in .grad: copy each part back, gradient.copy_(part.view_as(gradient)).
    (`gradient = …` only names another tensor.)
keeps_the_first: flat = torch.cat( → self.flat = flat = getattr(self, "flat", None)
    ⏎if flat is None: flat = self.flat = torch.cat(
    What was sent in step 2 isn't what .grad was: copy the gradients in, in each step.
one_part: flat.split(sizes), → [flat[:size] for size in sizes],
    All got the first numbers: cut the flat tensor into parts that follow each other, flat.split(…).
another_order: for gradient in alike]) → for gradient in alike[::-1]])
    It is another gradient's mean: cut in the order in which you put together.
in_a_set: in self.trained.values()] → in set(self.trained.values())]
    A set has no order, or another one on each rank: what doesn't belong together was added up. Go
    through self.trained, which is in one order on all ranks.
of_parameters: [parameter.grad for → [parameter.data for
    What all_reduce was given are the parameters. Average the gradients: parameter.grad.
"""),
)


# OverlapDDP(module)

OverlapDDP = Exercise(
    reference=ddp.OverlapDDP,
    trials=partial(_trials, None),
    hints={
        "start": "dist.all_reduce(tensor, async_op=True) returns at once. Who keeps its handle?",
        "values": "ready: divide parameter.grad by the number of ranks, begin its all_reduce, keep "
        "the handle in self.works.",
        "wire": "synchronize: wait() for every handle in self.works, then clear it.",
    },
    **IN_BOTH,
    mistakes=WITH_HOOKS
    + mistakes("""
all_at_the_last: if self.syncing: → if parameter is self.module.tokens.weight or len(self.works):
    All wait for the last gradient. Send each as soon as it is complete.
waits_for_others: if self.syncing: → if self.syncing and all(w.wait() for w in self.works.values()):
    The hook waits for the all_reduces before it: that is for synchronize() to do.
parameters: dist.all_reduce(parameter.grad → dist.all_reduce(parameter.data
    What all_reduce was given is the parameter itself. Average the gradients: parameter.grad.
of_a_copy: dist.all_reduce(parameter.grad → dist.all_reduce(parameter.grad.clone()
    Each rank still has its own gradients: the mean must end up in .grad itself, in place.
keeps_the_handles: self.works.clear() → pass
    A layer that is left out in a step still has the handle of the step before: once all are waited
    for, self.works.clear().
"""),
)


# plan_buckets(sizes, cap_bytes)


def _run_plan(answer, sizes, cap_bytes):
    plan = answer(sizes, cap_bytes)
    try:
        return [list(bucket) for bucket in plan]  # tuples and generators are accepted
    except TypeError:
        return plan


HALF = 2.0  # bytes, of a float16


def _plan_trials():
    for nbytes, cap_bytes, plan in (
        ([4, 4, 4, 4], 8, [[0, 1], [2, 3]]),
        ([4, 4, 4, 4, 4], 8, [[0, 1], [2, 3], [4]]),
        ([4, 4, 4, 4, 4], 10, [[0, 1, 2], [3, 4]]),
        ([4, 40, 4, 8, 12, 4], 10, [[0, 1], [2, 3], [4], [5]]),
        ([4, 4, 4, 4, 4], 1, [[0], [1], [2], [3], [4]]),
        ([2, 4, 2, 4, 4, 2], 8, [[1, 3], [4], [0, 2, 5]]),
        ([2, HALF, 2, HALF, 4], 4, [[0, 2], [1, 3], [4]]),
        ([2, 4, 4, 4, 4], 8, [[0], [1, 2], [3, 4]]),
        ([], 8, []),
    ):
        sizes = []
        for size in nbytes:
            half = torch.float16 if isinstance(size, float) else torch.bfloat16
            sizes.append((round(size), half if size == 2 else torch.float32))
        what = f"gradients of {nbytes} bytes (2: bfloat16, 2.0: float16), cap {cap_bytes}"
        yield Trial(1, _run_plan, (sizes, cap_bytes), [plan], what=what)


plan_buckets = Exercise(
    reference=ddp.plan_buckets,
    trials=_plan_trials,
    hints={
        "start": "With one dtype: fill the open bucket; once it has cap_bytes, open a new one.",
        "values": "An open bucket for each dtype: a dict {dtype: [numbers]}. What is still in it "
        "in the end is a bucket, too. Then sorted(buckets, key=lambda bucket: bucket[-1]).",
    },
    praise="right for what divides and what doesn't, for giants, and for two dtypes.",
    explain=lambda *_: (
        "Each gradient goes into the open bucket of its dtype, in the order in which "
        "they become ready; a bucket is closed once it has reached its cap, by however much."
    ),
    mistakes=mistakes("""
loses_the_rest: full + list(filling.values()) → full
    Gradient 4 is in no bucket. What isn't full in the end is one, too.
stays_below: >= cap_bytes → + sizes[min(number + 1, len(sizes) - 1)][0] > cap_bytes
    It was closed below the cap. A bucket is closed once it has reached its cap, by however much.
goes_over: >= cap_bytes → > cap_bytes
    A bucket that has reached its cap is closed: here another gradient came into it.
counts_gradients: sum(sizes[member][0] for member in bucket) → len(bucket) * sizes[bucket[0]][0]
    Gradients of one dtype have different sizes: add up their bytes.
mixes_dtypes: for number, (_, dtype) in enumerate(sizes): → dtype = None
    ⏎for number, _ in enumerate(sizes):
    A bucket has two dtypes, and a tensor has one: keep an open bucket for each dtype.
closes_at_another_dtype: bucket = filling → full += [filling.pop(d) for d in {*filling} - {dtype}]
    ⏎bucket = filling
    A bucket was closed below the cap when another dtype came: both stay open side by side.
by_first: bucket[-1]) → bucket[0])
    Another order: a bucket can be sent when its last gradient is ready, so that one counts.
"""),
)


# Bucket(parameters)

SHAPES = (2, 3), (2,), (), (1, 3)


def _fill(answer):
    parameters = [nn.Parameter(torch.full(s, WEIGHT, dtype=torch.float64)) for s in SHAPES]
    bucket = answer(parameters)
    seen = {"flat": (bucket.flat.dim(), bucket.flat.numel(), str(bucket.flat.dtype))}
    seen["shapes of the views"] = [tuple(bucket.views[p].shape) for p in parameters]
    for number, parameter in enumerate(parameters, 1):
        bucket.views[parameter].fill_(number)
    seen["flat, when view k is full of k,"] = bucket.flat.tolist()
    for step in ("step 1", "step 2, after zero_grad()", "step 3, after zero_grad(False)"):
        for number, parameter in enumerate(parameters, 1):
            if "3" in step:
                parameter.grad.fill_(5 * number)  # backward adds to the zeros that it finds
            else:
                parameter.grad = torch.full_like(parameter, 5 * number)
            bucket.take(parameter)
        seen[f"{step}: flat, when gradient k is full of 5k,"] = bucket.flat.tolist()
        bucket.flat += 1
        grads = torch.cat([parameter.grad.flatten() for parameter in parameters])
        seen[f"{step}: each .grad, when the wire has added 1 to flat,"] = grads.tolist()
    return seen


def _bucket_trials():
    def full(*numbers):
        return [n for n, many in zip(numbers, (6, 2, 1, 3), strict=True) for _ in range(many)]

    expected = {"flat": (1, 12, "torch.float64"), "shapes of the views": [*SHAPES]}
    expected["flat, when view k is full of k,"] = full(1, 2, 3, 4)
    for step in ("step 1", "step 2, after zero_grad()", "step 3, after zero_grad(False)"):
        expected[f"{step}: flat, when gradient k is full of 5k,"] = full(5, 10, 15, 20)
        added = f"{step}: each .grad, when the wire has added 1 to flat,"
        expected[added] = full(6, 11, 16, 21)
    yield Trial(1, _fill, (), [expected], what="4 parameters, 3 steps")


Bucket = Exercise(
    reference=ddp.Bucket,
    trials=_bucket_trials,
    given=(),
    hints={
        "start": "One torch.zeros for all numbers, of the parameters' dtype; flat.split(sizes) "
        "gives views, and part.view_as(parameter) their shape.",
        "values": "take: view.copy_(parameter.grad) unless it is the view; parameter.grad = view.",
    },
    praise="what the wire writes into flat is in every .grad, in 3 steps; nothing is copied back.",
    note="`full` is for BucketedDDP, and so is `arrived`.",
    mistakes=mistakes("""
views_are_copies: part.view_as(parameter) for → part.view_as(parameter).clone() for
    A copy isn't a view: split, slices and view_as share flat's memory; clone and cat don't.
one_part: self.flat.split(sizes) → [self.flat[:size] for size in sizes]
    Two gradients are in one place: cut flat into parts that follow each other, flat.split(...).
replaces_first: view.copy_(parameter.grad)⏎parameter.grad = view → parameter.grad = view
    ⏎view.copy_(parameter.grad)
    The gradient is lost. Did you replace it before you had copied it into its view?
no_way_back: parameter.grad = view → pass
    .grad is still what backward made, and the mean would have to be copied back: .grad = view.
adds_up: view.copy_(parameter.grad) → view.add_(parameter.grad)
    What was in the view is still in it: zero_grad() left it as it was. Copy, don't add.
"""),
)


# BucketedDDP(module, bucket_cap_mb)


class ByArrival(ddp.BucketedDDP):
    def ready(self, parameter):
        bucket = self.bucket_of[parameter]
        bucket.take(parameter)
        bucket.arrived.add(parameter)
        if bucket.full:
            self.works.append(dist.all_reduce(bucket.flat, async_op=True))


BY_ARRIVAL = (
    "Ranks sent buckets in different orders, and what doesn't belong together was added up. Bucket "
    "k of the plan is sent after the buckets before it, even if it is full sooner."
)
BucketedDDP = Exercise(
    reference=ddp.BucketedDDP,
    helpers=(ddp.Bucket,),
    trials=partial(_trials, 16),
    hints={
        "start": "ready: the bucket takes the gradient, and notes it in `arrived`. synchronize: "
        "wait, divide each flat, clear what was noted.",
        "wire": "ready, then: while bucket len(self.works) is full, send it.",
    },
    **IN_BOTH,
    mistakes=[
        Mistake("by_arrival", BY_ARRIVAL, answer=ByArrival),
        *WITH_HOOKS,
        *mistakes("""
looks_past_the_last: while len(self.works) < len(self.buckets) and → while
    After the last bucket there is none: look only while len(self.works) < len(self.buckets).
counts_all: self.buckets[len(self.works)].full: → sum(len(b.arrived) for b in self.buckets) > len(
    ⏎self.works):
    A bucket left too early. How many of its own gradients have come counts, not how many of all.
finds_by_numbers: bucket = self.bucket_of[parameter] → bucket = next(
    ⏎b for b in self.buckets if parameter in list(b.views))
    `in`, index and == on lists of tensors compare numbers: use a set, a dict, or `is`.
never_takes: bucket.take(parameter) → pass
    .grad is still the rank's own: after bucket.take(parameter) it is the bucket's view.
keeps_the_handles: self.works.clear() → pass
    In step 2 it sent nothing: does it still hold the handles of the step before?
"""),
    ],
)


# one_wire(ready_s, travel_s)

WIRES = [  # times at which buckets are full, the time each takes, its start and end
    ([1, 2, 3], [4, 1, 1], [(1, 5), (5, 6), (6, 7)]),
    ([1, 10, 11], [2, 2, 2], [(1, 3), (10, 12), (12, 14)]),
    ([5, 5, 5], [1, 2, 3], [(5, 6), (6, 8), (8, 11)]),
    ([4, 2, 6], [3, 2, 1], [(4, 7), (7, 9), (9, 10)]),
    ([0.25, 0.5], [0.5, 0.125], [(0.25, 0.75), (0.75, 0.875)]),
    ([], [], []),
]


def _send(answer, ready_s, travel_s):
    spans = answer(ready_s, travel_s)
    try:
        return [(float(start), float(done)) for start, done in spans]
    except (TypeError, ValueError):
        return spans


def _wire_trials():
    for ready_s, travel_s, spans in WIRES:
        what = f"full at {ready_s} s, on the wire for {travel_s} s"
        yield Trial(1, _send, (ready_s, travel_s), [spans], what=what)


one_wire = Exercise(
    reference=cost.one_wire,
    trials=_wire_trials,
    hints={
        "start": "Keep one number: when the wire is free again.",
        "values": "start = max(ready, free); then free = start + what it takes.",
    },
    praise="right where the wire is the slower one, and where it waits for backward.",
    explain=lambda *_: "A message starts when its bucket is full and the one before it is done.",
    mistakes=mistakes("""
all_at_once: max(ready, free) → ready
    Two messages are on the wire at once. It carries one: the next waits until it is free.
never_idle: max(ready, free) → free if spans else ready
    A message starts before its bucket is full: the wire waits for backward, too.
after_backward: max(ready, free) → max(*ready_s, 0, free)
    The first waits for the last: that is FlatDDP. Each starts as soon as its own bucket is full.
in_lock_step: free = start + seconds⏎spans.append((start, free)) → free = start + max(travel_s)
    ⏎spans.append((start, start + seconds))
    The wire is free as soon as a message is done, however long the others take.
first_come: zip(ready_s, travel_s, strict=True) → sorted(zip(ready_s, travel_s, strict=True))
    Buckets are sent in their order, the same on all ranks, even if a later one is full sooner.
how_long: spans.append((start, free)) → spans.append((start, seconds))
    The second number is when it is done, not how long it takes.
"""),
)


# no_sync(model)

NESTED, INTERRUPTED = "one inside another", "an exception inside"


class _Stopped(BaseException):
    """The exception of a reader who presses stop: like KeyboardInterrupt, it is no `Exception`."""


def _run_no_sync(answer, case):
    model, came_out = ddp.OverlapDDP(nn.Linear(1, 1, bias=False)), False
    x = torch.full((1,), float(dist.get_world_size() * 10 ** dist.get_rank()))
    try:
        with answer(model):
            model(x).backward()
            if case == NESTED:
                with answer(model):
                    model(x).backward()
                model(x).backward()
            inside = len(all_reduces())
            if case == INTERRUPTED:
                raise _Stopped
    except _Stopped:
        came_out = True
    if not inside:
        model(x).backward()
    model.synchronize()
    return {
        "all_reduces inside no_sync": inside,
        "the exception came out": came_out,
        "all_reduces in all": len(all_reduces()),
        "gradient": left_in(model)["module.weight.grad"],
    }


def _no_sync_trials():
    for case, mean in (("2 micro-batches", 22), (NESTED, 44), (INTERRUPTED, 22)):
        expected = {"all_reduces inside no_sync": 0, "the exception came out": case == INTERRUPTED}
        expected |= {"all_reduces in all": 1, "gradient": mean}
        yield Trial(2, _run_no_sync, (case,), [expected] * 2, what=case)


ONCE = "A context manager needs @contextlib.contextmanager, and one yield on every way through it."

no_sync = Exercise(
    reference=ddp.DataParallel.no_sync,
    writes=None,
    trials=_no_sync_trials,
    hints={
        "start": "@contextlib.contextmanager: before `yield` is the way in, after it the way out.",
        "values": "try: yield, finally: ... puts back what model.syncing was, whatever happens.",
        "error": ONCE,
    },
    praise="off inside, on again afterwards, also after an exception; what added up was sent once.",
    note="A method of each wrapper: self is the model.",
    mistakes=mistakes(f"""
does_nothing: self.syncing, False → self.syncing, True
    Set model.syncing to False before `yield`.
without_finally: finally: → except ZeroDivisionError: pass⏎else:
    After no_sync nothing is sent any more. An exception passed: only `finally` is done then, too.
always_on_again: self.syncing = before → self.syncing = True
    The inner one switched the outer one off, too: put back what `syncing` was before.
for_ever: self.syncing = before → pass
    After no_sync nothing is sent any more: put back what `syncing` was before.
swallows: finally: → except BaseException: pass⏎finally:
    The exception ended in no_sync: `finally`, no `except`.
undecorated: @contextlib.contextmanager →
    {ONCE}
synchronizes: self.syncing = before → self.syncing = before⏎self.synchronize()
    no_sync itself calls synchronize(). Leave that to who trains.
"""),
)
