"""What PyTorch's distributed package can do, one function a case: `CASES` by name.

Each is called on every rank, with the same seed, and returns plain data: `CALLS` in worlds of any
size, the others in one of 4. They know nothing of ddpkit, so that plain Gloo can be asked the same.
"""

import contextlib
import tempfile
import warnings
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

CASES = {}
WORLD = 4
NOT_ON_NCCL = {
    "barriers": "monitored_barrier is Gloo's",
    "isend_and_irecv_with_tags": "it takes messages in their order, whatever their tags",
    "recv_from_any_rank": "it receives from a rank that is named",
    "split_group": "what Gloo says is a sentence",
    "distributed_sampler": "nothing is said",
}

# torch 2.13's names; they don't exist in 2.11.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def case(function):
    CASES[function.__name__] = function
    return function


def results(cases) -> dict:
    """What each of these returns."""
    warnings.simplefilter("ignore")  # of names that are old in one torch, unknown in another
    found = {}
    for name in cases:
        found[name] = CASES[name]()
        dist.barrier()
    return found


def here():
    """Where tensors are made: "cpu", unless torch.set_default_device was asked for another."""
    return torch.get_default_device().type


def mine(*shape, dtype=torch.float32):
    """Other numbers on every rank; the order of a sum shows in its last bits."""
    generator = torch.Generator("cpu").manual_seed(dist.get_rank())
    return torch.randn(shape, generator=generator, device="cpu").mul(100).to(dtype).to(here())


@contextlib.contextmanager
def alike():
    """Draw the same numbers for all, on the CPU: a GPU draws others from the same seed."""
    torch.manual_seed(0)
    with torch.device("cpu"):
        yield


def left():
    return (dist.get_rank() - 1) % dist.get_world_size()


def right():
    return (dist.get_rank() + 1) % dist.get_world_size()


def rows():
    """A row for each rank: what it shall get, if rows are given out."""
    return mine(dist.get_world_size(), 6)


def only_on_1(rows):
    return list(rows) if dist.get_rank() == 1 else None


def listed(tensors):
    return [tensor.tolist() for tensor in tensors]


# Collectives: what is in `x`, a row for each rank, when they are done

FILLED = {
    "broadcast": lambda x: dist.broadcast(x, src=1),
    "all_gather": lambda x: dist.all_gather(list(x), mine(6)),
    "all_gather_into_tensor": lambda x: dist.all_gather_into_tensor(x.view(-1), mine(6)),
    "all_gather_single": lambda x: all_gather_single(x.view(-1), mine(6)),
    "gather": lambda x: dist.gather(mine(6), only_on_1(x), dst=1),
    "scatter": lambda x: dist.scatter(x[0], only_on_1(rows()), src=1),
    "reduce_scatter": lambda x: dist.reduce_scatter(x[0], list(rows())),
    "reduce_scatter_tensor": lambda x: dist.reduce_scatter_tensor(x[0], rows().view(-1)),
    "reduce_scatter_single": lambda x: reduce_scatter_single(x[0], rows().view(-1)),
    "all_to_all": lambda x: dist.all_to_all(list(x), list(rows())),
    "all_to_all_single": lambda x: dist.all_to_all_single(x, rows()),
    "all_reduce_async": lambda x: dist.all_reduce(x, async_op=True).wait(),
    "all_reduce_coalesced": lambda x: dist.all_reduce_coalesced(list(x)),
}
if torch.__version__ < "2.12":  # Gloo has none
    del FILLED["all_to_all"]
OBJECTS = {  # in place of x, a list of an object for each rank
    "all_gather_object": lambda x: dist.all_gather_object(x, {"long": "x" * dist.get_rank()}),
    "gather_object": lambda x: dist.gather_object(dist.get_rank(), only_on_1(x), dst=1),
    "broadcast_object_list": lambda x: dist.broadcast_object_list(x, src=1),
    "scatter_object_list": lambda x: dist.scatter_object_list(x, [{"for": y} for y in x], src=0),
}


def filled(name):
    x = rows()
    FILLED[name](x)
    return x.tolist()


def filled_with_objects(name):
    x = [f"from {dist.get_rank()}, {place}" for place in range(dist.get_world_size())]
    OBJECTS[name](x)
    return x


CASES |= {name: partial(filled, name) for name in FILLED}
CASES |= {name: partial(filled_with_objects, name) for name in OBJECTS}


@case
def all_reduce():
    found = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
        for dtype in (torch.float32, torch.int64, torch.float16, torch.bfloat16, torch.uint8):
            found.append(mine(6, dtype=dtype))
            dist.all_reduce(found[-1], op)
    return listed(found)


@case
def reduce():
    x = mine(6)
    dist.reduce(x, dst=1)
    return x.tolist() if dist.get_rank() == 1 else None


@case
def all_reduce_by_its_future():
    work = dist.all_reduce(mine(5), async_op=True)
    return work.get_future().then(lambda done: done.value()[0] / 2).wait().tolist()


@case
def two_at_once():
    x = mine(6)
    works = [dist.all_reduce(half, async_op=True) for half in x.chunk(2)]
    waited = [work.wait() for work in reversed(works)]
    return x.tolist(), waited, [work.is_completed() for work in works]


@case
def all_to_all_single_uneven():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sizes = list(range(1, world_size + 1))
    x = torch.empty(world_size * (rank + 1))
    dist.all_to_all_single(x, mine(sum(sizes)), [rank + 1] * world_size, sizes)
    return x.tolist()


@case
def barriers():
    dist.barrier()
    dist.monitored_barrier()
    return dist.get_backend()


@case
def coalescing_manager():
    x = rows()
    with dist._coalescing_manager():
        dist.all_reduce(x[0])
        dist.all_reduce(x[1])
    y, z = rows(), mine(2)
    with dist._coalescing_manager():
        all_gather_single(y.view(-1), mine(6))
        all_gather_single(x.view(-1), mine(6) + 1)
    with dist._coalescing_manager():
        reduce_scatter_single(z[:1], rows()[:, 0].contiguous())
        reduce_scatter_single(z[1:], rows()[:, 1].contiguous())
    return listed([x, y, z])


@case
def functional_collectives():
    import torch.distributed._functional_collectives as functional

    group = dist.group.WORLD
    found = [functional.all_reduce(mine(4), "sum", group)]
    found.append(functional.broadcast(mine(4), 1, group))
    found.append(functional.all_to_all_single(rows(), None, None, group))
    found.append(functional.all_gather_tensor(mine(4), 0, group))
    found.append(functional.reduce_scatter_tensor(rows(), "sum", 0, group))
    return listed(found)


@case
def collectives_with_gradients():
    x = mine(4).requires_grad_()
    y = torch.distributed.nn.all_reduce(x * 2)
    (y * mine(4)).sum().backward()
    return y.tolist(), x.grad.tolist()


# Point to point


@case
def send_and_recv():
    x = torch.empty(3)
    if dist.get_rank() == 0:
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
        return dist.send(mine(2), 0)
    found = torch.empty(dist.get_world_size() - 1, 2)
    return sorted((dist.recv(x), x.tolist()) for x in found)


@case
def batch_isend_irecv():
    x = torch.empty(3)
    batch = [dist.P2POp(dist.isend, mine(3), right()), dist.P2POp(dist.irecv, x, left())]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    return x.tolist()


@case
def send_object_list():
    found = [None, None]
    if dist.get_rank() == 0:
        dist.send_object_list([1, "two"], dst=1)
    elif dist.get_rank() == 1:
        dist.recv_object_list(found, src=0)
    return found


# Groups


def sum_in(group):
    x = mine(2)
    dist.all_reduce(x, group=group)
    return x.tolist()


@case
def destroy_a_group():
    group = dist.new_group()
    dist.barrier(group)
    dist.destroy_process_group(group)
    return sum_in(None)


@case
def a_group_of_some():
    group = dist.new_group([0, 1])
    return sum_in(group) if dist.get_rank() < 2 else None


CALLS = list(CASES)  # the rest takes a world of 4


@case
def new_group():
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[dist.get_rank() % 2]
    ranks = dist.get_process_group_ranks(group)
    return sum_in(group), ranks, dist.get_rank(group), dist.get_group_rank(group, ranks[1])


@case
def new_subgroups():
    return sum_in(dist.new_subgroups(2)[0])


@case
def new_subgroups_by_enumeration():
    return sum_in(dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])[0])


@case
def split_group():
    try:
        return sum_in(dist.split_group(split_ranks=[[0, 2], [1, 3]]))
    except RuntimeError as error:
        return str(error)


# Meshes and what is built on them


@case
def device_mesh():
    mesh = init_device_mesh(here(), (WORLD,))
    return sum_in(mesh.get_group()), mesh.get_local_rank(), mesh.get_group().size()


def grid():
    return init_device_mesh(here(), (2, 2), mesh_dim_names=("dp", "tp"))


@case
def device_mesh_of_two_dimensions():
    mesh = grid()
    return [sum_in(mesh[name].get_group()) for name in ("dp", "tp")], mesh.get_coordinate()


@case
def distributed_tensor():
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = grid()["tp"]
    with alike():
        first, second = torch.randn(4, 6), torch.randn(6, 2)
    x = distribute_tensor(first.to(here()), mesh, [Shard(0)])
    y = x.redistribute(mesh, [Shard(1)])
    z = y @ distribute_tensor(second.to(here()), mesh, [Shard(0)])
    return listed(each.to_local() for each in (x, y, z.redistribute(mesh, [Replicate()])))


def mlp():
    with alike():  # where here() is "cpu"
        module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    return module.to(here())


def gradients(module):
    found = [parameter.grad for parameter in module.parameters()]
    return listed(x.to_local() if hasattr(x, "to_local") else x for x in found)


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


def trained_whole(module):
    return train(module), listed(p.full_tensor() for p in module.parameters())


def sharded(module, mesh):
    from torch.distributed.fsdp import fully_shard  # which takes a second

    return fully_shard(module, mesh=mesh)


@case
def fully_shard():
    module, mesh = mlp(), init_device_mesh(here(), (WORLD,))
    sharded(module[0], mesh)
    return trained_whole(sharded(module, mesh))


@case
def hybrid_shard():
    return trained_whole(sharded(mlp(), grid()))


def split_mlp(mesh):
    from torch.distributed.tensor import parallel

    plan = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
    return parallel.parallelize_module(mlp(), mesh, plan)


@case
def tensor_parallel():
    module = split_mlp(grid()["tp"])
    y = module(torch.ones(3, 8))
    y.square().mean().backward()
    return y.tolist(), gradients(module)


@case
def sequence_parallel():
    from torch.distributed.tensor import Shard, parallel

    with alike():
        norm, up, down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
    module = nn.Sequential(norm, up, nn.ReLU(), down).to(here())
    plan = {
        "": parallel.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Shard(1)),
        "0": parallel.SequenceParallel(),
        "1": parallel.ColwiseParallel(input_layouts=Shard(1)),
        "3": parallel.RowwiseParallel(output_layouts=Shard(1)),
    }
    parallel.parallelize_module(module, grid()["tp"], plan)
    y = module(torch.ones(2, 3, 8))
    y.square().mean().backward()
    return y.tolist(), gradients(module)


# Training


@case
def distributed_data_parallel():
    module = nn.parallel.DistributedDataParallel(mlp())
    return train(module), gradients(module)


@case
def a_compiled_ddp():
    """The compiler meets the calls of DDP's forward."""
    module = nn.parallel.DistributedDataParallel(mlp())
    return train(torch.compile(module, backend="eager")), gradients(module)


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
    from torch.distributed.optim import ZeroRedundancyOptimizer

    module = nn.parallel.DistributedDataParallel(mlp())
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=0.01)
    module(mine(3, 8) / 100).square().mean().backward()
    optimizer.step()
    return [parameter.tolist() for parameter in module.parameters()]


def schedule(kind, stages_per_rank=1):
    from torch.distributed import pipelining

    rank, world_size = dist.get_rank(), dist.get_world_size()
    with alike():
        layers = [nn.Linear(4, 4) for _ in range(world_size * stages_per_rank)]
    layers = [layer.to(here()) for layer in layers]
    stages = []
    for number in range(rank, len(layers), world_size):
        device = torch.get_default_device()
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


for kind, stages in (("ScheduleGPipe", 1), ("Schedule1F1B", 1), ("ScheduleInterleaved1F1B", 2)):
    CASES[kind] = partial(schedule, kind, stages)


@case
def distributed_checkpoint():
    import torch.distributed.checkpoint as checkpoint

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, src=0)
    checkpoint.save({"x": torch.arange(4.0), "step": 3}, checkpoint_id=folder[0])
    loaded = {"x": torch.zeros(4), "step": 0}
    checkpoint.load(loaded, checkpoint_id=folder[0])
    return loaded["x"].tolist(), loaded["step"]


@case
def distributed_sampler():
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    data = TensorDataset(torch.arange(10))
    sampler = DistributedSampler(data, seed=3)
    return [batch.tolist() for (batch,) in DataLoader(data, batch_size=2, sampler=sampler)]
