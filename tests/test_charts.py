"""Charts of measurements: what they say, that they are pictures, and that their words hold no measured number."""

import io
import itertools
from dataclasses import replace

import pytest
from PIL import Image

from ddpkit.bench.ddp import Step
from ddpkit.bench.results import Result, Results
from ddpkit.lesson import charts, figures
from ddpkit.tools import cost
from ddpkit.tools.memory import model_states

SECONDS = {"gloo": 4e-3, "ring": 2e-3, "shared memory": 1e-3, "loopback": 1.5e-3, "memcpy": 0.9e-3, "gloo again": 4e-3}
CEILINGS = {"gloo": "loopback", "ring": "loopback", "shared memory": "memcpy", "gloo again": "loopback"}
MEASURED = Results(
    Result("all_reduce", name, world_size, nbytes, (seconds * world_size,), CEILINGS.get(name, ""))
    for nbytes in (10**6, 25 * 2**20)
    for world_size in (2, 4)
    for name, seconds in SECONDS.items()
)
EMULATED = Results(replace(each, emulated="10 Gbit Ethernet") for each in MEASURED if each.variant == "ring")
MODEL = cost.Model(50e-6, 1e9)


def image(picture) -> Image.Image:
    assert picture.png.startswith(b"\x89PNG\r\n\x1a\n")
    assert picture._repr_mimebundle_()["text/plain"] == repr(picture)
    return Image.open(io.BytesIO(picture.png)).convert("RGB")


def has_colour(picture, colour: str) -> bool:
    wanted = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    colours = [pixel for _, pixel in image(picture).getcolors(1 << 24)]
    return any(all(abs(a - b) < 12 for a, b in zip(pixel, wanted, strict=True)) for pixel in colours)


@pytest.mark.parametrize(("draw", "what"), [(charts.average_time, "Average time"), (charts.bandwidth, "Bus bandwidth")])
def test_grouped_bars(draw, what):
    picture = draw(MEASURED)
    assert repr(picture) == (
        f"{what} of all_reduce. By size: 1 MB, 25 MiB; by backend: gloo; ring; shared memory; by number of processes: "
        "2, 4. Black marks: the same bytes just moved, by loopback or memcpy."
    )
    assert image(picture).width <= figures.WIDEST
    assert image(picture).getpixel((0, 0)) == (255, 255, 255)
    for colour in (charts.BLUE, charts.ORANGE, charts.GREEN):
        assert has_colour(picture, colour)
    assert not has_colour(picture, charts.PINK)


@pytest.mark.parametrize("draw", [charts.average_time, charts.bandwidth])
def test_words_are_the_same_in_every_run(draw):
    slower = Results(replace(each, seconds=(3.21 * each.median_s,)) for each in MEASURED)
    assert repr(draw(slower)) == repr(draw(MEASURED))
    assert draw(slower).png != draw(MEASURED).png


def test_heights_are_the_times_and_bandwidths():
    heights = {}

    def remember(results, value, what, logarithmic):
        heights[what] = [value(each, each.median_s) for each in results.competing]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(charts, "_grouped_bars", remember)
        charts.average_time(MEASURED)
        charts.bandwidth(MEASURED)
    shown = MEASURED.competing
    assert heights["Average time (ms)"] == [each.median_s * 1e3 for each in shown]
    assert heights["Bus bandwidth (GB/s)"] == pytest.approx([each.busbw / 1e9 for each in shown])


def test_an_emulated_link_is_named():
    assert repr(charts.average_time(EMULATED)).startswith("Average time of all_reduce, emulated: 10 Gbit Ethernet. By")
    assert "emulated" not in repr(charts.average_time(MEASURED))
    both = repr(charts.bandwidth(Results(MEASURED + EMULATED)))
    assert "by backend: gloo; ring; shared memory; ring (emulated: 10 Gbit Ethernet); by number" in both
    assert both.startswith("Bus bandwidth of all_reduce. ")


def test_backends_keep_their_colours():
    assert charts._colours(["ring", "whole ring", "gloo"]) == {
        "ring": charts.ORANGE,
        "whole ring": charts.GREEN,
        "gloo": charts.BLUE,
    }
    assert len(set(charts._colours([f"number {n}" for n in range(8)]).values())) == 8


def test_long_legends_take_several_lines():
    canvas = figures.Canvas(figures.WIDEST, charts.HEIGHT)
    handles = charts._handles([(f"a name of thirty letters, no. {n}", "#000000", "o") for n in range(4)])
    assert charts._head(canvas, "title", handles) - charts._head(canvas, "title", handles[:2]) == charts.LINE


def training_steps(naive_s=0.3, emulated="50 µs", predicted_s=0.2):
    took = {"torch": 0.2, "compute alone": 0.1, "naive": naive_s, "torch again": 0.21}
    return [Step("GPT", name, 2, 4, (s,), "", emulated, predicted_s=predicted_s) for name, s in took.items()]


def test_steps():
    picture = charts.steps(training_steps(), "compute alone")
    assert repr(picture) == (
        "A training step of GPT, emulated link. From top to bottom: torch; compute alone; naive. "
        "Blue: computing; orange: what communication adds. Black marks: predicted."
    )
    assert image(picture).width <= figures.WIDEST
    assert has_colour(picture, charts.ORANGE)
    slower = charts.steps(training_steps(0.4), "compute alone")
    assert repr(slower) == repr(picture)
    assert slower.png != picture.png
    assert charts.steps(training_steps(predicted_s=0.25), "compute alone").png != picture.png


def test_steps_on_the_machines_own_wire_predict_nothing():
    said = repr(charts.steps(training_steps(emulated="", predicted_s=None), "compute alone"))
    assert said.startswith("A training step of GPT. From top")
    assert "predicted" not in said


def columns(picture, row: int, colour: str) -> list[int]:
    """From left to right, where a row of pixels has this colour."""
    wanted = tuple(int(colour[at : at + 2], 16) for at in (1, 3, 5))
    pixels = image(picture)
    return [
        x
        for x in range(pixels.width)
        if all(abs(a - b) < 12 for a, b in zip(pixels.getpixel((x, row)), wanted, strict=True))
    ]


STEPS = {"compute alone": [0.1, 0.12, 0.11], "naive": [0.3, 0.2, 0.4], "overlapped": [0.1]}


def test_variants():
    picture = charts.variants(STEPS, "compute alone", "2 ms, 0.25 GB/s")
    assert repr(picture) == (
        "Time of a training step, emulated link: 2 ms, 0.25 GB/s. From top to bottom: compute alone; naive; "
        "overlapped. Blue: as long as computing alone takes, a dashed line through all; orange: what communication "
        "adds."
    )
    assert image(picture).width <= figures.WIDEST
    slower = charts.variants(STEPS | {"naive": [0.6, 0.5, 0.7]}, "compute alone", "2 ms, 0.25 GB/s")
    assert (repr(slower), slower.png == picture.png) == (repr(picture), False)
    assert "emulated" not in repr(charts.variants(STEPS, "compute alone"))


def test_bars_are_as_long_as_the_medians():
    """Naive takes 0.3 s, the median, and computing 0.11 s."""
    picture = charts.variants(STEPS, "compute alone")
    blue, orange = (
        max(len(columns(picture, row, colour)) for row in range(110, image(picture).height))  # below the legend
        for colour in (charts.BLUE, charts.ORANGE)
    )
    assert orange / blue == pytest.approx((0.3 - 0.11) / 0.11, rel=0.03)  # a few pixels of edges and whiskers


def test_the_middle_half_of_the_rounds():
    assert charts._middle_half([5, 1, 2, 4, 3]) == (2, 4)
    assert charts._middle_half([0.3]) == (0.3, 0.3)


def test_variants_need_times():
    with pytest.raises(ValueError, match=r"expected times of 'alone', got only compute alone, naive, overlapped: time"):
        charts.variants(STEPS, "alone")
    with pytest.raises(ValueError, match="none for flat: measure"):
        charts.variants(STEPS | {"flat": []}, "compute alone")


def drawn(plan, ready_s, nbytes=10**6, model=MODEL, **options):
    return charts.bucket_timeline(plan, ready_s, [nbytes] * len(ready_s), model, 2, **options)


def test_bucket_timeline():
    picture = drawn([[0, 1], [2]], [1e-3, 2e-3, 4e-3])
    assert repr(picture) == (
        "A training step with 2 buckets, predicted. Above, backward, with a mark where each of 3 gradients becomes "
        "ready; below, an all-reduce for each bucket, one after the other. Hatched: exposed, after the end of backward."
    )
    assert image(picture).width <= figures.WIDEST
    assert image(picture).getpixel((0, 0)) == (255, 255, 255)
    later = drawn([[0, 1], [2]], [1e-3, 3e-3, 4e-3])
    assert (repr(later), later.png == picture.png) == (repr(picture), False)
    assert drawn([[0, 1], [2]], [1e-3, 2e-3, 4e-3], longest_s=1.0).png != picture.png


def test_buckets_are_drawn_to_scale():
    """An all-reduce of 4 ms from 2 ms on, one of 2 ms after it; backward ends at 5 ms."""
    picture = drawn([[0, 1], [2]], [1e-3, 2e-3, 5e-3], 2 * 10**6, cost.Model(0.0, 1e9))
    row = 116 + 90 + 5  # near the upper edge of the lane
    orange, blue = columns(picture, row, charts.ORANGE), columns(picture, row, charts.BLUE)
    ends = [140 + 860 * ms / 8 for ms in (2, 6, 8)]
    assert [orange[0], orange[-1], blue[-1]] == [pytest.approx(end, abs=4) for end in ends]
    assert orange[-1] < blue[0]


def test_exposed_time_is_drawn_to_scale():
    """A gradient ready at 1 ms and an all-reduce of 3 ms: exposed is three quarters of the width."""
    picture = drawn([[0]], [1e-3], 3 * 10**6, cost.Model(0.0, 1e9))
    red = columns(picture, 289, figures.WRONG)
    assert (red[0], red[-1]) == (pytest.approx(140 + 860 / 4, abs=2), pytest.approx(140 + 860, abs=2))
    half = columns(drawn([[0]], [1e-3], 3 * 10**6, cost.Model(0.0, 1e9), longest_s=8e-3), 289, figures.WRONG)
    assert len(half) == pytest.approx(len(red) / 2, abs=3)


def test_nothing_exposed():
    alone = charts.bucket_timeline([[0], [1]], [1e-3, 2e-3], [4, 4], MODEL, 1)
    assert columns(alone, 289, figures.WRONG) == []


def test_timelines_from_one_bucket_to_a_hundred():
    ready_s = [1e-3 * number for number in range(100)]
    pictures = [drawn([list(range(100))], ready_s), drawn([[number] for number in range(100)], ready_s)]
    assert ["1 bucket," in repr(pictures[0]), "100 buckets," in repr(pictures[1])] == [True, True]
    assert image(pictures[0]).size == image(pictures[1]).size  # a slider over them doesn't jump
    assert drawn([[0]], [0.0], model=cost.Model(0.0, 1e30)).png  # no time at all


def points(sizes, world_sizes=(2, 4), wrong=1.0):
    return [
        cost.Measurement("ring_all_reduce", ranks, nbytes, wrong * MODEL.seconds("ring_all_reduce", nbytes, ranks))
        for ranks in world_sizes
        for nbytes in sizes
    ]


def test_fitted():
    measured, held_out = points((10**4, 10**6, 10**8)), points((10**5,), wrong=1.1)
    picture = charts.fitted(cost.fit(measured), measured, held_out, "A ring, emulated")
    assert repr(picture) == (
        "A ring, emulated. Time by size for ring_all_reduce, 2 ranks; ring_all_reduce, 4 ranks: "
        "6 points that the model was fitted to, 2 held out, and the model's lines."
    )
    assert has_colour(picture, figures.RANK_COLOURS[1])
    swapped = charts.fitted(cost.fit(measured), held_out, measured, "A ring, emulated")
    assert swapped.png != picture.png
    assert repr(charts.fitted(cost.fit(measured), iter(measured), iter(held_out))).startswith("Measured and predicted")


def test_crossing():
    """With 4 ranks doubling sends 2n in 2 hops, the ring 3/2 n in 6: they cross at 8 times latency × bandwidth."""
    algorithms = ("doubling_all_reduce", "ring_all_reduce", "all_reduce")
    assert charts.takeovers(MODEL, algorithms, 4) == [(pytest.approx(8 * 50e-6 * 1e9), *algorithms[:2])]
    bare = charts.crossing(MODEL, algorithms, 4)
    assert repr(bare) == (
        "Predicted time with 4 ranks. By size, for doubling_all_reduce, ring_all_reduce, all_reduce; "
        "the fastest, from small sizes to large: doubling_all_reduce, then ring_all_reduce."
    )
    assert image(bare).width <= figures.WIDEST
    assert charts.crossing(MODEL, algorithms, 4, points((10**5,))).png != bare.png
    assert charts.crossing(MODEL, algorithms, 4, points((10**5,), (2,))).png == bare.png  # of other worlds


def test_where_slower_ones_cross_is_no_takeover():
    """The whole ring, 3n in 3 hops, falls behind at 2 times latency × bandwidth, where doubling leads both."""
    algorithms = ("doubling_all_reduce", "whole_ring_all_reduce", "ring_all_reduce")
    assert cost.crossover(*algorithms[1:], 4, MODEL) == pytest.approx(2 * 50e-6 * 1e9)
    assert [nbytes for nbytes, _, _ in charts.takeovers(MODEL, algorithms, 4)] == pytest.approx([8 * 50e-6 * 1e9])


def test_crossing_where_nothing_crosses():
    assert charts.takeovers(MODEL, ("all_reduce", "ring_all_reduce"), 4) == []
    picture = charts.crossing(MODEL, ("all_reduce", "ring_all_reduce"), 4, title="On an emulated link")
    assert repr(picture).startswith("On an emulated link. ")
    assert repr(picture).endswith("the fastest, from small sizes to large: ring_all_reduce.")


@pytest.mark.parametrize(
    ("seconds", "shown"), [(1e-5, "10 µs"), (0.001, "1 ms"), (0.1 + 0.2, "300 ms"), (2, "2 s"), (1e-8, "0.01 µs")]
)
def test_times_have_units(seconds, shown):
    assert charts._seconds(seconds) == shown


def test_scales():
    assert charts._decades((0.03, 250.0)) == (0.01, 1000.0)
    sizes = charts._between([100.0, 1e6, 1e4])
    assert (sizes[0], sizes[-1]) == pytest.approx((100.0, 1e6))
    assert len({round(after / before, 9) for before, after in itertools.pairwise(sizes)}) == 1


def test_shards():
    """14 numbers and 2 of padding on 4 ranks: a row of parameters to scale, and below it a colour for each rank."""
    picture = charts.shards({"weight": 6, "bias": 2, "weight 2": 4, "bias 2": 2}, 4)
    assert repr(picture) == (
        "A flat buffer of 16 numbers: weight from 0 to 6, bias from 6 to 8, weight 2 from 8 to 12, bias 2 from 12 to "
        "14; padding: 2. Below, 4 shards of 4, one for each rank."
    )
    owners = [columns(picture, 66 + 65, colour) for colour in figures.RANK_COLOURS[:4]]
    for rank, owned in enumerate(owners):
        assert (owned[0], owned[-1]) == pytest.approx((150 + 870 * rank / 4, 150 + 870 * (rank + 1) / 4), abs=5)
    grey = columns(picture, 66 + 5, figures.MIXED)
    assert grey[-1] == pytest.approx(150 + 870 * 14 / 16, abs=4)


def test_zero_stages():
    picture = charts.zero_stages(7_500_000_000, 64, 1)
    assert repr(picture) == (
        "Model states on each of 64 ranks: stage 0 120 GB, stage 1 31.4 GB, stage 2 16.6 GB, stage 3 1.88 GB."
    )
    assert image(picture).width <= figures.WIDEST
    for stage in range(4):
        bars = [columns(picture, 116 + 58 * stage + 12, ink) for ink in charts.STATE_COLOURS.values()]
        lengths = [max(bar, default=0) - min(bar, default=0) for bar in bars]
        kept = model_states(7_500_000_000, stage, 64)
        assert lengths == pytest.approx([790 * nbytes / 120e9 for nbytes in kept], abs=4)
    others = [charts.zero_stages(7_500_000_000, 64, 2), charts.zero_stages(7_500_000_000, 64, 1, capacity_bytes=10**10)]
    assert all(repr(other) == repr(picture) and other.png != picture.png for other in others)
    assert "1 rank: stage 0 800 B" in repr(charts.zero_stages(50, 1, 3))


def test_trips():
    ways = {"three passes": (3.0, 1.0), "one": (1.0, 1.0)}
    picture = charts.trips(ways)
    assert repr(picture) == "Numbers moved: three passes reads 3N, writes N; one reads N, writes N."
    assert image(picture).width <= figures.WIDEST
    unit = (figures.WIDEST - 210 - 110) / 4
    for y, (read, written) in ((76 + 20, ways["three passes"]), (76 + 58 + 20, ways["one"])):
        line = [image(picture).getpixel((x, y)) for x in range(figures.WIDEST)]
        blue = sum(pixel[2] > pixel[0] + 100 for pixel in line)
        assert abs(blue - read * unit) < 5
        assert line[int(210 + (read + written) * unit)] == (0, 0, 0)  # the edge
    assert charts.trips(ways | {"one": (2.0, 1.0)}).png != picture.png
