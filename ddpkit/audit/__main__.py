"""Run `python -m ddpkit.audit`: is a script on N ranks the same training as on one?"""

import signal
import sys

from .command import main

ENDS = signal.SIGTERM, signal.SIGHUP


def leave(number: int, frame: object) -> None:
    """Act as Ctrl-C does: the script that runs is ended, and the folder with the tapes removed."""
    for end in ENDS:  # `timeout` sends SIGTERM twice; the second must not stop the clearing up
        signal.signal(end, signal.SIG_IGN)
    sys.exit(128 + number)


for end in ENDS:
    if signal.getsignal(end) is signal.SIG_DFL:  # nohup ignores SIGHUP
        signal.signal(end, leave)
sys.exit(main())
