"""`ddpkit.ring` for speed on CPUs, and as a transport whose first hop goes on beside computing.

Chunks travel in segments: while one is added, the next are on their way, and receives are posted
ahead, so that senders seldom wait for a receiver. Two ranks all-reduce little data in one hop.
Against the plain ring at 100 MB: docs/measurements.md. The bytes are the same. On GPUs chunks stay
whole, and NCCL, which cuts them itself, gets each hop's send and receive as one batch.
"""

from types import SimpleNamespace

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..doubling import doubling_all_reduce
from ..ring import flat

SEGMENT_BYTES = 4 * 2**20  # long enough to hide what a message costs, short enough for the cache
AHEAD = 4  # receives that are posted before they are needed


def ring_reduce_scatter(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Sum `x` over all ranks, in place, until this rank holds chunk `rank` of the sum; return that.

    `ddpkit.ring.ring_reduce_scatter` with the same bytes in more and shorter messages.
    """
    Trip(x, group, gather=False).wait()
    return flat(x, group).tensor_split(dist.get_world_size(group))[dist.get_rank(group)]


def ring_all_gather(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Copy chunk r of rank r's `x` into the `x` of every rank, in place; return `x`.

    `ddpkit.ring.ring_all_gather` with the same bytes in more and shorter messages.
    """
    Trip(x, group, reduce=False).wait()
    return x


def ring_all_reduce(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Sum `x` over all ranks, on every rank, in place; return `x`.

    `ddpkit.ring.ring_all_reduce` with the same bytes in more and shorter messages. Two ranks swap
    less than 16 MiB (`AHEAD` segments) whole, in one hop: the same bytes, half the latency.
    """
    if dist.get_world_size(group) == 2 and x.nbytes < AHEAD * SEGMENT_BYTES:
        return doubling_all_reduce(x, group)
    Trip(x, group).wait()
    return x


class RingTransport:
    """The two functions of `ddpkit.transport`, by messages round a ring.

    While a rank computes, only the first of W-1 hops goes on, as far as `AHEAD` segments; `wait()`
    does the rest. Two trips at once would take each other's messages, so starting one first waits
    for the one before: share one object among all users. It keeps the last trip's tensor alive.
    """

    def __init__(self):
        self._last = SimpleNamespace(wait=lambda: None)

    def start_reduce_scatter(self, flat: Tensor, group: ProcessGroup | None = None) -> "Trip":
        """Begin to send a reduce-scatter's first chunk; wait() of the returned trip does the rest.

        flat: 1-D, contiguous, of one length on all ranks. In place: afterwards this rank's chunk
        is the sum, and the others hold partial sums.
        """
        return self._start(flat, group, gather=False)

    def start_all_gather(self, flat: Tensor, group: ProcessGroup | None = None) -> "Trip":
        """Begin to send an all-gather's first chunk; wait() of the returned trip does the rest.

        flat: 1-D, contiguous, of one length on all ranks. In place: afterwards it has all chunks.
        """
        return self._start(flat, group, reduce=False)

    def _start(self, flat: Tensor, group: ProcessGroup | None, **halves: bool) -> "Trip":
        self._last.wait()
        self._last = Trip(flat, group, **halves)
        return self._last


class Trip:
    """A reduce-scatter, an all-gather or both, in place; making it begins to send the first chunk.

    `wait()` does the rest. In hop h rank r sends chunk r-h to the right and receives chunk r-h-1
    from the left, modulo W. Hops 1 to W-1 are the reduce-scatter: what arrives is added. Hops W to
    2W-2 are the all-gather: it is stored. reduce=False or gather=False leaves one of them out.
    Leave `x` alone, and send nothing else round the ring, until `wait()` has returned.
    """

    def __init__(self, x: Tensor, group: ProcessGroup | None, reduce=True, gather=True):
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        first_hop = 1 if reduce else world_size
        self.last_hop = 2 * world_size - 2 if gather else world_size - 1
        self.right, self.left, self.group = (rank + 1) % world_size, (rank - 1) % world_size, group
        self.chunks = flat(x, group).tensor_split(world_size)
        self.world_size = world_size
        self.longest, self.ahead = max(1, len(self.chunks[0])), 1
        if x.is_cpu:
            self.longest = min(self.longest, SEGMENT_BYTES // x.element_size())
            self.ahead = AHEAD

        self.arrivals = []  # (hop, segment of x), in the order in which they come
        for hop in range(first_hop, self.last_hop + 1):
            segments = self.chunks[(rank - hop - 1) % world_size].split(self.longest)
            self.arrivals += [(hop, segment) for segment in segments]
        self.places = self._places_to_receive(x)
        # Kept to the end: letting a handle go makes Gloo wait for its own thread.
        self.sending, self.receiving = [], []
        if self.arrivals:
            first = self.chunks[(rank - first_hop) % world_size].split(self.longest)
            self._start(first, self.places[: self.ahead])

    def _places_to_receive(self, x: Tensor) -> list[Tensor]:
        """List the tensors to receive segments into, in the order in which segments come.

        Those to be added arrive in scratch memory, used in turns; others in `x` itself.
        """
        adding = sum(hop < self.world_size for hop, _ in self.arrivals)
        scratch = x.new_empty(min(self.ahead, adding), self.longest)
        places = []
        for number, (hop, segment) in enumerate(self.arrivals):
            turn = number % self.ahead
            places.append(scratch[turn, : len(segment)] if hop < self.world_size else segment)
        return places

    def _start(self, outgoing: tuple[Tensor, ...], incoming: list[Tensor]) -> None:
        """Start to send segments to the right, and to receive from the left; keep the handles."""
        to = {"group": self.group, "group_peer": self.right}
        source = {"group": self.group, "group_peer": self.left}
        batch = [dist.P2POp(dist.isend, segment, **to) for segment in outgoing]
        batch += [dist.P2POp(dist.irecv, place, **source) for place in incoming]
        works = dist.batch_isend_irecv(batch) if batch else []  # NCCL: one handle for all
        self.sending += works[: len(outgoing)]
        self.receiving += works[len(works) - len(incoming) :]

    def wait(self) -> None:
        """Add or store each segment as it arrives, and pass it on; a second call does nothing."""
        for number, (hop, segment) in enumerate(self.arrivals):
            self.receiving[number].wait()
            if hop < self.world_size:
                segment += self.places[number]
            passed_on = (segment,) if hop < self.last_hop else ()
            after_next = number + self.ahead
            self._start(passed_on, self.places[after_next : after_next + 1])
        for work in self.sending:
            work.wait()
        self.arrivals, self.sending = [], []
