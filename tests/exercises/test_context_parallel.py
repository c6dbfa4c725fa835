"""The exercises of notebook 13: context parallelism."""

from .every import *  # noqa: F403
