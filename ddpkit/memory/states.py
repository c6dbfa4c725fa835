"""Model states: the bytes of parameters, gradients and optimizer state, and the GPUs they need."""

import math
from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from ..tools.checks import check_counts


class ModelStates(NamedTuple):
    """The bytes of parameters, gradients and optimizer state on one rank."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return sum(self)


PRECISIONS = {  # bytes a trained number; the optimizer: AdamW, with a master copy if mixed
    "fp32": ModelStates(4, 4, 8),  # the parameter is its own master copy
    "mixed": ModelStates(2, 2, 12),
    "mixed, fp32 gradients": ModelStates(2, 4, 12),
    "bf16": ModelStates(2, 2, 4),
}


def model_states(
    parameters: int, stage: int = 0, world_size: int = 1, precision: str = "mixed"
) -> ModelStates:
    """Predict the bytes of model states, with AdamW, on the rank that has the most.

    parameters: how many numbers are trained. stage: of ZeRO. From stage 1 on a rank has 1/W of the
    optimizer's state, from 2 on 1/W of the gradients, in 3 also 1/W of the parameters. precision: a
    key of `PRECISIONS`. ValueError: there is no such stage, precision or count.

    With "mixed" the optimizer has K = 12 bytes a parameter, 16 in all. Rajbhandari et al. 2020,
    figure 1 and section 3.1.
    """
    check_counts(parameters=parameters, world_size=world_size)
    if stage not in range(4) or precision not in PRECISIONS:
        expected = f"expected a stage from 0 to 3 and a precision of {', '.join(PRECISIONS)}"
        raise ValueError(f"{expected}, got {stage!r} and {precision!r}: choose one of each")
    shard = -(-parameters // world_size)
    numbers = [shard if stage >= sharded_from else parameters for sharded_from in (3, 2, 1)]
    bytes_each = PRECISIONS[precision]
    return ModelStates(*(n * nbytes for n, nbytes in zip(numbers, bytes_each, strict=True)))


def count_states(model: nn.Module, optimizer: Optimizer | None = None) -> ModelStates:
    """Count the bytes of the tensors that exist; a tensor under two names counts once.

    A view counts with all the memory behind it; buffers don't count. Parameters in the optimizer
    that aren't the model's are master copies, and count, with their gradients, as the optimizer's.
    So do AdamW's step counters, 4 bytes a parameter tensor, which `model_states` leaves out.
    """
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return ModelStates(*map(_storage_bytes, (parameters, gradients, remembered(model, optimizer))))


def remembered(model: nn.Module, optimizer: Optimizer | None) -> list[Tensor]:
    """List the tensors that only the optimizer has: state, master copies, their gradients."""
    if optimizer is None:
        return []
    own = {id(parameter) for parameter in model.parameters()}
    masters = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
    gradients = [master.grad for master in masters if master.grad is not None]
    state = [value for state in optimizer.state.values() for value in state.values()]
    return [*masters, *gradients, *(value for value in state if isinstance(value, Tensor))]


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Add up the memory behind these tensors, of which several may share one piece."""
    return sum({address(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def address(tensor: Tensor) -> int:
    """Return a number that all tensors with the same storage share, even on the meta device."""
    return tensor.untyped_storage()._cdata


def gpus_needed(
    state_bytes: int, capacity_bytes: int, activation_bytes: int = 0, sharded: float = 0.5
) -> int:
    """Compute the fewest GPUs W that hold all model states, sharded, and the activations.

    capacity_bytes: the memory of one GPU. sharded: the fraction of the activations that is divided
    among the GPUs; each holds all the rest. So W is the least number from 1 on for which
    state / W + activations · (1 - sharded + sharded / W) <= capacity.
    ValueError: the rest alone fills a GPU, however many there are.
    """
    shared = Fraction(sharded) * activation_bytes
    whole = activation_bytes - shared
    if whole >= capacity_bytes:
        raise ValueError(
            f"expected less than the {capacity_bytes} bytes of a GPU, got {float(whole):.4g} bytes "
            "of activations that aren't sharded: take a smaller batch"
        )
    return max(1, math.ceil((state_bytes + shared) / (capacity_bytes - whole)))
