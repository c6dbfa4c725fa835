"""Figures: what they compute, that they are pictures, and that their words are the same in every run."""

import io
import itertools
import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from PIL import Image

from ddpkit import Link, collectives, launch
from ddpkit.lesson import figures

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


def torch_all_reduce():
    dist.all_reduce(torch.ones(8))


def near(pixel, colour: str) -> bool:
    wanted = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return all(abs(a - b) < 12 for a, b in zip(pixel, wanted, strict=True))


def has_colour(png: bytes, colour: str) -> bool:
    image = Image.open(io.BytesIO(png)).convert("RGB")
    return any(near(pixel, colour) for _, pixel in image.getcolors(1 << 24))


def check_picture(picture, *colours):
    bundle = picture._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "image/png"}
    assert bundle["text/plain"] == repr(picture)
    assert bundle["image/png"].startswith(b"\x89PNG\r\n\x1a\n")
    assert len(bundle["image/png"]) > 1000
    assert Image.open(io.BytesIO(picture.png)).convert("RGB").getpixel((0, 0)) == (255, 255, 255)
    for colour in colours:
        assert has_colour(picture.png, colour)


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def world_size(request):
    return request.param


@pytest.fixture(scope="module")
def runs(world_size):
    return {fn: launch(fn, world_size=world_size) for fn in (broadcast, tree_broadcast, all_reduce, all_gather)}


def test_sent_and_received_bytes(runs, world_size):
    others = world_size - 1
    assert figures.sent_bytes(runs[broadcast]) == [others * BYTES] + [0] * others
    assert figures.received_bytes(runs[broadcast]) == [0] + [BYTES] * others
    assert figures.sent_bytes(runs[all_reduce]) == [others * BYTES] + [BYTES] * others
    assert figures.received_bytes(runs[all_reduce]) == [others * BYTES] + [BYTES] * others
    assert figures.sent_bytes(runs[all_gather]) == [others * BYTES] * world_size


def test_hops(runs, world_size):
    others = world_size - 1
    assert figures.hops_of(runs[broadcast]) == [[(0, rank, BYTES)] for rank in range(1, world_size)]
    assert len(figures.hops_of(runs[tree_broadcast])) == math.ceil(math.log2(world_size))
    assert len(figures.hops_of(runs[all_reduce])) == 2 * others
    at_once = figures.hops_of(runs[all_gather])
    assert len(at_once) == min(1, others)
    assert sum(map(len, at_once)) == world_size * others


def test_hops_of_a_tree():
    run = launch(tree_broadcast, world_size=4)
    assert figures.hops_of(run) == [[(0, 1, BYTES)], [(0, 2, BYTES), (1, 3, BYTES)]]
    picture = figures.hops(run)
    assert repr(picture) == "3 messages in 2 hops. hop 1: 0 to 1; hop 2: 0 to 2, 1 to 3."
    check_picture(picture, *figures.RANK_COLOURS[:4])


def test_traffic():
    naive, tree = launch(all_reduce, world_size=4), launch(tree_broadcast, world_size=4)
    one = figures.traffic(naive)
    assert repr(one) == "Bytes by rank. total sent 192 B, busiest: rank 0, 192 B in and out."
    check_picture(one, *figures.RANK_COLOURS[:4])
    two = figures.traffic({"all-reduce": naive, "tree": tree})
    assert repr(two) == (
        "Bytes by rank. all-reduce: total sent 192 B, busiest: rank 0, 192 B in and out. "
        "tree: total sent 96 B, busiest: ranks 0 and 1, 64 B in and out."
    )
    check_picture(two)


def test_traffic_without_messages():
    run = launch(torch_all_reduce, world_size=2)
    assert figures.sent_bytes(run) == [0, 0]
    assert "no messages" in repr(figures.traffic(run))


def test_timeline_says_no_times():
    run = launch(broadcast, world_size=3)
    picture = figures.timeline(run)
    assert repr(picture) == "Timeline. rank 0: 2 sends; ranks 1 and 2: 1 recv."
    check_picture(picture, *figures.RANK_COLOURS[:3], figures.FAINT)


def test_timeline_names_the_emulated_link():
    link = Link.preset("1 Gbit Ethernet")
    run = launch(torch_all_reduce, world_size=2, link=link)
    assert figures._heading("", run) == "emulated link: 1 Gbit Ethernet"
    picture = figures.timeline({"one": run, "two": run})
    assert repr(picture) == "Timeline. one: every rank: 1 all_reduce. two: every rank: 1 all_reduce."
    check_picture(picture)


def test_a_rank_that_comes_too_late_to_wait_does_not_wait():
    assert figures.merged([(3, 4), (0, 2), (1, 2.5)]) == [(0, 2.5), (3, 4)]
    assert figures.merged([]) == []


def call(issued, done, channel="world", waited=None):
    return SimpleNamespace(op="send", issued=issued, done=done, channel=channel, waited=waited)


@pytest.mark.parametrize(
    ("calls", "spans"),
    [
        ([call(0, 1), call(2, 3)], [(0, 1), (2, 3)]),
        ([call(0, 4), call(1, 6), call(2, 9), call(10, 11)], [(0, 4), (4, 6), (6, 9), (10, 11)]),
        ([call(0, 3, "to 1"), call(1, 2, "to 2"), call(1, 4, "to 1")], [(1, 2), (0, 3), (3, 4)]),
        ([call(0, 10), call(3, 5), call(4, 12)], [(3, 5), (0, 10), (10, 12)]),  # the second overtakes the first
        ([call(0, 2, waited=1), call(1, None, waited=7)], [(0, 2), (2, 7)]),
    ],
)
def test_calls_of_one_channel_are_under_way_one_after_the_other(calls, spans):
    assert [span[:2] for span in figures.under_way(calls)] == spans


def wire_line(picture, rank):
    """What a timeline without headings shows of a rank's wire."""
    top = 56 + 76 * rank + 31
    return Image.open(io.BytesIO(picture.png)).convert("RGB").crop((110, top, 1010, top + 29))


@pytest.mark.parametrize("channels", [("world",) * 3, ("0 to 1", "0 to 2", "0 to 3")])
def test_each_call_has_a_box_of_its_own(channels):
    """Three are under way from the start, and one after another they are done."""
    calls = [call(0, done, channel) for done, channel in zip((1, 2, 4), channels, strict=True)]
    line = wire_line(figures.timeline(SimpleNamespace(wire=[calls])), 0)
    below_text = [near(line.getpixel((x, 27)), figures.colour(0)) for x in range(line.width)]
    boxes = [len(list(pixels)) for in_colour, pixels in itertools.groupby(below_text) if in_colour]
    assert boxes == pytest.approx([225, 225, 450], abs=4)  # a pixel for each edge, and one where it is blurred


def test_ranks_from_8_on_look_different():
    picture = figures.timeline(SimpleNamespace(wire=[[call(0, 1)] for _ in range(9)]))
    assert wire_line(picture, 0).tobytes() != wire_line(picture, 8).tobytes()


V = [[1, 2], [10, 20], [100, 200]]
SUM = [111, 222]
NINE = {
    "broadcast": ([V[0], None, None], [V[0]] * 3),
    "reduce": (V, [SUM, None, None]),
    "all_reduce": (V, [SUM] * 3),
    "gather": ([[1], [10], [100]], [[1, 10, 100], None, None]),
    "all_gather": ([[1], [10], [100]], [[1, 10, 100]] * 3),
    "scatter": ([[1, 2, 3], None, None], [[1], [2], [3]]),
    "reduce_scatter": (V, [[111], [222], None]),
    "all_to_all": ([[1, 2, 3], [10, 20, 30], [100, 200, 300]], [[1, 10, 100], [2, 20, 200], [3, 30, 300]]),
    "barrier": ([None] * 3, [None] * 3),
}


@pytest.mark.parametrize("name", NINE)
def test_before_after(name):
    picture = figures.before_after(zip(*NINE[name], strict=True), title=name)
    check_picture(picture, *figures.RANK_COLOURS[:3])
    assert repr(picture).startswith(f"{name}: before, ")
    if "reduce" in name:
        assert has_colour(picture.png, figures.MIXED)


def test_before_after_says_it_in_words():
    assert repr(figures.before_after(zip(*NINE["gather"], strict=True))) == (
        "before, rank 0 has [1], rank 1 has [10], rank 2 has [100]; "
        "after, rank 0 has [1, 10, 100], ranks 1 and 2 have nothing."
    )
    assert repr(figures.before_after([([1.5], torch.tensor([1.5])), (None, torch.tensor([1.5]))], "broadcast")) == (
        "broadcast: before, rank 0 has [1.5], rank 1 has nothing; after, every rank has [1.5]."
    )


def test_owners():
    before, after = NINE["all_gather"]
    assert figures.find_owners(before, after) == [[0, 1, 2]] * 3
    assert figures.find_owners(V, [SUM] * 3) == [[None, None]] * 3
    assert figures.find_owners([[5], [5]], [[5, 5], [5]]) == [[0, None], [1]]  # its own, else nobody can tell whose
    pairs = [([5], [5, 5]), ([5], [5])]
    assert figures.before_after(pairs, owners=[[0, 1], [1]]).png != figures.before_after(pairs).png


def test_before_after_of_long_floats_fits_the_page():
    torch.manual_seed(0)
    values = [torch.randn(16) / 10**rank for rank in range(8)]
    picture = figures.before_after((value, sum(values)) for value in values)
    assert Image.open(io.BytesIO(picture.png)).width <= figures.WIDEST


def test_before_after_of_a_run():
    run = launch(lambda: ([dist.get_rank()], [1]), world_size=2)
    assert repr(figures.before_after(run)) == "before, rank 0 has [0], rank 1 has [1]; after, every rank has [1]."


def test_worlds():
    assert repr(figures.worlds(1)) == "1 rank is 1 process with its own memory; it computes on the CPU."
    assert repr(figures.worlds(4)) == "4 ranks are 4 processes, each with its own memory; all compute on the CPU."
    assert repr(figures.worlds(3, gpus=4)).endswith("rank 0 on GPU 0, rank 1 on GPU 1, rank 2 on GPU 2; 1 GPU free.")
    assert repr(figures.worlds(4, gpus=2)).endswith("ranks 0 and 2 on GPU 0, ranks 1 and 3 on GPU 1.")
    for world_size in (1, 8, 12):
        check_picture(figures.worlds(world_size), *figures.RANK_COLOURS[: min(world_size, 7)])


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1.0, "1"),
        (-0.0, "0"),
        (11111111.0, "11111111"),
        (0.1234, "0.123"),
        (-0.09861, "-0.099"),
        (0.00012345, "1.2e-4"),
        (1e20, "1e+20"),
        (math.inf, "inf"),
        (math.nan, "nan"),
        (True, "True"),
        (None, ""),
    ],
)
def test_numbers_in_cells(value, shown):
    assert figures.number(value) == shown


def test_words():
    assert figures.numbers([1.0, 2.5]) == "[1, 2.5]"
    assert figures.numbers(range(20)).endswith("14, 15, …]")
    assert figures.name_ranks([0, 1, 2, 3]) == "ranks 0 to 3"
    assert figures.name_ranks([0, 1], 2) == "every rank"
    assert figures.size(999) == "999 B"
    assert figures.size(1.5e6) == "1.5 MB"


def test_no_pyplot():
    code = (
        "import sys; from ddpkit.lesson import figures, player; "
        "assert not {'matplotlib', 'ipywidgets'} & set(sys.modules); figures.worlds(2); "
        "print('matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


def test_a_timeline_can_begin_after_the_preparations():
    """Their calls are left out, and the time before the first call that is shown counts as computing."""

    def prepare_and_work():
        dist.broadcast(torch.zeros(1), src=0)
        dist.broadcast(torch.zeros(1), src=1)
        dist.all_reduce(torch.zeros(1))

    run = launch(prepare_and_work, world_size=2)
    assert figures.timeline(run).text == "Timeline. every rank: 2 broadcasts, 1 all_reduce."
    assert figures.timeline(run, after="broadcast").text == "Timeline. every rank: 1 all_reduce."
    part = figures._part(run, "broadcast")
    assert part.begun == [records[1].done for records in run.wire]
    assert figures._part(run, None).begun == [records[0].issued for records in run.wire]
