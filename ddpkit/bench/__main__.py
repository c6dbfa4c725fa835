"""`python -m ddpkit.bench NAME ...` runs these benchmarks; without a name, all that there are."""

import argparse
import importlib
import inspect

BENCHMARKS = ("launch", "all_reduce", "reduce_scatter", "ddp", "zero", "precision", "attention")


def main(arguments: list[str] | None = None):
    """arguments: as on the command line (None: those)."""
    parser = argparse.ArgumentParser(
        "python -m ddpkit.bench", description="Measure what ddpkit does on this machine."
    )
    parser.add_argument(
        "names",
        metavar="NAME",
        nargs="*",
        help=f"{', '.join(BENCHMARKS)}; all of them if none is given",
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="also 6 ranks, 1 GB (3 GB of memory for each rank), 8192 queries",
    )
    options = parser.parse_args(arguments)
    for name in options.names:
        if name not in BENCHMARKS:
            parser.error(f"no benchmark is called {name!r}; there are {', '.join(BENCHMARKS)}")
    for name in options.names or BENCHMARKS:
        benchmark = importlib.import_module(f"{__package__}.{name}").main
        takes_full = "full" in inspect.signature(benchmark).parameters
        benchmark(**{"full": options.full} if takes_full else {})


if __name__ == "__main__":
    main()
