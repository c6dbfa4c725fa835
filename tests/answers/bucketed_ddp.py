"""Answers to the exercises of notebook 04: wrong ones, with what the verdict must say, and other right ones."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn

from ddpkit import ddp


def _size():
    return dist.get_world_size()


def _begin(tensor):
    return dist.all_reduce(tensor, async_op=True)


# OverlapDDP


class Overlap(nn.Module):
    """What the notebook gives, and a right answer; each of those below changes a part of it."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.under_way = []
        for parameter in self.hooked(module):
            self.hook(parameter)

    def hooked(self, module):
        return [parameter for parameter in module.parameters() if parameter.requires_grad]

    def hook(self, parameter):
        parameter.register_post_accumulate_grad_hook(self.ready)

    def forward(self, *inputs):
        return self.module(*inputs)

    def ready(self, parameter):
        parameter.grad /= _size()
        self.under_way.append(_begin(parameter.grad))

    def synchronize(self):
        for work in self.under_way:
            work.wait()
        self.under_way.clear()


class OverlapAfterBackward(Overlap):
    def ready(self, parameter):
        self.under_way.append(parameter)

    def synchronize(self):
        for parameter in self.under_way:
            dist.all_reduce(parameter.grad)
            parameter.grad /= _size()
        self.under_way.clear()


class OverlapAllAtTheLast(Overlap):
    def ready(self, parameter):
        self.waiting = [*getattr(self, "waiting", []), parameter]
        if len(self.waiting) == 5:
            for each in self.waiting:
                super().ready(each)
            self.waiting = []


class OverlapWaitsInTheHook(Overlap):
    def ready(self, parameter):
        dist.all_reduce(parameter.grad)
        parameter.grad /= _size()


class OverlapHasNothingToWaitFor(OverlapWaitsInTheHook):
    def synchronize(self):
        pass


class OverlapByMessages(Overlap):
    """Every rank sends its gradient to every other one, and adds up what comes."""

    def ready(self, parameter):
        others = [rank for rank in range(_size()) if rank != dist.get_rank()]
        mine, theirs = parameter.grad / _size(), [torch.empty_like(parameter.grad) for _ in others]
        sends = [dist.P2POp(dist.isend, mine, other) for other in others]
        recvs = [dist.P2POp(dist.irecv, their, other) for their, other in zip(theirs, others, strict=True)]
        self.under_way.append((dist.batch_isend_irecv(sends + recvs), parameter, [mine, *theirs]))

    def synchronize(self):
        for works, parameter, shares in self.under_way:
            for work in works:
                work.wait()
            parameter.grad = sum(shares)
        self.under_way.clear()


class OverlapByFutures(Overlap):
    def ready(self, parameter):
        def divide(future):
            return future.value()[0].div_(_size())

        self.under_way.append(_begin(parameter.grad).get_future().then(divide))


class OverlapKeepsAllHandles(Overlap):
    def synchronize(self):
        for work in self.under_way:
            work.wait()


class OverlapWaitsForTheOneBefore(Overlap):
    def ready(self, parameter):
        if self.under_way:
            self.under_way.pop().wait()
        super().ready(parameter)


class OverlapNeverWaits(Overlap):
    def synchronize(self):
        self.under_way.clear()


class OverlapWaitsForTheLast(Overlap):
    def synchronize(self):
        self.under_way[-1].wait()
        self.under_way.clear()


class OverlapWaitsInTheNextStep(Overlap):
    def forward(self, *inputs):
        super().synchronize()
        return super().forward(*inputs)

    def synchronize(self):
        self.waited = False


class OverlapSums(Overlap):
    def ready(self, parameter):
        self.under_way.append(_begin(parameter.grad))


class OverlapDividesTwice(Overlap):
    def synchronize(self):
        super().synchronize()
        for parameter in self.hooked(self.module):
            parameter.grad /= _size()


class OverlapForTwoRanks(Overlap):
    def ready(self, parameter):
        parameter.grad /= 2
        self.under_way.append(_begin(parameter.grad))


class OverlapDividesOnTheWay(Overlap):
    def ready(self, parameter):
        self.under_way.append(_begin(parameter.grad))
        parameter.grad /= _size()


class OverlapDividesLater(Overlap):
    """Right."""

    def ready(self, parameter):
        self.under_way.append((_begin(parameter.grad), parameter))

    def synchronize(self):
        for work, parameter in self.under_way:
            work.wait()
            parameter.grad /= _size()
        self.under_way.clear()


class OverlapForgetsNothing(OverlapDividesLater):
    def synchronize(self):
        for work, parameter in self.under_way:
            work.wait()
            parameter.grad /= _size()


class OverlapInTheFirstStep(Overlap):
    def ready(self, parameter):
        self.sent = {*getattr(self, "sent", set()), parameter}
        if len(self.under_way) < len(self.sent):
            super().ready(parameter)

    def synchronize(self):
        for work in self.under_way:
            work.wait()


class OverlapParameters(OverlapDividesLater):
    def ready(self, parameter):
        self.under_way.append((_begin(parameter.data), parameter.data))

    def synchronize(self):
        for work, weights in self.under_way:
            work.wait()
            weights /= _size()
        self.under_way.clear()


class OverlapOfACopy(Overlap):
    def ready(self, parameter):
        self.under_way.append(_begin(parameter.grad / _size()))


class OverlapOnCopies(Overlap):
    def hook(self, parameter):
        super().hook(nn.Parameter(parameter.detach().clone()))


class OverlapOnFrozen(Overlap):
    def hooked(self, module):
        return module.parameters()


class OverlapTiedTwice(Overlap):
    def hooked(self, module):
        every = [parameter for layer in module.modules() for parameter in layer.parameters(recurse=False)]
        return [parameter for parameter in every if parameter.requires_grad]

    def ready(self, parameter):
        mean = parameter.grad / _size()
        self.under_way.append((_begin(mean), parameter, mean))

    def synchronize(self):
        for work, parameter, mean in self.under_way:
            work.wait()
            parameter.grad = mean
        self.under_way.clear()


class OverlapLastMicroBatch(Overlap):
    """With the hook that is given a gradient before it is added to what is there."""

    def hook(self, parameter):
        parameter.register_hook(lambda gradient: self.send(parameter, gradient))

    def send(self, parameter, gradient):
        mean = gradient / _size()
        self.under_way.append((_begin(mean), parameter, mean))

    def synchronize(self):
        for work, parameter, mean in self.under_way:
            work.wait()
            parameter.grad = mean
        self.under_way.clear()


class OverlapWeightsOnly(Overlap):
    def hooked(self, module):
        return [parameter for parameter in super().hooked(module) if parameter.dim() > 1]


class OverlapByName(Overlap):
    """Right: the handles in a dictionary, the hook a function of its own."""

    def hook(self, parameter):
        self.under_way = {}

        def send(parameter):
            self.under_way[parameter] = _begin(parameter.grad.div_(_size()))

        parameter.register_post_accumulate_grad_hook(send)

    def synchronize(self):
        while self.under_way:
            self.under_way.popitem()[1].wait()


class OverlapBesideGrad(Overlap):
    """Right: a copy travels, and becomes the gradient."""

    def ready(self, parameter):
        mean = parameter.grad / _size()
        self.under_way.append((_begin(mean), parameter, mean))

    def synchronize(self):
        for work, parameter, mean in self.under_way:
            work.wait()
            parameter.grad = mean
        self.under_way.clear()


# plan_buckets


def plan_buckets_loses_the_rest(sizes, cap_bytes):
    full, filling = [], {}
    for number, (_, dtype) in enumerate(sizes):
        filling.setdefault(dtype, []).append(number)
        if sum(sizes[each][0] for each in filling[dtype]) >= cap_bytes:
            full.append(filling.pop(dtype))
    return full


def _closing(sizes, too_much):
    """One dtype after the other, in one pass: the open bucket is closed before a gradient that would be too much."""
    full, bucket = [], []
    for number, (nbytes, dtype) in enumerate(sizes):
        if bucket and too_much(sum(sizes[each][0] for each in bucket), nbytes, sizes[bucket[-1]][1] != dtype):
            full.append(bucket)
            bucket = []
        bucket.append(number)
    return [*full, bucket] if bucket else full


def plan_buckets_stays_below(sizes, cap_bytes):
    return _closing(sizes, lambda inside, more, other: inside + more > cap_bytes or other)


def plan_buckets_goes_over(sizes, cap_bytes):
    return _closing(sizes, lambda inside, more, other: inside > cap_bytes or other)


def plan_buckets_mixes_dtypes(sizes, cap_bytes):
    return _closing(sizes, lambda inside, more, other: inside >= cap_bytes)


def plan_buckets_closes_at_another_dtype(sizes, cap_bytes):
    return _closing(sizes, lambda inside, more, other: inside >= cap_bytes or other)


def plan_buckets_counts_on(sizes, cap_bytes):
    """Never sets the sum back to 0."""
    total, plan = 0, [[]]
    for number, (nbytes, _) in enumerate(sizes):
        plan[-1].append(number)
        total += nbytes
        if total >= cap_bytes:
            plan.append([])
    return [bucket for bucket in plan if bucket]


def plan_buckets_leaves_one_open(sizes, cap_bytes):
    plan = [[]]
    for number in range(len(sizes)):
        plan[-1].append(number)
        if sum(sizes[each][0] for each in plan[-1]) >= cap_bytes:
            plan.append([])
    return plan


def _by_dtype(sizes, cap_bytes):
    """Closed ones, then what is open, by the first gradient of the dtype."""
    full, filling = [], {}
    for number, (_, dtype) in enumerate(sizes):
        filling.setdefault(dtype, []).append(number)
        if sum(sizes[each][0] for each in filling[dtype]) >= cap_bytes:
            full.append(filling[dtype])
            filling[dtype] = []
    return full + [bucket for bucket in filling.values() if bucket]


def plan_buckets_by_first(sizes, cap_bytes):
    return sorted(_by_dtype(sizes, cap_bytes))


def plan_buckets_backwards(sizes, cap_bytes):
    return _by_dtype(sizes, cap_bytes)[::-1]


def plan_buckets_backwards_inside(sizes, cap_bytes):
    return [bucket[::-1] for bucket in _by_dtype(sizes, cap_bytes)]


def plan_buckets_of_bytes(sizes, cap_bytes):
    return [[sizes[number] for number in bucket] for bucket in _by_dtype(sizes, cap_bytes)]


def plan_buckets_flat(sizes, cap_bytes):
    return list(range(len(sizes)))


def plan_buckets_overlapping(sizes, cap_bytes):
    return [[number, number + 1] for number in range(len(sizes) - 1)]


def plan_buckets_of_two(sizes, cap_bytes):
    return [list(range(len(sizes)))[start : start + 2] for start in range(0, len(sizes), 2)]


def plan_buckets_largest_first(sizes, cap_bytes):
    order = sorted(range(len(sizes)), key=lambda number: -sizes[number][0])
    plan = _by_dtype([sizes[number] for number in order], cap_bytes)
    return sorted((sorted(order[number] for number in bucket) for bucket in plan), key=lambda bucket: bucket[-1])


def plan_buckets_every_other(sizes, cap_bytes):
    return [list(range(len(sizes)))[start::2] for start in range(min(2, len(sizes)))]


def plan_buckets_large_closes(sizes, cap_bytes):
    """A gradient that would fill a bucket alone gets one to itself; the one that is open is closed."""
    return _closing(sizes, lambda inside, more, other: inside >= cap_bytes or more > cap_bytes or other)


def plan_buckets_yields(sizes, cap_bytes):
    """Right."""
    yield from sorted(_by_dtype(sizes, cap_bytes), key=lambda bucket: bucket[-1])


def plan_buckets_dtype_by_dtype(sizes, cap_bytes):
    """Right: a pass for each dtype, a running sum, tuples."""
    plan = []
    for dtype in {dtype for _, dtype in sizes}:
        bucket, total = [], 0
        for number in [number for number, size in enumerate(sizes) if size[1] == dtype]:
            bucket.append(number)
            total += sizes[number][0]
            if total >= cap_bytes:
                plan.append(tuple(bucket))
                bucket, total = [], 0
        if bucket:
            plan.append(tuple(bucket))
    return tuple(sorted(plan, key=max))


# BucketedDDP


class Bucketed(nn.Module):
    """What the notebook gives, and a right answer; each of those below changes a part of it."""

    def __init__(self, module, plan):
        super().__init__()
        self.module, self.plan = module, plan
        self.flats, self.views = [], {}
        self.arrived, self.under_way = set(), []
        for parameters in plan:
            self.add_bucket(parameters)
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(self.ready)

    def forward(self, *inputs):
        return self.module(*inputs)

    def add_bucket(self, parameters):
        self.flats.append(self.flat(parameters))
        at = 0
        for parameter in parameters:
            self.views[parameter] = self.flats[-1][at : at + parameter.numel()].view_as(parameter)
            at += parameter.numel()

    def flat(self, parameters):
        return torch.zeros(sum(parameter.numel() for parameter in parameters), dtype=parameters[0].dtype)

    def take(self, parameter):
        if parameter.grad is not self.views[parameter]:
            self.views[parameter].copy_(parameter.grad)
            parameter.grad = self.views[parameter]

    def full(self, number):
        return all(parameter in self.arrived for parameter in self.plan[number])

    def send_full_ones(self):
        while len(self.under_way) < len(self.plan) and self.full(len(self.under_way)):
            self.send(len(self.under_way))

    def send(self, number):
        self.under_way.append(_begin(self.flats[number]))

    def ready(self, parameter):
        self.take(parameter)
        self.arrived.add(parameter)
        self.send_full_ones()

    def synchronize(self):
        for work, flat in zip(self.under_way, self.flats, strict=False):
            work.wait()
            flat /= _size()
        self.arrived.clear()
        self.under_way.clear()


class BucketedHalfWritten(Bucketed):
    def add_bucket(self, parameters):
        """Make one."""
        ...  # noqa: PIE790

    def ready(self, parameter):
        """Take it."""
        ...  # noqa: PIE790


class BucketedByArrival(Bucketed):
    """Whichever is full first, is sent first."""

    def send_full_ones(self):
        sent = getattr(self, "sent", set())
        for number in range(len(self.plan)):
            if self.full(number) and number not in sent:
                self.send(number)
                sent.add(number)
        self.sent = sent

    def synchronize(self):
        for work in self.under_way:
            work.wait()
        for flat in self.flats:
            flat /= _size()
        self.arrived.clear()
        self.under_way.clear()
        self.sent.clear()


class BucketedAfterBackward(Bucketed):
    def send_full_ones(self):
        self.later = True

    def synchronize(self):
        super().send_full_ones()
        super().synchronize()


class BucketedWaitsInTheHook(Bucketed):
    def send(self, number):
        super().send(number)
        self.under_way[-1].wait()


class BucketedOneBehind(Bucketed):
    """Sends a bucket when the next one is full."""

    def full(self, number):
        return super().full(min(number + 1, len(self.plan) - 1)) and super().full(number)


class BucketedNeverWaits(Bucketed):
    def synchronize(self):
        self.arrived.clear()
        self.under_way.clear()


class BucketedLeavesTheLast(Bucketed):
    def full(self, number):
        return number < len(self.plan) - 1 and super().full(number)


class BucketedIfNotWhile(Bucketed):
    def send_full_ones(self):
        if len(self.under_way) < len(self.plan) and self.full(len(self.under_way)):
            self.send(len(self.under_way))


class BucketedCountsAll(Bucketed):
    """One counter for all buckets, and it is the next one that leaves."""

    def send_full_ones(self):
        self.count = getattr(self, "count", 0) + 1
        if self.count == len(self.plan[len(self.under_way)]):
            self.send(len(self.under_way))
            self.count = 0


class BucketedLooksInLists(Bucketed):
    def ready(self, parameter):
        self.number = next(number for number, parameters in enumerate(self.plan) if parameter in parameters)
        super().ready(parameter)


class BucketedReplacesFirst(Bucketed):
    def take(self, parameter):
        parameter.grad = self.views[parameter]
        self.views[parameter].copy_(parameter.grad)


class BucketedViewsOnce(Bucketed):
    """Views become gradients when the wrapper is made, and never again."""

    def add_bucket(self, parameters):
        super().add_bucket(parameters)
        for parameter in parameters:
            parameter.grad = self.views[parameter]

    def take(self, parameter):
        return parameter


class BucketedNoWayBack(Bucketed):
    def take(self, parameter):
        self.views[parameter].copy_(parameter.grad)


class BucketedAddsUp(Bucketed):
    def take(self, parameter):
        if parameter.grad is not self.views[parameter]:
            self.views[parameter].add_(parameter.grad)
            parameter.grad = self.views[parameter]


class BucketedTakesOnce(Bucketed):
    def take(self, parameter):
        self.taken = getattr(self, "taken", set())
        if parameter not in self.taken:
            super().take(parameter)
        self.taken.add(parameter)
        parameter.grad = self.views[parameter]


class BucketedCopiesBack(BucketedNoWayBack):
    def synchronize(self):
        super().synchronize()
        for parameter, view in self.views.items():
            parameter.grad.copy_(view)


class BucketedMadeAnew(Bucketed):
    def take(self, parameter):
        if not self.arrived:
            self.views, self.flats = {}, []
            for parameters in self.plan:
                self.add_bucket(parameters)
        super().take(parameter)


class BucketedSums(Bucketed):
    def synchronize(self):
        for work in self.under_way:
            work.wait()
        self.arrived.clear()
        self.under_way.clear()


class BucketedDividesTwice(Bucketed):
    def send(self, number):
        self.flats[number] /= _size()
        super().send(number)


class BucketedDividesOnTheWay(BucketedSums):
    def send(self, number):
        super().send(number)
        self.flats[number] /= _size()


class BucketedForgetsToForget(Bucketed):
    def synchronize(self):
        super().synchronize()
        self.arrived = {parameter for parameters in self.plan for parameter in parameters}


class BucketedOnceAndForAll(Bucketed):
    def synchronize(self):
        for work, flat in zip(self.under_way, self.flats, strict=True):
            work.wait()
            flat /= _size()


class BucketedMixesUpTheViews(Bucketed):
    def add_bucket(self, parameters):
        super().add_bucket(parameters)
        if len(parameters) == 2 and parameters[0].shape == parameters[1].shape:
            one, other = parameters
            self.views[one], self.views[other] = self.views[other], self.views[one]

    def synchronize(self):
        super().synchronize()
        for parameters, flat in zip(self.plan, self.flats, strict=True):
            for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                parameter.grad = part.view_as(parameter)


class BucketedOnePart(Bucketed):
    """All views begin where the bucket does."""

    def add_bucket(self, parameters):
        self.flats.append(self.flat(parameters))
        for parameter in parameters:
            self.views[parameter] = self.flats[-1][: parameter.numel()].view_as(parameter)


class BucketedAllFloat32(Bucketed):
    def flat(self, parameters):
        return torch.zeros(sum(parameter.numel() for parameter in parameters))


class BucketedOneByOne(Bucketed):
    def send(self, number):
        self.under_way.append([_begin(self.views[parameter]) for parameter in self.plan[number]])

    def synchronize(self):
        for works, flat in zip(self.under_way, self.flats, strict=True):
            for work in works:
                work.wait()
            flat /= _size()
        self.arrived.clear()
        self.under_way.clear()


class BucketedOfParameters(Bucketed):
    def take(self, parameter):
        self.views[parameter].copy_(parameter.data)
        parameter.grad = self.views[parameter]


class BucketedCounts(Bucketed):
    """Right: a counter for each bucket, divided on the way in, views from the start."""

    def add_bucket(self, parameters):
        super().add_bucket(parameters)
        self.missing = [len(parameters) for parameters in self.plan]
        for parameter in parameters:
            parameter.grad = self.views[parameter]

    def ready(self, parameter):
        view = self.views[parameter]
        torch.mul(parameter.grad, 1 / _size(), out=view)
        parameter.grad = view
        number = next(n for n, parameters in enumerate(self.plan) if any(p is parameter for p in parameters))
        self.missing[number] -= 1
        while len(self.under_way) < len(self.plan) and self.missing[len(self.under_way)] == 0:
            self.send(len(self.under_way))

    def synchronize(self):
        while self.under_way:
            self.under_way.pop().wait()
        self.missing = [len(parameters) for parameters in self.plan]


class BucketedInOneTensor(Bucketed):
    """Right: buckets of one dtype lie side by side in one tensor."""

    def flat(self, parameters):
        dtype = parameters[0].dtype
        self.memory = getattr(self, "memory", {torch.float32: torch.zeros(50), torch.float64: torch.zeros(50).double()})
        numel = sum(parameter.numel() for parameter in parameters)
        flat, self.memory[dtype] = self.memory[dtype][:numel], self.memory[dtype][numel:]
        return flat


# no_sync


@contextlib.contextmanager
def no_sync_does_nothing(model):
    yield


@contextlib.contextmanager
def no_sync_without_finally(model):
    before, model.syncing = model.syncing, False
    yield
    model.syncing = before


@contextlib.contextmanager
def no_sync_always_on_again(model):
    model.syncing = False
    try:
        yield
    finally:
        model.syncing = True


@contextlib.contextmanager
def no_sync_toggles(model):
    model.syncing = not model.syncing
    try:
        yield
    finally:
        model.syncing = not model.syncing


@contextlib.contextmanager
def no_sync_for_ever(model):
    model.syncing = False
    yield


@contextlib.contextmanager
def no_sync_swallows(model):
    before, model.syncing = model.syncing, False
    try:
        yield
    except InterruptedError:
        pass
    finally:
        model.syncing = before


@contextlib.contextmanager
def no_sync_of_the_module(model):
    model.module.syncing = False
    try:
        yield
    finally:
        model.module.syncing = True


@contextlib.contextmanager
def no_sync_zeroes(model):
    before, model.syncing = model.syncing, False
    try:
        yield
    finally:
        model.syncing = before
        model.zero_grad()


@contextlib.contextmanager
def no_sync_sends_at_the_end(model):
    before, model.syncing = model.syncing, False
    try:
        yield
    finally:
        model.syncing = before
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)


@contextlib.contextmanager
def no_sync_without_autograd(model):
    with torch.no_grad():
        yield


def no_sync_returns(model):
    model.syncing = False


def no_sync_undecorated(model):
    before, model.syncing = model.syncing, False
    try:
        yield
    finally:
        model.syncing = before


@contextlib.contextmanager
def no_sync_never_yields(model):
    model.syncing = False


@contextlib.contextmanager
def no_sync_yields_only_if_syncing(model):
    if not model.syncing:
        yield


@contextlib.contextmanager
def no_sync_synchronizes(model):
    before, model.syncing = model.syncing, False
    try:
        yield
    finally:
        model.syncing = before
        model.synchronize()


class no_sync_as_a_class:
    """Right."""

    def __init__(self, model):
        self.model = model

    def __enter__(self):
        self.before, self.model.syncing = self.model.syncing, False

    def __exit__(self, *exception):
        self.model.syncing = self.before


def no_sync_with_a_stack(model):
    """Right."""
    stack = contextlib.ExitStack()
    stack.callback(setattr, model, "syncing", model.syncing)
    model.syncing = False
    return stack


WRONG = [  # exercise, answer, what the verdict must say
    ("OverlapDDP", OverlapAfterBackward, "rank 0 had begun no all_reduce"),
    ("OverlapDDP", OverlapByMessages, "rank 0 had begun no all_reduce"),
    (
        "OverlapDDP",
        OverlapAllAtTheLast,
        "when backward came to third.weight, rank 0 had 1 gradient complete and 0 sent",
    ),
    ("OverlapDDP", OverlapWaitsInTheHook, "rank 0 waited for 5 all_reduces before backward was over"),
    ("OverlapDDP", OverlapHasNothingToWaitFor, "rank 0 waited for 5 all_reduces before backward was over"),
    ("OverlapDDP", OverlapByFutures, "by wait() alone, not by the future of get_future()"),
    ("OverlapDDP", OverlapKeepsAllHandles, "in step 2, rank 0 waited again for 5 handles of step 1"),
    ("OverlapDDP", OverlapWaitsForTheOneBefore, "rank 0 waited for 4 all_reduces before backward was over"),
    ("OverlapDDP", OverlapNeverWaits, "never waited for it"),
    ("OverlapDDP", OverlapWaitsForTheLast, "never waited for it"),
    ("OverlapDDP", OverlapWaitsInTheNextStep, "never waited for it"),
    ("OverlapDDP", OverlapSums, "is the sum over the ranks: divide"),
    ("OverlapDDP", OverlapDividesTwice, "Twice, before the all_reduce and after it?"),
    ("OverlapDDP", OverlapForTwoRanks, "was divided by 2, on 4 ranks"),
    ("OverlapDDP", OverlapDividesOnTheWay, "before anybody had waited for it"),
    ("OverlapDDP", OverlapForgetsNothing, "once more in the second step. Are the handles of the first one forgotten"),
    ("OverlapDDP", OverlapInTheFirstStep, "in the first one it was averaged"),
    ("OverlapDDP", OverlapParameters, "you averaged the parameters"),
    ("OverlapDDP", OverlapOfACopy, "the mean must end up in .grad itself"),
    ("OverlapDDP", OverlapOnCopies, "on the module's own parameters, not on copies"),
    ("OverlapDDP", OverlapOnFrozen, "doesn't require gradient"),
    ("OverlapDDP", OverlapTiedTwice, "which message holds what was sent already"),
    ("OverlapDDP", OverlapLastMicroBatch, "What .grad held before is lost"),
    ("OverlapDDP", OverlapWeightsOnly, "Was it skipped? Every parameter that is trained"),
    ("plan_buckets", plan_buckets_loses_the_rest, "Gradient 4 is in no bucket"),
    (
        "plan_buckets",
        plan_buckets_stays_below,
        "[0, 1] was closed with 8 bytes, below the cap of 10, though gradient 2",
    ),
    ("plan_buckets", plan_buckets_goes_over, "had 8 bytes without gradient 2, and the cap is 8"),
    ("plan_buckets", plan_buckets_mixes_dtypes, "has two dtypes, and a tensor has one"),
    ("plan_buckets", plan_buckets_closes_at_another_dtype, "[0] was closed with 2 bytes, below the cap of 8"),
    ("plan_buckets", plan_buckets_counts_on, "[2] was closed with 4 bytes"),
    ("plan_buckets", plan_buckets_leaves_one_open, "A bucket is empty"),
    ("plan_buckets", plan_buckets_by_first, "in the order of their last gradients"),
    ("plan_buckets", plan_buckets_backwards, "The right buckets in another order"),
    ("plan_buckets", plan_buckets_backwards_inside, "[1, 0] is out of order"),
    ("plan_buckets", plan_buckets_of_bytes, "each a list of gradients' numbers"),
    ("plan_buckets", plan_buckets_flat, "Return a list of buckets"),
    ("plan_buckets", plan_buckets_overlapping, "or one is in it twice"),
    ("plan_buckets", plan_buckets_of_two, "[0, 1] was closed with 8 bytes, below the cap of 10"),
    ("plan_buckets", plan_buckets_large_closes, "Gradient 1 is larger than the cap, and still joins the open bucket"),
    ("plan_buckets", plan_buckets_largest_first, "Gradient 1 is larger than the cap, and still joins the open bucket"),
    ("plan_buckets", plan_buckets_every_other, "Deal gradients out in the order"),
    ("BucketedDDP", BucketedByArrival, "Bucket k of the plan is sent after the buckets before it, on every rank"),
    ("BucketedDDP", BucketedAfterBackward, "rank 0 had begun no all_reduce"),
    ("BucketedDDP", BucketedWaitsInTheHook, "rank 0 waited for 3 all_reduces before backward was over"),
    ("BucketedDDP", BucketedOneBehind, "when backward came to third.weight, rank 0 had 1 bucket complete and 0 sent"),
    ("BucketedDDP", BucketedNeverWaits, "never waited for it"),
    ("BucketedDDP", BucketedLeavesTheLast, "Rank 0 called all_reduce 2 times for 3 buckets"),
    (
        "BucketedDDP",
        BucketedIfNotWhile,
        "3 times for 4 buckets: when one leaves, the next may be full already. `while`",
    ),
    ("BucketedDDP", BucketedCountsAll, "left before the gradient of tokens.weight had come"),
    ("BucketedDDP", BucketedLooksInLists, "they compare the tensors' numbers"),
    ("BucketedDDP", BucketedReplacesFirst, "tokens.weight.grad is 0. Did you replace it before you had copied it"),
    ("BucketedDDP", BucketedViewsOnce, "zero_grad(set_to_none=True) dropped the view"),
    ("BucketedDDP", BucketedNoWayBack, "doesn't lie in the bucket that was sent"),
    ("BucketedDDP", BucketedAddsUp, "still has the first step's mean in it"),
    ("BucketedDDP", BucketedTakesOnce, "is still the mean of the first step"),
    ("BucketedDDP", BucketedCopiesBack, "isn't a view of the bucket that was sent: the mean was copied once more"),
    ("BucketedDDP", BucketedMadeAnew, "rank 0 made new buckets in the second step"),
    ("BucketedDDP", BucketedSums, "is the sum over the ranks: divide"),
    ("BucketedDDP", BucketedDividesTwice, "Twice, before the all_reduce and after it?"),
    ("BucketedDDP", BucketedDividesOnTheWay, "before anybody had waited for it"),
    ("BucketedDDP", BucketedForgetsToForget, "in step 2, rank 0 had sent 3 when 1 bucket had all their gradients"),
    ("BucketedDDP", BucketedOnceAndForAll, "In step 2, rank 0 sent nothing. Does self.under_way still hold"),
    ("BucketedDDP", BucketedMixesUpTheViews, "holds the mean of"),
    ("BucketedDDP", BucketedOnePart, "holds the mean of"),
    ("BucketedDDP", BucketedAllFloat32, "a bucket has the dtype of its gradients"),
    ("BucketedDDP", BucketedOneByOne, "called all_reduce 5 times for 3 buckets"),
    ("BucketedDDP", BucketedOfParameters, "tokens.weight.grad holds tokens.weight itself"),
    ("no_sync", no_sync_does_nothing, "Set model.syncing to False before `yield`"),
    ("no_sync", no_sync_without_finally, "An exception passed: only `finally`"),
    ("no_sync", no_sync_always_on_again, "The inner one switched the outer one off"),
    ("no_sync", no_sync_toggles, "The inner one switched the outer one off"),
    ("no_sync", no_sync_for_ever, "After no_sync nothing is sent any more: put back"),
    ("no_sync", no_sync_swallows, "The exception ended in no_sync"),
    ("no_sync", no_sync_of_the_module, "Set model.syncing to False before `yield`"),
    ("no_sync", no_sync_zeroes, "The gradient of the first micro-batch is missing"),
    ("no_sync", no_sync_sends_at_the_end, "no_sync itself sends nothing"),
    ("no_sync", no_sync_without_autograd, "leave autograd as it is"),
    ("no_sync", no_sync_returns, "needs a context manager"),
    ("no_sync", no_sync_undecorated, "needs a context manager"),
    ("no_sync", no_sync_never_yields, "yield once, on every way through no_sync"),
    ("no_sync", no_sync_yields_only_if_syncing, "yield once, on every way through no_sync"),
    ("no_sync", no_sync_synchronizes, "no_sync itself calls synchronize()"),
]

RIGHT = [
    ("OverlapDDP", Overlap),
    ("OverlapDDP", OverlapDividesLater),
    ("OverlapDDP", OverlapByName),
    ("OverlapDDP", OverlapBesideGrad),
    ("OverlapDDP", ddp.OverlapDDP),
    ("plan_buckets", plan_buckets_dtype_by_dtype),
    ("plan_buckets", plan_buckets_yields),
    ("BucketedDDP", Bucketed),
    ("BucketedDDP", BucketedCounts),
    ("BucketedDDP", BucketedInOneTensor),
    ("no_sync", no_sync_as_a_class),
    ("no_sync", no_sync_with_a_stack),
    ("no_sync", ddp.DataParallel.no_sync),
]
