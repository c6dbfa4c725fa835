"""PyTorch's DistributedDataParallel, in three steps from NaiveDDP: send less often, and earlier.

    model = BucketedDDP(model)      # all ranks begin with rank 0's parameters and buffers
    loss.backward()
    model.synchronize()             # every .grad is now the mean over the ranks
    optimizer.step()

    class          messages in a step       when they are sent
    NaiveDDP       one a parameter          after backward
    FlatDDP        one a dtype              after backward; gradients are copied there and back
    OverlapDDP     one a parameter          in backward, as each gradient is ready
    BucketedDDP    one a bucket             in backward, as each bucket is full

Each sends every gradient once; a weight used in two places is one parameter. `ddpkit.data_parallel`
has their base: equal replicas at the start, `no_sync`. Wrap a module only once: its hooks stay.

Li et al. 2020. Notebook 04.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from .data_parallel import DataParallel, NaiveDDP, check_gradients
from .tools.checks import check_positive

__all__ = ["Bucket", "BucketedDDP", "FlatDDP", "NaiveDDP", "OverlapDDP", "plan_buckets"]

TWICE = (
    "backward ran twice without synchronize(): call it after each backward. To add up several "
    "backwards, run all but the last inside `with model.no_sync():`; a gradient that is being sent "
    "can't be added to. (If it was one backward, give activation checkpoints use_reentrant=False.)"
)


class FlatDDP(DataParallel):
    """Average all gradients of a dtype in one message. Cost: they are copied twice. Notebook 04."""

    def synchronize(self):
        if not self.syncing:
            return
        check_gradients(self.trained)
        gradients = [parameter.grad for parameter in self.trained.values()]
        # One dtype after the other, in the same order on all ranks: replicas are alike.
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            alike = [gradient for gradient in gradients if gradient.dtype == dtype]
            flat = torch.cat([gradient.flatten() for gradient in alike])
            dist.all_reduce(flat, group=self.group)
            flat /= dist.get_world_size(self.group)
            # And back, each part into its gradient.
            sizes = [gradient.numel() for gradient in alike]
            for gradient, part in zip(alike, flat.split(sizes), strict=True):
                gradient.copy_(part.view_as(gradient))


class OverlapDDP(DataParallel):
    """Average each gradient as soon as backward has it, while the others are still computed.

    Ranks must go through the module alike: the n-th all-reduce adds up the n-th gradient of each.
    RuntimeError: a backward after one outside `no_sync`, without `synchronize` in between.
    Cost: an all-reduce for each parameter; no computing hides the last ones. Notebook 04.
    """

    def __init__(self, module: nn.Module, group: ProcessGroup | None = None):
        super().__init__(module, group)
        self.works: dict[nn.Parameter, dist.Work] = {}
        for parameter in self.trained.values():
            parameter.register_post_accumulate_grad_hook(self.ready)

    def ready(self, parameter):  # called by autograd, in backward, on its own thread on a GPU
        if parameter in self.works:
            raise RuntimeError(TWICE)
        if self.syncing:
            parameter.grad /= dist.get_world_size(self.group)
            work = dist.all_reduce(parameter.grad, group=self.group, async_op=True)
            self.works[parameter] = work

    def synchronize(self):
        if not self.syncing:
            return
        check_gradients(self.trained)
        for parameter in self.trained.values():
            if parameter not in self.works:  # its gradient came inside no_sync
                self.ready(parameter)
        for work in self.works.values():
            work.wait()
        self.works.clear()


def plan_buckets(sizes: Sequence[tuple[int, torch.dtype]], cap_bytes: float) -> list[list[int]]:
    """Deal gradients into buckets of one dtype each; return the indices of each bucket's gradients.

    sizes: (bytes, dtype) of each gradient, in the order in which they become ready. cap_bytes: a
    bucket with this many bytes or more is full. Buckets are in the order of their last gradients:
    send them in this order. PyTorch's `compute_bucket_assignment_by_size`. Notebook 04.
    """
    full: list[list[int]] = []
    filling: dict[torch.dtype, list[int]] = {}  # at most one open bucket per dtype
    for number, (_, dtype) in enumerate(sizes):
        bucket = filling.setdefault(dtype, [])
        bucket.append(number)
        if sum(sizes[member][0] for member in bucket) >= cap_bytes:
            full.append(filling.pop(dtype))
    buckets = full + list(filling.values())
    return sorted(buckets, key=lambda bucket: bucket[-1])


class Bucket:
    """Gradients that are sent together: `flat`, a 1-D tensor, and `views`, each parameter's part.

    parameters: of one dtype. arrived: those whose gradients are in `flat`, ready to be sent; none
    inside `no_sync`. Megatron's contiguous grad buffer. Notebook 04.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]):
        first = parameters[0]
        sizes = [parameter.numel() for parameter in parameters]
        self.flat = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        parts = zip(parameters, self.flat.split(sizes), strict=True)
        self.views = {parameter: part.view_as(parameter) for parameter, part in parts}
        self.arrived: set[nn.Parameter] = set()

    def take(self, parameter: nn.Parameter) -> None:
        """Copy parameter.grad into the parameter's view of `flat`, and let `.grad` be that view."""
        view = self.views[parameter]
        if parameter.grad is not view:  # zero_grad() dropped it, so backward made a new tensor
            view.copy_(parameter.grad)
            parameter.grad = view

    @property
    def full(self) -> bool:
        return len(self.arrived) == len(self.views)


class BucketedDDP(DataParallel):
    """Average gradients a bucket at a time, each bucket as soon as it is full, during backward.

    bucket_cap_mb: MiB that make a bucket full, as in PyTorch. From the first backward on, every
    `.grad` is a view of its bucket. All ranks send buckets in the order of the plan, whichever is
    full first: the n-th all-reduce of one rank is added to the n-th of the others.
    ValueError: bucket_cap_mb isn't positive. RuntimeError: a backward after one outside `no_sync`,
    without `synchronize` in between.

    Cost: an all-reduce for each bucket; the buckets stay in memory, as large as all gradients; each
    gradient is copied once, unless zero_grad left zeros in its view. `ddpkit.fast.buckets` learns
    the order of gradients. Notebook 04.
    """

    def __init__(
        self, module: nn.Module, bucket_cap_mb: float = 25.0, group: ProcessGroup | None = None
    ):
        super().__init__(module, group)
        check_positive("Give the size of a bucket in MiB.", bucket_cap_mb=bucket_cap_mb)
        backwards = list(self.trained.values())[::-1]  # roughly the order of backward
        sizes = [(parameter.nbytes, parameter.dtype) for parameter in backwards]
        self.buckets = []
        for numbers in plan_buckets(sizes, bucket_cap_mb * 2**20):
            self.buckets.append(Bucket([backwards[number] for number in numbers]))
        self.flats = [bucket.flat for bucket in self.buckets]
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.views}
        self.works: list[dist.Work] = []  # the handles of buckets 0, 1, ...
        for parameter in backwards:
            parameter.register_post_accumulate_grad_hook(self.ready)

    def ready(self, parameter):
        bucket = self.bucket_of[parameter]
        if parameter in bucket.arrived:
            raise RuntimeError(TWICE)
        bucket.take(parameter)  # also inside no_sync: the next micro-batch adds to the view
        if not self.syncing:
            return
        bucket.arrived.add(parameter)
        # Send what is full, in the plan's order: a full bucket waits for those before it.
        while len(self.works) < len(self.buckets) and self.buckets[len(self.works)].full:
            flat = self.buckets[len(self.works)].flat
            work = dist.all_reduce(flat, group=self.group, async_op=True)
            self.works.append(work)

    def synchronize(self):
        if not self.syncing:
            return
        check_gradients(self.trained)
        for parameter, bucket in self.bucket_of.items():
            if parameter not in bucket.arrived:  # its gradient came inside no_sync
                self.ready(parameter)
        # Every bucket is under way now, and most have arrived while backward computed.
        for work, bucket in zip(self.works, self.buckets, strict=True):
            work.wait()
            bucket.flat /= dist.get_world_size(self.group)
            bucket.arrived.clear()
        self.works.clear()
