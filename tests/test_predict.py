import pytest

from ddpkit.lesson.predict import Predictions


@pytest.fixture
def predict():
    return Predictions()


def test_a_number_is_kept_and_shown_beside_the_answer(predict):
    pytest.importorskip("ipywidgets", reason="Jupyter isn't installed")
    hops = predict("Hops of a ring of 4 ranks?")
    assert repr(hops) == "Your prediction: Hops of a ring of 4 ranks?"
    field = hops.box.children[1]
    field.value = "8"
    assert hops.guess == 8
    assert repr(hops.answer(6)) == "Hops of a ring of 4 ranks? 6. ✗ You predicted 8."
    field.value = "6"
    assert repr(hops.answer(6)) == "Hops of a ring of 4 ranks? 6. ✓ You predicted 6."
    field.value = "many"
    assert repr(hops.answer(6)) == "Hops of a ring of 4 ranks? 6"


def test_a_choice_is_one_of_those_offered(predict):
    pytest.importorskip("ipywidgets", reason="Jupyter isn't installed")
    which = predict("Which sends less?", ["ring", "server"])
    which.box.children[1].value = "server"
    assert repr(which.answer("ring")) == "Which sends less? ring. ✗ You predicted server."
    with pytest.raises(ValueError, match=r"expected one of \['ring', 'server'\], got 'both'"):
        which.answer("both")


def test_what_is_measured_may_be_near(predict):
    time = predict("Milliseconds?")
    time.enter("12")
    assert time.answer(10.0, within=0.25).endswith("10. ✓ You predicted 12.")
    assert time.answer(20.0, within=0.25).endswith("20. ✗ You predicted 12.")


def test_score_counts_what_was_entered(predict):
    assert repr(predict.score()) == "0 predictions, none entered."
    first, second, _ = predict("First?"), predict("Second?"), predict("Third?")
    first.enter("1")
    second.enter("1")
    first.answer(1), second.answer(2)
    assert repr(predict.score()) == "1 of 2 predictions right, 1 not entered."
    again = predict("First?")
    assert again.guess is None
    assert len(predict.made) == 3
