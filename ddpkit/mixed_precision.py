"""Training in 16 bits: half the bytes for weights, gradients and activations.

Gradients below 3e-8 are zero in fp16: `LossScaler` makes them larger, through the loss. Updates
below 2⁻¹² of a weight (bf16: 2⁻⁹) are rounded away: `master_step` adds them up in fp32. Together:

    optimizer = MixedPrecisionOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    model = BucketedDDP(model)  # after the optimizer, which turns the weights to 16 bits
    optimizer.scale(loss).backward()
    model.synchronize()  # gradients travel in 16 bits
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()  # on every rank; on none, if a gradient of any rank overflowed

In PyTorch: torch.amp.GradScaler, FSDP's ShardedGradScaler. Micikevicius et al. 2018. Notebook 05.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim import Optimizer


def master_step(weights, masters, optimizer, scale):
    """Update fp32 `masters` from the gradients of 16-bit `weights`, and round them into `weights`.

    optimizer: made with the masters. scale: the loss was multiplied by it. Overflow isn't noticed.
    """
    for weight, master in zip(weights, masters, strict=True):
        # To fp32 first: divided in fp16, small gradients would be zero after all.
        master.grad = None if weight.grad is None else weight.grad.float() / scale
    optimizer.step()
    with torch.no_grad():
        for weight, master in zip(weights, masters, strict=True):
            weight.copy_(master)


class LossScaler:
    """A factor for the loss: small gradients survive in fp16, and are divided by it in fp32.

    As torch.amp.GradScaler, for one optimizer whose parameters aren't fp16. dynamic: an overflow
    halves the scale, and `growth_interval` steps in a row without one double it; if False, the
    scale stays. group: the ranks that step or skip together (None: all, if there are any).
    """

    def __init__(self, init_scale=2.0**16, growth_interval=2000, dynamic=True, group=None):
        self.factor = init_scale
        self.growth_interval = growth_interval
        self.dynamic = dynamic
        self.group = group
        self.good_steps = 0
        self.skipped = 0
        self.overflow: bool | None = None  # unknown until unscale_

    def get_scale(self) -> float:
        return self.factor

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale, a new tensor."""
        return loss * self.factor

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients in place, and agree with the group's ranks whether one overflowed.

        RuntimeError: called twice before `update`. ValueError: they are fp16. Cost: one float is
        all-reduced, and one wait for the GPU.
        """
        if self.overflow is not None:
            raise RuntimeError("unscale_ was called twice: call update() after each step()")
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        for gradient in gradients:
            if gradient.dtype == torch.float16:
                raise ValueError("expected fp32 gradients, got fp16: use MixedPrecisionOptimizer")
            gradient /= self.factor
        # The norm is inf or NaN if any number is. Checking each gradient would synchronise with the
        # GPU once per gradient. Without gradients it is on the CPU, where NCCL can't send it.
        overflow = (~get_total_norm(gradients, 1.0).isfinite()).float().to(parameters[0].device)
        if dist.is_initialized():  # an overflow in one rank's shard must stop the others
            dist.all_reduce(overflow, dist.ReduceOp.MAX, group=self.group)
        self.overflow = bool(overflow)

    def step(self, optimizer: Optimizer) -> None:
        """Call optimizer.step(), unless there was an overflow; call unscale_ first, if needed."""
        if self.overflow is None:
            self.unscale_(optimizer)
        if self.overflow:
            self.skipped += 1
        else:
            optimizer.step()

    def update(self) -> None:
        """Choose the scale of the next step. RuntimeError: called before unscale_() or step()."""
        if self.overflow is None:
            raise RuntimeError("update was called before step: no gradient has been looked at yet")
        self.good_steps = 0 if self.overflow else self.good_steps + 1
        if self.dynamic and self.overflow:
            self.factor /= 2
        elif self.dynamic and self.good_steps == self.growth_interval:
            self.factor, self.good_steps = self.factor * 2, 0
        self.overflow = None


class MixedPrecisionOptimizer(Optimizer):
    """An optimizer of 16-bit weights: `optimizer_cls` updates fp32 master copies of them.

    params: all of the model's, as for any optimizer. They become `dtype` in place; frozen ones get
    no master copy; buffers aren't cast. scaler: of the loss (None: dynamic for fp16; for others a
    constant scale of 1, which still skips steps that aren't finite). kwargs: for optimizer_cls.

    Ranks must start equal: call `broadcast_module` before this, and wrap the module after.
    """

    def __init__(
        self, params: Iterable, optimizer_cls: type, dtype=torch.float16, scaler=None, **kwargs
    ):
        fp16 = dtype == torch.float16
        initial = 2.0**16 if fp16 else 1.0
        self.scaler = scaler or LossScaler(initial, dynamic=fp16)
        self.scale = self.scaler.scale  # scale(loss) is what to call backward on
        self.dtype = dtype
        self.masters: dict[Tensor, Tensor] = {}  # {weight: its master copy}
        self.lost: dict[Tensor, Tensor] = {}  # {weight: its gradient's rounding error}
        super().__init__(params, {})  # calls add_param_group
        self.optimizer = optimizer_cls(self.param_groups, **kwargs)
        self._share()

    def _share(self) -> None:
        """Share the inner optimizer's groups, so that a scheduler of this one changes its rates."""
        inner = self.optimizer  # one list of groups for both: a scheduler changes it through ours
        self.param_groups = inner.param_groups
        self.state = inner.state
        self.defaults = inner.defaults

    def add_param_group(self, param_group: dict) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group["params"] = [self._to_16_bits(weight) for weight in group["params"]]

    def _to_16_bits(self, weight: Tensor) -> Tensor:
        """Convert the weight in place; return its master copy, or itself if it is frozen."""
        master = weight.detach().to(torch.float32, copy=True)
        weight.data = weight.data.to(self.dtype)
        if weight.requires_grad:
            self.masters[weight] = master
            weight.register_hook(lambda gradient: self._accumulate(weight, gradient))
        return self.masters.get(weight, weight)

    def _accumulate(self, weight: Tensor, gradient: Tensor) -> Tensor:
        """Add a micro-batch's gradient in fp32, before autograd adds it in 16 bits; return the sum.

        The sum is rounded to 16 bits; what that takes away is kept, and added with the next
        gradient.
        """
        if weight.grad is None:
            self.lost.pop(weight, None)
            return gradient
        total = weight.grad.float() + gradient + self.lost.get(weight, 0)
        weight.grad = None  # or autograd would add it to the total that is returned here
        rounded = total.to(weight.dtype)
        self.lost[weight] = total - rounded
        return rounded

    def unscale_(self) -> None:
        """Give each master copy its gradient, in fp32 and divided by the scale; once in a step."""
        for weight, master in self.masters.items():
            if weight.grad is not None:
                master.grad = weight.grad.to(torch.float32, copy=True)
        self.scaler.unscale_(self.optimizer)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Shrink this rank's unscaled gradients to `max_norm` at most; return the norm before."""
        if self.scaler.overflow is None:
            self.unscale_()
        return clip_grad_norm_(self.masters.values(), max_norm)

    @torch.no_grad()
    def step(self) -> None:
        """Update masters, unless a rank overflowed; round them into weights; adapt the scale."""
        if self.scaler.overflow is None:
            self.unscale_()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        # Rounded anew from fp32 each time: what rounding takes away isn't lost.
        for weight, master in self.masters.items():
            weight.copy_(master)
            master.grad = None
        self.lost.clear()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for weight in self.masters:
            zero = not set_to_none and weight.grad is not None
            weight.grad = weight.grad.zero_() if zero else None
        self.lost.clear()

    def state_dict(self) -> dict:
        """Return all that training resumes from to the bit; call after step(). Nothing is copied.

        Weights are there as master copies; save frozen ones, and buffers, with the model.
        """
        scaler = self.scaler.factor, self.scaler.good_steps
        masters = list(self.masters.values())
        return {"optimizer": self.optimizer.state_dict(), "masters": masters, "scaler": scaler}

    @torch.no_grad()
    def load_state_dict(self, state: dict) -> None:
        """Load what `state_dict` returned into trained weights, masters, optimizer and scaler."""
        self.optimizer.load_state_dict(state["optimizer"])
        self._share()
        self.scaler.factor, self.scaler.good_steps = state["scaler"]
        for weight, saved in zip(self.masters, state["masters"], strict=True):
            self.masters[weight].copy_(saved)
            weight.copy_(saved)
