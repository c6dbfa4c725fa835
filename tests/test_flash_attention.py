"""ddpkit.flash_attention against PyTorch's attention in float64: errors, what is kept, what is computed, memory."""

import itertools
import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from ddpkit.flash_attention import (
    TILE,
    FlashAttention,
    attention,
    flash_attention,
    one_loop_attention,
    tile_rows,
)
from ddpkit.models import GPT, mean_loss, torch_attention
from ddpkit.tools.memory import measure_saved, watch

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
]


def randn(*shape, seed=0, **options):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(**options)


# Errors


def all_pairs(axes):
    """Cases in which any two values of any two axes meet; greedily few. axes: {name: values}."""
    draw = random.Random(0)
    names = list(axes)

    def pairs(case):
        return set(itertools.combinations(case.items(), 2))

    def with_pair(pair):
        return {name: draw.choice(axes[name]) for name in names} | dict(pair)

    missing = {((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in axes[a] for y in axes[b]}
    while missing:
        pair = min(missing, key=str)
        best = max((with_pair(pair) for _ in range(30)), key=lambda case: len(pairs(case) & missing))
        missing -= pairs(best)
        yield best


AXES = {
    "length": [(1, 1), (3, 5), (TILE, TILE), (TILE + 1, 2 * TILE + 1), (300, 70), (TILE - 1, 3 * TILE)],
    "D": [16, 24, 64, 128, 256],
    "heads": [((), ()), ((3,), (3,)), ((2, 4), (2, 2)), ((6,), (2,)), ((5,), (1,))],  # of q; of k and v
    "dtype": [torch.float32, torch.bfloat16, torch.float16],
    "causal": [False, True],
    "mask": ["none", "bool", "keys", "added", "of each head"],
    "scale": [None, 0.5],
}
CASES = list(all_pairs(AXES))


def make_mask(kind, shape, dtype):
    """shape: of the scores. Some queries see nothing at all under "bool" and "of each head"."""
    queries, keys = shape[-2:]
    if kind == "none":
        return None
    if kind == "added":
        return randn(queries, keys, seed=1).to(dtype)
    if kind == "keys":
        return torch.arange(keys) < max(1, keys - 3)
    mask = randn(*(shape if kind == "of each head" else (queries, keys)), seed=1) > -0.5
    mask[..., queries // 2, :] = False
    return mask


def exact(q, k, v, causal, mask, scale):
    """PyTorch's, with its plainest kernel."""
    if causal or mask is not None:
        sees = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
        sees = sees.tril() if causal else sees
        added = torch.zeros((), dtype=q.dtype, device=q.device) if mask is None or mask.dtype == torch.bool else mask
        sees = sees & mask if mask is not None and mask.dtype == torch.bool else sees
        mask = torch.where(sees, added.to(q.dtype), -math.inf)
    if q.ndim > 3 and mask is not None:
        mask = mask.expand(*q.shape[:-1], k.shape[-2])
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=q.ndim > 2)


def output_and_gradients(fn, tensors, do, **options):
    q, k, v = (x.detach().requires_grad_() for x in tensors)
    o = fn(q, k, v, **options)
    return {"o": o.detach()} | dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, (q, k, v), do), strict=True))


def errors(got, right):
    """Root mean squares: of thousands of rounding errors, the largest is a matter of luck."""
    return {name: (got[name].double() - right[name]).square().mean().sqrt().item() for name in right}


def rounding(q, k, v, causal, mask, scale, do):
    """The floor of all bounds: fp32's eps times the magnitudes of what each result adds up, and the result's own.

    A weight's relative error is that of its exponent, s: eps times the magnitudes of what s adds up. dp and delta, of
    which ds is the difference, are sums of their own. Where plain attention has less, it is by luck.
    """
    if q.ndim > 2:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], dim=-3) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with_unit_values = torch.eye(k.shape[-2], dtype=q.dtype, device=q.device).expand(*k.shape[:-1], -1)
    p = exact(q, k, with_unit_values, causal, mask, q.shape[-1] ** -0.5 if scale is None else scale)
    p = p * (2 + q.abs() @ k.abs().mT * scale)
    dp = do.abs() @ v.abs().mT
    ds = p * (dp + (p * dp).sum(-1, keepdim=True)) * scale
    return {"o": p @ v.abs(), "dq": ds @ k.abs(), "dk": ds.mT @ q.abs(), "dv": p.mT @ do.abs()}


def name_of(case):
    return " ".join(str(value).removeprefix("torch.") for value in case.values())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_error_is_at_most_twice_that_of_plain_attention(case, device):
    (queries, keys), (q_heads, k_heads), dtype = case["length"], case["heads"], case["dtype"]
    shapes = [(*q_heads, queries, case["D"]), *[(*k_heads, keys, case["D"])] * 2, (*q_heads, queries, case["D"])]
    *tensors, do = (randn(*shape, seed=i).to(device, dtype) for i, shape in enumerate(shapes))
    mask = make_mask(case["mask"], (*q_heads, queries, keys), dtype)
    mask = None if mask is None else mask.to(device)
    options = {"causal": case["causal"], "mask": mask, "scale": case["scale"]}
    ours = output_and_gradients(flash_attention, tensors, do, **options)
    plain = output_and_gradients(attention, tensors, do, **options)
    right = output_and_gradients(exact, [x.double() for x in tensors], do.double(), **options)
    assert {name: (x.dtype, x.shape) for name, x in ours.items()} == {
        name: (dtype, x.shape) for name, x in right.items()
    }
    q, k, v = (x.double() for x in tensors)
    magnitudes = rounding(q, k, v, case["causal"], mask, case["scale"], do.double())
    allowed = errors(plain, right)
    for name, error in errors(ours, right).items():
        floor = torch.finfo(torch.float32).eps * magnitudes[name].square().mean().sqrt().item()
        floor += torch.finfo(dtype).eps * right[name].square().mean().sqrt().item()
        assert error <= 2 * allowed[name] + floor, (name, error, allowed[name], floor)


@pytest.mark.parametrize("case", CASES[::3], ids=name_of)
def test_plain_attention_is_pytorchs(case):
    (queries, keys), (q_heads, k_heads) = case["length"], case["heads"]
    tensors = [randn(*q_heads, queries, case["D"]), *(randn(*k_heads, keys, case["D"], seed=i) for i in (1, 2))]
    mask = make_mask(case["mask"], (*q_heads, queries, keys), torch.float64)
    options = {"causal": case["causal"], "mask": mask, "scale": case["scale"]}
    do = randn(*tensors[0].shape, seed=3)
    right = output_and_gradients(exact, tensors, do, **options)
    assert max(errors(output_and_gradients(attention, tensors, do, **options), right).values()) < 1e-12


# Gradients


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", ["none", "bool", "added"])
def test_gradients_are_slopes(causal, mask):
    q, k, v = (randn(*shape, seed=i).requires_grad_() for i, shape in enumerate([(4, 5, 3), (2, 7, 3), (2, 7, 3)]))
    mask = make_mask(mask, (4, 5, 7), torch.float64)
    assert torch.autograd.gradcheck(lambda *x: flash_attention(*x, causal, mask=mask), (q, k, v))


def test_gradients_of_views_and_expanded_gradients():
    """Heads as a layer's output has them, and the gradient that sum() gives, which is one number."""
    x = randn(2, 300, 3, 4, 8)
    found = []
    for fn in (flash_attention, exact_causal):
        leaf = x.clone().requires_grad_()
        fn(*(part.transpose(1, 2) for part in leaf.unbind(2)), True).sum().backward()
        found.append(leaf.grad)
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


def exact_causal(q, k, v, causal):
    return exact(q, k, v, causal, None, None)


def test_only_what_requires_a_gradient_gets_one():
    q, k, v = randn(3, 2, 10, 8)
    flash_attention(q, k.requires_grad_(), v).sum().backward()
    assert (q.grad, v.grad, k.grad.shape) == (None, None, (2, 10, 8))
    with torch.no_grad():
        assert not flash_attention(q, k, v).requires_grad


def test_a_function_of_four_arguments():
    q, k, v = randn(3, 2, 10, 8).requires_grad_().unbind()
    torch.testing.assert_close(FlashAttention.apply(q, k, v, True), exact_causal(q, k, v, True))
    assert torch.autograd.gradcheck(FlashAttention.apply, (q[0, :3], k[0, :3], v[0, :3]))


def test_backward_of_backward_is_refused():
    q, k, v = randn(3, 2, 10, 8).requires_grad_().unbind()
    [slope] = torch.autograd.grad(flash_attention(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


def test_autocast_rounds_no_scores():
    """Inside, products would be bfloat16, with errors of 1/256; outside, they are exact to 1e-6."""
    q, k, v = (x.float().requires_grad_() for x in randn(3, 2, 300, 16))
    with torch.autocast("cpu", torch.bfloat16):
        o = flash_attention(q, k, v, True)
        grads = torch.autograd.grad(o, (q, k, v), torch.ones_like(o))
    right = output_and_gradients(
        exact_causal, [x.double() for x in (q, k, v)], torch.ones_like(o).double(), causal=True
    )
    assert o.dtype == torch.float32
    for got, expected in zip((o, *grads), right.values(), strict=True):
        torch.testing.assert_close(got.detach().double(), expected, rtol=1e-4, atol=1e-4)


def test_a_gpt_trains_with_it():
    losses = []
    for fn in (flash_attention, torch_attention):
        torch.manual_seed(0)
        gpt = GPT(vocabulary=11, context=20, width=16, heads=2, attention=fn).double()
        tokens = torch.arange(42).view(2, 21) % 11
        loss = mean_loss(gpt(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        losses.append([loss, *(p.grad for p in gpt.parameters() if p.requires_grad)])
    torch.testing.assert_close(*losses, rtol=1e-9, atol=1e-12)


# One loop


@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (4, 9), (9, 4), (1, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_one_loop(queries, keys, causal):
    q, k, v = randn(queries, 5), randn(keys, 5, seed=1), randn(keys, 5, seed=2)
    torch.testing.assert_close(one_loop_attention(q, k, v, causal), exact_causal(q, k, v, causal), rtol=0, atol=1e-13)


@pytest.mark.parametrize("length", [1, 2, 3, TILE + 1, TILE + 2])
def test_a_last_tile_of_few_queries_sees_no_future(length):
    """Where only one score of a tile is in the future: it is large, and its value is 1."""
    q, k = randn(length, 16), randn(length, 16)
    k[-1] = 100 * q[-2 % length]
    v = torch.zeros(length, 16, dtype=torch.float64)
    v[-1] = 1
    assert not flash_attention(q, k, v, causal=True)[:-1].any()


def test_scores_that_overflow_exp():
    q, k, v = randn(30, 4) * 100, randn(20, 4, seed=1) * 100, randn(20, 4, seed=2)
    for fn in (one_loop_attention, attention, flash_attention):
        torch.testing.assert_close(fn(q, k, v), exact(q, k, v, False, None, None), rtol=0, atol=1e-9)


def test_scores_far_below_zero():
    """A running maximum that begins with 0 would leave exp(-2000) of them, and so nothing."""
    q, k, v = -torch.full((3, 4), 1e3), torch.ones(5, 4), torch.arange(20.0).view(5, 4)
    for fn in (one_loop_attention, attention, flash_attention):
        torch.testing.assert_close(fn(q, k, v), v.mean(0).expand(3, 4))


# Queries that see nothing


@pytest.mark.parametrize("fn", [attention, flash_attention])
@pytest.mark.parametrize("kind", ["bool", "added"])
def test_a_query_that_sees_nothing(fn, kind):
    """It has zeros, gives and gets no gradient, and the others don't notice."""
    q, k, v = (x.requires_grad_() for x in randn(3, 2, 300, 8))
    sees = torch.ones(300, 300, dtype=torch.bool)
    sees[7] = sees[299] = False
    mask = sees if kind == "bool" else torch.where(sees, 0.0, -math.inf)
    o = fn(q, k, v, mask=mask)
    assert not o[:, [7, 299]].any()
    gradients = torch.autograd.grad(o.sum(), (q, k, v))
    others = [row for row in range(300) if row not in (7, 299)]
    o_others = fn(q[:, others], k, v)
    torch.testing.assert_close(o[:, others], o_others)
    torch.testing.assert_close(gradients, torch.autograd.grad(o_others.sum(), (q, k, v)))


@pytest.mark.parametrize("fn", [attention, flash_attention])
def test_nothing_at_all(fn):
    q, none = randn(2, 5, 8).requires_grad_(), randn(2, 0, 8).requires_grad_()
    o = fn(q, none, none)
    assert (o.shape, o.any().item()) == ((2, 5, 8), False)
    o.sum().backward()
    assert not q.grad.any()
    assert fn(none, q, q).shape == (2, 0, 8)
    assert fn(q[:0], q[:0], q[:0]).shape == (0, 5, 8)


# What is kept, and memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_are_q_k_v_o_and_a_number_for_each_row(dtype):
    q, k, v = (randn(2, heads, 300, 16, dtype=dtype).requires_grad_() for heads in (4, 2, 2))
    kept = [(each.shape, each.dtype) for each in measure_saved(flash_attention, q, k, v, True)]
    assert kept[:4] == [(x.shape, dtype) for x in (q, k, v, q)]
    [(shape, lse_dtype)] = kept[4:]
    assert (math.prod(shape), lse_dtype) == (2 * 4 * 300, torch.float32)


def extra_bytes(fn, length, D, causal=False, device="meta"):
    """The most that forward and backward have beyond what was there before; on the meta device nothing is computed."""
    q, k, v = (torch.ones(length, D, device=device, requires_grad=True) for _ in range(3))
    with watch(nn.Identity()) as timeline:
        fn(q, k, v, causal).sum().backward()
    return max(timeline.totals) - timeline.totals[0]


@pytest.mark.parametrize("fn", [attention, flash_attention])
@pytest.mark.parametrize("causal", [False, True])
def test_extra_memory_is_the_same_where_something_is_computed(fn, causal):
    assert extra_bytes(fn, 600, 16, causal, "cpu") == extra_bytes(fn, 600, 16, causal)


@pytest.mark.parametrize("causal", [False, True])
def test_extra_memory_grows_linearly(causal):
    extra = [extra_bytes(flash_attention, length, 64, causal) for length in (1024, 2048, 4096, 8192)]
    assert all(twice <= 2 * once for once, twice in itertools.pairwise(extra)), extra


def test_extra_memory_is_a_tenth_of_plain_attentions_at_most():
    assert extra_bytes(flash_attention, 4096, 64) * 10 <= extra_bytes(attention, 4096, 64)


# Tiles


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (255, 257), (600, 600), (300, 1000), (1000, 300), (256, 512)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("group", [1, 3, 256, 300])
def test_tiles_cover_what_is_seen_once(queries, keys, causal, group):
    times = torch.zeros(queries, keys, dtype=torch.int64)
    for rows, tiles in tile_rows(queries, keys, causal, group):
        assert (rows.stop - rows.start) * group <= TILE + group - 1
        for columns in tiles:
            assert 0 < columns.stop - columns.start <= TILE
            assert not causal or columns.stop <= rows.stop
            times[rows, columns] += 1
    assert times.max() == 1
    seen = torch.ones_like(times).tril() if causal else torch.ones_like(times)
    assert times[seen.bool()].all()


def test_causal_tiles_by_hand():
    tiles = {(r.start, r.stop): [(c.start, c.stop) for c in columns] for r, columns in tile_rows(600, 600, True)}
    assert tiles == {
        (0, 256): [(0, 256)],
        (256, 512): [(0, 256), (256, 512)],
        (512, 600): [(0, 256), (256, 512), (512, 600)],
    }


class Multiplications(TorchDispatchMode):
    """Counts those of matrix products."""

    count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.overloadpacket in (torch.ops.aten.baddbmm, torch.ops.aten.baddbmm_):
            heads, rows, inner = args[1].shape
            self.count += heads * rows * inner * args[2].shape[2]
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("causal", [False, True])
def test_tiles_in_the_future_are_not_computed(causal):
    """Of 4 × 4 tiles, 10 are left. Forward has 2 products, backward 5."""
    q, k, v = (x.requires_grad_() for x in randn(3, 2, 4 * TILE, 16))
    one_product = 2 * (10 if causal else 16) * TILE * TILE * 16
    with Multiplications() as forward:
        o = flash_attention(q, k, v, causal)
    with Multiplications() as backward:
        o.sum().backward()
    assert (forward.count, backward.count) == (2 * one_product, 5 * one_product)


# Mistakes

X = torch.zeros(2, 4, 10, 8)


@pytest.mark.parametrize(
    ("q", "k", "v", "mask", "says"),
    [
        (X[0, 0, 0], X, X, None, r"expected q \(..., Nq, D\), .* got q \(8,\)"),
        (X, X[0], X[0], None, "is an axis missing or swapped"),
        (X, X.mT, X.mT, None, "is an axis missing or swapped"),
        (X, X, X[:, :, :9], None, "is an axis missing or swapped"),
        (X, X[:1], X[:1], None, "expected leading axes alike, but for q's heads"),
        (X, X[:, :3], X[:, :3], None, "expected leading axes alike, but for q's heads"),
        (X[:, :2], X, X, None, "expected leading axes alike, but for q's heads"),
        (X, X.double(), X, None, "got torch.float32, torch.float64, torch.float32: convert them"),
        (X.long(), X.long(), X.long(), None, "of one floating-point dtype, got torch.int64"),
        (X, X, X, torch.ones(10, 10, dtype=torch.int64), r"got torch.int64: mask.bool\(\)"),
        (X, X, X, torch.ones(10, 9), r"broadcastable to \(2, 4, 10, 10\), got \(10, 9\)"),
        (X, X, X, torch.ones(2, 10, 10), r"broadcastable to \(2, 4, 10, 10\), got \(2, 10, 10\)"),
        (X, X, X, torch.ones(1, 1, 1, 1, 1), r"got \(1, 1, 1, 1, 1\)"),
    ],
)
@pytest.mark.parametrize("fn", [attention, flash_attention])
def test_mistakes_are_named(fn, q, k, v, mask, says):
    with pytest.raises(ValueError, match=says):
        fn(q, k, v, mask=mask)


def test_a_mask_that_wants_a_gradient():
    mask = torch.zeros(10, 10, requires_grad=True)
    with pytest.raises(ValueError, match=r"gives its mask no gradient: detach\(\) it, or use attention"):
        flash_attention(X, X, X, mask=mask)
    attention(randn(10, 8), randn(10, 8, seed=1), randn(10, 8, seed=2), mask=mask).square().sum().backward()
    assert mask.grad.any()
