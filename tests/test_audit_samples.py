"""Which samples did a training use? Other ones are said, and can be replaced."""

from collections import Counter
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddpkit.audit import Tape, compare, same_training
from ddpkit.audit.causes import NO_MODULE, NOT_NAMED
from ddpkit.audit.samples import Samples, data_in, names_of, other_samples
from ddpkit.data_parallel import average_gradients

DATA = torch.arange(48.0).view(12, 4)
RANKS = 3


class Model(nn.Module):
    """Nobody outside sees the loss: inputs and targets are the model's inputs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)

    def forward(self, x, targets):
        return (self.layer(x).squeeze(1) - targets).square().mean()


def train(choose, steps=2):
    """Train with the rows that `choose` picks: (step, generator) to their numbers."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    for step in range(steps):
        rows = choose(step)
        optimizer.zero_grad()
        with torch.no_grad():
            model(DATA, DATA[:, 0])  # an evaluation, which isn't noted
        model(DATA[rows] / 48, targets=DATA[rows, 0]).backward()
        if dist.is_initialized() and dist.get_world_size() > 1:
            average_gradients(model)
        optimizer.step()


def all_rows(step):
    return torch.arange(6) + 6 * step


def my_rows(step):
    return all_rows(step).chunk(RANKS)[dist.get_rank()]


def first_rows(step):
    return all_rows(step)[:2]


def some_twice(step):
    return all_rows(step)[[0, 1 + dist.get_rank()]]


def said(choose):
    return same_training(lambda: train(all_rows), lambda: train(choose), RANKS, 2, sgd=False)


def test_the_same_samples_in_another_order_are_the_same():
    assert said(my_rows).fine


def test_samples_that_the_serial_run_lacks_decide_nothing():
    report = said(lambda step: my_rows(1 - step))
    assert report.undecided
    assert not report.fine
    told = str(report)
    assert told.startswith("whether it is the same training can't be told:")
    assert "6 samples together, the serial run 6; 6 of theirs aren't among its own" in told


def test_samples_that_nobody_deals_out_are_a_bug():
    report = said(first_rows)
    assert not report.undecided
    assert report.causes == ["all ranks used the same samples: no sampler deals them out"]
    report = said(some_twice)
    assert not report.undecided
    assert "6 samples together, the serial run 6, each of them among its own" in report.causes[0]


# One step's names


def names(*rows):
    return Counter({("shape", row): count for row, count in Counter(rows).items()})


@pytest.mark.parametrize(
    ("ranks", "says", "undecided"),
    [
        (["ab", "cd"], "", False),
        (["abcd", "abcd"], "", False),  # tensor parallelism
        (["abcd", ""], "", False),  # a pipeline: the second stage sees no data
        (["ab", "ab"], "all ranks used the same samples", False),
        (["ab", "bc"], "each of them among its own", False),
        (["abc", "bcd"], "6 samples together, the serial run 4, each", False),
        (["ab", "cx"], "1 of theirs aren't among its own", True),
        (["abcd", "efgh"], "both must use as many in a step", True),
    ],
)
def test_other_samples(ranks, says, undecided):
    told, unknown = other_samples(names(*"abcd"), [names(*rank) for rank in ranks])
    assert says in told
    assert bool(told) == bool(says)
    assert unknown == undecided


def test_rows_of_another_shape_cannot_be_compared():
    parts = Counter(names_of((DATA[:, :2],)))
    assert other_samples(Counter(names_of((DATA,))), [parts, parts]) == ("", False)


def test_a_row_has_a_name_of_all_its_tensors():
    one, two = names_of((DATA[:1], torch.zeros(1)))[0], names_of((DATA[:1], torch.ones(1)))[0]
    assert one != two
    assert one == names_of((DATA[:1].clone(), torch.zeros(1)))[0]
    empty = names_of((torch.zeros(2, 0),))
    assert len(empty) == 2
    assert names_of((torch.zeros(0, 3), torch.zeros(0))) == []


def test_data_are_tensors_without_gradient_and_of_one_length():
    x = torch.ones(3, 2, requires_grad=True)
    y = torch.zeros(3)
    assert data_in([x, "mean", y, torch.ones(()), torch.ones(5)]) == (y,)


def test_rows_in_lists_and_dicts_are_data():
    theirs = DATA[4:6], torch.arange(2)
    samples, losses = Samples(instead=[[theirs]] * 2), []
    args, kwargs = samples.of_call(0, ([DATA[:2], torch.zeros(2)], losses), {"use": None})
    (x, targets), kept = args
    assert x.equal(theirs[0])
    assert targets.equal(theirs[1])
    assert kept is losses  # a model may write into its caller's list
    assert kwargs == {"use": None}
    batch = {"x": DATA[:2], "y": torch.zeros(2), "n": 2}
    ((again,), _) = samples.of_call(1, (batch,), {})
    assert again["x"].equal(theirs[0])
    assert (again["n"], batch["y"].sum()) == (2, 0)
    assert samples.take()[0] == Counter(2 * names_of(theirs))
    one_each = Samples(instead=[[theirs]])
    rows = [*DATA[:2]]
    assert one_each.of_call(0, (rows,), {}) == ((rows,), {})
    assert not one_each.take()[0]


def test_samples_that_the_serial_run_gives_to_no_module_may_be_others():
    def train(rows):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Tanh())
        call = model.forward if dist.get_world_size() == 1 else model  # the first runs no hook
        call(DATA[rows] / 48).sum().backward()
        average_gradients(model)
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    report = same_training(lambda: train([1, 2]), lambda: train([3, 4]), 2, 1, sgd=False)
    assert report.undecided
    assert "the serial run called no module with them" in str(report)


# The ranks' samples, in the place of the serial run's own


def record(choose, samples):
    with Tape(2, samples=samples) as tape:
        train(choose)
    return tape


def drawn(seed):
    return lambda step: torch.randperm(12, generator=torch.Generator().manual_seed(seed + step))[:4]


def test_a_run_with_the_samples_of_another_is_that_run():
    theirs = record(drawn(0), Samples(keep=True))
    rows = [step.rows for step in theirs.steps]
    assert [len(calls) for calls in rows] == [1, 1]
    assert compare(record(drawn(5), None), [theirs]).undecided
    assert compare(record(drawn(5), Samples(instead=rows)), [theirs]).fine


def test_too_few_samples_are_said():
    theirs = record(lambda step: torch.arange(2), Samples(keep=True))
    rows = [step.rows for step in theirs.steps]
    with pytest.raises(
        ValueError, match=r"expected 4 samples or more in step 0 .* got 2: both must"
    ):
        record(drawn(0), Samples(instead=rows))


def compiled(forward, *inputs):
    return torch.compile(lambda: forward(*inputs), backend="eager")()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.compile looks at it
@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (lambda one, *_: 0 * one(DATA), "every gradient is 0, in every step: nothing is trained"),
        (lambda one, *_: compiled(one, DATA), NO_MODULE),
        (lambda one, two, _: one(DATA) + compiled(two, DATA), NOT_NAMED.format("2 tensors")),
        (lambda one, two, scale: scale * one(DATA), NOT_NAMED.format("1 tensor")),
    ],
)
def test_what_is_not_seen_proves_nothing(loss, says):
    parts = nn.Linear(4, 1), nn.Linear(4, 1), nn.ParameterList([torch.ones(())])
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]
    with Tape(1) as tape:
        loss(*parts[:2], *parts[2]).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    report = compare(tape, [tape])
    assert report.undecided
    assert report.causes == [says]


def test_copies_that_an_optimizer_steps_are_compared_by_what_they_are_copies_of():
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1))
    copy = model[0].weight.detach().clone().requires_grad_()
    optimizer = torch.optim.SGD([copy, model[0].bias, *model[1].parameters()], lr=0.1)
    with Tape(1) as tape:
        model(DATA).sum().backward()
        copy.grad = model[0].weight.grad.clone()
        optimizer.step()
    assert compare(tape, [tape]).fine


def test_what_a_checkpoint_computes_again_is_no_sample():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    again = partial(checkpoint, model[0], use_reentrant=False)
    tapes = []
    for first in (model[0], again):
        with Tape(2) as tape, patch.object(model, "forward", lambda x, f=first: model[1](f(x))):
            for _ in range(2):
                model(DATA).sum().backward()
                optimizer.step()
        tapes.append(tape)
    plain, checkpointed = ([step.samples for step in tape.steps] for tape in tapes)
    assert plain == checkpointed
