"""ddpkit.checkpointing: the same gradients to the last bit, dropout on; the bytes predicted."""

from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
import training_cases as cases
from on_ranks import on_ranks
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from training_cases import WRAPPERS, gpt_batch, gpt_loss, prepare, train

from ddpkit import memory
from ddpkit.checkpointing import (
    checkpoint,
    checkpoint_sequential,
    random_state,
    selective_checkpoint,
    sequential_bytes,
)
from ddpkit.models import Block, torch_attention

BOTH = pytest.mark.parametrize("way", [checkpoint, selective_checkpoint])


def directly(fn, *args):
    return fn(*args)


class Through(nn.Module):
    """A module that is called by way of `way`."""

    def __init__(self, way, module):
        super().__init__()
        self.way, self.module = way, module

    def forward(self, *args):
        return self.way(self.module, *args)


def small_gpt(way=directly, attention=torch_attention, layers=2):
    gpt = cases.small_gpt(dtype=torch.float32, dropout=0.3, attention=attention, layers=layers)
    gpt.blocks = nn.ModuleList(Through(way, block) for block in gpt.blocks)
    return gpt


def gradients_of(model):
    return [parameter.grad for parameter in model.parameters() if parameter.requires_grad]


def assert_same_bits(got, expected):
    """And that there is something to compare."""
    assert len(got) == len(expected) > 0
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)
        assert mine.any()


# The same gradients


def step(model, seed=1):
    """All gradients, and the random numbers that come next."""
    torch.manual_seed(seed)
    gpt_loss(model, [gpt_batch()]).backward()
    return [*gradients_of(model), torch.rand(3)]


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_the_same_to_the_last_bit(way, dtype):
    for attention in (torch_attention, memory.MaterialisedAttention(nn.Dropout(0.3))):
        with_it, without = (small_gpt(each, attention).to(dtype) for each in (way, directly))
        expected = step(without)
        assert_same_bits(step(with_it), expected)
        without.zero_grad()
        assert not torch.equal(step(without, seed=2)[0], expected[0])  # dropout matters


@BOTH
def test_inside_of_each_other(way):
    """The outer one calls the inner one again, which calls its function again."""
    calls, found = [], []

    def counted(block, x):
        calls.append(torch.is_grad_enabled())
        return block(x)

    for call, outer in ((way, way), (directly, directly)):
        gpt = small_gpt()
        torch.manual_seed(1)
        leaf = torch.randn(2, 6, 6, requires_grad=True)
        blocks = nn.Sequential(*(Through(call, partial(counted, block)) for block in gpt.blocks))
        outer(blocks, leaf.sin()).square().sum().backward()
        found.append([leaf.grad, *(parameter.grad for parameter in gpt.blocks.parameters())])
    assert_same_bits(*found)
    # The outer one's two calls, then each inner one's second; then directly.
    assert calls == [False] * 4 + [True] * 2 + [True] * 2


@BOTH
def test_autocast_is_as_it_was(way):
    """Also where it is off inside: then it is off, though backward is called where it is on."""
    found = []
    for call in (way, directly):
        gpt, layer = small_gpt(call), nn.Linear(4, 4)
        torch.manual_seed(1)
        nn.init.ones_(layer.weight)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = gpt_loss(gpt, [gpt_batch()])
        loss.backward()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.autocast("cpu", enabled=False):
                y = call(lambda x, layer=layer: layer(x).exp(), torch.full((2, 4), 0.1))
            y.sum().backward()
        found.append([*gradients_of(gpt), layer.weight.grad])
    assert_same_bits(*found)


def test_a_weight_used_outside_too_under_autocast():
    """Autocast keeps weights it has cast; of the first call they have no graph, as outside."""
    layer = nn.Linear(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (checkpoint(layer, torch.ones(2, 4)) + layer(torch.ones(2, 4))).sum().backward()
    assert torch.equal(layer.weight.grad, torch.full((4, 4), 4.0))


@BOTH
def test_backward_twice_through_the_same_graph(way):
    layer, x = nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
    for fn in (layer, lambda x: layer(x).square()):  # of the first, the product comes out itself
        expected = torch.autograd.grad(fn(x).sum(), (x, layer.weight))
        loss = way(fn, x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        assert_same_bits([x.grad, layer.weight.grad], [2 * each for each in expected])
        x.grad = layer.weight.grad = None


# What goes in and comes out


def test_inputs_of_each_kind():
    """With a gradient and without, whole numbers, one that isn't used, the same one twice."""
    x, unused = torch.full((3,), 2.0, requires_grad=True), torch.ones(3, requires_grad=True)
    frozen, numbers = torch.full((3,), 5.0), torch.tensor([0, 0, 1])

    def fn(x, again, frozen, numbers, unused):
        return (x * again * frozen)[numbers]

    checkpoint(fn, x, x, frozen, numbers, unused).sum().backward()
    assert x.grad.tolist() == [2 * 2 * 2 * 5, 2 * 2 * 5, 0]
    assert (frozen.grad, unused.grad) == (None, None)


def test_only_parameters_have_gradients_or_nothing_has():
    weight = nn.Parameter(torch.ones(3))
    checkpoint(lambda: weight * 2).sum().backward()
    assert weight.grad.tolist() == [2, 2, 2]
    (checkpoint(torch.exp, torch.zeros(3)) * weight).sum().backward()
    assert weight.grad.tolist() == [3, 3, 3]


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
        self.counts = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.counts[operation.overloadpacket.__name__] += 1
        return operation(*args, **(kwargs or {}))


def counted(way):
    block = Block(8, 2, 0.3, memory.MaterialisedAttention(nn.Dropout(0.3)))
    x = torch.ones(2, 6, 8, requires_grad=True)
    with Counting() as forward:
        y = way(block, x)
    with Counting() as backward:
        y.sum().backward()
    return forward.counts, backward.counts


def test_selective_computes_everything_again_but_the_layers():
    forward, alone = counted(directly)
    _, whole = counted(checkpoint)
    first, selective = counted(selective_checkpoint)
    made = {"mm": 1, "addmm": 3, "bmm": 2, "gelu": 1, "_softmax": 1}  # qkv; out, MLP; attention
    for name, calls in made.items():
        assert forward[name] == first[name] == calls, name
        assert whole[name] - alone[name] == calls, name
        again = 0 if name in ("mm", "addmm") else calls
        assert selective[name] - alone[name] == again, name


def test_selective_refuses_a_product_that_is_changed_in_place():
    layer = nn.Linear(4, 4)

    def changes(x):
        y = layer(x)
        y += 1
        return y * y

    with pytest.raises(ValueError, match=r"linear layers that stay, .* write y = y \+ 1"):
        selective_checkpoint(changes, torch.ones(2, 4))
    checkpoint(changes, torch.ones(2, 4)).sum().backward()
    with torch.no_grad():  # nothing is kept, so it does no harm
        assert not selective_checkpoint(changes, torch.ones(2, 4)).requires_grad


# The bytes

SIZES = {"batch": 2, "length": 48, "width": 64}


def kept_bytes(fn, *args):
    return [saved.nbytes for saved in memory.measure_saved(fn, *args) if saved.nbytes]


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpointed_block_keeps_what_is_predicted(way, dtype):
    x = torch.ones(2, 48, 64, dtype=dtype, requires_grad=True)
    selective = way is selective_checkpoint
    terms = memory.checkpointed_activations(**SIZES, itemsize=dtype.itemsize, selective=selective)
    for attention in (torch_attention, memory.MaterialisedAttention(memory.ByteDropout(0.1))):
        block = Block(64, 4, 0.1, attention).to(dtype)
        state, *rest = kept_bytes(way, block, x)
        assert rest == [term.nbytes for term in terms[1:]]
        # A GPU's generator has a state, too, of 16 bytes.
        assert state == random_state().nbytes
        assert terms[0].nbytes == torch.get_rng_state().nbytes


# A stack in segments


@pytest.mark.parametrize("layers", [1, 5, 9])
def test_sequential_keeps_what_is_predicted(layers):
    chain = nn.Sequential(*(nn.Sequential(nn.Linear(10, 10), nn.Tanh()) for _ in range(layers)))
    x = torch.ones(100, 10, requires_grad=True)
    for segments in range(1, layers + 1):
        predicted = sequential_bytes(layers, segments, x.nbytes, x.nbytes)
        states = (segments - 1) * random_state().nbytes
        end = x.nbytes  # the last tanh's result is kept, and isn't anybody's input
        kept = sum(kept_bytes(checkpoint_sequential, chain, segments, x))
        assert kept == predicted + states + end, segments


@pytest.mark.parametrize("segments", [0, 4])
def test_segments_that_there_can_not_be(segments):
    with pytest.raises(ValueError, match=f"1 function in each, got {segments} segments of 3"):
        checkpoint_sequential(nn.Sequential(*[nn.Tanh()] * 3), segments, torch.ones(3))


# On ranks


def two_steps(wrapper, way, micro_batches):
    prepared = prepare(wrapper, small_gpt(way))
    torch.manual_seed(dist.get_rank())
    return train("GPT", prepared, [dist.get_rank()], micro_batches, steps=range(2))


@on_ranks(2)
def test_under_the_wrappers(check):
    """The same bits. (Two checkpoints of a weight make two gradients: test_ddp, reentrant.)"""
    for number, name in enumerate(WRAPPERS):
        way = (checkpoint, selective_checkpoint)[number % 2]
        got, expected = (two_steps(name, each, 1 + number // 2 % 2) for each in (way, directly))
        check.same(got, expected, name, way.__name__)


# On a GPU


@pytest.mark.gpu
@BOTH
def test_gradients_on_a_gpu_are_the_same(way):
    """But for the order of sums, which may be another each time."""
    found = []
    for call in (way, directly):
        gpt = small_gpt(call).cuda()
        torch.manual_seed(1)
        batch = [part.cuda() for part in gpt_batch()]
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = gpt_loss(gpt, [batch])
        loss.backward()
        found.append([*gradients_of(gpt.blocks), torch.rand(3, device="cuda")])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)
