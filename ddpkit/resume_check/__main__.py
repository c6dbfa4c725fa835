"""The command `python -m ddpkit.resume_check`: `ddpkit.resume_check.command` runs it."""

import signal
import sys

from .command import main

# SIGTERM acts as Ctrl-C does: the script that runs is ended, and its copies are removed.
signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
sys.exit(main())
