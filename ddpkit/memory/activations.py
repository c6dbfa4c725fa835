"""The bytes that a transformer block keeps for backward, predicted term by term.

In formulas s is the length of a sequence, b the batch, d the width, and H the number of heads.
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..tools.checks import check_counts

RANDOM_STATE_BYTES = 5056  # on a CPU; 16 more with a GPU


class Term(NamedTuple):
    """A tensor kept for backward: `coefficient` times `unit` is `nbytes`, as in 2 times "sbd"."""

    name: str
    coefficient: int
    unit: str
    nbytes: int

    @property
    def formula(self) -> str:
        return f"{self.coefficient}{self.unit}"


def block_bytes(batch, length, width, heads):
    """Return 34sbd + 5bs²H, the bytes that a block keeps for backward (Korthikanti et al. 2022).

    Equation 1: numbers of 2 bytes, masks of dropout of 1; without the 16sb of the norms.
    """
    tokens, pairs = batch * length * width, batch * length**2 * heads
    numbers = 16 * tokens + 2 * pairs
    masks = 2 * tokens + pairs
    return 2 * numbers + masks


def block_activations(
    batch: int,
    length: int,
    width: int,
    heads: int,
    itemsize: int = 2,
    dropout: bool = True,
    attention: str = "materialised",
    mask_bytes: int = 1,
    statistic_bytes: int = 4,
) -> list[Term]:
    """List what a block of `ddpkit.models.GPT` keeps for backward, in the order of forward.

    itemsize: bytes of a number. attention: "materialised" keeps the matrix of attention weights,
    "flash" one number (4 bytes) for each row of it. dropout: after each half, and of attention
    weights that are materialised. mask_bytes: of each number in a mask of dropout; nn.Dropout on a
    CPU keeps a mask of numbers, so `itemsize`. statistic_bytes: of each mean and 1/deviation of a
    norm; on a CPU `itemsize`. ValueError: no such attention, or one of the first five arguments
    isn't a whole number from 1 on.

    The defaults are the paper's setting: 34sbd + 5bs²H, and 16sb for the norms, which it leaves
    out. Korthikanti et al. 2022, section 4.1 and equation 1. Notebook 06.
    """
    check_counts(batch=batch, length=length, width=width, heads=heads, itemsize=itemsize)
    units = {
        "sbd": batch * length * width,
        "bs²H": batch * length**2 * heads,
        "sb": batch * length,
        "bsH": batch * length * heads,
    }
    mask = [("mask of dropout", mask_bytes, "sbd")] if dropout else []
    if attention == "materialised":
        weights = [("attention weights, of softmax", itemsize, "bs²H")]
        if dropout:
            weights.append(("mask of their dropout", mask_bytes, "bs²H"))
            weights.append(("weights after dropout", itemsize, "bs²H"))
    elif attention == "flash":
        weights = [("log-sum-exp of each row", 4, "bsH")]
    else:
        expected = "expected attention to be 'materialised' or 'flash'"
        raise ValueError(f"{expected}, got {attention!r}: choose one")
    kept = [
        ("input of the norm before attention", itemsize, "sbd"),
        ("mean and 1/deviation of each token", 2 * statistic_bytes, "sb"),
        ("input of the layer qkv", itemsize, "sbd"),
        ("queries, keys and values", 3 * itemsize, "sbd"),
        *weights,
        ("input of the layer out", itemsize, "sbd"),
        *mask,
        ("input of the norm before the MLP", itemsize, "sbd"),
        ("mean and 1/deviation of each token", 2 * statistic_bytes, "sb"),
        ("input of the MLP's first layer", itemsize, "sbd"),
        ("input of GELU", 4 * itemsize, "sbd"),
        ("input of the MLP's second layer", 4 * itemsize, "sbd"),
        *mask,
    ]
    return [Term(name, times, unit, times * units[unit]) for name, times, unit in kept]


def checkpointed_activations(
    batch: int, length: int, width: int, itemsize: int = 2, selective: bool = False
) -> list[Term]:
    """List what a block keeps under `ddpkit.checkpointing`, whatever its attention and dropout.

    It keeps its input and the state of the random numbers (as on a CPU: 5056 bytes, unit "").
    selective: the results of its four linear layers are kept as well. ValueError: a size that
    isn't a whole number from 1 on.
    """
    check_counts(batch=batch, length=length, width=width, itemsize=itemsize)
    kept = [("input of the block", 1)]
    if selective:
        kept += [("queries, keys and values", 3), ("result of the layer out", 1)]
        kept += [("result of the MLP's first layer", 4), ("result of the MLP's second layer", 1)]
    terms = [Term("state of the random numbers", RANDOM_STATE_BYTES, "", RANDOM_STATE_BYTES)]
    for name, times in kept:
        coefficient = times * itemsize
        terms.append(Term(name, coefficient, "sbd", coefficient * batch * length * width))
    return terms


def coefficients(terms: Iterable[Term]) -> dict[str, int]:
    """Add up the terms by unit: {"sbd": 34, "sb": 16, "bs²H": 5} is 34sbd + 16sb + 5bs²H."""
    total = Counter()
    for term in terms:
        total[term.unit] += term.coefficient
    return dict(total)


class ByteDropout(nn.Module):
    """Dropout whose mask has a byte for each number even on a CPU, as on every GPU."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return torch.native_dropout(x, self.p, self.training)[0]


class MaterialisedAttention(nn.Module):
    """Attention as in textbooks: it makes the whole matrix of weights, and keeps it for backward.

    q, k, v and the result: (..., N, D). dropout: of the weights. Kept for backward: q, k,
    v and N² weights a head; with dropout also its mask, and the weights after it.
    """

    def __init__(self, dropout: nn.Module):
        super().__init__()
        self.dropout = dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        if causal:
            mask = scores.new_full(scores.shape[-2:], -torch.inf).triu(1)
            scores = scores + mask  # a sum keeps nothing for backward
        return self.dropout(scores.softmax(-1)) @ v
