"""The exercises of notebook 11: a block, the loss, gradients of norms, one length."""

from .every import *  # noqa: F403
