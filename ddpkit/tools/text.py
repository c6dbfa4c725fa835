"""A real text that comes with Python, as bytes, and a loader that shares it out among ranks.

    tokens = encode(text()) for inputs, targets in Batches(tokens, batch_size=8, length=64,
    rank=rank, world_size=world_size): ...

The tokens are the text's bytes: there are 256 of them, and no tokenizer is trained first.
"""

from collections.abc import Iterator

import torch
from torch import Tensor


def text() -> str:
    """Python's own reference manual, as `help()` shows it: about half a million characters of
    English and code.

    Every version of Python brings its own edition: curves of two machines are alike only if their
    Pythons are. ModuleNotFoundError: this Python came without its manual.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        remedy = (
            "Install a Python from conda or python.org; on Debian and Ubuntu python3, "
            "not only python3-minimal."
        )
        raise ModuleNotFoundError(
            f"this Python has no pydoc_data.topics, its manual. {remedy}"
        ) from error
    return "\n".join(topics[name] for name in sorted(topics))


def encode(text: str) -> Tensor:
    """The bytes of `text` in UTF-8: uint8, 1-D, one element a byte."""
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def decode(tokens: Tensor) -> str:
    """The text of which `tokens` are the bytes; bytes that are no text, as a model may write them,
    become �.

    tokens: 1-D, any integer dtype, 0 to 255; ValueError otherwise.
    """
    return bytes(tokens.tolist()).decode(errors="replace")


class Batches:
    """One rank's share of every batch. A `for` loop goes to the end of the epoch; the next loop is
    the next epoch.

    tokens: 1-D, as `encode` gives them; kept, not copied. batch_size: sequences in a batch, all
    ranks together. length: tokens in a sequence. seed: of the order, which is another in every
    epoch and the same on every rank. ValueError: a rank outside the world, or not enough tokens for
    one batch.

    Yields `inputs` and `targets`, int64, (sequences of this rank, length), on the device of
    `tokens`. A target is the token that follows: `targets[:, :-1]` equals `inputs[:, 1:]`. Every
    epoch has every sequence once; the tokens that don't fill a sequence are left out.

    Batches are cut as `torch.tensor_split` cuts: for every world size W, the shares of ranks 0, 1,
    ..., one after the other, are the batch that a single rank would get. They are equal to within
    one sequence. Where they aren't equal, the mean over ranks of the means over their shares isn't
    the mean over the batch; it is, if each rank multiplies its mean by `weight`: W times this
    rank's part of the batch last yielded.

    The last batch of an epoch is what is left. If that is less than a sequence for each rank, some
    get (0, length), and must still take their part in the step: the others wait for them in every
    collective. `drop_last` leaves out a batch that isn't full; if W divides `batch_size`, all
    shares are then equal, and `weight` is 1.

    `epoch` and `step` say which batch comes next, and are all there is to save. A run may be
    resumed with another `world_size`. Notebook 03.
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
        drop_last: bool = False,
    ):
        if not 0 <= rank < world_size:
            raise ValueError(
                f"rank {rank} of {world_size}: expected a rank from 0 to {world_size - 1}"
            )
        if batch_size < 1 or length < 1:
            raise ValueError(
                f"batch_size {batch_size} and length {length}: expected at least 1 of each"
            )
        sequences = max(0, len(tokens) - 1) // length
        if sequences < (batch_size if drop_last else 1):
            got = (
                f"{len(tokens)} tokens are {sequences} sequences of {length}, with a "
                "target for each token"
            )
            raise ValueError(
                f"{got}: not enough for a batch. Bring more text, or make length or "
                "batch_size smaller."
            )
        used = sequences * length
        self._inputs = tokens[:used].view(sequences, length)
        self._targets = tokens[1 : used + 1].view(sequences, length)
        self._batch_size, self._rank, self._world_size = batch_size, rank, world_size
        self._seed, self._drop_last = seed, drop_last
        self.epoch, self.step = 0, 0
        self.weight = 1.0

    def __len__(self) -> int:
        """Batches in a whole epoch: the same on every rank."""
        whole, left = divmod(len(self._inputs), self._batch_size)
        return whole if self._drop_last or left == 0 else whole + 1

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        epoch, order = self.epoch, self._order()
        while self.epoch == epoch:
            start = self.step * self._batch_size
            batch = order[start : start + self._batch_size]
            share = batch.tensor_split(self._world_size)[self._rank]
            self.weight = self._world_size * len(share) / len(batch)
            # Before the yield: a state saved while a batch is worked on says what comes after it.
            self.epoch, self.step = divmod(self.epoch * len(self) + self.step + 1, len(self))
            yield self._inputs[share].long(), self._targets[share].long()

    def _order(self) -> Tensor:
        """The sequences' order in this epoch, from a generator of its own: torch's own stays as it
        is."""
        seed = (
            1_000_003 * self._seed + self.epoch
        )  # not the sum: seed 1 would repeat seed 0, an epoch ahead
        return torch.randperm(len(self._inputs), generator=torch.Generator().manual_seed(seed))

    def state_dict(self) -> dict[str, int]:
        """Which batch comes next: `epoch` and `step`. The same on every rank."""
        return {"epoch": self.epoch, "step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where `state` was saved, in Batches of the same tokens, batch size, length, seed
        and `drop_last`.

        ValueError: an epoch is shorter than that here.
        """
        if not 0 <= state["step"] < len(self):
            got = (
                f"step {state['step']} of epoch {state['epoch']}, but an epoch has "
                f"{len(self)} steps here"
            )
            raise ValueError(
                f"{got}: resume with the text, batch_size, length and drop_last of the run "
                "that was saved"
            )
        self.epoch, self.step = state["epoch"], state["step"]
