"""A GPT whose sequences are shared out: attention across ranks, and one mean over all targets.

    share_sequence(gpt, partial(zigzag_attention, group=context))
    model = BucketedDDP(gpt)                                  # of all ranks, data × context
    inputs, targets, places = share_tokens(tokens, zigzag(context ranks), context rank)
    summed_loss(model(inputs, places), targets).backward()
    model.synchronize()

Notebook 13.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from ..models import GPT, Attention
from .deal import NO_TARGET


def share_sequence(gpt: GPT, attention: Attention) -> None:
    """Make a GPT's blocks attend across ranks, in place, by one of this package's functions.

    attention: called as attention(q, k, v, causal=True). Where heads share keys and values, these
    are no longer repeated before they are sent, but where they arrive. From then on pass the
    tokens' positions in the sequence, gpt(inputs, places): the default, 0, 1, 2, ..., isn't theirs.
    """
    for block in gpt.blocks:
        block.attention = attention
        block.repeats = 1  # k and v travel as they are, and are repeated where they arrive


def summed_loss(logits: Tensor, targets: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return W times this rank's part of the mean cross-entropy over all targets of the group.

    logits: (..., vocabulary). targets: (...), int64; NO_TARGET isn't counted. The mean of this over
    the ranks is the mean over all targets, however many each rank has, none included; so gradients
    averaged over the group are that mean's. group: all ranks whose gradients are averaged.

    Cost per rank: one number all-reduced.
    """
    counted = (targets != NO_TARGET).sum()
    dist.all_reduce(counted, group=group)
    # The ranks' counts make one divisor: a mean of the ranks' means would be wrong.
    dtype = torch.promote_types(logits.dtype, torch.float32)
    wide = logits.flatten(0, -2).to(dtype)
    total = F.cross_entropy(wide, targets.flatten(), ignore_index=NO_TARGET, reduction="sum")
    return total * dist.get_world_size(group) / counted.clamp(min=1)
