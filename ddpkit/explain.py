"""The command `python -m ddpkit.explain PATH`, by `ddpkit.inspect.explain`: why did a run fail?"""

import sys

from .inspect.explain import main

if __name__ == "__main__":
    sys.exit(main())
