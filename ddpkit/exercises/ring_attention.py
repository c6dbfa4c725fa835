"""Checker of notebook 09's ring attention: keys and values go round, queries stay."""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpkit import ring_attention as library
from ddpkit.memory import watch

from .checker import (
    Exercise,
    Trial,
    check_wire,
    mistakes,
    rank_1_comes_last,
    unwritten_memory_shows,
)
from .softmax import Numbers

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these

TOKENS, WIDTH = 16, 2  # of a slice
BLOCKS = 6  # of scores, TOKENS x TOKENS: fewer may be alive at once; a row of 4 slices has 4
ALIVE = "numbers alive at once"
CAUSAL = (
    "Without causal it is right. In hop h the keys are those of rank - h: a rank's own are masked "
    "above the diagonal, those of ranks before it are all seen, those of ranks after it left out."
)


def _sequence(world_size: int) -> Tensor:
    """Make q, k and v of the whole sequence; scores are so high that exp overflows."""
    generator = torch.Generator().manual_seed(0)
    tensors = torch.randn(3, TOKENS * world_size, WIDTH, generator=generator)
    tensors[0, :, 0], tensors[1, :, 0] = 1, tensors[1, :, 0] + 100 * math.sqrt(WIDTH)
    return tensors


def _run(answer: Callable, causal: bool) -> dict:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine = [x.clone() for x in _sequence(world_size)[:, rank * TOKENS :][:, :TOKENS]]
    rank_1_comes_last()
    with unwritten_memory_shows(), watch(nn.Module(), buckets=mine) as timeline:
        o = answer(*mine, causal)
    alive = (max(timeline.totals) - timeline.totals[0]) // mine[0].itemsize
    same = isinstance(o, Tensor) and o.shape == mine[0].shape
    return {
        "o": Numbers(o, 1e-4) if same else f"{type(o).__name__} {getattr(o, 'shape', '')}",
        ALIVE: "few" if alive < BLOCKS * TOKENS**2 else f"{alive}, as many as {BLOCKS} blocks have",
    }


def _trials():
    for world_size, causal in ((2, False), (3, False), (3, True), (4, True), (1, True)):
        q, k, v = _sequence(world_size).double()
        s = q @ k.T / math.sqrt(WIDTH)
        if causal:
            s = s.masked_fill(torch.ones_like(s).triu(1) > 0, -math.inf)
        right = {ALIVE: "few"}
        parts = (s.softmax(1) @ v).split(TOKENS)
        expected = [{"o": Numbers(part)} | right for part in parts]
        sent = (world_size - 1) * q.nbytes  # in float64, k and v of a slice in float32
        what = "causal" if causal else "each token sees all"
        yield Trial(world_size, _run, (causal,), expected, sent, what)


MISTAKES = mistakes("""
only_its_own: range(world_size): → range(1):
    Each query has seen the keys of its own rank only: they go on to the right neighbour, W-1 times.
sums_for_different_maxima: else merge(triple, part) → else (
    ⏎    torch.maximum(triple[0], part[0]), triple[1] + part[1], triple[2] + part[2])
    Sums for different maxima were added: merge corrects them.
not_causal: if owner <= rank or not causal: → causal = False⏎if True:
    `causal` changes nothing: query i sees key j if j ≤ i, counted in the whole sequence.
each_block_causal: causal and owner == rank → causal
    Every block was masked as if it stood on the diagonal. Only a rank's own does: the keys of
    ranks before it are all seen, those of ranks after it not at all.
the_diagonal_is_seen_whole: diagonal = causal and owner == rank → diagonal = False
    Keys of ranks after this one are hidden, but not those after each query in its own block.
owner_to_the_right: (rank - hop) % world_size → (rank + hop) % world_size
    In hop h what is here came from h ranks to the left: it is that of rank - h.
skips_before_it_sends: works = [] → if causal and owner > rank: continue⏎works = []
    A rank with nothing to compute must pass on all the same: others wait for these keys.
""")


def _explain(trial: Trial, rank: int, expected: dict, got: dict) -> str | None:
    """Explain values that are wrong with `causal`: the trial before, without it, was right."""
    return CAUSAL if trial.what == "causal" and got["o"] != expected["o"] else None


ring_attention = Exercise(
    reference=library.ring_attention,
    note="tile_scores is q·kᵀ/√D, with -inf where causal hides; `group` is all ranks here.",
    trials=_trials,
    hints={
        "start": "W times: begin to send k and v to the right, and to receive from the left; "
        "compute the block of those that are here, wait, and go on with those that came.",
        "values": "scores = q @ k_here.T / √D, part = summarize(scores, v_here); the first part "
        "is the triple, then triple = merge(triple, part). At the end o / ell[:, None].",
        "hang": "Every rank sends and receives in each of W-1 hops, whether it computes or not. "
        "Begin both with dist.batch_isend_irecv before you wait.",
        "error": "m and ℓ are one number a row: o / ell[:, None]. With causal, the keys in hop h "
        "are those of rank (rank - h) % W: mask a rank's own block, skip those of ranks after it.",
    },
    praise="2(W-1) slices sent by each rank, and nowhere a whole row of scores.",
    wire=check_wire,
    explain=_explain,
    mistakes=MISTAKES,
)
