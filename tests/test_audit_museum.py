"""The audit in the museum: the twin sees every wrong training, and raises no false alarm."""

import dataclasses
from functools import partial

import pytest
import torch
import torch.distributed as dist
from exercises.test_museum import NUMBERS, RIGHT
from torch.distributed import init_device_mesh

from ddpkit import launch
from ddpkit.audit import (
    Ledger,
    NotFinite,
    agree,
    budget,
    finite,
    same_state,
    same_training,
)
from ddpkit.audit.state import ALL_ZERO, AT_ZERO, PART_ZERO
from ddpkit.exercises import museum
from ddpkit.exercises.museum_piece import SOUND

# Pieces that train a module with backward and step; {name: a line of the report}
NOBODY = "each rank kept its own gradient, and their mean is right: nobody averages them"
NO_TERM = (
    "the serial gradient is no sum of these: other samples, targets or masks, or a missing term"
)
NO_MOVE = "update of {}: ×0, on every rank"
TRAININGS = {
    "late_flag": "micro-batch 0 is averaged; micro-batches 1, 2 stay on their rank: rank 0's "
    "gradient has 4 of the step's 6",
    "hook_averages": NOBODY,
    "last_one_only": "micro-batch 0 stays on its rank; micro-batch 1 is averaged",
    "past_the_wrapper": NOBODY,
    "seeds_of_their_own": "on rank 1, 2 only\n  the runs don't begin alike: other seeds",
    "mean_of_means": "×2 for rank 0; ×1 for rank 1; ×0.667 for rank 2",
    "rows_of_all": "",
    "tied_twice": "first.weight: ×3, on every rank",
    "tied_averaged_twice": "",
    "sync_each": "",
    "weighted_by_samples": "×1.67 for micro-batch 0; ×0.833 for micro-batch 1, micro-batch 2",
    "phantom_scale": "2^-16: a loss's scale",
    "zeroed_inside": "×0 for micro-batch 0, micro-batch 1, micro-batch 2; ×1 for micro-batch 3",
    "overflow_of_my_own": "after different numbers of backwards (1 on rank 0, 2; 2 on rank 1): "
    "each decides for itself whether to skip",
    "rescaled_each_time": "×0.111 for micro-batch 0; ×0.333 for micro-batch 1; ×1 for",
    "scaled_by_the_world": "×3: 3 ranks",
    "other_axis": "×0.25: 4 ranks",
    "rate_of_each_rank": "learning rate 0.07986 on rank 1, 0.06076 serially (×1.314)",
    "half_weights": NO_MOVE.format("weight"),
    "divided_first": "",
    "replicated_bias": "the first output that differs is that of second (Row): its bias is in it 3",
    "bias_shared_out": "second.bias: ×0.3333, on every rank",
    "summed_bias": "",
    "sum_that_sums_again": "first.weight, first.bias, second.weight: ×3",
    "norm_of_my_tokens": "their sum is right: nobody adds them",
    "optimizer_of_the_old": NO_MOVE.format("all 4 tensors"),
    "copied_counted_each": "all 3 tensors: ×0.7348",  # 13 / 17.7
    "norm_of_my_part": "×2.72 on rank 0; ×2.404 on rank 1; ×1.075 on rank 2",  # 13.6 / 5, ...
    "one_norm": "",
    "undivided": "×3: 3 micro-batches: their losses aren't divided",
    "tied_ends": "their sum is right: nobody adds them",
    "shifted_after_the_cut": "21 samples together, the serial run 24",
    "shifted_before_the_cut": "",
    "zigzag_then_shifted": "rows 6, 14, 24 of 25",
    "last_hops_keys": NO_TERM,
    "expert_gradients": "×3: 3 ranks",
    "shared_expert": "that of the model itself (Layer): the output of shared is in it 3 times",
    "orthogonal_shards": "weight: no one factor (length ×1, turned by 3",
    "fresh_optimizer": "step 1, update of weight: ×0.6667, on every rank",
}
STEPS = {"rate_of_each_rank": 2, "fresh_optimizer": 2}
FORWARD = "replicated_bias", "shared_expert"  # what is wrong there shows before backward
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
    return same_training(
        alone, together, world_size=piece.case.ranks, steps=STEPS.get(name, 1), sgd=False
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_twin_sees_what_is_wrong_and_nothing_else(name):
    report = audited(name, SOUND)
    assert report.fine == (RIGHT[name] == SOUND), report
    assert TRAININGS[name] in str(report)
    assert ("forward is off" in str(report)) == (name in FORWARD)
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
    assert wrong == ["epoch 2 has the order of epoch 0: who calls set_epoch?"]
    right = piece.repaired(RIGHT[piece.name])
    assert launch(orders, right, piece.case, world_size=3)[0] == []


def parameters_of(train, case):
    """Return what ranks disagree on of what the piece returns."""
    return agree(dict(train(case)))


DISAGREE = {"overflow_of_my_own": "steps: rank 1 differs", "norm_of_my_part": "norm: "}


@pytest.mark.parametrize("name", DISAGREE)
def test_agreement_of_ranks_sees_what_each_decides_alone(name):
    piece = museum.pieces()[name]
    found = launch(parameters_of, piece.code, piece.case, world_size=3)[0]
    assert found[0].startswith(DISAGREE[name]), found
    right = piece.repaired(RIGHT[name])
    assert launch(parameters_of, right, piece.case, world_size=3)[0] == []


# Saved and loaded, or live: {name: what the piece's dicts stand for, and what is said of them}
STATES = {
    "sorted_as_words": (
        ("experts", "experts"),
        "rows 2 to 11 of 12 in another order: row 2 has what was row 10, as if sorted as words",
    ),
    "half_of_the_experts": (("weight", "weight"), f"rows 2 to 7 of 8: ×0 ({PART_ZERO})"),
    "rebound_bias": (("live", "saved"), f"×0 ({ALL_ZERO})"),
    "latest_too_early": (("step", "step"), f"0, was 20 ({AT_ZERO})"),
}


def states_of(train, serial, case, names):
    """Return what the comparison of two states says: of the serial run's, and of the piece's."""
    was, now = names
    return same_state({"it": serial(case)[was]}, {"it": train(case)[now]})


@pytest.mark.parametrize("name", STATES)
def test_a_comparison_of_states_sees_what_is_lost_between_saving_and_loading(name):
    names, told = STATES[name]
    piece = museum.pieces()[name]
    sides = piece.serial, piece.case, names
    assert launch(states_of, piece.code, *sides, world_size=1)[0] == [f"it: {told}"]
    assert launch(states_of, piece.repaired(RIGHT[name]), *sides, world_size=1)[0] == []


def nan_of(train, case):
    """Return what `finite` says of a piece, whose modules nobody but itself has."""
    try:
        with finite():
            train(case)
    except NotFinite as error:
        return str(error)
    return ""


def test_the_first_nan_is_seen_in_its_module_and_call():
    piece = museum.pieces()["merged_by_powers"]
    told = launch(nan_of, piece.code, piece.case, world_size=1)[0]
    assert told.startswith("rank 0: the output of a module (Merge), call 89 has NaN; its inputs")
    assert NUMBERS[piece.name] == 89
    assert launch(nan_of, piece.repaired(RIGHT[piece.name]), piece.case, world_size=1)[0] == ""


def test_each_wrong_piece_is_seen_by_an_instrument():
    wrong = {name for name, answer in RIGHT.items() if answer != SOUND}
    others = {"f_three_times", "same_order", "merged_by_powers"}  # budget, ledger, finite
    assert wrong <= {*TRAININGS, *DISAGREE, *STATES, *others}
