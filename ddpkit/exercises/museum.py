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
from collections import Counter
from collections.abc import Mapping

from ddpkit.tools.units import wrap

from .museum_data import *  # noqa: F403
from .museum_piece import SOUND, Case, Piece, differs_on_a_rank
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
        by_rank = piece.run(mechanism, case.with_seed(start), some, differs_on_a_rank)
        found += sum(map(any, zip(*by_rank, strict=True)))
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
    names = options.names or list(pieces())
    print(row("piece", "runs", "detected", "missed", "sound runs", "false alarms", "seconds"))
    all_of_them: Counter = Counter()
    for name in names:
        begun = time.monotonic()
        found = judge(pieces()[name], options.seeds, options.meshes)
        all_of_them.update(found)
        print(row(name, *numbers(found), f"{time.monotonic() - begun:.0f}"), flush=True)
    print(row(f"{len(names)} pieces", *numbers(all_of_them), ""))
    missed = all_of_them["wrong"] - all_of_them["detected"]
    return int(missed + all_of_them["false alarms"] > 0)


def row(name: str, *cells: object) -> str:
    return f"{name:24}" + "".join(f"{cell:>13}" for cell in cells)


def numbers(found: Mapping[str, int]) -> list[int]:
    """List the counts as they stand in the table."""
    missed = found["wrong"] - found["detected"]
    return [found["wrong"], found["detected"], missed, found["right"], found["false alarms"]]


def judge(piece: Piece, seeds: int, meshes: int) -> Counter:
    """Count runs of wrong code, those detected, runs of right code, and false alarms."""
    right = piece.right()
    found: Counter = Counter()
    for case in piece.meshes[:meshes]:
        found["right"] += seeds
        found["false alarms"] += caught(piece, right, case, seeds)
        if right != SOUND:
            found["wrong"] += seeds
            found["detected"] += caught(piece, SOUND, case, seeds)
    return found


if __name__ == "__main__":
    sys.exit(main())
