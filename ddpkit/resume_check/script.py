"""Run a script with a `Witness`, which writes down its updates and saves, and kills it when asked.

`ddpkit.resume_check.command` calls it: `python script.py SCRIPT ARGS`. The environment says where
the witness writes, DDPKIT_RESUME_FOLDER, and when it kills the run, DDPKIT_RESUME_KILL ("step 7").
"""

import os
import runpy
import sys
from pathlib import Path

from ddpkit.resume_check.witness import Witness


def main(script: str, *arguments: str) -> None:
    """Run a script as `__main__` inside a `Witness`; set sys.argv and sys.path[0] as Python does.

    arguments: the script's own.
    """
    witness = Witness(Path(os.environ["DDPKIT_RESUME_FOLDER"]), os.environ["DDPKIT_RESUME_KILL"])
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    with witness:
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
