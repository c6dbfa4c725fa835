"""The audit in the museum: the twin sees every wrong training, and raises no false alarm."""

import dataclasses
from functools import partial

import pytest
import torch
import torch.distributed as dist
from exercises.test_museum import NUMBERS, RIGHT
from torch.distributed import init_device_mesh

from ddpkit import launch
from ddpkit.audit import Ledger, agree, budget, same_training
from ddpkit.exercises import museum
from ddpkit.exercises.museum_piece import SOUND

# Pieces that train a module with backward and step; {name: a line of the report}
OWN = "each rank has its own"
NONE = "no one factor"
TRAININGS = {
    "late_flag": OWN,
    "hook_averages": OWN,
    "last_one_only": OWN,
    "past_the_wrapper": OWN,
    "seeds_of_their_own": "the runs don't begin alike",
    "mean_of_means": "×2 for rank 0; ×1 for rank 1; ×0.667 for rank 2",
    "rows_of_all": "",
    "tied_twice": "first.weight: ×3, on every rank",
    "tied_averaged_twice": "",
    "sync_each": "",
    "weighted_by_samples": "×1.67 for micro-batch 0; ×0.833 for micro-batch 1, micro-batch 2",
    "phantom_scale": "all 4 tensors: ×1.526e-05",
    "zeroed_inside": "×0 for micro-batch 0, micro-batch 1, micro-batch 2; ×1 for micro-batch 3",
    "rescaled_each_time": "×0.111 for micro-batch 0; ×0.333 for micro-batch 1; ×1 for",
    "scaled_by_the_world": "×3: 3 ranks",
    "other_axis": "×0.25: 4 ranks",
    "divided_first": "",
    "replicated_bias": NONE,
    "bias_shared_out": "second.bias: ×0.3333, on every rank",
    "summed_bias": "",
    "sum_that_sums_again": "first.weight, first.bias, second.weight: ×3",
    "norm_of_my_tokens": "0.weight: ×0.25, each rank has its own",
    "optimizer_of_the_old": "look at the update",
    "undivided": "×3: 3 micro-batches: their losses aren't divided",
    "tied_ends": NONE,
    "shifted_after_the_cut": "21 samples together, the serial run 24",
    "shifted_before_the_cut": "",
    "zigzag_then_shifted": "other samples, targets or masks",
    "expert_gradients": "×3: 3 ranks",
}
PART = list(TRAININGS)[::6]  # of `make test`
NAMES = [
    pytest.param(name, marks=() if name in PART else (pytest.mark.slow,)) for name in TRAININGS
]


def on_a_mesh(train, case):
    if dist.get_world_size() == case.ranks and case.inner > 1:
        shape = case.ranks // case.inner, case.inner
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "inner"))
        case = dataclasses.replace(case, mesh=mesh)
    train(case)


def audited(name: str, mechanism: str):
    piece = museum.pieces()[name]
    alone = partial(on_a_mesh, piece.serial, piece.case)
    together = partial(on_a_mesh, piece.repaired(mechanism), piece.case)
    return same_training(alone, together, world_size=piece.case.ranks, steps=1, sgd=False)


@pytest.mark.parametrize("name", NAMES)
def test_the_twin_sees_what_is_wrong_and_nothing_else(name):
    report = audited(name, SOUND)
    assert report.fine == (RIGHT[name] == SOUND), report
    assert TRAININGS[name] in str(report)
    if RIGHT[name] != SOUND:
        assert audited(name, RIGHT[name]).fine


def all_reduces_of(train, case):
    train(case)


def test_the_budget_sees_calls_that_are_not_due():
    piece = museum.pieces()["f_three_times"]
    for mechanism, found in ((SOUND, 3), (RIGHT[piece.name], 1)):
        run = launch(all_reduces_of, piece.repaired(mechanism), piece.case, world_size=3)
        wrong = budget(run, {"all_reduce": 1, "broadcast": 6})
        assert wrong == ([f"rank {r}: 3 all_reduce, 1 due" for r in range(3)] if found > 1 else [])
    assert NUMBERS[piece.name] == 3


def orders(train, case):
    """Return what the ledger says of the piece's last epoch."""
    ledger = Ledger([])
    told = []
    for order in train(case)["orders"]:
        ledger.loader = [torch.tensor([sample]) for sample in order]
        list(ledger)
        told = ledger.audit(12 * case.ranks)
    return told


def test_the_ledger_sees_the_same_order_twice():
    piece = museum.pieces()["same_order"]
    wrong = launch(orders, piece.code, piece.case, world_size=3)[0]
    assert wrong == ["the same order as in an epoch before: does anybody call set_epoch?"]
    right = piece.repaired(RIGHT[piece.name])
    assert launch(orders, right, piece.case, world_size=3)[0] == []


def parameters_of(train, case):
    """Return what ranks disagree on of what the piece returns."""
    return agree(dict(train(case)))


DISAGREE = {"overflow_of_my_own": "first.weight: rank 1 differs", "norm_of_my_part": "norm: "}


@pytest.mark.parametrize("name", DISAGREE)
def test_agreement_of_ranks_sees_what_each_decides_alone(name):
    piece = museum.pieces()[name]
    found = launch(parameters_of, piece.code, piece.case, world_size=3)[0]
    assert found[0].startswith(DISAGREE[name]), found
    right = piece.repaired(RIGHT[name])
    assert launch(parameters_of, right, piece.case, world_size=3)[0] == []
