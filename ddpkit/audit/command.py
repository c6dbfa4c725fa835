"""Is my script on N ranks the script on one? Neither is changed.

    python -m ddpkit.audit train.py --world-size 3              # one script, on 1 and on 3 ranks
    python -m ddpkit.audit serial.py parallel.py --world-size 3 # two scripts
    python -m ddpkit.audit train.py --world-size 3 -- --lr 0.1  # after --: the script's arguments
    ... --serial-args "--batch 96" -- --batch 32    # other arguments for the run on one rank

It compares gradients and parameters in the first --steps updates. Both runs must begin alike and
use the same samples in each step, whatever the number of ranks. For scripts that don't: --seed 0
seeds them, alike on all ranks; --ranks-samples feeds the run on one rank what the ranks fed to
their models; --ranks-parameters gives it the weights that they began with; --apart gives each run a
folder of its own, with copies of the files of this one (of 100 MB or more: with links to them), so
that none loads a file that another made. All runs but a separate serial script's are under torchrun
and `ddpkit.debug`, which explains hangs.
Exit code: 0 the same training; 1 not the same; 2 undecided, or no optimizer stepped, or a run
failed, for a reason that is printed.
"""

import argparse
import json
import os
import pickle
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from itertools import chain
from pathlib import Path

from torch import Tensor

from . import script as runner
from .compare import compare, with_names
from .report import Report
from .samples import Rows
from .tape import Tape, plain_name

LOOK_S = 0.1
GRACE_S = 5.0  # for torchrun to end its ranks
LINES = 20  # that are shown of a failed script's output
SHOWN = 300  # characters of an error that may name thousands of files
LARGE = 100_000_000  # bytes: a file from here on is linked, not copied
TORCHRUN = re.compile(r"[EWI]\d{4} |Traceback ")  # how its log, or its traceback, begins


class CannotTell(Exception):
    """A reason why the runs can't be compared, such as a script that failed: exit code 2."""


def parse(arguments: list[str]) -> argparse.Namespace:
    own, dashes, after = arguments, False, []
    if "--" in arguments:
        at = arguments.index("--")
        own, dashes, after = arguments[:at], True, arguments[at + 1 :]
    says = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m ddpkit.audit", description=says)
    parser.add_argument("serial", metavar="SCRIPT", help="what trains on one rank")
    parser.add_argument("parallel", nargs="?", help="what trains on several, if it is another")
    parser.add_argument("--world-size", type=int, default=3, help="ranks of the parallel run")
    parser.add_argument("--steps", type=int, default=3, help="updates to compare")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each run")
    parser.add_argument("--stop", action="store_true", help="end the runs after these steps")
    parser.add_argument("--seed", type=int, help="of random numbers, before the script begins")
    samples = "the run on one rank uses the samples of the ranks"
    parser.add_argument("--ranks-samples", action="store_true", help=samples)
    begin = "the run on one rank begins with the parameters of the ranks, by name"
    parser.add_argument("--ranks-parameters", action="store_true", help=begin)
    alone = "arguments of the run on one rank, if they aren't the same, in quotes"
    parser.add_argument("--serial-args", type=shlex.split, metavar="ARGS", help=alone)
    rename = "a parameter of the parallel model, and what it is called in the serial one"
    parser.add_argument("--rename", action="append", default=[], metavar="NAME=NAME", help=rename)
    apart = "each run in a folder of its own, with copies of what is here"
    parser.add_argument("--apart", action="store_true", help=apart)
    parser.add_argument("--no-sgd", action="store_true", help="with the script's optimizer only")
    options = parser.parse_args(own)
    options.parallel = options.parallel or options.serial
    if not all(pair.count("=") == 1 for pair in options.rename):
        parser.error(f"expected --rename NAME=NAME, got {' '.join(options.rename)}")
    options.rename = dict(map(plain_name, pair.split("=")) for pair in options.rename)
    options.arguments = after if dashes else []
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        check(options)
        report = audit(options)
    except CannotTell as reason:
        print(f"ddpkit.audit: {reason}", file=sys.stderr)
        return 2
    print(report)
    if report.undecided or report.steps == 0:
        return 2
    return 0 if report.fine else 1


def check(options: argparse.Namespace) -> None:
    for path in (options.serial, options.parallel):
        if not Path(path).is_file():
            raise CannotTell(f"expected a script, got {path}: there is no such file")
    for name in ("world_size", "steps"):
        if getattr(options, name) < 1:
            raise CannotTell(f"expected --{name.replace('_', '-')} of 1 or more")


def audit(options: argparse.Namespace) -> Report:
    """Run both scripts, compare what their tapes recorded, and return the `Report`.

    A second pair of runs, with SGD, follows if the first shows no difference (not with --no-sgd):
    AdamW and its like hide a factor in their updates.
    CannotTell: a run failed or took too long, or the two models name no parameter alike.
    """
    report = Report(0, 0, 0.0)
    two = options.serial != options.parallel
    ours = options.arguments if options.serial_args is None else options.serial_args
    for sgd in (False,) if options.no_sgd else (False, True):
        together = tapes(options.parallel, options.arguments, options.world_size, sgd, options)
        given = {}
        if options.ranks_samples:
            given["samples"] = samples_of(together)
        if options.ranks_parameters:
            given["parameters"] = with_names(parameters_of(together), options.rename)
        (alone,) = tapes(options.serial, ours, 1, sgd, options, alone=two, given=given)
        try:
            report = compare(alone, together, options.rename)
        except ValueError as error:
            raise CannotTell(str(error)) from None
        report.optimizer = "SGD in the optimizer's place" if sgd else ""
        if not report.fine:
            break
    return report


def samples_of(together: list[Tape]) -> list[Rows]:
    """Return for each step the rows of data of all ranks, rank after rank, from their tapes.

    Steps that a rank's tape lacks are left out.
    """
    found = []
    for of_ranks in zip(*(tape.steps for tape in together), strict=False):
        found.append(list(chain(*(step.rows for step in of_ranks))))
    return found


def parameters_of(together: list[Tape]) -> dict[str, Tensor]:
    """Return {name: parameter at the beginning}, as the first rank that has it began with it."""
    found: dict[str, Tensor] = {}
    for tape in reversed(together):
        found |= tape.begin
    return found


def tapes(
    script: str,
    arguments: list[str],
    ranks: int,
    sgd: bool,
    options: argparse.Namespace,
    alone: bool = False,
    given: dict[str, object] | None = None,
) -> list[Tape]:
    """Run a script, by torchrun or `alone`, and return the tape that each rank recorded.

    sgd: put plain SGD in the place of AdamW and its like. alone: run plain Python, as one rank.
    given: {"samples": as `samples_of` returns them, "parameters": {name: value}}, for the script to
    use in the place of its own; either may be left out. None: --ranks-samples keeps the rows.
    CannotTell: the script failed, a rank's tape is missing in the end, or --apart can't copy.
    """
    with tempfile.TemporaryDirectory(prefix="ddpkit-audit-") as folder:
        for name, value in (given or {}).items():
            Path(folder, name).write_bytes(pickle.dumps(value))
        keep = options.ranks_samples and given is None
        told = {"steps": options.steps, "sgd": sgd, "seed": options.seed, "keep": keep}
        command = [runner.__file__, folder, json.dumps(told), script, *arguments]
        if alone:
            command = [sys.executable, *command]
        else:
            start = "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"
            command = [sys.executable, *start, "-m", "ddpkit.debug", *command]
        output = Path(folder, "output")
        with output.open("w") as file:
            # A session of its own: its group can be ended. Torchrun's ranks are in others.
            process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=copied(Path(folder, "apart")) if options.apart else None,
            )
            try:
                ended = wait(process, folder, ranks, options)
            finally:
                end(process)
        found = sorted(Path(folder).glob("*.tape"), key=lambda path: int(path.stem))
        if len(found) < ranks or (process.returncode and ended):
            raise CannotTell(failure(script, ranks, process.returncode, ended, output, options))
        return [pickle.loads(path.read_bytes()) for path in found]


def copied(folder: Path) -> Path:
    """Make `folder`, with copies of the current one's files and subfolders; return it.

    Hidden ones are left out, and the folder that `folder` is in, which may be in the current one.
    Files of 100 MB (`LARGE`) or more are linked: what a script writes to one is in the original.
    CannotTell: a file can't be copied.
    """
    without = shutil.ignore_patterns(".*", folder.parent.name)
    try:
        return shutil.copytree(Path.cwd(), folder, ignore=without, copy_function=copy_or_link)
    except OSError as error:
        what = f"--apart expected to copy all of {Path.cwd()}, got {str(error)[:SHOWN]}"
        raise CannotTell(f"{what}: run it in a folder that has the script's files alone") from None


def copy_or_link(source: str, target: str) -> None:
    small = os.path.isfile(source) and os.path.getsize(source) < LARGE
    (shutil.copy2 if small else os.symlink)(source, target)


def wait(process, folder: str, ranks: int, options: argparse.Namespace) -> bool:
    """Wait for the script's end, the timeout or (--stop) full tapes; return whether it has ended.

    folder: where the ranks write their tapes.
    """
    until = time.monotonic() + options.timeout
    while time.monotonic() < until:
        if process.poll() is not None:
            return True
        if options.stop and all_full(list(Path(folder).glob("*.tape")), ranks, options.steps):
            return False
        time.sleep(LOOK_S)
    return False


def all_full(found: list[Path], ranks: int, steps: int) -> bool:
    """Return whether every rank has written a tape (`found`), each with all `steps`.

    A script that ends early, or fails, writes the steps that it has.
    """
    if len(found) < ranks:
        return False
    return all(len(pickle.loads(path.read_bytes()).steps) == steps for path in found)


def end(process) -> None:
    """End a run that is still going: by SIGTERM and, 5 s (`GRACE_S`) later, by SIGKILL.

    Torchrun's ranks aren't in its process group: torchrun ends them, if SIGTERM leaves it time.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                continue


def what_it_said(output: str) -> str:
    """Return `ddpkit.debug`'s report from a script's output, or the last `LINES` if it has none."""
    lines = output.splitlines()
    begins = [number for number, line in enumerate(lines) if line.startswith("ddpkit: ")]
    if not begins:
        return "\n".join(lines[-LINES:])
    report = lines[begins[0] :]
    torchruns = [number for number, line in enumerate(report) if TORCHRUN.match(line)]
    return "\n".join(report[: torchruns[0]] if torchruns else report).strip()


def failure(script, ranks, code, ended, output, options) -> str:
    if not ended:
        return f"{script} made no {options.steps} steps in {options.timeout:g} s"
    if code == 0:
        got = f"expected a tape from every rank of {script}, got none from one, though exit code 0"
        return f"{got}: does it call os._exit? Let it end as Python does"
    tail = what_it_said(output.read_text(errors="replace"))
    where = f"on {ranks} ranks" if ranks > 1 else "on one rank"
    return f"{script} failed {where}, exit code {code}:\n{tail}"


def exit_at_signals() -> None:
    """Let SIGTERM and SIGHUP end a command by an exception, as Ctrl-C does, so that it clears up.

    Further ones are ignored (`timeout` sends two), and so is what is ignored already (by nohup).
    """
    ends = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]

    def leave(number, frame):
        for end in ends:
            signal.signal(end, signal.SIG_IGN)
        sys.exit(128 + number)

    for end in ends:
        if signal.getsignal(end) is signal.SIG_DFL:
            signal.signal(end, leave)
