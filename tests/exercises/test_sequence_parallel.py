"""The exercises of sequence parallel, notebook 11."""

from .every import *  # noqa: F403
