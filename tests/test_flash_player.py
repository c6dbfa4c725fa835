"""The player of tiles: its numbers are those of a softmax over the whole row."""

import math

import pytest
import torch
from test_figures import check_picture

from ddpkit.lesson.flash_player import GONE, IN_WORK, SKIPPED, flash_player, tiles

SCORES = torch.tensor([[0.0, 1.0, 3.0], [2.0, 0.0, -1.0], [1.0, 1.0, 4.0]])


def test_what_it_says():
    player = flash_player(SCORES)
    caption, picture = player.look(4)
    assert caption.startswith("Tile 4 of 4: query 2, key 2: row 2: m 4")
    check_picture(picture, IN_WORK, GONE)
    large = torch.tensor([[1e300, 1.0]], dtype=torch.float64)
    assert flash_player(large).look(1)[0].endswith("m 1e+300, ℓ so far × 0, ℓ 1, lse 1e+300")


@pytest.mark.parametrize(("tile", "causal"), [(1, True), (2, False), (3, True), (8, False)])
def test_its_numbers_are_those_of_whole_rows(tile, causal):
    scores = torch.randint(-3, 4, (8, 7), generator=torch.Generator().manual_seed(0)).float()
    if causal:
        scores = scores.masked_fill(torch.ones(8, 7).triu(1).bool(), -math.inf)
    last = [each for each in tiles(scores, tile, causal) if each.last]
    m = torch.tensor([value for each in last for value in each.m])
    ell = torch.tensor([value for each in last for value in each.ell])
    torch.testing.assert_close(m, scores.amax(1))
    torch.testing.assert_close(m + ell.log(), scores.logsumexp(1))


@pytest.mark.parametrize(
    ("queries", "keys", "worked"), [(8, 8, 10), (8, 4, 7), (4, 8, 3), (7, 7, 10)]
)
def test_tiles_in_the_future_are_skipped(queries, keys, worked):
    found = list(tiles(torch.zeros(queries, keys), 2, causal=True))
    assert len(found) == worked
    assert all(each.columns.start <= each.rows.stop - 1 for each in found)
    assert {row for each in found for row in each.rows} == set(range(queries))


@pytest.mark.parametrize("causal", [True, False])
def test_only_the_tile_in_work_has_its_colour(causal):
    from matplotlib.colors import to_hex

    boxes = flash_player(torch.zeros(4, 4), causal=causal).look(2)[1].figure.artists[:16]
    fills = [to_hex(box.get_facecolor()).upper() for box in boxes]
    rows = [fills[at : at + 4] for at in range(0, 16, 4)]
    todo = "#FFFFFF"
    if causal:
        assert rows[:2] == [[GONE] * 2 + [SKIPPED] * 2] * 2
        assert rows[2:] == [[IN_WORK] * 2 + [todo] * 2] * 2
    else:
        assert rows[:2] == [[GONE] * 2 + [IN_WORK] * 2] * 2
        assert rows[2:] == [[todo] * 4] * 2


@pytest.mark.parametrize(
    "scores", [torch.zeros(9, 2), torch.zeros(0, 2), torch.zeros(4), torch.tensor([[math.nan]])]
)
def test_what_it_does_not_take(scores):
    with pytest.raises(ValueError, match="finite scores of 1 to 8 queries and keys, got shape"):
        flash_player(scores)
