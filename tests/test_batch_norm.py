"""ddpkit.batch_norm, on every rank, against torch's in one process with the whole batch."""

import itertools
import sys
from functools import partial

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from outside import run_script
from torch import nn

from ddpkit import RankError, launch
from ddpkit.batch_norm import GlobalBatchNorm, batch_statistics, convert
from ddpkit.ddp import BucketedDDP, NaiveDDP
from ddpkit.models import MLP, mean_loss

cloudpickle.register_pickle_by_value(
    sys.modules[__name__]
)  # functions travel as those of a notebook do

CHANNELS = 3
SHARES = {1: [[4]], 2: [[5, 0], [1, 4]], 3: [[0, 2, 3]], 4: [[1, 2, 0, 4]]}
CASES = [(world_size, shares) for world_size, several in SHARES.items() for shares in several]
near = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)  # in float64


def norm_of(shape, **options):
    """Torch's for rows of this shape, in float64, with parameters that aren't ones and zeros."""
    norm = (nn.BatchNorm2d if len(shape) == 3 else nn.BatchNorm1d)(CHANNELS, **options).double()
    for number, parameter in enumerate(norm.parameters()):
        nn.init.normal_(parameter, mean=1.0, generator=torch.Generator().manual_seed(number))
    return norm


def batches(rows, shape, count=3, dtype=torch.float64):
    """`count` whole batches, and each output's weight in the loss: (inputs, weights)."""
    generator = torch.Generator().manual_seed(rows)
    size = (count, 2, rows, *shape)
    return [
        pair.unbind()
        for pair in (torch.randn(size, generator=generator, dtype=torch.float64) * 2 + 1).to(dtype)
    ]


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


OPTIONS = [
    {},
    {"momentum": None},
    {"momentum": 0.3, "eps": 0.1},
    {"affine": False},
    {"track_running_stats": False},
]
SHAPES = [(CHANNELS,), (CHANNELS, 4), (CHANNELS, 2, 5)]  # rows, sequences, images
KINDS = list(itertools.product(SHAPES, OPTIONS))


def train(shares):
    """[[outcome of each of three steps] of each of KINDS], of this rank's rows."""
    start = sum(shares[: dist.get_rank()])
    mine = slice(start, start + shares[dist.get_rank()])
    return [
        [outcome(norm, x[mine], weights[mine]) for x, weights in batches(sum(shares), shape)]
        for shape, norm in ((shape, convert(norm_of(shape, **options))) for shape, options in KINDS)
    ]


@pytest.mark.parametrize(("world_size", "shares"), CASES, ids=str)
def test_ranks_together_are_one_process(world_size, shares):
    ranks = launch(train, shares, world_size=world_size)
    for kind, (shape, options) in enumerate(KINDS):
        norm = norm_of(shape, **options)
        for step, (x, weights) in enumerate(batches(sum(shares), shape)):
            for name, expected in outcome(norm, x, weights).items():
                got = [steps[kind][step][name] for steps in ranks]
                if name in ("y", "x.grad", "no_grad", "eval"):
                    near(torch.cat(got), expected)
                elif name.endswith(".grad"):
                    near(sum(got), expected)  # each rank has its rows' part
                else:
                    near(got[0], expected)
                    assert all(torch.equal(each, got[0]) for each in got), name


def gradcheck():
    norms = [convert(norm_of(shape, **options)) for shape, options in KINDS]
    inputs = [torch.randn(3, *shape, dtype=torch.float64, requires_grad=True) for shape, _ in KINDS]
    return [torch.autograd.gradcheck(norm, x) for norm, x in zip(norms, inputs, strict=True)]


def test_gradients_are_slopes():
    assert launch(gradcheck, world_size=1)[0] == [True] * len(KINDS)


# Numbers that are hard, and other dtypes


def hard_statistics(mean, dtype):
    rank = dist.get_rank()
    x = (
        torch.randn(1000, 2, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
        + mean
    ).to(dtype)
    return x, *batch_statistics(x)


def test_a_mean_far_from_zero():
    """In float32, squares of 10⁴ would leave nothing of a variance of 1."""
    run = launch(hard_statistics, -1e4, torch.float32, world_size=2)
    whole = torch.cat([x for x, *_ in run]).double()
    for _, count, got_mean, variance in run:
        assert count == 2000
        torch.testing.assert_close(got_mean, whole.mean(0), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(variance, whole.var(0, correction=0), rtol=1e-7, atol=0)


def constant():
    value = 1e8 + torch.rand(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return GlobalBatchNorm(100)(value.expand(2, 100)).abs().max().item()


def test_what_never_varies_becomes_zero():
    """Rounding makes the difference of two squares negative for some channels; a variance isn't."""
    assert all(largest < 1e-4 for largest in launch(constant, world_size=3))


def in_dtypes(dtypes):
    return [in_dtype(dtype) for dtype in dtypes]


def in_dtype(dtype):
    """Whole numbers in, which every dtype holds exactly."""
    norm = GlobalBatchNorm(2)
    x, slopes = torch.tensor([[[1, 2], [3, 8]], [[1, -5], [-3, 2]]], dtype=dtype) + dist.get_rank()
    y = norm(x.requires_grad_())
    y.backward(slopes)
    return y.detach(), x.grad, norm.weight.grad


def test_narrow_inputs():
    """Each result is rounded once, to its dtype. Before, in float32, five operations and as many
    sums come on the way to a gradient, with numbers of which none is larger than 32.
    """
    dtypes = [torch.float16, torch.bfloat16]
    on_the_way = 10 * 32 * torch.finfo(torch.float32).eps / 2
    for *narrow, wide in launch(in_dtypes, [*dtypes, torch.float64], world_size=2):
        for dtype, got in zip(dtypes, narrow, strict=True):
            assert [each.dtype for each in got] == [dtype, dtype, torch.float32]
            for each, exact in zip(got, wide, strict=True):
                rounding = torch.finfo(each.dtype).eps / 2
                torch.testing.assert_close(
                    each.double(), exact.double(), rtol=rounding, atol=on_the_way
                )


# In a model, under data parallelism


def mlp(seed):
    torch.manual_seed(seed)
    return MLP(inputs=5, width=6, outputs=3).double()


def data(step, rows):
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(rows, 5, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(3, (rows,), generator=generator)


def optimizer_of(model, adam):
    return (
        torch.optim.AdamW(model.parameters(), lr=0.01)
        if adam
        else torch.optim.SGD(model.parameters(), 0.1, 0.9)
    )


def train_mlp(wrapper, shares, adam, change=convert):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = wrapper(change(mlp(seed=rank)))
    optimizer = optimizer_of(model, adam)
    start = sum(shares[:rank])
    for step in range(5):
        inputs, targets = (part[start : start + shares[rank]] for part in data(step, sum(shares)))
        optimizer.zero_grad()
        loss = mean_loss(model(inputs), targets) * (world_size * shares[rank] / sum(shares))
        loss.backward()
        model.synchronize()
        optimizer.step()
    return model.module.state_dict()


def train_whole(rows, adam):
    model = mlp(seed=0)
    optimizer = optimizer_of(model, adam)
    for step in range(5):
        inputs, targets = data(step, rows)
        optimizer.zero_grad()
        mean_loss(model(inputs), targets).backward()
        optimizer.step()
    return model.state_dict()


RECIPES = list(
    itertools.product([NaiveDDP, BucketedDDP], [False, True])
)  # wrapper, whether AdamW instead of SGD


def train_each(shares):
    return [train_mlp(wrapper, shares, adam) for wrapper, adam in RECIPES]


@pytest.mark.parametrize("shares", [[1, 1, 1, 1], [5, 0, 2]], ids=str)
def test_data_parallel_training_is_one_process(shares):
    run = launch(train_each, shares, world_size=len(shares))
    for recipe, (_, adam) in enumerate(RECIPES):
        expected = train_whole(sum(shares), adam)
        for each in run:
            near(each[recipe], expected, rtol=1e-7, atol=1e-9)  # Adam divides by small gradients
            assert all(
                torch.equal(value, run[0][recipe][name]) for name, value in each[recipe].items()
            )


def test_without_it_training_differs():
    """Otherwise the test above could not tell the batch's statistics from a share's."""
    [got, _] = launch(train_mlp, NaiveDDP, [4, 4], False, nn.Module.train, world_size=2)
    assert (got["0.weight"] - train_whole(8, False)["0.weight"]).abs().max() > 1e-3


# What is sent


def one_after_the_other():
    norm, x = (
        convert(norm_of((CHANNELS, 2, 2))),
        torch.randn(2, CHANNELS, 2, 2, dtype=torch.float64),
    )
    y = norm(x.requires_grad_())
    dist.barrier()
    y.square().sum().backward()
    dist.barrier()
    with torch.no_grad():
        norm(x)
    dist.barrier()
    norm(x.detach()).square().sum().backward()  # nobody asks how x should change
    dist.barrier()
    norm.eval()(x).sum().backward()
    convert(nn.BatchNorm1d(2, track_running_stats=False)).eval()(torch.randn(3, 2))


@pytest.mark.parametrize("world_size", [1, 3])
def test_one_all_reduce_forward_and_one_backward(world_size):
    forward, backward, barrier = (
        ("all_reduce", 8 * (2 * CHANNELS + 1)),
        ("all_reduce", 8 * 2 * CHANNELS),
        "barrier",
    )
    for records in launch(one_after_the_other, world_size=world_size).wire:
        said = [
            barrier if record.op == barrier else (record.op, record.bytes) for record in records
        ]
        assert said == [forward, barrier, backward, barrier, forward, barrier, forward, barrier]


def a_part_of_the_ranks():
    group, rank = dist.new_group([1, 2]), dist.get_rank()
    norm = convert(nn.Sequential(nn.BatchNorm1d(1)), group)[0]
    if rank == 0:
        return norm.running_mean.item()
    x = torch.tensor([[4.0 * rank], [0.0]], requires_grad=True)
    norm(x)[0].backward()
    return norm.running_mean.item(), bool(x.grad.any())


def test_a_group():
    run = launch(a_part_of_the_ranks, world_size=3)
    assert list(run) == [0.0, (pytest.approx(0.3), True), (pytest.approx(0.3), True)]


# convert


def test_convert_replaces_all_and_keeps_what_they_have():
    shared = nn.BatchNorm1d(3, eps=0.5, momentum=None)
    block = nn.Sequential(
        nn.BatchNorm2d(4, affine=False), nn.BatchNorm3d(5, track_running_stats=False).eval()
    )
    model = nn.ModuleDict({"a": shared, "block": block, "b": shared, "other": nn.GroupNorm(1, 2)})
    before = dict(model.named_parameters()) | dict(model.named_buffers())
    others = block, model["other"]
    assert convert(model) is model
    after = dict(model.named_parameters()) | dict(model.named_buffers())
    assert {name: id(value) for name, value in after.items()} == {
        name: id(value) for name, value in before.items()
    }
    assert (model["block"], model["other"]) == others
    assert model["a"] is model["b"]
    converted = [model["a"], *model["block"]]
    assert [type(each) for each in converted] == [GlobalBatchNorm] * 3
    options = [
        (n.num_features, n.eps, n.momentum, n.affine, n.track_running_stats, n.training)
        for n in converted
    ]
    assert options == [
        (3, 0.5, None, True, True, True),
        (4, 1e-5, 0.1, False, True, True),
        (5, 1e-5, 0.1, True, False, False),
    ]


def test_convert_of_a_batch_norm():
    norm = nn.BatchNorm1d(3)
    new = convert(norm)
    assert isinstance(new, GlobalBatchNorm)
    assert new.weight is norm.weight
    assert convert(new) is new


# Mistakes


def mistakes():
    norm, said = GlobalBatchNorm(3), []
    for x in (torch.zeros(3), torch.zeros(2, 4), torch.zeros(1 - dist.get_rank(), 3)):
        try:
            norm(x)
        except ValueError as error:
            said.append(str(error))
    return said, norm.num_batches_tracked.item()


def test_mistakes_are_named():
    for rank, (said, batches_seen) in enumerate(launch(mistakes, world_size=2)):
        assert said[0].startswith(f"rank {rank} brought (3,) to batch norm, expected (n, 3, ...)")
        assert said[1].startswith(f"rank {rank} brought (2, 4) to batch norm, expected (n, 3, ...)")
        assert said[2].startswith(
            "batch norm got 1 values a channel in the whole batch, expected at least 2"
        )
        assert batches_seen == 0


def backward_of_backward():
    x = torch.randn(3, 2, requires_grad=True)
    [slope] = torch.autograd.grad(GlobalBatchNorm(2)(x).square().sum(), x, create_graph=True)
    slope.sum().backward()


def test_backward_of_backward_is_refused():
    with pytest.raises(RankError, match="once_differentiable"):
        launch(backward_of_backward, world_size=1)


# Under torchrun, without the launcher

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")

SCRIPT = """
import torch
import torch.distributed as dist
from ddpkit.batch_norm import convert

dist.init_process_group("gloo")
norm = convert(torch.nn.BatchNorm1d(1, eps=0.0))
x = torch.tensor([[1.0], [5.0]]) if dist.get_rank() == 0 else torch.zeros(0, 1)
y = norm(x.requires_grad_())
y.sum().backward()
with open(f"rank.{dist.get_rank()}", "w") as file:
    print(y.flatten().tolist(), norm.running_mean.item(), norm.bias.grad.item(), file=file)
dist.destroy_process_group()
"""


def test_under_torchrun(tmp_path):
    run_script(tmp_path, SCRIPT, command=TORCHRUN, OMP_NUM_THREADS="1")
    said = [(tmp_path / f"rank.{rank}").read_text().split("] ") for rank in range(2)]
    mean = torch.tensor(0.3).item()
    assert said == [["[-1.0, 1.0", f"{mean} 2.0\n"], ["[", f"{mean} 0.0\n"]]
