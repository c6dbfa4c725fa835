"""One step of a training on a mesh: forward, backward, gradients averaged, clipped, applied."""

import contextlib
import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import experts
from ..context_parallel.deal import NO_TARGET
from ..fast.buckets import BucketedDDP
from ..fast.fsdp import FSDP
from ..fast.zero import ZeroOptimizer
from ..mixed_precision import LossScaler
from ..pipeline import Pipeline, PipelineStage, gpipe, one_f_one_b, zero_bubble
from ..tensor_parallel import clip_grad_norm, count_copies
from ..tools.rate import learning_rate
from .config import TrainConfig
from .data import Sequences, read
from .mesh import Mesh
from .part import Part, make_gpt, share
from .twin import Sign

SCHEDULES = {"1f1b": one_f_one_b, "gpipe": gpipe, "zero_bubble": zero_bubble}
OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {"betas": (0.9, 0.95)}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9}),
    "sign": (Sign, {}),
}


def own_device() -> torch.device:
    """Return the current GPU if NCCL is among the ranks' backends, otherwise the CPU."""
    return torch.device("cuda" if "nccl" in dist.get_backend() else "cpu")


class Trainer:
    """This rank's share of a training: its part of the model, its optimizer, its sequences.

    Make it and call it on every rank. `step(n)` takes step n, which depends on parameters, buffers,
    optimizer state, float16's loss scale and n alone: a training that loads these goes on as if it
    had never stopped. config: the same on every rank, and checked by `config.problems`.
    """

    make_mesh = Mesh

    def __init__(self, config: TrainConfig):
        self.config = config
        self.device = own_device()
        self.mesh = self.make_mesh(config, self.device.type)
        self.sequences = Sequences(read(config.text), config.length, config.seed)
        self.part = Part(config, make_gpt(config), self.mesh).to(self.device)
        self.part.places = self.part.places.to(self.device)
        # Count the ranks that hold a parameter before FSDP or ZeRO cut it.
        self.copies = self.count_copies()
        self.wrap()
        self.optimizer = self.make_optimizer()
        self.scaler = LossScaler(dynamic=True) if config.dtype == "float16" else None
        self.pipeline = self.make_pipeline() if config.pipeline > 1 else None
        self.used: list[int] = []  # the sequences of this rank in the last step

    def count_copies(self) -> dict[nn.Parameter, int]:
        """Return {parameter: the number of tensor and pipeline ranks that hold it alike}.

        Data and context ranks, which all hold it, aren't counted: see `shares`.
        """
        c = self.config
        copies = dict.fromkeys(self.part.parameters(), 1)
        if c.tensor > 1:
            copies = count_copies(self.part, self.mesh.groups["tensor"])
        if c.pipeline > 1 and (self.part.first or self.part.last):
            copies[self.tied()] *= 2  # on the first and on the last stage
        return copies

    def tied(self) -> nn.Parameter | None:
        """Return this stage's copy of the weight that embedding and head share, or None."""
        if self.part.first:
            return self.part.tokens.weight
        return self.part.head.weight if self.part.last else None

    def wrap(self) -> None:
        """Wrap this rank's part in DDP or FSDP, or call `share_experts` on it, in place.

        Sets `model`, and `synced`, which makes a context in which backward sends nothing; with
        experts also `copies`. ZeRO needs no wrapper: its optimizer averages the gradients.
        """
        c, replicas = self.config, self.mesh.groups["replicas"]
        self.model: nn.Module = self.part
        self.synced = contextlib.nullcontext  # around all micro-batches but the last
        if c.experts and c.share_experts:
            experts.share_experts(self.part, self.mesh.groups["data"], self.mesh.groups["data"])
            self.copies = dict.fromkeys(self.part.parameters(), 1)
        elif c.sharding == "ddp":
            self.model = BucketedDDP(self.part, group=replicas)
            self.synced = self.model.no_sync
        elif c.sharding == "fsdp":
            dtype = None if c.dtype == "float32" else getattr(torch, c.dtype)
            reduce_dtype = None if dtype is None else torch.float32
            units = [f"blocks.{name}" for name in self.part.blocks]
            self.model = FSDP(self.part, dtype, reduce_dtype, group=replicas, wrap=units)
            self.synced = self.model.no_sync

    def groups_of_parameters(self) -> list[dict]:
        """Return the optimizer's parameter groups; only matrices have weight decay."""
        c = self.config
        # A bucket of ZeRO has one group's parameters: they must be on equally many ranks.
        groups: dict[tuple, list] = {}
        for parameter, copies in self.copies.items():
            if parameter.requires_grad:
                decay = c.weight_decay if parameter.dim() > 1 else 0.0
                groups.setdefault((decay, copies), []).append(parameter)
        # ZeRO sends from the last group to the first. There are vectors in every layer, so that
        # their bucket is full last: it must not stand in front of the matrices'.
        dealt = []
        for decay, copies in sorted(groups, key=lambda key: key[0]):
            decays = {} if c.optimizer == "sign" else {"weight_decay": decay}
            dealt.append({"params": groups[decay, copies], **decays})
        return dealt

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer; with ZeRO, one that shards its state, and set `synced`."""
        c = self.config
        kind, options = OPTIMIZERS[c.optimizer]
        dealt = self.groups_of_parameters()
        if c.sharding == "zero1":
            made = ZeroOptimizer(
                dealt, kind, group=self.mesh.groups["replicas"], lr=c.lr, **options
            )
            self.synced = made.no_sync
            return made
        return kind(dealt, lr=c.lr, **options)

    def make_pipeline(self) -> Pipeline:
        """Return the pipeline of which this rank has one stage."""
        c = self.config
        rows = c.batch // (c.data * c.micro_batches)
        dtype = torch.float64 if c.exact else torch.float32
        receives = torch.empty(
            rows, len(self.part.places), c.width, dtype=dtype, device=self.device
        )
        stage = Stage(self.model, self.mesh.rank("pipeline"), receives)
        stage.trainer = self
        schedule = SCHEDULES[c.schedule](c.pipeline, c.micro_batches)
        group = self.mesh.groups["pipeline"]
        return Pipeline([stage], schedule, self.pipelined_loss, self.tied(), group)

    # A step

    def step(self, number: int) -> dict[str, float]:
        """Take step `number`, from 0; return {"loss", "norm", "lr"}, the same on every rank.

        The loss is the batch's mean, and the norm the gradient's before clipping. In float16,
        parameters stay as they are if a gradient overflowed.
        """
        c = self.config
        rate = learning_rate(number, c.steps, c.warmup, c.lr, c.decay_to * c.lr)
        if c.exact:
            rate = 1.0
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        loss = self.backward(number)
        self.average()
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        norm = self.clip()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if c.experts:
            experts.balance(self.part, 1e-3, self.mesh.groups["data"])
        return {"loss": loss, "norm": norm, "lr": rate}

    def backward(self, number: int) -> float:
        """Compute the gradients of a step's batch; return its mean loss over all ranks.

        Gradients may only be used after `average`, which finishes sending them.
        """
        c = self.config
        batch = self.sequences.of_step(number, c.batch)
        shares = torch.tensor(batch).tensor_split(c.data)
        self.used = shares[self.mesh.rank("data")].tolist()
        self.begin(number)
        rows = self.sequences.rows(self.used).to(self.device)
        inputs, targets = rows[:, :-1], rows[:, 1:]
        if c.context > 1:  # shifted while whole: a chunk's last target is in the next one
            inputs = share(c, self.mesh, inputs)
            targets = share(c, self.mesh, targets, NO_TARGET)
        if self.pipeline is None:
            loss = self.accumulate(inputs, targets)
        else:
            with self.synced():
                loss = self.pipeline.step(inputs, targets)
            loss = loss / (self.scaler.get_scale() if self.scaler else 1.0)
        loss = loss.double()
        dist.all_reduce(loss, group=self.mesh.groups["replicas"])
        return loss.item() / c.replicas

    def begin(self, number: int) -> None:
        """Set what dropout is seeded from: the step, and the first sample of each micro-batch."""
        self.part.step = number
        split = torch.tensor(self.used).tensor_split(self.config.micro_batches)
        self.first_samples = [int(part[0]) for part in split]

    def accumulate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run forward and backward of each micro-batch; return the sum of their losses, detached.

        inputs, targets: of this rank's sequences, (n, tokens of a context rank). DDP, FSDP and ZeRO
        send gradients only during the last backward.
        """
        m = self.config.micro_batches
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        parts = zip(inputs.tensor_split(m), targets.tensor_split(m), strict=True)
        for k, (x, y) in enumerate(parts):
            self.part.sample = self.first_samples[k]
            with self.synced() if k < m - 1 else contextlib.nullcontext():
                loss = self.loss(self.model(x), y)
                (self.scaler.scale(loss) if self.scaler else loss).backward()
            total += loss.detach()
        return total

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return these targets' part of the batch's mean loss, times the number of replicas.

        Averaged over the replicas, its gradients are those of the mean, however uneven the parts
        are. With `config.exact` (a training in integers, see `twin`) it is a part of the sum.
        """
        c = self.config
        counted = 1 if c.exact else c.batch * c.length
        return self.part.losses(logits, targets).sum() * (c.replicas / counted)

    def pipelined_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return a micro-batch's loss times the number of micro-batches, scaled for float16.

        This undoes the pipeline's division by that number: `loss` already gives parts of a mean,
        which are to be added up.
        """
        loss = self.loss(logits, targets) * self.config.micro_batches
        return self.scaler.scale(loss) if self.scaler else loss

    def average(self) -> None:
        """Make gradients the means over the replicas; add up those of the weight on two stages."""
        c = self.config
        if self.pipeline is not None:
            self.pipeline.synchronize()
        if c.experts and c.share_experts:
            alone = self.mesh.groups["tensor"]  # one rank: an expert has no replica
            experts.average_gradients(self.part, alone, self.mesh.groups["data"])
        elif c.sharding == "zero1":
            self.optimizer.synchronize()
        else:
            self.model.synchronize()

    def clip(self) -> float:
        """Scale the whole gradient to a norm of at most `config.clip`; return the norm it had."""
        limit = self.config.clip or math.inf
        return float(clip_grad_norm(self.shares(), limit))

    def shares(self) -> dict[nn.Parameter, int]:
        """Return {parameter or shard: the number of all ranks that hold its averaged gradient}."""
        c = self.config
        if c.experts and c.share_experts:
            return experts.count_copies(self.part)
        if c.sharding == "ddp":
            return {p: copies * c.replicas for p, copies in self.copies.items()}
        if c.sharding == "fsdp":
            return self.copies
        return {b.shard: self.copies[b.parameters[0]] for b in self.optimizer.buckets}


class Stage(PipelineStage):
    """A pipeline stage that sets `part.sample` by the micro-batch before forward, for dropout."""

    trainer: Trainer

    def forward(self, k: int, x: Tensor, loss: Callable | None = None) -> Tensor:
        self.trainer.part.sample = self.trainer.first_samples[k]
        return super().forward(k, x, loss)
