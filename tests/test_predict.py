import pytest

from ddpkit.lesson.card import LOOKS
from ddpkit.lesson.predict import Predictions


@pytest.fixture
def predict():
    return Predictions()


def test_a_number_is_kept_and_shown_beside_the_answer(predict):
    pytest.importorskip("ipywidgets", reason="Jupyter isn't installed")
    hops = predict("Hops of a ring of 4 ranks?")
    assert repr(hops) == "Your prediction: Hops of a ring of 4 ranks?"
    field, kept = hops.box.children[2].children
    field.value = "many"
    assert kept.value == "That is no number."
    field.value = "8"
    assert (hops.guess, kept.value) == (8, "Kept: 8.")
    assert repr(hops.answer(6)) == "Hops of a ring of 4 ranks? 6. ≠ you: 8"
    assert LOOKS["surprise"][1] in hops.answer(6)._repr_html_()
    field.value = "6"
    assert kept.value.startswith("Too late for this run")
    assert repr(hops.answer(6)) == "Hops of a ring of 4 ranks? 6. ≠ you: 8"
    again = predict("Hops of a ring of 4 ranks?")
    again.enter("6")
    assert repr(again.answer(6)) == "Hops of a ring of 4 ranks? 6. ✓ you: 6"


def test_a_choice_is_one_of_those_offered(predict):
    pytest.importorskip("ipywidgets", reason="Jupyter isn't installed")
    which = predict("Which sends less?", ["ring", "server"])
    which.box.children[2].children[0].value = "server"
    assert repr(which.answer("ring")) == "Which sends less? ring. ≠ you: server"
    with pytest.raises(ValueError, match=r"expected one of \['ring', 'server'\], got 'both'"):
        which.answer("both")


def test_what_is_measured_may_be_near(predict):
    time = predict("Milliseconds?")
    time.enter("12")
    assert time.answer(10.0, within=0.25).endswith("10. ✓ you: 12")
    assert time.answer(20.0, within=0.25).endswith("20. ≠ you: 12")
    tokens = predict("Tokens?")
    tokens.enter("1.5e6")
    assert tokens.answer(12345.0).endswith("12,345. ≠ you: 1,500,000")
    assert tokens.answer(9999.7).endswith("10,000. ≠ you: 1,500,000")
    assert tokens.answer(1e20).endswith("1e+20. ≠ you: 1,500,000")


def test_score_counts_what_was_entered(predict):
    assert repr(predict.score()) == "0 predictions, none entered."
    first, second, _ = predict("First?"), predict("Second?"), predict("Third?")
    first.enter("1")
    second.enter("1")
    first.answer(1), second.answer(2)
    assert repr(predict.score()) == "1 of 2 predictions right, 1 not entered."
    page = predict.score()._repr_html_()
    assert (page.count("●"), page.count("○")) == (2, 1)
    assert LOOKS["surprise"][1] in page
    again = predict("First?")
    assert again.guess is None
    assert len(predict.made) == 3
