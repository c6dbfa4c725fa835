"""Context parallelism: every rank has some tokens of each sequence, and attention needs all.

All layers but attention act on each token alone, so a rank computes them for its own tokens. In
attention, its queries meet the keys and values of all ranks. n tokens a rank, W ranks; u = batch ·
kv heads · n · head size is the count of numbers in k, or in v, of one rank; s bytes each. A rank
sends, forward and backward:

    ring_attention        2(W−1)·u·s      as much again, and 2W·u·4 of dk, dv    tokens in order
    zigzag_attention      2(W−1)·u·s      as much again, and 2W·u·4 of dk, dv    equal work, causal
    gathered_attention    2(W−1)·u·s      2(W−1)·u·4                             all k, v in memory
    all_to_all_attention  (W−1)/W · 2(heads/kv heads + 1)·u·s, twice             W divides kv heads

(The two rings send k and v W−1 times and dk, dv W times; one rank alone sends nothing.)

Each is attention(q, k, v, causal, group), for q (..., heads, n, D) and k, v (..., kv heads, n, D),
this rank's tokens, as many on every rank. Returns (..., heads, n, D) in the dtype of q. Scores,
their sums, dk and dv are float32 at least, also while they travel, except in all_to_all_attention,
where gradients travel in the dtype of q. ValueError: shapes or dtypes that don't fit, n that is odd
(except in all_to_all_attention), or a rank outside `group`.

`deal` says which tokens a rank has; `gpt` trains a GPT on shared sequences. Ranks that share a
sequence hold the same weights and different tokens: for the gradients they are data-parallel ranks.

In PyTorch: torch.distributed.tensor.experimental.context_parallel. Liu, Zaharia and Abbeel 2023
(ring); Brandon et al. 2023 (equal work); Jacobs et al. 2023 (Ulysses); Llama Team 2024, section
3.3.2 (all-gather). Notebook 13.
"""

from .all_to_all import HeadsForTokens, all_to_all_attention
from .deal import contiguous, pairs_of_hop, places, scores_of_hop, share_tokens, zigzag
from .gathered import gathered_attention
from .gpt import share_sequence, summed_loss
from .ring import pass_on, ring_attention, ring_backward, travel, zigzag_attention

__all__ = [
    "HeadsForTokens",
    "all_to_all_attention",
    "contiguous",
    "gathered_attention",
    "pairs_of_hop",
    "pass_on",
    "places",
    "ring_attention",
    "ring_backward",
    "scores_of_hop",
    "share_sequence",
    "share_tokens",
    "summed_loss",
    "travel",
    "zigzag",
    "zigzag_attention",
]
