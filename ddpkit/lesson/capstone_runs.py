"""Trainings of notebook 15: killed in a step, damaged on the disk, started by torchrun."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from ..runtime.run import Run
from ..tools.passes import sent_by_all
from ..train import TrainConfig, Trainer, state_of, train, whole_parameters


def losses_of(config: TrainConfig) -> list[float]:
    """Train, or go on, to the end; return the losses of the steps taken."""
    return [step["loss"] for step in train(config)[1]]


def end_of(config: TrainConfig) -> dict[str, torch.Tensor]:
    """Train, or go on, to the end; return the whole parameters."""
    return whole_parameters(train(config)[0])


def twin_of(config: TrainConfig, count: int = 4) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Take `count` steps; return their losses and the whole parameters."""
    trainer = Trainer(config)
    losses = [trainer.step(number)["loss"] for number in range(count)]
    return losses, whole_parameters(trainer)


def same(one: tuple, other: tuple) -> bool:
    """Tell whether two of `twin_of` are equal to the last bit."""
    equal = [torch.equal(one[1][name], other[1][name]) for name in one[1]]
    return one[0] == other[0] and all(equal)


def train_and_die(config: TrainConfig, at: int) -> None:
    """Train; rank 1 kills itself when step `at` begins."""

    def die(number: int) -> None:
        if number == at and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    train(config, before_step=die)


def weigh(config: TrainConfig) -> int:
    """Take a step, a barrier, a step; return the bytes of parameters and moments held here."""
    trainer = Trainer(config)
    trainer.step(0)  # in which ranks agree on orders
    dist.barrier()
    trainer.step(1)
    held = 0
    for found in state_of(trainer).values():
        held += sum(box.nbytes for _, box in found.boxes)
    return held


def sent(run: Run) -> float:
    """Count the bytes that rank 0 sent after its barrier, if collectives use a ring."""
    records = run.wire[0]
    after = max(at for at, record in enumerate(records) if record.op == "barrier")
    return sum(sent_by_all(record, 0, len(record.ranks)) for record in records[after + 1 :])


def flip_a_bit(folder: str | Path) -> Path:
    """Change one bit of the tensors in the newest checkpoint of a folder; return the checkpoint."""
    newest = sorted(Path(folder).glob("step-*"))[-1]
    file = next(newest.glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    return newest


def under_torchrun(ranks: int, *flags: str) -> int:
    """Run `torchrun --nproc-per-node RANKS -m ddpkit.train FLAGS`; return its exit code."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    command = [*torchrun, "-m", "ddpkit.train", *flags]
    return subprocess.run(command, capture_output=True, check=False).returncode
