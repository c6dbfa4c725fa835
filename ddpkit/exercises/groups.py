"""Checker of notebook 10's groups: dist.new_group is a call of all ranks, in one order."""

import torch
import torch.distributed as dist

from .checker import Exercise, Mistake, Trial, mistakes

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these


def my_group(stages):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for stage in range(stages):
        group = dist.new_group(list(range(stage, world_size, stages)))
        if rank % stages == stage:
            mine = group
    return mine


def as_found(stages):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return dist.new_group(list(range(rank % stages, world_size, stages)))


def _run(answer, stages):
    group = answer(stages)
    try:
        ranks = dist.get_process_group_ranks(group)
    except (AttributeError, KeyError, TypeError, ValueError):
        return {"members": f"{group!r}, which is no group that this rank is in"}
    numbers = torch.tensor([10 ** dist.get_rank()])
    dist.all_reduce(numbers, group=group)  # the group must also work
    dist.barrier()
    return {"members": ranks, "sum": numbers.item()}


def _trials():
    for world_size, stages in ((4, 2), (4, 1), (6, 3), (6, 2), (3, 3)):
        expected = []
        for rank in range(world_size):
            ranks = list(range(rank % stages, world_size, stages))
            expected.append({"members": ranks, "sum": sum(10**member for member in ranks)})
        yield Trial(world_size, _run, (stages,), expected, what=f"{stages} stages")


RULE = (
    "dist.new_group is a call of all ranks, members or not: each makes all groups, in one order, "
    "and keeps its own. Made by the members alone, two groups take each other's place."
)
my_group = Exercise(
    reference=my_group,
    trials=_trials,
    hints={
        "start": "A new group gets the next number. Which number has rank 0's group here, and "
        "which has rank 1's?",
        "values": "for stage in range(stages): group = dist.new_group([...]); keep the one that "
        "this rank is in.",
        "hang": RULE,
        "error": RULE,
    },
    praise="on meshes from 4 × 1 to 2 × 3: every rank made all groups, and kept its own.",
    note="In PyTorch: init_device_mesh, which makes them all.",
    says={
        "members": "rank {rank}'s group has {got}, expected ranks {expected}: rank r has stage "
        "r % stages.",
        "sum": "an all_reduce in rank {rank}'s group gave {got}, expected {expected}: each digit "
        "is a rank. Who joined it?",
    },
    mistakes=[
        Mistake.written(as_found, RULE),
        *mistakes("""
neighbours: list(range(stage, world_size, stages)) → [*range(stage * stages, (stage + 1) * stages)]
    Those are neighbours, which have different stages: rank r has stage r % stages.
the_last: if rank % stages == stage: → if True:
    Keep the group that this rank is in: others are no groups for it.
of_two: for stage in range(stages): → for stage in range(2):
    Make as many groups as there are stages.
"""),
    ],
)
