"""Checkers of notebook 10's stages on ranks: forwards, steps, the mean, and a shared weight.

The mean is that over micro-batches; the first and the last stage share a weight, whose gradient has
two parts. In `run_stage` every stage multiplies by 2, and of a gradient digit i is micro-batch i,
whose loss counts i + 1 times: 321 has all of three.
"""

import math
import weakref

import torch
import torch.distributed as dist
from torch import nn

from ddpkit import pipeline
from ddpkit.pipeline import dry_run
from ddpkit.runtime.recorder import recorder

from .checker import Exercise, Mistake, Trial, mistakes

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these


# run_forwards(module, actions, inputs, loss)


def run_forwards(module, actions, inputs, loss):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    held, sent = {}, []
    for action in actions:
        _, _, i = pipeline.parse(action)
        x = inputs[i]
        if rank > 0:
            dist.recv(x, rank - 1)
        y = module(x.requires_grad_())
        if rank < last:
            out = y.detach()
            sent.append((out, dist.isend(out, rank + 1)))  # out must live until it has left
        else:
            y = loss(y, i) / len(inputs)
        held[i] = x, y
    for _, work in sent:
        work.wait()
    return held


class _Triple(nn.Linear):
    """A stage that multiplies by 3."""

    def __init__(self):
        super().__init__(1, 1, bias=False, dtype=torch.float64)
        nn.init.constant_(self.weight, 3.0)


def _run_forwards(answer, order):
    rank = dist.get_rank()
    inputs = [torch.full((1,), torch.nan, dtype=torch.float64) for _ in order]
    for i, x in enumerate(inputs if rank == 0 else []):
        x.fill_(10**i)
    actions = [f"{rank}F{i}" for i in order]
    module = _Triple()
    held = answer(module, actions, inputs, lambda y, i: len(order) * (i + 1) * y.sum())
    seen = {"returned": type(held).__name__}
    if not isinstance(held, dict):
        return seen
    seen |= {"micro-batches": list(held), "x": {}, "y": {}, "requires": {}, "slope": {}}
    for i, (x, y) in held.items():
        seen["x"][i], seen["y"][i] = x.item(), y.item()
        seen["requires"][i] = rank == 0 or x.requires_grad  # rank 0 sends no gradient back
        to, unit = (module.weight, module.weight.item() / 10**i) if rank == 0 else (x, 1)
        alive = y.requires_grad and to.requires_grad
        slope = torch.autograd.grad(y, to, allow_unused=True)[0] if alive else None
        seen["slope"][i] = None if slope is None else slope.item() * unit
    sent = sum(record.bytes for record in recorder().records if record.op == "send")
    return seen | {"sent": sent}


def _forward_trials():
    for stages, order in ((2, (0, 1, 2)), (3, (2, 0, 1)), (4, (0, 1)), (1, (1, 0))):
        expected = []
        for rank in range(stages):
            last = rank == stages - 1
            right = {"returned": "dict", "micro-batches": list(order), "x": {}, "y": {}}
            right |= {"requires": dict.fromkeys(order, True), "slope": {}}
            for i in order:
                times = 3.0 * (i + 1 if last else 1)
                x = 10.0**i * 3**rank
                right["x"][i], right["y"][i], right["slope"][i] = x, x * times, times
            expected.append(right | {"sent": 0 if last else 8 * len(order)})
        names = " ".join(f"F{i}" for i in order)
        yield Trial(stages, _run_forwards, (order,), expected, what=names)


run_forwards = Exercise(
    reference=run_forwards,
    plays=True,
    writes=("inputs",),
    trials=_forward_trials,
    hints={
        "start": "For each action: receive x into inputs[i], unless this is rank 0; "
        "y = module(x.requires_grad_()); isend y.detach() to the next rank, or on the last rank "
        "take the loss. Keep (x, y) under i.",
        "values": "The list says which micro-batch comes next: pipeline.parse(action) is (stage, "
        "kind, i). The last rank's y is loss(y, i) / len(inputs).",
        "hang": "Rank 0 receives nothing, the last rank sends nothing.",
        "error": "Receive into inputs[i] before x.requires_grad_(): what requires a gradient can't "
        "be written into.",
    },
    praise="each micro-batch went through all stages, once, and each rank has what its backward "
    "will need. (dist.send would have done, so far.)",
    note="The forward half of run_stage.",
    says={
        "returned": "rank {rank} returned a {got}: expected {{i: (x, y)}}.",
        "micro-batches": "rank {rank} returned micro-batches {got}, expected {expected}, in the "
        "order of the list.",
        "x": "x on rank {rank} is {got}, expected {expected}: each stage multiplies by 3.",
        "y": "y on rank {rank} is {got}, expected {expected}.",
        "requires": "x and y are right; but that x requires a gradient is on rank {rank} {got}.",
        "slope": "x and y are right; but dy/dx on rank {rank} is {got}, expected {expected}: "
        "backward will need the way from y to x, and to the weights.",
        "sent": "all is right, but rank {rank} sent {got} bytes, expected {expected}: each y once, "
        "to the next rank.",
    },
    mistakes=mistakes("""
cuts_its_own_graph: held[i] = x, y → held[i] = x, y.detach()
    y was kept without its history. What is *sent* has none; what is kept needs it for backward.
needs_no_gradient: module(x.requires_grad_()) → module(x)
    x has no gradient to leave: call x.requires_grad_() before its forward.
never_divides: loss(y, i) / len(inputs) → loss(y, i)
    The batch's loss is the *mean* of the micro-batches': each counts a 1/m.
every_rank_takes_the_loss: held[i] = x, y → held[i] = x, loss(y, i) / len(inputs)
    Only the last rank's y becomes a loss, once; the others hand theirs on.
in_its_own_order: _, _, i = pipeline.parse(action) → i = len(held)
    The list says which micro-batch comes next: pipeline.parse(action) has its number.
sends_its_input: out = y.detach() → out = x.detach()
    What goes on is what came out of the stage, y, without its history.
keeps_the_last_only: held[i] = x, y → held = {i: (x, y)}
    Several micro-batches wait for backward at a time: keep x and y of each, by its number.
"""),
)


# run_stage(module, actions, inputs, loss)


def run_stage(module, actions, inputs, loss):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    held, sent = {}, []

    def send(x, to):
        sent.append((x, dist.isend(x, to)))  # x must live until it has left

    for action in actions:
        _, kind, i = pipeline.parse(action)
        if kind == "F":
            x = inputs[i]
            if rank > 0:
                dist.recv(x, rank - 1)
            y = module(x.requires_grad_())
            if rank < last:
                send(y.detach(), rank + 1)
            else:
                y = loss(y, i) / len(inputs)
            held[i] = x, y
        else:
            x, y = held.pop(i)
            gradient = None
            if rank < last:
                gradient = torch.empty_like(y)
                dist.recv(gradient, rank + 1)
            y.backward(gradient)
            if rank > 0:
                send(x.grad, rank - 1)
    for _, work in sent:
        work.wait()


class _Double(nn.Module):
    """A stage that records what it does."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((), 2.0, dtype=torch.float64))
        self.done, self.graphs, self.most = [], [], 0

    def forward(self, x):
        rank, last = dist.get_rank(), dist.get_world_size() - 1
        value = x.item() * 2 ** (last - rank)
        micro_batch = round(math.log10(value)) if 0 < value < math.inf else "?"  # nothing came yet
        self.done.append(f"{rank}F{micro_batch}")
        kept = x * 1  # by the graph, for the weight's gradient
        self.graphs.append(weakref.ref(kept.untyped_storage()))
        self.most = max(self.most, sum(graph() is not None for graph in self.graphs))
        y = self.weight * kept
        y.register_hook(lambda _: self.done.append(f"{rank}B{micro_batch}"))
        return y


def _run_stage(answer, schedule):
    rank, stages = dist.get_rank(), dist.get_world_size()
    number = len(schedule[0]) // 2
    inputs = [torch.full((1,), torch.nan, dtype=torch.float64) for _ in range(number)]
    if rank == 0:
        for i, x in enumerate(inputs):
            x.fill_(10**i / 2 ** (stages - 1))
    module = _Double()
    answer(module, schedule[rank], inputs, lambda y, i: number * (i + 1) * y.sum())
    gradient = module.weight.grad
    return {
        "gradient": None if gradient is None else gradient.item(),
        "order": " ".join(module.done),
        "graphs": "few" if module.most <= dry_run.held(schedule)[rank] + 1 else module.most,
        "sent": sum(record.bytes for record in recorder().records if record.op == "send"),
    }


LAST_FIRST = [
    ["0F0", "0F1", "0F2", "0B2", "0B1", "0B0"],
    ["1F0", "1F1", "1F2", "1B2", "1B1", "1B0"],
    ["2F0", "2F1", "2F2", "2B2", "2B1", "2B0"],
]
STAGE_TRIALS = {
    "1F1B": pipeline.one_f_one_b(2, 4),
    "the last backward first": LAST_FIRST,
    "GPipe": pipeline.gpipe(4, 2),
    "no neighbours": pipeline.gpipe(1, 3),
}


def _stage_trials():
    for what, schedule in STAGE_TRIALS.items():
        stages, number = len(schedule), len(schedule[0]) // 2
        total = float(sum((i + 1) * 10**i for i in range(number)))
        expected = []
        for rank, actions in enumerate(schedule):
            ways = (rank > 0) + (rank < stages - 1)
            right = {"gradient": total, "order": " ".join(actions), "graphs": "few"}
            expected.append(right | {"sent": 8 * number * ways})
        told = f"{what}, {number} micro-batches"
        yield Trial(stages, _run_stage, (schedule,), expected, what=told)


run_stage = Exercise(
    reference=run_stage,
    plays=True,
    writes=("inputs",),
    trials=_stage_trials,
    hints={
        "start": "F: receive x into inputs[i], unless this is rank 0; y = module(x), where x "
        "requires a gradient; isend y.detach(), or on the last rank take the loss. B: receive the "
        "gradient, unless this is the last rank; y.backward(gradient); isend x.grad.",
        "values": "Keep x and y of each micro-batch by its number until its backward. The last "
        "rank's y is loss(y, i) / len(inputs), whose backward() needs no gradient.",
        "hang": "dist.isend goes on at once. Keep what it returns, with the tensor, and wait() for "
        "all of them after the last action. (After irecv, wait before the tensor is used.)",
        "error": "x.grad is there after backward if x.requires_grad_() was called before forward; "
        "y.backward(gradient) wants a gradient of y's shape.",
    },
    praise="the same for every schedule: it does what the list says.",
    note="One stage a rank, F and B only. ddpkit.pipeline.PipelineStage goes on from here.",
    says={
        "gradient": "the weight's gradient on rank {rank} is {got}, expected {expected} (digit i "
        "is micro-batch i, whose loss counts i + 1 times).",
        "order": "rank {rank} did {got}; its list says {expected}.",
        "graphs": "the gradients are right, but rank {rank} had the graphs of {got} micro-batches "
        "in memory at a time: let go of x and y once backward has been through them.",
        "sent": "the gradients are right, but rank {rank} sent {got} bytes, expected {expected}: "
        "each y once to the right, each x.grad once to the left.",
    },
    mistakes=mistakes("""
never_divides: loss(y, i) / len(inputs) → loss(y, i)
    Exactly as many times too large as there are micro-batches: the batch's loss is the *mean* of
    theirs, so each counts a 1/m. AdamW would have hidden it.
divides_on_every_rank: y.backward(gradient) →
    ⏎y.backward(None if gradient is None else gradient / len(inputs))
    Divided again on every rank: the gradient that arrives has been divided already, on the last.
remembers_one_only: held[i] = x, y → held = dict.fromkeys(range(len(inputs)), (x, y))
    Several micro-batches are on their way at a time. Keep x and y of each, by its number.
first_in_first_out: held.pop(i) → held.pop(next(iter(held)))
    Backward's micro-batch need not be the one that was first in: take it by its number.
waits_for_each_send: sent.append((x, dist.isend(x, to))) → dist.send(x, to)
    A send that waits until the other side receives: with 1F1B both sides send at the same time,
    one forward, one back. isend, and wait after the last action.
without_the_gradient: y.backward(gradient) → y.sum().backward()
    The gradient that came from the right must go into backward: y.backward(gradient).
needs_no_gradient: module(x.requires_grad_()) → module(x)
    x.grad is there after backward if x.requires_grad_() was called before forward.
sends_its_input: send(x.grad, rank - 1) → send(x.detach(), rank - 1)
    What goes back is the gradient of the input, x.grad, not the input.
"""),
)


# accumulate(model, micro_batches, loss)

ROWS = 8
CUTS = {"4 micro-batches of 2 rows": (2, 2, 2, 2), "of 4, 2, 1 and 1 rows": (4, 2, 1, 1)}


def accumulate(model, micro_batches, loss):
    rows = sum(len(inputs) for inputs, _ in micro_batches)
    logged = 0.0
    for inputs, targets in micro_batches:
        share = loss(model(inputs), targets) * len(inputs) / rows
        share.backward()
        logged += share.item()
    return logged


class _Line(nn.Linear):
    """One weight, and a count of the rows that had their forward but not yet their backward."""

    def __init__(self):
        super().__init__(1, 1, bias=False, dtype=torch.float64)
        self.held = self.most = 0
        nn.init.ones_(self.weight)

    def forward(self, inputs):
        y = super().forward(inputs)
        self.held += len(inputs)
        self.most = max(self.most, self.held)
        y.register_hook(lambda _: self.goes_back(len(inputs)))
        return y

    def goes_back(self, rows: int) -> None:
        self.held -= rows


def _run_accumulate(answer, cuts):
    """Run the answer on rows 1, 10, 100, ..., `cuts` of them at a time; a digit counts a row."""
    model = _Line()
    rows = 10.0 ** torch.arange(ROWS, dtype=torch.float64)[:, None]
    micro_batches = [(part, torch.ones_like(part)) for part in rows.split(cuts)]
    logged = answer(model, micro_batches, lambda y, t: ROWS * (y * t).mean())
    gradient = model.weight.grad
    return {
        "gradient": None if gradient is None else round(gradient.item(), 3),
        "returned": logged if logged is None else round(torch.as_tensor(logged).item(), 3),
        "graph": torch.is_tensor(logged) and logged.requires_grad,
        "rows": model.most,
    }


def _accumulate_trials():
    total = float("1" * ROWS)
    for what, cuts in CUTS.items():
        right = {"gradient": total, "returned": total, "graph": False, "rows": max(cuts)}
        yield Trial(1, _run_accumulate, (cuts,), [right], what=what)


def as_found(model, micro_batches, loss):
    mean = 0.0
    for inputs, targets in micro_batches:
        share = loss(model(inputs), targets)
        share.backward()
        mean += share.item() / len(micro_batches)
    return mean


accumulate = Exercise(
    reference=accumulate,
    trials=_accumulate_trials,
    hints={
        "start": "What is divided for the log, and what goes into backward()?",
        "values": "A mean over all rows: each micro-batch's mean counts len(inputs) / rows, where "
        "rows are those of all micro-batches.",
    },
    praise="each row counts once, also in micro-batches of different size.",
    note="What is returned is what went into backward.",
    says={
        "gradient": "the gradient is {got}, expected {expected}: each digit is a row, which "
        "counts once.",
        "returned": "the gradient is right, but the loss returned is {got}, not {expected}.",
        "graph": "gradient and loss are right, but the loss drags its graph along, micro-batch "
        "after micro-batch: log a number, share.item(), or share.detach().",
        "rows": "gradient and loss are right, but {got} rows were in memory at a time, between "
        "forward and backward; a micro-batch has {expected} at most.",
    },
    mistakes=[
        Mistake.written(
            as_found,
            "Four times too large, in every digit: what goes into backward is not what is logged.",
        ),
        *mistakes("""
mean_of_means: * len(inputs) / rows → / len(micro_batches)
    Right while all micro-batches have the same size. Here a row in a small one counts more: weigh
    each mean with its share of the rows.
divides_twice: * len(inputs) / rows → * len(inputs) / rows / len(micro_batches)
    Divided once too often: loss is a mean already, and its share of the rows is all it needs.
logs_the_last: logged += share.item() → logged = share.item()
    That is the last micro-batch's share: add them up.
zeroes_each_time: share.backward() → model.zero_grad()⏎share.backward()
    Only the last micro-batch is in it: call backward for each, and zero nothing in between.
"""),
    ],
)


# finish_step(parameters, tied, ends)


def finish_step(parameters, tied, ends):
    if tied is not None:
        dist.all_reduce(tied.grad, group=ends)
    squares = torch.zeros((), dtype=parameters[0].dtype)
    for parameter in parameters:
        if parameter is not tied or dist.get_rank() == 0:
            squares += parameter.grad.square().sum()
    dist.all_reduce(squares)
    return squares.sqrt()


OWN = (12.0, 84.0, 132.0)  # of rank 0, 1, 2; with the tied 3 and 4: 5, 13, 85, 157 in length
FIRST, LAST = (1.0, 3.0), (2.0, 1.0)  # the tied weight's gradients, from both ends


def _parameter(*gradient: float) -> nn.Parameter:
    made = nn.Parameter(torch.full((len(gradient),), 7.0, dtype=torch.float64))
    made.grad = torch.tensor(gradient, dtype=torch.float64)
    return made


def _run_finish(answer):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    ends = dist.new_group(sorted({0, last}))
    tied = None
    if rank in (0, last):
        both = torch.tensor([FIRST, LAST]).sum(0).tolist()
        tied = _parameter(*(both if last == 0 else FIRST if rank == 0 else LAST))
    own = _parameter(OWN[rank])
    parameters = [own] if tied is None else [own, tied]
    begun = len(recorder().records)
    norm = answer(parameters, tied, ends)
    said = recorder().records[begun:]
    return {
        "tied.grad": None if tied is None else tied.grad.tolist(),
        "other": [own.grad.tolist(), [p.detach().unique().tolist() for p in parameters]],
        "length": None if norm is None else round(torch.as_tensor(norm).item(), 3),
        "numbers": max(1 if tied is None else 3, sum(record.bytes for record in said) // 8),
    }


def _finish_trials():
    for world_size in (2, 3, 1):
        last = world_size - 1
        length = math.hypot(3, 4, *OWN[:world_size])
        expected = []
        for rank in range(world_size):
            at_end = rank in (0, last)
            right = {"tied.grad": [3.0, 4.0] if at_end else None}
            right["other"] = [[OWN[rank]], [[7.0]] * (1 + at_end)]
            expected.append(right | {"length": round(length, 3), "numbers": 3 if at_end else 1})
        yield Trial(world_size, _run_finish, (), expected)


finish_step = Exercise(
    reference=finish_step,
    trials=_finish_trials,
    hints={
        "start": "Two all_reduces: tied.grad in the group `ends`, where there is one, and one "
        "number, the sum of squares, over all ranks.",
        "values": "Lengths don't add up, their squares do: first the sum, then the squares of all "
        "ranks; those of `tied` on one rank only.",
        "hang": "In the group `ends` are the first and the last rank: only they may call with it. "
        "All ranks must call for the length.",
        "error": "all_reduce takes a tensor, and works in place.",
    },
    praise="both copies get one gradient, and so stay equal; it counts once.",
    says={
        "tied.grad": "tied.grad on rank {rank} is {got}, expected {expected}, on the first and on "
        "the last rank.",
        "length": "the length returned on rank {rank} is {got}, expected {expected}.",
        "other": "rank {rank}'s other gradient, and the parameters, are {got}, expected "
        "{expected}, as they were.",
        "numbers": "all is right, but rank {rank} took {got} numbers to its calls, expected "
        "{expected}: the tied gradient is the business of both ends, and the length is one number.",
    },
    mistakes=mistakes("""
never_sums: dist.all_reduce(tied.grad, group=ends) → pass
    Each end has only its own part of the gradient. The model has one such weight: the parts are
    added up, as autograd does in one process.
averages: dist.all_reduce(tied.grad, group=ends) →
    ⏎dist.all_reduce(tied.grad, group=ends)⏎tied.grad /= dist.get_world_size(ends)
    The sum, not the mean: both ends worked on the same batch, each on its part of the way.
counts_it_twice: if parameter is not tied or dist.get_rank() == 0: → if True:
    The tied weight is in the length twice. The model has it once: count it on one of the ranks.
half_of_it_at_each_end: if parameter is not tied or dist.get_rank() == 0:⏎squares += →
    ⏎squares += (0.5 if parameter is tied else 1) *
    With one rank, the group `ends` has one rank, too, and half of the tied weight is missing:
    divide by the group's size, or count it on rank 0 alone.
compares_their_numbers: parameter is not tied → parameter != tied
    == and != compare tensors number by number; `is` asks whether they are the same tensor.
of_this_stage: dist.all_reduce(squares) → pass
    That is the length of this rank's part. If each rank clipped by its own, the gradient would
    turn.
none_between: if tied is not None: → if True:
    `tied` is None on the ranks between both ends: they skip this call.
without_the_group: dist.all_reduce(tied.grad, group=ends) → dist.all_reduce(tied.grad)
    Without group=ends all ranks must call. With three stages the one between doesn't.
"""),
)
