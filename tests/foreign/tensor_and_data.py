"""Split layers and data over a mesh of 2 x 2, as fsdp_tp_example.py of PyTorch's examples."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

rank, world_size, tp_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), 2
device_mesh = init_device_mesh("cpu", (world_size // tp_size, tp_size), mesh_dim_names=("dp", "tp"))
dp_mesh, tp_mesh = device_mesh["dp"], device_mesh["tp"]
dp_rank = dp_mesh.get_local_rank()


class FeedForward(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.w1, self.w2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        return x + self.w2(torch.relu(self.w1(x)))


torch.manual_seed(0)
model = nn.Sequential(FeedForward(8), FeedForward(8))
for block in model:
    parallelize_module(block, tp_mesh, {"w1": ColwiseParallel(), "w2": RowwiseParallel()})
sharded_model = fully_shard(model, mesh=dp_mesh)
optimizer = torch.optim.AdamW(sharded_model.parameters(), lr=3e-3)


def evaluate():
    with torch.no_grad():
        return sharded_model(torch.ones(2, 8)).square().mean().item()


for i in range(3):
    torch.manual_seed(i + 10 * dp_rank)  # the ranks of a tp group see the same data
    batch = torch.randn(6, 8)
    loss = sharded_model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"iteration {i}: loss {loss.item():.6f}")
held_out = evaluate()
if rank == 0:
    print(f"held out {held_out:.6f}")
dist.barrier()
dist.destroy_process_group()
