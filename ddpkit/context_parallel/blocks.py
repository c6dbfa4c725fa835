"""Attention of this rank's queries to blocks of keys that come one by one, and its gradients.

A block is the k and v of one rank, stacked: (2, ..., kv heads, n, D). Of a block are computed the
pairs of chunks that `pairs_of_hop` lists, each by notebook 09's functions: forward returns the
chunk's output o and the log-sum-exp of its scores, lse, which is all that `merge` needs; backward
computes p again, from the lse of the *whole* row. Notebook 13.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..flash_attention import TILE, flash_backward, flash_forward, in_fp32
from ..tools.checks import check_in_group, mistake
from .deal import Deal, pairs_of_hop


def merge(o: Tensor, lse: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Join the attention to some keys with that to others, for the same queries.

    o: (..., n, D), a mean of values. lse: (..., n), the log of the sum of e^score that it was
    divided by; -inf before any key was seen. The same as `ddpkit.softmax.merge` of (lse, 1, o).
    """
    total = torch.logaddexp(lse, lse_b)  # never e^lse, which overflows
    share = torch.exp(lse - total).unsqueeze(-1)
    share_b = torch.exp(lse_b - total).unsqueeze(-1)
    return o * share + o_b * share_b, total


def attend(
    q: Tensor, blocks: Iterable[Tensor], deal: Deal, rank: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return o and lse of this rank's queries over all blocks, in float32 at least.

    blocks: those of ranks rank, rank−1, ... (modulo W), in this order, each for one hop.
    """
    (q,) = in_fp32(q)
    o = torch.zeros_like(q)
    lse = torch.full_like(q[..., 0], -torch.inf)
    # Views by number of chunk: writing to a view fills o and lse.
    queries = chunks(q, deal[rank])
    o_of = chunks(o, deal[rank])
    lse_of = chunks(lse.unsqueeze(-1), deal[rank])
    for hop, block in enumerate(blocks):
        keys = chunks(block[0], deal[(rank - hop) % len(deal)])
        values = chunks(block[1], deal[(rank - hop) % len(deal)])
        for query, key, diagonal in pairs_of_hop(deal, rank, hop, causal):
            k = for_heads(*in_fp32(keys[key]), q.shape[-3])
            v = for_heads(*in_fp32(values[key]), q.shape[-3])
            part = flash_forward(queries[query], k, v, TILE, diagonal)
            o_new, lse_new = merge(o_of[query], lse_of[query].squeeze(-1), *part)
            o_of[query].copy_(o_new)
            lse_of[query].copy_(lse_new.unsqueeze(-1))
    return o, lse


def gradients(
    saved: tuple[Tensor, ...], block: Tensor, deal: Deal, rank: int, hop: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return what a block adds to dq, and the block's dk and dv, stacked; in float32 at least.

    saved: q, o, lse and do of this rank, of all keys together. The dk and dv are summands: other
    ranks' queries have seen this block, too.
    """
    q, o, lse, do = in_fp32(*saved)
    dq = torch.zeros_like(q)
    dkv = torch.zeros_like(*in_fp32(block))
    numbers, theirs = deal[rank], deal[(rank - hop) % len(deal)]
    dq_of = chunks(dq, numbers)
    mine = [chunks(x, numbers) for x in (q, o, lse.unsqueeze(-1), do)]
    keys, values, dk_of, dv_of = (chunks(x, theirs) for x in (*block, *dkv))
    for query, key, diagonal in pairs_of_hop(deal, rank, hop, causal):
        k = for_heads(*in_fp32(keys[key]), q.shape[-3])
        v = for_heads(*in_fp32(values[key]), q.shape[-3])
        q_c, o_c, lse_c, do_c = (x[query] for x in mine)
        parts = flash_backward(q_c, k, v, o_c, lse_c.squeeze(-1), do_c, diagonal)
        dq_of[query] += parts[0]
        # Heads of queries that share a head of keys add up.
        dk_of[key] += parts[1].unflatten(-3, (block.shape[-3], -1)).sum(-3)
        dv_of[key] += parts[2].unflatten(-3, (block.shape[-3], -1)).sum(-3)
    return dq, dkv


def chunks(x: Tensor, numbers: tuple[int, int]) -> dict[int, Tensor]:
    """Cut a rank's tokens, (..., n, D), in two, by number of chunk: views."""
    first, second = x.chunk(2, dim=-2)
    return {numbers[0]: first, numbers[1]: second}


def for_heads(kv: Tensor, heads: int) -> Tensor:
    """Repeat keys or values, (..., kv heads, n, D), so that each head of queries has its own."""
    return kv.repeat_interleave(heads // kv.shape[-3], dim=-3)


def check(
    name: str, q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup | None, halves: bool = True
) -> None:
    """ValueError unless q, k, v fit, this rank is in `group`, and n can be halved if need be."""
    check_in_group(name, group)
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    fit = q.ndim == k.ndim >= 3 and k.shape == v.shape and q.shape[-2:] == k.shape[-2:]
    if not fit or q.shape[:-3] != k.shape[:-3] or q.shape[-3] % k.shape[-3] != 0:
        expected = "q (..., heads, n, D), k and v (..., kv heads, n, D), kv heads dividing heads"
        raise mistake(name, shapes, expected, "Cut all three at the same tokens.")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        got = ", ".join(str(x.dtype) for x in (q, k, v))
        raise mistake(name, got, "one floating-point dtype", "Convert them.")
    if halves and (q.shape[-2] % 2 != 0 or q.shape[-2] == 0):
        got = f"{q.shape[-2]} tokens on this rank"
        expected = "an even number, the same on all ranks: two chunks"
        remedy = f"Pad sequences to a multiple of {2 * dist.get_world_size(group)}: share_tokens."
        raise mistake(name, got, expected, remedy)
