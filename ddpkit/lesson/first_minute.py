"""The widget of notebook 00: four processes introduce themselves, add up, and may be broken."""

import html
import linecache
import os
from collections.abc import Callable
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


# What the buttons run, as text: a report names lines of a reader's code, none of the library's.
BREAKS = {
    "kill rank 2": """def die():
    if dist.get_rank() == 2:
        os.kill(os.getpid(), 9)
    dist.barrier()
""",
    "let rank 1 forget a call": """def forget():
    x = torch.ones(2)
    dist.all_reduce(x)
    if dist.get_rank() != 1:
        dist.all_reduce(x)
""",
}


def written_by_a_reader(source: str) -> Callable[[], None]:
    """Return the function that `source` defines, as if a reader had typed it into a cell.

    So a report of its failure shows its lines.
    """
    scope = {"os": os, "torch": torch, "dist": dist}
    name = "<below the button>"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    exec(compile(source, name, "exec"), scope)
    return scope[source.partition("(")[0].removeprefix("def ")]


class FourRanks(Live):
    """Launch four ranks that add up round a ring, and show it; two buttons launch ranks that fail.

    The film of the run plays once. `report` is the HTML below the buttons: the code of the broken
    function, and the error that `launch` raised.
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
        for label in BREAKS:
            button = ipywidgets.Button(description=label, layout={"width": "auto"})
            button.on_click(lambda _, label=label: self.break_it(label))
            buttons.append(button)
        ask = ipywidgets.HTML("Four new processes, and")
        return ipywidgets.VBox(
            [self.player.box, asking(ipywidgets.HBox([ask, *buttons], layout=WRAPPED), self.report)]
        )

    def break_it(self, label: str) -> None:
        """Launch the broken function of the button `label`; show its code and the error."""
        from .lanes import lanes

        source = BREAKS[label]
        self.report.value = f"{said(source)}…"
        try:
            launch(written_by_a_reader(source))
        except LaunchError as error:
            shown = said(source) + said(f"{type(error).__name__}: {error}")
            self.report.value = shown + (inline(lanes(error)) if any(error.wire) else "")


def said(text: str) -> str:
    """Make the HTML of preformatted text."""
    return f'<pre style="{SAID}">{html.escape(text)}</pre>'


four_ranks = FourRanks  # called like the other widgets
