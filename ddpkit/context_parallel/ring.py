"""Ring attention, forward and backward: keys and values travel, queries stay.

In hop h rank r has the keys and values of rank r−h, computes with them, and meanwhile sends them on
to its right neighbour. In backward they go round once more. One hop behind them follows the sum of
their gradients, to which each rank adds its summand; a last hop brings it back to the keys' own
rank. Notebook 13.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .blocks import AttentionAcrossRanks, check, gradients
from .deal import Deal, contiguous, zigzag


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Attend to the tokens of all ranks, of which rank r has the r-th part.

    q: (..., heads, n, D). k, v: (..., kv heads, n, D), of this rank's tokens; n must be even.
    Returns q's shape and dtype. Errors and cost: see `ddpkit.context_parallel`. Causal, rank r has
    (r + ½)·n² scores a head that aren't hidden, and all wait for the last rank: W/(2W−1) of the
    time is spent computing. Without `causal` all compute alike.
    """
    check("ring_attention", q, k, v, group)
    deal = contiguous(dist.get_world_size(group))
    return AttentionAcrossRanks.apply(q, k, v, fetch, ring_backward, causal, deal, group)


def zigzag_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Attend to the tokens of all ranks, of which rank r has chunks r and 2W−1−r of 2W.

    q: (..., heads, n, D). k, v: (..., kv heads, n, D), of this rank's tokens; n must be even.
    Returns q's shape and dtype. Errors and cost: see `ddpkit.context_parallel`. Causal, every rank
    has n²/2 scores a head that aren't hidden in each hop, and n/2 more in the first.
    """
    check("zigzag_attention", q, k, v, group)
    deal = zigzag(dist.get_world_size(group))
    return AttentionAcrossRanks.apply(q, k, v, fetch, ring_backward, causal, deal, group)


def fetch(kv: Tensor, group: ProcessGroup | None = None) -> tuple[Tensor, Iterator[Tensor]]:
    """Return this rank's own kv, which is kept for backward, and an iterator over all ranks' kv.

    kv: k and v stacked, (2, ..., kv heads, n, D). The iterator is `travel`'s: own kv first.
    """
    # Other ranks' blocks aren't kept: backward lets them travel again.
    return kv, travel(kv, group)


def ring_backward(
    q: Tensor,
    kv: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    causal: bool,
    deal: Deal,
    group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Return dq, and dk and dv stacked, of this rank's queries, keys and values.

    q, o, do (o's gradient): (..., heads, n, D). kv: k and v stacked. lse: (..., heads, n), of
    forward, over the keys of all ranks. deal: by rank, the two chunks of the sequence that it has.
    Results are float32 at least. Cost: see `ddpkit.context_parallel`.
    """
    rank = dist.get_rank(group)
    saved = q, o, lse, do
    dq = 0.0
    coming = None
    works = []
    # Two things travel: a block, and one hop behind it the sum of its gradients.
    for hop, block in enumerate(travel(kv, group)):
        dq_part, summand = gradients(saved, block, deal, rank, hop, causal)
        dq = dq + dq_part
        # The left neighbour had these keys one hop ago, and then sent the sum of their gradients.
        for work in works:
            work.wait()
        total = summand if coming is None else coming + summand
        coming, works = pass_on(total, group)
    for work in works:  # the right neighbour's keys were last: their sum goes home
        work.wait()
    return dq, coming


def travel(x: Tensor, group: ProcessGroup | None = None) -> Iterator[Tensor]:
    """Yield the x of rank, of rank−1, ..., of all W, each while the next is on its way here.

    x: contiguous, alike in shape and dtype on all ranks. Don't write into what is yielded: it is
    being sent. Every rank must iterate to the end. Cost per rank: W−1 messages.
    """
    world_size = dist.get_world_size(group)
    for hop in range(world_size):
        coming = x
        works = []
        if hop < world_size - 1:
            coming, works = pass_on(x, group)
        yield x  # the caller computes with it while the next one travels
        for work in works:
            work.wait()  # only now may `coming` be read
        x = coming


def pass_on(x: Tensor, group: ProcessGroup | None = None) -> tuple[Tensor, list[dist.Work]]:
    """Begin to send x to the right neighbour, and to receive the left one's.

    Returns (tensor that is being received, handles). Wait for the handles before you read it, or
    write into x. On one rank it is x itself, and there are no handles.
    """
    rank = dist.get_rank(group)
    world_size = dist.get_world_size(group)
    if world_size == 1:
        return x, []
    coming = torch.empty_like(x)  # never x itself, which is being sent
    # In one batch: if every rank sent first, all could wait for ever.
    right = (rank + 1) % world_size
    left = (rank - 1) % world_size
    send = dist.P2POp(dist.isend, x, group=group, group_peer=right)
    receive = dist.P2POp(dist.irecv, coming, group=group, group_peer=left)
    return coming, dist.batch_isend_irecv([send, receive])
