"""What training keeps in memory: model states, activations, and the peak of a step; predicted and measured.

Model states are parameters, gradients and what the optimizer remembers: so many bytes for each parameter, whatever the
batch. Activations are what forward keeps for backward: so many bytes for each token, whatever the optimizer. For both
there is a formula (`model_states`, `block_activations`) and a count of the tensors that exist (`count_states`,
`measure_saved`). `watch` follows every tensor through a step and says what is alive after each operation, by kind.

GB is 10**9 bytes, GiB 2**30. s is the length of a sequence, b the batch, d the width, H the number of heads, as in
Korthikanti et al. 2022. Notebooks 06 and 07.
"""

import contextlib
import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

# Model states


class Precision(NamedTuple):
    """Bytes of one number: of a parameter, of its gradient, of the optimizer's copy of it, of each of its moments."""

    parameter: int
    gradient: int
    master: int
    moment: int


PRECISIONS = {
    "fp32": Precision(4, 4, 0, 4),  # the parameter is its own master copy
    "mixed": Precision(2, 2, 4, 4),
    "mixed, fp32 gradients": Precision(2, 4, 4, 4),
    "bf16": Precision(2, 2, 0, 2),
}
MOMENTS = {"adam": 2, "momentum": 1, "sgd": 0}  # numbers that the optimizer remembers of each parameter


class ModelStates(NamedTuple):
    """Bytes on one rank."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return sum(self)


def model_states(
    parameters: int, stage: int = 0, world_size: int = 1, optimizer: str = "adam", precision: str = "mixed"
) -> ModelStates:
    """The bytes that model states take on a rank, of the ranks the one with the most.

    parameters: how many numbers are trained. stage: of ZeRO. From stage 1 on a rank has 1/W of the optimizer's state,
    from 2 on 1/W of the gradients, in stage 3 also 1/W of the parameters. optimizer: of `MOMENTS`. precision: of
    `PRECISIONS`; the master copy counts as the optimizer's. ValueError: any of them isn't what it should be.

    With "mixed" and "adam" the optimizer has K = 12 bytes a parameter, and all is 16. Rajbhandari et al. 2020, figure 1
    and section 3.1.
    """
    _check_counts(parameters=parameters, world_size=world_size)
    for name, value, known in (
        ("stage", stage, range(4)),
        ("optimizer", optimizer, MOMENTS),
        ("precision", precision, PRECISIONS),
    ):
        if value not in known:
            raise ValueError(f"expected {name} to be one of {', '.join(map(repr, known))}, got {value!r}: choose one")
    size = PRECISIONS[precision]
    shard = -(-parameters // world_size)
    return ModelStates(
        size.parameter * (shard if stage >= 3 else parameters),
        size.gradient * (shard if stage >= 2 else parameters),
        (size.master + size.moment * MOMENTS[optimizer]) * (shard if stage >= 1 else parameters),
    )


def count_states(model: nn.Module, optimizer: Optimizer | None = None) -> ModelStates:
    """The bytes of model states as they are now, counted from the tensors that exist; a tensor under two names once.

    Parameters in the optimizer that aren't the model's are master copies and count as the optimizer's. Some optimizers
    also count their steps, in 4 bytes a parameter tensor: no formula has them.
    """
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return ModelStates(*map(_storage_bytes, (parameters, gradients, _remembered(model, optimizer))))


def _remembered(model: nn.Module, optimizer: Optimizer | None) -> list[Tensor]:
    """Every tensor that the optimizer has, and the model hasn't."""
    if optimizer is None:
        return []
    own = {id(parameter) for parameter in model.parameters()}
    masters = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
    gradients = [master.grad for master in masters if master.grad is not None]
    state = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return [*masters, *gradients, *state]


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Of all memory behind these tensors, where several may share one piece."""
    return sum({_address(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def _address(tensor: Tensor) -> int:
    """The same number for all tensors that share memory; on the meta device, too, where nothing has an address."""
    return tensor.untyped_storage()._cdata


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"expected {name} to be 1 or more, got {value!r}: give a whole number")


# A model that is only feed-forward blocks, and how many GPUs it needs


def feed_forward_parameters(width: int, hidden: int, blocks: int) -> int:
    """The parameters of `blocks` times two linear layers without biases, from `width` to `hidden` and back."""
    _check_counts(width=width, hidden=hidden, blocks=blocks)
    return blocks * 2 * width * hidden


def feed_forward_token_bytes(width: int, hidden: int, blocks: int, itemsize: int = 2) -> int:
    """The bytes of activations that these layers keep for each token: the input of each."""
    _check_counts(width=width, hidden=hidden, blocks=blocks, itemsize=itemsize)
    return blocks * (width + hidden) * itemsize


def gpus_needed(state_bytes: int, capacity_bytes: int, activation_bytes: int = 0, sharded: float = 0.5) -> int:
    """The fewest GPUs W on which all model states fit, if they are sharded, and activations are in part.

    state_bytes, activation_bytes: without sharding, on one GPU. capacity_bytes: of a GPU. sharded: which part of the
    activations each GPU has only 1/W of; the others it has all of.
    ValueError: what every GPU must have doesn't fit, however many there are.

    From state / W + activations · (1 - sharded + sharded / W) <= capacity.
    """
    _check_counts(state_bytes=state_bytes, capacity_bytes=capacity_bytes)
    shared = Fraction(sharded) * activation_bytes
    left = capacity_bytes - (activation_bytes - shared)
    if left <= 0:
        got = f"{float(activation_bytes - shared):.4g} bytes of activations that aren't sharded"
        raise ValueError(f"expected less than the {capacity_bytes} bytes of a GPU, got {got}: take a smaller batch")
    return math.ceil((state_bytes + shared) / left)


# Activations of a block, predicted


class Term(NamedTuple):
    """Something that a block keeps for backward: `coefficient` bytes for each `unit`, for example 2 for each sbd."""

    name: str
    coefficient: int
    unit: str
    nbytes: int

    @property
    def formula(self) -> str:
        return f"{self.coefficient}{self.unit}"


def block_bytes(batch, length, width, heads):
    """34sbd + 5bs²H: what a block keeps for backward in the setting of Korthikanti et al. 2022.

    Equation 2: numbers of 2 bytes, masks of dropout of 1; without the 16sb of the norms.
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
    attention_dropout: bool = True,
    mask_bytes: int = 1,
    statistic_bytes: int = 4,
) -> list[Term]:
    """What a block of `ddpkit.models.GPT` keeps for backward, in the order in which forward comes by it.

    itemsize: bytes of a number. attention: "materialised" keeps the matrix of attention weights; "flash" keeps two
    numbers for each row of it, made into one. dropout: behind each half; attention_dropout: of the attention weights,
    which flash attention needn't keep.
    mask_bytes: of each number that dropout decided about. On a GPU 1; on a CPU nn.Dropout keeps a mask of numbers, so
    `itemsize`. statistic_bytes: of each mean and each 1/standard deviation of a norm. On a GPU 4, on a CPU `itemsize`.
    ValueError: an attention that there isn't, or a size that is less than 1.

    The defaults are the paper's setting: 34sbd + 5bs²H, and 16sb for the norms, which the paper leaves out. Korthikanti
    et al. 2022, section 4.1 and equation 2. Notebook 06.
    """
    _check_counts(batch=batch, length=length, width=width, heads=heads, itemsize=itemsize)
    if attention not in ("materialised", "flash"):
        raise ValueError(f"expected attention to be 'materialised' or 'flash', got {attention!r}: choose one")
    token, weight = "sbd", "bs²H"
    units = {
        token: batch * length * width,
        weight: batch * length**2 * heads,
        "sb": batch * length,
        "bsH": batch * length * heads,
    }
    weights = [("attention weights, of softmax", itemsize, weight)]
    if attention_dropout:
        weights += [("mask of their dropout", mask_bytes, weight), ("weights after dropout", itemsize, weight)]
    mask = [("mask of dropout", mask_bytes, token)] if dropout else []
    kept = [
        ("input of the norm before attention", itemsize, token),
        ("mean and 1/deviation of each token", 2 * statistic_bytes, "sb"),
        ("input of the layer qkv", itemsize, token),
        ("queries, keys and values", 3 * itemsize, token),
        *(weights if attention == "materialised" else [("log-sum-exp of each row", 4, "bsH")]),
        ("input of the layer out", itemsize, token),
        *mask,
        ("input of the norm before the MLP", itemsize, token),
        ("mean and 1/deviation of each token", 2 * statistic_bytes, "sb"),
        ("input of the MLP's first layer", itemsize, token),
        ("input of GELU", 4 * itemsize, token),
        ("input of the MLP's second layer", 4 * itemsize, token),
        *mask,
    ]
    return [Term(name, coefficient, unit, coefficient * units[unit]) for name, coefficient, unit in kept]


def checkpointed_activations(
    batch: int, length: int, width: int, itemsize: int = 2, selective: bool = False, random_state_bytes: int = 5056
) -> list[Term]:
    """What the same block keeps under `ddpkit.checkpointing`, with dropout or without, and whatever its attention.

    selective: the results of its four linear layers are kept, too. random_state_bytes: on a CPU; 16 more for a GPU.
    ValueError: a size that is less than 1.
    """
    _check_counts(batch=batch, length=length, width=width, itemsize=itemsize)
    results = [("queries, keys and values", 3), ("result of the layer out", 1)]
    results += [("result of the MLP's first layer", 4), ("result of the MLP's second layer", 1)]
    token = batch * length * width
    return [
        Term("state of the random numbers", random_state_bytes, "", random_state_bytes),
        *(
            Term(name, times * itemsize, "sbd", times * itemsize * token)
            for name, times in [("input of the block", 1), *(results if selective else [])]
        ),
    ]


def coefficients(terms: Iterable[Term]) -> dict[str, int]:
    """The formula that the terms add up to: {"sbd": 34, "sb": 16, "bs²H": 5} is 34sbd + 16sb + 5bs²H."""
    total = Counter()
    for term in terms:
        total[term.unit] += term.coefficient
    return dict(total)


class ByteDropout(nn.Module):
    """Dropout whose mask has one byte for each number, on a CPU, too, as in the paper and on every GPU."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return torch.native_dropout(x, self.p, self.training)[0]


class MaterialisedAttention(nn.Module):
    """Attention as in textbooks: the whole matrix of weights, softmaxed, dropped out, and kept for backward.

    As `ddpkit.models.torch_attention`: q, k, v (..., N, D); the result, too. Cost: N² numbers for each head.
    """

    def __init__(self, dropout: nn.Module):
        super().__init__()
        self.dropout = dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        if causal:
            scores = scores + torch.full_like(scores[0, 0], -torch.inf).triu(1)  # a sum keeps nothing for backward
        return self.dropout(scores.softmax(-1)) @ v


# Activations, measured


class Saved(NamedTuple):
    """A piece of memory that is kept for backward.

    where: the module, or where there is none the function, that keeps it. shape, dtype: of the first tensor there that
    is kept. nbytes: of all of the memory, which may be more than that tensor's: it can't be given back in parts.
    """

    where: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


def measure_saved(fn: Callable, *args) -> list[Saved]:
    """Call `fn(*args)`, and list what autograd keeps of it for backward, in order.

    fn: a module, whose parts are then named as in `named_modules`, or any function. Parameters are left out: they would
    be there anyway. Memory that several operations keep is listed once, where it was first kept.

    It works on the meta device, too, where nothing is computed and a layer of any size fits.
    """
    names = {id(part): name for name, part in fn.named_modules()} if isinstance(fn, nn.Module) else {}
    kept: dict[int, tuple[Tensor, Saved]] = {}  # the tensor is held, so that its memory isn't given to another

    def keep(x: Tensor) -> Tensor:
        if not _is_parameter(x) and _address(x) not in kept:
            nbytes = x.untyped_storage().nbytes()
            kept[_address(x)] = x.detach(), Saved(_where(names), tuple(x.shape), x.dtype, nbytes)
        return x

    with saved_tensors_hooks(keep, lambda x: x):
        fn(*args)
    return [saved for _, saved in kept.values()]


def _is_parameter(x: Tensor) -> bool:
    """Whether it is one, or a view of one: a linear layer keeps its weight transposed."""
    return isinstance(x if x._base is None else x._base, nn.Parameter)


def _where(names: dict[int, str]) -> str:
    """Who is at work: the innermost module, or public function outside of torch, that called the caller's caller."""
    frame = sys._getframe(2)
    while frame is not None:
        module = frame.f_locals.get("self")
        if frame.f_code.co_name == "forward" and isinstance(module, nn.Module):
            return names.get(id(module)) or type(module).__name__
        name = frame.f_code.co_qualname
        if not name.startswith("_") and not Path(frame.f_code.co_filename).is_relative_to(TORCH):
            return name
        frame = frame.f_back
    return "?"


TORCH = Path(torch.__file__).parent

# The peak of a step

KINDS = ("parameters", "gradients", "optimizer", "buckets", "activations", "other")


@dataclass
class Timeline:
    """What was alive after each operation of a step.

    by_kind: {kind: bytes after each operation}; entry 0 is before the first. ops: the operation's name, "" for entry 0.
    marks: [(entry from which on, what one said)]. Pure numbers, to draw or to compare.
    """

    by_kind: dict[str, list[int]] = field(default_factory=dict)
    ops: list[str] = field(default_factory=lambda: [""])
    marks: list[tuple[int, str]] = field(default_factory=list)

    def mark(self, text: str) -> None:
        """Note that from the next operation on something else goes on: "forward", "backward", "step"."""
        self.marks.append((len(self.ops), text))

    @property
    def totals(self) -> list[int]:
        return [sum(kinds) for kinds in zip(*self.by_kind.values(), strict=True)]

    @property
    def peak(self) -> int:
        """The entry with the most bytes, the first if there are several."""
        return self.totals.index(max(self.totals))

    def at(self, entry: int) -> dict[str, int]:
        """{kind: bytes}."""
        return {kind: nbytes[entry] for kind, nbytes in self.by_kind.items()}


@dataclass
class _Life:
    nbytes: int
    born: int
    ends: weakref.finalize
    died: float = math.inf
    kind: str = "other"


class _Watcher(TorchDispatchMode):
    """Sees the result of every operation, and notes when its memory comes and goes."""

    def __init__(self, timeline: Timeline):
        super().__init__()
        self.timeline = timeline
        self.lives: list[_Life] = []
        self.alive: dict[int, _Life] = {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        made = op(*args, **(kwargs or {}))
        if op.namespace == "profiler":  # the optimizer says that it begins and ends
            return made
        self.timeline.ops.append(str(op))
        for each in made if isinstance(made, tuple | list) else (made,):
            if isinstance(each, Tensor):
                self.meet(each)
        return made

    def meet(self, tensor: Tensor, kind: str = "other", born: int | None = None) -> None:
        """Follow its memory from now on, unless that is done already; the first to say what kind it is, is right."""
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
        """Stop watching, and write into the timeline what was alive when."""
        for life in list(self.alive.values()):  # some may go meanwhile: threads of a backend let go of tensors, too
            life.ends.detach()
        entries = range(len(self.timeline.ops))
        for kind in KINDS:
            lives = [life for life in self.lives if life.kind == kind]
            changes = Counter()
            for life in lives:
                changes[life.born] += life.nbytes
                changes[life.died] -= life.nbytes
            self.timeline.by_kind[kind] = list(_running_total(changes[entry] for entry in entries))


def _running_total(changes: Iterable[int]) -> Iterator[int]:
    total = 0
    for change in changes:
        total += change
        yield total


@contextlib.contextmanager
def watch(model: nn.Module, optimizer: Optimizer | None = None, buckets: Iterable[Tensor] = ()) -> Iterator[Timeline]:
    """Follow the memory of every tensor that is made inside, and say afterwards how much was alive when.

    buckets: flat tensors in which a data-parallel wrapper has its gradients; a gradient in one of them counts there.
    Gives a `Timeline`, which is empty until the end of the block. Buffers of the model count as parameters. An input of
    the model counts if it is kept for backward, as an activation; "other" is what comes and goes: results that nobody
    keeps, gradients of activations.

    Works on every device; on a GPU the allocator (`allocator_peak`) has the last word: what an operation takes for
    itself while it runs, or the allocator by rounding up, isn't seen here. Each operation costs some microseconds more.
    """
    timeline = Timeline()
    watcher = _Watcher(timeline)

    def keep(x: Tensor) -> Tensor:
        watcher.meet(x, "activations", born=None if _address(x) in watcher.alive else 0)
        return x

    def label() -> None:
        parameters = list(model.parameters())
        there = {"buckets": buckets, "parameters": [*parameters, *model.buffers()]}
        there["gradients"] = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for kind, tensors in (there | {"optimizer": _remembered(model, optimizer)}).items():
            for tensor in tensors:
                watcher.meet(tensor, kind)

    buckets = list(buckets)
    label()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hooks = [p.register_post_accumulate_grad_hook(lambda p: watcher.meet(p.grad, "gradients")) for p in trained]
    try:
        with watcher, saved_tensors_hooks(keep, lambda x: x):
            yield timeline
        label()
    finally:
        for hook in hooks:
            hook.remove()
        watcher.tally()


class AllocatorPeak(NamedTuple):
    """What PyTorch's allocator on a GPU had at most, in bytes.

    allocated: in blocks that were handed out, each a multiple of 512. reserved: taken from the GPU; beyond `allocated`
    it is kept for later, or cut into pieces that are too small.
    """

    allocated: int
    reserved: int


def allocator_peak(fn: Callable[[], object]) -> AllocatorPeak:
    """Call `fn` and ask the allocator of the current GPU what it had at most meanwhile, what was there before included.

    ValueError: there is no GPU. It resets the allocator's own record of the peak.
    """
    if not torch.cuda.is_available():
        raise ValueError("allocator_peak expected a GPU, got a machine without: use watch() there")
    torch.cuda.reset_peak_memory_stats()
    fn()
    torch.cuda.synchronize()
    return AllocatorPeak(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
