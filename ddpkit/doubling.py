"""All-reduce in few hops: partners at distances 1, 2, 4, ... swap what they have.

MPICH's `MPI_Allreduce` takes the first function for short messages, the second for long ones.
W is the number of ranks of the group, n the bytes of the buffer. A hop is a round of messages.

    function                      sent by each rank  hops, one after the other
    doubling_all_reduce           log₂ W n           log₂ W; if W is no power of two, more of both
    halving_doubling_all_reduce   2(W-1)/W n         2 log₂ W; W is a power of two

Both sum, in place, on a contiguous tensor of any shape and any dtype that torch can add. All ranks
of `group` must call with the same number of elements; all have the same bits afterwards.

Thakur, Rabenseifner and Gropp 2005, section 4. Notebook 02.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import Group, exchange
from .ring import flat
from .tools.checks import misuse


def doubling_all_reduce(x: Tensor, group: Group = None) -> Tensor:
    """Sum `x` over all ranks, on every rank, in place, by recursive doubling; return `x`.

    In each hop two ranks swap their sums, and each then has the sum of twice as many ranks. A rank
    beyond the largest power of two hands its numbers to a partner first, and gets the total from it
    last.

    x: contiguous (ValueError if it isn't); the same bits everywhere afterwards.

    Cost per rank: log₂ W times `x` sent in log₂ W hops: few hops, so it wins when messages are
    small. If W is no power of two, ⌊log₂ W⌋ + 2 hops, and the busiest ranks send `x` ⌊log₂ W⌋ + 1
    times. Thakur, Rabenseifner and Gropp 2005, section 4. Notebook 02.
    """
    ours = flat(x, group)
    theirs = torch.empty_like(ours)
    ranks = dist.get_process_group_ranks(group)
    me = dist.get_rank(group)
    world_size = len(ranks)
    power = 1 << (world_size.bit_length() - 1)  # the largest power of two
    # Fold: the ranks beyond the power of two hand theirs to a partner, and wait for the total.
    if me >= power:
        partner = ranks[me - power]
        exchange({partner: ours}, {}, group)
        exchange({}, {partner: ours}, group)
        return x
    if me + power < world_size:
        exchange({}, {ranks[me + power]: theirs}, group)
        ours += theirs
    # Double: after each hop, 2 × distance ranks have the same sum.
    distance = 1
    while distance < power:
        peer = me ^ distance
        exchange({ranks[peer]: ours}, {ranks[peer]: theirs}, group)
        low, high = (ours, theirs) if me < peer else (theirs, ours)
        torch.add(low, high, out=ours)  # both in one order: the same bits, even of a NaN
        distance *= 2
    # Unfold: the total goes back to the partner beyond.
    if me + power < world_size:
        exchange({ranks[me + power]: ours}, {}, group)
    return x


def halving_doubling_all_reduce(x: Tensor, group: Group = None) -> Tensor:
    """Sum `x` over all ranks, on every rank, in place; return `x`.

    Halving is a reduce-scatter: in each hop two partners divide the part that both were summing so
    far, and each sends the half that the other keeps. Doubling is an all-gather, the same way back.

    x: contiguous; the same bits everywhere afterwards. ValueError: it isn't, or W is no power of 2.

    Cost per rank: 2(W-1)/W of `x` sent in 2 log₂ W hops: the bytes of a ring in fewer hops.
    Thakur, Rabenseifner and Gropp 2005, section 4 (Rabenseifner's algorithm). Notebook 02.
    """
    kept = flat(x, group)
    swaps = []
    distance = 1
    ranks = dist.get_process_group_ranks(group)
    me = dist.get_rank(group)
    if len(ranks) & (len(ranks) - 1):
        remedy = "ring_all_reduce takes any number."
        raise misuse("halving_doubling_all_reduce", f"{len(ranks)} ranks", "a power of 2", remedy)
    # Halve: `kept` ends as 1/W of x, summed over all ranks.
    while distance < len(ranks):
        lower, upper = kept.tensor_split(2)  # views: adding to a half changes x
        kept, given = (upper, lower) if me & distance else (lower, upper)
        peer = ranks[me ^ distance]
        arrived = torch.empty_like(kept)
        exchange({peer: given}, {peer: arrived}, group)
        kept += arrived
        swaps.append((peer, kept, given))
        distance *= 2
    # Double: the same partners in reverse give back the halves they finished.
    for peer, finished, missing in reversed(swaps):
        exchange({peer: finished}, {peer: missing}, group)
    return x
