"""Read a rank's output from its file, and shorten and label it for display."""

import os
import re
from pathlib import Path

from ..tools.units import size

MOST_LINES = 200  # lines of a rank's output that are shown
MOST_SHOWN = 100_000  # bytes that are shown: a notebook file with four such ranks stays small
MOST_LIVE = 2_000  # lines that are shown live: each adds 25 bytes to the notebook file
KEPT_BYTES = 2_000_000  # bytes of a rank's output that are kept, from its beginning and end
HALF = KEPT_BYTES // 2
GLOO_CHATTER = re.compile(
    r"^(\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. |"
    r"\[E\d+ .*Gloo connectFullMesh failed with ).*\n?",
    re.MULTILINE,
)
# NCCL's watchdog prints this in ranks that lost another one. The report names that one.
NCCL_CHATTER = re.compile(
    r"^\[rank\d+\]:\[E.*ProcessGroupNCCL.*(remote process exited|failure detected by watchdog).*\n?"
    r"(?:(?:ncclRemoteError|Last error|socketProgress|Exception raised from|frame #).*\n?|\n)*",
    re.MULTILINE,
)


class Output:
    """The output of one rank, read from the file into which the rank prints.

    path: the file; it is created if the rank hasn't done so yet.
    fresh: True to read the file from its beginning; False to read only what is printed from now on.
    """

    def __init__(self, path: Path, fresh: bool = False):
        path.touch()  # the rank may not have created it yet
        self.path = path
        self._start = 0 if fresh else self._size()
        self._shown = self._lines = 0  # bytes and lines that `new_lines` has returned
        self._is_shown = True  # whether new lines are still shown
        self._lost = 0  # bytes that `trim` took from the file
        self._tail = b""  # the last of these bytes

    def read(self) -> str:
        """Return all the output so far, as text; of more than 2 MB (`KEPT_BYTES`), only both ends.

        These are its first and last million bytes; between them a line says how much is left out.
        Lines of Gloo and NCCL on connections, and a progress bar's old states, are dropped.
        """
        length = self._size() - self._start
        if self._lost == 0 and length <= KEPT_BYTES:
            return _clean(self._bytes(0, length))
        end = (self._tail + self._bytes(max(HALF, length - HALF), HALF))[-HALF:]
        lost = self._lost + max(0, length - HALF) - len(end)
        return _clean(self._bytes(0, HALF) + f"\n... {size(lost)} left out ...\n".encode() + end)

    def trim(self) -> None:
        """Cut the middle out of the output if more than 4 MB of it are in the file.

        Called again and again while the rank runs, so that the file stays small. The first million
        bytes stay in it, the last million are kept in memory for `read`, in place of those of an
        earlier cut. What lies between is lost, as is what the rank prints at that very moment.
        """
        length = self._size() - self._start
        if length > 2 * KEPT_BYTES:
            self._tail = self._bytes(length - HALF, HALF)
            self._lost += length - HALF
            os.truncate(self.path, self._start + HALF)

    def new_lines(self, last: bool = False) -> str:
        """Return the lines that have been completed since this was last called, to show them live.

        last: True to return the unfinished line at the end as well.
        All calls together return up to 100,000 (`MOST_SHOWN`) bytes and 2,000 (`MOST_LIVE`) lines.
        The text that reaches a limit ends with a note that no more is shown; later ones are "".
        """
        if not self._is_shown:
            return ""
        room = MOST_SHOWN - self._shown
        new = self._bytes(self._shown, room)
        some = b"\n".join(new.split(b"\n")[: MOST_LIVE - self._lines])
        self._is_shown = some == new and len(new) < room
        if not self._is_shown:
            return f"{_clean(some)}\n... it goes on, but no more of it is shown ...\n"
        whole = new if last else new[: new.rfind(b"\n") + 1]
        self._shown += len(whole)
        self._lines += whole.count(b"\n")
        return _clean(whole)

    def _size(self) -> int:
        """Return the size of the file in bytes."""
        return self.path.stat().st_size

    def _bytes(self, start: int, most: int) -> bytes:
        """Return up to `most` bytes of the file, from byte `start` of the output on.

        Byte 0 is the file's first if `fresh`, otherwise where the file ended when this was created.
        """
        with open(self.path, "rb") as file:
            file.seek(self._start + start)
            return file.read(most)


def _clean(data: bytes) -> str:
    """Return a rank's output as text, without some lines on connections and old progress bars.

    A progress bar overwrites its line after a carriage return: only its last state is left. Removed
    are Gloo's lines that it has connected, or couldn't, and those of NCCL's watchdog in a rank that
    lost another, which the failure's report names. Bytes that aren't UTF-8 become U+FFFD.
    """
    text = data.decode("utf-8", errors="replace").replace("\r\n", "\n")
    lines = NCCL_CHATTER.sub("", GLOO_CHATTER.sub("", text)).split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)


def shorten(text: str, where: str) -> str:
    """Return `text`, with its middle cut out if it is very long.

    At most 200 (`MOST_LINES`) lines are left of it, with at most 100,000 (`MOST_SHOWN`) characters
    in all. A line says how much is left out.
    where: added to that line, to say where the whole is: ", all of them in run.output[2]"; or "".
    """
    lines = text.splitlines(keepends=True)
    first, last, more = text, "", ""
    if len(lines) > MOST_LINES:
        half = MOST_LINES // 2
        first, last = "".join(lines[:half]), "".join(lines[-half:])
        more = f"{len(lines) - MOST_LINES} more lines"
    if len(first) + len(last) > MOST_SHOWN:
        half = MOST_SHOWN // 2
        first, last = first[:half], (last or first)[-half:]
        more = f"{size(len(text) - len(first) - len(last))} more"
    if not more:
        return text
    gap = "" if first.endswith("\n") else "\n"
    return f"{first}{gap}... {more}{where} ...\n{last}"


def label(rank: int, text: str) -> str:
    """Return `text` with the rank before every line, as "rank 2 | "; "" if there is no text."""
    lines = text.removesuffix("\n").split("\n") if text else []
    return "".join(f"rank {rank} | {line}\n" for line in lines)
