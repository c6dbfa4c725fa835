"""Checkers of notebook 05: LossScaler, master_step, predict_bytes.

All numbers are powers of two, or few of them, so that what an answer leaves is right to the bit or wrong.
"""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ddpkit.mixed_precision import LossScaler as Scaler
from ddpkit.mixed_precision import MixedPrecisionOptimizer
from ddpkit.runtime.launch import Run

from .old_checker import Exercise, Trial

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these

# LossScaler


class LossScaler:
    def __init__(self, scale=2.0**16, growth_interval=2000):
        self.factor, self.growth_interval = scale, growth_interval
        self.good_steps, self.overflow = 0, None

    def scale(self, loss):
        return loss * self.factor

    def unscale_(self, optimizer):
        overflow = torch.zeros(1)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                parameter.grad /= self.factor
                overflow += not parameter.grad.isfinite().all()  # not .isinf(): inf - inf is NaN
        dist.all_reduce(overflow, dist.ReduceOp.MAX)
        self.overflow = bool(overflow)

    def step(self, optimizer):
        if self.overflow is None:
            self.unscale_(optimizer)
        if not self.overflow:
            optimizer.step()

    def update(self):
        self.good_steps = 0 if self.overflow else self.good_steps + 1
        if self.overflow:
            self.factor /= 2
        elif self.good_steps == self.growth_interval:
            self.factor, self.good_steps = self.factor * 2, 0
        self.overflow = None


START, INTERVAL, GRADIENT = 8.0, 2, 3.0
FINE, INF, NAN = "fine", "inf", "NaN"
LOSSES = {  # that scale() should not leave, and what to do
    "no loss": "scale() returned None: return loss * factor.",
    "a loss changed in place": "Return a new tensor, loss * factor: who prints the loss wants the old one.",
}


class Step(NamedTuple):
    """What a rank saw of a step. scaled: the gradient after backward, as a multiple of what it is without a scaler.

    moved: by how much each number of each weight. kind: what is wrong with the loss, so that nothing came after it.
    """

    scaled: float
    moved: tuple[float, ...]
    kind: str = ""

    def __repr__(self):
        moved = self.moved[:1] if len(set(self.moved)) == 1 else self.moved
        return self.kind or f"(loss × {self.scaled:g}, weights moved by {', '.join(f'{by:g}' for by in moved)})"


class Steps(list):
    def __repr__(self):
        return ", ".join(map(repr, self))


def _run_scaler(answer, plan, odd, looks):
    """Steps of SGD on two weights of two numbers, each in its group, and a third without a gradient.

    plan: what becomes of rank `odd`'s gradient, of each weight in turn. looks: unscale_ is called before step.
    """
    unused, *weights = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    optimizer = torch.optim.SGD([{"params": [unused, weights[0]]}, {"params": weights[1:]}], lr=1.0)
    scaler, seen = answer(scale=START, growth_interval=INTERVAL), Steps()
    for number, fate in enumerate(plan):
        optimizer.zero_grad()
        loss = 1 + sum((weight * GRADIENT).sum() for weight in weights)
        value, scaled = loss.item(), scaler.scale(loss)
        if scaled is None or loss.item() != value:
            return Steps([*seen, Step(0.0, (), "no loss" if scaled is None else "a loss changed in place")])
        scaled.backward()
        times, before = weights[0].grad[0].item() / GRADIENT, torch.cat(weights).tolist()
        if dist.get_rank() == odd and fate != FINE:
            weights[number % 2].grad[-1] = math.inf if fate == INF else math.nan
        if looks:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        after = torch.cat(weights).tolist()
        seen.append(Step(times, tuple(old - new for old, new in zip(before, after, strict=True))))
    return seen


def _right_steps(plan) -> Steps:
    """From the rules, written once more: a table of scales."""
    scale, good, steps = START, 0, Steps()
    for fate in plan:
        steps.append(Step(scale, 4 * (GRADIENT if fate == FINE else 0.0,)))
        good = good + 1 if fate == FINE else 0
        scale = scale / 2 if fate != FINE else scale * 2 if good == INTERVAL else scale
        good = good % INTERVAL
    return steps


def _scaler_trials():
    for world_size, odd, plan, looks, what in (
        (1, 0, [FINE], False, "one step"),
        (1, 0, [FINE], True, "one step, gradients looked at before"),
        (1, 0, [FINE, FINE, FINE, FINE, FINE], False, "five steps, growth_interval 2"),
        (1, 0, [INF, FINE], False, "an inf in the first step"),
        (1, 0, [NAN, FINE], False, "a NaN in the first step"),
        (1, 0, [FINE, INF, FINE, FINE, FINE], False, "an inf in the second step of five, growth_interval 2"),
        (2, 1, [INF, FINE], False, "an inf on rank 1 in the first step"),
        (3, 0, [FINE, NAN, FINE, FINE, FINE], True, "a NaN on rank 0 in the second step, gradients looked at before"),
    ):
        yield Trial(world_size, _run_scaler, (plan, odd, looks), [_right_steps(plan)] * world_size, what=what)


def _scaler_cause(trial: Trial, rank: int, expected: Steps, got: Steps):
    plan, odd, looks = trial.args
    number = next(n for n, (right, found) in enumerate(zip(expected, got, strict=False)) if right != found)
    right, found = expected[number], got[number]
    where = f"Step {number + 1}: "
    if found.kind:
        return LOSSES[found.kind]
    if found.scaled != right.scaled:
        return where + _wrong_scale(plan[:number], right.scaled, found.scaled, rank, odd)
    if not any(right.moved):
        if rank != odd:
            return (
                f"{where}rank {odd} skipped, and rank {rank} took the step: from now on they have different weights. "
                "Agree with one dist.all_reduce of one float, op=dist.ReduceOp.MAX."
            )
        name = plan[number]
        nan = " NaN is not inf: torch.isfinite sees both." if name == NAN else ""
        return (
            f"{where}a gradient was {name}, and the optimizer stepped all the same.{nan} Does unscale_ look at all "
            "numbers of all gradients in all groups?"
        )
    if not any(found.moved):
        return f"{where}all gradients were finite, but the step was skipped. Does update() forget the last overflow?"
    times = {by / GRADIENT for by in found.moved}
    if times == {right.scaled}:
        far = f"the weights moved {right.scaled:g} times too far: nobody divided the gradient by the scale."
        again = "Does update() set overflow back to None?"
        return f"{where}{far} {again if number else 'unscale_ does; step() calls it if overflow is None.'}"
    if times == {1, right.scaled}:
        return f"{where}some gradients were not divided by the scale: optimizer.param_groups has several groups."
    if times == {1 / right.scaled}:
        before = " unscale_ had been called before step: look at `overflow`, it is None until then." if looks else ""
        return f"{where}the gradients were divided by the scale twice.{before}"
    return f"{where}does step() call optimizer.step() once, with gradients divided by the scale once?"


def _wrong_scale(plan: list[str], right: float, found: float, rank: int, odd: int) -> str:
    """Why a step's loss was multiplied by another number. plan: what came before it."""
    if not plan:
        return "scale(loss) returns loss * factor, a new tensor, whose gradients are as many times as large."
    if plan[-1] != FINE:
        if found > right and rank != odd:
            return f"rank {odd} halved its scale, and rank {rank} didn't: all must know of the overflow."
        if found > right:
            return "after an overflow the scale is half of what it was, else the next step overflows, too."
        return "after an overflow the scale is half of what it was."
    if found < right and INF not in plan and NAN not in plan:
        return f"the scale never grew: after {INTERVAL} steps in a row without an overflow it doubles."
    if found < right:
        return "after an overflow the scale must be able to grow again: the good steps count anew, from 0."
    if INF in plan or NAN in plan:
        return "the scale grew too early: an overflow starts the count of good steps anew, from 0."
    return f"the scale grew too early: after {INTERVAL} good steps, then after {INTERVAL} more, counted from 0."


def _scaler_wire(trial: Trial, run: Run) -> str | None:
    """One number a step."""
    for rank, records in enumerate(run.wire):
        steps, calls = len(trial.args[0]), len(records)
        if calls > steps or any(record.bytes > 8 for record in records):
            found = (
                f"the values are right, but rank {rank} sent {sum(r.bytes for r in records)} bytes in {calls} "
                f"calls for {steps} step{'s' * (steps > 1)}."
            )
            if any(record.op != "all_reduce" for record in records):
                return f"{found}\nOne all_reduce a step is enough."
            return (
                f"{found}\nAdd up on the rank first, whether any of its gradients overflowed: one float for all of "
                "them is enough."
            )
    return None


LossScaler = Exercise(
    LossScaler,
    _scaler_trials,
    [
        "What must a rank know to decide? Whether a gradient of any rank is inf or NaN. Who tells it?",
        "unscale_: divide every gradient that isn't None; add up `not gradient.isfinite().all()` in one float; "
        "all_reduce it with MAX.",
        "update: after an overflow factor /= 2 and good_steps = 0; else good_steps += 1, and at growth_interval double "
        "the factor and count from 0. Either way overflow = None.",
    ],
    "small gradients survive, and all ranks step, or none. One float a step told them.",
    _scaler_cause,
    _scaler_wire,
    note="# Ours, short. ddpkit.mixed_precision.LossScaler has the options and complains about calls in a wrong order.",
)


# master_step(weights, masters, optimizer, scale)


def master_step(weights, masters, optimizer, scale):
    for weight, master in zip(weights, masters, strict=True):
        master.grad = None if weight.grad is None else weight.grad.float() / scale  # in fp32, where it fits
    optimizer.step()
    with torch.no_grad():
        for weight, master in zip(weights, masters, strict=True):
            weight.copy_(master)  # rounds


IN_PLACE = "fp16 weights, in place"
KINDS = {  # and why they are wrong
    "weights of another dtype": "The model computes in fp16, and its weights must stay so.",
    "other tensors in the list of weights": "The model holds the old tensors, and won't see the new ones.",
    "weights in new memory": "Who has a view of the old memory, like a flat buffer, won't see the new.",
}


class Weights(NamedTuple):
    """What an answer left. weights, masters: their values; kind: whether the weights are still the model's, in fp16."""

    weights: list[float]
    masters: list[float]
    kind: str = IN_PLACE


def _beside(expected: Weights, got: Weights) -> str:
    lines = [("", "yours", "expected")]
    for name in ("weights", "masters"):
        values = [getattr(side, name) for side in (got, expected)]
        lines.append((name, *("  ".join(f"{value:.8g}" for value in each) for each in values)))
    return "\n".join(
        ["wrong numbers" if got.kind == IN_PLACE else got.kind, *(f"  {a:9}{b:35}{c}" for a, b, c in lines)]
    )


SCALE = 2.0**14
LEARNING_RATE = 2.0**8
UPDATE = 2.0**-12  # of each step: 1 - 2**-12 is 1 in fp16, whose numbers below 1 are 2**-11 apart
SMALL = UPDATE / LEARNING_RATE / 2**6  # the second weight's gradient: 2**-26, nothing in fp16


def _run_master_step(answer, steps):
    """Three weights, with gradients that are small, too small for fp16 unscaled (and None at last), and always None."""
    weights = [nn.Parameter(torch.tensor([value], dtype=torch.float16)) for value in (1.0, 2.0**-6, 0.5)]
    masters = [weight.detach().float().requires_grad_() for weight in weights]
    before, places = list(weights), [weight.data_ptr() for weight in weights]
    decayed = {"params": masters[2:], "weight_decay": 2.0**-10}  # of what has a gradient, be it 0
    optimizer = torch.optim.SGD([{"params": masters[:2]}, decayed], lr=LEARNING_RATE)
    for step in range(steps):
        for weight, gradient in zip(weights, (UPDATE / LEARNING_RATE, SMALL), strict=False):
            weight.grad = torch.tensor([gradient * SCALE], dtype=torch.float16)
        if 0 < step == steps - 1:
            weights[1].grad = None
        answer(weights, masters, optimizer, SCALE)
    kind = IN_PLACE
    if any(weight.dtype != torch.float16 for weight in weights):
        kind = "weights of another dtype"
    elif any(weight is not model for weight, model in zip(weights, before, strict=True)):
        kind = "other tensors in the list of weights"
    elif [weight.data_ptr() for weight in weights] != places:
        kind = "weights in new memory"
    return Weights([w.item() for w in weights], [m.item() for m in masters], kind)


def _fp16(value: float) -> float:
    return torch.tensor(value, dtype=torch.float16).item()


def _masters_after(steps: int) -> list[float]:
    return [1.0 - steps * UPDATE, 2.0**-6 - (steps - (steps > 1)) * SMALL * LEARNING_RATE, 0.5]


def _master_trials():
    for steps in (1, 2, 8):
        masters = _masters_after(steps)
        expected = Weights([_fp16(master) for master in masters], masters)
        yield Trial(1, _run_master_step, (steps,), [expected], what=f"{steps} step{'s' * (steps > 1)}")


def _master_cause(trial: Trial, rank: int, expected: Weights, got: Weights):
    (steps,) = trial.args
    start = _masters_after(0)
    if got.kind in KINDS:
        return f"{KINDS[got.kind]} weight.copy_(master) rounds, in place."
    if got.masters == start and got.weights == start:
        return "Nothing moved. Does optimizer.step() find a gradient in each master copy's .grad?"
    if got.masters == start:
        return (
            "The weights moved, the master copies didn't: the optimizer has the master copies, and they its gradients."
        )
    if got.masters[2] != start[2]:
        return "The third has no gradient: None, not zeros, or weight decay moves it."
    if got.masters[0] == 1 - SCALE * UPDATE * steps:
        return f"The first moved {SCALE:g} times too far: gradients are those of the loss times scale. Divide them."
    if got.masters[0] > expected.masters[0]:
        return (
            "The master copy lost an update that fp16 doesn't show: 1 - 2**-12 is 1 there. Weights are copied from "
            "masters, never masters from weights."
        )
    if got.masters[1] == start[1]:
        return (
            "The second master copy never moved: its gradient, 2**-26, is 0 in fp16. Convert to fp32 first, then "
            "divide by the scale."
        )
    if got.masters[0] < expected.masters[0] and steps == 1:
        times = (start[0] - got.masters[0]) / UPDATE
        return f"The first moved {times:.0f} times too far: divide its gradient by the scale, once."
    if got.masters[0] < expected.masters[0]:
        return "The first moved too far in later steps: a master copy's .grad is set anew in each, not added to."
    if got.masters[0] == expected.masters[0] and got.masters[1] < expected.masters[1]:
        return "The second had no gradient in the last step, but moved: then master.grad is None, too."
    if got.masters == expected.masters and got.weights == start:
        return "The master copies are right, but the weights are the old ones: round into them, after optimizer.step()."
    if got.masters == expected.masters:
        return "The master copies are right. The weights are those, rounded to fp16, after optimizer.step()."
    return "Gradients to fp32, divided by scale, into each master.grad; optimizer.step(); masters into the weights."


master_step = Exercise(
    master_step,
    _master_trials,
    [
        "The optimizer was made with the masters. What does it look for in them, and in which dtype?",
        "weight.grad may be None; then master.grad is None, too. Else weight.grad.float() / scale, in this order.",
        "After optimizer.step(), inside torch.no_grad(): weight.copy_(master) for each pair.",
    ],
    "after 8 steps of 2**-12 the weight is 1 - 2**-9. In fp16 alone it would still be 1.",
    _master_cause,
    lambda trial, run: None,
    note="# Ours, short. ddpkit.mixed_precision.MixedPrecisionOptimizer does this in its step.",
    beside=_beside,
)


# predict_bytes(parameters, precision, optimizer)


def predict_bytes(parameters, precision, optimizer):
    weight_and_gradient, master = {"fp32": (4 + 4, 0), "mixed": (2 + 2, 4)}[precision]
    moments = {"SGD": 0, "momentum": 4, "AdamW": 4 + 4}[optimizer]
    return parameters * (weight_and_gradient + master + moments)


OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "AdamW": (torch.optim.AdamW, {}),
}
PARAMETERS = 210


class Bytes(NamedTuple):
    """What was predicted, and what the tensors that exist have."""

    predicted: object
    counted: dict[str, int]

    def __repr__(self):
        return f"{self.predicted} bytes"


def _run_bytes(answer, precision, optimizer):
    """Predict, then train for a step and count, after the backward of the second."""
    predicted = answer(PARAMETERS, precision, optimizer)
    model = nn.Linear(21, 10, bias=False)
    optimizer_cls, options = OPTIMIZERS[optimizer]
    if precision == "mixed":
        stepper = MixedPrecisionOptimizer(model.parameters(), optimizer_cls, lr=0.1, scaler=Scaler(1.0), **options)
        masters = stepper.masters.values()
    else:
        stepper, masters = optimizer_cls(model.parameters(), lr=0.1, **options), []
    for step in range(2):
        model(torch.ones(1, 21, dtype=model.weight.dtype)).float().sum().backward()
        if step == 0:
            stepper.step()
            stepper.zero_grad()
    moments = [t for state in stepper.state.values() for t in state.values() if torch.is_tensor(t) and t.dim()]
    kinds = {"weights": [model.weight], "gradients": [model.weight.grad], "master copies": masters, "moments": moments}
    return Bytes(predicted, {kind: sum(tensor.nbytes for tensor in tensors) for kind, tensors in kinds.items()})


def _bytes_trials():
    for precision in ("fp32", "mixed"):
        for optimizer in OPTIMIZERS:
            yield Trial(1, _run_bytes, (precision, optimizer), _count, what=f"{precision}, {optimizer}")


def _count(run: Run) -> list[Bytes]:
    return [Bytes(sum(found.counted.values()), found.counted) for found in run]


def _bytes_cause(trial: Trial, rank: int, expected: Bytes, got: Bytes):
    precision, optimizer = trial.args
    counted = ", ".join(f"{kind} {nbytes // PARAMETERS}" for kind, nbytes in got.counted.items() if nbytes)
    measured = f"Counted, bytes for each of {PARAMETERS} parameters: {counted}."
    return f"{measured} {_bytes_usual(precision, optimizer, expected.predicted, got.predicted)}"


def _bytes_usual(precision: str, optimizer: str, right: int, found: object) -> str:
    """What is usually wrong with an answer that is off by so many bytes a parameter."""
    if not isinstance(found, int | float):
        return f"Return a number, not {type(found).__name__}."
    if found * PARAMETERS == right:
        return "Yours is of one parameter: there are more."
    if found * 4 == right:
        return "Count bytes, not numbers: fp32 has 4."
    more = (found - right) / PARAMETERS
    mixed = precision == "mixed"
    if more == 2 and mixed:
        return "2 too many: the gradient has the dtype of its weight."
    if more == 4 and mixed:
        return "4 too many: weight and gradient are 16-bit, 2 bytes each."
    if more > 0 and not mixed:
        return f"{more:g} too many: without 16-bit weights there is no master copy; SGD has no moments, momentum one."
    if more == -2 and optimizer != "SGD":
        return "2 are missing: moments are fp32, in mixed precision too."
    if more == -4 and mixed and optimizer == "SGD":
        return "4 are missing: the master copy, in fp32."
    if more == -4 and optimizer == "SGD":
        return "4 are missing: the gradient counts, too."
    if more == -4:
        return "4 are missing: which moments does this optimizer keep? momentum one, AdamW two."
    return "Weight and gradient in the precision of the model; master copy, if there is one, and moments in fp32."


predict_bytes = Exercise(
    predict_bytes,
    _bytes_trials,
    [
        "Four kinds of tensors: weights, gradients, master copies, moments. Which of them exist here?",
        "SGD has no moments, momentum one, AdamW two; they are fp32, in mixed precision too.",
        "fp32: 4 + 4 and the moments. mixed: 2 + 2, a master copy of 4, and the moments.",
    ],
    "as counted from the tensors, six times. Mixed precision saves no byte of these: 16 with AdamW either way. What it "
    "halves are the activations, and what gradients weigh on the wire.",
    _bytes_cause,
    lambda trial, run: None,
    note="# Ours. ddpkit.memory has the table for larger models, and for ZeRO.",
)
