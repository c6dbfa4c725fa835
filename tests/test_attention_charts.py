"""Pictures of notebooks 08 and 09: all is drawn; bytes are said, times are not."""

import math

from test_figures import check_picture, has_colour

from ddpkit.lesson import page
from ddpkit.lesson.attention_charts import (
    bytes_by_length,
    memory_levels,
    merge_tree,
    roofline,
    time_by_length,
)

PEAKS = {"plain": {1024: 4_000_000, 2048: 16_000_000}, "tiled": {1024: 1_000_000, 2048: 2_000_000}}
SECONDS = {"plain": {1024: 0.01, 2048: 0.04}, "tiled": {1024: 0.004, 2048: 0.016}}
CEILING = {1024: 0.002, 2048: 0.008}


def test_bytes_are_drawn():
    picture = bytes_by_length(PEAKS, "Most bytes")
    check_picture(picture, *page.RANK_COLOURS[:2])
    assert not has_colour(picture, page.RANK_COLOURS[2])


def test_times_are_drawn():
    picture = time_by_length(SECONDS, CEILING, "Forward")
    ys = [list(line.get_ydata()) for line in picture.figure.axes[0].lines]
    assert ys == [[0.01, 0.04], [0.004, 0.016], [0.002, 0.008]]


def test_a_tree_says_the_pairs_of_each_round():
    tree = merge_tree([0.0, math.log(3), -math.inf, 0.0, 0.0])
    first, second, third, last = repr(tree).splitlines()
    assert first == "at first: (0, 1) (1.1, 1) (−∞, 0) (0, 1) (0, 1)"
    assert second == "after 1: (1.1, 1.33) (0, 1) (0, 1)"
    assert (third, last) == ("after 2: (1.1, 1.67) (0, 1)", "after 3: (1.1, 2)")
    check_picture(tree, page.ORANGE, page.SKY)
    assert repr(merge_tree([1, 2])) == repr(merge_tree([1.0, 2.0]))


def test_memory_levels_are_drawn():
    levels = {"on the chip": (20e6, 19e12, "a tile"), "beside it": (40e9, 1.5e12, "q, k, v")}
    check_picture(memory_levels(levels), page.ORANGE, page.SKY)


def test_a_program_lies_on_its_machines_roof():
    roofs = {f"peak 1e{n}": (10.0**n, 1e10) for n in range(9, 16)}  # more than there are markers
    picture = roofline(roofs, [("program", "peak 1e12", 10)])
    assert list(picture.figure.axes[0].lines[7].get_ydata()) == [1e11]
    check_picture(picture, *page.RANK_COLOURS[:7])
