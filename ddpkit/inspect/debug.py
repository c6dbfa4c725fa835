"""Run any script on the wire: a hang or a mismatch is explained in seconds, not in half an hour.

    torchrun --nproc-per-node 4 -m ddpkit.debug train.py ARGS
    python -m ddpkit.debug --world-size 4 train.py ARGS         # without torchrun

The wire is the process group that records every collective call and message. The script stays as it
is: its own `init_process_group` makes the wire. The ranks of a machine share a file, the board, in
which each writes its state and its calls; those of ranks on other machines come through
torch.distributed's store. If a rank fails, or ranks can never go on, one rank prints the report and
all exit with code 1, so that torchrun can restart them; a rank that called sys.exit(3), with 3.
Waits that may still end are only reported.
"""

import argparse
import os
import runpy
import sys
from pathlib import Path

import torch

from ..runtime.exits import end_child
from ..runtime.link import Link
from ..runtime.machine import untried_torch
from .session import Session


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options of a command line, with the script and its own arguments.

    arguments: None are those of the process. A wrong command line ends the process with code 2.
    """
    prog = "python -m ddpkit.debug"
    says = __doc__.splitlines()[0]
    # `main` looks for --world-size among the words: --world would be another one.
    parser = argparse.ArgumentParser(prog=prog, description=says, allow_abbrev=False)
    parser.add_argument("--world-size", type=int, help="start this many ranks here, by torchrun")
    parser.add_argument("--trace", help="write a Chrome trace to this file at the end")
    parser.add_argument("--flight-recorder", help="write dumps to this folder at the end")
    parser.add_argument("--link", help='emulate a wire: "10 Gbit Ethernet"')
    changed = "fail where a rank changes what it is still sending (on the CPU)"
    parser.add_argument("--check-buffers", action="store_true", help=changed)
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Run the script that the command line names, as one rank whose calls are watched.

    With --world-size, start that many ranks by torchrun instead; each of them comes here again.
    Return when the scripts of all ranks have ended; if this one fails, end the process.

    arguments: those of the command; None: the process's own.
    SystemExit: there is no such script, no folder for the trace, no link (an emulated network) of
        that name, or torchrun didn't start this process; the message says what to do.
    """
    options = parse(arguments)
    if not Path(options.script).is_file():
        sys.exit(f"ddpkit.debug expected a script, got {options.script}: there is no such file")
    if options.trace and not Path(options.trace).resolve().parent.is_dir():
        sys.exit(f"ddpkit.debug expected a folder for {options.trace}: make one first")
    try:
        link = Link.preset(options.link) if options.link else None
    except ValueError as error:
        sys.exit(f"ddpkit.debug: {error}")
    if options.world_size:
        from torch.distributed.run import main as torchrun

        kept = arguments or sys.argv[1:]
        at = next(i for i, word in enumerate(kept) if word.startswith("--world-size"))
        rest = kept[:at] + kept[at + (1 if "=" in kept[at] else 2) :]
        ranks = f"--nproc-per-node={options.world_size}"
        torchrun(["--standalone", ranks, "-m", "ddpkit.debug", *rest])
        return
    if "RANK" not in os.environ:
        how = "start it by torchrun, or say how many ranks, before the script: --world-size 4"
        sys.exit(f"ddpkit.debug: {how} {options.script}")
    if os.environ["RANK"] == "0" and (untried := untried_torch(torch.__version__)):
        print(f"ddpkit.debug: torch {torch.__version__} is {untried}", file=sys.stderr)
    session = Session(link, options.trace, options.flight_recorder)
    session.recorder.check_buffers = options.check_buffers
    session.install()
    sys.argv = [options.script, *options.arguments]
    sys.path[0] = str(Path(options.script).resolve().parent)
    pid = os.getpid()
    try:
        runpy.run_path(options.script, run_name="__main__")
    except SystemExit as end:
        end_child(pid, end)
        if end.code:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
            session.exited(end)
    except BaseException as error:
        end_child(pid, error)
        session.failed(error)
    end_child(pid)
    session.done()
