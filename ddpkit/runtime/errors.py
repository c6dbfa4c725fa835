"""Errors of a launch: a rank raised or died, or the ranks hang."""

import math

from ..tools.units import wrap

BOLD, PLAIN = "\x1b[1m", "\x1b[22m"


class LaunchError(RuntimeError):
    """The ranks did not finish. `output`: of each rank; `wire`: the last records of each rank."""

    def __init__(
        self, message: str, output: list[str] | None = None, wire: list[list] | None = None
    ):
        super().__init__(message)
        self.output = output or []
        self.wire = wire or []

    @property
    def run(self):
        """Return a `Run` without results, for `trace` and `flight_recorder` up to the failure."""
        from .run import Run

        return Run([None] * len(self.wire), self.output, self.wire, math.nan, "")

    def _render_traceback_(self) -> list[str]:
        """Return only the report for Jupyter to show: the launcher's own frames explain nothing."""
        return shown(f"{type(self).__name__}: {self}")


class RankError(LaunchError):
    """A rank raised, exited or was killed. `rank` is the first that failed by itself."""

    def __init__(self, message: str, rank: int, **kwargs):
        super().__init__(message, **kwargs)
        self.rank = rank

    def __reduce__(self):
        return type(self), (str(self), self.rank), self.__dict__


class NoGpu(RankError):
    """CUDA can't use the GPU that is assigned to a rank."""


class HangError(LaunchError):
    """The ranks mismatch, deadlock, or give no result in time. The message is the report."""


def shown(report: str) -> list[str]:
    """Return a report's lines, wrapped; its headline and last paragraph, the advice, are bold."""
    first, *paragraphs = report.split("\n\n")
    headline, *rest = first.splitlines()
    parts = [[f"{BOLD}{wrap(headline)}{PLAIN}", *map(wrap, rest)]]
    for paragraph in paragraphs:
        parts.append(["", *wrap(paragraph).splitlines()])
    if paragraphs:
        parts[-1][1:] = [f"{BOLD}{wrap(paragraphs[-1])}{PLAIN}"]
    return [line for part in parts for line in "\n".join(part).splitlines()]
