"""Answers to the exercises of notebook 01 that are right, though not written as the reference."""

import torch
import torch.distributed as dist

from ddpkit import collectives


def broadcast_begins_all_at_once(tensor, src):
    if dist.get_rank() == src:
        others = [rank for rank in range(dist.get_world_size()) if rank != src]
        for work in [dist.isend(tensor, rank) for rank in others]:
            work.wait()
    else:
        dist.irecv(tensor, src).wait()


def all_reduce_down_and_up_a_line(tensor):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    part = torch.empty_like(tensor)
    if rank < last:
        dist.recv(part, rank + 1)
        tensor += part
    if rank > 0:
        dist.send(tensor, rank - 1)
        dist.recv(tensor, rank - 1)
    if rank < last:
        dist.send(tensor, rank + 1)


def all_gather_round_a_ring(tensor_list, tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tensor_list[rank][...] = tensor
    for hop in range(1, world_size):
        work = dist.isend(tensor_list[(rank - hop + 1) % world_size], (rank + 1) % world_size)
        dist.recv(tensor_list[(rank - hop) % world_size], (rank - 1) % world_size)
        work.wait()


def all_gather_as_broadcasts(tensor_list, tensor):
    tensor_list[dist.get_rank()].copy_(tensor)
    for rank, part in enumerate(tensor_list):
        collectives.broadcast(part, rank)


def reduce_scatter_one_after_the_other(output, input_list):
    rank = dist.get_rank()
    works = [dist.isend(chunk, r) for r, chunk in enumerate(input_list) if r != rank]
    output[...] = input_list[rank]
    part = torch.empty_like(output)
    for other in range(dist.get_world_size()):
        if other != rank:
            dist.recv(part, other)
            torch.add(output, part, out=output)
    for work in works:
        work.wait()


RIGHT = [
    ("broadcast", broadcast_begins_all_at_once),
    ("broadcast", collectives.tree_broadcast),
    ("all_reduce", all_reduce_down_and_up_a_line),
    ("all_gather", all_gather_round_a_ring),
    ("all_gather", all_gather_as_broadcasts),
    ("reduce_scatter", reduce_scatter_one_after_the_other),
]
