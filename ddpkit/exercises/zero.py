"""Checkers of notebook 07: shard_plan, which rank owns which elements, and zero_step, momentum SGD on a shard.

The first element's gradients are chosen so that their mean reads like a tally, each digit a rank: 11 on two ranks,
1111 on four. Element i has i + 1 times as much, so that a gradient in the wrong place shows.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ddpkit.ring import ring_all_gather, ring_reduce_scatter
from ddpkit.runtime.board import Record
from ddpkit.runtime.launch import Run

from .old_checker import Exercise, Trial

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these

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


class _Plan(list):
    """What each rank owns, as one rank planned it."""

    def __repr__(self):
        return f"the plan {super().__repr__()}"


def _run_plan(answer, numels):
    plan = answer(list(numels), dist.get_world_size())
    try:
        return _Plan([(int(p), int(start), int(stop)) for p, start, stop in shard] for shard in plan)
    except (TypeError, ValueError):
        return plan


def _plan_trials():
    for world_size, numels in ((2, (4, 4)), (2, (5, 3)), (1, (5, 2)), (2, (5, 4)), (3, (7, 2, 1)), (4, (1, 1, 1))):
        expected = _Plan(_planned(list(numels), world_size))
        what = f"parameters of {', '.join(map(str, numels))} elements"
        yield Trial(world_size, _run_plan, (numels,), [expected] * world_size, what=what)


def _plan_cause(trial: Trial, rank: int, expected: list, got: object) -> str:
    numels, world_size = trial.args[0], trial.world_size
    if not _is_plan(got):
        return "Return a list for each rank, of tuples (parameter, start, stop)."
    length = -(-sum(numels) // world_size)
    if len(got) != world_size:
        return f"There are {len(got)} lists for {world_size} ranks: each rank has one, empty if it owns nothing."
    backward = [part for shard in got for part in shard if part[1] > part[2]]
    if backward:
        return f"{backward[0]} stops before it starts: the third number is where it stops, not how many."
    if any(start == stop for shard in got for _, start, stop in shard):
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
        ownerless = f"{sum(numels) - len(owned)} of {sum(numels)} elements have no owner, and would never be updated. "
        if sum(numels) % world_size == 0:
            return ownerless + "Is stop exclusive, as in a slice, [start:stop]?"
        return (
            ownerless
            + f"{sum(numels)} // {world_size} loses the remainder: round up, and let the last shard be padded."
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

NUMEL = 12  # divides by every world size tried
START = [7.0 + at for at in range(NUMEL)]
LRS, BETA = (1 / 16, 1 / 8, 1 / 4), 3 / 4  # over powers of two: all that the trials compute is exact
DEFAULT_LRS, DEFAULT_BETA = (1 / 16,) * 3, 1 / 2  # what an answer uses that ignores its arguments


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

    steps: the parameters after each. state: elements that it keeps in memory. said: what the rank said on the wire.
    borrowed: whether the state lies in the gradients' memory.
    """

    steps: list[list[float]]
    state: int
    world_size: int
    said: list[Record] = field(default_factory=list, compare=False)
    borrowed: bool = field(default=False, compare=False)

    def __repr__(self):
        return f"parameters {_brief(self.steps, NUMEL // self.world_size)} and a state of {self.state} elements"


def _brief(steps: list[list[float]], length: int) -> str:
    """Of each step, the first number of each shard."""
    return " → ".join(", ".join(f"{value:g}" for value in step[::length]) for step in steps)


def _gradient(rank: int, world_size: int, step: int) -> float:
    """That of element 0; element i has i + 1 times as much."""
    return 16.0 * world_size * 10**rank * (step + 1)


def _run_step(answer, steps):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parameters, state, found = torch.tensor(START, dtype=torch.float64), {}, []
    gradients = torch.empty_like(parameters)  # one tensor for all steps, as a bucket is
    for step in range(steps):
        gradients.copy_(torch.arange(1, NUMEL + 1) * _gradient(rank, world_size, step))
        answer(parameters, gradients, state, LRS[step], BETA)
        found.append(parameters.tolist())
    kept = {_address(tensor): tensor for tensor in _tensors(state) if _address(tensor) != _address(parameters)}
    numel = sum(tensor.untyped_storage().nbytes() // tensor.element_size() for tensor in kept.values())
    return Trained(found, numel, world_size, borrowed=_address(gradients) in kept)


def _address(tensor: torch.Tensor) -> int:
    """Of its storage: a view has that of the whole."""
    return tensor.untyped_storage().data_ptr()


def _tensors(kept: object) -> list[torch.Tensor]:
    """The tensors in a state, also within its dicts and lists."""
    if isinstance(kept, torch.Tensor):
        return [kept]
    parts = kept.values() if isinstance(kept, dict) else kept if isinstance(kept, list | tuple) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _sgd(parameter: float, momentum: float, gradient: float, lr: float, beta: float) -> tuple[float, float]:
    momentum = beta * momentum + gradient
    return parameter - lr * momentum, momentum


def _averaging(parameter: float, momentum: float, gradient: float, lr: float, beta: float) -> tuple[float, float]:
    return _sgd(parameter, momentum, (1 - beta) * gradient, lr, beta)


def _lr_inside(parameter: float, momentum: float, gradient: float, lr: float, beta: float) -> tuple[float, float]:
    return _sgd(parameter, momentum, lr * gradient, 1, beta)


def _serial(
    world_size: int,
    steps: int,
    scale: float = 1.0,
    rank: int | None = None,
    rule: Callable = _sgd,
    lrs: tuple[float, ...] = LRS,
    beta: float = BETA,
) -> list[list[float]]:
    """The parameters of one process that has all ranks' gradients, or one rank's, after each step."""
    ranks = range(world_size) if rank is None else [rank]
    parameters, momenta, found = START, [0.0] * NUMEL, []
    for step in range(steps):
        mean = scale * sum(_gradient(r, world_size, step) for r in ranks) / world_size
        updated = [
            rule(parameter, momentum, (at + 1) * mean, lrs[step], beta)
            for at, (parameter, momentum) in enumerate(zip(parameters, momenta, strict=True))
        ]
        parameters, momenta = [parameter for parameter, _ in updated], [momentum for _, momentum in updated]
        found.append(parameters)
    return found


def _step_trials():
    for world_size, steps in ((2, 1), (2, 3), (1, 2), (4, 2)):
        right = Trained(_serial(world_size, steps), NUMEL // world_size, world_size)

        def expected(run: Run, right: Trained = right, world_size: int = world_size) -> list[Trained]:
            return [Trained(right.steps, right.state, world_size, said) for said in run.wire]

        what = (
            f"{steps} step{'s' * (steps > 1)} (parameters 7, 8, 9... at first; rank r's gradients in step s are "
            f"{16 * world_size}·10ʳ·s times 1, 2, 3...; here the first number of each shard)"
        )
        yield Trial(world_size, _run_step, (steps,), expected, what=what)


def _step_cause(trial: Trial, rank: int, expected: Trained, got: Trained) -> str:
    world_size = trial.world_size
    own = slice(rank * NUMEL // world_size, (rank + 1) * NUMEL // world_size)
    first, mine = got.steps[0], got.steps[0][own]

    def found(*what, **otherwise) -> bool:
        return mine == _serial(world_size, 1, *what, **otherwise)[0][own]

    if got.steps == expected.steps:
        return _wrong_state(expected, got)
    if first == expected.steps[0]:
        return _wrong_later(trial, got)
    if first == START:
        return "The parameters are as before. Write into them in place: a shard is parameters.chunk(world_size)[rank]."
    if found():
        return _others_stale(rank, expected, first)
    if found(world_size):
        return "The gradient is the sum over the ranks. Divide the shard by the number of ranks: it should be the mean."
    if found(1 / world_size):
        return "The gradient was divided by the number of ranks twice."
    if found(rule=_averaging):
        return "momentum = beta * momentum + gradient: without a factor 1 - beta."
    if found(1, rank) or found(world_size, rank):
        return (
            f"Rank {rank} updated its shard with its own gradient: the others' is missing. "
            "ring_reduce_scatter(gradients) returns this rank's shard of the sum."
        )
    if found(-1):
        return "The update has the wrong sign: against the gradient."
    if _elsewhere(expected.steps[0], own, mine):
        return (
            f"Rank {rank} updated its shard with the mean that belongs to another: which chunk does the reduce-scatter "
            "end with? ring_reduce_scatter ends with chunk `rank`."
        )
    return (
        "The update has the wrong size: momentum = beta * momentum + gradient, zero at first; then parameter -= lr * "
        "momentum, each element with its own."
    )


def _elsewhere(right: list[float], own: slice, mine: list[float]) -> bool:
    """Whether this rank's shard moved as another rank's should."""
    moves = [after - before for after, before in zip(right, START, strict=True)]
    moved = [after - before for after, before in zip(mine, START[own], strict=True)]
    return any(moved == moves[first : first + len(mine)] for first in range(0, NUMEL, len(mine)))


def _wrong_later(trial: Trial, got: Trained) -> str:
    """The first step is right, but not the next."""
    world_size, steps = trial.world_size, trial.args[0]
    if got.borrowed:
        return BORROWED
    for given in ({"lrs": DEFAULT_LRS}, {"beta": DEFAULT_BETA}, {"lrs": DEFAULT_LRS, "beta": DEFAULT_BETA}):
        if got.steps == _serial(world_size, steps, **given):
            return "The first step was right. lr and beta are arguments, and lr changes: take those of each call."
    if got.steps == _serial(world_size, steps, rule=_lr_inside):
        return "The first step was right. Keep lr out of the momentum: lr changes, and counts only when it is used."
    return "The first step was right. Is the momentum kept in `state`, and used again in the next one?"


BORROWED = (
    "The momentum changes between two steps: ring_reduce_scatter returns a view of `gradients`, which the next "
    "backward overwrites. Keep a tensor of your own."
)


def _wrong_state(expected: Trained, got: Trained) -> str:
    if got.borrowed:
        return BORROWED
    if got.state == 0:
        return (
            "The parameters are right, but `state` holds no tensor: keep the momentum there, not in a global, and as a "
            "tensor."
        )
    if got.state == NUMEL:
        return (
            "The parameters are right, but every rank keeps the momentum of all elements: that is the memory that ZeRO "
            f"saves. Keep that of the shard alone, {expected.state} elements; a view keeps its whole storage alive: "
            "allocate the shard."
        )
    return f"The parameters are right, but `state` has {got.state} elements: the shard has {expected.state}."


def _others_stale(rank: int, expected: Trained, first: list[float]) -> str:
    """This rank's shard is right, but not what others own."""
    ops = [record.op for record in expected.said]
    if "send" not in ops and "all_gather" not in ops:
        return "Nothing was sent. Begin with ring_reduce_scatter(gradients), end with ring_all_gather(parameters)."
    if all(value in before_and_after for value, *before_and_after in zip(first, START, expected.steps[0], strict=True)):
        return (
            f"Rank {rank}'s own shard is right, the rest is as before the step. Was ring_all_gather(parameters) left "
            "out, or called before the shard was updated?"
        )
    return (
        f"Rank {rank}'s own shard is right, what other ranks own is not: this rank updated it, too, though it "
        "has only its own shard's mean. Update the shard alone, and gather the rest."
    )


def _step_wire(trial: Trial, run: Run) -> str | None:
    world_size, whole = trial.world_size, NUMEL * 8
    needed = trial.args[0] * 2 * (world_size - 1) * whole / world_size
    for rank, records in enumerate(run.wire):
        sent = sum(_sent(record, rank, world_size) for record in records)
        if sent > needed:
            reduced = [record.op for record in records if record.op == "all_reduce"]
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
        "ring_reduce_scatter(gradients) returns this rank's shard of the sum (a view of `gradients`): divide it. "
        "shard = parameters.chunk(world_size)[rank] is a view, too.",
        'state["momentum"] = torch.zeros_like(shard) at first; then .mul_(beta).add_(gradient), and shard.sub_(lr * '
        'state["momentum"]).',
    ],
    "right on 1, 2 and 4 ranks, step after step, with 1/W of the state and 2(W-1)/W of the bytes on each.",
    _step_cause,
    _step_wire,
    note="# Momentum by hand. ddpkit.zero.ZeroOptimizer does so with any elementwise optimizer, a bucket at a time.",
)
