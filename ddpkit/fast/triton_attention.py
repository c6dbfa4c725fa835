"""FlashAttention as Triton kernels: `ddpkit.flash_attention` on a GPU, tiles stay on the chip.

Letters and order are those of the PyTorch version; read the two side by side. A *program* is one
run of a kernel: many run at once, each with a tile of its own that stays in registers while it
loops over other tiles. From the GPU's memory q, k, v, do are read, o, lse, delta written and read
again, dq, dk, dv written; scores stay on the chip.

    kernel              its own tile        loops over          writes
    _forward_kernel     queries             tiles of keys       o, lse
    _delta_kernel       rows of o and do                        delta = rowsum(do ∘ o)
    _dkdv_kernel        keys                tiles of queries    dk, dv
    _dq_kernel          queries             tiles of keys       dq

No program adds to what another wrote, so gradients have the same bits in every run. The price:
backward computes scores twice.

Needs a GPU of compute capability 8.0 or higher; or the interpreter of Triton 3.6 or newer, which
runs kernels on the CPU with NumPy: slowly (take N ≤ 256), in fp16 and fp32. Triton uses it for
kernels that are defined while TRITON_INTERPRET=1 is in the environment. Where torch sees no GPU,
importing this module sets it unless it has a value, and so for the reader's own kernels as well.

Public as `ddpkit.flash_triton`. Dao 2023 (FlashAttention-2); Tillet, Kung and Cox 2019 (Triton).
Notebook 09.
"""

import importlib
import math
import os
import sys

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..flash_attention import check_shapes

_imported_before = "triton" in sys.modules  # by the first optimizer, for example
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
try:
    import triton
    import triton.language as tl
except ImportError as error:
    install = "pip install triton (Linux only), or use ddpkit.flash_attention"
    raise ImportError(
        f"ddpkit.flash_triton needs triton, which isn't installed: {install}"
    ) from error

INTERPRETED = triton.knobs.runtime.interpret
if INTERPRETED and _imported_before:  # even tl.max is a kernel, defined without the interpreter
    importlib.reload(triton.language.standard)
    importlib.reload(triton.language)
if INTERPRETED and triton.__version__.startswith("3.6."):
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor

    def _patch_and_convert(tensor, scope):
        """Patch the class `tensor` as Triton 3.6 does, but with an int() that suits NumPy 2.4."""
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = _patch_and_convert

LOG2E = tl.constexpr(math.log2(math.e))  # exp(x) = 2^(x·LOG2E), and a GPU has exp2
DTYPES = torch.float16, torch.bfloat16, torch.float32


def _tune(own: str, others: str, tiles: list[tuple[int, int, int, int]]):
    """Return a decorator: on its first call the kernel times all `tiles`, and keeps the fastest.

    It does so anew for each D, dtype, CAUSAL and octave of lengths. own, others: the names of the
    kernel's tile sizes, "BLOCK_Q" and "BLOCK_K". tiles: (own rows, others' rows, warps, stages).
    """
    if INTERPRETED:
        tiles = [(32, 16, 4, 1)]
    configs = [triton.Config({own: m, others: n}, w, stages) for m, n, w, stages in tiles]
    prune = {"early_config_prune": _smallest_in_fp32}
    return triton.autotune(configs, ["octave", "D", "CAUSAL"], prune_configs_by=prune)


def _smallest_in_fp32(configs: list, arguments: dict, **_) -> list:
    """Return only the smallest tiles for fp32: it has no tensor cores, and fills the registers."""
    return configs[-1:] if arguments["q_ptr"].dtype == torch.float32 else configs


SMALL = [(32, 32, 4, 2), (16, 16, 4, 1)]
FORWARD = [(128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 4, 3), (64, 64, 4, 3), *SMALL]
BACKWARD = [(128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (64, 32, 4, 3), *SMALL]


# Tiles


@triton.jit
def _load_tile(matrix_ptr, rows, N, D: tl.constexpr, BLOCK_D: tl.constexpr, TAIL: tl.constexpr):
    """Load rows of an N × D matrix; zeros for columns from D on and, with TAIL, rows from N on."""
    columns = tl.arange(0, BLOCK_D)
    pointers = matrix_ptr + rows[:, None] * D + columns[None, :]
    if TAIL:
        tile = tl.load(pointers, mask=(rows[:, None] < N) & (columns[None, :] < D), other=0.0)
    elif BLOCK_D != D:
        tile = tl.load(pointers, mask=columns[None, :] < D, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def _store_tile(matrix_ptr, rows, tile, N, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write the tile's rows before N and columns before D into an N × D matrix, in its dtype."""
    columns = tl.arange(0, BLOCK_D)
    pointers = matrix_ptr + rows[:, None] * D + columns[None, :]
    inside = (rows[:, None] < N) & (columns[None, :] < D)
    tl.store(pointers, tile.to(matrix_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _dot(a, b, acc=None):
    """Return a @ b + acc in fp32; factors in fp32 aren't rounded to tf32, which drops 13 bits."""
    return tl.dot(a, b, acc, input_precision="ieee")


# Forward


@triton.jit
def _attend(
    acc, ell, m, q, k_ptr, v_ptr, queries, first, last, Nk, scale_log2e,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Add keys `first` to `last`, exclusive, to a query tile's state (acc, ell, m); return it.

    acc: Σ p·v, ell: Σ p, m: the largest score so far, in base 2. MASKED: some keys of these tiles
    are hidden from some queries, or beyond the end.
    """
    for start in range(first, last, BLOCK_K):
        keys = start + tl.arange(0, BLOCK_K)
        k = _load_tile(k_ptr, keys, Nk, D, BLOCK_D, MASKED)
        v = _load_tile(v_ptr, keys, Nk, D, BLOCK_D, MASKED)
        s = _dot(q, tl.trans(k))
        if MASKED:
            s = tl.where(keys[None, :] < Nk, s, float("-inf"))
            if CAUSAL:
                s = tl.where(queries[:, None] >= keys[None, :], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * scale_log2e)
        p = tl.exp2(s * scale_log2e - m_new[:, None])
        correction = tl.exp2(m - m_new)
        ell = ell * correction + tl.sum(p, 1)
        acc = _dot(p.to(v.dtype), v, acc * correction[:, None])
        m = m_new
    return acc, ell, m


@_tune("BLOCK_Q", "BLOCK_K", FORWARD)
@triton.jit
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, Nq, Nk, scale, octave,
    D: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute o and lse, in base 2, of one query tile of one head."""
    head, tile = _head_and_tile(tl.cdiv(Nq, BLOCK_Q), CAUSAL)
    q_ptr, o_ptr, lse_ptr = q_ptr + head * Nq * D, o_ptr + head * Nq * D, lse_ptr + head * Nq
    k_ptr, v_ptr = k_ptr + head * Nk * D, v_ptr + head * Nk * D

    queries = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    q = _load_tile(q_ptr, queries, Nq, D, BLOCK_D, True)
    acc = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    ell = tl.zeros((BLOCK_Q,), tl.float32)
    m = tl.full((BLOCK_Q,), float("-inf"), tl.float32)  # m and lse in base 2: p = 2^(s - lse)
    full, last = _key_range(tile * BLOCK_Q, Nk, CAUSAL, BLOCK_Q, BLOCK_K)
    c = scale * LOG2E
    acc, ell, m = _attend(
        acc, ell, m, q, k_ptr, v_ptr, queries, 0, full, Nk, c, D, BLOCK_D, BLOCK_K, CAUSAL, False
    )  # fmt: skip
    acc, ell, m = _attend(
        acc, ell, m, q, k_ptr, v_ptr, queries, full, last, Nk, c, D, BLOCK_D, BLOCK_K, CAUSAL, True
    )  # fmt: skip

    _store_tile(o_ptr, queries, acc / ell[:, None], Nq, D, BLOCK_D)
    tl.store(lse_ptr + queries, m + tl.log2(ell), mask=queries < Nq)


@triton.jit
def _head_and_tile(tiles, LAST_FIRST: tl.constexpr):
    """Return this program's (head, tile): a head's `tiles` are neighbours, to share the cache."""
    program = tl.program_id(0)
    tile = program % tiles
    if LAST_FIRST:  # causal: the last queries see the most keys; short work fills gaps at the end
        tile = tiles - 1 - tile
    return (program // tiles).to(tl.int64), tile


@triton.jit
def _key_range(first_query, Nk, CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return two ends: of key tiles that all queries see whole, and of keys that any query sees."""
    full, last = Nk // BLOCK_K * BLOCK_K, Nk
    if CAUSAL:
        full = tl.minimum(full, (first_query + 1) // BLOCK_K * BLOCK_K)
        last = tl.minimum(last, first_query + BLOCK_Q)
    return full, last


# Backward: p comes again from q, k and lse. dv = pᵀ·do, dp = do·vᵀ, ds = p ∘ (dp - delta),
# dq = ds·k, dk = dsᵀ·q, the last two scaled.


@triton.jit
def _delta_kernel(
    o_ptr, do_ptr, delta_ptr, N, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr
):  # fmt: skip
    """Compute delta of a tile of rows; N: the rows of all heads together."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    o = _load_tile(o_ptr, rows, N, D, BLOCK_D, True).to(tl.float32)
    do = _load_tile(do_ptr, rows, N, D, BLOCK_D, True).to(tl.float32)
    tl.store(delta_ptr + rows, tl.sum(do * o, 1), mask=rows < N)


@triton.jit
def _gather_dkdv(
    dk, dv, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, keys, first, last, Nq, scale_log2e,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Add the part of queries first to last to dk, unscaled, and dv. s, p, dp, ds: key × query."""
    for start in range(first, last, BLOCK_Q):
        queries = start + tl.arange(0, BLOCK_Q)
        q = _load_tile(q_ptr, queries, Nq, D, BLOCK_D, MASKED)
        do = _load_tile(do_ptr, queries, Nq, D, BLOCK_D, MASKED)
        lse = tl.load(lse_ptr + queries, mask=queries < Nq, other=0.0)
        delta = tl.load(delta_ptr + queries, mask=queries < Nq, other=0.0)
        s = _dot(k, tl.trans(q))
        if MASKED and CAUSAL:
            s = tl.where(queries[None, :] >= keys[:, None], s, float("-inf"))
        p = tl.exp2(s * scale_log2e - lse[None, :])
        dv = _dot(p.to(do.dtype), do, dv)
        dp = _dot(v, tl.trans(do))
        ds = p * (dp - delta[None, :])
        dk = _dot(ds.to(q.dtype), q, dk)
    return dk, dv


@_tune("BLOCK_K", "BLOCK_Q", BACKWARD)
@triton.jit
def _dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, Nq, Nk, scale, octave,
    D: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of one key tile of one head."""
    head, tile = _head_and_tile(tl.cdiv(Nk, BLOCK_K), False)
    q_ptr, do_ptr = q_ptr + head * Nq * D, do_ptr + head * Nq * D
    lse_ptr, delta_ptr = lse_ptr + head * Nq, delta_ptr + head * Nq
    k_ptr, v_ptr = k_ptr + head * Nk * D, v_ptr + head * Nk * D
    dk_ptr, dv_ptr = dk_ptr + head * Nk * D, dv_ptr + head * Nk * D

    keys = tile * BLOCK_K + tl.arange(0, BLOCK_K)
    # Beyond the end the last key again: a key of zeros could make p infinite.
    k = _load_tile(k_ptr, tl.minimum(keys, Nk - 1), Nk, D, BLOCK_D, False)
    v = _load_tile(v_ptr, keys, Nk, D, BLOCK_D, True)
    dk = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    first, full, tail = _query_range(tile * BLOCK_K, Nq, CAUSAL, BLOCK_Q, BLOCK_K)
    c = scale * LOG2E
    dk, dv = _gather_dkdv(
        dk, dv, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, keys, first, full, Nq, c,
        D, BLOCK_D, BLOCK_Q, CAUSAL, True,
    )  # fmt: skip
    dk, dv = _gather_dkdv(
        dk, dv, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, keys, full, tail, Nq, c,
        D, BLOCK_D, BLOCK_Q, CAUSAL, False,
    )  # fmt: skip
    dk, dv = _gather_dkdv(
        dk, dv, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, keys, tail, Nq, Nq, c,
        D, BLOCK_D, BLOCK_Q, CAUSAL, True,
    )  # fmt: skip

    _store_tile(dk_ptr, keys, dk * scale, Nk, D, BLOCK_D)
    _store_tile(dv_ptr, keys, dv, Nk, D, BLOCK_D)


@triton.jit
def _query_range(first_key, Nq, CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return from where query tiles see some key of a tile, see all, and pass the last query."""
    first, full, tail = 0, 0, Nq // BLOCK_Q * BLOCK_Q
    if CAUSAL:
        first = tl.minimum(first_key // BLOCK_Q * BLOCK_Q, tail)
        full = tl.minimum(tl.cdiv(first_key + BLOCK_K - 1, BLOCK_Q) * BLOCK_Q, tail)
    return first, full, tail


@triton.jit
def _gather_dq(
    dq, q, do, lse, delta, k_ptr, v_ptr, queries, first, last, Nk, scale_log2e,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Add the part of keys first to last to dq, unscaled, tile by tile; return it."""
    for start in range(first, last, BLOCK_K):
        keys = start + tl.arange(0, BLOCK_K)
        k = _load_tile(k_ptr, keys, Nk, D, BLOCK_D, MASKED)
        v = _load_tile(v_ptr, keys, Nk, D, BLOCK_D, MASKED)
        s = _dot(q, tl.trans(k))
        if MASKED:
            s = tl.where(keys[None, :] < Nk, s, float("-inf"))
            if CAUSAL:
                s = tl.where(queries[:, None] >= keys[None, :], s, float("-inf"))
        p = tl.exp2(s * scale_log2e - lse[:, None])
        dp = _dot(do, tl.trans(v))
        ds = p * (dp - delta[:, None])
        dq = _dot(ds.to(k.dtype), k, dq)
    return dq


@_tune("BLOCK_Q", "BLOCK_K", BACKWARD)
@triton.jit
def _dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, Nq, Nk, scale, octave,
    D: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute dq of one query tile of one head."""
    head, tile = _head_and_tile(tl.cdiv(Nq, BLOCK_Q), CAUSAL)
    q_ptr, do_ptr, dq_ptr = q_ptr + head * Nq * D, do_ptr + head * Nq * D, dq_ptr + head * Nq * D
    k_ptr, v_ptr = k_ptr + head * Nk * D, v_ptr + head * Nk * D
    lse_ptr, delta_ptr = lse_ptr + head * Nq, delta_ptr + head * Nq

    queries = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    q = _load_tile(q_ptr, queries, Nq, D, BLOCK_D, True)
    do = _load_tile(do_ptr, queries, Nq, D, BLOCK_D, True)
    lse = tl.load(lse_ptr + queries, mask=queries < Nq, other=0.0)
    delta = tl.load(delta_ptr + queries, mask=queries < Nq, other=0.0)
    dq = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    full, last = _key_range(tile * BLOCK_Q, Nk, CAUSAL, BLOCK_Q, BLOCK_K)
    c = scale * LOG2E
    dq = _gather_dq(
        dq, q, do, lse, delta, k_ptr, v_ptr, queries, 0, full, Nk, c,
        D, BLOCK_D, BLOCK_K, CAUSAL, False,
    )  # fmt: skip
    dq = _gather_dq(
        dq, q, do, lse, delta, k_ptr, v_ptr, queries, full, last, Nk, c,
        D, BLOCK_D, BLOCK_K, CAUSAL, True,
    )  # fmt: skip
    _store_tile(dq_ptr, queries, dq * scale, Nq, D, BLOCK_D)


# From PyTorch


class FlashAttentionTriton(torch.autograd.Function):
    """`flash_attention_triton` as a function of autograd: apply(q, k, v, causal).

    It can be differentiated once.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
        _check(q, k, v)
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        sizes = ctx.sizes = _sizes(q, k, causal)
        o, lse = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
        with torch.cuda.device_of(q):
            _forward_kernel[_programs(q, "BLOCK_Q")](q, k, v, o, lse, **sizes)
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        sizes, do, delta = ctx.sizes, do.contiguous(), torch.empty_like(lse)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        rows, D, BLOCK_D = delta.numel(), sizes["D"], sizes["BLOCK_D"]
        with torch.cuda.device_of(q):
            _delta_kernel[triton.cdiv(rows, 32),](o, do, delta, rows, D, BLOCK_D, BLOCK_Q=32)
            _dkdv_kernel[_programs(k, "BLOCK_K")](q, k, v, do, lse, delta, dk, dv, **sizes)
            _dq_kernel[_programs(q, "BLOCK_Q")](q, k, v, do, lse, delta, dq, **sizes)
        return dq, dk, dv, None


def flash_attention_triton(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Compute softmax(q·kᵀ/√D)·v tile by tile on a GPU, as `flash_attention` does in PyTorch.

    q: (..., Nq, D). k, v: (..., Nk, D), in fp16, bf16 or fp32, D at most 256. causal: query i sees
    keys up to i. Sums are fp32, the factors of every product have q's dtype. Returns (..., Nq, D),
    contiguous, of q's dtype.
    ValueError: shapes, dtypes or devices that don't fit; bf16 in the interpreter, which multiplies
    it wrongly. RuntimeError: neither a GPU of compute capability 8.0 or higher nor the interpreter.

    Cost: 4 Nq Nk D operations a head, 14 backward; causal about half. Kept for backward: q, k, v,
    the result, and an fp32 number for each of its rows. What isn't contiguous is copied. The first
    call of a size compiles and times kernels.
    """
    return FlashAttentionTriton.apply(q, k, v, causal)


def _sizes(q: Tensor, k: Tensor, causal: bool) -> dict[str, float]:
    """Return {name of an argument: value}, of those that all tuned kernels share.

    octave: the number of bits of the longer length, by which `_tune` tells lengths apart.
    """
    Nq, Nk, D = q.shape[-2], k.shape[-2], q.shape[-1]
    return {
        "Nq": Nq,
        "Nk": Nk,
        "scale": D**-0.5,
        "octave": max(Nq, Nk).bit_length(),
        "D": D,
        "BLOCK_D": max(16, triton.next_power_of_2(D)),  # tl.dot takes 16 at least, in powers of two
        "CAUSAL": bool(causal),
        "enable_fp_fusion": True,  # a * b + c in one instruction; Triton 3.9 warns if it isn't set
    }


def _programs(x: Tensor, block: str):
    """Return a kernel's grid: a program for each tile of each head of `x`. block: "BLOCK_Q", say.

    It is a function of the kernel's sizes, since the tuner chooses the tile's rows.
    """
    *heads, N, _ = x.shape
    return lambda sizes: (math.prod(heads) * triton.cdiv(N, sizes[block]),)


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError or RuntimeError unless the kernels can compute with these tensors."""
    _check_device(q)
    check_shapes(q, k, v)
    fits = {
        "nothing empty, and D of at most 256": 0 not in q.shape and q.shape[-1] <= 256,
        "float16, bfloat16 or float32": q.dtype in DTYPES,
        "no bfloat16 in Triton's interpreter": not (INTERPRETED and q.dtype == torch.bfloat16),
        "all on one device": q.device == k.device == v.device,
    }
    got = f"q {tuple(q.shape)}, {q.dtype}, on {q.device}, k on {k.device}, v on {v.device}"
    remedy = "convert, or use ddpkit.flash_attention"
    for expected, true in fits.items():
        if not true:
            raise ValueError(f"expected {expected}, got {got}: {remedy}")


def _check_device(q: Tensor) -> None:
    """Raise RuntimeError unless there is the interpreter, or q is on a GPU that is new enough."""
    use = "Use ddpkit.flash_attention, or start Python with TRITON_INTERPRET=1 (slow)."
    if INTERPRETED:
        return
    if not q.is_cuda:
        raise RuntimeError(f"expected tensors on a GPU, got {q.device}: to('cuda')? {use}")
    capability = torch.cuda.get_device_capability(q.device)
    if capability < (8, 0):
        got = f"{'.'.join(map(str, capability))} ({torch.cuda.get_device_name(q.device)})"
        raise RuntimeError(f"expected a GPU of compute capability 8.0 or higher, got {got}. {use}")
