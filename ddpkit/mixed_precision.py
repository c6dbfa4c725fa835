"""Training in 16 bits: weights, activations and gradients of half the bytes, and what keeps the training from failing.

Two things get lost in 16 bits, and each has its remedy:

    lost                                                        remedy
    gradients below 6e-8, which fp16 rounds to zero             LossScaler: a larger loss has larger gradients
    updates below 2⁻¹² of a weight (bf16: 2⁻⁹), rounded away    MixedPrecisionOptimizer: they add up in an fp32 copy

A loop of it, with several micro-batches and several ranks if you like:

    optimizer = MixedPrecisionOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    model = BucketedDDP(model)                   # after the optimizer, which makes 16-bit weights of the model's
    ...
    optimizer.scale(loss).backward()
    model.synchronize()                          # gradients travel in 16 bits
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()                             # or, on every rank, none: if a gradient of any rank overflowed
    optimizer.zero_grad()

Bytes for each parameter, with AdamW: weight 2, gradient 2, fp32 copy 4, two moments 8; 16 in all.

Micikevicius et al. 2018 (Mixed Precision Training). Notebook 05.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.utils import clip_grad_norm_, get_total_norm


class LossScaler:
    """Multiplies the loss, and so all gradients, while they are in fp16; divides them again, in fp32, before the step.

    It has the four calls of torch.amp.GradScaler, here for one optimizer whose gradients are fp32, under autocast:

        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)      # only if somebody looks at the gradients before the step, as clipping does
        scaler.step(optimizer)          # not taken if a gradient is inf or NaN
        scaler.update()

    init_scale: what the loss is multiplied by at first. A power of two costs a gradient no digit.
    dynamic: try how large it may be. A step with an overflow is skipped, and multiplies the scale by `backoff_factor`,
    though not below `min_scale`; `growth_interval` steps in a row without one multiply it by `growth_factor`. Static
    (False), the scale stays; overflows are skipped all the same.
    group: the ranks that train together (None: all), if there are any. Either all of them step or none does.

    skipped: how many steps were.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float = 1.0,
        dynamic: bool = True,
        group: ProcessGroup | None = None,
    ):
        if not (growth_factor > 1 > backoff_factor > 0 and growth_interval >= 1 and init_scale >= min_scale > 0):
            raise ValueError(
                "expected growth_factor > 1 > backoff_factor > 0, growth_interval >= 1 and init_scale >= min_scale > 0,"
                f" got {growth_factor=}, {backoff_factor=}, {growth_interval=}, {init_scale=}, {min_scale=}"
            )
        self.growth_factor, self.backoff_factor, self.growth_interval = growth_factor, backoff_factor, growth_interval
        self.min_scale, self.dynamic, self.group = min_scale, dynamic, group
        self._scale, self._good_steps, self.skipped = init_scale, 0, 0
        self._begin()

    def _begin(self) -> None:
        """The next step: nothing is known of its gradients."""
        self.overflow: bool | None = None
        self._stepped = False

    def get_scale(self) -> float:
        return self._scale

    def scale(self, loss: Tensor) -> Tensor:
        """`loss`, multiplied. ValueError: it is fp16, in which it would overflow itself."""
        if loss.dtype == torch.float16:
            raise ValueError(
                "expected a loss in fp32, got one in fp16, where 65504 is the largest number: compute the loss from "
                "logits.float(), as ddpkit.models.mean_loss does"
            )
        return loss * self._scale

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide its gradients in place, and find out whether one of them, on any rank, is inf or NaN: `overflow`.

        Gradients so large that their sum is inf count as overflow, too; torch's GradScaler would step along them.
        RuntimeError: they were divided already. ValueError: they are fp16 and would round to zero after all.

        Cost: the gradients are read twice and written once, one all-reduce of one float, one wait for the device.
        """
        if self.overflow is not None:
            raise RuntimeError("unscale_ ran twice: the gradients are divided already. Call update() after each step.")
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if any(gradient.dtype == torch.float16 for gradient in gradients):
            raise ValueError(
                "expected gradients in fp32, got fp16: the small ones, which the scale has saved, would round to zero. "
                "MixedPrecisionOptimizer divides them in fp32."
            )
        for gradient in gradients:
            gradient /= self._scale
        total = get_total_norm(gradients, 1.0)  # to look for the largest takes a CPU ten times as long
        self.overflow = self._agree(~total.isfinite())

    def _agree(self, overflow: Tensor) -> bool:
        """Whether it is so on any rank. After an all-reduce of gradients all have the same inf; of shards, only one."""
        if dist.is_initialized():
            anywhere = overflow.float()
            dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=self.group)
            overflow = anywhere
        return bool(overflow)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """optimizer.step(), unless there was an overflow; unscales before, if nobody has.

        RuntimeError: it ran already since the last update().
        """
        if self._stepped:
            raise RuntimeError("step ran twice: the scale doesn't know of the first. Call update() after each step.")
        if self.overflow is None:
            self.unscale_(optimizer)
        self._stepped = True
        if self.overflow:
            self.skipped += 1
        else:
            optimizer.step()

    def update(self) -> None:
        """Choose the scale of the next step. RuntimeError: nothing is known of this one's gradients."""
        if self.overflow is None:
            raise RuntimeError("update ran before step: whether there was an overflow is not known. Call step() first.")
        if self.dynamic and self.overflow:
            self._scale = max(self._scale * self.backoff_factor, self.min_scale)
            self._good_steps = 0
        elif self.dynamic:
            self._good_steps += 1
            if self._good_steps == self.growth_interval:
                self._scale *= self.growth_factor
                self._good_steps = 0
        self._begin()

    def state_dict(self) -> dict[str, float]:
        """What changes from step to step. Save it between update() and the next scale()."""
        return {"scale": self._scale, "good_steps": self._good_steps, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self._scale, self._good_steps, self.skipped = state["scale"], state["good_steps"], state["skipped"]
        self._begin()


class MixedPrecisionOptimizer(torch.optim.Optimizer):
    """Trains a model whose weights are 16-bit, and updates a copy of them in fp32, the master copy.

    params: as for any optimizer, groups too; all the model's, so that none stays behind in fp32. They are turned to
    `dtype` in place. Those that are trained get a master copy; freeze before. Buffers are left as they are.
    optimizer_cls, kwargs: what updates the master copy, and keeps its moments in fp32.
    scaler: of the loss (None: a dynamic one for fp16; none is needed for the others, with the exponents of fp32, and
    one that multiplies by 1 skips what isn't finite).

    Ranks must begin alike, also in the digits that 16 bits don't show: `broadcast_module` before, and wrap the module
    after, when its parameters have their dtype. ValueError at the first step: weights were overwritten in between.

    Micro-batches add up in fp32. `.grad` has the sum, rounded, to travel; what rounding took off waits for the next
    micro-batch, and is 4 bytes more for each parameter, from the second one until the step.

    `param_groups` are those of optimizer_cls, with master copies as "params": a scheduler may change them.
    """

    def __init__(
        self,
        params: Iterable,
        optimizer_cls: type[torch.optim.Optimizer],
        dtype: torch.dtype = torch.float16,
        scaler: LossScaler | None = None,
        **kwargs,
    ):
        if not dtype.is_floating_point:
            raise ValueError(f"expected a dtype to train in, got {dtype}: take torch.float16 or torch.bfloat16")
        dynamic = dtype == torch.float16
        self.scaler = scaler or LossScaler(2.0**16 if dynamic else 1.0, dynamic=dynamic)
        self.dtype = dtype
        self.masters: dict[Tensor, Tensor] = {}  # of each weight that is trained
        self._lost: dict[Tensor, Tensor] = {}  # of a sum of gradients, by rounding
        self._weights_checked = False
        super().__init__(params, {})  # calls add_param_group
        self.optimizer = optimizer_cls(self.param_groups, **kwargs)
        self._share()

    def _share(self) -> None:
        """Show the groups, the moments and the defaults of the optimizer inside as our own."""
        inside = self.optimizer
        self.param_groups, self.state, self.defaults = inside.param_groups, inside.state, inside.defaults

    def add_param_group(self, param_group: dict) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group["params"] = [self._halve(weight) for weight in group["params"]]

    def _halve(self, weight: Tensor) -> Tensor:
        """Turn it to 16 bits in place. Returns the master copy; of what isn't trained, itself."""
        if weight in self.masters:
            raise ValueError(f"a parameter of shape {tuple(weight.shape)} is in two groups: leave it in one")
        master = weight.detach().to(torch.float32, copy=True)
        weight.data = weight.data.to(self.dtype)
        if not weight.requires_grad:
            return weight
        self.masters[weight] = master
        weight.register_hook(lambda gradient: self._add_up(weight, gradient))
        return master

    def _add_up(self, weight: Tensor, gradient: Tensor) -> Tensor:
        """Before autograd adds `gradient` to weight.grad: do it in fp32, and return the sum, rounded, as all of it."""
        if weight.grad is None:
            self._lost.pop(weight, None)
            return gradient
        total = weight.grad.float() + gradient
        if weight in self._lost:
            total += self._lost[weight]
        weight.grad = None  # else autograd would add the sum to it
        rounded = total.to(weight.dtype)
        self._lost[weight] = total - rounded
        return rounded

    def scale(self, loss: Tensor) -> Tensor:
        """What to call backward on. ValueError: see LossScaler."""
        return self.scaler.scale(loss)

    def unscale_(self) -> None:
        """Give each master copy its gradient, in fp32 and divided by the scale. RuntimeError: it has it already."""
        for weight, master in self.masters.items():
            if self.scaler.overflow is None and weight.grad is not None:
                master.grad = weight.grad.to(torch.float32, copy=True)
        self.scaler.unscale_(self.optimizer)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Shrink the gradients of all master copies together to a 2-norm of at most `max_norm`. Returns what it was.

        After synchronize(), on every rank; the norm is then the same on all.
        """
        if self.scaler.overflow is None:
            self.unscale_()
        return clip_grad_norm_(self.masters.values(), max_norm)

    @torch.no_grad()
    def step(self) -> None:
        """Update the master copies and round them into the weights, unless a gradient of any rank overflowed."""
        if not self._weights_checked:
            self._check_weights()
        if self.scaler.overflow is None:
            self.unscale_()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        for weight, master in self.masters.items():
            weight.copy_(master)
            master.grad = None
        self._lost.clear()

    def _check_weights(self) -> None:
        for weight, master in self.masters.items():
            if not torch.equal(weight, master.to(self.dtype)):
                where = f" on rank {dist.get_rank()}" if dist.is_initialized() else ""
                raise ValueError(
                    f"expected weights that are their master copies, rounded, got others{where} in a parameter of "
                    f"shape {tuple(weight.shape)}: they were overwritten after the optimizer was made. Load weights "
                    "before, and let ranks begin alike with ddpkit.ddp.broadcast_module(model) before."
                )
        self._weights_checked = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of the weights. Gradients of the master copies live in a step only."""
        for weight in self.masters:
            if set_to_none:
                weight.grad = None
            elif weight.grad is not None:
                weight.grad.zero_()
        self._lost.clear()

    def state_dict(self) -> dict:
        """All to go on from to the bit, the weights included: they are the master copies, rounded.

        As in torch, tensors are not copied. Save it between a step and the next backward.
        """
        masters = list(self.masters.values())
        return {"optimizer": self.optimizer.state_dict(), "masters": masters, "scaler": self.scaler.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict) -> None:
        """Go on from it, weights included. ValueError: it is of other parameters."""
        self.optimizer.load_state_dict(state["optimizer"])
        self._share()
        self.scaler.load_state_dict(state["scaler"])
        for (weight, master), saved in zip(self.masters.items(), state["masters"], strict=True):
            master.copy_(saved)
            weight.copy_(master)
