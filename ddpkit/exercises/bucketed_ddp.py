"""Checkers of notebook 04: OverlapDDP, plan_buckets, BucketedDDP, and no_sync.

That something is sent while backward goes on is proven by order, never by time: whenever backward comes to a layer, the
check notes how many all_reduces its rank has begun. Gradients read like a tally, as in notebook 03.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from ddpkit import ddp
from ddpkit.runtime.board import Record
from ddpkit.runtime.launch import Run
from ddpkit.runtime.wire import WireWork

from .old_checker import Exercise, Trial
from .data_parallel import Left, _beside_the_average, _brief, _expect, _left, _not_waited_for, _wrong, _wrong_mean
from .checker import rank_1_comes_last as _rank_1_comes_last

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these


@contextlib.contextmanager
def _explaining(meanings: dict[str, str]) -> Iterator[None]:
    """Say more about an error of Python's or torch's. meanings: of errors in whose text the key occurs."""
    try:
        yield
    except (TypeError, RuntimeError) as error:
        meaning = next((meaning for says, meaning in meanings.items() if says in str(error)), None)
        if meaning:
            error.args = (f"{error}\n({meaning})",)
        raise


# The module that is trained, and what one process would find in its gradients.

LAYERS = ("tokens.weight", "first.weight", "second.weight", "third.weight", "norm.weight", "head.weight")
FACTORS = dict(zip(LAYERS, (1, 3, 5, 13, 11, 6), strict=True))
TIED = {"head.weight": "tokens.weight"}
READY = ("norm.weight", "third.weight", "second.weight", "first.weight", "tokens.weight")  # as backward completes them
# What gradients are multiples of: none is 2, 3 or 4 times another, so that a wrong mean can't pass for a right one.
GRADIENTS = dict(zip(READY, (11, 13, 5, 3, 1 + 6), strict=True))
WEIGHT = 2.5  # of all parameters; no gradient is that
STEPS = (1, 3)  # times as much in the second step as in the first: then old gradients are told from new ones


class Stack(nn.Module):
    """Layers one after the other, to which backward comes from the last to the first.

    tokens.weight is head.weight, too, and so its gradient is complete only when backward has been through both.
    norm is float64. positions isn't trained, and used by nobody.
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

    def forward(self, scale: int, layers: tuple[str, ...], on_the_way_back: Callable[[], None]) -> torch.Tensor:
        """A loss whose gradients are `scale` times GRADIENTS; backward calls `on_the_way_back` before each layer."""
        x = torch.zeros(())
        for name in layers:
            x = x + scale * FACTORS[name] * self.get_parameter(name).sum()
            x.register_hook(lambda _: on_the_way_back())
        return x


def _stack_left(scale: int) -> Left:
    """A Stack that was left alone, but for gradients of `scale` times GRADIENTS."""
    named = dict(Stack().named_parameters())
    gradients = {name: [scale * GRADIENTS[name]] * p.numel() if p.requires_grad else None for name, p in named.items()}
    return Left(gradients, {name: [WEIGHT] * p.numel() for name, p in named.items()})


@dataclass
class Step:
    """One step of one rank, counted in all_reduces of this step.

    begun: when backward came to each layer, and when it was over. waited: waited for, when backward was over.
    old: handles of earlier steps that were waited for once more.
    touched: by name, gradients that are not then what they were when they were sent, as [sent, then]; noted only where
    no other rank's numbers can have come. homes: where each gradient lies after the step, see `_home`.
    """

    begun: list[int]
    waited: int
    old: int
    touched: dict[str, tuple[list, list]]
    homes: dict[str, tuple[int | None, int]]


@dataclass
class Trained:
    """What the last step left in the module; and all steps, to say why."""

    left: Left
    steps: list[Step] = field(default_factory=list, compare=False)

    def __repr__(self):
        return repr(self.left)


def _layers(rank: int, crossed: bool) -> tuple[str, ...]:
    """The layers in the order of forward; crossed: on rank 1, first and third change places."""
    swapped = {"first.weight": "third.weight", "third.weight": "first.weight"} if crossed and rank == 1 else {}
    return tuple(swapped.get(name, name) for name in LAYERS)


def _said() -> list[Record]:
    """The all_reduces that this rank has begun so far."""
    return [record for record in dist.group.WORLD.recorder.records if record.op == "all_reduce"]


BY_WAIT = (
    "this check sees what is waited for by wait() alone, not by the future of get_future(): keep the handle, and in "
    "synchronize() wait() for it, then divide"
)


@contextlib.contextmanager
def _watched_handles() -> Iterator[list[Record]]:
    """What is waited for, each time that wait() is called.

    get_future() is refused: waiting for a future happens in C++ and leaves no mark, so rank 1 would be held for ever.
    """
    seen, wait, get_future = [], WireWork.wait, WireWork.get_future

    def watched(work, timeout=None):
        seen.append(work._record)
        return wait(work, timeout)

    def refused(work):
        raise NotImplementedError(BY_WAIT)

    WireWork.wait, WireWork.get_future = watched, refused
    try:
        yield seen
    finally:
        WireWork.wait, WireWork.get_future = wait, get_future


def _step(stack: Stack, model: nn.Module, scale: int, layers: tuple[str, ...]) -> Step:
    earlier, begun = len(_said()), []
    _rank_1_comes_last()
    with _watched_handles() as seen:
        loss = model(scale, layers, lambda: begun.append(len(_said()) - earlier))
        loss.backward()
        here = _said()[earlier:]
        waited = sum(record.waited is not None for record in here)
        # rank 1 sends nothing until rank 0 waits
        alone = dist.get_world_size() == 2 and dist.get_rank() == 0 and not waited
        touched = _touched(stack, here) if alone else {}
        model.synchronize()
    homes = {name: _home(parameter.grad) for name, parameter in stack.named_parameters() if parameter.grad is not None}
    old = sum(record in _said()[:earlier] for record in seen)
    return Step([*begun, len(here)], waited, old, touched, homes)


def _touched(stack: Stack, sent: list[Record]) -> dict[str, tuple[list, list]]:
    """The gradients that lie in what was sent and have changed since: what went out, and what is there now."""
    touched = {}
    for name, gradient in _left(stack).gradients.items():
        buffer, start = (None, 0) if gradient is None else _home(stack.get_parameter(name).grad)
        for record in sent:
            if record.memory and record.memory[0] == buffer and start - record.memory[1] in range(len(record.values)):
                went_out = record.memory[2][start : start + len(gradient)]
                if went_out != gradient:
                    touched[name] = went_out, gradient
    return touched


def _home(gradient: torch.Tensor) -> tuple[int | None, int]:
    """Which of the buffers on the wire `gradient` is a part of, by the records' number; and where in it."""
    buffers = dist.group.WORLD.recorder._buffers
    return buffers.get(gradient.untyped_storage().data_ptr()), gradient.storage_offset()


ZEROED = {"zero_grad(set_to_none=True)": True, "zero_grad(set_to_none=False)": False}
KEPT = "gradients are kept and added to"


def _train(wrap: Callable[[Stack], nn.Module], between: str | None, crossed: bool = False) -> Trained:
    """One step; or two, and `between` them one of ZEROED or KEPT."""
    stack, rank, world_size = Stack(), dist.get_rank(), dist.get_world_size()
    model, steps, keep = wrap(stack), [], []
    for scale in STEPS[: 1 if between is None else 2]:
        if between in ZEROED:
            stack.zero_grad(set_to_none=ZEROED[between])
        steps.append(_step(stack, model, scale * world_size * 10**rank, _layers(rank, crossed)))
        keep += [parameter.grad for parameter in stack.parameters()]  # so that nothing new comes to lie in its place
    return Trained(_left(stack), steps)


def _mean(world_size: int, between: str | None) -> int:
    """What the gradients are multiples of in the end: 11 for one step on two ranks, 33 for two, 44 if they add up."""
    times = {None: STEPS[0], KEPT: sum(STEPS)}.get(between, STEPS[1])
    return times * sum(10**rank for rank in range(world_size))


def _own(rank: int, world_size: int, between: str | None) -> int:
    """The same for rank r, if nobody averages in the last step."""
    if between is None:
        return STEPS[0] * world_size * 10**rank
    earlier = _mean(world_size, None) if between == KEPT else 0
    return earlier + STEPS[1] * world_size * 10**rank


def _trained(world_size: int, between: str | None) -> Callable[[Run], list[Trained]]:
    """`expected` of a trial."""
    lefts = _expect([_stack_left(_mean(world_size, between))] * world_size)
    return lambda run: [Trained(left) for left in lefts(run)]


# What can go wrong with both wrappers. plan: the names of the gradients in each bucket.


def _sendable(plan: list[list[str]], layers: tuple[str, ...]) -> list[int]:
    """How many buckets can have left when backward comes to each layer, and when it is over."""
    counts = []
    for still_to_come in range(len(layers), -1, -1):
        incomplete = {TIED.get(layer, layer) for layer in layers[:still_to_come]}
        full = [incomplete.isdisjoint(names) for names in plan]
        counts.append([*full, False].index(False))
    return counts


def _nothing_sent(expected: Trained) -> str | None:
    if any(record.op == "all_reduce" for record in expected.left.said):
        return None
    return "No all_reduce was called. Did a hook run? It must be on the module's own parameters, not on copies of them."


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _matter_of_luck(trial: Trial, run: Run) -> str | None:
    """A message that nobody waited for, or that was changed on the way."""
    never = _not_waited_for(trial, run)
    if never:
        return never
    for rank, trained in enumerate(run):
        for step in trained.steps:
            for name, (went_out, changed) in step.touched.items():
                return (
                    f"on rank {rank}, {name}.grad went out as {_brief(went_out)}, and was {_brief(changed)} before "
                    "anybody had waited for it.\nAn all_reduce under way works in this memory, and what comes out is a "
                    "matter of luck: change it before you send it, or after wait()."
                )
    return None


def _holds_the_parameter(expected: Left, got: Left) -> str | None:
    for name in _wrong(expected, got):
        if got.gradients[name] == expected.parameters[name]:
            return f"{name}.grad holds {name} itself. The hook is given the parameter; its gradient is parameter.grad."
    return None


def _second_step(trial: Trial, rank: int, expected: Trained, got: Trained, between: str | None) -> str | None:
    """What a wrong gradient of the second step says, after a first one that was right."""
    if between is None:
        return None
    world_size = trial.world_size
    name = _wrong(expected.left, got.left)[0]
    mean, first = _mean(world_size, between), _mean(world_size, None)
    alone = mean - first if between == KEPT else mean
    meanings = {
        _own(rank, world_size, between): f"is rank {rank}'s own in the second step; in the first one it was averaged. "
        "Is everything that the first one noted forgotten when synchronize() is over?",
        mean / world_size: "was divided by the number of ranks once more in the second step. Are the handles of the "
        "first one forgotten when synchronize() is over?",
        first: "is still the mean of the first step: what was sent in the second one isn't what is in .grad now.",
    }
    if between == KEPT:
        meanings[alone] = (
            "is the mean of what the last backward brought. What .grad held before is lost: that is how micro-batches "
            "add up, so the whole of .grad must travel."
        )
    else:
        meanings[mean + first] = (
            "still has the first step's mean in it: it was added to what zero_grad should have cleared."
        )
    for scale, meaning in meanings.items():
        if got.left.gradients[name] == _stack_left(scale).gradients[name]:
            return f"{name}.grad {meaning}"
    return None


def _explain(trial: Trial, rank: int, expected: Trained, got: Trained, between: str | None) -> str:
    """The usual cause of a wrong gradient, whatever the wrapper."""

    def own(other: int) -> Left:
        return _stack_left(_own(other, trial.world_size, between))

    return (
        _beside_the_average(expected.left, got.left)
        or _holds_the_parameter(expected.left, got.left)
        or _second_step(trial, rank, expected, got, between)
        or _wrong_mean(trial, rank, expected.left, got.left, own)
    )


def _overlap(run: Run, plan: list[list[str]], what: str, crossed: bool = False) -> str | None:
    """What kept a gradient or bucket (`what`) of the plan from leaving as soon as it could."""
    for rank, trained in enumerate(run):
        layers = _layers(rank, crossed)
        places = [*(f"came to {name}" for name in reversed(layers)), "was over"]
        for number, step in enumerate(trained.steps, start=1):
            if step.begun[-1] == 0:
                return (
                    f"the values are right, but when backward was over, rank {rank} had begun no all_reduce.\n"
                    "Begin it in the hook, with dist.all_reduce(..., async_op=True): the hook runs while backward "
                    "still has other gradients to compute."
                )
            if step.waited:
                return (
                    f"the values are right, but rank {rank} waited for {_count(step.waited, 'all_reduce')} before "
                    "backward was over.\n"
                    "async_op=True returns a handle: keep it, and wait() for it in synchronize()."
                )
            if step.old:
                return (
                    f"the values are right, but in step {number}, rank {rank} waited again for "
                    f"{_count(step.old, 'handle')} of step {number - 1}: they pile up with every step.\n"
                    "Forget them at the end of synchronize()."
                )
            for place, begun, sendable in zip(places, step.begun, _sendable(plan, layers), strict=True):
                if begun < sendable:
                    return (
                        f"the values are right, but when backward {place}, rank {rank} had {_count(sendable, what)} "
                        f"complete and {begun} sent.\nSend each as soon as it is complete and its turn has come."
                    )
    return None


def _volume(run: Run, plan: list[list[str]], what: str) -> str | None:
    """Whether each gradient or bucket of the plan left in one all_reduce a step, and nothing besides."""
    parameters = dict(Stack().named_parameters())
    for rank, records in enumerate(run.wire):
        steps = len(run[rank].steps)
        sent = [record.bytes for record in records if record.op == "all_reduce"]
        needed = steps * sum(parameters[name].nbytes for names in plan for name in names)
        if sum(sent) != needed:
            return (
                f"the values are right, but rank {rank} handed {sum(sent)} bytes to all_reduce where its gradients "
                f"have {needed}.\nReplay it: which message holds what was sent already, or isn't a gradient?"
            )
        if len(sent) != steps * len(plan):
            return (
                f"the values and the bytes are right, but rank {rank} called all_reduce {len(sent)} times for "
                f"{_count(steps * len(plan), what)}: each leaves in one message."
            )
    return None


# OverlapDDP(module)

# torch.nn, as the notebook has it: what is shown as the solution can be pasted there.


class OverlapDDP(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        self.under_way = []
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.ready)

    def forward(self, *inputs):
        return self.module(*inputs)

    def ready(self, parameter):
        parameter.grad /= dist.get_world_size()
        self.under_way.append(dist.all_reduce(parameter.grad, async_op=True))

    def synchronize(self):
        for work in self.under_way:
            work.wait()
        self.under_way.clear()


ONE_EACH = [[name] for name in READY]


def _overlap_trials():
    for world_size, between in ((2, None), *((2, between) for between in (*ZEROED, KEPT)), (4, None)):
        yield Trial(world_size, _train, (between,), _trained(world_size, between), what=_steps(between))


def _steps(between: str | None) -> str:
    return "1 step" if between is None else f"2 steps, {between}"


def _overlap_cause(trial: Trial, rank: int, expected: Trained, got: Trained):
    return _nothing_sent(expected) or _explain(trial, rank, expected, got, trial.args[0])


def _overlap_praise(trial: Trial, run: Run) -> str:
    *_, early, every = run[0].steps[-1].begun
    return (
        f"right on 2 and 4 ranks. {early} of {every} gradients were on their way before backward came to the last "
        "layer, and none was waited for until backward was over."
    )


OverlapDDP = Exercise(
    OverlapDDP,
    _overlap_trials,
    [
        "dist.all_reduce(tensor, async_op=True) returns at once, with a handle. Where can the hook leave it?",
        "ready: divide parameter.grad by the number of ranks, begin its all_reduce, keep the handle in self.under_way.",
        "synchronize: wait() for every handle in self.under_way, then clear the list for the next step.",
    ],
    _overlap_praise,
    _overlap_cause,
    lambda trial, run: _overlap(run, ONE_EACH, "gradient") or _volume(run, ONE_EACH, "gradient"),
    races=_matter_of_luck,
    note="# ddpkit.ddp.OverlapDDP does the same, and keeps ranks in one order that don't go through the module alike.",
    given=("__init__", "forward"),
)


# plan_buckets(sizes, cap_bytes)

FP32, BF16 = torch.float32, torch.bfloat16


def _run_plan(answer, sizes, cap_bytes):
    plan = answer(sizes, cap_bytes)
    plan = list(plan) if isinstance(plan, Iterator) else plan  # of an answer that yields its buckets
    buckets = isinstance(plan, list | tuple) and all(isinstance(bucket, list | tuple) for bucket in plan)
    return [list(bucket) for bucket in plan] if buckets else plan


def _plan_trials():
    """Small plans, made by hand."""
    floats = [(4, FP32)] * 5
    mixed = [(2, BF16), (4, FP32), (2, BF16), (4, FP32), (4, FP32), (2, BF16)]
    for what, sizes, cap_bytes, plan in (
        ("4 gradients of 4 bytes, cap 8", floats[:4], 8, [[0, 1], [2, 3]]),
        ("5 gradients of 4 bytes, cap 8", floats, 8, [[0, 1], [2, 3], [4]]),
        ("5 gradients of 4 bytes, cap 10", floats, 10, [[0, 1, 2], [3, 4]]),
        ("4, 40, 4 and 4 bytes, cap 8", [(4, FP32), (40, FP32), (4, FP32), (4, FP32)], 8, [[0, 1], [2, 3]]),
        ("4, 4, 2 and 2 bytes, cap 6", [(4, FP32), (4, FP32), (2, FP32), (2, FP32)], 6, [[0, 1], [2, 3]]),
        ("5 gradients of 4 bytes, cap 1", floats, 1, [[0], [1], [2], [3], [4]]),
        ("float32 and bfloat16 by turns, cap 8", mixed, 8, [[1, 3], [4], [0, 2, 5]]),
        ("no gradients", [], 8, []),
    ):
        yield Trial(1, _run_plan, (sizes, cap_bytes), [plan], what=what)


def _plan_cause(trial: Trial, rank: int, expected: list[list[int]], got):
    sizes, cap_bytes = trial.args
    return f"{_wrong_plan(sizes, cap_bytes, expected, got)}\nIt was given sizes={sizes}, cap_bytes={cap_bytes}."


def _wrong_plan(sizes, cap_bytes, expected: list[list[int]], got) -> str:
    planned = got if isinstance(got, list) and all(isinstance(bucket, list) for bucket in got) else [["?"]]
    numbers = [number for bucket in planned for number in bucket]
    if not all(isinstance(number, int) for number in numbers):
        return "Return a list of buckets, each a list of gradients' numbers: [[0, 1], [2]]."
    if [] in planned:
        return "A bucket is empty: begin one only for a gradient that needs it."
    missing = sorted(set(range(len(sizes))) - set(numbers))
    if missing:
        return f"Gradient {missing[0]} is in no bucket. When all are dealt out, what is not full is a bucket, too."
    if sorted(numbers) != list(range(len(sizes))):
        return "Each gradient's number, from 0 on, in one bucket once; something else is in it, or one is in it twice."
    return _wrong_buckets(sizes, cap_bytes, expected, got)


def _wrong_buckets(sizes, cap_bytes, expected: list[list[int]], got: list[list[int]]) -> str:
    """The usual cause, if every gradient has its bucket."""
    for bucket in got:
        dtypes = {sizes[number][1] for number in bucket}
        if len(dtypes) > 1:
            return f"{bucket} has two dtypes, and a tensor has one: keep an open bucket for each dtype."
        if bucket != sorted(bucket):
            return f"{bucket} is out of order: gradients come into their bucket as they become ready."
    if sorted(got) == sorted(expected):
        return (
            "The right buckets in another order: a bucket can be sent when its last gradient is ready, so they come in "
            "the order of their last gradients."
        )
    for number, (nbytes, _) in enumerate(sizes):
        if nbytes > cap_bytes and [number] in got and [number] not in expected:
            return f"Gradient {number} is larger than the cap, and still joins the open bucket: together they are full."
    for bucket, after in ((bucket, _after(bucket, sizes)) for bucket in sorted(got)):
        nbytes = [sizes[number][0] for number in bucket]
        if sum(nbytes[:-1]) >= cap_bytes:
            return (
                f"{bucket} had {sum(nbytes[:-1])} bytes without gradient {bucket[-1]}, and the cap is {cap_bytes}: a "
                "bucket that has reached its cap is closed."
            )
        if sum(nbytes) < cap_bytes and after is not None:
            return (
                f"{bucket} was closed with {sum(nbytes)} bytes, below the cap of {cap_bytes}, though gradient {after} "
                "has the same dtype: a bucket is closed once it has reached its cap, by however much."
            )
    return "Deal gradients out in the order in which they become ready, each into the open bucket of its dtype."


def _after(bucket: list[int], sizes) -> int | None:
    """The next gradient of the same dtype."""
    dtype = sizes[bucket[0]][1]
    return next((number for number in range(bucket[-1] + 1, len(sizes)) if sizes[number][1] == dtype), None)


plan_buckets = Exercise(
    ddp.plan_buckets,
    _plan_trials,
    [
        "With one dtype first: put each gradient into the open bucket; if that has cap_bytes now, open a new one.",
        "An open bucket for each dtype: a dict {dtype: [numbers]}. What is still in it in the end is a bucket, too.",
        "In the end: sorted(buckets, key=lambda bucket: bucket[-1]).",
    ],
    "right for what divides and what doesn't, for gradients larger than the cap, and for two dtypes.",
    _plan_cause,
    lambda trial, run: None,
    note="# The library's own. To run it in a cell, import Sequence from collections.abc.",
)


# BucketedDDP(module, plan)


class BucketedDDP(torch.nn.Module):
    def __init__(self, module, plan):
        super().__init__()
        self.module, self.plan = module, plan
        self.flats = []
        self.views = {}
        self.arrived, self.under_way = set(), []
        for parameters in plan:
            self.add_bucket(parameters)
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(self.ready)

    def forward(self, *inputs):
        return self.module(*inputs)

    def add_bucket(self, parameters):
        sizes = [parameter.numel() for parameter in parameters]
        flat = torch.zeros(sum(sizes), dtype=parameters[0].dtype)
        self.flats.append(flat)
        for parameter, part in zip(parameters, flat.split(sizes), strict=True):
            self.views[parameter] = part.view_as(parameter)

    def ready(self, parameter):
        view = self.views[parameter]
        if parameter.grad is not view:  # backward made a new one
            view.copy_(parameter.grad)
            parameter.grad = view
        self.arrived.add(parameter)
        for number in range(len(self.under_way), len(self.plan)):  # those that have not left yet
            if not self.arrived.issuperset(self.plan[number]):
                break
            self.under_way.append(dist.all_reduce(self.flats[number], async_op=True))

    def synchronize(self):
        for work, flat in zip(self.under_way, self.flats, strict=True):
            work.wait()
            flat /= dist.get_world_size()
        self.arrived.clear()
        self.under_way.clear()


PLAN = [["norm.weight"], ["third.weight", "second.weight"], ["first.weight", "tokens.weight"]]
# third and first are of one size: sums of what doesn't belong together are no error.
CROSSED_PLAN = [["norm.weight"], ["third.weight"], ["second.weight", "tokens.weight"], ["first.weight"]]


BY_NUMBERS = (
    "if this is `in`, index or == with tensors in a list: they compare the tensors' numbers. Look parameters up in a "
    "set or a dict, or compare with `is`"
)
IN_BUCKETS = {
    **dict.fromkeys(("grad_dtype", "different type"), "a bucket has the dtype of its gradients: parameters[0].dtype"),
    **dict.fromkeys(("must match the size of tensor b", "Boolean value of Tensor"), BY_NUMBERS),
}


def _run_bucketed(answer, plan, between, crossed):
    def wrap(stack):
        return answer(stack, [[stack.get_parameter(name) for name in names] for names in plan])

    with _explaining(IN_BUCKETS):
        return _train(wrap, between, crossed)


def _bucketed_trials():
    for between in (None, *ZEROED, KEPT):
        yield Trial(2, _run_bucketed, (PLAN, between, False), _trained(2, between), what=_steps(between))
    what = "first is ready before third on rank 1, after it on rank 0"
    yield Trial(2, _run_bucketed, (CROSSED_PLAN, None, True), _trained(2, None), what=what)
    yield Trial(4, _run_bucketed, (PLAN, None, False), _trained(4, None), what=_steps(None))


OUT_OF_ORDER = (
    "As long as gradients came in one order on all ranks, it was right. Here ranks sent their buckets in different "
    "orders, and what doesn't belong together was added up. Bucket k of the plan is sent after the buckets before it, "
    "on every rank, even if it is full sooner."
)


def _bucketed_cause(trial: Trial, rank: int, expected: Trained, got: Trained):
    plan, between, crossed = trial.args
    return (
        _nothing_sent(expected)
        or _left_behind(rank, expected, got.steps, plan, crossed)
        or _never_copied(expected, got)
        or (OUT_OF_ORDER if crossed else None)
        or _beside_the_bucket(expected, got, between)
        or _explain(trial, rank, expected, got, between)
    )


def _too_early(trial: Trial, run: Run) -> str | None:
    """A bucket that left before its gradients were in it."""
    plan, _, crossed = trial.args
    for rank, trained in enumerate(run):
        for name, (went_out, _) in trained.steps[0].touched.items():
            if not any(went_out):
                bucket = next(number for number, names in enumerate(plan) if name in names)
                return (
                    f"on rank {rank}, bucket {bucket} of {plan} left before the gradient of {name} had come.\n"
                    "What counts is how many gradients of this bucket have come, not how many of all."
                )
    for rank, trained in enumerate(run if not crossed else ()):  # crossed: it may be full, and another one's turn
        for number, step in enumerate(trained.steps, start=1):
            for begun, sendable in zip(step.begun, _sendable(plan, LAYERS), strict=True):
                if sendable < begun and step.begun[-1] <= len(plan):  # else there are too many messages
                    return (
                        f"in step {number}, rank {rank} had sent {begun} when {_count(sendable, 'bucket')} had all "
                        "their gradients.\nA bucket leaves when the last of its gradients has come in this step: what "
                        "came in the step before doesn't count."
                    )
    return None


def _left_behind(rank: int, expected: Trained, steps: list[Step], plan: list[list[str]], crossed: bool) -> str | None:
    """A bucket that was never sent."""
    sent = sum(record.op == "all_reduce" for record in expected.left.said)
    if sent >= len(steps) * len(plan):
        return None
    if sent == len(plan) and steps[-1].begun[-1] == 0:
        return (
            f"In step {len(steps)}, rank {rank} sent nothing. Does self.under_way still hold the handles of the step "
            "before? Clear it when synchronize() has waited for them."
        )
    calls = f"Rank {rank} called all_reduce {sent} times for {_count(len(steps) * len(plan), 'bucket')}"
    if crossed:
        return f"{calls}: when one leaves, the next may be full already. `while`, not `if`."
    return f"{calls}: which was never sent? Also the last one, full or not, has its turn, and in every step."


def _never_copied(expected: Trained, got: Trained) -> str | None:
    """A view that became the gradient as empty as it was."""
    name = _wrong(expected.left, got.left)[0]
    gradient = got.left.gradients[name]
    if gradient is None or any(gradient):
        return None
    return f"{name}.grad is 0. Did you replace it before you had copied it into its view?"


def _beside_the_bucket(expected: Trained, got: Trained, between: str | None) -> str | None:
    """A gradient that isn't where the mean came to be."""
    name = _wrong(expected.left, got.left)[0]
    buffer, _ = got.steps[-1].homes.get(name, (None, 0))
    if buffer is not None or got.left.gradients[name] is None:
        return None
    dropped = "zero_grad(set_to_none=True) dropped the view, and backward made a new tensor. "
    return (
        f"{name}.grad doesn't lie in the bucket that was sent. {dropped if ZEROED.get(between) else ''}Whenever the "
        "hook finds a gradient that isn't its view, it copies it there, and makes the view the gradient: "
        "parameter.grad = view."
    )


def _bucketed_wire(trial: Trial, run: Run) -> str | None:
    plan, _, crossed = trial.args
    return _overlap(run, plan, "bucket", crossed) or _volume(run, plan, "bucket") or _homes(run, plan)


def _homes(run: Run, plan: list[list[str]]) -> str | None:
    """Whether gradients are views of what was sent, and of the same tensors in every step."""
    for rank, (trained, records) in enumerate(zip(run, run.wire, strict=True)):
        sent = [record.memory and record.memory[0] for record in records if record.op == "all_reduce"]
        for number, step in enumerate(trained.steps):
            for names, buffer in zip(plan, sent[number * len(plan) :], strict=False):
                apart = [name for name in names if step.homes[name][0] != buffer]
                if apart:
                    return (
                        f"the values are right, but on rank {rank} {apart[0]}.grad isn't a view of the bucket that was "
                        "sent: the mean was copied once more.\nparameter.grad = view, and the mean is in place."
                    )
            if step.homes != trained.steps[0].homes:
                return (
                    f"the values are right, but rank {rank} made new buckets in the second step.\nMake them once, in "
                    "add_bucket, and use them in every step: memory costs time to get, and the peak counts."
                )
    return None


def _bucketed_praise(trial: Trial, run: Run) -> str:
    *_, early, every = run[0].steps[-1].begun
    return (
        f"right on 2 and 4 ranks: {every} all_reduces for {len(READY)} gradients, {early} of them on their way before "
        "backward came to the last layer. Buckets leave in one order on all ranks, and no gradient is copied back."
    )


BucketedDDP = Exercise(
    BucketedDDP,
    _bucketed_trials,
    [
        "add_bucket: one torch.zeros for all numbers of a bucket, of their dtype; flat.split(sizes) gives views, and "
        "part.view_as(parameter) their shape.",
        "ready: view.copy_(parameter.grad) unless it is the view already, parameter.grad = view, note that it arrived.",
        "ready, then: from bucket number len(self.under_way) on, send each that is full, up to the first that isn't.",
        "synchronize: wait() for each handle, divide its bucket, then clear what was noted: the next step begins anew.",
    ],
    _bucketed_praise,
    _bucketed_cause,
    _bucketed_wire,
    races=lambda trial, run: _too_early(trial, run) or _matter_of_luck(trial, run),
    note="# ddpkit.ddp.BucketedDDP makes the plan, too, and learns the order of gradients from the first backward.",
    given=("__init__", "forward"),
)


# no_sync(model)


class Switched(nn.Module):
    """One weight, whose gradient is sent from its hook as long as `syncing` is True."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(1, 1, bias=False)
        self.syncing, self.under_way, self.synchronized = True, [], 0
        self.module.weight.register_post_accumulate_grad_hook(self.ready)

    def ready(self, weight: nn.Parameter):
        if self.syncing:
            self.under_way.append(dist.all_reduce(weight.grad, async_op=True))

    def synchronize(self):
        self.synchronized += 1
        if self.syncing:
            for work in self.under_way:
                work.wait()
                self.module.weight.grad /= dist.get_world_size()
            self.under_way.clear()

    def backward(self, times: int):
        """Add to the gradient: on rank r, times * W * 10**r."""
        x = torch.full((1,), float(times * dist.get_world_size() * 10 ** dist.get_rank()))
        self.module(x).sum().backward()

    def seen(self) -> int | None:
        """The gradient, if there is one."""
        gradient = self.module.weight.grad
        return None if gradient is None else int(gradient.item())


@contextlib.contextmanager
def no_sync(model):
    before, model.syncing = model.syncing, False
    try:
        yield
    finally:
        model.syncing = before


ONCE = (
    "yield once, on every way through no_sync: what stands before it is done on the way into the `with`, what follows "
    "on the way out"
)
IN_NO_SYNC = {
    **dict.fromkeys(("is not an iterator", "generator didn't"), ONCE),
    "context manager": "`with no_sync(model):` needs a context manager: decorate it with @contextlib.contextmanager, "
    "and yield once",
    "does not require grad": "inside no_sync, gradients are still computed and added up: leave autograd as it is",
}


def _after_a_step(model: Switched) -> dict:
    """One micro-batch more, this one to be sent."""
    model.backward(3)
    model.synchronize()
    return {"sent": len(_said()), "gradient": model.seen(), "synchronized": model.synchronized}


def _run_micro_batches(answer):
    model = Switched()
    with _explaining(IN_NO_SYNC), answer(model):
        model.backward(1)
        inside = len(_said())
    return {"sent inside": inside, **_after_a_step(model)}


def _run_nested(answer):
    model = Switched()
    with answer(model):
        with answer(model):
            model.backward(1)
        model.backward(1)
        inside = len(_said())
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
        (2, _run_nested, {"sent inside": 0, **after, "gradient": 55}, "one no_sync inside another"),
        (2, _run_exception, {"exception came out": True, **after}, "an exception inside"),
        (4, _run_micro_batches, {"sent inside": 0, **after, "gradient": 4444}, "2 micro-batches"),
    ):
        yield Trial(world_size, program, (), [expected] * world_size, what=what)


def _no_sync_cause(trial: Trial, rank: int, expected: dict, got: dict):
    wrong = next(what for what in expected if got[what] != expected[what])
    if wrong == "sent inside":
        nested = "The inner one switched the outer one off, too: put back what `syncing` was before."
        return nested if trial.program is _run_nested else "Set model.syncing to False before `yield`."
    if wrong == "sent" and got["sent"] == 0:
        passed = " An exception passed: only `finally` is done then, too." if trial.program is _run_exception else ""
        return f"After no_sync nothing is sent any more: put back what `syncing` was before.{passed}"
    return {
        "exception came out": "The exception ended in no_sync, who trains never hears of it: `finally`, no `except`.",
        "sent": "Gradients that added up travel once, with the last micro-batch: no_sync itself sends nothing.",
        "gradient": "The gradient of the first micro-batch is missing: no_sync leaves gradients as they are.",
        "synchronized": "no_sync itself calls synchronize(). Leave that to who trains, after the last micro-batch.",
    }[wrong]


no_sync = Exercise(
    no_sync,
    _no_sync_trials,
    [
        "@contextlib.contextmanager: what stands before `yield` is done on the way in, what follows it on the way out.",
        "try: yield, finally: ... is done on the way out, also if an exception passes.",
        "Note what model.syncing was before you set it to False, and put that back: one no_sync may be inside another.",
    ],
    "off inside, on again afterwards, also after an exception; gradients that added up travelled once.",
    _no_sync_cause,
    lambda trial, run: None,
    note="# In ddpkit.ddp each wrapper has it as a method.",
)
