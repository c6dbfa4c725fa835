"""The player of tiles: its numbers are those of a softmax over the whole row, and only the tile in work is drawn."""

import io
import math

import pytest
import torch
from PIL import Image
from test_figures import has_colour

from ddpkit.lesson import flash_player as module
from ddpkit.lesson.flash_player import CELL, LEFT, ORANGE, SKY, TALL, TOP, flash_player, tiles

SCORES = torch.tensor([[0.0, 1.0, 3.0], [2.0, 0.0, -1.0], [1.0, 1.0, 4.0]])

TRACE = """\
1. queries 0 to 1, keys 0 to 1: row 0: m 1, sum so far × 0, total 1.37; row 1: m 2, sum so far × 0, total 1.14
2. queries 0 to 1, key 2: row 0: m 3, sum so far × 0.135, total 1.19, lse 3.17; \
row 1: m 2, sum so far × 1, total 1.19, lse 2.17
3. query 2, keys 0 to 1: row 2: m 1, sum so far × 0, total 2
4. query 2, key 2: row 2: m 4, sum so far × 0.0498, total 1.1, lse 4.09"""


def fill(picture, row: int, column: int) -> str:
    """The colour of a score's cell, in the corner where nothing is written."""
    page = Image.open(io.BytesIO(picture.png)).convert("RGB")
    pixel = page.getpixel((LEFT + column * CELL + 7, TOP + (row + 1) * TALL - 7))
    return "#" + "".join(f"{part:02X}" for part in pixel)


def test_what_it_says():
    player = flash_player(SCORES)
    assert repr(player) == TRACE
    assert set(player._repr_mimebundle_()) == {
        "text/plain",
        "image/png",
        "application/vnd.jupyter.widget-view+json",
    }


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tile", [1, 2, 3, 8])
def test_its_numbers_are_those_of_whole_rows(tile, causal):
    scores = torch.randint(-3, 4, (8, 7), generator=torch.Generator().manual_seed(0)).float()
    if causal:
        scores = scores.masked_fill(torch.ones(8, 7).triu(1).bool(), -math.inf)
    last = [each for each in tiles(scores, tile, causal) if each.last]
    m = torch.tensor([value for each in last for value in each.m])
    total = torch.tensor([value for each in last for value in each.total])
    torch.testing.assert_close(m, scores.amax(1))
    torch.testing.assert_close(m + total.log(), scores.logsumexp(1))


@pytest.mark.parametrize(("queries", "keys", "worked"), [(8, 8, 10), (8, 4, 7), (4, 8, 3), (7, 7, 10)])
def test_tiles_in_the_future_are_skipped(queries, keys, worked):
    found = list(tiles(torch.zeros(queries, keys), 2, causal=True))
    assert len(found) == worked
    assert all(each.columns.start <= each.rows.stop - 1 for each in found)
    assert {row for each in found for row in each.rows} == set(range(queries))


def test_only_the_tile_in_work_has_its_colour():
    picture = flash_player(torch.zeros(4, 4), causal=True).picture(2)
    assert fill(picture, 2, 0) == fill(picture, 3, 1) == ORANGE
    assert fill(picture, 0, 0) == fill(picture, 1, 1) == SKY
    assert fill(picture, 2, 2) == fill(picture, 3, 3) == "#FFFFFF"
    assert fill(picture, 0, 2) not in (ORANGE, SKY, "#FFFFFF")
    assert has_colour(picture.png, module.MIXED)
    assert fill(flash_player(torch.zeros(4, 4)).picture(2), 0, 2) == ORANGE  # skipped only if causal


def test_the_slider_moves_picture_and_caption():
    player = flash_player(SCORES)
    assert "Tile 1 of 4: queries 0 to 1, keys 0 to 1" in player.caption.value
    picture = player.image.value
    player.slider.value = 4
    assert "Tile 4 of 4: query 2, key 2: row 2: m 4" in player.caption.value
    assert player.image.value != picture


@pytest.mark.parametrize(
    ("scores", "tile", "said"),
    [
        (torch.zeros(9, 2), 2, r"1 to 8 queries and keys, got some of shape \(9, 2\)"),
        (torch.zeros(0, 2), 2, "1 to 8"),
        (torch.zeros(4), 2, "1 to 8"),
        (torch.tensor([[math.nan]]), 2, "finite"),
        (torch.zeros(2, 2), 0, "a tile of at least 1 query and key, got 0"),
    ],
)
def test_what_it_does_not_take(scores, tile, said):
    with pytest.raises(ValueError, match=said):
        flash_player(scores, tile)
