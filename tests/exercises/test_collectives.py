"""The exercises of notebook 01."""

import torch.distributed as dist

from ddpkit import collectives
from ddpkit import exercises as check
from ddpkit.exercises.collectives import JUNK

from .every import *  # noqa: F403


def test_the_digits_say_what_is_wrong():
    def doubles(tensor):
        collectives.all_reduce(tensor)
        tensor += tensor

    said = check.all_reduce(doubles).text
    assert "Read the digits: ranks 0 and 1 are in it more than once." in said

    def others_chunk(output, input_list):
        collectives.reduce_scatter(output, input_list)
        output += input_list[1 - dist.get_rank()]

    said = check.reduce_scatter(others_chunk).text
    assert "Rank 0's chunk 1 is in it. Rank 0 sums chunk 0 of all." in said

    trial = next(iter(check.reduce_scatter.trials()))
    right = trial.expected[0]  # of rank 0 of 2: its own chunk of 1, and rank 1's of 100
    for value, told in ((101 + JUNK, "What was in `output` before"), (100, "is in it 0 times")):
        assert told in check.reduce_scatter.explain(trial, 0, right, right | {"output": [value]})


def test_what_should_be_left_alone():
    def doubles_its_part(tensor_list, tensor):
        collectives.all_gather(tensor_list, tensor)
        tensor *= 2

    assert "Leave `tensor` as it is" in check.all_gather(doubles_its_part).text


def test_a_count_kept_from_the_first_call_is_found_in_the_second():
    def only_once(tensor, src, seen=[]):  # noqa: B006
        seen.append(src)
        if len(seen) == 1:
            collectives.broadcast(tensor, src)

    said = check.broadcast(only_once).text
    assert "3 ranks, src=2, called twice, torch.float64 of shape (2, 2)" in said


def test_failed_check_offers_a_replay_of_the_smallest_failing_world():
    def from_0(tensor, src):
        collectives.broadcast(tensor, 0)

    assert "on 2 ranks, src=1: tensor on rank 0: [1, 1, 1], not [10" in check.broadcast(from_0).text
    assert "rank 0 sends" in repr(check.broadcast.replay())
    check.broadcast(check.broadcast.reference)
    assert "the last check passed" in check.broadcast.replay().text


def test_where_nothing_was_sent_nothing_is_said_of_what_arrives():
    said = check.broadcast(lambda tensor, src: tensor).text
    assert "not [10, 10, 10]. No rank sent anything." in said
    assert "What arrives" not in said
