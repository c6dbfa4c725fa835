"""`Run`: the results, output and calls of a launch, that is of one call of `launch`.

On request it writes the calls to files: a Chrome trace for https://ui.perfetto.dev, or dumps in the
format of PyTorch's flight recorder, which PyTorch's analyser `torchfrtrace` reads.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path

from .board import Record
from .link import Link


def clock_s() -> float:
    """Return `time.time()` − `time.perf_counter()`, to turn records' times into times of day."""
    return time.time() - time.perf_counter()


@dataclass
class Run:
    """The results of a launch: `run[2]` is the value that rank 2 returned, `list(run)` all values.

    The error of a failed launch (a RankError or HangError) has a `Run` as well, `error.run`: all
    results None, seconds NaN, backend "". Under torchrun each rank gets a `Run` of all ranks.

    results: the values that the ranks returned, by rank.
    output: for each rank, the text that it, its C++ code and its child processes printed; "" under
        torchrun. The middle of a text over 2 MB is cut, and lines of Gloo and NCCL on connections.
    wire: for each rank, the `Record`s of its calls (collectives, messages, new groups) in order;
        after a failed launch only the last 256. Their times are of `time.perf_counter()`.
    seconds: the time from the start of the first process until all have ended; under torchrun, the
        time that this rank spent in the function.
    backend: the backend that was chosen, and why, as in "gloo on CPU: as asked".
    link: the `Link` (latency and bandwidth) that was emulated between the ranks, or None.
    clock_s: the seconds to add to the records' times to get those of `time.time()`.
    """

    results: list
    output: list[str] = field(repr=False)
    wire: list[list[Record]] = field(repr=False)
    seconds: float = field(repr=False)
    backend: str = field(repr=False)
    link: Link | None = field(default=None, repr=False)
    clock_s: float = field(default_factory=clock_s, repr=False)

    def __getitem__(self, rank):
        try:
            return self.results[rank]
        except IndexError:
            last = len(self) - 1
            raise IndexError(f"run[{rank}]: the ranks of this run go from 0 to {last}") from None

    def __len__(self):
        return len(self.results)

    def __iter__(self):
        return iter(self.results)

    def trace(self, path: str | Path, profiles: dict[int, str] | None = None):
        """Write a Chrome trace of all ranks' calls, to be opened in https://ui.perfetto.dev.

        Return a `ddpkit.inspect.trace.Trace`, which a notebook shows as a link to the file.
        path: the file to write.
        profiles: {rank: file that torch.profiler exported on that rank}, to be merged into it.
        """
        from ..inspect.trace import write_trace  # only when used: it stands above the runtime

        return write_trace(path, self.wire, self.clock_s, profiles or {})

    def flight_recorder(self, folder: str | Path) -> None:
        """Write all calls in PyTorch's flight recorder's format, for `torchfrtrace` to read.

        folder: created if necessary; gets a file for each rank, `rank_0`, `rank_1`, ..., in place
            of older ones. `ddpkit.explain` reads such a folder as well.
        """
        from ..inspect.flight_recorder import write_dumps

        write_dumps(folder, self.wire, self.clock_s)

    def __repr__(self):
        return show_by_rank({rank: repr(value) for rank, value in enumerate(self.results)})


def show_by_rank(texts: dict[int, str]) -> str:
    """Join texts into one, each on a new line that begins with its rank, as in "rank 2: ".

    texts: {rank: its text}, in the order in which they are to stand. Further lines are indented.
    """
    lines = []
    for rank, text in texts.items():
        start = f"rank {rank}: "
        lines.append(start + text.replace("\n", "\n" + " " * len(start)))
    return "\n".join(lines)
