"""Show a progress line in JupyterLab, below a cell that takes longer than a second, until it ends.

The line has the seconds and, while ranks run, the number of calls they have made or, if nothing has
moved for a while, which rank waits for which. If a launch fails, a picture of its ranks' last calls
is left below the error report. With DDPKIT_PROGRESS=off there is neither, for tests and stored
outputs.

The line begins before torch is imported, which takes seconds, so this module imports the runtime
only when it is used.
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
    """The progress line below the cell that is running.

    display: IPython's function of that name.
    """

    def __init__(self, display):
        self.display = display
        self.done, self.thread = threading.Event(), None

    def begin(self, _info=None) -> None:
        """Start a thread for a cell that begins: it shows the line after PATIENCE_S and updates it.

        _info: what IPython hands over; it isn't used.
        """
        self.done = threading.Event()
        show = contextvars.copy_context().run  # the cell to which the line belongs
        self.thread = threading.Thread(target=show, args=(self._show, self.done), daemon=True)
        self.thread.start()

    def end(self, _result=None) -> None:
        """Stop the thread and remove the line, at the end of a cell.

        _result: the argument that IPython passes; unused.
        """
        self.done.set()
        if self.thread:
            self.thread.join()

    def _show(self, done: threading.Event) -> None:
        """Show the line and update it every EVERY_S, until `done` is set; then remove it."""
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
    """Return in words what takes this long: an import, the start of the server, or what ranks do.

    Return "" if it is none of these.
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
    """Display a picture of the ranks' last calls, if a launch failed in the cell that has ended.

    result: IPython's result of the cell. display: IPython's function of that name.
    """
    if not getattr(result.error_in_exec, "wire", None):
        return
    from .lanes import lanes

    with contextlib.suppress(ValueError):  # no rank made a call
        display(lanes(result.error_in_exec))


def show_progress() -> None:
    """Show the progress line for this kernel's cells from now on, also for the running one.

    Outside of a notebook's kernel, or with DDPKIT_PROGRESS=off, it does nothing.
    """
    if "IPython" not in sys.modules:  # so in every rank, where importing it would take a while
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
        if request.get("msg_type") == "execute_request":  # else a start-up file imports this
            progress.begin()
