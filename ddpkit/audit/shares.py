"""Find the weight with which each micro-batch was added, where no one factor explains a gradient.

The parallel gradient and the serial one are weighted sums of the gradients that single backwards
computed on the ranks. A few elements of each of these (`Step.parts`) make a small system of linear
equations, whose solution is the weights. A micro-batch's weight over its serial one is its factor:
×2 for a rank that has half of a rank's average tokens, where the ranks' mean losses are averaged.
"""

import math

import torch
from torch import Tensor

from .tape import Step, some_of

TOLD_APART = 1e-4  # least singular value, of the largest: below, two gradients are one
LEFT = 1e-3  # of a result's length: a sum leaves no more, by the roundings of float32
NO_SUM = 0.1  # of a result's length: more than the roundings of bfloat16 leave
DIGITS = 3
OTHER_TERMS = (
    "the ranks added up what their backwards found, but the serial gradient is no sum of these: "
    "other samples, targets or masks, or a missing term; or statistics, buffers or negatives of a "
    "rank's own samples, dropout"
)


def shares(names: list[str], ours: Step, theirs: list[Step]) -> str:
    """Return a sentence on how much each micro-batch counts, beside the serial run.

    If only one of the two gradients is a sum of what backwards computed, the sentence says that.
    Returns "" if all count alike, or no weights can be found: gradients are partial, not finite, or
    differ between ranks, those of micro-batches are nearly linearly dependent, neither the parallel
    nor the serial one is their sum, or the difference may be one of roundings.

    names: the tensors whose gradients differ from the serial ones. ours: the serial step.
    theirs: the same step on each rank.
    """
    places, columns, known = backwards(names, theirs)
    if columns is None:
        return ""
    due, *results = (elements(step.gradients, known) for step in (ours, *theirs))
    if due is None or results[0] is None or len(due) != len(columns):
        return ""
    if not all(same(results[0], other) for other in results):
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
        return OTHER_TERMS
    return ""


def kept(names: list[str], theirs: list[Step]) -> str:
    """Return a sentence on which micro-batches are averaged, lost, or stay on their own rank.

    Returns "" if all have one fate, one has no clear fate, or no weights are found as in `shares`.
    """
    places, columns, known = backwards(names, theirs)
    if columns is None:
        return ""
    results = [elements(step.gradients, known) for step in theirs]
    if any(x is None or len(x) != len(columns) for x in results):
        return ""
    weights, left = zip(*(solve(columns, result) for result in results), strict=True)
    if max(left) > LEFT:
        return ""
    by_rank = torch.stack(weights)  # row: whose gradient; column: whose backward
    told: dict[str, list[str]] = {}
    for number in sorted({number for _, number in places}):
        of_it = [column for column, (_, other) in enumerate(places) if other == number]
        told.setdefault(fate(by_rank[:, of_it]), []).append(str(number))
    if len(told) == 1 or "" in told:
        return ""
    lines = []
    for verbs, numbers in told.items():
        one, several = verbs.split("/")
        which = f"micro-batches {', '.join(numbers)} {several}"
        lines.append(which if len(numbers) > 1 else f"micro-batch {numbers[0]} {one}")
    there = int(by_rank[0].count_nonzero())
    return f"{'; '.join(lines)}: rank 0's gradient has {there} of the step's {len(places)}"


def fate(weights: Tensor) -> str:
    """Return "is averaged/are averaged", or "is lost/...", "stays on its rank/..."; "" if unclear.

    These are verbs for one micro-batch and for several. weights: a row for each rank's gradient, a
    column for each rank's backward of that micro-batch.
    """
    ranks, backwards_of_it = weights.shape
    if not weights.any():
        return "is lost/are lost"
    if (weights - weights[0, 0]).abs().max() <= LEFT * weights[0, 0].abs():
        return "is averaged/are averaged"
    own = weights.diagonal()
    stays = ranks == backwards_of_it and own.all() and weights.count_nonzero() == ranks
    return "stays on its rank/stay on their rank" if stays else ""


def backwards(
    names: list[str], theirs: list[Step]
) -> tuple[list[tuple[int, int]], Tensor | None, list[str]]:
    """Return (places, columns, names): elements of each backward's gradient, side by side.

    places: (rank, micro-batch) of each column. names: the tensors in a column, those of `names`
    that all backwards have. columns: (elements, backwards); None if there are fewer than 2 columns
    or 2 rows a column, if their lengths differ, if one isn't finite, or if they are nearly linearly
    dependent.
    """
    places: list[tuple[int, int]] = []
    parts: list[dict[str, Tensor]] = []
    for rank, step in enumerate(theirs):
        places += [(rank, number) for number in range(len(step.parts))]
        parts += step.parts
    in_all = set(names).intersection(*parts)
    known = [name for name in names if name in in_all]
    if len(parts) < 2 or not known:
        return places, None, known
    found = [torch.cat([*map(part.get, known)]) for part in parts]
    if len({len(x) for x in found}) > 1 or len(found[0]) < 2 * len(parts):
        return places, None, known
    columns = torch.stack(found, 1)
    if not columns.isfinite().all():
        return places, None, known
    sizes = torch.linalg.svdvals(columns)
    return places, columns if sizes[-1] > TOLD_APART * sizes[0] else None, known


def elements(gradients: dict[str, Tensor | None], names: list[str]) -> Tensor | None:
    """Return the elements that `some_of` picks of each gradient, joined.

    Returns None if a gradient is missing, or an element is NaN or infinite.
    """
    found = [gradients.get(name) for name in names]
    if any(x is None for x in found):
        return None
    joined = torch.cat([*map(some_of, found)])
    return joined if joined.isfinite().all() else None


def same(a: Tensor, b: Tensor | None) -> bool:
    return b is not None and torch.equal(a, b)


def solve(columns: Tensor, result: Tensor) -> tuple[Tensor, float]:
    """Solve columns · weights = result by least squares; return (weights, what is left over).

    That is a share of the result's norm, inf if all of it is 0. Weights of at most `LEFT` of the
    largest become 0.
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
