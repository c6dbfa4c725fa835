"""The softmax player: what it says of a row is what the library computes, number by number."""

import math

import pytest
import torch
from test_figures import check_picture

from ddpkit.lesson.softmax_player import MOST_NUMBERS, NEW, READ, draw, moments, softmax_player

INF = math.inf
ROW = [1.0, 3.0, -INF, 2.0, 5.0]


@pytest.mark.parametrize("row", [ROW, [1000.0, -1000.0, 1000.0], [-INF, -INF], [-INF, -3.0]])
def test_moments_are_those_of_the_row(row):
    film = moments(row)
    assert [moment.read for moment in film] == list(range(len(row) + 1))
    for moment in film[1:]:
        start = torch.tensor(row[: moment.read], dtype=torch.float64)
        assert moment.m == start.max().item()
        expected = 0.0 if moment.m == -INF else (start - moment.m).exp().sum().item()
        assert moment.ell == pytest.approx(expected)
        assert math.fsum(moment.weights()) == pytest.approx(moment.ell)
        assert math.fsum(moment.weights(before=True)) == pytest.approx(moment.ell_before)
        corrected = moment.ell_before * moment.correction
        assert corrected + moment.weights()[-1] == pytest.approx(moment.ell)


def test_text_and_pictures():
    player = softmax_player(ROW)
    assert player.telling is player.look(5)[1]  # where the maximum grew last
    assert softmax_player([1, 3, 2]).telling.text.startswith("2. x = 3")
    caption = "5 of 5 numbers read. x = 5: m grows from 3 to 5; ℓ = 1.5 × 0.135 + 1 = 1.2"
    assert player.look(5)[0] == caption
    pictures = [player.look(step)[1] for step in range(len(ROW) + 1)]
    assert len({picture.figure.get_size_inches()[1] for picture in pictures}) == 1
    check_picture(pictures[5], READ, NEW)
    check_picture(softmax_player([-INF, -1234.5] * (MOST_NUMBERS // 2)).telling)


def test_bars_are_the_weights():
    """Of 0 and 2: what 0 weighed before, what both weigh now; below, both sums."""
    bars, sums = draw(moments([0.0, 2.0])[-1]).figure.axes
    assert [bar.get_height() for bar in bars.patches] == pytest.approx([1, math.exp(-2), 1])
    widths = [(bar.get_x(), bar.get_width()) for bar in sums.patches]
    assert widths == [(0, 1), (0, pytest.approx(math.exp(-2))), (pytest.approx(math.exp(-2)), 1)]


@pytest.mark.parametrize("row", [[], [0.0] * (MOST_NUMBERS + 1), [1.0, INF], [math.nan]], ids=str)
def test_what_it_does_not_play(row):
    said = f"expected 1 to {MOST_NUMBERS} numbers, none .inf or NaN, got .*: cut the row"
    with pytest.raises(ValueError, match=said):
        softmax_player(row)
