"""Clip a gradient of which each rank has a part: for every stage of ZeRO, and for FSDP."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup


def clip_grad_norm_(
    shards: list[Tensor], max_norm: float, group: ProcessGroup | None = None
) -> Tensor:
    """Scale a gradient, in place, to a norm of at most `max_norm`; return the norm that it had.

    shards: this rank's parts of it; all ranks' together are the gradient. PyTorch's function of the
    same name would take them for the whole. A rank without any gives an empty tensor, of the
    others' dtype and kind of device. In fp16 the norm of one rank's shards overflows above 65,504,
    as in torch, and the gradient becomes 0. Cost: one number all-reduced. Notebook 07.
    """
    norm = nn.utils.get_total_norm(shards)
    norm = norm.to(torch.promote_types(norm.dtype, torch.float32))  # the square of 256 isn't fp16
    # Squares add up over shards, lengths don't.
    squared = norm**2
    dist.all_reduce(squared, group=group)
    norm = squared.sqrt()
    for shard in shards:
        shard *= (max_norm / (norm + 1e-6)).clamp(max=1)  # as in torch
    return norm
