"""Benchmarks, one file each: `python -m ddpkit.bench NAME`. Times live here, never in a test."""

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

RESULTS = Path("bench-results")


@dataclass
class Row:
    """One budget and what was measured against it; both in `unit`. samples: every single measurement."""

    what: str
    budget: float
    measured: float
    unit: str
    samples: list[float]

    @property
    def within(self) -> bool:
        return self.measured <= self.budget


def report(name: str, rows: list[Row]):
    """Print the rows as a table and keep them in bench-results/NAME.json."""
    cells = [("", "budget", "measured", "within?")]
    for row in rows:
        cells.append(
            (row.what, f"{row.budget:g} {row.unit}", f"{row.measured:.3g} {row.unit}", "yes" if row.within else "NO")
        )
    print(f"{name}, on {os.cpu_count()} cores")
    print(table(cells))
    save(name, {"rows": [{**asdict(row), "within": row.within} for row in rows]})


def table(lines: Sequence[Sequence[str]]) -> str:
    """Cells in columns, the first against the left, all others against the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([what.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(cells, widths[1:], strict=True))]).rstrip()
        for what, *cells in lines
    )


def save(name: str, results: dict):
    """Keep `results`, and on what machine they were found, in bench-results/NAME.json."""
    RESULTS.mkdir(exist_ok=True)
    machine = {"cores": os.cpu_count(), "system": platform.platform(), "torch": torch.__version__}
    (RESULTS / f"{name}.json").write_text(json.dumps({"machine": machine, **results}, indent=1) + "\n")
