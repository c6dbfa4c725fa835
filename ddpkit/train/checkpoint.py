"""Checkpoints that no moment of dying can spoil.

    folder/step-00000040/    0_0.distcp 1_0.distcp ... .metadata run.json checksums.json

Every rank writes its pieces, in a thread, into `step-00000040.writing`. When all are on the disk,
rank 0 writes checksums of all files, and one rename makes the folder a checkpoint: before it there
is none, after it a whole one. Which is the latest is found by looking, never noted down. One whose
checksums don't fit is named, and the one before it is taken. A save that fails, fails on all ranks.

`torch.distributed.checkpoint` writes and reads: any mesh reads what any other has written.
"""

import dataclasses
import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from .config import SAME, TrainConfig
from .state import counters, make_state, set_counters, state_of
from .trainer import Trainer

WRITING = ".writing"
LEAVING = ".leaving"
CHECKSUMS = "checksums.json"
RUN = "run.json"


class SaveError(Exception):
    """A checkpoint couldn't be saved, or an old one deleted; training may go on."""


class FolderError(ValueError):
    """A folder that this training can't use: it belongs to another."""


class Checkpoints:
    """The checkpoints of one training, in `folder`; the last `keep` of them stay.

    Made on every rank; `save`, `wait` and `load` are calls of all ranks.
    """

    def __init__(self, trainer: Trainer, folder: str | Path, keep: int = 3):
        self.trainer = trainer
        self.folder = Path(folder)
        self.keep = keep
        # The saving thread talks in a group of its own: its messages pass those of the steps.
        self.group = dist.new_group(backend="gloo")
        self.saving: Future | None = None
        if dist.get_rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            for left in self.folder.glob("step-*"):
                if left.suffix in (WRITING, LEAVING):  # of a run that died while it saved
                    shutil.rmtree(left)
        dist.barrier(group=self.group)

    def save(self, step: int, unlogged: OSError | None = None) -> None:
        """Begin to save: `step` steps are done. Returns once the values are copied.

        A save that is still being written is waited for first. SaveError: it failed; the new one
        has begun nevertheless.

        unlogged: on rank 0, why the log doesn't have the steps that are to be saved. Then nothing
        is published: the samples of these steps would stand nowhere.
        """
        failed = None
        try:
            self.wait()
        except SaveError as error:
            failed = error
        staged = {name: found.staged() for name, found in state_of(self.trainer).items()}
        run = describe(self.trainer, step)
        self.saving = in_thread(partial(self.write, step, staged, run, unlogged))
        if failed is not None:
            raise failed

    def write(self, step: int, staged: dict, run: dict, unlogged: OSError | None = None) -> None:
        """Write the checkpoint and publish it; in the thread, on every rank."""
        folder = self.folder / f"step-{step:08}"
        writing = folder.with_name(folder.name + WRITING)
        wrong = [""]  # what rank 0 knows counts for all
        try:
            # Returns on rank 0 when every rank's file is on the disk; raises on all or on none.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dcp.save(staged, checkpoint_id=str(writing), process_group=self.group)
            if unlogged is not None:
                raise unlogged
            if dist.get_rank() == 0:
                publish(writing, folder, run)
        except CheckpointException as error:
            wrong = [what_failed(error)]
        except OSError as error:
            wrong = [f"rank 0: {type(error).__name__}: {error}"]
        dist.broadcast_object_list(wrong, src=0, group=self.group)
        if wrong[0]:
            if dist.get_rank() == 0:
                shutil.rmtree(writing, ignore_errors=True)  # a full disk needs the room
            raise SaveError(f"{folder.name} wasn't saved: {wrong[0]}")
        if dist.get_rank() == 0:
            self.remove_old(folder)

    def remove_old(self, newest: Path) -> None:
        """Keep `newest` and those before it; later ones were damaged, or it wouldn't be newest."""
        found = checkpoints(self.folder)
        later = found[: found.index(newest)]
        for old in later + found[len(later) + self.keep :]:
            try:
                remove(old)
            except OSError as error:
                raise SaveError(f"{old.name} can't be deleted: {error}") from error

    def wait(self) -> None:
        """Wait until what is being saved is published. SaveError: what went wrong."""
        if self.saving is not None:
            saving, self.saving = self.saving, None
            saving.result()

    def load(self) -> int:
        """Read the latest checkpoint that is whole; return its step, 0 if there is none.

        Says on rank 0 which were passed over and why. FolderError: it is another model's.
        """
        found: list = [None]
        if dist.get_rank() == 0:
            found = [self.find()]
        dist.broadcast_object_list(found, src=0, group=self.group)
        if found[0] is None:
            return 0
        folder, run = found[0]
        if wrong := misfit(self.trainer.config, run["config"], folder):
            raise FolderError(wrong)
        make_state(self.trainer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = state_of(self.trainer)
            dcp.load(state, checkpoint_id=str(folder), process_group=self.group)
        set_counters(self.trainer, run["counters"])
        if run["scaler"] is not None and self.trainer.scaler is not None:
            self.trainer.scaler.factor, self.trainer.scaler.good_steps = run["scaler"]
        return run["step"]

    def find(self) -> tuple[Path, dict] | None:
        """Return the latest whole checkpoint and its description; say what is wrong with others."""
        found = checkpoints(self.folder)
        for number, folder in enumerate(found, 1):
            wrong = damage(folder)
            if wrong is None:
                return folder, json.loads((folder / RUN).read_text())
            next_one = "the one before it is used" if number < len(found) else "none is left"
            print(f"{folder.name} is damaged ({wrong}): {next_one}.", flush=True)
        return None


def in_thread(call: Callable[[], None]) -> Future:
    """Make a call in a thread that doesn't keep a process from ending; return its future.

    A process that has failed would wait for the thread of an executor, and that for a dead rank.
    """
    made = Future()

    def run() -> None:
        try:
            made.set_result(call())
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return made


def what_failed(error: CheckpointException) -> str:
    """Name the ranks of each failure, as "ranks 0, 1: OSError: [Errno 28] No space left on device".

    PyTorch's writer of files reports a full disk as an error of its own, which came of another.
    """
    ranks: dict[str, list[str]] = {}
    for rank, (found, _) in sorted(error.failures.items()):
        while isinstance(found.__context__, Exception) and not isinstance(found, OSError):
            found = found.__context__
        ranks.setdefault(f"{type(found).__name__}: {found}", []).append(str(rank))
    return "; ".join(
        f"{'rank' if len(those) == 1 else 'ranks'} {', '.join(those)}: {text}"
        for text, those in ranks.items()
    )


def describe(trainer: Trainer, step: int) -> dict:
    """Return all that isn't a tensor. Random numbers and the place in the data follow from it."""
    scaler = trainer.scaler and (trainer.scaler.factor, trainer.scaler.good_steps)
    config = dataclasses.asdict(trainer.config)
    return {"step": step, "config": config, "counters": counters(trainer), "scaler": scaler}


def publish(writing: Path, folder: Path, run: dict) -> None:
    """Add description and checksums to a folder of files, and make it a checkpoint by a rename."""
    write_durably(writing / RUN, json.dumps(run, indent=1))
    sums = {path.name: checksum(path) for path in sorted(writing.iterdir())}
    write_durably(writing / CHECKSUMS, json.dumps(sums, indent=1))
    sync_folder(writing)
    if folder.exists():  # damaged, and passed over by the resumed run, which has come here again
        remove(folder)
    os.rename(writing, folder)
    sync_folder(folder.parent)


def remove(folder: Path) -> None:
    """Delete a checkpoint: by one rename it is none, whatever is still deleted when a rank dies."""
    leaving = folder.with_name(folder.name + LEAVING)
    shutil.rmtree(leaving, ignore_errors=True)
    os.rename(folder, leaving)
    shutil.rmtree(leaving)


def write_durably(path: Path, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make names durable: a rename may otherwise be lost with the power."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checkpoints(folder: Path) -> list[Path]:
    """List the published checkpoints, the latest first."""
    found = (path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name))
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def damage(folder: Path) -> str | None:
    """Say what is wrong with a checkpoint's files; None if every bit is as it was written."""
    try:
        sums = dict(json.loads((folder / CHECKSUMS).read_text()))
    except (OSError, ValueError, TypeError):
        return f"{CHECKSUMS} is missing or can't be read"
    files = {path.name for path in folder.iterdir()} - {CHECKSUMS}
    for name in sorted(files | set(sums)):
        if name not in files:
            return f"{name} is missing"
        try:
            same = checksum(folder / name) == sums.get(name)
        except OSError as error:
            return f"{name} can't be read: {error.strerror}"
        if not same:
            return f"{name} isn't as it was written"
    return None


def problems_of_the_folder(config: TrainConfig) -> list[str]:
    """Say why a training can't use its folder: no writing there, or another model in it."""
    folder = Path(config.folder)
    if not config.folder:
        return []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return [f"folder = {config.folder!r} can't be written: {error.strerror}. Choose another."]
    for path in checkpoints(folder):
        try:
            saved = dict(json.loads((path / RUN).read_text())["config"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # damaged: `load` will say it
        wrong = misfit(config, saved, path)
        if wrong is None:
            break
        if damage(path) is None:
            return [wrong]
    return []


def misfit(config: TrainConfig, saved: dict, folder: Path) -> str | None:
    """Say how a checkpoint's model or samples differ from this run's; None if they don't."""
    for name in SAME:
        mine = getattr(config, name)
        if saved.get(name) != mine:
            got = f"{folder} was saved with {name} = {saved.get(name)!r}, and this run has {mine!r}"
            return f"{got}: choose the same, or another folder."
    return None
