"""The exercises of notebook 05."""

from .every import *  # noqa: F403
