"""Figures: what they compute, what they draw, and words that are the same in every run."""

import io
import math
from functools import cache
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from matplotlib.colors import to_hex, to_rgb, to_rgba_array
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from PIL import Image

from ddpkit import Link, collectives, launch
from ddpkit.lesson import charts, figures, page
from ddpkit.lesson.player import WIDTH
from ddpkit.runtime.errors import LaunchError

BYTES = 32  # of each message below


def broadcast():
    collectives.broadcast(torch.ones(8), src=0)


def tree_broadcast():
    collectives.tree_broadcast(torch.ones(8), src=0)


def all_reduce():
    collectives.all_reduce(torch.ones(8))


def all_gather():
    parts = [torch.empty(8) for _ in range(dist.get_world_size())]
    collectives.all_gather(parts, torch.ones(8))


def prepare_and_work():
    dist.broadcast(torch.zeros(1), src=0)
    dist.broadcast(torch.zeros(1), src=1)
    dist.all_reduce(torch.zeros(1))


@cache
def recorded(fn, world_size=4):
    return launch(fn, world_size=world_size)


def has_colour(picture, colour: str) -> bool:
    """Whether anything in it has that colour, on white."""
    found = set()
    for part in picture.figure.findobj():
        if hasattr(part, "get_text") and not part.get_text():
            continue
        for which in ("facecolor", "edgecolor", "color", "markerfacecolor"):
            for *rgb, alpha in to_rgba_array(getattr(part, f"get_{which}", list)()):
                found.add(to_hex([alpha * value + 1 - alpha for value in rgb]).upper())
    return colour in found


def spans(axes, collection: int) -> list[tuple[float, float]]:
    """From where to where each bar of a `broken_barh` goes."""
    boxes = (path.get_extents() for path in axes.collections[collection].get_paths())
    return [(round(box.x0, 9), round(box.x1, 9)) for box in boxes]


def check_picture(picture, *colours):
    """It can be drawn, is small enough for the page, its lines are dark, it has these colours."""
    picture.figure.draw_without_rendering()
    assert picture.size[0] <= WIDTH
    assert picture.size[1] <= page.TALLEST
    for line in picture.figure.findobj(Line2D):
        assert page.dark(line.get_color()) == line.get_color()
    for colour in colours:
        assert has_colour(picture, colour) or has_colour(picture, page.dark(colour))


def test_a_picture_is_a_card_that_shrinks_and_speaks():
    """White, with a border, twice as large as it is shown, in the colours that were drawn."""
    picture = figures.worlds(2)
    bundle, metadata = picture._repr_mimebundle_()
    assert bundle["text/plain"] == metadata["image/png"]["alt"] == repr(picture)
    assert f'alt="{picture.text}"' in bundle["text/html"]
    assert "max-width: min(100%, 960px)" in bundle["text/html"]
    assert "image/svg+xml" not in bundle  # JupyterLab shows it at its own size, in any window
    image = Image.open(io.BytesIO(bundle["image/png"])).convert("RGB")
    assert image.size == (2 * picture.size[0], 2 * picture.size[1])
    assert max(image.getpixel((0, 0))) < 120
    assert min(image.getpixel((6, 6))) > 240
    pixels = [pixel for _, pixel in image.getcolors(1 << 24)]
    for colour in page.RANK_COLOURS[:2]:
        wanted = [round(255 * value) for value in to_rgb(colour)]
        assert min(max(abs(a - b) for a, b in zip(wanted, p, strict=True)) for p in pixels) < 12


def test_a_picture_is_laid_out_once_for_all_formats(monkeypatch):
    laid_out, lay_out = [], ConstrainedLayoutEngine.execute

    def count(self, figure):
        laid_out.append(figure)
        lay_out(self, figure)

    monkeypatch.setattr(ConstrainedLayoutEngine, "execute", count)
    charts.zero_grid(4)._repr_mimebundle_()
    assert len(laid_out) == 1


def test_lines_of_all_colours_are_seen():
    for colour in page.RANK_COLOURS:
        red, green, blue = (int(page.dark(colour)[at : at + 2], 16) / 255 for at in (1, 3, 5))
        light = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2
        assert 1.05 / (light + 0.05) > 2.95  # W3C asks for 3
    assert page.dark(page.BLUE) == page.BLUE


def test_the_same_figure_is_the_same_svg():
    svgs = {figures.worlds(world_size).svg for world_size in (2, 2, 3)}
    assert len(svgs) == 2
    assert all(svg.startswith(b"<?xml") for svg in svgs)


def test_hops():
    check_picture(figures.hops(recorded(tree_broadcast)), *page.RANK_COLOURS[:4])


def test_traffic():
    naive, tree = recorded(all_reduce), recorded(tree_broadcast)
    one = figures.traffic(naive)
    assert repr(one) == "Bytes by rank. total sent 192 B, busiest: rank 0, 192 B in and out."
    check_picture(one, *page.RANK_COLOURS[:4])
    two = figures.traffic({"all-reduce": naive, "tree": tree})
    heights = [[bar.get_height() for bar in axes.patches] for axes in two.figure.axes[:2]]
    assert heights == [[96, 32, 32, 32] * 2, [64, 32, 0, 0, 0, 32, 32, 32]]
    check_picture(figures.traffic({str(n): recorded(all_reduce, 4) for n in range(6)}))
    silent = SimpleNamespace(wire=[[], []])
    assert "no messages, so no busiest rank" in repr(figures.traffic(silent))


def test_timeline():
    picture = figures.timeline(recorded(broadcast, 3))
    check_picture(picture, *page.RANK_COLOURS[:3], page.FAINT)
    run = launch(all_reduce, world_size=2, link=Link.preset("1 Gbit Ethernet"))
    both = figures.timeline({"one": run, "two": run})
    titles = [axes.get_title(loc="left") for axes in both.figure.axes]
    assert titles == [f"{name}, emulated link: 1 Gbit Ethernet" for name in ("one", "two")]
    check_picture(both)


def test_a_silent_run_is_told_in_words():
    silent, sent = SimpleNamespace(wire=[[], []]), SimpleNamespace(wire=[[call(0, 1, None)], []])
    picture = figures.timeline(silent)
    assert repr(picture) == "No rank made a call: there is nothing to draw."
    check_picture(picture)
    after = repr(figures.timeline(sent, after="send"))
    assert after == "No rank made a call after its last send: there is nothing to draw."
    unwaited = SimpleNamespace(wire=[[call(0, None, None)], []])
    assert figures.Part(unwaited, "send").begun == [0, math.inf]
    check_picture(figures.timeline(unwaited))
    both = repr(figures.timeline({"one": silent, "two": sent}))
    assert both == "Timeline. one: every rank: no calls. two: rank 0: 1 send; rank 1: no calls."


def test_a_timeline_can_begin_after_the_preparations():
    """Their calls are left out; the time before the first call shown counts as computing."""
    run = recorded(prepare_and_work, 2)
    assert repr(figures.timeline(run, after="broadcast")) == "Timeline. every rank: 1 all_reduce."
    part = figures.Part(run, "broadcast")
    assert part.begun == [records[1].done for records in run.wire]
    assert figures.Part(run, None).begun == [records[0].issued for records in run.wire]


def call(issued, done, waited):
    times = {"issued": issued, "begun": issued, "done": done, "waited": waited}
    return SimpleNamespace(op="send", stream="", **times)


class Timed(list):
    """What the ranks returned, with what they sent."""

    def __init__(self, times):
        super().__init__(times)
        self.wire = [[call(0, 2e-3, waited=1e-3)]]


def test_a_timeline_shows_where_backward_begins():
    picture = figures.timeline(Timed([1.5e-3]), backward=True)
    assert spans(picture.figure.axes[0], 1) == [(0, 1.5)]
    assert "light: forward, darker: backward" in repr(picture)
    check_picture(picture, page.MIXED, page.FAINT)


def test_a_short_call_has_its_initials():
    times = {"stream": "", "waited": None}
    calls = []
    for op, begin, end in (("all_gather", 0.0, 1.0), ("reduce_scatter", 1.0, 1.05)):
        calls.append(SimpleNamespace(op=op, issued=begin, begun=begin, done=end, **times))
    figure = figures.timeline(SimpleNamespace(wire=[calls])).figure
    assert {"all_gather", "rs"} <= {text.get_text() for text in figure.axes[0].texts}
    legends = [text.get_text() for text in figure.legends[0].texts]
    assert "its calls on the wire (rs: reduce_scatter), in its colour" in legends


def test_lanes_are_drawn_to_scale():
    """Two calls at once, in which the rank computes, waits and computes again."""
    calls = [call(0, 2e-3, waited=1e-3), call(0, 4e-3, waited=3e-3)]
    axes = figures.timeline(SimpleNamespace(wire=[calls])).figure.axes[0]
    assert spans(axes, 0) == [(0, 4)]  # computes, below
    assert spans(axes, 1) == []  # nothing is known of forward
    assert spans(axes, 2) == [(1, 2), (3, 4)]  # waits
    assert spans(axes, 4) == [(0, 4), (0, 2)]  # on the wire; what is done first lies above
    assert axes.get_xlim() == (0, 4)


def test_a_timeline_begins_at_the_first_call_it_shows():
    """The broadcast before it ends after it, so its end can't be where the time axis begins."""
    early = call(1, 10, waited=9)
    early.op = "broadcast"
    later = call(2, 3, waited=2)
    run = SimpleNamespace(wire=[[early, later]])
    assert figures.Part(run, "broadcast").begun == [2]
    assert figures.timeline(run, after="broadcast").figure.axes[0].get_xlim() == (0, 1e3)
    unknown = LaunchError("its records aren't known").run
    assert repr(figures.timeline(unknown)) == "No rank made a call: there is nothing to draw."


V = [[1, 2], [10, 20], [100, 200]]
SUM = [111, 222]
GATHER = ([[1], [10], [100]], [[1, 10, 100], None, None])


@pytest.mark.parametrize("rows", [(V, [SUM] * 3), GATHER, ([None] * 3, [None] * 3)], ids=str)
def test_before_after(rows):
    picture = figures.before_after(zip(*rows, strict=True), title="it")
    check_picture(picture, *page.RANK_COLOURS[:3])
    fills = [to_hex(box.get_facecolor()).upper() for box in picture.figure.artists]
    assert fills.count(page.MIXED) == (6 + 1 if rows[1][0] == SUM else 0)  # cells, and the key


def test_owners():
    before, after = [[1], [10], [100]], [[1, 10, 100]] * 3
    assert figures.find_owners(before, after) == [[0, 1, 2]] * 3
    assert figures.find_owners(V, [SUM] * 3) == [[None, None]] * 3
    # Its own, else nobody can tell whose.
    assert figures.find_owners([[5], [5]], [[5, 5], [5]]) == [[0, None], [1]]
    for other, mixed in ((6, False), (5, True)):
        pairs = [([5], [5, other]), ([other], [other])]
        assert has_colour(figures.before_after(pairs, "it"), page.MIXED) is mixed


def test_before_after_of_long_floats_fits_the_page():
    torch.manual_seed(0)
    values = [torch.randn(16) / 10**rank for rank in (0, 3, 7)]
    picture = figures.before_after(((value, sum(values)) for value in values), "it")
    assert picture.size[0] <= WIDTH


def test_worlds():
    one = "1 rank is 1 process with its own memory; it computes on the CPU."
    assert repr(figures.worlds(1)) == one
    check_picture(figures.worlds(9), *page.RANK_COLOURS)
