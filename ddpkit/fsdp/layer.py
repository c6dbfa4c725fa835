"""ZeRO stage 3 for one layer: its weight is whole only while it computes.

Each rank keeps 1/W of a layer; it gathers, uses and frees the whole, in forward and in backward.

PyTorch's FSDP (`fully_shard`); DeepSpeed's stage 3. Rajbhandari et al. 2020. Notebook 07.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .. import transport as torchs


class GatherUseFree(torch.autograd.Function):
    """A linear layer for autograd, whose weight is whole only while it computes.

    apply(x, shard, layer). x: (rows, inputs). shard: this rank's part of weight and bias; backward
    returns the same part of their mean gradient. layer: the `ShardedLinear`, which does the
    messages. Kept until backward: only `x`.
    """

    @staticmethod
    def forward(ctx, x: Tensor, shard: Tensor, layer: "ShardedLinear") -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        return nn.functional.linear(x, *layer.gather())

    @staticmethod
    def backward(ctx, gradient: Tensor):
        (x,) = ctx.saved_tensors
        layer = ctx.layer
        weight = layer.gather()[0]  # once more: forward has freed it
        mean = gradient / dist.get_world_size(layer.group)  # summed over the ranks: the mean
        to_shard = layer.reduce_scatter([mean.T @ x, mean.sum(0)])
        return gradient @ weight, to_shard, None


class ShardedLinear(nn.Module):
    """A Linear of which every rank keeps 1/W of weight and bias.

    linear: all ranks get parts of the first rank's; drop it afterwards, or no memory is saved.
    transport: see `ddpkit.transport`. After backward `shard.grad` is the mean over the ranks, and
    any elementwise optimizer may update `shard`.

    Cost per rank: 3(W-1)/W of the parameters sent in forward and backward; the whole weight is in
    memory only while it computes. Rajbhandari et al. 2020, sections 5.3 and 7.2.2. Notebook 07.
    """

    def __init__(self, linear: nn.Linear, group: ProcessGroup | None = None, transport=torchs):
        super().__init__()
        self.group = group
        self.transport = transport
        values = [parameter.detach() for parameter in linear.parameters()]
        self.shapes = [value.shape for value in values]
        # The first rank's values, so that all shards are parts of one layer.
        flat = self.flatten(values)
        dist.broadcast(flat, group=group, group_src=0)
        self.shard = nn.Parameter(torchs.shard(flat, group).clone())

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's outputs, (rows, ..., outputs), for x, (rows, ..., inputs)."""
        rows = x.flatten(0, -2)
        out = GatherUseFree.apply(rows, self.shard, self)
        return out.unflatten(0, x.shape[:-1])

    def gather(self) -> list[Tensor]:
        """All-gather and return [weight, bias], or [weight]; drop them to free the memory."""
        # Only part number `rank` of `flat` need be right: the others are overwritten.
        flat = self.shard.detach().repeat(dist.get_world_size(self.group))
        self.transport.start_all_gather(flat, self.group).wait()
        numels = [shape.numel() for shape in self.shapes]
        parts = flat[: sum(numels)].split(numels)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def reduce_scatter(self, gradients: list[Tensor]) -> Tensor:
        """Sum the gradients of weight and bias over the ranks; return this rank's part, a copy."""
        flat = self.flatten(gradients)
        self.transport.start_reduce_scatter(flat, self.group).wait()
        return torchs.shard(flat, self.group).clone()  # a view would keep all of `flat` in memory

    def flatten(self, tensors: list[Tensor]) -> Tensor:
        """Return weight and, if there is one, bias end to end, then zeros to a multiple of W."""
        tensors = tensors[: len(self.shapes)]  # a layer without bias has no gradient of one
        flat = torch.cat([part.flatten() for part in tensors])
        padding = -len(flat) % dist.get_world_size(self.group)
        return nn.functional.pad(flat, (0, padding))
