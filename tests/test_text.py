"""ddpkit.tools.text: a token a byte; every rank's share beside what one rank would get."""

import sys
from itertools import islice

import pytest
import torch

from ddpkit.tools.text import Batches, encode, text

LENGTH = 3  # sequence i is 3i, 3i+1, 3i+2: tokens say where in the text they are


def places(sequences):
    return torch.arange(sequences * LENGTH + 1)


def epoch(batches):
    """[(inputs, targets, weight), ...] to the end of the epoch."""
    return [(inputs, targets, batches.weight) for inputs, targets in batches]


def inputs_of(batches):
    return [inputs.tolist() for inputs, _ in batches]


def test_text_is_the_manual(monkeypatch):
    assert 'The "assert" statement' in text()
    assert len(text()) > 100_000
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(ModuleNotFoundError, match=r"no pydoc_data\.topics.*Install"):
        text()


def test_a_token_a_byte():
    for written in ("", "abc\n", "naïve ☃ 🙂 日本"):
        tokens = encode(written)
        assert (tokens.dtype, tokens.tolist()) == (torch.uint8, list(written.encode()))


SHARES = [(12, 4, 2), (13, 4, 3), (17, 6, 4), (9, 2, 4), (5, 4, 3), (5, 1, 2), (7, 7, 1)]


@pytest.mark.parametrize(("sequences", "batch_size", "world_size"), SHARES)
def test_shares_are_what_one_rank_would_get(sequences, batch_size, world_size):
    """(5, 4, 3): on 3 ranks 2, 1, 1 sequences, and then 1, 0, 0."""
    arguments = places(sequences), batch_size, LENGTH
    alone, ranks = epoch(Batches(*arguments)), []
    for rank in range(world_size):
        its = Batches(*arguments, rank=rank, world_size=world_size)
        ranks.append(epoch(its))
        assert len(its) == len(alone) == len(ranks[-1]) == -(-sequences // batch_size)
    for (inputs, targets, _), *shares in zip(alone, *ranks, strict=True):
        assert torch.equal(torch.cat([share[0] for share in shares]), inputs)
        assert torch.equal(torch.cat([share[1] for share in shares]), targets)
        sizes = [len(share[0]) for share in shares]
        assert max(sizes) - min(sizes) <= 1
        assert [share[2] for share in shares] == [world_size * s / len(inputs) for s in sizes]


def test_an_epoch_has_every_sequence_once_in_an_order_of_its_own():
    for spare in (0, 1, LENGTH - 1):
        tokens = torch.arange(10 * LENGTH + 1 + spare)
        inputs = torch.cat([inputs for inputs, _ in Batches(tokens, 4, LENGTH)])
        expected = torch.arange(10 * LENGTH).view(10, LENGTH)
        assert torch.equal(inputs[inputs[:, 0].argsort()], expected)
    before, orders = torch.get_rng_state(), []
    for seed in (0, 1):
        batches = Batches(places(40), 8, LENGTH, seed=seed)
        orders += [inputs_of(batches) for _ in range(3)]
    assert batches.epoch == 3
    assert all(orders.count(order) == 1 for order in orders)
    assert torch.equal(torch.get_rng_state(), before)  # torch's own is left alone


def test_batches_are_copies_and_tokens_are_not():
    tokens = encode("abcdefghijklmnopqrstuvwxyz")
    batches = Batches(tokens, batch_size=99, length=5)
    tokens += 1
    [(inputs, targets)] = batches
    assert (inputs.shape, inputs.dtype) == (targets.shape, targets.dtype) == ((5, 5), torch.int64)
    assert torch.equal(targets, inputs + 1)  # the next letter
    assert inputs.min() == ord("b")


def test_resumed_where_it_was_left_with_other_ranks():
    """Epochs of 3 steps; left after none to 6, in the midst of a step."""
    for steps in range(7):
        whole, world_size = Batches(places(10), 4, LENGTH, seed=3), 1 + steps % 3
        expected = [inputs for _ in range(3) for inputs, _ in whole][steps:]
        left, state = Batches(places(10), 4, LENGTH, seed=3), (0, 0)
        for number in range(steps):
            next(iter(left))
            state = left.epoch, left.step
            assert state == divmod(number + 1, 3)
        ranks = []
        for rank in range(world_size):
            resumed = Batches(places(10), 4, LENGTH, rank=rank, world_size=world_size, seed=3)
            resumed.epoch, resumed.step = state
            ranks.append([inputs for _ in range(resumed.epoch, 3) for inputs, _ in resumed])
        for inputs, *shares in zip(expected, *ranks, strict=True):
            assert torch.equal(torch.cat(shares), inputs)


def test_a_loop_left_early_goes_on_where_it_was():
    batches, whole = Batches(places(10), 4, LENGTH), inputs_of(Batches(places(10), 4, LENGTH))
    assert [inputs.tolist() for inputs, _ in islice(batches, 2)] == whole[:2]
    assert inputs_of(batches) == whole[2:]


def test_mistakes_are_named():
    for arguments, says in [
        ({"rank": 2, "world_size": 2}, "rank 2 of 2: expected 0 to 1"),
        ({"batch_size": 0}, "batch_size to be 1 or more, got 0"),
        ({"length": 0}, "length to be 1 or more, got 0"),
        ({"tokens": torch.arange(3)}, "more than 3 tokens.* got 3: bring more text"),
    ]:
        with pytest.raises(ValueError, match=says):
            Batches(**{"tokens": places(10), "batch_size": 4, "length": LENGTH} | arguments)
