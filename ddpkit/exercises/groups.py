"""Checker of notebook 10's groups: dist.new_group is a call of all ranks, in one order."""

import contextlib
import itertools
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ddpkit.tools.units import name_ranks

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


ALIKE = {"calls": "alike"}


class _Differ(Exception):
    """Ranks make different groups in the same call."""


PATIENCE = timedelta(seconds=3)  # with ranks that may make fewer groups
_numbers = itertools.count()  # of the calls of this process


@contextlib.contextmanager
def _compared() -> Iterator[None]:
    """Raise _Differ, while inside, where ranks' n-th calls of new_group differ.

    Otherwise luck decides which ranks find each other. The ranks' lists go through torch's store,
    which leaves no calls on the wire.
    """
    make, store = dist.new_group, distributed_c10d._get_default_store()

    def new_group(ranks=None, *args, use_local_synchronization=False, **options):
        if not use_local_synchronization:
            number, everybody = next(_numbers), range(dist.get_world_size())
            mine = sorted(everybody if ranks is None else ranks)
            keys = [f"groups {number} of {rank}" for rank in everybody]
            store.set(keys[dist.get_rank()], str(mine))
            with contextlib.suppress(dist.DistStoreError):
                store.wait(keys, PATIENCE)
                _compare([store.get(key).decode() for key in keys])
        options["use_local_synchronization"] = use_local_synchronization
        return make(ranks, *args, **options)

    dist.new_group = new_group
    try:
        yield
    finally:
        dist.new_group = make


def _compare(lists: list[str]) -> None:
    ranks_by_list: dict[str, list[int]] = {}
    for rank, made in enumerate(lists):
        ranks_by_list.setdefault(made, []).append(rank)
    if len(ranks_by_list) > 1:
        pairs = ranks_by_list.items()
        raise _Differ(", ".join(f"{name_ranks(who)} for {made}" for made, who in pairs))


def _run(answer, stages):
    try:
        with _compared():
            group = answer(stages)
    except _Differ as differ:
        return {"calls": str(differ)}
    try:
        ranks = dist.get_process_group_ranks(group)
    except (AttributeError, KeyError, TypeError, ValueError):
        return ALIKE | {"members": f"{group!r}, which is no group that this rank is in"}
    numbers = torch.tensor([10 ** dist.get_rank()])
    dist.all_reduce(numbers, group=group)  # the group must also work
    dist.barrier()
    return ALIKE | {"members": ranks, "sum": numbers.item()}


def _trials():
    for world_size, stages in ((4, 2), (4, 1), (6, 3), (6, 2), (3, 3)):
        expected = []
        for rank in range(world_size):
            ranks = list(range(rank % stages, world_size, stages))
            right = {"members": ranks, "sum": sum(10**member for member in ranks)}
            expected.append(ALIKE | right)
        what = "1 stage" if stages == 1 else f"{stages} stages"
        yield Trial(world_size, _run, (stages,), expected, what=what)


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
        "calls": "in one and the same call of new_group, ranks ask for different groups: {got}.",
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
