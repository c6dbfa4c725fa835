"""The float explorer: type a number or turn over single bits, and see what each format makes of it. Notebook 05."""

import math
from fractions import Fraction

from ..tools import floats
from . import figures
from .calculator import Panel
from .figures import Picture

BY_NAME = {format.name: format for format in floats.FORMATS}


class FloatExplorer(Panel):
    """A number in every format, and a button for each of its bits in one of them.

    `set` does what a hand does; `number` is what the buttons show. `entry`, `choice` and `buttons` are the widgets.
    """

    def __init__(self, value: str, format: str):
        self._wrong: ValueError | None = None
        self._moving = False
        self.entry = self.choice = self.buttons = None
        self.set(value, format)

    def set(self, value: str | None = None, format: str | None = None, pattern: int | None = None) -> None:
        """Another number, as typed; another format, by name; or, in place of a number, a pattern of the format.

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
        number = self.number
        numbers = [
            number if format is number.format else floats.describe(floats.encode(self._exact, format), format)
            for format in floats.FORMATS
        ]
        head = f"{self._typed} in {number.format.name}: {number.bits}, {number.formula}"
        return "\n".join([head, *map(str, numbers)]), figures.float_bits(numbers, number)

    def _controls(self) -> list:
        import ipywidgets

        style = {"description_width": "initial"}
        self.entry = ipywidgets.Text(
            description="number",
            tooltip="a number, such as 0.1, 1e-8, 1/3, inf; then Enter",
            continuous_update=False,
            style=style,
        )
        # Not a Dropdown, which doesn't answer the arrow keys in JupyterLab.
        self.choice = ipywidgets.SelectionSlider(
            options=list(BY_NAME),
            value=self.number.format.name,
            description="format",
            tooltip="format",
            continuous_update=False,
            style=style,
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
            self._show()

    def _follow(self) -> None:
        """Bring the widgets, if there are any, to what the number is now."""
        if self.buttons is None:
            return
        self._moving = True  # the widgets report these changes too
        try:
            self.entry.value, self.choice.value = self._typed, self.number.format.name
            if len(self.buttons.children) != self.number.format.bits or self._of is not self.number.format:
                self.buttons.children, self._of = self._new_buttons(), self.number.format
            for button, bit in zip(self.buttons.children, self.number.bits.replace(" ", ""), strict=True):
                button.value, button.description = bit == "1", bit
        finally:
            self._moving = False
        if self._widgets:
            self._show()

    def _new_buttons(self) -> list:
        import ipywidgets

        format, buttons = self.number.format, []
        for place in range(format.bits):
            field = floats.field_of(place, format)
            edge = f"6px solid {figures.FIELD_COLOURS[field]}"
            layout = {"width": "27px", "margin": "1px", "padding": "0", "border_bottom": edge}
            button = ipywidgets.ToggleButton(tooltip=f"bit {format.bits - 1 - place}, {field}", layout=layout)
            button.observe(lambda change, bit=1 << (format.bits - 1 - place): self._turn(bit), "value")
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
    """The number that is written there, exactly where it is finite: 0.1 is a tenth. Also 1e-8, 1/3, inf, nan, -0.

    ValueError: it is no number.
    """
    try:
        nearest = float(text) if "/" not in text else 1.0
        # Not the exact value of 1e999999999, which has a billion digits; every format has infinity or 0 for it.
        return Fraction(text) if math.isfinite(nearest) and nearest else nearest
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(f"expected a number, got {text!r}: type one such as 0.1, 1e-8, 1/3, inf, nan") from error
