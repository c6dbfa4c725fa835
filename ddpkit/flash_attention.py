"""Attention that never has its matrix: tile by tile, with O(N) memory, and computed again for backward.

Queries q, keys k and values v are (..., N, D). Each query's output is a mean of the values, o = Σⱼ pⱼ·vⱼ, weighted by
the softmax of its scores s = q·kᵀ/√D. The scores are N² numbers; that is what these three differ in:

    function                what it has of the N² scores                      for
    attention               all of them, and p, which backward keeps          comparing
    one_loop_attention      one                                               reading
    flash_attention         a tile of each head, 256 × 256                    training

One pass over the keys is enough because a softmax can be corrected later. With m the largest score so far and `total`
the sum of exp(s - m) so far, a new key changes both, and what was summed up before is scaled by exp(m - m_new).

Milakov and Gimelshein 2018 (online softmax); Dao et al. 2022, Dao 2023 (FlashAttention, 2). Notebook 09.
"""

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE = 256  # queries, and keys, of a tile: larger ones leave the cache, smaller ones cost more calls
LOG2E = math.log2(math.e)  # exp(x) = 2^(x·LOG2E); PyTorch's exp2 is faster, on a CPU up to four times


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, *, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Attention as in textbooks, softmax(q·kᵀ/√D)·v, with all scores at once.

    Arguments, result and errors: as `flash_attention`, but a mask can have a gradient.

    Cost: 4 Nq Nk D operations for each head; memory for Nq Nk numbers three times, of which one for backward.
    """
    _check(q, k, v, mask)
    group = _group(q, k)
    if group > 1:
        k, v = k.repeat_interleave(group, dim=-3), v.repeat_interleave(group, dim=-3)
    s = q @ k.mT * _scale(q, scale)
    if causal:
        s = s + torch.full(s.shape[-2:], -math.inf, dtype=s.dtype, device=s.device).triu(1)
    if mask is None:
        return s.softmax(-1) @ v
    s = s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + mask.to(s.dtype)
    sees_nothing = s.isneginf().all(-1, keepdim=True)  # the softmax of such a row is NaN
    return s.masked_fill(sees_nothing, 0).softmax(-1).masked_fill(sees_nothing, 0) @ v


def one_loop_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """The same, one query and one key at a time; after each key, o is the attention to the keys so far.

    q: (Nq, D). k, v: (Nk, D). Returns (Nq, D).

        m_new = max(m, s)
        total_new = total · exp(m - m_new) + exp(s - m_new)
        o = o · exp(m - m_new) · total / total_new + exp(s - m_new) / total_new · v

    `flash_attention` divides by the total once, at the end.
    """
    outputs = []
    for i, query in enumerate(q):
        m, total, o = torch.tensor(-math.inf), torch.tensor(0.0), torch.zeros_like(query)
        for key, value in zip(k[: i + 1] if causal else k, v, strict=False):
            s = query @ key / math.sqrt(len(query))
            m_new = torch.maximum(m, s)
            correction, p = torch.exp(m - m_new), torch.exp(s - m_new)
            total_new = total * correction + p
            o = o * (correction * total / total_new) + p / total_new * value
            m, total = m_new, total_new
        outputs.append(o)
    return torch.stack(outputs)


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, *, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Attention tile by tile: exact, with memory that grows with N and not with N².

    q: (..., Nq, D). k, v: (..., Nk, D), of the same dtype. Any leading axes, or none; the last are heads: k and v may
    have fewer, each of which then serves as many neighbouring heads of q (grouped queries; Ainslie et al. 2023).
    causal: query i sees the keys up to i, counted from the first of each, as in PyTorch.
    mask: broadcastable to (..., Nq, Nk). Of bools, which keys take part; of numbers, what is added to the scores. A
        query that sees no key has zeros as its output, and gives no gradient.
    scale: of the scores (None: 1/√D).
    Returns (..., Nq, D), of q's dtype. 16-bit inputs are computed with in fp32.
    ValueError: shapes or dtypes that don't fit, or a mask that wants a gradient.

    Cost: 4 Nq Nk D operations for each head, 10 backward; causal about half, as tiles in the future are skipped. Kept
    for backward: q, k, v, the result, and a number for each of its rows, the log of the sum of exp(scores).
    """
    return FlashAttention.apply(q, k, v, causal, mask, scale)


class FlashAttention(torch.autograd.Function):
    """`flash_attention` for autograd: apply(q, k, v, causal), and mask and scale if you like."""

    @staticmethod
    def forward(ctx, q, k, v, causal=False, mask=None, scale=None):
        _check(q, k, v, mask)
        if mask is not None and mask.requires_grad:
            raise ValueError("flash_attention gives its mask no gradient: detach() it, or use attention")
        ctx.causal, ctx.scale = causal, _scale(q, scale)
        with _no_autocast(q):
            o, lse = _forward(*_by_head(q, k, v), _Bias(q, k, causal, mask), ctx.scale)
        o = o.reshape(q.shape).to(q.dtype)
        ctx.save_for_backward(q, k, v, o, lse, mask)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, k, v, o, lse, mask = ctx.saved_tensors
        bias = _Bias(q, k, ctx.causal, mask)
        o, *_ = _by_head(o, k, v)
        do, *_ = _by_head(do, k, v)
        with _no_autocast(q):
            gradients = _backward(*_by_head(q, k, v), o, lse, do, bias, ctx.scale)
        return *(dx.reshape(x.shape).to(x.dtype) for dx, x in zip(gradients, (q, k, v), strict=True)), None, None, None


def _forward(q: Tensor, k: Tensor, v: Tensor, bias: "_Bias", scale: float) -> tuple[Tensor, Tensor]:
    """q: (heads, group, Nq, D). k, v: (heads, Nk, D). Returns o, as q, and lse, (heads, group, Nq, 1)."""
    o, lse, buffer = torch.empty_like(q), torch.empty_like(q[..., :1]), _tile_buffer(q, k)
    for rows, tiles in tile_rows(q.shape[2], k.shape[1], bias.causal, q.shape[1]):
        q_tile = q[:, :, rows].flatten(1, 2)
        # Not -inf: where all scores are -inf, -inf - -inf would be NaN. Half of the lowest number leaves room to round.
        m = torch.full_like(q_tile[..., :1], torch.finfo(q.dtype).min / 2)
        total, acc = torch.zeros_like(m), torch.zeros_like(q_tile)
        for columns in tiles:
            k_tile, v_tile = k[:, columns], v[:, columns]
            s = buffer[:, : q_tile.shape[1], : k_tile.shape[1]]
            torch.baddbmm(bias(rows, columns), q_tile, k_tile.mT, alpha=scale * LOG2E, out=s)
            m_new = torch.maximum(m, s.amax(-1, keepdim=True))
            correction = torch.exp2(m - m_new)
            p = s.sub_(m_new).exp2_()
            total.mul_(correction).add_(p.sum(-1, keepdim=True))
            acc.mul_(correction).baddbmm_(p, v_tile)
            m = m_new
        total.clamp_(min=1)  # the largest score alone is 2^0 of it; only a sum of no keys is less
        o[:, :, rows] = (acc / total).view_as(o[:, :, rows])
        lse[:, :, rows] = ((m + total.log2()) / LOG2E).view_as(lse[:, :, rows])
    return o, lse


def _backward(q, k, v, o, lse, do, bias: "_Bias", scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes as in `_forward`. Returns dq, dk, dv.

    p = exp(s - lse) comes again from q and k. Then dv = pᵀ·do, dp = do·vᵀ, ds = p ∘ (dp - delta), and, both scaled,
    dq = ds·k and dk = dsᵀ·q. Softmax's derivative needs delta, each row's Σ p ∘ dp, which is also its Σ do ∘ o: that
    takes no tile.
    """
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    delta, lse = (do * o).sum(-1, keepdim=True), lse * LOG2E
    buffers = _tile_buffer(q, k), _tile_buffer(q, k)
    for rows, tiles in tile_rows(q.shape[2], k.shape[1], bias.causal, q.shape[1]):
        q_tile, do_tile, lse_tile, delta_tile = (x[:, :, rows].flatten(1, 2) for x in (q, do, lse, delta))
        dq_tile = torch.zeros_like(q_tile)
        for columns in tiles:
            k_tile, v_tile = k[:, columns], v[:, columns]
            p, ds = (buffer[:, : q_tile.shape[1], : k_tile.shape[1]] for buffer in buffers)
            torch.baddbmm(bias(rows, columns) - lse_tile, q_tile, k_tile.mT, alpha=scale * LOG2E, out=p).exp2_()
            torch.baddbmm(-delta_tile, do_tile, v_tile.mT, out=ds).mul_(p)
            dv[:, columns].baddbmm_(p.mT, do_tile)
            dk[:, columns].baddbmm_(ds.mT, q_tile, alpha=scale)
            dq_tile.baddbmm_(ds, k_tile, alpha=scale)
        dq[:, :, rows] = dq_tile.view_as(dq[:, :, rows])
    return dq, dk, dv


def tile_rows(queries: int, keys: int, causal: bool = False, group: int = 1) -> Iterator[tuple[slice, list[slice]]]:
    """The tiles of an attention matrix, row by row: (which queries, [which keys, which keys, ...]).

    With `causal`, what lies wholly in the future of a row's queries is left out, and its last tile ends with the last
    key that one of them sees. group: heads of q that share k and v; their queries share a tile.
    """
    for start in range(0, queries, _tile_length(group)):
        rows = slice(start, min(start + _tile_length(group), queries))
        end = min(rows.stop, keys) if causal else keys
        yield rows, [slice(first, min(first + TILE, end)) for first in range(0, end, TILE)]


def _tile_length(group: int) -> int:
    """Queries of each head."""
    return -(-TILE // group)


class _Bias:
    """What is added to a tile's scores: the mask, and -inf for keys in the future.

    All exponents are of base 2 inside: exp(s) is 2^(log2(e)·scale·q·kᵀ + bias).
    """

    def __init__(self, q: Tensor, k: Tensor, causal: bool, mask: Tensor | None):
        self.causal, self.group, self.heads = causal, _group(q, k), k.shape[:-2].numel()
        self.mask = None if mask is None else mask.expand(*q.shape[:-1], k.shape[-2])
        self.zero = torch.zeros((), dtype=_dtype(q), device=q.device)

    def __call__(self, rows: slice, columns: slice) -> Tensor:
        """As (heads, group · queries, keys), or 0."""
        bias = self.zero
        size = rows.stop - rows.start, columns.stop - columns.start
        if self.mask is not None:
            tile = self.mask[..., rows, columns]
            if tile.dtype == torch.bool:
                bias = torch.where(tile, self.zero, -math.inf)
            else:
                bias = tile.to(self.zero.dtype) * LOG2E
            bias = bias.reshape(self.heads, self.group, *size)
        if self.causal and columns.stop > rows.start + 1:
            bias = bias + self.zero.new_full(size, -math.inf).triu_(1 + rows.start - columns.start)
        return bias if bias is self.zero else bias.expand(self.heads, self.group, *size).flatten(1, 2)


def _by_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q as (heads, group, Nq, D), k and v as (heads, Nk, D): each head of theirs serves a group of q's. In fp32."""
    heads = k.shape[:-2].numel()
    q, k, v = (x.to(_dtype(x)) for x in (q, k, v))
    return (
        q.reshape(heads, _group(q, k), *q.shape[-2:]),
        k.reshape(heads, *k.shape[-2:]),
        v.reshape(heads, *v.shape[-2:]),
    )


def _tile_buffer(q: Tensor, k: Tensor) -> Tensor:
    """Room for a tile of each head, used again and again: new memory of that size costs more than writing it."""
    heads, group, queries, _ = q.shape
    return q.new_empty(heads, group * min(_tile_length(group), queries), min(TILE, k.shape[1]))


def _group(q: Tensor, k: Tensor) -> int:
    """How many heads of q share one of k."""
    return q.shape[-3] // k.shape[-3] if q.ndim > 2 and k.shape[-3] else 1


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _dtype(x: Tensor) -> torch.dtype:
    """What to compute in."""
    return torch.promote_types(x.dtype, torch.float32)


def _no_autocast(x: Tensor) -> contextlib.AbstractContextManager:
    """Inside, products aren't rounded to 16 bits. The meta device, which has no autocast, needs none."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else contextlib.nullcontext()


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
    got = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.ndim < 2 or q.ndim != k.ndim or k.shape != v.shape or q.shape[-1] != k.shape[-1]:
        raise ValueError(f"expected q (..., Nq, D), k and v (..., Nk, D), got {got}: is an axis missing or swapped?")
    heads = q.shape[-3:-2].numel(), k.shape[-3:-2].numel()
    if q.shape[:-3] != k.shape[:-3] or heads[0] % max(1, heads[1]):
        why = "leading axes alike, but for q's heads, which may be a multiple of k's"
        raise ValueError(f"expected {why}, got {got}: expand() what is shared")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        dtypes = ", ".join(str(x.dtype) for x in (q, k, v))
        raise ValueError(f"expected q, k and v of one floating-point dtype, got {dtypes}: convert them")
    if mask is None:
        return
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(f"expected a mask of bools or of floating-point numbers, got {mask.dtype}: mask.bool()?")
    scores = (*q.shape[:-1], k.shape[-2])
    fits = (ours in (1, theirs) for ours, theirs in zip(mask.shape[::-1], scores[::-1], strict=False))
    if mask.ndim > len(scores) or not all(fits):
        got = tuple(mask.shape)
        raise ValueError(f"expected a mask broadcastable to {scores}, got {got}: where should an axis of 1 be?")
