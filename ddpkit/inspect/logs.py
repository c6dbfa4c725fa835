"""Explain torchrun's logs: which rank fell first and why, and which ranks only followed.

torchrun's own summary, `ChildFailedError`, names the rank whose exit it noticed first, which is
often a rank that only lost its connection. Here tracebacks, exit codes and torchrun's messages are
read together, from the text of a terminal or from the files of `torchrun --log-dir`.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..runtime.falls import (
    FAULT,
    Failure,
    explain_rendezvous,
    first_to_fall,
    how_it_fell,
    lost_peer,
)
from ..runtime.place import is_installed, is_library, short_path
from ..tools.units import name_ranks
from .dumps import LIBRARY

MOST_BYTES = 50_000_000  # of a log file that are read, from its end
TORCHRUN = re.compile(r"torch.distributed.elastic|ChildFailedError|^Traceback|\[rank\d+\]", re.M)
PREFIX = re.compile(r"\[([A-Za-z_]+)(\d+)\]:\s?")  # torch's own, [rank5], and that of --tee
OWN = re.compile(r"^\[rank(\d+)\]:", re.M)  # in a rank's file; in --tee's output after its prefix
TEED = re.compile(r"^\[(?!rank)[A-Za-z_]+(\d+)\]:\s?\[rank(\d+)\]:", re.M)
FRAME = re.compile(r'\s+File "(.*?)", line (\d+), in (.*)')
ERROR = re.compile(r"([A-Za-z_][\w.]*)(?:: (.*))?$")
SUMMARY = re.compile(r"rank +: (\d+) \(local_rank: (\d+)\)\n.*?exitcode +: (-?\d+) \(pid")
RESTARTED = re.compile(
    r"failed \(exitcode: (-\d+)\) local_rank: (\d+) \(pid"
)  # its log: no summary
WATCHDOG = re.compile(r"\[Rank (\d+)\].*Watchdog caught collective operation timeout.*OpType=(\w+)")
BY_TORCHRUN = -15  # SIGTERM, by which torchrun ends the ranks that are left


@dataclass
class Log:
    """The evidence in a torchrun log, by rank.

    text: what was read of all files.
    failures: {rank: its last traceback}.
    codes: {rank: its exit code, as torchrun's summary has it}; negative if a signal ended it.
    waited: {rank: the collective call in which NCCL's watchdog ended it, such as "allreduce"}.
    unnamed: tracebacks whose rank isn't known.
    source: {(file, line): the text of the line}, as tracebacks show it.
    local: whether ranks are counted on their machine, since nothing says which are its ranks.
    """

    text: str
    failures: dict[int, Failure] = field(default_factory=dict)
    codes: dict[int, int] = field(default_factory=dict)
    waited: dict[int, str] = field(default_factory=dict)
    unnamed: list[Failure] = field(default_factory=list)
    source: dict[tuple[str, int], str] = field(default_factory=dict)
    local: bool = False


def find_logs(path: Path) -> list[Path]:
    """Return the log files to read: [path] if it is a file, otherwise those in a folder.

    In a folder these are the files std*.log at any depth, or, if there are none, *.log directly in
    it. If torchrun started the ranks several times, the files of the earlier attempts are left out.
    The list is empty if there are none.
    """
    if path.is_file():
        return [path]
    found = sorted(path.rglob("std*.log")) or sorted(path.glob("*.log"))
    attempts = [re.search(r"attempt_(\d+)", str(file)) for file in found]
    last = max((int(attempt[1]) for attempt in attempts if attempt), default=None)
    return [f for f, a in zip(found, attempts, strict=True) if not a or int(a[1]) == last]


def read_log(files: list[Path]) -> Log:
    """Read one run's log files together, and return the evidence in them as a `Log`.

    Of each file, only the last `MOST_BYTES` are read. Nothing says in which order the lines of
    several files were written: then all failures have the same `at`, infinity.

    ValueError: nothing in the files is torchrun's, and there is no traceback.
    """
    texts = {file: _text(file) for file in files}
    log = Log("".join(texts.values()))
    firsts = {}  # {machine: the numbers that its lines give its first rank, at best one}
    for file, text in texts.items():
        machine, owner = _owner(file)
        firsts.setdefault(machine, set()).update(_first_ranks(text, owner))
    for file, text in texts.items():
        machine, owner = _owner(file)
        _read_tracebacks(log, text, owner, firsts[machine])
    if len(files) > 1:
        for failure in [*log.failures.values(), *log.unnamed]:
            failure.at = math.inf
    if not TORCHRUN.search(log.text):
        names = ", ".join(file.name for file in files) or "no log"
        raise ValueError(f"expected a log of torchrun's, or a folder of dumps, got {names}")
    log.codes = {int(rank): int(code) for rank, _, code in SUMMARY.findall(log.text)}
    log.waited = {int(rank): op.lower() for rank, op in WATCHDOG.findall(log.text)}
    return log


def _text(file: Path) -> str:
    """Return the text of a file, or of its last `MOST_BYTES`."""
    with open(file, "rb") as opened:
        opened.seek(max(0, file.stat().st_size - MOST_BYTES))
        return opened.read().decode(errors="replace")


def _owner(file: Path) -> tuple[Path, int | None]:
    """Return (a path that stands for a file's machine, the local rank that it belongs to or None).

    A file std*.log belongs to the local rank that its folder is named after, as in --log-dir.
    """
    if file.name.startswith("std") and file.parent.name.isdigit():
        return file.parent.parent, int(file.parent.name)
    return file, None


def _first_ranks(text: str, owner: int | None) -> set[int]:
    """Return the numbers in the world that a text gives the first rank of its machine.

    It gives one wherever it has a rank's number in the world and on the machine: in torchrun's
    summary, before a line of --tee, or before one in a file of the local rank `owner`. They differ
    if the text is of several machines.
    """
    pairs = [(rank, local) for rank, local, _ in SUMMARY.findall(text)]
    pairs += [(rank, local) for local, rank in TEED.findall(text)]
    if owner is not None:
        pairs += [(rank, owner) for rank in OWN.findall(text)]
    return {int(rank) - int(local) for rank, local in pairs}


def _read_tracebacks(log: Log, text: str, owner: int | None, firsts: set[int]) -> None:
    """Find the tracebacks in a text and put them into `log`: of each rank the last one.

    Ranks write at the same time, so each rank's lines are put together first, by the rank that
    stands before each line: "[rank5]:" or, of --tee, the local "[default1]:". Tracebacks whose rank
    isn't known are appended to `log.unnamed`, except torchrun's own.

    owner: the local rank of lines without such a prefix, or None if it isn't known.
    firsts: the numbers that the first rank of this machine has in the world. With several of them,
        the ranks of local ones aren't known. With none, these are taken as they are, which
        `log.local` then says.
    """
    lines_of: dict[int | None, list[tuple[int, str]]] = {}
    for number, line in enumerate(text.splitlines()):
        rank, local = None, owner
        while prefix := PREFIX.match(line):  # --tee's prefix, then torch's
            if prefix[1] == "rank":
                rank = int(prefix[2])
            else:
                local = int(prefix[2])
            line = line[prefix.end() :]
        if rank is None and local is not None and len(firsts) < 2:
            rank = local + sum(firsts)
            log.local = log.local or not firsts
        lines_of.setdefault(rank, []).append((number, line))
    for rank, lines in lines_of.items():
        for failure in _tracebacks(lines, log.source):
            if rank is not None:
                log.failures[rank] = failure
            elif failure.kind != "ChildFailedError":  # torchrun's own
                log.unnamed.append(failure)


def _tracebacks(lines: list[tuple[int, str]], source: dict) -> Iterator[Failure]:
    """Yield a `Failure` for each traceback in the lines of one rank, with its message's first line.

    lines: (number in its file, text) of each; the number is the failure's `at`, instead of a time.
    source: {(file, line): text of the line}, to which the lines that a traceback shows are added.
    """
    frames = None
    for number, line in lines:
        if line.startswith("Traceback (most recent call last)"):
            frames = []
        elif frames is None:
            continue
        elif frame := FRAME.match(line):
            frames.append((frame[1], int(frame[2]), frame[3]))
        elif line.startswith(" "):
            if frames and line.strip(" ^~"):
                source.setdefault(frames[-1][:2], line.strip())
        else:
            if error := ERROR.match(line):
                kind = error[1].rpartition(".")[2]
                yield Failure(kind, error[2] or "", frames, float(number))
            frames = None


def explain_log(log: Log) -> str:
    """Return a text: which rank fell first, how and on which line, what became of the others.

    If several ranks may have, since nothing says in which order they fell, it names them all.
    If the ranks didn't find each other, it says only that, and what to check.
    """
    fallen = {**log.codes, **log.failures}
    nameless = [rank for rank, how in fallen.items() if how == 1]
    if len(nameless) == len(log.unnamed) == 1:  # it was joining: its lines have no rank in front
        fallen[nameless[0]] = log.unnamed[0]
    own = {rank: how for rank, how in fallen.items() if not _only_followed(log, rank, how)}
    meeting = explain_rendezvous(log.text)
    if meeting and not _restarted(log) and all(map(_did_not_meet, own.values())):
        return meeting
    if own:
        culprit, alike = first_to_fall(own)
        lines = list(_how_it_fell(log, culprit, own[culprit]))
        if alike:
            lines.append(f"{name_ranks(alike).capitalize()} failed in the same way.")
        first = [culprit, *alike]
        rivals = [rank for rank in sorted(own) if rank not in first]
        if rivals and getattr(own[culprit], "at", 0.0) == math.inf:
            lines.append("Or one of these fell first: several files don't say in which order.")
            lines += [f"  {_how_it_followed(log, rank, own[rank], None)}" for rank in rivals]
            first += rivals
            culprit = None
    else:
        culprit, first = None, []
        lines = list(_no_culprit(log, fallen))
    others = [rank for rank in sorted(fallen) if rank not in first]
    if others:
        lines.append("The others fell because of it:" if own else "The ranks in this log:")
    for rank in others:
        lines.append(f"  {_how_it_followed(log, rank, fallen[rank], culprit)}")
    if log.local:
        lines.append("Ranks are counted on their machine here: no line has those of the world.")
    return "\n".join(lines)


def _only_followed(log: Log, rank: int, how: Failure | int) -> bool:
    """Return whether a rank fell only because of another.

    Such a rank lost its connection, was ended by torchrun's SIGTERM, or by NCCL's watchdog.

    how: its last traceback or its exit code.
    """
    return lost_peer(how) or how == BY_TORCHRUN or rank in log.waited


def _restarted(log: Log) -> list[tuple[str, int]]:
    """Return (local rank, exit code) of ranks that a signal killed, if torchrun then began again.

    SIGTERM doesn't count. The sign of a new beginning is that the log has no summary; otherwise [].
    """
    killed = [(rank, int(code)) for code, rank in RESTARTED.findall(log.text)]
    others = [(rank, code) for rank, code in killed if code != BY_TORCHRUN]
    return [] if log.codes else others  # a run that went on is summed up nowhere


def _did_not_meet(how: Failure | int) -> bool:
    """Return whether a rank may have fallen because the ranks didn't find each other.

    A traceback has to say so; an exit code has to be 1.
    """
    return bool(explain_rendezvous(how.message)) if isinstance(how, Failure) else how == 1


def _how_it_fell(log: Log, rank: int, how: Failure | int) -> Iterator[str]:
    """Yield lines on how the rank that fell first did so: its error, the user's lines, the signal.

    how: its last traceback or its exit code. With code 1 and no traceback of its own, the first one
    whose rank isn't known counts as its.
    """
    code = log.codes.get(rank)
    if how == 1 and log.unnamed:  # its traceback has no prefix: it failed before it joined
        how = log.unnamed[0]
    yield how_it_fell(rank, how)
    if isinstance(how, Failure):
        yield from (f"  {line}" for line in _lines(log, how))
    if code is not None and code < 0 and isinstance(how, Failure):
        yield f"  Then {how_it_fell(rank, code)}"
    if code == -6:
        faults = [line.strip() for line in log.text.splitlines() if FAULT.search(line)]
        yield from (f"  {line}" for line in faults[:1])


def _how_it_followed(log: Log, rank: int, how: Failure | int, culprit: int | None) -> str:
    """Return a line on what became of a rank that didn't fall first.

    how: its last traceback or its exit code. culprit: the rank that fell first, None if unknown.
    """
    because = "" if culprit is None else f", because of rank {culprit}"
    if rank in log.waited:
        return f"Rank {rank} waited in {log.waited[rank]} until NCCL's watchdog ended it."
    if how == BY_TORCHRUN:
        return f"Rank {rank} was ended by torchrun, by SIGTERM{because}."
    if lost_peer(how):
        *_, line = _lines(log, how) or ["?"]
        return f"Rank {rank} lost its connection to another rank, {line}"
    return f"R{how_it_fell(rank, how)[1:]}"


def _no_culprit(log: Log, fallen: dict) -> Iterator[str]:
    """Yield lines on what is known if every rank in the log fell only because of another.

    fallen: {rank: its last traceback or its exit code}.
    """
    for rank, code in _restarted(log)[:1]:
        yield how_it_fell(f"{rank} of this machine", code)
        return
    if log.waited:
        ops = " and ".join(sorted(set(log.waited.values())))
        yield f"every rank in this log waited in {ops}, until NCCL's watchdog ended it."
        yield "  Write dumps (TORCH_NCCL_TRACE_BUFFER_SIZE=2000), and explain their folder."
        return
    silent = sorted(set(range(max(fallen, default=-1) + 1)).difference(fallen))
    names = f", perhaps {name_ranks(silent)}," if silent else ""
    yield "no rank in this log fell by itself."
    yield f"  A rank that isn't listed{names} left with code 0 while these still waited for it, or"
    yield "  the log of another machine has the cause."


def _lines(log: Log, how: Failure) -> list[str]:
    """Return the user's own frames of a failure as lines, the outermost first.

    A line is like 'train.py:7 in step: the text of the line'. The text is left out where the log
    doesn't show it. If no frame is the user's own, those of installed packages other than torch are
    returned, and if there are none, the innermost.
    """
    own = [f for f in how.frames if not is_library(f[0]) and not LIBRARY.search(f[0])]
    own = [f for f in own if not is_installed(f[0])] or own or how.frames[-1:]
    lines = []
    for file, line, function in own:
        where = f"{short_path(file)}:{line}" + ("" if function == "<module>" else f" in {function}")
        text = log.source.get((file, line))
        lines.append(f"{where}: {text}" if text else where)
    return lines
