"""Another name for `ddpkit.exercises`, and for its command, `python -m ddpkit.exercises`."""

import sys

from ..exercises import *  # noqa: F403
from ..runtime import processes

# The ranks of checks start with the exercises imported. A notebook imports this file before its
# first launch, when that costs nothing: a fork server that already runs would have to be replaced.
processes.preload(["ddpkit.exercises"])

if __name__ == "__main__":
    from ..exercises.__main__ import main

    sys.exit(main())
