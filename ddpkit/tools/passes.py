"""Count the collective calls and bytes of a layer's passes. Notebooks 07 and 11.

A pass is the forward or the backward; barriers tell the passes apart in a run's records.
"""

from collections import Counter

import torch.distributed as dist
from torch import Tensor, nn

from .units import size


def passes(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Run a model forward and backward, each after a barrier; return [its output, x.grad].

    The loss is out.square().sum(). By the barriers, `between_barriers` tells the calls of the two
    passes apart. x must be a leaf that requires a gradient, otherwise x.grad is None. Gradients
    are added to those that x and the parameters have already.
    """
    dist.barrier()
    out = model(x)
    dist.barrier()
    out.square().sum().backward()
    return [out.detach(), x.grad]


def between_barriers(run) -> list[str]:
    """Return, for each barrier of rank 0, the calls up to the next: '2 × all_reduce of 96 B'.

    Equal calls are counted, and different ones joined by a comma; '' if there are none. Calls
    before the first barrier are left out.

    run: what `launch` returned.
    """
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
    """Return the bytes that rank 0 sends after its first barrier, as if every call used a ring.

    A broadcast counts with the bytes that all ranks send if rank 0 is its root, and otherwise with
    none. Every call counts as one of all ranks, also in a smaller group.

    run: what `launch` returned. StopIteration: rank 0 has no barrier. KeyError: see `sent_by_all`.
    """
    records = run.wire[0]
    first = next(at for at, record in enumerate(records) if record.op == "barrier")
    return sum(sent_by_all(record, 0, len(run.wire)) for record in records[first:])


def sent_by_all(record, rank: int, world_size: int) -> float:
    """Return this rank's share of the bytes that all ranks send in one call, if it uses a ring.

    Only the sum over the ranks has a meaning: all of a broadcast is counted at its root.

    record: one of `run.wire[rank]`. In an all_gather its bytes are those of the rank's own part.
    KeyError: an operation that isn't counted here, such as all_to_all.
    """
    others = world_size - 1
    shares = {"send": 1, "recv": 0, "barrier": 0, "broadcast": others * (record.peer == rank)}
    shares |= {"all_reduce": 2 * others / world_size, "reduce_scatter": others / world_size}
    return (shares | {"all_gather": others})[record.op] * record.bytes
