"""Answers to the exercises of notebook 05 that are right, though not written as the reference."""

import math
from types import SimpleNamespace

import torch
import torch.distributed as dist

from ddpkit.mixed_precision import LossScaler


def _gradients(optimizer):
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


class ScalerByTheNorm(LossScaler):
    def unscale_(self, optimizer):
        gradients = _gradients(optimizer)
        torch._foreach_mul_(gradients, 1 / self.factor)
        largest = torch.nn.utils.get_total_norm(gradients, float("inf"))
        overflow = torch.tensor(float(not largest.isfinite()))
        dist.all_reduce(overflow, dist.ReduceOp.MAX)
        self.overflow = bool(overflow)


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


def master_step_in_one_go(weights, masters, optimizer, scale):
    pairs = zip(weights, masters, strict=True)
    trained = [(weight, master) for weight, master in pairs if weight.grad is not None]
    for weight, master in trained:
        master.grad = weight.grad.to(torch.float32).mul_(1 / scale)
    optimizer.step()
    optimizer.zero_grad()
    for weight, master in trained:
        weight.data.copy_(master.data.half())


def predict_bytes_never_changes(parameters, precision, optimizer):
    """fp32 or mixed: 8, and 4 a moment."""
    return float(parameters * {"SGD": 8, "momentum": 12, "AdamW": 16}[optimizer])


def nearest_of_all(value, format):
    """Looks through the numbers of the value's size, and one more."""
    bits = math.floor(math.log2(abs(value))) if value else -99
    spacing = 2.0 ** (max(bits, 1 - format.bias) - format.fraction_bits)
    below = math.floor(value / spacing)
    near = min((below, below + 1), key=lambda n: (abs(n * spacing - value), n % 2)) * spacing
    return near if abs(near) <= format.largest else near * math.inf


def quantise_in_a_loop(x, block):
    numbers, scales = [], []
    for part in x.split(block):
        scales.append(max(part.abs().max().item(), 1e-30) / 127)
        numbers.append(torch.tensor([round(each / scales[-1]) for each in part.tolist()]))
    return torch.stack(numbers).to(torch.int8), torch.tensor(scales)[:, None]


RIGHT = [
    ("nearest", nearest_of_all),
    ("quantise", quantise_in_a_loop),
    ("LossScaler", ScalerByTheNorm),
    ("LossScaler", ScalerGathers),
    ("master_step", master_step_in_one_go),
    ("predict_bytes", predict_bytes_never_changes),
]


class StepsWithZeros(LossScaler):
    """An overflow's gradients become zeros, and the momentum goes on."""

    def step(self, optimizer):
        if self.overflow is None:
            self.unscale_(optimizer)
        if self.overflow:
            for gradient in _gradients(optimizer):
                gradient.zero_()
        optimizer.step()


def quantise_with_a_floor(x, block):
    blocks = x.reshape(-1, block)
    scales = blocks.abs().amax(1, keepdim=True).clamp(min=1e-6) / 127
    return (blocks / scales).round().to(torch.int8), scales


WRONG = [
    ("LossScaler", StepsWithZeros, "an inf on rank 1 in the second step"),
    ("quantise", quantise_with_a_floor, "[1e-07, -2e-07, 5e-08, 0.0]"),
]


def master_step_by_the_learning_rate(weights, masters, optimizer, scale):
    """With SGD it is the same: the rate is divided, not the gradients."""
    for weight, master in zip(weights, masters, strict=True):
        master.grad = None if weight.grad is None else weight.grad.float()
    for group in optimizer.param_groups:
        group["lr"] /= scale
    optimizer.step()
    for group in optimizer.param_groups:
        group["lr"] *= scale
    with torch.no_grad():
        for weight, master in zip(weights, masters, strict=True):
            weight.copy_(master)


class ScalesTheLearningRate(LossScaler):
    def unscale_(self, optimizer):
        factor, self.factor = self.factor, 1.0
        super().unscale_(optimizer)
        self.factor = factor

    def step(self, optimizer):
        if self.overflow is None:
            self.unscale_(optimizer)
        for group in optimizer.param_groups:
            group["lr"] /= self.factor
        if not self.overflow:
            optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= self.factor


WRONG += [
    ("master_step", master_step_by_the_learning_rate, "AdamW"),
    ("LossScaler", ScalesTheLearningRate, "growth_interval 2"),
]


def quantise_in_place(x, block):
    numbers, scales = quantise_in_a_loop(x, block)
    x /= scales.max()
    return numbers, scales


class LooksAtTheLast(LossScaler):
    def unscale_(self, optimizer):
        for gradient in _gradients(optimizer)[:-1]:
            gradient /= self.factor
        super().unscale_(SimpleNamespace(param_groups=optimizer.param_groups[-1:]))


WRONG += [
    ("quantise", quantise_in_place, "`x` isn't what it was"),
    ("LossScaler", LooksAtTheLast, "inf on rank 0: step 1 on rank 0"),
]
