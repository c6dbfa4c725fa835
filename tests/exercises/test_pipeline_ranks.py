"""The exercises of notebook 10: stages on ranks."""

from .every import *  # noqa: F403
