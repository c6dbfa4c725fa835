"""What recording costs: calls and a training step on the wire, and on a plain group of torch's.

Both in the same processes, in turns. A turn makes many calls in a row, as a training step does, so
that what one of them costs isn't lost in what it takes two ranks to begin together.
"""

import operator
import statistics
from collections.abc import Callable
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ..fast.buckets import BucketedDDP
from ..tools.units import duration
from .interleave import Contest, race, where
from .results import AGAIN, SPEED, Result, Results, report
from .training import Replica, gpt

ROUNDS = 30
CALLS = 100  # in a turn
PLAIN, RECORDED = "plain", "recorded"
CALL_S, STEP = 30e-6, 0.03  # what recording may cost: seconds a call, a part of a step
LEGEND = f"""\
Time: the median. More: than plain, the median round by round; for
plain itself, its second time (A/A). A step is of the small GPT, its
gradients in buckets, with AdamW.
{SPEED}"""
Work = Callable[[], object]


def all_reduces(calls: int, group: ProcessGroup) -> Work:
    x = torch.ones(1)

    def turn():
        for _ in range(calls):
            dist.all_reduce(x, group=group)

    return turn


def messages(calls: int, group: ProcessGroup) -> Work:
    """There and back, each a call on both ranks."""
    x, rank = torch.ones(1), dist.get_rank()

    def turn():
        for number in range(calls):
            if number % 2 == rank:
                dist.send(x, 1 - rank, group=group)
            else:
                dist.recv(x, 1 - rank, group=group)

    return turn


def steps(calls: int, group: ProcessGroup) -> Work:
    adamw = partial(torch.optim.AdamW, fused=True)
    replica = Replica(gpt, partial(BucketedDDP, group=group), adamw)

    def turn():
        for _ in range(calls):
            replica.step()

    return turn


CASES = {  # what it is: how to make a turn of it, how many are in a turn
    "all_reduce of a number": (all_reduces, CALLS),
    "send or recv of a number": (messages, CALLS),
    "training step": (steps, 1),
}


def contest(make: Callable[[ProcessGroup], Work], plain: ProcessGroup) -> Contest:
    groups = {PLAIN: plain, RECORDED: dist.group.WORLD, PLAIN + AGAIN: plain}
    return Contest({name: make(group) for name, group in groups.items()})


def measure(what: str, make: Callable, calls: int, rounds: int = ROUNDS) -> list[Result]:
    """Time a case, by 2 ranks, on Gloo. make: with `calls` and a group, makes a turn of them."""
    make_contest = partial(contest, partial(make, calls))
    return together(what, calls, race(make_contest, rounds, world_size=2)[0])


def together(what: str, calls: int, seconds: dict[str, tuple[float, ...]]) -> list[Result]:
    """The results of one case. seconds: {variant: of each turn}."""
    each = {}
    for name, turns in seconds.items():
        each[name] = tuple(s / calls for s in turns)
    plain_s = statistics.median(each[PLAIN])
    budget_s = CALL_S if calls > 1 else STEP * plain_s
    found = []
    for name, its in each.items():
        other = each[PLAIN + AGAIN] if name == PLAIN else its
        more_s = statistics.median(map(operator.sub, other, each[PLAIN]))
        columns = {
            "Time": duration(statistics.median(its)),
            "More": duration(more_s),
            "At most": duration(budget_s),
            "Within?": "yes" if more_s <= budget_s else "NO",
        }
        found.append(Result(what, name, 2, 0, its, columns=columns))
    return found


def main(name: str):
    results = (measure(what, *case) for what, case in CASES.items())
    report(name, where(), Results(chain.from_iterable(results), LEGEND))
