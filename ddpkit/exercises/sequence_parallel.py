"""Checkers of notebook 11: GatherTokens, ScatterTokens, and a sum whose backward summed again."""

import warnings
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.distributed.nn  # so that torch.distributed.nn.functional is there

from ddpkit import tensor_parallel
from ddpkit.runtime.recorder import recorder
from ddpkit.tensor_parallel import sequence

from .checker import Exercise, Mistake, Trial, mistakes
from .tensor_parallel import autograd_must_know, calls, group_of, in_groups, of_group, whole

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these

BATCH, EACH, WIDTH = 2, 2, 3  # sequences, tokens that a rank has of each, numbers of a token
GATHER, SCATTER = "all_gather", "reduce_scatter"


def _numbers(rank: int, tokens: int) -> torch.Tensor:
    """Make a rank's (BATCH, tokens, WIDTH): 1, 2, 3, ... times 100ʳ, two digits of a sum a rank."""
    count = BATCH * tokens * WIDTH
    numbers = torch.arange(1.0, 1 + count, dtype=torch.float64)
    return numbers.view(BATCH, tokens, WIDTH) * 100.0**rank


def _run(answer, gathers, size):
    autograd_must_know()
    group, rank, whole_length = group_of(size), dist.get_rank(), EACH * size
    given, returned = (EACH, whole_length) if gathers else (whole_length, EACH)
    x = _numbers(rank, given).requires_grad_()
    begun = len(recorder().records)
    out = answer.apply(x, group)
    then = len(recorder().records)
    seen = {"shape": list(out.shape), "out": whole(out), "calls in forward": calls(begun, then)}
    if list(out.shape) == [BATCH, returned, WIDTH]:
        out.backward(_numbers(rank, returned))
        seen |= {"gradient of x": whole(x.grad), "calls in backward": calls(then)}
    return seen | {"x afterwards": whole(x)}


def _right(world_size: int, size: int, gathers: bool) -> list[dict]:
    """The specification: gather along the tokens one way, sum and cut the other, or the reverse."""
    forward, backward = (_gathered, _scattered) if gathers else (_scattered, _gathered)
    there, back = (GATHER, SCATTER) if gathers else (SCATTER, GATHER)
    given, returned = (EACH, EACH * size) if gathers else (EACH * size, EACH)
    right = []
    for rank in range(world_size):
        ranks = list(range(rank - rank % size, rank - rank % size + size))
        out = forward([_numbers(member, given) for member in ranks], rank % size)
        gradient = backward([_numbers(member, returned) for member in ranks], rank % size)
        seen = {
            "shape": [BATCH, returned, WIDTH],
            "out": whole(out),
            "calls in forward": {there: 1},
        }
        seen |= {"gradient of x": whole(gradient), "calls in backward": {back: 1}}
        right.append(seen | {"x afterwards": whole(_numbers(rank, given))})
    return right


def _gathered(parts: list[torch.Tensor], _: int) -> torch.Tensor:
    return torch.cat(parts, 1)


def _scattered(parts: list[torch.Tensor], place: int) -> torch.Tensor:
    return torch.stack(parts).sum(0).chunk(len(parts), 1)[place]


def _trials(gathers: bool) -> Iterator[Trial]:
    what = "rank r's x is 1, 2, 3… times 100ʳ"
    return in_groups(_run, _right, what, gathers)


ERROR = (
    "backward returns something for each argument of forward after ctx: a gradient for x, None for "
    "the group."
)
SAYS = {"shape": "out on rank {rank} has the shape {got}, expected {expected}."}
GatherTokens = Exercise(
    reference=sequence.GatherTokens,
    helpers=(sequence.gather_tokens, sequence.scatter_tokens),
    trials=lambda: _trials(True),
    explain=of_group,
    says=SAYS,
    hints={
        "start": "forward: every rank gets all tokens. backward: every rank has used all of them, "
        "so their gradients add up, and each rank keeps those of its own tokens.",
        "values": "Keep the group: ctx.group = group. gather_tokens(x, group) one way, "
        "scatter_tokens(gradient, ctx.group) the other.",
        "error": ERROR,
    },
    praise="an all-gather forward, a reduce-scatter backward: the two halves of f's all-reduce.",
    mistakes=mistakes("""
own_tokens_only: return scatter_tokens(gradient, ctx.group), None →
    ⏎own = gradient.chunk(dist.get_world_size(ctx.group), 1)[dist.get_rank(ctx.group)]
    ⏎return own, None
    Each rank kept its own use of its tokens. All ranks have used them: their gradients add up.
averages: scatter_tokens(gradient, ctx.group), None →
    ⏎scatter_tokens(gradient, ctx.group) / dist.get_world_size(ctx.group), None
    The ranks used the tokens for different things, and their gradients add up: no mean.
gathers_back: return scatter_tokens(gradient, → return gather_tokens(gradient,
    backward gathers once more. x has this rank's tokens, and so has its gradient: reduce-scatter.
of_the_world: return gather_tokens(x, group) → return gather_tokens(x)
    Who takes in all ranks? The tokens of this group's ranks belong together.
forgets_the_group: scatter_tokens(gradient, ctx.group) → scatter_tokens(gradient)
    Who takes in all ranks? backward needs the group, too: ctx.group.
"""),
)

ScatterTokens = Exercise(
    reference=sequence.ScatterTokens,
    helpers=(sequence.gather_tokens, sequence.scatter_tokens),
    trials=lambda: _trials(False),
    explain=of_group,
    says=SAYS,
    hints={
        "start": "The mirror of GatherTokens: forward sums the ranks' summands, and keeps this "
        "rank's tokens. Who needs the gradient of a token's sum? Each rank that gave a summand.",
        "values": "scatter_tokens(x, group) one way, gather_tokens(gradient, ctx.group) the other.",
        "error": ERROR,
    },
    praise="a reduce-scatter forward, an all-gather backward: together they are g, and no more.",
    mistakes=mistakes("""
zeros_elsewhere: return gather_tokens(gradient, ctx.group), None →
    ⏎whole, place = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
    ⏎return torch.cat([gradient * (at == place) for at in range(whole)], 1), None
    x has gradients at this rank's tokens alone, and zeros at others. But its summands of all tokens
    went into sums, of which the other ranks have the gradients: gather them.
sums_nothing: return scatter_tokens(x, group) →
    ⏎return x.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)].clone()
    Those are this rank's summands of its tokens: the other ranks' are missing.
divides_the_gradient: gather_tokens(gradient, ctx.group), None →
    ⏎gather_tokens(gradient, ctx.group) / dist.get_world_size(ctx.group), None
    A summand has the same gradient as the sum: nothing is divided.
scatters_back: return gather_tokens(gradient, → return scatter_tokens(gradient,
    backward sums and cuts once more. x has all tokens, and so has its gradient: all-gather.
of_the_world: return scatter_tokens(x, group) → return scatter_tokens(x)
    Who takes in all ranks? The summands of this group's ranks belong together.
forgets_the_group: gather_tokens(gradient, ctx.group) → gather_tokens(gradient)
    Who takes in all ranks? backward needs the group, too: ctx.group.
"""),
)


# sum_of_parts(x, group): a g whose backward sums once more

LR = 0.25


def sum_of_parts(x, group=None):
    return tensor_parallel.SumOverRanks.apply(x, group)


def as_found(x, group=None):
    with warnings.catch_warnings(action="ignore"):  # torch has deprecated it
        return torch.distributed.nn.functional.all_reduce(x, group=group or dist.group.WORLD)


def _run_sum(answer, size):
    autograd_must_know()
    rank, group = dist.get_rank(), group_of(size)
    weight = torch.tensor([1.0, 2.0], dtype=torch.float64) * 10**rank
    weight.requires_grad_()
    seen = {}
    for step in (1, 2):
        begun = len(recorder().records)
        out = answer(weight * 1, group)
        seen[f"out in step {step}"] = whole(out)
        (out * torch.tensor([3.0, 4.0])).sum().backward()
        seen[f"gradient in step {step}"] = whole(weight.grad)
        seen[f"calls in step {step}"] = calls(begun)
        weight.data -= LR * weight.grad  # SGD: AdamW would hide any factor
        weight.grad = None
    return seen


def _sums(world_size: int, size: int) -> list[dict]:
    """The specification: a sum's gradient is that of each of its summands."""
    right = []
    for rank in range(world_size):
        first, seen = rank - rank % size, {}
        for step in (1, 2):
            total = sum(10.0**member for member in range(first, first + size))
            moved = size * LR * (step - 1)
            out = torch.tensor([total - 3 * moved, 2 * total - 4 * moved])
            seen[f"out in step {step}"] = whole(out)
            seen[f"gradient in step {step}"] = whole(torch.tensor([3.0, 4.0]))
            seen[f"calls in step {step}"] = {"all_reduce": 1}
        right.append(seen)
    return right


sum_of_parts = Exercise(
    reference=sum_of_parts,
    trials=lambda: in_groups(_run_sum, _sums, "2 steps of SGD"),
    explain=of_group,
    hints={
        "start": "out is right. Each rank's summand is in it once: if it grows by 1, by how much "
        "does the sum grow? That is its gradient.",
        "values": "Forward sums, backward passes the gradient on: SumOverRanks.apply(x, group).",
        "wire": "One all-reduce a step, in forward. The gradient is whole on every rank already.",
    },
    praise="one all-reduce, none backward. The loss would have fallen with it, too, under AdamW.",
    note="Your own g. torch.distributed.nn.functional's backward sums: right for other uses.",
    mistakes=[
        Mistake.written(
            as_found,
            "The gradient is W times too large: this all_reduce's backward sums over the ranks "
            "once more. Every rank has the whole gradient already. (AdamW would hide it.)",
        ),
        *mistakes("""
divides: return tensor_parallel.SumOverRanks.apply(x, group) →
    ⏎return tensor_parallel.SumOverRanks.apply(x, group) / dist.get_world_size(group)
    out is the mean now. The ranks hold summands of one product: add them up.
passes_it_on: tensor_parallel.SumOverRanks.apply(x, group) → x + 0
    Nothing was summed: out is this rank's summand alone.
of_the_world: SumOverRanks.apply(x, group) → SumOverRanks.apply(x)
    Who takes in all ranks? The summands of this group's ranks belong together.
"""),
    ],
)
