"""The first NaN or inf of a training: in which module, forward or backward, on which rank."""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn


class NotFinite(RuntimeError):
    """A module made a NaN or an inf, from inputs that were finite."""


@contextlib.contextmanager
def finite(module: nn.Module) -> Iterator[None]:
    """Raise NotFinite at the first module whose output, or input's gradient, isn't finite.

    The sentence says which module, in which of its calls, from which inputs, on which rank. Only
    while inside. Cost: every module's result is read once more; on a GPU, a wait for each.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    calls: dict[str, int] = {}
    handles = []

    def watch(path: str, part: nn.Module) -> None:
        name = f"module {path}" if path else "the model"
        name += f" ({type(part).__name__})"

        def on_output(_, inputs, output):
            calls[path] = calls.get(path, 0) + 1
            told = f"rank {rank}: the output of {name}, call {calls[path]}"
            complain(told, tensors(output), tensors(inputs), "its inputs are")

        def on_gradient(_, to_inputs, of_outputs):
            told = f"rank {rank}: the gradient that {name} hands back"
            complain(told, tensors(to_inputs), tensors(of_outputs), "the one that came to it is")

        handles.append(part.register_forward_hook(on_output))
        handles.append(part.register_full_backward_hook(on_gradient))

    for path, part in module.named_modules():
        if not any(True for _ in part.children()):  # leaves: the innermost is the cause
            watch(path, part)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def complain(told: str, results: list[Tensor], causes: list[Tensor], verb: str) -> None:
    """Raise NotFinite if a result isn't finite, and say what it was made of."""
    for result in results:
        if result.isfinite().all():
            continue
        kind = "NaN" if result.isnan().any() else "inf"
        if not all(bool(cause.isfinite().all()) for cause in causes):
            raise NotFinite(f"{told} has {kind}, and {verb} not finite either")
        largest = max((cause.abs().max().item() for cause in causes if cause.numel()), default=0.0)
        raise NotFinite(f"{told} has {kind}; {verb} finite, at most {largest:.3g}")


def tensors(values: object) -> list[Tensor]:
    found = values if isinstance(values, tuple | list) else [values]
    return [x for x in found if isinstance(x, Tensor) and torch.is_floating_point(x)]
