"""`Run`: what a launch brought back, and the tools of the trade that it opens in."""

import time
from dataclasses import dataclass, field
from pathlib import Path

from .board import Record
from .flight_recorder import write_dumps
from .link import Link
from .trace import Trace, write_trace


def clock_s() -> float:
    """What to add to `time.perf_counter()`, which the records tell, to make it the time of day."""
    return time.time() - time.perf_counter()


@dataclass
class Run:
    """What a launch brought back. `run[2]` is what rank 2 returned."""

    results: list
    output: list[str] = field(repr=False)  # what each rank printed, C++ and children included
    wire: list[list[Record]] = field(repr=False)  # what each rank said, in order
    seconds: float = field(repr=False)
    backend: str = field(repr=False)  # which backend, and why
    link: Link | None = field(default=None, repr=False)
    clock_s: float = field(default_factory=clock_s, repr=False)

    def __getitem__(self, rank):
        return self.results[rank]

    def __len__(self):
        return len(self.results)

    def __iter__(self):
        return iter(self.results)

    def trace(self, path: str | Path, profiles: dict[int, str] | None = None) -> Trace:
        """Write a Chrome trace, for https://ui.perfetto.dev: `ddpkit.runtime.trace`.

        profiles: {rank: file that torch.profiler exported on that rank}, to be merged into it.
        """
        return write_trace(path, self.wire, self.clock_s, profiles or {})

    def flight_recorder(self, folder: str | Path) -> None:
        """Write what PyTorch's flight recorder would, for its analyser, or `ddpkit.explain`."""
        write_dumps(folder, self.wire, self.clock_s)

    def __repr__(self):
        return show_by_rank({rank: repr(value) for rank, value in enumerate(self.results)})


def show_by_rank(texts: dict[int, str]) -> str:
    """ "rank 2: " before each text, its further lines indented alike."""
    lines = []
    for rank, text in texts.items():
        start = f"rank {rank}: "
        lines.append(start + text.replace("\n", "\n" + " " * len(start)))
    return "\n".join(lines)
