"""Other right answers to the exercises of notebook 04."""

import contextlib

import torch
import torch.distributed as dist

from ddpkit import cost, ddp
from ddpkit.ring import ring_all_reduce


def _begin(tensor):
    return dist.all_reduce(tensor, async_op=True)


class FlatAlone(torch.nn.Module):
    """Divided before it is sent; the parts become the gradients."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *inputs):
        return self.module(*inputs)

    def synchronize(self):
        trained = [p for p in self.module.parameters() if p.grad is not None]
        flat = torch.cat([p.grad.reshape(-1) for p in trained]) / dist.get_world_size()
        dist.all_reduce(flat)
        for parameter in trained:
            parameter.grad = flat[: parameter.numel()].view(parameter.shape)
            flat = flat[parameter.numel() :]


class OverlapAlone(torch.nn.Module):
    """Nothing of the library's; divided after the sum, handles in a list, a hook of its own."""

    def __init__(self, module):
        super().__init__()
        self.module, self.works = module, []
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.send)

    def forward(self, *inputs):
        return self.module(*inputs)

    def send(self, parameter):
        self.works.append((_begin(parameter.grad), parameter))

    def synchronize(self):
        while self.works:
            work, parameter = self.works.pop()
            work.wait()
            parameter.grad /= dist.get_world_size()


class OverlapBesideGrad(OverlapAlone):
    """A copy is sent, and becomes the gradient."""

    def send(self, parameter):
        mean = parameter.grad / dist.get_world_size()
        self.works.append((_begin(mean), parameter, mean))

    def synchronize(self):
        for work, parameter, mean in self.works:
            work.wait()
            parameter.grad = mean
        self.works.clear()


def plan_buckets_dtype_by_dtype(sizes, cap_bytes):
    """A pass for each dtype, a running sum, tuples."""
    plan = []
    for dtype in {dtype for _, dtype in sizes}:
        bucket, total = [], 0
        for number, (nbytes, its_dtype) in enumerate(sizes):
            if its_dtype == dtype:
                bucket.append(number)
                total += nbytes
                if total >= cap_bytes:
                    plan.append(tuple(bucket))
                    bucket, total = [], 0
        if bucket:
            plan.append(tuple(bucket))
    return tuple(sorted(plan, key=max))


class Bucketed(torch.nn.Module):
    """A counter for each bucket, divided on the way in, views from the start."""

    def __init__(self, module, bucket_cap_mb):
        super().__init__()
        self.module, self.works, self.flats, self.views = module, [], [], {}
        order = [p for p in module.parameters() if p.requires_grad][::-1]
        plan = ddp.plan_buckets([(p.nbytes, p.dtype) for p in order], bucket_cap_mb * 2**20)
        self.plan = [[order[number] for number in numbers] for numbers in plan]
        for parameters in self.plan:
            self.add_bucket(parameters)
        for parameter in order:
            parameter.register_post_accumulate_grad_hook(self.ready)
        self.missing = [len(parameters) for parameters in self.plan]

    def forward(self, *inputs):
        return self.module(*inputs)

    def flat(self, parameters):
        numel = sum(parameter.numel() for parameter in parameters)
        return torch.zeros(numel, dtype=parameters[0].dtype)

    def add_bucket(self, parameters):
        self.flats.append(self.flat(parameters))
        at = 0
        for parameter in parameters:
            part = self.flats[-1][at : at + parameter.numel()]
            self.views[parameter] = parameter.grad = part.view_as(parameter)
            at += parameter.numel()

    def ready(self, parameter):
        view = self.views[parameter]
        torch.mul(parameter.grad, 1 / dist.get_world_size(), out=view)
        parameter.grad = view
        for number, parameters in enumerate(self.plan):
            self.missing[number] -= any(each is parameter for each in parameters)
        while len(self.works) < len(self.plan) and self.missing[len(self.works)] == 0:
            self.works.append(_begin(self.flats[len(self.works)]))

    def synchronize(self):
        while self.works:
            self.works.pop().wait()
        self.missing = [len(parameters) for parameters in self.plan]


class BucketedInOneTensor(Bucketed):
    """Buckets of one dtype lie side by side in one tensor."""

    def flat(self, parameters):
        if not self.flats:
            self.memory = {dtype: torch.zeros(50, dtype=dtype) for dtype in DTYPES}
        numel = sum(parameter.numel() for parameter in parameters)
        memory = self.memory[parameters[0].dtype]
        self.memory[parameters[0].dtype] = memory[numel:]
        return memory[:numel]


class BucketOfSlices:
    """Cut by hand, views from the start, always copied."""

    def __init__(self, parameters):
        self.flat = torch.empty(sum(p.numel() for p in parameters), dtype=parameters[0].dtype)
        self.views, start = {}, 0
        for parameter in parameters:
            part = self.flat[start : start + parameter.numel()]
            self.views[parameter] = parameter.grad = part.reshape(parameter.shape)
            start += parameter.numel()

    def take(self, parameter):
        self.views[parameter].copy_(parameter.grad)
        parameter.grad = self.views[parameter]


def one_wire_from_the_last(ready_s, travel_s):
    done = []
    for number, ready in enumerate(ready_s):
        done.append(travel_s[number] + (max(ready, done[-1]) if done else ready))
    return [[end - seconds, end] for end, seconds in zip(done, travel_s, strict=True)]


DTYPES = torch.float32, torch.float64


class no_sync_as_a_class:
    def __init__(self, model):
        self.model = model

    def __enter__(self):
        self.before, self.model.syncing = self.model.syncing, False

    def __exit__(self, *exception):
        self.model.syncing = self.before


RIGHT = [
    ("FlatDDP", FlatAlone),
    ("OverlapDDP", OverlapAlone),
    ("OverlapDDP", OverlapBesideGrad),
    ("plan_buckets", plan_buckets_dtype_by_dtype),
    ("Bucket", BucketOfSlices),
    ("one_wire", one_wire_from_the_last),
    ("BucketedDDP", Bucketed),
    ("BucketedDDP", BucketedInOneTensor),
    ("no_sync", no_sync_as_a_class),
]


def flat_round_a_ring(gradients):
    flat = ring_all_reduce(torch.cat([gradient.flatten() for gradient in gradients]))
    return flat / dist.get_world_size()


class FlatRing(ddp.FlatDDP):
    """Notebook 02's ring, which sends what an all_reduce sends."""

    def synchronize(self):
        gradients = [parameter.grad for parameter in self.trained.values()]
        flat = flat_round_a_ring(gradients)
        sizes = [gradient.numel() for gradient in gradients]
        for gradient, part in zip(gradients, flat.split(sizes), strict=True):
            gradient.copy_(part.view_as(gradient))


RIGHT += [("FlatDDP", FlatRing)]


def plan_that_empties_its_list(sizes, cap_bytes):
    plan = ddp.plan_buckets(list(sizes), cap_bytes)
    sizes.clear()
    return plan


def plan_that_remembers(sizes, cap_bytes, seen=[]):  # noqa: B006
    seen.append(ddp.plan_buckets(sizes, cap_bytes))
    return seen[0]


def wire_that_overwrites(ready_s, travel_s):
    spans = cost.one_wire(list(ready_s), travel_s)
    ready_s[:] = [start for start, _ in spans]
    return spans


def plan_by_the_size_of_a_number(sizes, cap_bytes):
    numbers = [torch.bfloat16 if dtype.itemsize == 2 else dtype for _, dtype in sizes]
    return ddp.plan_buckets([(n, d) for (n, _), d in zip(sizes, numbers, strict=True)], cap_bytes)


@contextlib.contextmanager
def no_sync_unless_stopped(model):
    before, model.syncing = model.syncing, False
    try:
        yield
    except Exception:
        model.syncing = before
        raise
    model.syncing = before


WRONG = [
    ("plan_buckets", plan_by_the_size_of_a_number, "2.0: float16"),
    ("no_sync", no_sync_unless_stopped, "an exception inside"),
    ("plan_buckets", plan_that_empties_its_list, "`sizes` isn't what it was"),
    ("plan_buckets", plan_that_remembers, "once more in the same process"),
    ("one_wire", wire_that_overwrites, "`ready_s` isn't what it was"),
]
