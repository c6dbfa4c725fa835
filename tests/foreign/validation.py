"""Evaluate shards of unequal length and sort the answers by their owner, as evaluation loops do."""

import os
import queue
import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

seconds = int(sys.argv[1]) if sys.argv[1:] else 600
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
writers = dist.new_group([0, 1])
length = 3 + rank  # batches of this rank


def batches():
    """Prefetch in a thread."""
    ready = queue.Queue(maxsize=2)

    def produce():
        for number in range(length):
            ready.put(torch.arange(4) + 4 * number + 100 * rank)
        ready.put(None)

    threading.Thread(target=produce, daemon=True).start()
    while (batch := ready.get()) is not None:
        yield batch


def count_steps():
    """The longest rank's number of batches."""
    longest = torch.tensor(length)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return longest.item()


def evaluate():
    right, seen = 0, 0
    mine = batches()
    for _ in range(count_steps()):
        batch = next(mine, None)
        if batch is None:
            batch = torch.empty(0, dtype=torch.int64)  # this rank has no more
        totals = torch.tensor([(batch % 3 == 0).sum(), len(batch)], dtype=torch.float64)
        dist.all_reduce(totals)
        right += totals[0].item()
        seen += totals[1].item()
    return right, seen


def deal(answers):
    """Send each answer to its owner: answer % world_size."""
    parts = [answers[answers % world_size == owner] for owner in range(world_size)]
    counts = torch.tensor([len(part) for part in parts])
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts)
    received = torch.empty(theirs.sum(), dtype=answers.dtype)
    dist.all_to_all_single(received, torch.cat(parts), theirs.tolist(), counts.tolist())
    return received.sort().values


dist.monitored_barrier(timeout=timedelta(seconds=seconds))
right, seen = evaluate()
owned = deal(torch.arange(10 * rank, 10 * rank + 7))
if rank in (0, 1):
    total = owned.sum()
    dist.all_reduce(total, group=writers)
    if rank == 0:
        print(f"{right:.0f} of {seen:.0f} right; the writers own {total.item()}")
everyone = [None] * world_size
dist.all_gather_object(everyone, owned.tolist())
if rank == 0:
    print(everyone)
dist.destroy_process_group()
