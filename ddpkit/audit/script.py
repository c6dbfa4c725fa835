"""Run a script with a tape on it; `ddpkit.audit.command` starts this file, by torchrun or alone.

script.py FOLDER STEPS SGD SCRIPT ARGS: the tape goes to FOLDER, a file for each rank.
"""

import contextlib
import os
import pickle
import runpy
import sys
from pathlib import Path

from ddpkit.audit.tape import Tape
from ddpkit.audit.training import plain_sgd


def main(folder: str, steps: str, sgd: str, script: str, *arguments: str) -> None:
    path = Path(folder, f"{os.environ.get('RANK', '0')}.tape")
    tape = Tape(int(steps), when_full=lambda tape: save(tape, path))
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        with plain_sgd() if sgd == "sgd" else contextlib.nullcontext(), tape:
            runpy.run_path(script, run_name="__main__")
    finally:
        if not path.exists():  # the script has fewer steps
            save(tape, path)


def save(tape: Tape, path: Path) -> None:
    """Write the tape; the file is there only once it is whole."""
    if not path.exists():
        draft = path.with_suffix(".draft")
        draft.write_bytes(pickle.dumps(tape))
        draft.rename(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
