"""Who waits for whom, from dumps of PyTorch's flight recorder: `python -m ddpkit.explain FOLDER`.

The dumps are ours (`run.flight_recorder`), or torch's own: NCCL's from a cluster, or Gloo's.
"""

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

from .runtime import hang
from .runtime.board import MESSAGES, RUNNING, SLOTS, Board
from .runtime.dumps import members_of, read_dumps, records_of
from .tools.units import wrap

FAR = 1_000_000  # where messages are counted from, up and down


def explain(dumps: dict[int, dict]) -> str:
    """The report of a hang: what happened, where every rank is, their last calls.

    dumps: {rank: dump}; there may be ranks without one. ValueError: one that can't be read.
    """
    ranks = set(dumps)
    for dump in dumps.values():
        for group in dump["pg_config"].values():
            ranks.update(members_of(group))
    everybody = list(range(max(ranks) + 1))
    first = (dump["entries"][0] for dump in dumps.values() if dump["entries"])
    from_the_start = all(entry.get("record_id") == 0 for entry in first)
    with tempfile.TemporaryDirectory() as folder:
        board = Board(Path(folder) / "board", len(everybody), create=True)
        try:
            for rank, dump in dumps.items():
                _fill(board, rank, dump, everybody, from_the_start)
            return _report(board, set(everybody).difference(dumps))
        finally:
            board.close()


def _fill(board: Board, rank: int, dump: dict, everybody: list[int], from_the_start: bool) -> None:
    """Write a rank's entries on the board, as if it had made the calls here.

    from_the_start: no recorder was too short for all calls. Else nobody knows how many messages
    two ranks exchanged before, and the first that isn't done on each side are taken for one.
    """
    try:
        records = list(records_of(dump, everybody))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        what = f"got {type(error).__name__}: {error}"
        raise ValueError(f"expected a dump's entries in that of rank {rank}, {what}") from None
    messages = Counter()
    for record in records:
        if record.op in MESSAGES and record.done and not from_the_start:
            messages[record.channel] -= 1
    for record in records:
        if record.op in MESSAGES:
            record.seq = FAR + messages[record.channel]
            messages[record.channel] += 1
    board.set_state(rank, RUNNING)
    waiting = next((n for n, record in enumerate(records) if record.done is None), None)
    # What was handed in after that is only queued, and the board remembers no more than the last.
    shown = records if waiting is None else records[: waiting + SLOTS // 2]
    for index, record in enumerate(shown):
        board.put(rank, index, record)
    board.set_waiting(rank, waiting)


def _report(board: Board, silent: set[int]) -> str:
    """silent: ranks without a dump."""
    now = hang.situations(board)
    different, circle = hang.mismatch(board), hang.deadlocked(now)
    waiting = [s for s in now if s.state == "waiting" and s.missing]
    here = [s for s in now if s.rank not in silent]
    if different:
        said, advice = hang.explain_mismatch(different)
    elif circle:
        said, advice = hang.explain_deadlock(now, circle)
    elif not waiting:
        said = "no rank waits for another: all calls in the dumps have their ranks."
        advice = "Nothing to do, or the cause isn't in a call."
    else:
        first = min(waiting, key=lambda s: s.call.issued)
        call = first.call.channel, first.call.seq
        stuck = [s.rank for s in waiting if (s.call.channel, s.call.seq) == call]
        who, whom = hang.name_ranks(stuck), hang.name_ranks(first.missing)
        verb = "waits" if len(stuck) == 1 else "wait"
        said = f"{who} {verb} in {first.call.op} for {whom}, which didn't come to it."
        advice = "Every rank of the group must make the call. Is it under an `if`, or did it fail?"
        if silent.issuperset(first.missing):
            said = f"{said[:-1]}, as far as one can tell."
    if silent:
        whose = hang.name_ranks(sorted(silent))
        advice += f"\nThere is no dump of {whose}: did it end before the others?"
    return hang.report(said, advice, here, board, bool(different or waiting))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ddpkit.explain", description=__doc__)
    parser.add_argument("folder", type=Path)
    try:
        print(wrap(explain(read_dumps(parser.parse_args(arguments).folder))))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
