"""ddpkit: real ranks from a notebook cell, and the algorithms of distributed training, each in a file you can read."""

from .runtime.errors import HangError, LaunchError, RankError
from .runtime.launch import Run, launch
from .runtime.link import Link

__all__ = ["HangError", "LaunchError", "Link", "RankError", "Run", "launch", "load_ipython_extension"]


def load_ipython_extension(ipython):
    """`%load_ext ddpkit`: adds the `%%ranks` magic."""
    from .runtime.live import add_magic

    add_magic(ipython)
