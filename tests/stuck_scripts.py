"""Small scripts of two ranks that wait in vain, or leave: what foreign code showed.

A case is the script after `BEGIN`, what a report of it says, and the number of the line that it
must show. The same text runs as a script under `ddpkit.debug`, and as a function under `launch`.
"""

from typing import NamedTuple

BEGIN = """\
import os, queue, signal, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
import torch
import torch.distributed as dist

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", os.environ.get("STORE"), rank=rank, world_size=world_size)
x = torch.full((4,), float(rank))
group = dist.new_group([0, 1], timeout=timedelta(seconds=1.5))
dist.barrier()
"""
LINES = BEGIN.count("\n")


class Case(NamedTuple):
    text: str
    says: str  # what the report begins with; "" where nothing is to be reported
    line: int = 1
    seconds: float = 0.0  # a timeout of the script's own that ends the wait
    rank: int = 1  # of whom `line` is


LATE = "no progress for 1.5 s: rank 0 waits in all_reduce for rank 1, which isn't in a call."
DESTROYED = "deadlock: rank 0 waits in all_reduce for rank 1, which has destroyed its group"
CIRCLE = "deadlock: each waits for another: rank 0 for rank 1 in all_reduce, rank 1 for rank 0 in"
REDUCES = "dist.all_reduce(x, group=group)"


def late(*lines: str) -> Case:
    """Rank 1 is late for a call, by what it does in the last of these lines."""
    *before, last = lines
    text = "\n".join([*before, f"if rank == 1: {last}", REDUCES])
    return Case(text, LATE, len(lines), 1.5)


CASES = {
    # D1: the script's own timeout holds, and is explained
    "sleeps": late("time.sleep(9)"),
    "waits for a queue": late("queue.Queue().get(timeout=9)"),
    "waits for a lock": late("lock = threading.Lock()", "lock.acquire(), lock.acquire(timeout=9)"),
    "waits for the store": late(
        "store = dist.distributed_c10d._get_default_store()",
        "store.wait(['never'], timedelta(seconds=9))",
    ),
    "loops in Python": Case(f"while rank == 1: x.add(1)\n{REDUCES}", LATE, 1, 1.5),
    "waits for a DataLoader's worker": late(
        "from torch.utils.data import DataLoader",
        "slow = lambda batch: time.sleep(9)",
        "next(iter(DataLoader([1, 2], num_workers=1, collate_fn=slow)))",
    ),
    "a timeout of wait()": Case(
        "if rank == 1: time.sleep(9)\n"
        "dist.all_reduce(x, async_op=True).wait(timedelta(seconds=1.5))",
        LATE,
        1,
        1.5,
    ),
    "a monitored barrier": Case(
        "if rank == 1: time.sleep(9)\ndist.monitored_barrier(timeout=timedelta(seconds=1.5))",
        LATE.replace("all_reduce", "barrier"),
        1,
        1.5,
    ),
    # D2: detection goes on after a call of a second thread, and while a handle is polled
    "after a thread's call": Case(
        "call = lambda: dist.all_reduce(torch.ones(1))\n"
        "thread = threading.Thread(target=call)\nthread.start()\nthread.join()\n"
        "if rank == 0: dist.all_reduce(x)",
        "deadlock: rank 0 waits in all_reduce for rank 1, which has returned.",
        5,
        rank=0,
    ),
    "after a pool's call": Case(
        "pool, second = ThreadPoolExecutor(1), dist.new_group([0, 1])\n"
        "pool.submit(lambda: dist.all_reduce(torch.ones(1))).result()\n"
        "dist.all_reduce(x, group=None if rank else second)",
        CIRCLE,
        3,
    ),
    "polls a handle": Case(
        "handle = dist.all_reduce(x, group=group, async_op=True) if rank == 0 else None\n"
        "while handle and not handle.is_completed(): time.sleep(0.01)\n"
        "if handle: handle.wait()",
        "deadlock: rank 0 waits in all_reduce for rank 1, which has returned.",
        1,
        1.5,
        rank=0,
    ),
    # D3: destroyed groups
    "destroys its group": Case(
        "if rank == 1: dist.destroy_process_group()\nelse: dist.all_reduce(x)", DESTROYED
    ),
    "destroys its group and works on": Case(
        "if rank == 1: dist.destroy_process_group()\nelse: dist.all_reduce(x)\ntime.sleep(9)",
        DESTROYED,
    ),
    "destroys a part of the world": Case(
        f"if rank == 1: dist.destroy_process_group(group)\nelse: {REDUCES}\ndist.barrier()",
        DESTROYED,
        seconds=1.5,
    ),
    "calls after it has destroyed": Case(
        "if rank == 1: dist.destroy_process_group()\ndist.all_reduce(x)",
        "rank 1 raised ValueError: Default process group has not been initialized",
        2,
    ),
    # D9: ranks that leave
    "leaves by os._exit(0)": Case(
        "if rank == 1: os._exit(0)\ndist.all_reduce(x)", "rank 1 called os._exit(0)"
    ),
    "leaves by os._exit(3)": Case(
        "if rank == 1: os._exit(3)\ndist.all_reduce(x)", "rank 1 called os._exit(3)"
    ),
    "leaves by sys.exit(3)": Case(
        "if rank == 1: sys.exit(3)\ndist.all_reduce(x)", "rank 1 called sys.exit(3)"
    ),
}

# What is right stays right, and says what it says without us.
RIGHT = {
    "sends and destroys": "if rank == 0: dist.send(x, 1)\nelse: time.sleep(0.5), dist.recv(x, 0)\n"
    "dist.destroy_process_group()\nprint(x[0].item())",
    "waits for a handle after it has destroyed": "handle = dist.all_reduce(x, async_op=True)\n"
    "dist.destroy_process_group()\nhandle.wait()\nprint(x[0].item())",
    "catches a timeout": "try:\n    if rank == 0: dist.recv(x, 1, group=group)\n"
    "except RuntimeError as error:\n    print('Timed out waiting 1500ms' in str(error))\n"
    "dist.barrier()",
    "polls a handle until a late rank comes": "if rank == 1: time.sleep(1)\n"
    "handle = dist.all_reduce(x, async_op=True)\nwhile not handle.is_completed(): pass\n"
    "handle.wait()\nprint(x[0].item())",
    "a forked child leaves": "folder = os.path.dirname(sys._getframe().f_code.co_filename)\n"
    "pid = os.fork()\nfile = open(f'{folder}/{os.getpid()}', 'w')\n"
    "if pid == 0: file.write('1'), sys.exit(rank or 'I am a child')\n"
    "os.waitpid(pid, 0)\ndist.all_reduce(x)\nprint(float(open(f'{folder}/{pid}').read()))",
    "a forked child comes to the end": "pid = os.fork()\nif pid: os.waitpid(pid, 0)\n"
    "if pid: dist.all_reduce(x)\nif pid: print(x[0].item())",
}
