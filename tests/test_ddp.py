"""ddpkit.ddp, data_parallel and fast.buckets, on every rank, against one process with all data."""

import contextlib
import io
import itertools
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from outside import run_script
from torch import nn
from torch.nn.utils import get_total_norm, parameters_to_vector
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ddpkit import HangError, Link, RankError, launch
from ddpkit.batch_norm import convert
from ddpkit.ddp import (
    BucketedDDP,
    FlatDDP,
    NaiveDDP,
    OverlapDDP,
    average_gradients,
    join,
    plan_buckets,
)
from ddpkit.fast import buckets as fast
from ddpkit.models import GPT, MLP, mean_loss
from ddpkit.tools.text import Batches

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
FEW_BYTES = 100 / 2**20  # a bucket for some parameters of the models below, not for all
PLAIN = {
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "overlap": OverlapDDP,
    "one bucket": BucketedDDP,
    "buckets": partial(BucketedDDP, bucket_cap_mb=FEW_BYTES),
}
FAST = {
    "fast": partial(fast.BucketedDDP, bucket_cap_mb=FEW_BYTES),
    "shared": partial(fast.BucketedDDP, bucket_cap_mb=FEW_BYTES, shared_memory=True),
}
EXACT = PLAIN | FAST
ALL = EXACT | {
    "bf16": partial(fast.BucketedDDP, bucket_cap_mb=FEW_BYTES, wire_dtype=torch.bfloat16)
}
IN_BACKWARD = {name: make for name, make in EXACT.items() if name not in ("naive", "flat")}
# A rounding of 1e-16 grows in a few steps, but nowhere near the eighth digit; a wrong gradient
# moves a parameter by a good part of the learning rate.
HALF_THE_DIGITS = torch.finfo(torch.float64).eps ** 0.5


def rank_and_world():
    return dist.get_rank(), dist.get_world_size()


def trained_of(module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def gradients_of(module, loss) -> dict[str, torch.Tensor]:
    """Without hooks, and without leaving a trace; zeros for what has none."""
    names, parameters = zip(*trained_of(module).items(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    return dict(zip(names, found, strict=True))


def all_tensors(module) -> dict[str, torch.Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


# Models and data. On every rank others, until they are wrapped.


def small_gpt(seed, dtype=torch.float64):
    torch.manual_seed(seed)
    model = GPT(vocabulary=11, context=6, width=8, heads=2, layers=1).to(dtype)
    model.prior.uniform_()
    return model


def small_mlp(seed, dtype=torch.float64):
    torch.manual_seed(seed)
    return MLP(inputs=4, width=6, outputs=3, layers=2).to(dtype)


def gpt_batch(step, micro_batch, rank, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro_batch + rank)
    return torch.randint(11, (2, 7), generator=generator).unfold(1, 6, 1).unbind(1)


def mlp_batch(step, micro_batch, rank, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro_batch + rank)
    x = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randint(3, (5,), generator=generator)


def gpt_loss(model, batches):
    """Of one batch with all that the ranks have."""
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return mean_loss(model(inputs), targets)


def mlp_loss(model, batches):
    """Batch norm looks at one rank's share: the twin shows its model one after the other."""
    return sum(mean_loss(model(x), targets) for x, targets in batches) / len(batches)


MODELS = {"GPT": (small_gpt, gpt_batch, gpt_loss), "MLP": (small_mlp, mlp_batch, mlp_loss)}


class Ways(nn.Module):
    """Two layers of one size and a third; `forward` goes through those it is told, in order."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.c = nn.Linear(4, 4, bias=False)

    def forward(self, x, way):
        for name in way:
            x = getattr(self, name)(x).tanh()
        return x.square().mean()


def ways_data(step, rank):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def ways_step(model, step, way="abc"):
    model(ways_data(step, dist.get_rank()), way).backward()
    model.synchronize()


def check_means(check, module, parts, *what):
    """Every gradient is the mean of these of the ranks."""
    for name, parameter in trained_of(module).items():
        shares = [part[name] / len(parts) for part in parts]
        check.near(parameter.grad, shares, *what, name)


# The serial twin

OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=1e-2),
}
# kind, optimizer, micro-batches in a step, zero_grad's set_to_none: every two of them meet
COVER = [
    ("GPT", "SGD", 1, True),
    ("GPT", "AdamW", 3, False),
    ("MLP", "SGD", 3, False),
    ("MLP", "AdamW", 1, False),
    ("MLP", "AdamW", 3, True),
]


def train(kind, optimizer, accumulation, set_to_none, ranks, make=None):
    """(All parameters, the gradient's norm in each step) after training on these ranks' data."""
    build, batch, loss = MODELS[kind]
    module = build(seed=dist.get_rank() if make else 0)
    model = make(module) if make else module
    stepper = OPTIMIZERS[optimizer](module.parameters())
    norms = []
    for step in range(4):
        for number in range(accumulation):
            quiet = make and number < accumulation - 1
            with model.no_sync() if quiet else contextlib.nullcontext():
                batches = [batch(step, number, rank) for rank in ranks]
                (loss(model, batches) / accumulation).backward()
        if make:
            model.synchronize()
        norms.append(get_total_norm([p.grad for p in trained_of(module).values()]))
        stepper.step()
        stepper.zero_grad(set_to_none=set_to_none)
    return parameters_to_vector(module.parameters()).detach(), torch.stack(norms)


@on_ranks(1, 2, 3, 4)
def test_trained_like_one_process(check):
    """With SGD, too: AdamW hides every factor. In float64: dtypes are tested below."""
    torch.set_num_threads(1)
    rank, world_size = rank_and_world()
    for case in COVER:
        weights, norms = train(*case, range(world_size))
        for name, make in EXACT.items():
            got, got_norms = train(*case, [rank], make)
            check.close(got, weights, HALF_THE_DIGITS, *case, name)
            check.close(got_norms, norms, HALF_THE_DIGITS * norms.max(), *case, name, "norms")
            check.same_on_all(got, *case, name)


# The start


@on_ranks(1, 3)
def test_replicas_are_made_equal(check):
    rank = dist.get_rank()
    for (name, make), build in itertools.product(ALL.items(), (small_gpt, small_mlp)):
        module, firsts = build(seed=rank), all_tensors(build(seed=0))
        if build is small_mlp:
            module[1].num_batches_tracked += 3 * rank
        addresses = [tensor.data_ptr() for tensor in all_tensors(module).values()]
        before = len(said())
        model = make(module)
        sent = [record.bytes for record in said()[before:] if record.op == "broadcast"]
        check.same(sent[: len(firsts)], [t.nbytes for t in firsts.values()], name, "sent")
        for tensor_name, tensor in all_tensors(module).items():
            check.same(tensor, firsts[tensor_name], name, tensor_name)
            check.unless(tensor.grad is None and tensor.grad_fn is None, name, "has a gradient")
        kept = [tensor.data_ptr() for tensor in all_tensors(module).values()] == addresses
        check.unless(kept and model.module is module, name, "replaced tensors")


class Two(nn.Module):
    """Two tensors of the same size, a parameter and a parameter or a buffer."""

    def __init__(
        self,
        names=("one", "two"),
        shape=(2, 3),
        dtype=torch.float32,
        trained=True,
        buffer=False,
    ):
        super().__init__()
        for name in names[:1] if buffer else names:
            parameter = nn.Parameter(torch.ones(shape, dtype=dtype), requires_grad=trained)
            self.register_parameter(name, parameter)
        if buffer:
            self.register_buffer(names[1], torch.ones(shape))


@on_ranks(3)
def test_other_modules_are_refused_on_every_rank(check):
    rank = dist.get_rank()
    for difference, odd in itertools.product(
        (
            {"names": ("one", "three")},
            {"names": ("one",)},
            {"names": ("two", "one")},
            {"shape": (3, 2)},
            {"dtype": torch.float64},
            {"trained": False},
            {"buffer": True},
        ),
        (0, 1),
    ):
        module = Two(**difference if rank == odd else {})
        says = "expected the same module on every rank, got", " on rank 1, "
        check.refused(NaiveDDP, module, says=says)


@on_ranks(5)
def test_groups(check):
    rank = dist.get_rank()
    evens, odds = dist.new_group([0, 2, 4]), dist.new_group([3, 1])
    group, others, members = (odds, evens, [1, 3]) if rank % 2 else (evens, odds, [0, 2, 4])
    for name, make in EXACT.items():
        torch.manual_seed(rank)
        module = Ways()
        check.refused(make, module, group=others, says=("a group that it isn't in",))
        model = make(module, group=group)
        torch.manual_seed(members[0])
        for tensor, first in zip(module.parameters(), Ways().parameters(), strict=True):
            check.same(tensor, first, name, "parameter")
        for step in range(1 + 2 * (rank % 2)):  # the groups don't wait for each other
            parts = [gradients_of(module, module(ways_data(step, r), "abc")) for r in members]
            ways_step(model, step)
            check_means(check, module, parts, name, step)
            model.zero_grad()


@on_ranks(2)
def test_saved_and_loaded(check):
    for name, make in ALL.items():
        model = make(small_gpt(seed=dist.get_rank()))
        file = io.BytesIO()
        torch.save(model.module.state_dict(), file)
        file.seek(0)
        alone = small_gpt(seed=5)
        alone.load_state_dict(torch.load(file))
        inputs, _ = gpt_batch(0, 0, 0)
        check.same(model(inputs), alone(inputs), name, "saved")
        other = small_gpt(seed=7).state_dict()
        model.load_state_dict({f"module.{key}": value for key, value in other.items()})
        check.same(model(inputs), small_gpt(seed=7)(inputs), name, "loaded")
        check.unless(model.eval() is model and not model.module.training, name, "eval")


# Gradients that are missing, or of all kinds


@on_ranks(2)
def test_a_parameter_without_gradient_is_named(check):
    rank = dist.get_rank()
    for name, make in ALL.items():
        model = make(Ways())
        model(ways_data(0, rank), "ac").backward()
        says = f"rank {rank} has no gradient for b.weight, b.bias after", "Freeze it before"
        check.refused(model.synchronize, says=says)
        check.unless(model.module.b.weight.grad is None, name, "made a gradient")


@on_ranks(3)
def test_average_gradients_counts_a_missing_one_as_zeros(check):
    """No rank waits for one that left out a layer; what is frozen stays without a gradient."""
    rank, world_size = rank_and_world()
    torch.manual_seed(0)
    module = Ways()
    module.c.weight.requires_grad_(False)
    ways = ["abc", "ac", "bc"]
    parts = [gradients_of(module, module(ways_data(0, r), ways[r])) for r in range(world_size)]
    module(ways_data(0, rank), ways[rank]).backward()
    average_gradients(module)
    check_means(check, module, parts)
    check.same(module.c.weight.grad, None, "frozen")


@on_ranks(3)
def test_a_gradient_from_an_earlier_micro_batch_is_none_missing(check):
    rank, world_size = rank_and_world()
    for name, make in EXACT.items():
        model = make(Ways())
        parts = []
        for r in range(world_size):
            loss = model.module(ways_data(0, r), "abc") + model.module(ways_data(1, r), "ac")
            parts.append(gradients_of(model.module, loss))
        with model.no_sync():
            model(ways_data(0, rank), "abc").backward()
        ways_step(model, 1, "ac")
        check_means(check, model.module, parts, name)


IN_A_PLAN = [name for name in EXACT if name != "overlap"]  # which sends as gradients come


@on_ranks(2, 3)
def test_ranks_may_go_different_ways(check):
    """Sums are of what belongs together, though ranks' gradients come in different orders."""
    rank, world_size = rank_and_world()
    for name, ways in itertools.product(IN_A_PLAN, (["abc", "cba"], ["bca", "acb", "cab"])):
        module = Ways()
        model = EXACT[name](module)
        for step in range(3):
            going = [ways[(r + step) % len(ways)] for r in range(world_size)]
            losses = [module(ways_data(step, r), going[r]) for r in range(world_size)]
            parts = [gradients_of(module, loss) for loss in losses]
            ways_step(model, step, going[rank])
            check_means(check, module, parts, name, ways, step)
            model.zero_grad(set_to_none=step == 0)


class Mixed(nn.Module):
    """Parameters of five dtypes, empty, without dimension, or with axes in another order."""

    def __init__(self):
        super().__init__()
        half = torch.bfloat16, torch.float16
        dtypes = [torch.float32, torch.float64, torch.complex64, *half]
        self.many = nn.ParameterList(torch.randn(7).to(dtype) for dtype in dtypes * 2)
        self.scalar = nn.Parameter(torch.randn(()))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.turned = nn.Parameter(torch.randn(3, 4).T)
        image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
        self.image = nn.Parameter(image)
        self.register_buffer("flags", torch.rand(5) > 0.5)
        self.register_buffer("count", torch.tensor(dist.get_rank()))

    def forward(self, scale):
        return sum((p.abs() ** 2).sum().double() * scale for p in self.parameters())


@on_ranks(1, 2)
def test_dtypes_and_layouts(check):
    """Each gradient is 2 · scale · parameter: a rounding or two of its dtype away."""
    rank, world_size = rank_and_world()
    for name, make in EXACT.items():
        torch.manual_seed(rank)
        module = Mixed()
        model = make(module)
        for tensor_name, tensor in all_tensors(module).items():
            check.same_on_all(tensor, name, tensor_name)
        for step in range(3):
            model(float(step + 2**rank)).backward()
            model.synchronize()
            scale = sum(step + 2**r for r in range(world_size)) / world_size
            for parameter_name, parameter in module.named_parameters():
                what = name, step, parameter_name
                close = torch.allclose(parameter.grad, 2 * scale * parameter.detach(), rtol=0.02)
                check.unless(close and parameter.grad.dtype == parameter.dtype, *what)
                check.same_on_all(parameter.grad, *what)
            model.zero_grad(set_to_none=step == 0)


def optimize(stepper_of, ranks, make=None):
    """Clipped, with a closure that computes gradients as often as the optimizer likes."""
    module = small_gpt(dist.get_rank() if make else 0)
    model = make(module) if make else module
    stepper = stepper_of(trained_of(module).values())

    def closure():
        stepper.zero_grad()
        loss = gpt_loss(model, [gpt_batch(0, 0, rank) for rank in ranks])
        loss.backward()
        if make:
            model.synchronize()
            dist.all_reduce(loss.detach())
            loss = loss / dist.get_world_size()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        return loss

    for _ in range(2):
        stepper.step(closure)
    return parameters_to_vector(module.parameters()).detach()


@on_ranks(2)
def test_optimizers_that_look_at_all_gradients_at_once_or_again(check):
    torch.set_num_threads(1)
    for stepper_of in (
        partial(torch.optim.LBFGS, max_iter=4),
        partial(torch.optim.AdamW, lr=0.01, fused=True),
        partial(torch.optim.SGD, lr=0.1, nesterov=True, momentum=0.9, foreach=True),
    ):
        expected = optimize(stepper_of, range(2))
        for name, make in IN_BACKWARD.items():
            got = optimize(stepper_of, [dist.get_rank()], make)
            check.close(got, expected, HALF_THE_DIGITS, stepper_of, name)


def checkpointed(module, use_reentrant):
    for block in module.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=use_reentrant)
    return module


@on_ranks(2)
def test_activation_checkpointing_inside(check):
    torch.set_num_threads(1)
    rank, world_size = rank_and_world()
    for (name, make), use_reentrant in itertools.product(EXACT.items(), (False, True)):
        plain = small_gpt(0)
        losses = [gpt_loss(plain, [gpt_batch(0, 0, r)]) for r in range(world_size)]
        parts = [gradients_of(plain, loss) for loss in losses]
        model = make(checkpointed(small_gpt(rank), use_reentrant))
        for step in range(2):
            gpt_loss(model, [gpt_batch(0, 0, rank)]).backward()
            model.synchronize()
            check_means(check, model.module, parts, name, use_reentrant, step)
            model.zero_grad()


# no_sync, and backward twice


@on_ranks(2)
def test_no_sync_ends_however_it_ends(check):
    rank = dist.get_rank()
    for name, make in ALL.items():
        model = make(Ways())
        with contextlib.suppress(KeyError), model.no_sync(), model.no_sync():
            raise KeyError
        with model.no_sync():
            with contextlib.suppress(KeyError), model.no_sync():
                raise KeyError
            own = gradients_of(model.module, model.module(ways_data(0, rank), "abc"))
            ways_step(model, 0)
            for parameter_name, parameter in model.module.named_parameters():
                check.same(parameter.grad, own[parameter_name], name, "inside")
        model.zero_grad()
        ways_step(model, 0)
        for again in ("once", "once more makes no difference"):
            for parameter in model.module.parameters():
                check.same_on_all(parameter.grad, name, again)
            model.synchronize()


@on_ranks(2)
def test_backward_twice_is_named(check):
    says = "backward ran twice without synchronize()", "use_reentrant=False"
    for (name, make), quietly in itertools.product(IN_BACKWARD.items(), (False, True)):
        model = make(Ways())
        model(ways_data(0, dist.get_rank()), "abc").backward()
        loss = model(ways_data(1, dist.get_rank()), "abc")
        with model.no_sync() if quietly else contextlib.nullcontext():
            check.refused(loss.backward, says=says, error=RuntimeError)
        # Reentrant checkpoints hand over a weight's gradient in parts, the others in one.
        for use_reentrant in (False, True):
            x = torch.ones(1, 3, requires_grad=True)
            model = make(nn.Linear(3, 3))
            for _ in range(2):
                x = checkpoint(model, x, use_reentrant=use_reentrant)
            if use_reentrant:
                check.refused(x.sum().backward, says=says, error=RuntimeError)
            else:
                x.sum().backward()
                model.synchronize()
                check.same_on_all(model.module.weight.grad, name)


@on_ranks(2)
def test_backward_twice_is_fine_where_nothing_is_on_its_way(check):
    rank, world_size = rank_and_world()
    for make in (NaiveDDP, FlatDDP):
        model = make(Ways())
        parts = []
        for r in range(world_size):
            loss = sum(model.module(ways_data(step, r), "abc") for step in range(2))
            parts.append(gradients_of(model.module, loss))
        for step in range(2):
            model(ways_data(step, rank), "abc").backward()
        model.synchronize()
        check_means(check, model.module, parts, make)


def skip_synchronize(make):
    """In the second step, one rank."""
    model = make(Ways())
    for step in range(3):
        model(ways_data(step, dist.get_rank()), "abc").backward()
        if (dist.get_rank(), step) != (1, 1):
            model.synchronize()
        model.zero_grad()


def test_a_rank_that_skips_synchronize_is_reported():
    """The others miss it, or its next backward meets gradients that are being sent."""
    with pytest.raises(HangError, match="synchronize"):
        launch(skip_synchronize, NaiveDDP, world_size=2)
    for name in ("overlap", "buckets", "fast"):
        with pytest.raises(RankError, match="rank 1 raised RuntimeError: backward ran twice"):
            launch(skip_synchronize, EXACT[name], world_size=2)


# Uneven numbers of batches

UNEVEN = {  # rows of each batch of each rank, by world size
    1: [[2, 3]],
    2: [[2, 2, 2, 2], [3]],
    3: [[2], [1, 0, 4, 2], [3, 3]],
    4: [[2] * 4, [2], [1, 3], [0]],
}


def rows_of(kind, step, rank, rows):
    """A rank's batch of a step."""
    parts = zip(*(MODELS[kind][1](step, number, rank) for number in range(2)), strict=True)
    return tuple(torch.cat(part)[:rows] for part in parts)


def whole_batches(kind, uneven):
    """What all ranks have at each step, in one."""
    for step in range(max(map(len, uneven))):
        having = [(rank, rows[step]) for rank, rows in enumerate(uneven) if step < len(rows)]
        parts = [rows_of(kind, step, rank, rows) for rank, rows in having]
        yield *(torch.cat(part) for part in zip(*parts, strict=True)), 1


def train_on(kind, batches, make, seed):
    module = MODELS[kind][0](seed)
    model = make(module)
    stepper = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for inputs, targets, weight in batches:
        stepper.zero_grad()
        (weight * mean_loss(model(inputs), targets)).backward()
        if hasattr(model, "synchronize"):
            model.synchronize()
        stepper.step()
    return parameters_to_vector(module.parameters()).detach()


@on_ranks(1, 2, 3, 4)
def test_a_join_is_one_process_with_the_rows_that_are_left(check):
    """Also of batch norm over all ranks' rows. It sends a number a step, and one in the end."""
    torch.set_num_threads(1)
    rank, world_size = rank_and_world()
    uneven = UNEVEN[world_size]
    for kind in MODELS:
        expected = train_on(kind, whole_batches(kind, uneven), lambda module: module, 0)
        for name in ("naive", "buckets", "fast"):
            batches = [rows_of(kind, s, rank, rows) for s, rows in enumerate(uneven[rank])]
            before = len(said())
            got = train_on(
                kind, join(batches), lambda module, name=name: EXACT[name](convert(module)), rank
            )
            check.close(got, expected, HALF_THE_DIGITS, kind, name)
            asked = [r.bytes for r in said()[before:] if (r.op, r.dtype) == ("all_reduce", "int64")]
            check.same(asked, [8] * (max(map(len, uneven)) + 1), kind, name)


@on_ranks(4)
def test_weights_of_a_join(check):
    """Of twelve sequences dealt out nine at a time, the last batch has none for the last rank."""
    rank, world_size = rank_and_world()
    batches = Batches(torch.zeros(25, dtype=torch.uint8), 9, 2, rank=rank, world_size=world_size)
    found = [(len(inputs), weight == batches.weight) for inputs, _, weight in join(batches)]
    check.same(found, [(3 if rank == 0 else 2, True), (0 if rank == 3 else 1, True)])
    says = f"rank {rank} has no batch to join with, expected at least one", "0 rows"
    check.refused(next, join([]), says=says)


# The plan

SIXTEENS = [(16, torch.float32)] * 5
SMALL, GIANT = (4, torch.float32), (1000, torch.float32)
SINGLE, HALF = (8, torch.float32), (4, torch.bfloat16)


@pytest.mark.parametrize(
    ("sizes", "cap_bytes", "expected"),
    [
        ([], 100, []),
        (SIXTEENS, 1, [[0], [1], [2], [3], [4]]),
        (SIXTEENS, 16, [[0], [1], [2], [3], [4]]),
        (SIXTEENS, 16.1, [[0, 1], [2, 3], [4]]),
        (SIXTEENS, 32, [[0, 1], [2, 3], [4]]),
        (SIXTEENS, 80, [[0, 1, 2, 3, 4]]),
        (SIXTEENS, float("inf"), [[0, 1, 2, 3, 4]]),
        ([SMALL, SMALL, GIANT, SMALL, SMALL], 100, [[0, 1, 2], [3, 4]]),
        ([GIANT, SMALL], 100, [[0], [1]]),
        ([SINGLE, HALF, SINGLE, HALF], 100, [[0, 2], [1, 3]]),
        ([HALF, SINGLE, SINGLE, HALF], 100, [[1, 2], [0, 3]]),
        ([HALF, SINGLE, SINGLE, SINGLE, HALF], 16, [[1, 2], [3], [0, 4]]),
    ],
)
def test_plan(sizes, cap_bytes, expected):
    assert plan_buckets(sizes, cap_bytes) == expected


def medium_sizes(norms) -> list[tuple[int, torch.dtype]]:
    """Of the gradients of the seed's model, 423 million in all, last parameter first.

    It is CS336's "medium": width 1024, 24 blocks, 10000 tokens, head and embedding apart; in a
    block four matrices of attention, three of a SwiGLU of 4096, and two RMSNorms. norms: before
    which of the seven matrices those stand.
    """
    width, block = 1024, [1024 * 1024] * 4 + [1024 * 4096] * 3
    for place in sorted(norms, reverse=True):
        block.insert(place, width)
    numels = [10_000 * width, *block * 24, width, 10_000 * width]
    return [(4 * numel, torch.float32) for numel in reversed(numels)]


@pytest.mark.parametrize("norms", [(0, 0), (0, 4), (7, 7)])
def test_the_seeds_calls(norms):
    """1700, 980, 150 and 20 all-reduces in ten steps (FACTS.md), wherever the norms stand."""
    sizes = medium_sizes(norms)
    assert sum(nbytes for nbytes, _ in sizes) == 4 * 423_183_360
    calls = [10 * len(plan_buckets(sizes, mb * 2**20)) for mb in (1, 10, 100, 1000)]
    assert calls == [1700, 980, 150, 20]
    assert len(plan_buckets(sizes, 100 * 10**6)) == 17  # its MB are MiB


@pytest.mark.parametrize("seed", range(3))
def test_the_plan_is_torchs(seed):
    """Of gradients of one dtype, empty ones among them."""
    generator = torch.Generator().manual_seed(seed)
    numels = torch.randint(0, 50, (40,), generator=generator).tolist()
    tensors = [torch.empty(numel, device="meta") for numel in numels]
    for cap_bytes in (1, 20, 100, 196, 1000, 10_000):
        expected, _ = dist._compute_bucket_assignment_by_size(tensors, [cap_bytes])
        assert plan_buckets([(t.nbytes, t.dtype) for t in tensors], cap_bytes) == expected


# The wire


def said() -> list:
    """What this rank said so far."""
    return dist.group.WORLD.recorder.records


def sent_by(step) -> list:
    """The records of what this rank says in `step()`."""
    before = len(said())
    step()
    return said()[before:]


LAYERS = [[(8, 8)] * 5, [(8, 2), (2, 8)] * 3, [(2, 4), (4, 8), (8, 16), (16, 2)]]


@on_ranks(2)
def test_the_messages_are_torchs(check):
    """In the order of sending, in the third step: torch plans anew after the first."""
    for layers, cap_bytes in itertools.product(LAYERS, (1, 200, 256, 300, 100_000)):
        bytes_of = {}
        for wrap in (nn.parallel.DistributedDataParallel, BucketedDDP, fast.BucketedDDP):
            module = nn.Sequential(*[nn.Linear(*shape) for shape in layers])
            model = wrap(module, bucket_cap_mb=cap_bytes / 2**20)
            for _ in range(3):
                before = len(said())
                model(torch.ones(2, layers[0][0])).sum().backward()
                if hasattr(model, "synchronize"):
                    model.synchronize()
            sent = said()[before:]
            bytes_of[wrap] = [record.bytes for record in sent if record.op == "all_reduce"]
        torchs, *ours = bytes_of.values()
        for each in ours:
            check.same(each, torchs, layers, cap_bytes)


@on_ranks(1, 3)
def test_messages_and_bytes(check):
    """In the first step, in one of three micro-batches, and of two inside no_sync."""
    for kind, (name, make) in itertools.product(MODELS, ALL.items()):
        build, batch, loss = MODELS[kind]
        model = make(build(seed=dist.get_rank(), dtype=torch.float32))
        trained = trained_of(model.module).values()
        gradient_bytes = sum(parameter.nbytes for parameter in trained)

        def micro_batches(quiet, loud, model=model, loss=loss, batch=batch):
            for number in range(quiet + loud):
                with model.no_sync() if number < quiet else contextlib.nullcontext():
                    data = batch(0, number, dist.get_rank(), torch.float32)
                    loss(model, [data]).backward()
                    model.synchronize()

        for quiet, loud in ((0, 1), (2, 1), (2, 0)):
            buckets = len(getattr(model, "plan", getattr(model, "buckets", [])))
            records = sent_by(lambda quiet=quiet, loud=loud: micro_batches(quiet, loud))
            messages = [record for record in records if record.op == "all_reduce"]
            count = {"naive": len(trained), "overlap": len(trained), "flat": 1, "shared": 0}
            nbytes = {"shared": 0, "bf16": gradient_bytes // 2}.get(name, gradient_bytes)
            what = kind, name, quiet, loud
            check.same(len(messages), loud * count.get(name, buckets), *what)
            check.same(sum(record.bytes for record in messages), loud * nbytes, *what)
            learns = name in ("fast", "shared", "bf16") and quiet == 0
            check.same(len(records) > len(messages), learns, *what, "besides all_reduces")
            if name == "buckets":
                check.unless(1 < buckets < len(trained), *what, "has", buckets)


@on_ranks(2)
def test_all_ranks_send_in_the_order_of_the_plan(check):
    """A bucket that is full before its turn waits."""
    for (name, make), ways in itertools.product(
        (("buckets", BucketedDDP), ("fast", fast.BucketedDDP)), (["acb", "bca"], ["cab", "abc"])
    ):
        model = make(Ways(), 80 / 2**20)  # a layer's weight and bias
        for step in range(2):
            flats = model.flats if name == "buckets" else [b.flat for b in model.buckets]
            sizes = [flat.nbytes for flat in flats]
            records = sent_by(lambda s=step, w=ways, m=model: ways_step(m, s, w[dist.get_rank()]))
            sent = [record.bytes for record in records if record.op == "all_reduce"]
            check.same(sent, sizes, name, ways, step)
            check.unless(len(set(sizes)) > 1, name, "has equal buckets: no order would show")


# Overlap, by the order of events

SIX = 6 * [1024]  # bytes of the gradients of each layer below
SENT_EARLY = {
    NaiveDDP: [0, 0, 0, 0, 0, 0, 6],
    FlatDDP: [0, 0, 0, 0, 0, 0, 1],
    OverlapDDP: [0, 1, 2, 3, 4, 5, 6],
    BucketedDDP: [0, 0, 0, 0, 0, 0, 1],
}
for cap_layers, early in {
    2: [0, 0, 1, 1, 2, 2, 3],
    4: [0, 0, 0, 0, 1, 1, 2],
    0.1: [0, 1, 2, 3, 4, 5, 6],
}.items():
    for wrapper in (BucketedDDP, fast.BucketedDDP):
        SENT_EARLY[partial(wrapper, bucket_cap_mb=cap_layers * SIX[0] / 2**20)] = early


def sent_before_each(make) -> tuple[list[int], list]:
    """How many messages left before the first gradient was ready, the second, ..., and in all."""
    torch.manual_seed(0)
    module, times = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in SIX]), []
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: times.append(time.perf_counter()))
    model = make(module)
    for _ in range(2):
        times.clear()
        before = len(said())
        model(torch.ones(1, 16)).sum().backward()
        model.synchronize()
    records = [record for record in said()[before:] if record.op == "all_reduce"]
    moments = [*times, float("inf")]
    return [sum(r.issued < moment for r in records) for moment in moments], records


@on_ranks(2)
def test_messages_leave_while_backward_goes_on(check):
    for make, early in SENT_EARLY.items():
        check.same(sent_before_each(make)[0], early, make)


@on_ranks(2, link=Link(latency_s=0.02, bytes_per_s=1e9))
def test_nothing_waits_before_synchronize(check):
    """On a slow link all messages are out before the first has arrived."""
    for make, early in SENT_EARLY.items():
        if early[-1] == 6 and make is not NaiveDDP:
            sent, records = sent_before_each(make)
            check.same(sent, early, make)
            first = min(record.waited for record in records)
            check.unless(first > max(record.issued for record in records), make, "waited early")


# Copies


class Copied(TorchDispatchMode):
    """Bytes that copying operations write into memory."""

    def __init__(self):
        super().__init__()
        self.written = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        out = (kwargs or {}).get("out")
        elsewhere = name == "mul" and out is not None and out.data_ptr() != args[0].data_ptr()
        if name in ("copy_", "cat", "clone", "_to_copy") or elsewhere:
            self.written[name] += result.nbytes
        return result


def bytes_copied(make, set_to_none) -> int:
    """In a third step, of an MLP of float32."""
    module = small_mlp(0, torch.float32)
    model = make(module)
    inputs, targets = mlp_batch(0, 0, 0, torch.float32)
    for _ in range(3):
        with Copied() as copied:
            mean_loss(model(inputs), targets).backward()
            if hasattr(model, "synchronize"):
                model.synchronize()
        model.zero_grad(set_to_none)
    return copied.written.total()


@on_ranks(1, 2)
def test_copies(check):
    """In multiples of Φ, the bytes of all gradients: after zero_grad with None, with zeros.

    FlatDDP copies gradients into its message and back. Buckets take them in, unless they are there
    already; bf16 always, into a message of half the bytes, and from there into the bucket.
    """
    torch.set_num_threads(1)
    gradient_bytes = sum(p.nbytes for p in small_mlp(0, torch.float32).parameters())
    for name, expected in {
        "naive": (0, 0),
        "flat": (2, 2),
        "overlap": (0, 0),
        "one bucket": (1, 0),
        "buckets": (1, 0),
        "fast": (1, 0),
        "bf16": (1.5, 1.5),
    }.items():
        for set_to_none, times in zip((True, False), expected, strict=True):
            without = bytes_copied(lambda module: module, set_to_none)
            copied = bytes_copied(ALL[name], set_to_none) - without
            check.same(copied / gradient_bytes, times, name, set_to_none)


@on_ranks(2)
def test_gradients_live_in_their_bucket(check):
    for name in ("one bucket", "buckets", "fast", "shared"):
        model = EXACT[name](Ways())
        for step in range(4):
            ways_step(model, step)
            if name in FAST:
                buckets = [(bucket.flat, list(bucket.views)) for bucket in model.buckets]
            else:
                buckets = list(zip(model.flats, model.plan, strict=True))
            for flat, parameters in buckets if step else ():
                at = flat.data_ptr()
                for parameter in parameters:
                    check.same(parameter.grad.data_ptr(), at, name, step)
                    at += parameter.nbytes
            model.zero_grad(set_to_none=step < 2)


# The rest


@on_ranks(2)
def test_nothing_to_train_and_no_bucket_size(check):
    for name, make in ALL.items():
        model = make(Ways().requires_grad_(False))
        model.synchronize()
        check.same(model(torch.ones(1, 4), "a").requires_grad, False, name)
    for cap, wrapper in itertools.product((0, -1, float("nan")), (BucketedDDP, fast.BucketedDDP)):
        says = "expected bucket_cap_mb > 0", str(cap), "in MiB"
        check.refused(wrapper, Ways(), cap, says=says)


SCRIPT = """
import sys

import torch.distributed as dist

sys.path.append(sys.argv[1])
import test_ddp
import test_fast_buckets
import twin

dist.init_process_group("gloo")
check = twin.Complaints()
test_ddp.test_ranks_may_go_different_ways.__wrapped__(check)
test_ddp.test_no_sync_ends_however_it_ends.__wrapped__(check)
test_ddp.test_average_gradients_counts_a_missing_one_as_zeros.__wrapped__(check)
test_fast_buckets.test_bf16_on_the_way.__wrapped__(check)
with open(f"rank.{dist.get_rank()}", "w") as file:
    print(check, file=file)
dist.destroy_process_group()
"""


def test_under_torchrun_alone(tmp_path):
    """In a world that ddpkit didn't make."""
    tests = str(Path(__file__).parent)
    run_script(tmp_path, SCRIPT, tests, command=TORCHRUN, OMP_NUM_THREADS="1")
    assert [(tmp_path / f"rank.{rank}").read_text() for rank in range(2)] == ["[]\n"] * 2
