"""Emulate a link: delay messages as a wire with another latency and bandwidth would."""

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
# The algorithm in `cost` assumed for a call; for others, its name is the same.
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

    `launch(..., link=link)` holds every message back until the link would have delivered it. So a
    link can only be slower than the machine's own wire; `slowed` is a way around that. Figures of
    such a run are labelled "emulated".
    ValueError: a negative or infinite latency, a bandwidth that isn't positive.
    Hockney 1994. Notebook 02.
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
        """Return the link of that name; its figures are round, of an idle network.

        "1 Gbit Ethernet", "10 Gbit Ethernet", "100 Gbit InfiniBand", "PCIe 4.0 x16" or "NVLink 4".
        """
        if name not in PRESETS:
            raise ValueError(
                f"no link is called {name!r}; there are {', '.join(map(repr, PRESETS))}"
            )
        return cls(*PRESETS[name], name=name)

    def seconds(self, op: str, nbytes: int, world_size: int) -> float:
        """Return how long one call takes on this link, by the usual algorithm (`USUAL`).

        nbytes: of the tensor of an all_reduce; of all parts together for a gather or scatter.
        """
        hops, share = _hops_and_share(op, world_size)
        return hops * self.latency_s + share * nbytes / self.bytes_per_s

    def slowed(self, times: float) -> "Link":
        """Return this link `times` slower, with more latency and less bandwidth.

        This emulates a wire that is faster than the machine's own: slow it until the machine no
        longer matters, run, and divide the times of the messages by `slowdown`. The machine's own
        share of them is divided as well, so choose a large `times`; don't divide computing times.
        ValueError: `times` isn't a number >= 1.
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
    """Return what a collective does one after another: (hops, bytes as multiples of the whole)."""
    if op in ("send", "recv"):
        return 1, 1.0
    return cost.volume(USUAL.get(op, op), 1, world_size)
