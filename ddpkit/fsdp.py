"""ZeRO's stage 3: no rank has all parameters.

Each keeps 1/W of a layer, and gathers, uses and frees the whole, in forward and in backward.

    stage    each rank keeps 1/W of                        sent by each rank in a step
    0        nothing                                       2(W-1)/W of the parameters
    1        the optimizer's state (`ddpkit.zero`)         2(W-1)/W
    2        and of the gradients                          (A+1)(W-1)/W with A micro-batches
    3        and of the parameters                         3(W-1)/W with one micro-batch

PyTorch's FSDP (`fully_shard`); DeepSpeed's stage 3. Rajbhandari et al. 2020. Notebook 07.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from . import transport as torchs


class ShardedLinear(nn.Module):
    """A Linear of which every rank keeps 1/W of weight and bias.

    linear: where the values come from, on the group's first rank; let go of it afterwards.
    transport: see `ddpkit.transport`. After backward `shard.grad` is the mean over the ranks, and
    any elementwise optimizer may update `shard`.

    Cost per rank: 3(W-1)/W of the parameters sent in forward and backward; the whole layer is in
    memory only while it computes. Rajbhandari et al. 2020, sections 5.3 and 7.2.2. Notebook 07.
    """

    def __init__(self, linear: nn.Linear, group: ProcessGroup | None = None, transport=torchs):
        super().__init__()
        self.group, self.transport = group, transport
        self.shapes = [parameter.shape for parameter in linear.parameters()]
        flat = self.zeros_like(linear.weight)
        for value, parameter in zip(self.split(flat), linear.parameters(), strict=True):
            value.copy_(parameter.detach())
        dist.broadcast(flat, group=group, group_src=0)
        self.shard = nn.Parameter(torchs.shard(flat, group).clone())

    def zeros_like(self, x: Tensor) -> Tensor:
        """A flat tensor for weight, bias and padding, of the dtype of `x`."""
        numel = sum(shape.numel() for shape in self.shapes)
        return x.detach().new_zeros(numel + -numel % dist.get_world_size(self.group))

    def split(self, flat: Tensor) -> list[Tensor]:
        """The views of `flat` that are weight and bias."""
        numels = [shape.numel() for shape in self.shapes]
        parts = flat[: sum(numels)].split(numels)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def gather(self) -> list[Tensor]:
        """Weight and bias, whole, until you let go of them."""
        flat = self.zeros_like(self.shard)
        torchs.shard(flat, self.group).copy_(self.shard.detach())
        self.transport.start_all_gather(flat, self.group).wait()
        return self.split(flat)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., inputs). Returns (..., outputs)."""
        return _GatherUseFree.apply(x, self.shard, self)


class _GatherUseFree(torch.autograd.Function):
    """What autograd keeps until backward is `x` and the layer, whose weight is only a shard."""

    @staticmethod
    def forward(ctx, x: Tensor, shard: Tensor, layer: ShardedLinear) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        return nn.functional.linear(x, *layer.gather())

    @staticmethod
    def backward(ctx, gradient: Tensor):
        (x,), layer = ctx.saved_tensors, ctx.layer
        weight = layer.gather()[0]
        flat = layer.zeros_like(weight)
        to_weight, *to_bias = layer.split(flat)
        rows = gradient.flatten(0, -2) / dist.get_world_size(layer.group)  # so sums are means
        torch.mm(rows.T, x.flatten(0, -2), out=to_weight)
        for bias in to_bias:
            torch.sum(rows, 0, out=bias)
        layer.transport.start_reduce_scatter(flat, layer.group).wait()
        return gradient @ weight, torchs.shard(flat, layer.group), None
