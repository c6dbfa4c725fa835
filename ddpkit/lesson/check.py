"""Lives in `ddpkit.exercises`."""

from ..exercises import *  # noqa: F403
