"""Checkers of notebook 11, of a whole model: a block, the loss, norms' gradients, one length."""

import math

import torch
import torch.distributed as dist
from torch import nn

from ddpkit import tensor_parallel
from ddpkit.models import Block, torch_attention
from ddpkit.runtime.recorder import recorder
from ddpkit.tensor_parallel import sequence as sequence_parallel

from .checker import Exercise, Mistake, Rounded, Trial, mistakes
from .score import SPARE, spare
from .tensor_parallel import autograd_must_know, calls, group_of, in_groups, of_group, whole

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these

# split_block(block)

WIDTH, HEADS = 16, 8


def _block(kv_heads: int) -> Block:
    torch.manual_seed(0)
    block = Block(WIDTH, HEADS, 0.0, torch_attention, kv_heads).double()
    for parameter in block.parameters():
        nn.init.normal_(parameter)
    return block


def _through(block: nn.Module) -> dict:
    """Run some rows through a block, forward and backward; return the results."""
    x = torch.randn(1, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    begun = len(recorder().records) if dist.is_initialized() else 0
    out = block(x)
    then = len(recorder().records) if dist.is_initialized() else 0
    out.square().sum().backward()
    seen = {"out": whole(out), "gradient of x": whole(x.grad)}
    seen["gradient of a norm"] = whole(block.mlp_norm.weight.grad)
    if dist.is_initialized():
        seen |= {"calls in forward": calls(begun, then), "calls in backward": calls(then)}
    return seen


def _run_block(answer, kv_heads, size):
    block = answer(_block(kv_heads), group_of(size))
    torch.manual_seed(1)
    return _through(block) | {KEPT: sum(p.numel() for p in block.parameters())}


KEPT = "numbers in the parameters of a rank"


def _blocks(world_size: int, kv_heads: int) -> list[dict]:
    """The specification: the whole block in one process."""
    block = _block(kv_heads)
    torch.manual_seed(1)
    right = _through(block)
    right |= {"calls in forward": {"all_reduce": 2}, "calls in backward": {"all_reduce": 2}}
    split = [block.qkv.weight, block.out.weight, *block.mlp[0].parameters(), block.mlp[2].weight]
    numbers = sum(p.numel() for p in block.parameters())
    numbers -= sum(p.numel() for p in split) * (world_size - 1) // world_size
    return [right | {KEPT: numbers}] * world_size


split_block = Exercise(
    reference=sequence_parallel.split_block,
    trials=lambda: [
        Trial(W, _run_block, (kv, size), _blocks(size, kv) * (W // size), what=said)
        for W, size, kv, said in (
            (2, 2, 8, "8 heads"),
            (2, 2, 4, "8 heads, 4 of keys and values"),
            (4, 4, 8, "8 heads"),
            (4, 2, 8, "in groups of 2, 8 heads"),
        )
    ],
    explain=of_group,
    hints={
        "start": "qkv and mlp[0] column-parallel, out and mlp[2] row-parallel; then block.heads "
        "and block.kv_heads become those of this rank.",
        "values": "qkv holds all rows of q, then all of k, then all of v, and each of the three is "
        "dealt out by itself: ColumnParallelLinear(block.qkv, group, [q, kv, kv]).",
        "wire": "Two all-reduces forward, two backward: one f before qkv, and one before mlp[0].",
        "error": "A split block has heads / W heads: do block.heads and block.kv_heads say so? "
        "And a row-parallel layer takes this rank's part of its inputs, a column-parallel one all. "
        "W is the size of `group`, which every layer must know, too.",
    },
    praise="two all-reduces forward, two backward, and 1/W of every weight.",
    mistakes=mistakes("""
cuts_qkv_in_one: (block.qkv, group, [q, kv, kv], enter) → (block.qkv, group, enter=enter)
    qkv holds all rows of q, then those of k, then those of v: cut in one piece, rank 0 gets queries
    and the last rank values. Each of the three is dealt out by itself: [q, kv, kv].
of_the_world: world_size = → group = None⏎world_size =
    Who takes in all ranks?
all_like_q: [q, kv, kv] → [q, q, q]
    With grouped heads, k and v have fewer rows than q: [q, kv, kv] are the rows of each.
keeps_all_heads: block.heads //= world_size⏎block.kv_heads //= world_size → pass
    A rank has the queries, keys and values of heads / W heads: block.heads and block.kv_heads must
    say so.
"""),
)


# vocabulary_cross_entropy(logits, targets, start)

PARTS = 5, 3, 6, 4  # tokens of the vocabulary, by rank
SHAPE = "shape of the result"
NUMBERS = "numbers that a rank gave away for each target, where 3 are enough,"


def _scores(world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make logits; targets: each rank's first and last. e^x is inf on the last rank, 0 in row 0."""
    parts = torch.arange(sum(PARTS[:world_size])).split(PARTS[:world_size])
    vocabulary = sum(map(len, parts))
    targets = torch.stack([part[at] for part in parts for at in (0, -1)]).flip(0)
    logits = torch.arange(float(len(targets) * vocabulary), dtype=torch.float64)
    logits = (7 * logits % 11 - 5).view(len(targets), vocabulary)
    logits[:, parts[-1]] += 900
    logits[0] -= 1800  # here e to the power of each is 0
    return logits, targets


def _run_loss(answer, size):
    autograd_must_know()
    rank, group = dist.get_rank() % size, group_of(size)
    logits, targets = _scores(size)
    logits += 1e3 * (dist.get_rank() // size)  # other groups have other maxima, and equal losses
    mine = logits.split(PARTS[:size], dim=-1)[rank].clone().requires_grad_()
    begun = len(recorder().records)
    losses = answer(mine, targets, sum(PARTS[:rank]), group)
    given = 0
    for record in recorder().records[begun:]:
        given += record.bytes / (8 * len(targets))
    seen = {SHAPE: list(losses.shape), "losses": whole(losses)}
    (losses * torch.arange(1.0, 1 + len(targets))).sum().backward()
    seen["gradient of this rank's logits"] = whole(mine.grad)
    return seen | {NUMBERS: 3 if given <= 3 else given}


def _losses(world_size: int, size: int) -> list[dict]:
    """The specification: one process that has all logits."""
    logits, targets = _scores(size)
    logits.requires_grad_()
    losses = logits.logsumexp(-1) - logits[range(len(targets)), targets]
    (losses * torch.arange(1.0, 1 + len(targets))).sum().backward()
    parts = logits.grad.split(PARTS[:size], dim=-1) * (world_size // size)
    right = {SHAPE: list(losses.shape), "losses": whole(losses), NUMBERS: 3}
    return [right | {"gradient of this rank's logits": whole(part)} for part in parts]


vocabulary_cross_entropy = Exercise(
    reference=tensor_parallel.vocabulary_cross_entropy,
    trials=lambda: in_groups(_run_loss, _losses, "5, 3, 6, 4 tokens of the vocabulary by rank"),
    says={
        SHAPE: "the result on rank {rank} has the shape {got}, not {expected}. One loss for each "
        "target: no mean, no sum.",
        NUMBERS: "losses and gradients are right, but rank {rank} gave away {got} numbers for each "
        "target, where 3 are enough. Sum what a rank has by itself, and only then over ranks.",
    },
    explain=of_group,
    hints={
        "start": "The loss is log Σ e^(x − m) − (x of the target − m), m being the target's "
        "largest x on any rank: detach it, and dist.all_reduce(m, dist.ReduceOp.MAX, group).",
        "values": "Sums over ranks by SumOverRanks.apply(x, group), known to backward. Target's x: "
        "its rank gathers it at targets - start, the others bring 0.",
        "wire": "Three numbers a target: the maximum, the sum of powers, the target's logit.",
        "error": "gather needs indices below the number of this rank's tokens, from 0 on: where "
        "the target isn't among them, take 0, and don't count what comes.",
    },
    praise="three numbers a target, however many tokens a vocabulary has.",
    mistakes=mistakes("""
maximum_on_each_rank: of_local.where(mine, 0) → (of_local + largest).where(mine, 0) - largest
    Each rank subtracted the maximum from its summand, so it goes off W times. Subtract it from the
    target's logit alone, or once from the sum.
starts_at_its_rank: among(targets, start, → among(targets, dist.get_rank(group) * logits.shape[-1],
    Ranks have different numbers of tokens here, so a rank's first isn't token rank · n. It is
    `start`.
its_own_maximum: dist.all_reduce(largest, dist.ReduceOp.MAX, group) → pass
    Each rank subtracted its own maximum, so their powers don't fit together. One maximum for all:
    dist.all_reduce(largest, dist.ReduceOp.MAX).
no_maximum: logits.detach().amax(-1) → torch.zeros_like(logits[..., 0])
    e^900 is inf, and e^-1800 is 0. First subtract a target's largest logit on any rank.
one_maximum: logits.detach().amax(-1) → logits.detach().amax().expand(len(logits)).clone()
    That is one maximum for all targets. Each has its own logits, and its own maximum: .amax(-1),
    or a row far below the others has no powers left.
keeps_the_graph: logits.detach().amax(-1) → logits.amax(-1)
    The maximum is only subtracted, and cancels: a constant. Take it from logits.detach().
its_own_powers: SumOverRanks.apply(both, group) → both[0], SumOverRanks.apply(own, group)
    Each rank divides by the powers of its own tokens, as if there were no others: sum them over
    the ranks.
of_the_world: logits = widened(logits) → group = None⏎logits = widened(logits)
    Who takes in all ranks?
counts_from_0: among(targets, start, → among(targets, 0,
    Rank 1's first token isn't token 0 of the vocabulary: subtract start.
target_without_the_maximum: of_local = shifted.gather → of_local = logits.gather
    The maximum is subtracted from all logits but the target's: ln Σ e^(x - m) - (x of target - m).
"""),
)


# sum_copies(copies)


def _run_copies(answer, size):
    """Run the answer on gradients 1, 2, 3, … times 10ʳ on rank r; one parameter has none."""
    rank, group = dist.get_rank(), group_of(size)
    shapes = {"a norm's weight": (2,), "not used": (2,), "a split weight": (1, 2), "a bias": (2,)}
    shapes |= {"a split bias": (2,), "a router": (1, 1)}  # axes don't tell copies from parts
    copies, given, first = {}, {}, 1.0
    parameters = {what: nn.Parameter(torch.zeros(shape)) for what, shape in shapes.items()}
    for what, parameter in parameters.items():
        copies[parameter] = 1 if "split" in what else size
        if what != "not used":
            numbers = torch.arange(first, first + parameter.numel())
            given[what] = parameter.grad = numbers.view_as(parameter) * 10**rank
            first += parameter.numel()
    begun = len(recorder().records)
    answer(copies, group)
    seen = {f"gradient of {what}": whole(given.get(what, p.grad)) for what, p in parameters.items()}
    sent = sum(record.bytes for record in recorder().records[begun:])
    return seen | {"bytes of its calls": sent}


def _copies(world_size: int, size: int) -> list[dict]:
    """The specification, worked out by hand."""
    right = []
    for rank in range(world_size):
        first = rank - rank % size
        tally = sum(10.0**member for member in range(first, first + size))
        right.append(
            {
                "gradient of a norm's weight": [tally, 2 * tally],
                "gradient of a split weight": [n * 10.0**rank for n in (3, 4)],
                "gradient of a bias": [n * tally for n in (5, 6)],
                "gradient of a split bias": [n * 10.0**rank for n in (7, 8)],
                "gradient of a router": [9 * tally],
                "gradient of not used": None,
                "bytes of its calls": 5 * 4 if size > 1 else 0,
            }
        )
    return right


sum_copies = Exercise(
    reference=sequence_parallel.sum_copies,
    trials=lambda: in_groups(_run_copies, _copies, "rank r's gradients are 10ʳ times 1, 2, 3…"),
    explain=of_group,
    hints={
        "start": "What is held by more than one rank has seen the tokens of one rank only: its "
        "gradients are summands. What is split, count 1, has its whole gradient already.",
        "values": "For each parameter with count > 1 and a gradient: "
        "dist.all_reduce(p.grad, group=group).",
        "error": "copies is {parameter: number of ranks}, and a parameter that wasn't used has no "
        "gradient: leave it out.",
    },
    praise="what all ranks hold alike stays alike, and what is split is left alone.",
    mistakes=mistakes("""
sums_nothing: dist.all_reduce(flat, group=group) → pass
    A norm's gradient is that of this rank's tokens: each rank would move its copy another way, and
    the loss still falls. Sum it over the ranks, in p.grad itself.
averages: dist.all_reduce(flat, group=group) → dist.all_reduce(flat, group=group)
    ⏎flat /= dist.get_world_size()
    The loss is a mean over all tokens already, and each rank has the summands of its tokens: add
    them up, no mean. (AdamW wouldn't notice.)
of_the_world: dist.all_reduce(flat, group=group) → dist.all_reduce(flat)
    Who takes in all ranks?
sums_everything: if count > 1 and p.grad → if p.grad
    A split parameter has other numbers on each rank, and its gradient is whole: leave it alone.
the_first_only: dist.all_reduce(flat, group=group) → dist.all_reduce(summands[0])
    ⏎flat = torch.cat([gradient.flatten() for gradient in summands])
    Norms' weights aren't all: every parameter that all ranks hold alike, such as the bias after a
    reduce-scatter.
in_new_tensors: gradient.copy_(total.view_as(gradient)) → gradient = total.view_as(gradient)
    The gradients are as before. Write into p.grad itself: dist.all_reduce, or p.grad.copy_(...).
"""),
)


# clip_grad_norm(copies, max_norm)

CASES = {"long": 1.0, "a little too long": 1.0, "short": 1e4, "all zeros": 1.0}
CASES |= {"without a limit": math.inf}


def _gradients(rank: int, what: str) -> dict[str, tuple[list[float], bool]]:
    """Return {parameter: (this rank's gradient, whether it is split)}; `what`: a key of `CASES`."""
    times = {"all zeros": 0.0, "a little too long": 0.1}.get(what, 1.0)
    split, alike = [3.0 * (rank + 1), -4.0 * (rank + 1)], [12.0, 0.0, 5.0]
    return {
        "weight": ([times * x for x in split], True),
        "norm": ([times * x for x in alike], False),
    }


def _run_clip(answer, size):
    seen, group = {}, group_of(size)
    begun = len(recorder().records)
    for what, max_norm in CASES.items():
        copies, given = {nn.Parameter(torch.zeros(7)): 1}, []  # not used, so without a gradient
        for numbers, split in _gradients(dist.get_rank(), what).values():
            parameter = nn.Parameter(torch.zeros(len(numbers)))
            given.append(torch.tensor(numbers))  # to be shortened in place
            parameter.grad = given[-1]
            copies[parameter] = 1 if split else size
        norm = answer(copies, max_norm, group)
        seen[f"length, {what}"] = None if norm is None else round(float(norm), 3)
        seen[f"gradients, {what}"] = Rounded(torch.cat(given).tolist(), 3)
    return seen | {SPARE: spare(recorder().records[begun:], len(CASES))}


def _clipped(world_size: int, size: int) -> list[dict]:
    """The specification: the whole model's gradient in one list, each number once."""
    seen = [{} for _ in range(world_size)]
    for what, max_norm in CASES.items():
        ranks = [_gradients(rank, what) for rank in range(world_size)]
        for rank, gradients in enumerate(ranks):
            first = rank - rank % size
            numbers = list(gradients["norm"][0])
            for other in ranks[first : first + size]:
                numbers += other["weight"][0]
            length = math.hypot(*numbers)
            factor = min(1.0, max_norm / (length + 1e-6))
            mine = gradients["weight"][0] + gradients["norm"][0]
            seen[rank][f"length, {what}"] = round(length, 3)
            seen[rank][f"gradients, {what}"] = Rounded([factor * x for x in mine], 3)
    return [right | {SPARE: "few"} for right in seen]


def by_pytorch(copies, max_norm, group=None):
    return nn.utils.clip_grad_norm_(copies, max_norm)


clip_grad_norm = Exercise(
    reference=tensor_parallel.clip_grad_norm,
    trials=lambda: in_groups(_run_clip, _clipped, "[3, -4]·(r+1) is split, [12, 0, 5] alike"),
    explain=of_group,
    hints={
        "start": "The length of the whole model's gradient: the root of the sum of all squares, "
        "each number once, whoever has it and however many do.",
        "values": "A rank adds g.square().sum() / count for each parameter; all_reduce that one "
        "number; then the root. What W ranks have alike is so counted W times 1/W. And one "
        "factor for all gradients: max_norm / length, 1 at most.",
        "hang": "Every rank must call all_reduce, whatever its own gradients are.",
        "error": "A parameter that wasn't used has no gradient: leave it out.",
    },
    praise="one length on all ranks, each number of the model in it once.",
    mistakes=[
        Mistake.written(
            by_pytorch,
            "PyTorch's takes the length of what this rank has. Sum the squares over the ranks "
            "first, and what all hold alike once: else each rank has another factor.",
        ),
        *mistakes("""
divides_before_it_squares: .square().sum() / count → .div(count).square().sum()
    What n ranks hold alike has its squares divided by n²: the gradient was divided before it was
    squared. Square first, then divide by n.
counts_copies: .square().sum() / count → .square().sum()
    What all ranks hold alike is in it W times: the gradient seems longer than it is, and is cut too
    short. Divide its squares by the number of copies.
of_this_rank: dist.all_reduce(squared, group=group) → pass
    That is the length of what this rank has. The other ranks' parts are missing, and each rank
    would shorten what they have alike by another factor: from then on it differs.
of_the_world: dist.all_reduce(squared, group=group) → dist.all_reduce(squared)
    Who takes in all ranks?
lengthens: .clamp(max=1) →
    A short gradient was made longer. Leave it alone: the factor is 1 at most.
each_by_itself: (norm + 1e-6) → (gradient.norm() + 1e-6)
    Each tensor was shortened by its own length. One factor for all, or the gradient turns.
returns_the_new_length: return norm → return norm.clamp(max=max_norm)
    Return the length that the gradient had: it is what one logs.
in_new_tensors: gradient *= → gradient = gradient *
    The gradients are as before. Write into them in place: gradient *= factor.
"""),
    ],
)
