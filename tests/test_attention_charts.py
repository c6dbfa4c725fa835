"""Charts of attention by length: every curve is drawn; bytes are said, times are not."""

from test_figures import check_picture, has_colour

from ddpkit.lesson import page
from ddpkit.lesson.attention_charts import bytes_by_length, time_by_length

PEAKS = {"plain": {1024: 4_000_000, 2048: 16_000_000}, "tiled": {1024: 1_000_000, 2048: 2_000_000}}
SECONDS = {"plain": {1024: 0.01, 2048: 0.04}, "tiled": {1024: 0.004, 2048: 0.016}}
CEILING = {1024: 0.002, 2048: 0.008}


def test_bytes_are_said_and_drawn():
    picture = bytes_by_length(PEAKS)
    assert repr(picture) == (
        "Most bytes alive at once.\n"
        "plain: 1,024 tokens 4 MB, 2,048 tokens 16 MB\n"
        "tiled: 1,024 tokens 1 MB, 2,048 tokens 2 MB"
    )
    check_picture(picture, *page.RANK_COLOURS[:2])
    assert not has_colour(picture.png, page.RANK_COLOURS[2])


def test_times_are_drawn_and_not_said():
    picture = time_by_length(SECONDS, CEILING, "Forward")
    assert repr(picture) == (
        "Forward: plain; tiled. By tokens: 1,024, 2,048. "
        "Dashed: the matrix products alone, at full speed."
    )
    ys = [list(line.get_ydata()) for line in picture.figure.axes[0].lines]
    assert ys == [[0.01, 0.04], [0.004, 0.016], [0.002, 0.008]]
