"""Checkpoints of a sharded model, which any number of ranks can load, or a plain module.

    save(folder, model, optimizer)      every rank writes its shards
    load(folder, model, optimizer)      on any number of ranks, or into a plain module

The format is PyTorch's (`torch.distributed.checkpoint`): each shard is handed over as a DTensor,
which says which rows of the whole it has. Notebook 12.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..tools.checks import check_all_call, check_same_shapes
from .wrapper import FSDP


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return {name: parameter}, by a plain module's names; FSDP's are the shards, after `drop`."""
    module = model.module if isinstance(model, FSDP) else model
    return dict(module.named_parameters())


def checkpoint_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict:
    """Return what a checkpoint holds, tensors as views, into which `load` reads.

    {"parameters": {name: value}, "buffers": {name: value}}; of an optimizer also "optimizer":
    {parameter's name: {key: value}} and "options", a list of dicts. Values of which ranks have
    shards are DTensors. FSDP's whole weights are dropped first.
    """
    if isinstance(model, FSDP):
        model.drop()  # the modules show the shards
    whole = shard_viewer(model)
    parameters = parameters_of(model)
    module = model.module if isinstance(model, FSDP) else model
    state = {"parameters": {}}
    for name, parameter in parameters.items():
        state["parameters"][name] = whole(name, parameter.detach())
    state["buffers"] = dict(module.named_buffers())
    if optimizer is None:
        return state
    # By name, as the parameters: numbers of a parameter group are another on other ranks.
    names = {parameter: name for name, parameter in parameters.items()}
    state["optimizer"] = {}
    for parameter, kept in optimizer.state.items():
        name = names[parameter]
        state["optimizer"][name] = {}
        for key, value in kept.items():
            # Moments are shards as their parameter is; a counter of steps is the same everywhere.
            if isinstance(value, Tensor) and value.shape == parameter.shape and key != "step":
                value = whole(name, value)
            state["optimizer"][name][key] = value
    state["options"] = []
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        state["options"].append(options)
    return state


def shard_viewer(model: nn.Module):
    """Return a function f(name, shard) that returns the DTensor of which the shard is a part.

    name: a parameter's. shard: this rank's rows of it, or of its moments, whose memory the DTensor
    shares. If the model is plain, f returns the tensor itself, or a view of 1 row of a scalar.
    """
    if not isinstance(model, FSDP):
        return lambda name, local: local if local.dim() else local[None]
    # A second's worth of imports, only for those who save.
    from torch.distributed.tensor import DeviceMesh, DTensor, Shard

    group = model.group or dist.group.WORLD
    shapes = model.shapes()
    device = next(model.module.parameters()).device.type
    mesh = DeviceMesh.from_group(group, device)

    def whole(name: str, local: Tensor) -> Tensor:
        shape = shapes[name] or torch.Size([1])  # a scalar is one row
        stride = torch.empty(shape, device="meta").stride()
        where = mesh, [Shard(0)]
        return DTensor.from_local(local, *where, run_check=False, shape=shape, stride=stride)

    return whole


def save(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    patience_s: float = 10.0,
) -> None:
    """Write a checkpoint: each rank its shards of parameters and optimizer state; all must call.

    Of what isn't sharded, such as buffers, one rank's is written. ValueError: no process group.
    RuntimeError: a rank calls alone (on Gloo; waits `patience_s` for the others).
    """
    import torch.distributed.checkpoint as dcp

    group = model.group if isinstance(model, FSDP) else None
    check_all_call("save", group, patience_s)
    dcp.save(checkpoint_of(model, optimizer), checkpoint_id=str(folder), process_group=group)


def load(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Read a checkpoint into an FSDP model, on any number of ranks, or into a plain module.

    All ranks of an FSDP must call. optimizer: also gets its options, such as the learning rate. If
    it has taken no step yet, its state is made first, and gradients are dropped: PyTorch fills only
    what is there, and would leave out the moments without a word (KempnerForge#115).
    ValueError: parameters have other names or shapes. CheckpointException: another part is missing.
    """
    import torch.distributed.checkpoint as dcp

    # Phase 1: what is to be filled must be there.
    sharded = isinstance(model, FSDP)
    # First the places to read into, then the reading.
    if optimizer is not None:
        make_state(optimizer)
    state = checkpoint_of(model, optimizer)
    metadata = dcp.FileSystemReader(str(folder)).read_metadata()
    check_fits(metadata.state_dict_metadata, state)
    # Phase 2: each rank reads its rows, whichever rank wrote them.
    group = model.group if sharded else None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # for a plain module
        dcp.load(state, checkpoint_id=str(folder), process_group=group, no_dist=not sharded)
    # Phase 3: options, and what isn't a tensor.
    if optimizer is not None:
        for mine, saved in zip(optimizer.param_groups, state["options"], strict=True):
            mine.update(saved)
        names = {parameter: name for name, parameter in parameters_of(model).items()}
        for parameter, kept in optimizer.state.items():
            for key, value in state["optimizer"][names[parameter]].items():
                if not isinstance(value, Tensor):  # tensors were written into
                    kept[key] = value


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer's state, if it has none, by a step at a rate of 0; drop the gradients."""
    if optimizer.state:
        return
    # A rate and a gradient of zero: weight decay also multiplies by the rate.
    before = []
    for options in optimizer.param_groups:
        lr = options["lr"]
        before.append(lr)
        options["lr"] = torch.zeros_like(lr) if torch.is_tensor(lr) else 0.0
        for parameter in options["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for options, lr in zip(optimizer.param_groups, before, strict=True):
        options["lr"] = lr


def check_fits(saved: Mapping, state: dict) -> None:
    """Raise ValueError unless `saved`, a checkpoint's metadata, has all of `state`'s parameters.

    Their names and shapes are compared, but neither buffers nor the optimizer's state.
    """
    there = {}
    for key, about in saved.items():
        kind, _, name = key.partition(".")
        if kind == "parameters":
            there[name] = tuple(about.size)
    mine = {name: tuple(value.shape) for name, value in state["parameters"].items()}
    check_same_shapes("the checkpoint", there, mine)
