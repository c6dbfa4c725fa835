"""The softmax player: what it says of a row is what the library computes; what it shows changes with every number."""

import io
import math

import pytest
import torch
from PIL import Image
from test_figures import has_colour

from ddpkit.lesson import figures
from ddpkit.lesson.softmax_player import MOST_NUMBERS, NEW, READ, draw, moments, softmax_player

INF = math.inf
ROW = [1.0, 3.0, -INF, 2.0, 5.0]
TRACE = """\
0. nothing read: m = −∞, d = 0
1. x = 1: m grows from −∞ to 1; d = 0 × 0 + 1 = 1
2. x = 3: m grows from 1 to 3; d = 1 × 0.135 + 1 = 1.14
3. x = −∞: masked, m stays 3 and d 1.14
4. x = 2: m stays 3; d = 1.14 × 1 + 0.368 = 1.5
5. x = 5: m grows from 3 to 5; d = 1.5 × 0.135 + 1 = 1.2"""


def image(picture) -> Image.Image:
    return Image.open(io.BytesIO(picture.png)).convert("RGB")


@pytest.mark.parametrize("row", [ROW, [0.0], [1000.0, -1000.0, 1000.0], [-INF, -INF], [-INF, -3.0]])
def test_moments_are_those_of_the_row(row):
    film = moments(row)
    assert [moment.read for moment in film] == list(range(len(row) + 1))
    for moment in film[1:]:
        start = torch.tensor(row[: moment.read], dtype=torch.float64)
        assert moment.m == start.max().item()
        assert moment.d == pytest.approx(0.0 if moment.m == -INF else (start - moment.m).exp().sum().item())
        assert math.fsum(moment.weights()) == pytest.approx(moment.d)
        assert math.fsum(moment.weights(before=True)) == pytest.approx(moment.d_before)
        assert moment.d_before * moment.correction + moment.weights()[-1] == pytest.approx(moment.d)


def test_text_and_picture():
    player = softmax_player(ROW)
    assert repr(player) == TRACE
    bundle = player._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "image/png", "application/vnd.jupyter.widget-view+json"}
    assert bundle["image/png"] == player.picture(5).png  # where the maximum grew last
    assert player.picture(5).text == "5. x = 5: m grows from 3 to 5; d = 1.5 × 0.135 + 1 = 1.2."
    assert image(player.picture(5)).width <= figures.WIDEST
    for colour in (READ, NEW):
        assert has_colour(player.picture(5).png, colour)
        assert not has_colour(player.picture(0).png, colour)


def test_every_step_has_its_own_picture_and_caption():
    player = softmax_player(ROW)
    pictures, captions = set(), set()
    for step in range(len(ROW) + 1):
        player.slider.value = step
        pictures.add(bytes(player.image.value))
        captions.add(player.caption.value)
    assert len(pictures) == len(captions) == len(ROW) + 1
    assert "5 of 5 numbers read. x = 5: m grows from 3 to 5;" in player.caption.value


def test_bars_are_as_high_as_weights():
    """In the middle of the second of two bars, from the ground up: filled as far as its weight says."""
    for weight in (0.25, 0.5, 1.0):
        picture = image(draw(moments([0.0, math.log(weight)])[-1]))
        orange = tuple(int(NEW[at : at + 2], 16) for at in (1, 3, 5))
        middle = 150 + 120 + 60
        filled = sum(
            all(abs(a - b) < 12 for a, b in zip(picture.getpixel((middle, y)), orange, strict=True))
            for y in range(110, 284)
        )
        assert filled == pytest.approx(120 * weight, abs=3)  # its edge


def test_a_maximum_that_grew_is_told_in_the_picture(monkeypatch):
    said = []
    monkeypatch.setattr(figures.Canvas, "text", lambda canvas, x, y, text, *rest, **more: said.append(text))
    film = moments(ROW)
    for read, title in ((1, "m = 1     d = 1"), (2, "m = 1 → 3     d = 1.14"), (4, "m = 3     d = 1.5")):
        said.clear()
        draw(film[read])
        assert title in said
        assert ("dashed: before m grew" in said) == ("→" in title)


def test_masked_rows():
    assert repr(softmax_player([-INF, -INF])).endswith("2. x = −∞: masked, m stays −∞ and d 0")
    for moment in moments([-INF, -INF]):
        assert draw(moment).png


def test_the_widest_row_fits():
    picture = image(draw(moments([-1234.5] * MOST_NUMBERS)[-1]))
    assert {picture.getpixel((figures.WIDEST - 1 - at, y)) for at in range(20) for y in range(picture.height)} == {
        (255, 255, 255)
    }


@pytest.mark.parametrize("row", [[], [0.0] * (MOST_NUMBERS + 1), [1.0, INF], [math.nan]], ids=str)
def test_what_it_does_not_play(row):
    with pytest.raises(
        ValueError, match=f"expected 1 to {MOST_NUMBERS} numbers, none .inf or NaN, got .*: cut the row"
    ):
        softmax_player(row)
