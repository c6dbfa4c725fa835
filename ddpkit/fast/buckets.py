"""BucketedDDP that learns the order of gradients, divides early, and can send fewer bytes or none.

It computes what `ddpkit.ddp.BucketedDDP` does, up to rounding. The differences:
- Each gradient is divided by W on its way into the bucket, in backward, where it is copied anyway.
The plain form reads and writes all of them once more after backward, where nothing hides the time.
- The first backward shows in which order gradients become ready, and that order is the plan from
then on: no bucket waits for a parameter that was wrongly expected early.
- wire_dtype: half the bytes, in bf16 (notebook 05). shared_memory: no messages at all, between
ranks on one machine; in `ddpkit.bench ddp`, 2 ranks, it took 0.81 and 0.94 of PyTorch's time.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..ddp import TWICE, DataParallel, check_gradients, plan_buckets
from ..shared_memory import SharedBuffer
from ..tools.checks import check_positive
from ..tools.views import views


class Bucket:
    """Gradients that are sent together, each a view of one contiguous tensor, `flat`.

    wire_dtype: of `message`, a copy in which they are sent (None: `flat` itself is). shared_memory:
    `message` lies in memory that all ranks of the machine see, on CPUs, and nothing is sent.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group, wire_dtype, shared_memory):
        first, sizes = parameters[0], [parameter.numel() for parameter in parameters]
        self.group, self.shared = group, None
        dtype = wire_dtype or first.dtype
        if shared_memory:
            self.shared = SharedBuffer(sum(sizes), dtype, group)
            self.message = self.shared.local
        else:
            self.message = torch.zeros(sum(sizes), dtype=dtype, device=first.device)
        self.flat = self.message.to(first.dtype)  # the message itself, if the dtype is
        self.views = dict(zip(parameters, views(self.flat, parameters), strict=True))
        self.parts = dict(zip(parameters, views(self.message, parameters), strict=True))
        self.arrived: set[nn.Parameter] = set()

    @property
    def full(self) -> bool:
        return len(self.arrived) == len(self.views)

    def copy_in(self, parameter: nn.Parameter, gradient: Tensor, share: float) -> None:
        """Write `share`, which is 1/W, times a gradient into the message: a summand of the mean."""
        part = self.parts[parameter]
        if part.dtype == gradient.dtype:
            torch.mul(gradient, share, out=part)  # in place, if the gradient is the view
        else:
            part.copy_(gradient).mul_(share)  # `out=` of another dtype makes a copy on the way
        self.arrived.add(parameter)

    def send(self) -> None:
        """Begin the all-reduce; through shared memory, wait for all ranks and end it."""
        if self.shared is not None:
            self.shared.all_reduce()
        else:
            self.work = dist.all_reduce(self.message, group=self.group, async_op=True)

    def wait(self) -> None:
        """Finish the all-reduce: from now on the views hold the means."""
        if self.shared is None:
            self.work.wait()
        if self.message is not self.flat:
            self.flat.copy_(self.message)
        self.arrived.clear()


class BucketedDDP(DataParallel):
    """Average gradients a bucket at a time, each bucket as soon as it is full, during backward.

    bucket_cap_mb: MiB that make a bucket full. wire_dtype, shared_memory: see `Bucket`.
    ValueError: bucket_cap_mb isn't positive; in `synchronize`, a trained parameter has no gradient.
    RuntimeError: a second backward without `synchronize` or `no_sync` in between.

    At first, gradients are expected in the reverse order of the parameters. The first backward
    outside `no_sync` on the group's first rank shows the real order; from the next step on it is
    the plan on all ranks. Every `.grad` is a view of its bucket.

    Cost: an all-reduce for each bucket, once a broadcast of names; each gradient is read and
    written once, divided (wire_dtype: twice). PyTorch's DDP also learns the order. Notebook 04.
    """

    def __init__(
        self, module, bucket_cap_mb=25.0, group=None, wire_dtype=None, shared_memory=False
    ):
        super().__init__(module, group)
        check_positive("Give the size of a bucket in MiB.", bucket_cap_mb=bucket_cap_mb)
        self._cap_bytes = bucket_cap_mb * 2**20
        self._how = group, wire_dtype, shared_memory
        self._order: list[nn.Parameter] | None = []  # of the first gradients; None once planned
        self._plan(list(self.trained.values())[::-1])
        for parameter in self.trained.values():
            parameter.register_post_accumulate_grad_hook(self.ready)

    def _plan(self, order: list[nn.Parameter]) -> None:
        """Make the buckets for gradients that become ready in this order."""
        self.buckets, self._bucket_of = [], {}
        for numbers in plan_buckets([(p.nbytes, p.dtype) for p in order], self._cap_bytes):
            bucket = Bucket([order[number] for number in numbers], *self._how)
            self.buckets.append(bucket)
            self._bucket_of |= dict.fromkeys(bucket.views, bucket)
        self._next = 0  # the first bucket that isn't sent yet

    def ready(self, parameter: nn.Parameter) -> None:
        """Take a parameter's new gradient into its bucket; send the buckets that are next and full.

        Autograd calls this in backward. Inside `no_sync`, nothing is divided or sent.
        RuntimeError: its gradient has come before in this step.
        """
        bucket = self._bucket_of[parameter]
        if parameter in bucket.arrived:
            raise RuntimeError(TWICE)
        gradient, parameter.grad = parameter.grad, bucket.views[parameter]
        if not self.syncing:
            if gradient is not parameter.grad:
                parameter.grad.copy_(gradient)
            return
        bucket.copy_in(parameter, gradient, 1 / dist.get_world_size(self.group))
        if self._order is not None:
            self._order.append(parameter)
        while self._next < len(self.buckets) and self.buckets[self._next].full:
            self.buckets[self._next].send()
            self._next += 1

    def synchronize(self) -> None:
        if not self.syncing:
            return
        check_gradients(self.trained)
        for parameter in self.trained.values():
            if parameter not in self._bucket_of[parameter].arrived:  # it came inside no_sync
                self.ready(parameter)
        for bucket in self.buckets:
            bucket.wait()
        self._next = 0
        if self._order is not None:  # after the first step: plan as the first rank's gradients came
            names = {parameter: name for name, parameter in self.trained.items()}
            order = [[names[parameter] for parameter in self._order]]
            dist.broadcast_object_list(order, group=self.group, group_src=0)
            self._order = None
            self._plan([self.trained[name] for name in order[0]])
