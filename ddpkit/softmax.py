"""Softmax of rows of any length: safe, online, in blocks merged in any order, across ranks.

    softmax(x)ᵢ = e^xᵢ / Σⱼ e^xⱼ = e^(xᵢ−m) / ℓ        with m = max x and ℓ = Σⱼ e^(xⱼ−m)

The pair (m, ℓ) is all that the parts of a row need to know of each other. `merge` makes the pair of
a row from those of two parts: number by number, that is online softmax; block by block, flash
attention; rank by rank, ring attention. With values v a part has a triple (m, ℓ, o), where
o = Σⱼ e^(xⱼ−m)·vⱼ, and o/ℓ is the mean of the values, weighted by the softmax.

For rows of N numbers, and values of D (`ddpkit.tools.traffic` counts):

    function                passes    reads       writes
    naive_softmax           2         2N          N          overflows
    safe_softmax            3         3N          N
    online_softmax          2         2N          N
    blockwise_softmax       2         2N          N
    fused_softmax           1         N           N          the row must fit into fast memory
    online_weighted_mean    1         N + ND      D          the softmax itself is never written

Rows are floating-point, (..., N); nothing is changed in place. m, ℓ and all that is computed with
them are float32 at least; results have the dtype of x. A row of nothing but -inf is masked: its
softmax is zeros (torch.softmax: NaN). A row with +inf or NaN in it is NaN. (naive_softmax gives
what its formula does.) ValueError: x holds no such rows.

In PyTorch: torch.softmax, one fused kernel; m + ln ℓ is torch.logsumexp, `merge` torch.logaddexp.
Milakov and Gimelshein 2018 (online softmax); Rabe and Staats 2021 (merging). Notebook 08.
"""

import functools
import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .tools.checks import check_in_group

# Number by number. x[..., i] reads from memory, a[..., i] = writes to it; the rest is in registers.


def naive_softmax(x: Tensor) -> Tensor:
    """Return e^x / Σ e^x, as the formula stands and in x's dtype: NaN where a power overflows.

    Powers overflow from x = 12 in fp16, from 89 in fp32; far below 0, all are 0, and 0/0 is NaN.
    Where the sum overflows, finite powers give 0.
    """
    _check(x)
    ell = x.new_zeros(x.shape[:-1])
    a = torch.empty_like(x)
    for i in range(x.shape[-1]):
        ell = ell + torch.exp(x[..., i])
    for i in range(x.shape[-1]):
        a[..., i] = torch.exp(x[..., i]) / ell
    return a


def safe_softmax(x: Tensor) -> Tensor:
    """Return e^(x−m) / Σ e^(x−m), no exponent above 0: three passes, maximum, sum and result."""
    m, ell = start(x)
    a = torch.empty_like(x)
    # One pass more than the formula needs: without the maximum the powers might overflow.
    for i in range(x.shape[-1]):
        m = torch.maximum(m, x[..., i])
    for i in range(x.shape[-1]):
        ell = ell + power(x[..., i], m)
    for i in range(x.shape[-1]):
        a[..., i] = normalize(power(x[..., i], m), ell)
    return a


def online_softmax(x: Tensor) -> Tensor:
    """Return softmax in two passes: the first keeps a running maximum, and the sum for it.

    When the maximum grows, the sum so far is corrected. Milakov and Gimelshein 2018, algorithm 3.
    """
    m, ell = start(x)
    a = torch.empty_like(x)
    # First pass: both at once. Second pass: the result.
    for i in range(x.shape[-1]):
        x_i = x[..., i]
        m_before = m
        m = torch.maximum(m, x_i)
        ell = ell * power(m_before, m) + power(x_i, m)
    for i in range(x.shape[-1]):
        a[..., i] = normalize(power(x[..., i], m), ell)
    return a


def online_weighted_mean(x: Tensor, v: Tensor) -> Tensor:
    """Return softmax(x)·v in one pass: what attention does for a query, x being its scores.

    v: (..., N, D), a value for each number. Returns (..., D) in the dtype of v; zeros for a masked
    row. The sum of the values is corrected as ℓ is, and divided by ℓ at the end. Notebook 09.
    """
    m, ell = start(x)
    o = ell.unsqueeze(-1).expand(*ell.shape, v.shape[-1])  # zeros
    for i in range(x.shape[-1]):
        x_i = x[..., i]
        v_i = v[..., i, :]
        m_before = m
        m = torch.maximum(m, x_i)
        correction = power(m_before, m)
        weight = power(x_i, m)
        ell = ell * correction + weight
        o = o * correction.unsqueeze(-1)
        o = o + weight.unsqueeze(-1) * v_i
    mean = torch.empty_like(o, dtype=v.dtype)
    mean[...] = normalize(o, ell.unsqueeze(-1))
    return mean


# Part by part


def summarize(x: Tensor, v: Tensor | None = None) -> tuple[Tensor, ...]:
    """Summarize a part of a row for `merge`: (m, ℓ); with values, (m, ℓ, o).

    x: (..., n), n may be 0. Returns m and ℓ of shape (...), o of shape (..., D). v: (n, D), or
    (..., n, D) for x of shape (..., q, n), whose q rows share them: o is a product of matrices.
    """
    m, _ = start(x)
    # The part's own maximum: no power overflows, whatever the other parts are.
    if x.shape[-1]:  # amax refuses an empty part, whose maximum is -inf
        m = x.amax(-1).to(m.dtype)
    weights = power(x, m.unsqueeze(-1))
    ell = weights.sum(-1)
    if v is None:
        return m, ell
    o = weights @ v.to(weights.dtype)
    return m, ell, o


def merge(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Combine the (m, ℓ) of two parts into that of both together; two (m, ℓ, o) likewise.

    m, ℓ: any shape, the same or one that broadcasts. o: one axis more. Order and brackets change no
    more than the last bits; (-inf, 0) changes nothing.
    """
    m_a, ell_a, *o_a = a
    m_b, ell_b, *o_b = b
    m = torch.maximum(m_a, m_b)
    correct_a = power(m_a, m)
    correct_b = power(m_b, m)
    ell = ell_a * correct_a + ell_b * correct_b
    if not o_a:
        return m, ell
    o = o_a[0] * correct_a.unsqueeze(-1) + o_b[0] * correct_b.unsqueeze(-1)
    return m, ell, o


def fused_softmax(x: Tensor) -> Tensor:
    """Return softmax as a kernel does if rows fit into fast memory: each read and written once."""
    row = x[...]  # the one read; a[...] = is the one write
    a = torch.empty_like(x)
    a[...] = finish(row, *summarize(row))
    return a


def blockwise_softmax(x: Tensor, block: int) -> Tensor:
    """Return softmax of rows that are read `block` numbers, 1 or more, at a time: online."""
    if block < 1:
        raise ValueError(f"expected a block of at least 1 number, got {block}. Try 128.")
    a = torch.empty_like(x)
    pair = start(x)
    blocks = [slice(first, first + block) for first in range(0, x.shape[-1], block)]
    # First pass: the pair of the whole row. Second: the softmax, block by block.
    for part in blocks:
        pair = merge(pair, summarize(x[..., part]))
    for part in blocks:
        a[..., part] = finish(x[..., part], *pair)
    return a


def softmax_across_ranks(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return softmax of rows of which every rank of the group has a part: this rank's part.

    x: (..., n); n may differ from rank to rank and be 0, the number of rows may not.
    ValueError: this rank isn't in `group`.

    Cost per rank: one all-gather of two numbers for each row. Each rank merges them in the same
    order, to the same bits. (An all-reduce whose operation is `merge` would move less; torch has
    none. Megatron's `vocab_parallel_cross_entropy` takes two, of the maximum and of the sum.)
    """
    check_in_group("softmax_across_ranks", group)
    # One pair a row from every rank, merged by each of them.
    mine = torch.stack(summarize(x))  # two numbers a row: all that this rank sends
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyones, mine, group=group)
    pair = functools.reduce(merge, everyones)  # alike on every rank: of the whole row
    return finish(x, *pair).to(x.dtype)


# Arithmetic


def _check(x: Tensor) -> None:
    if not x.is_floating_point() or x.dim() == 0:
        got = f"{x.dtype} of shape {tuple(x.shape)}"
        raise ValueError(f"expected rows of floating-point numbers, (..., N), got {got}: float()?")


def start(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (-inf, 0) for each row: m and ℓ before any of its numbers was read."""
    _check(x)
    dtype = torch.promote_types(x.dtype, torch.float32)
    ell = x.new_zeros(x.shape[:-1], dtype=dtype)
    return torch.full_like(ell, -math.inf), ell


def power(x: Tensor, m: Tensor) -> Tensor:
    """Return e^(x−m) for x ≤ m; 0 where both are -inf, since masked elements weigh nothing."""
    finite = m.masked_fill(m == -math.inf, 0)
    return torch.exp(x - finite)


def normalize(x: Tensor, ell: Tensor) -> Tensor:
    """Return x / ℓ; x where ℓ is 0, since then all is masked, and x is 0. (Otherwise ℓ ≥ 1.)"""
    return x / ell.masked_fill(ell == 0, 1)


def finish(x: Tensor, m: Tensor, ell: Tensor) -> Tensor:
    """Return softmax of a part `x` of rows, in m's dtype. m, ell: the pair of each whole row."""
    weights = power(x, m.unsqueeze(-1))
    return normalize(weights, ell.unsqueeze(-1))
