"""Steps of an MLP split among ranks, ours and torch's `parallelize_module`, forward and backward.

Both make the same collectives, one all-reduce each way: they differ in the overhead of a call,
which a small layer shows more than a large one.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ..tensor_parallel import ColumnParallelLinear, RowParallelLinear
from .interleave import Contest, check_close, race
from .results import AGAIN, SPEED, Goal, Results, report, results_of

ROUNDS = 40
TORCH, OURS, WHOLE = "torch", "tensor_parallel", "not split"
GOALS = [Goal(OURS, TORCH, 1.0)]
SIZES = (64, 32), (512, 128), (1024, 256)  # width, rows
LEGEND = f"""\
Time: the median. Not split: every rank computes everything, and sends
nothing.
{SPEED}"""


def by_torch(mlp: nn.Sequential, group: ProcessGroup) -> nn.Module:
    from torch.distributed.tensor.parallel import (  # a second's import, for this one only
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = DeviceMesh.from_group(group, "cpu")
    return parallelize_module(mlp, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def by_us(mlp: nn.Sequential, group: ProcessGroup) -> nn.Module:
    up, activation, down = mlp
    return nn.Sequential(
        ColumnParallelLinear(up, group), activation, RowParallelLinear(down, group)
    )


WAYS = {TORCH: by_torch, OURS: by_us, WHOLE: lambda mlp, group: mlp, TORCH + AGAIN: by_torch}


def contest(width: int, rows: int, ways: dict[str, Callable], group: ProcessGroup) -> Contest:
    """Make the contest of {variant: split(mlp, group)}; RuntimeError in `found`: results differ."""
    torch.manual_seed(0)
    x = torch.randn(rows, width)
    mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
    modules = {name: split(deepcopy(mlp), group) for name, split in ways.items()}

    def step(module: nn.Module) -> tuple[Tensor, Tensor]:
        module.zero_grad()
        inputs = x.clone().requires_grad_()
        out = module(inputs)
        out.square().mean().backward()
        return out.detach(), inputs.grad

    def found() -> None:
        right = step(modules[WHOLE])
        for name, module in modules.items():
            for got, expected in zip(step(module), right, strict=True):
                check_close(name, got, expected, 1e-5)

    return Contest({name: partial(step, module) for name, module in modules.items()}, found=found)


def measure(
    sizes: Sequence[tuple[int, int]] = SIZES,
    rounds: int = ROUNDS,
    ways: dict[str, Callable] = WAYS,
) -> Results:
    """Time forward and backward of every way on each size, by 2 ranks. ValueError: no round."""
    found = Results(legend=LEGEND)
    for width, rows in sizes:
        seconds, _ = race(partial(contest, width, rows, ways), rounds, 2)
        nbytes = 4 * rows * width  # of an all-reduce
        found += results_of(f"MLP, width {width}, {rows} rows", seconds, 2, nbytes)
    return found


def main(name: str):
    report(name, measure(), GOALS)
