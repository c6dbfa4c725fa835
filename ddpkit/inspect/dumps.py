"""Read the dumps of a flight recorder: ours, or torch's own, from NCCL on a cluster or from Gloo.

A dump is a pickled dict with the last calls of one rank. There is one file per rank, whose name
ends in the rank's number. Nothing in a file is executed: only plain data is unpickled.
"""

import io
import math
import pickle
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import torch

from ..runtime.board import MESSAGES, Record, Said
from ..runtime.place import is_library
from ..runtime.wording import UNEQUAL
from ..tools.units import name_group
from .flight_recorder import NAMES
from .trace import DTYPES

KNOWN = "2."  # the beginning of all versions that can be read
MOST_CALLS = 2**62  # a call's index must be smaller: the board keeps it in 8 bytes
OUR_NAMES = {theirs: ours for ours, theirs in NAMES.items()}
TORCH_DTYPES = {theirs: ours for ours, theirs in DTYPES.items()}
# Frames that aren't the user's: of torch or Python on another machine, of what wraps torch's
# deprecated functions, of C++ (TORCH_FR_CPP_STACK). A project may lie in a folder named torch.
LIBRARY = re.compile(
    r"[/\\](((site|dist)-packages|pytorch)[/\\]torch[/\\]|typing_extensions\.py$"
    r"|lib[/\\]python3\.\d+[/\\](?!(site|dist)-packages))|\.(cpp|cc|h|hpp)$|^[?<]"
)


class _DataOnly(pickle.Unpickler):
    """An unpickler for lists, dicts, numbers and text.

    UnpicklingError: the pickle needs a class or function, so loading it would execute something.
    """

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it names {module}.{name}, and a dump is plain data")


def read_dumps(folder: str | Path) -> dict[int, dict]:
    """Return the dumps in a folder, {rank: dump}, sorted by rank.

    A dump is the dict that the recorder pickled: "entries" is a list with a dict for each call,
    "pg_config" is {name of a group: a dict with its "ranks"}, and "version" is a text such as
    "2.10". Files whose names don't end in a number are ignored.

    ValueError: there are no dumps, two files for one rank, a file that is no dump, or a version
        that doesn't begin with `KNOWN` ("2.").
    """
    folder = Path(folder)
    files = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        number = re.search(r"(\d+)$", path.name)
        if number and path.is_file():
            other = files.setdefault(int(number[1]), path)
            if other != path:
                twice = f"got {other.name} and {path.name}. Keep those of one run in a folder"
                raise ValueError(f"expected one dump of rank {number[1]}, {twice}.")
    if not files:
        remedy = "Write some with run.flight_recorder(folder), or set TORCH_FR_DUMP_TEMP_FILE."
        got = "which has none" if folder.is_dir() else "which is no folder"
        expected = f"expected a folder of dumps, rank_0, rank_1, ..., got {folder}, {got}"
        raise ValueError(f"{expected}. {remedy}")
    return {rank: _read(path) for rank, path in sorted(files.items())}


def _read(path: Path) -> dict:
    try:
        dump = _DataOnly(io.BytesIO(path.read_bytes())).load()
    except Exception as error:  # a file that is no pickle raises anything
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


def members_of(group: dict) -> list[int]:
    """Return the global ranks of a group's members. group: a value of a dump's pg_config."""
    return list(_numbers(str(group["ranks"])))


@lru_cache(4096)  # a cluster's many calls share a few groups
def _numbers(text: str) -> tuple[int, ...]:
    """Return the whole numbers in a text, such as "[0, 1, 2]"."""
    return tuple(map(int, re.findall(r"\d+", text)))


def records_of(dump: dict, everybody: list[int]) -> Iterator[Record]:
    """Yield the calls in a dump as records, in the order in which they were made.

    A record's `done` is 1.0 (not a time) if the call is complete, and None if it is open.
    Calls in a batch (batch_isend_irecv, coalescing managers) share one number. A further entry ends
    the batch, and only this one has a state that says whether the calls are complete; it yields no
    record of its own. The beginning of a batch may be missing, since a recorder forgets old calls.

    dump: a dict of one rank, with "entries" and "pg_config".
    everybody: the ranks of the world, for groups whose members the dump leaves out.
    ValueError: see `_record`. KeyError and the like: an entry lacks a field, or has a wrong one.
    """
    batches: dict[tuple, list[dict]] = {}
    for entry in [*dump["entries"], *dump.get("from any", ())]:  # the latter only in our dumps
        is_message = entry.get("is_p2p", False)
        seq = entry["p2p_seq_id" if is_message else "collective_seq_id"]
        batches.setdefault((entry["process_group"][0], is_message, seq), []).append(entry)
    for batch in batches.values():
        end = batch[-1]
        done = end["state"] == "completed"
        on_cpu = end["profiling_name"].startswith("gloo:")
        if on_cpu:  # its recorder has no "completed"
            done = end["retired"]
        ends_a_batch = end["profiling_name"].endswith("coalesced") and not end["input_sizes"]
        if ends_a_batch and end is dump["entries"][0] and end.get("record_id") != 0:
            continue  # its calls are forgotten
        parts = batch[:-1] or batch
        for place, entry in enumerate(parts, 1 - len(parts)):  # from the end, which is there
            part = f" part {place}" if place else ""
            record = _record(entry, part, dump["pg_config"], everybody)
            record.done = 1.0 if done else None
            record.started = record.issued if on_cpu else None  # None: on a GPU's stream
            yield record


def _record(entry: dict, part: str, groups: dict, everybody: list[int]) -> Record:
    """Return the record of one call, an entry of a dump.

    part: added to the record's channel (a name for the group), " part -1" for example, to tell
        apart the calls of a batch, which share one number. A message's channel goes without.
    groups: the dump's pg_config, {name of a group: a dict with its "ranks"}.
    everybody: the ranks of the world.
    Gloo's recorder leaves out the members. Then the group "0" is the world, and the `ranks` of
    another group's collective are ().
    ValueError: a collective's number is less than 1 or more than `MOST_CALLS`.
    """
    name, _, peers = entry["profiling_name"].partition(":")[2].partition(" ")
    group = entry["process_group"][0]
    members = tuple(members_of(groups[group])) if group in groups else ()
    if not members and (group == "0" or name in MESSAGES):
        members = tuple(everybody)
    out = name in ("recv", "scatter")  # in a scatter, only the root has an input
    sizes, dtypes = (entry[f"{'out' if out else 'in'}put_{of}"] for of in ("sizes", "dtypes"))
    dtype = TORCH_DTYPES.get(dtypes[0], dtypes[0]) if dtypes else ""
    shape = "×".join(map(str, sizes[0])) if len(sizes) == 1 else ""
    numel = sum(map(math.prod, sizes))
    name = OUR_NAMES.get(name, name)
    words = [f"{shape or numel} {dtype}"] if dtype else []
    if members and len(members) < len(everybody) and name not in MESSAGES:
        words.append(name_group(members))
    frames = entry.get("frames") or [{"name": "?", "filename": "?", "line": 0}]
    theirs = (f for f in frames if not is_library(f["filename"]))
    frame = next((f for f in theirs if not LIBRARY.search(f["filename"])), frames[0])
    channel = group + part
    fingerprint = f"{name} {'' if name.startswith(UNEQUAL) else numel} {dtype}"
    label = name_group(members) if members else f'group "{group}"'
    peer = None
    if name in MESSAGES:  # "0->1" or "1<-0", as places in the group; in ours -1 is any rank
        me, other = map(int, re.split("->|<-", peers))
        fingerprint = ""
        if other >= 0:
            peer = members[other]
            members = (members[me], peer) if name == "send" else (peer, members[me])
            channel = f"{group} {members[0]}>{members[1]}"
            fingerprint = f"{numel} {dtype}"
            label = name_group(members)
        words.append(f"{'dst' if name == 'send' else 'src'}={'any' if peer is None else peer}")
        if ours := re.search(r" (?:\d+>\d+:)?(\d+)\??$", group):  # as on the board, with the tag
            channel = group
            words += [f"tag={ours[1]}"] if ours[1] != "0" else []
    said = Said(
        op=name,
        group="world" if len(members) == len(everybody) else label,
        ranks=members,
        channel=channel,
        fingerprint=fingerprint,
        detail=", ".join(words),
        bytes=numel * getattr(getattr(torch, dtype, None), "itemsize", 1),
        peer=peer,
        shape=(),
        dtype=dtype,
        file=frame["filename"],
        line=int(frame["line"]),
        function=str(frame["name"]),
    )
    seq = int(entry["collective_seq_id"]) - 1  # counts from 1; messages are numbered later
    if not 0 <= seq < MOST_CALLS and name not in MESSAGES:
        raise ValueError(f"a call has the number {seq + 1}")
    return Record(said, seq, float(entry["time_created_ns"] or 0) / 1e9)
