"""The errors of a launch, and their layout in Jupyter."""

import math
import re

from ..tools.units import wrap

BOLD, PLAIN = "\x1b[1m", "\x1b[22m"
RED, BLACK = "\x1b[31m", "\x1b[39m"
DIFFERS = re.compile(r"\d+ ≠")  # a row of the table of calls


class LaunchError(RuntimeError):
    """Ranks did not finish. output, wire: by rank, the text it printed and its last records."""

    def __init__(
        self, message: str, output: list[str] | None = None, wire: list[list] | None = None
    ):
        super().__init__(message)
        self.output = output or []
        self.wire = wire or []

    @property
    def run(self):
        """Return what there is of the run, without results: `error.run.trace(path)` writes it."""
        from .run import Run

        return Run([None] * len(self.wire), self.output, self.wire, math.nan, "")

    def _render_traceback_(self) -> list[str]:
        """Return only the report for Jupyter to show: the launcher's own frames explain nothing."""
        return shown(f"{type(self).__name__}: {self}")


class RankError(LaunchError):
    """A rank raised, exited or was killed. rank: the first that did so on its own account."""

    def __init__(self, message: str, rank: int, **kwargs):
        super().__init__(message, **kwargs)
        self.rank = rank

    def __reduce__(self):
        return type(self), (str(self), self.rank), self.__dict__


class NoGpu(RankError):
    """CUDA can't use the GPU that was assigned to a rank."""


class HangError(LaunchError):
    """Ranks made different calls, wait for ever, or took too long. The message is the report."""


def shown(report: str) -> list[str]:
    """Return the lines of a report, wrapped, with headline and advice in bold, what differs red."""
    first, *paragraphs = report.split("\n\n")
    headline, *rest = first.splitlines()
    parts = [[f"{BOLD}{wrap(headline)}{PLAIN}", *map(wrap, rest)]]
    for paragraph in paragraphs:
        parts.append(["", *wrap(paragraph).splitlines()])
    if paragraphs:
        parts[-1][1:] = [f"{BOLD}{wrap(paragraphs[-1])}{PLAIN}"]
    lines = [line for part in parts for line in "\n".join(part).splitlines()]
    return [f"{RED}{line}{BLACK}" if DIFFERS.match(line) else line for line in lines]
