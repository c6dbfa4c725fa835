"""The player and the charts of notebook 13, and what its ranks run.

The score matrix by hop, bytes by heads of keys and values, loads of experts. What the player shows
was computed: ranks note each block of their ring.
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

Seen = tuple[int, int, int, bool]  # hop, chunk of queries, chunk of keys, whether it is diagonal


def blocks_computed(
    deal: Deal, causal: bool = True, seconds: float = 0.0
) -> tuple[list[Seen], float]:
    """Run attention round a ring on this rank, and note which blocks of scores it computes.

    Returns the blocks, and the share of time in which the rank computed. deal: which chunks each
    rank has. seconds: how long each block sleeps, to stand for computing; one on the diagonal half
    as long. Call it on all ranks.
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
    dist.barrier()  # all have waited for the last
    whole = sum(0.5 if diagonal else 1.0 for *_, diagonal in seen)
    return seen, whole * seconds / (time.perf_counter() - began)


def deals(world_size: int) -> dict[str, Deal]:
    """Make three deals of 2W chunks to W ranks, by name."""
    cards = [(rank, rank + world_size) for rank in range(world_size)]
    return {"in order": contiguous(world_size), "like cards": cards, "zigzag": zigzag(world_size)}


SCHEMES = {
    "ring": ring_attention,
    "zigzag": zigzag_attention,
    "all-gather": gathered_attention,
    "all-to-all": all_to_all_attention,
}


def both_ways(scheme: str, dtype: torch.dtype, heads: int = 8, kv_heads: int = 8) -> None:
    """Run attention over 8 tokens a rank: forward, a barrier, backward. To be launched.

    scheme: a key of SCHEMES. `sent` counts the bytes of the run.
    """
    q = torch.ones(1, heads, 8, 16, dtype=dtype, requires_grad=True)
    k, v = torch.ones(2, 1, kv_heads, 8, 16, dtype=dtype, requires_grad=True)
    out = SCHEMES[scheme](q, k, v, True)
    dist.barrier()
    out.sum().backward()


def sent(run) -> tuple[int, int, int]:
    """Count what rank 0 sent in a run of `both_ways`: (bytes forward, bytes backward, calls)."""
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
    """Train a model for three steps; return their losses.

    loss_of(): forward, returns the loss. synchronize: called after each backward.
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


# The player: CELL pixels a block, a matrix a deal

CELL, TOP = 33, 96


def score_player(runs: Mapping[str, Iterable[tuple[list[Seen], float]]]) -> StepThrough:
    """Step through the hops of rings with several deals, side by side.

    runs: {name of the deal: what `blocks_computed` returned, by rank}.
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
    """Say how many blocks each rank computes in hop `hop`; one on the diagonal is a half."""
    said = []
    for name, ranks in by_deal.items():
        said.append(" ".join([name, *(f"{computed(seen, hop):g}" for seen in ranks)]))
    return "; ".join(said)


def computed(seen: list[Seen], hop: int) -> float:
    """Count the blocks that a rank computes in hop `hop`, those on the diagonal as halves."""
    return sum(0.5 if diagonal else 1.0 for at, *_, diagonal in seen if at == hop)


def draw(by_deal: Mapping[str, list[list[Seen]]], hop: int, text: str) -> Picture:
    """Draw a matrix for each deal: blocks of this hop framed, those before it with their hop."""
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
    canvas.text(
        60 + 96 * ranks,
        TOP + side + 50,
        "a block's number: its hop; ½: on the diagonal",
        align="left",
    )
    return canvas.picture(text)


def _draw_blocks(canvas: Canvas, left: float, seen_by: list[list[Seen]], hop: int) -> None:
    found = [(block, rank) for rank, seen in enumerate(seen_by) for block in seen]
    # This hop's last, so that nothing covers their frames.
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
    """Compute what a rank sends forward, in numbers for each token and each number of a head."""
    heads_sent = world_size * kv_heads if scheme == "ring" else heads + kv_heads
    return 2 * (world_size - 1) / world_size * heads_sent


LOOKS = {"ring": (page.ORANGE, "o"), "all-to-all": (page.BLUE, "s")}


def crossing(
    measured: Mapping[str, Mapping[int, float]], heads: int, world_size: int, unit: float
) -> Picture:
    """Draw the bytes that a rank sends forward, by the number of heads of keys and values.

    Lines are the formula, points the wire. measured: {"ring" or "all-to-all": {kv heads: bytes}}.
    unit: bytes of one head's numbers for the tokens of a rank.
    """
    title = f"Sent by each of {world_size} ranks in forward, {heads} heads"
    figure, (axes,) = chart(title, 460)
    for scheme, (fill, marker) in LOOKS.items():
        counts = range(1, heads + 1)
        line = [unit * sent_for_a_key(scheme, heads, kv, world_size) for kv in counts]
        axes.plot(counts, line, color=fill, lw=3, label=f"{scheme}: formula")
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


EVERY = 8  # steps


def loads(shares: Mapping[str, Sequence[Sequence[float]]]) -> Picture:
    """Draw each expert's share of the choices over time, a panel for each training.

    shares: {name: for each step, the shares of all experts}.
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
        axes.set_xticks(range(0, len(means), 3))
        axes.set(xlabel=f"{EVERY} steps each", ylim=(0, 1), xlim=(0, len(means) - 1))
        last = fullest(means[-1].tolist())
        said.append(f"{name}: in the end the fullest has {last:.0f} times its fair share")
    return Picture(figure, "\n".join(said))


def fullest(shares: Sequence[float]) -> float:
    """Return how many fair shares the expert with the most has: 1 if all have the same."""
    return max(shares) * len(shares) / sum(shares)
