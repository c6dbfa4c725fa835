"""Kinds of tensors on ranks, and the kind of each operation's result: the rules of `types`.

    kind                            on a rank             its gradient there
    replicated                      the whole             the whole
    replicated, gradient partial    the whole             a summand: a sum is due
    partial                         a summand             the whole
    sharded along d                 a part along d        a part along d
    varying                         anything else
    None                            a constant, alike on all ranks: it has no gradient

Megatron's f makes the second of the first, g the first of the third (notebook 11). Dimensions count
from the end: -1 is the last.

The first two are "invariant" and "replicate" in torchtitan's spmd_types; in DTensor both are
Replicate(), since it adds a missing sum by itself. Notebook 14.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor


class Untyped(Exception):
    """An exception: an operation gets tensors whose kinds don't fit; the text says why."""


@dataclass(frozen=True)
class Kind:
    """The kind of a tensor. dim: along which a sharded one is cut, -1 for the last; or None."""

    name: str
    dim: int | None = None

    @property
    def is_part(self) -> bool:
        return self.name in ("sharded", "varying")

    def __str__(self) -> str:
        return self.name if self.dim is None else f"{self.name} along {self.dim}"


REPLICATED = Kind("replicated")
OPEN = Kind("replicated, gradient partial")
PARTIAL = Kind("partial")
VARYING = Kind("varying")
Known = Callable[[object], Kind | None]


def sharded(dim: int) -> Kind:
    """Return the kind of a tensor cut along `dim`, which counts from the end: -1, -2, ..."""
    return Kind("sharded", dim)


# Operations with op(a + b) = op(a) + op(b): of summands they make summands of the result
VIEWS = {
    *("view", "reshape", "flatten", "unflatten", "transpose", "permute", "squeeze", "unsqueeze"),
    *("split", "chunk", "unbind", "__getitem__", "__iter__", "contiguous", "clone", "detach"),
    *("expand", "repeat_interleave", "cat", "stack", "to", "double", "float", "__get__", "t"),
}
LINEAR = VIEWS | {"neg", "__neg__", "sum"}
SUMS = {"add", "sub", "__add__", "__sub__", "__radd__", "__iadd__", "add_", "iadd"}
SCALES = {"mul", "div", "__mul__", "__truediv__", "__rmul__", "mul_", "div_"}


def result(name: str, args: tuple, kwargs: dict, known: Known) -> Kind | None:
    """Return the kind of an operation's result; Untyped, with the reason, if the kinds don't fit.

    name: of the function, as "linear"; its rule is in `RULES`, or is `combined`. known: returns a
    tensor's kind, None for a constant or anything else.
    """
    rule = RULES.get(name)
    return rule(args, kwargs, known) if rule else combined(name, (*args, *kwargs.values()), known)


def tensors_in(values: object) -> Iterator[Tensor]:
    """Yield the tensors in a call's arguments, those in lists and tuples included."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_in(value)


def combined(name: str, args: tuple, known: Known) -> Kind | None:
    """Return a result's kind by the rule of all other operations: each number is used alone."""
    kinds = [known(x) for x in tensors_in(args)]
    if PARTIAL in kinds:
        return of_partial(name, args, kinds)
    return common(name, kinds)


def of_partial(name: str, args: tuple, kinds: list[Kind | None]) -> Kind:
    if name in LINEAR or (name == "where" and args[-1] == 0):
        return PARTIAL
    if name in SUMS:
        other = next((str(kind or "a constant") for kind in kinds if kind != PARTIAL), "a number")
        if len(kinds) > 1 and set(kinds) == {PARTIAL}:
            return PARTIAL
        raise Untyped(f"partial + {other} is of no kind: every rank adds it; add it after the sum")
    if name in SCALES and kinds[1:] in ([], [None]):
        return PARTIAL
    raise Untyped(f"{name} of summands isn't a summand of {name}: the sum over ranks is due first")


def common(name: str, kinds: list[Kind | None]) -> Kind | None:
    """Return the kind of a result whose operands have these kinds; `name` is for the error.

    A part if one is a part; None if all are constants, which otherwise don't count. Partial kinds
    don't come here. Untyped: replicated and another kind, or parts cut along different dimensions.
    """
    found = list(dict.fromkeys(kind for kind in kinds if kind is not None))
    parts = [kind for kind in found if kind.is_part]
    if REPLICATED in found and OPEN in found:
        raise Untyped(
            f"{name} of one whose gradient ranks have as a whole and one whose gradient is summed "
            "over them: one of the two is W times too large"
        )
    if REPLICATED in found and len(found) > 1:
        other = next(kind for kind in found if kind != REPLICATED)
        raise Untyped(
            f"{name} of one that is replicated and one that is {other}: the gradient of the first "
            "is a summand on each rank, and no one adds them up"
        )
    if len(parts) > 1 and VARYING not in parts:
        cut = " and ".join(f"along {kind.dim}" for kind in parts)
        raise Untyped(f"{name} of parts that are cut {cut}")
    if len(parts) > 1:
        return VARYING
    return parts[0] if parts else next(iter(found), None)


def argument(args: tuple, kwargs: dict, place: int, name: str, default: object = None) -> object:
    return args[place] if len(args) > place else kwargs.get(name, default)


def from_end(dim: int, ndim: int) -> int:
    return dim if dim < 0 else dim - ndim


# Operations that look along a dimension; what a rank looks up and lacks, it is taken to set to 0


def linear(args: tuple, kwargs: dict, known: Known) -> Kind | None:
    x, weight = args[:2]
    of_x, of_weight = known(x), known(weight)
    bias = argument(args, kwargs, 2, "bias")
    if of_weight == sharded(-2):
        return column(of_x, known(bias))
    if of_weight == sharded(-1):
        if of_x not in (None, VARYING, sharded(-1)):
            raise Untyped(f"a weight of some inputs, row-parallel, got an input that is {of_x}")
        return of_partial("add", args, [PARTIAL, known(bias)]) if bias is not None else PARTIAL
    if of_x == sharded(-1):
        raise Untyped("a whole weight got some of the inputs only: gather them first")
    if of_x == PARTIAL:
        if bias is not None:
            return of_partial("add", args, [PARTIAL, known(bias)])
        if of_weight == REPLICATED:
            raise Untyped("linear of summands: the weight's gradient is partial; sum first")
        return PARTIAL
    return common("linear", [of_x, of_weight, known(bias)])


def column(of_x: Kind | None, of_bias: Kind | None) -> Kind:
    """Return the kind of a column-parallel layer's output: its weight is cut along the outputs."""
    if of_x == REPLICATED:
        raise Untyped(
            "a weight of some outputs, column-parallel, got an input that is replicated: the "
            "input's gradient is a summand on each rank, and no one adds them up; f is missing"
        )
    if of_x not in (None, OPEN):
        raise Untyped(f"a weight of some outputs, column-parallel, got an input that is {of_x}")
    return common("bias", [sharded(-1), of_bias])


def embedding(args: tuple, kwargs: dict, known: Known) -> Kind | None:
    """Return the kind of an embedding's output: the weight's, or partial if its rows are dealt."""
    of_weight = known(args[1])
    return PARTIAL if of_weight == sharded(-2) else of_weight


def gathered(args: tuple, kwargs: dict, known: Known) -> Kind | None:
    """Return the kind of what torch.gather picks: partial if x is cut along its dimension."""
    x, dim = args[0], argument(args, kwargs, 1, "dim")
    kind = known(x)
    along = kind is not None and kind.dim == from_end(dim, x.ndim)
    return PARTIAL if along else combined("gather", args, known)


def normalised(args: tuple, kwargs: dict, known: Known) -> Kind | None:
    """Return the kind of a norm's result.

    Untyped: x is partial, or cut along a dimension that is normalised.
    """
    x = args[0]
    sizes = argument(args, kwargs, 1, "normalized_shape")
    kind = known(x)
    if kind is not None and kind.dim in range(-len(sizes), 0):
        raise Untyped(f"a norm over dimension {kind.dim}, of which each rank has a part")
    more = argument(args, kwargs, 2, "weight"), argument(args, kwargs, 3, "bias")
    return combined("a norm", (x, *more), known)


def softmax(args: tuple, kwargs: dict, known: Known) -> Kind | None:
    """Return the kind of a softmax's result, x's. Untyped: x is partial, or cut along its `dim`."""
    x = args[0]
    dim = argument(args, kwargs, 1, "dim")
    kind = known(x)
    if kind is not None and kind.dim == from_end(-1 if dim is None else dim, x.ndim):
        raise Untyped(f"a softmax over dimension {kind.dim}, of which each rank has a part")
    return combined("softmax", (x,), known)


def summed(args: tuple, kwargs: dict, known: Known) -> Kind | None:
    """Return a sum's kind: partial if x's cut is summed, otherwise x's."""
    x = args[0]
    kind = known(x)
    if kind is None or kind.dim is None:
        return kind
    dim = argument(args, kwargs, 1, "dim")
    if dim is None:
        return PARTIAL
    dims = [from_end(d, x.ndim) for d in (dim if isinstance(dim, tuple | list) else [dim])]
    if kind.dim in dims:
        return PARTIAL
    if argument(args, kwargs, 2, "keepdim", False):
        return kind
    return sharded(kind.dim + sum(d > kind.dim for d in dims))


def dropped(args: tuple, kwargs: dict, known: Known) -> Kind | None:
    """Return the kind of dropout's result, x's. Untyped: x is partial, and numbers are dropped."""
    p = argument(args, kwargs, 1, "p", 0.5)
    training = argument(args, kwargs, 2, "training", True)
    return combined("dropout" if p and training else "clone", args, known)


def moved(where: Callable) -> Callable:
    """Return the rule, like `summed`, of a view that moves dimensions, such as transpose.

    where: (cut dimension, args) to the cut dimension afterwards; None: the result is varying. It is
    varying with keyword arguments as well.
    """

    def rule(args: tuple, kwargs: dict, known: Known) -> Kind | None:
        kind = known(args[0])
        if kind is None or kind.dim is None or kwargs:
            return VARYING if kind is not None and kind.dim is not None else kind
        dim = where(kind.dim, args)
        return VARYING if dim is None else sharded(dim)

    return rule


def after_transpose(dim: int, args: tuple) -> int:
    a, b = (from_end(d, args[0].ndim) for d in args[1:3])
    return {a: b, b: a}.get(dim, dim)


def after_unflatten(dim: int, args: tuple) -> int:
    x, at, sizes = args
    more = len(sizes) - 1
    return dim - more if dim <= from_end(at, x.ndim) else dim  # the first of the new ones is cut


def after_flatten(dim: int, args: tuple) -> int | None:
    x = args[0]
    start, end = (*args[1:], *(0, -1)[len(args) - 1 :])
    start, end = from_end(start, x.ndim), from_end(end, x.ndim)
    if dim > end:
        return dim
    if dim < start:
        return dim + end - start
    return end if dim == start else None


RULES = {
    "linear": linear,
    "embedding": embedding,
    "gather": gathered,
    "layer_norm": normalised,
    "rms_norm": normalised,
    "softmax": softmax,
    "log_softmax": softmax,
    "sum": summed,
    "dropout": dropped,
    "transpose": moved(after_transpose),
    "unflatten": moved(after_unflatten),
    "flatten": moved(after_flatten),
}
