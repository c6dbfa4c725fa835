"""Widgets: `StepThrough` a row of pictures, `Calculator` a function with a slider for each of its
arguments. Each works on a function that returns (caption, Picture).

    Calculator(
        lambda bucket_mib: (f"{gradients_mib / bucket_mib:.0f} messages", None),
        bucket_mib=Slider("bucket cap (MiB)", [1, 2, 4, 8], 4),
    )
"""

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

from . import page
from .page import Picture

Look = tuple[str, Picture | None]  # a caption, and a picture if there is one


class Live:
    """Widgets, `box`, where ipywidgets can show them; everywhere, what stands for them.

    text, telling: that are stored, and the text is compared in tests. So it must not hold a number
    that was measured.
    """

    def __init__(self, text: str, telling: Picture | None):
        self.text, self.telling = text, telling

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


def view(look: Callable[[], Look]):
    """A caption above a picture, as `look` returns them."""
    import ipywidgets

    # No tooltip: the image's view in the browser fails on one, and shows an error instead.
    layout = {"max_width": "100%", "object_fit": "contain"}
    image = ipywidgets.Image(format="svg+xml", layout=layout)
    shown = ipywidgets.VBox([ipywidgets.HTML(), image])
    show(shown, look)
    return shown


def show(shown, look: Callable[[], Look]) -> None:
    """Bring a `view` to what `look` returns now, or to the error that it raises."""
    try:
        text, picture = look()
        said = html.escape(text).replace("\n", "<br>")
    except Exception as error:  # a callback has nobody to raise to
        text, picture = html.escape(f"{type(error).__name__}: {error}"), None
        said = f'<b style="color: {page.WRONG}">{text}</b>'
    style = "font-size: 18px; line-height: 1.4; min-height: 2.8em"  # two lines: pictures stay put
    caption, image = shown.children
    caption.value = f'<div role="status" aria-live="polite" style="{style}">{said}</div>'
    image.value = picture.svg if picture else b""
    image.layout.display = None if picture else "none"


def named(label: str) -> dict:
    """What a widget shows of its label: beside it, and where the mouse rests."""
    return {"description": label, "tooltip": label, "style": {"description_width": "initial"}}


WIDE = {"width": "500px", "max_width": "100%"}


class StepThrough(Live):
    """A slider over pictures, all of them in the page: it steps without the kernel.

    look: step -> (caption, Picture). steps: of which there are pictures. text: what stands for all
    of them, by default the caption of the first. telling: the step whose picture is stored.
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
    ):
        self._label, self._steps = label, steps
        self._start = steps[0] if start is None else start
        self.look = cache(look)
        caption, picture = self.look(self._start if telling is None else telling)
        super().__init__(caption if text is None else text, picture)

    @cached_property
    def box(self):
        import ipywidgets

        ends = {"min": self._steps[0], "max": self._steps[-1], "value": self._start}
        slider = ipywidgets.IntSlider(
            **ends, **named(self._label), continuous_update=False, layout=WIDE
        )
        # The number on the slider is the place in the stack, so the stack begins at 0.
        pages = [view(partial(self.look, step)) for step in self._steps]
        pages = pages[:1] * self._steps[0] + pages
        stack = ipywidgets.Stack(pages, selected_index=self._start)
        ipywidgets.jslink((slider, "value"), (stack, "selected_index"))
        play = ipywidgets.Play(**ends, interval=1500, tooltip="play, pause, repeat")
        ipywidgets.jslink((play, "value"), (slider, "value"))
        return ipywidgets.VBox([ipywidgets.HBox([play, slider]), stack])


@dataclass(frozen=True)
class Slider:
    """A slider over `values`, in their order. value: at first. say: what is written beside it.

    Also for words: a dropdown doesn't answer the arrow keys in JupyterLab.
    """

    label: str
    values: Sequence
    value: Any
    say: Callable[[Any], str] = str

    def widget(self):
        import ipywidgets

        options = [(self.say(each), each) for each in self.values]
        looks = named(self.label) | {"layout": WIDE, "continuous_update": False}
        return ipywidgets.SelectionSlider(options=options, value=self.value, **looks)


class Calculator(Live):
    """A slider for each argument of `function`; `widgets` has them by name.

    function: called with the sliders' values, by name; returns (caption, Picture or None). What it
    raises is shown as the caption, but for the values at first. text: what stands for the widget
    where nothing is live; by default the caption.
    """

    def __init__(
        self, function: Callable[..., Look], /, text: str | None = None, **sliders: Slider
    ):
        self._function, self._sliders = function, sliders
        first = {name: slider.value for name, slider in sliders.items()}
        caption, picture = function(**first)
        super().__init__(caption if text is None else text, picture)

    @cached_property
    def widgets(self) -> dict:
        return {name: slider.widget() for name, slider in self._sliders.items()}

    def look(self) -> Look:
        """What is to be seen where the sliders stand."""
        return self._function(**{name: widget.value for name, widget in self.widgets.items()})

    @cached_property
    def box(self):
        import ipywidgets

        shown = view(self.look)
        for widget in self.widgets.values():
            widget.observe(lambda change: show(shown, self.look), "value")
        controls = ipywidgets.HBox(list(self.widgets.values()), layout={"flex_flow": "row wrap"})
        return ipywidgets.VBox([controls, shown])
