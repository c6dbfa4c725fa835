"""Muon on shards: an optimizer that needs whole matrices, of which each rank has some rows.

    optimizer = Muon(fsdp_model, names_of_matrices, lr=0.02)

Momentum is elementwise: it stays with the shards. Newton–Schulz isn't: done to some rows it gives
something else than these rows of the result (Moonlight#27, modded-nanogpt#99). So each matrix has
an owner, the rank that computes with all of it:

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
    """Bring a matrix's singular values to about 0.7 to 1.2: the nearest orthogonal one, roughly.

    matrix: (rows, columns). Returns the same shape in bf16. Values below 0.1 % of the matrix's
    norm end lower. Cost: 15 products of matrices. Bernstein and Newhouse 2024; Jordan et al. 2024.
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
    """Return each matrix's owner, a rank: dearest first, always to the rank with the least work.

    costs: the work of each matrix, in any unit.
    """
    loads = [0] * world_size
    owners = [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        owner = loads.index(min(loads))  # no message: every rank computes the same deal
        owners[number] = owner
        loads[owner] += costs[number]
    return owners


def numels_by_rank(shape: torch.Size, world_size: int) -> list[int]:
    """Return how many numbers of a matrix each rank has: ⌈rows/W⌉ rows, or what is left of them."""
    rows, columns = shape
    full = -(-rows // world_size)
    found = []
    for rank in range(world_size):  # as torch.chunk cuts, the last ranks have fewer or none
        own = min(rows, (rank + 1) * full) - min(rows, rank * full)
        found.append(own * columns)
    return found


def exchange(
    parts: list[Tensor], numels: list[int], group: ProcessGroup | None = None
) -> list[Tensor]:
    """Send parts[r] to rank r, in one all-to-all; return what came, numels[r] numbers from rank r.

    parts: 1-D, of any lengths. Returns 1-D tensors.
    """
    sent = torch.cat(parts)  # ranks may have nothing for each other: still every rank calls
    arrived = sent.new_empty(sum(numels))
    lengths = [len(part) for part in parts]
    dist.all_to_all_single(arrived, sent, numels, lengths, group=group)
    return list(arrived.split(numels))


def by_owners(
    shards: list[Tensor],
    numels: list[list[int]],
    owners: list[int],
    function: Callable[[Tensor], Tensor],
    group: ProcessGroup | None = None,
) -> list[Tensor]:
    """Apply a function of whole matrices to matrices of which ranks have rows.

    shards: this rank's rows of each matrix, (rows, columns), perhaps none, all of one dtype; at
    least one matrix. numels[m][r]: how many numbers of matrix m rank r has. owners[m]: the rank
    that calls function(matrix m), which keeps the shape. Returns this rank's rows of each result.

    Cost: two all-to-alls. Every number goes to its matrix's owner and back.
    """
    rank = dist.get_rank(group)
    ranks = range(dist.get_world_size(group))
    owned_by = [[] for _ in ranks]
    for m, owner in enumerate(owners):
        owned_by[owner].append(m)
    mine = owned_by[rank]
    # There: to each owner this rank's rows of all its matrices, end to end.
    parts = []
    expected = []  # by rank, the numbers of each of this rank's own matrices
    for r in ranks:
        parts.append(end_to_end([shards[m] for m in owned_by[r]], shards[0]))
        expected.append([numels[m][r] for m in mine])
    # From every rank one flat tensor: its rows of this rank's matrices, one after the other.
    arrived = exchange(parts, [sum(part) for part in expected], group)
    cut = [arrived[r].split(expected[r]) for r in ranks]
    # The owner's work: matrix by matrix, and the result cut as the matrix was.
    results = [[] for _ in ranks]
    for place, m in enumerate(mine):
        whole = torch.cat([cut[r][place] for r in ranks]).view(-1, shards[m].shape[1])
        rows = function(whole).to(whole.dtype).flatten().split(numels[m])
        for r in ranks:
            results[r].append(rows[r])  # views of the result, which lives until it is sent
    # Back: from each owner this rank's rows, in the order in which they went.
    answers = [end_to_end(results[r], shards[0]) for r in ranks]
    returned = exchange(answers, [len(part) for part in parts], group)
    found = {}
    for r in ranks:
        lengths = [numels[m][rank] for m in owned_by[r]]
        for m, part in zip(owned_by[r], returned[r].split(lengths), strict=True):
            found[m] = part.view_as(shards[m])
    return [found[m] for m in range(len(shards))]


def end_to_end(tensors: list[Tensor], like: Tensor) -> Tensor:
    """Return the tensors end to end, in one 1-D tensor; if there are none, an empty one.

    like: a tensor of the result's dtype and device.
    """
    return torch.cat([*(part.flatten() for part in tensors), like.new_empty(0)])


class Muon(torch.optim.Optimizer):
    """`torch.optim.Muon` for FSDP's shards of matrices.

    names: of the matrices it updates, as in `model.module.named_parameters()`; give the rest to
    AdamW. lr, weight_decay, momentum: as in `torch.optim.Muon`; for tall matrices lr is multiplied
    by √(rows/columns). In a step all ranks must have gradients of the same matrices, or of none.
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
        """Update shards, in place: those with gradients, if any, the same on all ranks."""
        momentum = options["momentum"]
        world_size = dist.get_world_size(self.group)
        shapes = [self.shapes[shard] for shard in shards]
        numels = [numels_by_rank(shape, world_size) for shape in shapes]
        owners = deal([shape.numel() * min(shape) for shape in shapes], world_size)
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
        updates = by_owners(directions, numels, owners, newton_schulz, self.group) if shards else []
        for shard, (height, width), update in zip(shards, shapes, updates, strict=True):
            lr = options["lr"] * math.sqrt(max(1, height / width))
            shard.mul_(1 - options["lr"] * options["weight_decay"])
            shard.add_(update, alpha=-lr)
