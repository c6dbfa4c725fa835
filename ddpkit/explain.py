"""The command `python -m ddpkit.explain PATH`: `ddpkit.inspect.explain` runs it."""

import sys

from .inspect.explain import main

if __name__ == "__main__":
    sys.exit(main())
