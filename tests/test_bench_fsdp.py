"""`python -m ddpkit.bench fsdp`: what it counts and says. No test times."""

import json
from functools import partial

from ddpkit.bench import fsdp, results, training
from ddpkit.bench.results import AGAIN

SMALL = {"linears": partial(training.linears, layers=3, width=8, rows=2)}


def test_all_end_alike_and_send_alike(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    found = fsdp.measure(SMALL, rounds=1)
    assert [each.variant for each in found] == [*fsdp.VARIANTS, fsdp.TORCH + AGAIN]
    columns = {each.variant: each.columns for each in found}
    assert len({each["Sent"] for each in columns.values()}) == 1
    assert float(columns[fsdp.PLAIN]["Peak"]) <= float(columns[fsdp.TORCH]["Peak"])
    monkeypatch.setattr(fsdp, "measure", lambda: found)
    fsdp.main("fsdp")
    assert len(json.loads((tmp_path / "fsdp.json").read_text())["goals"]) == 2
