"""ddpkit.tensor_parallel: layers that are split equal whole ones, and say what they should.

A model of them, and the well-known mistakes, are in test_sequence_parallel.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from attention_cases import randn
from on_ranks import on_ranks
from torch import nn
from torch.nn.utils import clip_grad_norm_
from training_cases import HALF_THE_DIGITS, sent_by

from ddpkit.split_layers import count_copies, deal, gather
from ddpkit.tensor_parallel import (
    ColumnParallelLinear,
    CopyToRanks,
    RowParallelLinear,
    SumOverRanks,
    VocabParallelEmbedding,
    clip_grad_norm,
    vocabulary_cross_entropy,
)


def close(check, got, expected, *what):
    check.close(got, expected, HALF_THE_DIGITS * (1 + expected.abs().max()), *what)


def both_ways(layer, x):
    """(what `layer` gives for x, the gradient of x, calls forward, calls backward).

    The result is weighted: after a mere sum, all its gradients would be 1.
    """
    x, found = x.clone().requires_grad_(), []
    forward = sent_by(lambda: found.append(layer(x)))
    loss = (found[0] * randn(*found[0].shape, seed=9)).sum()
    backward = sent_by(loss.backward)
    for records in (forward, backward):
        records[:] = [(record.op, record.bytes) for record in records]
    return found[0].detach(), x.grad, forward, backward


# f and g


@on_ranks(1, 3)
def test_f_of_an_expanded_gradient_and_g_of_what_is_not_contiguous(check, world_size):
    """Neither can be reduced in place. The rest is their exercises'."""
    x = torch.ones(4, 2, requires_grad=True)
    CopyToRanks.apply(x).sum().backward()
    check.same(x.grad, torch.full_like(x, world_size), "f")
    x = torch.ones(4, requires_grad=True)
    (x + SumOverRanks.apply(x.view(2, 2).t()).t().flatten()).sum().backward()
    check.same(x.grad, torch.full((4,), 2.0), "g")


# Linear layers


class GatedMLP(nn.Module):
    """Llama's, gate and up in one layer; 10 hidden numbers, which 4 ranks don't divide."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gate_up, self.down = nn.Linear(6, 20), nn.Linear(10, 6)
        self.double()

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


@on_ranks(1, 2, 4)
def test_linear_layers(check):
    """Column-parallel: nothing forward, one all-reduce backward. Row-parallel: the reverse."""
    serial, x, call = GatedMLP(), randn(2, 3, 6), [("all_reduce", 2 * 3 * 6 * 8)]
    for bias in (True, False):
        if not bias:
            serial.gate_up.bias = serial.down.bias = None
        serial.zero_grad()
        expected, of_x, _, _ = both_ways(serial, x)
        split = GatedMLP()
        split.gate_up = ColumnParallelLinear(serial.gate_up, blocks=[10, 10])
        split.down = RowParallelLinear(serial.down)
        out, gradient, forward, backward = both_ways(split, x)
        close(check, out, expected, "out")
        close(check, gradient, of_x, "gradient of x")
        check.same((forward, backward), (call, call), "calls")
        gradients = gather({name: p.grad for name, p in split.named_parameters()}, split)
        for name, parameter in serial.named_parameters():
            close(check, gradients[name], parameter.grad, name)

    column, row = split.gate_up, split.down
    check.same(both_ways(column, x)[2:], ([], call), "column-parallel")
    check.same(both_ways(row, randn(2, 3, row.weight.shape[1]))[2:], (call, []), "row-parallel")
    check.same(sent_by(column(x).sum().backward), [], "column-parallel, x without gradient")


@on_ranks(2)
def test_layers_with_the_same_input_are_one(check):
    """q, k, v, gate and up in five layers: the same values, and five all-reduces instead of two."""
    layers = [nn.Linear(6, 4 if number < 3 else 8).double() for number in range(5)]
    x, sent = randn(3, 6), [("all_reduce", 3 * 6 * 8)]
    alone = [ColumnParallelLinear(layer) for layer in layers]
    together = []
    for some in (layers[:3], layers[3:]):
        whole = nn.Linear(6, sum(layer.out_features for layer in some)).double()
        whole.weight = nn.Parameter(torch.cat([layer.weight for layer in some]).detach())
        whole.bias = nn.Parameter(torch.cat([layer.bias for layer in some]).detach())
        together.append(ColumnParallelLinear(whole, blocks=[each.out_features for each in some]))
    many = both_ways(lambda x: torch.cat([layer(x) for layer in alone], -1), x)
    few = both_ways(lambda x: torch.cat([layer(x) for layer in together], -1), x)
    for one, other in zip(many[:2], few[:2], strict=True):
        close(check, one, other, "the same values")
    check.same((many[2:], few[2:]), (([], sent * 5), ([], sent * 2)), "calls")


# A vocabulary


@on_ranks(1, 2, 4)
def test_embedding(check):
    serial = nn.Embedding(11, 3).double()
    serial.weight = nn.Parameter(randn(11, 3))
    split = VocabParallelEmbedding(serial)
    for tokens in (torch.arange(11), torch.tensor([[0, 0], [2, 0]]), torch.zeros(0, 2).long()):
        serial.zero_grad()
        split.zero_grad()
        out = split(tokens)
        check.same(out, serial(tokens), "each is one rank's and zeros")
        weights = randn(*out.shape, seed=9)
        (out * weights).sum().backward()
        (serial(tokens) * weights).sum().backward()
        gradient = gather({"weight": split.weight.grad}, split)["weight"]
        close(check, gradient, serial.weight.grad, "gradient")


@on_ranks(1, 2, 4)
def test_cross_entropy(check, rank, world_size):
    """Of large logits, too: exp(1000) is inf. A part of the vocabulary may be impossible."""
    mine = deal(11, world_size)[rank]
    targets = torch.arange(12).view(3, 4) % 11
    impossible = randn(3, 4, 11)
    impossible[..., :2] = -torch.inf
    possible = targets.clamp(min=2)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        wide = torch.promote_types(dtype, torch.float32)
        for scale, logits, aims in ((1, randn(3, 4, 11), targets), (1000, impossible, possible)):
            serial = (scale * logits).to(dtype).requires_grad_()
            split = serial.detach()[..., mine].requires_grad_()
            losses = []
            sent = sent_by(
                lambda split=split, aims=aims, losses=losses: losses.append(
                    vocabulary_cross_entropy(split, aims, int(mine[0]))
                )
            )
            expected = F.cross_entropy(
                serial.to(wide).flatten(0, 1), aims.flatten(), reduction="none"
            )
            # A sum of 11 errs by 10 roundings, exp, log and differences by a few, of numbers no
            # larger than twice the largest logit. A gradient, at most 1, is rounded to its dtype.
            eps, size = torch.finfo(wide).eps, serial[serial.isfinite()].abs().max().double()
            bound = 20 * eps * (1 + 2 * size)
            check.close(losses[0].flatten(), expected, bound, dtype, scale)
            check.same(losses[0].dtype, wide, "dtype")
            check.same([r.op for r in sent], ["all_reduce"] * 2, "calls")
            check.same(sum(r.bytes for r in sent), 3 * 12 * wide.itemsize, "bytes")
            losses[0].mean().backward()
            expected.mean().backward()
            bound = bound + torch.finfo(dtype).eps
            check.close(split.grad, serial.grad[..., mine], bound, dtype, scale, "gradient")


# One norm


@on_ranks(1, 2, 4)
def test_norm(check):
    """Of what is split, replicated, unused, and of lengths that W doesn't divide; in one call."""
    serial = nn.ModuleList([nn.Linear(3, 7), nn.Linear(7, 5), nn.Linear(2, 2)]).double()
    split = nn.ModuleList(
        [ColumnParallelLinear(serial[0]), RowParallelLinear(serial[1]), nn.Linear(2, 2)]
    ).double()
    for max_norm in (1.0, 1000.0):
        for model in (serial, split):
            model.zero_grad()
            for number, parameter in enumerate(serial[:2].parameters()):
                parameter.grad = randn(*parameter.shape, seed=number)
        shares = {name: p.grad for name, p in serial.named_parameters()}
        for name, parameter in split[:2].named_parameters():
            dim, hands = split.get_submodule(name[0]).split.get(name[2:], (0, None))
            whole = shares[name].clone()
            mine = hands[dist.get_rank()] if hands else torch.arange(len(whole))
            parameter.grad = whole.index_select(dim, mine)
        expected = clip_grad_norm_(serial.parameters(), max_norm)
        norms = []
        sent = sent_by(lambda m=max_norm, n=norms: n.append(clip_grad_norm(count_copies(split), m)))
        close(check, norms[0], expected, "norm")
        check.same(len(sent), 1, "calls")
        gradients = {name: p.grad for name, p in split[:2].named_parameters()}
        for name, gradient in gather(gradients, split).items():
            close(check, gradient, serial.get_parameter(name).grad, name)
    check.same(split[2].weight.grad, None, "unused")

    half = nn.Parameter(torch.zeros(257, dtype=torch.bfloat16))
    half.grad = torch.full_like(half, 1 / 16)
    norm = clip_grad_norm({half: dist.get_world_size()}, 1000.0)
    expected = torch.tensor(257 / 256, dtype=torch.float64).sqrt()  # bf16 would say 1
    check.close(norm, expected, 1e-6, "summed up in float32")

    # The last of several ranks brings nothing; the others have a dtype each.
    rank, others = dist.get_rank(), max(1, dist.get_world_size() - 1)
    mine = nn.Parameter(
        torch.zeros(2, dtype=(torch.float32, torch.float64, torch.float16)[rank % 3])
    )
    if rank < others:
        mine.grad = torch.full_like(mine, 2)
    for copies in ({mine: 1}, {mine: 1} if rank < others else {}):
        norm, expected = clip_grad_norm(copies, 1000.0), torch.tensor(8.0 * others).double().sqrt()
        check.same(norm, expected, "a rank without gradients, or without parameters")
