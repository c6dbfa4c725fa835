"""Make notebook 05's float explorer: type a number, see its bits in six formats, and flip them."""

from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property

from .. import floats
from . import page
from .page import Canvas, Picture
from .widgets import Live, asking, named, show, view

BY_NAME = {format.name: format for format in floats.FORMATS}
FIELD_COLOURS = {"sign": page.PINK, "exponent": page.ORANGE, "fraction": page.SKY}


class FloatExplorer(Live):
    """A widget that shows a number in every format of `floats.FORMATS`, with bits to flip.

    The reader types a number and chooses a format; each of its bits in that format is a button,
    which flips the bit, and changes the typed text as well. Text that is no number gets a message.

    value: the initial number as text, such as "0.1" or "1/3". format: the initial format: "fp32",
        "tf32", "bf16", "fp16", "fp8 e4m3" or "fp8 e5m2".
    number: the `floats.Number` whose bits the buttons show.
    box: the ipywidgets widget that Jupyter shows for the object, made on first use.
    entry, choice, buttons: the box's widgets for number, format and bits; absent until it is made.
    ValueError: `value` is no number, or there is no such format.
    """

    def __init__(self, value: str = "0.1", format: str = "bf16"):
        if format not in BY_NAME:
            raise ValueError(f"no format is called {format!r}; there are {', '.join(BY_NAME)}")
        self._following = False
        self._set(value, format)
        caption, picture = self.look()
        super().__init__("\n".join([caption, *map(str, self._in_all_formats())]), picture)

    def _set(self, value: str, format: str, pattern: int | None = None) -> None:
        """Set `number` to the typed text or, if `pattern` is given, to the number with these bits.

        The widgets aren't updated. value: the typed text; it isn't used if there is a pattern.
        format: such as "bf16". pattern: all bits in that format, as an integer, or None.
        ValueError: the text is no number, or the pattern has too many bits; nothing is changed.
        """
        chosen = BY_NAME[format]
        if pattern is None:
            self._value, self._typed = parse(value), value
            pattern = floats.encode(self._value, chosen)
        else:
            self._value = floats.decode(pattern, chosen)
            self._typed = str(self._value)
        self.number = floats.Number(pattern, chosen)

    def _in_all_formats(self) -> list[floats.Number]:
        """Return the typed number, or after a flip the new one, in each of `floats.FORMATS`.

        Each is rounded from that number. In the chosen format it is the object `number` itself,
        whose row the picture highlights.
        """
        found = {}
        for format in floats.FORMATS:
            found[format] = floats.Number(floats.encode(self._value, format), format)
        found[self.number.format] = self.number
        return list(found.values())

    def look(self) -> tuple[str, Picture]:
        """Return (caption, `Picture`) for the present number.

        The caption has its bits in the chosen format; the picture has those in every format.
        """
        number = self.number
        said = f"{self._typed} in {number.format.name}: {number.bits}, {number.formula}"
        return said, float_bits(self._in_all_formats(), number)

    @cached_property
    def box(self):
        """Return the ipywidgets box: number, format and bits, and below them caption and picture.

        It is created on first use, which also sets `entry`, `choice` and `buttons`.
        """
        import ipywidgets

        self.entry = ipywidgets.Text(continuous_update=False, **named("number"))
        self.entry.tooltip = "a number, such as 0.1, 1e-8, 1/3, inf; then Enter"
        # Not a Dropdown, which doesn't answer the arrow keys in JupyterLab.
        looks = {"continuous_update": False} | named("format")
        self.choice = ipywidgets.SelectionSlider(options=list(BY_NAME), **looks)
        wrapped = {"flex_flow": "row wrap"}
        self.buttons = ipywidgets.HBox(layout=wrapped)
        self._shown = view(self.look)
        self._follow()
        self.entry.observe(self._move, "value")
        self.choice.observe(self._move, "value")
        controls = ipywidgets.HBox([self.entry, self.choice, self.buttons], layout=wrapped)
        return asking(controls, self._shown)

    def _move(self, _, pattern: int | None = None) -> None:
        """Update `number`, widgets and picture after a typed number, a new format or a flipped bit.

        The widgets call this method after each change of a value. Changes that `_follow` makes are
        ignored. If the text is no number, a message takes the caption's place, and nothing else
        changes.
        _: ipywidgets' report of the change, which isn't used.
        pattern: all bits of the number after a flip, as an integer; None: read the typed text.
        """

        def changed() -> tuple[str, Picture]:
            name = self.choice.value if pattern is None else self.number.format.name
            self._set(self.entry.value, name, pattern)
            self._follow()
            return self.look()

        if not self._following:
            show(self._shown, changed)

    def _follow(self) -> None:
        """Set the widgets to `number`: its text, its format, and a button for each bit.

        The text is what was typed or, after a flipped bit, the new value. The widgets report these
        changes like a reader's, so `_move`, which answers such reports, is switched off meanwhile.
        """
        self._following = True  # the widgets report these changes as well
        try:
            format = self.number.format
            self.entry.value, self.choice.value = self._typed, format.name
            places = [floats.field_of(place, format) for place in range(format.bits)]
            if [button.tooltip for button in self.buttons.children] != places:
                self.buttons.children = list(map(self._button, range(format.bits)))
            bits = self.number.bits.replace(" ", "")
            for button, bit in zip(self.buttons.children, bits, strict=True):
                button.value, button.description = bit == "1", bit
        finally:
            self._following = False

    def _button(self, place: int):
        """Return a button that flips one bit of `number` when it is clicked.

        place: the bit's position in the format, from 0 for the highest bit, which is the sign.
        """
        import ipywidgets

        format = self.number.format
        field = floats.field_of(place, format)
        edge = f"6px solid {FIELD_COLOURS[field]}"
        layout = {"width": "27px", "margin": "1px", "padding": "0", "border_bottom": edge}
        button = ipywidgets.ToggleButton(tooltip=field, layout=layout)
        bit = 1 << (format.bits - 1 - place)
        button.observe(lambda change: self._move(change, self.number.pattern ^ bit), "value")
        return button


float_explorer = FloatExplorer  # called like the other widgets


def parse(text: str) -> float:
    """Return the number that a text stands for, such as "0.1", "1e-8", "1/3", "inf", "nan", "-0".

    A decimal beyond the largest float, such as "1e999", is inf.
    ValueError: the text is neither a number nor a fraction of integers, the denominator is 0, or
        the fraction is beyond the largest float.
    """
    try:
        return float(Fraction(text)) if "/" in text else float(text)
    except (ValueError, ZeroDivisionError, OverflowError) as error:
        expected = f"expected a number, got {text!r}"
        raise ValueError(f"{expected}: type one such as 0.1, 1e-8, 1/3, inf, nan") from error


def float_bits(numbers: Sequence[floats.Number], chosen: floats.Number) -> Picture:
    """Draw the bits of several floating-point numbers, a row for each number.

    Colours tell sign, exponent and fraction apart, and the value stands below the bits. Rows are
    aligned so that the fractions begin below each other. The alt text states bits and values.

    numbers: a number for each row, each in its own format.
    chosen: the number whose row is highlighted; it must be the same object as in `numbers`.
    """
    cell, left, row = 25, 120, 74
    point = left + cell * (1 + max(number.format.exponent_bits for number in numbers))
    right = point + cell * max(number.format.fraction_bits for number in numbers)
    canvas = Canvas(right + 20, 56 + row * len(numbers))
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
