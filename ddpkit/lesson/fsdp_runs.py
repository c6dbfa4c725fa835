"""Models and steps that the ranks of notebook 12 run, where the page shows only what comes out."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import memory, transport
from ..fsdp import FSDP
from ..runtime.recorder import recorder


class Layers(nn.Module):
    """Linear layers, `group` a block; a block first sleeps `sleeps` seconds, twice in backward."""

    def __init__(self, layers: int = 8, group: int = 1, width: int = 64, sleeps: float = 0.0):
        super().__init__()
        parts = [nn.Linear(width, width) for _ in range(layers)]
        groups = [[Sleeps(sleeps), *parts[n : n + group]] for n in range(0, layers, group)]
        self.blocks = nn.ModuleList(nn.Sequential(*members) for members in groups)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Sleeps(nn.Module):
    """Stand in for computing, on a machine whose cores are busy with the wire."""

    def __init__(self, seconds: float):
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(x, self.seconds) if self.seconds else x


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(2 * ctx.seconds)
        return gradient, None


class InPlace:
    """A transport without scratch memory: Gloo's own reduce-scatter copies the message first."""

    start_all_gather = staticmethod(transport.start_all_gather)

    @staticmethod
    def start_reduce_scatter(flat: Tensor, group) -> dist.Work:
        return dist.all_reduce(flat, group=group, async_op=True)


def micro_batches(model: nn.Module, x: Tensor, number: int = 1, quiet: dict | None = None) -> None:
    """Run forward and backward of micro-batches, all but the last inside no_sync(**quiet)."""
    for left in reversed(range(number)):
        if left and quiet:
            with model.no_sync(**quiet):
                model(x).float().sum().backward()
        else:
            model(x).float().sum().backward()
    getattr(model, "synchronize", lambda: None)()


def second_step(model: nn.Module, x: Tensor, **options) -> tuple[list, int]:
    """Run two steps; return the records of the second, and the most bytes of tensors in it."""
    micro_batches(model, x, **options)  # the first also compares the ranks' order
    model.zero_grad()
    before = len(recorder().records)
    step = memory.most_bytes(lambda: micro_batches(model, x, **options), model.parameters())
    return recorder().records[before:], step


def calls_in_words(model: FSDP, x: Tensor) -> list[str]:
    """Write a step's calls as words: ["AG b0", ...]. No two units may have one size."""
    names = {}
    for unit in model.units[1:]:
        name = unit.name.replace("locks.", "")
        names["all_gather", unit.nbytes // unit.world_size] = f"AG {name}"
        names["reduce_scatter", unit.nbytes] = f"RS {name}"
    return [names[record.op, record.bytes] for record in second_step(model, x)[0]]


def flops_per_s(width: int, rows: int, rounds: int = 20) -> float:
    """Measure C: the fastest of some products of (rows, width) and (width, width)."""
    x = torch.randn(rows, width)
    weight = torch.randn(width, width)
    took = fastest(lambda: x @ weight, rounds)
    return 2 * rows * width**2 / took


def bytes_per_s(nbytes: int, rounds: int = 5) -> float:
    """Measure b: what a rank sends in a second of gathering `nbytes` in all."""
    flat = torch.zeros(nbytes // 4)
    took = fastest(lambda: transport.start_all_gather(flat).wait(), rounds)
    return nbytes / took * (dist.get_world_size() - 1) / dist.get_world_size()


def seconds_of_a_step(model: nn.Module, width: int, rounds: int = 5) -> float:
    """Time forward and backward; the first one, in which ranks compare their order, isn't timed."""
    x = torch.ones(2, width, requires_grad=True)
    micro_batches(model, x)
    return fastest(lambda: micro_batches(model, x), rounds)


def fastest(call: Callable[[], object], rounds: int) -> float:
    """Call it some times, after a barrier each; return the seconds of the shortest."""
    took = []
    for _ in range(rounds):
        dist.barrier()
        begun = time.perf_counter()
        call()
        took.append(time.perf_counter() - begun)
    return min(took)
