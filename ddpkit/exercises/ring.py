"""Checkers of notebook 02: ring_reduce_scatter and ring_all_gather, hop by hop, and ring_cost.

The references go round as the notebook tells it, one hop after the other. `ddpkit.ring` says the same on the wire, with
receives posted ahead; a test holds the two together.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

import torch
import torch.distributed as dist

from ddpkit import ring
from ddpkit.lesson.figures import hop_numbers
from ddpkit.runtime.hang import describe_place, situations
from ddpkit.runtime.launch import Run

from .checker import Exercise, Trial, ready_made

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these

ELEMENT_BYTES = torch.tensor([0]).element_size()  # the trials use torch's default integers


# The spec: which elements a chunk has, what each rank brings, and what comes out.


def _bounds(chunk: int, world_size: int, numel: int) -> tuple[int, int]:
    """First and last+1 element of a chunk: the first numel % W chunks have one element more."""
    size, longer = divmod(numel, world_size)
    start = chunk * size + min(chunk, longer)
    return start, start + size + (chunk < longer)


def _brings(rank: int, world_size: int, numel: int) -> list[int]:
    """Rank r's x in a reduce-scatter: chunk c holds (c+1) * 10**r, so a digit tells the chunk, its place the rank."""
    values = []
    for chunk in range(world_size):
        start, stop = _bounds(chunk, world_size, numel)
        values += [(chunk + 1) * 10**rank] * (stop - start)
    return values


def _combined(combine: Callable | None, world_size: int, numel: int) -> list[int]:
    """All ranks' x in one, element by element."""
    serial = max if combine is torch.maximum else sum
    return [serial(column) for column in zip(*(_brings(r, world_size, numel) for r in range(world_size)), strict=True)]


def _name(start: int, stop: int, numel: int) -> str:
    return "x" if stop - start == numel else f"x[{start}:{stop}]"


@dataclass
class Returned:
    """What an answer returned, and what a checker needs to say why.

    place: "x" or "x[2:4]" for a view of x; in words for anything else. values: None unless it is a tensor.
    x: all of x afterwards. combined: when `combine` was called on a message, by the clock of the wire's records.
    """

    place: str
    values: list | None
    x: list = field(default_factory=list, compare=False)
    combined: list[float] = field(default_factory=list, compare=False)

    def __repr__(self):
        return self.place if self.values is None else f"{self.place} = {self.values}"


def _returned(got: object, x: torch.Tensor, combined: list[float]) -> Returned:
    if not isinstance(got, torch.Tensor):
        return Returned(f"returned {got!r}", None, x.tolist(), combined)
    place = "a new tensor"
    if got.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
        place = _name(got.storage_offset(), got.storage_offset() + got.numel(), len(x))
    return Returned(place, got.flatten().tolist(), x.tolist(), combined)


def _rank_1_comes_last() -> None:
    """Hold rank 1 back until no other rank can go on without it.

    So a rank that uses a message before it has waited for it, or overwrites one before it is taken, is found out
    whatever the machine's mood.
    """
    if dist.get_rank() != 1:
        return
    board = dist.group.WORLD.recorder.board
    while not all(s.rank == 1 or s.missing or s.state == "returned" for s in situations(board)):
        time.sleep(0.001)


# What can go wrong in both halves of the ring.


def _not_x(expected: Returned, got: Returned) -> str | None:
    """The usual cause if the answer didn't return a piece of `x`."""
    if got.values is None:
        return f"Return {expected.place}: the caller wants the tensor."
    if got.place != "a new tensor":
        return None
    if got.values == expected.values:
        return (
            f"The numbers are right, but not where the caller wants them, in {expected.place} itself. The chunks of "
            "x.tensor_split(world_size) are views of x; clone(), + and a new entry in their list make new tensors of "
            "them. Write with copy_, and return the view."
        )
    return "Work on x itself: the chunks of x.tensor_split(world_size) are views, and copy_ writes into them."


def _lost_remainder(world_size: int, numel: int) -> str:
    return (
        f"{numel} elements are not {world_size} times {numel // world_size}: chunks of n // W lose the remainder. "
        "x.tensor_split(world_size) gives the first chunks one element more."
    )


def _races(trial: Trial, run: Run) -> str | None:
    """A message that was combined, or passed on, before the rank had waited for it."""
    if trial.args[-1] < trial.world_size:  # empty chunks: which message is whose can't be told
        return None
    for rank, records in enumerate(run.wire):
        sends = [record for record in records if record.op == "send"]
        receives = [record for record in records if record.op == "recv"]
        combined = run[rank].combined
        for receive, at in zip(receives, combined, strict=True) if len(combined) == len(receives) else ():
            if at < receive.done:
                return (
                    f"rank {rank} called combine before the message was there ({_place(receive)}).\n"
                    "Until wait() on the irecv has returned, its buffer holds whatever lay there."
                )
        ring_like = len(sends) == trial.world_size - 1 and len({record.peer for record in sends}) == 1
        for receive, send in zip(receives, sends[1:], strict=False) if ring_like else ():
            if send.issued < receive.done:
                return (
                    f"rank {rank} passed a chunk on before it was there ({_place(send)}).\n"
                    "What a rank sends in a hop came in the hop before: wait() for that irecv first."
                )
    return None


def _place(record) -> str:
    return describe_place((record.file, record.line, record.function))


def _ring_wire(trial: Trial, run: Run, stays: Callable[[int, int], int]) -> str | None:
    """Each rank talks to one neighbour, sends every chunk but one, and each once.

    stays: called with a rank and the rank it sends to; the chunk that it has no need to send. Going round the other way
    is as good.
    """
    by_torch = ready_made(run)
    if by_torch:
        return by_torch
    world_size, numel = trial.world_size, trial.args[-1]
    for rank, records in enumerate(run.wire):
        right = (rank + 1) % world_size
        sent = [record for record in records if record.op == "send" and record.bytes]
        peers = sorted({record.peer for record in sent}) or [right]
        if len(peers) > 1 or peers[0] not in (right, (rank - 1) % world_size):
            return (
                f"the values are right, but rank {rank} sent to {' and '.join(f'rank {peer}' for peer in peers)}. In a "
                f"ring it sends to rank {right} only: what goes further is passed on from neighbour to neighbour."
            )
        spans = [_bounds(chunk, world_size, numel) for chunk in range(world_size) if chunk != stays(rank, peers[0])]
        needed = [(stop - start) * ELEMENT_BYTES for start, stop in spans if stop > start]
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
            f"the values and the bytes are right, but rank {rank} sent {len(sent)} messages, and the ring needs "
            f"{len(needed)}: one a hop, the whole chunk."
        )
    problem = (
        f"the values are right, but rank {rank} sent {sum(sent)} bytes where the ring needs {sum(needed)}: "
        f"{Fraction(sum(sent), nbytes)} × the buffer instead of {Fraction(sum(needed), nbytes)} ×."
    )
    if nbytes in sent:
        return f"{problem}\nA message held the whole of x. In each hop a rank sends one chunk of it."
    if len(sent) > len(needed):
        return f"{problem}\nIt sent {len(sent)} messages: W-1 hops are enough, here {len(needed)}."
    return f"{problem}\nReplay it: which message holds what its receiver had already, or doesn't need?"


# ring_reduce_scatter(x, combine=torch.add)


def ring_reduce_scatter(x, combine=torch.add):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks = x.tensor_split(world_size)  # views: writing into a chunk changes x
    for hop in range(1, world_size):
        chunk = chunks[(rank - hop - 1) % world_size]
        arriving = torch.empty_like(chunk)
        sending = dist.isend(chunks[(rank - hop) % world_size], (rank + 1) % world_size)
        receiving = dist.irecv(arriving, (rank - 1) % world_size)
        sending.wait()
        receiving.wait()
        chunk.copy_(combine(chunk, arriving))
    return chunks[rank]


def _run_reduce_scatter(answer, combine, numel):
    x = torch.tensor(_brings(dist.get_rank(), dist.get_world_size(), numel))
    combined = []

    def watched(a, b):
        combined.append(time.perf_counter())
        return combine(a, b)

    _rank_1_comes_last()
    return _returned(answer(x, watched) if combine else answer(x), x, combined)


def _reduce_scatter_trials():
    plan = [(2, 4, torch.add), (2, 4, torch.maximum), (2, 5, None), (1, 3, torch.add)]  # None: it isn't given, so add
    plan += [(3, 6, torch.add), (3, 2, torch.add), (4, 10, torch.add)]
    for world_size, numel, combine in plan:
        total = _combined(combine, world_size, numel)
        expected = []
        for rank in range(world_size):
            start, stop = _bounds(rank, world_size, numel)
            expected.append(Returned(_name(start, stop, numel), total[start:stop]))
        what = f"{numel} elements" + (f", combine=torch.{combine.__name__}" if combine else "")
        yield Trial(world_size, _run_reduce_scatter, (combine, numel), expected, what=what)


def _reduce_scatter_cause(trial: Trial, rank: int, expected: Returned, got: Returned):
    combine, numel = trial.args
    not_x = _not_x(expected, got)
    if not_x:
        return not_x
    start, stop = _bounds(rank, trial.world_size, numel)
    if got.place != expected.place and len(got.values) == numel // trial.world_size < stop - start:
        return _lost_remainder(trial.world_size, numel)
    total = _combined(torch.add, trial.world_size, numel)
    if combine is torch.maximum:
        added = "That is the sum. " * (got.values == total[start:stop])
        return f"{added}Put what arrives together with combine(a, b); here it takes the larger."
    finished = _finished(trial.world_size, got.x, total)
    if finished and rank not in finished:
        return (
            f"Chunk {finished[0]} was finished on rank {rank}, not chunk {rank}: everything is one hop off. In hop 1 "
            "rank r sends chunk r-1, so that after W-1 hops chunk r comes home to rank r."
        )
    if got.place != expected.place:
        return f"Return chunk {rank} alone: x.tensor_split(world_size)[rank]."
    if got.values == _brings(rank, trial.world_size, numel)[start:stop]:
        return f"Chunk {rank} still holds what rank {rank} brought: W-1 hops are needed, and the last one ends here."
    return _read_chunk_sum(trial.world_size, rank, got.values[0])


def _finished(world_size: int, x: list[int], total: list[int]) -> list[int]:
    """The chunks of `x` that hold the sum of all ranks."""
    spans = [_bounds(chunk, world_size, len(x)) for chunk in range(world_size)]
    return [chunk for chunk, (start, stop) in enumerate(spans) if stop > start and x[start:stop] == total[start:stop]]


def _read_chunk_sum(world_size: int, rank: int, value: int) -> str:
    """What the digits say of a sum that should be chunk `rank` of each rank once."""
    digits = [value // 10**other % 10 for other in range(world_size)]
    if digits[rank] == 0:
        return f"Read the digits: rank {rank}'s own chunk is missing from it. What arrives is combined with it."
    if 0 in digits:
        return (
            f"Read the digits: rank {digits.index(0)}'s chunk is missing from it. What travels on is what combine "
            "made in the hop before, not the chunk as it was."
        )
    if digits[rank] == 2 * (rank + 1):
        return (
            f"Read the digits: rank {rank}'s own chunk is in it twice. What arrives is combined with the chunk once; "
            "the result is what travels on."
        )
    for other, digit in enumerate(digits):
        if digit != rank + 1:
            return (
                f"Read the digits: the {digit * 10**other} in it is rank {other}'s chunk {digit - 1}. Do both sides of "
                "a message mean the same chunk? What rank r sends to rank r+1 as chunk r-h, rank r+1 must combine with "
                "its own chunk r-h: that is (r+1)-h-1."
            )
    return "Some elements differ: send and combine whole chunks."


def _ring_praise(trial: Trial, run: Run) -> str:
    """Right is right, but messages that wait for each other are worth a word."""
    hops, enough = max(hop_numbers(run).values()), trial.world_size - 1
    right = "right on 1 to 4 ranks, also for lengths that don't divide, with (W-1)/W of x sent by each"
    if hops == enough:
        return f"{right}, in W-1 hops."
    return (
        f"{right}. But some messages wait for others that could travel with them: {hops} hops on {trial.world_size} "
        f"ranks instead of {enough}. Begin both, with isend and irecv, before you wait for either."
    )


ring_reduce_scatter = Exercise(
    ring_reduce_scatter,
    _reduce_scatter_trials,
    [
        "Cut x with x.tensor_split(world_size). Each hop: a chunk to the right, another one from the left.",
        "In hop h send chunk (rank - h) % world_size, and combine what arrives with chunk (rank - h - 1) % world_size.",
        "Receive into torch.empty_like(chunk); isend and irecv first, then both wait(), then "
        "chunk.copy_(combine(chunk, arriving)).",
    ],
    _ring_praise,
    _reduce_scatter_cause,
    lambda trial, run: _ring_wire(trial, run, stays=lambda rank, peer: rank),  # its own chunk comes home to it
    races=_races,
    note="# One hop after the other. ddpkit.ring.ring_reduce_scatter sends the same, with receives posted ahead.",
)


# ring_all_gather(x)


def ring_all_gather(x):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks = x.tensor_split(world_size)  # views: receiving into a chunk changes x
    for hop in range(1, world_size):
        sending = dist.isend(chunks[(rank - hop + 1) % world_size], (rank + 1) % world_size)
        receiving = dist.irecv(chunks[(rank - hop) % world_size], (rank - 1) % world_size)
        sending.wait()
        receiving.wait()
    return x


def _run_all_gather(answer, numel):
    x = torch.full((numel,), 10 ** dist.get_rank())
    _rank_1_comes_last()
    return _returned(answer(x), x, [])


def _all_gather_trials():
    for world_size, numel in ((2, 4), (1, 3), (2, 5), (3, 6), (3, 2), (4, 10)):
        gathered = []
        for chunk in range(world_size):
            start, stop = _bounds(chunk, world_size, numel)
            gathered += [10**chunk] * (stop - start)
        yield Trial(
            world_size, _run_all_gather, (numel,), [Returned("x", gathered)] * world_size, what=f"{numel} elements"
        )


def _all_gather_cause(trial: Trial, rank: int, expected: Returned, got: Returned):
    not_x = _not_x(expected, got)
    if not_x:
        return not_x
    if got.x == expected.values:
        return "x is right: return all of it."
    if trial.args[0] % trial.world_size:  # the lengths that divide went well
        return _lost_remainder(trial.world_size, trial.args[0])
    for hop in range(trial.world_size):  # in the order in which the chunks come, this rank's own first
        chunk = (rank - hop) % trial.world_size
        start, stop = _bounds(chunk, trial.world_size, trial.args[0])
        wrong = [value for value in got.x[start:stop] if value != 10**chunk]
        if wrong:
            return _wrong_chunk(trial.world_size, rank, chunk, wrong[0])
    return None


def _wrong_chunk(world_size: int, rank: int, chunk: int, value: int) -> str:
    """The usual cause of a `value` in `chunk` on `rank` that isn't rank `chunk`'s 10**chunk."""
    left = (rank - 1) % world_size
    if value not in [10**other for other in range(world_size)]:
        return f"Chunk {chunk} holds a sum. Nothing is to be added here: receive straight into the chunk."
    whose = len(str(value)) - 1
    if chunk == rank:
        return (
            f"Rank {rank}'s own chunk is finished from the start, and was overwritten with rank {whose}'s. In hop 1 "
            "rank r sends chunk r, and receives chunk r-1."
        )
    if whose == rank:
        return f"Chunk {chunk} never came to rank {rank}: it needs W-1 hops, and each ends in another chunk of x."
    if whose == left:
        return (
            f"Chunk {chunk} holds rank {left}'s own numbers. From hop 2 on a rank passes on what came in the hop "
            "before, not its own chunk again."
        )
    return (
        f"Chunk {chunk} holds rank {whose}'s numbers. Do both sides of a message mean the same chunk? In hop h rank r "
        "receives chunk r-h from rank r-1."
    )


ring_all_gather = Exercise(
    ring_all_gather,
    _all_gather_trials,
    [
        "In hop 1 every rank sends the chunk it has finished, its own. What has it to pass on in hop 2?",
        "In hop h send chunk (rank - h + 1) % world_size, and receive into chunk (rank - h) % world_size.",
        "isend and irecv first, then both wait(), and only then the next hop. No scratch, no sum. Return x.",
    ],
    _ring_praise,
    _all_gather_cause,
    lambda trial, run: _ring_wire(trial, run, stays=lambda rank, peer: peer),  # who has its own chunk already
    races=_races,
    note="# One hop after the other. ddpkit.ring.ring_all_gather sends the same, with receives posted ahead.",
)


# ring_cost(world_size, nbytes)

COST_NUMEL = 12  # divides by every world size tried


def ring_cost(world_size, nbytes):
    hops = 2 * (world_size - 1)  # in each of them every rank sends one chunk
    return hops, hops * nbytes / world_size


def _run_ring_cost(answer, numel):
    """Go round for real, for the wire to count, and ask the answer what it expects."""
    x = torch.full((numel,), 10 ** dist.get_rank())
    ring.ring_reduce_scatter(x)  # not ring_all_reduce, which takes a short cut on two ranks
    ring.ring_all_gather(x)
    cost = answer(dist.get_world_size(), x.nbytes)
    pair = isinstance(cost, tuple | list) and len(cost) == 2
    return tuple(round(part, 6) if isinstance(part, float) else part for part in cost) if pair else cost


def _counted(run: Run) -> list[tuple[int, int]]:
    """(hops of the run, bytes sent) of each rank, as the wire saw them."""
    hops = max(hop_numbers(run).values(), default=0)
    return [(hops, sum(record.bytes for record in records if record.op == "send")) for records in run.wire]


def _ring_cost_trials():
    for world_size in (6, 4, 3, 2, 1):  # from above: in small worlds many wrong formulas give the right numbers
        what = f"{COST_NUMEL * ELEMENT_BYTES} bytes"
        yield Trial(world_size, _run_ring_cost, (COST_NUMEL,), _counted, what=what)


def _ring_cost_cause(trial: Trial, rank: int, expected, got):
    if not (isinstance(got, tuple) and len(got) == 2):
        return "Return two numbers: hops, bytes sent by each rank."
    if got == expected[::-1]:
        return "The right numbers the wrong way round: hops first, then bytes."
    if trial.world_size == 1:
        return "A rank alone has nobody to send to: no hops, no bytes."
    hops, nbytes = expected
    usual = _wrong_hops(trial.world_size, got[0]) if got[0] != hops else _wrong_bytes(trial, nbytes, got[1])
    return f"The wire of a real ring counted {hops} hops, and {nbytes} bytes sent by each rank. {usual}"


def _wrong_hops(world_size: int, got) -> str:
    if got == world_size - 1:
        return "Yours are the hops of one half: a reduce-scatter and an all-gather have W-1 each."
    if got in (world_size, 2 * world_size):
        return "Each half takes W-1 hops, not W: a chunk starts on one rank and visits the W-1 others."
    return "How many ranks must a chunk visit in the reduce-scatter, and how many in the all-gather?"


def _wrong_bytes(trial: Trial, expected, got) -> str:
    world_size, nbytes = trial.world_size, trial.args[0] * ELEMENT_BYTES
    if got == world_size * expected:
        return "Yours is what all ranks send together, W times as much as each of them."
    if got == 2 * expected:
        return "Yours is what a rank sends and receives together. The question is what it sends."
    if round(got * nbytes, 3) == expected:  # rounded to six digits on the way here
        return "Yours is a share of the buffer. Times nbytes, it is bytes."
    if 2 * got == expected:
        return "Yours are the bytes of one half: a reduce-scatter and an all-gather send (W-1)/W of the buffer each."
    if got == (world_size - 1) * nbytes:
        return "Yours is the ring of whole buffers. Here a hop carries one chunk, 1/W of the buffer."
    if got == 2 * nbytes:
        return "Yours are the bytes of 2W hops. Each half takes W-1: its last chunk need not come back."
    if got in (0, nbytes):
        return "Did // lose a fraction? (W-1) // W is 0, and 2*(W-1) // W is 1. Divide with /."
    return "How many hops are there, and which part of the buffer does a rank send in each?"


ring_cost = Exercise(
    ring_cost,
    _ring_cost_trials,
    [
        "An all-reduce is a reduce-scatter, then an all-gather. How many hops has each half?",
        "In every hop every rank sends one chunk. How many bytes has a chunk?",
    ],
    "the formula gives what the wire counted, on 1 to 6 ranks.",
    _ring_cost_cause,
    lambda trial, run: None,
    note="# ddpkit.cost.volume knows this of every algorithm of the course.",
)
