"""ddpkit.mixed_precision: beside torch's scaler, plain fp32 training, and one process."""

import contextlib
import io
import math
from functools import partial
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
import training_cases as cases
from on_ranks import on_ranks
from torch import nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector
from training_cases import ADAMW, SGD, WRAPPERS, groups_of, sent_by

from ddpkit.mixed_precision import LossScaler, MixedPrecisionOptimizer

HALVES = [torch.float16, torch.bfloat16]
small_gpt = partial(cases.small_gpt, dtype=torch.float32)


def unscaled():
    return LossScaler(1.0, dynamic=False)


def gpt_loss(model, step, micro_batch=0, rank=0):
    return cases.gpt_loss(model, [cases.gpt_batch(step, micro_batch, rank)])


def trained_of(model):
    return list(cases.trained_of(model).values())


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


def test_a_static_scale_stays():
    scaler = LossScaler(8.0, dynamic=False, growth_interval=1)
    assert go_through(scaler, [0, 1, 0]) == ([8, 8, 8], -1)
    assert scaler.skipped == 1


def test_as_the_scaler_of_torch():
    overflows = torch.rand(60, generator=torch.Generator().manual_seed(0)) < 0.2
    options = {"init_scale": 2.0**10, "growth_interval": 3}
    theirs = torch.amp.GradScaler("cpu", **options)
    assert go_through(LossScaler(**options), overflows) == go_through(theirs, overflows)


def test_large_numbers_are_no_overflow():
    scaler = LossScaler()
    scaler.unscale_(torch.optim.SGD([parameter_with([3e38, -3e38])]))
    assert scaler.overflow is False


def test_calls_in_a_wrong_order_are_refused():
    parameter = parameter_with([8.0])
    optimizer, scaler = torch.optim.SGD([parameter], lr=1.0), LossScaler(4.0)
    with pytest.raises(RuntimeError, match="update was called before step"):
        scaler.update()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_ was called twice.*update\(\)"):
        scaler.unscale_(optimizer)
    assert parameter.grad.item() == 2
    scaler.step(optimizer)
    assert parameter.item() == -1
    scaler.update()
    scaler.unscale_(optimizer)


def test_fp16_gradients_would_lose_what_the_scale_has_saved():
    weight = nn.Parameter(torch.ones(2, dtype=torch.float16))
    weight.grad = torch.ones_like(weight)
    with pytest.raises(ValueError, match=r"expected fp32 .* fp16: use MixedPrecisionOptimizer"):
        LossScaler().unscale_(torch.optim.SGD([weight]))


def test_without_gradients_it_sends_from_the_parameters_device():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2, device="meta"))])
    sent = Mock(side_effect=InterruptedError)  # to end there: `meta` has no number to read
    there = patch.multiple(dist, is_initialized=lambda: True, all_reduce=sent)
    with there, pytest.raises(InterruptedError):
        LossScaler().unscale_(optimizer)
    assert sent.call_args.args[0].is_meta


# MixedPrecisionOptimizer, alone


@pytest.mark.parametrize("inner", [ADAMW, SGD])
def test_in_fp32_it_trains_as_the_optimizer_inside(inner):
    """To the bit: groups, schedule, clipping, micro-batches, a frozen and a tied weight."""
    plain, mixed = small_gpt(), small_gpt()
    theirs = inner(groups_of(plain))
    trained = [p for group in theirs.param_groups for p in group["params"] if p.requires_grad]
    ours = MixedPrecisionOptimizer(groups_of(mixed), inner, torch.float32, LossScaler())
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.8) for each in (theirs, ours)]
    for step in range(3):
        for micro_batch in range(2):
            (gpt_loss(plain, step, micro_batch) / 2).backward()
            ours.scale(gpt_loss(mixed, step, micro_batch) / 2).backward()
        assert torch.equal(ours.clip_grad_norm_(0.5), clip_grad_norm_(trained, 0.5))
        for each in (theirs, ours, *schedules):
            each.step()
        theirs.zero_grad()
        ours.zero_grad()
        for mine, expected in zip(mixed.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine, expected)
    assert ours.param_groups[1]["lr"] == pytest.approx(0.8**3 * inner.keywords["lr"])


@pytest.mark.parametrize("dtype", HALVES)
def test_weights_are_the_master_copies_rounded(dtype):
    model, before = small_gpt(), small_gpt()
    objects = list(model.parameters())
    optimizer = MixedPrecisionOptimizer(model.parameters(), ADAMW, dtype)
    assert all(a is b for a, b in zip(model.parameters(), objects, strict=True))
    assert model.head.weight is model.tokens.weight
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert torch.equal(model.positions, before.positions.to(dtype))
    assert model.positions not in optimizer.masters  # it is frozen
    fp16 = dtype == torch.float16
    assert (optimizer.scaler.get_scale(), optimizer.scaler.dynamic) == (2**16 if fp16 else 1, fp16)
    for master, weight in zip(optimizer.masters.values(), trained_of(before), strict=True):
        assert torch.equal(master, weight)


@pytest.mark.parametrize("dtype", HALVES)
def test_the_sum_of_gradients_is_rounded_once(dtype):
    """Integers of 16 bits, which fp32 adds up exactly; after zero_grad from nothing."""
    parts = torch.randint(-(2**11), 2**11, (30, 50), generator=torch.Generator().manual_seed(0))
    parts = parts.to(dtype)
    weight = nn.Parameter(torch.zeros(50))
    optimizer = MixedPrecisionOptimizer([weight], SGD, dtype, unscaled())
    for zero in (optimizer.zero_grad, partial(optimizer.zero_grad, set_to_none=False), bool):
        total = torch.zeros(50)
        for part in parts:
            (weight * part).sum().backward()
            total += part
            assert torch.equal(weight.grad, total.to(dtype))
        zero()


def test_gradients_that_were_averaged_in_between_are_what_is_added_to():
    weight = nn.Parameter(torch.zeros(1))
    MixedPrecisionOptimizer([weight], SGD)
    for _ in range(3):
        (4 * weight).sum().backward()
    weight.grad /= 4  # say, by synchronize()
    (4 * weight).sum().backward()
    assert weight.grad.item() == 7


def test_what_rounding_took_off_is_forgotten_with_its_gradient():
    """2048 + 1 is 2048 in fp16, and 1 waits: not for the next step, nor after a zero_grad."""
    weight = nn.Parameter(torch.zeros(1))
    optimizer = MixedPrecisionOptimizer([weight], partial(SGD, lr=0.0), scaler=unscaled())

    def drop():
        weight.grad = None  # as module.zero_grad() does

    def step():
        optimizer.step()
        weight.grad.zero_()

    for forget in (drop, step, optimizer.zero_grad, drop):
        for gradient in (2048.0, 1.0):
            (weight * gradient).sum().backward()
        assert weight.grad.item() == 2048
        forget()


def everything_of(optimizer):
    """All bits that a step may change."""
    found = [*optimizer.masters, *optimizer.masters.values()]
    for state in optimizer.state.values():
        found += [torch.as_tensor(value) for value in state.values()]
    return [each.detach().clone() for each in found]


def same_bits(some, others):
    return len(some) == len(others) and all(map(torch.equal, some, others))


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
        assert same_bits(before, everything_of(optimizer)) == (step == 2)
    assert (optimizer.scaler.get_scale(), optimizer.scaler.skipped) == (4.0, 1)


@pytest.mark.parametrize("inner", [ADAMW, SGD])
def test_saved_and_loaded_it_goes_on_to_the_bit(inner):
    def steps(seed, numbers, state=None):
        model = small_gpt(seed)
        model.positions.data.copy_(small_gpt().positions)  # not trained: it comes with the model
        scaler = LossScaler(2.0**18, growth_interval=2)  # with overflows
        optimizer = MixedPrecisionOptimizer(groups_of(model), inner, scaler=scaler)
        if state:
            optimizer.load_state_dict(state)
        for step in numbers:
            optimizer.param_groups[0]["lr"] = 0.01 * (1 + step)  # also heard after loading
            optimizer.scale(gpt_loss(model, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    whole = steps(0, range(8))
    file = io.BytesIO()
    torch.save(steps(0, range(3)).state_dict(), file)
    file.seek(0)
    resumed = steps(1, range(3, 8), torch.load(file))
    assert same_bits(everything_of(resumed), everything_of(whole))
    assert resumed.scaler.get_scale() == whole.scaler.get_scale()


# On ranks


@on_ranks(4)
def test_ranks_agree_within_their_group(check):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    scaler = LossScaler(group=groups[dist.get_rank() // 2])
    gradient = [math.inf if dist.get_rank() == 1 else 1.0]
    scaler.unscale_(torch.optim.SGD([parameter_with(gradient)]))
    check.same(scaler.overflow, dist.get_rank() < 2, "overflow")


# Wrapper, optimizer inside, dtype and micro-batches: each pair of them somewhere.
CASES = [
    ("naive", SGD, torch.float16, 1),
    ("flat", ADAMW, torch.float16, 3),
    ("overlap", ADAMW, torch.bfloat16, 1),
    ("buckets", SGD, torch.bfloat16, 3),
    ("fast", ADAMW, torch.float16, 1),
]


def accumulate(model, optimizer, step, micro_batches, rank):
    """Backward of all micro-batches that a rank has; sent, if at all, with the last."""
    for number in range(micro_batches):
        sends = number == micro_batches - 1 or not hasattr(model, "no_sync")
        with contextlib.nullcontext() if sends else model.no_sync():
            loss = gpt_loss(model, step, number, rank) / micro_batches
            optimizer.scale(loss).backward()


@on_ranks(1, 2, 3, 4)
def test_trained_like_one_process(check, rank, world_size):
    """The gradients that a process alone computes for all ranks; then the step that torch takes.

    A mean of W gradients is divided and added in 16 bits: W roundings, each at most eps/2 of the
    sum of magnitudes, or half the smallest number. The step is the same to the last bit.
    """
    for name, inner, dtype, micro_batches in CASES:
        case = name, inner.func.__name__, dtype, micro_batches
        model, alone = small_gpt(), small_gpt()
        ours = MixedPrecisionOptimizer(model.parameters(), inner, dtype, LossScaler(2.0**10))
        its = MixedPrecisionOptimizer(alone.parameters(), SGD, dtype, LossScaler(2.0**10))
        masters = [master.clone() for master in ours.masters.values()]
        theirs, wrapped = inner(masters), WRAPPERS[name](model)
        for step in range(2):
            gradients = []
            for each in range(world_size):
                alone.load_state_dict(model.state_dict())
                its.zero_grad()
                accumulate(alone, its, step, micro_batches, each)
                gradients.append([weight.grad.double() for weight in its.masters])
            accumulate(wrapped, ours, step, micro_batches, rank)
            wrapped.synchronize()
            for weight, master, *parts in zip(ours.masters, masters, *gradients, strict=True):
                eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).tiny
                bound = eps * sum(part.abs() for part in parts) + world_size * eps * tiny
                check.close(weight.grad, sum(parts) / world_size, bound, *case, step, "gradient")
                master.grad = weight.grad.float() / ours.scaler.get_scale()
            norm = ours.clip_grad_norm_(0.1)
            check.same(norm, clip_grad_norm_(masters, 0.1), *case, step, "norm")
            check.unless(norm > 0.1, *case, step, "norm", norm, "isn't clipped")
            ours.step()
            theirs.step()
            for (weight, master), expected in zip(ours.masters.items(), masters, strict=True):
                check.same(master, expected, *case, step, "master copy")
                check.same(weight.detach(), expected.to(dtype), *case, step, "weight")
            ours.zero_grad(set_to_none=name != "buckets")
            check.same_on_all(parameters_to_vector(ours.masters.values()), *case, step, "masters")


@on_ranks(2)
def test_gradients_travel_in_16_bits_once_a_step_and_one_float_after_them(check):
    module = small_gpt()
    optimizer = MixedPrecisionOptimizer(module.parameters(), ADAMW)
    model = WRAPPERS["flat"](module)

    def step():
        accumulate(model, optimizer, 0, 2, dist.get_rank())
        model.synchronize()
        optimizer.step()

    numel = sum(parameter.numel() for parameter in trained_of(module))
    sent = [(record.op, record.bytes) for record in sent_by(step)]
    check.same(sent, [("all_reduce", 2 * numel), ("all_reduce", 4)])
