"""Who waits for whom, from dumps of PyTorch's flight recorder: `python -m ddpkit.explain FOLDER`.

The dumps are ours (`run.flight_recorder`), or torch's own: NCCL's from a cluster, or Gloo's. One
file a rank, its name ending in the rank's number. Nothing in them is executed.
"""

import argparse
import io
import math
import pickle
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from .runtime import hang
from .runtime.board import RUNNING, SLOTS, Board, Record
from .runtime.flight_recorder import NAMES
from .runtime.records import is_library
from .runtime.trace import DTYPES
from .tools.units import wrap

KNOWN = "2."  # versions that begin so
OUR_NAMES = {theirs: ours for ours, theirs in NAMES.items()}
TORCH_DTYPES = {theirs: ours for ours, theirs in DTYPES.items()}
FAR = 1_000_000  # where messages are counted from, up and down
UNEQUAL = ("all_to_all", "all_gather", "gather")  # their sizes may differ between ranks
# Frames of torch or Python on another machine, and those of C++ (TORCH_FR_CPP_STACK).
LIBRARY = re.compile(
    r"[/\\](torch[/\\]|lib[/\\]python3\.\d+[/\\](?!(site|dist)-packages))|\.(cpp|cc|h|hpp)$|^[?<]"
)


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
            other = files.setdefault(int(number[1]), path)
            if other != path:
                twice = f"got {other.name} and {path.name}. Keep those of one run in a folder"
                raise ValueError(f"expected one dump of rank {number[1]}, {twice}.")
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
    for name, kind in (("entries", list), ("pg_config", dict)):
        if not isinstance(dump[name], kind):
            got = f"got {type(dump[name]).__name__}"
            raise ValueError(f"expected a {kind.__name__} of {name} in {path.name}, {got}")
    if not str(dump["version"]).startswith(KNOWN):
        raise ValueError(f"expected version 2.x of the dumps, got {dump['version']} in {path.name}")
    return dump


def explain(dumps: dict[int, dict]) -> str:
    """The report of a hang: what happened, where every rank is, their last calls.

    dumps: {rank: dump}; there may be ranks without one. ValueError: one that can't be read.
    """
    ranks = set(dumps)
    for dump in dumps.values():
        for group in dump["pg_config"].values():
            ranks.update(_members(group))
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


def _members(group: dict) -> list[int]:
    return [int(rank) for rank in re.findall(r"\d+", str(group["ranks"]))]


def _fill(board: Board, rank: int, dump: dict, everybody: list[int], from_the_start: bool) -> None:
    """Write a rank's entries on the board, as if it had made the calls here.

    from_the_start: no recorder was too short for all calls. Else nobody knows how many messages
    two ranks exchanged before, and the first that isn't done on each side are taken for one.
    """
    try:
        records = list(_records(dump, everybody))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        what = f"got {type(error).__name__}: {error}"
        raise ValueError(f"expected a dump's entries in that of rank {rank}, {what}") from None
    messages = Counter()
    for record in records:
        if record.op in hang.MESSAGES and record.done and not from_the_start:
            messages[record.channel] -= 1
    for record in records:
        if record.op in hang.MESSAGES:
            record.seq = FAR + messages[record.channel]
            messages[record.channel] += 1
    board.set_state(rank, RUNNING)
    waiting = next((n for n, record in enumerate(records) if record.done is None), None)
    # What was handed in after that is only queued, and the board remembers no more than the last.
    shown = records if waiting is None else records[: waiting + SLOTS // 2]
    for index, record in enumerate(shown):
        board.put(rank, index, record)
    board.set_waiting(rank, waiting)


def _records(dump: dict, everybody: list[int]) -> Iterator[Record]:
    """The calls of a dump.

    Calls in a batch (batch_isend_irecv, coalescing managers) have one number; only the entry that
    ends it, which is none of them, knows whether they are done.
    """
    batches: dict[tuple, list[dict]] = {}
    for entry in dump["entries"]:
        is_message = entry.get("is_p2p", False)
        seq = entry["p2p_seq_id" if is_message else "collective_seq_id"]
        batches.setdefault((entry["process_group"][0], is_message, seq), []).append(entry)
    for batch in batches.values():
        end = batch[-1]
        done = end["state"] == "completed"
        if end["profiling_name"].startswith("gloo:"):  # knows no other state
            done = end["retired"]
        for place, entry in enumerate(batch[:-1] or batch):
            record = _record(entry, dump["pg_config"], everybody)
            record.done = 1.0 if done else None
            record.channel += f" part {place}" if place and not entry["is_p2p"] else ""
            yield record


def _record(entry: dict, groups: dict, everybody: list[int]) -> Record:
    name, _, peers = entry["profiling_name"].partition(":")[2].partition(" ")
    group = entry["process_group"][0]
    members = tuple(_members(groups[group])) if group in groups else ()
    members = members or tuple(everybody)  # Gloo's recorder doesn't know them
    out = name in ("recv", "scatter")  # of a scatter, only the root hands something in
    sizes, dtypes = (entry[f"{'out' if out else 'in'}put_{of}"] for of in ("sizes", "dtypes"))
    dtype = TORCH_DTYPES.get(dtypes[0], dtypes[0]) if dtypes else ""
    shape = "×".join(map(str, sizes[0])) if len(sizes) == 1 else ""
    numel = sum(map(math.prod, sizes))
    name = OUR_NAMES.get(name, name)
    detail = f"{shape or numel} {dtype}" if dtype else ""
    detail += f", {peers}" if peers else ""
    if len(members) < len(everybody) and name not in hang.MESSAGES:
        detail += f", group {list(members)}" if detail else f"group {list(members)}"
    frames = entry.get("frames") or [{"name": "?", "filename": "?", "line": 0}]
    theirs = (f for f in frames if not is_library(f["filename"]))
    frame = next((f for f in theirs if not LIBRARY.search(f["filename"])), frames[0])
    channel = group
    fingerprint = f"{name} {'' if name.startswith(UNEQUAL) else numel} {dtype}"
    if name in hang.MESSAGES:  # "0->1" or "1<-0", as places in the group
        members = tuple(members[int(place)] for place in re.findall(r"\d+", peers))
        members = members if name == "send" else members[::-1]
        channel, fingerprint = f"{group} {members[0]}>{members[1]}", f"{numel} {dtype}"
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
    )


def _report(board: Board, silent: set[int]) -> str:
    """silent: ranks without a dump."""
    now = hang.situations(board)
    different, circle = hang.mismatch(board), hang.deadlocked(now, board)
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
