"""What holds for every exercise. A topic's file imports all of it, and gets its own exercises."""

import re


def test_reference_passes(exercise):
    verdict = exercise(exercise.reference)
    assert verdict.passed, verdict.text
    assert verdict.text.startswith("✓")


def test_stub_is_not_written_yet(exercise):
    def stub(*args):
        """Docstring."""
        ...  # noqa: PIE790

    verdict = exercise(stub)
    assert verdict.passed is None
    assert "not written yet" in verdict.text


def test_at_least_four_mistakes_are_known(exercise):
    assert len({mistake.name for mistake in exercise.mistakes}) == len(exercise.mistakes) >= 4


def test_solution_is_the_source_of_the_reference(exercise):
    assert re.search(rf"^(def|class) {exercise.name}\b", exercise.solution().text, re.MULTILINE)


def test_mistake_hears_its_sentence(exercise, mistake):
    verdict = exercise(mistake)
    assert verdict.passed is False, f"{mistake.name} passed"
    assert mistake.says in verdict.text
    assert "NameError" not in verdict.text  # else what it replaces has changed its names


def test_other_right_answers_pass(exercise, right):
    verdict = exercise(right)
    assert verdict.passed, verdict.text
