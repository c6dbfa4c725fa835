"""Data parallelism 1.0: rank 0 has the weights and the optimizer; the others compute gradients.

    if dist.get_rank() == 0:
        serve(model, optimizer)                     # or serve_asynchronously
    else:
        work(model, lambda step: loss(model(inputs[step]), targets[step]), steps=len(inputs))

A worker's step: compute gradients on its own data, push them to the server, pull the weights that
the server makes of them. All gradients are sent as one tensor, and so are all weights: Φ bytes. The
server knows beforehand how many steps each worker has, so nobody has to say that it is done.

    per step                      in          out         optimizer state
    server                        (W-1)Φ      (W-1)Φ      all of it
    each of the W-1 workers       Φ           Φ           none
    each of W ranks in a ring     2(W-1)/W Φ  2(W-1)/W Φ  all of it

The server's wire carries 2(W-1)Φ bytes a step, more with every worker; in a ring all-reduce
(notebook 02) no rank carries more than 4Φ.

Only parameters with `requires_grad` are sent each step, all of one dtype, a weight used in two
places once. Frozen parameters and buffers come from the server at the start; what a worker's
buffers learn afterwards (batch norm's statistics) stays there.

Li et al. 2014; PyTorch has it as an RPC tutorial only. Notebook 03.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from .data_parallel import broadcast_module, check_gradients

SERVER = 0


class Update(NamedTuple):
    """A step of the asynchronous server.

    worker: whose gradient it was. staleness: others' updates since that worker pulled its weights.
    """

    worker: int
    staleness: int


def serve(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Serve on rank 0: in each step, wait for every worker, then follow their mean gradient.

    module: as on the workers; its weights are trained in place. optimizer: of its parameters.
    A worker that has made all its steps no longer counts; the others go on without it.
    ValueError, on every rank: not rank 0 alone serves, no workers, different modules.

    The same weights as one process with all the data, and as long a step as the slowest worker's.
    Cost of a step: (W-1)Φ in, (W-1)Φ out, one worker after the other. Notebook 03.
    """
    steps = _begin(module, None)
    for step in range(max(steps.values())):
        busy = [worker for worker in steps if step < steps[worker]]
        total = torch.zeros_like(_weights(module))
        for worker in busy:
            gradient = torch.empty_like(total)
            dist.recv(gradient, worker)
            total += gradient
        _follow(total / len(busy), module, optimizer)
        for worker in busy:
            dist.send(_weights(module), worker)


def serve_asynchronously(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[Update]:
    """Serve on rank 0, first come, first served: follow each gradient as soon as it is there.

    module, optimizer, ValueError: as in `serve`. Returns the updates in their order.
    The backend must be able to receive from whoever sends first: Gloo can, NCCL can't.

    Nobody waits for a slow worker. But while a worker computes, others change the weights: its
    gradient is stale, of weights `staleness` updates ago. W-1 workers who take turns are W-2
    updates late, but for the first turn.
    Cost of an update: Φ in, Φ out. Notebook 03.
    """
    left = _begin(module, None)
    gradient = torch.empty_like(_weights(module))
    updates: list[Update] = []
    pulled = dict.fromkeys(left, 0)  # by worker: how many updates its weights have seen
    while max(left.values()) > 0:
        worker = dist.recv(gradient)
        updates.append(Update(worker, staleness=len(updates) - pulled[worker]))
        _follow(gradient, module, optimizer)
        dist.send(_weights(module), worker)
        pulled[worker] = len(updates)
        left[worker] -= 1
    return updates


def work(module: nn.Module, loss_of: Callable[[int], Tensor], steps: int) -> list[float]:
    """Be a worker, on any rank but 0: `steps` times compute a gradient, push it, pull new weights.

    module: as on the server; overwritten with the server's parameters and buffers at the start,
    with its weights after each step. loss_of: called with the number of the step, returns the loss
    of `module` on this worker's data. steps: may differ between workers, and be 0.
    Returns the losses. ValueError, on every rank: as in `serve`; on this rank: a weight without a
    gradient.

    Whether the server is synchronous makes no difference here. Cost of a step: Φ out, Φ in.
    """
    _begin(module, steps)
    losses = []
    for step in range(steps):
        module.zero_grad()
        loss = loss_of(step)
        loss.backward()
        dist.send(_gradients(module), SERVER)
        weights = _weights(module)
        dist.recv(weights, SERVER)
        with torch.no_grad():
            for parameter, part in _cut(weights, module):
                parameter.copy_(part)
        losses.append(loss.item())
    return losses


def _begin(module: nn.Module, steps: int | None) -> dict[int, int]:
    """Agree who serves, start with equal modules; returns each worker's number of steps."""
    plans: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(plans, steps)
    if len(plans) < 2:
        raise ValueError("expected a server and a worker or more, got 1 rank: start 2 or more")
    for rank, plan in enumerate(plans):
        if (plan is None) != (rank == SERVER):
            wanted, got = ("serve", "work") if rank == SERVER else ("work", "serve")
            remedy = f"Rank {SERVER} serves, all others work."
            raise ValueError(f"rank {rank} called {got}, expected {wanted}. {remedy}")
    broadcast_module(module)
    return {worker: plan for worker, plan in enumerate(plans) if worker != SERVER}


def _trained(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def _weights(module: nn.Module) -> Tensor:
    return parameters_to_vector(_trained(module).values()).detach()


def _gradients(module: nn.Module) -> Tensor:
    trained = _trained(module)
    check_gradients(trained)
    return parameters_to_vector(parameter.grad for parameter in trained.values())


def _follow(gradient: Tensor, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Step along a gradient that came in one piece."""
    for parameter, part in _cut(gradient, module):
        parameter.grad = part
    optimizer.step()


def _cut(flat: Tensor, module: nn.Module) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Each trained parameter with its part of `flat`, a view of the parameter's shape."""
    parameters = _trained(module).values()
    parts = flat.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        yield parameter, part.view_as(parameter)
