"""Make the widget of notebook 00: four processes print who they are, and add up their numbers.

The widget really runs them when it is made, and animates their messages. Each of its two buttons
launches four new ones, one of which is killed or forgets a call, to show what `launch` reports.
"""

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
    """Print this rank's process id; return four numbers, each the sum of 10^rank over all ranks.

    Every rank of a launch calls it. It adds by a ring of sends and receives; four ranks get 1111.
    """
    print(f"here I am, pid {os.getpid()}")
    x = torch.full((4,), 10.0 ** dist.get_rank())
    return ring_all_reduce(x).tolist()


# {label of a button: source of the function that it launches}. The sources are texts, because an
# error's report shows lines of the reader's own code only, and none of ddpkit's.
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

    If the function fails on a rank, the error report shows its lines. Reports leave out lines of
    ddpkit's own files, so a function of this module would be shown without any.

    source: the source of the function. It begins with "def NAME(", and it may use `os`, `torch` and
        `dist`, which is torch.distributed.
    """
    scope = {"os": os, "torch": torch, "dist": dist}
    name = "<below the button>"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    exec(compile(source, name, "exec"), scope)
    return scope[source.partition("(")[0].removeprefix("def ")]


class FourRanks(Live):
    """A widget that launches a ring all-reduce on four ranks, and shows their messages.

    Creating one launches the ranks, and waits until they have finished. A cell that ends with the
    object shows the animation of their messages and, below it, two buttons, each of which launches
    a function that goes wrong.

    box: the ipywidgets widget that Jupyter shows for the object, made on first use.
    player: the widget in it that animates the messages, with a slider over the hops.
    report: the HTML widget below the buttons, made together with `box`. After a click it shows the
        code of the button's function, its error, and a picture of the ranks' last calls.
    """

    def __init__(self):
        from .player import player

        self.player = player(launch(introduce_and_add, keep_values=True), by_hop=True, plays=True)
        super().__init__(self.player.text, self.player.telling)

    @cached_property
    def box(self):
        """Return the ipywidgets box with the animation, the buttons and the report, made once."""
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
        """Launch a broken function; show in `report` its code, its error and the ranks' last calls.

        label: the clicked button's label; `BREAKS[label]` is the source of the function.
        """
        from .lanes import lanes

        source = BREAKS[label]
        self.report.value = f"{said(source)}…"
        try:
            launch(written_by_a_reader(source))
        except LaunchError as error:
            shown = said(source) + said(f"{type(error).__name__}: {error}")
            self.report.value = shown + (inline(lanes(error)) if any(error.wire) else "")


def said(text: str) -> str:
    """Return text as HTML that keeps its lines and spaces, with special characters escaped."""
    return f'<pre style="{SAID}">{html.escape(text)}</pre>'


four_ranks = FourRanks  # called like the other widgets
