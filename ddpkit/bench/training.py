"""Training steps that take turns: what `ddp` and `zero` have in common.

Each variant trains its own replica of the same model on the same data; in the end all must have
the same parameters. What is exposed is what a step takes longer than computing alone, in the same
round.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.utils import parameters_to_vector

from ..models import GPT, mean_loss
from ..tools.text import Batches, encode, text
from . import interleave

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

    def __init__(
        self, task: Task, wrap: Callable[[nn.Module], nn.Module], optimize: Callable | None
    ):
        self.module = task.build()
        self.trained = [each for each in self.module.parameters() if each.requires_grad]
        self.optimizer = optimize(self.trained) if optimize else None
        self._wrapped, self._loss = wrap(self.module), task.loss
        self.loss = 0.0

    def step(self) -> None:
        self.module.zero_grad()
        loss = self._loss(self._wrapped)
        loss.backward()
        if hasattr(self._wrapped, "synchronize"):  # ours; torch's needs no call
            self._wrapped.synchronize()
        if self.optimizer:
            self.optimizer.step()
        self.loss = loss.item()

    def state_bytes(self) -> int:
        """Of all tensors in the optimizer's state but counters."""
        if hasattr(self.optimizer, "state_bytes"):  # ZeroOptimizer
            return self.optimizer.state_bytes()
        inner = getattr(self.optimizer, "optim", self.optimizer)  # torch's ZeRO has it inside
        total = 0
        for state in inner.state.values() if inner else ():
            total += sum(
                each.nbytes for each in state.values() if isinstance(each, Tensor) and each.dim()
            )
        return total


# On a rank


@dataclass
class Seen:
    """What one rank saw: of each variant (begun, done) of each round, and what it has in the end.

    sizes: bytes of each gradient.
    """

    turns: dict[str, list[tuple[float, float]]]
    losses: dict[str, float]
    state_bytes: dict[str, int]
    sizes: list[int]


def take_turns(replicas: dict[str, Replica], rounds: int, plain: ProcessGroup) -> Seen:
    interleave.pin_to_a_core()
    for replica in list(replicas.values()) * WARM_UP:
        replica.step()

    def turn(name: str) -> tuple[float, float]:
        return interleave.timed(replicas[name].step, plain)[0]

    turns = interleave.take_turns(list(replicas), rounds, turn)
    check_alike(replicas, plain)
    return Seen(
        turns,
        {name: replica.loss for name, replica in replicas.items()},
        {name: replica.state_bytes() for name, replica in replicas.items()},
        [parameter.nbytes for parameter in replicas[COMPUTE].trained],
    )


def check_alike(replicas: dict[str, Replica], group: ProcessGroup) -> None:
    """RuntimeError: a variant that communicates has not the parameters of rank 0's first."""
    right = parameters_to_vector(next(iter(replicas.values())).module.parameters()).detach()
    dist.broadcast(right, group=group, group_src=0)
    for name, replica in replicas.items():
        found = parameters_to_vector(replica.module.parameters()).detach()
        if name != COMPUTE and not (found - right).norm() <= 1e-5 * right.norm():
            wrong = f"{name} learned something else on rank {dist.get_rank()}"
            raise RuntimeError(f"{wrong}: its time would mean nothing")


# All ranks together


def seconds_of(ranks: Sequence[Seen]) -> dict[str, tuple[float, ...]]:
    """{variant: the seconds of each round, until the last rank is done}."""
    found = {}
    for name in ranks[0].turns:
        found[name] = interleave.until_the_last([seen.turns[name] for seen in ranks])
    return found
