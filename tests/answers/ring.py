"""Answers to the exercises of notebook 02: wrong ones, with what the verdict must say, and other right ones."""

import torch
import torch.distributed as dist


def _rank():
    return dist.get_rank()


def _size():
    return dist.get_world_size()


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


WRONG = [  # exercise, answer, what the verdict must say
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
]


# Right, though not written as the reference is.


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


RIGHT = [
    ("ring_reduce_scatter", ring_reduce_scatter_the_other_way_round),
    ("ring_reduce_scatter", ring_reduce_scatter_in_batches),
    ("ring_reduce_scatter", ring_reduce_scatter_element_by_element_combined),
    ("ring_reduce_scatter", ring_reduce_scatter_waits_for_sends_at_the_end),
    ("ring_all_gather", ring_all_gather_the_other_way_round),
    ("ring_all_gather", ring_all_gather_skips_empty_chunks),
    ("ring_cost", ring_cost_of_two_halves),
]
