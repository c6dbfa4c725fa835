"""Checkers of notebook 07: shard_plan, which rank owns which elements, and zero_step, momentum SGD on a shard.

Gradients are chosen so that their mean reads like a tally, each digit a rank: 11 on two ranks, 1111 on four.
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ddpkit.ring import ring_all_gather, ring_reduce_scatter
from ddpkit.runtime.board import Record
from ddpkit.runtime.launch import Run

from .exercise import Exercise, Trial

# shard_plan(numels, world_size)


def shard_plan(numels, world_size):
    length = -(-sum(numels) // world_size)  # rounded up: what is beyond the last parameter is padding
    shards = [[] for _ in range(world_size)]
    first = 0  # where in the flat buffer the parameter begins
    for parameter, numel in enumerate(numels):
        for rank, shard in enumerate(shards):
            start = max(rank * length, first) - first
            stop = min((rank + 1) * length, first + numel) - first
            if start < stop:
                shard.append((parameter, start, stop))
        first += numel
    return shards


def _planned(numels: list[int], world_size: int) -> list[list[tuple]]:
    """The specification, element by element."""
    length = (sum(numels) + world_size - 1) // world_size
    elements = [(parameter, at) for parameter, numel in enumerate(numels) for at in range(numel)]
    shards: list[list[list[int]]] = [[] for _ in range(world_size)]
    for element, (parameter, at) in enumerate(elements):
        shard = shards[element // length]
        if shard and shard[-1][0] == parameter:
            shard[-1][2] += 1
        else:
            shard.append([parameter, at, at + 1])
    return [[tuple(part) for part in shard] for shard in shards]


def _run_plan(answer, numels):
    plan = answer(list(numels), dist.get_world_size())
    try:
        return [[(int(p), int(start), int(stop)) for p, start, stop in shard] for shard in plan]
    except (TypeError, ValueError):
        return plan


def _plan_trials():
    for world_size, numels in ((2, (4, 4)), (2, (5, 3)), (1, (5, 2)), (2, (5, 4)), (3, (7, 2, 1)), (4, (1, 1, 1))):
        expected = _planned(list(numels), world_size)
        what = f"parameters of {', '.join(map(str, numels))} elements"
        yield Trial(world_size, _run_plan, (numels,), [expected] * world_size, what=what)


def _plan_cause(trial: Trial, rank: int, expected: list, got: object) -> str:
    numels, world_size = trial.args[0], trial.world_size
    if not _is_plan(got):
        return "Return a list for each rank, of tuples (parameter, start, stop)."
    length = -(-sum(numels) // world_size)
    if len(got) != world_size:
        return f"There are {len(got)} lists for {world_size} ranks: each rank has one, empty if it owns nothing."
    if any(start >= stop for shard in got for _, start, stop in shard):
        return "A part from start to stop with nothing in it: leave it out."
    beyond = [part for shard in got for part in shard if part[0] >= len(numels) or part[2] > numels[part[0]]]
    if beyond:
        parameter, start, stop = beyond[0]
        if parameter >= len(numels) or stop - start > numels[parameter]:
            return f"{beyond[0]} is more than the parameter has: the padding belongs to no parameter."
        return (
            f"{beyond[0]}: parameter {parameter} has {numels[parameter]} elements. Count start and stop from the "
            "parameter's own beginning, not from that of the flat buffer."
        )
    owned = [(part[0], at) for shard in got for part in shard for at in range(part[1], part[2])]
    if len(got) > 1 and all(sorted(shard) == sorted(got[0]) for shard in got) and owned:
        return "Every rank owns the same: that shards nothing. Each element has one owner."
    if len(set(owned)) < len(owned):
        twice = next(element for element in owned if owned.count(element) > 1)
        return f"Element {twice[1]} of parameter {twice[0]} has more than one owner."
    if len(owned) < sum(numels):
        return (
            f"{sum(numels) - len(owned)} of {sum(numels)} elements have no owner, and would never be updated. "
            f"{sum(numels)} // {world_size} loses the remainder: round up, and let the last shard be padded."
        )
    sizes = [sum(stop - start for _, start, stop in shard) for shard in got]
    if sorted(owned) == owned and max(sizes) <= length:
        return f"The ranks own {sizes} elements. Shards have equal length, {length}; the last ones are filled up."
    if max(sizes) > length:
        return (
            f"The ranks own {sizes} elements, where {length} would do for the largest. Cut the flat buffer, not the "
            "list of parameters, in equal shards: a parameter may lie in two of them."
        )
    return "Rank 0 owns the beginning of the flat buffer, rank 1 what follows, and so on, in the order of parameters."


def _is_plan(got: object) -> bool:
    shards = got if isinstance(got, list | tuple) else [None]
    return all(isinstance(shard, list) and all(isinstance(part, tuple) for part in shard) for shard in shards)


shard_plan = Exercise(
    shard_plan,
    _plan_trials,
    [
        "Put all parameters one behind the other: a flat buffer. Rank r owns elements r * length to (r+1) * length.",
        "length is the number of elements divided by W, rounded up: -(-n // W).",
        "A parameter from `first` on overlaps shard r from max(r * length, first) to min((r+1) * length, first + "
        "numel); subtract `first`.",
    ],
    "every element has one owner, and no shard is longer than n/W, rounded up.",
    _plan_cause,
    lambda trial, run: None,
    note="# ddpkit.zero.plan_shards does the same for each bucket, and aligns what it lays out.",
)


# zero_step(parameters, gradients, state)

LR, BETA = 1 / 16, 1 / 2  # the defaults; powers of two: all that the trials compute is exact
NUMEL = 12  # divides by every world size tried


def zero_step(parameters, gradients, state, lr=1 / 16, beta=1 / 2):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    gradient = ring_reduce_scatter(gradients) / world_size
    shard = parameters.chunk(world_size)[rank]
    if not state:
        state["momentum"] = torch.zeros_like(shard)
    state["momentum"].mul_(beta).add_(gradient)
    shard.sub_(lr * state["momentum"])
    ring_all_gather(parameters)


@dataclass
class Trained:
    """What an answer left, step by step, and what a checker needs to say why.

    steps: the parameters after each. state: elements that it keeps. said: what the rank said on the wire.
    """

    steps: list[list[float]]
    state: int
    said: list[Record] = field(default_factory=list, compare=False)

    def __repr__(self):
        return f"parameters {_brief(self.steps)} and a state of {self.state} elements"


def _brief(steps: list[list[float]]) -> str:
    """Of each step, one number for each stretch of equal ones."""
    return " → ".join(", ".join(f"{value:g}" for value in dict.fromkeys(step)) for step in steps)


def _gradient(rank: int, world_size: int, step: int) -> float:
    return 16.0 * world_size * 10**rank * (step + 1)


def _run_step(answer, steps):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parameters, state, found = torch.full((NUMEL,), 7.0, dtype=torch.float64), {}, []
    for step in range(steps):
        gradients = torch.full((NUMEL,), _gradient(rank, world_size, step), dtype=torch.float64)
        answer(parameters, gradients, state)
        found.append(parameters.tolist())
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    return Trained(found, sum(tensor.numel() for tensor in tensors))


def _serial(world_size: int, steps: int, scale: float = 1.0, rank: int | None = None) -> list[float]:
    """The parameters of one process that has all ranks' gradients, or one rank's, after each step."""
    ranks = range(world_size) if rank is None else [rank]
    value, momentum, found = 7.0, 0.0, []
    for step in range(steps):
        mean = sum(_gradient(r, world_size, step) for r in ranks) / world_size
        momentum = BETA * momentum + scale * mean
        value -= LR * momentum
        found.append(value)
    return found


def _step_trials():
    for world_size, steps in ((2, 1), (2, 3), (1, 2), (4, 2)):
        right = Trained([[value] * NUMEL for value in _serial(world_size, steps)], NUMEL // world_size)

        def expected(run: Run, right: Trained = right) -> list[Trained]:
            return [Trained(right.steps, right.state, said) for said in run.wire]

        what = f"{steps} step{'s' * (steps > 1)}"
        yield Trial(world_size, _run_step, (steps,), expected, what=what)


def _step_cause(trial: Trial, rank: int, expected: Trained, got: Trained) -> str:
    world_size = trial.world_size
    own = slice(rank * NUMEL // world_size, (rank + 1) * NUMEL // world_size)
    if got.steps == expected.steps:
        return _wrong_state(world_size, expected, got)
    first = got.steps[0]
    if first == expected.steps[0]:
        return "The first step was right. Is the momentum kept in `state`, and used again in the next one?"
    if all(value == 7.0 for value in first):
        return "The parameters are as before. Write into them in place: a shard is parameters.chunk(world_size)[rank]."
    mine, right = first[own][0], expected.steps[0][0]
    if mine == right:
        return _others_stale(world_size, rank, expected, first)
    if mine == _serial(world_size, 1, world_size)[0]:
        return "The gradient is the sum over the ranks. Divide the shard by the number of ranks: it should be the mean."
    if mine == _serial(world_size, 1, 1 / world_size)[0]:
        return "The gradient was divided by the number of ranks twice."
    own_only = [_serial(world_size, 1, scale, rank)[0] for scale in (1, world_size)]
    if mine in own_only:
        return (
            f"Rank {rank} updated its shard with its own gradient: the others' is missing. "
            "ring_reduce_scatter(gradients) returns this rank's shard of the sum."
        )
    if 2 * (mine - 7.0) == right - 7.0 or mine - 7.0 == 2 * (right - 7.0):
        return "The update has the wrong size: momentum = beta * momentum + gradient, parameter -= lr * momentum."
    if mine - 7.0 == 7.0 - right:
        return "The update has the wrong sign: against the gradient."
    return "Which gradient does the shard see? It should be the mean over the ranks, in its own part of the buffer."


def _wrong_state(world_size: int, expected: Trained, got: Trained) -> str:
    if got.state == 0:
        return "The parameters are right, but `state` holds no tensor: keep the momentum there, not in a global."
    if got.state == NUMEL:
        return (
            "The parameters are right, but every rank keeps the momentum of all elements: that is the memory that ZeRO "
            f"saves. Keep that of the shard alone, {expected.state} elements."
        )
    return f"The parameters are right, but `state` has {got.state} elements: the shard has {expected.state}."


def _others_stale(world_size: int, rank: int, expected: Trained, first: list[float]) -> str:
    """This rank's shard is right, but not what others own."""
    ops = [record.op for record in expected.said]
    if "send" not in ops and "all_gather" not in ops:
        return "Nothing was sent. Begin with ring_reduce_scatter(gradients), end with ring_all_gather(parameters)."
    if all(value in (7.0, expected.steps[0][0]) for value in first):
        return (
            f"Rank {rank}'s own shard is right, the rest is as before the step. Was ring_all_gather(parameters) left "
            "out, or called before the shard was updated?"
        )
    return (
        f"Rank {rank}'s own shard is right, what other ranks own is not: this rank updated it, too, with partial sums. "
        "Update the shard alone, and gather the rest."
    )


def _step_wire(trial: Trial, run: Run) -> str | None:
    world_size, whole = trial.world_size, NUMEL * 8
    needed = trial.args[0] * 2 * (world_size - 1) * whole / world_size
    for rank, diary in enumerate(run.wire):
        sent = sum(_sent(record, rank, world_size) for record in diary)
        if sent > needed:
            reduced = [record.op for record in diary if record.op == "all_reduce"]
            why = (
                "An all_reduce gives every rank the whole sum; it needs a shard." if reduced else "What is sent twice?"
            )
            return (
                f"the values and the state are right, but rank {rank} sent {sent:g} bytes where a reduce-scatter and "
                f"an all-gather need {needed:g}.\n{why}"
            )
    return None


def _sent(record: Record, rank: int, world_size: int) -> float:
    """Bytes that a call sends, at least."""
    part = (world_size - 1) / world_size
    shares = {"send": 1, "all_reduce": 2 * part, "reduce_scatter": part, "all_gather": world_size - 1}
    if record.op in ("broadcast", "reduce"):
        return record.bytes * (record.peer == rank) * (world_size - 1)
    return record.bytes * shares.get(record.op, 0)


zero_step = Exercise(
    zero_step,
    _step_trials,
    [
        "Three parts: ring_reduce_scatter the gradients, update this rank's shard, ring_all_gather the parameters.",
        "ring_reduce_scatter(gradients) returns this rank's shard of the sum: divide it. shard = "
        "parameters.chunk(world_size)[rank] is a view.",
        'state["momentum"] = torch.zeros_like(shard) at first; then .mul_(beta).add_(gradient), and shard.sub_(lr * '
        'state["momentum"]).',
    ],
    "right on 1, 2 and 4 ranks, step after step, with 1/W of the state and 2(W-1)/W of the bytes on each.",
    _step_cause,
    _step_wire,
    note="# Momentum by hand. ddpkit.zero.ZeroOptimizer does so with any elementwise optimizer, a bucket at a time.",
)
