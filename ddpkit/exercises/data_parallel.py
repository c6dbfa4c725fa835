"""Checkers of notebook 03: the server, average_gradients, sum_or_mean, NaiveDDP, and HookedDDP.

Gradients are chosen so that a mean is a tally, each digit a rank, times the parameter's unit: for
example 11 × 3.0 on two ranks, 1111 × 3.0 on four. Only in tokens.weight do they differ within a
parameter, so that numbers in another order show.
"""

import math

import torch
import torch.distributed as dist
from torch import nn

from ddpkit import data_parallel, parameter_server
from ddpkit.runtime.board import Record
from ddpkit.runtime.wire import recorder

from .checker import Exercise, Trial, mistakes
from .score import bytes_moved, excess

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these


# The module whose gradients are averaged, here and in notebook 04

WEIGHT = 7.0  # the value of all parameters, and of no gradient
# The units of gradients, flat: none is 2, 3 or 4 times another
ONES, IN_ORDER = torch.ones(3, dtype=torch.float64), torch.arange(1, 5, dtype=torch.float64)
GRADIENTS = {"tokens.weight": 17 * IN_ORDER, "first.weight": 3 * ONES, "first.bias": 5 * ONES}
GRADIENTS |= {"second.weight": 13 * ONES, "norm.weight": 11 * ONES[:2]}
FACTORS = GRADIENTS | {"tokens.weight": IN_ORDER, "head.weight": 16 * IN_ORDER}
LAYERS = tuple(FACTORS)  # in the order of forward
LR = 1 / 16  # of SGD, which hides no factor


class _InSets(nn.Parameter):
    """A parameter whose order in a set is reversed on odd ranks, so that use of a set fails."""

    def __hash__(self):
        return self.place


class Stack(nn.Module):
    """Layers one after the other, to which backward comes from the last to the first.

    tokens.weight is also head.weight: its gradient is complete when backward has been through both.
    positions isn't trained, nor used. A set of parameters has the opposite order on odd ranks.
    """

    def __init__(self, norm: torch.dtype = torch.float32):
        super().__init__()
        self.positions = nn.Parameter(torch.empty(2), requires_grad=False)
        self.tokens = nn.Embedding(2, 2)
        self.first, self.second = nn.Linear(1, 3), nn.Linear(3, 1, bias=False)
        self.norm = nn.LayerNorm(2, bias=False, dtype=norm)
        self.head = nn.Linear(2, 2, bias=False)
        self.head.weight = self.tokens.weight
        for number, parameter in enumerate(self.parameters()):
            nn.init.constant_(parameter, WEIGHT)
            parameter.__class__ = _InSets
            parameter.place = 7 - number if dist.get_rank() % 2 else number

    def forward(self, scale: float, layers=LAYERS, at_layer=lambda _: None) -> torch.Tensor:
        """Return a loss with gradients scale × GRADIENTS; backward calls `at_layer` at each."""
        x = torch.zeros(())
        for name in layers:
            x = x + scale * (FACTORS[name] * self.get_parameter(name).flatten()).sum()
            x.register_hook(at_layer)
        return x


def tally(world_size: int) -> int:
    """Count each rank once: 11, 1111. Rank r brings W times 10**r, so this is the mean."""
    return sum(10**rank for rank in range(world_size))


def all_reduces() -> list[Record]:
    """List the all_reduces that this rank has begun."""
    return [record for record in recorder().records if record.op == "all_reduce"]


def left_in(module: nn.Module) -> dict[str, object]:
    """Collect gradients and parameters, each as one number if all its numbers are alike."""
    gradients, parameters = {}, {}
    for name, parameter in module.named_parameters():
        parameters[name] = _brief(parameter)
        gradients[f"{name}.grad"] = None if parameter.grad is None else _brief(parameter.grad)
    itself = any(WEIGHT in (record.values or []) for record in all_reduces())
    return gradients | parameters | {"parameters sent": itself}


def _brief(tensor: torch.Tensor) -> float | list:
    numbers = tensor.flatten().tolist()
    return numbers[0] if len(set(numbers)) == 1 else numbers


def ideal(mean: float) -> dict[str, object]:
    """Return what a Stack should hold: gradients of `mean` times GRADIENTS, the rest unchanged."""
    left = {f"{name}.grad": _brief(mean * unit) for name, unit in GRADIENTS.items()}
    parameters = dict.fromkeys(("positions", *GRADIENTS), WEIGHT)
    return left | parameters | {"positions.grad": None, "parameters sent": False}


def read_mean(trial: Trial, rank: int, expected: dict, got: dict) -> str | None:
    """Explain the first difference, if it is a gradient that isn't the mean, or a parameter."""
    what = next(what for what in expected if got.get(what) != expected[what])
    mean, value, world_size = expected[what], got.get(what), trial.world_size
    if f"{what}.grad" in expected:
        return "Leave the parameters to the optimizer, and work on .grad."
    if not what.endswith(".grad") or None in (mean, value):
        return None
    given, due = (torch.tensor(x).double().flatten() for x in (value, mean))
    if len(given) != len(due):
        return None
    ratios, in_order = given / due, given.sort()[0] / due.sort()[0]
    times = ratios[0].item() if torch.allclose(ratios, ratios[0], 1e-9) else math.nan
    # Without a rank's gradient, they have one ratio, perhaps near 1.
    if torch.allclose(ratios, torch.ones_like(ratios), 0.01 if math.isnan(times) else 1e-6):
        return f"{what} has lost digits: average in the parameter's own dtype."
    if math.isclose(times, world_size):
        return f"{what} is the sum over the ranks: divide by the number of ranks."
    if math.isclose(times, 1 / world_size):
        return f"{what} was divided by {world_size**2}, on {world_size} ranks."
    tallied = times * tally(world_size) / world_size
    own = [other for other in range(world_size) if math.isclose(tallied, 10**other)]
    if own:
        return (
            f"{what} is rank {own[0]}'s own: the mean of all must end up in .grad "
            "itself, in place. Every parameter that is trained has its turn, biases too."
        )
    if math.isnan(times) and torch.allclose(in_order, in_order[0], 1e-9):
        return f"{what} should be 1, 2, 3 and 4 times a mean. Is each number in its place?"
    return f"Is {what} what all ranks' gradients add up to, divided by {world_size} once?"


# push_and_pull(model) and serve(model, optimizer, steps)


def _vector(times: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Make GRADIENTS times a number, all parameters in one piece."""
    return times * torch.cat([*GRADIENTS.values()]).to(dtype)


def _parts(vector: torch.Tensor) -> dict[str, object]:
    parts = vector.split([len(unit) for unit in GRADIENTS.values()])
    return dict(zip(GRADIENTS, map(_brief, parts), strict=True))


def _run_worker(answer, steps, dtype):
    """Run workers against a server, rank 0, that sends them 100 × worker × step × GRADIENTS."""
    module, rank, got = Stack().to(dtype), dist.get_rank(), {}
    for step in range(1, steps + 1):
        if rank:
            module.zero_grad()
            module(10**rank).backward()
            answer(module)
            values = {name: _brief(parameter) for name, parameter in module.named_parameters()}
            got |= {f"{name} after step {step}": value for name, value in values.items()}
        for worker in range(1, 1 if rank else dist.get_world_size()):
            pushed = _vector(0, dtype)
            dist.recv(pushed, worker)
            dist.send(_vector(100 * worker * step, dtype), worker)
            got |= {f"{k} from rank {worker}": value for k, value in _parts(pushed).items()}
    return got


def _worker_trials():
    for world_size, steps, dtype in ((2, 1, torch.float32), (3, 2, torch.float64)):
        ranks = [{}]
        for worker in range(1, world_size):
            for name, unit in GRADIENTS.items():
                ranks[0][f"{name} from rank {worker}"] = _brief(10**worker * unit)
            mine = {}
            for step in range(1, steps + 1):
                mine[f"positions after step {step}"] = WEIGHT
                for name, unit in GRADIENTS.items():
                    mine[f"{name} after step {step}"] = _brief(100 * worker * step * unit)
            ranks.append(mine)
        what = "rank 0 is the server" + ", with float64" * (dtype == torch.float64)
        yield Trial(world_size, _run_worker, (steps, dtype), ranks, what=what)


push_and_pull = Exercise(
    reference=parameter_server.push_and_pull,
    helpers=(parameter_server.trained_in,),
    trials=_worker_trials,
    hints={
        "start": "The trained parameters are those of module.parameters() with requires_grad. "
        "parameters_to_vector puts their .grad into one vector: send that to rank 0.",
        "values": "Receive into a vector of the same length, then vector_to_parameters.",
        "hang": "First send the gradients, then receive the weights: each once a step.",
        "error": "One vector each way, of all trained parameters and nothing else.",
    },
    praise="gradients out, weights in, on 1 and 2 workers; what is frozen stays.",
    mistakes=mistakes("""
pushes_the_weights: (p.grad for p in trained) → (trained)
    What the server got is 7 everywhere: those are the weights. Push the gradients, p.grad.
forgets_what_came: vector_to_parameters(weights, trained) → pass
    What the server sent isn't in the model: vector_to_parameters(weights, trained) puts it there.
steps_by_itself: vector_to_parameters(weights, trained) → for p in trained:⏎    p.data -= p.grad
    That is a step of the worker's own. Here only the server steps; take its weights as they are.
adds_them: vector_to_parameters(weights, trained) → old = parameters_to_vector(trained).detach()
    ⏎vector_to_parameters(old + weights, trained)
    What comes are the new weights themselves, not a change: put them in place of the old ones.
the_frozen_too: if parameter.requires_grad → if parameter is not None
    A frozen parameter has no gradient, its .grad is None: pass over those without requires_grad.
one_by_one: dist.send(parameters_to_vector(p.grad for p in trained), 0) → for p in trained:
    ⏎    dist.send(p.grad, 0)
    One vector each way: parameters_to_vector makes it of all gradients.
"""),
)


def _run_serve(answer):
    """Run the server; each worker pushes its digit of a tally, times the number of workers."""
    module, rank, got = Stack(), dist.get_rank(), {}
    if rank == 0:
        answer(module, torch.optim.SGD(module.parameters(), lr=1.0, momentum=0.5), 2)
        return {"positions": _brief(module.positions)}
    for step in (1, 2):
        dist.send(_vector((dist.get_world_size() - 1) * 10 ** (rank - 1)), 0)
        pulled = _vector(0)
        dist.recv(pulled, 0)
        got |= {f"{name} after step {step}": value for name, value in _parts(pulled).items()}
    return got


def _serve_trials():
    for world_size in (3, 4, 2):
        expected, mean = {}, tally(world_size - 1)
        for step, moved in ((1, mean), (2, 2.5 * mean)):  # with a momentum of 1/2
            for name, unit in GRADIENTS.items():
                expected[f"{name} after step {step}"] = _brief(WEIGHT - moved * unit)
        ranks = [{"positions": WEIGHT}] + [expected] * (world_size - 1)
        what = f"{world_size - 1} of them workers, 2 steps"
        yield Trial(world_size, _run_serve, (), ranks, what=what)


serve = Exercise(
    reference=parameter_server.serve,
    helpers=(parameter_server.follow, parameter_server.trained_in),
    trials=_serve_trials,
    hints={
        "start": "A vector of zeros as long as parameters_to_vector(trained), then recv from each "
        "of range(1, world_size) into another one, and add.",
        "values": "In each step: add up W-1 gradients, divide by W-1, give each parameter its part "
        "as .grad, optimizer.step(); only then send the weights, to every worker.",
        "hang": "Each worker sends once a step, and waits for the weights: also in the last step.",
        "error": "A message has all trained parameters, and nothing else, in one vector.",
    },
    praise="1, 2 and 3 workers have one process's weights, also with momentum.",
    mistakes=mistakes("""
sums: total / len(workers) → total
    The step is as long as all workers' steps together: divide the sum by their number.
divides_by_ranks: total / len(workers) → total / dist.get_world_size()
    It was divided by the number of ranks. The server is one of them, and brings no gradient.
keeps_the_last: total += gradient → total = gradient
    Only the last worker's gradient counts: add them up before you step.
never_steps: optimizer.step() → pass
    The weights never change: once the mean is in .grad, optimizer.step().
adds_to_the_last_step: total = torch.zeros_like(parameters_to_vector(trained)) → total = (
    ⏎    total if _ else torch.zeros_like(parameters_to_vector(trained)))
    The first step's gradients are in the second one, too: begin each step with zeros.
steps_by_hand: optimizer.step() → for parameter in trained:⏎    parameter -= parameter.grad
    The first step is right, the second isn't: the optimizer has a momentum. optimizer.step().
the_frozen_too: if parameter.requires_grad → if parameter is not None
    A message has the trained parameters only: pass over those without requires_grad.
"""),
)


# average_gradients(module)

TRAFFIC = {
    "bytes too many": "the values are right, but rank {rank} sent {got} bytes more than an "
    "all_reduce of each trained parameter's gradient, once a step. What else goes out?",
    "calls too many": "the values are right, but rank {rank} made {got} calls more than there are "
    "trained parameters. What is sent beside their gradients?",
}


FINE = 1 + 2.0**-28  # no float32


def _run_average(answer, unused, times=1.0):
    module, rank = Stack(), dist.get_rank()
    module.to(torch.float64 if times == FINE else torch.float32)
    layers = ("tokens.weight", "head.weight") if unused and rank == 1 else LAYERS
    module(dist.get_world_size() * 10**rank * times, layers).backward()
    answer(module)
    gradients = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return {
        **left_in(module),
        "anything sent": bool(recorder().records) or dist.get_world_size() == 1,
        **excess(recorder().records, gradients, flags=True),
    }


def _average_trials():
    wire = {"anything sent": True, "bytes too many": 0, "calls too many": 0}
    for world_size, times, what in ((2, 1.0, ""), (4, 1.0, ""), (1, FINE, "float64")):
        expected = [ideal(tally(world_size) * times) | wire] * world_size
        yield Trial(world_size, _run_average, (False, times), expected, what=what)
        if world_size == 4:
            mean = ideal(1) | {"tokens.weight.grad": _brief(11 * GRADIENTS["tokens.weight"])} | wire
            what = "rank 1 has no gradient in some layers"
            yield Trial(2, _run_average, (True,), [mean] * 2, what=what)


average_gradients = Exercise(
    reference=data_parallel.average_gradients,
    trials=_average_trials,
    hints={
        "start": "Go through module.parameters(); requires_grad tells which are trained.",
        "values": "dist.all_reduce(parameter.grad) leaves the sum in it, on all ranks. "
        "parameter.grad /= dist.get_world_size() comes after it, in place.",
        "wire": "One dist.all_reduce for each parameter of module.parameters().",
        "hang": "All ranks make the same calls: where .grad is None, zeros go out.",
    },
    says=TRAFFIC,
    praise="right on 1, 2 and 4 ranks, also where one has no gradient, and nothing goes out twice.",
    explain=read_mean,
    note="NaiveDDP calls it, and complains where a gradient is missing on the way.",
    mistakes=mistakes("""
averages_the_parameters: dist.all_reduce(parameter.grad, group=group)⏎parameter.grad /= →
    ⏎dist.all_reduce(parameter.data, group=group)⏎parameter.data /=
    What all_reduce was given is the parameter itself. Average the gradients: parameter.grad.
in_a_set: in module.parameters(): → in set(module.parameters()):
    A set has no order, or another one on each rank, so ranks bring different gradients to the same
    call. Go through module.parameters(), which is in one order on all ranks.
broadcasts: all_reduce(parameter.grad, group=group)⏎parameter.grad /= dist → broadcast(
        ⏎    parameter.grad, 0) or dist
    Rank 0's own: what the others learned is lost. A mean needs all of them: dist.all_reduce.
skips_biases: if parameter.requires_grad: → if parameter.requires_grad and parameter.dim() > 1:
    first.bias.grad is still rank 0's own: every parameter that is trained has its turn, biases too.
does_nothing: for parameter in module.parameters(): → for parameter in ():
    Nothing has changed: each rank still has its own. dist.all_reduce adds them up, in place.
in_a_new_tensor: dist.all_reduce(parameter.grad, group=group)⏎parameter.grad /= →
    ⏎dist.all_reduce(mean := parameter.grad.clone())⏎mean /=
    Each rank still has its own gradients: the mean must end up in .grad itself, in place.
uses_the_result: dist.all_reduce( → parameter.grad = dist.all_reduce(
    all_reduce works in place and returns None: call it, then divide parameter.grad.
only_where_there_is_one: if parameter.requires_grad: → if parameter.grad is not None:
    Rank 1 has no gradient in some layers and passes over them: rank 0 waits for ever. All ranks
    must send the same. Go by requires_grad, and where .grad is None, send zeros.
sends_none: parameter.grad = torch.zeros_like(parameter) → pass
    Rank 1 has no gradient in some layers. None can't be sent; zeros can, and change no sum.
"""),
)


# sum_or_mean(module, reduction, rows)

ROWS = (3, 1), (4, 0), (4, 1, 3), (128, 128)  # of each rank; powers of 2 together: exact


def sum_or_mean(module, reduction, rows):
    all_rows = torch.tensor(rows)
    dist.all_reduce(all_rows)
    weight = 1 if reduction == "sum" else rows / all_rows.item()
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad *= weight
            dist.all_reduce(parameter.grad)


def _run_sum_or_mean(answer, reduction, rows):
    """Run a reduction of gradients in which each row of rank r counts 10**r: 13 for rows (3, 1).

    For "mean" a row brings 10**r times the number of all rows, so that the result is the same.
    """
    module, rank = Stack(), dist.get_rank()
    times = rows[rank] if reduction == "sum" else sum(rows) * (rows[rank] > 0)
    module(10**rank * times).backward()
    answer(module, reduction, rows[rank])
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    spare = 8 * (len(trained) if reduction == "mean" else 2)  # for the count of rows
    too_many = excess(recorder().records, trained, spare)["bytes too many"]
    return left_in(module) | {"bytes too many": too_many}


def _sum_or_mean_trials():
    for rows in ROWS:
        digits = sum(count * 10**rank for rank, count in enumerate(rows))
        expected = [ideal(digits) | {"bytes too many": 0}] * len(rows)
        for reduction in ("sum", "mean"):
            what = f"{reduction} over {' and '.join(map(str, rows))} rows"
            yield Trial(len(rows), _run_sum_or_mean, (reduction, rows), expected, what=what)


sum_or_mean = Exercise(
    reference=sum_or_mean,
    trials=_sum_or_mean_trials,
    hints={
        "start": "If the loss is a sum, so is its gradient: rows on different ranks just add up.",
        "values": "A rank's mean times its rows is its sum: add up the sums; divide by all rows.",
        "hang": "No rank knows all rows: each begins with an all_reduce of torch.tensor(rows).",
    },
    praise="right for the sum and for the mean, whatever rows a rank has, and if it has none.",
    says=TRAFFIC,
    explain=lambda *_: "Write down one process's gradient: how much does each row count in it?",
    note="Ours. Yours may look different: the check looks at what it does.",
    mistakes=mistakes("""
never_divides: rows / all_rows.item() → 1
    Those are means, added up. Weight each: its rows over all rows, which an all_reduce adds up.
rows_of_this_rank_only: dist.all_reduce(all_rows) → pass
    Weight each: its rows over all rows, which an all_reduce adds up.
of_means: rows / all_rows.item() → 1 / dist.get_world_size()
    A mean of means: ranks count alike, whatever rows they have. Right only if all have as many.
as_for_a_mean_over_ranks: rows / all_rows.item() → dist.get_world_size() * rows / all_rows.item()
    Exactly W times too large: a factor W is for whoever divides by W later. Here nobody does, the
    all_reduce only adds.
forgets_to_divide: rows / all_rows.item() → rows
    It is weighted with rows, and never divided. Divide by the rows of all ranks.
always_divides: 1 if reduction == "sum" else rows / all_rows.item() → 1 / dist.get_world_size()
    It is divided by the number of ranks. A sum over all rows is divided by nothing.
weights_sums_too: 1 if reduction == "sum" → rows if reduction == "sum"
    A sum was multiplied by its rows. It holds them all already: sums just add up.
leaves_when_it_has_none: all_rows = → if not rows: return⏎all_rows =
    A rank without rows has gradients of zeros, and takes part: the others wait for it.
"""),
)


# NaiveDDP: equal at the start, averaged after backward


def _run_naive(answer, steps, unused):
    """Train from different weights on every rank. unused: rank 1 omits layers in the last step."""
    module, rank, world_size = Stack(), dist.get_rank(), dist.get_world_size()
    module.register_buffer("statistics", torch.full((2,), WEIGHT))
    module.register_buffer("batches", torch.tensor(7), persistent=False)
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data += 100 * rank
    model = answer(module)
    before = len(recorder().records)
    found = {"trained": set(), "frozen": set(), "buffers": set()}
    for parameter in module.parameters():
        kind = "trained" if parameter.requires_grad else "frozen"
        found[kind] |= set(parameter.flatten().tolist())
    for buffer in module.buffers():
        found["buffers"] |= set(buffer.flatten().tolist())
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    for step in range(1, steps + 1):
        skips = unused and step == steps and rank == 1
        optimizer.zero_grad()
        model(world_size * 10**rank, LAYERS[1:4] if skips else LAYERS).backward()
        model.synchronize()
        if step == 1:  # where no gradient is a WEIGHT; a buffer has two numbers at most
            sent = [record.values or [] for record in recorder().records[before:]]
            again = any(WEIGHT in values and len(values) > 2 for values in sent)
        left = left_in(module)
        optimizer.step()
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    # PyTorch's sends the buffers in each forward. Flags say who has which gradient.
    sent, buffers = recorder().records[before:], list(module.buffers())
    spare = steps * 4 * (1 + len(list(module.parameters())))
    too_many = excess(sent, steps * (trained + buffers), spare)["bytes too many"]
    return found | left | {"weights again": again, "bytes too many": too_many}


def _naive_trials():
    for world_size, steps, unused in ((2, 1, False), (4, 2, False), (3, 2, True), (1, 1, False)):
        start = {kind: {WEIGHT} for kind in ("trained", "frozen", "buffers")}
        mean, grads, weights = tally(world_size), {}, {"positions": WEIGHT}
        for name, unit in GRADIENTS.items():
            left_out = unused and name not in LAYERS[1:4]
            grads[f"{name}.grad"] = _brief((mean - 10 * left_out) * unit)
            weights[name] = _brief(WEIGHT - (steps - 1) * LR * mean * unit)
        wire = {"weights again": False, "bytes too many": 0}
        expected = start | ideal(mean) | grads | weights | wire
        what = f"step {steps}" + ", in which rank 1 leaves layers out" * unused
        yield Trial(world_size, _run_naive, (steps, unused), [expected] * world_size, what=what)


NaiveDDP = Exercise(
    reference=data_parallel.NaiveDDP,
    helpers=(
        data_parallel.average_gradients,
        data_parallel.broadcast_module,
        data_parallel.DataParallel,
    ),
    trials=_naive_trials,
    hints={
        "start": "In __init__, dist.broadcast each of module.parameters() and module.buffers() "
        "from rank 0. synchronize is average_gradients.",
        "values": "All ranks begin as rank 0 does, and .grad becomes the mean, in place.",
        "hang": "All ranks make the same calls, whatever they used of the model.",
    },
    praise="replicas that begin apart are equal from the start, and follow one mean. (If ours "
    "sends more bytes: before the first broadcast, ranks compare their names and shapes.)",
    says={
        "trained": "after wrapping, trained parameters on rank {rank} are {got}, not {expected}.",
        "frozen": "after wrapping, a frozen parameter on rank {rank} is {got}, not {expected}.",
        "buffers": "after wrapping, the buffers on rank {rank} are {got}, not {expected}.",
        "weights again": "the values are right, but after wrapping, rank {rank} sent "
        "parameters again: replicas that start equal and follow one mean stay equal.",
        **TRAFFIC,
    },
    explain=read_mean,
    mistakes=mistakes("""
never_broadcasts: if p.requires_grad}⏎broadcast_module(module, group) → if p.requires_grad}
    Equal gradients keep replicas as far apart as they began: broadcast rank 0's, no copies.
leaves_the_buffers: , *module.named_buffers()] → ]
    Buffers belong to the model, too: broadcast module.buffers() as well.
leaves_the_frozen: [*module.named_parameters(), → [*(n for n in module.named_parameters()
    ⏎    if n[1].requires_grad),
    A frozen parameter takes part in forward: broadcast it like the others.
wraps_a_copy: self.module = module → self.module = __import__("copy").deepcopy(module)
    The optimizer has the module's own parameters: keep the module itself, no copy.
sends_the_weights_again: average_gradients(self.module, self.group) → average_gradients(self.module)
    ⏎broadcast_module(self.module)
    Replicas that start equal and follow equal gradients stay equal: send the weights once.
averages_the_parameters: dist.all_reduce(parameter.grad, group=group)⏎parameter.grad /= →
    ⏎dist.all_reduce(parameter.data, group=group)⏎parameter.data /=
    You average the parameters. It is the gradients that must be alike before the step.
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

    def average(self, parameter):  # the hook gets the parameter, not its gradient
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()

    def synchronize(self):
        pass

    def forward(self, *inputs):
        return self.module(*inputs)


X = 2.0  # the x of every rank's only point


def _run_hooked(answer, steps):
    """Train a line on half its squared error; it starts W · 10**r above rank r's only point."""
    line = nn.Linear(1, 1, dtype=torch.float64)  # exact, in whatever order ranks add up
    line.weight.data.fill_(WEIGHT)
    line.bias.data.fill_(WEIGHT)
    model = answer(line)
    begun = len(recorder().records)
    y = X * WEIGHT + WEIGHT - dist.get_world_size() * 10 ** dist.get_rank()
    for _ in range(steps):
        line.zero_grad()
        ((model(torch.tensor([X], dtype=torch.float64)) - y).square().sum() / 2).backward()
        getattr(model, "synchronize", list)()  # the loop of DDP's own users has none
        sent = bytes_moved(recorder().records[begun:], dist.get_world_size())
        left = left_in(line) | {"bytes sent by each rank": sent}
        for parameter in line.parameters():
            parameter.data -= LR * parameter.grad
    return left


def _serial(world_size: int, steps: int) -> dict:
    """The specification: one process with all points before its last step, worked out by hand."""
    weight = bias = WEIGHT
    for _ in range(steps):
        error = X * (weight - WEIGHT) + (bias - WEIGHT) + tally(world_size)
        left = {"weight.grad": X * error, "bias.grad": error, "weight": weight, "bias": bias}
        weight, bias = weight - LR * X * error, bias - LR * error
    nbytes = steps * 2 * 8 * 2 * (world_size - 1) // world_size
    return left | {"parameters sent": False, "bytes sent by each rank": nbytes}


def _hooked_trials():
    for world_size, steps in ((2, 1), (2, 3), (4, 1)):
        expected = [_serial(world_size, steps)] * world_size
        what = "1 step" if steps == 1 else f"{steps} steps, of which the first is right"
        yield Trial(world_size, _run_hooked, (steps,), expected, what=what)


HookedDDP = Exercise(
    reference=HookedDDP,
    trials=_hooked_trials,
    hints={
        "values": "Print what the hook is given: it has a gradient's shape. Has it its numbers?",
        "start": "The hook gets the parameter, as soon as its .grad is complete.",
        "wire": "dist.all_reduce(parameter.grad), then parameter.grad /= dist.get_world_size().",
    },
    praise="after three steps each rank still has what one process would have, to the bit.",
    explain=read_mean,
    note="Two lines of the hook, mended. ddpkit.ddp.OverlapDDP goes on from here.",
    mistakes=mistakes("""
in_a_new_tensor: dist.all_reduce(parameter.grad)⏎parameter.grad /= →
    ⏎dist.all_reduce(mean := parameter.grad.clone())⏎mean /=
    weight.grad is still rank 0's own: the mean of all ranks must end up in .grad itself, in place.
as_found: dist.all_reduce(parameter.grad)⏎parameter.grad /= → dist.all_reduce(parameter.data)
    ⏎parameter.data /=
    What your hook gave to all_reduce is 7, on every rank alike. Gradients of different data never
    are: what is it? The ranks stay one step apart, each along its own gradient.
averages_both: parameter.grad /= → dist.all_reduce(parameter.data.div_(dist.get_world_size()))
    ⏎parameter.grad /=
    If gradients are averaged, and all began alike, parameters stay alike: send nothing else.
uses_the_result: dist.all_reduce( → parameter.grad = dist.all_reduce(
    all_reduce works in place and returns None: call it, then divide parameter.grad.
steps_itself: dist.get_world_size() → dist.get_world_size()⏎parameter.data -= parameter.grad
    The step is the optimizer's: leave the parameters to it, and work on .grad.
on_the_last: if parameter.requires_grad: → if parameter is module.bias:
    weight.grad is still rank 0's own: every parameter has its turn.
on_copies: parameter.register_post → parameter.detach().requires_grad_().register_post
    Nothing was sent. Did a hook run? It must be on the module's own parameters.
"""),
)
