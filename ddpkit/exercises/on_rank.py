"""The part of a check that runs on each rank: trials in turn, an answer whose calls are watched.

A wrong answer may give right values and still leave damage: an argument that its caller needs is
overwritten, a list is emptied, a float32 comes back as a float64. Here each call is looked at.
"""

import functools
import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ddpkit.runtime.recorder import recorder

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these


def in_turn(
    answer: Callable, writes: Sequence[str] | None, same_dtype: bool, programs: list[tuple]
) -> tuple[list, list[str]]:
    """Run programs, (program, *args), in this process; return their results and what was noticed.

    Noticed is the damage that each call of the answer did, in their order; "" where it did none.
    writes: the arguments that the answer may write to; None: its calls aren't watched. Calls on the
    wire are kept of the first program only, so that a count of them is that of one trial.
    """
    torch.set_num_threads(1)  # whatever the reader's shell asks of OpenMP: sums are small
    noticed: list[str] = []
    if writes is not None and not inspect.isclass(answer):
        answer = watched(answer, writes, same_dtype, noticed)
    results, first = [], recorder().records
    for number, (program, *args) in enumerate(programs):
        if number > 0:
            recorder().records = []
        results.append(program(answer, *args))
    recorder().records = first
    return results, noticed


def watched(
    answer: Callable, writes: Sequence[str], same_dtype: bool, noticed: list[str]
) -> Callable:
    """Return the answer, whose calls note in `noticed` the damage that they do."""

    @functools.wraps(answer)
    def call(*args, **kwargs):
        before = {name: frozen(x, name in writes) for name, x in named(answer, args, kwargs)}
        dtypes = dtypes_in((args, tuple(kwargs.values())))
        returned = answer(*args, **kwargs)
        told = ""
        for name, x in named(answer, args, kwargs):
            if told or frozen(x, name in writes) == before[name]:
                continue
            if name in writes:
                told = (
                    f"there are new tensors in `{name}`. The caller keeps those that were in it, "
                    "and never sees a new one: write into them, in place."
                )
            else:
                told = (
                    f"`{name}` isn't what it was before the call. The caller needs it as it was: "
                    "leave arguments alone, and work on something of your own."
                )
        made = dtypes_in(returned if isinstance(returned, tuple | list) else (returned,))
        if not told and same_dtype and len(dtypes) == 1 and made - dtypes:
            (given,), (got, *_) = dtypes, made - dtypes
            told = (
                f"it was given {given}, and returned {got}: the caller goes on with this dtype, "
                "and pays for it."
            )
        noticed.append(told)
        return returned

    return call


def named(answer: Callable, args: tuple, kwargs: dict) -> list[tuple[str, object]]:
    """List (parameter, argument) of a call, `*args` as one tuple; [] if the call doesn't fit."""
    try:
        bound = inspect.signature(answer).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # the call itself will tell
        return []
    return list(bound.items())


def frozen(x: object, place_only: bool) -> object:
    """Describe an argument so that a change shows; place_only: which tensors it holds, not what.

    No tensor is allocated, since trials may watch memory. Of subclasses of Tensor, which may count
    reads, and of objects of other types only the identity shows.
    """
    if isinstance(x, list | tuple):
        return [type(x).__name__, *(frozen(part, place_only) for part in x)]
    if type(x) in (Tensor, nn.Parameter):
        return id(x) if place_only else (x.dtype, tuple(x.shape), bits(x))
    if isinstance(x, dict):
        if place_only:
            return id(x)
        return [(frozen(key, True), frozen(value, False)) for key, value in x.items()]
    return repr(x) if isinstance(x, int | float | str | None) else id(x)


def bits(x: Tensor) -> bytes:
    """Return the bytes of a tensor's numbers, in which NaN equals itself."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize]
    return x.detach().view(whole).numpy().tobytes()


def dtypes_in(values: Sequence) -> set[torch.dtype]:
    """Collect the dtypes of the floating-point tensors, also of those in lists and tuples."""
    found = set()
    for x in values:
        if isinstance(x, list | tuple):
            found |= dtypes_in(x)
        elif type(x) in (Tensor, nn.Parameter) and x.is_floating_point():
            found.add(x.dtype)
    return found
