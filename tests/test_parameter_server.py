"""ddpkit.parameter_server against one process that does it all; and the server's wire."""

import copy
import sys
from functools import partial

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from outside import run_script

from ddpkit import RankError, launch
from ddpkit.models import GPT, mean_loss
from ddpkit.parameter_server import Update, serve, serve_asynchronously, work

cloudpickle.register_pickle_by_value(
    sys.modules[__name__]
)  # functions travel as those of a notebook do

OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
}
PSI = 8 * (
    7 * 8 + 8 * 24 + (8 * 8 + 8) + (8 * 32 + 32) + (32 * 8 + 8) + 3 * 2 * 8
)  # bytes; tied weight once


def model(seed=0):
    """A GPT with a tied weight, a frozen one and a buffer, float64; others for every seed."""
    torch.manual_seed(seed)
    gpt = GPT(vocabulary=7, context=5, width=8, heads=2, layers=1).double()
    gpt.count(torch.arange(7).repeat_interleave(torch.randint(1, 9, (7,))))
    return gpt


def loss_of(gpt, worker, step):
    """Of data that no other worker and no other step has."""
    tokens = torch.randint(7, (2, 6), generator=torch.Generator().manual_seed(100 * worker + step))
    return mean_loss(gpt(tokens[:, :-1]), tokens[:, 1:])


def state(gpt):
    return {name: value.detach().clone() for name, value in gpt.state_dict().items()}


def train(steps, optimizer="SGD", serve=serve):
    """steps: by rank. (what serve or work returned, the module's state)."""
    rank = dist.get_rank()
    gpt = model(seed=rank)
    if rank == 0:
        told = serve(gpt, OPTIMIZERS[optimizer](gpt.parameters()))
    else:
        told = work(gpt, partial(loss_of, gpt, rank), steps[rank])
    return told, state(gpt)


def one_process(steps, optimizer="SGD"):
    """The same, of one process: a step follows the mean loss of the workers with steps left."""
    gpt = model(seed=0)
    optimizer = OPTIMIZERS[optimizer](gpt.parameters())
    losses = {rank: [] for rank in range(1, len(steps))}
    for step in range(max(steps)):
        optimizer.zero_grad()
        now = {rank: loss_of(gpt, rank, step) for rank in losses if step < steps[rank]}
        (sum(now.values()) / len(now)).backward()
        optimizer.step()
        for rank, loss in now.items():
            losses[rank].append(loss.item())
    return losses, state(gpt)


def same(got, expected):
    assert got.keys() == expected.keys()
    return all(torch.equal(got[name], expected[name]) for name in expected)


# Synchronous


def train_with_each(steps, serve=serve):
    return {optimizer: train(steps, optimizer, serve) for optimizer in OPTIMIZERS}


@pytest.mark.parametrize("world_size", [2, 4])
def test_synchronous_is_one_process(world_size):
    steps = [0] + [5] * (world_size - 1)
    run = launch(train_with_each, steps, world_size=world_size)
    for optimizer in OPTIMIZERS:
        losses, expected = one_process(steps, optimizer)
        for rank in range(world_size):
            told, got = run[rank][optimizer]
            torch.testing.assert_close(got, expected)
            assert same(got, run[0][optimizer][1])
            if rank > 0:
                torch.testing.assert_close(told, losses[rank])


def test_a_worker_with_fewer_steps_no_longer_counts():
    steps = [0, 4, 0, 2]
    run = launch(train, steps, world_size=4)
    losses, expected = one_process(steps)
    torch.testing.assert_close(run[0][1], expected)
    assert same(run[1][1], run[0][1])
    assert [len(told) for told, _ in run[1:]] == steps[1:]
    torch.testing.assert_close(run[3][0], losses[3])
    torch.testing.assert_close(run[3][1], one_process([0, 2, 0, 2])[1])  # what it pulled last
    assert same(run[2][1], state(model(seed=0)))  # pulled at the start, and never again


def mixed():
    """A module of three dtypes."""
    layers = torch.nn.Sequential(
        *(torch.nn.Linear(3, 3, dtype=t) for t in (torch.bfloat16, torch.float32))
    )
    layers[1].bias.requires_grad_(False)
    return layers.append(torch.nn.Linear(3, 3, bias=False, dtype=torch.float16))


def train_mixed():
    torch.manual_seed(dist.get_rank())
    layers = mixed()
    if dist.get_rank() == 0:
        serve(layers, torch.optim.SGD(layers.parameters(), lr=1.0))
    else:
        work(
            layers,
            lambda step: sum((p.float() * dist.get_rank()).sum() for p in layers.parameters()),
            1,
        )
    return state(layers)


def test_dtypes_may_differ():
    run = launch(train_mixed, world_size=3)
    torch.manual_seed(0)
    expected = mixed()
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter -= 1.5 * parameter.requires_grad  # the mean of 1 and 2
    assert all(same(got, state(expected)) for got in run)


# Asynchronous: the server tells who may come next. Nothing is left to time.


def train_in_turns(turns):
    """turns: workers as their gradients come. Of rank 0: (updates, the server's state)."""
    rank, token = dist.get_rank(), torch.zeros(1)
    gpt = model(seed=rank)
    if rank > 0:

        def my_turn(step):
            dist.recv(token, 0, tag=1)
            return loss_of(gpt, rank, step)

        return work(gpt, my_turn, turns.count(rank))

    coming, handles = iter(turns), []

    def call_the_next(*_):
        worker = next(coming, None)
        if worker is not None:
            handles.append(dist.isend(token, worker, tag=1))

    optimizer = OPTIMIZERS["SGD"](gpt.parameters())
    optimizer.register_step_post_hook(call_the_next)
    call_the_next()
    updates = serve_asynchronously(gpt, optimizer)
    for handle in handles:
        handle.wait()
    return updates, state(gpt)


def one_process_in_turns(turns):
    """Each gradient at the weights that its worker saw last."""
    gpt = model(seed=0)
    optimizer = OPTIMIZERS["SGD"](gpt.parameters())
    seen = {worker: copy.deepcopy(gpt) for worker in turns}
    done = dict.fromkeys(turns, 0)
    for worker in turns:
        replica = seen[worker]
        replica.zero_grad()
        loss_of(replica, worker, done[worker]).backward()
        for parameter, theirs in zip(gpt.parameters(), replica.parameters(), strict=True):
            parameter.grad = theirs.grad
        optimizer.step()
        done[worker] += 1
        seen[worker] = copy.deepcopy(gpt)
    return state(gpt)


@pytest.mark.parametrize(
    ("world_size", "turns", "staleness"),
    [
        (3, [1, 1, 1, 2, 2, 1], [0, 0, 0, 3, 0, 2]),
        (4, [1, 2, 3, 1, 2, 3], [0, 1, 2, 2, 2, 2]),
        (4, [3, 3, 3, 1], [0, 0, 0, 3]),  # worker 2 has nothing to do
    ],
)
def test_staleness_is_what_others_did_meanwhile(world_size, turns, staleness):
    updates, got = launch(train_in_turns, turns, world_size=world_size)[0]
    assert updates == [Update(*each) for each in zip(turns, staleness, strict=True)]
    torch.testing.assert_close(got, one_process_in_turns(turns))


def test_staleness_changes_the_result():
    """Otherwise the test above could not tell stale gradients from fresh ones."""
    late, fresh = one_process_in_turns([1, 1, 1, 2]), one_process([0, 3])[1]
    assert not torch.allclose(late["tokens.weight"], fresh["tokens.weight"])
    first, other = one_process_in_turns([1, 2, 1, 2]), one_process_in_turns([1, 1, 2, 2])
    assert not torch.allclose(first["tokens.weight"], other["tokens.weight"])


def test_one_asynchronous_worker_is_one_process():
    server, worker = launch(train_with_each, [0, 5], serve_asynchronously, world_size=2)
    for optimizer in OPTIMIZERS:
        (updates, served), (losses, worked) = server[optimizer], worker[optimizer]
        expected_losses, expected = one_process([0, 5], optimizer)
        assert updates == [Update(worker=1, staleness=0)] * 5
        torch.testing.assert_close(losses, expected_losses[1])
        torch.testing.assert_close(served, expected)
        assert same(worked, served)


def test_asynchronous_workers_end_when_they_like():
    steps = [0, 5, 1, 0]
    run = launch(train, steps, "SGD", serve_asynchronously, world_size=4)
    updates, _ = run[0]
    assert sorted(update.worker for update in updates) == [1, 1, 1, 1, 1, 2]
    assert [len(told) for told, _ in run[1:]] == steps[1:]


# Bytes


def messages(records):
    """(op, peer, bytes) of what comes after the start, which is collectives."""
    ops = [record.op for record in records]
    start = min(
        (number for number, op in enumerate(ops) if op in ("send", "recv")), default=len(ops)
    )
    return [(record.op, record.peer, record.bytes) for record in records[start:]]


@pytest.mark.parametrize("how", [serve, serve_asynchronously])
@pytest.mark.parametrize("steps", [[0, 3], [0, 2, 4]])
def test_bytes_on_the_wire(steps, how):
    run = launch(train, steps, "SGD", how, world_size=len(steps))
    for worker in range(1, len(steps)):
        assert messages(run.wire[worker]) == [("send", 0, PSI), ("recv", 0, PSI)] * steps[worker]
    served = messages(run.wire[0])
    every = [
        (op, worker, PSI)
        for worker in range(1, len(steps))
        for op in ("recv", "send")
        for _ in range(steps[worker])
    ]
    assert sorted(served) == sorted(every)


def test_a_synchronous_step_on_the_servers_wire():
    run = launch(train, [0, 2, 2, 2], world_size=4)
    step = [("recv", worker, PSI) for worker in (1, 2, 3)] + [
        ("send", worker, PSI) for worker in (1, 2, 3)
    ]
    assert messages(run.wire[0]) == 2 * step
    assert sum(nbytes for _, _, nbytes in step) == 2 * 3 * PSI


# Under torchrun, without the launcher

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")

SCRIPT = """
import torch
import torch.distributed as dist
from ddpkit.parameter_server import serve, serve_asynchronously, work

dist.init_process_group("gloo")
rank = dist.get_rank()
weight = torch.nn.Linear(1, 1, bias=False)
with torch.no_grad():
    weight.weight.fill_(16.0 + rank)
for serve_it in (serve, serve_asynchronously):
    if rank == 0:
        told = serve_it(weight, torch.optim.SGD(weight.parameters(), lr=0.25))
    else:
        told = work(weight, lambda step: weight.weight.square().sum(), 2)  # halves the weight
    with open(f"rank.{rank}", "a") as file:
        print(told, weight.weight.item(), file=file)
dist.destroy_process_group()
"""


def test_under_torchrun(tmp_path):
    run_script(tmp_path, SCRIPT, command=TORCHRUN, OMP_NUM_THREADS="1")
    stale = [Update(1, 0), Update(1, 0)]
    assert (tmp_path / "rank.0").read_text() == f"None 4.0\n{stale} 1.0\n"
    assert (tmp_path / "rank.1").read_text() == "[256.0, 64.0] 4.0\n[16.0, 4.0] 1.0\n"


# Failures


def die_on_the_way(how):
    layer = torch.nn.Linear(1, 1, bias=False)

    def die_in_step_1(step):
        if dist.get_rank() == 2 and step == 1:
            raise ArithmeticError("on worker 2")
        return layer.weight.sum()

    if dist.get_rank() == 0:
        how(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    else:
        work(layer, die_in_step_1, 3)


def test_a_worker_that_dies_is_named():
    with pytest.raises(RankError, match=r"^rank 2 raised ArithmeticError: on worker 2") as caught:
        launch(die_on_the_way, serve, world_size=3)
    assert caught.value.rank == 2


def try_everything(case):
    """What the ValueError of this rank says, or None."""
    rank, gpt = dist.get_rank(), model()
    serving = {"two servers": rank < 2, "no server": False}.get(case, rank == 0)
    if case == "different" and rank == 1:
        gpt = GPT(vocabulary=9, context=5, width=8, heads=2, layers=1).double()
    try:
        if serving:
            serve(gpt, OPTIMIZERS["SGD"](gpt.parameters()))
        else:
            work(gpt, partial(loss_of, gpt, rank), -3 if case == "negative" and rank == 1 else 0)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("case", "world_size", "says"),
    [
        ("alone", 1, ("expected a server and a worker or more", "got 1 rank", "start 2 or more")),
        (
            "two servers",
            3,
            ("rank 1 called serve", "expected work", "Rank 0 serves, all others work"),
        ),
        ("no server", 2, ("rank 0 called work", "expected serve")),
        ("negative", 3, ("rank 1 called work with steps=-3", "expected 0 or more")),
        ("different", 2, ("expected the same module", "tokens.weight", "rank 1")),
    ],
)
def test_mistakes_are_named_on_every_rank(case, world_size, says):
    run = launch(try_everything, case, world_size=world_size)
    assert run[0] is not None
    assert set(run) == {run[0]}
    assert [part for part in says if part not in run[0]] == []


def forget_a_weight():
    layers = torch.nn.ModuleDict(
        {"used": torch.nn.Linear(1, 1, bias=False), "not": torch.nn.Linear(1, 1)}
    )
    if dist.get_rank() == 0:
        serve(layers, torch.optim.SGD(layers.parameters(), lr=0.1))
    else:
        work(layers, lambda step: layers["used"].weight.sum(), 1)


def test_a_weight_without_gradient_is_named():
    with pytest.raises(RankError) as caught:
        launch(forget_a_weight, world_size=2)
    assert "ValueError: rank 1 has no gradient for not.weight, not.bias after backward" in str(
        caught.value
    )
