"""`python -m ddpkit.bench`: which there are, and the table they print. (What they measure is no test's business.)"""

import json

import pytest

from ddpkit import bench
from ddpkit.bench.__main__ import main


def test_an_unknown_benchmark_is_named_before_anything_runs():
    with pytest.raises(SystemExit, match=r"no benchmark is called 'lunch'; there are .*launch"):
        main(["launch", "lunch"])


def test_the_table_and_the_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "RESULTS", tmp_path / "results")
    bench.report(
        "some", [bench.Row("a wait", 0.5, 0.25, "s", [0.25]), bench.Row("too long a wait", 1, 2.0, "s", [2.0])]
    )
    assert capsys.readouterr().out.splitlines()[1:] == [
        "                 budget  measured  within?",
        "a wait            0.5 s    0.25 s      yes",
        "too long a wait     1 s       2 s       NO",
    ]
    results = json.loads((tmp_path / "results/some.json").read_text())
    assert [row["within"] for row in results["rows"]] == [True, False]
    assert results["machine"]["cores"]
