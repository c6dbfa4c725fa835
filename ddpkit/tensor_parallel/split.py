"""Layers of which every rank holds a part: how parameters are dealt out, and gathered again.

A parameter is cut along one dimension, and `deal` says which rows (or columns) each rank gets.
Uncut parameters are copies, alike on all ranks. `ddpkit.tensor_parallel` computes with such layers.

PyTorch's DTensor: placements Shard(dim) and Replicate(). Notebook 11.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ..tools.checks import check_in_group


def deal(length: int, world_size: int, blocks: list[int] | None = None) -> list[Tensor]:
    """Deal `length` rows to the ranks: return, for each rank, the indices of its rows.

    blocks: lengths of parts that are dealt each on its own, such as those of q, k and v: deal(6, 2,
    [2, 2, 2]) gives the first rank 0, 2 and 4. Where W doesn't divide one, the first ranks hold one
    more of it. ValueError: one has fewer rows than there are ranks.
    """
    hands = [[] for _ in range(world_size)]  # of each rank, its part of each block
    # Block by block: each rank gets its part of q, its part of k and its part of v.
    for block in torch.arange(length).split(blocks or length):
        if len(block) < world_size:
            few = f"a length of {len(block)} can't be split among {world_size} ranks"
            raise ValueError(f"{few}, expected one for each at least: use fewer, or a wider layer")
        for hand, part in zip(hands, block.tensor_split(world_size), strict=True):
            hand.append(part)
    return [torch.cat(hand) for hand in hands]


class SplitLayer(nn.Module):
    """A layer of which this rank holds a part of the parameters.

    layer: its weight and bias are copied from the group's first rank; it isn't changed. dims:
    {name: the dimension along which it is dealt out}; a parameter that isn't named is whole on
    every rank. blocks: as for `deal`. split: {name: (dimension, each rank's indices along it)}.
    ValueError: this rank isn't in `group`; the layer is too narrow. Cost: a broadcast of each.
    """

    def __init__(
        self,
        layer: nn.Module,
        dims: dict[str, int],
        group: ProcessGroup | None,
        blocks: list[int] | None = None,
    ):
        check_in_group(type(self).__name__, group)
        super().__init__()
        self.group = group
        self.split = {}
        for name in ("weight", "bias"):
            parameter = getattr(layer, name, None)
            if parameter is not None:
                # Whole first, so that all ranks cut the same values; then only this rank's part.
                value = parameter.detach().clone()
                dist.broadcast(value, group=group, group_src=0)
                if name in dims:
                    dim = dims[name]
                    hands = deal(value.shape[dim], dist.get_world_size(group), blocks)
                    self.split[name] = dim, hands
                    mine = hands[dist.get_rank(group)]
                    value = value.index_select(dim, mine.to(value.device))
                parameter = nn.Parameter(value, parameter.requires_grad)
            self.register_parameter(name, parameter)


def count_copies(module: nn.Module, group: ProcessGroup | None = None) -> dict[nn.Parameter, int]:
    """Return {parameter: the number of ranks that hold it alike}: 1 if it is split, otherwise W."""
    split = splits(module)
    world_size = dist.get_world_size(group)
    copies = {}
    for name, parameter in module.named_parameters():
        copies[parameter] = 1 if name in split else world_size
    return copies


def splits(module: nn.Module) -> dict[str, tuple[int, list[Tensor]]]:
    """Return {name of a split parameter: (dimension, each rank's indices along it)}."""
    found = {}
    for prefix, layer in module.named_modules():
        for name, split in getattr(layer, "split", {}).items():
            found[f"{prefix}.{name}".removeprefix(".")] = split
    return found


def gather(
    values: dict[str, Tensor],
    module: nn.Module,
    group: ProcessGroup | None = None,
) -> dict[str, Tensor]:
    """Return {name: whole tensor}, put together from the parts of all ranks; all must call.

    values: this rank's `module.state_dict()`, or gradients, by the parameters' names; those that
    aren't split are returned as they are. The serial model has the same names, and can load it all.
    Cost: W broadcasts for each split one.
    """
    split = splits(module)
    whole = {}
    for name, mine in values.items():  # in the same order on all ranks
        whole[name] = mine
        if name in split:
            dim, hands = split[name]
            whole[name] = join(mine, dim, hands, group)
    return whole


def join(mine: Tensor, dim: int, hands: list[Tensor], group: ProcessGroup | None) -> Tensor:
    """Return a whole tensor, put together from the parts of all ranks.

    mine: this rank's part. hands: each rank's indices along `dim`, as `deal` gives them.
    """
    parts = []
    for rank, hand in enumerate(hands):  # lengths differ, so no all-gather
        part = mine.detach().contiguous()
        if rank != dist.get_rank(group):
            shape = list(mine.shape)
            shape[dim] = len(hand)
            part = mine.new_empty(shape)
        dist.broadcast(part, group=group, group_src=rank)  # each rank in turn is the source
        parts.append(part)
    # In rank order the rows are as dealt; sorted by their indices, as they were.
    order = torch.cat(hands).argsort().to(mine.device)
    return torch.cat(parts, dim).index_select(dim, order)
