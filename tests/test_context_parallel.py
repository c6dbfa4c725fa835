"""ddpkit.context_parallel, on every rank, against one process that has the whole sequence."""

import importlib
import re
from collections import Counter
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from attention_cases import complaint, exact, output_and_gradients, randn
from on_ranks import on_ranks, some_or_all
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import get_total_norm, parameters_to_vector
from training_cases import ADAMW, HALF_THE_DIGITS, SGD, sent_by, small_gpt, weights_of

import ddpkit.softmax
from ddpkit import launch
from ddpkit.context_parallel import (
    all_to_all_attention,
    blocks,
    contiguous,
    gathered_attention,
    pairs_of_hop,
    places,
    ring_attention,
    scores_of_hop,
    share_sequence,
    share_tokens,
    summed_loss,
    zigzag,
    zigzag_attention,
)
from ddpkit.context_parallel.deal import NO_TARGET
from ddpkit.ddp import BucketedDDP
from ddpkit.fsdp import FSDP
from ddpkit.models import mean_loss
from ddpkit.runtime.errors import LaunchError
from ddpkit.tensor_parallel import CopyToRanks, SumOverRanks

SCHEMES = {  # attention, deal
    "ring": (ring_attention, contiguous),
    "zigzag": (zigzag_attention, zigzag),
    "gathered": (gathered_attention, zigzag),
    "gathered in order": (partial(gathered_attention, zigzagged=False), contiguous),
    "all-to-all": (all_to_all_attention, contiguous),
}


# The values


def on_whole_sequences(name, group=None):
    """An attention of whole q, k, v, which each rank computes for its own tokens only.

    q: (batch, kv heads, heads a kv head, N, D); k, v with a 1 in the third place.
    """
    attention, deal = SCHEMES[name]

    def attend(q, k, v, causal):
        mine = places(deal(dist.get_world_size(group)), dist.get_rank(group), q.shape[-2])
        shared = [CopyToRanks.apply(x, group)[..., mine, :] for x in (q, k, v)]
        o = attention(*(x.flatten(1, 2) for x in shared), causal, group)
        whole = torch.zeros_like(q)
        whole[..., mine, :] = o.unflatten(1, q.shape[1:3])
        return SumOverRanks.apply(whole, group)

    return attend


def compare(check, n, causal, dtype, per_kv=1, group=None, scale=1.0):
    """o, dq, dk and dv are at most twice as far from fp64 as the textbook's in the same dtype."""
    world_size = dist.get_world_size(group)
    shape = (2, world_size, per_kv, n * world_size, 3)
    q, do = (randn(*shape, seed=n + place, dtype=dtype) for place in (0, 1))
    k, v = (randn(*shape[:2], 1, *shape[3:], seed=n + place, dtype=dtype) for place in (2, 3))
    for name in SCHEMES:
        wrong = complaint(on_whole_sequences(name, group), scale * q, k, v, do, causal)
        check.unless(wrong is None, name, n, causal, dtype, per_kv, wrong)


@some_or_all
@on_ranks(1, 2, 3, 4)
def test_equal_to_one_process(check, world_size, part):
    for causal in (False, True) if part == "all" or world_size % 2 else (True,):
        compare(check, 4, causal, torch.float64, per_kv=2)
        compare(check, 6, causal, torch.float32)
        compare(check, 2, causal, torch.float32, per_kv=3)
        compare(check, 8, causal, torch.bfloat16, per_kv=2)
        compare(check, 6, causal, torch.float16)


@on_ranks(5)
def test_groups_of_unequal_sizes(check, rank):
    """At the same time, each with other sequences."""
    evens, odds = dist.new_group([0, 2, 4]), dist.new_group([3, 1])
    for causal in (False, True):
        compare(check, 4, causal, torch.float64, 2, odds if rank % 2 else evens)


@on_ranks(2)
def test_scores_of_thousands(check):
    """e^lse would overflow in the merge."""
    compare(check, 4, True, torch.float32, scale=3000.0)


def test_a_merge_of_blocks_is_that_of_notebook_08():
    scores, values = 50 * randn(3, 8), randn(8, 2)
    whole = ddpkit.softmax.merge(
        ddpkit.softmax.summarize(scores[:, :5], values[:5]),
        ddpkit.softmax.summarize(scores[:, 5:], values[5:]),
    )
    m, ell, o = whole
    parts = []
    for keys in (slice(5), slice(5, 8)):
        parts += [scores[:, keys].softmax(-1) @ values[keys], scores[:, keys].logsumexp(-1)]
    merged, lse = blocks.merge(*parts)
    torch.testing.assert_close(merged, o / ell[:, None])
    torch.testing.assert_close(lse, m + ell.log())


# The wire


def calls_of(name, dtype, heads, kv_heads, n, D, batch):
    """What this rank says, forward and backward."""
    q, do = torch.ones(2, batch, heads, n, D, dtype=dtype)
    k, v = torch.ones(2, batch, kv_heads, n, D, dtype=dtype)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    found = []
    forward = sent_by(lambda: found.append(SCHEMES[name][0](*inputs, True)))
    return forward, sent_by(lambda: found[0].backward(do))


@on_ranks(1, 2, 3, 4)
def test_bytes_and_messages(check, world_size):
    """To the byte, in 16 bits and more: (op, bytes handed in): calls, by formula."""
    batch, n, D, W = 2, 6, 5, world_size
    for dtype, wide in ((torch.bfloat16, 4), (torch.float32, 4), (torch.float64, 8)):
        for heads, kv_heads in ((W, W), (3 * W, W)):
            u, s = batch * n * kv_heads * D, dtype.itemsize
            round_trip = Counter({("send", 2 * u * s): W - 1})
            homewards = Counter({("send", 2 * u * wide): W if W > 1 else 0})
            q_bytes, kv_bytes = batch * n * heads * D * s, 2 * u * s
            expected = {
                "ring": (round_trip, round_trip + homewards),
                "gathered": (
                    Counter({("all_gather", 2 * u * s): 1}),
                    Counter({("reduce_scatter", W * 2 * u * wide): 1}),
                ),
                "all-to-all": (Counter([("all_to_all", q_bytes + kv_bytes)]),) * 2,
            }
            expected["zigzag"] = expected["ring"]
            there, back = expected["all-to-all"]
            with_o = Counter([("all_to_all", q_bytes)])
            expected["all-to-all"] = there + with_o, back + with_o
            for name in expected:
                for way, seen in zip(
                    expected[name], calls_of(name, dtype, heads, kv_heads, n, D, batch), strict=True
                ):
                    said = Counter((r.op, r.bytes) for r in seen if r.op != "recv")
                    check.same(said, +way, name, dtype, heads, kv_heads)


@on_ranks(3)
def test_gradients_of_keys_travel_in_float32(check):
    _, backward = calls_of("zigzag", torch.bfloat16, 3, 3, 2, 4, 1)
    dtypes = Counter(record.dtype for record in backward if record.op == "send")
    check.same(dtypes, Counter({"float32": 3, "bfloat16": 2}))


# The work


def scores_computed(name, n, causal):
    """By hop: the scores of a head that are seen in the blocks which this rank computes."""
    seen = Counter()
    attention, deal = SCHEMES[name]
    deal, rank = deal(dist.get_world_size()), dist.get_rank()
    W = len(deal)

    def watched(q, k, v, tile, diagonal):
        owner = int(k[..., 0, 0])  # keys are their rank's number
        rows, columns = q.shape[-2], k.shape[-2]
        seen[(rank - owner) % W] += rows * (rows + 1) // 2 if diagonal else rows * columns
        return forward(q, k, v, tile, diagonal)

    forward = blocks.flash_forward
    with patch.object(blocks, "flash_forward", watched):
        x = torch.full((1, n, 2), float(rank))
        attention(x, x, x, causal)
    return [seen[hop] for hop in range(W)]


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", ["ring", "zigzag", "gathered"])
def test_scores_are_computed_as_the_deal_says(name, world_size):
    n = 6
    deal = SCHEMES[name][1](world_size)
    for causal in (True, False):
        run = launch(scores_computed, name, n, causal, world_size=world_size)
        for rank in range(world_size):
            planned = [scores_of_hop(deal, rank, h, n // 2, causal) for h in range(world_size)]
            assert run[rank] == planned


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_in_order_the_last_rank_works_longest_and_zigzag_levels_it(world_size):
    """Each hop lasts as long as its busiest rank. W/(2W−1), but for the diagonal's n/2 scores."""
    n, hops = 10_000, range(world_size)

    def busy(deal):
        by_hop = [[scores_of_hop(deal, rank, hop, n // 2) for rank in hops] for hop in hops]
        assert sum(map(sum, by_hop)) == n * world_size * (n * world_size + 1) // 2  # all, once
        if deal == zigzag(world_size):
            level = [{n * n // 2 + n // 2 * (hop == 0)} for hop in hops]
            assert [set(scores) for scores in by_hop] == level
        else:
            assert [sum(scores) for scores in zip(*by_hop, strict=True)] == [
                rank * n * n + n * (n + 1) // 2 for rank in hops
            ]
        return sum(map(sum, by_hop)) / (world_size * sum(map(max, by_hop)))

    assert busy(zigzag(world_size)) == 1
    assert busy(contiguous(world_size)) == pytest.approx(
        world_size / (2 * world_size - 1), rel=1e-3
    )


def test_pairs_by_hand():
    deal = zigzag(2)
    assert deal == [(0, 3), (1, 2)]
    assert pairs_of_hop(deal, 0, 0) == [(0, 0, True), (3, 0, False), (3, 3, True)]
    assert pairs_of_hop(deal, 0, 1) == [(3, 1, False), (3, 2, False)]
    assert pairs_of_hop(deal, 1, 1) == [(1, 0, False), (2, 0, False)]
    assert pairs_of_hop(contiguous(2), 0, 1) == []
    assert len(pairs_of_hop(contiguous(2), 0, 1, causal=False)) == 4


# The tokens


@pytest.mark.parametrize("deal", [contiguous, zigzag])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_target_is_on_one_rank_beside_its_input(deal, world_size):
    for length in (2 * world_size, 7, 1):
        tokens = torch.stack([torch.arange(length + 1), torch.arange(length + 1).flip(0)])
        found = {}
        for rank in range(world_size):
            inputs, targets, mine = share_tokens(tokens, deal(world_size), rank)
            assert inputs.shape == targets.shape == (2, len(mine))
            for x, y, place in zip(inputs.T, targets.T, mine, strict=True):
                if y[0] != NO_TARGET:
                    assert int(place) not in found
                    found[int(place)] = [*x.tolist(), *y.tolist()]
        expected = {p: [p, length - p, p + 1, length - p - 1] for p in range(length)}
        assert found == expected


def test_a_length_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="7 tokens can't be cut into 4 equal chunks for 2 ranks"):
        places(zigzag(2), 0, 7)


# A GPT


def batch_of(step, micro_batch, row, length=9):
    generator = torch.Generator().manual_seed(100 * step + 10 * micro_batch + row)
    return torch.randint(11, (2, length + 1), generator=generator)


MICRO_BATCHES = 2


def one_process(make, rows):
    """Weights and norms of three steps on the tokens of all rows, micro-batches one by one."""
    model = small_gpt(context=12, heads=4, width=8, kv_heads=2)
    optimizer, norms = make(model.parameters()), []
    for step in range(3):
        optimizer.zero_grad()
        for number in range(MICRO_BATCHES):
            tokens = torch.cat([batch_of(step, number, row) for row in range(rows)])
            (mean_loss(model(tokens[:, :-1]), tokens[:, 1:]) / MICRO_BATCHES).backward()
        norms.append(get_total_norm([p.grad for p in model.parameters() if p.requires_grad]))
        optimizer.step()
    return torch.cat([weights_of(model), torch.stack(norms)])


def on_a_mesh(name, make, data, wrapper):
    """The same on data × context ranks; `wrapper`, of all of them, averages gradients."""
    attention, deal = SCHEMES[name]
    mesh = init_device_mesh(
        "cpu", (data, dist.get_world_size() // data), mesh_dim_names=("data", "context")
    )
    group, row = mesh["context"].get_group(), mesh.get_local_rank("data")
    model = small_gpt(context=12, heads=4, width=8, kv_heads=2)
    share_sequence(model, partial(attention, group=group))
    replica = wrapper(model)
    optimizer, norms = make(model.parameters()), []
    for step in range(3):
        optimizer.zero_grad()
        for number in range(MICRO_BATCHES):
            cut = deal(dist.get_world_size(group)), dist.get_rank(group)
            inputs, targets, mine = share_tokens(batch_of(step, number, row), *cut)
            loss = summed_loss(replica(inputs, mine), targets) / MICRO_BATCHES
            if number < MICRO_BATCHES - 1:
                with replica.no_sync():
                    loss.backward()
            else:
                loss.backward()
        replica.synchronize()
        norms.append(norm_of(replica))
        optimizer.step()
    whole = weights_of(model)
    if wrapper is FSDP:
        whole = parameters_to_vector(replica.full_parameters().values())
    return torch.cat([whole, torch.stack(norms)])


def norm_of(replica):
    if isinstance(replica, FSDP):
        return replica.clip_grad_norm(float("inf"))
    return get_total_norm([p.grad for p in replica.parameters() if p.requires_grad])


def like_one_process(check, name, data, wrapper=BucketedDDP):
    for make in (SGD, ADAMW):
        ours = on_a_mesh(name, make, data, wrapper)
        check.close(ours, one_process(make, data), HALF_THE_DIGITS, name, data, make.func.__name__)
        check.same_on_all(ours, name)


@pytest.mark.wide
@on_ranks(1, 2, 3, 4)
def test_a_gpt_trains_as_in_one_process(check, world_size):
    """9 tokens: padded, so that ranks have unequal numbers of targets, or none."""
    for name in SCHEMES:
        if name != "all-to-all" or world_size in (1, 2):
            like_one_process(check, name, data=1)
    if world_size == 4:
        like_one_process(check, "all-to-all", data=2)


@on_ranks(6)
def test_data_and_context_parallel_on_unequal_axes(check):
    like_one_process(check, "zigzag", data=2)
    like_one_process(check, "zigzag", data=3)


@some_or_all
@on_ranks(2, 3, 4, 6)
def test_with_fsdp(check, world_size, part):
    """Parameters are sharded over all ranks, sequences over the ranks of a row."""
    data_axes = {2: [1], 3: [1], 4: [1, 2], 6: [2, 3]}
    if part == "some":
        data_axes = {3: [1], 4: [2]}
    for data in data_axes.get(world_size, []):
        like_one_process(check, "zigzag", data, FSDP)


# PyTorch's


@on_ranks(2, 3, 4)
def test_pytorchs_ring_gives_the_same(check, rank, world_size):
    """Its template takes any attention with a log-sum-exp: here a CPU's, on its own zigzag."""
    name = "torch.distributed.tensor.experimental._context_parallel._attention"
    pytorchs = importlib.import_module(name)
    mine = places(zigzag(world_size), rank, 8 * world_size)
    q, k, v = randn(3, 1, 2, 8 * world_size, 4, dtype=torch.float32)[..., mine, :]

    def on_cpu(q, k, v, is_causal=False, **_):
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return attend(q, k, v, 0.0, is_causal)

    ring = partial(pytorchs._templated_ring_attention, dist.group.WORLD, 2)
    theirs, _ = ring(on_cpu, q, k, v, is_causal=True)
    check.close(zigzag_attention(q, k, v, True), theirs, 1e-5)


# Mistakes, each with what it does


@on_ranks(3)
def test_shift_after_the_cut_loses_a_target_on_each_rank(check):
    """Published: transformers#36607; under zigzag targets are wrong, not missing: two a rank."""
    tokens, W, rank = torch.arange(13).view(1, 13), dist.get_world_size(), dist.get_rank()
    for deal in (contiguous, zigzag):
        inputs, targets, _ = share_tokens(tokens, deal(W), rank)
        shifted_late = inputs[:, 1:]
        wrong = int((shifted_late != targets[:, :-1]).sum())
        here = {"contiguous": 0, "zigzag": 0 if rank == W - 1 else 1}[deal.__name__]
        check.same(wrong, here, deal.__name__, "wrong targets")
        check.same(targets.shape[1] - shifted_late.shape[1], 1, "lost targets")


@on_ranks(2)
def test_places_that_begin_anew_on_each_rank_are_another_model(check):
    model = small_gpt(context=12)
    tokens = batch_of(0, 0, 0, length=8)
    right = model(tokens[:, :-1]).detach()
    share_sequence(model, ring_attention)
    inputs, _, mine = share_tokens(tokens, contiguous(2), dist.get_rank())
    check.close(model(inputs, mine), right[:, mine], HALF_THE_DIGITS, "with their places")
    off = (model(inputs) - right[:, mine]).abs().amax()
    check.unless((off > 0.01) == (dist.get_rank() == 1), "places from 0 on", off)


@on_ranks(4)
def test_a_mean_of_means_of_unequal_tokens_is_another_loss(check):
    model, tokens = small_gpt(context=12), batch_of(0, 0, 0)
    right = mean_loss(model(tokens[:, :-1]), tokens[:, 1:])
    share_sequence(model, zigzag_attention)
    inputs, targets, mine = share_tokens(tokens, zigzag(4), dist.get_rank())
    logits = model(inputs, mine)
    own = logits[targets != NO_TARGET], targets[targets != NO_TARGET]
    for name, loss, fine in (
        ("all tokens alike", summed_loss(logits, targets), True),
        ("a mean of means", mean_loss(*own), False),
    ):
        total = loss.detach().clone()
        dist.all_reduce(total)
        check.unless((abs(total / 4 - right) < HALF_THE_DIGITS) == fine, name, total / 4, right)


RING = importlib.import_module("ddpkit.context_parallel.ring")


@on_ranks(2, 4)
def test_backward_with_the_keys_of_one_hop_is_seen(check):
    """Published: diffusers#14265, TransformerEngine#1557. Forward is right."""
    q, k, v, do = (randn(1, 4, 1, 16, 3, seed=seed) for seed in range(4))
    first, gradients = [], blocks.gradients

    def of_the_first_hop(saved, block, *how):
        first.append(block)
        return gradients(saved, first[0], *how)

    with patch.object(RING, "gradients", of_the_first_hop):
        told = complaint(on_whole_sequences("zigzag"), q, k, v, do, True)
    check.unless(told is not None and told.startswith("dq"), "it was not seen", told)


def without_exp(o, lse, o_b, lse_b):
    """Weighs by the sums' logarithms."""
    total = torch.logaddexp(lse, lse_b)
    share = (lse / total).unsqueeze(-1)
    return o * share + o_b * (1 - share), total


def alike(o, lse, o_b, lse_b):
    """Takes both blocks as equally heavy."""
    return (o + o_b) / 2, torch.logaddexp(lse, lse_b)


def with_only_the_first_max(o, lse, o_b, lse_b):
    """Subtracts the first block's maximum from both: overflows where the second's is larger."""
    weight = torch.exp(lse_b - lse).unsqueeze(-1)
    return (o + o_b * weight) / (1 + weight), lse + weight.squeeze(-1).log1p()


def with_the_max_for_lse(o, lse, o_b, lse_b):
    """Hands on the larger sum, not the sum: forward of two blocks is right, backward isn't."""
    merged, _ = MERGE(o, lse, o_b, lse_b)
    return merged, torch.maximum(lse, lse_b)


MERGE = blocks.merge
WRONG_MERGES = {without_exp: 1, alike: 1, with_the_max_for_lse: 1, with_only_the_first_max: 3000}


@on_ranks(2, 3)
def test_a_wrong_merge_is_seen(check, world_size):
    """Published: e^lse overflowed in one (NATTEN#202)."""
    for merge, scale in WRONG_MERGES.items():
        shape = 1, world_size, 1, 8 * world_size, 3
        q, k, v, do = (randn(*shape, seed=seed, dtype=torch.float32) for seed in range(4))
        for name in ("ring", "zigzag", "gathered"):
            given = on_whole_sequences(name), scale * q, k, v, do, name == "zigzag"
            check.same(complaint(*given), None, name, scale, "the right one")
            with patch.object(blocks, "merge", merge):
                told = complaint(*given)
            check.unless(told is not None, name, merge.__name__, "was not seen")


@on_ranks(4)
def test_a_sum_of_dk_in_bf16_rounds_in_each_hop(check):
    q, k, v, do = (randn(1, 4, 1, 64, 8, seed=seed, dtype=torch.bfloat16) for seed in range(4))
    gradients = blocks.gradients

    def in_bf16(*args):
        dq, dkv = gradients(*args)
        return dq, dkv.bfloat16()

    def error_of_dk():
        attend = on_whole_sequences("ring")
        return output_and_gradients(attend, q, k, v, do)["dk"].double() - right

    wide = [x.double() for x in (q, k, v, do)]
    right = output_and_gradients(exact, *wide)["dk"]
    in_fp32 = error_of_dk().norm()
    with patch.object(RING, "gradients", in_bf16):
        check.unless(error_of_dk().norm() > 1.5 * in_fp32, "it was not seen", in_fp32)


# Refused


@on_ranks(2)
def test_mistakes_are_named(check, rank):
    x = torch.ones(4, 4, 2)
    for name, (attention, _) in SCHEMES.items():
        called = getattr(attention, "func", attention).__name__
        me = f"rank {rank} called {called} with"
        check.refused(attention, x[0], x[0], x[0], says=(me, "(..., heads, n, D)"))
        check.refused(attention, x, x[:3], x[:3], says=(me, "kv heads dividing heads"))
        check.refused(attention, x, x, x[:, :2], says=(me, "Cut all three at the same tokens"))
        check.refused(attention, x, x, x.double(), says=(me, "one floating-point dtype"))
        if name == "all-to-all":
            says = (me, "4 heads and 1 of keys and values", "multiples of 2 ranks", "take a ring")
            check.refused(attention, x, x[:1], x[:1], says=says)
        else:
            odd = x[:, :3]
            says = (me, "3 tokens on this rank", "an even number", "multiple of 4: share_tokens")
            check.refused(attention, odd, odd, odd, says=says)


@on_ranks(3)
def test_a_rank_outside_the_group_is_refused(check, rank):
    group = dist.new_group([0, 1])
    x = torch.ones(2, 2, 2)
    for attention, _ in SCHEMES.values():
        if rank == 2:
            says = ("rank 2 called", "a group that it isn't in")
            check.refused(attention, x, x, x, False, group, says=says)
        else:
            attention(x, x, x, False, group)


@pytest.mark.parametrize("name", SCHEMES)
def test_other_lengths_by_rank_are_told_and_nothing_hangs(name):
    def unequal(name):
        x = torch.ones(2, 4 if dist.get_rank() else 2, 2)
        SCHEMES[name][0](x, x, x)

    with pytest.raises(LaunchError, match=r"rank [01]") as refusal:
        launch(unequal, name, world_size=2, timeout=60)
    assert re.search(r"mismatch|as many|expected", str(refusal.value))
