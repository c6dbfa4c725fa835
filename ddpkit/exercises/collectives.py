"""Checkers of notebook 01: collectives from messages, two of them as trees."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from ddpkit import collectives
from ddpkit.collectives import by_rank, counted_from, exchange, members
from ddpkit.tools.hops import hop_numbers

from .checker import Exercise, Trial, check_wire, mistakes, read_sum, who_is_in

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these

JUNK = -3  # fills a buffer at first; -1 in a sum would look as if a chunk of 1 were missing
SIMPLE, OTHER = (1, (3,), torch.int64), (2, (2, 2), torch.float64)  # calls, shape, dtype
CASES = [(2, 1, SIMPLE), (3, 0, SIMPLE), (4, 3, SIMPLE), (3, 2, OTHER), (1, 0, SIMPLE)]
TREES = [(2, 1, SIMPLE), (3, 0, SIMPLE), (4, 3, SIMPLE), (7, 4, OTHER), (1, 0, SIMPLE)]


def _trials(of_rank: Callable, messages: Callable, root: str = "", cases=CASES):
    """Make a trial of each case, (ranks, root, (calls, shape, dtype)); tensors hold known numbers.

    of_rank: called with rank, world size and root; returns what the rank brings to a call and what
    it has after it, each {argument: the number that fills its tensor, or a list of numbers for a
    list of tensors}. What it has may leave out arguments that don't matter. messages: called with
    the world size; returns how many a call needs. root: the answer's argument for it, if any.
    """
    for world_size, src, (calls, shape, dtype) in cases:
        what = [f"{root}={src}"] if root else []
        if calls == 2:
            what.append(f"called twice, {dtype} of shape {shape}")
        brought, expected = [], []
        for rank in range(world_size):
            brings, has = of_rank(rank, world_size, src)
            brought.append(brings)
            held = {name: _values(_tensors(numbers, shape, dtype)) for name, numbers in has.items()}
            expected.append(held)
        nbytes = calls * messages(world_size) * _tensors(0, shape, dtype).nbytes
        looked_at = [list(held) for held in expected]
        arguments = (brought, calls, shape, dtype, [src] if root else [], looked_at)
        yield Trial(world_size, _run, arguments, expected, nbytes, ", ".join(what))


def _run(answer, brought, calls, shape, dtype, src, looked_at):
    """Call the answer `calls` times; return {argument: its numbers} of this rank's `looked_at`."""
    for times in range(calls, 0, -1):  # 1 in the last call
        mine = {}
        for name, numbers in brought[dist.get_rank()].items():
            mine[name] = _tensors(numbers, shape, dtype, times)
        answer(*mine.values(), *src)
    return {name: _values(mine[name]) for name in looked_at[dist.get_rank()]}


def _tensors(numbers, shape, dtype, times=1):
    """Make a tensor full of `times` a number; of a list of numbers, a list of tensors."""
    if isinstance(numbers, list):
        return [_tensors(number, shape, dtype, times) for number in numbers]
    return torch.full(shape, times * numbers, dtype=dtype)


def _values(tensors):
    return [x.tolist() for x in tensors] if isinstance(tensors, list) else tensors.tolist()


def _first(values) -> int:
    """Return the first number; NaN, which unwritten memory may hold, as 0."""
    return int(torch.tensor(values).flatten()[0].nan_to_num())


def _check_tree(trial: Trial, run):
    """Check that a call takes ⌈log₂ W⌉ hops at most, and a rank takes part in no more messages."""
    wrong = check_wire(trial, run)
    if wrong:
        return wrong
    calls, enough = trial.args[1], (trial.world_size - 1).bit_length()
    told = f"the values are right, but {{}} where {calls * enough} are enough."
    for rank, records in enumerate(run.wire):
        if len(records) > calls * enough:
            return told.format(f"rank {rank} took part in {len(records)} messages")
    hops = max(hop_numbers(run).values(), default=0)
    return told.format(f"it took {hops} hops") if hops > calls * enough else None


# broadcast(tensor, src)


def _broadcast(rank, world_size, src):
    return {"tensor": 10**rank}, {"tensor": 10**src}


broadcast = Exercise(
    reference=collectives.broadcast,
    writes=("tensor",),
    wire=check_wire,
    helpers=(members,),
    trials=partial(_trials, _broadcast, lambda W: W - 1, root="src"),
    hints={
        "start": "Two roles: the rank that is `src` sends, all others receive. What does each "
        "call, and how often?",
        "values": "On src: for every rank that isn't src, dist.send(tensor, dst). On all others, "
        "once: dist.recv(tensor, src).",
        "hang": "Every send needs a recv on the other rank, and every recv a send.",
    },
    praise="right on 1 to 4 ranks from every source tried, and no byte too many.",
    best={"bytes": 72, "hops": 2},  # as a tree
    mistakes=mistakes("""
new_tensor: dist.recv(tensor, src, group) → dist.recv(torch.empty_like(tensor), src, group)
    What arrives must end up in `tensor` itself: receive into it, not into a new tensor.
from_0: ranks = members(group) → src, ranks = 0, members(group)
    The source is `src`; it isn't always rank 0.
sends_to_itself: if peer != src: → if True:
    Leave this rank out: it has its own data already.
to_nobody: for peer in ranks: → for peer in range(1, len(ranks) + 1):
    Did a loop go one too far?
all_receive: if dist.get_rank() == src: → dist.recv(tensor, src)
    ⏎if dist.get_rank() == src:
    The source has the data already: it sends, and receives nothing.
"""),
)


# tree_broadcast(tensor, src), tree_reduce(tensor, dst)


tree_broadcast = Exercise(
    reference=collectives.tree_broadcast,
    plays=True,
    writes=("tensor",),
    wire=_check_tree,
    helpers=(members, counted_from),
    trials=partial(_trials, _broadcast, lambda W: W - 1, root="src", cases=TREES),
    hints={
        "start": "Count places from the source: place = (rank - src) % W. In each hop, the places "
        "below have_it send to the place have_it further on; then have_it doubles.",
        "values": "A place that has the tensor sends, in every hop that is left. A place receives "
        "once, in the hop in which have_it <= place < 2 * have_it.",
        "wire": "A rank that has received sends from then on, to another rank in each hop.",
        "hang": "In each hop, who sends to place p, and does p receive from just that rank?",
    },
    praise="right on up to 7 ranks, in ⌈log₂ W⌉ hops.",
    mistakes=mistakes("""
source_alone: ranks, place = counted_from(src, group) → return broadcast(tensor, src)
    Only the source sends. In a tree every rank that has the tensor helps.
from_0: counted_from(src, group) → counted_from(0, group)
    Count from the source: place = (rank - src) % W, and back, rank = (place + src) % W.
powers_of_two_only:  and place + have_it < len(ranks):⏎dist.send(tensor, ranks[place + have_it] → :
    ⏎    dist.send(tensor, ranks[(place + have_it) % len(ranks)]
    W need not be a power of two: send only to places below W.
rounds_down: while have_it < len(ranks): → while 2 * have_it <= len(ranks):
    Too few hops: go on while have_it is less than W. The last hop may reach only some.
receives_in_each_hop: have_it <= place < 2 * have_it → have_it <= place
    Some ranks receive in a hop in which nobody sends to them. Each receives once, when
    have_it <= place < 2 * have_it.
new_tensor: dist.recv(tensor, ranks → dist.recv(torch.empty_like(tensor), ranks
    What arrives must end up in `tensor` itself: receive into it, not into a new tensor.
"""),
)


def _tree_reduce(rank, world_size, dst):
    brings = {"tensor": 10**rank}
    return brings, {"tensor": sum(10**r for r in range(world_size))} if rank == dst else {}


def _explain_sum(trial: Trial, rank: int, expected: dict, got: dict):
    told = read_sum(_first(got["tensor"]), trial.world_size)
    return f"Read the digits: {told}." if told else None


tree_reduce = Exercise(
    reference=collectives.tree_reduce,
    plays=True,
    writes=("tensor",),
    wire=_check_tree,
    helpers=(members, counted_from),
    trials=partial(_trials, _tree_reduce, lambda W: W - 1, root="dst", cases=TREES),
    hints={
        "start": "Count places from the root: place = (rank - dst) % W. In the first hop the odd "
        "places send to the place below them, in the next those 2 above a multiple of 4, and so "
        "on: place % (2 * distance) == distance.",
        "values": "Add what arrives to what this rank has so far, and hand on the whole of it.",
        "hang": "A rank that has sent its part is done, and leaves the loop.",
        "wire": "Half of those that still hold a part hand it on, to the other half, all at once.",
    },
    praise="right on up to 7 ranks, in ⌈log₂ W⌉ hops.",
    explain=_explain_sum,
    mistakes=mistakes("""
all_to_the_root: ranks, place = counted_from(dst, group) → return reduce(tensor, dst)
    All send to the root. In a tree, half of the ranks add for it in the first hop.
goes_on_after_sending: - distance], group)⏎return → - distance], group)
    A rank that has sent its part is done, and leaves the loop.
own_part_only: dist.send(total, → dist.send(tensor,
    Hand on the sum of all that this rank has so far, not only its own numbers.
overwrites: dist.recv(part, ranks[place + distance], group)⏎combine(total, part, out=total) →
    ⏎dist.recv(total, ranks[place + distance], group)
    What arrived replaced what was there: receive into a second tensor, then add.
from_0: counted_from(dst, group) → counted_from(0, group)
    No sum in `tensor` of the root. Count places from the root, place = (rank - dst) % W, and back,
    rank = (place + dst) % W; and add into `tensor` itself.
"""),
)


# all_reduce(tensor)


def _all_reduce(rank, world_size, src):
    return {"tensor": 10**rank}, {"tensor": sum(10**r for r in range(world_size))}


all_reduce = Exercise(
    reference=collectives.all_reduce,
    plays=True,
    writes=("tensor",),
    wire=check_wire,
    helpers=(members, collectives.reduce, collectives.broadcast),
    trials=partial(_trials, _all_reduce, lambda W: 2 * (W - 1)),
    hints={
        "start": "Two phases: everything to rank 0, which adds it up; then the sum from rank 0 to "
        "everyone.",
        "values": "In the first phase rank 0 needs a second tensor to receive into: "
        "torch.empty_like(tensor).",
        "wire": "The second phase is the broadcast you have written already, with src=0.",
    },
    praise="right on 1 to 4 ranks, with 2(W-1) times the tensor on the wire.",
    explain=_explain_sum,
    mistakes=mistakes("""
new_tensor: first = members(group)[0] → first, tensor = members(group)[0], tensor.clone()
    The sum must end up in `tensor` itself, on every rank: what you return is not looked at.
without_sharing: broadcast(tensor, first, group) → pass
    Only rank 0 has the sum. It must end up in `tensor` of every rank: send it back.
overwrites: dist.recv(part, peer, group)⏎combine(tensor, part, out=tensor) →
    ⏎dist.recv(tensor, peer, group)
    Rank 0's numbers are missing, and all but the last that came: receive into a second tensor,
    then add.
rank_0_twice: part = torch.empty_like(tensor) → tensor += tensor⏎part = torch.empty_like(tensor)
    Rank 0's numbers are in it twice. Add each rank's own numbers once.
adds_the_last_twice: combine(tensor, part, out=tensor) → tensor += part⏎tensor += part
    What rank 0 received is in it twice. Add each rank's own numbers once.
"""),
)


# all_gather(tensor_list, tensor)


def _all_gather(rank, world_size, src):
    parts = [10**r for r in range(world_size)]
    brings = {"tensor_list": [JUNK] * world_size, "tensor": 10**rank}
    return brings, brings | {"tensor_list": parts}


all_gather = Exercise(
    reference=collectives.all_gather,
    writes=("tensor_list",),
    wire=check_wire,
    helpers=(members, by_rank, exchange),
    trials=partial(_trials, _all_gather, lambda W: W * (W - 1)),
    hints={
        "start": "Every rank sends the same tensor to all others. Its own entry of the list it "
        "fills itself, with copy_.",
        "values": "tensor_list[r] is what rank r brought: receive straight into it.",
        "hang": "If all ranks send first, all wait. dist.isend(tensor, dst) returns at once: start "
        "all isends and irecvs, keep what they return, and wait for each at the end.",
    },
    praise="right on 1 to 4 ranks, every part sent once to each rank that needs it.",
    says={
        "tensor_list": "tensor_list on rank {rank} is {got}, expected {expected}. Before, it was "
        f"full of {JUNK}.",
        "tensor": "Leave `tensor` as it is: it is only sent. On rank {rank} it became {got}.",
    },
    mistakes=mistakes("""
without_own: .copy_(tensor) →
    Its own part is missing: copy `tensor` into tensor_list[rank]; no message brings it.
adds_own: .copy_(tensor) → .add_(tensor)
    What was in tensor_list[rank] before is still in it: copy_, don't add.
wrong_places: by_rank(tensor_list, group) → by_rank(tensor_list[1:] + tensor_list[:1], group)
    All parts are there, in the wrong places: what rank r sent belongs in tensor_list[r].
new_list: by_rank(tensor_list, group) → by_rank([tensor.clone() for _ in tensor_list], group)
    Nothing has been written into the tensors of the list that was given.
to_rank_0_only: exchange(dict.fromkeys(parts, tensor), parts, group) → gather(tensor, tensor_list)
    Only rank 0 has all parts. All must send to all, and receive from all.
"""),
)


# reduce_scatter(output, input_list). Chunk k of rank r is 10**(W·r + k): a digit of its own.


def _reduce_scatter(rank, world_size, src):
    powers = [10 ** (world_size * rank + chunk) for chunk in range(world_size)]
    brings = {"output": JUNK, "input_list": powers}
    return brings, brings | {
        "output": sum(10 ** (world_size * r + rank) for r in range(world_size))
    }


def _explain_reduce_scatter(trial: Trial, rank: int, expected: dict, got: dict):
    value, world_size = _first(got["output"]), trial.world_size
    if value == _first(expected["output"]) + JUNK:
        return "What was in `output` before is still in it: copy_ the first chunk, then add."
    for digit, times in enumerate(who_is_in(value, world_size**2)):
        other, chunk = divmod(digit, world_size)
        if times and chunk != rank:
            return f"Rank {other}'s chunk {chunk} is in it. Rank {rank} sums chunk {rank} of all."
        if times != 1 and chunk == rank:
            return f"Rank {other}'s chunk is in it {times} times. Has each irecv its own tensor?"
    return None


reduce_scatter = Exercise(
    reference=collectives.reduce_scatter,
    writes=("output",),
    wire=check_wire,
    helpers=(members, by_rank, exchange),
    trials=partial(_trials, _reduce_scatter, lambda W: W * (W - 1)),
    hints={
        "start": "Which chunk does rank k want? Number k, of everybody. So send input_list[k] to "
        "rank k.",
        "values": "Start with your own chunk in `output`, receive the others' into a spare tensor, "
        "and add each to `output`.",
        "hang": "As in all_gather, all ranks send at the same time: isend first, then recv, then "
        "wait for the isends.",
    },
    praise="right on 1 to 4 ranks, with (W-1)/W of the input sent by each.",
    says={
        "input_list": "Leave input_list as it is: add up in `output`, or in a tensor of your own. "
        "On rank {rank} it became {got}.",
    },
    explain=_explain_reduce_scatter,
    mistakes=mistakes("""
without_own: output.copy_(chunks.pop(dist.get_rank())) → chunks.pop(dist.get_rank())⏎output.zero_()
    This rank's own chunk is missing from it: start with it, and add those that come.
own_twice: combine(output, chunk, out=output) → output += chunk + input_list[dist.get_rank()]
    This rank's own chunk is in it more than once.
off_by_one: by_rank(input_list, group) → by_rank(input_list[1:] + input_list[:1], group)
    The sum of another chunk: rank r must hold the sum of chunk r, and be sent no other.
others_chunks: exchange(chunks, → exchange(dict.fromkeys(chunks, input_list[dist.get_rank()]),
    Chunks of other numbers came: send input_list[k] to rank k, not your own chunk to all.
own_chunks: output.copy_(chunks.pop(dist.get_rank())) → return output.copy_(sum(input_list))
    That is the sum of this rank's own chunks. Sum over ranks: chunk r of every rank.
adds_to_what_was_there: output.copy_( → output.add_(
    What was in `output` before is still in it: copy_ the first chunk, then add.
new_output: output.copy_(chunks.pop(dist.get_rank())) → output = chunks.pop(dist.get_rank()).clone()
    Nothing has been written into `output`: a new tensor of that name is not the caller's.
"""),
)
