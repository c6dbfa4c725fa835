"""`python -m ddpkit.bench wire`: what it compares and says. No test times."""

from ddpkit import launch
from ddpkit.bench import wire
from ddpkit.bench.results import AGAIN, Results
from ddpkit.runtime.wire import plain_group, recorder


def records_of_a_turn(make, calls) -> dict[str, list[str]]:
    """{variant: what a turn of it leaves in the records}."""
    contest, found = wire.contest(make, calls, plain_group()), {}
    for name, turn in contest.calls.items():
        before = len(recorder().records)
        turn()
        found[name] = [record.op for record in recorder().records[before:]]
    assert all(len(turns) == 1 and turns[0] > 0 for turns in contest.found().values())
    return found


def test_one_variant_is_recorded_and_the_others_are_not():
    for make, said in (
        (wire.all_reduces, [["all_reduce"] * 3] * 2),
        (wire.messages, [["send", "recv", "send"], ["recv", "send", "recv"]]),
    ):
        for rank, found in enumerate(launch(records_of_a_turn, make, 3, world_size=2)):
            assert found.pop(wire.RECORDED) == said[rank]
            assert found == {wire.PLAIN: [], wire.PLAIN + AGAIN: [], wire.BUSY: []}


def test_a_step_is_recorded_too():
    for found in launch(records_of_a_turn, wire.training_steps, 1, world_size=2):
        assert "all_reduce" in found[wire.RECORDED]
        assert found[wire.PLAIN] == found[wire.PLAIN + AGAIN] == []


def test_what_a_call_and_a_step_may_cost():
    plain, again, much = (100e-6, 120e-6), (120e-6, 120e-6), (160e-6, 220e-6)
    little = 101e-6, 121e-6

    def judged(calls, recorded, its_cpu):
        seconds = {wire.PLAIN: plain, wire.RECORDED: recorded, wire.PLAIN + AGAIN: again}
        found = wire.together("calls", calls, seconds, seconds | {wire.RECORDED: its_cpu})
        assert found[0].columns["More"] == "10 µs"  # A/A
        its = found[1].columns
        return its["More"], its["More CPU"], its["Within?"]

    assert judged(100, much, little) == ("80 µs", "1 µs", "yes")  # of a call, CPU time counts
    assert judged(100, little, much) == ("1 µs", "80 µs", "NO")
    assert judged(1, little, much) == ("1 µs", "80 µs", "yes")  # of a step, its time
    assert judged(1, much, little) == ("80 µs", "1 µs", "NO")


def test_times_are_of_a_call(monkeypatch):
    """Of 50 in a turn; CPU is the mean of both ranks."""
    names = wire.PLAIN, wire.RECORDED, wire.PLAIN + AGAIN, wire.BUSY
    cpu = [dict.fromkeys(names, [1.0] * wire.WARM_UP + [s]) for s in (0.5e-3, 1.5e-3)]
    monkeypatch.setattr(wire, "race", lambda *_: (dict.fromkeys(names, (0.1,)), cpu))
    (plain, *_) = wire.measure("a call", wire.all_reduces, 50, rounds=1)
    assert plain.seconds == (2e-3,)
    assert plain.columns["CPU"] == "20 µs"


def test_it_measures():
    found = Results(wire.measure("a call", wire.all_reduces, 2, rounds=1))
    variants = wire.PLAIN, wire.RECORDED, wire.PLAIN + AGAIN, wire.BUSY
    assert tuple(each.variant for each in found) == variants
    assert all(len(each.seconds) == 1 for each in found)
    assert "A/A" in repr(found)
