"""Define models, training steps and measurements that notebook 12, on FSDP, runs on its ranks."""

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

    blocks: an attribute, the nn.ModuleList of the blocks, which forward runs in order.
    layers: the number of layers. group: the number of layers in a block; the last may have fewer.
    width: the number of input features, and of output features, of each layer.
    sleeps: the seconds that each block sleeps in forward, to stand in for computing. In backward it
        sleeps twice as long, but the first block only if the model's input needs a gradient.
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
    """A module that returns its input, but sleeps in forward, and twice as long in backward.

    In backward it sleeps only if its input needs a gradient. Sleeping stands in for computing on a
    device of its own: it takes no core away from the threads that send.
    seconds: how long it sleeps in forward.
    """

    def __init__(self, seconds: float):
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(x, self.seconds) if self.seconds else x


class Sleep(torch.autograd.Function):
    """An autograd function that stands in for a slow layer: it sleeps, and returns its input.

    Call `Sleep.apply(x, seconds)`. In backward it sleeps twice as long.
    """

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

    A transport is an object with the functions `start_all_gather` and `start_reduce_scatter`, by
    which `ddpkit.fsdp.FSDP(transport=...)` sends. Gloo's own reduce-scatter first copies the
    message, and this copy would add to the peak memory that the notebook measures.
    """

    start_all_gather = staticmethod(transport.start_all_gather)

    @staticmethod
    def start_reduce_scatter(flat: Tensor, group) -> dist.Work:
        """Start to sum `flat` over the ranks of `group`, in place; return the handle to wait for.

        After the wait, all of `flat` holds the sum; FSDP uses only this rank's part (shard) of it.

        Cost per rank: 2(W-1)/W of `flat` sent, for W ranks. `transport.start_reduce_scatter` has
        the same cost on Gloo, and half of it on NCCL.
        """
        return dist.all_reduce(flat, group=group, async_op=True)


def micro_batches(model: nn.Module, x: Tensor, number: int = 1, quiet: dict | None = None) -> None:
    """Run forward and backward of `number` micro-batches, then call `model.synchronize()`.

    Each micro-batch is `x`, and the loss is the sum of the output. `synchronize` waits until all
    gradients are there; it is skipped if the model has no such method. Gradients add up in the
    parameters' `.grad`; nothing is returned.

    quiet: keyword arguments for `model.no_sync`, a context manager that leaves out messages. All
        micro-batches but the last run inside it. None or {}: `no_sync` isn't used.
    """
    for left in reversed(range(number)):
        if left and quiet:
            with model.no_sync(**quiet):
                model(x).float().sum().backward()
        else:
            model(x).float().sum().backward()
    getattr(model, "synchronize", lambda: None)()


def second_step(model: nn.Module, x: Tensor, **options) -> tuple[list, int]:
    """Run forward and backward twice; return (records of the second step, its peak in bytes).

    The records are those of this rank's collective calls and messages, in order. The peak is the
    most bytes that tensors, parameters included, had at one time in the second step. Gradients are
    dropped before it. The first step isn't measured, because ddpkit's FSDP sends more in it: its
    ranks check that all make the same calls in the same order. Call this on all ranks.

    x: the input of each micro-batch. options: `number` is how many micro-batches each step has; by
        default 1. `quiet` is None (the default), or a dict of arguments, such as {"gradients":
        True}: then all micro-batches but the last run inside `model.no_sync(**quiet)`.
    """
    micro_batches(model, x, **options)  # here ranks also compare the order of their calls
    model.zero_grad()
    before = len(recorder().records)
    step = memory.most_bytes(lambda: micro_batches(model, x, **options), model.parameters())
    return recorder().records[before:], step


def calls_in_words(model: FSDP, x: Tensor) -> list[str]:
    """Run forward and backward twice; return this rank's calls in the second, as ["AG b0", ...].

    "AG" is an all-gather, "RS" a reduce-scatter. The word after it names the unit, a group of
    layers whose weights are gathered together: "b0" is `model.module.blocks[0]`, and a submodule
    outside of `blocks` has its own name, such as "head". A call is matched with its unit by its
    bytes. If several units have equally many, all their calls get the last one's name. A single
    rank makes no calls: []. Call this on all ranks.

    model: a module in ddpkit's own FSDP, with its default `transport`, which sends by torch's
        all-gather and reduce-scatter.
    KeyError: a call matches none of these units. Parameters of the model are in no submodule,
        gradients are reduced in a dtype of another size than the weights', or another transport
        makes other calls, such as an all-reduce.
    """
    names = {}
    for unit in model.units[1:]:
        name = unit.name.replace("locks.", "")
        names["all_gather", unit.nbytes // unit.world_size] = f"AG {name}"
        names["reduce_scatter", unit.nbytes] = f"RS {name}"
    return [names[record.op, record.bytes] for record in second_step(model, x)[0]]


def flops_per_s(width: int, rows: int, rounds: int = 20) -> float:
    """Measure how fast this rank multiplies matrices; return its best speed in FLOP/s.

    The matrices are (rows, width) and (width, width), in fp32 on the CPU. The fastest of `rounds`
    products counts, as 2 · rows · width² FLOP. All ranks must call it: before each is a barrier.
    """
    x = torch.randn(rows, width)
    weight = torch.randn(width, width)
    took = fastest(lambda: x @ weight, rounds)
    return 2 * rows * width**2 / took


def bytes_per_s(nbytes: int, rounds: int = 5) -> float:
    """Measure the network by all-gathers; return this rank's sending rate, in bytes per second.

    The fastest of `rounds` all-gathers counts; in each, a rank of W sends (W − 1)/W of `nbytes`.
    Call it on all ranks at once: each round is a barrier and an all-gather.
    nbytes: the bytes of the gathered tensor, the parts of all ranks together; a multiple of 4 W,
        since each part consists of float32 numbers.
    """
    flat = torch.zeros(nbytes // 4)
    took = fastest(lambda: transport.start_all_gather(flat).wait(), rounds)
    return nbytes / took * (dist.get_world_size() - 1) / dist.get_world_size()


def seconds_of_a_step(model: nn.Module, width: int, rounds: int = 5) -> float:
    """Measure forward and backward of a model; return the seconds of the fastest of `rounds` steps.

    One step before them isn't timed, since the first step of ddpkit's FSDP takes longer: its ranks
    check that all make the same calls in the same order. Call it on all ranks at once.

    width: the number of input features; the input is a tensor of shape (2, width).
    """
    x = torch.ones(2, width, requires_grad=True)
    micro_batches(model, x)
    return fastest(lambda: micro_batches(model, x), rounds)


def fastest(call: Callable[[], object], rounds: int) -> float:
    """Call a blocking function `rounds` times, each after a barrier; return its least seconds."""
    took = []
    for _ in range(rounds):
        dist.barrier()
        begun = time.perf_counter()
        call()
        took.append(time.perf_counter() - begun)
    return min(took)
