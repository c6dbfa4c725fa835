"""Calculators: what they say and show, moved by code as by a hand, live or not."""

import pytest
import torch

from ddpkit import ddp
from ddpkit.lesson import charts, figures
from ddpkit.lesson.calculator import bucket_calculator, bucket_plans, zero_calculator
from ddpkit.lesson.widgets import Calculator, Slider, StepThrough, Toggle
from ddpkit.tools import cost

CAPS = Slider("bucket cap", [1, 2, 4, 8], 4, "{} MiB".format)


def words(cap, kind, up):
    if cap == 8:
        raise ValueError("no <eight>")
    return f"{cap} {kind} {up}", figures.worlds(cap) if kind == "drawn" else None


def worlds(**values):
    controls = {"cap": CAPS, "kind": Slider("kind", ["drawn", "said"], "drawn"), "up": Toggle("up")}
    return Calculator(words, **controls, **values)


def gradients(count=12):
    """Of 4 KiB, 1 MiB and 256 KiB in turn, a millisecond apart."""
    sizes = [(4 << 10, 1 << 20, 1 << 18)[number % 3] for number in range(count)]
    ready_s = [1e-3 * (number + 1) for number in range(count)]
    return [(nbytes, torch.float32) for nbytes in sizes], ready_s


def test_controls_are_widgets():
    widget = worlds()
    assert "4 drawn False" in widget.caption.value
    cap, kind, up = (widget.widgets[name] for name in ("cap", "kind", "up"))
    assert [cap.options[at] for at in (0, 3)] == [("1 MiB", 1), ("8 MiB", 8)]
    assert (cap.value, kind.value, up.value) == (4, "drawn", False)
    assert (cap.continuous_update, cap.description) == (False, "bucket cap")
    assert widget.image.tooltip is None  # the browser's view of an image fails on a tooltip


def test_moving_a_control_changes_caption_and_picture():
    widget = worlds()
    before = widget.image.value
    assert bytes(before) == figures.worlds(4).svg
    widget.widgets["cap"].value = 2
    assert widget.value("cap") == 2
    assert bytes(widget.image.value) == figures.worlds(2).svg
    assert "2 drawn False" in widget.caption.value
    widget.set(cap=4, up=True)
    assert widget.image.value == before
    assert widget.widgets["up"].value is True
    assert "4 drawn True" in widget.caption.value


def test_without_a_picture():
    widget = worlds()
    widget.set(kind="said")
    assert widget.image.layout.display == "none"
    assert set(widget._repr_mimebundle_()) == {
        "text/plain",
        "application/vnd.jupyter.widget-view+json",
    }
    widget.set(kind="drawn")
    assert widget.image.layout.display is None


def test_bundle():
    widget = worlds()
    widget.set(cap=1)
    bundle = widget._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "image/png", "application/vnd.jupyter.widget-view+json"}
    assert bundle["text/plain"] == repr(widget) == "1 drawn False"
    assert bundle["image/png"] == figures.worlds(1).png
    assert widget.widgets["cap"].value == 1  # set before there was a widget
    assert repr(worlds(text="no numbers")) == "no numbers"


def test_errors_in_callbacks_are_shown():
    widget = worlds()
    assert bytes(widget.image.value)
    widget.set(cap=8)
    assert "ValueError: no &lt;eight&gt;" in widget.caption.value
    assert bytes(widget.image.value) == b""  # no picture of something else beside it
    widget.set(cap=1)
    assert "ValueError" not in widget.caption.value
    assert bytes(widget.image.value)


def test_errors_while_stepping_are_shown_on_their_page():
    def look(step):
        if step == 2:
            raise ValueError("no <two>")
        return str(step), figures.worlds(step)

    widget = StepThrough(look, "ranks", range(1, 4))
    captions = [page.children[0].value for page in widget.stack.children]
    assert ["no &lt;two&gt;" in caption for caption in captions] == [False, False, True, False]
    assert bytes(widget.stack.children[2].children[1].value) == b""


def test_errors_at_first_are_raised():
    with pytest.raises(ValueError, match="no <eight>"):
        Calculator(words, cap=Slider("cap", [8], 8), kind=Toggle("kind"), up=Toggle("up"))
    with pytest.raises(ValueError, match="expected 'cap' to be one of 1, 2, got 3"):
        Calculator(lambda cap: (cap, None), cap=Slider("cap", [1, 2], 3))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"cap": 3}, "expected 'bucket cap' to be one of 1, 2, 4, 8, got 3"),
        ({"up": 1}, "expected 'up' to be True or False, got 1"),
        ({"down": 1}, "no control is called 'down'; there are cap, kind, up"),
    ],
)
def test_values_that_controls_do_not_have(values, said):
    widget = worlds()
    with pytest.raises(ValueError, match=said):
        widget.set(kind="said", **values)
    assert widget.value("kind") == "drawn"  # nothing was moved
    with pytest.raises(ValueError, match="no control is called"):
        widget.value("down")


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
    assert repr(widget) == charts.describe_buckets(bucket_plans(sizes)[widget.value("cap_bytes")])
    widget.set(cap_bytes=8 * 2**20)
    exposed_ms = 1e3 * model.seconds("ring_all_reduce", 4 * (4 + 1024 + 256) << 10, 4)
    assert (
        f"bucket cap 8 MiB, latency 100 µs: 1 message, {exposed_ms:.1f} ms exposed"
        in widget.caption.value
    )
    picture = widget.image.value
    widget.set(cap_bytes=4096)
    assert "bucket cap 4 KiB, latency 100 µs: 12 messages, " in widget.caption.value
    assert widget.image.value != picture
    widget.set(latency_s=10e-3)
    assert "bucket cap 4 KiB, latency 10 ms: 12 messages, " in widget.caption.value


def test_latencies_of_the_bucket_calculator():
    """The model's own, and those that are larger."""
    sizes, ready_s = gradients()
    offered = {}
    for latency_s in (0.0, 50e-6, 3e-3, 20e-3):
        widget = bucket_calculator(sizes, ready_s, cost.CostModel(latency_s, 1e9), 2)
        assert widget.value("latency_s") == latency_s
        assert bytes(widget.image.value)
        offered[latency_s] = [label for label, _ in widget.widgets["latency_s"].options]
    assert offered == {
        0.0: ["0 ns", "1 ms", "3 ms", "10 ms"],
        50e-6: ["50 µs", "1 ms", "3 ms", "10 ms"],
        3e-3: ["3 ms", "10 ms"],
        20e-3: ["20 ms"],
    }


def test_all_positions_of_the_bucket_calculator_share_a_scale():
    sizes, ready_s = gradients()
    widget = bucket_calculator(sizes, ready_s, cost.CostModel(1e-4, 1e9), 2)
    scales = []
    for cap_bytes in bucket_plans(sizes):
        for latency_s in (1e-4, 10e-3):
            widget.set(cap_bytes=cap_bytes, latency_s=latency_s)
            scales.append(widget.look()[1].figure.axes[0].get_xlim()[1])
    assert scales == pytest.approx([scales[0]] * len(scales))


def test_zero_calculator():
    widget = zero_calculator()
    assert repr(widget) == (
        "7.5B on 64 ranks, stage 1: parameters 15 GB, gradients 15 GB, "
        "optimizer 1.41 GB: 31.4 GB on each, which fits "
        "on a GPU of 80 GB, activations not counted. Each sends 29.5 GB in a step."
    )
    before = widget.look()[1].svg
    widget.set(stage=3)
    assert "1.88 GB on each" in repr(widget)
    assert "Each sends 44.3 GB" in repr(widget)
    assert widget.look()[1].svg != before
    widget.set(stage=0, world_size=1)
    assert "120 GB on each, which doesn't fit" in repr(widget)
    assert "Each sends 0 B" in repr(widget)
    for model, whole in {
        "0.5B": "8 GB",
        "3B": "48 GB",
        "70B": "1.12 TB",
        "XXL, 219.8B": "3.52 TB",
    }.items():
        widget.set(model=model)
        assert f"{whole} on each" in repr(widget)
