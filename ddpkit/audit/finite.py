"""Find the first NaN or inf of a training: in which module, forward or backward, on which rank."""

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules import module as modules


class NotFinite(RuntimeError):
    """A module's output, or the gradient of its input, has a NaN or an inf; the text says where."""


@contextlib.contextmanager
def finite(module: nn.Module | None = None) -> Iterator[None]:
    """Raise NotFinite, inside `with`, at the first module whose output or gradient isn't finite.

    Checked are modules without submodules: tensors that they return, alone or in a list, and in
    backward the gradients of their inputs, but not of their parameters. The error names rank,
    module and, in forward, which of its calls it was, and says whether its inputs were finite.
    module: its parts are checked; None: every module that is called, named by its type alone.
    Code that torch.compile has compiled before runs uncompiled here, so that its modules are seen.
    Cost: each of these tensors is read once more, and the program waits for the GPU each time.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    calls: dict[nn.Module, int] = {}
    paths = {part: path for path, part in module.named_modules()} if module is not None else {}

    def told(part: nn.Module) -> str:
        kind = type(part).__name__
        if part not in paths:
            return f"a module ({kind})"
        return f"module {paths[part]} ({kind})" if paths[part] else f"the model ({kind})"

    def on_call(part, inputs):
        # A view's gradient is what this call hands back, without what other users of x do.
        if is_leaf(part):
            return tuple(x.view_as(x) if wants_gradient(x) else x for x in inputs)
        return inputs

    def on_output(part, inputs, output):
        if is_leaf(part):
            calls[part] = calls.get(part, 0) + 1
            where = f"rank {rank}: the output of {told(part)}, call {calls[part]}"
            parameters = [*part.parameters()]
            product = partial(product_too_large, parameters=parameters)
            hint = product if parameters else function_too_large
            complain(where, tensors(output), tensors(inputs), "its inputs are", hint)
            on_gradients(part, inputs, output)

    def on_gradients(part, inputs, output):
        due = [*filter(wants_gradient, tensors(inputs))]
        number = len(due)
        came, handed_back = [], []

        def on_gradient(gradient):
            where = f"rank {rank}: the gradient that {told(part)} hands back"
            hint = partial(product_too_large, parameters=[*part.parameters()])
            complain(where, [gradient], came, "the one that came to it is", hint)
            handed_back.append(True)
            if len(handed_back) == number:  # or what came would stay as long as the graph
                came.clear()
                handed_back.clear()

        # Hooks of tensors, not of the module: those forbid that a tensor is changed in place.
        if due:
            for x in filter(wants_gradient, tensors(output)):
                x.register_hook(came.append)
        for x in due:
            x.register_hook(on_gradient)

    handles = []
    for part in filter(is_leaf, paths):
        handles.append(part.register_forward_pre_hook(on_call))
        handles.append(part.register_forward_hook(on_output))
    if module is None:
        handles.append(modules.register_module_forward_pre_hook(on_call))
        handles.append(modules.register_module_forward_hook(on_output))
    with contextlib.ExitStack() as listening:
        for handle in handles:
            listening.callback(handle.remove)
        # The import takes seconds; a program that compiles has made it.
        if "torch._dynamo" in sys.modules:
            with contextlib.suppress(RuntimeError):  # this block is in compiled code itself
                listening.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def is_leaf(part: nn.Module) -> bool:
    """Return whether a module has no submodules: only these are checked, so the cause is named."""
    return not any(True for _ in part.children())


def complain(
    told: str, results: list[Tensor], causes: list[Tensor], verb: str, hint: Callable
) -> None:
    """Raise NotFinite if a tensor in `results` has a NaN or an inf; return None otherwise.

    told: the beginning of its text, "rank 0: the output of module 1 (Linear), call 1". causes: the
    tensors that the results were computed from. verb: names these, "its inputs are". hint: called
    with the first of `causes`, if all are finite; returns the end of the text, a reason, or "".
    """
    for result in results:
        if result.isfinite().all():
            continue
        kind = "NaN" if result.isnan().any() else "inf"
        if not all(bool(cause.isfinite().all()) for cause in causes):
            raise NotFinite(f"{told} has {kind}, and {verb} not finite either")
        why = hint(causes[0]) if causes else ""
        raise NotFinite(f"{told} has {kind}; {verb} finite, at most {largest(causes):.3g}{why}")


def largest(tensors: list[Tensor]) -> float:
    """Return the largest absolute value in these tensors; 0.0 if all are empty."""
    return max((x.detach().abs().max().item() for x in tensors if x.numel()), default=0.0)


def product_too_large(x: Tensor, parameters: list[Tensor]) -> str:
    """Return words on parameters that aren't finite, or may overflow in products with x; or ""."""
    if not all(bool(parameter.isfinite().all()) for parameter in parameters):
        return ", its parameters aren't"
    weight = largest(parameters)
    most = torch.finfo(x.dtype).max
    if largest([x]) * weight * x.shape[-1:].numel() <= most:
        return ""
    return f", its parameters at most {weight:.3g}: {x.dtype} ends at {most:.3g}"


def function_too_large(x: Tensor) -> str:
    """Return words on exponentials or squares of x that are inf, and from which x on; or ""."""
    most = torch.finfo(x.dtype).max
    if x.numel() and x.max().item() > math.log(most):
        return f": in {x.dtype} exponentials are inf from {math.log(most):.3g} on"
    if largest([x]) > math.sqrt(most):
        return f": in {x.dtype} squares are inf from {math.sqrt(most):.3g} on"
    return ""


def wants_gradient(x: object) -> bool:
    return isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled()


def tensors(values: object) -> list[Tensor]:
    found = values if isinstance(values, tuple | list) else [values]
    return [x for x in found if isinstance(x, Tensor) and torch.is_floating_point(x)]
