"""Pieces of the museum: data parallelism."""

import dataclasses

import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from ddpkit.data_parallel import average_gradients

from .museum_case import (
    Case,
    joined,
    mlp,
    my_batches,
    serial_step,
    serial_steps,
    serial_tied,
    serial_uneven,
    sgd,
    tied_mlp,
    total,
    uneven_rows,
)
from .museum_piece import Piece, counted, factor, weight_of

FIRST = "gradient of first.weight"


def late_flag(case):
    model = DistributedDataParallel(mlp(case))
    optimizer = sgd(model)
    for number, (x, y) in enumerate(my_batches(case), 1):
        loss = mse_loss(model(x), y) / case.micro_batches
        model.require_backward_grad_sync = number == case.micro_batches
        loss.backward()
    optimizer.step()
    return model.module


late_flag = Piece(
    code=late_flag,
    serial=serial_step,
    case=Case(2, 3),
    source="karpathy/build-nanogpt#30",
    symptom="The loss falls as it should. After a long run, validation is at 3.95, where "
    "others have 3.82.",
    asks="how many of the step's 6 micro-batches are in rank 0's gradient of first.weight?",
    measure=counted(FIRST),
    choices="""
a: / case.micro_batches →
    DDP takes the mean, so dividing by the number of micro-batches divides twice.
b: optimizer = sgd(model) → optimizer = sgd(model)⏎model.require_backward_grad_sync = False
    The flag begins as True, so that the first micro-batch is sent: it has to be off before the
    loop.
c: loss = mse → model.require_backward_grad_sync = number == case.micro_batches⏎loss = mse
    model.require_backward_grad_sync = number == case.micro_batches⏎loss.backward() →
    ⏎loss.backward()
    The flag is set too late: DDP looks at it in forward, and arms backward's hooks there.
""",
    why="The flag of one micro-batch takes effect in the next: the first is averaged, the others "
    "stay on their rank. `with model.no_sync():` around forward *and* backward.",
)


def hook_averages(case):
    model = mlp(case)
    optimizer = sgd(model)

    def average(gradient):
        dist.all_reduce(gradient)
        gradient /= case.ranks

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(average)
    for x, y in my_batches(case):  # here each makes a step
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
    return model


def updates_apart(got, right):
    """Measure how far ranks 0 and 1 are apart, in units of the difference of their last updates."""
    apart = got[0]["first.weight"] - got[1]["first.weight"]
    update = -0.5 * (got[0][FIRST] - got[1][FIRST])
    return ((apart * update).sum() / update.square().sum()).item()


hook_averages = Piece(
    code=hook_averages,
    serial=serial_steps,
    case=Case(2, 3),
    source="huggingface/picotron#39",
    symptom="The loss falls, on all ranks alike. Checkpoints of rank 0 and rank 1 aren't quite "
    "equal, and don't drift further apart.",
    asks="after the last step, how far apart are the weights of ranks 0 and 1, in units of "
    "rate × difference of their last gradients?",
    measure=updates_apart,
    choices="""
a: def average(gradient): → def average(parameter):
    dist.all_reduce(gradient) → dist.all_reduce(parameter.grad)
    gradient /= case.ranks → parameter.grad /= case.ranks
    What the hook is given isn't the gradient.
b: gradient /= case.ranks → pass
    DDP's mean is taken by the loss already: dividing here divides twice.
c: optimizer.zero_grad()⏎mse_loss(model(x), y).backward() →
    ⏎mse_loss(model(x), y).backward()⏎optimizer.zero_grad()
    zero_grad is called before backward, so hooks find gradients of the step before.
""",
    why="It is the parameter: weights are averaged *before* each step, and then every rank goes "
    "its own way, one update far.",
)


def last_one_only(case):
    model = mlp(case)
    optimizer = sgd(model)
    sums = dict.fromkeys(model.parameters(), 0.0)
    for number, (x, y) in enumerate(my_batches(case), 1):
        optimizer.zero_grad()
        loss = mse_loss(model(x), y) / case.micro_batches
        loss.backward()
        if number == case.micro_batches:  # once a step is enough
            average_gradients(model)
        sums = {p: before + p.grad for p, before in sums.items()}
    for parameter, gradient in sums.items():
        parameter.grad = gradient
    optimizer.step()
    return model


last_one_only = Piece(
    code=last_one_only,
    serial=serial_step,
    case=Case(3, 2),
    source="huggingface/picotron_tutorial, step 5",
    symptom="All tests pass; they don't accumulate. In a run with accumulation, ranks' weights "
    "drift apart.",
    asks="in rank 0's gradient, how many times too much does its own first micro-batch count?",
    measure=weight_of(0),
    choices="""
a: optimizer.zero_grad() → pass
    zero_grad within a step drops the gradients of all micro-batches but the last.
b: if number == case.micro_batches:  # once a step is enough⏎    average_gradients(model) → pass
    optimizer.step()⏎return model → average_gradients(model)⏎optimizer.step()⏎return model
    What is averaged is one micro-batch's gradient, not what the step has accumulated.
c: if number == case.micro_batches: → if number == 1:
    Averaging comes too late: gradients have to be averaged in the first micro-batch.
""",
    why="W ranks' last micro-batches are averaged; the others are added whole, each rank its own, "
    "so they count W times too much there and not at all elsewhere.",
)


def past_the_wrapper(case):
    model = DistributedDataParallel(mlp(case))
    optimizer = sgd(model)

    def loss_of(network, x, y):
        return mse_loss(network(x), y) / case.micro_batches

    for x, y in my_batches(case):
        loss = loss_of(model.module, x, y)
        loss.backward()
    optimizer.step()
    return model.module


past_the_wrapper = Piece(
    code=past_the_wrapper,
    serial=serial_step,
    case=Case(4, 3),
    source="jingyaogong/minimind#854; kohya-ss/sd-scripts#989",
    symptom="No faster with 4 GPUs, and no better either: the loss is that of a run on one GPU.",
    asks="which share of the step's samples is in rank 0's gradient?",
    measure=lambda got, right: counted(FIRST)(got, right) / counted(FIRST)(right, right),
    choices="""
a: / case.micro_batches →
    DDP takes the mean over micro-batches: dividing once more makes it too small.
b: loss.backward() → loss.backward()⏎model.require_backward_grad_sync = True
    DDP averages in the first backward only, and then has to be told to go on.
c: loss_of(model.module, x, y) → loss_of(model, x, y)
    DDP's hooks wait for DDP's own forward, which nobody calls.
""",
    why="Nothing is sent after the first broadcast: an audit of the wire shows it at once. Each "
    "rank trains alone, and rank 0's checkpoint is a run on 1/W of the data.",
)


def seeds_of_their_own(case):
    mine = dataclasses.replace(case, seed=case.seed + dist.get_rank())
    model = mlp(mine)  # other masks of dropout on each rank
    optimizer = sgd(model)
    for x, y in my_batches(case):  # here each makes a step
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        average_gradients(model)
        optimizer.step()
    return model


def distance_kept(got, right):
    """Measure the distance of the weights of ranks 0 and 1, relative to that before the steps."""
    names = "first.weight", "first.bias", "second.weight", "second.bias"
    starts = [dict(mlp(Case(3, 2, seed=seed)).named_parameters()) for seed in (0, 1)]
    before = sum((starts[0][name] - starts[1][name]).square().sum() for name in names)
    after = sum((got[0][name] - got[1][name]).square().sum() for name in names)
    return (after / before).sqrt().item()


seeds_of_their_own = Piece(
    code=seeds_of_their_own,
    serial=serial_steps,
    case=Case(3, 2),
    source="the course's source document: replicas that don't begin alike",
    symptom="It learns, more slowly than it should. Gradients are the same on all ranks.",
    asks="how far are the weights of ranks 0 and 1 apart after the two steps, relative to their "
    "distance at the start?",
    measure=distance_kept,
    choices="""
a: case.seed + dist.get_rank() → case.seed
    Nobody makes the replicas equal: the same updates are added to different weights.
b: average_gradients(model)⏎optimizer.step() →
    ⏎optimizer.step()⏎average_gradients(model)
    Averaging belongs behind the step.
c: mse_loss(model(x), y).backward() → (mse_loss(model(x), y) / case.micro_batches).backward()
    The loss isn't divided by the number of micro-batches.
""",
    why="Updates are the same everywhere, so the distance stays, to the last bit or nearly so; the "
    "gradient that all get is the mean of gradients at three different places. Seed dropout "
    "*after* the model is made, or broadcast.",
)


def mean_of_means(case):
    rank = dist.get_rank()
    x, y = uneven_rows(case, rank)  # rank r has r + 1 rows
    model = mlp(case)
    optimizer = sgd(model)
    errors = (model(x) - y).square().mean(1)
    loss = errors.sum() / len(x)
    loss.backward()
    average_gradients(model)
    optimizer.step()
    return model


mean_of_means = Piece(
    code=mean_of_means,
    serial=serial_uneven,
    case=Case(3, 2),
    source="transformers#34191, #34242; pytorch/torchtitan#2206",
    symptom="The loss is a little lower than on one GPU with the same batch. Short sequences are "
    "learned well.",
    asks="how many times too much does rank 0's only row count in the gradient?",
    measure=weight_of(0),
    choices="""
a: average_gradients(model) → average_gradients(model)
    ⏎for parameter in model.parameters():⏎    parameter.grad *= case.ranks
    Gradients have to be summed over ranks, since each has the mean of its own rows.
b: errors.sum() / len(x) → errors.sum() * case.ranks / total(len(x))
    A mean of means: each rank counts alike, and not each row.
c: .mean(1) → .sum(1)
    Errors are averaged over the outputs first: each row's have to be summed.
""",
    why="1/1 of a third instead of 1/6: twice too much, and rank 2's rows 2/3 as much as they "
    "should. Divide by the rows of all ranks, which takes an all-reduce of one number.",
)


def rows_of_all(case):
    x, y = uneven_rows(case, dist.get_rank())  # rank r has r + 1 rows
    model = mlp(case)
    optimizer = sgd(model)
    errors = (model(x) - y).square().mean(1)
    loss = errors.sum() / total(len(x))
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    return model


rows_of_all = Piece(
    code=rows_of_all,
    serial=serial_uneven,
    case=Case(3, 2),
    source="written for this course: right",
    symptom="The loss that rank 0 logs is far below the one of a run on one GPU.",
    asks="how many times the gradient of one process is rank 0's?",
    measure=factor(FIRST),
    choices="""
a: dist.all_reduce(parameter.grad) → dist.all_reduce(parameter.grad)
    ⏎parameter.grad /= case.ranks
    A sum over ranks where the mean is due.
b: / total(len(x)) → / len(x)
    Each rank has to divide by its own rows: the others aren't in its loss.
c: total(len(x)) → total(len(x)) * case.ranks
    Every rank counts all rows, so they are counted W times.
""",
    why="The rank's loss is a summand, so is what it logs; the sum of gradients is the mean over "
    "all rows.",
)


def tied_twice(case):
    model = tied_mlp(case)
    optimizer = sgd(model)
    x, y = joined(my_batches(case))
    loss = mse_loss(model(x), y) / case.ranks
    loss.backward()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            dist.all_reduce(parameter.grad)
    optimizer.step()
    return model


tied_twice = Piece(
    code=tied_twice,
    serial=serial_tied,
    case=Case(3, 2),
    source="pytorch/torchtitan#3174 (a tied gradient written back twice)",
    symptom="Runs with tied embeddings blow up at learning rates that others stand.",
    asks="how many times too large is the gradient of the tied weight?",
    measure=factor(FIRST),
    choices="""
a: / case.ranks →
    Dividing the loss makes gradients too small: all_reduce takes the mean already.
b: model.modules(): → [model]:
    recurse=False → recurse=True
    The loop meets the tied weight under both of its names, and sums twice.
c: dist.all_reduce(parameter.grad) → parameter.grad /= 2⏎dist.all_reduce(parameter.grad)
    Backward adds both uses' gradients, so what is in .grad is twice too large.
""",
    why="The second sum is one of W equal sums. `model.parameters()` names each weight once.",
)


def tied_averaged_twice(case):
    model = tied_mlp(case)
    optimizer = sgd(model)
    x, y = joined(my_batches(case))
    mse_loss(model(x), y).backward()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            dist.all_reduce(parameter.grad)
            parameter.grad /= case.ranks
    optimizer.step()
    return model


tied_averaged_twice = Piece(
    code=tied_averaged_twice,
    serial=serial_tied,
    case=Case(3, 2),
    source="written for this course: right",
    symptom="The wire carries more bytes than the model has.",
    asks="how many times the gradient of one process is that of the tied weight?",
    measure=factor(FIRST),
    choices="""
a: mse_loss(model(x), y).backward() → (mse_loss(model(x), y) / 2).backward()
    Backward counts the tied weight twice, once for each of its uses.
b: parameter.grad /= case.ranks → parameter.grad /= case.ranks * 2
    The tied weight's gradient is averaged twice, so that it is too large.
c: parameter.grad /= case.ranks → pass
    The loss is a mean already: dividing again makes gradients too small.
""",
    why="The mean of equal means is that mean: it costs bytes, and changes nothing.",
)


def sync_each(case):
    model = DistributedDataParallel(mlp(case))
    optimizer = sgd(model)
    for x, y in my_batches(case):
        loss = mse_loss(model(x), y) / case.micro_batches
        loss.backward()
    optimizer.step()
    return model.module


sync_each = Piece(
    code=sync_each,
    serial=serial_step,
    case=Case(2, 3),
    source="written for this course: right",
    symptom="A step sends three times the model's gradients. no_sync isn't used.",
    asks="how many times the gradient of one process is rank 0's?",
    measure=factor(FIRST),
    choices="""
a: / case.micro_batches → / case.micro_batches / case.ranks
    The first micro-batch's gradient is averaged again with each later one.
b: loss.backward() → loss.backward()⏎optimizer.step()⏎optimizer.zero_grad()
    Gradients of earlier micro-batches are overwritten when later ones are averaged.
c: / case.micro_batches →
    DDP's mean divides by the number of micro-batches.
""",
    why="DDP averages what has accumulated: the mean of what is equal already stays, and the new "
    "part is averaged. Only bytes are wasted.",
)
