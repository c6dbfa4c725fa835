"""The exercises of notebook 07."""

from .every import *  # noqa: F403
