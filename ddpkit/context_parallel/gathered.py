"""Attention with all keys and values gathered first: one collective each way, nothing overlapped.

Simple, any mask would be possible, and few kv heads keep it small. But every rank waits for the
whole sequence's keys and values, and holds them. Llama Team 2024, section 3.3.2. Notebook 13.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..transport import start_all_gather, start_reduce_scatter
from .blocks import AttentionAcrossRanks, check, gradients
from .deal import Deal, contiguous, zigzag


def gathered_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    group: ProcessGroup | None = None,
    zigzagged: bool = True,
) -> Tensor:
    """Attend to the tokens of all ranks, whose keys and values are all-gathered.

    q: (..., heads, n, D). k, v: (..., kv heads, n, D), of this rank's tokens; n must be even.
    Returns the shape and dtype of q. Errors and cost: see `ddpkit.context_parallel`. zigzagged:
    rank r has chunks r and 2W−1−r of 2W; if False, the r-th part of the sequence.
    """
    check("gathered_attention", q, k, v, group)
    make = zigzag if zigzagged else contiguous
    deal = make(dist.get_world_size(group))
    return AttentionAcrossRanks.apply(q, k, v, fetch, gathered_backward, causal, deal, group)


def fetch(kv: Tensor, group: ProcessGroup | None = None) -> tuple[Tensor, list[Tensor]]:
    """All-gather kv, k and v stacked: return all ranks' kv, (W, *kv.shape), and a list of them.

    The first is kept for backward; the list has views of it, in a ring's order: rank, rank−1, ...
    """
    rank = dist.get_rank(group)
    world_size = dist.get_world_size(group)
    everyones = kv.new_empty(world_size, *kv.shape)
    everyones[rank] = kv
    start_all_gather(everyones.view(-1), group).wait()  # a view: it fills `everyones`
    # Negative numbers count from the end: rank, rank−1, ... modulo W.
    return everyones, [everyones[rank - hop] for hop in range(world_size)]


def gathered_backward(
    q: Tensor,
    everyones: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    causal: bool,
    deal: Deal,
    group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Return dq, and dk and dv stacked, of this rank's queries, keys and values, without a ring.

    q, o, do: (..., heads, n, D). everyones: k and v of all ranks, (W, 2, ..., kv heads, n, D). lse:
    (..., heads, n), over all ranks' keys. Results are float32 at least. Cost: one reduce-scatter.
    """
    rank = dist.get_rank(group)
    saved = q, o, lse, do
    dq = 0.0
    summands = list(everyones)  # replaced one by one
    for hop in range(len(deal)):
        owner = (rank - hop) % len(deal)
        # Hops without a wire: every block is here, in the order in which a ring would bring them.
        part, summand = gradients(saved, everyones[owner], deal, rank, hop, causal)
        dq = dq + part
        summands[owner] = summand
    # Every rank has a summand of everyone's dk and dv; each keeps the sum of its own.
    totals = torch.stack(summands)
    start_reduce_scatter(totals.view(-1), group).wait()
    return dq, totals[rank]
