"""Charts of notebook 05: what they say, and that they show their data."""

import math

import pytest
import torch
from PIL import ImageChops
from test_charts import has_colour, image

from ddpkit.lesson import charts, figures, precision_charts

FALLING = [3 - 0.01 * step for step in range(40)]
GRADIENTS = torch.tensor([2.0**-30, -(2.0**-20), 2.0**-10, 0.0, 2.0**-10])


def test_loss_curves():
    picture = precision_charts.loss_curves({"fp32": FALLING, "fp16, plain": [3.0] * 40}, "Loss")
    assert repr(picture) == "Loss: fp32; fp16, plain. By step, each point the mean of 10."
    assert image(picture).width <= figures.WIDEST
    assert has_colour(picture, charts.BLUE)
    assert has_colour(picture, charts.ORANGE)
    assert picture.png != precision_charts.loss_curves({"fp32": FALLING, "fp16, plain": FALLING}, "Loss").png


def test_a_curve_ends_at_its_first_nan():
    broken = FALLING[:20] + [math.nan] * 20
    assert math.isnan(precision_charts.means(broken)[2])
    assert has_colour(precision_charts.loss_curves({"broken": broken}), charts.BLUE)


def test_points_are_means():
    assert precision_charts.means([1.0] * 10 + [2.0] * 14) == [1, 2]
    assert sum(precision_charts.means(FALLING)) / 4 == pytest.approx(sum(FALLING) / 40)


def test_too_short_to_draw():
    with pytest.raises(ValueError, match="expected losses of 10 steps or more, got fewer of plain"):
        precision_charts.loss_curves({"fp32": FALLING, "plain": [1.0]})
    with pytest.raises(ValueError, match="got fewer of nothing"):
        precision_charts.loss_curves({})


def test_scale_steps():
    picture = precision_charts.scale_steps([24, 23, 22, 22, 23])
    assert repr(picture) == "The loss scale, step by step: dynamic, and static at 2^16."
    assert image(picture).width <= figures.WIDEST
    assert has_colour(picture, charts.BLUE)
    assert has_colour(picture, charts.ORANGE)
    assert picture.png != precision_charts.scale_steps([24, 23, 22, 22, 22]).png
    assert picture.png != precision_charts.scale_steps([24, 23, 22, 22, 23], static=10).png


def test_counts_are_those_of_fp16():
    counts = precision_charts.fp16_counts(GRADIENTS)
    assert counts == {"rounds to 0": 1, "subnormal": 1, "normal": 2, "infinite": 0}
    assert precision_charts.fp16_counts(GRADIENTS, 2.0**16)["normal"] == 4
    assert precision_charts.fp16_counts(GRADIENTS, 2.0**26)["infinite"] == 2


def test_one_gradient_among_many_can_be_seen():
    crowd = torch.full((10_000,), 2.0**-10)
    without, with_one = (
        image(precision_charts.fp16_histogram(gradients)).crop((900, 300, 1000, 455))  # no words, no axis
        for gradients in (crowd, torch.cat([crowd, torch.tensor([2.0**20])]))
    )
    _, top, _, bottom = ImageChops.difference(without, with_one).getbbox()
    assert bottom - top >= 3


def test_the_histogram_moves_with_the_scale():
    zones = {scale: precision_charts.fp16_histogram(GRADIENTS, 2.0**scale) for scale in (0, 16, 26)}
    assert repr(zones[16]) == (
        "Gradients × 2^16, by power of two: how many there are, in the zones of fp16: "
        "rounds to 0, subnormal, normal, infinite."
    )
    assert len({picture.png for picture in zones.values()}) == 3
    for scale, ink, there in ((0, charts.ORANGE, True), (16, charts.ORANGE, False), (16, figures.WRONG, False)):
        assert has_colour(zones[scale], ink) == there
    assert has_colour(zones[26], figures.WRONG)


@pytest.mark.parametrize("draw", [precision_charts.fp16_histogram, precision_charts.fp16_counts])
def test_gradients_that_are_gone(draw):
    with pytest.raises(ValueError, match="got only zeros"):
        draw(torch.zeros(3))


def test_the_calculator_says_what_a_scale_does():
    widget = precision_charts.scale_calculator(GRADIENTS)
    assert repr(widget) == repr(precision_charts.fp16_histogram(GRADIENTS))
    widget.set(power=16)
    said, picture = widget.look()
    assert said == "loss × 2^16 = 65,536. rounds to 0: 0, subnormal: 0, normal: 4, infinite: 0"
    assert picture.png == precision_charts.fp16_histogram(GRADIENTS, 2.0**16).png
