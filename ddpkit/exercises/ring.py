"""Checkers of notebook 02: ring_reduce_scatter and ring_all_gather, hop by hop, and ring_cost."""

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

import torch
import torch.distributed as dist

from ddpkit import ring
from ddpkit.lesson.figures import hop_numbers
from ddpkit.runtime.launch import Run

from .checker import (
    Exercise,
    Mistake,
    Trial,
    messages,
    mistakes,
    place,
    rank_1_comes_last,
    ready_made,
    unwritten_memory_shows,
)

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these

ELEMENT_BYTES = torch.tensor([0]).element_size()  # the trials use torch's default integers


# The specification: which elements a chunk has, what each rank brings, and what comes out


def _bounds(chunk: int, world_size: int, numel: int) -> tuple[int, int]:
    """First and last+1 element of a chunk: the first numel % W chunks have one element more."""
    size, longer = divmod(numel, world_size)
    start = chunk * size + min(chunk, longer)
    return start, start + size + (chunk < longer)


def _brings(rank: int, world_size: int, numel: int) -> list[int]:
    """Rank r's x. Every chunk of every rank has a digit of its own, so that sums can be read."""
    values = []
    for chunk in range(world_size):
        start, stop = _bounds(chunk, world_size, numel)
        values += [10 ** (world_size * rank + chunk)] * (stop - start)
    return values


def _total(world_size: int, numel: int) -> list[int]:
    parts = [_brings(rank, world_size, numel) for rank in range(world_size)]
    return [sum(column) for column in zip(*parts, strict=True)]


def _name(start: int, stop: int, numel: int) -> str:
    return "x" if stop - start == numel else f"x[{start}:{stop}]"


@dataclass
class Returned:
    """What an answer returned, and all of x afterwards, which helps to say why.

    place: "x" or "x[2:4]" for a view of x; in words for anything else. values: None if no tensor.
    """

    place: str
    values: list | None
    x: list = field(default_factory=list, compare=False)

    def __repr__(self):
        return self.place if self.values is None else f"{self.place} = {self.values}"

    def symptom(self):
        return f"{self}, x = {self.x}"


def _call(answer: Callable, x: torch.Tensor) -> Returned:
    rank_1_comes_last()
    with unwritten_memory_shows():
        got = answer(x)
    if not isinstance(got, torch.Tensor):
        return Returned(f"returned {got!r}", None, x.tolist())
    where = "a new tensor"
    if got.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
        where = _name(got.storage_offset(), got.storage_offset() + got.numel(), len(x))
    return Returned(where, got.flatten().tolist(), x.tolist())


# What can go wrong in both halves of the ring


def _not_x(expected: Returned, got: Returned) -> str:
    """The usual cause if the answer returned something else than it should."""
    if got.values is None:
        return f"Return {expected.place}: the caller wants the tensor."
    if got.place == "a new tensor":
        return (
            f"The result belongs into {expected.place} itself. The chunks of "
            "x.tensor_split(world_size) are views of x, and += writes into x; clone(), + and a new "
            "entry in a list of them make new tensors."
        )
    return f"Return {expected.place}."


TOO_EARLY = (
    "Memory that nobody has written yet is in it: until wait() on the irecv has returned, its "
    "buffer holds whatever lay there."
)


def _races(trial: Trial, run: Run) -> str | None:
    """A message that was passed on before the rank had waited for it."""
    world_size, (numel,) = trial.world_size, trial.args
    if numel < world_size:  # empty chunks: which message is whose can't be told
        return None
    for rank, records in enumerate(run.wire):
        sends = [record for record in records if record.op == "send"]
        receives = [record for record in records if record.op == "recv"]
        if len(sends) != world_size - 1 or len({record.peer for record in sends}) != 1:
            continue  # no ring
        for receive, send in zip(receives, sends[1:], strict=False):
            if send.issued < receive.done:
                return (
                    f"rank {rank} passed a chunk on before it was there ({place(send)}).\n"
                    "What a rank sends in a hop came in the hop before: wait() for that first."
                )
    return None


def _ring_wire(trial: Trial, run: Run, stays: Callable[[int, int], int]) -> str | None:
    """Each rank talks to one neighbour, sends every chunk but one, and each once.

    stays: called with a rank and the rank it sends to; the chunk that it has no need to send. Going
    round the other way is as good.
    """
    by_torch = ready_made(run)
    if by_torch:
        return by_torch
    world_size, (numel,) = trial.world_size, trial.args
    for rank, records in enumerate(run.wire):
        right = (rank + 1) % world_size
        sent = [record for record in records if record.op == "send" and record.bytes]
        peers = sorted({record.peer for record in sent}) or [right]
        if len(peers) > 1 or peers[0] not in (right, (rank - 1) % world_size):
            return (
                f"the values are right, but rank {rank} sent to "
                f"{' and '.join(f'rank {peer}' for peer in peers)}. In a ring it sends to rank "
                f"{right} only: what goes further is passed on from neighbour to neighbour."
            )
        needed = []
        for chunk in range(world_size):
            start, stop = _bounds(chunk, world_size, numel)
            if stop > start and chunk != stays(rank, peers[0]):
                needed.append((stop - start) * ELEMENT_BYTES)
        problem = _too_much(rank, [record.bytes for record in sent], needed, numel * ELEMENT_BYTES)
        if problem:
            return problem
    return None


def _too_much(rank: int, sent: list[int], needed: list[int], nbytes: int) -> str | None:
    """sent, needed: the bytes of each message; nbytes: those of x."""
    if sum(sent) == sum(needed) and len(sent) == len(needed):
        return None
    if sum(sent) == sum(needed):
        return (
            f"the values and the bytes are right, but rank {rank} sent {len(sent)} messages, and "
            f"the ring needs {len(needed)}: one a hop, the whole chunk."
        )
    problem = (
        f"the values are right, but rank {rank} sent {sum(sent)} bytes where the ring needs "
        f"{sum(needed)}: {Fraction(sum(sent), nbytes)} × the buffer instead of "
        f"{Fraction(sum(needed), nbytes)} ×."
    )
    if nbytes in sent:
        return (
            f"{problem}\nA message held the whole of x. In each hop a rank sends one chunk of it."
        )
    if len(sent) > len(needed):
        enough = f"W-1 hops are enough, here {len(needed)}"
        return f"{problem}\nIt sent {len(sent)} messages: {enough}."
    return f"{problem}\nReplay it: which message holds what its receiver had already?"


def _praise(trial: Trial, run: Run) -> str:
    """Right is right, but messages that wait for each other are worth a word."""
    right = "right on 1 to 4 ranks, also for lengths that don't divide"
    hops, enough = max(hop_numbers(run).values(), default=0), trial.world_size - 1
    if hops == enough:
        return f"{right}, with (W-1)/W of x sent by each rank, in W-1 hops."
    return (
        f"{right}. But some messages wait for others that could go with them: {hops} hops on "
        f"{trial.world_size} ranks instead of {enough}. Begin both, with isend and irecv, before "
        "you wait for either."
    )


# What goes wrong in a hop, whatever is done with the chunks
IN_A_HOP = mistakes("""
never_waits_for_the_receive: for work in works:⏎work.wait() → works[0].wait()
    Keep what irecv returns, and call wait() on it
never_waits_for_the_send: for work in works:⏎work.wait() → works[1].wait()
    Keep what isend returns, and call wait() on it
send_send: works = dist.batch_isend_irecv([send, receive]) → works = []
    for work in works:⏎work.wait() → dist.send(outgoing, right)⏎dist.recv(incoming, left)
    both with isend and irecv
to_the_left: right, left = (rank + 1) → left, right = (rank + 1)
    It goes round to the left, but the chunks are counted as if it went round to the right.
one_hop_too_many: (1, world_size) → (1, world_size + 1)
    W-1 hops are enough
""")

LENGTHS = [(2, 4), (2, 5), (3, 6), (3, 2), (4, 10), (1, 3)]  # ranks, elements


# ring_reduce_scatter(x)


def _run_reduce_scatter(answer, numel):
    x = torch.tensor(_brings(dist.get_rank(), dist.get_world_size(), numel))
    return _call(answer, x)


def _reduce_scatter_trials():
    for world_size, numel in LENGTHS:
        total, expected = _total(world_size, numel), []
        for rank in range(world_size):
            start, stop = _bounds(rank, world_size, numel)
            expected.append(Returned(_name(start, stop, numel), total[start:stop]))
        what = f"{numel} elements"
        yield Trial(world_size, _run_reduce_scatter, (numel,), expected, what=what)


def _explain_reduce_scatter(trial: Trial, rank: int, expected: Returned, got: Returned):
    """Every chunk of every rank has its digit."""
    if got.place != expected.place:
        return _not_x(expected, got)
    world_size, value, held = trial.world_size, got.values[0], []
    for place_ in range(world_size**2):
        other, chunk = divmod(place_, world_size)
        times = value // 10**place_ % 10
        if times:
            held.append(f"rank {other}'s chunk {chunk}" + (f" {times} times" if times > 1 else ""))
    if not 0 <= value < 10 ** (world_size**2):
        return TOO_EARLY
    return (
        f"Read the digits. It holds {', '.join(held)}; and should hold every rank's chunk {rank}."
    )


def overwrites_what_it_sends(x):
    """On 2 ranks it depends on who is faster; on 3, rank 1 is late for rank 0's first message."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks = x.tensor_split(world_size)
    passed_on, arrived = x.new_zeros(2, len(chunks[0]))
    passed_on[: len(chunks[rank - 1])] = chunks[rank - 1]
    for hop in range(1, world_size):
        outgoing, mine = chunks[(rank - hop) % world_size], chunks[(rank - hop - 1) % world_size]
        sending = dist.isend(passed_on[: len(outgoing)], (rank + 1) % world_size)
        dist.recv(arrived[: len(mine)], (rank - 1) % world_size)
        mine += arrived[: len(mine)]
        passed_on[: len(mine)] = mine
        sending.wait()
    return chunks[rank]


def straight_to_the_owner(x):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks = x.tensor_split(world_size)
    others = [other for other in range(world_size) if other != rank]
    works = [dist.isend(chunks[other], other) for other in others]
    for other in others:
        arrived = torch.empty_like(chunks[rank])
        dist.recv(arrived, other)
        chunks[rank].add_(arrived)
    for work in works:
        work.wait()
    return chunks[rank]


ring_reduce_scatter = Exercise(
    reference=ring.ring_reduce_scatter,
    helpers=(ring.send_right_receive_left,),
    trials=_reduce_scatter_trials,
    hints={
        "start": "Cut x with x.tensor_split(world_size). Each hop: a chunk to the right, another "
        "one from the left.",
        "values": "In hop h send chunk (rank - h) % world_size, and add what arrives to chunk "
        "(rank - h - 1) % world_size.",
        "wire": "W-1 hops, one chunk in each, always to the right neighbour.",
        "hang": "Receive into torch.empty_like(chunk); isend and irecv first, then both wait(), "
        "and only then chunk += arrived.",
    },
    praise=_praise,
    explain=_explain_reduce_scatter,
    races=_races,
    wire=lambda trial, run: _ring_wire(trial, run, stays=lambda rank, peer: rank),  # comes home
    mistakes=[
        *mistakes("""
whole_buffers: chunks[(rank - hop) % world_size] → arrived if hop > 1 else x.clone()
    torch.empty_like(mine) → torch.empty_like(x)
    mine += arrived → x.add_(arrived)
    A message held the whole of x. In each hop a rank sends one chunk of it.
loses_the_remainder: .tensor_split(world_size) → .split(len(x) // world_size)
    chunks of n // W lose the remainder: x.tensor_split(world_size) makes the first ones longer.
adds_before_wait: send_right_receive_left(passed_on, arrived, group) → mine += arrived
    mine += arrived → send_right_receive_left(passed_on, arrived, group)
    Memory that nobody has written yet is in it: until wait() on the irecv has returned, its buffer
    holds whatever lay there.
one_chunk_late: chunks[(rank - hop) % world_size] → chunks[(rank - hop + 1) % world_size]
    (rank - hop - 1) → (rank - hop)
    Everything is one hop off: in hop 1 rank r sends chunk r-1, so that after W-1 hops chunk r comes
    home to rank r.
ends_on_the_next_chunk: chunks[(rank - hop) % world_size] → chunks[(rank - hop + 1) % world_size]
    (rank - hop - 1) → (rank - hop)
    chunks[rank] → chunks[(rank + 1) % world_size]
    The sum is right, but of the next chunk: everything is one hop off. In hop 1 rank r sends chunk
    r-1, so that after W-1 hops chunk r comes home to rank r.
one_hop_too_few: (1, world_size) → (1, world_size - 1)
    W-1 hops are needed, and the last one ends here.
keeps_what_arrives: mine += arrived → mine.copy_(arrived)
    The chunk's own numbers are missing: what arrives is added to them.
passes_on_what_it_brought: passed_on = chunks → passed_on = brought
    for hop → brought = x.clone().view(-1).tensor_split(world_size)⏎for hop
    What is passed on is the sum made in the hop before, not the chunk as it was.
own_twice: mine += arrived → mine += mine + arrived
    The chunk's own numbers are in it twice: add what arrives once; the sum is what is passed on.
by_torch: for hop in range(1, world_size): → dist.all_reduce(x)⏎for hop in []:
    torch did the work
returns_a_copy: chunks[rank] → chunks[rank].clone()
    The numbers are right, but in a copy: return the view of x itself.
new_list_entries: mine += arrived → chunks[(rank - hop - 1) % world_size] = mine + arrived
    flat(x, group).tensor_split(world_size) → list(x.tensor_split(world_size))
    The numbers are right, but not in x itself: clone() and new entries in a list make new tensors.
works_on_a_copy: flat(x, group) → flat(x.clone(), group)
    The numbers are right, but not in x itself: clone() and new entries in a list make new tensors.
adds_to_the_tuple: mine += arrived → chunks[rank - hop - 1] += arrived
    tensor_split gives a tuple of views
returns_nothing: return chunks[rank] →
    the caller wants the tensor.
returns_x: return chunks[rank] → return x
    Return chunk `rank` alone: x.tensor_split(world_size)[rank].
element_by_element: send_right_receive_left(passed_on, arrived, group) → for a in range(len(mine)):
    mine += arrived →     send_right_receive_left(passed_on[a : a + 1], arrived[a : a + 1], group)
    return → x.tensor_split(world_size)[rank].add_(arrived)⏎return
    rank 0 sent 2 messages, and the ring needs 1
"""),
        *IN_A_HOP,
        Mistake.written(overwrites_what_it_sends, "Somebody wrote into it on the way"),
        Mistake.written(straight_to_the_owner, "rank 0 sent to rank 1 and rank 2"),
    ],
)


# ring_all_gather(x)


def _run_all_gather(answer, numel):
    return _call(answer, torch.full((numel,), 10 ** dist.get_rank()))


def _all_gather_trials():
    for world_size, numel in LENGTHS:
        gathered = []
        for chunk in range(world_size):
            start, stop = _bounds(chunk, world_size, numel)
            gathered += [10**chunk] * (stop - start)
        expected = [Returned("x", gathered)] * world_size
        yield Trial(world_size, _run_all_gather, (numel,), expected, what=f"{numel} elements")


def _explain_all_gather(trial: Trial, rank: int, expected: Returned, got: Returned):
    if got.place != expected.place:
        return _not_x(expected, got)
    for chunk in range(trial.world_size):
        start, stop = _bounds(chunk, trial.world_size, trial.args[0])
        if got.x[start:stop] != expected.values[start:stop]:
            return f"Chunk {chunk} of x should be rank {chunk}'s: 10**{chunk} everywhere."
    return None


def passes_on_too_early(x):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks, works = x.tensor_split(world_size), []
    for hop in range(1, world_size):
        works.append(dist.isend(chunks[(rank - hop + 1) % world_size], (rank + 1) % world_size))
        works.append(dist.irecv(chunks[(rank - hop) % world_size], (rank - 1) % world_size))
    for work in works:
        work.wait()
    return x


def straight_to_all(x):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks = x.tensor_split(world_size)
    others = [other for other in range(world_size) if other != rank]
    works = [dist.isend(chunks[rank], other) for other in others]
    works += [dist.irecv(chunks[other], other) for other in others]
    for work in works:
        work.wait()
    return x


ring_all_gather = Exercise(
    reference=ring.ring_all_gather,
    helpers=(ring.send_right_receive_left,),
    trials=_all_gather_trials,
    hints={
        "start": "In hop 1 every rank sends the chunk it has finished, its own. What has it to "
        "pass on in hop 2?",
        "values": "In hop h send chunk (rank - h + 1) % world_size, and receive into chunk "
        "(rank - h) % world_size.",
        "wire": "W-1 hops, one chunk in each, always to the right neighbour.",
        "hang": "isend and irecv first, then both wait(), and only then the next hop. Return x.",
    },
    praise=_praise,
    explain=_explain_all_gather,
    races=_races,
    wire=lambda trial, run: _ring_wire(trial, run, stays=lambda rank, peer: peer),  # has its own
    mistakes=[
        *mistakes("""
starts_like_reduce_scatter: (rank - hop + 1) → (rank - hop)
    place = chunks[(rank - hop) → place = chunks[(rank - hop - 1)
    A rank's own chunk is finished from the start: in hop 1 rank r sends it, and receives chunk r-1.
adds: send_right_receive_left(passed_on, place, group) → arrived = torch.empty_like(place)
    return x →     send_right_receive_left(passed_on, arrived, group)⏎    place += arrived⏎return x
    Nothing is added here: receive straight into the chunk.
own_chunk_every_hop: chunks[(rank - hop + 1) % world_size] → chunks[rank]
    From hop 2 on a rank passes on what came in the hop before, not its own chunk again.
loses_the_remainder: .tensor_split(world_size) → .split(len(x) // world_size)
    chunks of n // W lose the remainder: x.tensor_split(world_size) makes the first ones longer.
one_hop_too_few: (1, world_size) → (1, world_size - 1)
    The last chunk never came: W-1 hops are needed, and each fills another chunk of x.
whole_buffers: chunks[(rank - hop + 1) % world_size] → arrived if hop > 1 else x.clone()
    send_right_receive_left(passed_on, place, group) → arrived = torch.empty_like(x)
    return x →     send_right_receive_left(passed_on, arrived, group)
        ⏎    place.copy_(arrived.tensor_split(world_size)[(rank - hop) % world_size])⏎return x
    A message held the whole of x. In each hop a rank sends one chunk of it.
by_torch: for hop in range(1, world_size): → for hop in range(world_size):
    send_right_receive_left(passed_on, place, group) → dist.broadcast(chunks[hop], hop)
    torch did the work
returns_nothing: return x →
    Return x: the caller wants the tensor.
returns_its_chunk: return x → return chunks[rank]
    x is right: return all of it.
returns_a_new_tensor: flat(x, group) → flat(x := x.clone(), group)
    The result belongs into x itself.
"""),
        *IN_A_HOP,
        Mistake.written(passes_on_too_early, "rank 0 passed a chunk on before it was there"),
        Mistake.written(straight_to_all, "In a ring it sends to rank 1 only"),
    ],
)


# ring_all_reduce(x)


def _all_reduce_trials():
    for world_size, numel in LENGTHS:
        expected = [Returned("x", _total(world_size, numel))] * world_size
        what = f"{numel} elements"
        yield Trial(world_size, _run_reduce_scatter, (numel,), expected, what=what)


def _all_reduce_wire(trial: Trial, run: Run) -> str | None:
    world_size, (numel,) = trial.world_size, trial.args
    needed = 2 * (world_size - 1) * numel * ELEMENT_BYTES
    sent = sum(record.bytes for record in messages(run))
    if ready_made(run) or sent == needed:
        return ready_made(run)
    return (
        f"the values are right, but all ranks together sent {sent} bytes where 2(W-1) times the "
        f"buffer is enough: {needed}."
    )


ring_all_reduce = Exercise(
    reference=ring.ring_all_reduce,
    helpers=(ring.ring_reduce_scatter, ring.ring_all_gather, ring.send_right_receive_left),
    trials=_all_reduce_trials,
    hints={"start": "First one half, then the other.", "values": "Both halves work on x itself."},
    praise="right on 1 to 4 ranks; each sends 2(W-1)/W of x.",
    explain=lambda trial, rank, expected, got: _not_x(expected, got),
    wire=_all_reduce_wire,
    mistakes=mistakes("""
only_the_first_half: return ring_all_gather(x, group) → return x
    Every rank has its own chunk of the sum: the finished chunks must go round once more.
only_the_second_half: ring_reduce_scatter(x, group)⏎return → return
    Nothing was added: first the reduce-scatter, then the all-gather.
the_wrong_way_round: ring_reduce_scatter(x, group)⏎return → ring_all_gather(x, group)⏎return
    return ring_all_gather(x, group) → return ring_reduce_scatter(x, group)
    First the reduce-scatter, then the all-gather.
twice: return ring_all_gather(x, group) → ring_all_gather(x, group)⏎return ring_all_gather(x, group)
    2(W-1) times the buffer is enough
returns_nothing: return ring_all_gather(x, group) → ring_all_gather(x, group)
    Return x: the caller wants the tensor.
"""),
)


# ring_cost(world_size, nbytes)

COST_NUMEL = 12  # divides by every world size tried


def _run_ring_cost(answer, numel):
    """Go round for real, for the wire to count, and ask the answer what it expects."""
    x = torch.full((numel,), 10 ** dist.get_rank())
    ring.ring_all_reduce(x)
    cost = answer(dist.get_world_size(), x.nbytes)
    if not (isinstance(cost, tuple | list) and len(cost) == 2):
        return cost
    return tuple(round(part, 6) if isinstance(part, float) else part for part in cost)


def _counted(run: Run) -> list[tuple[int, int]]:
    """(hops of the run, bytes sent) of each rank, as the wire saw them."""
    hops, counted = max(hop_numbers(run).values(), default=0), []
    for records in run.wire:
        counted.append((hops, sum(record.bytes for record in records if record.op == "send")))
    return counted


def _ring_cost_trials():
    for world_size in (6, 4, 3, 2, 1):  # in small worlds many wrong formulas give right numbers
        what = f"{COST_NUMEL * ELEMENT_BYTES} bytes"
        yield Trial(world_size, _run_ring_cost, (COST_NUMEL,), _counted, what=what)


def _explain_ring_cost(trial: Trial, rank: int, expected, got):
    if not (isinstance(got, tuple) and len(got) == 2):
        return "Return two numbers: hops, bytes sent by each rank."
    hops, nbytes = expected
    counted = f"The wire of a real ring counted {hops} hops, and {nbytes} bytes sent by each rank."
    if got[0] != hops:
        return (
            f"{counted} How many ranks must a chunk visit in the reduce-scatter, and how many in "
            "the all-gather?"
        )
    return f"{counted} How many hops are there, and which part of the buffer is sent in each?"


ring_cost = Exercise(
    reference=ring.ring_cost,
    trials=_ring_cost_trials,
    hints={
        "start": "An all-reduce is a reduce-scatter, then an all-gather. How many hops has each?",
        "values": "In every hop every rank sends one chunk. How many bytes has a chunk?",
    },
    praise="the formula gives what the wire counted, on 1 to 6 ranks.",
    explain=_explain_ring_cost,
    note="ddpkit.tools.cost.volume knows this of every algorithm of the course.",
    mistakes=mistakes("""
of_one_half: 2 * (world_size - 1) → world_size - 1
    Yours are the hops of one half: a reduce-scatter and an all-gather have W-1 each.
bytes_of_one_half: hops * nbytes / world_size → hops * nbytes / world_size / 2
    Yours are the bytes of one half: each of the two sends (W-1)/W of the buffer.
w_hops_a_half: 2 * (world_size - 1) → 2 * world_size
    Each half takes W-1 hops, not W: a chunk starts on one rank and visits the W-1 others.
bytes_of_w_hops: hops * nbytes / world_size → 2 * nbytes
    Yours are the bytes of 2W hops. Each half takes W-1: its last chunk need not come back.
of_all_ranks: hops * nbytes / world_size → hops * nbytes
    Yours is what all ranks send together, W times as much as each of them.
of_whole_buffers: hops * nbytes / world_size → hops / 2 * nbytes
    Yours is the ring of whole buffers. Here a hop carries one chunk, 1/W of the buffer.
divides_first: hops * nbytes / world_size → hops // world_size * nbytes
    Did // lose a fraction? 2*(W-1) // W is 1. Divide with /.
in_and_out: hops * nbytes / world_size → 2 * hops * nbytes / world_size
    Yours is what a rank sends and receives together. The question is what it sends.
as_a_share: hops * nbytes / world_size → hops / world_size
    Yours is a share of the buffer. Times nbytes, it is bytes.
bytes_first: return hops, hops * nbytes / world_size → return hops * nbytes / world_size, hops
    The right numbers the wrong way round: hops first, then bytes.
bytes_only: return hops, → return
    Return two numbers
never_nothing: 2 * (world_size - 1) → max(1, 2 * (world_size - 1))
    A rank alone has nobody to send to: no hops, no bytes.
by_guess: return hops, hops * nbytes / world_size → return 7, nbytes
    How many ranks must a chunk visit
"""),
)
