"""Explain torchrun's logs: which rank fell first and why, and which ranks only followed.

torchrun's own summary, `ChildFailedError`, names the rank whose exit it noticed first, which is
often a rank that only lost its connection. Here tracebacks, exit codes and torchrun's messages are
read together, from the text of a terminal or from the files of `torchrun --log-dir`.
"""

import math
import re
import signal
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
MACHINES_S = 2.0  # machines of one run write later than this before another's first file
TORCHRUN = re.compile(r"torch.distributed.elastic|ChildFailedError|^Traceback|\[rank\d+\]", re.M)
PREFIX = re.compile(r"\[([A-Za-z_]+)(\d+)\]:\s?")  # torch's own, [rank5], and that of --tee
HEADER = re.compile(r"\[rank\d+\]: Traceback")
OWN = re.compile(r"^\[rank(\d+)\]:", re.M)  # in a rank's file; in --tee's output after its prefix
TEED = re.compile(r"^\[(?!rank)[A-Za-z_]+(\d+)\]:\s?\[rank(\d+)\]:", re.M)
FRAME = re.compile(r'\s+File "(.*?)", line (\d+), in (.*)')
GROUP = re.compile(r"\s+[|+] ?")  # before the lines of an ExceptionGroup
ERROR = re.compile(r"([A-Za-z_][\w.<>]*)(?:: (.*))?$")  # a class in a function f: f.<locals>.Error
COLOUR = re.compile(r"\x1b\[[\d;]*[A-Za-z]")
SUMMARY = re.compile(r"rank +: (\d+) \(local_rank: (\d+)\)\n.*?exitcode +: (-?\d+) \(pid: (\d+)")
RESTARTED = re.compile(r"failed \(exitcode: (-\d+)\) local_rank: (\d+) \(pid")  # it sums up nothing
ATTEMPT = re.compile(r" (\d+) torch/distributed/\S+ failed \(exitcode: .*\n")  # torchrun's own pid
SIGNALLED = re.compile(r"SignalException: Process \d+ got signal: (\d+)")  # torchrun itself
FORCED = re.compile(r"Unable to shutdown process (\d+) via")  # after 30 s, torchrun sends SIGKILL
WATCHDOG = re.compile(  # [rank5] is its number in the world, [Rank 1] that in its group
    r"(?:\[rank(\d+)\]:\[[^][\n]*\] )?\[Rank (\d+)\][^\n[]*Watchdog caught collective operation "
    r"timeout[^\n[]*OpType=(\w+)"
)
BY_TORCHRUN = -15  # SIGTERM, by which torchrun ends the ranks that are left
KILLED = -9  # SIGKILL


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
    newest: the attempt that was read, if there are older ones, which weren't; otherwise "".
    ended: the signal that ended torchrun itself, such as "SIGTERM", or "".
    """

    text: str
    failures: dict[int, Failure] = field(default_factory=dict)
    codes: dict[int, int] = field(default_factory=dict)
    waited: dict[int, str] = field(default_factory=dict)
    unnamed: list[Failure] = field(default_factory=list)
    source: dict[tuple[str, int], str] = field(default_factory=dict)
    local: bool = False
    newest: str = ""
    ended: str = ""


def find_logs(path: Path) -> list[Path]:
    """Return the log files to read: [path] if it is a file, otherwise those in a folder.

    In a folder these are the files std*.log at any depth, or, if there are none, *.log directly in
    it. If torchrun started the ranks several times, the files of the earlier attempts are left out,
    and so are those of earlier runs. The list is empty if there are none.
    """
    if path.is_file():
        return [path]
    found = sorted(path.rglob("std*.log")) or sorted(path.glob("*.log"))
    attempts = filter(None, map(_attempt, found))
    last = {a.parent: a for a in sorted(attempts, key=lambda a: int(a.name[8:]))}  # of each run
    if not last:
        return found
    written = dict.fromkeys(last.values(), 0.0)  # {attempt: the time of its last line}
    for file in found:
        if _attempt(file) in written:
            written[_attempt(file)] = max(written[_attempt(file)], file.stat().st_mtime)
    newest = max(written, key=lambda attempt: written[attempt])
    began = newest.stat().st_mtime - MACHINES_S
    run = newest.parent.name[:-9]  # of its machines: after it, torchrun puts _ and 8 letters
    kept = [a for a in written if written[a] >= began and a.parent.name[:-9] == run]
    return [file for file in found if _attempt(file) in (None, *kept)]


def _attempt(file: Path) -> Path | None:
    """Return the folder of --log-dir's in which a file is, such as RUN/attempt_0, or None."""
    return next((f for f in file.absolute().parents if re.fullmatch(r"attempt_\d+", f.name)), None)


def read_log(files: list[Path]) -> Log:
    """Read one run's log files together, and return the evidence in them as a `Log`.

    Of each file, only the last `MOST_BYTES` are read. Nothing says in which order the lines of
    several files were written: then all failures have the same `at`, infinity.

    ValueError: nothing in the files is torchrun's, and there is no traceback.
    """
    texts = {file: _text(file) for file in files}
    read = {attempt for file in files if (attempt := _attempt(file))}
    there = {a for folder in read for a in folder.parent.parent.glob("*/attempt_*")} - read
    began = min((folder.stat().st_mtime for folder in read), default=0.0)
    older = any(folder.stat().st_mtime < began for folder in there)
    newest = " and ".join(sorted(f"{a.parent.name}/{a.name}" for a in read)) if older else ""
    for file, text in texts.items():
        texts[file] = _last_attempt(text)
        newest = newest or ("the last attempt" if texts[file] != text else "")
    log = Log("".join(texts.values()), newest=newest)
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
    for number in SIGNALLED.findall(log.text):
        known = int(number) in iter(signal.Signals)
        log.ended = signal.Signals(int(number)).name if known else f"signal {number}"
    forced = FORCED.findall(log.text)
    for rank, _, code, pid in SUMMARY.findall(log.text):
        log.codes[int(rank)] = BY_TORCHRUN if pid in forced else int(code)
    log.waited = {int(world or rank): op.lower() for world, rank, op in WATCHDOG.findall(log.text)}
    return log


def _text(file: Path) -> str:
    """Return the text of a file, or of its last `MOST_BYTES`, without a terminal's colours."""
    with open(file, "rb") as opened:
        opened.seek(max(0, file.stat().st_size - MOST_BYTES))
        text = opened.read().decode(errors="replace")
    text = COLOUR.sub("", text.replace("\r\n", "\n"))
    return HEADER.sub(r"\n\g<0>", text)  # after a progress bar, there is no newline


def _last_attempt(text: str) -> str:
    """Return a text from the beginning of the last attempt that failed.

    A torchrun says of each attempt once that it failed, and of the last one, which ranks did. There
    may be one for each machine, with the same process id in containers.
    """
    failed = list(ATTEMPT.finditer(text))
    ends = [found.end() for found in failed if found[1] == failed[-1][1]]
    if len(ends) < 2 or "ChildFailedError" in text[ends[-2] : failed[-1].start()]:
        return text
    return text[ends[-2] :]


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
    pairs = [(rank, local) for rank, local, *_ in SUMMARY.findall(text)]
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
    guessed = set()  # ranks that are local ones, taken as they are
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
            guessed.update([] if firsts else [rank])
        lines_of.setdefault(rank, []).append((number, line))
    for rank, lines in lines_of.items():
        for failure in _tracebacks(lines, log.source):
            if rank is not None:
                log.failures[rank] = failure
                log.local = log.local or rank in guessed
            elif failure.kind not in ("ChildFailedError", "SignalException"):  # torchrun's own
                log.unnamed.append(failure)


def _tracebacks(lines: list[tuple[int, str]], source: dict) -> Iterator[Failure]:
    """Yield a `Failure` for each traceback in the lines of one rank, with its message's first line.

    lines: (number in its file, text) of each; the number is the failure's `at`, instead of a time.
    source: {(file, line): text of the line}, to which the lines that a traceback shows are added.
    """
    frames = None
    in_group = False
    for number, line in lines:
        in_group = "Exception Group Traceback" in line or (in_group and GROUP.match(line))
        line = GROUP.sub("", line, count=1) if in_group else line
        if line.endswith("Traceback (most recent call last):"):  # perhaps after a progress bar
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
    fallen = dict(sorted(log.codes.items()))
    for rank, how in log.failures.items():
        by_torchrun = fallen[rank] == BY_TORCHRUN if rank in fallen else log.ended
        if _raised(log, rank) or not by_torchrun:  # otherwise it had caught what it raised
            fallen[rank] = how
    nameless = [r for r, how in fallen.items() if how == 1 and f"[rank{r}]:" not in log.text]
    if len(nameless) == len(log.unnamed) == 1:  # it was joining: its lines have no rank in front
        fallen[nameless[0]] = log.unnamed[0]
    own = {rank: how for rank, how in fallen.items() if not _only_followed(log, rank, how)}
    meeting = explain_rendezvous(log.text)
    if meeting and not _restarted(log) and all(map(_did_not_meet, own.values())):
        return meeting
    if own:
        own = dict(sorted(own.items(), key=lambda item: item[1] != KILLED))  # due to no other rank
        culprit, alike = first_to_fall(own)
        how = own[culprit]
        if isinstance(how, int):
            alike = [rank for rank in own if own[rank] == how and rank != culprit]
        lines = list(_how_it_fell(log, culprit, how))
        if alike:
            lines.append(f"{name_ranks(alike).capitalize()} failed in the same way.")
        first = [culprit, *alike]
        rivals = [rank for rank in sorted(own) if rank not in first]
        which = "exit codes" if isinstance(how, int) else "several files"
        known = how == KILLED if isinstance(how, int) else how.at < math.inf
        if rivals and not known:
            lines.append(f"Or one of these fell first: {which} don't say in which order.")
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
    if log.newest:
        lines.append(f"Left out is what is older than {log.newest}.")
    return "\n".join(lines)


def _only_followed(log: Log, rank: int, how: Failure | int) -> bool:
    """Return whether a rank fell only because of another.

    Such a rank lost its connection, was ended by torchrun's signal, or by NCCL's watchdog.
    how: its last traceback or its exit code.
    """
    interrupted = log.ended and getattr(how, "kind", "") == "KeyboardInterrupt"
    return interrupted or lost_peer(how) or how == BY_TORCHRUN or rank in log.waited


def _raised(log: Log, rank: int) -> bool:
    """Return whether a traceback surely ended a rank: torch puts "[rank5]:" before such a one."""
    # It does so from when the rank has joined, and not before one that was caught and logged.
    return bool(re.search(rf"\[rank{rank}\]:[ +]*(Exception Group )?Traceback", log.text))


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
    whose rank isn't known counts as its, perhaps: another may have caught it.
    """
    code = log.codes.get(rank)
    joined = f"[rank{rank}]:" in log.text
    if how == 1 and log.unnamed and not joined:  # its traceback has no prefix: it was joining
        how = log.unnamed[0]
    perhaps = not _raised(log, rank) and (joined or how in log.unnamed)
    said = _fell(rank, how)
    yield said.replace(" raised ", " perhaps raised ", 1) if perhaps else said
    if isinstance(how, Failure):
        yield from (f"  {line}" for line in _lines(log, how))
        if perhaps:
            yield "  Or that was caught: torch put no rank before this traceback."
    if code is not None and code < 0 and isinstance(how, Failure):
        yield f"  Then {_fell(rank, code)}"
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
    return f"R{_fell(rank, how)[1:]}"


def _fell(rank: int | str, how: Failure | int) -> str:
    """Return in words how a rank fell; a log can't tell whether an exit came amid its work."""
    exited = isinstance(how, int) and how >= 0
    return f"rank {rank} exited with code {how}." if exited else how_it_fell(rank, how)


def _no_culprit(log: Log, fallen: dict) -> Iterator[str]:
    """Yield lines on what is known if every rank in the log fell only because of another.

    fallen: {rank: its last traceback or its exit code}.
    """
    for rank, code in _restarted(log)[:1]:
        yield how_it_fell(f"{rank} of this machine", code)
        return
    if log.waited:
        ops = " and ".join(sorted(set(log.waited.values())))
        who = name_ranks(sorted(log.waited)) if set(fallen).difference(log.waited) else ""
        yield f"{who or 'every rank in this log'} waited in {ops}, until NCCL's watchdog ended it."
        yield "  Write dumps (TORCH_NCCL_TRACE_BUFFER_SIZE=2000), and explain their folder."
        return
    if log.ended:
        yield f"torchrun itself got {log.ended}, and ended its ranks."
        yield "  A scheduler sent it, at a time limit, or a person did."
        return
    for how in log.unnamed:
        if not (log.codes or lost_peer(how)):
            yield from _how_it_fell(log, "?", how)
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
