"""Write a run in the format of PyTorch's flight recorder, one pickle a rank, for its analyser.

    run.flight_recorder("dumps/")
    torchfrtrace dumps/  # or python -m torch.distributed.flight_recorder.fr_trace dumps/

Messages between two ranks are in a group of these two here, unlike in NCCL's recorder: the analyser
compares the calls of all members of a group, and so finds the rank that is missing. In the group of
all ranks it would expect every rank to take part in each message.
"""

import pickle
from collections.abc import Sequence
from pathlib import Path

from ..runtime.board import MESSAGES, Record
from .trace import DTYPES, numels

VERSION = "2.10"
NAMES = {"barrier": "all_reduce_barrier"}  # {our op: the analyser's name for it}


def write_dumps(folder: str | Path, wire: Sequence[Sequence[Record]], clock_s: float) -> None:
    """Write a dump for each rank, `rank_0`, `rank_1`, ..., into `folder`.

    The folder is created if necessary; other files in it stay. A rank may keep only its last calls.
    In each group and between each two ranks, the calls before the first one that all ranks still
    have are left out, so that the analyser doesn't take them for missing. A receive from any rank
    that waits stays: it is no other rank's.

    wire: for each rank, its records.
    clock_s: the offset from `time.perf_counter()` to the time of day.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    begins = {}  # {channel: index of the first call that all ranks still have}
    for records in wire:
        for channel, seq in {r.channel: r.seq for r in reversed(records)}.items():
            begins[channel] = max(seq, begins.get(channel, 0))
    for rank, records in enumerate(wire):
        known = [r for r in records if r.channel.endswith("?") or r.seq >= begins[r.channel]]
        dump = dump_of(rank, known, clock_s)
        (folder / f"rank_{rank}").write_bytes(pickle.dumps(dump))


def dump_of(rank: int, records: Sequence[Record], clock_s: float) -> dict:
    """Return the dump that the flight recorder of `rank` would write.

    It is a dict: "entries" is a list with a dict for each call, "pg_config" has the groups by name.
    Calls of new_group are left out. A receive from any rank that waits is written as "recv 0<--1",
    in a list "from any", since PyTorch's analyser would look for its partner.

    records: of this rank's calls, in order.
    clock_s: the offset from `time.perf_counter()` to the time of day.
    """
    groups = {}  # {name: (description, ranks)}
    entries, unknown = [], []
    for record in records:
        from_any = record.op == "recv" and record.peer is None
        if record.op == "new_group" or (from_any and record.done is not None):
            continue
        is_message = record.op in MESSAGES
        is_pair = is_message and not from_any
        ranks = tuple(sorted((rank, record.peer))) if is_pair else record.ranks
        world = record.group == "world" and not is_message
        description = "default_pg" if world else "undefined"
        groups[record.channel] = description, ranks
        entry = _entry(record, rank, ranks, clock_s)
        entry["record_id"] = len(entries)
        entry["op_id"] = len(entries) + 1
        entry["process_group"] = record.channel, description
        entry["collective_seq_id"] = entry["p2p_seq_id"] = record.seq + 1
        (unknown if from_any else entries).append(entry)
    config = {}
    for name, (description, ranks) in groups.items():
        config[name] = {"name": name, "desc": description, "ranks": str(list(ranks))}
    dump = {"version": VERSION, "pg_config": config, "pg_status": {}, "entries": entries}
    return dump | {"from any": unknown}


def _entry(record: Record, rank: int, ranks: tuple[int, ...], clock_s: float) -> dict:
    """Return the dump's entry for a call, without its ids and its group, which `dump_of` adds.

    Sizes are numbers of elements, since a record has no shapes. ranks: the members of the group, or
    the two ranks of a message. Calls that no GPU's stream carries are named as Gloo's.
    """
    handed_in, comes_out = numels(record)
    dtype, name = DTYPES.get(record.dtype, record.dtype), NAMES.get(record.op, record.op)
    if record.op in MESSAGES:
        arrow = "->" if record.op == "send" else "<-"
        peer = -1 if record.peer is None else ranks.index(record.peer)
        name += f" {ranks.index(rank)}{arrow}{peer}"
    carrier = "nccl" if record.stream or record.on_stream else "gloo"

    def ns(seconds: float | None) -> int | None:
        return None if seconds is None else int((seconds + clock_s) * 1e9)

    return {
        "frames": [{"name": record.function, "filename": record.file, "line": record.line}],
        "pg_id": 0,
        "profiling_name": f"{carrier}:{name}",
        "is_p2p": record.op in MESSAGES,
        "time_created_ns": ns(record.issued),
        "time_discovered_started_ns": ns(record.started),
        "time_discovered_completed_ns": ns(record.done),
        "duration_ms": None if record.done is None else 1e3 * (record.done - record.issued),
        "input_sizes": [[handed_in]],
        "input_dtypes": [dtype],
        "output_sizes": [[comes_out]],
        "output_dtypes": [dtype],
        "state": "started" if record.done is None else "completed",
        "timeout_ms": 600_000,
        "retired": record.done is not None,
    }
