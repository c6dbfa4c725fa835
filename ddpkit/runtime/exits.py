"""Record the line that calls `os._exit`, and handle a scheduler's SIGTERM."""

import contextlib
import ctypes
import os
import select
import signal
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from .recorder import call_site

EXIT_STATUS = 49  # the field of /proc/PID/stat, from the state on
LOOK_MS = 20  # between two looks for processes that are not there yet
exit_at_once = os._exit  # without a note


def note_exits(folder: Path, rank: int) -> None:
    """Replace `os._exit` in this rank by one that first writes down the line that called it.

    This holds in the calling process alone. Its children, such as a DataLoader's workers, exit as
    usual.
    """
    pid = os.getpid()

    def noted_exit(status):
        if os.getpid() == pid:
            file, line, function, _ = call_site(2)
            with contextlib.suppress(OSError):  # the folder is gone: the run is over
                text = f"{status}\n{file}\n{line}\n{function}"
                (folder / f"exit.{rank}").write_text(text)
        exit_at_once(status)

    os._exit = noted_exit


def noted_exit(folder: Path, rank: int) -> tuple[int, tuple[str, int, str]] | None:
    """Return (code, place) of the `os._exit` that ended a rank, or None if there was none."""
    try:
        code, file, line, function = (folder / f"exit.{rank}").read_text().split("\n")
    except (OSError, ValueError):
        return None
    return int(code), (file, int(line), function)


def exit_code(pid: int) -> int | None:
    """Return the exit code of a process that has ended, None while it runs.

    OSError: it doesn't exist, or its parent has reaped it.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return os.waitstatus_to_exitcode(int(fields[EXIT_STATUS])) if fields[0] in "ZX" else None


def watch_exits(
    ranks: Iterable[int], pid_of: Callable[[int], int], note: Callable[[int, int], None]
) -> None:
    """Start a thread that calls note(rank, exit code) when one of `ranks` ends; on Linux only.

    pid_of(rank): the rank's process id, 0 before it has one. The ranks are children of torchrun,
    not of this process, so their exit codes are read from /proc, where they stand until torchrun
    collects them, at most 0.1 s later. A pidfd wakes the thread in time, as a rule: a code may be
    missed.
    """
    if not hasattr(os, "pidfd_open"):
        return
    unknown = set(ranks)
    opened = {}  # {pidfd: (rank, pid)}
    poll = select.poll()

    def wait():
        while unknown or opened:
            for rank in [rank for rank in unknown if pid_of(rank)]:
                unknown.remove(rank)
                with contextlib.suppress(OSError):  # it has ended
                    pid = pid_of(rank)
                    descriptor = os.pidfd_open(pid)
                    opened[descriptor] = rank, pid
                    poll.register(descriptor, select.POLLIN)
            for descriptor, _ in poll.poll(LOOK_MS if unknown else None):
                rank, pid = opened.pop(descriptor)
                with contextlib.suppress(OSError):  # it has been reaped
                    note(rank, exit_code(pid))
                poll.unregister(descriptor)
                os.close(descriptor)

    threading.Thread(target=wait, daemon=True, name="ddpkit exits").start()


def answer_sigterm(answer: Callable[[], None]) -> None:
    """Call `answer` in a thread when SIGTERM arrives, even if the main thread is blocked in C++.

    A script's own handler for the signal is kept, whenever the script sets it. Forked children get
    the default handler back, so that SIGTERM still ends a DataLoader's worker.
    """
    on_main_thread = threading.current_thread() is threading.main_thread()
    if os.name != "posix" or not on_main_thread:
        return
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return

    def ours(*_):
        """Hold the main thread: the other thread, woken by the same signal, calls `answer`."""
        threading.Event().wait()

    def hold():  # a child that is ended at once must not write into its parent's pipe
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def go_on():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def reset():
        if signal.getsignal(signal.SIGTERM) is ours:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        go_on()

    def wait_for_it():
        is_ours, came = True, False
        while not (came and is_ours):
            came = signal.SIGTERM in os.read(arrived, 64)
            is_ours = signal.getsignal(signal.SIGTERM) is ours
        answer()

    arrived, written = os.pipe()
    os.set_blocking(written, False)
    signal.signal(signal.SIGTERM, ours)
    signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    os.register_at_fork(before=hold, after_in_parent=go_on, after_in_child=reset)
    threading.Thread(target=wait_for_it, daemon=True, name="ddpkit SIGTERM").start()


def end_by_sigterm() -> None:
    """End this process by SIGTERM's default action, as without ddpkit; works in any thread."""
    ctypes.CDLL(None).signal(int(signal.SIGTERM), None)
    os.kill(os.getpid(), signal.SIGTERM)
