"""Draw the animation and the charts of notebook 13, and compute on ranks what they show.

The animation steps through ring attention, in which keys and values travel from rank to rank. In
hop 0 each rank has its own, and in each later hop those that its left neighbour had before. Shown
are the blocks of the score matrix that each rank computes, as `blocks_computed` noted them on the
ranks. A deal says which chunks of the sequence each rank has; deals have names, such as "in order"
and "zigzag". The charts show bytes sent by number of key/value heads, and how a router shares
tokens out to experts.

The argument `by_deal` of several functions is {name of the deal: for each rank, its list of
blocks}. A block is (hop, chunk of queries, chunk of keys, whether it is on the diagonal); hops are
numbered from 0, and chunks by their place in the sequence, from 0.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..context_parallel import (
    all_to_all_attention,
    blocks,
    contiguous,
    gathered_attention,
    ring,
    ring_attention,
    zigzag,
    zigzag_attention,
)
from ..context_parallel.deal import Deal
from ..tools.units import size
from . import page
from .page import Canvas, Picture, chart, legend
from .widgets import StepThrough

# What ranks compute

# A block of scores: hop, chunk of queries, chunk of keys, whether it is on the diagonal.
Seen = tuple[int, int, int, bool]


def blocks_computed(
    deal: Deal, causal: bool = True, seconds: float = 0.0
) -> tuple[list[Seen], float]:
    """Run ring attention on small tensors; note which blocks of scores this rank computes.

    Return (blocks in the order of computing, share of the run's time that this rank slept). A
    block is (hop, chunk of queries, chunk of keys, whether it is on the diagonal); in hop h the
    rank has the keys of rank − h, modulo the number of ranks. The run is measured from barrier to
    barrier, so it lasts until the slowest rank has ended. Call it on all ranks.

    deal: for each rank, the indices of the two chunks of the sequence that it has.
    causal: leave out blocks whose keys all come after the queries. If False, no block counts as on
        the diagonal.
    seconds: how long the rank sleeps at each block, as if it were a large one; half as long at one
        on the diagonal, of which the mask hides half. With 0 the share is 0.
    """
    rank = dist.get_rank()
    seen, forward = [], blocks.flash_forward
    owners = {chunk: owner for owner, chunks in enumerate(deal) for chunk in chunks}

    def noted(q: Tensor, k: Tensor, v: Tensor, tile: int, diagonal: bool):
        query, key = int(q[..., 0, 0]), int(k[..., 0, 0])
        hop = (rank - owners[key]) % len(deal)
        seen.append((hop, query, key, diagonal))
        time.sleep(seconds / 2 if diagonal else seconds)
        return forward(q, k, v, tile, diagonal)

    x = torch.tensor(deal[rank], dtype=torch.float32).view(1, 2, 1).repeat(1, 1, 2)
    dist.barrier()
    began = time.perf_counter()
    with patch.object(blocks, "flash_forward", noted):
        kv = torch.stack((x, x))
        blocks.attend(x, ring.travel(kv), deal, rank, causal)
    dist.barrier()  # so that the time of the slowest rank counts on all
    whole = sum(0.5 if diagonal else 1.0 for *_, diagonal in seen)
    return seen, whole * seconds / (time.perf_counter() - began)


def deals(world_size: int) -> dict[str, Deal]:
    """Return {name: deal} for three ways to give the 2·W chunks of a sequence to W ranks.

    A deal lists for each rank the indices of its two chunks. Those of rank r are 2r and 2r + 1 in
    the deal "in order", r and r + W in "like cards", r and 2W − 1 − r in "zigzag".
    """
    cards = [(rank, rank + world_size) for rank in range(world_size)]
    return {"in order": contiguous(world_size), "like cards": cards, "zigzag": zigzag(world_size)}


SCHEMES = {
    "ring": ring_attention,
    "zigzag": zigzag_attention,
    "all-gather": gathered_attention,
    "all-to-all": all_to_all_attention,
}


def both_ways(scheme: str, dtype: torch.dtype, heads: int = 8, kv_heads: int = 8) -> None:
    """Run causal attention over a sequence that the ranks share, forward and then backward.

    Launch this on every rank, and pass what `launch` returns to `sent`, which counts the bytes of
    each pass; a barrier separates the two. Each rank has 8 tokens, and a head 16 numbers for each.

    scheme: "ring", "zigzag", "all-gather" or "all-to-all", a key of `SCHEMES`.
    dtype: the dtype of queries, keys and values.
    heads, kv_heads: the number of query heads, and of key heads (of value heads as well). `heads`
        is a multiple of `kv_heads`; for "all-to-all", both are multiples of the number of ranks.
    """
    q = torch.ones(1, heads, 8, 16, dtype=dtype, requires_grad=True)
    k, v = torch.ones(2, 1, kv_heads, 8, 16, dtype=dtype, requires_grad=True)
    out = SCHEMES[scheme](q, k, v, True)
    dist.barrier()
    out.sum().backward()


def sent(run) -> tuple[int, int, int]:
    """Return (bytes forward, bytes backward, number of calls) of rank 0 in a run of `both_ways`.

    `both_ways` runs attention over a sequence that the ranks share: forward, a barrier, backward.
    The bytes that rank 0 sends to the others are computed from its calls' records, not measured.
    With W ranks, a message counts as the bytes of its tensor, and an all-gather as W − 1 times the
    bytes of rank 0's shard. An all-to-all or reduce-scatter counts as (W − 1)/W of the bytes of its
    input, because rank 0's own part stays. The number of calls is that of both passes together,
    without receives and the barrier.

    run: for example the result of launch(both_ways, "ring", torch.float32, world_size=4).
    ValueError: rank 0 didn't make exactly one barrier call, the mark between the two passes.
    """
    others = len(run.wire) - 1
    times = {"send": 1, "all_gather": others}  # of the bytes in a record
    parts = [[]]
    for record in run.wire[0]:
        if record.op == "barrier":
            parts.append([])
        elif record.op != "recv":
            parts[-1].append(record.bytes * times.get(record.op, others / (others + 1)))
    there, back = parts
    return int(sum(there)), int(sum(back)), len(there + back)


def learn(model: nn.Module, loss_of, optimizer_cls, synchronize=lambda: None) -> Tensor:
    """Train a model for three steps; return the losses as a detached tensor of shape (3,).

    model: trained in place. loss_of: called without arguments; it runs forward and returns the
        loss, a scalar tensor.
    optimizer_cls: called as optimizer_cls(model.parameters(), lr=0.1).
    synchronize: called after each backward, before the optimizer's step, to average gradients, for
        example.
    """
    optimizer = optimizer_cls(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(loss_of())
        losses[-1].backward()
        synchronize()
        optimizer.step()
    return torch.stack(losses).detach()


# The animation: for each deal a matrix of blocks, each CELL pixels wide and high

CELL, TOP = 33, 96


def score_player(runs: Mapping[str, Iterable[tuple[list[Seen], float]]]) -> StepThrough:
    """Return a widget with a slider over the hops of ring attention, several deals side by side.

    A deal says which chunks of the sequence each rank has. The picture of a hop shows for each deal
    the matrix of scores, with the blocks that ranks have computed by the end of that hop.

    runs: {name of the deal: for each rank, the result of `blocks_computed`}. A result is (blocks,
        share of time); the share isn't used. A block is (hop, chunk of queries, chunk of keys,
        whether it is on the diagonal). All runs have the same number of ranks.
    """
    by_deal = {}
    for name, run in runs.items():
        by_deal[name] = [seen for seen, _ in run]
    hops = len(next(iter(by_deal.values())))

    def look(hop: int) -> tuple[str, Picture]:
        said = describe(by_deal, hop)
        return f"Hop {hop} of 0 to {hops - 1}. {said}", draw(by_deal, hop, said)

    text = "\n".join(f"hop {hop}: {describe(by_deal, hop)}" for hop in range(hops))
    return StepThrough(look, "hop", range(hops), text=text, telling=hops - 1)


def describe(by_deal: Mapping[str, list[list[Seen]]], hop: int) -> str:
    """Return in words how many blocks each rank computes in a hop: "in order 2 2; zigzag 2 2".

    A block on the diagonal counts as a half.
    """
    said = []
    for name, ranks in by_deal.items():
        said.append(" ".join([name, *(f"{computed(seen, hop):g}" for seen in ranks)]))
    return "; ".join(said)


def computed(seen: list[Seen], hop: int) -> float:
    """Return how many blocks a rank computes in a hop; a block on the diagonal counts as a half.

    seen: the rank's blocks of all hops, each (hop, chunk of queries, chunk of keys, whether it is
        on the diagonal).
    """
    return sum(0.5 if diagonal else 1.0 for at, *_, diagonal in seen if at == hop)


def draw(by_deal: Mapping[str, list[list[Seen]]], hop: int, text: str) -> Picture:
    """Draw for each deal the matrix of scores, with the blocks that are computed up to hop `hop`.

    Rows are chunks of queries, columns chunks of keys. A computed block has the colour of its rank
    and the number of its hop, with a ½ if it is on the diagonal; those of this hop have a thick
    frame. Blocks of later hops are white, and those that no rank computes grey.

    text: the picture's alt text.
    """
    ranks = len(next(iter(by_deal.values())))
    side = 2 * ranks * CELL
    canvas = Canvas(40 + len(by_deal) * (side + 40), TOP + side + 40 + 44)
    for number, (name, seen_by) in enumerate(by_deal.items()):
        left = 40 + number * (side + 40)
        canvas.text(left + side / 2, 28, name, page.NORMAL, bold=True)
        canvas.text(left + side / 2, 62, "keys, by chunk")
        for row in range(2 * ranks):
            canvas.text(left - 14, TOP + (row + 0.5) * CELL, str(row))
            canvas.text(left + (row + 0.5) * CELL, TOP - 12, str(row))
        canvas.box(left, TOP, side, side, page.FAINT, page.GREY)
        _draw_blocks(canvas, left, seen_by, hop)
    for rank in range(ranks):
        canvas.badge(40 + 96 * rank, TOP + side + 32, rank)
    key = "a block's number: its hop; ½: on the diagonal"
    canvas.text(60 + 96 * ranks, TOP + side + 50, key, align="left")
    return canvas.picture(text)


def _draw_blocks(canvas: Canvas, left: float, seen_by: list[list[Seen]], hop: int) -> None:
    """Draw the blocks of one deal into its matrix, whose left edge is at `left` pixels.

    A block up to hop `hop` has its rank's colour and the number of its hop, with a ½ if it is on
    the diagonal; those of hop `hop` have a thick frame as well. Blocks of later hops are white.
    seen_by: for each rank, its list of blocks: one value of `by_deal`.
    """
    found = [(block, rank) for rank, seen in enumerate(seen_by) for block in seen]
    # The blocks of this hop are drawn last, so that no other block covers their frames.
    for (at, query, key, diagonal), rank in sorted(found, key=lambda each: each[0][0] == hop):
        now = at == hop
        fill = page.colour(rank) if at <= hop else page.EMPTY
        x, y = left + key * CELL, TOP + query * CELL
        canvas.box(x, y, CELL, CELL, fill, "black" if now else page.GREY, 4 if now else 1)
        if at <= hop:
            said = f"{at}½" if diagonal else str(at)
            canvas.text(x + CELL / 2, y + CELL / 2, said, ink=page.ink(fill), bold=now)


# Charts


def sent_for_a_key(scheme: str, heads: int, kv_heads: int, world_size: int) -> float:
    """Return how much a rank sends in the forward pass, as a multiple of one head's keys.

    The unit is the bytes of one head's keys for the tokens of one rank. Take 4 ranks, 8 heads and 8
    kv_heads. A ring sends 48.0: 2 (keys and values) × 8 heads × 3 hops. All-to-alls send 24.0: 4
    (q, k, v and outputs) × 8 heads × 3/4, as a quarter stays on the rank.

    scheme: "ring" for ring attention; anything else for two all-to-alls. By the first, each rank
        swaps q, k and v of its own tokens for those of all tokens in 1/W of the heads. The second
        brings outputs back. W must divide heads and kv_heads, which isn't checked.
    heads, kv_heads: the number of query heads, and of key heads (of value heads as well).
    world_size: W, the number of ranks among which the sequence is divided.
    """
    heads_sent = world_size * kv_heads if scheme == "ring" else heads + kv_heads
    return 2 * (world_size - 1) / world_size * heads_sent


LOOKS = {"ring": (page.ORANGE, "o"), "all-to-all": (page.BLUE, "s")}


def crossing(
    measured: Mapping[str, Mapping[int, float]], heads: int, world_size: int, unit: float
) -> Picture:
    """Draw the bytes that a rank sends in forward against the number of key/value heads.

    The schemes are a ring, in which keys and values travel, and an all-to-all, which gives each
    rank the whole sequence for some of the heads. Lines show computed bytes, points those that a
    run sent. The all-to-all's line is dotted where there are fewer key/value heads than ranks: it
    is impossible there, as some ranks would get none. A dashed line marks the number of key/value
    heads with which both formulas give the same bytes, which may lie in the dotted part. The alt
    text states this number, and the most bytes that were measured.

    measured: {"ring" or "all-to-all": {number of key/value heads: bytes}}, with both keys.
    heads: the number of query heads. world_size: the number of ranks.
    unit: the bytes of one head's keys on a rank.
    """
    title = f"Sent by each of {world_size} ranks in forward, {heads} heads"
    figure, (axes,) = chart(title, 460)
    for scheme, (fill, marker) in LOOKS.items():
        counts = range(1, heads + 1)
        line = [unit * sent_for_a_key(scheme, heads, kv, world_size) for kv in counts]
        # Fewer heads of keys and values than ranks: an all-to-all can't deal them out.
        first = world_size - 1 if scheme == "all-to-all" else 0
        axes.plot(counts[: first + 1], line[: first + 1], color=fill, lw=3, ls=":")
        axes.plot(counts[first:], line[first:], color=fill, lw=3, label=f"{scheme}: formula")
        found = measured[scheme]
        style = {"color": fill, "mec": "black", "ms": 12, "lw": 0, "label": f"{scheme}: the wire"}
        axes.plot(list(found), list(found.values()), marker, **style)
    even = heads / (world_size - 1)  # W · kv heads = heads + kv heads
    axes.axvline(even, color="black", lw=2.5, ls=page.DASHES)
    axes.set(xlabel="heads of keys and values", ylabel="bytes", ylim=(0, None))
    page.with_units(axes.yaxis, "B")
    legend(figure)
    most = max(max(found.values()) for found in measured.values())
    return Picture(figure, f"{title}: equal at {even:.3g} heads of k and v; at most {size(most)}.")


EVERY = 8  # steps over which a mean is taken


def loads(shares: Mapping[str, Sequence[Sequence[float]]]) -> Picture:
    """Draw how a router shares tokens out to experts, step by step; a panel for each training.

    The choices of a token are the experts that it is sent to. An expert's share is the part of a
    step's choices that fall on this expert. A panel is a stack of bands, one for each expert and as
    high as its share, averaged over 8 steps at a time (`EVERY`). A band that is over 6 % high at
    the right end has the expert's index there. Colours repeat after 8 experts. The alt text states,
    for each training, the largest share, averaged over its last 8 steps, in multiples of an equal
    share.

    shares: {name of the training: for each step, the share of each expert}. The shares of a step
        add up to 1. The number of steps is a multiple of 8.
    """
    figure, panels = chart("Share of all choices, by expert", 420, columns=len(shares), sharey=True)
    said = []
    for axes, (name, steps) in zip(panels, shares.items(), strict=True):
        means = torch.tensor(steps).unflatten(0, (-1, EVERY)).mean(1)
        bands = means.T.tolist()
        fills = [page.colour(expert % 8) for expert in range(len(bands))]
        axes.stackplot(range(len(means)), *bands, colors=fills, edgecolor="white")
        below = 0.0
        for expert, band in enumerate(bands):  # named where there is room
            if band[-1] > 0.06:
                axes.text(len(means) - 0.9, below + band[-1] / 2, str(expert), fontsize=page.SMALL)
            below += band[-1]
        axes.set_title(name, fontsize=page.NORMAL)
        at = range(0, len(means), 3)
        axes.set_xticks(at, [EVERY * number for number in at])
        axes.set(xlabel=f"step (means of {EVERY})", ylim=(0, 1), xlim=(0, len(means) - 1))
        last = fullest(means[-1].tolist())
        said.append(f"{name}: in the end the fullest has {last:.0f} times its fair share")
    return Picture(figure, "\n".join(said))


def fullest(shares: Sequence[float]) -> float:
    """Return the largest share, in multiples of the fair share: 1.0 if all experts have the same.

    shares: the share of each expert; they needn't add up to 1.
    """
    return max(shares) * len(shares) / sum(shares)
