"""Attention of this rank's queries to blocks of keys that come one by one, and its gradients.

A block is the k and v of one rank, stacked: (2, ..., kv heads, n, D). Hop h has that of rank−h, and
computes pairs of chunks, one of queries and one of keys (`pairs_of_hop`), by notebook 09's
functions: forward returns a pair's output o and lse, the log-sum-exp of its scores, which is all
that `merge` needs; backward computes p again, from the lse of the *whole* row. Notebook 13.
"""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from ..flash_attention import TILE, flash_backward, flash_forward, in_fp32
from ..tools.checks import check_in_group, misuse
from .deal import Deal, pairs_of_hop


class AttentionAcrossRanks(torch.autograd.Function):
    """Attention for autograd, whichever way blocks come and their gradients return to their ranks.

    apply(q, k, v, fetch, send_home, causal, deal, group). fetch(kv, group) returns what backward
    needs of k and v, `kept`, and the blocks of ranks rank, rank−1, ... send_home(q, kept, o, lse,
    do, causal, deal, group) returns dq, and dk and dv stacked. Differentiable once.
    """

    @staticmethod
    def forward(
        ctx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        fetch: Callable,
        send_home: Callable,
        causal: bool,
        deal: Deal,
        group: ProcessGroup | None,
    ) -> Tensor:
        ctx.how = causal, deal, group
        ctx.send_home = send_home
        kept, blocks = fetch(torch.stack((k, v)), group)  # one message for both
        o, lse = attend(q, blocks, deal, dist.get_rank(group), causal)
        rounded = o.to(q.dtype)
        ctx.save_for_backward(q, kept, rounded, lse)
        return rounded

    @staticmethod
    @once_differentiable
    def backward(ctx, do: Tensor) -> tuple[Tensor | None, ...]:
        # What was kept is k and v of this rank, or of all: only the function that fetched it knows.
        dq, dkv = ctx.send_home(*ctx.saved_tensors, do, *ctx.how)
        dk, dv = dkv.to(do.dtype)
        return dq.to(do.dtype), dk, dv, None, None, None, None, None


def attend(
    q: Tensor,
    blocks: Iterable[Tensor],
    deal: Deal,
    rank: int,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Return o and lse of this rank's queries over all blocks, in float32 at least.

    q and o: (..., heads, n, D), lse: (..., heads, n). blocks: those of ranks rank, rank−1, ...
    (modulo W), in this order, one for each hop. deal: the two chunks of each rank.
    """
    queries = chunks(q, deal[rank])
    seen = {}  # by chunk of queries: o and lse over the keys so far
    for hop, block in enumerate(blocks):
        owner = (rank - hop) % len(deal)
        k, v = block  # as `owner` has them: its chunks, by number
        keys = chunks(k, deal[owner], q.shape[-3])
        values = chunks(v, deal[owner], q.shape[-3])
        for query, key, diagonal in pairs_of_hop(deal, rank, hop, causal):
            with torch.autocast(q.device.type, enabled=False):  # it would round scores to 16 bits
                part = flash_forward(queries[query], keys[key], values[key], TILE, diagonal)
            if query in seen:
                part = merge(*seen[query], *part)
            seen[query] = part
    # From chunks back to this rank's tokens.
    parts = [seen[chunk] for chunk in deal[rank]]
    o = torch.cat([o for o, _ in parts], dim=-2)
    lse = torch.cat([lse for _, lse in parts], dim=-1)
    return o, lse


def merge(o: Tensor, lse: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Join the attention to some keys with that to others, for the same queries; return (o, lse).

    o, o_b: (..., n, D), means of values, weighted by e^score. lse, lse_b: (..., n), the logs of the
    weights' sums; NaN if both are -inf. As `ddpkit.softmax.merge` of (lse, 1, o), divided by ℓ.
    """
    total = torch.logaddexp(lse, lse_b)  # never e^lse, which overflows
    share = torch.exp(lse - total).unsqueeze(-1)
    share_b = torch.exp(lse_b - total).unsqueeze(-1)
    return o * share + o_b * share_b, total


def gradients(
    saved: tuple[Tensor, ...],
    block: Tensor,
    deal: Deal,
    rank: int,
    hop: int,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Return what a block adds to dq, and what this rank's queries add to its dk and dv, stacked.

    saved: q, o, lse and do of this rank; o and lse are over the keys of all ranks. block: that of
    rank−hop. Results are float32 at least, and zeros where the mask hides the whole block.
    """
    q, o, lse, do = saved
    k, v = block
    kv_heads = k.shape[-3]
    # Queries and all that belongs to them are this rank's; keys and values are the owner's.
    own = deal[rank]
    theirs = deal[(rank - hop) % len(deal)]
    queries = chunks(q, own)
    outputs = chunks(o, own)
    sums = chunks(lse.unsqueeze(-1), own)
    given = chunks(do, own)
    keys = chunks(k, theirs, q.shape[-3])
    values = chunks(v, theirs, q.shape[-3])
    dq, dkv = (torch.zeros_like(x) for x in in_fp32(q, block))
    # Chunks are views: what is added to them is in dq and dkv.
    dq_of = chunks(dq, own)
    dk_of = chunks(dkv[0], theirs)
    dv_of = chunks(dkv[1], theirs)
    for query, key, diagonal in pairs_of_hop(deal, rank, hop, causal):
        # With the whole row's o and lse, p comes out as in the softmax of all keys.
        of_query = outputs[query], sums[query].squeeze(-1), given[query]
        of_key = keys[key], values[key]
        with torch.autocast(q.device.type, enabled=False):
            parts = flash_backward(queries[query], *of_key, *of_query, causal=diagonal)
        dq_of[query] += parts[0]
        dk_of[key] += for_kv_heads(parts[1], kv_heads)
        dv_of[key] += for_kv_heads(parts[2], kv_heads)
    return dq, dkv


def chunks(x: Tensor, numbers: tuple[int, int], heads: int | None = None) -> dict[int, Tensor]:
    """Cut a rank's tokens, (..., n, D), in two, in float32 at least: {number of chunk: its half}.

    numbers: of its two chunks in the sequence. heads: as many as queries have, to which those of
    keys or values are repeated. Halves are views of x, unless it was converted or repeated.
    """
    (wide,) = in_fp32(x)
    if heads is not None:
        wide = for_heads(wide, heads)
    halves = wide.chunk(2, dim=-2)
    return dict(zip(numbers, halves, strict=True))


def for_heads(kv: Tensor, heads: int) -> Tensor:
    """Repeat keys or values: (..., kv heads, n, D) to (..., heads, n, D)."""
    repeats = heads // kv.shape[-3]
    return kv.repeat_interleave(repeats, dim=-3)


def for_kv_heads(gradient: Tensor, kv_heads: int) -> Tensor:
    """Add up gradients of heads that share keys: (..., heads, n, D) to (..., kv heads, n, D)."""
    by_kv_head = gradient.unflatten(-3, (kv_heads, -1))
    return by_kv_head.sum(-3)


def check(
    name: str, q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup | None, halves: bool = True
) -> None:
    """Raise ValueError unless q, k, v fit, n is even if `halves`, and this rank is in `group`."""
    check_in_group(name, group)
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    fit = q.ndim == k.ndim >= 3 and k.shape == v.shape and q.shape[-2:] == k.shape[-2:]
    if not fit or q.shape[:-3] != k.shape[:-3] or q.shape[-3] % k.shape[-3] != 0:
        expected = "q (..., heads, n, D), k and v (..., kv heads, n, D), kv heads dividing heads"
        raise misuse(name, shapes, expected, "Cut all three at the same tokens.")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        got = ", ".join(str(x.dtype) for x in (q, k, v))
        raise misuse(name, got, "one floating-point dtype", "Convert them.")
    if halves and (q.shape[-2] % 2 != 0 or q.shape[-2] == 0):
        got = f"{q.shape[-2]} tokens on this rank"
        expected = "an even number, the same on all ranks: two chunks"
        remedy = f"Pad sequences to a multiple of {2 * dist.get_world_size(group)}: share_tokens."
        raise misuse(name, got, expected, remedy)
