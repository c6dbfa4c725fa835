"""Checkers of notebook 12: rows gathered, blocks by hand, calls, sums, clipping, a bug, and Muon.

Row r of a parameter begins with 10 · (r + 1): a row in the wrong place shows. In `sharded_step`
rank r's x is a multiple of 10ʳ: a rank that is missing from a gradient shows.
"""

import weakref
from collections import Counter
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

from ddpkit import muon
from ddpkit.fsdp import by_hand
from ddpkit.runtime.recorder import recorder

from .checker import Exercise, Mistake, Trial, mistakes, unwritten_memory_shows
from .tensor_parallel import group_of, in_groups, of_group

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these

RAGGED = "the last ranks have fewer rows, or none"


def _parameter(length: int, dtype=torch.float64) -> torch.Tensor:
    rows = 10 * torch.arange(1, length + 1)
    return (rows[:, None] + torch.arange(2)).to(dtype)


def _mine(whole: torch.Tensor) -> torch.Tensor:
    """Cut this rank's rows out of a parameter: the specification."""
    rows = (len(whole) + dist.get_world_size() - 1) // dist.get_world_size()
    return whole[dist.get_rank() * rows :][:rows].clone()


def _calls(begun: int) -> dict[str, int]:
    return dict(Counter(record.op for record in recorder().records[begun:]))


def _sent(begun: int) -> int:
    return sum(record.bytes for record in recorder().records[begun:])


# gather_rows(shard, length)

LENGTHS = (4, 5, 3, 1)


def _to_gather() -> dict[str, torch.Tensor]:
    """Make parameters by name: of each length a matrix and a bias, in two dtypes."""
    found = {}
    for length in LENGTHS:
        found[f"{length} rows of float64"] = _parameter(length)
        found[f"a bias of {length} numbers of float32"] = _parameter(length, torch.float32)[:, 0]
    return found


def _run_gather(answer):
    seen = {}
    world_size = dist.get_world_size()
    for what, whole in _to_gather().items():
        shard = _mine(whole)
        begun = len(recorder().records)
        with unwritten_memory_shows():
            got = answer(shard, len(whole))
        seen[what] = got.tolist(), str(got.dtype)
        seen[f"calls, {what}"] = _calls(begun)
        rows = (len(whole) + world_size - 1) // world_size
        more = _sent(begun) > rows * whole[0].nbytes
        seen[f"sent more than {rows} rows, {what}"] = more
        seen[f"the shard afterwards, {what}"] = shard.tolist() == _mine(whole).tolist()
    return seen


def _gather_trials():
    for world_size in (2, 3, 1):
        right = {}
        for what, whole in _to_gather().items():
            rows = (len(whole) + world_size - 1) // world_size
            right[what] = whole.tolist(), str(whole.dtype)
            right[f"calls, {what}"] = {"all_gather": 1}
            right[f"sent more than {rows} rows, {what}"] = False
            right[f"the shard afterwards, {what}"] = True
        yield Trial(world_size, _run_gather, (), [right] * world_size, what=RAGGED)


gather_rows = Exercise(
    reference=by_hand.gather_rows,
    trials=_gather_trials,
    hints={
        "start": "An all-gather wants as much from every rank: pad the shard with zeros to "
        "⌈length/W⌉ rows, -(-length // W), gather, and cut the padding off the end.",
        "values": "shard.new_zeros(rows, *shard.shape[1:]) has the shard's dtype; write the shard "
        "into its first rows; dist.all_gather(parts, padded); torch.cat(parts)[:length].",
        "hang": "Every rank must bring as many numbers: also one that has no row.",
        "error": "All ranks must bring tensors of one shape and dtype: pad. A bias has one axis.",
    },
    praise="right on 1, 2 and 3 ranks, with one message of ⌈length/W⌉ rows.",
    mistakes=mistakes("""
unpadded: padded = shard.new_zeros(rows, *shard.shape[1:])⏎padded[: len(shard)] = shard →
    ⏎padded = shard.contiguous()
    A shard went as it is, and the last ranks' is shorter: an all-gather wants the same number of
    each. Pad it to ⌈length/W⌉ rows.
keeps_the_padding: [:length] →
    There are rows of zeros at the end: cut the padding off.
pads_in_front: padded[: len(shard)] = shard → padded[rows - len(shard) :] = shard
    The padding belongs behind the shard's rows: only then is it at the end, where it can be cut.
in_float32: shard.new_zeros(rows, *shard.shape[1:]) → torch.zeros(rows, *shard.shape[1:])
    The result has another dtype than the shard: shard.new_zeros keeps it.
of_its_own: dist.all_gather(parts, padded, group=group) → parts = [padded] * world_size
    Every rank repeated its own shard. Nothing was sent.
stacked: torch.cat(parts)[:length] → torch.stack(parts)[:length]
    torch.stack makes a new axis, one a rank: torch.cat lays rows below rows.
"""),
)


# sharded_step(blocks, shards, lengths, x, loss)

WIDTHS = (2, 3, 5, 2)  # a block maps WIDTHS[n] numbers to WIDTHS[n + 1]


def _weights() -> list[torch.Tensor]:
    found = []
    for inputs, outputs in pairwise(WIDTHS):
        numbers = torch.arange(outputs * inputs, dtype=torch.float64) % 3 + 1
        found.append(numbers.view(outputs, inputs))
    return found


def _input(rank: int) -> torch.Tensor:
    return torch.tensor([[1.0, 2.0], [0.0, 1.0]], dtype=torch.float64) * 10**rank


def _block(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ weight.T)


def _loss(y: torch.Tensor) -> torch.Tensor:
    return dist.get_world_size() * y.sum()


ALIVE = "weights whole in memory while a block computes, where two are enough,"
GRADIENTS = "whole gradients in memory while a block computes, where one is enough,"


def _run_blocks(answer):
    alive, most = [], []
    gradients, most_gradients = [], []

    def keep(weight):
        gradients.append(weakref.ref(weight.grad.untyped_storage()))

    def watched(x, weight):
        most.append(1 + sum(ref() is not None for ref in alive))
        most_gradients.append(sum(ref() is not None for ref in gradients))
        alive.append(weakref.ref(weight.untyped_storage()))
        if weight.is_leaf and weight.requires_grad:
            weight.register_post_accumulate_grad_hook(keep)
        return _block(x, weight)

    weights = _weights()
    shards = [nn.Parameter(_mine(weight)) for weight in weights]
    lengths = [len(weight) for weight in weights]
    x = _input(dist.get_rank())
    begun = len(recorder().records)
    value = answer([watched] * len(shards), shards, lengths, x, _loss)
    seen = {"loss": None if value is None else torch.as_tensor(value).item()}
    for number, shard in enumerate(shards):
        seen[f"gradient of shard {number}"] = None if shard.grad is None else shard.grad.tolist()
    seen[ALIVE] = max(2, *most, 0)
    seen[GRADIENTS] = max(1, *most_gradients, 0)
    return seen | {"calls": _calls(begun)}


def _serial_blocks(world_size: int) -> list[dict]:
    """The specification: one process with all batches."""
    weights = [weight.requires_grad_() for weight in _weights()]
    losses = []
    for rank in range(world_size):
        y = _input(rank)
        for weight in weights:
            y = _block(y, weight)
        losses.append(y.sum())
    sum(losses).backward()
    right = []
    for rank in range(world_size):
        seen = {"loss": world_size * losses[rank].item()}
        for number, weight in enumerate(weights):
            rows = -(-len(weight) // world_size)
            mine = weight.grad[rank * rows : (rank + 1) * rows]
            seen[f"gradient of shard {number}"] = mine.tolist()
        count = len(weights)
        calls = {"all_gather": 2 * count, "reduce_scatter": count}
        right.append(seen | {ALIVE: 2, GRADIENTS: 1, "calls": calls})
    return right


def _keeps_weights(blocks, shards, lengths, x, loss):
    inputs, weights = [], []
    for block, shard, length in zip(blocks, shards, lengths, strict=True):
        inputs.append(x)
        weights.append(by_hand.gather_rows(shard.detach(), length))
        x = block(x, weights[-1])
    y = x.requires_grad_()
    value = loss(y)
    value.backward()
    gradient = y.grad
    for number in reversed(range(len(blocks))):
        x = inputs[number].detach().requires_grad_()
        weight = weights[number].requires_grad_()
        blocks[number](x, weight).backward(gradient)
        shards[number].grad = by_hand.reduce_rows(weight.grad)
        gradient = x.grad
    return value.detach()


sharded_step = Exercise(
    reference=by_hand.sharded_step,
    helpers=(by_hand.gather_rows, by_hand.reduce_rows),
    trials=lambda: [
        Trial(W, _run_blocks, (), _serial_blocks(W), what="three blocks, rank r's x is 10ʳ")
        for W in (2, 3, 1)
    ],
    hints={
        "start": "Forward, under torch.no_grad(): keep each block's input, gather, compute. Then "
        "the loss's gradient of y. Backward, from the last block: gather again, compute again from "
        "the kept input, .backward(gradient), reduce_rows of the weight's gradient.",
        "values": "x = inputs[n].detach().requires_grad_() and weight = gather_rows(...)"
        ".requires_grad_() are new leaves: after blocks[n](x, weight).backward(gradient), x.grad "
        "is the gradient for the block before.",
        "error": "A tensor made under no_grad has no graph: y.requires_grad_() starts one at y.",
    },
    says={
        ALIVE: "rank {rank} has {got} weights whole while a block computes; {expected} are enough: "
        "drop each after its block, and gather it again in backward."
    },
    praise="two gathers and a reduction for each block, and two weights whole at a time at most.",
    mistakes=[
        Mistake.written(
            _keeps_weights,
            "All weights stay in memory from forward to backward, so a rank holds the whole "
            "model: gather again in backward.",
        ),
        *mistakes("""
from_the_first: in reversed(range(len(blocks))) → in range(len(blocks))
    Backward begins with the last block.
forgets_the_chain: gradient = x.grad → pass
    Each block got the gradient of the loss. Backward of a block gives that of its input, x.grad,
    which is the gradient of what the block before returned.
always_from_x: inputs[number].detach() → inputs[0].detach()
    Each block has its own input.
its_own_gradient: shards[number].grad = reduce_rows(weight.grad) →
    ⏎rows = -(-lengths[number] // dist.get_world_size())
    ⏎shards[number].grad = weight.grad[dist.get_rank() * rows :][:rows]
    Each rank kept its own gradient, cut into rows: the others' is missing. reduce_rows adds them.
sums: = reduce_rows(weight.grad) → = dist.get_world_size() * reduce_rows(weight.grad)
    That is the sum over the ranks; reduce_rows returns the mean already.
returns_the_output: return value.detach() → return y.detach().sum()
    Return the loss.
reduces_nothing: shards[number].grad = reduce_rows(weight.grad) → pass
    A shard has no gradient: set shards[n].grad.
"""),
    ],
)


# backward_calls(order, kept)

ORDERS = {
    "four blocks": (("b0", "b1", "b2", "b3"), ()),
    "one block": (("b0",), ()),
    "a root that was kept": (("b0", "b1", "root"), ("root",)),
    "all kept": (("b0", "b1"), ("b0", "b1")),
    "b0 used twice": (("b0", "b1", "b0"), ()),
    "b0 twice in a row": (("b0", "b0"), ()),
    "one in the middle that was kept": (("b0", "b1", "b2"), ("b1",)),
    "b0 used twice and kept": (("b0", "b1", "b0"), ("b0",)),
}
BACKWARD = {  # by hand, as PyTorch's fully_shard does it
    "four blocks": "AG b3, AG b2, RS b3, AG b1, RS b2, AG b0, RS b1, RS b0",
    "one block": "AG b0, RS b0",
    "a root that was kept": "AG b1, RS root, AG b0, RS b1, RS b0",
    "all kept": "RS b1, RS b0",
    "b0 used twice": "AG b0, AG b1, RS b0, AG b0, RS b1, RS b0",
    "b0 twice in a row": "AG b0, RS b0, AG b0, RS b0",
    "one in the middle that was kept": "AG b2, RS b2, AG b0, RS b1, RS b0",
    "b0 used twice and kept": "AG b1, RS b0, AG b0, RS b1, RS b0",
}


def _run_calls(answer):
    return {what: ", ".join(answer(list(order), kept)) for what, (order, kept) in ORDERS.items()}


backward_calls = Exercise(
    reference=by_hand.backward_calls,
    trials=lambda: [Trial(1, _run_calls, (), [BACKWARD], what="in words")],
    hints={
        "start": "Go through `order` from the end, with a set of the units that are whole. For "
        "each: gather it if it isn't whole; gather the one before it in `order` if that isn't; "
        "then it is dropped, and its gradients are reduced.",
        "values": "At the first unit of `order` nothing is left to fetch ahead.",
        "error": "Return a list of strings: ['AG b1', 'RS b1'].",
    },
    praise="PyTorch's order, call by call: one unit is fetched ahead.",
    mistakes=mistakes("""
fetches_nothing_ahead: order[max(place - 1, 0) : place + 1] → order[place : place + 1]
    Each unit's weights are asked for when backward enters it, and it stands and waits: fetch those
    of the next unit before this one computes.
fetches_two_ahead: max(place - 1, 0) → max(place - 2, 0)
    Two units are fetched ahead: three are whole at a time. One ahead is enough.
fetches_all: order[max(place - 1, 0) : place + 1] → order[: place + 1]
    All weights are gathered before anything is dropped: the whole model in memory.
next_one_first: for unit in reversed(needed) → for unit in needed
    First this unit's own weights, which backward waits for, then the next one's.
forgets_what_is_kept: whole = set(kept) → whole = set()
    A unit whose weights are still whole needn't be gathered.
drops_nothing: whole.discard(order[place]) → pass
    A unit that is used twice was dropped after its first backward: it must be gathered again.
reduces_at_the_end: calls.append(f"RS {order[place]}")⏎return calls → pass
    ⏎return calls + [f"RS {unit}" for unit in reversed(order)]
    A unit's gradients are reduced when backward leaves it, not after all: until then they would
    be whole in memory.
gathers_what_is_here: if unit not in whole: → if True:
    A unit that was fetched ahead is there already.
"""),
)


# accumulate_rows(shard, gradients, late)

SPACING = 256.0  # above it bf16 has no odd numbers


def _micro_gradients(rank: int) -> list[torch.Tensor]:
    """Make three gradients in bf16: rank + 1 times 256, 1 and 1, since 256 + 1 is 256 in bf16."""
    base = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    return [(factor * (rank + 1) * base).bfloat16() for factor in (SPACING, 1.0, 1.0)]


def _run_accumulate(answer):
    world_size = dist.get_world_size()
    seen = {}
    for late in (False, True):
        shard = nn.Parameter(_mine(torch.zeros(3, 2)))
        scaled = [world_size * entry for entry in _micro_gradients(dist.get_rank())]
        for step in (1, 2):  # the second adds to the first: zero_grad wasn't called
            begun = len(recorder().records)
            answer(shard, [entry.clone() for entry in scaled], late)
            what = f"{'late' if late else 'each as it comes'}, step {step}"
            grad = shard.grad
            seen[f"gradient, {what}"] = None if grad is None else (grad.tolist(), str(grad.dtype))
            seen[f"calls, {what}"] = _calls(begun)
    return seen


def _accumulated(world_size: int) -> list[dict]:
    """Return what each rank should see, from all gradients added up in float32."""
    ranks = range(world_size)
    parts = [entry.float() for rank in ranks for entry in _micro_gradients(rank)]
    rows = -(-3 // world_size)
    right = []
    for rank in ranks:
        seen = {}
        for late in (False, True):
            for step in (1, 2):
                what = f"{'late' if late else 'each as it comes'}, step {step}"
                mine = step * sum(parts)[rank * rows : (rank + 1) * rows]
                seen[f"gradient, {what}"] = mine.tolist(), "torch.float32"
                seen[f"calls, {what}"] = {"reduce_scatter": 1 if late else 3}
        right.append(seen)
    return right


accumulate_rows = Exercise(
    reference=by_hand.accumulate_rows,
    helpers=(by_hand.reduce_rows,),
    trials=lambda: [
        Trial(W, _run_accumulate, (), _accumulated(W), what="three micro-batches in bf16")
        for W in (2, 3, 1)
    ],
    hints={
        "start": "Keep a whole sum, `pending`, in the shard's dtype. After each micro-batch, or "
        "with `late` after the last one only, reduce_rows(pending), add the part to shard.grad, "
        "and begin with nothing again.",
        "values": "What was reduced must not be reduced again: pending = None. And 256 + 1 is 256 "
        "in bf16: convert before you add.",
        "error": "shard.grad is None at first.",
    },
    praise="both ways the same gradient, in float32; one reduction where three were.",
    mistakes=mistakes("""
reduces_twice: pending = None  # sent: the next one begins from nothing → pass
    The first micro-batch is in it three times: what has been reduced stayed in the sum, and was
    reduced again with the next.
adds_in_bf16: wide = gradient.to(shard.dtype) → wide = gradient
    256 + 1 is 256 in bf16: convert each gradient before it is added.
never_reduces: number < len(gradients) - 1 → number < len(gradients)
    With `late` nothing was reduced: the last micro-batch must.
the_last_alone: wide if pending is None else pending + wide → wide
    With `late` the last micro-batch's gradient is all there is: add the others.
always_late: if late and number → if number
    Without `late` each micro-batch is reduced as it comes: whole sums would stay in memory.
never_late: if late and number < len(gradients) - 1: → if False:
    With `late` one reduction is enough.
overwrites: part if shard.grad is None else shard.grad + part → part
    shard.grad was overwritten: add to what is there, as backward does.
"""),
)


# clip_all(shards, copies, max_norm)

LIMITS = {"longer than all": 1000.0, "shorter than each": 1.0, "somewhere between": 20.0}


def _clip_parts(rank: int, world_size: int) -> tuple[list[list[float]], list[float]]:
    """Make the numbers of a rank's two shards, none on the last of several, and of its copy."""
    shards = [[3.0 * (rank + 1), 4.0 * (rank + 1)], [600.0 * (rank == 0)]]
    if rank == world_size - 1 and rank > 0:
        shards = [[], []]
    return shards, [12.0, 0.0]


def _run_clip(answer):
    seen = {}
    world_size = dist.get_world_size()
    for half in (False, True):
        for what, limit in LIMITS.items():
            numbers, copy = _clip_parts(dist.get_rank(), world_size)
            shards = [torch.tensor(entry) for entry in numbers]
            if half:  # 600² is more than 65504
                shards = [entry.half() for entry in shards]
            else:
                shards[1].zero_()
            copies = [torch.tensor(copy)]
            begun = len(recorder().records)
            norm = answer(shards, copies, limit)
            name = f"{what}{', fp16' if half else ''}"
            seen[f"length, {name}"] = None if norm is None else round(float(norm), 2)
            seen[f"shards, {name}"] = [_rounded(entry) for entry in shards]
            seen[f"copies, {name}"] = _rounded(copies[0])
            seen[f"bytes sent, {name}"] = max(_sent(begun), 16)
            seen[f"calls, {name}"] = max(1, len(recorder().records) - begun)
    return seen


def _rounded(x: torch.Tensor) -> list[float]:
    return [float(f"{value:.2g}") for value in x.tolist()]


def _clipped(world_size: int) -> list[dict]:
    """Return what each rank should see, from all numbers in one list."""
    parts = [_clip_parts(rank, world_size) for rank in range(world_size)]
    right = [{} for _ in range(world_size)]
    for half in (False, True):
        for what, limit in LIMITS.items():
            numbers = list(parts[0][1])
            for shards, _ in parts:
                numbers += shards[0] + (shards[1] if half else [])
            norm = torch.tensor(numbers, dtype=torch.float64).norm().item()
            factor = min(1.0, limit / norm)
            name = f"{what}{', fp16' if half else ''}"
            for seen, (shards, copy) in zip(right, parts, strict=True):
                kept = shards[1] if half else [0.0 for _ in shards[1]]
                seen[f"length, {name}"] = round(norm, 2)
                clipped = [torch.tensor(entry) * factor for entry in (shards[0], kept)]
                seen[f"shards, {name}"] = [_rounded(entry) for entry in clipped]
                seen[f"copies, {name}"] = _rounded(torch.tensor(copy) * factor)
                seen[f"bytes sent, {name}"] = 16
                seen[f"calls, {name}"] = 1
    return right


def _counts_copies_on_each_rank(shards, copies, max_norm):
    squared = sum(entry.double().square().sum() for entry in [*shards, *copies])
    dist.all_reduce(squared)
    norm = squared.sqrt()
    for entry in [*shards, *copies]:
        entry *= (max_norm / (norm + 1e-6)).clamp(max=1)
    return norm


clip_all = Exercise(
    reference=by_hand.clip_all,
    trials=lambda: [
        Trial(W, _run_clip, (), _clipped(W), what="the last rank has no row") for W in (2, 4, 1)
    ],
    hints={
        "start": "Squares add up: those of the shards over the ranks, by one all_reduce of one "
        "number; those of the copies once, on each rank by itself.",
        "values": "Add squares in float64 (x.double()): 600² is more than fp16 can hold. Then one "
        "factor for all, min(1, max_norm / norm), in place.",
        "hang": "all_reduce on every rank, also on one without any row.",
    },
    praise="one number sent, and copies are counted once.",
    writes=("shards", "copies"),
    same_dtype=False,  # the length may be a float64, whatever the gradients are
    mistakes=[
        Mistake.written(
            _counts_copies_on_each_rank,
            "Every rank has the copies, and every rank added them: they are in the norm W times. "
            "It was so in NeMo RL (#3788).",
        ),
        *mistakes("""
forgets_the_copies: squared += copy.double().square().sum()  # once, not once a rank → pass
    The copies are a part of the gradient, too.
shortens_the_shards_only: in [*shards, *copies] → in shards
    The copies must be shortened by the same factor.
of_one_rank: dist.all_reduce(squared)  # on every rank, also where no row is → pass
    That is the length of one rank's part, and each rank shortens by a factor of its own.
only_with_rows: dist.all_reduce(squared)  # on every rank, also where no row is →
    ⏎if any(shard.numel() for shard in shards):⏎    dist.all_reduce(squared)
    A rank without a row didn't call all_reduce, and the others wait for it.
squares_in_half: shard.double().square().sum() → shard.square().sum()
    600² doesn't fit into fp16: inf. Convert before squaring.
lengthens: .clamp(max=1) →
    A short gradient was made longer.
in_new_tensors: gradient *= (max_norm → gradient = gradient * (max_norm
    Write into the gradients, in place.
"""),
    ],
)


# shard_in_place(module)


class _Tied(nn.Module):
    def __init__(self, length: int):
        super().__init__()
        self.first = nn.Linear(2, length, bias=False, dtype=torch.float64)
        self.other = nn.Linear(2, 3, bias=False, dtype=torch.float64)
        self.last = nn.Linear(2, length, bias=False, dtype=torch.float64)
        self.last.weight = self.first.weight
        with torch.no_grad():
            self.first.weight.copy_(_parameter(length))
            self.other.weight.copy_(_parameter(3))


def _run_tied(answer, length):
    """Shard a module with a tied weight, set first.weight.grad to ones, and take a step of SGD."""
    module = _Tied(length)
    answer(module)
    seen = {"parameters": len(list(module.parameters()))}
    seen["first.weight at first"] = module.first.weight.tolist()
    module.first.weight.grad = torch.ones_like(module.first.weight)
    torch.optim.SGD(module.parameters(), lr=1.0).step()
    for name in ("first", "last", "other"):
        seen[f"{name}.weight after a step"] = getattr(module, name).weight.tolist()
    return seen


def _tied(world_size: int, length: int) -> list[dict]:
    """Return what each rank should see, from lists of rows."""

    def rows(rank, count, minus):
        full = -(-count // world_size)
        found = [[10.0 * (r + 1) - minus, 10.0 * (r + 1) + 1 - minus] for r in range(count)]
        found += [[-minus, -minus]] * (full * world_size - count)
        return found[rank * full : (rank + 1) * full]

    right = []
    for rank in range(world_size):
        seen = {"parameters": 2, "first.weight at first": rows(rank, length, 0.0)}
        for name in ("first", "last"):
            seen[f"{name}.weight after a step"] = rows(rank, length, 1.0)
        right.append(seen | {"other.weight after a step": rows(rank, 3, 0.0)})
    return right


shard_in_place = Exercise(
    reference=by_hand.shard_in_place,
    trials=lambda: [
        Trial(W, _run_tied, (length,), _tied(W, length), what=f"{length} rows, tied")
        for W, length in ((2, 5), (3, 4), (2, 3), (1, 4))
    ],
    says={
        "parameters": "rank {rank} has {got} parameters, expected {expected}: a tied one is one."
    },
    hints={
        "start": "The same parameter hangs in two places. What becomes of it when the loop comes "
        "to the second one, with padding and without?",
        "values": "Remember what was made: made[parameter] = nn.Parameter(mine), and hang the same "
        "object into the second place.",
        "error": "A dict by parameter: nn.Parameter can be a key.",
    },
    praise="one shard under both names, on every rank, padded or not.",
    writes=("module",),
    note="In PyTorch it was pytorch#176076: now fully_shard refuses a weight tied across groups.",
    mistakes=mistakes("""
as_it_was_found: if parameter not in made: → if True:
    It was sharded as it was found: twice. Where no padding is needed, both shards are views of one
    memory, and the tie holds by luck; a padded one is a copy, and last.weight stands still.
ties_by_values: setattr(submodule, name, made[parameter]) →
    ⏎setattr(submodule, name, nn.Parameter(made[parameter].detach().clone()))
    Two shards with the same numbers are still two: hang the same object into both places.
ties_memory_only: setattr(submodule, name, made[parameter]) →
    ⏎setattr(submodule, name, nn.Parameter(made[parameter].data))
    The memory is shared, but there are two parameters: an optimizer would update it twice.
without_padding: if len(mine) < rows: → if False:
    The last ranks' shards must be padded: gathers want the same number of rows from each.
rounds_down: -(-len(parameter) // world_size) → max(1, len(parameter) // world_size)
    ⌈length/W⌉ is rounded up: the last rows have no owner.
"""),
)


# by_owners(shards, numels, owners, function)

SHAPES = (4, 2), (5, 3), (3, 3), (2, 4)
WORKED = "shapes that this rank worked on"


def _matrix(number: int) -> torch.Tensor:
    rows, columns = SHAPES[number]
    matrix = torch.arange(1.0, 1 + rows * columns, dtype=torch.float64).view(rows, columns)
    return matrix + 100 * number


def _of_whole(matrix: torch.Tensor) -> torch.Tensor:  # every row needs all rows
    return matrix - matrix.sum(0)


def _run_owners(answer, world_size):
    """Run the answer in this rank's group of `world_size` ranks; each group has other numbers."""
    group, place = group_of(world_size), dist.get_rank() % world_size
    number = dist.get_rank() // world_size
    matrices = [_matrix(m) + 1000 * number for m in range(len(SHAPES))]
    numels = [muon.numels_by_rank(entry.shape, world_size) for entry in matrices]
    owners = [number % world_size for number in range(len(SHAPES))]
    worked = []

    def function(matrix):
        worked.append(list(matrix.shape))
        return _of_whole(matrix)

    begun = len(recorder().records)
    shards = []
    for entry in matrices:
        rows = -(-len(entry) // world_size)
        shards.append(entry[place * rows :][:rows].clone())
    got = answer(shards, numels, owners, function, group)
    seen = {WORKED: worked}
    for number, entry in enumerate(got):
        seen[f"rows of matrix {number}"] = entry.tolist()
    return seen | {"calls": _calls(begun)}


def _owned(ranks: int, world_size: int) -> list[dict]:
    """Return what each of `ranks` should see, in groups of `world_size`, from whole matrices."""
    right = []
    for every in range(ranks):
        rank = every % world_size
        mine = [list(shape) for number, shape in enumerate(SHAPES) if number % world_size == rank]
        seen = {WORKED: mine}
        for number in range(len(SHAPES)):
            result = _of_whole(_matrix(number) + 1000 * (every // world_size))
            rows = -(-len(result) // world_size)
            seen[f"rows of matrix {number}"] = result[rank * rows : (rank + 1) * rows].tolist()
        right.append(seen | {"calls": {"all_to_all": 2}})
    return right


by_owners = Exercise(
    reference=muon.by_owners,
    helpers=(muon.exchange, muon.end_to_end),
    trials=lambda: in_groups(_run_owners, _owned, "four matrices, matrix m owned by rank m % W"),
    explain=of_group,
    hints={
        "start": "exchange(parts, numels): parts[r] goes to rank r, all in one all-to-all. There: "
        "to each rank its matrices' rows, end to end. Work. Back: to each its rows of results.",
        "values": "numels[m][r] says how much of matrix m comes from rank r: split what arrived "
        "from r by these, over the matrices that this rank owns. cat the parts of one matrix over "
        "the ranks, view(-1, columns).",
        "hang": "Both exchanges on every rank, also on one that owns nothing.",
    },
    says={
        WORKED: "rank {rank} called `function` with the shapes {got}, not {expected}: those of the "
        "whole matrices that it owns."
    },
    praise="each matrix was whole once, on its owner; two all-to-alls for all of them.",
    note="With function = newton_schulz: ddpkit.muon.Muon, to the bit torch.optim.Muon.",
    mistakes=mistakes("""
of_shards: function(whole) → function(shards[m])
    The function was called with this rank's rows. Newton–Schulz of some rows isn't these rows of
    Newton–Schulz, which needs the whole matrix (Moonlight#27): cat what came from all ranks.
shuffled: [cut[r][place] for r in ranks] → [cut[r][place] for r in reversed(ranks)]
    The rows of a matrix are in another order: rank 0 has the first.
sends_no_results_back: results[r].append(rows[r]) → results[r].append(cut[r][place])
    What came back is what was sent: send rows of the result.
of_the_world: expected], group) → expected])
    The first exchange was among all ranks: those that share the matrices are in `group`.
in_the_owners_order: return [found[m] for m in range(len(shards))] → return list(found.values())
    The results are in the order of owners; they belong in that of `shards`.
"""),
)
