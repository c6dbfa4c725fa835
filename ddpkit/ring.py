"""All-reduce round a ring: every rank talks to its two neighbours only, and no rank carries more than another.

The buffer is cut into W chunks, equal to within one element (`torch.tensor_split`). In hop h = 1, 2, ... rank r

    sends chunk r-h to rank r+1    and    receives chunk r-h-1 from rank r-1    (all modulo W).

In the first W-1 hops a rank adds what arrives to its own chunk and passes the sum on, so that after them rank r holds
chunk r of the total: a reduce-scatter. In the next W-1 hops it stores what arrives and passes it on, so that all ranks
hold all chunks: an all-gather. Both, one after the other, are the all-reduce; no algorithm sends less.

W is the number of ranks of the group, n the bytes of the buffer.

    function                   sent by each rank      hops, one after the other
    ring_reduce_scatter        (W-1)/W n              W-1
    ring_all_gather            (W-1)/W n              W-1
    ring_all_reduce            2(W-1)/W n             2(W-1); 1 for two ranks and less than 16 MiB
    whole_ring_all_reduce      (W-1) n                W-1
    doubling_all_reduce        log₂ W n               log₂ W; if W is no power of two, ⌊log₂ W⌋ + 2

Every function works in place on a contiguous tensor of any shape and any dtype that torch can add, and sums. All but
`whole_ring_all_reduce` leave the same bits on every rank. As in torch, all ranks of `group` must call with the same
number of elements, and nobody checks that; a rank outside `group` gets a warning and takes no part.

Patarasuk and Yuan 2009 (the ring, and the proof that it is optimal); Thakur, Rabenseifner and Gropp 2005 (doubling).
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .collectives import _collective, _exchange, _mistake

SEGMENT_BYTES = 4 * 2**20  # long enough to hide what a message costs, short enough to stay in the cache
AHEAD = 4  # receives posted before they are needed


@_collective
def ring_reduce_scatter(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Leave chunk `rank` of the sum over all ranks on this rank; return it, a 1-D view of `x`.

    x: overwritten in place: the other chunks hold partial sums afterwards.
    ValueError: `x` isn't contiguous.

    Cost per rank: (W-1)/W of `x` sent in W-1 hops. Notebook 02.
    """
    world_size = dist.get_world_size(group)
    x = _flat("ring_reduce_scatter", x)
    _go_round(x, range(1, world_size), group)()
    return x.tensor_split(world_size)[dist.get_rank(group)]


@_collective
def ring_all_gather(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Copy chunk r of rank r's `x` into the `x` of every rank; return `x`.

    x: overwritten in place, except for this rank's own chunk, `x.view(-1).tensor_split(W)[rank]`.
    ValueError: `x` isn't contiguous.

    Cost per rank: (W-1)/W of `x` sent in W-1 hops. Notebook 02.
    """
    world_size = dist.get_world_size(group)
    _go_round(_flat("ring_all_gather", x), range(world_size, 2 * world_size - 1), group)()
    return x


@_collective
def ring_all_reduce(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Sum `x` over all ranks, on every rank; return `x`.

    x: overwritten in place, with the same bits everywhere.
    ValueError: `x` isn't contiguous.

    Cost per rank: 2(W-1)/W of `x` sent in 2(W-1) hops. Two ranks swap less than `AHEAD` segments whole, in one hop: the
    same bytes, half the latency. Notebook 02.
    """
    flat, world_size = _flat("ring_all_reduce", x), dist.get_world_size(group)
    if world_size == 2 and x.nbytes < AHEAD * SEGMENT_BYTES:
        return doubling_all_reduce(x, group)
    _go_round(flat, range(1, 2 * world_size - 1), group)()
    return x


@_collective
def begin_reduce_scatter(x: Tensor, group: ProcessGroup | None = None) -> Callable[[], None]:
    """Send the first chunk of `ring_reduce_scatter`; call what is returned to do the rest, once.

    Until then, leave `x` alone, and begin nothing else round the same ring: its messages would be taken for these.
    What travels meanwhile is the first hop, as far as `AHEAD` segments; with two ranks, that is all there is.
    """
    return _go_round(_flat("begin_reduce_scatter", x), range(1, dist.get_world_size(group)), group)


@_collective
def begin_all_gather(x: Tensor, group: ProcessGroup | None = None) -> Callable[[], None]:
    """Send the first chunk of `ring_all_gather`; call what is returned to do the rest. As `begin_reduce_scatter`."""
    world_size = dist.get_world_size(group)
    return _go_round(_flat("begin_all_gather", x), range(world_size, 2 * world_size - 1), group)


def _go_round(x: Tensor, hops: range, group: ProcessGroup | None) -> Callable[[], None]:
    """Send the first chunk. What is returned, called, does the rest: as the others come in, it adds or stores each and
    passes it on, until the last hop.

    Chunks travel in segments: while one is added, the next are on their way. Their receives are posted ahead, so that
    no sender waits for a place to put one. On GPUs NCCL does all that itself, and wants each send and the receive
    beside it in one batch.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    before, behind = (rank - 1) % world_size, (rank + 1) % world_size
    chunks = x.tensor_split(world_size)
    longest, ahead = max(1, len(chunks[0])), 1
    if x.is_cpu:
        longest, ahead = min(longest, SEGMENT_BYTES // x.element_size()), AHEAD

    arrivals = [(hop, segment) for hop in hops for segment in chunks[(rank - hop - 1) % world_size].split(longest)]
    landing = x.new_empty(min(ahead, sum(hop < world_size for hop, _ in arrivals)), longest)
    places = [
        landing[number % len(landing), : len(segment)] if hop < world_size else segment
        for number, (hop, segment) in enumerate(arrivals)
    ]
    sending, receiving = [], []  # kept to the end: letting a handle go makes Gloo wait for its own thread

    def start(outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        batch = [dist.P2POp(dist.isend, segment, group=group, group_peer=behind) for segment in outgoing]
        batch += [dist.P2POp(dist.irecv, place, group=group, group_peer=before) for place in incoming]
        works = dist.batch_isend_irecv(batch) if batch else []  # NCCL: one handle for all
        sending.extend(works[: len(outgoing)])
        receiving.extend(works[len(works) - len(incoming) :])

    if arrivals:
        start(chunks[(rank - hops.start) % world_size].split(longest), places[:ahead])

    @torch.no_grad()
    def finish() -> None:
        for number, (hop, segment) in enumerate(arrivals):
            receiving[number].wait()
            if hop < world_size:
                segment += places[number]
            start([segment] if hop < hops[-1] else [], places[number + ahead : number + ahead + 1])
        for work in sending:
            work.wait()

    return finish


def _flat(name: str, x: Tensor) -> Tensor:
    if not x.is_contiguous():
        raise _mistake(name, "a tensor with gaps", "a contiguous one", "Give it x.contiguous(), and copy the result.")
    return x.view(-1)


# For contrast, and for small messages


@_collective
def whole_ring_all_reduce(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Sum `x` over all ranks, on every rank, by passing whole buffers round; return `x`.

    x: overwritten in place. Every rank adds in another order, so that floating-point sums may differ in the last bits.

    Cost per rank: W-1 times `x` sent in W-1 hops: W/2 times as many bytes as `ring_all_reduce`. Notebook 02.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    travelling = x.clone()
    for _ in range(world_size - 1):
        arriving = torch.empty_like(x)
        _exchange({(rank + 1) % world_size: travelling}, {(rank - 1) % world_size: arriving}, group)
        x += arriving
        travelling = arriving
    return x


@_collective
def doubling_all_reduce(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Sum `x` over all ranks, on every rank, by recursive doubling; return `x`.

    In each hop two ranks swap all that they have, and each then knows the sum of twice as many ranks. Ranks beyond the
    largest power of two hand theirs to a partner first and get the total from it last.

    x: overwritten in place, with the same bits everywhere.

    Cost per rank: log₂ W times `x` sent in log₂ W hops: few hops, so it wins when messages are small. If W is no power
    of two, ⌊log₂ W⌋ + 2 hops, and the busiest ranks send `x` ⌊log₂ W⌋ + 1 times. Notebook 02.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    core = 1 << (world_size.bit_length() - 1)
    theirs = torch.empty_like(x)
    if rank >= core:
        _exchange({rank - core: x}, {}, group)
        _exchange({}, {rank - core: x}, group)
        return x
    if rank + core < world_size:
        _exchange({}, {rank + core: theirs}, group)
        x += theirs
    distance = 1
    while distance < core:
        peer = rank ^ distance
        _exchange({peer: x}, {peer: theirs}, group)
        torch.add(*((x, theirs) if rank < peer else (theirs, x)), out=x)  # one order, also for the bits of a NaN
        distance *= 2
    if rank + core < world_size:
        _exchange({rank + core: x}, {}, group)
    return x
