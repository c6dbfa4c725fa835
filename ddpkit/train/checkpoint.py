"""Checkpoints that stay whole, at whatever moment a rank is killed.

    folder/step-00000040/    0_0.distcp 1_0.distcp ... .metadata run.json checksums.json

Every rank writes its part of the state, in a thread, into a folder `step-00000040.writing`. Once
all files are on the disk, rank 0 adds checksums of all of them and renames the folder. Only the
rename makes it a checkpoint, so there is never half of one. Nothing records which checkpoint is the
latest: it is found by listing the folder. One whose checksums don't match is reported, and the one
before it is used. A save that fails on one rank fails on all.

`torch.distributed.checkpoint` writes and reads the tensors: any mesh reads what any other has
written.
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
    """An exception: a checkpoint couldn't be saved, or an old one deleted. Training may go on."""


class FolderError(ValueError):
    """An exception: this training can't use its folder, which another one uses or has used."""


class Checkpoints:
    """The checkpoints of one training in `folder`, of which the last `keep` stay on the disk.

    trainer: whose state is saved and loaded.
    Make it on every rank. Rank 0 then creates the folder, and deletes what a run that died while it
    saved has left. `save`, `wait` and `load` must also be called by every rank, after the same
    step. Call `wait` at the end: the thread that writes doesn't keep a process alive.
    """

    def __init__(self, trainer: Trainer, folder: str | Path, keep: int = 3):
        self.trainer = trainer
        self.folder = Path(folder)
        self.keep = keep
        # The saving thread has a group of its own, so that its messages don't mix with a step's.
        self.group = dist.new_group(backend="gloo")
        self.saving: Future | None = None
        if dist.get_rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            for left in self.folder.glob("step-*"):
                if left.suffix in (WRITING, LEAVING):  # of a run that died while it saved
                    shutil.rmtree(left)
        dist.barrier(group=self.group)

    def save(self, step: int, unlogged: OSError | None = None) -> None:
        """Start to save the state after `step` steps; return as soon as the values are copied.

        A thread writes the files. If the save before is still being written, it is waited for
        first.
        unlogged: on rank 0, the error because of which the log lacks steps that are to be saved;
        None if it has them all. With such an error no checkpoint is made, since the samples of
        these steps would be recorded nowhere.
        SaveError: the save before failed. The new one has started nevertheless.
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
        """Write a checkpoint's files, `publish` it, and delete old ones; runs in the thread.

        staged: {name: this rank's `Pieces`, on the CPU}. run: the description that rank 0 adds, as
        `describe` returns it. unlogged: see `save`.
        SaveError: on every rank, the checkpoint wasn't saved; or on rank 0, an old one can't be
        deleted.
        """
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
        """Delete all checkpoints but `newest` and the `keep - 1` before it; runs on rank 0.

        Later ones are deleted as well: the run was resumed from before them, so they are damaged.
        SaveError: one can't be deleted.
        """
        found = checkpoints(self.folder)
        later = found[: found.index(newest)]
        for old in later + found[len(later) + self.keep :]:
            try:
                remove(old)
            except OSError as error:
                raise SaveError(f"{old.name} can't be deleted: {error}") from error

    def wait(self) -> None:
        """Wait until the checkpoint that is being saved is complete, if there is one.

        SaveError: it couldn't be saved or, on rank 0, an old one couldn't be deleted.
        """
        if self.saving is not None:
            saving, self.saving = self.saving, None
            saving.result()

    def load(self) -> int:
        """Load the latest checkpoint that isn't damaged; return its step, or 0 if there is none.

        In place: parameters, buffers, the optimizer's state, the loss scale. Rank 0 prints which
        checkpoints were passed over, and why.
        FolderError: it was saved with another model or other samples than this run's (see `SAME`).
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
        """Return (folder, description) of the latest undamaged checkpoint; None if there is none.

        The description is what `describe` returned when it was saved. Prints what is wrong with
        each later one.
        """
        found = checkpoints(self.folder)
        for number, folder in enumerate(found, 1):
            wrong = damage(folder)
            if wrong is None:
                return folder, json.loads((folder / RUN).read_text())
            next_one = "the one before it is used" if number < len(found) else "none is left"
            print(f"{folder.name} is damaged ({wrong}): {next_one}.", flush=True)
        return None


def in_thread(call: Callable[[], None]) -> Future:
    """Call a function in a daemon thread; return a future of its result, or of what it raised.

    Such a thread doesn't keep a failed process from ending. An executor's thread would, while it
    waits for a rank that is dead.
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
    """Return failures with their ranks: "ranks 0, 1: OSError: [Errno 28] No space left on device".

    Several failures are joined by semicolons. PyTorch's file writer makes an error of its own of a
    full disk's OSError. So the errors before (`__context__`) are followed to an OSError or the end.
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
    """Return what a checkpoint holds besides tensors, its description.

    It is {"step", "config": {setting: value}, "counters": {key: value} of the optimizer, "scaler":
    (loss scale, steps since it changed) or None}. Random numbers and the position in the data
    follow from seed and step.
    """
    scaler = trainer.scaler and (trainer.scaler.factor, trainer.scaler.good_steps)
    config = dataclasses.asdict(trainer.config)
    return {"step": step, "config": config, "counters": counters(trainer), "scaler": scaler}


def publish(writing: Path, folder: Path, run: dict) -> None:
    """Make a folder of files a checkpoint: add the description and checksums, then rename it.

    writing: the folder that has the files of all ranks. folder: its new name; a damaged checkpoint
    of that name is deleted. run: the description, as `describe` returns it.
    """
    write_durably(writing / RUN, json.dumps(run, indent=1))
    sums = {path.name: checksum(path) for path in sorted(writing.iterdir())}
    write_durably(writing / CHECKSUMS, json.dumps(sums, indent=1))
    sync_folder(writing)
    if folder.exists():  # damaged, and passed over by the resumed run, which has come here again
        remove(folder)
    os.rename(writing, folder)
    sync_folder(folder.parent)


def remove(folder: Path) -> None:
    """Delete a checkpoint, so that a rank that dies meanwhile leaves nothing that looks like one.

    The folder is first renamed, to a name that isn't a checkpoint's.
    """
    leaving = folder.with_name(folder.name + LEAVING)
    shutil.rmtree(leaving, ignore_errors=True)
    os.rename(folder, leaving)
    shutil.rmtree(leaving)


def write_durably(path: Path, text: str) -> None:
    """Write a text file, and wait until it is on the disk."""
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Write a folder's names to the disk, except on Windows: a power failure may undo a rename."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checkpoints(folder: Path) -> list[Path]:
    """List the folders of the checkpoints in a folder, damaged ones included, the latest first."""
    found = (path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name))
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def damage(folder: Path) -> str | None:
    """Return, in words, the first fault of a checkpoint's files; None if all match their sums."""
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
    """List, as sentences, why a training can't use its folder; empty if it can, or needs none.

    Either the folder can't be written to, or it has an undamaged checkpoint that doesn't fit (see
    `misfit`) and no later one that does. Creates the folder if it doesn't exist.
    """
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
    """Say which setting of `SAME` differs first between a checkpoint and this run; None if none.

    saved: {setting: value} of the checkpoint. folder: the checkpoint's, for the sentence.
    """
    for name in SAME:
        mine = getattr(config, name)
        if saved.get(name) != mine:
            got = f"{folder} was saved with {name} = {saved.get(name)!r}, and this run has {mine!r}"
            return f"{got}: choose the same, or another folder."
    return None
