"""ddpkit.text: the text there and back as bytes, and every rank's share against what one rank alone would get."""

import os
import subprocess
import sys
from itertools import islice

import pytest
import torch

from ddpkit.tools.text import Batches, decode, encode, text

WORLD_SIZES = [1, 2, 3, 4]

# Sequences of 3 whose tokens say where in the text they are: sequence i is 3i, 3i+1, 3i+2.
LENGTH = 3


def places(sequences):
    return torch.arange(sequences * LENGTH + 1)


def epoch(batches):
    """[(inputs, targets, weight), ...] to the end of the epoch."""
    return [(inputs, targets, batches.weight) for inputs, targets in batches]


def inputs_of(batches):
    return [inputs.tolist() for inputs, _ in batches]


# The text


def test_text_is_the_manual():
    manual = text()
    assert 'The "assert" statement' in manual
    assert 'The "with" statement' in manual
    assert len(manual) > 100_000
    assert manual == text()


def test_a_python_without_its_manual_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(ModuleNotFoundError, match=r"no pydoc_data\.topics.*Install"):
        text()


@pytest.mark.parametrize(
    "written", ["", "abc\n", "naïve ☃ 🙂 日本", text()], ids=["empty", "ascii", "beyond", "manual"]
)
def test_there_and_back(written):
    tokens = encode(written)
    assert tokens.dtype == torch.uint8
    assert tokens.shape == (len(written.encode()),)
    assert decode(tokens) == written
    assert decode(tokens.long()) == written


def test_bytes_that_are_no_text_are_shown():
    assert decode(encode("aé")[:2]) == "a�"
    with pytest.raises(ValueError, match="256"):
        decode(torch.tensor([256]))


# Shares


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("drop_last", [False, True], ids=["tail", "no tail"])
@pytest.mark.parametrize(("sequences", "batch_size"), [(12, 4), (13, 4), (17, 6), (7, 7), (9, 2), (5, 1)])
def test_shares_are_what_one_rank_would_get(sequences, batch_size, drop_last, world_size):
    def batches(rank, world_size):
        tokens = places(sequences)
        return Batches(tokens, batch_size, LENGTH, rank=rank, world_size=world_size, drop_last=drop_last)

    alone = epoch(batches(0, 1))
    ranks = [epoch(batches(rank, world_size)) for rank in range(world_size)]
    steps = sequences // batch_size if drop_last else -(-sequences // batch_size)
    assert [len(each) for each in (batches(0, world_size), alone, *ranks)] == [steps] * (2 + world_size)
    for step, (inputs, targets, _) in enumerate(alone):
        shares = [rank[step] for rank in ranks]
        assert torch.equal(torch.cat([share[0] for share in shares]), inputs)
        assert torch.equal(torch.cat([share[1] for share in shares]), targets)
        sizes = [len(share[0]) for share in shares]
        assert max(sizes) - min(sizes) <= 1
        assert [share[2] for share in shares] == [world_size * size / len(inputs) for size in sizes]


@pytest.mark.parametrize("spare", [0, 1, LENGTH - 1])
def test_an_epoch_has_every_sequence_once(spare):
    tokens = torch.arange(10 * LENGTH + 1 + spare)
    inputs = torch.cat([inputs for inputs, _ in Batches(tokens, 4, LENGTH)])
    assert torch.equal(inputs[inputs[:, 0].argsort()], torch.arange(10 * LENGTH).view(10, LENGTH))
    assert not torch.equal(inputs, inputs.sort(0).values)  # in an order of its own


def test_what_a_batch_looks_like():
    tokens = encode("abcdefghijklmnopqrstuvwxyz")
    [(inputs, targets)] = Batches(tokens, batch_size=99, length=5)
    assert (inputs.shape, inputs.dtype) == (targets.shape, targets.dtype) == ((5, 5), torch.int64)
    assert torch.equal(targets, inputs + 1)  # the next letter


def test_too_few_for_all_ranks():
    """5 sequences in batches of 4, on 3 ranks: 2, 1, 1, and then 1, 0, 0."""
    got = [epoch(Batches(places(5), 4, LENGTH, rank=rank, world_size=3)) for rank in range(3)]
    assert [[tuple(inputs.shape) for inputs, _, _ in rank] for rank in got] == [
        [(2, LENGTH), (1, LENGTH)],
        [(1, LENGTH), (0, LENGTH)],
        [(1, LENGTH), (0, LENGTH)],
    ]
    assert [[weight for _, _, weight in rank] for rank in got] == [[1.5, 3.0], [0.75, 0.0], [0.75, 0.0]]


def test_weights_make_the_mean_over_ranks_the_mean_over_the_batch():
    def weighted_means(rank, world_size):
        batches = Batches(places(9), 7, LENGTH, rank=rank, world_size=world_size)
        return [weight * inputs.double().sum() / max(1, inputs.numel()) for inputs, _, weight in epoch(batches)]

    alone = torch.stack(weighted_means(0, 1))
    for world_size in WORLD_SIZES:
        ranks = torch.tensor([weighted_means(rank, world_size) for rank in range(world_size)])
        torch.testing.assert_close(ranks.mean(0), alone)


# Order


def test_every_epoch_and_every_seed_has_its_own_order():
    orders = []
    for seed in (0, 1):
        batches = Batches(places(40), 8, LENGTH, seed=seed)
        orders += [inputs_of(batches) for _ in range(3)]
    assert batches.epoch == 3
    assert all(orders.count(order) == 1 for order in orders)


ELSEWHERE = """
import torch
from ddpkit.tools.text import Batches
torch.manual_seed(7)
batches = Batches(torch.arange(61), 4, 3, rank=1, world_size=3, seed=5)
print([[inputs.tolist() for inputs, _ in batches] for _ in range(2)])
"""


def test_every_process_has_the_same_order():
    batches = Batches(torch.arange(61), 4, LENGTH, rank=1, world_size=3, seed=5)
    here = f"{[inputs_of(batches) for _ in range(2)]}\n"
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == here


def test_torchs_generator_is_left_alone():
    before = torch.get_rng_state()
    list(Batches(places(10), 4, LENGTH))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("steps", range(7))
def test_resumed_where_it_was_left(steps, world_size):
    """Epochs of 3 steps; left after none to 6, in the midst of a step, and resumed with another number of ranks."""
    whole = Batches(places(10), 4, LENGTH, seed=3)
    expected = [inputs for _ in range(3) for inputs, _ in whole][steps:]

    left, state = Batches(places(10), 4, LENGTH, seed=3), {"epoch": 0, "step": 0}
    for number in range(steps):
        next(iter(left))
        state = left.state_dict()
        assert state == {"epoch": (number + 1) // 3, "step": (number + 1) % 3}

    ranks = []
    for rank in range(world_size):
        resumed = Batches(places(10), 4, LENGTH, rank=rank, world_size=world_size, seed=3)
        resumed.load_state_dict(state)
        ranks.append([inputs for _ in range(resumed.epoch, 3) for inputs, _ in resumed])
    assert all(len(rank) == len(expected) for rank in ranks)
    for shares, inputs in zip(zip(*ranks, strict=True), expected, strict=True):
        assert torch.equal(torch.cat(shares), inputs)


def test_a_loop_left_early_goes_on_where_it_was():
    batches = Batches(places(10), 4, LENGTH)
    in_one_go = inputs_of(Batches(places(10), 4, LENGTH))
    assert [inputs.tolist() for inputs, _ in islice(batches, 2)] == in_one_go[:2]
    assert inputs_of(batches) == in_one_go[2:]


# Memory, and mistakes


def test_tokens_are_not_copied_and_batches_are():
    tokens = places(10)
    batches = Batches(tokens, 10, LENGTH)
    tokens += 1000
    [(inputs, targets)] = batches
    assert inputs.min() == 1000
    inputs.zero_()
    targets.zero_()
    assert torch.equal(tokens, places(10) + 1000)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"rank": 2, "world_size": 2}, "rank 2 of 2: expected a rank from 0 to 1"),
        ({"rank": -1, "world_size": 2}, "rank -1 of 2"),
        ({"batch_size": 0}, "batch_size 0 and length 3"),
        ({"length": 0}, "batch_size 4 and length 0"),
        ({"tokens": torch.arange(3)}, "3 tokens are 0 sequences of 3"),
        ({"tokens": torch.arange(0)}, "0 tokens are 0 sequences"),
        ({"batch_size": 11, "drop_last": True}, "10 sequences of 3.*smaller"),
    ],
)
def test_mistakes_are_named(arguments, says):
    with pytest.raises(ValueError, match=says):
        Batches(**{"tokens": places(10), "batch_size": 4, "length": LENGTH} | arguments)


def test_a_step_beyond_the_epoch_is_refused():
    batches = Batches(places(10), 4, LENGTH)
    with pytest.raises(ValueError, match="step 3 of epoch 1, but an epoch has 3 steps here: resume with"):
        batches.load_state_dict({"epoch": 1, "step": 3})
    assert batches.state_dict() == {"epoch": 0, "step": 0}
