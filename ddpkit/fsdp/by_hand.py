"""FSDP by hand, without hooks: each of its ideas as a function of a few lines.

    gather_rows       a whole parameter from its shards, of which some may be shorter, or empty
    reduce_rows       this rank's rows of the mean gradient
    sharded_step      forward and backward of blocks, of which one is whole at a time
    accumulate_rows   gradients of several micro-batches, reduced one by one or as a sum
    backward_calls    the names of backward's collective calls, in PyTorch's order
    clip_all          one norm, of sharded gradients and of replicated ones
    shard_in_place    a module's parameters become shards; a tied one stays one parameter

A parameter of `length` rows is cut as by torch.chunk: each of W ranks has ⌈length/W⌉ rows, rank r
those from r·⌈length/W⌉ on, and the last ranks what is left, perhaps none. Notebook 12.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

Block = Callable[[Tensor, Tensor], Tensor]  # block(x, weight)


def gather_rows(shard: Tensor, length: int, group: ProcessGroup | None = None) -> Tensor:
    """All-gather a parameter of `length` rows from the ranks' shards.

    shard: this rank's rows, (rows, ...), perhaps none of them. Returns a new tensor, (length, ...).
    Cost: one all-gather of ⌈length/W⌉ rows, padding included.
    """
    world_size = dist.get_world_size(group)
    rows = -(-length // world_size)
    padded = shard.new_zeros(rows, *shard.shape[1:])
    padded[: len(shard)] = shard
    parts = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(parts, padded, group=group)
    return torch.cat(parts)[:length]


def reduce_rows(gradient: Tensor) -> Tensor:
    """Reduce-scatter a whole gradient: return this rank's rows of the mean, without padding."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    rows = -(-len(gradient) // world_size)
    padded = gradient.new_zeros(world_size * rows, *gradient.shape[1:])
    padded[: len(gradient)] = gradient
    mine = torch.empty_like(padded[:rows])
    dist.reduce_scatter(mine, list(padded.chunk(world_size)))
    own = gradient[rank * rows : (rank + 1) * rows]
    return mine[: len(own)] / world_size


def sharded_step(
    blocks: Sequence[Block],
    shards: Sequence[Tensor],
    lengths: Sequence[int],
    x: Tensor,
    loss: Callable[[Tensor], Tensor],
) -> Tensor:
    """Run blocks forward and backward, each with its weight whole only while it computes.

    Block n is called as blocks[n](x, weight), weight of lengths[n] rows; loss(y) is a number. Sets
    every shards[n].grad to this rank's rows of the mean gradient; returns the loss, detached.

    Backward computes each block again from its input (notebook 06): no whole weight is kept.
    Cost: two all-gathers and a reduce-scatter for each block.
    """
    # Forward: a weight is whole for one line, and goes with it.
    inputs = []
    with torch.no_grad():
        for block, shard, length in zip(blocks, shards, lengths, strict=True):
            inputs.append(x)
            x = block(x, gather_rows(shard, length))
    # Between: the loss needs a graph from y on only.
    y = x.requires_grad_()
    value = loss(y)
    value.backward()
    gradient = y.grad
    # Backward: new leaves, so that each block has a graph of its own.
    for number in reversed(range(len(blocks))):
        x = inputs[number].detach().requires_grad_()
        weight = gather_rows(shards[number].detach(), lengths[number])
        weight.requires_grad_()
        blocks[number](x, weight).backward(gradient)
        shards[number].grad = reduce_rows(weight.grad)
        gradient = x.grad
    return value.detach()


def accumulate_rows(shard: Tensor, gradients: Iterable[Tensor], late: bool) -> None:
    """Add to `shard.grad`, in its dtype, the sum of micro-batches' gradients, averaged over ranks.

    gradients: this rank's, whole, one for each micro-batch, perhaps in bf16. late: add them up on
    this rank, and reduce once; otherwise each is reduced by itself, and only its rows are added up.
    """
    pending = None
    gradients = list(gradients)
    for number, gradient in enumerate(gradients):
        wide = gradient.to(shard.dtype)
        pending = wide if pending is None else pending + wide
        if late and number < len(gradients) - 1:
            continue
        part = reduce_rows(pending)
        pending = None  # sent: the next one begins from nothing
        shard.grad = part if shard.grad is None else shard.grad + part


def backward_calls(order: Sequence[str], kept: Iterable[str] = ()) -> list[str]:
    """List the collective calls of backward: "AG b1" gathers unit b1, "RS b1" reduces gradients.

    order: units as forward used them, perhaps one twice. kept: those that it left whole. Backward
    goes from the last to the first. Entering a unit, it gathers this and, ahead of time, the next,
    unless they are whole; leaving it, it drops the weights and reduces the gradients. For example,
    ["b0", "b1"] gives ["AG b1", "AG b0", "RS b1", "RS b0"].
    """
    calls = []
    whole = set(kept)
    for place in reversed(range(len(order))):
        needed = order[max(place - 1, 0) : place + 1]
        for unit in reversed(needed):  # this one, and then the next
            if unit not in whole:
                calls.append(f"AG {unit}")
                whole.add(unit)
        whole.discard(order[place])
        calls.append(f"RS {order[place]}")
    return calls


def clip_all(shards: Sequence[Tensor], copies: Sequence[Tensor], max_norm: float) -> Tensor:
    """Scale gradients, in place, to a common norm of at most `max_norm`; return the norm before.

    shards: this rank's rows of the gradients that are sharded, perhaps none. copies: the gradients
    that are whole and alike on every rank, as those of norms and biases are in some wrappers.
    """
    squared = torch.zeros((), dtype=torch.float64)
    for shard in shards:
        squared += shard.double().square().sum()
    dist.all_reduce(squared)  # on every rank, also where no row is
    for copy in copies:
        squared += copy.double().square().sum()  # once, not once a rank
    norm = squared.sqrt()
    for gradient in [*shards, *copies]:
        gradient *= (max_norm / (norm + 1e-6)).clamp(max=1)
    return norm


def shard_in_place(module: nn.Module) -> None:
    """Replace each parameter of the module by this rank's rows, padded with zeros to ⌈length/W⌉.

    A parameter that is tied, under two names or more, becomes one shard under all of them. Frozen
    ones become trained. A shard that needs no padding is a view, so the whole keeps its memory.
    """
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    made = {}  # {parameter: its shard}
    for submodule in list(module.modules()):
        for name, parameter in list(submodule.named_parameters(recurse=False)):
            if parameter not in made:
                rows = -(-len(parameter) // world_size)
                mine = parameter.detach()[rank * rows : (rank + 1) * rows]
                if len(mine) < rows:
                    padding = mine.new_zeros(rows - len(mine), *mine.shape[1:])
                    mine = torch.cat([mine, padding])
                made[parameter] = nn.Parameter(mine)
            setattr(submodule, name, made[parameter])
