"""The exercises of notebook 01."""

import torch.distributed as dist

from ddpkit import collectives
from ddpkit import exercises as check

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

    def adds_to_what_was_there(output, input_list):
        before = output.clone()
        collectives.reduce_scatter(output, input_list)
        output += before

    said = check.reduce_scatter(adds_to_what_was_there).text
    assert "What was in `output` before is still in it" in said


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
