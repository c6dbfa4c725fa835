"""Counts of a run, for trials that limit them and for the score after a right answer."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Sequence

import torch.distributed as dist
from torch import Tensor

from ddpkit.runtime.board import Record
from ddpkit.runtime.run import Run

from ..tools.hops import hop_numbers

SPARE = "bytes sent, where one or two numbers do,"


def moved(record: Record, world_size: int) -> float:
    """Count the bytes that a rank sends for a call on `world_size` ranks, if it goes round a ring.

    A record's own bytes are those of the call's tensor: an all-gather sends W-1 times as much.
    """
    part = (world_size - 1) / world_size
    times = {"recv": 0, "send": 1, "all_reduce": 2 * part, "all_gather": world_size - 1}
    return record.bytes * times.get(record.op, part)


def bytes_moved(records: Iterable[Record], world_size: int) -> int:
    """Add up what a rank sends for these calls."""
    return round(sum(moved(record, world_size) for record in records))


def excess(
    records: Iterable[Record], tensors: Sequence[Tensor], spare_bytes: int = 0, flags: bool = False
) -> dict[str, int]:
    """Count "bytes too many" and "calls too many": a rank's beyond one all-reduce per tensor.

    Messages aren't calls; those of a ring have an all-reduce's bytes. spare_bytes: of numbers that
    may be all-reduced besides. flags: so may one tensor, a 0 or a 1 for each of `tensors`.
    """
    world_size = dist.get_world_size()
    part = (world_size - 1) / world_size
    enough = 2 * part * spare_bytes
    for tensor in tensors:
        chunk = -(-tensor.numel() // world_size)  # the largest
        enough += 2 * (world_size - 1) * chunk * tensor.itemsize
    collectives = [record for record in records if record.op not in ("send", "recv", "new_group")]
    for record in collectives if flags else []:
        if set(record.values or [2]) <= {0, 1} and len(record.values) >= len(tensors):
            enough += moved(record, world_size)
            collectives.remove(record)
            break
    sent = bytes_moved(records, world_size)
    return {
        "bytes too many": max(0, round(sent - enough)),
        "calls too many": max(0, len(collectives) - len(tensors)),
    }


def spare(records: Iterable[Record], times: int) -> str | int:
    """Return "few" if a rank sent at most `times` all-reduces of two 8-byte numbers, or bytes."""
    world_size = dist.get_world_size()
    sent = bytes_moved(records, world_size)
    return "few" if sent <= times * 2 * 8 * 2 * (world_size - 1) / world_size else sent


def counts(run: Run) -> dict[str, int]:
    """Return the "bytes" and "calls" of all ranks, and the "hops" if they sent messages alone."""
    world_size = len(run.wire)
    made = [r for records in run.wire for r in records if r.op not in ("recv", "new_group")]
    found = {"bytes": bytes_moved(made, world_size), "calls": len(made)}
    if made and all(record.op == "send" for record in made):
        found["hops"] = max(hop_numbers(run).values(), default=0)
    return found


def code_lines(thing: Callable) -> int | None:
    """Count a function's or class's lines of code, without docstrings; None without a source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(thing))))
    except (OSError, TypeError, SyntaxError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return len(ast.unparse(tree).splitlines())


def score(yours: dict[str, int], ours: dict[str, int], best: dict[str, int]) -> str:
    """Return the counts side by side as text: yours, ours, and the fewest known."""
    told = []
    for what, count in yours.items():
        numbers = [f"yours {count:,}"]
        if what in ours:
            numbers.append(f"ours {ours[what]:,}")
        if what in best:
            numbers.append(f"best known {best[what]:,}")
        told.append(f"{what}: {', '.join(numbers)}")
    return "; ".join(told)
