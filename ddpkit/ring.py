"""All-reduce round a ring: ranks talk to their neighbours only, and none carries more than another.

NCCL and Gloo do this for `torch.distributed.all_reduce` of a large tensor.

The buffer is cut into W chunks, equal to within one element. In each of the first W-1 hops, which
are rounds of messages, a rank adds the chunk that arrives from its left neighbour to its own, and
passes the sum on to the right: this is a reduce-scatter, after which rank r holds chunk r of the
total. In the next W-1 hops the finished chunks go round: an all-gather. One after the other they
are the all-reduce.

W is the number of ranks of the group, n the bytes of the buffer.

    function                   sent by each rank      hops, one after the other
    ring_reduce_scatter        (W-1)/W n              W-1
    ring_all_gather            (W-1)/W n              W-1
    ring_all_reduce            2(W-1)/W n             2(W-1)
    whole_ring_all_reduce      (W-1) n                W-1

These work in place on a contiguous tensor of any shape and any dtype that torch can add; a
reduction is a sum. All ranks of `group` must call with the same number of elements.
`ring_all_reduce` leaves the same bits on every rank, `whole_ring_all_reduce` may not.
`ddpkit.fast.ring` has the first three in segments, for speed; `ddpkit.doubling` needs fewer hops.

Patarasuk and Yuan 2009, who prove that no algorithm sends less while ranks do the adding.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .tools.checks import check_in_group, misuse


def ring_plan(world_size: int) -> list[list[int]]:
    """Return plan[r][h]: the chunk that rank r sends in hop h, from 0 on, of `ring_reduce_scatter`.

    The sum of chunk r ends on rank r, so it starts on the rank to the right of it. Notebook 02.
    """
    plan = []
    for rank in range(world_size):
        plan.append([(rank - hop) % world_size for hop in range(1, world_size)])
    return plan


def ring_reduce_scatter(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Sum `x` over all ranks, in place, until this rank holds chunk `rank` of the sum.

    x: contiguous, the same number of elements on every rank; its other chunks are left holding
    partial sums. Returns the finished chunk, a 1-D view of `x`, empty if `x` is too short.

    Cost per rank: (W-1)/W of `x` sent in W-1 hops. Patarasuk and Yuan 2009, section 3. Notebook 02.
    """
    rank = dist.get_rank(group)
    world_size = dist.get_world_size(group)
    chunks = flat(x, group).tensor_split(world_size)  # views: adding to a chunk changes x
    for hop in range(1, world_size):
        passed_on = chunks[(rank - hop) % world_size]
        mine = chunks[(rank - hop - 1) % world_size]
        arrived = torch.empty_like(mine)
        send_right_receive_left(passed_on, arrived, group)
        mine += arrived  # one rank's summand more; in the next hop it is passed on
    return chunks[rank]


def ring_all_gather(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Copy chunk r of rank r's `x` into the `x` of every rank, in place; return `x`.

    x: contiguous, the same number of elements on every rank; this rank's own chunk stays as it is.

    Cost per rank: (W-1)/W of `x` sent in W-1 hops. Patarasuk and Yuan 2009, section 3. Notebook 02.
    """
    rank = dist.get_rank(group)
    world_size = dist.get_world_size(group)
    chunks = flat(x, group).tensor_split(world_size)  # views: receiving into one changes x
    for hop in range(1, world_size):
        passed_on = chunks[(rank - hop + 1) % world_size]
        place = chunks[(rank - hop) % world_size]  # the one to pass on in the next hop
        send_right_receive_left(passed_on, place, group)
    return x


def ring_all_reduce(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Sum `x` over all ranks, on every rank, in place; return `x`.

    x: contiguous, the same number of elements on every rank; the same bits everywhere afterwards.

    Cost per rank: 2(W-1)/W of `x` sent in 2(W-1) hops. Patarasuk and Yuan 2009. Notebook 02.
    """
    # Between the two, chunk r is finished on rank r and nowhere else.
    ring_reduce_scatter(x, group)
    return ring_all_gather(x, group)


def send_right_receive_left(outgoing: Tensor, incoming: Tensor, group: ProcessGroup | None) -> None:
    """Make one hop: send `outgoing` to the right neighbour, fill `incoming` from the left one.

    Both go in one batch: NCCL would wait for ever if all ranks sent first.
    """
    rank = dist.get_rank(group)
    world_size = dist.get_world_size(group)
    right = (rank + 1) % world_size
    left = (rank - 1) % world_size
    send = dist.P2POp(dist.isend, outgoing, group=group, group_peer=right)
    receive = dist.P2POp(dist.irecv, incoming, group=group, group_peer=left)
    works = dist.batch_isend_irecv([send, receive])  # a handle each; NCCL: one for both
    for work in works:
        work.wait()


def flat(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return a 1-D view of `x`, detached from autograd's graph.

    ValueError: `x` isn't contiguous, or this rank isn't in `group`.
    """
    check_in_group("ddpkit.ring", group)
    if not x.is_contiguous():
        remedy = "Give it x.contiguous()."
        raise misuse("ddpkit.ring", "a tensor with gaps", "a contiguous one", remedy)
    return x.detach().view(-1)


def ring_cost(world_size: int, nbytes: int) -> tuple[int, float]:
    """Return what `ring_all_reduce` of `nbytes` costs each rank: (hops, bytes sent on average).

    Patarasuk and Yuan 2009. Notebook 02.
    """
    hops = 2 * (world_size - 1)  # in each of them every rank sends one chunk
    return hops, hops * nbytes / world_size


# For contrast


def whole_ring_all_reduce(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Sum `x` over all ranks, on every rank, in place, by passing whole buffers round; return `x`.

    x: contiguous. Each rank adds in an order of its own, so floating-point sums may differ in the
    last bits.

    Cost per rank: W-1 times `x` sent in W-1 hops: W/2 times the bytes of `ring_all_reduce`.
    Notebook 02.
    """
    total = flat(x, group)
    passed_on = total.clone()
    # What came from the left goes on to the right, so each rank's buffer visits every other.
    for _ in range(dist.get_world_size(group) - 1):
        arrived = torch.empty_like(passed_on)
        send_right_receive_left(passed_on, arrived, group)
        total += arrived
        passed_on = arrived
    return x
