"""Checkers of notebook 02's two published rings: one that adds nothing, one that hangs on NCCL.

Whole tensors go round in both. The second is right on Gloo, so its calls are gone through again as
NCCL would carry them: a rank's messages one after the other, each once both sides have come to it.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from ddpkit.runtime.launch import Run
from ddpkit.runtime.recorder import recorder

from .checker import Exercise, Mistake, Trial, check_wire, mistakes, rank_1_comes_last, read_sum

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these

NUMEL = 3


def published_ring(send, recv):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    going, coming = send.clone(), torch.zeros_like(send)
    total = send.clone()
    for _ in range(world_size - 1):
        work = dist.isend(going, (rank + 1) % world_size)
        dist.recv(coming, (rank - 1) % world_size)
        total += coming
        work.wait()
        going, coming = coming, going
    recv.copy_(total)


def whole_ring(x):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    going = x.clone()
    for _ in range(world_size - 1):
        coming = torch.empty_like(x)
        send = dist.P2POp(dist.isend, going, (rank + 1) % world_size)
        receive = dist.P2POp(dist.irecv, coming, (rank - 1) % world_size)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
        x += coming
        going = coming


def _run_published(answer):
    send = torch.full((NUMEL,), 10 ** dist.get_rank())
    recv = torch.zeros_like(send)
    rank_1_comes_last()
    answer(send, recv)
    return {"recv": recv.tolist()}


def _run_whole(answer):
    x = torch.full((NUMEL,), 10 ** dist.get_rank())
    with batches() as starts:
        answer(x)
    messages = []  # in steps: those of a batch go together
    for number, record in enumerate(recorder().records):
        if record.op not in ("send", "recv"):  # new_group
            continue
        if number not in starts or not messages:
            messages.append([])
        messages[-1].append((record.op, record.peer))
    return {"x": x.tolist(), "messages": messages}


@contextlib.contextmanager
def batches() -> Iterator[set[int]]:
    """Yield a set that collects the index of each record in one batch with the record before it."""
    batch, joined = dist.batch_isend_irecv, set()

    def noted(ops):
        first = len(recorder().records)
        works = batch(ops)
        joined.update(range(first + 1, len(recorder().records)))
        return works

    dist.batch_isend_irecv = noted
    try:
        yield joined
    finally:
        dist.batch_isend_irecv = batch


def rendezvous(steps: list[list[list[tuple[str, int]]]]) -> str | None:
    """Carry each rank's messages in order, each once both sides are there; say who waits for ever.

    steps: of each rank, lists of (op, peer) that go together.
    """
    left = copy.deepcopy(steps)
    moved = True
    while moved:
        moved = False
        for rank, of_rank in enumerate(left):
            for op, peer in list(of_rank[0]) if of_rank else []:
                other = "recv" if op == "send" else "send"
                if left[peer] and (other, rank) in left[peer][0]:
                    left[peer][0].remove((other, rank))
                    of_rank[0].remove((op, peer))
                    moved = True
        for of_rank in left:
            if of_rank and not of_rank[0]:
                of_rank.pop(0)
                moved = True
    stuck = [(rank, of_rank[0][0]) for rank, of_rank in enumerate(left) if of_rank]
    return (
        "; ".join(f"rank {rank} is in {op} with rank {peer}" for rank, (op, peer) in stuck) or None
    )


def _trials(program: Callable, result: str, worlds=(2, 3, 4, 1)):
    for world_size in worlds:
        total = sum(10**rank for rank in range(world_size))
        right = {result: [total] * NUMEL}
        nbytes = world_size * (world_size - 1) * NUMEL * 8

        def expected(run: Run, right=right) -> list[dict]:
            return [got | right for got in run]  # any messages

        yield Trial(world_size, program, (), expected, nbytes, "rank r brings 10ʳ")


def _explain(trial: Trial, rank: int, expected: dict, got: dict) -> str | None:
    value = next(iter(got.values()))[0]
    told = read_sum(value, trial.world_size)
    return f"Read the digits: {told}." if told and value else None


def zeros_go_round(send, recv):
    recv.copy_(send)
    for _ in range(dist.get_world_size() - 1):
        work = dist.isend(torch.zeros_like(send), (dist.get_rank() + 1) % dist.get_world_size())
        dist.recv(torch.zeros_like(send), (dist.get_rank() - 1) % dist.get_world_size())
        work.wait()


published_ring = Exercise(
    reference=published_ring,
    plays=True,
    writes=("recv",),
    trials=lambda: _trials(_run_published, "recv"),
    hints={
        "start": "Follow one number: which tensor leaves rank 0 in the first hop, and what is in "
        "it? And which tensor has what came?",
        "values": "Two slips: `going` must begin with this rank's numbers, and what is added is "
        "what came, not `recv`.",
        "hang": "In each hop a rank sends once to the right, and receives once from the left.",
    },
    praise="two slips mended. PyTorch's own tutorial had both until 2020, and it hung nowhere.",
    note="Two words, mended. It sends W/2 times as much as your ring in chunks.",
    wire=check_wire,
    explain=_explain,
    mistakes=[
        Mistake(
            "as_found",
            "Each rank has only what it brought. There are two slips, and mending one alone shows "
            "nothing: what is sent, and what is added?",
            answer=zeros_go_round,
        ),
        *mistakes("""
adds_what_it_sent: total += coming → total += going
    The sum holds what this rank sent, not what came: add `coming`.
never_passes_on: going, coming = coming, going → pass
    In every hop a rank sends its own numbers again: pass on what came.
without_its_own: total = send.clone() → total = torch.zeros_like(send)
    A rank's own numbers are missing: nobody sends them back to it.
"""),
    ],
)


def _waits_for_ever(trial: Trial, run: Run) -> str | None:
    """Explain a wrong wire, or which ranks would wait for ever on NCCL; None: all is right."""
    if wrong := check_wire(trial, run):
        return wrong
    stuck = rendezvous([got["messages"] for got in run])
    if not stuck:
        return None
    return (
        f"right here, on Gloo. NCCL carries a rank's messages one after the other, each once both "
        f"sides have come, and would wait for ever: {stuck}."
    )


whole_ring = Exercise(
    reference=whole_ring,
    plays=True,
    writes=("x",),
    trials=lambda: _trials(_run_whole, "x"),
    hints={
        "start": "Draw two ranks. Each begins to send. On NCCL a message is carried when both "
        "sides have come to it: who comes to receive?",
        "wire": "dist.P2POp(dist.isend, going, right) and dist.P2POp(dist.irecv, coming, left), "
        "both in one dist.batch_isend_irecv; then wait for what it returns. Or let even ranks send "
        "first and odd ones receive first.",
        "values": "What goes on in the next hop is what came in this one.",
    },
    praise="send and receive go together, so no rank waits for ever, not on NCCL either.",
    note="One batch for both. ddpkit.ring.send_right_receive_left is this hop.",
    wire=_waits_for_ever,
    explain=_explain,
    mistakes=mistakes("""
as_found: for work in dist.batch_isend_irecv([send, receive]): → dist.isend(going, send.peer).wait()
    ⏎for work in [dist.irecv(coming, receive.peer)]:
    A send that nobody receives yet is never over: begin both in one batch, then wait.
receives_first: dist.batch_isend_irecv([send, receive]): → [
    ⏎        dist.irecv(coming, receive.peer), dist.isend(going, send.peer)]:
    All ranks receive first now: nobody comes to send. Put both in one batch.
two_batches: dist.batch_isend_irecv([send, receive]): → (
    ⏎        dist.batch_isend_irecv([send]) + dist.batch_isend_irecv([receive])):
    Two batches go one after the other, as single calls do: both belong in one.
sends_what_it_brought: going = coming → pass
    In every hop a rank sends its own numbers again: pass on what came.
"""),
)
