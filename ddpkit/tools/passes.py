"""Count the calls and bytes of a layer's passes, between barriers. Notebooks 07 and 11."""

from collections import Counter

import torch.distributed as dist
from torch import Tensor, nn

from .units import size


def passes(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Run a model forward and backward, each after a barrier; return [its output, x.grad].

    The loss is out.square().sum(). The barriers let `between_barriers` tell the passes apart.
    """
    dist.barrier()
    out = model(x)
    dist.barrier()
    out.square().sum().backward()
    return [out.detach(), x.grad]


def between_barriers(run) -> list[str]:
    """List, for each barrier of rank 0, the calls that follow it: '2 × all_reduce of 96 B'."""
    sections: list[Counter] = []
    for record in run.wire[0]:
        if record.op == "barrier":
            sections.append(Counter())
        elif sections:
            sections[-1][f"{record.op} of {size(record.bytes)}"] += 1
    said = []
    for section in sections:
        said.append(", ".join(f"{many} × {call}" for call, many in section.items()))
    return said


def ring_bytes(run) -> float:
    """Compute the bytes that rank 0 sends after its first barrier, as if all calls were rings."""
    records = run.wire[0]
    first = next(at for at, record in enumerate(records) if record.op == "barrier")
    return sum(sent_by_all(record, 0, len(run.wire)) for record in records[first:])


def sent_by_all(record, rank: int, world_size: int) -> float:
    """Compute this rank's share of the bytes that all ranks send in a call, if it uses a ring.

    Only the sum over the ranks is meant: all of a broadcast is counted at its root. record: one of
    `run.wire[rank]`; for an all_gather, its bytes are those of the rank's own part.
    """
    others = world_size - 1
    shares = {"send": 1, "recv": 0, "barrier": 0, "broadcast": others * (record.peer == rank)}
    shares |= {"all_reduce": 2 * others / world_size, "reduce_scatter": others / world_size}
    return (shares | {"all_gather": others})[record.op] * record.bytes
