"""Experts across ranks: deal them out, average and clip gradients, gather all for a checkpoint.

W ranks, e of which share the experts; each has tokens of its own. What isn't an expert is on all W
ranks alike. An expert is on W/e ranks, its replicas: the groups of a mesh of (data, experts).

    mesh = init_device_mesh("cpu", (W // e, e), mesh_dim_names=("data", "experts"))
    share_experts(model, mesh["experts"].get_group())
    loss.backward()                            # W · this rank's part of the mean over all tokens
    average_gradients(model, mesh["data"].get_group())
    clip_grad_norm(count_copies(model), 1.0)   # ddpkit.tensor_parallel's
    optimizer.step()
    balance(model, 0.001)

Each expert may be tensor-parallel besides: cut its Linears among a group of ranks that have the
same tokens. Then pass as `everyone` the ranks with this rank's position in these groups, and clip
by the product of `count_copies(model, everyone)` and `tensor_parallel.count_copies`.

Notebook 13.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ..tools.checks import check_in_group, misuse
from .layer import MixtureOfExperts
from .router import move_bias


def layers(module: nn.Module) -> Iterator[MixtureOfExperts]:
    """Yield the `MixtureOfExperts` layers in a module, in the order of `module.modules()`."""
    for layer in module.modules():
        if isinstance(layer, MixtureOfExperts):
            yield layer


def share_experts(
    module: nn.Module, group: ProcessGroup | None = None, everyone: ProcessGroup | None = None
) -> None:
    """Drop the experts of other ranks, in place: of E on e ranks, rank r keeps E/e.

    module: alike on all ranks, which isn't checked. group: the e ranks that share the experts
    (None: all). everyone: the ranks whose tokens the balance loss counts (None: all). ValueError: e
    doesn't divide E, or this rank isn't in `group`.
    """
    check_in_group("share_experts", group)
    ranks = dist.get_world_size(group)
    for layer in layers(module):
        if layer.number % ranks != 0:
            got = f"{layer.number} experts for {ranks} ranks"
            raise misuse("share_experts", got, "a multiple", "Use fewer ranks, or more experts.")
        # Rank r keeps experts r·E/e and the next, under the numbers that they had.
        count = layer.number // ranks
        first = dist.get_rank(group) * count
        mine = nn.ModuleDict()
        for number in range(first, first + count):
            mine[str(number)] = layer.experts[str(number)]
        layer.experts = mine
        layer.ranks = ranks
        layer.group = group
        layer.everyone = everyone
        layer.copies = dist.get_world_size(everyone)


def count_copies(
    module: nn.Module, everyone: ProcessGroup | None = None
) -> dict[nn.Parameter, int]:
    """Return {parameter: the number of ranks that hold it}, for `tensor_parallel.clip_grad_norm`.

    everyone: the W ranks to count (None: all). An expert is on W/e of them, all else on W.
    """
    world_size = dist.get_world_size(everyone)
    # All but the experts are on every rank.
    copies = dict.fromkeys(module.parameters(), world_size)
    for layer in layers(module):
        for parameter in layer.experts.parameters():
            copies[parameter] = world_size // layer.ranks
    return copies


def average_gradients(
    module: nn.Module, replicas: ProcessGroup | None, everyone: ProcessGroup | None = None
) -> None:
    """Make every gradient that of the mean of all W ranks' losses, in place.

    replicas: the W/e ranks that hold the same experts as this one. everyone: all W (None). An
    expert computes the tokens of e ranks, so its gradient already sums over their losses. It is
    summed over its replicas, and divided by W like every other. A trained parameter without a
    gradient gets zeros, since ranks must make the same calls.

    Cost per rank: an all-reduce for each parameter, an expert's over W/e ranks, others' over W.
    """
    world_size = dist.get_world_size(everyone)
    # Experts are reduced in another group than the rest, and divided by the same number.
    experts = set()
    for layer in layers(module):
        experts.update(layer.experts.parameters())
    for parameter in module.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        group = replicas if parameter in experts else everyone
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= world_size  # not by the size of `group`


def balance_losses(module: nn.Module) -> Tensor:
    """Return the sum of all layers' last `router.balance_loss`, weighted, to add to the loss."""
    losses = [layer.balance_loss for layer in layers(module)]
    return sum(losses, torch.zeros(()))


def balance(module: nn.Module, speed: float, everyone: ProcessGroup | None = None) -> None:
    """Level the use of experts, after each step: move each router's biases by `speed`, in place.

    An expert that got more tokens than average since the last call, from all ranks of `everyone`,
    has its bias lowered, others raised. Then the counts, `load`, are set to 0.
    Cost per rank: E numbers all-reduced for each layer.
    """
    for layer in layers(module):
        # Summed over the ranks first: the routers must go on alike.
        move_bias(layer.router.bias, layer.load, speed, everyone)
        layer.load.zero_()


def whole_state(module: nn.Module, group: ProcessGroup | None = None) -> dict[str, Tensor]:
    """Return the state_dict of the model with all experts, on every rank of `group`.

    group: the ranks that share the experts (None: all). Load it before `share_experts`, into a
    module with all experts, on any number of ranks.
    Cost per rank: an all_gather_object of its state_dict, so memory for those of all e ranks.
    """
    # Every rank's state, then their union: a rank lacks the experts of the others.
    states: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(states, module.state_dict(), group=group)
    whole = {}
    for state in states:  # experts have their numbers in their names; the rest is alike
        whole |= state
    return whole
