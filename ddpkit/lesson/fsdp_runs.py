"""Models and steps that the ranks of notebook 12 run, kept off its page."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import memory, transport
from ..fsdp import FSDP
from ..runtime.recorder import recorder


class Layers(nn.Module):
    """A model of Linear layers of one width, `group` of them in a block.

    sleeps: seconds that each block sleeps in forward, and twice that in backward, to stand for
    computing.
    """

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
    """A transport whose reduce-scatter needs no scratch memory, since it all-reduces in place.

    Gloo's own reduce-scatter copies the message first, which would be counted as peak memory.
    """

    start_all_gather = staticmethod(transport.start_all_gather)

    @staticmethod
    def start_reduce_scatter(flat: Tensor, group) -> dist.Work:
        return dist.all_reduce(flat, group=group, async_op=True)


def micro_batches(model: nn.Module, x: Tensor, number: int = 1, quiet: dict | None = None) -> None:
    """Run forward and backward of `number` micro-batches of `x`, then `synchronize`.

    quiet: arguments of the `no_sync` in which all but the last run; None: outside of it.
    """
    for left in reversed(range(number)):
        if left and quiet:
            with model.no_sync(**quiet):
                model(x).float().sum().backward()
        else:
            model(x).float().sum().backward()
    getattr(model, "synchronize", lambda: None)()


def second_step(model: nn.Module, x: Tensor, **options) -> tuple[list, int]:
    """Run two steps; return the second one's records, and the most bytes that its tensors had.

    options: as for `micro_batches`. The first step differs, as ranks compare their order in it.
    """
    micro_batches(model, x, **options)  # the first also compares the ranks' order
    model.zero_grad()
    before = len(recorder().records)
    step = memory.most_bytes(lambda: micro_batches(model, x, **options), model.parameters())
    return recorder().records[before:], step


def calls_in_words(model: FSDP, x: Tensor) -> list[str]:
    """Run a step, and list this rank's calls in words: ["AG b0", ...].

    A unit is recognised by its bytes, so no two may have the same size.
    """
    names = {}
    for unit in model.units[1:]:
        name = unit.name.replace("locks.", "")
        names["all_gather", unit.nbytes // unit.world_size] = f"AG {name}"
        names["reduce_scatter", unit.nbytes] = f"RS {name}"
    return [names[record.op, record.bytes] for record in second_step(model, x)[0]]


def flops_per_s(width: int, rows: int, rounds: int = 20) -> float:
    """Measure this rank's speed: the fastest of `rounds` products, in FLOP/s.

    Of matrices (rows, width) and (width, width).
    """
    x = torch.randn(rows, width)
    weight = torch.randn(width, width)
    took = fastest(lambda: x @ weight, rounds)
    return 2 * rows * width**2 / took


def bytes_per_s(nbytes: int, rounds: int = 5) -> float:
    """Measure the wire: the bytes that a rank sends in a second of an all-gather.

    nbytes: of what is gathered, from all ranks.
    """
    flat = torch.zeros(nbytes // 4)
    took = fastest(lambda: transport.start_all_gather(flat).wait(), rounds)
    return nbytes / took * (dist.get_world_size() - 1) / dist.get_world_size()


def seconds_of_a_step(model: nn.Module, width: int, rounds: int = 5) -> float:
    """Measure forward and backward: the seconds of the shortest of some steps.

    The first step, in which ranks compare their order, isn't timed.
    """
    x = torch.ones(2, width, requires_grad=True)
    micro_batches(model, x)
    return fastest(lambda: micro_batches(model, x), rounds)


def fastest(call: Callable[[], object], rounds: int) -> float:
    """Call a function `rounds` times, each after a barrier; return the seconds of the shortest."""
    took = []
    for _ in range(rounds):
        dist.barrier()
        begun = time.perf_counter()
        call()
        took.append(time.perf_counter() - begun)
    return min(took)
