"""What PyTorch's distributed package can do, one function a case: `CASES` by name.

Each is called on every rank of a world of 4, with the same seed, and returns plain data. They know
nothing of ddpkit, so that plain Gloo can be asked the same.
"""

import tempfile
import warnings

import torch
import torch.distributed as dist
from torch import nn

CASES = {}
WORLD = 4


def case(function):
    CASES[function.__name__] = function
    return function


def mine(*shape, dtype=torch.float32):
    """Other numbers on every rank."""
    count = torch.Size(shape).numel()
    return (torch.arange(count).view(shape) + 10 * dist.get_rank()).to(dtype)


def left():
    return (dist.get_rank() - 1) % dist.get_world_size()


def right():
    return (dist.get_rank() + 1) % dist.get_world_size()


def listed(tensors):
    return [tensor.tolist() for tensor in tensors]


# Collectives


@case
def all_reduce():
    found = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
        x = mine(3)
        dist.all_reduce(x, op)
        found.append(x.tolist())
    return found


@case
def all_reduce_of_other_dtypes():
    found = []
    for dtype in (torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.uint8):
        x = mine(3, dtype=dtype)
        dist.all_reduce(x)
        found.append(x.tolist())
    return found


@case
def all_reduce_async():
    x = mine(5)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    return x.tolist(), work.is_completed()


@case
def all_reduce_by_its_future():
    work = dist.all_reduce(mine(5), async_op=True)
    return work.get_future().then(lambda done: done.value()[0] / WORLD).wait().tolist()


@case
def broadcast():
    x = mine(4)
    dist.broadcast(x, src=2)
    return x.tolist()


@case
def reduce():
    x = mine(4)
    dist.reduce(x, dst=1)
    return x.tolist() if dist.get_rank() == 1 else None


@case
def all_gather():
    found = [torch.empty(2, 2) for _ in range(WORLD)]
    dist.all_gather(found, mine(2, 2))
    return listed(found)


@case
def all_gather_into_tensor():
    found = torch.empty(WORLD * 3)
    dist.all_gather_into_tensor(found, mine(3))
    return found.tolist()


@case
def gather():
    found = [torch.empty(3) for _ in range(WORLD)] if dist.get_rank() == 3 else None
    dist.gather(mine(3), found, dst=3)
    return listed(found) if found else None


@case
def scatter():
    parts = list(mine(WORLD, 2)) if dist.get_rank() == 1 else None
    x = torch.empty(2)
    dist.scatter(x, parts, src=1)
    return x.tolist()


@case
def reduce_scatter():
    x = torch.empty(2)
    dist.reduce_scatter(x, list(mine(WORLD, 2)))
    return x.tolist()


@case
def reduce_scatter_tensor():
    x = torch.empty(2)
    dist.reduce_scatter_tensor(x, mine(WORLD * 2))
    return x.tolist()


@case
def all_to_all():
    found = [torch.empty(2) for _ in range(WORLD)]
    dist.all_to_all(found, list(mine(WORLD, 2)))
    return listed(found)


@case
def all_to_all_single():
    x = torch.empty(WORLD)
    dist.all_to_all_single(x, mine(WORLD))
    return x.tolist()


@case
def all_to_all_single_uneven():
    rank = dist.get_rank()
    x = torch.empty(WORLD * (rank + 1))
    sizes = list(range(1, WORLD + 1))
    dist.all_to_all_single(x, mine(sum(sizes)), [rank + 1] * WORLD, sizes)
    return x.tolist()


@case
def barriers():
    dist.barrier()
    dist.monitored_barrier()
    return dist.get_backend()


@case
def coalescing_manager():
    x, y = mine(2), mine(3)
    with dist._coalescing_manager():
        dist.all_reduce(x)
        dist.all_reduce(y)
    return listed([x, y])


@case
def all_reduce_coalesced():
    tensors = [mine(2), mine(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        dist.all_reduce_coalesced(tensors)
    return listed(tensors)


@case
def functional_collectives():
    import torch.distributed._functional_collectives as functional

    group, found = dist.group.WORLD, []
    found.append(functional.all_reduce(mine(4), "sum", group))
    found.append(functional.broadcast(mine(4), 1, group))
    found.append(functional.all_to_all_single(mine(4), None, None, group))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        found.append(functional.all_gather_tensor(mine(4), 0, group))
        found.append(functional.reduce_scatter_tensor(mine(4), "sum", 0, group))
    return listed(found)


@case
def collectives_with_gradients():
    x = mine(4).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        y = torch.distributed.nn.all_reduce(x * 2)
    (y * mine(4)).sum().backward()
    return y.tolist(), x.grad.tolist()


# Point to point


@case
def send_and_recv():
    x = torch.empty(3)
    if dist.get_rank() % 2 == 0:
        dist.send(mine(3), right())
        dist.recv(x, left())
    else:
        dist.recv(x, left())
        dist.send(mine(3), right())
    return x.tolist()


@case
def isend_and_irecv_with_tags():
    x, y = torch.empty(2, 3)
    works = [dist.isend(mine(3) + tag, right(), tag=tag) for tag in (1, 2)]
    works += [dist.irecv(y, left(), tag=2), dist.irecv(x, left(), tag=1)]
    for work in works:
        work.wait()
    return listed([x, y])


@case
def recv_from_any_rank():
    if dist.get_rank():
        dist.send(mine(2), 0)
        return None
    found = []
    for _ in range(WORLD - 1):
        x = torch.empty(2)
        source = dist.recv(x)
        found.append((source, x.tolist()))
    return sorted(found)


@case
def batch_isend_irecv():
    x = torch.empty(3)
    batch = [dist.P2POp(dist.isend, mine(3), right()), dist.P2POp(dist.irecv, x, left())]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    return x.tolist()


# Objects


@case
def all_gather_object():
    found = [None] * WORLD
    dist.all_gather_object(found, {"rank": dist.get_rank(), "long": "x" * dist.get_rank()})
    return found


@case
def gather_object():
    found = [None] * WORLD if dist.get_rank() == 0 else None
    dist.gather_object(dist.get_rank(), found)
    return found


@case
def broadcast_object_list():
    found = [dist.get_rank(), "a", {"b": 1}]
    dist.broadcast_object_list(found, src=3)
    return found


@case
def scatter_object_list():
    found = [None]
    dist.scatter_object_list(found, [{"for": r} for r in range(WORLD)], src=0)
    return found


@case
def send_object_list():
    found = [None, None]
    if dist.get_rank() == 0:
        dist.send_object_list([1, "two"], dst=1)
    elif dist.get_rank() == 1:
        dist.recv_object_list(found, src=0)
    return found


# Groups


@case
def new_group():
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[dist.get_rank() % 2]
    x = mine(2)
    dist.all_reduce(x, group=group)
    ranks = dist.get_process_group_ranks(group)
    return x.tolist(), ranks, dist.get_rank(group), dist.get_group_rank(group, ranks[1])


@case
def new_subgroups():
    group, _ = dist.new_subgroups(2)
    x = mine(2)
    dist.all_reduce(x, group=group)
    return x.tolist()


@case
def new_subgroups_by_enumeration():
    group, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    x = mine(2)
    dist.all_reduce(x, group=group)
    return x.tolist()


@case
def split_group():
    try:
        dist.split_group(split_ranks=[[0, 1], [2, 3]])
    except RuntimeError as error:
        return str(error)
    return "split"


@case
def destroy_a_group():
    group = dist.new_group([0, 1, 2, 3])
    dist.barrier(group)
    dist.destroy_process_group(group)
    x = mine(2)
    dist.all_reduce(x)
    return x.tolist()


# Meshes and what is built on them


@case
def device_mesh():
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (WORLD,))
    x = mine(2)
    dist.all_reduce(x, group=mesh.get_group())
    return x.tolist(), mesh.get_local_rank(), mesh.get_group().size()


def grid():
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


@case
def device_mesh_of_two_dimensions():
    mesh, found = grid(), []
    for name in ("dp", "tp"):
        x = mine(2)
        dist.all_reduce(x, group=mesh[name].get_group())
        found.append(x.tolist())
    return found, mesh.get_coordinate()


@case
def distributed_tensor():
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = grid()["tp"]
    torch.manual_seed(0)
    x = distribute_tensor(torch.randn(4, 6), mesh, [Shard(0)])
    y = x.redistribute(mesh, [Shard(1)])
    z = (y @ distribute_tensor(torch.randn(6, 2), mesh, [Shard(0)])).redistribute(
        mesh, [Replicate()]
    )
    return x.to_local().tolist(), y.to_local().tolist(), z.to_local().tolist()


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def gradients(module):
    found = []
    for parameter in module.parameters():
        gradient = parameter.grad
        found.append(getattr(gradient, "to_local", lambda g=gradient: g)().tolist())
    return found


def train(module, steps=2):
    """Two steps of SGD on other data on each rank; the losses."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = module(mine(3, 8) / 100).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@case
def fully_shard():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module, mesh = mlp(), init_device_mesh("cpu", (WORLD,))
    fully_shard(module[0], mesh=mesh)
    fully_shard(module, mesh=mesh)
    return train(module), [p.full_tensor().tolist() for p in module.parameters()]


@case
def hybrid_shard():
    from torch.distributed.fsdp import fully_shard

    module = mlp()
    fully_shard(module, mesh=grid())
    return train(module), [p.full_tensor().tolist() for p in module.parameters()]


@case
def tensor_parallel():
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    module = parallelize_module(mlp(), grid()["tp"], plan)
    y = module(torch.ones(3, 8))
    y.square().mean().backward()
    return y.tolist(), gradients(module)


@case
def sequence_parallel():
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    norm, up, down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
    module = nn.Sequential(norm, up, nn.ReLU(), down)
    plan = {
        "": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Shard(1)),
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "3": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(module, grid()["tp"], plan)
    y = module(torch.ones(2, 3, 8))
    y.square().mean().backward()
    return y.tolist(), gradients(module)


# Training


@case
def distributed_data_parallel():
    module = nn.parallel.DistributedDataParallel(mlp())
    return train(module), gradients(module)


@case
def ddp_with_unused_parameters():
    module = mlp()
    module.unused = nn.Linear(2, 2)
    module.forward = nn.Sequential(*list(module)[:3]).forward
    wrapped = nn.parallel.DistributedDataParallel(module, find_unused_parameters=True)
    return train(wrapped)


@case
def ddp_with_a_communication_hook():
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    module = nn.parallel.DistributedDataParallel(mlp())
    module.register_comm_hook(None, fp16_compress_hook)
    return train(module), gradients(module)


@case
def join_of_uneven_inputs():
    module = nn.parallel.DistributedDataParallel(mlp())
    with module.join():
        return train(module, steps=1 + dist.get_rank() % 2)


@case
def zero_redundancy_optimizer():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer

    module = nn.parallel.DistributedDataParallel(mlp())
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=0.01)
    module(mine(3, 8) / 100).square().mean().backward()
    optimizer.step()
    return [parameter.tolist() for parameter in module.parameters()]


def schedule(kind, stages_per_rank=1):
    from torch.distributed import pipelining

    torch.manual_seed(0)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    layers = [nn.Linear(4, 4) for _ in range(world_size * stages_per_rank)]
    stages = []
    for number in range(rank, len(layers), world_size):
        device = torch.device("cpu")
        stages.append(pipelining.PipelineStage(layers[number], number, len(layers), device))
    one = stages[0] if stages_per_rank == 1 else stages
    plan = getattr(pipelining, kind)(one, 4, loss_fn=lambda y, t: (y - t).square().mean())
    inputs, losses = torch.arange(32.0).view(8, 4) / 32, []
    if rank == 0:
        plan.step(inputs)
    elif rank == world_size - 1:
        plan.step(target=inputs, losses=losses)
    else:
        plan.step()
    return listed(losses), [gradients(layers[n]) for n in range(rank, len(layers), world_size)]


@case
def gpipe():
    return schedule("ScheduleGPipe")


@case
def one_forward_one_backward():
    return schedule("Schedule1F1B")


@case
def interleaved_1f1b():
    return schedule("ScheduleInterleaved1F1B", stages_per_rank=2)


@case
def distributed_checkpoint():
    import torch.distributed.checkpoint as checkpoint

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, src=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {"x": torch.arange(4.0), "step": 3}
        checkpoint.save(state, checkpoint_id=folder[0])
        loaded = {"x": torch.zeros(4), "step": 0}
        checkpoint.load(loaded, checkpoint_id=folder[0])
    return loaded["x"].tolist(), loaded["step"]


@case
def distributed_sampler():
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    data = TensorDataset(torch.arange(10))
    sampler = DistributedSampler(data, seed=3)
    return [batch.tolist() for (batch,) in DataLoader(data, batch_size=2, sampler=sampler)]
