"""The exercises of notebook 02."""

from answers import ring as answers

from ddpkit import cost, ring
from ddpkit import exercises as check

from .every import *  # noqa: F403


def test_messages_that_wait_for_each_other_are_right_but_not_praised():
    assert "in W-1 hops." in check.ring_all_gather(ring.ring_all_gather).text
    verdict = check.ring_all_gather(answers.ring_all_gather_one_sends_first)
    assert verdict.passed
    assert "12 hops on 4 ranks instead of 3" in verdict.text


def test_what_is_no_chunk_is_named_whatever_it_is():
    said = check.ring_plan(lambda world_size: [[[0]]] * world_size).text
    assert "there are no chunks [[0]]: they are counted from 0 to W-1" in said


def test_ring_cost_is_that_of_the_cost_model():
    for world_size in range(1, 9):
        volume = cost.volume("ring_all_reduce", 840, world_size)
        assert ring.ring_cost(world_size, 840) == (volume.hops, volume.in_turn)
