"""Offer `ddpkit.exercises` and its command, `python -m ddpkit.exercises`, under another name.

Notebooks say `from ddpkit.lesson import check`, then `check.broadcast(broadcast)`.
"""

import sys

from ..exercises import *  # noqa: F403
from ..runtime import processes

# Let every rank of a launch start with the exercises imported. A notebook imports this file before
# its first launch, when that costs nothing: a fork server that already runs, from which ranks are
# forked, would have to be replaced.
processes.preload(["ddpkit.exercises"])

if __name__ == "__main__":
    from ..exercises.__main__ import main

    sys.exit(main())
