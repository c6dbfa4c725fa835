"""Emulate a slower link between ranks: delay calls as its latency and bandwidth would."""

import math
from dataclasses import dataclass
from functools import cache

from .. import cost
from ..tools import units
from ..tools.checks import check_positive

# Seconds, and bytes per second one way: vendors' figures, rounded down to what programs reach.
PRESETS = {
    "1 Gbit Ethernet": (50e-6, 0.117e9),
    "10 Gbit Ethernet": (30e-6, 1.17e9),
    "100 Gbit InfiniBand": (3e-6, 11.7e9),
    "PCIe 4.0 x16": (5e-6, 25e9),
    "NVLink 4": (3e-6, 370e9),
}
# {a call: the algorithm in `cost` that it is assumed to use}; others have the same name there.
USUAL = {
    "all_reduce": "ring_all_reduce",
    "reduce_scatter": "ring_reduce_scatter",
    "all_gather": "ring_all_gather",
    "all_to_all": "scatter",  # a message to each of the others, one after the other
    "broadcast": "tree_broadcast",
    "reduce": "tree_reduce",
    "new_group": "barrier",
}


@dataclass(frozen=True)
class Link:
    """A wire with a fixed latency and bandwidth, the α-β model: T(n) = latency_s + n / bytes_per_s.

    latency_s: seconds from the first byte sent to the first byte received, per message.
    bytes_per_s: bytes a rank can send each second, while it receives as many (full duplex).
    name: what `str(link)` returns; "" for a text with latency and bandwidth.
    slowdown: how many times slower this link is than the wire that it stands for; set by `slowed`.

    `launch(..., link=link)` holds messages and collectives back until the link would have delivered
    them. So a link can't be faster than the machine's own connection. For a faster one, launch with
    link.slowed(1000), say, and divide the times of messages by 1000, its `slowdown`.
    Charts and tables of such a run say "emulated". The model is Hockney's, 1994; see notebook 02.
    ValueError: the latency isn't a finite number >= 0, or the bandwidth isn't a number > 0.
    """

    latency_s: float
    bytes_per_s: float
    name: str = ""
    slowdown: float = 1.0  # how many times slower than the wire it stands for, see `slowed`

    def __post_init__(self):
        check_positive("Give bytes per second, 1.25e9 for 10 Gbit/s.", bytes_per_s=self.bytes_per_s)
        number = isinstance(self.latency_s, int | float) and not isinstance(self.latency_s, bool)
        if not number or not 0 <= self.latency_s < math.inf:
            remedy = "Give seconds, for example 50e-6."
            raise ValueError(f"expected latency_s >= 0, got {self.latency_s!r}. {remedy}")

    @classmethod
    def preset(cls, name: str) -> "Link":
        """Return the link of that name, with round figures that hold for an idle network.

        name: "1 Gbit Ethernet", "10 Gbit Ethernet", "100 Gbit InfiniBand", "PCIe 4.0 x16" or
            "NVLink 4".
        ValueError: there is no link of that name.
        """
        if name not in PRESETS:
            raise ValueError(
                f"no link is called {name!r}; there are {', '.join(map(repr, PRESETS))}"
            )
        return cls(*PRESETS[name], name=name)

    def seconds(self, op: str, nbytes: int, world_size: int) -> float:
        """Return the seconds that one collective call or message takes on this link.

        op: the call: "send", "recv", "broadcast", "reduce", "all_reduce", "scatter", "gather",
            "reduce_scatter", "all_gather", "all_to_all", "barrier" or "new_group". A collective is
            assumed to use the algorithm of `ddpkit.cost` that this module's dict `USUAL` names for
            it ("ring_all_reduce") or, if it names none, the one of the same name ("gather").
        nbytes: for a message, broadcast, reduce or all_reduce, the tensor's bytes; for a scatter,
            gather, all_gather or reduce_scatter, the bytes of all ranks' parts together; for an
            all_to_all, the bytes that one rank hands in; for a barrier or new_group, 0.
        world_size: the number of ranks in the call's group.
        ValueError: `op` is unknown, or a collective's `world_size` is less than 1.
        """
        hops, share = _hops_and_share(op, world_size)
        return hops * self.latency_s + share * nbytes / self.bytes_per_s

    def slowed(self, times: float) -> "Link":
        """Return a copy of this link that is `times` slower, with more latency and less bandwidth.

        This emulates a wire that is faster than the machine's own: launch with the slowed link, and
        divide the times of messages by `slowdown`. These times include what the machine itself
        takes, which a large `times` makes small beside the link's share. Times of computing aren't
        slowed: don't divide them.
        ValueError: `times` isn't a finite number >= 1.
        """
        number = isinstance(times, int | float) and not isinstance(times, bool)
        if not number or not 1 <= times < math.inf:
            remedy = "1000 makes the link 1000 times slower"
            raise ValueError(f"slowed expected a number >= 1, got {times!r}: {remedy}")
        name = f"{self}, {times:g} × slower"
        return Link(self.latency_s * times, self.bytes_per_s / times, name, self.slowdown * times)

    def __str__(self):
        return self.name or f"{units.duration(self.latency_s)}, {units.rate(self.bytes_per_s)}"


@cache
def _hops_and_share(op: str, world_size: int) -> tuple[int, float]:
    """Return (hops, share), from which `Link.seconds` computes how long a call takes.

    hops: the number of messages of which each waits for the one before it.
    share: the bytes of these messages together, as a multiple of the `nbytes` of `Link.seconds`.
    For example, with 4 ranks, (6, 1.5) for an all_reduce: in a ring, 6 quarters one after the
    other. For an all_gather, scatter, gather or all_to_all it is (3, 0.75): 3 messages, each of a
    quarter of all parts together. A broadcast or reduce goes along a tree.
    op: a name that `Link.seconds` knows.
    ValueError: `op` is unknown, or a collective's `world_size` is less than 1.
    """
    if op in ("send", "recv"):
        return 1, 1.0
    return cost.volume(USUAL.get(op, op), 1, world_size)
