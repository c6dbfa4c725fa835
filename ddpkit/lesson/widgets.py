"""Widgets: `Live` is any of them, `StepThrough` a row of pictures, `Calculator` a function with a
control for each of its arguments.

    Calculator(
        lambda bucket_mib: (f"{gradients_mib / bucket_mib:.0f} messages", None),
        bucket_mib=Slider("bucket cap (MiB)", [1, 2, 4, 8], 4),
    )

Each works on a function that returns (caption, Picture): that is what tests call.
"""

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from . import page
from .page import Picture

Look = tuple[str, Picture | None]  # a caption, and a picture if there is one


class Live:
    """A widget where ipywidgets can show it; everywhere, a text and a picture that stand for it.

    A subclass builds `box`, its widgets, and says what stands for them.
    """

    text: str
    telling: Picture | None

    @cached_property
    def box(self):
        raise NotImplementedError

    def __repr__(self):
        return self.text

    def _repr_mimebundle_(self, include=None, exclude=None):
        stored = {"text/plain": self.text}
        if self.telling:
            stored["image/png"] = self.telling.png
        try:
            return self.box._repr_mimebundle_() | stored
        except ImportError:
            return stored


def _seen(look: Callable[[], Look]) -> tuple[str, bytes]:
    """(caption as HTML, SVG): of what `look` returns, or of what it raises."""
    try:
        text, picture = look()
        said = html.escape(text).replace("\n", "<br>")
    except Exception as error:  # a callback has nobody to raise to
        text, picture = html.escape(f"{type(error).__name__}: {error}"), None
        said = f'<b style="color: {page.WRONG}">{text}</b>'
    style = "font-size: 18px; line-height: 1.4; min-height: 2.8em"  # two lines: pictures stay put
    caption = f'<div role="status" aria-live="polite" style="{style}">{said}</div>'
    return caption, picture.svg if picture else b""


def _image(svg: bytes):
    import ipywidgets

    # No tooltip: the image's view in the browser fails on one, and shows an error instead.
    layout = {"max_width": "100%", "object_fit": "contain", "display": None if svg else "none"}
    return ipywidgets.Image(value=svg, format="svg+xml", layout=layout)


def named(label: str) -> dict:
    """What a widget shows of its label: beside it, and where the mouse rests."""
    return {"description": label, "tooltip": label, "style": {"description_width": "initial"}}


WIDE = {"width": "500px", "max_width": "100%"}


class StepThrough(Live):
    """A slider over pictures, all of them in the page: it steps without the kernel.

    look: step -> (caption, Picture). steps: of which there are pictures. text: what stands for all
    of them, by default the caption of the first. telling: the step whose picture is stored. play:
    with a button that steps by itself. `slider` and `stack` are its widgets.
    """

    def __init__(
        self,
        look: Callable[[int], Look],
        label: str,
        steps: range,
        *,
        start: int | None = None,
        text: str | None = None,
        telling: int | None = None,
        play: bool = True,
    ):
        self._label, self._steps, self._play = label, steps, play
        self._start = steps[0] if start is None else start
        self.look = cache(look)
        self.text = self.look(self._start)[0] if text is None else text
        self.telling = self.look(self._start if telling is None else telling)[1]

    @property
    def slider(self):
        return self.box.children[0].children[-1]

    @property
    def stack(self):
        return self.box.children[1]

    @cached_property
    def box(self):
        import ipywidgets

        ends = {"min": self._steps[0], "max": self._steps[-1], "value": self._start}
        slider = ipywidgets.IntSlider(
            **ends, **named(self._label), continuous_update=False, layout=WIDE
        )
        pages = []
        for step in self._steps:
            caption, svg = _seen(lambda step=step: self.look(step))
            pages.append(ipywidgets.VBox([ipywidgets.HTML(caption), _image(svg)]))
        # The number on the slider is the place in the stack, so the stack begins at 0.
        pages = pages[:1] * self._steps[0] + pages
        stack = ipywidgets.Stack(pages, selected_index=self._start)
        ipywidgets.jslink((slider, "value"), (stack, "selected_index"))
        controls = [slider]
        if self._play:
            play = ipywidgets.Play(**ends, interval=1500, tooltip="play, pause, repeat")
            ipywidgets.jslink((play, "value"), (slider, "value"))
            controls.insert(0, play)
        return ipywidgets.VBox([ipywidgets.HBox(controls), stack])


class Panel(Live):
    """A caption and a picture under controls that change them.

    A subclass says what is to be seen now (`look`), makes its controls, and calls `show` when they
    change. `image` and `caption` are widgets.
    """

    def look(self) -> Look:
        raise NotImplementedError

    def controls(self) -> list:
        """The widgets to be shown above."""
        raise NotImplementedError

    @property
    def text(self) -> str:
        return self.look()[0]

    @property
    def telling(self) -> Picture | None:
        return self.look()[1]

    @property
    def caption(self):
        return self.box.children[1]

    @property
    def image(self):
        return self.box.children[2]

    @cached_property
    def box(self):
        import ipywidgets

        caption, svg = _seen(self.look)
        controls = ipywidgets.HBox(self.controls(), layout={"flex_flow": "row wrap"})
        return ipywidgets.VBox([controls, ipywidgets.HTML(caption), _image(svg)])

    def show(self) -> None:
        """Bring caption and picture, if they are live, to what is to be seen now."""
        if "box" in vars(self):
            self.caption.value, self.image.value = _seen(self.look)
            self.image.layout.display = None if self.image.value else "none"


@dataclass(frozen=True)
class Slider:
    """A slider over `values`, in their order. value: at first. show: what is written beside it.

    Also for words: a dropdown doesn't answer the arrow keys in JupyterLab.
    """

    label: str
    values: Sequence
    value: Any
    show: Callable[[Any], str] = str

    def check(self, value) -> None:
        if value not in self.values:
            known = ", ".join(map(str, self.values))
            got = f"expected {self.label!r} to be one of {known}, got {value!r}"
            raise ValueError(f"{got}: choose one of them")

    def widget(self, value):
        import ipywidgets

        options = [(self.show(each), each) for each in self.values]
        return ipywidgets.SelectionSlider(
            options=options, value=value, continuous_update=False, layout=WIDE, **named(self.label)
        )


@dataclass(frozen=True)
class Toggle:
    """A button that is down (True) or up (False). value: at first."""

    label: str
    value: bool = False

    def check(self, value) -> None:
        if not isinstance(value, bool):
            got = f"expected {self.label!r} to be True or False, got {value!r}"
            raise ValueError(f"{got}: choose one of them")

    def widget(self, value):
        import ipywidgets

        layout = {"width": "max-content"}
        return ipywidgets.ToggleButton(value=value, layout=layout, **named(self.label))


class Calculator(Panel):
    """A control for each argument of `function`. `value` and `set` read and move them.

    function: called with the controls' values, by name; returns (caption, Picture or None), always
    the same for the same values. What it raises later is shown as the caption. text: what stands
    for the widget where nothing is live and is compared in tests; by default the caption, which
    must not hold a number that was measured.
    ValueError: a control has no such value as it starts with; what `function` raises for those.
    """

    def __init__(
        self,
        function: Callable[..., Look],
        /,
        text: str | None = None,
        **controls: Slider | Toggle,
    ):
        self._function, self._all, self._text = cache(function), controls, text
        self._values = {name: control.value for name, control in controls.items()}
        for control in controls.values():
            control.check(control.value)
        self.widgets: dict = {}
        self.look()  # a function that can't even answer for its defaults says so here

    def look(self) -> Look:
        return self._function(**self._values)

    @property
    def text(self) -> str:
        return super().text if self._text is None else self._text

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

    def controls(self) -> list:
        for name, control in self._all.items():
            widget = self.widgets[name] = control.widget(self._values[name])
            widget.observe(lambda change, name=name: self._move(name, change.new), "value")
        return list(self.widgets.values())

    def _move(self, name: str, value) -> None:
        self._values[name] = value
        self.show()
