"""The state of a training by name: parameters, buffers and optimizer state as whole tensors.

Names are those in the whole model, on any mesh; each tensor is a `Pieces`, which says what this
rank has of it.
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

TIED = {"head.weight": "tokens.weight"}  # {second name of a weight: the first, which is saved}


def state_of(trainer: Trainer) -> dict[str, Pieces]:
    """Return {name: `Pieces` of the tensor}, with views into which a checkpoint can be read.

    Names are "parameters.blocks.0.out.weight", "buffers...",
    "optimizer.exp_avg.blocks.0.out.weight" and so on: those of this rank's layers. Optimizer state
    that doesn't exist yet is left out: see `make_state`. FSDP's whole weights are dropped.
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
    """The positions of this rank's parameters in the whole model's.

    names: {name in the whole model: this rank's parameter, with FSDP its shard}; a tied weight has
    its first name. shapes: by name, of this rank's part before FSDP shards it. splits: by name, how
    tensor parallelism cut it. rows: by name, with FSDP, the first row of the shard.
    Making one drops FSDP's whole weights, so that the modules have the shards.
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
        """Return the index of a shard's first element in the flattened parameter; 0 if whole."""
        if name not in self.rows:
            return 0
        return self.rows[name] * torch.Size(self.shapes[name][1:]).numel()

    def pieces(self, name: str, values: Tensor, first: int) -> Pieces:
        """Return `values`, a parameter's elements from index `first` on, as `Pieces`."""
        return pieces(self.shapes[name], values, first, self.splits.get(name))


def kept(trainer: Trainer, layout: Layout) -> Iterator[tuple[str, str, Tensor, int]]:
    """Yield (name, key, values, first) of each tensor that the optimizer keeps for a parameter.

    name: the parameter's. key: the optimizer's, as "exp_avg". values: a 1-D view of this rank's
    elements, with ZeRO maybe none. first: the index of the first one in the flattened parameter.
    """
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
    """Return whether an optimizer's value has an element for each of the parameter's.

    A counter of steps hasn't, even for a parameter of one element.
    """
    return isinstance(value, Tensor) and value.shape == parameter.shape and key != "step"


def inner_optimizers(trainer: Trainer) -> list[torch.optim.Optimizer]:
    """List the optimizers that hold the state: with ZeRO one for each bucket, otherwise the one."""
    optimizer = trainer.optimizer
    if isinstance(optimizer, ZeroOptimizer):
        return [bucket.optimizer for bucket in optimizer.buckets]
    return [optimizer]


@torch.no_grad()
def make_state(trainer: Trainer) -> None:
    """Create the optimizer's state, as its first step would, and change no parameter.

    PyTorch reads a checkpoint only into tensors that exist. So a step is taken with gradients of
    zero, the parameters are put back, `.grad` becomes None, and the state, old or new, zeros.
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
    """Return {key: value} of what the optimizer keeps alike for all parameters: AdamW's "step"."""
    found = {}
    for optimizer in inner_optimizers(trainer):
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if not is_moment(key, value, parameter) and value is not None:
                    found[key] = float(value)
    return found


@torch.no_grad()
def set_counters(trainer: Trainer, values: dict[str, float]) -> None:
    """Set counters, as `counters` returns them, in every parameter's state, which must exist."""
    for optimizer in inner_optimizers(trainer):
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor) and not is_moment(key, value, parameter):
                    value.fill_(values[key])


def whole_parameters(trainer: Trainer) -> dict[str, Tensor]:
    """Return {name in the whole model: whole parameter, on the CPU}; every rank must call."""
    whole = whole_state(trainer, "parameters.")
    return {name.removeprefix("parameters."): value for name, value in whole.items()}


def whole_state(trainer: Trainer, prefix: str = "") -> dict[str, Tensor]:
    """Return {name: whole tensor, on the CPU} of the state whose names begin with `prefix`.

    Names are those of `state_of`. Every rank must call, and gets all, its own values where it has
    them. Cost per rank: an all_gather_object of its part, and memory for all parts and the whole.
    """
    mine = {}
    for name, found in state_of(trainer).items():
        if name.startswith(prefix):
            mine[name] = tuple(found.shape), found.staged().boxes
    everyones: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    whole: dict[str, Tensor] = {}
    for part in (*everyones, mine):
        for name, (shape, boxes) in part.items():
            for offsets, values in boxes:
                whole.setdefault(name, values.new_empty(shape))
                where = zip(offsets, values.shape, strict=True)
                whole[name][tuple(slice(at, at + many) for at, many in where)] = values
    return whole
