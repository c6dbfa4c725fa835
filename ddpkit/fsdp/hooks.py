"""Moments in backward: before it enters a module, and after it has left it.

Backward enters by the gradients of a module's outputs and leaves by those of its inputs.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten


class Then(torch.autograd.Function):
    """A function that returns its tensors unchanged, and whose backward calls `act()`, once.

    Call apply(act, *tensors). Backward is here when the gradients of all these are complete.
    """

    @staticmethod
    def forward(ctx, act, *tensors):
        ctx.set_materialize_grads(False)  # no zeros for tensors that the loss doesn't depend on
        ctx.act = act
        return tensors

    @staticmethod
    def backward(ctx, *gradients):
        ctx.act()
        return None, *gradients


def cast(values, dtype: torch.dtype):
    """Return `values`, nested tuples, lists and dicts, with all floating tensors in `dtype`."""
    return tree_map_only(
        Tensor, lambda value: value.to(dtype) if value.is_floating_point() else value, values
    )


def led_through(act: Callable[[], None], values):
    """Return `values`; backward calls `act()` once, when the gradients of all are complete.

    values: nested tuples, lists and dicts, a module's inputs. Tensors that need a gradient are led
    through one `Then`; if none does, `act` isn't called.
    """
    # All through one node: autograd calls it once, when the last of their gradients is here.
    leaves, structure = tree_flatten(values)
    places = [n for n, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]
    if places:
        tensors = Then.apply(act, *[leaves[n] for n in places])
        for n, tensor in zip(places, tensors, strict=True):
            leaves[n] = tensor
    return tree_unflatten(leaves, structure)


def with_hooks(act: Callable[[], None], values):
    """Return `values`; backward calls `act()` each time that the gradient of one is complete.

    values: nested tuples, lists and dicts, a module's outputs. Tensors that need a gradient get
    hooks, in place; views are led through a `Then` instead.
    """

    def hooked(x: Tensor) -> Tensor:
        if not x.requires_grad:
            return x
        if x._is_view():  # changed in place, a view drops its hooks; autograd defends a `Then`
            return Then.apply(act, x)[0]
        x.register_hook(lambda _: act())
        return x

    return tree_map_only(Tensor, hooked, values)
