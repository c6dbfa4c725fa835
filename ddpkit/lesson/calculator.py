"""Calculators: sliders and toggles over a pure function, with its answer in words and as a picture.

    calculator(
        lambda bucket_mib: (f"{gradients_mib / bucket_mib:.0f} messages", None),
        bucket_mib=Slider("bucket cap (MiB)", [1, 2, 4, 8], 4),
    )

The function is what tests call; the widget only turns its knobs. `Panel` is what it shares with other widgets.
"""

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import ddp
from ..tools import cost, memory
from . import charts
from .figures import WRONG, Picture, count, size

# Controls


@dataclass(frozen=True)
class Slider:
    """A slider over `values`, in their order. value: where it stands at first. show: what is written beside it.

    Also for words: a dropdown doesn't answer the arrow keys in JupyterLab.
    """

    label: str
    values: Sequence
    value: Any
    show: Callable[[Any], str] = str

    def check(self, value) -> None:
        if value not in self.values:
            known = ", ".join(map(str, self.values))
            raise ValueError(f"expected {self.label!r} to be one of {known}, got {value!r}: choose one of them")

    def widget(self):
        import ipywidgets

        return ipywidgets.SelectionSlider(
            continuous_update=False, layout={"width": "500px", "max_width": "100%"}, **self._options()
        )

    def _options(self) -> dict:
        return {"options": [(self.show(value), value) for value in self.values], "value": self.value, **_named(self)}


@dataclass(frozen=True)
class Toggle:
    """A button that is down (True) or up (False); `value`: at first."""

    label: str
    value: bool = False

    def check(self, value) -> None:
        if not isinstance(value, bool):
            raise ValueError(f"expected {self.label!r} to be True or False, got {value!r}: choose one of them")

    def widget(self):
        import ipywidgets

        return ipywidgets.ToggleButton(value=self.value, **_named(self), layout={"width": "max-content"})


def _named(control) -> dict:
    """What a widget shows of its label: beside it, and where the mouse rests."""
    return {"description": control.label, "tooltip": control.label, "style": {"description_width": "initial"}}


# Widgets


class Panel:
    """A caption and a picture under controls; where nothing is live, the text of both and the picture.

    A subclass tells what is to be seen now (`look`), its controls (`_controls`), and calls `_show` when they change.
    `image` and `caption` are widgets.
    """

    _widgets = None

    def look(self) -> tuple[str, Picture | None]:
        """The caption, and the picture if there is one."""
        raise NotImplementedError

    def _controls(self) -> list:
        """The widgets to be shown above."""
        raise NotImplementedError

    @property
    def image(self):
        return self._live()[0]

    @property
    def caption(self):
        return self._live()[1]

    def __repr__(self):
        return self.look()[0]

    def _repr_mimebundle_(self, include=None, exclude=None):
        _, picture = self.look()
        bundle = {"text/plain": repr(self)} | ({"image/png": picture.png} if picture else {})
        try:
            live = self._live()[2]._repr_mimebundle_()
        except ImportError:
            return bundle
        return live | bundle

    def _live(self):
        """(image, caption, all of it in a box)."""
        if self._widgets is None:
            import ipywidgets

            # No tooltip on the image: its view in the browser fails on one, and shows an error instead.
            image = ipywidgets.Image(format="png", layout={"max_width": "100%", "object_fit": "contain"})
            caption = ipywidgets.HTML()
            controls = ipywidgets.HBox(self._controls(), layout={"flex_flow": "row wrap"})
            self._widgets = image, caption, ipywidgets.VBox([controls, caption, image])
            self._show()
        return self._widgets

    def _show(self):
        image, caption, _ = self._widgets
        picture = None
        try:
            text, picture = self.look()
            text = html.escape(text).replace("\n", "<br>")
        except Exception as error:  # a callback has nobody to raise to
            text = f'<b style="color: {WRONG}">{html.escape(f"{type(error).__name__}: {error}")}</b>'
        image.value = picture.png if picture else b""
        image.layout.display = None if picture else "none"
        style = "font-size: 18px; line-height: 1.4; min-height: 1.4em"
        caption.value = f'<div role="status" aria-live="polite" style="{style}">{text}</div>'


class Calculator(Panel):
    """Controls over a function. `value` and `set` read and move them, with a browser or without."""

    def __init__(self, function: Callable, controls: dict[str, Slider | Toggle], text: str | None = None):
        self._function, self._all, self._text = function, controls, text
        self._values = {name: control.value for name, control in controls.items()}
        self._found: dict[tuple, tuple[str, Picture | None]] = {}
        for name, value in self._values.items():
            controls[name].check(value)
        self.widgets: dict = {}
        self.look()  # a function that can't even answer for its defaults says so here

    def look(self) -> tuple[str, Picture | None]:
        key = tuple(self._values.values())
        if key not in self._found:
            self._found[key] = self._function(**self._values)
        return self._found[key]

    def __repr__(self):
        return super().__repr__() if self._text is None else self._text

    def value(self, name: str):
        """What the control of this name stands at."""
        return self._values[self._known(name)]

    def set(self, **values) -> None:
        """Move controls, as a hand would. ValueError: no such control, or it has no such value."""
        for name, value in values.items():
            self._all[self._known(name)].check(value)
        self._values |= values
        for name in values if self.widgets else ():
            self.widgets[name].value = values[name]

    def _known(self, name: str) -> str:
        if name not in self._all:
            raise ValueError(f"no control is called {name!r}; there are {', '.join(self._all)}")
        return name

    def _controls(self) -> list:
        for name, control in self._all.items():
            widget = self.widgets[name] = control.widget()
            widget.value = self._values[name]
            widget.observe(lambda change, name=name: self._move(name, change.new), "value")
        return list(self.widgets.values())

    def _move(self, name: str, value) -> None:
        self._values[name] = value
        self._show()


def calculator(function: Callable, /, text: str | None = None, **controls: Slider | Toggle) -> Calculator:
    """A widget with a control for each argument of `function`.

    function: called with the controls' values, by name; returns (caption, Picture or None), always the same for the
    same values. What it raises later is shown as the caption. text: what stands for the widget where nothing is live
    and is compared in tests; the caption, unless that holds a number that was measured.
    ValueError: a control doesn't have the value that it is to start with; whatever `function` raises for those.
    """
    return Calculator(function, controls, text)


# What the notebooks calculate

LATENCIES_S = (1e-3, 3e-3, 10e-3)


def bucket_calculator(
    gradients: Sequence[tuple[int, torch.dtype]], ready_s: Sequence[float], model: cost.Model, world_size: int
) -> Calculator:
    """Sliders over the bucket cap and the wire's latency: the predicted timeline of a training step, all on one scale.

    gradients: (bytes, dtype) of each, in the order in which they become ready. ready_s: when, in seconds after backward
    began. model, world_size: as in `cost.timeline`; latencies are the model's own and those of `LATENCIES_S` above it.
    Its text holds none of the times, which were measured. Notebook 04.
    """
    sizes = [nbytes for nbytes, _ in gradients]
    plans = bucket_plans(gradients)
    latencies_s = [model.latency_s] + [latency_s for latency_s in LATENCIES_S if latency_s > model.latency_s]
    slowest = replace(model, latency_s=latencies_s[-1])
    longest_s = max(cost.timeline(plan, ready_s, sizes, slowest, world_size).done[-1] for plan in plans.values())

    def step(cap_bytes: int, latency_s: float) -> tuple[str, Picture]:
        plan, wire = plans[cap_bytes], replace(model, latency_s=latency_s)
        exposed_ms = 1e3 * cost.timeline(plan, ready_s, sizes, wire, world_size).exposed_s
        caption = (
            f"bucket cap {charts.binary_size(cap_bytes)}, latency {milliseconds(latency_s)}: "
            f"{count(len(plan), 'message')}, {exposed_ms:.1f} ms exposed"
        )
        return caption, charts.bucket_timeline(plan, ready_s, sizes, wire, world_size, longest_s)

    middle = list(plans)[len(plans) // 2]
    return calculator(
        step,
        charts.said_timeline(plans[middle]),
        cap_bytes=Slider("bucket cap", list(plans), middle, charts.binary_size),
        latency_s=Slider("latency α", latencies_s, model.latency_s, milliseconds),
    )


def milliseconds(seconds: float) -> str:
    """0.05 ms, 10 ms."""
    return f"{1e3 * seconds:.3g} ms"


def bucket_plans(gradients: Sequence[tuple[int, torch.dtype]]) -> dict[int, list[list[int]]]:
    """{cap in bytes: plan}: caps that double, each the last with its plan, from every gradient alone to all in one.

    gradients: as for `ddp.plan_buckets`.
    """
    found: list[tuple[int, list[list[int]]]] = []
    cap, total = 1, sum(nbytes for nbytes, _ in gradients)
    while not found or found[-1][0] < total:
        plan = ddp.plan_buckets(gradients, cap)
        if found and found[-1][1] == plan:
            found.pop()
        found.append((cap, plan))
        cap *= 2
    return dict(found)


MODELS = {"0.5B": 500_000_000, "3B": 3_000_000_000, "7.5B": 7_500_000_000, "70B": 70_000_000_000}
MODELS["XXL, 219.8B"] = memory.feed_forward_parameters(width=16384, hidden=53248, blocks=126)
CAPACITY_BYTES = 80 * 10**9


def zero_calculator() -> Calculator:
    """A model, the number of ranks and ZeRO's stage: what a rank keeps and sends in mixed precision with AdamW.

    Notebook 07.
    """
    return calculator(
        zero_stage,
        model=Slider("model", list(MODELS), "7.5B"),
        world_size=Slider("ranks", [2**power for power in range(11)], 64),
        stage=Slider("stage", [0, 1, 2, 3], 1),
    )


def zero_stage(model: str, world_size: int, stage: int) -> tuple[str, Picture]:
    """Caption and picture of `zero_calculator`."""
    parameters = MODELS[model]
    states = memory.model_states(parameters, stage, world_size)
    sent_bytes = (3 if stage == 3 else 2) * 2 * parameters * (world_size - 1) / world_size  # half precision
    fits = "fits" if states.total < CAPACITY_BYTES else "doesn't fit"
    kept = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in states._asdict().items())
    caption = (
        f"{model} on {count(world_size, 'rank')}, stage {stage}: {kept}: {size(states.total)} on each, which {fits} on "
        f"a GPU of {size(CAPACITY_BYTES)}, activations not counted. Each sends {size(sent_bytes)} in a step."
    )
    return caption, charts.zero_stages(parameters, world_size, stage, capacity_bytes=CAPACITY_BYTES)
