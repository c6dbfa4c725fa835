"""Attention with all keys and values gathered first: one message each way, nothing overlapped.

Simple, any mask is possible, and grouped heads keep it small. But every rank holds the keys and
values of the whole sequence, and waits for them. Llama Team 2024, section 3.3.2. Notebook 13.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from ..transport import start_all_gather, start_reduce_scatter
from .blocks import attend, check, gradients
from .deal import Deal, contiguous, zigzag


def gathered_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, group: ProcessGroup | None = None,
    zigzagged: bool = True,
) -> Tensor:  # fmt: skip
    """Attention over the tokens of all ranks, whose keys and values are all-gathered.

    Arguments, result, errors and cost: see `ddpkit.context_parallel`; n must be even. zigzagged:
    rank r has chunks r and 2W−1−r of 2W, otherwise the r-th part.
    """
    check("gathered_attention", q, k, v, group)
    make = zigzag if zigzagged else contiguous
    return GatheredAttention.apply(q, k, v, causal, make(dist.get_world_size(group)), group)


class GatheredAttention(torch.autograd.Function):
    """Gathered attention for autograd: apply(q, k, v, causal, deal, group)."""

    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, causal: bool, deal: Deal, group: ProcessGroup | None
    ) -> Tensor:
        rank = dist.get_rank(group)
        everyones = k.new_empty(len(deal), 2, *k.shape)
        torch.stack((k, v), out=everyones[rank])
        start_all_gather(everyones.view(-1), group).wait()  # a view: it fills `everyones`
        with torch.autocast(q.device.type, enabled=False):
            # Negative numbers count from the end: the blocks of rank, rank−1, ... modulo W.
            blocks = (everyones[rank - hop] for hop in range(len(deal)))
            o, lse = attend(q, blocks, deal, rank, causal)
        o = o.to(q.dtype)
        ctx.save_for_backward(q, everyones, o, lse)
        ctx.how = causal, deal, group
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, do: Tensor) -> tuple[Tensor | None, ...]:
        q, everyones, o, lse = ctx.saved_tensors
        causal, deal, group = ctx.how
        rank = dist.get_rank(group)
        dq = 0.0
        summands = [torch.empty(0)] * len(deal)
        with torch.autocast(q.device.type, enabled=False):
            for hop in range(len(deal)):
                block = everyones[rank - hop]
                part, summands[rank - hop] = gradients(
                    (q, o, lse, do), block, deal, rank, hop, causal
                )
                dq = dq + part
        # Every rank has a summand of everyone's dk and dv; each keeps the sum of its own.
        flat = torch.stack(summands).view(-1)
        start_reduce_scatter(flat, group).wait()
        dk, dv = flat.view(len(deal), *summands[0].shape)[rank].to(q.dtype)
        return dq.to(q.dtype), dk, dv, None, None, None
