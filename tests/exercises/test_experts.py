"""The exercises of notebook 13: experts."""

from .every import *  # noqa: F403
