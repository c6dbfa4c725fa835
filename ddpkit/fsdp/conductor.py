"""The order of FSDP's calls: when units are gathered, dropped and reduced.

    forward     AG b0, AG b1, AG b2                        each dropped when it has computed
    backward    AG b2, AG b1, RS b2, AG b0, RS b1, RS b0   one unit is fetched ahead

AG gathers a unit's weights, RS reduce-scatters its gradients: PyTorch's order. Notebook 12.
"""

from functools import partial

import torch
from torch.distributed import ProcessGroup

from .agreement import Agreement
from .hooks import cast, led_through, with_hooks
from .reduce import Reduction
from .units import Unit


class Conductor:
    """The hooks that gather, drop and reduce the units, and what they have to remember.

    units: those of one FSDP, the root's first. compute_dtype: floating inputs are converted to it;
    None: they aren't. overlap: forward also fetches one unit ahead, in the order of the last step;
    and a reduction may last until the next one begins, so two units' gradients are held. Otherwise
    only backward fetches ahead, and a reduction ends before the next unit computes. The collective
    calls and their order are the same.

    syncing: gradients are reduced after backward. keeping: whole weights stay after backward.
    order: units as this step's forward used them; last_order: the last step's. agreement: checks
    that all ranks gather and reduce the same unit next.
    """

    def __init__(
        self,
        units: list[Unit],
        group: ProcessGroup | None,
        compute_dtype: torch.dtype | None,
        overlap: bool,
    ):
        self.units = units
        self.group = group
        self.compute_dtype = compute_dtype
        self.overlap = overlap
        self.syncing = True
        self.keeping = False
        self.in_backward = False
        self.order: list[Unit] = []
        self.last_order: list[Unit] = []
        self.reduction: Reduction | None = None  # on its way
        self.agreement = Agreement(group)
        for unit in units:
            before = partial(self.before_forward, unit)
            after = partial(self.after_forward, unit)
            unit.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            unit.module.register_forward_hook(after)

    # Forward

    def before_forward(self, unit: Unit, _, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Gather a unit's weights before it computes; return its (args, kwargs), perhaps cast.

        Backward calls `after_backward(unit)` once the gradients of these inputs are computed.
        """
        self.gather(unit)
        if self.overlap and not self.in_backward:
            self.fetch_ahead(unit)
        if self.compute_dtype is not None:
            args, kwargs = cast((args, kwargs), self.compute_dtype)
        if torch.is_grad_enabled() and not unit.in_backward:
            # Backward comes to a unit's inputs when it has left the unit.
            act = partial(self.after_backward, unit)
            args, kwargs = led_through(act, (args, kwargs))
        return args, kwargs

    def after_forward(self, unit: Unit, _, args: tuple, output):
        """Drop a unit's weights after it has computed, if `unit.reshard`; return its output.

        Backward calls `before_backward(unit)` once the gradient of this output is computed. With
        gradients disabled the root's weights are dropped as well; during backward, none are.
        """
        if unit.in_backward:  # a checkpoint calls the unit again: its weights are needed now
            return output
        # No backward will follow, so the weights aren't needed: the root's also go.
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

    def fetch_ahead(self, unit: Unit) -> None:
        """Begin to gather the unit that followed this one, at the same place, in the last step."""
        place = len(self.order)
        pair = self.last_order[place : place + 2]
        if len(pair) == 2 and pair[0] is unit:
            self.start_gather(pair[1])

    def gather(self, unit: Unit) -> None:
        self.start_gather(unit)
        unit.gather()

    def start_gather(self, unit: Unit) -> None:
        if unit.needs_gather:
            self.agreement.check(f"gather {unit.label}")
            unit.start_gather()

    # Backward

    def before_backward(self, unit: Unit) -> None:
        """Gather a unit's weights again before backward enters it, and fetch one unit ahead."""
        # The first unit that backward enters: autograd calls `end_backward` after everything.
        if not self.in_backward:
            self.in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
        if unit.in_backward:  # the gradient of another of its outputs
            return
        unit.in_backward = True
        unit.done = False
        self.gather(unit)
        # A unit that is used twice is entered twice: the last use first.
        if unit.uses:
            place = unit.uses.pop()
            if place > 0:
                self.start_gather(self.order[place - 1])
        if not self.overlap:
            self.finish_reduction()

    def after_backward(self, unit: Unit) -> None:
        """Drop a unit's weights after backward has left it, and begin to reduce its gradients."""
        unit.in_backward = False
        unit.done = True
        # Weights first, so that they and the message aren't whole at the same time.
        unit.take_gradients()
        if not self.keeping:
            unit.drop()
        if self.syncing:
            self.reduce(unit)

    def reduce(self, unit: Unit) -> None:
        """Begin to reduce a unit's pending gradients, once the reduction before has ended."""
        self.finish_reduction()
        if unit.has_gradients:
            self.agreement.check(f"reduce {unit.label}")
            self.reduction = Reduction(unit)

    def finish_reduction(self) -> None:
        if self.reduction is not None:
            self.reduction.finish()
            self.reduction = None

    def end_backward(self) -> None:
        """End backward: drop and reduce the units that no hook reported as left, the root first.

        Such are units whose inputs need no gradient, and those that weren't used.
        """
        # Token ids need no gradient, so backward never comes to the inputs of what they feed.
        for unit in self.units:
            if not unit.done:
                self.after_backward(unit)
            unit.done = False
            unit.uses.clear()
        self.finish_reduction()
        self.last_order = list(self.order)
        self.order.clear()
        self.in_backward = False

    # Between backward and the optimizer's step

    def synchronize(self) -> None:
        """Drop all whole weights, reduce the gradients that are left and wait; end the step."""
        self.drop()
        for unit in self.units:
            self.reduce(unit)
        self.finish_reduction()
        self.agreement.end_step()

    def drop(self) -> None:
        for unit in self.units:
            unit.drop()
