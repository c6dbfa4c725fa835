"""Data parallelism 1.0: rank 0 keeps the weights and the optimizer, the other ranks compute gradients for it.

    if dist.get_rank() == 0:
        serve(model, optimizer)                     # or serve_asynchronously
    else:
        work(model, lambda step: loss(model(inputs[step]), targets[step]), steps=len(inputs))

A worker's step: compute gradients on its own data, push them to the server, pull the weights that the server makes of
them. All gradients travel as one tensor, and so do all weights: Φ bytes. The server's replies are its only messages;
it knows beforehand how many steps each worker has, so nobody has to say that it is done.

    per step                      in          out         optimizer state
    server                        (W-1)Φ      (W-1)Φ      all of it
    each of the W-1 workers       Φ           Φ           none
    each of W ranks in a ring     2(W-1)/W Φ  2(W-1)/W Φ  all of it

The server's wire carries 2(W-1)Φ bytes a step, and more with every worker; in a ring all-reduce (notebook 02) no rank
carries more than 4Φ, however many there are.

Only parameters with `requires_grad` travel each step, a weight used in two places once, in the widest dtype among
them. Frozen parameters and buffers come from the server at the start; what a worker's buffers learn afterwards (batch
norm's statistics) stays there. In the end, the trained module is the server's.

Li et al. 2014 (the parameter server). Notebook 03.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .data_parallel import broadcast_module

SERVER = 0


class Update(NamedTuple):
    """A step of the asynchronous server.

    worker: whose gradient it was. staleness: the other workers' updates since that worker pulled its weights.
    """

    worker: int
    staleness: int


def serve(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Serve synchronously on rank 0: in each step, wait for every worker, then follow the mean of their gradients.

    module: as on the workers; its weights are trained in place. optimizer: of this module's parameters.
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
    """Serve on rank 0, first come, first served: follow each gradient by itself, as soon as it is there.

    module, optimizer, ValueError: as in `serve`. Returns the updates in their order.
    The backend must be able to receive from whoever sends first: Gloo can, NCCL can't.

    Nobody waits for a slow worker. But while a worker computes, others change the weights: its gradient is stale, it
    belongs to weights of `staleness` updates ago. W-1 workers who take turns are W-2 updates late, but for the first
    turn.
    Cost of an update: Φ in, Φ out. Notebook 03.
    """
    left = _begin(module, None)
    gradient = torch.empty_like(_weights(module))
    updates: list[Update] = []
    pulled = dict.fromkeys(left, 0)  # by worker: how many updates its weights have seen
    while any(left.values()):
        worker = dist.recv(gradient)
        updates.append(Update(worker, staleness=len(updates) - pulled[worker]))
        _follow(gradient, module, optimizer)
        dist.send(_weights(module), worker)
        pulled[worker] = len(updates)
        left[worker] -= 1
    return updates


def work(module: nn.Module, loss_of: Callable[[int], Tensor], steps: int) -> list[float]:
    """Be a worker, on any rank but 0: `steps` times compute a gradient, push it, pull new weights. Returns the losses.

    module: as on the server; overwritten with the server's parameters and buffers at the start, with its weights after
    each step. loss_of: gets the number of the step, returns the loss of `module` on this worker's data.
    steps: may differ between workers, and be 0.
    ValueError, on every rank: as in `serve`, or a number of steps below 0. On this rank: a weight without a gradient.

    The server may be synchronous or not: the worker can't tell. Cost of a step: Φ out, Φ in. Notebook 03.
    """
    _begin(module, steps)
    losses = []
    for step in range(steps):
        module.zero_grad()
        loss = loss_of(step)
        loss.backward()
        dist.send(_gradients(module), SERVER)
        weights = torch.empty_like(_weights(module))
        dist.recv(weights, SERVER)
        with torch.no_grad():
            for parameter, part in _cut(weights, module):
                parameter.copy_(part)
        losses.append(loss.item())
    return losses


def _begin(module: nn.Module, steps: int | None) -> dict[int, int]:
    """Agree who serves, start with equal modules, and return how many steps each worker will make."""
    plans: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(plans, steps)
    if len(plans) < 2:
        raise ValueError("expected a server and at least one worker, got 1 rank: start 2 ranks or more")
    for rank, plan in enumerate(plans):
        if (plan is None) != (rank == SERVER):
            wanted, got = ("serve", "work") if rank == SERVER else ("work", "serve")
            raise ValueError(f"rank {rank} called {got}, expected {wanted}: rank {SERVER} serves, all others work")
        if rank != SERVER and plan < 0:
            raise ValueError(f"rank {rank} called work with steps={plan}, expected 0 or more: say how many it makes")
    broadcast_module(module)
    return {worker: plan for worker, plan in enumerate(plans) if worker != SERVER}


def _trained(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def _weights(module: nn.Module) -> Tensor:
    return _flat(list(_trained(module).values()))


def _gradients(module: nn.Module) -> Tensor:
    without = [name for name, parameter in _trained(module).items() if parameter.grad is None]
    if without:
        got = f"rank {dist.get_rank()} has no gradient for {', '.join(without)}"
        raise ValueError(
            f"{got} after backward, expected one for every parameter that requires it. Does the loss depend on it? "
            "Freeze it with requires_grad_(False), on all ranks."
        )
    return _flat([parameter.grad for parameter in _trained(module).values()])


def _follow(gradient: Tensor, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Step along a gradient that came in one piece."""
    for parameter, part in _cut(gradient, module):
        parameter.grad = part.to(parameter.dtype)
    optimizer.step()


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def _cut(flat: Tensor, module: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
    """Each trained parameter with its part of `flat`, a view of the parameter's shape."""
    parameters = list(_trained(module).values())
    parts = flat.split([parameter.numel() for parameter in parameters])
    return [(parameter, part.view_as(parameter)) for parameter, part in zip(parameters, parts, strict=True)]
