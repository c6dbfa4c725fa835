"""`python -m ddpkit.bench NAME ...` runs these benchmarks; without a name, all that there are."""

import importlib
import pkgutil
import sys

from . import __path__


def main(names: list[str]):
    there_are = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "__main__")
    for name in names:
        if name not in there_are:
            sys.exit(f"no benchmark is called {name!r}; there are {', '.join(there_are)}")
    for name in names or there_are:
        importlib.import_module(f"{__package__}.{name}").main()


if __name__ == "__main__":
    main(sys.argv[1:])
