"""Checkers of notebook 04: OverlapDDP, plan_buckets, BucketedDDP, and no_sync.

That something is sent while backward goes on is proven by order, never by time: whenever backward
comes to a layer, the check notes how many all_reduces its rank has begun. Gradients read like a
tally, as in notebook 03.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from ddpkit import ddp
from ddpkit.runtime.board import Record
from ddpkit.runtime.launch import Run
from ddpkit.runtime.wire import recorder

from .checker import Exercise, Trial, mistakes, rank_1_comes_last
from .data_parallel import Gradients, brief, numbers, wrong_mean, wrong_ones

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these


# The module that is trained, and what one process would find in its gradients

LAYERS = ("tokens.weight", "first.weight", "second.weight", "third.weight", "norm.weight")
FACTORS = dict(zip((*LAYERS, "head.weight"), (1, 3, 5, 13, 11, 6), strict=True))
# Multiples that gradients are of, as backward completes them: none is 2, 3 or 4 times another
GRADIENTS = {name: FACTORS[name] for name in reversed(LAYERS)} | {"tokens.weight": 1 + 6}
WEIGHT = 2.5  # of all parameters; no gradient is that
TIMES = (1, 3)  # what the second step has of the first: old gradients are told from new ones


class Stack(nn.Module):
    """Layers one after the other, to which backward comes from the last to the first.

    tokens.weight is head.weight, too: its gradient is complete only when backward has been through
    both. norm is float64. positions isn't trained, and used by nobody.
    """

    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.empty(2), requires_grad=False)
        self.tokens = nn.Embedding(2, 2)
        self.first, self.second, self.third = (nn.Linear(3, 1, bias=False) for _ in range(3))
        self.norm = nn.LayerNorm(2, bias=False, dtype=torch.float64)
        self.head = nn.Linear(2, 2, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            nn.init.constant_(parameter, WEIGHT)

    def forward(self, scale: int, layers: tuple[str, ...], at_layer: Callable) -> torch.Tensor:
        """Its gradients are `scale` times GRADIENTS; backward calls `at_layer` before each."""
        x = torch.zeros(())
        for name in layers:
            x = x + scale * FACTORS[name] * self.get_parameter(name).sum()
            x.register_hook(lambda _: at_layer())
        return x


def _stack(scale: int) -> Gradients:
    """A Stack that was left alone, but for gradients of `scale` times GRADIENTS."""
    gradients, parameters = {}, {}
    for name, parameter in Stack().named_parameters():
        parameters[name] = [WEIGHT] * parameter.numel()
        gradients[name] = None
        if parameter.requires_grad:
            gradients[name] = [scale * GRADIENTS[name]] * parameter.numel()
    return Gradients(gradients, parameters)


# What a trial does, and sees


@dataclass
class Step:
    """One step of one rank, in all_reduces of this step.

    begun: when backward came to each layer, and when it was over. waited: waited for, when backward
    was over. again: handles of earlier steps that were waited for once more. changed: by name,
    gradients that aren't then what they were when they were sent, as (sent, then); noted only where
    no other rank's numbers can have come. homes: which buffer on the wire has each gradient.
    """

    begun: list[int]
    waited: int
    again: int
    changed: dict[str, tuple[list, list]]
    homes: dict[str, int | None]


@dataclass
class Trained:
    """The gradients that the last step left; and all steps, to say why."""

    gradients: Gradients
    steps: list[Step] = field(default_factory=list, compare=False)

    def __repr__(self):
        return repr(self.gradients)

    def symptom(self):
        return self.gradients.symptom()


def _layers(crossed: bool, rank: int) -> tuple[str, ...]:
    """In the order of forward. crossed: first and third come together, in an order by rank."""
    layers = LAYERS
    if crossed:
        middle = ("first.weight", "third.weight")
        middle = middle if rank == 0 else middle[::-1]
        layers = ("tokens.weight", "second.weight", *middle, "norm.weight")
    return (*layers, "head.weight")


def _all_reduces() -> list[Record]:
    return [record for record in recorder().records if record.op == "all_reduce"]


def _changed(stack: Stack, sent: list[Record]) -> dict[str, tuple[list, list]]:
    """Gradients that lie in what was sent and have changed since: what went out, what is there."""
    changed = {}
    for name, parameter in stack.named_parameters():
        home = None if parameter.grad is None else recorder().home(parameter.grad)
        for record in sent if home else ():
            buffer, start, memory = record.memory or (None, 0, [])
            if buffer == home[0] and 0 <= home[1] - start < len(record.values):
                went_out = memory[home[1] : home[1] + parameter.numel()]
                if went_out != numbers(parameter.grad):
                    changed[name] = went_out, numbers(parameter.grad)
    return changed


def _step(stack: Stack, model: nn.Module, scale: int, layers: tuple[str, ...]) -> Step:
    earlier, begun = _all_reduces(), []
    waits = sum(record.waits for record in earlier)
    rank_1_comes_last()
    model(scale, layers, lambda: begun.append(len(_all_reduces()) - len(earlier))).backward()
    here = _all_reduces()[len(earlier) :]
    waited = sum(record.waited is not None for record in here)
    # rank 1 sends nothing until rank 0 waits
    alone = dist.get_world_size() == 2 and dist.get_rank() == 0 and not waited
    changed = _changed(stack, here) if alone else {}
    model.synchronize()
    homes = {}
    for name, parameter in stack.named_parameters():
        if parameter.grad is not None:
            homes[name] = (recorder().home(parameter.grad) or (None,))[0]
    again = sum(record.waits for record in earlier) - waits
    return Step([*begun, len(here)], waited, again, changed, homes)


NONE, ZEROS, KEPT = "zero_grad(set_to_none=True)", "zero_grad(set_to_none=False)", "no zero_grad"


def _train(answer, cap_bytes, between, crossed=False) -> Trained:
    """One step; or two, and `between` them one of NONE, ZEROS, KEPT."""
    stack, rank, world_size = Stack(), dist.get_rank(), dist.get_world_size()
    model = answer(stack) if cap_bytes is None else answer(stack, cap_bytes / 2**20)
    steps, keep = [], []
    for times in TIMES[: 1 if between is None else 2]:
        if between in (NONE, ZEROS):
            stack.zero_grad(set_to_none=between == NONE)
        scale = times * world_size * 10**rank
        steps.append(_step(stack, model, scale, _layers(crossed, rank)))
        keep += [p.grad for p in stack.parameters()]  # so that nothing new lies in its place
    return Trained(Gradients.of(stack), steps)


def _mean(world_size: int, between: str | None) -> int:
    """What gradients are multiples of in the end: 11 for one step on two ranks, 33, 44."""
    times = {None: TIMES[0], KEPT: sum(TIMES)}.get(between, TIMES[1])
    return times * sum(10**rank for rank in range(world_size))


def _own(rank: int, world_size: int, between: str | None) -> int:
    """The same for rank r, if nobody averages in the last step."""
    if between is None:
        return TIMES[0] * world_size * 10**rank
    earlier = _mean(world_size, None) if between == KEPT else 0
    return earlier + TIMES[1] * world_size * 10**rank


def _trial(world_size: int, cap_bytes: int | None, between: str | None, crossed=False) -> Trial:
    what = "1 step" if between is None else f"2 steps, {between} between them"
    if crossed:
        what = "gradients come in another order on rank 1 than on rank 0"
    expected = [Trained(_stack(_mean(world_size, between)))] * world_size
    return Trial(world_size, _train, (cap_bytes, between, crossed), expected, what=what)


# What can go wrong with both wrappers. plan: the names of the gradients in each bucket

BY_WAIT = (
    "this check sees what is waited for by wait() alone, not by the future of get_future(): keep "
    "the handle, and in synchronize() wait() for it."
)


def _luck(trial: Trial, run: Run) -> str | None:
    """A message that nobody waited for, that was sent again, or was changed on the way."""
    for rank, records in enumerate(run.wire):
        if any(record.by_future for record in records):
            return f"rank {rank} waited for a future, and {BY_WAIT}"
    for rank, (trained, records) in enumerate(zip(run, run.wire, strict=True)):
        sent = [record.memory[:2] for record in records if record.op == "all_reduce"]
        in_step = sent[: trained.steps[0].begun[-1]]
        for number, home in enumerate(dict.fromkeys(in_step)):
            if in_step.count(home) > 1:
                return (
                    f"in step 1, rank {rank} sent message {number} {in_step.count(home)} times, "
                    "while it was still on its way.\nHow many have left already tells where to "
                    "go on."
                )
    for rank, trained in enumerate(run):
        for step in trained.steps:
            for name, (went_out, changed) in step.changed.items():
                return (
                    f"on rank {rank}, {name}.grad went out as {brief(went_out)}, and was "
                    f"{brief(changed)} before anybody had waited for it.\nAn all_reduce works in "
                    "this memory until wait() has returned, and what comes out is a matter of "
                    "luck: change it before you send it, or after wait()."
                )
    return None


def sendable(plan: list[list[str]], layers: tuple[str, ...]) -> list[int]:
    """How many buckets can have left when backward comes to each layer, and when it is over."""
    counts = []
    for to_come in range(len(layers), -1, -1):
        incomplete = set(layers[:to_come])
        if "head.weight" in incomplete:
            incomplete.add("tokens.weight")
        full = [incomplete.isdisjoint(names) for names in plan]
        counts.append([*full, False].index(False))
    return counts


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _overlap(run: Run, plan: list[list[str]], what: str, crossed: bool) -> str | None:
    """What kept a gradient or bucket (`what`) of the plan from leaving as soon as it could."""
    for rank, trained in enumerate(run):
        layers = _layers(crossed, rank)
        places = [*(f"came to {name}" for name in reversed(layers)), "was over"]
        for number, step in enumerate(trained.steps, start=1):
            if step.begun[-1] == 0:
                return (
                    f"the values are right, but when backward was over, rank {rank} had begun no "
                    "all_reduce.\nBegin it in the hook, with dist.all_reduce(..., async_op=True): "
                    "the hook runs while backward still has other gradients to compute."
                )
            if step.waited:
                return (
                    f"the values are right, but rank {rank} waited for "
                    f"{_count(step.waited, 'all_reduce')} before backward was over.\nasync_op=True "
                    "returns a handle: keep it, and wait() for it in synchronize()."
                )
            if step.again:
                return (
                    f"the values are right, but in step {number}, rank {rank} waited again for "
                    f"{_count(step.again, 'handle')} of step {number - 1}: they pile up with every "
                    "step.\nForget them at the end of synchronize()."
                )
            for place, begun, could in zip(places, step.begun, sendable(plan, layers), strict=True):
                if begun < could:
                    return (
                        f"the values are right, but when backward {place}, rank {rank} had "
                        f"{_count(could, what)} complete and {begun} sent.\nSend each as soon as "
                        "it is complete and its turn has come."
                    )
    return None


def _volume(run: Run, plan: list[list[str]], what: str) -> str | None:
    """Whether each gradient or bucket of the plan left in one all_reduce a step, and only those."""
    needed = sum(p.nbytes for p in Stack().parameters() if p.requires_grad)
    for rank, (trained, records) in enumerate(zip(run, run.wire, strict=True)):
        steps = len(trained.steps)
        sent = [record.bytes for record in records if record.op == "all_reduce"]
        if sum(sent) != steps * needed:
            return (
                f"the values are right, but rank {rank} handed {sum(sent)} bytes to all_reduce "
                f"where its gradients have {steps * needed}.\nReplay it: which message holds what "
                "was sent already, or isn't a gradient?"
            )
        if len(sent) != steps * len(plan):
            return (
                f"the values and the bytes are right, but rank {rank} called all_reduce "
                f"{len(sent)} times for {_count(steps * len(plan), what)}: each leaves in one "
                "message."
            )
    return None


def _explain(trial: Trial, rank: int, expected: Trained, got: Trained) -> str:
    """The usual cause of a wrong gradient, whatever the wrapper."""
    _, between, crossed = trial.args
    if not got.gradients.messages:
        return "No all_reduce was called. Did a hook run? It must be on the module's parameters."
    if crossed:
        return OUT_OF_ORDER
    name = wrong_ones(expected.gradients, got.gradients)[0]
    value = got.gradients.gradients[name]
    if value == got.gradients.parameters[name]:
        return f"{name}.grad holds {name} itself. The hook is given the parameter, not its .grad."
    if between is not None and value is not None:
        first = _mean(trial.world_size, None)
        own = _stack(_own(rank, trial.world_size, between)).gradients[name]
        if value == own:
            return f"{name}.grad is rank {rank}'s own in the second step. {FORGOTTEN}"
        if value == _stack(_mean(trial.world_size, between) - first).gradients[name]:
            return (
                f"{name}.grad is the mean of what the last backward brought. What .grad held "
                "before is lost: micro-batches add up there, so all of .grad must be sent."
            )

    def others(other: int) -> Gradients:
        return _stack(_own(other, trial.world_size, between))

    return wrong_mean(trial, rank, expected.gradients, got.gradients, others)


FORGOTTEN = "Is everything that the first step noted forgotten when synchronize() is over?"
OUT_OF_ORDER = (
    "Ranks sent their buckets in different orders, and what doesn't belong together was added up. "
    "Bucket k of the plan is sent after the buckets before it, on every rank, even if it is full "
    "sooner."
)


def _praise(trial: Trial, run: Run) -> str:
    *_, early, every = run[0].steps[-1].begun
    return (
        f"right on 1, 2 and 4 ranks. {early} of {every} all_reduces were on their way before "
        "backward came to the last layer, and none was waited for until backward was over."
    )


# OverlapDDP(module)

ONE_EACH = [[name] for name in GRADIENTS]


def _overlap_trials():
    for world_size, between in ((2, None), (2, NONE), (2, ZEROS), (2, KEPT), (4, None), (1, None)):
        yield _trial(world_size, None, between)


OverlapDDP = Exercise(
    reference=ddp.OverlapDDP,
    trials=_overlap_trials,
    hints={
        "start": "dist.all_reduce(tensor, async_op=True) returns at once, with a handle. Where can "
        "the hook leave it?",
        "values": "ready: divide parameter.grad by the number of ranks, begin its all_reduce, keep "
        "the handle in self.works.",
        "wire": "synchronize: wait() for every handle in self.works, then clear it for the next "
        "step.",
    },
    praise=_praise,
    explain=_explain,
    wire=lambda trial, run: (
        _overlap(run, ONE_EACH, "gradient", False) or _volume(run, ONE_EACH, "gradient")
    ),
    races=_luck,
    note="It also names a second backward without synchronize, and serves no_sync and groups.",
    given=("__init__", "forward"),
    mistakes=mistakes("""
after_backward: parameter.register_post_accumulate_grad_hook(self.ready) → pass
    rank 0 had begun no all_reduce
all_at_the_last: if self.syncing: → if parameter is self.module.tokens.weight or len(self.works):
    when backward came to third.weight, rank 0 had 1 gradient complete and 0 sent
waits_in_the_hook: self.works[parameter] = work → self.works[parameter] = work⏎work.wait()
    rank 0 waited for 5 all_reduces before backward was over
waits_for_the_one_before: work = dist.all_reduce( → for earlier in self.works.values():
    ⏎    earlier.wait()
    ⏎work = dist.all_reduce(
    rank 0 waited for 4 all_reduces before backward was over
by_futures: work.wait() → work.get_future().wait()
    by wait() alone, not by the future of get_future()
keeps_all_handles: self.works[parameter] = work → self.works[len(self.works)] = work
    self.ready(parameter) → pass
    self.works.clear() → pass
    in step 2, rank 0 waited again for 5 handles of step 1
never_waits: work.wait() → pass
    never waited for it
waits_for_the_last: in self.works.values(): → in list(self.works.values())[-1:]:
    never waited for it
sums: parameter.grad /= dist.get_world_size(self.group) → pass
    That is the sum over the ranks: divide by the number of ranks.
divides_again: parameter.grad /= dist.get_world_size(self.group) → pass
    self.works[parameter] = work → self.works[len(self.works)] = work, parameter
    self.ready(parameter) → pass
    work.wait() → work[0].wait()
    self.works.clear() → for _, parameter in self.works.values():
    ⏎    parameter.grad /= dist.get_world_size()
    It was divided once more in the second step. Are the handles of the first one forgotten when
    synchronize() is over?
divides_twice: self.works.clear() → self.works.clear()
    ⏎for parameter in self.trained.values():
    ⏎    parameter.grad /= dist.get_world_size()
    It was divided by 4, on 2 ranks. Twice, before the all_reduce and after it?
for_two_ranks: dist.get_world_size(self.group) → 2
    It was divided by 2, on 4 ranks: dist.get_world_size() knows how many there are.
uses_the_result: work = dist.all_reduce( → work = parameter.grad = dist.all_reduce(
    async_op=True → async_op=False
    all_reduce works in place and returns None, or with async_op=True a handle: the sum is in
    parameter.grad itself.
divides_on_the_way: parameter.grad /= dist.get_world_size(self.group) → pass
    self.works[parameter] = work → self.works[parameter] = work
    ⏎parameter.grad /= dist.get_world_size()
    before anybody had waited for it
in_the_first_step: raise RuntimeError(TWICE) → return
    self.works.clear() → pass
    That is rank 0's own in the second step; in the first one it was averaged. Is everything that
    the first one noted forgotten when synchronize() is over?
parameters: parameter.grad /= dist.get_world_size(self.group) → pass
    dist.all_reduce(parameter.grad → dist.all_reduce(parameter.data
    self.works[parameter] = work → self.works[parameter] = work
    ⏎work.wait()
    ⏎parameter.data /= dist.get_world_size()
    What all_reduce was given is the parameter itself: you averaged the parameters. Average their
    gradients: parameter.grad.
of_a_copy: parameter.grad /= dist → mean = parameter.grad / dist
    dist.all_reduce(parameter.grad → dist.all_reduce(mean
    Each rank still has its own gradients: the mean must end up in .grad itself, in place.
on_copies: parameter.register → parameter.detach().requires_grad_().register
    self.ready(parameter) → pass
    No all_reduce was called. Did a hook run? It must be on the module's parameters.
on_frozen: self.trained.values():⏎parameter.reg → module.parameters():⏎    parameter.reg
    What isn't trained gets no gradient, and can't have a hook: pass over it (requires_grad tells).
weights_only: self.trained.values():⏎parameter.register → module.parameters():
    ⏎    parameter.dim() > 1 and parameter.requires_grad and parameter.register
    self.ready(parameter) → pass
    Only norm.weight is skipped: every parameter that is trained has its turn.
"""),
)


# plan_buckets(sizes, cap_bytes)

FP32, BF16 = torch.float32, torch.bfloat16


def _run_plan(answer, sizes, cap_bytes):
    plan = answer(sizes, cap_bytes)
    plan = list(plan) if isinstance(plan, Iterator | tuple) else plan
    lists = isinstance(plan, list) and all(isinstance(bucket, list | tuple) for bucket in plan)
    return [list(bucket) for bucket in plan] if lists else plan


def _plan_trials():
    floats = [(4, FP32)] * 5
    mixed = [(2, BF16), (4, FP32), (2, BF16), (4, FP32), (4, FP32), (2, BF16)]
    giant = [(4, FP32), (40, FP32), (4, FP32), (4, FP32)]
    for what, sizes, cap_bytes, plan in (
        ("4 gradients of 4 bytes, cap 8", floats[:4], 8, [[0, 1], [2, 3]]),
        ("5 gradients of 4 bytes, cap 8", floats, 8, [[0, 1], [2, 3], [4]]),
        ("5 gradients of 4 bytes, cap 10", floats, 10, [[0, 1, 2], [3, 4]]),
        ("4, 40, 4 and 4 bytes, cap 8", giant, 8, [[0, 1], [2, 3]]),
        ("5 gradients of 4 bytes, cap 1", floats, 1, [[0], [1], [2], [3], [4]]),
        (
            "2, 4, 2, 4, 4, 2 bytes, bfloat16 where there are 2 and float32 where there are 4, "
            "cap 8",
            mixed,
            8,
            [[1, 3], [4], [0, 2, 5]],
        ),
        ("no gradients", [], 8, []),
    ):
        yield Trial(1, _run_plan, (sizes, cap_bytes), [plan], what=what)


def _explain_plan(trial: Trial, rank: int, expected: list[list[int]], got) -> str:
    sizes, _ = trial.args
    planned = got if isinstance(got, list) else [got]
    buckets = [bucket if isinstance(bucket, list) else ["?"] for bucket in planned]
    dealt = [number for bucket in buckets for number in bucket]
    if not all(isinstance(number, int) for number in dealt):
        return "Return a list of buckets, each a list of gradients' numbers: [[0, 1], [2]]."
    if [] in buckets:
        return "A bucket is empty: begin one only for a gradient that needs it."
    missing = sorted(set(range(len(sizes))) - set(dealt))
    if missing:
        return f"Gradient {missing[0]} is in no bucket. What isn't full in the end is one, too."
    if sorted(dealt) != list(range(len(sizes))):
        return "Each gradient's number is in one bucket, once; here one is twice, or too large."
    for bucket in buckets:
        if len({sizes[number][1] for number in bucket}) > 1:
            return (
                "A bucket has two dtypes, and a tensor has one: keep an open bucket for each dtype."
            )
    return (
        "Deal gradients out in the order in which they become ready, each into the open bucket of "
        "its dtype, which is closed once it has reached its cap, by however much."
    )


plan_buckets = Exercise(
    reference=ddp.plan_buckets,
    trials=_plan_trials,
    hints={
        "start": "With one dtype first: put each gradient into the open bucket; if that has "
        "cap_bytes now, open a new one.",
        "values": "An open bucket for each dtype: a dict {dtype: [numbers]}. What is still in it "
        "in the end is a bucket, too. Then sorted(buckets, key=lambda bucket: bucket[-1]).",
    },
    praise="right for what divides and what doesn't, for gradients larger than the cap, and for "
    "two dtypes.",
    explain=_explain_plan,
    mistakes=mistakes("""
large_closes: bucket = filling → if sizes[number][0] > cap_bytes and filling.get(dtype):
    ⏎    full.append(filling.pop(dtype))
    ⏎bucket = filling
    Gradient 1 is larger than the cap, and still joins the open bucket: together they are full.
loses_the_rest: full + list(filling.values()) → full
    Gradient 4 is in no bucket. What isn't full in the end is one, too.
stays_below: bucket.append(number) → nbytes = [sizes[each][0] for each in [*bucket, number]]
    ⏎if sum(nbytes) > cap_bytes:
    ⏎    full.extend([bucket] if bucket else [])
    ⏎    bucket = filling[dtype] = []
    ⏎bucket.append(number)
    >= cap_bytes → > 1000
    A bucket was closed below the cap, though another gradient follows: a bucket is closed once it
    has reached its cap, by however much.
goes_over: >= cap_bytes → > cap_bytes
    A bucket that has reached its cap is closed: here another gradient came into it.
mixes_dtypes: filling.setdefault(dtype → filling.setdefault(0
    filling.pop(dtype) → filling.pop(0)
    A bucket has two dtypes, and a tensor has one: keep an open bucket for each dtype.
closes_at_another_dtype: bucket = filling → for other in set(filling) - {dtype}:
    ⏎    full.append(filling.pop(other))
    ⏎bucket = filling
    A bucket was closed below the cap when another dtype came: both stay open side by side.
counts_on: for each in bucket) → for each in range(number + 1))
    A bucket was closed below the cap: count the bytes of each bucket from 0 on.
leaves_one_open: full.append(filling.pop(dtype)) → full.append(bucket)⏎filling[dtype] = []
    bucket[-1]) → bucket[-1:])
    A bucket is empty: begin one only for a gradient that needs it.
by_first: bucket[-1]) → bucket[0])
    The right buckets in another order: a bucket can be sent when its last gradient is ready, so
    they come in the order of their last gradients.
backwards: bucket[-1]) → -bucket[-1])
    The right buckets in another order: the one that can be sent first comes first.
backwards_inside: bucket.append(number) → bucket.insert(0, number)
    bucket[-1]) → bucket[0])
    A bucket is out of order: gradients come into it as they become ready.
of_bytes: return sorted( → return [[sizes[each][0] for each in b] for b in full] or sorted(
    A bucket holds gradients' numbers, 0, 1, ..., not their bytes.
flat: return sorted( → return list(range(len(sizes))) or sorted(
    Return a list of buckets, each a list of gradients' numbers: [[0, 1], [2]].
"""),
)


# BucketedDDP(module, bucket_cap_mb)

PLANS = {  # by cap_bytes; float64 for norm
    16: [["norm.weight"], ["third.weight", "second.weight"], ["first.weight", "tokens.weight"]],
    # third and first are of one size: sums of what doesn't belong together are no error
    12: [["norm.weight"], *([f"{name}.weight"] for name in ("third", "second", "first", "tokens"))],
}


def _bucketed_trials():
    for between in (None, NONE, ZEROS, KEPT):
        yield _trial(2, 16, between)
    yield _trial(2, 12, None, crossed=True)
    yield _trial(4, 16, None)
    yield _trial(1, 16, None)


def _bucketed_luck(trial: Trial, run: Run) -> str | None:
    """A bucket that left before its gradients were in it."""
    cap_bytes, _, crossed = trial.args
    plan = PLANS[cap_bytes]
    for rank, trained in enumerate(run):
        for name, (went_out, _) in trained.steps[0].changed.items():
            if not any(went_out):
                number = next(number for number, names in enumerate(plan) if name in names)
                return (
                    f"on rank {rank}, bucket {number} of {plan} left before the gradient of {name} "
                    "had come.\nWhat counts is how many gradients of this bucket have come, not "
                    "how many of all."
                )
        layers = _layers(crossed, rank)
        for number, step in enumerate(trained.steps, start=1):
            for begun, could in zip(step.begun, sendable(plan, layers), strict=True):
                if could < begun <= step.begun[-1] <= len(plan) and not crossed:
                    return (
                        f"in step {number}, rank {rank} had sent {begun} when "
                        f"{_count(could, 'bucket')} had all their gradients.\nA bucket leaves when "
                        "the last of its gradients has come in this step: what came in the step "
                        "before doesn't count."
                    )
    return _luck(trial, run)


def _explain_bucketed(trial: Trial, rank: int, expected: Trained, got: Trained) -> str:
    cap_bytes, _, crossed = trial.args
    buckets = len(PLANS[cap_bytes]) * len(got.steps)
    sent = got.gradients.messages
    if 0 < sent < buckets:
        again = (
            "When one leaves, the next may be full already: `while`, not `if`." if crossed else ""
        )
        if got.steps[-1].begun[-1] == 0:
            again = "In step 2 it sent nothing: does it still hold the handles of the step before?"
        return (
            f"Rank {rank} called all_reduce {sent} times for {_count(buckets, 'bucket')}: which "
            f"was never sent? Each has its turn, full or not, and in every step. {again}".rstrip()
        )
    name = wrong_ones(expected.gradients, got.gradients)[0]
    if not crossed and sent and got.gradients.gradients[name] is not None:
        if not any(got.gradients.gradients[name]):
            return f"{name}.grad is 0. Did you replace it before you had copied it into its view?"
        if got.steps[-1].homes[name] is None:
            return f"{name}.grad doesn't lie in the bucket that was sent. {NOT_THE_VIEW}"
    return _explain(trial, rank, expected, got)


NOT_THE_VIEW = (
    "zero_grad() drops the view, and backward makes a new tensor. Whenever the hook finds a "
    "gradient that isn't its view, it copies it there, and makes the view the gradient."
)


def _bucketed_wire(trial: Trial, run: Run) -> str | None:
    cap_bytes, _, crossed = trial.args
    plan = PLANS[cap_bytes]
    return (
        _overlap(run, plan, "bucket", crossed) or _volume(run, plan, "bucket") or _views(run, plan)
    )


def _views(run: Run, plan: list[list[str]]) -> str | None:
    """Whether gradients are views of what was sent, and of the same tensors in every step."""
    for rank, (trained, records) in enumerate(zip(run, run.wire, strict=True)):
        sent = [record.memory[0] for record in records if record.op == "all_reduce"]
        for number, step in enumerate(trained.steps):
            for names, buffer in zip(plan, sent[number * len(plan) :], strict=False):
                apart = [name for name in names if step.homes[name] != buffer]
                if apart:
                    return (
                        f"the values are right, but on rank {rank} {apart[0]}.grad isn't a view of "
                        "the bucket that was sent: the mean was copied once more.\n"
                        "parameter.grad = view, and the mean is in place."
                    )
            if step.homes != trained.steps[0].homes:
                return (
                    f"the values are right, but rank {rank} made new buckets in the second step.\n"
                    "Make them once, in add_bucket, and use them in every step: memory costs time "
                    "to get, and the peak counts."
                )
    return None


BY_NUMBERS = (
    "`in`, index and == with tensors in a list compare the tensors' numbers. Look parameters up in "
    "a set or a dict, or compare with `is`."
)

BucketedDDP = Exercise(
    reference=ddp.BucketedDDP,
    trials=_bucketed_trials,
    hints={
        "start": "add_bucket: one torch.zeros for all numbers of a bucket, of their dtype; "
        "flat.split(sizes) gives views, and part.view_as(parameter) their shape.",
        "values": "ready: view.copy_(parameter.grad) unless it is the view already, parameter.grad "
        "= view, note that it arrived. synchronize: wait() for each handle, divide its bucket, "
        "then clear what was noted.",
        "wire": "ready, then: from bucket number len(self.works) on, send each that is full, up to "
        "the first that isn't.",
        "error": BY_NUMBERS,
    },
    praise=_praise,
    explain=_explain_bucketed,
    wire=_bucketed_wire,
    races=_bucketed_luck,
    note="It also names a second backward without synchronize, and serves no_sync and groups.",
    given=("__init__", "forward"),
    mistakes=mistakes(f"""
by_arrival: range(len(self.works), len(self.plan)) → range(len(self.plan))
    if not self.arrived → if parameter not in set(self.plan[number]) or not self.arrived
    break → continue
    {OUT_OF_ORDER}
after_backward: parameter.register_post_accumulate_grad_hook(self.ready) → pass
    rank 0 had begun no all_reduce
waits_in_the_hook: self.works.append(work) → self.works.append(work)⏎work.wait()
    rank 0 waited for 3 all_reduces before backward was over
one_behind: self.arrived.issuperset(self.plan[number]) → self.arrived.issuperset(
    ⏎    sum(self.plan[: number + 2], [])
    ⏎)
    when backward came to third.weight, rank 0 had 1 bucket complete and 0 sent
never_waits: work.wait() → pass
    never waited for it
sends_again: range(len(self.works), len(self.plan)) → range(len(self.plan))
    strict=True):⏎work → strict=False):⏎    work
    in step 1, rank 0 sent message 0 5 times
if_not_while: self.works.append(work) → self.works.append(work)⏎break
    strict=True):⏎work → strict=False):⏎    work
    Rank 0 called all_reduce 4 times for 5 buckets. When one leaves, the next may be full already:
    `while`, not `if`.
leaves_the_last: len(self.plan)): → len(self.plan) - 1):
    strict=True):⏎work → strict=False):⏎    work
    Rank 0 called all_reduce 2 times for 3 buckets: the last one, full or not, has its turn, too.
counts_all: self.arrived.issuperset(self.plan[number]) → len(self.arrived) > number
    left before the gradient of
looks_in_lists: self.arrived.issuperset(self.plan[number]) → all(
    ⏎    each in list(self.arrived) for each in self.plan[number]
    ⏎)
    {BY_NUMBERS}
finds_by_numbers: view = self.views[parameter] → view = self.views[parameter]
    ⏎next(each for each in self.plan if parameter in each)
    {BY_NUMBERS}
replaces_first: view.copy_(parameter.grad) → parameter.grad = view
    tokens.weight.grad is 0. Did you replace it before you had copied it into its view?
views_once: view.copy_(parameter.grad)⏎parameter.grad = view → pass
    = part.view_as(parameter) → = parameter.grad = part.view_as(parameter)
    .grad doesn't lie in the bucket that was sent. {NOT_THE_VIEW}
no_way_back: parameter.grad = view → pass
    .grad doesn't lie in the bucket that was sent. {NOT_THE_VIEW}
adds_up: view.copy_(parameter.grad) → view.add_(parameter.grad)
    It still has the first step's mean in it: copy, don't add. zero_grad(set_to_none=True) left the
    view as it was.
takes_once: view.copy_(parameter.grad) → view.any() or view.copy_(parameter.grad)
    It is still the mean of the first step: what was sent in the second one isn't what .grad was.
copies_back: parameter.grad = view → pass
    self.arrived.clear() → self.arrived.clear()
    ⏎for parameter, view in self.views.items():
    ⏎    parameter.grad.copy_(view)
    isn't a view of the bucket that was sent: the mean was copied once more
made_anew: view = self.views[parameter] → if not self.arrived:
    ⏎    plan, self.plan, self.flats = self.plan, [], []
    ⏎    for parameters in plan:
    ⏎        self.add_bucket(parameters)
    ⏎view = self.views[parameter]
    rank 0 made new buckets in the second step
sums: flat /= dist.get_world_size(self.group) → pass
    That is the sum over the ranks: divide by the number of ranks.
divides_twice: work = dist.all_reduce( → self.flats[number] /= dist.get_world_size()
    ⏎work = dist.all_reduce(
    It was divided by 4, on 2 ranks. Twice, before the all_reduce and after it?
divides_on_the_way: self.works.append(work) → self.works.append(work)
    ⏎self.flats[number] /= dist.get_world_size()
    flat /= dist.get_world_size(self.group) → pass
    before anybody had waited for it
uses_the_result: work = dist.all_reduce( → work = self.flats[number] = dist.all_reduce(
    async_op=True → async_op=False
    all_reduce works in place and returns None, or with async_op=True a handle: the sum is in the
    bucket itself.
forgets_nothing: raise RuntimeError(TWICE) → pass
    self.arrived.clear() → pass
    in step 2, rank 0 had sent 3 when 1 bucket had all their gradients
keeps_the_handles: self.works.clear() → pass
    In step 2 it sent nothing: does it still hold the handles of the step before?
one_part: = part.view_as(parameter) → = flat[: parameter.numel()].view_as(parameter)
    Two gradients are in one place: cut a bucket into parts that follow each other, flat.split(...).
all_float32: dtype=first.dtype → dtype=torch.float32
    a bucket has the dtype of its gradients: parameters[0].dtype
of_parameters: view.copy_(parameter.grad) → view.copy_(parameter.data)
    tokens.weight.grad holds tokens.weight itself. The hook is given the parameter, not its .grad.
"""),
)


# no_sync(model)


class Switched(nn.Module):
    """One weight, whose gradient is sent from its hook as long as `syncing` is True."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(1, 1, bias=False)
        self.syncing, self.works, self.synchronized = True, [], 0
        self.module.weight.register_post_accumulate_grad_hook(self.ready)

    def ready(self, weight: nn.Parameter):
        if self.syncing:
            self.works.append(dist.all_reduce(weight.grad, async_op=True))

    def synchronize(self):
        self.synchronized += 1
        if self.syncing:
            for work in self.works:
                work.wait()
                self.module.weight.grad /= dist.get_world_size()
            self.works.clear()

    def backward(self, times: int):
        """Add to the gradient: on rank r, times * W * 10**r."""
        x = torch.full((1,), float(times * dist.get_world_size() * 10 ** dist.get_rank()))
        self.module(x).sum().backward()


def _after_a_step(model: Switched) -> dict:
    """One micro-batch more, this one to be sent."""
    model.backward(3)
    model.synchronize()
    sent, gradient = len(_all_reduces()), model.module.weight.grad
    gradient = None if gradient is None else int(gradient.item())
    return {"sent": sent, "gradient": gradient, "synchronized": model.synchronized}


def _run_micro_batches(answer):
    model = Switched()
    with answer(model):
        model.backward(1)
        inside = len(_all_reduces())
    return {"sent inside": inside, **_after_a_step(model)}


def _run_nested(answer):
    model = Switched()
    with answer(model):
        with answer(model):
            model.backward(1)
        model.backward(1)
        inside = len(_all_reduces())
    return {"sent inside": inside, **_after_a_step(model)}


def _run_exception(answer):
    model, came_out = Switched(), False
    try:
        with answer(model):
            raise InterruptedError
    except InterruptedError:
        came_out = True
    return {"exception came out": came_out, **_after_a_step(model)}


def _no_sync_trials():
    after = {"sent": 1, "gradient": 33, "synchronized": 1}
    for world_size, program, expected, what in (
        (2, _run_micro_batches, {"sent inside": 0, **after, "gradient": 44}, "2 micro-batches"),
        (2, _run_nested, {"sent inside": 0, **after, "gradient": 55}, "one inside another"),
        (2, _run_exception, {"exception came out": True, **after}, "an exception inside"),
        (4, _run_micro_batches, {"sent inside": 0, **after, "gradient": 4444}, "2 micro-batches"),
    ):
        yield Trial(world_size, program, (), [expected] * world_size, what=what)


def _explain_no_sync(trial: Trial, rank: int, expected: dict, got: dict) -> str:
    wrong = next(what for what in expected if got[what] != expected[what])
    if wrong == "sent" and got["sent"] == 0:
        return "After no_sync nothing is sent any more: put back what `syncing` was before."
    if wrong == "sent inside" and trial.program is _run_nested:
        return "The inner one switched the outer one off, too: put back what `syncing` was before."
    return {
        "sent inside": "Set model.syncing to False before `yield`.",
        "exception came out": "The exception ended in no_sync: `finally`, no `except`.",
        "sent": "What added up is sent once, with the last micro-batch: no_sync itself sends "
        "nothing.",
        "gradient": "The gradient of the first micro-batch is missing: no_sync leaves it as it is.",
        "synchronized": "no_sync itself calls synchronize(). Leave that to who trains.",
    }[wrong]


ONCE = (
    "`with no_sync(model):` needs a context manager: decorate it with @contextlib.contextmanager, "
    "and yield once, on every way through no_sync."
)

no_sync = Exercise(
    reference=ddp.DataParallel.no_sync,
    trials=_no_sync_trials,
    hints={
        "start": "@contextlib.contextmanager: what stands before `yield` is done on the way in, "
        "what follows it on the way out.",
        "values": "try: yield, finally: ... is done on the way out, also if an exception passes. "
        "Note what model.syncing was before you set it to False, and put that back.",
        "error": ONCE,
    },
    praise="off inside, on again afterwards, also after an exception; what added up was sent once.",
    explain=_explain_no_sync,
    note="A method of each wrapper: self is the model.",
    mistakes=mistakes(f"""
does_nothing: self.syncing, False → self.syncing, True
    Set model.syncing to False before `yield`.
without_finally: finally: → except ZeroDivisionError:⏎    pass⏎else:
    After no_sync nothing is sent any more. An exception passed: only `finally` is done then, too.
always_on_again: self.syncing = before → self.syncing = True
    The inner one switched the outer one off, too: put back what `syncing` was before.
for_ever: self.syncing = before → pass
    After no_sync nothing is sent any more: put back what `syncing` was before.
swallows: finally: → except InterruptedError:⏎    pass⏎finally:
    The exception ended in no_sync: `finally`, no `except`.
zeroes: self.syncing = before → self.syncing = before⏎self.zero_grad()
    The gradient of the first micro-batch is missing: no_sync leaves it as it is.
sends_at_the_end: self.syncing = before → self.syncing = before
    ⏎for parameter in self.parameters():
    ⏎    parameter.grad is None or dist.all_reduce(parameter.grad)
    What added up is sent once, with the last micro-batch: no_sync itself sends nothing.
without_autograd: self.syncing, False → self.syncing, torch.set_grad_enabled(False)
    Inside no_sync, gradients are still computed and added up: leave autograd as it is.
undecorated: @contextlib.contextmanager →
    {ONCE}
returns: @contextlib.contextmanager →
    yield → pass
    {ONCE}
never_yields: yield → pass
    {ONCE}
synchronizes: self.syncing = before → self.syncing = before⏎self.synchronize()
    no_sync itself calls synchronize(). Leave that to who trains.
"""),
)
