"""ddpkit.mixed_precision: against torch's scaler, against plain fp32 training, and on every rank against one process.

What runs on the ranks returns what it found wrong, as a list of sentences; the tests assert that there are none.
"""

import contextlib
import io
import itertools
import math
import sys
from functools import partial

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import twin
from torch import nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector

from ddpkit import launch
from ddpkit.ddp import FlatDDP, NaiveDDP, OverlapDDP, broadcast_module
from ddpkit.fast.buckets import BucketedDDP
from ddpkit.mixed_precision import LossScaler, MixedPrecisionOptimizer
from ddpkit.models import GPT, mean_loss
from ddpkit.tools.text import Batches, encode, text

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # functions travel as those of a notebook do

HALVES = [torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def off():
    """A scaler that doesn't scale."""
    return LossScaler(1.0, dynamic=False)


# LossScaler, alone


def parameter_with(gradient) -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(len(gradient)))
    parameter.grad = torch.tensor(gradient, dtype=torch.float32)
    return parameter


def go_through(scaler, overflows):
    """The scale after each step, and the weight; a step has a gradient of 1, or of inf."""
    parameter = parameter_with([0.0])
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scales = []
    for overflow in overflows:
        parameter.grad = scaler.scale(torch.ones(1)) * (math.inf if overflow else 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, parameter.item()


def test_the_scale_goes_down_with_each_overflow_and_up_again():
    scaler = LossScaler(8.0, growth_interval=2)
    scales, weight = go_through(scaler, [0, 1, 0, 0, 0, 0, 1, 1, 0])
    assert scales == [8, 4, 4, 8, 8, 16, 8, 4, 4]
    assert weight == 1 - 6
    assert scaler.skipped == 3


def test_as_the_scaler_of_torch():
    options = {"init_scale": 2.0**10, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 3}
    overflows = torch.rand(60, generator=torch.Generator().manual_seed(0)) < 0.2
    ours, theirs = LossScaler(**options), torch.amp.GradScaler("cpu", **options)
    assert go_through(ours, overflows) == go_through(theirs, overflows)


def test_the_scale_stays_above_its_bound():
    assert go_through(LossScaler(4.0, min_scale=1.0), [1, 1, 1, 1])[0] == [2, 1, 1, 1]


def test_a_static_scale_stays_and_skips_all_the_same():
    scaler = LossScaler(1024.0, dynamic=False, growth_interval=1)
    assert go_through(scaler, [0, 1, 0]) == ([1024.0] * 3, -1.0)
    assert scaler.skipped == 1


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_one_number_is_enough_for_an_overflow(bad, where):
    parameters = [parameter_with([1.0, 1.0]) for _ in range(3)] + [nn.Parameter(torch.ones(1))]  # one has no gradient
    parameters[where].grad[1] = bad
    optimizer = torch.optim.AdamW(parameters)
    scaler = LossScaler()
    scaler.step(optimizer)
    assert scaler.overflow
    assert all(torch.equal(parameter, torch.ones_like(parameter)) for parameter in parameters)
    assert not optimizer.state


def test_large_numbers_are_no_overflow():
    scaler = LossScaler()
    scaler.unscale_(torch.optim.SGD([parameter_with([3e38, -3e38])]))
    assert scaler.overflow is False


def test_scaling_costs_no_digit():
    loss = torch.randn(100, requires_grad=True)
    gradient = torch.randn(100)
    scaler = LossScaler(2.0**16)
    scaler.scale((loss * gradient).sum()).backward()
    scaler.unscale_(torch.optim.SGD([loss]))
    assert torch.equal(loss.grad, gradient)


def test_calls_in_a_wrong_order_are_refused():
    parameter = parameter_with([8.0])
    optimizer, scaler = torch.optim.SGD([parameter], lr=1.0), LossScaler(4.0)
    with pytest.raises(RuntimeError, match=r"update ran before step.*Call step\(\) first"):
        scaler.update()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_ ran twice.*update\(\)"):
        scaler.unscale_(optimizer)
    assert parameter.grad.item() == 2
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"step ran twice.*update\(\)"):
        scaler.step(optimizer)
    assert parameter.item() == -1
    scaler.update()
    scaler.unscale_(optimizer)


def test_fp16_where_it_would_undo_the_scaling_is_refused():
    with pytest.raises(ValueError, match=r"expected a loss in fp32, got one in fp16.*mean_loss"):
        LossScaler().scale(torch.ones((), dtype=torch.float16))
    weight = nn.Parameter(torch.ones(2, dtype=torch.float16))
    weight.grad = torch.ones_like(weight)
    with pytest.raises(ValueError, match=r"expected gradients in fp32, got fp16.*MixedPrecisionOptimizer"):
        LossScaler().unscale_(torch.optim.SGD([weight]))


@pytest.mark.parametrize(
    "wrong",
    [
        {"growth_factor": 1.0},
        {"backoff_factor": 1.0},
        {"backoff_factor": 0.0},
        {"growth_interval": 0},
        {"init_scale": 0.5},
        {"min_scale": 0.0},
    ],
)
def test_wrong_options_are_refused(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        LossScaler(**wrong)


def test_a_scaler_goes_on_where_it_was_saved():
    overflows = [0, 1, 0, 0, 0, 1, 0, 0]
    whole, first, second = (LossScaler(8.0, growth_interval=2) for _ in range(3))
    scales, _ = go_through(whole, overflows)
    go_through(first, overflows[:3])
    second.load_state_dict(first.state_dict())
    assert go_through(second, overflows[3:])[0] == scales[3:]
    assert second.skipped == whole.skipped == 2


def test_under_autocast_with_any_optimizer():
    """fp32 weights, fp16 products, gradients in fp32 again: what torch's autocast needs of a scaler."""
    layer = nn.Linear(4, 2)
    x = torch.full((1, 4), 2.0**-13)
    optimizer, scaler = torch.optim.SGD(layer.parameters(), lr=1.0), LossScaler(2.0**16)
    gradients = []
    for scale in (scaler.scale, lambda loss: loss):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = (layer(x).float() * 2.0**-13).sum()
        scale(loss).backward()
        gradients.append(layer.weight.grad.clone())
    assert torch.equal(gradients[0], torch.full((2, 4), 2.0**-10))  # 2**-26, times 2**16
    assert torch.equal(gradients[1], torch.zeros(2, 4))  # rounded away


# LossScaler, on ranks


def check_agreement(world_size):
    wrong, rank = twin.Complaints(), dist.get_rank()
    for odd, bad in itertools.product(range(world_size), (math.inf, math.nan)):
        parameter = parameter_with([1.0, bad if rank == odd else 2.0])
        optimizer, scaler = torch.optim.SGD([parameter], lr=1.0, momentum=0.9), LossScaler(4.0)
        scaler.step(optimizer)
        wrong.unless(scaler.overflow is True, "overflow of rank", odd, "not seen:", scaler.overflow)
        wrong.unless(not optimizer.state and parameter.tolist() == [1, 1], "stepped though rank", odd, "can't")
        scaler.update()
        wrong.unless(scaler.get_scale() == 2.0, scaler.get_scale())
        parameter.grad = torch.ones(2)
        scaler.step(optimizer)
        scaler.update()
        wrong.unless(scaler.overflow is None and parameter.tolist() == [0.5, 0.5], "the next step was", parameter)
    return wrong


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_one_rank_with_an_overflow_is_enough_for_all_to_skip(world_size):
    run = launch(check_agreement, world_size, world_size=world_size)
    assert list(run) == [[]] * world_size
    steps = 2 * 2 * world_size
    for records in run.wire:
        assert [(record.op, record.bytes) for record in records] == [("all_reduce", 4)] * steps  # one float a step


def check_groups():
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    scaler = LossScaler(group=groups[rank // 2])
    scaler.unscale_(torch.optim.SGD([parameter_with([math.inf if rank == 1 else 1.0])]))
    return scaler.overflow


def test_ranks_agree_within_their_group():
    assert list(launch(check_groups, world_size=4)) == [True, True, False, False]


# MixedPrecisionOptimizer, alone


def small_gpt(seed=0):
    torch.manual_seed(seed)
    return GPT(vocabulary=11, context=6, width=8, heads=2, layers=1)


def gpt_loss(model, step, micro_batch=0, ranks=(0,)):
    """The mean over what these ranks have in a micro-batch."""
    seeds = [1000 * step + 100 * micro_batch + rank for rank in ranks]
    tokens = torch.cat([torch.randint(11, (2, 7), generator=torch.Generator().manual_seed(seed)) for seed in seeds])
    return mean_loss(model(tokens[:, :-1]), tokens[:, 1:])


def trained_of(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def groups_of(model):
    """Two, with options of their own; and a frozen parameter."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    return [{"params": matrices, "weight_decay": 0.3}, {"params": [p for p in model.parameters() if p.dim() < 2]}]


ADAMW = partial(torch.optim.AdamW, lr=1e-2)
SGD = partial(torch.optim.SGD, lr=0.3, momentum=0.9)


@pytest.mark.parametrize("inner", [ADAMW, SGD])
def test_in_fp32_it_trains_as_the_optimizer_inside(inner):
    """To the bit: groups, schedule, clipping, micro-batches, a frozen and a tied weight; scaled by a power of two."""
    plain, mixed = small_gpt(), small_gpt()
    theirs = inner(groups_of(plain))
    ours = MixedPrecisionOptimizer(groups_of(mixed), inner, torch.float32, LossScaler())
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.8) for each in (theirs, ours)]
    for step in range(5):
        for micro_batch in range(3):
            (gpt_loss(plain, step, micro_batch) / 3).backward()
            ours.scale(gpt_loss(mixed, step, micro_batch) / 3).backward()
        assert torch.equal(ours.clip_grad_norm_(0.5), clip_grad_norm_(trained_of(plain), 0.5))
        for each in (theirs, ours, *schedules):
            each.step()
        theirs.zero_grad()
        ours.zero_grad()
        assert torch.equal(parameters_to_vector(mixed.parameters()), parameters_to_vector(plain.parameters()))
    assert ours.param_groups[1]["lr"] == theirs.param_groups[1]["lr"] < 0.4 * theirs.defaults["lr"]


@pytest.mark.parametrize("dtype", HALVES)
def test_weights_are_the_master_copies_rounded(dtype):
    model, before = small_gpt(), small_gpt()
    objects = list(model.parameters())
    optimizer = MixedPrecisionOptimizer(model.parameters(), ADAMW, dtype)
    assert all(a is b for a, b in zip(model.parameters(), objects, strict=True))
    assert model.head.weight is model.tokens.weight
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert torch.equal(model.positions, before.positions.to(dtype))
    assert model.positions not in optimizer.masters
    assert model.prior.dtype == torch.float32  # buffers are left as they are
    assert optimizer.scaler.get_scale() == (2**16 if dtype == torch.float16 else 1)
    assert optimizer.scaler.dynamic == (dtype == torch.float16)
    for master, weight in zip(optimizer.masters.values(), trained_of(before), strict=True):
        assert torch.equal(master, weight)
    for step in range(3):
        optimizer.scale(gpt_loss(model, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        for weight, master in optimizer.masters.items():
            assert master.dtype == torch.float32
            assert torch.equal(weight, master.to(dtype))
    assert not torch.equal(model.tokens.weight, before.tokens.weight.to(dtype))


def storage_bytes(tensors):
    """Of what exists, each storage once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize(("micro_batches", "expected"), [(1, 16), (2, 20)])
@pytest.mark.parametrize("dtype", HALVES)
def test_sixteen_bytes_a_parameter(dtype, micro_batches, expected):
    model = nn.Linear(100, 30, bias=False)
    optimizer = MixedPrecisionOptimizer(model.parameters(), ADAMW, dtype)
    found = []
    for _ in range(2):
        for _ in range(micro_batches):
            optimizer.scale(model(torch.ones(1, 100, dtype=dtype)).float().mean()).backward()
        moments = [moment for state in optimizer.state.values() for moment in state.values() if moment.dim()]
        gradients = [weight.grad for weight in optimizer.masters]
        tensors = [*model.parameters(), *gradients, *optimizer.masters.values(), *moments, *optimizer._lost.values()]
        found.append(storage_bytes(tensors))
        assert all(master.grad is None for master in optimizer.masters.values())
        optimizer.step()
        optimizer.zero_grad()
    assert found == [(expected - 8) * 3000, expected * 3000]  # moments come with the first step


@pytest.mark.parametrize("dtype", HALVES)
def test_micro_batches_add_up_in_fp32(dtype):
    """One after the other, 16-bit numbers stop to add up: 2048 + 1 is 2048 in fp16, 256 + 1 is 256 in bf16."""
    sums = []
    for optimized in (True, False):
        weight = nn.Parameter(torch.zeros(1))
        if optimized:
            MixedPrecisionOptimizer([weight], SGD, dtype)
        else:
            weight.data = weight.data.to(dtype)
        for _ in range(4096):
            weight.sum().backward()
        sums.append(weight.grad.item())
    assert sums == [4096, {torch.float16: 2048, torch.bfloat16: 256}[dtype]]


@pytest.mark.parametrize("dtype", HALVES)
def test_the_sum_of_gradients_is_rounded_once(dtype):
    parts = twin.fractions(0, 30 * 50).view(30, 50).to(dtype)
    weight = nn.Parameter(torch.zeros(50))
    optimizer = MixedPrecisionOptimizer([weight], SGD, dtype, off())
    for zero in (optimizer.zero_grad, partial(optimizer.zero_grad, set_to_none=False), None):
        total = torch.zeros(50)
        for part in parts:
            (weight * part).sum().backward()
            total += part
            assert torch.equal(weight.grad, total.to(dtype))
        if zero:
            zero()


def test_gradients_that_were_averaged_in_between_are_what_is_added_to():
    weight = nn.Parameter(torch.zeros(1))
    MixedPrecisionOptimizer([weight], SGD, torch.float16)
    for _ in range(3):
        (4 * weight).sum().backward()
    weight.grad /= 4  # say, by synchronize()
    (4 * weight).sum().backward()
    assert weight.grad.item() == 7


def test_who_drops_a_gradient_drops_what_it_was_rounded_by():
    """As module.zero_grad() does. 2048 + 1 is 2048 in fp16, and 1 waits: it must not wait for the next sum."""
    weight = nn.Parameter(torch.zeros(1))
    MixedPrecisionOptimizer([weight], SGD, torch.float16)
    for _ in range(2):
        weight.grad = None
        for gradient in (2048.0, 1.0):
            (weight * gradient).sum().backward()
        assert weight.grad.item() == 2048


def test_zeros_forget_the_last_sum_whoever_wrote_them():
    weight = nn.Parameter(torch.zeros(1))
    optimizer = MixedPrecisionOptimizer([weight], partial(SGD, lr=0.0), torch.float16, off())
    for gradient in (60000.0, 60000.0, 60000.0):  # inf
        (weight * gradient).sum().backward()
    optimizer.step()
    weight.grad.zero_()
    (weight * 3).sum().backward()
    assert weight.grad.item() == 3


def everything_of(optimizer):
    """All bits that a step may change."""
    moments = [torch.as_tensor(value) for state in optimizer.state.values() for value in state.values()]
    return [each.clone() for each in (*optimizer.masters, *optimizer.masters.values(), *moments)]


@pytest.mark.parametrize("dtype", HALVES)
def test_an_overflow_changes_nothing_but_the_scale(dtype):
    model = small_gpt()
    optimizer = MixedPrecisionOptimizer(model.parameters(), ADAMW, dtype, LossScaler(8.0))
    for step in range(4):
        optimizer.scale(gpt_loss(model, step)).backward()
        if step == 2:
            model.norm.bias.grad[3] = math.inf
            optimizer.clip_grad_norm_(1.0)  # must not hide it
        before = everything_of(optimizer)
        optimizer.step()
        optimizer.zero_grad()
        same = [torch.equal(a, b) for a, b in zip(before, everything_of(optimizer), strict=False)]
        assert all(same) == (step == 2)
    assert (optimizer.scaler.get_scale(), optimizer.scaler.skipped) == (4.0, 1)


def test_clipping_sees_the_gradients_unscaled():
    weight = nn.Parameter(torch.zeros(2))
    optimizer = MixedPrecisionOptimizer([weight], partial(torch.optim.SGD, lr=1.0), torch.float16, LossScaler(1024.0))
    optimizer.scale((weight * torch.tensor([3.0, 4.0])).sum().float()).backward()
    assert weight.grad.tolist() == [3072, 4096]
    assert optimizer.clip_grad_norm_(2.5).item() == 5
    with pytest.raises(RuntimeError, match="unscale_ ran twice"):
        optimizer.unscale_()
    optimizer.step()
    assert torch.allclose(weight.float(), torch.tensor([-1.5, -2.0]), rtol=2**-10)  # torch adds 1e-6 to the norm


def test_small_gradients_and_small_updates_add_up():
    """A gradient of 2**-30, which fp16 has not, and updates of 2**-13, which 1 in fp16 doesn't feel: 4096 make 1/2."""

    def after_4096_steps(scaler, rounded_copy):
        weight = nn.Parameter(torch.ones(1))
        inner = partial(torch.optim.SGD, lr=2.0**17)
        optimizer = MixedPrecisionOptimizer([weight], inner, torch.float16, scaler)
        for _ in range(4096):
            optimizer.scale(weight.float().sum() * 2.0**-30).backward()
            optimizer.step()
            optimizer.zero_grad()
            if rounded_copy:  # what there is without a master copy
                optimizer.masters[weight].copy_(weight.detach())
        return weight.item()

    assert after_4096_steps(LossScaler(), rounded_copy=False) == 0.5
    assert after_4096_steps(LossScaler(), rounded_copy=True) == 1
    assert after_4096_steps(off(), rounded_copy=False) == 1


def test_a_thawed_parameter_can_be_added():
    model = small_gpt()
    optimizer = MixedPrecisionOptimizer(trained_of(model), ADAMW)
    model.positions.requires_grad = True
    optimizer.add_param_group({"params": [model.positions], "lr": 0.5})
    before = model.positions.detach().clone()
    optimizer.scale(gpt_loss(model, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert model.positions.dtype == torch.float16
    assert model.positions.grad is None
    moved = (model.positions - before).abs()
    assert optimizer.param_groups[1]["lr"] == 0.5
    assert 0.4 < moved.max() < 0.6  # Adam's first step is the learning rate


@pytest.mark.parametrize("dtype", HALVES)
def test_saved_and_loaded_it_goes_on_to_the_bit(dtype):
    def steps(model, optimizer, numbers):
        for step in numbers:
            optimizer.scale(gpt_loss(model, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    def new(seed):
        model = small_gpt(seed)
        scaler = LossScaler(2.0**18, growth_interval=2) if dtype == torch.float16 else None  # with overflows
        return model, MixedPrecisionOptimizer(groups_of(model), ADAMW, dtype, scaler)

    whole, its = steps(*new(0), range(8))
    _, saved = steps(*new(0), range(3))
    file = io.BytesIO()
    torch.save(saved.state_dict(), file)
    file.seek(0)
    model, optimizer = new(1)
    model.positions.data.copy_(whole.positions)  # not trained, so it comes with the model
    optimizer.load_state_dict(torch.load(file))
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 1.0)
    steps(model, optimizer, range(3, 8))
    for ours, theirs in zip(everything_of(optimizer), everything_of(its), strict=True):
        assert torch.equal(ours, theirs)
    assert optimizer.scaler.state_dict() == its.scaler.state_dict()


def test_a_schedule_after_loading_is_heard():
    weight = nn.Parameter(torch.zeros(1))
    optimizer = MixedPrecisionOptimizer([weight], partial(torch.optim.SGD, lr=1.0), scaler=off())
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = 0.25
    weight.sum().backward()
    optimizer.step()
    assert weight.item() == -0.25


def test_what_cannot_be_trained_is_refused():
    weight = nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match=r"expected a dtype to train in, got torch\.int8"):
        MixedPrecisionOptimizer([weight], SGD, torch.int8)
    with pytest.raises(ValueError, match=r"shape \(3,\) is in two groups"):
        MixedPrecisionOptimizer([{"params": [weight]}, {"params": [weight]}], SGD)


def test_overwritten_weights_are_noticed():
    weight = nn.Parameter(torch.full((2, 3), 0.1))
    optimizer = MixedPrecisionOptimizer([weight], SGD)
    weight.data.fill_(0.2)
    weight.float().sum().backward()
    with pytest.raises(ValueError, match=r"got others in a parameter of shape \(2, 3\): they were overwritten"):
        optimizer.step()


# On ranks: the serial twin

WRAPPERS = {
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "overlap": OverlapDDP,
    "buckets": partial(BucketedDDP, bucket_cap_mb=200 / 2**20),
    "shared": partial(BucketedDDP, bucket_cap_mb=200 / 2**20, shared_memory=True),
}
STEPS = 5


def train(inner, accumulation, ranks, dtype=None, wrap=None, clip=0.5, set_to_none=True):
    """All parameters in float64 after training on the data of these ranks; without dtype, plainly in float64."""
    model = small_gpt(dist.get_rank() if wrap else 0)
    if dtype is None:
        model.double()
        optimizer = inner(trained_of(model))
    else:
        if wrap:
            broadcast_module(model)
        optimizer = MixedPrecisionOptimizer(model.parameters(), inner, dtype)
    wrapped = wrap(model) if wrap else model
    for step in range(STEPS):
        for number in range(accumulation):
            with contextlib.nullcontext() if not wrap or number == accumulation - 1 else wrapped.no_sync():
                loss = gpt_loss(wrapped, step, number, ranks) / accumulation
                (optimizer.scale(loss) if dtype else loss).backward()
        if wrap:
            wrapped.synchronize()
        if dtype is None:
            clip_grad_norm_(trained_of(model), clip)
        else:
            optimizer.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    return parameters_to_vector(optimizer.masters.values() if dtype else trained_of(model)).detach().double()


def check_twin():
    """No further from one process in float64 than twice as far as one process in 16 bits is.

    The rule of flash-attention's tests; with ranks, a gradient is rounded once more to travel, and in other places.
    """
    torch.set_num_threads(1)
    wrong, rank, world_size = twin.Complaints(), dist.get_rank(), dist.get_world_size()
    for inner, accumulation in ((ADAMW, 1), (SGD, 3)):
        exact = train(inner, accumulation, range(world_size))
        for dtype in HALVES:
            allowed = 2 * (train(inner, accumulation, range(world_size), dtype) - exact).norm()
            for name, wrap in WRAPPERS.items():
                what = inner.func.__name__, accumulation, dtype, name
                got = train(inner, accumulation, [rank], dtype, wrap, set_to_none=name != "buckets")
                wrong.unless(bool((got - exact).norm() <= allowed), *what, (got - exact).norm(), "allowed", allowed)
                wrong.same_on_all(got, *what)
    return wrong


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_trained_like_one_process(world_size):
    run = launch(check_twin, world_size=world_size)
    assert [wrong[:3] for wrong in run] == [[]] * world_size


def one_step(wrap, accumulation, dtype):
    model = small_gpt()
    optimizer = MixedPrecisionOptimizer(model.parameters(), ADAMW, dtype)
    wrapped = wrap(model)
    dist.barrier()
    for number in range(accumulation):
        with contextlib.nullcontext() if number == accumulation - 1 else wrapped.no_sync():
            optimizer.scale(gpt_loss(wrapped, 0, number, [dist.get_rank()]) / accumulation).backward()
    wrapped.synchronize()
    optimizer.step()
    return sum(parameter.numel() for parameter in trained_of(model))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_gradients_travel_in_16_bits_once_a_step_and_one_float_after_them(accumulation):
    run = launch(one_step, FlatDDP, accumulation, torch.float16, world_size=2)
    for numel, records in zip(run, run.wire, strict=True):
        begin = max(number for number, record in enumerate(records) if record.op == "barrier")
        sent = [(record.op, record.bytes) for record in records[begin + 1 :]]
        assert sent == [("all_reduce", 2 * numel), ("all_reduce", 4)]


def step_with_an_overflow():
    """Gradients stay where they are: no wrapper brings one rank's inf to the others."""
    model = small_gpt()
    optimizer = MixedPrecisionOptimizer(model.parameters(), ADAMW)
    optimizer.scale(gpt_loss(model, 0)).backward()
    if dist.get_rank() == 1:
        model.tokens.weight.grad[2, 3] = math.inf
    before = everything_of(optimizer)
    optimizer.step()
    return all(map(torch.equal, before, everything_of(optimizer))), optimizer.scaler.get_scale()


def test_no_rank_steps_when_one_cannot():
    assert list(launch(step_with_an_overflow, world_size=3)) == [(True, 2.0**15)] * 3


def wrapped_without_beginning_alike():
    model = small_gpt(dist.get_rank())
    optimizer = MixedPrecisionOptimizer(model.parameters(), ADAMW)
    wrapped = NaiveDDP(model)
    optimizer.scale(gpt_loss(wrapped, 0)).backward()
    wrapped.synchronize()
    try:
        optimizer._check_weights()
    except ValueError as error:
        return str(error)
    return "fine"


def test_a_wrapper_that_overwrites_other_weights_is_noticed():
    first, second = launch(wrapped_without_beginning_alike, world_size=2)
    assert first == "fine"
    assert "got others on rank 1" in second
    assert "broadcast_module(model) before" in second


# What each remedy is for: training on a text


class WithoutMasters(MixedPrecisionOptimizer):
    """Updates are computed in fp32, and kept in 16 bits only."""

    @torch.no_grad()
    def step(self):
        super().step()
        for weight, master in self.masters.items():
            master.copy_(weight)


ALONE = 1 / 8192  # a micro-batch of 512 tokens in a step of 4 million
MAKE = {
    "fp32": partial(MixedPrecisionOptimizer, dtype=torch.float32, scaler=off()),
    "fp16, neither": lambda params, inner: WithoutMasters(params, inner, scaler=off()),
    "fp16, scaling": WithoutMasters,
    "fp16, master copies": lambda params, inner: MixedPrecisionOptimizer(params, inner, scaler=off()),
    "fp16, both": MixedPrecisionOptimizer,
    "bf16, both": partial(MixedPrecisionOptimizer, dtype=torch.bfloat16),
}


def train_on_text(model, make, steps, lr):
    """Each micro-batch has its share of the gradient of a large step; AdamW, after all, sees no difference."""
    optimizer = make(model.parameters(), partial(torch.optim.AdamW, lr=lr, eps=1e-15, weight_decay=0.0))
    losses = []
    for inputs, targets in itertools.islice(Batches(encode(text()), 16, 32), steps):
        loss = mean_loss(model(inputs), targets)
        optimizer.scale(loss * ALONE).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def bigram_loss(make):
    """Of the whole text, after training logits that begin as the logs of how often each byte occurs: about 3.25."""
    tokens = encode(text()).long()
    logits = (torch.bincount(tokens, minlength=256) + 1.0).log()
    model = nn.Embedding.from_pretrained(logits.expand(256, 256).clone(), freeze=False)
    train_on_text(model, make, 400, lr=3e-3)
    pairs = torch.bincount(256 * tokens[:-1] + tokens[1:], minlength=256 * 256).view(256, 256)
    return -(pairs * model.weight.detach().float().log_softmax(1)).sum().item() / pairs.sum().item()


def test_each_remedy_is_needed_and_both_are_enough():
    """Logits up to 11 don't feel steps of 0.003 in fp16: half the distance to the next number is 0.004.

    The fp32 loss falls from 3.25 to 2.80. Both remedies: within 0.01 of it; without one, less than half of the way.
    """
    counts = torch.bincount(encode(text()), minlength=256) + 1.0
    start = torch.distributions.Categorical(counts).entropy().item()
    losses = {name: bigram_loss(make) for name, make in MAKE.items()}
    learned = start - losses["fp32"]
    assert learned > 0.4
    for name in ("fp16, both", "bf16, both"):
        assert abs(losses[name] - losses["fp32"]) < 0.01
    for name in ("fp16, neither", "fp16, scaling"):
        assert start - losses[name] < 0.1 * learned
    assert start - losses["fp16, master copies"] < 0.5 * learned


def test_a_gpt_without_scaling_fails():
    """It begins at 5.5, as if all bytes were alike; both remedies end within 0.02 of fp32, which learns 2.6 of it."""
    ends = {}
    for name in ("fp32", "fp16, master copies", "fp16, both", "bf16, both"):
        torch.manual_seed(0)
        losses = train_on_text(GPT(context=32, width=16, heads=2, layers=1), MAKE[name], 100, lr=1e-2)
        ends[name] = sum(losses[-10:]) / 10
    assert ends["fp32"] < 3
    assert ends["fp16, both"] == pytest.approx(ends["fp32"], abs=0.02)
    assert ends["bf16, both"] == pytest.approx(ends["fp32"], abs=0.02)
    assert not ends["fp16, master copies"] < 5


def test_a_gpt_in_fp16_alone_ends_in_nan():
    """AdamW's epsilon and squares of small gradients are zero in fp16, and 0/0 is NaN."""
    torch.manual_seed(0)
    model = GPT(context=32, width=16, heads=2, layers=1).half()
    optimizer = torch.optim.AdamW(trained_of(model), lr=1e-2)
    for inputs, targets in itertools.islice(Batches(encode(text()), 16, 32), 3):
        loss = mean_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.isnan()
