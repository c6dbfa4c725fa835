"""All-reduce and reduce-scatter: Gloo's, ours round a ring and through shared memory.

Beside them, yardsticks. *loopback*: a ring's bytes, sent with nothing added. *pass in place*: each
number is read and written back, the least that an all-reduce into all buffers can do. *memcpy*: a
copy that reads and writes as many bytes as the sum in shared memory. Beside an all-reduce it is no
ceiling, since it touches twice the memory: the sum may be faster.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .. import doubling, ring
from ..fast import ring as fast
from ..lesson import charts
from ..shared_memory import SharedBuffer
from ..tools.checks import check_counts
from .interleave import Contest, check_close, race
from .results import AGAIN, SPEED, Goal, Results, report, results_of

LEGEND = f"""\
Time: the median, until the last rank is done. Bandwidths: GB/s.
Reached: of the speed of loopback, or, through shared memory, of a pass
in place (of memcpy, where less is written than read).
{SPEED}"""
SIZES = {
    "all_reduce": (4096, 10**6, 10**7, 25 * 2**20, 10**8),
    "reduce_scatter": (10**6, 10**7, 10**8),
}
DOUBLING_UP_TO = 10**6  # beyond, it sends too much to be of interest
GOALS = [
    Goal("fast ring", "gloo", 1.0, "all_reduce, 2 processes, (1|10|100) MB"),
    Goal("fast ring", "gloo", 0.95, "all_reduce, 4 processes, (1|10|100) MB"),
    Goal("ring", "gloo", 0.7, "all_reduce.* (10|100) MB"),
    Goal("shared memory", "memcpy", 1 / 0.85, "all_reduce, 2 processes, (25 MiB|100 MB)"),
    Goal("shared memory", "gloo", 2.5, "all_reduce.* (25 MiB|100 MB)"),
    Goal("shared memory", "gloo", 1.0, "all_reduce.* 4 KiB"),
    Goal("fast ring", "gloo", 1.8, "reduce_scatter.* (10|100) MB"),
    Goal("fast ring", "gloo, list", 1.8, "reduce_scatter.* (10|100) MB"),
]


def main(name: str):
    found = measure(name)

    def draw() -> dict:
        return {"time": charts.median_time(found), "bandwidth": charts.bandwidth(found)}

    report(name, found, GOALS, draw)


def measure(
    operation: str,
    sizes: Sequence[int] = (),
    world_sizes: Sequence[int] = (2, 4),
    rounds: int | None = None,
) -> Results:
    """Time every variant with every size in every world.

    operation: a key of `SIZES`. sizes: bytes of the tensor; () is those of `SIZES`. rounds: None is
    12, and up to 100 for small sizes. ValueError: less than one element for each rank, or no round.
    RuntimeError: a wrong sum.
    """
    found = Results(legend=LEGEND)
    for world_size in world_sizes:
        for nbytes in sizes or SIZES[operation]:
            numel = nbytes // 4 // world_size * world_size
            check_counts(numel=numel)
            usual = min(100, max(12, 200_000_000 // nbytes))
            make = partial(contest, partial(MAKE[operation], numel))
            seconds, ranks = race(make, usual if rounds is None else rounds, world_size)
            found += together(operation, world_size, nbytes, seconds, ranks[0])
    return found


def together(
    operation: str, world_size: int, nbytes: int, seconds: dict, ceilings: dict[str, str]
) -> Results:
    """Make a case's results. seconds: {variant: each round's}; ceilings: {variant: its ceiling}."""
    found = Results(results_of(operation, seconds, world_size, nbytes))
    for result in found:
        result.ceiling = ceilings[result.variant]
        reached = found.fraction(result)
        result.columns["algbw"] = f"{nbytes / result.median_s / 1e9:.3g}"
        result.columns["busbw"] = f"{result.busbw / 1e9:.3g}"
        result.columns["Reached"] = f"{100 * reached:.0f} %" if reached else ""
    return found


# On a rank


class Variant(NamedTuple):
    """One way to do the work, on one rank.

    tensor: the tensor it works on; filled with 1 before each call, untimed.
    call: does the work once; returns a tensor whose numbers must then all be `value`.
    ceiling: the name of the variant that moves as many bytes in the plainest way; "" is none.
    """

    tensor: Tensor
    call: Callable[[], Tensor]
    value: float
    ceiling: str = ""


def contest(make: Callable[[ProcessGroup], dict[str, Variant]], plain: ProcessGroup) -> Contest:
    variants = make(plain)
    baseline = next(iter(variants))
    variants[baseline + AGAIN] = variants[baseline]

    def before(name: str) -> None:
        variants[name].tensor.fill_(1)

    def found() -> dict[str, str]:
        for name, variant in variants.items():
            before(name)
            got = variant.call()
            check_close(name, got, torch.full_like(got, variant.value), 0)
        return {name: variant.ceiling for name, variant in variants.items()}

    return Contest({name: variant.call for name, variant in variants.items()}, before, found)


def all_reduces(numel: int, group: ProcessGroup) -> dict[str, Variant]:
    """{name: variant}, for tensors of `numel` float32."""
    world_size, x, other = dist.get_world_size(group), torch.ones(numel), torch.zeros(numel)

    def gloo() -> Tensor:
        dist.all_reduce(x, group=group)
        return x

    calls = {
        "gloo": gloo,
        "ring": partial(ring.ring_all_reduce, x, group),
        "fast ring": partial(fast.ring_all_reduce, x, group),
    }
    if x.nbytes <= DOUBLING_UP_TO:
        calls["doubling"] = partial(doubling.doubling_all_reduce, x, group)
    found = {name: Variant(x, call, world_size, "loopback") for name, call in calls.items()}
    buffer = SharedBuffer(numel, group=group)
    found["shared memory"] = Variant(buffer.local, buffer.all_reduce, world_size, "pass in place")
    found["pass in place"] = Variant(x, partial(x.add_, 0), 1)
    found["memcpy"] = Variant(x, partial(other.copy_, x), 1, "memcpy")  # its own: it is no rival
    share = numel // world_size * (world_size - 1)  # numbers that the ring sends twice
    found["loopback"] = loopback(x[:share], other[:share], 2, group)
    return found


def reduce_scatters(numel: int, group: ProcessGroup) -> dict[str, Variant]:
    """{name: variant}, for tensors of `numel` float32."""
    world_size, x = dist.get_world_size(group), torch.ones(numel)
    chunk, chunks = torch.zeros(numel // world_size), list(x.chunk(world_size))
    # Torch's own, on one tensor; 2.13 gave it a new name.
    on_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def gloo() -> Tensor:
        on_tensor(chunk, x, group=group)
        return chunk

    def gloo_list() -> Tensor:
        dist.reduce_scatter(chunk, chunks, group=group)
        return chunk

    calls = {
        "gloo": gloo,
        "gloo, list": gloo_list,
        "ring": partial(ring.ring_reduce_scatter, x, group),
        "fast ring": partial(fast.ring_reduce_scatter, x, group),
    }
    found = {name: Variant(x, call, world_size, "loopback") for name, call in calls.items()}
    buffer = SharedBuffer(numel, group=group)
    found["shared memory"] = Variant(buffer.local, buffer.reduce_scatter, world_size, "memcpy")
    # Reads and writes as many bytes as reading all of x and writing one chunk.
    copied = x[: (numel + len(chunk)) // 2]
    found["memcpy"] = Variant(copied, partial(torch.zeros_like(copied).copy_, copied), 1)
    sent = x[len(chunk) :]  # (W-1)/W of x
    found["loopback"] = loopback(sent, torch.zeros_like(sent), 1, group)
    return found


MAKE = {"all_reduce": all_reduces, "reduce_scatter": reduce_scatters}


def loopback(x: Tensor, landing: Tensor, messages: int, group: ProcessGroup) -> Variant:
    """Make the variant that sends `x` to the next rank `messages` times at once, into `landing`."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    right, left = (rank + 1) % world_size, (rank - 1) % world_size

    def call() -> Tensor:
        works = [dist.irecv(landing, group=group, group_src=left) for _ in range(messages)]
        works += [dist.isend(x, group=group, group_dst=right) for _ in range(messages)]
        for work in works:
            work.wait()
        return landing

    return Variant(x, call, 1)
