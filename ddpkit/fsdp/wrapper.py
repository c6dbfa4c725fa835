"""Fully sharded data parallelism: weights are whole only while their unit computes.

    model = FSDP(model)                             # each rank keeps 1/W of every parameter
    optimizer = AdamW(model.parameters(), lr=1e-3)  # any elementwise one; it gets the shards
    loss = model(inputs).square().mean()            # AG b0, AG b1, AG b2: used, dropped
    loss.backward()                                 # AG b2, AG b1, RS b2, AG b0, RS b1, RS b0
    model.synchronize()                             # each shard's .grad is the mean over the ranks
    optimizer.step()

AG b2 gathers unit b2, RS b2 reduce-scatters its gradients. AG b1 comes before RS b2: the next
unit's weights are fetched while this one still computes.

PyTorch's `fully_shard` makes the same calls, in the same order, with as many bytes. Rajbhandari et
al. 2020 (ZeRO stage 3); Zhao et al. 2023 (FSDP). Notebook 12.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .. import transport as torchs
from ..tools.checks import (
    check_all_call,
    check_in_group,
    check_same_on_all_ranks,
    check_same_shapes,
)
from .clip import clip_grad_norm_
from .conductor import Conductor
from .plan import broadcast, plan_units, shard_parameters
from .units import Unit


class FSDP(nn.Module):
    """A wrapper that trains `module` with parameters, gradients and optimizer state in shards.

    compute_dtype: weights are gathered and used, and floating inputs converted, in this dtype.
    reduce_dtype: in which gradients are sent; None: the compute dtype. Shards, their gradients and
    the optimizer's state keep the parameters' dtype.
    reshard_after_forward: drop whole weights between forward and backward; None: all but the
    root's.
    wrap: the names of the units, submodules whose weights are gathered and dropped together; None:
    each child with parameters, a ModuleList counting as its elements. Parameters outside these, or
    tied across them, belong to the root's unit.
    transport: sends the messages (`ddpkit.transport`).

    `.module` has the shards under the original names, cut along the first axis; all begin with the
    values of the group's first rank. What is on the meta device is made submodule by submodule, by
    its `reset_parameters`. Call modules, never their methods: hooks do the work.
    ValueError: this rank isn't in `group`; parameters differ between ranks in name, shape or dtype;
    a unit has several dtypes; there is an FSDP inside; `wrap` has a wrong name; in the first step,
    ranks use units in different order.
    RuntimeError: a module was called past its hooks, and computed with a shard; the optimizer
    stepped while weights were whole; later, a rank alone leaves the order of units it had so far.

    Cost per rank: 3(W-1)/W of the parameters sent in a step; whole are two units and the root's.
    """

    overlap = False  # of a unit's reduction with the next unit's backward: see `Conductor`

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
        if any(isinstance(inner, FSDP) for inner in module.modules()):
            raise ValueError("expected a plain module, got FSDP inside: name its units in `wrap`")
        self.module = module
        self.group = group
        check_same_on_all_ranks("module", module.named_parameters(), group)
        # Plan what travels together; then cut each parameter, as it is made on the meta device.
        plan = plan_units(module, wrap)
        sharded = shard_parameters(module, group)
        broadcast(module.buffers(), group)
        self.units: list[Unit] = []  # the root's first
        for name, inside in plan.items():
            submodule = module.get_submodule(name)
            parameters = [sharded[member] for member in inside]
            how = compute_dtype, reduce_dtype, group, transport
            unit = Unit(name or "the root", submodule, parameters, *how)
            # The root stays whole by default: backward begins with it.
            unit.reshard = reshard_after_forward
            if reshard_after_forward is None:
                unit.reshard = name != ""
            self.units.append(unit)
        # From here on the hooks gather, drop and reduce.
        self.conductor = Conductor(self.units, group, compute_dtype, self.overlap)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)  # the hooks of its units do the rest

    # A step

    @contextlib.contextmanager
    def no_sync(self, gradients: bool = True, weights: bool = False) -> Iterator[None]:
        """Leave to a later micro-batch the reduction of gradients, or the dropping of weights.

        gradients: add up whole gradients on each rank; `synchronize`, or a backward outside, will
        reduce them. weights: keep whole weights after backward, for the next forward; the same two
        will drop them. Cost in memory: the whole model's gradients; the whole model's weights.

        PyTorch's `set_requires_gradient_sync(False)` and `set_reshard_after_backward(False)`.
        """
        # Both are put back afterwards, so that one may be used inside another.
        conductor = self.conductor
        syncing = conductor.syncing
        keeping = conductor.keeping
        conductor.syncing = syncing and not gradients
        conductor.keeping = keeping or weights
        try:
            yield
        finally:
            conductor.syncing = syncing
            conductor.keeping = keeping

    def synchronize(self) -> None:
        """Reduce the gradients that are left, drop all weights: after backward, before the step.

        While `no_sync` adds up gradients, it does nothing. All ranks must call. ValueError: a
        trained parameter has had no gradient since the last call.
        """
        if not self.conductor.syncing:
            return
        self.conductor.synchronize()
        # Every trained parameter must have been used in this step, or its shard would stand still.
        unused = []
        for unit in self.units:
            unused += [entry.name for entry in unit.trained if not entry.used]
            for entry in unit.trained:
                entry.used = False
        if unused:
            got = f"rank {dist.get_rank()} has no gradient for {', '.join(unused)} after backward"
            remedy = "Does the loss depend on it? Freeze it, on every rank, if not."
            raise ValueError(f"{got}, expected one for every parameter that requires it. {remedy}")

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale the mean gradient to a norm of at most `max_norm`; return the norm that it had.

        In place, after `synchronize`, on all ranks. Cost: one number all-reduced. The function in
        torch.nn.utils would compute the norm of this rank's shards alone.
        """
        shards = [p.grad for p in self.module.parameters() if p.grad is not None]
        return clip_grad_norm_(shards, max_norm, self.group)

    # Whole parameters

    def drop(self) -> None:
        """Drop all whole weights, so that `.module` has the shards again."""
        self.conductor.drop()

    def shapes(self) -> dict[str, torch.Size]:
        """Return {name: shape of the whole parameter}, named as in the plain module."""
        found = {entry.name: entry.shape for unit in self.units for entry in unit.sharded}
        return {name: found[name] for name, _ in self.module.named_parameters()}

    def full_parameters(self) -> dict[str, Tensor]:
        """Return {name: whole parameter, in the shards' dtype}, on every rank; all must call.

        Cost: an all-gather of each unit, and the memory of the whole model on every rank.
        RuntimeError: a rank calls alone (on Gloo, after 10 s).
        """
        # A rank that calls alone gets an error before it can hang in the first gather.
        check_all_call("full_parameters", self.group)
        self.drop()
        found = {}
        for unit in self.units:
            found |= unit.full_parameters()
        return {name: found[name] for name in self.shapes()}

    @torch.no_grad()
    def load_full_parameters(self, values: Mapping[str, Tensor]) -> None:
        """Copy this rank's rows of whole parameters, {name: tensor}, into its shards.

        Nothing is sent: all ranks must call, with all values. ValueError: other names or shapes.
        """
        theirs = {name: tuple(value.shape) for name, value in values.items()}
        mine = {name: tuple(shape) for name, shape in self.shapes().items()}
        check_same_shapes("values", theirs, mine)
        self.drop()
        for unit in self.units:
            for entry in unit.sharded:
                entry.load(values[entry.name])

    def state_dict(self, *args, **kwargs) -> dict:
        """Raise RuntimeError: it would hold 1/W of the model. The error names other ways."""
        raise RuntimeError(
            f"state_dict() on rank {dist.get_rank()} would hold this rank's shards alone. Take "
            "full_parameters() on every rank and save them on one, or ddpkit.fsdp.save."
        )
