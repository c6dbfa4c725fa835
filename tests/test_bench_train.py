"""`python -m ddpkit.bench train`: PyTorch's ways and ours train alike. No test times."""

import json
from dataclasses import replace

from ddpkit.bench import results, train
from ddpkit.bench.results import AGAIN

SMALL = replace(train.MODEL, layers=2, width=32, heads=4, length=16, batch=4, text=__file__)


def test_ours_and_pytorchs_have_the_same_losses(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    found = train.measure(SMALL, rounds=1)
    names = [
        [train.TORCHS[one], ours, train.TORCHS[one] + AGAIN] for one, ours in train.OURS.items()
    ]
    assert [each.variant for each in found] == [one for case in names for one in case]
    assert all("Tokens/s" in each.columns for each in found)
    monkeypatch.setattr(train, "measure", lambda: found)
    train.main("train")
    assert len(json.loads((tmp_path / "train.json").read_text())["goals"]) == 3
