"""The command `python -m ddpkit.audit`: `ddpkit.audit.command` runs it."""

import sys

from .command import main

sys.exit(main())
