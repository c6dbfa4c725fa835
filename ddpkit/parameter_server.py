"""Data parallelism 1.0: rank 0 has the weights and the optimizer; the others compute gradients.

    if dist.get_rank() == 0:
        serve(model, optimizer, steps)              # or serve_asynchronously
    for inputs, targets in batches:                 # of a worker: `steps` batches of its own
        model.zero_grad()
        mean_loss(model(inputs), targets).backward()
        push_and_pull(model)

All gradients are sent as one tensor, and so are all weights: Φ bytes.

    per step                      in          out         optimizer state
    server                        (W-1)Φ      (W-1)Φ      all of it
    each of the W-1 workers       Φ           Φ           none
    each of W ranks in a ring     2(W-1)/W Φ  2(W-1)/W Φ  all of it

The server's wire carries 2(W-1)Φ bytes a step, more with every worker; in a ring all-reduce
(notebook 02) no rank carries more than 4Φ.

Only parameters with `requires_grad` are sent, all of one dtype, a weight used in two places once.
All parameters and buffers must be equal at the start (`data_parallel.broadcast_module`); what a
worker's buffers learn (batch norm's statistics) stays there.

Li et al. 2014; PyTorch has it as an RPC tutorial only. Notebook 03.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from .tools.checks import check_counts
from .tools.views import views


def push_and_pull(module: nn.Module) -> None:
    """Send rank 0 the gradients, after backward on a worker, and take the weights it sends back.

    The weights become views of one tensor. The worker is the same for both kinds of server.
    AttributeError: a trained parameter has no gradient. Cost of a step: Φ out, Φ in. Notebook 03.
    """
    trained = trained_in(module)
    # Gradients out, all in one piece; weights in, by the same layout.
    dist.send(parameters_to_vector(p.grad for p in trained), 0)
    weights = torch.empty_like(parameters_to_vector(trained))
    dist.recv(weights, 0)
    vector_to_parameters(weights, trained)


def serve(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Serve on rank 0: in each step, wait for every worker, then follow their mean gradient.

    module: as on the workers; its weights are trained in place. optimizer: of its parameters.
    ValueError: no workers.

    The weights are those of one process with all the data, if batches are equally long; a step
    lasts as long as the slowest worker's. Cost of a step: (W-1)Φ in, (W-1)Φ out, one worker after
    the other. Notebook 03.
    """
    trained = trained_in(module)
    workers = range(1, dist.get_world_size())
    check_counts(workers=len(workers))
    for _ in range(steps):
        # Gather: the server's wire carries one gradient after the other.
        total = torch.zeros_like(parameters_to_vector(trained))
        for worker in workers:
            gradient = torch.empty_like(total)
            dist.recv(gradient, worker)
            total += gradient
        follow(total / len(workers), trained, optimizer)
        # Scatter: every worker goes on from the same weights.
        for worker in workers:
            dist.send(parameters_to_vector(trained), worker)


class Update(NamedTuple):
    """A step of the asynchronous server.

    worker: the rank that sent the gradient. staleness: the number of updates, all by other workers'
    gradients, since it got the weights with which it computed this one.
    """

    worker: int
    staleness: int


def serve_asynchronously(
    module: nn.Module, optimizer: torch.optim.Optimizer, steps: int
) -> list[Update]:
    """Serve on rank 0, first come, first served: follow each gradient as soon as it arrives.

    module, optimizer: as in `serve`. steps: of each worker. Returns the updates in their order.
    The backend must be able to receive from whichever rank sends first: Gloo can, NCCL can't.

    No worker waits for a slow one. But while a worker computes, others change the weights: its
    gradient is stale, of weights `staleness` updates ago. If W-1 workers take turns, each is W-2
    updates late after its first turn.
    Cost of an update: Φ in, Φ out. Notebook 03.
    """
    trained = trained_in(module)
    world_size = dist.get_world_size()
    updates: list[Update] = []
    pulled = [0] * world_size  # by worker: the updates that are in its weights
    # One gradient at a time; no worker is waited for in particular.
    for _ in range(steps * (world_size - 1)):
        gradient = torch.empty_like(parameters_to_vector(trained))
        worker = dist.recv(gradient)  # from any rank: which one, it returns
        updates.append(Update(worker, staleness=len(updates) - pulled[worker]))
        follow(gradient, trained, optimizer)
        dist.send(parameters_to_vector(trained), worker)
        pulled[worker] = len(updates)
    return updates


@torch.no_grad()
def follow(gradient: Tensor, trained: list[Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Step with a 1-D gradient of all `trained` parameters; its parts become their `.grad`."""
    for parameter, part in zip(trained, views(gradient, trained), strict=True):
        parameter.grad = part  # a view: nothing is copied
    optimizer.step()


def trained_in(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]
