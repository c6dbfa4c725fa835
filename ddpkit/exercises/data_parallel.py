"""Checkers of notebook 03: average_gradients, sum_or_mean, and HookedDDP, whose bug is to be found.

Gradients are chosen so that the mean reads like a tally, each digit a rank: 11 on two ranks, 1111 on four.
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from ddpkit.runtime.board import Record
from ddpkit.runtime.hang import describe_place
from ddpkit.runtime.launch import Run

from .old_checker import Exercise, Trial

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these


class Small(nn.Module):
    """One weight under two names, a bias, and a parameter that isn't trained; never called."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.full((2,), 7.0), requires_grad=False)
        self.tokens = nn.Embedding.from_pretrained(torch.full((2, 2), 7.0), freeze=False)
        self.body = nn.Linear(2, 2)
        self.head = nn.Linear(2, 2, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.constant_(self.body.weight, 7.0)
        nn.init.constant_(self.body.bias, 7.0)


# Of the trained ones, and what their gradients are multiples of.
FACTORS = {"tokens.weight": 1, "body.weight": 3, "body.bias": 5}  # none twice another: a sum is no other's mean
NUMELS = {"tokens.weight": 4, "body.weight": 4, "body.bias": 2}
GRADIENT_BYTES = {name: numel * torch.float32.itemsize for name, numel in NUMELS.items()}


def _backward(module: nn.Module, scale: int) -> None:
    """Leave `scale` times its factor in the gradient of each parameter that is trained."""
    parameters = dict(module.named_parameters())
    sum((scale * factor * parameters[name]).sum() for name, factor in FACTORS.items()).backward()


@dataclass
class Left:
    """What an answer left in a module, by parameter, and what a checker needs to say why.

    gradients: None for a parameter without one. parameters: their values. said: what the rank said on the wire.
    """

    gradients: dict[str, list | None]
    parameters: dict[str, list]
    said: list[Record] = field(default_factory=list, compare=False)

    def __repr__(self):
        present = {name: values for name, values in self.gradients.items() if values is not None}
        return ", ".join(f"{name}.grad {_brief(values)}" for name, values in present.items()) or "no gradients"


def _left(module: nn.Module) -> Left:
    named = dict(module.named_parameters())
    gradients = {name: None if p.grad is None else _numbers(p.grad) for name, p in named.items()}
    return Left(gradients, {name: _numbers(p) for name, p in named.items()})


def _numbers(tensor: torch.Tensor) -> list:
    return tensor.detach().flatten().tolist()


def _brief(values: list) -> str:
    """One number, if all are alike."""
    shown = [f"{value:.6g}" for value in values]
    return shown[0] if len(set(shown)) == 1 else f"[{', '.join(shown)}]"


def _expect(lefts: list[Left]) -> Callable[[Run], list[Left]]:
    """`expected` of a trial: these, each with what its rank said on the wire, for the cause."""

    def with_wire(run: Run) -> list[Left]:
        return [Left(left.gradients, left.parameters, said) for left, said in zip(lefts, run.wire, strict=True)]

    return with_wire


def _small_left(scale: int) -> Left:
    """Small, untouched but for gradients of `scale` times their factors."""
    gradients = {name: [scale * factor] * NUMELS[name] for name, factor in FACTORS.items()}
    return Left({"positions": None, **gradients}, {"positions": [7] * 2, **{n: [7] * m for n, m in NUMELS.items()}})


# What can go wrong with any average.


def _not_waited_for(trial: Trial, run: Run) -> str | None:
    """A collective that was begun with async_op=True, and that nobody waited for."""
    for rank, records in enumerate(run.wire):
        for record in records:
            if record.waited is None:
                place = describe_place((record.file, record.line, record.function))
                return (
                    f"rank {rank} began {record.call} and never waited for it ({place}).\n"
                    "With async_op=True it goes on in the background: until wait() has returned on its handle, the "
                    "gradient is neither the old one nor the sum."
                )
    return None


def _wrong(expected: Left, got: Left) -> list[str]:
    """The names of the parameters whose gradients aren't what they should be."""
    return [name for name in expected.gradients if got.gradients[name] != expected.gradients[name]]


def _sent_itself(expected: Left) -> str:
    """The name of a parameter that was handed to an all_reduce, itself and not its gradient; "" for none."""
    sent = [record.values for record in expected.said if record.op == "all_reduce"]
    trained = [name for name, gradient in expected.gradients.items() if gradient is not None]
    return next((name for name in trained if expected.parameters[name] in sent), "")


def _beside_the_average(expected: Left, got: Left) -> str | None:
    """The usual cause of what no way of averaging explains: a parameter touched, a gradient gone, a weight tied."""
    for name, before in expected.parameters.items():
        after = got.parameters[name]
        if after != before:
            return (
                f"{name} itself was {_brief(before)} and is {_brief(after)}: leave the parameters to the optimizer, "
                "and work on .grad."
            )
    wrong = _wrong(expected, got)
    if expected.gradients[wrong[0]] is None:
        return f"{wrong[0]} isn't trained and has no gradient: leave it so."
    if got.gradients[wrong[0]] is None:
        return f"{wrong[0]}.grad is gone: the optimizer looks for it there."
    if wrong == ["tokens.weight"]:
        return (
            "Only tokens.weight.grad is wrong. It is head.weight.grad, too, one parameter under two names: did it "
            "have its turn twice? module.parameters() gives it once."
        )
    return None


def _wrong_mean(trial: Trial, rank: int, expected: Left, got: Left, own: Callable[[int], Left]) -> str:
    """The usual cause of a gradient that isn't the mean over the ranks. own: what a rank has if nobody averages."""
    beside = _beside_the_average(expected, got)
    if beside:
        return beside
    name = _wrong(expected, got)[0]
    mean, value, world_size = expected.gradients[name], got.gradients[name], trial.world_size
    has_it = next((record.peer for record in expected.said if record.op == "reduce"), rank)
    if has_it != rank:
        return f"Only rank {has_it} has the sum: you called dist.reduce. All ranks need it: dist.all_reduce."
    if value == [world_size * each for each in mean]:
        others = " Every rank must divide, not only those below it." if rank else ""
        return f"{name}.grad is the sum over the ranks: divide by the number of ranks.{others}"
    if value == [each / world_size for each in mean]:
        return (
            f"{name}.grad was divided by {world_size**2}, on {world_size} ranks. Twice, before the all_reduce and "
            "after it? Or by a number of your own? dist.get_world_size() knows how many there are."
        )
    if world_size > 2 and value == [world_size / 2 * each for each in mean]:
        return f"{name}.grad was divided by 2, on {world_size} ranks: dist.get_world_size() knows how many there are."
    for other in range(world_size):
        if value == own(other).gradients[name]:
            return _not_mixed(rank, other, name, expected)
    for other, others_mean in expected.gradients.items():
        if value == (others_mean or [])[: len(value)]:
            return (
                f"{name}.grad holds the mean of {other}.grad. Are the parts of one message cut out in the order in "
                "which they were put in?"
            )
    return f"Is {name}.grad in place what all ranks' gradients add up to, divided by {world_size} once?"


@contextlib.contextmanager
def _explaining_none(module: nn.Module):
    """Say more about an error that a gradient of None may have caused."""
    try:
        yield
    except (TypeError, AttributeError) as error:
        if "None" not in str(error):
            raise
        frozen = ", ".join(name for name, parameter in module.named_parameters() if not parameter.requires_grad)
        why = f"{frozen} isn't trained, so its .grad is None: pass over parameters without requires_grad"
        raise type(error)(f"{error}\n({why})").with_traceback(error.__traceback__) from None


def _not_mixed(rank: int, other: int, name: str, expected: Left) -> str:
    """A gradient that is still that of one rank."""
    if "broadcast" in [record.op for record in expected.said]:
        return (
            f"{name}.grad is rank {other}'s, and dist.broadcast made it so: what the others learned from their data is "
            "lost. A mean needs all of them: dist.all_reduce."
        )
    itself = _sent_itself(expected)
    if itself:
        return (
            f"{name}.grad is still rank {rank}'s own, and what all_reduce was given is {itself} itself: you averaged "
            "the parameters. Average their gradients: parameter.grad."
        )
    if rank != other:
        return f"{name}.grad is rank {other}'s own gradient. A mean needs every rank's: dist.all_reduce."
    trained = sum(gradient is not None for gradient in expected.gradients.values())
    skipped = ""
    if 0 < len(expected.said) < trained:
        skipped = " Was it skipped? Every parameter that is trained has its turn, biases too."
    return f"{name}.grad is still rank {rank}'s own: the mean must end up in .grad itself, in place.{skipped}"


# average_gradients(module)


def average_gradients(module):
    for parameter in module.parameters():  # a weight under two names comes once
        if parameter.requires_grad:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def _before(rank: int, world_size: int) -> int:
    """What rank r's gradients are multiples of: W * 10**r, so that means are multiples of 11 on two ranks."""
    return world_size * 10**rank


def _run_average(answer):
    module = Small()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    _backward(module, _before(rank, world_size))
    with _explaining_none(module):
        answer(module)
    return _left(module)


def _average_trials():
    for world_size in (2, 4):  # halves and quarters are exact
        mean = sum(10**rank for rank in range(world_size))
        yield Trial(world_size, _run_average, (), _expect([_small_left(mean)] * world_size))


def _average_cause(trial: Trial, rank: int, expected: Left, got: Left):
    return _wrong_mean(trial, rank, expected, got, lambda other: _small_left(_before(other, trial.world_size)))


def _average_wire(trial: Trial, run: Run) -> str | None:
    """Each gradient goes out once, in as many messages as there are parameters, or fewer."""
    needed = sum(GRADIENT_BYTES.values())
    for rank, records in enumerate(run.wire):
        nbytes = sum(record.bytes for record in records)
        if nbytes > needed:
            # body.weight is as large as the tied weight: that makes two
            again = [r.bytes for r in records if r.op == "all_reduce"].count(GRADIENT_BYTES["tokens.weight"]) > 2
            why = "tokens.weight is head.weight, too: one parameter, sent twice. module.parameters() gives it once."
            other = "Replay it: what does an all_reduce of each gradient not do already?"
            return (
                f"the values are right, but rank {rank} sent {nbytes} bytes where its gradients have {needed}.\n"
                f"{why if again else other}"
            )
        if len(records) > len(NUMELS):
            return (
                f"the values and the bytes are right, but rank {rank} made {len(records)} calls for {len(NUMELS)} "
                "gradients: an all_reduce takes a whole tensor."
            )
    return None


def _average_praise(trial: Trial, run: Run) -> str:
    right = "right on 2 and 4 ranks"
    if len(run.wire[0]) < len(NUMELS):
        return f"{right}, and in fewer messages than there are parameters: notebook 04 begins with that."
    if "avg" in run.wire[0][0].detail:
        return f"{right}, each gradient sent once, and ReduceOp.AVG divides on the way."
    return f"{right}, each gradient sent once, the tied weight too."


average_gradients = Exercise(
    average_gradients,
    _average_trials,
    [
        "Which parameters have a gradient after backward? Go through module.parameters(); requires_grad tells.",
        "dist.all_reduce(parameter.grad) leaves the sum over the ranks in it, on all of them. What is missing?",
        "parameter.grad /= dist.get_world_size(), in place, after the all_reduce.",
    ],
    _average_praise,
    _average_cause,
    _average_wire,
    races=_not_waited_for,
    note="# The plain loop. ddpkit.ddp.NaiveDDP does the same, and complains where a gradient is missing.",
)


# sum_or_mean(module, reduction, rows)

ROWS = (3, 1), (4, 0), (4, 1, 3)  # of each rank, by trial; 4 or 8 together, by which divisions are exact


def sum_or_mean(module, reduction, rows):
    all_rows = torch.tensor(rows)
    dist.all_reduce(all_rows)
    weight = 1 if reduction == "sum" else rows / all_rows.item()
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad *= weight
            dist.all_reduce(parameter.grad)


def _local(rank: int, rows: tuple[int, ...], reduction: str) -> int:
    """What rank r's gradients are multiples of before: a row brings 10**r to a sum, all rows times that to a mean.

    So both end as the same number, whose digits are the rows of each rank: 13, 314. Without rows, they are zeros.
    """
    if not rows[rank]:
        return 0
    return 10**rank * (rows[rank] if reduction == "sum" else sum(rows))


def _run_sum_or_mean(answer, reduction, rows):
    module, rank = Small(), dist.get_rank()
    _backward(module, _local(rank, rows, reduction))
    with _explaining_none(module):
        answer(module, reduction, rows[rank])
    return _left(module)


def _sum_or_mean_trials():
    for rows in ROWS:
        world_size = len(rows)
        whole = _small_left(sum(count * 10**rank for rank, count in enumerate(rows)))
        who = f"{', '.join(map(str, rows[:-1]))} and {rows[-1]} rows"
        for reduction in ("sum", "mean"):
            expected = _expect([whole] * world_size)
            yield Trial(world_size, _run_sum_or_mean, (reduction, rows), expected, what=f"{reduction} over {who}")


def _sum_or_mean_cause(trial: Trial, rank: int, expected: Left, got: Left):
    beside = _beside_the_average(expected, got)
    if beside:
        return beside
    name = _wrong(expected, got)[0]
    reduction, rows = trial.args
    explain = _wrong_sum if reduction == "sum" else _wrong_weights
    for scale, cause in explain(rows, rank).items():
        if all(math.isclose(value, scale * FACTORS[name], rel_tol=1e-5) for value in got.gradients[name]):
            return f"{name}.grad: {cause}"
    return f"Write down {name}.grad of one process with all {sum(rows)} rows. What does a row weigh?"


def _wrong_sum(rows: tuple[int, ...], rank: int) -> dict[float, str]:
    """What wrong gradients of a loss that is a sum are multiples of, and why."""
    local = [_local(each, rows, "sum") for each in range(len(rows))]
    weighed = sum(count * each for count, each in zip(rows, local, strict=True))
    return {
        local[rank]: "that is this rank's own gradient. Those of all ranks add up: dist.all_reduce.",
        sum(local) / len(rows): "that is divided by the number of ranks. A sum over all rows is divided by nothing.",
        sum(local) / sum(rows): "that is divided by the number of rows. That makes a mean of it; the loss is a sum.",
        weighed / sum(rows): "that is weighed with rows. A sum needs no weights; a mean does. Are the two swapped?",
    }


def _wrong_weights(rows: tuple[int, ...], rank: int) -> dict[float, str]:
    """What wrong gradients of a loss that is a mean are multiples of, and why."""
    local = [_local(each, rows, "mean") for each in range(len(rows))]
    weighed = sum(count * each for count, each in zip(rows, local, strict=True))
    counts = f"{min(rows)} to {max(rows)}"
    own = rows[rank] or math.nan  # who divides by no rows gets no number
    return {
        local[rank]: "that is this rank's own gradient. Those of all ranks belong in it: dist.all_reduce.",
        sum(local): "that is the ranks' means, added up. Weigh each: its rows over the rows of all ranks, added up, "
        "too, with an all_reduce.",
        sum(local) / len(rows): f"that is a mean of means: every rank counts alike, though they have {counts} rows. "
        "It is right only if all have equally many.",
        weighed: "that is weighed with rows, and never divided. Divide by the rows of all ranks.",
        weighed / own: f"that is divided by this rank's {rows[rank]} rows. All ranks have {sum(rows)} together: "
        "add them up with an all_reduce.",
        weighed / own / len(rows): f"that is divided by the number of ranks times this rank's {rows[rank]} rows. All "
        f"ranks have {sum(rows)} together: add them up with an all_reduce.",
        weighed / len(rows): "that is weighed with rows, then divided by the number of ranks. Divide by all rows.",
        sum(local) / sum(rows): "that is divided by all rows, but no rank's mean was multiplied by its own rows.",
    }


sum_or_mean = Exercise(
    sum_or_mean,
    _sum_or_mean_trials,
    [
        "If the loss is a sum, so is its gradient: rows on different ranks just add up. Is anything to be divided?",
        "If it is a mean, undo it: a rank's mean times its rows is its sum. Add up the sums; divide by all rows.",
        "How many rows all ranks have, no rank knows: all_reduce torch.tensor(rows) first. One that has none "
        "takes part, too.",
    ],
    "right on 2 and 3 ranks with different numbers of rows, none among them, for the sum and for the mean.",
    _sum_or_mean_cause,
    lambda trial, run: None,
    races=_not_waited_for,
    note="# Ours. Yours may look different: the check looks at what it does.",
)


# HookedDDP: what is wrong with it?


class HookedDDP(torch.nn.Module):  # as the notebook imports it: what is shown can be pasted there
    def __init__(self, module):
        super().__init__()
        self.module = module
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.average)

    def average(self, parameter):  # not the gradient: the hook is given the parameter that has it
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()

    def synchronize(self):
        pass

    def forward(self, *inputs):
        return self.module(*inputs)


class Line(nn.Module):
    """weight * x + bias, in float64: what the trials compute is exact, in whatever order ranks add up."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([7.0], dtype=torch.float64))
        self.bias = nn.Parameter(torch.tensor([5.0], dtype=torch.float64))

    def forward(self, x):
        return self.weight * x + self.bias


LEARNING_RATE = 1 / 16


def _loss(line: nn.Module, rank: int, world_size: int) -> torch.Tensor:
    """Half the squared error of rank r's only point, x = r+1, which a new Line misses by W * 10**r."""
    x = rank + 1
    y = 7 * x + 5 - world_size * 10**rank
    return (line(x) - y).square().sum() / 2


def _train(line: nn.Module, loss: Callable[[], torch.Tensor], steps: int) -> Left:
    """Train with SGD. Returns what the last backward left, before the optimizer's last step."""
    optimizer = torch.optim.SGD(line.parameters(), LEARNING_RATE)
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        left = _left(line)
        optimizer.step()
    return left


def _run_hooked(answer, steps):
    line, rank, world_size = Line(), dist.get_rank(), dist.get_world_size()
    model = answer(line)
    return _train(line, lambda: _loss(model, rank, world_size), steps)


def _hooked_trials():
    for world_size, steps in ((2, 1), (2, 3), (4, 1)):
        expected = _expect([_serial(world_size, steps)] * world_size)
        yield Trial(world_size, _run_hooked, (steps,), expected, what=f"{steps} step{'s' * (steps > 1)}")


def _hooked_cause(trial: Trial, rank: int, expected: Left, got: Left):
    if not expected.said:
        return "Nothing was sent. Did a hook run? It must be on the module's own parameters, not on copies of them."
    itself = _sent_itself(expected)
    if itself:
        return (
            f"What your hook gave to all_reduce is {_brief(expected.parameters[itself])}, on every rank alike. "
            "Gradients of different data never are: what is it?\n"
            "The ranks stay one step apart, each along its own gradient."
        )
    if trial.args[0] > 1:
        return "The first step was right. Does the hook average in every step, and leave the parameters alone?"
    return _wrong_mean(trial, rank, expected, got, lambda other: _own_first(other, trial.world_size))


def _serial(world_size: int, steps: int) -> Left:
    """What one process that has all ranks' points is left with."""
    line = Line()
    return _train(line, lambda: sum(_loss(line, rank, world_size) for rank in range(world_size)) / world_size, steps)


def _own_first(rank: int, world_size: int) -> Left:
    """What rank r's first backward leaves if nobody averages."""
    line = Line()
    return _train(line, lambda: _loss(line, rank, world_size), 1)


def _hooked_wire(trial: Trial, run: Run) -> str | None:
    """Each gradient goes out once a step; what else than all_reduce is said, at the start, is no concern here."""
    needed = trial.args[0] * sum(parameter.nbytes for parameter in Line().parameters())
    for rank, records in enumerate(run.wire):
        nbytes = sum(record.bytes for record in records if record.op == "all_reduce")
        if nbytes != needed:
            return (
                f"the values are right, but rank {rank} handed {nbytes} bytes to all_reduce where its gradients have "
                f"{needed}.\nIf gradients are averaged, and all began alike, parameters stay alike by themselves: "
                "send nothing else."
            )
    return None


HookedDDP = Exercise(
    HookedDDP,
    _hooked_trials,
    [
        "Print what the hook is given: its shape is that of the gradient, but are its numbers?",
        "register_post_accumulate_grad_hook calls the hook with the parameter, after its .grad is complete.",
        "In `average`: dist.all_reduce(parameter.grad), then parameter.grad /= dist.get_world_size().",
    ],
    "gradients are the mean over the ranks. In the third step each rank still has the gradients and the parameters "
    "that one process would have, to the bit.",
    _hooked_cause,
    _hooked_wire,
    races=_not_waited_for,
    note="# Two lines of the hook, mended. ddpkit.ddp.OverlapDDP goes on from here.",
)
