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


def tree_broadcast_by_halves(tensor, src):
    """The farthest first: in each hop half as far."""
    world_size = dist.get_world_size()
    place, distance = (dist.get_rank() - src) % world_size, 8
    while distance > 1:
        distance //= 2
        if place % (2 * distance) == 0 and place + distance < world_size:
            dist.send(tensor, (place + distance + src) % world_size)
        elif place % (2 * distance) == distance:
            dist.recv(tensor, (place - distance + src) % world_size)


def tree_reduce_in_place(tensor, dst):
    """The upper half hands on: other ranks' tensors hold partial sums."""
    world_size = dist.get_world_size()
    place, left, part = (dist.get_rank() - dst) % world_size, world_size, torch.empty_like(tensor)
    while left > 1 and place < left:
        keep = (left + 1) // 2
        if place >= keep:
            dist.send(tensor, (place - keep + dst) % world_size)
        elif place + keep < left:
            dist.recv(part, (place + keep + dst) % world_size)
            tensor += part
        left = keep


RIGHT = [
    ("tree_broadcast", tree_broadcast_by_halves),
    ("tree_reduce", tree_reduce_in_place),
    ("broadcast", broadcast_begins_all_at_once),
    ("broadcast", collectives.tree_broadcast),
    ("all_reduce", all_reduce_down_and_up_a_line),
    ("all_gather", all_gather_round_a_ring),
    ("all_gather", all_gather_as_broadcasts),
    ("reduce_scatter", reduce_scatter_one_after_the_other),
]


def broadcast_in_float32(tensor, src):
    narrow = tensor.float()
    collectives.broadcast(narrow, src)
    tensor.copy_(narrow)


WRONG = [("broadcast", broadcast_in_float32, "or send a smaller dtype?")]
