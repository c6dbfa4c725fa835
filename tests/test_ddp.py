"""ddpkit.ddp, on every rank, against its serial twin: one process that trains on the whole batch.

What runs on the ranks returns what it found wrong, as a list of sentences; the tests assert that there are none.
"""

import contextlib
import io
import itertools
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import twin
from outside import run_script
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ddpkit import HangError, Link, RankError, launch
from ddpkit.batch_norm import convert
from ddpkit.ddp import BucketedDDP, FlatDDP, NaiveDDP, OverlapDDP, join, plan_buckets
from ddpkit.models import GPT, MLP, mean_loss
from ddpkit.tools.text import Batches

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # functions travel as those of a notebook do

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
FEW_BYTES = 100 / 2**20  # a bucket for some parameters of the models below, not for all
small_buckets = partial(BucketedDDP, bucket_cap_mb=FEW_BYTES)
shared_buckets = partial(BucketedDDP, bucket_cap_mb=FEW_BYTES, shared_memory=True)
bf16_buckets = partial(BucketedDDP, bucket_cap_mb=FEW_BYTES, wire_dtype=torch.bfloat16)
EXACT = {
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "overlap": OverlapDDP,
    "one bucket": BucketedDDP,
    "buckets": small_buckets,
    "shared": shared_buckets,
}
ON_THE_WIRE = {name: make for name, make in EXACT.items() if name != "shared"}
IN_BACKWARD = {name: EXACT[name] for name in ("overlap", "one bucket", "buckets", "shared")}
ALL = EXACT | {"bf16": bf16_buckets}


def rank_and_world(group=None):
    return dist.get_rank(group), dist.get_world_size(group)


def trained_of(module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


# Models and data. On every rank others, until they are wrapped.


def small_gpt(seed, dtype=torch.float32):
    torch.manual_seed(seed)
    model = GPT(vocabulary=11, context=6, width=8, heads=2, layers=1).to(dtype)
    model.prior.uniform_()
    return model


def small_mlp(seed, dtype=torch.float32):
    torch.manual_seed(seed)
    return MLP(inputs=4, width=6, outputs=3, layers=2).to(dtype)


def gpt_batch(step, micro_batch, rank, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro_batch + rank)
    return torch.randint(11, (2, 7), generator=generator).unfold(1, 6, 1).unbind(1)


def mlp_batch(step, micro_batch, rank, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro_batch + rank)
    x = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randint(3, (5,), generator=generator)


def gpt_loss(model, batches):
    """Of one batch with all that the ranks have."""
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return mean_loss(model(inputs), targets)


def mlp_loss(model, batches):
    """Batch norm takes its statistics over a rank's share, so the twin shows its model one share after the other."""
    return sum(mean_loss(model(x), targets) for x, targets in batches) / len(batches)


MODELS = {"GPT": (small_gpt, gpt_batch, gpt_loss), "MLP": (small_mlp, mlp_batch, mlp_loss)}
OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=1e-2),
}
STEPS = 5


def train(kind, optimizer, accumulation, ranks, make=None, set_to_none=True, dtype=torch.float32):
    """All trained parameters, as one vector, after training on the data of these ranks; with `make`, wrapped."""
    build, batch, loss = MODELS[kind]
    module = build(seed=dist.get_rank() if make else 0, dtype=dtype)
    model = make(module) if make else module
    stepper = OPTIMIZERS[optimizer](module.parameters())
    for step in range(STEPS):
        for number in range(accumulation):
            last = number == accumulation - 1
            with contextlib.nullcontext() if last or not make else model.no_sync():
                (loss(model, [batch(step, number, rank, dtype) for rank in ranks]) / accumulation).backward()
        if make:
            model.synchronize()
        stepper.step()
        stepper.zero_grad(set_to_none=set_to_none)
    return parameters_to_vector(module.parameters()).detach()


# The serial twin


def check_training(kind):
    """Of all variants. In float64 all but bf16; how near float32 must come is in `check_float32`."""
    torch.set_num_threads(1)
    wrong, (rank, world_size) = twin.Complaints(), rank_and_world()
    for optimizer, accumulation in itertools.product(OPTIMIZERS, (1, 3)):
        expected = train(kind, optimizer, accumulation, range(world_size), dtype=torch.float64)
        # Elsewhere than on 2 ranks, half of the cases: any two choices meet.
        ways = (True, False) if world_size == 2 else [(optimizer == "SGD") == (accumulation == 1)]
        for (name, make), set_to_none in itertools.product(EXACT.items(), ways):
            what = kind, optimizer, accumulation, name, set_to_none
            got = train(kind, optimizer, accumulation, [rank], make, set_to_none, torch.float64)
            wrong.unless(bool(((got - expected).abs() < HALF_THE_DIGITS).all()), *what, (got - expected).abs().max())
            wrong.same_on_all(got, *what)
        got = train(kind, optimizer, accumulation, [rank], bf16_buckets, accumulation == 1)
        wrong.same_on_all(got, kind, optimizer, accumulation, "bf16")
    return wrong


# Two roundings of 1e-16 grow in five steps, but nowhere near the eighth digit; a wrong gradient moves a parameter by a
# good part of the learning rate, in the second or third.
HALF_THE_DIGITS = torch.finfo(torch.float64).eps ** 0.5


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", MODELS)
def test_trained_like_one_process(kind, world_size):
    run = launch(check_training, kind, world_size=world_size)
    assert [wrong[:3] for wrong in run] == [[]] * world_size


def check_float32():
    """No further from the float64 twin than twice the float32 twin is."""
    torch.set_num_threads(1)
    wrong, (rank, world_size) = twin.Complaints(), rank_and_world()
    for kind, optimizer in itertools.product(MODELS, OPTIMIZERS):
        everyone = kind, optimizer, 3, range(world_size)
        exact = train(*everyone, dtype=torch.float64)
        allowed = 2 * (train(*everyone) - exact).norm()
        for name, make in EXACT.items():
            got = train(kind, optimizer, 3, [rank], make)
            wrong.unless((got - exact).norm() <= allowed, kind, optimizer, name, (got - exact).norm(), allowed)
            wrong.same_on_all(got, kind, optimizer, name)
    return wrong


def test_float32_is_as_exact_as_one_process():
    assert list(launch(check_float32, world_size=2)) == [[]] * 2


def gradients_of(module, loss) -> dict[str, torch.Tensor]:
    """Without hooks, and without leaving a trace; zeros for what has none."""
    names, parameters = zip(*trained_of(module).items(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    return dict(zip(names, found, strict=True))


def all_gradients(module) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in trained_of(module).values()])


def check_bf16():
    """Each gradient is rounded to bf16 once, and so is each of the W-1 sums: what `near` allows."""
    wrong, (rank, world_size) = twin.Complaints(), rank_and_world()
    for kind, (build, batch, loss) in MODELS.items():
        module = build(seed=rank)
        model = bf16_buckets(module)
        for step in range(3):
            parts = [gradients_of(module, loss(module, [batch(step, 0, r)])) for r in range(world_size)]
            loss(model, [batch(step, 0, rank)]).backward()
            model.synchronize()
            for name, parameter in trained_of(module).items():
                shares = [part[name] / world_size for part in parts]
                wrong.unless(parameter.grad.dtype == torch.float32, name, parameter.grad.dtype)
                wrong.near(parameter.grad.bfloat16(), shares, kind, step, name)
                wrong.same(parameter.grad.bfloat16().float(), parameter.grad, kind, step, name, "travelled")
            model.zero_grad()
    return wrong


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_bf16_on_the_way(world_size):
    assert list(launch(check_bf16, world_size=world_size)) == [[]] * world_size


# Replicas


def all_tensors(module) -> dict[str, torch.Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


def check_replicas():
    wrong, rank = twin.Complaints(), dist.get_rank()
    for (name, make), (build, *_) in itertools.product(ALL.items(), MODELS.values()):
        module, firsts = build(seed=rank), all_tensors(build(seed=0))
        if build is small_mlp:
            module[1].num_batches_tracked += 3 * rank
        addresses = [tensor.data_ptr() for tensor in all_tensors(module).values()]
        model = make(module)
        for tensor_name, tensor in all_tensors(module).items():
            wrong.same(tensor, firsts[tensor_name], name, tensor_name)
            wrong.unless(tensor.grad is None and tensor.grad_fn is None, name, tensor_name, "has a gradient")
        kept = [tensor.data_ptr() for tensor in all_tensors(module).values()] == addresses
        wrong.unless(kept and model.module is module, name, "replaced tensors")
    return wrong


@pytest.mark.parametrize("world_size", [1, 3])
def test_replicas_are_made_equal(world_size):
    assert list(launch(check_replicas, world_size=world_size)) == [[]] * world_size


class Two(nn.Module):
    """Two tensors of the same size, a parameter and a parameter or a buffer."""

    def __init__(self, names=("one", "two"), shape=(2, 3), dtype=torch.float32, trained=True, buffer=False):
        super().__init__()
        for name in names[:1] if buffer else names:
            self.register_parameter(name, nn.Parameter(torch.ones(shape, dtype=dtype), requires_grad=trained))
        if buffer:
            self.register_buffer(names[1], torch.ones(shape))


DIFFERENT = {
    "names": {"names": ("one", "three")},
    "fewer": {"names": ("one",)},
    "order": {"names": ("two", "one")},
    "shape": {"shape": (3, 2)},
    "dtype": {"dtype": torch.float64},
    "trained": {"trained": False},
    "buffer": {"buffer": True},
}


def complaints_about_different(odd):
    """What each wrapper says when this one rank has another module."""
    said = []
    for difference, make in itertools.product(DIFFERENT.values(), ALL.values()):
        try:
            make(Two(**difference if dist.get_rank() == odd else {}))
        except ValueError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("odd", [0, 1])
def test_other_modules_are_refused_on_every_rank(odd):
    (said,) = {tuple(said) for said in launch(complaints_about_different, odd, world_size=3)}
    assert len(said) == len(DIFFERENT) * len(ALL)
    assert all("expected the same module on every rank, got" in text and " on rank 1, " in text for text in said)


# Gradients that are missing


class Ways(nn.Module):
    """Two layers of the same size and a third; `forward` goes through those that it is told, in that order."""

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


def check_ways(ways, unused_as_zero, make, name):
    """Rank r goes the way r, later another one: gradients are the means of what the ranks have, each with its own."""
    wrong, (rank, world_size) = twin.Complaints(), rank_and_world()
    torch.manual_seed(rank)
    module = Ways()
    model = make(module, unused_as_zero=unused_as_zero)
    for step in range(4):
        going = [ways[(r + step) % len(ways)] for r in range(world_size)]
        parts = [gradients_of(module, module(ways_data(step, r), going[r])) for r in range(world_size)]
        model(ways_data(step, rank), going[rank]).backward()
        model.synchronize()
        for parameter_name, parameter in module.named_parameters():
            what = name, ways, step, parameter_name
            wrong.near(parameter.grad, [part[parameter_name] / world_size for part in parts], *what)
        wrong.same_on_all(all_gradients(module), name, ways, step)
        model.zero_grad(set_to_none=step % 2 == 0)
    return wrong


WAYS = [(["abc", "cba"], False), (["bca", "acb", "cab"], False), (["a", "b"], True), (["c", "ab", "a", "b"], True)]


def check_all_ways():
    torch.set_num_threads(1)
    every = itertools.product(WAYS, EXACT.items())
    return [wrong for (ways, unused), (name, make) in every for wrong in check_ways(ways, unused, make, name)]


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_may_go_different_ways(world_size):
    run = launch(check_all_ways, world_size=world_size)
    assert [wrong[:3] for wrong in run] == [[]] * world_size


def complaints_about_unused():
    wrong, rank = twin.Complaints(), dist.get_rank()
    for name, make in ALL.items():
        model = make(Ways())
        model(ways_data(0, rank), "ac").backward()
        says = f"rank {rank} has no gradient for b.weight, b.bias after", "Freeze it", "unused_as_zero=True"
        wrong.refused(model.synchronize, says=says)
        wrong.unless(model.module.b.weight.grad is None, name, "made a gradient")
    return wrong


def test_a_parameter_without_gradient_is_named():
    assert list(launch(complaints_about_unused, world_size=2)) == [[]] * 2


def check_unused_until_the_last():
    """Used in a micro-batch inside no_sync only: its gradient counts, and so it isn't missing."""
    wrong, (rank, world_size) = twin.Complaints(), rank_and_world()
    for name, make in EXACT.items():
        model = make(Ways())
        parts = [gradients_of(model.module, model.module(ways_data(0, r), "abc")) for r in range(world_size)]
        for part, r in zip(parts, range(world_size), strict=True):
            second = gradients_of(model.module, model.module(ways_data(1, r), "ac"))
            for parameter_name, gradient in second.items():
                part[parameter_name] += gradient
        with model.no_sync():
            model(ways_data(0, rank), "abc").backward()
        model(ways_data(1, rank), "ac").backward()
        model.synchronize()
        for parameter_name, parameter in model.module.named_parameters():
            wrong.near(parameter.grad, [part[parameter_name] / world_size for part in parts], name, parameter_name)
    return wrong


def test_a_gradient_from_an_earlier_micro_batch_is_none_missing():
    assert list(launch(check_unused_until_the_last, world_size=3)) == [[]] * 3


# Modules and optimizers of all kinds


class Mixed(nn.Module):
    """Parameters of five dtypes, empty, without dimension, or with numbers not in the order of their axes."""

    def __init__(self):
        super().__init__()
        dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.complex64]
        self.many = nn.ParameterList(torch.randn(7).to(dtype) for dtype in dtypes * 2)
        self.scalar = nn.Parameter(torch.randn(()))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.turned = nn.Parameter(torch.randn(3, 4).T)
        self.image = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
        self.register_buffer("flags", torch.rand(5) > 0.5)
        self.register_buffer("count", torch.tensor(dist.get_rank()))

    def forward(self, scale):
        return sum((parameter.abs() ** 2).sum().double() * scale for parameter in self.parameters())


def check_mixed():
    wrong, (rank, world_size) = twin.Complaints(), rank_and_world()
    for name, make in EXACT.items():
        torch.manual_seed(rank)
        module = Mixed()
        model = make(module)
        for tensor_name, tensor in all_tensors(module).items():
            wrong.same_on_all(tensor, name, tensor_name)
        for step in range(3):
            model(float(step + 2**rank)).backward()
            model.synchronize()
            scale = sum(step + 2**r for r in range(world_size)) / world_size
            for parameter_name, parameter in module.named_parameters():
                close = torch.allclose(parameter.grad, 2 * scale * parameter.detach(), rtol=0.02)
                wrong.unless(close and parameter.grad.dtype == parameter.dtype, name, step, parameter_name)
                wrong.same_on_all(parameter.grad, name, step, parameter_name)
            model.zero_grad(set_to_none=step == 0)
    return wrong


@pytest.mark.parametrize("world_size", [1, 2])
def test_dtypes_and_layouts(world_size):
    run = launch(check_mixed, world_size=world_size)
    assert [wrong[:3] for wrong in run] == [[]] * world_size


MANY_OPTIMIZERS = {
    "Adagrad": partial(torch.optim.Adagrad, lr=0.05),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01),
    "Adafactor": partial(torch.optim.Adafactor, lr=0.01),
    "Adam, one by one": partial(torch.optim.Adam, lr=0.01, foreach=False),
    "AdamW, fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "SGD, all at once": partial(torch.optim.SGD, lr=0.1, nesterov=True, momentum=0.9, foreach=True),
    "LBFGS": partial(torch.optim.LBFGS, max_iter=4),
}


def optimize(optimizer, ranks, make=None):
    """Clipped, with a closure that computes the gradients as often as the optimizer likes."""
    module = small_gpt(dist.get_rank() if make else 0, torch.float64)
    model = make(module) if make else module
    stepper = MANY_OPTIMIZERS[optimizer](trained_of(module).values())

    def closure():
        stepper.zero_grad()
        loss = gpt_loss(model, [gpt_batch(0, 0, rank) for rank in ranks])
        loss.backward()
        if make:
            model.synchronize()
            dist.all_reduce(loss.detach(), dist.ReduceOp.SUM)
            loss = loss / dist.get_world_size()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        return loss

    for _ in range(3):
        stepper.step(closure)
    return parameters_to_vector(module.parameters()).detach()


def check_optimizers():
    torch.set_num_threads(1)
    wrong, (rank, world_size) = twin.Complaints(), rank_and_world()
    for optimizer in MANY_OPTIMIZERS:
        expected = optimize(optimizer, range(world_size))
        for name, make in EXACT.items():
            got = optimize(optimizer, [rank], make)
            wrong.unless(bool(((got - expected).abs() < HALF_THE_DIGITS).all()), optimizer, name)
            wrong.same_on_all(got, optimizer, name)
    return wrong


def test_any_optimizer():
    assert list(launch(check_optimizers, world_size=2)) == [[]] * 2


def checkpointed(module, use_reentrant):
    for block in module.blocks:
        forward = block.forward
        block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=use_reentrant)
    return module


def check_checkpointing():
    torch.set_num_threads(1)
    wrong, (rank, world_size) = twin.Complaints(), rank_and_world()
    for (name, make), use_reentrant in itertools.product(EXACT.items(), (False, True)):
        plain = small_gpt(0)
        parts = [gradients_of(plain, gpt_loss(plain, [gpt_batch(0, 0, r)])) for r in range(world_size)]
        module = checkpointed(small_gpt(rank), use_reentrant)
        model = make(module)
        for step in range(2):
            gpt_loss(model, [gpt_batch(0, 0, rank)]).backward()
            model.synchronize()
            for parameter_name, parameter in trained_of(module).items():
                shares = [part[parameter_name] / world_size for part in parts]
                wrong.near(parameter.grad, shares, name, use_reentrant, step, parameter_name)
            model.zero_grad()
    return wrong


def test_activation_checkpointing_inside():
    assert list(launch(check_checkpointing, world_size=2)) == [[]] * 2


def check_checkpointed_twice():
    """Reentrant checkpoints hand over a weight's gradient in parts, the others in one."""
    wrong = twin.Complaints()
    for name, make in IN_BACKWARD.items():
        module = nn.Linear(3, 3)
        x = torch.ones(1, 3, requires_grad=True)
        for use_reentrant in (False, True):
            model = make(module) if use_reentrant else make(nn.Linear(3, 3))
            inner = checkpoint(model, x, use_reentrant=use_reentrant)
            loss = checkpoint(model, inner, use_reentrant=use_reentrant).sum()
            if use_reentrant:
                wrong += raises(RuntimeError, "use_reentrant=False", loss.backward)
            else:
                loss.backward()
                model.synchronize()
                wrong.same_on_all(model.module.weight.grad, name)
    return wrong


def raises(kind, says, function) -> twin.Complaints:
    wrong = twin.Complaints()
    try:
        function()
    except kind as error:
        wrong.unless(says in str(error), f"{says} not in {error}")
    else:
        wrong.unless(False, f"{function} raised nothing")
    return wrong


# no_sync, and backward twice


def check_no_sync():
    wrong, rank = twin.Complaints(), dist.get_rank()
    for name, make in ALL.items():
        model = make(Ways())
        with contextlib.suppress(KeyError), model.no_sync(), model.no_sync():
            raise KeyError
        with model.no_sync():
            with contextlib.suppress(KeyError), model.no_sync():
                raise KeyError
            own = gradients_of(model.module, model.module(ways_data(0, rank), "abc"))
            model(ways_data(0, rank), "abc").backward()
            model.synchronize()
            for parameter_name, parameter in model.module.named_parameters():
                wrong.same(parameter.grad, own[parameter_name], name, "inside")
        model.zero_grad()
        model(ways_data(0, rank), "abc").backward()
        model.synchronize()
        wrong.same_on_all(all_gradients(model.module), name, "afterwards")
        model.synchronize()  # once more makes no difference
        wrong.same_on_all(all_gradients(model.module), name, "synchronized twice")
    return wrong


def test_no_sync_ends_however_it_ends():
    run = launch(check_no_sync, world_size=2)
    assert list(run) == [[]] * 2


def check_twice():
    wrong = check_checkpointed_twice()
    for make, quietly in itertools.product(IN_BACKWARD.values(), (False, True)):
        model = make(Ways())
        model(ways_data(0, dist.get_rank()), "abc").backward()
        loss = model(ways_data(1, dist.get_rank()), "abc")
        with model.no_sync() if quietly else contextlib.nullcontext():
            wrong += raises(RuntimeError, "backward ran twice without synchronize()", loss.backward)
    return wrong


def test_backward_twice_is_named():
    assert list(launch(check_twice, world_size=2)) == [[]] * 2


def test_backward_twice_is_fine_where_nothing_is_on_its_way():
    assert list(launch(check_accumulated, world_size=2)) == [[]] * 2


def check_accumulated():
    wrong, (rank, world_size) = twin.Complaints(), rank_and_world()
    for make in (NaiveDDP, FlatDDP):
        model = make(Ways())
        for step in range(2):
            model(ways_data(step, rank), "abc").backward()
        model.synchronize()
        parts = []
        for r in range(world_size):
            loss = sum(model.module(ways_data(step, r), "abc") for step in range(2))
            parts.append(gradients_of(model.module, loss))
        for name, parameter in model.module.named_parameters():
            wrong.near(parameter.grad, [part[name] / world_size for part in parts], make, name)
    return wrong


# Exceptions in the middle of a step


PLACES = {
    "forward": lambda module, fail: module.b.register_forward_hook(fail),
    "backward": lambda module, fail: module.b.register_full_backward_hook(fail),
    "a parameter's hook": lambda module, fail: module.b.weight.register_post_accumulate_grad_hook(fail),
    "synchronize": None,
}


def fail(*args):
    raise ValueError("on every rank")


def broken_step(model, place):
    """On the way through c, b and a; in synchronize for want of b's gradients."""
    handle = PLACES[place](model.module, fail) if PLACES[place] else contextlib.nullcontext()
    with contextlib.suppress(ValueError), handle:
        model(ways_data(9, dist.get_rank()), "abc" if PLACES[place] else "ac").backward()
        model.synchronize()
        raise AssertionError(f"{place} raised nothing")


def check_abandoned():
    """In the first step, or after one that went well; then two steps more."""
    wrong, (rank, world_size) = twin.Complaints(), rank_and_world()
    for (name, make), place, before in itertools.product(EXACT.items(), PLACES, (0, 1)):
        module = Ways()
        model = make(module)
        for step in range(before + 2):
            if step == before:
                broken_step(model, place)
                model.zero_grad()
                if name in IN_BACKWARD and place in ("a parameter's hook", "synchronize"):
                    again = model(ways_data(9, rank), "abc").backward
                    wrong += raises(RuntimeError, "call abandon() on all ranks", again)
                model.abandon()
                wrong.unless(all(p.grad is None for p in module.parameters()), name, place, "kept gradients")
            parts = [gradients_of(module, module(ways_data(step, r), "abc")) for r in range(world_size)]
            model(ways_data(step, rank), "abc").backward()
            model.synchronize()
            for parameter_name, parameter in module.named_parameters():
                shares = [part[parameter_name] / world_size for part in parts]
                wrong.near(parameter.grad, shares, name, place, before, step, parameter_name)
            model.zero_grad()
    return wrong


def test_a_step_that_raised_on_all_ranks_can_be_abandoned():
    assert [wrong[:3] for wrong in launch(check_abandoned, world_size=2)] == [[]] * 2


# Uneven numbers of batches

UNEVEN = {
    1: [[2, 3]],
    2: [[2, 2, 2, 2], [3]],
    3: [[2], [1, 0, 4, 2], [3, 3]],
    4: [[2] * 6, [2], [1, 3], [0]],
}  # rows of each batch of each rank, by world size


def rows_of(kind, step, rank, rows):
    """A rank's batch of a step."""
    parts = zip(*(MODELS[kind][1](step, number, rank, torch.float64) for number in range(2)), strict=True)
    return tuple(torch.cat(part)[:rows] for part in parts)


def whole_batches(kind, uneven):
    """What all ranks have at each step, in one."""
    for step in range(max(map(len, uneven))):
        parts = [rows_of(kind, step, rank, rows[step]) for rank, rows in enumerate(uneven) if step < len(rows)]
        yield *(torch.cat(part) for part in zip(*parts, strict=True)), 1


def train_on(kind, batches, make=None):
    module = convert(MODELS[kind][0](dist.get_rank(), torch.float64)) if make else MODELS[kind][0](0, torch.float64)
    model = make(module) if make else module
    stepper = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for inputs, targets, weight in batches:
        stepper.zero_grad()
        (weight * mean_loss(model(inputs), targets)).backward()
        if make:
            model.synchronize()
        stepper.step()
    return parameters_to_vector(module.parameters()).detach()


def check_uneven(kind, uneven, expected):
    torch.set_num_threads(1)
    wrong, rank = twin.Complaints(), dist.get_rank()
    for name, make in EXACT.items():
        batches = [rows_of(kind, step, rank, rows) for step, rows in enumerate(uneven[rank])]
        mark()
        got = train_on(kind, join(batches), make)
        wrong.unless(bool(((got - expected).abs() < HALF_THE_DIGITS).all()), name, (got - expected).abs().max())
        wrong.same_on_all(got, name)
    return wrong


@pytest.mark.parametrize("world_size", UNEVEN)
@pytest.mark.parametrize("kind", MODELS)
def test_a_join_is_one_process_with_the_rows_that_are_left(kind, world_size):
    """Also of batch norm over all ranks' rows. It sends a number a step, and one in the end."""
    uneven = UNEVEN[world_size]
    [expected] = launch(train_on, kind, list(whole_batches(kind, uneven)), world_size=1)
    run = launch(check_uneven, kind, uneven, expected, world_size=world_size)
    assert [wrong[:3] for wrong in run] == [[]] * world_size
    for records in run.wire:
        for section in sections(records)[1:]:
            asked = [record.bytes for record in section if (record.op, record.dtype) == ("all_reduce", "int64")]
            assert asked == [8] * (max(map(len, uneven)) + 1)


def weights():
    batches = Batches(torch.zeros(25, dtype=torch.uint8), 9, 2, rank=dist.get_rank(), world_size=dist.get_world_size())
    return [(len(inputs), weight == batches.weight) for inputs, _, weight in join(batches)]


def test_of_a_batch_that_was_dealt_out_it_has_the_weight():
    """Twelve sequences, nine of them in the first batch: the last has none for the fourth rank."""
    assert list(launch(weights, world_size=4)) == [
        [(rows, True), (last, True)] for rows, last in ((3, 1), *[(2, 1)] * 2, (2, 0))
    ]


def join_nothing():
    says = f"rank {dist.get_rank()} has no batch to join with, expected at least one", "give it a batch of 0 rows"
    wrong = twin.Complaints()
    wrong.refused(next, join([]), says=says)
    return wrong


def test_a_join_without_any_batch_is_refused():
    assert list(launch(join_nothing, world_size=1)) == [[]]


# Groups


def check_groups():
    wrong, rank = twin.Complaints(), dist.get_rank()
    evens, odds = dist.new_group([0, 2, 4]), dist.new_group([3, 1])
    group, others, members = (odds, evens, [1, 3]) if rank % 2 else (evens, odds, [0, 2, 4])
    for name, make in EXACT.items():
        torch.manual_seed(rank)
        module = Ways()
        says = f"rank {rank} wrapped a module for a group that it isn't in", "on the group's ranks only"
        wrong.refused(make, module, group=others, says=says)
        model = make(module, group=group)
        torch.manual_seed(members[0])
        for (tensor_name, tensor), first in zip(module.named_parameters(), Ways().parameters(), strict=True):
            wrong.same(tensor, first, name, tensor_name)
        for step in range(1 + 2 * (rank % 2)):
            parts = [gradients_of(module, module(ways_data(step, r), "abc")) for r in members]
            model(ways_data(step, rank), "abc").backward()
            model.synchronize()
            for parameter_name, parameter in module.named_parameters():
                wrong.near(parameter.grad, [part[parameter_name] / len(members) for part in parts], name, step)
            model.zero_grad()
    return wrong


def test_groups():
    run = launch(check_groups, world_size=5)
    assert [wrong[:3] for wrong in run] == [[]] * 5
    assert {record.group for records in run.wire for record in records if record.op == "all_reduce"} == {
        "group [0, 2, 4]",
        "group [1, 3]",
    }


# Saved and loaded


def check_saved():
    wrong, rank = twin.Complaints(), dist.get_rank()
    for name, make in ALL.items():
        model = make(small_gpt(seed=rank))
        file = io.BytesIO()
        torch.save(model.module.state_dict(), file)
        file.seek(0)
        alone = small_gpt(seed=5)
        alone.load_state_dict(torch.load(file))
        inputs, _ = gpt_batch(0, 0, 0)
        wrong.same(model(inputs), alone(inputs), name, "saved")
        wrong.unless(list(model.state_dict()) == [f"module.{key}" for key in alone.state_dict()], name, "other names")
        model.load_state_dict({f"module.{key}": value for key, value in small_gpt(seed=7).state_dict().items()})
        wrong.same(model(inputs), small_gpt(seed=7)(inputs), name, "loaded")
        gpt_loss(model, [gpt_batch(0, 0, rank)]).backward()
        model.synchronize()
        wrong.same_on_all(model.module.tokens.weight.grad, name, "trained on")
        wrong.unless(model.eval() is model and not model.module.training, name, "eval")
    return wrong


def test_saved_and_loaded():
    assert list(launch(check_saved, world_size=2)) == [[]] * 2


# The plan


SIXTEENS = [(16, torch.float32)] * 5


@pytest.mark.parametrize(
    ("sizes", "cap_bytes", "expected"),
    [
        ([], 100, []),
        (SIXTEENS, 1, [[0], [1], [2], [3], [4]]),
        (SIXTEENS, 16, [[0], [1], [2], [3], [4]]),
        (SIXTEENS, 16.1, [[0, 1], [2, 3], [4]]),
        (SIXTEENS, 32, [[0, 1], [2, 3], [4]]),
        (SIXTEENS, 64.1, [[0, 1, 2, 3, 4]]),
        (SIXTEENS, 80, [[0, 1, 2, 3, 4]]),
        (SIXTEENS, float("inf"), [[0, 1, 2, 3, 4]]),
    ],
)
def test_plan(sizes, cap_bytes, expected):
    assert plan_buckets(sizes, cap_bytes) == expected


def test_a_giant_ends_a_bucket():
    small, giant = (4, torch.float32), (1000, torch.float32)
    assert plan_buckets([small, small, giant, small, small], 100) == [[0, 1, 2], [3, 4]]
    assert plan_buckets([giant, small], 100) == [[0], [1]]
    assert plan_buckets([giant, giant], 100) == [[0], [1]]


def test_a_bucket_has_one_dtype_and_its_turn_when_it_is_full():
    single, half = (8, torch.float32), (4, torch.bfloat16)
    assert plan_buckets([single, half, single, half], 100) == [[0, 2], [1, 3]]
    assert plan_buckets([half, single, single, half], 100) == [[1, 2], [0, 3]]
    assert plan_buckets([half, single, single, single, half], 16) == [[1, 2], [3], [0, 4]]


def medium_sizes(norms) -> list[tuple[int, torch.dtype]]:
    """Of the gradients of the seed's model, 423 million in all, in the reverse order of its parameters.

    It is CS336's "medium": width 1024, 24 blocks, 10000 tokens, head and embedding apart; in a block four matrices of
    attention, three of a SwiGLU of 4096, and two RMSNorms. norms: before which of the seven matrices those stand.
    """
    width, block = 1024, [1024 * 1024] * 4 + [1024 * 4096] * 3
    for place in sorted(norms, reverse=True):
        block.insert(place, width)
    numels = [10_000 * width, *block * 24, width, 10_000 * width]
    return [(4 * numel, torch.float32) for numel in reversed(numels)]


@pytest.mark.parametrize("norms", [(0, 0), (0, 4), (4, 7), (7, 7)])
def test_the_seeds_calls(norms):
    """1700, 980, 150 and 20 all-reduces in ten steps (FACTS.md), wherever the norms stand. Its MB are MiB."""
    sizes = medium_sizes(norms)
    assert sum(nbytes for nbytes, _ in sizes) == 4 * 423_183_360
    assert [10 * len(plan_buckets(sizes, mb * 2**20)) for mb in (1, 10, 100, 1000)] == [1700, 980, 150, 20]
    assert len(plan_buckets(sizes, 100 * 10**6)) == 17


@pytest.mark.parametrize("seed", range(10))
def test_the_plan_is_torchs(seed):
    """Of gradients of one dtype, empty ones among them."""
    generator = torch.Generator().manual_seed(seed)
    numels = torch.randint(0, 50, (40,), generator=generator).tolist()
    tensors = [torch.empty(numel, device="meta") for numel in numels]
    for cap_bytes in (1, 20, 100, 196, 1000, 10_000):
        expected, _ = dist._compute_bucket_assignment_by_size(tensors, [cap_bytes])
        assert plan_buckets([(tensor.nbytes, tensor.dtype) for tensor in tensors], cap_bytes) == expected


def send(wrap, layers):
    """Three steps for each bucket size; torch, too, plans anew after the first."""
    for cap_bytes in (1, 200, 256, 300, 100_000):
        torch.manual_seed(0)
        model = wrap(nn.Sequential(*[nn.Linear(*shape) for shape in layers]), bucket_cap_mb=cap_bytes / 2**20)
        for _ in range(3):
            mark()
            model(torch.ones(2, layers[0][0])).sum().backward()
            if wrap is BucketedDDP:
                model.synchronize()
        mark()


LAYERS = {"equal": [(8, 8)] * 5, "thin": [(8, 2), (2, 8)] * 3, "growing": [(2, 4), (4, 8), (8, 16), (16, 2)]}


@pytest.mark.parametrize("layers", LAYERS)
def test_the_messages_are_torchs(layers):
    """In the order of sending. Given a bucket size, torch makes no exception for its first bucket."""
    ours, torchs = (
        [
            [record.bytes for record in section if record.op == "all_reduce"]
            for section in sections(launch(send, wrap, LAYERS[layers], world_size=2).wire[0])[3::4]  # the third steps
        ]
        for wrap in (BucketedDDP, nn.parallel.DistributedDataParallel)
    )
    assert all(ours)
    assert len(ours) == 5
    assert ours == torchs


WAYS_BYTES = 80  # a layer's weight and bias


def plans(way):
    """The order of arrival in the first step; the buckets before it, after it, and after another with other ways."""
    module = Ways()
    names, arrived = {parameter: name for name, parameter in module.named_parameters()}, []
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: arrived.append(names[parameter]))
    model = BucketedDDP(module, WAYS_BYTES / 2**20)
    found = [[[names[parameter] for parameter in bucket.views] for bucket in model.buckets]]
    for step_way in (way[dist.get_rank()], "abc"):
        model(ways_data(0, dist.get_rank()), step_way).backward()
        model.synchronize()
        model.zero_grad()
        found.append([[names[parameter] for parameter in bucket.views] for bucket in model.buckets])
    return arrived[:5], found


def planned(names) -> list[list[str]]:
    sizes = {name: (parameter.nbytes, parameter.dtype) for name, parameter in Ways().named_parameters()}
    plan = plan_buckets([sizes[name] for name in names], WAYS_BYTES)
    return [[names[number] for number in bucket] for bucket in plan]


@pytest.mark.parametrize("way", [["abc", "abc", "abc"], ["cba", "abc", "bac"], ["acb", "cba", "cba"]])
def test_the_plan_is_the_order_in_which_the_first_ranks_gradients_came(way):
    """At first, the reverse order of registration."""
    run = launch(plans, way, world_size=3)
    for (arrived, _), taken in zip(run, way, strict=True):
        assert "".join(dict.fromkeys(name[0] for name in arrived)) == taken[::-1]
    real = planned(run[0][0])
    expected = [planned([name for name, _ in Ways().named_parameters()][::-1]), real, real]
    assert [found for _, found in run] == [expected] * 3


def ways_that_differ(way):
    """Two steps; the bytes of the buckets, in the order of the plan, in the second."""
    model = BucketedDDP(Ways(), WAYS_BYTES / 2**20)
    for _ in range(2):
        mark()
        model(ways_data(0, dist.get_rank()), way[dist.get_rank()]).backward()
        sizes = [bucket.flat.nbytes for bucket in model.buckets]
        model.synchronize()
    return sizes


@pytest.mark.parametrize("way", [["acb", "bca"], ["cab", "abc"]])
def test_all_ranks_send_in_the_order_of_the_plan(way):
    run = launch(ways_that_differ, way, world_size=2)
    assert len(set(run[0])) > 1  # otherwise the order wouldn't show
    for records in run.wire:
        assert [record.bytes for record in sections(records)[-1]] == run[0]


def mark():
    """Begin a section of the records."""
    dist.barrier()


def sections(records) -> list[list]:
    """The records between marks; first those before any."""
    found = [[]]
    for record in records:
        if record.function == "mark":
            found.append([])
        else:
            found[-1].append(record)
    return found


# The wire, exactly


def three_steps(make, kind):
    """The first, one of three micro-batches, and two micro-batches inside no_sync; the number of buckets in each."""
    build, batch, loss = MODELS[kind]
    model = make(build(seed=dist.get_rank()))
    buckets = []
    for quiet, loud in ((0, 1), (2, 1), (2, 0)):
        mark()
        buckets.append(len(getattr(model, "buckets", [])))
        with model.no_sync():
            for number in range(quiet):
                loss(model, [batch(0, number, dist.get_rank())]).backward()
            model.synchronize()
        for _ in range(loud):
            loss(model, [batch(0, 2, dist.get_rank())]).backward()
            model.synchronize()
    return buckets


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("world_size", [1, 3])
def test_messages_and_bytes(name, kind, world_size):
    trained = list(trained_of(MODELS[kind][0](0)).values())
    gradient_bytes = sum(parameter.nbytes for parameter in trained)
    run = launch(three_steps, ALL[name], kind, world_size=world_size)
    for records, buckets in zip(run.wire, run, strict=True):
        _, first, second, quiet = sections(records)
        for step, in_plan in ((first, buckets[0]), (second, buckets[1])):
            messages = {"naive": len(trained), "overlap": len(trained), "flat": 1, "one bucket": 1, "shared": 0}
            nbytes = {"shared": 0, "bf16": gradient_bytes // 2}
            sent = [record for record in step if record.op == "all_reduce"]
            assert len(sent) == messages.get(name, in_plan)
            assert sum(record.bytes for record in sent) == nbytes.get(name, gradient_bytes)
            assert {record.dtype for record in sent} <= {"bfloat16" if name == "bf16" else "float32"}
        agreeing = {record.op for record in first} - {"all_reduce"}
        assert bool(agreeing) == (name not in ("naive", "flat", "overlap"))  # on the order, once
        assert {record.op for record in second} <= {"all_reduce"}
        assert quiet == []
        if name in ("buckets", "shared", "bf16"):
            assert 1 < buckets[1] < len(trained)


def wrap(make, build):
    mark()
    make(build(seed=dist.get_rank()))


@pytest.mark.parametrize("kind", MODELS)
def test_wrapping_sends_every_tensor_once(kind):
    build = MODELS[kind][0]
    expected = [tensor.nbytes for tensor in all_tensors(build(0)).values()]
    for records in launch(wrap, NaiveDDP, build, world_size=2).wire:
        sent = [record.bytes for record in sections(records)[-1] if record.op == "broadcast"]
        assert sent == expected


# Overlap, by the order of events


def when_ready(make, steps=2):
    """For each step the times at which gradients became ready, in order, with a layer's worth of bytes each."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(6)])
    times = []
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: times.append(time.perf_counter()))
    model = make(module)
    for _ in range(steps):
        mark()
        times.clear()
        model(torch.ones(1, 16)).sum().backward()
        model.synchronize()
    return list(times)


def sent_before_each(ready, records) -> list[int]:
    """How many messages were sent before the first gradient was ready, before the second, ..., and in all."""
    return [sum(record.issued < moment for record in records) for moment in [*ready, float("inf")]]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (NaiveDDP, [0, 0, 0, 0, 0, 0, 6]),
        (FlatDDP, [0, 0, 0, 0, 0, 0, 1]),
        (OverlapDDP, [0, 1, 2, 3, 4, 5, 6]),
        (BucketedDDP, [0, 0, 0, 0, 0, 0, 1]),
        (partial(BucketedDDP, bucket_cap_mb=2 * 1024 / 2**20), [0, 0, 1, 1, 2, 2, 3]),
        (partial(BucketedDDP, bucket_cap_mb=4 * 1024 / 2**20), [0, 0, 0, 0, 1, 1, 2]),
        (partial(BucketedDDP, bucket_cap_mb=1 / 2**20), [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_messages_leave_while_backward_goes_on(make, expected):
    run = launch(when_ready, make, world_size=2)
    for ready, records in zip(run, run.wire, strict=True):
        assert sent_before_each(ready, sections(records)[-1]) == expected


def test_nothing_waits_before_synchronize():
    """On a slow link all messages are out before the first has arrived."""
    run = launch(when_ready, OverlapDDP, world_size=2, link=Link(latency_s=0.02, bytes_per_s=1e9))
    for ready, records in zip(run, run.wire, strict=True):
        assert sent_before_each(ready, sections(records)[-1]) == [0, 1, 2, 3, 4, 5, 6]
        assert all(record.waited > ready[-1] for record in sections(records)[-1])


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


def copied_per_step():
    """Bytes that a step copies, in multiples of those of the gradients; what is copied without a wrapper taken off.

    For each variant: with zero_grad(set_to_none=True), with False.
    """
    torch.set_num_threads(1)
    found = {}
    inputs, targets = mlp_batch(0, 0, 0)
    for name, make in {"none": None, **ALL}.items():
        found[name] = []
        for set_to_none in (True, False):
            module = small_mlp(seed=0)
            model = make(module) if make else module
            for _ in range(3):
                with Copied() as copied:
                    mean_loss(model(inputs), targets).backward()
                    if make:
                        model.synchronize()
                model.zero_grad(set_to_none)
            found[name].append(copied.written.total())
    gradient_bytes = sum(parameter.nbytes for parameter in module.parameters())
    plain = found.pop("none")
    return {
        name: [(written - without) / gradient_bytes for written, without in zip(both, plain, strict=True)]
        for name, both in found.items()
    }


@pytest.mark.parametrize("world_size", [1, 2])
def test_copies(world_size):
    """FlatDDP copies gradients into its message and back. BucketedDDP copies them into the bucket, unless they are
    there already; bf16, always into a message of half the bytes, and from there into the bucket.
    """
    for copied in launch(copied_per_step, world_size=world_size):
        into_bucket, in_place = copied.pop("shared")  # both, and what it writes to the other ranks
        assert into_bucket - in_place == pytest.approx(1)
        assert copied == {
            "naive": [0, 0],
            "flat": [2, 2],
            "overlap": [0, 0],
            "one bucket": [1, 0],
            "buckets": [1, 0],
            "bf16": [1.5, 1.5],
        }


def check_gradients_live_in_their_bucket():
    wrong = twin.Complaints()
    for name in ("one bucket", "buckets", "shared"):
        model = EXACT[name](Ways())
        for step in range(4):
            model(ways_data(step, dist.get_rank()), "abc").backward()
            model.synchronize()
            if step > 0:
                for bucket in model.buckets:
                    ends = [parameter.grad.data_ptr() for parameter in bucket.views]
                    gaps = [b - a - p.nbytes for (a, b), p in zip(itertools.pairwise(ends), bucket.views, strict=False)]
                    wrong.unless(ends[0] == bucket.flat.data_ptr() and not any(gaps), name, step, ends)
            model.zero_grad(set_to_none=step < 2)
    return wrong


def test_gradients_live_in_their_bucket():
    assert list(launch(check_gradients_live_in_their_bucket, world_size=2)) == [[]] * 2


# Mistakes


def check_mistakes():
    wrong = twin.Complaints()
    for cap in (0, -1, float("nan")):
        wrong.refused(BucketedDDP, Ways(), cap, says=("expected bucket_cap_mb > 0", str(cap), "in MiB"))
    both = {"wire_dtype": torch.bfloat16, "shared_memory": True}
    wrong.refused(BucketedDDP, Ways(), **both, says=("wire_dtype=torch.bfloat16 and shared_memory=True", "Drop"))
    return wrong


def test_mistakes_are_named():
    assert list(launch(check_mistakes, world_size=2)) == [[]] * 2


def nothing_to_train(make):
    module = Ways().requires_grad_(False)
    model = make(module)
    model.synchronize()
    return model(torch.ones(1, 4), "a").requires_grad


@pytest.mark.parametrize("name", ALL)
def test_nothing_to_train(name):
    assert list(launch(nothing_to_train, ALL[name], world_size=2)) == [False] * 2


def skip_synchronize(make):
    """In the second step, one rank."""
    model = make(Ways())
    for step in range(3):
        model(ways_data(step, dist.get_rank()), "abc").backward()
        if (dist.get_rank(), step) != (1, 1):
            model.synchronize()
        model.zero_grad()


@pytest.mark.parametrize("name", ALL)
def test_a_rank_that_skips_synchronize_is_reported(name):
    """It goes on alone, until the others miss it or its next backward meets gradients that are still on their way."""
    with pytest.raises((HangError, RankError)) as report:
        launch(skip_synchronize, ALL[name], world_size=2)
    text = str(report.value)
    if name in ("naive", "flat"):
        assert isinstance(report.value, HangError)
        assert "synchronize" in text
    else:
        assert "rank 1 raised RuntimeError: backward ran twice without synchronize()" in text


def die(make):
    model = make(Ways())
    for step in range(3):
        loss = model(ways_data(step, dist.get_rank()), "abc")
        if (dist.get_rank(), step) == (1, 1):
            raise KeyError("no more data")
        loss.backward()
        model.synchronize()
        model.zero_grad()


@pytest.mark.parametrize("name", ALL)
def test_a_rank_that_dies_is_reported(name):
    with pytest.raises(RankError, match="rank 1 raised KeyError: 'no more data'"):
        launch(die, ALL[name], world_size=2)


# Elsewhere

SCRIPT = """
import os
import sys

import torch.distributed as dist

sys.path.append(sys.argv[1])
import test_ddp

dist.init_process_group("gloo")
wrong = [*test_ddp.check_replicas(), *test_ddp.check_no_sync(), *test_ddp.check_all_ways(), *test_ddp.check_bf16()]
with open(f"rank.{dist.get_rank()}", "w") as file:
    print(wrong, file=file)
dist.destroy_process_group()
"""


def test_under_torchrun_alone(tmp_path):
    """In a world that ddpkit didn't make."""
    run_script(tmp_path, SCRIPT, str(Path(__file__).parent), command=TORCHRUN, OMP_NUM_THREADS="1")
    assert [(tmp_path / f"rank.{rank}").read_text() for rank in range(2)] == ["[]\n"] * 2
