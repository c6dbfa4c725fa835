"""Checkers of notebook 07: shard_plan, who owns which elements, and zero_step, SGD on a shard.

The first element's gradients add up to a tally, each digit a rank: 11 on two ranks, 1111 on four.
Element i has i + 1 times as much, so that a gradient in the wrong place shows.
"""

import json
from collections import Counter

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from ddpkit import zero
from ddpkit.runtime.records import recorder

from .checker import Exercise, Trial, mistakes, unwritten_memory_shows

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these

# shard_plan(numels, world_size)

PLANS = [((4, 4), 2), ((5, 3), 2), ((5, 4), 2), ((7, 2, 1), 3), ((1, 1, 1), 4), ((5, 2), 1)]


def _planned(numels: tuple[int, ...], world_size: int) -> list[list[list]]:
    """The specification, element by element."""
    length = (sum(numels) + world_size - 1) // world_size
    elements = [(parameter, at) for parameter, numel in enumerate(numels) for at in range(numel)]
    shards: list[list[list]] = [[] for _ in range(world_size)]
    for place, (parameter, at) in enumerate(elements):
        shard = shards[place // length]
        if not shard or shard[-1][0] != parameter:
            shard.append([parameter, at, at])
        shard[-1][2] = at + 1
    return shards


def _run_plan(answer, right):
    """Plan after plan, up to the first that isn't right."""
    for (numels, world_size), planned in right.items():
        plan = answer(list(numels), world_size)
        plan = json.loads(json.dumps(plan, default=int))  # tuples as lists, tensors as numbers
        if plan != planned:
            return right | {(numels, world_size): plan}
    return right


RIGHT = {plan: _planned(*plan) for plan in PLANS}


shard_plan = Exercise(
    reference=zero.shard_plan,
    trials=lambda: [Trial(1, _run_plan, (RIGHT,), [RIGHT], what="by arguments")],
    hints={
        "start": "Put all parameters end to end: a flat buffer. Rank r owns elements r * length to "
        "(r+1) * length; length is the number of elements divided by W, rounded up: -(-n // W).",
        "values": "A parameter from `first` on overlaps shard r from max(r * length, first) to "
        "min((r+1) * length, first + numel); subtract `first`.",
    },
    praise="every element has one owner, and no shard is longer than n/W, rounded up.",
    explain=lambda *_: "A list for each rank, of tuples (parameter, start, stop), perhaps empty.",
    mistakes=mistakes("""
loses_the_remainder: -(-sum(numels) // world_size) → sum(numels) // world_size
    n // W loses the remainder: the last elements have no owner. Round up, and pad the last shard.
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
by_parameter: if start < stop: → if rank == parameter % world_size:
    append((parameter, start, stop)) → append((parameter, 0, numel))
    Cut the flat buffer, not the list of parameters: a parameter may lie in two shards.
"""),
)


# zero_step(parameters, gradients, state)

SENT = "bytes sent, where a reduce-scatter and an all-gather do,"
NUMEL = 8  # divides by every world size tried
START = torch.arange(7.0, 7 + NUMEL, dtype=torch.float64)
LRS, BETA = (1 / 16, 1 / 8, 1 / 4), 3 / 4  # over powers of two: all that is computed is exact


def _gradient(rank: int, world_size: int, step: int) -> torch.Tensor:
    first = 16 * world_size * 10**rank * (step + 1)
    return torch.arange(1.0, 1 + NUMEL, dtype=torch.float64) * first


def _run_step(answer, steps, needed):
    """needed: the bytes that a rank must send."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parameters, state, seen = START.clone(), {}, {}
    gradients = torch.empty_like(parameters)  # one tensor for all steps, as a bucket is
    for step in range(steps):
        gradients.copy_(_gradient(rank, world_size, step))
        with unwritten_memory_shows():
            answer(parameters, gradients, state, LRS[step], BETA)
        kept = {}  # by where they lie: a view keeps the whole storage
        for tensor in filter(torch.is_tensor, tree_leaves(state)):
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
        kept.pop(parameters.data_ptr(), None)
        seen[f"parameters after step {step + 1}"] = parameters.tolist()
        seen[f"elements in state after step {step + 1}"] = sorted(kept.values())
    part, sent = (world_size - 1) / world_size, Counter()
    shares = {"send": 1, "recv": 0, "all_reduce": 2 * part, "all_gather": world_size - 1}
    for record in recorder().records:  # collectives as if they went round a ring
        sent[record.op] += record.bytes * shares.get(record.op, part)
    return seen | {SENT: needed if sent.total() <= needed else dict(+sent)}


def _serial(world_size: int, steps: int, needed: int) -> dict:
    """The specification: one process that has all ranks' gradients."""
    parameters, momentum, right = START.clone(), 0, {}
    for step in range(steps):
        total = sum(_gradient(rank, world_size, step) for rank in range(world_size))
        momentum = BETA * momentum + total / world_size
        parameters -= LRS[step] * momentum
        right[f"parameters after step {step + 1}"] = parameters.tolist()
        right[f"elements in state after step {step + 1}"] = [NUMEL // world_size]
    return right | {SENT: needed}


def _step_trials():
    for world_size, steps in ((2, 3), (4, 2), (1, 2)):
        needed = steps * 2 * (world_size - 1) * START.nbytes // world_size
        right = [_serial(world_size, steps, needed)] * world_size
        what = f"{steps} steps (parameters 7, 8, 9... at first; gradients of rank r in step s are "
        what += f"{16 * world_size}·10ʳ·s times 1, 2, 3...)"
        yield Trial(world_size, _run_step, (steps, needed), right, what=what)


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
    praise="right on 1, 2 and 4 ranks, each with 1/W of the state and 2(W-1)/W of the bytes.",
    note="Momentum by hand. ddpkit.zero.ZeroOptimizer does this with any elementwise optimizer.",
    mistakes=mistakes("""
sums: (gradients) / world_size → (gradients)
    The gradient is the sum over the ranks. Divide the shard by their number: it should be the mean.
divides_twice: (gradients) / world_size → (gradients) / world_size**2
    The gradient was divided by the number of ranks twice.
its_own_gradient: ring_reduce_scatter(gradients) / world_size → gradients.chunk(world_size)[rank]
    Each rank updated its shard with its own gradient: the others' is missing.
    ring_reduce_scatter(gradients) returns this rank's shard of the sum.
its_own_share: ring_reduce_scatter(gradients) → gradients.chunk(world_size)[rank]
gathers_never: ring_all_gather(parameters) → pass
    The own shard is right, the rest is as before the step. Was ring_all_gather(parameters) left
    out, or called before the shard was updated?
gathers_first: shard.sub_(lr * state["momentum"])⏎ring_all_gather(parameters) →
    ⏎ring_all_gather(parameters)⏎shard.sub_(lr * state["momentum"])
updates_all_with_partial_sums: gradient = ring_reduce_scatter(gradients) / world_size →
    ⏎ring_reduce_scatter(gradients)⏎gradient = gradients / world_size
    parameters.chunk(world_size)[rank] → parameters
    ring_all_gather(parameters) → pass
    The own shard is right, what other ranks own is not: this rank updated it, too, though it has
    only its own shard's mean. Update the shard alone, and gather the rest.
updates_all_with_its_shard: shard.sub_(lr * state["momentum"])⏎ring_all_gather(parameters) →
    ⏎parameters.view(world_size, -1).sub_(lr * state["momentum"])
shards_nothing: gradient = ring_reduce_scatter(gradients) / world_size →
    ⏎dist.all_reduce(gradients)⏎gradient = gradients / world_size
    parameters.chunk(world_size)[rank] → parameters
    ring_all_gather(parameters) → pass
    The parameters are right, but every rank keeps the momentum of all elements, which ZeRO saves.
    Keep the shard's alone; a view keeps its whole storage alive: allocate the shard.
keeps_state_for_all: torch.zeros_like(shard) → torch.zeros_like(parameters)
    state["momentum"].mul_ → state["momentum"].chunk(world_size)[rank].mul_
    lr * state["momentum"] → lr * state["momentum"].chunk(world_size)[rank]
keeps_a_part_of_a_whole: zeros_like(shard) → zeros_like(parameters).chunk(world_size)[rank]
forgets_its_momentum: if not state: → state = {}⏎if not state:
    The parameters are right, but `state` holds no tensor: keep the momentum there, not in a global.
in_a_global: if not state: → state = globals().setdefault("kept", {})⏎if not state:
reduces_everything: gradient = ring_reduce_scatter(gradients) / world_size →
    ⏎dist.all_reduce(gradients)⏎gradient = gradients.chunk(world_size)[rank] / world_size
    An all_reduce gives every rank the whole sum; it needs a shard.
sends_gradients_twice: gradient = ring_reduce_scatter → ring_reduce_scatter(gradients.clone())
    ⏎gradient = ring_reduce_scatter
    What is sent twice? One reduce-scatter of the gradients is enough.
in_a_new_tensor: parameters.chunk(world_size)[rank] → parameters.chunk(world_size)[rank].clone()
    Parameters are as before. Write into them in place: a shard is parameters.chunk(W)[rank].
uphill: shard.sub_ → shard.add_
    The update has the wrong sign: against the gradient.
with_the_next_ranks_mean: gradient = ring_reduce_scatter(gradients) / world_size →
    ⏎shards = list(gradients.chunk(world_size))⏎gradient = torch.empty_like(shards[0])
    ⏎dist.reduce_scatter(gradient, shards[1:] + shards[:1])⏎gradient /= world_size
    The shard was updated with another's mean: ring_reduce_scatter ends with chunk `rank`.
with_its_own_lr: lr * state["momentum"] → 1 / 16 * state["momentum"]
    The first step was right. lr and beta are arguments, and lr changes: take those of each call.
with_its_own_beta: mul_(beta) → mul_(1 / 2)
with_its_own_lr_and_beta: lr * state["momentum"] → 1 / 16 * state["momentum"]
    mul_(beta) → mul_(1 / 2)
with_lr_in_the_momentum: add_(gradient) → add_(lr * gradient)
    lr * state["momentum"] → state["momentum"]
    The first step was right. Keep lr out of the momentum: it changes.
moves_all_as_the_first: lr * state["momentum"] → lr * state["momentum"][0]
    The update has the wrong size: momentum = beta * momentum + gradient, zero at first; then
    parameter -= lr * momentum, each element with its own.
without_lr: lr * state["momentum"] → state["momentum"]
by_nesterov: lr * state["momentum"] → lr * (gradient + beta * state["momentum"])
begins_with_a_gradient: torch.zeros_like(shard) → gradient.clone()
begins_with_junk: torch.zeros_like(shard) → torch.empty_like(shard)
    The momentum begins with what lay in memory: torch.zeros_like, not empty_like.
averages_its_momentum: add_(gradient) → add_((1 - beta) * gradient)
    momentum = beta * momentum + gradient: without a factor 1 - beta.
keeps_a_view_of_the_gradients: (gradients) / world_size → (gradients).div_(world_size)
    if not state:⏎state["momentum"] = torch.zeros_like(shard) → first = not state
    ⏎state.setdefault("momentum", gradient)
    state["momentum"].mul_(beta) → first or state["momentum"].mul_(beta)
    The momentum changes between two steps: ring_reduce_scatter returns a view of `gradients`,
    which the next backward overwrites. Keep a tensor of your own.
keeps_the_gradient_too: shard.sub_ → state["gradient"] = gradient⏎shard.sub_
    `state` holds more than the momentum: the gradient isn't needed again.
forgets_after_a_step: if not state: → state.clear()⏎if not state:
    The first step was right. Is the momentum kept in `state`, and used again in the next one?
counts_its_steps: shard.sub_ → state["steps"] = torch.ones(1)⏎shard.sub_
    `state` has more than the shard's momentum: the step needs no counter.
"""),
)
