"""Tensor parallelism: every rank holds a part of every layer, and all compute on the same data.

    column-parallel    from all inputs, each rank computes some of the outputs    f before it
    row-parallel       from some inputs, each a summand of every output           g after it

         forward       backward
    f    identity      all-reduce: each rank has a summand of the inputs' gradient
    g    all-reduce    identity

A column-parallel layer's outputs are a row-parallel one's inputs, and what is between them acts on
each number, or each head, alone: an MLP is cut by its hidden numbers, attention by its heads. So a
transformer layer calls two all-reduces forward and two backward, of its activations, where data
parallelism calls one a step, of all gradients. Norms, dropout and sums stay whole on every rank;
`sequence` divides their tokens among the ranks. `split` deals parameters out and gathers them.

Megatron-LM; PyTorch's ColwiseParallel and RowwiseParallel. Shoeybi et al. 2019. Notebook 11.
"""

from .layers import (
    ColumnParallelLinear,
    CopyToRanks,
    RowParallelLinear,
    SumOverRanks,
    VocabParallelEmbedding,
    clip_grad_norm,
    vocabulary_cross_entropy,
)
from .sequence import GatherTokens, ParallelGPT, ScatterTokens, split_block, sum_copies
from .split import SplitLayer, count_copies, deal, gather, splits

__all__ = [
    "ColumnParallelLinear",
    "CopyToRanks",
    "GatherTokens",
    "ParallelGPT",
    "RowParallelLinear",
    "ScatterTokens",
    "SplitLayer",
    "SumOverRanks",
    "VocabParallelEmbedding",
    "clip_grad_norm",
    "count_copies",
    "deal",
    "gather",
    "split_block",
    "splits",
    "sum_copies",
    "vocabulary_cross_entropy",
]
