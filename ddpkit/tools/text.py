"""A real text that comes with Python, as bytes, and a loader that splits it among ranks.

    tokens = encode(text())
    for inputs, targets in Batches(tokens, batch_size=8, length=64, rank=rank, world_size=4):
        ...

The tokens are the text's bytes: there are 256 of them, and no tokenizer is trained first.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from .checks import check_counts


def text() -> str:
    """Return Python's own reference manual, as `help()` shows it: half a million characters.

    Every version of Python brings its own edition, so curves of two machines are alike only if
    their Pythons are.

    ModuleNotFoundError: this Python came without its manual; the message says where to get it.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        missing = "this Python has no pydoc_data.topics, its manual"
        remedy = "Install one from conda or python.org; on Debian python3, not python3-minimal."
        raise ModuleNotFoundError(f"{missing}. {remedy}") from error
    return "\n".join(topics[name] for name in sorted(topics))


def encode(text: str) -> Tensor:
    """Return `text` in UTF-8 as a 1-D tensor of uint8, one element a byte."""
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


class Batches:
    """One rank's share of every batch: an iterable of (inputs, targets).

    A `for` loop ends with the epoch; the next loop is the next epoch.

    tokens: 1-D, one element a token; not copied.
    batch_size: the number of sequences in a batch, over all ranks.
    length: the number of tokens in a sequence.
    rank, world_size: this rank, and the number of ranks.
    seed: seed of the order, which differs between epochs and is the same on every rank.
    ValueError: a count below 1, a rank outside the world, or too few tokens for one sequence.

    `inputs` and `targets` are int64, (sequences of this rank, length), on the device of `tokens`. A
    target is the token that follows: `targets[:, :-1]` equals `inputs[:, 1:]`. Every epoch has
    every sequence once; leftover tokens that don't fill a sequence are dropped.

    Batches are split as `torch.tensor_split` splits: for every world size W, the shares of ranks 0,
    1, ..., concatenated, are the batch that a single rank would get. Their lengths differ by at
    most one sequence. Where they differ, the mean over ranks of the means over their shares isn't
    the mean over the batch; it is, if each rank multiplies its mean by `weight`: W times this
    rank's part of the batch last yielded.

    The last batch of an epoch is the remainder. If it has fewer sequences than there are ranks,
    some ranks get (0, length), and must still take part in the step: the others wait for them in
    every collective.

    `epoch` and `step` say which batch comes next, and are all there is to save: set them to resume,
    with the other arguments as before, but for any `rank` and `world_size`. Notebook 03.
    """

    def __init__(
        self,
        tokens: Tensor,
        batch_size: int,
        length: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
    ):
        check_counts(batch_size=batch_size, length=length)
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of {world_size}: expected 0 to {world_size - 1}")
        sequences = max(0, len(tokens) - 1) // length
        if sequences == 0:
            expected = f"expected more than {length} tokens, a sequence with its targets"
            raise ValueError(f"{expected}, got {len(tokens)}: bring more text, or a smaller length")
        used = sequences * length
        self._inputs = tokens[:used].view(sequences, length)
        self._targets = tokens[1 : used + 1].view(sequences, length)
        self._batch_size, self._rank, self._world_size = batch_size, rank, world_size
        self._seed = seed
        self.epoch, self.step = 0, 0
        self.weight = 1.0

    def __len__(self) -> int:
        """Return the number of batches in an epoch, which is the same on every rank."""
        return -(-len(self._inputs) // self._batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's (inputs, targets) of each batch that is left in the epoch.

        `epoch` and `step` already name the next batch while one is worked on, so that a state saved
        then resumes there.
        """
        epoch, order = self.epoch, epoch_order(len(self._inputs), self._seed, self.epoch)
        while self.epoch == epoch:
            start = self.step * self._batch_size
            batch = order[start : start + self._batch_size]
            share = batch.tensor_split(self._world_size)[self._rank]
            self.weight = self._world_size * len(share) / len(batch)
            # Before the yield: a state saved while a batch is worked on names the next batch.
            self.epoch, self.step = divmod(self.epoch * len(self) + self.step + 1, len(self))
            yield self._inputs[share].long(), self._targets[share].long()


def epoch_order(sequences: int, seed: int, epoch: int) -> Tensor:
    """Return the order of the sequences in an epoch: a random permutation of their indices, int64.

    It follows from the arguments alone. torch's global generator isn't used, so a model draws the
    same numbers as without this.
    """
    seed = 1_000_003 * seed + epoch  # not the sum: seed 1 would run an epoch ahead
    return torch.randperm(sequences, generator=torch.Generator().manual_seed(seed))
