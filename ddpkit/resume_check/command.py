"""Does my script, killed and started again, go on as if nothing had happened? It isn't changed.

    python -m ddpkit.resume_check -- torchrun --nproc-per-node 2 train.py --epochs 3
    python -m ddpkit.resume_check --folder out -- python train.py
    python -m ddpkit.resume_check --again="--resume last.pt" -- python train.py

The command runs the script to its end, and twice more: once it kills it by SIGKILL after an update,
once in the middle of a save, starts it again, and compares each update with the uninterrupted run.
Every run has its own copy of the current folder, without `NOT_COPIED`; with --folder, of that one.
Exit code: 0 if the script goes on exactly, 1 if something is lost, 2 if that can't be decided.
"""

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from . import script as runner
from .verdict import LINES, Attempt, CannotTell, Verdict, judge, read_attempt

FOLDER = "ddpkit-resume-"  # how the names of temporary folders begin
NOT_COPIED = ".git", ".venv", "__pycache__", "node_modules"
MOST_BYTES = 2_000_000_000  # of a folder that is copied for each run
STARTS = {"python", "python3"}


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options; `command` is the list of words after --. SystemExit: a wrong option."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    says = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(
        prog="python -m ddpkit.resume_check",
        usage="%(prog)s [options] -- COMMAND",
        description=says,
    )
    parser.add_argument("--kill-after-step", type=int, help="kill after this many updates, only")
    parser.add_argument("--times", type=int, default=1, help="kills of one training, one by one")
    folder = "where it saves; then only that is copied, and the rest is linked"
    parser.add_argument("--folder", help=folder)
    parser.add_argument("--again", default="", help="words that it takes when it is started again")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each start")
    options = parser.parse_args(arguments[:at])
    options.command = arguments[at + 1 :]
    return options


def main(arguments: list[str] | None = None) -> int:
    """Print a verdict for each kill; return the exit code.

    The code is 0 if nothing is lost, 1 if something is, and 2, with a message, if that can't be
    decided.

    arguments: the command's words; None: those of this process.
    """
    options = parse(sys.argv[1:] if arguments is None else arguments)
    lost = 0
    try:
        for verdict in verdicts(options):
            print(verdict, flush=True)
            lost += len(verdict.lost)
    except CannotTell as reason:
        print(f"ddpkit.resume_check: {reason}", file=sys.stderr)
        return 2
    return 1 if lost else 0


def with_witness(command: list[str]) -> list[str]:
    """Return the command with our file, `script.py`, before the user's script, which it then runs.

    Its first word is replaced by the Python that runs us, for torchrun as well.

    command: its words, such as ["torchrun", "train.py"]. The first that ends in .py is the script.
    CannotTell: it has none, or there is no such file; or it begins with neither torchrun nor python
        (python3, python3.12, or a path to one).
    """
    if not command:
        raise CannotTell("expected a command after --, such as: -- python train.py")
    at = next((n for n, word in enumerate(command) if word.endswith(".py")), None)
    if at is None or not Path(command[at]).is_file():
        got = shlex.join(command) if at is None else f"{command[at]}, which isn't there"
        raise CannotTell(f"expected a script in the command, a file that ends in .py, got {got}")
    start, *rest = command
    if start == "torchrun":
        rest = ["-m", "torch.distributed.run", *rest]
    elif Path(start).name not in STARTS and not Path(start).name.startswith("python3."):
        raise CannotTell(f"expected a command that begins with torchrun or python, got {start}")
    at += len(rest) - len(command)
    return [sys.executable, *rest[:at], runner.__file__, *rest[at:]]


def check(options: argparse.Namespace) -> None:
    """Check the options. CannotTell: one has a wrong value; the message says what to do.

    Without --folder, the current folder must have no more than `MOST_BYTES`, since each run copies
    it. --folder must be inside the current folder.
    """
    if options.times < 1:
        raise CannotTell(f"expected --times of 1 or more, got {options.times}")
    if options.kill_after_step is not None and options.kill_after_step < 1:
        raise CannotTell(f"expected --kill-after-step of 1 or more, got {options.kill_after_step}")
    if options.folder:
        inside = Path(options.folder).resolve().is_relative_to(Path.cwd())
        if not inside or Path(options.folder).resolve() == Path.cwd():
            raise CannotTell(f"expected --folder inside the current folder, got {options.folder}")
    else:
        size = 0
        for place, folders, files in os.walk("."):
            folders[:] = [folder for folder in folders if folder not in NOT_COPIED]
            size += sum(os.lstat(os.path.join(place, file)).st_size for file in files)
        if size > MOST_BYTES:
            raise CannotTell(
                f"each run copies this folder, and it has {size / 1e9:.1f} GB: say where the script"
                " saves, --folder out, then only that is copied"
            )


def verdicts(options: argparse.Namespace) -> Iterator[Verdict]:
    """Run the script uninterrupted, then once for each kill; yield a verdict on each kill.

    `options.command` is changed in place, by `with_witness`.
    CannotTell: a wrong option; the uninterrupted script fails, or makes fewer than 2 updates; a
        start takes longer than --timeout; two runs differ before the kill, or one ends before it.
    """
    options.command = with_witness(options.command)
    check(options)
    with tempfile.TemporaryDirectory(prefix=FOLDER) as folder:
        (whole,) = train(options, Path(folder, "whole"), [])
        if whole.code:
            tail = "\n".join(whole.output.splitlines()[-LINES:])
            raise CannotTell(f"uninterrupted, it ends with exit code {whole.code}:\n{tail}")
        if whole.updates < 2:
            raise CannotTell(f"expected a training of 2 updates or more, got {whole.updates}")
        for number, (kill, says) in enumerate(plan(options, whole)):
            kills = [kill] * options.times if kill.startswith("step") else [kill]
            attempts = train(options, Path(folder, f"killed_{number}"), kills)
            yield judge(says, whole, attempts)


def plan(options: argparse.Namespace, whole: Attempt) -> list[tuple[str, str]]:
    """Choose when the script is killed: after an update, and in the middle of a save.

    Return [(when, in words)], where `when` is "step 7", after 7 updates, or "save 2 of rank 0", in
    the middle of that rank's second torch.save. With --kill-after-step 7 the only kill is "step 7".
    Otherwise the first comes one update after the last save that two more updates follow; with
    --times, after an earlier save, so that further kills find saves. The second comes in a save of
    the lowest rank that saves: the first save after a later update than its first one's. It may
    have none.

    whole: the uninterrupted run.
    CannotTell: the script makes too few updates for --kill-after-step, or, without that option,
        never calls torch.save.
    """
    most = whole.updates - 1
    if options.kill_after_step is not None:
        if options.kill_after_step > most:
            made = f"the script makes {whole.updates} updates"
            raise CannotTell(f"expected --kill-after-step of at most {most}: {made}")
        step = options.kill_after_step
        return [(f"step {step}", f"after update {step}")]
    saved = sorted({save["updates"] for save in whole.saves if save["updates"] < most})
    if not whole.saves:
        raise CannotTell("it never calls torch.save: say when to kill it, --kill-after-step 5")
    step = (saved[(len(saved) - 1) // options.times] if saved else most - 1) + 1
    again = f", {options.times} times" if options.times > 1 else ""
    found = [(f"step {step}", f"after update {step}{again}")]
    # Of the lowest rank that saves: of its saves the first that has a whole one before it.
    rank = whole.saves[0]["rank"]
    of_rank = [save for save in whole.saves if save["rank"] == rank]
    later = [save for save in of_rank if save["updates"] > of_rank[0]["updates"]]
    if later:
        number, updates = later[0]["number"], later[0]["updates"]
        found.append((f"save {number} of rank {rank}", f"in the save after update {updates}"))
    return found


def train(options: argparse.Namespace, folder: Path, kills: list[str]) -> list[Attempt]:
    """Run the script in a copy of this folder until it ends; start it again after each kill.

    Return an `Attempt` for each start, in order. One that ends without a kill is the last.

    folder: a new folder, for the copy and for what the starts record.
    kills: when each start but the last is to be killed, such as "step 7" or "save 2 of rank 0".
    """
    copy = folder / "copy"
    copy_here(copy, options.folder)
    attempts = []
    for number, kill in enumerate([*kills, ""]):
        record = folder / f"start_{number}"
        record.mkdir()
        words = shlex.split(options.again) if number else []
        attempts.append(start([*options.command, *words], copy, record, kill, options.timeout))
        if attempts[-1].code != -signal.SIGKILL:  # it ended on its own account
            break
    return attempts


def copy_here(copy: Path, folder: str | None) -> None:
    """Copy the current folder to `copy`, without `NOT_COPIED`; or copy `folder`, and link the rest.

    folder: --folder, where the script saves, or None. Of "out/runs" all of "out" is copied, if it
        exists. What the script writes into a linked folder changes the original.
    """
    if folder is None:
        ignore = shutil.ignore_patterns(*NOT_COPIED, f"{FOLDER}*")  # temporary ones may be here
        shutil.copytree(".", copy, symlinks=True, ignore=ignore)
        return
    copy.mkdir(parents=True)
    inside = Path(folder).resolve().relative_to(Path.cwd())
    for entry in Path.cwd().iterdir():
        if entry.name != inside.parts[0]:
            (copy / entry.name).symlink_to(entry)
    top = Path(inside.parts[0])
    if top.exists():
        shutil.copytree(top, copy / top, symlinks=True)


def start(command: list[str], copy: Path, record: Path, kill: str, timeout: float) -> Attempt:
    """Run the command once in `copy` until it ends or is killed; return its `Attempt`.

    record: the folder in which its ranks write what they do.
    kill: when it is to be killed, such as "step 7"; "" for never.
    timeout: seconds that it may take.
    CannotTell: it took longer.
    """
    environ = os.environ | {"DDPKIT_RESUME_FOLDER": str(record), "DDPKIT_RESUME_KILL": kill}
    output = record / "output"
    with open(output, "w") as file:
        options = {"stdout": file, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        process = subprocess.Popen(
            command, cwd=copy, env=environ, start_new_session=True, **options
        )
    (record / "pid.torchrun").write_text(str(process.pid))
    try:
        code = process.wait(timeout)
    except subprocess.TimeoutExpired:
        raise CannotTell(
            f"it didn't end in {timeout:g} s: give it less to do, or --timeout"
        ) from None
    finally:
        end_all(process, record)
    return read_attempt(record, code, output.read_text(errors="replace"))


def end_all(process: subprocess.Popen, record: Path) -> None:
    """Kill what is left of a start: its process group, and torchrun's ranks, which have others.

    A process counts as a rank only if its environment, in /proc, names `record`, so that no other
    is killed; without /proc no rank is.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for path in record.glob("pid.*"):
        pid = int(path.read_text())
        with contextlib.suppress(OSError):
            if str(record).encode() in Path(f"/proc/{pid}/environ").read_bytes():
                os.kill(pid, signal.SIGKILL)
