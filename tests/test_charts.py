"""Charts of measurements: they draw what was measured. What they say, stored outputs hold."""

import pytest
from test_cost import timed
from test_figures import check_picture, has_colour, spans

from ddpkit import cost
from ddpkit.bench.results import Result, Results
from ddpkit.lesson import charts, page

VARIANTS = {  # seconds for each process, and the ceiling
    "gloo": (4e-3, "loopback"),
    "ring": (2e-3, "loopback"),
    "shared memory": (1e-3, "memcpy"),
    "loopback": (1.5e-3, ""),
    "memcpy": (0.9e-3, ""),
}
MEASURED = Results(
    Result("all_reduce", name, world_size, nbytes, (seconds * world_size,), ceiling)
    for nbytes in (10**6, 25 * 2**20)
    for world_size in (2, 4)
    for name, (seconds, ceiling) in VARIANTS.items()
)
MODEL = cost.CostModel(50e-6, 1e9)


def bars(picture) -> list[tuple[float, float]]:
    """(left end, length) of each horizontal bar, as they were drawn."""
    return [(bar.get_x(), bar.get_width()) for bar in picture.figure.axes[0].patches]


def test_grouped_bars():
    """Those of a backend stand side by side."""
    two = Results(
        each for each in MEASURED if each.nbytes == 10**6 and each.variant in ("gloo", "ring")
    )
    side_by_side = sorted(two.competing, key=lambda each: each.variant)
    for draw, heights in (
        (charts.median_time, [each.median_s * 1e3 for each in side_by_side]),
        (charts.bandwidth, [each.busbw / 1e9 for each in side_by_side]),
    ):
        check_picture(draw(MEASURED), page.BLUE, page.ORANGE, page.GREEN)
        assert not has_colour(draw(MEASURED), page.PINK)
        drawn = draw(two).figure.axes[0].patches
        assert [bar.get_height() for bar in drawn] == pytest.approx(heights)
    assert repr(charts.median_time(MEASURED)).startswith("Median time of all_reduce. By")


def test_backends_keep_their_colours():
    assert charts.colours_of(["ring", "whole ring", "gloo"]) == {
        "ring": page.ORANGE,
        "whole ring": page.GREEN,
        "gloo": page.BLUE,
    }
    assert len(set(charts.colours_of([f"number {n}" for n in range(8)]).values())) == 8


def test_long_legends_take_several_lines():
    figure, _ = page.chart("title")
    names = [f"a name of thirty letters, no. {number}" for number in range(4)]
    page.legend(figure, [page.patch(name, page.BLUE) for name in names])
    (made,) = figure.legends
    assert made._ncols < 4
    assert made.get_window_extent().width < figure.bbox.width


STEPS = {"compute alone": [0.1, 0.12, 0.11], "naive": [0.3, 0.2, 0.4], "overlapped": [0.1]}


def test_bars_are_as_long_as_the_medians():
    """Naive takes 300 ms, the median, and computing 110 ms."""
    picture = charts.variants(STEPS, "compute alone", "2 ms, 0.25 GB/s")
    assert "emulated" not in repr(charts.variants(STEPS, "compute alone"))
    check_picture(picture)
    drawn = bars(picture)
    assert [left for left, _ in drawn] == pytest.approx([0, 0, 0, 110, 300 - 190, 100])
    assert [wide for _, wide in drawn] == pytest.approx([110, 110, 100, 0, 190, 0])
    whiskers = [text.xy[0] for text in picture.figure.axes[0].texts]  # to the third quartiles
    assert whiskers == pytest.approx([115, 350, 100])
    assert len(picture.figure.legends[0].texts) == 3


def test_a_single_time_has_no_whiskers():
    picture = charts.variants({"compute alone": [0.1], "naive": [0.3]}, "compute alone")
    assert len(picture.figure.legends[0].texts) == 2
    assert not picture.figure.axes[0].containers[2:]


def test_buckets_are_drawn_to_scale():
    """An all-reduce of 4 ms from 2 ms on, one of 2 ms after it; backward ends at 5 ms."""
    ready_s, sizes, wire = [1e-3, 2e-3, 5e-3], [2 * 10**6] * 3, cost.CostModel(0.0, 1e9)
    picture = charts.bucket_timeline([[0, 1], [2]], ready_s, sizes, wire, 2, 0.0)
    check_picture(picture, page.ORANGE, page.BLUE)
    lanes = [spans(picture.figure.axes[0], at) for at in (0, 2, 4, 5)]  # the others are marks
    assert lanes == [[(0, 5)], [(2, 6)], [(6, 8)], [(5, 8)]]
    assert picture.figure.axes[0].get_xlim() == pytest.approx((0, 8))
    said = [text.get_text() for text in picture.figure.axes[0].texts]
    assert said == ["3.81 MiB", "1.91 MiB", "exposed: 3 ms"]
    alone = charts.bucket_timeline([[0], [1]], [1e-3, 2e-3], [4, 4], MODEL, 1, 0.0)
    assert alone.figure.axes[0].texts[-1].get_text() == "nothing exposed"


def test_bucket_moments():
    moments = {"take": ([1.0, 2.5], ["view", None]), "backward": ([1.0, 2.5], [[3.0], "view"])}
    picture = charts.bucket_moments({"a": 1, "b": 1}, moments)
    check_picture(picture)
    said = [text.get_text() for text in picture.figure.axes[0].texts]
    assert said == ["1", "2.5", "view", "None", "1", "2.5", "3", "view"]


def test_fitted():
    measured, held_out = (timed(MODEL, sizes=sizes) for sizes in ((10**4, 10**6), (10**5,)))
    picture = charts.fitted(cost.fit(measured), measured, held_out, "A ring, emulated")
    check_picture(picture, page.BLUE)
    lines = picture.figure.axes[0].lines
    hollow = [len(line.get_xdata()) for line in lines if line.get_markerfacecolor() == "white"]
    assert hollow == [1, 0]  # the last is in the legend


def test_crossing():
    """Doubling sends 2n in 2 hops, the ring 3/2 n in 6: they cross at 8 α × bandwidth."""
    algorithms = ("doubling_all_reduce", "ring_all_reduce", "all_reduce")
    assert charts.takeovers(MODEL, algorithms, 4) == [
        (pytest.approx(8 * 50e-6 * 1e9), *algorithms[:2])
    ]
    measured = timed(MODEL, sizes=(10**5, 10**6))
    measured += timed(MODEL, "doubling_all_reduce", sizes=(10**5,))
    picture = charts.crossing(MODEL, algorithms, 4, measured, "On a link")
    check_picture(picture)
    lines = picture.figure.axes[0].lines
    drawn = [len(line.get_xdata()) for line in lines if line.get_linestyle() == "None"]
    assert drawn == [1, 2, 0]  # of each algorithm


def test_where_slower_ones_cross_is_no_takeover():
    """The whole ring falls behind at 2 α × bandwidth, where doubling leads both."""
    algorithms = ("doubling_all_reduce", "whole_ring_all_reduce", "ring_all_reduce")
    assert cost.crossover(*algorithms[1:], 4, MODEL) == pytest.approx(2 * 50e-6 * 1e9)
    assert [nbytes for nbytes, _, _ in charts.takeovers(MODEL, algorithms, 4)] == pytest.approx(
        [8 * 50e-6 * 1e9]
    )


def test_crossing_where_nothing_crosses():
    picture = charts.crossing(MODEL, ("all_reduce", "ring_all_reduce"), 4, [], "On a link")
    assert repr(picture).endswith("the fastest, from small sizes to large: ring_all_reduce.")


def test_shards():
    """14 numbers and 2 of padding on 4 ranks: parameters to scale, below a colour for each rank."""
    picture = charts.shards({"weight": 6, "bias": 2, "weight 2": 4, "bias 2": 2}, 4)
    check_picture(picture, *page.RANK_COLOURS[:4], page.MIXED)
    parameters = [(0, 6), (6, 2), (8, 4), (12, 2), (14, 2)]
    assert bars(picture) == [*parameters, (0, 4), (4, 4), (8, 4), (12, 4)]


def test_zero_grid():
    picture = charts.zero_grid(4)
    widths = [round(bar.get_width(), 2) for bar in picture.figure.axes[0].patches]
    assert widths.count(0.25) == 4 * (1 + 2 + 3)  # of the others' parts there is the outline
    assert widths.count(1) == 4 * (12 + 12 - 1 - 2 - 3)


def test_trips():
    picture = charts.trips({"three passes": (3.0, 1.0), "one": (1.0, 1.0)})
    check_picture(picture, page.BLUE)
    assert bars(picture) == [(0, 3), (0, 1), (3, 1), (1, 1)]
