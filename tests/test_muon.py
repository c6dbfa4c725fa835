"""ddpkit.muon beside torch.optim.Muon, to the last bit, and its bytes."""

import torch
import torch.distributed as dist
from fsdp_cases import mine, said
from on_ranks import on_ranks
from torch import nn

from ddpkit.fsdp import FSDP
from ddpkit.muon import Muon, deal


def matrices(seed=0):
    """Tall, wide, square, with fewer rows than ranks, and vectors that Muon leaves alone."""
    torch.manual_seed(seed)
    sizes = (10, 7), (7, 13), (13, 13), (13, 3)
    return nn.Sequential(*(nn.Linear(*each) for each in sizes))


def named(module):
    return [name for name, p in module.named_parameters() if p.dim() == 2]


@on_ranks(1, 2, 3, 4)
def test_to_the_bit_like_torchs(check, rank, world_size):
    """Three steps from the same gradients; with learning rates that change."""
    twin = matrices()
    model = FSDP(matrices(rank))
    names = named(twin)
    numbers = 2 * sum(p.numel() for p in twin.parameters() if p.dim() == 2)
    optimizers = [
        torch.optim.Muon([p for p in twin.parameters() if p.dim() == 2], lr=0.02),
        Muon(model, names, lr=0.02),
    ]
    before = len(said())
    optimizers[1].step()
    check.same((len(said()), len(optimizers[1].state)), (before, 0), "without gradients")
    for step in range(3):
        torch.manual_seed(step)
        for name, parameter in twin.named_parameters():
            parameter.grad = torch.randn_like(parameter)
            model.module.get_parameter(name).grad = mine(name, parameter.grad).clone()
        before = len(said())
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 0.02 / (step + 1)
            optimizer.step()
        calls = said()[before:]
        check.same([each.op for each in calls], ["all_to_all"] * 2, "calls")
        check.same({each.dtype for each in calls}, {"bfloat16"}, "dtype")
        # Every number of a matrix goes to its owner and back, but the owner's own.
        sent = 2 * sum(sum(each.splits[0]) - each.splits[0][rank] for each in calls)
        owners = deal(
            [p.numel() * min(p.shape) for p in map(twin.get_parameter, names)], world_size
        )
        expected = 0
        for name, owner in zip(names, owners, strict=True):
            parameter = twin.get_parameter(name)
            rows = mine(name, parameter).numel()
            expected += 2 * (parameter.numel() - rows if owner == rank else rows)
        check.same(sent, expected, "bytes")
        total = torch.tensor(sent)
        dist.all_reduce(total)
        check.unless(total <= 2 * numbers, "all ranks' bytes", total)
        for name, whole in model.full_parameters().items():
            check.same(whole, twin.get_parameter(name).detach(), step, name)


@on_ranks(2)
def test_a_shard_alone_gives_something_else(check):
    """The published bug, and why ZeRO's contract says *elementwise*."""
    model = FSDP(matrices(), wrap=[])
    shards = [p for _, p in model.module.named_parameters() if p.dim() == 2]
    before = model.full_parameters()["2.weight"]
    torch.manual_seed(0)
    whole = torch.randn_like(before)
    for shard in shards:
        shard.grad = torch.zeros_like(shard)
    shards[2].grad = mine("2.weight", whole)
    torch.optim.Muon(shards, lr=1.0, weight_decay=0.0).step()
    moved = before - model.full_parameters()["2.weight"]
    singular = torch.linalg.svdvals(moved)
    check.unless(singular[0] > 1.3, "by shards no longer near 1", singular)


def test_owners_have_like_loads():
    assert deal([5, 3, 3, 2], 2) == [0, 1, 1, 0]
    assert deal([1], 4) == [0]


@on_ranks(2)
def test_vectors_are_refused(check):
    model = FSDP(matrices())
    check.refused(Muon, model, ["0.bias"], says=("trained matrices", "(7,)", "AdamW"))
    check.refused(Muon, model, ["5.weight"], says="5.weight")
