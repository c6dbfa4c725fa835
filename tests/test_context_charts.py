"""The player and the charts of notebook 13."""

import pytest
import torch

from ddpkit import launch
from ddpkit.context_parallel import contiguous, pairs_of_hop, zigzag
from ddpkit.lesson import context_charts


def test_what_ranks_compute_is_what_the_deals_say():
    for deal in context_charts.deals(3).values():
        run = launch(context_charts.blocks_computed, deal, world_size=3)
        for rank, (seen, busy) in enumerate(run):
            planned = []
            for hop in range(3):
                planned += [(hop, *pair) for pair in pairs_of_hop(deal, rank, hop)]
            assert seen == planned
            assert busy == 0.0  # nobody slept


def test_the_player_steps_by_hop():
    runs = {}
    for name, deal in (("in order", contiguous(2)), ("zigzag", zigzag(2))):
        runs[name] = launch(context_charts.blocks_computed, deal, world_size=2)
    player = context_charts.score_player(runs)
    assert player.text.splitlines() == [
        "hop 0: in order 2 2; zigzag 2 2",
        "hop 1: in order 0 4; zigzag 2 2",
    ]
    caption, picture = player.look(0)
    assert caption.startswith("Hop 0 of 0 to 1.")
    assert picture.size[0] < 1040


@pytest.mark.parametrize("scheme", ["ring", "all-to-all"])
def test_bytes_of_the_crossing_are_those_of_the_wire(scheme):
    unit = 8 * 16 * 4
    for kv_heads in (2, 4):
        run = launch(context_charts.both_ways, scheme, torch.float32, 4, kv_heads, world_size=2)
        formula = unit * context_charts.sent_for_a_key(scheme, 4, kv_heads, 2)
        assert context_charts.sent(run)[0] == formula
    picture = context_charts.crossing({"ring": {2: 1.0}, "all-to-all": {2: 2.0}}, 4, 2, unit)
    assert (
        picture.text
        == "Sent by each of 2 ranks in forward, 4 heads: equal at 4 heads of k and v; at most 2 B."
    )


def test_loads_name_the_fullest():
    even = [[0.25] * 4] * 8
    one = [[1.0, 0, 0, 0]] * 8
    picture = context_charts.loads({"even": even + even, "one": even + one})
    assert picture.text.splitlines() == [
        "even: in the end the fullest has 1 times its fair share",
        "one: in the end the fullest has 4 times its fair share",
    ]
    assert context_charts.fullest([3, 1]) == 1.5
