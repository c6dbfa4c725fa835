"""This rank's part of a GPT: the layers of one pipeline stage, each cut among the tensor ranks.

Layer 0 is the embedding, layers 1 to L are the blocks, layer L+1 is norm and head. Parameters keep
the names that they have in the whole GPT, on whichever rank they are.
"""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .. import context_parallel
from ..checkpointing import checkpoint
from ..context_parallel.deal import NO_TARGET, contiguous, places, zigzag
from ..experts import make_sparse
from ..models import GPT
from ..pipeline.stages import cut_layers, gpt_layers
from ..tensor_parallel import (
    ColumnParallelLinear,
    VocabParallelEmbedding,
    vocabulary_cross_entropy,
)
from ..tensor_parallel.sequence import split_block
from . import twin
from .config import TrainConfig
from .mesh import Mesh

ATTENTION = {
    "zigzag": context_parallel.zigzag_attention,
    "ring": context_parallel.ring_attention,
    "gathered": context_parallel.gathered_attention,
    "all_to_all": context_parallel.all_to_all_attention,
}


def make_gpt(config: TrainConfig) -> GPT:
    """Seed torch's generator from the config, and make the whole model: the same on every rank."""
    torch.manual_seed(config.seed)
    gpt = GPT(256, config.length, config.width, config.heads, config.layers, config.dropout)
    if config.experts:
        make_sparse(gpt, config.experts, config.top_k)
    if config.exact:
        twin.make_exact(gpt, config.seed)
    return gpt


def layers_of(config: TrainConfig, gpt: GPT, stage: int) -> range:
    """Return the numbers of the layers in a pipeline stage.

    Stages are cut so that the one with most weights in linear layers has as few as possible.
    """
    ends = [0]
    for layers in cut_layers(gpt_layers(gpt), config.pipeline):
        ends.append(ends[-1] + len(layers))
    return range(ends[stage], ends[stage + 1])


def share(config: TrainConfig, mesh: Mesh, tokens: Tensor, padding: int = 0) -> Tensor:
    """Return this context rank's tokens of whole sequences: (n, length) to (n, tokens a rank).

    W context ranks have two of 2W equal chunks each, as the config's attention expects: for zigzag
    and gathered, rank r has chunks r and 2W−1−r; otherwise 2r and 2r+1. If 2W doesn't divide the
    length, the end is filled with `padding` first.
    """
    deal = zigzag if config.attention in ("zigzag", "gathered") else contiguous
    chunks = deal(config.context)
    filled = F.pad(tokens, (0, -config.length % (2 * config.context)), value=padding)
    return filled[:, places(chunks, mesh.rank("context"), filled.shape[1])]


class Part(nn.Module):
    """The layers that this rank computes: its pipeline stage, cut among the tensor ranks.

    gpt: the whole model, whose layers are taken, not copied. step, sample (the first sequence of a
    micro-batch): set before each forward; dropout's random numbers follow from them, the seed and
    the layer. So they are the same on tensor ranks, and on any mesh with the same micro-batches.
    places: the positions of this rank's tokens in the sequence.
    """

    def __init__(self, config: TrainConfig, gpt: GPT, mesh: Mesh):
        super().__init__()
        self.config = config
        self.layers = layers_of(config, gpt, mesh.rank("pipeline"))
        self.first = 0 in self.layers
        self.last = config.layers + 1 in self.layers
        self.tensor: ProcessGroup | None = None
        self.step = self.sample = 0
        self.places = torch.arange(config.length)
        self.dropout = gpt.dropout
        if self.first:
            self.tokens = gpt.tokens
            self.positions = gpt.positions
        blocks = {str(n): gpt.blocks[n] for n in range(config.layers) if n + 1 in self.layers}
        self.blocks = nn.ModuleDict(blocks)
        if self.last:
            self.norm = gpt.norm
            self.head = gpt.head
        if config.tensor > 1:
            self.deal_out(gpt, mesh.groups["tensor"])
        if config.context > 1:
            self.share_sequence(mesh)
        if config.recompute:
            # Inside the block, so that FSDP, around it, has prefetched its parameters before the
            # second call. `checkpoint` also keeps the state of the random numbers.
            for block in self.blocks.values():
                block.forward = partial(checkpoint, block.forward)

    def deal_out(self, gpt: GPT, group: ProcessGroup) -> None:
        """Replace the layers by this tensor rank's parts of them, in place; all in `group` call."""
        self.tensor = group
        if self.first:
            self.tokens = VocabParallelEmbedding(gpt.tokens, group)
        for name, block in self.blocks.items():
            self.blocks[name] = split_block(block, group)
        if self.last:
            self.head = ColumnParallelLinear(gpt.head, group)
        if self.first and self.last:  # one weight under two names, as in the model
            self.head.weight = self.tokens.weight

    def share_sequence(self, mesh: Mesh) -> None:
        """Make the blocks attend to the keys and values of all context ranks; set `places`."""
        attention = partial(ATTENTION[self.config.attention], group=mesh.groups["context"])
        for block in self.blocks.values():
            block.attention = attention
            block.repeats = 1
        self.places = share(self.config, mesh, self.places[None], self.config.length - 1)[0]

    def forward(self, x: Tensor) -> Tensor:
        """Compute the stage: return activations (n, length, width), or logits in the last stage.

        x: tokens (n, length), int64, in the first stage; (n, length, width) in others.
        """
        c = self.config
        half = c.dtype != "float32" and c.sharding != "fsdp"  # FSDP does its own casting
        dtype = getattr(torch, c.dtype) if half else torch.bfloat16
        with torch.autocast(x.device.type, dtype, enabled=half):
            if self.first:
                self.draw(0)
                x = self.dropout(self.tokens(x) + self.positions[self.places])
            for name, block in self.blocks.items():
                self.draw(1 + int(name))
                x = block(x)
            if self.last:
                x = self.head(self.norm(x))
        return x

    def draw(self, layer: int) -> None:
        """Seed torch's generator from seed, step, sample and layer, if dropout is used."""
        if self.config.dropout and self.training:
            numbers = self.config.seed, self.step, self.sample, layer
            torch.manual_seed(hash(numbers) % 2**63)

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return each target's cross-entropy in nats, (n, length); 0 where it is NO_TARGET.

        logits: (n, length, this rank's part of the vocabulary). targets: (n, length), int64. With
        `exact` in the config it is the squared error of the logits instead (`twin.squares`).
        """
        known = targets != NO_TARGET
        targets = targets.where(known, 0)
        if self.config.exact:
            losses = twin.squares(logits, targets, self.start(), self.tensor)
        elif self.tensor is not None:
            losses = vocabulary_cross_entropy(logits, targets, self.start(), self.tensor)
        else:
            flat = logits.flatten(0, 1).float()
            losses = F.cross_entropy(flat, targets.flatten(), reduction="none").view_as(targets)
        return losses.where(known, 0)

    def start(self) -> int:
        """Return the first token of the vocabulary whose logits this rank computes (last stage)."""
        if self.tensor is None:
            return 0
        _, hands = self.head.split["weight"]
        return int(hands[dist.get_rank(self.tensor)][0])
