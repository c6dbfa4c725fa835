"""The command `python -m ddpkit.resume_check`: `ddpkit.resume_check.command` runs it."""

import sys

from ..audit.command import exit_at_signals
from .command import main

exit_at_signals()  # the script that runs is ended, and its copies are removed
sys.exit(main())
