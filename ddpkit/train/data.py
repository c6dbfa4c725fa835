"""The sequences that each step trains on: a function of the seed and the step, on any mesh.

Epochs follow one another without a gap: sample number s, counted from the first step on, is the (s
mod N)-th of N sequences, in the random order of epoch s // N. So every batch is full, every
sequence comes once an epoch, and the step's number is all that a checkpoint needs of the data.
"""

from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from ..tools.text import encode, epoch_order, text


class Sequences:
    """A text cut into N sequences of `length` tokens, each with one more for the last target.

    N is `number`; tokens left over at the end are dropped. tokens: the whole text, 1-D, uint8.
    seed: of the random order of each epoch. ValueError: the text is too short for one sequence.
    """

    def __init__(self, tokens: Tensor, length: int, seed: int):
        self.tokens = tokens
        self.length = length
        self.seed = seed
        self.number = (len(tokens) - 1) // length  # N
        if self.number < 1:
            short = f"expected a text of more than {length} bytes"
            raise ValueError(f"{short}, got {len(tokens)}: bring more, or choose a smaller length")

    def of_step(self, step: int, batch: int) -> list[int]:
        """Return the numbers of the `batch` sequences that a step trains on, in order."""
        first = step * batch
        found = []
        for sample in range(first, first + batch):
            epoch, place = divmod(sample, self.number)
            found.append(int(order(self.number, self.seed, epoch)[place]))
        return found

    def rows(self, numbers: list[int]) -> Tensor:
        """Return the tokens of the sequences with these numbers: (sequences, length + 1), int64."""
        starts = torch.tensor(numbers, dtype=torch.int64).view(-1, 1) * self.length
        return self.tokens[starts + torch.arange(self.length + 1)].long()


order = lru_cache(maxsize=4)(epoch_order)  # a step asks once for each of its samples


def read(path: str) -> Tensor:
    """Return a file's bytes, 1-D, uint8; Python's manual for "". ValueError: the file is empty."""
    if not path:
        return encode(text())
    return torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8)


def ledger(used: dict[int, list[int]], number: int) -> list[str]:
    """List, as sentences, what is wrong with the samples that steps 0, 1, ... have used.

    Empty if no step is missing and no epoch has a sequence twice: then every finished epoch has
    each sequence once. used: {step: numbers of its sequences, of all ranks}. number: of sequences
    in an epoch. Epochs are counted by samples: a missing step moves the bounds of those after it.
    """
    found = [f"step {step} is missing" for step in range(len(used)) if step not in used]
    samples = [sample for step in sorted(used) for sample in used[step]]
    for start in range(0, len(samples), number):
        epoch = samples[start : start + number]
        twice = len(epoch) - len(set(epoch))
        if twice:
            found.append(f"epoch {start // number}: {twice} of {number} sequences came again")
    return found
