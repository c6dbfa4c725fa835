"""Find the weights with which micro-batches were added up, where no one factor explains a result.

The parallel gradient and the serial one are sums of what the ranks' backwards found, each with a
weight. With a few elements of every backward's gradient (`Step.parts`) the weights are the solution
of a small system of linear equations, and where a weight isn't the serial one their quotient is the
factor of that micro-batch: ×2 for a rank with half of the tokens, whose mean counts like any other.
"""

import torch
from torch import Tensor

from .tape import Step, some_of

TOLD_APART = 1e-4  # least singular value, of the largest: below, two gradients are one
LEFT = 1e-3  # of a result's length, by roundings
DIGITS = 3


def shares(names: list[str], ours: Step, theirs: list[Step]) -> str:
    """Say how much each micro-batch counts in these tensors, beside the serial run; "" if unknown.

    ours: the serial step. theirs: those of all ranks; their gradients are alike.
    """
    places: list[tuple[int, int]] = []
    parts: list[dict[str, Tensor]] = []
    for rank, step in enumerate(theirs):
        places += [(rank, number) for number in range(len(step.parts))]
        parts += step.parts
    known = set(names).intersection(*parts)
    in_order = [name for name in names if name in known]
    results = [of.get(name) for of in (theirs[0].gradients, ours.gradients) for name in in_order]
    if len(parts) < 2 or not known or any(x is None for x in results):
        return ""
    columns = torch.stack([joined(part, in_order) for part in parts], 1)
    got, due = torch.cat([some_of(x) for x in results]).chunk(2)
    if len(got) != len(columns) or len(columns) < 2 * len(parts):
        return ""
    sizes = torch.linalg.svdvals(columns)
    if sizes[-1] <= TOLD_APART * sizes[0]:
        return ""
    weights, serially = weights_of(columns, got), weights_of(columns, due)
    if weights is None and serially is None:
        return ""
    if weights is None:
        return (
            "the serial gradient is a sum of what the ranks' backwards found, theirs isn't: "
            "something stale, or added or lost on the way"
        )
    if serially is None or not serially.all():
        return (
            "the ranks added up what their backwards found, but the serial gradient is no sum of "
            "these: other samples, targets or masks, or a missing term"
        )
    return in_words(dict(zip(places, (weights / serially).tolist(), strict=True)))


def joined(part: dict[str, Tensor], names: list[str]) -> Tensor:
    return torch.cat([part[name] for name in names])


def weights_of(columns: Tensor, result: Tensor) -> Tensor | None:
    """Solve columns · weights = result; None if no weights do."""
    weights = torch.linalg.lstsq(columns, result[:, None]).solution[:, 0]
    if (columns @ weights - result).norm() > LEFT * result.norm():
        return None
    return torch.where(weights.abs() < LEFT * weights.abs().max(), 0.0, weights)


def in_words(factors: dict[tuple[int, int], float]) -> str:
    """Tell {(rank, micro-batch): factor}, by ranks or micro-batches alone where that says all."""
    ranks = {rank for rank, _ in factors}
    numbers = {number for _, number in factors}
    told: dict[str, list[str]] = {}
    shown = {place: f"×{factor:.{DIGITS}g}" for place, factor in factors.items()}
    for rank, number in factors:
        same_on_all = len({shown.get((other, number)) for other in ranks}) == 1
        where = f"micro-batch {number}" if same_on_all and len(numbers) > 1 else f"rank {rank}"
        if len(numbers) > 1 and not same_on_all:
            where = f"micro-batch {number} of rank {rank}"
        listed = told.setdefault(shown[rank, number], [])
        if where not in listed:
            listed.append(where)
    if len(told) == 1:
        return ""
    one_by_one = "; ".join(f"{factor} for {', '.join(of)}" for factor, of in told.items())
    return f"{'micro-batches' if len(numbers) > 1 else 'ranks'} don't count alike: {one_by_one}"
