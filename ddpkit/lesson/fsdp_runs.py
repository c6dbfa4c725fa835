"""Define models, steps and measurements that the ranks of notebook 12 run."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import memory, transport
from ..fsdp import FSDP
from ..runtime.recorder import recorder


class Layers(nn.Module):
    """A model of linear layers that all have the same width, grouped into blocks.

    layers: the number of layers. group: how many of them make a block; the last may have fewer.
    width: the number of input features, and of output features, of each layer.
    sleeps: the seconds that every block sleeps in forward, to stand in for computing; in backward
        it sleeps twice as long.
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
    """A module that returns its input and sleeps, `seconds` in forward and twice that in backward.

    It stands in for computing, on a machine whose cores are busy with sending: unlike computing,
    sleeping doesn't slow that down.
    """

    def __init__(self, seconds: float):
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(x, self.seconds) if self.seconds else x


class Sleep(torch.autograd.Function):
    """An autograd function that changes nothing, but sleeps; in backward twice as long."""

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

    A transport is an object with the two functions below, which FSDP takes as `transport=` to send
    with. Gloo's own reduce-scatter copies the message first, which would be counted as peak memory.
    """

    start_all_gather = staticmethod(transport.start_all_gather)

    @staticmethod
    def start_reduce_scatter(flat: Tensor, group) -> dist.Work:
        """Start to sum `flat` over all ranks, in place; return the handle to wait for.

        Afterwards all shards of `flat` hold the sum, of which FSDP uses only this rank's.
        """
        return dist.all_reduce(flat, group=group, async_op=True)


def micro_batches(model: nn.Module, x: Tensor, number: int = 1, quiet: dict | None = None) -> None:
    """Run forward and backward of `number` micro-batches, then `model.synchronize()`.

    Each micro-batch is `x`, and the loss is the sum of the output. `synchronize` is skipped if the
    model has none. Gradients add up in the model; nothing is returned.

    quiet: arguments of `model.no_sync`, inside which all micro-batches but the last run, so that
        they don't send. None: all run outside of it.
    """
    for left in reversed(range(number)):
        if left and quiet:
            with model.no_sync(**quiet):
                model(x).float().sum().backward()
        else:
            model(x).float().sum().backward()
    getattr(model, "synchronize", lambda: None)()


def second_step(model: nn.Module, x: Tensor, **options) -> tuple[list, int]:
    """Run two steps of FSDP; return (records of the second one's calls, its peak in bytes).

    The records are those of this rank, in order. The peak is the most bytes that tensors,
    parameters included, had at a time in the second step. The first step is left out, because in it
    ranks also compare the order of their calls.

    options: `number` and `quiet` of `micro_batches`.
    """
    micro_batches(model, x, **options)  # in the first step ranks also compare their order
    model.zero_grad()
    before = len(recorder().records)
    step = memory.most_bytes(lambda: micro_batches(model, x, **options), model.parameters())
    return recorder().records[before:], step


def calls_in_words(model: FSDP, x: Tensor) -> list[str]:
    """Run two steps; return the second one's calls by this rank, in words: ["AG b0", "RS b0", ...].

    "AG" is an all-gather, "RS" a reduce-scatter, and "b0" the unit of `model.blocks[0]`. A call is
    matched with its unit by its bytes, so no two units may have the same size.

    KeyError: a call has the bytes of no unit, such as one of the model's own parameters.
    """
    names = {}
    for unit in model.units[1:]:
        name = unit.name.replace("locks.", "")
        names["all_gather", unit.nbytes // unit.world_size] = f"AG {name}"
        names["reduce_scatter", unit.nbytes] = f"RS {name}"
    return [names[record.op, record.bytes] for record in second_step(model, x)[0]]


def flops_per_s(width: int, rows: int, rounds: int = 20) -> float:
    """Measure how fast this rank multiplies matrices; return its best speed in FLOP/s.

    The matrices are (rows, width) and (width, width), and the fastest of `rounds` products counts.
    Call it on all ranks at once: there is a barrier before each product.
    """
    x = torch.randn(rows, width)
    weight = torch.randn(width, width)
    took = fastest(lambda: x @ weight, rounds)
    return 2 * rows * width**2 / took


def bytes_per_s(nbytes: int, rounds: int = 5) -> float:
    """Measure the wire by all-gathers; return the bytes that this rank sends in a second, at best.

    nbytes: the bytes of the gathered tensor, the parts of all ranks together.
    rounds: how many all-gathers are timed; the fastest counts.

    Call it on all ranks at once.
    """
    flat = torch.zeros(nbytes // 4)
    took = fastest(lambda: transport.start_all_gather(flat).wait(), rounds)
    return nbytes / took * (dist.get_world_size() - 1) / dist.get_world_size()


def seconds_of_a_step(model: nn.Module, width: int, rounds: int = 5) -> float:
    """Measure forward and backward of a model; return the seconds of the fastest of `rounds` steps.

    One step before them isn't timed, since in the first step ranks compare the order of their
    calls. Call it on all ranks at once.

    width: the numbers of the model's input, which has 2 rows.
    """
    x = torch.ones(2, width, requires_grad=True)
    micro_batches(model, x)
    return fastest(lambda: micro_batches(model, x), rounds)


def fastest(call: Callable[[], object], rounds: int) -> float:
    """Call a function `rounds` times, each after a barrier; return the shortest time in seconds."""
    took = []
    for _ in range(rounds):
        dist.barrier()
        begun = time.perf_counter()
        call()
        took.append(time.perf_counter() - begun)
    return min(took)
