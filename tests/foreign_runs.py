"""Run the foreign programs and their sabotages under torchrun: python tests/foreign_runs.py.

As a command: run all sabotages, under plain torchrun and under `ddpkit.debug`, and print the table
of docs/debugging.md. Results are kept in a file, so that some of them can be run again.
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from foreign_cases import FOREIGN, PROGRAMS, SABOTAGES, Sabotage

TORCHRUN = "-m", "torch.distributed.run", "--standalone"
# What torchrun and Python say begins so.
NOT_OURS = r"^(?:[WEI]\d{4} |Traceback |\[rank\d+\]|\[ERROR\]|={20}|Exception )"
ERROR = re.compile(r"^(?:\[rank(\d+)\]: ?)?([\w.]*(?:Error|Exception|Interrupt)\b: .*)")
NOISE = "ChildFailedError", "SignalException"  # torchrun's own


@dataclass
class Ran:
    """How a program ended."""

    code: int | None  # None: it didn't, within the limit
    out: str
    err: str
    begun: float  # time.monotonic() of the moment from which on it was certain
    told: float | None  # when the first report began
    failed: float | None  # when the first error of a rank was printed
    ended: float

    def report(self) -> str:
        return report(self.err)

    def error(self) -> tuple[str, str]:
        """(rank, text) of the first error that a rank printed."""
        for line in self.err.splitlines():
            if (found := ERROR.match(line)) and not any(word in line for word in NOISE):
                return found[1] or "?", re.sub(r"\[/\S+\] ", "", found[2])
        return "", ""


def report(err: str) -> str:
    """What ddpkit says in a stderr, without what torchrun and Python say after it."""
    said = re.findall(rf"^ddpkit: (.*?)(?={NOT_OURS}|^ddpkit: |\Z)", err, re.DOTALL | re.MULTILINE)
    return "\n".join(said)


def torchrun(
    folder: Path,
    program: str,
    script: Path,
    *,
    debug: bool,
    limit_s: float,
    arguments=None,
    more=(),
) -> Ran:
    """Run a script as its users do, in `folder`. more: options of torchrun."""
    world_size, usual = PROGRAMS[program]
    command = [sys.executable, *TORCHRUN, f"--nproc-per-node={world_size}", *more]
    command += ["-m", "ddpkit.debug"] if debug else []
    command += [str(script), *(usual if arguments is None else arguments)]
    root = str(FOREIGN.parents[1])
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    lines: list[tuple[float, str]] = []
    out: list[str] = []
    code = None
    begun = time.monotonic()
    with subprocess.Popen(command, cwd=folder, env=environment, **pipes) as process:
        out_reader = threading.Thread(target=lambda: out.append(process.stdout.read()))
        err_reader = threading.Thread(
            target=lambda: lines.extend((time.monotonic(), line) for line in process.stderr)
        )
        out_reader.start()
        err_reader.start()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(limit_s)
            ended = time.monotonic()
        finally:
            for each in family(process):
                with contextlib.suppress(psutil.Error):
                    each.kill()
            out_reader.join()
            err_reader.join()
    told = next((at for at, line in lines if line.startswith("ddpkit: ")), None)
    failed = next((at for at, line in lines if ERROR.match(line)), None)
    moments = [float(path.read_text() or 0) for path in folder.glob("moment.*")]
    begun = max(moments, default=begun)
    err = "".join(line for _, line in lines)
    return Ran(code, "".join(out), err, begun, told, failed, ended)


def family(process: subprocess.Popen) -> list[psutil.Process]:
    """A process that may have ended, and all that it started: torchrun's ranks are no group."""
    try:
        first = psutil.Process(process.pid)
        return [first, *first.children(recursive=True)]
    except psutil.Error:
        return []


def run(sabotage: Sabotage, folder: Path, *, debug: bool, limit_s: float) -> Ran:
    script = folder / f"{sabotage.program}.py"
    script.write_text(sabotage.source(), encoding="utf-8")
    options = {"debug": debug, "limit_s": limit_s, "arguments": sabotage.arguments}
    return torchrun(folder, sabotage.program, script, **options)


# The table


def row(sabotage: Sabotage, side: str, limit_s: float) -> dict:
    """A run as the table needs it. right: whether it ends well and says what the right one says."""
    with tempfile.TemporaryDirectory() as folder:
        ran = run(sabotage, Path(folder), debug=side == "ours", limit_s=limit_s)
    right = False
    if ran.code == 0:
        script = FOREIGN / f"{sabotage.program}.py"
        with tempfile.TemporaryDirectory() as folder:
            other = torchrun(Path(folder), sabotage.program, script, debug=False, limit_s=limit_s)
        right = sorted(ran.out) == sorted(other.out)  # the ranks' lines run into each other
    return asdict(ran) | {"error": ran.error(), "report": ran.report(), "right": right}


def shorten(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


def seconds(ran: dict, at: float) -> str:
    return f"{max(0.0, at - ran['begun']):.1f} s"


def plain_says(ran: dict, limit_s: float) -> str:
    rank, error = ran["error"]
    if ran["code"] is None:
        return f"nothing in {limit_s:.0f} s"
    end = ""
    if ran["code"] == 0:
        end = "ends with code 0" + ("" if ran["right"] else " and other results")
    if error:
        who = f"rank {rank}: " if rank != "?" else ""
        said = f"{who}{shorten(error, 90)} ({seconds(ran, ran['failed'])})"
        return f"{said}, {end}" if end else said
    if end:
        return f"nothing: {end}"
    code, rank = re.findall(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)", ran["err"])[0]
    return f"torchrun: rank {rank} ended with exit code {code} ({seconds(ran, ran['ended'])})"


def ours_says(sabotage: Sabotage, ran: dict) -> str:
    if not ran["report"]:
        return "**no report**" if ran["code"] is not None else "**no report, no end**"
    first = re.split(r"\n\n|\n  ", ran["report"])[0]
    said = f"{shorten(' '.join(first.split()), 140)} ({seconds(ran, ran['told'])})"
    wrong = "; ".join(sabotage.problems(ran["report"]))
    return said + (f" **{wrong}**" if wrong else "")


def table(results: dict, limit_s: float) -> str:
    lines = ["| program | sabotage | plain torchrun | `ddpkit.debug` |", "|---|---|---|---|"]
    for sabotage in SABOTAGES:
        plain, ours = results.get(f"{sabotage}/plain"), results.get(f"{sabotage}/ours")
        cells = [sabotage.program, sabotage.name]
        cells.append(plain_says(plain, limit_s) if plain else "")
        cells.append(ours_says(sabotage, ours) if ours else "")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, required=True, help="a JSON file, read and written")
    parser.add_argument(
        "--only", default="", help="sabotages whose name has this regular expression"
    )
    parser.add_argument("--side", choices=["plain", "ours"], help="one side alone")
    parser.add_argument("--limit", type=float, default=60, help="seconds")
    parser.add_argument("--at-once", type=int, default=1, help="runs at the same time")
    options = parser.parse_args()
    results = json.loads(options.results.read_text()) if options.results.exists() else {}
    sides = [options.side] if options.side else ["plain", "ours"]
    chosen = [s for s in SABOTAGES if re.search(options.only, str(s))]
    wanted = [(sabotage, side) for side in sides for sabotage in chosen]

    def work(each):
        sabotage, side = each
        results[f"{sabotage}/{side}"] = found = row(sabotage, side, options.limit)
        options.results.write_text(json.dumps(results, indent=1))
        ours = side == "ours"
        said = ours_says(sabotage, found) if ours else plain_says(found, options.limit)
        print(f"{side} {sabotage}: {said}", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(options.at_once) as pool:
        list(pool.map(work, wanted))
    print(table(results, options.limit))


if __name__ == "__main__":
    main()
