"""Answers to the exercises of notebook 00 that are right, though not written as the reference."""

import sys

import torch
import torch.distributed as dist


def say_hello_by_messages():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    token = torch.zeros(1)
    if rank > 0:
        dist.recv(token, rank - 1)
    print(f"hello from rank {rank} of {world_size}")
    if rank + 1 < world_size:
        dist.send(token, rank + 1)


def say_hello_barriers_first():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for turn in range(world_size):
        dist.barrier()
        if turn == rank:
            print("hello from rank", rank, "of", world_size)


def say_hello_waiting_in_the_others_turns():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for turn in range(world_size):
        if turn == rank:
            print(f"hello from rank {rank} of {world_size}")
        else:
            dist.barrier()


def neighbours_by_cases():
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    return last if rank == 0 else rank - 1, 0 if rank == last else rank + 1


RIGHT = [
    ("say_hello", say_hello_by_messages),
    ("say_hello", say_hello_barriers_first),
    ("say_hello", say_hello_waiting_in_the_others_turns),
    ("neighbours", neighbours_by_cases),
]

WRONG = [
    ("say_hello", lambda: print("hello", file=sys.stderr), "Nothing went through sys.stdout"),
    ("neighbours", lambda: torch.ones(2).long().numpy(), "has [1, 1], expected (1, 1).\nReturn"),
]
