"""The sequences of a step: a function of the seed and the step, on any mesh.

Epoch follows epoch without a seam: sample number s, counted from the first step on, is the
(s mod N)-th of a random order of epoch s // N. So every batch is full, every sequence comes once an
epoch, and the step's number is all there is to save.
"""

from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from ..tools.text import encode, epoch_order, text


class Sequences:
    """A text cut into N sequences of `length` tokens, each with one more for the last target."""

    def __init__(self, tokens: Tensor, length: int, seed: int):
        self.tokens = tokens
        self.length = length
        self.seed = seed
        self.number = (len(tokens) - 1) // length  # N
        if self.number < 1:
            short = f"expected a text of more than {length} bytes"
            raise ValueError(f"{short}, got {len(tokens)}: bring more, or choose a smaller length")

    def of_step(self, step: int, batch: int) -> list[int]:
        """List the sequences of a step, `batch` of them, in order."""
        first = step * batch
        found = []
        for sample in range(first, first + batch):
            epoch, place = divmod(sample, self.number)
            found.append(int(order(self.number, self.seed, epoch)[place]))
        return found

    def rows(self, numbers: list[int]) -> Tensor:
        """Return these sequences: (sequences, length + 1), int64."""
        starts = torch.tensor(numbers, dtype=torch.int64).view(-1, 1) * self.length
        return self.tokens[starts + torch.arange(self.length + 1)].long()


order = lru_cache(maxsize=4)(epoch_order)  # a step asks once for each of its samples


def read(path: str) -> Tensor:
    """Return the bytes of a file, or of Python's manual: 1-D, uint8."""
    if not path:
        return encode(text())
    return torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8)


def ledger(used: dict[int, list[int]], number: int) -> list[str]:
    """Say what is wrong with the samples that steps 0, 1, ... have used; nothing, if all is right.

    used: {step: its sequences, of all ranks}. number: of sequences in an epoch. Every epoch that is
    over must have each sequence once, the one under way none twice.
    """
    found = [f"step {step} is missing" for step in range(len(used)) if step not in used]
    samples = [sample for step in sorted(used) for sample in used[step]]
    for start in range(0, len(samples), number):
        epoch = samples[start : start + number]
        twice = len(epoch) - len(set(epoch))
        if twice:
            found.append(f"epoch {start // number}: {twice} of {number} sequences came again")
    return found
