"""Checkers of notebook 00: say_hello, neighbours."""

import contextlib
import io
import time

import torch.distributed as dist

from ddpkit.runtime.launch import Run
from ddpkit.runtime.look import Look
from ddpkit.runtime.wire import recorder

from .checker import Exercise, Trial, mistakes

__tracebackhide__ = True  # a failing answer shows the reader's lines, not these

LATE_S = 0.2  # seconds for which low ranks are held back if no rank waits for them
CERTAIN = "a message or a barrier is certain."
OURS = "Ours. Yours may look different: the check looks at what it does."


# Say hello in rank order


def say_hello():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for turn in range(world_size):
        if turn == rank:
            print(f"hello from rank {rank} of {world_size}")
        dist.barrier()


class Said(str):
    """The text that a rank printed; `.at`: the time at which it began to."""


class _Listener(io.StringIO):
    """Stands in for a rank's standard output, and notes when it first printed something.

    Low ranks print late, so that the right order can't come about by luck.
    """

    printed_at = None

    def write(self, text):
        if self.printed_at is None:
            _high_ranks_first()
            self.printed_at = time.perf_counter()
        return super().write(text)


def _high_ranks_first():
    """Hold low ranks back until the others wait for them, or are done; at most for `LATE_S`."""
    begun, board = time.perf_counter(), recorder().board
    while time.perf_counter() < begun + LATE_S:
        higher = Look(board).now[dist.get_rank() + 1 :]
        if all(place.missing or place.state == "returned" for place in higher):
            return
        time.sleep(0.001)


def _listen(answer):
    """Call the answer, and return what it printed."""
    with contextlib.redirect_stdout(_Listener()) as listener:
        answer()
    said = Said(listener.getvalue())
    said.at = listener.printed_at
    return said


def _hello_trials():
    for world_size in (2, 3, 5):
        lines = [f"hello from rank {rank} of {world_size}\n" for rank in range(world_size)]
        yield Trial(world_size, _listen, (), lines)


def _explain_hello(trial: Trial, rank: int, expected, got):
    if got.count("\n") == 1:
        return "The line must read exactly so, with the rank and the world size that torch tells."
    return None


def _out_of_order(trial: Trial, run: Run):
    """Name a rank that received nothing between the line of the rank before it and its own."""
    for rank in range(1, trial.world_size):
        before, mine = run[rank - 1].at, run[rank].at
        heard = [record.done for record in run.wire[rank] if record.done and record.op != "send"]
        if any(before < done < mine for done in heard):
            continue
        between = f"It must wait after rank {rank - 1} has printed, and before it prints itself."
        if mine > before:
            return (
                f"the order came out right, but rank {rank} received nothing between rank "
                f"{rank - 1}'s line and its own: it waited by the clock.\n"
                f"On a busy machine any sleep is too short: {CERTAIN} {between}"
            )
        told = f"rank {rank} printed before rank {rank - 1} did; low ranks were slowed on purpose."
        if not heard:
            return f"{told}\nNothing makes a rank wait for the one before it: {CERTAIN}"
        before = f"before rank {rank - 1} had printed"
        where = before if max(heard) < mine else "after it had printed"
        return f"{told}\nRank {rank} did wait, but {where}. {between}"
    return None


say_hello = Exercise(
    reference=say_hello,
    note=OURS,
    trials=_hello_trials,
    hints={
        "start": "Let every rank go through all turns: for turn in range(world_size). Whose turn "
        "is it?",
        "values": "In each turn one rank prints, the one whose turn it is. Then all ranks, not "
        "only that one, meet at a barrier.",
        "hang": "dist.barrier() lets no rank on before all have come to it: all must call it.",
    },
    praise="in rank order, also when low ranks are slow.",
    explain=_explain_hello,
    wire=_out_of_order,
    mistakes=mistakes("""
no_barrier: dist.barrier() → pass
    Nothing makes a rank wait for the one before it: a message or a barrier is certain.
barrier_last: dist.barrier() → if turn == world_size - 1: dist.barrier()
    Rank 1 did wait, but after it had printed.
barrier_in_the_if: dist.barrier() → if turn == rank == 0: dist.barrier()
    Not all ranks come to the barrier, and it lets nobody on before all have come. Put it outside
    the `if`.
wrong_words: "hello from rank {rank} of {world_size}" → "Hello from rank {rank}"
    The line must read exactly so, with the rank and the world size that torch tells.
returns_it: print( → str(
    Nothing went through sys.stdout, where print() writes. Every rank must take its turn, and print.
"""),
)


# Find your neighbours


def neighbours():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return (rank - 1) % world_size, (rank + 1) % world_size


def _call(answer):
    got = answer()
    return tuple(got) if isinstance(got, list) else got


def _neighbours_trials():
    for world_size in (2, 3, 4, 1):
        both = [((r - 1) % world_size, (r + 1) % world_size) for r in range(world_size)]
        yield Trial(world_size, _call, (), both)


def _explain_neighbours(trial: Trial, rank: int, expected, got):
    if not (isinstance(got, tuple) and len(got) == 2):
        return "Return two ranks: left, right."
    outside = [neighbour for neighbour in got if neighbour not in range(trial.world_size)]
    if outside:
        return f"There is no rank {outside[0]} here: the ring must close, in a world of any size."
    return "For rank r, left is r - 1 and right r + 1; only at the ends the ring closes."


neighbours = Exercise(
    reference=neighbours,
    note=OURS,
    trials=_neighbours_trials,
    hints={
        "start": "The right neighbour of rank r is r + 1, the left one r - 1, except at the ends.",
        "values": "In Python, (r + 1) % world_size is 0 for the last rank. And -1 % 4 is 3.",
    },
    praise="the ring closes in every world from 1 to 4.",
    explain=_explain_neighbours,
    mistakes=mistakes("""
open: (rank - 1) % world_size, (rank + 1) % world_size → rank - 1, rank + 1
    There is no such rank: the ring must close. The remainder, %, brings it round.
open_on_the_right: (rank + 1) % world_size → rank + 1
    The last rank's right neighbour is rank 0: the ring must close there, too.
swapped: (rank - 1) % world_size, (rank + 1) → (rank + 1) % world_size, (rank - 1)
    The right ranks, the wrong way round: left is the rank below, right the rank above.
of_four: world_size = dist.get_rank(), dist.get_world_size() → world_size = dist.get_rank(), 4
    Count with the size of this world, dist.get_world_size(), not with a fixed number.
ends_by_hand: return → if rank == 0: return 3, 1⏎return
    Count with the size of this world: its last rank isn't always 3.
"""),
)
