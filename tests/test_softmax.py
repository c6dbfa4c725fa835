"""ddpkit.softmax: against float64 and torch.softmax; parts merged in any order; numbers read and written, counted."""

import functools
import math
import re
import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import twin

from ddpkit import launch
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

cloudpickle.register_pickle_by_value(
    sys.modules[__name__]
)  # functions travel as those of a notebook do
always_the_same = settings(derandomize=True, deadline=None, database=None, max_examples=200)

INF, NAN = math.inf, math.nan
DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()
LESS_THAN_FLOAT64 = [torch.float16, torch.bfloat16, torch.float32]
FLOATS = [*LESS_THAN_FLOAT64, torch.float64]


def blocks_of(block):
    function = functools.partial(blockwise_softmax, block=block)
    function.__name__ = f"blockwise_softmax_{block}"
    return function


SAFE = [safe_softmax, online_softmax, fused_softmax, blocks_of(1), blocks_of(3), blocks_of(1000)]
EVERY = [naive_softmax, *SAFE]

numbers = st.floats(-60, 60) | st.floats(-1e4, 1e4) | st.just(-INF)
rows = st.lists(numbers, min_size=1, max_size=40)


def exact(x: torch.Tensor) -> torch.Tensor:
    """In float64; torch.softmax gives NaN for a row of -inf only, ours zeros."""
    return x.double().softmax(-1).nan_to_num(0)


def same_where_nan(got, expected):
    torch.testing.assert_close(got, expected, equal_nan=True, check_dtype=False)


# Values


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("function", EVERY, ids=lambda f: f.__name__)
def test_rows_of_any_shape(function, dtype, device):
    """Each of up to 8 sums rounds once; so do a power, whose exponent is above -8 and rounds too, and a quotient."""
    for shape in [(7,), (1,), (4, 6), (2, 1, 5), (0, 3), (3, 0), (0,)]:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(
            device, dtype
        )
        before = x.clone()
        a = function(x)
        assert (a.dtype, a.device, a.shape) == (dtype, x.device, x.shape)
        torch.testing.assert_close(a.double(), exact(x), rtol=16 * torch.finfo(dtype).eps, atol=0)
        assert torch.equal(x, before)
    with_gaps = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)).to(device, dtype).T
    error = (function(with_gaps).double() - exact(with_gaps)).abs()
    assert (error <= 16 * torch.finfo(dtype).eps * exact(with_gaps)).all()


@pytest.mark.parametrize("function", SAFE, ids=lambda f: f.__name__)
@given(row=rows, dtype=st.sampled_from(LESS_THAN_FLOAT64))
@always_the_same
def test_error_is_at_most_twice_that_of_the_safe_softmax(function, row, dtype):
    """And as much again as four roundings of the largest, for rows in which the safe softmax happens to have none: a
    correction rounds a power and a product more, but where it corrects much, little is left of what it corrects.

    The safe softmax itself: the sum of N numbers rounds N times, by half an ulp; exponent, power and quotient once.
    """
    x = (
        torch.tensor(row, dtype=torch.float64)
        .clamp(-6e4, 6e4)
        .where(torch.tensor(row) > -INF, -INF)
        .to(dtype)
    )
    rounding = torch.finfo(dtype).eps * exact(x).max()
    error, plain = ((each(x).double() - exact(x)).abs().max() for each in (function, safe_softmax))
    assert plain <= (4 + len(row) / 2) * rounding
    assert error <= 2 * plain + 4 * rounding


@pytest.mark.parametrize("function", SAFE[:4], ids=lambda f: f.__name__)
@pytest.mark.parametrize("order", ["rising", "falling", "shuffled"])
def test_long_rows(function, order):
    """N sums one after the other round N times: the error, by chance up or down, grows as √N, its bound as N."""
    x = torch.linspace(-20, 20, 2000)
    if order == "shuffled":
        x = x[torch.randperm(2000, generator=torch.Generator().manual_seed(0))]
    elif order == "falling":
        x = x.flip(0)
    eps = torch.finfo(torch.float32).eps
    assert (function(x).double() - exact(x)).abs().max() <= 2000 * eps * exact(x).max()


@pytest.mark.parametrize("function", SAFE, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", FLOATS)
def test_sums_of_many_small_numbers_are_kept_in_float32(function, dtype):
    """4096 ones: bf16 alone counts to 256, fp16 to 2048."""
    assert function(torch.zeros(4096, dtype=dtype)).eq(1 / 4096).all()


@pytest.mark.parametrize("function", SAFE, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([1000.0, 1000.0], [0.5, 0.5]),
        ([-1000.0, -1000.0], [0.5, 0.5]),
        ([-1000.0, 1000.0], [0.0, 1.0]),
        ([-INF, -INF, -INF], [0.0, 0.0, 0.0]),
        ([-INF, 3.0, -INF, 3.0], [0.0, 0.5, 0.0, 0.5]),
        ([3.0, 3.0, -INF, -INF], [0.5, 0.5, 0.0, 0.0]),
        ([-INF], [0.0]),
        ([7.0], [1.0]),
        ([1.0, INF, 2.0], [NAN, NAN, NAN]),
        ([-INF, INF], [NAN, NAN]),
        ([NAN, 1.0, 2.0], [NAN, NAN, NAN]),
        ([1.0, 2.0, 3.0, NAN, -INF], [NAN] * 5),
        ([], []),
    ],
    ids=str,
)
def test_special_rows(function, row, expected):
    same_where_nan(function(torch.tensor(row)), torch.tensor(expected))


@pytest.mark.parametrize(
    "row", [[-INF, -INF], [-INF], [1.0, INF, 2.0], [NAN, 1.0], [-INF, INF], [-INF, 1.0], [7.0], []]
)
def test_special_rows_of_torch(row):
    """As the table says: the same but for rows that are all masked."""
    torchs = torch.tensor(row).softmax(-1)
    if row and all(number == -INF for number in row):
        assert torchs.isnan().all()
    else:
        same_where_nan(safe_softmax(torch.tensor(row)), torchs)


def test_naive_overflows_where_it_says():
    for dtype, last in ((torch.float16, 11), (torch.float32, 88)):
        assert naive_softmax(torch.tensor([last, last - 1], dtype=dtype)).isfinite().all()
        assert naive_softmax(torch.tensor([last + 1, last], dtype=dtype))[0].isnan()
    assert naive_softmax(torch.tensor([-1000.0, -1000.0])).isnan().all()


def test_one_masked_row_among_others():
    x = torch.tensor([[1.0, 2.0], [-INF, -INF], [3.0, -INF]])
    for function in SAFE:
        torch.testing.assert_close(function(x), exact(x).float())


# With values


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_weighted_mean(dtype, device):
    for shape, width in [((6,), 4), ((3, 5), 2), ((2, 3, 4), 1), ((3, 0), 2), ((0, 4), 3)]:
        generator = torch.Generator().manual_seed(width)
        x = (4 * torch.randn(shape, generator=generator)).to(device, dtype)
        v = torch.randn(*shape, width, generator=generator).to(device, dtype)
        mean = online_weighted_mean(x, v)
        assert (mean.dtype, mean.shape) == (dtype, (*shape[:-1], width))
        expected = (x.double().softmax(-1).unsqueeze(-2) @ v.double()).squeeze(-2)
        torch.testing.assert_close(mean, expected.to(dtype))


def test_weighted_mean_of_masked_numbers():
    v = torch.tensor([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0]])
    assert online_weighted_mean(torch.tensor([-INF, -INF, -INF]), v).tolist() == [0.0, 0.0]
    assert online_weighted_mean(torch.tensor([-INF, 5.0, -INF]), v).tolist() == [2.0, 20.0]
    assert online_weighted_mean(torch.tensor([-2000.0, 5.0, 5.0]), v).tolist() == [3.0, 30.0]


def test_summaries_are_what_they_say():
    m, d = summarize(torch.tensor([math.log(2), math.log(4), -INF]))
    assert (m.item(), d.item()) == (pytest.approx(math.log(4)), pytest.approx(1.5))
    x, v = (
        torch.tensor([[0.0, 0.0], [-INF, 1.0], [-INF, -INF]]),
        torch.tensor([[1.0, 2.0], [10.0, 20.0]]),
    )
    m, d, o = summarize(x, v)
    assert (m.tolist(), d.tolist()) == ([0.0, 1.0, -INF], [2.0, 1.0, 0.0])
    assert o.tolist() == [[11.0, 22.0], [10.0, 20.0], [0.0, 0.0]]
    m, d, o = summarize(torch.empty(3, 0), torch.empty(0, 2))
    assert (m.tolist(), d.tolist(), o.tolist()) == ([-INF] * 3, [0.0] * 3, [[0.0] * 2] * 3)
    assert [part.dtype for part in summarize(x.bfloat16(), v.bfloat16())] == [torch.float32] * 3


# Merging, in any order, of any split, along any tree


def near(got, parts, row, values):
    """As near to the whole row's triple as any tree of merges must come, in float64.

    A number passes through at most `parts` merges, each of which rounds what it brings by an ulp three times: a power,
    a product, a sum. An exponent below 0 by a, whose own rounding is at most a/2 ulp, weighs e⁻ᵃ, and a·e⁻ᵃ < 1; on the
    way to the root the a of all merges add up to the distance from the maximum. Adding up the row rounds once for each.
    """
    x = torch.tensor(row, dtype=torch.float64)
    if not (x > -INF).any():
        assert [part.tolist() for part in got] == [-INF, 0.0, [0.0, 0.0]]
        return
    weights = [math.exp(number - max(row)) for number in row]
    bound = torch.finfo(torch.float64).eps * (4 * parts + 4 * len(row))
    assert got[0] == x.max()
    assert abs(got[1].item() - math.fsum(weights)) <= bound * math.fsum(weights)
    for column in range(2):
        terms = [
            weight * value[column].item() for weight, value in zip(weights, values, strict=True)
        ]
        assert abs(got[2][column].item() - math.fsum(terms)) <= bound * math.fsum(map(abs, terms))


@given(data=st.data())
@always_the_same
def test_merging_along_any_tree(data):
    row = data.draw(rows)
    values = torch.randn(
        len(row), 2, dtype=torch.float64, generator=torch.Generator().manual_seed(len(row))
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(row)), max_size=8)))
    x = torch.tensor(row, dtype=torch.float64)
    parts = [
        summarize(x[start:stop], values[start:stop])
        for start, stop in zip([0, *cuts], [*cuts, len(row)], strict=True)
    ]
    many = len(parts)
    while len(parts) > 1:
        first = parts.pop(data.draw(st.integers(0, len(parts) - 1)))
        second = parts.pop(data.draw(st.integers(0, len(parts) - 1)))
        parts.append(merge(first, second))
    near(parts[0], many, row, values)


@given(row=rows, cut=st.integers(0, 40))
@always_the_same
def test_merging_either_way_round_gives_the_same_bits(row, cut):
    x = torch.tensor(row)
    a, b = summarize(x[:cut]), summarize(x[cut:])
    for one, other in zip(merge(a, b), merge(b, a), strict=True):
        assert torch.equal(one, other)


@given(row=rows)
@always_the_same
def test_merging_with_nothing_changes_nothing(row):
    nothing = summarize(torch.tensor([]))
    assert [part.item() for part in nothing] == [-INF, 0.0]
    pair = summarize(torch.tensor(row))
    assert [part.item() for part in merge(pair, nothing)] == [part.item() for part in pair]


def test_merging_tensors_of_pairs():
    """Shapes that broadcast; pairs as views of one tensor."""
    x = torch.randn(3, 4, 10, generator=torch.Generator().manual_seed(0))
    merged = merge(torch.stack(summarize(x[..., :3])), torch.stack(summarize(x[..., 3:])))
    torch.testing.assert_close(merged, summarize(x))
    m, d = merge((torch.zeros(3, 1), torch.ones(3, 1)), (torch.zeros(4), torch.ones(4)))
    assert (m.shape, d.tolist()) == ((3, 4), [[2.0] * 4] * 3)


def test_merging_infinity_and_nan():
    for number in (INF, NAN):
        bad = summarize(torch.tensor([number, 1.0]))
        for other in (summarize(torch.tensor([2.0])), summarize(torch.tensor([-INF])), bad):
            assert merge(bad, other)[1].isnan()
            assert merge(other, bad)[1].isnan()


# Numbers read and written


@pytest.mark.parametrize(
    ("function", "passes"),
    [
        (naive_softmax, 2),
        (safe_softmax, 3),
        (online_softmax, 2),
        (blocks_of(1), 2),
        (blocks_of(8), 2),
        (blocks_of(100), 2),
        (fused_softmax, 1),
    ],
    ids=lambda argument: getattr(argument, "__name__", argument),
)
@pytest.mark.parametrize("shape", [(20,), (3, 20)])
def test_traffic(function, passes, shape):
    x = torch.randn(shape)
    with Traffic() as traffic:
        function(x)
    assert (traffic.reads, traffic.writes) == (passes * x.numel(), x.numel())


@pytest.mark.parametrize("leading", [(), (3,)])
def test_traffic_of_the_weighted_mean(leading):
    rows = math.prod(leading)
    with Traffic() as traffic:
        online_weighted_mean(torch.randn(*leading, 20), torch.randn(*leading, 20, 4))
    assert (traffic.reads, traffic.writes) == (rows * (20 + 20 * 4), rows * 4)


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


def across_ranks(slices):
    """Each rank has its own part of three rows, one of them masked on a rank, one on all; near as the others above."""
    wrong, rank = twin.Complaints(), dist.get_rank()
    for dtype in FLOATS:
        whole = torch.randn(3, sum(slices), generator=torch.Generator().manual_seed(0)).to(dtype)
        whole[0] += torch.arange(sum(slices)) * 100
        whole[1, : slices[0]] = -INF
        whole[2] = -INF
        part = softmax_across_ranks(whole.split(slices, dim=1)[rank])
        expected = exact(whole).split(slices, dim=1)[rank]
        error = (part.double() - expected).abs()
        wrong.unless(
            part.dtype == dtype and part.shape == expected.shape, dtype, part.dtype, part.shape
        )
        wrong.unless(
            bool((error <= 4 * torch.finfo(dtype).eps).all()),
            dtype,
            "got",
            part,
            "expected",
            expected,
        )
    return wrong


@pytest.mark.parametrize("slices", [[5], [3, 4], [1, 0, 5], [0, 2, 3, 1], [0, 0, 4]])
def test_across_ranks(slices):
    run = launch(across_ranks, slices, world_size=len(slices))
    assert list(run) == [[]] * len(slices)
    for records in run.wire:  # one collective for each dtype: a pair for each of the three rows
        assert [(record.op, record.bytes) for record in records] == [
            ("all_gather", 2 * 3 * n) for n in (4, 4, 4, 8)
        ]


def across_a_group():
    wrong, rank = twin.Complaints(), dist.get_rank()
    group = dist.new_group([2, 0])
    x = torch.full((1,), float(rank))
    if rank == 1:
        says = (
            "rank 1 called softmax_across_ranks with a group that it isn't in",
            "on the group's ranks only",
        )
        wrong.refused(softmax_across_ranks, x, group, says=says)
    else:
        expected = torch.tensor([0.0, 2.0]).softmax(0)[[rank // 2]]
        wrong.unless(torch.allclose(softmax_across_ranks(x, group), expected), "not of the group")
    return wrong


def test_across_a_group():
    assert list(launch(across_a_group, world_size=3)) == [[]] * 3


# Mistakes


@pytest.mark.parametrize("function", EVERY, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "x", [torch.arange(3), torch.tensor(1.0), torch.zeros(2, dtype=torch.complex64)], ids=str
)
def test_only_rows_of_floating_point_numbers(function, x):
    says = re.escape(
        f"rows of floating-point numbers, (..., N), got {x.dtype} of shape {tuple(x.shape)}: float"
    )
    with pytest.raises(ValueError, match=says):
        function(x)


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="a block of at least 1 number, got 0"):
        blockwise_softmax(torch.zeros(3), 0)
    one, two = summarize(torch.zeros(2)), summarize(torch.zeros(2), torch.zeros(2, 1))
    with pytest.raises(ValueError, match="two pairs or two triples, got 2 and 3 tensors"):
        merge(one, two)
