"""ddpkit.parameter_server against one process that does it all; and the server's wire."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from training_cases import (
    ADAMW,
    HALF_THE_DIGITS,
    SGD,
    Routes,
    gpt_batch,
    gpt_loss,
    sent_by,
    small_gpt,
    trained_of,
    weights_of,
)

from ddpkit import RankError, launch
from ddpkit.parameter_server import Update, serve, serve_asynchronously, work

STEPS = {2: ([0, 3],), 3: ([0, 2, 2],), 4: ([0, 2, 2, 2], [0, 3, 0, 1])}  # of each rank, by world


def loss_of(gpt, worker, step):
    """Of data that no other worker and no other step has."""
    return gpt_loss(gpt, [gpt_batch(step, 0, worker)])


def train(steps, make, serve=serve):
    """What serve or work returned, and the weights."""
    rank = dist.get_rank()
    gpt = small_gpt(seed=rank)
    if rank == 0:
        told = serve(gpt, make(gpt.parameters()))
    else:
        told = work(gpt, partial(loss_of, gpt, rank), steps[rank])
    return told, weights_of(gpt)


def one_process(steps, make):
    """Each worker's losses, and the weights before the first step and after each.

    A step follows the mean loss of the workers that have steps left.
    """
    gpt = small_gpt()
    optimizer = make(gpt.parameters())
    losses, weights = {rank: [] for rank in range(1, len(steps))}, [weights_of(gpt)]
    for step in range(max(steps)):
        optimizer.zero_grad()
        now = {rank: loss_of(gpt, rank, step) for rank in losses if step < steps[rank]}
        (sum(now.values()) / len(now)).backward()
        optimizer.step()
        weights.append(weights_of(gpt))
        for rank, loss in now.items():
            losses[rank].append(loss.item())
    return losses, weights


@on_ranks(2, 3, 4)
def test_synchronous_is_one_process(check):
    """Who has made all its steps no longer counts, and keeps what it pulled last."""
    rank = dist.get_rank()
    for steps in STEPS[dist.get_world_size()]:
        for make in (SGD, ADAMW):
            losses, weights = one_process(steps, make)
            told, got = train(steps, make)
            check.close(got, weights[steps[rank] if rank else -1], HALF_THE_DIGITS, steps, make)
            if rank > 0:
                told, expected = torch.tensor([told, losses[rank]], dtype=torch.float64)
                check.close(told, expected, HALF_THE_DIGITS, steps, make, "losses")


# Asynchronous: the server tells who may come next. Nothing is left to time.


def train_in_turns(turns, make):
    """turns: workers as their gradients come. What serve or work returned, and the weights."""
    rank, token = dist.get_rank(), torch.zeros(1)
    gpt = small_gpt(seed=rank)
    if rank > 0:

        def my_turn(step):
            dist.recv(token, 0, tag=1)
            return loss_of(gpt, rank, step)

        return work(gpt, my_turn, turns.count(rank)), weights_of(gpt)

    coming, handles = iter(turns), []

    def call_the_next(*_):
        worker = next(coming, None)
        if worker is not None:
            handles.append(dist.isend(token, worker, tag=1))

    optimizer = make(gpt.parameters())
    optimizer.register_step_post_hook(call_the_next)
    call_the_next()
    updates = serve_asynchronously(gpt, optimizer)
    for handle in handles:
        handle.wait()
    return updates, weights_of(gpt)


def one_process_in_turns(turns, make):
    """Each gradient at the weights that its worker saw last. Those of each rank in the end."""
    gpt = small_gpt()
    optimizer = make(gpt.parameters())
    seen = [copy.deepcopy(gpt) for _ in range(dist.get_world_size())]
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
    seen[0] = gpt
    return [weights_of(each) for each in seen]


TURNS = {  # by world: workers in turn, and how stale each gradient is
    2: (([1, 1, 1], [0, 0, 0]),),
    3: (([1, 1, 1, 2, 2, 1], [0, 0, 0, 3, 0, 2]),),
    # In the second, worker 2 has nothing to do.
    4: (([1, 2, 3, 1, 2, 3], [0, 1, 2, 2, 2, 2]), ([3, 3, 3, 1], [0, 0, 0, 3])),
}


@on_ranks(2, 3, 4)
def test_staleness_is_what_others_did_meanwhile(check):
    rank = dist.get_rank()
    for turns, staleness in TURNS[dist.get_world_size()]:
        for make in (SGD, ADAMW):
            told, got = train_in_turns(turns, make)
            expected = one_process_in_turns(turns, make)[rank]
            check.close(got, expected, HALF_THE_DIGITS, turns, make)
            if rank == 0:
                updates = [Update(*each) for each in zip(turns, staleness, strict=True)]
                check.same(told, updates, turns)
            else:
                check.same(len(told), turns.count(rank), turns, "losses")


# Bytes


@on_ranks(2, 3, 4)
def test_bytes_on_the_wire(check):
    rank = dist.get_rank()
    nbytes = sum(parameter.nbytes for parameter in trained_of(small_gpt()).values())
    for steps in STEPS[dist.get_world_size()]:
        served = []  # by the synchronous server, in its order
        for step in range(max(steps)):
            busy = [worker for worker, count in enumerate(steps) if step < count]
            served += [(op, worker, nbytes) for op in ("recv", "send") for worker in busy]
        worked = [("send", 0, nbytes), ("recv", 0, nbytes)] * steps[rank]
        for how in (serve, serve_asynchronously):
            records = sent_by(partial(train, steps, SGD, how))
            got = [(r.op, r.peer, r.bytes) for r in records if r.op in ("send", "recv")]
            if rank == 0 and how is serve_asynchronously:
                check.same(sorted(got), sorted(served), steps, how)
            else:
                check.same(got, worked if rank else served, steps, how)


# Mistakes

MISTAKES = {  # by world: what each rank does, and what all are told
    1: [("serve", "expected a server and a worker or more, got 1 rank: start 2 or more")],
    2: [
        ("work work", "rank 0 called work, expected serve"),
        ("serve other", "expected the same module on every rank, got tokens.weight"),
    ],
    3: [("serve serve work", "rank 1 called serve, expected work. Rank 0 serves, all others work")],
}


@on_ranks(1, 2, 3)
def test_mistakes_are_named_on_every_rank(check):
    for doing, says in MISTAKES[dist.get_world_size()]:
        mine = doing.split()[dist.get_rank()]
        gpt = small_gpt(vocabulary=13 if mine == "other" else 11)
        if mine == "serve":
            check.refused(serve, gpt, SGD(gpt.parameters()), says=says)
        else:
            check.refused(work, gpt, partial(loss_of, gpt, 1), 0, says=says)


def forget_a_weight():
    module = Routes()
    if dist.get_rank() == 0:
        serve(module, SGD(module.parameters()))
    else:
        work(module, lambda step: module.a.weight.sum() + module.c.weight.sum(), 1)


def test_a_weight_without_gradient_is_named():
    says = r"rank 1 has no gradient for a.bias, b.weight, b.bias after backward"
    with pytest.raises(RankError, match=says):
        launch(forget_a_weight, world_size=2)
