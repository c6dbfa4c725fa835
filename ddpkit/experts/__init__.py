"""A mixture of experts across ranks: many MLPs, of which each token visits k.

E experts on e of W ranks, T tokens a rank, a row of d numbers of s bytes each. On each rank:

    router        scores of all experts for each token; the best k are chosen, and weighed
    dispatch      rows sorted by expert, and put back: their weighted sum
    exchange      all-to-all of counts, then of rows, with splits that differ from rank to rank
    experts       each expert that lives here computes the rows that came for it
    exchange      the way back

In backward both exchanges of rows happen again, with gradients: four all-to-alls of rows, each
(number of rows that go to other ranks)·d·s bytes; (e−1)/e·T·k·d·s if tokens spread evenly.
`rows_between` counts rows from the routing table. One more all-to-all carries 8·E bytes of counts.

Without a limit ("dropless") all wait for the rank with most rows; with a capacity, rows beyond it
skip their expert. Loads are levelled by a loss, or by a bias of the router that `move_bias` moves.

An expert's gradient already sums over the tokens of e ranks, so only W/e copies of it are left to
sum; yet it is divided by W like all others: `average_gradients`. For clipping, `count_copies` says
how many ranks hold each parameter. In Megatron-LM: MoELayer, --expert-model-parallel-size.
Lepikhin et al. 2020 (GShard); Fedus et al. 2021 (Switch); DeepSeek-AI 2024 (V3). Notebook 13.
"""

from .dispatch import capacity_of, rows_between, through_experts, within_capacity
from .layer import ExchangeRows, MixtureOfExperts, exchange_counts, make_sparse
from .parallel import (
    average_gradients,
    balance,
    balance_losses,
    count_copies,
    layers,
    share_experts,
    whole_state,
)
from .router import Router, balance_loss, move_bias

__all__ = [
    "ExchangeRows",
    "MixtureOfExperts",
    "Router",
    "average_gradients",
    "balance",
    "balance_loss",
    "balance_losses",
    "capacity_of",
    "count_copies",
    "exchange_counts",
    "layers",
    "make_sparse",
    "move_bias",
    "rows_between",
    "share_experts",
    "through_experts",
    "whole_state",
    "within_capacity",
]
