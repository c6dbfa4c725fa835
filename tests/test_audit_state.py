"""ddpkit.audit.same_state: what is lost between saving and loading is named, and nothing else."""

import copy

import pytest
import torch
from torch import nn

from ddpkit.audit import same_state


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
        "1.running_mean: ×0",
        "1.num_batches_tracked: ×1.5",
    ]


@pytest.mark.parametrize(
    ("was", "now", "told"),
    [
        (torch.ones(2), torch.ones(2).double(), "torch.float64 (2,), was torch.float32 (2,)"),
        (torch.ones(2), torch.ones(3), "torch.float32 (3,), was torch.float32 (2,)"),
        (torch.ones(1), 1.0, "1.0, was tensor([1.])"),
        (20, 0, "0, was 20"),
        (1, True, "True, was 1"),
        (
            torch.tensor([1.0, torch.nan]),
            torch.tensor([2.0, torch.nan]),
            "×2",
        ),
        (torch.ones(2), torch.tensor([1.0, torch.nan]), "1 of 2 numbers are NaN or inf"),
        (torch.tensor(2.0), torch.tensor(1.0), "×0.5"),
        (torch.zeros(2), torch.ones(2), "no one factor, 2 of 2 numbers differ"),
    ],
)
def test_a_value_that_differs_is_told(was, now, told):
    assert same_state({"a": [was]}, {"a": [now]}) == [f"a.0: {told}"]
    assert same_state({"a": (was,)}, {"a": [was]}) == []


@pytest.mark.parametrize("value", [torch.tensor([1.0, torch.nan]), float("nan"), None, "text", {}])
def test_what_is_the_same_is_not_told(value):
    assert same_state({"a": value}, copy.deepcopy({"a": value})) == []


def test_what_is_missing_and_what_is_new():
    assert same_state({"a": 1, "b": {"c": 2}}, {"a": 1, "d": [3]}) == ["b.c: missing", "d.0: new"]
    assert same_state(1, 2) == ["2, was 1"]
