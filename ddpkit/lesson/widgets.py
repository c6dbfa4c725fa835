"""Widgets for notebooks: a slider over pictures, and a function with sliders for its arguments.

`StepThrough` steps through pictures: it calls a function with the number of a step. `Calculator`
calls one with the sliders' values, as keyword arguments, whenever a slider is moved. Both functions
return (caption, `Picture` or None). This slider begins at 2:

    Calculator(
        lambda bucket_mib: (f"{gradients_mib / bucket_mib:.0f} messages", None),
        bucket_mib=Slider("bucket cap (MiB)", [1, 2, 4, 8], 2),
    )
"""

import html
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

from . import page
from .card import WIDEST
from .page import Picture

Look = tuple[str, Picture | None]  # a caption, and a picture if there is one


class Live:
    """An object that a running notebook shows as widgets, a stored notebook as text and picture.

    The widgets are its attribute `box`, an ipywidgets widget that subclasses define.

    text: what a stored notebook keeps in place of the widgets. Tests compare it, so it must state
        no measured number.
    telling: the picture that a stored notebook keeps, or None for no picture.
    """

    def __init__(self, text: str, telling: Picture | None):
        self.text, self.telling = text, telling

    def __repr__(self):
        return self.text

    def _repr_mimebundle_(self, include=None, exclude=None):
        stored, metadata = {"text/plain": self.text}, {}
        if self.telling:
            stored["image/png"] = self.telling.png
            metadata = self.telling.metadata
        try:
            return self.box._repr_mimebundle_() | stored, metadata
        except ImportError:
            return stored, metadata


class Below(Live):
    """A block of HTML with an animation below it, which a notebook shows as a cell's value.

    text: the plain text that a stored notebook keeps in place of both.
    page: the HTML fragment, as a string. player: the animation, a `StepThrough`.
    """

    def __init__(self, text: str, page: str, player: "StepThrough"):
        super().__init__(text, None)
        self._page, self._player = page, player

    @cached_property
    def box(self):
        """Return the ipywidgets box of the HTML and, below it, the animation; made on first use."""
        import ipywidgets

        return ipywidgets.VBox([ipywidgets.HTML(self._page), self._player.box])


def view(look: Callable[[], Look]):
    """Return an ipywidgets widget: a caption above a picture. `show(widget, look)` changes both.

    look: a function without arguments that returns (caption, Picture or None). It is called once.
    """
    import ipywidgets

    shown = ipywidgets.VBox([ipywidgets.HTML(), ipywidgets.HTML()])
    show(shown, look)
    return shown


def show(shown, look: Callable[[], Look]) -> None:
    """Update, in place, a widget made by `view`: show the caption and picture that `look` returns.

    Show the caption alone if the picture is None. If `look` raises an error, show it as the
    caption, above the old picture: an error in a widget's callback would be invisible otherwise.

    shown: the widget. look: a function without arguments that returns (caption, Picture or None).
    """
    caption, image = shown.children
    try:
        text, picture = look()
        said = html.escape(text).replace("\n", "<br>")
        image.value = inline(picture) if picture else ""
    except Exception as error:  # otherwise a callback's error would be invisible
        text = html.escape(f"{type(error).__name__}: {error}")
        said = f'<b style="background: white; color: {page.WRONG}">{text}</b>'
    style = (
        "font-size: 16px; line-height: 1.4; min-height: 2.8em"  # two lines, so pictures stay put
    )
    caption.value = f'<div role="status" aria-live="polite" style="{style}">{said}</div>'


# A shape moves when its picture appears if a Canvas drew it with a `gid` that `page.moving` made.
MOVING = """<style>
@keyframes ddpkit-travel { from { transform: translate(var(--from)) } }
.ddpkit-travels { transform: translate(var(--to)); animation: ddpkit-travel 1s .3s both }
@media (prefers-reduced-motion: reduce) { .ddpkit-travels { animation: none } }
</style>"""


def inline(picture: Picture) -> str:
    """Return a picture as HTML, an <svg> after a <style>, for an ipywidgets HTML widget.

    A shape whose id in the SVG was made by `page.moving` slides once when the HTML appears; others
    stand still. The id "from 0.0 0.0 to 12.0 0.0", for example, makes a shape slide from (0, 0) to
    (12, 0). Both are offsets in points, right and down, from the place where it was drawn.
    """
    width, height = picture.size
    style = f"display: block; width: {width}px; max-width: min(100%, {WIDEST}px)"
    style += f"; aspect-ratio: {width} / {height}"
    head, _, body = picture.svg.decode().partition("</metadata>")
    view = re.search(r'viewBox="[^"]*"', head)[0]
    body = re.sub("<style.*?</style>", "", body, count=1)  # it would apply to the whole page
    travels = r'class="ddpkit-travels" style="--from: \1px, \2px; --to: \3px, \4px"'
    body = re.sub(r'id="from (\S+) (\S+) to (\S+) (\S+)"', travels, body)
    named = f'role="img" aria-label="{html.escape(picture.text)}"'
    return f'{MOVING}<svg {view} {named} style="{style}; stroke-linejoin: round">{body}'


def named(label: str) -> dict:
    """Return keyword arguments for an ipywidgets widget: `label` as its description and tooltip."""
    return {"description": label, "tooltip": label, "style": {"description_width": "initial"}}


# ipywidgets names neither handles nor Play's buttons. Views may appear some seconds later.
NAMES = """<style>@keyframes ddpkit-named { from { opacity: 0.9 } }</style>
<i style="animation: ddpkit-named 1s 5"
onanimationiteration="const box = this.closest('.ddpkit-named');
for (const handle of box.querySelectorAll('[role=slider]'))
    handle.ariaLabel = handle.closest('.widget-slider').querySelector('label').title;
for (const button of box.querySelectorAll('.widget-play button'))
    button.ariaLabel = ['play or pause', 'stop', 'repeat'][
        [...button.parentNode.children].indexOf(button)]
"></i>"""

# A click starts Play: a Play that is created `playing` stands still.
PLAYS = """<i style="animation: ddpkit-named 1s" onanimationend="if (this.dataset.played) return;
this.dataset.played = true;
this.closest('.ddpkit-named').querySelector('.widget-play button').click()"></i>"""

# ipywidgets marks widgets without a kernel by a class: in a reopened notebook, after a restart.
STILL = """<style>
.ddpkit-still { display: none; color: #444; background: #F5F5F5; padding: 2px 10px }
.jupyter-widgets-disconnected .ddpkit-still { display: inline-block }
.ddpkit-asks.jupyter-widgets-disconnected .ddpkit-controls { display: none }
.ddpkit-asks.jupyter-widgets-disconnected::before { display: none }
</style><div class="ddpkit-still" role="note">This stands still: it needs a kernel. Run its cell to
use it.</div>"""


def asking(controls, *shown):
    """Return an ipywidgets box with `controls`, which need a running kernel, above `shown`.

    Without a kernel, for example in a reopened notebook, a note takes the place of the controls.

    controls: a widget. It gets a CSS class, by which the page hides it where no kernel runs.
    shown: widgets that need no kernel.
    """
    import ipywidgets

    controls.add_class("ddpkit-controls")
    box = ipywidgets.VBox([ipywidgets.HTML(STILL + NAMES), controls, *shown])
    box.add_class("ddpkit-asks")
    return box.add_class("ddpkit-named")


# The arrows step the number field, which the browser links to the slider and the picture.
ARROW = """<button class="jupyter-button" style="width: 36px" aria-label="{says}" title="{says}"
onclick="const at = this.closest('.widget-hbox').querySelector('input[type=number]');
at.step{way}(); at.dispatchEvent(new Event('change', {{bubbles: true}}))">{sign}</button>"""


class StepThrough(Live):
    """A slider over pictures, all of which are in the page, so that it steps without the kernel.

    look: a function from a step's number to (caption, Picture or None); called at most once a step.
    label: the word beside the step's number, such as "hop".
    steps: consecutive numbers, not below 0. start: the step shown first; by default the lowest.
    telling: the number of the step whose picture a stored notebook keeps; by default `start`.
    text: the text that the stored notebook keeps with it; by default the caption of that step.
    plays: whether it plays through the steps once by itself when it is shown.
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
        plays: bool = False,
    ):
        self._label, self._steps, self._plays = label, steps, plays
        self._start = steps[0] if start is None else start
        self.look = cache(look)
        caption, picture = self.look(self._start if telling is None else telling)
        super().__init__(caption if text is None else text, picture)

    @cached_property
    def box(self):
        """Return the whole widget, an ipywidgets box: the controls and, below them, the pictures.

        The first access makes it, and draws the pictures of all steps.
        """
        import ipywidgets

        ends = {"min": self._steps[0], "max": self._steps[-1], "value": self._start}
        slider = ipywidgets.IntSlider(
            **ends,
            readout=False,
            continuous_update=False,
            tooltip=self._label,
            layout={"width": "170px"},
        )
        # The slider's value is an index into the stack, which therefore begins at 0.
        pages = [view(partial(self.look, step)) for step in self._steps]
        pages = pages[:1] * self._steps[0] + pages
        stack = ipywidgets.Stack(pages, selected_index=self._start)
        play = ipywidgets.Play(**ends, interval=1500, tooltip="play, pause, repeat")
        at = ipywidgets.BoundedIntText(**ends, **named(self._label))
        at.layout.width = f"{len(self._label) + 9}ex"
        pause = ipywidgets.IntSlider(1500, 250, 4000, 250, **named("pause (ms)"))
        pause.layout.width = "230px"
        for source, target in (
            ((slider, "value"), (stack, "selected_index")),
            ((play, "value"), (slider, "value")),
            ((at, "value"), (slider, "value")),
            ((pause, "value"), (play, "interval")),
        ):
            ipywidgets.jslink(source, target)
        extra = NAMES + PLAYS * self._plays
        back = ipywidgets.HTML(extra + ARROW.format(says="one step back", way="Down", sign="◀"))
        on = ipywidgets.HTML(ARROW.format(says="one step on", way="Up", sign="▶"))
        of = ipywidgets.Label(f"of {self._steps[-1]}")
        controls = ipywidgets.HBox([play, back, at, of, on, slider, pause], layout=WRAPPED)
        return ipywidgets.VBox([controls, stack]).add_class("ddpkit-named")


WRAPPED = {"flex_flow": "row wrap", "align_items": "center", "grid_gap": "4px 12px"}


@dataclass(frozen=True)
class Slider:
    """A description of a slider for `Calculator`, over `values` in their order.

    If the values are strings or truth values, and at most four, there are buttons instead of a
    slider.

    label: the text beside it. values: all that can be chosen. value: the initial one, one of these.
    say: a function from a value to the text that is shown for it.
    """

    label: str
    values: Sequence
    value: Any
    say: Callable[[Any], str] = str

    def widget(self):
        """Return a new ipywidgets slider, or buttons for a few choices, at the initial value."""
        import ipywidgets

        options = [(self.say(value), value) for value in self.values]
        looks = named(self.label) | {"style": {"description_width": "8em"}, "value": self.value}
        looks |= {"options": options, "layout": {"width": "430px", "max_width": "100%"}}
        if len(options) < 5 and isinstance(self.values[0], str | bool):
            looks["style"]["button_width"] = "auto"
            looks["layout"] |= {"display": "flex", "flex_flow": "row"}  # the label beside them
            return ipywidgets.ToggleButtons(**looks)
        return ipywidgets.SelectionSlider(continuous_update=False, **looks)


class Calculator(Live):
    """A widget with a slider for each argument of a function, whose result follows the sliders.

    Creating it calls the function once, with the initial values; an error of that call is raised.
    An error of a later call is shown in place of the caption.

    function: called with the sliders' values by name; returns (caption, Picture or None).
    text: what a stored notebook keeps in place of the widget; by default the caption of that call.
    sliders: the `Slider` of each argument, by name; it describes a slider or, for at most four
        strings or truth values, buttons.
    """

    def __init__(
        self, function: Callable[..., Look], /, text: str | None = None, **sliders: Slider
    ):
        self._function, self._sliders = function, sliders
        self._first = {name: slider.value for name, slider in sliders.items()}
        caption, picture = function(**self._first)
        super().__init__(caption if text is None else text, picture)

    @cached_property
    def widgets(self) -> dict:
        """Return {argument: an ipywidgets widget whose `value` is its value}, made on first use."""
        return {name: slider.widget() for name, slider in self._sliders.items()}

    def look(self) -> Look:
        """Call the function with the sliders' present values, and return or raise what it does."""
        return self._function(**{name: widget.value for name, widget in self.widgets.items()})

    def reset(self, *_) -> None:
        """Set every slider back to its initial value; arguments, such as a button, are ignored."""
        for name, value in self._first.items():
            self.widgets[name].value = value

    @cached_property
    def box(self):
        """Return the ipywidgets box: sliders and a reset button, above the caption and picture."""
        import ipywidgets

        shown = view(self.look)
        for widget in self.widgets.values():
            widget.observe(lambda change: show(shown, self.look), "value")
        back = ipywidgets.Button(description="reset", layout={"width": "6em"})
        back.on_click(self.reset)
        controls = ipywidgets.HBox([*self.widgets.values(), back], layout=WRAPPED)
        return asking(controls, shown)
