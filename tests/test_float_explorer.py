"""The float explorer: typed numbers, turned bits and chosen formats, all three in step."""

import math
from functools import cache

import pytest
from test_figures import has_colour

from ddpkit import floats
from ddpkit.lesson import figures, page
from ddpkit.lesson import float_explorer as module
from ddpkit.lesson.float_explorer import FIELD_COLOURS, float_explorer, parse

pytest.importorskip("ipywidgets", reason="Jupyter isn't installed")


@pytest.fixture
def quick(monkeypatch):
    """In place of the picture, which takes a while, the row that stands out, in words."""
    said = cache(figures.in_words)
    monkeypatch.setattr(module, "float_bits", lambda numbers, chosen: said(str(chosen)))


def live(value, format):
    """(explorer, caption, image), its widgets made."""
    explorer = float_explorer(value, format)
    return explorer, *explorer.box.children[2].children


def shown(explorer) -> str:
    return "".join(button.description for button in explorer.buttons.children)


def test_text_and_picture():
    explorer = float_explorer()
    for colour in (*FIELD_COLOURS.values(), page.PALE):  # that of the row that stands out
        assert has_colour(explorer.telling, colour)


def test_buttons_turn_bits(quick):
    explorer, caption, image = live("1", "fp16")
    assert "1 in fp16: 0 01111 0000000000, 2^0 × 1.0" in caption.value
    picture = image.value
    explorer.buttons.children[6].value = True  # the highest bit of the fraction
    assert (explorer.number.value, explorer.entry.value) == (1.5, "1.5")
    assert "1.5 in fp16" in caption.value
    assert image.value != picture
    explorer.buttons.children[0].value = True
    assert explorer.number.value == -1.5
    assert shown(explorer) == "1011111000000000"
    pressed = [button.value for button in explorer.buttons.children]
    assert pressed == [bit == "1" for bit in "1011111000000000"]


def test_a_bit_is_one_of_the_format_that_is_shown(quick):
    explorer, *_ = live("1", "bf16")
    explorer.entry.value = "abc"  # so the next choice can't take effect
    explorer.choice.value = "fp8 e4m3"
    explorer.buttons.children[0].value = True
    assert (explorer.number.value, explorer.choice.value) == (-1.0, "bf16")


def test_every_button_turns_its_own_bit(monkeypatch):
    one = figures.in_words("94 pictures would take a while")
    monkeypatch.setattr(module, "float_bits", lambda *_: one)
    for format in floats.FORMATS:
        explorer, *_ = live("1", format.name)
        assert len(explorer.buttons.children) == format.bits
        for place, button in enumerate(explorer.buttons.children):
            before = explorer.number.pattern
            button.value = not button.value
            assert explorer.number.pattern ^ before == 1 << (format.bits - 1 - place)
            assert button.tooltip == floats.field_of(place, format)


def test_typed_numbers(quick):
    explorer, caption, image = live("1", "bf16")
    explorer.entry.value = "-0"
    assert shown(explorer) == "1" + 15 * "0"
    explorer.entry.value = "1e999999999"
    assert explorer.number.value == math.inf
    assert "1e999999999 in bf16: 0 11111111 0000000, infinity" in caption.value
    explorer.entry.value = "<one>"
    assert "expected a number, got &#x27;&lt;one&gt;&#x27;: type one" in caption.value
    explorer.entry.value = "2"
    assert "2 in bf16: 0 10000000 0000000" in caption.value
    assert image.value


def test_formats(quick):
    """The number stays what was typed, also where a format before it had no place for it."""
    explorer, _, image = live("70000", "fp16")
    assert explorer.number.value == math.inf
    picture = image.value
    explorer.choice.value = "fp8 e4m3"
    assert image.value != picture  # another row stands out
    assert (len(explorer.buttons.children), explorer.number.value) == (8, 448.0)
    explorer.choice.value = "fp32"
    assert (len(explorer.buttons.children), explorer.number.value) == (32, 70000.0)
    explorer.choice.value = "fp8 e5m2"
    explorer.choice.value = "fp8 e4m3"  # as many bits, other fields
    assert [button.tooltip for button in explorer.buttons.children].count("exponent") == 4


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (("1/0", "bf16"), "expected a number, got '1/0'"),
        ((f"{10**400}/1", "bf16"), "expected a number, got '1000"),
        (("1", "fp64"), "no format is called 'fp64'; there are fp32, tf32,"),
    ],
)
def test_what_there_is_not(values, said):
    with pytest.raises(ValueError, match=said):
        float_explorer(*values)


def test_parse():
    found = [parse(text) for text in ("0.1", "1/3", " -1e-8 ", "inf", "1e-999999999")]
    assert found == [0.1, 1 / 3, -1e-8, math.inf, 0]
    assert str(parse("-0")) == "-0.0"
