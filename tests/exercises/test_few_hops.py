"""The second part of notebook 02's exercises."""

from .every import *  # noqa: F403
