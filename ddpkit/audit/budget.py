"""Count the communication calls of a `launch`, and compare them with the calls that are needed."""

from collections import Counter
from collections.abc import Mapping

from ..runtime.run import Run


def traffic(run: Run, rank: int = 0) -> dict[str, tuple[int, int]]:
    """Return {operation: (calls, bytes)} of one rank (for example `{"all_reduce": (2, 24)}`).

    All calls in `run.wire` count: "send", "recv", "new_group", and the all_gathers that make up an
    all_gather_object. bytes: of the tensors that the rank handed in or, by recv, got.
    """
    calls: Counter = Counter()
    nbytes: Counter = Counter()
    for record in run.wire[rank]:
        calls[record.op] += 1
        nbytes[record.op] += record.bytes
    return {op: (calls[op], nbytes[op]) for op in calls}


def budget(run: Run, needs: Mapping[str, int], steps: int = 1) -> list[str]:
    """List the operations that a rank called more or less often than needed; [] if none.

    needs: {operation: calls of each rank in a step}; 0 for one that isn't named, "barrier", "recv"
    and "new_group" included. steps: the number of steps that the run made.

        budget(run, {"all_reduce": 4})      # tensor parallelism, 1 layer: 2 forward, 2 backward
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
    """Return whether every rank has the same `traffic` in two runs.

    Then an option that differs between them saves no call and no byte. Order, groups and values of
    the calls aren't compared.
    """
    ranks = range(len(run.wire))
    return len(run.wire) == len(other.wire) and all(
        traffic(run, rank) == traffic(other, rank) for rank in ranks
    )
