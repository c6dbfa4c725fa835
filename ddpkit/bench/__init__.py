"""Benchmarks, one file each: `python -m ddpkit.bench NAME`. Times live here, never in a test."""

import json
import os
import platform
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
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print(f"{name}, on {os.cpu_count()} cores")
    for what, *numbers in cells:
        print(what.ljust(widths[0]), *(n.rjust(w) for n, w in zip(numbers, widths[1:], strict=True)), sep="  ")
    RESULTS.mkdir(exist_ok=True)
    machine = {"cores": os.cpu_count(), "system": platform.platform(), "torch": torch.__version__}
    results = {"machine": machine, "rows": [{**asdict(row), "within": row.within} for row in rows]}
    (RESULTS / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
