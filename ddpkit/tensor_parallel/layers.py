"""Layers of which each rank computes a part; f and g, which connect ranks; the loss; the norm.

f stands before a column-parallel layer, g after a row-parallel one. Notebook 11.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .split import SplitLayer


class CopyToRanks(torch.autograd.Function):
    """The function f: apply(x, group) returns a view of `x`; backward all-reduces its gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup | None = None) -> Tensor:
        ctx.group = group
        return x.view_as(x)  # no message: every rank has x already

    @staticmethod
    def backward(ctx, gradient: Tensor):
        total = gradient.clone(memory_format=torch.contiguous_format)  # others may hold `gradient`
        dist.all_reduce(total, group=ctx.group)
        return total, None


class SumOverRanks(torch.autograd.Function):
    """The function g: apply(x, group) returns the sum of all ranks' `x`; backward sends nothing."""

    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup | None = None) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient, None  # no message: every rank has the whole of it


class ColumnParallelLinear(SplitLayer):
    """A Linear of which this rank computes some outputs: (..., inputs) to (..., outputs / W).

    Inputs are alike on all ranks. blocks: [d, d, d], say, for a layer of q, k and v: each rank has
    outputs of each of the three. One layer needs one all-reduce in backward, where three need
    three. enter: applied to the inputs, `CopyToRanks` or, in sequence parallelism, `GatherTokens`.

    Cost per rank: an all-reduce of dx in backward. Shoeybi et al. 2019, section 3. Notebook 11.
    """

    def __init__(
        self,
        linear: nn.Linear,
        group: ProcessGroup | None = None,
        blocks: list[int] | None = None,
        enter: type[torch.autograd.Function] = CopyToRanks,
    ):
        super().__init__(linear, {"weight": 0, "bias": 0}, group, blocks)
        self.enter = enter

    def forward(self, x: Tensor) -> Tensor:
        # Each rank's outputs depend on all of x, so x collects a gradient from every rank.
        x = self.enter.apply(x, self.group)
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(SplitLayer):
    """A Linear of which this rank has some inputs: (..., inputs / W) to (..., outputs), whole.

    Its inputs are a column-parallel layer's outputs. leave: applied to each rank's summands,
    `SumOverRanks` or, in sequence parallelism, `ScatterTokens`. The bias is whole on every rank.

    Cost per rank: an all-reduce of the result in forward. Shoeybi et al. 2019, section 3.
    """

    def __init__(
        self,
        linear: nn.Linear,
        group: ProcessGroup | None = None,
        leave: type[torch.autograd.Function] = SumOverRanks,
    ):
        super().__init__(linear, {"weight": 1}, group)
        self.leave = leave

    def forward(self, x: Tensor) -> Tensor:
        out = self.leave.apply(F.linear(x, self.weight), self.group)
        return out if self.bias is None else out + self.bias  # once, not in each summand


class VocabParallelEmbedding(SplitLayer):
    """An Embedding cut by tokens: a rank has zeros for other ranks' tokens, and all are summed.

    start: this rank's first token. leave: the sum, `SumOverRanks` or `ScatterTokens`. Cost per
    rank: an all-reduce of the result in forward. padding_idx and max_norm are ignored.
    """

    def __init__(
        self,
        embedding: nn.Embedding,
        group: ProcessGroup | None = None,
        leave: type[torch.autograd.Function] = SumOverRanks,
    ):
        super().__init__(embedding, {"weight": 0}, group)
        self.leave = leave
        self.vocabulary = embedding.num_embeddings
        _, hands = self.split["weight"]
        mine = hands[dist.get_rank(group)]
        self.start = int(mine[0])

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the tokens' vectors, (..., width). tokens: (...), int64, alike on all ranks.

        IndexError: a token that isn't in the vocabulary; the check waits for a GPU.
        """
        outside = (tokens < 0) | (tokens >= self.vocabulary)
        unknown = tokens[outside]
        if len(unknown) > 0:  # every rank would take it for another rank's token
            got = f"got {int(unknown[0])}, expected tokens from 0 to {self.vocabulary - 1}"
            raise IndexError(f"{got}: were they made with this vocabulary?")
        mine, local = among(tokens, self.start, len(self.weight))
        # Exactly one rank has each token's row; the others add 0.
        x = F.embedding(local, self.weight)
        x = x.where(mine.unsqueeze(-1), 0)
        return self.leave.apply(x, self.group)


def vocabulary_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    start: int,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Compute the cross-entropy of each target, in nats, where no rank has all logits.

    logits: (..., this rank's part of the vocabulary), from token `start` on. targets: (...), int64,
    alike on all ranks, as is the result, (...), in float32 at least. A target that isn't in the
    vocabulary isn't noticed, and gives a wrong number.

    Cost per rank: all-reduces of three numbers a target, whatever the vocabulary. Notebook 11.
    """
    logits = widened(logits)
    # The maximum over all ranks: no power may overflow. It cancels, so autograd needn't know it.
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    shifted = logits - largest.unsqueeze(-1)
    # Exactly one rank has the target's logit; the others add 0.
    mine, local = among(targets, start, logits.shape[-1])
    of_local = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1)
    own = of_local.where(mine, 0)
    # Both sums in one message.
    both = torch.stack([shifted.exp().sum(-1), own])
    ell, of_target = SumOverRanks.apply(both, group)
    return ell.log() - of_target


def among(tokens: Tensor, start: int, count: int) -> tuple[Tensor, Tensor]:
    """Return which tokens are among the `count` from `start` on, and their indices there.

    The first is a mask; the second is 0 for all other tokens. Both have the shape of `tokens`.
    """
    local = tokens - start
    mine = (local >= 0) & (local < count)
    return mine, local.where(mine, 0)


def widened(x: Tensor) -> Tensor:
    """Return `x` in float32 at least, for sums of many numbers."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def clip_grad_norm(
    copies: dict[nn.Parameter, int], max_norm: float, group: ProcessGroup | None = None
) -> Tensor:
    """Scale the whole model's gradient to a norm of at most `max_norm`; return the norm it had.

    In place. copies: {parameter: the number of ranks that hold it alike}, from `count_copies`. Each
    of those ranks adds that part of the copy's square, so that it counts once in the sum over the
    group. Every rank must call, even one without gradients. Cost: one float64 number all-reduced.
    """
    # A copy is counted by every rank that has it, so each adds 1/count.
    gradients = [(p.grad, count) for p, count in copies.items() if p.grad is not None]
    device = next((p.device for p in copies), None)
    nothing = torch.zeros((), dtype=torch.float64, device=device)
    squares = [widened(gradient).square().sum() / count for gradient, count in gradients]
    squared = sum(squares, nothing)
    dist.all_reduce(squared, group=group)
    norm = squared.sqrt()
    for gradient, _ in gradients:
        gradient *= (max_norm / (norm + 1e-6)).clamp(max=1)  # as in torch
    return norm
