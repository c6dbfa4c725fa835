"""Run notebook 15's training, also by torchrun; kill a rank in the middle, damage a checkpoint.

A `TrainConfig` says what is trained, on which mesh of ranks, and in which folder checkpoints are
kept. The functions with a `config` argument run on every rank: pass them to `launch`. The notebook
calls the others itself, in its own process.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ..runtime.run import Run
from ..tools.passes import sent_by_all
from ..train import TrainConfig, Trainer, state_of, train, whole_parameters
from ..train.state import whole_state


def losses_of(config: TrainConfig) -> list[float]:
    """Train to the last step; return the loss of each step that was taken, in order.

    To be called on every rank, where it returns the same list. If the config's folder has
    checkpoints, training goes on from the latest undamaged one, and the list begins after it.
    """
    return [step["loss"] for step in train(config)[1]]


def end_of(config: TrainConfig) -> dict[str, torch.Tensor]:
    """Train to the last step; return the trained parameters as {name: whole tensor on the CPU}.

    To be called on every rank. Each gets the same tensors, put together if they are sharded. If the
    config's folder has checkpoints, training goes on from the latest undamaged one.
    """
    return whole_parameters(train(config)[0])


def twin_of(config: TrainConfig, count: int = 4) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Take the first `count` steps; return (their losses, {name: whole tensor of the state}).

    A loss is that of a step's whole batch, the same on every rank. The state has parameters,
    buffers, and the optimizer's values for each element. A tensor that is split between ranks is
    put together; of one that several ranks hold, each returns its own copy. To be called on every
    rank. Checkpoints are neither read nor written.
    To compare meshes, set `config.exact`: then `Trainer` trains the model's exact twin, in which
    parameters, activations, gradients and losses are integers, so all ranks of all meshes must
    return the same bits. The twin's optimizer, "sign", adds up each element's gradients over the
    steps, and moves the element by 1 against the sum's sign. Only the sums show a wrong scale of
    gradients: parameters and losses don't change.
    """
    trainer = Trainer(config)
    losses = [trainer.step(number)["loss"] for number in range(count)]
    return losses, whole_state(trainer)


def same(one: tuple, other: tuple) -> bool:
    """Return whether two trainings have equal losses and state, without any tolerance.

    one, other: (list of losses, {name: tensor}) of each, as `twin_of` returns them. `one` is the
        reference: only the tensors that it names are compared. KeyError: `other` lacks one of them.
    """
    equal = [torch.equal(one[1][name], other[1][name]) for name in one[1]]
    return one[0] == other[0] and all(equal)


def train_and_die(config: TrainConfig, at: int) -> None:
    """Train, but let rank 1 kill its own process when step `at` begins.

    To be called on every rank; the death makes the launch fail. Steps count from 0. The process
    dies by SIGKILL, as it would if memory ran out, so it can't clean up, and only what is in
    `config.folder` is left. Before it dies, rank 1 waits until the last checkpoint that was due is
    saved, but at most 60 seconds. `config.save_every` must not be 0 (save only the end), and `at`
    at least as large: if not, rank 1 waits all 60 seconds for a checkpoint that is never saved.
    """

    def die(number: int) -> None:
        if number == at and dist.get_rank() == 1:
            saved = Path(config.folder) / f"step-{at - at % config.save_every:08d}"
            until = time.monotonic() + 60
            while not saved.exists() and time.monotonic() < until:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    train(config, before_step=die)


def weigh(config: TrainConfig) -> int:
    """Take two training steps; return the bytes of the training's state that this rank holds.

    To be called on every rank. The state is the rank's part of the parameters, buffers and
    optimizer moments; gradients and activations aren't counted. The run also serves `sent`, which
    counts the bytes after the barrier between the two steps: in the first step ddpkit's FSDP also
    sends messages by which ranks check that they make their calls in the same order.
    """
    trainer = Trainer(config)
    trainer.step(0)  # in which ranks also exchange the order of their calls
    dist.barrier()
    trainer.step(1)
    held = 0
    for found in state_of(trainer).values():
        held += sum(box.nbytes for _, box in found.boxes)
    return held


def sent(run: Run) -> float:
    """Return the bytes that rank 0 sent after its last barrier, as if collective calls used a ring.

    In a launch of `weigh`, which has a barrier between two training steps, these are the bytes of
    the second step. They are computed from the sizes in the records of rank 0's calls: an
    all_reduce of 8 bytes among 4 ranks, for example, counts 2 × 3/4 × 8 = 12. In a broadcast ranks
    send unequal amounts, so all of them are charged to its root: if that is rank 0, it counts
    3 × 8, and otherwise nothing.

    run: what `launch` returned.
    ValueError: rank 0 made no barrier. KeyError: afterwards it made a call for which no count is
        known, such as all_to_all.
    """
    records = run.wire[0]
    after = max(at for at, record in enumerate(records) if record.op == "barrier")
    return sum(sent_by_all(record, 0, len(record.ranks)) for record in records[after + 1 :])


def flip_a_bit(folder: str | Path) -> Path:
    """Damage the newest checkpoint in a folder by changing one bit; return the checkpoint's path.

    A checkpoint is a folder such as `step-00000040`, after 40 steps; with these zeros, the newest
    is the last in alphabetical order. The bit is in the middle of one of its `.distcp` files, which
    hold tensors. The notebook then shows that reading the checkpoint finds the damage.

    IndexError: the folder has no checkpoint. StopIteration: the newest has no such file.
    """
    newest = sorted(Path(folder).glob("step-*[0-9]"))[-1]
    file = next(newest.glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    return newest


def under_torchrun(ranks: int, *flags: str) -> int:
    """Run `torchrun --nproc-per-node RANKS -m ddpkit.train FLAGS`; return its exit code.

    It returns when the training has ended; 0 means success. What the training prints is discarded.

    ranks: the number of processes. flags: the command-line arguments of `ddpkit.train`.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    command = [*torchrun, "-m", "ddpkit.train", *flags]
    return subprocess.run(command, capture_output=True, check=False).returncode
