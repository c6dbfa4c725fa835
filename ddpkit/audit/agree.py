"""Replicas that should be equal: which tensor differs, on which rank?"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from ..tensor_parallel.split import SplitLayer
from .state import leaves


def agree(
    module: nn.Module | Mapping[str, object],
    optimizer: Optimizer | None = None,
    group: ProcessGroup | None = None,
    random: bool = False,
) -> list[str]:
    """List what isn't the same on all ranks of `group`, to the bit: [] if all agree.

    Looks at parameters, buffers, gradients, the optimizer's state and options, such as its learning
    rate; with `random`, also at the CPU generator's state, which should differ where ranks draw
    dropout masks. DTensors and the parameters of split layers are left out; `ddpkit.fsdp`'s shards
    aren't. Each entry names the ranks that differ from the majority: "parameter head.weight: rank 2
    differs". A mapping {name: value} in the module's place is looked at alone: a norm, a loss
    scale, a state_dict, whose dicts and lists are entered: "state.0.step: rank 2 differs". Values
    that aren't tensors are compared by `repr`.

    Every rank of the group must call. Cost: an all_gather_object of a name and 32 bytes a tensor.
    """
    mine = {what: fingerprint(value) for what, value in replicated(module, optimizer, random)}
    everyones: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyones, mine, group=group)
    ranks = dist.get_process_group_ranks(group)
    found = []
    for what in dict.fromkeys(name for theirs in everyones for name in theirs):
        values = [theirs.get(what, "missing") for theirs in everyones]
        most, count = Counter(values).most_common(1)[0]
        if count < len(ranks):
            odd = [rank for rank, value in zip(ranks, values, strict=True) if value != most]
            found.append(f"{what}: {disagreement(odd, count, len(ranks))}")
    return found


def disagreement(odd: list[int], count: int, ranks: int) -> str:
    if count == 1:
        return "no two ranks are alike" if ranks > 2 else "the two ranks differ"
    named = ", ".join(map(str, odd))
    return f"rank {named} differs" if len(odd) == 1 else f"ranks {named} differ"


def replicated(
    module: nn.Module | Mapping[str, object], optimizer: Optimizer | None, random: bool
) -> Iterator[tuple[str, object]]:
    """Yield (name, value) of all that `agree` compares. module, optimizer, random: as there."""
    if isinstance(module, Mapping):
        yield from leaves(module)
        return
    names = {}
    for path, parameter in module.named_parameters():
        owner, _, name = path.rpartition(".")
        layer = module.get_submodule(owner)
        shard = isinstance(layer, SplitLayer) and name in layer.split
        if shard or hasattr(parameter, "full_tensor"):
            continue
        names[parameter] = path
        yield f"parameter {path}", parameter
        if parameter.grad is not None:
            yield f"gradient {path}", parameter.grad
    for path, buffer in module.named_buffers():
        yield f"buffer {path}", buffer
    for number, options in enumerate(optimizer.param_groups if optimizer else []):
        for option, value in options.items():
            if option != "params":
                yield f"{option} of parameter group {number}", value
        for parameter in options["params"]:
            for key, value in optimizer.state.get(parameter, {}).items():
                if parameter in names:
                    yield from leaves(value, f"{key} of {names[parameter]}")
    if random:
        yield "state of the CPU's random numbers", torch.get_rng_state()


def fingerprint(value: object) -> bytes:
    """Hash a tensor by dtype, shape and bits (NaN equals NaN, 0 isn't -0), others by `repr`."""
    text = repr(value)
    if isinstance(value, Tensor):
        data = value.detach().cpu().contiguous()
        text = f"{data.dtype} {tuple(data.shape)}"
        raw = data.flatten().view(torch.uint8).numpy().tobytes() if data.numel() else b""
        return hashlib.sha256(text.encode() + raw).digest()
    return hashlib.sha256(text.encode()).digest()
