"""The Triton kernels against attention in float64: in the interpreter, or on a GPU that can."""

import importlib
import os
import subprocess
import sys
from types import SimpleNamespace

import gpu
import pytest
import torch
import torch.nn.functional as F
from attention_cases import complaint, output_and_gradients, randn

from ddpkit import launch
from ddpkit.bench import attention as bench
from ddpkit.bench.interleave import WARM_UP
from ddpkit.bench.results import AGAIN

triton = pytest.importorskip("triton", reason="triton isn't installed")
from ddpkit.fast import triton_attention as kernels  # noqa: E402
from ddpkit.fast.triton_attention import INTERPRETED  # noqa: E402
from ddpkit.flash_triton import flash_attention_triton  # noqa: E402

ON_GPU = not INTERPRETED and torch.cuda.get_device_capability() >= (8, 0)
pytestmark = [
    pytest.mark.skipif(not (INTERPRETED or ON_GPU), reason="compute capability below 8.0"),
]
on_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU of compute capability 8.0 or higher")
in_interpreter = pytest.mark.skipif(not INTERPRETED, reason="tiles of Triton's interpreter")
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=on_gpu)]
OWN, OTHERS = 32, 16  # in the interpreter: rows of a program's own tile, and of the others
TUNED = kernels._forward_kernel, kernels._dkdv_kernel, kernels._dq_kernel
TILES = list(zip(*(kernel.configs for kernel in TUNED), strict=True))
PICKED = TILES[-3:][0], TILES[-1]  # 64 rows; 16, the only ones for fp32


def take(monkeypatch, *tiles):
    """Let each kernel choose among these, anew."""
    for kernel, *configs in zip(TUNED, *tiles, strict=True):
        monkeypatch.setattr(kernel, "configs", configs)
        monkeypatch.setattr(kernel, "cache", {})


@pytest.fixture(autouse=True)
def few_tiles_on_a_gpu(monkeypatch):
    """All of them take minutes to compile."""
    if ON_GPU:
        take(monkeypatch, *PICKED)


def tensors(*heads, Nq, Nk, D=16, dtype=torch.float32):
    """q, k, v, do."""
    shapes = [(*heads, Nq, D), (*heads, Nk, D), (*heads, Nk, D), (*heads, Nq, D)]
    return [randn(*x, seed=seed, dtype=dtype, device=DEVICE) for seed, x in enumerate(shapes)]


def wrong(q, k, v, do, causal=False):
    return complaint(flash_attention_triton, q, k, v, do, causal, factors=q.dtype)


def test_tails():
    """Lengths around those of a tile, from queries alone to keys alone."""
    for Nq, Nk, causal in ((1, 33, True), (15, 17, False), (33, 32, True), (31, 1, False)):
        assert wrong(*tensors(Nq=Nq, Nk=Nk), causal) is None, (Nq, Nk, causal)


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_and_sizes(dtype):
    for *heads, Nq, Nk, D, causal in ((2, 2, 17, 50, 24, True), (3, 1, 50, 17, 5, False)):
        inputs = tensors(*heads, Nq=Nq, Nk=Nk, D=D, dtype=dtype)
        assert wrong(*inputs, causal) is None, (heads, Nq, Nk, D, causal)


@in_interpreter
def test_other_tiles(monkeypatch):
    """Own tiles shorter than those looped over: the diagonal crosses several programs."""
    own_q, own_k = ({f"BLOCK_{own}": 16, f"BLOCK_{x}": 32} for own, x in ("QK", "KQ"))
    take(monkeypatch, [triton.Config(tiles) for tiles in (own_q, own_k, own_q)])
    assert wrong(*tensors(Nq=65, Nk=59), True) is None


def test_memory_layouts():
    """Swapped axes, as after a projection; every other column; a broadcast head; do of a sum."""
    q = randn(20, 2, 16, dtype=torch.float32, device=DEVICE).transpose(0, 1)
    k = randn(2, 20, 32, dtype=torch.float32, device=DEVICE)[..., ::2]
    v = randn(1, 20, 16, dtype=torch.float32, device=DEVICE).expand(2, 20, 16)
    assert wrong(q, k, v, q.new_ones(()).expand(q.shape), True) is None
    assert flash_attention_triton(q, k, v).is_contiguous()


def test_nothing_beyond_the_tensors_is_used():
    """In memory NaN follows each of them: 0 times NaN would show."""
    for N in (32, 33):
        memory = torch.full((4, 40, 24), torch.nan, device=DEVICE)
        memory[:, :N] = randn(4, N, 24, dtype=torch.float32)
        found = output_and_gradients(flash_attention_triton, *memory[:, :N])
        assert all(x.isfinite().all() for x in found.values())


def test_large_scores():
    """exp(1000) would be inf; the maximum comes last, or first, or is far below zero."""
    q, k, v, do = tensors(Nq=20, Nk=40)
    rising = torch.linspace(-1, 1, 40, device=DEVICE)[:, None]
    for slope in (rising, -rising, rising - 2):
        assert wrong(10 * q + 50, k + 20 * slope, v, do) is None


@in_interpreter
def test_tiles_in_the_future_are_not_even_read():
    """NaN times 0 is NaN: were they read, the NaN of later keys and earlier do would be in all."""
    q, k, v, do = tensors(Nq=OWN, Nk=2 * OWN)
    k[OWN:] = v[OWN:] = torch.nan
    found = output_and_gradients(flash_attention_triton, q, k, v, do, True)
    assert all(x[:OWN].isfinite().all() for x in found.values())
    q, k, v, do = tensors(Nq=2 * OWN, Nk=2 * OWN)
    do[:OWN] = torch.nan
    found = output_and_gradients(flash_attention_triton, q, k, v, do, True)
    assert all(x[OWN:].isfinite().all() for x in found.values())


def test_kept_are_q_k_v_o_and_a_number_for_each_row():
    q, k, v = (x.requires_grad_() for x in tensors(2, Nq=20, Nk=30)[:3])
    o = flash_attention_triton(q, k, v)
    sizes = [x.numel() for x in o.grad_fn.saved_tensors]
    assert sizes == [q.numel(), k.numel(), v.numel(), o.numel(), 2 * 20]
    slope = torch.autograd.grad(o.square().sum(), q, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


LONGER = [  # Nq, Nk, dtype, D, causal: every two of these values meet, D 256 once
    (1024, 1024, torch.float16, 64, False),
    (1024, 1024, torch.bfloat16, 128, True),
    (1000, 777, torch.float16, 128, False),
    (1000, 777, torch.bfloat16, 64, True),
    (2048, 1, torch.float16, 64, True),
    (2048, 1, torch.bfloat16, 128, False),
    (1000, 777, torch.float16, 256, True),
]


@on_gpu
@pytest.mark.parametrize(("Nq", "Nk", "dtype", "D", "causal"), LONGER)
def test_longer_on_a_gpu(Nq, Nk, dtype, D, causal):
    assert wrong(*tensors(2, 4, Nq=Nq, Nk=Nk, D=D, dtype=dtype), causal) is None


@on_gpu
def test_every_tile_on_a_gpu(monkeypatch):
    """One by one, then as they are chosen from. Smaller GPUs have no room for some."""
    inputs, right = tensors(2, 4, Nq=1000, Nk=777, D=64, dtype=torch.bfloat16), 0
    for tiles in (*([each] for each in TILES), TILES):
        take(monkeypatch, *tiles)
        try:
            assert wrong(*inputs, True) is None, tiles
        except triton.runtime.errors.OutOfResources:
            continue
        right += 1
    assert right >= 4


# Seconds to compile a kernel by Triton 3.9 for compute capability 9.0, the mean of three kernels,
# on one of two cores with others at work: with the tiles that are picked, and with all.
PICKED_S = {32: 0.4, 64: 0.5, 128: 0.6, 256: 1.1}
EACH_S = {64: 0.8, 128: 2.1}
TIMED_S, STARTS_S = 0.2, 5.0  # Triton times a kernel; a process comes to its first


def limit_s(name):
    return next(part.limit_s for part in gpu.PARTS if part.name == name)


def test_the_kernels_can_end_in_their_part_of_make_gpu():
    """Compiling and choosing tiles, reckoned; as much is left for the rest."""
    picked, every = (len(TUNED) * len(tiles) for tiles in (PICKED, kernels.FORWARD))
    cases = [*(D for *_, D, _ in LONGER), 64, *[32] * 10]  # 64: the same bits; the rest is small
    seconds = sum(picked * (PICKED_S[D] + TIMED_S) for D in cases)
    seconds += every * (EACH_S[64] + TIMED_S)
    assert 2 * seconds <= limit_s("kernels")


def test_their_benchmark_can_end_in_its_part_of_make_gpu():
    """Each case has a process of its own; what one has compiled, the next finds on the disk."""
    every, cases = len(TUNED) * len(kernels.FORWARD), bench.cases("cuda")
    compiled = {case[:2]: every * EACH_S[case.head_size] for case in cases}
    variants = 1 + len(bench.PARTS) * (
        len(bench.BACKENDS) + len((bench.PLAIN, bench.TRITON, AGAIN))
    )
    turns_s = (bench.ROUNDS + WARM_UP) * variants * bench.TURN_S
    seconds = sum(compiled.values()) + len(cases) * (every * TIMED_S + turns_s + STARTS_S)
    assert seconds <= limit_s("bench attention")


@on_gpu
def test_gradients_have_the_same_bits_in_every_run():
    inputs = tensors(2, 8, Nq=1000, Nk=1000, D=64, dtype=torch.bfloat16)
    first = output_and_gradients(flash_attention_triton, *inputs)
    for _ in range(5):
        again = output_and_gradients(flash_attention_triton, *inputs)
        assert all(torch.equal(again[name], x) for name, x in first.items())


# What it refuses


def zeros(*shapes, dtype=torch.float32):
    return [torch.zeros(shape, dtype=dtype, device=DEVICE) for shape in shapes]


@pytest.mark.parametrize(
    ("refused", "says"),
    [
        (zeros((4, 16), (4, 32), (4, 32)), "is an axis missing or swapped"),
        (zeros((4, 2, 4, 16), (4, 1, 4, 16), (4, 1, 4, 16)), "is an axis missing or swapped"),
        (zeros((0, 16), (4, 16), (4, 16)), "nothing empty"),
        (zeros((4, 257), (4, 257), (4, 257)), "D of at most 256"),
        (zeros((4, 16), (4, 16), (4, 16), dtype=torch.float64), "got q (4, 16), torch.float64"),
        ([*zeros((4, 16), (4, 16)), torch.zeros(4, 16, device="meta")], "v on meta"),
    ],
)
def test_mistakes_are_named(refused, says):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        flash_attention_triton(*refused)
    assert says in str(error.value)


@in_interpreter
def test_the_interpreter_refuses_bf16():
    with pytest.raises(ValueError, match="no bfloat16 in Triton's interpreter"):
        flash_attention_triton(*zeros((4, 16), (4, 16), (4, 16), dtype=torch.bfloat16))


def test_an_older_gpu_and_a_cpu_are_refused(monkeypatch):
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(RuntimeError, match=r"8.0 or higher, got 7.5 \(Tesla T4\). Use ddpkit.fl"):
        kernels._check_device(SimpleNamespace(is_cuda=True, device="cuda:0"))
    with pytest.raises(RuntimeError, match=r"tensors on a GPU, got cpu.*TRITON_INTERPRET=1"):
        kernels._check_device(SimpleNamespace(is_cuda=False, device="cpu"))


# Other beginnings


def results_after(beginning):
    """In a fresh process that sees no GPU: ours, and PyTorch's."""
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    exec(beginning)
    from ddpkit.flash_triton import flash_attention_triton

    x = torch.randn(20, 16)
    return flash_attention_triton(x, x, x), F.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize(
    "beginning",
    [
        "import triton",  # as the first optimizer does, today
        pytest.param("torch.optim.SGD([torch.ones(1)], lr=1.0)", marks=pytest.mark.slow),
    ],
)
def test_without_gpu_the_interpreter_computes(beginning):
    run = launch(results_after, beginning, world_size=1, backend="gloo")
    torch.testing.assert_close(*run[0])


def test_without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "ddpkit.fast.triton_attention")
    says = "ddpkit.flash_triton needs triton, which isn't installed: pip install triton"
    with pytest.raises(ImportError, match=says):
        importlib.import_module("ddpkit.fast.triton_attention")


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ddpkit.fast import triton_attention as kernels

DTYPE, D, CAUSAL, CAPABILITY = {arguments}
for name, own, others, tiles in (
    ("_forward_kernel", "BLOCK_Q", "BLOCK_K", kernels.FORWARD),
    ("_dkdv_kernel", "BLOCK_K", "BLOCK_Q", kernels.BACKWARD),
    ("_dq_kernel", "BLOCK_Q", "BLOCK_K", kernels.BACKWARD),
):
    kernel, (m, n, warps, stages) = getattr(kernels, name).fn, tiles[{tile}]
    fixed = dict(D=D, BLOCK_D=D, CAUSAL=CAUSAL, **{{own: m, others: n}})
    types = dict.fromkeys(kernel.arg_names, "*" + DTYPE) | dict.fromkeys(fixed, "constexpr")
    types |= dict(lse_ptr="*fp32", delta_ptr="*fp32", scale="fp32")
    types |= dict(Nq="i32", Nk="i32", octave="i32")
    types = {{x: types[x] for x in kernel.arg_names}}
    aligned = [(i,) for i, x in enumerate(kernel.arg_names) if "ptr" in x or x in ("Nq", "Nk")]
    compiled = triton.compile(
        ASTSource(kernel, types, fixed, dict.fromkeys(aligned, [["tt.divisibility", 16]])),
        target=GPUTarget("cuda", CAPABILITY, 32),
        options=dict(num_warps=warps, num_stages=stages, enable_fp_fusion=True),
    )
    on_tensor_cores = "wgmma" in compiled.asm["ptx"]
    print(name, compiled.metadata.shared, on_tensor_cores, len(compiled.asm["cubin"]) > 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "D", "causal", "capability", "tile", "shared_bytes"),
    [
        ("bf16", 64, True, 90, 0, 227 * 1024),
        ("fp16", 128, False, 90, 0, 227 * 1024),
        ("bf16", 128, True, 86, 2, 99 * 1024),
    ],
)
def test_compiles_for_gpus_that_are_not_here(
    dtype, D, causal, capability, tile, shared_bytes, tmp_path
):
    """The largest tiles on a Hopper GPU, with its own matrix instructions; and on smaller GPUs."""
    environ = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    environ["CUDA_VISIBLE_DEVICES"] = ""
    code = COMPILE.format(arguments=(dtype, D, causal, capability), tile=tile)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        check=True,
    )
    said = done.stdout.splitlines()
    assert len(said) == 3, said
    for line in said:
        _, shared, on_tensor_cores, machine_code = line.split()
        assert int(shared) <= shared_bytes
        assert (on_tensor_cores, machine_code) == (str(capability == 90), "True")
