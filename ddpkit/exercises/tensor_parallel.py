"""Checkers of notebook 11: f and g, a row-parallel layer, an MLP with a bug, each rank's data.

In the trials of f and g rank r brings multiples of 10ʳ, so that each digit of a sum counts a rank.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ddpkit import tensor_parallel as library
from ddpkit.runtime.recorder import recorder

from .checker import Exercise, Rounded, Trial, first_difference, mistakes

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these

WORLDS = (2, 2), (3, 3), (4, 2), (1, 1)  # ranks, and of those how many share a model


def group_of(size: int) -> dist.ProcessGroup | None:
    """Make the group of `size` consecutive ranks that has this one; None if that is all ranks."""
    return None if size == dist.get_world_size() else dist.new_subgroups(size)[0]


def in_groups(program: Callable, right: Callable[..., list], what: str, *args) -> Iterator[Trial]:
    """Make trials of a program, called with `args` and the number of ranks that share a model.

    right: called with the world size, that number, and `args`; returns each rank's result.
    """
    for world_size, size in WORLDS:
        groups = f"in groups of {size}, " if size < world_size else ""
        right_ones = right(world_size, size, *args)
        yield Trial(world_size, program, (*args, size), right_ones, what=groups + what)


def of_group(trial: Trial, *_) -> str | None:
    """Explain an answer that is right until ranks share a model in groups; None without groups."""
    told = (
        "Right where all ranks share a model, wrong where only those of a group do, as on a mesh. "
        "Who takes in all ranks? A call without `group`, its size, or a rank's place in it."
    )
    return told if "in groups" in trial.what else None


def calls(since: int, until: int | None = None) -> dict[str, int]:
    """Count this rank's calls from record `since` to `until`, for example {"all_reduce": 1}."""
    return dict(Counter(record.op for record in recorder().records[since:until]))


def autograd_must_know() -> None:
    """Forbid in this rank, from now on, backward through collectives that autograd doesn't know."""
    warnings.filterwarnings("error", ".*autograd kernel was not registered")


def whole(tensor: torch.Tensor | None) -> Rounded | None:
    """List a tensor's numbers, rounded: the order in which they were added doesn't show."""
    return None if tensor is None else Rounded(tensor.flatten().tolist(), 6)


# CopyToRanks and SumOverRanks: f and g

BESIDE = "gradient of x, where x is added to out,"


def _read_pair(trial: Trial, rank: int, right: dict, seen: dict) -> str | None:
    if first_difference(right, seen) == BESIDE:
        return (
            "Right alone, but here x also goes past it, and the way past needs the same gradient. "
            "Did backward change the one it was given? Work on gradient.clone()."
        )
    return of_group(trial)


def _dtype(size: int) -> torch.dtype:
    return torch.float64 if size == 3 else torch.float32


def _run_pair(answer, gradient_of_all, size):
    rank, group = dist.get_rank(), group_of(size)
    x = torch.tensor([1.0, 2.0], dtype=_dtype(size)) * 10**rank  # another would show on the wire
    gradient = torch.tensor([3.0, 4.0], dtype=_dtype(size))
    gradient *= 1 if gradient_of_all else 10**rank
    x.requires_grad_()
    begun = len(recorder().records)
    out = answer.apply(x, group)
    then = len(recorder().records)
    seen = {"out": out.tolist(), "x afterwards": x.tolist()}
    seen["calls in forward"] = calls(begun, then)
    out.backward(gradient.clone())
    seen |= {"gradient of x": whole(x.grad), "calls in backward": calls(then)}
    seen["dtype of out"] = str(out.dtype)
    seen["bytes of its call"] = sum(record.bytes for record in recorder().records[begun:])
    x.grad = None
    (answer.apply(x, group) + x).backward(gradient)
    return seen | {BESIDE: whole(x.grad)}


def _pair(world_size: int, size: int, sums_forward: bool) -> list[dict]:
    """The specification: sums over the ranks of a group in forward, or in backward."""
    right, called = [], {"all_reduce": 1}
    for rank in range(world_size):
        first = rank - rank % size
        tally = sum(10.0**member for member in range(first, first + size))
        summed, own = (tally, 10.0**rank) if sums_forward else (10.0**rank, tally)
        passed, beside = (1.0, 1.0) if sums_forward else (own, 10.0**rank)
        right.append(
            {
                "out": [summed, 2 * summed],
                "x afterwards": [10.0**rank, 2 * 10.0**rank],
                "calls in forward": called if sums_forward else {},
                "gradient of x": [3 * passed, 4 * passed],
                "calls in backward": {} if sums_forward else called,
                "dtype of out": str(_dtype(size)),
                "bytes of its call": 2 * _dtype(size).itemsize,
                BESIDE: [
                    3 * (passed + beside),
                    4 * (passed + beside),
                ],
            }
        )
    return right


CopyToRanks = Exercise(
    reference=library.CopyToRanks,
    trials=lambda: in_groups(
        _run_pair, _pair, "rank r's x is [1, 2]·10ʳ, its gradient [3, 4]·10ʳ", False
    ),
    explain=_read_pair,
    hints={
        "start": "forward passes x on. backward is given this rank's gradient, and returns the "
        "sum of all ranks' and None, for the group.",
        "values": "total = gradient.clone(); dist.all_reduce(total, group=ctx.group); "
        "return total, None.",
        "error": "backward returns something for each argument of forward after ctx: a gradient "
        "for x, None for the group.",
    },
    praise="nothing forward, one all-reduce backward.",
    mistakes=mistakes("""
passes_the_gradient_on: dist.all_reduce(total, group=ctx.group) → pass
    That is the gradient of this rank's use of x alone. Every rank has used x: its gradient is the
    sum over all of them. Forward can't tell you, its values are right.
sums_both_ways: return x.view_as(x) → dist.all_reduce(total := x.clone())⏎return total
    x is the same on every rank: pass it on in forward, and sum in backward only.
averages: return total, None → return total / dist.get_world_size(), None
    The ranks used x for different things, and their gradients add up. A mean is due where each
    rank has its own data; here all have the same.
on_what_it_was_given: gradient.clone(memory_format=torch.contiguous_format) → gradient
    The gradient that backward is given may be others', too: here it also goes past f, as past
    every block of a transformer. Work on gradient.clone().
of_the_world: dist.all_reduce(total, group=ctx.group) → dist.all_reduce(total)
    Who takes in all ranks?
returns_its_result: dist.all_reduce(total, group=ctx.group) → total = dist.all_reduce(total)
    all_reduce works in place and returns None: the sum is in the tensor that you gave it.
"""),
)

SumOverRanks = Exercise(
    reference=library.SumOverRanks,
    trials=lambda: in_groups(
        _run_pair, _pair, "rank r's x is [1, 2]·10ʳ; all have the gradient [3, 4]", True
    ),
    explain=_read_pair,
    hints={
        "start": "The mirror of f: forward returns the sum of all ranks' x, backward passes the "
        "gradient on.",
        "values": "total = x.clone(); dist.all_reduce(total, group=group); return total. "
        "Backward: gradient, None.",
        "error": "backward returns something for each argument of forward after ctx.",
    },
    praise="one all-reduce forward, nothing backward.",
    mistakes=mistakes("""
sums_both_ways: return gradient, None → dist.all_reduce(total := gradient.clone())
    ⏎return total, None
    The gradient is W times too large. Every rank has the gradient of the sum already, and a summand
    has the same as its sum: pass it on. (The loss would fall all the same, with AdamW at least.)
divides_the_gradient: return gradient, None → return gradient / dist.get_world_size(), None
    The gradient is W times too small. A summand has the same gradient as the sum: if one rank's x
    grows by 1, so does the sum.
sums_nothing: dist.all_reduce(total, group=group) → pass
    out is this rank's summand alone. Sum over the ranks in forward.
averages: return total → return total / dist.get_world_size()
    out is the mean. The ranks hold summands of one product: add them up.
of_the_world: dist.all_reduce(total, group=group) → dist.all_reduce(total)
    Who takes in all ranks?
in_x_itself: x.clone(memory_format=torch.contiguous_format) → x
    x holds the sum now, and whoever uses x beside g sees that. Work on x.clone().
"""),
)


# RowParallelLinear

OUTPUTS = 3


def _linear(inputs: int) -> nn.Linear:
    linear = nn.Linear(inputs, OUTPUTS, dtype=torch.float64)
    linear.weight.data = torch.arange(1.0, 1 + inputs * OUTPUTS).double().view(OUTPUTS, inputs)
    linear.bias.data = torch.tensor([100.0, 200.0, 300.0], dtype=torch.float64)
    return linear


def _rows(world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make x, whole, and the gradient of out: 2 rows; with one more axis where 3 ranks share it."""
    rows = (2, 1) if world_size == 3 else (2,)
    x = torch.arange(1.0, 1 + 4 * world_size).double().view(*rows, 2 * world_size)
    return x, torch.arange(1.0, 7.0).double().view(*rows, OUTPUTS)


def _run_row(answer, size):
    autograd_must_know()
    layer = answer(_linear(2 * size), group_of(size))
    x, gradient = _rows(size)
    mine = x.chunk(size, dim=-1)[dist.get_rank() % size].clone().requires_grad_()
    begun = len(recorder().records)
    out = layer(mine)
    then = len(recorder().records)
    forward = calls(begun, then)
    out.backward(gradient)
    seen = {"out": whole(out), "gradient of weight": whole(layer.weight.grad)}
    seen |= {"gradient of bias": whole(layer.bias.grad), "gradient of x": whole(mine.grad)}
    return seen | {"calls in forward": forward, "calls in backward": calls(then)}


def _row(world_size: int, size: int) -> list[dict]:
    """The specification: one process with the whole layer."""
    linear, (x, gradient) = _linear(2 * size), _rows(size)
    weights = (gradient.flatten(0, -2).T @ x.flatten(0, -2)).chunk(size, dim=-1)
    inputs = (gradient @ linear.weight.data).chunk(size, dim=-1)
    return [
        {
            "out": whole(x @ linear.weight.data.T + linear.bias.data),
            "gradient of weight": whole(weights[rank % size]),
            "gradient of bias": whole(gradient.flatten(0, -2).sum(0)),
            "gradient of x": whole(inputs[rank % size]),
            "calls in forward": {"all_reduce": 1},
            "calls in backward": {},
        }
        for rank in range(world_size)
    ]


RowParallelLinear = Exercise(
    reference=library.RowParallelLinear,
    trials=lambda: in_groups(_run_row, _row, "a bias of 100, 200, 300"),
    explain=of_group,
    hints={
        "start": "The product of what this rank has is one summand of the result. g adds them up.",
        "values": "out = SumOverRanks.apply(F.linear(x, self.weight), self.group); the bias "
        "belongs to the sum, not to each summand.",
        "error": "self.weight is outputs × inputs, as in nn.Linear: F.linear(x, self.weight). "
        "And g is called by SumOverRanks.apply(…, self.group).",
    },
    praise="one all-reduce forward, none backward, and the bias counted once.",
    mistakes=mistakes("""
bias_on_every_rank: self.weight), self.group)⏎return out if self.bias is None else out + self.bias →
    ⏎self.weight, self.bias), self.group)⏎return out
    The bias is in the result W times: each rank added it to its summand. Add it once, to the sum.
divides_the_bias: out + self.bias → self.leave.apply(
        ⏎F.linear(x, self.weight, self.bias / dist.get_world_size(self.group)), self.group)
    The result is right, but the bias gets a gradient W times too small: it is divided by W on its
    way. AdamW wouldn't notice, SGD does. Add the bias whole, to the sum.
forgets_the_bias: out if self.bias is None else out + self.bias → out
    The bias is missing: add it to the sum.
sums_nothing: self.leave.apply(F.linear(x, self.weight), self.group) → F.linear(x, self.weight)
    That is this rank's summand, with the bias: the other ranks' inputs are missing. g sums.
of_the_world: self.leave.apply(F.linear(x, self.weight), self.group) → self.leave.apply(
    ⏎    F.linear(x, self.weight))
    Who takes in all ranks?
by_all_reduce: self.leave.apply(F.linear(x, self.weight), self.group) → F.linear(x, self.weight)
    ⏎dist.all_reduce(out)
    SumOverRanks.apply(x, group) is the same sum, and backward knows it.
with_f_before: F.linear(x, self.weight) → F.linear(CopyToRanks.apply(x, self.group), self.weight)
    The result is right, the gradient of x isn't: it is summed over ranks that have different x. f
    is for what is the same on every rank, and stands before a column-parallel layer.
"""),
)


# ParallelMLP: what is wrong with it?


class ParallelMLP(nn.Module):
    def __init__(self, up, down):
        super().__init__()
        rank, world_size = dist.get_rank(), dist.get_world_size()
        self.up_weight = nn.Parameter(up.weight.detach().chunk(world_size)[rank].clone())
        self.up_bias = nn.Parameter(up.bias.detach().chunk(world_size)[rank].clone())
        self.down_weight = nn.Parameter(down.weight.detach().chunk(world_size, 1)[rank].clone())
        self.down_bias = nn.Parameter(down.bias.detach().clone())

    def forward(self, x):
        x = library.CopyToRanks.apply(x)
        x = F.gelu(F.linear(x, self.up_weight, self.up_bias))
        x = F.linear(x, self.down_weight)  # a summand, so without the bias
        return library.SumOverRanks.apply(x) + self.down_bias


LR = 0.25


def _layers(hidden: int) -> tuple[nn.Linear, nn.Linear]:
    """Make the layers of an MLP of width 2, with biases of zeros."""
    up, down = nn.Linear(2, hidden, dtype=torch.float64), nn.Linear(hidden, 2, dtype=torch.float64)
    up.weight.data = torch.arange(2.0 * hidden).double().view(hidden, 2) / 8 - 0.5
    down.weight.data = torch.arange(2.0 * hidden).double().view(2, hidden) / 16 - 0.5
    up.bias.data.zero_()
    down.bias.data.zero_()
    return up, down


def _train_mlp(forward, parameters, bias) -> dict:
    """Run two steps of SGD, with the same rows on every rank."""
    x, seen = torch.tensor([[1.0, 2.0], [3.0, -1.0]], dtype=torch.float64), {}
    for step in (1, 2):
        rows = x.clone().requires_grad_()
        out = forward(rows)
        (out - 1).square().sum().backward()
        seen[f"out in step {step}"] = whole(out)
        seen[f"gradient of x in step {step}"] = whole(rows.grad)
        seen[f"gradient of down's bias in step {step}"] = whole(bias.grad)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.data -= LR * parameter.grad
                parameter.grad = None
    return seen


def _run_mlp(answer):
    autograd_must_know()
    model = answer(*_layers(2 * dist.get_world_size()))
    begun = len(recorder().records)
    seen = _train_mlp(model, list(model.parameters()), model.down_bias)
    return seen | {"calls in 2 steps": calls(begun)}


def _serial_mlp(world_size: int) -> dict:
    """The specification: one process with the whole MLP."""
    up, down = _layers(2 * world_size)
    seen = _train_mlp(
        lambda x: down(F.gelu(up(x))), [*up.parameters(), *down.parameters()], down.bias
    )
    return seen | {"calls in 2 steps": {"all_reduce": 4}}


ParallelMLP = Exercise(
    reference=ParallelMLP,
    trials=lambda: [
        Trial(W, _run_mlp, (), [_serial_mlp(W)] * W, what="biases 0 at first, 2 steps of SGD")
        for W in (2, 4, 1)
    ],
    hints={
        "start": "Step 1 is right, step 2 isn't: which of the numbers were zeros in step 1 only?",
        "values": "What is added to each rank's summand is in the sum W times: add it to the sum.",
        "wire": "Two all-reduces a step, one of them backward.",
    },
    praise="two steps as one process takes them, with one all-reduce forward and one backward.",
    note="The bias of down, once. ddpkit.tensor_parallel.RowParallelLinear is this layer.",
    mistakes=mistakes("""
as_found: self.down_weight)  # a summand, so without the bias →
    ⏎self.down_weight, self.down_bias)⏎return library.SumOverRanks.apply(x)
    It learns as it was found. Step 1 hides it: what is 0 there, and is added on every rank?
divides_the_bias: return library.SumOverRanks.apply(x) + self.down_bias →
    ⏎return library.SumOverRanks.apply(x + self.down_bias / dist.get_world_size())
    What comes out is right now, but the gradient of the bias is divided by W on its way: SGD moves
    it W times too little, and AdamW hides that. Don't divide, add it once.
on_rank_0: return library.SumOverRanks.apply(x) + self.down_bias →
    ⏎return library.SumOverRanks.apply(x + self.down_bias if dist.get_rank() == 0 else x)
    What comes out is right now, but only rank 0's bias gets a gradient: the ranks' copies of it go
    apart, and a checkpoint keeps any one of them. Every rank must add it, to the sum.
sums_its_gradient: + self.down_bias → + library.CopyToRanks.apply(self.down_bias)
    The result is right, but the gradient of the bias is W times too large: every rank has all of it
    already, since all have the same rows.
without_f: library.CopyToRanks.apply(x) → x
    f is needed: without it, the gradient of x is that of this rank's hidden numbers alone.
"""),
)


# rows_and_seed(batch, mesh)


def rows_and_seed(batch, mesh):
    """Return this rank's rows of a batch and a seed for dropout, on a mesh of data × tensor."""
    row, rows = mesh.get_local_rank("data"), mesh["data"].size()
    return batch.chunk(rows)[row], row


def _run_share(answer, shape):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    rows, seed = answer(torch.arange(4), mesh)
    seeds = [torch.zeros((), dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(seeds, torch.tensor(int(seed)))
    alike = [rank for rank, other in enumerate(seeds) if other == seed]
    return {"rows": rows.tolist(), "ranks with its seed": alike}


def _shares(data: int, tensor: int) -> list[dict]:
    """The specification: ranks in a row of the mesh share a seed, and their part of 4 rows."""
    right = []
    for rank in range(data * tensor):
        row, rows_each = rank // tensor, 4 // data
        ranks = list(range(row * tensor, (row + 1) * tensor))
        mine = list(range(row * rows_each, (row + 1) * rows_each))
        right.append({"rows": mine, "ranks with its seed": ranks})
    return right


rows_and_seed = Exercise(
    reference=rows_and_seed,
    trials=lambda: [
        Trial(d * t, _run_share, ((d, t),), _shares(d, t), what=f"a mesh of {d} × {t}, 4 rows")
        for d, t in ((1, 2), (2, 2), (4, 1), (2, 3))
    ],
    hints={
        "start": "Ranks that share a model compute one batch together: all is alike on them. Which "
        "of a rank's two numbers in the mesh do they have in common?",
        "values": 'mesh.get_local_rank("data") is alike on ranks that share a model: that piece of '
        'batch.chunk(mesh["data"].size()), in order.',
        "error": "Return two things: this rank's part of the batch, a tensor, and a whole number.",
    },
    praise="ranks that share a model have the same rows and the same dropout; others have others.",
    mistakes=mistakes("""
rows_by_rank: batch.chunk(rows)[row] → batch.chunk(dist.get_world_size())[dist.get_rank()]
    Ranks that share a model have different rows: each multiplies its part of the weights with
    other tokens, and g adds up what doesn't belong together. Nobody complains. Same rows for them.
rows_by_place_in_the_model: "data"), mesh["data"] → "tensor"), mesh["tensor"]
    Ranks that share a model are those with the same number in "data". These have the same rows.
dealt_to_columns: mesh["data"].size() → mesh["tensor"].size()
    A batch is dealt out to the rows of the mesh, mesh["data"].size() of them: columns share it.
all_rows: batch.chunk(rows)[row] → batch
    All ranks have all rows: data parallelism computes the same twice. Each group that shares a
    model has its own part.
seed_by_rank: [row], row → [row], dist.get_rank()
    Ranks that share a model draw different dropout: what ought to be alike on them goes apart.
one_seed: [row], row → [row], 0
    Ranks with different rows draw the same dropout, again and again: give them different seeds.
"""),
)
