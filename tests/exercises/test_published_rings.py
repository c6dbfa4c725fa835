"""The exercises of published rings, notebook 02."""

from .every import *  # noqa: F403
