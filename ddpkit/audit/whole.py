"""Whole tensors from the parts that ranks hold: split layers, FSDP, DTensors, ZeRO's shards.

Parts travel by collective calls: every rank of the group that shares the tensor must call.
"""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from ..fsdp import FSDP
from ..fsdp.by_hand import gather_rows
from ..tensor_parallel.split import SplitLayer, join
from ..zero import Bucket, ZeroOptimizer


def whole_tensor(root: nn.Module, path: str, value: Tensor | None) -> Tensor | None:
    """Return a parameter, or its gradient, whole, put together from the parts of all ranks.

    path: the parameter's name in `root`. value: this rank's part; None, on all ranks, gives None. A
    tensor that isn't shared is returned itself. A split layer inside `FSDP` is put together twice.
    """
    if value is None:
        return None
    if isinstance(root, FSDP):
        shape = root.shapes()[path.removeprefix("module.")]
        length = shape[0] if shape else 1  # a scalar is one row
        value = gather_rows(value, length, root.group).view(shape)
    owner, _, name = path.rpartition(".")
    layer = root.get_submodule(owner)
    if isinstance(layer, SplitLayer) and name in layer.split:
        dim, hands = layer.split[name]
        return join(value, dim, hands, layer.group)
    if hasattr(value, "full_tensor"):  # a DTensor: FSDP2, PyTorch's tensor parallelism
        return value.full_tensor()
    return value


@contextlib.contextmanager
def in_shards(roots: list[nn.Module]) -> Iterator[None]:
    """Let FSDP2's modules have their shards, not whole weights, perhaps of another dtype.

    Those that had whole weights have them again afterwards. All ranks of a module must call.
    """
    units = [x for root in roots for x in root.modules() if isinstance(x, FSDPModule)]
    were_whole = []
    for unit in units:
        before = set(unit.parameters())
        unit.reshard()
        if before != set(unit.parameters()):
            were_whole.append(unit)
    yield
    for unit in were_whole:
        unit.unshard()


def parts_of_optimizer(optimizer: Optimizer) -> dict[nn.Parameter, Tensor]:
    """Return {parameter: its whole mean gradient} of a `ZeroOptimizer`, and {} of any other.

    There `.grad` is None once a gradient is sent. ValueError: a parameter has no gradient.
    """
    if not isinstance(optimizer, ZeroOptimizer):
        return {}
    optimizer.synchronize()
    found = {}
    for bucket in optimizer.buckets:
        mean = gather_shard(bucket, bucket.shard.grad)
        found |= dict(zip(bucket.parameters, bucket.split(mean), strict=True))
    return found


def gather_shard(bucket: Bucket, shard: Tensor) -> Tensor:
    """All-gather a bucket from the ranks' shards, each 1-D; return it, 1-D, padding included."""
    flat = shard.new_zeros(bucket.numel)
    mine = flat.chunk(bucket.numel // len(shard))[0]
    parts = [torch.empty_like(mine) for _ in range(bucket.numel // len(shard))]
    dist.all_gather(parts, shard.contiguous(), group=bucket.group)
    return torch.cat(parts)
