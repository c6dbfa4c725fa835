"""ddpkit.memory: figures of the literature, and formulas against bytes that exist."""

import gc
import weakref
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ddpkit import memory
from ddpkit.memory import (
    KINDS,
    ByteDropout,
    MaterialisedAttention,
    block_activations,
    block_bytes,
    coefficients,
    count_states,
    gpus_needed,
    measure_saved,
    model_states,
    watch,
)
from ddpkit.models import GPT, Block, mean_loss, torch_attention

# Model states


def test_states_that_there_are_not():
    for wrong, says in [
        ({"stage": 4}, "expected a stage from 0 to 3 .*, got 4 and 'mixed': choose"),
        ({"precision": "fp8"}, "a precision of fp32, mixed, .*, bf16, got 0 and 'fp8'"),
        ({"world_size": 0}, "expected world_size to be 1 or more, got 0"),
        ({"parameters": 0.5e9}, "expected parameters to be 1 or more, got 500000000.0: give a"),
    ]:
        with pytest.raises(ValueError, match=says):
            model_states(**{"parameters": 10} | wrong)


def trained(model, optimizer, masters=()):
    """After one step, with gradients everywhere, in master copies, too."""
    for parameter in [*model.parameters(), *masters]:
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    return count_states(model, optimizer)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)]
)
def test_counted_states_are_those_of_the_formula(precision, dtype):
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)).to(dtype)
    predicted = model_states(7 * 5 + 5 + 5 * 3 + 3, precision=precision)
    counted = trained(model, torch.optim.AdamW(model.parameters()))
    steps = 4 * 4  # AdamW counts those of each of 4 tensors, in fp32
    assert counted == predicted._replace(optimizer=predicted.optimizer + steps)
    assert trained(model, torch.optim.SGD(model.parameters(), 0.1)) == (*predicted[:2], 0)


def test_counted_states_with_master_copies():
    model = nn.Linear(7, 5, dtype=torch.bfloat16)
    masters = [nn.Parameter(parameter.detach().float()) for parameter in model.parameters()]
    counted = trained(model, torch.optim.AdamW(masters), masters)
    fp32_gradients = 4 * 40  # of the master copies; they are extra, beside those in 16 bits
    assert counted == (2 * 40, 2 * 40, 12 * 40 + fp32_gradients + 2 * 4)
    assert model_states(40) == (2 * 40, 2 * 40, 12 * 40)
    assert model_states(40, precision="mixed, fp32 gradients").gradients == 4 * 40


def test_a_tied_weight_is_counted_once_and_a_frozen_one_has_no_gradient():
    gpt = GPT(vocabulary=11, context=6, width=8, heads=2, layers=1)
    numbers = sum(parameter.numel() for parameter in gpt.parameters())
    counted = trained(gpt, torch.optim.SGD(gpt.parameters(), 0.1))
    assert counted == (4 * numbers, 4 * (numbers - 6 * 8), 0)
    assert count_states(gpt) == counted


def test_gradients_that_share_a_buffer_are_counted_once():
    model = nn.Linear(3, 1)
    buffer = torch.ones(10)
    model.weight.grad, model.bias.grad = buffer[:3].view(1, 3), buffer[3:4]
    assert count_states(model).gradients == 40


# How many GPUs


def test_gpus_needed_is_where_it_just_fits():
    for capacity in range(11, 60):
        gpus = gpus_needed(100, capacity, 20, sharded=0.5)
        assert gpus * (capacity - 10) >= 100 + 10
        assert (gpus - 1) * (capacity - 10) < 100 + 10
    with pytest.raises(
        ValueError, match=r"less than the 10 bytes of a GPU, got 10 .* take a smaller batch"
    ):
        gpus_needed(100, 10, 20)
    assert gpus_needed(0, 10) == 1


# Activations of a block

SIZES = {"batch": 2, "length": 48, "width": 64, "heads": 4}


def kept_bytes(fn, *args):
    return sum(saved.nbytes for saved in measure_saved(fn, *args))


def a_block(batch, length, width, heads, dtype, dropout, attention, device="cpu"):
    """A block of the GPT, and an input for it."""
    with torch.device(device):
        block = Block(width, heads, dropout, attention).to(dtype)
        return block, torch.ones(batch, length, width, dtype=dtype, requires_grad=True)


def papers_block(sizes):
    attention = MaterialisedAttention(ByteDropout(0.1))
    setting = {"dtype": torch.bfloat16, "dropout": 0.0, "attention": attention}
    block, x = a_block(**sizes, **setting)
    block.dropout = ByteDropout(0.1)
    return block, x


def one_by_one(terms, copied):
    """Of each piece: mean and deviation are two; queries, keys and values three, if copied."""
    pieces = {"mean and 1/deviation of each token": 2}
    if copied:
        pieces["queries, keys and values"] = 3
    found = []
    for term in terms:
        many = pieces.get(term.name, 1)
        found += [term.nbytes // many] * many
    return found


@pytest.mark.parametrize(
    ("attention", "dropout", "dtype"),
    [
        ("flash", False, torch.float32),
        ("flash", True, torch.bfloat16),
        ("materialised", False, torch.bfloat16),
        ("materialised", True, torch.float32),
    ],
)
def test_a_block_keeps_what_is_predicted(attention, dropout, dtype):
    flash, own = attention == "flash", nn.Dropout(0.1) if dropout else nn.Identity()
    module = torch_attention if flash else MaterialisedAttention(own)
    on_a_cpu = {"mask_bytes": dtype.itemsize, "statistic_bytes": dtype.itemsize}
    options = {"itemsize": dtype.itemsize, "dropout": dropout, "attention": attention}
    sizes = SIZES if dropout else {"batch": 3, "length": 40, "width": 48, "heads": 2}
    terms = block_activations(**sizes, **options, **on_a_cpu)
    block, x = a_block(**sizes, dtype=dtype, dropout=0.1 * dropout, attention=module)
    measured = [saved.nbytes for saved in measure_saved(block, x)]
    # Heads of several sequences are copied, as one product wants them. Flash attention keeps its
    # result before its log-sum-exp: in another order.
    assert Counter(measured) == Counter(one_by_one(terms, copied=not flash))


# 34sbd + 5bs²H


def test_papers_formula_is_measured_in_its_setting():
    """16 bits, on a CPU: beyond the formula are the norms' statistics, there in 16 bits."""
    block, x = papers_block(SIZES)
    measured = measure_saved(block, x)
    formula = block_bytes(**SIZES)
    assert coefficients(block_activations(**SIZES)) == {"sbd": 34, "sb": 16, "bs²H": 5}
    total = sum(saved.nbytes for saved in measured)
    assert total == sum(term.nbytes for term in block_activations(**SIZES, statistic_bytes=2))
    assert 0 < total - formula < 0.02 * formula
    norms = [each for each in measured if each.where.endswith("_norm") and each.shape[-1] == 1]
    assert total - formula == sum(saved.nbytes for saved in norms)


def test_block_that_there_is_not():
    with pytest.raises(ValueError, match="to be 'materialised' or 'flash', got 'sparse'"):
        block_activations(**SIZES, attention="sparse")
    with pytest.raises(ValueError, match="expected heads to be 1 or more, got 0"):
        block_activations(**SIZES | {"heads": 0})


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["flash", "materialised"])
def test_a_block_on_a_gpu_keeps_what_is_predicted(attention):
    modules = {"flash": torch_attention, "materialised": MaterialisedAttention(nn.Dropout(0.1))}
    sizes = {"batch": 2, "length": 256, "width": 256, "heads": 4}
    setting = {"dtype": torch.bfloat16, "dropout": 0.1, "attention": modules[attention]}
    block, x = a_block(**sizes, **setting, device="cuda")
    predicted = sum(term.nbytes for term in block_activations(**sizes, attention=attention))
    assert kept_bytes(block, x) == pytest.approx(predicted, rel=0.02)


# The parts that the paper's block is made of


def test_byte_dropout_is_dropout():
    x = torch.ones(1000, requires_grad=True)
    torch.manual_seed(0)
    y = ByteDropout(0.25)(x)
    assert sorted(set(y.tolist())) == [0.0, pytest.approx(4 / 3)]
    assert 200 < y.eq(0).sum() < 300
    y.sum().backward()
    assert torch.equal(x.grad, y)
    module = ByteDropout(0.25).eval()
    assert torch.equal(module(x), x)
    (mask,) = measure_saved(ByteDropout(0.25), x)
    assert (mask.dtype, mask.nbytes) == (torch.bool, 1000)


def test_materialised_attention_is_attention():
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 6, 8, dtype=torch.float64, generator=generator)
    for causal in (False, True):
        ours = MaterialisedAttention(nn.Identity())(q, k, v, causal=causal)
        torch.testing.assert_close(ours, torch_attention(q, k, v, causal=causal))
        one = MaterialisedAttention(nn.Identity())(q[0], k[0], v[0], causal=causal)
        torch.testing.assert_close(one, ours[0])


# measure_saved


def test_measured_pieces_are_named():
    block, x = a_block(**SIZES, dtype=torch.float32, dropout=0.1, attention=torch_attention)
    names = [saved.where for saved in measure_saved(block, x)]
    assert names[0] == names[1] == "attention_norm"
    parts = {"attention_norm", "qkv", "", "dropout", "mlp_norm", "mlp.0", "mlp.1", "mlp.2"}
    assert parts <= {*names} <= parts | {"out"}  # "": the block itself, for its attention


def a_function(x, weight):
    return nn.functional.linear(x.exp(), weight)


def test_measured_pieces_of_a_function():
    x, weight = torch.ones(4, 10, requires_grad=True), nn.Parameter(torch.ones(3, 10))
    assert measure_saved(a_function, x, weight) == [("", (4, 10), torch.float32, 160)]


def test_memory_is_measured_once_and_whole():
    x = torch.ones(10, requires_grad=True)
    kept = measure_saved(lambda: x[:2].exp() * x[5:7].square())
    assert [saved.nbytes for saved in kept] == [8, 40, 8]
    assert [saved.nbytes for saved in measure_saved(lambda: (x * x).sum())] == [40]


def test_memory_of_a_graph_that_is_let_go_is_not_taken_for_other_memory():
    def often():
        for _ in range(50):
            torch.ones(100, requires_grad=True).exp()

    assert [saved.nbytes for saved in measure_saved(often)] == [400] * 50


# watch: numbers that can be counted by hand


def alive(timeline, entry):
    return {kind: nbytes for kind, nbytes in timeline.at(entry).items() if nbytes}


def test_a_step_by_hand():
    """x (4, 10) -> exp (4, 10), kept by itself and by the layer -> layer (4, 5) -> sum."""
    layer = nn.Linear(10, 5, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9)
    x = torch.ones(4, 10, requires_grad=True)
    with watch(layer, optimizer) as timeline:
        timeline.mark("forward")
        loss = layer(x.exp()).sum()
        timeline.mark("backward")
        loss.backward()
        timeline.mark("step")
        optimizer.step()
        timeline.mark("zero_grad")
        optimizer.zero_grad()
    starts = {text: entry for entry, text in timeline.marks}
    weight, kept, result, loss = 10 * 5 * 4, 4 * 10 * 4, 4 * 5 * 4, 4
    assert list(starts) == ["forward", "backward", "step", "zero_grad"]
    assert alive(timeline, 0) == {"parameters": weight}
    # The layer's result is there until sum is over.
    kinds = {"parameters": weight, "activations": kept, "other": result + loss}
    assert alive(timeline, starts["backward"] - 1) == kinds
    states = {"parameters": weight, "gradients": weight}
    of_x, of_loss = kept, loss  # gradients, too, but not of parameters
    assert alive(timeline, starts["step"] - 1) == states | {"other": loss + of_x + of_loss}
    momentum = {"other": loss + of_x, "optimizer": weight}
    assert alive(timeline, starts["zero_grad"] - 1) == states | momentum


def test_the_peak_is_in_backward():
    layer, x = nn.Linear(10, 10, bias=False), torch.ones(4, 10)
    with watch(layer) as timeline:
        layer(x).exp().sum().backward()
    assert timeline.totals[timeline.peak] == max(timeline.totals)
    kept = {"parameters": 400, "activations": 160}
    assert alive(timeline, 0) == kept  # x was there before, and is kept
    # exp's result is given back once its gradient is there (160); left are x, which the layer
    # keeps, the loss and the loss's own gradient (4 each)
    assert alive(timeline, timeline.peak) == kept | {"gradients": 400, "other": 168}
    assert timeline.ops[timeline.peak] == "aten.mm.default"
    assert {len(nbytes) for nbytes in timeline.by_kind.values()} == {len(timeline.ops)}
    assert tuple(timeline.by_kind) == KINDS


def test_what_is_watched_after_forward_is_what_is_measured():
    torch.manual_seed(0)
    gpt = GPT(vocabulary=11, context=6, width=8, heads=2, dropout=0.1)
    tokens = torch.ones(4, 6, dtype=torch.int64)
    with watch(gpt) as timeline:
        timeline.mark("forward")
        logits = gpt(tokens)
        timeline.mark("backward")
        mean_loss(logits, tokens).backward()
    numbers = sum(parameter.numel() for parameter in gpt.parameters())
    assert timeline.at(0)["parameters"] == 4 * numbers
    measured = kept_bytes(gpt, tokens)
    assert timeline.at(timeline.begins("backward") - 1)["activations"] == measured
    assert max(timeline.by_kind["gradients"]) == count_states(gpt).gradients


def test_gradients_in_a_bucket_count_as_buckets():
    layer = nn.Linear(10, 10, bias=False)
    bucket = torch.zeros(128)
    layer.weight.grad = bucket[:100].view(10, 10)
    with watch(layer, buckets=[bucket]) as timeline:
        layer(torch.ones(4, 10)).sum().backward()
    assert set(timeline.by_kind["buckets"]) == {512}
    assert set(timeline.by_kind["gradients"]) == {0}


def test_gradients_of_the_step_before_are_there_until_they_go():
    layer = nn.Linear(10, 10, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        layer(torch.ones(4, 10)).sum().backward()
        optimizer.step()
    with watch(layer, optimizer) as timeline:
        optimizer.zero_grad()
        loss = torch.zeros(1)
    assert loss == 0
    assert alive(timeline, 0) == {"parameters": 400, "gradients": 400, "optimizer": 804}
    assert alive(timeline, 1) == {"parameters": 400, "optimizer": 804, "other": 4}


def test_a_tensor_may_go_while_the_books_are_closed():
    """As when a thread of the backend lets go of it."""
    tensors = [torch.ones(3), torch.ones(5)]
    watcher = memory.peak._Watcher(memory.Timeline())
    for number in range(2):
        watcher.meet(tensors[number])
    first = next(iter(watcher.alive.values()))
    first.ends = SimpleNamespace(detach=tensors.pop)  # the second's end
    watcher.tally()
    assert watcher.timeline.by_kind["other"] == [12 + 20]
    assert len(watcher.alive) == 1


def test_watching_leaves_nothing_behind():
    layer = nn.Linear(10, 10)
    watched = watch(layer)
    timeline = watched.__enter__()
    layer(torch.ones(4, 10))
    assert watched.__exit__(ZeroDivisionError, ZeroDivisionError(), None) is False
    entries = len(timeline.ops)
    assert timeline.at(0)["parameters"] == 440
    layer(torch.ones(4, 10)).sum().backward()
    assert len(timeline.ops) == entries
    assert not layer.weight._post_accumulate_grad_hooks
    gone = weakref.ref(timeline)
    del timeline, watched
    gc.collect()
    assert gone() is None
