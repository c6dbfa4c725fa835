"""The museum: programs that looked right, and some that are.

    from ddpkit.exercises import museum
    museum.late_flag(mechanism=..., number=...)     # shows a piece; with both answers, judges them
    museum.score()                                  # of those that were answered

Most pieces are published bugs, written anew in 30 lines at most, for four ranks at most; some are
right. A right answer names the piece's source. For the curious, all pieces on all their meshes,
i.e. with other numbers of ranks and micro-batches:

    python -m ddpkit.exercises.museum --seeds 1000  # hours; --seeds 3 takes some minutes

Each run is compared with one process, twice: by the piece's own numbers, and, where something
trains, by `ddpkit.audit`, from its records of all ranks.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Mapping

from ddpkit.tools.units import wrap

from .museum_data import *  # noqa: F403
from .museum_piece import SOUND, Case, Piece, judged_on_a_rank
from .museum_scale import *  # noqa: F403
from .museum_split import *  # noqa: F403
from .museum_stages import *  # noqa: F403
from .museum_state import *  # noqa: F403

BATCH = 500  # seeds in one launch
HEADINGS = "wrong", "", "", "", "right", "", "", "", ""
SHOULD_BE = ("runs", "seen"), ("audited", "by the audit")  # of wrong code: equal counts


def pieces() -> dict[str, Piece]:
    """{name: piece}, from those of `museum_data` on: in the order in which modules are imported."""
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


def caught(piece: Piece, mechanism: str, case: Case, seeds: range) -> Counter:
    """Count the seeds with which the code, repaired as `mechanism` says, isn't the one process.

    Keys: "seen" by the piece's own comparison; seen "by the audit"; "audited", all seeds if the
    piece trains something, so that the audit has a verdict.
    """
    found: Counter = Counter()
    for start in range(0, len(seeds), BATCH):
        some = seeds[start : start + BATCH]
        by_rank = piece.run(mechanism, case.with_seed(some[0]), len(some), judged_on_a_rank)
        for (seen, by_audit), *others in zip(*by_rank, strict=True):
            found["seen"] += seen or any(other for other, _ in others)
            found["audited"] += by_audit is not None
            found["by the audit"] += bool(by_audit)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run pieces on all their meshes: all wrong ones must differ, all right ones must not."""
    parser = argparse.ArgumentParser(prog="python -m ddpkit.exercises.museum")
    parser.add_argument("names", nargs="*", help="of pieces; all without")
    parser.add_argument("--seeds", type=int, default=3, help="for each mesh")
    parser.add_argument("--first", type=int, default=0, help="seed, of the --seeds that are taken")
    parser.add_argument("--right-only", action="store_true", help="look for false alarms only")
    parser.add_argument("--meshes", type=int, default=12, help="at most, of each piece")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in pieces()]
    if unknown:
        parser.error(f"expected names of pieces, got {unknown[0]}: {', '.join(pieces())}")
    names = options.names or list(pieces())
    seeds = range(options.first, options.first + options.seeds)
    print(row("", *HEADINGS))
    print(row("piece", *(2 * ["runs", "seen", "audited", "by audit"]), "seconds"))
    all_of_them: Counter = Counter()
    for name in names:
        begun = time.monotonic()
        found = judge(pieces()[name], seeds, options.meshes, options.right_only)
        all_of_them.update(found)
        print(row(name, *numbers(found), f"{time.monotonic() - begun:.0f}"), flush=True)
    print(row(f"{len(names)} pieces", *numbers(all_of_them), ""))
    missed = [all_of_them["wrong", what] - all_of_them["wrong", by] for what, by in SHOULD_BE]
    alarms = [all_of_them["right", by] for _, by in SHOULD_BE]
    return int(any(missed) or any(alarms))


def row(name: str, *cells: object) -> str:
    return f"{name:24}" + "".join(f"{cell:>10}" for cell in cells)


def numbers(found: Mapping[tuple[str, str], int]) -> list[int]:
    """List a row of `main`'s table: runs, seen, audited, by audit, of wrong and of right code."""
    columns = [name for pair in SHOULD_BE for name in pair]
    return [found[code, column] for code in ("wrong", "right") for column in columns]


def judge(piece: Piece, seeds: range, meshes: int, right_only: bool = False) -> Counter:
    """Count {("wrong" or "right", "runs" or a key of `caught`): runs}, on the first `meshes`."""
    right = piece.right()
    found: Counter = Counter()
    kinds = {"right": right, "wrong": SOUND}
    if right == SOUND or right_only:
        del kinds["wrong"]
    for case in piece.meshes[:meshes]:
        for kind, mechanism in kinds.items():
            counts = caught(piece, mechanism, case, seeds) | {"runs": len(seeds)}
            found.update({(kind, what): count for what, count in counts.items()})
    return found


if __name__ == "__main__":
    sys.exit(main())
