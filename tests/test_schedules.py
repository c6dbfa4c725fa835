"""Schedules as data: what they hold and how long they are idle, what is refused and in which words.

The oracle is `runs`: ranks as queues of actions and boxes of messages, which knows of no order.
"""

import random
import re

import pytest

from ddpkit.pipeline.dry_run import held, idle, messages, rank_of_stage, validate
from ddpkit.pipeline.schedules import gpipe, interleaved, one_f_one_b, zero_bubble

SIZES = [(p, m) for p in range(1, 9) for m in range(1, 17)]
MAKERS = {
    "gpipe": gpipe,
    "1F1B": one_f_one_b,
    "interleaved": interleaved,
    "three a rank": lambda p, m: interleaved(p, m, 3),
    "zero bubble": zero_bubble,
}


def runs(schedule) -> bool:
    """Whether ranks that did what the lists say would all come to their end, each stage with every
    micro-batch forward and backward, once, and each weight where its activations are."""
    home = {}
    for rank, actions in enumerate(schedule):
        for action in actions:
            if home.setdefault(parts(action)[0], rank) != rank:
                return False
    last, micro_batches = max(home, default=-1), 0
    box, done, left = set(), [], [list(actions) for actions in schedule]
    while any(left):
        before = len(done)
        for actions in left:
            while actions and _arrived(actions[0], last, box, done):
                action = actions.pop(0)
                if action in done:
                    return False
                done.append(action)
                stage, kind, number = parts(action)
                micro_batches = max(micro_batches, number + 1)
                if kind in "FBI":
                    box.add(f"{'forward' if kind == 'F' else 'backward'} of {stage} {number}")
        if len(done) == before:
            return False
    every = [(s, n) for s in range(last + 1) for n in range(micro_batches)]
    found = [_of(done, kinds) for kinds in ("F", "BI", "BW")]
    return bool(every) and found == [every] * 3


def parts(action) -> tuple[int, str, int]:
    stage, kind, number = re.fullmatch(r"(\d+)([A-Z_]+)(\d+)", action).groups()
    return int(stage), kind, int(number)


def _of(done, kinds) -> list[tuple[int, int]]:
    """(stage, micro-batch) of what is one of `kinds`."""
    found = [parts(action) for action in done]
    return sorted((stage, number) for stage, kind, number in found if kind in kinds)


def _arrived(action, last, box, done) -> bool:
    stage, kind, number = parts(action)
    if kind == "F":
        return stage == 0 or f"forward of {stage - 1} {number}" in box
    if kind == "W":
        return f"{stage}I{number}" in done
    gradient = stage == last or f"backward of {stage + 1} {number}" in box
    return gradient and f"{stage}F{number}" in done


def accepted(schedule) -> bool:
    try:
        validate(schedule)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("name", MAKERS)
def test_every_size_is_valid_and_runs(name):
    for p, m in SIZES:
        schedule = MAKERS[name](p, m)
        validate(schedule)
        assert runs(schedule), (p, m)


@pytest.mark.parametrize(("F", "B", "I", "W"), [(1, 2, 1, 1), (3, 5, 3, 2)])
def test_idle_ticks_are_the_published_ones(F, B, I, W):  # noqa: E741
    ticks = {"F": F, "B": B, "I": I, "W": W}
    for p, m in SIZES:
        if m < p or m % 4 in (1, 2) or p in (6, 7):
            continue
        assert idle(gpipe(p, m), **ticks) == [(p - 1) * (F + B)] * p
        assert idle(one_f_one_b(p, m), **ticks) == [(p - 1) * (F + B)] * p
        if m % p == 0:
            for v in (2, 3):
                assert idle(interleaved(p, m, v), **ticks) == [(p - 1) * (F + B)] * p
        if F == I == W:
            assert idle(zero_bubble(p, m), **ticks) == [(p - 1) * (F + B - 2 * W)] * p


def test_fewer_micro_batches_than_stages_idle_longer_with_zero_bubble_only():
    assert idle(gpipe(4, 1)) == idle(one_f_one_b(4, 1)) == [9] * 4
    assert [idle(zero_bubble(4, m))[0] for m in (1, 2, 3, 4)] == [6, 5, 4, 3]


def test_held_micro_batches_are_the_published_ones():
    assert list(held(gpipe(4, 8)).values()) == [8, 8, 8, 8]
    assert list(held(one_f_one_b(4, 8)).values()) == [4, 3, 2, 1]
    assert list(held(zero_bubble(4, 8)).values()) == [4, 4, 4, 4]
    for p, m in SIZES:
        assert list(held(one_f_one_b(p, m)).values()) == [min(p - s, m) for s in range(p)]
        assert set(held(zero_bubble(p, m)).values()) <= {min(p, m)}


def test_as_published():
    """Narayanan et al. 2021, figure 4; Qi et al. 2023, figure 2. The others: their exercises."""
    first = interleaved(4, 8)[0]
    words = "0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 0F4 0F5 0F6 4B0 0F7 4B1 4F4 4B2 4F5 4B3 4F6 0B0"
    assert " ".join(first).startswith(words)
    words = "3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3W0 3F4 3I4 3W1 3W2 3W3 3W4"
    assert " ".join(zero_bubble(4, 5)[3]) == words


def broken(schedule):
    """(how, schedule) for one action dropped, doubled, swapped with another, moved elsewhere."""
    for rank, actions in enumerate(schedule):
        for at, action in enumerate(actions):
            rest = actions[:at] + actions[at + 1 :]
            yield f"{action} dropped", _with(schedule, rank, rest)
            yield f"{action} doubled", _with(schedule, rank, [*actions, action])
            for other in range(at):
                swapped = list(actions)
                swapped[at], swapped[other] = swapped[other], swapped[at]
                yield f"{action} swapped with {actions[other]}", _with(schedule, rank, swapped)
            for other, theirs in enumerate(schedule):
                if other != rank:
                    moved = _with(schedule, rank, rest)
                    moved[other] = [*theirs[:at], action, *theirs[at:]]
                    yield f"{action} moved to rank {other}", moved


def _with(schedule, rank, actions):
    return [actions if r == rank else list(others) for r, others in enumerate(schedule)]


@pytest.mark.parametrize("name", MAKERS)
def test_a_broken_schedule_is_refused_or_runs(name):
    some, seen = random.Random(name), {True: 0, False: 0}
    for p, m in [(1, 2), (2, 1), (2, 3), (3, 2), (4, 4), (3, 8)]:
        if p * m * (3 if name == "three a rank" else 1) > 24:
            continue
        cases = list(broken(MAKERS[name](p, m)))
        for how, schedule in some.sample(cases, min(len(cases), 120)):
            assert accepted(schedule) == runs(schedule), (p, m, how, schedule)
            seen[accepted(schedule)] += 1
    assert min(seen.values()) > 10  # some are only in another order, and right


REFUSED = {
    "0F0 0B0 0F1 0B1 | 1F0 1F1 1B0 1B1": "this would hang: rank 0 waits in 0B0 for 1B0, which rank "
    "1 does only after 1F1; rank 1 waits in 1F1 for 0F1, which rank 0 does only after 0B0",
    "0F0 0B0 | 1B0 1F0": "this would hang: rank 1 waits in 1B0 for 1F0, which it does "
    "only after 1B0",
    "0F0 0B0 | 1F0": "got 1F0 of stage 1, micro-batch 0: expected 1F0 and its backward, whole "
    "(B) or in parts (I, W)",
    "0F0 0B0 | 1F0 1B0 1B0": "rank 1 does 1B0 2 times, expected once: take the others out",
    "0F0 1F0 | 1B0 0B0": "rank 1 does 1B0, but stage 1 is on rank 0: a stage's weights are on one "
    "rank, which does all of it",
    "0F0 0I0": "got 0F0 and 0I0 of stage 0, micro-batch 0: expected 0F0 and its backward",
    "0F0 0B0 0W0": "got 0F0 and 0B0 and 0W0 of stage 0, micro-batch 0: expected 0F0 and",
    "1F0 1B0": "got nothing of stage 0, micro-batch 0: expected 0F0 and its backward",
    "0F0 0X0": "expected an action to be a stage, one of F, B, I, W, and a micro-batch, as in "
    "\"0F3\", got '0X0'",
    "": "got nothing of stage 0, micro-batch 0",
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_refusal_says_why(text):
    with pytest.raises(ValueError, match=re.escape(REFUSED[text])):
        validate([actions.split() for actions in text.split("|")])


def test_one_list_for_all_ranks_is_refused():
    with pytest.raises(ValueError, match="a list of actions for each rank, got '0F0' for one"):
        validate(["0F0", "0B0"])


def test_sizes_are_checked():
    for make in (gpipe, one_f_one_b, interleaved, zero_bubble):
        with pytest.raises(ValueError, match="micro_batches to be 1 or more, got 0"):
            make(2, 0)


@pytest.mark.parametrize("name", MAKERS)
def test_messages_pair_up_in_one_order(name):
    """As NCCL needs it: messages sent one by one, each side busy until the other takes it."""
    for p, m in SIZES:
        if p > 4 or m > 8:
            continue
        schedule = MAKERS[name](p, m)
        ranks, programs = rank_of_stage(schedule), messages(schedule)
        wires = [[each for each in program if "_" in each] for program in programs]
        crossed = sum(ranks[s] != ranks[s + 1] for s in ranks if s + 1 in ranks)
        assert sum(map(len, wires)) == 2 * 2 * m * crossed  # both ways, both sides
        for rank, program in enumerate(programs):
            assert [each for each in program if "_" not in each] == schedule[rank]
            _check_order(program, ranks)
        while any(wires):
            left = sum(map(len, wires))
            for wire in wires:
                if wire and "SEND" in wire[0]:
                    stage, send, number = parts(wire[0])
                    to = stage + (1 if send == "SEND_F" else -1)
                    other = wires[ranks[to]]
                    if other and other[0] == f"{to}{send.replace('SEND', 'RECV')}{number}":
                        wire.pop(0), other.pop(0)
            assert sum(map(len, wires)) < left, (p, m, wires)


def _check_order(program, ranks):
    """A send right after what made it, a receive before what needs it."""
    for at, each in enumerate(program):
        stage, way, number = parts(each)
        wanted = {f"{stage}{kind}{number}" for kind in ("F" if way[-1] == "F" else "BI")}
        if "SEND" in way:
            assert program[at - 1] in wanted
        if "RECV" in way:
            assert wanted.intersection(program[at:])
