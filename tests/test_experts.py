"""ddpkit.experts, on every rank, against one process that has all experts and all tokens."""

import copy
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from expert_cases import (
    EXPERTS,
    LR,
    WIDTH,
    K,
    by_hand,
    rows_of,
    sparse_gpt,
    squares,
    tokens_of,
    whole_layer,
    whole_model,
    whole_numbers,
)
from on_ranks import on_ranks, some_or_all
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grad_norm_, get_total_norm
from training_cases import ADAMW, HALF_THE_DIGITS, SGD, sent_by, small_gpt

from ddpkit import launch
from ddpkit.context_parallel import summed_loss
from ddpkit.experts import (
    MixtureOfExperts,
    Router,
    average_gradients,
    balance,
    balance_loss,
    balance_losses,
    capacity_of,
    count_copies,
    layers,
    move_bias,
    rows_between,
    share_experts,
    through_experts,
    whole_state,
    within_capacity,
)
from ddpkit.experts.router import sigmoid, softmax
from ddpkit.models import mean_loss
from ddpkit.runtime.errors import LaunchError
from ddpkit.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    clip_grad_norm,
    splits,
)
from ddpkit.tensor_parallel import count_copies as tensor_copies

MESHES = {1: [1], 2: [1, 2], 3: [1, 3], 4: [1, 2, 4], 6: [2, 3]}  # ranks: those that share experts


def groups_of(ranks):
    """(the group that shares experts, the one that holds the same ones)."""
    shape = dist.get_world_size() // ranks, ranks
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "experts"))
    return mesh["experts"].get_group(), mesh["data"].get_group()


# One process


@pytest.mark.parametrize("shared", [0, 5])
@pytest.mark.parametrize("capacity", [None, 0.5, 1.0])
def test_a_layer_is_what_it_is_by_hand(shared, capacity):
    layer, x = whole_layer(shared, capacity), whole_numbers(9, WIDTH, seed=5).requires_grad_()
    kept = None
    if capacity:
        most = capacity_of(capacity, 9, K, EXPERTS)
        kept = within_capacity(layer.router(x)[1], EXPERTS, most)
    found = []
    for out in (layer(x.view(3, 3, WIDTH)).view(9, WIDTH), by_hand(layer, x, kept)):
        used = [x, *layer.parameters()]
        grads = torch.autograd.grad(squares(out), used, allow_unused=True, materialize_grads=True)
        found.append([out, *grads])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_capacity_keeps_the_first():
    chosen = torch.tensor([[0, 1], [0, 2], [1, 0], [0, 1]])
    kept = within_capacity(chosen, 3, 2)
    assert kept.tolist() == [[True, True], [True, True], [True, False], [False, False]]
    assert capacity_of(1.0, 4, 2, 3) == 3
    assert capacity_of(1.25, 4, 2, 8) == 2
    assert capacity_of(1.1, 100, 2, 4) == 55
    assert capacity_of(1.1, 101, 2, 4) == 56
    for bad in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="expected a capacity factor > 0, got"):
            capacity_of(bad, 4, 2, 8)
    with pytest.raises(ValueError, match="expected a capacity of 1 row at least, got 0"):
        within_capacity(chosen, 3, 0)


def test_new_experts_are_where_the_mlps_were():
    gpt = sparse_gpt(lambda: small_gpt().to("meta", torch.bfloat16))
    assert {(p.device.type, p.dtype) for p in gpt.parameters()} == {("meta", torch.bfloat16)}


@pytest.mark.parametrize("score", [softmax, sigmoid])
def test_bias_chooses_and_scores_weigh(score):
    torch.manual_seed(0)
    router, x = Router(6, 4, 2, score), torch.randn(10, 6)
    scores, chosen, weights = router(x)
    assert torch.equal(chosen, scores.topk(2).indices)
    torch.testing.assert_close(weights, scores.topk(2).values / scores.topk(2).values.sum(1, True))
    router.bias[3] = 10
    again, moved, weights = router(x)
    assert torch.equal(again, scores)
    assert (moved == 3).any(1).all()
    theirs = scores.gather(1, moved)
    torch.testing.assert_close(weights, theirs / theirs.sum(1, keepdim=True))
    assert router.bias.grad is None


def test_the_router_computes_in_float32():
    torch.manual_seed(0)
    router, x = Router(64, 4, 1), torch.randn(50, 64).bfloat16()
    scores, _, weights = router.bfloat16()(x)
    assert scores.dtype == weights.dtype == torch.float32
    wide = (x.float() @ router.weight.float().T).softmax(-1)
    torch.testing.assert_close(scores, wide, rtol=1e-5, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(router(x)[0], scores)


def test_what_a_router_refuses():
    with pytest.raises(ValueError, match="expected k of at most 4 experts, got 5"):
        Router(6, 4, 5)
    with pytest.raises(ValueError, match="expected k to be 1 or more, got 0"):
        Router(6, 4, 0)
    x = torch.ones(5, 6)
    x[2] = torch.nan
    with pytest.raises(ValueError, match="scores not finite for 1 tokens"):
        Router(6, 4, 2)(x)


def test_balance_loss_is_least_where_all_are_used_alike():
    even = torch.full((8, 4), 0.25)
    assert balance_loss(even, torch.arange(8).view(8, 1) % 4).item() == 1
    one = torch.tensor([[1.0, 0, 0, 0]]).repeat(8, 1)
    assert balance_loss(one, torch.zeros(8, 1).long()).item() == 4
    assert balance_loss(2 * one, torch.zeros(8, 1).long()).item() == 4  # sigmoid's don't add up
    assert balance_loss(one[:0], torch.zeros(0, 1).long()).item() == 0


# The exact twin


def exact_step(model, x, scale, copies=None, replicas=None):
    """One step of SGD: [loss, norm, all gradients and weights by name]."""
    loss = squares(model(x)) * scale
    loss.backward()
    if copies:
        average_gradients(model, replicas)
    # −0 and 0 are one number: which of them it is depends on what is added up.
    grads = {name: p.grad + 0.0 for name, p in model.named_parameters()}
    if copies:
        norm = clip_grad_norm(copies, float("inf"))
    else:
        norm = get_total_norm(grads.values())
    weights = {}
    for name, p in model.named_parameters():
        weights[name] = p.detach() - LR * p.grad
    return norm, grads, weights


def twin(**options):
    model = whole_model(**options)
    return exact_step(model, rows_of(range(dist.get_world_size())), 1)


@some_or_all
@on_ranks(1, 2, 3, 4, 6)
def test_the_exact_twin(check, rank, world_size, part):
    """To the last bit, unequal tokens, a rank without any, shared or not."""
    for shared in (0, 3) if part == "all" else {2: [0], 3: [3], 4: [0]}.get(world_size, []):
        norm, grads, weights = twin(shared=shared)
        for ranks in MESHES[world_size]:
            group, replicas = groups_of(ranks)
            model = whole_model(shared=shared)
            share_experts(model, group)
            copies = count_copies(model)
            # W times this rank's part: gradients are averaged.
            ours = exact_step(model, rows_of([rank]), world_size, copies, replicas)
            what = f"{world_size} ranks, {ranks} share, shared {shared}"
            # Squares are beyond 2⁵³, so their sum rounds once a number.
            check.close(ours[0], norm, 1000 * torch.finfo(torch.float64).eps * norm, what, "norm")
            for name in ours[1]:
                check.same(ours[1][name], grads[name], what, "gradient", name)
                check.same(ours[2][name], weights[name], what, "weight", name)
            mine = EXPERTS // ranks
            check.same(len(model[1].experts), mine, what, "experts here")


@on_ranks(2, 4)
def test_capacity_drops_by_rank(check, rank, world_size):
    """The twin drops the same, if it looks at one rank's tokens at a time."""
    model = whole_model(capacity=0.5)
    parts = [rows_of([each]) for each in range(world_size)]
    sum(squares(model(part)) for part in parts).backward()
    ours = whole_model(capacity=0.5)
    share_experts(ours)
    (squares(ours(parts[rank])) * world_size).backward()
    average_gradients(ours, dist.new_subgroups(1)[0])
    right = dict(model.named_parameters())
    for name, p in ours.named_parameters():
        check.same(p.grad + 0.0, right[name].grad + 0.0, name)


@on_ranks(2, 3, 4)
def test_ranks_without_tokens_take_part_forward_and_backward(check, rank, world_size):
    """Only the last rank has any: the others' experts still work, and learn from its tokens."""
    last = world_size - 1
    _, right, _ = exact_step(whole_model(shared=3), rows_of([3]), 1)
    model = whole_model(shared=3)
    share_experts(model)
    rows = rows_of([3]) if rank == last else whole_numbers(0, WIDTH, seed=0)
    out = []
    forward = sent_by(lambda: out.append(model(rows)))
    backward = sent_by(lambda: (squares(out[0]) * world_size).backward())
    check.same(out[0].shape, rows.shape, "out")
    check.same([record.op for record in forward], ["all_to_all"] * 6, "forward")
    check.same([record.op for record in backward], ["all_to_all"] * 4, "backward")
    came = [sum(record.splits[1]) for record in forward]
    check.unless(rank == last or came[1] + came[4] > 0, "no rows came", came)
    average_gradients(model, dist.new_subgroups(1)[0])
    for name, p in model.named_parameters():
        check.same(p.grad + 0.0, right[name], name)


def test_a_rank_without_tokens_that_skips_backward_is_named():
    def skips():
        layer = whole_layer()
        share_experts(layer)
        x = rows_of([dist.get_rank()]).requires_grad_()
        out = layer(x)
        if len(x) > 0:
            squares(out).backward()

    says = "rank 0 waits in all_to_all for rank 1, which has returned"
    with pytest.raises(LaunchError, match=says):
        launch(skips, world_size=2, timeout=60)


# With tensor parallelism


def split_experts(model, group):
    """Cut each expert, and the shared one, by its hidden numbers."""
    for layer in layers(model):
        for mlp in [*layer.experts.values(), *filter(None, [layer.shared])]:
            mlp[0] = ColumnParallelLinear(mlp[0], group)
            mlp[2] = RowParallelLinear(mlp[2], group)


@some_or_all
@on_ranks(4, 6, 8)
def test_the_exact_twin_with_tensor_parallelism(check, rank, world_size, part):
    """Data × experts × tensor, never all equal: ranks of a tensor group have the same tokens.

    Nothing in either is for the other: numbers of copies multiply.
    """
    shapes = {4: [(1, 2, 2)], 6: [(1, 2, 3), (1, 3, 2)], 8: [(2, 2, 2), (1, 4, 2)]}
    if part == "some":
        shapes = {6: [(1, 2, 3)]}
    for shape in shapes.get(world_size, []):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "experts", "tensor"))
        group, tensor = mesh["experts"].get_group(), mesh["tensor"].get_group()
        everyone = mesh["data", "experts"]._flatten("everyone").get_group()  # who has other tokens
        parts = dist.get_world_size(everyone)
        norm, right, _ = exact_step(whole_model(shared=3), rows_of(range(parts)), 1)
        model = whole_model(shared=3)
        share_experts(model, group, everyone)
        split_experts(model, tensor)
        (squares(model(rows_of([dist.get_rank(everyone)]))) * parts).backward()
        average_gradients(model, mesh["data"].get_group(), everyone)
        for name, (dim, hands) in splits(model).items():
            mine = hands[dist.get_rank(tensor)]
            right[name] = right[name].index_select(dim, mine)
        for name, p in model.named_parameters():
            check.same(p.grad + 0.0, right[name], shape, name)
        of_experts, of_tensor = count_copies(model, everyone), tensor_copies(model, tensor)
        copies = {p: n * of_tensor[p] for p, n in of_experts.items()}
        ours = clip_grad_norm(copies, float("inf"))
        check.close(ours, norm, 1000 * torch.finfo(torch.float64).eps * norm, shape, "norm")


# The wire


@on_ranks(1, 2, 3, 4, 6)
def test_splits_are_predicted_to_the_byte(check, rank, world_size):
    for ranks in MESHES[world_size]:
        group, _ = groups_of(ranks)
        layer = whole_layer()
        tables = [layer.router(rows_of([each]))[1] for each in dist.get_process_group_ranks(group)]
        planned = rows_between(tables, EXPERTS)
        share_experts(layer, group)
        x, out = rows_of([rank]).requires_grad_(), []
        forward = sent_by(lambda layer=layer, x=x, out=out: out.append(layer(x)))
        backward = sent_by(lambda out=out: squares(out[0]).backward())
        if ranks == 1:
            check.same(
                [r.op for r in forward if r.op != "all_reduce"], [], "alone, nothing is sent"
            )
            continue
        here = dist.get_rank(group)
        there = tuple(WIDTH * rows for rows in planned[here])
        back = tuple(WIDTH * rows[here] for rows in planned)
        counts = (EXPERTS // ranks,) * ranks
        said = [(r.op, r.splits, r.bytes) for r in forward]
        check.same(
            said,
            [
                ("all_to_all", (counts, counts), 8 * EXPERTS),
                ("all_to_all", (there, back), 8 * sum(there)),
                ("all_to_all", (back, there), 8 * sum(back)),
            ],
            ranks,
            "forward",
        )
        said = [(r.op, r.splits, r.bytes) for r in backward]
        rows = [(there, back), (back, there)]
        check.same(said, [("all_to_all", both, 8 * sum(both[0])) for both in rows], "backward")


def test_splits_with_a_capacity():
    tables = [torch.tensor([[0, 3], [0, 3], [0, 1]]), torch.tensor([[2, 3]])]
    assert rows_between(tables, 4) == [[4, 2], [0, 2]]
    kept = [within_capacity(table, 4, 1) for table in tables]
    assert rows_between(tables, 4, kept) == [[2, 1], [0, 2]]


# Balance


@on_ranks(1, 3)
def test_the_balance_loss_of_all_is_the_mean_of_the_ranks(check, rank, world_size):
    torch.manual_seed(0)
    router = Router(6, 4, 2).double()
    x = torch.randn(12, 6, dtype=torch.float64)
    parts = x.split({1: [12], 3: [5, 0, 7]}[world_size])
    scores, chosen, _ = router(x)
    right = balance_loss(scores, chosen)
    (gradient,) = torch.autograd.grad(right, [router.weight])
    scores, chosen, _ = router(parts[rank])
    loss = balance_loss(scores, chosen, world_size)
    (ours,) = torch.autograd.grad(loss, [router.weight])
    for mine, of_all, what in ((loss.detach(), right.detach(), "loss"), (ours, gradient, "grad")):
        dist.all_reduce(mine)
        check.close(mine / world_size, of_all, HALF_THE_DIGITS, what)


@on_ranks(1, 2, 4)
def test_a_bias_moves_by_the_loads_of_all_ranks(check, rank, world_size):
    bias, load = torch.zeros(4), torch.tensor([4, 0, 2, 2]) if rank == 0 else torch.tensor([2] * 4)
    before = load.clone()
    move_bias(bias, load, 0.25)
    check.same(bias, torch.tensor([-0.25, 0.25, 0, 0]), "bias")
    check.same(load, before, "load was changed")


@on_ranks(2)
def test_balance_levels_the_loads_in_place(check, rank):
    torch.manual_seed(0)
    layer = MixtureOfExperts(6, 4, 4, 1, sigmoid).double()
    layer.router.weight.data[0] += 0.5
    share_experts(layer)
    bias = layer.router.bias
    x = torch.rand(40, 6, dtype=torch.float64) + rank
    loads = []
    for _ in range(200):
        layer(x)
        loads.append(layer.load.clone())
        balance(layer, 0.01)
    for load in (loads[0], loads[-1]):
        dist.all_reduce(load)
    check.unless(loads[0].max() >= 60, "not lopsided at first", loads[0])
    check.unless(loads[-1].max() <= 40, "not level in the end", loads[-1])
    check.same(layer.router.bias is bias, True, "the buffer was replaced")
    check.same(int(layer.load.sum()), 0, "counts begin anew")
    layer.eval()
    layer(x)
    check.same(int(layer.load.sum()), 0, "only training counts")


# A GPT


def batch_of(step, rank, number=0):
    """Ranks have unequal numbers of sequences; one has none."""
    sequences = [2, 0, 3, 1, 1, 2][(rank + step) % 6]
    generator = torch.Generator().manual_seed(100 * step + 10 * number + rank)
    return torch.randint(11, (sequences, 7), generator=generator)


def gpt():
    return sparse_gpt(lambda: small_gpt(layers=2), experts=12, k=2, shared=5, balance=0.01)


def one_process(make, world_size, max_norm):
    model = gpt()
    optimizer, norms = make(model.parameters()), []
    for step in range(3):
        optimizer.zero_grad()
        tokens = torch.cat([batch_of(step, rank) for rank in range(world_size)])
        loss = mean_loss(model(tokens[:, :-1]), tokens[:, 1:]) + balance_losses(model)
        loss.backward()
        norms.append(clip_grad_norm_(model.parameters(), max_norm))
        optimizer.step()
        for layer in layers(model):  # what `balance` does on ranks
            layer.router.bias += 0.01 * torch.sign(layer.load.double().mean() - layer.load)
            layer.load.zero_()
    return model.state_dict(), torch.stack(norms)


def on_ranks_of(ranks, make, max_norm):
    group, replicas = groups_of(ranks)
    model = gpt()
    share_experts(model, group)
    optimizer, norms = make(model.parameters()), []
    for step in range(3):
        optimizer.zero_grad()
        tokens = batch_of(step, dist.get_rank())
        loss = summed_loss(model(tokens[:, :-1]), tokens[:, 1:]) + balance_losses(model)
        loss.backward()
        average_gradients(model, replicas)
        norms.append(clip_grad_norm(count_copies(model), max_norm))
        optimizer.step()
        balance(model, 0.01)
    return whole_state(model, group), torch.stack(norms)


@pytest.mark.wide
@on_ranks(1, 2, 3, 4, 6)
def test_a_gpt_trains_as_in_one_process(check, world_size):
    for make in (SGD, ADAMW):
        right, norms = one_process(make, world_size, max_norm=0.5)
        for ranks in MESHES[world_size]:
            ours, our_norms = on_ranks_of(ranks, make, max_norm=0.5)
            what = f"{world_size} ranks, {ranks} share, {make.func.__name__}"
            check.close(our_norms, norms, HALF_THE_DIGITS, what, "norms")
            check.same(sorted(ours), sorted(right), what)
            for name in right:
                check.close(ours[name], right[name], HALF_THE_DIGITS, what, name)


@on_ranks(4)
def test_saved_on_4_loaded_on_2(check):
    model = whole_model()
    right = copy.deepcopy(model.state_dict())
    share_experts(model)
    state = whole_state(model)
    check.same(dict(state), dict(right), "whole state")
    group, _ = groups_of(2)
    again = nn.Sequential(*(whole_layer() for _ in range(2)))
    again = nn.Sequential(nn.Linear(WIDTH, WIDTH).double(), *again)
    again.load_state_dict(state)
    share_experts(again, group)
    for name, value in again.state_dict().items():
        check.same(value, right[name], name)


# Mistakes, each with what it does


def factors(model, right):
    """{gradient of ours / of the twin's}, of experts and of the rest, where that is no zero."""
    found = {"experts": set(), "rest": set()}
    for name, p in model.named_parameters():
        theirs = right[name]
        ratio = (p.grad / theirs)[theirs != 0]
        found["experts" if ".experts." in name else "rest"] |= set(ratio.tolist())
    return found


@on_ranks(4, 6)
def test_dividing_by_the_replicas_makes_gradients_of_experts_e_times_too_large(
    check, rank, world_size
):
    """Published: Megatron-LM#5956, DeepSpeed#5259, pytorch#160285. On unequal axes."""
    _, right, _ = twin()
    for ranks in (2,) if world_size == 4 else (2, 3):
        group, replicas = groups_of(ranks)
        model = whole_model()
        share_experts(model, group)
        (squares(model(rows_of([rank]))) * world_size).backward()
        average_gradients(model, replicas)
        check.same(factors(model, right), {"experts": {1.0}, "rest": {1.0}}, "right")
        for layer in layers(model):
            for p in layer.experts.parameters():
                p.grad *= world_size / dist.get_world_size(replicas)
        told = factors(model, right)
        check.same(told, {"experts": {float(ranks)}, "rest": {1.0}}, "by the replicas")


@on_ranks(4, 6)
def test_norms_without_experts_or_with_each_rank_s_own(check, rank, world_size):
    """A norm without experts clips too little, and an average of the ranks' own isn't theirs.

    On 6 ranks as 3 × 2 and 2 × 3: where both axes are 2, copies of experts and their ranks are one
    number.
    """
    right, grads, _ = twin()
    without = get_total_norm([g for n, g in grads.items() if ".experts." not in n])
    for ranks in (2,) if world_size == 4 else (2, 3):
        group, replicas = groups_of(ranks)
        model = whole_model()
        share_experts(model, group)
        (squares(model(rows_of([rank]))) * world_size).backward()
        average_gradients(model, replicas)
        copies = count_copies(model)
        check.unless(torch.isclose(clip_grad_norm(copies, 1e30), right), ranks, "one norm")
        rest = {p: n for p, n in copies.items() if n == world_size}
        check.unless(torch.isclose(clip_grad_norm(rest, 1e30), without), ranks, "without experts")
        own = get_total_norm([p.grad for p in model.parameters()])
        dist.all_reduce(own)
        own /= world_size
        check.unless(without < own < right, ranks, "an average of norms", own, right)
        # Clipped, all ranks' gradients are the twin's, shortened by one factor.
        clip_grad_norm(copies, 1.0)
        for name, p in model.named_parameters():
            check.close(p.grad, grads[name] / (right + 1e-6), HALF_THE_DIGITS, ranks, name)


@on_ranks(2)
def test_numbers_of_experts_sorted_as_strings_swap_them(check, rank):
    """Published: torchtitan#1918. 10 and 11 stand before 2: from 11 experts on."""
    layer = whole_layer()
    x = rows_of([0, 2, 3])
    right = layer(x)
    numbers = sorted(layer.experts)
    check.same(numbers[:4], ["0", "1", "10", "11"], "sorted")
    swapped = {str(place): layer.experts[number] for place, number in enumerate(numbers)}
    layer.experts = nn.ModuleDict(swapped)
    check.unless(not torch.equal(layer(x), right), "it makes no difference")


@on_ranks(2)
def test_a_shared_expert_that_all_ranks_add_counts_e_times(check, rank):
    """Published: sglang#26845. Here it is added where the token lives: once."""
    layer = whole_layer(shared=3)
    x = rows_of([rank])
    right = layer(x)
    share_experts(layer)
    check.same(layer(x), right, "once")

    def with_shared(rows, counts):
        return layer.across_ranks(rows, counts) + layer.shared(rows)

    _, chosen, weights = layer.router(x)
    weights = torch.ones_like(weights)  # so that a factor shows
    routed = through_experts(x, chosen, weights, EXPERTS, layer.across_ranks)
    twice = through_experts(x, chosen, weights, EXPERTS, with_shared)
    check.same(twice - routed, K * layer.shared(x), "once for each choice")


def test_a_rank_without_tokens_that_skips_the_call_is_named():
    def skips():
        layer = whole_layer()
        share_experts(layer)
        x = rows_of([dist.get_rank()])
        if len(x) > 0:
            layer(x)

    with pytest.raises(
        LaunchError, match="rank 0 waits in all_to_all for rank 1, which has returned"
    ):
        launch(skips, world_size=2, timeout=60)


@on_ranks(4)
def test_adamw_hides_the_factor_and_sgd_shows_it(check, rank):
    """With gradients of experts twice too large."""
    for make, hidden in ((SGD, False), (ADAMW, True)):
        group, replicas = groups_of(2)
        after = []
        for factor in (1, 2):
            model = whole_model()
            share_experts(model, group)
            (squares(model(rows_of([rank]))) * 4).backward()
            average_gradients(model, replicas)
            for layer in layers(model):
                for p in layer.experts.parameters():
                    p.grad *= factor
            make(model.parameters()).step()
            after.append(torch.cat([p.detach().flatten() for p in model[1].parameters()]))
        same = torch.allclose(*after, rtol=0, atol=1e-8)
        check.same(same, hidden, make.func.__name__)


# Refused


@on_ranks(3)
def test_mistakes_are_named(check, rank):
    layer = MixtureOfExperts(4, 4, experts=8)
    says = (f"rank {rank} called share_experts with 8 experts for 3 ranks", "a multiple")
    check.refused(share_experts, layer, says=says)
    group = dist.new_group([0, 1])
    if rank == 2:
        check.refused(share_experts, layer, group, says=("rank 2", "a group that it isn't in"))
    layer = MixtureOfExperts(4, 4, experts=6, capacity=0.0)
    check.refused(layer, torch.ones(3, 4), says="expected a capacity factor > 0, got 0.0")


def test_a_router_that_gives_nan_on_one_rank_ends_all():
    def broken():
        layer = whole_layer()
        layer.router = Router(WIDTH, EXPERTS, K).double()
        share_experts(layer)
        layer(rows_of([0]) * (float("nan") if dist.get_rank() == 1 else 1))

    with pytest.raises(LaunchError, match=r"rank 1 called the router with scores not finite"):
        launch(broken, world_size=2, timeout=60)


def test_the_loads_of_a_case_are_unequal():
    """Else the tests above would prove little."""
    layer = whole_layer()
    loads = Counter(layer.router(rows_of(range(4)))[1].flatten().tolist())
    assert max(loads.values()) > min(loads.get(n, 0) for n in range(EXPERTS))
    assert tokens_of(1) == 0
