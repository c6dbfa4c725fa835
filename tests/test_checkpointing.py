"""ddpkit.checkpointing: gradients to the last bit as without it, dropout on, and the bytes that are predicted."""

import contextlib
import sys
from functools import partial

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils import checkpoint as torchs
from torch.utils._python_dispatch import TorchDispatchMode

from ddpkit import RankError, launch
from ddpkit.checkpointing import (
    best_segments,
    checkpoint,
    checkpoint_sequential,
    selective_checkpoint,
    sequential_bytes,
)
from ddpkit.ddp import BucketedDDP, FlatDDP, NaiveDDP, OverlapDDP
from ddpkit.models import GPT, Block, mean_loss, torch_attention
from ddpkit.tools.memory import (
    ByteDropout,
    MaterialisedAttention,
    block_activations,
    checkpointed_activations,
    coefficients,
    measure_saved,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])

BOTH = pytest.mark.parametrize("way", [checkpoint, selective_checkpoint])
STATE = torch.get_rng_state().nbytes


def directly(fn, *args):
    return fn(*args)


class Checkpointed(nn.Module):
    """A module that is called through `way`."""

    def __init__(self, module, way):
        super().__init__()
        self.module, self.way = module, way

    def forward(self, *args):
        return self.way(self.module, *args)


def small_gpt(way=directly, **arguments):
    torch.manual_seed(0)
    gpt = GPT(**{"vocabulary": 11, "context": 6, "width": 8, "heads": 2, "layers": 3, "dropout": 0.3} | arguments)
    gpt.blocks = nn.ModuleList(Checkpointed(block, way) for block in gpt.blocks)
    return gpt


def batch(seed=0):
    return torch.randint(11, (4, 7), generator=torch.Generator().manual_seed(seed)).unfold(1, 6, 1).unbind(1)


def step(model, inputs, targets):
    """All gradients, and the random numbers that come next."""
    torch.manual_seed(1)
    mean_loss(model(inputs), targets).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    return [*gradients, torch.rand(3)]


def assert_same_bits(got, expected):
    """And that there is something to compare."""
    assert len(got) == len(expected) > 0
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)
        assert mine.any()


# The same gradients


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", [torch_attention, MaterialisedAttention(nn.Dropout(0.3))])
def test_gradients_are_the_same_to_the_last_bit(way, dtype, attention):
    with_it, without = (small_gpt(each, attention=attention).to(dtype) for each in (way, directly))
    assert_same_bits(step(with_it, *batch()), step(without, *batch()))


def test_dropout_makes_a_difference():
    """Else the test above couldn't fail for want of the random numbers' state."""
    first, second = (step(small_gpt(), *batch()) for _ in range(2))
    assert_same_bits(first, second)
    torch.manual_seed(2)
    model = small_gpt()
    mean_loss(model(batch()[0]), batch()[1]).backward()
    assert not torch.equal(first[0], model.tokens.weight.grad)


@BOTH
def test_gradients_of_inputs(way):
    block = Block(8, 2, 0.3, torch_attention)
    found = []
    for call in (way, directly):
        torch.manual_seed(1)
        leaf = torch.randn(2, 6, 8, requires_grad=True)
        call(block, leaf.sin()).square().sum().backward()
        found.append([leaf.grad, *(parameter.grad for parameter in block.parameters())])
        block.zero_grad()
    assert_same_bits(*found)


@BOTH
def test_inside_of_each_other(way):
    """The outer one calls the inner one again, which calls its function again."""
    calls = []

    def counted(block, x):
        calls.append(torch.is_grad_enabled())
        return block(x)

    def inner(x, blocks):
        for block in blocks:
            x = way(counted, block, x)
        return x

    def outer(gpt, x):
        return way(inner, x, gpt.blocks)

    found = []
    for call in (outer, lambda gpt, x: inner(x, gpt.blocks)):
        gpt = small_gpt()
        torch.manual_seed(1)
        x = torch.randn(2, 6, 8, requires_grad=True)
        call(gpt, x).square().sum().backward()
        found.append([x.grad, *(parameter.grad for parameter in gpt.blocks.parameters())])
        if call is outer:
            # first call; outer's second one; then each inner one's, last block first
            assert calls == [False] * 3 + [False] * 3 + [True] * 3
    assert_same_bits(*found)


@BOTH
def test_autocast_is_as_it_was(way):
    found = []
    for call in (way, directly):
        gpt = small_gpt(call)
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = mean_loss(gpt(batch()[0]), batch()[1])
        loss.backward()  # outside
        found.append([parameter.grad for parameter in gpt.parameters() if parameter.requires_grad])
    assert_same_bits(*found)


def test_autocast_that_is_off_inside_stays_off():
    layer, kinds = nn.Linear(4, 4), []

    def note(x):
        y = layer(x)
        kinds.append(y.dtype)
        return y

    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.autocast("cpu", enabled=False):
            y = checkpoint(note, torch.ones(2, 4))
        y.sum().backward()  # inside
    assert kinds == [torch.float32] * 2


def test_a_weight_used_outside_too_under_autocast():
    """Autocast keeps weights that it has cast: those of the first call have no graph, and must not be used outside."""
    layer = nn.Linear(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (checkpoint(layer, torch.ones(2, 4)) + layer(torch.ones(2, 4))).sum().backward()
    assert torch.equal(layer.weight.grad, torch.full((4, 4), 4.0))


def test_a_weight_used_in_two_checkpoints():
    found = []
    for call in (checkpoint, directly):
        torch.manual_seed(0)
        layer = nn.Linear(4, 4)
        call(layer, call(layer, torch.ones(2, 4)).sin()).square().sum().backward()
        found.append([layer.weight.grad, layer.bias.grad])
    assert_same_bits(*found)


@BOTH
def test_gradients_add_up(way):
    layer = nn.Linear(4, 4)
    for _ in range(2):
        way(layer, torch.ones(2, 4)).sum().backward()
    assert torch.equal(layer.weight.grad, torch.full((4, 4), 4.0))


@BOTH
def test_backward_twice_through_the_same_graph(way):
    layer, x = nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
    for fn in (layer, lambda x: layer(x).square()):  # of the first, the product itself is what comes out
        expected = torch.autograd.grad(fn(x).sum(), (x, layer.weight))
        loss = way(fn, x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        assert_same_bits([x.grad, layer.weight.grad], [2 * each for each in expected])
        x.grad = layer.weight.grad = None


# What goes in and comes out


def test_several_inputs_and_outputs():
    """Of each kind: with gradient and without, not a tensor, not used."""
    x, frozen, unused = torch.ones(3, requires_grad=True), torch.full((3,), 2.0), torch.ones(3, requires_grad=True)
    weight = nn.Parameter(torch.ones(3))

    def several(x, factor, frozen, nothing, unused, numbers, name):
        assert (factor, nothing, name) == (5, None, "name")
        return factor * x * frozen, x[numbers], None, x.argmax(), "text", x * weight

    outputs = checkpoint(several, x, 5, frozen, None, unused, torch.tensor([0, 0, 1]), "name")
    assert outputs[2] is None
    assert (outputs[3].item(), outputs[4]) == (0, "text")
    (outputs[0].sum() + outputs[1].sum()).backward()  # the last isn't used
    assert x.grad.tolist() == [10 + 2, 10 + 1, 10]
    assert (frozen.grad, unused.grad, weight.grad) == (None, None, None)


def test_only_parameters_have_gradients():
    layer = nn.Linear(4, 4)
    checkpoint(layer, torch.ones(2, 4)).sum().backward()
    assert torch.equal(layer.weight.grad, torch.full((4, 4), 2.0))


def test_no_arguments_at_all():
    weight = nn.Parameter(torch.ones(3))
    checkpoint(lambda: weight * 2).sum().backward()
    assert weight.grad.tolist() == [2, 2, 2]


def test_nothing_to_train_inside():
    weight = nn.Parameter(torch.ones(3))
    (checkpoint(torch.exp, torch.zeros(3)) * weight).sum().backward()
    assert weight.grad.tolist() == [1, 1, 1]


def test_the_same_tensor_twice():
    x = torch.full((3,), 2.0, requires_grad=True)
    checkpoint(lambda a, b: a * b, x, x).sum().backward()
    assert x.grad.tolist() == [4, 4, 4]


def test_what_comes_out_is_what_went_in():
    x = torch.ones(3, requires_grad=True)
    same, double = checkpoint(lambda x: (x, 2 * x), x)
    (3 * same + double).sum().backward()
    assert x.grad.tolist() == [5, 5, 5]


def test_an_output_without_a_graph():
    x = torch.ones(3, requires_grad=True)
    cut, double = checkpoint(lambda x: (x.detach(), 2 * x), x)
    (3 * cut + double).sum().backward()
    assert x.grad.tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("give", "got"),
    [(lambda x: [x], "list"), (lambda x: {"x": x}, "dict"), (lambda x: None, "NoneType"), (lambda x: (x, [x]), "list")],
)
def test_what_gradients_would_not_get_through(give, got):
    with pytest.raises(ValueError, match=f"a tensor, or a tuple of them, from its function, got {got}"):
        checkpoint(give, torch.ones(3, requires_grad=True))


def test_without_gradients_it_only_calls():
    calls = []
    with torch.no_grad():
        y = checkpoint(lambda x: (calls.append(1), x.exp())[1], torch.ones(3, requires_grad=True))
    assert calls == [1]
    assert not y.requires_grad


def test_gradients_that_are_asked_for_otherwise():
    layer, x = nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"expected loss.backward\(\), got torch.autograd.grad"):
        torch.autograd.grad(checkpoint(layer, x).sum(), x)
    with pytest.raises(RuntimeError, match=r"expected loss.backward\(\), got torch.autograd.grad"):
        checkpoint(layer, x).sum().backward(inputs=[x])
    loss = checkpoint(layer, x).square().sum()
    with pytest.warns(UserWarning, match="create_graph=True"):
        loss.backward(create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        x.grad.sum().backward()


def test_an_input_that_is_changed_afterwards_is_noticed():
    x = torch.ones(3, requires_grad=True) * 1
    y = checkpoint(torch.exp, x)
    x += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@BOTH
def test_an_error_leaves_everything_as_it_was(way):
    def fails_later(x):
        torch.rand(3)
        if torch.is_grad_enabled():
            raise ZeroDivisionError
        return x

    y = way(fails_later, torch.ones(3, requires_grad=True))
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.is_grad_enabled()
    x = torch.ones(2, 2, requires_grad=True)
    (x @ x).sum().backward()  # no mode is left, either


# What is computed twice


class Counting(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.overloadpacket.__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        return operation(*args, **(kwargs or {}))


def counted(way):
    block, x = Block(8, 2, 0.3, MaterialisedAttention(nn.Dropout(0.3))), torch.ones(2, 6, 8, requires_grad=True)
    with Counting() as forward:
        y = way(block, x)
    with Counting() as backward:
        y.sum().backward()
    return forward.counts, backward.counts


def test_selective_computes_everything_again_but_the_layers():
    (forward, alone), (_, whole), (first, selective) = (
        counted(each) for each in (directly, checkpoint, selective_checkpoint)
    )
    assert (forward["mm"], forward["addmm"], forward["bmm"]) == (1, 3, 2)  # qkv; out and the MLP; attention
    assert {name: first[name] for name in ("mm", "addmm", "bmm", "gelu")} == {"mm": 1, "addmm": 3, "bmm": 2, "gelu": 1}
    for name in ("mm", "addmm", "bmm", "gelu", "_softmax"):
        again = forward[name]
        assert whole.get(name, 0) - alone.get(name, 0) == again, name
        kept = name in ("mm", "addmm")
        assert selective.get(name, 0) - alone.get(name, 0) == (0 if kept else again), name


def test_selective_refuses_a_product_that_is_changed_in_place():
    layer = nn.Linear(4, 4)

    def changes(x):
        y = layer(x)
        y += 1
        return y * y

    with pytest.raises(ValueError, match=r"got number 0, \(2, 4\), changed in place: write y = y \+ 1"):
        selective_checkpoint(changes, torch.ones(2, 4))
    checkpoint(changes, torch.ones(2, 4)).sum().backward()
    with torch.no_grad():  # nothing is kept, so it does no harm
        assert not selective_checkpoint(changes, torch.ones(2, 4)).requires_grad


# The bytes

SIZES = {"batch": 2, "length": 48, "width": 64}


def total(entries):
    return sum(entry.nbytes for entry in entries)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", [torch_attention, MaterialisedAttention(ByteDropout(0.1))])
def test_a_checkpointed_block_keeps_what_is_predicted(way, dtype, attention):
    block = Block(64, 4, 0.1, attention).to(dtype)
    x = torch.ones(2, 48, 64, dtype=dtype, requires_grad=True)
    terms = checkpointed_activations(**SIZES, itemsize=dtype.itemsize, selective=way is selective_checkpoint)
    assert [saved.nbytes for saved in measure_saved(way, block, x)] == [term.nbytes for term in terms]


def test_what_a_checkpointed_block_keeps_in_numbers():
    """At 16 bits: 34sbd + 5bs²H without, 20sbd selectively, 2sbd with."""
    assert coefficients(block_activations(**SIZES, heads=4))["sbd"] == 34
    assert coefficients(checkpointed_activations(**SIZES, selective=True)) == {"": STATE, "sbd": 20}
    assert coefficients(checkpointed_activations(**SIZES)) == {"": STATE, "sbd": 2}


@pytest.mark.parametrize("layers", [1, 5, 9, 16])
def test_sequential_keeps_what_is_predicted(layers):
    numel = 1000
    chain = nn.Sequential(*(nn.Sequential(nn.Linear(10, 10), nn.Tanh()) for _ in range(layers)))
    x = torch.ones(100, 10, requires_grad=True)
    alone = total(measure_saved(chain, x)) - 4 * numel  # x, and what each tanh gives: the next one's input, or the end
    assert alone == layers * 4 * numel
    for segments in range(1, layers + 1):
        kept = total(measure_saved(checkpoint_sequential, chain, segments, x))
        end = 4 * numel  # the last tanh's result is kept, and isn't anybody's input
        predicted = sequential_bytes(layers, segments, input_bytes=4 * numel, function_bytes=4 * numel)
        assert kept == predicted + end + (segments - 1) * STATE


def test_the_square_root_is_best():
    for functions in range(1, 200):
        costs = {k: k - 1 + functions / k for k in range(1, functions + 1)}
        assert costs[best_segments(functions)] <= 1.001 * min(costs.values()) + 0.26, functions


@pytest.mark.parametrize("segments", [None, 1, 2, 3, 5])
def test_sequential_is_the_same_to_the_last_bit(segments):
    found = []
    for call in (partial(checkpoint_sequential), lambda functions, _, x: nn.Sequential(*functions)(x)):
        gpt = small_gpt(layers=5)
        torch.manual_seed(1)
        x = torch.randn(2, 6, 8, requires_grad=True)
        call(gpt.blocks, segments, x).square().sum().backward()
        found.append([x.grad, *(parameter.grad for parameter in gpt.blocks.parameters()), torch.rand(3)])
    assert_same_bits(*found)


def test_sequential_calls_all_but_the_last_segment_twice():
    calls = []
    functions = [lambda x, n=n: (calls.append(n), x * 2)[1] for n in range(5)]
    x = torch.ones(1, requires_grad=True)
    checkpoint_sequential(functions, 2, x).sum().backward()
    assert calls == [0, 1, 2, 3, 4, 0, 1]
    assert x.grad.item() == 32


@pytest.mark.parametrize("segments", [0, 4])
def test_segments_that_there_can_not_be(segments):
    with pytest.raises(ValueError, match=f"and 1 function in each, got {segments} segments of 3 functions"):
        checkpoint_sequential([torch.exp] * 3, segments, torch.ones(3))


# Beside torch's, and on ranks


def test_torchs_own_keeps_the_same_bytes():
    block, x = Block(64, 4, 0.1, torch_attention), torch.ones(2, 48, 64, requires_grad=True)
    theirs = total(measure_saved(partial(torchs.checkpoint, use_reentrant=True), block, x))
    assert total(measure_saved(checkpoint, block, x)) == theirs + STATE  # they have the state elsewhere, uncounted


WRAPPERS = {
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "overlap": OverlapDDP,
    "buckets": partial(BucketedDDP, bucket_cap_mb=0.001),
}


def gradients_of_two_steps(wrap, way, accumulation):
    """As numbers, so that equal means the same bits."""
    model = wrap(small_gpt(way))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = []
    for number in range(2):
        torch.manual_seed(100 * number + dist.get_rank())
        for micro in range(accumulation):
            inputs, targets = batch(seed=100 * number + 10 * micro + dist.get_rank())
            with model.no_sync() if micro < accumulation - 1 else contextlib.nullcontext():
                mean_loss(model(inputs), targets).backward()
        model.synchronize()
        found.append([parameter.grad.tolist() for parameter in trained])
        for parameter in trained:
            parameter.data -= 0.1 * parameter.grad
            parameter.grad = None
    return found


def differences_under_wrappers():
    """What isn't the same with a checkpoint as without, and what the last wrapper's gradients are."""
    wrong = []
    for name, wrap in WRAPPERS.items():
        for accumulation in (1, 2):
            without = gradients_of_two_steps(wrap, directly, accumulation)
            for way in (checkpoint, selective_checkpoint):
                if gradients_of_two_steps(wrap, way, accumulation) != without:
                    wrong.append(f"{name}, {way.__name__}, {accumulation} micro-batches")
    return wrong, without


def test_under_the_wrappers_gradients_are_the_same_to_the_last_bit():
    (wrong, gradients), (also_wrong, same) = launch(differences_under_wrappers, world_size=2, backend="gloo")
    assert wrong == also_wrong == []
    assert gradients == same
    assert gradients[0] != gradients[1]


def use_a_weight_in_two_checkpoints(wrap):
    layer = nn.Linear(4, 4)
    model = wrap(layer)
    checkpoint(layer, checkpoint(layer, torch.ones(2, 4))).sum().backward()
    model.synchronize()


def test_a_weight_in_two_checkpoints_is_refused_where_gradients_are_sent_in_backward():
    launch(use_a_weight_in_two_checkpoints, NaiveDDP, world_size=1, backend="gloo")
    for wrap in (OverlapDDP, BucketedDDP):
        with pytest.raises(RankError, match="backward"):
            launch(use_a_weight_in_two_checkpoints, wrap, world_size=1, backend="gloo")


# On a GPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@BOTH
def test_gradients_on_a_gpu_are_the_same(way):
    found = []
    for call in (way, directly):
        gpt = small_gpt(call).cuda()
        torch.manual_seed(1)
        inputs, targets = (part.cuda() for part in batch())
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = mean_loss(gpt(inputs), targets)
        loss.backward()
        found.append([p.grad for p in gpt.blocks.parameters()] + [torch.rand(3, device="cuda")])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)  # sums may come in another order each time
