"""The nine collectives of `torch.distributed`, from nothing but send and receive. Notebook 01.

Names, arguments and results are torch's: `src` and `dst` are ranks of the world, even where `group`
is only a part of it; a list has an entry for each rank of the group, in its order, and entries may
differ in size. Tensors are contiguous. Every call is complete when it returns (on GPUs for the
current stream, as torch's): there is no `async_op`.
ValueError: this rank isn't in the group, a list is too short or long, or `op` isn't in COMBINE.

W is the number of ranks of the group, Φ the bytes of the tensor, or of all parts in the list.

    collective                              sent by all ranks  busiest rank, in and out    hops
    broadcast, reduce                       (W-1)Φ             (W-1)Φ, the root            W-1
    the same as trees                       (W-1)Φ             ⌈log₂ W⌉Φ, the root         ⌈log₂ W⌉
    all_reduce                              2(W-1)Φ            2(W-1)Φ, the first rank     2(W-1)
    gather, scatter                         (W-1)/W Φ          (W-1)/W Φ, the root         W-1
    all_gather, all_to_all, reduce_scatter  (W-1)Φ             2(W-1)/W Φ, all alike       1
    barrier                                 W⌈log₂ W⌉ bytes    2⌈log₂ W⌉ bytes, all alike  ⌈log₂ W⌉

Trees: Thakur, Rabenseifner, Gropp 2005, section 4. Barrier: Hensgen, Finkel, Manber 1988.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from .tools.checks import check_in_group, misuse

Group = ProcessGroup | None  # None: all ranks
SUM = ReduceOp.SUM
COMBINE = {"SUM": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum}


def broadcast(tensor: Tensor, src: int, group: Group = None) -> None:
    """Copy the `tensor` of rank `src` into that of every other rank."""
    ranks = members(group)
    if dist.get_rank() == src:
        for peer in ranks:
            if peer != src:
                dist.send(tensor, peer, group)  # one after the other: the root does all the work
    else:
        dist.recv(tensor, src, group)


def tree_broadcast(tensor: Tensor, src: int, group: Group = None) -> None:
    """Copy the `tensor` of rank `src` to all; ranks that have it send it: each hop doubles them."""
    ranks, place = counted_from(src, group)
    have_it = 1
    while have_it < len(ranks):  # places below `have_it` have the tensor
        if place < have_it and place + have_it < len(ranks):
            dist.send(tensor, ranks[place + have_it], group)
        elif have_it <= place < 2 * have_it:
            dist.recv(tensor, ranks[place - have_it], group)
        have_it *= 2


@torch.no_grad()
def reduce(tensor: Tensor, dst: int, op: ReduceOp = SUM, group: Group = None) -> None:
    """Combine the `tensor` of all ranks in that of `dst`: its own, then in the group's order."""
    ranks, combine = members(group), combined_by(op)
    if dist.get_rank() == dst:
        part = torch.empty_like(tensor)
        for peer in ranks:
            if peer != dst:
                dist.recv(part, peer, group)
                combine(tensor, part, out=tensor)
    else:
        dist.send(tensor, dst, group)


@torch.no_grad()
def tree_reduce(tensor: Tensor, dst: int, op: ReduceOp = SUM, group: Group = None) -> None:
    """Combine the `tensor` of all ranks in that of rank `dst`, as in a tree; others don't change.

    In each hop, half of the ranks that still hold a part send it on.
    """
    ranks, place = counted_from(dst, group)
    combine = combined_by(op)
    total = tensor if place == 0 else tensor.clone()  # only the root's tensor may change
    part = torch.empty_like(tensor)
    distance = 1
    while distance < len(ranks):
        if place % (2 * distance) == distance:
            dist.send(total, ranks[place - distance], group)
            return  # this rank's part is in another's: it has nothing left to do
        if place + distance < len(ranks):
            dist.recv(part, ranks[place + distance], group)
            combine(total, part, out=total)
        distance *= 2


def all_reduce(tensor: Tensor, op: ReduceOp = SUM, group: Group = None) -> None:
    """Combine the `tensor` of all ranks in that of every rank, through the first of them."""
    first = members(group)[0]
    # The first rank alone combines, so all ranks get the same bits.
    reduce(tensor, first, op, group)
    broadcast(tensor, first, group)


@torch.no_grad()
def gather(
    tensor: Tensor, gather_list: list[Tensor] | None = None, dst: int = 0, group: Group = None
) -> None:
    """Copy the `tensor` of every rank into its place in the `gather_list` of rank `dst`."""
    check_in_group("gather", group)
    if dist.get_rank() == dst:
        parts = by_rank(gather_list, group)
        parts.pop(dst).copy_(tensor)
        for peer, part in parts.items():
            dist.recv(part, peer, group)  # straight into the caller's list
    else:
        dist.send(tensor, dst, group)


@torch.no_grad()
def scatter(
    tensor: Tensor, scatter_list: list[Tensor] | None = None, src: int = 0, group: Group = None
) -> None:
    """Copy entry r of the `scatter_list` of rank `src` into the `tensor` of rank r."""
    check_in_group("scatter", group)
    if dist.get_rank() == src:
        parts = by_rank(scatter_list, group)
        tensor.copy_(parts.pop(src))
        for peer, part in parts.items():
            dist.send(part, peer, group)
    else:
        dist.recv(tensor, src, group)


@torch.no_grad()
def all_gather(tensor_list: list[Tensor], tensor: Tensor, group: Group = None) -> None:
    """Copy the `tensor` of every rank into its place in the `tensor_list` of every rank."""
    parts = by_rank(tensor_list, group)
    parts.pop(dist.get_rank()).copy_(tensor)
    exchange(dict.fromkeys(parts, tensor), parts, group)  # the same tensor to every other rank


@torch.no_grad()
def reduce_scatter(
    output: Tensor, input_list: list[Tensor], op: ReduceOp = SUM, group: Group = None
) -> None:
    """Combine entry r of every rank's `input_list` in the `output` of rank r."""
    chunks, combine = by_rank(input_list, group), combined_by(op)
    output.copy_(chunks.pop(dist.get_rank()))
    arrived = {peer: torch.empty_like(output) for peer in chunks}
    exchange(chunks, arrived, group)
    for chunk in arrived.values():  # `output` holds this rank's own chunk already
        combine(output, chunk, out=output)


@torch.no_grad()
def all_to_all(
    output_tensor_list: list[Tensor], input_tensor_list: list[Tensor], group: Group = None
) -> None:
    """Send entry r of the inputs to rank r, and receive what rank r sends here in output r."""
    arriving, leaving = by_rank(output_tensor_list, group), by_rank(input_tensor_list, group)
    arriving.pop(dist.get_rank()).copy_(leaving.pop(dist.get_rank()))
    exchange(leaving, arriving, group)


def barrier(group: Group = None) -> None:
    """Return when every rank of the group has called it.

    After hop h this rank knows, directly or through others, that 2^h ranks have called it.
    """
    ranks, _ = counted_from(dist.get_rank(), group)
    device = (group or dist.group.WORLD)._device_types[0]  # a kind whose memory the backend sends
    byte, heard = torch.zeros(2, dtype=torch.uint8, device=device).split(1)
    distance = 1
    while distance < len(ranks):
        # No rank can finish a hop before the one `distance` to its left has begun it.
        exchange({ranks[distance]: byte}, {ranks[-distance]: heard}, group)
        distance *= 2
    heard.item()  # NCCL's wait() only orders kernels; reading the byte waits until it has arrived


def exchange(outgoing: dict[int, Tensor], incoming: dict[int, Tensor], group: Group) -> None:
    """Send each `outgoing[r]` to rank r, and fill each `incoming[r]` from rank r."""
    # In one batch: if all ranks sent first, each could wait for ever for the others to receive.
    batch = [dist.P2POp(dist.isend, tensor, peer, group) for peer, tensor in outgoing.items()]
    batch += [dist.P2POp(dist.irecv, tensor, peer, group) for peer, tensor in incoming.items()]
    for work in dist.batch_isend_irecv(batch) if batch else []:
        work.wait()


def members(group: Group) -> list[int]:
    """List the ranks of the group, in its order."""
    check_in_group("a collective", group)
    return dist.get_process_group_ranks(group)


def by_rank(tensors: list[Tensor], group: Group) -> dict[int, Tensor]:
    """Return {rank of the group: its entry of the list}."""
    return dict(zip(members(group), tensors, strict=True))


def combined_by(op: ReduceOp):
    """Return the function that combines two tensors: f(total, part, out=total)."""
    if op.name not in COMBINE:
        remedy = "For an average, sum, and divide by the number of ranks."
        raise misuse("a collective", f"op={op.name}", f"one of {', '.join(COMBINE)}", remedy)
    return COMBINE[op.name]


def counted_from(root: int, group: Group) -> tuple[list[int], int]:
    """Return the group's ranks in a circle from `root` on, and this rank's index among them."""
    ranks = members(group)
    start = ranks.index(root)
    ranks = ranks[start:] + ranks[:start]
    return ranks, ranks.index(dist.get_rank())
