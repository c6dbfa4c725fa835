"""Widgets and calculators: what they say and show, moved as by a hand, live or not."""

from functools import cache

import pytest
import torch

from ddpkit import cost, ddp
from ddpkit.lesson import charts, figures
from ddpkit.lesson.calculator import bucket_calculator, bucket_plans, zero_calculator
from ddpkit.lesson.widgets import Calculator, Slider, StepThrough, inline
from ddpkit.memory import model_states

pytest.importorskip("ipywidgets", reason="Jupyter isn't installed")

picture_of = cache(figures.worlds)
CAPS = Slider("bucket cap", [1, 2, 4, 8], 4, "{} MiB".format)


def words(cap, kind):
    if cap == 8:
        raise ValueError("no <eight>")
    return f"{cap} {kind}", picture_of(cap) if kind == "drawn" else None


def worlds(**values):
    return Calculator(words, cap=CAPS, kind=Slider("kind", ["drawn", "said"], "drawn"), **values)


def live(widget):
    """(caption, image), its widgets made."""
    return widget.box.children[2].children


def move(widget, **values):
    for name, value in values.items():
        widget.widgets[name].value = value


def test_moving_a_slider_changes_caption_and_picture():
    widget = worlds()
    caption, image = live(widget)
    cap, kind, _ = widget.box.children[1].children
    assert [cap.options[at] for at in (0, 3)] == [("1 MiB", 1), ("8 MiB", 8)]
    assert (cap.value, kind.value, cap.continuous_update) == (4, "drawn", False)
    assert "4 drawn" in caption.value
    assert image.value == inline(picture_of(4))
    move(widget, cap=2)
    assert "2 drawn" in caption.value
    assert image.value == inline(picture_of(2))
    move(widget, kind="said")
    assert image.value == ""
    widget.reset()
    assert (cap.value, kind.value, image.value) == (4, "drawn", inline(picture_of(4)))


def test_errors_are_shown():
    """Above the picture that was there before."""
    widget = worlds()
    caption, image = live(widget)
    move(widget, cap=8)
    assert "ValueError: no &lt;eight&gt;" in caption.value
    assert image.value == inline(picture_of(4))
    move(widget, cap=1)
    assert "ValueError" not in caption.value
    assert image.value == inline(picture_of(1))
    with pytest.raises(ValueError, match="no <eight>"):  # at first there is somebody to raise to
        Calculator(words, cap=Slider("cap", [8], 8), kind=Slider("kind", [""], ""))

    def look(step):
        if step == 2:
            raise ValueError("no <two>")
        return str(step), picture_of(step)

    stack = StepThrough(look, "ranks", range(1, 4)).box.children[1]
    captions = [page.children[0].value for page in stack.children]
    assert ["no &lt;two&gt;" in caption for caption in captions] == [False, False, True, False]


def test_bundle():
    bundle, metadata = worlds()._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "image/png", "application/vnd.jupyter.widget-view+json"}
    assert bundle["text/plain"] == repr(worlds()) == "4 drawn"
    assert bundle["image/png"] == picture_of(4).png
    assert metadata == picture_of(4).metadata
    assert repr(worlds(text="no numbers")) == "no numbers"


def gradients(count=12):
    """Of 4 KiB, 1 MiB and 256 KiB in turn, a millisecond apart."""
    sizes = [(4 << 10, 1 << 20, 1 << 18)[number % 3] for number in range(count)]
    ready_s = [1e-3 * (number + 1) for number in range(count)]
    return [(nbytes, torch.float32) for nbytes in sizes], ready_s


def test_bucket_plans():
    sizes, _ = gradients()
    plans = bucket_plans(sizes)
    for cap, plan in plans.items():
        assert plan == ddp.plan_buckets(sizes, cap)
        assert plan != ddp.plan_buckets(sizes, 2 * cap) or len(plan) == 1
    lengths = [len(plan) for plan in plans.values()]
    assert (lengths[0], lengths[-1]) == (12, 1)
    assert lengths == sorted(set(lengths), reverse=True)
    two = [(100, torch.float32), (100, torch.bfloat16)]
    assert list(bucket_plans(two).values()) == [[[0], [1]]]  # of two dtypes: never one bucket


def test_bucket_calculator():
    sizes, ready_s = gradients()
    model = cost.CostModel(1e-4, 1e9)
    widget = bucket_calculator(sizes, ready_s, model, 4)
    caption, image = live(widget)
    plan = bucket_plans(sizes)[widget.widgets["cap_bytes"].value]
    assert repr(widget) == charts.describe_buckets(plan)
    move(widget, cap_bytes=8 * 2**20)
    exposed_ms = 1e3 * model.seconds("ring_all_reduce", 4 * (4 + 1024 + 256) << 10, 4)
    said = f"bucket cap 8 MiB, latency 100 µs: 1 message, {exposed_ms:.1f} ms exposed"
    assert said in caption.value
    pictures, scales = {image.value}, {}
    for cap_bytes, latency_s, many in (
        (4096, 1e-4, 12),
        (2**21, 1e-4, 3),
        (4096, 10e-3, 12),
        (2**21, 10e-3, 3),
    ):
        move(widget, cap_bytes=cap_bytes, latency_s=latency_s)
        assert f": {many} messages, " in caption.value
        pictures.add(image.value)
        xlim = widget.look()[1].figure.axes[0].get_xlim()
        assert scales.setdefault(latency_s, xlim) == xlim  # all caps of a latency share one
    assert (len(pictures), len(set(scales.values()))) == (5, 2)


@pytest.mark.parametrize(
    ("latency_s", "offered"), [(0.0, ["0 ns", "1 ms", "3 ms", "10 ms"]), (3e-3, ["3 ms", "10 ms"])]
)
def test_latencies_of_the_bucket_calculator(latency_s, offered):
    """The model's own, and those that are larger."""
    widget = bucket_calculator(*gradients(), cost.CostModel(latency_s, 1e9), 2)
    slider = widget.widgets["latency_s"]
    assert (slider.value, [label for label, _ in slider.options]) == (latency_s, offered)


def test_zero_calculator():
    widget = zero_calculator()
    picture = widget.look()[1]
    assert repr(picture).splitlines()[:3] == [
        "Model states on each of 64 ranks.",
        "stage 0: 120 GB (parameters 15 GB, gradients 15 GB, optimizer 90 GB).",
        "stage 1: 31.4 GB (parameters 15 GB, gradients 15 GB, optimizer 1.41 GB).",
    ]
    kept = [model_states(7_500_000_000, stage, 64) for stage in range(4)]
    bars = [bar.get_width() for bar in picture.figure.axes[0].patches[:12]]
    assert bars == [nbytes for kind in zip(*kept, strict=True) for nbytes in kind]
    move(widget, stage=3)
    assert "1.88 GB on each" in widget.look()[0]
    assert "Each sends 44.3 GB" in widget.look()[0]
    move(widget, stage=0, world_size=1)
    assert "120 GB on each, which doesn't fit" in widget.look()[0]
    assert "Each sends 0 B" in widget.look()[0]
    wholes = {"0.5B": "8 GB", "3B": "48 GB", "70B": "1.12 TB", "XXL, 219.8B": "3.52 TB"}
    for model, whole in wholes.items():
        move(widget, model=model)
        assert f"{whole} on each" in widget.look()[0]
