"""Odd little models for FSDP, their twins, and what ranks say."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn

from ddpkit.fsdp import FSDP


class Odd(nn.Module):
    """All that a wrapper may meet: rows that no W divides, a scalar, a tied weight, a frozen one,
    a vector of the root's own, a block that is used twice, token ids at the input.

    It has neither softmax nor norm: with integers in float64 every order of adding gives the same.
    """

    def __init__(self, seed=0, dtype=torch.float64, checkpoint=None):
        super().__init__()
        torch.manual_seed(seed)
        self.tokens = nn.Embedding(5, 3)
        self.places = nn.Parameter(torch.empty(4, 3), requires_grad=False)
        self.scale = nn.Parameter(torch.empty(()))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.tokens.weight
        self.checkpoint = checkpoint or (lambda block, x: block(x))
        self.to(dtype)
        self.draw(seed)

    @torch.no_grad()
    def draw(self, seed):
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            values = torch.randint(-1, 2, parameter.shape, generator=generator)
            parameter.copy_(values)

    def forward(self, tokens, use=(0, 1, 2, 1)):
        x = self.tokens(tokens) + self.places
        for number in use:
            x = self.checkpoint(self.blocks[number], x)
        return self.head(x * self.scale)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(3, 7)
        self.down = nn.Linear(7, 3)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def batch(step, micro_batch, rank):
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro_batch + rank)
    return torch.randint(5, (2, 4), generator=generator)


def loss_of(model, tokens):
    """Squared, and an integer where all weights are."""
    return (model(tokens) - 1).square().sum()


def mine(name, whole):
    """This rank's rows of a whole parameter or gradient."""
    whole = whole if whole.dim() else whole[None]
    rows = -(-len(whole) // dist.get_world_size())
    return whole[dist.get_rank() * rows : (dist.get_rank() + 1) * rows]


SETTINGS = {  # reshard_after_forward; what no_sync leaves out for all micro-batches but the last
    "as it comes": (True, None),
    "kept after forward": (False, None),
    "synced at the last": (True, {"gradients": True}),
    "kept after backward": (True, {"gradients": False, "weights": True}),
    "kept always, synced at the last": (False, {"gradients": True, "weights": True}),
}


QUIET = [  # all that no_sync can leave out
    None,
    {"gradients": True},
    {"gradients": False, "weights": True},
    {"gradients": True, "weights": True},
]


class Folded(torch.optim.Optimizer):
    """SGD with momentum, folded: weights and momenta become -1, 1 or 2 by their remainder modulo 3.

    So numbers stay whole and small for any number of steps. SGD itself can't: Odd multiplies
    weights up to eleven times, its loss squares that, and whatever bits a step adds to the weights
    the next one multiplies by 22: of 53 nothing is left in the second. None is 0, or the scale
    would stop all gradients.
    """

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                kept = self.state[p]
                kept["momentum"] = fold(kept.get("momentum", 0) + p.grad)
                p.copy_(fold(p - kept["momentum"]))


def fold(x):
    return torch.tensor([-1.0, 1.0, 2.0], dtype=x.dtype)[torch.remainder(x, 3).long()]


def backward(model, step, micro_batches=1, quiet=None, factor=1, loss=loss_of, batch=batch):
    """All micro-batches, and `synchronize`; return the sum of this rank's losses."""
    total = 0
    for number in range(micro_batches):
        inside = quiet is not None and number < micro_batches - 1
        with model.no_sync(**quiet) if inside else contextlib.nullcontext():
            part = loss(model, batch(step, number, dist.get_rank()))
            (factor * part).backward()
        total += part.detach()
    model.synchronize()
    return total


def said():
    return dist.group.WORLD.recorder.records


def sent_by(step):
    """What the rank says meanwhile: (operation, dtype, bytes)."""
    before = len(said())
    step()
    return [(each.op, each.dtype, each.bytes) for each in said()[before:]]


def wrapped(seed=0, dtype=torch.float64, checkpoint=None, **options):
    return FSDP(Odd(seed, dtype, checkpoint), **options)
