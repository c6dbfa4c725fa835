"""Training steps with everything sharded: `FSDP` beside PyTorch's `fully_shard`.

The same blocks as units, the same dtype, SGD: time, bytes sent, and the most bytes that tensors had
at a time, on Gloo. In the end all must have the same parameters.
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .. import fsdp
from ..fast import fsdp as fast
from ..fsdp.plan import plan_units
from ..memory import most_bytes
from ..runtime.launch import launch
from . import training
from .interleave import Contest, check_close, race
from .results import AGAIN, SPEED, Goal, Results, report, results_of
from .training import Replica, Task, add_bytes, count_bytes, gpt

ROUNDS = 24
TORCH, PLAIN, OURS = "fully_shard", "FSDP", "fast FSDP"
VARIANTS = TORCH, PLAIN, OURS
GOALS = [Goal(OURS, TORCH, 1.0), Goal(PLAIN, TORCH, 1.0)]
LEGEND = f"""\
Step: forward, backward, update with SGD. Sent: MB by a rank in a step.
Peak: MB of tensors, the shards included; scratch memory of Gloo's not.
{SPEED}"""
MODELS = {"12 × Linear(1024)": partial(training.linears, rows=64), "GPT": gpt}


def whole(replica: Replica) -> Tensor:
    """Gather all parameters, end to end."""
    if isinstance(replica.wrapped, fsdp.FSDP):
        parts = replica.wrapped.full_parameters().values()
    else:
        parts = [p.full_tensor() for p in replica.module.parameters()]
    return torch.cat([part.detach().flatten() for part in parts])


def fully_sharded(module: nn.Module, group: ProcessGroup, units: Iterable[str] = ()) -> nn.Module:
    """Wrap these submodules and the rest with `fully_shard`; by default those that `FSDP` takes."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, "cpu")
    for name in units or list(plan_units(module))[1:]:
        fully_shard(module.get_submodule(name), mesh=mesh)
    return fully_shard(module, mesh=mesh)


def make_replicas(
    make: Callable[[], Task], group: ProcessGroup, names: Iterable[str] = VARIANTS
) -> dict[str, Replica]:
    """Return {variant: replica} of `names`, the baseline first and, as a control, a second time."""
    torchs = partial(fully_sharded, group=group)
    ours = {PLAIN: partial(fsdp.FSDP, group=group), OURS: partial(fast.FSDP, group=group)}
    wraps = {TORCH: torchs, **ours, TORCH + AGAIN: torchs}
    sgd = partial(torch.optim.SGD, lr=1e-3)
    wanted = {*names, TORCH + AGAIN}
    return {name: Replica(make, wrap, sgd) for name, wrap in wraps.items() if name in wanted}


def contest(make: Callable[[], Task], names: Iterable[str], group: ProcessGroup) -> Contest:
    replicas = make_replicas(make, group, names)

    def found() -> int:
        right = whole(replicas[TORCH])
        for name, replica in replicas.items():
            check_close(name, whole(replica), right, 1e-5)
        return right.nbytes

    return Contest({name: replica.step for name, replica in replicas.items()}, found=found)


def count(make: Callable[[], Task], names: Iterable[str]) -> dict[str, tuple[float, int]]:
    """Return {variant: (bytes that this rank sends in a step, peak bytes of its tensors)}."""
    return count_bytes(make_replicas(make, dist.group.WORLD, names), peak_bytes)


def peak_bytes(replica: Replica) -> int:
    known = [getattr(p, "_local_tensor", p) for p in replica.module.parameters()]
    return most_bytes(replica.step, known)


def measure(models: dict = MODELS, rounds: int = ROUNDS, names: Iterable[str] = VARIANTS):
    """Time the steps of the variants on each model, on two ranks of Gloo. rounds: turns of each."""
    found = Results(legend=LEGEND, time="Step")
    for model, make in models.items():
        seconds, sizes = race(partial(contest, make, names), rounds, world_size=2)
        counted = launch(count, make, names, world_size=2, backend="gloo")
        results = results_of(model, seconds, 2, sizes[0])
        for result in results:
            add_bytes(result, list(counted), "Peak")
        found += results
    return found


def main(name: str):
    report(name, measure(), GOALS)
