"""ddpkit.tensor_parallel, beyond its exercises and the whole model of test_sequence_parallel."""

import torch
import torch.nn.functional as F
from attention_cases import randn
from on_ranks import on_ranks
from torch import nn

from ddpkit.tensor_parallel import (
    CopyToRanks,
    SumOverRanks,
    clip_grad_norm,
    vocabulary_cross_entropy,
)
from ddpkit.tensor_parallel.split import deal

# f and g


@on_ranks(1, 3)
def test_f_of_an_expanded_gradient_and_g_of_what_is_not_contiguous(check, world_size):
    """Neither can be reduced in place."""
    x = torch.ones(4, 2, requires_grad=True)
    CopyToRanks.apply(x).sum().backward()
    check.same(x.grad, torch.full_like(x, world_size), "f")
    x = torch.ones(4, requires_grad=True)
    (x + SumOverRanks.apply(x.view(2, 2).t()).t().flatten()).sum().backward()
    check.same(x.grad, torch.full((4,), 2.0), "g")


# A loss and a norm


@on_ranks(2)
def test_cross_entropy_in_bf16_where_tokens_are_impossible(check, rank, world_size):
    """exp of the large ones is inf. The first rank's tokens are impossible for one target."""
    logits = 1000 * randn(3, 4, 11)
    logits[..., :2] = logits[0, 0, :6] = -torch.inf
    targets = 6 + torch.arange(12).view(3, 4) % 5
    mine = deal(11, world_size)[rank]
    whole = logits.bfloat16().requires_grad_()
    part = whole.detach()[..., mine].requires_grad_()
    losses = vocabulary_cross_entropy(part, targets, int(mine[0]))
    expected = F.cross_entropy(whole.float().flatten(0, 1), targets.flatten(), reduction="none")
    # A sum of 11 errs by 10 roundings, exp, log and differences by a few, of numbers no
    # larger than twice the largest logit. A gradient, at most 1, is rounded to its dtype.
    size = whole[whole.isfinite()].abs().max().double()
    bound = 20 * torch.finfo(torch.float32).eps * (1 + 2 * size)
    check.same(losses.dtype, torch.float32, "dtype")
    check.close(losses.flatten(), expected, bound, "losses")
    losses.mean().backward()
    expected.mean().backward()
    bound += torch.finfo(torch.bfloat16).eps
    check.close(part.grad, whole.grad[..., mine], bound, "gradient")


@on_ranks(1, 2, 4)
def test_norm_of_several_dtypes_also_where_a_rank_has_none(check, rank, world_size):
    half = nn.Parameter(torch.zeros(257, dtype=torch.bfloat16))
    half.grad = torch.full_like(half, 1 / 16)
    norm = clip_grad_norm({half: world_size}, 1000.0)
    expected = torch.tensor(257 / 256, dtype=torch.float64).sqrt()  # bf16 would say 1
    check.close(norm, expected, 1e-6, "summed up in float32")

    # The last of several ranks brings nothing; the others have a dtype each.
    others = max(1, world_size - 1)
    dtype = (torch.float32, torch.float64, torch.float16)[rank % 3]
    mine = nn.Parameter(torch.zeros(2, dtype=dtype))
    if rank < others:
        mine.grad = torch.full_like(mine, 2)
    for copies in ({mine: 1}, {mine: 1} if rank < others else {}):
        norm, expected = clip_grad_norm(copies, 1000.0), torch.tensor(8.0 * others).double().sqrt()
        check.same(norm, expected, "a rank without gradients, or without parameters")
