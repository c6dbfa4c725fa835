"""ddpkit.batch_norm, on every rank, against torch's in one process with the whole batch.

Models with it train as one process does in test_ddp: test_a_join.
"""

import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from training_cases import sent_by

from ddpkit.batch_norm import GlobalBatchNorm, batch_statistics, convert

CHANNELS = 3
SHARES = {1: [[4]], 2: [[5, 0], [1, 4]], 3: [[0, 2, 3]], 4: [[1, 2, 0, 4]]}
ROWS, SEQUENCES, IMAGES = (CHANNELS,), (CHANNELS, 4), (CHANNELS, 2, 5)
KINDS = [
    (ROWS, {}),
    (SEQUENCES, {}),
    (IMAGES, {}),
    (IMAGES, {"momentum": None}),
    (ROWS, {"momentum": 0.3, "eps": 0.1}),
    (SEQUENCES, {"affine": False}),
    (ROWS, {"track_running_stats": False}),
]


def norm_of(shape, **options):
    """Torch's for rows of this shape, in float64, with parameters that aren't ones and zeros."""
    norm = (nn.BatchNorm2d if len(shape) == 3 else nn.BatchNorm1d)(CHANNELS, **options).double()
    for number, parameter in enumerate(norm.parameters()):
        nn.init.normal_(parameter, mean=1.0, generator=torch.Generator().manual_seed(number))
    return norm


def batches(rows, shape):
    """Two whole batches, and each output's weight in the loss: (inputs, weights)."""
    generator = torch.Generator().manual_seed(rows)
    numbers = torch.randn(2, 2, rows, *shape, generator=generator, dtype=torch.float64)
    return (2 * numbers + 1).unbind()


def outcome(norm, x, weights):
    """Output and gradients of a step, outputs in eval and under no_grad, the state after it."""
    x = x.clone().requires_grad_()
    norm.train().zero_grad()
    y = norm(x)
    (y * weights).square().sum().backward()
    found = {"y": y.detach(), "x.grad": x.grad}
    found |= {f"{name}.grad": parameter.grad.clone() for name, parameter in norm.named_parameters()}
    with torch.no_grad():
        if norm.track_running_stats:  # without, eval is local, see below
            found["eval"] = norm.eval()(x)
        found["no_grad"] = norm.train()(x)
    return found | {name: buffer.clone() for name, buffer in norm.named_buffers()}


@on_ranks(1, 2, 3, 4)
def test_ranks_together_are_one_process(check, rank, world_size):
    for shares in SHARES[world_size]:
        start = sum(shares[:rank])
        mine = slice(start, start + shares[rank])
        for shape, options in KINDS:
            ours, theirs = convert(norm_of(shape, **options)), norm_of(shape, **options)
            for x, weights in batches(sum(shares), shape):
                got = outcome(ours, x[mine], weights[mine])
                for name, expected in outcome(theirs, x, weights).items():
                    what = shares, shape, options, name
                    if name in ("y", "x.grad", "no_grad", "eval"):
                        expected = expected[mine]
                    elif name.endswith(".grad"):
                        dist.all_reduce(got[name])  # each rank has its rows' part
                    else:
                        check.same_on_all(got[name], *what)
                    bound = 1e-12 + 1e-10 * expected.abs()
                    check.close(got[name], expected, bound, *what)


# Numbers that are hard, and other dtypes


@on_ranks(2)
def test_a_mean_far_from_zero(check):
    """In float32, squares of 10⁴ would leave nothing of a variance of 1."""
    generators = [torch.Generator().manual_seed(rank) for rank in range(2)]
    parts = [torch.randn(1000, 2, generator=each) - 1e4 for each in generators]
    whole = torch.cat(parts).double()
    count, mean, variance = batch_statistics(parts[dist.get_rank()])
    check.same(count, 2000.0)
    check.close(mean, whole.mean(0), 1e-12 * 1e4, "mean")
    check.close(variance, whole.var(0, correction=0), 1e-7, "variance")


@on_ranks(3)
def test_what_never_varies_becomes_zero(check):
    """Rounding makes the difference of two squares negative for some channels; a variance isn't."""
    value = 1e8 + torch.rand(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    check.close(GlobalBatchNorm(100)(value.expand(2, 100)), torch.zeros(2, 100), 1e-4)


def in_dtype(dtype):
    """Whole numbers in, which every dtype holds exactly."""
    norm = GlobalBatchNorm(2)
    x, slopes = torch.tensor([[[1, 2], [3, 8]], [[1, -5], [-3, 2]]], dtype=dtype) + dist.get_rank()
    y = norm(x.requires_grad_())
    y.backward(slopes)
    return y.detach(), x.grad, norm.weight.grad


@on_ranks(2)
def test_narrow_inputs(check):
    """Each result is rounded once, to its dtype. Before, in float32, five operations and as many
    sums come on the way to a gradient, with numbers of which none is larger than 32.
    """
    on_the_way = 10 * 32 * torch.finfo(torch.float32).eps / 2
    exact = in_dtype(torch.float64)
    for dtype in (torch.float16, torch.bfloat16):
        got = in_dtype(dtype)
        check.same([each.dtype for each in got], [dtype, dtype, torch.float32])
        for one, expected in zip(got, exact, strict=True):
            rounding = torch.finfo(one.dtype).eps / 2 * expected.double().abs()
            check.close(one, expected, rounding + on_the_way, dtype)


# What is sent


@on_ranks(1, 3)
def test_one_all_reduce_forward_and_one_backward(check):
    norm = convert(norm_of(IMAGES))
    x = torch.randn(2, *IMAGES, dtype=torch.float64, requires_grad=True)
    forward, backward = 8 * (2 * CHANNELS + 1), 8 * 2 * CHANNELS
    found = []

    def without_gradient():
        with torch.no_grad():
            norm(x)

    def evaluate():
        norm.eval()(x).sum().backward()
        convert(nn.BatchNorm1d(2, track_running_stats=False)).eval()(torch.randn(3, 2))

    for step, expected in (
        (lambda: found.append(norm(x).square().sum()), [forward]),
        (lambda: found[0].backward(), [backward]),
        (without_gradient, [forward]),
        (lambda: norm(x.detach()).square().sum().backward(), [forward]),  # nobody asks for x.grad
        (evaluate, []),
    ):
        records = sent_by(step)
        check.same([(r.op, r.bytes) for r in records], [("all_reduce", n) for n in expected])


@on_ranks(3)
def test_a_group(check):
    group, rank = dist.new_group([1, 2]), dist.get_rank()
    norm = convert(nn.Sequential(nn.BatchNorm1d(1)), group)[0]
    if rank > 0:
        x = torch.tensor([[4.0 * rank], [0.0]], requires_grad=True)
        norm(x)[0].backward()
        check.unless(bool(x.grad.any()), "no gradient")
    check.close(norm.running_mean, torch.tensor([0.3 if rank else 0.0]), 1e-6)


# convert


def test_convert_replaces_all_and_keeps_what_they_have():
    shared = nn.BatchNorm1d(3, eps=0.5, momentum=None)
    volumes = nn.BatchNorm3d(5, track_running_stats=False).eval()
    block = nn.Sequential(nn.BatchNorm2d(4, affine=False), volumes)
    model = nn.ModuleDict({"a": shared, "block": block, "b": shared, "other": nn.GroupNorm(1, 2)})

    def tensors():
        return {name: id(value) for name, value in model.state_dict(keep_vars=True).items()}

    def options():
        norms = model["a"], *model["block"]
        return [(str(norm).partition("(")[2], norm.training) for norm in norms]

    before, other = (tensors(), options()), model["other"]
    assert convert(model) is model
    assert (tensors(), options()) == before
    assert (model["block"], model["other"]) == (block, other)
    assert model["a"] is model["b"]
    assert {type(norm) for norm in (model["a"], *block)} == {GlobalBatchNorm}
    norm = convert(volumes)
    assert convert(norm) is norm


# Mistakes


@on_ranks(2)
def test_mistakes_are_named(check):
    norm, rank = GlobalBatchNorm(3), dist.get_rank()
    for shape in ((3,), (2, 4)):
        says = f"rank {rank} brought {shape} to batch norm, expected (n, 3, ...)"
        check.refused(norm, torch.zeros(shape), says=says)
    says = "batch norm got 1 values a channel in the whole batch, expected at least 2"
    check.refused(norm, torch.zeros(1 - rank, 3), says=says)
    check.same(norm.num_batches_tracked.item(), 0, "batches seen")
    x = torch.randn(3, 3, requires_grad=True)
    [slope] = torch.autograd.grad(norm(x).square().sum(), x, create_graph=True)
    check.refused(slope.sum().backward, says="once_differentiable", error=RuntimeError)
