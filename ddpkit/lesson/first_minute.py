"""The first minute of the course: four processes introduce themselves, add up, and may be broken.

Notebook 00.
"""

import html
import os
from functools import cached_property

import torch
import torch.distributed as dist

from ..ring import ring_all_reduce
from ..runtime.errors import LaunchError
from ..runtime.launch import launch
from .widgets import WRAPPED, Live, asking, inline

SAID = "font-size: 13px; line-height: 1.4; white-space: pre-wrap; margin: 6px 0"


def introduce_and_add() -> list[float]:
    print(f"here I am, pid {os.getpid()}")
    x = torch.full((4,), 10.0 ** dist.get_rank())
    return ring_all_reduce(x).tolist()


def die() -> None:
    if dist.get_rank() == 2:
        os.kill(os.getpid(), 9)
    dist.barrier()


def forget() -> None:
    x = torch.ones(2)
    dist.all_reduce(x)
    if dist.get_rank() != 1:
        dist.all_reduce(x)


class FourRanks(Live):
    """The ring of a run of `introduce_and_add`, played once, and two buttons that break a new run.

    `box` holds the widgets; `report` is the HTML below the buttons.
    """

    def __init__(self):
        from .player import player

        self.player = player(launch(introduce_and_add, keep_values=True), by_hop=True, plays=True)
        super().__init__(self.player.text, self.player.telling)

    @cached_property
    def box(self):
        import ipywidgets

        self.report = ipywidgets.HTML()
        buttons = []
        for label, fn in (("kill rank 2", die), ("let rank 1 forget a call", forget)):
            button = ipywidgets.Button(description=label, layout={"width": "auto"})
            button.on_click(lambda _, label=label, fn=fn: self.break_it(label, fn))
            buttons.append(button)
        ask = ipywidgets.HTML("Four new processes, and")
        return ipywidgets.VBox(
            [self.player.box, asking(ipywidgets.HBox([ask, *buttons], layout=WRAPPED), self.report)]
        )

    def break_it(self, label: str, fn) -> None:
        """Launch `fn`, which fails, and show what is reported."""
        from .lanes import lanes

        self.report.value = f"{html.escape(label)} …"
        try:
            launch(fn)
        except LaunchError as error:
            text = f"{type(error).__name__}: {error}"
            shown = f'<pre style="{SAID}">{html.escape(text)}</pre>'
            self.report.value = shown + (inline(lanes(error)) if any(error.wire) else "")


four_ranks = FourRanks  # called like the other widgets
