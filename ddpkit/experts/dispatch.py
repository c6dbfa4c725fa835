"""Index arithmetic from tokens to experts and back: no process, no message.

A routing table is (T, k): the numbers of the experts that each token visits. Notebook 13.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import torch
from torch import Tensor


def through_experts(
    rows: Tensor,
    chosen: Tensor,
    weights: Tensor,
    experts: int,
    process: Callable[[Tensor, Tensor], Tensor],
    kept: Tensor | None = None,
) -> Tensor:
    """Send each row to its experts, and return the weighted sum of what comes back, (T, d).

    rows: (T, d). chosen, weights: (T, k). experts: their number, E. process(rows, counts): takes
    rows sorted by expert, as many for each as counts says, (E,), int64; returns their results, of d
    numbers each, in the same order. kept: a mask, (T, k), of the choices that count, None: all; a
    row without any gets zeros. Sums are in the wider dtype of results and weights, the result in
    that of the rows.
    """
    k = chosen.shape[-1]
    by_expert = chosen.flatten().argsort(stable=True)
    if kept is not None:
        by_expert = by_expert[kept.flatten()[by_expert]]
    counts = torch.bincount(chosen.flatten()[by_expert], minlength=experts)
    token = by_expert // k  # choice number t·k + i is token t's
    results = process(rows[token], counts)  # here, or on the ranks that have the experts
    weight = weights.flatten()[by_expert]
    weighted = results * weight.unsqueeze(-1)
    # A token's rows come back from several experts: added up where they left.
    total = weighted.new_zeros(rows.shape).index_add(0, token, weighted)
    return total.to(rows.dtype)


def capacity_of(factor: float, tokens: int, k: int, experts: int) -> int:
    """Return how many of a rank's rows an expert takes at most: `factor` times its fair share.

    The fair share is tokens · k / experts, for the rank's number of tokens; the result is rounded
    up, and 0 without tokens. ValueError: the factor isn't above 0.
    """
    if not factor > 0:
        raise ValueError(f"expected a capacity factor > 0, got {factor}: 1.25 is usual")
    exact = Fraction(str(factor))  # 1.1 itself: the float is a bit more, and would be rounded up
    return math.ceil(exact * tokens * k / experts)


def within_capacity(chosen: Tensor, experts: int, capacity: int) -> Tensor:
    """Return a mask, (T, k), of the choices that find room: of each expert's, the first `capacity`.

    chosen: (T, k). Choices come token after token, and False marks those that don't fit: the
    token's other choices still count. ValueError: a capacity below 1.
    """
    if capacity < 1:
        raise ValueError(f"expected a capacity of 1 row at least, got {capacity}: raise it")
    flat = chosen.flatten()
    by_expert = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=experts)
    first = counts.cumsum(0) - counts  # where each expert's rows begin among the sorted
    place = torch.empty_like(flat)
    number = torch.arange(len(flat), device=flat.device)
    place[by_expert] = number - first[flat[by_expert]]
    return (place < capacity).view_as(chosen)


def rows_between(
    tables: Sequence[Tensor], experts: int, kept: Sequence[Tensor] | None = None
) -> list[list[int]]:
    """Predict all splits of an exchange: return [r][s], the number of rows from rank r to rank s.

    tables: each rank's routing table, (T, k). experts: their number; each rank has equally many, in
    order. kept: each rank's mask, (T, k), from `within_capacity`; None: all count.
    """
    ranks = len(tables)
    sent = []
    for rank, table in enumerate(tables):
        # An expert's number says whose it is: its rank keeps experts / ranks of them.
        choices = table.flatten() if kept is None else table[kept[rank]]
        owners = choices // (experts // ranks)
        sent.append(torch.bincount(owners, minlength=ranks).tolist())
    return sent
