"""Batch norm across ranks: rows are normalized with mean and variance of the whole batch.

    model = NaiveDDP(convert(model))

With ordinary batch norm, ranks that each have a part of the batch don't compute what one process
with all of it does. Here they do, for one all-reduce in forward and one in backward. C is the
number of channels, N the number of values of a channel in the whole batch (rows, times places in an
image), all ranks together.

Forward. Mean and variance need three sums: the count, Σx and Σx² of each channel, in one vector.

    μ = Σx / N      σ² = Σx²/N - μ² + ε      x̂ = (x - μ) / σ      y = w x̂ + b

Σx²/N - μ² subtracts two numbers that are nearly equal when the mean is large, and loses a factor
μ²/σ² of precision. So the sums are float64: with a mean of 10⁴ standard deviations the error is
about 10⁻⁸ of the variance. (In float32 nothing would be left.)

Backward. Let L be the sum of the losses of all ranks and g = ∂L/∂y. A value changes its own x̂ and,
through μ and σ, every other:

    ∂x̂ⱼ/∂xᵢ = (δᵢⱼ - 1/N - x̂ᵢ x̂ⱼ/N) / σ      so      ∂L/∂xᵢ = w/σ (gᵢ - Σg/N - x̂ᵢ Σ(g x̂)/N)

with two sums over the whole batch, in one vector. ∂L/∂b = Σg and ∂L/∂w = Σ(g x̂) stay this rank's
part of these sums: the wrapper averages them with all other gradients. With uneven shares multiply
each rank's loss by W times its share of the rows (`data_parallel.join`).

Ioffe and Szegedy 2015; PyTorch's SyncBatchNorm. Notebook 03.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup


class GlobalBatchNorm(nn.modules.batchnorm._BatchNorm):
    """nn.BatchNorm1d, 2d and 3d in one, over the rows of all ranks of `group` while training.

    Other arguments, parameters and buffers: nn.BatchNorm's. Running statistics are the same on all
    ranks, those of one process with the whole batch. With `eval()` it is nn.BatchNorm.

    input: (n, C) or (n, C, ...), C as on all ranks; n may differ, and be 0: a rank without data
    must take part with 0 rows, forward and backward, or the others wait for it.
    ValueError: on this rank, an input of other shape; on every rank, fewer than 2 values a channel.

    Cost: forward 2C+1 float64 in one all-reduce, backward 2C numbers in one if the input requires a
    gradient; no double backward.
    """

    def __init__(self, num_features: int, *args, group: ProcessGroup | None = None, **kwargs):
        super().__init__(num_features, *args, **kwargs)
        self.group = group

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:  # no statistics of the batch, so no messages
            return super().forward(input)
        self._check_input_dim(input)
        count, mean, variance = batch_statistics(input, self.group)
        if self.track_running_stats:  # with the unbiased variance, as in PyTorch
            unbiased = variance * count / (count - 1)
            self._remember(mean, unbiased)
        scale = (variance + self.eps).rsqrt()
        affine = self.weight, self.bias
        return Normalize.apply(input, *affine, mean, scale, count, self.group)

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor) -> None:
        """Move running statistics towards a batch's; momentum None: the mean over all batches."""
        self.num_batches_tracked += 1
        share = self.momentum
        if share is None:
            share = 1 / self.num_batches_tracked.item()
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)

    def _check_input_dim(self, input: Tensor) -> None:
        channels = input.shape[1] if input.dim() > 1 else None
        if channels != self.num_features:
            got = f"rank {dist.get_rank()} brought {tuple(input.shape)} to batch norm"
            expected = f"(n, {self.num_features}, ...): channels are the second axis"
            raise ValueError(f"{got}, expected {expected}")


def batch_statistics(x: Tensor, group: ProcessGroup | None = None) -> tuple[float, Tensor, Tensor]:
    """Compute count, mean and (biased) variance of each channel over the rows of all ranks.

    x: (n, C, ...), n may be 0. Returns a number and two tensors of float64, (C,), without gradient,
    with the same bits on every rank. ValueError, on every rank: fewer than 2 values a channel.
    Cost: an all-reduce of 2C+1 float64, and float64 copies of x and its squares.
    """
    wide = x.detach().double()
    mine = wide.new_tensor([x.numel() / x.shape[1]])  # values of a channel on this rank
    # Three sums in one vector, one message. Counting is part of it: ranks may differ in rows.
    total = _sum(wide)
    squares = _sum(wide.square())
    sums = torch.cat([total, squares, mine])
    dist.all_reduce(sums, group=group)
    count = sums[-1].item()
    if count < 2:
        got = f"batch norm got {count:g} values a channel in the whole batch"
        remedy = "A mean of one leaves no variance: use a larger batch, or eval()."
        raise ValueError(f"{got}, expected at least 2. {remedy}")
    # From here on every rank computes the same from the same bits.
    means = sums[:-1] / count
    mean, mean_square = means.chunk(2)
    variance = mean_square - mean.square()
    return count, mean, variance.clamp(min=0)  # rounding may bring it below 0


class Normalize(torch.autograd.Function):
    """A function of autograd: y = w (x - mean) · scale + b, where mean and scale depend on all x.

    Backward takes that into account, so mean and scale themselves get no gradient. x: (n, C, ...).
    weight, bias: (C,), or both None. mean, scale = 1/σ: (C,), and count, the values of a channel,
    are the same on all ranks. Cost: in backward one all-reduce of 2C numbers, if x requires a
    gradient: on all ranks or on none.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, mean, scale, count, group):
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.count = count
        ctx.group = group
        normalized = _normalized(x, mean, scale)
        if weight is not None:
            normalized = normalized * _along(weight, x) + _along(bias, x)
        return normalized.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, mean, scale = ctx.saved_tensors
        normalized = _normalized(x, mean, scale)
        grad = grad.to(normalized.dtype)
        # Over this rank's rows only: the wrapper averages them with all other gradients.
        grad_bias = _sum(grad)
        grad_weight = _sum(grad * normalized)
        grad_x = None
        if ctx.needs_input_grad[0]:  # the two sums of the whole batch, in one message
            sums = torch.cat([grad_bias, grad_weight])
            dist.all_reduce(sums, group=ctx.group)
            means = sums / ctx.count
            mean_grad, mean_product = means.chunk(2)
            through_both = _along(mean_grad, x) + normalized * _along(mean_product, x)
            slope = scale if weight is None else scale * weight
            grad_x = (grad - through_both) * _along(slope, x)
        if weight is None:
            grad_weight = grad_bias = None
        # mean, scale, count and group get none: their part is in grad_x.
        return grad_x, grad_weight, grad_bias, None, None, None, None


def convert(module: nn.Module, group: ProcessGroup | None = None) -> nn.Module:
    """Replace every nn.BatchNorm1d, 2d and 3d in `module` by a GlobalBatchNorm with its tensors.

    In place; returns `module`, or its replacement if it is itself a batch norm. Parameters stay the
    same objects, so an optimizer that has them goes on; hooks on a replaced module are lost.
    PyTorch's `convert_sync_batchnorm`. Notebook 03.
    """
    made: dict[nn.Module, GlobalBatchNorm] = {}
    # A list: the walk must not see the modules that it puts in.
    for path, child in list(module.named_modules(remove_duplicate=False)):
        if isinstance(child, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            if child not in made:  # one that is used in two places stays one
                made[child] = _global(child, group)
            if path == "":
                return made[child]
            module.set_submodule(path, made[child])
    return module


def _global(norm: nn.Module, group: ProcessGroup | None) -> GlobalBatchNorm:
    """Return a GlobalBatchNorm with the options and the very tensors of this batch norm."""
    options = norm.eps, norm.momentum, norm.affine, norm.track_running_stats
    new = GlobalBatchNorm(norm.num_features, *options, group=group)
    for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
        setattr(new, name, getattr(norm, name))  # the same objects, not copies
    return new.train(norm.training)


def _normalized(x: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """Return (x - mean) · scale, in float32 at least."""
    wide = torch.promote_types(x.dtype, torch.float32)
    centred = x.to(wide) - _along(mean.to(wide), x)
    return centred * _along(scale.to(wide), x)


def _sum(x: Tensor) -> Tensor:
    """Sum over every axis but the channels': (n, C, ...) to (C,)."""
    others = [axis for axis in range(x.dim()) if axis != 1]
    return x.sum(others)


def _along(values: Tensor, x: Tensor) -> Tensor:
    """View (C,) in a shape that broadcasts with x, (n, C, ...)."""
    places = [1] * (x.dim() - 2)
    return values.view(-1, *places)
