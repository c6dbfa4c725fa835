"""Who waits for whom, from dumps of PyTorch's flight recorder: `python -m ddpkit.explain FOLDER`.

The dumps are ours (`run.flight_recorder`) or NCCL's own, from a cluster: one file a rank, its name
ending in the rank's number. Nothing in them is executed. Messages are numbered here, for each pair
of ranks in their order: a recorder that was too short for all of them puts the numbers out of step.
"""

import argparse
import ast
import io
import pickle
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

from .runtime import hang
from .runtime.board import RUNNING, Board, Record
from .runtime.flight_recorder import NAMES
from .runtime.records import is_library
from .runtime.trace import DTYPES
from .tools.units import wrap

KNOWN = "2."  # versions that begin so
OUR_NAMES = {theirs: ours for ours, theirs in NAMES.items()}
TORCH_DTYPES = {theirs: ours for ours, theirs in DTYPES.items()}


class _DataOnly(pickle.Unpickler):
    """Reads lists, dicts, numbers and text; refuses everything that would have to be called."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it names {module}.{name}, and a dump is plain data")


def read_dumps(folder: str | Path) -> dict[int, dict]:
    """{rank: dump} of a folder.

    ValueError: no dumps there, or something that is none, or of a version that isn't known.
    """
    folder, files = Path(folder), {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        number = re.search(r"(\d+)$", path.name)
        if number and path.is_file():
            files[int(number[1])] = path
    if not files:
        remedy = "Write some with run.flight_recorder(folder), or set TORCH_FR_DUMP_TEMP_FILE."
        raise ValueError(f"expected a folder of dumps, rank_0, rank_1, ..., got {folder}. {remedy}")
    return {rank: _read(path) for rank, path in sorted(files.items())}


def _read(path: Path) -> dict:
    try:
        dump = _DataOnly(io.BytesIO(path.read_bytes())).load()
    except Exception as error:  # a pickle that is none fails in any way
        raise ValueError(f"expected a flight recorder's dump, got {path.name}: {error}") from None
    if not isinstance(dump, dict) or not {"version", "entries", "pg_config"} <= dump.keys():
        raise ValueError(f"expected version, entries and pg_config in a dump, not in {path.name}")
    if not str(dump["version"]).startswith(KNOWN):
        raise ValueError(f"expected version 2.x of the dumps, got {dump['version']} in {path.name}")
    return dump


def explain(dumps: dict[int, dict]) -> str:
    """The report of a hang: what happened, where every rank is, their last calls."""
    ranks = list(dumps)
    with tempfile.TemporaryDirectory() as folder:
        board = Board(Path(folder) / "board", len(ranks), create=True)
        for place, dump in enumerate(dumps.values()):
            _fill(board, place, dump, ranks)
        try:
            return _report(board)
        finally:
            board.close()


def _fill(board: Board, place: int, dump: dict, ranks: list[int]) -> None:
    """Write a rank's entries on the board, as if it had made the calls here."""
    board.set_state(place, RUNNING)
    waiting, messages = None, Counter()
    for index, entry in enumerate(dump["entries"]):
        record = _record(entry, dump["pg_config"], ranks)
        if record.op in hang.MESSAGES:
            record.seq = messages[record.channel]
            messages[record.channel] += 1
        board.put(place, index, record)
        if record.done is None and waiting is None:
            waiting = index
    board.set_waiting(place, waiting)


def _record(entry: dict, groups: dict, ranks: list[int]) -> Record:
    name, _, peers = entry["profiling_name"].partition(":")[2].partition(" ")
    group, description = entry["process_group"]
    config = groups.get(group, {"ranks": str(ranks)})
    members = tuple(ranks.index(r) for r in ast.literal_eval(config["ranks"]) if r in ranks)
    sizes = entry["input_sizes"] if name != "recv" else entry["output_sizes"]
    theirs = (entry["input_dtypes"] or ["?"])[0]
    dtype = TORCH_DTYPES.get(theirs, theirs)
    shape = "×".join(map(str, sizes[0])) if sizes else "0"
    name = OUR_NAMES.get(name, name)
    detail = f"{shape} {dtype}" + (f", {peers}" if peers else "") if dtype else ""
    if description != "default_pg" and len(members) < len(ranks):
        detail += f", group {[ranks[member] for member in members]}"
    frames = entry.get("frames") or [{"name": "?", "filename": "?", "line": 0}]
    frame = next((f for f in frames if not is_library(f["filename"])), frames[0])
    channel, fingerprint = group, f"{name} {shape} {dtype}"
    if name in hang.MESSAGES:  # "0->1" or "1<-0", as places in the group
        members = tuple(members[int(place)] for place in re.findall(r"\d+", peers))
        members = members if name == "send" else members[::-1]
        channel, fingerprint = f"{group} {members[0]}>{members[1]}", f"{shape} {dtype}"
    return Record(
        op=name,
        group=group,
        ranks=members,
        channel=channel,
        seq=entry["collective_seq_id"],
        fingerprint=fingerprint,
        detail=detail,
        bytes=0,
        peer=None,
        shape=(),
        dtype=dtype,
        file=frame["filename"],
        line=frame["line"],
        function=frame["name"],
        issued=(entry["time_created_ns"] or 0) / 1e9,
        done=None if entry["state"] != "completed" else 1.0,
    )


def _report(board: Board) -> str:
    now = hang.situations(board)
    different = hang.mismatch(board)
    if different:
        return hang.report(*hang.explain_mismatch(different), now, board)
    circle = hang.deadlocked(now, board)
    if circle:
        return hang.report(*hang.explain_deadlock(now, circle), now, board)
    waiting = [s for s in now if s.state == "waiting" and s.missing]
    if not waiting:
        said = "no rank waits for another: all calls in the dumps have their ranks."
        return hang.report(said, "Nothing to do, or the cause isn't in a call.", now, board, False)
    first = min(waiting, key=lambda s: s.call.issued)
    stuck = [s.rank for s in waiting if s.call.seq == first.call.seq]
    who, whom = hang.name_ranks(stuck), hang.name_ranks(first.missing)
    verb = "waits" if len(stuck) == 1 else "wait"
    said = f"{who} {verb} in {first.call.op} for {whom}, which didn't come to it."
    advice = (
        "Every rank of the group must make the call. Is it under an `if`, or did it fail there?"
    )
    return hang.report(said, advice, now, board)


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
