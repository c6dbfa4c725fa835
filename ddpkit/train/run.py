"""A whole training: resume, step, log, save, and at the end a sample of text."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from ..runtime.wire import recorder
from . import data
from .checkpoint import Checkpoints, FolderError, SaveError
from .config import TrainConfig
from .part import make_gpt
from .report import Progress, progress_line
from .state import whole_parameters
from .trainer import Trainer

LEAVING_S = 5.0  # ranks whose launcher was killed are given to end


def train(
    config: TrainConfig, before_step: Callable[[int], None] = lambda number: None
) -> tuple[Trainer, list[dict]]:
    """Train on the ranks that are there; return the trainer, and the log of its steps by this rank.

    With a folder it goes on from the latest whole checkpoint. Under `launch`, under torchrun, or
    with a world of one rank. A failed save is said, and training goes on. FolderError: another run
    trains in the folder.

    before_step: called on every rank with each step's number, from 0, before the step.
    """
    with alone_in(config.folder):
        return train_alone(config, before_step)


def train_alone(config: TrainConfig, before_step: Callable) -> tuple[Trainer, list[dict]]:
    trainer = Trainer(config)
    log = Log(config)
    first = 0
    checkpoints = None
    if config.folder:
        checkpoints = Checkpoints(trainer, config.folder, config.keep)
        first = checkpoints.load()
        say(resumed(first, config.steps) if first else "", log)
    done = []
    progress = Progress(trainer)
    for number in range(first, config.steps):
        before_step(number)
        with exposed() as waited:
            begun = time.perf_counter()
            step = trainer.step(number)
            step["seconds"] = time.perf_counter() - begun
        step |= {"step": number, **progress.rates(step["seconds"])}
        if recorder() is not None:
            step["exposed"] = sum(waited)
        done.append(step)
        if config.folder:
            log.write(step | {"samples": samples(trainer)})
        if config.log_every and (number % config.log_every == 0 or number == config.steps - 1):
            say(progress_line(config, step), log)
        if checkpoints is not None and due(config, number + 1):
            attempt(partial(checkpoints.save, number + 1, log.error), log)
    if checkpoints is not None:
        attempt(checkpoints.wait, log)
    return trainer, done


@contextmanager
def alone_in(folder: str) -> Iterator[None]:
    """Hold a lock on the folder: each of two trainings would delete what the other writes.

    The lock is rank 0's, and goes with it, however it dies. FolderError on every rank: it is taken.
    """
    handle, taken = None, [False]
    if folder and dist.get_rank() == 0 and os.name == "posix":
        try:
            handle = lock(folder)
        except BlockingIOError:
            taken = [True]
    if folder:
        dist.broadcast_object_list(taken, src=0)
    if taken[0]:
        raise FolderError(f"another run trains in {folder}: end it, or choose another folder.")
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def lock(folder: str) -> int:
    """Return a handle that has the folder's lock. BlockingIOError: another process keeps it."""
    import fcntl

    Path(folder).mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    until = time.monotonic() + LEAVING_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except BlockingIOError:
            if time.monotonic() > until:
                os.close(handle)
                raise
            time.sleep(0.1)
        except OSError:  # a file system without locks
            return handle


def resumed(first: int, steps: int) -> str:
    """Say after how many steps training goes on, and with which; steps count from 0."""
    after = "1 step" if first == 1 else f"{first} steps"
    return f"resumed after {after}: " + (
        f"step {first} is next" if first < steps else "all are done"
    )


def due(config: TrainConfig, steps: int) -> bool:
    """Tell whether to save after this many steps."""
    every = config.save_every
    return steps == config.steps or (every > 0 and steps % every == 0)


def attempt(save: Callable, log: "Log") -> None:
    """Call `save`; a disk that is full costs a checkpoint, not the training."""
    try:
        save()
    except SaveError as error:
        say(f"{error}. Training goes on.", log)


def samples(trainer: Trainer) -> list[int]:
    """Gather the sequences that the step used, from all data ranks: each once."""
    used: list = [None] * trainer.config.data
    dist.all_gather_object(used, trainer.used, group=trainer.mesh.groups["data"])
    return [sample for rank in used for sample in rank]


@contextmanager
def exposed() -> Iterator[list[float]]:
    """Collect the seconds of each wait of this rank inside, where its calls are recorded."""
    waits: list[float] = []
    records = recorder().records if recorder() else []
    before = len(records)
    yield waits
    for record in records[before:]:
        if record.waited is not None and record.done is not None:
            waits.append(max(0.0, record.done - record.waited))


def say(text: str, log: "Log") -> None:
    if text and log.rank == 0:
        print(text, flush=True)


class Log:
    """A line of JSON for each step, written by rank 0 into the folder, if there is one.

    After a resume, steps that come again stand again: of two lines the later one counts. Lines that
    a full disk doesn't take wait for the next step's turn; `error` says why.
    """

    def __init__(self, config: TrainConfig):
        self.rank = dist.get_rank()
        self.path = Path(config.folder) / "log.jsonl" if config.folder else None
        self.waiting: list[str] = []
        self.torn = True  # the last line may be half a line
        self.error: OSError | None = None
        if self.path and self.rank == 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, step: dict) -> None:
        if not self.path or self.rank != 0:
            return
        self.waiting.append(json.dumps(step) + "\n")
        try:
            if self.torn:
                end_line(self.path)
            self.torn = True
            with open(self.path, "a") as file:
                file.writelines(self.waiting)
        except OSError as error:
            self.error = error
        else:
            self.waiting.clear()
            self.torn, self.error = False, None


def end_line(path: Path) -> None:
    """End a line that a killed rank left half-written; `read_log` leaves it out."""
    if path.exists() and path.stat().st_size and not path.read_bytes().endswith(b"\n"):
        with open(path, "a") as file:
            file.write("\n")


def read_log(folder: str | Path) -> list[dict]:
    """Read the steps of a log in order, each as it was last taken."""
    steps = {}
    for line in (Path(folder) / "log.jsonl").read_text(errors="replace").splitlines():
        try:
            step = json.loads(line)
        except ValueError:
            continue  # half-written by a rank that was killed
        steps[step["step"]] = step
    return [steps[number] for number in sorted(steps)]


def audit_samples(folder: str | Path, number: int) -> list[str]:
    """Say what is wrong with the samples of a training's log: see `data.ledger`."""
    return data.ledger({step["step"]: step["samples"] for step in read_log(folder)}, number)


@torch.no_grad()
def sample_text(trainer: Trainer, prompt: str = "The ", count: int = 300) -> str:
    """Continue `prompt` by `count` bytes, drawn as the model finds them likely. On every rank.

    The whole model is put together for it, on whatever mesh it was trained.
    """
    c = trainer.config
    gpt = make_gpt(c)
    gpt.load_state_dict(whole_parameters(trainer), strict=False)
    gpt.eval()
    generator = torch.Generator().manual_seed(c.seed)
    tokens = list(prompt.encode())
    for _ in range(count):
        seen = torch.tensor([tokens[-c.length :]])
        likely = (gpt(seen)[0, -1] / 0.8).softmax(-1)  # a little less daring than the model
        tokens.append(int(torch.multinomial(likely, 1, generator=generator)))
    return bytes(tokens).decode(errors="replace")
