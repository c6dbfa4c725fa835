"""`python -m ddpkit.bench NAME ...` runs these benchmarks; without a name, all."""

import argparse
from importlib import import_module

BENCHMARKS = (
    *("launch", "wire", "all_reduce", "reduce_scatter", "ddp", "zero", "precision"),
    *("attention", "pipeline", "tensor", "fsdp", "context", "train", "plan", "audit"),
)
MODULES = {"all_reduce": "collectives", "reduce_scatter": "collectives"}  # others: their names'


def main(arguments: list[str] | None = None):
    """Run the benchmarks. arguments: names (None: those of the command line)."""
    what = "Measure what ddpkit does on this machine."
    parser = argparse.ArgumentParser("python -m ddpkit.bench", description=what)
    parser.add_argument("names", nargs="*", choices=[*BENCHMARKS, "all"], default="all")
    names = parser.parse_args(arguments).names
    for name in BENCHMARKS if "all" in names else names:
        import_module(f"{__package__}.{MODULES.get(name, name)}").main(name)


if __name__ == "__main__":
    main()
