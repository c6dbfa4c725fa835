"""Real ranks from a notebook cell; the algorithms of distributed training, each in a short file.

    run = launch(f, x, world_size=4)  # f(x) on 4 new ranks; run[2] is what rank 2 returned
    %load_ext ddpkit                  # in a notebook: %%ranks cells run on ranks that stay

RankError: a rank failed. HangError: ranks wait for what never comes. Link: an emulated slow wire.
In a shell: `python -m ddpkit.doctor`, `python -m ddpkit.debug`, `python -m ddpkit.explain`.
"""

import sys

if "ipykernel" in sys.modules:  # importing torch takes seconds: the cell says so from the first on
    from . import lesson  # noqa: F401

# Imported before any process group exists. torch imports it with the first optimizer, and its
# default arguments keep the group of that moment for ever: destroy_process_group() would leave
# Gloo's threads, which can abort a process at its end.
import torch.distributed.nn  # noqa: F401

from .runtime.errors import HangError, LaunchError, RankError
from .runtime.launch import Run, launch
from .runtime.link import Link

__all__ = [
    "HangError",
    "LaunchError",
    "Link",
    "RankError",
    "Run",
    "launch",
    "load_ipython_extension",
]


def load_ipython_extension(ipython):
    """Add the `%%ranks` magic and a progress line below long cells; `%load_ext ddpkit` calls it."""
    from . import lesson  # noqa: F401
    from .runtime.live import add_magic

    if "ranks" not in ipython.magics_manager.magics["cell"]:
        add_magic(ipython)
        # IPython forgets that ddpkit is loaded, so a second `%load_ext` prints no complaint.
        loaded = ipython.extension_manager.loaded
        ipython.events.register("post_run_cell", lambda _: loaded.discard("ddpkit"))
