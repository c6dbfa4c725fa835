"""The memory of a step, operation by operation."""

import contextlib
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from .states import address, remembered

KINDS = ("parameters", "gradients", "optimizer", "buckets", "activations", "other")


def alive(lives, moments):
    """Return the live bytes at each of the moments 0 to `moments` - 1.

    lives: (born, died, nbytes) of each tensor, which exists from `born` on and no longer at `died`:
    inf if it stays.
    """
    changes = Counter()
    for born, died, nbytes in lives:
        changes[born] += nbytes
        changes[died] -= nbytes
    return list(accumulate(changes[moment] for moment in range(moments)))


@dataclass
class Timeline:
    """The live bytes after each operation of a step; entry 0 is before the first operation.

    by_kind: {kind: bytes at each entry}, for each of `KINDS`; empty until `watch` ends. ops: the
    names of operations, an entry each. marks: [(first entry, text)].
    """

    by_kind: dict[str, list[int]] = field(default_factory=dict)
    ops: list[str] = field(default_factory=lambda: [""])
    marks: list[tuple[int, str]] = field(default_factory=list)

    def mark(self, text: str) -> None:
        """Note the phase that begins with the next operation: "forward", "backward", "step"."""
        self.marks.append((len(self.ops), text))

    def begins(self, text: str) -> int:
        """Return the first entry of the phase with this text. StopIteration: it wasn't marked."""
        return next(entry for entry, mark in self.marks if mark == text)

    @property
    def totals(self) -> list[int]:
        """Return the live bytes at each entry, all kinds together."""
        return [sum(kinds) for kinds in zip(*self.by_kind.values(), strict=True)]

    @property
    def peak(self) -> int:
        """Return the index of the entry with the most bytes, the first if there are several."""
        return self.totals.index(max(self.totals))

    def at(self, entry: int) -> dict[str, int]:
        """Return {kind: live bytes} at this entry."""
        return {kind: nbytes[entry] for kind, nbytes in self.by_kind.items()}


@dataclass
class _Life:
    """The life of a piece of memory: from entry `born` of the timeline on, until entry `died`."""

    nbytes: int
    born: int
    ends: weakref.finalize
    died: float = math.inf
    kind: str = "other"


class _Watcher(TorchDispatchMode):
    """A mode that sees the result of every operation, and notes when its memory comes and goes."""

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
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, Tensor):
                self.meet(tensor)
        return made

    def meet(self, tensor: Tensor, kind: str = "other", born: int | None = None) -> None:
        """Follow the tensor's memory, from entry `born` on; its first kind but "other" stays."""
        place = address(tensor)
        if place not in self.alive:
            storage = tensor.untyped_storage()
            born = len(self.timeline.ops) - 1 if born is None else born
            life = _Life(storage.nbytes(), born, weakref.finalize(storage, self._gone, place))
            self.lives.append(life)
            self.alive[place] = life
        if self.alive[place].kind == "other":
            self.alive[place].kind = kind

    def _gone(self, place: int) -> None:
        self.alive.pop(place).died = len(self.timeline.ops)

    def tally(self) -> None:
        """Stop watching, and write the bytes of all memory that was met into the timeline."""
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
    """Follow the memory of every tensor that is made inside; yield a timeline, filled at the end.

    The tensors of `model`, `optimizer` and `buckets` are followed as well, and have their kind of
    `KINDS`. buckets: flat tensors of a data-parallel wrapper; a gradient in one of them counts as
    "buckets". Buffers of the model count as parameters, an input that is kept for backward as an
    activation. "other" is what else is made: results that aren't kept, gradients of activations.

    Works on every device, at some microseconds an operation. Scratch memory inside an operation
    isn't seen, nor memory that is resized later, nor an allocator's rounding: for a GPU's see
    torch.cuda.memory_stats.
    """
    timeline = Timeline()
    watcher = _Watcher(timeline)

    def keep(x: Tensor) -> Tensor:
        watcher.meet(x, "activations", born=None if address(x) in watcher.alive else 0)
        return x

    def label() -> None:
        parameters = list(model.parameters())
        there = {  # the order counts: a gradient in a bucket is the bucket's
            "buckets": buckets,
            "parameters": [*parameters, *model.buffers()],
            "gradients": [parameter.grad for parameter in parameters if parameter.grad is not None],
            "optimizer": remembered(model, optimizer),
        }
        for kind, tensors in there.items():
            for tensor in tensors:
                watcher.meet(tensor, kind)

    buckets = list(buckets)
    label()

    def meet_gradient(parameter: Tensor) -> None:
        watcher.meet(parameter.grad, "gradients")

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hooks = [parameter.register_post_accumulate_grad_hook(meet_gradient) for parameter in trained]
    try:
        with watcher, saved_tensors_hooks(keep, lambda x: x):
            yield timeline
        label()
    finally:
        for hook in hooks:
            hook.remove()
        watcher.tally()


class _Scale(TorchDispatchMode):
    """A mode that adds up the live memory after every operation; `most` is the maximum in bytes."""

    def __init__(self, known: Iterable[Tensor]):
        super().__init__()
        self.storages = weakref.WeakSet(tensor.untyped_storage() for tensor in known)
        self.most = self.weigh()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in _Watcher

    def weigh(self) -> int:
        return sum(storage.nbytes() for storage in self.storages)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        made = op(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, Tensor):
                self.storages.add(tensor.untyped_storage())
        self.most = max(self.most, self.weigh())
        return made


def most_bytes(step: Callable[[], object], known: Iterable[Tensor] = ()) -> int:
    """Call `step`; return the most bytes that tensors had at a time, those of `known` included.

    Unlike `watch` it sees memory that grows and shrinks, as that of FSDP's whole weights, and looks
    at all memory after every operation: slow with many tensors.
    """
    with _Scale(known) as scale:
        step()
    return scale.most
