"""Check that ranks make the same collective calls in the same order: free after the first step.

Two units of one size look alike to a collective: one rank's weights would serve as another unit's,
unnoticed. So in the first step ranks compare every call before they make it. From then on each rank
watches itself: as long as a call follows on one that it followed on before, nothing is sent. A rank
that leaves this order asks the others, through the store at which they met. If they are waiting in
a collective instead, they can't answer, and it raises an error. Notebook 12.
"""

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from ..tools.checks import check_same

REMEDY = "All ranks must use the same modules in the same order, in every step."


class Agreement:
    """The collective calls of one FSDP on this rank, and those on which the group's ranks agreed.

    patience_s: seconds to wait for another rank where, after the first step, a call is new, i.e.
    hasn't followed on the one before. last: the call before, in this step. followed: {(call, next
    call)}, all pairs that the ranks agreed on.

    It can't notice ranks that choose differently among orders that all of them have had before.
    """

    def __init__(self, group: ProcessGroup | None, patience_s: float = 10.0):
        self.group = group
        self.patience_s = patience_s
        self.ranks = dist.get_process_group_ranks(group)
        self.first_step = True  # in which every call is compared
        self.last = "the step's begin"
        self.followed: set[tuple[str, str]] = set()
        # Ranks of a group make their FSDPs in one order: a number tells these apart in the store.
        self.store = distributed_c10d._get_default_store()
        self.key = f"ddpkit/fsdp/{self.ranks}"
        number = self.store.add(f"{self.key}/{dist.get_rank()}", 1)
        self.key += f"/{number}"

    def check(self, call: str) -> None:
        """Return only if this rank may make this call next, named in words ("reduce the root ...").

        The ranks compare it in the first step, and later if it hasn't followed on `last` before.
        ValueError: another rank makes a different call. RuntimeError: after the first step, another
        rank comes to no new call within `patience_s`.
        """
        pair = self.last, call
        self.last = call
        if len(self.ranks) == 1 or (pair in self.followed and not self.first_step):
            return
        if self.first_step:
            check_same("next call", [call], self.group, REMEDY)
        else:
            self.ask(*pair)
        self.followed.add(pair)

    def end_step(self) -> None:
        """Check that all ranks end their step here; from now on only new calls are compared."""
        self.check("synchronize")
        self.first_step = False
        self.last = "the step's begin"

    def ask(self, last: str, call: str) -> None:
        """Put this rank's new call into the store, and compare it with the other ranks' there.

        Raises the errors of `check`. last: the call before, for the text of the RuntimeError.
        """
        key = f"{self.key}/{len(self.followed)}"  # the same on all ranks, as long as they agree
        self.store.set(f"{key}/{dist.get_rank()}", call)
        for rank in self.ranks:
            try:
                self.store.wait([f"{key}/{rank}"], timedelta(seconds=self.patience_s))
            except RuntimeError:
                who = f"rank {dist.get_rank()} came to {call!r} after {last!r}, which is new"
                got = f"and rank {rank} to nothing new within {self.patience_s:g} s"
                raise RuntimeError(f"{who}, {got}. {REMEDY}") from None
            theirs = self.store.get(f"{key}/{rank}").decode()
            if theirs != call:
                got = f"{call!r} on rank {dist.get_rank()}, {theirs!r} on rank {rank}"
                raise ValueError(f"expected the same next call, got {got}. {REMEDY}")
