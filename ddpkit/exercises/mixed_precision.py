"""Checkers of notebook 05: nearest, master_step, LossScaler, predict_bytes, quantise.

Gradients and scales are powers of two, or sums of a few: steps are right to the bit, or wrong.
"""

import itertools
import math
from functools import cache, partial

import torch
import torch.distributed as dist
from torch import nn

from ddpkit import floats, mixed_precision
from ddpkit.floats import BF16, E5M2, FP16, Format
from ddpkit.memory import count_states
from ddpkit.mixed_precision import MixedPrecisionOptimizer
from ddpkit.runtime.recorder import recorder

from .checker import Exercise, Trial, mistakes

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these

# nearest(value, format)

OURS = Format("e3m2", 3, 2, None)  # torch has none like it: 0.0625, 0.125 to 12, 14
VALUES = {  # {value: the number nearest to it}, written down by hand
    ("between powers of two", FP16): {1.0: 1.0, 0.1: 0.0999755859375, -3.14159: -3.140625},
    ("between powers of two", BF16): {0.1: 0.10009765625, 1.3 * 2.0**100: 1.296875 * 2.0**100},
    ("halfway, to the even one", FP16): {1 + 2**-11: 1.0, 1 + 3 * 2**-11: 1 + 2**-9},
    ("subnormal", FP16): {1e-5: 168 * 2.0**-24, 2.0**-24: 2.0**-24, 2.0**-25: 0.0, 1e-8: 0.0},
    ("at the end", FP16): {65519.0: 65504.0, 65520.0: math.inf, -1e9: -math.inf},
    ("subnormal", E5M2): {2.0**-16: 2.0**-16, 3 * 2.0**-17: 2.0**-15, 0.0: 0.0},
    ("of a format with 3 and 2 bits", OURS): {0.2: 0.1875, 5.5: 6.0, 0.1: 0.125, 30.0: math.inf},
}


def _run_nearest(answer):
    """Return {value, in words: the answer's result}; if the answer is None, the right results."""
    seen = {}
    for (what, format), values in VALUES.items():
        for value, right in values.items():
            found = answer(value, format) if answer else right
            seen[f"{value:.6g} in {format.name}, {what}"] = found
    return seen


def _nearest_trials():
    yield Trial(1, _run_nearest, (), [_run_nearest(None)])


nearest = Exercise(
    reference=floats.nearest,
    trials=_nearest_trials,
    hints={
        "start": "Where the value lies, how far apart are numbers? 2**(exponent - fraction_bits). "
        "How many of these spacings is the value?",
        "values": "math.frexp(value)[1] - 1 is the exponent; below 1 - format.bias it can't go. "
        "round(value / spacing) * spacing. Then look whether it is above format.largest.",
        "error": "math.frexp(0.0) is (0.0, 0), where math.log2(0.0) is an error.",
    },
    praise="subnormals, ties and infinity included, in formats that no library has.",
    note="ddpkit.floats.encode gives the bits, too.",
    mistakes=mistakes("""
truncates: round(value / spacing) → math.trunc(value / spacing)
    Digits were cut off: round to the nearest.
half_up: round(value / spacing) → math.floor(value / spacing + 0.5)
    Of two equally near, the even one: Python's round() does it so.
without_subnormals: max(exponent, 1 - format.bias) → exponent
    Very small ones have too many digits: below 2**(1 - bias) the spacing stays what it is there.
flushes: if abs(rounded) > → if abs(value) < 2.0 ** (1 - format.bias): rounded = 0.0
        ⏎if abs(rounded) >
    Below the smallest normal number there are more, down to one spacing.
one_too_many: exponent = math.frexp(value)[1] - 1 → exponent = math.frexp(value)[1]
    One bit is missing: math.frexp gives 0.5 to 1 times a power of two, so subtract 1.
saturates: math.copysign(math.inf, value) → math.copysign(format.largest, value)
    Beyond the largest number comes infinity in these formats.
infinite_too_early: abs(rounded) > → abs(value) >
    65519 is nearer to 65504 than to 65536, the next if there were one: round first, then look.
"""),
)


# master_step(weights, masters, optimizer, scale)

SCALE = 2.0**14
LEARNING_RATE = 2.0**8  # of SGD; AdamW steps as far whatever the gradient's scale
UPDATE = 2.0**-12  # of each step: 1 - 2**-12 is 1 in fp16, whose numbers below 1 are 2**-11 apart
SMALL = UPDATE / LEARNING_RATE / 2**6  # the second weight's gradient: 2**-26, nothing in fp16
STEPS = 8
SAME = "the weights' dtype, whether they are the same tensors, and in the same memory"


def _run_master_step(answer, optimizer_cls, lr):
    """Update three fp16 weights: one has small gradients, one too small for fp16, one has None."""
    values = torch.tensor([1.0, 2.0**-6, 0.5], dtype=torch.float16)
    model = [nn.Parameter(value.view(1)) for value in values]
    masters = [weight.detach().float().requires_grad_() for weight in model]
    weights, places, seen = list(model), [weight.data_ptr() for weight in model], {SAME: None}
    decayed = {"params": masters[2:], "weight_decay": 2.0**-10}  # also of a gradient of zero
    optimizer = optimizer_cls([{"params": masters[:2]}, decayed], lr=lr)
    for step in range(1, STEPS + 1):
        for weight, gradient in zip(weights, (UPDATE / LEARNING_RATE, SMALL), strict=False):
            weight.grad = torch.tensor([gradient * SCALE], dtype=weight.dtype)
        if step == 2:
            weights[1].grad = None
        answer(weights, masters, optimizer, SCALE)
        numbers = {"masters": torch.cat(masters).tolist(), "weights": torch.cat(weights).tolist()}
        seen[f"after step {step}"] = numbers
    same = [weight is before for weight, before in zip(weights, model, strict=True)]
    in_place = [weight.data_ptr() for weight in weights] == places
    return seen | {SAME: [str(weights[0].dtype), all(same), in_place]}


def _in_float32(weights, masters, optimizer, scale):
    """The specification of a master step, for AdamW: gradients are divided as Python's floats."""
    for weight, master in zip(weights, masters, strict=True):
        master.grad = None
        if weight.grad is not None:
            master.grad = torch.tensor([number / scale for number in weight.grad.tolist()])
    optimizer.step()
    for weight, master in zip(weights, masters, strict=True):
        weight.data[:] = master.data


def _master_trials():
    right = {SAME: ["torch.float16", True, True]}
    for step in range(1, STEPS + 1):
        small = SMALL * LEARNING_RATE * (step - (step > 1))
        masters = torch.tensor([1 - step * UPDATE, 2.0**-6 - small, 0.5])
        numbers = {"masters": masters.tolist(), "weights": masters.half().tolist()}
        right[f"after step {step}"] = numbers
    sgd = torch.optim.SGD, LEARNING_RATE
    yield Trial(1, _run_master_step, sgd, [right], what=f"{STEPS} steps of SGD")
    adamw = torch.optim.AdamW, 2.0**-6
    right = _run_master_step(_in_float32, *adamw)
    yield Trial(1, _run_master_step, adamw, [right], what=f"{STEPS} steps of AdamW")


master_step = Exercise(
    reference=mixed_precision.master_step,
    writes=("weights", "masters"),
    trials=_master_trials,
    hints={
        "start": "The optimizer was made with the masters. What does it look for in them, and in "
        "which dtype?",
        "values": "weight.grad may be None; then master.grad is None, too. Else "
        "weight.grad.float() / scale, in this order.",
        "error": "After optimizer.step(), in torch.no_grad(): weight.copy_(master) for each pair.",
    },
    praise="after 8 steps of 2**-12 the weight is 1 - 2**-9. In fp16 alone it would still be 1.",
    note="ddpkit.mixed_precision.MixedPrecisionOptimizer does this in its step.",
    mistakes=mistakes("""
without_scale: weight.grad.float() / scale → weight.grad.float()
    The first moved 16384 times too far: gradients are those of the loss times scale. Divide them.
divides_in_fp16: weight.grad.float() / scale → (weight.grad / scale).float()
    The second master copy never moved: its gradient, 2**-26, is 0 in fp16. To fp32 first.
starts_from_the_weights: master.grad = → master.data.copy_(weight)⏎master.grad =
    The master copy lost an update that fp16 doesn't show: 1 - 2**-12 is 1 there. Weights are copied
    from masters, never masters from weights.
never_rounds_back: weight.copy_(master) → pass
    Masters are right, but weights are the old ones: round into them after optimizer.step().
adds_up: master.grad = None if weight.grad is None else → if weight.grad is not None:
        ⏎    master.grad = (0 if master.grad is None else master.grad) +
    The first moved too far in later steps: master.grad is set anew in each, not added to.
makes_zeros_of_none: None if weight → torch.zeros_like(master) if weight
    The third has no gradient: None, not zeros, or weight decay moves it.
makes_fp32_weights: weight.copy_(master) → weight.grad = None⏎weight.data = master.data
    The model computes in fp16, and its weights must stay so: weight.copy_(master) rounds, in place.
makes_new_memory: weight.copy_(master) → weight.data = master.data.half()
    The weight has new memory, and whoever holds the old one, such as a bucket (notebook 04), sees
    nothing of it: weight.copy_(master) rounds in place.
"""),
)


# LossScaler

START, INTERVAL, GRADIENT, MOMENTUM = 8.0, 2, 3.0, 0.5  # a step with zeros would also move
OK, INF, MINUS_INF, NAN = 0.0, math.inf, -math.inf, math.nan


def _run_scaler(answer, plan, odd):
    """Run steps of SGD on two weights of two numbers, in two groups, and one without a gradient.

    plan: the numbers put into a gradient of rank `odd`, one a step, each in another place.
    """
    unused, *weights = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    groups = [{"params": [unused, weights[0]]}, {"params": weights[1:]}]
    optimizer = torch.optim.SGD(groups, lr=1.0, momentum=MOMENTUM)
    scaler, seen = answer(START, INTERVAL), {}
    for step, bad in enumerate(plan):
        optimizer.zero_grad()
        loss = 1 + sum((weight * GRADIENT).sum() for weight in weights)
        scaler.scale(loss).backward()
        times, start = weights[0].grad[0].item() / GRADIENT, torch.cat(weights).detach()
        if dist.get_rank() == odd and bad != OK:
            weights[step % 2].grad[1 - step // 2 % 2] = bad
        if step % 2 == 1:
            scaler.unscale_(optimizer)  # to look at the gradients
        scaler.step(optimizer)
        scaler.update()
        moved, changed = (start - torch.cat(weights)).tolist(), loss._version > 0
        seen[f"step {step + 1}"] = {"loss ×": times, "moved": moved, "loss changed": changed}
    records = recorder().records
    most = max([8, *(record.bytes for record in records)])
    return seen | {"calls, and bytes of the largest,": [max(len(records), len(plan)), most]}


def _scaler_trials():
    second, first_four = [OK, INF, OK, OK, OK], [INF, NAN, MINUS_INF, INF, OK]
    for world_size, odd, plan, scales, what in (
        (2, 0, [OK, OK, OK, OK, OK], [8, 8, 16, 16, 32], f"growth_interval {INTERVAL}"),
        (2, 1, second, [8, 8, 4, 4, 8], "an inf on rank 1 in the second step"),
        (3, 0, first_four, [8, 4, 2, 1, 0.5], "inf, NaN, -inf, inf on rank 0"),
        (1, 0, second, [8, 8, 4, 4, 8], "an inf in the second step"),
    ):
        right, speed = {}, 0.0
        for step, (bad, scale) in enumerate(zip(plan, scales, strict=True), 1):
            speed = speed if bad else MOMENTUM * speed + GRADIENT
            moved = 4 * [0.0 if bad else speed]
            right[f"step {step}"] = {"loss ×": scale, "moved": moved, "loss changed": False}
        right["calls, and bytes of the largest,"] = [len(plan), 8]
        yield Trial(world_size, _run_scaler, (plan, odd), [right] * world_size, what=what)


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
    mistakes=mistakes("""
leaves_the_loss: return loss * self.factor → return loss
    scale(loss) returns loss * factor, a new tensor, whose gradients are as many times as large.
scales_in_place: return loss * self.factor → loss *= self.factor⏎return loss
    Return a new tensor, loss * factor: who prints the loss wants the old one.
never_divides: gradient /= self.factor → pass
    Nobody divided the gradients by the scale: unscale_ does, in place.
keeps_the_scale_after_an_overflow: self.factor /= 2 → pass
    After an overflow the scale is half of what it was, else the next step overflows, too.
grows_at_each_step: self.good_steps == self.growth_interval → True
    The scale grew too early: it does after growth_interval good steps, counted anew each time.
decides_alone: dist.all_reduce(overflow, dist.ReduceOp.MAX, group=self.group) → pass
    Rank 1 skipped, and rank 0 took the step: from now on they have different weights. Agree with
    one dist.all_reduce of one float, op=dist.ReduceOp.MAX.
misses_nan: (~get_total_norm(gradients, 1.0).isfinite()) → torch.cat(gradients).isinf().any()
    A gradient was NaN, and the optimizer stepped. NaN is not inf: torch.isfinite sees both.
counts_on: self.good_steps = 0 if self.overflow else self.good_steps + 1 →
        ⏎self.good_steps += not self.overflow
    The scale grew too early: an overflow starts the count of good steps anew, from 0.
sends_gradients: dist.all_reduce(overflow → for _ in gradients:⏎    dist.all_reduce(overflow
    One all_reduce a step is enough, of one float: does any gradient of the rank overflow?
"""),
)


# predict_bytes(parameters, precision, optimizer)


def predict_bytes(parameters, precision, optimizer):
    weight_and_gradient, master = {"fp32": (4 + 4, 0), "mixed": (2 + 2, 4)}[precision]
    moments = {"SGD": 0, "momentum": 4, "AdamW": 4 + 4}[optimizer]
    return parameters * (weight_and_gradient + master + moments)


PARAMETERS = 210
OPTIMIZERS = {
    "SGD": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "AdamW": torch.optim.AdamW,
}


@cache
def _counted() -> dict[tuple, dict[str, int]]:
    """Count the bytes of the tensors that exist after the backward of the second step."""
    found = {}
    for precision, optimizer in itertools.product(("fp32", "mixed"), OPTIMIZERS):
        model, stepper = nn.ParameterList([torch.ones(PARAMETERS)]), OPTIMIZERS[optimizer]
        if precision == "mixed":
            stepper = partial(MixedPrecisionOptimizer, optimizer_cls=stepper)
        stepper = stepper(model.parameters(), lr=0.1)
        for _ in range(2):
            stepper.step()
            stepper.zero_grad()
            model[0].sum().backward()
        kinds = count_states(model, stepper)._asdict().items()
        # Without AdamW's count of steps
        kinds = {kind: nbytes // PARAMETERS * PARAMETERS for kind, nbytes in kinds}
        found[PARAMETERS, precision, optimizer] = kinds
    return found


def _run_bytes(answer, counted):
    """Return the answer's predictions; in place of a right one the counts, {kind: bytes}."""
    seen = {}
    for case, kinds in counted.items():
        predicted = answer(*case)
        seen[case] = kinds if predicted == sum(kinds.values()) else predicted
    return seen


predict_bytes = Exercise(
    reference=predict_bytes,
    trials=lambda: [Trial(1, _run_bytes, (_counted(),), [_counted()], what="by arguments")],
    hints={
        "start": "Four kinds of tensors: weights, gradients, master copies, moments. Which of them "
        "exist here?",
        "values": "SGD has no moments, momentum one, AdamW two; they are fp32, in mixed precision "
        "too. fp32: 4 + 4 and the moments. mixed: 2 + 2, a master copy of 4, and the moments.",
    },
    praise="as counted from the tensors, six times. Mixed precision saves no byte of these: 16 "
    "with AdamW either way. It halves activations, and what gradients weigh on the wire.",
    note="ddpkit.memory.model_states has the table for larger models, and for ZeRO.",
    mistakes=mistakes("""
without_master: (2 + 2, 4) → (2 + 2, 0)
    4 are missing: the master copy, in fp32.
without_gradients: (4 + 4, 0), "mixed": (2 + 2, 4) → (4, 0), "mixed": (2, 4)
    The gradient counts, too: as many bytes as the weight.
fp32_gradients: (2 + 2, 4) → (2 + 4, 4)
    2 too many: the gradient has the dtype of its weight.
small_moments: [optimizer] → [optimizer] // (2 if precision == "mixed" else 1)
    2 are missing: moments are fp32, in mixed precision too.
one_moment: "AdamW": 4 + 4 → "AdamW": 4
    4 are missing: which moments does this optimizer keep? momentum one, AdamW two.
master_in_fp32_too: (4 + 4, 0) → (4 + 4, 4)
    Too many: without 16-bit weights there is no master copy.
"""),
)


# quantise(x, block)

BLOCK = 4
BLOCKS = [  # the first has the scale 1; each must come back to within half a scale
    [127.0, -3.4, 0.6, 12.0],
    [0.001, -0.002, 0.0005, 0.0],
    [1e-7, -2e-7, 5e-8, 0.0],
    [1.0, -254.0, 3.0, 100.0],
    [0.0, 0.0, 0.0, 0.0],
]
BACK = "numbers * scales, which may be half a scale off: {}".format


def _run_quantise(answer):
    """Quantise BLOCKS; return dtype, shapes, and each block: itself if near, or what came back."""
    x = torch.tensor(BLOCKS)
    numbers, scales = answer(x.flatten().clone(), BLOCK)
    seen = {"dtype and shapes": [str(numbers.dtype), list(numbers.shape), list(scales.shape)]}
    if seen["dtype and shapes"][1:] != [[len(BLOCKS), BLOCK], [len(BLOCKS), 1]]:
        return seen
    back = numbers * scales
    near = (back - x).abs().amax(1) <= x.abs().amax(1) / 127 / 2 * 1.0001
    for at, block in enumerate(BLOCKS):
        seen[BACK(block)] = block if near[at] else back[at].tolist()
    return seen | {"a scale is 0": bool((scales == 0).any())}


def _quantise_trials():
    right = {"dtype and shapes": ["torch.int8", [len(BLOCKS), BLOCK], [len(BLOCKS), 1]]}
    right |= {BACK(block): block for block in BLOCKS} | {"a scale is 0": False}
    yield Trial(
        1, _run_quantise, (), [right], what=f"{len(BLOCKS) * BLOCK} numbers in blocks of {BLOCK}"
    )


quantise = Exercise(
    reference=floats.quantise,
    trials=_quantise_trials,
    hints={
        "start": "x.reshape(-1, block) has a row for each block. Its largest is to become 127.",
        "values": "scales = blocks.abs().amax(1, keepdim=True) / 127; where a block is all zeros, "
        "any other scale. Then (blocks / scales).round().to(torch.int8).",
    },
    praise="a byte a number, and none is off by more than half its block's scale.",
    mistakes=mistakes("""
one_for_all: amax(1, keepdim=True) → amax().expand(len(blocks), 1)
    One scale for all: a block of small numbers loses its digits. Each block has its own.
divides_by_128: / 127 → / 128
    The largest became 128, which int8 doesn't have: it goes from -128 to 127.
truncates: .round() →
    .to() cuts off what is behind the point: .round() first.
without_abs: .abs() →
    Which is the largest of a block without its sign? amax of abs().
divides_by_zero: scales[scales == 0] = 1 → pass
    No scale may be 0: in a block of zeros 0/0 is NaN, in int8 any number. Give it another scale.
upside_down: .to(torch.int8), scales → .to(torch.int8), 1 / scales
    numbers * scales must give x again, so return what you divided by.
"""),
)
