"""Train while a thread writes checkpoints through a group of its own, as DCP's async_save."""

import os
import queue
import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

timeout = timedelta(seconds=int(sys.argv[1]) if sys.argv[1:] else 600)
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", timeout=timeout)


class AsyncCheckpointer:
    """Gathers what each rank hands in on rank 0, in a thread."""

    def __init__(self):
        self.group = dist.new_group(backend="gloo", timeout=timeout)
        self.jobs, self.lock = queue.Queue(), threading.Lock()
        self.thread = threading.Thread(target=self.work)
        self.thread.start()

    def save(self, step, state):
        with self.lock:
            copy = {name: value.clone() for name, value in state.items()}
        self.jobs.put((step, copy))

    def work(self):
        while (job := self.jobs.get()) is not None:
            step, state = job
            with self.lock:
                pieces = [None] * world_size if rank == 0 else None
            dist.gather_object(state, pieces, group=self.group)
            if rank == 0:
                torch.save(pieces, f"step_{step}.pt")
                print(f"saved step {step}: {sum(len(piece) for piece in pieces)} tensors")

    def close(self):
        self.jobs.put(None)
        self.thread.join()


torch.manual_seed(rank)
weight = torch.zeros(16)
checkpointer = AsyncCheckpointer()
for step in range(8):
    gradient = torch.randn(16)
    dist.all_reduce(gradient)
    weight -= 0.1 * gradient
    if step % 2 == 1:
        checkpointer.save(step, {"weight": weight, "gradient": gradient})
checkpointer.close()
print(f"rank {rank}: {weight.sum().item():.6f}")
dist.destroy_process_group()
