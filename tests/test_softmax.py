"""ddpkit.softmax: against float64 and torch.softmax; merged in any order; reads and writes."""

import functools
import math
import sys

import attention_cases
import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from training_cases import sent_by

from ddpkit.softmax import (
    blockwise_softmax,
    fused_softmax,
    merge,
    naive_softmax,
    online_softmax,
    online_weighted_mean,
    safe_softmax,
    softmax_across_ranks,
    summarize,
)
from ddpkit.tools.traffic import Traffic

st = pytest.importorskip("hypothesis.strategies", reason="hypothesis isn't installed")
given, settings = sys.modules["hypothesis"].given, sys.modules["hypothesis"].settings
always_the_same = settings(derandomize=True, deadline=None, database=None, max_examples=50)


INF, NAN = math.inf, math.nan
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LESS_THAN_FLOAT64 = [torch.float16, torch.bfloat16, torch.float32]
FLOATS = [*LESS_THAN_FLOAT64, torch.float64]


def blocks_of(block):
    function = functools.partial(blockwise_softmax, block=block)
    function.__name__ = f"blockwise_softmax_{block}"
    return function


SAFE = [safe_softmax, online_softmax, fused_softmax, blocks_of(1), blocks_of(3), blocks_of(1000)]
EVERY = [naive_softmax, *SAFE]
each_safe = pytest.mark.parametrize("function", SAFE, ids=lambda f: f.__name__)
each = pytest.mark.parametrize("function", EVERY, ids=lambda f: f.__name__)

numbers = st.floats(-60, 60) | st.floats(-1e4, 1e4) | st.just(-INF)
rows = st.lists(numbers, min_size=1, max_size=40)
randn = functools.partial(attention_cases.randn, dtype=torch.float32)


def exact(x):
    """In float64; torch.softmax gives NaN for a row of -inf only, ours zeros."""
    return x.double().softmax(-1).nan_to_num(0)


# Values


@pytest.mark.parametrize("device", DEVICES)
@each
def test_rows_of_any_shape(function, device):
    """Each of 8 sums or fewer rounds once; so do a power and its exponent, and a quotient."""
    with_gaps = randn(5, 8).T
    shapes = [(7,), (1,), (4, 6), (2, 1, 5), (0, 3), (3, 0), (0,)]
    for dtype in FLOATS:
        for x in [with_gaps, *(randn(*shape) for shape in shapes)]:
            x = x.to(device, dtype)
            before, a = x.clone(), function(x)
            assert (a.dtype, a.device, a.shape) == (dtype, x.device, x.shape)
            bound = 16 * torch.finfo(dtype).eps * exact(x)
            assert ((a.double() - exact(x)).abs() <= bound).all(), (dtype, x.shape)
            assert torch.equal(x, before)


@each_safe
@given(row=rows, dtype=st.sampled_from(LESS_THAN_FLOAT64))
@always_the_same
def test_error_is_at_most_twice_that_of_the_safe_softmax(function, row, dtype):
    """And four roundings of the largest, where the safe softmax happens to have none.

    A correction rounds a power and a product more, but where it corrects much, little is left of
    what it corrects. The safe softmax itself: the sum of N numbers rounds N times, by half an ulp;
    exponent, power and quotient once.
    """
    x = torch.tensor(row, dtype=torch.float64)
    x = x.clamp(-6e4, 6e4).where(x > -INF, -INF).to(dtype)
    rounding = torch.finfo(dtype).eps * exact(x).max()
    error, plain = ((f(x).double() - exact(x)).abs().max() for f in (function, safe_softmax))
    assert plain <= (4 + len(row) / 2) * rounding
    assert error <= 2 * plain + 4 * rounding


@each_safe
def test_long_rows(function):
    """N sums round N times. In bf16 alone, 512 ones would add up to 256."""
    assert function(torch.zeros(512, dtype=torch.bfloat16)).eq(1 / 512).all()
    x = torch.linspace(-20, 20, 500)
    for row in (x, x.flip(0)):
        bound = 500 * torch.finfo(torch.float32).eps * exact(row).max()
        assert (function(row).double() - exact(row)).abs().max() <= bound


@each_safe
def test_masked_rows_infinity_and_nan(function):
    """As torch.softmax, but for rows that are all masked."""
    masked = torch.tensor([[1.0, 2.0], [-INF, -INF], [3.0, -INF]])
    torch.testing.assert_close(function(masked), exact(masked).float())
    for row in ([1.0, INF, 2.0], [-INF, INF], [NAN, 1.0, 2.0], [1.0, 2.0, 3.0, NAN, -INF]):
        assert function(torch.tensor(row)).isnan().all(), row


def test_naive_overflows_where_it_says():
    for dtype, last in ((torch.float16, 11), (torch.float32, 88)):
        assert naive_softmax(torch.tensor([last, last - 1], dtype=dtype)).isfinite().all()
        assert naive_softmax(torch.tensor([last + 1, last], dtype=dtype))[0].isnan()
    assert naive_softmax(torch.tensor([-1000.0, -1000.0])).isnan().all()


# With values


@pytest.mark.parametrize("device", DEVICES)
def test_weighted_mean(device):
    for dtype in FLOATS:
        for shape, width in [((6,), 4), ((3, 5), 2), ((2, 3, 4), 1), ((3, 0), 2), ((0, 4), 3)]:
            x = (4 * randn(*shape)).to(device, dtype)
            x[..., 1:2] = -INF
            v = randn(*shape, width, seed=1).to(device, dtype)
            mean = online_weighted_mean(x, v)
            assert (mean.dtype, mean.shape) == (dtype, (*shape[:-1], width))
            expected = (x.double().softmax(-1).unsqueeze(-2) @ v.double()).squeeze(-2)
            torch.testing.assert_close(mean, expected.to(dtype))


def test_summaries_are_what_they_say():
    x = torch.tensor([[0.0, 0.0], [-INF, 1.0], [-INF, -INF]])
    v = torch.tensor([[1.0, 2.0], [10.0, 20.0]])
    m, ell, o = summarize(x, v)
    assert (m.tolist(), ell.tolist()) == ([0.0, 1.0, -INF], [2.0, 1.0, 0.0])
    assert o.tolist() == [[11.0, 22.0], [10.0, 20.0], [0.0, 0.0]]
    assert [part.tolist() for part in summarize(x)] == [m.tolist(), ell.tolist()]
    m, ell, o = summarize(torch.empty(3, 0), torch.empty(0, 2))
    assert (m.tolist(), ell.tolist(), o.tolist()) == ([-INF] * 3, [0.0] * 3, [[0.0] * 2] * 3)
    assert [part.dtype for part in summarize(x.bfloat16(), v.bfloat16())] == [torch.float32] * 3


# Merging, in any order, of any split, along any tree


def near(got, parts, row, values):
    """As near to the whole row's triple as any tree of merges must come, in float64.

    A number passes through at most `parts` merges, each of which rounds what it brings by an ulp
    three times: a power, a product, a sum. An exponent below 0 by a, whose own rounding is at most
    a/2 ulp, weighs e⁻ᵃ, and a·e⁻ᵃ < 1; on the way to the root the a of all merges add up to the
    distance from the maximum. Adding up the row rounds once for each number.
    """
    if max(row) == -INF:
        assert [part.tolist() for part in got] == [-INF, 0.0, [0.0, 0.0]]
        return
    weights = [math.exp(number - max(row)) for number in row]
    bound = torch.finfo(torch.float64).eps * (4 * parts + 4 * len(row))
    assert got[0] == max(row)
    assert abs(got[1].item() - math.fsum(weights)) <= bound * math.fsum(weights)
    for column in range(2):
        pairs = zip(weights, values[:, column].tolist(), strict=True)
        terms = [weight * value for weight, value in pairs]
        assert abs(got[2][column] - math.fsum(terms)) <= bound * math.fsum(map(abs, terms))


@given(data=st.data())
@always_the_same
def test_merging_along_any_tree(data):
    row = data.draw(rows)
    x, values = torch.tensor(row, dtype=torch.float64), randn(len(row), 2).double()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(row)), max_size=8)))
    ends = zip([0, *cuts], [*cuts, len(row)], strict=True)
    parts = [summarize(x[start:stop], values[start:stop]) for start, stop in ends]
    many = len(parts)
    while len(parts) > 1:
        first = parts.pop(data.draw(st.integers(0, len(parts) - 1)))
        second = parts.pop(data.draw(st.integers(0, len(parts) - 1)))
        parts.append(merge(first, second))
    near(parts[0], many, row, values)


@given(row=rows, cut=st.integers(0, 40))
@always_the_same
def test_merging_either_way_round_and_with_nothing(row, cut):
    """The same bits."""
    x = torch.tensor(row)
    a, b, nothing = summarize(x[:cut]), summarize(x[cut:]), summarize(torch.tensor([]))
    assert [part.item() for part in nothing] == [-INF, 0.0]
    assert all(map(torch.equal, merge(a, b), merge(b, a)))
    assert all(map(torch.equal, merge(a, nothing), a))


def test_merging_tensors_of_pairs():
    """Shapes that broadcast; pairs as views of one tensor; +inf and NaN."""
    x = randn(3, 4, 10)
    merged = merge(torch.stack(summarize(x[..., :3])), torch.stack(summarize(x[..., 3:])))
    torch.testing.assert_close(merged, summarize(x))
    m, ell = merge((torch.zeros(3, 1), torch.ones(3, 1)), (torch.zeros(4), torch.ones(4)))
    assert (m.shape, ell.tolist()) == ((3, 4), [[2.0] * 4] * 3)
    for number in (INF, NAN):
        bad = summarize(torch.tensor([number, 1.0]))
        for other in (summarize(torch.tensor([2.0])), summarize(torch.tensor([-INF])), bad):
            assert merge(bad, other)[1].isnan()
            assert merge(other, bad)[1].isnan()


# Numbers read and written: how many by whom, notebook 08 prints


def test_what_counts_as_traffic():
    with Traffic() as traffic:
        x = torch.zeros(4, 5)
        x[1:, 0] = x[0, 2]
        x[2] = 0
        _ = x + x.sum()
    assert (traffic.reads, traffic.writes) == (1, 3 + 5)
    _ = x[0]
    assert traffic.reads == 1


# Across ranks


@on_ranks(3)
def test_across_a_group_in_bf16(check, rank):
    """For each row a pair is sent, in float32. In a world and in float32: its exercise."""
    group, whole = dist.new_group([2, 0]), 3 * randn(4, 5).bfloat16()
    x = whole[:, 3 * (rank // 2) :][:, :3]
    if rank == 1:
        says = ("rank 1 called softmax_across_ranks with a group that it isn't in", "ranks only")
        check.refused(softmax_across_ranks, x, group, says=says)
        return
    found = []
    sent = sent_by(lambda: found.append(softmax_across_ranks(x, group)))
    check.same(found[0].dtype, torch.bfloat16)
    expected = exact(whole)[:, 3 * (rank // 2) :][:, :3]
    check.close(found[0], expected, 4 * torch.finfo(torch.bfloat16).eps)
    check.same([(record.op, record.bytes) for record in sent], [("all_gather", 2 * 4 * 4)])


# Mistakes


def test_mistakes_are_named():
    for x in (torch.arange(3), torch.tensor(1.0), torch.zeros(2, dtype=torch.complex64)):
        for function in EVERY:
            with pytest.raises(ValueError, match=r"floating-point numbers, \(..., N\), got"):
                function(x)
    with pytest.raises(ValueError, match="a block of at least 1 number, got 0"):
        blockwise_softmax(torch.zeros(3), 0)
