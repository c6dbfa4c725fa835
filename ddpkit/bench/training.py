"""Training steps that take turns: what `ddp` and `zero` have in common.

Each variant trains its own replica of the same model on the same data; in the end all must have
the same parameters.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.utils import parameters_to_vector

from ..models import GPT, mean_loss
from ..runtime.link import Link
from ..tools.text import Batches, encode, text
from .interleave import Contest, race

WARM_UP = 3  # steps that don't count: buckets are planned anew, state is made
COMPUTE = "compute alone"


class Task(NamedTuple):
    """build: makes the module, alike each time. loss: of that module on this rank's data."""

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module], Tensor]


def gpt(layers: int = 6, width: int = 256, sequences: int = 8) -> Task:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tokens = encode(text()[: 65 * sequences * world_size])
    batches = Batches(tokens, sequences * world_size, 64, rank=rank, world_size=world_size)
    inputs, targets = next(iter(batches))

    def build() -> nn.Module:
        torch.manual_seed(0)
        return GPT(layers=layers, width=width, heads=8)

    return Task(build, lambda model: mean_loss(model(inputs), targets))


def linears(layers: int = 12, width: int = 1024, rows: int = 128) -> Task:
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs, targets = torch.randn(2, rows, width, generator=generator)

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    return Task(build, lambda model: (model(inputs) - targets).square().mean())


def itself(module: nn.Module) -> nn.Module:
    return module


class Replica:
    """A model, wrapped or not, and its optimizer; None where a step only computes."""

    def __init__(self, task: Task, wrap: Callable, optimize: Callable | None):
        self.module = task.build()
        self.trained = [each for each in self.module.parameters() if each.requires_grad]
        self.optimizer = optimize(self.trained) if optimize else None
        self.wrapped, self.loss = wrap(self.module), task.loss

    def step(self) -> None:
        self.module.zero_grad()
        self.loss(self.wrapped).backward()
        if hasattr(self.wrapped, "synchronize"):  # ours; torch's needs no call
            self.wrapped.synchronize()
        if self.optimizer:
            self.optimizer.step()

    def state_bytes(self) -> int:
        """Of all tensors in the optimizer's state but counters."""
        if hasattr(self.optimizer, "state_bytes"):  # ZeroOptimizer
            return self.optimizer.state_bytes()
        inner, total = getattr(self.optimizer, "optim", self.optimizer), 0  # inside torch's ZeRO
        for state in inner.state.values() if inner else ():
            tensors = [each for each in state.values() if isinstance(each, Tensor) and each.dim()]
            total += sum(each.nbytes for each in tensors)
        return total


@dataclass
class Seen:
    """What one rank has in the end. sizes: bytes of each gradient."""

    state_bytes: dict[str, int]
    sizes: list[int]


def race_replicas(
    make: Callable[[ProcessGroup], dict[str, Replica]],
    rounds: int,
    world_size: int,
    link: Link | None = None,
) -> tuple[dict[str, tuple[float, ...]], list[Seen]]:
    """Time a step of each, on torch's own wire or on an emulated link; see `interleave.race`.

    make: called on every rank with the group to talk in; one replica only computes.
    """
    if world_size < 2:
        raise ValueError(f"expected 2 ranks or more, got {world_size}: one has no partner")

    def contest(plain: ProcessGroup) -> Contest:
        replicas = make(dist.group.WORLD if link else plain)

        def found() -> Seen:
            check_alike(replicas, plain)
            state_bytes = {name: replica.state_bytes() for name, replica in replicas.items()}
            return Seen(state_bytes, [each.nbytes for each in replicas[COMPUTE].trained])

        return Contest({name: each.step for name, each in replicas.items()}, found=found)

    return race(contest, rounds, WARM_UP, world_size, link)


def check_alike(replicas: dict[str, Replica], group: ProcessGroup) -> None:
    """RuntimeError: a variant that communicates has not the parameters of rank 0's first."""
    right = parameters_to_vector(next(iter(replicas.values())).module.parameters()).detach()
    dist.broadcast(right, group=group, group_src=0)
    for name, replica in replicas.items():
        found = parameters_to_vector(replica.module.parameters()).detach()
        if name != COMPUTE and not (found - right).norm() <= 1e-5 * right.norm():
            wrong = f"{name} learned something else on rank {dist.get_rank()}"
            raise RuntimeError(f"{wrong}: its time would mean nothing")
