"""The float explorer: type a number or turn over bits, and see what each format makes of it.

Notebook 05.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

from ..tools import floats
from . import page
from .page import Canvas, Picture
from .widgets import Panel, named

BY_NAME = {format.name: format for format in floats.FORMATS}
FIELD_COLOURS = {"sign": page.PINK, "exponent": page.ORANGE, "fraction": page.SKY}


class FloatExplorer(Panel):
    """A number in every format, and a button for each of its bits in one of them.

    `set` does what a hand does; `number` is what the buttons show. `entry`, `choice` and `buttons`
    are the widgets.
    """

    def __init__(self, value: str, format: str):
        self._wrong: ValueError | None = None
        self._moving = False
        self.entry = self.choice = self.buttons = None
        self.set(value, format)

    def set(
        self, value: str | None = None, format: str | None = None, pattern: int | None = None
    ) -> None:
        """Another number, as typed; another format, by name; or a pattern in place of a number.

        ValueError: no number, no such format or pattern.
        """
        if format is not None and format not in BY_NAME:
            raise ValueError(f"no format is called {format!r}; there are {', '.join(BY_NAME)}")
        chosen = BY_NAME[format] if format else self.number.format
        if pattern is not None:
            self._exact = floats.decode(pattern, chosen)
            self._typed = str(self._exact)
        elif value is not None:
            self._exact, self._typed = parse(value), value
        if pattern is None:
            pattern = floats.encode(self._exact, chosen)
        self.number, self._wrong = floats.describe(pattern, chosen), None
        self._follow()

    def look(self) -> tuple[str, Picture]:
        if self._wrong:
            raise self._wrong
        found = {}
        for format in floats.FORMATS:
            found[format] = floats.describe(floats.encode(self._exact, format), format)
        number = found[self.number.format] = self.number
        said = [f"{self._typed} in {number.format.name}: {number.bits}, {number.formula}"]
        said += map(str, found.values())
        return "\n".join(said), float_bits(list(found.values()), number)

    def controls(self) -> list:
        import ipywidgets

        self.entry = ipywidgets.Text(continuous_update=False, **named("number"))
        self.entry.tooltip = "a number, such as 0.1, 1e-8, 1/3, inf; then Enter"
        # Not a Dropdown, which doesn't answer the arrow keys in JupyterLab.
        self.choice = ipywidgets.SelectionSlider(
            options=list(BY_NAME), continuous_update=False, **named("format")
        )
        self.buttons = ipywidgets.HBox(layout={"flex_flow": "row wrap"})
        self._follow()
        self.entry.observe(lambda change: self._move(value=change.new), "value")
        self.choice.observe(lambda change: self._move(format=change.new), "value")
        return [self.entry, self.choice, self.buttons]

    def _move(self, **values) -> None:
        """What a hand did to a widget."""
        if self._moving:
            return
        try:
            self.set(**values)
        except ValueError as error:
            self._wrong = error
            self.show()

    def _follow(self) -> None:
        """Bring the widgets, if there are any, to what the number is now."""
        if self.buttons is None:
            return
        self._moving = True  # the widgets report these changes too
        try:
            self.entry.value, self.choice.value = self._typed, self.number.format.name
            if not self.buttons.children or self._of is not self.number.format:
                self.buttons.children, self._of = self._new_buttons(), self.number.format
            bits = self.number.bits.replace(" ", "")
            for button, bit in zip(self.buttons.children, bits, strict=True):
                button.value, button.description = bit == "1", bit
        finally:
            self._moving = False
        self.show()

    def _new_buttons(self) -> list:
        import ipywidgets

        format, buttons = self.number.format, []
        for place in range(format.bits):
            field, power = floats.field_of(place, format), format.bits - 1 - place
            edge = f"6px solid {FIELD_COLOURS[field]}"
            layout = {"width": "27px", "margin": "1px", "padding": "0", "border_bottom": edge}
            button = ipywidgets.ToggleButton(tooltip=f"bit {power}, {field}", layout=layout)
            button.observe(lambda change, bit=1 << power: self._turn(bit), "value")
            buttons.append(button)
        return buttons

    def _turn(self, bit: int) -> None:
        self._move(pattern=self.number.pattern ^ bit)


def float_explorer(value: str = "0.1", format: str = "bf16") -> FloatExplorer:
    """A number, as typed, in every format of `floats.FORMATS`, with the bits of one to turn over.

    ValueError: no number, or no such format.
    """
    return FloatExplorer(value, format)


def parse(text: str) -> float | Fraction:
    """The number that is written there, exactly where it is finite: 0.1 is a tenth.

    Also 1e-8, 1/3, inf, nan, -0. ValueError: it is no number.
    """
    try:
        nearest = float(text) if "/" not in text else 1.0
        # Not the exact value of 1e999999999, of a billion digits: every format has inf or 0 for it.
        return Fraction(text) if math.isfinite(nearest) and nearest else nearest
    except (ValueError, ZeroDivisionError) as error:
        expected = f"expected a number, got {text!r}"
        raise ValueError(f"{expected}: type one such as 0.1, 1e-8, 1/3, inf, nan") from error


def float_bits(numbers: Sequence[floats.Number], chosen: floats.Number | None = None) -> Picture:
    """The bits of numbers in their formats, a row for each, the same places under one another.

    chosen: the one of them whose row stands out.
    """
    cell, left, row = 25, 120, 74
    point = left + cell * (1 + max(number.format.exponent_bits for number in numbers))
    right = point + cell * max(number.format.fraction_bits for number in numbers)
    canvas = Canvas(max(right, left + 640) + 20, 56 + row * len(numbers))
    for at, (name, fill) in enumerate(FIELD_COLOURS.items()):
        canvas.key(left + 150 * at, 14, fill, name)
    said = []
    for at, number in enumerate(numbers):
        y, format = 52 + row * at, number.format
        if number is chosen:
            canvas.box(4, y - 6, canvas.width - 8, row - 4, page.PALE, "black", 2.5)
        canvas.text(14, y + 16, format.name, page.NORMAL, "left", bold=True)
        x = point - cell * (1 + format.exponent_bits)
        for place, bit in enumerate(number.bits.replace(" ", "")):
            fill = FIELD_COLOURS[floats.field_of(place, format)]
            canvas.box(x + cell * place, y, cell, 32, fill)
            canvas.text(x + cell * (place + 0.5), y + 16, bit)
        spacing = "" if number.spacing is None else f", spacing {number.spacing}"
        canvas.text(left, y + 48, f"{number.value}{spacing}", align="left")
        said.append(f"{format.name}: {number.bits} is {number.value}")
    return canvas.picture(". ".join(said) + ".")
