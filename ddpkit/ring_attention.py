"""Attention over a sequence that no rank has whole: keys and values travel round a ring.

Every rank has a slice of the sequence: queries, keys and values of n tokens, (..., n, D). Queries
stay. In hop h = 0, 1, ... rank r uses the keys and values of rank r−h for its own queries, and
meanwhile passes them on to its right neighbour, rank r+1 (modulo W). Each block of scores becomes a
triple: m, a row's largest score s; ℓ, the sum of e^(s−m); o, the sum of e^(s−m) times the value v.
`ddpkit.softmax.merge` joins triples: softmax over the whole sequence, though no rank ever holds a
whole row of scores.

In PyTorch: torch.distributed.tensor.experimental.context_parallel.
Liu, Zaharia and Abbeel 2023. Notebook 09.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .flash_attention import in_fp32, tile_scores
from .softmax import merge, normalize, summarize
from .tools.checks import check_in_group, misuse


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Return softmax(q·kᵀ/√D)·v for this rank's queries, over the keys and values of all ranks.

    q, k, v: (..., n, D), alike in shape and dtype, on every rank: this rank's slice; the slices of
    ranks 0, 1, ... follow one another in the sequence. causal: a token sees itself and those before
    it. Returns (..., n, D), in the dtype of q; computed in float32 at least.

    Forward only. ValueError: q, k or v requires a gradient, outside torch.no_grad(); their shapes
    differ; this rank isn't in `group`.

    Cost per rank: 2(W−1) slices sent, of k and v, in W−1 hops, each while a block is computed.
    Memory: two slices of k and v, and a block of scores, n × n a head. Causal, rank r computes r+1
    of W blocks, the last rank W times as many as the first (Brandon et al. 2023 deal the tokens out
    in stripes instead).
    """
    rank = dist.get_rank(group)
    world_size = dist.get_world_size(group)
    _check(q, k, v, group)
    right = (rank + 1) % world_size
    left = (rank - 1) % world_size
    here = torch.stack((k, v))  # a copy: the caller's k and v are never received into
    arriving = torch.empty_like(here)
    triple = None
    for hop in range(world_size):
        owner = (rank - hop) % world_size
        works = []
        # Send and receive go in one batch: if every rank sent first, all could wait for ever.
        if hop < world_size - 1:
            send = dist.P2POp(dist.isend, here, group=group, group_peer=right)
            receive = dist.P2POp(dist.irecv, arriving, group=group, group_peer=left)
            works = dist.batch_isend_irecv([send, receive])
        if owner <= rank or not causal:  # computed while the next block is on its way
            keys, values = here
            diagonal = causal and owner == rank
            scores = tile_scores(*in_fp32(q, keys), 0, diagonal)
            part = summarize(scores, values)  # the block's own maximum: no rank has the row's
            triple = part if triple is None else merge(triple, part)
        for work in works:
            work.wait()  # only now may `here` be overwritten and `arriving` be read
        here, arriving = arriving, here
    # Now all keys have been here; what is left to do is each row's own.
    _, ell, o = triple
    return normalize(o, ell.unsqueeze(-1)).to(q.dtype)


def _check(q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup | None) -> None:
    check_in_group("ring_attention", group)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v)):
        got = "tensors that require a gradient"
        expected = "none: it has no backward"
        remedy = "Call it under torch.no_grad(), or train with ddpkit.flash_attention on one rank."
        raise misuse("ring_attention", got, expected, remedy)
    if not q.shape == k.shape == v.shape or q.dim() < 2:
        got = f"q, k, v of shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        remedy = "Cut all three at the same tokens."
        raise misuse("ring_attention", got, "one shape (..., n, D)", remedy)
