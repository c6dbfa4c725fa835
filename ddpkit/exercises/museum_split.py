"""Pieces of the museum: tensor and sequence parallelism, and one norm."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import mse_loss

from ddpkit.runtime.wire import recorder
from ddpkit.tensor_parallel import (
    ColumnParallelLinear,
    CopyToRanks,  # noqa: F401  repairs use it
    GatherTokens,
    RowParallelLinear,
    SplitLayer,
    SumOverRanks,
)

from .museum_case import RANKS, Case, all_rows, mlp, serial_step, sgd
from .museum_piece import Piece, factor, factor_of, see, value

SECOND = "gradient of second.weight"


class SumAndSum(torch.autograd.Function):
    """Sum over ranks, in backward too, as torch.distributed.nn.functional.all_reduce does."""

    @staticmethod
    def forward(ctx, x):
        return SumOverRanks.apply(x, None)

    @staticmethod
    def backward(ctx, gradient):
        return SumOverRanks.apply(gradient, None)


def all_reduces():
    """Count this rank's all-reduces so far."""
    return sum(record.op == "all_reduce" for record in recorder().records)


def replicated_bias(case):
    class Row(SplitLayer):  # its inputs are dealt out
        def forward(self, x):
            part = F.linear(x, self.weight, self.bias)
            return SumOverRanks.apply(part, None)

    model = mlp(case)
    model.first = ColumnParallelLinear(model.first)
    model.second = Row(model.second, {"weight": 1}, None)
    optimizer = sgd(model)
    x, y = all_rows(case)
    out = model(x)
    mse_loss(out, y).backward()
    optimizer.step()
    return {"output": out, **see(model)}


def serial_with_output(case):
    model = mlp(case)
    x, y = all_rows(case)
    out = model(x)
    mse_loss(out, y).backward()
    sgd(model).step()
    return {"output": out, **see(model)}


def times_in_the_output(got, right):
    """Measure how often the bias is in the output, if the case is `Case(3, 1)`."""
    bias = mlp(Case(3, 1)).second.bias
    return 1 + factor_of(got[0]["output"] - right[0]["output"], bias.expand_as(got[0]["output"]))


replicated_bias = Piece(
    code=replicated_bias,
    serial=serial_with_output,
    case=Case(3, 1),
    meshes=RANKS,
    source="pytorch/torchtitan#4245, ec30db9d0",
    symptom="A checkpoint made on one GPU gives other texts on three. Trained from scratch, all "
    "is well.",
    asks="how often is the bias of second in the output?",
    measure=times_in_the_output,
    choices="""
a: SumOverRanks.apply(part, None) → SumAndSum.apply(part)
    The sum's backward sends nothing: the gradients of all ranks' outputs have to be added.
b: F.linear(x, self.weight, self.bias) → F.linear(x, self.weight)
    SumOverRanks.apply(part, None) → SumOverRanks.apply(part, None) + self.bias
    The bias is whole on each rank, and is added before the sum.
c: mse_loss(out, y).backward() → (mse_loss(out, y) / case.ranks).backward()
    Every tensor rank has the loss, so it is counted W times.
""",
    why="W times: it learns to be 1/W as large. Add what isn't split behind the sum.",
)


def bias_shared_out(case):
    class Row(SplitLayer):
        def forward(self, x):
            bias = self.bias / dist.get_world_size()  # summed below
            part = F.linear(x, self.weight, bias)
            return SumOverRanks.apply(part, None)

    model = mlp(case)
    model.first = ColumnParallelLinear(model.first)
    model.second = Row(model.second, {"weight": 1}, None)
    optimizer = sgd(model)
    x, y = all_rows(case)
    mse_loss(model(x), y).backward()
    optimizer.step()
    return model


bias_shared_out = Piece(
    code=bias_shared_out,
    serial=serial_step,
    case=Case(3, 1),
    meshes=RANKS,
    source="a repair of the piece before, as often proposed",
    symptom="Outputs are those of one process, but for rounding. It learns a little more slowly.",
    asks="what is the gradient of second's bias, as a multiple of the right one?",
    measure=factor("gradient of second.bias"),
    choices="""
a: bias = self.bias / dist.get_world_size()  # summed below → bias = self.bias
    The bias isn't in the output as often as it should be.
b: SumOverRanks.apply(part, None) → SumAndSum.apply(part) / dist.get_world_size()
    The outputs are summed where their mean is due.
c: bias = self.bias / dist.get_world_size()  # summed below →
    part = F.linear(x, self.weight, bias) → part = F.linear(x, self.weight)
    return SumOverRanks.apply(part, None) → return SumOverRanks.apply(part, None) + self.bias
    What is divided in forward is divided in backward, too.
""",
    why="1/W: forward is right, and each rank's copy learns at 1/W of the rate. The gradient of "
    "such a copy is a summand: sum it, or add the bias behind g.",
)


def summed_bias(case):
    class Row(SplitLayer):
        def forward(self, x):
            bias = self.bias if dist.get_rank() == 0 else self.bias * 0
            part = F.linear(x, self.weight, bias)
            return SumOverRanks.apply(part, None)

    model = mlp(case)
    model.first = ColumnParallelLinear(model.first)
    model.second = Row(model.second, {"weight": 1}, None)
    optimizer = sgd(model)
    x, y = all_rows(case)
    mse_loss(model(x), y).backward()
    dist.all_reduce(model.second.bias.grad)
    optimizer.step()
    return model


summed_bias = Piece(
    code=summed_bias,
    serial=serial_step,
    case=Case(3, 1),
    meshes=RANKS,
    source="written for this course: right",
    symptom="Before the all-reduce, the gradient of the bias is 0 on all ranks but one.",
    asks="how many times the right gradient has the bias of second, at the step?",
    measure=factor("gradient of second.bias"),
    choices="""
a: dist.all_reduce(model.second.bias.grad) → pass
    All ranks have the same loss, so no gradient has to be sent.
b: dist.all_reduce(model.second.bias.grad) →
    ⏎dist.all_reduce(model.second.bias.grad)⏎model.second.bias.grad /= case.ranks
    A sum where the mean is due: the bias's gradient is W times too large.
c: SumOverRanks.apply(part, None) → SumAndSum.apply(part)
    In backward, gradients of the outputs aren't summed.
""",
    why="One rank adds the bias, so one has its gradient; the sum with zeros tells the others.",
)


def sum_that_sums_again(case):
    class Row(SplitLayer):
        def forward(self, x):
            part = F.linear(x, self.weight)
            return SumAndSum.apply(part) + self.bias

    model = mlp(case)
    model.first = ColumnParallelLinear(model.first)
    model.second = Row(model.second, {"weight": 1}, None)
    optimizer = sgd(model)
    x, y = all_rows(case)
    mse_loss(model(x), y).backward()
    optimizer.step()
    return model


sum_that_sums_again = Piece(
    code=sum_that_sums_again,
    serial=serial_step,
    case=Case(3, 1),
    meshes=RANKS,
    source="NVIDIA/Megatron-LM#559; pytorch#58005, #121587",
    symptom="SumAndSum sums over ranks in forward and in backward, as all_reduce in "
    "torch.distributed.nn.functional does. Loss and outputs are right; it diverges at the usual "
    "rate.",
    asks="how many times too large is the gradient of second.weight?",
    measure=factor(SECOND),
    choices="""
a: SumAndSum.apply(part) → SumOverRanks.apply(part, None)
    Its backward sums gradients that every rank has whole.
b: + self.bias → + self.bias / case.ranks
    The bias is added on every rank.
c: mse_loss(model(x), y).backward() → (mse_loss(model(x), y) / case.ranks).backward()
    Ranks of a tensor group have the same loss, which is counted W times: it has to be divided.
""",
    why="W times in all that lies before it, and once in the bias behind it, so no factor of the "
    "loss mends it. The adjoint of a sum of W different inputs is a sum; but here W ranks hold the "
    "same output, and count the same loss W times.",
)


class Gain(nn.Module):
    """Multiply by a norm's weight, a number for each column."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width).double())

    def forward(self, x):
        return x * self.weight


def norm_of_my_tokens(case):
    torch.manual_seed(case.seed)
    width = case.ranks
    linear = nn.Linear(width, width * 2, bias=False).double()
    split = ColumnParallelLinear(linear, enter=GatherTokens)
    model = nn.Sequential(Gain(width), split)
    optimizer = sgd(model)
    tokens = torch.eye(width).double().expand(2, -1, -1)
    mine = tokens[:, dist.get_rank() :][:, :1]
    model(mine).square().sum().backward()
    optimizer.step()
    return model


def serial_gain(case):
    torch.manual_seed(case.seed)
    width = case.ranks
    model = nn.Sequential(nn.Linear(width, width * 2, bias=False).double())
    model.insert(0, Gain(width))
    model(torch.eye(width).double().expand(2, -1, -1)).square().sum().backward()
    sgd(model).step()
    return model


norm_of_my_tokens = Piece(
    code=norm_of_my_tokens,
    serial=serial_gain,
    case=Case(4, 1),
    meshes=RANKS,
    source="NVIDIA/Megatron-LM#1446; EleutherAI/gpt-neox#1257",
    symptom="With sequence parallelism the loss is as before. Norms' weights differ by rank.",
    asks="each token has a column of its own, and there are 4: how many have left a gradient in "
    "the norm's weight on rank 0?",
    measure=lambda got, right: float((got[0]["gradient of 0.weight"] != 0).sum()),
    choices="""
a: model(mine).square().sum().backward() → (model(mine).square().sum() / case.ranks).backward()
    Every rank computes the loss of all tokens, which is counted W times.
b: enter=GatherTokens → enter=CopyToRanks
    Tokens must not be gathered, as each rank needs its own only.
c: optimizer.step() → dist.all_reduce(model[0].weight.grad)⏎optimizer.step()
    The norm's weight is on all ranks, but each has seen its own tokens only.
""",
    why="A summand, 1 token of W: sum over the group, no mean, since the loss is one for all.",
)


def f_three_times(case):
    torch.manual_seed(case.seed)
    layers = [nn.Linear(4, 12).double() for _ in range(3)]
    q, k, v = [ColumnParallelLinear(layer) for layer in layers]
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    before = all_reduces()
    out = q(x) * k(x) + v(x)  # attention's stand-in
    out.square().sum().backward()
    return {"gradient of x": x.grad, "calls": all_reduces() - before}


def serial_three(case):
    torch.manual_seed(case.seed)
    q, k, v = [nn.Linear(4, 12).double() for _ in range(3)]
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    (q(x) * k(x) + v(x)).square().sum().backward()
    return {"gradient of x": x.grad, "calls": 1}  # the budget


f_three_times = Piece(
    code=f_three_times,
    serial=serial_three,
    case=Case(3, 1),
    meshes=RANKS,
    source="found in published code: f for each of q, k, v",
    symptom="All gradients are right. On a slow wire it is slower than colleagues' code.",
    asks="how many all-reduces in backward?",
    measure=value("calls"),
    choices="""
a: x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True) →
    ⏎x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    ⏎inputs = CopyToRanks.apply(x)
    q, k, v = [ColumnParallelLinear(layer) for layer in layers] →
    ⏎class Identity:⏎    apply = staticmethod(lambda x, group: x)
    ⏎q, k, v = [ColumnParallelLinear(layer, enter=Identity) for layer in layers]
    q(x) * k(x) + v(x) → q(inputs) * k(inputs) + v(inputs)
    Each layer has its own f, where one before all three is enough.
b: out.square().sum().backward() → (out.square().sum() / case.ranks).backward()
    x's gradient is a sum over ranks, three times.
c: q(x) * k(x) + v(x) → SumOverRanks.apply(q(x) * k(x) + v(x), None)
    The sum over ranks is missing in forward.
""",
    why="Three where one is due. No twin sees it, since all values are right: count the calls.",
)


def optimizer_of_the_old(case):
    model = mlp(case)
    optimizer = sgd(model)  # first, as in the serial script
    model.first = ColumnParallelLinear(model.first)
    model.second = RowParallelLinear(model.second)
    x, y = all_rows(case)
    mse_loss(model(x), y).backward()
    optimizer.step()
    return model


optimizer_of_the_old = Piece(
    code=optimizer_of_the_old,
    serial=serial_step,
    case=Case(3, 1),
    meshes=RANKS,
    source="intelligent-machine-learning/dlrover#584; huggingface/accelerate#2665",
    symptom="Gradients are right on all ranks, and of their usual size. The loss doesn't move.",
    asks="how many of the model's four tensors does the step change?",
    measure=lambda got, right: float(sum(changed(got[0]).values())),
    choices="""
a: optimizer.step() → optimizer.step()⏎optimizer.step()
    The first step of an optimizer only fills its state.
b: optimizer = sgd(model)  # first, as in the serial script →
    optimizer.step() → optimizer = sgd(model)⏎optimizer.step()
    The optimizer has parameters that aren't in the model any more.
c: optimizer.step() → optimizer.zero_grad()⏎optimizer.step()
    The optimizer still has gradients of the step before.
""",
    why="None. An optimizer holds tensors, not names: shard first, then make it.",
)


def changed(got):
    before = dict(mlp(Case(3, 1)).named_parameters())
    return {name: not torch.equal(got[name], tensor) for name, tensor in before.items()}


# One norm: gradients of known length, one split, one on all ranks


class Lengths(nn.Module):
    """Compute a loss with known gradients: of `mine` 3, 4, 12, 84 by rank, of `copied` as given.

    mine: (1,), this rank's part, named "mine0" on rank 0. copied: (1,), alike on all ranks. ranks:
    those whose parts this holds, all on the one process; by default this one.
    """

    def __init__(self, copied: float, seed: int, ranks: Sequence[int] = ()):
        super().__init__()
        torch.manual_seed(seed)
        start = torch.rand(2).double()
        self.ranks = ranks or [dist.get_rank()]
        for rank in self.ranks:
            self.register_parameter(f"mine{rank}", nn.Parameter(start[:1].clone()))
        self.copied = nn.Parameter(start[1:].clone())
        self.of_copied = copied

    @property
    def mine(self) -> nn.Parameter:
        return getattr(self, f"mine{dist.get_rank()}")

    def forward(self):
        lengths = 3.0, 4.0, 12.0, 84.0
        parts = [lengths[rank] * getattr(self, f"mine{rank}").sum() for rank in self.ranks]
        return sum(parts) + self.of_copied * self.copied.sum()


def copied_counted_each(case):
    model = Lengths(copied=12, seed=case.seed)  # mine: 3, 4
    optimizer = sgd(model)
    model().backward()
    gradients = [p.grad for p in model.parameters()]
    squares = sum(g.square().sum() for g in gradients)
    dist.all_reduce(squares)
    norm = squares.sqrt()
    for gradient in gradients:
        gradient /= norm
    optimizer.step()
    return {"norm": norm, "copied": model.copied}


def serial_lengths(copied):
    def serial(case):
        model = Lengths(copied, case.seed, range(case.ranks))
        model().backward()
        norm = torch.cat([p.grad for p in model.parameters()]).norm()
        for parameter in model.parameters():
            parameter.grad /= norm
        sgd(model).step()
        return {"norm": norm, "copied": model.copied}

    return serial


copied_counted_each = Piece(
    code=copied_counted_each,
    serial=serial_lengths(12.0),
    case=Case(2),
    meshes=tuple(Case(ranks) for ranks in (2, 3, 4)),
    source="NVIDIA-NeMo/RL#3788; ROCm/TransformerEngine#715 (there 1.52 times)",
    symptom="With tensor parallelism the logged norm is larger, and models learn more slowly.",
    asks="gradients are 3 and 4 for what is split, 12 for what both ranks hold: how many times too "
    "large is the norm?",
    measure=factor("norm"),
    choices="""
a: dist.all_reduce(squares) → dist.all_reduce(squares, dist.ReduceOp.MAX)
    Squares are summed over ranks where the largest is due.
b: squares.sqrt() → (squares / case.ranks).sqrt()
    Squares are summed over ranks, and their mean is due.
c: sum(g.square().sum() for g in gradients) → (
    ⏎    gradients[0].square().sum() + gradients[1].square().sum() / case.ranks)
    What all ranks hold is counted by each.
""",
    why="√(9 + 16 + 2·144) = 17.7 instead of 13.",
)


def norm_of_my_part(case):
    model = Lengths(copied=4, seed=case.seed)  # mine: 3, 4, 12
    optimizer = sgd(model)
    model().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return {"norm": norm, "copied": model.copied}


norm_of_my_part = Piece(
    code=norm_of_my_part,
    serial=serial_lengths(4.0),
    case=Case(3),
    meshes=tuple(Case(ranks) for ranks in (2, 3, 4)),
    source="deepspeedai/DeepSpeed#1801, found in BLOOM-176B after 15 days",
    symptom="LayerNorm weights, which tensor ranks hold alike, drift apart. Losses agree.",
    asks="the split gradient is 3, 4, 12 on ranks 0, 1, 2, the copied one 4: what is "
    "rank 0's norm, as a multiple of the right one? (That is of all four numbers; the copy once.)",
    measure=factor("norm"),
    choices="""
a: norm = nn → dist.all_reduce(model.copied.grad)⏎norm = nn
    What all ranks hold isn't summed over them.
b: norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0) →
    ⏎norm = model.mine.grad.square().sum()
    ⏎dist.all_reduce(norm)
    ⏎norm = (norm + model.copied.grad.square().sum()).sqrt()
    ⏎for parameter in model.parameters():⏎    parameter.grad /= norm
    Each rank clips by the norm of what it holds, each by another.
c: clip_grad_norm_(model.parameters(), 1.0) → clip_grad_norm_([model.copied], 1.0)
    What is split must be left out of the norm, as it differs by rank.
""",
    why="5 instead of √(9 + 16 + 144 + 16) = 13.6. All ranks must divide by one number.",
)


def one_norm(case):
    model = Lengths(copied=4, seed=case.seed)
    optimizer = sgd(model)
    model().backward()
    squares = model.mine.grad.square().sum()
    if dist.get_rank() == case.ranks - 1:  # what all hold, once
        squares += model.copied.grad.square().sum()
    dist.all_reduce(squares)
    norm = squares.sqrt()
    for parameter in model.parameters():
        parameter.grad /= norm
    optimizer.step()
    return {"norm": norm, "copied": model.copied}


one_norm = Piece(
    code=one_norm,
    serial=serial_lengths(4.0),
    case=Case(3),
    meshes=tuple(Case(ranks) for ranks in (2, 3, 4)),
    source="written for this course: right",
    symptom="One rank has other squares than the others before the all-reduce.",
    asks="what is each rank's norm, as a multiple of the norm of one process?",
    measure=factor("norm"),
    choices="""
a: if dist.get_rank() == case.ranks - 1:  # what all hold, once →
    ⏎if dist.get_rank() == 0:⏎    squares *= 1⏎if True:
    Ranks have to add up the same, or their norms differ.
b: norm = squares.sqrt() → norm = (squares / case.ranks).sqrt()
    The sum over ranks has to be divided by their number.
c: parameter.grad /= norm → parameter.grad /= norm * case.ranks
    Gradients of what is split are summands, and have to be divided by W.
""",
    why="Each number of the model counts once, and it doesn't matter who brings it.",
)
