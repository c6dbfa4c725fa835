"""Argument checks, which raise an error or return None.

Every error says what was expected, what came instead and the remedy; those about ranks name them.
"""

import hashlib
from collections.abc import Iterable, Mapping
from datetime import timedelta
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d


def misuse(name: str, got: str, expected: str, remedy: str) -> ValueError:
    """Return the ValueError for a wrong call of `name` on this rank, for the caller to raise.

    >>> raise misuse("all_gather", "3 tensors in tensor_list", "4", "One a rank.")
    ValueError: rank 1 called all_gather with 3 tensors in tensor_list, expected 4. One a rank.
    """
    who = f"rank {dist.get_rank()} called" if dist.is_initialized() else "called"
    return ValueError(f"{who} {name} with {got}, expected {expected}. {remedy}")


def check_in_group(name: str, group: ProcessGroup | None) -> None:
    """Raise ValueError unless this rank is in `group`, where None is the group of all ranks.

    name: the function that the user called, for the error's text.
    """
    if dist.get_rank(group) < 0:
        remedy = f"Call {name} on the group's ranks only."
        raise misuse(name, "a group that it isn't in", "one of its own", remedy)


def check_same(
    what: str,
    mine: Iterable[str],
    group: ProcessGroup | None,
    remedy: str = "Build it alike on all.",
) -> None:
    """Raise ValueError on every rank of `group` unless all bring the same `mine`.

    Every rank of the group must call. Cost: an all_gather of 8 bytes a rank, a hash of `mine`; if
    hashes differ, also an all_gather_object, for the error.

    what: the user's word for what is compared, such as "module".
    mine: descriptions of this rank's parts of it, in order; the error shows the first that
        differs from the group's first rank.
    group: the ranks that are compared; None for all.
    remedy: the advice at the end of the error.
    """
    mine = list(mine)
    ranks = dist.get_process_group_ranks(group)
    device = distributed_c10d._get_object_coll_device(group)
    digest = hashlib.blake2b(repr(mine).encode(), digest_size=7).digest()
    here = torch.tensor(int.from_bytes(digest), device=device)
    hashes = [torch.empty_like(here) for _ in ranks]
    dist.all_gather(hashes, here, group=group)
    if all(one == here for one in hashes):
        return
    everyones: list = [None] * len(ranks)
    dist.all_gather_object(everyones, mine, group=group)
    for rank, theirs in zip(ranks, everyones, strict=True):
        for part, firsts in zip_longest(theirs, everyones[0], fillvalue="nothing"):
            if part != firsts:
                got = f"{part} on rank {rank}, {firsts} in its place on rank {ranks[0]}"
                expected = f"expected the same {what} on every rank"
                raise ValueError(f"{expected}, got {got}. {remedy}")


def check_same_on_all_ranks(
    what: str, tensors: Iterable[tuple[str, Tensor]], group: ProcessGroup | None
) -> None:
    """Raise ValueError on every rank of `group` unless all bring tensors that are alike.

    Alike are their number and order, names, dtypes, shapes and requires_grad; their values may
    differ. Every rank of the group must call; the cost is `check_same`'s.

    what: the user's word for what is compared, such as "module".
    tensors: (name, tensor) of each, in order.
    """
    mine = []
    for name, x in tensors:
        trained = "trained" if x.requires_grad else "not trained"
        mine.append(f"{name} ({x.dtype}, {tuple(x.shape)}, {trained})")
    check_same(what, mine, group)


def check_same_shapes(what: str, theirs: Mapping, mine: Mapping) -> None:
    """Raise ValueError unless `theirs` and `mine`, both {name: shape}, have equal names and shapes.

    what: the user's word for where `theirs` comes from, such as the name of a checkpoint.
    """
    for name in mine | theirs:
        if theirs.get(name) != mine.get(name):
            got = f"{theirs.get(name, 'nothing')} in {what}, {mine.get(name, 'nothing')} here"
            remedy = "Is it another model's, or saved under other names?"
            who = f"rank {dist.get_rank()}: " if dist.is_initialized() else ""
            raise ValueError(f"{who}expected the same shape of {name} in both, got {got}. {remedy}")


def check_all_call(name: str, group: ProcessGroup | None, patience_s: float = 10.0) -> None:
    """Raise RuntimeError unless all ranks of the group call `name` within `patience_s` seconds.

    A rank that calls alone would otherwise wait for ever in the first collective call. This checks
    by a barrier if Gloo is the group's only backend. Otherwise, or for one rank, it does nothing.
    """
    if dist.get_backend(group) != "gloo" or dist.get_world_size(group) == 1:
        return
    try:
        dist.monitored_barrier(group, timedelta(seconds=patience_s), wait_all_ranks=True)
    except RuntimeError as error:
        got = f"rank {dist.get_rank()} called {name}, and not all ranks did within {patience_s:g} s"
        remedy = "Each has a part of it: call it on every rank, not under `if rank == 0`."
        raise RuntimeError(f"{got}. {remedy} ({error})") from None


def check_positive(remedy: str, **values: float) -> None:
    """Raise ValueError unless all values are numbers > 0: check_positive("Give MiB.", cap=cap).

    remedy: the advice at the end of the error.
    values: {name that the error shows: value}.
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ValueError(f"expected {name} > 0, got {value!r}. {remedy}")


def check_counts(**values: int) -> None:
    """Raise ValueError unless every value is an int of 1 or more: check_counts(world_size=4).

    values: {name that the error shows: value}.
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"expected {name} to be 1 or more, got {value!r}: give a whole number")
