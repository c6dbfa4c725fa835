"""Checkers of notebook 01: broadcast, all_reduce, all_gather, reduce_scatter, from send and recv."""

import torch
import torch.distributed as dist

from ddpkit import collectives

from .old_checker import Exercise, Trial, read_sum

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these

ELEMENT_BYTES = torch.tensor([0]).element_size()  # the trials use torch's default integers


def _own(rank: int, numel: int) -> list[int]:
    """What rank `rank` brings: 10**rank everywhere, so that every digit of a sum counts one rank."""
    return [10**rank] * numel


# broadcast(tensor, src)


def _run_broadcast(answer, src, numel):
    tensor = torch.tensor(_own(dist.get_rank(), numel))
    answer(tensor, src)
    return tensor.tolist()


def _broadcast_trials():
    for world_size, src in ((2, 0), (2, 1), (1, 0), (3, 1), (3, 2), (4, 0), (4, 3)):
        yield Trial(
            world_size,
            _run_broadcast,
            (src, 3),
            [_own(src, 3)] * world_size,
            (world_size - 1) * 3 * ELEMENT_BYTES,
            f"src={src}",
        )


def _broadcast_cause(trial: Trial, rank: int, expected, got):
    src = trial.args[0]
    if rank == src:
        return "The source's own tensor must stay as it is."
    if got == _own(rank, 3) and rank > 0:
        return f"Rank {rank} still has its own numbers: receive into `tensor` itself, not into a new tensor."
    if got == _own(0, 3):
        return f"Those are rank 0's own numbers. The source is `src`, here rank {src}; it isn't always rank 0."
    return "Who sends to this rank, and what?"


broadcast = Exercise(
    collectives.broadcast,
    _broadcast_trials,
    [
        "Two roles: the rank that is `src` sends, all others receive. What does each call, and how often?",
        "On src: for every rank that isn't src, dist.send(tensor, dst). On all others, once: dist.recv(tensor, src).",
    ],
    "right on 1 to 4 ranks from every source tried, and no byte too many.",
    _broadcast_cause,
)


# all_reduce(tensor)


def _run_all_reduce(answer, numel):
    tensor = torch.tensor(_own(dist.get_rank(), numel))
    answer(tensor)
    return tensor.tolist()


def _all_reduce_trials():
    for world_size in (2, 1, 3, 4):
        total = [sum(10**rank for rank in range(world_size))] * 3
        nbytes = 2 * (world_size - 1) * 3 * ELEMENT_BYTES
        yield Trial(world_size, _run_all_reduce, (3,), [total] * world_size, nbytes)


def _all_reduce_cause(trial: Trial, rank: int, expected, got):
    if got == _own(rank, 3):
        return f"Rank {rank} still has only its own number: the sum must end up in `tensor` itself, on every rank."
    if len(set(got)) > 1:
        return "The elements differ, though they went in alike: add whole tensors."
    words = read_sum(got[0], trial.world_size)
    if words == "rank 0 is missing from it":
        return f"Read the digits: {words}. Was rank 0's number overwritten? Receive into a second tensor, then add."
    if "more than once" in words:
        return (
            f"Read the digits: {words}. Add each rank's own numbers once, and don't add to a sum that has them already."
        )
    if words:
        return f"Read the digits: {words}. Does rank 0 receive from every other rank before it sends the sum back?"
    return "Rank 0 adds up what it receives, then sends the sum to all."


all_reduce = Exercise(
    collectives.all_reduce,
    _all_reduce_trials,
    [
        "Two phases: everything to rank 0, which adds it up; then the sum from rank 0 to everyone.",
        "In the first phase rank 0 needs a second tensor to receive into: torch.empty_like(tensor).",
        "The second phase is the broadcast you have written already, with src=0.",
    ],
    "right on 1 to 4 ranks, with 2(W-1) times the tensor on the wire.",
    _all_reduce_cause,
    helpers=(collectives.reduce, collectives.broadcast),
)


# all_gather(tensor_list, tensor)


def _run_all_gather(answer, numel):
    tensor = torch.tensor(_own(dist.get_rank(), numel))
    tensor_list = [torch.zeros_like(tensor) for _ in range(dist.get_world_size())]
    answer(tensor_list.copy(), tensor)  # a copy: the tensors themselves must be filled, not replaced
    return [part.tolist() for part in tensor_list]


def _all_gather_trials():
    for world_size in (2, 1, 3, 4):
        everyone = [_own(rank, 2) for rank in range(world_size)]
        nbytes = world_size * (world_size - 1) * 2 * ELEMENT_BYTES
        yield Trial(world_size, _run_all_gather, (2,), [everyone] * world_size, nbytes)


def _all_gather_cause(trial: Trial, rank: int, expected, got):
    empty = [place for place, part in enumerate(got) if part == [0, 0]]
    if len(empty) == trial.world_size > 1:
        return "The whole list is still empty. Receive straight into the tensors of the list that you were given."
    if rank in empty:
        return f"Rank {rank}'s own part is missing: copy `tensor` into tensor_list[{rank}]; no message brings it."
    if empty:
        return f"tensor_list[{empty[0]}] was never filled: every rank must send to every other, and receive from each."
    if sorted(got) == sorted(expected):
        return "All parts are there, in the wrong places: what rank r sent belongs into tensor_list[r]."
    return "tensor_list[r] must hold what rank r brought. Receive straight into tensor_list[r]."


all_gather = Exercise(
    collectives.all_gather,
    _all_gather_trials,
    [
        "Every rank sends the same tensor to all others. Its own entry of the list it fills itself, with copy_.",
        "If all ranks send first, all wait. dist.isend(tensor, dst) returns at once; wait() for it later.",
        "Start all isends and irecvs, keep what they return in a list, and wait for each at the end.",
    ],
    "right on 1 to 4 ranks, every part sent once to each rank that needs it.",
    _all_gather_cause,
    helpers=(collectives.by_rank, collectives.exchange),
)


# reduce_scatter(output, input_list)


def _run_reduce_scatter(answer, numel):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    input_list = [torch.tensor([(chunk + 1) * 10**rank] * numel) for chunk in range(world_size)]
    output = torch.zeros_like(input_list[0])
    answer(output, input_list)
    return output.tolist()


def _reduce_scatter_trials():
    for world_size in (2, 1, 3, 4):
        ones = sum(10**rank for rank in range(world_size))
        expected = [[(rank + 1) * ones] * 2 for rank in range(world_size)]
        yield Trial(world_size, _run_reduce_scatter, (2,), expected, world_size * (world_size - 1) * 2 * ELEMENT_BYTES)


def _reduce_scatter_cause(trial: Trial, rank: int, expected, got):
    ones = sum(10**r for r in range(trial.world_size))
    value = got[0]
    if value == 0:
        return "`output` is still empty: the sum must be written into it, with copy_ or +=."
    if value % ones == 0 and 1 <= value // ones <= trial.world_size:
        return f"That is the sum of chunk {value // ones - 1}. Rank {rank} must hold the sum of chunk {rank}."
    if value == sum((chunk + 1) * 10**rank for chunk in range(trial.world_size)):
        return "That is the sum of this rank's own chunks. Sum over ranks: chunk r of every rank."
    for other in range(trial.world_size):
        digit = value // 10**other % 10
        if digit == 0:
            return f"Rank {other}'s chunk is missing from it. Every rank, this one too, adds its chunk once."
        if other == rank and digit == 2 * (rank + 1):
            return f"Rank {rank}'s own chunk is in it twice."
        if digit != rank + 1:
            wrong = digit * 10**other
            return (
                f"The {wrong} in it is rank {other}'s chunk {digit - 1}. Rank {rank} sums chunk {rank} of every rank."
            )
    return "Rank r sends chunk k of its list to rank k, and adds up the chunks r that come from the others."


reduce_scatter = Exercise(
    collectives.reduce_scatter,
    _reduce_scatter_trials,
    [
        "Which chunk does rank k want? Number k, of everybody. So send input_list[k] to rank k.",
        "Start with your own chunk in `output`, receive the others' into a spare tensor, and add each to `output`.",
        "As in all_gather, all ranks send at the same time: isend first, then recv, then wait for the isends.",
    ],
    "right on 1 to 4 ranks, with (W-1)/W of the input sent by each.",
    _reduce_scatter_cause,
    helpers=(collectives.by_rank, collectives.exchange),
)
