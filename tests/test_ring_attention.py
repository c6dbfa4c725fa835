"""ddpkit.ring_attention, on every rank, against one process that has the whole sequence."""

from unittest.mock import patch

import torch
import torch.distributed as dist
from attention_cases import exact, randn
from on_ranks import on_ranks
from training_cases import sent_by

from ddpkit import launch
from ddpkit import ring_attention as module
from ddpkit.flash_attention import tile_scores
from ddpkit.ring_attention import ring_attention
from ddpkit.runtime.wire import recorder


def compare(check, n, causal, dtype=torch.float64, axes=(2, 3), D=4, group=None):
    """This rank's slice of n tokens is near that of one process which has all, in float64.

    A block's product of rounded factors errs by D + n roundings at most, and a merge by a few more;
    all are of numbers no larger than the largest score, here below 100, and the result is a mean of
    values below 5. In half precision the result is rounded once more.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    q, k, v = 3 * randn(3, *axes, n * world_size, D, seed=n)
    whole = [x.to(dtype) for x in (q, k, v / 3)]
    mine = [x.chunk(world_size, dim=-2)[rank] for x in whole]
    before = [x.clone() for x in mine]
    found = []
    records = sent_by(lambda: found.append(ring_attention(*mine, causal, group)))
    (result,), sent = found, [record.bytes for record in records if record.op == "send"]
    expected = exact(*(x.double() for x in whole), causal).chunk(world_size, dim=-2)[rank]
    what = (f"{n} tokens a rank", "causal" if causal else "", dtype, axes)
    eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    bound = 100 * (D + n * world_size) * eps + torch.finfo(dtype).eps * expected.abs()
    check.same(result.dtype, dtype, *what)
    check.close(result, expected, bound, *what)
    check.same(mine, before, "an input was changed")
    check.same(sent, [2 * mine[0].nbytes] * (world_size - 1), *what, "k and v go on")


@on_ranks(1, 2, 3, 4)
def test_equal_to_one_process(check):
    for causal in (False, True):
        for n in (1, 3, 8):
            compare(check, n, causal)
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            compare(check, 5, causal, dtype)
        for axes, D in (((), 1), ((2,), 16), ((1, 2, 3), 5)):
            compare(check, 4, causal, axes=axes, D=D)


@on_ranks(5)
def test_groups(check, rank):
    evens, odds = dist.new_group([0, 2, 4]), dist.new_group([3, 1])
    for causal in (False, True):
        compare(check, 4, causal, group=odds if rank % 2 else evens)
    says = (f"rank {rank} called ring_attention with a group that it isn't in", "ranks only")
    x = torch.ones(2, 2)
    check.refused(ring_attention, x, x, x, False, evens if rank % 2 else odds, says=says)


# Which blocks, and when


def blocks_computed(causal):
    """By key, which blocks were computed, and how many messages were on their way meanwhile."""
    seen = []

    def watched(q, keys, first, diagonal):
        waited_for_by_none = [record for record in recorder().records if record.waited is None]
        seen.append((int(keys[0, 0]), diagonal, len(waited_for_by_none)))
        return tile_scores(q, keys, first, diagonal)

    with patch.object(module, "tile_scores", watched):
        x = torch.full((2, 1), float(dist.get_rank()))
        ring_attention(x, x, x, causal)
    return seen


def test_blocks_are_computed_while_the_next_are_on_their_way_and_no_future_ones():
    assert list(launch(blocks_computed, False, world_size=3)) == [
        [(0, False, 2), (2, False, 2), (1, False, 0)],
        [(1, False, 2), (0, False, 2), (2, False, 0)],
        [(2, False, 2), (1, False, 2), (0, False, 0)],
    ]
    assert list(launch(blocks_computed, True, world_size=3)) == [
        [(0, True, 2)],
        [(1, True, 2), (0, False, 2)],
        [(2, True, 2), (1, False, 2), (0, False, 0)],
    ]


# Mistakes


@on_ranks(2)
def test_mistakes_are_named(check):
    x = torch.ones(3, 2)
    me = f"rank {dist.get_rank()} called ring_attention with"
    for place in range(3):
        wanted = [x.clone().requires_grad_(number == place) for number in range(3)]
        says = (me, "require a gradient", "torch.no_grad()")
        check.refused(ring_attention, *wanted, says=says)
        with torch.no_grad():
            check.same(ring_attention(*wanted), x, "without gradients")
        shapes = [torch.ones(2 + (number == place), 2) for number in range(3)]
        says = (me, "(3, 2)", "(2, 2)", "expected one shape (..., n, D)")
        check.refused(ring_attention, *shapes, says=says)
    says = (me, "shapes (2,), (2,), (2,)", "(..., n, D)")
    check.refused(ring_attention, x[0], x[0], x[0], says=says)
