"""Lives in `ddpkit.tools.cost`."""

from .tools.cost import *  # noqa: F403
