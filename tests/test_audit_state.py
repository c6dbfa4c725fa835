"""ddpkit.audit.same_state: what is lost between saving and loading is named, and nothing else."""

import copy

import numpy as np
import pytest
import torch
from torch import nn, tensor

from ddpkit.audit import same_state
from ddpkit.audit.state import ALL_ZERO, AT_ZERO, PART_ZERO

PARTS = 1 / torch.tensor([3.0, 7.0], dtype=torch.float64)
ORDER = " in another order: row {} has what was row {}"


def trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def test_what_was_loaded_is_what_was_saved(tmp_path):
    model, optimizer = trained()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x")
    loaded = torch.load(tmp_path / "x")
    assert same_state({"model": model, "optimizer": optimizer}, loaded) == []
    again, resumed = trained()
    again.load_state_dict(loaded["model"])
    resumed.load_state_dict(loaded["optimizer"])
    assert same_state(model, again) == []
    assert same_state(optimizer, resumed) == []


def test_an_optimizer_that_begins_anew_lacks_its_moments():
    model, optimizer = trained()
    fresh = torch.optim.AdamW(model.parameters(), lr=0.02)
    found = same_state(optimizer, fresh)
    assert "param_groups.0.lr: 0.02, was 0.01" in found
    assert "state.0.exp_avg: missing" in found
    assert len(found) == 1 + 3 * 6  # step and two moments of six parameters


def test_a_state_dict_that_is_not_copied_follows_what_is_live():
    model, _ = trained()
    live, kept = model.state_dict(), copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model[0].bias += 1
        model[0].weight[1] *= 2
        model[1].running_mean.zero_()
        model[1].num_batches_tracked += 1
    assert same_state(live, model) == []
    assert same_state(kept, model) == [
        "0.weight: row 1 of 4: ×2",
        "0.bias: no one factor, 4 of 4 numbers differ",
        f"1.running_mean: ×0 ({ALL_ZERO})",
        "1.num_batches_tracked: ×1.5",
    ]


@pytest.mark.parametrize(
    ("was", "now", "told"),
    [
        (torch.ones(2), torch.ones(2).double(), "torch.float64 (2,), was torch.float32 (2,)"),
        (torch.ones(2), torch.ones(3), "torch.float32 (3,), was torch.float32 (2,)"),
        (torch.ones(2), 1.0, "1.0, was tensor([1., 1.])"),
        (20, 10, "10, was 20"),
        (20, 0, f"0, was 20 ({AT_ZERO})"),
        (20.0, 0.0, "0.0, was 20.0"),
        (tensor(20.0), tensor(0.0), f"×0 ({AT_ZERO})"),
        (1, True, "True, was 1"),
        (True, False, "False, was True"),
        (float("nan"), 1.0, "1.0, was nan"),
        (np.ones(2), np.array([2.0, 2.0]), "×2"),
        (np.ones(4, dtype=np.uint32), np.zeros(4, dtype=np.uint32), f"×0 ({ALL_ZERO})"),
        (tensor([1.0, torch.nan]), tensor([2.0, torch.nan]), "×2"),
        (torch.ones(2), tensor([1.0, torch.nan]), "1 of 2 numbers are NaN or inf"),
        (tensor(2.0), tensor(1.0), "×0.5"),
        (torch.zeros(2), torch.ones(2), "no one factor, 2 of 2 numbers differ"),
        (torch.ones(3), tensor([1.0, 0, 0]), f"rows 1, 2 of 3: ×0 ({PART_ZERO})"),
        (torch.ones(3), tensor([2.0, 0, 0]), "rows 1, 2 of 3: ×0, no one factor for the others"),
        (torch.arange(4), tensor([0, 2, 1, 3]), "rows 1, 2 of 4" + ORDER.format(1, 2)),
        (tensor([5, 5, 7]), tensor([7, 5, 5]), "rows 0, 2 of 3" + ORDER.format(0, 2)),
        (tensor([5, 5, 7]), tensor([7, 7, 5]), "no one factor, 3 of 3 numbers differ"),
        (
            torch.arange(11),
            tensor([0, 1, 10, 2, 3, 4, 5, 6, 7, 8, 9]),
            "rows 2 to 10 of 11" + ORDER.format(2, 10) + ", as if sorted as words",
        ),
        (
            torch.arange(6).reshape(2, 3),
            tensor([[0, 2, 1], [3, 5, 4]]),
            "columns 1, 2 of 3 in another order: column 1 has what was column 2",
        ),
        (tensor([[1, 2], [3, 4]]), tensor([[1, 3], [2, 4]]), "transposed"),
        (tensor([1.001, 3.3]), tensor([1.0, 3.296875]), "rounded to bfloat16"),
        (tensor([1.1, 3.3]), tensor([1.1, 3.3]).half().float(), "rounded to float16"),
        (PARTS, PARTS.float().double(), "rounded to float32"),
        (tensor([1 + 2j, 3 - 1j]), tensor([3 - 1j, 1 + 2j]), "rows 0, 1 of 2" + ORDER.format(0, 1)),
        (
            tensor([1.0, 2]).to(torch.float8_e4m3fn),
            tensor([0.0, 0]).to(torch.float8_e4m3fn),
            f"×0 ({ALL_ZERO})",
        ),
    ],
)
def test_a_value_that_differs_is_told(was, now, told):
    assert same_state({"a": [was]}, {"a": [now]}) == [f"a.0: {told}"]
    assert same_state({"a": (was,)}, {"a": [was]}) == []


ARRAYS = np.array([1.0, np.nan]), np.arange(3, dtype=np.uint32)[::-1], np.array(["a", None])


@pytest.mark.parametrize(
    "value", [tensor([1.0, torch.nan]), float("nan"), None, "text", {}, ARRAYS]
)
def test_what_is_the_same_is_not_told(value):
    assert same_state({"a": value}, copy.deepcopy({"a": value})) == []


def test_a_cause_is_told_once():
    was = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2), "step": 3}
    now = {"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.tensor([1.0, 0]), "step": 0}
    assert same_state(was, now) == [
        f"a: ×0 ({ALL_ZERO})",
        "b: ×0",
        f"c: row 1 of 2: ×0 ({PART_ZERO})",
        f"step: 0, was 3 ({AT_ZERO})",
    ]


def test_what_is_missing_and_what_is_new():
    assert same_state({"a": 1, "b": {"c": 2}}, {"a": 1, "d": [3]}) == ["b.c: missing", "d.0: new"]
    assert same_state(1, 2) == ["2, was 1"]
