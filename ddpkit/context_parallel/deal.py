"""The deal of a sequence's tokens to ranks, and the scores that each then computes in each hop.

A sequence is cut into 2W chunks of equal length, and each rank has two. A deal lists them by rank:

    contiguous(3)    [(0, 1), (2, 3), (4, 5)]    the last rank sees most, the first next to nothing
    zigzag(3)        [(0, 5), (1, 4), (2, 3)]    all see equally much

A causal mask hides chunks after a query's own, and half of its own. So in each hop of a ring, which
brings a rank another rank's keys, it computes some pairs of chunks, whole or along the diagonal. No
process is needed for any of this. Notebook 13.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

Deal = list[tuple[int, int]]
Pair = tuple[int, int, bool]  # chunk of queries, chunk of keys, whether the diagonal cuts it

NO_TARGET = -100  # torch's cross-entropy leaves such targets out


def contiguous(world_size: int) -> Deal:
    """Return the deal in which each rank has two chunks that follow one another."""
    return [(2 * rank, 2 * rank + 1) for rank in range(world_size)]


def zigzag(world_size: int) -> Deal:
    """Return the deal of chunks 0 to W−1 to ranks 0 to W−1, and of the others on the way back.

    Cost: with a causal mask and n tokens a rank, each rank computes n²/2 scores a head in each hop
    and, in hop 0, n/2 more of the diagonal. Zhu 2024 (ring-flash-attention).
    """
    last = 2 * world_size - 1
    return [(rank, last - rank) for rank in range(world_size)]


def pairs_of_hop(deal: Deal, rank: int, hop: int, causal: bool = True) -> list[Pair]:
    """List what `rank` computes in a hop of the ring, when it has the keys of rank−hop.

    Returns (chunk of queries, chunk of keys, diagonal): of a diagonal pair, query i sees keys up to
    i; of the others, all. Pairs of which nothing is seen are left out.
    """
    owner = (rank - hop) % len(deal)
    pairs = []
    for query in deal[rank]:
        for key in deal[owner]:
            # Chunks are numbered along the sequence, so a smaller number is the past.
            if not causal or key < query:
                pairs.append((query, key, False))
            elif key == query:
                pairs.append((query, key, True))
    return pairs


def scores_of_hop(deal: Deal, rank: int, hop: int, chunk: int, causal: bool = True) -> int:
    """Count the scores of a head that `rank` computes in a hop of the ring, hidden ones left out.

    chunk: the number of tokens in a chunk.
    """
    whole = chunk * chunk
    half = chunk * (chunk + 1) // 2  # with the diagonal itself
    count = 0
    for _, _, diagonal in pairs_of_hop(deal, rank, hop, causal):
        count += half if diagonal else whole
    return count


def places(deal: Deal, rank: int, length: int) -> Tensor:
    """Return the positions in the sequence of `rank`'s tokens, in order: int64, (n,), on the CPU.

    length: tokens of the whole sequence. ValueError: 2W doesn't divide it.
    """
    chunks = 2 * len(deal)
    if length % chunks != 0:
        cut = f"a sequence of {length} tokens can't be cut into {chunks} equal chunks"
        raise ValueError(f"{cut} for {len(deal)} ranks: pad it, as share_tokens does")
    by_chunk = torch.arange(length).view(chunks, -1)
    return by_chunk[list(deal[rank])].flatten()


def share_tokens(tokens: Tensor, deal: Deal, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cut whole sequences: return this rank's inputs, their targets, and their positions.

    tokens: (batch, N + 1), int64, alike on the ranks that share them: N inputs and, one further,
    their targets. Returns (batch, n) twice, and (n,), on the CPU. Where 2W doesn't divide N, the
    end is padded: with token 0, which no token before it sees if attention is causal, NO_TARGET,
    and the last token's position.
    """
    # Shifted while whole: the last token of a chunk has its target in another one.
    inputs = tokens[:, :-1]
    targets = tokens[:, 1:]
    length = inputs.shape[1]
    padding = -length % (2 * len(deal))
    inputs = F.pad(inputs, (0, padding), value=0)
    targets = F.pad(targets, (0, padding), value=NO_TARGET)
    mine = places(deal, rank, length + padding)
    # What is padded has no place of its own; that of the last token will do.
    last = max(0, length - 1)
    return inputs[:, mine], targets[:, mine], mine.clamp(max=last)
