"""Whole tensors from the parts that ranks hold: split layers, FSDP, DTensors, ZeRO's shards.

All are collectives: every rank of the group that shares the tensor must call.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..fsdp import FSDP
from ..fsdp.by_hand import gather_rows
from ..tensor_parallel.split import SplitLayer, join
from ..zero import Bucket, ZeroOptimizer


def whole_tensor(root: nn.Module, path: str, value: Tensor | None) -> Tensor | None:
    """Put a parameter, or its gradient, together. path: the parameter's name in `root`."""
    if value is None:
        return None
    owner, _, name = path.rpartition(".")
    layer = root.get_submodule(owner)
    if isinstance(layer, SplitLayer) and name in layer.split:
        dim, hands = layer.split[name]
        return join(value, dim, hands, layer.group)
    if isinstance(root, FSDP):
        shape = root.shapes()[path.removeprefix("module.")]
        length = shape[0] if shape else 1  # a scalar is one row
        return gather_rows(value, length, root.group).view(shape)
    if hasattr(value, "full_tensor"):  # a DTensor: FSDP2, PyTorch's tensor parallelism
        return value.full_tensor()
    return value


def parts_of_optimizer(optimizer: Optimizer) -> dict[nn.Parameter, Tensor]:
    """{parameter: its mean gradient}, where the optimizer has the gradients and `.grad` doesn't."""
    if not isinstance(optimizer, ZeroOptimizer):
        return {}
    optimizer.synchronize()
    found = {}
    for bucket in optimizer.buckets:
        mean = gather_shard(bucket, bucket.shard.grad)
        found |= dict(zip(bucket.parameters, bucket.split(mean), strict=True))
    return found


def gather_shard(bucket: Bucket, shard: Tensor) -> Tensor:
    """All-gather what this rank has of a bucket: 1-D, as long as the bucket."""
    flat = shard.new_zeros(bucket.numel)
    mine = flat.chunk(bucket.numel // len(shard))[0]
    parts = [torch.empty_like(mine) for _ in range(bucket.numel // len(shard))]
    dist.all_gather(parts, shard.contiguous(), group=bucket.group)
    return torch.cat(parts)
