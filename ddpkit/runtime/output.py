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
# Of NCCL's watchdog, in ranks that another rank has left: the report names that one.
NCCL_CHATTER = re.compile(
    r"^\[rank\d+\]:\[E.*ProcessGroupNCCL.*(remote process exited|failure detected by watchdog).*\n?"
    r"(?:(?:ncclRemoteError|Last error|socketProgress|Exception raised from|frame #).*\n?|\n)*",
    re.MULTILINE,
)


class Output:
    """The file of a rank's output, read from now on; fresh: from the rank's start on."""

    def __init__(self, path: Path, fresh: bool = False):
        path.touch()  # the rank may not have created it yet
        self.path = path
        self._start = 0 if fresh else self._size()
        self._shown = self._lines = 0  # bytes and lines that `new_lines` has returned
        self._is_shown = True  # whether new lines are still shown
        self._lost = 0  # bytes that `trim` took from the file
        self._tail = b""  # the last of these bytes

    def read(self) -> str:
        """Return the output so far; beyond `KEPT_BYTES`, its beginning and its end."""
        length = self._size() - self._start
        if self._lost == 0 and length <= KEPT_BYTES:
            return _clean(self._bytes(0, length))
        end = (self._tail + self._bytes(max(HALF, length - HALF), HALF))[-HALF:]
        lost = self._lost + max(0, length - HALF) - len(end)
        return _clean(self._bytes(0, HALF) + f"\n... {size(lost)} left out ...\n".encode() + end)

    def trim(self) -> None:
        """Cut the middle out of a file that has grown too long; the rank may go on printing."""
        length = self._size() - self._start
        if length > 2 * KEPT_BYTES:
            self._tail = self._bytes(length - HALF, HALF)
            self._lost += length - HALF
            os.truncate(self.path, self._start + HALF)

    def new_lines(self, last: bool = False) -> str:
        """Return the lines that have been completed since the previous call, to show them live.

        last: the unfinished one as well. After `MOST_SHOWN` bytes or `MOST_LIVE` lines, a note, and
        from then on nothing.
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
        return self.path.stat().st_size

    def _bytes(self, start: int, most: int) -> bytes:
        with open(self.path, "rb") as file:
            file.seek(self._start + start)
            return file.read(most)


def _clean(data: bytes) -> str:
    """Decode bytes, drop chatter, and keep of a progress bar only its last state."""
    text = data.decode("utf-8", errors="replace").replace("\r\n", "\n")
    lines = NCCL_CHATTER.sub("", GLOO_CHATTER.sub("", text)).split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)


def shorten(text: str, where: str) -> str:
    """Cut the middle out of a very long text. where: words that say where all of it is."""
    lines = text.splitlines(keepends=True)
    half = MOST_LINES // 2
    if len(lines) > MOST_LINES:
        more = f"{len(lines) - MOST_LINES} more lines{where}"
        lines[half:-half] = [f"... {more} ...\n"]
    text = "".join(lines)
    half = MOST_SHOWN // 2
    if len(text) > MOST_SHOWN:
        text = f"{text[:half]}\n... {size(len(text) - MOST_SHOWN)} more{where} ...\n{text[-half:]}"
    return text


def label(rank: int, text: str) -> str:
    """Write "rank 2 | " before every line of `text`."""
    lines = text.removesuffix("\n").split("\n") if text else []
    return "".join(f"rank {rank} | {line}\n" for line in lines)
