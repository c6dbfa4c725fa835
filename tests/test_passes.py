"""Forward and backward between barriers: what a run of them called, and sent."""

import torch
import torch.distributed as dist
from torch import nn

from ddpkit import launch
from ddpkit.tensor_parallel import CopyToRanks, SumOverRanks
from ddpkit.tensor_parallel.sequence import GatherTokens, ScatterTokens
from ddpkit.tools.passes import between_barriers, passes, ring_bytes


class FirstThenLast(nn.Module):
    def __init__(self, first, last):
        super().__init__()
        self.first, self.last = first, last

    def forward(self, x):
        return self.last.apply(2 * self.first.apply(x))


def both_ways():
    dist.broadcast(torch.zeros(2), src=0)  # before the first barrier, so not counted
    found = [passes(FirstThenLast(CopyToRanks, SumOverRanks), torch.ones(1, 8, 4).requires_grad_())]
    part = torch.ones(1, 8 // dist.get_world_size(), 4, requires_grad=True)
    found.append(passes(FirstThenLast(GatherTokens, ScatterTokens), part))
    return [[each.flatten()[0].item() for each in pair] for pair in found]


def test_what_is_called_and_sent_between_barriers():
    run = launch(both_ways, world_size=4, backend="gloo")
    assert list(run) == [[[8.0, 128.0], [8.0, 128.0]]] * 4  # 2·4·1, and 2·8·2·4
    whole, tokens = "1 × all_reduce of 128 B", "1 × all_gather of 32 B, 1 × reduce_scatter of 128 B"
    assert between_barriers(run) == [whole, whole, tokens, tokens]
    assert ring_bytes(run) == 4 * 2 * 3 / 4 * 128  # each of the four like an all-reduce
