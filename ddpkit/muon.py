"""Muon on shards: an optimizer that needs whole matrices, of which each rank has some rows.

    optimizer = Muon(fsdp_model, names_of_matrices, lr=0.02)

Momentum is elementwise: it stays with the shards. Newton–Schulz isn't: done to some rows it gives
something else than these rows of the result (Moonlight#27, modded-nanogpt#99). So each matrix has
an owner:

    all-to-all      each rank sends its rows of every matrix to its owner, all in one call
    Newton–Schulz   each owner, of its own matrices
    all-to-all      each owner sends the rows of the result back

PyTorch's `torch.optim.Muon` is the serial twin, to the last bit. Jordan et al. 2024; owners: Liu et
al. 2025, section 2.3 ("Distributed Muon"). Notebook 12.
"""

import math
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .fsdp import FSDP

COEFFICIENTS = 3.4445, -4.7750, 2.0315
ITERATIONS = 5


def newton_schulz(matrix: Tensor) -> Tensor:
    """Bring all singular values of a matrix near 1: the nearest orthogonal matrix, roughly.

    matrix: (rows, columns). Returns the same shape in bf16. Cost: 15 products of matrices.
    Bernstein and Newhouse 2024; Jordan et al. 2024.
    """
    a, b, c = COEFFICIENTS
    x = matrix.bfloat16()
    tall = x.shape[0] > x.shape[1]
    if tall:
        x = x.T
    x = x / x.norm().clamp(min=1e-7)  # no singular value above 1
    for _ in range(ITERATIONS):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if tall else x


def deal(costs: list[int], world_size: int) -> list[int]:
    """Give each matrix an owner, the most expensive first, always to the rank with the least."""
    loads = [0] * world_size
    owners = [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        owner = loads.index(min(loads))
        owners[number] = owner
        loads[owner] += costs[number]
    return owners


def by_owners(
    shards: list[Tensor],
    heights: list[int],
    owners: list[int],
    function: Callable[[Tensor], Tensor],
    group: ProcessGroup | None = None,
) -> list[Tensor]:
    """Apply a function of whole matrices to matrices that ranks have in shards.

    shards: this rank's rows, ⌈height/W⌉ or what is left of them, all of one dtype. heights: of the
    whole matrices. owners: rank in the group, for each. Returns this rank's rows of the results.

    Cost: two all-to-alls. All ranks together send each number that its owner lacks once, and back.
    """
    rank = dist.get_rank(group)
    world_size = dist.get_world_size(group)
    # By whom and how much: rows of matrix m on rank r, in numbers.
    parts = []
    for shard, height in zip(shards, heights, strict=True):
        full = -(-height // world_size)
        rows = [max(0, min(height, (r + 1) * full) - r * full) for r in range(world_size)]
        parts.append([each * shard.shape[1] for each in rows])
    owned = [number for number, owner in enumerate(owners) if owner == rank]
    outgoing = [sum(parts[n][rank] for n in range(len(shards)) if owners[n] == o)
                for o in range(world_size)]  # fmt: skip
    incoming = [sum(parts[n][r] for n in owned) for r in range(world_size)]
    # There: in the order of owners, and of matrices within one.
    order = sorted(range(len(shards)), key=lambda number: owners[number])
    sent = torch.cat([shards[number].flatten() for number in order])
    arrived = sent.new_empty(sum(incoming))
    dist.all_to_all_single(arrived, sent, incoming, outgoing, group=group)
    pieces = {}
    by_rank = zip(range(world_size), arrived.split(incoming), strict=True)
    for r, from_rank in by_rank:
        lengths = [parts[number][r] for number in owned]
        for number, piece in zip(owned, from_rank.split(lengths), strict=True):
            pieces[number, r] = piece
    # The owner's work.
    for number in owned:
        flat = torch.cat([pieces[number, r] for r in range(world_size)])
        result = function(flat.view(heights[number], -1)).to(sent.dtype).flatten()
        for r, piece in enumerate(result.split(parts[number])):
            pieces[number, r] = piece
    # And back.
    results = [pieces[number, r] for r in range(world_size) for number in owned]
    answer = torch.cat([*results, sent.new_empty(0)])
    dist.all_to_all_single(sent, answer, outgoing, incoming, group=group)
    mine = sent.split([parts[number][rank] for number in order])
    found = dict(zip(order, mine, strict=True))
    return [found[number].view_as(shard) for number, shard in enumerate(shards)]


class Muon(torch.optim.Optimizer):
    """`torch.optim.Muon` for FSDP's shards of matrices.

    names: of the matrices it updates, as in `model.module.named_parameters()`; give the rest to
    AdamW. lr, weight_decay, momentum: as there; the learning rate grows with √(rows/columns).
    ValueError: a name isn't a trained matrix.

    Cost of a step, all ranks together: 2(W-1)/W numbers of 2 bytes sent for each element, and 15
    products of each matrix, once.
    """

    def __init__(
        self,
        model: FSDP,
        names: Iterable[str],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
    ):
        shapes = model.shapes()
        parameters = dict(model.module.named_parameters())
        chosen = list(names)
        for name in chosen:
            shape = tuple(shapes.get(name, ()))
            if len(shape) != 2 or not parameters[name].requires_grad:
                got = f"{name!r} of shape {shape}"
                remedy = "Give vectors and embeddings to AdamW."
                raise ValueError(f"Muon: expected names of trained matrices, got {got}. {remedy}")
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__([parameters[name] for name in chosen], defaults)
        self.group = model.group
        self.shapes = {parameters[name]: shapes[name] for name in chosen}

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        with torch.enable_grad():
            loss = closure() if closure else None
        for options in self.param_groups:
            self.update(options, [p for p in options["params"] if p.grad is not None])
        return loss

    def update(self, options: dict, shards: list[Tensor]) -> None:
        momentum = options["momentum"]
        heights = [self.shapes[shard][0] for shard in shards]
        costs = [self.shapes[shard].numel() * min(self.shapes[shard]) for shard in shards]
        owners = deal(costs, dist.get_world_size(self.group))
        # Elementwise, so on shards: Nesterov's momentum.
        directions = []
        for shard in shards:
            kept = self.state[shard]
            if not kept:
                kept["momentum_buffer"] = torch.zeros_like(shard.grad)
            kept["momentum_buffer"].lerp_(shard.grad, 1 - momentum)
            direction = shard.grad.lerp(kept["momentum_buffer"], momentum)
            directions.append(direction.bfloat16())  # as Newton–Schulz would: half the bytes
        # On whole matrices.
        updates = by_owners(directions, heights, owners, newton_schulz, self.group)
        for shard, update in zip(shards, updates, strict=True):
            height, width = self.shapes[shard]
            lr = options["lr"] * math.sqrt(max(1, height / width))
            shard.mul_(1 - options["lr"] * options["weight_decay"])
            shard.add_(update, alpha=-lr)
