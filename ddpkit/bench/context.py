"""Attention across ranks in four ways, forward and backward; experts beside plain torch.

Columns of attention: the bytes that a rank sends; the scores (products of a query and a key) of a
head on the rank with the fewest, and on the one with the most, for which all wait.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .. import context_parallel as context
from ..experts import MixtureOfExperts
from ..tools.units import size
from .interleave import Contest, check_close, race
from .results import AGAIN, SPEED, Goal, Results, report, results_of

ROUNDS = 20
RING, ZIGZAG, GATHERED, SWAPPED = "ring", "zigzag", "all-gather", "all-to-all"
WAYS = {
    RING: (context.ring_attention, context.contiguous),
    ZIGZAG: (context.zigzag_attention, context.zigzag),
    GATHERED: (context.gathered_attention, context.zigzag),
    SWAPPED: (context.all_to_all_attention, context.contiguous),
    RING + AGAIN: (context.ring_attention, context.contiguous),
}
PLAIN, OURS = "plain torch", "experts"
GOALS = [Goal(ZIGZAG, RING, 1.0, "2 ranks"), Goal(OURS, PLAIN, 1.0)]
HEADS, KV_HEADS, WIDTH = 8, 4, 64
LEGEND = f"""\
Time: the median, causal, {HEADS} heads, {KV_HEADS} of keys and values, {WIDTH} wide.
Sent: bytes of a rank. Scores: of a head, the idlest and busiest rank.
Plain torch: a loop over experts with masks, on one process, as ours.
{SPEED}"""


def attention_contest(tokens: int, ways: dict[str, tuple], group: ProcessGroup) -> Contest:
    """Make the contest of some `WAYS`, on `tokens` a rank; `found` compares their gradients."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    torch.manual_seed(0)
    length = tokens * world_size
    whole = [torch.randn(1, heads, length, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]

    def step(attention: Callable, deal: Callable) -> Tensor:
        mine = context.places(deal(world_size), rank, length)
        q, k, v = (x[..., mine, :].requires_grad_() for x in whole)
        attention(q, k, v, True, group).square().sum().backward()
        return torch.cat([q.grad, k.grad, v.grad], dim=1)

    def found() -> None:
        right = None
        for name, (attention, deal) in ways.items():
            in_order = torch.zeros(1, HEADS + 2 * KV_HEADS, length, WIDTH)
            mine = context.places(deal(world_size), rank, length)
            in_order[..., mine, :] = step(attention, deal)
            dist.all_reduce(in_order, group=group)
            right = in_order if right is None else right
            check_close(name, in_order, right, 1e-4)

    return Contest({name: partial(step, *way) for name, way in ways.items()}, found=found)


def counted(name: str, tokens: int, world_size: int) -> dict[str, str]:
    """Return a way's columns: "Sent", by a rank; "Scores", for example "10 to 26" by the rank."""
    others, numbers = world_size - 1, 4 * tokens * WIDTH  # bytes a head
    sent = 4 * others * KV_HEADS  # k and v, and once more or their gradients
    if name == SWAPPED:
        sent = 4 * others * (HEADS + KV_HEADS) / world_size
    elif name != GATHERED:
        sent += 2 * world_size * KV_HEADS  # dk and dv, home
    # Heads are dealt out evenly, so all-to-all sees what zigzag does.
    deal = WAYS[ZIGZAG if name == SWAPPED else name][1](world_size)
    scores, hops = [], range(world_size)
    for rank in hops:
        scores.append(sum(context.scores_of_hop(deal, rank, hop, tokens // 2) for hop in hops))
    return {"Sent": size(sent * numbers), "Scores": f"{min(scores):,} to {max(scores):,}"}


def experts_contest(rows: int, group: ProcessGroup) -> Contest:
    """Make the contest between ours and a loop over all experts with masks, both on one process."""
    torch.manual_seed(0)
    layer, x = MixtureOfExperts(128, 256), torch.randn(rows, 128)

    def plain(x: Tensor) -> Tensor:
        _, chosen, weights = layer.router(x)
        out = torch.zeros_like(x)
        for number, expert in enumerate(layer.experts.values()):
            token, choice = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, token, expert(x[token]) * weights[token, choice, None])
        return out

    def step(forward: Callable) -> Tensor:
        layer.zero_grad()
        forward(x).square().mean().backward()
        return torch.cat([p.grad.flatten() for p in layer.parameters()])

    calls = {PLAIN: partial(step, plain), OURS: partial(step, layer)}
    calls[PLAIN + AGAIN] = calls[PLAIN]
    return Contest(calls, found=lambda: check_close(OURS, step(layer), step(plain), 1e-4))


def measure(
    tokens=256, worlds=(2, 4), rows=1024, rounds=ROUNDS, ways: dict[str, tuple] = WAYS
) -> Results:
    """Time `ways` with `tokens` a rank, and experts with `rows` in all. ValueError: no round."""
    found = Results(legend=LEGEND)
    for world_size in worlds:
        seconds, _ = race(partial(attention_contest, tokens, ways), rounds, world_size)
        what = f"attention, {tokens} tokens a rank, {world_size} ranks"
        results = results_of(what, seconds, world_size)
        for result in results:
            result.columns = counted(result.variant, tokens, world_size)
        found += results
    seconds, _ = race(partial(experts_contest, rows), rounds)
    found += results_of(f"8 experts, top-2, {rows} rows", seconds)
    return found


def main(name: str):
    report(name, measure(), GOALS)
