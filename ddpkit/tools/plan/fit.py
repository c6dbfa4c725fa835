"""Measure this machine for `Machine`: what computing, updating and sending cost here.

That is the FLOP/s at a model's own shapes, the parameters that AdamW updates in a second, and α and
β, the cost of a message and of a byte.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from ... import cost
from ...models import Block, torch_attention
from ...runtime.launch import launch
from ...runtime.machine import memory_bytes
from ..checks import check_positive
from .shape import ATTENTION, MLP, Machine, Shape, half_flops

SIZES = 2**12, 2**15, 2**18, 2**21  # bytes of all-reduces to which α and β are fitted
HELD_BACK = 2**13, 2**17, 2**20  # bytes of other all-reduces, which show the error
ROUNDS = 7  # timings of each; fewer where they take longer than these seconds
BLOCK_S, CALL_S = 4.0, 0.5
LARGEST_FLOPS = 5e8  # of a forward that is timed: a larger model is measured with fewer tokens
WIDEST = 1024  # a wider model is measured with a narrower block
UPDATED = 2**20  # parameters that a timed update has


def fit(shape: Shape, ranks: int = 2) -> Machine:
    """Measure what this machine does with `ranks` ranks at a time, and return it as a `Machine`.

    This takes about 12 s at most, beside the start of the ranks, which compute on one thread each.
    All compute at once, so those that share a core are as slow as in training; the slowest one's
    figures count. In what is returned, `memory_bytes` is the memory that is free now, divided by
    the number of ranks. `error` is the median error of the predicted times of all-reduces that
    weren't used to fit, and of a block that was timed a second time.

    shape: the model, whose block is timed, with fewer tokens or a narrower one if it is large.
    ValueError: it is unknown how much memory is free, as on a system without /proc.
    """
    _, free = memory_bytes()
    remedy = "This system doesn't tell it: give the machine's figures, without measuring."
    check_positive(remedy, free_memory=free)
    run = launch(measure, shape, world_size=ranks)
    slowest = max(run, key=lambda found: found["block"])
    model = cost.fit(slowest["fitted"]) if ranks > 1 else cost.CostModel(0.0, float("inf"))
    flops_per_s = slowest["flops"] / slowest["block"]
    again = abs(slowest["block again"] - slowest["block"]) / slowest["block again"]
    wire = [model.error([held_back]) for held_back in slowest["held back"]]
    return Machine(
        ranks,
        free / ranks,
        flops_per_s,
        model,
        updates_per_s=UPDATED / slowest["update"],
        error=statistics.median([*wire, again]),
    )


def measure(shape: Shape) -> dict:
    """Time this rank's all-reduces, a block and an optimizer's update, beside the other ranks.

    Every rank must call; it computes with one thread from then on. Return a dict: "block" and
    "block again" are the seconds of a block's forward and backward, "flops" their FLOPs, "update"
    the seconds in which AdamW updates `UPDATED` parameters; "fitted" and "held back" are lists of
    `cost.Measurement`, empty if there is one rank.
    """
    torch.set_num_threads(1)
    block, flops = make_block(shape)
    found = {"flops": flops, "block": median_s(block, BLOCK_S)}
    weights = nn.Parameter(torch.zeros(UPDATED))
    weights.grad = torch.zeros(UPDATED)
    found["update"] = median_s(torch.optim.AdamW([weights]).step)
    ranks = dist.get_world_size()
    for name, sizes in {"fitted": SIZES, "held back": HELD_BACK}.items():
        measured = []
        for nbytes in sizes if ranks > 1 else ():
            tensor = torch.zeros(nbytes // 4)
            seconds = median_s(partial(dist.all_reduce, tensor))
            measured.append(cost.Measurement("ring_all_reduce", ranks, nbytes, seconds))
        found[name] = measured
    found["block again"] = median_s(block, BLOCK_S)
    return found


def make_block(shape: Shape) -> tuple[Callable[[], None], float]:
    """Make a block of the model's width, or of about `WIDEST` if that is less, with its input.

    The size of a head is the model's. The input has the model's tokens, or fewer for a forward of
    `LARGEST_FLOPS`. Return (a function that runs the block forward and backward once, the FLOPs of
    that).
    """
    head = shape.width // shape.heads
    heads = max(1, min(shape.width, WIDEST) // head)
    width = heads * head
    like = Shape(1, width, heads, shape.vocabulary, shape.length, 1)
    per_token = half_flops(ATTENTION, like, 1) + half_flops(MLP, like, 1)
    length = max(1, min(shape.length, int(LARGEST_FLOPS / per_token)))
    rows = max(1, min(shape.batch, int(LARGEST_FLOPS / (per_token * length))))
    block = Block(width, heads, 0.0, torch_attention)
    x = torch.zeros(rows, length, width, requires_grad=True)

    def train() -> None:
        block(x).sum().backward()

    same = Shape(1, width, heads, shape.vocabulary, length, 1)
    forward = half_flops(ATTENTION, same, rows * length) + half_flops(MLP, same, rows * length)
    return train, 3 * forward


def median_s(call: Callable[[], object], limit_s: float = CALL_S) -> float:
    """Return this rank's median seconds of a function call; every rank must call at the same time.

    The first call warms up and isn't counted. After it come `ROUNDS` calls, or fewer if the slowest
    rank has taken `limit_s`, the first included, but at least one. Cost: an all-reduce after each.
    """
    seconds = []
    started = time.perf_counter()
    slowest = torch.zeros(())
    # Ranks go on together or not at all: the slowest one's clock decides.
    while len(seconds) < 2 or (len(seconds) <= ROUNDS and slowest < limit_s):
        begun = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begun)
        slowest = torch.tensor(time.perf_counter() - started)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return statistics.median(seconds[1:])
