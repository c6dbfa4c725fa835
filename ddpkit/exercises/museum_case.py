"""Models, samples, and right trainings on one process, for the museum's programs, most with bugs.

A sample says where it comes from: in every row of rank r's micro-batch j, one number isn't 0, in
column r·m + j, where m is the number of micro-batches. So column k of the gradient of the first
layer's weight comes from micro-batch k alone, and tells whether, and how often, it was counted.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.nn.functional import mse_loss

ROWS = 2  # of a micro-batch
RATE = 0.5
OUTPUTS = 3
HIDDEN = 12  # 2, 3, 4 and 6 ranks divide it


@dataclass(frozen=True)
class Case:
    """The sizes of one run.

    micro_batches: of each rank, in a step. inner: the ranks of a tensor, expert or context group,
    the others are replicas; mesh has the axes "data" and "inner". seed: of weights and samples.
    """

    ranks: int
    micro_batches: int = 1
    inner: int = 1
    seed: int = 0
    mesh: DeviceMesh | None = None

    def with_seed(self, seed: int) -> "Case":
        return replace(self, seed=seed)

    def __str__(self):
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        if self.inner > 1:
            ranks += f", {self.ranks // self.inner} × {self.inner}"
        return ranks if self.micro_batches == 1 else f"{ranks}, {self.micro_batches} micro-batches"


# Twelve meshes a kind, most of unequal sizes: 2 × 2 hides which 2 a factor is
DATA = tuple(
    Case(ranks, micro) for ranks in (2, 3, 4) for micro in (2, 3, 4, 5, 6) if micro != ranks
)
ALONE = tuple(Case(1, micro) for micro in range(2, 14))
RANKS = tuple(Case(ranks, micro) for ranks in (2, 3, 4) for micro in (1, 5, 6, 7))
GRID = tuple(
    Case(ranks, micro, inner)
    for ranks, inner in ((3, 3), (4, 4), (6, 3), (6, 2))
    for micro in (1, 4, 5)
)


# Models, in float64: no rounding is mistaken for a bug


def mlp(case: Case) -> nn.Sequential:
    """Make first (columns, 12), tanh, second (12, 3), from the case's seed."""
    torch.manual_seed(case.seed)
    first = nn.Linear(case.ranks * case.micro_batches, HIDDEN)
    second = nn.Linear(HIDDEN, OUTPUTS)
    return nn.Sequential(OrderedDict(first=first, tanh=nn.Tanh(), second=second)).double()


def tied_mlp(case: Case) -> nn.Sequential:
    """Make first and second with one weight, and a head."""
    torch.manual_seed(case.seed)
    width = case.ranks * case.micro_batches
    layers = OrderedDict(first=nn.Linear(width, width), tanh=nn.Tanh())
    layers |= OrderedDict(second=nn.Linear(width, width), head=nn.Linear(width, OUTPUTS))
    layers["second"].weight = layers["first"].weight
    return nn.Sequential(layers).double()


def sgd(model: nn.Module) -> torch.optim.SGD:
    """Make the optimizer: SGD, since AdamW would hide factors."""
    return torch.optim.SGD(model.parameters(), lr=RATE)


# Samples


def batches_of(case: Case, rank: int) -> list[tuple[Tensor, Tensor]]:
    """Make a rank's micro-batches (x, y): x of 2 rows with one column that isn't 0."""
    generator = torch.Generator().manual_seed(1000 * case.seed + rank)
    found = []
    for number in range(case.micro_batches):
        x = torch.zeros(ROWS, case.ranks * case.micro_batches, dtype=torch.float64)
        x[:, rank * case.micro_batches + number] = 0.5 + torch.rand(
            ROWS, generator=generator, dtype=torch.float64
        )
        y = torch.randn(ROWS, OUTPUTS, generator=generator, dtype=torch.float64)
        found.append((x, y))
    return found


def my_batches(case: Case) -> list[tuple[Tensor, Tensor]]:
    return batches_of(case, dist.get_rank())


def joined(batches: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    xs, ys = zip(*batches, strict=True)
    return torch.cat(xs), torch.cat(ys)


def all_rows(case: Case) -> tuple[Tensor, Tensor]:
    """Join all micro-batches of all ranks, in the order of ranks."""
    return joined([joined(batches_of(case, rank)) for rank in range(case.ranks)])


def uneven_rows(case: Case, rank: int) -> tuple[Tensor, Tensor]:
    """Return the first rank + 1 rows of a rank's batch, or all if it has fewer."""
    x, y = joined(batches_of(case, rank))
    return x[: rank + 1], y[: rank + 1]


def total(number: int, group: dist.ProcessGroup | None = None) -> int:
    """Sum a number over ranks."""
    counted = torch.tensor(number)
    dist.all_reduce(counted, group=group)
    return counted.item()


# Right trainings, on one process


def step_on(model: nn.Module, x: Tensor, y: Tensor) -> nn.Module:
    """Make one step with the mean loss of these rows."""
    mse_loss(model(x), y).backward()
    sgd(model).step()
    return model


def serial_step(case: Case, make: Callable[[Case], nn.Module] = mlp) -> nn.Module:
    """Make one step with all rows of all ranks."""
    return step_on(make(case), *all_rows(case))


def serial_tied(case: Case) -> nn.Module:
    return serial_step(case, tied_mlp)


def serial_steps(case: Case) -> nn.Module:
    """Make a step with each micro-batch of all ranks together."""
    model = mlp(case)
    everyones = [batches_of(case, rank) for rank in range(case.ranks)]
    for together in zip(*everyones, strict=True):
        model.zero_grad()
        step_on(model, *joined(list(together)))
    return model


def serial_uneven(case: Case) -> nn.Module:
    """Make one step with the rows that ranks have if rank r has r + 1: each row counts alike."""
    return step_on(mlp(case), *joined([uneven_rows(case, rank) for rank in range(case.ranks)]))
