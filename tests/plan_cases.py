"""A real GPT trained by a plan: the stage's layers, as `ddpkit.bench.plan.Training` takes them."""

import time
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddpkit.bench.plan import Training
from ddpkit.checkpointing import checkpoint
from ddpkit.memory import count_states, measure_saved, most_bytes
from ddpkit.models import GPT, mean_loss
from ddpkit.pipeline import cut_layers, gpt_layers
from ddpkit.tensor_parallel import (
    ColumnParallelLinear,
    VocabParallelEmbedding,
    split_block,
    vocabulary_cross_entropy,
)
from ddpkit.tools.plan import Shape

SHAPE = Shape(layers=4, width=16, heads=4, vocabulary=37, length=8, batch=8)


class AdamW(torch.optim.AdamW):
    """Notes what gradients it found."""

    def __init__(self, params):
        super().__init__(params, lr=1e-2)

    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        self.gradient_bytes = sum(gradient.nbytes for gradient in gradients)
        return super().step(closure)


def gpt(shape=SHAPE):
    torch.manual_seed(0)
    return GPT(shape.vocabulary, shape.length, shape.width, shape.heads, shape.layers)


def batch(shape=SHAPE):
    tokens = torch.randint(shape.vocabulary, (shape.batch, shape.length + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Part(nn.Module):
    def __init__(self, shape, plan, stage, groups):
        super().__init__()
        model = gpt(shape)
        sizes = [len(part) for part in cut_layers(gpt_layers(model), plan.pipeline)]
        before = sum(sizes[: stage.number])
        numbers = range(before, before + sizes[stage.number])
        self.first, self.last = 0 in numbers, shape.layers + 1 in numbers
        self.recompute = plan.checkpoint
        self.group = groups["tensor"] if plan.tensor > 1 else None
        self.tokens = model.tokens if self.first else None
        self.positions = model.positions if self.first else None
        blocks = {str(n): model.blocks[n] for n in range(shape.layers) if n + 1 in numbers}
        self.blocks = nn.ModuleDict(blocks)
        self.norm = model.norm if self.last else None
        self.head = model.head if self.last else None
        if self.group:
            self.deal_out()

    @property
    def tied(self):
        if self.first == self.last:
            return None
        return self.tokens.weight if self.first else self.head.weight

    def deal_out(self):
        if self.first:
            self.tokens = VocabParallelEmbedding(self.tokens, self.group)
        for name, block in self.blocks.items():
            self.blocks[name] = split_block(block, self.group)
        if self.last:
            self.head = ColumnParallelLinear(self.head, self.group)
        if self.first and self.last:
            self.head.weight = self.tokens.weight

    def forward(self, x):
        if self.first:
            x = self.tokens(x) + self.positions
        for block in self.blocks.values():
            x = checkpoint(block, x) if self.recompute else block(x)
        return self.head(self.norm(x)) if self.last else x

    def losses(self, logits, targets):
        if self.group is None:
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        _, hands = self.head.split["weight"]
        start = int(hands[dist.get_rank(self.group)][0])
        return vocabulary_cross_entropy(logits, targets, start, self.group)


def train(shape, plan, steps=3):
    """What this rank has, says and keeps: losses, shapes, bytes, and when the last step was."""
    training = Training(shape, plan, partial(Part, shape, plan), AdamW)
    shapes = {name: tuple(p.shape) for name, p in training.part.named_parameters()}
    torch.manual_seed(1)
    place = dist.get_rank(training.data)
    mine = [rows.chunk(plan.data)[place] for rows in batch(shape)]
    losses = []
    for _ in range(steps):
        begun = time.perf_counter()
        losses.append(training.step(*mine))
    ended = time.perf_counter()
    counted = states(training)
    return {
        "losses": losses,
        "shapes": shapes,
        "states": counted,
        "last": (begun, ended),
        "most": most_bytes(partial(training.step, *mine), tensors(training)),
        "saved": saved(training, *mine),
    }


def train_all(shape, plans):
    return [train(shape, plan) for plan in plans]


def saved(training, inputs, targets):
    """The bytes that a micro-batch keeps, where no wrapper and no other stage has a part in it."""
    if training.plan.pipeline > 1 or training.plan.sharded == "fsdp":
        return None
    rows = len(inputs) // training.plan.micro_batches
    part = training.part
    x, y = inputs[:rows].clone(), targets[:rows].clone()  # no views of the whole batch
    kept = measure_saved(lambda: part.losses(part(x), y).mean())
    return sum(piece.nbytes for piece in kept)


def tensors(training):
    """All that stays from step to step."""
    found = [*training.part.parameters()]
    found += [bucket.flat for bucket in getattr(training.model, "buckets", ())]
    optimizers = [training.optimizer]
    if training.plan.sharded == "zero1":
        optimizers = [bucket.optimizer for bucket in training.optimizer.buckets]
        found += [bucket.gradients for bucket in training.optimizer.buckets]
    for optimizer in optimizers:
        found += [value for state in optimizer.state.values() for value in state.values()]
    return found


def states(training):
    """{kind: bytes}, but for AdamW's counters."""
    optimizer = training.optimizer
    counted = count_states(training.part)._asdict()
    if training.plan.sharded == "zero1":
        gradients = sum(bucket.gradients.nbytes for bucket in optimizer.buckets)
        return counted | {"gradients": gradients, "optimizer": optimizer.state_bytes()}
    kept = [value for state in optimizer.state.values() for value in state.values()]
    nbytes = sum(value.nbytes for value in kept if value.dim() > 0)
    return counted | {"gradients": optimizer.gradient_bytes, "optimizer": nbytes}


def alone(shape=SHAPE, steps=3):
    """The losses of the serial model."""
    model = gpt(shape)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad])
    torch.manual_seed(1)
    inputs, targets = batch(shape)
    losses = []
    for _ in range(steps):
        loss = mean_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def said(records, begun, ended):
    """[(op, bytes)] that a rank said to others between two moments, in order; no receives."""
    found = [r for r in records if begun <= r.issued <= ended and len(r.ranks) > 1]
    found.sort(key=lambda record: record.issued)
    return [(record.op, record.bytes) for record in found if record.op != "recv"]
