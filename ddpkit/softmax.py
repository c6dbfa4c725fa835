"""Softmax of rows of any length: without overflow, in fewer passes, in blocks merged in any order, across ranks.

    softmax(x)ᵢ = eˣⁱ / Σⱼ eˣʲ = eˣⁱ⁻ᵐ / d        with m = max x and d = Σⱼ eˣʲ⁻ᵐ

The pair (m, d) is all that a row's numbers need to know of each other, and pairs can be merged: `merge` makes the pair
of a whole row from those of two parts. One number's pair is (x, 1), that of no number, or of a masked one, (-inf, 0).
Taken in number by number that is the online softmax; block by block, FlashAttention; rank by rank, ring attention. With
values v a part has a triple (m, d, o), where o = Σⱼ eˣʲ⁻ᵐ vⱼ; in the end o/d is the mean of the values, weighted by the
softmax.

What each moves between memory and the processor for a row of N numbers, with values of D numbers (count it: `Traffic`):

    function                passes    read        written
    naive_softmax           2         2N          N             overflows
    safe_softmax            3         3N          N
    online_softmax          2         2N          N
    blockwise_softmax       2         2N          N
    fused_softmax           1         N           N             the whole row must fit into fast memory
    online_weighted_mean    1         N + ND      D             the softmax itself is never written

If every pass is a GPU kernel of its own, each goes to memory twice, to read and to write: safe_softmax six times,
though two of the writes are a single number, m or d. fused_softmax is one kernel, and goes twice.

All take rows (..., N) of floating-point numbers, any number of them, and change nothing in place. m, d and what is
computed with them are float32 at least, the result has the dtype of x. Only naive_softmax stays in the dtype of x.
ValueError: anything else than such rows.

    a row                  here, but for naive_softmax     torch.softmax
    of -inf only           zeros: all are masked           NaN
    with some -inf         0 there                         the same
    with +inf or NaN       NaN, the whole row              the same
    of one number          1; 0 if that is -inf            1; NaN if that is -inf
    of no number           no number                       the same

Milakov and Gimelshein 2018 (online softmax); Rabe and Staats 2021 (merging). Notebook 08.
"""

import functools
import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.overrides import TorchFunctionMode

# Number by number. x[..., i] reads from memory, a[..., i] = writes to it; m, d and o are in registers.


def naive_softmax(x: Tensor) -> Tensor:
    """eˣ / Σ eˣ, as the formula stands: NaN where eˣ overflows, from x = 12 in fp16, 89 in fp32; 0 where only Σ does.

    Rows far below 0 become NaN too, when all of their eˣ are 0. Two passes. Notebook 08.
    """
    _check(x)
    a, length = torch.empty_like(x), x.shape[-1]
    d = x.new_zeros(x.shape[:-1])
    for i in range(length):
        d = d + torch.exp(x[..., i])
    for i in range(length):
        a[..., i] = torch.exp(x[..., i]) / d
    return a


def safe_softmax(x: Tensor) -> Tensor:
    """eˣ⁻ᵐ / Σ eˣ⁻ᵐ: no exponent is above 0. Three passes: for the maximum, the sum, the result. Notebook 08."""
    m, d = _nothing(x)
    a, length = torch.empty_like(x), x.shape[-1]
    for i in range(length):
        m = torch.maximum(m, x[..., i])
    for i in range(length):
        d = d + _ratio(x[..., i], m)
    for i in range(length):
        a[..., i] = _normalized(_ratio(x[..., i], m), d)
    return a


def online_softmax(x: Tensor) -> Tensor:
    """The same in two passes: the first keeps a running maximum, and a sum that is right for the maximum so far.

    When the maximum grows from m' to m, the sum so far is corrected by eᵐ'⁻ᵐ. Milakov and Gimelshein 2018, algorithm 3.
    Notebook 08.
    """
    m, d = _nothing(x)
    a, length = torch.empty_like(x), x.shape[-1]
    for i in range(length):
        x_i = x[..., i]
        m_before, m = m, torch.maximum(m, x_i)
        d = d * _ratio(m_before, m) + _ratio(x_i, m)
    for i in range(length):
        a[..., i] = _normalized(_ratio(x[..., i], m), d)
    return a


def online_weighted_mean(x: Tensor, v: Tensor) -> Tensor:
    """softmax(x)·v in one pass: what attention does for a query, x being its scores.

    v: (..., N, D), a value for each number of x. Returns (..., D) in the dtype of v; zeros where all of x is -inf.

    The sum of the values is corrected as d is, and divided by d at the end. Notebooks 08 and 09.
    """
    m, d = _nothing(x)
    o = d.unsqueeze(-1).expand(*d.shape, v.shape[-1])  # zeros
    for i in range(x.shape[-1]):
        x_i, v_i = x[..., i], v[..., i, :]
        m_before, m = m, torch.maximum(m, x_i)
        correction, weight = _ratio(m_before, m), _ratio(x_i, m)
        d = d * correction + weight
        o = o * correction.unsqueeze(-1) + weight.unsqueeze(-1) * v_i
    mean = torch.empty_like(o, dtype=v.dtype)
    mean[...] = _normalized(o, d.unsqueeze(-1))
    return mean


# Part by part


def summarize(x: Tensor, v: Tensor | None = None) -> tuple[Tensor, ...]:
    """What `merge` must know of a part of a row: (m, d); with values, (m, d, o).

    x: (..., n), n may be 0. v: (n, D), or (..., n, D), multiplied as by torch.matmul: eˣ⁻ᵐ @ v, so that several rows
    (..., q, n) share their values. Returns m, d of shape (...), and o of shape (..., D), not yet divided by d.
    """
    m, _ = _nothing(x)
    if x.shape[-1]:
        m = x.amax(-1).to(m.dtype)
    weights = _ratio(x, m.unsqueeze(-1))
    d = weights.sum(-1)
    return (m, d) if v is None else (m, d, weights @ v.to(weights.dtype))


def merge(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Of two parts' (m, d), that of both together; of two (m, d, o), likewise.

    m, d: any shape, the same or one that broadcasts. o: one axis more, that of a value.
    ValueError: a pair and a triple.

    The order of the parts, and which are merged first, changes no more than the last bits. (-inf, 0) changes nothing.
    """
    if len(a) != len(b):
        got = f"{len(a)} tensors and {len(b)}"
        raise ValueError(f"merge expected two pairs (m, d) or two triples (m, d, o), got {got}. Summarize both alike.")
    (m_a, d_a, *o_a), (m_b, d_b, *o_b) = a, b
    m = torch.maximum(m_a, m_b)
    correct_a, correct_b = _ratio(m_a, m), _ratio(m_b, m)
    d = d_a * correct_a + d_b * correct_b
    if not o_a:
        return m, d
    return m, d, o_a[0] * correct_a.unsqueeze(-1) + o_b[0] * correct_b.unsqueeze(-1)


def fused_softmax(x: Tensor) -> Tensor:
    """Softmax of rows that are held in fast memory while all is done to them: read once, written once. Notebook 08."""
    row = x[...]
    pair, a = summarize(row), torch.empty_like(x)
    a[...] = _softmax(row, *pair)
    return a


def blockwise_softmax(x: Tensor, block: int) -> Tensor:
    """Softmax of rows that are read `block` numbers at a time: two passes, online from block to block.

    The last block may be shorter. ValueError: `block` below 1. Notebook 08.
    """
    if block < 1:
        raise ValueError(f"blockwise_softmax expected a block of at least 1 number, got {block}. Try 128.")
    a, pair = torch.empty_like(x), _nothing(x)
    blocks = [slice(start, start + block) for start in range(0, x.shape[-1], block)]
    for part in blocks:
        pair = merge(pair, summarize(x[..., part]))
    for part in blocks:
        a[..., part] = _softmax(x[..., part], *pair)
    return a


def softmax_across_ranks(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Softmax of rows of which every rank of the group has a part: returns this rank's part of the result.

    x: (..., n); the ranks may have different n, or none, but the same number of rows.
    ValueError: this rank isn't in `group`.

    One collective: all ranks' pairs are gathered, and each rank merges them, in the same order, to the same bits.
    Cost per rank: two numbers for each row sent to the W-1 others. An all-reduce whose operation is `merge` would move
    less for many ranks, but torch's can only add, multiply, compare: with those it takes two, one for the maximum and
    then one for the sum. Notebook 08.
    """
    if dist.get_rank(group) < 0:
        got = f"rank {dist.get_rank()} called softmax_across_ranks with a group that it isn't in"
        raise ValueError(f"{got}, expected one of its own. Call it on the group's ranks only.")
    mine = torch.stack(summarize(x))
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyones, mine, group=group)
    return _softmax(x, *functools.reduce(merge, everyones)).to(x.dtype)


# Arithmetic


def _check(x: Tensor) -> None:
    if not x.is_floating_point() or x.dim() == 0:
        got = f"{x.dtype} of shape {tuple(x.shape)}"
        expected = "rows of floating-point numbers, (..., N)"
        raise ValueError(f"softmax expected {expected}, got {got}. Try x.float(), or x.view(1) for a single number.")


def _nothing(x: Tensor) -> tuple[Tensor, Tensor]:
    """(m, d) of each row of `x` before any of its numbers was seen."""
    _check(x)
    d = torch.zeros(x.shape[:-1], dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    return torch.full_like(d, -math.inf), d


def _ratio(x: Tensor, m: Tensor) -> Tensor:
    """eˣ / eᵐ for x ≤ m. Where m is -inf x is too, and -inf - -inf would be NaN: 0, what is masked weighs nothing."""
    return torch.exp(x - m.masked_fill(m == -math.inf, 0))


def _normalized(total: Tensor, d: Tensor) -> Tensor:
    """total / d. Of a row that is all masked d is 0, and of every other at least 1, the maximum's own e⁰."""
    return total / d.masked_fill(d == 0, 1)


def _softmax(x: Tensor, m: Tensor, d: Tensor) -> Tensor:
    """That of a part of the row whose pair this is."""
    return _normalized(_ratio(x, m.unsqueeze(-1)), d.unsqueeze(-1))


# Counting


class Traffic(TorchFunctionMode):
    """Inside `with Traffic() as traffic:`, count the numbers that tensors are read and written by index.

    x[..., i] is a read of as many numbers as it gives, a[..., i] = y a write. A tensor that is used without an index
    counts as held in registers or fast memory: the functions above index what is in slow memory, and only that.
    """

    def __init__(self):
        super().__init__()
        self.reads = self.writes = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is Tensor.__getitem__:
            self.reads += result.numel()
        elif func is Tensor.__setitem__:
            tensor, index, _ = args
            self.writes += tensor[index].numel()
        return result
