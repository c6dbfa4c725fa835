"""ddpkit.ring_attention, on every rank, against one process that has the whole sequence; and what travels meanwhile.

What runs on the ranks returns what it found wrong, as a list of sentences; the tests assert that there are none.
"""

import sys
from unittest.mock import patch

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import twin
from outside import run_script

from ddpkit import launch
from ddpkit import ring_attention as module
from ddpkit.lesson.figures import received_bytes, sent_bytes
from ddpkit.ring_attention import ring_attention

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # functions travel as those of a notebook do

HEADS, D = (2, 3), 4


def sequence(tokens, dtype=torch.float64, axes=HEADS, width=D):
    """q, k and v of the whole sequence, the same on every rank; scores of many sizes."""
    generator = torch.Generator().manual_seed(tokens)
    q, k, v = torch.randn(3, *axes, tokens, width, generator=generator, dtype=torch.float64)
    return (3 * q).to(dtype), (3 * k).to(dtype), v.to(dtype)


def check(tokens, causal, dtype=torch.float64, axes=HEADS, width=D, lengths=None, group=None):
    """This rank's slice of the result, near that of one process which has all: PyTorch's attention in float64.

    A block's product of rounded factors errs by D + n roundings at most, and a merge by a few more; all are of numbers
    no larger than the largest score, here below 100, and the result is a mean of values below 5. In half precision
    the result is rounded once more.
    """
    wrong, rank, world_size = twin.Complaints(), dist.get_rank(group), dist.get_world_size(group)
    whole = sequence(tokens, dtype, axes, width)
    cuts = [tokens // world_size] * world_size if lengths is None else lengths
    q, k, v = (tensor.split(cuts, dim=-2)[rank] for tensor in whole)
    before = q.clone(), k.clone(), v.clone()
    result = ring_attention(q, k, v, causal, group, lengths)
    expected = F.scaled_dot_product_attention(*(t.double() for t in whole), is_causal=causal).split(cuts, dim=-2)[rank]
    what = (f"{tokens} tokens on {world_size} ranks", "causal" * causal, dtype, axes)
    computed = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    bound = 100 * (width + tokens) * computed + torch.finfo(dtype).eps * expected.abs()
    wrong.unless((result.dtype, result.shape) == (dtype, q.shape), *what, result.dtype, result.shape)
    wrong.unless(bool(((result.double() - expected).abs() <= bound).all()), *what, "got", result, "not near", expected)
    for now, then in zip((q, k, v), before, strict=True):
        wrong.same(now, then, "an input was changed")
    return wrong


def slices(world_size) -> list[list[int]]:
    """Ways to cut a sequence unevenly; in some, a rank has no token."""
    one_more = [(7 + world_size - 1 - rank) // world_size for rank in range(world_size)]
    return [one_more, one_more[::-1], [5, 1, 0, 2][:world_size], [0, 3, 1, 4][:world_size]]


def all_checks():
    wrong, world_size = twin.Complaints(), dist.get_world_size()
    for causal in (False, True):
        for tokens in (world_size, 3 * world_size, 8 * world_size):
            wrong += check(tokens, causal)
        for lengths in slices(world_size):
            wrong += check(sum(lengths), causal, lengths=lengths)
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            wrong += check(8 * world_size, causal, dtype)
        for axes, width in (((), 1), ((2,), 16), ((1, 2, 3), 5)):
            wrong += check(4 * world_size, causal, axes=axes, width=width)
    return wrong


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equal_to_one_process(world_size):
    assert [wrong[:3] for wrong in launch(all_checks, world_size=world_size)] == [[]] * world_size


def far_scores():
    """Each block's scores are far from the others': beside the largest, what other ranks have weighs nothing."""
    wrong, rank, world_size = twin.Complaints(), dist.get_rank(), dist.get_world_size()
    q, v = torch.ones(2, 1), torch.full((2, 1), 10.0**rank)
    for largest in range(world_size):
        k = torch.full((2, 1), 1000.0 * (rank == largest) - 2000.0)
        wrong.same(ring_attention(q, k, v), torch.full((2, 1), 10.0**largest), "largest scores on rank", largest)
    return wrong


@pytest.mark.parametrize("world_size", [2, 4])
def test_scores_that_overflow(world_size):
    assert list(launch(far_scores, world_size=world_size)) == [[]] * world_size


def check_groups():
    wrong, rank = twin.Complaints(), dist.get_rank()
    evens, odds = dist.new_group([0, 2, 4]), dist.new_group([3, 1])
    for causal in (False, True):
        wrong += check(12, causal, group=odds if rank % 2 else evens)
    says = (f"rank {rank} called ring_attention with a group that it isn't in", "on the group's ranks only")
    x = torch.ones(2, 2)
    wrong.refused(ring_attention, x, x, x, False, evens if rank % 2 else odds, says=says)
    return wrong


def test_groups():
    assert [wrong[:3] for wrong in launch(check_groups, world_size=5)] == [[]] * 5


# The wire

N = 6


def attend(causal=False, lengths=None, dtype=torch.float32):
    n = N if lengths is None else lengths[dist.get_rank()]
    q, k, v = torch.ones(3, *HEADS, n, D, dtype=dtype)
    ring_attention(q, k, v, causal, lengths=lengths)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_bytes_and_hops(world_size, causal):
    """2(W-1) slices, of k and v, in W-1 messages to the next rank; none waits for another kind of call."""
    for dtype in (torch.float32, torch.bfloat16):
        run = launch(attend, causal, dtype=dtype, world_size=world_size)
        slice_bytes = 2 * 3 * N * D * dtype.itemsize
        assert sent_bytes(run) == received_bytes(run) == [2 * (world_size - 1) * slice_bytes] * world_size
        for rank, records in enumerate(run.wire):
            right, left = (rank + 1) % world_size, (rank - 1) % world_size
            assert [(r.op, r.peer) for r in records] == [("send", right), ("recv", left)] * (world_size - 1)


def test_bytes_of_uneven_slices():
    """Each slice but that of the rank it is sent to passes through a rank."""
    lengths = [5, 1, 0, 2]
    run = launch(attend, False, lengths, world_size=4)
    token_bytes = 2 * 3 * D * 4
    assert sent_bytes(run) == [2 * token_bytes * (8 - lengths[(rank + 1) % 4]) for rank in range(4)]


def computing_marks(causal):
    """Which blocks were computed, as the tokens of their keys, and how many messages had begun and were not awaited."""
    seen, on_their_way = [], 0
    block, batch = module._block, dist.batch_isend_irecv

    class Counted:
        def __init__(self, work):
            self.work = work

        def wait(self):
            nonlocal on_their_way
            on_their_way -= 1
            self.work.wait()

    def counting_batch(operations):
        nonlocal on_their_way
        on_their_way += len(operations)
        return [Counted(work) for work in batch(operations)]

    def watched_block(q, k, v, diagonal):
        seen.append((int(k[0, 0]), diagonal, on_their_way))
        return block(q, k, v, diagonal)

    with patch.object(module, "_block", watched_block), patch.object(dist, "batch_isend_irecv", counting_batch):
        x = torch.full((2, 1), float(dist.get_rank()))
        ring_attention(x, x, x, causal)
    return seen


def test_blocks_are_computed_while_the_next_are_on_their_way():
    assert list(launch(computing_marks, False, world_size=3)) == [
        [(0, False, 2), (2, False, 2), (1, False, 0)],
        [(1, False, 2), (0, False, 2), (2, False, 0)],
        [(2, False, 2), (1, False, 2), (0, False, 0)],
    ]


def test_blocks_wholly_in_the_future_are_not_computed():
    assert list(launch(computing_marks, True, world_size=3)) == [
        [(0, True, 2)],
        [(1, True, 2), (0, False, 2)],
        [(2, True, 2), (1, False, 2), (0, False, 0)],
    ]


# Mistakes


def mistakes():
    wrong, rank, world_size = twin.Complaints(), dist.get_rank(), dist.get_world_size()
    me, x = f"rank {rank} called ring_attention with", torch.ones(3, 2)
    for place in range(3):
        q, k, v = (x.clone().requires_grad_(number == place) for number in range(3))
        wrong.refused(ring_attention, q, k, v, says=(me, "require a gradient", "torch.no_grad()"))
        with torch.no_grad():
            wrong.same(ring_attention(q, k, v), x, "without gradients")
        shapes = [torch.ones(2 + (number == place), 2) for number in range(3)]
        wrong.refused(ring_attention, *shapes, says=(me, "(3, 2)", "(2, 2)", "expected one shape (..., n, D)"))
    wrong.refused(ring_attention, x[0], x[0], x[0], says=(me, "shapes (2,), (2,), (2,)", "(..., n, D)"))
    for lengths in ([3] * (world_size - 1), [3] * (world_size + 1), [2] * world_size):
        says = (me, f"lengths={lengths}", f"expected {world_size} numbers, the one at {rank} being 3")
        wrong.refused(ring_attention, x, x, x, lengths=lengths, says=says)
    return wrong


def test_mistakes_are_named():
    assert list(launch(mistakes, world_size=2)) == [[]] * 2


# Elsewhere

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3")

SCRIPT = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ddpkit.ring_attention import ring_attention
from ddpkit.softmax import softmax_across_ranks

dist.init_process_group()
rank = dist.get_rank()
q, k, v = torch.randn(3, 2, 12, 4, generator=torch.Generator().manual_seed(0))
for causal in (False, True):
    whole = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    part = ring_attention(*(tensor.chunk(3, dim=-2)[rank] for tensor in (q, k, v)), causal)
    torch.testing.assert_close(part, whole.chunk(3, dim=-2)[rank])
row = q.flatten()
torch.testing.assert_close(softmax_across_ranks(row.chunk(3)[rank]), row.softmax(0).chunk(3)[rank])
with open(f"rank.{rank}", "w") as file:
    file.write("compared")
dist.destroy_process_group()
"""


def test_under_torchrun_alone(tmp_path):
    run_script(tmp_path, SCRIPT, command=TORCHRUN, OMP_NUM_THREADS="1")
    assert [(tmp_path / f"rank.{rank}").read_text() for rank in range(3)] == ["compared"] * 3
