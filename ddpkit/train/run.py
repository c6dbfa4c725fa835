"""A whole training: resume, step, log and save; then read the log, and draw a sample of text."""

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

LEAVING_S = 5.0  # seconds for the ranks of a killed run to end


def train(
    config: TrainConfig, before_step: Callable[[int], None] = lambda number: None
) -> tuple[Trainer, list[dict]]:
    """Train on the ranks that run already; return (trainer, log of this rank's steps).

    Every rank calls it: under `launch`, under torchrun, or alone in a world of one rank. If the
    folder has checkpoints, training resumes from the latest undamaged one. A save that fails is
    reported in print, and training goes on.
    The log has for each step of this call, so not for those before a resume, {"step", "loss",
    "norm", "lr", "seconds", "tokens_per_s", "mfu"}, and under `launch`, which records
    communication, "exposed": the seconds spent waiting for it.

    before_step: called on every rank with each step's number, from 0, before the step.
    FolderError: another run trains in the folder, its checkpoint has another model or samples, or
    it can't be made or opened.
    """
    with alone_in(config.folder):
        return train_alone(config, before_step)


def train_alone(config: TrainConfig, before_step: Callable) -> tuple[Trainer, list[dict]]:
    """Train as `train` does, which calls this while it holds the folder's lock."""
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

    Every rank enters; rank 0 holds the lock, which ends with its process. There is none for an
    empty `folder`, and none on Windows. FolderError, on every rank: another run holds it, or rank 0
    can't make or open the folder.
    """
    handle, wrong = None, [""]
    if folder and dist.get_rank() == 0 and os.name == "posix":
        try:
            handle = lock(folder)
        except BlockingIOError:
            wrong = [f"another run trains in {folder}: end it, or choose another folder."]
        except OSError as error:
            wrong = [f"{folder} can't be used: {error.strerror}. Choose another folder."]
    if folder:
        dist.broadcast_object_list(wrong, src=0)
    if wrong[0]:
        raise FolderError(wrong[0])
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def lock(folder: str) -> int:
    """Lock the folder, which is created if needed; return a handle that holds the lock while open.

    Waits up to `LEAVING_S` seconds for another process to let go: the ranks of a killed run take a
    moment to end. On a file system without locks the handle locks nothing.
    BlockingIOError: another process still holds the lock.
    """
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
    """Return a line such as "resumed after 40 steps: step 40 is next"; or "all are done"."""
    after = "1 step" if first == 1 else f"{first} steps"
    return f"resumed after {after}: " + (
        f"step {first} is next" if first < steps else "all are done"
    )


def due(config: TrainConfig, steps: int) -> bool:
    """Return whether to save after `steps` steps: at multiples of `save_every`, and at the end."""
    every = config.save_every
    return steps == config.steps or (every > 0 and steps % every == 0)


def attempt(save: Callable, log: "Log") -> None:
    """Call `save`; print its SaveError on rank 0, since a full disk needn't end the training."""
    try:
        save()
    except SaveError as error:
        say(f"{error}. Training goes on.", log)


def samples(trainer: Trainer) -> list[int]:
    """Return the numbers (places in the text) of the last step's sequences, of all data ranks.

    Every rank must call, and gets all: they are gathered along the mesh's data axis.
    """
    used: list = [None] * trainer.config.data
    dist.all_gather_object(used, trainer.used, group=trainer.mesh.groups["data"])
    return [sample for rank in used for sample in rank]


@contextmanager
def exposed() -> Iterator[list[float]]:
    """Yield a list, filled at the end with the seconds of each wait for communication inside.

    Waits are this rank's, the last of each call; empty where communication isn't recorded.
    """
    waits: list[float] = []
    records = recorder().records if recorder() else []
    before = len(records)
    yield waits
    for record in records[before:]:
        if record.waited is not None and record.done is not None:
            waits.append(max(0.0, record.done - record.waited))


def say(text: str, log: "Log") -> None:
    """Print a text on rank 0, unless it is empty. log: has the number of this rank."""
    if text and log.rank == 0:
        print(text, flush=True)


class Log:
    """The file `log.jsonl` in the folder, a line of JSON for each step; rank 0 writes it.

    Without a folder nothing is written. Steps that are taken again after a resume are written
    again: of two lines for one step the later counts. Lines that can't be written, as on a full
    disk, are kept and tried again with the next step; `error` says why, and is None once all are
    written.
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
        """Append a step, a dict, on rank 0 alone; an OSError is kept in `error`, not raised."""
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
    """Append a newline if the last line is half-written: `read_log` then skips that line only."""
    if path.exists() and path.stat().st_size and not path.read_bytes().endswith(b"\n"):
        with open(path, "a") as file:
            file.write("\n")


def read_log(folder: str | Path) -> list[dict]:
    """Return the steps of a log in order, each as it was last taken; skip half-written lines.

    A step is a dict as in the log that `train` returns, with "samples": the numbers of its
    sequences, of all ranks. FileNotFoundError: the folder has no log.
    """
    steps = {}
    for line in (Path(folder) / "log.jsonl").read_text(errors="replace").splitlines():
        try:
            step = json.loads(line)
        except ValueError:
            continue  # half-written by a rank that was killed
        steps[step["step"]] = step
    return [steps[number] for number in sorted(steps)]


def audit_samples(folder: str | Path, number: int) -> list[str]:
    """List, as sentences, what is wrong with the samples in a training's log; empty if nothing is.

    number: of sequences in an epoch. No step may be missing, and no epoch may have a sequence
    twice: then every finished epoch has each once.
    """
    return data.ledger({step["step"]: step["samples"] for step in read_log(folder)}, number)


@torch.no_grad()
def sample_text(trainer: Trainer, prompt: str = "The ", count: int = 300) -> str:
    """Continue `prompt` by `count` bytes drawn from the model's predictions; return the whole text.

    prompt: not empty. Bytes that aren't UTF-8 are replaced in the text.
    Every rank must call: each puts the whole model together first, on the CPU, whatever the mesh.
    All draw the same bytes, from the config's seed. Cost: a whole forward for each byte.
    """
    c = trainer.config
    gpt = make_gpt(c)
    gpt.load_state_dict(whole_parameters(trainer), strict=False)
    gpt.eval()
    generator = torch.Generator().manual_seed(c.seed)
    tokens = list(prompt.encode())
    for _ in range(count):
        seen = torch.tensor([tokens[-c.length :]])
        likely = (gpt(seen)[0, -1] / 0.8).softmax(-1)  # temperature 0.8: less daring than the model
        tokens.append(int(torch.multinomial(likely, 1, generator=generator)))
    return bytes(tokens).decode(errors="replace")
