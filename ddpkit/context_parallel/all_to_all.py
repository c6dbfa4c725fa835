"""Ulysses: each rank gives away most heads of its tokens, and gets all tokens of some heads.

Attention acts on each head alone, so between two all-to-alls a rank computes ordinary attention,
over the whole sequence, for 1/W of the heads. Jacobs et al. 2023 (DeepSpeed-Ulysses). Notebook 13.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..flash_attention import flash_attention
from ..tools.checks import misuse
from .blocks import check, for_heads


def all_to_all_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Attend to the tokens of all ranks, of which rank r has the r-th part, by trading heads.

    q: (..., heads, n, D). k, v: (..., kv heads, n, D), of this rank's tokens; n may be odd. Returns
    the shape and dtype of q. Costs and further errors: see `ddpkit.context_parallel`. ValueError: W
    doesn't divide the heads, or those of keys and values.
    """
    check("all_to_all_attention", q, k, v, group, halves=False)
    world_size = dist.get_world_size(group)
    heads = q.shape[-3]
    kv_heads = k.shape[-3]
    if heads % world_size != 0 or kv_heads % world_size != 0:
        got = f"{heads} heads and {kv_heads} of keys and values"
        remedy = "Use fewer ranks, repeat keys and values, or take a ring."
        raise misuse("all_to_all_attention", got, f"multiples of {world_size} ranks", remedy)
    # One message for all three: next to each other what goes to the same rank.
    parts = [x.unflatten(-3, (world_size, -1)) for x in (q, k, v)]
    qkv = torch.cat(parts, dim=-3).flatten(-4, -3)
    qkv = HeadsForTokens.apply(qkv, group)
    # All tokens, in order; this rank's heads.
    mine = heads // world_size
    mine_kv = kv_heads // world_size
    q, k, v = qkv.split([mine, mine_kv, mine_kv], dim=-3)
    # From here on attention needs no other rank.
    keys = for_heads(k, mine)
    values = for_heads(v, mine)
    o = flash_attention(q, keys, values, causal)
    # And back: all heads of this rank's tokens.
    return TokensForHeads.apply(o, group)


class HeadsForTokens(torch.autograd.Function):
    """A trade of heads for tokens: apply(x, group), (..., H, n, D) to (..., H/W, W·n, D)."""

    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup | None = None) -> Tensor:
        ctx.group = group
        return trade(x, -3, -2, group)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return trade(gradient, -2, -3, ctx.group), None


class TokensForHeads(torch.autograd.Function):
    """A trade back, of tokens for heads: apply(x, group), (..., H/W, W·n, D) to (..., H, n, D)."""

    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup | None = None) -> Tensor:
        ctx.group = group
        return trade(x, -2, -3, group)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return trade(gradient, -3, -2, ctx.group), None


def trade(x: Tensor, cut: int, join: int, group: ProcessGroup | None = None) -> Tensor:
    """Cut x along dimension `cut`, send part r to rank r; return what comes, joined along `join`.

    W must divide the length that is cut. Cost per rank: one all-to-all, (W−1)/W of x sent.
    """
    # The wire takes contiguous parts, one for each rank, in their order.
    parts = torch.stack(x.chunk(dist.get_world_size(group), dim=cut))
    received = torch.empty_like(parts)  # part r is from rank r
    dist.all_to_all_single(received, parts, group=group)
    return torch.cat(received.unbind(), dim=join)
