"""ddpkit.tensor_parallel.split: who has what, and whole again."""

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn

from ddpkit.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from ddpkit.tensor_parallel.split import count_copies, deal, gather


def test_who_has_what():
    def dealt(*arguments):
        return [hand.tolist() for hand in deal(*arguments)]

    assert dealt(5, 2) == [[0, 1, 2], [3, 4]]
    assert dealt(6, 2, [2, 4]) == [[0, 2, 3], [1, 4, 5]]
    assert dealt(4, 1, [2, 2]) == [[0, 1, 2, 3]]
    with pytest.raises(ValueError, match="2 can't be split among 3 ranks, expected one for each"):
        deal(8, 3, [6, 2])


def layers(seed):
    torch.manual_seed(seed)
    return nn.ModuleDict(
        {"column": nn.Linear(3, 7), "row": nn.Linear(5, 3), "tokens": nn.Embedding(6, 3)}
    )


@on_ranks(1, 2, 4)
def test_split_and_gathered(check, rank, world_size):
    """The first rank's values; what was frozen still is; parts of lengths that W doesn't divide."""
    serial, mine = layers(0), layers(rank)
    for each in (serial, mine):
        each["row"].weight.requires_grad_(False)
    split = nn.ModuleDict(
        {
            "column": ColumnParallelLinear(mine["column"]),
            "row": RowParallelLinear(mine["row"]),
            "tokens": VocabParallelEmbedding(mine["tokens"]),
        }
    )
    parts = serial["row"].weight.tensor_split(world_size, dim=1)
    check.same(split["row"].weight.detach(), parts[rank], "row")
    check.same(split["row"].weight.requires_grad, False, "frozen")
    before = torch.arange(6).tensor_split(world_size)[:rank]
    check.same(split["tokens"].start, sum(map(len, before)), "the first token")
    check.same(gather(split.state_dict(), split), dict(serial.state_dict()), "gathered")
    copies = {name: count_copies(split)[p] for name, p in split.named_parameters()}
    expected = dict.fromkeys(serial.state_dict(), 1) | {"row.bias": world_size}
    check.same(copies, expected, "copies")
    check.same(mine.state_dict().keys(), layers(rank).state_dict().keys(), "the serial layers")


@on_ranks(3)
def test_a_group_of_others_is_refused(check):
    others = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        says = ("rank 2 called ColumnParallelLinear with a group that it isn't in",)
        check.refused(ColumnParallelLinear, nn.Linear(4, 4), others, says=says)
