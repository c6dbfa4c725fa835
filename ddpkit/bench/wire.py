"""The cost of recording: calls and a training step on the wire, and on a plain group of torch's.

The wire is the process group that records every call. Both groups take turns in the same
processes. A turn makes many calls in a row, as a training step does, so that the cost of one isn't
lost in the time that two ranks need to begin together.

The budget of a call is CPU time, of the thread that makes it. Its wall time is for comparison: if
ranks and Gloo's threads share cores, 30 µs of computing before a call, of whatever kind, may add
more or less than 30 µs to it. The variant `busy` shows how much: it computes, and doesn't record.
"""

import operator
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ..fast.buckets import BucketedDDP
from ..tools.units import duration
from .interleave import WARM_UP, Contest, race
from .results import AGAIN, SPEED, Result, Results, report, results_of
from .training import Replica, gpt

ROUNDS = 30
CALLS = 100  # in a turn
PLAIN, RECORDED, BUSY = "plain", "recorded", "busy"
BUSY_S = 30e-6  # seconds of computing before a call
CALL_S, STEP = 60e-6, 0.03  # recording's budget: CPU seconds a call, a part of a step's time
LEGEND = f"""\
Time, CPU: medians; CPU is the calling thread's, the ranks' mean. More:
than plain, the median round by round; for plain itself, its second time
(A/A). Busy: plain, with 30 µs of computing before each call. A step is
of the small GPT, its gradients in buckets, with AdamW. Within: 60 µs of
CPU more a call, or 3 % of a step's time.
{SPEED}"""
Work = Callable[[], object]
Turns = dict[str, tuple[float, ...]]


def all_reduces(calls: int, group: ProcessGroup, busy_s: float = 0.0) -> Work:
    x = torch.ones(1)

    def turn():
        for _ in range(calls):
            compute(busy_s)
            dist.all_reduce(x, group=group)

    return turn


def messages(calls: int, group: ProcessGroup, busy_s: float = 0.0) -> Work:
    """Make a turn of `calls` messages, to and fro. busy_s: seconds of computing before each."""
    x, rank = torch.ones(1), dist.get_rank()

    def turn():
        for number in range(calls):
            compute(busy_s)
            if number % 2 == rank:
                dist.send(x, 1 - rank, group=group)
            else:
                dist.recv(x, 1 - rank, group=group)

    return turn


def compute(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def training_steps(calls: int, group: ProcessGroup) -> Work:
    adamw = partial(torch.optim.AdamW, fused=True)
    replica = Replica(gpt, partial(BucketedDDP, group=group), adamw)

    def turn():
        for _ in range(calls):
            replica.step()

    return turn


CASES = {  # {name: (function that makes a turn, number of calls in it)}
    "all_reduce of a number": (all_reduces, CALLS),
    "send or recv of a number": (messages, CALLS),
    "training step": (training_steps, 1),
}


def contest(make: Callable[..., Work], calls: int, plain: ProcessGroup) -> Contest:
    groups = {PLAIN: plain, RECORDED: dist.group.WORLD, PLAIN + AGAIN: plain}
    turns = {name: make(calls, group) for name, group in groups.items()}
    if calls > 1:
        turns[BUSY] = make(calls, plain, BUSY_S)
    cpu = {name: [] for name in turns}  # seconds of each turn

    def timed(name: str) -> Work:
        def turn():
            begun = time.thread_time()
            turns[name]()
            cpu[name].append(time.thread_time() - begun)

        return turn

    return Contest({name: timed(name) for name in turns}, found=lambda: cpu)


def measure(what: str, make: Callable, calls: int, rounds: int = ROUNDS) -> list[Result]:
    """Time a case, by 2 ranks, on Gloo. make: a function as in `CASES`, makes a turn of `calls`."""
    seconds, by_rank = race(partial(contest, make, calls), rounds, 2)
    cpu = {}
    for name, wall in seconds.items():
        seconds[name] = tuple(s / calls for s in wall)
        turns = zip(*(found[name][WARM_UP:] for found in by_rank), strict=True)
        cpu[name] = tuple(statistics.fmean(turn) / calls for turn in turns)
    return together(what, calls, seconds, cpu)


def together(what: str, calls: int, seconds: Turns, cpu: Turns) -> list[Result]:
    """Make the results of one case. seconds, cpu: {variant: a call's seconds, in each turn}."""
    found = results_of(what, seconds, 2)
    for result in found:
        name = result.variant
        more_s, more_cpu_s = more(seconds, name), more(cpu, name)
        within = more_cpu_s <= CALL_S
        if calls == 1:
            within = more_s <= STEP * statistics.median(seconds[PLAIN])
        result.columns["More"] = duration(more_s)
        result.columns["CPU"] = duration(statistics.median(cpu[name]))
        result.columns["More CPU"] = duration(more_cpu_s)
        result.columns["Within?"] = "" if name == BUSY else "yes" if within else "NO"
    return found


def more(turns: Turns, name: str) -> float:
    """Return the median, over turns, of `name` less plain, in s; for plain, of its second time."""
    its = turns[PLAIN + AGAIN if name == PLAIN else name]
    return statistics.median(map(operator.sub, its, turns[PLAIN]))


def main(name: str):
    results = (measure(what, *case) for what, case in CASES.items())
    report(name, Results(chain.from_iterable(results), LEGEND))
