"""Answers to the exercises of notebook 05: wrong ones, with what the verdict must say, and other right ones."""

import torch
import torch.distributed as dist

from ddpkit.exercises import mixed_precision
from ddpkit.mixed_precision import LossScaler

# LossScaler

Right = mixed_precision.LossScaler.reference


def _gradients(optimizer):
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _agreed(overflow):
    flag = torch.tensor(float(overflow))
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)


class ScalerLeavesTheLoss(Right):
    def scale(self, loss):
        return loss


class ScalerNeverDivides(Right):
    def unscale_(self, optimizer):
        self.overflow = _agreed(not all(gradient.isfinite().all() for gradient in _gradients(optimizer)))


class ScalerDividesTwice(Right):
    def step(self, optimizer):
        self.unscale_(optimizer)
        if not self.overflow:
            optimizer.step()


class ScalerDecidesAlone(Right):
    def unscale_(self, optimizer):
        for gradient in _gradients(optimizer):
            gradient /= self.factor
        self.overflow = not all(gradient.isfinite().all() for gradient in _gradients(optimizer))


class ScalerAgreesOnTheScaleOnly(Right):
    def step(self, optimizer):
        mine = False
        if self.overflow is None:
            for gradient in _gradients(optimizer):
                gradient /= self.factor
            mine = not all(gradient.isfinite().all() for gradient in _gradients(optimizer))
            self.overflow = _agreed(mine)
        if not mine:
            optimizer.step()


class ScalerBacksOffAlone(Right):
    def unscale_(self, optimizer):
        super().unscale_(optimizer)
        self.mine = not all(gradient.isfinite().all() for gradient in _gradients(optimizer))

    def update(self):
        self.overflow = self.mine
        super().update()


class ScalerMissesNaN(Right):
    def unscale_(self, optimizer):
        for gradient in _gradients(optimizer):
            gradient /= self.factor
        self.overflow = _agreed(any(gradient.isinf().any() for gradient in _gradients(optimizer)))


class ScalerLooksAtTheFirst(Right):
    def unscale_(self, optimizer):
        for gradient in _gradients(optimizer):
            gradient /= self.factor
        self.overflow = _agreed(not _gradients(optimizer)[0].isfinite().all())


class ScalerLooksAtTheLast(Right):
    def unscale_(self, optimizer):
        for gradient in _gradients(optimizer):
            gradient /= self.factor
            overflow = not gradient.isfinite().all()
        self.overflow = _agreed(overflow)


class ScalerLooksAtFirstNumbers(Right):
    def unscale_(self, optimizer):
        for gradient in _gradients(optimizer):
            gradient /= self.factor
        self.overflow = _agreed(not all(gradient.flatten()[0].isfinite() for gradient in _gradients(optimizer)))


class ScalerWantsAnyFinite(Right):
    def unscale_(self, optimizer):
        for gradient in _gradients(optimizer):
            gradient /= self.factor
        self.overflow = _agreed(not all(gradient.isfinite().any() for gradient in _gradients(optimizer)))


class ScalerDividesTheFirst(Right):
    def unscale_(self, optimizer):
        gradients = _gradients(optimizer)
        gradients[0] /= self.factor
        self.overflow = _agreed(not all(gradient.isfinite().all() for gradient in gradients))


class ScalerOfTheFirstGroup(Right):
    def unscale_(self, optimizer):
        gradients = [parameter.grad for parameter in optimizer.param_groups[0]["params"] if parameter.grad is not None]
        for gradient in gradients:
            gradient /= self.factor
        self.overflow = _agreed(not all(gradient.isfinite().all() for gradient in gradients))


class ScalerForgetsOneWeight(Right):
    """Steps without the gradient that overflowed, where all should skip."""

    def unscale_(self, optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad /= self.factor
                    if not parameter.grad.isfinite().all():
                        parameter.grad = None
        self.overflow = False


class ScalerStumblesOverNone(Right):
    def unscale_(self, optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad /= self.factor
        self.overflow = _agreed(not all(gradient.isfinite().all() for gradient in _gradients(optimizer)))


class ScalerReturnsNoLoss(Right):
    def scale(self, loss):
        loss * self.factor


class ScalerScalesInPlace(Right):
    def scale(self, loss):
        loss *= self.factor
        return loss


class ScalerScalesACopyToo(Right):
    def scale(self, loss):
        loss *= self.factor
        return loss.clone()


class ScalerNeverUnscales(Right):
    def step(self, optimizer):
        if not self.overflow:
            optimizer.step()


class ScalerGathersAndBroadcasts(Right):
    def unscale_(self, optimizer):
        for gradient in _gradients(optimizer):
            gradient /= self.factor
        mine = torch.tensor([float(not all(gradient.isfinite().all() for gradient in _gradients(optimizer)))])
        everyone = [torch.zeros(1) for _ in range(dist.get_world_size())]
        dist.gather(mine, everyone if dist.get_rank() == 0 else None, dst=0)
        any_of_them = torch.stack(everyone).max().reshape(1)
        dist.broadcast(any_of_them, src=0)
        self.overflow = bool(any_of_them)


class ScalerStepsAnyhow(Right):
    def step(self, optimizer):
        if self.overflow is None:
            self.unscale_(optimizer)
        optimizer.step()


class ScalerNeverGrows(Right):
    def update(self):
        if self.overflow:
            self.factor /= 2
        self.overflow = None


class ScalerNeverGrowsBack(Right):
    """Good steps that an overflow doesn't reset pass by the interval."""

    def update(self):
        if self.overflow:
            self.factor /= 2
            self.good_steps = -1000
        else:
            self.good_steps += 1
            if self.good_steps == self.growth_interval:
                self.factor, self.good_steps = self.factor * 2, 0
        self.overflow = None


class ScalerGrowsAtEachStep(Right):
    def update(self):
        self.factor = self.factor / 2 if self.overflow else self.factor * 2
        self.overflow = None


class ScalerCountsOn(Right):
    def update(self):
        if self.overflow:
            self.factor /= 2
        else:
            self.good_steps += 1
            if self.good_steps % self.growth_interval == 0:
                self.factor *= 2
        self.overflow = None


class ScalerKeepsTheScale(Right):
    def update(self):
        self.overflow = None


class ScalerRemembersTheOverflow(Right):
    def update(self):
        was = self.overflow
        super().update()
        self.overflow = was


class ScalerDoublesAfterAnOverflow(Right):
    def update(self):
        if self.overflow:
            self.factor *= 4
        super().update()


class ScalerSendsGradients(Right):
    def unscale_(self, optimizer):
        overflow = False
        for gradient in _gradients(optimizer):
            gradient /= self.factor
            overflow |= _agreed(not gradient.isfinite().all())
        self.overflow = overflow


class ScalerByTheNorm(Right):
    def unscale_(self, optimizer):
        torch._foreach_mul_(_gradients(optimizer), 1 / self.factor)
        self.overflow = _agreed(not torch.nn.utils.get_total_norm(_gradients(optimizer), float("inf")).isfinite())


class ScalerGathers:
    """Written otherwise: a sum instead of a maximum, the decision in update's own words."""

    def __init__(self, scale, growth_interval):
        self.now, self.every, self.good, self.found = scale, growth_interval, 0, None

    def scale(self, loss):
        return self.now * loss

    def unscale_(self, optimizer):
        bad = torch.zeros(1, dtype=torch.int64)
        for gradient in _gradients(optimizer):
            gradient.mul_(1 / self.now)
            bad += (~torch.isfinite(gradient)).sum()
        dist.all_reduce(bad)
        self.found = bad.item() > 0

    def step(self, optimizer):
        if self.found is None:
            self.unscale_(optimizer)
        return None if self.found else optimizer.step()

    def update(self):
        found, self.found = self.found, None
        if found:
            self.now, self.good = self.now * 0.5, 0
            return
        self.good += 1
        if self.good >= self.every:
            self.now, self.good = self.now * 2.0, 0


class ScalerOfTheLibrary(LossScaler):
    def __init__(self, scale, growth_interval):
        super().__init__(scale, growth_interval=growth_interval)


# master_step


def _give(weights, masters, gradient):
    for weight, master in zip(weights, masters, strict=True):
        master.grad = None if weight.grad is None else gradient(weight.grad)


@torch.no_grad()
def _round(weights, masters):
    for weight, master in zip(weights, masters, strict=True):
        weight.copy_(master)


def master_step_without_scale(weights, masters, optimizer, scale):
    _give(weights, masters, lambda gradient: gradient.float())
    optimizer.step()
    _round(weights, masters)


def master_step_divides_in_fp16(weights, masters, optimizer, scale):
    _give(weights, masters, lambda gradient: (gradient / scale).float())
    optimizer.step()
    _round(weights, masters)


def master_step_never_rounds_back(weights, masters, optimizer, scale):
    _give(weights, masters, lambda gradient: gradient.float() / scale)
    optimizer.step()


def master_step_rounds_back_before(weights, masters, optimizer, scale):
    _give(weights, masters, lambda gradient: gradient.float() / scale)
    _round(weights, masters)
    optimizer.step()


def master_step_without_step(weights, masters, optimizer, scale):
    _give(weights, masters, lambda gradient: gradient.float() / scale)
    _round(weights, masters)


def master_step_of_the_weights(weights, masters, optimizer, scale):
    with torch.no_grad():
        for weight in weights:
            if weight.grad is not None:
                weight -= optimizer.param_groups[0]["lr"] * weight.grad.float() / scale


@torch.no_grad()
def master_step_starts_from_the_weights(weights, masters, optimizer, scale):
    for weight, master in zip(weights, masters, strict=True):
        master.copy_(weight)
    _give(weights, masters, lambda gradient: gradient.float() / scale)
    optimizer.step()
    _round(weights, masters)


@torch.no_grad()
def master_step_adds_up(weights, masters, optimizer, scale):
    for weight, master in zip(weights, masters, strict=True):
        if weight.grad is not None:
            gradient = weight.grad.float() / scale
            master.grad = gradient if master.grad is None else master.grad + gradient
    optimizer.step()
    _round(weights, masters)


def master_step_makes_zeros_of_none(weights, masters, optimizer, scale):
    for weight, master in zip(weights, masters, strict=True):
        master.grad = torch.zeros_like(master) if weight.grad is None else weight.grad.float() / scale
    optimizer.step()
    _round(weights, masters)


def master_step_steps_on_a_stale_gradient(weights, masters, optimizer, scale):
    for weight, master in zip(weights, masters, strict=True):
        if weight.grad is not None:
            master.grad = weight.grad.float() / scale
    optimizer.step()
    _round(weights, masters)


def master_step_multiplies(weights, masters, optimizer, scale):
    _give(weights, masters, lambda gradient: gradient.float() * scale)
    optimizer.step()
    _round(weights, masters)


def master_step_makes_fp32_weights(weights, masters, optimizer, scale):
    _give(weights, masters, lambda gradient: gradient.float() / scale)
    optimizer.step()
    for weight, master in zip(weights, masters, strict=True):
        weight.grad = None
        weight.data = master.data


def master_step_replaces_the_weights(weights, masters, optimizer, scale):
    _give(weights, masters, lambda gradient: gradient.float() / scale)
    optimizer.step()
    weights[:] = [master.detach().half().requires_grad_() for master in masters]


def master_step_makes_new_memory(weights, masters, optimizer, scale):
    _give(weights, masters, lambda gradient: gradient.float() / scale)
    optimizer.step()
    for weight, master in zip(weights, masters, strict=True):
        weight.data = master.data.half()


def master_step_stumbles_over_none(weights, masters, optimizer, scale):
    for weight, master in zip(weights, masters, strict=True):
        master.grad = weight.grad.float() / scale
    optimizer.step()
    _round(weights, masters)


def master_step_in_one_go(weights, masters, optimizer, scale):
    trained = [(weight, master) for weight, master in zip(weights, masters, strict=True) if weight.grad is not None]
    for weight, master in trained:
        master.grad = weight.grad.to(torch.float32).mul_(1 / scale)
    optimizer.step()
    optimizer.zero_grad()
    for weight, master in trained:
        weight.data.copy_(master.data.half())


def master_step_with_foreach(weights, masters, optimizer, scale):
    optimizer.zero_grad()
    for weight, master in zip(weights, masters, strict=True):
        if weight.grad is not None:
            master.grad = torch.empty_like(master).copy_(weight.grad).div_(scale)
    optimizer.step()
    with torch.no_grad():
        torch._foreach_copy_(list(weights), list(masters))


# predict_bytes


def predict_bytes_always_16(parameters, precision, optimizer):
    return 16 * parameters


def predict_bytes_of_one(parameters, precision, optimizer):
    return mixed_precision.predict_bytes.reference(1, precision, optimizer)


def predict_bytes_numbers(parameters, precision, optimizer):
    return mixed_precision.predict_bytes.reference(parameters, precision, optimizer) // 4


def _bytes(weight, gradient, master, moment, moments=(0, 1, 2)):
    """A predictor that counts so many bytes of each kind in mixed precision, 4 of all but a master copy in fp32."""

    def predict_bytes(parameters, precision, optimizer):
        count = dict(zip(("SGD", "momentum", "AdamW"), moments, strict=True))[optimizer]
        mixed = precision == "mixed"
        one = weight + gradient + master + moment * count if mixed else 4 + (4 if gradient else 0) + 4 * count
        return parameters * one

    return predict_bytes


def _named(name, answer):
    answer.__name__ = name
    return answer


predict_bytes_without_master = _named("predict_bytes_without_master", _bytes(2, 2, 0, 4))
predict_bytes_without_gradients = _named("predict_bytes_without_gradients", _bytes(2, 0, 4, 4))
predict_bytes_fp32_gradients = _named("predict_bytes_fp32_gradients", _bytes(2, 4, 4, 4))
predict_bytes_keeps_fp32_weights = _named("predict_bytes_keeps_fp32_weights", _bytes(4, 4, 4, 4))
predict_bytes_small_moments = _named("predict_bytes_small_moments", _bytes(2, 2, 4, 2))
predict_bytes_one_moment = _named("predict_bytes_one_moment", _bytes(2, 2, 4, 4, moments=(0, 1, 1)))
predict_bytes_no_momentum = _named("predict_bytes_no_momentum", _bytes(2, 2, 4, 4, moments=(0, 0, 2)))
predict_bytes_half_of_all = _named("predict_bytes_half_of_all", _bytes(2, 2, 0, 2))


def predict_bytes_master_in_fp32_too(parameters, precision, optimizer):
    return mixed_precision.predict_bytes.reference(parameters, precision, optimizer) + 4 * parameters


def predict_bytes_prints(parameters, precision, optimizer):
    return f"{16 * parameters} bytes"


def predict_bytes_never_changes(parameters, precision, optimizer):
    """fp32 or mixed: 8, and 4 a moment."""
    return parameters * {"SGD": 8, "momentum": 12, "AdamW": 16}[optimizer]


def predict_bytes_from_tensors(parameters, precision, optimizer):
    weight = torch.empty(parameters, dtype=torch.float16 if precision == "mixed" else torch.float32)
    full = torch.empty(parameters)
    kept = 2 * [weight] + [full] * (precision == "mixed") + [full] * ["SGD", "momentum", "AdamW"].index(optimizer)
    return float(sum(tensor.nbytes for tensor in kept))


WRONG = [
    ("LossScaler", ScalerLeavesTheLoss, "scale(loss) returns loss * factor"),
    ("LossScaler", ScalerNeverDivides, "nobody divided the gradient by the scale"),
    ("LossScaler", ScalerDividesTwice, "divided by the scale twice. unscale_ had been called before step"),
    ("LossScaler", ScalerDecidesAlone, "rank 1 skipped, and rank 0 took the step"),
    ("LossScaler", ScalerAgreesOnTheScaleOnly, "rank 1 skipped, and rank 0 took the step"),
    ("LossScaler", ScalerBacksOffAlone, "rank 1 halved its scale, and rank 0 didn't"),
    ("LossScaler", ScalerMissesNaN, "NaN is not inf: torch.isfinite sees both"),
    ("LossScaler", ScalerLooksAtTheFirst, "a gradient was inf, and the optimizer stepped all the same"),
    ("LossScaler", ScalerLooksAtTheLast, "Does unscale_ look at all numbers of all gradients in all groups?"),
    ("LossScaler", ScalerLooksAtFirstNumbers, "Does unscale_ look at all numbers of all gradients in all groups?"),
    ("LossScaler", ScalerWantsAnyFinite, "Does unscale_ look at all numbers of all gradients in all groups?"),
    ("LossScaler", ScalerDividesTheFirst, "some gradients were not divided by the scale"),
    ("LossScaler", ScalerOfTheFirstGroup, "optimizer.param_groups has several groups"),
    ("LossScaler", ScalerForgetsOneWeight, "a gradient was inf, and the optimizer stepped all the same"),
    ("LossScaler", ScalerStumblesOverNone, "'NoneType' and 'float'"),
    ("LossScaler", ScalerReturnsNoLoss, "scale() returned None: return loss * factor."),
    ("LossScaler", ScalerScalesInPlace, "a loss changed in place"),
    ("LossScaler", ScalerScalesACopyToo, "a loss changed in place"),
    ("LossScaler", ScalerNeverUnscales, "step() calls it if overflow is None"),
    ("LossScaler", ScalerGathersAndBroadcasts, "One all_reduce a step is enough."),
    ("LossScaler", ScalerStepsAnyhow, "a gradient was inf, and the optimizer stepped all the same"),
    ("LossScaler", ScalerNeverGrows, "the scale never grew"),
    ("LossScaler", ScalerNeverGrowsBack, "must be able to grow again"),
    ("LossScaler", ScalerGrowsAtEachStep, "grew too early: after 2 good steps"),
    ("LossScaler", ScalerCountsOn, "an overflow starts the count of good steps anew"),
    ("LossScaler", ScalerKeepsTheScale, "the scale never grew"),
    ("LossScaler", ScalerRemembersTheOverflow, "Does update() set overflow back to None?"),
    ("LossScaler", ScalerDoublesAfterAnOverflow, "after an overflow the scale is half of what it was, else"),
    ("LossScaler", ScalerSendsGradients, "one float for all of them is enough"),
    ("master_step", master_step_without_scale, "gradients are those of the loss times scale. Divide them"),
    ("master_step", master_step_divides_in_fp16, "2**-26, is 0 in fp16. Convert to fp32 first"),
    ("master_step", master_step_never_rounds_back, "but the weights are the old ones"),
    ("master_step", master_step_rounds_back_before, "round into them, after optimizer.step()"),
    ("master_step", master_step_without_step, "Nothing moved. Does optimizer.step() find a gradient"),
    ("master_step", master_step_of_the_weights, "Nothing moved"),
    ("master_step", master_step_starts_from_the_weights, "never masters from weights"),
    ("master_step", master_step_adds_up, "set anew in each, not added to"),
    ("master_step", master_step_makes_zeros_of_none, "The third has no gradient: None, not zeros"),
    ("master_step", master_step_steps_on_a_stale_gradient, "The second had no gradient in the last step, but moved"),
    ("master_step", master_step_multiplies, "divide its gradient by the scale, once"),
    ("master_step", master_step_makes_fp32_weights, "its weights must stay so"),
    ("master_step", master_step_makes_new_memory, "won't see the new. weight.copy_(master)"),
    ("master_step", master_step_replaces_the_weights, "The model holds the old tensors"),
    ("master_step", master_step_stumbles_over_none, "'NoneType' object has no attribute 'float'"),
    ("predict_bytes", predict_bytes_always_16, "8 too many: without 16-bit weights there is no master copy"),
    ("predict_bytes", predict_bytes_of_one, "Yours is of one parameter"),
    ("predict_bytes", predict_bytes_numbers, "Count bytes, not numbers"),
    ("predict_bytes", predict_bytes_without_master, "4 are missing: the master copy"),
    ("predict_bytes", predict_bytes_without_gradients, "4 are missing: the gradient counts, too"),
    ("predict_bytes", predict_bytes_fp32_gradients, "2 too many: the gradient has the dtype of its weight"),
    ("predict_bytes", predict_bytes_keeps_fp32_weights, "4 too many: weight and gradient are 16-bit"),
    ("predict_bytes", predict_bytes_small_moments, "2 are missing: moments are fp32, in mixed precision too"),
    ("predict_bytes", predict_bytes_one_moment, "4 are missing: which moments"),
    ("predict_bytes", predict_bytes_no_momentum, "4 are missing: which moments"),
    ("predict_bytes", predict_bytes_half_of_all, "4 are missing: the master copy"),
    ("predict_bytes", predict_bytes_master_in_fp32_too, "without 16-bit weights there is no master copy"),
    ("predict_bytes", predict_bytes_prints, "Return a number, not str"),
]

RIGHT = [
    ("LossScaler", ScalerByTheNorm),
    ("LossScaler", ScalerGathers),
    ("LossScaler", ScalerOfTheLibrary),
    ("master_step", master_step_in_one_go),
    ("master_step", master_step_with_foreach),
    ("predict_bytes", predict_bytes_never_changes),
    ("predict_bytes", predict_bytes_from_tensors),
]
