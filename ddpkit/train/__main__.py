"""Run `python -m ddpkit.train`, on ranks that it starts itself or on those of torchrun."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ..runtime.errors import LaunchError
from ..runtime.launch import launch
from ..runtime.wire import of_this_attempt
from .checkpoint import FolderError, problems_of_the_folder
from .config import TrainConfig, parse, problems
from .data import Sequences, read
from .report import draw_curve
from .run import read_log, sample_text, train


def main(arguments: list[str]) -> int:
    """Check the config, then train; return the exit code.

    arguments: those of the command line, without the program's name.
    Returns 0 after a whole training, 1 if a rank failed that was started here, 2 for a config that
    can't work (the reasons are printed). Under torchrun other errors are raised. SystemExit: as
    from `parse`.
    """
    config = parse(arguments)
    under_torchrun = dist.is_torchelastic_launched()
    world_size = int(os.environ["WORLD_SIZE"]) if under_torchrun else None
    found = problems(config, world_size)
    if not found:
        try:
            Sequences(read(config.text), config.length, config.seed)
        except (OSError, ValueError, ModuleNotFoundError) as error:
            found = [str(error)]
    found = found or problems_of_the_folder(config)
    if found:
        return refuse(found)
    if under_torchrun:
        join_torchruns_world()
        try:
            train_and_finish(config)
        except FolderError as error:
            return refuse([str(error)])
        dist.destroy_process_group()
        return 0
    try:
        launch(train_and_finish, config, world_size=config.world_size, live=True)
    except LaunchError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def refuse(found: list[str]) -> int:
    """Print, on rank 0 only, why this can't be trained; return the exit code, 2.

    found: the reasons, a sentence each.
    """
    if os.environ.get("RANK", "0") == "0":
        print("\n".join(["This can't be trained:", *found]), file=sys.stderr)
    return 2


def join_torchruns_world() -> None:
    """Join the ranks that torchrun started: over NCCL if each has a GPU of its own, otherwise Gloo.

    With Gloo, each rank computes with one thread. This rank also ends when torchrun's agent does
    (see `end_with_the_agent`).
    """
    end_with_the_agent()
    local = int(os.environ["LOCAL_RANK"])
    backend, device = "gloo", None
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.cuda.set_device(local)
        backend, device = "cpu:gloo,cuda:nccl", torch.device("cuda", local)
    else:
        torch.set_num_threads(1)
    store, rank, world_size = next(dist.rendezvous("env://"))
    dist.init_process_group(
        backend,
        store=of_this_attempt(store),
        rank=rank,
        world_size=world_size,
        device_id=device,
    )


def end_with_the_agent() -> None:
    """Start a thread that ends this rank, by SIGTERM, once torchrun's agent, its parent, is dead.

    Otherwise the ranks of a killed agent would train on, beside those of the next run.
    """
    agent = os.getppid()

    def watch() -> None:
        while os.getppid() == agent:
            time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def train_and_finish(config: TrainConfig) -> None:
    """Train; then, on rank 0, print a sample of text and draw the loss curve into `loss.png`.

    Every rank must call. An exact twin, a model of integers for comparing meshes, writes no text.
    There is no curve without a folder or matplotlib. If the curve can't be written, that is
    printed, and the training counts all the same.
    """
    trainer, _ = train(config)
    sample = "" if config.exact else sample_text(trainer)
    if dist.get_rank() == 0:
        print(sample, flush=True)
        if config.folder:
            try:
                draw_curve(read_log(config.folder), Path(config.folder) / "loss.png")
            except OSError as error:  # the disk is full; the training isn't worse for it
                print(f"loss.png can't be written: {error.strerror}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
