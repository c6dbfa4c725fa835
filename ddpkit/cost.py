"""Another name for `ddpkit.tools.cost`."""

from .tools.cost import *  # noqa: F403
