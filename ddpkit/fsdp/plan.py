"""Plan which parameter belongs to which unit; make modules of the meta device one by one."""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from .shards import Place, Sharded


def default_units(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """Yield the names of the units unless others are given: the children that have parameters.

    In place of a ModuleList come its elements ("blocks.0"). prefix: is put before each name.
    """
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            yield from default_units(child, f"{prefix}{name}.")
        elif any(True for _ in child.parameters()):
            yield prefix + name


def plan_units(module: nn.Module, wrap: Iterable[str] | None = None) -> dict[str, list[str]]:
    """Assign parameters to units: return {unit: its parameters}, all by name, the root, "", first.

    wrap: names of submodules that are units; None: see `default_units`. A parameter belongs to the
    innermost unit around all modules that have it: one tied across two units to a unit around both,
    mostly the root. A unit without any is left out, but for the root.
    ValueError: a name in `wrap` isn't a submodule's.
    """
    names = list(default_units(module)) if wrap is None else list(wrap)
    known = dict(module.named_modules())
    unknown = [name for name in names if name not in known]
    if unknown:
        few = ", ".join(list(known)[1:9])
        raise ValueError(
            f"expected names of submodules in wrap, got {unknown}. There are {few} ..."
        )
    plan = {"": []} | {name: [] for name in known if name in names}
    for name, places in places_of(module).items():
        around = [unit for unit in plan if are_within(places, unit)]
        plan[max(around, key=len)].append(name)  # the innermost
    return {unit: inside for unit, inside in plan.items() if inside or not unit}


def are_within(names: list[str], unit: str) -> bool:
    return not unit or all(name.startswith(f"{unit}.") for name in names)


def places_of(module: nn.Module) -> dict[str, list[str]]:
    """Return {first name of a parameter: all its names}; one that is tied has several."""
    first_names = {}  # of each parameter: `named_parameters` keeps only these
    places = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first = first_names.setdefault(parameter, name)  # by the object: a tie is one object
        places.setdefault(first, []).append(name)
    return places


def place(module: nn.Module, name: str) -> Place:
    """Return a parameter's module and its name there: for "0.bias" (module "0", "bias")."""
    path, _, attribute = name.rpartition(".")
    return module.get_submodule(path), attribute


# Making


def materialise(module: nn.Module, name: str) -> None:
    """Give a module's own parameters and buffers memory and values, if any is on the meta device.

    `reset_parameters()` draws the values, also of those that had some, on the current GPU with
    NCCL, otherwise on the CPU. Parameters stay the same objects, so ties and an optimizer's
    references hold. Its submodules are left alone. name: the module's, for the error. ValueError:
    one is on the meta device, and the module has no reset_parameters.
    """
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    if not any(tensor.is_meta for tensor in own):
        return
    if not hasattr(module, "reset_parameters"):
        kind = type(module).__name__
        got = f"{kind} {name!r} on the meta device, which has no reset_parameters()"
        raise ValueError(f"expected modules that can draw their values, got {got}: give it one.")
    # One parameter at a time, so that ties and an optimizer's references hold.
    device = "cuda" if "nccl" in dist.get_backend() else "cpu"
    for parameter in module.parameters(recurse=False):
        if parameter.is_meta:
            made = torch.empty_like(parameter, device=device)
            made = nn.Parameter(made, requires_grad=parameter.requires_grad)
            torch.utils.swap_tensors(parameter, made)  # the object stays, its insides change
    for attribute, buffer in module.named_buffers(recurse=False):
        if buffer.is_meta:
            setattr(module, attribute, torch.empty_like(buffer, device=device))
    module.reset_parameters()


def shard_parameters(module: nn.Module, group: ProcessGroup | None) -> dict[str, Sharded]:
    """Cut all parameters of a module, in place; return {name: `Sharded`}.

    Values are those of the group's first rank. If on the meta device, a submodule's get memory just
    before they are cut: only these, and tied ones, are whole then. Cost: a broadcast for each.
    """
    parameters = dict(module.named_parameters())
    tied = places_of(module)
    sharded = {}
    for name, submodule in module.named_modules(remove_duplicate=False):
        materialise(submodule, name)
        prefix = f"{name}." if name else ""
        for attribute, _ in submodule.named_parameters(recurse=False, remove_duplicate=False):
            first = next(first for first, names in tied.items() if prefix + attribute in names)
            if prefix + attribute == tied[first][-1]:  # all modules that show it have been here
                parameter = parameters[first]
                broadcast([parameter], group)
                places = [place(module, alias) for alias in tied[first]]
                sharded[first] = Sharded(first, parameter, places, group)
    return sharded


def broadcast(tensors: Iterable[torch.Tensor], group: ProcessGroup | None) -> None:
    """Overwrite these tensors with those of the group's first rank; all of its ranks must call."""
    for tensor in tensors:
        dist.broadcast(tensor.detach(), group=group, group_src=0)
