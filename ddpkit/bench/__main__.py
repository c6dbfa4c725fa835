"""`python -m ddpkit.bench NAME ...` runs these benchmarks; without a name, all that there are."""

import argparse
import importlib

BENCHMARKS = "launch", "all_reduce", "reduce_scatter", "ddp", "zero", "precision", "attention"


def main(arguments: list[str] | None = None):
    """arguments: as on the command line (None: those)."""
    what = "Measure what ddpkit does on this machine."
    parser = argparse.ArgumentParser("python -m ddpkit.bench", description=what)
    parser.add_argument("names", metavar="NAME", nargs="*", help=", ".join(BENCHMARKS))
    names = parser.parse_args(arguments).names or BENCHMARKS
    for name in names:
        if name not in BENCHMARKS:
            there = f"there are {', '.join(BENCHMARKS)}"
            parser.error(f"no benchmark is called {name!r}; {there}")
    for name in names:
        importlib.import_module(f"{__package__}.{name}").main()


if __name__ == "__main__":
    main()
