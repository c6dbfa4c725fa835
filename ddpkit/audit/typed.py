"""The types of a parallel module: which tensor is whole, a part, or a term of a sum over ranks?

    def make():                                     # of notebook 11, as rank 0 would make it
        return split_block(Block(16, 4, 0.0, torch_attention), None)

    print(types(make, torch.ones(2, 6, 16)))        # no processes: a group that sends nothing

The module's forward runs once, on one process, and every operation's result gets a kind by the
rules in `kinds`: replicated, sharded, partial, ... Values don't matter. What a custom
`torch.autograd.Function` does, such as notebook 11's f and g, is found by running it: which
collective calls do its forward and its backward make?
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..tensor_parallel.split import SplitLayer
from .kinds import (
    OPEN,
    PARTIAL,
    REPLICATED,
    RULES,
    VARYING,
    Kind,
    Untyped,
    combined,
    result,
    sharded,
    tensors_in,
)

CALLS = {"allreduce": "sum", "reduce_scatter": "scatter", "allgather": "gather"}
PARTS = "parts"  # sharded, along the dimension whose length the call changes
SIGNATURES = {  # {(calls of forward, of backward): (what it needs, what it makes)}
    ("", "sum"): (REPLICATED, OPEN),  # f
    ("sum", ""): (PARTIAL, REPLICATED),  # g
    ("sum", "sum"): (PARTIAL, OPEN),
    ("gather", "scatter"): (PARTS, OPEN),
    ("gather", ""): (PARTS, REPLICATED),
    ("scatter", "gather"): (PARTIAL, PARTS),
    ("", "gather"): (REPLICATED, PARTS),
}


@dataclass
class Types:
    """The kinds of a module's outputs; `fine` if every operation got what it needs.

    kinds: {path of a module inside, "" for the whole: the `Kind` of its output}, of the modules
    that returned before the first error. wrong: that error, with the module's path; "" if none.
    """

    kinds: dict[str, Kind | None] = field(default_factory=dict)
    wrong: str = ""

    @property
    def fine(self) -> bool:
        return not self.wrong

    def __str__(self) -> str:
        lines = [f"{path or 'the module':<28} {kind}" for path, kind in self.kinds.items()]
        return "\n".join([*lines, self.wrong or "all kinds fit"])


def types(
    make: Callable[[], nn.Module],
    *inputs: Tensor,
    world_size: int = 2,
    given: Kind | None = REPLICATED,
    sums_copies: bool = False,
    of: Mapping[str, Kind] | None = None,
) -> Types:
    """Type a module that ranks share, without processes; name the first operation that is wrong.

    make: returns the module, as rank 0 of `world_size` makes it. inputs: of its forward. given: the
    `Kind` of inputs that are floats; None, as for integers: constants. sums_copies: True if the
    gradients of parameters that aren't split are summed over ranks after backward, as
    `ParallelGPT.synchronize` does. of: {a module's path: the `Kind` of its parameters}, where no
    `SplitLayer` says it: experts that each rank has alone are VARYING.

    Sees sums that are missing, doubled or at the wrong place; no factor, no order, no samples.
    """
    with group_of(world_size):
        module = make()
        typing = Typing(module, OPEN if sums_copies else REPLICATED, of or {})
        inputs = tuple(leaf(x) for x in inputs)
        for x in inputs:
            typing.put(x, given if x.is_floating_point() else None)
        return typing.run(inputs)


def leaf(x: Tensor) -> Tensor:
    """Copy a tensor, without its graph; a floating-point copy requires a gradient."""
    return x.detach().clone().requires_grad_(x.is_floating_point())


@contextlib.contextmanager
def group_of(world_size: int) -> Iterator[None]:
    """Be rank 0 of a fake group, which sends nothing; if this process is in a group, keep that."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("fake", rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Calls(TorchDispatchMode):
    """A mode that notes in `made` which collective is called inside: "sum", "scatter" or "gather".

    "" if none is called, "other" if it is another one, or several.
    """

    def __init__(self):
        super().__init__()
        self.made = ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.name().partition("::")[2].strip("_").replace("_base", "")
            told = next((call for begins, call in CALLS.items() if name.startswith(begins)), "")
            if "wait" not in name:
                self.made = "other" if self.made or not told else told
        return func(*args, **(kwargs or {}))


class Typing(TorchFunctionMode):
    """Give every tensor of a module's forward its kind."""

    def __init__(self, module: nn.Module, copies: Kind, given: Mapping[str, Kind]):
        super().__init__()
        self.module = module
        self.of: dict[int, tuple[Tensor, Kind | None]] = {}  # by id; held, so that ids stay theirs
        self.paths = {id(part): path for path, part in module.named_modules()}
        self.inside: list[str] = []  # paths of the modules that are being called
        self.probing = False
        self.report = Types()
        for path, parameter in module.named_parameters():
            owner, _, name = path.rpartition(".")
            layer = module.get_submodule(owner)
            above = [k for name, k in given.items() if f"{path}.".startswith(f"{name}.")]
            kind = [*above, copies][0] if parameter.requires_grad else None
            if isinstance(layer, SplitLayer) and name in layer.split:
                kind = sharded(layer.split[name][0] - parameter.ndim)
            self.put(parameter, kind)

    def put(self, x: Tensor, kind: Kind | None) -> None:
        self.of[id(x)] = x, kind

    def known(self, x: object) -> Kind | None:
        return self.of.get(id(x), (None, None))[1]

    def run(self, inputs: tuple) -> Types:
        apply = torch.autograd.Function.apply.__func__
        with contextlib.ExitStack() as listening:
            for context in (
                modules.register_module_forward_pre_hook(self.on_call),
                modules.register_module_forward_hook(self.on_return),
                patch.object(torch.autograd.Function, "apply", self.typing_apply(apply)),
                patch.object(dist, "all_reduce", self.typing_all_reduce(dist.all_reduce)),
                self,
            ):
                listening.enter_context(context)
            try:
                self.module(*inputs)
            except Untyped as reason:
                self.report.wrong = f"{self.where()}: {reason}"
        return self.report

    def where(self) -> str:
        path = self.inside[-1] if self.inside else ""
        return f"{path or 'the module'} ({type(self.module.get_submodule(path)).__name__})"

    def on_call(self, module: nn.Module, inputs: tuple) -> None:
        self.inside.append(self.paths.get(id(module), ""))

    def on_return(self, module: nn.Module, inputs: tuple, output: object) -> None:
        kind = next((self.known(x) for x in tensors_in(output)), None)
        self.report.kinds[self.inside[-1]] = kind
        if module is self.module and kind in (PARTIAL, OPEN):
            raise Untyped(f"its output is {kind}, and no sum follows")
        self.inside.pop()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        outputs = list(tensors_in(made))
        if self.probing or not outputs:
            return made
        name = getattr(func, "__name__", "")
        kind = result(name, args, kwargs, self.known)
        if kind and kind.dim and name not in RULES:
            # A part whose dimensions changed, by no rule that we have, is cut somewhere.
            parts = [x.ndim for x in tensors_in(args) if self.known(x) == kind]
            kind = kind if outputs[0].ndim in parts else VARYING
        for output in outputs:
            self.put(output, kind)
        return made

    # Collectives

    def typing_all_reduce(self, all_reduce: Callable) -> Callable:
        """Return an `all_reduce` that types its tensor: partial before a sum, then replicated."""

        def typed(tensor, op=dist.ReduceOp.SUM, *args, **kwargs):
            kind = self.known(tensor)
            if not self.probing and kind is not None:
                if op == dist.ReduceOp.SUM:
                    self.need("all_reduce", kind, PARTIAL)
                self.put(tensor, REPLICATED if tensor.requires_grad else None)
            return all_reduce(tensor, op, *args, **kwargs)

        return typed

    def typing_apply(self, apply: Callable) -> classmethod:
        """Return `Function.apply` that runs on copies, forward and backward, to type its output."""

        def typed(cls, *args):
            if self.probing or not any(self.known(x) for x in tensors_in(args)):
                return apply(cls, *args)
            self.probing = True
            try:
                made, signature = tried(lambda *given: apply(cls, *given), args)
            finally:
                self.probing = False
            (output, *_) = tensors_in(made)
            self.put(output, self.signed(cls.__name__, signature, args, output))
            return made

        return classmethod(typed)

    def signed(self, name: str, signature: tuple, args: tuple, output: Tensor) -> Kind | None:
        """Return the kind of a Function's output, by the collectives that it calls.

        signature: from `tried`. Untyped: none of SIGNATURES, or an input of the wrong kind for it.
        """
        if signature == ("", ""):
            return combined(name, args, self.known)
        if signature not in SIGNATURES:
            forward, backward = (call or "nothing" for call in signature)
            raise Untyped(f"{name} calls {forward} forward and {backward} backward: no pair")
        needs, makes = SIGNATURES[signature]
        x = next(x for x in tensors_in(args) if self.known(x))
        kind = self.known(x)
        along = next((d for d in range(-x.ndim, 0) if x.shape[d] != output.shape[d]), None)
        self.need(name, kind, sharded(along) if needs == PARTS else needs)
        return sharded(along) if makes == PARTS else makes

    def need(self, name: str, kind: Kind, needs: Kind) -> None:
        if kind not in (needs, VARYING):
            raise Untyped(f"{name} needs what is {needs}, got what is {kind}")


def tried(apply: Callable, args: tuple) -> tuple[object, tuple[str, str]]:
    """Run a Function on copies; return (its output, (its forward's call, its backward's call))."""
    copies = [leaf(x) if isinstance(x, Tensor) else x for x in args]
    with torch.enable_grad(), Calls() as forward:
        made = apply(*copies)
    outputs = [x for x in tensors_in(made) if x.requires_grad]
    with Calls() as backward:
        torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])
    return made, (forward.made, backward.made)
