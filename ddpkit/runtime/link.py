"""An emulated link: what the same messages would cost on another wire."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """A wire with a fixed latency and bandwidth, the alpha-beta model: T(n) = latency_s + n / bytes_per_s.

    latency_s: seconds from the first byte sent to the first byte received, per message.
    bytes_per_s: bytes a rank can send each second; it can receive as many at the same time (full duplex).

    `launch(..., link=link)` holds every message back until the link would have delivered it, so a link can only be
    slower than the machine's own wire, never faster; `slowed` shows the way round. Everything drawn from such a run
    says "emulated".
    Hockney 1994. Notebook 02.
    """

    latency_s: float
    bytes_per_s: float
    name: str = ""
    slowdown: float = 1.0  # how many times slower than the wire it stands for, see `slowed`

    def __post_init__(self):
        for field in ("latency_s", "bytes_per_s"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(
                    f"Link expected a number for {field}, got {value!r}: give seconds and bytes per second"
                )
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            raise ValueError(f"Link expected latency_s >= 0, got {self.latency_s}: give seconds, for example 50e-6")
        if math.isnan(self.bytes_per_s) or self.bytes_per_s <= 0:
            raise ValueError(
                f"Link expected bytes_per_s > 0, got {self.bytes_per_s}: give bytes per second, 1.25e9 for 10 Gbit/s"
            )

    @classmethod
    def preset(cls, name: str) -> "Link":
        """The link of that name, with round figures for a good day; `Link.presets()` lists them."""
        if name not in PRESETS:
            raise ValueError(f"no link is called {name!r}; there are {', '.join(map(repr, PRESETS))}")
        return cls(*PRESETS[name], name=name)

    @staticmethod
    def presets() -> tuple[str, ...]:
        """The names that `Link.preset` knows."""
        return tuple(PRESETS)

    def seconds(self, op: str, nbytes: int, world_size: int) -> float:
        """Time of one call by the alpha-beta model, for the usual algorithm of `op` (see `steps_and_bytes`)."""
        steps, sent = steps_and_bytes(op, nbytes, world_size)
        return steps * self.latency_s + sent / self.bytes_per_s

    def slowed(self, times: float) -> "Link":
        """The same link with a clock that runs `times` slower: `times` the latency, a `times`th of the bandwidth.

        So even a wire that is faster than the machine's own can be emulated: slow it until the machine no longer
        matters, run, and divide the times of the messages by `slowdown`. What is left of the machine's own time is
        divided with them, so take `times` large, and don't divide the time of computing.
        ValueError: `times` isn't a number >= 1.
        """
        if isinstance(times, bool) or not isinstance(times, int | float) or not 1 <= times < math.inf:
            raise ValueError(f"slowed expected a number >= 1, got {times!r}: 1000 makes the link 1000 times slower")
        return Link(
            self.latency_s * times, self.bytes_per_s / times, f"{self}, {times:g} × slower", self.slowdown * times
        )

    def __str__(self):
        return self.name or f"{_with_unit(self.latency_s, SECONDS)}, {_with_unit(self.bytes_per_s, SPEEDS)}"


SECONDS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}
SPEEDS = {"GB/s": 1e9, "MB/s": 1e6, "KB/s": 1e3, "bytes/s": 1.0}


def _with_unit(value: float, units: dict[str, float]) -> str:
    """'31 µs': three digits, in the first unit that makes it 1 or more, or else in the last. As in `cost`."""
    value = float(f"{value:.3g}")
    name, unit = next(((name, unit) for name, unit in units.items() if value >= unit), list(units.items())[-1])
    return f"{value / unit:.12g} {name}"


# Latency in seconds, bytes per second one way: vendors' figures, rounded down to what a program gets.
PRESETS = {
    "1 Gbit Ethernet": (50e-6, 0.117e9),
    "10 Gbit Ethernet": (30e-6, 1.17e9),
    "100 Gbit InfiniBand": (3e-6, 11.7e9),
    "PCIe 4.0 x16": (5e-6, 25e9),
    "NVLink 4": (3e-6, 370e9),
}


def steps_and_bytes(op: str, nbytes: int, world_size: int) -> tuple[int, float]:
    """Messages that follow one another, and bytes that the busiest rank sends, when `op` moves `nbytes`.

    nbytes: the whole: the tensor of an all_reduce or broadcast, all parts together of a gather or scatter.
    all_reduce, reduce_scatter, all_gather are rings; broadcast and reduce are binomial trees; the rest is direct.
    """
    others, tree = world_size - 1, math.ceil(math.log2(world_size))
    share = others / world_size
    if op in ("send", "recv"):
        return 1, nbytes
    if op == "all_reduce":
        return 2 * others, 2 * share * nbytes
    if op in ("broadcast", "reduce"):
        return tree, tree * nbytes
    if op == "barrier":
        return tree, 0
    return others, share * nbytes
