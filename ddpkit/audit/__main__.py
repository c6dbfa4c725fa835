"""Run `python -m ddpkit.audit`: is a script on N ranks the same training as on one?"""

import sys

from .command import main

sys.exit(main())
