"""Checkers of notebook 07: shard_plan, who owns which elements, and zero_step, SGD on a shard.

The first element's gradients are chosen so that their sum reads like a tally, each digit a rank: 11
on two ranks, 1111 on four. Element i has i + 1 times as much, so that a gradient in the wrong place
shows.
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ddpkit import zero
from ddpkit.runtime.launch import Run

from .checker import Exercise, Mistake, Trial, mistakes, unwritten_memory_shows

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these

# shard_plan(numels, world_size)

PLANS = [(2, (4, 4)), (2, (5, 3)), (2, (5, 4)), (3, (7, 2, 1)), (4, (1, 1, 1)), (1, (5, 2))]


def _planned(numels: tuple[int, ...], world_size: int) -> list[list[tuple]]:
    """The specification, element by element."""
    length = (sum(numels) + world_size - 1) // world_size
    elements = [(parameter, at) for parameter, numel in enumerate(numels) for at in range(numel)]
    shards: list[list[tuple]] = [[] for _ in range(world_size)]
    for place, (parameter, at) in enumerate(elements):
        shard = shards[place // length]
        if shard and shard[-1][0] == parameter:
            shard[-1] = (parameter, shard[-1][1], at + 1)
        else:
            shard.append((parameter, at, at + 1))
    return shards


def _run_plan(answer, numels):
    plan = answer(list(numels), dist.get_world_size())
    shards = []
    try:
        for shard in plan:
            shards.append([(int(p), int(start), int(stop)) for p, start, stop in shard])
    except (TypeError, ValueError):
        return plan
    return shards


def _plan_trials():
    for world_size, numels in PLANS:
        expected = [_planned(numels, world_size)] * world_size
        what = f"parameters of {', '.join(map(str, numels))} elements"
        yield Trial(world_size, _run_plan, (numels,), expected, what=what)


def _explain_plan(trial: Trial, rank: int, expected: list, got: object) -> str:
    (numels,), world_size = trial.args, trial.world_size
    if not isinstance(got, list) or not all(isinstance(shard, list) for shard in got):
        return "Return a list for each rank, of tuples (parameter, start, stop)."
    if len(got) != world_size:
        return (
            f"There are {len(got)} lists for {world_size} ranks: an empty one for who owns nothing."
        )
    owned = [(p, at) for shard in got for p, start, stop in shard for at in range(start, stop)]
    if len(set(owned)) < len(owned):
        parameter, at = next(element for element in owned if owned.count(element) > 1)
        return f"Element {at} of parameter {parameter} has more than one owner."
    missing = {(p, at) for p, numel in enumerate(numels) for at in range(numel)} - set(owned)
    if missing:
        all_of_them = f"{len(missing)} of {sum(numels)} elements"
        return f"{all_of_them} have no owner, and would never be updated."
    return "Each element has one owner. But each rank's are to lie together in the flat buffer."


def by_parameter(numels, world_size):
    shards = [[] for _ in range(world_size)]
    for parameter, numel in enumerate(numels):
        shards[parameter % world_size].append((parameter, 0, numel))
    return shards


shard_plan = Exercise(
    reference=zero.shard_plan,
    trials=_plan_trials,
    hints={
        "start": "Put all parameters end to end: a flat buffer. Rank r owns elements r * length to "
        "(r+1) * length; length is the number of elements divided by W, rounded up: -(-n // W).",
        "values": "A parameter from `first` on overlaps shard r from max(r * length, first) to "
        "min((r+1) * length, first + numel); subtract `first`.",
    },
    praise="every element has one owner, and no shard is longer than n/W, rounded up.",
    explain=_explain_plan,
    mistakes=[
        *mistakes("""
loses_the_remainder: -(-sum(numels) // world_size) → sum(numels) // world_size
    n // W loses the remainder: the last elements have no owner, and would never be updated. Round
    up, and let the last shard be padded.
leaves_the_rest_to_the_last: -(-sum(numels) // world_size) → sum(numels) // world_size
    min((rank + 1) * length → min((rank + 1) * length if shard is not shards[-1] else sum(numels)
    Shards have equal length, n / W rounded up. The last one isn't longer, but padded.
splits_nearly_evenly: max(rank * length → max(sum(numels) // world_size * rank
    ⏎+ min(rank, sum(numels) % world_size)
    min((rank + 1) * length → min(sum(numels) // world_size * (rank + 1)
    ⏎+ min(rank + 1, sum(numels) % world_size)
    Shards have equal length, that of the first. The last ones are filled up with padding.
shards_nothing: max(rank * length, first) - first → 0
    min((rank + 1) * length, first + numel) - first → numel
    Every rank owns the same: that shards nothing. Each element has one owner.
in_flat_numbers: max(rank * length, first) - first → max(rank * length, first)
    min((rank + 1) * length, first + numel) - first → min((rank + 1) * length, first + numel)
    Count start and stop from the parameter's own beginning, not from that of the flat buffer.
keeps_empty_parts: if start < stop: → if True:
    append((parameter, start, stop)) → append((parameter, start, max(start, stop)))
    Parts from start to stop with nothing in them: leave them out.
counts_the_padding: first + numel) → first + numel + (parameter + 1 == len(numels)) * sum(numels))
    The padding belongs to no parameter: the last part ends where its parameter does.
from_the_end: return shards → return shards[::-1]
    Rank 0 owns the beginning of the flat buffer, rank 1 what follows, in the parameters' order.
overlaps: min((rank + 1) * length → min((rank + 1) * length + 1
    Element 0 of parameter 1 has more than one owner. Is stop inclusive where it shouldn't be?
with_inclusive_stops: append((parameter, start, stop)) → append((parameter, start, stop - 1))
    Some elements have no owner, and would never be updated. Is stop exclusive, as in [start:stop]?
in_lengths: append((parameter, start, stop)) → append((parameter, start, stop - start))
    The third number is where the part stops, not how many elements it has.
of_this_rank_only: return shards → return shards[dist.get_rank()]
    Return a list for each rank, of tuples (parameter, start, stop): every rank knows the plan.
"""),
        Mistake.written(
            by_parameter,
            "Cut the flat buffer, not the list of parameters: a parameter may lie in two shards. "
            "Otherwise the fullest rank has more than it need have.",
        ),
    ],
)


# zero_step(parameters, gradients, state)

NUMEL = 12  # divides by every world size tried
START = [7.0 + at for at in range(NUMEL)]
LRS, BETA = (1 / 16, 1 / 8, 1 / 4), 3 / 4  # over powers of two: all that is computed is exact


@dataclass
class Stepped:
    """What an answer left, and what a checker needs to say why.

    steps: the parameters after each. state: elements in memory of each tensor that it keeps.
    borrowed: whether one of them lies in the gradients' memory. calls: what the rank sent.
    """

    steps: list[list[float]]
    state: list[int]
    world_size: int
    borrowed: bool = field(default=False, compare=False)
    calls: list[str] = field(default_factory=list, compare=False)

    def __repr__(self):
        length = NUMEL // self.world_size
        said = []
        for step in self.steps:  # of each the first number of each shard
            said.append(", ".join(f"{value:g}" for value in step[::length]))
        kept = " and ".join(map(str, self.state)) or "0"
        return f"parameters {' → '.join(said)} and a state of {kept} elements"

    def symptom(self):
        return f"{self.steps} {self.state} {self.borrowed}"


def _gradient(rank: int, world_size: int, step: int) -> float:
    """That of element 0; element i has i + 1 times as much."""
    return 16.0 * world_size * 10**rank * (step + 1)


def _run_step(answer, steps):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parameters, state, found = torch.tensor(START, dtype=torch.float64), {}, []
    gradients = torch.empty_like(parameters)  # one tensor for all steps, as a bucket is
    for step in range(steps):
        gradients.copy_(torch.arange(1, NUMEL + 1) * _gradient(rank, world_size, step))
        with unwritten_memory_shows():
            answer(parameters, gradients, state, LRS[step], BETA)
        found.append(parameters.tolist())
    sizes = {}  # by where they lie: a view keeps the whole storage
    for tensor in _tensors(state):
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
    sizes.pop(parameters.untyped_storage().data_ptr(), None)
    borrowed = gradients.untyped_storage().data_ptr() in sizes
    return Stepped(found, sorted(sizes.values()), world_size, borrowed)


def _tensors(kept: object) -> list[torch.Tensor]:
    """The tensors in a state, also within its dicts and lists."""
    if isinstance(kept, torch.Tensor):
        return [kept]
    parts = kept.values() if isinstance(kept, dict) else kept
    if not isinstance(kept, dict | list | tuple):
        return []
    return [tensor for part in parts for tensor in _tensors(part)]


def _serial(world_size: int, steps: int) -> list[list[float]]:
    """The specification: the parameters of one process that has all ranks' gradients."""
    parameters, momenta, found = list(START), [0.0] * NUMEL, []
    for step in range(steps):
        mean = sum(_gradient(rank, world_size, step) for rank in range(world_size)) / world_size
        for at in range(NUMEL):
            momenta[at] = BETA * momenta[at] + (at + 1) * mean
            parameters[at] -= LRS[step] * momenta[at]
        found.append(list(parameters))
    return found


def _step_trials():
    for world_size, steps in ((2, 1), (2, 3), (4, 2), (1, 2)):
        right = Stepped(_serial(world_size, steps), [NUMEL // world_size], world_size)
        what = (
            f"{steps} step{'s' if steps > 1 else ''} (parameters 7, 8, 9... at first; rank r's "
            f"gradients in step s are {16 * world_size}·10ʳ·s times 1, 2, 3...; here the first "
            "number of each shard)"
        )
        yield Trial(world_size, _run_step, (steps,), [right] * world_size, what=what)


BORROWED = (
    "The momentum changes between two steps: ring_reduce_scatter returns a view of `gradients`, "
    "which the next backward overwrites. Keep a tensor of your own."
)
NOT_SHARDED = (
    "The parameters are right, but every rank keeps the momentum of all elements: that is the "
    "memory that ZeRO saves. Keep that of the shard alone; a view keeps its whole storage alive: "
    "allocate the shard."
)
SIZE = (
    "The update has the wrong size: momentum = beta * momentum + gradient, zero at first; then "
    "parameter -= lr * momentum, each element with its own."
)


def _explain_step(trial: Trial, rank: int, expected: Stepped, got: Stepped) -> str:
    if got.borrowed:
        return BORROWED
    if got.steps == expected.steps:
        if got.state == [NUMEL]:
            return NOT_SHARDED
        return (
            "The parameters are right. Keep one tensor in `state`, the shard's momentum: it is "
            "all that the next step needs."
        )
    if got.steps[0] == expected.steps[0]:
        return "The first step was right. Is the momentum kept in `state`, and used in the next?"
    length = NUMEL // trial.world_size
    own = slice(rank * length, (rank + 1) * length)
    if got.steps[0][own] == expected.steps[0][own]:
        return (
            f"Rank {rank}'s own shard is right, what others own is not. Update the shard alone, "
            "then ring_all_gather(parameters)."
        )
    return SIZE


def _step_wire(trial: Trial, run: Run) -> str | None:
    """No more bytes than a reduce-scatter and an all-gather."""
    world_size, whole = trial.world_size, NUMEL * 8
    part = (world_size - 1) / world_size
    shares = {
        "send": 1,
        "all_reduce": 2 * part,
        "reduce_scatter": part,
        "all_gather": world_size - 1,
    }
    needed = trial.args[0] * 2 * part * whole
    for rank, records in enumerate(run.wire):
        sent = sum(record.bytes * shares.get(record.op, 0) for record in records)
        for record in records:
            if record.op in ("broadcast", "reduce") and record.peer == rank:
                sent += record.bytes * (world_size - 1)
        if sent > needed:
            return (
                f"the values and the state are right, but rank {rank} sent {sent:g} bytes where a "
                f"reduce-scatter and an all-gather need {needed:g}."
            )
    return None


zero_step = Exercise(
    reference=zero.zero_step,
    trials=_step_trials,
    hints={
        "start": "Three parts: ring_reduce_scatter the gradients, update this rank's shard, "
        "ring_all_gather the parameters.",
        "values": "ring_reduce_scatter(gradients) returns this rank's shard of the sum, a view of "
        "`gradients`: divide it. shard = parameters.chunk(world_size)[rank] is a view, too. "
        'state["momentum"] = torch.zeros_like(shard) at first; then .mul_(beta).add_(gradient).',
        "wire": "One reduce-scatter of the gradients, one all-gather of the parameters.",
    },
    praise="right on 1, 2 and 4 ranks, step after step, with 1/W of the state and 2(W-1)/W of the "
    "bytes on each.",
    note="Momentum by hand. ddpkit.zero.ZeroOptimizer does this with any elementwise optimizer.",
    explain=_explain_step,
    wire=_step_wire,
    mistakes=mistakes(f"""
sums: (gradients) / world_size → (gradients)
    The gradient is the sum over the ranks. Divide the shard by the number of ranks: it should be
    the mean.
divides_twice: (gradients) / world_size → (gradients) / world_size**2
    The gradient was divided by the number of ranks twice.
its_own_gradient: ring_reduce_scatter(gradients) / world_size → gradients.chunk(world_size)[rank]
    Each rank updated its shard with its own gradient: the others' is missing.
    ring_reduce_scatter(gradients) returns this rank's shard of the sum.
its_own_share: ring_reduce_scatter(gradients) → gradients.chunk(world_size)[rank]
    Each rank updated its shard with its own gradient: the others' is missing.
    ring_reduce_scatter(gradients) returns this rank's shard of the sum.
gathers_never: shard.sub_(lr * state["momentum"])⏎ring_all_gather(parameters) →
    ⏎shard.sub_(lr * state["momentum"])
    The own shard is right, the rest is as before the step. Was ring_all_gather(parameters) left
    out, or called before the shard was updated?
gathers_first: shard.sub_(lr * state["momentum"])⏎ring_all_gather(parameters) →
    ⏎ring_all_gather(parameters)⏎shard.sub_(lr * state["momentum"])
    The own shard is right, the rest is as before the step. Was ring_all_gather(parameters) left
    out, or called before the shard was updated?
updates_all_with_partial_sums: gradient = ring_reduce_scatter(gradients) / world_size →
    ⏎ring_reduce_scatter(gradients)⏎gradient = gradients / world_size
    parameters.chunk(world_size)[rank] → parameters
    shard.sub_(lr * state["momentum"])⏎ring_all_gather(parameters) →
    ⏎shard.sub_(lr * state["momentum"])
    The own shard is right, what other ranks own is not: this rank updated it, too, though it has
    only its own shard's mean. Update the shard alone, and gather the rest.
updates_all_with_its_shard: shard.sub_(lr * state["momentum"])⏎ring_all_gather(parameters) →
    ⏎parameters.view(world_size, -1).sub_(lr * state["momentum"])
    The own shard is right, what other ranks own is not: this rank updated it, too, though it has
    only its own shard's mean. Update the shard alone, and gather the rest.
shards_nothing: gradient = ring_reduce_scatter(gradients) / world_size →
    ⏎dist.all_reduce(gradients)⏎gradient = gradients / world_size
    parameters.chunk(world_size)[rank] → parameters
    shard.sub_(lr * state["momentum"])⏎ring_all_gather(parameters) →
    ⏎shard.sub_(lr * state["momentum"])
    {NOT_SHARDED}
keeps_state_for_all: torch.zeros_like(shard) → torch.zeros_like(parameters)
    state["momentum"].mul_ → state["momentum"].chunk(world_size)[rank].mul_
    lr * state["momentum"] → lr * state["momentum"].chunk(world_size)[rank]
    {NOT_SHARDED}
keeps_a_part_of_a_whole: zeros_like(shard) → zeros_like(parameters).chunk(world_size)[rank]
    {NOT_SHARDED}
forgets_its_momentum: if not state: → state = {{}}⏎if not state:
    The parameters are right, but `state` holds no tensor: keep the momentum there, not in a global.
in_a_global: if not state: → state = globals().setdefault("kept", {{}})⏎if not state:
    The parameters are right, but `state` holds no tensor: keep the momentum there, not in a global.
reduces_everything: gradient = ring_reduce_scatter(gradients) / world_size →
    ⏎dist.all_reduce(gradients)⏎gradient = gradients.chunk(world_size)[rank] / world_size
    An all_reduce gives every rank the whole sum; it needs a shard.
sends_gradients_twice: gradient = ring_reduce_scatter → ring_reduce_scatter(gradients.clone())
    ⏎gradient = ring_reduce_scatter
    What is sent twice? One reduce-scatter of the gradients is enough.
in_a_new_tensor: parameters.chunk(world_size)[rank] → parameters.chunk(world_size)[rank].clone()
    The parameters are as before. Write into them in place: a shard is
    parameters.chunk(world_size)[rank].
uphill: shard.sub_ → shard.add_
    The update has the wrong sign: against the gradient.
moves_all_as_the_first: lr * state["momentum"] → lr * state["momentum"][0]
    {SIZE}
with_the_next_ranks_mean: gradient = ring_reduce_scatter(gradients) / world_size →
    ⏎shards = list(gradients.chunk(world_size))⏎gradient = torch.empty_like(shards[0])
    ⏎dist.reduce_scatter(gradient, shards[1:] + shards[:1])⏎gradient /= world_size
    The shard was updated with the mean that belongs to another: which chunk does the reduce-scatter
    end with? ring_reduce_scatter ends with chunk `rank`.
with_its_own_lr: lr * state["momentum"] → 1 / 16 * state["momentum"]
    The first step was right. lr and beta are arguments, and lr changes: take those of each call.
with_its_own_beta: mul_(beta) → mul_(1 / 2)
    The first step was right. lr and beta are arguments, and lr changes: take those of each call.
with_its_own_lr_and_beta: lr * state["momentum"] → 1 / 16 * state["momentum"]
    mul_(beta) → mul_(1 / 2)
    The first step was right. lr and beta are arguments, and lr changes: take those of each call.
with_lr_in_the_momentum: add_(gradient) → add_(lr * gradient)
    lr * state["momentum"] → state["momentum"]
    The first step was right. Keep lr out of the momentum: lr changes, and counts only when it is
    used.
without_lr: lr * state["momentum"] → state["momentum"]
    {SIZE}
by_nesterov: lr * state["momentum"] → lr * (gradient + beta * state["momentum"])
    {SIZE}
begins_with_a_gradient: torch.zeros_like(shard) → gradient.clone()
    {SIZE}
begins_with_junk: torch.zeros_like(shard) → torch.empty_like(shard)
    The momentum begins with what lay in memory: torch.zeros_like, not empty_like.
averages_its_momentum: add_(gradient) → add_((1 - beta) * gradient)
    momentum = beta * momentum + gradient: without a factor 1 - beta.
keeps_a_view_of_the_gradients: (gradients) / world_size → (gradients).div_(world_size)
    if not state:⏎state["momentum"] = torch.zeros_like(shard) → first = not state
    ⏎state.setdefault("momentum", gradient)
    state["momentum"].mul_(beta) → first or state["momentum"].mul_(beta)
    {BORROWED}
keeps_the_gradient_too: ring_all_gather(parameters) → state["gradient"] = gradient
    ⏎ring_all_gather(parameters)
    `state` holds more than the momentum: the gradient isn't needed again. A second tensor of the
    shard's length is memory that ZeRO-1 wants to save.
forgets_after_a_step: if not state: → state.clear()⏎if not state:
    The first step was right. Is the momentum kept in `state`, and used again in the next one?
counts_its_steps: ring_all_gather(parameters) → state["steps"] = torch.ones(1)
    ⏎ring_all_gather(parameters)
    The parameters are right, but `state` has more than the shard's momentum: the step needs no
    counter.
"""),
)
