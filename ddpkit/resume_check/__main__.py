"""The command `python -m ddpkit.resume_check`: `ddpkit.resume_check.command` runs it."""

import sys

from .command import main

sys.exit(main())
