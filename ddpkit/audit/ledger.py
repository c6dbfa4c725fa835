"""A ledger of samples: was each used exactly once in an epoch, on all ranks together?"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class Ledger:
    """Wrap a loader; note every sample that passes.

        ledger = Ledger(DataLoader(...))
        for epoch in range(2):
            for batch in ledger: ...
            print(ledger.audit(len(dataset)))   # every rank must call

    loader: of batches, tensors or tuples of them, samples along the first axis. key: takes a
    batch of any kind, and returns the list of its samples' names; None: `samples`, which hashes
    their bytes, so that equal samples count as one that was used twice.
    entries: {sample: how often this rank had it in the present epoch}; it can be saved and given to
    a resumed run's Ledger.
    """

    def __init__(
        self,
        loader: Iterable,
        key: Callable[[object], list] | None = None,
        entries: dict | None = None,
    ):
        self.loader = loader
        self.key = key or samples
        self.entries = Counter(entries or {})
        self.orders: list[tuple] = []  # of the epochs before: the samples in their order

    def __iter__(self) -> Iterator:
        for batch in self.loader:
            self.entries.update(self.key(batch))
            yield batch

    def __len__(self) -> int:
        return len(self.loader)

    def audit(self, expected: int, group: ProcessGroup | None = None) -> list[str]:
        """List what is wrong with the epoch that ends here, the same on every rank; begin another.

        expected: the number of samples in the data set. Listed are samples that no rank used, or
        that were used more than once; ranks that all had the same; and an order of samples that
        an earlier epoch had. Every rank of `group` must call; without ranks it counts alone.
        Cost: an all_gather_object of all names, which every rank keeps, epoch after epoch.
        """
        everyones = [(self.entries, tuple(self.entries))]
        if dist.is_initialized():
            everyones = [None] * dist.get_world_size(group)
            dist.all_gather_object(everyones, (self.entries, tuple(self.entries)), group=group)
        total = sum((entries for entries, _ in everyones), Counter())
        order = tuple(names for _, names in everyones)
        found = complaints(total, [entries for entries, _ in everyones], expected)
        if order in self.orders:
            epoch, before = len(self.orders), self.orders.index(order)
            found.append(f"epoch {epoch} has the order of epoch {before}: who calls set_epoch?")
        self.orders.append(order)
        self.entries = Counter()
        return found


def complaints(total: Counter, by_rank: list[Counter], expected: int) -> list[str]:
    found = []
    missing = expected - len(total)
    if missing > 0:
        found.append(f"{missing} of {expected} samples were used by no rank")
    often = Counter(times for times in total.values() if times > 1)
    for times, number in sorted(often.items()):
        were = "was" if number == 1 else "were"
        how_often = "twice" if times == 2 else f"{times} times"
        found.append(f"{number} of {expected} samples {were} used {how_often}")
    shared = [entries for entries in by_rank if entries and entries == by_rank[0]]
    if len(by_rank) > 1 and len(shared) == len(by_rank):
        found.append("all ranks had the same samples: no sampler deals them out")
    return found


def samples(batch: object) -> list[bytes]:
    """Return a hash of each sample's bytes, in all tensors of a batch. IndexError: it has none."""
    parts = batch if isinstance(batch, tuple | list) else [batch]
    columns = [part.detach().cpu().contiguous() for part in parts if isinstance(part, Tensor)]
    names = []
    for number in range(len(columns[0])):
        digest = hashlib.sha256()
        for column in columns:
            row = column[number].flatten()
            digest.update(row.view(torch.uint8).numpy().tobytes() if row.numel() else b"")
        names.append(digest.digest()[:16])
    return names
