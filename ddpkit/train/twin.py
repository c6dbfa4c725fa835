"""The exact twin of a GPT's training: the same bits on any mesh, or there is a bug.

Integers in float64 add up exactly, in whatever order a mesh (data × tensor × pipeline ranks) adds
them. `ddpkit.audit.exact` replaces parameters by integers and GELU by ReLU. Here norms are replaced
by limits (Hardtanh) and softmax by limited scores, so that values stay small; the loss is a sum of
squares; and the optimizer moves each parameter by 1, so that they stay integers at every step.
"""

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from ..audit.exact import exact
from ..models import GPT
from ..tensor_parallel import SumOverRanks
from ..tensor_parallel.layers import among

LIMIT = 8.0  # of what enters a layer, and of attention scores
LARGEST = 2.0**52  # float64 has every integer up to here, and twice as far


def make_exact(gpt: GPT, seed: int) -> None:
    """Turn a GPT into its exact twin, in place, with integer parameters drawn from `seed`."""
    for path in exact(gpt, seed):
        gpt.set_submodule(path, nn.Hardtanh(-LIMIT, LIMIT))
    for block in gpt.blocks:
        block.attention = limited_attention


def limited_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """Return the values' sum, weighted by scores q·kᵀ limited to ±LIMIT, without a softmax.

    q, k, v, and the result: (..., N, D). With `causal`, query i has weights for keys up to i only.
    """
    scores = (q @ k.transpose(-1, -2)).clamp(-LIMIT, LIMIT)
    return (scores.tril() if causal else scores) @ v


def squares(logits: Tensor, targets: Tensor, start: int, group: ProcessGroup | None) -> Tensor:
    """Return the twin's loss for each target: the squared error over the whole vocabulary.

    A logit should be 1 for the target and 0 for any other token. logits: (n, length, this rank's
    tokens, from token `start` on). targets: (n, length). Returns (n, length), summed over the
    tensor ranks of `group`; None: the vocabulary isn't split.
    """
    mine, local = among(targets, start, logits.shape[-1])
    wanted = torch.zeros_like(logits).scatter_(-1, local.unsqueeze(-1), 1.0)
    wanted = wanted * mine.unsqueeze(-1)
    total = (logits - wanted).square().sum(-1)
    return total if group is None else SumOverRanks.apply(total, group)


class Sign(Optimizer):
    """An optimizer that moves each element by `lr` against the sign of its gradients' sum so far.

    The sum, over all steps, is in `state`. Integers stay integers if `lr` is one. `step` doesn't
    call its closure. OverflowError, from `step`: a sum passed `LARGEST`, so float64 may soon round;
    parameters before this one are updated by then.
    """

    def __init__(self, params, lr: float = 1.0):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["sum"] = torch.zeros_like(parameter)
                state["sum"] += parameter.grad
                if state["sum"].numel() and state["sum"].abs().max() > LARGEST:
                    raise OverflowError("the twin's gradients passed 2⁵²: take a smaller model")
                parameter -= group["lr"] * state["sum"].sign()
