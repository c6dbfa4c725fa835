"""ZeRO: data parallelism without W copies of the optimizer's state.

Replicated AdamW keeps two moments of every parameter on every rank, all of them alike. Here each rank keeps those of
one shard, 1/W of the parameters, and updates only these:

    model = ...                                             # on every rank; no DDP around it
    optimizer = ZeroOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    ...
    loss.backward()         # reduce-scatter: each rank gets the mean gradient of its shard
    optimizer.step()        # it updates the shard; all-gather: every rank gets all parameters

A reduce-scatter and an all-gather are the two halves of an all-reduce, so the wire carries what it does without ZeRO.

    stage    each rank keeps 1/W of                        sent by each rank in a step
    0        nothing                                       2(W-1)/W of the parameters
    1        the optimizer's state (`ZeroOptimizer`)       2(W-1)/W
    2        and of the gradients                          2(W-1)/W
    3        and of the parameters (`ShardedLinear`)       3(W-1)/W: they are gathered for forward and for backward

W is the number of ranks of the group, Ψ the number of parameters that are trained, K the bytes of optimizer state for
each: 8 for AdamW in float32; 12 where parameters are half precision, with a float32 master copy.

Rajbhandari et al. 2020. Notebook 07.
"""

import contextlib
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .ddp import plan_buckets
from .fast.ring import Trip
from .ring import ring_all_gather, ring_reduce_scatter
from .shared_memory import SharedBuffer
from .tools.checks import check_same_on_all_ranks

# The plan: numbers only


class Part(NamedTuple):
    """Elements `start` to `stop` of a parameter, which lie in a shard from its element `at` on."""

    parameter: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True)
class BucketPlan:
    """Where parameters lie in a flat buffer of W shards of equal length, of which rank r owns number r.

    parameters: their numbers. numels, starts: the elements of each, and where in the buffer it begins. numel: of the
    buffer. kind: what all of them have in common.
    """

    parameters: tuple[int, ...]
    numels: tuple[int, ...]
    starts: tuple[int, ...]
    numel: int
    world_size: int
    kind: Hashable = None

    @property
    def shard_numel(self) -> int:
        return self.numel // self.world_size

    @property
    def padding(self) -> int:
        """Elements that belong to no parameter."""
        return self.numel - sum(self.numels)

    def owned(self, rank: int) -> list[Part]:
        """The parts of parameters in the shard of `rank`."""
        begin, end = rank * self.shard_numel, (rank + 1) * self.shard_numel
        parts = []
        for parameter, numel, first in zip(self.parameters, self.numels, self.starts, strict=True):
            start, stop = max(begin - first, 0), min(end - first, numel)
            if start < stop:
                parts.append(Part(parameter, start, stop, first + start - begin))
        return parts


def plan_shards(
    parameters: dict[int, tuple[int, int, Hashable]], world_size: int, cap_bytes: float = float("inf"), align: int = 1
) -> list[BucketPlan]:
    """Which parameters share a bucket, where they lie in it, and so which rank owns which part of them.

    parameters: {number: (elements, bytes, kind)}, in the order in which gradients become ready; a bucket has one kind.
    cap_bytes: of a bucket, as in `plan_buckets`. align: parameters and shards begin at multiples of so many elements;
    what lies between is padding.
    """
    numbers, sizes = list(parameters), [(nbytes, kind) for _, nbytes, kind in parameters.values()]
    plans = []
    for places in plan_buckets(sizes, cap_bytes):
        bucket = [numbers[place] for place in places]
        starts, end = [], 0
        for number in bucket:
            starts.append(_round_up(end, align))
            end = starts[-1] + parameters[number][0]
        numels = tuple(parameters[number][0] for number in bucket)
        whole, kind = _round_up(end, world_size * align), parameters[bucket[0]][2]
        plans.append(BucketPlan(tuple(bucket), numels, tuple(starts), whole, world_size, kind))
    return plans


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


# The buffers

ALIGN = 16  # elements: 64 bytes of float32, a cache line
MASTER = "master"  # its name in a state_dict, beside AdamW's exp_avg
# Torch's own; 2.13 gave them new names.
torch_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
torch_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _reduce_scatter(flat: Tensor, group: ProcessGroup | None) -> Tensor:
    """Leave this rank's shard of the sum in `flat`; return it."""
    if not flat.is_cuda:
        return ring_reduce_scatter(flat, group)
    own = flat.chunk(dist.get_world_size(group))[dist.get_rank(group)]
    torch_reduce_scatter(own, flat, group=group)
    return own


def _all_gather(flat: Tensor, group: ProcessGroup | None) -> Tensor:
    """Complete `flat`, of which this rank has its own shard; return it."""
    if not flat.is_cuda:
        return ring_all_gather(flat, group)
    torch_all_gather(flat, flat.chunk(dist.get_world_size(group))[dist.get_rank(group)], group=group)
    return flat


class Bucket:
    """Parameters that travel together, and their gradients: two contiguous tensors, of which this rank owns a shard.

    parameters: those of the plan. They become views of `flat`, with the values of the group's first rank. make: called
    with the shard, returns its optimizer. shared_memory: send nothing; the ranks are on one machine, and both tensors
    lie in memory that all of them see.

    shard: what the optimizer updates. It is a view of `flat`, or a float32 copy of one if parameters are half
    precision: an update smaller than the spacing of that format would be lost. Its `.grad` is there from `receive` to
    `spread`.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Sequence[nn.Parameter],
        group: ProcessGroup | None,
        make: Callable[[nn.Parameter], torch.optim.Optimizer],
        shared_memory: bool,
    ):
        first, rank = parameters[0], dist.get_rank(group)
        self.plan, self._group, self._shared = plan, group, []
        if shared_memory:
            self._shared = [SharedBuffer(plan.numel, first.dtype, group) for _ in range(2)]
            self.flat, self.gradients = (buffer.local for buffer in self._shared)
        else:
            self.flat, self.gradients = first.new_zeros((2, plan.numel), requires_grad=False).unbind()
        self._own, self._own_gradient = (flat.chunk(plan.world_size)[rank] for flat in (self.flat, self.gradients))
        self.views = {}
        for parameter, start in zip(parameters, plan.starts, strict=True):
            place = slice(start, start + parameter.numel())
            value = self.flat[place].view_as(parameter).copy_(parameter.detach())
            parameter.data = value
            self.views[parameter] = self.gradients[place].view_as(parameter)
        dist.broadcast(self.flat, group=group, group_src=0)
        self.shard = nn.Parameter(self._own.float() if self.half else self._own)
        self.optimizer = make(self.shard)
        self.ready: set[nn.Parameter] = set()
        self._finish: Callable[[], object] = _nothing  # what is on its way

    @property
    def half(self) -> bool:
        return self.flat.dtype.itemsize < torch.float32.itemsize

    @property
    def full(self) -> bool:
        return len(self.ready) == len(self.views)

    def send(self, previous: "Bucket | None") -> None:
        """Begin the reduce-scatter. previous: what the ring of CPUs ends first, for it takes one bucket at a time."""
        if self._shared:
            self._shared[1].reduce_scatter()
        elif self.gradients.is_cuda:
            where = self._own_gradient, self.gradients
            self._finish = torch_reduce_scatter(*where, group=self._group, async_op=True).wait
        else:
            if previous:
                previous.wait()
            self._finish = Trip(self.gradients, range(1, dist.get_world_size(self._group)), self._group).wait

    def wait(self) -> None:
        """End what is on its way, if anything is."""
        self._finish()
        self._finish = _nothing

    def receive(self) -> None:
        """End the reduce-scatter, unless that was done."""
        if self.shard.grad is None:
            self.wait()
            self.shard.grad = self._own_gradient.to(self.shard.dtype)  # itself, if the dtype is the same

    def spread(self, previous: "Bucket | None") -> None:
        """Begin to give all ranks what the shard has become. previous: as in `send`."""
        if self.half:
            self._own.copy_(self.shard.detach())
        self.empty()
        if self._shared:
            self._shared[0].all_gather()
        elif self.flat.is_cuda:
            self._finish = torch_all_gather(self.flat, self._own, group=self._group, async_op=True).wait
        else:
            if previous:
                previous.wait()
            self._finish = Trip(self.flat, range(w := dist.get_world_size(self._group), 2 * w - 1), self._group).wait

    def empty(self) -> None:
        """Be ready for the next step."""
        self.shard.grad = None
        self.ready.clear()

    @property
    def state(self) -> dict:
        """What the optimizer keeps for the shard, and the master copy if there is one."""
        found = self.optimizer.state.get(self.shard, {})
        return {**found, MASTER: self.shard.detach()} if found and self.half else found

    def per_element(self, value: object) -> bool:
        return isinstance(value, Tensor) and value.shape == self.shard.shape

    def gather(self) -> dict[int, dict]:
        """{number of a parameter: its state}, put together from all ranks."""
        states = {number: {} for number in self.plan.parameters if self.state}
        for name, value in self.state.items():
            values = self._whole(value) if self.per_element(value) else [value] * len(self.views)
            for state, each in zip(states.values(), values, strict=bool(states)):
                state[name] = each.clone() if isinstance(each, Tensor) else each
        return states

    def _whole(self, own: Tensor) -> list[Tensor]:
        """What all ranks have for each parameter, in its shape. own: of this rank's shard."""
        flat = own.new_empty(self.plan.numel)
        flat.chunk(self.plan.world_size)[dist.get_rank(self._group)].copy_(own)
        _all_gather(flat, self._group)
        spans = zip(self.views, self.plan.starts, strict=True)
        return [flat[start : start + parameter.numel()].view_as(parameter) for parameter, start in spans]

    def load(self, states: dict[int, dict]) -> None:
        """Take this rank's part of what `gather` made, here or elsewhere, or of a plain optimizer's state.

        ValueError: something that is kept once for the shard, as the counter of steps, differs between parameters.
        """
        entries = {number: states.get(number, {}) for number in self.plan.parameters}
        loaded = {name: self._own_part(name, entries) for name in dict.fromkeys(itertools.chain(*entries.values()))}
        master = loaded.pop(MASTER, self._own)
        if self.half:
            self.shard.data.copy_(master)
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": {0: loaded} if loaded else {}, "param_groups": groups})

    def _own_part(self, name: str, entries: dict[int, dict]) -> object:
        """Of what `entries` have under `name`, what belongs to this rank's shard."""
        values = {number: entry.get(name) for number, entry in entries.items()}
        shapes = [getattr(value, "shape", None) for value in values.values()]
        if name != "step" and shapes == [parameter.shape for parameter in self.views]:
            mine = torch.zeros_like(self.shard)
            for number, start, stop, at in self.plan.owned(dist.get_rank(self._group)):
                mine[at : at + stop - start] = values[number].flatten()[start:stop]
            return mine
        first, *others = values.values()
        if any(value is None or value != first for value in (first, *others)):
            raise ValueError(
                f"expected the same {name!r} for parameters {', '.join(map(str, values))}, got "
                f"{', '.join(map(str, values.values()))}: they share a shard, and it has one. "
                "Give them groups of their own."
            )
        return first.clone() if isinstance(first, Tensor) else first


def _nothing() -> None:
    """What there is to wait for when nothing is on its way."""


# The optimizer


class ZeroOptimizer(torch.optim.Optimizer):
    """Any elementwise optimizer of torch, of which every rank keeps and updates 1/W.

    params, kwargs: as `optimizer_cls` takes them, alike on all ranks; groups may have options of their own, and their
    changes, by a schedule for example, count from the next step. bucket_cap_mb: size of a bucket in MiB. group: the
    ranks that train together (None: all). unused_as_zero: a parameter without a gradient counts as having a gradient
    of zeros; without it that is an error. shared_memory: see `Bucket`.
    ValueError: an optimizer that isn't elementwise; parameters that differ between ranks; a bucket size that isn't
    positive; this rank isn't in `group`.

    All ranks begin with the parameters of the group's first, frozen ones too; a module's buffers are for
    `ddpkit.ddp.broadcast_module`. Freeze, and change the dtype, before making the optimizer, and make one: its hooks
    stay. Parameters are views from then on; write into them, don't replace them.

    Gradients are averaged in backward, a bucket at a time, in the same order on all ranks. What is on its way is gone
    from `.grad`: no rank has all of the mean. Its shard of it is in `.grad` of `shards` after `synchronize`. Several
    micro-batches make one step if all but the last run backward inside `no_sync()`; there `.grad` is a view of the
    bucket, and adds up.

    With half-precision parameters each shard has a float32 master copy; gradients travel, and are added up, in half.

    Cost of a step and rank: 2(W-1)/W of the parameters, and padding, sent; half of it while backward goes on, half
    while the next bucket is updated. (On CPUs that is the first hop, and copying takes cores that could compute: with
    two ranks on two cores a tenth is gained.) Send no messages of your own in `group` between backward and `step`.
    Memory beside parameters and gradients: KΨ/W. Rajbhandari et al. 2020, section 5.1. Notebook 07.
    """

    def __init__(
        self,
        params: Iterable,
        optimizer_cls: type[torch.optim.Optimizer],
        bucket_cap_mb: float = 25.0,
        group: ProcessGroup | None = None,
        unused_as_zero: bool = False,
        shared_memory: bool = False,
        **kwargs,
    ):
        _check_arguments(optimizer_cls, bucket_cap_mb, group)
        super().__init__(params, kwargs)
        self.group, self.unused_as_zero, self.syncing = group, unused_as_zero, True
        for options in self.param_groups:  # those that were not given
            blank = optimizer_cls([{**_options(options), "params": [nn.Parameter(torch.empty(0))]}], **kwargs)
            options.update(_options(blank.param_groups[0]))
        self.defaults = blank.defaults

        self._parameters = [parameter for options in self.param_groups for parameter in options["params"]]
        named = [(f"parameter {number}", p) for number, p in enumerate(self._parameters)]
        check_same_on_all_ranks("parameters", named, group)
        for parameter in self._parameters:
            if not parameter.requires_grad:
                dist.broadcast(parameter.detach(), group=group, group_src=0)
        self.plan = plan_shards(self._sizes(), dist.get_world_size(group), bucket_cap_mb * 2**20, ALIGN)
        self.buckets = []
        for plan in self.plan:
            parameters = [self._parameters[number] for number in plan.parameters]
            options = _options(self.param_groups[plan.kind[0]])

            def make(shard: nn.Parameter, options: dict = options) -> torch.optim.Optimizer:
                return optimizer_cls([{**options, "params": [shard]}], **kwargs)

            self.buckets.append(Bucket(plan, parameters, group, make, shared_memory))
        self._bucket_of = {parameter: bucket for bucket in self.buckets for parameter in bucket.views}
        self._next = 0  # the first bucket that isn't sent yet
        for parameter in self._bucket_of:
            parameter.register_post_accumulate_grad_hook(self._ready)

    def _sizes(self) -> dict[int, tuple[int, int, Hashable]]:
        """What `plan_shards` wants to know, in the reverse order of the parameters: about that of backward."""
        sizes = {}
        for place, options in enumerate(self.param_groups):
            for parameter in options["params"]:
                number = len(sizes)
                sizes[number] = parameter.numel(), parameter.nbytes, (place, parameter.dtype, parameter.device)
        trained = [number for number, parameter in enumerate(self._parameters) if parameter.requires_grad]
        return {number: sizes[number] for number in reversed(trained)}

    @property
    def shards(self) -> list[nn.Parameter]:
        """What this rank updates, a tensor for each bucket; with `.grad`, the mean gradient, after `synchronize`."""
        return [bucket.shard for bucket in self.buckets]

    def state_bytes(self) -> int:
        """Bytes of this rank's optimizer state, master copies included; from the first step on.

        Counted from the tensors there are. What isn't kept for each element, as AdamW's counter of steps, is left out.
        """
        kept = [(bucket, value) for bucket in self.buckets for value in bucket.state.values()]
        return sum(value.nbytes for bucket, value in kept if bucket.per_element(value))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients add up on each rank and nothing is sent."""
        before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = before

    # Backward

    def _ready(self, parameter: nn.Parameter) -> None:
        """Take a gradient into its bucket; send the buckets that are full now."""
        bucket = self._bucket_of[parameter]
        if parameter in bucket.ready:
            raise RuntimeError(TWICE)
        view = bucket.views[parameter]
        if self.syncing:
            self._take(parameter)
        elif parameter.grad is not view:
            parameter.grad = view.copy_(parameter.grad)

    def _take(self, parameter: nn.Parameter) -> None:
        bucket, share = self._bucket_of[parameter], 1 / dist.get_world_size(self.group)
        torch.mul(parameter.grad, share, out=bucket.views[parameter])
        parameter.grad = None
        bucket.ready.add(parameter)
        while self._next < len(self.buckets) and self.buckets[self._next].full:
            self.buckets[self._next].send(self.buckets[self._next - 1] if self._next else None)
            self._next += 1

    @torch.no_grad()
    def synchronize(self) -> None:
        """Wait until `.grad` of each of `shards` is the mean over the ranks. `step` does so, if nobody did.

        ValueError: a parameter has no gradient, and `unused_as_zero` is not set.
        """
        self._send_the_rest()
        for bucket in self.buckets:
            bucket.receive()

    def _send_the_rest(self) -> None:
        """What came with no backward since the last step, but inside `no_sync` before, or not at all."""
        late = [parameter for parameter, bucket in self._bucket_of.items() if parameter not in bucket.ready]
        self._fill([parameter for parameter in late if parameter.grad is None])
        for parameter in late:
            self._take(parameter)

    def _fill(self, without_gradient: list[nn.Parameter]) -> None:
        """Give these parameters a gradient of zeros, or complain about them."""
        if without_gradient and not self.unused_as_zero:
            numbers = {parameter: number for number, parameter in enumerate(self._parameters)}
            which = ", ".join(f"{numbers[p]} of shape {tuple(p.shape)}" for p in without_gradient)
            raise ValueError(
                f"rank {dist.get_rank()} has no gradient for parameter {which}, expected one for every parameter that "
                "requires it. Does the loss depend on it, and did backward run outside no_sync()? Freeze it before, or "
                "say ZeroOptimizer(..., unused_as_zero=True)."
            )
        for parameter in without_gradient:
            parameter.grad = torch.zeros_like(parameter)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Make the mean gradient of all parameters together no longer than `max_norm`; return how long it was.

        After backward, before `step`. Cost: one number all-reduced. `torch.nn.utils.clip_grad_norm_` would find no
        gradients.
        """
        self.synchronize()
        gradients = [shard.grad for shard in self.shards]
        squared = nn.utils.get_total_norm(gradients) ** 2
        dist.all_reduce(squared, group=self.group)
        norm = squared.sqrt()
        for gradient in gradients:
            gradient *= (max_norm / (norm + 1e-6)).clamp(max=1)  # as in torch
        return norm

    # Step

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Update this rank's shards with the mean gradient, and give all parameters to all ranks.

        closure: computes the loss and its gradients; returned is the loss.
        ValueError: as from `synchronize`.
        """
        with torch.enable_grad():
            loss = closure() if closure else None
        self.synchronize()
        for previous, bucket in itertools.pairwise([None, *self.buckets]):  # which spreads while this one is updated
            bucket.optimizer.param_groups[0].update(_options(self.param_groups[bucket.plan.kind[0]]))
            bucket.optimizer.step()
            bucket.spread(previous)
        for bucket in self.buckets:
            bucket.wait()
        self._next = 0
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, also those that are averaged already: after it, there is nothing to step with."""
        for bucket in self.buckets[: self._next]:
            bucket.wait()
        for bucket in self.buckets:
            bucket.empty()
        self._next = 0
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict) -> None:
        if hasattr(self, "plan"):
            raise ValueError("the plan is made: give all groups to ZeroOptimizer at once, or make a new one")
        super().add_param_group(param_group)

    # Saved and loaded

    def state_dict(self) -> dict:
        """The state of all ranks, as `optimizer_cls` without ZeRO would save it; call it on every rank.

        It loads into a ZeroOptimizer on any number of ranks, and into a plain `optimizer_cls`. With half-precision
        parameters it also has their float32 master copies, as "master". Save the module beside it, and load it first.

        Cost: (W-1)/W of the whole state sent by each rank, and KΨ bytes of memory on each, until you let go of it.
        """
        saved = super().state_dict()
        for bucket in self.buckets:
            saved["state"].update(bucket.gather())
        return saved

    def load_state_dict(self, state_dict: dict) -> None:
        """Take this rank's part of what `state_dict` returned, on any number of ranks, or a plain optimizer's did.

        ValueError: other groups than here; counters of steps that differ between parameters that share a bucket.
        """
        super().load_state_dict({**state_dict, "state": {}})
        for bucket in self.buckets:
            bucket.load(state_dict["state"])


TWICE = (
    "backward ran twice without step(): the first gradients are on their way and can't be added to. "
    "Call step() or zero_grad() after each backward, or accumulate inside `with optimizer.no_sync():`. "
    "(If it was one backward, a weight is used in two activation checkpoints: give them use_reentrant=False.)"
)


def _options(group: dict) -> dict:
    """Those of a parameter group: lr and the like."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _check_arguments(optimizer_cls: type, bucket_cap_mb: float, group: ProcessGroup | None) -> None:
    if dist.get_rank(group) < 0:
        got = f"rank {dist.get_rank()} made a ZeroOptimizer for a group that it isn't in"
        raise ValueError(f"{got}, expected one of its own. Make it on the group's ranks only.")
    if not bucket_cap_mb > 0:
        raise ValueError(f"expected bucket_cap_mb > 0, got {bucket_cap_mb}: give the size of a bucket in MiB")
    if issubclass(optimizer_cls, NOT_ELEMENTWISE):
        got = f"{optimizer_cls.__name__}, which looks at a parameter as a whole"
        raise ValueError(f"expected an elementwise optimizer, got {got}: a shard is no whole. Take AdamW, for example.")


NOT_ELEMENTWISE = torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon, torch.optim.SparseAdam


# Stage 3, of one layer


class ShardedLinear(nn.Module):
    """A Linear of which every rank keeps 1/W of weight and bias: ZeRO's stage 3, for one layer.

    linear: where the values come from, on the group's first rank; let go of it afterwards. In forward the whole is
    gathered, used and freed, and once more in backward; the gradient is reduce-scattered. So `shard.grad` is the mean
    over the ranks, and any elementwise optimizer may update `shard`.

    Cost per rank: 3(W-1)/W of the parameters sent in forward and backward; the whole layer in memory only while it
    computes. Rajbhandari et al. 2020, section 5.3 and 7.2.2. Notebook 07.
    """

    def __init__(self, linear: nn.Linear, group: ProcessGroup | None = None):
        super().__init__()
        self.group = group
        numels = {number: (p.numel(), p.nbytes, None) for number, p in enumerate(linear.parameters())}
        (self.plan,) = plan_shards(numels, dist.get_world_size(group))
        self.shapes = [parameter.shape for parameter in linear.parameters()]
        flat = linear.weight.new_zeros(self.plan.numel, requires_grad=False)
        for value, parameter in zip(self.split(flat), linear.parameters(), strict=True):
            value.copy_(parameter.detach())
        dist.broadcast(flat, group=group, group_src=0)
        self.shard = nn.Parameter(flat.chunk(self.plan.world_size)[dist.get_rank(group)].clone())

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., inputs). Returns (..., outputs)."""
        return _GatherUseFree.apply(x, self.shard, self)

    def gather(self) -> list[Tensor]:
        """Weight and bias, whole, until you let go of them."""
        flat = self.shard.new_empty(self.plan.numel, requires_grad=False)
        flat.chunk(self.plan.world_size)[dist.get_rank(self.group)].copy_(self.shard.detach())
        return self.split(_all_gather(flat, self.group))

    def split(self, flat: Tensor) -> list[Tensor]:
        """The views of `flat` that are weight and bias."""
        spans = zip(self.plan.starts, self.shapes, strict=True)
        return [flat[start : start + shape.numel()].view(shape) for start, shape in spans]


class _GatherUseFree(torch.autograd.Function):
    """What autograd keeps until backward is `x` and the layer, whose weight is only a shard."""

    @staticmethod
    def forward(ctx, x: Tensor, shard: Tensor, layer: ShardedLinear) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        return nn.functional.linear(x, *layer.gather())

    @staticmethod
    def backward(ctx, gradient: Tensor):
        (x,), layer = ctx.saved_tensors, ctx.layer
        group, world_size = layer.group, layer.plan.world_size
        weight = layer.gather()[0]
        flat = torch.zeros(layer.plan.numel, dtype=weight.dtype, device=weight.device)
        by_row = gradient.flatten(0, -2) / world_size
        parts = layer.split(flat)
        torch.mm(by_row.T, x.flatten(0, -2), out=parts[0])
        for bias in parts[1:]:
            torch.sum(by_row, 0, out=bias)
        return gradient @ weight, _reduce_scatter(flat, group), None
