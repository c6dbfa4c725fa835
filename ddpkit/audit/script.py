"""Run a script with a tape on it; `ddpkit.audit.command` starts this file, by torchrun or alone.

script.py FOLDER OPTIONS SCRIPT ARGS: the tape goes to FOLDER, a file for each rank. OPTIONS, JSON:
steps; sgd, in the optimizer's place; seed, or null; keep, the samples themselves. If FOLDER has
`samples` or `parameters`, these are used in the place of the script's own.
"""

import contextlib
import importlib
import json
import os
import pickle
import random
import runpy
import sys
from pathlib import Path

import torch

from ddpkit.audit.samples import Samples
from ddpkit.audit.tape import Tape
from ddpkit.audit.training import plain_sgd


def main(folder: str, options: str, script: str, *arguments: str) -> None:
    chosen = json.loads(options)
    path = Path(folder, f"{os.environ.get('RANK', '0')}.tape")
    samples = Samples(chosen["keep"], given(folder, "samples"))
    tape = Tape(
        chosen["steps"],
        when_full=lambda tape: save(tape, path),
        samples=samples,
        given=given(folder, "parameters"),
    )
    if chosen["seed"] is not None:
        begin_with(chosen["seed"])
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        with plain_sgd() if chosen["sgd"] else contextlib.nullcontext(), tape:
            runpy.run_path(script, run_name="__main__")
    finally:
        if not path.exists():  # the script has fewer steps
            save(tape, path)


def given(folder: str, name: str) -> object:
    """Return what the command has left for this run, None if there is nothing."""
    path = Path(folder, name)
    return pickle.loads(path.read_bytes()) if path.exists() else None


def begin_with(seed: int) -> None:
    """Seed what scripts draw from, alike on all ranks."""
    random.seed(seed)
    torch.manual_seed(seed)
    with contextlib.suppress(ImportError):
        importlib.import_module("numpy").random.seed(seed)


def save(tape: Tape, path: Path) -> None:
    """Write the tape; the file is there only once it is whole."""
    if not path.exists():
        draft = path.with_suffix(".draft")
        draft.write_bytes(pickle.dumps(tape))
        draft.rename(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
