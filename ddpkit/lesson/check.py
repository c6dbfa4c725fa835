"""Offer the exercises of `ddpkit.exercises`, which check a reader's answers, under a short name.

Notebooks say `from ddpkit.lesson import check`; then `check.broadcast(broadcast)` checks the
reader's function `broadcast`. `python -m ddpkit.lesson.check` runs the same command as
`python -m ddpkit.exercises`.
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
