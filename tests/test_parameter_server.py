"""ddpkit.parameter_server: the asynchronous server against one process that does it all.

The synchronous one is its exercise's.
"""

import copy
from functools import partial

import torch
import torch.distributed as dist
import training_cases as cases
from on_ranks import on_ranks

from ddpkit.parameter_server import Update, push_and_pull, serve, serve_asynchronously

STEPS = 2


def loss_of(gpt, worker, step):
    """Of data that no other worker and no other step has."""
    return cases.gpt_loss(gpt, [cases.gpt_batch(step, 0, worker)])


def train(make, steps=STEPS, before=lambda step: None):
    """What the server returned, and the weights."""
    rank, gpt = dist.get_rank(), cases.small_gpt()
    if rank == 0:
        told = serve_asynchronously(gpt, make(gpt.parameters()), steps)
        return told, cases.weights_of(gpt)
    for step in range(steps):
        before(step)
        gpt.zero_grad()
        loss_of(gpt, rank, step).backward()
        push_and_pull(gpt)
    return None, cases.weights_of(gpt)


# Asynchronous: the server tells who may come next. Nothing is left to time.


def train_in_turns(turns, make):
    """turns: workers as their gradients come. What serve returned, and the weights."""
    rank, token = dist.get_rank(), torch.zeros(1)
    steps = turns.count(1)
    if rank > 0:
        return train(make, steps=steps, before=lambda step: dist.recv(token, 0, tag=1))

    coming, handles = iter(turns), []

    def call_the_next(*_):
        worker = next(coming, None)
        if worker is not None:
            handles.append(dist.isend(token, worker, tag=1))

    def make_calling(parameters):
        optimizer = make(parameters)
        optimizer.register_step_post_hook(call_the_next)
        call_the_next()
        return optimizer

    told = train(make_calling, steps)
    for handle in handles:
        handle.wait()
    return told


def one_process_in_turns(turns, make):
    """Each gradient at the weights that its worker saw last. Those of each rank in the end."""
    gpt = cases.small_gpt()
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
    return [cases.weights_of(each) for each in seen]


TURNS = {  # by world: workers in turn, and how stale each gradient is
    2: ([1, 1, 1], [0, 0, 0]),
    3: ([1, 1, 2, 2, 1, 2], [0, 0, 2, 0, 2, 1]),
    4: ([1, 2, 3, 3, 1, 2], [0, 1, 2, 0, 3, 3]),
}


@on_ranks(2, 3, 4)
def test_staleness_is_what_others_did_meanwhile(check, rank):
    turns, staleness = TURNS[dist.get_world_size()]
    for make in (cases.SGD, cases.ADAMW):
        told, got = train_in_turns(turns, make)
        check.close(got, one_process_in_turns(turns, make)[rank], cases.HALF_THE_DIGITS, make)
        if rank == 0:
            check.same(told, [Update(*each) for each in zip(turns, staleness, strict=True)])


# Bytes


@on_ranks(2, 3, 4)
def test_bytes_on_the_wire(check, rank, world_size):
    """A step: from each worker and back to it."""
    nbytes = sum(parameter.nbytes for parameter in cases.trained_of(cases.small_gpt()).values())
    records = cases.sent_by(partial(train, cases.SGD))
    others = [0] if rank else range(1, world_size)
    expected = [(op, other, nbytes) for op in ("recv", "send") for other in others] * STEPS
    check.same(sorted((r.op, r.peer, r.bytes) for r in records), sorted(expected))


@on_ranks(1)
def test_a_server_needs_workers(check):
    gpt = cases.small_gpt()
    check.refused(
        serve, gpt, cases.SGD(gpt.parameters()), 1, says="expected workers to be 1 or more"
    )
