"""Steps of `ddpkit.train` with each of our ways to share out a training, beside PyTorch's own.

Model, text, loss and AdamW are the same code; each clips the gradient in its own way. Both send in
a plain process group, whose calls aren't recorded. Their losses must agree to 1e-3 in every step.
"""

import math
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from ..train import TrainConfig, Trainer
from ..train.mesh import Mesh
from ..train.trainer import OPTIMIZERS
from .fsdp import fully_sharded
from .interleave import WARM_UP, Contest, race
from .results import AGAIN, SPEED, Goal, Results, report, results_of
from .zero import torchs_zero

ROUNDS = 24
TORCHS = {"ddp": "torch's DDP", "zero1": "torch's ZeRO", "fsdp": "fully_shard"}
OURS = {"ddp": "BucketedDDP", "zero1": "ZeroOptimizer", "fsdp": "FSDP"}
GOALS = [Goal(OURS[sharding], TORCHS[sharding], 1.0) for sharding in OURS]
LEGEND = f"""\
Step: of `python -m ddpkit.train`, its loss and norm included.
{SPEED}"""
MODEL = TrainConfig(layers=6, width=256, heads=8, batch=16, data=2, log_every=0)


class PyTorchs(Trainer):
    """A trainer whose data axis is PyTorch's: DDP, its ZeRO, or `fully_shard` by blocks."""

    def wrap(self) -> None:
        group = self.mesh.groups["replicas"]
        if self.config.sharding == "fsdp":
            units = [f"blocks.{name}" for name in self.part.blocks]
            self.model = fully_sharded(self.part, group, units)
            self.copies = dict.fromkeys(self.part.parameters(), 1)  # they are new ones
        else:
            options = {"process_group": group, "gradient_as_bucket_view": True}
            self.model = DistributedDataParallel(self.part, **options)

    def make_optimizer(self) -> torch.optim.Optimizer:
        if self.config.sharding != "zero1":
            return super().make_optimizer()
        kind, options = OPTIMIZERS[self.config.optimizer]
        options = {"lr": self.config.lr, "parameters_as_bucket_view": True, **options}
        group = self.mesh.groups["replicas"]
        dealt = self.groups_of_parameters()
        return torchs_zero()(dealt, optimizer_class=kind, process_group=group, **options)

    def average(self) -> None:
        """Do nothing: PyTorch's wrappers have averaged at the end of backward."""

    def clip(self) -> float:
        limit = self.config.clip or math.inf
        norm = nn.utils.clip_grad_norm_(self.part.parameters(), limit)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


class Training:
    """A training whose next step is taken by a call. losses: of all steps so far."""

    def __init__(self, kind: type[Trainer], config: TrainConfig, plain: ProcessGroup):
        class OnPlain(kind):
            make_mesh = partial(on_plain, plain=plain)

        self.trainer = OnPlain(config)
        self.losses: list[float] = []

    def __call__(self) -> None:
        self.losses.append(self.trainer.step(len(self.losses))["loss"])


def on_plain(config: TrainConfig, device: str, plain: ProcessGroup) -> Mesh:
    mesh = Mesh(config, device)
    mesh.groups |= {"data": plain, "replicas": plain}
    return mesh


def contest(config: TrainConfig, plain: ProcessGroup) -> Contest:
    """Make the contest of PyTorch's sharding and ours; RuntimeError in `found`: losses differ."""
    theirs, ours = TORCHS[config.sharding], OURS[config.sharding]
    kinds = {theirs: PyTorchs, ours: Trainer, theirs + AGAIN: PyTorchs}
    races = {name: Training(kind, config, plain) for name, kind in kinds.items()}

    def found() -> None:
        right = races[theirs].losses
        for name, training in races.items():
            off = max(abs(a - b) for a, b in zip(training.losses, right, strict=True))
            if not off < 1e-3:
                raise RuntimeError(f"a loss of {name} is off by {off:.1e}: no time means anything")

    return Contest(races, found=found)


def measure(config: TrainConfig = MODEL, rounds: int = ROUNDS) -> Results:
    """Time steps of two ranks. rounds: turns of each variant."""
    found = Results(legend=LEGEND, time="Step")
    for sharding in OURS:
        one = replace(config, sharding=sharding, steps=rounds + WARM_UP)
        seconds, _ = race(partial(contest, one), rounds, world_size=2)
        results = results_of(f"{sharding}, {config.layers} × {config.width}", seconds, 2)
        for result in results:
            result.columns["Tokens/s"] = f"{config.batch * config.length / result.median_s:,.0f}"
        found += results
    return found


def main(name: str):
    report(name, measure(), GOALS)
