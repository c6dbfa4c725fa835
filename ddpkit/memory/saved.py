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

    where: the name of the module in whose forward it was kept, such as "blocks.0.qkv"; "" in the
    outermost module or a plain function. shape, dtype: of the tensor that was kept first; others
    may share its memory. nbytes: of the whole piece, since it can't be freed in parts.
    """

    where: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


def measure_saved(fn: Callable, *args) -> list[Saved]:
    """Call `fn(*args)`; return what autograd keeps for its backward, in the order of keeping.

    fn: a module, whose parts are then named as in `named_modules`, or any function; its result is
    dropped. Parameters are left out: they exist anyway. Memory that several operations keep is
    listed once. It works on the meta device as well, where a layer of any size fits.
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
    """Return the name of the innermost module whose `forward` is running now; "" if none is.

    names: {id of a module: its name}. Call it from a hook of autograd, in the thread of forward.
    """
    frame = sys._getframe(2)
    while frame is not None:
        module = id(frame.f_locals.get("self"))
        if frame.f_code.co_name == "forward" and module in names:
            return names[module]
        frame = frame.f_back
    return ""
