"""Checkers of notebook 01: broadcast, all_reduce, all_gather, reduce_scatter from messages."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ddpkit import collectives
from ddpkit.collectives import by_rank, exchange, members

from .checker import Exercise, Trial, check_wire, mistakes, read_sum, who_is_in

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these

JUNK = -1  # what a buffer holds before it is filled
SIMPLE, OTHER = ((3,), torch.int64), ((2, 2), torch.float64)  # shapes and dtypes


@dataclass
class Held:
    """What the caller's tensors hold after a call, and what it did that it should not have done."""

    values: list
    besides: str = ""

    def __repr__(self):
        return f"{self.values}, and {self.besides}" if self.besides else f"{self.values}"

    def first(self) -> list[int]:
        """The first number of each tensor."""
        tensors = self.values if isinstance(self.values[0], list) else [self.values]
        return [int(torch.tensor(tensor).flatten()[0]) for tensor in tensors]


def _trials(program: Callable, expected: Callable, messages: Callable, sources: bool = False):
    """Calls on 2, 3 and 4 ranks; two calls in another shape and dtype; 1 rank last.

    expected: of rank, world size and source: the number that the tensor, or each tensor of the
    list, is full of. messages: of a world size: how many are sent. sources: from several.
    """
    for world_size, calls, (shape, dtype), src in (
        (2, 1, SIMPLE, 0),
        (2, 1, SIMPLE, 1),
        (3, 1, SIMPLE, 1),
        (4, 1, SIMPLE, 3),
        (3, 2, OTHER, 2),
        (1, 1, SIMPLE, 0),
    ):
        if src == 1 and world_size == 2 and not sources:
            continue
        what = f"src={src}" if sources else ""
        if calls == 2:
            what += f"{', ' if what else ''}called twice, {dtype} of shape {shape}"
        held = []
        for rank in range(world_size):
            numbers = expected(rank, world_size, src)
            many = isinstance(numbers, list)
            full = [_full(number, shape, dtype) for number in (numbers if many else [numbers])]
            held.append(Held([x.tolist() for x in full] if many else full[0].tolist()))
        nbytes = calls * messages(world_size) * _full(0, shape, dtype).nbytes
        arguments = (calls, shape, dtype, src) if sources else (calls, shape, dtype)
        yield Trial(world_size, program, arguments, held, nbytes, what)


def _full(number: int, shape, dtype) -> Tensor:
    return torch.full(shape, number, dtype=dtype)


def _changed(given: list[Tensor], was: list[Tensor], name: str) -> str:
    """In words, which of the tensors isn't as it was."""
    for place, (tensor, before) in enumerate(zip(given, was, strict=True)):
        if not torch.equal(tensor, before):
            return f"{name.format(place)} was changed"
    return ""


# broadcast(tensor, src)


def _run_broadcast(answer, calls, shape, dtype, src):
    for last in range(calls, 0, -1):  # 1 in the last call: then rank r brings 10**r
        tensor = _full(last * 10 ** dist.get_rank(), shape, dtype)
        answer(tensor, src)
    return Held(tensor.tolist())


def _broadcast_trials():
    def sources(rank, world_size, src):
        return 10**src

    return _trials(_run_broadcast, sources, lambda W: W - 1, sources=True)


def _explain_broadcast(trial: Trial, rank: int, expected: Held, got: Held):
    src = trial.args[3]
    if rank == src:
        return "The source's own tensor must stay as it is."
    if got.first() == [10**rank]:
        return f"Rank {rank} still has its own numbers: receive into `tensor` itself."
    return "Who sends to this rank, and what?"


broadcast = Exercise(
    reference=collectives.broadcast,
    wire=check_wire,
    helpers=(members,),
    trials=_broadcast_trials,
    hints={
        "start": "Two roles: the rank that is `src` sends, all others receive. What does each "
        "call, and how often?",
        "values": "On src: for every rank that isn't src, dist.send(tensor, dst). On all others, "
        "once: dist.recv(tensor, src).",
        "hang": "Every send needs a recv on the other rank, and every recv a send.",
    },
    praise="right on 1 to 4 ranks from every source tried, and no byte too many.",
    explain=_explain_broadcast,
    mistakes=mistakes("""
new_tensor: dist.recv(tensor, src, group) → dist.recv(torch.empty_like(tensor), src, group)
    What arrives must end up in `tensor` itself: receive into it, not into a new tensor.
from_0: ranks = members(group) → src, ranks = 0, members(group)
    The source is `src`; it isn't always rank 0.
sends_to_itself: if peer != src: → if True:
    leave this rank out
to_nobody: for peer in ranks: → for peer in range(1, len(ranks) + 1):
    Did a loop go one too far?
nobody_receives: dist.recv(tensor, src, group) → pass
    Every send needs a recv
by_torch: ranks = members(group) → return dist.broadcast(tensor, src)
    torch did the work
twice: dist.send(tensor, peer, group) → dist.send(tensor, peer)⏎dist.send(tensor, peer)
    dist.recv(tensor, src, group) → dist.recv(tensor, src)⏎dist.recv(tensor, src)
    more than the 24 that are needed
forgets_the_handles: dist.send(tensor, → dist.isend(tensor,
    dist.recv(tensor, → dist.irecv(tensor,
    never waited for it
all_receive: if dist.get_rank() == src: → dist.recv(tensor, src)
    ⏎if dist.get_rank() == src:
    The source has the data already: it sends, and receives nothing.
"""),
)


# all_reduce(tensor)


def _run_all_reduce(answer, calls, shape, dtype):
    for last in range(calls, 0, -1):
        tensor = _full(last * 10 ** dist.get_rank(), shape, dtype)
        answer(tensor)
    return Held(tensor.tolist())


def _all_reduce_trials():
    def total(rank, world_size, src):
        return sum(10**r for r in range(world_size))

    return _trials(_run_all_reduce, total, lambda W: 2 * (W - 1))


def _explain_all_reduce(trial: Trial, rank: int, expected: Held, got: Held):
    if got.first() == [10**rank]:
        return f"Rank {rank} still has its own number: the sum must end up in `tensor` itself."
    told = read_sum(got.first()[0], trial.world_size)
    if not told:
        return "Rank 0 adds up what it receives, then sends the sum to all."
    return f"Read the digits: {told}."


all_reduce = Exercise(
    reference=collectives.all_reduce,
    wire=check_wire,
    helpers=(members, collectives.reduce, collectives.broadcast),
    trials=_all_reduce_trials,
    hints={
        "start": "Two phases: everything to rank 0, which adds it up; then the sum from rank 0 to "
        "everyone.",
        "values": "In the first phase rank 0 needs a second tensor to receive into: "
        "torch.empty_like(tensor).",
        "wire": "The second phase is the broadcast you have written already, with src=0.",
    },
    praise="right on 1 to 4 ranks, with 2(W-1) times the tensor on the wire.",
    explain=_explain_all_reduce,
    mistakes=mistakes("""
new_tensor: first = members(group)[0] → first, tensor = members(group)[0], tensor.clone()
    The sum must end up in `tensor` itself, on every rank: what you return is not looked at.
without_sharing: broadcast(tensor, first, group) → pass
    Only rank 0 has the sum. It must end up in `tensor` of every rank: send it back.
overwrites: dist.recv(part, peer, group) → dist.recv(tensor, peer, group)
    combine(tensor, part, out=tensor) → pass
    Rank 0's numbers are missing, and all but the last that came: receive into a second tensor,
    then add.
rank_0_twice: part = torch.empty_like(tensor) → tensor += tensor⏎part = torch.empty_like(tensor)
    Rank 0's numbers are in it twice. Add each rank's own numbers once.
adds_the_last_twice: combine(tensor, part, out=tensor) → tensor += part⏎tensor += part
    What rank 0 received is in it twice. Add each rank's own numbers once.
everyone_to_everyone: reduce(tensor, first, op, group) → every = [tensor.clone() for _ in ranks]
    broadcast(tensor, first, group) → all_gather(every, tensor)⏎tensor.copy_(sum(every))
    first = members(group)[0] → ranks = members(group)
    more than the
send_send: reduce(tensor, first, op, group) → for peer in members(group):
    ⏎    if peer != dist.get_rank():⏎        dist.send(tensor, peer)
    both with isend and irecv
by_torch: reduce(tensor, first, op, group) → dist.all_reduce(tensor)
    broadcast(tensor, first, group) → pass
    torch did the work
uses_what_it_returns: broadcast(tensor, first, group) → tensor += dist.all_reduce(tensor)
    return None
"""),
)


# all_gather(tensor_list, tensor)


def _run_all_gather(answer, calls, shape, dtype):
    for last in range(calls, 0, -1):
        tensor = _full(last * 10 ** dist.get_rank(), shape, dtype)
        buffers = [_full(JUNK, shape, dtype) for _ in range(dist.get_world_size())]
        given, was = list(buffers), tensor.clone()
        answer(given, tensor)
    besides = _changed([tensor], [was], "`tensor`")
    for place, (mine, theirs) in enumerate(zip(buffers, given, strict=False)):
        if mine is not theirs and not besides:
            besides = f"tensor_list[{place}] is a new tensor"
    return Held([buffer.tolist() for buffer in buffers], besides)


def _all_gather_trials():
    def parts(rank, world_size, src):
        return [10**r for r in range(world_size)]

    return _trials(_run_all_gather, parts, lambda W: W * (W - 1))


def _explain_all_gather(trial: Trial, rank: int, expected: Held, got: Held):
    if got.besides.endswith("new tensor"):
        return (
            "The caller keeps the tensors that were in the list, and never sees a new one: receive "
            "straight into them, or copy_."
        )
    if got.besides:
        return "Leave `tensor` as it is: it is only sent."
    empty = [place for place, number in enumerate(got.first()) if number == JUNK]
    if len(empty) == trial.world_size:
        return "Nothing has been written into the tensors of the list that was given."
    if empty:
        return f"tensor_list[{empty[0]}] was never filled: all must send to all, and receive."
    return "tensor_list[r] must hold what rank r brought, and nothing of what was in it before."


all_gather = Exercise(
    reference=collectives.all_gather,
    wire=check_wire,
    helpers=(members, by_rank, exchange),
    trials=_all_gather_trials,
    hints={
        "start": "Every rank sends the same tensor to all others. Its own entry of the list it "
        "fills itself, with copy_.",
        "values": "tensor_list[r] is what rank r brought: receive straight into it.",
        "hang": "If all ranks send first, all wait. dist.isend(tensor, dst) returns at once: start "
        "all isends and irecvs, keep what they return, and wait for each at the end.",
    },
    praise="right on 1 to 4 ranks, every part sent once to each rank that needs it.",
    explain=_explain_all_gather,
    mistakes=mistakes("""
without_own: .copy_(tensor) →
    Its own part is missing: copy `tensor` into tensor_list[rank]; no message brings it.
adds_own: .copy_(tensor) → .add_(tensor)
    What was in tensor_list[rank] before is still in it: copy_, don't add.
wrong_places: by_rank(tensor_list, group) → by_rank(tensor_list[1:] + tensor_list[:1], group)
    All parts are there, in the wrong places: what rank r sent belongs into tensor_list[r].
new_tensors: exchange(dict.fromkeys(parts, tensor), parts, group) → for peer in parts:
    ⏎    tensor_list[peer] = torch.empty_like(tensor)
    ⏎    parts[peer] = tensor_list[peer]
    ⏎exchange(dict.fromkeys(parts, tensor), parts, group)
    A new tensor in the list is not the caller's: receive straight into the tensors that were in
    it, or copy_.
new_list: by_rank(tensor_list, group) → by_rank([tensor.clone() for _ in tensor_list], group)
    Nothing has been written into the tensors of the list that was given.
to_rank_0_only: exchange(dict.fromkeys(parts, tensor), parts, group) → gather(tensor, tensor_list)
    Only rank 0 has all parts. All must send to all, and receive from all.
twice_the_bytes: exchange(dict.fromkeys(parts, tensor), parts, group) → for _ in range(2):
    ⏎    exchange(dict.fromkeys(parts, tensor), parts, group)
    more than the
send_first: exchange(dict.fromkeys(parts, tensor), parts, group) → for peer in parts:
    ⏎    dist.send(tensor, peer)
    ⏎for peer, part in parts.items():⏎    dist.recv(part, peer)
    both with isend and irecv
by_torch: parts = by_rank(tensor_list, group) → return dist.all_gather(tensor_list, tensor)
    torch did the work
"""),
)


# reduce_scatter(output, input_list). Chunk k of rank r is 10**(W·r + k): a digit of its own.


def _run_reduce_scatter(answer, calls, shape, dtype):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for last in range(calls, 0, -1):
        powers = [10 ** (world_size * rank + chunk) for chunk in range(world_size)]
        input_list = [_full(last * power, shape, dtype) for power in powers]
        was = [chunk.clone() for chunk in input_list]
        output = _full(JUNK, shape, dtype)
        answer(output, input_list)
    return Held(output.tolist(), _changed(input_list, was, "input_list[{}]"))


def _reduce_scatter_trials():
    def total(rank, world_size, src):
        return sum(10 ** (world_size * r + rank) for r in range(world_size))

    return _trials(_run_reduce_scatter, total, lambda W: W * (W - 1))


def _explain_reduce_scatter(trial: Trial, rank: int, expected: Held, got: Held):
    if got.besides:
        return "Leave input_list as it is: add up in `output`, or in a tensor of your own."
    [value], world_size = got.first(), trial.world_size
    if value == JUNK:
        return "Nothing has been written into `output`."
    if value % 10 == 9:
        return "What was in `output` before is still in it: copy_ the first chunk, then add."
    for digit, times in enumerate(who_is_in(value, world_size**2)):
        other, chunk = divmod(digit, world_size)
        if times and chunk != rank:
            return f"Rank {other}'s chunk {chunk} is in it. Rank {rank} sums chunk {rank} of all."
        if chunk == rank and times != 1:
            how = f"is in it {times} times" if times else "is missing from it"
            return f"Rank {other}'s chunk {how}. Each rank's, this one's too, is added once."
    return None


reduce_scatter = Exercise(
    reference=collectives.reduce_scatter,
    wire=check_wire,
    helpers=(members, by_rank, exchange),
    trials=_reduce_scatter_trials,
    hints={
        "start": "Which chunk does rank k want? Number k, of everybody. So send input_list[k] to "
        "rank k.",
        "values": "Start with your own chunk in `output`, receive the others' into a spare tensor, "
        "and add each to `output`.",
        "hang": "As in all_gather, all ranks send at the same time: isend first, then recv, then "
        "wait for the isends.",
    },
    praise="right on 1 to 4 ranks, with (W-1)/W of the input sent by each.",
    explain=_explain_reduce_scatter,
    mistakes=mistakes("""
without_own: output.copy_(chunks.pop(dist.get_rank())) → chunks.pop(dist.get_rank())⏎output.zero_()
    This rank's own chunk is missing from it: start with it, and add those that come.
own_twice: output.copy_(chunks.pop( → mine = output.copy_(chunks.pop(
    combine(output, chunk, out=output) → output += chunk + input_list[dist.get_rank()]
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
changes_its_input: output.copy_(chunks.pop(dist.get_rank())) → mine = chunks.pop(dist.get_rank())
    combine(output, chunk, out=output) → mine += chunk⏎output.copy_(mine)
    Leave input_list as it is: add up in `output`, or in a tensor of your own.
via_all_reduce: chunks = by_rank(input_list, group) → for number, chunk in enumerate(input_list):
    ⏎    total = chunk.clone()⏎    all_reduce(total)
    ⏎    if number == dist.get_rank():⏎        output.copy_(total)
    ⏎return
    more than the
send_first: exchange(chunks, arrived, group) → for peer, chunk in chunks.items():
    ⏎    dist.send(chunk, peer)
    ⏎for peer, chunk in arrived.items():⏎    dist.recv(chunk, peer)
    both with isend and irecv
"""),
)
