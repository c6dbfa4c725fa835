"""Run a schedule: for each action of this rank receive, compute and send. Notebook 10."""

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import P2POp, ProcessGroup

from ..tensor_parallel import clip_grad_norm
from ..tools.spans import doing
from . import dry_run
from .dry_run import messages, rank_of_stage
from .mail import Mail
from .schedules import Schedule
from .stages import PipelineStage


class Pipeline:
    """A schedule with all it needs to run on the ranks of `group` (None: all): stages and loss.

    stages: those that the schedule gives to this rank. loss: called with the last stage's output
    and a micro-batch's targets; returns their mean loss. tied: this rank's copy of a weight that
    first and last stage share; None on other ranks. validate: False lets a wrong schedule run, such
    as one that hangs.

    spans: of the last step [(action, begin, end)], for example ("0F3", 1.25, 1.5) for stage 0's
    forward of micro-batch 3, in seconds of `time.perf_counter()` around computing alone.
    ValueError: the schedule is wrong, or is for other ranks or stages than these.
    """

    def __init__(
        self,
        stages: list[PipelineStage],
        schedule: Schedule,
        loss: Callable[[Tensor, Tensor], Tensor],
        tied: nn.Parameter | None = None,
        group: ProcessGroup | None = None,
        validate: bool = True,
    ):
        if validate:
            dry_run.validate(schedule)
        # Which rank has which stage is written in the schedule, and nowhere else.
        self.stages = {stage.number: stage for stage in stages}
        self.loss = loss
        self.tied = tied
        self.group = group
        self.rank = dist.get_rank(group)
        self.ranks = rank_of_stage(schedule)
        self.first = self.ranks[0]  # ranks, not stages
        self.last = self.ranks[max(self.ranks)]
        mine = sorted(number for number, rank in self.ranks.items() if rank == self.rank)
        here = sorted(self.stages)
        world_size = dist.get_world_size(group)
        if here != mine or len(schedule) != world_size:
            got = f"rank {self.rank} of {world_size} has stages {here}"
            wanted = f"a schedule for {len(schedule)} ranks, in which it has {mine}"
            raise ValueError(f"{got}, and got {wanted}: expected the same")
        # Sends and receives put in between, in one order that all ranks agree on.
        self.program = []
        for word in messages(schedule)[self.rank]:
            number, kind, k = re.fullmatch(r"(\d+)(\D+)(\d+)", word).groups()
            self.program.append((word, int(number), kind, int(k)))
        self.micro_batches = 1 + max(k for _, _, _, k in self.program)
        weights = [p for stage in stages for p in stage.module.parameters()]
        self.weights = list(dict.fromkeys(weights))  # one under two names comes once
        self.device = self.weights[0].device if weights else torch.device("cpu")
        self.spans: list[tuple[str, float, float]] = []

    def step(self, inputs: Tensor | None, targets: Tensor | None) -> Tensor:
        """Run forward and backward of a batch; return its mean loss, on every rank.

        inputs: the whole batch, for stage 0; targets: for the last stage; None on other ranks, or
        the same. Gradients are added to `.grad`. ValueError: a stage lacks its rows, or they can't
        be dealt out evenly: a mean of means would be wrong.
        """
        self.inputs = self.cut(inputs, "inputs", needed=0 in self.stages)
        self.targets = self.cut(targets, "targets", needed=max(self.ranks) in self.stages)
        # A new step: nothing is under way, and no stage keeps anything.
        self.mail = Mail(self.stages, self.ranks, self.group)
        self.losses: list[Tensor] = []
        self.spans = []
        for stage in self.stages.values():
            stage.reset()
        # The program: this rank's actions, in order, with their messages between them.
        for word, number, kind, k in self.program:
            with doing(word):
                if kind.startswith("RECV"):
                    self.mail.receive(number, kind[-1], k)
                elif kind == "F":
                    self.forward(word, number, k)
                elif kind in "BI":
                    self.backward(word, number, k, whole=kind == "B")
                elif kind == "W":
                    with self.timed(word):
                        self.stages[number].backward_weight(k)
                # A SEND needs nothing here: the action before it has handed on what it made.
        self.mail.wait()
        # Only the last stage has losses; the others learn the mean from it.
        loss = sum(self.losses, torch.zeros((), dtype=torch.float64, device=self.device))
        dist.broadcast(loss, group=self.group, group_src=self.last)
        return loss

    def cut(self, batch: Tensor | None, name: str, needed: bool) -> list:
        """Return the micro-batches of `batch`; if that is None, and not `needed`, as many None.

        name: "inputs" or "targets", for the text of the ValueErrors that `step` names.
        """
        m = self.micro_batches
        if batch is None and needed:
            got = f"rank {self.rank} got no {name}"
            raise ValueError(f"{got}, expected a batch's: its stage needs them")
        if batch is not None and len(batch) % m != 0:
            got = f"rank {self.rank} got {name} of {len(batch)} rows for {m} micro-batches"
            remedy = f"leave out {len(batch) % m}, as a DataLoader with drop_last=True does"
            raise ValueError(f"{got}, expected a multiple of {m}: {remedy}")
        return [None] * m if batch is None else list(batch.chunk(m))

    def share_of_loss(self, k: int, y: Tensor) -> Tensor:
        """Return micro-batch k's mean loss / their number, its share of the batch's mean loss."""
        return self.loss(y, self.targets[k]) / self.micro_batches

    @contextlib.contextmanager
    def timed(self, word: str) -> Iterator[None]:
        """Add to `spans` when the computing inside began and ended. word: its action, as "0F3"."""
        begin = time.perf_counter()
        yield
        self.spans.append((word, begin, time.perf_counter()))

    def forward(self, word: str, number: int, k: int) -> None:
        """Do the action `word`: take micro-batch k through stage `number`; hand on the output."""
        stage = self.stages[number]
        last = number == max(self.ranks)  # its output is the loss: no stage comes after
        x = self.inputs[k] if number == 0 else self.mail.take(number, "F", k)
        with self.timed(word):
            y = stage.forward(k, x, partial(self.share_of_loss, k) if last else None)
        if last:
            self.losses.append(y.double())
        else:
            self.mail.hand_on(y, number + 1, "F", k)

    def backward(self, word: str, number: int, k: int, whole: bool) -> None:
        """Do the action `word`: run backward of stage `number`; hand on the input's gradient.

        whole: False computes that gradient alone; those of the weights are left to a later action.
        """
        stage = self.stages[number]
        last = number == max(self.ranks)
        gradient = None if last else self.mail.take(number, "B", k)
        run = stage.backward if whole else stage.backward_input
        with self.timed(word):
            gradient = run(k, gradient)
        if number > 0:
            self.mail.hand_on(gradient, number - 1, "B", k)

    def synchronize(self) -> None:
        """Make the tied weight's gradient the sum of both copies', before the optimizer's step.

        It is an all-reduce between first and last rank: each sends its gradient, or zeros, once.
        """
        if self.tied is None or self.first == self.last:
            return
        other = self.last if self.rank == self.first else self.first
        if self.tied.grad is None:
            self.tied.grad = torch.zeros_like(self.tied)
        mine = self.tied.grad
        # Both send what they have before either adds: the same two summands on both ranks.
        theirs = torch.empty_like(mine)
        send = P2POp(dist.isend, mine, group=self.group, group_peer=other)
        receive = P2POp(dist.irecv, theirs, group=self.group, group_peer=other)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
        mine += theirs

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale the whole model's gradient to a norm of at most `max_norm`; return the norm it had.

        In place, after `synchronize`; the same on every rank. Cost: one number all-reduced.
        """
        ends = 1 if self.first == self.last else 2  # ranks that have the tied weight
        # Each rank's own weights count once; the tied one would count on both ends.
        copies = {weight: ends if weight is self.tied else 1 for weight in self.weights}
        return clip_grad_norm(copies, max_norm, self.group)
