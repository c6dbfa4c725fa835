"""Answers to the exercises of notebook 11 that are right in another way than the reference."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ddpkit.tensor_parallel import ColumnParallelLinear, RowParallelLinear, SumOverRanks


def block_itself(block, group=None):
    """Without a copy, and q, k and v still in one layer."""
    kv = block.kv_heads * block.head_width
    rows = [block.heads * block.head_width, kv, kv]
    block.heads, block.kv_heads = (
        n // dist.get_world_size(group) for n in (block.heads, block.kv_heads)
    )
    block.mlp[2], block.out = (RowParallelLinear(it, group) for it in (block.mlp[2], block.out))
    block.mlp[0] = ColumnParallelLinear(block.mlp[0], group)
    block.qkv = ColumnParallelLinear(block.qkv, group, rows)
    return block


def loss_by_one_hot(logits, targets, start, group=None):
    largest = logits.detach().max(dim=-1).values
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    powers = SumOverRanks.apply((logits - largest[:, None]).exp().sum(-1), group)
    numbers = torch.arange(start, start + logits.shape[-1])
    is_target = targets[:, None] == numbers
    of_target = SumOverRanks.apply((logits * is_target).sum(-1), group)
    return powers.log() + largest - of_target


def loss_by_padding(logits, targets, start, group=None):
    """The targets of other ranks find a 0 behind the last logit."""
    largest = logits.detach().amax(-1, keepdim=True)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    shifted = F.pad(logits - largest, (0, 1))
    local, last = targets - start, logits.shape[-1]
    local = torch.where((local < 0) | (local > last), last, local)
    of_target = SumOverRanks.apply(shifted.gather(-1, local[:, None])[:, 0], group)
    return SumOverRanks.apply(shifted[:, :-1].exp().sum(-1), group).log() - of_target


def copies_one_by_one(copies, group=None):
    for parameter, count in copies.items():
        if count != 1 and parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)


def clip_alike_on_rank_0(copies, max_norm, group=None):
    """What is alike is counted by the first rank only."""
    first = dist.get_rank(group) == 0
    used = {p: count for p, count in copies.items() if p.grad is not None}
    squares = [p.grad.norm() ** 2 for p, count in used.items() if count == 1 or first]
    total = torch.stack(squares).sum()
    dist.all_reduce(total, group=group)
    if total.sqrt() > max_norm:
        for parameter in used:
            parameter.grad.mul_(max_norm / total.sqrt())
    return total.sqrt().item()


RIGHT = [
    ("split_block", block_itself),
    ("vocabulary_cross_entropy", loss_by_one_hot),
    ("vocabulary_cross_entropy", loss_by_padding),
    ("sum_copies", copies_one_by_one),
    ("clip_grad_norm", clip_alike_on_rank_0),
]


def loss_of_equal_parts(logits, targets, start, group=None):
    """Takes every rank's part to be as long as its own."""
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    shifted = logits - largest[:, None]
    mine = targets // logits.shape[-1] == dist.get_rank(group)
    local = torch.where(mine, targets % logits.shape[-1], 0)
    own = torch.where(mine, shifted.gather(-1, local[:, None])[:, 0], 0)
    powers = SumOverRanks.apply(shifted.exp().sum(-1), group)
    return powers.log() - SumOverRanks.apply(own, group)


def loss_of_all_logits(logits, targets, start, group=None):
    """Puts the logits of all ranks together, by a sum."""
    stop = torch.tensor(start + logits.shape[-1])
    vocabulary = stop.clone()
    dist.all_reduce(vocabulary, dist.ReduceOp.MAX, group)
    whole = SumOverRanks.apply(F.pad(logits, (start, int(vocabulary - stop))), group)
    return F.cross_entropy(whole, targets, reduction="none")


def block_with_fewer_repeats(block, group=None):
    block = block_itself(block, group)
    block.repeats //= dist.get_world_size(group)
    return block


def copies_by_axes(copies, group=None):
    for parameter in copies:
        if parameter.dim() == 1 and parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)


def copies_replaced(copies, group=None):
    for parameter, count in copies.items():
        if count > 1 and parameter.grad is not None:
            parameter.grad = parameter.grad.clone()
            dist.all_reduce(parameter.grad, group=group)


WRONG = [
    ("split_block", block_with_fewer_repeats, "8 heads, 4 of keys and values: "),
    ("sum_copies", copies_by_axes, "gradient of a split bias on rank 0: [77.0, 88.0], not [7.0"),
    ("sum_copies", copies_replaced, "p.grad itself"),
    ("vocabulary_cross_entropy", loss_of_equal_parts, "5, 3, 6, 4 tokens of the vocabulary"),
    ("vocabulary_cross_entropy", loss_of_all_logits, "Sum what a rank has by itself"),
]
