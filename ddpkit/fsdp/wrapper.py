"""Fully sharded data parallelism: weights are whole only while their unit computes.

    model = FSDP(model)                             # each rank keeps 1/W of every parameter
    optimizer = AdamW(model.parameters(), lr=1e-3)  # any elementwise one: of shards
    loss = model(inputs).square().mean()            # AG b0, AG b1, AG b2: used, dropped
    loss.backward()                                 # AG b2, AG b1, RS b2, AG b0, RS b1, RS b0
    model.synchronize()                             # every shard.grad is the mean over the ranks
    optimizer.step()

AG b2 gathers unit b2, RS b2 reduce-scatters its gradients. AG b1 comes before RS b2: the next
unit's weights are fetched while this one still computes.

PyTorch's `fully_shard`, of which these are the calls, their order and their bytes. Rajbhandari et
al. 2020 (ZeRO stage 3); Zhao et al. 2023 (FSDP). Notebook 12.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from .. import transport as torchs
from ..tools.checks import (
    check_all_call,
    check_in_group,
    check_same,
    check_same_on_all_ranks,
    check_same_shapes,
)
from .clip import clip_grad_norm_
from .plan import broadcast, plan_units, shard_parameters
from .units import Unit


class Then(torch.autograd.Function):
    """apply(act, *tensors): the tensors; in backward, `act()` once all their gradients are here."""

    @staticmethod
    def forward(ctx, act, *tensors):
        ctx.set_materialize_grads(False)
        ctx.act = act
        return tensors

    @staticmethod
    def backward(ctx, *gradients):
        ctx.act()
        return None, *gradients


class FSDP(nn.Module):
    """Train `module` with its parameters, gradients and optimizer state shared out among ranks.

    compute_dtype: weights are gathered and used, and floating inputs converted, in this dtype.
    reduce_dtype: of gradients on the wire; None: the compute dtype. Shards, their gradients and the
    optimizer's state keep the parameters' dtype.
    reshard_after_forward: drop whole weights between forward and backward; None: but the root's.
    wrap: the names of the submodules that are units; None: each child with parameters, a ModuleList
    counting as its elements. What is in none belongs to the root's unit.
    transport: sends the messages (`ddpkit.transport`).

    `.module` has the shards under the original names, along the first axis; all begin with the
    values of the group's first rank. A module on the meta device is made unit by unit, by the
    `reset_parameters` of its modules. Call modules, never their methods: hooks do the work.
    ValueError: this rank isn't in `group`; modules differ between ranks; a wrong name in `wrap`.
    RuntimeError: in the first step, ranks use units in different order; a shard was computed with.

    Cost per rank: 3(W-1)/W of the parameters sent in a step, two units whole at a time.
    """

    overlap_reduce = False  # True: a reduce-scatter may last until the next one begins

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        group: ProcessGroup | None = None,
        reshard_after_forward: bool | None = None,
        wrap: Iterable[str] | None = None,
        transport=torchs,
    ):
        super().__init__()
        check_in_group("FSDP", group)
        if any(isinstance(each, FSDP) for each in module.modules()):
            raise ValueError("expected a plain module, got FSDP inside: name its units in `wrap`")
        self.module = module
        self.group = group
        self.compute_dtype = compute_dtype
        self.syncing = True  # gradients are reduced after backward
        self.keeping = False  # whole weights are kept after backward
        self.in_backward = False
        self.agreed = dist.get_world_size(group) == 1  # ranks use units in the same order
        self.order: list[Unit] = []  # in which forward used them
        self.reducing: Unit | None = None  # whose gradients are on their way
        check_same_on_all_ranks("module", module.named_parameters(), group)
        plan = plan_units(module, wrap)
        sharded = shard_parameters(module, group)
        broadcast(module.buffers(), group)
        self.units: list[Unit] = []  # the root's first
        for name, inside in plan.items():
            submodule = module.get_submodule(name)
            parameters = [sharded[each] for each in inside]
            how = compute_dtype, reduce_dtype, group, transport
            unit = Unit(name or "the root", submodule, parameters, *how)
            unit.reshard = reshard_after_forward
            if reshard_after_forward is None:
                unit.reshard = name != ""
            self.units.append(unit)
            before = partial(self.before_forward, unit)
            after = partial(self.after_forward, unit)
            unit.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            unit.module.register_forward_hook(after)

            before = partial(self.before_forward, unit)
            after = partial(self.after_forward, unit)
            submodule.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            submodule.register_forward_hook(after)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    # Forward

    def before_forward(self, unit: Unit, _, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Gather the weights; see to it that backward comes to `after_backward(unit)`."""
        self.gather(unit)
        if self.compute_dtype is not None:
            args, kwargs = cast((args, kwargs), self.compute_dtype)
        if torch.is_grad_enabled() and not unit.in_backward:
            # Backward comes to a unit's inputs when it has left the unit.
            args, kwargs = led_through(partial(self.after_backward, unit), (args, kwargs))
        return args, kwargs

    def after_forward(self, unit: Unit, _, args: tuple, output):
        """Drop the weights; see to it that backward begins with `before_backward(unit)`."""
        if unit.in_backward:  # a checkpoint has called the unit again: its weights are needed
            return output
        if not torch.is_grad_enabled():
            if not self.in_backward:
                unit.drop()
            return output
        if not self.in_backward:
            if unit.reshard:
                unit.drop()
            if unit.sharded:
                unit.uses.append(len(self.order))
                self.order.append(unit)
        return with_hooks(partial(self.before_backward, unit), output)

    def gather(self, unit: Unit) -> None:
        self.start_gather(unit)
        unit.gather()

    def start_gather(self, unit: Unit) -> None:
        if unit.needs_gather:
            self.agree(f"gather {unit.name}")
            unit.start_gather()

    # Backward

    def before_backward(self, unit: Unit) -> None:
        """Gather the weights again, and start with those that backward needs next."""
        if not self.in_backward:
            self.in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
        if unit.in_backward:  # the gradient of another of its outputs
            return
        unit.in_backward = True
        unit.done = False
        self.gather(unit)
        if unit.uses:
            place = unit.uses.pop()
            if place > 0:
                self.start_gather(self.order[place - 1])
        if not self.overlap_reduce:  # hold one unit's gradients at a time, not two
            self.finish_reduce()

    def after_backward(self, unit: Unit) -> None:
        """Drop the weights, and start to reduce the gradients."""
        unit.in_backward = False
        unit.done = True
        unit.take_gradients()
        if not self.keeping:
            unit.drop()
        if self.syncing:
            self.reduce(unit)

    def reduce(self, unit: Unit) -> None:
        self.finish_reduce()
        if unit.has_gradients:
            self.agree(f"reduce {unit.name}")
            unit.start_reduce()
            self.reducing = unit

    def finish_reduce(self) -> None:
        if self.reducing is not None:
            self.reducing.finish_reduce()
            self.reducing = None

    def end_backward(self) -> None:
        """Finish what backward didn't come to: units whose inputs need no gradient; root first."""
        for unit in self.units:
            if not unit.done:
                self.after_backward(unit)
            unit.done = False
            unit.uses.clear()
        self.finish_reduce()
        self.order.clear()
        self.in_backward = False

    # A step

    @contextlib.contextmanager
    def no_sync(self, gradients: bool = True, weights: bool = False) -> Iterator[None]:
        """Leave out, for the micro-batches inside, what only the last one must do.

        gradients: add up whole gradients on each rank, and reduce nothing: `synchronize` or a
        backward outside will. weights: keep whole weights after backward, for the next forward.
        Cost in memory: the whole model's gradients; the whole model's weights.

        PyTorch's `set_requires_gradient_sync(False)` and `set_reshard_after_backward(False)`.
        """
        before = self.syncing, self.keeping
        self.syncing = self.syncing and not gradients
        self.keeping = self.keeping or weights
        try:
            yield
        finally:
            self.syncing, self.keeping = before

    def synchronize(self) -> None:
        """Reduce what is left, after backward and before the optimizer's step; drop all weights.

        Inside `no_sync` it does nothing. ValueError: a trained parameter has no gradient.
        """
        if not self.syncing:
            return
        self.drop()
        for unit in self.units:
            self.reduce(unit)
        self.finish_reduce()
        self.agree("synchronize")
        self.agreed = True
        unused = []
        for unit in self.units:
            unused += [each.name for each in unit.trained if not each.used]
            for each in unit.trained:
                each.used = False
        if unused:
            got = f"rank {dist.get_rank()} has no gradient for {', '.join(unused)} after backward"
            remedy = "Does the loss depend on it? Freeze it, on every rank, if not."
            raise ValueError(f"{got}, expected one for every parameter that requires it. {remedy}")

    def agree(self, event: str) -> None:
        """Compare what ranks do next, in the first step: else one rank's weights serve another's.

        Two units of one size look alike to a collective.
        """
        if not self.agreed:
            remedy = "All ranks must use the same modules in the same order, in every step."
            check_same("next call", [event], self.group, remedy)

    # Whole parameters

    def drop(self) -> None:
        """Drop all whole weights: `.module` shows the shards."""
        for unit in self.units:
            unit.drop()

    def shapes(self) -> dict[str, torch.Size]:
        """Return {name: shape of the whole parameter}, as the plain module's `named_parameters`."""
        found = {each.name: each.shape for unit in self.units for each in unit.sharded}
        return {name: found[name] for name, _ in self.module.named_parameters()}

    def full_parameters(self) -> dict[str, Tensor]:
        """Gather {name: whole parameter} on every rank, in the shards' dtype. On every rank.

        Cost: as an all-gather of each unit, and the memory of the whole model.
        RuntimeError: a rank calls alone (on Gloo).
        """
        check_all_call("full_parameters", self.group)
        self.drop()
        found = {}
        for unit in self.units:
            found |= unit.full_parameters()
        return {name: found[name] for name in self.shapes()}

    @torch.no_grad()
    def load_full_parameters(self, values: Mapping[str, Tensor]) -> None:
        """Copy this rank's rows of whole parameters, by name. Nothing is sent: call on every rank.

        ValueError: names or shapes are another model's.
        """
        theirs = {name: tuple(value.shape) for name, value in values.items()}
        mine = {name: tuple(shape) for name, shape in self.shapes().items()}
        check_same_shapes("values", theirs, mine)
        self.drop()
        for unit in self.units:
            for each in unit.sharded:
                each.load(values[each.name])

    def state_dict(self, *args, **kwargs) -> dict:
        """Refuse: it would hold 1/W of the model."""
        raise RuntimeError(
            f"state_dict() on rank {dist.get_rank()} would hold this rank's shards alone. Take "
            "full_parameters() on every rank and save them on one, or ddpkit.fsdp.save."
        )

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Make the mean gradient no longer than `max_norm`, after `synchronize`; return its length.

        Cost: one number all-reduced. torch.nn.utils' function would take shards for the whole.
        """
        shards = [p.grad for p in self.module.parameters() if p.grad is not None]
        return clip_grad_norm_(shards, max_norm, self.group)


def cast(values, dtype: torch.dtype):
    """Convert every floating tensor in nested tuples, lists and dicts."""
    return tree_map_only(
        Tensor, lambda each: each.to(dtype) if each.is_floating_point() else each, values
    )


def led_through(act: Callable[[], None], values):
    """Lead all tensors in `values` that need a gradient through one `Then`."""
    leaves, structure = tree_flatten(values)
    places = [n for n, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]
    if places:
        tensors = Then.apply(act, *[leaves[n] for n in places])
        for n, tensor in zip(places, tensors, strict=True):
            leaves[n] = tensor
    return tree_unflatten(leaves, structure)


def with_hooks(act: Callable[[], None], values):
    """Let backward call `act()` when the gradient of a tensor in `values` is here."""

    def hooked(x: Tensor) -> Tensor:
        if not x.requires_grad:
            return x
        if x._is_view():  # changed in place, a view drops its hooks; autograd defends a `Then`
            return Then.apply(act, x)[0]
        x.register_hook(lambda _: act())
        return x

    return tree_map_only(Tensor, hooked, values)
