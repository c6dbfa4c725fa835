"""Pieces of the museum: accumulation, scales, and the step."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import LinearLR

from ddpkit.data_parallel import average_gradients

from .museum_case import (
    ALONE,
    GRID,
    RANKS,
    RATE,
    Case,
    all_rows,
    joined,
    mlp,
    my_batches,
    serial_step,
    sgd,
    step_on,
    total,
    uneven_rows,
)
from .museum_piece import Piece, counted, factor, weight_of

FIRST = "gradient of first.weight"


def micro_batches_of(case):
    """Return micro-batches of 1, 2, 2, ... rows."""
    (x, y), *others = my_batches(case)
    return [(x[:1], y[:1]), *others]


def serial_micro_batches(case):
    return step_on(mlp(case), *joined(micro_batches_of(case)))


def weighted_by_samples(case):
    model = mlp(case)
    optimizer = sgd(model)
    batches = micro_batches_of(case)  # sequences of 1, 2, 2, ... tokens
    for x, y in batches:
        loss = mse_loss(model(x), y)  # the mean over tokens
        weight = 1 / len(batches)  # one sequence of them
        (loss * weight).backward()
    optimizer.step()
    return model


weighted_by_samples = Piece(
    code=weighted_by_samples,
    serial=serial_micro_batches,
    case=Case(1, 3),
    meshes=ALONE,
    source="verl-project/verl#5625",
    symptom="Results depend on how sequences are packed into micro-batches. One process, no ranks.",
    asks="how many times too much does the first micro-batch, which has one token of five, count?",
    measure=weight_of(0),
    choices="""
a: (loss * weight).backward() → optimizer.zero_grad()⏎(loss * weight).backward()
    zero_grad is missing in the loop.
b: (loss * weight) → loss
    A mean needs no further weight: the losses only have to be added.
c: weight = 1 / len(batches) → weight = len(x) / sum(len(each) for each, _ in batches)
    Means over tokens are weighted by sequences: they have to be weighted by their tokens.
""",
    why="1/3 where 1/5 is due. What a mean was taken over is what it must be weighted by.",
)


def phantom_scale(case):
    model = mlp(case)
    optimizer = sgd(model)
    scale = 2.0**16  # of a loss in fp16
    for x, y in my_batches(case):
        loss = mse_loss(model(x), y) / case.micro_batches
        loss.backward()
    average_gradients(model)
    for parameter in model.parameters():
        parameter.grad /= scale
    optimizer.step()
    return model


phantom_scale = Piece(
    code=phantom_scale,
    serial=serial_step,
    case=Case(2, 3),
    source="deepspeedai/DeepSpeed#7839",
    symptom="With Adam everything is fine. With SGD nothing is learned.",
    asks="how many times the right gradient is the optimizer's?",
    measure=factor(FIRST),
    choices="""
a: loss.backward() → (loss * scale).backward()
    The step takes a scale out that backward has never put in.
b: average_gradients(model)⏎for parameter in model.parameters():⏎    parameter.grad /= scale →
    ⏎for parameter in model.parameters():⏎    parameter.grad /= scale⏎average_gradients(model)
    Gradients have to be unscaled before they are averaged.
c: 2.0**16 → 2.0**8
    A scale of 65536 is too large for fp16, whose largest number is 65504: small gradients vanish.
""",
    why="2⁻¹⁶. Adam divides by the gradient's own size: it hides every factor, but for its ε.",
)


def zeroed_inside(case):
    model = mlp(case)
    optimizer = sgd(model)
    for x, y in my_batches(case):
        optimizer.zero_grad()  # grads from before would be added
        loss = mse_loss(model(x), y) / case.micro_batches
        loss.backward()
    average_gradients(model)
    optimizer.step()
    return model


zeroed_inside = Piece(
    code=zeroed_inside,
    serial=serial_step,
    case=Case(3, 4),
    source="pytorch/torchtitan#3575, da230bbb2",
    symptom="More accumulation makes training noisier, and no better.",
    asks="how many of the step's 12 micro-batches are in the gradient?",
    measure=counted(FIRST),
    choices="""
a: average_gradients(model)⏎optimizer.step() → optimizer.step()
    average_gradients belongs into the loop: there is nothing left to be averaged behind it.
b: optimizer.zero_grad()  # grads from before would be added →
    zero_grad drops the micro-batches of this step that came before.
c: / case.micro_batches →
    Only the losses of one step are averaged, so dividing makes them too small.
""",
    why="One micro-batch a rank is left, the last, and divided by m. zero_grad belongs to the "
    "step, before its first micro-batch or after the update.",
)


def rescaled_each_time(case):
    model = mlp(case)
    optimizer = sgd(model)
    for x, y in my_batches(case):
        mse_loss(model(x), y).backward()
        for parameter in model.parameters():
            parameter.grad /= case.micro_batches
    average_gradients(model)
    optimizer.step()
    return model


rescaled_each_time = Piece(
    code=rescaled_each_time,
    serial=serial_step,
    case=Case(2, 3),
    source="pytorch/torchtitan#1732, 3e1b843ec",
    symptom="With accumulation, the gradient's norm is smaller than without, and training slower.",
    asks="with which weight, relative to the right one, does rank 0's first micro-batch count?",
    measure=weight_of(0),
    choices="""
a: average_gradients(model) → pass
    Gradients are a mean already, and averaging them makes them smaller.
b: parameter.grad /= case.micro_batches → parameter.grad /= case.ranks
    Gradients have to be divided by the number of ranks here.
c: mse_loss(model(x), y).backward() → (mse_loss(model(x), y) / case.micro_batches).backward()
    parameter.grad /= case.micro_batches → pass
    All that has accumulated is divided, again with every micro-batch.
""",
    why="A moving average: the last micro-batch counts 1/m, the first m⁻ᵐ. Divide the loss.",
)


def overflow_of_my_own(case):
    model = mlp(case)
    optimizer = sgd(model)
    x, y = joined(my_batches(case))
    steps = 0
    for overflows in (True, False):
        optimizer.zero_grad()
        loss = mse_loss(model(x), y)
        if overflows and dist.get_rank() == 1:
            loss = loss * float("inf")  # fp16 overflows here
        loss.backward()
        gradients = [p.grad for p in model.parameters()]
        finite = all(g.isfinite().all() for g in gradients)
        for gradient in gradients:
            gradient.nan_to_num_(posinf=0, neginf=0)
        average_gradients(model)
        if finite:
            optimizer.step()
            steps += 1
    return {"steps": steps, **dict(model.named_parameters())}


overflow_of_my_own = Piece(
    code=overflow_of_my_own,
    serial=lambda case: {"steps": 1, **dict(serial_step(case).named_parameters())},
    case=Case(3, 2),
    source="facebookresearch/fairscale#181; pytorch#115710",
    symptom="It learns. Once in a few hundred steps the loss has a small bump, and ranks are no "
    "longer alike.",
    asks="how many of the 3 ranks make the step in which it overflows?",
    measure=lambda got, right: float(sum(rank["steps"] == 2 for rank in got)),
    choices="""
a: loss = loss * float("inf")  # fp16 overflows here → loss = loss * 0
    A rank that overflows has to take part with zeros.
b: gradient.nan_to_num_(posinf=0, neginf=0) → pass
    nan_to_num_ hides the overflow from the other ranks, who would skip the step, too.
c: if finite: → if total(not finite) == 0:
    Each rank decides for itself whether the step is skipped.
""",
    why="All skip or none does: one all-reduce of a flag. The bump is a step of the others alone.",
    meshes=RANKS,
)


def scaled_by_the_world(case):
    data = case.mesh["data"]  # the ranks of "inner" share a batch
    x, y = uneven_rows(case, data.get_local_rank())
    model = mlp(case)
    optimizer = sgd(model)
    errors = (model(x) - y).square().mean(1)
    rows = total(len(x), data.get_group())
    loss = errors.sum() / rows * dist.get_world_size()
    loss.backward()
    average_gradients(model, data.get_group())
    optimizer.step()
    return model


def serial_of_the_replicas(case):
    replicas = case.ranks // case.inner
    return step_on(mlp(case), *joined([uneven_rows(case, rank) for rank in range(replicas)]))


scaled_by_the_world = Piece(
    code=scaled_by_the_world,
    serial=serial_of_the_replicas,
    case=Case(3, 2, inner=3),
    meshes=GRID,
    source="meta-pytorch/torchtune#2420, #2641",
    symptom="With tensor parallelism the gradient's norm is larger, and clipping always cuts.",
    asks="how many times too large is the gradient, on one replica of three tensor ranks?",
    measure=factor(FIRST),
    choices="""
a: dist.get_world_size() → data.size()
    Averaging divides by the number of replicas, and the loss is multiplied by that of ranks.
b: .mean(1) → .sum(1)
    Errors are averaged over the outputs, and have to be summed.
c: average_gradients(model, data.get_group()) → average_gradients(model)
    Tensor ranks are left out of the average.
""",
    why="By the ranks that share a batch: on 4 × 1 ranks it is right, and a test of that passes.",
)


def other_axis(case):
    data = case.mesh["data"]
    inner = case.mesh["inner"]
    x, y = uneven_rows(case, data.get_local_rank())
    model = mlp(case)
    optimizer = sgd(model)
    errors = (model(x) - y).square().mean(1)
    loss = errors.sum() / total(len(x), data.get_group())
    loss.backward()
    for parameter in model.parameters():
        parameter.grad *= data.size()  # the mean divides by it
        dist.all_reduce(parameter.grad, group=data.get_group())
        parameter.grad /= inner.size()
    optimizer.step()
    return model


other_axis = Piece(
    code=other_axis,
    serial=serial_of_the_replicas,
    case=Case(4, 2, inner=4),
    meshes=GRID,
    source="pytorch/torchtitan#2842, in review: tests on 2 × 2 ranks passed",
    symptom="All tests pass, on four ranks: two replicas of two tensor ranks.",
    asks="here are one replica and four tensor ranks: how many times the right gradient?",
    measure=factor(FIRST),
    choices="""
a: total(len(x), data.get_group()) → total(len(x), inner.get_group())
    Rows are counted over the wrong group.
b: parameter.grad *= data.size()  # the mean divides by it → pass
    Multiplying is wrong, as the loss is a sum already.
c: /= inner.size() → /= data.size()
    The division is by the size of the other axis.
""",
    why="Sizes of two axes that are equal in the test: 2/2 = 1. Test with unequal ones.",
)


def rate_of_each_rank(case):
    model = mlp(case)
    optimizer = sgd(model)
    warm_up = LinearLR(optimizer, 1 / 12, total_iters=24)
    x, y = all_rows(case)  # the same on all ranks: nothing to average
    rates = []
    for _ in range(12):
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
        for _ in range(case.ranks):  # as many batches were used
            warm_up.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return {"rates": rates}


def serial_rates(case):
    model = mlp(case)
    slope = (1 - 1 / 12) / 24
    rates = [RATE * (1 / 12 + slope * step) for step in range(13)]
    x, y = all_rows(case)
    for rate in rates[:-1]:
        model.zero_grad()
        mse_loss(model(x), y).backward()
        torch.optim.SGD(model.parameters(), rate).step()
    return {"rates": rates[1:]}


rate_of_each_rank = Piece(
    code=rate_of_each_rank,
    serial=serial_rates,
    case=Case(2, 1),
    meshes=RANKS,
    source="huggingface/transformers#24088, accelerate#2926",
    symptom="Loss spikes at the start of runs on many GPUs; those on one have none. The rate is 0 "
    "long before the end.",
    asks="how many times as fast as planned does the rate rise?",
    measure=lambda got, right: rise(got[0]["rates"]) / rise(right[0]["rates"]),
    choices="""
a: 1 / 12, total → 1 / 12 / case.ranks, total
    The rate begins too high for so many ranks.
b: range(case.ranks) → range(1)
    The scheduler counts updates, and is stepped once for each rank.
c: total_iters=24 → total_iters=24 // case.ranks
    Warm-up has to be shorter on more ranks, which use more samples in a step.
""",
    why="By W. Print the rate beside the loss: a plan in steps is the same on any world.",
)


def rise(rates):
    return (rates[1] - rates[0]).item()


def half_weights(case):
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-12)
    one = torch.ones_like(model.weight)
    for _ in range(256):
        optimizer.zero_grad()
        loss = -model(one).sum()  # the weight goes up, by 1/4096 a step
        loss.backward()
        optimizer.step()
    return {"weight": model.weight.float()}


def serial_weights(case):
    """Train the weight in float32, which holds each multiple of 1/4096."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    for _ in range(256):
        model.zero_grad()
        (-model(torch.ones(1, 1)).sum()).backward()
        torch.optim.SGD(model.parameters(), 2.0**-12).step()
    return {"weight": model.weight}


half_weights = Piece(
    code=half_weights,
    serial=serial_weights,
    case=Case(1),
    meshes=(Case(1),),
    source="the course's source document; notebook 05",
    symptom="With weights in bf16 the loss falls at first, then stays where it is. Gradients have "
    "their usual size.",
    asks="by how much has the weight grown after 256 updates?",
    measure=lambda got, right: got[0]["weight"].item() - 1,
    choices="""
a: nn.Linear(1, 1, bias=False, dtype=torch.bfloat16) → nn.Linear(1, 1, bias=False)
    Each update is less than half of what lies between two neighbours in bf16, and is rounded away.
b: lr=2.0**-12 → lr=2.0**-12 * 16
    The learning rate is too small for so few updates.
c: optimizer.zero_grad() → pass
    zero_grad drops what small gradients add up to.
""",
    why="Not at all: 1 + 2⁻¹² is 1, as bf16 has 2⁻⁷ from 1 on. Keep weights in fp32, and compute "
    "with a copy.",
)


def divided_first(case):
    model = mlp(case)
    optimizer = sgd(model)
    for x, y in my_batches(case):
        loss = mse_loss(model(x), y) / case.micro_batches
        loss.backward()
    handles = []
    for parameter in reversed(list(model.parameters())):
        parameter.grad /= case.ranks
        handles.append(dist.all_reduce(parameter.grad, async_op=True))
    for handle in handles:
        handle.wait()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return dict(model.named_parameters())


divided_first = Piece(
    code=divided_first,
    serial=lambda case: dict(serial_step(case).named_parameters()),
    case=Case(3, 4),
    source="written for this course: right",
    symptom="Gradients are all zero when the step is over.",
    asks="how many times the weight of one process is that of rank 0, after the step?",
    measure=factor("first.weight"),
    choices="""
a: parameter.grad /= case.ranks → parameter.grad /= case.ranks * case.micro_batches
    Ranks and micro-batches both have to be divided by.
b: parameter.grad /= case.ranks → pass
    all_reduce with a mean of losses needs no division.
c: loss = mse → optimizer.zero_grad()⏎loss = mse
    Gradients of the micro-batches before are added to.
""",
    why="Divided before or behind the sum, forwards or backwards, waited for at the end: it is the "
    "mean, and zero_grad after the step is as good as before the next.",
)
