"""Run `python -m ddpkit.audit`: is a script on N ranks the same training as on one?"""

import sys

from .command import exit_at_signals, main

exit_at_signals()  # the script that runs is ended, and the folder with the tapes removed
sys.exit(main())
