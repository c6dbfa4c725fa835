"""ddpkit.audit.shares: sums of known gradients, whose weights must come back."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddpkit import launch
from ddpkit.audit import same_training
from ddpkit.audit.shares import kept, shares
from ddpkit.audit.tape import SOME, Step, Tape, some_of
from ddpkit.data_parallel import average_gradients

SHAPES = {"weight": (9, 30), "bias": (7,)}


def gradients(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def added(weights):
    """{name: sum of weight · gradient} of a list of weights, one a backward."""
    found = [gradients(seed) for seed in range(len(weights))]
    return {
        name: sum(w * one[name] for w, one in zip(weights, found, strict=True)) for name in SHAPES
    }


def steps_of(counts, number=1):
    """The step of each rank, with `number` micro-batches; `counts` are the weights of all."""
    steps = []
    for first in range(0, len(counts), number):
        each = map(gradients, range(first, first + number))
        parts = [{name: some_of(x) for name, x in found.items()} for found in each]
        steps.append(Step(gradients=added(counts), parts=parts))
    return steps


def told(counts, due, number=1, names=tuple(SHAPES)):
    """What is said of ranks of `number` micro-batches that count so, where `due` are right."""
    return shares(list(names), Step(gradients=added(due)), steps_of(counts, number))


def test_ranks_that_count_unequally_are_told_with_their_factors():
    said = told([1 / 3, 1 / 3, 1 / 3], [1 / 6, 1 / 3, 1 / 2])
    assert said == "ranks don't count alike: ×2 for rank 0; ×1 for rank 1; ×0.667 for rank 2"


def test_micro_batches_are_told_once_where_ranks_are_alike():
    said = told([1 / 8, 1 / 4, 1 / 2] * 2, [1 / 6] * 6, number=3)
    wanted = "×0.75 for micro-batch 0; ×1.5 for micro-batch 1; ×3 for micro-batch 2"
    assert said == f"micro-batches don't count alike: {wanted}"


def test_a_lost_micro_batch_counts_nothing():
    said = told([0.25, 0.25, 0.25, 0.0], [0.25] * 4, number=2)
    assert "×0 for micro-batch 1 of rank 1" in said
    assert "×1 for micro-batch 0, micro-batch 1 of rank 0" in said


def test_a_micro_batch_that_is_not_in_the_serial_run():
    assert "not in the serial run for rank 1" in told([0.5, 0.5], [1.0, 0.0])


@pytest.mark.parametrize(("which", "says"), [("ranks", "theirs isn't"), ("serial", "missing term")])
def test_what_is_no_sum_of_what_ranks_found_is_said(which, says):
    steps, serial = steps_of([0.5, 0.5]), Step(gradients=added([0.25, 0.75]))
    for step in steps if which == "ranks" else [serial]:
        step.gradients = gradients(99)
    assert says in shares(list(SHAPES), serial, steps)


def test_nothing_is_said_of_roundings():
    """As bfloat16's: too much for a sum of float32, too little for another term."""
    steps, serial = steps_of([0.5, 0.5]), Step(gradients=added([0.25, 0.75]))
    for name, x in gradients(99).items():
        serial.gradients[name] += 0.02 * x
    assert shares(list(SHAPES), serial, steps) == ""


def test_nothing_is_said_where_ranks_have_gradients_of_their_own():
    steps = steps_of([0.5, 0.5])
    steps[1].gradients = added([0.1, 0.9])
    assert shares(list(SHAPES), Step(gradients=added([0.25, 0.75])), steps) == ""


def test_nothing_is_said_where_nothing_can_be_told():
    assert told([0.5, 0.5], [0.25, 0.25]) == ""  # one factor: said elsewhere
    assert told([1.0], [0.5]) == ""  # one part
    assert told([0.5, 0.5], [0.25, 0.75], names=["unknown"]) == ""
    two_alike = steps_of([0.0, 0.5, 0.5])  # only the sum of their weights is known
    two_alike[0].parts = two_alike[1].parts
    assert shares(list(SHAPES), Step(gradients=added([0.0, 0.25, 0.75])), two_alike) == ""
    both_wrong = steps_of([0.5, 0.5])
    for step in both_wrong:
        step.gradients = gradients(98)
    assert shares(list(SHAPES), Step(gradients=gradients(99)), both_wrong) == ""
    lost = steps_of([0.5, 0.5])
    lost[0].gradients["bias"] = None
    assert shares(list(SHAPES), Step(gradients=added([0.25, 0.75])), lost) == ""


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_nothing_is_said_where_a_number_is_not_finite(number):
    serial, steps = Step(gradients=added([0.25, 0.75])), steps_of([0.5, 0.5])
    steps[0].parts[0]["bias"][0] = number
    assert shares(list(SHAPES), serial, steps) == kept(list(SHAPES), steps) == ""
    serial.gradients["bias"][0] = number
    assert shares(list(SHAPES), serial, steps_of([0.5, 0.5])) == ""


def kept_of(*counts):
    """What is said of two ranks of two micro-batches; `counts`: the weights of all, by rank."""
    steps = steps_of(counts[0], number=2)
    for step, of_rank in zip(steps, counts, strict=True):
        step.gradients = added(of_rank)
    return kept(list(SHAPES), steps)


def test_micro_batches_that_stay_on_their_rank_are_told():
    half = "rank 0's gradient has 3 of the step's 4"
    said = kept_of([0.5, 1.0, 0.5, 0.0], [0.5, 0.0, 0.5, 1.0])
    assert said == f"micro-batch 0 is averaged; micro-batch 1 stays on its rank: {half}"
    said = kept_of([0.0, 0.5, 0.0, 0.0], [0.0, 0.0, 0.0, 0.5])
    assert said.startswith("micro-batch 0 is lost; micro-batch 1 stays on its rank: rank 0's ")


def test_nothing_is_said_where_all_micro_batches_are_treated_alike_or_strangely():
    assert kept_of([0.5] * 4, [0.5] * 4) == ""
    assert kept_of([1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]) == ""  # said elsewhere
    assert kept_of([0.5, 0.3, 0.5, 0.0], [0.5, 0.3, 0.5, 1.0]) == ""
    steps = steps_of([0.5] * 4, number=2)
    steps[1].gradients = gradients(99)  # no sum of what the backwards found
    assert kept(list(SHAPES), steps) == ""
    assert kept(["unknown"], steps) == ""


def test_nothing_is_said_of_micro_batches_where_another_term_is_in_the_gradient():
    steps = steps_of([0.5, 1.0, 0.5, 0.0], number=2)
    steps[1].gradients = added([0.5, 0.0, 0.5, 1.0])
    assert kept(["weight"], steps).startswith("micro-batch 0 is averaged; micro-batch 1 stays")
    backwards = [part["weight"] for step in steps for part in step.parts]
    ones = torch.ones(len(backwards[0]), dtype=torch.float64)
    across = torch.linalg.qr(torch.stack([*backwards, ones], 1))[0][:, -1]
    looked_at = steps[1].gradients["weight"].flatten()[::4]  # a view, as `some_of` takes it
    looked_at += 0.1 * across.float()
    assert kept(["weight"], steps) == ""


def test_elements_are_a_copy_evenly_apart():
    x = torch.arange(10 * SOME, dtype=torch.float64)
    some = some_of(x)
    x.zero_()
    assert some.tolist() == [float(10 * place) for place in range(SOME)]
    assert SOME <= len(some_of(torch.ones(2 * SOME - 1))) < 2 * SOME
    assert some_of(torch.ones(())).tolist() == [1.0]


class Recomputed(nn.Sequential):
    """Its block's backward is one of its own, inside that of the loss."""

    def forward(self, x):
        return self[1](checkpoint(self[0], x.requires_grad_(), use_reentrant=True))


def mean_over_own_tokens(rank, world_size, right, kind=nn.Sequential):
    """Ranks have 2, 4, 6 rows; the wrong one takes each rank's mean, and the mean of means."""
    torch.manual_seed(0)
    model = kind(nn.Sequential(nn.Linear(6, 5), nn.Tanh()), nn.Linear(5, 3))
    x, y = torch.randn(12, 6), torch.randn(12, 3)
    rows = [slice(0, 2), slice(2, 6), slice(6, 12)]
    mine = rows[rank] if world_size > 1 else slice(None)
    loss = (model(x[mine]) - y[mine]).square().mean()
    weight = len(x[mine]) / 12 * world_size if right else 1.0
    (weight * loss).backward()
    if world_size > 1:
        average_gradients(model)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.parametrize("kind", [nn.Sequential, Recomputed])
@pytest.mark.parametrize("right", [True, False])
def test_a_training_whose_ranks_have_unequal_numbers(right, kind):
    def serial():
        mean_over_own_tokens(0, 1, True, kind)

    def parallel():
        mean_over_own_tokens(torch.distributed.get_rank(), 3, right, kind)

    report = same_training(serial, parallel, world_size=3)
    assert report.fine == right, report
    if not right:
        assert "×2 for rank 0; ×1 for rank 1; ×0.667 for rank 2" in str(report)


def test_the_tape_hears_a_gradient_before_it_is_averaged_and_leaves_no_hook():
    def on_rank():
        model = nn.Linear(2, 1, bias=False)
        nn.init.ones_(model.weight)
        handle = model.weight.register_post_accumulate_grad_hook(
            lambda p: torch.distributed.all_reduce(p.grad)
        )
        with Tape() as tape:
            rank = torch.distributed.get_rank()
            model(torch.full((1, 2), 10.0**rank)).sum().backward()
            torch.optim.SGD(model.parameters(), lr=0.5).step()
        handle.remove()
        (step,) = tape.steps
        hooks = model.weight._backward_hooks or {}
        return step.parts[0]["weight"].tolist(), step.gradients["weight"].tolist(), len(hooks)

    assert list(launch(on_rank, world_size=2)) == [
        ([1.0, 1.0], [[11.0, 11.0]], 0),
        ([10.0, 10.0], [[11.0, 11.0]], 0),
    ]
