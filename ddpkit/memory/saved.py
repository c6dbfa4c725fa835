"""The tensors that autograd keeps for backward, measured."""

import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .states import address


class Saved(NamedTuple):
    """A piece of memory that is kept for backward.

    where: the module that keeps it, "" in a function. shape, dtype: of the first tensor there.
    nbytes: of the whole piece, since it can't be freed in parts.
    """

    where: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


def measure_saved(fn: Callable, *args) -> list[Saved]:
    """Call `fn(*args)`; return what autograd keeps of it for backward, in order.

    fn: a module, whose parts are then named as in `named_modules`, or any function. Parameters are
    left out: they exist anyway. Memory that several operations keep is listed once.

    It works on the meta device as well, where nothing is computed and a layer of any size fits.
    """
    modules = fn.named_modules() if isinstance(fn, nn.Module) else ()
    names = {id(part): name for name, part in modules}
    kept: dict[int, tuple[Tensor, Saved]] = {}  # holds the tensor, or others would get its memory

    def keep(x: Tensor) -> Tensor:
        whole = x if x._base is None else x._base  # a linear layer keeps its weight transposed
        if not isinstance(whole, nn.Parameter) and address(x) not in kept:
            saved = Saved(_where(names), tuple(x.shape), x.dtype, x.untyped_storage().nbytes())
            kept[address(x)] = x.detach(), saved
        return x

    with saved_tensors_hooks(keep, lambda x: x):
        fn(*args)
    return [saved for _, saved in kept.values()]


def _where(names: dict[int, str]) -> str:
    """Name the innermost of these modules, the one at work."""
    frame = sys._getframe(2)
    while frame is not None:
        module = id(frame.f_locals.get("self"))
        if frame.f_code.co_name == "forward" and module in names:
            return names[module]
        frame = frame.f_back
    return ""
