"""What a rank has printed, read from its file, and how it is shown."""

import re
from pathlib import Path

MOST_LINES = 200  # of a rank's output that are shown
GLOO_CHATTER = re.compile(
    r"^(\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. |"
    r"\[E\d+ .*Gloo connectFullMesh failed with ).*\n?",
    re.MULTILINE,
)


class Output:
    """What a rank prints from now on."""

    def __init__(self, path: Path):
        self.path = path
        self._start = self._shown = path.stat().st_size if path.exists() else 0

    def read(self) -> str:
        """Everything since this object was made."""
        return _clean(self._bytes(self._start))

    def new_lines(self, last: bool = False) -> str:
        """The whole lines since the last call; also the unfinished one if it is the `last` call."""
        data = self._bytes(self._shown)
        whole = data if last else data[: data.rfind(b"\n") + 1]
        self._shown += len(whole)
        return _clean(whole)

    def _bytes(self, start: int) -> bytes:
        if not self.path.exists():
            return b""
        with open(self.path, "rb") as file:
            file.seek(start)
            return file.read()


def _clean(data: bytes) -> str:
    """Text without Gloo's chatter; of a progress bar that rewrote its line, what it showed last."""
    text = data.decode("utf-8", errors="replace").replace("\r\n", "\n")
    lines = GLOO_CHATTER.sub("", text).split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)


def shorten(text: str, rank: int) -> str:
    """`text` without its middle, if it is very long."""
    lines, half = text.splitlines(keepends=True), MOST_LINES // 2
    if len(lines) > MOST_LINES:
        more = f"{len(lines) - MOST_LINES} more lines, all of them in run.output[{rank}]"
        lines[half:-half] = [f"... {more} ...\n"]
    return "".join(lines)


def label(rank: int, text: str) -> str:
    """`text` with "rank 2 | " before every line."""
    lines = text.removesuffix("\n").split("\n") if text else []
    return "".join(f"rank {rank} | {line}\n" for line in lines)
