"""A recorder of a training: losses, gradients before each update, parameters after it.

    with Tape(steps=3) as tape:
        train()                 # any training: it need not know of the tape
    tape.steps[0].gradients["blocks.0.out.weight"]

The tape hooks three places of PyTorch: calls of outermost modules, i.e. those that no other module
calls (their inputs are the samples, and parameters are named as in them), `backward` (the loss),
and optimizers, made and stepping. A name in the second of such modules that the first has as well
begins with 'module2.'. A tensor of which ranks hold parts is gathered by collective calls, so these
ranks must make the same updates. Of a closure, which an optimizer's `step` calls for the loss, the
first call in a step counts. LBFGS isn't recorded: it calls its closure up to 25 times in a step, by
which it magnifies errors of rounding.
"""

import contextlib
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial, wraps
from unittest.mock import patch
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules import module as modules
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer
from torch.optim import optimizer as optimizers
from torch.utils._pytree import tree_leaves

from ..fsdp import FSDP
from .samples import Rows, Samples
from .whole import in_shards, parts_of_optimizer, whole_tensor

SOME = 64  # elements of a gradient are enough to tell in which proportions parts were added
WRAPPERS = "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."


@dataclass
class Step:
    """A record of one update: what it began from, and what it led to; tensors are on the CPU.

    losses: one for each backward that begins from a single number. gradients: {name: the whole
    gradient when the optimizer that holds the parameter steps (none holds it: the first one), or
    None}. parameters: {name: the whole parameter after the update}. samples: {hash of a row, with
    its shape: how often it went into the model}. rows: the rows, a tuple of tensors for each call,
    if `Samples` keeps them. rates: the optimizers' different learning rates, in order. last: {name:
    the norm of what the last backward added to this rank's `.grad`}. parts: for each loss, {name:
    some elements of this rank's own gradient, before it is averaged}. written: names of parameters
    that something other than an optimizer changed after the update before, such as a broadcast.
    mixing: {name of a module in training mode: its class} of batch norms, but for synchronized
    ones, and dropouts. buffers: {name: some of its elements, inf as 0, at the first backward}.
    """

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    samples: Counter = field(default_factory=Counter)
    rows: Rows = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    last: dict[str, float] = field(default_factory=dict)
    parts: list[dict[str, Tensor]] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    mixing: dict[str, str] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


def hook(listener, until: contextlib.ExitStack) -> None:
    """Let a listener note each optimizer's step and each module's call, until `until` closes.

    on_step and on_stepped get (optimizer, args, kwargs) before and after a step; the former may
    return other (args, kwargs). calling(call) returns a replacement for `Module.__call__`, which
    is given as `call`: global hooks of modules would be compiled along with a compiled model.
    """
    until.enter_context(patch.object(nn.Module, "__call__", listener.calling(nn.Module.__call__)))
    for handle in (
        optimizers.register_optimizer_step_pre_hook(listener.on_step),
        optimizers.register_optimizer_step_post_hook(listener.on_stepped),
    ):
        until.callback(handle.remove)


@dataclass
class Output:
    """A tensor that a module returned: the module's class name, its shape, some of its elements."""

    kind: str
    shape: torch.Size
    some: Tensor


class Tape:
    """A context manager that records the first `steps` updates made inside it, on this rank.

    begin: {name: whole parameter at the first backward}. longest: the most numbers that one sum
    may add up, the largest dimension of a parameter or the number of values in an input. depth: the
    number of modules with parameters of their own. inputs: some elements of each tensor that the
    model is first called with in training. outputs: {name of a module: its `Output` in that call},
    in the order in which they return. epsilon: the largest ε (`torch.finfo(dtype).eps`) of what
    modules returned in training. unseen: how many tensors with a gradient an optimizer steps that
    no called module has, and that aren't copies of a module's.
    when_full: called with the tape when a backward begins after the last recorded update, so never
    if the training ends there. samples: the `Samples` that notes inputs, and may replace them.
    given: {name: value} to copy into a module when it is first called with gradients, or at the
    first backward if it wasn't; a name that no module has, or a value of another shape than the
    parameter, is ignored.
    """

    def __init__(
        self,
        steps: int = 3,
        when_full: Callable[["Tape"], None] | None = None,
        samples: Samples | None = None,
        given: dict[str, Tensor] | None = None,
    ):
        self.most = steps
        self.when_full = when_full
        self.samples = samples or Samples()
        self.given = given or {}
        self.steps: list[Step] = []
        self.begin: dict[str, Tensor] = {}
        self.inputs: list[Tensor] = []
        self.outputs: dict[str, Output] = {}
        self.epsilon = 0.0
        self.longest = 1
        self.depth = 0
        self.unseen = 0
        self.rank = 0
        self.world_size = 1

    # Listening

    def __enter__(self) -> "Tape":
        self.roots: list[nn.Module] = []  # outermost modules so far, in the order of first calls
        self.active: set[nn.Module] = set()  # outermost modules called since the last update
        self.trained: set[nn.Module] = set()  # those that were called with gradients
        self.optimizers: WeakSet[Optimizer] = WeakSet()
        self.late: WeakSet[Optimizer] = WeakSet()  # those made after the first backward
        self.arriving: list[Tensor] = []  # what an outermost module is being called with
        self.names: dict[nn.Module, str] = {}  # of modules whose outputs are noted: in one call
        self.calls = 0  # modules that are being called, one inside the other
        self.stepping = 0  # optimizers that are stepping, likewise
        self.updated = True  # since the last backward
        self.full = False  # all steps are recorded
        self.listening = contextlib.ExitStack()
        hook(self, self.listening)
        self.listening.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Using `torch.compile")  # beside a hook of all modules
        self.listening.enter_context(modules.register_module_forward_hook(self.on_output))
        for context in (
            patch.object(torch.autograd, "backward", self.hearing(torch.autograd.backward)),
            patch.object(Optimizer, "__init__", self.making(Optimizer.__init__)),
        ):
            self.listening.enter_context(context)
        return self

    def __exit__(self, *error) -> None:
        self.listening.close()
        for kept in (self.roots, self.active, self.trained):
            kept.clear()

    def on_call(self, module: nn.Module) -> None:
        root = owner_of_forward(module) if self.calls == 0 else module
        if self.calls == 0:
            owner = next((x for x in self.roots if holds(x, root)), None)
            if owner is None and any(True for _ in root.parameters()):
                self.add(root)
                owner = root
            if owner is not None and not self.full:
                self.active.add(owner)
                if torch.is_grad_enabled() and owner not in self.trained:
                    self.trained.add(owner)
                    self.give([owner])
            first = len(self.roots) == 1 and not self.inputs and not self.steps
            if first and root is module and torch.is_grad_enabled():
                self.inputs = [some_of(x) for x in self.arriving]
                self.names = {part: plain_name(path) for path, part in root.named_modules()}
            self.arriving = []  # or the tape would keep a batch
        self.calls += 1

    def add(self, root: nn.Module) -> None:
        """Add an outermost module to `roots`, in the place of its parts, or of one it replaces."""
        gone = [x for x in self.roots if holds(root, x) or self.replaces(root, x)]
        at = self.roots.index(gone[0]) if gone else len(self.roots)
        self.roots = [x for x in [*self.roots[:at], root, *self.roots[at:]] if x not in gone]
        self.active.difference_update(gone)
        self.trained.difference_update(gone)

    def replaces(self, root: nn.Module, other: nn.Module) -> bool:
        """Return whether a new root takes another's place, as a model loaded anew does.

        It has the same names and shapes and a `late` optimizer; the other is no longer `active`.
        """
        held = set().union(*map(parameters_of, self.late))
        if other in self.active or held.isdisjoint(root.parameters()):
            return False
        return torch.is_grad_enabled() and shapes_of(root) == shapes_of(other)

    @torch.no_grad()
    def give(self, roots: list[nn.Module]) -> None:
        """Copy `given` into modules' parameters, by name and shape, before the first backward."""
        for name, owner, _, parameter in self.named():
            value = self.given.get(name) if owner in roots and not self.steps else None
            if value is not None and value.shape == parameter.shape:
                if isinstance(parameter, DTensor):
                    value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
                parameter.copy_(value)

    def on_output(self, module: nn.Module, _, output: object) -> None:
        """Note an output as `forward` returned it, before the module's own hooks, as for a cast."""
        if torch.compiler.is_compiling():
            return
        name = self.names.get(module)
        if isinstance(output, Tensor) and output.is_floating_point():
            if name is not None:
                noted = Output(type(module).__name__, output.shape, some_of(output))
                self.outputs.setdefault(name, noted)
            if torch.is_grad_enabled() and not self.full:
                self.epsilon = max(self.epsilon, torch.finfo(output.dtype).eps)

    def calling(self, call: Callable) -> Callable:
        """Return a `Module.__call__` that notes calls, and notes or replaces outermost inputs."""

        def called(module, *args, **kwargs):
            if torch.compiler.is_compiling():
                return call(module, *args, **kwargs)
            outermost = self.calls == 0 and any(True for _ in module.parameters())
            if outermost:
                self.arriving = list(filter(torch.is_tensor, tree_leaves((args, kwargs))))
                self.longest = max([self.longest, *(x.numel() for x in self.arriving)])
            listens = outermost and not self.full and not self.stepping
            if listens and torch.is_grad_enabled() and owner_of_forward(module) is module:
                step = len(self.steps) - (not self.updated)
                args, kwargs = self.samples.of_call(step, args, kwargs)
            self.on_call(module)
            try:
                output = call(module, *args, **kwargs)
                if module._compiled_call_impl is not None:  # the hook does nothing in there
                    self.on_output(module, (), output)
                return output
            finally:
                self.calls -= 1
                if self.calls == 0:
                    self.names = {}

        return called

    def making(self, init: Callable) -> Callable:
        """Return an `Optimizer.__init__` that calls `init` and notes the optimizer."""

        def made(optimizer, *args, **kwargs):
            init(optimizer, *args, **kwargs)
            self.optimizers.add(optimizer)
            self.late.update([optimizer] if self.steps else [])

        return made

    def hearing(self, backward: Callable) -> Callable:
        """Return a replacement for `torch.autograd.backward`, given as `backward`, which it calls.

        It notes the loss, the samples and what is added to gradients. The first call after an
        update begins a new `Step`; the one after the last recorded update ends the recording.
        """

        def inside(*args, **kwargs):
            self.calls += 1  # what an activation checkpoint computes again has no new samples
            try:
                return backward(*args, **kwargs)
            finally:
                self.calls -= 1

        def heard(tensors, *args, **kwargs):
            if self.stepping:  # a later evaluation of a closure
                return inside(tensors, *args, **kwargs)
            first = tensors if isinstance(tensors, Tensor) else next(iter(tensors), None)
            if self.updated and not self.full:
                if len(self.steps) < self.most:
                    self.updated = False
                    if not self.steps:  # from now on, no module gets another number
                        self.give([root for root in self.roots if root not in self.trained])
                        self.roots = self.in_order()
                        with in_shards(self.roots):
                            self.begin = self.whole(lambda parameter: parameter)
                    mixing, buffers = self.of_forward()
                    step = Step(written=self.written(), mixing=mixing, buffers=buffers)
                    self.steps.append(step)
                else:
                    self.fill()
            if not self.updated:
                names, rows = self.samples.take()
                self.steps[-1].samples += names
                self.steps[-1].rows += rows
            of_a_loss = isinstance(first, Tensor) and first.numel() == 1
            if not self.updated and of_a_loss:
                self.steps[-1].losses.append(first.item())
            if self.updated:
                return inside(tensors, *args, **kwargs)
            before = {name: x.clone() for name, x in self.gradients()}
            with self.own_gradients() as part:
                done = inside(tensors, *args, **kwargs)
            if of_a_loss:  # not of a reentrant checkpoint's block, which has a backward of its own
                self.steps[-1].parts.append(part)
            for name, x in self.gradients():
                added = x - before[name] if name in before else x
                self.steps[-1].last[name] = added.double().norm().item()
            return done

        return heard

    def of_forward(self) -> tuple[dict[str, str], dict[str, Tensor]]:
        """Return `mixing` and `buffers` of a step."""
        mixing, buffers = {}, {}
        for root in self.in_order():
            for path, part in root.named_modules():
                draws = isinstance(part, _DropoutNd) and part.p > 0
                mixes = isinstance(part, _BatchNorm) and not isinstance(part, nn.SyncBatchNorm)
                if part.training and (draws or mixes):
                    mixing.setdefault(plain_name(path), type(part).__name__)
            for path, buffer in root.named_buffers():
                dense = buffer.layout is torch.strided and not buffer.is_meta
                if dense and buffer.is_floating_point() and not isinstance(buffer, DTensor):
                    found = some_of(buffer).nan_to_num(0.0, 0.0, 0.0)
                    buffers.setdefault(plain_name(path), found)
        return mixing, buffers

    @contextlib.contextmanager
    def own_gradients(self) -> Iterator[dict[str, Tensor]]:
        """Context manager: record this rank's own gradients, before averaging, in a backward.

        Yields a dict, {name: some elements}, which fills as gradients are computed. Left out are
        DTensors, and parameters of `ddpkit.fsdp` that aren't whole when the backward begins.
        """
        part: dict[str, Tensor] = {}
        handles = []
        # A tensor's hook gets a gradient before it is added to `.grad`, so before wrappers send it.
        for name, _, _, parameter in self.named():
            if parameter.requires_grad and not hasattr(parameter, "full_tensor"):
                note = partial(part.__setitem__, name)
                handles.append(parameter.register_hook(lambda g, note=note: note(some_of(g))))
        try:
            yield part
        finally:
            for handle in handles:
                handle.remove()

    def on_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple | None:
        self.stepping += 1
        # An optimizer may use another inside; and a training may have several, one after another.
        if self.stepping > 1:
            return None
        step = self.steps[-1] if self.steps else Step()
        closing = partial(self.closing, optimizer, step, step.gradients)
        self.note_gradients(optimizer)
        if isinstance(optimizer, LBFGS):
            return None
        if is_closure(kwargs.get("closure")):
            return args, kwargs | {"closure": closing(kwargs["closure"])}
        if args[1:] and is_closure(args[1]):
            return (optimizer, closing(args[1]), *args[2:]), kwargs
        return None

    def closing(self, optimizer: Optimizer, step: Step, earlier: dict, closure: Callable):
        """Return a closure whose first call is recorded as if it came before the step.

        It isn't if the optimizer has moved parameters by then, as SAM does after a first backward.
        step, earlier: the last `Step`, and its gradients before the optimizer's were noted.
        """

        @wraps(closure)
        def closed(*args, **kwargs):
            moved = any(not some_of(x).equal(was) for x, was in start.items())
            if noted or moved:
                return closure(*args, **kwargs)
            stepping, self.stepping = self.stepping, 0
            step.gradients = earlier  # they are noted again, with what the closure adds
            try:
                loss = closure(*args, **kwargs)
            finally:
                self.stepping = stepping
            noted.append(optimizer)
            self.note_gradients(optimizer)
            return loss

        whole = (x for x in parameters_of(optimizer) if not isinstance(x, DTensor))
        start = {x: some_of(x) for x in whole if not is_lazy(x)}
        noted = []
        return closed

    def note_gradients(self, optimizer: Optimizer) -> None:
        """Record the gradients that an optimizer is about to use, whole."""
        if self.steps and not self.full:
            self.rank = dist.get_rank() if dist.is_initialized() else 0
            self.world_size = dist.get_world_size() if dist.is_initialized() else 1
            self.optimizers.add(optimizer)  # it may have been made before the tape
            held = set().union(*map(parameters_of, self.optimizers))
            named = {x: name for name, *_, x in self.named()}
            free = [x for x, name in named.items() if x not in held and name in self.steps[-1].last]
            if not free:  # otherwise the optimizer may have copies of these, as of fp16 weights
                lacking = sum(x.grad is not None for x in parameters_of(optimizer) - named.keys())
                self.unseen = max(self.unseen, lacking)
            before = self.steps[-1].gradients
            found = self.whole(self.gradient_for(optimizer))
            kept = {name: x for name, x in before.items() if x is not None}
            self.steps[-1].gradients = found | kept

    def gradient_for(self, optimizer: Optimizer) -> Callable[[nn.Parameter], Tensor | None]:
        """Return a function of a parameter: its gradient, or None if other optimizers hold it.

        A gradient that is scaled until the optimizer's step (fused, `GradScaler`) is divided.
        """
        sent = parts_of_optimizer(optimizer)
        scale = getattr(optimizer, "grad_scale", None)
        mine = parameters_of(optimizer)
        others = set().union(*map(parameters_of, self.optimizers)) - mine
        if not any(parameter in mine for *_, parameter in self.named()):
            others = set()  # it has copies, or another optimizer inside

        def gradient(parameter: nn.Parameter) -> Tensor | None:
            found = None if parameter in others else sent.get(parameter, parameter.grad)
            return found if found is None or scale is None else found / float(scale)

        return gradient

    def on_stepped(self, optimizer: Optimizer, *_) -> None:
        self.stepping -= 1
        # Of several optimizers the last one's step leaves the parameters of the whole update.
        if self.stepping == 0 and self.steps and self.steps[-1].gradients and not self.full:
            self.steps[-1].parameters = self.whole(lambda parameter: parameter)
            rates = {float(group["lr"]) for group in optimizer.param_groups if "lr" in group}
            self.steps[-1].rates = sorted(rates.union(self.steps[-1].rates))
            self.updated = True
            self.active.clear()

    def fill(self) -> None:
        """End the recording, since a backward follows the last update; call `when_full`."""
        self.full = True
        if self.when_full:
            self.when_full(self)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, `.grad`, not a copy) of this rank's parameters or parts; no DTensors."""
        for name, _, _, parameter in self.named():
            if parameter.grad is not None and not hasattr(parameter, "full_tensor"):
                yield name, parameter.grad.detach()

    def written(self) -> list[str]:
        """Name whole parameters, no DTensors, that are no longer what the last update left."""
        after = self.steps[-1].parameters if self.steps else {}
        found = []
        for name, _, _, parameter in self.named():
            kept = after.get(name)
            if kept is None or hasattr(parameter, "full_tensor"):
                continue
            now = parameter.detach().cpu()
            # A part has another shape, FSDP's whole weights another dtype, and NaN stays NaN.
            comparable = now.shape == kept.shape and now.dtype == kept.dtype
            if comparable and not now.allclose(kept, 0, 0, equal_nan=True):
                found.append(name)
        return found

    # Whole tensors, by the serial model's names

    def in_order(self) -> list[nn.Module]:
        """Return the roots by first calls, last those not trained at the first backward."""
        if self.steps:
            return self.roots
        return sorted(self.roots, key=lambda root: root not in self.trained)

    def named(self) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
        """Yield (name, root, path in the root, parameter) of all parameters, each once."""
        seen: set[Tensor] = set()
        taken: set[str] = set()
        for number, root in enumerate(self.in_order(), 1):
            paths = [(path, x) for path, x in root.named_parameters() if x not in seen]
            for path, x in paths:
                name = plain_name(path)
                yield f"module{number}.{name}" if name in taken else name, root, path, x
            taken.update(plain_name(path) for path, _ in paths)
            seen.update(x for _, x in paths)

    @torch.no_grad()
    def whole(self, of: Callable[[nn.Parameter], Tensor | None]) -> dict[str, Tensor | None]:
        """Return {name: of(parameter)} for all parameters: whole tensors, copied to the CPU.

        of: gives a parameter's tensor, such as its gradient; None stays None. Ranks that share a
        tensor must all call. Drops FSDP's whole weights, and updates `longest` and `depth`.
        """
        found: dict[str, Tensor | None] = {}
        for root in self.roots:
            if isinstance(root, FSDP):  # its modules show shards again, on every rank
                root.drop()
        for name, root, path, parameter in self.named():
            value = whole_tensor(root, path, of(parameter))
            self.longest = max([self.longest, *parameter.shape])
            found[name] = None if value is None else value.detach().cpu().clone()
        self.depth = max(self.depth, len({name.rpartition(".")[0] for name in found}))
        return found

    def __getstate__(self) -> dict:
        """Return what is pickled: the records, without modules, hooks, `samples` or `when_full`."""
        kept = "most", "steps", "begin", "longest", "depth", "rank", "world_size"
        kept += "inputs", "outputs", "epsilon", "unseen"
        return {name: getattr(self, name) for name in kept}


def some_of(x: Tensor) -> Tensor:
    """Return fewer than 2 * SOME evenly spaced elements, or all, as a float64 copy on the CPU."""
    flat = x.detach().flatten()
    # A copy even of float64: a gradient becomes `.grad`, which is averaged in place.
    return flat[:: max(1, len(flat) // SOME)].to("cpu", torch.float64, copy=True)


def owner_of_forward(module: nn.Module) -> nn.Module:
    """Return the outermost module whose running `forward` calls this one; itself if there is none.

    `model.forward(x)` runs the hooks of `model`'s parts, but none of `model`'s own. So the stack is
    searched for frames called `forward`, or `training_step` of a LightningModule, whose `self`
    contains this module.
    """
    owner, frame = module, sys._getframe(1)
    while frame:
        name = frame.f_code.co_name
        found = frame.f_locals.get("self") if name in ("forward", "training_step") else None
        runs = isinstance(found, nn.Module) and (name == "forward" or is_lightnings(found))
        if runs and holds(found, module):
            owner = found
        frame = frame.f_back
    return owner


def is_closure(argument: object) -> bool:
    return callable(argument) and not isinstance(argument, nn.Module)


def is_lightnings(module: nn.Module) -> bool:
    return any(kind.__name__ == "LightningModule" for kind in type(module).__mro__)


def holds(module: nn.Module, part: nn.Module) -> bool:
    return any(part is other for other in module.modules())


def shapes_of(module: nn.Module) -> dict[str, torch.Size]:
    parameters = [(plain_name(path), x) for path, x in module.named_parameters()]
    return {name: torch.Size() if is_lazy(x) else x.shape for name, x in parameters}


def parameters_of(optimizer: Optimizer) -> set[Tensor]:
    return {x for group in optimizer.param_groups for x in group["params"]}


def plain_name(path: str) -> str:
    """Drop what wrappers add: 'module.blocks.0._orig_mod.out.weight' is 'blocks.0.out.weight'."""
    # DDP's, compiled or not; elsewhere it may be the model's own.
    path = path.removeprefix("_orig_mod.").removeprefix("module.")
    for wrapper in WRAPPERS:
        path = path.replace(wrapper, "")
    return path
