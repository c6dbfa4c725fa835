"""Define the errors of a launch, and their layout in Jupyter."""

import math
import re

from ..tools.units import wrap

BOLD, PLAIN = "\x1b[1m", "\x1b[22m"
RED, BLACK = "\x1b[31m", "\x1b[39m"
DIFFERS = re.compile(r"\d+ ≠")  # how a row begins, in the table of calls, where ranks differ


class LaunchError(RuntimeError):
    """The base class of a launch's errors: ranks failed or hang, or a result can't be unpickled.

    message: the report. Its first line is the headline. The report of a `HangError` ends with
        advice, after a blank line.
    output: for each rank, the text that it printed, as in `Run.output`; [] if it isn't known.
    wire: for each rank, the list of its last calls, at most 256, each a `Record`: a collective
        call, a send, a receive or the making of a group. [] if they aren't known.
    """

    def __init__(
        self, message: str, output: list[str] | None = None, wire: list[list] | None = None
    ):
        super().__init__(message)
        self.output = output or []
        self.wire = wire or []

    @property
    def run(self):
        """Return a `Run`, such as `launch` returns, with this error's `output` and `wire`.

        Every result in it is None, even of a rank that finished, and the seconds are NaN.
        `error.run.trace(path)` writes the calls on a time axis, for https://ui.perfetto.dev.
        """
        from .run import Run

        return Run([None] * len(self.wire), self.output, self.wire, math.nan, "")

    def _render_traceback_(self) -> list[str]:
        """Return the lines that Jupyter shows instead of a traceback: the class and the report.

        The launcher's own frames, which a traceback would show, explain nothing.
        """
        return shown(f"{type(self).__name__}: {self}")


class RankError(LaunchError):
    """A LaunchError: a rank raised, exited (even with 0), was killed, or sent what can't be read.

    rank: the number of the rank to blame, if possible the first that failed on its own account
        rather than because another rank had failed.
    kwargs: `output` and `wire`, lists as in `LaunchError`: each rank's text, and its last calls.
    """

    def __init__(self, message: str, rank: int, **kwargs):
        super().__init__(message, **kwargs)
        self.rank = rank

    def __reduce__(self):
        """Return (class, arguments, attributes) for pickle, whose arguments would lack `rank`."""
        return type(self), (str(self), self.rank), self.__dict__


class NoGpu(RankError):
    """A RankError that says that CUDA can't use the GPU which was assigned to a rank."""


class HangError(LaunchError):
    """A LaunchError: ranks hang, or took longer than the timeout; its message is the report.

    Ranks hang if their calls differ, they wait for a call that never ends, or they can't connect.
    """


def shown(report: str) -> list[str]:
    """Return a report's lines as Jupyter shows them, wrapped and with ANSI codes for style.

    Lines are wrapped at 72 characters. Bold are the first line, which is the headline, and, if
    there are several paragraphs, the last, usually the advice. Rows of the table of the ranks'
    calls that have the mark ≠, which means that ranks differ there, are red.
    """
    first, *paragraphs = report.split("\n\n")
    headline, *rest = first.splitlines()
    parts = [[f"{BOLD}{wrap(headline)}{PLAIN}", *map(wrap, rest)]]
    for paragraph in paragraphs:
        parts.append(["", *wrap(paragraph).splitlines()])
    if paragraphs:
        parts[-1][1:] = [f"{BOLD}{wrap(paragraphs[-1])}{PLAIN}"]
    lines = [line for part in parts for line in "\n".join(part).splitlines()]
    return [f"{RED}{line}{BLACK}" if DIFFERS.match(line) else line for line in lines]
