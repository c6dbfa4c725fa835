"""Run a script with a witness; `ddpkit.resume_check.command` puts this file before the script.

It is called as `script.py SCRIPT ARGS`. The environment says where the witness writes,
DDPKIT_RESUME_FOLDER, and when it kills the run, DDPKIT_RESUME_KILL, such as "step 7".
"""

import os
import runpy
import sys
from pathlib import Path

from ddpkit.resume_check.witness import Witness


def main(script: str, *arguments: str) -> None:
    """Run a script inside a witness that writes down what its training does.

    arguments: the script's own.
    """
    witness = Witness(Path(os.environ["DDPKIT_RESUME_FOLDER"]), os.environ["DDPKIT_RESUME_KILL"])
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    with witness:
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
