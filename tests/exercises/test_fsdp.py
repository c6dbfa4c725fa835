"""The exercises of notebook 12."""

from .every import *  # noqa: F403
