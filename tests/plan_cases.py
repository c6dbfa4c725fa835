"""A real GPT trained by a plan: the stage's layers, as `ddpkit.bench.plan.Training` takes them."""

import time
from collections import Counter
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddpkit.bench.plan import Training
from ddpkit.checkpointing import checkpoint
from ddpkit.memory import count_states
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
    """What this rank has, says and sends: its losses, parameters, states, and when step 2 began."""
    training = Training(shape, plan, partial(Part, shape, plan), AdamW)
    shapes = {name: tuple(p.shape) for name, p in training.part.named_parameters()}
    torch.manual_seed(1)
    inputs, targets = batch(shape)
    place = dist.get_rank(training.data)
    mine = [rows.chunk(plan.data)[place] for rows in (inputs, targets)]
    losses = []
    for _ in range(steps):
        dist.barrier()
        begun = time.perf_counter()
        losses.append(training.step(*mine))
    return {"shapes": shapes, "states": states(training), "losses": losses, "begun": begun}


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


def said(records, begun):
    """{(op, bytes): how often} of what a rank said to others since then; receives not counted."""
    found = [r for r in records if r.issued >= begun and len(r.ranks) > 1 and r.op != "recv"]
    return Counter((record.op, record.bytes) for record in found)
