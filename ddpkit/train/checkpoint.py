"""Checkpoints that no moment of dying can spoil.

    folder/step-00000040/    0_0.distcp 1_0.distcp ... .metadata run.json checksums.json

Every rank writes its pieces, in a thread, into `step-00000040.writing`. When all are on the disk,
rank 0 writes checksums of all files, and one rename makes the folder a checkpoint: before it there
is none, after it a whole one. Which is the latest is found by looking, never noted down. One whose
checksums don't fit is named, and the one before it is taken.

`torch.distributed.checkpoint` writes and reads: any mesh reads what any other has written.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from .config import SAME_MODEL, TrainConfig
from .state import counters, make_state, set_counters, state_of
from .trainer import Trainer

WRITING = ".writing"
LEAVING = ".leaving"
CHECKSUMS = "checksums.json"
RUN = "run.json"


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
        self.thread = ThreadPoolExecutor(1)
        self.saving: Future | None = None
        if dist.get_rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            for left in self.folder.glob("step-*.*"):  # of a run that died while it saved
                shutil.rmtree(left)
        dist.barrier(group=self.group)

    def save(self, step: int) -> None:
        """Begin to save: `step` steps are done. Returns once the values are copied.

        A save that is still being written is waited for first. What went wrong with it is raised
        here, or by `wait`; training may go on without it.
        """
        self.wait()
        staged = {name: found.staged() for name, found in state_of(self.trainer).items()}
        run = describe(self.trainer, step)
        self.saving = self.thread.submit(self.write, step, staged, run)

    def write(self, step: int, staged: dict, run: dict) -> None:
        """Write the checkpoint and publish it; in the thread, on every rank."""
        folder = self.folder / f"step-{step:08}"
        writing = folder.with_name(folder.name + WRITING)
        if dist.get_rank() == 0:
            shutil.rmtree(writing, ignore_errors=True)
        dist.barrier(group=self.group)
        try:
            # Returns on rank 0 when every rank's file is on the disk; raises on all or on none.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dcp.save(staged, checkpoint_id=str(writing), process_group=self.group)
            if dist.get_rank() == 0:
                publish(writing, folder, run)
                for old in checkpoints(self.folder)[self.keep :]:
                    remove(old)
        except BaseException:
            if dist.get_rank() == 0:
                shutil.rmtree(writing, ignore_errors=True)  # a full disk needs the room
            raise

    def wait(self) -> None:
        """Wait until what is being saved is published. OSError and others: what went wrong."""
        if self.saving is not None:
            saving, self.saving = self.saving, None
            saving.result()

    def close(self) -> None:
        self.wait()
        self.thread.shutdown()

    def load(self) -> int:
        """Read the latest checkpoint that is whole; return its step, 0 if there is none.

        Says on rank 0 which were passed over and why. ValueError: it is another model's.
        """
        found: list = [None]
        if dist.get_rank() == 0:
            found = [self.find()]
        dist.broadcast_object_list(found, src=0, group=self.group)
        if found[0] is None:
            return 0
        folder, run = found[0]
        check_fits(self.trainer.config, run, folder)
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
        for folder in checkpoints(self.folder):
            wrong = damage(folder)
            if wrong is None:
                return folder, json.loads((folder / RUN).read_text())
            print(f"{folder.name} is damaged ({wrong}): the one before it is used.", flush=True)
        return None


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
    return sorted((f for f in folder.glob("step-*") if not f.suffix), reverse=True)


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
        if checksum(folder / name) != sums.get(name):
            return f"{name} isn't as it was written"
    return None


def check_fits(config: TrainConfig, run: dict, folder: Path) -> None:
    """Raise ValueError unless the checkpoint is of the same model and optimizer."""
    for name in SAME_MODEL:
        saved, mine = run["config"].get(name), getattr(config, name)
        if saved != mine:
            got = f"{folder} was saved with {name} = {saved!r}, and this run has {mine!r}"
            raise ValueError(f"{got}: choose the same, or another folder.")
