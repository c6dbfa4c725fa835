"""Checkers of notebook 05: master_step, LossScaler, predict_bytes.

All numbers are powers of two, or few of them: what an answer leaves is right to the bit, or wrong.
"""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ddpkit import mixed_precision
from ddpkit.mixed_precision import MixedPrecisionOptimizer
from ddpkit.runtime.launch import Run

from .checker import Exercise, Trial, mistakes

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these

# master_step(weights, masters, optimizer, scale)

SCALE = 2.0**14
LEARNING_RATE = 2.0**8
UPDATE = 2.0**-12  # of each step: 1 - 2**-12 is 1 in fp16, whose numbers below 1 are 2**-11 apart
SMALL = UPDATE / LEARNING_RATE / 2**6  # the second weight's gradient: 2**-26, nothing in fp16
STEPS = (1, 2, 8)


class Weights(NamedTuple):
    """What an answer left. problem: why the weights aren't the model's any more, if they aren't."""

    weights: list[float]
    masters: list[float]
    problem: str = ""


def _run_master_step(answer, steps):
    """Three weights: gradients are small, or too small for fp16 (None at last), or always None."""
    values = torch.tensor([1.0, 2.0**-6, 0.5], dtype=torch.float16)
    weights = [nn.Parameter(value.view(1)) for value in values]
    masters = [weight.detach().float().requires_grad_() for weight in weights]
    before, places = list(weights), [weight.data_ptr() for weight in weights]
    decayed = {"params": masters[2:], "weight_decay": 2.0**-10}  # also of a gradient of zero
    optimizer = torch.optim.SGD([{"params": masters[:2]}, decayed], lr=LEARNING_RATE)
    for step in range(steps):
        for weight, gradient in zip(weights, (UPDATE / LEARNING_RATE, SMALL), strict=False):
            weight.grad = torch.tensor([gradient * SCALE], dtype=torch.float16)
        if 0 < step == steps - 1:
            weights[1].grad = None
        answer(weights, masters, optimizer, SCALE)
    problem = ""
    if any(weight.dtype != torch.float16 for weight in weights):
        problem = "weights of another dtype"
    elif any(weight is not model for weight, model in zip(weights, before, strict=True)):
        problem = "other tensors in the list of weights"
    elif [weight.data_ptr() for weight in weights] != places:
        problem = "weights in new memory"
    return Weights([w.item() for w in weights], [m.item() for m in masters], problem)


def _master_trials():
    for steps in STEPS:
        masters = [1 - steps * UPDATE, 2.0**-6 - (steps - (steps > 1)) * SMALL * LEARNING_RATE, 0.5]
        weights = torch.tensor(masters, dtype=torch.float16).tolist()
        what = "1 step" if steps == 1 else f"{steps} steps"
        yield Trial(1, _run_master_step, (steps,), [Weights(weights, masters)], what=what)


def _beside(expected: Weights, got: Weights) -> str:
    lines = [got.problem or "wrong numbers", f"  {'':9}{'yours':35}expected"]
    for name in ("weights", "masters"):
        yours = "  ".join(f"{value:.8g}" for value in getattr(got, name))
        right = "  ".join(f"{value:.8g}" for value in getattr(expected, name))
        lines.append(f"  {name:9}{yours:35}{right}")
    return "\n".join(lines)


master_step = Exercise(
    reference=mixed_precision.master_step,
    trials=_master_trials,
    hints={
        "start": "The optimizer was made with the masters. What does it look for in them, and in "
        "which dtype?",
        "values": "weight.grad may be None; then master.grad is None, too. Else "
        "weight.grad.float() / scale, in this order.",
        "error": "After optimizer.step(), in torch.no_grad(): weight.copy_(master) for each pair.",
    },
    praise="after 8 steps of 2**-12 the weight is 1 - 2**-9. In fp16 alone it would still be 1.",
    explain=lambda *_: (
        "Gradients to fp32, divided by scale, into each master.grad; "
        "optimizer.step(); then the masters, rounded, into the weights."
    ),
    beside=_beside,
    note="ddpkit.mixed_precision.MixedPrecisionOptimizer does this in its step.",
    mistakes=mistakes("""
without_scale: weight.grad.float() / scale → weight.grad.float()
    The first moved 16384 times too far: gradients are those of the loss times scale. Divide them.
multiplies: .float() / scale → .float() * scale
    The first moved far too far: divide its gradient by the scale, once.
divides_in_fp16: weight.grad.float() / scale → (weight.grad / scale).float()
    The second master copy never moved: its gradient, 2**-26, is 0 in fp16. Convert to fp32 first,
    then divide by the scale.
without_step: optimizer.step() → pass
    Nothing moved. Does optimizer.step() find a gradient in each master copy's .grad?
starts_from_the_weights: master.grad = → master.data.copy_(weight)⏎master.grad =
    The master copy lost an update that fp16 doesn't show: 1 - 2**-12 is 1 there. Weights are copied
    from masters, never masters from weights.
never_rounds_back: weight.copy_(master) → pass
    The master copies are right, but the weights are the old ones: round into them after
    optimizer.step().
rounds_back_before: weight.grad.float() / scale → weight.grad.float() / scale
        ⏎weight.data.copy_(master)
    weight.copy_(master) → pass
    The master copies are right, but the weights are the old ones: round into them after
    optimizer.step().
adds_up: master.grad = None if weight.grad is None else → if weight.grad is not None:
        ⏎    master.grad = (0 if master.grad is None else master.grad) +
    The first moved too far in later steps: master.grad is set anew in each, not added to.
makes_zeros_of_none: None if weight → torch.zeros_like(master) if weight
    The third has no gradient: None, not zeros, or weight decay moves it.
keeps_a_stale_gradient: master.grad = None if weight.grad is None else → if weight.grad is not None:
        ⏎    master.grad =
    The second had no gradient in the last step, but moved: then master.grad is None, too.
makes_fp32_weights: weight.copy_(master) → weight.grad = None⏎weight.data = master.data
    The model computes in fp16, and its weights must stay so: weight.copy_(master) rounds, in place.
replaces_the_weights: optimizer.step() → optimizer.step()
        ⏎weights[:] = [master.detach().half().requires_grad_() for master in masters]
    The model holds the old tensors, and won't see the new ones: weight.copy_(master) rounds in
    place.
makes_new_memory: weight.copy_(master) → weight.data = master.data.half()
    Who has a view of the old memory, like a flat buffer, won't see the new: weight.copy_(master)
    rounds in place.
stumbles_over_none: None if weight.grad is None else →
    A weight that took no part has no gradient, weight.grad is None: then master.grad is None, too.
"""),
)


# LossScaler

START, INTERVAL, GRADIENT = 8.0, 2, 3.0
OK, INF, MINUS_INF, NAN = 0.0, math.inf, -math.inf, math.nan


def _run_scaler(answer, plan, odd, looks):
    """Steps of SGD on two weights of two numbers, in two groups, and one without a gradient.

    plan: what is put into a gradient of rank `odd` in each step, into another place each time.
    looks: unscale_ is called before step.
    """
    unused, *weights = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    groups = [{"params": [unused, weights[0]]}, {"params": weights[1:]}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    scaler, seen = answer(START, INTERVAL), []
    for number, bad in enumerate(plan):
        optimizer.zero_grad()
        loss = 1 + sum((weight * GRADIENT).sum() for weight in weights)
        before, scaled = loss.detach().clone(), scaler.scale(loss)
        if scaled is None:
            return [*seen, "scale() returned None"]
        if not torch.allclose(loss, before, equal_nan=True):
            return [*seen, "a loss changed in place"]
        scaled.backward()
        times, start = weights[0].grad[0].item() / GRADIENT, torch.cat(weights).tolist()
        if dist.get_rank() == odd and bad != OK:
            weights[number % 2].grad[1 - number // 2 % 2] = bad
        if looks:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        moved = [old - new for old, new in zip(start, torch.cat(weights).tolist(), strict=True)]
        seen.append(_step(dist.get_rank(), times, moved))
    return seen


def _step(rank: int, times: float, moved: list[float]) -> str:
    return f"rank {rank}: loss × {times:g}, weights moved by {', '.join(f'{m:g}' for m in moved)}"


def _right_steps(rank, plan) -> list[str]:
    """From the rules, written once more: a table of scales."""
    scale, good, steps = START, 0, []
    for bad in plan:
        steps.append(_step(rank, scale, 4 * [0.0 if bad else GRADIENT]))
        good = 0 if bad else good + 1
        if bad:
            scale /= 2
        elif good == INTERVAL:
            scale, good = 2 * scale, 0
    return steps


def _scaler_trials():
    second = [OK, INF, OK, OK, OK]
    for world_size, odd, plan, looks, what in (
        (2, 0, [OK, OK], True, "gradients looked at before the step"),
        (2, 0, [OK, OK, OK, OK, OK], False, f"five steps, growth_interval {INTERVAL}"),
        (2, 1, second, False, "an inf on rank 1 in the second step"),
        (3, 0, [NAN, MINUS_INF, INF, MINUS_INF, OK], True, "NaN, -inf, inf, -inf on rank 0"),
        (1, 0, second, True, "an inf in the second step"),
    ):
        expected = [_right_steps(rank, plan) for rank in range(world_size)]
        yield Trial(world_size, _run_scaler, (plan, odd, looks), expected, what=what)


def _beside_steps(expected: list[str], got: list[str]) -> str:
    number = next(n for n, step in enumerate(got) if step != expected[n])
    return f"step {number + 1}, {got[number]}\nexpected: {expected[number]}"


def _scaler_wire(trial: Trial, run: Run) -> str | None:
    """One number a step."""
    steps = len(trial.args[0])
    for rank, records in enumerate(run.wire):
        if len(records) > steps or any(record.bytes > 8 for record in records):
            sent = sum(record.bytes for record in records)
            return (
                f"the values are right, but rank {rank} sent {sent} bytes in {len(records)} calls "
                f"for {steps} steps.\nOne all_reduce a step is enough, of one float: add up on the "
                "rank first whether any of its gradients overflowed."
            )
    return None


LossScaler = Exercise(
    reference=mixed_precision.LossScaler,
    trials=_scaler_trials,
    hints={
        "start": "What must a rank know to decide? Whether a gradient of any rank is inf or NaN. "
        "Who tells it?",
        "values": "unscale_: divide every gradient that isn't None; add up `not "
        "gradient.isfinite().all()` in one float; all_reduce it with MAX. update: after an "
        "overflow factor /= 2 and good_steps = 0; else good_steps += 1, and at growth_interval "
        "double the factor and count from 0. Either way overflow = None.",
        "wire": "One float for all gradients of a step.",
    },
    praise="small gradients survive, and all ranks step, or none. One float a step told them.",
    explain=lambda *_: (
        f"Scales go so, on all ranks alike: {START:g} at first, half after an "
        f"overflow, double after {INTERVAL} good steps in a row, counted from 0. A step with an "
        "overflow is skipped, others are taken with gradients divided once."
    ),
    wire=_scaler_wire,
    beside=_beside_steps,
    mistakes=mistakes("""
leaves_the_loss: return loss * self.factor → return loss
    scale(loss) returns loss * factor, a new tensor, whose gradients are as many times as large.
returns_no_loss: return loss * self.factor → loss * self.factor
    return loss * factor: a function without return gives None.
scales_in_place: return loss * self.factor → loss *= self.factor⏎return loss
    Return a new tensor, loss * factor: who prints the loss wants the old one.
never_unscales: if self.overflow is None:⏎self.unscale_(optimizer) → if False:⏎    pass
    raise RuntimeError("update was → pass  # ("
    The gradients were not divided by the scale: step() calls unscale_ if overflow is None.
never_divides: gradient /= self.factor → pass
    Nobody divided the gradients by the scale: unscale_ does, in place.
divides_twice: if self.overflow is None:⏎self.unscale_(optimizer) → self.unscale_(optimizer)
    raise RuntimeError("unscale_ → pass  # ("
    The gradients were divided by the scale twice: unscale_ had been called before step. `overflow`
    is None until then.
divides_the_first: gradient /= self.factor → gradients[0] /= self.factor
        ⏎break
    Some gradients were not divided by the scale: optimizer.param_groups has several groups.
stumbles_over_none: for p in parameters if p.grad is not None → for p in parameters
    gradient.dtype == torch.float16 → False
    A parameter that wasn't used has no gradient, p.grad is None: leave it out.
keeps_the_scale_after_an_overflow: self.factor /= 2 → pass
    After an overflow the scale is half of what it was, else the next step overflows, too.
never_grows_back: self.good_steps = 0 if → self.good_steps = -1000 if
    After an overflow the scale must be able to grow again: good steps count anew, from 0.
never_grows: self.factor, self.good_steps = self.factor * 2, 0 → pass
    The scale never grew: after growth_interval steps in a row without an overflow it doubles.
grows_at_each_step: self.good_steps == self.growth_interval → True
    The scale grew too early: after growth_interval good steps, then after as many more, counted
    from 0.
remembers_the_overflow: self.overflow = None → pass
    raise RuntimeError("unscale_ → pass  # ("
    The next step wasn't unscaled, or was skipped: update() sets overflow back to None.
decides_alone: dist.all_reduce(overflow, dist.ReduceOp.MAX, group=self.group) → pass
    Rank 1 skipped, and rank 0 took the step: from now on they have different weights. Agree with
    one dist.all_reduce of one float, op=dist.ReduceOp.MAX.
agrees_on_the_scale_only: dist.all_reduce(overflow → self.mine = bool(overflow)
        ⏎dist.all_reduce(overflow
    if self.overflow:⏎self.skipped → if self.mine:⏎    self.skipped
    The scale was halved on all ranks, but only those with an overflow of their own skipped: step()
    must ask what all have agreed on.
backs_off_alone: dist.all_reduce(overflow → self.mine = bool(overflow)⏎dist.all_reduce(overflow
    self.good_steps = 0 if self.overflow → self.overflow = self.mine
        ⏎self.good_steps = 0 if self.overflow
    Rank 1 halved its scale, and rank 0 didn't: all must know of the overflow.
misses_minus_inf: (~get_total → (~(torch.cat(gradients).max() < 1e38)) if gradients else (~get_total
    A gradient was -inf, and the optimizer stepped all the same: torch.isfinite sees that, too.
steps_anyhow: if self.overflow:⏎self.skipped += 1⏎else:⏎optimizer.step() → optimizer.step()
    A gradient overflowed, and the optimizer stepped all the same. Does step() skip, and does
    unscale_ look at all numbers of all gradients in all groups?
looks_at_the_first: get_total_norm(gradients, 1.0) → gradients[0].sum()
    A gradient overflowed, and the optimizer stepped all the same. Does step() skip, and does
    unscale_ look at all numbers of all gradients in all groups?
looks_at_first_numbers: get_total_norm(gradients, 1.0) → sum(g[0] for g in gradients)
    A gradient overflowed, and the optimizer stepped all the same. Does step() skip, and does
    unscale_ look at all numbers of all gradients in all groups?
forgets_one_weight: overflow = (~get_total_norm(gradients, 1.0).isfinite()).float() →
        ⏎for p in parameters:
        ⏎    if p.grad is not None and not p.grad.isfinite().all():
        ⏎        p.grad = None
        ⏎overflow = torch.zeros(())
    One weight was left out of the step, and the others took it. If a gradient overflows, nobody
    steps.
misses_nan: (~get_total_norm(gradients, 1.0).isfinite()) → torch.cat(gradients).isinf().any()
    A gradient was NaN, and the optimizer stepped all the same. NaN is not inf: torch.isfinite sees
    both.
counts_on: self.good_steps = 0 if self.overflow else self.good_steps + 1 →
        ⏎self.good_steps += not self.overflow
    The scale grew too early: an overflow starts the count of good steps anew, from 0.
sends_gradients: dist.all_reduce(overflow → for _ in gradients:⏎    dist.all_reduce(overflow
    One all_reduce a step is enough, of one float
reduces_and_broadcasts: dist.all_reduce(overflow, dist.ReduceOp.MAX, group=self.group) →
        ⏎dist.broadcast(overflow, 0)
    if dist.is_initialized(): → dist.reduce(overflow, 0, dist.ReduceOp.MAX)⏎if True:
    One all_reduce a step is enough, of one float
"""),
)


# predict_bytes(parameters, precision, optimizer)


def predict_bytes(parameters, precision, optimizer):
    weight_and_gradient, master = {"fp32": (4 + 4, 0), "mixed": (2 + 2, 4)}[precision]
    moments = {"SGD": 0, "momentum": 4, "AdamW": 4 + 4}[optimizer]
    return parameters * (weight_and_gradient + master + moments)


PARAMETERS = 210
OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "AdamW": (torch.optim.AdamW, {}),
}


def _count(precision: str, optimizer: str) -> dict[str, int]:
    """{kind of tensor: bytes a parameter}, counted after the backward of the second step."""
    model = nn.Linear(21, 10, bias=False)
    optimizer_cls, options = OPTIMIZERS[optimizer]
    if precision == "mixed":
        stepper = MixedPrecisionOptimizer(model.parameters(), optimizer_cls, lr=0.1, **options)
        masters = list(stepper.masters.values())
    else:
        stepper, masters = optimizer_cls(model.parameters(), lr=0.1, **options), []
    for step in range(2):
        model(torch.full((1, 21), 2.0**-16, dtype=model.weight.dtype)).float().sum().backward()
        if step == 0:
            stepper.step()
            stepper.zero_grad()
    moments = []
    for state in stepper.state.values():
        moments += [value for value in state.values() if torch.is_tensor(value) and value.dim()]
    return {
        "weights": _nbytes([model.weight]),
        "gradients": _nbytes([model.weight.grad]),
        "masters": _nbytes(masters),
        "moments": _nbytes(moments),
    }


def _nbytes(tensors: list[torch.Tensor]) -> int:
    """For each parameter."""
    return sum(tensor.nbytes for tensor in tensors) // PARAMETERS


class Predicted(NamedTuple):
    """{(precision, optimizer): bytes} as predicted, and {kind: bytes a parameter} as counted."""

    predicted: dict
    counted: dict


def _run_bytes(answer):
    predicted, counted = {}, {}
    for precision in ("fp32", "mixed"):
        for optimizer in OPTIMIZERS:
            case = precision, optimizer
            predicted[case], counted[case] = answer(PARAMETERS, *case), _count(*case)
    return Predicted(predicted, counted)


def _counted(run: Run) -> list[Predicted]:
    totals = {case: PARAMETERS * sum(kinds.values()) for case, kinds in run[0].counted.items()}
    return [Predicted(totals, run[0].counted)]


def _beside_bytes(expected: Predicted, got: Predicted) -> str:
    case = next(case for case, right in expected.predicted.items() if got.predicted[case] != right)
    found = got.predicted[case]
    each = f"{found / PARAMETERS:g}" if isinstance(found, int | float) else repr(found)
    right = " + ".join(f"{nbytes} {kind}" for kind, nbytes in got.counted[case].items() if nbytes)
    total = sum(got.counted[case].values())
    return f"{', '.join(case)}: {each} bytes a parameter, but counted are {right} = {total}."


predict_bytes = Exercise(
    reference=predict_bytes,
    trials=lambda: [Trial(1, _run_bytes, (), _counted, what=f"{PARAMETERS} parameters")],
    hints={
        "start": "Four kinds of tensors: weights, gradients, master copies, moments. Which of them "
        "exist here?",
        "values": "SGD has no moments, momentum one, AdamW two; they are fp32, in mixed precision "
        "too. fp32: 4 + 4 and the moments. mixed: 2 + 2, a master copy of 4, and the moments.",
    },
    praise="as counted from the tensors, six times. Mixed precision saves no byte of these: 16 "
    "with AdamW either way. It halves activations, and what gradients weigh on the wire.",
    explain=lambda *_: (
        "Weight and gradient in the precision of the model; master copy, if there "
        "is one, and moments in fp32."
    ),
    beside=_beside_bytes,
    note="ddpkit.tools.memory.model_states has the table for larger models, and for ZeRO.",
    mistakes=mistakes("""
always_16: (weight_and_gradient + master + moments) → 16
    It is not always 16: SGD has no moments, momentum one.
of_one: return parameters * → return
    Yours is of one parameter: there are more.
counts_numbers: return parameters * (weight_and_gradient + master + moments) →
        ⏎return parameters * (weight_and_gradient + master + moments) // 4
    Count bytes, not numbers: fp32 has 4.
without_master: (2 + 2, 4) → (2 + 2, 0)
    4 are missing: the master copy, in fp32.
without_gradients: (4 + 4, 0), "mixed": (2 + 2, 4) → (4, 0), "mixed": (2, 4)
    The gradient counts, too: as many bytes as the weight.
fp32_gradients: (2 + 2, 4) → (2 + 4, 4)
    2 too many: the gradient has the dtype of its weight.
keeps_fp32_weights: (2 + 2, 4) → (4 + 4, 4)
    4 too many: weight and gradient are 16-bit, 2 bytes each.
small_moments: [optimizer] → [optimizer] // (2 if precision == "mixed" else 1)
    2 are missing: moments are fp32, in mixed precision too.
one_moment: "AdamW": 4 + 4 → "AdamW": 4
    4 are missing: which moments does this optimizer keep? momentum one, AdamW two.
no_momentum: "momentum": 4 → "momentum": 0
    4 are missing: which moments does this optimizer keep? momentum one, AdamW two.
half_of_all: (2 + 2, 4) → (2 + 2, 0)
    [optimizer] → [optimizer] // (2 if precision == "mixed" else 1)
    Half of everything isn't it: the master copy and the moments are fp32, and a master copy there
    is only where weights have 16 bits.
master_in_fp32_too: (4 + 4, 0) → (4 + 4, 4)
    Too many: without 16-bit weights there is no master copy.
prints: return parameters * (weight_and_gradient + master + moments) → return "16 bytes"
    Return a number.
"""),
)
