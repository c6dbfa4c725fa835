"""Checkers of notebook 13, experts: permute and back, capacity, a bias, and a published bug."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ddpkit import experts as library

from .checker import Exercise, Mistake, Trial, mistakes
from .tensor_parallel import group_of, in_groups, of_group, whole

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these

# through_experts(rows, chosen, weights, experts, process)


def _table(tokens: int, k: int, experts: int) -> tuple[torch.Tensor, ...]:
    """Make rows 1, 2, 3, ..., a routing table in which the last expert gets nothing, weights."""
    generator = torch.Generator().manual_seed(tokens + k)
    chosen = torch.stack(
        [torch.randperm(experts - 1, generator=generator)[:k] for _ in range(tokens)]
        or [torch.empty(k)]
    )[:tokens].long()
    rows = torch.arange(1.0, 1 + tokens, dtype=torch.float64).view(tokens, 1)
    weights = torch.arange(1.0, 1 + tokens * k, dtype=torch.float64).view(tokens, k)
    return rows, chosen, weights


def _run_through(answer, tokens, k, experts):
    rows, chosen, weights = _table(tokens, k, experts)
    rows.requires_grad_()
    weights.requires_grad_()
    seen = {}

    def process(sorted_rows, counts):
        """Multiply the rows of expert i by 10ⁱ."""
        seen["counts"] = [int(count) for count in counts]
        expert = torch.arange(len(counts)).repeat_interleave(torch.as_tensor(counts))
        # In whatever order the rows of one expert come.
        pairs = sorted(zip(expert.tolist(), whole(sorted_rows), strict=False))
        seen["rows, sorted by expert"] = [number for _, number in pairs]
        return sorted_rows * (10.0 ** expert.double()).unsqueeze(-1)

    out = answer(rows, chosen, weights, experts, process)
    seen["result"] = whole(out)
    out.sum().backward()
    seen["gradient of the rows"] = whole(rows.grad)
    if tokens:
        learned = None if weights.grad is None else whole(weights.grad)
        seen["gradient of the weights"] = learned
    return seen


def _through(tokens: int, k: int, experts: int) -> dict:
    """The specification of through_experts: every expert, token and choice by itself."""
    rows, chosen, weights = _table(tokens, k, experts)
    counts, in_order, factors = [0] * experts, [], torch.zeros(tokens, 1, dtype=torch.float64)
    for expert in range(experts):
        for token in range(tokens):
            for choice in range(k):
                if chosen[token, choice] == expert:
                    counts[expert] += 1
                    in_order.append(rows[token].item())
                    factors[token] += weights[token, choice] * 10**expert
    learned = {"gradient of the weights": whole(rows * 10.0**chosen)} if tokens else {}
    return learned | {
        "counts": counts,
        "rows, sorted by expert": whole(torch.tensor(in_order)),
        "result": whole(rows * factors),
        "gradient of the rows": whole(factors),
    }


def _through_trials() -> Iterator[Trial]:
    for tokens, k, experts in ((3, 1, 3), (4, 2, 4), (6, 3, 12), (0, 2, 4)):
        what = f"{tokens} tokens, {k} of {experts} experts, the last of which gets nothing"
        yield Trial(
            1, _run_through, (tokens, k, experts), [_through(tokens, k, experts)], what=what
        )


through_experts = Exercise(
    reference=library.through_experts,
    trials=_through_trials,
    hints={
        "start": "chosen.flatten() has token t's choices at t·k, t·k+1, ...: argsort it; the "
        "order says which choice comes where, and order // k of which token it is.",
        "values": "Back: results times their weights, in the same order, added to the row of each "
        "one's token: zeros.index_add(0, token, weighted).",
        "error": "torch.bincount(…, minlength=experts) counts also those that nobody chose. "
        "weights.flatten()[order].unsqueeze(-1) fits the results.",
    },
    praise="sorted for the experts, and each result is back at its token, weighed.",
    note="kept, a mask from within_capacity, leaves choices out; the notebook does without.",
    mistakes=mistakes("""
as_they_come: chosen.flatten().argsort(stable=True) → torch.arange(chosen.numel())
    The rows aren't sorted by expert, and counts say how many rows of them each expert takes, one
    expert after another: sort the choices.
any_order_of_equals: token = by_expert // k → token = by_expert % max(1, len(rows))
    Choice number i, counted row by row, is that of token i // k: a row has k choices.
counts_of_the_chosen: minlength=experts) → minlength=0)
    There must be a count for every expert, also 0 for those behind the last one that was chosen:
    minlength=experts.
weights_as_they_come: weights.flatten()[by_expert] → weights.flatten()[: len(by_expert)]
    Results are sorted by expert, weights by token: bring the weights into the same order.
not_weighed: results * weight.unsqueeze(-1) → results
    The results are added up as they are: each counts by its weight.
router_learns_nothing: weights.flatten()[by_expert] → weights.detach().flatten()[by_expert]
    The weights got no gradient, so the router would never learn: leave them in the graph.
last_one_wins: .index_add(0, token, weighted) → .index_copy(0, token, weighted)
    A token visits k experts, and their results add up: index_copy keeps one of them, index_add all.
not_put_back: .index_add(0, token, weighted) → .index_add(
    ⏎0, torch.arange(len(by_expert)) // k, weighted)
    Results are sorted by expert: each belongs to the row of its own token.
in_place_of_the_result: weighted.new_zeros(rows.shape) → rows
    The sum begins with the rows themselves: begin with zeros. (What is added to x, a block adds.)
"""),
)


# within_capacity(chosen, experts, capacity)


def _run_capacity(answer, chosen, experts, capacity):
    return answer(torch.tensor(chosen), experts, capacity).tolist()


def _kept(chosen: list, experts: int, capacity: int) -> list:
    """The specification of within_capacity: each choice takes one of its expert's places."""
    room, kept = [capacity] * experts, []
    for choices in chosen:
        kept.append([room[expert] > 0 for expert in choices])
        for expert in choices:
            room[expert] -= 1
    return kept


CAPACITIES = (
    ([[0], [1], [0], [0]], 2, 2),
    ([[0, 1], [0, 2], [1, 0], [0, 1]], 3, 2),
    ([[2, 1], [1, 2], [2, 3], [1, 3], [3, 2]], 4, 1),
    ([[1], [0], [1]], 3, 5),
)

within_capacity = Exercise(
    reference=library.within_capacity,
    trials=lambda: [
        Trial(1, _run_capacity, case, [_kept(*case)], what=f"choices {case[0]}, room for {case[2]}")
        for case in CAPACITIES
    ],
    hints={
        "start": "Number the choices of each expert 0, 1, 2, ... in the order of the tokens; those "
        "below the capacity stay.",
        "values": "Sorted by expert, stable, a choice's number is its place among all, minus the "
        "place where its expert begins: counts.cumsum(0) - counts. Then put it where it came from.",
        "error": "Return a mask of the shape of chosen: place.view_as(chosen) < capacity.",
    },
    praise="of each expert's choices the first stay, whichever token and place they are.",
    mistakes=mistakes("""
one_too_many: place < capacity → place <= capacity
    Places begin with 0: the capacity itself is one too many.
among_all: - first[flat[by_expert]] → - 0 * first[flat[by_expert]]
    Those are places among the choices of all experts: each expert counts from 0.
not_put_back: place[by_expert] = → place[:] =
    The places are in the order of the experts: put each where its choice came from.
drops_the_token: .view_as(chosen) → .view_as(chosen).all(-1, keepdim=True).expand_as(chosen)
    A token that finds no room at one expert is still welcome at the others: mask choices, not
    tokens.
one_row: place < capacity → place < 1
    There is room for `capacity` rows at each expert, not for one.
"""),
)


# move_bias(bias, load, speed, group)


def _run_bias(answer, size):
    rank, group = dist.get_rank(), group_of(size)
    bias = torch.tensor([0.5, 0.0, -0.5, 0.0])
    load = torch.tensor(LOADS[rank])
    answer(bias, load, 0.25, group)
    return {"bias": whole(bias)}


LOADS = [9, 0, 3, 4], [1, 8, 3, 5], [0, 9, 5, 2], [1, 6, 7, 2]


def _bias(world_size: int, size: int) -> list[dict]:
    """The specification of move_bias: each rank's bias, with loads of its group added by hand."""
    right = []
    for rank in range(world_size):
        first = rank - rank % size
        loads = LOADS[first : first + size]
        total = [sum(column) for column in zip(*loads, strict=True)]
        mean = sum(total) / 4
        moved = []
        for before, load in zip((0.5, 0.0, -0.5, 0.0), total, strict=True):
            moved.append(before + 0.25 * ((mean > load) - (mean < load)))
        right.append({"bias": whole(torch.tensor(moved))})
    return right


move_bias = Exercise(
    reference=library.move_bias,
    trials=lambda: in_groups(_run_bias, _bias, "each rank has other loads"),
    explain=of_group,
    writes=("bias",),
    hints={
        "start": "First add up the loads of all ranks. Experts above the mean become less welcome.",
        "values": "bias += speed * torch.sign(total.mean() - total), with total in floats.",
        "error": "load is of whole numbers: total.double().mean().",
    },
    praise="a step up or down, alike on all ranks, and nothing for the loss to weigh.",
    mistakes=mistakes("""
own_load: dist.all_reduce(total, group=group) → pass
    Each rank moved its bias by its own tokens' choices: the routers go apart, and nobody complains.
    Add up the loads of all ranks.
the_wrong_way: total.double().mean() - total) → total - total.double().mean())
    Experts with too many tokens became more welcome: the sign is the other way round.
by_how_much: torch.sign(total.double().mean() - total) → (total.double().mean() - total)
    The step is always `speed`, up or down: only the sign of the difference counts.
whole_mean: total.double().mean() - total → total.sum() // len(total) - total
    The mean of whole numbers needn't be one: 33 of 4 experts is 8.25, and // makes it 8.
a_new_tensor: bias += speed → bias = bias + speed
    The caller's tensor stays as it was: change `bias` in place, it is a buffer of the model.
on_the_argument: total = load.clone() → total = load
    `load` holds the sum of all ranks now, and will be summed again: all-reduce a copy.
of_the_world: dist.all_reduce(total, group=group) → dist.all_reduce(total)
    Loads of all ranks were added up: those that train one model are in `group`.
"""),
)


# expert_gradients(experts, rest, replicas): a published bug


def expert_gradients(experts, rest, replicas):
    """Average gradients over all ranks, in place. An expert's is a group's sum: add `replicas`'."""
    world_size = dist.get_world_size()
    for parameter in rest:
        dist.all_reduce(parameter.grad)
        parameter.grad /= world_size
    for parameter in experts:
        dist.all_reduce(parameter.grad, group=replicas)
        parameter.grad /= world_size


def as_found(experts, rest, replicas):
    world_size = dist.get_world_size()
    for parameter in rest:
        dist.all_reduce(parameter.grad)
        parameter.grad /= world_size
    for parameter in experts:
        dist.all_reduce(parameter.grad, group=replicas)
        parameter.grad /= dist.get_world_size(replicas)


def _run_gradients(answer, ranks):
    """Average the gradients of a norm and an expert; groups of `ranks` ranks share all experts."""
    shape = dist.get_world_size() // ranks, ranks
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "experts"))
    norm = [nn.Parameter(torch.zeros(1).double()) for _ in range(2)]
    expert = [nn.Parameter(torch.zeros(1).double()) for _ in range(2)]
    # Rank r's loss gives 10ʳ, and to expert p (p + 1) times as much, from all ranks of its group.
    members = dist.get_process_group_ranks(mesh["experts"].get_group())
    summands = [10**member * (1 + mesh.get_local_rank("experts")) for member in members]
    for number in range(2):
        norm[number].grad = torch.tensor([10.0 ** dist.get_rank()]).double()
        expert[number].grad = torch.tensor([sum(summands)]).double()
    answer(expert, norm, mesh["data"].get_group())
    of_norm = torch.cat([parameter.grad for parameter in norm])
    of_expert = torch.cat([parameter.grad for parameter in expert])
    return {"gradient of a norm": whole(of_norm), "gradient of an expert": whole(of_expert)}


def _averaged(world_size: int, ranks: int) -> list[dict]:
    """The specification: one process, whose loss is the mean of the ranks' losses."""
    mean = sum(10**rank for rank in range(world_size)) / world_size
    right = []
    for rank in range(world_size):
        norm = torch.full((2,), mean, dtype=torch.float64)
        of_expert = whole(norm * (1 + rank % ranks))
        right.append({"gradient of a norm": whole(norm), "gradient of an expert": of_expert})
    return right


SHOWN = (
    "The mean is over all W ranks' losses: each gradient is a sum over W ranks, divided by W. An "
    "expert's has the summands of its group's ranks already, so it is summed over its replicas "
    "only: but it is the same sum, of W, and divided by W, too."
)

expert_gradients = Exercise(
    reference=expert_gradients,
    trials=lambda: [
        Trial(W, _run_gradients, (e,), _averaged(W, e), what=f"experts shared by {e}")
        for W, e in ((4, 2), (3, 1), (2, 2), (6, 3), (1, 1))
    ],
    writes=("experts", "rest"),
    hints={
        "start": "By which factor is an expert's gradient too large, on 2 ranks, and on 6?",
        "values": SHOWN,
        "error": "replicas is a group: dist.all_reduce(x, group=replicas).",
    },
    praise="on meshes from 1 × 2 to 2 × 3: one loss, one mean, one divisor.",
    note="In the library: ddpkit.experts.average_gradients.",
    mistakes=[
        Mistake.written(
            as_found,
            "An expert's gradient is too large, by e or by W/e, which are both 2 here. AdamW "
            "wouldn't notice; SGD does, and the norm. Which sum is it, and over how many?",
        ),
        *mistakes("""
over_the_world: dist.all_reduce(parameter.grad, group=replicas) → dist.all_reduce(parameter.grad)
    Other ranks hold other experts: adding their gradients mixes up what doesn't belong together.
    Sum over the replicas.
not_at_all: dist.all_reduce(parameter.grad, group=replicas) → pass
    Replicas of an expert have seen other tokens, and go apart: sum over them.
experts_undivided: parameter.grad, group=replicas)⏎parameter.grad /= world_size →
    ⏎parameter.grad, group=replicas)
    The experts' gradients are sums, the others means: divide both by W.
all_among_replicas: dist.all_reduce(parameter.grad) → (
    ⏎dist.all_reduce(parameter.grad, group=replicas))
    What isn't an expert is on all ranks, and has seen other tokens on each: sum over all of them.
"""),
    ],
)
