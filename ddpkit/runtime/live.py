"""Run notebook cells by `%%ranks` on ranks that stay alive, and so keep what cells define."""

import argparse
import atexit
import contextlib
import hashlib
import linecache
import math
import re
import shlex
import sys

from . import processes, worker
from .backends import Choice, start_on
from .board import Record
from .errors import LaunchError, RankError
from .launch import MOST_RANKS
from .look import Look
from .run import Run, show_by_rank
from .watch import Watch

OWN_NAMES = (
    "%%ranks cells know the names of %%ranks cells, not the notebook's, and each rank its own: "
    "define or import it in one."
)
PLAIN_PYTHON = "%%ranks cells are plain Python: no lines that begin with ! or %."
GONE = "The ranks were ended, and their variables with them; the next %%ranks cell starts new ones."
NO_RANK = "Default process group has not been initialized"  # torch's words
NOT_HERE = (
    "The notebook itself is no rank. launch(f) calls f on ranks, where launch(f()) calls it here; "
    "a %%ranks cell runs on ranks, too."
)
USAGE = "expected %%ranks [N] [--on 0,2] [--trace FILE]"


class LiveWorld:
    """A set of ranks, joined by torch.distributed, that stay alive to run one cell after another.

    world_size: the number of ranks. They use NCCL if there is a GPU for each, or, with NCCL 2.30 or
        newer, at least one GPU for all to share; otherwise Gloo on the CPU.
    The ranks are processes, and each keeps its own variables between cells. `is_open` is False once
    they have been ended: by `close`, or because a rank died, ranks hung, or one raised an exception
    amid calls of others. An exception that all raise, such as a NameError, doesn't end them.
    """

    def __init__(self, world_size: int):
        self.world_size = world_size
        start_on(self._start, "auto", world_size)
        self.is_open = True

    def _start(self, choice: Choice):
        """Start the ranks on the backend and devices of `choice`, and return when all have joined.

        Then `ranks` are their processes, and `board` is the shared file in which they write their
        calls. On any error the ranks are killed, and then the error is raised.
        NoGpu: a rank can't use its GPU; the caller, `backends.start_on`, catches it and starts the
        ranks again, with Gloo on the CPU. RankError: a rank failed. HangError: they don't connect.
        """
        with contextlib.ExitStack() as stack:
            self.ranks, self.board = stack.enter_context(
                processes.world(choice, self.world_size, None, False, worker.serve_cells)
            )
            Watch(self.ranks, self.board, hang_after=60.0).until_all_reply()
            self._stack = stack.pop_all()

    def run(
        self, source: str, on: list[int], traced: bool = False
    ) -> tuple[dict[int, str | None], list[list[Record]]]:
        """Run a cell on the ranks `on`, then print their output by rank; return (values, records).

        `is_open` must be True. If the cell fails, the output is printed as well.
        source: the text of the cell. on: the ranks that run it.
        traced: whether to return the records of the collective calls and messages that it makes.
        values maps each rank in `on` to the repr of the cell's last expression, None if it has none
            or its value is None; records has for each rank of the world a list of `Record`s, empty
            unless `traced`.

        After a RankError the world stays open if every rank has ended the cell and, in each group,
        all have made the same number of calls. Otherwise, and after any other error, such as
        Ctrl-C, it is closed. The message of a RankError or HangError then says so; for others a
        line is printed.
        RankError: a rank raised, exited or was killed. HangError: ranks wait in vain, make no
            progress inside their calls, or made calls that differ.
        """
        file = f"<ranks {hashlib.sha1(source.encode()).hexdigest()[:8]}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        watch = Watch(self.ranks, self.board)
        try:
            watch.check_all_live()
            for rank in on:
                with contextlib.suppress(BrokenPipeError):  # it has just died; the watch reports it
                    self.ranks[rank].pipe.send((source, file, traced))
            replies = watch.until_all_reply(on)
            watch.show_output()
            wire = [replies[rank][1] if rank in on else [] for rank in range(self.world_size)]
            return {rank: value for rank, (value, _) in replies.items()}, wire
        except BaseException as error:
            said = str(error) if isinstance(error, RankError) else ""
            if " raised NameError: " in said:
                error.args = (f"{said}\n{OWN_NAMES}",)
            elif re.search(r" raised SyntaxError: .*\n.* of the cell: [!%]", said):
                error.args = (f"{said}\n{PLAIN_PYTHON}",)
            if isinstance(error, RankError) and self._in_step(watch):
                raise
            self.close()
            if isinstance(error, LaunchError):
                error.args = (f"{error}\n{GONE}",)
            else:
                print(GONE)
            raise

    def _in_step(self, watch: Watch) -> bool:
        """Return, after a cell has failed, whether the ranks can run another one together.

        They can if all are alive and have replied (a late reply would be taken for one to the next
        cell), all members of a group have made equally many calls in it, and each send has its
        receive. This looks once, without waiting.
        watch: the `Watch` of the failed cell; it knows which ranks haven't replied.
        """
        alive = all(rank.exit_code is None for rank in self.ranks)
        return alive and not watch.pending and Look(self.board).in_step()

    def close(self):
        """End the ranks, and with them their variables. Closing twice does nothing."""
        self.is_open = False
        self._stack.close()


class RanksMagic:
    """The `%%ranks` magic of one notebook, with the world of ranks that it keeps alive.

    world: the `LiveWorld`, or None while there is none. After a failure it can be one that is
        closed. The world is closed when the notebook's kernel ends.
    """

    def __init__(self):
        self.world: LiveWorld | None = None
        self._size = 4
        atexit.register(self.close)

    def __call__(self, line: str, cell: str):
        """%%ranks [N] [--on 0,2] [--trace FILE]

        Run the cell on N ranks that stay alive after it. N is 4 at first, and later as many as last
        time; another N ends the ranks and starts new ones. Names persist between cells; `rank`,
        `world_size`, `dist`, `torch` and `device` are there. The value of the last expression is
        shown for each rank where it isn't None. A failure that leaves ranks waiting, or ends one,
        ends them all; the error says so, and the next cell starts new ones, without the names.
        --on: run it on these ranks only.
        --trace: write the cell's collective calls and messages into FILE as a trace, for
        https://ui.perfetto.dev, and show a link to it.
        """
        options = _parse(line)
        if self.world is not None and not self.world.is_open:
            self.world = None
        size = options.n or self._size
        on = _ranks(options.on, size)
        if self.world is not None and self.world.world_size != size:
            gone = f"{self.world.world_size} ranks were ended, and their variables with them"
            print(f"{gone}; here are {size} new ones.")
            self.close()
        if self.world is None:
            self.world = LiveWorld(size)
            self._size = size
        values, wire = self.world.run("\n" + cell, on, options.trace is not None)
        shown = show_by_rank({rank: values[rank] for rank in on if values[rank] is not None})
        print(shown, end="\n" if shown else "")
        if options.trace is None:
            return None
        return Run([None] * size, [""] * size, wire, math.nan, "").trace(options.trace)

    def close(self):
        """End the ranks, if there are any."""
        if self.world is not None:
            self.world.close()
            self.world = None


def _parse(line: str) -> argparse.Namespace:
    """Return the options of a `%%ranks` line: n, on and trace, each None if it isn't given.

    line: what follows `%%ranks`. "4 --on 0,2 --trace x.json" gives n=4, the number of ranks,
        on="0,2", those that run the cell, and trace="x.json", the file for a trace of its calls.
    ValueError: the line has another form, or n isn't from 1 to 64 (`MOST_RANKS`).
    """
    parser = argparse.ArgumentParser(prog="%%ranks", add_help=False, exit_on_error=False)
    parser.add_argument("n", nargs="?", type=int)
    parser.add_argument("--on")
    parser.add_argument("--trace")
    try:
        options, unknown = parser.parse_known_args(shlex.split(line))
    except (argparse.ArgumentError, ValueError) as error:  # ValueError: an open quote
        raise ValueError(f"{USAGE}, got {line!r}: {error}") from None
    if unknown:
        raise ValueError(f"{USAGE}, got {line!r}: {unknown[0]} means nothing here")
    if options.n is not None and not 1 <= options.n <= MOST_RANKS:
        fit = f"1 to {MOST_RANKS} ranks on one machine"
        raise ValueError(f"%%ranks expected {fit}, got {options.n}")
    return options


def _ranks(text: str | None, world_size: int) -> list[int]:
    """Return the ranks that `--on` names, sorted; all of them if `text` is None.

    text: what follows `--on`, such as "0,2". ValueError: these aren't ranks of this world.
    """
    if text is None:
        return list(range(world_size))
    try:
        ranks = sorted({int(part) for part in text.split(",")})
    except ValueError:
        form = "ranks separated by commas, without spaces, as in --on 0,2"
        raise ValueError(f"--on expected {form}, got {text!r}") from None
    if ranks[0] < 0 or ranks[-1] >= world_size:
        expected = f"ranks from 0 to {world_size - 1}"
        raise ValueError(f"--on expected {expected}, got {text!r}: there are {world_size} ranks")
    return ranks


def magic_first(lines: list[str]) -> list[str]:
    """Return a cell's lines with the line `%%ranks ...` moved above the comments that precede it.

    IPython knows a cell magic only in the first line.
    lines: with their line ends. They come back unchanged if no line begins with `%%ranks`, or if
        code stands before it.
    """
    for place, line in enumerate(lines):
        if line.startswith("%%ranks"):
            return [line, *lines[:place], *lines[place + 1 :]]
        if line.strip() and not line.startswith("#"):
            break
    return lines


def tell_where_ranks_are(result):
    """Explain, below torch's own error, that the notebook itself is not a rank.

    result: of the cell that has just run, as IPython gives it. Nothing is printed unless it failed
        because torch.distributed isn't initialised here.
    """
    error = result.error_in_exec
    if NO_RANK in str(error) and not isinstance(error, LaunchError):
        print(NOT_HERE, file=sys.stderr)


def add_magic(ipython):
    """Register `%%ranks` with IPython and, on Linux, start the server from which ranks are forked.

    The first cell would otherwise wait for it: it takes seconds to import torch.
    ipython: the notebook's InteractiveShell.
    """
    from IPython.core.error import UsageError

    magic = RanksMagic()

    def ranks(line, cell):
        try:
            return magic(line, cell)
        except ValueError as error:
            raise UsageError(str(error)) from None  # shown without a traceback

    ranks.__doc__ = RanksMagic.__call__.__doc__
    ipython.register_magic_function(ranks, "cell", "ranks")
    ipython.input_transformers_cleanup.append(magic_first)
    ipython.events.register("post_run_cell", tell_where_ranks_are)
    processes.warm_up()
