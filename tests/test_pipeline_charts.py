"""Pictures and widgets of notebook 10: what is drawn is what a dry run, or a run, did."""

import pytest
from test_figures import check_picture

from ddpkit.lesson import pipeline_charts
from ddpkit.pipeline import schedules


def test_all_kinds_are_drawn():
    picture = pipeline_charts.draw(schedules.zero_bubble(4, 8))
    check_picture(picture)
    shown = [text.get_text() for text in picture.figure.legends[0].get_texts()]
    assert shown == ["forward", "backward: input part", "weight part", "idle"]


def test_a_run_is_drawn():
    spans = [[("0F0", 5.0, 5.5), ("0B0", 7.0, 8.0)], [("1F0", 5.5, 6.0), ("1B0", 6.0, 7.0)]]
    picture = pipeline_charts.draw_run(spans)
    assert picture.figure.axes[0].get_xlim() == (0, 3000)
    assert pipeline_charts.bubble_of_run(spans) == 1 - 3 / 6


def test_player_says_what_each_rank_does_and_holds():
    player = pipeline_charts.schedule_player(schedules.one_f_one_b(2, 2))
    caption, picture = player.look(3)
    assert caption.startswith("Tick 3. rank 0: idle, holds 2; rank 1: 1B0, holds 1.")
    assert len(picture.figure.axes[0].collections) == 4  # 0F0 0F1 1F0 1B0
    player = pipeline_charts.schedule_player(schedules.gpipe(1, 1), F=0.5, B=1)
    assert repr(player).endswith("1. 0B0, held: 1\n2. -, held: 0")  # the end is at 1.5


def test_calculator_says_what_is_held():
    pytest.importorskip("ipywidgets", reason="ipywidgets isn't installed")
    calculator = pipeline_charts.pipeline_calculator()
    for schedule, held in (("GPipe", "8, 8, 8, 8"), ("interleaved", "5.5, 4.5, 3.5, 2.5")):
        calculator.widgets["schedule"].value = schedule
        assert calculator.look()[0].endswith(f"Held at most, by rank: {held}.")


def test_held_by_rank():
    assert pipeline_charts.held_by_rank(schedules.one_f_one_b(4, 8)) == [4, 3, 2, 1]
    assert pipeline_charts.held_by_rank(schedules.interleaved(4, 8), 2) == [5.5, 4.5, 3.5, 2.5]
    assert pipeline_charts.held_by_rank(schedules.zero_bubble(4, 8)) == [4, 4, 4, 4]
