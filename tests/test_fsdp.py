"""ddpkit.fsdp beside the serial twin, to the last bit where integers allow it, and beside PyTorch's
`fully_shard`, call by call."""

import contextlib
from functools import partial

import fsdp_cases as cases
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint as torchs_checkpoint

from ddpkit import RankError, launch, memory
from ddpkit.checkpointing import checkpoint
from ddpkit.fsdp import FSDP, load, save
from ddpkit.fsdp.units import divisors

SGD = partial(torch.optim.SGD, lr=1 / 4)
MOMENTUM = partial(torch.optim.SGD, lr=1 / 4, momentum=1 / 2)
ADAMW = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
HALF_THE_DIGITS = torch.finfo(torch.float64).eps ** 0.5  # roundings of AdamW don't come near

CHECKPOINTS = {
    "no checkpoint": None,
    "ddpkit's": checkpoint,
    "torch's": partial(torchs_checkpoint, use_reentrant=False),
    "torch's, reentrant": partial(torchs_checkpoint, use_reentrant=True),
}


# The serial twin


def twins_backward(twin, step, micro_batches):
    """The whole batch in one process: all ranks' micro-batches, one after the other."""
    losses = []
    for number in range(micro_batches):
        for rank in range(dist.get_world_size()):
            losses.append(cases.loss_of(twin, cases.batch(step, number, rank)))
    sum(losses).backward()
    return sum(losses)


def compare(check, model, twin, make, micro_batches, quiet, what, steps=2, same=None):
    """Steps from new integers each; loss, gradients, norm and parameters."""
    exact = same is None
    same = same or check.same
    optimizer = make(model.parameters())
    twins = make(twin.parameters())
    world_size = dist.get_world_size()
    for step in range(steps):
        if exact:
            twin.draw(step + 7)
            model.load_full_parameters(dict(twin.named_parameters()))
        twins_loss = twins_backward(twin, step, micro_batches)
        # The mean over ranks of W times their sums is the sum over all: no division is inexact.
        cases.backward(model, step, micro_batches, quiet, factor=world_size)
        with torch.no_grad():
            batches = [cases.batch(step, number, dist.get_rank()) for number in range(micro_batches)]
            loss = sum(cases.loss_of(model, batch) for batch in batches)
        dist.all_reduce(loss)
        same(loss, twins_loss.detach(), *what, "loss")
        names = dict(twin.named_parameters())
        model.drop()
        for name, shard in model.module.named_parameters():
            gradient = names[name].grad
            if gradient is None:
                check.same(shard.grad, None, *what, step, name)
            else:
                same(shard.grad, cases.mine(name, gradient), *what, step, name, "gradient")
        optimizer.step()
        twins.step()
        optimizer.zero_grad()
        twins.zero_grad()
        full = model.full_parameters()
        check.same(list(full), list(names), *what, "names")
        for name, whole in full.items():
            same(whole, names[name].detach(), *what, step, name, "whole")


@on_ranks(1, 2, 3, 4)
def test_the_exact_twin(check, world_size):
    """Every setting of accumulation with 1 to 3 micro-batches, SGD and momentum, all checkpoints.

    Integers in float64: not one bit may differ. Each rank begins with weights of its own.
    """
    torch.use_deterministic_algorithms(True)
    for number, (setting, (reshard, quiet)) in enumerate(cases.SETTINGS.items()):
        micro_batches = 1 + (number + world_size) % 3
        make = (SGD, MOMENTUM)[(number + world_size) % 2]
        name, how = list(CHECKPOINTS.items())[(number + world_size) % 4]
        model = cases.wrapped(dist.get_rank(), checkpoint=how, reshard_after_forward=reshard)
        what = setting, micro_batches, name
        twin = cases.Odd()
        compare(check, model, twin, make, micro_batches, quiet, what)


@on_ranks(2, 3)
def test_adamw_for_five_steps(check):
    """Within half the digits of float64: a wrong gradient moves a weight by the learning rate."""

    def near(got, expected, *what):
        check.close(got, expected, HALF_THE_DIGITS * (1 + expected.abs()), *what)

    model = cases.wrapped(dist.get_rank())
    compare(check, model, cases.Odd(), ADAMW, 2, None, ["AdamW"], steps=5, same=near)
