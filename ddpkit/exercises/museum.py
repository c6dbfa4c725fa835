"""The museum: programs that looked right, and some that are.

    from ddpkit.exercises import museum
    museum.late_flag(mechanism=..., number=...)     # shows a piece; with both answers, judges them
    museum.score()                                  # of those that were answered

Each piece is a published bug, written anew in 30 lines at most, for four ranks at most; its source
is named once it is answered. For the curious, all pieces on all their meshes:

    python -m ddpkit.exercises.museum --seeds 1000  # hours; --seeds 3 takes some minutes
"""

import argparse
import sys
import time

from ddpkit.tools.units import wrap

from .museum_data import *  # noqa: F403
from .museum_piece import SOUND, Case, Piece, differing
from .museum_scale import *  # noqa: F403
from .museum_split import *  # noqa: F403
from .museum_stages import *  # noqa: F403
from .museum_state import *  # noqa: F403

BATCH = 100  # seeds in one launch


def pieces() -> dict[str, Piece]:
    """{name: piece}, in the order of the rooms."""
    return {name: piece for name, piece in globals().items() if isinstance(piece, Piece)}


def score() -> str:
    """Count what was named right at the first attempt, and the false alarms."""
    firsts = [piece.first for piece in pieces().values() if piece.first is not None]
    mechanisms = sum(mechanism for mechanism, _ in firsts)
    numbers = sum(number for _, number in firsts)
    alarms = sum(piece.false_alarm for piece in pieces().values())
    of = f"{len(firsts)} pieces at the first attempt"
    told = f"{mechanisms} mechanisms and {numbers} numbers of {of}, {alarms} false alarms"
    return wrap(f"{told}. There are {len(pieces())}.")


def caught(piece: Piece, mechanism: str, case: Case, seeds: int) -> int:
    """Count the seeds with which the code, repaired as `mechanism` says, isn't the one process."""
    found = 0
    for start in range(0, seeds, BATCH):
        some = min(BATCH, seeds - start)
        by_rank = piece.run(mechanism, case.with_seed(start), some)
        for runs in zip(*by_rank, strict=True):
            found += any(differing(got, right) for got, right in runs)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run pieces on all their meshes: all wrong ones must differ, all right ones must not."""
    parser = argparse.ArgumentParser(prog="python -m ddpkit.exercises.museum")
    parser.add_argument("names", nargs="*", help="of pieces; all without")
    parser.add_argument("--seeds", type=int, default=3, help="for each mesh")
    parser.add_argument("--meshes", type=int, default=12, help="at most, of each piece")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in pieces()]
    if unknown:
        parser.error(f"expected names of pieces, got {unknown[0]}: {', '.join(pieces())}")
    failures = 0
    for name in options.names or pieces():
        begun = time.monotonic()
        missed, alarms, runs = judge(pieces()[name], options.seeds, options.meshes)
        failures += missed + alarms
        took = f"{time.monotonic() - begun:.0f} s"
        print(f"{name:24} {runs} runs, {missed} missed, {alarms} false alarms, {took}", flush=True)
    return int(failures > 0)


def judge(piece: Piece, seeds: int, meshes: int) -> tuple[int, int, int]:
    """(runs of wrong code that looked right, of right code that looked wrong, runs of each)."""
    right = piece.right()
    missed = alarms = runs = 0
    for case in piece.meshes[:meshes]:
        runs += seeds
        alarms += caught(piece, right, case, seeds)
        if right != SOUND:
            missed += seeds - caught(piece, SOUND, case, seeds)
    return missed, alarms, runs


if __name__ == "__main__":
    sys.exit(main())
