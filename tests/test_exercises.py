"""Every exercise: the reference passes, the empty stub is "not written yet", wrong answers get the hint that fits."""

import re
import time

import pytest
import torch
import torch.distributed as dist

from ddpkit import cost, launch, ring
from ddpkit.ddp import NaiveDDP
from ddpkit.lesson import check
from ddpkit.lesson.check.exercise import is_stub, read_sum, who_is_in
from ddpkit.models import GPT, mean_loss

EXERCISES = [name for name in check.__all__ if name != "is_stub"]


@pytest.mark.parametrize("name", EXERCISES)
def test_reference_passes(name):
    exercise = getattr(check, name)
    verdict = exercise(exercise.reference)
    assert verdict.passed, verdict.text
    assert verdict.text.startswith("✓")


@pytest.mark.parametrize("name", EXERCISES)
def test_stub_is_not_written_yet(name):
    def stub(*args):
        """Docstring."""
        ...  # noqa: PIE790

    verdict = getattr(check, name)(stub)
    assert verdict.passed is None
    assert "not written yet" in verdict.text


@pytest.mark.parametrize("name", EXERCISES)
def test_at_least_four_wrong_answers(name):
    assert sum(mutant[0] == name for mutant in MUTANTS) >= 4


@pytest.mark.parametrize("name", EXERCISES)
def test_solution_is_the_library_source(name):
    exercise = getattr(check, name)
    assert re.search(rf"^(def|class) {name}\(", exercise.solution().text, re.MULTILINE)


def _rank():
    return dist.get_rank()


def _size():
    return dist.get_world_size()


# say_hello


def hello_unordered():
    print(f"hello from rank {_rank()} of {_size()}")


def hello_by_the_clock():
    time.sleep(0.4 * _rank())
    print(f"hello from rank {_rank()} of {_size()}")


def hello_all_from_rank_0():
    if _rank() == 0:
        for rank in range(_size()):
            print(f"hello from rank {rank} of {_size()}")


def hello_every_turn():
    for _ in range(_size()):
        print(f"hello from rank {_rank()} of {_size()}")
        dist.barrier()


def hello_barrier_on_one_rank():
    for turn in range(_size()):
        if turn == _rank():
            print(f"hello from rank {_rank()} of {_size()}")
            if _rank() == 0:
                dist.barrier()


def hello_wrong_words():
    for turn in range(_size()):
        if turn == _rank():
            print(f"Hello from rank {_rank()}")
        dist.barrier()


def hello_barrier_then_clock():
    dist.barrier()
    time.sleep(0.4 * _rank())
    print(f"hello from rank {_rank()} of {_size()}")


def hello_counts_barriers_wrongly():
    for _ in range(_rank()):
        dist.barrier()
    print(f"hello from rank {_rank()} of {_size()}")


# neighbours


def neighbours_open():
    return _rank() - 1, _rank() + 1


def neighbours_swapped():
    return (_rank() + 1) % _size(), (_rank() - 1) % _size()


def neighbours_of_four():
    return (_rank() - 1) % 4, (_rank() + 1) % 4


def neighbours_off_by_one():
    return (_rank() - 1) % (_size() - 1), (_rank() + 1) % (_size() - 1)


def neighbours_right_only():
    return (_rank() + 1) % _size()


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


# ring_reduce_scatter


def _swap(outgoing, incoming, step=1):
    """One hop: `outgoing` to the rank behind, `incoming` from the one before."""
    rank, size = _rank(), _size()
    works = [dist.isend(outgoing, (rank + step) % size), dist.irecv(incoming, (rank - step) % size)]
    for work in works:
        work.wait()


def _reduce_round(x, combine, late=0, hops=-1, step=1, mirrored=1, keep=None):
    """A ring reduce-scatter that can be wrong in one thing. late: chunks are one on. hops: how many more than W."""
    rank, size = _rank(), _size()
    chunks = x.tensor_split(size)
    for hop in range(1, size + hops + 1):
        chunk = chunks[(rank - mirrored * (hop + 1) + late) % size]
        arriving = torch.empty_like(chunk)
        _swap(chunks[(rank - mirrored * hop + late) % size], arriving, step)
        chunk.copy_(combine(chunk, arriving))
    return chunks[rank if keep is None else keep % size]


def ring_reduce_scatter_whole_buffers(x, combine=torch.add):
    travelling = x.clone()
    for _ in range(_size() - 1):
        arriving = torch.empty_like(x)
        _swap(travelling, arriving)
        x.copy_(combine(x, arriving))
        travelling = arriving
    return x.tensor_split(_size())[_rank()]


def ring_reduce_scatter_loses_the_remainder(x, combine=torch.add):
    rank, size = _rank(), _size()
    length = len(x) // size
    chunks = [x[chunk * length : (chunk + 1) * length] for chunk in range(size)]
    for hop in range(1, size):
        chunk = chunks[(rank - hop - 1) % size]
        arriving = torch.empty_like(chunk)
        _swap(chunks[(rank - hop) % size], arriving)
        chunk.copy_(combine(chunk, arriving))
    return chunks[rank]


def ring_reduce_scatter_combines_before_wait(x, combine=torch.add):
    rank, size = _rank(), _size()
    chunks = x.tensor_split(size)
    for hop in range(1, size):
        chunk = chunks[(rank - hop - 1) % size]
        arriving = torch.empty_like(chunk)
        sending = dist.isend(chunks[(rank - hop) % size], (rank + 1) % size)
        receiving = dist.irecv(arriving, (rank - 1) % size)
        chunk.copy_(combine(chunk, arriving))
        sending.wait()
        receiving.wait()
    return chunks[rank]


def ring_reduce_scatter_never_waits_for_the_receive(x, combine=torch.add):
    rank, size = _rank(), _size()
    chunks = x.tensor_split(size)
    for hop in range(1, size):
        chunk = chunks[(rank - hop - 1) % size]
        arriving = torch.empty_like(chunk)
        sending = dist.isend(chunks[(rank - hop) % size], (rank + 1) % size)
        dist.irecv(arriving, (rank - 1) % size)
        sending.wait()
        chunk.copy_(combine(chunk, arriving))
    return chunks[rank]


def ring_reduce_scatter_never_waits_for_the_send(x, combine=torch.add):
    rank, size = _rank(), _size()
    chunks = x.tensor_split(size)
    for hop in range(1, size):
        chunk = chunks[(rank - hop - 1) % size]
        arriving = torch.empty_like(chunk)
        dist.isend(chunks[(rank - hop) % size], (rank + 1) % size)
        dist.recv(arriving, (rank - 1) % size)
        chunk.copy_(combine(chunk, arriving))
    return chunks[rank]


def ring_reduce_scatter_overwrites_what_it_sends(x, combine=torch.add):
    """On 2 ranks it depends on who is faster; on 3, rank 1 comes too late for rank 0's first message."""
    rank, size = _rank(), _size()
    chunks = x.tensor_split(size)
    travelling, arriving = x.new_zeros(2, len(chunks[0]))
    travelling[: len(chunks[rank - 1])] = chunks[rank - 1]
    for hop in range(1, size):
        outgoing, chunk = chunks[(rank - hop) % size], chunks[(rank - hop - 1) % size]
        sending = dist.isend(travelling[: len(outgoing)], (rank + 1) % size)
        dist.recv(arriving[: len(chunk)], (rank - 1) % size)
        chunk.copy_(combine(chunk, arriving[: len(chunk)]))
        travelling[: len(chunk)] = chunk
        sending.wait()
    return chunks[rank]


def ring_reduce_scatter_one_chunk_late(x, combine=torch.add):
    return _reduce_round(x, combine, late=1)


def ring_reduce_scatter_ends_on_the_next_chunk(x, combine=torch.add):
    return _reduce_round(x, combine, late=1, keep=_rank() + 1)


def ring_reduce_scatter_to_the_left(x, combine=torch.add):
    return _reduce_round(x, combine, step=-1)


def ring_reduce_scatter_one_hop_too_few(x, combine=torch.add):
    return _reduce_round(x, combine, hops=-2)


def ring_reduce_scatter_one_hop_too_many(x, combine=torch.add):
    return _reduce_round(x, combine, hops=0 if _size() > 1 else -1)


def ring_reduce_scatter_send_send(x, combine=torch.add):
    rank, size = _rank(), _size()
    chunks = x.tensor_split(size)
    for hop in range(1, size):
        chunk = chunks[(rank - hop - 1) % size]
        arriving = torch.empty_like(chunk)
        dist.send(chunks[(rank - hop) % size], (rank + 1) % size)
        dist.recv(arriving, (rank - 1) % size)
        chunk.copy_(combine(chunk, arriving))
    return chunks[rank]


def ring_reduce_scatter_always_adds(x, combine=torch.add):
    return _reduce_round(x, torch.add)


def ring_reduce_scatter_needs_combine(x, combine):
    return _reduce_round(x, combine)


def ring_reduce_scatter_keeps_what_arrives(x, combine=torch.add):
    return _reduce_round(x, lambda own, arriving: arriving)


def ring_reduce_scatter_passes_on_what_it_brought(x, combine=torch.add):
    rank, size = _rank(), _size()
    chunks, brought = x.tensor_split(size), x.clone().tensor_split(size)
    for hop in range(1, size):
        chunk = chunks[(rank - hop - 1) % size]
        arriving = torch.empty_like(chunk)
        _swap(brought[(rank - hop) % size], arriving)
        chunk.copy_(combine(chunk, arriving))
    return chunks[rank]


def ring_reduce_scatter_own_twice(x, combine=torch.add):
    return _reduce_round(x, lambda own, arriving: combine(combine(own, arriving), own))


def ring_reduce_scatter_by_torch(x, combine=torch.add):
    dist.all_reduce(x)
    return x.tensor_split(_size())[_rank()]


def ring_reduce_scatter_returns_a_copy(x, combine=torch.add):
    return _reduce_round(x, combine).clone()


def ring_reduce_scatter_new_list_entries(x, combine=torch.add):
    rank, size = _rank(), _size()
    chunks = list(x.tensor_split(size))
    for hop in range(1, size):
        arriving = torch.empty_like(chunks[(rank - hop - 1) % size])
        _swap(chunks[(rank - hop) % size], arriving)
        chunks[(rank - hop - 1) % size] = combine(chunks[(rank - hop - 1) % size], arriving)
    return chunks[rank]


def ring_reduce_scatter_works_on_a_copy(x, combine=torch.add):
    return _reduce_round(x.clone(), combine, hops=-2)


def ring_reduce_scatter_returns_nothing(x, combine=torch.add):
    _reduce_round(x, combine)


def ring_reduce_scatter_returns_x(x, combine=torch.add):
    _reduce_round(x, combine)
    return x


def ring_reduce_scatter_straight_to_the_owner(x, combine=torch.add):
    rank, size = _rank(), _size()
    chunks = x.tensor_split(size)
    others = [other for other in range(size) if other != rank]
    works = [dist.isend(chunks[other], other) for other in others]
    for other in others:
        arriving = torch.empty_like(chunks[rank])
        dist.recv(arriving, other)
        chunks[rank].copy_(combine(chunks[rank], arriving))
    for work in works:
        work.wait()
    return chunks[rank]


def ring_reduce_scatter_element_by_element(x, combine=torch.add):
    rank, size = _rank(), _size()
    chunks = x.tensor_split(size)
    for hop in range(1, size):
        outgoing, chunk = chunks[(rank - hop) % size], chunks[(rank - hop - 1) % size]
        arriving = torch.empty_like(chunk)
        for one, other in zip(outgoing.split(1), arriving.split(1), strict=True):
            _swap(one, other)
        chunk.copy_(combine(chunk, arriving))
    return chunks[rank]


# ring_all_gather


def _gather_round(x, late=0, hops=-1, step=1, mirrored=1, own=False):
    """A ring all-gather that can be wrong in one thing, as in `_reduce_round`."""
    rank, size = _rank(), _size()
    chunks = x.tensor_split(size)
    for hop in range(1, size + hops + 1):
        outgoing = chunks[rank if own else (rank - mirrored * (hop - 1) + late) % size]
        _swap(outgoing, chunks[(rank - mirrored * hop + late) % size], step)
    return x


def ring_all_gather_starts_like_reduce_scatter(x):
    return _gather_round(x, late=-1)


def ring_all_gather_adds(x):
    rank, size = _rank(), _size()
    chunks = x.tensor_split(size)
    for hop in range(1, size):
        chunk = chunks[(rank - hop) % size]
        arriving = torch.empty_like(chunk)
        _swap(chunks[(rank - hop + 1) % size], arriving)
        chunk += arriving
    return x


def ring_all_gather_own_chunk_every_hop(x):
    rank, size = _rank(), _size()
    chunks = x.tensor_split(size)
    for hop in range(1, size):
        place = torch.empty_like(chunks[(rank - 1) % size])
        _swap(chunks[rank], place)
        chunks[(rank - hop) % size][: len(place)] = place[: len(chunks[(rank - hop) % size])]
    return x


def ring_all_gather_loses_the_remainder(x):
    _gather_round(x[: len(x) // _size() * _size()])
    return x


def ring_all_gather_to_the_left(x):
    return _gather_round(x, step=-1)


def ring_all_gather_one_hop_too_few(x):
    return _gather_round(x, hops=-2)


def ring_all_gather_one_hop_too_many(x):
    return _gather_round(x, hops=0 if _size() > 1 else -1)


def ring_all_gather_passes_on_too_early(x):
    rank, size = _rank(), _size()
    chunks, works = x.tensor_split(size), []
    for hop in range(1, size):
        works.append(dist.isend(chunks[(rank - hop + 1) % size], (rank + 1) % size))
        works.append(dist.irecv(chunks[(rank - hop) % size], (rank - 1) % size))
    for work in works:
        work.wait()
    return x


def ring_all_gather_whole_buffers(x):
    rank, size = _rank(), _size()
    travelling = x.clone()
    for hop in range(1, size):
        arriving = torch.empty_like(x)
        _swap(travelling, arriving)
        x.tensor_split(size)[(rank - hop) % size].copy_(arriving.tensor_split(size)[(rank - hop) % size])
        travelling = arriving
    return x


def ring_all_gather_send_send(x):
    rank, size = _rank(), _size()
    chunks = x.tensor_split(size)
    for hop in range(1, size):
        dist.send(chunks[(rank - hop + 1) % size], (rank + 1) % size)
        dist.recv(chunks[(rank - hop) % size], (rank - 1) % size)
    return x


def ring_all_gather_straight_to_all(x):
    chunks = x.tensor_split(_size())
    others = [rank for rank in range(_size()) if rank != _rank()]
    works = [dist.isend(chunks[_rank()], other) for other in others]
    works += [dist.irecv(chunks[other], other) for other in others]
    for work in works:
        work.wait()
    return x


def ring_all_gather_by_torch(x):
    for rank, chunk in enumerate(x.tensor_split(_size())):
        dist.broadcast(chunk, rank)
    return x


def ring_all_gather_returns_nothing(x):
    _gather_round(x)


def ring_all_gather_returns_its_chunk(x):
    return _gather_round(x).tensor_split(_size())[_rank()]


def ring_all_gather_returns_a_new_tensor(x):
    return _gather_round(x.clone())


# ring_cost


def ring_cost_of_one_half(world_size, nbytes):
    return world_size - 1, (world_size - 1) / world_size * nbytes


def ring_cost_bytes_of_one_half(world_size, nbytes):
    return 2 * (world_size - 1), (world_size - 1) / world_size * nbytes


def ring_cost_w_hops_a_half(world_size, nbytes):
    return 2 * world_size, 2 * nbytes


def ring_cost_bytes_of_w_hops(world_size, nbytes):
    return 2 * (world_size - 1), 2 * nbytes


def ring_cost_of_all_ranks(world_size, nbytes):
    return 2 * (world_size - 1), 2 * (world_size - 1) * nbytes


def ring_cost_of_whole_buffers(world_size, nbytes):
    return 2 * (world_size - 1), (world_size - 1) * nbytes


def ring_cost_divides_first(world_size, nbytes):
    return 2 * (world_size - 1), 2 * (world_size - 1) // world_size * nbytes


def ring_cost_in_and_out(world_size, nbytes):
    return 2 * (world_size - 1), 4 * (world_size - 1) / world_size * nbytes


def ring_cost_as_a_share(world_size, nbytes):
    return 2 * (world_size - 1), 2 * (world_size - 1) / world_size


def ring_cost_bytes_first(world_size, nbytes):
    return 2 * (world_size - 1) / world_size * nbytes, 2 * (world_size - 1)


def ring_cost_bytes_only(world_size, nbytes):
    return 2 * (world_size - 1) / world_size * nbytes


def ring_cost_never_nothing(world_size, nbytes):
    hops = max(1, 2 * (world_size - 1))
    return hops, hops / world_size * nbytes


def ring_cost_by_guess(world_size, nbytes):
    return 7, nbytes


# average_gradients


def _trained(module):
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _average(parameter):
    dist.all_reduce(parameter.grad)
    parameter.grad /= _size()


def average_gradients_sums(module):
    for parameter in _trained(module):
        dist.all_reduce(parameter.grad)


def average_gradients_divides_twice(module):
    for parameter in _trained(module):
        parameter.grad /= _size()
        _average(parameter)


def average_gradients_divides_by_2(module):
    for parameter in _trained(module):
        dist.all_reduce(parameter.grad)
        parameter.grad /= 2


def average_gradients_divides_on_rank_0(module):
    for parameter in _trained(module):
        dist.all_reduce(parameter.grad)
        if _rank() == 0:
            parameter.grad /= _size()


def average_gradients_averages_the_parameters(module):
    for parameter in _trained(module):
        dist.all_reduce(parameter.data)
        parameter.data /= _size()


def average_gradients_adds_up_the_parameters(module):
    for parameter in _trained(module):
        dist.all_reduce(parameter.data)


def average_gradients_broadcasts(module):
    for parameter in _trained(module):
        dist.broadcast(parameter.grad, 0)


def average_gradients_skips_biases(module):
    for parameter in _trained(module):
        if parameter.dim() > 1:
            _average(parameter)


def average_gradients_in_a_new_tensor(module):
    for parameter in _trained(module):
        mean = parameter.grad / _size()
        dist.all_reduce(mean)


def average_gradients_of_rank_1_only(module):
    for parameter in _trained(module):
        dist.all_reduce(parameter.grad.mul_(_rank() == 1))


def average_gradients_takes_them_away(module):
    for parameter in _trained(module):
        _average(parameter)
        parameter.grad = None


def average_gradients_stumbles_over_the_frozen(module):
    for parameter in module.parameters():
        _average(parameter)


def average_gradients_thaws_the_frozen(module):
    for parameter in module.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        _average(parameter)


def _layer_by_layer(module):
    """With the tied weight twice."""
    every = [parameter for layer in module.modules() for parameter in layer.parameters(recurse=False)]
    return [parameter for parameter in every if parameter.requires_grad]


def average_gradients_sends_tied_twice(module):
    for parameter in _layer_by_layer(module):
        _average(parameter)


def average_gradients_adds_tied_twice(module):
    for parameter in _layer_by_layer(module):
        dist.all_reduce(parameter.grad)
    for parameter in _trained(module):
        parameter.grad /= _size()


def _average_flat(parameters, unpacked):
    """All in one message, cut up again in the order of `unpacked`."""
    flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
    dist.all_reduce(flat)
    flat /= _size()
    for parameter, part in zip(unpacked, flat.split([parameter.numel() for parameter in unpacked]), strict=True):
        parameter.grad.copy_(part.view_as(parameter))


def average_gradients_mixes_up_the_parts(module):
    tokens, weight, bias = _trained(module)
    _average_flat([tokens, weight, bias], [weight, tokens, bias])


def average_gradients_never_waits(module):
    for parameter in _trained(module):
        parameter.grad /= _size()
        dist.all_reduce(parameter.grad, async_op=True)


def average_gradients_number_by_number(module):
    for parameter in _trained(module):
        parameter.grad /= _size()
        for number in parameter.grad.flatten().split(1):
            dist.all_reduce(number)


def average_gradients_reduces_and_broadcasts(module):
    for parameter in _trained(module):
        dist.reduce(parameter.grad, 0)
        dist.broadcast(parameter.grad, 0)
        parameter.grad /= _size()


# sum_or_mean


def _all_rows(rows):
    everybodys = torch.tensor(rows)
    dist.all_reduce(everybodys)
    return everybodys.item()


def _add_up(module, weight):
    for parameter in _trained(module):
        parameter.grad *= weight
        dist.all_reduce(parameter.grad)


def sum_or_mean_always_divides(module, reduction, rows):
    _add_up(module, 1 / _size())


def sum_or_mean_never_divides(module, reduction, rows):
    _add_up(module, 1)


def sum_or_mean_divides_the_sum_by_rows(module, reduction, rows):
    _add_up(module, (1 if reduction == "sum" else rows) / _all_rows(rows))


def sum_or_mean_swapped(module, reduction, rows):
    _add_up(module, rows / _all_rows(rows) if reduction == "sum" else 1)


def sum_or_mean_of_means(module, reduction, rows):
    _add_up(module, 1 if reduction == "sum" else 1 / _size())


def sum_or_mean_divides_by_own_rows(module, reduction, rows):
    _add_up(module, 1 if reduction == "sum" else rows)
    if reduction == "mean":
        for parameter in _trained(module):
            parameter.grad /= rows


def sum_or_mean_rows_of_this_rank_only(module, reduction, rows):
    all_rows = torch.tensor(rows)
    _add_up(module, 1 if reduction == "sum" else rows / all_rows.item())


def sum_or_mean_forgets_to_divide(module, reduction, rows):
    _add_up(module, 1 if reduction == "sum" else rows)


def sum_or_mean_forgets_to_weigh(module, reduction, rows):
    _add_up(module, 1 if reduction == "sum" else 1 / _all_rows(rows))


def sum_or_mean_divides_weighed_by_ranks(module, reduction, rows):
    _add_up(module, 1 if reduction == "sum" else rows / _size())


def sum_or_mean_leaves_sums_alone(module, reduction, rows):
    if reduction == "mean":
        _add_up(module, rows / _all_rows(rows))


def sum_or_mean_leaves_means_alone(module, reduction, rows):
    if reduction == "sum":
        _add_up(module, 1)


def sum_or_mean_adds_tied_twice(module, reduction, rows):
    for parameter in _layer_by_layer(module):
        dist.all_reduce(parameter.grad)


def sum_or_mean_by_guess(module, reduction, rows):
    _add_up(module, 1 if reduction == "sum" else 7)


# HookedDDP


class HookedAsFound(torch.nn.Module):
    """The class as notebook 03 shows it, with its bug."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.average)

    def average(self, gradient):
        dist.all_reduce(gradient.data)
        gradient.data /= dist.get_world_size()

    def forward(self, *inputs):
        return self.module(*inputs)


class HookedAveragesBoth(HookedAsFound):
    def average(self, parameter):
        _average(parameter)
        super().average(parameter)


class HookedForgetsToDivide(HookedAsFound):
    def average(self, parameter):
        dist.all_reduce(parameter.grad)


class HookedDividesTwice(HookedAsFound):
    def average(self, parameter):
        parameter.grad /= _size()
        _average(parameter)


class HookedForTwoRanks(HookedAsFound):
    def average(self, parameter):
        dist.all_reduce(parameter.grad)
        parameter.grad /= 2


class HookedStepsItself(HookedAsFound):
    def average(self, parameter):
        _average(parameter)
        parameter.data -= parameter.grad


class HookedDoesNotWait(HookedAsFound):
    def average(self, parameter):
        parameter.grad /= _size()
        dist.all_reduce(parameter.grad, async_op=True)


class HookedForOneStep(HookedAsFound):
    def average(self, parameter):
        self.averaged = getattr(self, "averaged", 0) + 1
        if self.averaged <= 2:
            _average(parameter)


class HookedOnTheLast(HookedAsFound):
    def __init__(self, module):
        torch.nn.Module.__init__(self)
        self.module = module
        _trained(module)[-1].register_post_accumulate_grad_hook(_average)


class HookedOnCopies(HookedAsFound):
    def __init__(self, module):
        torch.nn.Module.__init__(self)
        self.module = module
        for parameter in _trained(module):
            self.where(parameter).register_hook(self.mean)

    def where(self, parameter):
        return parameter.detach().clone().requires_grad_()

    def mean(self, gradient):
        mean = gradient / _size()
        dist.all_reduce(mean)
        return mean


MUTANTS = [  # exercise, wrong answer, what the verdict must say
    ("say_hello", hello_unordered, "nothing makes a rank wait"),
    ("say_hello", hello_by_the_clock, "waited by the clock"),
    ("say_hello", hello_all_from_rank_0, "only when it is its turn"),
    ("say_hello", hello_every_turn, "only when it is its turn"),
    ("say_hello", hello_barrier_then_clock, "waited by the clock"),
    ("say_hello", hello_counts_barriers_wrongly, "which has returned"),
    ("say_hello", hello_barrier_on_one_rank, "which has returned"),
    ("say_hello", hello_wrong_words, "must read exactly so"),
    ("neighbours", neighbours_open, "the ring must close"),
    ("neighbours", neighbours_swapped, "the wrong way round"),
    ("neighbours", neighbours_of_four, "There is no rank 3. Count with the size of this world"),
    ("neighbours", neighbours_off_by_one, "the size of this world"),
    ("neighbours", neighbours_right_only, "Return two ranks"),
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
    ("ring_reduce_scatter", ring_reduce_scatter_whole_buffers, "sent 32 bytes where the ring needs 16: 1 × the buffer"),
    ("ring_reduce_scatter", ring_reduce_scatter_loses_the_remainder, "5 elements are not 2 times 2"),
    ("ring_reduce_scatter", ring_reduce_scatter_combines_before_wait, "rank 0 called combine before the message was"),
    ("ring_reduce_scatter", ring_reduce_scatter_never_waits_for_the_receive, "what irecv returns, and call wait()"),
    ("ring_reduce_scatter", ring_reduce_scatter_never_waits_for_the_send, "what isend returns, and call wait()"),
    ("ring_reduce_scatter", ring_reduce_scatter_overwrites_what_it_sends, "Somebody wrote into it on the way"),
    ("ring_reduce_scatter", ring_reduce_scatter_one_chunk_late, "Chunk 1 was finished on rank 0, not chunk 0"),
    ("ring_reduce_scatter", ring_reduce_scatter_ends_on_the_next_chunk, "everything is one hop off"),
    ("ring_reduce_scatter", ring_reduce_scatter_to_the_left, "the 30 in it is rank 1's chunk 2"),
    ("ring_reduce_scatter", ring_reduce_scatter_one_hop_too_few, "W-1 hops are needed"),
    ("ring_reduce_scatter", ring_reduce_scatter_one_hop_too_many, "It sent 2 messages: W-1 hops are enough, here 1"),
    ("ring_reduce_scatter", ring_reduce_scatter_send_send, "both with isend and irecv"),
    ("ring_reduce_scatter", ring_reduce_scatter_always_adds, "That is the sum. Put what arrives together with combine"),
    ("ring_reduce_scatter", ring_reduce_scatter_needs_combine, "missing 1 required positional argument: 'combine'"),
    ("ring_reduce_scatter", ring_reduce_scatter_keeps_what_arrives, "rank 0's own chunk is missing from it"),
    ("ring_reduce_scatter", ring_reduce_scatter_passes_on_what_it_brought, "travels on is what combine made"),
    ("ring_reduce_scatter", ring_reduce_scatter_own_twice, "rank 0's own chunk is in it twice"),
    ("ring_reduce_scatter", ring_reduce_scatter_by_torch, "torch did the work"),
    ("ring_reduce_scatter", ring_reduce_scatter_returns_a_copy, "not where the caller wants them, in x[0:2] itself"),
    ("ring_reduce_scatter", ring_reduce_scatter_new_list_entries, "and a new entry in their list make new tensors"),
    ("ring_reduce_scatter", ring_reduce_scatter_works_on_a_copy, "Work on x itself"),
    ("ring_reduce_scatter", ring_reduce_scatter_returns_nothing, "Return x[0:2]: the caller wants the tensor"),
    ("ring_reduce_scatter", ring_reduce_scatter_returns_x, "Return chunk 0 alone"),
    ("ring_reduce_scatter", ring_reduce_scatter_straight_to_the_owner, "rank 0 sent to rank 1 and rank 2"),
    ("ring_reduce_scatter", ring_reduce_scatter_element_by_element, "rank 0 sent 2 messages, and the ring needs 1"),
    ("ring_all_gather", ring_all_gather_starts_like_reduce_scatter, "own chunk is finished from the start"),
    ("ring_all_gather", ring_all_gather_adds, "Chunk 1 holds a sum"),
    ("ring_all_gather", ring_all_gather_own_chunk_every_hop, "Chunk 1 holds rank 2's own numbers"),
    ("ring_all_gather", ring_all_gather_loses_the_remainder, "5 elements are not 2 times 2"),
    ("ring_all_gather", ring_all_gather_to_the_left, "Chunk 2 holds rank 1's numbers. Do both sides"),
    ("ring_all_gather", ring_all_gather_one_hop_too_few, "Chunk 1 never came to rank 0"),
    ("ring_all_gather", ring_all_gather_one_hop_too_many, "W-1 hops are enough, here 1"),
    ("ring_all_gather", ring_all_gather_passes_on_too_early, "rank 0 passed a chunk on before it was there"),
    ("ring_all_gather", ring_all_gather_whole_buffers, "A message held the whole of x"),
    ("ring_all_gather", ring_all_gather_send_send, "both with isend and irecv"),
    ("ring_all_gather", ring_all_gather_straight_to_all, "In a ring it sends to rank 1 only"),
    ("ring_all_gather", ring_all_gather_by_torch, "torch did the work"),
    ("ring_all_gather", ring_all_gather_returns_nothing, "Return x: the caller wants the tensor"),
    ("ring_all_gather", ring_all_gather_returns_its_chunk, "x is right: return all of it"),
    ("ring_all_gather", ring_all_gather_returns_a_new_tensor, "not where the caller wants them, in x itself"),
    ("ring_cost", ring_cost_of_one_half, "the hops of one half"),
    ("ring_cost", ring_cost_bytes_of_one_half, "the bytes of one half"),
    ("ring_cost", ring_cost_w_hops_a_half, "Each half takes W-1 hops, not W"),
    ("ring_cost", ring_cost_bytes_of_w_hops, "the bytes of 2W hops"),
    ("ring_cost", ring_cost_of_all_ranks, "what all ranks send together"),
    ("ring_cost", ring_cost_of_whole_buffers, "the ring of whole buffers"),
    ("ring_cost", ring_cost_divides_first, "Did // lose a fraction?"),
    ("ring_cost", ring_cost_in_and_out, "sends and receives together"),
    ("ring_cost", ring_cost_as_a_share, "Times nbytes"),
    ("ring_cost", ring_cost_bytes_first, "the wrong way round"),
    ("ring_cost", ring_cost_bytes_only, "Return two numbers"),
    ("ring_cost", ring_cost_never_nothing, "A rank alone has nobody to send to"),
    ("ring_cost", ring_cost_by_guess, "How many ranks must a chunk visit"),
    ("average_gradients", average_gradients_sums, "tokens.weight.grad is the sum over the ranks: divide"),
    ("average_gradients", average_gradients_divides_twice, "was divided by the number of ranks twice"),
    ("average_gradients", average_gradients_divides_by_2, "was divided by 2, on 4 ranks"),
    ("average_gradients", average_gradients_divides_on_rank_0, "Every rank must divide, not only those below it"),
    ("average_gradients", average_gradients_averages_the_parameters, "you averaged the parameters"),
    ("average_gradients", average_gradients_adds_up_the_parameters, "tokens.weight itself was 7 and is 14"),
    ("average_gradients", average_gradients_broadcasts, "what the others learned from their data is lost"),
    ("average_gradients", average_gradients_skips_biases, "Was it skipped? Every parameter that is trained"),
    ("average_gradients", average_gradients_in_a_new_tensor, "the mean must end up in .grad itself, in place"),
    ("average_gradients", average_gradients_of_rank_1_only, "tokens.weight.grad is rank 1's own gradient"),
    ("average_gradients", average_gradients_takes_them_away, "rank 0 has no gradients, expected tokens.weight.grad 11"),
    ("average_gradients", average_gradients_takes_them_away, "tokens.weight.grad is gone"),
    ("average_gradients", average_gradients_stumbles_over_the_frozen, "positions isn't trained, so its .grad is None"),
    ("average_gradients", average_gradients_thaws_the_frozen, "positions isn't trained and has no gradient"),
    ("average_gradients", average_gradients_sends_tied_twice, "one parameter, sent twice"),
    ("average_gradients", average_gradients_adds_tied_twice, "did it have its turn twice?"),
    ("average_gradients", average_gradients_mixes_up_the_parts, "holds the mean of body.weight.grad"),
    ("average_gradients", average_gradients_never_waits, "never waited for it"),
    ("average_gradients", average_gradients_number_by_number, "made 10 calls for 3 gradients"),
    ("average_gradients", average_gradients_reduces_and_broadcasts, "what does an all_reduce of each gradient not do"),
    ("sum_or_mean", sum_or_mean_always_divides, "A sum over all rows is divided by nothing"),
    ("sum_or_mean", sum_or_mean_never_divides, "the ranks' means, added up"),
    ("sum_or_mean", sum_or_mean_divides_the_sum_by_rows, "That makes a mean of it; the loss is a sum"),
    ("sum_or_mean", sum_or_mean_swapped, "Are the two swapped?"),
    ("sum_or_mean", sum_or_mean_of_means, "every rank counts alike, though they have 1 to 3 rows"),
    ("sum_or_mean", sum_or_mean_divides_by_own_rows, "divided by this rank's 3 rows. All ranks have 4 together"),
    ("sum_or_mean", sum_or_mean_rows_of_this_rank_only, "the rows of all ranks, added up, too, with an all_reduce"),
    ("sum_or_mean", sum_or_mean_forgets_to_divide, "weighed with rows, and never divided"),
    ("sum_or_mean", sum_or_mean_forgets_to_weigh, "no rank's mean was multiplied by its own rows"),
    ("sum_or_mean", sum_or_mean_divides_weighed_by_ranks, "then divided by the number of ranks"),
    ("sum_or_mean", sum_or_mean_leaves_sums_alone, "this rank's own gradient. Those of all ranks add up"),
    ("sum_or_mean", sum_or_mean_leaves_means_alone, "this rank's own gradient. Those of all ranks belong in it"),
    ("sum_or_mean", sum_or_mean_adds_tied_twice, "did it have its turn twice?"),
    ("sum_or_mean", sum_or_mean_by_guess, "of one process with all 4 rows"),
    ("HookedDDP", HookedAsFound, "The hook's argument is the parameter; its gradient is parameter.grad"),
    ("HookedDDP", HookedAveragesBoth, "handed 32 bytes to all_reduce where its gradients have 16"),
    ("HookedDDP", HookedForgetsToDivide, "weight.grad is the sum over the ranks: divide"),
    ("HookedDDP", HookedDividesTwice, "was divided by the number of ranks twice"),
    ("HookedDDP", HookedForTwoRanks, "was divided by 2, on 4 ranks"),
    ("HookedDDP", HookedStepsItself, "weight itself was 7 and is -14"),
    ("HookedDDP", HookedDoesNotWait, "never waited for it"),
    ("HookedDDP", HookedForOneStep, "The first step was right"),
    ("HookedDDP", HookedOnTheLast, "weight.grad is still rank 0's own"),
    ("HookedDDP", HookedOnCopies, "on the module's own parameters, not on copies"),
]


@pytest.mark.parametrize(("name", "answer", "says"), MUTANTS, ids=[answer.__name__ for _, answer, _ in MUTANTS])
def test_wrong_answer_gets_the_hint_that_fits(name, answer, says):
    verdict = getattr(check, name)(answer)
    assert verdict.passed is False
    assert says in verdict.text


# Answers that are right, though not written as the reference is.


def ring_reduce_scatter_the_other_way_round(x, combine=torch.add):
    return _reduce_round(x, combine, step=-1, mirrored=-1)


def ring_reduce_scatter_in_batches(x, combine=torch.add):
    rank, size = _rank(), _size()
    chunks = x.tensor_split(size)
    for hop in range(1, size):
        chunk = chunks[(rank - hop - 1) % size]
        arriving = torch.empty_like(chunk)
        send = dist.P2POp(dist.isend, chunks[(rank - hop) % size], (rank + 1) % size)
        for work in dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, arriving, (rank - 1) % size)]):
            work.wait()
        chunk.copy_(combine(chunk, arriving))
    return chunks[rank]


def ring_reduce_scatter_element_by_element_combined(x, combine=torch.add):
    return _reduce_round(x, lambda own, arriving: torch.cat([*map(combine, own.split(1), arriving.split(1))]))


def ring_reduce_scatter_waits_for_sends_at_the_end(x, combine=torch.add):
    rank, size = _rank(), _size()
    chunks, sends = x.tensor_split(size), []
    for hop in range(1, size):
        chunk = chunks[(rank - hop - 1) % size]
        arriving = torch.empty_like(chunk)
        sends.append(dist.isend(chunks[(rank - hop) % size], (rank + 1) % size))
        dist.recv(arriving, (rank - 1) % size)
        chunk.copy_(combine(chunk, arriving))
    for work in sends:
        work.wait()
    return chunks[rank]


def ring_all_gather_the_other_way_round(x):
    return _gather_round(x, step=-1, mirrored=-1)


def ring_all_gather_skips_empty_chunks(x):
    rank, size = _rank(), _size()
    chunks = x.tensor_split(size)
    for hop in range(1, size):
        outgoing, incoming, works = chunks[(rank - hop + 1) % size], chunks[(rank - hop) % size], []
        if len(outgoing):
            works.append(dist.isend(outgoing, (rank + 1) % size))
        if len(incoming):
            works.append(dist.irecv(incoming, (rank - 1) % size))
        for work in works:
            work.wait()
    return x


def ring_cost_of_two_halves(world_size, nbytes):
    return [2 * (world_size - 1), 2 * ((world_size - 1) / world_size * nbytes)]


def average_gradients_in_one_message(module):
    _average_flat(_trained(module), _trained(module))


def average_gradients_by_avg(module):
    for parameter in _trained(module):
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)


def average_gradients_all_at_once(module):
    works = []
    for parameter in _trained(module):
        parameter.grad /= _size()
        works.append(dist.all_reduce(parameter.grad, async_op=True))
    for work in works:
        work.wait()


def average_gradients_backwards(module):
    for parameter in reversed(list(module.parameters())):
        if parameter.grad is not None:
            mean = parameter.grad.clone()
            dist.all_reduce(mean)
            parameter.grad = mean / _size()


def sum_or_mean_by_parameter(module, reduction, rows):
    for parameter in _trained(module):
        if reduction == "mean":
            parameter.grad *= rows
        dist.all_reduce(parameter.grad)
        if reduction == "mean":
            parameter.grad /= _all_rows(rows)


class HookedOnTensors(HookedOnCopies):
    """register_hook is given the gradient, and what it returns takes its place."""

    def where(self, parameter):
        return parameter


class HookedBeginsAlike(HookedAsFound):
    def __init__(self, module):
        super().__init__(module)
        for parameter in module.parameters():
            dist.broadcast(parameter.data, 0)

    def average(self, parameter):
        _average(parameter)


RIGHT = [
    ("ring_reduce_scatter", ring_reduce_scatter_the_other_way_round),
    ("ring_reduce_scatter", ring_reduce_scatter_in_batches),
    ("ring_reduce_scatter", ring_reduce_scatter_element_by_element_combined),
    ("ring_reduce_scatter", ring_reduce_scatter_waits_for_sends_at_the_end),
    ("ring_all_gather", ring_all_gather_the_other_way_round),
    ("ring_all_gather", ring_all_gather_skips_empty_chunks),
    ("ring_cost", ring_cost_of_two_halves),
    ("average_gradients", average_gradients_in_one_message),
    ("average_gradients", average_gradients_by_avg),
    ("average_gradients", average_gradients_all_at_once),
    ("average_gradients", average_gradients_backwards),
    ("sum_or_mean", sum_or_mean_by_parameter),
    ("HookedDDP", HookedOnTensors),
    ("HookedDDP", HookedBeginsAlike),
]


@pytest.mark.parametrize(("name", "answer"), RIGHT, ids=[answer.__name__ for _, answer in RIGHT])
def test_other_right_answers_pass(name, answer):
    verdict = getattr(check, name)(answer)
    assert verdict.passed, verdict.text


# The ring of the exercises and that of the library.


def _both_halves(reduce_scatter, all_gather, lengths):
    """What each half leaves in x, as bytes, so that equal means the same bits."""
    left = []
    for numel in lengths:
        for half in (reduce_scatter, all_gather):
            x = torch.randn(numel, generator=torch.Generator().manual_seed(_rank()))
            chunk = half(x).clone()
            left.append((x.numpy().tobytes(), chunk.numpy().tobytes()))
    return left


def _sent(run):
    return [[(record.peer, record.bytes) for record in diary if record.op == "send"] for diary in run.wire]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_references_and_the_library_are_one_ring(world_size):
    exercises = check.ring_reduce_scatter.reference, check.ring_all_gather.reference
    ours = launch(_both_halves, *exercises, (0, 1, 7, 8), world_size=world_size, backend="gloo")
    library = ring.ring_reduce_scatter, ring.ring_all_gather
    theirs = launch(_both_halves, *library, (0, 1, 7, 8), world_size=world_size, backend="gloo")
    assert list(ours) == list(theirs)
    assert _sent(ours) == _sent(theirs)
    assert sum(map(len, _sent(ours))) == 4 * 2 * world_size * (world_size - 1)


@pytest.mark.parametrize("name", ["ring_reduce_scatter", "ring_all_gather"])
def test_solution_of_a_ring_says_where_the_library_has_it(name):
    assert f"ddpkit.ring.{name} sends the same" in getattr(check, name).solution().text.splitlines()[0]


def ring_all_gather_one_sends_first(x):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks = x.tensor_split(world_size)
    for hop in range(1, world_size):
        outgoing, arriving = chunks[(rank - hop + 1) % world_size], chunks[(rank - hop) % world_size]
        if rank == 0:
            dist.send(outgoing, 1)
        dist.recv(arriving, (rank - 1) % world_size)
        if rank != 0:
            dist.send(outgoing, (rank + 1) % world_size)
    return x


def test_messages_that_wait_for_each_other_are_right_but_not_praised():
    assert "in W-1 hops." in check.ring_all_gather(check.ring_all_gather.reference).text
    verdict = check.ring_all_gather(ring_all_gather_one_sends_first)
    assert verdict.passed
    assert "12 hops on 4 ranks instead of 3" in verdict.text


def test_ring_cost_is_compared_with_a_ring_that_can_be_replayed():
    check.ring_cost(ring_cost_of_all_ranks)
    trace = check.ring_cost.replay()._repr_mimebundle_()["text/plain"]
    assert trace.count(" sends ") == 6 * 10


@pytest.mark.parametrize("world_size", range(1, 9))
def test_ring_cost_is_that_of_the_cost_model(world_size):
    volume = cost.volume("ring_all_reduce", 840, world_size)
    assert check.ring_cost.reference(world_size, 840) == (volume.hops, volume.sent)


# The plain loops of notebook 03, the library, and one process.


def _gpt_gradients(wrap, average):
    """A GPT's gradients, averaged, as bytes, so that equal means the same bits; each rank has its own text."""
    torch.manual_seed(0)
    gpt = GPT(vocabulary=8, context=4, width=8, heads=2, layers=1)
    wrapped = wrap(gpt)
    text = torch.randint(8, (2, 5), generator=torch.Generator().manual_seed(_rank()))
    mean_loss(wrapped(text[:, :-1]), text[:, 1:]).backward()
    average(wrapped)
    return [parameter.grad.numpy().tobytes() for parameter in _trained(gpt)]


def _as_it_is(module):
    return module


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_references_average_as_naive_ddp_does(world_size):
    library = launch(_gpt_gradients, NaiveDDP, NaiveDDP.synchronize, world_size=world_size, backend="gloo")
    by_hand = check.average_gradients.reference
    loop = launch(_gpt_gradients, _as_it_is, by_hand, world_size=world_size, backend="gloo")
    hooks = launch(_gpt_gradients, check.HookedDDP.reference, _as_it_is, world_size=world_size, backend="gloo")
    assert list(loop) == list(hooks) == list(library)
    alone = launch(_gpt_gradients, _as_it_is, _as_it_is, world_size=world_size, backend="gloo")
    assert (list(alone) == list(library)) == (world_size == 1)


SPLIT = [3, 1, 2]  # rows of each rank


def _line_gradient(rows, targets, reduction):
    line = torch.nn.Linear(2, 1, dtype=torch.float64)
    torch.nn.init.ones_(line.weight)
    torch.nn.init.zeros_(line.bias)
    torch.nn.functional.mse_loss(line(rows).squeeze(1), targets, reduction=reduction).backward()
    return line


def _share_gradient(sum_or_mean, rows, targets, reduction):
    rows, targets = rows.split(SPLIT)[_rank()], targets.split(SPLIT)[_rank()]
    line = _line_gradient(rows, targets, reduction)
    sum_or_mean(line, reduction, len(rows))
    return line.weight.grad, line.bias.grad


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_sum_or_mean_gives_the_gradients_of_one_process(reduction):
    rows, targets = torch.arange(12, dtype=torch.float64).view(6, 2), torch.arange(6, dtype=torch.float64) ** 2
    line = _line_gradient(rows, targets, reduction)
    run = launch(_share_gradient, check.sum_or_mean.reference, rows, targets, reduction, world_size=3, backend="gloo")
    for weight, bias in run:
        torch.testing.assert_close(weight, line.weight.grad)
        torch.testing.assert_close(bias, line.bias.grad)


def test_other_ways_to_average_get_a_word_of_their_own():
    assert "the tied weight too" in check.average_gradients(check.average_gradients.reference).text
    assert "notebook 04 begins with that" in check.average_gradients(average_gradients_in_one_message).text
    assert "ReduceOp.AVG divides on the way" in check.average_gradients(average_gradients_by_avg).text


def test_replay_of_the_hook_as_found_shows_that_parameters_travel():
    assert "Your all_reduce averaged weight itself" in check.HookedDDP(HookedAsFound).text
    steps = check.HookedDDP.replay().text.splitlines()
    assert sorted(step.partition(": ")[2] for step in steps) == [
        "[5] on every rank → [10] on every rank",
        "[7] on every rank → [14] on every rank",
    ]


def test_an_error_that_is_not_about_none_is_left_as_it_is():
    verdict = check.average_gradients(neighbours_open)
    assert "neighbours_open() takes 0 positional arguments" in verdict.text
    assert "isn't trained" not in verdict.text


def test_second_failure_offers_the_next_hint():
    exercise = check.broadcast
    exercise._failures = exercise._hints_given = 0
    assert "Hint:" not in exercise(broadcast_from_0).text
    assert exercise.hints[0] in exercise(broadcast_from_0).text
    assert exercise.hints[1] in exercise(broadcast_from_0).text
    assert exercise.hints[-1] in exercise.hint().text


def test_failed_check_offers_a_replay_of_the_smallest_failing_world():
    check.broadcast(broadcast_from_0)
    replay = check.broadcast.replay()
    assert "rank 0 sends" in replay._repr_mimebundle_()["text/plain"]
    check.broadcast(check.broadcast.reference)
    assert "nothing to replay" in check.broadcast.replay().text


def test_not_a_function():
    assert "leave the parentheses off" in check.broadcast(None).text


def test_is_stub():
    assert is_stub(lambda: ...) is False
    assert not is_stub(broadcast_from_0)


def test_digits_tell_which_ranks_are_in_a_sum():
    assert who_is_in(1021, 4) == [1, 2, 0, 1]
    assert read_sum(1021, 4) == "rank 2 is missing from it and rank 1 is in it more than once"
    assert read_sum(1111, 4) == ""
