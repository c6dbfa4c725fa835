"""Training steps that take turns: the common part of `ddp`, `zero` and `fsdp`.

Each variant trains its own replica of the same model on the same data; in the end all that
communicate must have the same parameters.
"""

import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.utils import parameters_to_vector

from ..models import GPT, mean_loss
from ..runtime.link import Link
from ..runtime.wire import recorder
from ..tools.passes import sent_by_all
from .interleave import WARM_UP, Contest, check_close, race
from .results import Result

COMPUTE = "compute alone"
Task = tuple[nn.Module, Callable[[nn.Module], Tensor]]  # a module, alike each time, and its loss


def gpt(layers: int = 6, width: int = 256, sequences: int = 8) -> Task:
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(256, (sequences, 65), generator=generator)
    torch.manual_seed(0)
    model = GPT(layers=layers, width=width, heads=8)
    return model, lambda wrapped: mean_loss(wrapped(tokens[:, :-1]), tokens[:, 1:])


def linears(layers: int = 12, width: int = 1024, rows: int = 128) -> Task:
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs, targets = torch.randn(2, rows, width, generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    return model, lambda wrapped: (wrapped(inputs) - targets).square().mean()


def itself(module: nn.Module) -> nn.Module:
    return module


class Replica:
    """A model, wrapped or not, and its optimizer; it is None where a step makes no update."""

    def __init__(self, make: Callable[[], Task], wrap: Callable, optimize: Callable | None):
        self.module, self.loss = make()
        self.wrapped = wrap(self.module)  # first: it may replace the parameters by shards
        self.trained = [p for p in self.module.parameters() if p.requires_grad]
        self.optimizer = optimize(self.trained) if optimize else None

    def step(self) -> None:
        self.module.zero_grad()
        self.loss(self.wrapped).backward()
        if hasattr(self.wrapped, "synchronize"):  # ours; torch's needs no call
            self.wrapped.synchronize()
        if self.optimizer:
            self.optimizer.step()


def race_replicas(
    make: Callable[[ProcessGroup], dict[str, Replica]],
    rounds: int,
    link: Link | None = None,
) -> tuple[dict[str, tuple[float, ...]], int]:
    """Time the steps of all replicas: ({variant: seconds of its steps}, bytes of the gradients).

    make: called on both ranks with the group to communicate in, torch's own or, with `link`, the
    emulated one; one of its replicas is `COMPUTE`, which doesn't communicate.
    """

    def contest(plain: ProcessGroup) -> Contest:
        replicas = make(dist.group.WORLD if link else plain)

        def found() -> int:
            check_alike(replicas, plain)
            return sum(p.nbytes for p in replicas[COMPUTE].trained)

        steps = {name: replica.step for name, replica in replicas.items()}
        return Contest(steps, found=found)

    seconds, (nbytes, _) = race(contest, rounds, 2, link)
    return seconds, nbytes


def check_alike(replicas: dict[str, Replica], group: ProcessGroup) -> None:
    """Raise RuntimeError if parameters differ from rank 0's first variant's; `COMPUTE` may."""
    right = parameters_to_vector(next(iter(replicas.values())).module.parameters()).detach()
    dist.broadcast(right, group=group, group_src=0)
    for name, replica in replicas.items():
        if name != COMPUTE:
            check_close(name, parameters_to_vector(replica.module.parameters()), right, 1e-5)


def count_bytes(
    replicas: dict[str, Replica], count: Callable[[Replica], int]
) -> dict[str, tuple[float, int]]:
    """Count {variant: (bytes that this rank sends in a step once warmed up, `count(replica)`)}."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    found = {}
    for name, replica in replicas.items():
        for _ in range(WARM_UP):
            replica.step()
        before = len(recorder().records)
        replica.step()
        step = recorder().records[before:]
        sent = sum(sent_by_all(record, rank, world_size) for record in step)
        found[name] = sent, count(replica)
    return found


def add_bytes(result: Result, counted: list[dict[str, tuple[float, int]]], heading: str) -> None:
    """Add columns of MB: sent by a rank, on average; and the largest of the ranks' `heading`.

    counted: of each rank, {variant: (bytes sent, bytes of what `heading` names)}.
    """
    sent, others = zip(*(rank[result.variant] for rank in counted), strict=True)
    result.columns["Sent"] = f"{statistics.mean(sent) / 1e6:.4g}"
    result.columns[heading] = f"{max(others) / 1e6:.4g}"
