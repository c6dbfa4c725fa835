"""The exercises of notebook 10: schedules."""

from .every import *  # noqa: F403
