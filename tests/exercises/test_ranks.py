"""The exercises of notebook 00."""

from ddpkit import exercises as check

from .every import *  # noqa: F403


def test_four_on_two_ranks_is_no_rank():
    assert "rank 0 has (3, 1), expected (1, 1)" in check.neighbours(lambda: (3, 1)).text


def test_a_failure_whose_cause_is_named_offers_no_hint_and_another_does():
    """As notebook 00 promises."""
    check.neighbours._failures = 0
    assert "A hint" not in check.neighbours(lambda: 7).text
    assert "A hint" not in check.neighbours(lambda: 7).text  # its sentence is "Return two ranks"

    def raises():
        raise NotImplementedError

    assert "A hint, in case it is this: The right neighbour" in check.neighbours(raises).text
