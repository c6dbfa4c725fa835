"""Checkers of notebook 07: the plan, a step on shards, the stages' bytes, clipping, stage 3.

The first `zero_step` lowers element 0 by a tally, a digit for each rank: 11 on two, 1111 on four.
Element i changes i + 1 times as much, so that a gradient in the wrong place shows.
"""

import json
import math
import weakref
from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from ddpkit import fsdp, memory, zero
from ddpkit.runtime.recorder import recorder

from .checker import Exercise, Rounded, Trial, mistakes, unwritten_memory_shows
from .score import SPARE, bytes_moved, spare

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these

# shard_plan(numels, world_size)

PLANS = [((4, 4), 2), ((5, 3), 2), ((5, 4), 2), ((7, 2, 1), 3), ((1, 1, 1), 4), ((5, 2), 1)]


def _planned(numels: tuple[int, ...], world_size: int) -> list[list[list]]:
    """The specification, element by element: [[parameter, start, stop], ...] for each rank."""
    length = (sum(numels) + world_size - 1) // world_size
    elements = [(parameter, at) for parameter, numel in enumerate(numels) for at in range(numel)]
    shards: list[list[list]] = [[] for _ in range(world_size)]
    for place, (parameter, at) in enumerate(elements):
        shard = shards[place // length]
        if not shard or shard[-1][0] != parameter:
            shard.append([parameter, at, at])
        shard[-1][2] = at + 1
    return shards


def _listed(value):
    return value.tolist() if hasattr(value, "tolist") else list(value)


def _run_plan(answer, right):
    """Call the answer for plan after plan, up to the first that isn't right."""
    for (numels, world_size), planned in right.items():
        plan = answer(list(numels), world_size)
        plan = json.loads(json.dumps(plan, default=_listed))  # tuples as lists
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
    explain=lambda *_: (
        "A list for each rank, of tuples (parameter, start, stop), perhaps empty: rank r's are of "
        "elements r * length to (r+1) * length, all parameters end to end. length is n/W, rounded "
        "up. Parts without an element are left out."
    ),
    mistakes=mistakes("""
loses_the_remainder: -(-sum(numels) // world_size) → sum(numels) // world_size
    n // W loses the remainder: the last elements have no owner. Round up, and pad the last shard.
in_flat_numbers: - first⏎stop = min((rank + 1) * length, first + numel) - first →
    ⏎⏎stop = min((rank + 1) * length, first + numel)
    Count start and stop from the parameter's own beginning, not from that of the flat buffer.
overlaps: min((rank + 1) * length → min((rank + 1) * length + 1
    Element 0 of parameter 1 has more than one owner. Is stop inclusive where it shouldn't be?
with_inclusive_stops: append((parameter, start, stop)) → append((parameter, start, stop - 1))
    Some elements have no owner, and would never be updated. Is stop exclusive, as in [start:stop]?
by_parameter: if start < stop:⏎shard.append((parameter, start, stop)) →
    ⏎if rank == parameter % world_size:⏎    shard.append((parameter, 0, numel))
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


def _run_step(answer, steps, dtype, needed):
    """Run steps on shards. needed: the bytes that a rank must send."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parameters, state, seen = START.to(dtype, copy=True), {}, {}
    gradients = torch.empty_like(parameters)  # one tensor for all steps, as a bucket is
    for step in range(steps):
        gradients.copy_(_gradient(rank, world_size, step))
        with unwritten_memory_shows():
            answer(parameters, gradients, state, LRS[step], BETA)
        kept = {}  # by where they lie: a view keeps the whole storage
        for tensor in filter(torch.is_tensor, tree_leaves(state)):
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        kept.pop(parameters.data_ptr(), None)
        seen[f"parameters after step {step + 1}"] = parameters.tolist()
        seen[f"bytes in state after step {step + 1}"] = sorted(kept.values())
    sent = bytes_moved(recorder().records, world_size)
    return seen | {SENT: needed if sent <= needed else sent}


def _serial(world_size: int, steps: int, itemsize: int, needed: int) -> dict:
    """The specification: one process that has all ranks' gradients."""
    parameters, momentum, right = START.clone(), 0, {}
    for step in range(steps):
        total = sum(_gradient(rank, world_size, step) for rank in range(world_size))
        momentum = BETA * momentum + total / world_size
        parameters -= LRS[step] * momentum
        right[f"parameters after step {step + 1}"] = parameters.tolist()
        right[f"bytes in state after step {step + 1}"] = [NUMEL // world_size * itemsize]
    return right | {SENT: needed}


def _step_trials():
    double, single = torch.float64, torch.float32
    for world_size, steps, dtype in (
        (2, 3, double),
        (2, 1, single),
        (4, 2, double),
        (1, 2, double),
    ):
        needed = steps * 2 * (world_size - 1) * NUMEL * dtype.itemsize // world_size
        right = [_serial(world_size, steps, dtype.itemsize, needed)] * world_size
        what = f"{steps} steps (parameters 7, 8, 9... at first; gradients of rank r in step s are "
        what += f"{16 * world_size}·10ʳ·s times 1, 2, 3...)" + ", in float32" * (dtype == single)
        yield Trial(world_size, _run_step, (steps, dtype, needed), right, what=what)


zero_step = Exercise(
    reference=zero.zero_step,
    writes=("parameters", "gradients", "state"),
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
    says={
        f"bytes in state after step {step}": f"bytes in state after step {step} on rank "
        "{rank}: {got}, not {expected}, its shard's momentum. A view counts as the whole tensor, "
        "which it keeps in memory."
        for step in (1, 2, 3)
    },
    note="Momentum by hand. ddpkit.zero.ZeroOptimizer does this with any elementwise optimizer.",
    mistakes=mistakes("""
sums: (gradients) / world_size → (gradients)
    The gradient is the sum over the ranks. Divide the shard by their number: it should be the mean.
its_own_gradient: ring_reduce_scatter(gradients) / world_size → gradients.chunk(world_size)[rank]
    Each rank updated its shard with its own gradient: the others' is missing.
    ring_reduce_scatter(gradients) returns this rank's shard of the sum.
gathers_never: ring_all_gather(parameters) → pass
    The own shard is right, the rest is as before the step. Was ring_all_gather(parameters) left
    out, or called before the shard was updated?
gathers_first: shard.sub_(lr * state["momentum"])⏎ring_all_gather(parameters) →
    ⏎ring_all_gather(parameters)⏎shard.sub_(lr * state["momentum"])
    The parameters were gathered before the shard was updated: the others get the old ones.
forgets_its_momentum: if not state: → state = {}⏎if not state:
    The parameters are right, but `state` holds no tensor: keep the momentum there, not in a global.
reduces_everything: gradient = ring_reduce_scatter(gradients) / world_size →
    ⏎dist.all_reduce(gradients)⏎gradient = gradients.chunk(world_size)[rank] / world_size
    An all_reduce gives every rank the whole sum; it needs a shard.
in_a_new_tensor: parameters.chunk(world_size)[rank] → parameters.chunk(world_size)[rank].clone()
    Parameters are as before. Write into them in place: a shard is parameters.chunk(W)[rank].
with_its_own_lr: lr * state["momentum"] → 1 / 16 * state["momentum"]
    The first step was right. lr and beta are arguments, and lr changes: take those of each call.
"""),
)


# model_states(parameters, stage, world_size)

STATES = {  # (parameters, stage, ranks): bytes of parameters, gradients, optimizer
    (8, 0, 2): [16, 16, 96],
    (8, 1, 2): [16, 16, 48],
    (8, 2, 2): [16, 8, 48],
    (8, 3, 2): [8, 8, 48],
    (10, 1, 4): [20, 20, 36],
    (10, 3, 4): [6, 6, 36],
    (7_500_000_000, 1, 64): [15_000_000_000, 15_000_000_000, 1_406_250_000],
    (7_500_000_000, 2, 64): [15_000_000_000, 234_375_000, 1_406_250_000],
}
KEEPS = {f"Ψ = {n}, stage {stage}, W = {W}": kept for (n, stage, W), kept in STATES.items()}


def _run_states(answer):
    seen = {}
    for what, arguments in zip(KEEPS, STATES, strict=True):
        kept = answer(*arguments)
        seen[what] = list(kept) if isinstance(kept, tuple | list) else kept
    return seen


def _explain_states(trial: Trial, rank: int, expected: dict, got: dict) -> str:
    what = next(what for what in expected if got.get(what) != expected[what])
    if what.startswith("Ψ = 10,"):  # the others divide
        return "Three numbers of bytes. Rounded up is a shard's length, not its bytes."
    return "Three numbers of bytes: of parameters, of gradients, of the optimizer's state."


model_states = Exercise(
    reference=memory.model_states,
    trials=lambda: [Trial(1, _run_states, (), [KEEPS], what="by arguments")],
    explain=_explain_states,
    hints={
        "start": "First how many numbers a rank keeps: Ψ, or Ψ / W, rounded up: -(-Ψ // W). Then "
        "times 2, 2 and 12 bytes.",
        "values": "The optimizer's state is shared out in stages 1, 2 and 3, gradients in 2 and 3, "
        "parameters in 3 only.",
    },
    praise="to the byte; 7.5B parameters on 64 ranks are those of the paper's figure 1.",
    mistakes=mistakes("""
replicates: stage >= sharded_from → False
    That is stage 0, whatever the stage: from stage 1 on a rank keeps 1/W of something.
shares_everything_at_once: stage >= sharded_from → stage
    That is stage 3 from the beginning. Stage 1 shares out the optimizer's state only.
one_thing_a_stage: stage >= sharded_from → stage == sharded_from
    Each stage goes on sharing what the one before it does: stage 2 gradients *and* optimizer state.
without_the_master_copy: PRECISIONS[precision] → 2, 2, 8
    K is 12: momentum and variance, and the master copy, 4 bytes each.
loses_the_remainder: -(-parameters // world_size) → parameters // world_size
    10 parameters on 4 ranks: shards of 3, the last one padded. Rounded down, two have no owner.
in_total: return ModelStates(* → return sum(
    Return three numbers: the bytes of parameters, of gradients, and of the optimizer's state.
"""),
)


# clip_grad_norm_(shards, max_norm)

CLIPS = {"long everywhere": 1, "longer than 20 on rank 1": 20, "short": 1000, "all zeros": 1}
CLIPS |= {"without a limit": math.inf}


def _part(rank: int, what: str) -> list[float]:
    """Make this rank's part of the gradient, 13 · (rank + 1) long."""
    times = 0.0 if what == "all zeros" else rank + 1.0
    return [3 * times, -4 * times, 12 * times]


def _longest(world_size: int) -> dict[str, float]:
    """`max_norm` by trial: the last is above each rank's norm, and below that of all if W > 1."""
    return CLIPS | {"longer than each rank's part": 13 * world_size + 1}


def _run_clip(answer):
    seen = {}
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for what, max_norm in _longest(world_size).items():
        shards = list(torch.tensor(_part(rank, what), dtype=torch.float64).split((2, 1)))
        norm = answer(shards, max_norm)
        seen[f"length, {what}"] = None if norm is None else round(float(norm), 3)
        seen[f"shards, {what}"] = Rounded(torch.cat(shards).tolist(), 3)
    return seen | {SPARE: spare(recorder().records, len(_longest(world_size)))}


def _clipped(world_size: int) -> list[dict]:
    """The specification: each rank's norms and clipped shards, from the whole gradient."""
    seen = [{} for _ in range(world_size)]
    for what, max_norm in _longest(world_size).items():
        parts = [_part(rank, what) for rank in range(world_size)]
        gradient = torch.tensor(parts, dtype=torch.float64)
        length = gradient.norm().item()
        clipped = gradient * (max_norm / length if length > max_norm else 1)
        for rank in range(world_size):
            seen[rank][f"length, {what}"] = round(length, 3)
            seen[rank][f"shards, {what}"] = Rounded(clipped[rank].tolist(), 3)
    return [right | {SPARE: "few"} for right in seen]


clip_grad_norm_ = Exercise(
    reference=fsdp.clip_grad_norm_,
    writes=("shards",),
    trials=lambda: [
        Trial(W, _run_clip, (), _clipped(W), what="rank r has [[3, -4], [12]] · (r+1)")
        for W in (2, 4, 1)
    ],
    hints={
        "start": "The length is the root of the sum of all squares, whoever has the numbers.",
        "values": "Sum the squares in this rank's shards, all_reduce that one number, take the "
        "root. Where that is more than max_norm, multiply by max_norm / norm, in place.",
        "hang": "Every rank must call all_reduce, also one whose own shards are short.",
        "error": "all_reduce takes a tensor, and returns None: the sum is in the tensor.",
    },
    praise="right on 1, 2 and 4 ranks, and nobody sent a gradient.",
    mistakes=mistakes("""
norm_of_the_shard: dist.all_reduce(squared, group=group) → pass
    That is the length of this rank's part. Each rank would shorten its own by another factor, and
    the gradient would turn.
first_tensor_only: get_total_norm(shards) → get_total_norm(shards[:1])
    A rank has several tensors, one for each bucket: add up the squares of all.
each_tensor_by_itself: (norm + 1e-6) → (shard.norm() + 1e-6)
    Each tensor was shortened by its own length. One factor for all, or the gradient turns.
lengthens: .clamp(max=1) →
    A short gradient was made longer. Leave it alone: the factor is 1 at most.
only_if_its_own_is_long: dist.all_reduce(squared, group=group) →
    ⏎if squared.sqrt() > max_norm: dist.all_reduce(squared, group=group)
    all_reduce stands under an `if` that isn't true on every rank: reduce first, then decide.
in_new_tensors: shard *= (max_norm → shard = shard * (max_norm
    The shards are as before. Write into them in place: shard *= factor, or shard.mul_(factor).
returns_the_new_length: return norm → return norm.clamp(max=max_norm)
    Return the length that the gradient had: it is what one logs.
"""),
)


# GatherUseFree: a torch.autograd.Function

INPUTS, OUTPUTS = 3, 2
WEIGHT = torch.arange(1.0, 1 + INPUTS * OUTPUTS, dtype=torch.float64).view(OUTPUTS, INPUTS)
BIAS = torch.tensor([7.0, 8.0], dtype=torch.float64)


class _Layer(fsdp.ShardedLinear):
    """The library's layer; it remembers whether the tensors it gathered are still in memory."""

    def gather(self):
        whole = [flat.clone() for flat in super().gather()]  # a backend frees its own late
        self.gathered.append(weakref.ref(whole[0].untyped_storage()))
        return whole

    def still_there(self) -> int:
        return sum(ref() is not None for ref in self.gathered)


def _batch(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make x and the gradient of out; each digit of the weight's mean gradient counts a rank."""
    x = torch.ones(2, INPUTS, dtype=torch.float64) * 10**rank
    gradient = torch.tensor([[1.0, 2.0], [0.0, 1.0]], dtype=torch.float64)
    return x, world_size * gradient


def _ops(records) -> dict[str, int]:
    return dict(Counter(record.op for record in records))


def _run_stage_3(answer):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    linear = nn.Linear(INPUTS, OUTPUTS, dtype=torch.float64)
    linear.load_state_dict({"weight": WEIGHT, "bias": BIAS})
    layer = _Layer(linear)
    layer.gathered = []
    x, gradient = _batch(rank, world_size)
    records = recorder().records
    begun = len(records)
    out = answer.apply(x.requires_grad_(), layer.shard, layer)
    then = len(records)
    seen = {"out": out.tolist(), "calls in forward": _ops(records[begun:])}
    seen["whole layers in memory after forward"] = layer.still_there()
    given = gradient.clone()
    out.backward(given)
    seen["the gradient that backward was given"] = given.tolist()
    for what, tensor in {"x": x, "the shard": layer.shard}.items():
        seen[f"gradient of {what}"] = None if tensor.grad is None else tensor.grad.tolist()
    return seen | {"calls in backward": _ops(records[then:])}


def _serial_stage_3(world_size: int) -> list[dict]:
    """The specification: the whole layer and all batches in one process."""
    batches = [_batch(rank, world_size) for rank in range(world_size)]
    weights = sum(gradient.T @ x for x, gradient in batches) / world_size
    biases = sum(gradient.sum(0) for _, gradient in batches) / world_size
    flat = [*weights.flatten().tolist(), *biases.tolist()]
    flat += [0.0] * (-len(flat) % world_size)
    length = len(flat) // world_size
    return [
        {
            "out": (x @ WEIGHT.T + BIAS).tolist(),
            "calls in forward": {"all_gather": 1},
            "whole layers in memory after forward": 0,
            "the gradient that backward was given": gradient.tolist(),
            "gradient of x": (gradient @ WEIGHT).tolist(),
            "gradient of the shard": flat[rank * length : (rank + 1) * length],
            "calls in backward": {"all_gather": 1, "reduce_scatter": 1},
        }
        for rank, (x, gradient) in enumerate(batches)
    ]


GatherUseFree = Exercise(
    reference=fsdp.GatherUseFree,
    trials=lambda: [
        Trial(
            W, _run_stage_3, (), _serial_stage_3(W), what="3 inputs, 2 outputs, rank r's x is 10ʳ"
        )
        for W in (2, 3, 1)
    ],
    hints={
        "start": "forward: weight, bias = layer.gather(); ctx.save_for_backward(x) keeps x, and "
        "ctx.layer = layer the layer. backward returns the gradients of x, shard and layer; the "
        "last is None.",
        "values": "y = x Wᵀ + b: the gradient of x is gradient @ weight, of the weight "
        "gradient.T @ x, of the bias gradient.sum(0); the last two divided by W and added up over "
        "the ranks by layer.reduce_scatter([to_weight, to_bias]).",
        "error": "backward returns a gradient for each argument of forward after ctx, of its "
        "shape: for `shard` a shard.",
    },
    praise="3(W-1)/W of the layer sent, and nothing whole between forward and backward.",
    mistakes=mistakes("""
keeps_the_weight: return nn.functional.linear(x, *layer.gather()) →
    ⏎ctx.whole = layer.gather()⏎return nn.functional.linear(x, *ctx.whole)
    The whole weight stays in memory from forward to backward. With all layers kept a rank has the
    whole model, and nothing is saved: gather again in backward.
gathers_for_each_use: *layer.gather() → layer.gather()[0], layer.gather()[1]
    Each layer.gather() sends the whole layer: call it once, and take weight and bias from it.
its_own_gradient: to_shard = layer.reduce_scatter([mean.T @ x, mean.sum(0)]) →
    ⏎flat = layer.flatten([mean.T @ x, mean.sum(0)])
    ⏎to_shard = flat.chunk(dist.get_world_size())[dist.get_rank()]
    The shard's gradient has this rank's batch only: layer.reduce_scatter adds up all ranks'.
sums: gradient / dist.get_world_size(layer.group) → gradient
    The shard's gradient is the sum over the ranks. Divide by their number: it should be the mean.
divides_the_gradient_of_x: return gradient @ weight → return mean @ weight
    The gradient of x was divided by W, too. No other rank has this x: nothing is averaged there.
without_bias: [mean.T @ x, mean.sum(0)] → [mean.T @ x]
    The shards hold weight and bias: layer.reduce_scatter needs the gradients of both.
"""),
)
