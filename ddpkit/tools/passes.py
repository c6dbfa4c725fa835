"""A layer's forward and backward between barriers, and what each of the two called. Notebook 11."""

from collections import Counter

import torch.distributed as dist
from torch import Tensor, nn

from .units import size


def passes(model: nn.Module, x: Tensor) -> list[Tensor]:
    """On a rank: barrier, forward, barrier, backward of the squares' sum. [out, gradient of x]."""
    dist.barrier()
    out = model(x)
    dist.barrier()
    out.square().sum().backward()
    return [out.detach(), x.grad]


def between_barriers(run) -> list[str]:
    """What rank 0 called after its first barrier, after its second, …: '2 × all_reduce of 96 B'."""
    sections: list[Counter] = []
    for record in run.wire[0]:
        if record.op == "barrier":
            sections.append(Counter())
        elif sections:
            sections[-1][f"{record.op} of {size(record.bytes)}"] += 1
    said = []
    for each in sections:
        said.append(", ".join(f"{many} × {call}" for call, many in each.items()))
    return said


def ring_bytes(run) -> float:
    """What rank 0 sends after its first barrier, if each collective goes round a ring."""
    world_size, records = len(run.wire), run.wire[0]
    first = next(at for at, record in enumerate(records) if record.op == "barrier")
    part = (world_size - 1) / world_size
    shares = {"all_reduce": 2 * part, "reduce_scatter": part, "all_gather": world_size - 1}
    return sum(shares.get(record.op, 0) * record.bytes for record in records[first:])
