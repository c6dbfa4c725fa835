"""Describe a call in words, once for each line of the reader's code that makes it.

The results are cached: recording may take no more than 30 µs a call, and a training step makes the
same calls again and again.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist

from .board import Said

ROOTED = ("broadcast", "reduce", "gather", "scatter")
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
UNEQUAL = ("all_gather", "gather", "all_to_all")  # their sizes may differ between ranks
REDUCTIONS = {op.value: name.lower() for name, op in dist.ReduceOp.RedOpType.__members__.items()}
Place = tuple[str, int, str, str]  # file, line, function, via
once = lru_cache(4096)


@dataclass(frozen=True, eq=False)  # hashed by identity, which is quick
class Member:
    """A rank as a member of a group: what describing its calls needs."""

    name: str  # the group's, on the board
    label: str  # the group's, for people
    ranks: tuple[int, ...]  # the members, as global ranks
    rank: int  # this one's number among them

    def channel(self, src: int, dst: int, tag: int) -> str:
        return f"{self.name} {self.ranks[src]}>{self.ranks[dst]}:{tag}"

    def check_root(self, op: str, root: int):
        if not 0 <= root < len(self.ranks):
            me = f"rank {self.ranks[self.rank]} called {op} with {_root_name(op)}={root}"
            raise ValueError(f"{me}, but the ranks go from 0 to {len(self.ranks) - 1}.")

    def check_peer(self, op: str, name: str, number: int):
        """Raise ValueError for a rank outside the group, or for this rank itself.

        torch lets both pass; Gloo fails with an assertion in C++, or never returns.
        """
        if 0 <= number < len(self.ranks) and number != self.rank:
            return
        me = f"rank {self.ranks[self.rank]} called {op} with {name}={number}"
        if number != self.rank:
            last = f"there is no rank {number}: the last is {len(self.ranks) - 1}"
            raise ValueError(f"{me}, but {last}. {self._why_not(number)}")
        remedy = "leave this rank out, it has its own data already"
        raise ValueError(f"{me}, which is itself: {remedy}")

    def _why_not(self, number: int) -> str:
        if number < 0:
            ring, made = "In a ring, take % world_size.", "Is it made for fewer ranks?"
            return f"{ring} {made} Then say how many: launch(..., world_size=2)."
        return "Did a loop go one too far?"


def new_group(member: Member, place: Place) -> Said:
    members = str(list(member.ranks))
    said = member.ranks, f"new {member.name}", "", members
    return Said("new_group", member.label, *said, 0, None, (), "", *place)


@once
def collective(
    member: Member,
    place: Place,
    op: str,
    alike: tuple[torch.Size, ...],
    shapes: tuple[torch.Size, ...],
    dtype: torch.dtype | None,
    reduction: int | None,
    root: int | None,
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
) -> Said:
    """Describe a collective as a `Said`; the same arguments give the same object.

    alike: the shapes that must be the same on all ranks. shapes: of this rank's input. reduction,
    root: of those that have one. splits: as in `Said`.
    """
    nbytes = sum(map(torch.Size.numel, shapes)) * dtype.itemsize if dtype else 0
    said = [f"{sum(map(torch.Size.numel, alike))} {_name(dtype)}"] if dtype else []
    said += [REDUCTIONS[reduction]] if reduction is not None else []
    peer = None
    if root is not None:
        member.check_root(op, root)
        peer = member.ranks[root]
        said += [f"{_root_name(op)}={peer}"]
    alike = [op, _name(dtype), *said[1:]] if op in UNEQUAL else [op, *said]
    detail = ", ".join(said + _in_group(member))
    words = op, member.label, member.ranks, member.name, " ".join(alike), detail
    shape = tuple(shapes[0]) if shapes else ()
    return Said(*words, nbytes, peer, shape, _name(dtype), *place, splits)


@once
def message(
    member: Member,
    place: Place,
    op: str,
    number: int | None,
    tag: int,
    shape: torch.Size,
    dtype: torch.dtype,
    doing: str,
) -> Said:
    """Describe a send or a receive as a `Said`; the same arguments give the same object.

    number: of the rank at the other end, in the group; None for a receive from any rank. doing: the
    action of the pipeline that sends it, or "".
    """
    size = f"{shape.numel()} {_name(dtype)}"
    said = [size]
    if number is None:  # the channel is "?" until the message has arrived
        ranks = member.ranks
        channel = f"{member.name} ?"
        fingerprint = ""
        peer = None
        said += ["src=any"]
    else:
        name = "dst"
        ends = (member.rank, number)
        if op == "recv":
            name = "src"
            ends = (number, member.rank)
        member.check_peer(op, name, number)
        ranks = tuple(member.ranks[end] for end in ends)
        channel = member.channel(*ends, tag)
        fingerprint = size
        peer = member.ranks[number]
        said += [f"{name}={peer}"]
        said += [f"tag={tag}"] if tag else []
        said += [doing] if doing else []
    detail = ", ".join(said + _in_group(member))
    words = op, member.label, ranks, channel, fingerprint, detail
    nbytes = shape.numel() * dtype.itemsize
    return Said(*words, nbytes, peer, tuple(shape), _name(dtype), *place)


def _in_group(member: Member) -> list[str]:
    return [] if member.label == "world" else [member.label]


def _root_name(op: str) -> str:
    return "dst" if op in ("reduce", "gather") else "src"


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.") if dtype else ""
