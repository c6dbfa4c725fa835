"""Charts of notebook 05: what they say, and that they show their data."""

import math

import pytest
import torch
from test_figures import check_picture

from ddpkit.lesson import page, precision_charts

FALLING = [3 - 0.01 * step for step in range(40)]
GRADIENTS = torch.tensor([2.0**-30, -(2.0**-20), 2.0**-10, 0.0, 2.0**-10])


def test_loss_curves():
    """Points are means of ten steps, up to the first NaN; what is left over counts for nothing."""
    curves = {"fp32": FALLING, "broken": [1.0] * 10 + [2.0] * 10 + [math.nan] * 19}
    picture = precision_charts.loss_curves(curves, "Loss")
    check_picture(picture, page.BLUE, page.ORANGE)
    fp32, broken = (line.get_xydata().tolist() for line in picture.figure.axes[0].lines)
    assert fp32[0] == [10, pytest.approx(sum(FALLING[:10]) / 10)]
    assert len(fp32) == 4
    assert broken[:2] == [[10, 1], [20, 2]]
    assert math.isnan(broken[2][1])


def test_scale_steps():
    picture = precision_charts.scale_steps([24, 23, 22, 22, 23])
    check_picture(picture, page.BLUE, page.ORANGE)
    dynamic, static = (line.get_ydata() for line in picture.figure.axes[0].lines)
    assert (list(dynamic), list(static)) == ([24, 23, 22, 22, 23], [16] * 5)


def test_counts_are_those_of_fp16():
    counts = precision_charts.fp16_counts(GRADIENTS, 1.0)
    assert counts == {"rounds to 0": 1, "subnormal": 1, "normal": 2, "infinite": 0}
    assert precision_charts.fp16_counts(GRADIENTS, 2.0**16)["normal"] == 4
    assert precision_charts.fp16_counts(GRADIENTS, 2.0**26)["infinite"] == 2


def heights(picture) -> list[float]:
    return [bar.get_height() for bar in picture.figure.axes[0].patches if bar.get_width() == 1]


def test_one_gradient_among_many_can_be_seen():
    crowd = torch.cat([torch.full((10_000,), 2.0**-10), torch.tensor([2.0**20])])
    drawn = heights(precision_charts.fp16_histogram(crowd, 1.0))
    assert sorted(drawn)[-2:] == pytest.approx([10_000 / 75, 10_000])


def test_the_histogram_moves_with_the_scale():
    pictures = {scale: precision_charts.fp16_histogram(GRADIENTS, 2.0**scale) for scale in (0, 16)}
    for scale, picture in pictures.items():
        check_picture(picture)
        drawn = heights(picture)
        places = [place - 48 - scale for place, height in enumerate(drawn) if height]
        assert places == [-30, -20, -10]
        said = [text.get_text() for text in picture.figure.axes[0].texts]
        counts = precision_charts.fp16_counts(GRADIENTS, 2.0**scale)
        assert said == [f"{zone}\n{many}" for zone, many in counts.items()]


def test_gradients_that_are_gone():
    with pytest.raises(ValueError, match="got only zeros"):
        precision_charts.fp16_histogram(torch.zeros(3), 1.0)


def test_the_calculator_says_what_a_scale_does():
    pytest.importorskip("ipywidgets", reason="Jupyter isn't installed")
    widget = precision_charts.scale_calculator(GRADIENTS)
    assert repr(widget) == repr(precision_charts.fp16_histogram(GRADIENTS, 1.0))
    widget.widgets["power"].value = 16
    said, picture = widget.look()
    assert said == "loss × 2^16 = 65,536. rounds to 0: 0, subnormal: 0, normal: 4, infinite: 0"
    assert repr(picture) == repr(precision_charts.fp16_histogram(GRADIENTS, 2.0**16))
