"""Pipeline schedules as data: the actions of each rank, in order.

`dry_run` checks and simulates them before a process starts, `engine` runs them.
The layers of a model are cut into stages, the batch into micro-batches. An action is a word in
PyTorch's notation, stage, kind and micro-batch: "1F0" is stage 1's forward of micro-batch 0, "1B0"
its backward. A backward may be done in two parts: "1I0", the gradient of the stage's input, for
which the stage before waits, and "1W0", those of its weights, for which none does. A schedule is a
list of actions for each rank: [["0F0", "0B0"], ["1F0", "1B0"]].

    schedule                            idle ticks of each rank     micro-batches held by stage s
    gpipe(p, m)                         (p-1)(F+B)                  m
    one_f_one_b(p, m)                   (p-1)(F+B)                  p-s
    interleaved(p, m, v)                (p-1)(F+B), of stages       more than p-s, of stages
      p divides m                       1/v as long                 1/v as large
    zero_bubble(p, m)                   (p-1)(F+B-2W)               p

p stages (interleaved: ranks), m micro-batches, v stages a rank. F, B, W: ticks of a forward, a
whole backward, its weight part. All hold from m = p on; F+B-2W needs a W of at most F and B-W.

PyTorch's ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B and ScheduleInterleavedZeroBubble, in
`torch.distributed.pipelining`. Notebook 10.
"""

import math
import re
from itertools import pairwise

from ..tools.checks import check_counts

Schedule = list[list[str]]


# The schedules


def gpipe(stages: int, micro_batches: int) -> Schedule:
    """Return the schedule of all forwards, then all backwards. Huang et al. 2019. Notebook 10."""
    check_counts(stages=stages, micro_batches=micro_batches)
    schedule = []
    for stage in range(stages):
        schedule.append(each(stage, "F", micro_batches) + each(stage, "B", micro_batches))
    return schedule


def one_f_one_b(stages: int, micro_batches: int) -> Schedule:
    """Return the schedule of a few forwards, then one forward and one backward in turn.

    GPipe's idle time, with fewer micro-batches held. Narayanan et al. 2019 and 2021, section 2.2.
    Notebook 10.
    """
    check_counts(stages=stages, micro_batches=micro_batches)
    schedule = []
    for stage in range(stages):
        # The later the stage, the sooner its first gradient: the last needs no forward ahead.
        forwards = each(stage, "F", micro_batches)
        backwards = each(stage, "B", micro_batches)
        schedule.append(alternate(forwards, backwards, ahead=stages - 1 - stage))
    return schedule


def interleaved(ranks: int, micro_batches: int, stages_per_rank: int = 2) -> Schedule:
    """Return 1F1B with several thin stages a rank, so that the pipeline fills sooner.

    Rank r has the stages r, r + ranks, ... Micro-batches go in groups of `ranks`: a rank takes a
    group through its first stage, then through its second. If `ranks` doesn't divide them, some
    groups are larger. Narayanan et al. 2021, section 2.2. Notebook 10.
    """
    check_counts(ranks=ranks, micro_batches=micro_batches, stages_per_rank=stages_per_rank)
    groups = max(1, micro_batches // ranks)
    ends = [micro_batches * (group + 1) // groups for group in range(groups)]
    largest = -(-micro_batches // groups)  # of the groups, in micro-batches
    schedule = []
    for rank in range(ranks):
        stages = range(rank, ranks * stages_per_rank, ranks)
        forwards = []
        backwards = []
        # Group after group: forwards through the stages upwards, backwards downwards.
        for first, end in pairwise([0, *ends]):
            for stage in stages:
                forwards += each(stage, "F", end, first)
            for stage in reversed(stages):
                backwards += each(stage, "B", end, first)
        # Forwards to do before the first gradient is back; two ticks for each rank to the right.
        ahead = (stages_per_rank - 1) * largest + 2 * (ranks - 1 - rank)
        schedule.append(alternate(forwards, backwards, ahead))
    return schedule


def zero_bubble(stages: int, micro_batches: int) -> Schedule:
    """Return 1F1B with weight parts delayed until a stage would be idle.

    ZB1P, "ZB-H1" in Qi et al. 2023. In stage s, weight part k comes right after input part k + s;
    the last s weight parts run while the last gradients travel to stage 0. Notebook 10.
    """
    check_counts(stages=stages, micro_batches=micro_batches)
    schedule = []
    for stage in range(stages):
        forwards = each(stage, "F", micro_batches)
        inputs = each(stage, "I", micro_batches)
        actions = []
        done = 0  # weight parts so far
        for action in alternate(forwards, inputs, ahead=stages - 1 - stage):
            actions.append(action)
            if action in inputs[stage:]:  # the first `stage` input parts have none yet
                actions.append(f"{stage}W{done}")
                done += 1
        # The weight parts that are left fill the time in which no gradient arrives.
        schedule.append(actions + each(stage, "W", micro_batches, done))
    return schedule


def each(stage: int, kind: str, end: int, first: int = 0) -> list[str]:
    """List the actions of one kind: each(0, "F", 3) is ["0F0", "0F1", "0F2"]."""
    return [f"{stage}{kind}{micro_batch}" for micro_batch in range(first, end)]


def alternate(forwards: list[str], backwards: list[str], ahead: int) -> list[str]:
    """Return `ahead` forwards, then a forward and a backward in turn, then the other backwards."""
    actions = forwards[:ahead]  # warm-up; then the steady state, then the rest
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        actions += [forward, backward]
    return actions + backwards[len(forwards[ahead:]) :]


def parse(action: str) -> tuple[int, str, int]:
    """Split an action: parse("1F0") is (1, "F", 0). ValueError: it isn't one."""
    found = re.fullmatch(r"(\d+)([FBIW])(\d+)", str(action))
    if found is None:
        form = 'a stage, one of F, B, I, W, and a micro-batch, as in "0F3"'
        raise ValueError(f"expected an action to be {form}, got {str(action)!r}")
    stage, kind, micro_batch = found.groups()
    return int(stage), kind, int(micro_batch)


def fewest_ticks(stages: int, micro_batches: int, most: int) -> int:
    """Return a lower bound on any schedule's ticks; F, I and W take one each, a rank has one stage.

    most: the micro-batches that a stage may hold at a time. Notebook 10.
    """
    busy = 3 * micro_batches
    # The last stage begins p - 1 ticks late.
    late = stages - 1 + busy
    # Stage 0 has done at most `most` forwards when its first gradient comes, at tick 2p - 1.
    waits = 2 * stages - 1 + busy - most
    # It holds a micro-batch from its forward until its weight part, for 2p + 1 ticks.
    holds = math.ceil(micro_batches * (2 * stages + 1) / most)
    return max(late, waits, holds)
