"""What all checkers share. Where ranks must run, the exercises of notebook 02 stand for all."""

import pytest
import torch
import torch.distributed as dist

from ddpkit import exercises as check
from ddpkit import ring
from ddpkit.exercises import checker
from ddpkit.exercises.checker import (
    Exercise,
    Mistake,
    Rounded,
    Trial,
    Verdict,
    is_stub,
    mistakes,
    read_sum,
    short,
    who_is_in,
)
from ddpkit.exercises.softmax import Numbers
from ddpkit.runtime.errors import HangError


def double(x):
    y = x
    y += x  # twice
    return y


TABLE = mistakes("""
adds_nothing: y += x → y += 0
    Add x itself.
in_two_steps: y = x → y = 0
    y += x → y += x⏎y += 1
    ⏎y -= 2
    Start
    with x.
""")


def _call(answer, x):
    return answer(x)


def exercise(**options):
    def trials():
        for x in (1, 2):
            yield Trial(1, _call, (x,), [2 * x], what=f"x = {x}")

    options = {"hints": {"start": "Add.", "values": "Add twice."}, "mistakes": TABLE} | options
    return Exercise(reference=double, trials=trials, praise="doubled.", **options)


def test_a_table_of_mistakes_is_read():
    assert [(m.name, m.says) for m in TABLE] == [
        ("adds_nothing", "Add x itself."),
        ("in_two_steps", "Start with x."),
    ]
    assert TABLE[1].changes == (("y = x", "y = 0"), ("y += x", "y += x⏎y += 1⏎y -= 2"))
    assert [m.applied_to(double)(5) for m in TABLE] == [5, 4]


@pytest.mark.parametrize("old", ["y", "z"])
def test_a_mistake_must_fit_the_reference_in_one_place(old):
    with pytest.raises(ValueError, match="once in the reference, found it"):
        Mistake("off", "", ((old, "w"),)).applied_to(double)


def test_an_answer_that_fails_like_a_known_mistake_hears_its_sentence():
    verdict = exercise()(lambda x: x)
    assert verdict.passed is False
    assert verdict.text.splitlines() == [
        "✗ double on 1 rank, x = 1: rank 0 has 1, expected 2.",
        "Add x itself.",
        "Trials: ✗ 1 rank, x = 1  · 1 rank, x = 2",
        "More: check.double.hint() · .solution()",
    ]


def test_of_what_was_seen_the_first_that_differs_is_told():
    def saw(answer, x):
        return {"doubled": answer(x), "left alone": x}

    ours = exercise(says={"doubled": "{got} on rank {rank} is not twice {expected}."})
    expected = [{"doubled": 2, "left alone": 3}]
    ours.trials = lambda: [Trial(1, saw, (1,), expected)]
    assert "7 on rank 0 is not twice 2." in ours(lambda x: 7).text
    assert "left alone: 1, not 3." in ours(double).text


def test_a_mistake_of_the_table_is_an_answer():
    assert "Add x itself." in exercise()(TABLE[0]).text


def test_what_no_known_mistake_does_is_explained_or_gets_the_hint_of_its_stage():
    ours = exercise()
    assert "A hint" not in ours(lambda x: 7).text
    assert "A hint, in case it is this: Add twice." in ours(lambda x: 7).text
    assert [str(ours.hint()), str(ours.hint())] == ["Add.", "Add."]
    explained = exercise(explain=lambda trial, rank, expected, got: f"{got} on {rank}?")
    assert "7 on 0?" in explained(lambda x: 7).text


def test_an_argument_is_left_as_it_was():
    def in_a_list(answer, x):
        return answer([x])[0]

    def empties(x):
        return [x.pop() * 2]

    ours = exercise(mistakes=[])
    ours.trials = lambda: [Trial(1, in_a_list, (1,), [2])]
    assert "`x` isn't what it was before the call" in ours(empties).text
    assert "A hint" not in ours(empties).text  # its cause is told


def test_a_list_that_may_be_written_to_keeps_its_tensors():
    def in_a_list(answer, x):
        tensors = [torch.tensor([x])]
        answer(tensors)
        return tensors[0].item()

    def replaces(x):
        x[0] = x[0] * 2
        return x

    ours = exercise(mistakes=[], writes=("x",))
    ours.trials = lambda: [Trial(1, in_a_list, (1,), [2])]
    assert "there are new tensors in `x`" in ours(replaces).text


def test_results_have_the_dtype_of_the_arguments():
    def in_float32(answer, x):
        return answer(torch.tensor([float(x)])).tolist()

    ours = exercise(mistakes=[])
    ours.trials = lambda: [Trial(1, in_float32, (1,), [[2.0]])]
    said = ours(lambda x: x.double() * 2).text
    assert "given torch.float32, and returned torch.float64" in said
    assert ours(lambda x: x * 2).passed


def test_what_remembers_its_first_call_fails_in_the_second():
    def remembers(x, seen=[]):  # noqa: B006
        seen.append(2 * x)
        return seen[0]

    said = exercise()(remembers).text
    assert "x = 2, once more in the same process: rank 0 has 2, expected 4." in said
    assert "✓ 1 rank, x = 2  ✗ once more in the same process" in said
    cases = [Trial(1, double, (1,), [2], rungs=("a", "b"))]
    assert checker.ladder(cases, 1, rung=1) == "Trials: ✓ a  ✓ b  ✗ once more in the same process"


def test_more_than_was_asked_for_is_told():
    def saw(answer, x):
        return {"doubled": answer(x), "tripled": 3}

    ours = exercise(mistakes=[])
    ours.trials = lambda: [Trial(1, saw, (1,), [{"doubled": 2}])]
    assert "tripled: 3, which nobody asked for." in ours(double).text


def test_equal_digits_are_explained():
    def third(answer, x):
        return Numbers(torch.tensor([answer(x)]))

    ours = exercise(mistakes=[])
    ours.trials = lambda: [Trial(1, third, (1,), [Numbers(torch.tensor([1 / 3]))])]
    said = ours(lambda x: 0.33334).text
    assert "has [0.3333], expected [0.3333]. They differ in digits that aren't shown" in said


MANY = mistakes(
    "\n".join(f"plus_{n}: y += x → y += x + {n}\n    Off by {n}." for n in range(1, 13))
)


@pytest.mark.parametrize("seconds", [0.1, 3.0])
def test_naming_ends_in_time_where_launches_are_slow(monkeypatch, seconds):
    """As where ranks are spawned: by the clock of a fake, so that it doesn't matter how fast."""
    now, launched, launch = [0.0], [], checker.launch

    def slow(*args, timeout, **options):
        launched.append(timeout)
        now[0] += min(seconds, timeout)
        if seconds > timeout:
            raise HangError("cut off")
        return launch(*args, timeout=60.0, **options)

    monkeypatch.setattr(checker, "launch", slow)
    monkeypatch.setattr(checker.time, "monotonic", lambda: now[0])
    ours = exercise(mistakes=MANY)
    ours.trials = lambda: [Trial(1, _call, (x,), [2 * x]) for x in range(1, 9)]
    said = ours(lambda x: 2 * x if x < 8 else 7).text  # the last trial fails: 12 × 8 launches
    failing = 8 * seconds
    assert now[0] <= failing + checker.NAMING_S
    assert "rank 0 has 7, expected 16." in said
    for _ in range(12):  # each check goes on where the one before stopped
        told = ours(lambda x: 2 * x + 12).text
    assert "Off by 12." in told
    assert max(launched) <= checker.PATIENCE_S


def test_an_error_is_shown_with_the_readers_line_and_what_it_means():
    def fails(x):
        return (x,)[0] + dist.barrier()  # a collective returns None

    text = exercise()(fails).text
    assert "return (x,)[0] + dist.barrier()" in text
    assert "torch.distributed's collectives work in place and return None" in text
    assert "exercises/checker.py" not in text


def test_right_answers_are_praised_and_forget_failures():
    ours = exercise()
    ours(lambda x: 7)
    assert str(ours(double)) == "✓ double: doubled.\nlines: yours 4, ours 4"
    assert "A hint" not in ours(lambda x: 7).text


def test_what_can_not_be_run_is_refused():
    assert "got None: leave the parentheses off" in exercise()(None).text

    class Made:
        def __call__(self):
            return self

    in_a_class = exercise()
    in_a_class.reference = Made
    assert "expected the class Made, got an object of it" in in_a_class(Made()).text


def test_stubs():
    def stub(x):
        """Docstring."""
        ...  # noqa: PIE790

    assert is_stub(stub)
    assert not is_stub(double)
    assert (exercise()(stub).passed, str(exercise()(stub))) == (None, "double: not written yet")


class Answer:
    def __init__(self, x):
        self.x = x

    def double(self):
        return 2 * self.x

    def half(self):
        return self.x / 2


def test_a_forgotten_return_is_told():
    def nothing(x):
        if x > 2:
            return
        2 * x

    assert "✗ double: it returns nothing. Is a `return` missing?" in str(exercise()(nothing))


def test_a_class_is_not_written_yet_while_all_its_methods_are_empty():
    def stub(self): ...

    def in_class(answer, x):
        return answer(x).double()

    ours = exercise(mistakes=[])
    ours.reference = Answer
    ours.trials = lambda: [Trial(1, in_class, (1,), [2])]
    empty = type("Answer", (Answer,), {"double": stub, "half": stub})
    assert str(ours(empty)) == "Answer: not written yet: double, half"
    part = type("Answer", (Answer,), {"double": stub})
    assert "\ndouble is still empty." in ours(part).text
    assert ours(Answer).passed


def test_a_failed_check_offers_a_replay_where_something_was_sent():
    pytest.importorskip("ipywidgets", reason="Jupyter isn't installed")
    wrong = check.ring_all_gather(lambda x: x[:0])
    assert ".replay()" not in wrong.text
    assert "the ranks sent nothing" in check.ring_all_gather.replay().text

    def half(x):
        ring.ring_reduce_scatter(x)
        return x

    wrong = check.ring_all_gather(half)
    assert ".replay()" in wrong.text
    bundle = wrong._repr_mimebundle_()
    assert bundle["text/plain"] == repr(wrong)
    assert "✗ ring_all_gather on 2 ranks" in bundle["text/html"]
    assert "solution</summary>" in bundle["text/html"]
    assert ".replay()" not in bundle["text/html"]  # it is there, below
    assert "application/vnd.jupyter.widget-view+json" in bundle
    replay = check.ring_all_gather.replay()
    assert "rank 0 sends" in repr(replay)
    check.ring_all_gather(ring.ring_all_gather)
    assert "the last check passed" in check.ring_all_gather.replay().text
    assert isinstance(exercise().replay(), Verdict)


def test_memory_that_nobody_wrote_is_never_luck():
    from ddpkit.exercises.checker import unwritten_memory_shows

    with unwritten_memory_shows():
        assert (torch.empty(3, dtype=torch.int64) == torch.iinfo(torch.int64).max).all()
    assert torch.get_deterministic_debug_mode() == 0


def test_long_values_end_after_a_comma():
    assert short([1, 2]) == "[1, 2]"
    assert short(list(range(100))).endswith(", 29, …")


def test_digits_tell_which_ranks_are_in_a_sum():
    assert who_is_in(1021, 4) == [1, 2, 0, 1]
    assert read_sum(1021, 4) == "rank 2 is missing from it and rank 1 is in it more than once"
    assert read_sum(1111, 4) == ""


def test_rounded_numbers_differ_where_more_than_rounding_does():
    up, down = Rounded([16.5125000001, -0.0], 3), Rounded([16.5124999999, 0.0], 3)
    assert repr([up, down]) == "[[16.513, 0.0], [16.512, 0.0]]"
    assert up == down
    assert (up != down) is False
    for other in ([16.513], [16.511, 0.0], [float("nan"), 0.0], None):
        assert up != other
        assert other != up
