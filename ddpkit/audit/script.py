"""Run a script and record its training steps on a `Tape`. `ddpkit.audit.command` starts this file.

script.py FOLDER OPTIONS SCRIPT ARGS: each rank's tape goes to FOLDER, as "0.tape". OPTIONS is JSON:
steps, the most to record; sgd, true to put SGD in the place of AdamW and its like; seed, or null;
keep, true to record the samples themselves, not only their hashes. If FOLDER has the pickles
`samples` or `parameters`, the training uses these in the place of its own.
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
        if not path.exists():  # it failed, or no backward came after the last step
            save(tape, path)


def given(folder: str, name: str) -> object:
    """Return what the command has pickled to FOLDER/name, or None if there is no such file."""
    path = Path(folder, name)
    return pickle.loads(path.read_bytes()) if path.exists() else None


def begin_with(seed: int) -> None:
    """Seed the random numbers of Python, torch and (if installed) NumPy, alike on all ranks."""
    random.seed(seed)
    torch.manual_seed(seed)
    with contextlib.suppress(ImportError):
        importlib.import_module("numpy").random.seed(seed)


def save(tape: Tape, path: Path) -> None:
    """Pickle the tape to `path`, unless it exists; the file appears only once it is whole."""
    if not path.exists():
        draft = path.with_suffix(".draft")
        draft.write_bytes(pickle.dumps(tape))
        draft.rename(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
