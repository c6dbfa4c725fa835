"""Describe a call of torch.distributed as a `Said`: operation, group, arguments and line, in words.

A `Said` is the part of a call's record that is the same each time a line makes the same call. That
of a collective or message is cached by line and arguments (shapes, dtype), since a training step
repeats its calls, and recording may take no more than 30 µs a call. That of a new group, which is
rare, isn't cached. Records are written to the board, a file that all ranks share.

The argument `place` is the user's line, (file, line, function, via, amid). via: the line of an
installed framework through which the user's line led to torch, as "file:line:function", or "".
amid: the exception that the user's line handles, as "ValueError: no data (train.py:12)", or "".
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist

from ..tools.units import name_group
from .board import Said

ROOTED = ("broadcast", "reduce", "gather", "scatter")
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
UNEQUAL = ("all_gather", "gather", "all_to_all")  # on NCCL, their sizes may differ between ranks
REDUCTIONS = {op.value: name.lower() for name, op in dist.ReduceOp.RedOpType.__members__.items()}
Place = tuple[str, int, str, str, str]  # file, line, function, via: see `place.place_in`; amid
once = lru_cache(4096)


@dataclass(frozen=True, eq=False)  # hashed by identity, which is quick
class Member:
    """A rank as a member of a process group: what is needed to describe the rank's calls in words.

    name: the group's name on the board, such as "0#1": torch's name, and the number of the script's
        world, from 1, since it may end its world and begin another. label: the group's name in
        texts, such as "world" or "group [0, 2]". ranks: the members, as ranks of the world. rank:
        this rank's number in the group.
    """

    name: str
    label: str
    ranks: tuple[int, ...]
    rank: int

    def channel(self, src: int, dst: int, tag: int) -> str:
        """Return the name by which a message's send and receive are matched on the board.

        It is "0#1 2>3:7" for tag 7 from rank 2 to rank 3 in the group "0#1". All messages of that
        kind share it: the n-th send with a name belongs to the n-th receive with the same name.
        src, dst: the members' numbers in the group; in the name they stand as ranks of the world.
        """
        return f"{self.name} {self.ranks[src]}>{self.ranks[dst]}:{tag}"

    def check_root(self, op: str, root: int):
        """Raise ValueError if `root`, a member's number in the group, is negative or too large.

        op: the operation that was called with it, for the text of the error.
        """
        if not 0 <= root < len(self.ranks):
            me = f"rank {self.ranks[self.rank]} called {op} with {_root_name(op)}={root}"
            raise ValueError(f"{me}, but the ranks go from 0 to {len(self.ranks) - 1}.")

    def check_peer(self, op: str, name: str, number: int):
        """Raise ValueError if `number` isn't a member's number in the group, or is this rank's own.

        torch mostly lets both pass; Gloo then fails with an assertion in C++, or never returns.
        op, name: the operation and the name of its argument, "dst" or "src", for the text of the
            error.
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
        """Return sentences, for an error's text, that guess why a call names a rank out of range.

        number: that rank as a number in the group: below 0, or at least the group's size.
        """
        if number < 0:
            ring, made = "In a ring, take % world_size.", "Is it made for fewer ranks?"
            return f"{ring} {made} Then say how many: launch(..., world_size=2)."
        return "Did a loop go one too far?"


def new_group(member: Member, place: Place) -> Said:
    """Describe the making of a group, in which a rank waits for the other members, as a `Said`.

    Ranks don't compare these calls, so the fingerprint, the text that is compared, is "".
    member: this rank as a member of the group whose members must all take part: the new group or,
        in a split, the one that is split.
    """
    members = name_group(member.ranks).removeprefix("group ")
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
    uneven: bool = False,
) -> Said:
    """Describe a collective as a `Said`; the same arguments give the same object.

    member: this rank in the group of the call.
    op: torch.distributed's name of the operation, such as "all_reduce".
    alike: the shapes whose elements, counted together, must be as many on all ranks: `shapes`, but
        on the root of a scatter the shape of its output, as on the receivers.
    shapes: the shapes of this rank's input tensors or, on a receiver of a scatter, of its output.
        The `Said` has their total `bytes`, and the `shape` of the first.
    dtype: of the tensors; None for a barrier, which has none.
    reduction: torch's number for a sum, a maximum, ... (`REDUCTIONS`); None: nothing is reduced.
    root: the root's number in the group; None if the operation has none.
    splits: of an all_to_all, (elements sent to each member, elements expected from each).
    uneven: the sizes may differ between ranks, so they aren't compared.
    ValueError: `root` isn't a member.
    """
    nbytes = sum(map(torch.Size.numel, shapes)) * dtype.itemsize if dtype else 0
    said = [f"{sum(map(torch.Size.numel, alike))} {_name(dtype)}"] if dtype else []
    said += [REDUCTIONS[reduction]] if reduction is not None else []
    peer = None
    if root is not None:
        member.check_root(op, root)
        peer = member.ranks[root]
        said += [f"{_root_name(op)}={peer}"]
    alike = [op, _name(dtype), *said[1:]] if uneven else [op, *said]
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

    member: this rank in the group of the message.
    op: "send" or "recv".
    number: the other rank's number in the group; None for a receive from any rank.
    tag: the message's tag.
    shape, dtype: of the tensor.
    doing: the pipeline's action that the message belongs to, such as "1F0" for stage 1's forward of
        micro-batch 0, or "".
    ValueError: `number` isn't a member's, or is this rank's own.
    """
    size = f"{shape.numel()} {_name(dtype)}"
    said = [size]
    if number is None:  # until the message has arrived, its sender, and so its channel, is unknown
        ranks = member.ranks
        channel = f"{member.name} {tag}?"
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
    """Return a list with the group's name, such as ["group [0, 2]"]; for the world, an empty one.

    It is appended to a call's arguments in words: "8 float32, sum, group [0, 2]".
    member: this rank as a member of the group, whose name is `member.label`.
    """
    return [] if member.label == "world" else [member.label]


def _root_name(op: str) -> str:
    """Return torch's name of the argument for the root of `op`: "dst" (reduce, gather) or "src"."""
    return "dst" if op in ("reduce", "gather") else "src"


def _name(dtype: torch.dtype | None) -> str:
    """Return the name of a dtype, such as "float32", or "" for None."""
    return str(dtype).removeprefix("torch.") if dtype else ""
