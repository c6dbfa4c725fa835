"""Answers to the exercises of notebook 01: wrong ones, with what the verdict must say, and other right ones."""

import torch
import torch.distributed as dist


def _rank():
    return dist.get_rank()


def _size():
    return dist.get_world_size()


# broadcast


def broadcast_new_tensor(tensor, src):
    if _rank() == src:
        for rank in range(_size()):
            if rank != src:
                dist.send(tensor, rank)
    else:
        tensor = torch.empty_like(tensor)
        dist.recv(tensor, src)


def broadcast_from_0(tensor, src):
    if _rank() == 0:
        for rank in range(1, _size()):
            dist.send(tensor, rank)
    else:
        dist.recv(tensor, 0)


def broadcast_sends_to_itself(tensor, src):
    if _rank() == src:
        for rank in range(_size()):
            dist.send(tensor, rank)
    else:
        dist.recv(tensor, src)


def broadcast_nobody_receives(tensor, src):
    if _rank() == src:
        for rank in range(_size()):
            if rank != src:
                dist.send(tensor, rank)


def broadcast_by_torch(tensor, src):
    dist.broadcast(tensor, src)


def broadcast_twice(tensor, src):
    for _ in range(2):
        if _rank() == src:
            for rank in range(_size()):
                if rank != src:
                    dist.send(tensor, rank)
        else:
            dist.recv(tensor, src)


def broadcast_forgets_the_handles(tensor, src):
    if _rank() == src:
        for rank in range(_size()):
            if rank != src:
                dist.isend(tensor, rank)
    else:
        dist.irecv(tensor, src)


def broadcast_to_nobody(tensor, src):
    if _rank() == src:
        for rank in range(_size()):
            dist.isend(tensor, rank + 1).wait()
    else:
        dist.recv(tensor, src)


# all_reduce


def _share(tensor):
    """Rank 0's tensor to all."""
    if _rank() == 0:
        for rank in range(1, _size()):
            dist.send(tensor, rank)
    else:
        dist.recv(tensor, 0)


def all_reduce_without_sharing(tensor):
    if _rank() == 0:
        for rank in range(1, _size()):
            part = torch.empty_like(tensor)
            dist.recv(part, rank)
            tensor += part
    else:
        dist.send(tensor, 0)


def all_reduce_overwrites(tensor):
    if _rank() == 0:
        for rank in range(1, _size()):
            dist.recv(tensor, rank)
    else:
        dist.send(tensor, 0)
    _share(tensor)


def all_reduce_rank_0_twice(tensor):
    if _rank() == 0:
        tensor += tensor.clone()
        for rank in range(1, _size()):
            part = torch.empty_like(tensor)
            dist.recv(part, rank)
            tensor += part
    else:
        dist.send(tensor, 0)
    _share(tensor)


def all_reduce_everyone_to_everyone(tensor):
    own, works = tensor.clone(), []
    for rank in range(_size()):
        if rank != _rank():
            works.append(dist.isend(own, rank))
    for rank in range(_size()):
        if rank != _rank():
            part = torch.empty_like(tensor)
            dist.recv(part, rank)
            tensor += part
    for work in works:
        work.wait()


def all_reduce_send_send(tensor):
    for rank in range(_size()):
        if rank != _rank():
            dist.send(tensor, rank)
    for rank in range(_size()):
        if rank != _rank():
            part = torch.empty_like(tensor)
            dist.recv(part, rank)
            tensor += part


def all_reduce_new_tensor(tensor):
    total = tensor.clone()
    all_reduce_everyone_to_everyone(total)


# all_gather


def _gather_all(tensor_list, tensor, own=True, place=lambda rank: rank, extra=0):
    works = []
    for rank in range(_size()):
        if rank != _rank():
            for _ in range(1 + extra):
                works.append(dist.isend(tensor, rank))
                works.append(dist.irecv(tensor_list[place(rank)], rank))
        elif own:
            tensor_list[place(rank)].copy_(tensor)
    for work in works:
        work.wait()


def all_gather_without_own(tensor_list, tensor):
    _gather_all(tensor_list, tensor, own=False)


def all_gather_wrong_places(tensor_list, tensor):
    size = _size()
    _gather_all(tensor_list, tensor, place=lambda rank: (rank + 1) % size)


def all_gather_twice_the_bytes(tensor_list, tensor):
    _gather_all(tensor_list, tensor, extra=1)


def all_gather_send_first(tensor_list, tensor):
    for rank in range(_size()):
        if rank != _rank():
            dist.send(tensor, rank)
    for rank in range(_size()):
        if rank != _rank():
            dist.recv(tensor_list[rank], rank)
    tensor_list[_rank()].copy_(tensor)


def all_gather_to_rank_0_only(tensor_list, tensor):
    tensor_list[_rank()].copy_(tensor)
    if _rank() == 0:
        for rank in range(1, _size()):
            dist.recv(tensor_list[rank], rank)
    else:
        dist.send(tensor, 0)


def all_gather_rebinds(tensor_list, tensor):
    own = [torch.zeros_like(tensor) for _ in tensor_list]
    _gather_all(own, tensor)
    tensor_list = own


# reduce_scatter


def _scatter_all(output, input_list, chunk_for=lambda rank: rank, own=True, keep=lambda rank: rank):
    works = [dist.isend(input_list[chunk_for(rank)], rank) for rank in range(_size()) if rank != _rank()]
    if own:
        output.copy_(input_list[keep(_rank())])
    for rank in range(_size()):
        if rank != _rank():
            part = torch.empty_like(output)
            dist.recv(part, rank)
            output += part
    for work in works:
        work.wait()


def reduce_scatter_without_own(output, input_list):
    _scatter_all(output, input_list, own=False)


def reduce_scatter_off_by_one(output, input_list):
    size = _size()
    _scatter_all(output, input_list, chunk_for=lambda rank: (rank + 1) % size, keep=lambda rank: (rank + 1) % size)


def reduce_scatter_others_chunks(output, input_list):
    mine = _rank()
    _scatter_all(output, input_list, chunk_for=lambda rank: mine)


def reduce_scatter_own_chunks(output, input_list):
    output.copy_(sum(input_list))


def reduce_scatter_via_all_reduce(output, input_list):
    for chunk, tensor in enumerate(input_list):
        total = tensor.clone()
        all_reduce_everyone_to_everyone(total)
        if chunk == _rank():
            output.copy_(total)


def reduce_scatter_send_first(output, input_list):
    output.copy_(input_list[_rank()])
    for rank in range(_size()):
        if rank != _rank():
            dist.send(input_list[rank], rank)
    for rank in range(_size()):
        if rank != _rank():
            part = torch.empty_like(output)
            dist.recv(part, rank)
            output += part


def reduce_scatter_rebinds(output, input_list):
    output = input_list[_rank()].clone()
    _scatter_all(output, input_list)


WRONG = [  # exercise, answer, what the verdict must say
    ("broadcast", broadcast_new_tensor, "receive into `tensor` itself"),
    ("broadcast", broadcast_from_0, "The source is `src`, here rank 1"),
    ("broadcast", broadcast_forgets_the_handles, "never waited for it"),
    ("broadcast", broadcast_to_nobody, "there is no rank"),
    ("broadcast", broadcast_sends_to_itself, "not be the same as the rank"),
    ("broadcast", broadcast_nobody_receives, "Every send needs a recv"),
    ("broadcast", broadcast_by_torch, "torch did the work"),
    ("broadcast", broadcast_twice, "more than the 24"),
    ("all_reduce", all_reduce_without_sharing, "Rank 1 still has only its own number"),
    ("all_reduce", all_reduce_overwrites, "Receive into a second tensor"),
    ("all_reduce", all_reduce_rank_0_twice, "rank 0 is in it more than once"),
    ("all_reduce", all_reduce_everyone_to_everyone, "more than the"),
    ("all_reduce", all_reduce_send_send, "both with isend and irecv"),
    ("all_reduce", all_reduce_new_tensor, "the sum must end up in `tensor` itself"),
    ("all_gather", all_gather_without_own, "no message brings it"),
    ("all_gather", all_gather_wrong_places, "in the wrong places"),
    ("all_gather", all_gather_twice_the_bytes, "more than the"),
    ("all_gather", all_gather_send_first, "both with isend and irecv"),
    ("all_gather", all_gather_to_rank_0_only, "was never filled"),
    ("all_gather", all_gather_rebinds, "The whole list is still empty"),
    ("reduce_scatter", reduce_scatter_without_own, "this one too, adds its chunk"),
    ("reduce_scatter", reduce_scatter_others_chunks, "The 20 in it is rank 1's chunk 1"),
    ("reduce_scatter", reduce_scatter_off_by_one, "That is the sum of chunk 1"),
    ("reduce_scatter", reduce_scatter_own_chunks, "this rank's own chunks"),
    ("reduce_scatter", reduce_scatter_via_all_reduce, "more than the"),
    ("reduce_scatter", reduce_scatter_send_first, "both with isend and irecv"),
    ("reduce_scatter", reduce_scatter_rebinds, "still empty"),
]

RIGHT = []
