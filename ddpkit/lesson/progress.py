"""Show a progress line in JupyterLab, below a cell that takes longer than a second, until it ends.

The line states the seconds so far. While ranks run, it also states how many calls of
torch.distributed they have made. If no call has begun or ended for 10 s, it says instead which rank
waits for which. If ranks fail, and their cell ends with a `LaunchError`, a picture of their last
calls appears below the error's text. The environment variable DDPKIT_PROGRESS=off turns off both
line and picture, for tests and when notebooks are saved with their outputs.

In a notebook `import ddpkit` turns the line on, and only then imports torch, which takes seconds.
So this module imports what needs torch, such as ddpkit.runtime, only inside functions.
"""

import contextlib
import contextvars
import os
import sys
import threading
import time

PATIENCE_S, EVERY_S = 1.0, 1.0
RUNTIME = "ddpkit.runtime.launch"  # imported after torch


class Progress:
    """The progress line below the notebook cell that is running; one object for the session.

    `show_progress` has IPython call `begin` before each cell and `end` after it. Each cell gets a
    thread of its own, which shows the line.

    display: the argument, IPython's function `display`.
    thread, done: the current cell's thread, None at first, and an event that is set to end it.
    """

    def __init__(self, display):
        self.display = display
        self.done, self.thread = threading.Event(), None

    def begin(self, _info=None) -> None:
        """Start a thread that shows the line after 1 s (PATIENCE_S), and keeps it up to date.

        Called when a cell begins to run. _info: the argument that IPython passes; unused.
        """
        self.done = threading.Event()
        show = contextvars.copy_context().run  # the cell to which the line belongs
        self.thread = threading.Thread(target=show, args=(self._show, self.done), daemon=True)
        self.thread.start()

    def end(self, _result=None) -> None:
        """Stop the thread, which removes the line, and wait until it has ended.

        Called when a cell has run. _result: the argument that IPython passes; unused.
        """
        self.done.set()
        if self.thread:
            self.thread.join()

    def _show(self, done: threading.Event) -> None:
        """Wait a second, show the line and update it each second until `done` is set; remove it."""
        begun, line = time.perf_counter(), None
        while not done.wait(EVERY_S if line else PATIENCE_S):
            seconds = time.perf_counter() - begun
            ranks = _what_is_done()
            said = {"text/plain": f"… {seconds:.0f} s" + (f": {ranks}" if ranks else "")}
            if line:
                line.update(said, raw=True)
            else:
                line = self.display(said, raw=True, display_id=True)
        if line:
            line.update({}, raw=True)


def _what_is_done() -> str:
    """Return in words what the cell is waiting for, or "" if that isn't known.

    A cell may wait for the import of torch, for the start of the server process from which ranks
    are forked, or for running ranks, which the text describes as "4 ranks, 12 calls so far".
    """
    if RUNTIME not in sys.modules:
        return "importing torch"
    from ..runtime.processes import is_starting
    from ..runtime.watch import Watch

    ranks = "the ranks' server starts, and imports torch once" if is_starting() else ""
    with contextlib.suppress(ValueError):  # the ranks ended meanwhile, and their board is gone
        ranks = "; ".join(watch.status() for watch in list(Watch.watching)) or ranks
    return ranks


def show_lanes(result, display) -> None:
    """Display a picture of the ranks' last calls, if a cell has ended with a `LaunchError`.

    This error says that ranks failed, and has the records of their last calls of torch.distributed.
    If no rank has made a call, nothing is displayed.
    result: IPython's result of the cell. display: IPython's function `display`.
    """
    if not getattr(result.error_in_exec, "wire", None):
        return
    from .lanes import lanes

    with contextlib.suppress(ValueError):  # no rank made a call
        display(lanes(result.error_in_exec))


def show_progress() -> None:
    """Show the progress line for this kernel's cells from now on, including the running one.

    A cell whose ranks failed then also gets a picture of their last calls, by `show_lanes`. Outside
    of a notebook's kernel, or with the environment variable DDPKIT_PROGRESS=off, nothing is done.
    Importing `ddpkit.lesson` calls this function; another call would add a second line.
    """
    if "IPython" not in sys.modules:  # true in every rank, where importing IPython takes a while
        return
    from IPython import get_ipython
    from IPython.display import display

    shell = get_ipython()
    if hasattr(shell, "kernel") and os.environ.get("DDPKIT_PROGRESS") != "off":
        progress = Progress(display)
        shell.events.register("pre_run_cell", progress.begin)
        shell.events.register("post_run_cell", progress.end)
        shell.events.register("post_run_cell", lambda result: show_lanes(result, display))
        request = shell.kernel.get_parent().get("header", {})
        if request.get("msg_type") == "execute_request":  # otherwise a start-up file imports this
            progress.begin()
