"""An optimizer whose state is cut among W ranks: parameters in buckets, a step in three phases.

Phase 1, in backward: each bucket that is full is reduce-scattered. Phase 2, in `step`: the shards
are updated, and each is all-gathered at once. Phase 3, also in `step`: all gathers are awaited.
"""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .. import transport as torchs
from ..data_parallel import SendsGradients
from ..ddp import plan_buckets
from ..tools.checks import check_in_group, check_positive, check_same_on_all_ranks
from ..tools.views import views


class Bucket:
    """Parameters that are sent together: from now on their values are views of one tensor, `flat`.

    gradients: a tensor like it, into which their gradients are copied. Both are 1-D, and padded so
    that W divides their length. shard: this rank's 1/W of `flat`, a view, which the optimizer
    updates. ready: the parameters whose gradients have been copied in.
    """

    def __init__(self, parameters: list[nn.Parameter], group: ProcessGroup | None):
        self.parameters = parameters
        self.group = group
        self.numels = [parameter.numel() for parameter in parameters]
        numel = sum(self.numels)
        self.numel = numel + -numel % dist.get_world_size(group)  # padded: W divides it
        self.flat = self.zeros()
        self.gradients = self.zeros()
        # From here on a parameter's values are a view of `flat`: an all-gather fills them.
        for parameter, value in zip(parameters, self.split(self.flat), strict=True):
            parameter.data = value.copy_(parameter.detach())
        self.views = dict(zip(parameters, self.split(self.gradients), strict=True))
        self.ready: set[nn.Parameter] = set()  # parameters whose gradients are in their views
        self.shard = nn.Parameter(torchs.shard(self.flat, group))

    def zeros(self) -> Tensor:
        return self.parameters[0].new_zeros(self.numel)

    def split(self, flat: Tensor) -> list[Tensor]:
        """Return each parameter's part of `flat`, in order: views in the parameters' shapes."""
        return views(flat, self.parameters)

    def mean(self) -> Tensor:  # of the gradients, for `shard`, after the reduce-scatter
        return torchs.shard(self.gradients, self.group)


class ZeroOptimizer(SendsGradients, torch.optim.Optimizer):
    """Any elementwise optimizer of torch; each rank keeps state for 1/W of the parameters.

    params, kwargs: as `optimizer_cls` takes them, alike on all ranks of `group`; freeze some first.
    bucket_cap_mb: MiB that make a bucket full. transport: sends the buckets (`ddpkit.transport`).
    ValueError: this rank isn't in `group`; parameters differ between ranks or, in `step`, have no
    gradient; bucket_cap_mb isn't positive.
    All ranks start with the parameters of the group's first. From then on trained ones are views of
    buckets: write into them, don't replace their data. `.grad` is None once it has been sent.
    Cost of a step and rank: 2(W-1)/W of the parameters sent, half of it while backward goes on.
    KΨ/W bytes of state for Ψ parameters, K = 8 for AdamW in float32. Rajbhandari et al. 2020, 5.1.
    """

    def __init__(
        self,
        params: Iterable,
        optimizer_cls: type[torch.optim.Optimizer],
        bucket_cap_mb: float = 25.0,
        group: ProcessGroup | None = None,
        transport=torchs,
        **kwargs,
    ):
        check_in_group("ZeroOptimizer", group)
        check_positive("Give the size of a bucket in MiB.", bucket_cap_mb=bucket_cap_mb)
        # An optimizer's defaults are known only to an instance: one is made for them, and dropped.
        defaults = optimizer_cls([nn.Parameter(torch.empty(0))], **kwargs).defaults
        super().__init__(params, defaults)
        self.group = group
        self.transport = transport
        self.buckets: list[Bucket] = []
        self.bucket_of: dict[nn.Parameter, Bucket] = {}
        self.works: list[dist.Work] = []  # of the phase that is under way, a bucket each
        self.places = {}  # {parameter: index of its options in param_groups}
        for place, options in enumerate(self.param_groups):
            self.places |= dict.fromkeys(options["params"], place)
        named = [(f"parameter {number}", p) for number, p in enumerate(self.places)]
        check_same_on_all_ranks("parameters", named, group)
        # Equal replicas at the start, as in DDP.
        for parameter in self.places:
            dist.broadcast(parameter.detach(), group=group, group_src=0)
        # Buckets of parameters that have options and dtype in common, in the order of backward.
        backwards = [parameter for parameter in reversed(self.places) if parameter.requires_grad]
        sizes = [(p.nbytes, (self.places[p], p.dtype)) for p in backwards]
        for numbers in plan_buckets(sizes, bucket_cap_mb * 2**20):
            bucket = self.make_bucket([backwards[number] for number in numbers])
            bucket.optimizer = optimizer_cls([self.options(bucket)], **kwargs)
            self.buckets.append(bucket)
            self.bucket_of |= dict.fromkeys(bucket.parameters, bucket)
        for parameter in backwards:
            parameter.register_post_accumulate_grad_hook(self.on_gradient)

    def make_bucket(self, parameters: list[nn.Parameter]) -> Bucket:
        return Bucket(parameters, self.group)

    def options(self, bucket: Bucket) -> dict:  # at present: a scheduler may change them
        """Return the parameter group of a bucket's own optimizer: its options, and its shard."""
        place = self.places[bucket.parameters[0]]
        return self.param_groups[place] | {"params": [bucket.shard]}

    def on_gradient(self, parameter: nn.Parameter) -> None:
        """Send a gradient as soon as backward has it; inside `no_sync` keep it, to be added to.

        RuntimeError: backward ran twice without `step`, `zero_grad` or `no_sync`.
        """
        bucket = self.bucket_of[parameter]
        if parameter in bucket.ready:
            raise RuntimeError("backward ran twice: step() or zero_grad() first, or use no_sync()")
        if self.syncing:
            self.send(parameter)
        elif parameter.grad is not bucket.views[parameter]:
            # Autograd adds the next micro-batch's gradient in place, into the bucket.
            parameter.grad = bucket.views[parameter].copy_(parameter.grad)

    def send(self, parameter: nn.Parameter) -> None:
        """Phase 1: take a gradient into its bucket, and reduce-scatter buckets that are full."""
        bucket = self.bucket_of[parameter]
        share = 1 / dist.get_world_size(self.group)
        torch.mul(parameter.grad, share, out=bucket.views[parameter])
        parameter.grad = None
        bucket.ready.add(parameter)
        # In the plan's order, alike on all ranks: a full bucket waits for those before it.
        for bucket in self.buckets[len(self.works) :]:
            if len(bucket.ready) < len(bucket.parameters):
                break
            work = self.transport.start_reduce_scatter(bucket.gradients, self.group)
            self.works.append(work)

    def synchronize(self) -> None:
        """Wait until each bucket's `shard.grad` is the mean over the ranks; `step` also calls this.

        Gradients that `no_sync` has kept are sent first. ValueError: a parameter has no gradient.
        """
        late = [p for p, bucket in self.bucket_of.items() if p not in bucket.ready]
        without = [str(tuple(parameter.shape)) for parameter in late if parameter.grad is None]
        if without:
            got = f"rank {dist.get_rank()} has no gradient for parameters of {', '.join(without)}"
            raise ValueError(f"{got}: does the loss depend on them? Freeze them before, if not.")
        for parameter in late:  # their gradients were made inside no_sync
            self.send(parameter)
        for bucket, work in zip(self.buckets, self.works, strict=True):
            work.wait()
            bucket.shard.grad = bucket.mean()

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Update this rank's shards, and gather all parameters; return what `closure` returns.

        Phase 2: update, and start to all-gather the shards. Phase 3: wait. Gradients are dropped.
        """
        with torch.enable_grad():
            loss = closure() if closure else None
        self.synchronize()
        self.works = []
        for bucket in self.buckets:
            bucket.optimizer.param_groups[0].update(self.options(bucket))
            bucket.optimizer.step()  # writes into `flat`: `shard` is a view of it
            work = self.transport.start_all_gather(bucket.flat, self.group)
            self.works.append(work)
        self.zero_grad()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, after waiting for those that are being sent."""
        for work in self.works:
            work.wait()
        for bucket in self.buckets:
            bucket.ready.clear()
            bucket.shard.grad = None
        self.works = []
        super().zero_grad(set_to_none)

    def state_bytes(self) -> int:
        """Return the bytes of this rank's state after a step, without the counters of steps."""
        total = 0
        for bucket in self.buckets:
            for kept in bucket.optimizer.state[bucket.shard].values():
                if kept.shape == bucket.shard.shape:  # not a counter of steps
                    total += kept.nbytes
        return total
