"""Sequence parallelism: between the split layers, every rank has a part of the tokens.

Norms, dropout and residual sums act on each token alone. Yet in `layers` every rank computes them,
and keeps them for backward, for all tokens. Here a rank has 1/W of the tokens there:

                                           forward           backward
    before a split layer    f              identity          all-reduce
                            instead of it  all-gather        reduce-scatter
    after it                g              all-reduce        identity
                            instead of it  reduce-scatter    all-gather

An all-reduce is a reduce-scatter and an all-gather, so as many bytes are sent as before. But the
parameters in between, norms and biases, see the tokens of one rank only, and their gradients are
summands: `sum_copies` adds them up.

PyTorch's SequenceParallel. Korthikanti et al. 2022, section 4.2.2. Notebook 11.
"""

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ..models import GPT, Block, first
from ..transport import start_all_gather, start_reduce_scatter
from .layers import (
    ColumnParallelLinear,
    CopyToRanks,
    RowParallelLinear,
    SumOverRanks,
    VocabParallelEmbedding,
    vocabulary_cross_entropy,
)
from .split import count_copies


def gather_tokens(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """All-gather tokens: from (n, length / W, width) on each rank to (n, length, width) on all."""
    world_size = dist.get_world_size(group)
    rank = dist.get_rank(group)
    # Ranks' tokens are gathered along a new first axis, then joined along the sequence.
    parts = x.new_empty(world_size, *x.shape)
    parts[rank] = x
    start_all_gather(parts.flatten(), group).wait()  # flatten() is a view: it fills `parts`
    return torch.cat(parts.unbind(), dim=1)


def scatter_tokens(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Reduce-scatter tokens: (n, length, width) is summed and cut to (n, length / W, width).

    ValueError: W doesn't divide the length.
    """
    world_size = dist.get_world_size(group)
    length = x.shape[1]
    if length % world_size != 0:
        cut = f"sequences of {length} tokens can't be split among {world_size} ranks"
        raise ValueError(f"{cut}, expected a multiple: cut or pad them, or leave sequence=False")
    # The wire takes contiguous shards: tokens are cut along the sequence, then stacked.
    parts = torch.stack(x.chunk(world_size, dim=1))
    start_reduce_scatter(parts.flatten(), group).wait()
    return parts[dist.get_rank(group)].clone()  # a view would keep the other ranks' parts alive


class GatherTokens(torch.autograd.Function):
    """`gather_tokens` for autograd: apply(x, group); backward is `scatter_tokens` of gradients."""

    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup | None = None) -> Tensor:
        ctx.group = group
        return gather_tokens(x, group)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return scatter_tokens(gradient, ctx.group), None


class ScatterTokens(torch.autograd.Function):
    """`scatter_tokens` for autograd: apply(x, group); backward is `gather_tokens` of gradients."""

    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup | None = None) -> Tensor:
        ctx.group = group
        return scatter_tokens(x, group)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gather_tokens(gradient, ctx.group), None


class ParallelGPT(nn.Module):
    """`ddpkit.models.GPT`, split among the ranks of `group`; returns the loss, not the logits.

    gpt: its values are copied from the group's first rank; it isn't changed. sequence: split the
    tokens where layers aren't split. Parameters have the names that they have in `gpt`, and
    `ddpkit.tensor_parallel.split.gather` makes them whole.

    Data must be alike on all ranks of the group. So must random numbers for dropout; but with
    `sequence` each rank draws for its own tokens, and needs a seed of its own.
    ValueError: W doesn't divide heads or kv_heads or, in forward with `sequence`, the length.

    Collective calls of a step: 2 all-reduces a layer forward and 2 backward; one each for embedding
    (forward) and logits (backward), and two small ones for the loss. With `sequence`, all but those
    of the loss are a reduce-scatter and an all-gather, and `synchronize` calls one more all-reduce.
    """

    def __init__(self, gpt: GPT, group: ProcessGroup | None = None, sequence: bool = False):
        super().__init__()
        self.group = group
        self.sequence = sequence
        # The split layers are the same in both forms; only their ends differ.
        enter = GatherTokens if sequence else CopyToRanks
        leave = ScatterTokens if sequence else SumOverRanks
        self.tokens = VocabParallelEmbedding(gpt.tokens, group, leave)
        self.positions = copy.deepcopy(gpt.positions)
        self.dropout = copy.deepcopy(gpt.dropout)
        self.norm = copy.deepcopy(gpt.norm)
        blocks = [split_block(block, group, enter, leave) for block in gpt.blocks]
        self.blocks = nn.ModuleList(blocks)
        self.head = ColumnParallelLinear(gpt.head, group, enter=enter)
        if gpt.head.weight is gpt.tokens.weight:  # tied in the model, so tied in its parts
            self.head.weight = self.tokens.weight
        # Split parameters are alike already; the copies start from the first rank's.
        for parameter, count in count_copies(self, group).items():
            if count > 1:
                dist.broadcast(parameter.detach(), group=group, group_src=0)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy, on every rank; tokens, targets: (n, length), no -100."""
        # With `sequence`, from here on only this rank's tokens.
        x = self.tokens(tokens)
        positions = first(self.positions, tokens.shape[1])
        if self.sequence:  # this rank's tokens, and so its places
            parts = positions.chunk(dist.get_world_size(self.group))
            positions = parts[dist.get_rank(self.group)]
        x = self.dropout(x + positions)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        logits = self.head(x)
        # No rank ever has all logits; the loss needs three numbers a target from the others.
        losses = vocabulary_cross_entropy(logits, targets, self.tokens.start, self.group)
        return losses.sum() / max(1, losses.numel())

    def synchronize(self) -> None:
        """Sum the gradients of what isn't split, in place; call it once, after the last backward.

        Without `sequence` it does nothing: all ranks have the sums already. Cost: one all-reduce.
        """
        if self.sequence:
            sum_copies(count_copies(self, self.group), self.group)


def sum_copies(copies: dict[nn.Parameter, int], group: ProcessGroup | None = None) -> None:
    """Sum over the ranks, in place, the gradients of parameters that every rank has a copy of.

    A copy has a gradient from its rank's tokens alone. copies: {parameter: the number of ranks that
    hold it alike}, from `count_copies`; those with 1, which are split, are left alone.
    """
    summands = [p.grad for p, count in copies.items() if count > 1 and p.grad is not None]
    if not summands:
        return
    # One message for all of them, which are small: norms and biases.
    flat = torch.cat([gradient.flatten() for gradient in summands])
    dist.all_reduce(flat, group=group)
    totals = flat.split([gradient.numel() for gradient in summands])
    for gradient, total in zip(summands, totals, strict=True):
        gradient.copy_(total.view_as(gradient))


def split_block(block: Block, group: ProcessGroup | None, enter=CopyToRanks, leave=SumOverRanks):
    """Return a copy of `block` with 1/W of its heads, and of the MLP's hidden numbers.

    Linears are cut from the first rank's, so all must call. enter, leave: what stands before and
    after split layers, f and g or, in sequence parallelism, `GatherTokens` and `ScatterTokens`.
    ValueError: W doesn't divide heads or kv_heads.
    """
    world_size = dist.get_world_size(group)
    block = copy.deepcopy(block)
    if block.heads % world_size != 0 or block.kv_heads % world_size != 0:
        heads = f"{block.heads} heads and {block.kv_heads} of keys and values"
        remedy = "choose numbers of heads that are multiples, or fewer ranks"
        raise ValueError(f"{heads} can't be split among {world_size} ranks: {remedy}")
    q = block.heads * block.head_width
    kv = block.kv_heads * block.head_width
    block.qkv = ColumnParallelLinear(block.qkv, group, [q, kv, kv], enter)
    block.out = RowParallelLinear(block.out, group, leave)
    block.mlp[0] = ColumnParallelLinear(block.mlp[0], group, enter=enter)
    block.mlp[2] = RowParallelLinear(block.mlp[2], group, leave)
    # From here on the block counts only this rank's heads.
    block.heads //= world_size
    block.kv_heads //= world_size
    return block
