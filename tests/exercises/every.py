"""What holds for every exercise. A topic's file imports all of it, and gets its own exercises."""

import importlib.util
import re

import pytest

from ddpkit.lesson.replay import replay


def test_reference_passes(exercise):
    verdict = exercise(exercise.reference)
    assert verdict.passed, verdict.text
    assert verdict.text.startswith("✓")
    if exercise.plays and importlib.util.find_spec("ipywidgets"):
        bundle = verdict._repr_mimebundle_()
        assert bundle["text/plain"] == repr(verdict)
        assert "application/vnd.jupyter.widget-view+json" in bundle


def test_stub_is_not_written_yet(exercise):
    def stub(*args):
        """Docstring."""
        ...  # noqa: PIE790

    verdict = exercise(stub)
    assert verdict.passed is None
    assert "not written yet" in verdict.text


def test_mistakes_are_few_and_read_by_eye(exercise):
    """The commonest alone: one replacement, at most one line break, a sentence of its own."""
    known = exercise.mistakes
    assert 4 <= len(known) <= 12
    assert len({mistake.name for mistake in known}) == len(known)
    for mistake in known:
        assert re.search(r"[.?!)]$", mistake.says), f"{mistake.name}: not a whole sentence"
        assert mistake.answer or len(mistake.changes) == 1, mistake.name
        for old, new in mistake.changes:
            assert max(old.count("⏎"), new.lstrip("⏎ ").count("⏎")) <= 1, mistake.name


def test_solution_is_the_source_of_the_reference(exercise):
    assert re.search(rf"^(def|class) {exercise.name}\b", exercise.solution().text, re.MULTILINE)


def test_mistake_hears_its_sentence(exercise, mistake):
    verdict = exercise(mistake)
    assert verdict.passed is False, f"{mistake.name} passed"
    assert mistake.says in verdict.text
    assert "NameError" not in verdict.text  # else what it replaces has changed its names
    if exercise._outcome is not None:
        replay(exercise._outcome)  # it can be played, whatever went wrong


@pytest.mark.wide
def test_other_right_answers_pass(exercise, right):
    verdict = exercise(right)
    assert verdict.passed, verdict.text


@pytest.mark.wide
def test_wrong_answers_with_right_values_are_refused(exercise, wrong, says):
    verdict = exercise(wrong)
    assert verdict.passed is False, f"{wrong.__name__} passed"
    assert says in verdict.text
