"""Find the weight with which each micro-batch was added, where no one factor explains a gradient.

The parallel gradient and the serial one are sums of what the ranks' backwards found, each with a
weight. A few elements of every backward's gradient (`Step.parts`) make a small system of linear
equations, whose solution is the weights. Where a weight isn't the serial one, their quotient is the
factor of that micro-batch: ×2 for a rank with half of the tokens, whose mean counts like any other.
"""

import math

import torch
from torch import Tensor

from .tape import Step, some_of

TOLD_APART = 1e-4  # least singular value, of the largest: below, two gradients are one
LEFT = 1e-3  # of a result's length: a sum leaves no more, by the roundings of float32
NO_SUM = 0.1  # of a result's length: more than the roundings of bfloat16 leave
DIGITS = 3


def shares(names: list[str], ours: Step, theirs: list[Step]) -> str:
    """Return a sentence on how much each micro-batch counts, beside the serial run.

    Returns "" if no weights can be found: gradients are partial or differ between ranks, those of
    two micro-batches are nearly linearly dependent, or the difference may be one of roundings.

    names: the tensors whose gradients differ from the serial ones. ours: the serial step.
    theirs: the same step on each rank.
    """
    places: list[tuple[int, int]] = []
    parts: list[dict[str, Tensor]] = []
    for rank, step in enumerate(theirs):
        places += [(rank, number) for number in range(len(step.parts))]
        parts += step.parts
    in_all = set(names).intersection(*parts)
    known = [name for name in names if name in in_all]
    if len(parts) < 2 or not known:
        return ""
    due, *results = (elements(step.gradients, known) for step in (ours, *theirs))
    if due is None or results[0] is None or not all(same(results[0], other) for other in results):
        return ""
    columns = torch.stack([torch.cat([*map(part.get, known)]) for part in parts], 1)
    if not len(columns) == len(due) == len(results[0]) >= 2 * len(parts):
        return ""
    sizes = torch.linalg.svdvals(columns)
    if sizes[-1] <= TOLD_APART * sizes[0]:
        return ""
    weights, left = solve(columns, results[0])
    serially, left_serially = solve(columns, due)
    if max(left, left_serially) <= LEFT:
        return in_words(dict(zip(places, quotients(weights, serially), strict=True)))
    if left > NO_SUM and left_serially <= LEFT:
        return (
            "the serial gradient is a sum of what the ranks' backwards found, theirs isn't: "
            "something stale, or added or lost on the way"
        )
    if left <= LEFT and left_serially > NO_SUM:
        return (
            "the ranks added up what their backwards found, but the serial gradient is no sum of "
            "these: other samples, targets or masks, or a missing term"
        )
    return ""


def elements(gradients: dict[str, Tensor | None], names: list[str]) -> Tensor | None:
    """Return some elements of these gradients, end to end; None if one is missing."""
    found = [gradients.get(name) for name in names]
    return None if any(x is None for x in found) else torch.cat([*map(some_of, found)])


def same(a: Tensor, b: Tensor | None) -> bool:
    return b is not None and torch.equal(a, b)


def solve(columns: Tensor, result: Tensor) -> tuple[Tensor, float]:
    """Solve columns · weights = result; return the weights and what is left, as a share of result.

    Weights that are zero but for roundings are zero.
    """
    # torch 2.13's default driver is wrong about columns that depend on each other.
    weights = torch.linalg.lstsq(columns, result[:, None], driver="gelsd").solution[:, 0]
    length = result.norm().item()
    left = (columns @ weights - result).norm().item() / length if length else math.inf
    return torch.where(weights.abs() <= LEFT * weights.abs().max(), 0.0, weights), left


def quotients(weights: Tensor, serially: Tensor) -> list[float]:
    """Return weights / serially; 0 / 0 is 1, and what isn't in the serial run is infinite."""
    found = weights / serially
    return torch.where((weights == 0) & (serially == 0), 1.0, found).tolist()


def in_words(factors: dict[tuple[int, int], float]) -> str:
    """Return a sentence on unequal factors, {(rank, micro-batch): factor}; "" if all are equal.

    It names ranks or micro-batches alone where that is enough to tell them apart.
    """
    ranks = {rank for rank, _ in factors}
    several = any(number for _, number in factors)
    shown = {}
    for place, factor in factors.items():
        shown[place] = f"×{factor:.{DIGITS}g}" if math.isfinite(factor) else "not in the serial run"
    told: dict[str, list[str]] = {}
    for (rank, number), factor in shown.items():
        where = f"rank {rank}"
        if several:
            on_all = {shown.get((other, number)) for other in ranks} == {factor}
            where = f"micro-batch {number}" if on_all else f"micro-batch {number} of rank {rank}"
        told.setdefault(factor, []).append(where)
    if len(told) == 1:
        return ""
    lines = []
    for factor, places in told.items():
        lines.append(f"{factor} for {', '.join(dict.fromkeys(places))}")
    return f"{'micro-batches' if several else 'ranks'} don't count alike: {'; '.join(lines)}"
