"""`python -m ddpkit.bench wire`: what it compares and says. No test times."""

from functools import partial

import torch.distributed as dist

from ddpkit import launch
from ddpkit.bench import wire
from ddpkit.bench.results import AGAIN, Results
from ddpkit.runtime.wire import recorder


def records_of_a_turn(make) -> dict[str, list[str]]:
    """{variant: what a turn of it leaves in the records}."""
    contest, found = wire.contest(make, dist.new_group(backend="gloo")), {}
    for name, turn in contest.calls.items():
        before = len(recorder().records)
        turn()
        found[name] = [record.op for record in recorder().records[before:]]
    return found


def test_one_variant_is_recorded_and_the_others_are_not():
    for make, said in (
        (wire.all_reduces, [["all_reduce"] * 3] * 2),
        (wire.messages, [["send", "recv", "send"], ["recv", "send", "recv"]]),
    ):
        for rank, found in enumerate(launch(records_of_a_turn, partial(make, 3), world_size=2)):
            assert found == {wire.PLAIN: [], wire.RECORDED: said[rank], wire.PLAIN + AGAIN: []}


def test_a_step_is_recorded_too():
    for found in launch(records_of_a_turn, partial(wire.steps, 1), world_size=2):
        assert "all_reduce" in found[wire.RECORDED]
        assert found[wire.PLAIN] == found[wire.PLAIN + AGAIN] == []


def test_what_a_call_and_a_step_may_cost():
    plain, recorded = (10e-3, 12e-3), (12e-3, 15e-3)  # of turns of 100 calls
    seconds = {wire.PLAIN: plain, wire.RECORDED: recorded, wire.PLAIN + AGAIN: (12e-3, 12e-3)}
    for calls, again, more, at_most, within in (
        (100, "10 µs", "25 µs", "30 µs", "yes"),
        (1, "1 ms", "2.5 ms", "330 µs", "NO"),
    ):
        found = {each.variant: each.columns for each in wire.together("calls", calls, seconds)}
        its = found[wire.RECORDED]
        assert (its["More"], its["At most"], its["Within?"]) == (more, at_most, within)
        assert found[wire.PLAIN]["More"] == again  # A/A


def test_it_measures():
    found = Results(wire.measure("a call", wire.all_reduces, 2, rounds=1))
    assert [each.variant for each in found] == [wire.PLAIN, wire.RECORDED, wire.PLAIN + AGAIN]
    assert all(len(each.seconds) == 1 for each in found)
    assert "A/A" in repr(found)
