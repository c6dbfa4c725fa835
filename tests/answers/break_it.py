"""Answers to notebook 01's puzzle, right in another way than the reference."""

import torch
import torch.distributed as dist


def all_send_first():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.send(torch.zeros(1), (rank + 1) % world_size)


def the_other_way_round():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    work = dist.irecv(torch.empty(3), (rank - 1) % world_size)
    work.wait()


RIGHT = [
    ("wait_in_a_circle", all_send_first),
    ("wait_in_a_circle", the_other_way_round),
]


# Wrong, though it hangs


def two_calls_each():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right = (rank + 1) % world_size
    first = dist.irecv(torch.empty(1), right)
    dist.recv(torch.empty(1), right)
    first.wait()


WRONG = [("wait_in_a_circle", two_calls_each, "made 2 calls; 1 is enough")]
