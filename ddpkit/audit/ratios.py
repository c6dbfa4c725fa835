"""Is a tensor a multiple of another, and by which factor? If it isn't, which of its rows differ?"""

from math import acos, degrees, isfinite

import torch
from torch import Tensor

LOOSEST = 0.25  # of a tensor's length: a factor of 2 is more, roundings of bfloat16 are 1 or 2 %
LATITUDE = 0.05  # of a factor, for roundings
SHOWN = 4  # rows in a line
LONG, CHANCE = 0.3, 0.1  # of the usual row; of all rows


def ratio(
    value: Tensor | None, expected: Tensor | None, tolerance: float, floor: float
) -> tuple[float | None, float, bool]:
    """Return (factor, error, whether the two are the same), with value ≈ factor · expected.

    error: the norm of value − factor · expected, as a share of expected's norm or, if it is larger,
    of `floor`. tolerance: up to this share they are the same, (1.0, 0.0, True). factor: None if no
    number fits. A value that is None counts as zeros. Other shapes: (None, inf, False).
    """
    if value is None or expected is None:
        present = value if expected is None else expected
        empty = present is None or not present.any()
        return (1.0 if empty else 0.0 if value is None else None), 0.0, empty
    if value.shape != expected.shape:
        return None, float("inf"), False
    a = value.double()
    b = expected.double()
    if tolerance == 0 and torch.equal(a, b):
        return 1.0, 0.0, True
    length = max(b.norm().item(), floor)
    if (a - b).norm().item() <= tolerance * length:
        return 1.0, 0.0, True
    squared = b.square().sum().item()
    factor = (a * b).sum().item() / squared if squared else 0.0
    left = (a - factor * b).norm().item()
    error = left / length if length else float(left > 0)
    # Against a number that fits by chance: a vector of one element always has one.
    fits = isfinite(factor) and left <= max(tolerance, 1e-12) * max(1.0, abs(factor)) * length
    return (whole_number(factor, error) if fits else None), error, False


def whole_number(factor: float, error: float) -> float:
    """Round a factor to n or 1/n, n whole, if that is within `error`, a share, and within 5 %."""
    upside_down = 0 < abs(factor) < 1
    whole = round(1 / factor if upside_down else factor)
    nearest = 1 / whole if upside_down else float(whole)
    return nearest if near(factor, nearest, min(error, LATITUDE)) else factor


def near(a: float, b: float, within: float = 1e-3) -> bool:
    return abs(a - b) <= within * abs(b)


def added(
    before: Tensor, expected: Tensor, values: dict[int, Tensor], tolerance: float
) -> tuple[float, Tensor, dict[int, Tensor]]:
    """Return (tolerance of the update, the serial update, {rank: its update}), in float64.

    before, expected: a parameter of the serial run before and after a step; values: of the ranks,
    after it. tolerance: relative; an update is shorter, so its own is larger, up to 0.25 (LOOSEST).
    """
    start = before.double()
    update = expected.double() - start
    length = update.norm().item()
    # An update is off by as much as the parameter is, and is much shorter.
    within = tolerance * max(1.0, start.norm().item() / length) if length else tolerance
    return min(LOOSEST, within), update, {r: v.double() - start for r, v in values.items()}


def part_that_differs(
    value: Tensor | None, expected: Tensor | None, tolerance: float, floor: float
) -> str:
    """Name the rows, or columns, that differ while others agree, and their factor; or count NaNs.

    For example 'rows 2 to 7 of 8: ×0'. tolerance, floor: as in `ratio`. If hardly any agree, name
    those that are 0 in `value` alone. Rows that are 0 in both aren't evidence: an embedding's, of
    tokens that weren't in the batch. Returns "" if nothing can be named, or shapes differ.
    """
    if value is None or expected is None or value.shape != expected.shape:
        return ""
    for x, whose in ((value, ""), (expected, " in the serial run")):
        if not x.isfinite().all():
            return f"{int((~x.isfinite()).sum())} of {x.numel()} numbers are NaN or inf{whose}"
    for axis, name in enumerate(("row", "column")[: value.dim()]):
        a = value.double().movedim(axis, 0).reshape(value.shape[axis], -1)
        b = expected.double().movedim(axis, 0).reshape(value.shape[axis], -1)
        usual = max(b.norm().item(), floor) / max(1, len(b)) ** 0.5
        differ = ~((a - b).norm(dim=1) <= tolerance * b.norm(dim=1).clamp(min=usual))
        tells = a.any(1) | b.any(1)
        # A short row may agree by chance, within a tolerance; and so may one of many.
        long = tells & (b.norm(dim=1) >= LONG * usual) if tolerance else tells
        some_right = (long & ~differ).sum() > (CHANCE * tells.sum() if tolerance else 0)
        gone = differ & ~a.any(1)
        if some_right and differ.any():
            factor, _, _ = ratio(a[differ], b[differ], tolerance, floor)
            ratios = "no one factor" if factor is None else f"×{factor:.4g}"
            return f"{numbered(name, differ)}: {ratios}"
        if gone.any() and not gone[tells].all():
            return f"{numbered(name, gone)}: ×0, no one factor for the others"
    return ""


def apart(pairs: list[tuple[Tensor | None, Tensor | None]]) -> str:
    """Say by which factor tensors are longer than the serial ones, and the angle between the two.

    pairs: (value, expected); all values make one vector. Returns " (length ×2, turned by 30°)", for
    example, or "" if a tensor is missing or has another shape, or a vector is 0 or not finite.
    """
    if any(a is None or b is None or a.shape != b.shape for a, b in pairs):
        return ""
    got = torch.cat([a.double().flatten() for a, _ in pairs])
    due = torch.cat([b.double().flatten() for _, b in pairs])
    lengths = got.norm().item(), due.norm().item()
    if not all(isfinite(length) and length > 0 for length in lengths):
        return ""
    cosine = (got / lengths[0]).dot(due / lengths[1]).item()
    angle = degrees(acos(min(1.0, max(-1.0, cosine))))
    return f" (length ×{lengths[0] / lengths[1]:.4g}, turned by {angle:.3g}°)"


def numbered(name: str, which: Tensor) -> str:
    """Name the true places: 'row 3 of 8', 'rows 2 to 7 of 8', 'rows 0, 2, 4, 6 and 1 more of 9'."""
    places = which.nonzero().flatten().tolist()
    first, last = places[0], places[-1]
    of = f"of {len(which)}"
    if len(places) == 1:
        return f"{name} {first} {of}"
    if len(places) > 2 and last - first == len(places) - 1:
        return f"{name}s {first} to {last} {of}"
    more = f" and {len(places) - SHOWN} more" if len(places) > SHOWN else ""
    return f"{name}s {', '.join(map(str, places[:SHOWN]))}{more} {of}"


def mean_of(values: list[Tensor | None]) -> Tensor | None:
    present = [value.double() for value in values if value is not None]
    return sum(present) / len(values) if present else None


def alike(values: list[Tensor | None]) -> bool:
    first = values[0]
    if any(value is None for value in values):
        return all(value is None for value in values)
    return all(torch.equal(first, value) for value in values[1:])


def epsilon(tensors: dict[str, Tensor | None]) -> float:
    """Return the largest ε (`torch.finfo(dtype).eps`) of these tensors; 0 if none has floats."""
    floats = [x.dtype for x in tensors.values() if x is not None and x.is_floating_point()]
    return max((torch.finfo(dtype).eps for dtype in floats), default=0.0)
