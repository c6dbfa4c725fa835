"""One parameter of FSDP: its shard, always on this rank, and the whole, while its unit computes."""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

Place = tuple[nn.Module, str]  # a module that has a parameter, and the attribute's name there

PAST_THE_HOOKS = (
    "rank {rank} computed with its shard of {name} as if it were the whole: a module was used "
    "without its hooks. Call the module itself, model(x) or block(x), not its forward or another "
    "method, and not a parameter from outside the unit that owns it; or leave it out of `wrap`."
)


class Sharded:
    """One parameter: `shard`, this rank's rows, and `whole`, which has memory only while in use.

    shard: the module's own nn.Parameter, cut in place to this rank's rows, so that an optimizer
    that holds it goes on working. whole: set by `Unit`. shape: of the whole. rows, numel: the
    numbers of rows and elements of one rank's part, padding included. own: this rank's rows in the
    whole, a slice, perhaps empty. places: the modules that have it, each with the attribute's name;
    several if it is tied. used: whether a gradient has come in this step. pending: its whole
    gradient on this rank, added up until it is sent, or None.
    """

    def __init__(self, name: str, parameter: nn.Parameter, places: list[Place], group):
        self.name = name
        self.places = places
        self.shape = parameter.shape
        whole = as_rows(parameter.detach())
        world_size = dist.get_world_size(group)
        self.rows = -(-len(whole) // world_size)
        self.numel = self.rows * math.prod(whole.shape[1:])
        first = dist.get_rank(group) * self.rows
        self.own = slice(first, first + self.rows)  # Python cuts what goes beyond the end
        self.used = False
        self.pending: Tensor | None = None
        # The object stays, its insides change.
        self.shard = parameter
        parameter.grad = None
        parameter.data = whole[self.own].clone()
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(self.refuse)

    def refuse(self, parameter: nn.Parameter) -> None:  # autograd never meets a shard, but by a bug
        """Raise RuntimeError: autograd calls it if a shard gets a gradient, so by a misuse."""
        parameter.grad = None
        raise RuntimeError(PAST_THE_HOOKS.format(rank=dist.get_rank(), name=self.name))

    def load(self, whole: Tensor) -> None:
        """Copy this rank's rows of a whole parameter into the shard; call it under `no_grad`."""
        self.shard.copy_(as_rows(whole)[self.own])

    def show(self, parameter: nn.Parameter) -> None:
        """Set the attributes at all `places` to `parameter`, which is the shard or the whole."""
        for module, attribute in self.places:
            setattr(module, attribute, parameter)

    def take_gradient(self, dtype: torch.dtype) -> None:
        """Move the gradient in `whole.grad`, if any, to `pending`, which adds up in `dtype`."""
        gradient = self.whole.grad
        if gradient is None:
            return
        self.used = True
        # Backward may come again: it must find no gradient to add to.
        self.whole.grad = None
        if self.pending is None:
            self.pending = gradient.to(dtype)
        else:
            self.pending += gradient

    def add(self, part: Tensor) -> None:
        """Add a part of a mean gradient, 1-D and perhaps padded, to `shard.grad` (or set it)."""
        gradient = part[: self.shard.numel()].view_as(self.shard)
        if self.shard.grad is None:
            self.shard.grad = gradient
        else:
            self.shard.grad += gradient


def as_rows(x: Tensor) -> Tensor:
    """Return `x`; a scalar as one row, a view of shape (1,)."""
    return x if x.dim() else x[None]
