"""Find out how a rank ended: its exit code, the line of its `os._exit`, where it was at SIGTERM.

`os._exit` leaves no traceback, so that line is written to a file before the process ends. SIGTERM,
for example from a scheduler, wakes a thread, which reports where the process was and then ends it.
A handler alone would run in the main thread, which may be in a call of C++ that never returns.
"""

import contextlib
import ctypes
import gc
import io
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

from .recorder import call_site

EXIT_STATUS = 49  # its index among the fields of /proc/PID/stat, counted from the state on
LOOK_MS = 20  # milliseconds between two looks for ranks whose process id isn't known yet
exit_at_once = os._exit  # the original, which leaves no note


def note_exits(folder: Path, rank: int) -> None:
    """Replace `os._exit` in this rank by one that first writes down the line that called it.

    folder: the folder in which the note is the file `exit.RANK`, for `noted_exit` to read.
    This holds in the calling process alone. Its children, such as a DataLoader's workers, exit
    without a note.
    """
    pid = os.getpid()

    def noted_exit(status):
        if os.getpid() == pid:
            file, line, function, _ = call_site(2)
            # The folder is gone, since the run has finished; or os._exit will refuse the status.
            with contextlib.suppress(OSError, TypeError, ValueError):
                text = f"{status:d}\n{file}\n{line}\n{function}"
                (folder / f"exit.{rank}").write_text(text)
        exit_at_once(status)

    os._exit = noted_exit


def noted_exit(folder: Path, rank: int) -> tuple[int, tuple[str, int, str]] | None:
    """Return (status, (file, line, function)) of a rank's call of `os._exit`, or None.

    status: the number that it passed, of which Linux keeps only 8 bits: 256 becomes exit code 0.
    folder: the folder that was given to `note_exits` in that rank.
    None: the rank didn't call it, or the note can't be read.
    """
    try:
        code, file, line, function = (folder / f"exit.{rank}").read_text().split("\n")
    except (OSError, ValueError):
        return None
    return int(code), (file, int(line), function)


def end_child(pid: int, error: BaseException | None = None) -> None:
    """End this process if it isn't the rank, but a child that the user's code has forked from it.

    Without this, a child that leaves the user's code, perhaps by sys.exit, would go on as the rank
    does, and report in its name. The child flushes its files and ends, without atexit functions: a
    usual end of Python may wait for threads of torch, which a forked child doesn't have.
    pid: the rank's process id. error: the exception that ended the user's code; None: exit code 0.
        A SystemExit does as in Python; any other is printed, and the exit code is 1.
    """
    if os.getpid() == pid:
        return
    code = error.code if isinstance(error, SystemExit) else int(error is not None)
    try:
        if not isinstance(error, SystemExit | None):
            traceback.print_exception(error)
        elif not isinstance(code, int | None):
            print(code, file=sys.stderr)
            code = 1
        for stream in gc.get_objects():  # its open files, and standard output
            if issubclass(type(stream), io.IOBase):  # isinstance would ask proxies
                with contextlib.suppress(OSError, ValueError):  # closed, or only read
                    stream.flush()
    finally:
        exit_at_once(code or 0)


def exit_code(pid: int) -> int | None:
    """Return the exit code of a process that has ended, or None while it still runs.

    The code is negative if a signal ended the process: -9 for SIGKILL. The process needn't be a
    child of this one, and it is left for its parent to reap. Linux only.
    OSError: the process doesn't exist, or its parent has reaped it.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return os.waitstatus_to_exitcode(int(fields[EXIT_STATUS])) if fields[0] in "ZX" else None


def watch_exits(
    ranks: Iterable[int], pid_of: Callable[[int], int], note: Callable[[int, int], None]
) -> None:
    """Start a thread that calls note(rank, exit code) when one of `ranks` ends; on Linux only.

    ranks: the ranks of this machine whose exit codes are wanted.
    pid_of(rank): the rank's process id, or 0 as long as it isn't known; then it is asked again.
    note: is called in the thread, with a negative code if a signal ended the rank. Rarely a code is
        lost, and `note` isn't called.
    The ranks are children of torchrun, not of this process, so their exit codes are read from
    /proc, which has a code until torchrun reaps the process, by default at most 0.1 s after its
    end. A pidfd, a file descriptor that becomes readable when its process ends, wakes the thread in
    time as a rule. Where there is no `os.pidfd_open`, nothing is started.
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
    """Have a thread call `answer` when SIGTERM arrives, even if the main thread is blocked in C++.

    answer: has to end the process: the signal's handler blocks the main thread for ever, to keep
        the script from going on. A thread calls it. Python's wakeup descriptor wakes that thread,
        even during C++, when no handler runs.
    A handler that the script set before, or sets later, is kept, and then `answer` isn't called.
    Forked children get the default handler back, so that SIGTERM still ends a DataLoader's worker.
    This function does nothing on Windows, outside the main thread, or if SIGTERM is ignored.
    """
    on_main_thread = threading.current_thread() is threading.main_thread()
    if os.name != "posix" or not on_main_thread:
        return
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return

    def ours(*_):
        """Wake the module's thread, in case asyncio took its wakeup descriptor; never return."""
        os.write(written, bytes([signal.SIGTERM]))  # asyncio may have taken the wakeup's place
        threading.Event().wait()

    before = threading.local()  # the forking thread's mask

    def hold():  # a child that is ended at once must not write into its parent's pipe
        before.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def go_on():
        signal.pthread_sigmask(signal.SIG_SETMASK, before.mask)

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
    """End this process by SIGTERM's default action, as if ddpkit weren't loaded.

    Its parent then sees that SIGTERM ended it. This works in any thread, since the handler is reset
    by the C library's signal(): Python's works only in the main thread.
    """
    ctypes.CDLL(None).signal(int(signal.SIGTERM), None)
    os.kill(os.getpid(), signal.SIGTERM)
