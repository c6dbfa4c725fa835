"""The memory of training: model states, activations and the peak of a step.

Model states are parameters, gradients and the optimizer's state: a fixed number of bytes for each
parameter, whatever the batch. Activations are kept from forward for backward: a fixed number of
bytes for each token, whatever the optimizer. For both there is a formula (`model_states`,
`block_activations`) and a count of the tensors that exist (`count_states`, `measure_saved`).
`watch` follows every tensor through a step.

Letters as in Korthikanti et al. 2022: s tokens, b sequences, width d, H heads. In PyTorch:
torch.cuda.memory. Notebooks 05 to 07.
"""

import contextlib
import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from .checks import check_counts

# Model states


class ModelStates(NamedTuple):
    """Bytes on one rank."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return sum(self)


PRECISIONS = {  # bytes a number that is trained; the optimizer: AdamW, with its master copy
    "fp32": ModelStates(4, 4, 8),  # the parameter is its own master copy
    "mixed": ModelStates(2, 2, 12),
    "mixed, fp32 gradients": ModelStates(2, 4, 12),
    "bf16": ModelStates(2, 2, 4),
}


def model_states(
    parameters: int, stage: int = 0, world_size: int = 1, precision: str = "mixed"
) -> ModelStates:
    """Predict the bytes of model states, with AdamW, on the rank that has the most.

    parameters: the count of trained numbers. stage: of ZeRO. From stage 1 on a rank has 1/W of the
    optimizer's state, from 2 on 1/W of the gradients, in 3 also 1/W of the parameters. precision:
    of `PRECISIONS`. ValueError: there is no such stage, precision or count.

    With "mixed" the optimizer has K = 12 bytes a parameter, 16 in all. Rajbhandari et al. 2020,
    figure 1 and section 3.1.
    """
    check_counts(parameters=parameters, world_size=world_size)
    if stage not in range(4) or precision not in PRECISIONS:
        expected = f"expected a stage from 0 to 3 and a precision of {', '.join(PRECISIONS)}"
        raise ValueError(f"{expected}, got {stage!r} and {precision!r}: choose one of each")
    shard = -(-parameters // world_size)
    numbers = [shard if stage >= sharded_from else parameters for sharded_from in (3, 2, 1)]
    each = PRECISIONS[precision]
    return ModelStates(*(n * nbytes for n, nbytes in zip(numbers, each, strict=True)))


def count_states(model: nn.Module, optimizer: Optimizer | None = None) -> ModelStates:
    """Count the bytes of the tensors that exist; a tensor under two names counts once.

    Parameters in the optimizer that aren't the model's are master copies and count as the
    optimizer's. AdamW also counts steps, in 4 bytes a parameter tensor: no formula has them.
    """
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return ModelStates(*map(_storage_bytes, (parameters, gradients, _remembered(model, optimizer))))


def _remembered(model: nn.Module, optimizer: Optimizer | None) -> list[Tensor]:
    """List the tensors that the optimizer has and the model hasn't."""
    if optimizer is None:
        return []
    own = {id(parameter) for parameter in model.parameters()}
    masters = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
    gradients = [master.grad for master in masters if master.grad is not None]
    state = [value for state in optimizer.state.values() for value in state.values()]
    return [*masters, *gradients, *(value for value in state if isinstance(value, Tensor))]


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Add up the memory behind these tensors, of which several may share one piece."""
    return sum({_address(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def _address(tensor: Tensor) -> int:
    """Return a number that all tensors with the same memory share, even on the meta device."""
    return tensor.untyped_storage()._cdata


# GPUs for a model


def gpus_needed(
    state_bytes: int, capacity_bytes: int, activation_bytes: int = 0, sharded: float = 0.5
) -> int:
    """Compute the fewest GPUs W that hold all model states, sharded, and the activations.

    capacity_bytes: of a GPU. sharded: the part of the activations of which each GPU has 1/W; it has
    all of the rest. From state / W + activations · (1 - sharded + sharded / W) <= capacity.
    ValueError: the part that every GPU must have doesn't fit, however many there are.
    """
    shared = Fraction(sharded) * activation_bytes
    whole = activation_bytes - shared
    if whole >= capacity_bytes:
        raise ValueError(
            f"expected less than the {capacity_bytes} bytes of a GPU, got {float(whole):.4g} bytes "
            "of activations that aren't sharded: take a smaller batch"
        )
    return math.ceil((state_bytes + shared) / (capacity_bytes - whole))


# Activations of a block, predicted


RANDOM_STATE_BYTES = 5056  # on a CPU; 16 more with a GPU


class Term(NamedTuple):
    """Something kept for backward: `coefficient` bytes for each `unit`, say 2 for each sbd."""

    name: str
    coefficient: int
    unit: str
    nbytes: int

    @property
    def formula(self) -> str:
        return f"{self.coefficient}{self.unit}"


def block_bytes(batch, length, width, heads):
    """34sbd + 5bs²H: the bytes a block keeps for backward, as Korthikanti et al. 2022 count them.

    Equation 1: numbers of 2 bytes, masks of dropout of 1; without the 16sb of the norms.
    """
    tokens, pairs = batch * length * width, batch * length**2 * heads
    numbers = 16 * tokens + 2 * pairs
    masks = 2 * tokens + pairs
    return 2 * numbers + masks


def block_activations(
    batch: int,
    length: int,
    width: int,
    heads: int,
    itemsize: int = 2,
    dropout: bool = True,
    attention: str = "materialised",
    mask_bytes: int = 1,
    statistic_bytes: int = 4,
) -> list[Term]:
    """List what a block of `ddpkit.models.GPT` keeps for backward, in the order of forward.

    itemsize: bytes of a number. attention: "materialised" keeps the matrix of attention weights,
    "flash" one number (4 bytes) for each row of it. dropout: after each half, and of attention
    weights that are materialised. mask_bytes: of each number in a mask of dropout; nn.Dropout on a
    CPU keeps a mask of numbers, so `itemsize`. statistic_bytes: of each mean and 1/deviation of a
    norm; on a CPU `itemsize`. ValueError: no such attention, or a size is less than 1.

    The defaults are the paper's setting: 34sbd + 5bs²H, and 16sb for the norms, which it leaves
    out. Korthikanti et al. 2022, section 4.1 and equation 1. Notebook 06.
    """
    check_counts(batch=batch, length=length, width=width, heads=heads, itemsize=itemsize)
    units = {
        "sbd": batch * length * width,
        "bs²H": batch * length**2 * heads,
        "sb": batch * length,
        "bsH": batch * length * heads,
    }
    mask = [("mask of dropout", mask_bytes, "sbd")] if dropout else []
    if attention == "materialised":
        weights = [("attention weights, of softmax", itemsize, "bs²H")]
        if dropout:
            weights.append(("mask of their dropout", mask_bytes, "bs²H"))
            weights.append(("weights after dropout", itemsize, "bs²H"))
    elif attention == "flash":
        weights = [("log-sum-exp of each row", 4, "bsH")]
    else:
        expected = "expected attention to be 'materialised' or 'flash'"
        raise ValueError(f"{expected}, got {attention!r}: choose one")
    kept = [
        ("input of the norm before attention", itemsize, "sbd"),
        ("mean and 1/deviation of each token", 2 * statistic_bytes, "sb"),
        ("input of the layer qkv", itemsize, "sbd"),
        ("queries, keys and values", 3 * itemsize, "sbd"),
        *weights,
        ("input of the layer out", itemsize, "sbd"),
        *mask,
        ("input of the norm before the MLP", itemsize, "sbd"),
        ("mean and 1/deviation of each token", 2 * statistic_bytes, "sb"),
        ("input of the MLP's first layer", itemsize, "sbd"),
        ("input of GELU", 4 * itemsize, "sbd"),
        ("input of the MLP's second layer", 4 * itemsize, "sbd"),
        *mask,
    ]
    return [Term(name, each, unit, each * units[unit]) for name, each, unit in kept]


def checkpointed_activations(
    batch: int, length: int, width: int, itemsize: int = 2, selective: bool = False
) -> list[Term]:
    """List what the same block keeps under `ddpkit.checkpointing`, whatever attention and dropout.

    selective: the results of its four linear layers are kept as well. ValueError: a size that is
    less than 1.
    """
    check_counts(batch=batch, length=length, width=width, itemsize=itemsize)
    kept = [("input of the block", 1)]
    if selective:
        kept += [("queries, keys and values", 3), ("result of the layer out", 1)]
        kept += [("result of the MLP's first layer", 4), ("result of the MLP's second layer", 1)]
    terms = [Term("state of the random numbers", RANDOM_STATE_BYTES, "", RANDOM_STATE_BYTES)]
    for name, times in kept:
        each = times * itemsize
        terms.append(Term(name, each, "sbd", each * batch * length * width))
    return terms


def coefficients(terms: Iterable[Term]) -> dict[str, int]:
    """Add up the terms by unit: {"sbd": 34, "sb": 16, "bs²H": 5} is 34sbd + 16sb + 5bs²H."""
    total = Counter()
    for term in terms:
        total[term.unit] += term.coefficient
    return dict(total)


class ByteDropout(nn.Module):
    """Dropout whose mask has a byte for each number even on a CPU, as on every GPU."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return torch.native_dropout(x, self.p, self.training)[0]


class MaterialisedAttention(nn.Module):
    """Attention as in textbooks: it makes the whole matrix of weights, and keeps it for backward.

    q, k, v and the result: (..., N, D), as for `ddpkit.models.torch_attention`. Cost: N² a head.
    """

    def __init__(self, dropout: nn.Module):
        super().__init__()
        self.dropout = dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        if causal:
            mask = torch.full_like(scores[0, 0], -torch.inf).triu(1)
            scores = scores + mask  # a sum keeps nothing for backward
        return self.dropout(scores.softmax(-1)) @ v


# Activations, measured


class Saved(NamedTuple):
    """A piece of memory that is kept for backward.

    where: the module that keeps it, "" in a function. shape, dtype: of the first tensor there.
    nbytes: of the whole piece, since it can't be freed in parts.
    """

    where: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


def measure_saved(fn: Callable, *args) -> list[Saved]:
    """Call `fn(*args)`, and list what autograd keeps of it for backward, in order.

    fn: a module, whose parts are then named as in `named_modules`, or any function. Parameters are
    left out: they exist anyway. Memory that several operations keep is listed once.

    It works on the meta device as well, where nothing is computed and a layer of any size fits.
    """
    modules = fn.named_modules() if isinstance(fn, nn.Module) else ()
    names = {id(part): name for name, part in modules}
    kept: dict[int, tuple[Tensor, Saved]] = {}  # holds the tensor, or others would get its memory

    def keep(x: Tensor) -> Tensor:
        whole = x if x._base is None else x._base  # a linear layer keeps its weight transposed
        if not isinstance(whole, nn.Parameter) and _address(x) not in kept:
            saved = Saved(_where(names), tuple(x.shape), x.dtype, x.untyped_storage().nbytes())
            kept[_address(x)] = x.detach(), saved
        return x

    with saved_tensors_hooks(keep, lambda x: x):
        fn(*args)
    return [saved for _, saved in kept.values()]


def _where(names: dict[int, str]) -> str:
    """Name the innermost of these modules, the one at work."""
    frame = sys._getframe(2)
    while frame is not None:
        module = id(frame.f_locals.get("self"))
        if frame.f_code.co_name == "forward" and module in names:
            return names[module]
        frame = frame.f_back
    return ""


# The peak of a step

KINDS = ("parameters", "gradients", "optimizer", "buckets", "activations", "other")


def alive(lives, moments):
    """Count the bytes that are alive at each moment.

    lives: (born, died, nbytes) of each tensor: alive from `born` on, gone from `died` on, which is
    inf if it stays.
    """
    changes = Counter()
    for born, died, nbytes in lives:
        changes[born] += nbytes
        changes[died] -= nbytes
    return list(accumulate(changes[moment] for moment in range(moments)))


@dataclass
class Timeline:
    """The bytes that were alive after each operation of a step; entry 0 is before the first.

    by_kind: {kind: bytes}. ops: names of operations. marks: [(first entry, text)].
    """

    by_kind: dict[str, list[int]] = field(default_factory=dict)
    ops: list[str] = field(default_factory=lambda: [""])
    marks: list[tuple[int, str]] = field(default_factory=list)

    def mark(self, text: str) -> None:
        """Note the phase that begins with the next operation: "forward", "backward", "step"."""
        self.marks.append((len(self.ops), text))

    def begins(self, text: str) -> int:
        """Find the first entry with this mark."""
        return next(entry for entry, mark in self.marks if mark == text)

    @property
    def totals(self) -> list[int]:
        return [sum(kinds) for kinds in zip(*self.by_kind.values(), strict=True)]

    @property
    def peak(self) -> int:
        """Find the entry with the most bytes, the first if there are several."""
        return self.totals.index(max(self.totals))

    def at(self, entry: int) -> dict[str, int]:
        """{kind: bytes}."""
        return {kind: nbytes[entry] for kind, nbytes in self.by_kind.items()}


@dataclass
class _Life:
    """The life of a piece of memory: the entries between which it is alive."""

    nbytes: int
    born: int
    ends: weakref.finalize
    died: float = math.inf
    kind: str = "other"


class _Watcher(TorchDispatchMode):
    """Watch the result of every operation, and note when its memory comes and goes."""

    def __init__(self, timeline: Timeline):
        super().__init__()
        self.timeline = timeline
        self.lives: list[_Life] = []
        self.alive: dict[int, _Life] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's default imports torch._dynamo: a second in each fresh rank

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        made = op(*args, **(kwargs or {}))
        if op.namespace == "profiler":  # marks the begin and end of an optimizer's step
            return made
        self.timeline.ops.append(str(op))
        for each in made if isinstance(made, tuple | list) else (made,):
            if isinstance(each, Tensor):
                self.meet(each)
        return made

    def meet(self, tensor: Tensor, kind: str = "other", born: int | None = None) -> None:
        """Follow the tensor's memory from now on; the first kind that isn't "other" stays."""
        address = _address(tensor)
        if address not in self.alive:
            storage = tensor.untyped_storage()
            born = len(self.timeline.ops) - 1 if born is None else born
            life = _Life(storage.nbytes(), born, weakref.finalize(storage, self._gone, address))
            self.lives.append(life)
            self.alive[address] = life
        if self.alive[address].kind == "other":
            self.alive[address].kind = kind

    def _gone(self, address: int) -> None:
        self.alive.pop(address).died = len(self.timeline.ops)

    def tally(self) -> None:
        """Stop watching, and write the lives of all memory into the timeline."""
        for life in list(self.alive.values()):  # a copy: a backend's threads also drop tensors
            life.ends.detach()
        for kind in KINDS:
            lives = [
                (life.born, life.died, life.nbytes) for life in self.lives if life.kind == kind
            ]
            self.timeline.by_kind[kind] = alive(lives, len(self.timeline.ops))


@contextlib.contextmanager
def watch(
    model: nn.Module, optimizer: Optimizer | None = None, buckets: Iterable[Tensor] = ()
) -> Iterator[Timeline]:
    """Follow the memory of every tensor that is made inside; the timeline is filled at the end.

    buckets: flat tensors of a data-parallel wrapper; a gradient in one of them counts there.
    Buffers of the model count as parameters, an input that is kept for backward as an activation.
    "other" comes and goes: results that aren't kept, gradients of activations.

    Works on every device, at some microseconds an operation. Scratch memory inside an operation
    isn't seen, nor an allocator's rounding: for a GPU's see torch.cuda.memory_stats.
    """
    timeline = Timeline()
    watcher = _Watcher(timeline)

    def keep(x: Tensor) -> Tensor:
        watcher.meet(x, "activations", born=None if _address(x) in watcher.alive else 0)
        return x

    def label() -> None:
        parameters = list(model.parameters())
        there = {  # the order counts: a gradient in a bucket is the bucket's
            "buckets": buckets,
            "parameters": [*parameters, *model.buffers()],
            "gradients": [parameter.grad for parameter in parameters if parameter.grad is not None],
            "optimizer": _remembered(model, optimizer),
        }
        for kind, tensors in there.items():
            for tensor in tensors:
                watcher.meet(tensor, kind)

    buckets = list(buckets)
    label()

    def meet_gradient(parameter: Tensor) -> None:
        watcher.meet(parameter.grad, "gradients")

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hooks = [each.register_post_accumulate_grad_hook(meet_gradient) for each in trained]
    try:
        with watcher, saved_tensors_hooks(keep, lambda x: x):
            yield timeline
        label()
    finally:
        for hook in hooks:
            hook.remove()
        watcher.tally()
