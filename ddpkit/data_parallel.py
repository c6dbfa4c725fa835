"""Data-parallel training: every rank has the whole model and a part of the batch.

    model = NaiveDDP(model)         # all ranks begin with rank 0's parameters and buffers
    loss.backward()
    model.synchronize()             # every .grad is now the mean over the ranks
    optimizer.step()

The mean over ranks is the gradient of one process with the whole batch if that process's loss is a
mean over it and all shares are equal; `join` is for shares that aren't. Several micro-batches make
one step if all but the last run `backward` inside `no_sync()`. Freeze parameters before wrapping.

Li et al. 2020, section 3.2: the naive form of PyTorch's DistributedDataParallel. Notebook 03.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .tools.checks import check_in_group, check_same_on_all_ranks


class SendsGradients:
    """A base with `syncing`, whether gradients are sent, and `no_sync`, which turns that off."""

    syncing = True

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add up gradients on each rank and send nothing while inside, as PyTorch's DDP does."""
        before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = before


class DataParallel(SendsGradients, nn.Module):
    """The base of NaiveDDP and the wrappers of `ddp` and `fast.buckets`: replicas that start equal.

    module: trained by all ranks of `group` (None: by all). `broadcast_module` overwrites its values
    with those of the group's first rank; ValueError: see there.
    """

    def __init__(self, module: nn.Module, group: ProcessGroup | None = None):
        super().__init__()
        self.module = module
        self.group = group
        # By name, and each weight once: PyTorch lists a tied one under its first name.
        self.trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        broadcast_module(module, group)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def synchronize(self) -> None:
        """Make every gradient the mean over the ranks, after backward; do nothing inside `no_sync`.

        ValueError: a trained parameter has no gradient; NaiveDDP counts it as zeros instead.
        """
        raise NotImplementedError


def check_gradients(trained: dict[str, nn.Parameter]) -> None:
    """Raise ValueError if one of the parameters, {name: parameter}, has no gradient."""
    without = [name for name, parameter in trained.items() if parameter.grad is None]
    if without:
        got = f"rank {dist.get_rank()} has no gradient for {', '.join(without)} after backward"
        remedy = "Does the loss depend on it? Freeze it before wrapping, on every rank."
        raise ValueError(f"{got}, expected one for every parameter that requires it. {remedy}")


def broadcast_module(module: nn.Module, group: ProcessGroup | None = None) -> None:
    """Overwrite all parameters, frozen or not, and buffers with those of the group's first rank.

    ValueError: this rank isn't in `group`; on every rank: a name, shape or dtype differs between
    ranks, or what is frozen. Cost: a broadcast for each parameter and buffer.
    Equal gradients keep replicas equal only if they start equal. Notebook 03.
    """
    check_in_group("broadcast_module", group)
    tensors = [*module.named_parameters(), *module.named_buffers()]
    # Before the first broadcast: ranks with other shapes would hang in it, or die.
    check_same_on_all_ranks("module", tensors, group)
    for _, tensor in tensors:  # in the same order on all ranks, which was checked above
        dist.broadcast(tensor.detach(), group=group, group_src=0)


def average_gradients(module: nn.Module, group: ProcessGroup | None = None) -> None:
    """Make every gradient in `module` the mean over the ranks, in place.

    A trained parameter without a gradient gets zeros first: all ranks must make the same calls.
    Cost: an all-reduce for each trained parameter. Notebook 03.
    """
    for parameter in module.parameters():  # a weight under two names comes once
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            # The n-th call of a rank meets the n-th of the others: same order, no exceptions.
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= dist.get_world_size(group)


class NaiveDDP(DataParallel):
    """Average gradients one after the other, after backward: nothing overlaps. Notebook 03."""

    def synchronize(self):
        if self.syncing:
            average_gradients(self.module, self.group)


def join(batches: Iterable[Sequence[Tensor]], group: ProcessGroup | None = None) -> Iterator[tuple]:
    """Yield this rank's batches, then empty ones while another rank has rows, with loss weights.

        for inputs, targets, weight in join(batches):
            (weight * mean_loss(model(inputs), targets)).backward()
            model.synchronize()

    Ranks may have different numbers of batches, and of rows in them: all make the same number of
    steps, so none waits for a rank that has finished. batches: tuples of tensors, rows along the
    first axis. The loss of 0 rows must be 0, as `models.mean_loss` is; a mean of none is NaN.

    weight: W times this rank's share of all ranks' rows, from 0 to W. With it the mean over ranks
    is the mean over these rows, as in one process that has them all.
    ValueError: this rank has no batch at all, so it can't know the shape of an empty one; it has
    rows after a step in which all ranks' batches have 0, which ends the iteration.

    Cost of a step: an all-reduce of one number. PyTorch's `Join` sends zeros for ranks without
    data, and doesn't run the model there. Notebook 03.
    """
    # When there are no more batches, the last one, emptied, takes their place.
    left = iter(batches)
    batch = next(left, None)
    if batch is None:
        got = f"rank {dist.get_rank()} has no batch to join with"
        remedy = "If there is no data for it, give it a batch of 0 rows."
        raise ValueError(f"{got}, expected at least one. {remedy}")
    # Every rank takes part in every all-reduce, so all see the same total and stop together.
    while True:
        rows = len(batch[0])
        # On the batch's device, as NCCL wants it.
        all_rows = torch.tensor(rows, device=batch[0].device)
        dist.all_reduce(all_rows, group=group)
        if all_rows == 0:
            if any(len(later[0]) for later in left):
                got = f"rank {dist.get_rank()} has rows after a step in which no rank has any"
                raise ValueError(f"{got}, expected none. Leave such steps out, on all ranks.")
            return
        yield *batch, dist.get_world_size(group) * rows / all_rows.item()
        batch = next(left, tuple(part[:0] for part in batch))  # no rows, the same shape
