"""Data-parallel training: every rank has the whole model and a part of the batch, and gradients are averaged.

Four ways to average them, each wrapped around a module that is then trained as ever:

    model = BucketedDDP(model)          # all ranks begin with rank 0's parameters and buffers
    ...
    loss.backward()
    model.synchronize()                 # every .grad is now the mean over the ranks
    optimizer.step()

    class          messages in a step       when they are sent
    NaiveDDP       one a parameter          after backward
    FlatDDP        one                      after backward; all gradients copied there and back
    OverlapDDP     one a parameter          in backward, as each gradient is ready
    BucketedDDP    one a bucket             in backward, as each bucket is full

All send the bytes of the gradients once in an all-reduce; a weight used in two places is one parameter, and sent once.
Several micro-batches make one step if all but the last run `backward` inside `no_sync()`. The mean over ranks equals
the gradient of one process with the whole batch if that process's loss is a mean over it and all parts are equal;
`join` is for parts that aren't.

Gradients may be None or zero before a step (`zero_grad(set_to_none=...)`), of several dtypes, from any optimizer's
model. What isn't trained (`requires_grad=False`) is sent once, at the start. Freeze before wrapping, and wrap a module
once: its hooks stay.

Li et al. 2020 (PyTorch's DistributedDataParallel). Notebooks 03 and 04.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .shared_memory import SharedBuffer
from .tools.checks import check_same_on_all_ranks


class DataParallel(nn.Module):
    """What the four have in common: equal replicas at the start, `no_sync`, `abandon`, parameters without gradient.

    module: on every rank the same architecture; its parameters and buffers are overwritten with those of the group's
    first rank. group: the ranks that train together (None: all).
    unused_as_zero: a parameter without a gradient counts as having a gradient of zeros. Without it that is an error:
    more often than not, part of the model was forgotten, and ranks may disagree about which.
    """

    def __init__(self, module: nn.Module, group: ProcessGroup | None = None, unused_as_zero: bool = False):
        super().__init__()
        self.module, self.group, self.unused_as_zero = module, group, unused_as_zero
        self.trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.syncing = True
        broadcast_module(module, group)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients add up on each rank and nothing is sent."""
        before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = before

    def synchronize(self) -> None:
        """Make every gradient the mean over the ranks; call it after backward, before the optimizer's step.

        ValueError: a parameter has no gradient, and `unused_as_zero` is not set. Inside `no_sync` it does nothing.
        """
        if self.syncing:
            self._average()

    def abandon(self) -> None:
        """Give up a step that an exception cut short: wait for what is on its way, and drop all gradients.

        Call it on every rank, after all raised at the same place: then all have sent the same. A rank that raised alone
        can't go on, since the others wait for what it didn't send.
        """
        self._receive()
        self.module.zero_grad()

    def _average(self) -> None:
        raise NotImplementedError

    def _receive(self) -> None:
        """Wait for what is on its way, and be ready for the next step."""

    def _gradients(self) -> list[Tensor]:
        """All gradients, in the order of the parameters."""
        self._fill(name for name, p in self.trained.items() if p.grad is None)
        return [p.grad for p in self.trained.values()]

    def _fill(self, without_gradient: Iterator[str]) -> None:
        """Give these parameters a gradient of zeros, or complain about them."""
        names = list(without_gradient)
        if names and not self.unused_as_zero:
            got = f"rank {dist.get_rank()} has no gradient for {', '.join(names)}"
            raise ValueError(
                f"{got} after backward, expected one for every parameter that requires it. Does the loss depend on it? "
                f"Freeze it before wrapping, or say {type(self).__name__}(..., unused_as_zero=True)."
            )
        for name in names:
            self.trained[name].grad = torch.zeros_like(self.trained[name])


def broadcast_module(module: nn.Module, group: ProcessGroup | None = None) -> None:
    """Overwrite parameters, frozen ones too, and buffers with those of the group's first rank.

    ValueError, on every rank: the modules differ in names, shapes, dtypes, their order, or what is trained. ValueError,
    on this rank: it isn't in `group`.
    Replicas must start alike: equal gradients keep them equal, and nothing else does. Notebook 03.
    """
    if dist.get_rank(group) < 0:
        got = f"rank {dist.get_rank()} wrapped a module for a group that it isn't in"
        raise ValueError(f"{got}, expected one of its own. Wrap it on the group's ranks only.")
    tensors = [*module.named_parameters(), *module.named_buffers()]
    check_same_on_all_ranks("module", tensors, group)
    for _, tensor in tensors:
        dist.broadcast(tensor.detach(), group=group, group_src=0)


def join(batches: Iterable[Sequence[Tensor]], group: ProcessGroup | None = None) -> Iterator[tuple]:
    """This rank's batches, and then empty ones, until no rank has any left; after each batch, the weight of its loss.

        for inputs, targets, weight in join(batches):
            (weight * mean_loss(model(inputs), targets)).backward()
            model.synchronize()
            ...

    Ranks may have different numbers of batches, and of rows in them: all make the same number of steps, so none waits
    for one that has gone. batches: tuples of tensors with rows along their first axis. An empty one is the last with 0
    rows of its tensors; the loss of 0 rows must be 0, as `models.mean_loss` is, and not the NaN of a mean of nothing.

    weight: W times this rank's part of the rows of all ranks. With it the mean over ranks is the mean over these rows,
    as of one process that has them all: the ranks that still have data train on as if they were alone. Without it every
    step would count as one of W full batches, and the last rows for less than the first.

    ValueError: a rank has no batch at all; it can't know what an empty one looks like.
    Cost of a step: an all-reduce of one number, and waiting for it. PyTorch's `Join` sends zeros instead of gradients
    for ranks that have no data; it doesn't run the model there, and so knows nothing of collectives in it. Notebook 03.
    """
    left = iter(batches)
    batch = next(left, None)
    if batch is None:
        got = f"rank {dist.get_rank()} has no batch to join with"
        raise ValueError(f"{got}, expected at least one. If there is no data for it, give it a batch of 0 rows.")
    while True:
        rows = len(batch[0])
        everybodys = torch.tensor(rows, device=batch[0].device)
        dist.all_reduce(everybodys, group=group)
        if everybodys == 0:
            return
        yield *batch, dist.get_world_size(group) * rows / everybodys.item()
        batch = next(left, tuple(part[:0] for part in batch))


# After backward


class NaiveDDP(DataParallel):
    """Average gradients one after the other, after backward.

    Cost of a step: an all-reduce for each parameter, while nothing is computed. Notebook 03.
    """

    def _average(self) -> None:
        world_size = dist.get_world_size(self.group)
        for gradient in self._gradients():
            dist.all_reduce(gradient, group=self.group)
            gradient /= world_size


class FlatDDP(DataParallel):
    """Average all gradients in one message, after backward; one for each dtype, to be exact.

    Cost of a step: the same bytes in one all-reduce, and each gradient copied into it and back. Notebook 04.
    """

    def _average(self) -> None:
        gradients = self._gradients()
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            alike = [gradient for gradient in gradients if gradient.dtype == dtype]
            flat = torch.cat([gradient.flatten() for gradient in alike])
            dist.all_reduce(flat, group=self.group)
            flat /= dist.get_world_size(self.group)
            for gradient, part in zip(alike, flat.split([g.numel() for g in alike]), strict=True):
                gradient.copy_(part.view_as(gradient))


# During backward


class OverlapDDP(DataParallel):
    """Average each gradient as soon as backward has it, while the others are still computed.

    All ranks send in the reverse order of the parameters, about that of backward; a gradient that is ready before its
    turn waits. Sent as they come, gradients of ranks that take different ways through the module would be added up
    though they don't belong together.

    RuntimeError: a second backward without `synchronize` or `no_sync` in between, which would add to a gradient that is
    on its way. Two other causes: the backward before raised, then call `abandon` on all ranks first; or it was a single
    backward, and a weight is used in two activation checkpoints, then give them `use_reentrant=False`.

    Cost of a step: an all-reduce for each parameter, hidden behind backward except for the last ones. Notebook 04.
    """

    def __init__(self, module: nn.Module, group: ProcessGroup | None = None, unused_as_zero: bool = False):
        super().__init__(module, group, unused_as_zero)
        self._order = list(self.trained.values())[::-1]
        self._arrived: set[nn.Parameter] = set()
        self._under_way: list[dist.Work] = []  # of the first in the order
        for parameter in self._order:
            parameter.register_post_accumulate_grad_hook(self._ready)

    def _ready(self, parameter: nn.Parameter) -> None:
        """Send this gradient, and those that waited for it, unless it must itself wait for another."""
        if parameter in self._arrived:
            raise RuntimeError(TWICE)
        if not self.syncing:
            return
        self._arrived.add(parameter)
        for turn in self._order[len(self._under_way) :]:
            if turn not in self._arrived:
                break
            turn.grad /= dist.get_world_size(self.group)
            self._under_way.append(dist.all_reduce(turn.grad, group=self.group, async_op=True))

    def _average(self) -> None:
        late = {name: parameter for name, parameter in self.trained.items() if parameter not in self._arrived}
        self._fill(name for name, parameter in late.items() if parameter.grad is None)
        for parameter in late.values():
            self._ready(parameter)
        self._receive()

    def _receive(self) -> None:
        for work in self._under_way:
            work.wait()
        self._arrived.clear()
        self._under_way.clear()


TWICE = (
    "backward ran twice without synchronize(): call it after each backward. To add up several backwards, run all but "
    "the last inside `with model.no_sync():`; gradients that are on their way can't be added to. "
    "(Not what you did? If the backward before raised, call abandon() on all ranks. If it was a single backward, say "
    "use_reentrant=False to its activation checkpoints.)"
)


class Bucket:
    """Gradients that travel together: one contiguous tensor, and for each parameter a view of it that is its gradient.

    wire_dtype: what the numbers are while they travel (None: as they are). shared_memory: don't travel at all; the
    ranks are on one machine, and the tensor lies in memory that all of them see.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: ProcessGroup | None,
        wire_dtype: torch.dtype | None,
        shared_memory: bool,
    ):
        first, sizes = parameters[0], [parameter.numel() for parameter in parameters]
        self.group, numel = group, sum(sizes)
        self.shared = SharedBuffer(numel, first.dtype, group) if shared_memory else None
        self.flat = self.shared.local if shared_memory else torch.zeros(numel, dtype=first.dtype, device=first.device)
        self.travelling = self.flat.to(wire_dtype or first.dtype)  # flat itself, if the dtype is the same
        self.views, self.outgoing = (
            {p: part.view_as(p) for p, part in zip(parameters, buffer.split(sizes), strict=True)}
            for buffer in (self.flat, self.travelling)
        )
        self.ready: set[nn.Parameter] = set()

    def put(self, parameter: nn.Parameter, gradient: Tensor, share: float) -> None:
        """Write this share of a gradient where it travels from."""
        outgoing = self.outgoing[parameter]
        if outgoing.dtype == gradient.dtype:
            torch.mul(gradient, share, out=outgoing)
        else:
            outgoing.copy_(gradient).mul_(share)  # `out=` of another dtype makes a copy on the way
        self.ready.add(parameter)

    def send(self) -> None:
        """Begin the all-reduce; through shared memory, also end it."""
        if self.shared is not None:
            self.shared.all_reduce()
        else:
            self._work = dist.all_reduce(self.travelling, group=self.group, async_op=True)

    def receive(self) -> None:
        """End it: the sums are in the views."""
        if self.shared is None:
            self._work.wait()
        if self.travelling is not self.flat:
            self.flat.copy_(self.travelling)


def plan_buckets(sizes: Sequence[tuple[int, torch.dtype]], cap_bytes: float) -> list[list[int]]:
    """Which gradients share a bucket, as lists of their numbers; every bucket has one dtype.

    sizes: (bytes, dtype) of each gradient, in the order in which they become ready. cap_bytes: a bucket with as many or
    more is full; its last gradient may take it far beyond. Buckets come in the order of their last gradients: send them
    in this order. PyTorch plans by the same rule (`compute_bucket_assignment_by_size`).
    """
    full: list[list[int]] = []
    filling: dict[torch.dtype, list[int]] = {}
    for number, (_, dtype) in enumerate(sizes):
        bucket = filling.setdefault(dtype, [])
        bucket.append(number)
        if sum(sizes[each][0] for each in bucket) >= cap_bytes:
            full.append(filling.pop(dtype))
    return sorted(full + list(filling.values()), key=lambda bucket: bucket[-1])


class BucketedDDP(DataParallel):
    """Average gradients a bucket at a time, each as soon as all its gradients are there, while backward goes on.

    bucket_cap_mb: bytes that make a bucket full, in MiB, as in torch. wire_dtype, shared_memory: see `Bucket`.
    ValueError: a bucket size that isn't positive; a wire_dtype for shared memory. RuntimeError: as in `OverlapDDP`.

    `.grad` of every parameter is a view of its bucket, from the first backward on, and the mean after `synchronize`. A
    gradient that autograd made new is divided by the number of ranks on its way there; one that autograd added up in
    place, where it is.

    At first, gradients are expected in the reverse order of the parameters. The first backward shows the real order;
    that of the group's first rank is then the plan on all ranks, and buckets are sent in the order of the plan on each,
    whichever is ready first: ranks that send in different orders would add up what doesn't belong together.

    Cost of a step: an all-reduce for each bucket, hidden behind backward except for the last ones; each gradient is
    read and written once more, divided. With `zero_grad(set_to_none=False)` that happens in place, but autograd then
    adds to zeros, which costs more than it saves. Notebook 04.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_cap_mb: float = 25.0,
        group: ProcessGroup | None = None,
        unused_as_zero: bool = False,
        wire_dtype: torch.dtype | None = None,
        shared_memory: bool = False,
    ):
        super().__init__(module, group, unused_as_zero)
        if not bucket_cap_mb > 0:
            raise ValueError(f"expected bucket_cap_mb > 0, got {bucket_cap_mb}: give the size of a bucket in MiB")
        if wire_dtype is not None and shared_memory:
            got = f"wire_dtype={wire_dtype} and shared_memory=True"
            raise ValueError(f"expected one of the two, got {got}: in shared memory nothing travels. Drop wire_dtype.")
        self._cap_bytes, self._how = bucket_cap_mb * 2**20, (group, wire_dtype, shared_memory)
        self._arrived: list[nn.Parameter] | None = []  # in the first backward, which shows the order; then None
        self._build(list(self.trained.values())[::-1])
        for parameter in self.trained.values():
            parameter.register_post_accumulate_grad_hook(self._ready)

    def _build(self, order: list[nn.Parameter]) -> None:
        """Make the buckets for gradients that become ready in this order."""
        plan = plan_buckets([(parameter.nbytes, parameter.dtype) for parameter in order], self._cap_bytes)
        self.buckets = [Bucket([order[number] for number in numbers], *self._how) for numbers in plan]
        self._bucket_of = {parameter: bucket for bucket in self.buckets for parameter in bucket.views}
        self._next = 0  # the first bucket that isn't sent yet

    def _ready(self, parameter: nn.Parameter) -> None:
        """Take a gradient into its bucket; send the buckets that are full now."""
        bucket = self._bucket_of[parameter]
        if parameter in bucket.ready:
            raise RuntimeError(TWICE)
        gradient, parameter.grad = parameter.grad, bucket.views[parameter]
        if not self.syncing:
            if gradient is not parameter.grad:
                parameter.grad.copy_(gradient)
            return
        bucket.put(parameter, gradient, 1 / dist.get_world_size(self.group))
        if self._arrived is not None:
            self._arrived.append(parameter)
        while self._next < len(self.buckets) and self._full(self.buckets[self._next]):
            self.buckets[self._next].send()
            self._next += 1

    @staticmethod
    def _full(bucket: Bucket) -> bool:
        return len(bucket.ready) == len(bucket.views)

    def _average(self) -> None:
        late = {n: p for n, p in self.trained.items() if p not in self._bucket_of[p].ready}
        self._fill(name for name, parameter in late.items() if parameter.grad is None)
        for parameter in late.values():
            self._ready(parameter)
        self._receive()
        if self._arrived is not None:
            self._agree_on_the_order()

    def abandon(self) -> None:
        super().abandon()
        if self._arrived is not None:
            self._arrived.clear()  # half an order is none

    def _receive(self) -> None:
        for bucket in self.buckets[: self._next]:
            bucket.receive()
        for bucket in self.buckets:
            bucket.ready.clear()
        self._next = 0

    def _agree_on_the_order(self) -> None:
        """After the first step: plan the buckets anew, as the first rank's gradients became ready."""
        names = {parameter: name for name, parameter in self.trained.items()}
        order = [[names[parameter] for parameter in self._arrived]]
        dist.broadcast_object_list(order, group=self.group, group_src=0)
        self._arrived = None
        self._build([self.trained[name] for name in order[0]])
