"""Train on workers that ask a server for weights, by send and recv, as in Li et al. 2014."""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

GRADIENT, WEIGHTS = 1, 2  # tags
STEPS, SIZE = 5, 8
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
seconds = int(sys.argv[1]) if sys.argv[1:] else 600
dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))


def serve():
    weights = torch.zeros(SIZE)
    for _ in range(STEPS * (world_size - 1)):
        gradient = torch.empty(SIZE)
        worker = dist.recv(gradient, tag=GRADIENT)  # from whoever comes first
        weights -= 0.1 * gradient
        dist.send(weights, dst=worker, tag=WEIGHTS)
    return weights


def work():
    weights = torch.zeros(SIZE)
    torch.manual_seed(rank)
    for _ in range(STEPS):
        batch = torch.randn(4, SIZE)
        gradient = torch.ones(SIZE) + 0 * batch.mean(0) * weights
        dist.send(gradient, dst=0, tag=GRADIENT)
        dist.recv(weights, src=0, tag=WEIGHTS)
    return weights


weights = serve() if rank == 0 else work()
if rank == 0:
    print(f"rank {rank} ends with {weights.sum().item():.4f}")
dist.barrier()
dist.destroy_process_group()
