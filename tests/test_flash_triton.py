"""The Triton kernels against attention in float64: in the interpreter, or on a GPU where there is one that can."""

import math
import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch

from ddpkit.flash_attention import flash_attention

triton = pytest.importorskip("triton", reason="triton isn't installed")
from ddpkit import flash_triton  # noqa: E402
from ddpkit.flash_triton import INTERPRETED, FlashAttentionTriton, flash_attention_triton  # noqa: E402

ON_GPU = not INTERPRETED and torch.cuda.get_device_capability() >= (8, 0)
pytestmark = pytest.mark.skipif(not (INTERPRETED or ON_GPU), reason="the GPU's compute capability is below 8.0")
on_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU of compute capability 8.0 or higher")
in_interpreter = pytest.mark.skipif(not INTERPRETED, reason="tiles of Triton's interpreter")
DEVICE = "cpu" if INTERPRETED else "cuda"
TILES = 32, 16  # in the interpreter: rows of a program's own tile, and of those it loops over


def _plain(q, k, v, causal, scale):
    """Attention as in textbooks."""
    if q.ndim > 2:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], dim=-3) for x in (k, v))
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf)
    return s.softmax(-1) @ v


def _with_gradients(attend, q, k, v, do):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    o = attend(q, k, v)
    return o.detach(), *torch.autograd.grad(o, (q, k, v), do)


def _check(q, k, v, causal=False, scale=None, attend=None):
    """o, dq, dk, dv: the error at most twice that of plain attention in the same dtype.

    And a floor where plain attention happens to be exact, in units in the last place of the largest number, which for
    dq and dk is what they have before dp - delta cancels: 4; and 2 of fp32 for each unit of the largest score in base
    2, since the rounding of s and lse is that of p's exponent.
    """
    do = torch.randn(q.shape, dtype=q.dtype, device=q.device)
    attend = attend or (lambda q, k, v: flash_attention_triton(q, k, v, causal, scale=scale))
    ours = _with_gradients(attend, q, k, v, do)
    plain = _with_gradients(lambda q, k, v: _plain(q, k, v, causal, scale), q, k, v, do)
    exact = _with_gradients(lambda q, k, v: _plain(q, k, v, causal, scale), *(x.double() for x in (q, k, v, do)))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    score = scale * math.log2(math.e) * q.norm(dim=-1).max().item() * k.norm(dim=-1).max().item()
    ulps = 4 * torch.finfo(q.dtype).eps + 2 * torch.finfo(torch.float32).eps * score
    dp = scale * do.norm(dim=-1).max() * v.norm(dim=-1).max()
    sizes = exact[0].abs().max(), dp * k.abs().max(), dp * q.abs().max(), exact[3].abs().max()
    for name, got, standard, right, size in zip(("o", "dq", "dk", "dv"), ours, plain, exact, sizes, strict=True):
        assert got.dtype == q.dtype
        assert got.shape == right.shape
        allowed = 2 * (standard - right).abs().max() + ulps * size
        assert (got - right).abs().max() <= allowed, name
    return ours


def _random(*shape, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return torch.randn(shape, dtype=dtype, device=DEVICE)


def _qkv(heads, kv_heads, Nq, Nk, D, dtype=torch.float32):
    q, k, v = _random(*heads, Nq, D), _random(*kv_heads, Nk, D, seed=1), _random(*kv_heads, Nk, D, seed=2)
    return q.to(dtype), k.to(dtype), v.to(dtype)


@pytest.mark.parametrize("causal", [False, True])
def test_tails_of_every_length(causal):
    own, others = TILES
    for Nq in (*range(1, others + 2), own - 1, own, own + 1):
        _check(*_qkv((), (), Nq, own + 2 - Nq, 16), causal)


GRID = [  # leading axes of q, of k and v; Nq, Nk, D, causal
    ((), (), 64, 64, 16, True),
    ((2,), (1,), 64, 64, 64, False),
    ((2, 2), (2, 2), 17, 50, 24, False),
    ((1, 4), (1, 2), 17, 50, 128, True),
    ((3, 1, 2), (3, 1, 1), 50, 17, 24, True),
    ((1,), (1,), 50, 17, 256, False),
    ((3,), (1,), 33, 96, 16, False),
    ((2,), (2,), 33, 96, 64, True),
    ((1, 4), (1, 1), 1, 70, 64, False),
    ((), (), 1, 70, 24, True),
    ((2, 2), (2, 1), 70, 1, 16, True),
    ((), (), 97, 97, 128, False),
    ((1,), (1,), 64, 33, 256, True),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=on_gpu)])
@pytest.mark.parametrize(("heads", "kv_heads", "Nq", "Nk", "D", "causal"), GRID)
def test_grid(heads, kv_heads, Nq, Nk, D, causal, dtype):
    _check(*_qkv(heads, kv_heads, Nq, Nk, D, dtype), causal)


@pytest.mark.parametrize("causal", [False, True])
def test_like_the_pytorch_version(causal):
    q, k, v = _qkv((2, 4), (2, 2), 40, 50, 16)
    do = torch.randn_like(q)
    ours = _with_gradients(lambda q, k, v: flash_attention_triton(q, k, v, causal, scale=0.5), q, k, v, do)
    torchs = _with_gradients(lambda q, k, v: flash_attention(q, k, v, causal, scale=0.5), q, k, v, do)
    torch.testing.assert_close(ours, torchs)


@in_interpreter
@pytest.mark.parametrize("causal", [False, True])
def test_other_tiles(causal, monkeypatch):
    """Own tiles shorter than those looped over: the diagonal crosses several programs."""
    for kernel, own, others in (("_forward_kernel", "Q", "K"), ("_dkdv_kernel", "K", "Q"), ("_dq_kernel", "Q", "K")):
        tiles = triton.Config({f"BLOCK_{own}": 16, f"BLOCK_{others}": 32})
        monkeypatch.setattr(getattr(flash_triton, kernel), "configs", [tiles])
    _check(*_qkv((2,), (1,), 81, 75, 16), causal)


def test_memory_layouts():
    """Heads and positions swapped, as after a projection; every other column; a broadcast head; a transposed matrix."""
    q = _random(40, 2, 16).transpose(0, 1)
    k = _random(2, 50, 32)[..., ::2]
    v = _random(1, 50, 16).expand(2, 50, 16)
    _check(q, k, v, causal=True)
    _check(_random(16, 40).mT, _random(16, 50).mT, _random(16, 50).mT)
    o = flash_attention_triton(q, k, v)
    assert o.is_contiguous()


@pytest.mark.parametrize("N", [32, 33])
def test_nothing_beyond_the_tensors_is_used(N):
    """In memory NaN follows each of them: 0 times NaN would show."""
    tensors = []
    for seed in range(4):
        buffer = torch.full((40, 24), torch.nan, device=DEVICE)
        buffer[:N] = _random(N, 24, seed=seed)
        tensors.append(buffer[:N])
    for x in _with_gradients(flash_attention_triton, *tensors):
        assert x.isfinite().all()


def test_gradient_of_a_sum():
    """do is one number, expanded: it has strides of zero."""
    q, k, v = _qkv((2,), (2,), 20, 20, 16)
    q.requires_grad_()
    (dq,) = torch.autograd.grad(flash_attention_triton(q, k, v).sum(), q)
    (right,) = torch.autograd.grad(_plain(q, k, v, False, None).sum(), q)
    torch.testing.assert_close(dq, right)


def test_large_scores():
    """exp(1000) would be inf, exp(-1000) nothing; the maximum comes last, or first, or is far below zero."""
    q, k, v = _qkv((), (), 40, 40, 16)
    rising = torch.linspace(-1, 1, 40, device=DEVICE)[:, None]
    for slope in (rising, -rising, rising - 2):
        o, *_ = _check(10 * q + 50, k + 20 * slope, v)
        assert o.isfinite().all()


def test_scale():
    _check(*_qkv((), (), 40, 40, 16), scale=1.5)


def test_apply_as_promised():
    _check(*_qkv((2,), (2,), 20, 20, 16), causal=True, attend=lambda q, k, v: FlashAttentionTriton.apply(q, k, v, True))


@in_interpreter
def test_tiles_in_the_future_are_not_even_read():
    """NaN times 0 is NaN: were they read, the NaN of the later keys would be in all results."""
    own, _ = TILES
    q, k, v = _qkv((), (), own, 2 * own, 16)
    k[own:], v[own:] = torch.nan, torch.nan
    o, dq, dk, dv = _with_gradients(lambda q, k, v: flash_attention_triton(q, k, v, True), q, k, v, torch.ones_like(q))
    for x in (o, dq, dk[:own], dv[:own]):
        assert x.isfinite().all()


def test_keeps_nothing_quadratic():
    kept = []
    q, k, v = (x.requires_grad_() for x in _qkv((2,), (1,), 70, 60, 16))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        o = flash_attention_triton(q, k, v)
    lse = torch.empty(2, 70)
    assert sorted(x.nbytes for x in kept) == sorted(x.nbytes for x in (q, k, v, o, lse))


def test_differentiable_once():
    q, k, v = (x.requires_grad_() for x in _qkv((), (), 8, 8, 16))
    (dq,) = torch.autograd.grad(flash_attention_triton(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


@on_gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("Nq", "Nk"), [(1024, 1024), (1000, 777), (2048, 1)])
def test_longer_on_a_gpu(Nq, Nk, dtype, D, causal):
    _check(*_qkv((2, 4), (2, 2), Nq, Nk, D, dtype), causal)


@on_gpu
def test_gradients_have_the_same_bits_in_every_run():
    q, k, v = _qkv((2, 8), (2, 2), 1000, 1000, 64, torch.bfloat16)
    do = torch.randn_like(q)
    first = _with_gradients(flash_attention_triton, q, k, v, do)
    for _ in range(5):
        assert all(map(torch.equal, _with_gradients(flash_attention_triton, q, k, v, do), first))


# What it refuses


def _shaped(*shapes, dtype=torch.float32):
    return [torch.zeros(shape, dtype=dtype, device=DEVICE) for shape in shapes]


@pytest.mark.parametrize(
    ("tensors", "scale", "says"),
    [
        (_shaped((16,), (16,), (16,)), None, "is an axis missing"),
        (_shaped((4, 16), (4, 16), (5, 16)), None, "is an axis missing"),
        (_shaped((4, 16), (4, 32), (4, 32)), None, "is an axis missing"),
        (_shaped((2, 4, 16), (4, 16), (4, 16)), None, "is an axis missing"),
        (_shaped((3, 4, 16), (2, 4, 16), (2, 4, 16)), None, "may be a multiple of k's, got q (3, 4, 16), k (2, 4, 16)"),
        (_shaped((2, 1, 4, 16), (1, 1, 4, 16), (1, 1, 4, 16)), None, "leading axes alike"),
        (_shaped((4, 16), (0, 16), (0, 16)), None, "nothing empty"),
        (_shaped((4, 257), (4, 257), (4, 257)), None, "D of 1 to 256"),
        (_shaped((4, 16), (4, 16), (4, 16), dtype=torch.float64), None, "got torch.float64 on"),
        (_shaped((4, 16)) + _shaped((4, 16), (4, 16), dtype=torch.float16), None, "alike, on one device"),
        (_shaped((4, 16), (4, 16), (4, 16)), -1.0, "positive scale, got -1.0"),
        (_shaped((4, 16), (4, 16), (4, 16)), float("nan"), "positive scale, got nan"),
    ],
)
def test_refuses(tensors, scale, says):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        flash_attention_triton(*tensors, scale=scale)
    assert says in str(error.value)


@in_interpreter
def test_interpreter_refuses_bf16():
    with pytest.raises(ValueError, match="in Triton's interpreter, got bfloat16"):
        flash_attention_triton(*_shaped((4, 16), (4, 16), (4, 16), dtype=torch.bfloat16))


@in_interpreter
def test_interpreter_of_an_older_triton_is_refused(monkeypatch):
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    with pytest.raises(RuntimeError, match=r"expected Triton 3\.7 or newer, got 3\.6\.0"):
        flash_attention_triton(*_shaped((4, 16), (4, 16), (4, 16)))


def test_an_older_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(flash_triton, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(RuntimeError, match=r"8.0 or higher, got 7.5 \(Tesla T4\). Use ddpkit.flash_attention"):
        flash_triton._check_device(SimpleNamespace(is_cuda=True, device="cuda:0"))


# Other beginnings, in a process of their own


def _run(code, **environ):
    """What it prints; warnings are errors. Without GPU, so that it is the same everywhere."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        env={**{name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}, **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


COMPUTES = """
from ddpkit.flash_triton import flash_attention_triton
x = torch.randn(40, 16)
torch.testing.assert_close(flash_attention_triton(x, x, x), torch.nn.functional.scaled_dot_product_attention(x, x, x))
"""


@pytest.mark.parametrize(
    "before",
    [
        "import torch",
        "import triton, torch",
        "import torch; torch.optim.SGD([torch.ones(1)], lr=1.0)",  # imports triton, today
    ],
)
def test_without_gpu_the_interpreter_computes(before):
    assert _run(before + COMPUTES, CUDA_VISIBLE_DEVICES="") == ""


def test_neither_gpu_nor_interpreter():
    said = _run("import torch" + COMPUTES, CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="0")
    assert "RuntimeError: expected tensors on a GPU, got cpu" in said
    assert "TRITON_INTERPRET=1" in said


def test_without_triton():
    said = _run("import sys; sys.modules['triton'] = None; import ddpkit.flash_triton")
    assert "ImportError: ddpkit.flash_triton needs triton, which isn't installed: pip install triton" in said


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ddpkit import flash_triton

DTYPE, D, CAUSAL, CAPABILITY = {arguments}
for name, own, others, tiles in (
    ("_forward_kernel", "BLOCK_Q", "BLOCK_K", flash_triton.FORWARD),
    ("_dkdv_kernel", "BLOCK_K", "BLOCK_Q", flash_triton.BACKWARD),
    ("_dq_kernel", "BLOCK_Q", "BLOCK_K", flash_triton.BACKWARD),
):
    kernel, (m, n, warps, stages) = getattr(flash_triton, name).fn, tiles[{tile}]
    fixed = dict(GROUPS=1, D=D, BLOCK_D=D, CAUSAL=CAUSAL, **{{own: m, others: n}})
    types = dict(lse_ptr="*fp32", delta_ptr="*fp32", scale="fp32", Nq="i32", Nk="i32", octave="i32")
    types = {{x: "constexpr" if x in fixed else types.get(x, "*" + DTYPE) for x in kernel.arg_names}}
    aligned = [(i,) for i, x in enumerate(kernel.arg_names) if "ptr" in x or x in ("Nq", "Nk")]
    compiled = triton.compile(
        ASTSource(kernel, types, fixed, dict.fromkeys(aligned, [["tt.divisibility", 16]])),
        target=GPUTarget("cuda", CAPABILITY, 32),
        options=dict(num_warps=warps, num_stages=stages, enable_fp_fusion=True),
    )
    print(name, compiled.metadata.shared, "wgmma" in compiled.asm["ptx"], len(compiled.asm["cubin"]) > 0)
"""


@pytest.mark.parametrize(
    ("dtype", "D", "causal", "capability", "tile", "shared_bytes"),
    [
        ("bf16", 64, True, 90, 0, 227 * 1024),
        ("fp16", 128, False, 90, 0, 227 * 1024),
        ("bf16", 128, True, 86, 2, 99 * 1024),
    ],
)
def test_compiles_for_gpus_that_are_not_here(dtype, D, causal, capability, tile, shared_bytes, tmp_path):
    """The largest tiles on a Hopper GPU, with its own matrix instructions; and some that a smaller GPU has room for."""
    code = COMPILE.format(arguments=(dtype, D, causal, capability), tile=tile)
    said = _run(code, CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path)).splitlines()
    assert [line.split()[0] for line in said] == ["_forward_kernel", "_dkdv_kernel", "_dq_kernel"], said
    for line in said:
        _, shared, on_tensor_cores, machine_code = line.split()
        assert int(shared) <= shared_bytes
        assert (on_tensor_cores, machine_code) == (str(capability == 90), "True")
