"""A comparison of two states that should be equal: what was saved, and what was loaded or is live.

A resumed run gives the same results as an uninterrupted one only if all of its state was restored.
A loss curve may look right even if some is missing; this comparison finds it.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from .ratios import numbered, part_that_differs, ratio

MISSING = object()
UNSIGNED = torch.uint16, torch.uint32, torch.uint64  # torch hardly computes with them
ALL_ZERO = "nothing was written into it: another tensor is in use, or it was saved too early"
PART_ZERO = "nothing was written there: the parts of other ranks or files didn't arrive"
AT_ZERO = "as at the start: no file was found, or its name was known before it was there"


def same_state(before: object, after: object) -> list[str]:
    """List the values of `before` that differ in `after`, are missing or are new: [] if none.

    before, after: modules, optimizers, or anything else with `state_dict()`; nested dicts and lists
    of tensors, numbers and text; a NumPy array counts as a tensor, or as a list if it has no
    numbers. Empty ones aren't seen; there is no tolerance, but 0 equals -0.
    Each entry names the place and how the value differs: "bias: ×2", "state.0.exp_avg: missing". A
    likely cause, if known, is added to the first entry that has it: "experts.weight: rows 2 to 7 of
    8: ×0 (nothing was written there: …)".

        saved = copy.deepcopy(optimizer.state_dict())   # a state_dict holds the live tensors
        ...                                             # a new process loads it
        same_state(saved, optimizer)
    """
    was = dict(leaves(before))
    now = dict(leaves(after))
    found = []
    causes = {""}
    for name in dict.fromkeys([*was, *now]):
        both = was.get(name, MISSING), now.get(name, MISSING)
        told = difference(*both)
        if told:
            cause = because(*both)
            why = "" if cause in causes else f" ({cause})"
            causes.add(cause)
            found.append(f"{name}: {told}{why}" if name else f"{told}{why}")
    return found


def leaves(state: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield (path, value), such as ("state.0.step", 5), of all values inside dicts and lists."""
    if hasattr(state, "state_dict"):
        state = state.state_dict()
    if type(state).__name__ == "ndarray":
        state = torch.tensor(state.copy()) if state.dtype.kind in "biufc" else state.tolist()
    inside = dict(enumerate(state)) if isinstance(state, list | tuple) else state
    if not isinstance(inside, Mapping):
        yield path, state
        return
    for key, value in inside.items():
        yield from leaves(value, f"{path}.{key}" if path else str(key))


def difference(was: object, now: object) -> str:
    """Say how a value differs from what it was, such as "×2" or "missing"; "" if it doesn't."""
    if was is MISSING or now is MISSING:
        return "missing" if now is MISSING else "new"
    if not isinstance(was, Tensor) or not isinstance(now, Tensor):
        alike = type(was) is type(now) and (was == now or (was != was and now != now))  # both NaN
        return "" if alike else f"{now!r}, was {was!r}"
    if (now.dtype, now.shape) != (was.dtype, was.shape):
        return f"{now.dtype} {tuple(now.shape)}, was {was.dtype} {tuple(was.shape)}"
    was, now = comparable(was), comparable(now)
    both = now.isnan() & was.isnan()
    was, now = was.masked_fill(both, 0), now.masked_fill(both, 0)  # a NaN that stays is no change
    differ = now != was
    if not differ.any():
        return ""
    factor, _, _ = ratio(now, was, 0.0, 0.0)
    if factor is not None:
        return f"×{factor:.4g}"
    some = f"no one factor, {int(differ.sum())} of {was.numel()} numbers differ"
    known = as_a_whole(was, now) or in_another_order(was, now)
    return known or part_that_differs(now, was, 0.0, 0.0) or some


def comparable(x: Tensor) -> Tensor:
    """Return a tensor on the CPU: complex numbers as pairs of real ones, float8 as float32.

    Unsigned integers of more than 8 bits become int64.
    """
    x = x.detach().cpu()
    if x.is_complex():
        return torch.view_as_real(x)
    x = x.long() if x.dtype in UNSIGNED else x
    return x.float() if x.is_floating_point() and x.itemsize == 1 else x


def as_a_whole(was: Tensor, now: Tensor) -> str:
    """Say that a tensor (square) was transposed, or rounded to a narrower dtype; "" if neither."""
    if was.dim() == 2 and was.shape == was.T.shape and torch.equal(now, was.T):
        return "transposed"
    narrower = (torch.float32, torch.bfloat16, torch.float16) if was.is_floating_point() else ()
    for dtype in narrower:
        if torch.equal(now, was.to(dtype).to(was.dtype)):
            return f"rounded to {str(dtype).removeprefix('torch.')}"
    return ""


def in_another_order(was: Tensor, now: Tensor) -> str:
    """Say that the same rows, or columns, are there in another order; "" if they aren't."""
    for axis, name in enumerate(("row", "column")[: was.dim()]):
        told = order_of(name, was.movedim(axis, 0), now.movedim(axis, 0))
        if told:
            return told
    return ""


def order_of(name: str, was: Tensor, now: Tensor) -> str:
    """Say which parts along the first axis are at other places, and name one; "" if they aren't.

    was, now: of one shape, and not equal. name: what these parts are called, such as "row".
    """
    count = len(was)
    both = torch.cat([was, now]).reshape(2 * count, -1)
    _, kinds = both.unique(dim=0, return_inverse=True)  # equal rows are of one kind
    before, after = kinds[:count], kinds[count:]
    if not torch.equal(before.sort().values, after.sort().values):
        return ""
    moved = before != after
    first = int(moved.nonzero()[0])
    source = int((before == after[first]).nonzero()[0])
    which = f"{name} {first} has what was {name} {source}"
    told = f"{numbered(name, moved)} in another order: {which}"
    words = sorted(range(count), key=str)
    return f"{told}, as if sorted as words" if torch.equal(before[words], after) else told


def because(was: object, now: object) -> str:
    """Suggest why a value, or a part of a tensor, has become 0; "" for any other difference."""
    if isinstance(was, Tensor) and isinstance(now, Tensor) and was.shape == now.shape:
        was, now = comparable(was), comparable(now)
        differ = was != now
        if not differ.any() or now[differ].any():
            return ""
        if was.dim() == 0:  # a counter
            return AT_ZERO
        return ALL_ZERO if differ.all() else PART_ZERO
    counts = type(was) is int and type(now) is int
    return AT_ZERO if counts and now == 0 else ""
