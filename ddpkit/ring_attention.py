"""Attention over a sequence that no rank has whole: queries stay where they are, keys and values travel round a ring.

Every rank has a slice of the sequence: queries, keys and values of n tokens, (..., n, D). In hop h = 0, 1, ... rank r

    has the keys and values of rank r-h, for its own queries    and meanwhile passes them on to rank r+1    (modulo W).

Each block of scores becomes a triple (m, d, o), a maximum, a sum and weighted values for each query, and
`ddpkit.softmax.merge` joins what the blocks gave: softmax over the whole sequence, of which no rank ever holds a row.

Liu, Zaharia and Abbeel 2023. Notebook 09.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .softmax import _normalized, merge, summarize


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    group: ProcessGroup | None = None,
    lengths: Sequence[int] | None = None,
) -> Tensor:
    """softmax(q·kᵀ/√D)·v for this rank's queries, over the keys and values of all ranks of the group.

    q, k, v: (..., n, D), alike in shape, dtype and device: this rank's slice; the slices of ranks 0, 1, ... follow one
    another in the sequence. causal: a token sees itself and those before it. lengths: n of every rank of the group,
    where they aren't all the same; 0 is one, too. Returns (..., n, D), in the dtype of q; computed in float32 at least.

    Forward only. ValueError: q, k or v wants a gradient; shapes that differ; lengths that don't fit; a group that this
    rank isn't in.

    Cost per rank: 2(W-1) slices sent, of k and v, in W-1 hops, each while a block is computed. Memory: two slices of k
    and v, and one block of scores, n × n. Causal, rank r computes r+1 of W blocks, the last rank W times as many as
    the first (Brandon et al. 2023 deal the tokens out in stripes instead).
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    lengths = _checked_lengths(q, k, v, group, lengths)
    behind, before = (rank + 1) % world_size, (rank - 1) % world_size
    here = torch.stack((k, v))
    total = None
    for hop in range(world_size):
        owner = (rank - hop) % world_size
        arriving = here.new_empty(*here.shape[:-2], lengths[(owner - 1) % world_size], here.shape[-1])
        passing = []
        if hop < world_size - 1:
            send = dist.P2POp(dist.isend, here, group=group, group_peer=behind)
            receive = dist.P2POp(dist.irecv, arriving, group=group, group_peer=before)
            passing = dist.batch_isend_irecv([send, receive])
        if owner <= rank or not causal:
            part = _block(q, *here, causal and owner == rank)
            total = part if total is None else merge(total, part)
        for work in passing:
            work.wait()
        here = arriving
    _, d, o = total
    return _normalized(o, d.unsqueeze(-1)).to(q.dtype)


def _block(q: Tensor, k: Tensor, v: Tensor, diagonal: bool) -> tuple[Tensor, ...]:
    """(m, d, o) of each query over these keys; on the diagonal, over those that don't come after it."""
    at_least_float32 = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(at_least_float32) @ k.to(at_least_float32).mT / math.sqrt(q.shape[-1])
    if diagonal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores.masked_fill_(later, -math.inf)
    return summarize(scores, v)


def _checked_lengths(
    q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup | None, lengths: Sequence[int] | None
) -> list[int]:
    """n of every rank of the group."""
    me, rank = f"rank {dist.get_rank()} called ring_attention with", dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"{me} a group that it isn't in, expected one of its own. Call it on the group's ranks only.")
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v)):
        got = f"{me} tensors that require a gradient, expected none: it has no backward"
        raise ValueError(f"{got}. Call it under torch.no_grad(), or train with ddpkit.flash_attention on one rank.")
    if not q.shape == k.shape == v.shape or q.dim() < 2:
        got = f"q, k, v of shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        raise ValueError(f"{me} {got}, expected one shape (..., n, D). Cut all three at the same tokens.")
    world_size, n = dist.get_world_size(group), q.shape[-2]
    lengths = [n] * world_size if lengths is None else list(lengths)
    if len(lengths) != world_size or lengths[rank] != n:
        expected = f"{world_size} numbers, the one at {rank} being {n}"
        raise ValueError(f"{me} lengths={lengths}, expected {expected}. Give the tokens of each rank, in its order.")
    return lengths
