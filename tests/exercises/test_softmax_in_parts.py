"""The exercises of notebook 08 in which a row is taken in parts."""

from .every import *  # noqa: F403
