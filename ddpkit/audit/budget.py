"""A budget of the wire: the calls and bytes of a run, against what its parallelism needs."""

from collections import Counter
from collections.abc import Mapping

from ..runtime.run import Run


def traffic(run: Run, rank: int = 0) -> dict[str, tuple[int, int]]:
    """{operation: (calls, bytes)} of a rank, object collectives included."""
    calls: Counter = Counter()
    nbytes: Counter = Counter()
    for record in run.wire[rank]:
        calls[record.op] += 1
        nbytes[record.op] += record.bytes
    return {op: (calls[op], nbytes[op]) for op in calls}


def budget(run: Run, needs: Mapping[str, int], steps: int = 1) -> list[str]:
    """List, by rank, the operations whose calls aren't those that a step needs.

    needs: {operation: calls a step}, of what the wire carries: "all_reduce", "all_gather", "send".
    An operation that isn't named needs none. steps: that the run made.

        budget(run, {"all_reduce": 4})      # tensor parallelism: 2 forward, 2 backward, a layer
        ["rank 0: 10 all_reduce, 4 due"]
    """
    found = []
    for rank in range(len(run.wire)):
        used = traffic(run, rank)
        for op in dict.fromkeys([*needs, *used]):
            calls = used.get(op, (0, 0))[0]
            due = needs.get(op, 0) * steps
            if calls != due:
                found.append(f"rank {rank}: {calls} {op}, {due} due")
    return found


def unchanged(run: Run, other: Run) -> bool:
    """Return whether two runs send the same: then a flag that differs between them does nothing."""
    ranks = range(len(run.wire))
    return len(run.wire) == len(other.wire) and all(
        traffic(run, rank) == traffic(other, rank) for rank in ranks
    )
