"""The exercises of groups, notebook 10."""

from .every import *  # noqa: F403
