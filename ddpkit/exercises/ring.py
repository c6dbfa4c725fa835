"""Checkers of notebook 02: the ring's plan, its two halves, the whole, and its cost.

Those of recursive halving and of the cost model's fit are in `few_hops`.
"""

from functools import partial
from itertools import chain

import torch
import torch.distributed as dist

from ddpkit import ring
from ddpkit.runtime.launch import Run
from ddpkit.runtime.wire import recorder
from ddpkit.tools.hops import hop_numbers

from .checker import (
    Exercise,
    Trial,
    check_wire,
    mistakes,
    place,
    rank_1_comes_last,
    unwritten_memory_shows,
    who_is_in,
)

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these

LENGTHS = [(2, 4), (2, 5), (3, 6), (3, 2), (4, 10), (1, 3)]  # ranks, elements


def lengths_trials(sums: bool, returns: str, halves: int = 1, lengths=LENGTHS, hops=None):
    """Make trials with lengths that W divides and that it doesn't.

    sums: the chunks are added up. Then chunk c of rank r is full of 10**(W·r + c), so that each has
    a digit of its own in the sum; otherwise it is full of 10**r. returns: "x" or "chunk", the part
    of x that is right in the end. halves: 2 for an all-reduce, 1 for one half of it. hops: {world
    size: the most messages of a rank}; None: a ring's, where a rank sends to one neighbour only.
    """
    for world_size, numel in lengths:
        x = torch.arange(numel)
        chunks = x.tensor_split(world_size)
        number = torch.cat([torch.full_like(chunk, c) for c, chunk in enumerate(chunks)])
        brought, expected = [], []
        for rank in range(world_size):
            digits = world_size * rank + number if sums else torch.full_like(number, rank)
            brought.append(10**digits)
        after = sum(brought) if sums else 10**number
        for part in chunks if returns == "chunk" else [x] * world_size:
            right = {"x": after[part].tolist(), "returned": _place(part, x)}
            told = {"sent": world_size > 1, "early": None, "elsewhere": False}
            expected.append(told | right | {"too far": [], "too many": []})
        nbytes = halves * (world_size - 1) * x.nbytes
        most = hops[world_size] if hops else halves * (world_size - 1)
        arguments = brought, [right["x"] for right in expected], returns, most, hops is None
        yield Trial(world_size, _run, arguments, expected, nbytes, f"{numel} elements")


def _run(answer, brought, right, returns, most, to_neighbours):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x = brought[rank].clone()
    rank_1_comes_last()
    with unwritten_memory_shows():
        got = answer(x)
    sends = [record for record in recorder().records if record.op == "send" and record.bytes]
    part = (x if returns == "x" else x.tensor_split(world_size)[rank]).tolist()
    return {
        "sent": bool(recorder().records),
        "early": _passed_on_early(),
        "elsewhere": part != right[rank] and _place(got, x) == f"a new tensor, {right[rank]}",
        "x": part,
        "returned": _place(got, x),
        "too far": sorted({r.peer for r in sends if to_neighbours})[1:],  # to the left is as good
        "too many": [record.bytes for record in sends[most:]],
    }


def _place(got: object, x: torch.Tensor) -> str:
    """Name the part of x that was returned, if any."""
    if not isinstance(got, torch.Tensor):
        return repr(got)
    if got.untyped_storage().data_ptr() != x.untyped_storage().data_ptr():
        return f"a new tensor, {got.tolist()}"
    start, stop = got.storage_offset(), got.storage_offset() + got.numel()
    return "x" if stop - start == len(x) else f"x[{start}:{stop}]"


def _passed_on_early() -> str | None:
    """Describe the line of code that sent a chunk on before this rank had waited for it, if any."""
    records = recorder().records
    sends = [record for record in records if record.op == "send"]
    receives = [record for record in records if record.op == "recv"]
    if len({record.peer for record in sends}) != 1 or not all(r.bytes for r in records):
        return None  # no ring, or no certain match of messages and hops
    for receive, send in zip(receives, sends[1:], strict=False):
        if receive.done is not None and send.issued < receive.done:
            return place(send)
    return None


def _praise(trial: Trial, run: Run) -> str:
    """Praise a right answer, and mention messages that wait for each other needlessly."""
    right = "right on 1 to 4 ranks, also for lengths that don't divide"
    hops, enough = max(hop_numbers(run).values(), default=0), trial.world_size - 1
    if hops == enough:
        return f"{right}, with (W-1)/W of x sent by each rank, in W-1 hops."
    return (
        f"{right}. But some messages wait for others: {hops} hops on {trial.world_size} ranks "
        f"instead of {enough}. Begin both, with isend and irecv, before you wait for either."
    )


SAYS = {
    "sent": "rank {rank} sent nothing. In each of W-1 hops it sends a chunk.",
    "early": "rank {rank} passed a chunk on before it was there ({got}).\nWhat a rank sends in "
    "a hop came in the hop before: wait() for that first.",
    "elsewhere": "what rank {rank} returned is right, but it is a new tensor, and x isn't right. "
    "The caller looks into x: work in place.",
    "x": "what rank {rank} should have in x is {got}, expected {expected}.",
    "returned": "rank {rank} returned {got}, expected {expected} itself. The chunks of "
    "x.tensor_split(world_size) are views, and += writes into x; clone() and + make new tensors.",
    "too far": "the values are right, but rank {rank} also sent to {got}. In a ring it sends to "
    "its right neighbour only: what goes further is passed on from neighbour to neighbour.",
    "too many": "the values are right, but rank {rank} sent more messages than there are hops; "
    "the others had {got} bytes. In each hop it sends one, the whole chunk.",
}

# Mistakes in a hop, whatever is done with the chunks
IN_A_HOP = mistakes("""
to_the_left: right = (rank + 1) % world_size⏎left = (rank - 1) % world_size →
    ⏎left = (rank + 1) % world_size⏎right = (rank - 1) % world_size
    It goes round to the left, but the chunks are counted as if it went round to the right.
without_the_circle: right = (rank + 1) % world_size → right = rank + 1
    The last rank's right neighbour is rank 0: take % world_size.
one_hop_too_many: (1, world_size) → (1, world_size + 1)
    W-1 hops are enough: in each of them a chunk comes one rank nearer to its last.
loses_the_remainder: .tensor_split(world_size) → .split(len(x) // world_size)
    chunks of n // W lose the remainder: x.tensor_split(world_size) makes the first ones longer.
""")

# ring_plan(world_size)


def _follow(answer):
    """Run a reduce-scatter round a ring, sending the chunks that the plan names."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    plan = answer(world_size)
    if not isinstance(plan, list | tuple) or not all(isinstance(r, list | tuple) for r in plan):
        return {"table": False, "plan": plan}
    rows = [len(row) for row in plan]
    strangers = {str(chunk): chunk for chunk in chain(*plan) if chunk not in range(world_size)}
    sums, arrived = 10 ** (world_size * rank + torch.arange(world_size)), torch.empty(1).long()
    if rows == [world_size - 1] * world_size and not strangers:
        for passed_on, mine in zip(plan[rank], plan[rank - 1], strict=True):
            ring.send_right_receive_left(sums[passed_on].view(1), arrived, None)
            sums[mine] += arrived.item()
    seen = {"table": True, "rows": rows, "strangers": list(strangers.values())}
    return seen | {"sum": sums[rank].item(), "plan": plan}


def _plan_trials():
    for world_size in (2, 3, 4, 1):
        expected = []
        for rank in range(world_size):
            total = sum(10 ** (world_size * other + rank) for other in range(world_size))
            right = {"table": True, "rows": [world_size - 1] * world_size, "strangers": []}
            expected.append(right | {"sum": total})
        yield Trial(world_size, _follow, (), lambda run, e=expected: _with_plans(run, e))


def _with_plans(run: Run, expected: list[dict]) -> list[dict]:
    """Add each rank's own plan to what is expected: any is right that brings the sums home."""
    return [right | {"plan": got["plan"]} for right, got in zip(expected, run, strict=True)]


def _explain_plan(trial: Trial, rank: int, expected: dict, got: dict):
    if not got["table"] or got["rows"] != expected["rows"] or got["strangers"]:
        return None
    came_in, leaving = got["plan"][rank - 1], got["plan"][rank][1:]
    for hop, (came, goes) in enumerate(zip(came_in, leaving, strict=False), 2):
        if came != goes:
            return (
                f"In hop {hop} rank {rank} sends chunk {goes}, but chunk {came} came to it in the "
                "hop before: what came, and was added to, goes on."
            )
    return f"It holds {_whose(got['sum'], trial.world_size)}."


def _show_plan(trial: Trial, run: Run) -> str:
    lines = ["the sum of chunk r ends on rank r. The chunk that leaves, with 4 ranks:"]
    lines.append("        hop 1  hop 2  hop 3")
    for rank, row in enumerate(run[0]["plan"]):
        lines.append(f"rank {rank}" + "".join(f"{chunk:7}" for chunk in row))
    return "\n".join(lines)


ring_plan = Exercise(
    reference=ring.ring_plan,
    trials=_plan_trials,
    hints={
        "start": "Go backwards from the end: the sum of chunk r comes home to rank r in the last "
        "hop, after W-1 hops to the right. On which rank did it set out?",
        "values": "In hop 1 rank r sends chunk r-1, for that is the longest way to rank r-1.",
    },
    praise=_show_plan,
    says={
        "table": "Return a list of lists: plan[rank] is what that rank sends, hop after hop.",
        "rows": "the rows of the plan have {got} entries, expected {expected}: a row for each "
        "rank, an entry for each of W-1 hops.",
        "strangers": "there are no chunks {got}: they are counted from 0 to W-1. Take % "
        "world_size.",
        "sum": "rank {rank}'s sum of chunk {rank} is {got}, expected {expected}.",
    },
    explain=_explain_plan,
    mistakes=mistakes("""
starts_with_its_own: (rank - hop) → (rank - hop + 1)
    A rank's own chunk never leaves it: its sum must end there. What leaves first is the chunk that
    has farthest to go.
to_the_left: (rank - hop) → (rank + hop)
    The plan is right for a ring to the left. To the right, rank r gets what rank r-1 has sent.
one_chunk_all_the_time: (rank - hop) → (rank - 1)
    A rank that sends the same chunk in every hop passes nothing on.
of_four_ranks: % world_size for hop in range(1, world_size) → % 4 for hop in range(1, 4)
    The rows are as long as with 4 ranks. Count with world_size.
with_a_hop_0: range(1, world_size) → range(world_size)
    W-1 hops are enough: each rank's part of a chunk is added on the way.
by_hop: return plan → return [[*row] for row in zip(*plan)]
    The plan's rows are the ranks, not the hops: plan[rank] is what that rank sends, hop after hop.
"""),
)


# ring_reduce_scatter(x)


def explain_sum(trial: Trial, rank: int, expected: dict, got: dict):
    """Explain a wrong sum by its digits, one for every chunk of every rank."""
    if not got["sent"] or got["elsewhere"] or got["x"] == expected["x"]:
        return None
    world_size, value = trial.world_size, got["x"][0]
    if not 0 <= value < 10 ** (world_size**2):
        return "Memory that nobody has written yet is in it: wait() for the irecv before you add."
    return f"Read the digits. It holds {_whose(value, world_size)}."


def _whose(value: int, world_size: int) -> str:
    """Name the ranks whose chunks are in a sum of 10**(W · rank + chunk)."""
    held = []
    for digit, times in enumerate(who_is_in(value, world_size**2)):
        other, chunk = divmod(digit, world_size)
        held += [f"rank {other}'s chunk {chunk}"] * times
    return ", ".join(held)


ring_reduce_scatter = Exercise(
    reference=ring.ring_reduce_scatter,
    plays=True,
    writes=("x",),
    helpers=(ring.send_right_receive_left,),
    trials=partial(lengths_trials, sums=True, returns="chunk"),
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
    says=SAYS,
    explain=explain_sum,
    wire=check_wire,
    mistakes=IN_A_HOP
    + mistakes("""
adds_before_wait: send_right_receive_left(passed_on, arrived, group)⏎mine += arrived →
    ⏎mine += arrived⏎send_right_receive_left(passed_on, arrived, group)
    Memory that nobody has written yet is in it: until wait() on the irecv has returned, its buffer
    holds whatever lay there.
one_chunk_late: hop) % world_size]⏎mine = chunks[(rank - hop - 1) → hop + 1) % world_size]
    ⏎mine = chunks[(rank - hop)
    Nothing was added to the rank's own chunk. In hop 1 rank r sends chunk r-1; what arrives is its
    left neighbour's chunk r-2, and is added to chunk r-2.
one_hop_too_few: (1, world_size) → (1, world_size - 1)
    W-1 hops are needed, and the last one ends here.
keeps_what_arrives: mine += arrived → mine.copy_(arrived)
    The chunk's own numbers are missing: what arrives is added to them.
returns_a_copy: chunks[rank] → chunks[rank].clone()
    The numbers are right, but in a copy: return the view of x itself.
"""),
)


# ring_all_gather(x)


ring_all_gather = Exercise(
    reference=ring.ring_all_gather,
    plays=True,
    writes=("x",),
    helpers=(ring.send_right_receive_left,),
    trials=partial(lengths_trials, sums=False, returns="x"),
    hints={
        "start": "In hop 1 every rank sends the chunk it has finished, its own. What does it "
        "pass on in hop 2?",
        "values": "In hop h send chunk (rank - h + 1) % world_size, and receive into chunk "
        "(rank - h) % world_size.",
        "wire": "W-1 hops, one chunk in each, always to the right neighbour.",
        "hang": "isend and irecv first, then both wait(), and only then the next hop. Return x.",
    },
    praise=_praise,
    says=SAYS
    | {"x": "x is {got} on rank {rank}, expected {expected}: chunk c is rank c's, full of 10**c."},
    wire=check_wire,
    mistakes=IN_A_HOP
    + mistakes("""
starts_like_reduce_scatter: hop + 1) % world_size]⏎place = chunks[(rank - hop) →
    ⏎hop) % world_size]⏎place = chunks[(rank - hop - 1)
    A rank's own chunk is finished from the start: in hop 1 rank r sends it, and receives chunk r-1.
own_chunk_every_hop: chunks[(rank - hop + 1) % world_size] → chunks[rank]
    From hop 2 on a rank passes on what came in the hop before, not its own chunk again.
one_hop_too_few: (1, world_size) → (1, world_size - 1)
    The last chunk never came: W-1 hops are needed, and each fills another chunk of x.
returns_its_chunk: return x → return chunks[rank]
    x is right: return all of it.
"""),
)


# ring_all_reduce(x)


ring_all_reduce = Exercise(
    reference=ring.ring_all_reduce,
    writes=("x",),
    helpers=(ring.ring_reduce_scatter, ring.ring_all_gather, ring.send_right_receive_left),
    trials=partial(lengths_trials, sums=True, returns="x", halves=2),
    hints={"start": "First one half, then the other.", "values": "Both halves work on x itself."},
    praise="right on 1 to 4 ranks; each sends 2(W-1)/W of x.",
    best={"bytes": 480, "hops": 4},  # by halving and doubling
    says=SAYS,
    wire=check_wire,
    mistakes=mistakes("""
only_the_first_half: return ring_all_gather(x, group) → return x
    Every rank has its own chunk of the sum: the finished chunks must go round once more.
only_the_second_half: ring_reduce_scatter(x, group)⏎return → return
    Nothing was added: first the reduce-scatter, then the all-gather.
the_wrong_way_round: ring_reduce_scatter(x, group)⏎return ring_all_gather(x, group) →
    ⏎ring_all_gather(x, group)⏎return ring_reduce_scatter(x, group)
    First the reduce-scatter, then the all-gather: what goes round must be finished.
twice: return ring_all_gather(x, group) → ring_all_gather(x, group)⏎return ring_all_gather(x, group)
    Each half once: all ranks together need to send 2(W-1) times the buffer.
"""),
)


# ring_cost(world_size, nbytes)


def _run_cost(answer, numel):
    """Run a ring all-reduce, for the wire to count, and ask the answer for its prediction."""
    x = torch.ones(numel)
    ring.ring_all_reduce(x)
    return _ask_cost(answer, dist.get_world_size(), x.nbytes)


def _ask_cost(answer, world_size, nbytes, of=""):
    cost = answer(world_size, nbytes)
    hops, nbytes, *more = cost if isinstance(cost, tuple | list) else (cost, None, None)
    return {"numbers": 2 + len(more), f"hops{of}": hops, f"bytes{of}": nbytes}


def _counted(run: Run) -> list[dict]:
    """Return the counts of the run's wire, for each rank."""
    hops, counted = max(hop_numbers(run).values(), default=0), []
    for records in run.wire:
        nbytes = sum(record.bytes for record in records if record.op == "send")
        counted.append({"numbers": 2, "hops": hops, "bytes": nbytes})
    return counted


def _cost_trials():
    for world_size in (5, 2, 1):  # in small worlds many wrong formulas give right numbers
        yield Trial(world_size, _run_cost, (60,), _counted, what="240 bytes")
    right = {"numbers": 2, "hops of 8 ranks": 14, "bytes of 8 ranks": 14 * 240 / 8}
    yield Trial(
        2, _ask_cost, (8, 240, " of 8 ranks"), [right] * 2, what="asked about 8 ranks, 240 bytes"
    )


ring_cost = Exercise(
    reference=ring.ring_cost,
    trials=_cost_trials,
    hints={
        "start": "An all-reduce is a reduce-scatter, then an all-gather. How many hops has each?",
        "values": "In every hop every rank sends one chunk. How many bytes has a chunk?",
    },
    praise="the formula gives what the wire counted, on 1, 2 and 5 ranks.",
    says={
        "numbers": "Return two numbers: hops, bytes sent by each rank.",
        "hops": "The wire of a real ring counted {expected} hops, yours are {got}. How many ranks "
        "must a chunk visit in the reduce-scatter, and how many in the all-gather?",
        "bytes": "The wire of a real ring counted {expected} bytes sent by each rank, yours are "
        "{got}. How many hops are there, and which part of the buffer is sent in each?",
        "hops of 8 ranks": "A ring of 8 takes {expected} hops, yours are {got}. Count with the "
        "arguments, not with this world.",
        "bytes of 8 ranks": "Each rank in a ring of 8 sends {expected} bytes, yours are {got}. "
        "Count with the arguments, not with this world, and round nothing.",
    },
    note="ddpkit.cost.volume knows this of every algorithm of the course.",
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
divides_first: hops * nbytes / world_size → hops // world_size * nbytes
    Yours is the buffer once. Each rank sends 2*(W-1)/W of it: did // lose the fraction?
"""),
)
