"""Format numbers for people, as text: three digits and a unit. MB is 10^6 bytes, MiB is 2^20.

>>> size(1_500_000), binary_size(65536), duration(31e-6), rate(1.17e9), count(2, "hop")
('1.5 MB', '64 KiB', '31 µs', '1.17 GB/s', '2 hops')
"""

import math
import textwrap
from collections.abc import Iterable, Sequence

DECIMAL = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0}
COLUMNS = 72  # of printed text: half a window of JupyterLab
BINARY = {"GiB": 2.0**30, "MiB": 2.0**20, "KiB": 2.0**10, "B": 1.0}
SECONDS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}
MANY_IN_A_GROUP = 8  # above which equally spaced ranks are named by the first three and the last
MANY_RANKS = 3  # above which ranks are named by those that are left out, if these are few
RATES = {"GB/s": 1e9, "MB/s": 1e6, "kB/s": 1e3, "bytes/s": 1.0}


def size(nbytes: float) -> str:
    """Return bytes as text in powers of 1000: '96 B', '1.5 MB'."""
    return with_unit(nbytes, DECIMAL)


def binary_size(nbytes: float) -> str:
    """Return bytes as text in powers of 1024, as bucket caps are: '512 B', '64 KiB', '4 MiB'."""
    return with_unit(nbytes, BINARY)


def round_size(nbytes: int) -> str:
    """Return bytes as text: '25 MiB' if they are whole KiB, otherwise in powers of 1000."""
    whole = any(nbytes % unit == 0 for name, unit in BINARY.items() if name != "B")
    return binary_size(nbytes) if whole else size(nbytes)


def duration(seconds: float) -> str:
    """Return seconds as text: '1.2 s', '31 µs'."""
    return with_unit(seconds, SECONDS)


def rate(bytes_per_s: float) -> str:
    """Return bytes per second as text: '1.17 GB/s'."""
    return with_unit(bytes_per_s, RATES)


def count(many: int, word: str) -> str:
    """Return a number with a word that gets an s unless the number is 1: '1 hop', '2 hops'."""
    return f"{many} {word}" if many == 1 else f"{many} {word}s"


def with_unit(value: float, units: dict[str, float]) -> str:
    """Return `value` as text with three digits, in the largest unit of which it is at least one.

    units: {name: its size}, from the largest to the smallest; a smaller value gets the smallest.
    """
    for name, unit in units.items():
        number = float(f"{value / unit:.3g}")
        text = f"{number:.12g} {name}"
        if abs(number) >= 1:
            return text
    return text


def number(value) -> str:
    """Return a value as text of about six characters.

    Whole numbers below 10^8 are written whole, others to two or three digits. Return "" for None,
    and the usual text of a bool, complex number or str.
    """
    if value is None:
        return ""
    if isinstance(value, bool | complex | str):
        return str(value)
    if math.isfinite(value) and value == int(value) and abs(value) < 1e8:
        return str(int(value))
    for digits in (3, 2):
        shown = f"{value:.{digits}g}"
        if len(shown) <= 6:
            return shown
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def numbers(values: Sequence | None, most: int = 16) -> str:
    """Return a list of numbers as text: '[1, 10, 100]'.

    After `most` values the rest is '…'; None is 'nothing'.
    """
    if values is None:
        return "nothing"
    shown = [number(value) for value in values[:most]]
    if len(values) > most:
        shown.append("…")
    return f"[{', '.join(shown)}]"


def name_ranks(ranks: Iterable[int], world_size: int | None = None) -> str:
    """Return a name for ranks: 'rank 2', 'ranks 0, 1 and 3', 'ranks 0 to 5 and 7'.

    More than 8 at equal distances are named by the first and the last: 'ranks 0, 4, 8, ..., 60'.
    ranks: in ascending order, not empty; more than three are joined in runs.
    world_size: if given, and all ranks are there, the name is 'every rank'.
    """
    ranks = list(ranks)
    if len(ranks) == world_size:
        return "every rank"
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    parts = list(map(str, ranks))
    spaced = equally_spaced(ranks)
    if spaced and spaced.step > 1 and len(ranks) > MANY_IN_A_GROUP:
        return f"ranks {_first_and_last(ranks)}"
    if len(ranks) > 3:
        parts = _runs(ranks)
    return f"ranks {_and(parts)}"


def name_group(ranks: Sequence[int]) -> str:
    """Return a group's name: 'group [0, 2]', or 'group [0, 4, 8, ..., 60]' for more than 8."""
    if len(ranks) > MANY_IN_A_GROUP and equally_spaced(ranks):
        return f"group [{_first_and_last(ranks)}]"
    return f"group {list(ranks)}"


def equally_spaced(ranks: Sequence[int]) -> range | None:
    """Return ascending numbers as a range; None if they aren't equally spaced."""
    if not ranks:
        return None
    step = max(1, ranks[1] - ranks[0]) if len(ranks) > 1 else 1  # a message to itself: rank twice
    spaced = range(ranks[0], ranks[0] + step * len(ranks), step)
    return spaced if list(spaced) == list(ranks) else None


def _first_and_last(ranks: Sequence[int]) -> str:
    return f"{ranks[0]}, {ranks[1]}, {ranks[2]}, ..., {ranks[-1]}"


def name_some(ranks: Sequence[int], world_size: int) -> str:
    """Return a name for ranks, 'ranks 0, 1 and 3', or 'all but rank 7'.

    The second form is for more than `MANY_RANKS` ranks that aren't consecutive, if one or two
    others are left out.

    ranks: in ascending order, not empty.
    """
    ranks = list(ranks)
    rest = sorted(set(range(world_size)).difference(ranks))
    in_a_row = ranks == list(range(ranks[0], ranks[-1] + 1))
    if len(ranks) > MANY_RANKS and len(rest) in (1, 2) and not in_a_row:
        return f"all but {name_ranks(rest)}"
    return name_ranks(ranks)


def _runs(ranks: list[int]) -> list[str]:
    """Return ascending numbers as text, in runs: ['0 to 6', '8'] for 0, 1, 2, 3, 4, 5, 6 and 8.

    Two consecutive numbers aren't joined.
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = []
    for run in runs:
        parts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run)
    return parts


def _and(parts: list[str]) -> str:
    """Return the parts as one text, joined by commas and, before the last, 'and'."""
    *most, last = parts
    return f"{', '.join(most)} and {last}" if most else last


def wrap(text: str) -> str:
    """Return `text` with its lines wrapped at `COLUMNS`.

    The rest of an indented line is indented two spaces further.
    """
    lines = []
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        options = {"subsequent_indent": f"{indent}  " if indent else "", "drop_whitespace": True}
        wrapped = textwrap.wrap(line, COLUMNS, break_on_hyphens=False, **options)
        lines += wrapped if len(line) > COLUMNS else [line]
    return "\n".join(lines)
