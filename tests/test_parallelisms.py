import pytest

from ddpkit.lesson import parallelisms


def test_lights_one_row():
    lit = [line for line in repr(parallelisms.where("layers")).splitlines() if line[0] == "→"]
    assert len(lit) == 1
    assert "pipeline" in lit[0]
    assert "→" not in repr(parallelisms.where())
    page = parallelisms.where("layers")._repr_html_()
    assert page.count(parallelisms.LIT) == 1
    assert parallelisms.LIT not in parallelisms.where()._repr_html_()


def test_fits_a_page_and_names_all():
    text = repr(parallelisms.where())
    assert max(map(len, text.splitlines())) <= 72
    for name, *_ in parallelisms.MAP.values():
        assert name in text


def test_refuses_what_nobody_cuts():
    with pytest.raises(ValueError, match="expected one of batch, states"):
        parallelisms.where("cake")
