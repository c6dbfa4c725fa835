"""Answers to the exercises of notebook 02 that are right, though not written as the reference."""

import torch
import torch.distributed as dist


def _hop(outgoing, incoming, step=1):
    """Both messages with isend and irecv; step -1: to the left."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sending = dist.isend(outgoing, (rank + step) % world_size)
    dist.irecv(incoming, (rank - step) % world_size).wait()
    sending.wait()


def ring_reduce_scatter_waits_for_sends_at_the_end(x):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks, sends = x.tensor_split(world_size), []
    for hop in range(1, world_size):
        chunk = chunks[(rank - hop - 1) % world_size]
        arrived = torch.empty_like(chunk)
        sends.append(dist.isend(chunks[(rank - hop) % world_size], (rank + 1) % world_size))
        dist.recv(arrived, (rank - 1) % world_size)
        chunk.copy_(chunk + arrived)
    for work in sends:
        work.wait()
    return chunks[rank]


def ring_all_gather_the_other_way_round(x):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks = x.tensor_split(world_size)
    for hop in range(1, world_size):
        _hop(chunks[(rank + hop - 1) % world_size], chunks[(rank + hop) % world_size], step=-1)
    return x


def ring_all_gather_skips_empty_chunks(x):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks = x.tensor_split(world_size)
    for hop in range(1, world_size):
        outgoing = chunks[(rank - hop + 1) % world_size]
        incoming = chunks[(rank - hop) % world_size]
        works = []
        if len(outgoing):
            works.append(dist.isend(outgoing, (rank + 1) % world_size))
        if len(incoming):
            works.append(dist.irecv(incoming, (rank - 1) % world_size))
        for work in works:
            work.wait()
    return x


def ring_all_gather_one_sends_first(x):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks = x.tensor_split(world_size)
    for hop in range(1, world_size):
        outgoing = chunks[(rank - hop + 1) % world_size]
        incoming = chunks[(rank - hop) % world_size]
        if rank == 0:
            dist.send(outgoing, 1)
        dist.recv(incoming, (rank - 1) % world_size)
        if rank != 0:
            dist.send(outgoing, (rank + 1) % world_size)
    return x


def ring_plan_in_numbers(world_size):
    ranks = torch.arange(world_size)
    return ((ranks[:, None] - 1 - ranks[:-1]) % world_size).tolist()


def ring_cost_of_two_halves(world_size, nbytes):
    return [2 * (world_size - 1), 2 * ((world_size - 1) / world_size * nbytes)]


RIGHT = [
    ("ring_reduce_scatter", ring_reduce_scatter_waits_for_sends_at_the_end),
    ("ring_all_gather", ring_all_gather_the_other_way_round),
    ("ring_all_gather", ring_all_gather_skips_empty_chunks),
    ("ring_plan", ring_plan_in_numbers),
    ("ring_cost", ring_cost_of_two_halves),
]


def cost_of_this_world(world_size, nbytes):
    hops = 2 * (dist.get_world_size() - 1)
    return hops, hops * nbytes / dist.get_world_size()


WRONG = [("ring_cost", cost_of_this_world, "asked about 8 ranks")]


def cost_of_whole_numbers(world_size, nbytes):
    return 2 * (world_size - 1), 2 * (world_size - 1) * (nbytes // world_size // 8 * 8)


WRONG += [
    ("ring_reduce_scatter", lambda x: RIGHT[0][1](x.clone()), "is right, but it is a new tensor"),
    ("ring_cost", cost_of_whole_numbers, "in a ring of 8 sends 420.0 bytes, yours are 336"),
]
