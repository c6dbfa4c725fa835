"""All that a training is, by name: parameters, buffers and optimizer state as whole tensors.

Names are the whole model's, on any mesh; each tensor is a `Pieces` of what this rank has of it.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..fast.fsdp import FSDP
from ..fast.zero import ZeroOptimizer
from ..tensor_parallel.split import splits
from .pieces import Pieces, Split, pieces
from .trainer import Trainer

TIED = {"head.weight": "tokens.weight"}  # one weight: of two names the model's first


def state_of(trainer: Trainer) -> dict[str, Pieces]:
    """{name: what this rank has of the tensor}, views into which a checkpoint can be read.

    "parameters.blocks.0.out.weight", "buffers...", "optimizer.exp_avg.blocks.0.out.weight". The
    optimizer must have its state: see `make_state`.
    """
    found = {}
    layout = Layout(trainer)
    for name, parameter in layout.names.items():
        values = parameter.detach().view(-1)
        found[f"parameters.{name}"] = layout.pieces(name, values, layout.first(name))
    for name, buffer in trainer.part.named_buffers():
        found[f"buffers.{name}"] = pieces(tuple(buffer.shape), buffer.view(-1), 0, None)
    for name, key, values, first in kept(trainer, layout):
        found[f"optimizer.{key}.{name}"] = layout.pieces(name, values, first)
    return found


class Layout:
    """The places of this rank's parameters in the whole ones.

    names: {name in the whole model: the parameter, a shard of it in FSDP}.
    """

    def __init__(self, trainer: Trainer):
        part = trainer.part
        self.fsdp = trainer.model if isinstance(trainer.model, FSDP) else None
        self.names: dict[str, nn.Parameter] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}  # of this rank's part, before FSDP cuts it
        self.splits: dict[str, Split] = {}
        self.rows: dict[str, int] = {}  # the first row of a shard
        if self.fsdp is not None:
            self.fsdp.drop()  # the modules show the shards
            units = {entry.name: entry for unit in self.fsdp.units for entry in unit.sharded}
        dealt = splits(part)
        for own, parameter in part.named_parameters():
            name = TIED.get(own, own)
            self.names[name] = parameter
            self.shapes[name] = tuple(parameter.shape)
            if self.fsdp is not None:
                self.shapes[name] = tuple(units[own].shape)
                self.rows[name] = min(units[own].own.start, units[own].shape[0])
            if own in dealt:
                dim, hands = dealt[own]
                mine = hands[dist.get_rank(part.tensor)]
                self.splits[name] = dim, sum(map(len, hands)), mine

    def first(self, name: str) -> int:
        """Return the place of a shard's first number in the flattened parameter."""
        if name not in self.rows:
            return 0
        return self.rows[name] * torch.Size(self.shapes[name][1:]).numel()

    def pieces(self, name: str, values: Tensor, first: int) -> Pieces:
        return pieces(self.shapes[name], values, first, self.splits.get(name))


def kept(trainer: Trainer, layout: Layout) -> Iterator[tuple[str, str, Tensor, int]]:
    """Yield (name, key, values, place of the first) of what the optimizer keeps, 1-D views."""
    optimizer = trainer.optimizer
    by_parameter = {parameter: name for name, parameter in layout.names.items()}
    if not isinstance(optimizer, ZeroOptimizer):
        for parameter, state in optimizer.state.items():
            name = by_parameter[parameter]
            for key, value in state.items():
                if is_moment(key, value, parameter):
                    yield name, key, value.view(-1), layout.first(name)
        return
    # ZeRO: a shard is a range of a bucket, and holds the ends and middles of parameters.
    for bucket in optimizer.buckets:
        numel = bucket.shard.numel()
        begin = dist.get_rank(bucket.group) * numel
        for key, value in bucket.optimizer.state[bucket.shard].items():
            if not is_moment(key, value, bucket.shard):
                continue
            start = 0  # of the parameter in the bucket
            for parameter in bucket.parameters:
                low = max(begin, start)
                high = max(low, min(begin + numel, start + parameter.numel()))
                values = value.view(-1)[low - begin : high - begin]
                yield by_parameter[parameter], key, values, low - start
                start += parameter.numel()


def is_moment(key: str, value: object, parameter: Tensor) -> bool:
    """Tell a tensor with a number for each of the parameter's from a counter of steps."""
    return isinstance(value, Tensor) and value.shape == parameter.shape and key != "step"


def inner_optimizers(trainer: Trainer) -> list[torch.optim.Optimizer]:
    optimizer = trainer.optimizer
    if isinstance(optimizer, ZeroOptimizer):
        return [bucket.optimizer for bucket in optimizer.buckets]
    return [optimizer]


@torch.no_grad()
def make_state(trainer: Trainer) -> None:
    """Make the optimizer's state as its first step would, and change nothing.

    What a checkpoint is read into must be there: PyTorch fills no more than it finds.
    """
    for optimizer in inner_optimizers(trainer):
        shown = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        before = [p.detach().clone() for p in shown]
        for parameter in shown:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        for parameter, value in zip(shown, before, strict=True):
            parameter.copy_(value)
            parameter.grad = None
            for kept_value in optimizer.state[parameter].values():
                if isinstance(kept_value, Tensor):
                    kept_value.zero_()


def counters(trainer: Trainer) -> dict[str, float]:
    """{key: value} of what the optimizer keeps once for all parameters, as AdamW's steps."""
    found = {}
    for optimizer in inner_optimizers(trainer):
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if not is_moment(key, value, parameter) and value is not None:
                    found[key] = float(value)
    return found


@torch.no_grad()
def set_counters(trainer: Trainer, values: dict[str, float]) -> None:
    """Set what `counters` returned, in all parameters' state."""
    for optimizer in inner_optimizers(trainer):
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor) and not is_moment(key, value, parameter):
                    value.fill_(values[key])


def whole_parameters(trainer: Trainer) -> dict[str, Tensor]:
    """Put all parameters together, by the whole model's names, on the CPU of every rank."""
    whole = whole_state(trainer, "parameters.")
    return {name.removeprefix("parameters."): value for name, value in whole.items()}


def whole_state(trainer: Trainer, prefix: str = "") -> dict[str, Tensor]:
    """Put together what `state_of` names, if the names begin with `prefix`, on every rank.

    Cost per rank: an all_gather_object of its part, and the memory of the whole.
    """
    mine = {}
    for name, found in state_of(trainer).items():
        if name.startswith(prefix):
            mine[name] = tuple(found.shape), found.staged().boxes
    everyones: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    whole: dict[str, Tensor] = {}
    for part in everyones:
        for name, (shape, boxes) in part.items():
            for offsets, values in boxes:
                whole.setdefault(name, values.new_empty(shape))
                where = zip(offsets, values.shape, strict=True)
                whole[name][tuple(slice(at, at + many) for at, many in where)] = values
    return whole
