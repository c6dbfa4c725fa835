"""Checkers of notebook 03: average_gradients, sum_or_mean, and HookedDDP, whose bug is to be found.

Gradients are chosen so that the mean reads like a tally, each digit a rank: 11 on two ranks, 1111
on four.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from ddpkit import data_parallel
from ddpkit.runtime.launch import Run
from ddpkit.runtime.wire import recorder

from .checker import Exercise, Mistake, Trial, mistakes

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these


class Small(nn.Module):
    """A weight under two names, a bias, and a parameter that isn't trained; never called."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.full((2,), 7.0), requires_grad=False)
        self.tokens = nn.Embedding.from_pretrained(torch.full((2, 2), 7.0), freeze=False)
        self.body = nn.Linear(2, 2)
        self.head = nn.Linear(2, 2, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.constant_(self.body.weight, 7.0)
        nn.init.constant_(self.body.bias, 7.0)


# Of the trained ones, and what their gradients are multiples of: a sum is no other's mean
FACTORS = {"tokens.weight": 1, "body.weight": 3, "body.bias": 5}
NUMELS = {"tokens.weight": 4, "body.weight": 4, "body.bias": 2}


def _backward(module: nn.Module, scale: int, names: tuple[str, ...] = tuple(FACTORS)) -> None:
    """Leave `scale` times its factor in the gradient of each of these parameters."""
    parameters = dict(module.named_parameters())
    sum((scale * FACTORS[name] * parameters[name]).sum() for name in names).backward()


@dataclass
class Gradients:
    """What an answer left in a module, by parameter; None for one that has no gradient.

    parameters: their values. messages: all_reduces that this rank began; itself: whether one of
    them had a parameter in it.
    """

    gradients: dict[str, list | None]
    parameters: dict[str, list]
    messages: int = field(default=0, compare=False)
    itself: bool = field(default=False, compare=False)

    @classmethod
    def of(cls, module: nn.Module) -> "Gradients":
        gradients, parameters = {}, {}
        for name, parameter in module.named_parameters():
            parameters[name] = numbers(parameter)
            gradients[name] = None if parameter.grad is None else numbers(parameter.grad)
        records = recorder().records if dist.is_initialized() else []
        sent = [record.values for record in records if record.op == "all_reduce"]
        itself = any(values in sent for values in parameters.values())
        return cls(gradients, parameters, len(sent), itself)

    def __repr__(self):
        present = {name: values for name, values in self.gradients.items() if values is not None}
        shown = [f"{name}.grad {brief(values)}" for name, values in present.items()]
        return ", ".join(shown) or "no gradients"

    def symptom(self):
        return f"{self.gradients} {self.parameters} {self.messages > 0} {self.itself}"


def numbers(tensor: torch.Tensor) -> list:
    return tensor.detach().flatten().tolist()


def brief(values: list) -> str:
    """One number, if all are alike."""
    shown = [f"{value:.6g}" for value in values]
    return shown[0] if len(set(shown)) == 1 else f"[{', '.join(shown)}]"


def _small(scale: int, body: int | None = None) -> Gradients:
    """Small, untouched but for gradients of `scale` (in body, `body`) times their factors."""
    scales = {name: scale if body is None or name == "tokens.weight" else body for name in FACTORS}
    gradients = {name: [scales[name] * FACTORS[name]] * NUMELS[name] for name in FACTORS}
    parameters = {name: [7] * numel for name, numel in {"positions": 2, **NUMELS}.items()}
    return Gradients({"positions": None, **gradients}, parameters)


# What can go wrong with any average


def wrong_ones(expected: Gradients, got: Gradients) -> list[str]:
    """The names of the parameters whose gradients aren't what they should be."""
    return [name for name, values in expected.gradients.items() if got.gradients[name] != values]


def beside_the_average(expected: Gradients, got: Gradients) -> str | None:
    """What no way of averaging explains: a parameter touched, a gradient gone or too many."""
    for name, before in expected.parameters.items():
        after = got.parameters[name]
        if after != before:
            return (
                f"{name} itself was {brief(before)} and is {brief(after)}: leave the parameters to "
                "the optimizer, and work on .grad."
            )
    wrong = wrong_ones(expected, got)
    if expected.gradients[wrong[0]] is None:
        return f"{wrong[0]} isn't trained and has no gradient: leave it so (requires_grad tells)."
    if got.gradients[wrong[0]] is None:
        return f"{wrong[0]}.grad is gone: the optimizer looks for it there."
    return None


def wrong_mean(
    trial: Trial,
    rank: int,
    expected: Gradients,
    got: Gradients,
    own: Callable[[int], Gradients],
) -> str:
    """What a gradient says that isn't the mean. own: what a rank has if nobody averages."""
    beside = beside_the_average(expected, got)
    if beside:
        return beside
    name = wrong_ones(expected, got)[0]
    mean, value, world_size = expected.gradients[name], got.gradients[name], trial.world_size
    if value == [world_size * each for each in mean]:
        return f"{name}.grad is the sum over the ranks: divide by the number of ranks."
    if value == [each / world_size for each in mean]:
        return f"{name}.grad was divided by {world_size**2}, on {world_size} ranks."
    for other in range(world_size):
        if value == own(other).gradients[name]:
            whose = "still rank" if other == rank else "rank"
            return (
                f"{name}.grad is {whose} {other}'s own: the mean of all must end up in .grad "
                "itself, in place. Every parameter that is trained has its turn, biases too."
            )
    for other, others_mean in expected.gradients.items():
        if value == (others_mean or [])[: len(value)]:
            return (
                f"{name}.grad holds the mean of {other}.grad. Are the parts of one message cut out "
                "in the order in which they were put in?"
            )
    return f"Is {name}.grad what all ranks' gradients add up to, divided by {world_size} once?"


# average_gradients(module)

UNUSED = "rank 1 has no gradient in one layer"


def _before(rank: int, world_size: int) -> int:
    """What rank r's gradients are multiples of: means are multiples of 11 on two ranks."""
    return world_size * 10**rank


def _run_average(answer, unused):
    module = Small()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    used = ("tokens.weight",) if unused and rank == 1 else tuple(FACTORS)
    _backward(module, _before(rank, world_size), used)
    answer(module)
    return Gradients.of(module)


def _average_trials():
    for world_size in (2, 4, 1):
        mean = sum(10**rank for rank in range(world_size))
        yield Trial(world_size, _run_average, (False,), [_small(mean)] * world_size)
        if world_size == 4:
            yield Trial(2, _run_average, (True,), [_small(11, body=1)] * 2, what=UNUSED)


def _explain_average(trial: Trial, rank: int, expected: Gradients, got: Gradients):
    own = [_small(_before(other, trial.world_size)) for other in range(trial.world_size)]
    return wrong_mean(trial, rank, expected, got, own.__getitem__)


def _average_wire(trial: Trial, run: Run) -> str | None:
    """Each gradient goes out once, in as many messages as there are parameters, or fewer.

    Who has a gradient may be agreed on before: messages of zeros and ones don't count.
    """
    nbytes, count = 4 * sum(NUMELS.values()), len(NUMELS)
    for rank, records in enumerate(run.wire):
        sent = [record for record in records if not set(record.values or [2]) <= {0, 1}]
        if sum(record.bytes for record in sent) > nbytes:
            return (
                f"the values are right, but rank {rank} sent {sum(r.bytes for r in sent)} bytes "
                f"where its gradients have {nbytes}.\nDoes a weight with two names go out twice? "
                "module.parameters() gives it once. Replay it: what does an all_reduce of each "
                "gradient not do already?"
            )
        if len(sent) > count:
            return (
                f"the values and the bytes are right, but rank {rank} made {len(sent)} calls for "
                f"{count} gradients: an all_reduce takes a whole tensor."
            )
    return None


def _average_praise(trial: Trial, run: Run) -> str:
    right = "right on 1, 2 and 4 ranks, also where one has no gradient"
    if len(run.wire[0]) < len(NUMELS):
        return f"{right}, in fewer messages than parameters: notebook 04 begins with that."
    if "avg" in run.wire[0][0].detail:
        return f"{right}, each gradient sent once, and ReduceOp.AVG divides on the way."
    return f"{right}, each gradient sent once, the tied weight too."


def mixes_up_the_parts(module):
    tokens, weight, bias = [p for p in module.parameters() if p.requires_grad]
    flat = torch.cat([p.grad.flatten() for p in (tokens, weight, bias)]) / dist.get_world_size()
    dist.all_reduce(flat)
    for parameter, part in zip((weight, tokens, bias), flat.split([4, 4, 2]), strict=True):
        parameter.grad.copy_(part.view_as(parameter))


def sends_tied_twice(module):
    for layer in module.modules():
        for parameter in layer.parameters(recurse=False):
            if parameter.requires_grad:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()


def adds_tied_twice(module):
    for layer in module.modules():
        for parameter in layer.parameters(recurse=False):
            if parameter.requires_grad:
                dist.all_reduce(parameter.grad)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad /= dist.get_world_size()


TIED_TWICE = "tokens.weight is head.weight, too: did it have its turn twice?"

average_gradients = Exercise(
    reference=data_parallel.average_gradients,
    trials=_average_trials,
    hints={
        "start": "Go through module.parameters(); requires_grad tells which are trained.",
        "values": "dist.all_reduce(parameter.grad) leaves the sum over the ranks in it, on all of "
        "them. parameter.grad /= dist.get_world_size() comes after it, in place.",
        "wire": "One dist.all_reduce for each parameter of module.parameters().",
        "hang": "Every rank must make the same calls. Where parameter.grad is None, put zeros "
        "there: torch.zeros_like(parameter).",
    },
    praise=_average_praise,
    explain=_explain_average,
    wire=_average_wire,
    note="NaiveDDP calls it, and complains where a gradient is missing on the way.",
    mistakes=[
        *mistakes("""
sums: /= dist.get_world_size(group) → /= 1
    That is the sum over the ranks: divide by the number of ranks.
divides_twice: dist.all_reduce( → parameter.grad /= dist.get_world_size()
    ⏎dist.all_reduce(
    It was divided by 4, on 2 ranks. Twice, before the all_reduce and after it? Or by a number of
    your own? dist.get_world_size() knows how many there are.
divides_by_4: dist.get_world_size(group) → 4
    Or by a number of your own?
divides_by_2: dist.get_world_size(group) → 2
    It was divided by 2, on 4 ranks: dist.get_world_size() knows how many there are.
divides_on_rank_0: dist.get_world_size(group) → 1 if dist.get_rank() else dist.get_world_size()
    Rank 0 has the mean, the others the sum: every rank must divide.
averages_the_parameters: dist.all_reduce(parameter.grad → dist.all_reduce(parameter.data
    parameter.grad /= → parameter.data /=
    What all_reduce was given is the parameter itself. Average the gradients: parameter.grad.
adds_up_the_parameters: dist.all_reduce(parameter.grad → dist.all_reduce(parameter.data
    parameter.grad /= dist.get_world_size(group) → pass
    tokens.weight itself was 7 and is 14: leave the parameters to the optimizer, and work on .grad.
broadcasts: dist.all_reduce(parameter.grad, → dist.broadcast(parameter.grad, 0,
    parameter.grad /= dist.get_world_size(group) → pass
    That is rank 0's gradient: what the others learned from their data is lost. A mean needs all of
    them: dist.all_reduce.
skips_biases: if parameter.requires_grad: → if parameter.requires_grad and parameter.dim() > 1:
    body.bias.grad is still rank 0's own: every parameter that is trained has its turn, biases too.
does_nothing: for parameter in module.parameters(): → for parameter in ():
    Nothing has changed: each rank still has its own gradients. dist.all_reduce(parameter.grad) adds
    them up, in place.
in_a_new_tensor: dist.all_reduce(parameter.grad → dist.all_reduce(mean := parameter.grad.clone()
    parameter.grad /= → mean /=
    Each rank still has its own gradients: the mean must end up in .grad itself, in place.
of_rank_1_only: dist.all_reduce(parameter.grad → parameter.grad *= dist.get_rank()
    ⏎dist.all_reduce(parameter.grad
    parameter.grad /= dist.get_world_size(group) → pass
    That is rank 1's own gradient: the mean needs all ranks'.
takes_them_away: parameter.grad /= dist.get_world_size(group) → parameter.grad = None
    tokens.weight.grad is gone: the optimizer looks for it there.
uses_the_result: dist.all_reduce( → parameter.grad = dist.all_reduce(
    all_reduce works in place and returns None: call it, then divide parameter.grad.
stumbles_over_the_frozen: if parameter.requires_grad: → if True:
    parameter.grad = torch.zeros_like(parameter) → pass
    positions isn't trained, so its .grad is None: pass over parameters without requires_grad.
thaws_the_frozen: if parameter.requires_grad: → if True:
    positions isn't trained and has no gradient: leave it so (requires_grad tells).
only_where_there_is_one: if parameter.requires_grad: → if parameter.grad is not None:
    Rank 1 has no gradient in one layer, passes over it, and is gone: rank 0 waits for ever. All
    ranks must send the same. Go by requires_grad, and where .grad is None, send zeros.
sends_none: parameter.grad = torch.zeros_like(parameter) → pass
    Rank 1 has no gradient in one layer, and None can't be sent: zeros can, and leave the sum as it
    is.
never_waits: dist.all_reduce( → dist.all_reduce(async_op=True, tensor=
    never waited for it
number_by_number: dist.all_reduce(parameter.grad, group=group) → for one in parameter.grad.view(-1):
    ⏎    dist.all_reduce(one)
    made 10 calls for 3 gradients
reduces: dist.all_reduce(parameter.grad → dist.reduce(parameter.grad, 0
    Only rank 0 has the sum: you called dist.reduce. All ranks need it: dist.all_reduce.
reduces_and_broadcasts: dist.all_reduce( → dist.reduce(parameter.grad, 0)
    ⏎dist.broadcast(src=0, tensor=
    what does an all_reduce of each gradient not do
"""),
        Mistake.written(
            mixes_up_the_parts,
            "Cut parts out of a message in the order in which "
            "they were put in: tokens.weight.grad holds the mean of body.weight.grad.",
        ),
        Mistake.written(sends_tied_twice, "Does a weight with two names go out twice?"),
        Mistake.written(adds_tied_twice, TIED_TWICE),
    ],
)


# sum_or_mean(module, reduction, rows)

ROWS = (3, 1), (4, 0), (4, 1, 3)  # of each rank; 4 or 8 together, by which divisions are exact


def sum_or_mean(module, reduction, rows):
    all_rows = torch.tensor(rows)
    dist.all_reduce(all_rows)
    weight = 1 if reduction == "sum" else rows / all_rows.item()
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad *= weight
            dist.all_reduce(parameter.grad)


def _run_sum_or_mean(answer, reduction, rows):
    """A row brings 10**r to a sum, all rows times that to a mean, and nothing where there is none.

    So both end as the same number, whose digits are the rows of each rank: 13, 314.
    """
    module, rank = Small(), dist.get_rank()
    times = rows[rank] if reduction == "sum" else sum(rows) * (rows[rank] > 0)
    _backward(module, 10**rank * times)
    answer(module, reduction, rows[rank])
    return Gradients.of(module)


def _sum_or_mean_trials():
    for rows in ROWS:
        world_size = len(rows)
        whole = _small(sum(count * 10**rank for rank, count in enumerate(rows)))
        who = f"{', '.join(map(str, rows[:-1]))} and {rows[-1]} rows"
        for reduction in ("sum", "mean"):
            args, what = (reduction, rows), f"{reduction} over {who}"
            yield Trial(world_size, _run_sum_or_mean, args, [whole] * world_size, what=what)


def _explain_sum_or_mean(trial: Trial, rank: int, expected: Gradients, got: Gradients):
    beside = beside_the_average(expected, got)
    name, rows = wrong_ones(expected, got)[0], sum(trial.args[1])
    question = f"Write down {name}.grad of one process with all {rows} rows. What does a row weigh?"
    return beside or question


sum_or_mean = Exercise(
    reference=sum_or_mean,
    trials=_sum_or_mean_trials,
    hints={
        "start": "If the loss is a sum, so is its gradient: rows on different ranks just add up.",
        "values": "If it is a mean, undo it: a rank's mean times its rows is its sum. Add up the "
        "sums; divide by all rows.",
        "hang": "How many rows all ranks have, no rank knows: all_reduce torch.tensor(rows) first. "
        "One that has none takes part, too.",
    },
    praise="right on 2 and 3 ranks with different numbers of rows, none among them, for the sum "
    "and for the mean.",
    explain=_explain_sum_or_mean,
    note="Ours. Yours may look different: the check looks at what it does.",
    mistakes=mistakes("""
leaves_means_alone: dist.all_reduce(parameter.grad) → if reduction == "sum":
    ⏎    dist.all_reduce(parameter.grad)
    rows / all_rows.item() → 1
    That is this rank's own gradient. Those of all ranks belong in it: dist.all_reduce.
never_divides: rows / all_rows.item() → 1
    Those are the ranks' means, added up. Weight each: its rows over the rows of all ranks, which
    are added up, too, with an all_reduce.
rows_of_this_rank_only: dist.all_reduce(all_rows) → pass
    the rows of all ranks, which are added up, too, with an all_reduce.
of_means: rows / all_rows.item() → 1 / dist.get_world_size()
    It is a mean of means: every rank counts alike, though they have 1 to 3 rows. It is right only
    if all have equally many.
forgets_to_divide: rows / all_rows.item() → rows
    It is weighted with rows, and never divided. Divide by the rows of all ranks.
divides_by_own_rows: rows / all_rows.item() → rows
    dist.all_reduce(parameter.grad) → dist.all_reduce(parameter.grad)
    ⏎parameter.grad /= rows if reduction == "mean" else 1
    It is divided by this rank's own rows. All ranks have 4 together: add them up with an
    all_reduce.
divides_by_own_rows_and_ranks: rows / all_rows.item() → rows
    dist.all_reduce(parameter.grad) → dist.all_reduce(parameter.grad)
    ⏎parameter.grad /= rows * 2 if reduction == "mean" else 1
    It is divided by the number of ranks times this rank's own rows. All ranks have 4 together.
divides_weighted_by_ranks: rows / all_rows.item() → rows / dist.get_world_size()
    It is weighted with rows, then divided by the number of ranks. Divide by all rows.
forgets_to_weight: rows / all_rows.item() → 1 / all_rows.item()
    It is divided by all rows, but no rank's mean was multiplied by its own rows.
leaves_sums_alone: dist.all_reduce(parameter.grad) → if reduction == "mean":
    ⏎    dist.all_reduce(parameter.grad)
    That is this rank's own gradient. Those of all ranks add up: dist.all_reduce.
always_divides: 1 if reduction == "sum" else rows / all_rows.item() → 1 / dist.get_world_size()
    It is divided by the number of ranks. A sum over all rows is divided by nothing.
divides_the_sum_by_rows: weight = 1 if → weight = 1 / all_rows.item() if
    It is divided by the number of rows. That makes a mean of it; the loss is a sum.
swapped: reduction == "sum" → reduction == "mean"
    It is weighted with rows. A sum needs no weights; a mean does. Are the two swapped?
leaves_when_it_has_none: all_rows = torch.tensor(rows) → if not rows:
    ⏎    return
    ⏎all_rows = torch.tensor(rows)
    A rank without rows has gradients of zeros, and takes part: the others wait for it.
adds_tied_twice: in module.parameters() → in (*module.parameters(), module.head.weight)
    tokens.weight is head.weight, too: did it have its turn twice?
"""),
)


# HookedDDP: what is wrong with it?


class HookedDDP(torch.nn.Module):
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
    """weight * x + bias, in float64: exact, in whatever order ranks add up."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([7.0], dtype=torch.float64))
        self.bias = nn.Parameter(torch.tensor([5.0], dtype=torch.float64))

    def forward(self, x):
        return self.weight * x + self.bias


def _loss(line: nn.Module, rank: int, world_size: int) -> torch.Tensor:
    """Half the squared error of rank r's only point, x = r+1, which a new Line misses."""
    x = rank + 1
    y = 7 * x + 5 - world_size * 10**rank
    return (line(x) - y).square().sum() / 2


def _train(line: nn.Module, loss: Callable[[], torch.Tensor], steps: int) -> Gradients:
    """What the last of some backwards left, before the last step of SGD, which hides no factor."""
    optimizer = torch.optim.SGD(line.parameters(), lr=1 / 16)
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        gradients = Gradients.of(line)
        optimizer.step()
    return gradients


def _run_hooked(answer, steps):
    line, rank, world_size = Line(), dist.get_rank(), dist.get_world_size()
    model = answer(line)
    return _train(line, lambda: _loss(model, rank, world_size), steps)


def _serial(ranks: range, world_size: int, steps: int) -> Gradients:
    """What one process that has these ranks' points is left with."""
    line = Line()

    def mean_loss():
        return sum(_loss(line, rank, world_size) for rank in ranks) / len(ranks)

    return _train(line, mean_loss, steps)


def _hooked_trials():
    for world_size, steps in ((2, 1), (2, 3), (4, 1)):
        expected = [_serial(range(world_size), world_size, steps)] * world_size
        what = f"{steps} step{'s' if steps > 1 else ''}"
        yield Trial(world_size, _run_hooked, (steps,), expected, what=what)


def _explain_hooked(trial: Trial, rank: int, expected: Gradients, got: Gradients):
    if not got.messages:
        return "Nothing was sent. Did a hook run? It must be on the module's own parameters."
    if trial.args[0] > 1:
        return (
            "The first step was right. Does the hook average in every step, and leave the "
            "parameters alone?"
        )

    def own(other: int) -> Gradients:
        return _serial(range(other, other + 1), trial.world_size, 1)

    return wrong_mean(trial, rank, expected, got, own)


def _hooked_wire(trial: Trial, run: Run) -> str | None:
    """Each gradient goes out once a step; what is sent at the start is no concern here."""
    needed = trial.args[0] * sum(parameter.nbytes for parameter in Line().parameters())
    for rank, records in enumerate(run.wire):
        nbytes = sum(record.bytes for record in records if record.op == "all_reduce")
        if nbytes != needed:
            return (
                f"the values are right, but rank {rank} handed {nbytes} bytes to all_reduce where "
                f"its gradients have {needed}.\nIf gradients are averaged, and all began alike, "
                "parameters stay alike by themselves: send nothing else."
            )
    return None


HookedDDP = Exercise(
    reference=HookedDDP,
    trials=_hooked_trials,
    hints={
        "values": "Print what the hook is given: its shape is that of the gradient, but are its "
        "numbers?",
        "start": "register_post_accumulate_grad_hook calls the hook with the parameter, after its "
        ".grad is complete.",
        "wire": "In `average`: dist.all_reduce(parameter.grad), then parameter.grad /= "
        "dist.get_world_size().",
    },
    praise="gradients are the mean over the ranks. In the third step each rank still has the "
    "gradients and the parameters that one process would have, to the bit.",
    explain=_explain_hooked,
    wire=_hooked_wire,
    note="Two lines of the hook, mended. ddpkit.ddp.OverlapDDP goes on from here.",
    mistakes=mistakes("""
as_found: dist.all_reduce(parameter.grad → dist.all_reduce(parameter.data
    parameter.grad /= → parameter.data /=
    What your hook gave to all_reduce is 7, on every rank alike. Gradients of different data never
    are: what is it? The ranks stay one step apart, each along its own gradient.
averages_both: dist.all_reduce(parameter.grad) → dist.all_reduce(parameter.grad)
    ⏎dist.all_reduce(parameter.data)
    ⏎parameter.data /= dist.get_world_size()
    handed 32 bytes to all_reduce where its gradients have 16
forgets_to_divide: parameter.grad /= dist.get_world_size() → pass
    That is the sum over the ranks: divide by the number of ranks.
divides_twice: dist.all_reduce( → parameter.grad /= dist.get_world_size()
    ⏎dist.all_reduce(
    It was divided twice, before the all_reduce and after it.
for_two_ranks: dist.get_world_size() → 2
    It was divided by 2, on 4 ranks: dist.get_world_size() knows how many there are.
uses_the_result: dist.all_reduce( → parameter.grad = dist.all_reduce(
    all_reduce works in place and returns None: call it, then divide parameter.grad.
steps_itself: parameter.grad /= dist.get_world_size() → parameter.grad /= dist.get_world_size()
    ⏎parameter.data -= parameter.grad
    weight itself was 7 and is -14: leave the parameters to the optimizer, and work on .grad.
does_not_wait: dist.all_reduce(parameter.grad) → dist.all_reduce(parameter.grad, async_op=True)
    never waited for it
on_the_last: if parameter.requires_grad: → if parameter is module.bias:
    weight.grad is still rank 0's own: every parameter has its turn.
for_one_step: dist.all_reduce(parameter.grad) → self.averaged = getattr(self, "averaged", 0) + 1
    ⏎if self.averaged > 2:
    ⏎    return
    ⏎dist.all_reduce(parameter.grad)
    The first step was right. Does the hook average in every step?
on_copies: parameter.register_post → parameter.detach().requires_grad_().register_post
    Nothing was sent. Did a hook run? It must be on the module's own parameters.
"""),
)
