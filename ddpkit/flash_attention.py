"""Attention without its N × N matrix: one tile of keys at a time, computed again in backward.

Queries q, keys k and values v are (..., N, D). A query's output is a mean of the values, weighted
by the softmax of its scores: s = q·kᵀ/√D, p = softmax(s), o = p·v. Of the N² scores there exist:

    function           scores at a time       kept for backward
    attention          all                    q, k, v and p, which is N² numbers a head
    flash_attention    those of 256 keys      q, k, v, o and lse, one number a query

One pass over the keys is enough, since a softmax can be corrected later: m is the largest score so
far, ℓ (`ell`) the sum of e^(s−m), acc the same sum with the values. When the maximum grows, both
are multiplied by e^(m−m_new). Backward recomputes p from q, k and lse = m + ln ℓ.

In PyTorch: torch.nn.functional.scaled_dot_product_attention. `ddpkit.fast.attention` has the same
names, with smaller tiles that stay in the cache; `ddpkit.flash_triton` is for GPUs.
Milakov and Gimelshein 2018; Dao et al. 2022, Dao 2023 (FlashAttention, 2). Notebook 09.
"""

import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE = 256  # keys


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Return softmax(q·kᵀ/√D)·v as in textbooks, with all scores at once, in q's dtype.

    q: (..., Nq, D). k, v: (..., Nk, D). The rest is as in `flash_attention`.
    Cost: 4 Nq Nk D operations a head; memory for Nq Nk numbers a head twice, of which p is kept for
    backward. Causal, a mask of Nq Nk numbers for all heads comes on top.
    """
    check_shapes(q, k, v)
    scale = q.shape[-1] ** -0.5
    s = q @ k.mT * scale
    if causal:
        hidden = s.new_full(s.shape[-2:], -math.inf).triu(1)  # key j from query i: j > i
        s = s + hidden
    return s.softmax(-1) @ v


def flash_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Compute `attention`, but for rounding, with memory that grows with N, not with N².

    q: (..., Nq, D). k, v: (..., Nk, D), of the same dtype and the same leading axes, any or none.
    causal: query i sees the keys up to i, counted from the first of each, as in PyTorch.
    Returns (..., Nq, D), of q's dtype; 16-bit inputs are computed in fp32.
    ValueError: shapes or dtypes that don't fit.

    Cost: 4 Nq Nk D operations a head, 10 Nq Nk D backward (hidden scores are computed as well).
    Kept for backward: q, k, v, the result, and one number for each of its rows.
    """
    return FlashAttention.apply(q, k, v, causal)


class FlashAttention(torch.autograd.Function):
    """`flash_attention` as a function of autograd: apply(q, k, v, causal); differentiable once."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
        check_shapes(q, k, v)
        with torch.autocast(q.device.type, enabled=False):  # it would round scores to 16 bits
            o, lse = flash_forward(*in_fp32(q, k, v), TILE, causal)
        o = o.to(q.dtype)
        ctx.save_for_backward(q, k, v, o, lse)  # and no p
        ctx.causal = causal
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False):
            dq, dk, dv = flash_backward(*in_fp32(q, k, v, o, lse, do), ctx.causal)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tile: int,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return o, (..., Nq, D), and lse, (..., Nq), the log of each row's Σ e^s.

    q, k, v: as `flash_attention` takes them; computed in their own dtype. tile: keys at a time.
    Nq × tile scores exist at a time: the loop over the keys of Dao et al. 2022, algorithm 1, for
    all queries at once.
    """
    m = torch.full_like(q[..., :1], -math.inf)  # a column: one number a query
    # The state of each row after the tiles so far: all that a tile needs of those before it.
    ell = torch.zeros_like(m)
    acc = torch.zeros_like(q)
    for first in range(0, k.shape[-2], tile):
        keys = slice(first, first + tile)
        s = tile_scores(q, k[..., keys, :], first, causal)
        # The maximum may grow: correct what was summed for the old one.
        m_new = torch.maximum(m, s.amax(-1, keepdim=True))
        correction = torch.exp(m - m_new)
        p = torch.exp(s - m_new)
        ell = ell * correction + p.sum(-1, keepdim=True)
        acc = acc * correction + p @ v[..., keys, :]
        m = m_new
    # Divided once, at the end: no tile knows the sum of the whole row.
    o = acc / ell
    lse = (m + ell.log()).squeeze(-1)
    return o, lse


def flash_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    causal: bool = False,
    tile: int = TILE,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv: p is computed again from q, k and lse, a tile of keys at a time.

    do: o's gradient. o, lse: of `flash_forward`. Softmax's derivative, ds = p ∘ (dp − delta), needs
    each row's delta = Σ p ∘ dp. It equals Σ do ∘ o, which needs no tile. Dao et al. 2022,
    algorithm 4.
    """
    scale = q.shape[-1] ** -0.5
    delta = (do * o).sum(-1, keepdim=True)
    dq = torch.zeros_like(q)
    dk = torch.empty_like(k)  # empty: each tile fills its own rows
    dv = torch.empty_like(v)
    for first in range(0, k.shape[-2], tile):
        keys = slice(first, first + tile)
        s = tile_scores(q, k[..., keys, :], first, causal)
        p = torch.exp(s - lse.unsqueeze(-1))
        dv[..., keys, :] = p.mT @ do
        # Through softmax, then to q and k.
        dp = do @ v[..., keys, :].mT
        ds = p * (dp - delta)
        dq += ds @ k[..., keys, :] * scale  # every tile adds; dk and dv belong to this one alone
        dk[..., keys, :] = ds.mT @ q * scale
    return dq, dk, dv


def tile_scores(q: Tensor, keys: Tensor, first: int, causal: bool) -> Tensor:
    """Return q·kᵀ/√D for a tile, whose first key is number `first`; causal, -inf where hidden."""
    scale = q.shape[-1] ** -0.5
    s = q @ keys.mT * scale
    if causal:
        hidden = torch.ones_like(s, dtype=torch.bool).triu(1 - first)  # key j from query i: j > i
        s = s.masked_fill(hidden, -math.inf)
    return s


def in_fp32(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors in fp32 at least: narrower ones are converted, float64 stays."""
    return [x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors]


def check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless q is (..., Nq, D), k and v (..., Nk > 0, D), of one float dtype."""
    got = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    axes = min(q.ndim, k.ndim) >= 2
    ends = k.shape == v.shape and q.shape[-1:] == k.shape[-1:]
    leading = q.shape[:-2] == k.shape[:-2]
    if not (axes and ends and leading):
        expected = "q (..., Nq, D), k and v (..., Nk, D)"
        raise ValueError(f"expected {expected}, got {got}: is an axis missing or swapped?")
    if 0 in k.shape[-2:]:
        raise ValueError(f"expected at least one key, and D of 1 or more, got {got}")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        got = ", ".join(str(x.dtype) for x in (q, k, v))
        raise ValueError(f"expected q, k, v of one floating-point dtype, got {got}: convert them")
