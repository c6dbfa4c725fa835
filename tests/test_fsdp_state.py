"""FSDP's whole parameters and checkpoints, modules made on the meta device, and all it refuses."""

import copy
import re
from functools import partial

import fsdp_cases as cases
import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn

from ddpkit import RankError, launch
from ddpkit.fsdp import FSDP, load, save

SGD = partial(torch.optim.SGD, lr=2**-16, momentum=1 / 2)
ADAMW = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, amsgrad=True)


def batch(step, *_):  # alike on all ranks, so that worlds of any size agree
    return cases.batch(step, 0, 0)


def train(model, optimizer, steps):
    """What came out: all whole parameters."""
    for step in steps:
        if isinstance(model, FSDP):
            cases.backward(model, step, batch=batch, factor=1 / 64)
        else:
            (cases.loss_of(model, batch(step)) / 64).backward()
        optimizer.step()
        optimizer.zero_grad()
    if isinstance(model, FSDP):
        return model.full_parameters()
    return {name: p.detach() for name, p in model.named_parameters()}


# Checkpoints


def saved(folder, make):
    model = cases.wrapped(dist.get_rank())
    optimizer = make(model.parameters())
    train(model, optimizer, range(2))
    optimizer.param_groups[0]["lr"] *= 1 / 2  # as schedulers do
    save(folder, model, optimizer)
    return model.full_parameters(), train(model, optimizer, range(2, 4))


def loaded(folder, make, again):
    """Into other weights and a fresh optimizer; saved again, and what comes of training on."""
    model = cases.wrapped(9 + dist.get_rank())
    optimizer = make(model.parameters())
    load(folder, model, optimizer)
    save(again, model, optimizer)
    return train(model, optimizer, range(2, 4))


def plain(folder, make):
    """A plain module and its optimizer, loaded in this process."""
    model = cases.Odd(seed=9)
    optimizer = make(model.parameters())
    load(folder, model, optimizer)
    return model, optimizer


@pytest.mark.parametrize("make", [SGD, ADAMW], ids=["SGD", "AdamW"])
def test_saved_on_four_loads_on_fewer_and_into_a_plain_module(make, tmp_path):
    """Parameters and optimizer state to the bit; trained on, within the last digits of float64."""
    folder = tmp_path / "four"
    at_once, expected = launch(saved, folder, make, world_size=4)[0]
    model, optimizer = plain(folder, make)
    assert optimizer.param_groups[0]["lr"] == make.keywords["lr"] / 2
    parameters = dict(model.named_parameters())
    torch.testing.assert_close(at_once, parameters, rtol=0, atol=0)
    state = copy.deepcopy(optimizer.state_dict())
    assert len(state["state"]) == sum(p.requires_grad for p in parameters.values())
    torch.testing.assert_close(train(model, optimizer, range(2, 4)), expected, rtol=1e-9, atol=1e-9)
    for world_size in (1, 2, 3):
        again = tmp_path / f"again {world_size}"
        for then in launch(loaded, folder, make, again, world_size=world_size):
            torch.testing.assert_close(then, expected, rtol=1e-9, atol=1e-9)
        model, optimizer = plain(again, make)
        torch.testing.assert_close(dict(model.named_parameters()), at_once, rtol=0, atol=0)
        torch.testing.assert_close(optimizer.state_dict(), state, rtol=0, atol=0)


def kept_state(folder, save_it):
    model = cases.wrapped(0)
    optimizer = ADAMW(model.parameters())
    if save_it:
        train(model, optimizer, range(2))
        save(folder, model, optimizer)
    else:
        load(folder, model, optimizer)
    return [list(each.values()) for each in optimizer.state.values()]


def test_optimizer_state_comes_back_to_the_bit(tmp_path):
    """On the same number of ranks each value is compared with its own."""
    before = launch(kept_state, tmp_path / "c", True, world_size=3)
    after = launch(kept_state, tmp_path / "c", False, world_size=3)
    for ours, theirs in zip(before, after, strict=True):
        torch.testing.assert_close(theirs, ours, rtol=0, atol=0)


def save_alone(folder, whole):
    model = cases.wrapped()
    if dist.get_rank() == 0:
        if whole:
            model.full_parameters()
        else:
            save(folder, model, patience_s=1.0)


@pytest.mark.wide
@pytest.mark.parametrize("whole", [False, True], ids=["save", "full_parameters"])
def test_a_rank_that_saves_alone_is_refused(tmp_path, whole):
    says = "rank 0 called (save|full_parameters), and not all ranks did.*on every rank"
    with pytest.raises(RankError, match=says):
        launch(save_alone, tmp_path / "c", whole, world_size=2)


def load_another(folder):
    model = FSDP(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3)))
    save(folder, model)
    complaint = []
    for other in (
        nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4)),
        nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3), nn.Linear(3, 3)),
    ):
        try:
            load(folder, FSDP(other))
        except ValueError as error:
            complaint.append(str(error))
    return complaint


def test_another_models_checkpoint(tmp_path):
    for rank, (shape, name) in enumerate(launch(load_another, tmp_path / "c", world_size=2)):
        got = "expected the same shape of 1.weight in both, got (3, 5) in the checkpoint, (4, 5)"
        assert f"rank {rank}: {got} here. Is it another model's" in shape
        assert "2.weight in both, got nothing in the checkpoint" in name


# The meta device


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5)
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.last = nn.Linear(3, 5, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x):
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = block(x).relu()
        return nn.functional.linear(x, self.last.weight.T)


@on_ranks(1, 3, backend="gloo")  # one rank would take a GPU, which draws other numbers
def test_made_on_the_meta_device(check, rank):
    """The values that a module made at once has; an optimizer made before goes on; ties hold."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    with torch.device("meta"):
        meta = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
        tied = Tied()
    optimizer = torch.optim.SGD(meta.parameters(), lr=1.0)
    torch.manual_seed(rank)
    model = FSDP(meta)
    for name, whole in model.full_parameters().items():
        check.same(whole, plain.get_parameter(name).detach(), name)
    before = model.full_parameters()["0.weight"]
    model(torch.randn(4, 3)).square().sum().backward()
    model.synchronize()
    optimizer.step()
    check.unless(not torch.equal(before, model.full_parameters()["0.weight"]), "not trained")
    tied = FSDP(tied)
    tied(torch.randn(4, 3)).sum().backward()
    tied.synchronize()
    check.unless(tied.module.first.weight is tied.module.last.weight, "the tie is broken")
    with torch.device("meta"):
        attention = nn.MultiheadAttention(4, 2)
    check.refused(FSDP, attention, says=("MultiheadAttention", "reset_parameters"))


# Refusals


@on_ranks(2)
def test_mistakes_are_named(check, rank):
    check.refused(FSDP, nn.Linear(2 + rank, 3), says=("the same module", "on rank 1", "weight"))
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    check.refused(FSDP, layers, wrap=[], says=("one dtype", "1.weight in torch.float64", "wrap"))
    check.refused(FSDP, nn.Linear(2, 2), wrap=["blocks.0"], says=("submodules", "blocks.0"))
    check.refused(FSDP, FSDP(nn.Linear(2, 2)), says=("a plain module", "wrap"))
    model = FSDP(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    values = {"0.weight": torch.ones(2, 2)}
    check.refused(model.load_full_parameters, values, says=("0.bias", "nothing in values"))
    check.refused(model.state_dict, says="this rank's shards alone", error=RuntimeError)
    # A part of the module that no gradient comes to
    model(torch.ones(1, 2)).sum().backward()
    model.synchronize()
    model.module[0](torch.ones(1, 2)).sum().backward()
    says = (f"rank {rank} has no gradient for 1.weight, 1.bias", "Freeze it")
    check.refused(model.synchronize, says=says)


@on_ranks(3)
def test_a_group_that_this_rank_is_not_in(check, rank):
    group = dist.new_group([0, 2])
    if rank == 1:
        says = "rank 1 called FSDP with a group that it isn't in"
        check.refused(FSDP, nn.Linear(2, 2), group=group, says=says)
    else:
        model = FSDP(nn.Linear(2, 4), group=group)
        check.same(model.module.weight.shape, (2, 2), "rows")
        model(torch.ones(1, 2) * rank).sum().backward()
        model.synchronize()
        check.same(model.module.weight.grad, torch.ones(2, 2), "the mean of 0 and 2")


def use_in_order(orders, own):
    """A step in each order; in the last one, rank 1 has its own."""
    model = cases.wrapped(dtype=torch.float32)
    model.conductor.agreement.patience_s = 1.0
    for number, order in enumerate(orders):
        mine = own if dist.get_rank() == 1 and number == len(orders) - 1 else order
        cases.backward(model, number, loss=lambda model, x, mine=mine: model(x, mine).sum())


OWN_ORDERS = {  # what rank 1 does alone, and its first call that isn't the others'
    "another order": ((1, 0, 2), "gather blocks.1"),
    "fewer": ((0, 1), "gather blocks.1"),  # its backward begins where the others go on
    "one twice": ((0, 1, 2, 1), "gather blocks.1"),
}


@pytest.mark.parametrize("which", OWN_ORDERS)
def test_ranks_that_use_different_parameters(which):
    own, _ = OWN_ORDERS[which]
    says = r"same next call on every rank, got (gather|reduce) .* on rank 1, (gather|reduce) .* on"
    with pytest.raises(RankError, match=says):
        launch(use_in_order, [(0, 1, 2)], own, world_size=2)


@pytest.mark.wide
@pytest.mark.parametrize("which", OWN_ORDERS)
def test_ranks_that_use_different_parameters_in_the_third_step(which):
    """Blocks are alike, so that one rank's weights would serve the other's."""
    own, call = OWN_ORDERS[which]
    named = re.escape(f"{call} ({call.split()[1]}.up.weight ...)")
    says = rf"rank 1 came to '{named}' after 'gather .*', which is new, and rank 0 to nothing new"
    with pytest.raises(RankError, match=says):
        launch(use_in_order, [(0, 1, 2)] * 3, own, world_size=2)


@on_ranks(2)
def test_an_order_that_is_new_on_all_ranks_is_fine(check):
    """As where layers are left out by lot: the same lot on all ranks. An evaluation, too."""
    model = cases.wrapped(dtype=torch.float32)
    for step, use in enumerate([(0, 1, 2), (1, 0, 2), (0, 1, 2, 2), (0, 1, 2)]):
        cases.backward(model, step, loss=lambda model, x, use=use: model(x, use).sum())
        with torch.no_grad():
            for _ in range(1 + step):
                model(cases.batch(0, 0, 0))
    before = len(cases.said())
    cases.backward(model, 0, loss=lambda model, x: model(x, (1, 0, 2)).sum())
    ops = {record.op for record in cases.said()[before:]}
    check.same(ops, {"all_gather", "reduce_scatter"}, "ranks agree only once")
    check.same(len(cases.said()) - before, 4 + 3 + 4, "calls")


@on_ranks(2)
def test_past_the_hooks(check):
    """A submodule's method, its forward, a parameter from outside: the shapes may fit."""
    model = FSDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    short = model.module[0].forward(torch.ones(1, 4))  # a half of the outputs
    check.same(short.shape, (1, 2), "what a shard computes")
    says = ("its shard of 0.", "without its hooks", "Call the module itself")
    check.refused(short.sum().backward, says=says, error=RuntimeError)


@on_ranks(2)
def test_an_optimizer_made_before_the_wrapping_goes_on(check):
    """PyTorch's holds parameters that no longer exist (dlrover#584); ours are the same ones."""
    plain = cases.Odd()
    optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)
    model = FSDP(plain)
    before = model.full_parameters()
    cases.backward(model, 0)
    optimizer.step()
    after = model.full_parameters()
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    check.unless("tokens.weight" in moved and "places" not in moved, moved)


@on_ranks(2)
def test_stale_weights_are_refused(check):
    """Kept whole, and the shards updated: `synchronize` was forgotten."""
    model = FSDP(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), wrap=["0"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with model.no_sync(gradients=False, weights=True):
        model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    says = ("updated the shards of", "stale", "synchronize()")
    check.refused(model, torch.ones(1, 2), says=says, error=RuntimeError)


class Returns(nn.Linear):
    def __init__(self, view):
        super().__init__(2, 4)
        self.view = view

    def forward(self, x):
        y = super().forward(x)
        return y.view(-1) if self.view else y


class Changes(nn.Sequential):
    def forward(self, x):
        y = self[0](x)
        y *= 2
        return y.square().sum()


@on_ranks(2)
def test_a_change_in_place_of_what_a_unit_returns(check):
    """Of a view PyTorch's `fully_shard` drops the hook, and warns (pytorch#181832)."""
    torch.manual_seed(0)
    plain = Changes(Returns(view=False))
    torch.manual_seed(0)
    model = FSDP(Changes(Returns(view=False)))
    for each in (plain, model):
        each(torch.ones(1, 2)).backward()
    model.synchronize()
    for name, p in plain.named_parameters():
        check.same(model.module.get_parameter(name).grad, cases.mine(name, p.grad), name)
    model = FSDP(Changes(Returns(view=True)))
    says = ("is a view and is being modified inplace", "cloning")
    check.refused(model, torch.ones(1, 2), says=says, error=RuntimeError)
