"""Two states that should be one: what was saved and what was loaded, a checkpoint and what is live.

A run that resumes is the run that wasn't interrupted, if it begins from all that the other had. A
loss curve forgives what is missing; a comparison doesn't.
"""

from collections.abc import Iterator, Mapping

from torch import Tensor

from .ratios import part_that_differs, ratio

MISSING = object()


def same_state(before: object, after: object) -> list[str]:
    """List what of `before` isn't in `after`, to the bit, and what is new: [] if they are the same.

    before, after: modules, optimizers, or anything else with `state_dict()`; dicts and lists of
    tensors and other values, one in the other. Each entry names the place, and how a tensor
    differs: "bias: ×0", "experts.weight: rows 2 to 7 of 8: ×0", "state.0.momentum_buffer: missing".

        saved = copy.deepcopy(optimizer.state_dict())   # a state_dict holds the live tensors
        ...                                             # a new process loads it
        same_state(saved, optimizer)
    """
    was = dict(leaves(before))
    now = dict(leaves(after))
    found = []
    for name in dict.fromkeys([*was, *now]):
        told = difference(was.get(name, MISSING), now.get(name, MISSING))
        if told:
            found.append(f"{name}: {told}" if name else told)
    return found


def leaves(state: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield (path, value) of all values inside dicts and lists."""
    if hasattr(state, "state_dict"):
        state = state.state_dict()
    inside = dict(enumerate(state)) if isinstance(state, list | tuple) else state
    if not isinstance(inside, Mapping):
        yield path, state
        return
    for key, value in inside.items():
        yield from leaves(value, f"{path}.{key}" if path else str(key))


def difference(was: object, now: object) -> str:
    """Say how a value differs from what it was; "" if it doesn't."""
    if was is MISSING or now is MISSING:
        return "missing" if now is MISSING else "new"
    if not isinstance(was, Tensor) or not isinstance(now, Tensor):
        alike = type(was) is type(now) and (was == now or was != was)  # NaN is still NaN
        return "" if alike else f"{now!r}, was {was!r}"
    was, now = was.detach().cpu(), now.detach().cpu()
    if (now.dtype, now.shape) != (was.dtype, was.shape):
        return f"{now.dtype} {tuple(now.shape)}, was {was.dtype} {tuple(was.shape)}"
    both = now.isnan() & was.isnan()
    was, now = was.masked_fill(both, 0), now.masked_fill(both, 0)  # a NaN that stays is no change
    differ = now != was
    if not differ.any():
        return ""
    factor, _, _ = ratio(now, was, 0.0, 0.0)
    if factor is not None:
        return f"×{factor:.4g}"
    some = f"no one factor, {int(differ.sum())} of {was.numel()} numbers differ"
    return part_that_differs(now, was, 0.0, 0.0) or some
