"""Format numbers for people: three digits and a unit. MB is 10^6 bytes, MiB is 2^20.

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
MANY_RANKS = 3  # above which ranks are named by those that are left out, if these are few
RATES = {"GB/s": 1e9, "MB/s": 1e6, "kB/s": 1e3, "bytes/s": 1.0}


def size(nbytes: float) -> str:
    """Write bytes in powers of 1000: '96 B', '1.5 MB'."""
    return with_unit(nbytes, DECIMAL)


def binary_size(nbytes: float) -> str:
    """Write bytes in powers of 1024, as bucket caps are counted: '512 B', '64 KiB', '4 MiB'."""
    return with_unit(nbytes, BINARY)


def round_size(nbytes: int) -> str:
    """Write bytes in binary units if they are a whole number of them, or in decimal: '25 MiB'."""
    whole = any(nbytes % unit == 0 for name, unit in BINARY.items() if name != "B")
    return binary_size(nbytes) if whole else size(nbytes)


def duration(seconds: float) -> str:
    """Write seconds: '1.2 s', '31 µs'."""
    return with_unit(seconds, SECONDS)


def rate(bytes_per_s: float) -> str:
    """Write bytes per second: '1.17 GB/s'."""
    return with_unit(bytes_per_s, RATES)


def count(many: int, word: str) -> str:
    """Write a number of things: '1 hop', '2 hops'."""
    return f"{many} {word}" if many == 1 else f"{many} {word}s"


def with_unit(value: float, units: dict[str, float]) -> str:
    """Write `value` to three digits, in the largest unit of which it is at least one.

    units: {name: its size}, from the largest to the smallest; the last one is for all below.
    """
    for name, unit in units.items():
        number = float(f"{value / unit:.3g}")
        text = f"{number:.12g} {name}"
        if abs(number) >= 1:
            return text
    return text


def number(value) -> str:
    """Write a value in about six characters: whole numbers whole, others to three digits."""
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
    """Write '[1, 10, 100]', with no more than `most` values; None is 'nothing'."""
    if values is None:
        return "nothing"
    shown = [number(value) for value in values[:most]]
    if len(values) > most:
        shown.append("…")
    return f"[{', '.join(shown)}]"


def name_ranks(ranks: Iterable[int], world_size: int | None = None) -> str:
    """Name ranks: 'rank 2', 'ranks 0, 1 and 3', 'ranks 0 to 5 and 7'; 'every rank' of all."""
    ranks = list(ranks)
    if len(ranks) == world_size:
        return "every rank"
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    parts = list(map(str, ranks))
    if len(ranks) > 3:
        parts = _runs(ranks)
    return f"ranks {_and(parts)}"


def name_some(ranks: Sequence[int], world_size: int) -> str:
    """Name ranks: 'ranks 0, 1 and 3', or 'all but rank 7' where that is shorter."""
    ranks = list(ranks)
    rest = sorted(set(range(world_size)).difference(ranks))
    in_a_row = ranks == list(range(ranks[0], ranks[-1] + 1))
    if len(ranks) > MANY_RANKS and len(rest) in (1, 2) and not in_a_row:
        return f"all but {name_ranks(rest)}"
    return name_ranks(ranks)


def _runs(ranks: list[int]) -> list[str]:
    """Write numbers in runs: ['0 to 6', '8'] for 0, 1, 2, 3, 4, 5, 6 and 8."""
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
    *most, last = parts
    return f"{', '.join(most)} and {last}" if most else last


def wrap(text: str) -> str:
    """Wrap the lines of `text` at `COLUMNS`, continuing an indented line two spaces further."""
    lines = []
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        options = {"subsequent_indent": f"{indent}  " if indent else "", "drop_whitespace": True}
        wrapped = textwrap.wrap(line, COLUMNS, break_on_hyphens=False, **options)
        lines += wrapped if len(line) > COLUMNS else [line]
    return "\n".join(lines)
