"""ddpkit.flash_attention and its fast form, against textbook attention in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from attention_cases import complaint, exact, output_and_gradients, randn
from torch import nn

from ddpkit import flash_attention as plain
from ddpkit.fast import attention as fast
from ddpkit.flash_attention import attention
from ddpkit.memory import measure_saved, watch

FLASH = [plain.flash_attention, fast.flash_attention]
NAMES = {plain.attention: "attention", FLASH[0]: "plain", FLASH[1]: "fast"}
TILE = fast.TILE
on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
both = pytest.mark.parametrize("flash", FLASH, ids=NAMES.get)
all_three = pytest.mark.parametrize("attend", [attention, *FLASH], ids=NAMES.get)


# Errors


CASES = [  # leading axes, queries, keys, D, dtype, causal
    ((), 1, 1, 1, torch.float32, False),
    ((3,), 3, 5, 16, torch.bfloat16, True),
    ((2, 4), TILE, TILE, 24, torch.float16, True),
    ((3,), TILE + 1, 2 * TILE + 1, 16, torch.float32, True),
    ((), TILE + 1, 2 * TILE + 1, 128, torch.bfloat16, False),
    ((2, 4), 300, 70, 1, torch.float16, False),
    ((), 300, 70, 256, torch.float32, True),
    ((3,), 9, 3 * TILE, 24, torch.float16, True),
]


@on_devices
@both
def test_error_is_at_most_twice_that_of_plain_attention(flash, device):
    for heads, Nq, Nk, D, dtype, causal in CASES:
        shapes = [(*heads, Nq, D), (*heads, Nk, D), (*heads, Nk, D), (*heads, Nq, D)]
        tensors = [randn(*x, seed=at, dtype=dtype, device=device) for at, x in enumerate(shapes)]
        assert complaint(flash, *tensors, causal) is None, (heads, Nq, Nk, D, dtype, causal)


@pytest.mark.parametrize("causal", [False, True])
def test_plain_attention_is_pytorchs(causal):
    q, k, v, do = randn(4, 2, 3, 9, 5)
    ours = output_and_gradients(attention, q, k, v, do, causal)
    torchs = output_and_gradients(
        lambda q, k, v, causal: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
        *(q, k, v, do, causal),
    )
    torch.testing.assert_close(ours, torchs, rtol=1e-12, atol=1e-12)
    assert torch.allclose(exact(q, k, v, causal), ours["o"], rtol=1e-12, atol=1e-12)


@both
def test_scores_far_from_zero(flash):
    """exp(2000) would be infinite; a running maximum from 0 would leave nothing of exp(-2000)."""
    q, k, v = torch.full((3, 4), 1e3), torch.ones(5, 4), torch.arange(20.0).view(5, 4)
    for sign in (1, -1):
        torch.testing.assert_close(flash(sign * q, k, v), v.mean(0).expand(3, 4))


# Gradients


@both
def test_gradients_of_views_and_expanded_gradients(flash):
    """Heads as a layer's output has them, and the gradient that sum() gives: one number."""
    x, found = randn(2, 300, 3, 4, 8), []
    for attend in (flash, exact):
        leaf = x.clone().requires_grad_()
        attend(*(part.transpose(1, 2) for part in leaf.unbind(2)), True).sum().backward()
        found.append(leaf.grad)
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


@both
def test_differentiable_once_and_only_where_wanted(flash):
    q, k, v = randn(3, 2, 10, 8)
    flash(q, k.requires_grad_(), v).sum().backward()
    assert (q.grad, v.grad, k.grad.shape) == (None, None, (2, 10, 8))
    slope = torch.autograd.grad(flash(q, k, v).square().sum(), k, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


@both
def test_autocast_rounds_no_scores(flash):
    """Inside, products would be bfloat16, with errors of 1/256."""
    inputs, found = randn(4, 2, 300, 16).float(), []
    for inside in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            found.append(output_and_gradients(flash, *inputs, True))
    torch.testing.assert_close(*found, rtol=0, atol=0)


# What is kept, and memory


@both
def test_kept_are_q_k_v_o_and_a_number_for_each_row(flash):
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = (randn(2, 4, 300, 16, dtype=dtype, grad=True) for _ in range(3))
        kept = [(math.prod(x.shape), x.dtype) for x in measure_saved(flash, q, k, v, True)]
        assert kept == [(q.numel(), dtype)] * 4 + [(2 * 4 * 300, torch.float32)]
    o = flash(q, k, v)
    assert all(x is not None for x in o.grad_fn.saved_tensors)


def extra_bytes(attend, length, causal=False):
    """The most that forward and backward have beyond what was there before."""
    q, k, v = (torch.ones(length, 64, requires_grad=True) for _ in range(3))
    with watch(nn.Identity()) as timeline:
        attend(q, k, v, causal).sum().backward()
    return max(timeline.totals) - timeline.totals[0]


@both
def test_extra_memory_grows_linearly(flash):
    once, twice = (extra_bytes(flash, length, causal=True) for length in (512, 1024))
    assert twice <= 2 * once


# Mistakes

X = torch.zeros(2, 4, 10, 8)


@pytest.mark.parametrize(
    ("q", "k", "v", "says"),
    [
        (X[0, 0, 0], X, X, r"expected q \(..., Nq, D\), .* got q \(8,\)"),
        (X, X[0], X[0], "is an axis missing or swapped"),
        (X, X.mT, X.mT, "is an axis missing or swapped"),
        (X, X, X[:, :, :9], "is an axis missing or swapped"),
        (X, X[:, :2], X[:, :2], "is an axis missing or swapped"),
        (X, X[:, :, :0], X[:, :, :0], "expected at least one key"),
        (X, X.double(), X, "got torch.float32, torch.float64, torch.float32: convert them"),
        (X.long(), X.long(), X.long(), "of one floating-point dtype, got torch.int64"),
    ],
)
@all_three
def test_mistakes_are_named(attend, q, k, v, says):
    with pytest.raises(ValueError, match=says):
        attend(q, k, v)
