"""Charts of bytes and the memory calculator: what is drawn, and said, is what was counted."""

import pytest
import torch
from test_checkpointing import Through
from test_figures import check_picture
from torch import nn

from ddpkit import memory
from ddpkit.checkpointing import checkpoint, selective_checkpoint
from ddpkit.lesson import charts, memory_charts, page
from ddpkit.models import GPT, mean_loss, torch_attention

# Timelines


def a_timeline(**by_kind):
    entries = len(next(iter(by_kind.values())))
    return memory.Timeline(
        {kind: by_kind.get(kind, [0] * entries) for kind in memory.KINDS},
        [""] + ["an operation"] * (entries - 1),
    )


def two_timelines():
    one = a_timeline(parameters=[10**6] * 4, activations=[0, 2 * 10**6, 3 * 10**6, 0])
    one.marks = [(1, "forward"), (2, "backward")]
    return {"one": one, "two": a_timeline(parameters=[10**6] * 4, buckets=[10**6] * 4)}


def test_timelines():
    picture = memory_charts.timelines(two_timelines())
    check_picture(picture)
    labels = [text.get_text() for text in picture.figure.legends[0].get_texts()]
    assert labels == ["parameters", "buckets", "activations", "peak"]  # no kind that is nowhere
    assert len({axes.get_ylim() for axes in picture.figure.axes}) == 1


def test_areas_are_the_bytes():
    """1 MB of parameters; above it 2 and 4 MB of activations for one entry each."""
    each = a_timeline(parameters=[10**6] * 4, activations=[0, 2 * 10**6, 4 * 10**6, 0])
    axes = memory_charts.timelines({"it": each}).figure.axes[0]
    tops = [area.get_paths()[0].get_extents().y1 for area in axes.collections]
    assert tops == [10**6, 5 * 10**6]
    assert axes.lines[0].get_xydata().tolist() == [[2, 5 * 10**6]]


def test_what_comes_and_goes_has_no_edges():
    """However thin: drawn with edges, it would be black."""
    each = a_timeline(parameters=[10**6] * 200, other=[10**6, 0] * 100)
    kept, other = memory_charts.timelines({"it": each}).figure.axes[0].collections
    assert (kept.get_linewidth()[0] > 0, other.get_linewidth()[0]) == (True, 0)


def test_marks_stand_one_after_the_other():
    each = a_timeline(parameters=[10**6] * 80)
    each.marks = [(1, "forward"), (40, "backward"), (78, "sync"), (79, "step")]
    axes = memory_charts.timelines({"it": each}).figure.axes[0]
    said = [(text.get_text(), text.get_position()[0]) for text in axes.texts]
    assert said == [("forward", 1), ("backward", 40), ("sync", 78), ("step", 83)]


# A block and a heap


def test_a_stamp_for_each_thing_that_is_kept():
    terms = memory.block_activations(2, 128, 64, 4)
    picture = memory_charts.stamped_block(terms)
    check_picture(picture, page.ORANGE)
    written = [text.get_text() for text in picture.figure.texts]
    assert [each for each in written if each in {term.formula for term in terms}] == [
        term.formula for term in terms
    ]


def test_heaps():
    heap = {"all there": "AAbb", "after": "..bb"}
    check_picture(memory_charts.heaps(heap), page.SKY, page.ORANGE)


# Growth


def terms(length):
    return memory.block_activations(1, length, 3584, 28)


def test_attention_weights():
    for attention, found in (("materialised", 5 * 2 * 48**2 * 4), ("flash", 4 * 2 * 48 * 4)):
        block = memory.block_activations(2, 48, 64, 4, attention=attention)
        assert memory_charts.total(memory_charts.attention_weights(block)) == found


def test_areas_are_the_shares():
    """Where the formula says that attention weights are half."""
    turn = 34 * 3584 // (5 * 28)
    picture = memory_charts.growth(terms, [turn, turn + 1])
    check_picture(picture)
    areas = picture.figure.axes[0].collections
    ends = [area.get_paths()[0].get_extents() for area in areas]
    assert [end.y1 - end.y0 for end in ends] == pytest.approx([50, 50], abs=0.1)


# Bars and the calculator

ROWS = {
    "kept": {"parameters": 10**9, "gradients": 10**8, "activations": 3 * 10**9},
    "again": {"parameters": 10**9, "gradients": 0, "activations": 10**9},
}


def test_bars():
    picture = charts.byte_bars(ROWS, "A step")
    check_picture(picture)
    drawn = [(bar.get_x(), bar.get_width()) for bar in picture.figure.axes[0].patches]
    assert drawn[::2] == [(0, 10**9), (10**9, 10**8), (11 * 10**8, 3 * 10**9)]
    assert drawn[1::2] == [(0, 10**9), (10**9, 0), (10**9, 10**9)]


SHAPE = {"width": 64, "heads": 4, "layers": 5}
BATCH = {"batch": 2, "length": 96}


def a_gpt(attention, dropout, way=None):
    module = torch_attention
    if attention == "materialised":
        module = memory.MaterialisedAttention(memory.ByteDropout(0.1) if dropout else nn.Identity())
    gpt = GPT(memory_charts.VOCABULARY, 96, 64, 4, 5, 0.0, module)
    for each in [gpt, *gpt.blocks]:
        each.dropout = memory.ByteDropout(0.1 * dropout) if dropout else nn.Identity()
    if way:
        gpt.blocks = nn.ModuleList(Through(way, block) for block in gpt.blocks)
    return gpt


def predicted(attention, dropout):
    return memory_charts.training_bytes(
        **SHAPE, **BATCH, precision="fp32", attention=attention, dropout=dropout
    )


def test_parameters_of_a_gpt():
    trained = [
        parameter.numel()
        for parameter in a_gpt("flash", True).parameters()
        if parameter.requires_grad
    ]
    assert memory_charts.gpt_parameters(64, 5) == sum(trained)
    kept = predicted("flash", True)["everything kept"]
    assert {kind: kept[kind] for kind in ("parameters", "gradients", "optimizer")} == (
        memory.model_states(sum(trained), precision="fp32")._asdict()
    )


@pytest.mark.parametrize(("attention", "dropout"), [("flash", True), ("materialised", False)])
def test_activations_of_a_gpt(attention, dropout):
    """All but tokens, targets and the loss's weight, 8, 8 and 4 bytes: those aren't counted."""
    tokens = torch.ones(2, 96, dtype=torch.int64)
    gpt = a_gpt(attention, dropout)
    measured = sum(
        saved.nbytes for saved in memory.measure_saved(lambda: mean_loss(gpt(tokens), tokens))
    )
    assert measured == pytest.approx(
        predicted(attention, dropout)["everything kept"]["activations"], rel=1e-3
    )


@pytest.mark.parametrize(
    ("attention", "name", "way"),
    [("materialised", "selective", selective_checkpoint), ("flash", "every block", checkpoint)],
)
def test_peaks_of_a_checkpointed_gpt(attention, name, way):
    tokens = torch.ones(2, 96, dtype=torch.int64)
    gpt = a_gpt(attention, True, way)
    with memory.watch(gpt) as timeline:
        mean_loss(gpt(tokens), tokens).backward()
    peak = max(timeline.by_kind["activations"])
    assert peak == pytest.approx(predicted(attention, True)[name]["activations"], rel=0.02)


def test_memory_calculator():
    pytest.importorskip("ipywidgets", reason="Jupyter isn't installed")
    widget = memory_charts.memory_calculator()
    for values, said in (
        ({"length": 8192}, "fits: none of them."),
        ({"length": 4096, "attention": "flash", "dropout": False}, "every block."),
        ({"width": 1600, "head_width": 64}, "fit: everything kept, selective, every block."),
        ({"width": 8192, "layers": 80}, "fits: none of them."),
    ):
        for name, value in values.items():
            widget.widgets[name].value = value
        assert widget.look()[0].endswith(said)
    assert widget.box
    widget.widgets["width"].value = 1600
    widget.widgets["head_width"].value = 256
    caption = widget.box.children[2].children[0].value
    assert "expected heads that divide the width 1600, got 256" in caption
