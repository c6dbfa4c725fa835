"""Another name for `ddpkit.tools.memory`."""

from .tools.memory import *  # noqa: F403
